"""Each way in which a job can end, with real processes: one outcome, and nothing left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pichak_agent import launch
from pichak_agent.frames import MAX_TOTAL_BYTES
from pichak_agent.messages import MAX_BYTES, Job, Outcome, decode
from pichak_agent.runner import run
from pichak_core.devices.job_group import PREFIX, make_group
from pichak_core.devices.processes import descendants, started_at

MIB = 1024**2

#: A program that speaks to the result pipe itself.
RAW = "import os, sys, time; fd = int(os.environ['PICHAK_RESULT_FD'])\n"
#: The real child, with the kind "task" replaced by `work(params, progress, partial)`.
CHILD = """
import os, signal, sys, time
from pichak_agent import child, child_jobs
def task(params, *, progress, partial):
    return work(params, progress, partial) or {"done": True}
child_jobs.JOBS["task"] = task
"""
#: A process that left its parent, its session and its group.
DAEMON = """
def daemon(name="d"):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for fd in range(0, 3): os.close(fd)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(300)
        os._exit(0)
    os.wait()
"""


def start(
    program: list[str] | None,
    *,
    kind: str = "task",
    params: dict[str, Any] | None = None,
    deadline: float = 60.0,
    cap: int = 0,
    **options: Any,
) -> Outcome:
    job = Job("job", 1, kind, params or {}, deadline, cap)
    outcome = decode(run(job, argv=program, **options), Outcome)
    assert (outcome.job_id, outcome.attempt, outcome.kind) == ("job", 1, kind)
    assert outcome.seconds > 0
    assert outcome.versions["python"] == sys.version.split()[0]
    return outcome


class Jump:
    """A clock that leaps past any deadline when the child says "ready": `late(program)` runs one
    that is surely at work when its time is up."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead

    def hear(self, text: str) -> None:
        self.ahead = 1000.0 if text == "ready" else self.ahead


def late(program: list[str], **options: Any) -> Outcome:
    jump = Jump()
    return start(program, on_progress=jump.hear, clock=jump, **options)


def raw(code: str) -> list[str]:
    return [sys.executable, "-c", RAW + textwrap.dedent(code)]


def child(work: str) -> list[str]:
    body = textwrap.indent(textwrap.dedent(work), "    ")
    code = f"{CHILD}{DAEMON}\ndef work(params, progress, partial):\n{body}\nchild.main()"
    return [sys.executable, "-c", code]


def test_a_jobs_threads_are_the_cores_that_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case 95."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    allowed = os.sched_getaffinity(0)
    program = child("return {'threads': os.environ['OMP_NUM_THREADS']}")
    os.sched_setaffinity(0, {min(allowed)})
    try:
        outcome = start(program)
    finally:
        os.sched_setaffinity(0, allowed)
    assert outcome.result == {"threads": "1"}


# -- it ends by itself ----------------------------------------------------------------------------


def test_ok() -> None:
    said: list[str] = []
    outcome = start(
        child("progress('one'); partial({'half': 1}); progress('two'); return {'value': 2.5}"),
        on_progress=said.append,
    )
    assert (outcome.status, outcome.error, outcome.result) == ("ok", "", {"value": 2.5})
    assert said == ["one", "two"]


def test_the_real_child_with_a_real_job() -> None:
    outcome = start(None, kind="fingerprint", params={"only": ["software"]})
    assert outcome.status == "ok", outcome.error
    versions = outcome.result["fingerprint"]
    assert versions["software.python"]["value"] == sys.version.split()[0]


def test_the_job_may_print_what_it_likes() -> None:
    outcome = start(
        child("""
            print('seen', flush=True); sys.stderr.write('err\\n'); os.write(1, b'\\xff\\xfe raw')
            os.system('echo from a shell')
        """)
    )
    assert outcome.status == "ok"
    for text in ("seen", "err", "raw", "from a shell"):
        assert text in outcome.log_tail


