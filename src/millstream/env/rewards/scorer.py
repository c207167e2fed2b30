"""Several rewards with weights: of one completion (`CompletionScorer`), and of all completions of a group (`GroupScorer`)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from millstream.env.base import ScoredReward
from millstream.env.rewards.call import RewardCall, finite_number, finite_numbers
from millstream.env.rewards.config import RewardConfig
from millstream.env.rewards.find import GroupReward, Reward
from millstream.rpc.process import Launcher
from millstream.types import Task

# Functions with their configs: the result of `prepare_rewards`.
ConfiguredRewards = Sequence[tuple[Reward | GroupReward, RewardConfig]]


class CompletionScorer:
    """The weighted sum of the rewards of one completion. Rewards of whole groups are left out: they are `GroupScorer`'s."""

    def __init__(self, rewards: ConfiguredRewards, launcher: Launcher | None = None) -> None:
        """`launcher`: of worker processes on a cluster. None: they are this machine's."""
        own = [(function, config) for function, config in rewards if not config.group]
        self._rewards = [(RewardCall(function, config, launcher), config) for function, config in own]
        functions = [re.split(r"[/:.]", config.function)[-1] for _, config in own]  # without file or package
        self._names = [  # each its own, where a function is used twice
            name if functions.count(name) == 1 else f"{name} {number}" for number, name in enumerate(functions, 1)
        ]
        self.name = "reward " + (" + ".join(config.function for _, config in own) or "of the group alone")

    async def score(self, task: Task, completion: str) -> ScoredReward:
        """With the value of each, before its weight. Raises `RewardFailed` if any of them fails."""
        values = [finite_number(await call(task, completion), config.function) for call, config in self._rewards]
        total = sum([config.weight * value for value, (_, config) in zip(values, self._rewards, strict=True)])
        return ScoredReward(total, dict(zip(self._names, values, strict=True)))


class GroupScorer:
    """The weighted sum of the rewards of a whole group, member by member. Called when the group is complete; it may have fewer
    members than were asked for, where some failed."""

    def __init__(self, rewards: ConfiguredRewards, launcher: Launcher | None = None) -> None:
        own = [(function, config) for function, config in rewards if config.group]
        self._rewards = [(RewardCall(function, config, launcher), config) for function, config in own]
        self.name = "group reward " + " + ".join(config.function for _, config in own)

    async def score(self, task: Task, completions: Sequence[str]) -> list[float]:
        """One number a completion, in their order. Raises `RewardFailed` if any of the rewards fails: then for all of them."""
        sums = [0.0] * len(completions)
        for call, config in self._rewards:
            values = finite_numbers(await call(task, tuple(completions)), config.function, expected=len(completions))
            sums = [total + config.weight * value for total, value in zip(sums, values, strict=True)]
        return sums


def group_scorer(rewards: ConfiguredRewards, launcher: Launcher | None = None) -> GroupScorer | None:
    """None where no reward is of a whole group."""
    return GroupScorer(rewards, launcher) if any(config.group for _, config in rewards) else None
