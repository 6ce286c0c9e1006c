"""What the store answers: runs, rows, histories. Reading never changes anything."""

# ruff: noqa: S608  - the SQL is put together from constants of this file; values are bound.

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pichak_coordinator.assemble import rows_of_node, same_device, told_apart
from pichak_coordinator.collector import paused
from pichak_coordinator.database import translated
from pichak_coordinator.ingest import Parts, read_outcome
from pichak_coordinator.records import Finding, JobRecord, Point, Row, Run, SeenNode
from pichak_core.plan import Plan

_RUN = "run, started_unix, finished_unix, command, settings_json"
_JOB = "job_id, run, node, device, kind, state, attempts, error"
_FINDING = "code, severity, sentence, evidence_json, state, confidence, metric"
#: How many of a metric's latest readings a node is judged by.
HISTORY_VALUES = 50
#: How two runs are ordered: by when they began, and by when they were stored where that is equal.
_KIND = "CASE WHEN command IN ('net', 'fleet watch') THEN command ELSE '' END"
_SAME_KIND = f"{_KIND} = (SELECT {_KIND} FROM runs WHERE run = ?)"
BEFORE = "(started_unix, seq) < (SELECT started_unix, seq FROM runs WHERE run = ?)"


class Reader:
    """The reading half of `Store`."""

    def __init__(self, path: Path, db: sqlite3.Connection) -> None:
        self.path = path
        self._db = db
        self._lock = threading.RLock()

    def runs(self, limit: int | None = None) -> list[Run]:
        """The newest first."""
        found = self._all(
            f"SELECT {_RUN} FROM runs ORDER BY started_unix DESC, seq DESC LIMIT ?",
            -1 if limit is None else limit,
        )
        return [_run(record) for record in found]

    def run(self, run: str) -> Run | None:
        """One run by its id."""
        found = self._all(f"SELECT {_RUN} FROM runs WHERE run = ?", run)
        return _run(found[0]) if found else None

    def latest_run(self) -> Run | None:
        """The run that began last, finished or not."""
        return next(iter(self.runs(1)), None)

    def previous_run(self, run: str, node: str | None = None) -> Run | None:
        """The run before `run`; with `node`, the last one before it that measured that node.

        A network test follows a network test, a watch's probe such a probe, and a profile a
        profile: they measure different things.
        """
        measured = (
            "AND EXISTS (SELECT 1 FROM jobs JOIN outcomes USING (job_id) "
            "WHERE jobs.run = runs.run AND jobs.node = ?)"
        )
        found = self._all(
            f"SELECT {_RUN} FROM runs WHERE {BEFORE} AND {_SAME_KIND} "
            f"{measured if node else ''} ORDER BY started_unix DESC, seq DESC LIMIT 1",
            run,
            run,
            *([node] if node else []),
        )
        return _run(found[0]) if found else None

    def jobs(self, run: str) -> list[JobRecord]:
        """Every job of a run, by job id."""
        found = self._all(f"SELECT {_JOB} FROM jobs WHERE run = ? ORDER BY job_id", run)
        return [JobRecord(*record) for record in found]

    def job(self, job_id: str) -> JobRecord | None:
        """One job by its id, of any run."""
        found = self._all(f"SELECT {_JOB} FROM jobs WHERE job_id = ?", job_id)
        return JobRecord(*found[0]) if found else None

    def node_error(self, run: str, node: str) -> str:
        """Why a node of a run said nothing, or not all; "" when it did."""
        found = self._all("SELECT error FROM run_nodes WHERE run = ? AND node = ?", run, node)
        return str(found[0][0]) if found else ""

    def nodes_of(self, run: str) -> list[str]:
        """The identities of a run's nodes, in the order in which they were recorded."""
        found = self._all("SELECT node FROM run_nodes WHERE run = ? ORDER BY position, node", run)
        return [record[0] for record in found]

    def hellos_of(self, run: str) -> dict[str, dict[str, Any]]:
        """node -> what it said of itself in a run."""
        found = self._all("SELECT node, hello_json FROM run_nodes WHERE run = ?", run)
        return {node: json.loads(text) for node, text in found}

    def nodes(self) -> list[SeenNode]:
        """Every node of any run, the one last seen first."""
        found = self._all(
            "SELECT node, host, address, gpu_uuids_json, first_seen_unix, last_seen_unix "
            "FROM nodes ORDER BY last_seen_unix DESC, node"
        )
        return [
            SeenNode(node, host, address, tuple(json.loads(uuids)), first, last)
            for node, host, address, uuids, first, last in found
        ]

    def simulated_nodes(self) -> set[str]:
        """The nodes that ever said of themselves that no machine is behind them."""
        found = self._all(
            "SELECT DISTINCT node FROM run_nodes WHERE json_extract(hello_json, '$.simulated') = 1"
        )
        return {record[0] for record in found}

    def node_at(self, address: str, host: str = "") -> str | None:
        """The node last seen at an address (and host, where given); for one that says nothing."""
        found = self._all(
            "SELECT node FROM nodes WHERE address = ? AND (? = '' OR host = ?) "
            "ORDER BY last_seen_unix DESC, node LIMIT 1",
            address,
            host,
            host,
        )
        return found[0][0] if found else None

    def outcome_bytes(self, job_id: str, attempt: int) -> bytes | None:
        """The bytes as the node produced them; None when there is no such outcome."""
        found = self._all(
            "SELECT data FROM outcomes WHERE job_id = ? AND attempt = ?", job_id, attempt
        )
        return bytes(found[0][0]) if found else None

    def history(self, node: str, metric: str, *, device: str | None = None) -> list[Point]:
        """Every reading of one metric of one node, the oldest first."""
        return self.histories(node, [metric], device=device)[metric]

    def histories(
        self, node: str, metrics: Iterable[str], *, device: str | None = None
    ) -> dict[str, list[Point]]:
        """metric -> every reading of it on a node, the oldest first."""
        made: dict[str, list[Point]] = {metric: [] for metric in metrics}
        for run, on, received, simulated, parts in self._outcomes_of(node, device):
            for metric, points in made.items():
                said = parts.point(metric)
                if said is not None:
                    points.append(Point(run, on, metric, received, *said, simulated))
        return made

    def metric_names(self, node: str) -> list[str]:
        """Every metric that was ever read, or tried, on a node."""
        found = self._outcomes_of(node, None)
        return list(dict.fromkeys(name for *_, parts in found for name in parts.readings))

    def _outcomes_of(
        self, node: str, device: str | None
    ) -> Iterator[tuple[str | None, str, float, bool, Parts]]:
        """(run, device, when it was stored, whether it is simulated, what it holds) of each outcome
        of a node that has readings, the oldest first."""
        with self._lock, translated(self.path):
            for run, on, received, simulated, data in self._db.execute(
                "SELECT n.run, n.device, n.received_unix, simulated, data FROM outcome_numbers n "
                "JOIN outcomes USING (job_id, attempt) WHERE n.node = ? "
                "AND (? IS NULL OR device = ?) ORDER BY n.received_unix, job_id, attempt",
                (node, device, device),
            ):
                yield run, on, received, bool(simulated), read_outcome(bytes(data))

    def earlier_values(
        self, run: str, rows: Iterable[Row] | None = None
    ) -> dict[tuple[str, str, str], list[float]]:
        """(node, device, metric) -> numbers of runs before `run` that may judge, oldest first.

        For the devices of `rows` (default: the run's); a GPU is recognised by its UUID, whatever
        its number was then. What was suspect or not measured is left out, and so is what is older
        than `HISTORY_VALUES` readings.
        """
        earlier = {r[0] for r in self._all(f"SELECT run FROM runs WHERE {BEFORE}", run)}
        devices: dict[str, list[Row]] = {}
        for row in self.rows_of(run, curves=False) if rows is None else rows:
            devices.setdefault(row.node.node, []).append(row)
        values: dict[tuple[str, str, str], list[float]] = {}
        for node, mine in devices.items():
            found = self._all(
                "SELECT run, device, gpu_uuid, numbers_json FROM outcome_numbers WHERE node = ? "
                "ORDER BY received_unix",
                node,
            )
            for then, device, uuid, numbers in found:
                keys = [row.key for row in mine if same_device(row, device, uuid)]
                if keys and then in earlier:
                    for metric, value in json.loads(numbers).items():
                        for key in keys:
                            values.setdefault((*key, metric), []).append(value)
        return {key: some[-HISTORY_VALUES:] for key, some in values.items()}

    def findings(self, run: str) -> dict[tuple[str, str], list[Finding]]:
        """(node, device) -> findings; those of a whole node are under device ""."""
        found = self._all(f"SELECT node, device, {_FINDING} FROM findings WHERE run = ?", run)
        made: dict[tuple[str, str], list[Finding]] = {}
        for node, device, *record in found:
            record[3] = json.loads(record[3])
            made.setdefault((node, device), []).append(Finding(*record))
        return {key: sorted(some, key=lambda f: f.order) for key, some in made.items()}

    @paused()
    def rows_of(
        self, run: str, nodes: Iterable[str] | None = None, *, curves: bool = True
    ) -> list[Row]:
        """One row a device, in the order in which nodes were recorded; nodes that failed too.

        `nodes` limits the answer to some of them. Without `curves` the lists of numbers in a
        reading's detail, which only pages show, are left out: of 10,000 nodes they are gigabytes.
        """
        wanted = None if nodes is None else set(nodes)
        rows: list[Row] = []
        with self._lock:
            hellos = self._all(
                "SELECT r.node, r.hello_json, r.error, n.host, n.address FROM run_nodes r "
                "JOIN nodes n USING (node) WHERE r.run = ? ORDER BY r.position, r.node",
                run,
            )
            jobs: dict[str, list[JobRecord]] = {}
            for job in self.jobs(run):
                jobs.setdefault(job.node, []).append(job)
            plans = self._plans(run)
            findings = self.findings(run)
            for node, hello_json, error, host, address in hellos:
                if wanted is None or node in wanted:
                    hello = {"host": host, "address": address, **json.loads(hello_json)}
                    mine = jobs.get(node, [])
                    # Node by node: the outcomes of a whole fleet would not fit beside its rows.
                    parts = self._best_outcomes(run, node, curves) if mine else {}
                    rows += rows_of_node(node, hello, error, mine, parts, plans, findings)
        return told_apart(rows)

    def previous_rows(self, run: str) -> dict[tuple[str, str], Row]:
        """(node, device) as in `run` -> the row of the last run before it that measured the node,
        without its curves.

        A GPU is recognised by its UUID, whatever its number was then.
        """
        by_run: dict[str, list[str]] = {}
        for node in self.nodes_of(run):
            earlier = self.previous_run(run, node)
            if earlier is not None:
                by_run.setdefault(earlier.run, []).append(node)
        old = [
            row for then, some in by_run.items() for row in self.rows_of(then, some, curves=False)
        ]
        now = self.rows_of(run, [row.node.node for row in old], curves=False)
        return {
            row.key: before
            for row in now
            for before in old
            if before.node.node == row.node.node
            and same_device(row, before.node.device, before.node.gpu_uuid)
        }

    def schema(self) -> int:
        """The number of the store's last migration."""
        return int(self._all("PRAGMA user_version")[0][0])

    def columns(self, table: str) -> list[str]:
        """The columns of a table, in order."""
        return [record[1] for record in self._all(f"PRAGMA table_info({table})")]

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """What the block reads is the store at one moment, whoever writes meanwhile."""
        with self._lock, translated(self.path):
            self._db.execute("BEGIN")
            try:
                yield
            finally:
                self._db.execute("ROLLBACK")

    def each(self, sql: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        """The records of a query of this package's, one after another."""
        yield from self._db.execute(sql, values)

    def _best_outcomes(self, run: str, node: str, curves: bool) -> dict[str, Parts]:
        """job id -> the outcome of a node that counts: the latest that is ok, else the latest."""
        found = self._all(
            "SELECT job_id, data FROM jobs JOIN outcomes USING (job_id) "
            "WHERE run = ? AND jobs.node = ? ORDER BY status = 'ok', attempt",
            run,
            node,
        )
        read = {job_id: read_outcome(bytes(data)) for job_id, data in dict(found).items()}
        return read if curves else {job_id: part.without_curves() for job_id, part in read.items()}

    def _plans(self, run: str) -> dict[tuple[str, str], Plan]:
        found = self._all("SELECT node, device, plan_json FROM plans WHERE run = ?", run)
        return {(node, device): Plan.from_json(text) for node, device, text in found}

    def _all(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock, translated(self.path):
            return self._db.execute(sql, values).fetchall()


def _run(record: Sequence[Any]) -> Run:
    run, started, finished, command, settings = record
    return Run(run, started, finished, command, json.loads(settings))
