"""The store of many processes: one coordinator keeps the metadata, segments of shared memory hold the payloads.

    producer ── reserve ──► coordinator        producer packs into the segment       consumer ── claim ──► coordinator
             ◄── segment ──              ── put (its name) ──►  table, journal                 ◄── names ──
                                                                                     and maps the segments

Only metadata passes through the coordinator, and payloads too small for a segment. It never waits for a client: a slow client
blocks no other. The leases and reservations of a client that dies are given back. The coordinator itself may be killed
at any moment: its journal has every change that a client knows of, and clients repeat requests that were not answered.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

from msgspec import Struct, structs

from millstream.clock import RealClock
from millstream.errors import RowsLost, StoreError
from millstream.store import wire
from millstream.store.base import Reads
from millstream.store.journal import (
    Change,
    FullState,
    Grant,
    Journal,
    JournalRecord,
    LoseNode,
    apply_change,
    load_state,
    replay_grant,
    state_of,
)
from millstream.store.rows import LeaseEntry, RowBlock, RowEntry, contiguous_runs
from millstream.store.segment_pool import SegmentPool
from millstream.store.segments import SegmentServer, server_name, size_class
from millstream.store.sessions import DISCONNECT_S, ClientSession, ClientSessions, decode_reply, failure_of
from millstream.store.table import RowTable
from millstream.store.waiting import ClaimQueues, PutQueue, ReadyWatch

logger = logging.getLogger(__name__)
MAX_LOST = 100_000
SWEEP_S = 60.0
"""How long a producer from before a restart may take to fill its segment."""


class StorePlan(Struct, frozen=True, kw_only=True):
    """Everything that a coordinator needs to start, and to restart."""

    tasks: dict[str, Reads]
    capacity_rows: int | None = None
    capacity_bytes: int | None = None
    host: str
    port: int
    token: str
    node: str
    memory: str
    """The folder of this node's segments."""
    memory_bytes: int | None = None
    """What segments in memory may have on each node. None: no bound."""
    spill: str | None = None
    """The folder on each node for the segments beyond that bound."""
    journal: str
    """The folder of the journal."""
    is_temporary: bool = True
    """Whether that folder is removed when the store is closed."""
    disconnect_s: float = DISCONNECT_S
    shard: int = 0
    """Its number among the coordinators of a store."""


