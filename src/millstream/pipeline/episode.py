"""One rollout on its way: collects, token by token, what was shown, what was sampled, by which version, how likely.

Tokens in, tokens out: what was sampled is what is trained; nothing is ever decoded and encoded again. A rollout may have
several parts, each a sequence of its own: several agents, or one whose history is rewritten between two turns.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from millstream.env import Content, EpisodeReward, Text
from millstream.errors import EnvironmentFailed, RequestRefused
from millstream.pipeline.waits import Limit
from millstream.seeds import request_seed
from millstream.types import Completion, Finish, Request, RequestKey, Rollout, Sampling, Task

T = TypeVar("T")
Generate = Callable[[Request], Awaitable[Completion]]
Waiting = Callable[[str, Awaitable[Any]], Awaitable[Any]]
"""Awaits under a name: see `pipeline.waits`."""
TURNS_PER_PART = 1 << 16
"""Requests of one rollout are told apart, and seeded, by their turn: those of part n count from n times this."""


class Episode:
    """The `Context` of an environment, as far as tokens go. `role` keeps the seeds of training and evaluation apart; `limit` is
    the rollout's time limit, which waits that are not its own suspend."""

    def __init__(
        self,
        task: Task,
        key: RequestKey,
        *,
        generate: Generate,
        waiting: Waiting,
        sampling: Sampling,
        run_seed: int,
        role: str,
        max_parts: int = 1,
        limit: Limit | None = None,
    ) -> None:
        self.task = task
        self._waiting = waiting
        self._limit = limit
        self.seed = request_seed(run_seed, f"{role}/environment", key)
        self._key = key
        self._generate = generate
        self._sampling = sampling
        self._run_seed = run_seed
        self._role = role
        self._max_parts = max_parts
        self._turn = asyncio.Lock()  # one request at a time: synchronous training counts rollouts by their requests
        self._is_cut = False
        self._parts: list[_Part] = []
        self.part()

    async def generate(self, tokens: Sequence[int]) -> Completion:
        return await self._parts[0].generate(tokens)

    async def waiting(self, what: str, work: Awaitable[T], *, is_timed: bool = True) -> T:
        with nullcontext() if is_timed or self._limit is None else self._limit.paused():
            result: T = await self._waiting(what, work)
        return result

    def earned(self, reward: float) -> None:
        self._parts[0].earned(reward)

    def part(self, agent: int = 0) -> _Part:
        self._parts.append(_Part(self, len(self._parts), agent))
        return self._parts[-1]

    @property
    def text(self) -> Text:
        raise EnvironmentFailed("this context speaks tokens: `millstream.env.dialog.Conversation` gives it words")

    async def ask(self, content: Content) -> str:
        return self.text.decode([])  # says why not

    async def request(self, part: _Part, turn: int, tokens: Sequence[int]) -> Completion:
        """One turn of a part, if that has its place among those that may speak."""
        key = RequestKey(
            group_id=self._key.group_id,
            member=self._key.member,
            attempt=self._key.attempt,
            turn=part.index * TURNS_PER_PART + turn,
        )
        seed = request_seed(self._run_seed, self._role, key)
        request = Request(key=key, tokens=tuple(tokens), sampling=self._sampling, seed=seed)
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
        """It is over. Parts know their episode: without this, nothing of it is freed before the garbage collector comes."""
        self._parts.clear()

    @property
    def num_sampled(self) -> int:
        """Tokens of the turns that are finished."""
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def turns(self) -> list[Completion]:
        """What the model has said, part after part."""
        return [turn for part in self._parts for turn in part.turns]

    def finish(self, reward: EpisodeReward) -> tuple[Rollout, ...]:
        """The rollout, part by part, with its reward. Fails if the environment never let the model speak. Where the model's
        context had no room for one more turn, the last part says that its length ended it."""
        spoken = [part for part in self._parts if any(turn.tokens for turn in part.turns)]
        if not spoken:
            raise EnvironmentFailed(
                "the environment ended without a token sampled: call context.generate at least once"
            )
        rewards = _rewards(reward, num_agents=1 + max(part.agent for part in spoken))
        rollouts = [
            part.finish(self._key, number, rewards[min(part.agent, len(rewards) - 1)])
            for number, part in enumerate(spoken)
        ]
        if self._is_cut:
            rollouts[-1] = structs.replace(rollouts[-1], finish=Finish.LENGTH)
        return tuple(rollouts)


