"""Requests to an ASGI application in this process: no socket, no client library."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message


class Answer(NamedTuple):
    status: int
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


async def send(
    app: ASGIApp, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> Answer:
    """`body`: bytes as they are, None for none, anything else as JSON."""
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    sent = {"host": "localhost", "content-type": "application/json"} | dict(headers or {})
    scope = {
        "type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "scheme": "http", "server": ("localhost", 80), "client": ("127.0.0.1", 1), "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in sent.items()],
    }  # fmt: skip
    requests: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]
    status, found = 0, bytearray()

    async def receive() -> Message:
        if requests:
            return requests.pop()
        await asyncio.get_running_loop().create_future()  # it stays connected
        raise AssertionError

    async def answered(message: Message) -> None:
        nonlocal status, found
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            found += message.get("body", b"")

    await app(scope, receive, answered)
    return Answer(status, bytes(found))