class Coordinator:
    def __init__(self, plan: StorePlan) -> None:
        self._plan = plan
        self._clock = RealClock(start=time.time())  # the ages of rows outlive this process
        self._server = SegmentServer(Path(plan.memory), plan.token, plan.spill)
        self.sessions = ClientSessions(plan.token, plan.disconnect_s, self._on_request, self._on_expired)
        self.pool = SegmentPool(plan.node, self.sessions, self._server, plan.memory_bytes)
        self.table = RowTable(
            plan.tasks,
            capacity_rows=plan.capacity_rows,
            capacity_bytes=plan.capacity_bytes,
            shard=plan.shard,
            on_new=self.pool.adopt,
            on_free=self.pool.free,
        )
        self._puts = PutQueue(self.table, self._clock)
        self._claims = ClaimQueues(self.table, self._clock, on_grant=self._record_grant, give_back=self._give_back)
        self._watch = ReadyWatch(self.table, self._clock)
        self._lost: list[wire.LostRow] = []
        self._journal = Journal(Path(plan.journal) / "journal.msgpack")
        self._replay()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[asyncio.Server]:
        """Serves clients, and the segments of this node."""
        for lease in self.table.leases.values():  # from before a restart: their time starts again
            self._claims.start_expiry(lease)
        for session in self.sessions.by_name.values():  # from before a restart: they reconnect, or they expire
            self.sessions.start_expiry(session, is_after_restart=True)
        loop = asyncio.get_running_loop()
        loop.call_later(SWEEP_S, self.pool.sweep)
        self.pool.trim_regularly(loop)
        async with await self._server.serve(self._plan.host) as segments:
            self.pool.own_address = segments.sockets[0].getsockname()[:2]
            host, port = self._plan.host, self._plan.port
            async with await loop.create_server(self.sessions.connect, host, port, reuse_address=True) as server:
                yield server
        self._journal.close()

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _on_request(self, session: ClientSession, request: wire.StoreRequest) -> None:
        number, body = request.number, request.body
        if isinstance(body, wire.CancelRequest):  # before the request that it names counts as received
            self._cancel(session, body.number)
        session.forget_received(request.received)
        if number in session.running:
            return  # repeated after a reconnect: the answer will come
        if (known := session.results.get(number)) is not None:
            session.answer(number, decode_reply(known))
            return
        try:
            answer = self._handle(session, number, body)
        except StoreError as error:
            answer = failure_of(error)
        except Exception as error:  # a bug: answer with the error, and restart from the journal
            _crash(error, session, number, f"the coordinator failed: {error!r}")
        if answer is not None:
            session.answer(number, answer)
        if self._journal.is_long:
            try:
                self._rewrite_journal()
            except OSError as error:  # such as a full disk: the long one counts
                logger.warning('the journal in "%s" stays long: %s', self._plan.journal, error)

    def _handle(self, session: ClientSession, number: int, body: wire.RequestBody) -> wire.ReplyBody | None:
        """The answer, or None if it comes later."""
        match body:
            case wire.PutRows() if body.block.payload.segment is None:
                session.run(number, self._put_when_there_is_room(session, number, body))
            case wire.PutRows() | wire.WriteCells() | wire.RestorePartition():
                return self._change_with_payload(session, number, body)
            case wire.ClaimRows():
                return self._claim(session, number, body)
            case wire.ReserveSegment():
                session.run(number, self._reserve(session, number, body))
            case wire.ReleaseSegment():
                self._release(self._reserver(session, body.name), body.name)
                return session.remembered(number, wire.Accepted())
            case wire.WatchReady():
                session.run(number, self._watch.wait(session.name, body))
            case wire.RenewLease():
                self._claims.renew(body.lease_id)
                return wire.Accepted()
            case wire.ReadRows():
                return self._locate(session, 0, [self._row(row_id) for row_id in body.row_ids], [])
            case wire.ReadPartition():
                rows = self.table.partition(body.partition).rows_to_save(with_held=body.with_held)
                return wire.PartitionReply(self._locate(session, 0, rows, []), self.table.content(body.partition, rows))
            case wire.FindNode():
                session.run(number, self._find_node(body.node))
            case wire.GetStats():
                consumers = [*self._claims.waiters(), *self._watch.waiters()]
                stats = self.table.stats(self._clock.now(), consumers, self._puts.waiters())
                return wire.StatsReply(structs.replace(stats, spilled_bytes=self.pool.spilled_bytes))
            case wire.GetLostRows():
                return wire.LostRowsReply(self._lost)
            case wire.CancelRequest():
                return wire.Accepted()
            case wire.CloseViews():
                for name in body.names:
                    self.pool.close_view(name, session.name)
                return session.remembered(number, wire.Accepted())
            case wire.StoreHello():
                raise StoreError("StoreHello is not a request")
            case change:
                return self._change(session.name, number, change)
        return None

    def _cancel(self, session: ClientSession, number: int) -> None:
        task = session.running.pop(number, None)
        if task is not None:
            task.cancel()
        lease_id = session.grants.pop(number, None)
        if lease_id in self.table.leases:
            self._claims.give_back(lease_id)
        known = session.results.pop(number, None)
        answer = None if known is None else decode_reply(known)
        if isinstance(answer, wire.SegmentReserved):
            self._release(session, answer.segment.name)

    def _on_expired(self, session: ClientSession) -> None:
        """Give back what a dead client had."""
        for name in list(session.reserved):
            self._release(session, name)
        self._claims.give_back_of(session.name)
        self.pool.forget_reader(session.name)
        if session.is_segment_server and session.node != self._plan.node:
            self._change("", 0, LoseNode(session.node))

    # ---- changes: checked, applied, journalled, remembered -----------------------------------------------------------

    def _change(self, client: str, number: int, change: Change) -> wire.ReplyBody:
        answer = self._apply_and_record(client, number, change)
        self._serve_after(change)
        return answer

    def _apply_and_record(self, client: str, number: int, change: Change) -> wire.ReplyBody:
        now, given = self._clock.now(), change
        if self._plan.memory_bytes is not None:
            change = self._spill(given)
        try:
            answer = self._apply(change, now)
        except StoreError:
            self._discard_spilled(given, change)
            raise
        except Exception as error:
            _crash(error)
        self._record(client, number, change, now)
        session = self.sessions.by_name.get(client)
        return answer if session is None else session.remembered(number, answer)

    def _spill(self, change: Change) -> Change:
        """The change, with payloads that do not fit into memory in segments on disk."""
        match change:
            case wire.PutRows() | wire.WriteCells():
                return structs.replace(change, block=self.pool.spill(change.block))
            case wire.RestorePartition(saved=saved):
                blocks = list(saved.blocks)
                spilled = structs.replace(change, saved=structs.replace(saved, blocks=blocks))
                try:
                    for number, (places, block) in enumerate(saved.blocks):
                        blocks[number] = (places, self.pool.spill(block))
                except StoreError:
                    self._discard_spilled(change, spilled)
                    raise
                return spilled
        return change

    def _discard_spilled(self, given: Change, spilled: Change) -> None:
        for segment in set(wire.segments_of(spilled)) - set(wire.segments_of(given)):
            self.pool.discard(segment.name)

    def _record(self, client: str, number: int, change: Change | Grant, now: float) -> None:
        """Into the journal. If that fails, the table must not be ahead of it: the client gets the error, and the coordinator is
        restarted without the change."""
        try:
            self._journal.append(JournalRecord(client, number, now, change))
        except Exception as error:  # such as a full disk
            hint = "Free space on that disk, or set TMPDIR to a folder of another one and start again"
            failed = f'the store cannot write its journal in "{self._plan.journal}": {error}. {hint}'
            _crash(error, self.sessions.by_name.get(client), number, failed)

    def _apply(self, change: Change, now: float) -> wire.ReplyBody:
        if isinstance(change, LoseNode):
            self._lose_segments(change.node)
            return wire.Accepted()
        return apply_change(self.table, change, now)

    def _serve_after(self, change: Change) -> None:
        if isinstance(change, wire.LeaseRequest):
            self._claims.stop_expiry(change.lease_id)
        elif isinstance(change, wire.DropPartition):
            self._claims.end_partition(change.partition)
            self._watch.on_dropped(change.partition)
        self._puts.serve()
        self._claims.serve()
        self._watch.notify()

    def _lose_segments(self, node: str, names: set[str] | None = None) -> None:
        """All segments of a node, or these."""

        def is_lost(block: RowBlock) -> bool:
            segment = block.payload.segment
            return segment is not None and segment.node == node and (names is None or segment.name in names)

        found = self.table.lose(is_lost)
        self._lost += [wire.LostRow(row.id, row.group.id, row.group.partition, node) for row in found]
        del self._lost[:-MAX_LOST]

    # ---- producers ---------------------------------------------------------------------------------------------------

    async def _put_when_there_is_room(self, session: ClientSession, number: int, put: wire.PutRows) -> wire.ReplyBody:
        num_rows, nbytes = len(put.group_ids), put.block.nbytes
        await self._puts.room(num_rows, nbytes, who=session.name, deadline_s=put.deadline_s)
        self._puts.use(num_rows, nbytes)
        try:
            return self._change(session.name, number, put)
        except StoreError:
            self._puts.serve()  # the room is free again
            raise

    def _change_with_payload(self, session: ClientSession, number: int, change: wire.PayloadChange) -> wire.ReplyBody:
        """Reserved room is used if the change is made; if it is refused, the client releases it."""
        segments = wire.segments_of(change)
        owners = [self._reserver(session, segment.name) for segment in segments]
        for segment, owner in zip(segments, owners, strict=True):
            if segment.name not in owner.reserved:
                self.pool.check_exists(segment)
        answer = self._apply_and_record(session.name, number, change)
        for segment, owner in zip(segments, owners, strict=True):
            self._puts.use(*owner.reserved.pop(segment.name, (0, 0)))
        self._serve_after(change)
        return answer

    async def _reserve(self, session: ClientSession, number: int, body: wire.ReserveSegment) -> wire.ReplyBody:
        size = size_class(body.nbytes)
        if body.num_rows:
            await self._puts.room(body.num_rows, size, who=session.name, deadline_s=body.deadline_s)
        else:
            self._puts.reserve(0, size)
        segment = self.pool.take(session.node, size)
        session.reserved[segment.name] = (body.num_rows, size)
        return session.remembered(number, wire.SegmentReserved(segment))

    def _reserver(self, session: ClientSession, name: str) -> ClientSession:
        """The client that has reserved a segment: this one, unless rows were staged by another."""
        if name in session.reserved:
            return session
        return next((one for one in self.sessions.by_name.values() if name in one.reserved), session)

    def _release(self, session: ClientSession, name: str) -> None:
        room = session.reserved.pop(name, None)
        if room is not None:
            self.pool.discard(name)
            self._puts.release(*room)

    # ---- consumers ---------------------------------------------------------------------------------------------------

    def _claim(self, session: ClientSession, number: int, body: wire.ClaimRows) -> wire.ReplyBody | None:
        lease_id = session.grants.get(number)
        if lease_id is not None:
            return self._show(session, self.table.lease(lease_id))
        chosen = body.group_id
        choose = None if chosen is None else lambda ready: chosen if chosen in ready else None
        claim = self._claims.request(body.task, body.want, choose, body.partition, session.name, number)
        if choose is not None:
            lease = self._claims.claim_now(claim)
            return wire.Accepted() if lease is None else self._show(session, lease)

        async def wait_for_rows() -> wire.ReplyBody:
            return self._show(session, await self._claims.claim(claim))

        session.run(number, wait_for_rows())
        return None

    def _record_grant(self, lease: LeaseEntry, number: int) -> None:
        self._record(lease.holder, number, Grant.of(lease), self._clock.now())
        session = self.sessions.by_name.get(lease.holder)
        if session is not None:
            session.grants[number] = lease.id

    def _give_back(self, lease_id: int) -> None:
        self.table.give_back(lease_id)
        self._record("", 0, wire.GiveBackLease(lease_id), self._clock.now())
        self._watch.notify()

    def _show(self, session: ClientSession, lease: LeaseEntry) -> wire.LeaseGranted:
        is_first = lease.id not in session.shown
        session.shown.add(lease.id)
        return self._locate(session, lease.id, lease.rows, lease.empty_groups, is_first=is_first)

    def _locate(
        self, session: ClientSession, lease_id: int, rows: list[RowEntry], empty: list[int], *, is_first: bool = True
    ) -> wire.LeaseGranted:
        """Where the cells of these rows are. Segments are not reused until the client has closed its views of them."""
        runs = contiguous_runs(rows)
        blocks: dict[int, wire.Payload] = {block.id: block.payload for some, _, _ in runs for block in some}
        segments = [payload.segment for payload in blocks.values() if payload.segment is not None]
        for segment in segments if is_first else ():
            self.pool.open_view(segment.name, session.name)
        nodes = {segment.node for segment in segments}
        return wire.LeaseGranted(
            lease_id=lease_id,
            row_ids=[row.id for row in rows],
            group_ids=[row.group.id for row in rows],
            versions=[row.version for row in rows],
            runs=[wire.Run([block.id for block in some], starts, count) for some, starts, count in runs],
            blocks=blocks,
            empty_groups=empty,
            addresses={node: at for node, at in self.pool.addresses().items() if node in nodes} if nodes else {},
        )

    async def _find_node(self, node: str) -> wire.ReplyBody:
        return wire.NodeFound(await self.sessions.find_node(node))

    def _row(self, row_id: int) -> RowEntry:
        for lost in self._lost if row_id not in self.table.rows else ():
            if lost.row_id == row_id:
                raise RowsLost(f"row {row_id} of group {lost.group_id} was lost with node {lost.node}")
        return self.table.row(row_id)

    # ---- restart -----------------------------------------------------------------------------------------------------

    def _replay(self) -> None:
        """Read the journal: the table is as it was, and leases are still held."""
        self.pool.is_replaying = True
        for record in self._journal.read():
            match record.change:
                case FullState() as state:
                    load_state(state, self.table, self.pool)
                    for lease in state.leases:
                        self.sessions.find(lease.holder).grants[lease.number] = lease.grant.lease_id
                    for name, results in state.results.items():
                        self.sessions.find(name).results.update(results)
                    self._lost = state.lost
                case Grant() as grant:
                    replay_grant(self.table, grant, record.client)
                    self.sessions.find(record.client).grants[record.number] = grant.lease_id
                case change:
                    answer = self._apply(change, record.at)
                    if record.client:
                        self.sessions.find(record.client).remembered(record.number, answer)
        self.pool.finish_replay()
        self._check_segments()

    def _check_segments(self) -> None:
        """After a restart: segments of this node that are gone (the machine restarted), and segment servers of other nodes
        that have to reconnect."""
        payloads = [block.payload for row in self.table.rows.values() for block, _ in row.parts]
        segments = {payload.segment.name: payload.segment for payload in payloads if payload.segment is not None}
        here, own = set(self._server.names()), self._plan.node
        gone = {name for name, segment in segments.items() if segment.node == own and name not in here}
        if gone:
            self._lose_segments(own, gone)
            self._rewrite_journal()
        for node in {segment.node for segment in segments.values()} - {own}:
            session = self.sessions.find(server_name(node))
            session.node = node
            session.is_segment_server = True

    def _rewrite_journal(self) -> None:
        sessions = self.sessions.by_name.values()
        numbers = {lease: number for session in sessions for number, lease in session.grants.items()}
        results = {session.name: session.results for session in sessions if session.results}
        state = state_of(self.table, numbers, results, self._lost)
        self._journal.rewrite(JournalRecord("", 0, self._clock.now(), state))


def _crash(error: Exception, session: ClientSession | None = None, number: int = 0, why: str = "") -> NoReturn:
    """The table may be half changed, or ahead of the journal: end, and be restarted from the journal. `session`: the client
    whose request it was, which gets the reason."""
    if session is not None and session.connection is not None:
        session.answer(number, wire.RequestFailed("StoreError", why))
        session.connection.flush()
    traceback.print_exception(error)
    os._exit(os.EX_SOFTWARE)
