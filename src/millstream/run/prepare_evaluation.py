"""Evaluations of a run, prepared: their tasks, environments and sampling. Imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from millstream.env.registry import Environments
from millstream.env.rewards import prepare_rewards
from millstream.model.load import context_length
from millstream.run import build
from millstream.run.check_evaluation import kinds_of, of_evaluation, played_in
from millstream.run.check_prompts import check_lengths
from millstream.run.config import EvaluationConfig
from millstream.types import Sampling, Task

if TYPE_CHECKING:
    from millstream.run.prepare import Prepared


class PreparedEvaluation(Struct, frozen=True, kw_only=True, eq=False):
    """One `[[evaluation]]` table with what it names."""

    config: EvaluationConfig
    tasks: tuple[Task, ...]
    environment: Environments
    sampling: Sampling
    """Where it is not greedy."""


def prepare_evaluations(prepared: Prepared) -> Iterator[PreparedEvaluation]:
    """Those of the config that have tasks. Raises an error that names the table where its data, environment or reward is
    wrong."""
    for one in prepared.config.evaluations:
        environment, sampling = _environment(one, prepared), _sampling(one, prepared.sampling)
        with of_evaluation(one.name):
            played = played_in(one, prepared.config, prepared.data)
            check_lengths(played, context_length(prepared.model), prepared.text)
        if tasks := played.data.held_out:
            yield PreparedEvaluation(config=one, tasks=tasks, environment=environment, sampling=sampling)


def _environment(one: EvaluationConfig, prepared: Prepared) -> Environments:
    """The run's own, unless the table has environments or rewards."""
    if not one.environment and not one.reward:
        return prepared.environment
    rewards = prepare_rewards(one.reward) if one.reward else prepared.rewards
    kinds, launcher = kinds_of(one, prepared.config), prepared.backend.launcher
    ends = build.end_tokens(prepared.model, prepared.tokenizer)
    return build.build_environment(
        kinds, prepared.text, rewards, launcher, ends=ends, takes_stops=prepared.config.engine.takes_stops
    )


def _sampling(one: EvaluationConfig, sampling: Sampling) -> Sampling:
    return structs.replace(
        sampling,
        temperature=sampling.temperature if one.temperature is None else one.temperature,
        top_p=one.top_p,
        max_tokens=one.max_tokens or sampling.max_tokens,
    )
