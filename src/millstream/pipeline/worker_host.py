"""A rollout worker's side: hosts attempts (`attempts.Attempts`), and packs the rows of those that end where it is.

    driver (`workers.RolloutWorkers`)             worker (`WorkerHost`)
      PlayAttempt ─────────────────────────────▶   the episode, its environment and rewards
      ◀──────────────────────────── AttemptReply   what is recorded of it, and where its rows are packed
      ◀──────────────────────────── AttemptBroke   an error that ends the run
      AbortAttempt ────────────────────────────▶
      OpenLine, CloseLine ─────────────────────▶   engines that it may use, and how many slots of each
      ◀───────────────────────────────── LineLost
      ◀────── GenerateTurn, AbortTurn, CancelTurn   turns, where it has no engines: through the router of the driver
      GateOpened ──────────────────────────────▶   in lockstep
      ◀───────────────────────────────── TurnSpan
      Ping ────────────────────────────────────▶   answered by its event loop

Messages of one turn of an event loop are sent together. With lines to engines the driver handles a message of constant size
for an attempt, whatever its length and turns.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol

from msgspec import Struct, structs

from millstream.clock import Clock
from millstream.engine.base import Engine, EngineLine
from millstream.env import Environment
from millstream.errors import EngineGone
from millstream.events import Event
from millstream.pipeline.admission import Place
from millstream.pipeline.attempts import (
    ENGINE,
    OTHERS,
    AttemptEnd,
    Attempts,
    AttemptSummary,
    Failure,
    Pausable,
    RouterLine,
    TurnLine,
    columns_of_rollout,
    owner_of,
)
from millstream.pipeline.episode import Player
from millstream.pipeline.schema import LONG_COLUMNS, sizes_of
from millstream.pipeline.waits import Waits
from millstream.rpc.call import ErrorInfo, describe_error
from millstream.serving.router import ReplicaChange, RequestRank, Router
from millstream.store.base import Columns
from millstream.store.blocks import Block, Packing
from millstream.store.wire import StagedRows
from millstream.types import Completion, Request, RequestKey, Rollout, Sampling, Task

MAX_SHOWN_TOKENS = 256  # of a rollout that is not kept: as many as an event may show
BLOCKED_S = 60.0
SHOWN_S = 1.0  # between two that are sent to be shown
LINE_PATIENCE_S = (
    60.0  # at least, without an engine: the driver opens a line again, or the engine is gone and it says so
)


class _WorkerMessage(Struct, tag=True, array_like=True): ...


class PlayAttempt(_WorkerMessage):
    key: RequestKey
    task: Task
    start: int
    deadline: int
    rank: RequestRank | None


class AbortAttempt(_WorkerMessage):
    key: RequestKey


class GateOpened(_WorkerMessage):
    """The turn with this key has passed the gate: its time limit counts again."""

    key: RequestKey


class OpenLine(_WorkerMessage):
    """The worker may use this many slots of an engine."""

    engine: str
    slots: int
    line: EngineLine


class CloseLine(_WorkerMessage):
    engine: str


class Ping(_WorkerMessage):
    """Answered with nothing."""


class GenerateTurn(_WorkerMessage):
    request: Request


class AbortTurn(_WorkerMessage):
    """Answered as `Router.abort`."""

    key: RequestKey


class CancelTurn(_WorkerMessage):
    key: RequestKey


class TurnSpan(_WorkerMessage):
    key: RequestKey
    what: str
    seconds: float
    num_tokens: int


class LineLost(_WorkerMessage):
    engine: str


class AttemptReply(_WorkerMessage):
    """An `AttemptEnd` as data."""

    key: RequestKey
    summary: AttemptSummary | None
    num_sampled: int
    seconds: float
    failure: Failure | None
    reward_parts: dict[str, float]
    rows: StagedRows | None
    parts: bytes


class AttemptBroke(_WorkerMessage):
    key: RequestKey
    error: ErrorInfo


ToWorker = PlayAttempt | AbortAttempt | GateOpened | OpenLine | CloseLine | Ping
ToDriver = AttemptReply | AttemptBroke | GenerateTurn | AbortTurn | CancelTurn | TurnSpan | LineLost


class HostSetup(Struct, frozen=True, kw_only=True):
    """What a worker must know of the run. `has_lines`: it has engines of its own. `is_gated`: turns wait at the gate of
    lockstep. `keeps_parts`: whole rollouts are kept by the driver, and not only what an event shows."""

    sampling: Sampling
    seed: int
    max_parts: int
    timeout_s: float
    records_turns: bool
    has_lines: bool
    is_gated: bool
    keeps_parts: bool
    patience_s: float
    are_prefixes_kept: bool

    @property
    def blocked_s(self) -> float:
        """How long its event loop may stand still before a worker ends itself."""
        return max(BLOCKED_S, self.timeout_s)

    @property
    def answer_s(self) -> float:
        """How long it may not answer before it is killed."""
        return 1.25 * self.blocked_s


class DriverConnection(Protocol):
    """One end of the connection (`rpc.call.Channel`)."""

    def call(self, message: Any, answer: Any = None) -> Future[Any]: ...

    def post(self, *messages: Any) -> None: ...

    def answer(self, number: int, value: Any) -> None: ...


class Staging(Protocol):
    """Where a worker packs rows (`store.client.StoreClient`)."""

    async def stage(
        self, columns: Columns, *, small: Columns | None = None, versions: int | None = None
    ) -> StagedRows: ...


OnBroken = Callable[[Engine, EngineGone], None]
ConnectEngine = Callable[[OpenLine, Callable[[], None], OnBroken], Engine]
"""Makes an engine of a line; it calls the first function when its version has changed, the second when the line has broken."""


class _NoEvents:
    def emit(self, event: Event) -> None:
        """The driver reports engines."""


class WorkerHost:
    """Hosts attempts. `handle` is called with every message, on the event loop."""

    def __init__(
        self,
        link: DriverConnection,
        setup: HostSetup,
        environment: Environment,
        store: Staging,
        connect: ConnectEngine,
        clock: Clock,
    ) -> None:
        self._link = link
        self._setup = setup
        self._store = store
        self._connect = connect
        self._clock = clock
        self._is_aborted: dict[RequestKey, bool] = {}  # of attempts in flight
        self._ranks: dict[int, RequestRank | None] = {}  # of their groups
        self._num_playing: Counter[int] = Counter()  # by group
        self._tasks: set[asyncio.Task[None]] = set()
        self._engines: dict[str, Engine] = {}
        self._shown_at = float("-inf")
        waits = Waits(clock=clock, sink=_NoEvents(), stall_s=setup.timeout_s, deadline_s=setup.timeout_s)
        patience_s = max(setup.patience_s, LINE_PATIENCE_S)
        self._router = Router([], patience_s=patience_s, clock=clock, sink=_NoEvents())
        self._router.prefixes.are_kept = setup.are_prefixes_kept
        self._router.rank_of = self._ranks.get
        self._router.listeners.append(self._on_change)
        self._driver = DriverLine(link, waits, is_gated=setup.is_gated)
        line: TurnLine = RouterLine(self._router, waits) if setup.has_lines else self._driver
        player = Player(
            environment=environment,
            sampling=setup.sampling,
            run_seed=setup.seed,
            role="train",
            max_parts=setup.max_parts,
            waits=waits,
            record=self._record_span if setup.records_turns else None,
        )
        self._attempts = Attempts(player, line, timeout_s=setup.timeout_s, now=clock.now)

    def handle(self, message: ToWorker, number: int) -> None:
        match message:
            case PlayAttempt():
                group_id = message.key.group_id
                self._is_aborted[message.key] = False
                self._ranks[group_id] = message.rank
                self._num_playing[group_id] += 1
                self._router.newest_seen = max(self._router.newest_seen, message.start)
                self._spawn(self._play(message))
            case AbortAttempt():
                if message.key in self._is_aborted:
                    self._is_aborted[message.key] = True
                    self._spawn(self._attempts.abort(message.key))
            case GateOpened():
                self._driver.on_opened(message.key)
            case OpenLine():
                self._open(message)
            case CloseLine():
                self._close(message.engine)
            case Ping():
                self._link.answer(number, None)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- attempts ----------------------------------------------------------------------------------------------------

    async def _play(self, order: PlayAttempt) -> None:
        key, place = order.key, Place(order.start, order.deadline)
        try:
            end = await self._attempts.play(key, order.task, place, lambda: self._is_aborted[key])
            self._link.post(await self._reply(key, end))
        except Exception as error:  # process boundary: it ends the run
            self._link.post(AttemptBroke(key, describe_error(error)))
        finally:
            del self._is_aborted[key]
            self._num_playing[key.group_id] -= 1
            if not self._num_playing[key.group_id]:
                del self._num_playing[key.group_id], self._ranks[key.group_id]

    async def _reply(self, key: RequestKey, end: AttemptEnd) -> AttemptReply:
        rows, parts = None, end.parts
        if end.summary is not None and not self._is_aborted[key]:
            columns = columns_of_rollout(parts)
            long = {name: columns.pop(name) for name in LONG_COLUMNS}
            small = columns | sizes_of(long["tokens"], long["loss_mask"])
            rows = await self._store.stage(long, small=small, versions=end.summary.start_version)
        if not self._setup.keeps_parts:
            parts = self._shown(end)
        return AttemptReply(
            key,
            end.summary,
            end.num_sampled,
            end.seconds,
            end.failure,
            {str(name): float(value) for name, value in end.reward_parts.items()},
            rows,
            bytes(Packing(columns_of_rollout(parts)).to_bytes()) if parts else b"",
        )

    def _shown(self, end: AttemptEnd) -> tuple[Rollout, ...]:
        """Of rollouts that are not kept: now and then one that has ended, as much of it as an event may show."""
        if end.summary is None or self._clock.now() - self._shown_at < SHOWN_S:
            return ()
        self._shown_at = self._clock.now()
        return (_head(end.parts[0]),)

    @contextmanager
    def _record_span(self, key: RequestKey, what: str) -> Iterator[Callable[[int], None]]:
        began, tokens = self._clock.now(), [0]
        try:
            yield tokens.append
        finally:
            self._link.post(TurnSpan(key, what, self._clock.now() - began, tokens[-1]))

    # ---- engines -----------------------------------------------------------------------------------------------------

    def _open(self, order: OpenLine) -> None:
        self._close(order.engine)
        engine = self._engines[order.engine] = self._connect(order, self._router.dispatch, self._on_broken)
        self._router.join(engine)

    def _on_broken(self, engine: Engine, error: EngineGone) -> None:
        """Also when it has no request that would notice."""
        if self._engines.get(engine.name) is engine:
            self._router.lose(engine, error)

    def _close(self, name: str) -> None:
        """By order of the driver, which is not to hear of it as of a lost line."""
        engine = self._engines.pop(name, None)
        if engine is not None:
            self._spawn(engine.close())
            self._router.lose(engine, EngineGone(f"{name} is not to be used any more"))

    def _on_change(self, change: ReplicaChange) -> None:
        """An engine that was lost: the driver knows whether that is the engine's end."""
        name = change.engine.name
        if change.is_lost and self._engines.get(name) is change.engine:
            del self._engines[name]
            self._spawn(change.engine.close())
            self._link.post(LineLost(name))


