"""A job's own control group: on fake trees of version 2, and with the kernel's own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pichak_core.devices.job_group import JobGroup, make_group, remove_stale_groups
from pichak_core.devices.processes import started_at

MIB = 2**20

HOG = "hog = bytearray(200 * 2**20)\nfor i in range(0, len(hog), 4096): hog[i] = 1\n"


class Tree:
    """Version 2 below a folder: this process is in ``/service/agent``."""

    def __init__(self, root: Path) -> None:
        self.proc, self.sys = root / "proc", root / "sys"
        self.top = self.sys / "fs/cgroup"
        self.service, self.own = self.top / "service", self.top / "service/agent"
        self.own.mkdir(parents=True)
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self/cgroup").write_text("0::/service/agent\n")
        (self.proc / "self/mountinfo").write_text(
            "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
        )
        for folder in (self.top, self.service, self.own):
            (folder / "cgroup.subtree_control").write_text("")

    def hands_on(self, folder: Path) -> None:
        (folder / "cgroup.subtree_control").write_text("cpu memory\n")

    def make(self, cap: int = 64 * MIB) -> JobGroup | str:
        return make_group("job", cap, proc=self.proc, sys=self.sys)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_below_the_own_group_where_it_hands_memory_on(tree: Tree) -> None:
    tree.hands_on(tree.own)
    group = tree.make()
    assert isinstance(group, JobGroup)
    assert (group.folder, group.capped) == (tree.own / "pichak-job-job", True)
    assert (group.folder / "memory.max").read_text() == str(64 * MIB)
    # What the kernel does not offer (no swap) is not made.
    assert [path.name for path in group.folder.iterdir()] == ["memory.max"]


def test_without_a_cap_it_only_names_the_processes(tree: Tree) -> None:
    tree.hands_on(tree.own)
    group = tree.make(0)
    assert isinstance(group, JobGroup)
    assert not group.capped
    assert list(group.folder.iterdir()) == []


def test_beside_the_own_group_where_that_escapes_no_limit(tree: Tree) -> None:
    """A group with processes cannot hand memory on (the kernel refuses it), its parent may."""
    tree.hands_on(tree.service)
    (tree.own / "memory.max").write_text("max\n")
    (tree.own / "cpu.max").write_text("max 100000\n")
    group = tree.make()
    assert isinstance(group, JobGroup)
    assert group.folder == tree.service / "pichak-job-job"


@pytest.mark.parametrize(
    ("name", "limit"),
    [("memory.max", "1073741824"), ("memory.high", "900000000"), ("cpu.max", "50000 100000")],
)
def test_a_job_never_leaves_the_limits_of_its_agent(tree: Tree, name: str, limit: str) -> None:
    tree.hands_on(tree.service)
    (tree.own / name).write_text(limit + "\n")
    assert isinstance(tree.make(), str)
    assert not (tree.service / "pichak-job-job").exists()


def test_why_there_is_none(tree: Tree) -> None:
    assert tree.make() == "no memory control group is mounted here"
    tree.hands_on(tree.own)
    (tree.own / "pichak-job-job").mkdir()
    holder = JobGroup(tree.own / "pichak-job-job").hold()
    said = tree.make()
    os.close(holder.held)
    assert isinstance(said, str)
    assert said.endswith("pichak-job-job cannot be made: File exists")


def test_what_dead_agents_left_is_removed(tree: Tree) -> None:
    """One that a living agent or warden looks after stays, however old and empty it is."""
    tree.hands_on(tree.own)
    left, held, others = (
        tree.own / name for name in ("pichak-job-left", "pichak-job-held", "others")
    )
    for folder in (left, held, others):
        folder.mkdir()
        os.utime(folder, (time.time() - 3600,) * 2)
    agent = JobGroup(held).hold()
    warden = agent.hold()
    assert isinstance(tree.make(), JobGroup)
    assert not left.exists()
    assert held.exists()
    assert others.exists()
    os.close(agent.held)
    remove_stale_groups(proc=tree.proc, sys=tree.sys)
    assert held.exists()
    os.close(warden.held)
    remove_stale_groups(proc=tree.proc, sys=tree.sys)
    assert not held.exists()
    assert (tree.own / "pichak-job-job").exists()


def test_what_is_no_jobs_is_never_taken_for_one_that_was_left(tree: Tree) -> None:
    """Beside the agent's own group in its slice lies another service, with processes in it."""
    tree.hands_on(tree.service)
    units = [
        tree.service / f"pichak-{name}" for name in ("coordinator.service", "job-x.scope", "y")
    ]
    for unit in units:
        unit.mkdir()
    assert isinstance(tree.make(), JobGroup)
    remove_stale_groups(proc=tree.proc, sys=tree.sys)
    assert [unit for unit in units if not unit.exists()] == []


