"""A real agent with a real job on hosts that are broken or restricted: it works, the gaps have
names, and nothing is left. Namespaces make the hosts; the machine's own `/proc`, disks and clock
stay as they are."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pichak_agent.home import open_some_home

#: An agent that says hello, runs a job of each kind asked for, and ends.
AGENT = """
import json, os, sys, time
began = time.monotonic()
from pichak_agent.daemon import Agent
from pichak_agent.messages import Job, Outcome, decode, encode
agent = Agent("node")
agent.hello()
if len(sys.argv) > 2:
    import subprocess
    for folder in sys.argv[2:]:
        subprocess.run(["dd", "if=/dev/zero", "bs=4k", f"of={folder}/ballast"],
                       stderr=subprocess.DEVNULL)
said = {"jobs": []}
RAMP = {"model": "builtin:gpt-1m", "device": "cpu", "seq_len": 16, "limit": 2,
        "memory_cap_bytes": 400 * 2**20, "step_seconds": 3.0}
ONLY = os.environ.get("ONLY", "software,virtualisation,host_memory,disk").split(",")
PARAMS = {"fingerprint": {"only": ONLY},
          "ramp": RAMP, "task": {}}
for kind in sys.argv[1].split(","):
    job = Job(kind, 1, kind, PARAMS[kind], 200.0, memory_cap_bytes=3 * 2**30)
    made = decode(agent.run(encode(job)), Outcome)
    read = made.result.get("fingerprint", {})
    said["jobs"].append({
        "status": made.status, "error": made.error, "seconds": made.seconds,
        "log": made.log_tail, "traceback": made.traceback,
        "measured": [name for name, one in read.items() if "value" in one],
        "gaps": {name: f"{one['unmeasured']}: {one.get('detail', '')}"
                 for name, one in read.items() if "unmeasured" in one}})
said["pending"] = [decode(data, Outcome).status for data in agent.pending()]
said["problems"] = agent.hello()["problems"]
agent.close()
said["elapsed"] = time.monotonic() - began
print(json.dumps(said))
"""


@dataclass(frozen=True)
class Said:
    """What the agent printed: the first job's end, its gaps, and what the agent told."""

    record: dict[str, Any]

    @property
    def job(self) -> dict[str, Any]:
        first: dict[str, Any] = self.record["jobs"][0]
        return first

    @property
    def gaps(self) -> dict[str, str]:
        found: dict[str, str] = self.job["gaps"]
        return found


def on_host(
    setup: str = "",
    *,
    unshare: tuple[str, ...] = ("-m",),
    inner: tuple[str, ...] = (),
    kinds: str = "fingerprint",
    env: dict[str, str] | None = None,
    fill: tuple[Path, ...] = (),
    status: str = "ok",
) -> Said:
    """Run the agent after the shell lines `setup` in new namespaces; skipped without them. The
    disks of the folders `fill` become full once it has said hello."""
    if setup or inner:
        if not hasattr(os, "geteuid") or os.geteuid() != 0 or not shutil.which("unshare"):
            pytest.skip("namespaces need root and unshare")
        if subprocess.run(["unshare", *unshare, "true"], check=False).returncode:
            pytest.skip("this machine makes no such namespaces")
    command = [*inner, sys.executable, "-c", AGENT, kinds, *map(str, fill)]
    if setup:
        lines = f'set -e\n{setup}\nexec "$@"'
        command = ["unshare", *unshare, "sh", "-c", lines, "sh", *command]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = Said(json.loads(done.stdout.splitlines()[-1]))
    for job in said.record["jobs"]:
        assert job["status"] == status, (job["error"], job["traceback"], job["log"])
        assert 0 < job["seconds"] <= said.record["elapsed"]
    assert said.record["pending"] == [status] * len(said.record["jobs"])
    return said


KINDS = pytest.mark.parametrize(
    "kinds", ["fingerprint", pytest.param("fingerprint,ramp", marks=pytest.mark.slow)]
)


@KINDS
def test_an_ordinary_host_has_no_strange_gap(kinds: str) -> None:
    """What the others are compared with."""
    said = on_host(kinds=kinds)
    gaps = {name for name in said.gaps if not name.startswith(("gpu.", "software.", "cpu.quota"))}
    assert gaps == set()
    assert said.record["problems"] == []


