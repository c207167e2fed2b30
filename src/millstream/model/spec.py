"""A model as data, without its weights: what another process needs to build the same one."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save

from millstream.model.adapters import add_adapters
from millstream.model.load import new_model
from millstream.model.lora import LoraConfig


def save_description(model: PreTrainedModel, folder: str | Path, config: PreTrainedConfig | None = None) -> None:
    """Its config (or this one), and its code where that is its own: see `model.trust_remote_code` of a run's config."""
    (config or model.config).save_pretrained(folder)
    if model._auto_class is not None:
        custom_object_save(model, folder)


def has_own_code(folder: str | Path) -> bool:
    """Whether a description in this folder has code, which the process that wrote it has run already."""
    return any(Path(folder).glob("*.py"))


def described(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    config: PreTrainedConfig | None = None,
) -> dict[str, bytes]:
    """Its description, as it is saved, with a tokenizer if there is one."""
    with tempfile.TemporaryDirectory(prefix="millstream-") as folder:
        save_description(model, folder, config)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def build_described(folder: str | Path, *, dtype: str) -> PreTrainedModel:
    """The model of a description, where torch makes tensors now. Its weights are random: others are to be loaded."""
    is_trusted = has_own_code(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=is_trusted)
    return new_model(config, seed=0, dtype=getattr(torch, dtype), trust_remote_code=is_trusted)


def model_from(files: Mapping[str, bytes], *, dtype: str, lora: LoraConfig | None) -> PreTrainedModel:
    """As `build_described`, from the files of a description, with adapters where it has them."""
    with tempfile.TemporaryDirectory(prefix="millstream-") as folder:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        model = build_described(folder, dtype=dtype)
    if lora is not None:
        add_adapters(model, lora, seed=0)
    return model
