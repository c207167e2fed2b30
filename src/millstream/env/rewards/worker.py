"""The worker process of a reward: one call after the other, until the connection closes."""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
from collections.abc import Callable

from millstream.env.rewards.call import error_text, finite_number, finite_numbers, is_coroutine
from millstream.env.rewards.config import RewardConfig
from millstream.env.rewards.find import BUILT_IN_REWARDS, bind_reward, find_reward
from millstream.env.rewards.pool import ScoreCall, Scores
from millstream.errors import RewardFailed
from millstream.rpc.call import Channel
from millstream.rpc.serve import serve_calls


def begin_scoring(config: RewardConfig) -> Callable[[ScoreCall], Scores]:
    function, name = bind_reward(find_reward(config.function), config), config.function
    known = BUILT_IN_REWARDS.get(name)
    if known is not None and known.needs is not None:
        importlib.import_module(known.needs[0])  # now, not within the time limit of the first call
    own_id = os.getpid()

    def score(call: ScoreCall) -> Scores:
        scores = Scores()
        try:
            value = function(call.task, call.completions)
            if is_coroutine(function):
                value = asyncio.run(value)
            if isinstance(call.completions, str):
                scores = Scores(values=(finite_number(value, name),))
            else:
                scores = Scores(values=tuple(finite_numbers(value, name, expected=len(call.completions))))
        except RewardFailed as error:
            scores = Scores(failure=str(error))
        except Exception as error:  # user code: any error fails this rollout only
            scores = Scores(failure=f"reward {name} {error_text(error)}")
        if os.getpid() != own_id:  # a child that the reward forked, and that returned here: it must not answer
            os._exit(0)
        return scores

    return score


def serve_rewards(connection: socket.socket) -> None:
    serve_calls(Channel(connection), RewardConfig, begin_scoring, ScoreCall)
