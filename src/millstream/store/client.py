"""The store of many processes, as one of them uses it: see `millstream.store.Store` for the promises.

Cells are views of shared memory; for a segment on another node, of a copy that was fetched from its segment server.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from millstream.errors import StoreError, StoreTimeout, StreamEnded
from millstream.store import wire
from millstream.store.base import ONE_GROUP, TRAIN, Choose, Columns, Lease, Row, Saved, StoreStats, Want
from millstream.store.blocks import Block, Packing
from millstream.store.columns import each, integers, num_rows_of, token_counts
from millstream.store.connection import CoordinatorConnection
from millstream.store.rows import UNVERSIONED
from millstream.store.segment_server import fetch_segment
from millstream.store.segments import Segments

GIVE_UP_S = 60.0
"""How long the coordinator may be unreachable."""
R = TypeVar("R")


class Address(msgspec.Struct, frozen=True):
    """What a process needs to use a store. The token is a secret: every process that has it may read and write."""

    host: str
    port: int
    token: str
    node: str
    """The node that this process is on."""
    folder: str
    """The folder of this node's segments."""


class Payloads:
    """Columns on their way into and out of segments."""

    def __init__(self, address: Address, connection: CoordinatorConnection) -> None:
        self._address = address
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self.segments = Segments(Path(address.folder), self._on_closed)
        self._closed = deque[str]()  # closed views, not yet reported to the coordinator
        self._is_scheduled = False

    async def send(
        self, columns: Columns, num_rows: int, deadline_s: float | None, send: Callable[[wire.Payload], Awaitable[R]]
    ) -> R:
        """Pack the columns and pass `send` where they are. Large ones go into a segment that is reserved for them."""
        packing = Packing(columns)
        if packing.nbytes <= wire.INLINE_BYTES:
            return await send(wire.Payload(packing.nbytes, bytes(packing.to_bytes()), None, packing.has_tensors))
        reserved: wire.SegmentReserved = await self._connection.call(
            wire.ReserveSegment(num_rows, packing.nbytes, deadline_s)
        )
        segment: wire.Segment = reserved.segment
        try:
            with self.segments.writable(segment) as target:
                packing.write(target)
            self.segments.trim()
            return await send(wire.Payload(packing.nbytes, None, segment, packing.has_tensors))
        except BaseException:  # also when cancelled: the reserved segment will not be read
            self.segments.forget_written(segment.name)
            self._connection.tell(wire.ReleaseSegment(segment.name))
            raise

    async def open(self, granted: wire.LeaseGranted) -> dict[int, Block]:
        """Every segment is closed once: when its view is gone, when it has been fetched, or when this fails."""
        blocks: dict[int, Block] = {}
        try:
            for number, payload in granted.blocks.items():
                blocks[number] = await self._open(payload, granted)
        except BaseException:  # also when cancelled
            self.close([payload for number, payload in granted.blocks.items() if number not in blocks])
            raise
        node = self._address.node
        self.close([p for p in granted.blocks.values() if p.segment is not None and p.segment.node != node])
        return blocks

    async def _open(self, payload: wire.Payload, granted: wire.LeaseGranted) -> Block:
        if payload.data is not None:
            return Block(bytearray(payload.data) if payload.is_private else payload.data)
        segment = payload.segment
        assert segment is not None
        if segment.node == self._address.node:
            return Block(self.segments.view(segment, is_private=payload.is_private))
        address = granted.addresses.get(segment.node)
        if address is None:
            raise StoreError(f"node {segment.node} is gone, and with it the segment {segment.name}")
        return Block(await fetch_segment(address, self._address.token, segment.name, payload.nbytes))

    def close(self, payloads: Sequence[wire.Payload]) -> None:
        names = [payload.segment.name for payload in payloads if payload.segment is not None]
        if names:
            self._connection.tell(wire.CloseViews(names))

    def _on_closed(self, name: str) -> None:
        """A view is gone. Called on the thread that released its last array."""
        self._closed.append(name)
        if not self._is_scheduled:
            self._is_scheduled = True
            with suppress(RuntimeError):  # the loop is closed: the coordinator sees the end of the connection
                self._loop.call_soon_threadsafe(self._report_closed)

    def _report_closed(self) -> None:
        self._is_scheduled = False
        names = [self._closed.popleft() for _ in range(len(self._closed))]
        if names:
            self._connection.tell(wire.CloseViews(names))
        self.segments.trim()


