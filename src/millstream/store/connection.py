"""A client's connection to the coordinator: requests are answered in any order, and each is carried out once.

A connection that breaks is made again, and unanswered requests are repeated under their numbers. Errors of the coordinator are
raised as the classes of `millstream.errors` that they have there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

import millstream.errors
from millstream.decoding import msgpack_decoder
from millstream.errors import StoreError
from millstream.retry import BackOff, Retry
from millstream.rpc.frames import FrameError, FrameProtocol
from millstream.store import wire

RECONNECT = BackOff(first_s=0.05, longest_s=0.5)
CONNECT_TIMEOUT_S = 5.0
"""Of one attempt."""


class CoordinatorConnection:
    """`on_unclaimed` gets answers whose caller is gone, and what the coordinator sends unasked."""

    def __init__(
        self,
        address: tuple[str, int],
        hello: wire.StoreHello,
        give_up_s: float,
        on_unclaimed: Callable[[wire.ReplyBody], None],
    ) -> None:
        self._address = address
        self._hello = hello
        self._give_up_s = give_up_s
        self._on_unclaimed = on_unclaimed
        self._loop = asyncio.get_running_loop()
        self._connection: FrameProtocol | None = None
        self._waiting: dict[int, tuple[wire.RequestBody, asyncio.Future[wire.ReplyBody]]] = {}
        self._received: list[int] = []  # answers that the coordinator need not keep
        self._next_number = 1
        self._decoder = msgpack_decoder(wire.StoreReply)
        self._reconnecting: asyncio.Task[None] | None = None
        self._error: StoreError | None = None
        self._has_failed = asyncio.Event()

    async def connect(self) -> None:
        """Raises `StoreError` if there is no coordinator for `give_up_s`, or if it refuses."""
        retry = Retry(RECONNECT, give_up_s=self._give_up_s)
        while True:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await self._greet()
                break
            except OSError as error:
                wait_s = retry.failed(self._loop.time())
                if wait_s is None:
                    host, port = self._address
                    self._fail(StoreError(f"no store at {host}:{port} for {self._give_up_s:g} s: {error}"))
                    raise self._error or error from error
                await asyncio.sleep(wait_s)
        for number, (body, future) in sorted(self._waiting.items()):
            if not future.done():
                self._send(number, body)

    async def _greet(self) -> None:
        welcome: asyncio.Future[None] = self._loop.create_future()

        def on_message(message: memoryview) -> None:
            reply = self._decoder.decode(message)
            if welcome.done():
                self._on_reply(reply)
            elif isinstance(reply.body, wire.RequestFailed):
                welcome.set_exception(StoreError(reply.body.message))
            else:
                welcome.set_result(None)

        def on_lost() -> None:
            if not welcome.done():
                welcome.set_exception(ConnectionResetError("the coordinator closed the connection"))
            elif self._connection is connection and self._error is None:
                self._connection = None
                self._reconnecting = self._loop.create_task(self._reconnect())

        connection = FrameProtocol(on_message, on_lost)
        await self._loop.create_connection(lambda: connection, *self._address)
        hello = msgspec.structs.replace(self._hello, waiting=list(self._waiting))
        connection.send(wire.StoreRequest(0, [], hello))
        await welcome
        if connection.transport is None or connection.transport.is_closing():
            raise ConnectionResetError("the coordinator closed the connection")
        self._connection = connection

    async def _reconnect(self) -> None:
        try:
            await self.connect()
        except StoreError as error:
            self._fail(error)

    async def lost(self) -> None:
        """Returns when the connection is closed, or could not be made again for `give_up_s`."""
        await self._has_failed.wait()

    def _fail(self, error: StoreError) -> None:
        self._error = error
        self._has_failed.set()
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()

    def close(self) -> None:
        self._fail(StoreError("this client of the store was closed"))
        if self._reconnecting is not None:
            self._reconnecting.cancel()
        if self._connection is not None:
            self._connection.close()

    def _send(self, number: int, body: wire.RequestBody) -> None:
        if self._connection is not None:
            received = self._received
            self._received = []
            self._connection.send(wire.StoreRequest(number, received, body))

    def _on_reply(self, reply: wire.StoreReply) -> None:
        waiting = self._waiting.get(reply.number)
        if waiting is not None and not waiting[1].done():
            waiting[1].set_result(reply.body)
        else:
            self._on_unclaimed(reply.body)

    def _begin(self, body: wire.RequestBody) -> tuple[int, asyncio.Future[wire.ReplyBody]]:
        number, future = self._next_number, self._loop.create_future()
        self._next_number += 1
        self._waiting[number] = (body, future)
        return number, future

    def _forget(self, number: int, future: asyncio.Future[wire.ReplyBody]) -> None:
        if self._waiting.pop(number, None) is not None and future.done():
            self._received.append(number)

    def tell(self, body: wire.RequestBody) -> None:
        """Send a request without waiting for the answer. It is repeated if the connection breaks before the answer."""
        if self._error is not None:
            return
        number, future = self._begin(body)

        def on_done(done: asyncio.Future[wire.ReplyBody]) -> None:
            if not done.cancelled():
                done.exception()  # it is not read otherwise
            self._forget(number, done)

        future.add_done_callback(on_done)
        self._send(number, body)

    async def call(self, body: wire.RequestBody) -> Any:
        """The answer. If the caller is cancelled, so is the request."""
        if self._error is not None:
            raise self._error
        number, future = self._begin(body)
        try:
            try:
                self._send(number, body)
            except (TypeError, OverflowError, msgspec.EncodeError, FrameError) as error:
                raise StoreError(f"{type(body).__name__} cannot be sent: {error}") from error
            answer = await future
        except asyncio.CancelledError:
            self.tell(wire.CancelRequest(number))
            if future.done() and not future.cancelled() and future.exception() is None:
                self._on_unclaimed(future.result())
            raise
        finally:
            self._forget(number, future)
        if isinstance(answer, wire.RequestFailed):
            kind = getattr(millstream.errors, answer.kind, StoreError)
            raise kind(answer.message)
        return answer

    def repeat(self, kind: type[wire.RequestBody], change: Callable[[Any], wire.RequestBody]) -> None:
        """Send the waiting requests of this kind again, changed."""
        for number, (body, future) in list(self._waiting.items()):
            if isinstance(body, kind) and not future.done():
                self.tell(wire.CancelRequest(number))
                self._waiting[number] = (change(body), future)
                self._send(number, self._waiting[number][0])
