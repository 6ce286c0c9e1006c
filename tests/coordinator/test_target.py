"""From nodes and hellos to the lines of a table, and the jobs that a request means for them."""

from __future__ import annotations

from dataclasses import replace

from pichak_coordinator.cluster import ClusterNode, Lease
from pichak_coordinator.request import MACHINE_LOCK, ProfileRequest, python_workload
from pichak_coordinator.target import Target, targets_of
from pichak_core.plan import Plan


def node(name: str, *, gpus: int = 0, host: str = "") -> ClusterNode:
    return ClusterNode(f"id-{name}", host or name, f"10.0.0.{name}", True, 4.0, gpus, name == "1")


def hello(*gpus: str) -> dict[str, object]:
    return {"machine_id": "m", "gpu_uuids": list(gpus)}


def targets(nodes: list[ClusterNode], hellos: dict[str, object], device: str) -> list[Target]:
    identities = {n.node_id: f"n-{n.node_id[3:]}" for n in nodes}
    return targets_of(nodes, hellos, identities, device)  # type: ignore[arg-type]


def test_one_target_for_each_gpu_and_one_for_a_node_without() -> None:
    nodes = [node("1"), node("2", gpus=2)]
    made = targets(nodes, {"id-1": hello(), "id-2": hello("GPU-x", "GPU-y")}, "auto")
    assert [(t.node.node_id, t.device, t.child_device) for t in made] == [
        ("id-1", "cpu", "cpu"),
        ("id-2", "cuda:0", "cuda:0"),
        ("id-2", "cuda:1", "cuda:0"),
    ]
    assert [t.number for t in made] == [0, 1, 2]
    assert [t.label for t in made] == ["1", "2 cuda:0", "2 cuda:1"]


def test_agents_of_one_machine_are_told_apart_by_their_labels() -> None:
    (target,) = targets([node("1", host="box")], {"id-1": hello()}, "auto")
    assert target.label == "box"
    target.identity = "n-0123456789-2"
    assert target.label == "box #2"


def test_a_node_without_an_agent_is_an_ended_line_and_costs_nobody_else() -> None:
    lost, good = targets([node("1"), node("2")], {"id-1": "the node died", "id-2": hello()}, "auto")
    assert (lost.ended, lost.phase, lost.error) == (True, "failed", "the node died")
    assert (good.ended, good.phase) == (False, "queued")


def test_a_gpu_that_ray_does_not_offer_is_said_and_not_measured() -> None:
    (target,) = targets([node("1")], {"id-1": hello("GPU-x")}, "auto")
    assert not target.wants_gpu
    assert not target.ended
    (finding,) = target.findings
    assert finding.code == "gpu_not_offered"
    assert "--num-gpus" in finding.sentence
    assert finding.evidence == {"gpu_uuids": ["GPU-x"]}


def test_asking_for_cuda_where_there_is_none_is_a_named_reason() -> None:
    bare, hidden = targets(
        [node("1"), node("2")], {"id-1": hello(), "id-2": hello("GPU-x")}, "cuda"
    )
    assert "has no GPU" in bare.error
    assert "--num-gpus" in hidden.error


def test_the_cpu_may_be_asked_for_on_a_gpu_node() -> None:
    (target,) = targets([node("1", gpus=8)], {"id-1": hello("GPU-x")}, "cpu")
    assert (target.device, target.wants_gpu, target.findings) == ("cpu", False, [])


def test_the_first_error_is_the_one_that_is_told_and_the_gpu_is_given_back() -> None:
    class Held(Lease):
        released: list[str] = []  # noqa: RUF012

        def release(self) -> None:
            self.released.append(self.visible_devices)

    (target,) = targets([node("1", gpus=1)], {"id-1": hello("GPU-x")}, "auto")
    target.lease = Held(None, "3")
    job = ProfileRequest().fingerprint_job("j", 1, target.child_device)
    assert target.with_lease(job) == replace(job, params={**job.params, "visible_devices": "3"})
    target.end("the disk is full")
    target.end("interrupted")
    assert target.error == "the disk is full"
    assert Held.released == ["3"]
    assert target.with_lease(job) == job


def test_a_target_that_ended_well_is_done() -> None:
    (target,) = targets([node("1")], {"id-1": hello()}, "auto")
    target.end()
    assert (target.phase, target.error) == ("done", "")


def test_jobs_carry_what_was_asked() -> None:
    request = ProfileRequest(limit=64, memory_cap_bytes=1 << 30, deadline_seconds={"ramp": 7.0})
    task = Plan().set("seq_len", 512, "p95 is 400")
    job = request.ramp_job("j", 2, "cpu", {"data": {"file": {"sha256": "0"}}}, task)
    assert (job.kind, job.attempt, job.deadline_seconds, job.lock) == ("ramp", 2, 7, MACHINE_LOCK)
    assert job.params["limit"] == 64
    assert job.params["memory_cap_bytes"] == 1 << 30
    assert job.params["data"] == {"file": {"sha256": "0"}}
    assert Plan.from_dict(job.params["task"]) == task


def test_python_workloads_are_told_from_other_models() -> None:
    assert python_workload("dir/train.py:make") == ("dir/train.py", "make")
    assert python_workload("C:\\w\\train.py:make") == ("C:\\w\\train.py", "make")
    assert python_workload("builtin:gpt-1m") is None
    assert python_workload("my.package:factory") is None
