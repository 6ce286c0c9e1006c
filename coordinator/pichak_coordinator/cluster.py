"""The Ray cluster: joining one or starting a local one, and the nodes it has.

Ray is imported here and in `dispatch.py` alone, and only when a fleet command needs it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from pichak_coordinator.cluster_address import (
    CONNECT_SECONDS,
    ClusterError,
    is_address,
    refuse_open_cluster,
    refuse_silent_address,
    refuse_what_answers,
)
from pichak_coordinator.cluster_token import why_refused
from pichak_coordinator.interrupts import held_back
from pichak_coordinator.ray_session import remove_session

#: Actors and their names live here, so that a second run finds the agents of the first.
NAMESPACE = "pichak"

#: Results travel inline; a store of the default size (30 % of memory) would take what is measured,
#: and does not fit a container's 64 MB /dev/shm (field case 90).
OBJECT_STORE_BYTES = 100 * 1024 * 1024

#: A GPU that Ray has leased to somebody else is not waited for much longer: it is busy.
LEASE_SECONDS = 30.0

_FORMS = (
    "write HOST:PORT (Ray's default port is 6379) or 'auto' for the cluster that runs on this "
    "machine"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_HEAD_RESOURCE = "node:__internal_head__"
#: A node with this label is left out: a head that only schedules, a coordinator's own machine.
LEFT_OUT = ("pichak.io/measure", "no")
#: What the labels begin with that Ray itself puts on a node.
_RAYS_OWN = "ray.io/"
#: What `pichak agent run` says of its node: the name it was given, and that nothing of it is real.
_NAME, _SIMULATED = "pichak.io/name", "pichak.io/simulated"


@dataclass(frozen=True)
class ClusterNode:
    """One Ray node as the cluster describes it. `cpus` and `gpus` are what Ray may lease, `labels`
    those that its owner put on it."""

    node_id: str
    host: str
    address: str
    alive: bool
    cpus: float
    gpus: int
    is_head: bool
    death_reason: str = ""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def left_out(self) -> bool:
        """Its owner does not want it measured (`LEFT_OUT`)."""
        return self.labels.get(LEFT_OUT[0]) == LEFT_OUT[1]

    @classmethod
    def from_ray(cls, record: Mapping[str, Any]) -> ClusterNode:
        """From one entry of `ray.nodes()`."""
        resources = record.get("Resources") or {}
        labels = record.get("Labels") or {}
        return cls(
            node_id=str(record["NodeID"]),
            host=str(
                labels.get(_NAME)
                or record.get("NodeManagerHostname")
                or record.get("NodeName")
                or ""
            ),
            address=str(record.get("NodeManagerAddress") or ""),
            alive=bool(record.get("Alive")),
            cpus=float(resources.get("CPU", 0.0)),
            gpus=int(resources.get("GPU", 0)),
            is_head=_HEAD_RESOURCE in resources,
            death_reason=str(record.get("DeathReasonMessage") or ""),
            labels={
                str(name): str(value)
                for name, value in labels.items()
                if not str(name).startswith(_RAYS_OWN)
            },
        )

    @property
    def simulated(self) -> bool:
        """Its agent answers for a host that does not exist."""
        return self.labels.get(_SIMULATED) == "true"


@dataclass(frozen=True)
class Lease:
    """A GPU that Ray holds for us. `visible_devices` is what the job's child may see."""

    holder: Any
    visible_devices: str

    def release(self) -> None:
        """Give the GPU back."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError, OSError, ValueError):
            ray.kill(self.holder)


class _GpuHolder:
    """A Ray actor that does nothing but hold a GPU, so that Ray gives it to nobody else."""

    def ids(self) -> str:
        """What ``CUDA_VISIBLE_DEVICES`` should say for this lease."""
        import ray

        held: Mapping[str, Sequence[str]] = ray.get_runtime_context().get_accelerator_ids()
        return ",".join(held.get("GPU", ()))


class Cluster:
    """A connection to Ray, closed as a context manager. A cluster that it started ends with it, and
    leaves its folder only where something failed that Ray's logs may explain."""

    _session: Path | None = None
    _keep_session = False

    def __init__(self, address: str | None = None, *, insecure: bool = False) -> None:
        """Join the cluster at `address` (default: ``RAY_ADDRESS``), or start a local one.

        Raises `ClusterError` when none answers there, when its versions differ from this
        machine's, or when it runs without authentication off loopback and `insecure` is not set.
        """
        self.address = (
            address if address is not None else os.environ.get("RAY_ADDRESS", "")
        ).strip()
        if address is not None and not self.address:
            raise ClusterError(f"the address is empty: {_FORMS}, or leave it out for a local Ray")
        self.local = self.address in ("", "local")
        if self.address.startswith("ray://"):
            raise ClusterError(
                f"{self.address} is a Ray Client address, through which nodes cannot be pinned; "
                "run pichak on a machine of the cluster (RAY_ADDRESS=auto), or inside it with "
                "`ray job submit` or `kubectl exec`"
            )
        self._shows_token = False
        if not self.local:
            where = _resolved(self.address)
            refuse_open_cluster(where, insecure=insecure)
            if where != "auto":  # Ray says itself that there is none on this machine
                refuse_silent_address(where, "'auto' is " if self.address == "auto" else "")
                self._shows_token = refuse_what_answers(where, insecure=insecure)
                if self._shows_token and (why := why_refused(where, CONNECT_SECONDS)):
                    raise ClusterError(why)
        # A thread of Ray's prints the cluster's events on standard output, where results belong.
        self._quiet = contextlib.redirect_stdout(io.StringIO())
        self._quiet.__enter__()
        try:
            self._init()
        except BaseException:
            self._quiet.__exit__(None, None, None)
            raise

    def _init(self) -> None:
        import ray

        # Ray's own lines would cut through the progress display; what goes wrong reaches the user
        # as a row's error instead.
        logging.getLogger("ray").setLevel(logging.CRITICAL)
        options: dict[str, Any] = {
            "namespace": NAMESPACE,
            "log_to_driver": False,
            "configure_logging": False,
            "logging_level": logging.CRITICAL,
        }
        if self.local:
            options |= {
                "address": "local",
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
            }
        else:
            options["address"] = self.address
            if self._shows_token:
                # To an address that is named Ray shows a token only when it is told to.
                os.environ["RAY_AUTH_MODE"] = "token"
                ray._raylet.Config.initialize("")
        try:
            # Interrupted half-way, Ray would leave its processes behind for about a minute.
            with held_back():
                started = ray.init(**options)
            if self.local:
                self._session = Path(started.address_info["session_dir"])
        except KeyboardInterrupt:
            ray.shutdown()
            raise
        except Exception as error:  # Ray has no type for a node that does not start in time
            with contextlib.suppress(Exception):
                ray.shutdown()
            raise ClusterError(_why_not(self.address, error)) from error

    def nodes(self) -> list[ClusterNode]:
        """Every node that Ray knows, the head first, dead ones included."""
        import ray

        found = [ClusterNode.from_ray(record) for record in ray.nodes()]
        return sorted(found, key=lambda n: (not n.is_head, n.address, n.node_id))

    def wait_for_nodes(self, timeout_seconds: float = 20.0) -> list[ClusterNode]:
        """The living nodes that may be measured; waits for the first one to register."""
        end = time.monotonic() + timeout_seconds
        while True:
            alive = [node for node in self.nodes() if node.alive and not node.left_out]
            if alive or time.monotonic() > end:
                return alive
            time.sleep(0.2)

    def left_out(self) -> list[ClusterNode]:
        """The living nodes that may not be measured."""
        return [node for node in self.nodes() if node.alive and node.left_out]

    def why_none(self) -> str:
        """Why there is no node that may be measured, for a sentence about the cluster."""
        count = len(self.left_out())
        if not count:
            return "has no living node to measure (`ray status` shows why)"
        who = "its only living node is" if count == 1 else f"all of its {count:,} living nodes are"
        label = "=".join(LEFT_OUT)
        return f"has no node to measure: {who} left out by the label {label}"

    def lease_gpus(
        self, node_ids: Sequence[str], timeout_seconds: float = LEASE_SECONDS
    ) -> list[Lease | None]:
        """One GPU of each named node, through Ray's own scheduler; None where none came free.

        A node named twice is asked for two different GPUs. Jobs are told of a lease by its
        `visible_devices`; `release` gives it back.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        holder = ray.remote(num_cpus=0, num_gpus=1, max_restarts=0)(_GpuHolder)
        held = [
            holder.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
            ).remote()
            for node_id in node_ids
        ]
        refs = [actor.ids.remote() for actor in held]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=timeout_seconds)
        leases: list[Lease | None] = []
        for actor, ref in zip(held, refs, strict=True):
            try:
                leases.append(Lease(actor, str(ray.get(ref, timeout=0.1))))
            except (ray.exceptions.RayError, OSError):
                ray.kill(actor)
                leases.append(None)
        return leases

    def explain(self, node_id: str, error: BaseException) -> str:
        """One sentence for whatever Ray raised about a node."""
        import ray

        self._keep_session = True
        name = type(error).__name__
        text = reason_of(str(error))
        for node in self.nodes():
            if node.node_id == node_id and not node.alive:
                reason = " ".join(node.death_reason.split())[:200]
                return f"the node died ({reason or 'Ray lost contact with it'})"
        if isinstance(error, ray.exceptions.GetTimeoutError):
            return "it did not answer in time"
        if isinstance(error, ray.exceptions.ActorUnavailableError):
            return "contact with its agent was lost (the agent or the node went down)"
        if isinstance(error, ray.exceptions.RayTaskError):
            cause = getattr(error, "cause", None)
            return f"its agent failed: {type(cause).__name__ if cause else name}: {cause or text}"
        if isinstance(error, ray.exceptions.RayActorError):
            return f"its agent ended: {text}"
        if isinstance(error, ray.exceptions.RuntimeEnvSetupError):
            return f"its environment could not be set up: {text}"
        return f"{name}: {text}"

    def close(self) -> None:
        """Leave the cluster; a local one is ended."""
        import ray

        try:
            ray.shutdown()
        finally:
            self._quiet.__exit__(None, None, None)
        if self._session is not None and not self._keep_session:
            remove_session(self._session)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._keep_session |= error is not None and not isinstance(error, KeyboardInterrupt)
        self.close()


def reason_of(text: str, most: int = 300) -> str:
    """One line of what Ray says of an error: the end of a traceback, where its reason stands, is
    kept when not all of it has room. Colours are left out."""
    plain = " ".join(_COLOUR.sub("", text).split())
    if len(plain) <= most:
        return plain
    lines = [line.strip() for line in _COLOUR.sub("", text).splitlines() if line.strip()]
    head, last = " ".join(lines[0].split()), " ".join(lines[-1].split())
    if len(lines) < 2:
        return f"{plain[: most // 3]} … {plain[-(most * 2 // 3) :]}"
    return f"{head[: most // 3]} … {last[-(most * 2 // 3) :]}"


def _resolved(address: str) -> str:
    """HOST:PORT of the cluster that is meant; "auto" where Ray knows of none on this machine.

    `ClusterError` for what is no address.
    """
    if address == "auto":
        from ray._private.services import get_ray_address_from_environment

        try:
            address = str(get_ray_address_from_environment("auto", None))
        except ConnectionError:
            return "auto"
    if not is_address(address):
        raise ClusterError(f"{address!r} is not a cluster's address: {_FORMS}")
    return address


def _why_not(address: str, error: BaseException) -> str:
    text = " ".join(str(error).split())
    short = text if len(text) <= 400 else f"{text[:400]}…"
    if address in ("", "local"):
        return f"no local Ray could be started: {short}"
    if "version" in text.lower() and "mismatch" in text.lower():
        hint = "install the same Ray and Python on this machine and on the cluster"
    elif "auth" in text.lower() or "token" in text.lower():
        hint = (
            "give this machine the cluster's token (~/.ray/auth_token or RAY_AUTH_TOKEN), see "
            "`ray get-auth-token`"
        )
    else:
        hint = "is it running there (`ray status --address …`), and reachable from here?"
    return f"no Ray cluster could be joined at {address}: {short}; {hint}"
