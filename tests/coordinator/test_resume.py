"""``fleet profile --resume``: what a run was asked is taken from the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pichak_agent.messages import Job, Outcome, encode
from pichak_coordinator.cli import app, fleet_profile
from pichak_coordinator.cli.profile_resume import Sending
from pichak_coordinator.cut_runs import this_process
from pichak_coordinator.request import ProfileRequest
from pichak_coordinator.store import Store
from pichak_core.measurement import Fingerprint, Measurement

ASKED = ProfileRequest(
    model="builtin:gpt-1m",
    method="lora",
    lora_rank=16,
    depth="full",
    directory="/data",
    only=("cpu", "disk"),
    seq_len=128,
    seq_quantile=0.9,
    sample=None,
    headroom=0.2,
    limit=8,
    memory_cap_bytes=2**29,
    target_tokens=999,
    seed=7,
    dtype="fp32",
    gradient_checkpointing=True,
)


class Went:
    """Instead of measuring: what was asked."""

    def __init__(self) -> None:
        self.request: ProfileRequest | None = None
        self.run = ""
        self.sending = Sending()

    def __call__(
        self, request: ProfileRequest, _store: Store, run: str, sending: Sending, _: bool
    ) -> Any:
        self.request, self.run, self.sending = request, run, sending
        return False, {"total": 0.0, "measuring": 0.0}, None


@pytest.fixture
def went(monkeypatch: pytest.MonkeyPatch) -> Went:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    made = Went()
    monkeypatch.setattr(fleet_profile, "_measure", made)
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "fleet.db"


def cut(path: Path, settings: dict[str, Any]) -> str:
    """A run with one result that nobody ended."""
    with Store.open(path) as store:
        run = store.begin_run("fleet profile", settings)
        node = store.record_node(run, {"machine_id": "m", "host": "h"})
        job = Job("j", 1, "fingerprint", {}, 9.0)
        store.record_job(run, job, node=node, device="cpu")
        found = Fingerprint()
        found.add(Measurement("disk.read_mb_s", 900.0, "MB/s", "timed", 9, 1.0))
        result = {"fingerprint": found.to_dict()}
        store.record_outcome(encode(Outcome("j", 1, "fingerprint", "ok", result)))
    return run


def profile(path: Path, *options: str) -> Result:
    command = ["fleet", "profile", "--store", str(path), *options]
    return CliRunner().invoke(app, command, standalone_mode=True)


def test_bare_resume_asks_what_the_run_was_asked(path: Path, went: Went) -> None:
    run = cut(path, ASKED.settings())
    done = profile(path, "--resume")
    assert done.exit_code == 0, done.output
    assert (went.run, went.request) == (run, ASKED)
    with Store.open(path) as store:
        assert [r.run for r in store.runs()] == [run]


def test_the_same_option_again_and_those_of_the_sending_are_no_contradiction(
    path: Path, went: Went
) -> None:
    cut(path, ASKED.settings())
    done = profile(path, "--resume", "--seed", "7", "--deadline", "ramp=30", "--even-if-busy")
    assert done.exit_code == 0, done.output
    assert went.request is not None
    assert (went.request.seed, went.request.headroom) == (7, 0.2)
    assert went.request.even_if_busy
    assert went.request.deadline_seconds == {"ramp": 30.0}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--depth", "quick"], "depth 'full' where now 'quick' is asked"),
        (["--seed", "0"], "seed 7 where now 0 is asked"),
        (["--memory-cap", "1GiB"], "memory_cap_bytes 536870912 where now 1073741824"),
    ],
)
def test_a_contradicting_option_is_named(
    path: Path, went: Went, options: list[str], words: str
) -> None:
    """Also where it is what is asked when nobody asks anything."""
    run = cut(path, ASKED.settings())
    done = profile(path, "--resume", *options)
    assert done.exit_code == 2
    assert words in done.stderr
    assert run in done.stderr
    assert "headroom" not in done.stderr
    assert went.request is None


def test_a_run_of_before_that_says_less_goes_on_with_what_it_says(path: Path, went: Went) -> None:
    cut(path, {"model": "builtin:gpt-1m", "data": "", "seq_len": 64, "depth": "full"})
    assert profile(path, "--resume", "--headroom", "0.3").exit_code == 0
    assert went.request == ProfileRequest(seq_len=64, depth="full", headroom=0.3)


def test_data_that_is_gone_is_said(path: Path, went: Went) -> None:
    cut(path, ProfileRequest(data=Path("/nowhere/train.jsonl")).settings())
    done = profile(path, "--resume")
    assert done.exit_code == 2
    assert "/nowhere/train.jsonl" in done.stderr
    assert went.request is None


@pytest.mark.parametrize("wrong", [{"seed": "x"}, {"model": 3}, {"only": "cpu"}, {"limit": True}])
def test_settings_that_no_request_has_are_no_traceback(
    path: Path, went: Went, wrong: dict[str, Any]
) -> None:
    """They may have come in a file of `pichak export`."""
    cut(path, {**ASKED.settings(), **wrong})
    done = profile(path, "--resume")
    assert done.exit_code == 2
    assert "which cannot be" in done.stderr
    assert went.request is None


@pytest.mark.parametrize(
    ("cluster", "options", "words"),
    [
        ("10.0.0.1:6379", [], "of the cluster at 10.0.0.1:6379; give --address"),
        ("", ["--address", "10.0.0.1:6379"], "of this machine alone; leave --address"),
    ],
)
def test_a_run_does_not_go_on_with_another_fleet(
    path: Path, went: Went, cluster: str, options: list[str], words: str
) -> None:
    """Without an address this machine would be measured into a cluster's run, and end it."""
    run = cut(path, {**ASKED.settings(), "cluster": cluster})
    done = profile(path, "--resume", *options)
    assert done.exit_code == 2
    assert words in done.stderr
    assert went.request is None
    with Store.open(path) as store:
        assert store.runs()[0].finished_unix is None
    # A head that came back at another address is the same fleet for all that is known.
    right = ["--address", "10.0.0.2:6379"] if cluster else []
    assert profile(path, "--resume", *right).exit_code == 0
    assert went.run == run


