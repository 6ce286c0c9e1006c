"""The watch's loop over a fleet without Ray: its clock and its nodes are the tests' own, its store,
courier, judge and messages are the real ones."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pichak_agent.messages import Job, Outcome, decode, encode
from pichak_coordinator import courier as courier_module
from pichak_coordinator import watch as watch_module
from pichak_coordinator.cluster import ClusterNode, Lease
from pichak_coordinator.cut_runs import open_jobs
from pichak_coordinator.database import StoreError
from pichak_coordinator.dispatch import Ended
from pichak_coordinator.request import ProfileRequest
from pichak_coordinator.schedule import HOUR, Policy
from pichak_coordinator.watch import Tally, Watch
from pichak_coordinator.watch_probe import LIGHT, Requests
from pichak_coordinator.watch_store import WatchStore
from pichak_coordinator.watch_view import GONE_SECONDS, WatchView
from pichak_core.measurement import Fingerprint, Measurement, Reason, Unmeasured

COPY, MATMUL, DISK = "host.memory_copy_mb_s", "cpu.matmul_fp32_gflop_s", "disk.read_mb_s"
START = 1_700_000_000.0


class Killed(BaseException):
    """The process is gone at this point."""


class AtOnce:
    """A pool of threads that has none: the fake clock would not wait for them."""

    def __init__(self, threads: int) -> None:
        pass

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*arguments))
        except Exception as error:
            done.set_exception(error)
        return done

    def shutdown(self, **_: Any) -> None:
        pass


@dataclass
class Clock:
    now: float = START

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 5.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class Host:
    """A node: its readings' true values, and what may be wrong with it."""

    gpus: int = 0
    free_gpus: int = 99
    alive: bool = True
    lost_gpu: bool = False
    status: str = "ok"
    model: str = "Xeon"
    labels: dict[str, str] = field(default_factory=dict)
    machine: str = ""
    speed: dict[str, float] = field(default_factory=lambda: {COPY: 1e4, MATMUL: 40.0, DISK: 500.0})


