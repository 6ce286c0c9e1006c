"""A fleet under continuous work and seeded faults, held against the rule of README.md."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from curves import Curve  # noqa: E402
from faults import Faults  # noqa: E402
from fleet import MARK, Raylets, SmallDisk, agents, everybody, wait_gone  # noqa: E402
from ledger import CountingStore, Key, Spools  # noqa: E402
from soak_rule import HOUR, control_groups, environment, groups_left, judge  # noqa: E402
from work import KINDS, Kind, Stream  # noqa: E402

from pichak_agent.home import temporary_root  # noqa: E402
from pichak_coordinator.cluster import Cluster  # noqa: E402
from pichak_coordinator.courier import Courier, Work  # noqa: E402
from pichak_coordinator.dispatch import Dispatcher  # noqa: E402
from pichak_coordinator.target import Target, targets_of  # noqa: E402
from pichak_core.devices.processes import send_signal  # noqa: E402

ROUND_JOBS = 15
IN_FLIGHT = 2
SWEEP_SECONDS = 15.0
SAMPLE_SECONDS = 5.0


class JoinedCluster(Cluster):
    """The coordinator's view of a Ray that this process has joined already."""

    def __init__(self) -> None:
        self.address, self.local = "", False

    def close(self) -> None:
        return


class ForgetfulDispatcher(Dispatcher):
    """Acknowledges once, or twice, or not until it sweeps."""

    def __init__(self, cluster: Cluster, seed: int, done: Counter[str]) -> None:
        super().__init__(cluster)
        self._draw = random.Random(f"{seed}/acknowledgements")
        self._done = done
        self.honest = False

    def acknowledge(self, node_id: str, job_id: str, attempt: int) -> None:
        how = 1.0 if self.honest else self._draw.random()
        if how < 0.15:
            self._done["outcome not acknowledged"] += 1
            return
        super().acknowledge(node_id, job_id, attempt)
        if how < 0.30:
            self._done["outcome acknowledged twice"] += 1
            super().acknowledge(node_id, job_id, attempt)


