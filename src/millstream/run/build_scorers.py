"""From a config to the models that score rows for the learner: reference, critic, proximal policy, and their stages. Imports
torch."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millstream.errors import ConfigError, ModelError
from millstream.learner import CriticConfig, ProximalConfig, ReferenceConfig, RunCritic
from millstream.learner.check import check_shards
from millstream.learner.config import StageConfig, num_processes
from millstream.learner.critic import TorchCritic
from millstream.learner.messages import FindStore
from millstream.learner.processes import LOOPBACK
from millstream.learner.remote_scorer import (
    OpenPublisher,
    PublishSetup,
    RemoteCritic,
    RemoteScorer,
    SharedSetup,
    publish_setup,
)
from millstream.learner.scorer import TorchScorer
from millstream.model.adapters import copy_of, lora_of, merged
from millstream.model.load import dtype_name, load_model, load_tokenizer
from millstream.model.locate import check_path
from millstream.pipeline.schema import Stage
from millstream.rpc.process import Launcher
from millstream.run.build_stages import build_stages
from millstream.run.check_machine import no_gpu
from millstream.run.config import RunConfig, critic_of, reference_of
from millstream.run.replay import ReplayedCritic


class Scorers(NamedTuple):
    """The models in addition to the learner's; most runs have none."""

    stages: tuple[Stage, ...] = ()
    reference: TorchScorer | RemoteScorer | None = None
    critic: TorchCritic | ReplayedCritic | None = None
    proximal: TorchScorer | RemoteScorer | None = None
    published: ExitStack | None = None  # first weights, kept for processes that are started again

    async def ready(self) -> None:
        """Returns when all are ready. Their processes start in parallel; those in this process are ready from the start."""
        scorers = (self.reference, self.critic, self.proximal)
        await asyncio.gather(*(one.ready() for one in scorers if isinstance(one, RemoteScorer | ReplayedCritic)))

    async def close(self) -> None:
        for one in (self.reference, self.critic, self.proximal):
            if one is not None:
                await one.close()
        if self.published is not None:
            await asyncio.to_thread(self.published.close)


def check_scorer_models(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, start: PreTrainedModel | None = None
) -> None:
    """Check devices and tokenizers of the tables; loads no model. `start`: what scorers without a path begin with, where it is
    loaded already."""
    for key, one in (("reference", config.reference), ("critic", config.critic), ("proximal", config.proximal)):
        if one is not None and (one.device or "cpu") != "cpu" and not torch.cuda.is_available():
            raise ConfigError(no_gpu(key, one.device or ""))
    paths = {"reference": config.reference, "critic": config.critic}
    for key, sharded in ({**paths, "proximal": config.proximal}).items():
        if start is not None and sharded is not None and sharded.ranks > 1 and getattr(sharded, "path", None) is None:
            check_shards(start, key)
    for key, table in paths.items():
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


DurableCritic = Callable[[Callable[[], RunCritic]], ReplayedCritic]
"""Wraps critics, each made by the given function, in one that outlives their processes."""


class StageProcesses(NamedTuple):
    """How processes of scorers are started. First weights are published until the processes have read them, and again for one
    that is started again."""

    launcher: Launcher
    open_publisher: OpenPublisher
    device: str  # of scorers whose tables name none
    durable: DurableCritic
    store: FindStore
    host: str = LOOPBACK  # an address of this machine that all processes reach
    are_all: bool = False  # also a scorer of one rank is a process
    are_here: bool = False
    """On this machine: they see its files, and follow weights of this process, which may train the model itself. So its first
    weights stay published."""

    def has(self, table: StageConfig) -> bool:
        return self.are_all or num_processes(table) > 1


def build_scorers(config: RunConfig, start: PreTrainedModel, saved: Path | None, processes: StageProcesses) -> Scorers:
    """On threads of this process, or in processes, perhaps not ready yet. `start`: the model that reinforcement learning starts
    from, which is copied. `saved`: its folder, in a resumed run that cannot build it again."""
    built: dict[str, TorchScorer | RemoteScorer] = {}
    published = ExitStack()
    critic: TorchCritic | ReplayedCritic | None = None
    try:
        if (table := reference_of(config)) is not None:
            built["reference"] = _build_reference(config, table, start, saved, processes, published)
        if config.proximal is not None:
            built["proximal"] = _build_proximal(config, config.proximal, start, processes, published)
        critic = _build_critic(config, start, processes, published)
    except BaseException:  # whatever it is: the processes that were started have no owner
        for one in built.values():
            if isinstance(one, RemoteScorer):
                one.end()
        published.close()
        raise
    reference = built.get("reference")
    return Scorers(build_stages(config, reference, critic), reference, critic, built.get("proximal"), published)


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


