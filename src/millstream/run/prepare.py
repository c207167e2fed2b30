"""Prepare: from a config to everything that a run begins with. What can be wrong with it is found here. Imports torch."""

from __future__ import annotations

from msgspec import Struct, structs
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millstream.env.data import DataSet, PassedData, digest, read
from millstream.env.registry import Environments, check_tasks
from millstream.env.rewards import ConfiguredRewards, PassedRewards, passed, prepare_rewards
from millstream.events import Sizes
from millstream.model.load import set_up_cpu
from millstream.run import build
from millstream.run.backend import Backend, backend_for
from millstream.run.build_scorers import check_scorer_models
from millstream.run.check import check_config
from millstream.run.check_prompts import check_lengths, unknown_text
from millstream.run.config import RunConfig
from millstream.run.sizes import choose_dtype, choose_sizes, with_sizes
from millstream.run.text import TokenizerText
from millstream.types import Sampling, Task


class Prepared(Struct, frozen=True, kw_only=True, eq=False):
    """A checked config, and what was built and loaded for it before the run has a folder."""

    config: RunConfig
    """With a size for every `auto`."""
    written: RunConfig
    """As it is in the run folder: without."""
    sizes: Sizes
    are_sizes_kept: bool
    """Whether they are those of the run's start."""
    backend: Backend
    data: DataSet
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    text: TokenizerText
    environment: Environments
    rewards: ConfiguredRewards
    sampling: Sampling
    data_digest: str
    warning: str
    """Empty if there is nothing to warn of."""

    @property
    def held_out(self) -> tuple[Task, ...]:
        return self.data.held_out[: self.config.evaluation.tasks]

    @property
    def tokenizer_for_stops(self) -> PreTrainedTokenizerBase | None:
        """For an engine that looks for stop strings; None where there are none."""
        return self.tokenizer if self.config.rollout.stop else None


def prepare_run(
    config: RunConfig,
    reward: PassedRewards | None = None,
    *,
    data_passed: PassedData | None = None,
    recorded: Sizes | None = None,
) -> Prepared:
    """Raises an error that says what to change where anything is wrong with the config, the data, a reward or a model.
    `data_passed`: records in place of those that a config names; `recorded`: the sizes that a resumed run keeps."""
    if reward is not None:
        config = structs.replace(config, reward=passed(reward, config.reward))
    checked = check_config(config, is_reward_passed=reward is not None, data_passed=data_passed)
    set_up_cpu()
    data = read(config.data, seed=config.seed) if checked.data is None else checked.data
    written, device = config, build.measure_device(config)
    config = config if recorded is None else with_sizes(config, recorded)
    driver_model = structs.replace(config.model, dtype=choose_dtype(config, device))
    if config.runtime == "ray":
        driver_model = structs.replace(driver_model, device="cpu")
    model, tokenizer = build.build_model(driver_model, seed=config.seed, lora=config.learner.lora)
    sizes = choose_sizes(config, device, build.measure_shape(model))
    config = with_sizes(config, sizes)
    backend = backend_for(config)
    build.check_passes(config, model)
    text = TokenizerText(tokenizer=tokenizer)
    rewards = prepare_rewards(config.reward, reward)
    environment = build.build_environment(checked.kinds, text, rewards, backend.launcher)
    check_scorer_models(config, tokenizer)
    check_tasks(environment, data, needs_gold=config.warmup is not None)
    check_lengths(config, model, text, data, environment)
    return Prepared(
        config=config,
        written=written,
        sizes=sizes,
        are_sizes_kept=recorded is not None,
        backend=backend,
        data=data,
        model=model,
        tokenizer=tokenizer,
        text=text,
        environment=environment,
        rewards=rewards,
        sampling=build.build_sampling(config, model, tokenizer),
        data_digest=digest(data),
        warning=unknown_text(text, data, environment),
    )
