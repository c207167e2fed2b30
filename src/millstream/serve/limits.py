"""Limits on what a client may hold of a service, in force before its token is checked: connections, headers, bodies, responses.

A connection is *idle* unless a request on it is being answered. An idle one is closed if whole headers do not arrive in time.
When there are too many connections, the one that has been idle longest makes room for a new one: silent clients lock no other
client out. Bodies must arrive, and responses must be read, at a minimum rate.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from typing import Any

import h11
from msgspec import Struct
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from millstream.serve.auth import RETRY_AFTER_S, error_response
from millstream.serve.http import HttpError

SPARE_CONNECTIONS = 64  # of one peer beyond the requests that are served at once: these get the service's own refusal
MAX_BACKLOG = 2048
UNLIMITED_FILES = 1 << 20  # a number in place of no limit
_TOO_MANY = b'{"error": "too many connections: try again"}'
TOO_MANY_CONNECTIONS = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Retry-After: %d\r\nContent-Length: %d\r\n\r\n%s"
) % (RETRY_AFTER_S, len(_TOO_MANY), _TOO_MANY)


class HttpLimits(Struct, frozen=True, kw_only=True):
    headers_s: float = 10.0  # from the connection or the last response to the end of the headers
    header_bytes: int = 16 << 10
    stall_s: float = 10.0  # bodies and responses may fall behind the minimum rate for this long
    bytes_per_s: int = 64 << 10  # the minimum rate
    body_bytes: int = 1 << 30  # of all requests that are being served

    def __post_init__(self) -> None:
        if not (self.headers_s > 0 and self.stall_s > 0):
            raise ValueError("headers_s and stall_s must be above 0")
        if min(self.header_bytes, self.bytes_per_s, self.body_bytes) < 1:
            raise ValueError("header_bytes, bytes_per_s and body_bytes must be at least 1")


# ---- requests


class RequestLimits:
    """ASGI middleware: the size of headers, the rate of a body, and the bytes of all bodies together."""

    def __init__(self, app: ASGIApp, limits: HttpLimits) -> None:
        self._app = app
        self._limits = limits
        self._num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit, headers = self._limits.header_bytes, scope["headers"]
        size = (
            len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(name) + len(value) for name, value in headers)
        )
        if size > limit:
            await error_response(431, f"headers of more than {limit} bytes")(scope, receive, send)
            return
        body = LimitedBody(receive, self._limits)

        async def received() -> Message:
            before = body.num_bytes
            message = await body.receive()
            self._num_bytes += body.num_bytes - before
            if self._num_bytes > self._limits.body_bytes:
                why = f"the bodies of all requests have more than {self._limits.body_bytes} bytes: try again"
                raise HttpError(503, why)
            return message

        try:
            await self._app(scope, received, send)
        finally:
            self._num_bytes -= body.num_bytes


class LimitedBody:
    """The body of one request. Raises `HttpError` if it does not arrive in time."""

    def __init__(self, receive: Receive, limits: HttpLimits) -> None:
        self._receive = receive
        self._limits = limits
        self._begin = asyncio.get_running_loop().time()
        self._is_whole = False
        self.num_bytes = 0

    async def receive(self) -> Message:
        if self._is_whole:
            return await self._receive()
        limits = self._limits
        until = self._begin + limits.stall_s + self.num_bytes / limits.bytes_per_s
        try:
            async with asyncio.timeout_at(until):
                message = await self._receive()
        except TimeoutError as late:
            rate = f"expected at least {limits.bytes_per_s} bytes/s, and at most {limits.stall_s:g} s behind"
            raise HttpError(408, f"the body was not received in time: {rate}") from late
        self.num_bytes += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        return message


# ---- connections


class ConnectionTable:
    """The connections of one server, by peer, and which of them are idle."""

    def __init__(self, max_requests: int) -> None:
        self._max_per_peer = max_requests + SPARE_CONNECTIONS
        num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if num_files == resource.RLIM_INFINITY:
            num_files = UNLIMITED_FILES
        self._max_connections = min(2 * self._max_per_peer, num_files // 2)
        # asyncio accepts this many at a time, and again before the first of them are counted here
        self.backlog = min(MAX_BACKLOG, (num_files - self._max_connections) // 8)
        self._peers: dict[LimitedProtocol, str] = {}
        self._num_of_peer: Counter[str] = Counter()
        self._idle: dict[LimitedProtocol, None] = {}  # the longest idle first

    def add(self, connection: LimitedProtocol, peer: str) -> bool:
        """Whether there is room. If not, the connection that has been idle longest is closed to make room."""
        is_peer_full = self._num_of_peer[peer] >= self._max_per_peer
        if is_peer_full or len(self._peers) >= self._max_connections:
            idle = (one for one in self._idle if not is_peer_full or self._peers[one] == peer)
            oldest = next((one for one in idle if not one.transport.get_write_buffer_size()), None)
            if oldest is None:
                return False
            self.remove(oldest)
            oldest.transport.abort()
        self._peers[connection] = peer
        self._num_of_peer[peer] += 1
        return True

    def remove(self, connection: LimitedProtocol) -> None:
        peer = self._peers.pop(connection, None)
        self._idle.pop(connection, None)
        if peer is not None:
            self._num_of_peer[peer] -= 1
            if not self._num_of_peer[peer]:
                del self._num_of_peer[peer]

    def set_idle(self, connection: LimitedProtocol) -> None:
        if connection in self._peers:
            self._idle[connection] = None

    def set_busy(self, connection: LimitedProtocol) -> None:
        self._idle.pop(connection, None)


class LimitedProtocol(H11Protocol):
    """One connection. Its timer runs while it is idle, and while a response waits for the client to read it."""

    def __init__(self, *args: Any, limits: HttpLimits, table: ConnectionTable, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._table = table
        self._is_busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._period_s = 0.0
        self._num_unsent = 0  # bytes when the timer was started

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._table.add(self, self.client[0] if self.client else ""):
            transport.write(TOO_MANY_CONNECTIONS)
            transport.close()
            return
        self._become_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # a malformed request whose response was sent already
            self.transport.abort()
        self._update()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_timer(self._limits.stall_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._is_busy:
            self._stop_timer()

    def _update(self) -> None:
        was_busy = self._is_busy
        self._is_busy = self.cycle is not None and not self.cycle.response_complete
        if self._is_busy and not was_busy:
            self._table.set_busy(self)
            self._stop_timer()
            if self.flow.write_paused:  # by the response before this one
                self._start_timer(self._limits.stall_s)
        elif was_busy and not self._is_busy:
            self._become_idle()

    def _become_idle(self) -> None:
        self._table.set_idle(self)
        self._start_timer(self._limits.headers_s)

    def _start_timer(self, period_s: float) -> None:
        self._stop_timer()
        self._period_s = period_s
        self._num_unsent = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(period_s, self._on_timer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        num_unsent = self.transport.get_write_buffer_size()
        if not num_unsent:
            self.transport.close()
        elif self._num_unsent - num_unsent < self._limits.bytes_per_s * self._period_s:
            self.transport.abort()
        else:
            self._start_timer(self._period_s)