@KINDS
@pytest.mark.root
def test_proc_is_masked(kinds: str) -> None:
    said = on_host("mount -t tmpfs none /proc", kinds=kinds)
    assert "/proc/meminfo" in said.gaps["host.memory_total_mib"]
    assert "/proc/sys/kernel/osrelease" in said.gaps["software.kernel"]
    assert "its processes could not be watched: /proc shows no processes here" in said.job["log"]
    assert "host.memory_copy_mb_s" in said.job["measured"]


@pytest.mark.root
def test_files_of_proc_are_masked() -> None:
    """As container runtimes do it: /dev/null over single files."""
    files = "stat meminfo loadavg vmstat cpuinfo"
    said = on_host(f"for f in {files}; do mount --bind /dev/null /proc/$f; done")
    assert said.gaps["host.memory_total_mib"] == "failed: /proc/meminfo has no MemTotal"
    assert "its processes could not" not in said.job["log"]


@KINDS
@pytest.mark.root
def test_other_users_processes_are_hidden(kinds: str) -> None:
    """A mount of its own: to remount /proc would hide them on the whole machine."""
    said = on_host(
        "mount -t proc -o hidepid=2 proc /proc",
        inner=("unshare", "--user"),
        kinds=kinds,
    )
    assert said.job["log"] == "" or "could not be watched" not in said.job["log"]
    assert "host.memory_total_mib" in said.job["measured"]


@KINDS
@pytest.mark.root
def test_it_is_nobody(kinds: str) -> None:
    """A user without a name and without rights."""
    said = on_host("true", inner=("unshare", "--user"), kinds=kinds)
    assert "host.memory_total_mib" in said.job["measured"]
    if "could not be" in said.job["log"]:
        assert "held by looking, not by the kernel" in said.job["log"]


@KINDS
@pytest.mark.root
def test_every_disk_is_read_only(kinds: str) -> None:
    """Only shared memory can be written: the outcomes are kept there, and that is told."""
    with tempfile.TemporaryDirectory() as folder:  # stands for a machine's own /dev/shm
        setup = f"mount -t tmpfs none /dev/shm\nmount -o remount,ro,bind /\ncd {folder}"
        said = on_host(setup, kinds=kinds)
    (problem,) = said.record["problems"]
    assert problem.startswith("outcomes are kept in /dev/shm/pichak-")
    assert "Read-only file system" in problem
    assert "memory, not a disk" in said.gaps["disk.read_mb_s"]


@pytest.mark.parametrize("when", ["before", "meanwhile", "meanwhile, and the temporary folder"])
@pytest.mark.root
def test_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Its jobs run elsewhere, and the next agent finds what was kept there."""
    home, temporary, memory = (tmp_path / name for name in ("home", "temporary", "memory"))
    for folder in (home, temporary, memory):
        folder.mkdir()
    small = f"mount -t tmpfs -o size=1m none {home}\nmount --bind {memory} /dev/shm"
    if when == "before":
        small += f"\ndd if=/dev/zero bs=4k of={home}/ballast || true"
    full = [home] * ("meanwhile" in when)
    if "temporary" in when:
        small += f"\nmount -t tmpfs -o size=1m none {temporary}"
        full.append(temporary)
    env = {"PICHAK_HOME": str(home), "TMPDIR": str(temporary), "ONLY": "virtualisation"}
    said = on_host(small, env=env, fill=tuple(full))
    user = f"pichak-{os.getuid()}"
    kept = Path("/dev/shm") if "temporary" in when else temporary
    assert said.record["problems"] == [
        f"outcomes are kept in {kept / user}, because {home} takes none: No space left on device"
    ]
    there = memory if "temporary" in when else temporary
    assert [path.name for path in there.rglob("job-*")] == []
    monkeypatch.setenv("PICHAK_HOME", str(home))
    monkeypatch.setattr("tempfile.tempdir", str(there))
    heir, why = open_some_home("next")
    assert ([key.job_id for key, _ in heir.spool.pending()], why) == (["fingerprint"], "")
    heir.close()


@pytest.mark.root
def test_every_place_becomes_full(tmp_path: Path) -> None:
    """The outcome names the places, and is handed out from memory."""
    home = tmp_path / "home"
    home.mkdir()
    small = f"mount -t tmpfs -o size=1m none {home}\nmount -t tmpfs -o size=1m none /dev/shm"
    env = {"PICHAK_HOME": str(home), "TMPDIR": str(home)}
    said = on_host(small, env=env, fill=(home, Path("/dev/shm")), status="error")
    for told in (said.job["error"], *said.record["problems"]):
        assert f"{home}" in told
        assert "/dev/shm" in told
        assert "set PICHAK_HOME or TMPDIR to a folder with room" in told
    assert len(said.record["problems"]) == 1


@pytest.mark.root
def test_nothing_at_all_can_be_written() -> None:
    if os.geteuid() != 0:
        pytest.skip("namespaces need root")
    setup = "mount -o remount,ro,bind /\nmount -t tmpfs -o ro none /dev/shm"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{setup}\nexec "$@"', "sh", sys.executable, "-c", AGENT, ""],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "an agent needs one folder that it can write, and there is none" in last


@KINDS
@pytest.mark.root
def test_there_is_no_shared_memory(kinds: str) -> None:
    devices = "null zero random urandom"
    setup = (
        "d=$(mktemp -d)\nmount -t tmpfs none $d\n"
        f"for f in {devices}; do touch $d/$f; mount --bind /dev/$f $d/$f; done\n"
        "ln -s /proc/self/fd $d/fd\nmount --rbind $d /dev\numount -l $d\nrmdir $d"
    )
    said = on_host(setup, kinds=kinds)
    assert "/dev/shm" in said.gaps["host.shm_mib"]
    assert "No such file or directory" in said.gaps["host.shm_mib"]


@pytest.mark.root
def test_shared_memory_is_a_folder_on_a_disk(tmp_path: Path) -> None:
    """Its size would be the disk's."""
    said = on_host(f"mount --bind {tmp_path} /dev/shm")
    assert "/dev/shm is no memory, it is" in said.gaps["host.shm_mib"]


