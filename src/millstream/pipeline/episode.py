"""One episode: a task played in an environment, and the one driver that plays it.

`Episode` is the token-level `Context` of an environment. It records every token: whether it was shown or sampled, by which
weights version, with which log-probability. Tokens in, tokens out: what was sampled is what is trained; nothing is decoded and
encoded again. An episode may have several parts, each a token sequence: several agents, or one whose history is rewritten
between two turns.

`Player` plays episodes for training, evaluation, supervised examples and `env check`. They differ in what generates the turns.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from millstream.env import Content, Environment, EpisodeReward, ScoredReward, SplitReward, Text
from millstream.env.base import split_reward
from millstream.errors import (
    EngineError,
    EnvironmentFailed,
    InvariantError,
    RequestRefused,
    RolloutTimeout,
    StallError,
)
from millstream.pipeline.limit import Limit
from millstream.pipeline.waits import Waits
from millstream.seeds import request_seed
from millstream.types import (
    TURNS_PER_PART,
    Completion,
    Finish,
    Request,
    RequestKey,
    Rollout,
    Sampling,
    Task,
    TurnLimits,
)

T = TypeVar("T")
Generate = Callable[[Request], Awaitable[Completion]]
NamedWait = Callable[[str, Awaitable[Any]], Awaitable[Any]]  # awaits under a name: see `pipeline.waits`
RecordSpan = Callable[[RequestKey, str], AbstractContextManager[Callable[[int], None]]]
"""A part of a rollout, for as long as the block lasts; called with its number of tokens, if it has some."""


class EndOfScript(EnvironmentFailed):
    """Raised by a scripted `Generate` that has no more turns: the episode ends there, with reward 0."""


class EpisodeResult(NamedTuple):
    """What one episode gave: its parts with their rewards, or why there are none."""

    parts: tuple[Rollout, ...]
    failure: Exception | None
    turns: list[Completion]  # part after part; also those of an episode that failed later
    played: tuple[Rollout, ...] = ()  # `parts`, or what there is of an episode that failed, with a reward of NaN
    reward_parts: Mapping[str, float] = {}  # of a `ScoredReward` reward

    @property
    def num_sampled(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)


class Player(NamedTuple):
    """Plays episodes in one environment. `role` keeps the seeds of training, evaluation and others apart."""

    environment: Environment
    sampling: Sampling
    run_seed: int
    role: str
    max_parts: int = 1
    waits: Waits | None = None  # None: waits have no name
    record: RecordSpan | None = None  # None: turns and waits are not recorded

    async def play(
        self,
        task: Task,
        key: RequestKey,
        generate: Generate,
        *,
        owner: str = "",
        limit: Limit | None = None,
        is_aborted: Callable[[], bool] = lambda: False,
    ) -> EpisodeResult:
        """Play one episode to its end. A failed episode is a result, not an exception: whatever the environment raises, its
        own cancellation, and `limit` running out. Raises only what ends the run (`EngineError`, `InvariantError`,
        `StallError`) and the cancellation of the current task, unless `is_aborted` says that this episode alone was meant."""
        episode = Episode(
            task,
            key,
            generate=generate if self.record is None else partial(_recorded_turn, generate, self.record),
            waiting=self._named_wait(owner, key),
            sampling=self.sampling,
            run_seed=self.run_seed,
            role=self.role,
            max_parts=self.max_parts,
            limit=limit,
        )
        parts: tuple[Rollout, ...] = ()
        reward: EpisodeReward = 0.0
        failure: Exception | None = None
        try:
            async with limit or nullcontext():
                with nullcontext() if self.waits is None else self.waits.idle(owner, "its environment"):
                    reward = await self.environment.rollout(episode)
            parts = episode.finish(reward)
        except EndOfScript:
            parts = episode.finish(0.0)
        except (EngineError, InvariantError, StallError):
            raise
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if own is not None and own.cancelling():
                if not is_aborted():
                    raise  # the caller is cancelled
                own.uncancel()
            failure = EnvironmentFailed("the environment was cancelled from inside")
        except TimeoutError as error:
            failure = self._too_late(error, limit) if limit is not None and limit.is_expired() else error
        except Exception as error:  # whatever an environment or a reward raises is a failed episode
            failure = error
        try:
            played = parts or episode.played()
            made_of = reward.parts if isinstance(reward, ScoredReward) else {}
            return EpisodeResult(parts, failure, episode.all_turns, played, made_of)
        finally:
            episode.close()
            failure = None  # its traceback refers to this frame: a reference cycle

    def _named_wait(self, owner: str, key: RequestKey) -> NamedWait:
        waits, record = self.waits, self.record
        if waits is None:
            return lambda what, work: work

        async def named(what: str, work: Awaitable[T]) -> T:
            with waits.idle(owner, what), nullcontext() if record is None else record(key, what):
                return await work

        return named

    def _too_late(self, error: TimeoutError, limit: Limit) -> RolloutTimeout:
        """Names what the episode was waiting for when its time was up."""
        cut, waiting = Waits.cut_by(error), ""
        if cut is not None and self.waits is not None:
            waiting = f": {self.waits.now() - cut.since:.0f} s of it it waited for {cut.what}"
        return RolloutTimeout(f"no reward after {limit.seconds:g} s{waiting}; rollout.timeout_s sets the limit")


async def _recorded_turn(generate: Generate, record: RecordSpan, request: Request) -> Completion:
    with record(request.key, "generate") as set_tokens:
        completion = await generate(request)
        set_tokens(len(completion.tokens))
        return completion


class EpisodePart:
    """One token sequence of an episode, and the `Context` that extends it. It speaks tokens only."""

    def __init__(
        self, task: Task, seed: int, *, index: int = 0, agent: int = 0, episode: Episode | None = None
    ) -> None:
        if agent < 0:
            raise EnvironmentFailed(f"context.part({agent}): agents count from 0")
        self.task = task
        self.seed = seed
        self._first_part = episode  # None: this is the first part
        self.index = index
        self.agent = agent
        self._is_generating = False
        self.turns: list[Completion] = []
        self._tokens: list[int] = []
        self._num_shown: list[int] = []  # tokens shown before each turn
        self._earned: list[float] = []  # by each turn, as far as the environment said so

    @property
    def _episode(self) -> Episode:
        assert self._first_part is not None
        return self._first_part

    @property
    def text(self) -> Text:
        raise EnvironmentFailed("this context speaks tokens: `millstream.env.dialog.Conversation` gives it words")

    async def ask(self, content: Content, *, is_raw: bool = False) -> str:
        return self.text.decode([])  # raises

    async def waiting(self, what: str, work: Awaitable[T], *, is_timed: bool = True) -> T:
        return await self._episode.wait(what, work, is_timed=is_timed)

    def earned(self, reward: float) -> None:
        if not self.turns:
            raise EnvironmentFailed(
                "context.earned was called before the first turn: there is nothing that has earned it"
            )
        if not math.isfinite(reward):
            raise EnvironmentFailed(f"context.earned was called with {reward}: expected a finite number")
        self._earned[-1] += float(reward)

    def earned_by(self, turn: int, reward: float) -> None:
        self._earned[turn] += reward

    @property
    def total_earned(self) -> float:
        return sum(self._earned)

    def part(self, agent: int = 0) -> EpisodePart:
        return self._episode.add_part(agent)

    async def generate(self, tokens: Sequence[int], limits: TurnLimits | None = None) -> Completion:
        if self._is_generating:
            raise EnvironmentFailed("context.generate was called while another turn was being sampled: take turns")
        self._is_generating = True
        sequence = (*self._tokens, *tokens)
        try:
            completion = await self._episode.request(self, len(self.turns), sequence, limits)
        finally:
            self._is_generating = False
        self.add_turn(tokens, completion)
        return completion

    def add_turn(self, tokens: Sequence[int], completion: Completion) -> None:
        """A finished turn: what was shown before it, and what was sampled. Raises `EngineError` for an answer that lacks the
        log-probability or the version of a token."""
        found = len(completion.tokens), len(completion.logprobs), len(completion.versions)
        if len(set(found)) > 1:
            raise EngineError(
                "an engine answered with {} tokens, {} log-probabilities and {} versions: expected one of each for every "
                "token. To test an engine of your own, type millstream check engine NAME".format(*found)
            )
        self._tokens += [*tokens, *completion.tokens]
        self._num_shown.append(len(tokens))
        self._earned.append(0.0)
        self.turns.append(completion)
        self._episode.order.append((self, len(self.turns) - 1))

    def as_rollout(self, key: RequestKey, number: int, reward: float) -> Rollout:
        loss_mask = np.zeros(len(self._tokens), dtype=np.bool_)
        logprobs = np.zeros(len(self._tokens), dtype=np.float32)
        versions = np.full(len(self._tokens), -1, dtype=np.int32)
        begin = 0
        for num_shown, turn in zip(self._num_shown, self.turns, strict=True):
            sampled = slice(begin + num_shown, begin + num_shown + len(turn.tokens))
            loss_mask[sampled] = True
            logprobs[sampled] = turn.logprobs
            versions[sampled] = turn.versions
            begin = sampled.stop
        return Rollout(
            group_id=key.group_id,
            member=key.member,
            part=number,
            agent=self.agent,
            attempt=key.attempt,
            start_version=min(min(turn.versions) for turn in self.turns if turn.versions),
            reward=reward,
            turn_rewards=self._turn_rewards(),
            finish=self.turns[-1].finish,
            tokens=np.array(self._tokens, dtype=np.int32),
            loss_mask=loss_mask,
            logprobs=logprobs,
            versions=versions,
        )

    def _turn_rewards(self) -> NDArray[np.float64]:
        """One reward for each run of sampled tokens in the mask. A turn that follows another with no token shown between them
        belongs to the same run. The reward of a turn without tokens goes to the run before it, or to the first run."""
        runs: list[float] = []
        owed, has_gap = 0.0, True
        for num_shown, turn, earned in zip(self._num_shown, self.turns, self._earned, strict=True):
            has_gap = has_gap or num_shown > 0
            if turn.tokens and (has_gap or not runs):
                runs.append(0.0)
                has_gap = False
            if runs:
                runs[-1] += owed + earned
                owed = 0.0
            else:
                owed += earned
        return np.array(runs, dtype=np.float64)


class Episode(EpisodePart):
    """The first part of an episode, and the record of all its parts. `limit` is the time limit of the whole episode; waits that
    are not timed suspend it."""

    def __init__(
        self,
        task: Task,
        key: RequestKey,
        *,
        generate: Generate,
        waiting: NamedWait,
        sampling: Sampling,
        run_seed: int,
        role: str,
        max_parts: int = 1,
        limit: Limit | None = None,
    ) -> None:
        super().__init__(task, request_seed(run_seed, f"{role}/environment", key))
        self._key = key
        self._generate = generate
        self._wait = waiting
        self._limit = limit
        self._sampling = sampling
        self._run_seed = run_seed
        self._role = role
        self._max_parts = max_parts
        self._turn = asyncio.Lock()  # one request at a time: synchronous training counts rollouts by their requests
        self._is_cut = False
        self._parts: list[EpisodePart] = [self]
        self.order: list[tuple[EpisodePart, int]] = []  # every finished turn, as its part and its place there

    @property
    def _episode(self) -> Episode:
        return self

    def add_part(self, agent: int) -> EpisodePart:
        part = EpisodePart(self.task, self.seed, index=len(self._parts), agent=agent, episode=self)
        self._parts.append(part)
        return part

    async def wait(self, what: str, work: Awaitable[T], *, is_timed: bool) -> T:
        with nullcontext() if is_timed or self._limit is None else self._limit.paused():
            result: T = await self._wait(what, work)
        return result

    async def request(
        self, part: EpisodePart, turn: int, tokens: tuple[int, ...], limits: TurnLimits | None
    ) -> Completion:
        """Sample one turn of a part. Raises `EnvironmentFailed` if more than `max_parts` parts have turns."""
        key = RequestKey(
            group_id=self._key.group_id,
            member=self._key.member,
            attempt=self._key.attempt,
            turn=part.index * TURNS_PER_PART + turn,
        )
        seed = request_seed(self._run_seed, self._role, key)
        sampling = self._sampling if limits is None else _limited(self._sampling, limits)
        request = Request(key=key, tokens=tokens, sampling=sampling, seed=seed)
        async with self._turn:
            if not part.turns and sum(bool(one.turns) for one in self._parts) >= self._max_parts:
                raise EnvironmentFailed(
                    f"more than {self._max_parts} sequences in one rollout: set rollout.max_parts to as many as the "
                    'environment needs (with thinking = "drop", one for every turn)'
                )
            try:
                return await self._generate(request)
            except RequestRefused:
                self._is_cut = True
                raise

    def close(self) -> None:
        """Break the reference cycles, so that the memory is freed without the garbage collector."""
        self._parts.clear()
        self.order.clear()

    @property
    def all_turns(self) -> list[Completion]:
        """Every finished turn, part after part."""
        return [turn for part in self._parts for turn in part.turns]

    def played(self) -> tuple[Rollout, ...]:
        """The parts so far, with a reward of NaN."""
        spoken = [part for part in self._parts if any(turn.tokens for turn in part.turns)]
        return tuple(part.as_rollout(self._key, number, math.nan) for number, part in enumerate(spoken))

    def finish(self, reward: EpisodeReward) -> tuple[Rollout, ...]:
        """The rollout, part by part, with its reward. Raises `EnvironmentFailed` if no token was sampled. Where the model's
        context had no room for one more turn, the last part has `Finish.LENGTH`."""
        spoken = [part for part in self._parts if any(turn.tokens for turn in part.turns)]
        if not spoken:
            raise EnvironmentFailed(
                "the environment ended without a token sampled: call context.generate at least once"
            )
        split = split_reward(reward)
        self._assign(split, spoken)
        rewards = _rewards(split, spoken)
        rollouts = [
            part.as_rollout(self._key, number, rewards[min(part.agent, len(rewards) - 1)])
            for number, part in enumerate(spoken)
        ]
        if self._is_cut:
            rollouts[-1] = structs.replace(rollouts[-1], finish=Finish.LENGTH)
        return tuple(rollouts)

    def _assign(self, split: SplitReward, spoken: Sequence[EpisodePart]) -> None:
        """Give turns and parts what they have earned."""
        if split.turns is not None:
            _check_length(split.turns, len(self.order), "turns")
            for (part, turn), reward in zip(self.order, split.turns, strict=True):
                part.earned_by(turn, reward)
        if split.parts is not None:
            parts = [part for part in dict.fromkeys(part for part, _ in self.order) if part in spoken]
            _check_length(split.parts, len(parts), "parts")
            for part, reward in zip(parts, split.parts, strict=True):
                part.earned_by(-1, reward)


def _check_length(rewards: Sequence[float], expected: int, what: str) -> None:
    if len(rewards) != expected:
        raise EnvironmentFailed(
            f"the environment returned rewards of {len(rewards)} {what}, and the rollout has {expected}: expected one for each"
        )


def _limited(sampling: Sampling, limits: TurnLimits) -> Sampling:
    most = sampling.max_tokens if limits.max_tokens is None else min(limits.max_tokens, sampling.max_tokens)
    stops = (*sampling.stop_strings, *limits.stop_strings)
    return structs.replace(sampling, max_tokens=most, stop_strings=stops)


def _rewards(split: SplitReward, spoken: Sequence[EpisodePart]) -> list[float]:
    """One number for all agents, or one for each."""
    num_agents = 1 + max(part.agent for part in spoken)
    match split.reward:
        case None:
            return [sum(part.total_earned for part in spoken if part.agent == agent) for agent in range(num_agents)]
        case dict():
            raise EnvironmentFailed(
                f"the environment returned {split.reward}: agents have names in args.agents of an agent only. Expected a "
                "number, or one per agent, in their order"
            )
        case list() if len(split.reward) < num_agents:
            num = len(split.reward)
            raise EnvironmentFailed(
                f"the environment returned {num} rewards, and agent {num_agents - 1} spoke: expected one for each agent"
            )
        case list():
            return split.reward
        case one:
            return [one]
