"""History from one store to another: every row, once, with its identity; nothing unsound."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pichak_agent.messages import Job, Outcome, encode
from pichak_coordinator.cli import app
from pichak_coordinator.cut_runs import count_ended, run_to_go_on
from pichak_coordinator.database import migrations
from pichak_coordinator.framed_file import (
    FramedFileError,
    FrameWriter,
    read_frames,
    unfinished_path,
)
from pichak_coordinator.history_file import export_history, import_history, is_history
from pichak_coordinator.history_rows import TABLES
from pichak_coordinator.judging import judge_run
from pichak_coordinator.records import Finding, NodeRecord
from pichak_coordinator.remains import done_before
from pichak_coordinator.run_end import end_of
from pichak_coordinator.schedule_terms import Entry
from pichak_coordinator.store import Store
from pichak_coordinator.watch_events import event
from pichak_coordinator.watch_memory import Before, Memory
from pichak_coordinator.watch_store import WatchStore
from pichak_core.measurement import Fingerprint, Measurement, Reason, Unmeasured
from pichak_core.plan import Plan, Value


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        self.now += 0.25
        return self.now


def outcome(job_id: str, attempt: int = 1, status: str = "ok", rate: float = 2000.0) -> bytes:
    fingerprint = Fingerprint()
    fingerprint.add(Measurement("disk.read_mb_s", rate, "MB/s", "median of 9", samples=9))
    fingerprint.add(Measurement("cpu.model", "Some CPU\x1b[31m", "", "/proc/cpuinfo"))
    fingerprint.add(Unmeasured("gpu.ecc", Reason.NO_DEVICE, "no GPU here"))
    result = {
        "fingerprint": fingerprint.to_dict(),
        "findings": [Finding("xid", "warn", "a fault was read").as_dict()],
    }
    error = "" if status == "ok" else "RuntimeError: no"
    return encode(Outcome(job_id, attempt, "fingerprint", status, result, error=error, node="h"))


def fill(store: Store, runs: int = 3, prefix: str = "") -> list[str]:
    made = []
    for number in range(runs):
        run = store.begin_run("fleet profile", {"model": "builtin:gpt-1m", "n": number})
        hellos = [
            {"machine_id": f"m{n}", "host": f"host-{n}", "address": f"10.0.{number}.{n}"}
            for n in range(3)
        ]
        nodes = store.record_nodes(run, hellos)
        store.record_node(run, {"host": "dead", "address": "10.9.9.9"}, error="no answer")
        for n, node in enumerate(nodes):
            job = Job(f"{prefix}{run}-fp-{n}", 1, "fingerprint", {"device": "cpu"}, 60.0)
            store.record_job(run, job, node=node)
            if n == 1:
                store.record_outcome(outcome(job.job_id, 1, "error"))
                store.record_job(run, Job(job.job_id, 2, job.kind, job.params, 60.0), node=node)
            if n == 2:
                store.set_job_state(job.job_id, "failed", error="lost")
            else:
                store.record_outcome(outcome(job.job_id, 1 + n, rate=2000.0 + number))
        plan = Plan("builtin:gpt-1m", "train.jsonl", "cpu")
        plan.set("micro_batch", Value(4, "real steps"))
        store.record_plan(run, nodes[0], "cpu", plan)
        judge_run(store, run)
        store.finish_run(run)
        made.append(run)
    return made


def rows(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table, but for the local number of a run."""
    with sqlite3.connect(path) as db:
        tables = [
            name
            for (name,) in db.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'"
            )
        ]
        found = {}
        for table in tables:
            columns = [c[1] for c in db.execute(f"PRAGMA table_info({table})") if c[1] != "seq"]
            found[table] = sorted(
                db.execute(f"SELECT {', '.join(columns)} FROM {table}").fetchall(), key=repr
            )
        return found


@pytest.fixture
def source(tmp_path: Path):
    with Store.open(tmp_path / "one.db", clock=Clock(1.7e9)) as store:
        yield store