def test_the_log_keeps_its_end() -> None:
    outcome = start(child("sys.stdout.write('x' * 20_000_000 + 'the last words')"))
    assert outcome.status == "ok"
    assert outcome.log_tail.endswith("the last words")
    assert len(outcome.log_tail) <= 16 * 1024


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ("raise ValueError('two words')", "ValueError: two words"),
        ("raise SystemExit(3)", r"called sys.exit\(3\)"),
        ("sys.exit()", r"called sys.exit\(None\)"),
        ("raise BaseException('odd')", "BaseException: odd"),
        ("bytearray(1 << 60)", "MemoryError"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("return {'value': object()}", "cannot be sent: result: object"),
        ("return {1: 2}", "cannot be sent: result: a key is int"),
        ("return {str(i): 'x' * 60000 for i in range(300)}", "cannot be sent: .* more than"),
        ("return 5", "cannot be sent: result: int where"),
        ("partial({'a': object()})", "MessageError"),
        ("raise ValueError('long' * 50000)", "characters cut"),
        ("raise ValueError('\\ud83d cut')", "ValueError: . cut"),
    ],
)
def test_an_error_is_told(work: str, said: str) -> None:
    outcome = start(child(work))
    assert outcome.status == "error"
    assert re.search(said, outcome.error), outcome.error


def test_an_error_keeps_traceback_and_partial_result() -> None:
    outcome = start(child("partial({'rungs': [1, 2]}); raise RuntimeError('at the third')"))
    assert outcome.status == "error"
    assert outcome.result == {"rungs": [1, 2]}
    assert "RuntimeError: at the third" in outcome.traceback
    assert "in work" in outcome.traceback


def test_an_exception_that_cannot_be_told_is_an_error_too() -> None:  # field case 30
    outcome = start(
        child("""
            class Broken(Exception):
                def __str__(self): raise RuntimeError("no text")
            raise Broken(1)
        """)
    )
    assert outcome.status == "error"
    assert outcome.error.startswith("Broken: ")


@pytest.mark.parametrize("code", [0, 3])
def test_an_exit_without_a_result(code: int) -> None:
    outcome = start(child(f"print('last line'); os._exit({code})"))
    assert outcome.status == "error"
    assert f"exit code {code} and without a result" in outcome.error
    assert "it printed last: last line" in outcome.error


@pytest.mark.parametrize("name", ["SIGKILL", "SIGBUS", "SIGHUP"])
def test_a_signal_is_named(name: str) -> None:
    outcome = start(child(f"partial({{'n': 1}}); os.kill(os.getpid(), signal.{name})"))
    assert outcome.status == "killed"
    assert outcome.error.split(";")[0] == f"the job's process was killed by {name}"
    assert outcome.result == {"n": 1}


def test_a_crash_says_where() -> None:
    outcome = start(child("import ctypes; ctypes.string_at(0)"))
    assert outcome.status == "killed"
    assert "SIGSEGV" in outcome.error
    assert "in work" in outcome.log_tail


def test_threads_and_exit_hooks_do_not_hold_a_job_that_is_done() -> None:
    outcome = start(
        child("""
            import atexit, threading
            threading.Thread(target=time.sleep, args=(300,)).start()
            atexit.register(time.sleep, 300)
        """)
    )
    assert outcome.status == "ok"


# -- it is ended ----------------------------------------------------------------------------------


def test_the_deadline_keeps_what_was_measured() -> None:
    outcome = late(
        child("partial({'n': 1}); partial({'n': 2}); progress('ready'); time.sleep(300)")
    )
    assert outcome.status == "timeout"
    assert outcome.error == "it was not done within its 60 s"
    assert outcome.result == {"n": 2}
    assert "in work" in outcome.traceback


def test_the_deadline_counts_from_the_start_of_the_child() -> None:
    outcome = start(child("time.sleep(300)"), deadline=0.3)
    assert outcome.status == "timeout"
    assert outcome.error == "it was not done within its 0.3 s"
    assert outcome.seconds >= 0.3


def test_the_deadline_of_a_job_that_ignores_it() -> None:
    outcome = late(
        child("""
            partial({'n': 1})
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            progress('ready')
            while True: time.sleep(300)
        """),
        grace_seconds=0.2,
    )
    assert (outcome.status, outcome.result) == ("timeout", {"n": 1})