@dataclass
class Fleet:
    """Cluster and dispatcher in one. Each job takes `job_seconds` of the fake clock."""

    hosts: dict[str, Host]
    clock: Clock
    job_seconds: float = 8.0
    noise: random.Random = field(default_factory=lambda: random.Random(1))
    jobs: list[tuple[float, str, Job]] = field(default_factory=list)
    flights: list[tuple[str, Job]] = field(default_factory=list)
    acknowledged: list[str] = field(default_factory=list)
    spool: dict[str, list[bytes]] = field(default_factory=dict)
    polls: int = 0
    die_at_poll: int = 10**9
    local = True
    address = ""

    def nodes(self) -> list[ClusterNode]:
        return [
            ClusterNode(
                f"ray-{name}",
                name,
                f"10.0.0.{i}",
                host.alive,
                4.0,
                host.gpus,
                i == 0,
                labels=host.labels,
            )
            for i, (name, host) in enumerate(self.hosts.items())
        ]

    def lease_gpus(self, node_ids: Sequence[str], timeout: float) -> list[Lease | None]:
        made: list[Lease | None] = []
        for i, ray_id in enumerate(node_ids):
            free = self.hosts[ray_id[4:]].free_gpus > i
            made.append(_Lease(None, str(i)) if free else None)
        return made

    def start_agents(self, nodes: Sequence[ClusterNode], timeout: float) -> dict[str, Any]:
        return {n.node_id: self._hello(n) for n in nodes}

    def _hello(self, node: ClusterNode) -> Mapping[str, Any]:
        uuids = [f"GPU-{node.host}-{i}" for i in range(node.gpus)]
        host = self.hosts[node.host]
        gpus = [{"name": "L4", "uuid": uuid} for uuid in uuids]
        return {
            "machine_id": host.machine or f"m-{node.host}",
            "address": node.address,
            "host": node.host,
            "cpu_model": host.model,
            "gpu_uuids": uuids,
            "gpus": gpus,
        }

    def leftovers(self, ray_id: str) -> list[bytes]:
        return self.spool.pop(ray_id, [])

    def submit(self, ray_id: str, job: Job) -> None:
        self.jobs.append((self.clock.now, ray_id[4:], job))
        self.flights.append((ray_id, job))

    @property
    def in_flight(self) -> int:
        return len(self.flights)

    def poll(self, timeout: float) -> list[Ended]:
        self.polls += 1
        if self.polls >= self.die_at_poll:
            # What the node made is in its spool when the coordinator goes away.
            for ray_id, job in self.flights:
                self.spool.setdefault(ray_id, []).append(self._outcome(ray_id, job))
            raise Killed
        self.clock.now += self.job_seconds
        flights, self.flights = self.flights, []
        ended = []
        for ray_id, job in flights:
            data = self._outcome(ray_id, job)
            ended.append(Ended(ray_id, job, data, decode(data, Outcome)))
        return ended

    def _outcome(self, ray_id: str, job: Job) -> bytes:
        host = self.hosts[ray_id[4:]]
        found = Fingerprint()
        only = job.params.get("only")
        for metric, true in host.speed.items():
            if metric == DISK and only:
                continue
            value = true * (1 + 0.005 * self.noise.gauss(0, 1))
            unit = "GFLOP/s" if "gflop" in metric else "MB/s"
            found.add(Measurement(metric, value, unit, "timed", samples=9, spread=0.01 * true))
        if host.gpus:
            self._gpu(found, host, ray_id, str(job.params.get("visible_devices")))
        result = {"fingerprint": found.to_dict()} if host.status == "ok" else {}
        error = "" if host.status == "ok" else f"made {host.status}"
        return encode(
            Outcome(
                job.job_id, job.attempt, job.kind, host.status, result,
                error=error, node=ray_id, seconds=self.job_seconds,
            )
        )  # fmt: skip

    def _gpu(self, found: Fingerprint, host: Host, ray_id: str, visible: str) -> None:
        found.add(Measurement("gpu.name", "L4", "", "read"))
        if host.lost_gpu:
            found.add(Unmeasured("gpu.h2d_pinned_mb_s", Reason.LOST, "restart the container"))
            entry = {
                "code": "gpu_lost",
                "severity": "fail",
                "sentence": "the GPU does not answer: restart the container",
                "evidence": {},
            }
            found.add(
                Measurement("gpu.state_verdict", "1", "", "read", detail={"findings": [entry]})
            )
        else:
            found.add(
                Measurement("gpu.h2d_pinned_mb_s", 2e4, "MB/s", "timed", samples=9, spread=50.0)
            )
        found.add(Measurement("gpu.uuid", f"GPU-{ray_id[4:]}-{visible}", "", "read"))

    def acknowledge(self, ray_id: str, job_id: str, attempt: int) -> None:
        self.acknowledged.append(job_id)

    def acknowledge_bytes(self, ray_id: str, data: bytes) -> None:
        pass

    def progress(self) -> dict[str, str]:
        return {}

    def cancel(self, job_id: str) -> None:
        self.flights = [f for f in self.flights if f[1].job_id != job_id]

    def cancel_all(self) -> list[Ended]:
        self.flights = []
        return []


class _Lease(Lease):
    def release(self) -> None:
        pass


REQUESTS = Requests.of(ProfileRequest(), ramp=False)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In memory where the system has such a place: a day of probes is thousands of commits."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        yield Path(folder)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(courier_module, "time", made)
    monkeypatch.setattr(watch_module, "ThreadPoolExecutor", AtOnce)
    return made


