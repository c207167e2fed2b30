"""The store of many processes: one coordinator keeps the books, segments of shared memory hold the payloads.

    producer ── reserve ──► coordinator        producer packs into the segment       consumer ── claim ──► coordinator
             ◄── segment ──              ── put (its name) ──►  books, journal                 ◄── names ──
                                                                                     and maps the segments

Only metadata passes through here, and payloads too small to be worth a segment. Nothing here waits for a client: one that
is slow, or says nothing any more, holds nobody up. One that dies gives its leases and its reservations back. The coordinator
itself may be killed at any moment: its journal has every change that anybody was told of, and clients ask again for what they
were not told.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from millstream.errors import StoreError
from millstream.store import Reads, StoreStats, Waiting
from millstream.store.entries import Block, RowEntry, Unit
from millstream.store.journal import Change, Grant, Journal, LoseNode, Record, State
from millstream.store.pool import Pool
from millstream.store.recall import load_state, state_of
from millstream.store.segments import SEGMENT_NAME, size_class
from millstream.store.table import BlockSpec, LeaseEntry, RestoredRows, RowTable, runs
from millstream.store.waiting import Claim, WaitQueues
from millstream.store.wire import (
    GREETING_BYTES,
    MAX_BYTES,
    Acknowledge,
    Answer,
    Body,
    Cancel,
    ClaimRows,
    Closed,
    CloseGroups,
    Count,
    Cover,
    Done,
    Drop,
    DropPartition,
    Failed,
    Finish,
    Frames,
    GiveBack,
    Granted,
    Groups,
    Hello,
    Look,
    Looked,
    Lost,
    LostNow,
    LostRows,
    Payload,
    Put,
    ReadyGroups,
    Release,
    Renew,
    Reply,
    Request,
    Reserve,
    Reserved,
    Restore,
    Rewind,
    Rows,
    Run,
    Segment,
    Stats,
    Told,
    Unlink,
    Welcome,
    Write,
)

GRACE_S = 2.0
"""How long a client may be away before it counts as dead."""
LONGER = 10
"""So many times as long a holder may be, and every client after the coordinator itself was away."""
FORGET_S = 3600.0
"""How long the answers to a dead client are kept: it may not be dead, and ask again for what was carried out."""
MAX_LOST = 100_000
MAX_DROPPED = 1000
"""Partitions that choosers may still ask about."""
TRIM_S = 2.0
SWEEP_S = 60.0
"""How long a producer of the life before may take to fill its segment."""
_encode = msgspec.msgpack.Encoder().encode
_decode_answer = msgspec.msgpack.Decoder(Answer).decode


class WallClock:
    """Ages of rows outlive this process."""

    def now(self) -> float:
        return time.time()


class Client:
    """What the coordinator knows of one process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.node = ""
        self.line: Frames | None = None
        self.address: tuple[str, int] | None = None
        self.results: dict[int, bytes] = {}
        """Answers to changes that it may not have heard."""
        self.grants: dict[int, int] = {}
        """The lease that was given for a request."""
        self.working: dict[int, asyncio.Task[None]] = {}
        self.reserved: dict[str, tuple[int, int]] = {}
        self.shown: set[int] = set()
        """Leases whose segments it has been told of, and will close."""
        self.is_holder = False
        self.death: asyncio.TimerHandle | None = None


