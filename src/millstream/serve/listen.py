"""A service on a socket of its own, until it is cancelled or a signal comes."""

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
    """Port 0: one that is free. `on_ready` is told where it listens. Whoever still waits at the end is let go. `token` is what
    the app asks for: raises `ConfigError` where others can reach it and it asks for none."""
    check_token(host, token)
    is_six = ":" in host
    listening = socket.socket(socket.AF_INET6 if is_six else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # with its protocol named, asyncio sends at once what it has; without, answers wait for the client's next packet
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
