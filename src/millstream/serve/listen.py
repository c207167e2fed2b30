"""Serve an ASGI application on a socket until cancelled or stopped by a signal."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from millstream.errors import ConfigError
from millstream.serve.auth import check_token

GRACE_S = 2
BACKLOG = 2048


async def listen(app: ASGIApp, host: str, port: int, *, token: str | None, on_ready: Callable[[str], None]) -> None:
    """Port 0: a free one. `on_ready` is called with the URL. Requests that wait at the end are cancelled. `token` is what the
    app requires: raises `ConfigError` if other machines can reach the host and there is none."""
    check_token(host, token)
    is_six = ":" in host
    listening = socket.socket(socket.AF_INET6 if is_six else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # IPPROTO_TCP makes asyncio set TCP_NODELAY; otherwise responses wait for the client's next packet
    with listening:
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            listening.listen(BACKLOG)
        except OSError as wrong:
            raise ConfigError(f"cannot listen on {host}:{port}: {wrong.strerror or wrong}") from wrong
        name = f"[{host}]" if is_six else host
        server = uvicorn.Server(
            uvicorn.Config(
                app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=GRACE_S
            )
        )
        on_ready(f"http://{name}:{listening.getsockname()[1]}")
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            await asyncio.shield(serving)
        finally:
            server.should_exit = True
            await serving