class Soak:
    def __init__(self, folder: Path, disk: SmallDisk, seconds: float, seed: int) -> None:
        self.began = time.monotonic()
        self.seconds, self.seed = seconds, seed
        self.disk = disk
        self.root = self.disk.folder
        os.environ["PICHAK_HOME"] = str(self.root)
        self.taken: Counter[Key] = Counter()
        self.store_path = folder / "store.sqlite"
        self.store = self._open_store()
        self.raylets = Raylets(3)
        self.spools = Spools(self.root, temporary_root())
        self.cluster = JoinedCluster()
        self.faults = Faults(
            seed,
            self.raylets,
            self.disk,
            self.spools,
            pace=min(1.0, seconds / HOUR * 4),
        )
        self.dispatcher = ForgetfulDispatcher(self.cluster, seed, self.faults.done)
        self.stream = Stream(seed)
        self._where = random.Random(f"{seed}/where")
        self.sent: dict[str, tuple[Kind, str, float]] = {}
        self.finished: dict[str, list[tuple[str, str, float]]] = {}
        self.statuses: dict[str, Counter[str]] = {kind.name: Counter() for kind in KINDS}
        self.wrong: list[str] = []
        self.undisturbed: dict[str, int] = {}
        self.problems: set[str] = set()
        self.curves: dict[int, Curve] = {}
        self.coordinator = Curve("coordinator", os.getpid(), self.began)
        self.rounds = self.attempts_lost = 0
        self._next_sample = self._next_sweep = self._next_send = 0.0

    def _open_store(self) -> CountingStore:
        return CountingStore.open(self.store_path).count_in(self.taken)

    @property
    def time_left(self) -> float:
        return self.began + self.seconds - time.monotonic()

    # -- the work ---------------------------------------------------------------------------------

    def run(self) -> None:
        while self.time_left > 0:
            self._round()
        self.faults.end()
        self.dispatcher.honest = True

    def _round(self) -> None:
        """As `fleet watch` does it: who is there, a run of some jobs, and the run's end. The store
        is closed and opened in between, as by a coordinator that was started again."""
        self.rounds += 1
        targets = self._targets()
        if not targets:
            time.sleep(1.0)
            return
        run_id = self.store.begin_run("soak", {"round": self.rounds})
        hellos = [t.hello for t in targets]
        for target, name in zip(targets, self.store.record_nodes(run_id, hellos), strict=True):
            target.identity = name
        courier = Courier(self.dispatcher, self.store, run_id, self._on_finished)
        with courier.open():
            made = 0
            while made < ROUND_JOBS and self.time_left > 0:
                self._everything_else()
                open_jobs = sum(not work.state.final for work in courier.work.values())
                if open_jobs < IN_FLIGHT and time.monotonic() >= self._next_send:
                    self._next_send = time.monotonic() + self._where.uniform(0.3, 2.0)
                    self._send(courier, self._where.choice(targets))
                    made += 1
                courier.step()
            while not courier.idle:
                self._everything_else()
                courier.step()
        self.store.finish_run(run_id)
        self.store.close()
        self.store = self._open_store()

    def _targets(self) -> list[Target]:
        nodes = [node for node in self.cluster.nodes() if node.alive]
        hellos = self.dispatcher.start_agents(nodes)
        for hello in hellos.values():
            if not isinstance(hello, str):
                self.problems.update(hello["problems"])
        named = {node.node_id: node.node_id for node in nodes}
        found = [t for t in targets_of(nodes, hellos, named, "cpu") if not t.ended]
        self._connected = {t.node.node_id for t in found}
        return found

    def _send(self, courier: Courier, target: Target) -> None:
        kind, job = self.stream.next()
        self.sent[job.job_id] = (kind, target.node.node_id, time.monotonic())
        courier.add(target, job)

    def _on_finished(self, work: Work) -> None:
        kind, node, sent = self.sent[work.job.job_id]
        status = work.outcome.status if work.outcome is not None else "none"
        now = time.monotonic()
        self.finished.setdefault(work.job.job_id, []).append((work.state.state, status, now))
        self.statuses[kind.name][status] += 1
        self.undisturbed.setdefault(kind.name, 0)
        disturbed = any(
            start <= now and end >= sent and where in ("", node)
            for start, end, where in self.faults.windows
        )
        if disturbed:
            return
        self.undisturbed[kind.name] += 1
        if status not in kind.ends:
            self.wrong.append(f"{work.job.job_id}: {status} ({work.state.error})")

    def _everything_else(self) -> None:
        self.faults.step()
        now = time.monotonic()
        if now >= self._next_sample:
            self._next_sample = now + SAMPLE_SECONDS
            self._sample()
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_SECONDS
            self.sweep(self._connected)

    def sweep(self, node_ids: set[str]) -> int:
        """Take what nodes still keep, as a coordinator does that finds results of an earlier run;
        sometimes without acknowledging."""
        taken = 0
        for node_id in node_ids & set(self.raylets.nodes):
            self._ask_problems(node_id)
            for data in self.dispatcher.leftovers(node_id):
                self.store.record_outcome(data)
                self.dispatcher.acknowledge_bytes(node_id, data)
                taken += 1
        return taken

    def _ask_problems(self, node_id: str) -> None:
        import ray

        from pichak_agent.ray_actor import actor_name

        try:
            agent = ray.get_actor(actor_name(node_id), namespace="pichak")
            self.problems.update(ray.get(agent.hello.remote(), timeout=5.0)["problems"])
        except (ValueError, ray.exceptions.RayError):
            return

    def _sample(self) -> None:
        self.coordinator.sample()
        for pid, node in agents(self.raylets).items():
            if pid not in self.curves:
                where = "head's agent" if node == self.raylets.head else "agent"
                self.curves[pid] = Curve(where, pid, self.began)
            self.curves[pid].sample()

    # -- the end ----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Every agent again, and everything collected."""
        until = time.monotonic() + 90.0
        while time.monotonic() < until:
            targets = self._targets()
            self.sweep({t.node.node_id for t in targets})
            time.sleep(1.0)
            if not self.spools.files():
                return

    def close(self) -> None:
        from pichak_agent.ray_actor import stop_agent

        for node_id in list(self.raylets.nodes):
            stop_agent(node_id)
        self.spools.close()
        self.raylets.close()

    def files_left(self) -> list[str]:
        """What should not be there any more, in the agents' folder and in the temporary one."""
        every = [*self.root.rglob("*"), *Path(os.environ["TMPDIR"]).rglob("*")]
        return sorted(
            str(path)
            for path in every
            if not path.is_dir()
            and path.name != "lock"
            and path.suffix != ".lock"
            and path.parent.name != "quarantine"
            # What the node's watch remembers between two agents.
            and (path.name, path.parents[1].name) != ("state.json", "telemetry")
        )

    def quarantined(self) -> int:
        return sum(1 for _ in self.root.glob("agent/*/spool/quarantine/*"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=HOUR)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    temporary, rays = folder / "tmp", folder / "ray"
    temporary.mkdir()
    rays.mkdir()
    os.environ.update(
        {
            MARK: f"{os.getpid()}",
            "TMPDIR": str(temporary),
            "RAY_TMPDIR": str(rays),
            "OMP_NUM_THREADS": "1",
        }
    )
    # A raylet may need longer than Ray's 30 s on a machine that others use too.
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
    # Ray takes a raylet that gets no core for half a minute for dead; here that is no fault.
    os.environ.setdefault("RAY_health_check_timeout_ms", "60000")
    tempfile.tempdir = None
    groups_before = control_groups()
    disk = SmallDisk(folder)
    try:
        soak = Soak(folder, disk, given.seconds, given.seed)
        try:
            soak.run()
            soak.settle()
        finally:
            soak.close()
        left = {
            "processes": wait_gone(30.0),
            "files": soak.files_left(),
            "spool_files": [path.name for path in soak.spools.files()],
            "quarantined": soak.quarantined(),
            "control_groups": groups_left(groups_before),
        }
        rule, figures = judge(soak, left)
        soak.store.close()
    finally:
        for pid in everybody():  # nobody, unless something above failed
            send_signal(pid, signal.SIGKILL)
        disk.close()
        shutil.rmtree(folder, ignore_errors=True)
    result = {
        "question": "Does a fleet lose, double or leak anything under continuous work and faults?",
        "rule": rule,
        "met": all(rule.values()),
        "environment": environment(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "figures": figures,
    }
    given.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    for part, met in rule.items():
        print(f"{'met ' if met else 'NOT MET'}  {part}")
    print(f"{figures['jobs']} jobs, {figures['outcomes']} outcomes, {figures['faults']}")
    if not result["met"]:
        for name in ("wrong", "lost", "left", "growth"):
            print(f"{name}: {json.dumps(figures[name], ensure_ascii=False)}")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