class _Part:
    """One sequence of an episode: a `Context`, too."""

    def __init__(self, episode: Episode, index: int, agent: int) -> None:
        if agent < 0:
            raise EnvironmentFailed(f"context.part({agent}): agents count from 0")
        self.task = episode.task
        self.seed = episode.seed
        self._episode = episode
        self.index = index
        self.agent = agent
        self._is_generating = False
        self.turns: list[Completion] = []
        self._tokens: list[int] = []
        self._num_shown: list[int] = []
        """Before each turn."""
        self._earned: list[float] = []
        """By each turn, as far as the environment said so."""

    @property
    def text(self) -> Text:
        return self._episode.text

    async def ask(self, content: Content) -> str:
        return await self._episode.ask(content)

    async def waiting(self, what: str, work: Awaitable[T], *, is_timed: bool = True) -> T:
        return await self._episode.waiting(what, work, is_timed=is_timed)

    def earned(self, reward: float) -> None:
        if not self.turns:
            raise EnvironmentFailed(
                "context.earned was called before the first turn: there is nothing that has earned it"
            )
        if not math.isfinite(reward):
            raise EnvironmentFailed(f"context.earned was told {reward}: expected a finite number")
        self._earned[-1] += float(reward)

    def part(self, agent: int = 0) -> _Part:
        return self._episode.part(agent)

    async def generate(self, tokens: Sequence[int]) -> Completion:
        if self._is_generating:
            raise EnvironmentFailed("context.generate was called while another turn was being sampled: take turns")
        self._is_generating = True
        sequence = [*self._tokens, *tokens]
        try:
            completion = await self._episode.request(self, len(self.turns), sequence)
        finally:
            self._is_generating = False
        sequence.extend(completion.tokens)
        self._tokens = sequence
        self._num_shown.append(len(tokens))
        self._earned.append(0.0)
        self.turns.append(completion)
        return completion

    def finish(self, key: RequestKey, number: int, reward: float) -> Rollout:
        mask, logprobs, versions = list[bool](), list[float](), list[int]()
        for num_shown, turn in zip(self._num_shown, self.turns, strict=True):
            mask += [False] * num_shown + [True] * len(turn.tokens)
            logprobs += [0.0] * num_shown
            logprobs += turn.logprobs
            versions += [-1] * num_shown
            versions += turn.versions
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
            loss_mask=np.array(mask, dtype=np.bool_),
            logprobs=np.array(logprobs, dtype=np.float32),
            versions=np.array(versions, dtype=np.int32),
        )

    def _turn_rewards(self) -> NDArray[np.float64]:
        """One for each run of the mask: a turn that follows another without a word between is the same run, and what a turn
        without a token earned is that of the one before it, or of the first."""
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


def _rewards(reward: Any, *, num_agents: int) -> list[float]:
    """One number for all, or one for each agent."""
    is_one = not isinstance(reward, Sequence) or isinstance(reward, str)
    try:
        rewards = [float(reward)] if is_one else [float(one) for one in reward]
    except (TypeError, ValueError) as error:
        raise EnvironmentFailed(f"the environment returned {reward!r}: expected a number, or one per agent") from error
    if not is_one and len(rewards) < num_agents:
        raise EnvironmentFailed(
            f"the environment returned {len(rewards)} rewards, and agent {num_agents - 1} spoke: expected one for each agent"
        )
    if not all(map(math.isfinite, rewards)):
        raise EnvironmentFailed(f"the environment returned a reward of {reward}: expected a finite number")
    return rewards
