"""Telemetry in Prometheus' text form (exposition format 0.0.4). What was not read is not there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MOST_LABEL = 200

#: Reading -> (metric, type, help).
_HOST: Mapping[str, tuple[str, str, str]] = {
    "cpu_busy_seconds": ("cpu_busy_seconds_total", "counter", "CPU time used, all CPUs"),
    "cpu_steal_seconds": ("cpu_steal_seconds_total", "counter", "CPU time given to others"),
    "cpu_total_seconds": ("cpu_seconds_total", "counter", "CPU time that there was"),
    "cpu_pressure_us": ("cpu_stalled_microseconds_total", "counter", "some task waited for a CPU"),
    "memory_pressure_us": (
        "memory_stalled_microseconds_total",
        "counter",
        "some task waited for memory",
    ),
    "memory_full_pressure_us": (
        "memory_all_stalled_microseconds_total",
        "counter",
        "every task waited for memory",
    ),
    "io_pressure_us": ("io_stalled_microseconds_total", "counter", "some task waited for a disk"),
    "memory_available_bytes": (
        "memory_available_bytes",
        "gauge",
        "what a process of this node can have",
    ),
    "memory_total_bytes": ("memory_total_bytes", "gauge", "memory of the machine"),
    "swap_used_bytes": ("swap_used_bytes", "gauge", "swapped out"),
    "oom_kills": ("oom_kills_total", "counter", "out-of-memory kills since boot"),
    "disk_free_bytes": ("disk_free_bytes", "gauge", "free where results are kept"),
    "disk_total_bytes": ("disk_total_bytes", "gauge", "size of that file system"),
}
_CARD: Mapping[str, str] = {
    "dedicated_bytes": "memory of the card that all programs use, by Windows' counters",
    "shared_bytes": "system memory in the card's place, all programs, by Windows' counters",
}
_OWN: Mapping[str, str] = {
    "dedicated_bytes": "memory of the card that a known process uses, by Windows' counters",
    "shared_bytes": "system memory that stands in for the card or is pinned, of a known process",
    "reserved_bytes": "memory that a known process's allocator holds, as it tells",
}
_GPU: Mapping[str, tuple[str, str]] = {
    "utilisation_percent": ("gauge", "time in which a kernel ran"),
    "sm_clock_mhz": ("gauge", "clock of the multiprocessors"),
    "memory_clock_mhz": ("gauge", "clock of the memory"),
    "power_watts": ("gauge", "power drawn"),
    "power_limit_watts": ("gauge", "power limit in force"),
    "temperature_celsius": ("gauge", "temperature"),
    "pcie_generation": ("gauge", "PCIe generation now; an idle link trains down"),
    "pcie_width": ("gauge", "PCIe lanes now"),
    "memory_total_bytes": ("gauge", "memory of the card"),
    "memory_used_bytes": ("gauge", "memory that programs hold"),
    "memory_reserved_bytes": ("gauge", "memory that the driver keeps"),
    "throttle_bitmask": ("gauge", "NVML's clock event reasons now"),
    "throttled_power_seconds": ("counter", "clocks held down by the power limit"),
    "throttled_thermal_seconds": ("counter", "clocks held down by heat"),
    "ecc_corrected": ("counter", "memory errors corrected since the driver was loaded"),
    "ecc_uncorrected": ("counter", "memory errors not corrected since the driver was loaded"),
}


def escape(value: object) -> str:
    """A label's value: text from a node cannot leave its quotes."""
    text = str(value)[:_MOST_LABEL]
    text = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def metrics_text(state: Mapping[str, Any]) -> str:
    """`Telemetry.as_json()` as metrics, each family once, ``pichak_`` before its name."""
    lines: list[str] = []
    fresh = not state.get("stale")
    _family(lines, "up", "gauge", "whether the node is sampled now", [({}, float(fresh))])
    host = (state.get("latest") or {}).get("host", {}) if fresh else {}
    for name, (metric, kind, text) in _HOST.items():
        if name in host:
            _family(lines, f"host_{metric}", kind, text, [({}, host[name])])
    gpus = state.get("gpus") or [] if fresh else []
    for name, (kind, text) in _GPU.items():
        rows = [(_labels(gpu), _known(gpu, name)) for gpu in gpus]
        suffix = "_total" if kind == "counter" else ""
        _family(lines, f"gpu_{name}{suffix}", kind, text, [r for r in rows if r[1] is not None])
    lost = [(_labels(gpu), float(bool(gpu.get("lost")))) for gpu in gpus]
    _family(lines, "gpu_lost", "gauge", "whether NVML cannot read the GPU", lost)
    if fresh:
        _memory(lines, state, gpus)
    found = [
        ({n: f.get(n, "") for n in ("code", "severity", "state", "subject")}, 1.0)
        for f in state.get("findings") or []
        if f.get("state") != "resolved"
    ]
    _family(lines, "finding", "gauge", "what is wrong now (docs/FINDINGS.md)", found)
    for name, metric, kind, text in (
        ("interval_seconds", "sampling_interval_seconds", "gauge", "between two readings"),
        ("readings", "readings_total", "counter", "readings taken"),
        ("cpu_seconds", "sampling_cpu_seconds_total", "counter", "CPU time of the sampling"),
    ):
        if fresh and name in state:
            _family(lines, metric, kind, text, [({}, state[name])])
    return "\n".join(lines) + "\n"


def _memory(lines: list[str], state: Mapping[str, Any], gpus: Iterable[Mapping[str, Any]]) -> None:
    """What the system's own counters say, where it has them."""
    counters = state.get("memory_counters")
    if counters:
        text = "whether Windows' GPU memory counters answer"
        _family(lines, "gpu_memory_counters_up", "gauge", text, [({}, float(not counters["gap"]))])
    by_uuid = {str(gpu.get("uuid")): _labels(gpu) for gpu in gpus}

    def labels(row: Mapping[str, Any], *names: str) -> dict[str, object]:
        uuid = str(row.get("uuid", ""))
        of_gpu = by_uuid.get(uuid, {"gpu": "", "uuid": uuid, "name": ""})
        return {**of_gpu, **{name: row.get(name, "") for name in names}}

    for part, prefix, families, names in (
        ("cards", "gpu_card", _CARD, ("pci_address",)),
        ("own_memory", "gpu_process", _OWN, ("job", "pid", "source")),
    ):
        listed = state.get(part) or []
        for name, text in families.items():
            rows = [(labels(row, *names), row[name]) for row in listed if name in row]
            _family(lines, f"{prefix}_{name}", "gauge", text, rows)


def _family(
    lines: list[str],
    name: str,
    kind: str,
    text: str,
    rows: Iterable[tuple[Mapping[str, object], float | None]],
) -> None:
    made = list(rows)
    if not made:
        return
    lines += [f"# HELP pichak_{name} {text}", f"# TYPE pichak_{name} {kind}"]
    for labels, value in made:
        inside = ",".join(f'{label}="{escape(text)}"' for label, text in labels.items())
        lines.append(f"pichak_{name}{'{' + inside + '}' if inside else ''} {value!r}")


def _labels(gpu: Mapping[str, Any]) -> dict[str, object]:
    facts = gpu.get("facts") or {}
    return {"gpu": gpu.get("index"), "uuid": gpu.get("uuid"), "name": facts.get("name", "")}


def _known(gpu: Mapping[str, Any], name: str) -> float | None:
    for part in ("live", "facts"):
        value = (gpu.get(part) or {}).get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return value
    return None
