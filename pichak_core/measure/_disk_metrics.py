"""The metrics of a disk, read off a `DiskResult`: each with its source, spread and conditions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pichak_core.devices.filesystems import FileSystem
from pichak_core.measure import Metric
from pichak_core.measure._disk_result import DiskResult
from pichak_core.measure._disk_verdict import filesystem_note
from pichak_core.measurement import Measurement, Reading, Reason, Unmeasured
from pichak_core.plan import Scalar

READ = Metric("disk.read_mb_s", "MB/s", "best read rate over queue depths, page cache bypassed")
BEST_DEPTH = Metric("disk.read_best_depth", "reads", "how many reads in flight give that rate")
P99 = Metric("disk.read_p99_ms", "ms", "99th percentile of one read at that depth")
DEPTH1 = Metric("disk.read_depth1_mb_s", "MB/s", "read rate with one read at a time")
FILESYSTEM = Metric("disk.filesystem", "", "type of the file system that was read")
METRICS = (READ, BEST_DEPTH, P99, DEPTH1, FILESYSTEM)


def readings(result: DiskResult) -> Iterator[Reading]:
    """The metrics of a result. Rates that are a cache's or memory's are `Unmeasured`, with why."""
    yield _filesystem_reading(result)
    best = result.best
    if result.is_memory or best is None or not result.bypassed:
        reason = Reason.NO_DEVICE if result.is_memory else Reason.NOT_SUPPORTED
        if best is None and not result.is_memory:
            reason = Reason.TIMED_OUT
        for metric in (READ, BEST_DEPTH, P99, DEPTH1):
            yield Unmeasured(metric.name, reason, result.verdict)
        return
    how = f"reads of {result.block} with the page cache bypassed, over {result.what_was_read}"
    sweep_text = f"depths {', '.join(str(depth) for depth in result.mb_s)}"
    window = "the late windows" if best.slowed else "all windows"
    shared: dict[str, Any] = {"suspect": result.suspect, "conditions": _conditions(result)}
    detail = {
        key: value
        for key, value in result.as_dict().items()
        if key in {"rates", "skipped", "verdict", "traffic", "huge_page_mb_s", "notes"}
    }
    detail["early_mb_s"], detail["late_mb_s"] = best.early_mb_s, best.late_mb_s
    yield Measurement(
        READ.name,
        best.mb_s,
        READ.unit,
        f"{how}; {sweep_text} tried; bytes over time in {window} at depth {best.depth}",
        samples=best.samples,
        spread=best.spread,
        seconds=result.seconds,
        detail=detail,
        **shared,
    )
    yield Measurement(
        BEST_DEPTH.name,
        best.depth,
        BEST_DEPTH.unit,
        f"{how}; the smallest depth within 2 % of the best of {sweep_text}",
        **shared,
    )
    yield Measurement(
        P99.name,
        best.p99_ms,
        P99.unit,
        f"{how}; nearest-rank p99 of one read with {best.depth} in flight",
        samples=best.reads,
        detail={"depth": best.depth, "p50_ms": best.p50_ms},
        **shared,
    )
    first = next((rate for rate in result.rates if rate.depth == 1), None)
    if first is None:
        yield Unmeasured(DEPTH1.name, Reason.NOT_ASKED, "depth 1 is not among the depths")
        return
    yield Measurement(
        DEPTH1.name,
        first.mb_s,
        DEPTH1.unit,
        f"{how}; one read at a time, bytes over time",
        samples=first.samples,
        spread=first.spread,
        **shared,
    )


def _filesystem_reading(result: DiskResult) -> Reading:
    filesystem = result.filesystem
    if filesystem.type == "unknown":
        return Unmeasured(
            FILESYSTEM.name, Reason.NOT_SUPPORTED, "no mount table and no known magic number"
        )
    return Measurement(
        FILESYSTEM.name,
        filesystem.type,
        FILESYSTEM.unit,
        _filesystem_source(filesystem),
        detail={
            "kind": filesystem.kind,
            "mount_point": filesystem.mount_point,
            "source": filesystem.source,
            "block_device": filesystem.block_device,
            "note": filesystem_note(filesystem),
        },
    )


def _filesystem_source(filesystem: FileSystem) -> str:
    if filesystem.device:
        return "the mount that holds the path, from /proc/self/mountinfo"
    if filesystem.mount_point:
        return "the volume that holds the path, from GetVolumeInformation"
    return "the file system's magic number, from statfs"


def _conditions(result: DiskResult) -> dict[str, Scalar]:
    """What was true meanwhile; traffic of others on the same device explains a slow disk."""
    conditions: dict[str, Scalar] = {
        "block_bytes": result.block_bytes,
        "own_file": result.own_file,
        "filesystem": result.filesystem.type,
    }
    if result.traffic.own_read is not None:
        conditions["others_read_mb"] = max(0, result.traffic.own_read - result.bytes_read) / 1e6
    if result.traffic.own_written is not None:
        conditions["written_meanwhile_mb"] = result.traffic.own_written / 1e6
    return conditions