def test_user_code_cannot_swallow_the_end() -> None:
    outcome = late(
        child("""
            while True:
                try: progress('ready'); time.sleep(300)
                except Exception: pass
        """)
    )
    assert outcome.status == "timeout"
    assert "Stopped: SIGTERM" in outcome.traceback


def test_a_result_at_the_last_moment_counts() -> None:
    outcome = late(
        child("""
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            progress('ready')
            signal.sigwait({signal.SIGTERM})
            return {'late': True}
        """),
        grace_seconds=30.0,
    )
    assert (outcome.status, outcome.result) == ("ok", {"late": True})


def test_cancel_keeps_what_was_measured() -> None:
    cancel = threading.Event()
    outcome = start(
        child("partial({'n': 1}); progress('ready'); time.sleep(300)"),
        cancel=cancel,
        on_progress=lambda _text: cancel.set(),
    )
    assert (outcome.status, outcome.error) == ("cancelled", "it was cancelled")
    assert outcome.result == {"n": 1}


def test_cancel_before_the_start() -> None:
    cancel = threading.Event()
    cancel.set()
    outcome = start(["/no/such/program"], cancel=cancel)
    assert outcome.status == "cancelled"


HOG = "hog = bytearray(80 * 2**20)\nfor i in range(0, len(hog), 4096): hog[i] = 1\n"


def test_the_memory_cap() -> None:
    outcome = start(child(f"partial({{'n': 1}})\n{HOG}time.sleep(300)"), cap=60 * MIB)
    assert outcome.status == "killed"
    assert outcome.error.startswith("memory cap exceeded")
    assert "0.06 GiB" in outcome.error
    assert outcome.result == {"n": 1}


def test_the_memory_cap_counts_the_whole_tree() -> None:
    outcome = start(
        child(f"for _ in range(4):\n  if os.fork() == 0:\n    {HOG!r}; exec({HOG!r})\n"
              "    time.sleep(300)\ntime.sleep(300)"),
        cap=200 * MIB,
    )  # fmt: skip
    assert outcome.status == "killed"
    assert outcome.error.startswith("memory cap exceeded")


def test_the_memory_cap_counts_shared_pages_once() -> None:
    """Six processes share 80 MiB: the resident sets' sum is above the cap, the memory is not."""
    outcome = start(
        child(f"{HOG}for _ in range(5):\n  if os.fork() == 0: time.sleep(300)\ntime.sleep(1)"),
        cap=250 * MIB,
    )
    assert outcome.status == "ok", outcome.error


def test_an_allocation_far_past_the_cap_is_refused_at_once() -> None:
    outcome = start(child("bytearray(6 * 2**30)"), cap=100 * MIB)
    assert outcome.status == "error"
    assert "MemoryError" in outcome.error
    assert "memory cap is 0.10 GiB" in outcome.error


SAID = "print('what it said')\n"
FLOODS = """
frame = b'PKFr' + (10**6).to_bytes(4, 'big') + bytes(10**6)
while True:
    left = frame
    while left: left = left[os.write(fd, left):]
"""


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        (lambda: late(child(f"{SAID}progress('ready'); time.sleep(300)")), "timeout"),
        (
            lambda: late(
                child(
                    f"{SAID}signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
                    "progress('ready'); time.sleep(300)"
                ),
                grace_seconds=0.2,
            ),
            "timeout",
        ),
        (
            lambda: late(
                child(
                    f"for _ in range(20_000):\n    {SAID}progress('ready')\nwhile True:\n    {SAID}"
                )
            ),
            "timeout",
        ),
        (lambda: start(child(f"{SAID}{HOG}time.sleep(300)"), cap=60 * MIB), "killed"),
        (lambda: start(child(f"{SAID}os.kill(os.getpid(), signal.SIGKILL)")), "killed"),
        (lambda: start(child(f"{SAID}import ctypes; ctypes.string_at(0)")), "killed"),
        (lambda: start(child(f"{SAID}os._exit(3)")), "error"),
        (lambda: start(child(f"{SAID}raise ValueError('no')")), "error"),
        (lambda: start(raw(f"{SAID}sys.stdout.flush()\n{FLOODS}")), "error"),
    ],
    ids=[
        *("deadline", "deadline that it ignores", "deadline in a flood of words", "memory cap"),
        *("SIGKILL", "a crash", "an exit", "an exception", "a flooded pipe"),
    ],
)
def test_what_it_printed_is_kept_however_it_ended(ends: Callable[[], Outcome], status: str) -> None:
    outcome = ends()
    assert outcome.status == status
    assert "what it said" in outcome.log_tail


