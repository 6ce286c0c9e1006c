"""Which GPUs there are, and whether NVML still answers. Pure.

A card can vanish without an error anywhere, so UUIDs are compared and not counted.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from pichak_agent.watch import Key, Sign
from pichak_agent.watch_past import Window
from pichak_core.measurement import Reason

#: A driver that is restarted takes its counters along for a moment.
_SILENT_SECONDS = 20.0
_RESTART = (
    "if the host still sees its GPUs (nvidia-smi there), recreate this container: a reload of the "
    "host's services takes a container's right to them"
)


def nvml(window: Window, active: Container[Key]) -> Iterator[Sign]:  # noqa: ARG001
    """NVML worked and does not any more, or hangs."""
    now, answered = window.now, window.answered
    evidence: dict[str, float] = {"at_unix": now.at_unix}
    if answered is not None:
        evidence["last_answer_unix"] = answered.at_unix
    if now.nvml_reason == Reason.TIMED_OUT.value:
        yield Sign(
            "nvml_hung",
            "fail",
            "",
            f"NVML hangs ({now.nvml_gap}); the process that asked it was killed, and no figure of "
            "the GPUs is known since",
            evidence,
        )
        return
    last = next((r for r in reversed(window.readings) if r.gpus), None)
    all_lost = last is not None and all(gpu.lost for gpu in last.gpus)
    known = window.had and (all_lost or now.nvml_reason == Reason.LOST.value)
    if answered is None and not known:
        return  # it never worked here: a gap, and no fault of today
    if now.nvml_gap or all_lost:
        why = now.nvml_gap or (last.gpus[0].lost if last else "")
        yield Sign(
            "nvml_lost",
            "fail",
            "",
            f"NVML, which answered before, does not any more ({why}); {_RESTART}",
            evidence,
        )
    elif now.fresh_gap:
        yield Sign(
            "nvml_lost",
            "fail",
            "",
            f"NVML still answers a process that opened it before, and refuses one that starts now "
            f"({now.fresh_gap}); {_RESTART}",
            evidence,
        )


def counters(window: Window, active: Container[Key]) -> Iterator[Sign]:  # noqa: ARG001
    """A driver that pages, and counters that do not say whether it does."""
    now = window.now
    pages = [seen[-1].gpu for seen in window.gpus.values() if seen[-1].gpu.pages]
    if not pages or not all(reading.counters_gap for reading in window.since(_SILENT_SECONDS)):
        return
    names = ", ".join(gpu.name for gpu in pages)
    yield Sign(
        "spill_unknown",
        "warn" if any(now.own_on(gpu) for gpu in pages) else "info",
        "",
        f"{names}: Windows moves memory off the card instead of refusing it, and its counters do "
        f"not say whether it did ({now.counters_gap})",
        {"at_unix": now.at_unix},
    )


def cards(window: Window, active: Container[Key]) -> Iterator[Sign]:  # noqa: ARG001
    """A GPU is lost, gone, new, or another one."""
    last = next((r for r in reversed(window.readings) if r.gpus), None)
    if last is None or all(gpu.lost for gpu in last.gpus):
        return  # `nvml`'s business
    for gpu in last.gpus:
        if gpu.lost:
            name = window.had.get(gpu.uuid, "")
            evidence = {"at_unix": last.at_unix, "index": gpu.index}
            yield Sign(
                "gpu_lost",
                "fail",
                gpu.key,
                f"GPU {gpu.index}{f' ({name})' if name else ''} cannot be read: {gpu.lost}",
                evidence,
            )
    full = window.full[-1] if window.full else None
    if full is None:
        return
    # A lost card does not tell its UUID, so it cannot be told from a missing one by that.
    lost = sum(1 for gpu in full.gpus if gpu.lost and not gpu.uuid)
    there = {gpu.uuid for gpu in full.gpus if gpu.uuid}
    missing = sorted(set(window.had) - there)
    added = sorted(there - set(window.had))
    evidence = {"at_unix": full.at_unix, "had": len(window.had), "has": len(there)}
    if missing and added and len(missing) == len(added):
        yield Sign(
            "gpu_swapped",
            "warn",
            "",
            f"{len(added)} of the node's GPUs are others than before: {', '.join(missing)} became "
            f"{', '.join(added)}",
            evidence,
        )
        return
    for uuid in missing if len(missing) > lost else []:
        yield Sign(
            "gpu_missing",
            "fail",
            uuid,
            f"{window.had[uuid] or 'a GPU'} ({uuid}) is gone: NVML lists {len(full.gpus)} GPUs and "
            "says nothing of it",
            evidence,
        )
    for uuid in added:
        yield Sign("gpu_added", "info", uuid, f"a GPU that was not here before: {uuid}", evidence)