class DriverLine:
    """Turns through the router of the driver."""

    def __init__(self, link: DriverConnection, waits: Waits, *, is_gated: bool) -> None:
        self._link = link
        self._waits = waits
        self._is_gated = is_gated
        self._opened: dict[RequestKey, asyncio.Future[None]] = {}

    def on_opened(self, key: RequestKey) -> None:
        opened = self._opened.get(key)
        if opened is not None and not opened.done():
            opened.set_result(None)

    async def generate(self, request: Request, place: Place, limit: Pausable) -> Completion:
        key, owner = request.key, owner_of(request.key)
        answer = asyncio.wrap_future(self._link.call(GenerateTurn(request), Completion))
        try:
            if self._is_gated:
                opened = self._opened[key] = asyncio.get_running_loop().create_future()
                with limit.paused(), self._waits.idle(owner, OTHERS):
                    await asyncio.wait({answer, opened}, return_when=asyncio.FIRST_COMPLETED)
            with self._waits.idle(owner, ENGINE):
                completion: Completion = await answer
                return completion
        except asyncio.CancelledError:
            self._link.post(CancelTurn(key))
            answer.cancel()
            raise
        finally:
            self._opened.pop(key, None)

    async def abort(self, key: RequestKey) -> bool:
        is_with_engine: bool = await asyncio.wrap_future(self._link.call(AbortTurn(key), bool))
        return is_with_engine


def _head(part: Rollout) -> Rollout:
    """The first tokens that were sampled, as an event may show them."""
    begin = int(part.loss_mask.argmax())
    shown = slice(begin, begin + MAX_SHOWN_TOKENS)
    return structs.replace(
        part,
        tokens=part.tokens[shown],
        loss_mask=part.loss_mask[shown],
        logprobs=part.logprobs[:0],
        versions=part.versions[:0],
    )


def unpack_parts(data: bytes) -> tuple[Rollout, ...]:
    if not data:
        return ()
    block = Block(data)
    columns = {name: block.cells(name, 0, block.num_rows) for name in block.names}
    return tuple(Rollout(**{name: cells[row] for name, cells in columns.items()}) for row in range(block.num_rows))
