"""The rollout workers of a run, as its driver sees them: which worker plays an attempt, and what happens when one dies.

All members of a group go to one worker, so that its router keeps them where their prompt is computed; a new group goes to the
worker with the fewest attempts. A worker that dies fails its attempts, which are retried as any failed attempt is, on others;
rows are put by this process alone, so each is in the store once. The worker is replaced: a success, an attempt that it has
answered, forgives one death. What the protocol is: `worker_host`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, Protocol

from millstream.engine.base import Engine, HasLine
from millstream.errors import (
    EngineError,
    EngineGone,
    EnvironmentFailed,
    MillstreamError,
    RolloutWorkerLost,
    WorkerExited,
)
from millstream.pipeline.admission import Place
from millstream.pipeline.attempts import AttemptEnd, Failure, RouterLine, owner_of
from millstream.pipeline.context import RunContext
from millstream.pipeline.worker_host import (
    AbortAttempt,
    AbortTurn,
    AttemptReply,
    CancelTurn,
    CloseLine,
    GateOpened,
    GenerateTurn,
    HostSetup,
    LineLost,
    OpenLine,
    PlayAttempt,
    ToDriver,
    TurnSpan,
    unpack_parts,
)
from millstream.retry import BackOff, Retry
from millstream.serving.router import ReplicaChange
from millstream.store.wire import StagedRows
from millstream.types import RequestKey, Task

logger = logging.getLogger(__name__)
RESTART = BackOff(first_s=0.5)
MAX_DEATHS = 5  # of one worker, that no answered attempt forgives
NO_REQUEST = RequestKey(group_id=-1, member=0)


class RolloutWorker(Protocol):
    """A worker that was started, perhaps not ready yet (`rpc.call.Remote`)."""

    error: Exception | None

    def call(self, message: Any, answer: Any = None) -> Future[Any]: ...

    def send(self, *messages: Any) -> None: ...

    def answer(self, number: int, value: Any) -> None: ...

    def fail(self, number: int, error: BaseException) -> None: ...

    async def shut(self) -> None:
        """Returns when it is gone."""
        ...


OnMessage = Callable[[ToDriver, int], None]
OnExit = Callable[[Exception], None]
StartWorker = Callable[[int, HostSetup, OnMessage, OnExit], RolloutWorker]


class StagedStore(Protocol):
    """Puts rows that workers have packed (`store.client.StoreClient`)."""

    async def put_staged(self, group_id: int, rows: StagedRows) -> None: ...

    def drop_staged(self, rows: StagedRows) -> None: ...


class WorkerPlan(NamedTuple):
    """How many workers a run has, how one is started, and the store that they pack rows for. `has_lines`: the engines take
    requests of other processes (`HasLine`)."""

    num: int
    start: StartWorker
    store: StagedStore
    has_lines: bool


class _Worker:
    """One place for a worker; the process in it may be replaced."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.remote: RolloutWorker | None = None
        self.retry = Retry(RESTART, max_failures=MAX_DEATHS)
        self.places: dict[RequestKey, Place] = {}  # of its attempts
        self.num_members: Counter[int] = Counter()  # by group

    @property
    def is_alive(self) -> bool:
        return self.remote is not None and self.remote.error is None

    def send(self, message: Any) -> None:
        if self.remote is not None:
            self.remote.send(message)


