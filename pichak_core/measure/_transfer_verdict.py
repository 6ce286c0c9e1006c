"""From measured copies to sentences. Pure: numbers in, words out.

MB is 10^6 bytes. A picture is of one GPU: a mean over a node's cards would hide the one in a slow
slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pichak_core.devices.nvml import Gpu
from pichak_core.measure._copies import Together
from pichak_core.measure._peaks import LANE_MB_S, link_mb_s
from pichak_core.measure._suspect import beyond
from pichak_core.plan import format_number

#: PCIe carries the same both ways; beyond this ratio something else is in between.
LOPSIDED_RATIO = 2.0
#: Pinned memory is copied straight from where it lies; where that gains less, no bus is waited for.
PINNING_GAINS = 1.1
#: Below this share of its link's ceiling a card's copies are worth a word.
LOW_SHARE = 0.5
#: With all cards at once, below this share of its own rate a card shares the way with others.
SHARED_RATIO = 0.8
#: NVML's virtualisation modes in which the guest's link need not be the one that bytes go through.
_GUEST_MODES = (1, 2)


@dataclass(frozen=True)
class Link:
    """A GPU's way to the host. `generation` and `width` are of PCIe under load, the others what
    card and slot can do; None where nobody says. `unified`: the GPU's memory is the host's.
    `coherent`: a chip-to-chip link carries the copies, not PCIe. `guest`: a virtual machine, which
    sees the link that its hypervisor shows."""

    generation: int | None = None
    width: int | None = None
    generation_max: int | None = None
    width_max: int | None = None
    unified: bool = False
    coherent: bool = False
    guest: bool = False

    @property
    def is_pcie(self) -> bool:
        return not (self.unified or self.coherent)

    @property
    def loaded_mb_s(self) -> float | None:
        """MB/s that the link carries as it ran under load."""
        return link_mb_s(self.generation, self.width) if self.is_pcie else None

    @property
    def most_mb_s(self) -> float | None:
        """MB/s that card and slot could carry at their best."""
        return link_mb_s(self.generation_max, self.width_max) if self.is_pcie else None

    def describe(self) -> str:
        """``PCIe 4.0 x16 under load (at most 5.0 x16)``."""
        if self.unified:
            return "memory shared with the system"
        if self.coherent:
            return "chip-to-chip link"
        if self.generation is None or self.width is None:
            return "PCIe, of unknown generation and width"
        text = f"PCIe {self.generation}.0 x{self.width} under load"
        most = (self.generation_max, self.width_max)
        if None not in most and most != (self.generation, self.width):
            text += f" (at most {most[0]}.0 x{most[1]})"
        return text


def link_of(
    loaded: Sequence[Gpu], gpu: Gpu | None, *, unified: bool = False, sampled: bool = True
) -> Link:
    """From NVML's readings during the copies, and the one from before them.

    An idle link trains down, so only `loaded` readings say at what it runs; without any, its
    generation and width are unknown.
    """

    def highest(name: str) -> int | None:
        values = [v for v in (reading.number(name) for reading in loaded) if v]
        return int(max(values)) if values and sampled else None

    def static(name: str) -> int | None:
        value = gpu.number(name) if gpu else None
        return int(value) if value else None

    mode = gpu.number("virtualisation_mode") if gpu else None
    return Link(
        highest("pcie_generation"),
        highest("pcie_width"),
        static("pcie_generation_max"),
        static("pcie_width_max"),
        unified,
        bool(gpu and gpu.values.get("c2c_enabled")),
        mode in _GUEST_MODES,
    )


@dataclass(frozen=True)
class Picture:
    """One GPU's copies at the large size, MB/s by path (`_copies.PATHS`, ``h2d_both`` and
    ``d2h_both`` for both directions at once), its link, and what all GPUs at once gave."""

    rates: Mapping[str, float]
    link: Link = field(default_factory=Link)
    together: Sequence[Together] = ()
    clocks: Sequence[str] = ()

    def rate(self, path: str) -> float | None:
        value = self.rates.get(path)
        return value if value and value > 0 else None

    @property
    def pinned(self) -> tuple[float, float] | None:
        """(to the GPU, from it), both measured."""
        up, down = self.rate("h2d_pinned"), self.rate("d2h_pinned")
        return None if up is None or down is None else (up, down)

    @property
    def best(self) -> float | None:
        """The faster direction, pinned: what the link is held against."""
        return max(
            (r for r in (self.rate("h2d_pinned"), self.rate("d2h_pinned")) if r), default=None
        )


def impossible(path: str, mb_s: float, link: Link) -> str:
    """Why a copy between host and device cannot be so fast; "" when it can.

    A guest's link is what its hypervisor shows, so nothing is impossible by it.
    """
    if path == "d2d" or link.guest:
        return ""
    what = f"a PCIe {link.generation_max}.0 x{link.width_max} link carries at most"
    return beyond(mb_s, link.most_mb_s, "MB/s", what)


def link_share(picture: Picture) -> float | None:
    """The faster direction over the ceiling of the link as it ran; None where that is unknown, or
    where the reading cannot have been of the link under load."""
    ceiling, best = picture.link.loaded_mb_s, picture.best
    if ceiling is None or best is None or best > 1.05 * ceiling:
        return None
    return best / ceiling


def sentences(picture: Picture) -> list[str]:
    """Everything that there is to say, the most telling first; may be empty."""
    return [text for rule in _RULES for text in rule(picture)]


def _unified(picture: Picture) -> Iterator[str]:
    if picture.link.unified:
        yield (
            "the GPU shares the system's memory: a copy moves bytes within one memory, over no "
            "link, and data need not be copied at all to be used by the GPU"
        )
    elif picture.link.coherent:
        yield "a chip-to-chip link carries the copies; PCIe's ceiling does not apply"


def _lanes(picture: Picture) -> Iterator[str]:
    link, best = picture.link, picture.best
    if not link.is_pcie:
        return
    if link.width == 1 and not link.guest:
        rate = "" if best is None else f": {format_number(best)} MB/s"
        yield f"the card runs on an x1 link{rate}"
    elif best is not None and link.width is None:
        lane = LANE_MB_S.get(link.generation or link.generation_max or 3, LANE_MB_S[3])
        if best <= lane:
            known = link.generation or link.generation_max
            which = f"PCIe {known}.0" if known else "PCIe 3.0"
            yield (
                f"{format_number(best)} MB/s is within the {format_number(lane)} MB/s of one "
                f"{which} lane: as slow as an x1 slot or riser"
            )
    if link.width and link.width_max and 1 < link.width < link.width_max:
        yield f"the link runs on {link.width} of {link.width_max} lanes under load"
    if link.generation and link.generation_max and link.generation < link.generation_max:
        yield (
            f"the link runs at PCIe {link.generation}.0 under load, and could at "
            f"{link.generation_max}.0"
        )


def _share(picture: Picture) -> Iterator[str]:
    share, ceiling, best = link_share(picture), picture.link.loaded_mb_s, picture.best
    if share is not None and share < LOW_SHARE and picture.link.width != 1:
        yield (
            f"the best copy reaches {share:.0%} of what its link carries "
            f"({picture.link.describe()}, {format_number(ceiling or 0)} MB/s)"
        )
    if ceiling is not None and best is not None and best > 1.05 * ceiling:
        who = (
            "the link that the hypervisor shows is not the one that the copies go through"
            if picture.link.guest
            else "the link was read while it idled"
        )
        yield f"copies are faster than {picture.link.describe()} carries: {who}"


def _lopsided(picture: Picture) -> Iterator[str]:
    """A note and no fault: healthy servers have it."""
    if not picture.link.is_pcie:
        return
    if picture.pinned is not None:
        up, down = picture.pinned
        if max(up, down) > LOPSIDED_RATIO * min(up, down):
            fast, slow = ("to", "from") if up > down else ("from", "to")
            yield (
                f"copies {fast} the GPU are {max(up, down) / min(up, down):.1f} times as fast as "
                f"those {slow} it ({format_number(up)} MB/s to it, {format_number(down)} from it): "
                "nothing about PCIe explains it, though healthy servers have been seen so"
            )


def _both_ways(picture: Picture) -> Iterator[str]:
    both = picture.rate("h2d_both"), picture.rate("d2h_both")
    if picture.pinned is None or both[0] is None or both[1] is None:
        return
    alone = sum(picture.pinned)
    yield (
        f"both directions at once: {format_number(both[0])} to the GPU and "
        f"{format_number(both[1])} MB/s from it, {(both[0] + both[1]) / alone:.0%} of what they "
        "give one after the other"
    )


def _pinning(picture: Picture) -> Iterator[str]:
    pinned, pageable = picture.rate("d2h_pinned"), picture.rate("d2h_pageable")
    if pinned is None or pageable is None or not picture.link.is_pcie:
        return
    if pinned < PINNING_GAINS * pageable:
        yield (
            f"pinned memory is copied from the GPU {pinned / pageable:.2f} times as fast as "
            "pageable memory: a fabric, not a bus, is in between"
        )


def _together(picture: Picture) -> Iterator[str]:
    for found in picture.together:
        ratio = min(found.ratios)
        way = "to" if found.direction == "h2d" else "from"
        many = len(found.devices)
        if ratio < SHARED_RATIO:
            rows = ", ".join(
                f"{device} {format_number(alone)} alone and {format_number(at_once)}"
                for device, alone, at_once in zip(
                    found.devices, found.alone_mb_s, found.together_mb_s, strict=True
                )
            )
            yield (
                f"copies {way} all {many} GPUs at once fall to {ratio:.0%} of a card's own rate: "
                f"a shared bus (MB/s: {rows})"
            )
        else:
            yield f"copies {way} all {many} GPUs at once keep {ratio:.0%} of a card's own rate"


def _clocks(picture: Picture) -> Iterator[str]:
    for text in picture.clocks:
        yield f"the clocks disagree: {text}"


_RULES: tuple[Callable[[Picture], Iterator[str]], ...] = (
    _unified,
    _lanes,
    _share,
    _lopsided,
    _pinning,
    _together,
    _both_ways,
    _clocks,
)