def watched(
    fleet: Fleet,
    path: Path,
    *,
    hours: float = 0.0,
    once: bool = False,
    policy: Policy | None = None,
    during: Mapping[float, Any] | None = None,
    show: Callable[[WatchView], None] | None = None,
) -> tuple[Tally, list[dict[str, Any]]]:
    """Watch for some hours of the fake clock; at each time of `during` its function is called."""
    told: list[dict[str, Any]] = []
    due = sorted((during or {}).items())
    began = fleet.clock.now

    def until() -> bool:
        while due and fleet.clock.now - began >= due[0][0] * HOUR:
            due.pop(0)[1]()
        return fleet.clock.now - began >= hours * HOUR

    policy = policy or Policy(longest_seconds=REQUESTS.longest_seconds())
    with WatchStore.open(path, clock=fleet.clock) as store, store.held():
        watch = Watch(
            policy, REQUESTS, fleet, fleet, store,  # type: ignore[arg-type]
            say=lambda text: None, tell=told.append, notify=True, show=show,
            clock=fleet.clock,  # type: ignore[arg-type]
        )  # fmt: skip
        tally = watch.run(once=once, until=until if not once else lambda: False)
    return tally, told


def kinds(told: Sequence[Mapping[str, Any]]) -> list[str]:
    return [record["event"] for record in told]


def cpus(count: int, **hosts: Host) -> dict[str, Host]:
    return {f"h{i}": Host() for i in range(count)} | hosts


def test_a_slow_node_is_suspected_looked_at_again_at_once_and_told_before_and_after(
    clock: Clock, tmp_path: Path
) -> None:
    fleet = Fleet(cpus(8), clock)

    def slow() -> None:
        fleet.hosts["h3"].speed[COPY] *= 0.8

    tally, told = watched(fleet, tmp_path / "fleet.db", hours=8, during={3.0: slow})
    about = [t for t in told if t["event"] not in ("joined",)]
    assert kinds(about) == ["suspected", "confirmed"]
    assert {t["host"] for t in about} == {"h3"}
    first, second = about
    assert 0 < second["time"] - first["time"] < 60
    assert first["time"] - (START + 3 * HOUR) <= 4 * 1.25 * 600 + 60
    change = second["change"]
    assert change["before"] == pytest.approx(1e4, rel=0.02)
    assert change["after"] == pytest.approx(8e3, rel=0.02)
    assert change["samples"] == 9
    assert "→" in second["text"]
    assert second["finding"]["evidence"]["mean_deviation"] == pytest.approx(0.2, abs=0.02)
    assert tally.open_faults == {(first["node"], "cpu"): 1}
    light = [job for _, _, job in fleet.jobs if job.params["only"]]
    assert {tuple(job.params["only"]) for job in light} == {LIGHT}
    # No device was probed more often than a quarter of the interval allows, second looks aside.
    assert len(light) < 8 * 8 * HOUR / (600 * 0.25 * 0.9)


def test_a_fault_that_ends_is_told_too(clock: Clock, tmp_path: Path) -> None:
    fleet = Fleet(cpus(8), clock)

    def factor(by: float) -> Any:
        return lambda: fleet.hosts["h3"].speed.update({COPY: 1e4 * by})

    during = {3.0: factor(0.8), 6.0: factor(1.0)}
    _, told = watched(fleet, tmp_path / "fleet.db", hours=10, during=during)
    about = [kind for kind in kinds(told) if kind != "joined"]
    assert about == ["suspected", "confirmed", "cleared"]


def test_a_node_that_became_faster_or_has_no_peers_is_told_as_changed(
    clock: Clock, tmp_path: Path
) -> None:
    fleet = Fleet({"alone": Host(model="Other")}, clock)

    def faster() -> None:
        fleet.hosts["alone"].speed[MATMUL] *= 1.5

    _, told = watched(fleet, tmp_path / "fleet.db", hours=8, during={4.0: faster})
    changed = [t for t in told if t["event"] == "changed"]
    assert len(changed) == 1
    assert changed[0]["change"]["metric"] == MATMUL
    assert changed[0]["change"]["before"] == pytest.approx(40, rel=0.02)
    assert changed[0]["change"]["after"] == pytest.approx(60, rel=0.02)
    assert "confirmed" not in kinds(told)


def test_a_quiet_fleet_tells_nothing_and_is_probed_less_and_less(
    clock: Clock, tmp_path: Path
) -> None:
    fleet = Fleet(cpus(6), clock)
    tally, told = watched(fleet, tmp_path / "fleet.db", hours=24)
    assert kinds(told) == ["joined"] * 6
    last = [at for at, _, _ in fleet.jobs if at > START + 20 * HOUR]
    # Four times the interval: 6 nodes every 40 minutes or so, in the last 4 hours, and full ones.
    assert 6 * 4 <= len(last) <= 6 * 9
    assert tally.failed == tally.busy == 0


