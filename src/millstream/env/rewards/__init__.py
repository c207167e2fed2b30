"""Rewards: plain functions of a task and a completion, sync or async, called with a time limit.

A reward that raises, hangs, kills its process, or returns something that is not a finite number fails its rollout with
`RewardFailed`; the run continues. Functions are named by a name of `BUILT_IN_REWARDS`, by `package.module:function`, or by
`file.py:function`.

    config     the [[reward]] tables
    find       name -> function, with its arguments checked
    foreign    functions written for TRL and verl
    call       one call under its time limit: inline, on the event loop, on a thread, or in a worker process
    pool       worker processes (`worker`: their side)
    trial      one call of each before a run, with the gold answer and with nonsense
    scorer     several rewards with weights, of one completion or of a whole group
    text, mathematics, code, judge, ranking     the built-in rewards
"""

from millstream.env.rewards.config import PASS_IT, RewardConfig, passed, was_passed
from millstream.env.rewards.find import (
    BUILT_IN_REWARDS,
    GroupReward,
    PassedRewards,
    Reward,
    check_reward,
    find_reward,
    prepare_rewards,
    swapped_parameters,
)
from millstream.env.rewards.scorer import CompletionScorer, ConfiguredRewards, GroupScorer, group_scorer
from millstream.env.rewards.text import exact_match, fuzzy_match
from millstream.env.rewards.trial import try_rewards

__all__ = [
    "BUILT_IN_REWARDS",
    "PASS_IT",
    "CompletionScorer",
    "ConfiguredRewards",
    "GroupReward",
    "GroupScorer",
    "PassedRewards",
    "Reward",
    "RewardConfig",
    "check_reward",
    "exact_match",
    "find_reward",
    "fuzzy_match",
    "group_scorer",
    "passed",
    "prepare_rewards",
    "swapped_parameters",
    "try_rewards",
    "was_passed",
]
