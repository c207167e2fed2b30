"""From a config to those who work beside the learner: the reference, the critic, the proximal policy, and their stages. Imports
torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millstream.errors import ConfigError, ModelError
from millstream.learner import Critic, CriticConfig, ReferenceConfig, RunCritic, Scorer
from millstream.learner.critic import TorchCritic
from millstream.learner.remote_scorer import RemoteCritic, RemoteScorer, publish_setup
from millstream.learner.scorer import TorchScorer
from millstream.model.adapters import copy_of, lora_of, merged
from millstream.model.load import load_model, load_tokenizer
from millstream.model.locate import check_path
from millstream.pipeline.stages import REFERENCE, VALUES, Stage
from millstream.rpc.process import Launcher
from millstream.run.config import RunConfig, critic_of, reference_of
from millstream.run.replay_critic import ReplayedCritic
from millstream.weights.transfer.publisher import WeightsPublisher


class Scorers(NamedTuple):
    """Who works beside the learner; nobody, in most runs."""

    stages: tuple[Stage, ...] = ()
    reference: TorchScorer | RemoteScorer | None = None
    critic: TorchCritic | ReplayedCritic | None = None
    proximal: TorchScorer | RemoteScorer | None = None

    async def ready(self) -> None:
        """Returns when all are there. Those in this process are, from the beginning."""
        for one in (self.reference, self.critic, self.proximal):
            if isinstance(one, RemoteScorer | ReplayedCritic):
                await one.ready()

    async def close(self) -> None:
        for one in (self.reference, self.critic, self.proximal):
            if one is not None:
                await one.close()


def check_models(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """What can be wrong with other checkpoints and is found without loading them."""
    for key, one in (("reference", config.reference), ("critic", config.critic), ("proximal", config.proximal)):
        if one is not None and (one.device or "cpu") != "cpu" and not torch.cuda.is_available():
            raise ConfigError(f'{key}.device = "{one.device}", and torch sees no GPU here: set {key}.device = "cpu"')
    for key, table in (("reference", config.reference), ("critic", config.critic)):
        if table is not None and table.path is not None:
            check_path(table.path, f"{key}.path")
            check_vocabulary(tokenizer, load_tokenizer(table.path), f"{key}.path = {table.path!r}")


def check_vocabulary(ours: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, where: str) -> None:
    """Raises `ModelError` unless every token has the same number in both: what one samples the other must be able to read."""
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
            f"{where} has another tokenizer than the model: the token {more!r} is only there. Expected a checkpoint with the "
            "same vocabulary"
        )


def build_scorers(config: RunConfig, start: PreTrainedModel, kept: Path | None) -> Scorers:
    """`start`: the model that reinforcement learning starts from, which is copied. `kept`: where it was saved, in a run that
    goes on and whose start is not to be had otherwise."""
    reference, critic = _build_reference(config, start, kept), _build_critic(config, start)
    return Scorers(build_stages(config, reference, critic), reference, critic, _build_proximal(config, start))


def reference_model(config: RunConfig, start: PreTrainedModel, kept: Path | None) -> PreTrainedModel:
    """A model of its own, on its device."""
    table = reference_of(config) or ReferenceConfig()
    device = table.device or str(start.device)
    dtype: torch.dtype = start.dtype if table.dtype is None else getattr(torch, table.dtype)
    path = table.path or kept
    if path is not None:
        return load_model(path, device=device, dtype=dtype)
    # merged, as it is saved: a life of the run that reads it has the same numbers
    model = copy.deepcopy(start if lora_of(start) is None else merged(start)).to(device)
    for parameter in model.parameters():  # and no buffers, as when it is read: positions are computed in float32
        parameter.data = parameter.data.to(dtype)
    return model


def _build_reference(config: RunConfig, start: PreTrainedModel, kept: Path | None) -> TorchScorer | None:
    if reference_of(config) is None:
        return None
    return TorchScorer(reference_model(config, start, kept), temperature=config.rollout.temperature)


def _build_critic(config: RunConfig, start: PreTrainedModel) -> TorchCritic | None:
    table = critic_of(config)
    if table is None:
        return None
    device = table.device or str(start.device)
    model = (
        copy.deepcopy(start).to(device)
        if table.path is None
        else load_model(table.path, device=device, dtype=start.dtype)
    )
    return TorchCritic(model, table, num_steps=config.pipeline.steps)


def _build_proximal(config: RunConfig, start: PreTrainedModel) -> TorchScorer | None:
    """What adapters stand on is shared with the learner, where it is on the same device."""
    if config.proximal is None:
        return None
    device = config.proximal.device or str(start.device)
    is_there = torch.empty(0, device=device).device == start.device  # cuda is cuda:0, say
    model = copy_of(start) if is_there else copy.deepcopy(start).to(device)
    return TorchScorer(model, temperature=config.rollout.temperature, name="proximal")


Lasting = Callable[[Callable[[], RunCritic]], ReplayedCritic]


class Place(NamedTuple):
    """Where those who work beside the learner have processes of their own."""

    launcher: Launcher
    open_publisher: Callable[[], WeightsPublisher]
    """What each begins with is staged in one of its own, until it has it."""
    device: str
    lasting: Lasting
    """Makes of critics that may die alone one that outlives them."""


def build_remote_scorers(config: RunConfig, start: PreTrainedModel, kept: Path | None, place: Place) -> Scorers:
    """As `build_scorers`; they may not be ready yet. A process that is started again gets the current weights of `start`, which
    must not change meanwhile."""
    begin = partial(publish_setup, open_publisher=place.open_publisher, device=place.device)
    temperature, table = config.rollout.temperature, critic_of(config)
    made: dict[str, RemoteScorer] = {}
    critic: ReplayedCritic | None = None
    try:
        if reference_of(config) is not None:
            setup = partial(begin, partial(reference_model, config, start, kept), temperature=temperature)
            made["reference"] = RemoteScorer(setup, place.launcher)
        if config.proximal is not None:
            setup = partial(begin, lambda: start, temperature=temperature)
            made["proximal"] = RemoteScorer(setup, place.launcher, name="proximal")
        if table is not None:
            setup = partial(begin, partial(_critic_model, table, start), critic=table, num_steps=config.pipeline.steps)
            critic = place.lasting(partial(RemoteCritic, setup, place.launcher))
    except BaseException:  # whatever it is, those that were started have no owner
        for one in made.values():
            one.end()
        raise
    reference = made.get("reference")
    return Scorers(build_stages(config, reference, critic), reference, critic, made.get("proximal"))


def _critic_model(table: CriticConfig, start: PreTrainedModel) -> PreTrainedModel:
    return start if table.path is None else load_model(table.path, dtype=start.dtype)


def build_stages(config: RunConfig, reference: Scorer | None, critic: Critic | None) -> tuple[Stage, ...]:
    stages: list[Stage] = []
    reference_table, critic_table = reference_of(config), critic_of(config)
    if reference is not None and reference_table is not None:
        is_early = config.algorithm.kl == "reward" or config.algorithm.advantage == "distillation"
        stages.append(Stage(REFERENCE, reference, reference_table.micro_batch_tokens, is_early))
    if critic is not None and critic_table is not None:
        stages.append(Stage(VALUES, critic, critic_table.micro_batch_tokens, is_early=True))
    return tuple(stages)
