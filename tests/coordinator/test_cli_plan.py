"""``pichak plan`` with code of the user's own: real child processes, real endings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from pichak_agent.home import measuring_lock
from pichak_coordinator.request import MACHINE_LOCK

pytest.importorskip("torch")

MAIN = "from pichak_coordinator.cli import main; main()"
TASK = """
    import os, sys, time
    import torch
    import beside

    class Task:
        seq_len = 16
        def __init__(self):
            self.layer = torch.nn.Linear(8, 8)
            self.optimizer = torch.optim.AdamW(self.layer.parameters())
        def loss_of(self, b):
            print("a step of", b)
            return self.layer(torch.randn(b, 8)).pow(2).mean()
        def named_weights(self):
            return self.layer.named_parameters()

    class Raising(Task):
        def loss_of(self, b):
            raise RuntimeError("the cable\\x1b[31m is loose")

    class Slow(Task):
        def loss_of(self, b):
            time.sleep(300)

    def good(settings): print("made"); open("beside.txt").close(); return Task()
    def raising(settings): return Raising()
    def slow(settings): return Slow()
    def asks(settings): return input("which? ")
    def leaves(settings): print("no licence found"); os._exit(7)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "task.py").write_text(textwrap.dedent(TASK), encoding="utf-8")
    (tmp_path / "beside.py").write_text("", encoding="utf-8")
    (tmp_path / "beside.txt").write_text("", encoding="utf-8")
    return tmp_path


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PICHAK_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, "plan", "--device", "cpu", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    process = start(folder, *arguments)
    out, errors = process.communicate(timeout=120)
    return process.returncode, out, errors


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("asks", ["task.py line", "EOFError", "input("]),
        ("leaves", ["exit code 7", "no licence found"]),
    ],
)
def test_code_that_ends_its_process_is_told_in_a_sentence(
    folder: Path, factory: str, words: list[str]
) -> None:
    code, out, errors = run(folder, "--model", f"task.py:{factory}")
    assert (code, out) == (2, "")
    last = errors.strip().splitlines()[-1]
    assert last.startswith("pichak: ")
    assert all(word in last for word in words)
    assert "Traceback" not in errors


def test_a_ramp_that_raises_keeps_what_the_task_measured(folder: Path) -> None:
    code, out, errors = run(folder, "--model", "task.py:raising", "--json")
    assert code == 2
    plan = json.loads(out)["plan"]
    assert "rewrite_scale" in plan["values"]
    assert any("the ramp failed: RuntimeError: the cable" in note for note in plan["notes"])
    assert "the cable" in errors
    assert "\x1b" not in errors


def test_ctrl_c_keeps_what_was_measured_and_leaves_no_process(folder: Path) -> None:
    process = start(folder, "--model", "task.py:slow", "--json")
    assert process.stderr is not None
    while "building the model" not in (line := process.stderr.readline()):
        assert line, "it ended before the ramp began"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    plan = json.loads(out)["plan"]
    assert "rewrite_scale" in plan["values"]
    assert any("interrupted" in note for note in plan["notes"])
    assert not [p for p in Path("/proc").glob("[0-9]*/cwd") if _inside(p, folder)]


def _inside(link: Path, folder: Path) -> bool:
    try:
        return link.resolve().is_relative_to(folder)
    except OSError:
        return False


def test_it_waits_for_what_others_measure_and_answers_on_stdout_alone(folder: Path) -> None:
    lock = measuring_lock(folder / "home", MACHINE_LOCK)
    assert lock.try_acquire("job of a fleet")
    process = start(folder, "--model", "task.py:good", "--limit", "2", "--json")
    assert process.stderr is not None
    assert "waiting for 'machine': job of a fleet" in process.stderr.readline()
    lock.release()
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert json.loads(out)["plan"]["values"]["micro_batch_max"]["value"] == 2
    assert "a step of" not in errors
