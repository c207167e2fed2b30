"""The store as a process sees it that does not keep the books: see `millstream.store.Store` for the promises.

A connection that breaks is made again, and what was not answered is asked again, under the same number: it is carried out
once. Cells are views of shared memory; of a segment on another node, of a copy that was fetched from its holder.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

import millstream.errors
from millstream.errors import StoreError, StoreTimeout, StreamEnded
from millstream.store import ONE_GROUP, TRAIN, Choose, Columns, Lease, Row, Saved, StoreStats, Want, wire
from millstream.store.blocks import Block, Packing
from millstream.store.columns import each, integers, num_rows_of, token_counts
from millstream.store.entries import NO_VERSION
from millstream.store.holder import fetch
from millstream.store.segments import Segments
from millstream.store.wire import Answer, Body, Frames, Granted, Payload, Reply, Request, Segment

RETRY_S = 0.05
GIVE_UP_S = 60.0
"""How long a coordinator may be away."""
HELLO_S = 5.0
"""For one attempt to reach it."""


class Address(msgspec.Struct, frozen=True):
    """What a process needs to take part in a store. The token is a secret: whoever has it may read and write."""

    host: str
    port: int
    token: str
    node: str
    """The node that this process is on."""
    folder: str
    """Where this node's segments are."""


class StoreClient:
    """Made by `StoreClient.connect`, on the event loop that it is used on."""

    def __init__(self, address: Address, name: str | None = None, *, give_up_s: float = GIVE_UP_S) -> None:
        self._address = address
        self._give_up_s = give_up_s
        self.name = f"{name or 'client'} {uuid.uuid4().hex[:12]}"
        """No two processes have the same: by it the coordinator knows what was asked before."""
        self._segments = Segments(Path(address.folder), self._on_closed)
        self._loop = asyncio.get_running_loop()
        self._line: Frames | None = None
        self._waiting: dict[int, tuple[Body, asyncio.Future[Answer]]] = {}
        self._next = 1
        self._closed = deque[str]()
        self._is_closing = False
        self._heard: list[int] = []
        self._is_telling = False
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._connecting: asyncio.Task[None] | None = None
        self._broken: StoreError | None = None

    @classmethod
    async def connect(cls, address: Address, name: str | None = None, *, give_up_s: float = GIVE_UP_S) -> StoreClient:
        client = cls(address, name, give_up_s=give_up_s)
        await client._connect()
        return client

    # ---- the line ----------------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        until = self._loop.time() + self._give_up_s
        while True:
            try:
                async with asyncio.timeout(HELLO_S):
                    await self._say_hello()
                break
            except OSError as error:
                if self._loop.time() > until:
                    where = f"{self._address.host}:{self._address.port}"
                    self._break(StoreError(f"no store at {where} for {self._give_up_s:g} s: {error}"))
                    raise self._broken or error from error
                await asyncio.sleep(RETRY_S)
        for number, (body, future) in sorted(self._waiting.items()):
            if not future.done():
                self._send(number, body)

    async def _say_hello(self) -> None:
        welcome: asyncio.Future[None] = self._loop.create_future()

        def on_message(message: memoryview) -> None:
            reply = self._decoder.decode(message)
            if welcome.done():
                self._on_reply(reply)
            elif isinstance(reply.body, wire.Failed):
                welcome.set_exception(StoreError(reply.body.message))
            else:
                welcome.set_result(None)

        def on_lost() -> None:
            if not welcome.done():
                welcome.set_exception(ConnectionResetError("it hung up"))
            elif self._line is line and not self._is_closing:
                self._line = None
                self._connecting = self._loop.create_task(self._reconnect())

        line = Frames(on_message, on_lost)
        await self._loop.create_connection(lambda: line, self._address.host, self._address.port)
        hello = wire.Hello(self.name, self._address.token, self._address.node, None, list(self._waiting))
        line.send(Request(0, [], hello))
        await welcome
        if line.transport is None or line.transport.is_closing():
            raise ConnectionResetError("it hung up")
        self._line = line

    async def _reconnect(self) -> None:
        try:
            await self._connect()
        except StoreError as error:
            self._break(error)

    def _break(self, error: StoreError) -> None:
        self._broken = error
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()

    def _send(self, number: int, body: Body) -> None:
        if self._line is not None:
            heard = self._heard
            self._heard = []
            self._line.send(Request(number, heard, body))

    def _send_or_refuse(self, number: int, body: Body) -> None:
        try:
            self._send(number, body)
        except (TypeError, OverflowError, msgspec.EncodeError) as error:
            raise StoreError(f"{type(body).__name__} cannot be sent: {error}") from error

    def _on_reply(self, reply: Reply) -> None:
        waiting = self._waiting.get(reply.number)  # it is heard only when whoever asked has it
        if waiting is not None and not waiting[1].done():
            waiting[1].set_result(reply.body)
        else:
            self._let_go(reply.body)

    def _let_go(self, answer: Answer) -> None:
        """An answer that nobody waits for any more."""
        if isinstance(answer, Granted):
            self._close_segments(list(answer.blocks.values()))
        elif isinstance(answer, wire.Reserved):
            self._tell(wire.Release(answer.segment.name))

    def _tell(self, body: Body) -> None:
        """Nobody waits for the answer; but if the line breaks before it comes, this is told again."""
        if self._broken is not None or self._is_closing:
            return
        number, told = self._next, self._loop.create_future()
        self._next += 1
        self._waiting[number] = (body, told)
        told.add_done_callback(lambda done: self._forget(number, done))
        self._send(number, body)

    def _forget(self, number: int, done: asyncio.Future[Answer]) -> None:
        if not done.cancelled():
            done.exception()
        if self._waiting.pop(number, None) is not None:
            self._heard.append(number)

    async def _ask(self, body: Body) -> Any:
        if self._broken is not None or self._is_closing:
            raise self._broken or StoreError("this client of the store was closed")
        number = self._next
        self._next += 1
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting[number] = (body, future)
        try:
            self._send_or_refuse(number, body)
            answer = await future
        except asyncio.CancelledError:
            self._tell(wire.Cancel(number))
            if future.done() and not future.cancelled() and future.exception() is None:
                self._let_go(future.result())
            raise
        finally:
            if self._waiting.pop(number, None) is not None and future.done():
                self._heard.append(number)
        if isinstance(answer, wire.Failed):
            kind = getattr(millstream.errors, answer.kind, StoreError)
            raise kind(answer.message)
        return answer

    def _on_closed(self, name: str) -> None:
        """A view is gone: on whatever thread its last array was."""
        self._closed.append(name)
        if not self._is_telling:
            self._is_telling = True
            with suppress(RuntimeError):  # the loop is closed: the coordinator knows when the line is
                self._loop.call_soon_threadsafe(self._tell_of_closed)

    def _tell_of_closed(self) -> None:
        self._is_telling = False
        names = [self._closed.popleft() for _ in range(len(self._closed))]
        if names:
            self._tell(wire.Closed(names))
        self._segments.trim()

    async def close(self) -> None:
        self._is_closing = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._line is not None and self._line.transport is not None:
            self._line.transport.close()
        self._break(StoreError("this client of the store was closed"))

    # ---- producers ---------------------------------------------------------------------------------------------------

    async def put(
        self,
        group_ids: int | Sequence[int],
        columns: Columns,
        *,
        versions: int | Sequence[int] | None = None,
        tokens: Sequence[int] | None = None,
        partition: str = TRAIN,
        deadline_s: float | None = None,
    ) -> Sequence[int]:
        num_rows = num_rows_of(columns)
        counts = token_counts(columns, tokens, num_rows)
        groups = list(each(group_ids, num_rows, "group_ids"))
        numbers = None if versions is None else list(each(versions, num_rows, "versions"))

        async def send(payload: Payload) -> wire.Rows:
            counted = None if counts is None else list(counts)
            put = wire.Put(groups, list(columns), payload, numbers, counted, partition, deadline_s)
            rows: wire.Rows = await self._ask(put)
            return rows

        rows = await self._with_payload(columns, num_rows, deadline_s, send)
        return range(rows.first, rows.first + rows.count)

    async def _with_payload(self, columns: Columns, num_rows: int, deadline_s: float | None, send: Any) -> Any:
        """Pack the columns, and send what says where they are. Large ones go into a segment that was reserved for them."""
        packing = Packing(columns)
        if packing.nbytes <= wire.INLINE_BYTES:
            return await send(Payload(packing.nbytes, bytes(packing.to_bytes()), None, packing.has_tensors))
        reserved = await self._ask(wire.Reserve(num_rows, packing.nbytes, deadline_s))
        segment: Segment = reserved.segment
        try:
            with self._segments.writable(segment) as target:
                packing.write(target)
            self._segments.trim()
            return await send(Payload(packing.nbytes, None, segment, packing.has_tensors))
        except BaseException:  # cancelled, say: nobody will read what was reserved
            self._segments.forget_written(segment.name)
            self._tell(wire.Release(segment.name))
            raise

    async def write(self, row_ids: Sequence[int], columns: Columns, *, overwrite: bool = False) -> None:
        num_rows = num_rows_of(columns)
        if num_rows != len(row_ids):
            raise StoreError(f"columns of {num_rows} rows were written to {len(row_ids)}")

        async def send(payload: Payload) -> None:
            await self._ask(wire.Write(integers(row_ids), list(columns), payload, overwrite))

        await self._with_payload(columns, 0, None, send)

    async def close_groups(self, group_ids: Sequence[int], *, partition: str = TRAIN) -> None:
        await self._ask(wire.CloseGroups(integers(group_ids), partition))

    # ---- consumers ---------------------------------------------------------------------------------------------------

    async def claim(
        self, task: str, want: Want = ONE_GROUP, *, choose: Choose | None = None, partition: str = TRAIN
    ) -> Lease:
        if choose is None:
            return await self._lease(task, await self._ask(wire.ClaimRows(task, want, partition)))
        limit = asyncio.timeout(want.deadline_s)
        try:
            async with limit:
                return await self._choose(task, want, choose, partition)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise StoreTimeout(f"{self.name} chose nothing for {task} after {want.deadline_s:g} s") from error

    async def _choose(self, task: str, want: Want, choose: Choose, partition: str) -> Lease:
        """The choice is made here, among the groups that the coordinator says are ready; another may be faster."""
        seen = 0
        while True:
            groups: wire.Groups = await self._ask(wire.ReadyGroups(task, partition, seen))
            seen = groups.change
            chosen = choose(tuple(groups.group_ids)) if groups.group_ids else None
            if chosen is not None and chosen not in groups.group_ids:
                raise StoreError(f"{chosen} was chosen, and is not among those that are ready")
            if chosen is not None:
                answer = await self._ask(wire.ClaimRows(task, want, partition, chosen))
                if isinstance(answer, Granted):
                    return await self._lease(task, answer)
            elif groups.is_over:
                raise StreamEnded(f"{task}: the stream has ended")

    async def _lease(self, task: str, granted: Granted) -> Lease:
        try:
            columns = await self._columns(granted)
        except BaseException:  # cancelled, say
            self._tell(wire.GiveBack(granted.lease_id))  # it has not reached whoever claimed it
            raise
        return Lease(
            lease_id=granted.lease_id,
            task=task,
            row_ids=granted.row_ids,
            group_ids=granted.group_ids,
            versions=granted.versions,
            columns=columns,
            empty_groups=granted.empty_groups,
        )

    async def _columns(self, granted: Granted) -> dict[str, list[Any]]:
        """Columns that all rows have; of a cell that was written again, the last."""
        blocks = await self._open_all(granted)
        columns: dict[str, list[Any]] = {}
        for run in granted.runs:
            where = {
                name: (blocks[number], start)
                for number, start in zip(run.blocks, run.starts, strict=True)
                for name in blocks[number].names
            }
            for name, (block, start) in where.items():
                columns.setdefault(name, []).extend(block.cells(name, start, run.count))
        return {name: cells for name, cells in columns.items() if len(cells) == len(granted.row_ids)}

    async def _open_all(self, granted: Granted) -> dict[int, Block]:
        """Every segment is closed once: when its view is gone, when it has been fetched, or when this fails."""
        blocks: dict[int, Block] = {}
        try:
            for number, payload in granted.blocks.items():
                blocks[number] = await self._open(payload, granted)
        except BaseException:  # cancelled, say: nobody else would close them
            self._close_segments([payload for number, payload in granted.blocks.items() if number not in blocks])
            raise
        fetched = [p for p in granted.blocks.values() if p.segment is not None and p.segment.node != self._address.node]
        self._close_segments(fetched)
        return blocks

    def _close_segments(self, payloads: list[Payload]) -> None:
        names = [payload.segment.name for payload in payloads if payload.segment is not None]
        if names:
            self._tell(wire.Closed(names))

    async def _open(self, payload: Payload, granted: Granted) -> Block:
        if payload.data is not None:
            return Block(bytearray(payload.data) if payload.is_private else payload.data)
        segment = payload.segment
        assert segment is not None
        if segment.node == self._address.node:
            return Block(self._segments.view(segment, is_private=payload.is_private))
        address = granted.addresses.get(segment.node)
        if address is None:
            raise StoreError(f"node {segment.node} is gone, and with it the segment {segment.name}")
        return Block(await fetch(address, self._address.token, segment.name, payload.nbytes))

    async def renew(self, lease: Lease) -> None:
        await self._ask(wire.Renew(lease.lease_id))

    async def acknowledge(self, lease: Lease, *, step: int | None = None) -> None:
        await self._ask(wire.Acknowledge(lease.lease_id, step))

    async def drop(self, lease: Lease) -> None:
        await self._ask(wire.Drop(lease.lease_id))

    async def give_back(self, lease: Lease) -> None:
        await self._ask(wire.GiveBack(lease.lease_id))

    async def cover(self, step: int, *, partition: str = TRAIN) -> None:
        await self._ask(wire.Cover(step, partition))

    async def rewind(self, task: str, step: int, *, partition: str = TRAIN) -> int:
        count: wire.Count = await self._ask(wire.Rewind(task, step, partition))
        return count.count

    def wake(self) -> None:
        """What a `choose` here reads has changed: it is asked again."""
        for number, (body, future) in list(self._waiting.items()):
            if isinstance(body, wire.ReadyGroups) and not future.done():
                self._tell(wire.Cancel(number))
                self._waiting[number] = (wire.ReadyGroups(body.task, body.partition, 0), future)
                self._send(number, self._waiting[number][0])

    async def finish(self, *, partition: str = TRAIN) -> None:
        await self._ask(wire.Finish(partition))

    async def drop_partition(self, partition: str) -> int:
        count: wire.Count = await self._ask(wire.DropPartition(partition))
        return count.count

    # ---- all of it ---------------------------------------------------------------------------------------------------

    async def snapshot(self, *, partition: str = TRAIN) -> Saved:
        looked: wire.Looked = await self._ask(wire.Look(partition))
        granted = looked.granted
        blocks = await self._open_all(granted)
        rows: list[Row] = []
        for run in granted.runs:
            cells = {
                name: blocks[number].cells(name, start, run.count)
                for number, start in zip(run.blocks, run.starts, strict=True)
                for name in blocks[number].names
            }
            for index in range(run.count):
                at = len(rows)
                columns = {name: column[index] for name, column in cells.items()}
                rows.append(Row(row_id=granted.row_ids[at], group_id=granted.group_ids[at], columns=columns))
        ids = granted.row_ids
        return Saved(
            rows=tuple(rows),
            is_closed=looked.is_closed,
            acknowledged={task: tuple(done) for task, done in looked.acknowledged.items()},
            versions={i: version for i, version in zip(ids, granted.versions, strict=True) if version != NO_VERSION},
            tokens=dict(zip(ids, looked.tokens, strict=True)),
            steps={i: steps for i, steps in zip(ids, looked.steps, strict=True) if steps},
            generation=looked.generation,
        )

    async def restore(self, saved: Saved, *, partition: str = TRAIN) -> None:
        by_columns: dict[tuple[str, ...], list[Row]] = {}
        for row in saved.rows:
            by_columns.setdefault(tuple(row.columns), []).append(row)
        await self._restore_rows(saved, list(by_columns.items()), [], partition)

    async def _restore_rows(
        self, saved: Saved, left: list[tuple[tuple[str, ...], list[Row]]], done: list[wire.SavedRows], partition: str
    ) -> None:
        """Each kind of row in a segment of its own, all of them in one request."""
        if not left:
            acknowledged = {task: list(ids) for task, ids in saved.acknowledged.items()}
            await self._ask(wire.Restore(done, saved.is_closed, acknowledged, partition, saved.generation))
            return
        names, rows = left[0]

        async def send(payload: Payload) -> None:
            packed = wire.SavedRows(
                [row.row_id for row in rows],
                [row.group_id for row in rows],
                list(names),
                payload,
                [saved.versions.get(row.row_id, NO_VERSION) for row in rows],
                [saved.tokens.get(row.row_id, 1) for row in rows],
                [saved.steps.get(row.row_id, {}) for row in rows],
            )
            await self._restore_rows(saved, left[1:], [*done, packed], partition)

        await self._with_payload({name: [row.columns[name] for row in rows] for name in names}, 0, None, send)

    async def stats(self) -> StoreStats:
        told: wire.Told = await self._ask(wire.Stats())
        return told.stats

    async def lost(self) -> list[wire.Lost]:
        """Rows that went with a node."""
        lost: wire.LostNow = await self._ask(wire.LostRows())
        return lost.rows