class StoreClient:
    """Created by `StoreClient.connect`, on the event loop that it is used on."""

    def __init__(self, address: Address, name: str | None = None, *, give_up_s: float = GIVE_UP_S) -> None:
        self.name = f"{name or 'client'} {uuid.uuid4().hex[:12]}"  # unique: the coordinator knows its requests by it
        hello = wire.StoreHello(self.name, address.token, address.node)
        self._connection = CoordinatorConnection((address.host, address.port), hello, give_up_s, self._on_unclaimed)
        self._payloads = Payloads(address, self._connection)

    @classmethod
    async def connect(cls, address: Address, name: str | None = None, *, give_up_s: float = GIVE_UP_S) -> StoreClient:
        client = cls(address, name, give_up_s=give_up_s)
        await client._connection.connect()
        return client

    async def close(self) -> None:
        self._connection.close()

    def _on_unclaimed(self, answer: wire.ReplyBody) -> None:
        """An answer whose caller is gone."""
        if isinstance(answer, wire.LeaseGranted):
            self._payloads.close(list(answer.blocks.values()))
        elif isinstance(answer, wire.SegmentReserved):
            self._connection.tell(wire.ReleaseSegment(answer.segment.name))

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
        token_list = None if counts is None else list(counts)
        groups = each(group_ids, num_rows, "group_ids")
        row_versions = None if versions is None else each(versions, num_rows, "versions")

        async def send(payload: wire.Payload) -> wire.RowsAdded:
            put = wire.PutRows(groups, list(columns), payload, row_versions, token_list, partition, deadline_s)
            added: wire.RowsAdded = await self._connection.call(put)
            return added

        rows = await self._payloads.send(columns, num_rows, deadline_s, send)
        return range(rows.first, rows.first + rows.count)

    async def write(self, row_ids: Sequence[int], columns: Columns, *, overwrite: bool = False) -> None:
        num_rows = num_rows_of(columns)
        if num_rows != len(row_ids):
            raise StoreError(f"columns of {num_rows} rows were written to {len(row_ids)}")

        async def send(payload: wire.Payload) -> None:
            await self._connection.call(wire.WriteCells(integers(row_ids), list(columns), payload, overwrite))

        await self._payloads.send(columns, 0, None, send)

    async def close_groups(self, group_ids: Sequence[int], *, partition: str = TRAIN) -> None:
        await self._connection.call(wire.CloseGroups(integers(group_ids), partition))

    # ---- consumers ---------------------------------------------------------------------------------------------------

    async def claim(
        self, task: str, want: Want = ONE_GROUP, *, choose: Choose | None = None, partition: str = TRAIN
    ) -> Lease:
        if choose is None:
            return await self._lease(task, await self._connection.call(wire.ClaimRows(task, want, partition)))
        limit = asyncio.timeout(want.deadline_s)
        try:
            async with limit:
                return await self._choose(task, want, choose, partition)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise StoreTimeout(f"{self.name} chose nothing for {task} after {want.deadline_s:g} s") from error

    async def _choose(self, task: str, want: Want, choose: Choose, partition: str) -> Lease:
        """`choose` is called here, with the groups that the coordinator says are ready; another client may be faster."""
        seen = 0
        while True:
            groups: wire.ReadyGroups = await self._connection.call(wire.WatchReady(task, partition, seen))
            seen = groups.change
            chosen = choose(tuple(groups.group_ids)) if groups.group_ids else None
            if chosen is not None and chosen not in groups.group_ids:
                raise StoreError(f"`choose` returned {chosen}, which is not among the ready groups")
            if chosen is not None:
                answer = await self._connection.call(wire.ClaimRows(task, want, partition, chosen))
                if isinstance(answer, wire.LeaseGranted):
                    return await self._lease(task, answer)
            elif groups.is_over:
                raise StreamEnded(f"{task}: the stream has ended")

    async def _lease(self, task: str, granted: wire.LeaseGranted) -> Lease:
        try:
            blocks = await self._payloads.open(granted)
        except BaseException:  # also when cancelled: the caller will not get the lease
            self._connection.tell(wire.GiveBackLease(granted.lease_id))
            raise
        columns: dict[str, list[Any]] = {}
        for cells in _cells_of_runs(granted, blocks):
            for name, column in cells.items():
                columns.setdefault(name, []).extend(column)
        return Lease(
            lease_id=granted.lease_id,
            task=task,
            row_ids=granted.row_ids,
            group_ids=granted.group_ids,
            versions=granted.versions,
            columns={name: cells for name, cells in columns.items() if len(cells) == len(granted.row_ids)},
            empty_groups=granted.empty_groups,
        )

    async def renew(self, lease: Lease) -> None:
        await self._connection.call(wire.RenewLease(lease.lease_id))

    async def acknowledge(self, lease: Lease, *, step: int | None = None) -> None:
        await self._connection.call(wire.AcknowledgeLease(lease.lease_id, step))

    async def drop(self, lease: Lease) -> None:
        await self._connection.call(wire.DropLease(lease.lease_id))

    async def give_back(self, lease: Lease) -> None:
        await self._connection.call(wire.GiveBackLease(lease.lease_id))

    async def cover(self, step: int, *, partition: str = TRAIN) -> None:
        await self._connection.call(wire.CoverStep(step, partition))

    async def rewind(self, task: str, step: int, *, partition: str = TRAIN) -> int:
        count: wire.RowCount = await self._connection.call(wire.RewindTask(task, step, partition))
        return count.count

    def wake(self) -> None:
        """Ask for the ready groups again, so that every waiting `choose` of this client is called."""
        self._connection.repeat(wire.WatchReady, lambda body: wire.WatchReady(body.task, body.partition, 0))

    async def finish(self, *, partition: str = TRAIN) -> None:
        await self._connection.call(wire.FinishPartition(partition))

    async def drop_partition(self, partition: str) -> int:
        count: wire.RowCount = await self._connection.call(wire.DropPartition(partition))
        return count.count

    # ---- whole partitions --------------------------------------------------------------------------------------------

    async def snapshot(self, *, partition: str = TRAIN) -> Saved:
        content: wire.PartitionContent = await self._connection.call(wire.ReadPartition(partition))
        granted = content.granted
        blocks = await self._payloads.open(granted)
        rows: list[Row] = []
        for run, cells in zip(granted.runs, _cells_of_runs(granted, blocks), strict=True):
            for index in range(run.count):
                at = len(rows)
                columns = {name: column[index] for name, column in cells.items()}
                rows.append(Row(row_id=granted.row_ids[at], group_id=granted.group_ids[at], columns=columns))
        ids = granted.row_ids
        return Saved(
            rows=tuple(rows),
            is_closed=content.is_closed,
            acknowledged={task: tuple(done) for task, done in content.acknowledged.items()},
            versions={i: version for i, version in zip(ids, granted.versions, strict=True) if version != UNVERSIONED},
            tokens=dict(zip(ids, content.tokens, strict=True)),
            steps={i: steps for i, steps in zip(ids, content.steps, strict=True) if steps},
            generation=content.generation,
        )

    async def restore(self, saved: Saved, *, partition: str = TRAIN) -> None:
        by_columns: dict[tuple[str, ...], list[Row]] = {}
        for row in saved.rows:
            by_columns.setdefault(tuple(row.columns), []).append(row)
        await self._restore_rows(saved, list(by_columns.items()), [], partition)

    async def _restore_rows(
        self, saved: Saved, left: list[tuple[tuple[str, ...], list[Row]]], done: list[wire.SavedRows], partition: str
    ) -> None:
        """Rows with the same columns in one segment each, all of them in one request."""
        if not left:
            acknowledged = {task: list(ids) for task, ids in saved.acknowledged.items()}
            restore = wire.RestorePartition(done, saved.is_closed, acknowledged, partition, saved.generation)
            await self._connection.call(restore)
            return
        names, rows = left[0]

        async def send(payload: wire.Payload) -> None:
            packed = wire.SavedRows(
                [row.row_id for row in rows],
                [row.group_id for row in rows],
                list(names),
                payload,
                [saved.versions.get(row.row_id, UNVERSIONED) for row in rows],
                [saved.tokens.get(row.row_id, 1) for row in rows],
                [saved.steps.get(row.row_id, {}) for row in rows],
            )
            await self._restore_rows(saved, left[1:], [*done, packed], partition)

        await self._payloads.send({name: [row.columns[name] for row in rows] for name in names}, 0, None, send)

    async def stats(self) -> StoreStats:
        reply: wire.StatsReply = await self._connection.call(wire.GetStats())
        return reply.stats

    async def lost(self) -> list[wire.LostRow]:
        """Rows that were lost with a node."""
        reply: wire.LostRowsReply = await self._connection.call(wire.GetLostRows())
        return reply.rows


def _cells_of_runs(granted: wire.LeaseGranted, blocks: dict[int, Block]) -> list[dict[str, list[Any]]]:
    """The columns of each stretch of rows; where a cell was written again, the last."""
    found = []
    for run in granted.runs:
        where = {
            name: (blocks[number], start)
            for number, start in zip(run.blocks, run.starts, strict=True)
            for name in blocks[number].names
        }
        found.append({name: block.cells(name, start, run.count) for name, (block, start) in where.items()})
    return found
