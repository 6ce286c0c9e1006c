"""Every rule of the watch, and every code that they can give."""

from __future__ import annotations

from collections.abc import Sequence

from pichak_agent import watch_devices, watch_gpu, watch_host, watch_sharing
from pichak_agent.watch import Rule

RULES: Sequence[Rule] = (
    watch_devices.nvml,
    watch_devices.counters,
    watch_devices.cards,
    watch_gpu.slowed,
    watch_gpu.power_limit,
    watch_gpu.link,
    watch_gpu.memory_errors,
    watch_gpu.sisters,
    watch_sharing.foreign_memory,
    watch_sharing.foreign_processes,
    watch_sharing.spill,
    watch_sharing.pace,
    watch_host.steal,
    watch_host.memory,
    watch_host.disk,
    watch_host.clock,
)

CODES = frozenset(
    {
        "clock_jumped",
        "cpu_steal",
        "disk_filling",
        "gpu_added",
        "gpu_below_sisters",
        "gpu_ecc",
        "gpu_ecc_growing",
        "gpu_foreign_process",
        "gpu_link",
        "gpu_lost",
        "gpu_missing",
        "gpu_power_limit",
        "gpu_power_limit_changed",
        "gpu_pushed_out",
        "gpu_repair_failed",
        "gpu_repair_pending",
        "gpu_rows_replaced",
        "gpu_shared_memory",
        "gpu_slowed",
        "gpu_spill",
        "gpu_swapped",
        "memory_pressure",
        "nvml_hung",
        "nvml_lost",
        "oom_kill",
        "spill_unknown",
        "throughput_collapse",
    }
)