def test_a_new_run_says_of_which_cluster_it_is(path: Path, went: Went) -> None:
    for address in ("10.0.0.1:6379", ""):
        options = ["--address", address] if address else []
        assert profile(path, "--seq-len", "64", *options).exit_code == 0
        with Store.open(path) as store:
            assert store.runs()[0].settings["cluster"] == address


SENT = {
    "cluster": "10.0.0.1:6379",
    "insecure": True,
    "network": False,
    "at_once": 2,
    "deadline_seconds": {"ramp": 30.0},
    "even_if_busy": True,
    "wait_seconds": 60.0,
}
#: As a process that is gone left it: no process began so.
GONE = {"coordinator": {**this_process(), "started": "never"}}


def test_a_run_goes_on_as_it_was_sent_and_says_so(path: Path, went: Went) -> None:
    run = cut(path, {**ASKED.settings(), **SENT, **GONE})
    done = profile(path, "--resume")
    assert done.exit_code == 0, done.output
    assert went.sending == Sending("10.0.0.1:6379", insecure=True, network=False, at_once=2)
    assert went.request is not None
    assert went.request.deadline_seconds == {"ramp": 30.0}
    assert (went.request.even_if_busy, went.request.wait_seconds) == (True, 60.0)
    told = f"going on with {run}, of which 1 of 1 jobs are done"
    assert told in done.stderr
    for word in ("10.0.0.1:6379", "--insecure", "--no-network", "--at-once 2", "ramp=30"):
        assert word in done.stderr


def test_what_is_named_goes_before_what_was_sent(path: Path, went: Went) -> None:
    cut(path, {**ASKED.settings(), **SENT, **GONE})
    more = ["--address", "10.0.0.2:6379", "--at-once", "3", "--deadline", "task=9"]
    assert profile(path, "--resume", *more).exit_code == 0
    # That one cluster is open says nothing of another.
    assert went.sending == Sending("10.0.0.2:6379", insecure=False, network=False, at_once=3)
    assert went.request is not None
    assert went.request.deadline_seconds == {"task": 9.0}
    with Store.open(path) as store:
        assert store.runs()[0].settings["cluster"] == "10.0.0.2:6379"