class RolloutWorkers:
    """Plays attempts in workers: see `attempts.AttemptHost`. `line`: for turns of workers without engines of their own."""

    def __init__(self, plan: WorkerPlan, setup: HostSetup, context: RunContext, line: RouterLine) -> None:
        self._plan = plan
        self._setup = setup
        self._context = context
        self._line = line
        self._router = line.router
        self._workers = [_Worker(number) for number in range(plan.num)]
        self._lines: dict[str, OpenLine] = {}
        self._turns: dict[RequestKey, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False

    def open(self) -> None:
        """Start them. To be called within the run: `RunContext.spawn` must work."""
        if self._setup.has_lines:
            self._router.listeners.append(self._on_change)
            for engine in self._router.engines:
                self._spawn(self._open_line(engine))
        for worker in self._workers:
            self._start(worker)

    def end(self) -> None:
        self._is_closing = True  # what they send is not read any more
        for task in self._tasks:
            task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._context.spawn(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Returns when all are gone."""
        self.end()
        if self._on_change in self._router.listeners:
            self._router.listeners.remove(self._on_change)
        await asyncio.gather(*(worker.remote.shut() for worker in self._workers if worker.remote is not None))

    def _start(self, worker: _Worker) -> None:
        worker.remote = remote = self._plan.start(
            worker.number,
            self._setup,
            lambda message, number: self._on_message(worker, remote, message, number),
            lambda error: self._on_exit(worker, error),
        )
        for line in self._lines.values():
            remote.send(line)

    # ---- attempts ----------------------------------------------------------------------------------------------------

    async def play(self, key: RequestKey, task: Task, place: Place, is_aborted: Callable[[], bool]) -> AttemptEnd:
        began, group_id = self._context.now(), key.group_id
        with self._context.waits.idle(owner_of(key), "its rollout worker"):  # which keeps rollout.timeout_s
            await self._context.notifier.until(lambda: is_aborted() or self._choose(group_id))
            worker = self._choose(group_id)
            if is_aborted() or worker is None:
                return AttemptEnd(None, (), 0, self._context.now() - began)
            worker.places[key] = place
            worker.num_members[group_id] += 1
            try:
                order = PlayAttempt(key, task, place.start, place.deadline, self._router.rank_of(group_id))
                assert worker.remote is not None
                reply = await asyncio.wrap_future(worker.remote.call(order, AttemptReply))
            except asyncio.CancelledError:
                worker.send(AbortAttempt(key))
                raise
            except WorkerExited as error:
                lost = f"rollout worker {worker.number} is gone: {error}"
                return self._failed(Failure(RolloutWorkerLost.__name__, lost), began)
            except (TypeError, ValueError, OverflowError) as error:
                why = f"with rollout.workers, a task must be plain data: {error}"
                return self._failed(Failure(EnvironmentFailed.__name__, why), began)
            finally:
                del worker.places[key]
                worker.num_members[group_id] -= 1
                if not worker.num_members[group_id]:
                    del worker.num_members[group_id]
        worker.retry.succeeded()
        return self._end(key, reply)

    def _choose(self, group_id: int) -> _Worker | None:
        living = [worker for worker in self._workers if worker.is_alive]
        home = next((worker for worker in living if worker.num_members[group_id]), None)
        return home or min(living, key=lambda worker: len(worker.places), default=None)

    def _failed(self, failure: Failure, began: float) -> AttemptEnd:
        return AttemptEnd(None, (), 0, self._context.now() - began, failure)

    def _end(self, key: RequestKey, reply: AttemptReply) -> AttemptEnd:
        rows = None if reply.rows is None else RemoteRows(self._plan.store, key.group_id, reply.rows)
        return AttemptEnd(
            reply.summary,
            unpack_parts(reply.parts),
            reply.num_sampled,
            reply.seconds,
            reply.failure,
            reply.reward_parts,
            rows,
        )

    async def abort(self, key: RequestKey) -> None:
        for worker in self._workers:
            if key in worker.places:
                worker.send(AbortAttempt(key))
        self._context.notifier.notify()  # it may wait for a worker

    # ---- what workers send -------------------------------------------------------------------------------------------

    def _on_message(self, worker: _Worker, remote: RolloutWorker, message: ToDriver, number: int) -> None:
        if self._is_closing:
            return
        match message:
            case GenerateTurn():
                key = message.request.key
                self._turns[key] = self._spawn(self._turn(worker, remote, message, number))
            case AbortTurn():
                self._spawn(self._abort_turn(remote, message.key, number))
            case CancelTurn():
                turn = self._turns.get(message.key)
                if turn is not None:
                    turn.cancel()
            case TurnSpan():
                self._context.emit_span(message.key, message.what, message.seconds, message.num_tokens)
            case LineLost():
                self._spawn(self._check_line(worker, message.engine))

    async def _turn(self, worker: _Worker, remote: RolloutWorker, message: GenerateTurn, number: int) -> None:
        request, key = message.request, message.request.key
        place = worker.places.get(RequestKey(group_id=key.group_id, member=key.member, attempt=key.attempt))
        try:
            if place is None:
                raise EnvironmentFailed("its attempt is over")
            remote.answer(number, await self._line.generate(request, place, _RemoteLimit(remote, key)))
        except asyncio.CancelledError:
            remote.fail(number, EnvironmentFailed("the turn was cancelled"))
            raise
        except Exception as error:  # process boundary: if it ends the run, it comes back as the error of the attempt
            remote.fail(number, error)
        finally:
            if self._turns.get(key) is asyncio.current_task():
                del self._turns[key]

    async def _abort_turn(self, remote: RolloutWorker, key: RequestKey, number: int) -> None:
        remote.answer(number, await self._line.abort(key))

    def _on_exit(self, worker: _Worker, error: Exception) -> None:
        """Its attempts have failed with this error."""
        if self._is_closing:
            return
        for key, turn in list(self._turns.items()):
            if any((key.group_id, key.member) == (one.group_id, one.member) for one in worker.places):
                turn.cancel()
        if isinstance(error, WorkerExited):
            self._spawn(self._replace(worker, error))
        else:  # it said itself why it cannot be built
            self._spawn(_raise(error))

    async def _replace(self, worker: _Worker, error: WorkerExited) -> None:
        wait_s = worker.retry.failed(self._context.now())
        if wait_s is None:
            raise MillstreamError(
                f"rollout worker {worker.number} died {worker.retry.num_failures} times, and played nothing in between: {error}"
            )
        logger.warning("rollout worker %d is replaced in %g s: %s", worker.number, wait_s, error)
        await asyncio.sleep(wait_s)
        self._start(worker)
        self._context.notifier.notify()

    # ---- lines to engines --------------------------------------------------------------------------------------------

    def _on_change(self, change: ReplicaChange) -> None:
        engine = change.engine
        if change.is_serving:
            self._spawn(self._open_line(engine))
        elif not self._router.serves(engine) and self._lines.pop(engine.name, None) is not None:
            for worker in self._workers:
                worker.send(CloseLine(engine.name))

    async def _open_line(self, engine: Engine) -> None:
        """Each worker gets its share of the slots. What an evaluation sends comes on top, and waits in the engine's queue."""
        assert isinstance(engine, HasLine)
        try:
            line = await engine.line()
        except EngineGone:  # the router will know
            return
        if self._router.serves(engine):
            order = self._lines[engine.name] = OpenLine(engine.name, -(-engine.slots // self._plan.num), line)
            for worker in self._workers:
                worker.send(order)

    async def _check_line(self, worker: _Worker, name: str) -> None:
        """A worker has lost an engine: the engine is gone, or only the line is."""
        engine = next((one for one in self._router.engines if one.name == name), None)
        if engine is None:
            return
        try:
            await engine.abort(NO_REQUEST)  # which asks it for an answer
        except EngineGone as error:
            self._router.lose(engine, error)
        except EngineError as error:
            logger.warning("%s: %s", name, error)
        if name in self._lines:
            worker.send(self._lines[name])


class RemoteRows(NamedTuple):
    """The rows of a rollout that a worker has packed: see `attempts.PackedRows`."""

    store: StagedStore
    group_id: int
    rows: StagedRows

    async def put(self) -> None:
        await self.store.put_staged(self.group_id, self.rows)

    def drop(self) -> None:
        self.store.drop_staged(self.rows)


class _RemoteLimit(NamedTuple):
    """The time limit of an attempt in a worker."""

    remote: RolloutWorker
    key: RequestKey

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The worker pauses it when it asks for a turn."""
        try:
            yield
        finally:
            self.remote.send(GateOpened(self.key))


async def _raise(error: Exception) -> NoReturn:
    raise error
