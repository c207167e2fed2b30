"""The rollouts in flight. Every member of a group is a coroutine of its own, and leaves exactly once.

A member ends, fails for good (its retries are spent), or is aborted; the last one to leave closes its group. An abort reaches
the engine, where the request ends at once with the tokens that it has, and the environment, which is cancelled. Finished turns
survive weight updates: an episode continues with the version that its engine serves at its next turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np
from msgspec import UNSET, Struct, structs

from millstream.errors import LagError
from millstream.events import RolloutAborted, RolloutEnded, RolloutFailed, RolloutSpan, RolloutStarted
from millstream.events.rollouts import Attempt
from millstream.events.rollouts.records import Outcome
from millstream.pipeline.admission import Admission, Place
from millstream.pipeline.context import RunContext
from millstream.pipeline.episode import EpisodeResult, Player
from millstream.pipeline.limit import Limit
from millstream.pipeline.lockstep import Gate
from millstream.pipeline.parts import Parts
from millstream.pipeline.settle import GroupFinalizer
from millstream.serving.router import Router
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
    temperature: float = 1.0  # of sampling; log-probabilities are of the same distribution
    stop: tuple[str, ...] = ()
    """Text that ends a turn, in addition to the tokenizer's end token. It is part of what was sampled, and trained."""
    retries: int = 1
    """How often a failed rollout is tried again before its group continues without it."""
    min_group_size: int = 2
    """A group with fewer survivors fails, by name. Groups of one need one."""
    timeout_s: float = 600.0
    """For one whole rollout, its reward included."""
    keep_gb: float = 10.0
    """Space for rollouts in the run folder (`millstream rollouts RUN`). Beyond it, whole groups are sampled. 0: no rollouts."""

    def __post_init__(self) -> None:
        if any(not string for string in self.stop):
            raise ValueError("stop has an empty string: expected text that ends a turn")
        if self.max_tokens < 1 or self.retries < 0 or self.timeout_s <= 0:
            raise ValueError("max_tokens must be at least 1, retries at least 0, timeout_s above 0")
        if self.group_size < 1:
            raise ValueError(f"group_size = {self.group_size}: expected at least 1")
        if self.group_size == 1 and self.min_group_size == 2:  # the default, not set by the user
            structs.force_setattr(self, "min_group_size", 1)
        if not 1 <= self.min_group_size <= self.group_size:
            raise ValueError("min_group_size must be between 1 and group_size")
        if self.extra_members < 0 or self.max_parts < 1 or not self.keep_gb >= 0:
            raise ValueError("extra_members and keep_gb must be at least 0, and max_parts at least 1")

    @property
    def num_members(self) -> int:
        return self.group_size + self.extra_members

    @property
    def most_rows(self) -> int:
        """That a group may have in the store."""
        return self.num_members * self.max_parts


class _Aborted(Exception):
    """An attempt was aborted on purpose."""


class _Member:
    """One member of a group, until it leaves."""

    __slots__ = ("attempt", "is_done", "num_cut", "request", "task", "why")

    def __init__(self, first_attempt: int) -> None:
        self.task: asyncio.Task[None] | None = None
        self.attempt = first_attempt
        self.request: RequestKey | None = None  # the turn that is being generated
        self.is_done = False  # its rollout has ended or was aborted: nothing is left to abort
        self.why = ""  # it is to be aborted for this reason
        self.num_cut = 0  # tokens of the turn that an abort cut short


