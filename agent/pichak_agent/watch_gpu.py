"""What the readings say of a card's health: heat, limits, link, memory errors, its sisters. Pure.

Idle, a power cap at full load, and a link that trains down at rest are how a healthy card works.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from statistics import median

from pichak_agent.readings import GpuReading
from pichak_agent.watch import Key, Severity, Sign
from pichak_agent.watch_past import GpuSeen, Window, growth
from pichak_core.devices.nvml_codes import FAULTY_REASONS, IDLE, throttle_names

#: Fewer readings than this say nothing.
_FEWEST = 4
#: Of the readings: new, and for what is there already.
SLOWED_SHARE, STILL_SLOWED_SHARE = 0.5, 0.2
#: Of the time, by NVML's own count of the seconds in which heat held the clocks down.
HEAT_SHARE, STILL_HEAT_SHARE = 0.25, 0.05
#: A busy card: a kernel ran in so much of the time, or it draws so much of its limit.
BUSY_PERCENT, BUSY_POWER_SHARE = 50.0, 0.5
#: An enforced limit below this share of the default, or of what it was, was lowered.
LIMIT_SHARE = 0.97
#: Corrected memory errors in three minutes that are not the ordinary few.
CORRECTED_ERRORS = 10
#: Among three or more alike cards that do the same: the odd one's clock and draw.
SISTER_CLOCK_SHARE, SISTER_DRAW_SHARE = 0.9, 0.85
_SISTER_BUSY_PERCENT, _SISTER_MEMORY_SHARE = 90.0, 0.2


def slowed(window: Window, active: Container[Key]) -> Iterator[Sign]:
    """Heat or the hardware holds the clocks down: by the reasons' bits, or by the counter."""
    for key, seen in window.gpus.items():
        recent = window.recent(key, window.lasting_seconds)
        there = ("gpu_slowed", key) in active
        if not _lasts(window, recent, there=there):
            continue
        last = seen[-1].gpu
        read = [
            (each.gpu, int(bits))
            for each in recent
            if (bits := each.gpu.number("throttle_bitmask")) is not None
        ]
        faulty = [
            (gpu, b & FAULTY_REASONS) for gpu, b in read if b & FAULTY_REASONS and not b & IDLE
        ]
        share = len(faulty) / len(read) if read else 0.0
        heat = growth(_counts(recent, "throttled_thermal_seconds"))
        hot = faulty[-1][0] if faulty else last
        evidence = {
            **_times(recent),
            "share_of_readings": round(share, 3),
            "temperature_celsius": hot.number("temperature_celsius"),
            "sm_clock_mhz": hot.number("sm_clock_mhz"),
            "before_sm_clock_mhz": seen[0].gpu.number("sm_clock_mhz"),
        }
        if share >= (STILL_SLOWED_SHARE if there else SLOWED_SHARE):
            together = 0
            for _, bits in faulty:
                together |= bits
            yield _sign(
                "gpu_slowed",
                "warn",
                last,
                f"slowed itself down in {share:.0%} of the last {len(read)} readings: "
                f"{', '.join(throttle_names(together))}",
                {**evidence, "throttle_bitmask": together},
            )
        elif heat and (heat.rate > STILL_HEAT_SHARE if there else heat.lasts(HEAT_SHARE)):
            yield _sign(
                "gpu_slowed",
                "warn",
                last,
                f"heat held its clocks down in {heat.rate:.0%} of the last "
                f"{window.lasting_seconds:.0f} s",
                {**evidence, "share_of_time": round(heat.rate, 3)},
            )


