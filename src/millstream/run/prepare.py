"""Prepare: from a config to everything that a run begins with. What can be wrong with it is found here. Imports torch."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct, structs
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millstream.env.config import AGENT
from millstream.env.data import DataSet, PassedData, digest
from millstream.env.registry import Environments
from millstream.env.rewards import ConfiguredRewards, PassedRewards, passed, prepare_rewards
from millstream.events import Sizes
from millstream.model.load import context_length, set_up_cpu
from millstream.run import build
from millstream.run.backend import Backend, backend_for
from millstream.run.branch import load_start
from millstream.run.build_scorers import check_scorer_models
from millstream.run.check import check_config
from millstream.run.check_machine import PlayedTasks, check_engine_device
from millstream.run.check_prompts import check_lengths, unknown_text
from millstream.run.config import RunConfig, is_model_on_host
from millstream.run.device import with_places
from millstream.run.one_gpu import why_threads, with_process
from millstream.run.places import Machine, Places, check_heads, check_model_fits, place
from millstream.run.prepare_evaluation import PreparedEvaluation, prepare_evaluations
from millstream.run.sizes import (
    ModelDevice,
    ModelShape,
    choose_dtype,
    choose_sizes,
    with_recorded,
    with_sizes,
)
from millstream.run.text import TokenizerText
from millstream.run.weight_ways import local_ways
from millstream.types import Sampling, Task


class Prepared(Struct, frozen=True, kw_only=True, eq=False):
    """A checked config, and what was built and loaded for it before the run has a folder."""

    config: RunConfig
    """With a size for every `auto`."""
    written: RunConfig
    """As it is in the run folder: without."""
    sizes: Sizes
    places: Places
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
    evaluations: tuple[PreparedEvaluation, ...] = ()
    """Those of the config that have tasks."""

    @property
    def held_out(self) -> tuple[Task, ...]:
        """What is measured of supervised training: the tasks of the first evaluation of held-out tasks."""
        held_out = (one.tasks for one in self.config.evaluations if one.is_held_out)
        return self.data.held_out[: next(held_out, None)]

    async def close(self) -> None:
        """End the worker processes of all environments."""
        for environment in {self.environment, *(one.environment for one in self.evaluations)}:
            await environment.close()

    @property
    def tokenizer_for_stops(self) -> PreTrainedTokenizerBase | None:
        """For an engine that looks for stop strings; None where there are none. An agent may send some."""
        tables = [*self.config.environment, *(one for table in self.config.evaluations for one in table.environment)]
        has_some = self.config.rollout.stop or any(one.use == AGENT for one in tables)
        return self.tokenizer if has_some else None


def prepare_run(
    config: RunConfig,
    reward: PassedRewards | None = None,
    *,
    data_passed: PassedData | None = None,
    recorded: Sizes | None = None,
    start: Path | None = None,
    is_new: bool = False,
    is_alone: bool = False,
) -> Prepared:
    """Raises an error that says what to change where anything is wrong with the config, the data, a reward or a model.
    `data_passed`: records in place of those that a config names. `recorded`: the sizes that a resumed run keeps. `start`: the
    checkpoint whose weights the model begins with. `is_new`: a folder will be made for the run. `is_alone`: nothing is trained,
    and the only engine is where the model is."""
    config = _with_passed(config, reward, data_passed)
    written, machine = config, None if is_alone else build.find_machine_here(config)
    checked = check_config(
        config, reward=reward, data_passed=data_passed, is_start=True, is_new=is_new, machine=machine
    )
    set_up_cpu()
    assert checked.data is not None, "a start reads every data set"
    data = checked.data
    config, places = place(with_recorded(config, recorded), machine)
    device = with_places(build.measure_device(config), places)
    model, tokenizer = _driver_model(config, device, start)
    shape = _checked_shape(config, model, machine)
    config, why = (config, "") if is_alone else _decided(config, device, shape, recorded, places)
    sizes = structs.replace(choose_sizes(config, device, shape), why_threads=why)
    config = with_sizes(config, sizes)
    if config.runtime == "local":
        check_engine_device(config.engine, is_gpu=device.is_gpu)
    backend = backend_for(config, places)
    build.check_passes(config, model, is_gpu=device.is_gpu)
    text = TokenizerText(tokenizer=tokenizer)
    rewards = prepare_rewards(config.reward, reward)
    ends = build.end_tokens(model, tokenizer)
    environment = build.build_environment(
        checked.kinds, text, rewards, backend.launcher, ends=ends, takes_stops=config.engine.takes_stops
    )
    check_scorer_models(config, tokenizer, model)
    played = PlayedTasks(checked.kinds, data, config.rollout.max_tokens)
    check_lengths(played, context_length(model), text)
    prepared = Prepared(
        config=config,
        written=written,
        sizes=sizes,
        places=places,
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
        warning=unknown_text(text, played),
    )
    return structs.replace(prepared, evaluations=tuple(prepare_evaluations(prepared)))


def _decided(
    config: RunConfig, device: ModelDevice, shape: ModelShape | None, recorded: Sizes | None, places: Places
) -> tuple[RunConfig, str]:
    """With processes for engine and learner, or why they are threads of one GPU. Raises `ConfigError` for ways of weights that
    could not be checked before the model was loaded."""
    decided = with_process(config, device, shape, recorded)
    if config.runtime == "local" and config.resources.weights is not None:
        local_ways(decided, places, is_gpu=device.is_gpu)
    return decided, why_threads(decided, device, shape, recorded)


def _with_passed(config: RunConfig, reward: PassedRewards | None, data_passed: PassedData | None) -> RunConfig:
    if reward is not None:
        config = structs.replace(config, reward=passed(reward, config.reward))
    if data_passed is not None:
        config = structs.replace(config, data=structs.replace(config.data, passed=True))
    return config


def _checked_shape(config: RunConfig, model: PreTrainedModel, machine: Machine | None) -> ModelShape | None:
    """Raises `ConfigError` for a model that the machine has no room for. One of the hub has no shape before it is loaded."""
    check_heads(config.engine, model.config.to_dict())
    shape = build.measure_shape(model)
    if machine is not None:
        check_model_fits(config, machine, shape)
    return shape


def _driver_model(
    config: RunConfig, device: ModelDevice, start: Path | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model that the run begins with."""
    own = structs.replace(config.model, dtype=choose_dtype(config, device))
    own = structs.replace(own, device="cpu") if is_model_on_host(config) else own
    model, tokenizer = build.build_model(own, seed=config.seed, lora=config.learner.lora)
    if start is not None:
        load_start(model, start)
    return model, tokenizer