def test_what_it_printed_is_kept_when_it_is_cancelled() -> None:
    cancel = threading.Event()
    outcome = start(
        child(f"{SAID}progress('ready'); time.sleep(300)"),
        cancel=cancel,
        on_progress=lambda _: cancel.set(),
    )
    assert outcome.status == "cancelled"
    assert "what it said" in outcome.log_tail


# -- its pipe -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("os.write(fd, b'hello, this is no frame'); time.sleep(300)", "what is no frame"),
        ("os.write(fd, os.urandom(9999)); time.sleep(300)", "what is no frame"),
        (
            f"os.write(fd, b'PKFr' + ({MAX_BYTES} + 1).to_bytes(4, 'big')); time.sleep(300)",
            "more than the limit",
        ),
        ("os.write(fd, b'PKFo' + (99).to_bytes(4, 'big') + b'half')", "in the middle of sending"),
        ("os.write(fd, b'PK')", "in the middle of sending"),
        ("os.close(fd); time.sleep(300)", "closed its result pipe and sent no result"),
        ("os.closerange(3, 64); time.sleep(300)", "closed its result pipe and sent no result"),
        ("os.write(fd, b'PKFo' + (3).to_bytes(4, 'big') + b'abc')", "outcome cannot be read"),
    ],
)
def test_a_pipe_that_is_misused(code: str, said: str) -> None:
    outcome = start(raw(code), grace_seconds=0.3)
    assert outcome.status == "error"
    assert said in outcome.error


def test_a_flooded_pipe() -> None:
    outcome = start(raw(FLOODS))
    assert outcome.status == "error"
    assert "flooded its result pipe" in outcome.error
    assert f"{MAX_TOTAL_BYTES:,}" in outcome.error


def test_an_outcome_of_another_job_is_refused() -> None:
    outcome = start(
        raw("""
            from pichak_agent.frames import FrameWriter
            from pichak_agent.messages import Outcome, encode
            FrameWriter(fd).outcome(encode(Outcome('other', 1, 'task', 'ok', {'a': 1})))
        """)
    )
    assert outcome.status == "error"
    assert "it is for other, attempt 1" in outcome.error
    assert outcome.result == {}


def test_the_first_outcome_counts() -> None:
    outcome = start(
        raw("""
            from pichak_agent.frames import FrameWriter
            from pichak_agent.messages import Outcome, encode
            for n in (1, 2):
                FrameWriter(fd).outcome(encode(Outcome('job', 1, 'task', 'ok', {'n': n})))
            os.write(fd, b'garbage')
            time.sleep(300)
        """)
    )
    assert (outcome.status, outcome.result) == ("ok", {"n": 1})


