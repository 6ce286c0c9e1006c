"""Waits, notifications, and what a service keeps on disk."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pichak_agent.home import open_home, tidy
from pichak_agent.locks import FileLock
from pichak_agent.messages import Job, Outcome, decode, encode
from pichak_agent.own_jobs import OwnJobs
from pichak_agent.service import RayStart
from pichak_agent.service_backoff import Backoff
from pichak_agent.service_files import (
    ServiceFiles,
    ServiceState,
    ServiceTakenError,
    age,
    running_services,
    spooled,
)
from pichak_agent.service_notify import notify, watchdog_seconds
from pichak_agent.simulation import agent_of_node, simulated_service
from pichak_agent.telemetry import Telemetry


def test_waits_double_up_to_a_bound_and_differ_between_nodes() -> None:
    ceilings = [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    nodes = [Backoff(1.0, 30.0, random.Random(seed)) for seed in range(200)]
    for ceiling in ceilings:
        waits = [node.wait() for node in nodes]
        assert all(ceiling / 2 <= wait <= ceiling for wait in waits)
        assert len(set(waits)) == len(nodes)
    nodes[0].reset()
    assert nodes[0].wait() <= 1.0


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told(tmp_path: Path, abstract: bool) -> None:
    name = f"pichak-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        address = f"@{name}" if abstract else str(tmp_path / "n")
        manager.bind(f"\0{name}" if abstract else address)
        assert notify("READY=1\nSTATUS=joined", {"NOTIFY_SOCKET": address})
        assert manager.recv(200) == b"READY=1\nSTATUS=joined"
    assert not notify("READY=1", {"NOTIFY_SOCKET": address})
    assert not notify("READY=1", {})
    assert not notify("READY=1", {"NOTIFY_SOCKET": "nonsense"})


def test_the_watchdog_is_patted_twice_as_often_as_is_needed() -> None:
    mine = str(os.getpid())
    assert watchdog_seconds({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": mine}) == 15.0
    assert watchdog_seconds({"WATCHDOG_USEC": "30000000"}) == 15.0
    assert watchdog_seconds({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}) is None
    assert watchdog_seconds({}) is None
    assert watchdog_seconds({"WATCHDOG_USEC": "soon"}) is None


def state(name: str = "gpu-a") -> ServiceState:
    return ServiceState(name, "10.0.0.1:6379", os.getpid(), 1000.0, mark="m", folder="/tmp/x")


def test_one_service_a_node_and_nothing_left_of_it(tmp_path: Path) -> None:
    files = ServiceFiles("gpu-a", tmp_path / "home")
    files.claim("pid 77, since noon")
    files.write(state())
    ((told, alive),) = running_services(tmp_path / "home")
    assert (told, alive) == (state(), True)
    assert not {"mark", "folder"} & set(told.as_dict())
    with pytest.raises(ServiceTakenError, match="pid 77, since noon"):
        ServiceFiles("gpu-a", tmp_path / "home").claim("pid 78")
    other = ServiceFiles("gpu-b", tmp_path / "home")
    other.claim("pid 79")
    files.release()
    assert [path.name for path in (tmp_path / "home" / "service").iterdir()] == ["gpu-b"]
    other.release()
    assert not (tmp_path / "home").exists()
    assert list(running_services(tmp_path / "home")) == []


def test_what_a_killed_service_left_is_found(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from pichak_agent.service_files import *\n"
        "f = ServiceFiles('a', Path(sys.argv[1])); f.claim('pid 1')\n"
        "f.write(ServiceState('a', 'h:1', 1, 1.0, mark='m', folder='/tmp/pichak-ray-1'))\n"
        "os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    ((_, alive),) = running_services(tmp_path)
    assert not alive
    files = ServiceFiles("a", tmp_path)
    files.claim("pid 2")
    assert files.left_behind() == ("m", "/tmp/pichak-ray-1")
    (tmp_path / "service" / "a" / "state.json").write_text("{")
    assert files.left_behind() == ("", "")
    files.release()


def test_tidying_keeps_outcomes_and_what_is_in_use(tmp_path: Path) -> None:
    full, empty, used = (open_home(tmp_path, name) for name in ("full", "empty", "used"))
    lock = full.measuring_lock("cpu")
    assert lock.try_acquire("measures")
    free = full.measuring_lock("cuda")
    assert free.try_acquire("measured")
    free.release()
    full.spool.put(encode(Outcome("job", 1, "fingerprint", "ok", {})))
    full.close()
    empty.close()
    tidy(tmp_path)
    assert sorted(p.name for p in (tmp_path / "agent").iterdir()) == ["full", "used"]
    assert spooled(tmp_path)[0] == 1
    assert lock.path.exists()
    assert not free.path.exists()
    assert FileLock(lock.path).try_acquire() is False
    lock.release()
    used.close()
    tidy(tmp_path)
    # The outcome of the first went with the last agent, or lies where it lay.
    assert spooled(tmp_path)[0] == 1
    assert not (tmp_path / "locks").exists()


def test_tidying_touches_nothing_that_is_not_an_agents(tmp_path: Path) -> None:
    """A home may be a folder with a user's own things in it."""
    theirs = [
        tmp_path / "agent" / "my-bot" / "lock",
        tmp_path / "agent" / "my-bot" / "main.py",
        tmp_path / "agent" / "other" / "notes.txt",
        tmp_path / "locks" / "front" / "door.txt",
        tmp_path / "telemetry" / "mine" / "lock",
        tmp_path / "telemetry" / "mine" / "figures.csv",
        tmp_path / "fleet.db",
    ]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("theirs")
    before = {path: path.read_text() for path in theirs if path.name != "lock"}
    open_home(tmp_path, "ours").close()
    # What the telemetry and the list of running jobs make themselves goes.
    telemetry = Telemetry(tmp_path, start_nvml=None)
    telemetry.tick()
    with OwnJobs(tmp_path).running(Job("j", 1, "ramp", {"device": "cuda:0"}, 9.0)):
        telemetry.stop()
    assert telemetry.state_file.exists()
    tidy(tmp_path)
    assert not telemetry.folder.exists()
    assert {path: path.read_text() for path in theirs if path.name != "lock"} == before
    assert all(path.exists() for path in theirs)
    assert not (tmp_path / "agent" / "other" / "lock").exists()
    assert not (tmp_path / "agent" / "ours").exists()


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (200_000, "2 d")],
)
def test_ages(seconds: float, said: str) -> None:
    assert age(1000.0, 1000.0 + seconds) == said


