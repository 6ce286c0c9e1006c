"""The agent as a Ray actor, pinned to its node. The only file of the agent that imports Ray.

One named actor a node, in a fixed namespace, so that a second run finds the agents of the first.
Ray's workers import `AgentActor` by its name from the installed package; nothing of it travels by
value, and nothing in the driver's working folder is in its way.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import pichak_core
from pichak_agent.messages import SCHEMA
from pichak_agent.simulation import agent_of_node
from pichak_core.devices.heap import keep_heap_small

NAMESPACE = "pichak"
#: Jobs and everything else have threads of their own, so that jobs which wait cannot shut out the
#: call that cancels them.
_JOB_THREADS = 16
_CONTROL_THREADS = 8
_MAX_RESTARTS = 10
_RETRY_SECONDS = 0.2

Method = TypeVar("Method", bound=Callable[..., Any])


def _control(method: Method) -> Method:
    """Have the actor's method run on a control thread."""
    made: Method = ray.method(concurrency_group="control")(method)
    return made


class AgentError(RuntimeError):
    """No usable agent can be had on a node: which node, why, and what to do."""


class AgentActor:
    """`pichak_agent.daemon.Agent`, method by method; threads of Ray's call it."""

    def __init__(self, instance: str) -> None:
        keep_heap_small()
        self._agent = agent_of_node(instance)
        self._end_jobs_on_sigterm()

    def _end_jobs_on_sigterm(self) -> None:
        """Ray's worker, told to end, waits for its calls first: end the jobs, then let it."""
        rays_own = signal.getsignal(signal.SIGTERM)

        def stop(number: int, frame: FrameType | None) -> None:
            self._agent.close()
            if callable(rays_own):
                rays_own(number, frame)

        # Ray makes actors in the worker's main thread; only there can a handler be set.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, stop)

    @_control
    def hello(self) -> dict[str, Any]:
        """Versions, machine, GPUs, problems, and Ray's `node_id`."""
        return {**self._agent.hello(), "node_id": ray.get_runtime_context().get_node_id()}

    def run(self, job_bytes: bytes) -> bytes:
        """The job's outcome, which is in the spool by then."""
        return self._agent.run(job_bytes)

    @_control
    def progress(self, job_id: str) -> str:
        """What the job last said."""
        return self._agent.progress(job_id)

    @_control
    def cancel(self, job_id: str) -> bool:
        """End the job."""
        return self._agent.cancel(job_id)

    @_control
    def acknowledge(self, job_id: str, attempt: int) -> bool:
        """The store has this outcome."""
        return self._agent.acknowledge(job_id, attempt)

    @_control
    def pending(self) -> list[bytes]:
        """Outcomes that nobody acknowledged."""
        return self._agent.pending()

    @_control
    def problems(self) -> list[str]:
        """What a person should know of this agent."""
        return self._agent.problems()

    @_control
    def has_file(self, digest: str, path: str = "") -> bool:
        """Whether a job can have this file here."""
        return self._agent.has_file(digest, path)

    @_control
    def put_file(self, digest: str, offset: int, chunk: bytes, total: int) -> int:
        """Take a piece of a file; how many bytes of it are here."""
        return self._agent.put_file(digest, offset, chunk, total)

    @_control
    def forget_files(self) -> None:
        """Remove what was shipped."""
        self._agent.forget_files()

    @_control
    def close(self) -> None:
        """Cancel what runs and give the folder back; the actor is killed next."""
        self._agent.close()


def actor_name(node_id: str) -> str:
    """The name of a node's agent."""
    return f"pichak-agent-{node_id}"


def ensure_agent(
    node_id: str,
    *,
    namespace: str = NAMESPACE,
    timeout_seconds: float = 60.0,
    detached: bool = True,
) -> tuple[ActorHandle[Any], dict[str, Any]]:
    """The agent of the Ray node `node_id` and its `hello`; made where there is none.

    An agent that another version of this package left there, or that does not answer, is killed
    and made anew. A `detached` one outlives this driver. `AgentError` when the node has another
    version installed or when no agent answers in time; Ray's own errors as they are.
    """
    until = time.monotonic() + timeout_seconds
    replaced = False
    while True:
        agent = _get_or_create(node_id, namespace, detached, until)
        left = max(1.0, until - time.monotonic())
        # Half of the time is enough for one that was there already and may be hung.
        wait = left if replaced else left / 2
        cause: Exception | None = None
        try:
            hello: dict[str, Any] = ray.get(agent.hello.remote(), timeout=wait)
            problem = _mismatch(hello)
            if not problem:
                return agent, hello
        except ray.exceptions.GetTimeoutError as error:
            problem, cause = "its agent does not answer", error
        except (AttributeError, ray.exceptions.RayTaskError, ray.exceptions.RayActorError) as error:
            problem, cause = _why_dead(error), error
        if replaced or time.monotonic() >= until:
            raise AgentError(f"node {node_id[:12]}: {problem}") from cause
        ray.kill(agent, no_restart=True)
        replaced = True


def stop_agent(node_id: str, *, namespace: str = NAMESPACE, timeout_seconds: float = 10.0) -> bool:
    """End a node's agent and its jobs; False when there was none. Its spool stays on the node."""
    try:
        agent = ray.get_actor(actor_name(node_id), namespace=namespace)
    except ValueError:
        return False
    # One that cannot stop by itself is stopped, and its children die with it.
    with contextlib.suppress(AttributeError, ray.exceptions.RayError):
        ray.get(agent.close.remote(), timeout=timeout_seconds)
    ray.kill(agent, no_restart=True)
    return True


def _get_or_create(node_id: str, namespace: str, detached: bool, until: float) -> ActorHandle[Any]:
    create: Callable[..., ActorHandle[Any]] = (
        _remote_class()
        .options(
            name=actor_name(node_id),
            namespace=namespace,
            get_if_exists=True,
            lifetime="detached" if detached else None,
            max_restarts=_MAX_RESTARTS,
            max_task_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote
    )
    while True:
        try:
            return create(f"node-{node_id[:16]}")
        except ValueError:
            # The name of an actor that was just killed stays taken for a moment.
            if time.monotonic() >= until:
                raise
            time.sleep(_RETRY_SECONDS)


@functools.cache
def _remote_class() -> Any:
    return ray.remote(
        num_cpus=0,
        concurrency_groups={"control": _CONTROL_THREADS},
        max_concurrency=_JOB_THREADS,
    )(AgentActor)


def _mismatch(hello: dict[str, Any]) -> str:
    """Why an agent that said this cannot be used; "" when it can."""
    theirs = (hello.get("versions") or {}).get("pichak")
    if theirs != pichak_core.__version__ or hello.get("schema") != SCHEMA:
        return (
            f"it runs pichak-fleet {theirs} (schema {hello.get('schema')}), this side "
            f"{pichak_core.__version__} (schema {SCHEMA}): install the same version on every node"
        )
    return ""


def _why_dead(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith(("ModuleNotFoundError", "ImportError")):
            return (
                f"its agent cannot be imported there ({line}): install pichak-fleet "
                f"{pichak_core.__version__} in the Python that Ray runs on that node"
            )
    return f"its agent died ({type(error).__name__}: {' '.join(lines)[:500]})"