# -- it cannot start ------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [["/no/such/program"], ["/etc/passwd"], ["a\0b"]])
def test_a_program_that_cannot_start(program: list[str]) -> None:
    outcome = start(program)
    assert outcome.status == "error"
    assert "cannot start" in outcome.error


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere it can; where it can nowhere, each place is named."""
    missing = [tmp_path / name for name in ("missing", "temporary", "memory")]
    assert start(child("pass"), workdir=missing[0]).status == "ok"
    monkeypatch.setattr("tempfile.tempdir", str(missing[1]))
    monkeypatch.setattr("pichak_agent.room.LAST_RESORT", missing[2])
    outcome = start(None, kind="fingerprint", workdir=missing[0])
    assert outcome.status == "error"
    assert "cannot start: there is nowhere to write" in outcome.error
    assert all(f"{place}: No such file or directory" in outcome.error for place in missing)


def test_a_variable_that_cannot_be_one() -> None:
    outcome = start(None, kind="fingerprint", params={"visible_devices": "0\0"})
    assert outcome.status == "error"
    assert "cannot start: embedded null byte" in outcome.error


@pytest.mark.parametrize(
    ("kind", "params", "said"),
    [
        ("dance", {}, "no job 'dance'; it knows fingerprint, task, ramp"),
        ("fingerprint", {"only": ["soup"]}, "no measurement 'soup'"),
        ("fingerprint", {"depth": "deep"}, "depth is 'deep'"),
        ("fingerprint", {"dept": "full"}, "no parameter 'dept'"),
    ],
)
def test_a_job_that_is_no_job_is_refused(kind: str, params: dict[str, Any], said: str) -> None:
    outcome = start(None, kind=kind, params=params)
    assert outcome.status == "refused"
    assert said in outcome.error


def test_too_few_descriptors() -> None:
    """At every limit: one outcome, and no descriptor lost."""
    code = """
        import os, resource
        from pichak_agent.messages import Job, Outcome, decode
        from pichak_agent.runner import run
        job = Job("job", 1, "task", {}, 60.0)
        decode(run(job, argv=["/bin/true"]), Outcome)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        statuses, before = set(), len(os.listdir("/proc/self/fd"))
        for limit in range(before - 1, before + 14):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            outcome = decode(run(job, argv=["/bin/true"]), Outcome)
            assert outcome.status == "error", outcome
            statuses.add(outcome.error.split(":")[0][:40])
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert len(os.listdir("/proc/self/fd")) == before
        assert len(statuses) == 2, statuses
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


# -- nothing is left ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "end",
    ["return {}", "os.abort()", "progress('ready'); time.sleep(300)"],
)
def test_a_daemon_of_the_job_ends_with_it(end: str) -> None:
    """`nothing_left` finds it if it does not."""
    outcome = late(child(f"daemon(); {end}"), grace_seconds=0.3)
    assert outcome.status != "cancelled"


def test_many_processes_end_with_the_job() -> None:
    late(child("for _ in range(40): daemon()\nprogress('ready'); time.sleep(300)"))


def test_a_job_that_kills_its_warden() -> None:
    """At once, before its daemon was seen below the warden: the daemon's variables give it away."""
    outcome = start(
        child("""
            partial({'n': 1}); daemon()
            os.kill(os.getppid(), signal.SIGKILL); time.sleep(300)
        """)
    )
    assert outcome.status == "killed"
    assert "process that watches over the job was lost" in outcome.error
    assert outcome.result == {"n": 1}


def test_a_daemon_without_marks_of_a_job_that_kills_its_warden() -> None:
    """Nothing in its variables tells that it belongs to the job: it was seen below the warden."""
    outcome = start(
        child("""
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    for fd in range(0, 3): os.close(fd)
                    keep = {'PICHAK_TEST': os.environ['PICHAK_TEST']}
                    os.execve('/bin/sleep', ['sleep', '300'], keep)
                os._exit(0)
            os.wait(); time.sleep(1.2)
            os.kill(os.getppid(), signal.SIGKILL); time.sleep(300)
        """)
    )
    assert outcome.status == "killed"


def test_a_job_that_kills_its_whole_group() -> None:
    outcome = start(child("daemon(); os.killpg(0, signal.SIGKILL)"))
    assert outcome.status == "killed"
    assert "SIGKILL" in outcome.error


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_everything_ends_with_the_agent(how: signal.Signals, tmp_path: Path) -> None:
    program = child("daemon(); progress('ready'); time.sleep(300)")
    code = f"""
        from pathlib import Path
        from pichak_agent.messages import Job
        from pichak_agent.runner import run
        run(Job("job", 1, "task", {{}}, 60.0), argv={program!r}, workdir=Path({str(tmp_path)!r}),
            on_progress=lambda text: print(text, flush=True))
    """
    agent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert agent.stdout
    assert agent.stdout.readline() == b"ready\n"
    tree = {pid: started_at(pid) for pid in descendants(agent.pid)}
    # The outer and the inner warden, the child, and its daemon.
    assert len(tree) == 4
    agent.send_signal(how)
    agent.wait()
    agent.stdout.close()
    until = time.monotonic() + 10.0
    while any(started_at(pid) == at for pid, at in tree.items()) and time.monotonic() < until:
        time.sleep(0.02)
    assert [pid for pid, at in tree.items() if started_at(pid) == at] == []
    assert list(tmp_path.iterdir()) == []


