"""From nodes and hellos to the lines of a table; from outcomes to rows."""

from __future__ import annotations

from pichak_agent.messages import Outcome
from pichak_coordinator.cluster import ClusterNode
from pichak_coordinator.request import ProfileRequest, python_workload
from pichak_coordinator.target import Target, targets_of
from pichak_core.measurement import Fingerprint, Measurement
from pichak_core.plan import Plan


def node(name: str, *, gpus: int = 0, host: str = "") -> ClusterNode:
    return ClusterNode(f"id-{name}", host or name, f"10.0.0.{name}", True, 4.0, gpus, name == "1")


def hello(machine: str, gpus: tuple[str, ...] = ()) -> dict[str, object]:
    return {"machine_id": machine, "gpu_uuids": list(gpus), "versions": {"python": "3.11.7"}}


def test_one_target_for_each_gpu_and_one_for_a_node_without() -> None:
    nodes = [node("1"), node("2", gpus=2)]
    hellos = {"id-1": hello("a"), "id-2": hello("b", ("GPU-x", "GPU-y"))}
    targets = targets_of(nodes, hellos, "auto")
    assert [(t.node.node_id, t.device, t.child_device) for t in targets] == [
        ("id-1", "cpu", "cpu"),
        ("id-2", "cuda:0", "cuda:0"),
        ("id-2", "cuda:1", "cuda:0"),
    ]
    assert [t.number for t in targets] == [0, 1, 2]
    assert len({t.identity for t in targets}) == 2


def test_several_agents_of_one_machine_are_told_apart() -> None:
    nodes = [node("1", host="box"), node("2", host="box")]
    targets = targets_of(nodes, {"id-1": hello("a"), "id-2": hello("a")}, "auto")
    assert targets[0].identity != targets[1].identity
    assert {t.label for t in targets} == {"box", "box #2"}


def test_a_node_without_an_agent_is_a_failed_line_and_costs_nobody_else() -> None:
    nodes = [node("1"), node("2")]
    lost, good = targets_of(nodes, {"id-1": "the node died", "id-2": hello("b")}, "auto")
    assert (lost.phase, lost.error) == ("failed", "the node died")
    assert good.phase == "queued"


def test_a_gpu_that_ray_does_not_offer_is_said_and_not_measured() -> None:
    (target,) = targets_of([node("1")], {"id-1": hello("a", ("GPU-x",))}, "auto")
    assert not target.wants_gpu
    assert "--num-gpus" in target.notes[0]
    target.take_ramp(outcome("ramp", plan=Plan().to_dict()))
    row = target.row()
    assert row.plan is not None
    assert "not offered to Ray" in row.plan.notes[0]


def test_asking_for_cuda_where_there_is_none_is_a_named_reason() -> None:
    bare, hidden = targets_of(
        [node("1"), node("2")], {"id-1": hello("a"), "id-2": hello("b", ("GPU-x",))}, "cuda"
    )
    assert "has no GPU" in bare.error
    assert "--num-gpus" in hidden.error


def test_the_cpu_may_be_asked_for_on_a_gpu_node() -> None:
    (target,) = targets_of([node("1", gpus=8)], {"id-1": hello("a", ("GPU-x",))}, "cpu")
    assert (target.device, target.wants_gpu, target.notes) == ("cpu", False, [])


def outcome(kind: str, status: str = "ok", error: str = "", **result: object) -> Outcome:
    return Outcome("j", 1, kind, status, result=result, error=error)


def one() -> Target:
    return targets_of([node("1")], {"id-1": hello("a")}, "auto")[0]


def test_a_failed_job_keeps_what_was_measured_before_it() -> None:
    target = one()
    fingerprint = Fingerprint()
    fingerprint.add(Measurement("cpu.model", "Xeon", "", "/proc/cpuinfo"))
    target.take_fingerprint(outcome("fingerprint", fingerprint=fingerprint.to_dict()))
    assert target.phase == "fingerprinted"
    target.take_ramp(outcome("ramp", "timeout", "no end after 240 s"))
    row = target.row()
    assert row.error == "ramp timeout: no end after 240 s"
    assert row.fingerprint.text("cpu.model") == "Xeon"
    assert row.node.device_name == "Xeon"
    assert row.plan is None


def test_a_partial_result_is_kept_with_its_error() -> None:
    target = one()
    plan = Plan().set("micro_batch", 4, "4 ran")
    target.take_ramp(outcome("ramp", "cancelled", "interrupted", plan=plan.to_dict()))
    row = target.row()
    assert row.plan is not None
    assert row.plan.micro_batch == 4
    assert "interrupted" in row.error


def test_the_first_error_is_the_one_that_is_told() -> None:
    target = one()
    target.fail("the disk is full")
    target.fail("interrupted")
    assert target.error == "the disk is full"


def test_jobs_carry_what_was_asked() -> None:
    request = ProfileRequest(limit=64, memory_cap_bytes=1 << 30, deadline_seconds={"ramp": 7.0})
    task = Plan().set("seq_len", 512, "p95 is 400")
    job = request.ramp_job("j", 2, "cpu", "machine", {"data": {"file": {"sha256": "0"}}}, task)
    assert (job.kind, job.attempt, job.deadline_seconds, job.lock) == ("ramp", 2, 7.0, "machine")
    assert job.params["limit"] == 64
    assert job.params["memory_cap_bytes"] == 1 << 30
    assert job.params["data"] == {"file": {"sha256": "0"}}
    assert Plan.from_dict(job.params["task"]) == task


def test_python_workloads_are_told_from_other_models() -> None:
    assert python_workload("dir/train.py:make") == ("dir/train.py", "make")
    assert python_workload("C:\\w\\train.py:make") == ("C:\\w\\train.py", "make")
    assert python_workload("builtin:gpt-1m") is None
    assert python_workload("my.package:factory") is None
