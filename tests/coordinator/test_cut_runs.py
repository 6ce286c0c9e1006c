"""Jobs and runs whose coordinator went away."""

from __future__ import annotations

from pathlib import Path

import pytest

from pichak_agent.messages import Job, Outcome, encode
from pichak_coordinator.cut_runs import count_ended, open_jobs, run_to_go_on, settle
from pichak_coordinator.jobs import FINAL
from pichak_coordinator.store import Store

COMMAND = "fleet profile"
ENDS = {"a": "ok", "b": "error", "c": "cancelled", "d": "timeout", "e": None}
BECOME = {"a": "done", "b": "failed", "c": "cancelled", "d": "failed", "e": "failed"}


def cut(store: Store, settings: dict[str, object]) -> str:
    """A run with five jobs of which nobody noted the end."""
    run = store.begin_run(COMMAND, settings)
    node = store.record_node(run, {"host": "host-a", "address": "10.0.0.1"})
    for name in ENDS:
        store.record_job(run, Job(name, 1, "fingerprint", {}, 30.0), node=node, device="cpu")
        store.set_job_state(name, "dispatched", attempt=1)
    return run


def test_open_jobs_get_the_state_of_what_came_of_them(tmp_path: Path) -> None:
    with Store.open(tmp_path / "fleet.db") as store:
        run = cut(store, {})
        for name, status in ENDS.items():
            if status is not None:
                why = "" if status == "ok" else "why"
                ended = Outcome(name, 1, "fingerprint", status, {"fingerprint": {}}, error=why)
                store.record_outcome(encode(ended))
        # An outcome that is ok has ended its job already.
        assert {job.job_id for job in open_jobs(store)} == {"b", "c", "d", "e"}
        settle(store, open_jobs(store))
        assert {job.job_id: job.state for job in store.jobs(run)} == BECOME
        assert "no result of it came back" in (store.job("e") or pytest.fail("no job")).error
        assert open_jobs(store) == []
        assert set(BECOME.values()) == FINAL


def test_settling_twice_or_late_changes_no_final_state(tmp_path: Path) -> None:
    with Store.open(tmp_path / "fleet.db") as store:
        run = cut(store, {})
        jobs = open_jobs(store)
        assert settle(store, jobs) == len(ENDS)
        late = Outcome("a", 1, "fingerprint", "ok", {"fingerprint": {}})
        assert store.record_outcome(encode(late))
        assert settle(store, jobs) == 0
        assert {job.state for job in store.jobs(run)} == {"failed"}


def test_which_run_can_go_on(tmp_path: Path) -> None:
    settings = {"model": "builtin:gpt-1m", "depth": "quick"}
    with Store.open(tmp_path / "fleet.db") as store:
        with pytest.raises(ValueError, match="none can go on"):
            run_to_go_on(store, COMMAND, settings)
        run = cut(store, settings)
        store.begin_run("net", {})
        assert run_to_go_on(store, COMMAND, settings).run == run
        assert count_ended(store, run) == (0, 1)  # one device is fingerprinted once
        with pytest.raises(ValueError, match="depth 'quick' where now 'full' is asked"):
            run_to_go_on(store, COMMAND, {**settings, "depth": "full"})
        # What the run does not say of itself, or nobody asks for now, differs from nothing.
        assert run_to_go_on(store, COMMAND, {}).run == run
        assert run_to_go_on(store, COMMAND, {**settings, "headroom": 0.5}).run == run
        # A run that ended before its jobs did (no cluster could be joined) is left undone.
        store.finish_run(run)
        assert run_to_go_on(store, COMMAND, settings).run == run
        for job in open_jobs(store):
            if job.job_id not in ("c", "d"):
                store.set_job_state(job.job_id, "failed", error="it raised")
        store.set_job_state("c", "cancelled", error="interrupted")
        assert run_to_go_on(store, COMMAND, settings).run == run
        # What was called off once and done later is not left.
        store.record_outcome(encode(Outcome("d", 1, "fingerprint", "ok", {"fingerprint": {}})))
        with pytest.raises(ValueError, match="nothing to resume"):
            run_to_go_on(store, COMMAND, settings)
        store.reopen_run(run)
        assert (store.run(run) or pytest.fail("no run")).finished_unix is None


def test_a_job_that_was_begun_again_is_counted_once(tmp_path: Path) -> None:
    """A run over one device needs three jobs, however often it was interrupted and resumed."""
    with Store.open(tmp_path / "fleet.db") as store:
        run = store.begin_run(COMMAND, {})
        node = store.record_node(run, {"host": "host-a", "address": "10.0.0.1"})
        other = store.record_node(run, {"host": "host-b", "address": "10.0.0.2"})

        def put(kind: str, suffix: str, state: str, where: str = node) -> None:
            name = f"{run}-{kind}-0{suffix}"
            store.record_job(run, Job(name, 1, kind, {}, 30.0), node=where, device="cpu")
            if state == "done":
                store.record_outcome(encode(Outcome(name, 1, kind, "ok", {"fingerprint": {}})))
            store.set_job_state(name, state)

        put("fingerprint", "", "done")
        put("task", "", "failed", other)
        put("task", ".a1", "cancelled")
        put("ramp", "", "cancelled")
        put("ramp", ".a1", "cancelled")
        assert count_ended(store, run) == (1, 3)
        put("task", ".b2", "done", other)
        assert count_ended(store, run) == (2, 3)
        put("ramp", ".b2", "done")
        assert count_ended(store, run) == (3, 3)
        # Tests of links are many of one kind.
        for number in range(3):
            put("net_serve", f"-{number}", "failed")
        assert count_ended(store, run) == (3, 6)
