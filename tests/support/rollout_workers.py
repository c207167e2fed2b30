"""Rollout workers in this process, on any clock: real messages, encoded and decoded, over a connection that is a call of the
event loop. A worker can be killed: what it had not sent is gone, and so are rows that it had packed and nobody had put."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from millstream.clock import VirtualClock
from millstream.decoding import msgpack_decoder
from millstream.engine import EngineStats, OnSampled
from millstream.engine.base import Engine, EngineLine
from millstream.env import Environment
from millstream.errors import EngineGone, RowsLost, WorkerExited
from millstream.pipeline.worker_host import HostSetup, OnBroken, OpenLine, ToDriver, ToWorker, WorkerHost
from millstream.pipeline.workers import OnExit, OnMessage, WorkerPlan
from millstream.rpc.call import ErrorInfo, describe_error, error_from
from millstream.sim.engine import SimEngine
from millstream.store.base import Columns
from millstream.store.blocks import Block, Packing
from millstream.store.memory import MemoryStore
from millstream.store.rows import BlockSpec, num_rows_of
from millstream.store.wire import Payload, StagedRows
from millstream.types import Completion, Request, RequestKey, Weights

encode = msgspec.msgpack.encode


class End:
    """One end of a connection: see `rpc.call.Channel`. `num_bytes`: that it has sent."""

    def __init__(self, messages: Any, on_message: Callable[[Any, int], None]) -> None:
        self.peer: End
        self.is_closed = False
        self.num_bytes = 0
        self._messages = messages
        self._on_message = on_message
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[Future[Any], Any]] = {}

    def call(self, message: Any, answer: Any = None) -> Future[Any]:
        future: Future[Any] = Future()
        number = next(self._numbers)
        self._waiting[number] = future, answer
        self._send(self.peer.on_message, encode(message), number)
        return future

    def send(self, *messages: Any) -> None:
        for message in messages:
            self._send(self.peer.on_message, encode(message), 0)

    post = send

    def answer(self, number: int, value: Any) -> None:
        self._send(self.peer.on_answer, encode(value), number)

    def fail(self, number: int, error: BaseException) -> None:
        self._send(self.peer.on_failure, encode(describe_error(error)), number)

    def _send(self, deliver: Callable[[bytes, int], None], data: bytes, number: int) -> None:
        if not self.is_closed:
            self.num_bytes += len(data)
            asyncio.get_running_loop().call_soon(deliver, data, number)

    def on_message(self, data: bytes, number: int) -> None:
        if not self.is_closed:
            self._on_message(msgpack_decoder(self._messages).decode(data), number)

    def on_answer(self, data: bytes, number: int) -> None:
        if not self.is_closed:
            future, kind = self._waiting.pop(number)
            if future.set_running_or_notify_cancel():
                future.set_result(None if kind is None else msgpack_decoder(kind).decode(data))

    def on_failure(self, data: bytes, number: int) -> None:
        if not self.is_closed:
            self._end(self._waiting.pop(number)[0], error_from(msgpack_decoder(ErrorInfo).decode(data)))

    def close(self, error: Exception) -> None:
        self.is_closed = True
        for future, _ in self._waiting.values():
            self._end(future, error)
        self._waiting.clear()

    @staticmethod
    def _end(future: Future[Any], error: Exception) -> None:
        if future.set_running_or_notify_cancel():
            future.set_exception(error)


class StagingStore(MemoryStore):
    """A store in memory whose rows may be packed by workers."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.packed: dict[str, bytes] = {}  # and neither put nor dropped
        self._names = map(str, itertools.count())

    async def stage(self, columns: Columns, *, small: Columns | None = None, versions: int | None = None) -> StagedRows:
        num, name = num_rows_of(columns), next(self._names)
        self.packed[name] = bytes(Packing({**columns, **(small or {})}).to_bytes())
        return StagedRows(BlockSpec((name,), 0, Payload(0)), [versions or 0] * num, [0] * num)

    async def put_staged(self, group_id: int, rows: StagedRows) -> None:
        (name,) = rows.block.columns
        if name not in self.packed:
            raise RowsLost("the worker that packed them is gone")
        block = Block(self.packed.pop(name))
        columns = {name: block.cells(name, 0, block.num_rows) for name in block.names}
        await self.put(group_id, columns, versions=rows.versions)

    def drop_staged(self, rows: StagedRows) -> None:
        self.packed.pop(rows.block.columns[0], None)


