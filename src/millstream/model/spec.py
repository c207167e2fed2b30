"""A model as data, without its weights: what another process needs to build the same one."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedModel

from millstream.model.adapters import add_adapters
from millstream.model.load import new_model
from millstream.model.lora import LoraConfig


def described(model: PreTrainedModel) -> dict[str, bytes]:
    """Its config, as it is saved."""
    with tempfile.TemporaryDirectory(prefix="millstream-") as folder:
        model.config.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def model_from(files: Mapping[str, bytes], *, dtype: str, lora: LoraConfig | None) -> PreTrainedModel:
    """Where torch makes tensors now, with adapters where it has them. Its weights are random: others are to be loaded."""
    with tempfile.TemporaryDirectory(prefix="millstream-") as folder:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        model = new_model(AutoConfig.from_pretrained(folder), seed=0, dtype=getattr(torch, dtype))
    if lora is not None:
        add_adapters(model, lora, seed=0)
    return model
