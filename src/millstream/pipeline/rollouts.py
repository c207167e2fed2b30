"""The rollouts in flight. Every member of a group is a coroutine of its own, and leaves exactly once, by name.

A member ends, fails for good (its retries are spent), or is aborted; the last one to leave closes its group. An abort reaches
the engine, where the request ends at once and says how far it had come, and the environment, which is cancelled. Finished
turns outlive weight updates: an episode goes on with whatever version its engine serves at its next turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple, Protocol

from msgspec import Struct, structs

from millstream.clock import Clock
from millstream.env import Environment
from millstream.errors import (
    EngineError,
    EnvironmentFailed,
    InvariantError,
    LagError,
    RolloutTimeout,
    StallError,
)
from millstream.events import Event, RolloutAborted, RolloutEnded, RolloutFailed, RolloutStarted
from millstream.pipeline.admission import Place
from millstream.pipeline.episode import Episode
from millstream.pipeline.limit import Limit
from millstream.pipeline.lockstep import Gate
from millstream.pipeline.notify import Notifier, QuiescePoint
from millstream.pipeline.waits import Waits
from millstream.serving.router import Router
from millstream.store import Store
from millstream.types import Completion, Request, RequestKey, Rollout, Sampling, Task


class RolloutConfig(Struct, frozen=True, kw_only=True):
    group_size: int = 8
    """Rollouts of one prompt; each is a request of its own."""
    extra_members: int = 0
    """Rollouts that a group starts beyond these. With pipeline.surplus = "abort" a group is complete with its first
    group_size, and the others are aborted; with "carry_over" all are waited for, and trained."""
    max_parts: int = 1
    """Token sequences that one rollout may have: of several agents, or of a chat whose template rewrites what was said."""
    max_tokens: int = 256
    """Tokens that one turn may sample."""
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    """Text that ends a turn, beside the tokenizer's end token. It is part of what was sampled, and trained."""
    retries: int = 1
    """How often a failed rollout is tried again before its group goes on without it."""
    min_group_size: int = 2
    """A group with fewer survivors fails, by name. Groups of one need one."""
    timeout_s: float = 600.0
    """For one whole rollout, its reward included."""

    def __post_init__(self) -> None:
        if any(not string for string in self.stop):
            raise ValueError("stop has an empty string: expected text that ends a turn")
        if self.max_tokens < 1 or self.retries < 0 or self.timeout_s <= 0:
            raise ValueError("max_tokens must be at least 1, retries at least 0, timeout_s above 0")
        if self.group_size == 1 and self.min_group_size == 2:  # which nobody has set
            structs.force_setattr(self, "min_group_size", 1)
        if not 1 <= self.min_group_size <= self.group_size:
            raise ValueError("min_group_size must be between 1 and group_size")
        if self.extra_members < 0 or self.max_parts < 1:
            raise ValueError("extra_members must be at least 0 and max_parts at least 1")

    @property
    def num_members(self) -> int:
        return self.group_size + self.extra_members

    @property
    def most_rows(self) -> int:
        """That a group may have in the store."""
        return self.num_members * self.max_parts


class Books(Protocol):
    """What a rollout must know of the rest of the run."""

    @property
    def version(self) -> int:
        """That training is at."""
        ...


class Setting(NamedTuple):
    """What all rollouts of a run share."""

    environment: Environment
    store: Store
    router: Router
    books: Books
    waits: Waits
    clock: Clock
    pulse: Notifier
    gate: Gate | None
    still: QuiescePoint
    config: RolloutConfig
    sampling: Sampling
    seed: int
    is_first_to_finish: bool


class _Aborted(Exception):
    """An attempt came to its end on purpose."""


class _Member:
    """One place of a group, while it is at work."""

    def __init__(self, first_attempt: int) -> None:
        self.task: asyncio.Task[None] | None = None
        self.attempt = first_attempt
        self.request: RequestKey | None = None
        """What it has asked for, while it waits for the answer."""
        self.is_done = False
        """Nothing of it is left to abort: its rollout has ended, or was aborted."""
        self.why = ""
        """It is to be aborted for this reason."""
        self.num_cut = 0
        """Tokens of the turn that an abort cut short."""


