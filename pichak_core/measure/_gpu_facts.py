"""What NVML says of one GPU, as readings of metrics. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pichak_core.devices.gpu_join import TorchGpu
from pichak_core.devices.gpu_memory import (
    DeviceMemory,
    device_memory,
    foreign_memory,
    nvml_memory,
)
from pichak_core.devices.nvml import Gpu, Peer
from pichak_core.devices.nvml_codes import IDLE, throttle_names
from pichak_core.measure import Metric
from pichak_core.measure._gpu_load import Loaded
from pichak_core.measure._gpu_verdict import Verdict
from pichak_core.measurement import Measurement, Reading, Reason, Unmeasured, median_and_spread

VERDICT = Metric("gpu.state_verdict", "", "what is wrong with the GPU itself")
THROTTLE = Metric("gpu.throttle_reasons", "", "what limited the clocks under load")
CLOCK = Metric("gpu.sm_clock_load_mhz", "MHz", "SM clock under load")
CLOCK_MAX = Metric("gpu.sm_clock_max_mhz", "MHz", "the highest SM clock of the part")
POWER = Metric("gpu.power_load_watts", "W", "power drawn under load")
TEMPERATURE = Metric("gpu.temperature_load_celsius", "°C", "hottest under load")
PEERS = Metric("gpu.peer_access", "", "which other GPUs' memory it reaches, by NVML's word")
SISTERS = Metric("gpu.sister_cards", "", "the alike cards of this machine, under the same load")
TOTAL = Metric("gpu.memory_total_mib", "MiB", "the GPU's memory")
FREE = Metric("gpu.memory_free_mib", "MiB", "memory of the GPU that nobody holds")
OTHERS = Metric("gpu.memory_others_mib", "MiB", "memory of the GPU that other programs hold")

#: Share of the load in which a limit was at work: metric -> NVML's counter.
SHARES = {
    Metric(f"gpu.throttled_{name}_percent", "%", f"share of the load held down by {what}"): (
        f"throttled_{name}_seconds"
    )
    for name, what in (
        ("power", "the power cap"),
        ("thermal", "heat"),
        ("sync_boost", "another GPU of its sync group"),
        ("board_limit", "the board's limit"),
        ("reliability", "voltage reliability"),
    )
}

_ONE_FIELD = {
    CLOCK_MAX: "sm_clock_max_mhz",
    Metric("gpu.power_limit_watts", "W", "the power limit in force"): "power_limit_watts",
    Metric(
        "gpu.power_limit_default_watts", "W", "the power limit that the card was sold with"
    ): "power_limit_default_watts",
    Metric(
        "gpu.power_limit_max_watts", "W", "the highest power limit that can be set"
    ): "power_limit_max_watts",
    Metric("gpu.ecc_mode", "", "error correction"): "ecc_mode",
    Metric("gpu.ecc_corrected", "", "errors corrected since the driver was loaded"): (
        "ecc_corrected"
    ),
    Metric("gpu.ecc_uncorrected", "", "errors not corrected since then"): "ecc_uncorrected",
    Metric("gpu.ecc_corrected_lifetime", "", "errors corrected in the card's life"): (
        "ecc_corrected_lifetime"
    ),
    Metric("gpu.ecc_uncorrected_lifetime", "", "errors not corrected in its life"): (
        "ecc_uncorrected_lifetime"
    ),
    Metric("gpu.persistence_mode", "", "whether the driver keeps the card initialised"): (
        "persistence_mode"
    ),
    Metric("gpu.mig_mode", "", "whether the card is cut into MIG devices"): "mig_mode",
}
RETIRED = Metric("gpu.retired_pages", "", "memory pages taken out of use")
REMAPPED = Metric("gpu.remapped_rows", "", "memory rows replaced by spare ones")
REPAIR = Metric("gpu.repair_pending", "", "whether a memory repair waits for a reset")

_ON_OFF = {True: "on", False: "off"}

METRICS: tuple[Metric, ...] = (
    VERDICT,
    THROTTLE,
    *SHARES,
    CLOCK,
    POWER,
    TEMPERATURE,
    *_ONE_FIELD,
    RETIRED,
    REMAPPED,
    REPAIR,
    PEERS,
    SISTERS,
    TOTAL,
    FREE,
    OTHERS,
)


def state_readings(gpu: Gpu, loaded: Loaded | Unmeasured) -> Iterable[Reading]:
    """Everything about the card's state; what needs a load has the reason why there was none."""
    yield throttle_reading(gpu, loaded)
    for metric, counter in SHARES.items():
        yield _share(metric, gpu, counter, loaded)
    yield _under_load(CLOCK, gpu, "sm_clock_mhz", loaded)
    yield _under_load(POWER, gpu, "power_watts", loaded)
    yield _under_load(TEMPERATURE, gpu, "temperature_celsius", loaded, highest=True)
    for metric, name in _ONE_FIELD.items():
        yield _field(metric, gpu, name)
    yield _sum(RETIRED, gpu, "retired_pages_corrected", "retired_pages_uncorrected")
    yield _sum(REMAPPED, gpu, "remapped_rows_corrected", "remapped_rows_uncorrected")
    yield _repair(gpu)


