"""Environments: what a rollout is played in, and how it is scored.

base.py         the protocols: Environment, Context, Text        config.py   the `[[environment]]` tables
resolve.py      config -> environment                            registry.py the environments of a run, within their limits
single_turn.py  multi_turn.py                                    dialog.py   a conversation as tokens
isolated.py     episodes in worker processes                     data.py     data sets
games/          built-in environments and adapters               rewards/    reward functions
    sandbox/        untrusted code
"""

from millstream.env.base import Content, Context, Environment, EpisodeReward, ScoredReward, SplitReward, Step, Text

__all__ = ["Content", "Context", "Environment", "EpisodeReward", "ScoredReward", "SplitReward", "Step", "Text"]