@pytest.fixture
def target(tmp_path: Path):
    with Store.open(tmp_path / "two.db", clock=Clock(1.9e9)) as store:
        yield store


def test_every_row_arrives_once(source: Store, target: Store, tmp_path: Path) -> None:
    fill(source)
    source.record_outcome(outcome("stray-job"))
    path = tmp_path / "h.mpk"
    counts = export_history(source, path, None)
    assert is_history(path)
    added = import_history(target, path)
    assert added.new == added.held == counts
    there = rows(target.path)
    assert there == rows(source.path)
    assert {name: len(there[name]) for name in TABLES} == counts
    numbers = "SELECT job_id, attempt, numbers_json FROM outcome_numbers ORDER BY job_id, attempt"
    assert list(target.each(numbers)) == list(source.each(numbers)) != []
    assert len(there["outcome_numbers"]) == counts["outcomes"]
    assert [r.run for r in target.runs()] == [r.run for r in source.runs()]
    assert [n.node for n in target.nodes()] == [n.node for n in source.nodes()]
    again = import_history(target, path)
    assert not again.changed
    assert "nothing changed" in again.sentence
    assert rows(target.path) == there


#: 4 runs of a simulated fleet of 2 hosts, as `pichak export --all` wrote when stores had schema 3.
OF_STORE_3 = Path(__file__).parents[1] / "data" / "history-of-store-3.mpk"


def test_what_an_older_version_exported_is_read(target: Store, tmp_path: Path) -> None:
    """It is the archive of what was pruned."""
    added = import_history(target, OF_STORE_3)
    assert (added.new["runs"], added.new["outcomes"], added.new["nodes"]) == (4, 11, 2)
    # That version's own store had readings of 5 of the results: of a link's tests there are none.
    assert len(rows(target.path)["outcome_numbers"]) == 5
    assert not import_history(target, OF_STORE_3).changed
    # Written again by this version it holds the same rows.
    export_history(target, tmp_path / "again.mpk", None)
    (first, *then), (now, *again) = (
        list(read_frames(path)) for path in (OF_STORE_3, tmp_path / "again.mpk")
    )
    assert isinstance(first, dict)
    assert isinstance(now, dict)
    assert (first["store"], now["store"]) == (3, len(migrations()))
    assert again == then != []


