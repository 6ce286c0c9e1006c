"""A delegated group of version 2: on fake trees, and in a kernel that has nothing but version 2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pichak_core.devices import own_group
from pichak_core.devices.own_group import settle

IN_OWN_KERNEL = "PICHAK_TEST_OWN_KERNEL"
CGROUPS = Path("/sys/fs/cgroup")


class Unit:
    """``/pichak.slice/pichak-agent.service`` below a folder, which was delegated to it."""

    def __init__(self, root: Path, controllers: str = "cpu io memory") -> None:
        self.proc, self.sys = root / "proc", root / "sys"
        self.own = unit_of(root)
        self.own.mkdir(parents=True)
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self/cgroup").write_text("0::/pichak.slice/pichak-agent.service\n")
        (self.proc / "self/mountinfo").write_text(
            "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
        )
        (self.own / "cgroup.controllers").write_text(controllers + "\n")
        (self.own / "cgroup.subtree_control").write_text("")
        (self.own / "cgroup.procs").write_text(f"{os.getpid()}\n")

    def settle(self) -> Path | None:
        return settle(proc=self.proc, sys=self.sys)

    @property
    def control(self) -> str:
        return (self.own / "cgroup.subtree_control").read_text()


@pytest.fixture
def unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Unit:
    monkeypatch.setattr(own_group, "_delegated", lambda _folder: True)
    monkeypatch.setattr(own_group, "hands_on_memory", lambda folder: folder == unit_of(tmp_path))
    return Unit(tmp_path)


def unit_of(root: Path) -> Path:
    return root / "sys/fs/cgroup/pichak.slice/pichak-agent.service"


def test_it_moves_into_a_leaf(unit: Unit) -> None:
    leaf = unit.settle()
    assert leaf == unit.own / "agent"
    assert (leaf / "cgroup.procs").read_text() == "0"
    assert (unit.own / "cgroup.procs").read_text() == f"{os.getpid()}\n"


def test_it_comes_back_where_memory_cannot_be_handed_on(
    unit: Unit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_group, "hands_on_memory", lambda _folder: False)
    assert unit.settle() is None
    assert (unit.own / "cgroup.procs").read_text() == "0"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("cgroup.procs", "{pid}\n1\n"),  # a shell's group, or a container's with an init
        ("cgroup.procs", "{pid}\n0\n"),  # one of another process namespace
        ("cgroup.controllers", "cpu io\n"),  # memory is version 1's, or was not handed down
    ],
)
def test_a_group_that_is_not_its_own_alone_is_left_as_it_is(
    unit: Unit, file: str, text: str
) -> None:
    (unit.own / file).write_text(text.format(pid=os.getpid()))
    before = sorted(unit.own.iterdir())
    assert unit.settle() is None
    assert sorted(unit.own.iterdir()) == before
    assert unit.control == ""


def test_a_group_that_nobody_delegated_is_left_as_it_is(tmp_path: Path) -> None:
    unit = Unit(tmp_path)
    if os.geteuid() != 0:
        pytest.skip("the user's own folder is the user's own")
    assert unit.settle() is None
    assert not (unit.own / "agent").exists()


def test_a_users_own_group_was_delegated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = Unit(tmp_path)
    monkeypatch.setattr(own_group, "hands_on_memory", lambda _folder: True)
    monkeypatch.setattr(os, "geteuid", lambda: unit.own.stat().st_uid or 1000)
    assert (unit.settle() is not None) == bool(unit.own.stat().st_uid)


# -- a kernel's own -------------------------------------------------------------------------------

#: Started in the group that was delegated: settles, has a job killed at its cap, and leaves.
SERVICE = """
import os, subprocess, sys
from pathlib import Path
unit = Path(sys.argv[1])
(unit / "cgroup.procs").write_text("0")
from pichak_core.devices.job_group import JobGroup, make_group
from pichak_core.devices.own_group import settle, unsettle
print("before:", make_group("x", 64 << 20))
leaf = settle()
assert leaf == unit / "agent", leaf
assert (leaf / "cgroup.procs").read_text().split() == [str(os.getpid())]
group = make_group("job", 48 << 20)
assert isinstance(group, JobGroup), group
assert group.folder == unit / "pichak-job-job" and group.capped
hog = "b = bytearray(200 << 20)\\nfor i in range(0, len(b), 4096): b[i] = 1"
into = f"open({str(group.procs)!r}, 'w').write('0')\\n"
ended = subprocess.run([sys.executable, "-c", into + hog])
print("killed:", ended.returncode, group.oom_kills() > 0)
group.remove()
assert settle() is None
unsettle(leaf)
assert not leaf.exists()
assert (unit / "cgroup.subtree_control").read_text().split() == []
assert (unit / "cgroup.procs").read_text().split() == [str(os.getpid())]
"""


@pytest.mark.root
def test_jobs_get_groups_in_a_delegated_unit() -> None:
    if IN_OWN_KERNEL not in os.environ:
        pytest.skip("version 2 is tried in a kernel of its own")
    (CGROUPS / "cgroup.subtree_control").write_text("+memory")
    above = CGROUPS / "pichak.slice"
    unit, beside = above / "pichak-agent.service", above / "pichak-coordinator.service"
    for folder in (above, unit, beside):
        folder.mkdir()
    (above / "cgroup.subtree_control").write_text("+memory")
    (unit / "memory.max").write_text(str(512 * 2**20))
    coordinator = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (beside / "cgroup.procs").write_text(str(coordinator.pid))
    os.setxattr(unit, "trusted.delegate", b"1")
    done = subprocess.run(
        [sys.executable, "-c", SERVICE, str(unit)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    # While it is in the unit's own group that cannot hand memory on, and its limit is not left.
    assert said[0].startswith(f"before: {unit} hands the memory controller to no group below it")
    assert said[1:] == ["killed: -9 True"]
    assert coordinator.poll() is None
    # A group that nobody delegated is left alone, by root too.
    os.removexattr(unit, "trusted.delegate")
    done = subprocess.run(
        [sys.executable, "-c", SERVICE, str(unit)], capture_output=True, text=True, check=False
    )
    assert "AssertionError: None" in done.stderr
    assert [path.name for path in unit.iterdir() if path.is_dir()] == []
    coordinator.kill()
    coordinator.wait()


INIT = """#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp OMP_NUM_THREADS=1 {variable}=1
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /tmp
mount -t cgroup2 cgroup2 /sys/fs/cgroup
cd {root}
{python} -m pytest -q -p no:cacheprovider --color=no {file} -k delegated_unit 2>&1
echo o > /proc/sysrq-trigger
sleep 5
"""


@pytest.mark.slow
@pytest.mark.root
def test_version_2_in_user_mode_linux(tmp_path: Path) -> None:
    """The test before this one, in a kernel that has nothing but version 2."""
    kernel = shutil.which("linux.uml")
    if IN_OWN_KERNEL in os.environ or kernel is None:
        pytest.skip("it is running, or User Mode Linux is not installed")
    script = tmp_path / "init"
    script.write_text(
        INIT.format(
            root=Path(__file__).parents[2],
            python=sys.executable,
            file=Path(__file__),
            variable=IN_OWN_KERNEL,
        )
    )
    script.chmod(0o755)
    done = subprocess.run(
        [
            kernel,
            *("rootfstype=hostfs", "rootflags=/", "ro", "mem=1024M", f"init={script}"),
            *("con=null", "con0=fd:0,fd:1", f"uml_dir={tmp_path}", "quiet"),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "1 passed" in done.stdout, done.stdout[-3000:]
