"""From a config to the models that score rows for the learner: reference, critic, proximal policy, and their stages. Imports
torch."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millstream.errors import ConfigError, ModelError
from millstream.learner import CriticConfig, ReferenceConfig, RunCritic
from millstream.learner.critic import TorchCritic
from millstream.learner.messages import FindStore
from millstream.learner.remote_scorer import RemoteCritic, RemoteScorer, publish_setup
from millstream.learner.scorer import TorchScorer
from millstream.model.adapters import copy_of, lora_of, merged
from millstream.model.load import load_model, load_tokenizer
from millstream.model.locate import check_path
from millstream.pipeline.schema import Stage
from millstream.rpc.process import Launcher
from millstream.run.build_stages import build_stages
from millstream.run.check_machine import no_gpu
from millstream.run.config import RunConfig, critic_of, reference_of
from millstream.run.replay import ReplayedCritic
from millstream.weights.transfer.publisher import WeightsPublisher


class Scorers(NamedTuple):
    """The models in addition to the learner's; most runs have none."""

    stages: tuple[Stage, ...] = ()
    reference: TorchScorer | RemoteScorer | None = None
    critic: TorchCritic | ReplayedCritic | None = None
    proximal: TorchScorer | RemoteScorer | None = None

    async def ready(self) -> None:
        """Returns when all are ready. Their processes start in parallel; those in this process are ready from the start."""
        scorers = (self.reference, self.critic, self.proximal)
        await asyncio.gather(*(one.ready() for one in scorers if isinstance(one, RemoteScorer | ReplayedCritic)))

    async def close(self) -> None:
        for one in (self.reference, self.critic, self.proximal):
            if one is not None:
                await one.close()