def test_no_migration_changed_a_column_that_exports_hold() -> None:
    """One that does must say in `history_file` what the rows of before become."""
    seen: dict[str, set[tuple[str, ...]]] = {}
    with sqlite3.connect(":memory:") as db:
        for script in migrations():
            db.executescript(script)
            for table in TABLES:
                columns = tuple(c[1] for c in db.execute(f"PRAGMA table_info({table})"))
                seen.setdefault(table, set()).update([columns] if columns else [])
    assert {table: len(forms) for table, forms in seen.items()} == dict.fromkeys(TABLES, 1)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"store": 99}, "written by a newer pichak-fleet (store 99; this one knows"),
        ({"store": 0}, "written by another version (schema 1, store 0; here 1 and"),
        ({"store": True}, "written by another version (schema 1, store True;"),
        ({"store": None}, "written by another version (schema 1, store None;"),
        ({"schema": 2}, "written by another version (schema 2, store"),
    ],
)
def test_what_no_version_of_before_wrote_is_refused(
    source: Store, target: Store, tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    first, *parts = frames(source, tmp_path)
    path = spoiled([{**first, **values}, *parts], "none", tmp_path / "other.mpk")
    with pytest.raises(FramedFileError) as told:
        import_history(target, path)
    assert said in str(told.value)
    assert "nothing of it was imported" in str(told.value)
    assert not target.runs()


def test_chosen_runs_bring_their_nodes_and_overlaps_do_no_harm(
    source: Store, target: Store, tmp_path: Path
) -> None:
    runs = fill(source)
    own = fill(target, 1)
    first, second = tmp_path / "1.mpk", tmp_path / "2.mpk"
    export_history(source, first, [runs[2], runs[1]])
    export_history(source, second, [runs[0], runs[1]])
    assert import_history(target, first).new["runs"] == 2
    added = import_history(target, second)
    assert (added.held["runs"], added.new["runs"]) == (2, 1)
    assert {r.run for r in target.runs()} == {*runs, *own}
    # A node of both stores is one node, with the history of both in the order of their dates.
    node = source.nodes_of(runs[0])[0]
    assert node in target.nodes_of(own[0])
    times = [p.received_unix for p in target.history(node, "disk.read_mb_s")]
    assert len(times) == 4
    assert times == sorted(times)
    for run in runs:
        assert [r.as_dict() for r in target.rows_of(run)] == [
            r.as_dict() for r in source.rows_of(run)
        ]


def test_a_run_that_went_on_is_completed(source: Store, target: Store, tmp_path: Path) -> None:
    run = source.begin_run("fleet profile")
    (node,) = source.record_nodes(run, [{"machine_id": "m", "host": "h"}])
    source.record_job(run, Job("j1", 1, "fingerprint", {"device": "cpu"}, 60.0), node=node)
    export_history(source, tmp_path / "1.mpk", None)
    import_history(target, tmp_path / "1.mpk")
    assert target.jobs(run)[0].state == "queued"
    source.record_outcome(outcome("j1"))
    source.finish_run(run)
    export_history(source, tmp_path / "2.mpk", None)
    added = import_history(target, tmp_path / "2.mpk")
    assert added.new["jobs"] == added.new["outcomes"] == 1
    assert rows(target.path) == rows(source.path)
    # The earlier file does not take it back.
    assert not import_history(target, tmp_path / "1.mpk").changed


def watched(store: Store, told: str = "e1") -> tuple[str, str]:
    """What a watch keeps: an event of a node, and what it remembers of its device."""
    run = store.begin_run("fleet watch")
    (node,) = store.record_nodes(run, [{"machine_id": "mw", "host": "w"}])
    store.finish_run(run)
    finding = Finding("slow_disk", "warn", "it is slow", state="confirmed", metric="disk.read_mb_s")
    before = {"disk.read_mb_s": Before("MB/s", (900.0, 901.0), (1.0,), 1)}
    before["cpu.model"] = Before("", ("Xeon",))
    place = NodeRecord(node, "w", device="")
    joined = event("joined", place, "is in the cluster", id=told)
    found = event("confirmed", place, "slow", finding=finding.as_dict(), id=f"{told}f")
    with WatchStore.open(store.path) as watch, watch.held():
        watch.tell([(joined, True), (found, False)])
        watch.remember([Entry(node, {"light": 1.8e9})], {(node, "cpu"): Memory(before, (finding,))})
    return node, told


def test_of_a_watch_its_events_and_its_memory_travel_and_not_its_schedule(
    source: Store, target: Store, tmp_path: Path
) -> None:
    node, _ = watched(source)
    path = tmp_path / "h.mpk"
    counts = export_history(source, path, None)
    assert (counts["watch_events"], counts["watch_devices"]) == (2, 1)
    said = import_history(target, path).sentence
    assert "of a watch 2 events and what it remembers of 1 device, not its schedule" in said
    with WatchStore.open(source.path) as one, WatchStore.open(target.path) as two:
        assert two.memory(node, "cpu") == one.memory(node, "cpu")
        assert [(e["id"], e["text"]) for e in two.events()] == [
            (e["id"], e["text"]) for e in one.events()
        ]
        # Its webhook is the other machine's affair, and so is who is in whose cluster.
        assert {e["delivery"] for e in two.events()} == {"elsewhere"}
        assert (one.pending_deliveries(), two.pending_deliveries()) == (1, 0)
        assert (set(one.members()), set(two.members())) == ({node}, set())
        assert (set(one.entries()), set(two.entries())) == ({node}, set())
        there = rows(target.path)
        assert not import_history(target, path).changed
        assert rows(target.path) == there
        # And back where it came from, where the webhook still waits.
        export_history(target, tmp_path / "back.mpk", None)
        assert not import_history(source, tmp_path / "back.mpk").changed
        assert one.pending_deliveries() == 1
    # Of chosen runs nothing of a watch goes.
    some = export_history(source, tmp_path / "runs.mpk", [source.runs()[0].run])
    assert (some["runs"], some["watch_events"]) == (1, 0)


def test_what_the_own_watch_remembers_stays(source: Store, target: Store, tmp_path: Path) -> None:
    node, _ = watched(source)
    watched(target, "e2")
    mine = Memory({"disk.read_mb_s": Before("MB/s", (100.0,))})
    with WatchStore.open(target.path) as watch:
        watch.remember([], {(node, "cpu"): mine})
        export_history(source, tmp_path / "h.mpk", None)
        import_history(target, tmp_path / "h.mpk")
        assert watch.memory(node, "cpu") == mine
        assert [e["id"] for e in watch.events()] == ["e1", "e1f", "e2", "e2f"]


NO_BEFORE = [
    {"unit": 1, "values": [1.0], "spreads": [], "pending": None},
    {"unit": "", "values": [], "spreads": [], "pending": None},
    {"unit": "", "values": [[1]], "spreads": [], "pending": None},
    {"unit": "", "values": [1.0, "x"], "spreads": [], "pending": None},
    {"unit": "", "values": [1.0] * 9, "spreads": [], "pending": None},
    {"unit": "", "values": [1.0], "spreads": ["x"], "pending": None},
    {"unit": "", "values": [1.0], "spreads": [], "pending": {}},
]


@pytest.mark.parametrize(
    ("table", "values"),
    [
        ("watch_events", {"delivery": "soon"}),
        ("watch_events", {"event": "another"}),
        ("watch_events", {"body": "[]"}),
        ("watch_events", {"body": '{"id": "e1"}'}),
        ("watch_devices", {"device": None}),
        ("watch_devices", {"memory_json": '{"before": {}}'}),
        ("watch_devices", {"memory_json": '{"before": {"a": 1}, "findings": []}'}),
        *(
            ("watch_devices", {"memory_json": json.dumps({"before": {"a": b}, "findings": []})})
            for b in NO_BEFORE
        ),
    ],
)
def test_what_no_watch_keeps_refuses_the_whole_file(
    source: Store, target: Store, tmp_path: Path, table: str, values: dict[str, Any]
) -> None:
    watched(source)
    export_history(source, tmp_path / "h.mpk", None)
    parts = list(read_frames(tmp_path / "h.mpk"))
    assert import_history(target, spoiled(parts, table, tmp_path / "good.mpk")).changed
    before = rows(target.path)
    with pytest.raises(FramedFileError, match="nothing of it was imported"):
        import_history(target, spoiled(parts, table, tmp_path / "bad.mpk", **values))
    assert rows(target.path) == before


def test_a_job_whose_result_was_cut_off_says_so(
    source: Store, target: Store, tmp_path: Path
) -> None:
    """The jobs of an export stand before the results."""
    (run,) = fill(source, 1)
    export_history(source, tmp_path / "h.mpk", None)
    kept = FrameWriter(tmp_path / "cut.mpk")
    for part in read_frames(tmp_path / "h.mpk"):
        if isinstance(part, bytes) or part.get("table") == "outcomes":
            break
        kept.object(part)
    kept.sync()
    shutil.copy(unfinished_path(tmp_path / "cut.mpk"), tmp_path / "half.mpk")
    kept.discard()
    assert import_history(target, tmp_path / "half.mpk", partial=True).cut
    first = target.rows_of(run)[0]
    # All three jobs are in the file: two were done, and one was lost.
    assert count_ended(source, run) == (2, 3)
    assert count_ended(target, run) == (0, 3)
    assert done_before(target, run) == {}
    said = end_of(target, target.runs()[0]).sentence
    assert "the results of 0 of 3 jobs are here, and those of 2 more were cut off" in said
    assert "kept" not in said
    assert not first.measured
    assert "fingerprint: done, but its result is not here" in first.error
    assert first.unfinished
    import_history(target, tmp_path / "h.mpk")
    assert target.rows_of(run)[0].error == source.rows_of(run)[0].error == ""
    assert count_ended(target, run) == (2, 3)
    assert done_before(target, run) == done_before(source, run) != {}


def test_what_was_done_again_misses_no_result(source: Store) -> None:
    """A run whose results were cut off can go on: what is missing is measured again."""
    run = source.begin_run("fleet profile")
    (node,) = source.record_nodes(run, [{"machine_id": "m", "host": "h"}])
    for name in ("lost", "again"):
        source.record_job(run, Job(name, 1, "fingerprint", {"device": "cpu"}, 60.0), node=node)
    source.set_job_state("lost", "done", attempt=1)
    assert "its result is not here" in source.rows_of(run)[0].error
    source.finish_run(run)
    assert run_to_go_on(source, "fleet profile", {}).run == run
    source.record_outcome(outcome("again"))
    assert source.rows_of(run)[0].error == ""
    assert count_ended(source, run) == (1, 1)
    with pytest.raises(ValueError, match="nothing to resume"):
        run_to_go_on(source, "fleet profile", {})


def frames(source: Store, tmp_path: Path) -> list[Any]:
    fill(source, 1)
    path = tmp_path / "h.mpk"
    export_history(source, path, None)
    return list(read_frames(path))


def spoiled(parts: list[Any], table: str, path: Path, **values: Any) -> Path:
    writer = FrameWriter(path, replace=True)
    for part in parts:
        if isinstance(part, bytes):
            writer.outcome(part)
        elif part.get("table") == table:
            writer.object({"table": table, "row": {**part["row"], **values}})
        else:
            writer.object(part)
    writer.finish()
    return path


@pytest.mark.parametrize(
    ("table", "values"),
    [
        ("runs", {"run": "../x"}),
        ("runs", {"started_unix": float("inf")}),
        ("runs", {"started_unix": "now"}),
        ("runs", {"settings_json": "[]"}),
        ("runs", {"settings_json": "{"}),
        ("runs", {"settings_json": "[" * 100_000}),
        ("runs", {"extra": 1}),
        ("runs", {"seq": 1}),
        ("nodes", {"gpu_uuids_json": "[1]"}),
        ("nodes", {"host": "x" * 70_000}),
        ("nodes", {"host": None}),
        ("run_nodes", {"position": -1}),
        ("run_nodes", {"run": "no-such-run"}),
        ("run_nodes", {"hello_json": "5"}),
        ("jobs", {"state": "exploded"}),
        ("jobs", {"device": "/dev/sda"}),
        ("jobs", {"kind": "shell"}),
        ("jobs", {"attempts": True}),
        ("jobs", {"job_id": "other"}),
        ("outcomes", {"attempt": 77}),
        ("outcomes", {"status": "ok!"}),
        ("outcomes", {"simulated": 1}),
        ("outcomes", {"received_unix": None}),
        ("plans", {"plan_json": '{"values": 5}'}),
        ("plans", {"plan_json": '{"values": {"micro_batch": {"value": 4, "source": ""}}}'}),
        ("findings", {"severity": "terrible"}),
        ("findings", {"state": "done"}),
        ("findings", {"sentence": ""}),
        ("findings", {"evidence_json": "null"}),
    ],
)
def test_an_unsound_row_refuses_the_whole_file(
    source: Store, target: Store, tmp_path: Path, table: str, values: dict[str, Any]
) -> None:
    path = spoiled(frames(source, tmp_path), table, tmp_path / "bad.mpk", **values)
    before = rows(target.path)
    with pytest.raises(FramedFileError, match="nothing of it was imported"):
        import_history(target, path)
    assert rows(target.path) == before


def test_what_contradicts_the_store_refuses_the_whole_file(
    source: Store, target: Store, tmp_path: Path
) -> None:
    parts = frames(source, tmp_path)
    import_history(target, tmp_path / "h.mpk")
    before = rows(target.path)
    writer = FrameWriter(tmp_path / "forged.mpk")
    for part in parts:
        if isinstance(part, bytes):
            writer.outcome(part.replace(b"2000", b"9000").replace(b"median", b"forged"))
        else:
            writer.object(part)
    writer.finish()
    with pytest.raises(FramedFileError, match="another result"):
        import_history(target, tmp_path / "forged.mpk")
    moved = spoiled(parts, "runs", tmp_path / "moved.mpk", started_unix=1.0)
    with pytest.raises(FramedFileError, match="something else"):
        import_history(target, moved)
    assert rows(target.path) == before


def test_cut_and_foreign_files_leave_the_store_as_it_is(
    source: Store, target: Store, tmp_path: Path
) -> None:
    fill(source, 1)
    path = tmp_path / "h.mpk"
    export_history(source, path, None)
    data = path.read_bytes()
    before = rows(target.path)
    for share in (0.3, 0.6, 0.9, 0.999):
        path.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(FramedFileError, match="ends in the middle"):
            import_history(target, path)
    assert rows(target.path) == before


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.999])
def test_what_is_whole_of_a_cut_file_can_be_taken(
    source: Store, target: Store, tmp_path: Path, share: float
) -> None:
    fill(source, 2)
    path = tmp_path / "h.mpk"
    export_history(source, path, None)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    whole = [f for f in read_frames(path, partial=True) if not isinstance(f, bytes)]
    added = import_history(target, path, partial=True)
    assert added.cut
    # The header is no row, and neither is an outcome's row whose bytes are behind the cut.
    missing = sum(f.get("table") == "outcomes" for f in whole) - added.new["outcomes"]
    assert missing in (0, 1)
    assert sum(added.new.values()) == len(whole) - 1 - missing > 0
    assert "ends too early" in added.sentence
    assert all(run.finished_unix is None for run in target.runs())
    once = rows(target.path)
    assert not import_history(target, path, partial=True).changed
    assert rows(target.path) == once
    path.write_bytes(data)
    import_history(target, path)
    assert rows(target.path) == rows(source.path)