def test_shared_memory_of_a_killed_job_is_removed() -> None:
    outcome = late(
        child("""
            from multiprocessing.shared_memory import SharedMemory
            made = SharedMemory(create=True, size=1000)
            partial({'name': made.name.lstrip('/')}); progress('ready'); time.sleep(300)
        """),
        grace_seconds=0.0,
    )
    assert outcome.status == "timeout"
    assert not (Path("/dev/shm") / outcome.result["name"]).exists()


def test_the_job_runs_in_an_empty_folder_that_is_removed(tmp_path: Path) -> None:
    outcome = start(
        child("""
            import tempfile
            found = os.listdir(".")
            open("left", "w").write("x"); os.mkdir("d"); os.chmod("d", 0)
            kept = tempfile.mkdtemp()
            return {"cwd": os.getcwd(), "found": found, "tmp": kept}
        """),
        workdir=tmp_path,
    )
    assert outcome.result["found"] == []
    assert Path(outcome.result["cwd"]).parent == tmp_path
    assert not Path(outcome.result["tmp"]).exists()
    assert list(tmp_path.iterdir()) == []


# -- what it sees ---------------------------------------------------------------------------------


def test_a_users_files_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("agent", "coordinator", "torch", "msgpack", "json", "messages", "psutil"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the user's own file')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), ".", ""]))
    assert start(None, kind="fingerprint", params={"only": ["software"]}).status == "ok"
    found = start(
        child("""
            from importlib.util import find_spec
            names = ("agent", "coordinator", "torch", "msgpack", "json", "messages", "psutil")
            specs = {name: find_spec(name) for name in names}
            return {"specs": {n: str(s and s.origin) for n, s in specs.items()}, "path": sys.path}
        """)
    )
    assert found.status == "ok", found.error
    assert "site-packages" in found.result["specs"]["torch"]
    assert not [o for o in found.result["specs"].values() if o.startswith(str(tmp_path))]
    assert str(tmp_path) not in found.result["path"]


