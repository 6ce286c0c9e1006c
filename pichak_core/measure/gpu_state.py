"""The state of the GPU itself: errors, limits, what slows it, its clocks under load, its peers.

It runs behind the other measurements, because its load warms the card.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from pichak_core.devices.gpu_join import join, torch_gpu
from pichak_core.devices.gpus import LiveGpu
from pichak_core.devices.nvml import Gpu
from pichak_core.measure import Context, Probe, register
from pichak_core.measure._gpu_facts import (
    METRICS,
    SISTERS,
    VERDICT,
    memory_readings,
    peer_reading,
    state_readings,
    verdict_reading,
)
from pichak_core.measure._gpu_load import Loaded, busy, under_load
from pichak_core.measure._gpu_verdict import Card, Verdict, gpu_verdicts, sister_verdicts
from pichak_core.measure._readings import (
    host_of,
    loaded_gpu,
    nvml_gpu,
    nvml_report,
    torch_device,
    tried,
)
from pichak_core.measure._sisters import others_idle
from pichak_core.measurement import Measurement, Reading, Reason, Unmeasured

#: Shares of the budget: the card's own load, and that of all its sisters together.
_OWN_SHARE, _SISTERS_SHARE = 0.4, 0.5
_LONGEST_SECONDS = 5.0


def run(context: Context) -> Iterable[Reading]:
    gpu = nvml_gpu(context)
    by_torch = torch_device(context)
    if isinstance(by_torch, Unmeasured):
        return [Unmeasured(m.name, by_torch.reason, by_torch.detail) for m in METRICS]
    gpu, own = _memory_now(context, gpu, by_torch.index)
    available = tried(lambda: host_of(context).usable_memory_bytes()[0])
    readings = list(
        memory_readings(gpu, by_torch, available if isinstance(available, int) else None, own)
    )
    if isinstance(gpu, Unmeasured):
        known = {reading.name for reading in readings}
        rest = [m for m in METRICS if m.name not in known]
        return [*readings, *(Unmeasured(m.name, gpu.reason, gpu.detail) for m in rest)]
    loaded = _load(context)
    readings += state_readings(gpu, loaded)
    report = nvml_report(context)
    readings.append(peer_reading(gpu, report.peers, len(report.gpus)))
    verdicts = gpu_verdicts(gpu, loaded if isinstance(loaded, Loaded) else None, by_torch, own)
    sisters, odd = _sisters(context, gpu, loaded)
    looked = "at rest" if isinstance(loaded, Unmeasured) else "at rest and under load"
    return [verdict_reading([*verdicts, *odd], looked), *readings, sisters]


def _memory_now(
    context: Context, gpu: Gpu | Unmeasured, index: int
) -> tuple[Gpu | Unmeasured, int]:
    """(the GPU with its memory as it is now, what this process's allocator holds of it now).

    NVML's report is from the run's beginning. Where nothing samples the GPU, and for a MIG device,
    whose parent is sampled, that stays, and what this process has taken since is not in it.
    """
    import torch

    now = loaded_gpu(context)
    if isinstance(gpu, Unmeasured) or "mig_index" in gpu.values or not now:
        return gpu, 0
    # torch's stubs leave is_initialized untyped
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    own = int(torch.cuda.memory_reserved(index)) if started else 0
    memory = {name: v for name, v in now[-1].values.items() if name.startswith("memory_")}
    fresh = {name: v for name, v in memory.items() if name.endswith("_bytes")}
    if "memory_used_bytes" not in fresh:
        return gpu, 0
    return replace(gpu, values={**gpu.values, **fresh}), own


def _load(context: Context) -> Loaded | Unmeasured:
    sampler = context.cache.get("conditions")
    if sampler is None:
        return Unmeasured(VERDICT.name, Reason.NOT_ASKED, "nothing samples the GPU here")
    seconds = min(_LONGEST_SECONDS, _OWN_SHARE * context.budget_seconds)
    return under_load(partial(busy, context.device), seconds, sampler.gpu_readings)


def _sisters(
    context: Context, gpu: Gpu, loaded: Loaded | Unmeasured
) -> tuple[Reading, list[Verdict]]:
    """The alike cards, one after another under the same load. Only idle ones, and only in full
    depth: it takes its time, and a card that somebody uses is not touched."""
    if isinstance(loaded, Unmeasured):
        return Unmeasured(SISTERS.name, loaded.reason, loaded.detail), []
    if context.depth != "full":
        detail = "the other cards are loaded in full depth only: --depth full"
        return Unmeasured(SISTERS.name, Reason.NOT_ASKED, detail), []
    import torch

    own = int(context.device.partition(":")[2] or 0)
    others = others_idle(context, own, torch.cuda.device_count())
    if isinstance(others, Unmeasured):
        return Unmeasured(SISTERS.name, others.reason, others.detail), []
    seconds = min(_LONGEST_SECONDS, _SISTERS_SHARE * context.budget_seconds / len(others))
    cards = [_card(context.device, loaded)]
    for device in others:
        joined = join(torch_gpu(int(device.partition(":")[2])), nvml_report(context).gpus)
        if isinstance(joined, Gpu) and joined.text("name") == gpu.text("name"):
            cards.append(_card(device, _sister_load(device, joined.index, seconds)))
    odd = sister_verdicts(cards)
    return sisters_reading(cards, odd, gpu.text("name") or "?"), odd


def _sister_load(device: str, index: int, seconds: float) -> Loaded | Unmeasured:
    live = LiveGpu(index)
    seen: list[Gpu] = []

    def readings() -> list[Gpu]:
        seen.extend(live.latest())
        return seen

    try:
        live.wait_for_first(3.0)
        return under_load(partial(busy, device), seconds, readings)
    finally:
        live.close()


def _card(label: str, loaded: Loaded | Unmeasured) -> Card:
    if isinstance(loaded, Unmeasured):
        return Card(label, None, None)
    return Card(label, loaded.middle("sm_clock_mhz"), loaded.middle("power_watts"))


def sisters_reading(cards: list[Card], odd: list[Verdict], model: str) -> Reading:
    """How many alike cards were held against each other; what each of them did is its source."""
    known = [c for c in cards if c.clock_mhz is not None and c.power_watts is not None]
    if len(known) < 2:
        detail = f"there is no other {model} here whose clock and power can be read"
        return Unmeasured(SISTERS.name, Reason.NO_DEVICE, detail)
    shown = ", ".join(f"{c.label} {c.clock_mhz:.0f} MHz {c.power_watts:.0f} W" for c in known)
    few = "two alike cards, which accuse neither" if len(known) == 2 else ""
    value = few or f"{len(odd)} of {len(known)} alike cards below the others"
    source = f"{model}, one after another under the same load: {shown}"
    return Measurement(SISTERS.name, value, "", source)


register(
    Probe(
        "gpu_state",
        METRICS,
        run,
        {"quick": 4.0, "full": 14.0},
        needs=("torch", "cuda"),
        devices=("cuda",),
    )
)
