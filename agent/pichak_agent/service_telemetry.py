"""The node's telemetry inside its service, and over HTTP where that is wanted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pichak_agent.home import default_root
from pichak_agent.metrics_server import MetricsServer, serve_metrics
from pichak_agent.problems_file import told_problems
from pichak_agent.service_files import ServiceError
from pichak_agent.telemetry import Telemetry

LOOPBACK = "127.0.0.1"


class Beside:
    """Samples this node while its service runs, whether its head is there or not."""

    def __init__(self, port: int | None, say: Callable[[str], None]) -> None:
        """`port` is where the metrics are served on loopback; None serves none, 0 a free one."""
        self._port, self._say = port, say
        self._telemetry = Telemetry(default_root())
        self._server: MetricsServer | None = None

    def start(self) -> str:
        """Begin; the address of the metrics, "" without them. `ServiceError` when the port is
        taken."""
        if self._port is not None:
            try:
                self._server = serve_metrics(self._telemetry, LOOPBACK, self._port)
            except OSError as error:
                raise ServiceError(
                    f"--metrics-port {self._port}: {error.strerror or error}; choose another, or 0 "
                    "for a free one"
                ) from error
        self._telemetry.start()
        if self._server is None:
            return ""
        where = f"http://{LOOPBACK}:{self._server.port}/metrics"
        self._say(f"metrics at {where}")
        return where

    def state(self) -> dict[str, Any]:
        """What whoever samples this node has seen, without its ring (`Telemetry.as_json`)."""
        return self._telemetry.as_json(ring=False)

    def stop(self) -> None:
        """End both, and the process that reads NVML."""
        if self._server is not None:
            self._server.close()
        self._telemetry.stop()


def problems_on_node(home: Path, *, simulated: bool = False) -> list[str]:
    """What the agents of this home and whoever samples the node tell as problems, each once."""
    told = told_problems(home, everywhere=not simulated)
    if not simulated:
        state = Telemetry(home, start_nvml=None).as_json(ring=False)
        listed = state["problems"] if not state["stale"] else ()
        told += [each for each in listed if isinstance(each, str)]
    return list(dict.fromkeys(told))


def found_on_node(home: Path) -> list[dict[str, Any]]:
    """What the telemetry of whoever samples this node has found, the worst first."""
    return Telemetry(home, start_nvml=None).findings()