def power_limit(window: Window, active: Container[Key]) -> Iterator[Sign]:  # noqa: ARG001
    """The limit in force is below the card's default, or below what it was when the watch began."""
    for key, seen in window.gpus.items():
        gpu = seen[-1].gpu
        limits = _facts(window, key, "power_limit_watts")
        default, limit = gpu.number("power_limit_default_watts"), gpu.number("power_limit_watts")
        # A laptop has no default and moves its limit: only one that stands still was set.
        if not limit or not default or len(limits) < 2 or len(set(limits)) > 1:
            continue
        first = window.first.get((key, "power_limit_watts"))
        evidence: dict[str, float | None] = {"limit_watts": limit, "default_watts": default}
        if first is not None and abs(limit / first.value - 1) > 1 - LIMIT_SHARE:
            word = "lowered" if limit < first.value else "raised"
            yield _sign(
                "gpu_power_limit_changed",
                "warn" if limit < first.value else "info",
                gpu,
                f"had its power limit {word} from {first.value:g} to {limit:g} W",
                {**evidence, "before_watts": first.value, "before_unix": first.at_unix},
                sure=True,
            )
        if limit < LIMIT_SHARE * default:
            yield _sign(
                "gpu_power_limit",
                "warn",
                gpu,
                f"has a power limit of {limit:g} W in force, {limit / default:.0%} of its default "
                f"of {default:g} W",
                evidence,
                sure=True,
            )


def link(window: Window, active: Container[Key]) -> Iterator[Sign]:
    """Busy all the time, the PCIe link never reached its generation or width."""
    for key in window.gpus:
        there = ("gpu_link", key) in active
        recent = window.recent(key, window.lasting_seconds)
        busy = [each for each in recent if _busy(each.gpu)]
        if not _lasts(window, recent, there=there) or len(busy) < max(_FEWEST, 0.8 * len(recent)):
            continue
        gpu = busy[-1].gpu
        for name, word in (("pcie_width", "x"), ("pcie_generation", "generation ")):
            top = gpu.number(f"{name}_max")
            now = [n for each in busy if (n := each.gpu.number(name)) is not None]
            if not top or len(now) < _FEWEST or max(now) >= top:
                continue
            before = [n for each in window.gpus[key] if (n := each.gpu.number(name)) is not None]
            yield _sign(
                "gpu_link",
                "warn",
                gpu,
                f"was busy for {window.lasting_seconds:.0f} s with its PCIe link at "
                f"{word}{max(now):g} of {word}{top:g}",
                {**_times(busy), name: max(now), f"{name}_max": top, f"before_{name}": before[0]},
            )
            break


def memory_errors(window: Window, active: Container[Key]) -> Iterator[Sign]:  # noqa: ARG001
    """Errors of the card's memory, and rows and pages that were replaced."""
    for key, seen in window.gpus.items():
        gpu = seen[-1].gpu
        errors, first = gpu.number("ecc_uncorrected"), window.first.get((key, "ecc_uncorrected"))
        if errors:
            grew = errors - first.value if first else 0
            more = f", {grew:,.0f} of them while it was watched" if grew else ""
            yield _sign(
                "gpu_ecc",
                "fail",
                gpu,
                f"counts {errors:,.0f} uncorrected memory error{'s' if errors != 1 else ''} since "
                f"its driver was loaded{more}",
                {"uncorrected": errors, **_before(window, key, "ecc_uncorrected")},
                sure=True,
            )
        yield from _corrected(window, key, gpu)
        for name, what in (("remapped_rows", "memory rows"), ("retired_pages", "memory pages")):
            parts = (f"{name}_corrected", f"{name}_uncorrected")
            firsts = [window.first.get((key, part)) for part in parts]
            grown = sum(
                (gpu.number(part) or 0) - was.value
                for part, was in zip(parts, firsts, strict=True)
                if was is not None
            )
            if grown > 0:
                yield _sign(
                    "gpu_rows_replaced",
                    "warn",
                    gpu,
                    f"had {grown:,.0f} faulty {what} replaced while it was watched",
                    {"replaced": grown, "before_unix": next(w.at_unix for w in firsts if w)},
                    sure=True,
                )
        if gpu.flag("remapped_rows_failed"):
            yield _sign(
                "gpu_repair_failed", "fail", gpu, "failed to replace a faulty memory row", sure=True
            )
        if gpu.flag("remapped_rows_pending") or gpu.flag("retired_pages_pending"):
            text = "waits for a reset to replace faulty memory"
            yield _sign("gpu_repair_pending", "warn", gpu, text, sure=True)


