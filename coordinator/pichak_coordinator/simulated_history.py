"""The history that a simulated fleet leaves: a watch's probes as they come, its events, a profile
of every host and a network test at the end. Every outcome in it says that it is simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pichak_coordinator.links import Pair, schedule
from pichak_coordinator.records import Row
from pichak_coordinator.schedule import Depth
from pichak_coordinator.simulated_rounds import (
    Clock,
    hello_of,
    put_network,
    put_probes,
    put_profile,
)
from pichak_coordinator.simulation import Simulation
from pichak_coordinator.watch_store import WatchStore
from pichak_core.measurement import Fingerprint

#: Probes of a watch that go into the store together, as one run.
_TOGETHER = 200
#: Up to so many hosts every link is tested, as `pick` wants it; of more a sample.
_ALL_PAIRS = 32


class History:
    """Takes what a simulation keeps; `end` writes the rest."""

    def __init__(self, store: WatchStore, clock: Clock, seed: int) -> None:
        self._store, self._clock, self._seed = store, clock, seed
        self._waiting: dict[Depth, dict[str, tuple[float, Sequence[Row]]]] = {}
        self._simulation: Simulation | None = None
        self.probes = 0

    def of(self, simulation: Simulation) -> None:
        """Take what this simulation keeps."""
        self._simulation = simulation
        simulation.keep = self.keep
        hosts = simulation.hosts.items()
        self._hellos = {node: hello_of(host, n) for n, (node, host) in enumerate(hosts, 1)}

    def keep(self, now: float, node: str, depth: Depth, rows: Sequence[Row]) -> None:
        """One probe; it is in the store at the latest when `end` returns."""
        waiting = self._waiting.setdefault(depth, {})
        if node in waiting or len(waiting) >= _TOGETHER:
            self._put(depth)
            waiting = self._waiting.setdefault(depth, {})
        waiting[node] = (now, rows)

    def _put(self, depth: Depth) -> None:
        assert self._simulation is not None  # noqa: S101 - `of` comes first
        waiting = self._waiting.pop(depth, {})
        if not waiting:
            return
        probes = []
        for node, (at, rows) in waiting.items():
            found: dict[str, Fingerprint] = {row.node.device: row.fingerprint for row in rows}
            probes.append((at, node, self._simulation.hosts[node], self._hellos[node], found))
        put_probes(self._store, self._clock, depth, probes)
        self.probes += len(probes)

    def end(self, say: Callable[[str], None]) -> dict[str, str]:
        """Whatever waits, the events, a profile and a network test; their runs."""
        made = self._simulation
        assert made is not None  # noqa: S101 - `of` comes first
        for depth in list(self._waiting):
            self._put(depth)
        hosts, end = made.fleet.hosts, made.end_unix
        silent = made.silent(end)
        self._clock.now = end
        self._store.tell([(event, False) for event in made.events])
        self._store.remember(made.watch.entries.values(), made.watch.memories)
        runs = {
            "profile": put_profile(
                self._store,
                hosts,
                self._clock,
                settings={"seed": self._seed, "days": made.days},
                silent=silent,
                seen=made.findings,
                say=lambda done: say(f"profile: {done} of {len(hosts)} hosts"),
            )
        }
        alive = [host for host in hosts if host.host not in silent]
        names = [host.host for host in alive]
        if len(set(names)) == len(names) > 1:
            say("network test")
            self._clock.now = end + 600.0
            pairs = None if len(alive) <= _ALL_PAIRS else _sampled(names, self._seed)
            runs["net"] = put_network(self._store, alive, self._clock, seed=self._seed, pairs=pairs)
        return runs


def _sampled(names: Sequence[str], seed: int) -> list[Pair]:
    return [pair for pairs in schedule(names, "auto", seed) for pair in pairs]