@pytest.mark.parametrize("was", [None, True])
def test_the_network_test_is_part_of_what_was_asked(
    path: Path, went: Went, was: bool | None
) -> None:
    cut(path, {**ASKED.settings(), **SENT, **GONE, "network": was})
    done = profile(path, "--resume", "--no-network")
    assert done.exit_code == 2
    assert "where now --no-network is asked" in done.stderr
    assert went.request is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"network": 1},
        {"at_once": 0},
        {"deadline_seconds": {"x": 1.0}},
        {"deadline_seconds": {"ramp": float("nan")}},
        {"wait_seconds": "1"},
        {"even_if_busy": 1},
        {"insecure": "yes"},
    ],
)
def test_no_sending_that_cannot_be(path: Path, went: Went, wrong: dict[str, Any]) -> None:
    cut(path, {**ASKED.settings(), **SENT, **GONE, **wrong})
    done = profile(path, "--resume")
    assert done.exit_code == 2
    assert "cannot be" in done.stderr
    assert went.request is None


def test_a_run_that_somebody_is_at_does_not_go_on(path: Path, went: Went) -> None:
    run = cut(path, {**ASKED.settings(), "coordinator": this_process()})
    done = profile(path, "--resume")
    assert done.exit_code == 2
    assert f"{run}, is still running" in done.stderr


def test_the_cluster_of_the_environment_is_kept(
    path: Path, went: Went, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else that run would go on with this machine alone."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert profile(path, "--seq-len", "64").exit_code == 0
    assert went.sending.address == "10.0.0.1:6379"
    with Store.open(path) as store:
        assert store.runs()[0].settings["cluster"] == "10.0.0.1:6379"


@pytest.mark.parametrize(
    ("coordinator", "state", "words"),
    [
        (GONE["coordinator"], "cut off", "was cut off: its coordinator (process"),
        (this_process(), "running", "is still running (process"),
        ({**this_process(), "host": "far-away"}, "no end", "cut off, or still runs on far-away"),
        (None, "no end", "it was cut off, or still runs:"),
        ("x", "no end", "it was cut off, or still runs:"),
    ],
)
def test_a_run_without_an_end_says_what_became_of_it(
    path: Path, coordinator: Any, state: str, words: str
) -> None:
    run = cut(path, {**ASKED.settings(), "coordinator": coordinator})
    with Store.open(path) as store:
        store.record_job(run, Job("k", 1, "ramp", {}, 9.0), node=store.nodes_of(run)[0])
    shown = CliRunner().invoke(app, ["fleet", "compare", "--store", str(path)])
    assert words in shown.stdout
    assert "1 of 2 jobs" in shown.stdout
    resume = f"`pichak fleet profile --resume --store {path}` goes on with it"
    assert (resume in shown.stdout) == (state != "running")
    assert "failed" not in shown.stdout
    listed = CliRunner().invoke(app, ["fleet", "history", "--store", str(path), "--json"])
    assert [(r["state"], r["failed"]) for r in json.loads(listed.stdout)["runs"]] == [(state, 0)]


def test_a_run_with_another_after_it_is_not_offered(path: Path) -> None:
    """`--resume` takes the last one."""
    run = cut(path, {**ASKED.settings(), **GONE})
    with Store.open(path) as store:
        store.finish_run(store.begin_run("fleet profile", {}))
    shown = CliRunner().invoke(app, ["fleet", "compare", run, "--store", str(path)])
    assert "was cut off" in shown.stdout
    assert "--resume" not in shown.stdout


def test_a_run_that_ended_before_its_jobs_did_can_go_on(path: Path, went: Went) -> None:
    """A cluster that could not be joined ends the run, not what is left of it."""
    run = cut(path, ASKED.settings())
    with Store.open(path) as store:
        store.record_job(run, Job("k", 1, "ramp", {}, 9.0), node=store.nodes_of(run)[0])
        store.finish_run(run)
    assert profile(path, "--resume").exit_code == 0
    assert went.run == run


def test_without_a_run_there_is_nothing_to_resume(path: Path, went: Went) -> None:
    Store.open(path).close()
    done = profile(path, "--resume")
    assert done.exit_code == 2
    assert "none can go on" in done.stderr


def test_a_new_profile_says_that_the_last_one_could_go_on(path: Path, went: Went) -> None:
    run = cut(path, ProfileRequest(seq_len=64).settings())
    done = profile(path, "--seq-len", "64")
    assert f"{run} was cut off when 1 of 1 jobs were done; --resume" in done.stderr
    assert went.run not in ("", run)
