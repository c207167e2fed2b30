"""HTTP for both services: request bodies within limits, responses in the client's format, and cancellation on disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from millstream.decoding import decode_json, decode_msgpack
from millstream.serve.store.columns import JSON, MESSAGEPACK, encode_body

T = TypeVar("T")
B = TypeVar("B", bound=Struct)


class HttpError(Exception):
    """A request that is refused with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ClientGone(Exception):
    """The client disconnected before its response was ready."""


class EmptyBody(Struct, forbid_unknown_fields=True, kw_only=True): ...


class BodyReader:
    """Reads request bodies as structs, within the limits."""

    def __init__(self, *, max_body_bytes: int, max_wait_s: float) -> None:
        self._max_body_bytes = max_body_bytes
        self._max_wait_s = max_wait_s

    async def read(self, request: Request, kind: type[B]) -> B:
        body = await self.raw(request)
        sent_as = content_type_of(request)
        if not body:
            sent_as, body = JSON, b"{}"
        elif sent_as is None:
            raise HttpError(415, f"expected a body of Content-Type {JSON} or {MESSAGEPACK}")
        try:
            if sent_as == MESSAGEPACK:
                return decode_msgpack(body, kind)
            return decode_json(body, kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as wrong:
            known = f". Known: {', '.join(kind.__struct_fields__)}" if "unknown field" in str(wrong) else ""
            raise HttpError(400, f"{request.method} {request.url.path}: {wrong}{known}") from wrong

    async def raw(self, request: Request) -> bytes:
        """The bytes, within the limit. Raises `HttpError`."""
        limit, body = self._max_body_bytes, bytearray()
        length = request.headers.get("content-length", "0")
        is_too_long = length.isdecimal() and int(length) > limit
        if not is_too_long:
            async for chunk in request.stream():
                body += chunk
                if is_too_long := len(body) > limit:
                    break
        if is_too_long:
            raise HttpError(413, f"a body of more than {limit} bytes: send less at a time")
        return bytes(body)

    def wait_s(self, value: float) -> float:
        return check_seconds("wait_s", value, self._max_wait_s)


def check_seconds(name: str, value: float, limit: float) -> float:
    if not 0 <= value <= limit:
        raise HttpError(400, f"{name} = {value:g}: expected 0 to {limit:g} seconds")
    return value


def content_type_of(request: Request) -> str | None:
    return _kind_of(request.headers.get("content-type", ""))


def _kind_of(content_type: str) -> str | None:
    name = content_type.partition(";")[0].strip().lower()
    known = {"application/x-msgpack": MESSAGEPACK, "application/vnd.msgpack": MESSAGEPACK}
    name = known.get(name, name)
    return name if name in (JSON, MESSAGEPACK) else None


def respond(request: Request, value: Any, status: int = 200) -> Response:
    """In a format that the client accepts; otherwise in the format of the request."""
    accepted = (_kind_of(part) for part in request.headers.get("accept", "").split(","))
    kind = next((k for k in accepted if k), None) or content_type_of(request) or JSON
    return Response(encode_body(value, kind), status, media_type=kind)


def no_content() -> Response:
    return Response(status_code=204)


async def until_disconnect(
    request: Request, work: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[None]] | None = None
) -> T:
    """The result of `work`. If the client disconnects first, the work is cancelled, or undone if it was finished by then."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not gone.done():
            return task.result()
        raise ClientGone
    except (ClientGone, asyncio.CancelledError):
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        if undo is not None and not isinstance(outcome, BaseException):
            await undo(outcome)
        raise
    finally:
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