def test_busy_gpus_are_told_and_asked_again_and_are_no_failure(
    clock: Clock, tmp_path: Path
) -> None:
    fleet = Fleet({"g": Host(gpus=2, free_gpus=0)}, clock)

    def free() -> None:
        fleet.hosts["g"].free_gpus = 2

    tally, told = watched(fleet, tmp_path / "fleet.db", hours=4, during={2.0: free})
    assert kinds(told) == ["joined", "busy"]
    # Of the whole node, which has no device of its own.
    assert {(t["device"], t["name"], t["host"]) for t in told} == {("", "g", "g")}
    assert tally.busy >= 2
    assert tally.failed == 0
    assert min(at for at, _, _ in fleet.jobs) >= START + 2 * HOUR
    devices = {job.params["visible_devices"] for _, _, job in fleet.jobs}
    assert devices == {"0", "1"}
    with WatchStore.open(tmp_path / "fleet.db") as store:
        (node,) = {entry.node for entry in store.entries().values()}
        # Each card has its own memory, by its UUID.
        for card in ("GPU-g-0", "GPU-g-1"):
            assert "gpu.h2d_pinned_mb_s" in store.memory(node, card).before


def test_an_agent_that_says_busy_is_no_failure_either(clock: Clock, tmp_path: Path) -> None:
    fleet = Fleet({"a": Host(status="busy")}, clock)
    tally, told = watched(fleet, tmp_path / "fleet.db", once=True)
    assert kinds(told) == ["joined", "busy"]
    assert (tally.busy, tally.failed, tally.measured) == (1, 0, 0)


def test_a_lost_gpu_is_told_with_its_hint_and_the_last_good_reading_stays(
    clock: Clock, tmp_path: Path
) -> None:
    # field case 5
    fleet = Fleet({"g": Host(gpus=1)}, clock)

    def lose() -> None:
        fleet.hosts["g"].lost_gpu = True

    _, told = watched(fleet, tmp_path / "fleet.db", hours=6, during={2.0: lose})
    (sure,) = [t for t in told if t["event"] == "confirmed"]
    assert sure["finding"]["code"] == "gpu_lost"
    assert "restart the container" in sure["text"]
    with WatchStore.open(tmp_path / "fleet.db") as store:
        memory = store.memory(sure["node"], "GPU-g-0")
        assert memory.before["gpu.h2d_pinned_mb_s"].values[0] == 2e4
    later = [at for at, _, _ in fleet.jobs if at > START + 4 * HOUR]
    assert later  # the loop goes on


def test_nodes_that_fail_leave_and_return(clock: Clock, tmp_path: Path) -> None:
    fleet = Fleet(cpus(2), clock)
    host = fleet.hosts["h1"]
    during = {
        1.0: lambda: setattr(host, "status", "error"),
        2.0: lambda: setattr(host, "status", "ok"),
        3.0: lambda: setattr(host, "alive", False),
        4.0: lambda: setattr(host, "alive", True),
    }
    _, told = watched(fleet, tmp_path / "fleet.db", hours=6, during=during)
    mine = [t["event"] for t in told if t["host"] == "h1"]
    assert mine == ["joined", "probe_failed", "probe_works", "left", "joined"]
    assert "made error" in next(t["text"] for t in told if t["event"] == "probe_failed")
    gone = [at for at, name, _ in fleet.jobs if name == "h1"]
    assert not [at for at in gone if START + 3.01 * HOUR < at < START + 4 * HOUR]
    assert [t["event"] for t in told if t["host"] == "h0"] == ["joined"]


