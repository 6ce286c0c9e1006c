"""A job that was wanted and never sent: the row of its device says why it has no result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pichak_agent.messages import Job, Outcome, encode
from pichak_coordinator.cluster import ClusterNode
from pichak_coordinator.dispatch import AgentFailedError, Ended
from pichak_coordinator.profile import Profiler
from pichak_coordinator.records import Row
from pichak_coordinator.request import ProfileRequest
from pichak_coordinator.store import Store
from pichak_coordinator.target import Target
from pichak_core.measurement import Fingerprint, Measurement
from pichak_core.plan import Plan


class Nodes:
    """Stands for a `Dispatcher` over machines: every job that is sent is done at the next look,
    but for those of `fails` (kind -> error). `unreachable` says where no file arrives, and from
    which on (0: none ever)."""

    def __init__(self, fails: Mapping[str, str], unreachable: Mapping[str, int]) -> None:
        self.fails, self.unreachable = fails, dict(unreachable)
        self.away: list[tuple[str, Job]] = []
        self.sent: list[tuple[str, str]] = []

    def start_agents(self, nodes: Sequence[ClusterNode], *_: float) -> dict[str, Any]:
        return {n.node_id: {"machine_id": f"m-{n.host}", "host": n.host} for n in nodes}

    def leftovers(self, _node_id: str) -> list[bytes]:
        return []

    def ship(self, node_id: str, path: Path) -> dict[str, Any]:
        left = self.unreachable.get(node_id)
        if left is not None:
            self.unreachable[node_id] = left - 1
            if left <= 0:
                raise AgentFailedError(f"{path.name} could not be sent to it: it went down")
        return {"file": {"sha256": "0" * 64, "name": path.name, "path": str(path)}}

    @property
    def in_flight(self) -> int:
        return len(self.away)

    def submit(self, node_id: str, job: Job) -> None:
        self.away.append((node_id, job))
        self.sent.append((node_id, job.kind))

    def poll(self, _timeout_seconds: float) -> list[Ended]:
        node_id, job = self.away.pop(0)
        if job.kind in self.fails:
            outcome = Outcome(job.job_id, job.attempt, job.kind, "error", {}, self.fails[job.kind])
        else:
            outcome = Outcome(job.job_id, job.attempt, job.kind, "ok", result(job.kind))
        return [Ended(node_id, job, encode(outcome), outcome)]

    def acknowledge(self, *_: Any) -> None: ...

    def forget_files(self) -> None: ...

    def problems(self, node_ids: Iterable[str]) -> dict[str, list[str]]:
        """Those that were damaged while the run went on."""
        assert not self.away
        return {node_id: [f"put aside: {len(self.sent)} sent"] for node_id in node_ids}

    def progress(self) -> dict[str, str]:
        return {}


def result(kind: str) -> dict[str, Any]:
    if kind == "fingerprint":
        found = Fingerprint()
        found.add(Measurement("disk.read_mb_s", 900.0, "MB/s", "timed", 9, 1.0))
        return {"fingerprint": found.to_dict()}
    plan = Plan("builtin:gpt-1m", "train.jsonl", "cpu").set("rows_total", 9, "counted", unit="rows")
    if kind == "task":
        return {"task": plan.to_dict()}
    return {"plan": plan.set("micro_batch", 4, "real steps", unit="rows").to_dict()}


class NoGpus:
    """Stands for a `Cluster` of which nothing is leased."""

    def lease_gpus(self, node_ids: Sequence[str]) -> list[None]:
        assert not node_ids
        return []


class Nobody:
    def say(self, text: str) -> None: ...

    def show(self, targets: Sequence[Target]) -> None: ...


def profiled(
    tmp_path: Path, *, fails: Mapping[str, str] | None = None, unreachable: Mapping[str, int]
) -> tuple[dict[str, Row], Nodes, Store, str]:
    """(rows by host, what was sent, the store, the run) of three machines."""
    data = tmp_path / "train.jsonl"
    data.write_text('{"text": "a"}\n')
    store = Store.open(tmp_path / "fleet.db")
    request = ProfileRequest(data=data)
    run = store.begin_run("fleet profile", request.settings())
    nodes = [ClusterNode(f"id-{h}", h, f"10.0.0.{n}", True, 1.0, 0, n == 0)
             for n, h in enumerate("abc")]  # fmt: skip
    dispatcher: Any = Nodes(fails or {}, {f"id-{h}": n for h, n in unreachable.items()})
    cluster: Any = NoGpus()
    profiler = Profiler(request, cluster, dispatcher, store, Nobody(), run)
    profiler.run(nodes)
    return {row.node.host: row for row in store.rows_of(run)}, dispatcher, store, run


def jobs(store: Store, run: str, host: str, rows: Mapping[str, Row]) -> dict[str, tuple[str, str]]:
    node = rows[host].node.node
    return {j.kind: (j.state, j.error) for j in store.jobs(run) if j.node == node}


SENT = "train.jsonl could not be sent to it: it went down"


def test_a_file_that_does_not_arrive_for_the_task_is_in_the_row_and_the_next_node_has_it(
    tmp_path: Path,
) -> None:
    rows, nodes, store, run = profiled(tmp_path, unreachable={"a": 0})
    with store:
        assert SENT in rows["a"].error
        assert jobs(store, run, "a", rows)["task"] == ("failed", SENT)
        assert ("id-a", "task") not in nodes.sent
        assert [rows[h].error for h in "bc"] == ["", ""]
        assert [node for node, kind in nodes.sent if kind == "task"] == ["id-b"]
        assert all(rows[h].plan is not None and "micro_batch" in rows[h].plan for h in "bc")


def test_a_file_that_does_not_arrive_for_the_ramp_is_in_the_row_beside_what_was_measured(
    tmp_path: Path,
) -> None:
    """The task's file arrives on c, and nothing after it."""
    rows, nodes, store, run = profiled(tmp_path, unreachable={"c": 0})
    with store:
        assert SENT in rows["c"].error
        assert jobs(store, run, "c", rows)["ramp"] == ("failed", SENT)
        assert ("id-c", "ramp") not in nodes.sent
        assert rows["c"].fingerprint.number("disk.read_mb_s") == 900.0
        # What the task measured holds here too.
        assert rows["c"].plan is not None
        assert rows["c"].plan["rows_total"].value == 9
        assert [rows[h].error for h in "ab"] == ["", ""]


