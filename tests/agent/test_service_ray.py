"""`pichak agent run` with a real Ray head, which is killed and comes back."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from service_tools import (
    PATIENCE_SECONDS,
    PICHAK,
    Place,
    kill_session,
    place_in,
    run_python,
    wait_until,
)

from pichak_agent.messages import Outcome, decode
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

HANG = """
import sys, time, ray
from pathlib import Path
from pichak_agent import ray_actor
from pichak_agent.messages import Job, encode, file_param
ray.init(address=sys.argv[1], namespace="pichak", log_to_driver=False, configure_logging=False)
agent, hello = ray_actor.ensure_agent(sys.argv[2], timeout_seconds=200)
params = {"model": file_param(Path("hangs.py").absolute()), "factory": "factory"}
ref = agent.run.remote(encode(Job("hangs", 1, "task", params, 300.0)))
from pichak_core.devices.processes import descendants
while len(descendants(hello["pid"])) < 3:
    time.sleep(0.1)
time.sleep(3)
print("running", flush=True)
ray.get(ref)
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
    assert service.wait(20) == 0
    assert not [pid for pid in everyone if started_at(pid) is not None]
    # The outcome of the last job is all that is left of it.
    kept = [path for path in (place.folder / "home").rglob("*") if path.is_file()]
    assert {path.suffix for path in kept} <= {".mpk", ""}
    assert sum(path.suffix == ".mpk" for path in kept) == 1


def test_a_refusal_is_one_sentence_and_the_end(place: Place) -> None:
    """A wrong token, none at all, and another Ray (field case 82)."""
    place.head()
    good = place.token_file.read_text()
    wrong = place.folder / "wrong"
    wrong.write_text("0" * len(good))
    wrong.chmod(0o600)
    (place.folder / "site").mkdir()
    other = place.folder / "site" / "sitecustomize.py"
    other.write_text("import ray\nray.__version__ = '2.59.1'\n")
    plain = place.environment()
    without = {k: v for k, v in plain.items() if not k.startswith("RAY_")}
    service = [*PICHAK, "agent", "run", "--even-if-another", "--address", place.address]
    service += ["--num-cpus", "1"]
    refused = {
        f"refuses the token in {wrong}: put": ([*service, "--token-file", str(wrong)], plain),
        "wants its token, and where Ray looks here there is none": (service, without),
        "runs another Ray (Ray 2.60.0 there, 2.59.1 here; Python": (
            service,
            {**plain, "PYTHONPATH": str(other.parent)},
        ),
    }
    for number, (sentence, (argv, environment)) in enumerate(refused.items()):
        log = f"refused-{number}.log"
        process = place.start(argv, log, environment)
        assert process.wait(PATIENCE_SECONDS) == 2, place.said(log)
        said = place.said(log)
        assert sentence in said
        assert "Traceback" not in said
        # One line more tells of the service of somebody else on this machine.
        others = "another agent service runs on this machine"
        assert len([line for line in said.splitlines() if others not in line]) <= 3
        assert good not in said
        assert not (place.folder / "home").exists()


def test_jobs_end_well_with_the_service(place: Place) -> None:
    """What runs is cancelled, and its outcome is kept for the next coordinator."""
    place.head()
    service = place.service()
    place.wait_for("in the cluster at")
    (place.folder / "hangs.py").write_text(
        "import time\ndef factory(settings):\n    print('ready', flush=True)\n    time.sleep(600)\n"
    )
    script = place.folder / "hang.py"
    script.write_text(HANG)
    driver = place.start(
        [sys.executable, str(script), place.address, node_of(place)],
        "driver.log",
        place.environment(),
    )
    place.wait_for("running", "driver.log")
    service.send_signal(signal.SIGTERM)
    assert service.wait(20) == 0
    (kept,) = (place.folder / "home").rglob("*.mpk")
    outcome = decode(kept.read_bytes(), Outcome)
    assert (outcome.job_id, outcome.status) == ("hangs", "cancelled")
    driver.kill()
    stopped = place.pichak("agent", "status")
    assert "1 outcome (" in stopped.stderr


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
    assert second.wait(20) == 0
    assert not (place.folder / "home").exists()