def test_one_round_probes_everybody_once_and_looks_again_where_something_is_odd(
    clock: Clock, tmp_path: Path
) -> None:
    slow = Host()
    slow.speed[COPY] *= 0.5
    fleet = Fleet(cpus(7, slow=slow), clock)
    tally, told = watched(fleet, tmp_path / "fleet.db", once=True)
    counts = {name: sum(n == name for _, n, _ in fleet.jobs) for name in fleet.hosts}
    assert counts == {f"h{i}": 1 for i in range(7)} | {"slow": 2}
    assert kinds(told)[-1] == "confirmed"
    assert sum(tally.open_faults.values()) == 1
    # A second round at once: nobody is due.
    tally, told = watched(fleet, tmp_path / "fleet.db", once=True)
    assert tally.probes == 0
    assert sum(tally.open_faults.values()) == 1  # it is as open as it was
    # Until its node is as fast as the others, or no longer in the cluster.
    slow.alive = False
    assert not watched(fleet, tmp_path / "fleet.db", once=True)[0].open_faults
    slow.alive, slow.speed[COPY] = True, 1e4
    clock.now += 6 * HOUR
    tally, told = watched(fleet, tmp_path / "fleet.db", once=True)
    assert "cleared" in kinds(told)
    assert not tally.open_faults


def test_a_node_that_gave_nothing_counts_until_it_gives_again(clock: Clock, tmp_path: Path) -> None:
    fleet = Fleet(cpus(2), clock)
    fleet.hosts["h1"].status = "error"
    first, _ = watched(fleet, tmp_path / "fleet.db", once=True)
    again, _ = watched(fleet, tmp_path / "fleet.db", once=True)
    assert (first.failed, first.silent) == (1, 1)
    assert (again.probes, again.silent) == (0, 1)  # it was not due, and is no better
    fleet.hosts["h1"].status = "ok"
    clock.now += HOUR
    assert watched(fleet, tmp_path / "fleet.db", once=True)[0].silent == 0


def test_killed_anywhere_it_goes_on_loses_nothing_and_keeps_the_budget(
    clock: Clock, tmp_path: Path
) -> None:
    budget = 400.0
    policy = Policy(
        every_seconds={"light": 600.0, "full": 2 * HOUR},
        longest_seconds=REQUESTS.longest_seconds(),
        budget_seconds=budget,
    )
    fleet = Fleet(cpus(6), clock)
    path = tmp_path / "fleet.db"
    for kill_after in (1, 2, 3, 5, 8, 13, 21):
        fleet.polls, fleet.die_at_poll = 0, kill_after
        with pytest.raises(Killed):
            watched(fleet, path, hours=100, policy=policy)
        fleet.flights = []
        clock.now += 7.0
    fleet.die_at_poll = 10**9
    watched(fleet, path, hours=2, policy=policy)
    starts = [(at, fleet.job_seconds) for at, _, _ in fleet.jobs]
    for at, _ in starts:
        assert sum(s for then, s in starts if at <= then < at + HOUR) <= budget
    with WatchStore.open(path) as store:
        stored = {r[0] for r in store._all("SELECT job_id FROM outcomes")}
        ids = [e["id"] for e in store.events()]
        assert open_jobs(store) == []
    assert {job.job_id for _, _, job in fleet.jobs} == stored
    assert len(ids) == len(set(ids))


def test_after_a_night_asleep_the_fleet_is_not_probed_at_once(clock: Clock, tmp_path: Path) -> None:
    fleet = Fleet(cpus(12), clock)
    path = tmp_path / "fleet.db"
    watched(fleet, path, hours=2)
    clock.now += 9 * HOUR
    before = len(fleet.jobs)
    woken = clock.now
    watched(fleet, path, hours=1)
    after = [at for at, _, _ in fleet.jobs[before:]]
    assert len([at for at in after if at < woken + 30]) <= 3
    lights = [(at, n) for at, n, job in fleet.jobs[before:] if job.params["only"]]
    assert {n for _, n in lights} == set(fleet.hosts)