def memory_readings(
    gpu: Gpu | Unmeasured,
    by_torch: TorchGpu | None,
    available_bytes: int | None,
    own_bytes: int | None,
) -> Iterable[Reading]:
    """Total, free and what others hold. On a part that shares the system's memory free is
    MemAvailable, and nobody's share can be told. `own_bytes` None: own and others not apart."""
    found = (
        device_memory(by_torch, gpu, available_bytes) if by_torch is not None else nvml_memory(gpu)
    )
    if isinstance(found, DeviceMemory):
        yield Measurement(TOTAL.name, found.total_bytes / 2**20, TOTAL.unit, found.source)
        yield Measurement(FREE.name, found.free_bytes / 2**20, FREE.unit, found.source)
    else:
        yield Unmeasured(TOTAL.name, found.reason, found.detail)
        yield Unmeasured(FREE.name, found.reason, found.detail)
    if isinstance(found, DeviceMemory) and found.unified:
        detail = "on memory shared with the system the GPU's part cannot be told from the rest"
        yield Unmeasured(OTHERS.name, Reason.NOT_SUPPORTED, detail)
        return
    held = foreign_memory(gpu, own_bytes or 0)
    if isinstance(held, Unmeasured):
        yield Unmeasured(OTHERS.name, held.reason, held.detail)
        return
    source = held.source
    if own_bytes is not None:
        source += "; a context of this process outside its allocator is in it"
    yield Measurement(OTHERS.name, held.bytes / 2**20, OTHERS.unit, source)


def verdict_reading(verdicts: Sequence[Verdict], looked_at: str) -> Measurement:
    """The verdicts' codes as one reading, with their sentences in its detail; `looked_at`
    completes "from NVML …". Codes stay the same from run to run, the figures do not."""
    value = ", ".join(dict.fromkeys(each.code for each in verdicts)) or "nothing found"
    return Measurement(
        VERDICT.name,
        value,
        "",
        f"from NVML {looked_at}",
        detail={"findings": [each.as_dict() for each in verdicts]},
    )


def peer_reading(gpu: Gpu, peers: Sequence[Peer], count: int) -> Reading:
    """Which others this GPU reaches; the word of the driver, not a copy that was checked."""
    own = [peer for peer in peers if gpu.index in (peer.first, peer.second)]
    if count < 2:
        return Unmeasured(PEERS.name, Reason.NO_DEVICE, "there is no other GPU here")
    if not own:
        return Unmeasured(PEERS.name, Reason.NOT_SUPPORTED, "NVML was not able to tell")
    answers: dict[str, list[str]] = {}
    for peer in own:
        if isinstance(peer.read, Unmeasured):
            return Unmeasured(PEERS.name, peer.read.reason, peer.read.detail)
        other = peer.second if peer.first == gpu.index else peer.first
        answers.setdefault(peer.read, []).append(str(other))
    value = "; ".join(f"{word} with {', '.join(others)}" for word, others in answers.items())
    return Measurement(PEERS.name, value, "", "NVML's peer status; GPUs by NVML's numbers")