def test_a_cut_file_of_which_nothing_is_whole(source: Store, target: Store, tmp_path: Path) -> None:
    fill(source, 1)
    path = tmp_path / "h.mpk"
    export_history(source, path, None)
    size = len(path.read_bytes()[:150])
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(FramedFileError, match="nothing in it is whole"):
        import_history(target, path, partial=True)
    assert not target.runs()


def test_an_export_that_fails_leaves_nothing(
    source: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(source, 1)
    (tmp_path / "out").mkdir()

    def full(self: FrameWriter, data: bytes) -> None:
        raise FramedFileError("No space left on device")

    monkeypatch.setattr(FrameWriter, "outcome", full)
    with pytest.raises(FramedFileError, match="No space"):
        export_history(source, tmp_path / "out" / "h.mpk", None)
    assert not list((tmp_path / "out").iterdir())


def test_a_history_that_nothing_goes_into_is_not_made(source: Store, tmp_path: Path) -> None:
    fill(source, 1)
    whole, cut, foreign = (tmp_path / name for name in ("h.mpk", "cut.mpk", "notes.txt"))
    export_history(source, whole, None)
    cut.write_bytes(whole.read_bytes()[:-20])
    foreign.write_text("no file of ours")
    made = tmp_path / "new" / "fleet.db"

    def imported(*files: Path) -> Any:
        arguments = ["import", *map(str, files), "--store", str(made), "--json"]
        return CliRunner().invoke(app, arguments, standalone_mode=False)

    for files in ([cut], [foreign], [tmp_path / "absent.mpk"], [cut, foreign]):
        done = imported(*files)
        assert done.return_value == 2
        told = json.loads(done.stdout)["files"]
        assert [entry["status"] for entry in told] == ["refused"] * len(files)
        assert not made.parent.exists()
    # One that can be read is taken, whatever the others are.
    assert imported(foreign, whole, cut).return_value == 2
    with Store.open(made, read_only=True) as store:
        assert [run.run for run in store.runs()] == [run.run for run in source.runs()]