def test_ctrl_c_keeps_what_was_measured(clock: Clock, tmp_path: Path) -> None:
    fleet = Fleet(cpus(3), clock)

    def stop() -> None:
        raise KeyboardInterrupt

    tally, told = watched(fleet, tmp_path / "fleet.db", hours=5, during={1.5: stop})
    assert tally.interrupted
    assert tally.measured > 3
    with WatchStore.open(tmp_path / "fleet.db") as store:
        assert len(store.events()) == len(told)
        assert all(run.finished_unix for run in store.runs())


def test_a_second_watch_of_the_same_store_is_refused_until_the_first_is_gone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "fleet.db"
    code = (
        "import sys, time\n"
        "from pichak_coordinator.watch_store import WatchStore\n"
        "store = WatchStore.open(sys.argv[1])\n"
        "with store.held():\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "held"
    with WatchStore.open(path) as store:
        with pytest.raises(StoreError, match=f"already watched by process {process.pid}"):  # noqa: SIM117
            with store.held():
                pass
        # Everybody else may read and write meanwhile.
        store.finish_run(store.begin_run("fleet profile"))
        process.kill()
        process.communicate()
        with store.held():
            pass


def test_a_second_agent_of_a_machine_takes_nobody_s_name(clock: Clock, tmp_path: Path) -> None:
    # The one with the lower address, which would be named first, joins later.
    fleet = Fleet(
        {"late": Host(alive=False, machine="m"), "early": Host(machine="m")},
        clock,
        job_seconds=40.0,
    )
    views: list[WatchView] = []
    policy = Policy(
        every_seconds={"light": 60.0}, longest_seconds=REQUESTS.longest_seconds(), most_at_once=1
    )
    during = {1.0: lambda: setattr(fleet.hosts["late"], "alive", True)}
    _, told = watched(
        fleet, tmp_path / "fleet.db", hours=2, policy=policy, during=during, show=views.append
    )
    (early,) = {t["node"] for t in told if t["event"] == "joined" and t["host"] == "early"}
    (late,) = {t["node"] for t in told if t["event"] == "joined" and t["host"] == "late"}
    assert early != late
    names = {node.host: node.node for node in views[-1].nodes}
    assert names == {"early": early, "late": late}
    assert set(views[-1].entries) == {early, late}
    for name in ("early", "late"):
        assert [at for at, host, _ in fleet.jobs if host == name and at > START + 1.5 * HOUR], name


def test_a_node_that_its_owner_leaves_out_is_not_probed(clock: Clock, tmp_path: Path) -> None:
    fleet = Fleet(cpus(2, head=Host(labels={"pichak.io/measure": "no"})), clock)
    _, told = watched(fleet, tmp_path / "fleet.db", once=True)
    assert {t["host"] for t in told} == {"h0", "h1"}
    assert {name for _, name, _ in fleet.jobs} == {"h0", "h1"}
    fleet.hosts["head"].labels.clear()
    _, told = watched(fleet, tmp_path / "fleet.db", once=True)
    assert "head" in {t["host"] for t in told}


def test_one_round_is_one_round_also_where_it_takes_longer_than_the_interval(
    clock: Clock, tmp_path: Path
) -> None:
    fleet = Fleet(cpus(5), clock, job_seconds=50.0)
    policy = Policy(
        every_seconds={"light": 10.0}, longest_seconds=REQUESTS.longest_seconds(), most_at_once=1
    )
    watched(fleet, tmp_path / "fleet.db", once=True, policy=policy)
    assert sorted(name for _, name, _ in fleet.jobs) == sorted(fleet.hosts)


def test_what_a_watch_shows_of_itself(clock: Clock, tmp_path: Path) -> None:
    slow = Host()
    slow.speed[COPY] *= 0.5
    fleet = Fleet(cpus(7, slow=slow, g=Host(gpus=1)), clock)
    views: list[WatchView] = []

    def lose() -> None:
        fleet.hosts["g"].lost_gpu = True
        fleet.hosts["h0"].alive = False

    budget = 3000.0
    policy = Policy(
        every_seconds={"light": 600.0, "full": HOUR},
        longest_seconds=REQUESTS.longest_seconds(),
        budget_seconds=budget,
    )
    path = tmp_path / "fleet.db"
    tally, _ = watched(fleet, path, hours=2, policy=policy, during={1.0: lose}, show=views.append)
    last = views[-1]
    by_host = {row.node.host: row for row in last.rows.values()}
    assert set(by_host) == {f"h{i}" for i in range(1, 7)} | {"slow", "g"}
    assert by_host["slow"].fingerprint.number(COPY) == pytest.approx(5e3, rel=0.02)
    # What can no longer be read is shown as not measured, and not with its last good value.
    lost = by_host["g"].fingerprint["gpu.h2d_pinned_mb_s"]
    assert isinstance(lost, Unmeasured)
    # What only full probes read stays.
    with WatchStore.open(path) as store:
        full = {row.node.host for run in store.runs() if run.settings == {"depth": "full"}
                for row in store.rows_of(run.run)}  # fmt: skip
        jobs = store._all("SELECT state, count(*) FROM jobs GROUP BY state")
    assert {host for host, row in by_host.items() if DISK in row.fingerprint} == full - {"h0"}
    found = {(key[0], f.code, f.state) for key, some in last.findings.items() for f in some}
    names = {node.host: node.node for node in last.nodes}
    assert (names["g"], "gpu_lost", "confirmed") in found
    assert (names["slow"], "slower_than_peers", "confirmed") in found
    assert {node.host for node in last.nodes if not node.reachable} == {"h0"}
    assert sum(n for (_, end), n in last.probes.items() if end == "measured") == tally.measured
    assert sum(last.probes.values()) == tally.probes
    assert dict(jobs) == {"done": sum(last.jobs.values())}
    assert last.charged_seconds == pytest.approx(
        sum(fleet.job_seconds for at, _, _ in fleet.jobs if at > last.turned_unix - HOUR)
    )
    assert last.budget_seconds == budget
    assert {node for node, _ in last.measured_unix} >= set(last.entries)
    # The next watch shows the same before it has probed anything.
    jobs_before = len(fleet.jobs)
    watched(fleet, path, hours=0.01, policy=policy, show=views.append)
    first = views[-1]
    assert first.began_unix > last.began_unix
    assert len(fleet.jobs) == jobs_before
    assert first.findings == last.findings
    assert first.rows.keys() == last.rows.keys()
    seen = {key: at for key, at in last.measured_unix.items() if key[0] != names["h0"]}
    assert dict(first.measured_unix) == pytest.approx(seen, abs=60.0)
    # A node that was given back is not shown for ever.
    seen_gone = [v for v in views if any(not n.reachable for n in v.nodes)]
    assert seen_gone[-1].turned_unix - seen_gone[0].turned_unix < GONE_SECONDS


def test_who_comes_and_goes_is_told_once_also_over_watches_that_end(
    clock: Clock, tmp_path: Path
) -> None:
    """As from a timer: each round is a watch of its own."""
    fleet = Fleet(cpus(3), clock)

    def round_() -> list[tuple[str, str]]:
        _, told = watched(fleet, tmp_path / "fleet.db", once=True)
        clock.now += HOUR
        return [(t["event"], t["host"]) for t in told if t["event"] in ("joined", "left")]

    assert sorted(round_()) == [("joined", f"h{i}") for i in range(3)]
    assert round_() == []
    gone = fleet.hosts.pop("h1")
    assert round_() == [("left", "h1")]
    assert round_() == []
    fleet.hosts["h1"] = gone
    assert round_() == [("joined", "h1")]


def test_a_watch_that_starts_with_its_cluster_waits_for_who_was_there(
    clock: Clock, tmp_path: Path
) -> None:
    fleet = Fleet(cpus(3), clock)
    path = tmp_path / "fleet.db"
    watched(fleet, path, hours=0.5)
    late, gone = fleet.hosts.pop("h1"), fleet.hosts.pop("h2")
    _, told = watched(
        fleet, path, hours=0.5, during={60 / HOUR: lambda: fleet.hosts.update(h1=late)}
    )
    about = [(t["event"], t["host"]) for t in told if t["event"] in ("joined", "left")]
    assert about == [("left", "h2")]
    assert gone
