"""The disk measurement: arithmetic from closed forms, real files, refusals, kills."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from pichak_core.devices import kernel_queue
from pichak_core.devices.direct_io import (
    ALIGNMENT,
    BypassRefusedError,
    aligned_buffer,
    open_direct,
)
from pichak_core.devices.disk_counters import DiskTraffic
from pichak_core.devices.filesystems import FileSystem, filesystem_of
from pichak_core.measure import Context, probes, run_one
from pichak_core.measure import _disk_files as disk_files
from pichak_core.measure._disk_files import free_margin, own_target, room_for
from pichak_core.measure._disk_reader import Block, Read, Reader, Slice, cut_blocks
from pichak_core.measure._disk_sweep import sweep
from pichak_core.measure._disk_verdict import (
    DepthRate,
    best_depth,
    buffer_sentence,
    burst_sentence,
    contenders,
    depth_rate,
    depth_sentence,
    growth_sentence,
    quantile,
    suspicion,
    window_rates,
)
from pichak_core.measure.disk import DEPTHS, DiskError, DiskResult, disk_queue_depth, readings
from pichak_core.measurement import Fingerprint, Measurement, Reason, Unmeasured

MIB = 1 << 20
METRICS = [
    "disk.read_mb_s",
    "disk.read_best_depth",
    "disk.read_p99_ms",
    "disk.read_depth1_mb_s",
    "disk.filesystem",
]


def written(path: Path, length: int) -> bytes:
    content = os.urandom(length)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return content


def needs_a_disk(path: Path) -> FileSystem:
    filesystem = filesystem_of(path)
    if filesystem.kind not in {"disk", "layered"}:
        pytest.skip(f"temporary files lie on {filesystem.describe()}, which is no disk")
    return filesystem


# --- from reads to rates ---------------------------------------------------------------------


def one_server(depth: int, service: float, until: float, size: int = 8_000_000) -> Slice:
    """A disk that serves one read after the other, each in `service` s, with `depth` queued."""
    reads, arrivals, now = [], [0.0] * depth, 0.0
    first: dict[int, float] = {}
    while now < until:
        worker = min(range(depth), key=lambda w: (arrivals[w], w))
        now += service
        reads.append(Read(arrivals[worker], now, size))
        first.setdefault(worker, now)
        arrivals[worker] = now
    return Slice(depth, tuple(reads), max(first.values()), min(until, *arrivals))


@pytest.mark.parametrize("depth", [1, 2, 7, 32])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_a_constant_disk_has_its_rate_in_every_window(depth: int, count: int) -> None:
    """8 MB every 5 ms are 1,600 MB/s at any depth, also in windows shorter than one read."""
    rates = window_rates(one_server(depth, 0.005, 1.0), count)
    assert len(rates) == count
    assert rates == pytest.approx([1600.0] * count, rel=1e-9)


def test_reads_served_side_by_side() -> None:
    """Four workers in lockstep, 8 MB in 20 ms each: 1,600 MB/s."""
    reads = [Read(0.02 * k, 0.02 * (k + 1), 8_000_000) for k in range(20) for _ in range(4)]
    assert window_rates(Slice(4, tuple(reads), 0.02, 0.33), 5) == pytest.approx([1600.0] * 5)


def test_a_disk_that_halves_shows_it_in_its_windows() -> None:
    reads = [Read(0.01 * k, 0.01 * (k + 1), 2_000_000) for k in range(100)]
    reads += [Read(1 + 0.02 * k, 1 + 0.02 * (k + 1), 2_000_000) for k in range(50)]
    assert window_rates(Slice(1, tuple(reads), 0.0, 2.0), 4) == pytest.approx([200, 200, 100, 100])


def test_a_slice_without_a_span_gives_no_rate() -> None:
    assert window_rates(Slice(2, (Read(0, 1, 10), Read(0, 2, 10)), 2.0, 1.0), 3) == []


def test_quantile_is_nearest_rank_as_numpy_has_it() -> None:
    generator = random.Random(3)
    for size in (1, 2, 5, 99, 100, 101, 1000):
        samples = [generator.random() for _ in range(size)]
        for share in (0.5, 0.9, 0.99):
            expected = np.quantile(samples, share, method="inverted_cdf")
            assert quantile(samples, share) == expected


# --- verdicts --------------------------------------------------------------------------------


def rate(depth: int, *windows: float) -> DepthRate:
    return depth_rate(depth, windows, [0.01])


def test_burst_credits_that_run_out() -> None:
    # field case 81
    seen = rate(4, 260, 260, 260, 128, 128)
    assert (seen.early_mb_s, seen.late_mb_s) == (260, 128)
    assert seen.slowed
    assert (seen.mb_s, seen.samples) == (128, 2)
    assert "from 260 MB/s to 128 MB/s" in burst_sentence(seen)
    assert "plan on the late rate" in burst_sentence(seen)
    others = [rate(1, 250, 250), seen, rate(8, 260, 260)]
    assert depth_sentence(others, seen, "8 MiB") == "best with 4 reads of 8 MiB in flight: 128 MB/s"


@pytest.mark.parametrize(
    "windows",
    [
        (260, 250, 255, 245, 250),
        (260, 190, 260, 200, 190),  # one early window was as slow as the late ones: noise
        (128, 128, 260, 260, 260),
        (436, 430, 440, 435, 100, 180, 980),  # late in the median, not in the mean
        (260, 128, 128),  # too few to tell early from late
    ],
)
def test_no_burst_is_claimed(windows: tuple[float, ...]) -> None:
    seen = rate(4, *windows)
    assert not seen.slowed
    assert seen.mb_s == pytest.approx(np.mean(windows))
    assert seen.median_mb_s == np.median(windows)
    assert burst_sentence(seen) == ""


def test_growth_from_pass_to_pass_is_a_cache() -> None:
    # field case 80
    disk = FileSystem("ext4", "disk", block_device="sda")
    growing = rate(4, 500, 520, 1500, 3000, 5700, 5600)
    assert growing.grew
    assert "a cache fills" in suspicion(disk, DiskTraffic(), 1000, growing)
    # the device did read it all: said, but not held against it
    vouched = DiskTraffic(own_read=1000, physical_read=1000)
    assert suspicion(disk, vouched, 1000, growing) == ""
    assert growth_sentence(rate(4, 500, 520, 510, 600, 610, 600)) == ""
    assert not rate(4, 500, 520, 510, 600, 610, 600).grew
    assert not rate(4, 300, 900, 500, 800, 880, 850).grew  # an early window was as fast
    assert suspicion(disk, DiskTraffic(), 1, rate(4, 500, 510, 505, 500)) == ""


def test_what_the_device_read_is_compared_with_what_was_delivered() -> None:
    # field case 80: 10 GiB "read", the device saw none of it
    delivered = 10 << 30
    zfs = FileSystem("zfs", "zfs", "/tank", "tank")
    assert "a cache answered" in suspicion(zfs, DiskTraffic(None, None, 0), delivered, None)
    assert suspicion(zfs, DiskTraffic(None, None, delivered), delivered, None) == ""
    assert "ARC" in suspicion(zfs, DiskTraffic(), delivered, None)
    disk = FileSystem("ext4", "disk", "/", "/dev/vda1", "254:1", "vda1")
    some = DiskTraffic(delivered // 3, 0, delivered)
    assert "vda1 read only" in suspicion(disk, some, delivered, None)
    assert suspicion(disk, DiskTraffic(delivered, 0, delivered), delivered, None) == ""
    assert suspicion(disk, DiskTraffic(), delivered, None) == ""  # unreadable: no judgement


def test_a_device_reads_less_of_what_is_compressed_on_it() -> None:
    # field case 80: 3 GB of text may be 1 GB on the device; 10 GB that are 0.1 GB come from a cache
    zfs = FileSystem("zfs", "zfs", "/tank", "tank")
    third = DiskTraffic(None, None, 10**9)
    assert "a cache answered" in suspicion(zfs, third, 3 * 10**9, None)
    assert suspicion(zfs, third, 3 * 10**9, None, may_be_compressed=True) == ""
    tenth = DiskTraffic(None, None, 10**8)
    assert "a cache answered" in suspicion(zfs, tenth, 10**10, None, may_be_compressed=True)


def test_the_smallest_depth_within_two_percent_is_best() -> None:
    assert best_depth({1: 500, 4: 985, 8: 1000, 32: 900}) == 4
    assert best_depth({1: 500, 4: 975, 8: 1000, 32: 900}) == 8
    assert best_depth({1: 10}) == 1


def test_contenders_are_near_the_top_and_few() -> None:
    assert contenders({1: 500, 2: 900, 4: 1000, 8: 950, 16: 990, 32: 840}) == [4, 8, 16]
    assert contenders({1: 100, 2: 1000}) == [2]


def test_more_depth_loses_only_when_all_deeper_ones_do() -> None:
    best = rate(4, 1500)
    curve = [rate(1, 900), best, rate(8, 1400), rate(32, 1200)]
    assert depth_sentence(curve, best, "8 MiB") == (
        "best with 4 reads of 8 MiB in flight: 1,500 MB/s (1.67x the 900 MB/s of one at a time); "
        "more depth loses: 32 give 1,200 MB/s (-20%)"
    )
    curve[2] = rate(8, 1495)
    assert "more depth does not help: 32 give 1,200" in depth_sentence(curve, best, "8 MiB")
    assert depth_sentence([best], best, "8 MiB") == (
        "best with 4 reads of 8 MiB in flight: 1,500 MB/s"
    )


def test_small_pages_are_named_as_the_limit_when_they_are() -> None:
    best = rate(4, 1000)
    assert buffer_sentence(best, None) == ""
    assert buffer_sentence(best, 1100) == ""
    assert "into huge pages: 1,900 MB/s (1.90x)" in buffer_sentence(best, 1900)


# --- blocks and workers ----------------------------------------------------------------------


def test_blocks_by_brute_force() -> None:
    generator = random.Random(5)
    for _ in range(500):
        size, block = generator.randrange(1, 90), generator.randrange(1, 12)
        written_bytes = [generator.random() < 0.9 for _ in range(size)]
        ranges, start = [], None
        for byte in range(size + 1):
            inside = byte < size and written_bytes[byte]
            if inside and start is None:
                start = byte
            elif not inside and start is not None:
                ranges.append((start, byte))
                start = None
        expected = [
            Block(3, offset, min(block, size - offset))
            for offset in range(0, size, block)
            if all(written_bytes[offset : offset + block])
        ]
        assert cut_blocks(3, ranges, size, block) == expected


@pytest.mark.parametrize("depth", [1, 3, 8])
@pytest.mark.parametrize("by_threads", [False, True])
def test_what_is_read_is_what_was_written_everywhere(
    tmp_path: Path, depth: int, by_threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three files with tails: every block comes, with its own bytes, at every depth."""
    needs_a_disk(tmp_path)
    if by_threads:
        monkeypatch.setattr(kernel_queue.platform, "machine", lambda: "vax")
    block = 4 * ALIGNMENT
    sizes = [5 * block + 1000, block, 2 * block + ALIGNMENT + 1]
    contents = [written(tmp_path / str(i), size) for i, size in enumerate(sizes)]
    files = [open_direct(str(tmp_path / str(i))) for i in range(3)]
    blocks = [b for i, size in enumerate(sizes) for b in cut_blocks(i, [(0, size)], size, block)]
    assert sum(b.length for b in blocks) == sum(sizes)
    seen: dict[Block, int] = {}
    lock = threading.Lock()

    def check(one: Block, view: memoryview) -> None:
        with lock:
            seen[one] = zlib.crc32(view)

    reader = Reader(files, blocks, block, on_block=check)
    piece = reader.run(depth, 0.0, reads_each=-(-len(blocks) // depth) + 1)
    assert seen == {b: zlib.crc32(contents[b.file][b.offset : b.offset + b.length]) for b in blocks}
    assert reader.bytes_read == piece.bytes == sum(read.bytes for read in piece.reads)
    assert ("no numbers of its calls for vax" in reader.threads_because) == by_threads
    for file in files:
        file.close()


def test_the_kernel_holds_as_many_reads_as_were_submitted(tmp_path: Path) -> None:
    needs_a_disk(tmp_path)
    content = written(tmp_path / "f", 8 * ALIGNMENT + 1000)
    with closing(open_direct(str(tmp_path / "f"))) as file, kernel_queue.KernelQueue(9) as queue:
        assert file.queue_fd is not None
        buffers = [aligned_buffer(ALIGNMENT) for _ in range(9)]
        for slot in range(9):
            queue.submit(slot, file.queue_fd, buffers[slot], slot * ALIGNMENT, ALIGNMENT)
        ended: dict[int, int] = {}
        while len(ended) < 9:
            ended |= dict(queue.finished())
        assert queue.finished(wait=False) == []
    assert ended == dict.fromkeys(range(8), ALIGNMENT) | {8: 1000}
    for slot, got in ended.items():
        offset = slot * ALIGNMENT
        assert buffers[slot][:got] == content[offset : offset + got]


def test_leaving_a_queue_waits_for_what_is_in_flight(tmp_path: Path) -> None:
    """Afterwards nothing is written to the buffer any more: all of the read is there."""
    needs_a_disk(tmp_path)
    content = written(tmp_path / "f", 16 * MIB)
    buffer = aligned_buffer(16 * MIB)
    with closing(open_direct(str(tmp_path / "f"))) as file:
        with kernel_queue.KernelQueue(1) as queue:
            assert file.queue_fd is not None
            queue.submit(0, file.queue_fd, buffer, 0, 16 * MIB)
        left = buffer[:]
    assert left == content
    with pytest.raises(OSError, match="Invalid argument"):
        queue.finished(wait=False)


def test_a_file_system_that_reads_at_submission_gets_threads() -> None:
    # field case 77: memory takes the flag for direct reads
    where = Path("/dev/shm")
    if filesystem_of(where).kind != "memory":
        pytest.skip("/dev/shm is no memory here")
    with tempfile.NamedTemporaryFile(dir=where) as memory:
        memory.write(os.urandom(8 * MIB))
        memory.flush()
        try:
            file = open_direct(memory.name)
        except BypassRefusedError:
            pytest.skip("this kernel's tmpfs refuses direct reads")
        with closing(file):
            blocks = cut_blocks(0, [(0, 8 * MIB)], 8 * MIB, MIB)
            reader = Reader([file], blocks, MIB)
            piece = reader.run(4, 0.0, reads_each=3)
    assert "one by one" in reader.threads_because
    assert len(piece.reads) == 12


def test_a_queued_read_that_is_refused_names_the_phase(tmp_path: Path) -> None:
    # field case 78
    needs_a_disk(tmp_path)
    written(tmp_path / "f", 8 * ALIGNMENT)
    with closing(open_direct(str(tmp_path / "f"))) as file:
        reader = Reader([file], [Block(0, 100, ALIGNMENT)], ALIGNMENT)
        with pytest.raises(BypassRefusedError, match="refused at read") as refused:
            reader.run(2, 0.1)
    assert refused.value.errno == errno.EINVAL


class FakeFile:
    """A file that takes 10 ms a read and counts how many are in flight."""

    path, size, queue_fd = "fake", 1 << 40, None

    def __init__(self, fail_at: int = 1 << 60) -> None:
        self.now = self.most = self.count = 0
        self.offsets: list[int] = []
        self._lock = threading.Lock()
        self._fail_at = fail_at

    def read_into(self, buffer: object, offset: int, length: int) -> int:
        with self._lock:
            self.now += 1
            self.count += 1
            self.most = max(self.most, self.now)
            self.offsets.append(offset)
            failing = self.count == self._fail_at
        time.sleep(0.01)
        with self._lock:
            self.now -= 1
        if failing:
            raise OSError(errno.EIO, "Input/output error")
        return length

    def read_error(self, code: int) -> OSError:
        return OSError(code, os.strerror(code))

    def drop_cache(self) -> None: ...

    def close(self) -> None: ...


def test_the_depth_is_the_number_of_reads_in_flight() -> None:
    file = FakeFile()
    blocks = [Block(0, i * ALIGNMENT, ALIGNMENT) for i in range(64)]
    reader = Reader([file], blocks, ALIGNMENT)
    for depth in (5, 2, 16):
        file.most = 0
        piece = reader.run(depth, 0.05)
        assert file.most == depth
        assert piece.begin < piece.end
        assert len(piece.reads) >= depth


def test_workers_start_apart_and_the_next_slice_goes_on_where_this_one_ended() -> None:
    file = FakeFile()
    blocks = [Block(0, i * ALIGNMENT, ALIGNMENT) for i in range(64)]
    reader = Reader([file], blocks, ALIGNMENT)
    reader.run(4, 0.0, reads_each=3)
    expected = {start + step for start in (0, 16, 32, 48) for step in range(3)}
    assert {offset // ALIGNMENT for offset in file.offsets} == expected
    file.offsets.clear()
    reader.run(2, 0.0, reads_each=1)
    assert {offset // ALIGNMENT for offset in file.offsets} == {3, 35}


def test_one_failing_read_ends_the_slice_and_its_workers() -> None:
    before = threading.active_count()
    file = FakeFile(fail_at=20)
    reader = Reader([file], [Block(0, 0, ALIGNMENT)], ALIGNMENT)
    with pytest.raises(OSError, match="Input/output error"):
        reader.run(8, 60.0)
    assert threading.active_count() == before


def test_a_file_that_shrinks_meanwhile_is_an_error(tmp_path: Path) -> None:
    written(tmp_path / "f", 4 * ALIGNMENT)
    file = open_direct(str(tmp_path / "f"))
    reader = Reader([file], [Block(0, 2 * ALIGNMENT, 2 * ALIGNMENT)], 2 * ALIGNMENT)
    os.truncate(tmp_path / "f", 3 * ALIGNMENT)
    with pytest.raises(OSError, match="leave it alone during the measurement"):
        reader.run(1, 0.1)
    file.close()


# --- spending the time -----------------------------------------------------------------------


class ModelDisk:
    """A disk with a given MB/s by depth and time, on a clock that moves only when it reads."""

    def __init__(self, mb_s: Callable[[int, float], float], blocks: int = 4096) -> None:
        self.now = 0.0
        self.blocks = [Block(0, i, 1) for i in range(blocks)]
        self.visits: list[int] = []
        self._mb_s = mb_s

    def clock(self) -> float:
        return self.now

    def run(self, depth: int, seconds: float) -> Slice:
        self.visits.append(depth)
        begun = self.now
        arrivals, reads, deadline = [begun] * depth, [], float("inf")
        first: dict[int, float] = {}
        while min(arrivals) < deadline:
            worker = min(range(depth), key=lambda w: (arrivals[w], w))
            self.now += 8 * MIB / 1e6 / self._mb_s(depth, self.now)
            reads.append(Read(arrivals[worker], self.now, 8 * MIB))
            first.setdefault(worker, self.now)
            arrivals[worker] = self.now
            if len(first) == depth and deadline == float("inf"):
                deadline = self.now + seconds
        return Slice(depth, tuple(reads), max(first.values()), min(deadline, *arrivals))


def peaked(depth: int, now: float) -> float:
    return {1: 900, 2: 1300, 3: 1500, 4: 1700, 6: 1600, 8: 1500, 16: 1400, 32: 1200}[depth]


@pytest.mark.parametrize("seconds", [4.5, 20.0])
def test_a_fast_disk_is_measured_at_every_depth_and_the_peak_is_found(seconds: float) -> None:
    disk = ModelDisk(peaked)
    log = sweep(disk, DEPTHS, 8 * MIB, seconds, clock=disk.clock)
    assert sorted(log.windows) == list(DEPTHS)
    assert log.skipped == {}
    for depth, windows in log.windows.items():
        assert np.median(windows) == pytest.approx(peaked(depth, 0), rel=0.01)
    assert best_depth({d: float(np.median(log.windows[d])) for d in log.revisited}) == 4
    assert 0.8 * seconds <= disk.now <= seconds


def test_a_slow_disk_keeps_to_the_time_and_names_what_it_left_out() -> None:
    disk = ModelDisk(lambda depth, now: 60.0)
    log = sweep(disk, DEPTHS, 8 * MIB, 4.5, clock=disk.clock)
    assert disk.now <= 4.5 * 1.1
    assert log.windows[1] == pytest.approx([60.0] * len(log.windows[1]))
    assert set(log.skipped) | set(log.windows) == set(DEPTHS)
    assert {16, 32} <= set(log.skipped)
    assert "more than was left" in log.skipped[32]


def test_depths_beyond_the_data_are_left_out() -> None:
    disk = ModelDisk(peaked, blocks=5)
    log = sweep(disk, DEPTHS, 8 * MIB, 4.5, clock=disk.clock)
    assert sorted(log.windows) == [1, 2, 3, 4]
    assert log.skipped[6] == "there are only 5 blocks to read"


def test_depths_that_need_too_much_memory_are_left_out() -> None:
    disk = ModelDisk(lambda depth, now: 1e6)
    log = sweep(disk, (1, 2, 4), 400 * MIB, 4.5, clock=disk.clock)
    assert sorted(log.windows) == [1, 2]
    assert log.skipped == {4: "it needs 1,678 MB of buffers"}


@pytest.mark.parametrize("ends_at", [1.0, 2.5])
def test_credits_that_end_during_the_sweep_give_the_late_rate(ends_at: float) -> None:
    # field case 81, through the whole sweep
    disk = ModelDisk(lambda depth, now: 260.0 if now < ends_at else 128.0)
    log = sweep(disk, (1, 2, 3, 4), 8 * MIB, 6.0, clock=disk.clock)
    rates = {d: depth_rate(d, log.windows[d], log.latencies[d]) for d in log.revisited}
    best = rates[best_depth({d: r.mb_s for d, r in rates.items()})]
    assert best.mb_s == pytest.approx(128.0, rel=0.02)


# --- the own file ----------------------------------------------------------------------------


def test_the_own_file_neither_compresses_nor_repeats(tmp_path: Path) -> None:
    block = 1 << 20
    with own_target(tmp_path, 8 * block, block, 60.0) as target:
        content = Path(target.paths[0]).read_bytes()
        assert list(tmp_path.iterdir()) == []
    assert target.size == len(content) == 8 * block
    assert len(zlib.compress(content, 1)) > 0.99 * len(content)
    pages = {content[i : i + 4096] for i in range(0, len(content), 4096)}
    assert len(pages) == len(content) // 4096


def test_writing_stops_when_its_time_is_up(tmp_path: Path) -> None:
    now = iter(range(1000))
    with own_target(tmp_path, 64 * MIB, MIB, 5.0, clock=lambda: float(next(now))) as target:
        assert target.size == 5 * MIB


def test_a_full_disk_keeps_what_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = disk_files._write_all, []

    def write(fd: int, data: memoryview) -> None:
        calls.append(1)
        if len(calls) == 4:
            real(fd, data[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, data)

    monkeypatch.setattr(disk_files, "_write_all", write)
    with own_target(tmp_path, 16 * MIB, MIB, 60.0) as target:
        assert target.size == 3 * MIB
        assert Path(target.paths[0]).stat().st_size == 3 * MIB


Usage = namedtuple("Usage", "total used free")


def test_the_disk_is_never_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def free(size: int) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(1 << 40, 0, size))

    free((1 << 30) + 100 * MIB)
    assert room_for(tmp_path, 256 * MIB, 32 * MIB) == 100 * MIB
    free(1 << 40)
    assert room_for(tmp_path, 256 * MIB, 32 * MIB) == 256 * MIB
    free((1 << 30) + 31 * MIB)
    with pytest.raises(DiskError, match="free some, or name files"):
        disk_queue_depth(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_margin_is_a_tenth_of_a_small_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gib = 1 << 30
    assert [free_margin(total) for total in (gib // 4, 5 * gib, 10 * gib, 1000 * gib)] == [
        64 * MIB,
        gib // 2,
        gib,
        gib,
    ]
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(gib // 2, 0, 64 * MIB + 40 * MIB))
    assert room_for(tmp_path, 256 * MIB, 32 * MIB) == 40 * MIB


def test_a_small_chunk_is_not_a_lack_of_room(tmp_path: Path) -> None:
    """16 MiB were asked for: two reads of 8 MiB, and no disk is too full for them."""
    assert room_for(tmp_path, 16 * MIB, 32 * MIB) == 16 * MIB
    needs_a_disk(tmp_path)
    result = disk_queue_depth(tmp_path, depths=(1, 2, 3), chunk_mb=16, budget_seconds=0.5)
    assert result.data_bytes in {8 * MIB, 16 * MIB}
    assert result.skipped.keys() >= {3}


def test_writing_stops_when_others_use_the_room_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gib = 1 << 30
    free = iter([3 * gib, 2 * gib, gib - 1])
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(100 * gib, 0, next(free)))
    with own_target(tmp_path, 256 * MIB, MIB, 60.0) as target:
        assert target.size == 3 * 32 * MIB  # looked at with every sync


@pytest.mark.parametrize("block", [4096, 20_480, 65_536])
def test_small_blocks_need_little_memory_and_do_not_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    drawn: list[int] = []
    real = os.urandom

    def count(size: int) -> bytes:
        drawn.append(size)
        return real(size)

    monkeypatch.setattr("pichak_core.measure._disk_files.os.urandom", count)
    with own_target(tmp_path, 4 * MIB, block, 60.0) as target:
        content = Path(target.paths[0]).read_bytes()
    assert max(drawn) <= 2 * block + 2 * 4099
    assert len(content) == 4 * MIB // block * block
    pages = {content[i : i + 4096] for i in range(0, len(content), 4096)}
    assert len(pages) == len(content) // 4096


KILLED = """
import sys
from pichak_core.devices import direct_io
from pichak_core.measure.disk import disk_queue_depth
if sys.argv[2] == "named":
    direct_io._open_tmpfile = lambda directory: None
disk_queue_depth(
    sys.argv[1], chunk_mb=64, block_mb=1, budget_seconds=60,
    on_progress=lambda text: print(text, flush=True),
)
"""


# "named": file systems without O_TMPFILE, where the file has a name for a moment.
@pytest.mark.parametrize(
    ("moment", "how"), [("writing", "unnamed"), ("depth 2", "unnamed"), ("depth 1", "named")]
)
def test_a_kill_leaves_no_file(tmp_path: Path, moment: str, how: str) -> None:
    needs_a_disk(tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), how], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    try:
        for line in child.stdout:
            if line.strip() == moment:
                break
        else:
            pytest.fail("the probe ended before it could be killed")
        time.sleep(0.02)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert child.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


# --- the whole measurement -------------------------------------------------------------------


def test_a_real_disk(tmp_path: Path) -> None:
    filesystem = needs_a_disk(tmp_path)
    result = disk_queue_depth(
        tmp_path, depths=(4, 1, 2), chunk_mb=32, block_mb=1, budget_seconds=1.5
    )
    assert list(tmp_path.iterdir()) == []
    assert result.filesystem == filesystem
    assert result.own_file
    assert result.data_bytes in range(4 * MIB, 33 * MIB, MIB)
    assert sorted([*result.mb_s, *result.skipped]) == [1, 2, 4]
    if not result.bypassed:
        pytest.skip(f"no bypass on {filesystem.describe()}: {result.refusal}")
    assert result.best is not None
    assert result.best.mb_s in result.mb_s.values()
    assert result.bytes_read >= 3 * MIB
    if result.traffic.own_read is not None:
        assert result.traffic.own_read >= result.bytes_read
        assert "a cache answered" not in result.suspect
    assert json.loads(json.dumps(result.as_dict(), allow_nan=False))["best_depth"] in {1, 2, 4}
    text = result.describe()
    for part in ("MB/s", "p99", filesystem.type, "cache bypassed"):
        assert part in text


def test_the_users_files_are_read_and_left_alone(tmp_path: Path) -> None:
    needs_a_disk(tmp_path)
    contents = [written(tmp_path / f"{i}.bin", 3 * MIB + 1000 * i) for i in range(3)]
    paths = [tmp_path / f"{i}.bin" for i in range(3)]
    result = disk_queue_depth(paths, depths=(1, 3), block_mb=1, budget_seconds=0.8)
    assert (result.files, result.data_bytes) == (3, 9 * MIB + 3000)
    assert [path.read_bytes() for path in paths] == contents
    assert len(list(tmp_path.iterdir())) == 3


def test_holes_are_not_read(tmp_path: Path) -> None:
    needs_a_disk(tmp_path)
    with (tmp_path / "half").open("wb") as file:
        file.write(os.urandom(4 * MIB))
        file.truncate(8 * MIB)
        os.fsync(file.fileno())
    result = disk_queue_depth(tmp_path / "half", depths=(1,), block_mb=1, budget_seconds=0.5)
    assert result.data_bytes == 4 * MIB
    assert any(note.startswith("50% of the data are holes") for note in result.notes)
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(8 * MIB)
    with pytest.raises(DiskError, match="holes and nothing written"):
        disk_queue_depth(tmp_path / "hole")


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_memory_is_not_a_disk() -> None:
    # field case 77: /dev/shm takes O_DIRECT on new kernels
    result = disk_queue_depth("/dev/shm")
    assert result.is_memory
    assert not result.ranks
    assert "memory, not a disk" in result.verdict
    assert "memory, not a disk" in result.describe()
    found = Fingerprint()
    for reading in readings(result):
        found.add(reading)
    assert sorted(found) == sorted(METRICS)
    for name in METRICS[:4]:
        missing = found[name]
        assert isinstance(missing, Unmeasured)
        assert missing.reason is Reason.NO_DEVICE
    assert found.text("disk.filesystem") == "tmpfs"


class Refusing:
    """The real calls, except one that is refused from its n-th time on, for O_DIRECT alone."""

    def __init__(self, phase: str, after: int = 0) -> None:
        self._phase, self._left = phase, after
        self._direct: set[int] = set()

    def _check(self, phase: str, direct: bool) -> None:
        if phase == self._phase and direct:
            self._left -= 1
            if self._left < 0:
                raise OSError(errno.EINVAL, "Invalid argument")

    def open(self, path: str, flags: int) -> int:
        direct = bool(flags & os.O_DIRECT)
        self._check("open", direct)
        fd = os.open(path, flags)
        if direct:
            self._direct.add(fd)
        return fd

    def fstat(self, fd: int) -> os.stat_result:
        self._check("stat", fd in self._direct)
        return os.fstat(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._check("read", fd in self._direct)
        return os.preadv(fd, buffers, offset)

    def close(self, fd: int) -> None:
        direct = fd in self._direct
        self._direct.discard(fd)
        os.close(fd)
        self._check("close", direct)


@pytest.mark.parametrize(
    ("phase", "after"),
    [("open", 0), ("stat", 0), ("read", 0), ("close", 0), ("read", 1), ("close", 1)],
)
def test_a_refused_bypass_is_cached_and_never_a_speed(
    tmp_path: Path, phase: str, after: int
) -> None:
    # field case 78: refused at once, or in the middle of the measurement, or when all was done
    needs_a_disk(tmp_path)
    written(tmp_path / "f", 4 * MIB)
    before = len(os.listdir("/proc/self/fd"))
    result = disk_queue_depth(
        tmp_path / "f",
        depths=(1, 2),
        block_mb=1,
        budget_seconds=0.3,
        system=Refusing(phase, after),
    )
    assert len(os.listdir("/proc/self/fd")) == before
    assert not result.bypassed
    assert not result.ranks
    assert f"refused at {phase}" in result.refusal
    assert "cache not bypassed" in result.verdict
    assert result.verdict.startswith("cached")
    found = {reading.name: reading for reading in readings(result)}
    assert sorted(found) == sorted(METRICS)
    for name in METRICS[:4]:
        missing = found[name]
        assert isinstance(missing, Unmeasured)
        assert missing.reason is Reason.NOT_SUPPORTED
        assert "cache not bypassed" in missing.detail


def test_a_suspect_rate_ranks_nobody() -> None:
    # field case 80
    best = rate(2, 5700, 5700, 5700)
    result = DiskResult(
        FileSystem("zfs", "zfs", "/tank", "tank"),
        (rate(1, 3000), best),
        best,
        bypassed=True,
        suspect="the device read nothing: a cache answered",
        block_bytes=8 * MIB,
        data_bytes=10**9,
        files=1,
    )
    found = Fingerprint()
    for reading in readings(result):
        found.add(reading)
    assert sorted(found) == sorted(METRICS)
    assert not result.ranks
    assert result.verdict.startswith("suspect: the device read nothing")
    for name in METRICS[:4]:
        assert isinstance(found[name], Measurement)
        assert found.number(name) is None
    assert Fingerprint.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_metrics_of_a_good_result() -> None:
    best = depth_rate(4, (1000.0, 1010.0, 990.0), [0.030, 0.031, 0.050])
    first = depth_rate(1, (700.0, 720.0), [0.011])
    disk = FileSystem("ext4", "disk", "/", "/dev/vda", "254:0", "vda")
    traffic = DiskTraffic(own_read=2_500_000, own_written=1_000_000)
    result = DiskResult(
        disk,
        (first, best),
        best,
        bypassed=True,
        block_bytes=8 * MIB,
        data_bytes=268_435_456,
        own_file=True,
        files=1,
        bytes_read=2_000_000,
        traffic=traffic,
        skipped={32: "it needs 9 s, more than was left for it"},
    )
    found = Fingerprint()
    for reading in readings(result):
        found.add(reading)
    assert found.number("disk.read_mb_s") == 1000
    assert found.number("disk.read_best_depth") == 4
    assert found.number("disk.read_p99_ms") == pytest.approx(50)
    assert found.number("disk.read_depth1_mb_s") == 710
    rates = found["disk.read_mb_s"]
    assert isinstance(rates, Measurement)
    assert rates.samples == 3
    assert rates.spread == pytest.approx(1.4826 * 10)
    assert rates.conditions["others_read_mb"] == 0.5
    assert rates.conditions["written_meanwhile_mb"] == 1.0
    assert [entry["mb_s"] for entry in rates.detail["rates"]] == [710, 1000]
    assert "depth 32 not measured: it needs 9 s" in result.describe()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda base: [], "no path was given"),
        (lambda base: [base / "nothing"], "does not exist"),
        (lambda base: [base, base / "file"], "is a directory among 2 paths"),
        (lambda base: [base / "empty"], "empty, nothing to read"),
        (lambda base: ["/dev/null"], "not a regular file"),
        (lambda base: [base / "file", "/dev/shm/other"], "lies on"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    tmp_path: Path, make: Callable[[Path], list[Path]], message: str, shared_file: Path
) -> None:
    (tmp_path / "empty").touch()
    written(tmp_path / "file", 100)
    paths = [shared_file if str(p) == "/dev/shm/other" else p for p in make(tmp_path)]
    if filesystem_of(tmp_path).kind == "memory" and message == "lies on":
        pytest.skip("both are memory here")
    with pytest.raises(DiskError, match=message):
        disk_queue_depth(paths)


@pytest.fixture
def shared_file() -> Iterator[Path]:
    path = Path(f"/dev/shm/pichak-test-{os.getpid()}")
    path.write_bytes(b"x" * 100)
    yield path
    path.unlink()


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depths": ()}, "depths"),
        ({"depths": (0, 1)}, "a depth is a number of reads"),
        ({"block_mb": 0}, "block_mb 0"),
        ({"block_mb": 1025}, "at most 1,024 MiB"),
        ({"block_mb": NAN}, "block_mb nan"),
        ({"block_mb": INF}, "block_mb inf"),
        ({"chunk_mb": 1}, "holds at least one read of 8 MiB"),
        ({"chunk_mb": NAN}, "chunk_mb nan"),
        ({"chunk_mb": INF}, "chunk_mb inf"),
        ({"chunk_mb": -1}, "chunk_mb -1"),
        ({"budget_seconds": NAN}, "budget_seconds nan"),
        ({"budget_seconds": 0}, "budget_seconds 0"),
    ],
)
def test_impossible_settings(tmp_path: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        disk_queue_depth(tmp_path, **settings)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_files_smaller_than_one_read_have_no_rate(tmp_path: Path) -> None:
    needs_a_disk(tmp_path)
    for index in range(2):
        written(tmp_path / str(index), 3 * MIB)
    with pytest.raises(DiskError, match="3,145,728 bytes are less than one read of 8,388,608"):
        disk_queue_depth(tmp_path / "0")
    with pytest.raises(DiskError, match="each of the 2 files"):
        disk_queue_depth([tmp_path / "0", tmp_path / "1"])
    # the size of a chunk is for a file that is written
    with pytest.raises(DiskError, match="less than one read of 1,073,741,824"):
        disk_queue_depth(tmp_path / "0", block_mb=1024)
    with (tmp_path / "pieces").open("wb") as file:
        for index in range(8):
            file.seek(2 * index * MIB)
            file.write(os.urandom(MIB))
        os.fsync(file.fileno())
    with pytest.raises(DiskError, match="no 2,097,152 bytes in a row"):
        disk_queue_depth(tmp_path / "pieces", block_mb=2)


def test_little_data_and_short_reads_are_told(tmp_path: Path) -> None:
    needs_a_disk(tmp_path)
    written(tmp_path / "f", 2 * MIB + 512 * 1024)
    result = disk_queue_depth(tmp_path / "f", depths=(1,), block_mb=1, budget_seconds=0.5)
    assert result.data_bytes == 2 * MIB + 512 * 1024
    assert any(note.startswith("1 of the 3 reads are shorter") for note in result.notes)
    assert any("only 2.6 MB of data" in note for note in result.notes)


def test_a_rate_that_no_storage_gives_is_suspect_unless_a_counter_vouches() -> None:
    disk = FileSystem("ext4", "disk", block_device="sda")
    fast = rate(4, 70_000, 70_000)
    assert "more than storage gives" in suspicion(disk, DiskTraffic(), 1000, fast)
    assert suspicion(disk, DiskTraffic(own_read=1000), 1000, fast) == ""
    assert suspicion(disk, DiskTraffic(), 1000, rate(4, 50_000, 50_000)) == ""


def test_many_files_are_taken_evenly(tmp_path: Path) -> None:
    for index in range(130):
        (tmp_path / f"{index:03}").write_bytes(bytes([index]))
    files, directory = disk_files.files_to_read(sorted(tmp_path.iterdir()))
    assert directory is None
    assert [int(f.name) for f in files] == [i * 130 // 64 for i in range(64)]


def test_it_is_registered_and_fits_its_budget_in_words() -> None:
    probe = probes()["disk"]
    assert sorted(m.name for m in probe.metrics) == sorted(METRICS)
    assert probe.budget_seconds["quick"] <= 6
    assert probe.budget_seconds["full"] <= 30


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_through_the_registry() -> None:
    found = run_one(probes()["disk"], Context(directory=Path("/dev/shm")))
    assert sorted(reading.name for reading in found) == sorted(METRICS)


def test_a_file_given_twice_is_read_once(tmp_path: Path) -> None:
    if filesystem_of(tmp_path).kind not in {"disk", "layered"}:
        pytest.skip("temporary files lie on no disk")
    file, link, twin = (tmp_path / name for name in ("a", "link", "twin"))
    file.write_bytes(os.urandom(1 << 20))
    link.symlink_to(file)
    os.link(file, twin)
    files, _ = disk_files.files_to_read([file, file, link, twin])
    assert files == [file]
    (tmp_path / "other").write_bytes(file.read_bytes())
    assert disk_files.files_to_read([link, tmp_path / "other", file])[0] == [
        link,
        tmp_path / "other",
    ]
    made = disk_queue_depth([file, link, twin], block_mb=0.25, depths=[1], budget_seconds=0.3)
    assert "3 paths name 1 different file, each read as one" in " ".join(made.facts())
