"""``fleet profile --resume``: what a run was asked is taken from the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pichak_agent.messages import Job, Outcome, encode
from pichak_coordinator.cli import app, fleet_profile
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

    def __call__(self, request: ProfileRequest, _store: Store, run: str, *_: Any) -> Any:
        self.request, self.run = request, run
        return False, {"total": 0.0, "measuring": 0.0}, None


@pytest.fixture
def went(monkeypatch: pytest.MonkeyPatch) -> Went:
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
