"""The agent on a real Ray cluster of two nodes (two raylets on this machine)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

import pichak_core
from pichak_agent import ray_actor
from pichak_agent.environment import MARK as JOB_MARK
from pichak_agent.messages import SCHEMA, Job, Outcome, decode, encode, file_param
from pichak_core.devices.processes import descendants, marked, started_at

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.ray

STORE_BYTES = 80 * 1024 * 1024
RUN_MARK = "PICHAK_TEST_RAY"

#: A user's workload that starts a process which leaves its parent, its session and its group, says
#: that it is ready, and hangs.
HANGS = """
import os, signal, time
def factory(settings):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        os._exit(0)
    os.wait()
    print("ready", flush=True)
    time.sleep(600)
"""


class Nodes:
    """The cluster and what the tests ask of it."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.head, self.second = (n["NodeID"] for n in ray.nodes())

    def add(self) -> tuple[Any, str]:
        """One more node, and its id."""
        known = {n["NodeID"] for n in ray.nodes()}
        node = self.cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        (node_id,) = {n["NodeID"] for n in ray.nodes() if n["Alive"]} - known
        return node, node_id


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PICHAK_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv(RUN_MARK, str(os.getpid()))
        patch.delenv("OMP_NUM_THREADS", raising=False)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "object_store_memory": STORE_BYTES,
                "include_dashboard": False,
            },
        )
        cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        ray.init(address=cluster.address, namespace="pichak", log_to_driver=False)
        yield Nodes(cluster)
        ray.shutdown()
        cluster.shutdown()
    wait_until(lambda: not marked(RUN_MARK, str(os.getpid())))


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 30.0
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=60.0)


def fingerprint(job_id: str, attempt: int = 1) -> bytes:
    return encode(Job(job_id, attempt, "fingerprint", {"only": ["software"]}, 60.0))


def hanging(job_id: str, folder: Path) -> bytes:
    path = folder / "hangs.py"
    path.write_text(textwrap.dedent(HANGS))
    params = {"model": file_param(path), "factory": "factory", "visible_devices": None}
    return encode(Job(job_id, 1, "task", params, 300.0))


def tree_of(actor_pid: int) -> dict[int, str | None]:
    """The processes of the job that the actor runs, once its daemon runs too."""
    # The outer and the inner warden, the child, and the daemon.
    wait_until(lambda: len(descendants(actor_pid)) == 4)
    return {pid: started_at(pid) for pid in descendants(actor_pid)}


def gone(tree: dict[int, str | None]) -> bool:
    return not any(started_at(pid) == at for pid, at in tree.items())


def test_an_agent_on_each_node(nodes: Nodes) -> None:
    pids = set()
    for node_id in (nodes.head, nodes.second):
        agent, hello = ray_actor.ensure_agent(node_id)
        same, again = ray_actor.ensure_agent(node_id)
        assert again["pid"] == hello["pid"]
        assert same._actor_id == agent._actor_id
        assert hello["versions"]["pichak"] == pichak_core.__version__
        assert hello["schema"] == SCHEMA
        assert hello["problems"] == []
        pids.add(hello["pid"])
        assert hello["node_id"] == node_id
    assert len(pids) == 2


def test_jobs_run_and_outcomes_stay_until_acknowledged(nodes: Nodes) -> None:
    agent, _ = ray_actor.ensure_agent(nodes.second)
    data = bytes(get(agent.run.remote(fingerprint("plain"))))
    outcome = decode(data, Outcome)
    assert outcome.status == "ok", outcome.error
    assert "software.ray" in outcome.result["fingerprint"]
    assert data in get(agent.pending.remote())
    assert bytes(get(agent.run.remote(fingerprint("plain")))) == data
    assert get(agent.acknowledge.remote("plain", 1)) is True
    assert get(agent.acknowledge.remote("plain", 1)) is False
    assert get(agent.pending.remote()) == []


def test_files_travel(nodes: Nodes, tmp_path: Path) -> None:
    agent, _ = ray_actor.ensure_agent(nodes.second)
    path = tmp_path / "task.py"
    path.write_text("def factory(settings): raise ValueError('from the shipped file')")
    reference = file_param(path)
    digest, content = reference["file"]["sha256"], path.read_bytes()
    assert get(agent.has_file.remote(digest, str(path))) is True
    path.unlink()
    assert get(agent.has_file.remote(digest, str(path))) is False
    assert get(agent.put_file.remote(digest, 0, content, len(content))) == len(content)
    job = Job("shipped", 1, "task", {"model": reference, "factory": "factory"}, 60.0)
    outcome = decode(get(agent.run.remote(encode(job))), Outcome)
    assert outcome.status == "error"
    assert "from the shipped file" in outcome.error
    get(agent.forget_files.remote())
    assert get(agent.has_file.remote(digest, str(path))) is False
    get(agent.acknowledge.remote("shipped", 1))


