"""Telemetry over HTTP, for whoever may read this node's loopback: ``/metrics``, ``/ring.json``,
``/findings.json``, ``/healthz``."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from pichak_agent.metrics_text import CONTENT_TYPE
from pichak_agent.telemetry import Telemetry

_JSON = "application/json"
_SECONDS = 10.0


class MetricsServer:
    """Serves until `close()`; `port` is the one it got."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self._server = server
        self.port: int = server.server_address[1]
        self._thread = threading.Thread(
            target=server.serve_forever,
            kwargs={"poll_interval": 1.0},
            name="metrics",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10.0)


def serve_metrics(telemetry: Telemetry, host: str = "127.0.0.1", port: int = 0) -> MetricsServer:
    """Answer on `host` and `port` (0: a free one). `OSError` when that is taken or not ours."""
    pages: dict[str, tuple[str, Callable[[], str]]] = {
        "/metrics": (CONTENT_TYPE, telemetry.prometheus),
        "/ring.json": (_JSON, lambda: json.dumps(telemetry.as_json())),
        "/findings.json": (_JSON, lambda: json.dumps(telemetry.findings())),
    }

    class Handler(_Handler):
        answers = pages
        healthy = staticmethod(lambda: not telemetry.as_json(ring=False).get("stale"))

    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    return MetricsServer(server)


class _Handler(BaseHTTPRequestHandler):
    timeout = _SECONDS
    answers: Mapping[str, tuple[str, Callable[[], str]]] = {}
    healthy: Callable[[], bool]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/healthz":
            fine = self.healthy()
            self._send(200 if fine else 503, "text/plain", "ok\n" if fine else "stale\n")
        elif path in self.answers:
            kind, make = self.answers[path]
            self._send(200, kind, make())
        else:
            self._send(404, "text/plain", "/metrics /ring.json /findings.json /healthz\n")

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing: a scrape every few seconds is no news."""
