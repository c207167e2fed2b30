"""From a config to the stages that score rows. Imports no torch."""

from __future__ import annotations

from millstream.learner import Critic, Scorer
from millstream.learner.config import call_tokens
from millstream.pipeline.schema import REFERENCE, VALUES, Stage
from millstream.run.config import RunConfig, critic_of, reference_of


def build_stages(config: RunConfig, reference: Scorer | None, critic: Critic | None) -> tuple[Stage, ...]:
    stages: list[Stage] = []
    reference_table, critic_table = reference_of(config), critic_of(config)
    if reference is not None and reference_table is not None:
        is_early = config.algorithm.kl == "reward" or config.algorithm.advantage == "distillation"
        stages.append(Stage(REFERENCE, reference, call_tokens(reference_table), is_early))
    if critic is not None and critic_table is not None:
        stages.append(Stage(VALUES, critic, call_tokens(critic_table), is_early=True))
    return tuple(stages)