class OwnStaging:
    """What one worker has packed."""

    def __init__(self, store: StagingStore) -> None:
        self._store = store
        self._names: set[str] = set()

    async def stage(self, columns: Columns, *, small: Columns | None = None, versions: int | None = None) -> StagedRows:
        rows = await self._store.stage(columns, small=small, versions=versions)
        self._names.add(rows.block.columns[0])
        return rows

    def lose(self) -> None:
        for name in self._names:
            self._store.packed.pop(name, None)


class LineSimEngine(SimEngine):
    """A simulated engine that several routers may use."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.on_version: list[Callable[[], None]] = []

    async def line(self) -> EngineLine:
        return EngineLine("", 0, self.name)

    async def load(self, version: int, weights: Weights) -> None:
        await super().load(version, weights)
        for call in self.on_version:
            asyncio.get_running_loop().call_soon(call)  # a worker hears of it later


class SharedEngine:
    """A worker's share of an engine."""

    def __init__(self, engine: LineSimEngine, slots: int, on_broken: OnBroken) -> None:
        self.name = engine.name
        self.slots = slots
        self._engine = engine
        self._on_broken = on_broken
        self._broken: EngineGone | None = None

    def cut(self) -> None:
        """The line breaks."""
        self._broken = EngineGone("its line was cut")
        self._on_broken(self, self._broken)

    @property
    def version(self) -> int:
        return self._engine.version

    async def generate(self, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        if self._broken is not None:
            raise self._broken
        return await self._engine.generate(request, on_sampled)

    async def abort(self, key: RequestKey) -> None:
        await self._engine.abort(key)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def load(self, version: int, weights: Weights) -> None: ...

    async def close(self) -> None: ...


class FakeWorker:
    """A worker, as its driver sees it."""

    def __init__(self, driver: End, host: WorkerHost, staging: OwnStaging, on_exit: OnExit) -> None:
        self.error: Exception | None = None
        self.host = host
        self._driver = driver
        self._staging = staging
        self._on_exit = on_exit
        self.call = driver.call
        self.post = driver.post
        self.answer = driver.answer
        self.fail = driver.fail

    @property
    def num_bytes(self) -> int:
        """To it and from it."""
        return self._driver.num_bytes + self._driver.peer.num_bytes

    def stop(self) -> None:
        """It neither reads nor sends any more, and does not end."""
        self._driver.peer.is_closed = True

    def kill(self, why: str | None = None) -> None:
        if self.error is None:
            self._end(why or "killed")
            self._staging.lose()
            assert self.error is not None
            self._on_exit(self.error)

    async def shut(self) -> None:
        self._end("closed")

    def _end(self, why: str) -> None:
        self.error = self.error or WorkerExited(why, is_death=True)
        self._driver.peer.is_closed = True
        for task in list(self.host._tasks):
            task.cancel()
        self._driver.close(self.error)


class FakeWorkers:
    """Starts workers in this process. `workers`: all that were started."""

    def __init__(self, environment: Environment, store: StagingStore, engines: list[LineSimEngine]) -> None:
        self.workers: list[FakeWorker] = []
        self.lines: list[SharedEngine] = []  # all that were opened
        self._environment = environment
        self._store = store
        self._engines = engines

    def plan(self, num: int, *, has_lines: bool) -> WorkerPlan:
        return WorkerPlan(num, self._start, self._store, has_lines)

    @property
    def living(self) -> list[FakeWorker]:
        return [worker for worker in self.workers if worker.error is None]

    def _start(self, number: int, setup: HostSetup, on_message: OnMessage, on_exit: OnExit) -> FakeWorker:
        driver = End(ToDriver, on_message)
        worker = End(ToWorker, lambda message, number: host.handle(message, number))
        driver.peer = worker
        worker.peer = driver
        staging = OwnStaging(self._store)
        host = WorkerHost(worker, setup, self._environment, staging, self._connect, VirtualClock())
        self.workers.append(FakeWorker(driver, host, staging, on_exit))
        return self.workers[-1]

    def _connect(self, order: OpenLine, on_version: Callable[[], None], on_broken: OnBroken) -> Engine:
        engine = next(one for one in reversed(self._engines) if one.name == order.engine)
        engine.on_version.append(on_version)
        shared = SharedEngine(engine, order.slots, on_broken)
        self.lines.append(shared)
        return shared
