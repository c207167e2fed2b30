"""The endpoint for Prometheus: `GET /metrics`, and a dashboard for Grafana, `GET /grafana.json`.

Served on threads of its own from what the sink has counted: a scrape asks nothing of the run and waits for nothing of it. At
most `MAX_CLIENTS` are answered at once, each within `CLIENT_S`; further connections are closed.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from millstream.events import Event
from millstream.events.prometheus import PrometheusMetrics
from millstream.run.tracking.config import listening_socket

MAX_CLIENTS = 8
CLIENT_S = 5.0
DASHBOARD = Path(__file__).with_name("grafana.json")


class PrometheusSink:
    """An event sink. Nothing is served before `start`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._metrics = PrometheusMetrics()
        self._server: _Server | None = None

    def emit(self, event: Event) -> None:
        self._metrics.add(event)

    def start(self, *, run_id: str, name: str, steps: int, lag_bound: int) -> None:
        """Raises `ConfigError` if the port is taken."""
        self._metrics.set_run(run_id=run_id, name=name, steps=steps, lag_bound=lag_bound)
        self._server = _Server(listening_socket(self._address), self._metrics)
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    def finish(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, listening: socket.socket, metrics: PrometheusMetrics) -> None:
        super().__init__(listening.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.metrics = metrics
        self._places = threading.BoundedSemaphore(MAX_CLIENTS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        deadline = threading.Timer(CLIENT_S, _disconnect, (request,))
        deadline.daemon = True
        try:
            deadline.start()
            super().process_request_thread(request, client_address)
        finally:
            deadline.cancel()
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is gone."""


def _disconnect(request: socket.socket) -> None:
    with suppress(OSError):  # it is closed
        request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        match self.path.partition("?")[0]:
            case "/metrics" | "/":
                self._answer(200, "text/plain; version=0.0.4; charset=utf-8", self.server.metrics.text().encode())
            case "/grafana.json":
                self._answer(200, "application/json", DASHBOARD.read_bytes())
            case _:
                self._answer(404, "text/plain; charset=utf-8", b"GET /metrics or /grafana.json\n")

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        with suppress(OSError):  # the client is gone
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a scrape is not worth a line."""
