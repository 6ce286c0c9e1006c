"""A network test from end to end without Ray: the agents' jobs run on threads of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pichak_agent.child_jobs import JOBS
from pichak_agent.messages import Job, Outcome, encode
from pichak_coordinator import fleet_network, net_jobs, net_run
from pichak_coordinator.cluster import ClusterNode
from pichak_coordinator.dispatch import Ended
from pichak_coordinator.fleet_network import NetRequest, run_network
from pichak_coordinator.net_collective import all_reduce, slowest_link, who_broke
from pichak_coordinator.net_desk import Desk, Finished
from pichak_coordinator.net_jobs import NetNode, named, port_in, without_secrets
from pichak_coordinator.net_run import NetRun
from pichak_coordinator.store import Store
from pichak_coordinator.target import Target
from pichak_core.measure import _net_link
from pichak_core.measurement import Measurement, Unmeasured

Spoil = Callable[[str, Job, dict[str, Any]], "dict[str, Any] | str"]


class Threads:
    """Stands for a `Dispatcher`: jobs run at once, listeners until they are cancelled.

    `spoil(node, job, result)` may change a result, or make it a sentence: the node was lost.
    """

    def __init__(self, spoil: Spoil = lambda _n, _j, result: result) -> None:
        self._spoil = spoil
        self._ended: list[Ended] = []
        self._flying: dict[str, tuple[str, Job]] = {}
        self._said: dict[str, str] = {}
        self._lock = threading.Lock()
        self.sent: list[tuple[str, Job]] = []
        self.acknowledged: list[str] = []

    @property
    def in_flight(self) -> int:
        with self._lock:
            return len(self._flying)

    def submit(self, node_id: str, job: Job) -> None:
        with self._lock:
            self._flying[job.job_id] = (node_id, job)
            self.sent.append((node_id, job))
        threading.Thread(target=self._run, args=(node_id, job), daemon=True).start()

    def _run(self, node_id: str, job: Job) -> None:
        def progress(text: str) -> None:
            self._said[job.job_id] = text

        result = JOBS[job.kind](job.params, progress=progress, partial=lambda _: None)
        made = self._spoil(node_id, job, result)
        with self._lock:
            if self._flying.pop(job.job_id, None) is None:
                return
            if isinstance(made, str):
                self._ended.append(Ended(node_id, job, error=made, retryable=False))
                return
            outcome = Outcome(job.job_id, 1, job.kind, "ok", made)
            self._ended.append(Ended(node_id, job, encode(outcome), outcome))

    def poll(self, timeout_seconds: float) -> list[Ended]:
        end = time.monotonic() + timeout_seconds
        while time.monotonic() < end:
            with self._lock:
                if self._ended:
                    ended, self._ended = self._ended, []
                    return ended
            time.sleep(0.01)
        return []

    def progress(self) -> dict[str, str]:
        return dict(self._said)

    def acknowledge(self, _node: str, job_id: str, _attempt: int) -> None:
        self.acknowledged.append(job_id)

    def cancel(self, job_id: str) -> None:
        with self._lock:
            self._flying.pop(job_id, None)

    def cancel_all(self, _wait: float = 8.0) -> list[Ended]:
        with self._lock:
            flying, self._flying = self._flying, {}
        ended = []
        for node_id, job in flying.values():
            listener = {"listener": {"refused": 2 if node_id == "n1" else 0}}
            outcome = Outcome(job.job_id, 1, job.kind, "cancelled", listener, error="cancelled")
            ended.append(Ended(node_id, job, encode(outcome), outcome))
        return ended


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links of a fifth of a second, on a loopback that is as good as any other."""
    plan = _net_link.LinkPlan(1, 0.0, 0.5, 0.1, 0.05, 10)
    monkeypatch.setitem(_net_link.PLANS, "quick", plan)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "fleet.db") as made:
        yield made


def cluster_nodes(count: int) -> list[tuple[ClusterNode, str]]:
    return [
        (ClusterNode(f"n{i}", f"host{i}", "127.0.0.1", True, 1.0, 0, i == 0), f"m-{i}")
        for i in range(count)
    ]


def desk(threads: Threads, store: Store, run_id: str) -> Desk:
    return Desk(threads, store, run_id)  # type: ignore[arg-type]


def begun(store: Store, count: int) -> str:
    run_id = store.begin_run("net")
    for node, identity in cluster_nodes(count):
        store.record_node(run_id, {"host": node.host, "address": node.address}, node=identity)
    return run_id


