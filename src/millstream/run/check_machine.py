"""Checks of a config against the model's context and against this machine: room for prompts, devices, memory and disk. Light:
imports no torch.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from millstream.decoding import decode_json
from millstream.engine import EngineConfig
from millstream.env.data import DataSet
from millstream.env.registry import single_turn_tasks
from millstream.env.resolve import EnvironmentKind
from millstream.errors import ConfigError, DataError
from millstream.model.locate import rope_limit_of
from millstream.paths import writable_parent
from millstream.run.config import RunConfig
from millstream.run.device import find_device, find_shape, has_gpu_device, read_model_config
from millstream.run.places import Machine, place
from millstream.run.sizes import BYTES, choose_dtype
from millstream.types import Task

MAX_PROMPTS_CHECKED = 10_000
SPECIAL_TOKENS = 16  # that a tokenizer may add to a prompt, at most
NO_TEMPLATE = (
    "a prompt is a list of messages, and the model's tokenizer has no chat template: use string prompts, or a model that has "
    "one"
)
MIN_DISK = 16e6  # bytes, for events and metrics
MAX_CHARACTERS_SHOWN = 5
OPTIMIZER_BYTES = 12  # of a trained number in a checkpoint: master and two moments


# ---- the context -----------------------------------------------------------------------------------------------------


class PlayedTasks(NamedTuple):
    """Tasks that the model answers, in training or in an evaluation: what must fit into its context."""

    kinds: Sequence[EnvironmentKind]
    data: DataSet
    max_tokens: int  # of an answer
    evaluation: str = ""  # its name; empty: training
    key: str = "rollout.max_tokens"  # which says so

    def shown_tasks(self) -> list[Task]:
        """Those whose length is known before they are played."""
        return list(single_turn_tasks(self.kinds, self.data.tasks[:MAX_PROMPTS_CHECKED]))

    def check_length(self, length: int, limit: int, place: str) -> None:
        """Raises `DataError` for a prompt that leaves no room for an answer in the model's context."""
        if length + self.max_tokens > limit:
            raise DataError(
                f"{place}: the prompt has {length} tokens, which with {self.key} = {self.max_tokens} exceeds the model's "
                f"context of {limit}: set {self.key} lower, or drop the task"
            )


def check_answers(config: RunConfig, most: int, key: str = "rollout.max_tokens") -> None:
    """Raises `ConfigError` for answers that leave no room for a prompt."""
    limit = find_context(config)
    if limit is not None and most >= limit:
        raise ConfigError(
            f"{key} = {most} exceeds the model's context of {limit}, or leaves no room in it for a prompt: set {key} lower"
        )


def checked_room(config: RunConfig, played: PlayedTasks) -> Iterator[str]:
    """Raises `DataError` for a prompt that surely does not fit. Warns of characters that a [model.tiny] does not know."""
    if config.model.tiny is None or config.model.tiny.chat_template:
        return
    if tooled := [kind.name for kind in played.kinds if kind.config.tools]:
        why = f"the environment {tooled[0]} has tools, and [model.tiny] has no chat template"
        raise ConfigError(f"{why}: set model.tiny.chat_template, or model.path")
    tasks, alphabet = played.shown_tasks(), set(config.model.tiny.alphabet)
    for task in tasks:  # a token for each character
        place = played.data.place_of(task)
        if not isinstance(task.prompt, str):
            raise DataError(f"{place}: {NO_TEMPLATE}")
        played.check_length(len(task.prompt), config.model.tiny.context, place)
    characters = Counter("".join(str(task.prompt) for task in tasks))
    unknown = Counter({one: count for one, count in characters.items() if one not in alphabet})
    if unknown:
        some = ", ".join(repr(one) for one, _ in unknown.most_common(MAX_CHARACTERS_SHOWN))
        yield (
            f"warning: model.tiny.alphabet does not have {unknown.total() / characters.total():.0%} of the characters of the "
            f"prompts ({some}), and the model sees <unk> instead: add them to model.tiny.alphabet, or set model.path"
        )


def needs_tokenizer(config: RunConfig, played: PlayedTasks) -> bool:
    """Whether only the model's tokenizer can tell if all prompts fit (`check_prompts`): for chats, for prompts that may be too
    long (a token has at least one byte), and where no end token is named."""
    limit, most = find_context(config), played.max_tokens
    if config.model.path is None or not Path(config.model.path).is_dir():
        return False
    if any(kind.config.tools for kind in played.kinds):
        return True
    for task in played.shown_tasks():
        prompt = task.prompt
        if not isinstance(prompt, str) or (limit and len(prompt.encode()) + SPECIAL_TOKENS + most > limit):
            return True
    return _has_no_end_token(config)


