"""Serve an ASGI application on a socket until cancelled or stopped by a signal."""

from __future__ import annotations

import asyncio
import errno
import math
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from millstream.errors import ConfigError
from millstream.serve.auth import check_token
from millstream.serve.limits import ConnectionTable, HttpLimits, LimitedProtocol, RequestLimits

GRACE_S = 2


class _Inside(uvicorn.Server):
    """A server in a program that has its own signal handlers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def listening_at(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    token: str | None,
    max_requests: int,
    limits: HttpLimits,
    port_option: str = "--port",
) -> AsyncIterator[str]:
    """Serve while the block lasts, in a program that has its own signal handlers. Yields the URL. Raises as `listen` does."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        listen(
            app,
            host,
            port,
            token=token,
            max_requests=max_requests,
            limits=limits,
            on_ready=ready.set_result,
            port_option=port_option,
            handles_signals=False,
        )
    )
    try:
        both: list[asyncio.Future[Any]] = [ready, serving]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            await serving  # raises why
        yield ready.result()
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def listen(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    token: str | None,
    max_requests: int,
    limits: HttpLimits,
    on_ready: Callable[[str], None],
    port_option: str = "--port",
    handles_signals: bool = True,
) -> None:
    """Port 0: a free one. `on_ready` is called with the URL. Requests that wait at the end are cancelled. `token` is what the
    app requires: raises `ConfigError` if other machines can reach the host and there is none. `max_requests` is the number
    that the app serves at once: the number of connections follows from it. `port_option`: what sets the port, for messages."""
    check_token(host, token)
    table = ConnectionTable(max_requests)
    is_six = ":" in host
    listening = socket.socket(socket.AF_INET6 if is_six else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # IPPROTO_TCP makes asyncio set TCP_NODELAY; otherwise responses wait for the client's next packet
    with listening:
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            listening.listen(table.backlog)
        except OSError as wrong:
            advice = f". Choose another {port_option}; 0 is any free one" if wrong.errno == errno.EADDRINUSE else ""
            raise ConfigError(f"cannot listen on {host}:{port}: {wrong.strerror or wrong}{advice}") from wrong
        name = f"[{host}]" if is_six else host
        protocol = partial(LimitedProtocol, limits=limits, table=table)
        server = (uvicorn.Server if handles_signals else _Inside)(
            uvicorn.Config(
                RequestLimits(app, limits),
                http=protocol,  # type: ignore[arg-type]  # called, never subclassed
                ws="none",
                log_level="error",  # malformed requests are warnings: no client may fill the log
                access_log=False,
                lifespan="off",
                backlog=table.backlog,
                timeout_keep_alive=math.ceil(limits.headers_s) + 1,  # the protocol's own timer ends before
                timeout_graceful_shutdown=GRACE_S,
                h11_max_incomplete_event_size=limits.header_bytes,
            )
        )
        on_ready(f"http://{name}:{listening.getsockname()[1]}")
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            await asyncio.shield(serving)
        finally:
            server.should_exit = True
            await serving
