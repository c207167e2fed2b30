"""The coordinator's client sessions: connect, reconnect, expire, and answers that a client may ask for again."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import msgspec

from millstream.decoding import msgpack_decoder
from millstream.errors import StoreError
from millstream.rpc.frames import MAX_FRAME_BYTES, FrameError, FrameProtocol
from millstream.store import wire

DISCONNECT_S = 2.0
"""How long a client may be disconnected before it is expired."""
LONGER = 10
"""The factor for segment servers, and for every client after a restart of the coordinator."""
FORGET_S = 3600.0
"""How long the answers to an expired client are kept: it may still be alive, and repeat requests that were carried out."""
encode_reply = msgspec.msgpack.Encoder().encode
decode_reply = msgpack_decoder(wire.ReplyBody).decode


class ClientSession:
    """What the coordinator knows about one client process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.node = ""
        self.connection: FrameProtocol | None = None
        self.address: tuple[str, int] | None = None  # of a segment server
        self.is_segment_server = False
        self.results: dict[int, bytes] = {}  # answers to changes, which the client may not have received
        self.grants: dict[int, int] = {}  # request -> lease
        self.running: dict[int, asyncio.Task[None]] = {}
        self.reserved: dict[str, tuple[int, int]] = {}  # segment -> rows and bytes of room
        self.shown: set[int] = set()  # leases whose segments it knows, and will close
        self.expiry: asyncio.TimerHandle | None = None

    def answer(self, number: int, body: wire.ReplyBody) -> None:
        if self.connection is None:
            return
        try:
            self.connection.send(wire.StoreReply(number, body))
        except FrameError as error:
            failed = wire.RequestFailed("StoreError", f"{error}: ask for less at a time")
            self.connection.send(wire.StoreReply(number, failed))

    def remembered(self, number: int, body: wire.ReplyBody) -> wire.ReplyBody:
        """Keep an answer until the client has received it."""
        self.results[number] = encode_reply(body)
        return body

    def run(self, number: int, work: Coroutine[Any, Any, wire.ReplyBody]) -> None:
        """Answer a request when this work is done."""

        async def answer() -> None:
            try:
                result = await work
            except Exception as error:  # also of a user's policy
                result = failure_of(error)
            finally:
                if self.running.get(number) is task:
                    del self.running[number]
            self.answer(number, result)

        task = self.running[number] = asyncio.get_running_loop().create_task(answer())
        task.add_done_callback(lambda _: work.close())  # cancelled before it began, it would never be awaited

    def forget_received(self, numbers: list[int]) -> None:
        for number in numbers:
            self.results.pop(number, None)
            self.grants.pop(number, None)

    def forget_all_but(self, waiting: set[int]) -> None:
        self.results = {number: answer for number, answer in self.results.items() if number in waiting}
        self.grants = {number: lease for number, lease in self.grants.items() if number in waiting}


class ClientSessions:
    """All clients, by name. `on_request` is called for each request of an authenticated client, `on_expired` when a client
    was disconnected for too long."""

    def __init__(
        self,
        token: str,
        disconnect_s: float,
        on_request: Callable[[ClientSession, wire.StoreRequest], None],
        on_expired: Callable[[ClientSession], None],
    ) -> None:
        self._token = token
        self._disconnect_s = disconnect_s
        self._on_request = on_request
        self._on_expired = on_expired
        self._decoder = msgpack_decoder(wire.StoreRequest)
        self.by_name: dict[str, ClientSession] = {}
        self._connected = asyncio.Event()  # of the next client that connects

    async def find_node(self, node: str) -> tuple[str, int] | None:
        """The address of a node's segment server, once that is connected. None: it did not reconnect before it expires."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LONGER * self._disconnect_s):
                while node not in self.addresses():
                    await self._connected.wait()
        return self.addresses().get(node)

    def find(self, name: str) -> ClientSession:
        session = self.by_name.get(name)
        if session is None:
            session = self.by_name[name] = ClientSession(name)
        return session

    def connect(self) -> FrameProtocol:
        """The protocol of a new connection."""
        sessions: list[ClientSession] = []

        def on_message(message: memoryview) -> None:
            request = self._decoder.decode(message)
            if isinstance(request.body, wire.StoreHello):
                sessions[:] = self._greet(connection, request.number, request.body)
            elif sessions and sessions[0].connection is connection:
                self._on_request(sessions[0], request)
            else:
                connection.abort()

        def on_lost() -> None:
            if sessions and sessions[0].connection is connection:
                sessions[0].connection = None
                self.start_expiry(sessions[0])

        connection = FrameProtocol(on_message, on_lost, wire.MAX_GREETING_BYTES)
        return connection

    def _greet(self, connection: FrameProtocol, number: int, hello: wire.StoreHello) -> list[ClientSession]:
        """The session, unless the token is wrong."""
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            connection.send(
                wire.StoreReply(number, wire.RequestFailed("StoreError", "the token is not that of this store"))
            )
            connection.close()
            return []
        session = self.find(hello.client)
        if session.connection is not None:
            session.connection.abort()  # an older connection: unanswered requests are repeated on the new one
        session.connection = connection
        session.node = hello.node
        session.address = hello.address
        session.is_segment_server = hello.address is not None
        session.forget_all_but(set(hello.waiting))
        if session.expiry is not None:
            session.expiry.cancel()
            session.expiry = None
        connection.max_bytes = MAX_FRAME_BYTES
        connection.send(wire.StoreReply(number, wire.Welcome()))
        self._connected.set()
        self._connected = asyncio.Event()
        return [session]

    def start_expiry(self, session: ClientSession, *, is_after_restart: bool = False) -> None:
        """The client is disconnected: it is expired unless it reconnects in time."""
        if session.expiry is None:
            is_longer = is_after_restart or session.is_segment_server
            wait_s = (LONGER if is_longer else 1) * self._disconnect_s
            session.expiry = asyncio.get_running_loop().call_later(wait_s, self._expire, session)

    def _expire(self, session: ClientSession) -> None:
        for task in session.running.values():
            task.cancel()
        session.running = {}
        session.shown = set()
        self._on_expired(session)
        session.expiry = asyncio.get_running_loop().call_later(FORGET_S, self.by_name.pop, session.name, None)

    def addresses(self) -> dict[str, tuple[str, int]]:
        """By node: where its segment server listens."""
        connected = [one for one in self.by_name.values() if one.connection is not None]
        return {session.node: session.address for session in connected if session.address is not None}


def failure_of(error: Exception) -> wire.RequestFailed:
    if isinstance(error, StoreError):
        return wire.RequestFailed(type(error).__name__, str(error))
    return wire.RequestFailed("StoreError", repr(error))
