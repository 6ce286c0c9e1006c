"""`pichak agent run` with a real Ray head, which is killed and comes back."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from service_tools import Place, kill_session, place_in, run_python, wait_until

from pichak_core.devices.processes import in_sessions, session_of, started_at

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1500)]

#: What `Dispatcher` does, up to where a coordinator would store what came back.
MEASURE = """
import sys, ray
from pichak_agent import ray_actor
from pichak_agent.messages import Job, Outcome, decode, encode
ray.init(address=sys.argv[1], namespace="pichak", log_to_driver=False, configure_logging=False)
(node,) = [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeID"] == sys.argv[2]]
agent, hello = ray_actor.ensure_agent(node, timeout_seconds=200)
job = Job("kept-over-the-restart", 1, "fingerprint", {"only": ["software"]}, 100.0)
outcome = decode(ray.get(agent.run.remote(encode(job)), timeout=200), Outcome)
print(hello["machine_id"], outcome.status)
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with place_in(tmp_path) as made:
        yield made


def node_of(place: Place) -> str:
    return str(place.status()["node_id"])


def test_an_outcome_outlives_its_raylet_and_its_head(place: Place) -> None:
    """field case 88: the head is killed and started anew while an outcome lies in the spool; the
    node joins again, is the same machine, and the next coordinator gets the outcome once."""
    head = place.head()
    service = place.service()
    place.wait_for("in the cluster at")
    first = node_of(place)
    script = place.folder / "measure.py"
    script.write_text(MEASURE)
    machine, status = run_python(place, str(script), place.address, first).split()
    assert status == "ok"
    assert place.status()["spool"]["outcomes"] == 1

    raylet = place.status()["raylet_pid"]
    assert session_of(raylet) != session_of(service.pid)
    os.kill(raylet, signal.SIGKILL)
    place.wait_for("raylet ended .exit code -9.; joining again")
    place.wait_for("in the cluster at .* again")
    second = node_of(place)
    assert second != first

    kill_session(head.pid)
    place.wait_for("keeps what it has and waits for it|joining again", times=2)
    head = place.head("head2.log")
    place.wait_for("in the cluster at .* again", times=2)
    third = node_of(place)
    assert third not in (first, second)
    assert service.poll() is None

    profile = place.pichak(
        *("fleet", "profile", "--address", place.address, "--store", "fleet.db"),
        *("--only", "software", "--no-network", "--seq-len", "64", "--limit", "1", "--json"),
    )
    assert "1 result of an earlier run collected" in profile.stderr, profile.stderr[-3000:]
    nodes = json.loads(profile.stdout)["nodes"]
    assert len(nodes) == 2, "the head and the service's node"
    assert place.status()["spool"]["outcomes"] == 0
    again, _ = run_python(place, str(script), place.address, third).split()
    assert again == machine

    raylet = place.status()["raylet_pid"]
    everyone = in_sessions({session_of(raylet) or 0})
    assert raylet in everyone
    service.send_signal(signal.SIGTERM)
    assert service.wait(10) == 0
    assert not [pid for pid in everyone if started_at(pid) is not None]
    # The outcome of the last job is all that is left of it.
    kept = [path for path in (place.folder / "home").rglob("*") if path.is_file()]
    assert {path.suffix for path in kept} <= {".mpk", ""}
    assert sum(path.suffix == ".mpk" for path in kept) == 1


def test_a_wrong_token_is_one_sentence_and_the_end(place: Place) -> None:
    place.head()
    good = place.token_file.read_text()
    wrong = place.folder / "wrong"
    wrong.write_text("0" * len(good))
    wrong.chmod(0o600)
    service = place.service("--token-file", str(wrong))
    assert service.wait(200) == 2
    said = place.said("service.log")
    assert "refuses this node's token" in said
    assert said.count("\n") <= 3
    assert "Traceback" not in said
    assert not (place.folder / "home").exists()


def test_what_a_killed_service_started_ends_with_it(place: Place) -> None:
    place.head()
    service = place.service()
    place.wait_for("in the cluster at")
    raylet = place.status()["raylet_pid"]
    session = session_of(raylet)
    os.kill(service.pid, signal.SIGKILL)
    wait_until(lambda: not in_sessions({session or 0}), "Ray outlived its service")
    second = place.service(log="second.log")
    place.wait_for("in the cluster at", "second.log")
    second.send_signal(signal.SIGTERM)
    assert second.wait(10) == 0
    assert not (place.folder / "home").exists()