def test_a_child_sees_what_ray_hid_from_its_worker(nodes: Nodes, tmp_path: Path) -> None:
    """Ray sets OMP_NUM_THREADS=1 and CUDA_VISIBLE_DEVICES="" in a worker without CPUs and GPUs; a
    measurement in such a child would be wrong without a word."""
    agent, hello = ray_actor.ensure_agent(nodes.head)
    call = agent.run.remote(hanging("hidden", tmp_path))
    tree = tree_of(hello["pid"])
    assert get(agent.progress.remote("hidden")) == ""
    for pid in tree:
        variables = psutil.Process(pid).environ()
        assert "OMP_NUM_THREADS" not in variables
        assert "CUDA_VISIBLE_DEVICES" not in variables
        assert JOB_MARK in variables
    assert get(agent.cancel.remote("hidden")) is True
    outcome = decode(get(call), Outcome)
    assert outcome.status == "cancelled"
    assert "ready" in outcome.log_tail
    wait_until(lambda: gone(tree))
    get(agent.acknowledge.remote("hidden", 1))


@pytest.mark.slow
def test_calls_get_through_while_every_job_thread_is_busy(nodes: Nodes, tmp_path: Path) -> None:
    agent, _ = ray_actor.ensure_agent(nodes.head)
    first = agent.run.remote(hanging("first", tmp_path))
    waiting = [agent.run.remote(fingerprint("waits", attempt)) for attempt in range(1, 25)]
    wait_until(lambda: "waiting for 'cpu'" in get(agent.progress.remote("waits")))
    # One after the other: each lets the next begin, until the last that was queued.
    get(agent.cancel.remote("first"))
    assert decode(get(first), Outcome).status == "cancelled"
    for attempt, ref in enumerate(waiting, 1):
        get(agent.cancel.remote("waits"))
        assert decode(get(ref), Outcome).status in ("cancelled", "ok")
        get(agent.acknowledge.remote("waits", attempt))
    get(agent.acknowledge.remote("first", 1))


@pytest.mark.parametrize("how", [pytest.param("ray.kill", marks=pytest.mark.slow), "SIGKILL"])
def test_a_job_ends_with_its_agent_and_outcomes_survive(
    nodes: Nodes, tmp_path: Path, how: str
) -> None:
    agent, hello = ray_actor.ensure_agent(nodes.second)
    kept = bytes(get(agent.run.remote(fingerprint("kept"))))
    call = agent.run.remote(hanging("hangs", tmp_path))
    tree = tree_of(hello["pid"])
    if how == "ray.kill":
        ray.kill(agent, no_restart=True)
    else:
        os.kill(hello["pid"], signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayError):
        get(call)
    wait_until(lambda: gone(tree))
    heir, after = ray_actor.ensure_agent(nodes.second)
    assert after["pid"] != hello["pid"]
    assert get(heir.pending.remote()) == [kept]
    get(heir.acknowledge.remote("kept", 1))


def test_an_agent_told_to_end_ends_its_jobs_first(nodes: Nodes, tmp_path: Path) -> None:
    agent, hello = ray_actor.ensure_agent(nodes.second)
    call = agent.run.remote(hanging("ended", tmp_path))
    tree = {hello["pid"]: started_at(hello["pid"]), **tree_of(hello["pid"])}
    os.kill(hello["pid"], signal.SIGTERM)
    wait_until(lambda: gone(tree))
    heir, _ = ray_actor.ensure_agent(nodes.second)
    outcomes = [decode(data, Outcome) for data in get(heir.pending.remote())]
    assert [(o.job_id, o.status) for o in outcomes] == [("ended", "cancelled")]
    # Its answer may not have made it; the spool's did.
    with contextlib.suppress(ray.exceptions.RayError):
        assert decode(get(call), Outcome).status == "cancelled"
    get(heir.acknowledge.remote("ended", 1))


@pytest.mark.slow
def test_a_job_ends_with_its_raylet(nodes: Nodes, tmp_path: Path) -> None:
    node, node_id = nodes.add()
    agent, hello = ray_actor.ensure_agent(node_id)
    kept = bytes(get(agent.run.remote(fingerprint("kept"))))
    call = agent.run.remote(hanging("hangs", tmp_path))
    tree = {hello["pid"]: started_at(hello["pid"]), **tree_of(hello["pid"])}
    nodes.cluster.remove_node(node, allow_graceful=False)
    with pytest.raises(ray.exceptions.RayError):
        get(call)
    wait_until(lambda: gone(tree))
    # The machine comes back as another Ray node: nothing of it was lost.
    node, node_id = nodes.add()
    try:
        heir, _ = ray_actor.ensure_agent(node_id)
        assert get(heir.pending.remote()) == [kept]
        get(heir.acknowledge.remote("kept", 1))
    finally:
        nodes.cluster.remove_node(node)