HOST = """
host = "sim a"
gpu = "NVIDIA H100 80GB HBM3"
gpus = 2
[metrics]
"gpu.kernel_launch_us" = 4.0
"disk.read_mb_s" = 3000
"""


def test_a_simulated_agent_answers_as_the_leased_gpu_and_marks_everything(tmp_path: Path) -> None:
    file = tmp_path / "host.toml"
    file.write_text(HOST)
    service = simulated_service(RayStart("h:1"), file, print)
    assert service.how.num_gpus == 2
    assert service.how.labels == {"pichak.io/name": "sim-a", "pichak.io/simulated": "true"}
    named = simulated_service(RayStart("h:1", name="other"), file, print)
    assert named.how.name == "other"
    assert named.files.folder != service.files.folder
    assert named.home != service.home
    agents = [agent_of_node("node-1", each.variables) for each in (service, named)]
    hellos = [agent.hello() for agent in agents]
    assert [hello["host"] for hello in hellos] == ["sim-a", "other"]
    assert all(hello["simulated"] is True for hello in hellos)
    assert len({hello["machine_id"] for hello in hellos}) == 2
    assert len({uuid for hello in hellos for uuid in hello["gpu_uuids"]}) == 4
    params = {"device": "cuda:0", "visible_devices": "1"}
    answered = decode(agents[0].run(encode(Job("f", 1, "fingerprint", params, 9.0))), Outcome)
    assert (answered.status, answered.simulated, answered.node) == ("ok", True, "sim-a")
    assert answered.result["fingerprint"]["gpu.uuid"]["value"] == hellos[0]["gpu_uuids"][1]
    some = {**params, "only": ["disk"]}
    light = decode(agents[0].run(encode(Job("g", 1, "fingerprint", some, 9.0))), Outcome)
    assert list(light.result["fingerprint"]) == ["disk.read_mb_s"]
    link = decode(agents[0].run(encode(Job("n", 1, "net_listen", {}, 9.0))), Outcome)
    assert (link.status, link.simulated) == ("refused", True)
    assert "has no network" in link.error
    assert agents[0].acknowledge("f", 1)
    for agent in agents:
        agent.close()


def test_a_node_without_the_variable_has_a_real_agent() -> None:
    agent = agent_of_node("node-1", {})
    assert "simulated" not in agent.hello()
    agent.close()