def test_three_nodes_give_three_links_and_every_outcome_is_stored(store: Store) -> None:
    threads, run_id = Threads(), begun(store, 3)
    nodes = cluster_nodes(3)
    request = NetRequest(collective=False)
    report = run_network(request, None, threads, store, run_id, nodes, lambda _: None)  # type: ignore[arg-type]
    assert not report.interrupted
    assert len(report.matrix.reach) == 6
    assert all(reach.open for reach in report.matrix.reach.values())
    links = report.matrix.as_dicts()
    assert len(links) == 3
    for link in links:
        for name in ("rtt_ms", "a_to_b_mb_s", "b_to_a_mb_s"):
            assert link[name].get("value"), link
    states = {job.kind: job.state for job in store.jobs(run_id)}
    assert states == {"net_listen": "done", "net_reach": "done", "net_link": "done"}
    assert "host1: 2 connections that did not prove" in " ".join(report.gaps)
    # The store keeps each link under the node that opened it, by its peer's name.
    rows = {row.node.node: row for row in store.rows_of(run_id)}
    metrics = {name for row in rows.values() for name in row.fingerprint}
    assert len([m for m in metrics if m.endswith(".send_mb_s")]) >= 2
    assert not any(row.error for row in rows.values())


def test_no_secret_reaches_the_store(store: Store) -> None:
    threads, run_id = Threads(), begun(store, 2)
    NetRun(desk(threads, store, run_id), named(cluster_nodes(2))).run()
    secrets = set()
    for _, job in threads.sent:
        peers = job.params.get("peers", [])
        for params in (job.params, *peers):
            secrets |= {params[name] for name in ("key", "token", "session") if name in params}
    assert len(secrets) >= 6
    kept = store.path.read_bytes()
    for file in store.path.parent.glob("fleet.db-*"):
        kept += file.read_bytes()
    assert b"net_link" in kept
    assert not [secret for secret in secrets if secret.encode() in kept]