class OldAgent:
    """An agent that an earlier version left there."""

    def hello(self) -> dict[str, Any]:
        return {"versions": {"pichak": "0.0.1"}, "schema": SCHEMA, "pid": os.getpid()}


class HungAgent:
    """An agent that answers nothing."""

    def hello(self) -> dict[str, Any]:
        time.sleep(600)
        return {}


class OtherActor:
    """Something else under the agent's name."""

    def greet(self) -> str:
        return "hello"


@pytest.mark.parametrize(
    "left", [OldAgent, pytest.param(HungAgent, marks=pytest.mark.slow), OtherActor]
)
def test_what_was_left_under_its_name_is_replaced(nodes: Nodes, left: type) -> None:
    """field case 87"""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray_actor.stop_agent(nodes.second)
    options = {
        "name": ray_actor.actor_name(nodes.second),
        "namespace": ray_actor.NAMESPACE,
        "lifetime": "detached",
        "num_cpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(nodes.second, soft=False),
    }
    wait_until(lambda: make(left, options))
    agent, hello = ray_actor.ensure_agent(nodes.second, timeout_seconds=12.0)
    assert hello["versions"]["pichak"] == pichak_core.__version__
    assert get(agent.pending.remote()) == []


def make(cls: type, options: dict[str, Any]) -> bool:
    try:
        ray.remote(cls).options(**options).remote()
    except ValueError:  # the name stays taken for a moment
        return False
    return True


def test_a_node_with_another_version_is_told(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pichak_core, "__version__", "99.0")
    with pytest.raises(ray_actor.AgentError, match=r"runs pichak-fleet .* this side 99\.0"):
        ray_actor.ensure_agent(nodes.second, timeout_seconds=30.0)


def test_a_node_without_the_package_is_told(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver knows a module that the node's workers do not."""
    module = ModuleType("pichak_not_installed_there")

    class AgentActor(ray_actor.AgentActor):
        pass

    AgentActor.__module__ = module.__name__
    AgentActor.__qualname__ = "AgentActor"
    module.AgentActor = AgentActor  # type: ignore[attr-defined]
    module.__spec__ = ray_actor.__spec__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(ray_actor, "AgentActor", AgentActor)
    ray_actor.stop_agent(nodes.second)
    ray_actor._remote_class.cache_clear()
    try:
        with pytest.raises(ray_actor.AgentError, match="cannot be imported there"):
            ray_actor.ensure_agent(nodes.second, timeout_seconds=30.0)
    finally:
        ray_actor._remote_class.cache_clear()


@pytest.mark.slow
def test_a_dead_node_is_an_error_in_time(nodes: Nodes) -> None:
    node, node_id = nodes.add()
    nodes.cluster.remove_node(node)
    wait_until(lambda: not any(n["Alive"] for n in ray.nodes() if n["NodeID"] == node_id))
    with pytest.raises((ray_actor.AgentError, ray.exceptions.RayError)):
        ray_actor.ensure_agent(node_id, timeout_seconds=6.0)


def test_stop(nodes: Nodes) -> None:
    _, hello = ray_actor.ensure_agent(nodes.head)
    assert ray_actor.stop_agent(nodes.head) is True
    wait_until(lambda: started_at(hello["pid"]) is None)
    wait_until(lambda: not ray_actor.stop_agent(nodes.head))


DRIVER = """
import sys
import ray
from pichak_agent import ray_actor
from pichak_agent.messages import Job, Outcome, decode, encode
ray.init(address=sys.argv[1], namespace="pichak", log_to_driver=False, configure_logging=False)
for node in ray.nodes():
    if node["Alive"]:
        agent, hello = ray_actor.ensure_agent(node["NodeID"])
        job = Job("from-driver", 1, "fingerprint", {"only": ["software"]}, 60.0)
        outcome = decode(ray.get(agent.run.remote(encode(job)), timeout=60), Outcome)
        ray.get(agent.acknowledge.remote("from-driver", 1))
        print(outcome.status, outcome.error, outcome.log_tail)
"""


def test_a_users_own_modules_in_the_drivers_folder_are_in_nobodys_way(
    nodes: Nodes, tmp_path: Path
) -> None:
    for name in (
        "agent", "coordinator", "messages", "runner", "daemon", "msgpack", "psutil", "torch"
    ):  # fmt: skip
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the user\\'s own file')")
    (tmp_path / "drive.py").write_text(DRIVER)
    # The agents are made by this driver, so that its folder is what Ray puts on their path.
    for node_id in (nodes.head, nodes.second):
        ray_actor.stop_agent(node_id)
    done = subprocess.run(
        [sys.executable, "-P", "drive.py", nodes.cluster.address]
        if sys.version_info >= (3, 11)
        else [sys.executable, "-c", DRIVER, nodes.cluster.address],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ok", "ok"]
