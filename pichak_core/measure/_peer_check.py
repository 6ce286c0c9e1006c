"""Whether a copy from one GPU to another arrives: the owner of the memory reads it back.

A driver can say that two GPUs reach each other while an IOMMU or a hypervisor sends the bytes
nowhere: zeros arrive, nothing arrives, the writer reads its own pattern back, or the copy hangs. So
the word of the driver and of the writer count for nothing, and the check runs in a process that can
be ended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

#: Large enough to be cut into many transfers, small enough for any card.
WORDS = 4 * 2**20
_PATTERN_SEED, _OWN_SEED = 11, 22
_TIMED_COPIES = 8


@dataclass(frozen=True)
class PeerCopy:
    """What came of a copy from `source` to `target`.

    `verdict` is "works", "zeros", "unchanged" (the target still holds what its owner wrote),
    "mirrored" (the pattern backwards), "wrong", "hangs" or "fails"; `access` is what the driver
    says of direct access, None where it does not say. `writer_sees_it` tells whether the source
    reads its pattern back from the target. `detail` is for a person.
    """

    source: str
    target: str
    verdict: str
    mb_s: float | None = None
    access: bool | None = None
    writer_sees_it: bool | None = None
    detail: str = ""

    @property
    def works(self) -> bool:
        return self.verdict == "works"

    def describe(self) -> str:
        """One line."""
        text = f"{self.source} to {self.target}: {self.verdict}"
        if self.detail:
            text += f" ({self.detail})"
        if not self.works and self.access:
            text += ", though the driver says that they reach each other"
        if not self.works and self.writer_sees_it:
            text += ", though the writer reads its own pattern back"
        return text


class Pair(Protocol):
    """Memory of one device (`target`'s owner) that another (`source`) writes."""

    source: str
    target: str

    def access(self) -> bool | None: ...

    def owner_writes(self, words: torch.Tensor) -> None: ...

    def owner_reads(self) -> torch.Tensor: ...

    def source_holds(self, words: torch.Tensor) -> None: ...

    def copy(self) -> None:
        """Source to target, and wait for both."""

    def writer_reads(self) -> torch.Tensor: ...


class DevicePair:
    """Two torch devices; ``cpu`` twice is plain memory."""

    def __init__(self, source: str, target: str, words: int) -> None:
        import torch

        self.source, self.target = source, target
        self._from = torch.zeros(words, dtype=torch.int32, device=source)
        self._to = torch.zeros(words, dtype=torch.int32, device=target)

    def access(self) -> bool | None:
        import torch

        if not self.source.startswith("cuda"):
            return None
        numbers = [int(name.partition(":")[2]) for name in (self.target, self.source)]
        return bool(torch.cuda.can_device_access_peer(*numbers))

    def owner_writes(self, words: torch.Tensor) -> None:
        self._to.copy_(words)
        self._wait()

    def owner_reads(self) -> torch.Tensor:
        # On the owner's own stream, to host memory: nothing of the source takes part.
        return self._to.cpu().clone()

    def source_holds(self, words: torch.Tensor) -> None:
        self._from.copy_(words)
        self._wait()

    def copy(self) -> None:
        self._to.copy_(self._from)
        self._wait()

    def writer_reads(self) -> torch.Tensor:
        import torch

        back = torch.zeros_like(self._from)
        back.copy_(self._to)
        self._wait()
        return back.cpu()

    def _wait(self) -> None:
        import torch

        for name in {self.source, self.target}:
            if name.startswith("cuda"):
                torch.cuda.synchronize(name)


def check(
    pair: Pair, words: int = WORDS, clock: Callable[[], float] = time.perf_counter
) -> PeerCopy:
    """Write, copy, read back at the owner; a rate only where the pattern arrived."""
    import torch

    from pichak_core.measure._mover import WORD, fill

    sent = torch.empty(words, dtype=torch.int32)
    fill(sent, _PATTERN_SEED)
    own = torch.empty_like(sent)
    fill(own, _OWN_SEED)
    pair.source_holds(sent)
    pair.owner_writes(own)
    pair.copy()
    seen = pair.owner_reads()
    verdict, detail = classify(seen, sent, own)
    if verdict != "works":
        writer = bool(torch.equal(pair.writer_reads(), sent))
        return PeerCopy(pair.source, pair.target, verdict, None, pair.access(), writer, detail)
    rates = []
    for number in range(_TIMED_COPIES):
        fill(sent, _PATTERN_SEED + number + 1)
        pair.source_holds(sent)
        begun = clock()
        pair.copy()
        rates.append(words * WORD / max(clock() - begun, 1e-9) / 1e6)
        if not torch.equal(pair.owner_reads(), sent):
            detail = f"copy {number + 2} arrived wrong"
            return PeerCopy(pair.source, pair.target, "wrong", None, pair.access(), None, detail)
    rate = sorted(rates[1:])[len(rates[1:]) // 2]
    return PeerCopy(pair.source, pair.target, "works", rate, pair.access())


def classify(seen: torch.Tensor, sent: torch.Tensor, own: torch.Tensor) -> tuple[str, str]:
    """(verdict, detail) from what the owner sees, what was sent and what the owner had written."""
    import torch

    if torch.equal(seen, sent):
        return "works", ""
    if not bool(seen.any()):
        return "zeros", "the owner reads zeros"
    if torch.equal(seen, own):
        return "unchanged", "the owner still reads what it had written itself"
    if torch.equal(seen, sent.flip(0)):
        return "mirrored", "the owner reads the pattern backwards"
    wrong = int((seen != sent).sum())
    first = int((seen != sent).nonzero()[0])
    return "wrong", f"{wrong:,} of {seen.numel():,} words are wrong, the first is word {first:,}"


def check_all(
    pairs: Sequence[tuple[str, str]], words: int = WORDS, make: Callable[..., Pair] = DevicePair
) -> Iterator[PeerCopy]:
    """Each pair in turn; a device error costs its own pair and ends the rest, for the context is
    then unusable."""
    for source, target in pairs:
        try:
            yield check(make(source, target, words), words)
        except RuntimeError as error:
            yield PeerCopy(source, target, "fails", detail=str(error).splitlines()[0][:300])
            return


def to_wire(found: PeerCopy) -> dict[str, Any]:
    return dict(vars(found))


def from_wire(record: dict[str, Any]) -> PeerCopy:
    return PeerCopy(**record)


def main(arguments: Sequence[str]) -> None:
    """The child's entry: a JSON list of pairs and a number of words in, a JSON line a pair out."""
    pairs = [(str(source), str(target)) for source, target in json.loads(arguments[0])]
    for found in check_all(pairs, int(arguments[1])):
        os.write(sys.stdout.fileno(), json.dumps(to_wire(found)).encode() + b"\n")
