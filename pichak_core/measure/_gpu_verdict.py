"""What is wrong with a GPU, from what NVML says of it. Pure.

Idle, and a power cap at full load, are how a healthy card works. A card that is held below what it
was sold for is not, and it is told by what it does (clock and draw against its limits and its
sisters), not by a bit alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from pichak_core.devices.gpu_identity import identity_doubt
from pichak_core.devices.gpu_join import TorchGpu
from pichak_core.devices.gpu_memory import foreign_memory
from pichak_core.devices.nvml import Gpu
from pichak_core.devices.nvml_codes import (
    FAULTY_REASONS,
    SW_POWER_CAP,
    VIRTUALISATION,
    throttle_names,
)
from pichak_core.measure._gpu_load import Loaded
from pichak_core.measurement import Unmeasured
from pichak_core.plan import Scalar

Severity = Literal["info", "warn", "fail"]

#: An enforced limit this far below the default was lowered, not rounded.
LIMIT_SHARE = 0.99
#: A busy card below both shares of its highest clock and its power limit is held back.
LOW_CLOCK_SHARE, LOW_DRAW_SHARE = 0.7, 0.7
#: A card this far below its sisters' median, in clock and in draw, is the odd one.
SISTER_CLOCK_SHARE, SISTER_DRAW_SHARE = 0.9, 0.85
#: Of the time under load; less than this is a blink.
THERMAL_SHARE = 0.05
#: A context of one's own is a few hundred MiB; more than this is somebody.
FOREIGN_BYTES = 2**30


@dataclass(frozen=True)
class Verdict:
    """Something to know about a GPU: a stable code, how bad it is, one sentence, its figures."""

    code: str
    severity: Severity
    sentence: str
    evidence: Mapping[str, Scalar] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "severity": self.severity,
            "sentence": self.sentence,
            "evidence": dict(self.evidence),
        }


def gpu_verdicts(
    gpu: Gpu,
    loaded: Loaded | None = None,
    by_torch: TorchGpu | None = None,
    own_bytes: int = 0,
) -> list[Verdict]:
    """Every verdict on one GPU. What was not measured judges nothing."""
    if gpu.lost is not None:
        return [Verdict("gpu_lost", "fail", f"the GPU is lost: {gpu.lost.detail}")]
    gone = [each.lost for each in loaded.readings if each.lost] if loaded else []
    if gone:
        return [Verdict("gpu_lost", "fail", f"the GPU was lost under load: {gone[0].detail}")]
    return [
        *_identity(gpu, by_torch),
        *_ecc(gpu),
        *_repairs(gpu),
        *_power_limit(gpu),
        *_throttle(gpu, loaded),
        *_held_back(gpu, loaded),
        *_link(gpu, loaded),
        *_licence(gpu),
        *_others(gpu, by_torch, own_bytes),
    ]


def _identity(gpu: Gpu, by_torch: TorchGpu | None) -> Iterator[Verdict]:
    doubt = identity_doubt(gpu, by_torch)
    if doubt:
        yield Verdict("gpu_identity", "fail", f"the GPU may not be what it says: {doubt}")


def _ecc(gpu: Gpu) -> Iterator[Verdict]:
    now, ever = gpu.number("ecc_uncorrected"), gpu.number("ecc_uncorrected_lifetime")
    if now:
        yield Verdict(
            "gpu_ecc",
            "fail",
            f"{_errors(now)} since the driver was loaded: results are wrong or jobs die",
            {"uncorrected": now},
        )
    elif ever:
        yield Verdict(
            "gpu_ecc_history",
            "info",
            f"{_errors(ever)} in the card's life, none since the driver was loaded",
            {"uncorrected_lifetime": ever},
        )


def _errors(count: float) -> str:
    return f"{count:,.0f} uncorrected memory error{'s' if count != 1 else ''}"


def _repairs(gpu: Gpu) -> Iterator[Verdict]:
    if gpu.flag("remapped_rows_failed"):
        yield Verdict(
            "gpu_repair_failed", "fail", "remapping a faulty memory row failed: replace the card"
        )
    pending = [n for n in ("remapped_rows_pending", "retired_pages_pending") if gpu.flag(n)]
    if pending:
        what = "row remapping" if "rows" in pending[0] else "page retirement"
        yield Verdict("gpu_repair_pending", "warn", f"a {what} waits for the card to be reset")


def _power_limit(gpu: Gpu) -> Iterator[Verdict]:
    limit, default = gpu.number("power_limit_watts"), gpu.number("power_limit_default_watts")
    if limit is not None and default and limit < LIMIT_SHARE * default:
        yield Verdict(
            "gpu_power_limit",
            "warn",
            f"the power limit in force is {limit:g} W, {100 * limit / default:.0f} % of the card's "
            f"default of {default:g} W",
            {"limit_watts": limit, "default_watts": default},
        )


def _throttle(gpu: Gpu, loaded: Loaded | None) -> Iterator[Verdict]:
    bits = loaded.bits() if loaded else None
    where = "under load"
    if bits is None:
        at_rest = gpu.number("throttle_bitmask")
        bits, where = (None if at_rest is None else int(at_rest)), "when it was read"
    faulty = (bits or 0) & FAULTY_REASONS
    if faulty:
        yield Verdict(
            "gpu_slowed",
            "warn",
            f"the card slowed itself down {where}: {', '.join(throttle_names(faulty))}",
            {"throttle_bitmask": int(bits or 0)},
        )
    thermal = loaded.growth("throttled_thermal_seconds") if loaded else None
    if loaded and thermal is not None and thermal > THERMAL_SHARE * loaded.seconds and not faulty:
        yield Verdict(
            "gpu_slowed",
            "warn",
            f"heat held the clocks down for {thermal:.1f} of {loaded.seconds:.1f} s under load",
            {"thermal_seconds": thermal, "load_seconds": loaded.seconds},
        )


def _held_back(gpu: Gpu, loaded: Loaded | None) -> Iterator[Verdict]:
    """Slow without being hot or at its power limit. At the limit, a low clock is what it does."""
    clock = loaded.middle("sm_clock_mhz") if loaded else None
    power = loaded.middle("power_watts") if loaded else None
    top, limit = gpu.number("sm_clock_max_mhz"), gpu.number("power_limit_watts")
    if loaded is None or clock is None or power is None or not top or not limit:
        return
    low = clock < LOW_CLOCK_SHARE * top and power < LOW_DRAW_SHARE * limit
    if low and not (loaded.bits() or 0) & FAULTY_REASONS:
        capped = " although a power cap is told" if (loaded.always() or 0) & SW_POWER_CAP else ""
        yield Verdict(
            "gpu_held_back",
            "warn",
            f"busy, it ran at {clock:.0f} of {top:.0f} MHz and drew {power:.0f} of {limit:.0f} "
            f"W{capped}: something holds it back",
            {"clock_mhz": clock, "clock_max_mhz": top, "watts": power, "limit_watts": limit},
        )


def _link(gpu: Gpu, loaded: Loaded | None) -> Iterator[Verdict]:
    """Under load only: an idle link trains down."""
    if loaded is None:
        return
    for field_name, word in (("pcie_width", "x"), ("pcie_generation", "generation ")):
        seen, top = loaded.values(field_name), gpu.number(f"{field_name}_max")
        if seen and top and max(seen) < top:
            yield Verdict(
                "gpu_link",
                "warn",
                f"under load the PCIe link ran at {word}{max(seen):.0f} of {word}{top:.0f}",
                {field_name: max(seen), f"{field_name}_max": top},
            )


def _licence(gpu: Gpu) -> Iterator[Verdict]:
    mode = gpu.number("virtualisation_mode")
    virtual = mode is not None and VIRTUALISATION.get(int(mode)) == "vGPU"
    if virtual and gpu.flag("vgpu_licensed") is False:
        yield Verdict(
            "gpu_unlicensed",
            "warn",
            "the vGPU holds no licence: the driver slows it down after a while",
        )


def _others(gpu: Gpu, by_torch: TorchGpu | None, own_bytes: int) -> Iterator[Verdict]:
    if by_torch is not None and by_torch.integrated:
        return
    held = foreign_memory(gpu, own_bytes)
    if isinstance(held, Unmeasured):
        return
    # Where the driver's reserve (up to about 1 GiB) is not told apart, it accuses nobody.
    if held.bytes >= FOREIGN_BYTES * (2 if held.upper_bound else 1):
        most = "up to " if held.upper_bound else ""
        yield Verdict(
            "gpu_shared_memory",
            "warn",
            f"other programs hold {most}{held.bytes / 2**30:.1f} GiB of the GPU's memory",
            {"bytes": held.bytes},
        )


@dataclass(frozen=True)
class Card:
    """One of several alike cards under the same load."""

    label: str
    clock_mhz: float | None
    power_watts: float | None


def sister_verdicts(cards: Sequence[Card]) -> list[Verdict]:
    """The cards that run slower *and* draw less than their sisters' median.

    Throttle bits do not count: a power cap at full load is normal, and all alike cards show it.
    Two cards that differ accuse neither.
    """
    known = [c for c in cards if c.clock_mhz is not None and c.power_watts is not None]
    if len(known) < 3:
        return []
    found: list[Verdict] = []
    for card in known:
        clock = median([c.clock_mhz or 0.0 for c in known if c is not card])
        draw = median([c.power_watts or 0.0 for c in known if c is not card])
        own_clock, own_draw = card.clock_mhz or 0.0, card.power_watts or 0.0
        if own_clock < SISTER_CLOCK_SHARE * clock and own_draw < SISTER_DRAW_SHARE * draw:
            found.append(
                Verdict(
                    "gpu_below_sisters",
                    "warn",
                    f"{card.label} ran at {own_clock:.0f} MHz and drew {own_draw:.0f} W where its "
                    f"sisters ran at {clock:.0f} MHz and drew {draw:.0f} W",
                    {
                        "clock_mhz": own_clock,
                        "watts": own_draw,
                        "sisters_clock_mhz": clock,
                        "sisters_watts": draw,
                    },
                )
            )
    return found
