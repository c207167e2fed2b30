"""Reading requests within limits, answering them in the language that they came in, and noticing who has hung up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from millstream.serve.store import columns as cells

T = TypeVar("T")
B = TypeVar("B", bound=Struct)


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class HungUp(Exception): ...


class Talk:
    """Reading requests and writing answers, within the limits."""

    def __init__(self, *, max_body_bytes: int, max_wait_s: float) -> None:
        self._max_body_bytes = max_body_bytes
        self._max_wait_s = max_wait_s

    async def read(self, request: Request, kind: type[B]) -> B:
        body = await self._body(request)
        sent_as = sent_in(request)
        if not body:
            sent_as, body = cells.JSON, b"{}"
        elif sent_as is None:
            raise Refused(415, f"expected a body of Content-Type {cells.JSON} or {cells.MESSAGEPACK}")
        try:
            if sent_as == cells.MESSAGEPACK:
                return msgspec.msgpack.decode(body, type=kind)
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as wrong:
            known = f". Known: {', '.join(kind.__struct_fields__)}" if "unknown field" in str(wrong) else ""
            raise Refused(400, f"{request.method} {request.url.path}: {wrong}{known}") from wrong

    async def _body(self, request: Request) -> bytes:
        most, body = self._max_body_bytes, bytearray()
        length = request.headers.get("content-length", "0")
        is_too_long = length.isdecimal() and int(length) > most
        if not is_too_long:
            async for chunk in request.stream():
                body += chunk
                if is_too_long := len(body) > most:
                    break
        if is_too_long:
            raise Refused(413, f"a body of more than {most} bytes: send less at a time")
        return bytes(body)

    def wait_s(self, value: float) -> float:
        return seconds("wait_s", value, self._max_wait_s)


def seconds(name: str, value: float, most: float) -> float:
    if not 0 <= value <= most:
        raise Refused(400, f"{name} = {value:g}: expected 0 to {most:g} seconds")
    return value


def sent_in(request: Request) -> str | None:
    return _kind_of(request.headers.get("content-type", ""))


def _kind_of(content_type: str) -> str | None:
    name = content_type.partition(";")[0].strip().lower()
    known = {"application/x-msgpack": cells.MESSAGEPACK, "application/vnd.msgpack": cells.MESSAGEPACK}
    name = known.get(name, name)
    return name if name in (cells.JSON, cells.MESSAGEPACK) else None


def answer(request: Request, value: Any, status: int = 200) -> Response:
    """In what is accepted; else in what was sent."""
    accepted = (_kind_of(part) for part in request.headers.get("accept", "").split(","))
    kind = next((k for k in accepted if k), None) or sent_in(request) or cells.JSON
    return Response(cells.encode(value, kind), status, media_type=kind)


def done() -> Response:
    return Response(status_code=204)


async def unless_hung_up(
    request: Request, work: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[None]] | None = None
) -> T:
    """What the work gives. If the client hangs up first the work is cancelled; if it had been done by then, undone."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_hang_up(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not gone.done():
            return task.result()
        raise HungUp
    except (HungUp, asyncio.CancelledError):
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        if undo is not None and not isinstance(outcome, BaseException):
            await undo(outcome)
        raise
    finally:
        gone.cancel()


async def _hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