@KINDS
def test_there_are_few_descriptors(kinds: str) -> None:
    said = on_host(inner=("sh", "-c", 'ulimit -n 40; exec "$@"', "sh"), kinds=kinds)
    assert "host.memory_total_mib" in said.job["measured"]


# -- NVML -----------------------------------------------------------------------------------------

_NVML = {
    "hangs": ("def nvmlInit():\n    import time\n    time.sleep(600)", "no answer within"),
    "dies": ("def nvmlInit():\n    import os\n    os.kill(os.getpid(), 11)", "signal 11"),
    "is missing": ("raise ImportError('no such thing')", "pip install"),
    "lies": (
        "nvmlInit = lambda: None\nnvmlDeviceGetCount = lambda: 2**31",
        "which cannot be",
    ),
}


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[pytest.mark.slow] * (how == "hangs")) for how in _NVML]
)
def test_nvml(how: str, tmp_path: Path) -> None:
    body, words = _NVML[how]
    fake = tmp_path / "path"
    fake.mkdir()
    (fake / "pynvml.py").write_text(f"class NVMLError(Exception):\n    value = 3\n{body}\n")
    said = on_host(env={"PYTHONPATH": str(fake)})
    assert words in said.gaps["software.driver"]
    assert "host.memory_total_mib" in said.job["measured"]


# -- clocks ---------------------------------------------------------------------------------------

#: Every second the wall clock jumps, by 40 days forth or back; the steady clock is not touched.
_JUMPING = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
static int (*real)(clockid_t, struct timespec *);
static long jump(void) {
    struct timespec steady;
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    real(CLOCK_MONOTONIC, &steady);
    return (steady.tv_sec % 2 ? 40L : -40L) * 86400;
}
int clock_gettime(clockid_t which, struct timespec *out) {
    long off = jump();
    int code = real(which, out);
    if (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE) out->tv_sec += off;
    return code;
}
int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""


@KINDS
def test_the_clock_is_set_meanwhile(kinds: str, tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library = tmp_path / "jump.c", tmp_path / "jump.so"
    source.write_text(_JUMPING)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True
    )
    probe = (
        "import time\nseen = [time.time() for _ in range(25) if not time.sleep(0.1)]\n"
        "print(max(seen) - min(seen))"
    )
    env = {"LD_PRELOAD": str(library)}
    jumped = subprocess.run(
        [sys.executable, "-c", probe], env={**os.environ, **env}, capture_output=True, check=True
    )
    assert float(jumped.stdout) > 86400
    said = on_host(kinds=kinds, env=env)
    assert said.record["problems"] == []
    for job in said.record["jobs"]:
        assert job["seconds"] < 280
