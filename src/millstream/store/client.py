"""The store of many processes, as one of them uses it: see `millstream.store.Store` for the promises.

Cells are views of shared memory; for a segment on another node, of a copy that was fetched from its segment server.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from millstream.errors import StoreError, StoreTimeout, StreamEnded
from millstream.store import wire
from millstream.store.base import ONE_GROUP, TRAIN, Choose, Columns, Lease, Saved, StoreStats, Want
from millstream.store.blocks import Block, Packing
from millstream.store.connection import CoordinatorConnection
from millstream.store.rows import (
    UNVERSIONED,
    BlockSpec,
    each,
    integers,
    num_rows_of,
    partition_of,
    saved_columns,
    saved_of,
    token_counts,
)
from millstream.store.segments import Segments, fetch_segment

GIVE_UP_S = 60.0
"""How long the coordinator may be unreachable."""


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

    @asynccontextmanager
    async def packed(
        self,
        *tables: Columns,
        num_rows: int = 0,
        deadline_s: float | None = None,
        inline_bytes: int = wire.INLINE_BYTES,
    ) -> AsyncIterator[list[wire.PackedBlock]]:
        """The columns, packed: those above `inline_bytes` are in a segment that is reserved for them. If the body fails, it is
        released."""
        blocks: list[wire.PackedBlock] = []
        names: list[str] = []
        try:
            for columns in tables:
                packing = Packing(columns)
                if packing.nbytes <= inline_bytes:
                    blocks.append(_inline(columns, packing))
                    continue
                segment = await self._fill(packing, num_rows, deadline_s, names)
                payload = wire.Payload(packing.nbytes, None, segment, packing.has_tensors)
                blocks.append(BlockSpec(tuple(columns), segment.size, payload))
            yield blocks
        except BaseException:  # also when cancelled: the reserved segments will not be read
            for name in names:
                self.segments.forget_written(name)
                self._connection.tell(wire.ReleaseSegment(name))
            raise

    async def _fill(self, packing: Packing, num_rows: int, deadline_s: float | None, names: list[str]) -> wire.Segment:
        request = wire.ReserveSegment(num_rows, packing.nbytes, deadline_s)
        reserved: wire.SegmentReserved = await self._connection.call(request)
        names.append(reserved.segment.name)
        with self.segments.writable(reserved.segment) as target:
            packing.write(target)
        self.segments.trim()
        return reserved.segment

    async def open(self, granted: wire.LeaseGranted, only: frozenset[str] | None = None) -> dict[int, Block]:
        """Every segment is closed once: when its view is gone, when it has been fetched, or when this fails. `only`: segments
        are not opened where these columns came with the message."""
        blocks = {number: _block_of(payload) for number, payload in granted.blocks.items() if payload.data is not None}
        is_enough = only is not None and _have_all(only, granted, blocks)
        try:
            for number, payload in granted.blocks.items():
                if payload.data is None and not is_enough:
                    blocks[number] = await self._open(payload, granted)
        except BaseException:  # also when cancelled
            self.close([payload for number, payload in granted.blocks.items() if number not in blocks])
            raise
        node = self._address.node
        others = [p for p in granted.blocks.values() if p.segment is not None and (is_enough or p.segment.node != node)]
        self.close(others)
        return blocks

    async def _open(self, payload: wire.Payload, granted: wire.LeaseGranted) -> Block:
        segment = payload.segment
        assert segment is not None
        if segment.node == self._address.node:
            return Block(self.segments.view(segment, is_private=payload.is_private))
        address = granted.addresses.get(segment.node) or await self._find(segment.node)
        if address is None:
            raise StoreError(f"node {segment.node} is gone, and with it the segment {segment.name}")
        return Block(await fetch_segment(address, self._address.token, segment.name, payload.nbytes))

    async def _find(self, node: str) -> tuple[str, int] | None:
        """The address of a segment server without a connection: after a restart of the coordinator all of them reconnect."""
        found: wire.NodeFound = await self._connection.call(wire.FindNode(node))
        return found.address

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
        self._only: dict[str, frozenset[str]] = {}

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
        groups = each(group_ids, num_rows, "group_ids")
        row_versions = each(UNVERSIONED if versions is None else versions, num_rows, "versions")
        counts = token_counts(columns, tokens, num_rows)
        async with self._payloads.packed(columns, num_rows=num_rows, deadline_s=deadline_s) as (block,):
            put = wire.PutRows(partition, groups, block, row_versions, counts, deadline_s)
            added: wire.RowsAdded = await self._connection.call(put)
        return range(added.first, added.first + added.count)

    async def stage(
        self, columns: Columns, *, small: Columns | None = None, versions: int | Sequence[int] | None = None
    ) -> wire.StagedRows:
        """Pack rows here, for another client to put (`put_staged`) or to drop (`drop_staged`). Waits for room in the store.
        `small`: columns of constant size, which a consumer may read without the others (`open_only`)."""
        num_rows = num_rows_of(columns)
        row_versions = each(UNVERSIONED if versions is None else versions, num_rows, "versions")
        async with self._payloads.packed(columns, num_rows=num_rows, inline_bytes=0) as (block,):
            own = None if small is None else _inline(small, Packing(small))
            return wire.StagedRows(block, row_versions, token_counts(columns, None, num_rows), own)

    async def put_staged(self, group_id: int, rows: wire.StagedRows, *, partition: str = TRAIN) -> None:
        """Put what another client has packed. Raises `RowsLost` if that is gone."""
        groups = [group_id] * len(rows.versions)
        put = wire.PutRows(partition, groups, rows.block, rows.versions, rows.tokens, None, rows.small)
        await self._connection.call(put)

    def drop_staged(self, rows: wire.StagedRows) -> None:
        segment = rows.block.payload.segment
        if segment is not None:
            self._connection.tell(wire.ReleaseSegment(segment.name))

    async def write(self, row_ids: Sequence[int], columns: Columns, *, overwrite: bool = False) -> None:
        num_rows = num_rows_of(columns)
        if num_rows != len(row_ids):
            raise StoreError(f"columns of {num_rows} rows were written to {len(row_ids)}")
        async with self._payloads.packed(columns) as (block,):
            await self._connection.call(wire.WriteCells(integers(row_ids), block, overwrite))

    async def stage_columns(self, columns: Columns) -> wire.PackedBlock:
        """Pack columns here, for another client to write (`write_staged`). They are gone with this one, until then."""
        async with self._payloads.packed(columns, inline_bytes=0) as (block,):
            return block

    async def write_staged(self, row_ids: Sequence[int], block: wire.PackedBlock, *, overwrite: bool = False) -> None:
        """Write what another client has packed. Raises `RowsLost` if that is gone."""
        await self._connection.call(wire.WriteCells(integers(row_ids), block, overwrite))

    async def close_groups(self, group_ids: Sequence[int], *, partition: str = TRAIN) -> None:
        await self._connection.call(wire.CloseGroups(partition, integers(group_ids)))

    # ---- consumers ---------------------------------------------------------------------------------------------------

    def open_only(self, task: str, columns: Sequence[str]) -> None:
        """Claims of this task return at least these columns. Where they came with the answer, no other payload is opened."""
        self._only[task] = frozenset(columns)

    async def read(self, row_ids: Sequence[int]) -> list[dict[str, Any]]:
        """The columns of each row. Raises `StoreError` for a row that is not in the store: another client must hold it there,
        by a lease or by a step that no checkpoint covers yet."""
        granted: wire.LeaseGranted = await self._connection.call(wire.ReadRows(integers(row_ids)))
        return _cells_of_rows(granted, await self._payloads.open(granted))

    async def claim(
        self, task: str, want: Want = ONE_GROUP, *, choose: Choose | None = None, partition: str = TRAIN
    ) -> Lease:
        if choose is None:
            return await self._lease(task, await self._connection.call(wire.ClaimRows(partition, task, want)))
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
            groups: wire.ReadyGroups = await self._connection.call(wire.WatchReady(partition, task, seen))
            seen = groups.change
            chosen = choose(tuple(groups.group_ids)) if groups.group_ids else None
            if chosen is not None and chosen not in groups.group_ids:
                raise StoreError(f"`choose` returned {chosen}, which is not among the ready groups")
            if chosen is not None:
                answer = await self._connection.call(wire.ClaimRows(partition, task, want, chosen))
                if isinstance(answer, wire.LeaseGranted):
                    return await self._lease(task, answer)
            elif groups.is_over:
                raise StreamEnded(f"{task}: the stream has ended")

    async def _lease(self, task: str, granted: wire.LeaseGranted) -> Lease:
        try:
            blocks = await self._payloads.open(granted, self._only.get(task))
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
        await self._connection.call(wire.CoverStep(partition, step))

    async def rewind(self, task: str, step: int, *, partition: str = TRAIN) -> int:
        count: wire.RowCount = await self._connection.call(wire.RewindTask(partition, task, step))
        return count.count

    def wake(self) -> None:
        """Ask for the ready groups again, so that every waiting `choose` of this client is called."""
        self._connection.repeat(wire.WatchReady, lambda body: wire.WatchReady(body.partition, body.task, 0))

    async def finish(self, *, partition: str = TRAIN) -> None:
        await self._connection.call(wire.FinishPartition(partition))

    async def drop_partition(self, partition: str) -> int:
        count: wire.RowCount = await self._connection.call(wire.DropPartition(partition))
        return count.count

    # ---- whole partitions --------------------------------------------------------------------------------------------

    async def snapshot(self, *, partition: str = TRAIN, with_held: bool = True) -> Saved:
        """`with_held`: also rows that were acknowledged for a step, and that no checkpoint covers yet."""
        reply: wire.PartitionReply = await self._connection.call(wire.ReadPartition(partition, with_held))
        return saved_of(reply.content, _cells_of_rows(reply.granted, await self._payloads.open(reply.granted)))

    async def restore(self, saved: Saved, *, partition: str = TRAIN) -> None:
        async with self._payloads.packed(*saved_columns(saved)) as blocks:
            await self._connection.call(wire.RestorePartition(partition, partition_of(saved, blocks)))

    async def stats(self) -> StoreStats:
        reply: wire.StatsReply = await self._connection.call(wire.GetStats())
        return reply.stats

    async def lost(self) -> list[wire.LostRow]:
        """Rows that were lost with a node."""
        reply: wire.LostRowsReply = await self._connection.call(wire.GetLostRows())
        return reply.rows


def _inline(columns: Columns, packing: Packing) -> wire.PackedBlock:
    payload = wire.Payload(packing.nbytes, bytes(packing.to_bytes()), None, packing.has_tensors)
    return BlockSpec(tuple(columns), packing.nbytes, payload)


def _block_of(payload: wire.Payload) -> Block:
    """Of one that is part of the message."""
    return Block(bytearray(payload.data or b"") if payload.is_private else payload.data)


def _have_all(columns: frozenset[str], granted: wire.LeaseGranted, blocks: dict[int, Block]) -> bool:
    """Whether these blocks have these columns of every row."""
    names = {number: block.names for number, block in blocks.items()}
    none = frozenset[str]()
    return all(columns <= none.union(*(names.get(number, none) for number in run.blocks)) for run in granted.runs)


def _cells_of_runs(granted: wire.LeaseGranted, blocks: dict[int, Block]) -> list[dict[str, list[Any]]]:
    """The columns of each stretch of rows; where a cell was written again, the last."""
    found = []
    for run in granted.runs:
        where = {
            name: (blocks[number], start)
            for number, start in zip(run.blocks, run.starts, strict=True)
            if number in blocks
            for name in blocks[number].names
        }
        found.append({name: block.cells(name, start, run.count) for name, (block, start) in where.items()})
    return found


def _cells_of_rows(granted: wire.LeaseGranted, blocks: dict[int, Block]) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = []
    for run, columns in zip(granted.runs, _cells_of_runs(granted, blocks), strict=True):
        cells += [{name: column[index] for name, column in columns.items()} for index in range(run.count)]
    return cells