def test_where_the_task_fails_no_ramp_is_sent_and_every_row_says_why(tmp_path: Path) -> None:
    rows, nodes, store, run = profiled(
        tmp_path, fails={"task": "ValueError: not one row"}, unreachable={}
    )
    with store:
        assert not [node for node, kind in nodes.sent if kind == "ramp"]
        for host in "abc":
            assert "the task's numbers could not be measured" in rows[host].error
            assert "ValueError: not one row" in rows[host].error
            assert jobs(store, run, host, rows)["ramp"][0] == "failed"
            assert rows[host].fingerprint.number("disk.read_mb_s") == 900.0


@pytest.mark.parametrize("unreachable", [{}, {"a": 0}, {"a": 0, "b": 0, "c": 0}, {"b": 1}])
def test_every_job_ends_and_each_device_has_one_row(
    tmp_path: Path, unreachable: dict[str, int]
) -> None:
    rows, nodes, store, run = profiled(tmp_path, unreachable=unreachable)
    with store:
        assert sorted(rows) == ["a", "b", "c"]
        told = (f"put aside: {len(nodes.sent)} sent",)
        assert all(row.node.problems == told for row in rows.values())
        assert {job.state for job in store.jobs(run)} <= {"done", "failed"}
        expected = {host for host, left in unreachable.items() if left == 0}
        assert {host for host, row in rows.items() if row.error} == expected
