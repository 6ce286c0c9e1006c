"""What is forgotten of a history, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from pichak_agent.messages import Job, Outcome, encode
from pichak_coordinator.cli.fleet import fleet
from pichak_coordinator.database import StoreError
from pichak_coordinator.records import Finding
from pichak_coordinator.store_prune import Pruned, prune
from pichak_coordinator.watch_memory import Memory
from pichak_coordinator.watch_store import WatchStore
from pichak_core.measurement import Fingerprint, Measurement

DAY = 86400.0
ECC = Finding("gpu_ecc", "warn", "it counts errors", {"count": 3}, metric="gpu.state_verdict")


@pytest.fixture
def store(tmp_path: Path):
    with WatchStore.open(tmp_path / "fleet.db") as opened:
        yield opened


def put(
    store: WatchStore, day: float, nodes: str, *, command: str = "fleet profile", ok: bool = True,
    settings: dict | None = None,
) -> str:  # fmt: skip
    """A run on that day over the named machines, with a reading and a finding of each."""
    with store.dated(day * DAY):
        run = store.begin_run(command, settings or {})
        names = store.record_nodes(run, [{"machine_id": m, "host": m} for m in nodes.split()])
        for number, node in enumerate(names):
            job = Job(f"{run}-{number}", 1, "fingerprint", {"device": "cpu"}, 60.0)
            store.record_job(run, job, node=node)
            fingerprint = Fingerprint()
            fingerprint.add(Measurement("disk.read_mb_s", 100.0 + day, "MB/s", "reads"))
            status, error = ("ok", "") if ok else ("error", "it broke")
            result = {"fingerprint": fingerprint.to_dict(), "findings": [ECC.as_dict()]}
            store.record_outcome(
                encode(Outcome(job.job_id, 1, "fingerprint", status, result, error, node=node))
            )
        store.finish_run(run)
    return run


def held(store: WatchStore) -> list[str]:
    return [run.run for run in reversed(store.runs())]


def test_the_last_good_run_of_each_node_stays_whatever_its_age(store: WatchStore) -> None:
    first = put(store, 1, "a b")
    second = put(store, 2, "a")
    failed = put(store, 3, "a", ok=False)
    recent = put(store, 99, "c")
    assert prune(store, 30.0, 100 * DAY) == Pruned(1, 0)
    # b was measured in the first run only, a last in the second; the failed one measured nobody.
    assert held(store) == [first, second, recent]
    assert failed not in held(store)
    (node,) = store.nodes_of(second)
    assert [p.value for p in store.history(node, "disk.read_mb_s")] == [101.0, 102.0]
    assert store.rows_of(second)[0].findings == (ECC,)
    put(store, 98, "a b")
    assert prune(store, 30.0, 100 * DAY).runs == 2
    for table in ("jobs", "outcomes", "outcome_numbers", "findings", "run_nodes"):
        (count,) = next(iter(store.each(f"SELECT count(*) FROM {table}")))
        assert count == 3, table
    assert list(store.each("PRAGMA foreign_key_check")) == []


def test_who_is_there_is_not_forgotten_so_that_nobody_joins_twice(store: WatchStore) -> None:
    for day, told, node in (
        (1, "joined", "a"), (1, "joined", "b"), (1, "joined", "c"),
        (2, "left", "b"), (3, "left", "c"), (4, "joined", "c"),
    ):  # fmt: skip
        with store.dated(day * DAY):
            store.tell([({"event": told, "node": node}, False)])
    before = store.members()
    assert set(before) == {"a", "c"}
    assert prune(store, 0.0, 100 * DAY).events == 4
    assert store.members() == before
    assert prune(store, 0.0, 100 * DAY).events == 0
    with store.dated(101 * DAY):
        store.tell([({"event": "left", "node": "a"}, False)])
    assert prune(store, 0.0, 102 * DAY).events == 2
    assert set(store.members()) == {"c"}


def test_each_kind_of_run_and_each_depth_of_a_watch_keeps_its_last(store: WatchStore) -> None:
    profile = put(store, 1, "a")
    net = put(store, 2, "a", command="net")
    full = put(store, 3, "a", command="fleet watch", settings={"depth": "full"})
    old = put(store, 4, "a", command="fleet watch", settings={"depth": "light"})
    light = put(store, 5, "a", command="fleet watch", settings={"depth": "light"})
    assert prune(store, 30.0, 100 * DAY).runs == 1
    assert held(store) == [profile, net, full, light]
    assert old not in held(store)


def test_a_watch_forgets_its_own_only(store: WatchStore) -> None:
    mine = [put(store, day, "a", command="fleet watch") for day in (1, 2)]
    others = [put(store, day, "a") for day in (1, 2)]
    assert prune(store, 30.0, 100 * DAY, command="fleet watch").runs == 1
    assert sorted(held(store)) == sorted([mine[1], *others])


def test_events_go_unless_they_are_open_or_the_webhook_waits_for_them(store: WatchStore) -> None:
    def event(text: str, code: str) -> dict:
        finding = {**ECC.as_dict(), "code": code}
        return {"event": "confirmed", "node": "n-1", "text": text, "finding": finding}

    with store.dated(1 * DAY):
        store.tell([(event("open", "gpu_ecc"), False), (event("cleared", "gpu_lost"), False)])
        store.tell([(event("pending", "gpu_lost"), True)])
    with store.dated(99 * DAY):
        store.tell([(event("new", "gpu_lost"), False)])
    from pichak_coordinator.schedule import Charge, Entry

    memory = Memory(findings=(ECC,))
    store.end_probe("p", Charge(0.0, 1.0), Entry("n-1", {}), {("n-1", "GPU-7"): memory}, [])
    assert prune(store, 30.0, 100 * DAY).events == 1
    assert [e["text"] for e in store.events()] == ["open", "pending", "new"]


def test_outcomes_that_nobody_asked_for_are_forgotten_too(store: WatchStore) -> None:
    for day, name in ((1, "old"), (99, "new")):
        with store.dated(day * DAY):
            store.record_outcome(encode(Outcome(name, 1, "ramp", "ok", {}, node="n")))
    prune(store, 30.0, 100 * DAY)
    assert store.outcome_bytes("old", 1) is None
    assert store.outcome_bytes("new", 1) is not None
    assert store.job("old") is None


def test_killed_in_between_it_goes_on_the_next_time(
    store: WatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [put(store, day, "a") for day in range(1, 6)]
    calls, insert = [0], store.insert

    def dying(sql: str, values: tuple) -> int:
        calls[0] += 1
        if calls[0] == 14:  # in the midst of the second run
            raise StoreError("the power went")
        return insert(sql, values)

    monkeypatch.setattr(store, "insert", dying)
    with pytest.raises(StoreError):
        prune(store, 30.0, 100 * DAY)
    assert held(store) == runs[1:]
    monkeypatch.undo()
    assert prune(store, 30.0, 100 * DAY).runs == 3
    assert held(store) == runs[4:]


def test_the_command_gives_the_room_back(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    with WatchStore.open(path) as store:
        for day in range(1, 40):
            put(store, day, " ".join(f"m{i}" for i in range(20)))
    size = path.stat().st_size
    result = CliRunner().invoke(fleet, ["prune", "--store", str(path)])
    assert result.exit_code == 0, result.output
    assert "forgotten: 38 runs and 0 events; 1 run left" in result.output
    assert path.stat().st_size < size / 2
    again = CliRunner().invoke(fleet, ["prune", "--store", str(path), "--json"])
    assert '"runs": 0' in again.output
