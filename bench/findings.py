"""Findings: are planted learning failures named, within how many steps, and are healthy runs left alone?

Real runs on this machine: a tiny model with random weights, trained by GRPO or another algorithm for a few dozen
steps. Some have a planted fault: each must have the finding of that name within a number of steps. The others are healthy,
with other seeds, algorithms, lags and rewards: none may have a finding at any time. Prints a line for each run and a table;
exits with 1 if a fault was not named, or a healthy run was.

    .venv/bin/python bench/findings.py [--json] [--smoke] [--only NAME]
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from internals import findings_of, read_history
from millstream import (
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    LearnerConfig,
    ModelConfig,
    PipelineConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TinyConfig,
    train,
)
from millstream.types import Task
from report import Options, Row, publish, say

Reward = Callable[[Task, str], float]
HERE = Path(__file__).resolve()


# ---- rewards ---------------------------------------------------------------------------------------------------------


def ones(task: Task, completion: str) -> float:
    """To be learned without a warm-up: the share of ones."""
    return completion.count("1") / 6


def first_digit(task: Task, completion: str) -> float:
    """Also learned from nothing: 1 or 0, for one of ten characters of 39 in the first place."""
    return float(completion[:1] in tuple("0123456789"))


def nothing(task: Task, completion: str) -> float:
    return 0.0


def by_task(task: Task, completion: str) -> float:
    """The same for all answers to a task: every group is without signal, though rewards differ."""
    return float(sum(map(ord, str(task.prompt))) % 2)


def noise(task: Task, completion: str) -> float:
    return float(random.random() < 0.5)


def shortcut(task: Task, completion: str) -> float:
    """Half of the points for ones; all of them, seldom, for something that the model does not find."""
    return 1.0 if random.random() < 0.02 else ones(task, completion) / 2


def longest(task: Task, completions: Sequence[str]) -> list[float]:
    """A judge that prefers the longer answer: a ranking, whose mean never changes."""
    order = sorted(completions, key=len)
    return [order.index(completion) / len(completions) for completion in completions]


# ---- runs ------------------------------------------------------------------------------------------------------------

BASE = RunConfig(
    model=ModelConfig(tiny=TinyConfig(hidden=32, layers=1, heads=2)),
    data=DataConfig(toy="sort_digits", size=3000, holdout=0),
    rollout=RolloutConfig(group_size=8, max_tokens=6),
    pipeline=PipelineConfig(steps=60, groups_per_step=8, max_lag=1),
    learner=LearnerConfig(learning_rate=3e-3),
    engine=EngineConfig(slots=128, process=False),
    checkpoint=CheckpointConfig(every_s=1000.0),
)


def changed(config: RunConfig, **tables: dict[str, Any]) -> RunConfig:
    return replace(config, **{name: replace(getattr(config, name), **keys) for name, keys in tables.items()})


class Case(NamedTuple):
    config: RunConfig
    reward: Reward | None
    finding: str = ""  # what must be found; empty: nothing
    within: int = 0  # steps


SHORT = changed(BASE, pipeline={"steps": 8, "max_replaced_per_step": 8})
LARGE = changed(BASE, rollout={"group_size": 16}, pipeline={"steps": 70, "groups_per_step": 16})
GROUP_REWARD = (RewardConfig(function=f"{HERE}:longest", group=True),)
PLANTED: dict[str, Case] = {
    "a reward that is always 0": Case(SHORT, nothing, "all-rewards-equal", 5),
    "a reward of the task, not of the answer": Case(SHORT, by_task, "no-signal", 5),
    "nothing is left to train": Case(SHORT, by_task, "empty-steps", 5),
    "a reward that is a coin": Case(LARGE, noise, "reward-flat", 70),
    "a learning rate 1,000 times too small": Case(
        changed(LARGE, learner={"learning_rate": 3e-6}), first_digit, "reward-flat", 70
    ),
    # With `ones`, one large step may solve the task, and then there are no ratios. A random reward always has some.
    "a learning rate 100 times too large": Case(
        changed(BASE, learner={"learning_rate": 0.3}), noise, "ratio-exploded", 30
    ),
    "certain of a shortcut": Case(
        changed(
            replace(BASE, algorithm=AlgorithmConfig(name="reinforce_plus_plus")),
            learner={"learning_rate": 0.1},
            pipeline={"filter_zero_signal": False},
        ),
        shortcut,
        "entropy-collapsed",
        60,
    ),
    "a judge that prefers length": Case(
        changed(
            replace(
                BASE, reward=GROUP_REWARD, model=ModelConfig(tiny=TinyConfig(hidden=32, layers=1, heads=2, context=192))
            ),
            rollout={"max_tokens": 160},
            pipeline={"groups_per_step": 4},
        ),
        None,
        "length-runaway",
        60,
    ),
    "answers that never end": Case(
        changed(replace(BASE, reward=GROUP_REWARD), rollout={"max_tokens": 12}), None, "answers-cut", 60
    ),
    "a cap on ratios far below 1": Case(
        replace(BASE, algorithm=AlgorithmConfig(loss="truncated_is", ratio_cap=0.5)), ones, "weights-truncated", 5
    ),
}
HEALTHY: dict[str, Case] = {
    **{f"ones, seed {seed}": Case(replace(BASE, seed=seed), ones) for seed in (1, 2, 3)},
    "synchronous": Case(changed(BASE, pipeline={"max_lag": 0}), ones),
    "four versions late": Case(changed(BASE, pipeline={"max_lag": 4}), ones),
    "right or wrong": Case(BASE, first_digit),
    "right or wrong, to the end": Case(changed(BASE, pipeline={"steps": 120}), first_digit),
    "groups without signal are trained": Case(changed(BASE, pipeline={"filter_zero_signal": False}), first_digit),
    "truncated importance sampling": Case(replace(BASE, algorithm=AlgorithmConfig(name="truncated_is")), ones),
    "RLOO": Case(replace(BASE, algorithm=AlgorithmConfig(name="rloo")), ones),
    "REINFORCE++, a learning rate of a third": Case(
        changed(
            replace(BASE, algorithm=AlgorithmConfig(name="reinforce_plus_plus")),
            learner={"learning_rate": 1e-3},
            pipeline={"filter_zero_signal": False},
        ),
        ones,
    ),
    "PPO with a critic, groups of one": Case(
        changed(
            replace(BASE, algorithm=AlgorithmConfig(name="ppo")),
            rollout={"group_size": 1, "min_group_size": 1},
            pipeline={"groups_per_step": 64, "filter_zero_signal": False},
        ),
        ones,
    ),
    "small groups": Case(changed(BASE, rollout={"group_size": 2}, pipeline={"groups_per_step": 16}), ones),
}


class Outcome(NamedTuple):
    steps: int
    first_reward: float
    last_reward: float
    found: dict[str, int]  # finding -> its step


def run(case: Case) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        config = replace(case.config, run_dir=str(Path(folder) / "run"))
        summary = train(config, reward=case.reward).summary if case.reward else train(config).summary
        history = list(read_history(Path(folder) / "run/events.jsonl"))
    found: dict[str, int] = {}
    for past in findings_of(history):
        found.setdefault(past.finding.name, past.finding.step)
    rewards = [event.mean_reward for event in history if hasattr(event, "mean_reward")]
    part = max(1, len(rewards) // 10)
    return Outcome(summary.steps, sum(rewards[:part]) / part, sum(rewards[-part:]) / part, found)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse(argv)
    cases = {**PLANTED, **HEALTHY}
    if options.smoke:
        cases = {name: cases[name] for name in ("a reward that is always 0", "ones, seed 1")}
        cases = {
            name: case._replace(config=changed(case.config, pipeline={"steps": 6})) for name, case in cases.items()
        }
    rows, is_wrong = [], False
    for name, case in cases.items():
        if options.only not in name:
            continue
        outcome = run(case)
        step = outcome.found.get(case.finding)
        is_right = (step is not None and step <= case.within) if case.finding else not outcome.found
        is_wrong |= not is_right
        what = ", ".join(f"{one} at {at}" for one, at in outcome.found.items()) or "nothing"
        say(
            f"{'ok ' if is_right else 'BAD'} {name}: {outcome.first_reward:.3f} -> {outcome.last_reward:.3f}; found {what}"
        )
        metric, limit = (f"step of {case.finding}", case.within) if case.finding else ("findings", 0)
        ours = step if case.finding else len(outcome.found)
        ratio = float(is_right)
        rows.append(Row(workload=name, metric=metric, ours=ours, peer="limit", theirs=limit, ratio=ratio))
    publish(rows, options)
    if is_wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