@pytest.mark.parametrize(
    ("params", "seen"),
    [({}, ""), ({"visible_devices": "1"}, "1"), ({"visible_devices": None}, None)],
)
def test_visible_devices(
    params: dict[str, Any], seen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as Ray sets it for an actor without GPUs
    outcome = start(child("return {'seen': os.environ.get('CUDA_VISIBLE_DEVICES')}"), params=params)
    assert outcome.result == {"seen": seen}


def test_no_core_file_and_no_open_descriptors() -> None:
    outcome = start(
        child("""
            import resource
            return {"core": resource.getrlimit(resource.RLIMIT_CORE)[0],
                    "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))}
        """)
    )
    assert outcome.result["core"] == 0
    # Input, output, errors, the result pipe, and the one that lists.
    assert len(outcome.result["fds"]) == 5


# -- the kernel's out-of-memory killer ------------------------------------------------------------


@pytest.mark.root
def test_the_out_of_memory_killer_is_named_on_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a group of its own only wider counters rise, which may be another process's."""
    monkeypatch.setattr(launch, "make_group", lambda _name, _cap: "not on this machine")
    group = memory_group(64 * MIB)
    code = (
        f"open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        "hog = bytearray(400 * 2**20)\nfor i in range(0, len(hog), 4096): hog[i] = 1\n"
        "time.sleep(300)"
    )
    try:
        outcome = start(raw(code))
    finally:
        group.rmdir()
    assert outcome.status == "killed"
    assert "may have been the kernel's out-of-memory killer" in outcome.error
    assert "another process" in outcome.error


@pytest.mark.root
def test_who_is_killed_by_a_stranger_was_not_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine's counter rises meanwhile for somebody else."""
    parent_of_groups()
    counts = iter([{"/proc/vmstat": 4}, {"/proc/vmstat": 5}])
    monkeypatch.setattr("pichak_agent.runner.oom_kills", lambda: next(counts))
    outcome = start(raw("os.kill(os.getpid(), 9)"))
    assert outcome.status == "killed"
    assert outcome.error == (
        "the job's process was killed by SIGKILL; its own control group counts no process killed "
        "for want of memory"
    )


# -- its control group ----------------------------------------------------------------------------


def parent_of_groups() -> Path:
    """The folder in which jobs of this process get their groups; skipped where they get none."""
    probe = make_group(f"look-{os.getpid()}", 0)
    if isinstance(probe, str):
        pytest.skip(f"no control group can be made: {probe}")
    probe.remove()
    return probe.folder.parent


#: The job says which groups it is in.
OWN_GROUP = "progress(' '.join(open('/proc/self/cgroup').read().split()))\n"


class Groups:
    """The group that a job said it was in; `hear` is for its progress."""

    def __init__(self) -> None:
        self._parent = parent_of_groups()
        self._folder: Path | None = None

    def hear(self, text: str) -> None:
        found = re.search(rf"{PREFIX}[0-9a-f]{{32}}", text)
        if found:
            self._folder = self._parent / found.group()
            assert self._folder.is_dir()

    def left(self) -> bool:
        assert self._folder is not None, "the job was in no group"
        return self._folder.exists()


@pytest.mark.root
@pytest.mark.parametrize("last", ["pass", "os.kill(os.getppid(), 9); os.kill(os.getpid(), 9)"])
def test_a_process_that_cut_every_tie_ends_with_the_job(last: str) -> None:
    """Double-forked, without the job's variables, and its warden killed before any look."""
    parent_of_groups()
    name, sleeps = f"stranger-{os.getpid()}", "import time; time.sleep(300)"
    program = child(
        "if os.fork() == 0:\n"
        "  os.setsid()\n"
        "  if os.fork() == 0:\n"
        "    os.closerange(0, 64)\n"
        f"    os.execve(sys.executable, ['p', '-c', {sleeps!r}, {name!r}], {{}})\n"
        f"  os._exit(0)\nos.wait()\n{last}"
    )
    outcome = start(program)
    assert outcome.status == ("ok" if last == "pass" else "killed")
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not [line for line in commands if name.encode() in line and b"time.sleep" in line]


@pytest.mark.root
@pytest.mark.parametrize(
    "work", ["pass", "os._exit(3)", "os.kill(os.getppid(), 9)", HOG, "time.sleep(300)"]
)
def test_no_group_is_left(work: str) -> None:
    groups = Groups()
    start(
        child(f"{OWN_GROUP}{work}"),
        cap=60 * MIB,
        on_progress=groups.hear,
        deadline=6.0 if "sleep" in work else 60.0,
    )
    assert not groups.left()


@pytest.mark.root
def test_a_cancelled_job_leaves_nothing() -> None:
    """No process of it, also one that ran away; no group; no file, which conftest looks for."""
    groups, cancel = Groups(), threading.Event()

    def hear(text: str) -> None:
        groups.hear(text)
        cancel.set()

    outcome = start(child(f"daemon()\n{OWN_GROUP}time.sleep(300)"), cancel=cancel, on_progress=hear)
    assert outcome.status == "cancelled"
    assert not groups.left()


def test_without_a_group_the_cap_is_held_by_looking_and_that_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "make_group", lambda _name, _cap: "not on this machine")
    outcome = start(child(f"{HOG}time.sleep(300)"), cap=60 * MIB)
    assert outcome.status == "killed"
    assert "0.06 GiB is allowed" in outcome.error
    assert outcome.log_tail.endswith(
        "[its memory cap was held by looking, not by the kernel: not on this machine]"
    )
    assert "by looking" not in start(child("pass")).log_tail


def memory_group(limit: int) -> Path:
    """A memory control group of version 1 or 2 with this limit; the test is skipped without."""
    name = f"pichak-test-{os.getpid()}"
    old, new = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    if (old / "memory.limit_in_bytes").exists():
        group, file = old / name, "memory.limit_in_bytes"
    else:
        group, file = new / name, "memory.max"
    try:
        group.mkdir()
        (group / file).write_text(str(limit))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no memory control group can be made: {error}")
    return group