def test_one_that_was_removed_cannot_be_held(tree: Tree) -> None:
    with pytest.raises(FileNotFoundError):
        JobGroup(tree.own / "pichak-job-gone").hold()


def test_a_number_of_another_namespace_is_nobody(tree: Tree) -> None:
    """``cgroup.procs`` shows 0 for those; signal 9 to process 0 would end this process's group."""
    tree.own.joinpath("cgroup.procs").write_text("0\n4194200\n")
    assert JobGroup(tree.own).pids() == [4194200]


def test_a_second_agent_is_refused_what_is_being_removed(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another agent that starts takes a group for left between its making and its holding."""
    tree.hands_on(tree.own)
    made: list[Path] = []
    mkdir = Path.mkdir

    def make_and_lose(folder: Path, *args: int, **more: bool) -> None:
        mkdir(folder, *args, **more)
        made.append(folder)
        if len(made) == 1:
            remove_stale_groups(proc=tree.proc, sys=tree.sys)

    monkeypatch.setattr(Path, "mkdir", make_and_lose)
    group = tree.make()
    assert isinstance(group, JobGroup)
    assert len(made) == 2
    assert group.folder.exists()


# -- the kernel's own -----------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[JobGroup]:
    made = make_group(f"test-{os.getpid()}", 48 * MIB)
    if isinstance(made, str):
        pytest.skip(f"no control group can be made: {made}")
    yield made
    made.remove()


def join(group: JobGroup, code: str) -> subprocess.Popen[bytes]:
    code = f"open({str(group.procs)!r}, 'w').write('0')\n{code}"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)


@pytest.mark.root
def test_the_kernel_holds_the_cap(group: JobGroup) -> None:
    assert group.oom_kills() == 0
    assert join(group, HOG).wait(60) == -9
    assert group.oom_kills() == 1
    # What fits is left alone.
    assert join(group, "hog = bytearray(8 * 2**20)").wait(60) == 0
    assert group.remove()
    assert not group.folder.exists()


@pytest.mark.root
def test_who_is_left_in_a_group_that_nobody_holds_is_ended(group: JobGroup) -> None:
    child = join(group, "import time; print('in', flush=True); time.sleep(60)")
    assert child.stdout is not None
    assert child.stdout.readline() == b"in\n"
    remove_stale_groups()
    assert group.pids() == [child.pid]
    os.close(group.held)
    remove_stale_groups()
    assert child.wait(10) == -9
    assert not group.folder.exists()


@pytest.mark.root
def test_nobody_leaves_it(group: JobGroup) -> None:
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        os.environ.clear()\n        print(os.getpid(), flush=True)\n"
        "        time.sleep(300)\n    os._exit(0)\nos.wait()"
    )
    process = join(group, code)
    assert process.stdout
    daemon = int(process.stdout.readline())
    assert process.wait(60) == 0
    assert group.pids() == [daemon]
    assert group.remove()
    assert group.remove()
    assert started_at(daemon) is None
