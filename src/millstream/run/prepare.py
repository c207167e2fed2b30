"""From a config to all that a run begins with: what can be wrong with a config, data, a reward or a model is found here."""

from __future__ import annotations

from msgspec import Struct, structs
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millstream.env.data import DataSet, digest, read
from millstream.env.registry import Environments, check_tasks
from millstream.env.resolve import find_environment, make_tasks
from millstream.env.rewards import ConfiguredRewards, Reward, passed, prepare_rewards
from millstream.model.load import set_up_cpu
from millstream.run import build
from millstream.run import build_scorers as build_stages
from millstream.run.backend import Backend, backend_for
from millstream.run.config import RunConfig, check_run
from millstream.types import Sampling, Task


class Prepared(Struct, frozen=True, kw_only=True, eq=False):
    """Everything that can be wrong with a config, a data set, a reward or a model is found while this is made."""

    config: RunConfig
    site: Backend
    data: DataSet
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    text: build.Text
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
        """An engine needs one only if it must look for text."""
        return self.tokenizer if self.config.rollout.stop else None


def prepare(config: RunConfig, reward: Reward | None = None) -> Prepared:
    if reward is not None:
        config = structs.replace(config, reward=passed(reward, config.reward))
    check_run(config)
    set_up_cpu()
    kinds = [find_environment(one) for one in config.environment]
    data = read(config.data, seed=config.seed, make=lambda num, seed: make_tasks(kinds, num, seed))
    site = backend_for(config)
    of_driver = structs.replace(config.model, device="cpu") if config.runtime == "ray" else config.model
    model, tokenizer = build.build_model(of_driver, seed=config.seed, lora=config.learner.lora)
    text = build.Text(tokenizer=tokenizer)
    rewards = prepare_rewards(config.reward, reward)
    environment = build.build_environment(kinds, text, rewards, site.launcher)
    build_stages.check_models(config, tokenizer)
    check_tasks(environment, data, needs_gold=config.warmup is not None)
    build.check_lengths(config, model, text, data, environment)
    return Prepared(
        config=config,
        site=site,
        data=data,
        model=model,
        tokenizer=tokenizer,
        text=text,
        environment=environment,
        rewards=rewards,
        sampling=build.build_sampling(config, model, tokenizer),
        data_digest=digest(data),
        warning=build.unknown_text(text, data, environment),
    )
