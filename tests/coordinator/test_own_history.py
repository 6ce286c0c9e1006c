"""No command writes over the history that it reads, nor makes one where it should find one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pichak_agent.messages import Job, Outcome, encode
from pichak_coordinator.report.writing import NotOursError, check_place
from pichak_coordinator.store import Store


@pytest.fixture
def history(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.db"
    with Store.open(path) as store:
        run = store.begin_run("fleet profile", {})
        node = store.record_node(run, {"host": "host-a", "address": "10.0.0.1"})
        store.record_job(run, Job("a", 1, "fingerprint", {}, 30.0), node=node, device="cpu")
        store.record_outcome(encode(Outcome("a", 1, "fingerprint", "ok", {"fingerprint": {}})))
        store.finish_run(run)
    return path


def pichak(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from pichak_coordinator.cli import main; main()"]
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("linked", [False, True])
def test_export_and_report_leave_the_history_alone(
    history: Path, tmp_path: Path, linked: bool
) -> None:
    before = history.read_bytes()
    out = history
    if linked:
        out = tmp_path / "link"
        out.symlink_to(history)
    for command in (["export", "--all", "--out"], ["fleet", "report", "--html"]):
        done = pichak(*command, out, "--store", history, "--force")
        assert done.returncode == 2
        assert "is the history itself; name another file" in done.stderr
        assert history.read_bytes() == before
    with pytest.raises(NotOursError, match="the history itself"):
        check_place(out, force=True, store=history)


def test_prune_makes_no_history(tmp_path: Path) -> None:
    done = pichak("fleet", "prune", "--store", tmp_path / "nosuch.db")
    assert done.returncode == 2
    assert "no history at" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_an_output_that_is_full_is_not_the_historys_fault(history: Path) -> None:
    pichak_here = f"{sys.executable} -c 'from pichak_coordinator.cli import main; main()'"
    compare = f"{pichak_here} fleet compare --format csv --store {history}"
    full = subprocess.run(
        ["bash", "-c", f"{compare} > /dev/full"], capture_output=True, text=True, check=False
    )
    assert "the output cannot be written (No space left on device)" in full.stderr
    assert "PICHAK_HOME" not in full.stderr
