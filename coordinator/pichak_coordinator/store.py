"""The coordinator's memory: runs, nodes, jobs, and what nodes produced, in one SQLite file.

One writer at a time, any number of readers, in WAL mode. What a call has returned from is on the
disk: `kill -9` at any moment loses nothing that was acknowledged. An outcome is kept as the bytes
that the node produced, exactly once for each (job, attempt).
"""

# ruff: noqa: S608  - the SQL is put together from constants of this package; values are bound.

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, get_args

from pichak_agent.messages import Job, MessageError
from pichak_coordinator.agent_findings import agent_findings, findings_of_each
from pichak_coordinator.agent_problems import with_problems
from pichak_coordinator.collector import paused
from pichak_coordinator.database import (
    CorruptStoreError,
    StoreError,
    connect,
    default_path,
)
from pichak_coordinator.gpu_history import changed_gpus
from pichak_coordinator.identity import (
    gpu_uuids,
    machine_key,
    node_identities,
    node_identity,
)
from pichak_coordinator.ingest import Parts, read_outcome
from pichak_coordinator.jobs import State
from pichak_coordinator.records import Finding
from pichak_coordinator.store_write import FINAL_SQL, Writer, as_json
from pichak_core.plan import Plan

__all__ = [
    "CorruptStoreError",
    "Store",
    "StoreError",
    "default_path",
    "node_identities",
    "node_identity",
]

_AnyStore = TypeVar("_AnyStore", bound="Store")


