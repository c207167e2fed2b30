"""The rollout workers of a run, as its driver sees them: which worker plays an attempt, and what happens when one dies.

All members of a group go to one worker, so that its router keeps them where their prompt is computed; a new group goes to the
worker with the fewest attempts. A worker that dies fails its attempts, which are retried on others; rows are put by this
process alone, so each is in the store once. The worker is replaced: a success, an attempt that it has answered, forgives one
death. A worker that does not answer is killed. What the protocol is: `worker_host`.

A loss counts against the group that was alone on the worker, and against no other. Groups that were on two workers that died
are played with fewer and fewer others, until the one that kills its workers is alone: it fails, and keeps no retries.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, Protocol

from millstream.engine.base import NO_REQUEST, Engine, HasLine
from millstream.errors import (
    EngineError,
    EngineGone,
    EnvironmentFailed,
    MillstreamError,
    RolloutWorkerLost,
    WorkerExited,
)
from millstream.pipeline.admission import Place
from millstream.pipeline.attempts import ALL_RETRIES, AttemptEnd, Failure, RouterLine, owner_of
from millstream.pipeline.context import RunContext
from millstream.pipeline.worker_host import (
    AbortAttempt,
    AbortTurn,
    AttemptBroke,
    AttemptReply,
    CancelTurn,
    CloseLine,
    GateOpened,
    GenerateTurn,
    HostSetup,
    LineLost,
    OpenLine,
    Ping,
    PlayAttempt,
    ToDriver,
    TurnSpan,
    unpack_parts,
)
from millstream.retry import BackOff, Retry
from millstream.rpc.call import error_from
from millstream.serving.router import ReplicaChange
from millstream.store.wire import StagedRows
from millstream.types import RequestKey, Task

logger = logging.getLogger(__name__)
RESTART = BackOff(first_s=0.5)
MAX_DEATHS = 5  # of one worker, that no answered attempt forgives
LINE_AGAIN = BackOff(first_s=0.1, longest_s=30.0)
LINE_KEPT_S = 60.0  # a line that lasted as long forgives the losses before
NARROW = 8  # groups that were on two workers that died: this many times fewer at once on the next
NUM_CHECKS = 4  # within the time in which a worker must answer: the time of a suspended machine counts as one


class RolloutWorker(Protocol):
    """A worker that was started, perhaps not ready yet (`rpc.call.Remote`)."""

    error: Exception | None

    def call(self, message: Any, answer: Any = None) -> Future[Any]: ...

    def post(self, *messages: Any) -> None: ...

    def answer(self, number: int, value: Any) -> None: ...

    def fail(self, number: int, error: BaseException) -> None: ...

    def kill(self, why: str | None = None) -> None:
        """Its end is reported soon, with this reason."""
        ...

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


class _InFlight(NamedTuple):
    """An attempt that a worker has."""

    place: Place
    reply: asyncio.Future[AttemptReply]


class _Losses(NamedTuple):
    """Of a group: workers that died while they had it, and with how many groups at most it may be on the next one."""

    num: int
    most: int | None = None


class _LostLine(NamedTuple):
    retry: Retry
    at: float


class _Worker:
    """One place for a worker; the process in it may be replaced."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.remote: RolloutWorker | None = None
        self.retry = Retry(RESTART, max_failures=MAX_DEATHS)
        self.attempts: dict[RequestKey, _InFlight] = {}
        self.num_members: Counter[int] = Counter()  # by group
        self.lost_lines: dict[str, _LostLine] = {}  # by engine
        self.watching: asyncio.Task[None] | None = None
        self.has_answered = False

    @property
    def is_alive(self) -> bool:
        return self.remote is not None and self.remote.error is None

    def post(self, message: Any) -> None:
        if self.remote is not None:
            self.remote.post(message)


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
        self._losses: dict[int, _Losses] = {}  # by group
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
        worker.has_answered = False
        worker.watching = None  # what watches the one before ends by itself
        worker.lost_lines = {}
        worker.remote = remote = self._plan.start(
            worker.number,
            self._setup,
            lambda message, number: self._on_message(worker, remote, message, number),
            lambda error: self._on_exit(worker, error),
        )
        remote.post(*self._lines.values())

    # ---- attempts ----------------------------------------------------------------------------------------------------

    async def play(self, key: RequestKey, task: Task, place: Place, is_aborted: Callable[[], bool]) -> AttemptEnd:
        began, group_id = self._context.now(), key.group_id
        with self._context.waits.idle(owner_of(key), "its rollout worker"):  # which keeps rollout.timeout_s
            worker = await self._context.notifier.until(lambda: is_aborted() or self._choose(group_id))
            if not isinstance(worker, _Worker):
                return AttemptEnd(None, (), 0, self._context.now() - began)
            reply: asyncio.Future[AttemptReply] = asyncio.get_running_loop().create_future()
            worker.attempts[key] = _InFlight(place, reply)
            worker.num_members[group_id] += 1
            try:
                worker.post(PlayAttempt(key, task, place.start, place.deadline, self._router.rank_of(group_id)))
                self._watch(worker)
                answer = await reply
            except asyncio.CancelledError:
                worker.post(AbortAttempt(key))
                raise
            except _Lost as lost:
                return AttemptEnd(None, (), 0, self._context.now() - began, lost.failure)
            except (TypeError, ValueError, OverflowError) as error:
                why = f"with rollout.workers, a task must be plain data: {error}"
                failure = Failure(EnvironmentFailed.__name__, why)
                return AttemptEnd(None, (), 0, self._context.now() - began, failure)
            finally:
                self._remove(worker, key)
        worker.retry.succeeded()
        if self._losses and group_id not in worker.num_members:
            self._losses.pop(group_id, None)
        return self._end(key, answer)

    def _remove(self, worker: _Worker, key: RequestKey) -> None:
        del worker.attempts[key]
        worker.num_members[key.group_id] -= 1
        if not worker.num_members[key.group_id]:
            del worker.num_members[key.group_id]
            if self._losses:
                self._context.notifier.notify()  # a group may wait for a worker with few others

    def _choose(self, group_id: int) -> _Worker | None:
        living = [worker for worker in self._workers if worker.is_alive]
        home = next((worker for worker in living if group_id in worker.num_members), None)
        if home is None and self._losses:
            living = [worker for worker in living if self._may_have(worker, group_id)]
        return home or min(living, key=lambda worker: len(worker.attempts), default=None)

    def _may_have(self, worker: _Worker, group_id: int) -> bool:
        found = (self._losses.get(group) for group in (group_id, *worker.num_members))
        most = [losses.most for losses in found if losses is not None and losses.most is not None]
        return not most or len(worker.num_members) < min(most)

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
            if key in worker.attempts:
                worker.post(AbortAttempt(key))
        self._context.notifier.notify()  # it may wait for a worker

    # ---- what workers send -------------------------------------------------------------------------------------------

    def _on_message(self, worker: _Worker, remote: RolloutWorker, message: ToDriver, number: int) -> None:
        if self._is_closing:
            return
        match message:
            case AttemptReply():
                self._settle(worker, message.key, lambda reply: reply.set_result(message))
            case AttemptBroke():
                error = error_from(message.error)
                self._settle(worker, message.key, lambda reply: reply.set_exception(error))
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
                self._spawn(self._check_line(worker, remote, message.engine))

    def _settle(self, worker: _Worker, key: RequestKey, end: Callable[[asyncio.Future[AttemptReply]], None]) -> None:
        attempt = worker.attempts.get(key)
        if attempt is not None and not attempt.reply.done():
            end(attempt.reply)

    async def _turn(self, worker: _Worker, remote: RolloutWorker, message: GenerateTurn, number: int) -> None:
        request, key = message.request, message.request.key
        attempt = worker.attempts.get(RequestKey(group_id=key.group_id, member=key.member, attempt=key.attempt))
        try:
            if attempt is None:
                raise EnvironmentFailed("its attempt is over")
            remote.answer(number, await self._line.generate(request, attempt.place, _RemoteLimit(remote, key)))
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
            if any((key.group_id, key.member) == (one.group_id, one.member) for one in worker.attempts):
                turn.cancel()
        self._losses = {group_id: one for group_id, one in self._losses.items() if group_id in self._context.groups}
        lost = {group_id: self._lose(group_id, worker, error) for group_id in worker.num_members}
        for key, attempt in worker.attempts.items():
            if not attempt.reply.done():
                attempt.reply.set_exception(_Lost(lost[key.group_id]))
        if isinstance(error, WorkerExited):
            self._spawn(self._replace(worker, error))
        else:  # it said itself why it cannot be built
            self._spawn(_raise(error))

    def _lose(self, group_id: int, worker: _Worker, error: Exception) -> Failure:
        """A worker has died that played this group. In lockstep no group may wait for another: each loss counts."""
        why, num_groups = f"rollout worker {worker.number} is gone: {error}", len(worker.num_members)
        uses, num = 1, self._losses.get(group_id, _Losses(0)).num + 1
        if not self._setup.is_gated:
            self._losses[group_id] = _Losses(num, max(1, num_groups // NARROW) if num > 1 else None)
            uses = 0 if num_groups > 1 else 1 if num == 1 else ALL_RETRIES
        if uses == ALL_RETRIES:
            del self._losses[group_id]
            task_id = self._context.groups[group_id].task_id
            why += f". Task {task_id!r} was on each of {num} workers that died, and alone on the last: it is not tried again"
        return Failure(RolloutWorkerLost.__name__, why, uses)

    def _watch(self, worker: _Worker) -> None:
        if worker.watching is None or worker.watching.done():
            assert worker.remote is not None
            worker.watching = self._spawn(self._watch_while_busy(worker, worker.remote))

    async def _watch_while_busy(self, worker: _Worker, remote: RolloutWorker) -> None:
        """Kill a worker that does not answer: it is stopped, or code that it runs holds the interpreter's lock. One that has
        not answered yet is being built, which may take any time."""
        check_s = self._setup.answer_s / NUM_CHECKS
        while worker.attempts and remote.error is None:
            answer = asyncio.wrap_future(remote.call(Ping()))
            num_checks = 0
            while not answer.done():
                await asyncio.wait({answer}, timeout=check_s)
                num_checks += worker.has_answered
                if num_checks >= NUM_CHECKS and not answer.done():
                    limit = f"it did not answer for {self._setup.answer_s:g} s; rollout.timeout_s sets the limit"
                    remote.kill(limit)
                    await asyncio.wait({answer})
            if answer.exception() is not None:
                return
            worker.has_answered = True
            await asyncio.sleep(check_s)

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
                worker.post(CloseLine(engine.name))

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
                worker.post(order)

    async def _check_line(self, worker: _Worker, remote: RolloutWorker, name: str) -> None:
        """A worker has lost an engine: the engine is gone, or only the line is. That is opened again, after a back-off."""
        engine = next((one for one in self._router.engines if one.name == name), None)
        if engine is None:
            return
        try:
            await engine.abort(NO_REQUEST)  # which asks it for an answer
        except EngineGone as error:
            self._router.lose(engine, error)
        except EngineError as error:
            logger.warning("%s: %s", name, error)
        now, lost = self._context.now(), worker.lost_lines.get(name)
        if lost is None or now - lost.at > LINE_KEPT_S:
            lost = _LostLine(Retry(LINE_AGAIN), now)
        worker.lost_lines[name] = _LostLine(lost.retry, now)
        await asyncio.sleep(lost.retry.failed(now) or 0.0)
        if name in self._lines and worker.remote is remote:
            worker.post(self._lines[name])


class _Lost(Exception):
    """The worker of an attempt has died."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


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
            self.remote.post(GateOpened(self.key))


async def _raise(error: Exception) -> NoReturn:
    raise error