class Rollouts:
    """`close` is awaited when the last member of a group has left; `on_failure` hears of every failed attempt."""

    def __init__(
        self,
        setting: Setting,
        *,
        emit: Callable[[Event], None],
        close: Callable[[int], Awaitable[None]],
        on_failure: Callable[[str], None],
    ) -> None:
        self._set = setting
        self._emit = emit
        self._close = close
        self._on_failure = on_failure
        self._groups: dict[int, dict[int, _Member]] = {}
        self._num_ended: dict[int, int] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._is_ending = False

    def __contains__(self, group_id: int) -> bool:
        """Whether some of its members are at work."""
        return group_id in self._groups

    def living(self, group_id: int) -> set[int]:
        """The members that are at work."""
        return set(self._groups.get(group_id, ()))

    @property
    def num_living(self) -> int:
        return sum(map(len, self._groups.values()))

    def start(
        self,
        tasks: asyncio.TaskGroup,
        group_id: int,
        task: Task,
        place: Place,
        members: Iterable[int],
        *,
        num_ended: int = 0,
        first_attempt: int = 0,
    ) -> None:
        """Begin with these members, of which there is at least one. `num_ended` others have ended before."""
        self._groups[group_id] = {member: _Member(first_attempt) for member in sorted(members)}
        self._num_ended[group_id] = num_ended
        for number, member in list(self._groups[group_id].items()):
            member.task = tasks.create_task(self.roll_out(tasks, group_id, number, member, task, place))
            self._running.add(member.task)
            member.task.add_done_callback(self._running.discard)

    def cancel(self) -> None:
        """The run is ending. Nothing begins any more, whatever an environment makes of its cancellation."""
        self._is_ending = True
        for task in self._running:
            task.cancel()

    # ---- one member --------------------------------------------------------------------------------------------------

    async def roll_out(
        self, tasks: asyncio.TaskGroup, group_id: int, number: int, member: _Member, task: Task, place: Place
    ) -> None:
        """Independent of all others. Waits for its environment, at most `timeout_s` an attempt."""
        last = member.attempt + self._set.config.retries
        try:
            while not await self._try(
                tasks, RequestKey(group_id=group_id, member=number, attempt=member.attempt), member, task, place, last
            ):
                if member.attempt == last:
                    break
                member.attempt += 1
        except _Aborted:
            pass
        await self._leave(group_id, number)

    async def _leave(self, group_id: int, number: int) -> None:
        group = self._groups[group_id]
        del group[number]
        self._set.router.rerank(group_id)
        if not group:
            del self._groups[group_id], self._num_ended[group_id]
            await self._close(group_id)
        if self._set.gate is not None:  # who else waits, waits for groups
            self._set.pulse.notify()

    def _count_ended(self, tasks: asyncio.TaskGroup, group_id: int) -> None:
        """Before its rows are in the store, which may take a while: no other member ends meanwhile that is one too many."""
        self._num_ended[group_id] += 1
        is_complete = self._num_ended[group_id] >= self._set.config.group_size
        if is_complete and self._set.is_first_to_finish and not self._is_ending:
            self.abort(tasks, group_id, "its group is complete")

    async def _try(
        self, tasks: asyncio.TaskGroup, key: RequestKey, member: _Member, task: Task, place: Place, last: int
    ) -> bool:
        """One attempt, and its rows in the store. False if it failed, which is data and not a crash."""
        parts, seconds = await self._attempt(key, member, task, place, last)
        if not parts:
            return False
        self._count_ended(tasks, key.group_id)
        rows = {name: [getattr(part, name) for part in parts] for name in Rollout.__struct_fields__}
        async with self._set.still:
            self._record_rollout(parts, seconds)
            put = self._set.store.put(key.group_id, rows, versions=min(part.start_version for part in parts))
            await self._set.waits.on(f"group {key.group_id}", "room in the store", put)
        return True

    async def _attempt(
        self, key: RequestKey, member: _Member, task: Task, place: Place, last: int
    ) -> tuple[tuple[Rollout, ...], float]:
        """One attempt, part by part, and how long it took; no part if it failed, which is data and not a crash."""
        began, limit = self._now(), Limit(self._set.config.timeout_s)
        self._emit(RolloutStarted(at=began, group_id=key.group_id, member=key.member, attempt=key.attempt))
        episode = self._episode(key, member, task, place, limit)
        outcome = await self._play(episode, member, limit, owner_of(key))
        if self._is_ending and not member.why:
            raise asyncio.CancelledError
        seconds, num_sampled = self._now() - began - limit.paused_s, episode.num_sampled
        episode.close()
        if member.why:
            member.is_done = True
            self._record_abort(key, member, seconds, num_sampled)
            raise _Aborted
        if isinstance(outcome, Exception):
            self._record_failure(key, outcome, seconds, num_sampled, is_final=key.attempt == last)
            return (), seconds
        member.is_done = True
        return outcome, seconds

    def _episode(self, key: RequestKey, member: _Member, task: Task, place: Place, limit: Limit) -> Episode:
        waits, owner = self._set.waits, owner_of(key)

        async def generate(request: Request) -> Completion:
            if self._set.gate is not None:
                await self._pass_gate(self._set.gate, request.key, limit)
            return await self._generate(request, member, place, owner)

        return Episode(
            task,
            key,
            generate=generate,
            waiting=lambda what, work: waits.idle(owner, what, work),
            sampling=self._set.sampling,
            run_seed=self._set.seed,
            role="train",
            max_parts=self._set.config.max_parts,
            limit=limit,
        )

    async def _play(
        self, episode: Episode, member: _Member, limit: Limit, owner: str
    ) -> tuple[Rollout, ...] | Exception:
        """The episode in its environment: what was sampled, or why there is nothing."""
        try:
            async with limit:
                playing = self._set.environment.rollout(episode)
                reward = await self._set.waits.idle(owner, "its environment", playing)
            return episode.finish(reward)
        except (EngineError, InvariantError, StallError):
            raise
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if own is not None and own.cancelling():
                if not member.why:
                    raise  # the run is ending
                own.uncancel()
            return EnvironmentFailed("the environment was cancelled from inside")
        except TimeoutError as error:
            return self._too_late(error) if limit.is_expired() else error
        except Exception as error:  # whatever an environment or a reward raises is a failed rollout
            return error

    async def _generate(self, request: Request, member: _Member, place: Place, owner: str) -> Completion:
        """One turn, on an engine that is not older than the group's start."""
        if self._set.books.version > place.deadline:
            raise LagError(f"{owner} is overdue: deadline {place.deadline}, version {self._set.books.version}")
        if member.why or self._is_ending:  # an environment that does not let itself be cancelled
            raise asyncio.CancelledError
        member.request = request.key
        turn = self._set.router.generate(request, floor=place.start)
        try:
            # rollout.timeout_s is its deadline
            completion = await self._set.waits.idle(owner, "an engine", turn)
        finally:
            member.request = None
        if member.why:
            member.num_cut = len(completion.tokens)
            self._end_elsewhere(member)
            raise asyncio.CancelledError
        return completion

    async def _pass_gate(self, gate: Gate, key: RequestKey, limit: Limit) -> None:
        """Synchronous training: wait for the others. The time spent here does not count as the rollout's own."""
        what = "the other rollouts of the step"  # which have their timeouts
        with limit.paused():
            await self._set.waits.idle(owner_of(key), what, gate.pass_through(key))

    # ---- aborts ------------------------------------------------------------------------------------------------------

    def abort(self, tasks: asyncio.TaskGroup, group_id: int, why: str) -> None:
        """Its members at work end at once; those that have ended stay. They leave, and close the group, as soon as the engine
        has answered."""
        for member in list(self._groups.get(group_id, {}).values()):
            if not member.is_done and not member.why:
                member.why = why
                tasks.create_task(self._abort(member))

    async def _abort(self, member: _Member) -> None:
        is_with_engine = member.request is not None and await self._set.router.abort(member.request)
        if not is_with_engine and not member.is_done and member.task is not None:
            member.task.cancel()

    @staticmethod
    def _end_elsewhere(member: _Member) -> None:
        """An environment may speak in tasks of its own: that one of them has ended does not end the others."""
        if member.task is not None and member.task is not asyncio.current_task() and not member.is_done:
            member.task.cancel()

    # ---- what happened -----------------------------------------------------------------------------------------------

    def _too_late(self, error: TimeoutError) -> RolloutTimeout:
        """Names what the rollout was waiting for when its time was up."""
        limit, cut = self._set.config.timeout_s, Waits.cut_by(error)
        waiting = "" if cut is None else f": {self._now() - cut.since:.0f} s of it it waited for {cut.what}"
        return RolloutTimeout(f"no reward after {limit:g} s{waiting}; rollout.timeout_s sets the limit")

    def _record_rollout(self, parts: tuple[Rollout, ...], seconds: float) -> None:
        first, agents = parts[0], {part.agent for part in parts}
        self._emit(
            RolloutEnded(
                at=self._now(),
                group_id=first.group_id,
                member=first.member,
                attempt=first.attempt,
                reward=first.reward,
                rewards=list({part.agent: part.reward for part in parts}.values()) if len(agents) > 1 else [],
                num_tokens=sum(len(part.tokens) for part in parts),
                num_sampled=sum(int(part.loss_mask.sum()) for part in parts),
                num_parts=len(parts),
                start_version=min(part.start_version for part in parts),
                end_version=max(int(part.versions.max()) for part in parts),
                finish=parts[-1].finish,
                seconds=seconds,
            )
        )

    def _record_failure(
        self, key: RequestKey, error: Exception, seconds: float, num_sampled: int, *, is_final: bool
    ) -> None:
        self._on_failure(f"{type(error).__name__}: {error}")
        self._emit(
            RolloutFailed(
                at=self._now(),
                group_id=key.group_id,
                member=key.member,
                attempt=key.attempt,
                error=type(error).__name__,
                message=str(error),
                is_final=is_final,
                seconds=seconds,
                num_sampled=num_sampled,
            )
        )

    def _record_abort(self, key: RequestKey, member: _Member, seconds: float, num_sampled: int) -> None:
        self._emit(
            RolloutAborted(
                at=self._now(),
                group_id=key.group_id,
                member=key.member,
                attempt=key.attempt,
                why=member.why,
                seconds=seconds,
                num_sampled=num_sampled + member.num_cut,
            )
        )

    def _now(self) -> float:
        return self._set.clock.now()


def owner_of(key: RequestKey) -> str:
    return f"group {key.group_id} member {key.member}"