def test_no_node_is_in_two_tests_at_once_and_tokens_are_never_used_twice(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the second look, which goes where a busy machine happens to be slow.
    monkeypatch.setattr(net_run, "judge_links", lambda _: [])
    busy: set[str] = set()
    overlaps: list[str] = []
    lock = threading.Lock()
    threads, run_id = Threads(), begun(store, 5)
    submit = threads.submit

    def watched(node_id: str, job: Job) -> None:
        if job.kind == "net_link":
            with lock:
                both = {node_id, job.params["peer"].replace("host", "n")}
                overlaps.extend(busy & both)
                busy.update(both)
        submit(node_id, job)

    def over(node_id: str, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        if job.kind == "net_link":
            with lock:
                busy.difference_update({node_id, job.params["peer"].replace("host", "n")})
        return result

    threads.submit = watched  # type: ignore[method-assign]
    threads._spoil = over
    run = NetRun(desk(threads, store, run_id), named(cluster_nodes(5)))
    run.run()
    assert overlaps == []
    sessions = [job.params["session"] for _, job in threads.sent if job.kind == "net_link"]
    assert len(sessions) == 10
    assert len(set(sessions)) == len(sessions)


def test_a_node_that_is_lost_costs_its_own_links(store: Store) -> None:
    def spoil(node_id: str, job: Job, result: dict[str, Any]) -> dict[str, Any] | str:
        return "the node died" if node_id == "n2" and job.kind == "net_reach" else result

    threads, run_id = Threads(spoil), begun(store, 4)
    run = NetRun(desk(threads, store, run_id), named(cluster_nodes(4)))
    run.run()
    for (a, b), reading in run.matrix.rtt.items():
        assert isinstance(reading, Unmeasured) == ("host2" in (a, b)), (a, b)
    assert any("host2: the node died" in gap for gap in run.gaps)


def test_a_listener_that_ends_loses_its_node_and_nothing_hangs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(net_run, "LISTEN_SECONDS", 20.0)
    monkeypatch.setattr(net_jobs, "LISTENER_IDLE_SECONDS", 60.0)
    threads, run_id = Threads(), begun(store, 3)
    submit = threads.submit

    def refuse(node_id: str, job: Job) -> None:
        if job.kind == "net_listen" and node_id == "n1":
            with threads._lock:
                threads._ended.append(Ended(node_id, job, error="no agent"))
            return
        submit(node_id, job)

    threads.submit = refuse  # type: ignore[method-assign]
    run = NetRun(desk(threads, store, run_id), named(cluster_nodes(3)))
    run.run()
    assert [node.error for node in run.nodes] == ["", "no agent", ""]
    assert isinstance(run.matrix.rtt["host0", "host2"], Measurement)


def test_a_link_opens_from_the_side_that_can(store: Store) -> None:
    def spoil(node_id: str, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        if job.kind == "net_reach":
            for peer, answer in result["reach"].items():
                if peer == "host2":  # nobody gets in there
                    result["reach"][peer] = {**answer, "open": False, "why": "no answer"}
        return result

    threads, run_id = Threads(spoil), begun(store, 3)
    run = NetRun(desk(threads, store, run_id), named(cluster_nodes(3)))
    run.run()
    assert all(isinstance(reading, Measurement) for reading in run.matrix.rtt.values())
    clients = [(n, j.params["peer"]) for n, j in threads.sent if j.kind == "net_link"]
    assert all(peer != "host2" for _, peer in clients)
    # What the rates say depends on what else runs here.
    reach = [f for f in run.findings if "unreachable" in f.finding.code]
    assert [(f.finding.code, f.nodes, f.finding.state) for f in reach] == [
        ("node_unreachable", ("host2",), "confirmed")
    ]


@pytest.mark.parametrize(
    "answer",
    [
        {"reach": {"host1": {"open": "yes"}}},
        {"reach": [1]},
        {"reach": {"stranger": {"open": True}}},
    ],
)
def test_a_node_that_talks_nonsense_is_a_gap(store: Store, answer: dict[str, Any]) -> None:
    def spoil(node_id: str, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        return answer if job.kind == "net_reach" and node_id == "n0" else result

    threads, run_id = Threads(spoil), begun(store, 2)
    run = NetRun(desk(threads, store, run_id), named(cluster_nodes(2)))
    run.run()
    assert ("host0", "host1") not in run.matrix.reach
    assert run.matrix.reach["host1", "host0"].open


# -- all-reduce -----------------------------------------------------------------------------------


def finished(status: str = "ok", *, lost: bool = False, silent: bool = False) -> Finished:
    job = Job("j", 1, "collective", {}, 1.0)
    if lost or silent:
        return Finished(job, None, "x", lost=lost)
    return Finished(job, Outcome("j", 1, "collective", status, error="e"), "e")


def test_the_node_that_broke_an_all_reduce_is_named() -> None:
    hurt = ("b", finished(), "failed: Connection closed by peer")
    assert who_broke([hurt, ("c", finished(lost=True), "the node died")]).startswith("c broke it")
    assert who_broke([hurt, ("c", finished("killed"), "SIGKILL")]).startswith("c broke it")
    assert who_broke([hurt, ("c", finished(silent=True), "no end")]).startswith("c broke it")
    assert who_broke([hurt]).startswith("b broke it: failed: Connection closed")


def test_one_node_has_nothing_to_reduce(store: Store) -> None:
    made = all_reduce(
        desk(Threads(), store, begun(store, 1)), named(cluster_nodes(1)), gradient_bytes=4096
    )
    assert isinstance(made.reading, Unmeasured)
    assert "two nodes" in made.reading.describe()


def test_a_rank_that_is_lost_gives_a_named_gap_and_ends(store: Store) -> None:
    """Rank 0 waits for a rank that never comes: it is told who, and not waited for."""
    jobs: list[Job] = []

    class Broken(Threads):
        def submit(self, node_id: str, job: Job) -> None:
            jobs.append(job)
            with self._lock:
                if node_id == "n0":
                    self._said[job.job_id] = "store on port 4321"
                    self._flying[job.job_id] = (node_id, job)
                else:
                    self._ended.append(Ended(node_id, job, error="the node died"))

    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    run_id = begun(store, 2)
    made = all_reduce(
        Desk(Broken(), store, run_id, clock=clock),  # type: ignore[arg-type]
        named(cluster_nodes(2)),
        gradient_bytes=4096,
    )
    assert isinstance(made.reading, Unmeasured)
    assert "host1 broke it: the node died" in made.reading.describe()
    assert [job.params["port"] for job in jobs] == [0, 4321]
    assert {job.state for job in store.jobs(run_id)} == {"failed"}


def test_the_slowest_link_is_one_between_the_chosen(store: Store) -> None:
    del store
    from pichak_coordinator.links import LinkMatrix

    def rate(value: float) -> Measurement:
        return Measurement("x", value, "MB/s", "made")

    rates = {("a", "b"): rate(9.0), ("b", "a"): rate(8.0), ("a", "c"): rate(1.0)}
    matrix = LinkMatrix(("a", "b", "c"), rate=rates)
    assert slowest_link(matrix, ["a", "b"]) == ("b", "a", 8.0)
    assert slowest_link(matrix, ["b"]) is None


# -- names and jobs -------------------------------------------------------------------------------


def test_nodes_get_names_that_differ() -> None:
    def node(host: str, address: str) -> tuple[ClusterNode, str]:
        return ClusterNode("n", host, address, True, 1.0, 0, False), "m"

    assert [n.name for n in named([node("a", "1"), node("b", "1")])] == ["a", "b"]
    assert [n.name for n in named([node("a", "1"), node("a", "2")])] == ["1", "2"]
    assert len({n.name for n in named([node("a", "1"), node("a", "1")])}) == 2
    made: NetNode = named([node("my.host:é", "1"), node("b", "1")])[0]
    assert made.metric_name == "my-host--"


@pytest.mark.parametrize(
    ("text", "port"),
    [
        ("listening on port 4321", 4321),
        ("store on port 65535", 65535),
        ("store on port 65536", 0),
        ("listening on port", 0),
        ("", 0),
        ("round trips", 0),
    ],
)
def test_the_port_in_a_progress_line(text: str, port: int) -> None:
    assert port_in(text) == port


def test_what_is_kept_of_a_job_has_no_secret() -> None:
    (node, other) = named(cluster_nodes(2))
    other.port = 9
    for job in (
        net_jobs.listen_job("j", node, 5.0),
        net_jobs.reach_job("j", [other]),
        net_jobs.link_job("j", node, other, "quick"),
    ):
        kept = str(without_secrets(job).params)
        assert node.key.hex() not in kept
        assert "token" not in kept
    assert "key=" not in repr(node)


# -- at the end of a profile ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "only", "addresses", "pairs"),
    [
        (None, (), ["1", "2"], "all"),
        (None, (), ["1"], None),
        (None, (), ["1", "1"], None),  # raylets of one machine: its loopback is no network
        (True, (), ["1", "1"], "all"),
        (True, (), ["1"], None),
        (False, (), ["1", "2"], None),
        (None, ("cpu",), ["1", "2"], None),
        (None, ("cpu", "network"), ["1", "2"], "all"),
        (None, (), list("1234567"), "ring"),
    ],
)
def test_a_profile_tests_the_network_where_there_is_one(
    wanted: bool | None,
    only: tuple[str, ...],
    addresses: list[str],
    pairs: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def noted(request: NetRequest, *rest: Any) -> str:
        asked.append((request.pairs, len(rest[4])))
        return "a report"

    monkeypatch.setattr(fleet_network, "run_network", noted)
    targets = [
        Target(i, ClusterNode(f"n{i}", "h", address, True, 1.0, 0, False), f"m{i}", {"a": 1}, "cpu")
        for i, address in enumerate(addresses)
    ]
    # One GPU more of a node is no further node, and a node without an agent is none.
    targets += [replace_number(targets[0]), Target(9, targets[0].node, "m", {}, "cpu")]
    nothing: Any = None
    made = fleet_network.network_of_profile(
        wanted, only, nothing, nothing, nothing, "run", targets, lambda _: None
    )
    assert (made is None) == (pairs is None)
    assert asked == ([(pairs, len(addresses))] if pairs else [])


def replace_number(target: Target) -> Target:
    return Target(8, target.node, target.identity, target.hello, "cuda:1")


def test_a_network_test_comes_not_between_two_profiles(store: Store) -> None:
    first, net = store.begin_run("fleet profile"), store.begin_run("net")
    second, again = store.begin_run("fleet profile"), store.begin_run("net")
    before = {run: store.previous_run(run) for run in (first, net, second, again)}
    assert {run: found.run if found else None for run, found in before.items()} == {
        first: None,
        net: None,
        second: first,
        again: net,
    }


def test_nodes_of_one_machine_are_told_that_no_wire_lies_between_them(store: Store) -> None:
    nodes = cluster_nodes(2)
    request = NetRequest(collective=False)
    nothing: Any = None
    threads: Any = Threads()
    report = run_network(request, nothing, threads, store, begun(store, 2), nodes, lambda _: None)
    assert "host0, host1 share the address 127.0.0.1" in report.gaps[0]


def test_what_an_interruption_left_out_is_a_gap_and_not_a_choice(store: Store) -> None:
    """Ctrl-C in the first round: its links and the later ones say so, the reach stays known."""
    threads, run_id = Threads(), begun(store, 3)
    submit = threads.submit

    def interrupted(node_id: str, job: Job) -> None:
        if job.kind == "net_link":
            raise KeyboardInterrupt
        submit(node_id, job)

    threads.submit = interrupted  # type: ignore[method-assign]
    dispatcher: Any = threads
    nothing: Any = None
    report = run_network(
        NetRequest(), nothing, dispatcher, store, run_id, cluster_nodes(3), lambda _: None
    )
    assert report.interrupted
    assert report.measured
    assert len(report.matrix.reach) == 6
    assert report.matrix.skipped() == []
    for link in report.as_dict()["links"]:
        assert "before it was its turn" in link["rtt_ms"]["detail"]
