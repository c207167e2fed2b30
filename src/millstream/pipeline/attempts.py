"""Attempts: where one try of a member is played. In this process (`Attempts`), or in a rollout worker (`workers`), which hosts
the same class.

An attempt has a time limit, and ends with rows or with the reason why it has none. An abort reaches the engine, where the
request ends at once with the tokens that it has, and the environment, which is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from msgspec import Struct, structs

from millstream.errors import LagError
from millstream.pipeline.admission import Admission, Place
from millstream.pipeline.episode import Player
from millstream.pipeline.limit import Limit
from millstream.pipeline.lockstep import Gate
from millstream.pipeline.waits import Waits
from millstream.serving.router import Router
from millstream.types import Completion, Finish, Request, RequestKey, Rollout, Task

OTHERS = "the other rollouts of the step"  # what a turn waits for at the gate of lockstep; they have their timeouts
ENGINE = "an engine"


class AttemptSummary(Struct, frozen=True, kw_only=True, array_like=True):
    """What is recorded of a rollout that has ended: as in `events.RolloutEnded`."""

    reward: float
    rewards: list[float]
    num_tokens: int
    num_sampled: int
    num_parts: int
    start_version: int
    end_version: int
    finish: Finish


ALL_RETRIES = 1 << 30


class Failure(NamedTuple):
    """Why an attempt has no rows: the name of an error's class, and its message. `uses`: how many of its member's retries it
    uses up; none where the cause is not known to be the attempt."""

    error: str
    message: str
    uses: int = 1


class PackedRows(Protocol):
    """The rows of a rollout, packed where it was played."""

    async def put(self) -> None:
        """Put them into the store. Raises `RowsLost`."""
        ...

    def drop(self) -> None:
        """They are not needed."""
        ...


class AttemptEnd(NamedTuple):
    """How an attempt ended."""

    summary: AttemptSummary | None  # None: it failed or was aborted
    parts: tuple[Rollout, ...]  # what was played; of an attempt in a worker, as much of it as is kept
    num_sampled: int  # tokens; also those of a turn that an abort cut short
    seconds: float  # without waiting for other rollouts
    failure: Failure | None = None
    reward_parts: Mapping[str, float] = {}
    rows: PackedRows | None = None  # of an attempt in a worker; None: `parts` are the rows


class Pausable(Protocol):
    def paused(self) -> AbstractContextManager[None]:
        """The time in this block does not count against the time limit."""
        ...


class TurnLine(Protocol):
    """How a turn reaches an engine."""

    async def generate(self, request: Request, place: Place, limit: Pausable) -> Completion:
        """On an engine that is not older than the group's start."""
        ...

    async def abort(self, key: RequestKey) -> bool:
        """As `Router.abort`."""
        ...


class RouterLine(NamedTuple):
    """Through the router of this process. `gate`: in lockstep, every turn passes it. `admission`: at whose version no group may
    be overdue; None in a worker, whose driver checks that when the attempt has ended."""

    router: Router
    waits: Waits
    admission: Admission | None = None
    gate: Gate | None = None

    async def generate(self, request: Request, place: Place, limit: Pausable) -> Completion:
        owner = owner_of(request.key)
        if self.gate is not None:
            with limit.paused(), self.waits.idle(owner, OTHERS):
                await self.gate.pass_through(request.key)
        if self.admission is not None:
            check_deadline(request.key, place, self.admission)
        with self.waits.idle(owner, ENGINE):  # rollout.timeout_s is its deadline
            return await self.router.generate(request, floor=place.start)

    async def abort(self, key: RequestKey) -> bool:
        return await self.router.abort(key)


class AttemptHost(Protocol):
    """Plays attempts, here or elsewhere."""

    async def play(self, key: RequestKey, task: Task, place: Place, is_aborted: Callable[[], bool]) -> AttemptEnd:
        """To its end. Raises only what ends the run, and the cancellation of the current task. `is_aborted` is true from the
        moment on in which it is to be aborted."""
        ...

    async def abort(self, key: RequestKey) -> None:
        """`play` of this attempt ends soon. One that has ended is ignored."""
        ...

    def end(self) -> None:
        """The run is ending: no turn begins any more, even if an environment ignores its cancellation."""
        ...


