"""What earlier coordinators left on the nodes: outcomes in spools, and jobs that still run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from pichak_agent.messages import MessageError, Outcome, decode
from pichak_coordinator.cut_runs import OpenJob, open_jobs, settle, without_result
from pichak_coordinator.dispatch import Dispatcher
from pichak_coordinator.store import Store
from pichak_core.plan import Plan

#: For so long a resumed run waits for the jobs that it had cancelled; a child is killed in less.
_END_SECONDS = 20.0
_LOOK_SECONDS = 0.2


class Remains:
    """Collects it at the beginning of a run, and again at its end for what ended meanwhile."""

    def __init__(self, dispatcher: Dispatcher, store: Store, say: Callable[[str], None]) -> None:
        self._dispatcher = dispatcher
        self._store = store
        self._say = say
        self._open: list[OpenJob] = []
        self._running: list[tuple[str, str]] = []

    def collect(self, node_ids: Iterable[str]) -> None:
        """Outcomes whose coordinator went away before it could store them."""
        taken = 0
        for node_id in node_ids:
            for data in self._dispatcher.leftovers(node_id):
                try:
                    taken += self._store.record_outcome(data)
                except MessageError as error:
                    self._say(f"an old result was refused and stays on its node: {error}")
                    continue
                self._dispatcher.acknowledge_bytes(node_id, data)
        if taken:
            self._say(f"{taken} result{'' if taken == 1 else 's'} of an earlier run collected")

    def end_open_jobs(self, node_ids: Mapping[str, str]) -> None:
        """Nobody waits for jobs that still run for an earlier coordinator; `node_ids` are Ray's by
        the identity of the node."""
        self._open = open_jobs(self._store)
        self._running = self._cancel(
            (node_ids[job.node], job.job_id) for job in self._open if job.node in node_ids
        )

    def await_ends(self) -> None:
        """Wait, for a while, until those jobs have ended: one that was done when it was told to
        end is done, and must not be measured again."""
        until = time.monotonic() + _END_SECONDS
        while self._running and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
            self._running = self._cancel(self._running)

    def _cancel(self, jobs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Those of the (Ray node id, job id) that were still running."""
        return [(node, job) for node, job in jobs if self._dispatcher.cancel_on(node, job)]

    def settle(self, node_ids: Iterable[str]) -> None:
        """Give those jobs their final state; what they left is taken first."""
        if self._open:
            self.collect(node_ids)
            settle(self._store, self._open)
            self._open = []


def done_before(store: Store, run: str) -> dict[tuple[str, str], set[str]]:
    """(node, device) -> the kinds of its jobs that were done in `run`, and whose result is here."""
    made: dict[tuple[str, str], set[str]] = {}
    lost = without_result(store, run)
    for job in store.jobs(run):
        if job.state == "done" and job.job_id not in lost:
            made.setdefault((job.node, job.device), set()).add(job.kind)
    return made


def task_before(store: Store, run: str, label_of: Callable[[str], str]) -> Plan | None:
    """The task's numbers that `run` has measured already, saying on which node."""
    found = store.each(
        "SELECT jobs.node, data FROM jobs JOIN outcomes USING (job_id) "
        "WHERE run = ? AND kind = 'task' AND status = 'ok' ORDER BY attempt",
        run,
    )
    for node, data in found:
        record = decode(bytes(data), Outcome).result.get("task")
        if isinstance(record, dict):
            return Plan.from_dict(record).measured_on(label_of(str(node)))
    return None