def _build_reference(
    config: RunConfig,
    table: ReferenceConfig,
    start: PreTrainedModel,
    saved: Path | None,
    processes: StageProcesses,
    published: ExitStack,
) -> TorchScorer | RemoteScorer:
    if processes.has(table):
        is_start = not (table.path or saved) and lora_of(start) is None and table.dtype in (None, dtype_name(start))
        model = (lambda: start) if is_start else partial(reference_model, config, start, saved)
        return _remote(config, table, "reference", model, processes, published)
    return TorchScorer(
        reference_model(config, start, saved, device=processes.device),
        temperature=config.rollout.temperature,
        is_fixed=config.pipeline.is_in_lockstep,
    )


def _build_critic(
    config: RunConfig, start: PreTrainedModel, processes: StageProcesses, published: ExitStack
) -> TorchCritic | ReplayedCritic | None:
    table = critic_of(config)
    if table is None:
        return None
    if processes.has(table):
        setup = _setup(
            config,
            table,
            "critic",
            partial(_critic_model, config, table, start),
            processes,
            published,
            critic=table,
            num_steps=config.pipeline.steps,
        )
        return processes.durable(
            partial(
                RemoteCritic,
                setup,
                processes.launcher,
                host=processes.host,
                pass_tokens=table.micro_batch_tokens,
                store=processes.store,
            )
        )
    device = table.device or processes.device
    model = copy.deepcopy(start) if table.path is None else _critic_model(config, table, start)
    model = model.to(device)
    return TorchCritic(model, table, num_steps=config.pipeline.steps, is_fixed=config.pipeline.is_in_lockstep)


def _build_proximal(
    config: RunConfig,
    table: ProximalConfig,
    start: PreTrainedModel,
    processes: StageProcesses,
    published: ExitStack,
) -> TorchScorer | RemoteScorer:
    """The weights below adapters are shared with the learner, where they are on the same device."""
    if processes.has(table):
        return _remote(config, table, "proximal", lambda: start, processes, published)
    device = table.device or processes.device
    is_there = torch.empty(0, device=device).device == start.device  # cuda is cuda:0, say
    model = copy_of(start) if is_there else copy.deepcopy(start).to(device)
    return TorchScorer(
        model, temperature=config.rollout.temperature, name="proximal", is_fixed=config.pipeline.is_in_lockstep
    )


def _remote(
    config: RunConfig,
    table: ReferenceConfig | ProximalConfig,
    name: str,
    model: Callable[[], PreTrainedModel],
    processes: StageProcesses,
    published: ExitStack,
) -> RemoteScorer:
    return RemoteScorer(
        _setup(config, table, name, model, processes, published, temperature=config.rollout.temperature),
        processes.launcher,
        name=name,
        replicas=table.replicas,
        host=processes.host,
        pass_tokens=table.micro_batch_tokens,
        store=processes.store,
        open_outbox=processes.open_publisher if processes.are_here else None,
    )


def _setup(
    config: RunConfig,
    table: StageConfig,
    name: str,
    model: Callable[[], PreTrainedModel],
    processes: StageProcesses,
    published: ExitStack,
    **more: Any,
) -> PublishSetup:
    setup = SharedSetup(
        partial(
            publish_setup,
            model,
            processes.open_publisher,
            device=processes.device,
            name=name,
            ranks=table.ranks,
            are_files_seen=processes.are_here,
            is_fixed=config.pipeline.is_in_lockstep,
            **more,
        )
    )
    if (
        processes.are_here and getattr(table, "path", None) is None
    ):  # the learner may train the model that it begins with
        published.enter_context(setup())
    return setup


def _critic_model(config: RunConfig, table: CriticConfig, start: PreTrainedModel) -> PreTrainedModel:
    if table.path is None:
        return start
    return load_model(table.path, dtype=start.dtype, trust_remote_code=config.model.trust_remote_code)