class _Playing:
    """An attempt, until it ends."""

    __slots__ = ("is_aborted", "num_cut", "request", "task")

    def __init__(self, is_aborted: Callable[[], bool]) -> None:
        self.task = asyncio.current_task()
        self.is_aborted = is_aborted
        self.request: RequestKey | None = None  # the turn that is being generated
        self.num_cut = 0  # tokens of the turn that an abort cut short

    def end_elsewhere(self) -> None:
        """An environment may generate in tasks of its own: the end of one of them does not end the others."""
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()


class Attempts:
    """Plays attempts in this process. `timeout_s`: for one attempt."""

    def __init__(self, player: Player, line: TurnLine, *, timeout_s: float, now: Callable[[], float]) -> None:
        self._player = player
        self._line = line
        self._timeout_s = timeout_s
        self._now = now
        self._playing: dict[RequestKey, _Playing] = {}
        self._is_ending = False

    def end(self) -> None:
        self._is_ending = True

    async def play(self, key: RequestKey, task: Task, place: Place, is_aborted: Callable[[], bool]) -> AttemptEnd:
        began, limit = self._now(), Limit(self._timeout_s)
        playing = self._playing[key] = _Playing(is_aborted)
        generate = partial(self._generate, playing, place, limit)
        try:
            played = await self._player.play(
                task, key, generate, owner=owner_of(key), limit=limit, is_aborted=is_aborted
            )
        finally:
            del self._playing[key]
        return AttemptEnd(
            summary=summary_of(played.parts) if played.parts else None,
            parts=played.played,
            num_sampled=played.num_sampled + playing.num_cut,
            seconds=self._now() - began - limit.paused_s,
            failure=None if played.failure is None else Failure(type(played.failure).__name__, str(played.failure)),
            reward_parts=played.reward_parts,
        )

    async def _generate(self, playing: _Playing, place: Place, limit: Limit, request: Request) -> Completion:
        if playing.is_aborted() or self._is_ending:  # an environment that does not let itself be cancelled
            raise asyncio.CancelledError
        playing.request = request.key
        try:
            completion = await self._line.generate(request, place, limit)
        finally:
            playing.request = None
        if playing.is_aborted():
            playing.num_cut = len(completion.tokens)
            playing.end_elsewhere()
            raise asyncio.CancelledError
        return completion

    async def abort(self, key: RequestKey) -> None:
        playing = self._playing.get(key)
        if playing is None:
            return
        is_with_engine = playing.request is not None and await self._line.abort(playing.request)
        if not is_with_engine and self._playing.get(key) is playing and playing.task is not None:
            playing.task.cancel()


def summary_of(parts: tuple[Rollout, ...]) -> AttemptSummary:
    first, is_one = parts[0], len(parts) == 1 or len({part.agent for part in parts}) == 1
    return AttemptSummary(
        reward=first.reward,
        rewards=[] if is_one else list({part.agent: part.reward for part in parts}.values()),
        num_tokens=sum(len(part.tokens) for part in parts),
        num_sampled=sum(int(np.count_nonzero(part.loss_mask)) for part in parts),
        num_parts=len(parts),
        start_version=min(part.start_version for part in parts),
        end_version=max(int(np.maximum.reduce(part.versions)) for part in parts),
        finish=parts[-1].finish,
    )


def columns_of_rollout(parts: tuple[Rollout, ...]) -> dict[str, list[Any]]:
    """A row for each part."""
    if len(parts) == 1:
        return {name: [value] for name, value in zip(Rollout.__struct_fields__, structs.astuple(parts[0]), strict=True)}
    columns = zip(*map(structs.astuple, parts), strict=True)
    return {name: list(values) for name, values in zip(Rollout.__struct_fields__, columns, strict=True)}


def check_deadline(key: RequestKey, place: Place, admission: Admission) -> None:
    if admission.version > place.deadline:
        raise LagError(f"{owner_of(key)} is overdue: deadline {place.deadline}, version {admission.version}")


def owner_of(key: RequestKey) -> str:
    return f"group {key.group_id} member {key.member}"