def check_scorer_models(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check devices and tokenizers of the tables; loads no model."""
    for key, one in (("reference", config.reference), ("critic", config.critic), ("proximal", config.proximal)):
        if one is not None and (one.device or "cpu") != "cpu" and not torch.cuda.is_available():
            raise ConfigError(no_gpu(key, one.device or ""))
    for key, table in (("reference", config.reference), ("critic", config.critic)):
        if table is not None and table.path is not None:
            check_path(table.path, f"{key}.path")
            other = load_tokenizer(table.path, trust_remote_code=config.model.trust_remote_code)
            check_vocabulary(tokenizer, other, f"{key}.path = {table.path!r}")


def check_vocabulary(ours: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, where: str) -> None:
    """Raises `ModelError` unless every token has the same number in both: one model must read what another samples."""
    mine, theirs = ours.get_vocab(), other.get_vocab()
    for token, number in sorted(mine.items(), key=lambda one: one[1]):
        if theirs.get(token) != number:
            found = f"has the number {theirs[token]} there" if token in theirs else "is not there"
            raise ModelError(
                f"{where} has another tokenizer than the model: the token {token!r} is number {number} here and {found}. "
                "Expected a checkpoint with the same vocabulary"
            )
    if len(theirs) > len(mine):
        more = min(theirs.keys() - mine.keys(), key=lambda token: theirs[token])
        raise ModelError(
            f"{where} has another tokenizer than the model: only it has the token {more!r}. Expected a checkpoint with the "
            "same vocabulary"
        )


def build_scorers(config: RunConfig, start: PreTrainedModel, saved: Path | None, *, device: str) -> Scorers:
    """Scorers in this process. `start`: the model that reinforcement learning starts from, which is copied. `saved`: its
    folder, in a resumed run that cannot build it again. `device`: the learner's, for tables that name none."""
    reference, critic = _build_reference(config, start, saved, device), _build_critic(config, start, device)
    return Scorers(build_stages(config, reference, critic), reference, critic, _build_proximal(config, start, device))


def reference_model(
    config: RunConfig, start: PreTrainedModel, saved: Path | None, *, device: str = "cpu"
) -> PreTrainedModel:
    """A separate model on the reference's device, or on `device`, where the table names none."""
    table = reference_of(config) or ReferenceConfig()
    device = table.device or device
    dtype: torch.dtype = start.dtype if table.dtype is None else getattr(torch, table.dtype)
    path = table.path or saved
    if path is not None:
        return load_model(path, device=device, dtype=dtype, trust_remote_code=config.model.trust_remote_code)
    # merged, as it is saved: a resumed run that reads it has the same numbers
    model = copy.deepcopy(start if lora_of(start) is None else merged(start)).to(device)
    for parameter in model.parameters():  # and no buffers, as when it is read: positions are computed in float32
        parameter.data = parameter.data.to(dtype)
    return model


def _build_reference(config: RunConfig, start: PreTrainedModel, saved: Path | None, device: str) -> TorchScorer | None:
    if reference_of(config) is None:
        return None
    return TorchScorer(
        reference_model(config, start, saved, device=device),
        temperature=config.rollout.temperature,
        is_fixed=config.pipeline.is_in_lockstep,
    )


def _build_critic(config: RunConfig, start: PreTrainedModel, device: str) -> TorchCritic | None:
    table = critic_of(config)
    if table is None:
        return None
    device = table.device or device
    model = copy.deepcopy(start) if table.path is None else _critic_model(config, table, start)
    model = model.to(device)
    return TorchCritic(model, table, num_steps=config.pipeline.steps, is_fixed=config.pipeline.is_in_lockstep)


def _build_proximal(config: RunConfig, start: PreTrainedModel, device: str) -> TorchScorer | None:
    """The weights below adapters are shared with the learner, where they are on the same device."""
    if config.proximal is None:
        return None
    device = config.proximal.device or device
    is_there = torch.empty(0, device=device).device == start.device  # cuda is cuda:0, say
    model = copy_of(start) if is_there else copy.deepcopy(start).to(device)
    return TorchScorer(
        model, temperature=config.rollout.temperature, name="proximal", is_fixed=config.pipeline.is_in_lockstep
    )


DurableCritic = Callable[[Callable[[], RunCritic]], ReplayedCritic]
"""Wraps critics, each made by the given function, in one that outlives their processes."""


def build_remote_scorers(
    config: RunConfig,
    start: PreTrainedModel,
    saved: Path | None,
    *,
    launcher: Launcher,
    open_publisher: Callable[[], WeightsPublisher],
    device: str,
    durable: DurableCritic,
    store: FindStore,
) -> Scorers:
    """As `build_scorers`, each in a process, perhaps not ready yet. The first weights of each are published through a publisher
    of its own until it has them. A process that is started again gets the weights of `start`, which must not change."""
    begin = partial(
        publish_setup, open_publisher=open_publisher, device=device, is_fixed=config.pipeline.is_in_lockstep
    )
    temperature, table = config.rollout.temperature, critic_of(config)
    made: dict[str, RemoteScorer] = {}
    critic: ReplayedCritic | None = None
    try:
        if reference_of(config) is not None:
            setup = partial(begin, partial(reference_model, config, start, saved), temperature=temperature)
            made["reference"] = RemoteScorer(setup, launcher, store=store)
        if config.proximal is not None:
            setup = partial(begin, lambda: start, temperature=temperature)
            made["proximal"] = RemoteScorer(setup, launcher, name="proximal", store=store)
        if table is not None:
            setup = partial(
                begin, partial(_critic_model, config, table, start), critic=table, num_steps=config.pipeline.steps
            )
            critic = durable(partial(RemoteCritic, setup, launcher, store=store))
    except BaseException:  # whatever it is: the processes that were started have no owner
        for one in made.values():
            one.end()
        raise
    reference = made.get("reference")
    return Scorers(build_stages(config, reference, critic), reference, critic, made.get("proximal"))


def _critic_model(config: RunConfig, table: CriticConfig, start: PreTrainedModel) -> PreTrainedModel:
    if table.path is None:
        return start
    return load_model(table.path, dtype=start.dtype, trust_remote_code=config.model.trust_remote_code)
