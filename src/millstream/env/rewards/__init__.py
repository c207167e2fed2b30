"""Rewards: plain functions of a task and a completion, sync or async, called with a time limit.

A reward that raises, hangs, kills its process, or returns something that is not a finite number fails its rollout with
`RewardFailed`; the run goes on. Functions are named by a name of `BUILT_IN`, by `package.module:function`, or by
`file.py:function`.

    config     what a [[reward]] table says
    find       from a name to a function, and its arguments checked
    call       one call under its time limit: inline, on the event loop, on a thread, or in a worker process
    pool       worker processes (`worker`: what runs in them)
    scorer     several rewards with weights, of one completion or of a whole group
    text, mathematics, code, judge, ranking     what is built in
"""

from millstream.env.rewards.config import PASS_IT, PASSED, RewardConfig, passed, was_passed
from millstream.env.rewards.find import BUILT_IN, GroupReward, Reward, check, find, prepare
from millstream.env.rewards.scorer import GroupScorer, Rewards, Scorer, group_scorer
from millstream.env.rewards.text import exact_match, fuzzy_match

__all__ = [
    "BUILT_IN",
    "PASSED",
    "PASS_IT",
    "GroupReward",
    "GroupScorer",
    "Reward",
    "RewardConfig",
    "Rewards",
    "Scorer",
    "check",
    "exact_match",
    "find",
    "fuzzy_match",
    "group_scorer",
    "passed",
    "prepare",
    "was_passed",
]
