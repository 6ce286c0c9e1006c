"""A watch's metrics over HTTP: ``/metrics`` for Prometheus, ``/healthz`` for who restarts it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import TYPE_CHECKING

from pichak_coordinator.fleet_metrics import families
from pichak_coordinator.watch_view import WatchView

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

#: A loop that has not turned for so long hangs. Ray itself may take a minute to say that the
#: cluster's head does not answer.
HANGS_SECONDS = 180.0
_REQUEST_SECONDS = 10.0


class MetricsError(RuntimeError):
    """The metrics cannot be served: what, where, and what to do."""


class MetricsServer:
    """Serves the last view that it was shown, while it is used as a context manager.

    Raises `MetricsError` where prometheus-client is missing or the port cannot be had.
    """

    def __init__(
        self,
        port: int,
        host: str = "127.0.0.1",
        *,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        try:
            from prometheus_client import CollectorRegistry
        except ImportError as error:
            raise MetricsError(
                "--metrics-port needs the package prometheus-client: "
                "pip install 'pichak-fleet[metrics]'"
            ) from error
        self._view, self._steady = WatchView(clock(), clock()), steady
        self._shown = steady()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        registry, healthy = self._registry, self._healthy

        class Handler(_Handler):
            made = staticmethod(lambda accept: _page(registry, accept))
            health = staticmethod(healthy)

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except (OSError, OverflowError, UnicodeError) as error:
            raise MetricsError(
                f"--metrics-host {host} --metrics-port {port}: {error}; give another port, or 0 "
                "for a free one"
            ) from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_address[1]}/metrics"

    def show(self, view: WatchView) -> None:
        """From now on this is what is served."""
        self._view, self._shown = view, self._steady()

    def collect(self) -> Iterator[Metric]:
        """As prometheus-client asks a collector."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for family in families(self._view):
            if not family.samples:
                continue
            made = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = made(family.name, family.help, labels=family.labels)
            for values, number in family.samples.items():
                metric.add_metric(values, number)
            yield metric

    def _healthy(self) -> bool:
        return self._steady() - self._shown < HANGS_SECONDS

    def __enter__(self) -> MetricsServer:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_REQUEST_SECONDS)


def _page(registry: CollectorRegistry, accept: str) -> tuple[str, bytes]:
    from prometheus_client.exposition import choose_encoder

    encode, kind = choose_encoder(accept)
    return kind, encode(registry)


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_SECONDS
    made: Callable[[str], tuple[str, bytes]]
    health: Callable[[], bool]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._send(200, *self.made(self.headers.get("Accept", "")))
        elif path == "/healthz":
            fine = self.health()
            self._send(200 if fine else 503, "text/plain", b"ok\n" if fine else b"it hangs\n")
        else:
            self._send(404, "text/plain", b"/metrics /healthz\n")

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.close_connection = True
        # Whoever asked may have hung up.
        with contextlib.suppress(ConnectionError, TimeoutError):
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing: a scrape every few seconds is no news."""