class Coordinator:
    def __init__(
        self,
        tasks: Mapping[str, Reads],
        *,
        folder: Path,
        node: str,
        token: str,
        capacity_rows: int | None = None,
        capacity_bytes: int | None = None,
        unlink: Callable[[list[str]], None] = lambda names: None,
        names: Callable[[], list[str]] = list,
        grace_s: float = GRACE_S,
    ) -> None:
        self._clock = WallClock()
        self._token = token
        self._node = node
        self._grace_s = grace_s
        self._unlink_here = unlink
        self._names_here = names
        self.own_address: tuple[str, int] | None = None
        self.pool = Pool(self._unlink, time.monotonic)
        self.catalog = RowTable(
            tasks,
            capacity_rows=capacity_rows,
            capacity_bytes=capacity_bytes,
            on_free=self._free,
        )
        self._desk = WaitQueues(self.catalog, self._clock, on_grant=self._granted, give_back=self._give_back)
        self._clients: dict[str, Client] = {}
        self._lost: list[Lost] = []
        self._ready_changes: dict[tuple[str, str], tuple[int, asyncio.Event]] = {}
        self._num_changes = time.time_ns()
        """Higher than any of a life before."""
        self._dropped: dict[str, int] = {}
        """By partition: the change with which it was dropped."""
        self._choosing: dict[tuple[str, str], float] = {}
        """Clients that look at what is ready for a task and have not found what they want, and since when."""
        self._decoder = msgspec.msgpack.Decoder(Request)
        self._journal = Journal(folder / "journal.msgpack")
        self._recall()

    # ---- connections -------------------------------------------------------------------------------------------------

    async def serve(self, host: str, port: int) -> asyncio.Server:
        self._desk.watch_all(self.catalog.leases.values())
        for client in self._clients.values():  # of the life before: they come back, or they are dead
            self._expect(client, LONGER * self._grace_s)
        loop = asyncio.get_running_loop()
        loop.call_later(SWEEP_S, self._sweep)
        self._trim_now_and_then(loop)
        return await loop.create_server(self._connected, host, port, reuse_address=True)

    def _trim_now_and_then(self, loop: asyncio.AbstractEventLoop) -> None:
        self.pool.trim()
        loop.call_later(TRIM_S, self._trim_now_and_then, loop)

    def _connected(self) -> Frames:
        client: list[Client] = []

        def on_message(message: memoryview) -> None:
            request = self._decoder.decode(message)
            if isinstance(request.body, Hello):
                client[:] = self._greet(line, request.number, request.body)
            elif client and client[0].line is line:
                self._take(client[0], request)
            else:
                line.abort()

        def on_lost() -> None:
            if client and client[0].line is line:
                client[0].line = None
                self._expect(client[0])

        line = Frames(on_message, on_lost, GREETING_BYTES)
        return line

    def _greet(self, line: Frames, number: int, hello: Hello) -> list[Client]:
        """The client, unless it is a stranger."""
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            line.send(Reply(number, Failed("StoreError", "the store's token is another one")))
            assert line.transport is not None
            line.transport.close()
            return []
        client = self._clients.setdefault(hello.client, Client(hello.client))
        if client.line is not None:
            client.line.abort()  # of before: what is still on its way there is asked again here
        client.line = line
        client.node = hello.node
        client.address = hello.address
        client.is_holder = hello.address is not None
        waiting = set(hello.waiting)
        client.results = {asked: answer for asked, answer in client.results.items() if asked in waiting}
        client.grants = {asked: lease for asked, lease in client.grants.items() if asked in waiting}
        if client.death is not None:
            client.death.cancel()
            client.death = None
        line.most_bytes = MAX_BYTES
        line.send(Reply(number, Welcome()))
        return [client]

    def _expect(self, client: Client, within_s: float | None = None) -> None:
        """It has gone. If it is not back in time, it is dead."""
        if client.death is None:
            grace_s = within_s or (LONGER if client.is_holder else 1) * self._grace_s
            client.death = asyncio.get_running_loop().call_later(grace_s, self._bury, client)

    def _bury(self, client: Client) -> None:
        """What it had goes to others. Only the answers are kept for a while."""
        for work in client.working.values():
            work.cancel()
        for name in list(client.reserved):
            self._release(client, name)
        self._desk.give_back_of(client.name)
        self.pool.forget_reader(client.name)
        client.working = {}
        client.shown = set()
        client.death = asyncio.get_running_loop().call_later(FORGET_S, self._clients.pop, client.name, None)
        if client.is_holder and client.node != self._node:
            self._change("", 0, LoseNode(client.node))
            self._serve_everything()

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _take(self, client: Client, request: Request) -> None:
        if isinstance(request.body, Cancel):  # before what it names is taken for heard
            self._cancel(client, request.body.number)
        for heard in request.heard:
            client.results.pop(heard, None)
            client.grants.pop(heard, None)
        number, body = request.number, request.body
        if number in client.working:
            return  # asked again after a break: the answer will come
        if (known := client.results.get(number)) is not None:
            self._answer(client, number, _decode_answer(known))
            return
        try:
            answer = self._obey(client, number, body)
        except StoreError as error:
            answer = Failed(type(error).__name__, str(error))
        except Exception as error:  # a fault of ours: whoever asked is told, and what is true is read from the journal
            self._answer(client, number, Failed("StoreError", f"the coordinator failed: {error!r}"))
            self._die(error)
        if answer is not None:
            self._answer(client, number, answer)
        if self._journal.is_long:
            self._journal.begin_anew(Record("", 0, self._clock.now(), self._state()))

    def _answer(self, client: Client, number: int, answer: Answer) -> None:
        if client.line is None:
            return
        try:
            client.line.send(Reply(number, answer))
        except StoreError as error:
            client.line.send(Reply(number, Failed("StoreError", str(error))))

    def _die(self, error: Exception) -> NoReturn:
        """The books may be half changed, or the journal behind them. Whoever is started next reads what is true."""
        traceback.print_exception(error)
        os._exit(os.EX_SOFTWARE)

    def _obey(self, client: Client, number: int, body: Body) -> Answer | None:
        """The answer, or None if it comes later."""
        match body:
            case Put():
                return self._put(client, number, body)
            case CloseGroups() | Acknowledge() | GiveBack() | Drop() | Cover() | Finish() | Rewind() | DropPartition():
                return self._change(client.name, number, body)
            case Write() | Restore():
                return self._change_with_payload(client, number, body)
            case ClaimRows():
                return self._claim(client, number, body)
            case Reserve():
                self._later(client, number, self._reserve(client, number, body))
            case Release():
                self._release(client, body.name)
                return self._remember(client.name, number, Done())
            case ReadyGroups():
                self._later(client, number, self._ready_groups(client, body))
            case Renew():
                self._desk.renew(body.lease_id)
                return Done()
            case Look():
                return self._look(client, body.partition)
            case Stats():
                return Told(self._stats())
            case LostRows():
                return LostNow(self._lost)
            case Cancel():
                return Done()
            case Closed():
                for name in body.names:
                    self.pool.close(name, client.name)
                return self._remember(client.name, number, Done())
            case _:
                raise StoreError(f"{type(body).__name__} is no request")
        return None

    def _later(self, client: Client, number: int, work: Any) -> None:
        async def answer() -> None:
            try:
                result = await work
            except Exception as error:  # of a policy that is not ours, say
                kind = type(error).__name__ if isinstance(error, StoreError) else "StoreError"
                result = Failed(kind, str(error) if isinstance(error, StoreError) else repr(error))
                self._desk.serve_producers()  # the room that it had is free
            finally:
                if client.working.get(number) is task:
                    del client.working[number]
            self._answer(client, number, result)

        task = client.working[number] = asyncio.get_running_loop().create_task(answer())

    def _cancel(self, client: Client, number: int) -> None:
        work = client.working.pop(number, None)
        if work is not None:
            work.cancel()
        lease_id = client.grants.pop(number, None)
        if lease_id in self.catalog.leases:
            self._desk.give_back(lease_id)
        known = client.results.pop(number, None)
        answer = None if known is None else _decode_answer(known)
        if isinstance(answer, Reserved):
            self._release(client, answer.segment.name)

    # ---- changes: checked, journalled, carried out, remembered -------------------------------------------------------

    def _change(self, client: str, number: int, change: Change) -> Answer:
        answer = self._write_down(client, number, change)
        self._serve_after(change)
        return answer

    def _write_down(self, client: str, number: int, change: Change) -> Answer:
        now = self._clock.now()
        try:
            answer = self._apply(change, now)
            self._journal.append(Record(client, number, now, change))
        except StoreError:
            raise
        except Exception as error:  # the journal cannot be written, say: the books must not be ahead of it
            self._die(error)
        return self._remember(client, number, answer)

    def _remember(self, client: str, number: int, answer: Answer) -> Answer:
        if client in self._clients:
            self._clients[client].results[number] = _encode(answer)
        return answer

    def _apply(self, change: Change, now: float) -> Answer:
        catalog = self.catalog
        match change:
            case Put():
                ids = catalog.put(
                    change.group_ids,
                    _spec(change.columns, change.payload),
                    versions=change.versions,
                    tokens=change.tokens,
                    partition=change.partition,
                    now=now,
                )
                return Rows(ids.start, len(ids))
            case Write():
                catalog.write(change.row_ids, _spec(change.columns, change.payload), overwrite=change.overwrite)
            case CloseGroups():
                catalog.close(change.group_ids, change.partition)
            case Acknowledge():
                catalog.acknowledge(change.lease_id, change.step)
            case Drop():
                catalog.drop(change.lease_id)
            case GiveBack():
                catalog.give_back(change.lease_id)
            case Cover():
                catalog.cover(change.step, change.partition)
            case Finish():
                catalog.finish(change.partition)
            case Rewind():
                return Count(catalog.rewind(change.task, change.step, change.partition))
            case DropPartition():
                return Count(catalog.drop_partition(change.partition))
            case Restore():
                catalog.restore(
                    _restored(change), change.is_closed, change.acknowledged, change.partition, change.generation, now
                )
            case LoseNode():
                self._lose(change.node)
            case _:
                raise StoreError(f"{type(change).__name__} is no change")
        return Done()

    def _serve_after(self, change: Change) -> None:
        match change:
            case Acknowledge() | GiveBack() | Drop():
                self._desk.forget(change.lease_id)
                self._serve_everything()
            case Write():
                self._serve_everything()
            case Cover():
                self._desk.serve_producers()
            case DropPartition():
                self._desk.end_partition(change.partition)
                self._dropped[change.partition] = self._num_changes + 1
                if len(self._dropped) > MAX_DROPPED:
                    del self._dropped[next(iter(self._dropped))]
            case Put() | CloseGroups() | Finish() | Rewind() | Restore():
                self._desk.serve_all(change.partition)
        self._tell_of_ready_groups()

    def _serve_everything(self) -> None:
        self._desk.serve_producers()
        self._desk.wake()

    def _lose(self, node: str, names: set[str] | None = None) -> None:
        """All segments of a node, or those."""

        def is_lost(block: Block) -> bool:
            segment = block.payload.segment
            return segment is not None and segment.node == node and (names is None or segment.name in names)

        found = self.catalog.lose(is_lost)
        self._lost += [Lost(row.id, row.group.id, partition, node) for row, partition in found]
        del self._lost[:-MAX_LOST]

    # ---- producers ---------------------------------------------------------------------------------------------------

    def _put(self, client: Client, number: int, put: Put) -> Answer | None:
        num_rows, segment = len(put.group_ids), put.payload.segment
        if segment is not None:
            return self._change_with_payload(client, number, put)
        self._later(client, number, self._put_when_there_is_room(client, number, put, num_rows))
        return None

    def _change_with_payload(self, client: Client, number: int, change: Put | Write | Restore) -> Answer:
        """What was reserved is used if the change is made, and is its client's to release if it is refused."""
        payloads = _payloads(change)
        for payload in payloads:
            if payload.segment is not None and payload.segment.name not in client.reserved:
                self._check_is_there(payload.segment)
        answer = self._write_down(client.name, number, change)
        self._use_reserved(client, payloads)
        self._serve_after(change)
        return answer

    async def _put_when_there_is_room(self, client: Client, number: int, put: Put, num_rows: int) -> Answer:
        nbytes = put.payload.nbytes
        await self._desk.room(num_rows, nbytes, who=client.name, deadline_s=put.deadline_s)
        self._desk.use(num_rows, nbytes)
        return self._change(client.name, number, put)

    async def _reserve(self, client: Client, number: int, body: Reserve) -> Answer:
        size = size_class(body.nbytes)
        if body.num_rows:
            await self._desk.room(body.num_rows, size, who=client.name, deadline_s=body.deadline_s)
        else:
            self._desk.reserve(0, size)
        segment = self.pool.take(client.node, size)
        client.reserved[segment.name] = (body.num_rows, size)
        return self._remember(client.name, number, Reserved(segment))

    def _use_reserved(self, client: Client, payloads: list[Payload]) -> None:
        for payload in payloads:
            room = client.reserved.pop(payload.segment.name, None) if payload.segment is not None else None
            if room is not None:
                self._desk.use(*room)
            if payload.segment is not None:
                self.pool.adopt(payload.segment)

    def _check_is_there(self, segment: Segment) -> None:
        """It was given out in the life before, or its producer was taken for dead."""
        is_there = (
            segment.name in self._names_here() if segment.node == self._node else segment.node in self._addresses()
        )
        if not SEGMENT_NAME.fullmatch(segment.name) or segment.name in self.pool.names or not is_there:
            raise StoreError(f"the segment {segment.name} is gone, it was not filled in time: put the rows again")

    def _release(self, client: Client, name: str) -> None:
        room = client.reserved.pop(name, None)
        if room is not None:
            self.pool.discard(name)
            self._desk.release(*room)

    def _free(self, block: Block) -> None:
        if block.payload.segment is not None:
            self.pool.free(block.payload.segment)

    def _sweep(self) -> None:
        """Remove what the life before left behind on this node: segments that were being written, or kept for the next."""
        known = self.pool.names
        self._unlink_here([name for name in self._names_here() if name not in known])

    def _unlink(self, node: str, names: list[str]) -> None:
        if node == self._node:
            self._unlink_here(names)
            return
        for client in self._clients.values():
            if client.node == node and client.address is not None and client.line is not None:
                client.line.send(Reply(-1, Unlink(names)))

    # ---- consumers ---------------------------------------------------------------------------------------------------

    def _claim(self, client: Client, number: int, body: ClaimRows) -> Answer | None:
        lease_id = client.grants.get(number)
        if lease_id is not None:
            return self._lease(client, self.catalog.lease(lease_id))
        task = self.catalog.task(body.task)
        if body.group_id is None:
            self._later(client, number, self._wait_for_rows(client, number, body))
            return None
        taken: list[Unit] = self.catalog.select(
            task,
            body.want,
            body.partition,
            is_all=True,
            choose=lambda ready: body.group_id if body.group_id in ready else None,
        )
        if not taken:
            return Done()
        lease = self.catalog.grant(task, taken, body.partition, client.name, body.want)
        self._record_grant(lease, client.name, number)
        self._desk.watch_all([lease])
        return self._lease(client, lease)

    async def _wait_for_rows(self, client: Client, number: int, body: ClaimRows) -> Answer:
        task = self.catalog.task(body.task)
        lease = await self._desk.claim(task, body.want, None, body.partition, client.name, number)
        return self._lease(client, lease)

    def _granted(self, lease: LeaseEntry, claim: Claim) -> None:
        self._record_grant(lease, claim.holder, claim.number)

    def _record_grant(self, lease: LeaseEntry, holder: str, number: int) -> None:
        grant = Grant(lease.id, lease.task.name, [unit.id for unit in lease.units], lease.partition, lease.want)
        self._journal.append(Record(holder, number, self._clock.now(), grant))
        if holder in self._clients:
            self._clients[holder].grants[number] = lease.id

    def _give_back(self, lease_id: int) -> None:
        self.catalog.give_back(lease_id)
        self._journal.append(Record("", 0, self._clock.now(), GiveBack(lease_id)))
        self._tell_of_ready_groups()

    def _lease(self, client: Client, lease: LeaseEntry) -> Granted:
        empty = [unit.id for unit in lease.units if not unit.num_rows]
        is_first = lease.id not in client.shown
        client.shown.add(lease.id)
        return self._show(client, lease.id, lease.rows, empty, is_first=is_first)

    def _show(
        self, client: Client, lease_id: int, rows: list[RowEntry], empty: list[int], *, is_first: bool = True
    ) -> Granted:
        """Where these rows' cells are. Segments stay as they are until the client has closed its view of them."""
        stretches = runs(rows)
        blocks = {block.id: block.payload for some, _, _ in stretches for block in some}
        nodes = set()
        for payload in blocks.values():
            if payload.segment is not None:
                if is_first:
                    self.pool.open(payload.segment.name, client.name)
                nodes.add(payload.segment.node)
        return Granted(
            lease_id=lease_id,
            row_ids=[row.id for row in rows],
            group_ids=[row.group.id for row in rows],
            versions=[row.version for row in rows],
            runs=[Run([block.id for block in some], starts, count) for some, starts, count in stretches],
            blocks=blocks,
            empty_groups=empty,
            addresses={node: at for node, at in self._addresses().items() if node in nodes},
        )

    def _addresses(self) -> dict[str, tuple[str, int]]:
        """Where the holders listen, that of this node among them."""
        found = {c.node: c.address for c in self._clients.values() if c.address is not None and c.line is not None}
        return found if self.own_address is None else {**found, self._node: self.own_address}

    async def _ready_groups(self, client: Client, body: ReadyGroups) -> Answer:
        """For a client that chooses by itself: the groups that are ready, as soon as they differ from what it saw."""
        key = (body.partition, body.task)
        task, since, seen = self.catalog.task(body.task), self._clock.now(), body.seen
        while True:
            change, event = self._ready_changes.setdefault(key, (self._num_changes, asyncio.Event()))
            part = self.catalog.partition(body.partition)
            is_over = part.is_finished and not self.catalog.may_still_come(task, body.partition)
            if 0 < seen < self._dropped.get(body.partition, 0):
                return Groups(change, [], True)
            if change != seen or is_over:
                return Groups(change, [unit.id for unit in part.ready[body.task].in_order(None)], is_over)
            self._choosing[client.name, body.task] = since
            try:
                await event.wait()
            finally:
                self._choosing.pop((client.name, body.task), None)

    def _tell_of_ready_groups(self) -> None:
        self._num_changes += 1
        for key, (_, event) in list(self._ready_changes.items()):
            self._ready_changes[key] = (self._num_changes, asyncio.Event())
            event.set()

    def _stats(self) -> StoreStats:
        """Those who choose by themselves wait, too."""
        stats, now = self._desk.stats(), self._clock.now()
        count = dict(stats.waiting_consumers)
        for _, task in self._choosing:
            count[task] += 1
        choosing = [
            Waiting(who=who, what=f"a choice for {task}", seconds=now - since)
            for (who, task), since in self._choosing.items()
        ]
        waiting = sorted([*stats.waiting, *choosing], key=lambda one: -one.seconds)
        return msgspec.structs.replace(stats, waiting_consumers=count, waiting=waiting)

    def _look(self, client: Client, partition: str) -> Looked:
        part = self.catalog.partition(partition)
        rows = list(part.rows.values())
        return Looked(
            granted=self._show(client, 0, rows, []),
            is_closed={group_id: group.is_closed for group_id, group in part.groups.items()},
            acknowledged=self.catalog.acknowledged(part),
            tokens=[row.tokens for row in rows],
            steps=[self.catalog.steps_of(row) for row in rows],
            generation=self.catalog.generation,
        )

    # ---- the life before ---------------------------------------------------------------------------------------------

    def _recall(self) -> None:
        """Read the journal: the books are as they were, leases are with who had them."""
        self.pool.is_recalling = True
        for record in self._journal.read():
            client = self._clients.setdefault(record.client, Client(record.client)) if record.client else None
            match record.change:
                case State():
                    load_state(record.change, self.catalog, self.pool)
                    for lease in record.change.leases:
                        holder = self._clients.setdefault(lease.holder, Client(lease.holder))
                        holder.grants[lease.number] = lease.grant.lease_id
                    for name, results in record.change.results.items():
                        self._clients.setdefault(name, Client(name)).results.update(results)
                    self._lost = record.change.lost
                case Grant() as grant:
                    self._grant_again(grant, record)
                case change:
                    for payload in _payloads(change):
                        if payload.segment is not None:
                            self.pool.adopt(payload.segment)
                    answer = self._apply(change, record.at)
                    if client is not None:
                        client.results[record.number] = _encode(answer)
        self.pool.trust_no_reader()
        self._expect_what_is_away()

    def _expect_what_is_away(self) -> None:
        """Segments that are gone from this node (a machine that was started again), and holders of the others."""
        segments = {
            payload.segment.name: payload.segment
            for part in self.catalog.partitions.values()
            for row in part.rows.values()
            for payload in (block.payload for block, _ in row.parts)
            if payload.segment is not None
        }
        here = set(self._names_here())
        gone = {name for name, segment in segments.items() if segment.node == self._node and name not in here}
        if gone:
            self._lose(self._node, gone)
            self._journal.begin_anew(Record("", 0, self._clock.now(), self._state()))
        for node in {segment.node for segment in segments.values()} - {self._node}:
            holder = self._clients.setdefault(f"holder {node}", Client(f"holder {node}"))
            holder.node = node
            holder.is_holder = True

    def _grant_again(self, grant: Grant, record: Record) -> None:
        part, task = self.catalog.partition(grant.partition), self.catalog.task(grant.task)
        found: Mapping[int, Unit] = part.groups if task.reads.by_group else part.rows
        units = [found[unit] for unit in grant.units]
        self.catalog.grant_again(grant.lease_id, task, units, grant.partition, record.client, grant.want)
        self._clients.setdefault(record.client, Client(record.client)).grants[record.number] = grant.lease_id

    def _state(self) -> State:
        numbers = {lease: number for c in self._clients.values() for number, lease in c.grants.items()}
        results = {client.name: client.results for client in self._clients.values() if client.results}
        return state_of(self.catalog, numbers, results, self._lost)

    def close(self) -> None:
        self._journal.close()


def _spec(columns: list[str], payload: Payload) -> BlockSpec:
    nbytes = payload.nbytes if payload.segment is None else payload.segment.size
    return BlockSpec(tuple(columns), nbytes, payload)


def _restored(change: Restore) -> list[RestoredRows]:
    return [
        RestoredRows(
            rows.ids, rows.group_ids, _spec(rows.columns, rows.payload), rows.versions, rows.tokens, rows.steps
        )
        for rows in change.rows
    ]


def _payloads(change: Change) -> list[Payload]:
    match change:
        case Put() | Write():
            return [change.payload]
        case Restore():
            return [rows.payload for rows in change.rows]
        case _:
            return []
