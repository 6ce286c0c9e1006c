"""Against psutil and against processes made for the purpose."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pichak_core.devices import processes
from pichak_core.devices.processes import (
    boot_id,
    children,
    descendants,
    kill_all,
    marked,
    memory_bytes,
    oom_kills,
    send_signal,
    started_at,
)

MIB = 1024**2

#: Three generations; the youngest has a name that looks like the rest of a line of /proc/PID/stat.
FAMILY = """
import ctypes, os, signal, sys, time
hog = bytearray(30 * 2**20)
for i in range(0, len(hog), 4096): hog[i] = 1
if os.fork() == 0:
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(15, b"a) R 1 (b) ", 0, 0, 0)
        print("ready", flush=True)
    time.sleep(60)
time.sleep(60)
"""


@pytest.fixture
def family() -> Iterator[subprocess.Popen[str]]:
    made = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(FAMILY)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PICHAK_TEST_FAMILY": f"of {os.getpid()}"},
    )
    assert made.stdout
    assert made.stdout.readline() == "ready\n"
    yield made
    left = kill_all(lambda: marked("PICHAK_TEST_FAMILY", f"of {os.getpid()}"))
    made.wait()
    made.stdout.close()
    assert left == []


def test_descendants_and_marks(family: subprocess.Popen[str]) -> None:
    below = descendants(family.pid)
    assert len(below) == 2
    truth = psutil.Process(family.pid).children(recursive=True)
    assert sorted(below) == sorted(child.pid for child in truth)
    assert psutil.Process(below[1]).ppid() == below[0]
    assert children(family.pid) == below[:1]
    assert children(below[1]) == []
    assert children(2**22 + 1) is None
    everyone = marked("PICHAK_TEST_FAMILY", f"of {os.getpid()}")
    assert sorted(everyone) == sorted([family.pid, *below])
    assert marked("PICHAK_TEST_FAMILY", "of") == []


def test_psutil_says_the_same_where_there_is_no_proc(
    family: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    below = descendants(family.pid)
    marks = marked("PICHAK_TEST_FAMILY", f"of {os.getpid()}")
    resident = memory_bytes([family.pid])
    monkeypatch.setattr(processes, "_HAS_PROC", False)
    monkeypatch.setattr(processes, "IS_LINUX", False)
    assert sorted(descendants(family.pid)) == sorted(below)
    assert children(family.pid) == below[:1]
    assert children(2**22 + 1) is None
    assert sorted(marked("PICHAK_TEST_FAMILY", f"of {os.getpid()}")) == sorted(marks)
    # The process goes on meanwhile: the same to within a few pages.
    assert memory_bytes([family.pid]) == pytest.approx(resident, abs=1 << 20)
    assert started_at(family.pid) == started_at(family.pid) is not None
    assert started_at(2**22 + 1) is None
    assert descendants(2**22 + 1) == []


def test_memory_shared_by_forks_counts_once(family: subprocess.Popen[str]) -> None:
    everyone = [family.pid, *descendants(family.pid)]
    each = [psutil.Process(pid).memory_info().rss for pid in everyone]
    assert memory_bytes(everyone, more_than=1 << 50) == sum(each)
    assert sum(each) > 90 * MIB
    together = memory_bytes(everyone, more_than=60 * MIB)
    assert 30 * MIB < together < 60 * MIB


def test_what_is_gone_holds_nothing() -> None:
    assert memory_bytes([2**22 + 1]) == 0
    assert started_at(2**22 + 1) is None
    assert not send_signal(2**22 + 1, signal.SIGTERM)


def test_a_zombie_is_not_alive() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    until = time.monotonic() + 5.0
    while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < until:
        time.sleep(0.01)
    assert pid not in descendants(os.getpid())
    assert started_at(pid) is None
    os.waitpid(pid, 0)


def test_kill_all_says_what_it_could_not_kill() -> None:
    assert kill_all(lambda: [2**22 + 1], patience_seconds=0.05) == [2**22 + 1]


def test_boot_id_is_the_kernels() -> None:
    assert boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@pytest.mark.parametrize(
    ("membership", "mount", "file", "text"),
    [
        (
            "0::/box\n",
            "30 20 0:26 / {sys}/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "fs/cgroup/box/memory.events",
            "low 0\nhigh 0\nmax 9\noom 8\noom_kill 7\noom_group_kill 0\n",
        ),
        (
            "5:memory:/box\n",
            "30 20 0:26 / {sys}/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
            "fs/cgroup/memory/box/memory.oom_control",
            "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n",
        ),
    ],
)
def test_oom_kills_of_both_versions_of_control_groups(
    tmp_path: Path, membership: str, mount: str, file: str, text: str
) -> None:
    proc, sys_root = tmp_path / "proc", tmp_path / "sys"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(membership)
    (proc / "self" / "mountinfo").write_text(mount.format(sys="/sys"))
    (proc / "vmstat").write_text("pgfault 5\noom_kill 3\n")
    counter = sys_root / file
    counter.parent.mkdir(parents=True)
    counter.write_text(text)
    assert oom_kills(proc, sys_root) == {str(proc / "vmstat"): 3, str(counter): 7}


def test_no_counters_is_no_evidence(tmp_path: Path) -> None:
    assert oom_kills(tmp_path, tmp_path) == {}