def throttle_reading(gpu: Gpu, loaded: Loaded | Unmeasured) -> Reading:
    """The reasons by name, under load where there was one; the counters of all time beside it."""
    bits = loaded.bits() if isinstance(loaded, Loaded) else None
    if bits is not None:
        bits &= ~IDLE  # between two products the card is idle for a blink
    source = f"all reasons seen in {_seconds(loaded)} of load"
    if bits is None:
        at_rest = gpu.get("throttle_bitmask")
        if isinstance(at_rest, Unmeasured):
            return Unmeasured(THROTTLE.name, at_rest.reason, at_rest.detail)
        bits, source = int(at_rest), "one reading, not under load"
    ever = {
        f"{name}_seconds": round(seconds, 3)
        for name, counter in ((m.name.split("_", 1)[1][:-8], c) for m, c in SHARES.items())
        if (seconds := gpu.number(counter)) is not None
    }
    if ever:
        source += "; behind it, seconds since the driver was loaded"
    value = ", ".join(throttle_names(bits)) or "none"
    return Measurement(THROTTLE.name, value, "", source, detail={"bitmask": bits, **ever})


def _seconds(loaded: Loaded | Unmeasured) -> str:
    return f"{loaded.seconds:.1f} s" if isinstance(loaded, Loaded) else ""


def _share(metric: Metric, gpu: Gpu, counter: str, loaded: Loaded | Unmeasured) -> Reading:
    if isinstance(gpu.get(counter), Unmeasured):
        return _field(metric, gpu, counter)
    if isinstance(loaded, Unmeasured):
        return Unmeasured(metric.name, loaded.reason, loaded.detail)
    grown = loaded.growth(counter)
    if grown is None:
        return Unmeasured(metric.name, Reason.FAILED, "the counter was set back under load")
    share = min(100.0, 100.0 * grown / loaded.seconds)
    source = f"growth of NVML's counter by {grown:.2f} s in {loaded.seconds:.1f} s of load"
    return Measurement(metric.name, round(share, 1), metric.unit, source)


def _under_load(
    metric: Metric, gpu: Gpu, name: str, loaded: Loaded | Unmeasured, *, highest: bool = False
) -> Reading:
    if isinstance(loaded, Unmeasured):
        return Unmeasured(metric.name, loaded.reason, loaded.detail)
    found = loaded.values(name)
    if not found:
        last = loaded.readings[-1].get(name)
        gap = last if isinstance(last, Unmeasured) else gpu.get(name)
        detail = gap.detail if isinstance(gap, Unmeasured) else "no reading under load"
        reason = gap.reason if isinstance(gap, Unmeasured) else Reason.FAILED
        return Unmeasured(metric.name, reason, detail)
    middle, spread = median_and_spread(found)
    source = f"{len(found)} readings of NVML in {loaded.seconds:.1f} s of fp16 matrix products"
    value = max(found) if highest else middle
    return Measurement(metric.name, value, metric.unit, source, samples=len(found), spread=spread)


def _field(metric: Metric, gpu: Gpu, name: str) -> Reading:
    answer = gpu.get(name)
    if isinstance(answer, Unmeasured):
        return Unmeasured(metric.name, answer.reason, answer.detail)
    value = _ON_OFF[answer] if isinstance(answer, bool) else answer
    return Measurement(metric.name, value, metric.unit, "NVML")


def _sum(metric: Metric, gpu: Gpu, *names: str) -> Reading:
    parts: dict[str, Any] = {}
    for name in names:
        answer = gpu.get(name)
        if isinstance(answer, Unmeasured):
            return Unmeasured(metric.name, answer.reason, answer.detail)
        parts[name.rpartition("_")[2]] = int(answer)
    return Measurement(metric.name, sum(parts.values()), metric.unit, "NVML", detail=parts)


def _repair(gpu: Gpu) -> Reading:
    known = {
        name: gpu.flag(name)
        for name in ("remapped_rows_pending", "remapped_rows_failed", "retired_pages_pending")
        if gpu.flag(name) is not None
    }
    if not known:
        return _field(REPAIR, gpu, "remapped_rows_pending")
    words = [name.replace("_", " ") for name, yes in known.items() if yes]
    return Measurement(REPAIR.name, ", ".join(words) or "no", "", "NVML")