class Rollouts:
    """The members in flight. `complete_with`: how many ended rollouts complete a group, whose other members are then aborted.
    None: all members are waited for. `gate`: in lockstep, every turn passes it. `are_partial`: rewards of a whole group are
    added to those of its members later."""

    def __init__(
        self,
        context: RunContext,
        parts: Parts,
        config: RolloutConfig,
        *,
        sampling: Sampling,
        seed: int,
        router: Router,
        admission: Admission,
        finalizer: GroupFinalizer,
        gate: Gate | None = None,
        complete_with: int | None = None,
        are_partial: bool = False,
    ) -> None:
        self._context = context
        self._config = config
        self._player = Player(
            environment=parts.environment,
            sampling=sampling,
            run_seed=seed,
            role="train",
            max_parts=config.max_parts,
            waits=context.waits,
            record=self._record_span if parts.records_turns else None,
        )
        self._router = router
        self._admission = admission
        self._finalizer = finalizer
        self._gate = gate
        self._complete_with = complete_with
        self._are_partial = are_partial
        self._groups: dict[int, dict[int, _Member]] = {}
        self._num_ended: dict[int, int] = {}
        self._closing: set[asyncio.Task[None] | None] = set()  # of groups without members: being closed in the store
        self._is_ending = False

    def __contains__(self, group_id: int) -> bool:
        """Whether some of its members are in flight."""
        return group_id in self._groups

    def living(self, group_id: int) -> set[int]:
        """The members that are in flight."""
        return set(self._groups.get(group_id, ()))

    def num_living(self, group_id: int) -> int:
        return len(self._groups.get(group_id, ()))

    @property
    def num_in_flight(self) -> int:
        """Members of all groups."""
        return sum(map(len, self._groups.values()))

    def start(self, group_id: int, task: Task, place: Place, members: Iterable[int] | None = None) -> None:
        """Roll out these members, at least one; None: all of them. A group that was restarted draws new random numbers; what
        a resumed run has of it counts."""
        group = self._context.groups[group_id]
        numbers = range(self._config.num_members) if members is None else sorted(members)
        self._groups[group_id] = {number: _Member(group.first_attempt) for number in numbers}
        self._num_ended[group_id] = 0 if members is None else group.num_kept
        for number, member in list(self._groups[group_id].items()):
            member.task = self._context.spawn(self.roll_out(group_id, number, member, task, place))
        self._abort_if_complete(group_id)

    @property
    def num_attempts(self) -> int:
        """That a member has at most, unless its group is restarted."""
        return 1 + self._config.retries

    def cancel(self) -> None:
        """The run is ending. No attempt begins any more, even if an environment ignores its cancellation."""
        self._is_ending = True
        members = [member for group in self._groups.values() for member in group.values()]
        for task in [*(member.task for member in members), *self._closing]:
            if task is not None:
                task.cancel()

    # ---- one member --------------------------------------------------------------------------------------------------

    async def roll_out(self, group_id: int, number: int, member: _Member, task: Task, place: Place) -> None:
        """Consumes one member of an admitted group. Produces rows in the store; the last member closes its group. Waits for its
        environment. Ended by: the environment's reward, `timeout_s` per attempt, or `abort`."""
        last = member.attempt + self._config.retries
        try:
            while True:
                key = RequestKey(group_id=group_id, member=number, attempt=member.attempt)
                result, seconds = await self._attempt(key, member, task, place, last)
                if result.parts:
                    await self._put(key, result, seconds)
                if result.parts or member.attempt == last:
                    break
                member.attempt += 1
        except _Aborted:
            pass
        await self._leave(group_id, number)

    async def _leave(self, group_id: int, number: int) -> None:
        group = self._groups[group_id]
        task = group.pop(number).task
        self._router.rerank(group_id)
        if not group:
            del self._groups[group_id], self._num_ended[group_id]
            self._closing.add(task)
            try:
                await self._finalizer.close(group_id)
            finally:
                self._closing.discard(task)
        if self._gate is not None:  # otherwise no loop waits for a member that leaves
            self._context.notifier.notify()

    def _abort_if_complete(self, group_id: int) -> None:
        is_complete = self._complete_with is not None and self._num_ended[group_id] >= self._complete_with
        if is_complete and not self._is_ending:
            self.abort(group_id, "its group is complete")

    async def _put(self, key: RequestKey, result: EpisodeResult, seconds: float) -> None:
        """Put a rollout's rows into the store. It counts as ended before that, since a full store may take a while: no member
        too many may end meanwhile."""
        group_id, parts = key.group_id, result.parts
        self._num_ended[group_id] += 1
        self._abort_if_complete(group_id)
        columns = zip(*map(structs.astuple, parts), strict=True)
        rows = {name: list(values) for name, values in zip(Rollout.__struct_fields__, columns, strict=True)}
        async with self._context.quiesce:
            self._record_rollout(parts, seconds, result.reward_parts)
            self._keep(key, parts, "ended", reward_parts=result.reward_parts)
            put = self._context.store.put(group_id, rows, versions=min(part.start_version for part in parts))
            await self._context.waits.on(f"group {group_id}", "room in the store", put)

    async def _attempt(
        self, key: RequestKey, member: _Member, task: Task, place: Place, last: int
    ) -> tuple[EpisodeResult, float]:
        """One attempt, and how long it took; it has no part if it failed, which is data and not a crash."""
        began, limit, owner = self._now(), Limit(self._config.timeout_s), owner_of(key)
        self._context.emit(RolloutStarted(at=began, group_id=key.group_id, member=key.member, attempt=key.attempt))
        generate = partial(self._generate, member=member, place=place, owner=owner, limit=limit)
        result = await self._player.play(
            task, key, generate, owner=owner, limit=limit, is_aborted=lambda: bool(member.why)
        )
        if self._is_ending and not member.why:
            raise asyncio.CancelledError
        seconds = self._now() - began - limit.paused_s
        if member.why:
            member.is_done = True
            self._record_abort(key, member, seconds, result.num_sampled)
            self._keep(key, result.played, "aborted", member.why)
            raise _Aborted
        if result.failure is not None:
            self._record_failure(key, result.failure, seconds, result.num_sampled, is_final=key.attempt == last)
            self._keep(key, result.played, "failed", f"{type(result.failure).__name__}: {result.failure}")
            return result, seconds
        member.is_done = True
        return result, seconds

    async def _generate(
        self, request: Request, *, member: _Member, place: Place, owner: str, limit: Limit
    ) -> Completion:
        """One turn, on an engine that is not older than the group's start."""
        if self._gate is not None:
            await self._pass_gate(self._gate, request.key, limit)
        if self._admission.version > place.deadline:
            raise LagError(f"{owner} is overdue: deadline {place.deadline}, version {self._admission.version}")
        if member.why or self._is_ending:  # an environment that does not let itself be cancelled
            raise asyncio.CancelledError
        member.request = request.key
        try:
            with self._context.waits.idle(owner, "an engine"):  # rollout.timeout_s is its deadline
                completion = await self._router.generate(request, floor=place.start)
        finally:
            member.request = None
        if member.why:
            member.num_cut = len(completion.tokens)
            self._end_elsewhere(member)
            raise asyncio.CancelledError
        return completion

    async def _pass_gate(self, gate: Gate, key: RequestKey, limit: Limit) -> None:
        """In lockstep: wait for the other rollouts. That time does not count against the rollout's limit."""
        what = "the other rollouts of the step"  # which have their timeouts
        with limit.paused(), self._context.waits.idle(owner_of(key), what):
            await gate.pass_through(key)

    # ---- aborts ------------------------------------------------------------------------------------------------------

    def abort(self, group_id: int, why: str) -> None:
        """End its members in flight at once; those that have ended stay. They leave, and close the group, as soon as the engine
        has answered."""
        for member in list(self._groups.get(group_id, {}).values()):
            if not member.is_done and not member.why:
                member.why = why
                self._context.spawn(self._abort(member))

    async def _abort(self, member: _Member) -> None:
        is_with_engine = member.request is not None and await self._router.abort(member.request)
        if not is_with_engine and not member.is_done and member.task is not None:
            member.task.cancel()

    @staticmethod
    def _end_elsewhere(member: _Member) -> None:
        """An environment may generate in tasks of its own: the end of one of them does not end the others."""
        if member.task is not None and member.task is not asyncio.current_task() and not member.is_done:
            member.task.cancel()

    # ---- what happened -----------------------------------------------------------------------------------------------

    def _record_rollout(self, parts: tuple[Rollout, ...], seconds: float, reward_parts: Mapping[str, float]) -> None:
        first, is_one = parts[0], len({part.agent for part in parts}) == 1
        num_sampled = sum(int(np.count_nonzero(part.loss_mask)) for part in parts)
        if self._context.lengths is not None:
            self._context.lengths.add(self._context.groups[first.group_id].task_id, num_sampled)
        self._context.emit(
            RolloutEnded(
                at=self._now(),
                group_id=first.group_id,
                member=first.member,
                attempt=first.attempt,
                reward=first.reward,
                rewards=[] if is_one else list({part.agent: part.reward for part in parts}.values()),
                num_tokens=sum(len(part.tokens) for part in parts),
                num_sampled=num_sampled,
                num_parts=len(parts),
                start_version=min(part.start_version for part in parts),
                end_version=max(int(part.versions.max()) for part in parts),
                finish=parts[-1].finish,
                seconds=seconds,
                reward_parts=dict(reward_parts) if len(reward_parts) > 1 else UNSET,
                is_partial=self._are_partial or UNSET,
            )
        )

    def _keep(
        self,
        key: RequestKey,
        parts: tuple[Rollout, ...],
        outcome: Outcome,
        why: str = "",
        reward_parts: Mapping[str, float] | None = None,
    ) -> None:
        group = self._context.groups[key.group_id]
        self._context.keep(
            Attempt(
                *(key.group_id, key.member, key.attempt, group.task_id, group.epoch),
                parts,
                outcome,
                why,
                reward_parts or {},
                group.task,
            )
        )

    def _record_failure(
        self, key: RequestKey, error: Exception, seconds: float, num_sampled: int, *, is_final: bool
    ) -> None:
        self._finalizer.last_failure = f"{type(error).__name__}: {error}"
        self._context.emit(
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

    @contextmanager
    def _record_span(self, key: RequestKey, what: str) -> Iterator[Callable[[int], None]]:
        began, tokens = self._now(), [0]
        try:
            yield tokens.append
        finally:
            now = self._now()
            self._context.emit(
                RolloutSpan(
                    at=now,
                    group_id=key.group_id,
                    member=key.member,
                    attempt=key.attempt,
                    what=what,
                    seconds=now - began,
                    num_tokens=tokens[-1],
                )
            )

    def _record_abort(self, key: RequestKey, member: _Member, seconds: float, num_sampled: int) -> None:
        self._context.emit(
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
        return self._context.now()


def owner_of(key: RequestKey) -> str:
    return f"group {key.group_id} member {key.member}"