def sisters(window: Window, active: Container[Key]) -> Iterator[Sign]:  # noqa: ARG001
    """Of three or more alike cards that do the same, one is slower *and* draws less.

    The power cap's bit does not count: all of them show it at full load.
    """
    alike: dict[str, list[tuple[GpuReading, float, float, float]]] = {}
    for key in window.gpus:
        recent = window.recent(key, window.lasting_seconds)
        middles = [_middle(recent, n) for n in ("sm_clock_mhz", "power_watts", "memory_used_bytes")]
        use = _middle(recent, "utilisation_percent")
        if None in middles or use is None or use < _SISTER_BUSY_PERCENT or len(recent) < _FEWEST:
            continue
        gpu = recent[-1].gpu
        clock, draw, memory = (m or 0.0 for m in middles)
        alike.setdefault(str(gpu.facts.get("name", "")), []).append((gpu, clock, draw, memory))
    for cards in alike.values():
        if len(cards) < 3:
            continue
        for gpu, clock, draw, memory in cards:
            others = [card for card in cards if card[0] is not gpu]
            usual = [median(column) for column in list(zip(*others, strict=True))[1:]]
            same = abs(memory - usual[2]) <= _SISTER_MEMORY_SHARE * max(memory, usual[2])
            slow = clock < SISTER_CLOCK_SHARE * usual[0] and draw < SISTER_DRAW_SHARE * usual[1]
            if same and slow:
                yield _sign(
                    "gpu_below_sisters",
                    "warn",
                    gpu,
                    f"ran at {clock:.0f} MHz and drew {draw:.0f} W while its "
                    f"sisters ran at {usual[0]:.0f} MHz and drew {usual[1]:.0f} W",
                    {
                        "clock_mhz": clock,
                        "watts": draw,
                        "sisters_clock_mhz": usual[0],
                        "sisters_watts": usual[1],
                    },
                )


def _corrected(window: Window, key: str, gpu: GpuReading) -> Iterator[Sign]:
    counts = _facts(window, key, "ecc_corrected")
    grew = counts[-1] - counts[0] if counts else 0
    if grew >= CORRECTED_ERRORS:
        yield _sign(
            "gpu_ecc_growing",
            "warn",
            gpu,
            f"had {grew:,.0f} memory errors corrected within three minutes",
            {"before": counts[0], "after": counts[-1]},
        )


def _sign(
    code: str,
    severity: Severity,
    gpu: GpuReading,
    what: str,
    evidence: dict[str, float | None] | None = None,
    *,
    sure: bool = False,
) -> Sign:
    known = {name: value for name, value in (evidence or {}).items() if value is not None}
    return Sign(code, severity, gpu.key, f"{gpu.name} {what}", known, sure)


def _lasts(window: Window, recent: Sequence[GpuSeen], *, there: bool) -> bool:
    """Whether there are enough readings, over most of that time where it is new."""
    if len(recent) < _FEWEST:
        return False
    span = recent[-1].at.steady_seconds - recent[0].at.steady_seconds
    return there or span >= 0.5 * window.lasting_seconds


def _busy(gpu: GpuReading) -> bool:
    """By what NVML says of its use; where it does not say, by its draw. WSL2 says 0 for ever."""
    use = gpu.number("utilisation_percent")
    if use is not None:
        return use >= BUSY_PERCENT
    draw, limit = gpu.number("power_watts"), gpu.number("power_limit_watts")
    return draw is not None and bool(limit) and draw >= BUSY_POWER_SHARE * (limit or 0)


def _counts(recent: Sequence[GpuSeen], name: str) -> list[tuple[float, float]]:
    return [
        (each.at.steady_seconds, n) for each in recent if (n := each.gpu.number(name)) is not None
    ]


def _facts(window: Window, key: str, name: str) -> list[float]:
    """A fact of each full reading of the window."""
    found = [g.number(name) for r in window.full for g in r.gpus if g.key == key and not g.lost]
    return [value for value in found if value is not None]


def _before(window: Window, key: str, name: str) -> dict[str, float | None]:
    first = window.first.get((key, name))
    if first is None:
        return {}
    return {"before": first.value, "before_unix": first.at_unix}


def _middle(recent: Sequence[GpuSeen], name: str) -> float | None:
    values = [n for each in recent if (n := each.gpu.number(name)) is not None]
    return float(median(values)) if values else None


def _times(recent: Sequence[GpuSeen]) -> dict[str, float | None]:
    return {"from_unix": recent[0].at.at_unix, "to_unix": recent[-1].at.at_unix}