def find_context(config: RunConfig) -> int | None:
    """The most tokens that the model's positions were made for, as its `config.json` says; None if it does not, or is not
    here."""
    if config.model.tiny is not None:
        return config.model.tiny.context
    found = read_model_config(config)
    if found is None:
        return None
    text = found.get("text_config") or found
    limits = (text.get("max_position_embeddings"), rope_limit_of(text))
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def _has_no_end_token(config: RunConfig) -> bool:
    """Whether the tokenizer's own config names no end token. Its class may still have one."""
    path = Path(config.model.path or "") / "tokenizer_config.json"
    if config.model.path is None or not path.is_file():
        return False
    try:
        found = decode_json(path.read_bytes(), Any)
    except (OSError, msgspec.DecodeError):
        return True
    return not isinstance(found, dict) or not found.get("eos_token")


# ---- devices ---------------------------------------------------------------------------------------------------------


def checked_machine(machine: Machine | None, config: RunConfig) -> Iterator[str]:
    """Devices that the config asks for, and the temporary folder, where the control socket is."""
    if config.runtime == "local":
        if machine is not None:
            place(config, machine)
        check_engine_device(config.engine, is_gpu=find_device(config, machine).is_gpu)
        names: list[tuple[str, str]] = [("model", config.model.device)]
        tables = (("reference", config.reference), ("critic", config.critic), ("proximal", config.proximal))
        names += [(key, table.device or "cpu") for key, table in tables if table is not None]
        for key, name in names:
            is_there = bool(machine.gpus) if machine is not None and machine.is_described else has_gpu_device()
            if name.startswith("cuda") and not is_there:
                raise ConfigError(no_gpu(key, name))
    writable_parent(Path(tempfile.gettempdir()), "TMPDIR")
    yield from ()


def no_gpu(key: str, device: str) -> str:
    return f'{key}.device = "{device}", and torch sees no GPU here: set {key}.device = "cpu"'


def check_engine_device(engine: EngineConfig, *, is_gpu: bool) -> None:
    """Raises `ConfigError` for keys of our own engine that need another device than the model has."""
    if engine.kind != "torch":
        return
    if not is_gpu and engine.cache is None and engine.pool_gb is not None:
        raise ConfigError(
            f'engine.cache_gb = {engine.pool_gb:g}, and on a CPU every request has a slot: set engine.cache = "pages", or '
            "leave cache_gb out"
        )
    if not is_gpu and engine.cache is None and isinstance(engine.speculation, int):
        raise ConfigError(
            f"engine.speculation = {engine.speculation}, and on a CPU every request has a slot: set engine.cache = "
            '"pages", or leave speculation out'
        )


# ---- the disk --------------------------------------------------------------------------------------------------------


def checked_disk(config: RunConfig, place: Path) -> Iterator[str]:
    """Room for the trained model and the checkpoints where the run folder will be, and a folder for the store's rows on disk.
    Raises `ConfigError` where not even the model fits."""
    spill = config.store.spill_folder
    if spill is not None and not (Path(spill).is_dir() and os.access(spill, os.W_OK)):
        raise ConfigError(f'store.spill_folder = "{spill}" is not a folder that can be written: mkdir "{spill}"')
    shape, device = find_shape(config), find_device(config)
    free = shutil.disk_usage(place).free
    model = 0 if shape is None else shape.parameters * BYTES[choose_dtype(config, device)]
    trained = 0 if shape is None or config.learner.lora is not None else shape.trained
    needed = MIN_DISK + model + (config.checkpoint.keep + 1) * (model + OPTIMIZER_BYTES * trained)
    if free < MIN_DISK + model:
        raise ConfigError(
            f"{place} has {free / 1e9:.2f} GB free, and the trained model alone needs {(MIN_DISK + model) / 1e9:.2f} GB: free "
            "some, or set run_dir to a folder on another disk"
        )
    if free < needed:
        yield (
            f"warning: {place} has {free / 1e9:.1f} GB free; the model and {config.checkpoint.keep + 1} checkpoints need about "
            f"{needed / 1e9:.1f} GB: free some, or set checkpoint.keep lower"
        )
    else:
        room = "" if shape is None else f", and has room for about {needed / 1e9:.1f} GB of model and checkpoints"
        yield f"checked: {place} can be written to{room}"
