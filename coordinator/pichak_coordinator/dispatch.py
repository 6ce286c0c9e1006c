"""Jobs on nodes through Ray: agents found or made, jobs sent, every wait with its deadline.

A node that dies, hangs or cannot import costs its own job, never the others': each failure comes
back as an `Ended` with one sentence, whatever class Ray raised for it (field case 86).
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pichak_agent.messages import Job, MessageError, Outcome, decode, encode
from pichak_coordinator.cluster import Cluster, ClusterNode

#: How long an agent may take to start on a node; a cold node imports Ray and unpacks a wheel.
AGENT_START_SECONDS = 60.0
#: An answer that needs no work (progress, cancel, acknowledge).
QUICK_SECONDS = 10.0
#: Over the job's own deadline: starting the child, waiting for the machine's lock, the way back.
GRACE_SECONDS = 30.0
LOCK_WAIT_SECONDS = 900.0

_CHUNK_BYTES = 4 * 1024 * 1024
MAX_SHIPPED_BYTES = 512 * 1024 * 1024
_PARALLEL_CALLS = 64


class AgentFailedError(RuntimeError):
    """No agent answers on a node; says why."""


@dataclass(frozen=True)
class Ended:
    """The end of one attempt as the coordinator saw it.

    `data` is the outcome's bytes as the child wrote them, with `outcome` decoded from it. Without
    them `error` says what happened to the node, and `retryable` whether another try may help.
    """

    node_id: str
    job: Job
    data: bytes | None = None
    outcome: Outcome | None = None
    error: str = ""
    retryable: bool = False


@dataclass
class _Flight:
    node_id: str
    job: Job
    ref: Any
    give_up_at: float


class Dispatcher:
    """Sends jobs to the agents of one cluster and collects what comes back."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._agents: dict[str, Any] = {}
        self._flights: dict[Any, _Flight] = {}
        self._progress_refs: dict[Any, str] = {}
        self._progress: dict[str, str] = {}
        self._shipped: dict[str, set[str]] = {}

    def start_agents(
        self, nodes: Sequence[ClusterNode], timeout_seconds: float = AGENT_START_SECONDS
    ) -> dict[str, dict[str, Any] | str]:
        """An agent on each node: node id -> its `hello`, or the sentence why there is none."""
        answers: dict[str, dict[str, Any] | str] = {}
        with ThreadPoolExecutor(min(_PARALLEL_CALLS, max(1, len(nodes)))) as pool:
            waits = {pool.submit(self._start_agent, n, timeout_seconds): n for n in nodes}
            for done in as_completed(waits):
                node = waits[done]
                try:
                    answers[node.node_id] = done.result()
                except AgentFailedError as error:
                    answers[node.node_id] = str(error)
        return answers

    def _start_agent(self, node: ClusterNode, timeout_seconds: float) -> dict[str, Any]:
        import ray

        from pichak_agent.ray_actor import ensure_agent

        try:
            agent, hello = ensure_agent(node.node_id, timeout_seconds=timeout_seconds)
        except (ray.exceptions.RayError, OSError, ValueError, RuntimeError) as error:
            why = self._cluster.explain(node.node_id, error)
            raise AgentFailedError(f"no agent could be started: {why}") from error
        self._agents[node.node_id] = agent
        return dict(hello)

    def leftovers(self, node_id: str) -> list[bytes]:
        """Outcomes of earlier runs that the node still keeps because nobody acknowledged them."""
        import ray

        try:
            found = ray.get(self._agents[node_id].pending.remote(), timeout=QUICK_SECONDS)
        except (ray.exceptions.RayError, OSError):
            return []
        return [bytes(data) for data in found]

    def submit(self, node_id: str, job: Job) -> None:
        """Send a job to the node's agent; its end comes out of `poll`."""
        ref = self._agents[node_id].run.remote(encode(job))
        limit = job.deadline_seconds + LOCK_WAIT_SECONDS + GRACE_SECONDS
        self._flights[ref] = _Flight(node_id, job, ref, time.monotonic() + limit)

    @property
    def in_flight(self) -> int:
        """How many jobs have not ended."""
        return len(self._flights)

    def poll(self, timeout_seconds: float) -> list[Ended]:
        """What ended within `timeout_seconds` (possibly nothing)."""
        import ray

        if not self._flights:
            return []
        ready, _ = ray.wait(
            list(self._flights), num_returns=1, timeout=timeout_seconds, fetch_local=True
        )
        if ready:
            ready, _ = ray.wait(list(self._flights), num_returns=len(self._flights), timeout=0)
        ended = [self._collect(self._flights.pop(ref)) for ref in ready]
        now = time.monotonic()
        for ref, flight in list(self._flights.items()):
            if now > flight.give_up_at:
                del self._flights[ref]
                self._quietly_cancel(flight)
                waited = flight.job.deadline_seconds + LOCK_WAIT_SECONDS + GRACE_SECONDS
                ended.append(
                    Ended(flight.node_id, flight.job, error=f"no answer within {waited:.0f} s")
                )
        return ended

    def _collect(self, flight: _Flight) -> Ended:
        import ray

        try:
            data = bytes(ray.get(flight.ref, timeout=QUICK_SECONDS))
            outcome = decode(data, Outcome)
        except (ray.exceptions.RayError, OSError) as error:
            return Ended(
                flight.node_id,
                flight.job,
                error=self._cluster.explain(flight.node_id, error),
                retryable=self._is_alive(flight.node_id),
            )
        except MessageError as error:
            return Ended(flight.node_id, flight.job, error=f"its answer was refused: {error}")
        if (outcome.job_id, outcome.attempt) != (flight.job.job_id, flight.job.attempt):
            return Ended(flight.node_id, flight.job, error="it answered another job")
        return Ended(flight.node_id, flight.job, data, outcome)

    def acknowledge(self, node_id: str, job_id: str, attempt: int) -> None:
        """Tell the agent that its outcome is stored. An agent that is gone keeps it for later."""
        agent = self._agents.get(node_id)
        if agent is not None:
            agent.acknowledge.remote(job_id, attempt)

    def acknowledge_bytes(self, node_id: str, data: bytes) -> None:
        """`acknowledge` for an outcome that is only known by its bytes."""
        outcome = decode(data, Outcome)
        self.acknowledge(node_id, outcome.job_id, outcome.attempt)

    def progress(self) -> dict[str, str]:
        """Job id -> what its child last said. Never waits: answers are taken as they come."""
        import ray

        if self._progress_refs:
            ready, _ = ray.wait(
                list(self._progress_refs), num_returns=len(self._progress_refs), timeout=0
            )
            for ref in ready:
                job_id = self._progress_refs.pop(ref)
                with contextlib.suppress(ray.exceptions.RayError, OSError):
                    self._progress[job_id] = str(ray.get(ref, timeout=QUICK_SECONDS))
        asked = set(self._progress_refs.values())
        for flight in self._flights.values():
            if flight.job.job_id not in asked:
                ref = self._agents[flight.node_id].progress.remote(flight.job.job_id)
                self._progress_refs[ref] = flight.job.job_id
        return dict(self._progress)

    def ship(self, node_id: str, path: Path) -> dict[str, Any]:
        """Make the file available on the node; returns the reference that a job's params take.

        The agent uses the node's own copy when the same path holds the same bytes. `ValueError`
        when the file is larger than `MAX_SHIPPED_BYTES`; `AgentFailedError` when the node is gone.
        """
        import ray

        digest = _sha256(path)
        reference = {"file": {"sha256": digest, "name": path.name, "path": str(path.resolve())}}
        if digest in self._shipped.setdefault(node_id, set()):
            return reference
        agent = self._agents[node_id]
        try:
            held = ray.get(
                agent.has_file.remote(digest, str(path.resolve())), timeout=GRACE_SECONDS
            )
            if not held:
                self._send_file(agent, digest, path)
        except (ray.exceptions.RayError, OSError) as error:
            raise AgentFailedError(
                f"{path.name} could not be sent to it: {self._cluster.explain(node_id, error)}"
            ) from error
        self._shipped[node_id].add(digest)
        return reference

    def _send_file(self, agent: Any, digest: str, path: Path) -> None:
        import ray

        total = path.stat().st_size
        if total > MAX_SHIPPED_BYTES:
            raise ValueError(
                f"{path} has {total / 1e6:,.0f} MB; files over {MAX_SHIPPED_BYTES / 1e6:,.0f} MB "
                "are not sent: put it under the same path on every node, or profile a sample of it"
            )
        offset = 0
        with path.open("rb") as file:
            while True:
                chunk = file.read(_CHUNK_BYTES)
                ray.get(agent.put_file.remote(digest, offset, chunk, total), timeout=GRACE_SECONDS)
                offset += len(chunk)
                if offset >= total:
                    return

    def cancel_all(self, wait_seconds: float = 8.0) -> list[Ended]:
        """Cancel what is in flight and take the (partial) outcomes that still come."""
        for flight in self._flights.values():
            self._quietly_cancel(flight)
        ended: list[Ended] = []
        end = time.monotonic() + wait_seconds
        while self._flights and time.monotonic() < end:
            ended += self.poll(0.2)
        for flight in self._flights.values():
            ended.append(Ended(flight.node_id, flight.job, error="cancelled; it did not answer"))
        self._flights.clear()
        return ended

    def cancel(self, job_id: str) -> None:
        """Have the job's child ended; its outcome is not waited for."""
        for ref, flight in list(self._flights.items()):
            if flight.job.job_id == job_id:
                del self._flights[ref]
                self._quietly_cancel(flight)

    def cancel_on(self, node_id: str, job_id: str) -> bool:
        """Have a job ended that an earlier coordinator sent; whether it was still running there.
        When it no longer is, its outcome is in the spool."""
        import ray

        try:
            ref = self._agents[node_id].cancel.remote(job_id)
            return bool(ray.get(ref, timeout=QUICK_SECONDS))
        except (ray.exceptions.RayError, OSError, KeyError):
            return False

    def problems(self, node_ids: Iterable[str]) -> dict[str, list[str]]:
        """What the agents of these nodes tell of themselves now; of those that answer."""
        import ray

        refs = {self._agents[n].problems.remote(): n for n in node_ids if n in self._agents}
        found: dict[str, list[str]] = {}
        if not refs:
            return found
        for ref in ray.wait([*refs], num_returns=len(refs), timeout=QUICK_SECONDS)[0]:
            with contextlib.suppress(ray.exceptions.RayError, OSError):
                found[refs[ref]] = list(ray.get(ref))
        return found

    def _quietly_cancel(self, flight: _Flight) -> None:
        import ray

        with contextlib.suppress(ray.exceptions.RayError, OSError, ValueError, TypeError):
            self._agents[flight.node_id].cancel.remote(flight.job.job_id)

    def forget_files(self) -> None:
        """Have the agents remove what was shipped to them."""
        import ray

        refs = [self._agents[node_id].forget_files.remote() for node_id in self._shipped]
        with contextlib.suppress(ray.exceptions.RayError, OSError):
            ray.wait(refs, num_returns=len(refs), timeout=QUICK_SECONDS) if refs else None

    def _is_alive(self, node_id: str) -> bool:
        return any(n.node_id == node_id and n.alive for n in self._cluster.nodes())


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
