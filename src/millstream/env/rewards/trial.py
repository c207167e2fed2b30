"""A trial of every reward before a run: one call with the gold answer of a real task, one with nonsense, as a run makes them.

A reward that fails the calls of several tasks would fail every rollout, and is refused. One that is slow is reported, not
refused: a server behind it may be slow to start. So are rewards of which none tells the gold answer from nonsense. Rewards that
ask a model over HTTP are not called. The start of a run calls neither coroutines, which may keep something of the event loop of
their first call, nor the user's classes, which may be expensive to construct; `--dry-run` does.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import structs

from millstream.env.rewards.call import is_coroutine
from millstream.env.rewards.config import RewardConfig
from millstream.env.rewards.find import GroupReward, Reward, is_built_in
from millstream.env.rewards.pool import START_S
from millstream.env.rewards.scorer import CompletionScorer, ConfiguredRewards, GroupScorer
from millstream.errors import ConfigError, RewardFailed
from millstream.types import Task

NONSENSE = "~?~"
ASK_SERVERS = ("judge", "ranking_judge")
MAX_TRIAL_S = 10.0  # of a call, where reward.timeout_s is longer
SPARE_S = 2.0
CHECKED, WARNING = "checked", "warning"


def try_rewards(rewards: ConfiguredRewards, tasks: Mapping[str, Task], *, is_start: bool) -> list[str]:
    """A line for each reward: its numbers for the first task that it gives any, or that it was not called. `tasks`: by where
    they come from. Raises `ConfigError` for a reward that fails all its calls."""
    lines = [_tried(function, config, tasks, is_start=is_start) for function, config in rewards]
    if not all(one.is_indifferent for one in lines):  # a reward of the form alone is useful with another
        return [one.line for one in lines]
    return [f"{one.line.replace(CHECKED, WARNING, 1)}: it cannot tell one from the other" for one in lines]


class _Tried(NamedTuple):
    line: str
    is_indifferent: bool = False  # it gives the gold answer and nonsense the same number, of every task


def _tried(
    function: Reward | GroupReward, config: RewardConfig, tasks: Mapping[str, Task], *, is_start: bool
) -> _Tried:
    name = config.function
    if name in ASK_SERVERS:
        return _Tried(f"not checked: the reward {name}, which asks a server")
    is_own = not is_built_in(function, config) and not config.process
    if is_start and is_own and (is_coroutine(function) or inspect.isclass(function)):
        return _Tried(f"not checked: the reward {name}, which the run calls first")
    limit_s = min(config.timeout_s, MAX_TRIAL_S)
    config, first, same = structs.replace(config, timeout_s=limit_s, weight=1.0), "", ""
    for place, task in tasks.items():
        texts = (
            {"nonsense": NONSENSE} if task.answer is None else {"the gold answer": task.answer, "nonsense": NONSENSE}
        )
        began, work = time.monotonic(), _scores(function, config, task, list(texts.values()))
        scores = _on_a_loop(work, len(texts) * limit_s + SPARE_S + _start_s(config))
        numbers = [score for score in scores or () if isinstance(score, float)]
        if numbers and scores is not None:
            words = _in_words(name, dict(zip(texts, scores, strict=True)), place)
            if len(numbers) < 2 or numbers[0] != numbers[1]:
                return _Tried(words)
            same = same or words
        elif scores is None or time.monotonic() - began >= limit_s:
            return _Tried(f"{WARNING}: the reward {name} gave no number within {limit_s:g} s for {place}")
        else:
            first = first or f"{scores[0]}. That was {next(iter(texts))}, as the answer to {place}"
    if not same:
        raise ConfigError(first)
    return _Tried(same, is_indifferent=True)


def _in_words(name: str, scores: Mapping[str, float | RewardFailed], place: str) -> str:
    is_right = all(isinstance(score, float) for score in scores.values())
    found = [
        f"{score:g} for {text}" if isinstance(score, float) else f"an error for {text} ({score})"
        for text, score in scores.items()
    ]
    return f"{CHECKED if is_right else WARNING}: the reward {name} gives {', '.join(found)} ({place})"


def _start_s(config: RewardConfig) -> float:
    return 0.0 if config.process is False else START_S


async def _scores(
    function: Reward | GroupReward, config: RewardConfig, task: Task, texts: Sequence[str]
) -> list[float | RewardFailed]:
    """Of each text; of a reward of groups, all at once."""
    found = list[float | RewardFailed]()
    try:
        if config.group:
            return [*await GroupScorer([(function, config)]).score(task, texts)]
        scorer = CompletionScorer([(function, config)])
    except RewardFailed as error:
        return [error for _ in texts]
    for text in texts:
        try:
            found.append(float(await scorer.score(task, text)))
        except RewardFailed as error:
            found.append(error)
    return found


def _on_a_loop(
    work: Coroutine[Any, Any, list[float | RewardFailed]], limit_s: float
) -> list[float | RewardFailed] | None:
    """Run it on a thread with an event loop of its own: a loop may be running here, and a reward may block its loop. None: past
    the limit."""
    found = list[list[float | RewardFailed]]()
    raised = list[BaseException]()

    def run() -> None:
        try:
            found.append(asyncio.run(work))
        except BaseException as error:  # handed to the caller
            raised.append(error)

    thread = threading.Thread(target=run, name="trial of a reward", daemon=True)
    thread.start()
    thread.join(limit_s)
    if raised:
        raise raised[0]
    return found[0] if found else None
