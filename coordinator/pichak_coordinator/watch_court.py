"""A watch's judgement as it runs: the latest reading of every device, what is held against each,
and what a probe's rows mean beside them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pichak_coordinator.records import Row
from pichak_coordinator.watch_events import Event, judge_probe
from pichak_coordinator.watch_memory import Memory
from pichak_coordinator.watch_peers import Ident, ident
from pichak_coordinator.watch_store import WatchStore
from pichak_core.measurement import Fingerprint, Measurement


@dataclass
class Sentence:
    """What a probe's rows came to. `fresh`: something is suspected that was not before, to be
    looked at again; `restless` and `noise` as in `Judgement`, of the worst row."""

    events: list[Event] = field(default_factory=list)
    memories: dict[Ident, Memory] = field(default_factory=dict)
    fresh: bool = False
    restless: bool = False
    noise: float | None = None


class Court:
    """Judges rows; what it finds is in the store. `memory` is each device's."""

    def __init__(self, store: WatchStore) -> None:
        self._store = store
        self._latest: dict[Ident, Row] = {}
        self._memories: dict[Ident, Memory] = {}
        self._round: dict[str, tuple[str, list[Row]]] = {}

    def memory(self, key: Ident) -> Memory:
        """What is remembered of a device."""
        if key not in self._memories:
            self._memories[key] = self._store.memory(*key)
        return self._memories[key]

    def keep(self, memories: Mapping[Ident, Memory]) -> None:
        """These are in the store now."""
        self._memories.update(memories)

    def remember(self, row: Row) -> None:
        """The latest of each reading: what one probe could not read keeps its last good value."""
        old = self._latest.pop(ident(row.node), None)  # the newest is at the end
        if old is not None:
            fingerprint = Fingerprint(old.fingerprint)
            for reading in row.fingerprint.values():
                if isinstance(reading, Measurement) or reading.name not in fingerprint:
                    fingerprint.add(reading)
            row = replace(
                row,
                fingerprint=fingerprint,
                plan=row.plan or old.plan,
                ramp=row.ramp or old.ramp,
            )
        self._latest[ident(row.node)] = row

    def probed(self, node: str, run: str, rows: Sequence[Row]) -> None:
        """A node's latest rows of this round, none when it gave none."""
        self._round[node] = (run, list(rows))

    def judge(self, run: str, rows: Sequence[Row], here: Collection[str]) -> Sentence:
        """Against the latest rows of the devices of the nodes that are `here`."""
        history = self._store.earlier_values(run, rows)
        judged = judge_probe(rows, self._peers(here), self._memories_of(rows), history)
        sentence = Sentence()
        for each in judged:
            key = ident(each.row.node)
            new = [f for f in each.memory.findings if f not in each.row.findings]
            self._store.record_findings(run, *each.row.key, new)
            self.remember(each.row)
            sentence.events += each.events
            sentence.memories[key] = each.memory
            sentence.fresh |= each.fresh
            sentence.restless |= each.restless
        noises = [each.noise for each in judged if each.noise is not None]
        sentence.noise = max(noises, default=None)
        return sentence

    def judge_round(self, here: Collection[str]) -> Iterable[tuple[str, Sentence]]:
        """The round's rows once more, node by node, now that all of its peers are known: the first
        nodes of a new fleet had none. What that shows is suspected, and looked at again; nodes of
        which it shows nothing new are left out."""
        peers = self._peers(here)
        ended, self._round = self._round, {}
        for node, (run, rows) in ended.items():
            sentence = Sentence(memories=self._memories_of(rows), fresh=True)
            for each in judge_probe(rows, peers, sentence.memories, {}):
                key = ident(each.row.node)
                old = sentence.memories[key].findings
                known = {finding.key for finding in old}
                new = [
                    f
                    for f in each.memory.findings
                    if f.key not in known and f.state == "suspected" and f.severity != "info"
                ]
                if new:
                    sentence.memories[key] = replace(sentence.memories[key], findings=(*old, *new))
                    self._store.record_findings(run, *each.row.key, new)
                    told = [f.as_dict() for f in new]
                    sentence.events += [e for e in each.events if e.get("finding") in told]
            if sentence.events:
                yield node, sentence

    def _peers(self, here: Collection[str]) -> list[Row]:
        return [row for (node, _), row in self._latest.items() if node in here]

    def _memories_of(self, rows: Sequence[Row]) -> dict[Ident, Memory]:
        return {ident(row.node): self.memory(ident(row.node)) for row in rows}
