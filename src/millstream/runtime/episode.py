"""One rollout on its way: collects, token by token, what was shown, what was sampled, by which version, how likely.

Tokens in, tokens out: what was sampled is what is trained; nothing is ever decoded and encoded again.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from millstream.errors import EnvironmentFailed
from millstream.seeds import request_seed
from millstream.types import Completion, Finish, Request, RequestKey, Rollout, Sampling, Task

T = TypeVar("T")
Generate = Callable[[Request], Awaitable[Completion]]
Waiting = Callable[[str, Awaitable[Any]], Awaitable[Any]]
"""Awaits under a name: see `runtime.waits`."""


class Episode:
    """The `Context` of an environment. `role` keeps the seeds of training and evaluation apart."""

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
    ) -> None:
        self.task = task
        self._waiting = waiting
        self.seed = request_seed(run_seed, f"{role}/environment", key)
        self._key, self._generate, self._sampling = key, generate, sampling
        self._run_seed, self._role = run_seed, role
        self._is_generating = False
        self._turns: list[Completion] = []
        self._tokens: list[int] = []
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []

    async def generate(self, tokens: Sequence[int]) -> Completion:
        if self._is_generating:
            raise EnvironmentFailed("context.generate was called while another turn was being sampled: take turns")
        self._append(tokens, [0.0] * len(tokens), [-1] * len(tokens), is_sampled=False)
        key = RequestKey(
            group_id=self._key.group_id, member=self._key.member, attempt=self._key.attempt, turn=len(self._turns)
        )
        request = Request(
            key=key,
            tokens=tuple(self._tokens),
            sampling=self._sampling,
            seed=request_seed(self._run_seed, self._role, key),
        )
        self._is_generating = True
        completion = await self._generate(request)
        self._is_generating = False
        self._append(completion.tokens, completion.logprobs, completion.versions, is_sampled=True)
        self._turns.append(completion)
        return completion

    async def waiting(self, what: str, work: Awaitable[T]) -> T:
        result: T = await self._waiting(what, work)
        return result

    def _append(
        self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], *, is_sampled: bool
    ) -> None:
        self._tokens.extend(tokens)
        self._mask.extend([is_sampled] * len(tokens))
        self._logprobs.extend(logprobs)
        self._versions.extend(versions)

    @property
    def num_sampled(self) -> int:
        """Tokens of the turns that are finished."""
        return sum(self._mask)

    @property
    def sampled(self) -> list[int]:
        """What the model has said in the turns that are finished."""
        return [token for turn in self._turns for token in turn.tokens]

    def finish(self, reward: float) -> tuple[Rollout, ...]:
        """The rollout, part by part, with its reward. Fails if the environment never let the model speak."""
        if not math.isfinite(reward):
            raise EnvironmentFailed(f"the environment returned a reward of {reward}: expected a finite number")
        sampled = [version for version in self._versions if version >= 0]
        if not sampled:
            raise EnvironmentFailed(
                "the environment ended without a token sampled: call context.generate at least once"
            )
        rollout = Rollout(
            group_id=self._key.group_id,
            member=self._key.member,
            attempt=self._key.attempt,
            start_version=min(sampled),
            reward=float(reward),
            finish=self._turns[-1].finish if self._turns else Finish.ABORT,
            tokens=np.array(self._tokens, dtype=np.int32),
            loss_mask=np.array(self._mask, dtype=np.bool_),
            logprobs=np.array(self._logprobs, dtype=np.float32),
            versions=np.array(self._versions, dtype=np.int32),
        )
        return (rollout,)
