"""The rollouts in flight. Every member of a group is a coroutine of its own, and leaves exactly once.

A member ends, fails for good (its retries are spent), or is aborted; the last one to leave closes its group. An abort reaches
the engine, where the request ends at once with the tokens that it has, and the environment, which is cancelled. Finished turns
survive weight updates: an episode continues with the version that its engine serves at its next turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from msgspec import UNSET, Struct, structs

from millstream.errors import RolloutWorkerLost, RowsLost
from millstream.events import RolloutAborted, RolloutEnded, RolloutFailed, RolloutStarted
from millstream.events.rollouts import Attempt
from millstream.events.rollouts.records import Outcome
from millstream.pipeline.admission import Admission, Place
from millstream.pipeline.attempts import AttemptEnd, AttemptHost, Failure, check_deadline, columns_of_rollout
from millstream.pipeline.context import RunContext
from millstream.pipeline.settle import GroupFinalizer
from millstream.serving.router import Router
from millstream.types import RequestKey, Rollout, Task


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
    workers: int = 0
    """Processes that play rollouts: episodes, environments, rewards, and with engines that are processes also the requests to
    them. 0: all of that is done in the process of the run."""
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
        if self.workers < 0:
            raise ValueError(f"workers = {self.workers}: expected 0 (in the process of the run) or more")
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

    __slots__ = ("attempt", "is_done", "last", "task", "why")

    def __init__(self, first_attempt: int, retries: int) -> None:
        self.task: asyncio.Task[None] | None = None
        self.attempt = first_attempt
        self.last = first_attempt + retries  # the attempt that is not retried
        self.is_done = False  # its rollout has ended or was aborted: nothing is left to abort
        self.why = ""  # it is to be aborted for this reason


class Rollouts:
    """The members in flight. `host` plays their attempts. `complete_with`: how many ended rollouts complete a group, whose
    other members are then aborted. None: all members are waited for. `is_in_lockstep`: loops wait for members that leave.
    `are_partial`: rewards of a whole group are added to those of its members later."""

    def __init__(
        self,
        context: RunContext,
        config: RolloutConfig,
        host: AttemptHost,
        *,
        router: Router,
        admission: Admission,
        finalizer: GroupFinalizer,
        is_in_lockstep: bool = False,
        complete_with: int | None = None,
        are_partial: bool = False,
    ) -> None:
        self._context = context
        self._config = config
        self._host = host
        self._router = router
        self._admission = admission
        self._finalizer = finalizer
        self._is_in_lockstep = is_in_lockstep
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
        self._groups[group_id] = {number: _Member(group.first_attempt, self._config.retries) for number in numbers}
        self._num_ended[group_id] = 0 if members is None else group.num_kept
        for number, member in list(self._groups[group_id].items()):
            member.task = self._context.spawn(self.roll_out(group_id, number, member, task, place))
        self._abort_if_complete(group_id)

    @property
    def num_attempts(self) -> int:
        """That a member has at most, unless its group is restarted or workers are lost."""
        return 1 + self._config.retries

    def cancel(self) -> None:
        """The run is ending. No attempt begins any more, even if an environment ignores its cancellation."""
        self._is_ending = True
        self._host.end()
        members = [member for group in self._groups.values() for member in group.values()]
        for task in [*(member.task for member in members), *self._closing]:
            if task is not None:
                task.cancel()

    # ---- one member --------------------------------------------------------------------------------------------------

    async def roll_out(self, group_id: int, number: int, member: _Member, task: Task, place: Place) -> None:
        """Consumes one member of an admitted group. Produces rows in the store; the last member closes its group. Waits for its
        environment. Ended by: the environment's reward, `timeout_s` per attempt, or `abort`."""
        try:
            while True:
                key = RequestKey(group_id=group_id, member=number, attempt=member.attempt)
                end = await self._attempt(key, member, task, place)
                if end.summary is not None and await self._put(key, member, end):
                    break
                if not self._is_retried(key, member):
                    break
                member.attempt += 1
        except _Aborted:
            pass
        await self._leave(group_id, number)

    async def _leave(self, group_id: int, number: int) -> None:
        group, known = self._groups[group_id], self._context.groups[group_id]
        member = group.pop(number)
        known.next_attempt = max(known.next_attempt, member.attempt + 1)
        self._router.rerank(group_id)
        if not group:
            del self._groups[group_id], self._num_ended[group_id]
            self._closing.add(member.task)
            try:
                await self._finalizer.close(group_id)
            finally:
                self._closing.discard(member.task)
        if self._is_in_lockstep:  # otherwise no loop waits for a member that leaves
            self._context.notifier.notify()

    def _abort_if_complete(self, group_id: int) -> None:
        is_complete = self._complete_with is not None and self._num_ended[group_id] >= self._complete_with
        if is_complete and not self._is_ending:
            self.abort(group_id, "its group is complete")

    async def _put(self, key: RequestKey, member: _Member, end: AttemptEnd) -> bool:
        """Put a rollout's rows into the store. It counts as ended before that, since a full store may take a while: no member
        too many may end meanwhile. False: the rows were lost with the worker that had packed them: the attempt has failed."""
        group_id = key.group_id
        self._num_ended[group_id] += 1
        self._abort_if_complete(group_id)
        async with self._context.quiesce:
            try:
                await self._put_rows(group_id, end)
            except RowsLost as error:
                self._num_ended[group_id] -= 1
                member.is_done = False
                self._fail(key, member, end, Failure(RolloutWorkerLost.__name__, str(error), uses=0))
                return False
            self._record_rollout(key, end)
            self._keep(key, end.parts, "ended", reward_parts=end.reward_parts)
        return True

    async def _put_rows(self, group_id: int, end: AttemptEnd) -> None:
        waits, owner = self._context.waits, f"group {group_id}"
        if end.rows is not None:  # there is room: it was reserved when they were packed
            with waits.idle(owner, "the store"):
                await end.rows.put()
            return
        oldest = min(part.start_version for part in end.parts)
        put = self._context.store.put(group_id, columns_of_rollout(end.parts), versions=oldest)
        await waits.on(owner, "room in the store", put)

    def _is_retried(self, key: RequestKey, member: _Member) -> bool:
        """Whether an attempt that has failed is followed by another one."""
        return key.attempt < member.last and key.group_id not in self._finalizer.cancelled

    async def _attempt(self, key: RequestKey, member: _Member, task: Task, place: Place) -> AttemptEnd:
        """One attempt; it has no summary if it failed, which is data and not a crash."""
        self._context.emit(
            RolloutStarted(at=self._now(), group_id=key.group_id, member=key.member, attempt=key.attempt)
        )
        end = await self._host.play(key, task, place, lambda: bool(member.why))
        if self._is_ending and not member.why:
            raise asyncio.CancelledError
        if member.why:
            member.is_done = True
            self._record_abort(key, member, end)
            self._keep(key, end.parts, "aborted", member.why)
            if end.rows is not None:
                end.rows.drop()
            raise _Aborted
        check_deadline(key, place, self._admission)
        if end.failure is not None:
            self._fail(key, member, end, end.failure)
        else:
            member.is_done = True
        return end

    # ---- aborts ------------------------------------------------------------------------------------------------------

    def abort(self, group_id: int, why: str) -> None:
        """End its members in flight at once; those that have ended stay. They leave, and close the group, as soon as the engine
        has answered."""
        for number, member in list(self._groups.get(group_id, {}).items()):
            if not member.is_done and not member.why:
                member.why = why
                key = RequestKey(group_id=group_id, member=number, attempt=member.attempt)
                self._context.spawn(self._host.abort(key))

    # ---- what happened -----------------------------------------------------------------------------------------------

    def _record_rollout(self, key: RequestKey, end: AttemptEnd) -> None:
        summary = end.summary
        assert summary is not None
        if self._context.lengths is not None:
            self._context.lengths.add(self._context.groups[key.group_id].task_id, summary.num_sampled)
        self._context.emit(
            RolloutEnded(
                at=self._now(),
                group_id=key.group_id,
                member=key.member,
                attempt=key.attempt,
                reward=summary.reward,
                rewards=summary.rewards,
                num_tokens=summary.num_tokens,
                num_sampled=summary.num_sampled,
                num_parts=summary.num_parts,
                start_version=summary.start_version,
                end_version=summary.end_version,
                finish=summary.finish,
                seconds=end.seconds,
                reward_parts=dict(end.reward_parts) if len(end.reward_parts) > 1 else UNSET,
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

    def _fail(self, key: RequestKey, member: _Member, end: AttemptEnd, failure: Failure) -> None:
        """The attempt has failed."""
        member.last += 1 - failure.uses
        self._finalizer.last_failure = f"{failure.error}: {failure.message}"
        self._context.emit(
            RolloutFailed(
                at=self._now(),
                group_id=key.group_id,
                member=key.member,
                attempt=key.attempt,
                error=failure.error,
                message=failure.message,
                is_final=not self._is_retried(key, member),
                seconds=end.seconds,
                num_sampled=end.num_sampled,
            )
        )
        self._keep(key, end.parts, "failed", f"{failure.error}: {failure.message}")

    def _record_abort(self, key: RequestKey, member: _Member, end: AttemptEnd) -> None:
        self._context.emit(
            RolloutAborted(
                at=self._now(),
                group_id=key.group_id,
                member=key.member,
                attempt=key.attempt,
                why=member.why,
                seconds=end.seconds,
                num_sampled=end.num_sampled,
            )
        )

    def _now(self) -> float:
        return self._context.now()