class Store(Writer):
    """The store's writing half; `Reader` is the other. Safe to use from several threads.

    Every method raises `StoreError` when the file cannot be used: full disk, lock, damage.
    """

    @classmethod
    def open(
        cls: type[_AnyStore],
        path: Path | str | None = None,
        *,
        read_only: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> _AnyStore:
        """Open, and create or migrate unless `read_only`; None is `default_path()`.

        `StoreError` for a file that is missing (when reading), damaged, another program's, or
        written by a newer version; the file is left as it is.
        """
        where = default_path() if path is None else Path(path)
        return cls(where, connect(where, read_only=read_only), clock)

    def close(self) -> None:
        """Close the file; the store cannot be used afterwards."""
        with self._lock:
            self._db.close()

    def __enter__(self: _AnyStore) -> _AnyStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def begin_run(self, command: str, settings: Mapping[str, Any] | None = None) -> str:
        """A new run; its id sorts by time and is unique across machines."""
        now = self._clock()
        run = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(now))}-{secrets.token_hex(3)}"
        self._write(
            "INSERT INTO runs (run, started_unix, command, settings_json) VALUES (?, ?, ?, ?)",
            [(run, now, command, as_json(settings or {}))],
        )
        return run

    def reopen_run(self, run: str, settings: Mapping[str, Any] | None = None) -> None:
        """It goes on: its end is yet to come; `settings` are added to its own, or replace them."""
        found = self.run(run)
        merged = {**(found.settings if found else {}), **(settings or {})}
        self._write(
            "UPDATE runs SET finished_unix = NULL, settings_json = ? WHERE run = ?",
            [(as_json(merged), run)],
        )

    def finish_run(self, run: str) -> None:
        """Note the end of a run, whatever came of it; the first end is kept."""
        self._write(
            "UPDATE runs SET finished_unix = ? WHERE run = ? AND finished_unix IS NULL",
            [(self._clock(), run)],
        )

    def record_nodes(
        self,
        run: str,
        hellos: Sequence[Mapping[str, Any]],
        names: Sequence[str] | None = None,
    ) -> list[str]:
        """All agents of a run at once: the identity of each (or its given name), in their order.

        GPUs that a machine had in its run before and no longer has, or the reverse, become
        findings of this run; so does what an agent says that it saw between probes.
        """
        nodes = list(names) if names is not None else node_identities(hellos)
        with self.atomically():
            self._tell_gpu_changes(run, hellos, nodes)
            found = findings_of_each(hellos)
            for node, hello, some in zip(nodes, hellos, found, strict=True):
                self._put_node(run, node, hello, "", some)
        return nodes

    def record_node(
        self, run: str, hello: Mapping[str, Any], *, node: str | None = None, error: str = ""
    ) -> str:
        """One node of a run, for one that gave no full hello or whose `error` is to be shown.

        `hello` needs ``machine_id``, ``host`` or ``address``. Without `node`, a node that says
        nothing but its address is taken for the one last seen there.
        """
        if node is None and not hello.get("machine_id"):
            node = self.node_at(str(hello.get("address") or ""), str(hello.get("host") or ""))
        name = node or node_identity(hello)
        with self.atomically():
            self._put_node(run, name, hello, error, agent_findings(hello))
        return name

    def record_job(self, run: str, job: Job, *, node: str, device: str | None = None) -> None:
        """A job, before it is sent; the same job again is its next attempt.

        `device` is what it measures (default: its params' ``device``); "" is the whole node.
        """
        where = str(job.params.get("device") or "") if device is None else device
        params = as_json({k: v for k, v in job.params.items() if k != "task"})
        self._write(
            "INSERT INTO jobs (job_id, run, node, device, kind, state, attempts, error, "
            "params_json, changed_unix) VALUES (?, ?, ?, ?, ?, 'queued', ?, '', ?, ?) "
            "ON CONFLICT (job_id) DO UPDATE SET attempts = max(attempts, excluded.attempts), "
            "changed_unix = excluded.changed_unix",
            [(job.job_id, run, node, where, job.kind, job.attempt, params, self._clock())],
        )

    def set_job_state(
        self, job_id: str, state: str, *, attempt: int | None = None, error: str = ""
    ) -> bool:
        """Note a job's state; False when it is unknown or already final, and nothing changed."""
        if state not in get_args(State):
            raise ValueError(f"job {job_id}: no state {state!r}")
        return bool(
            self._write(
                "UPDATE jobs SET state = ?, error = ?, attempts = max(attempts, ?), "
                f"changed_unix = ? WHERE job_id = ? AND state NOT IN ({FINAL_SQL})",
                [(state, error, attempt or 0, self._clock(), job_id)],
            )
        )

    def record_outcome(self, data: bytes) -> bool:
        """Keep one outcome with its readings, in one transaction; True when it was new.

        Raises `MessageError` for bytes that are not a sound outcome: nothing of them is kept. The
        second time that a (job, attempt) arrives changes nothing. Once this returns, the agent may
        be told to forget it. An "ok" outcome makes its job done, unless it was final before. An
        outcome whose job this store never sent is kept without a run.
        """
        answer = self.record_outcomes([data])[0]
        if isinstance(answer, MessageError):
            raise answer
        return answer

    @paused()
    def record_outcomes(self, items: Sequence[bytes]) -> list[bool | MessageError]:
        """Many outcomes in one transaction: for each, what `record_outcome` returns or raises."""
        answers: list[bool | MessageError] = []
        with self.atomically():
            for data in items:  # one after another: what was read of one is in nobody's way then
                parts = _read_or_error(data)
                answers.append(
                    parts if isinstance(parts, MessageError) else self._put_outcome(data, parts)
                )
        return answers

    def restore_outcome(self, data: bytes, parts: Parts, received_unix: float) -> bool:
        """An outcome and its readings from another store, whose job is in this one; its job's state
        is not touched. False when it was there before."""
        outcome = parts.outcome
        job = self.job(outcome.job_id)
        if job is None:
            raise ValueError(f"the job of outcome {outcome.job_id} is missing")
        with self.atomically():
            return self._insert_outcome(data, parts, job.run, job.node, job.device, received_unix)

    def record_plan(self, run: str, node: str, device: str, plan: Plan) -> None:
        """The plan of one device in one run; it goes before the plans found in outcomes."""
        self._write(
            "INSERT INTO plans (run, node, device, plan_json) VALUES (?, ?, ?, ?) "
            "ON CONFLICT DO UPDATE SET plan_json = excluded.plan_json",
            [(run, node, device, plan.to_json(indent=None))],
        )

    def record_findings(self, run: str, node: str, device: str, found: Iterable[Finding]) -> None:
        """Findings of one device in one run; one with the same code and metric is replaced."""
        with self.atomically():
            self._put_findings(run, node, device, found)

    def record_problems(self, run: str, node: str, told: Sequence[str]) -> None:
        """What a node's agent tells of itself, beside what it told when it was greeted."""
        if not told:
            return
        with self.atomically():
            for (text,) in self._all(
                "SELECT hello_json FROM run_nodes WHERE run = ? AND node = ?", run, node
            ):
                hello = as_json(with_problems(json.loads(text), told))
                self._write(
                    "UPDATE run_nodes SET hello_json = ? WHERE run = ? AND node = ?",
                    [(hello, run, node)],
                )

    def renew_findings(self, run: str) -> None:
        """Only the findings that a run's nodes sent and what their GPUs say, for a run that has
        grown and is judged again."""
        with self.atomically():
            self._write("DELETE FROM findings WHERE run = ?", [(run,)])
            found = self._all("SELECT hello_json, node FROM run_nodes WHERE run = ?", run)
            hellos = [json.loads(h) for h, _ in found]
            self._tell_gpu_changes(run, hellos, [n for _, n in found])
            for some, (_, node) in zip(findings_of_each(hellos), found, strict=True):
                self._put_findings(run, node, "", some)
            for node, device, data in self._all(
                "SELECT jobs.node, device, data FROM jobs JOIN outcomes USING (job_id) "
                "WHERE run = ? ORDER BY attempt",
                run,
            ):
                self._put_findings(run, node, device, read_outcome(bytes(data)).findings)

    def _put_node(
        self,
        run: str,
        node: str,
        hello: Mapping[str, Any],
        error: str,
        findings: Iterable[Finding],
    ) -> None:
        host, address = str(hello.get("host") or ""), str(hello.get("address") or "")
        now = self._clock()
        self._db.execute(
            "INSERT INTO nodes VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (node) DO UPDATE SET "
            "host = CASE WHEN excluded.host = '' OR excluded.last_seen_unix < last_seen_unix "
            "THEN host ELSE excluded.host END, "
            "address = CASE WHEN excluded.address = '' OR excluded.last_seen_unix < last_seen_unix "
            "THEN address ELSE excluded.address END, "
            "first_seen_unix = min(first_seen_unix, excluded.first_seen_unix), "
            "last_seen_unix = max(last_seen_unix, excluded.last_seen_unix)",
            (node, machine_key(hello), as_json(gpu_uuids(hello)), host, address, now, now),
        )
        self._db.execute(
            "INSERT INTO run_nodes SELECT ?, ?, count(*), ?, ? FROM run_nodes WHERE run = ? "
            "ON CONFLICT (run, node) DO UPDATE SET error = excluded.error",
            (run, node, as_json(hello), error, run),
        )
        self._put_findings(run, node, "", findings)

    def _tell_gpu_changes(
        self, run: str, hellos: Sequence[Mapping[str, Any]], nodes: Sequence[str]
    ) -> None:
        for number, found in list(changed_gpus(self._db, run, hellos)):
            self._put_node(run, nodes[number], hellos[number], "", ())
            self._put_findings(run, nodes[number], "", found)


def _read_or_error(data: bytes) -> Parts | MessageError:
    try:
        return read_outcome(data)
    except MessageError as error:
        return error
