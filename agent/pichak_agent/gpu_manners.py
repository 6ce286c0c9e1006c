"""A job leaves a GPU alone on which somebody works; its own process looks, before it begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pichak_agent.environment import MARK
from pichak_core.devices.gpu_look import GpuBusyError, look_at, wait_until_free
from pichak_core.devices.gpu_use import GpuUse

__all__ = ["PARAMS", "GpuBusyError", "join_use", "leave_alone"]

#: What a job's `params` may say: measure although somebody works there; wait so long until not.
PARAMS = frozenset({"even_if_busy", "wait_seconds"})
#: Kinds that put no load on a device.
_WITHOUT_DEVICE = frozenset({"net_listen", "net_reach", "net_link"})


def leave_alone(
    kind: str, params: Mapping[str, Any], *, progress: Callable[[str], None]
) -> GpuUse | None:
    """How the job's GPU is used by others; None when the job needs none. `GpuBusyError` when
    somebody works there, unless ``even_if_busy``; after ``wait_seconds`` where they are given."""
    device = str(params.get("device") or "")
    if kind in _WITHOUT_DEVICE or not device.startswith("cuda"):
        return None
    progress(f"who uses {device}")

    def look() -> GpuUse:
        return look_at(device, own_variable=MARK)

    if params.get("even_if_busy"):
        return look()
    return wait_until_free(
        look, wait_seconds=float(params.get("wait_seconds") or 0.0), say=progress
    )


def join_use(result: Mapping[str, Any], use: GpuUse) -> dict[str, Any]:
    """The job's result with what was seen of others, where that is more than an idle GPU."""
    made = dict(result)
    if use.state == "idle":
        return made
    made["gpu_use"] = use.as_dict()
    plan = made.get("plan")
    if isinstance(plan, Mapping):
        notes = [*plan.get("notes", ()), f"before it was measured, {use.sentence}"]
        made["plan"] = {**plan, "notes": notes}
    return made
