"""Low-rank adapters on a model's linear layers: added in place, trained and sent alone, merged when the model is saved.

The model is unchanged for the code that computes with it. The weights that it came with are frozen, so that copies of it in
one process may share them (`copy_of`); what is trained, published and kept in checkpoints is `trained_weights`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec import structs
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from millstream.errors import ModelError
from millstream.model.load import model_weights
from millstream.model.lora import ADAPTER_WEIGHTS, LoraConfig, check_lora, of_adapter
from millstream.model.policy import layers_of
from millstream.types import Weights

NAME = "default"
BASE = ".base_layer."  # in the names of weights that have an adapter
PREFIX = "base_model.model."  # in front of every name in a file of peft's


def add_adapters(model: PreTrainedModel, config: LoraConfig, *, seed: int) -> None:
    """In place. B begins at 0: the model's outputs stay as they are. The same seed gives the same adapters on any device. With
    `config.path` they begin as the adapter there."""
    check_lora(config)
    import peft

    start = None if config.path is None else _read_adapters(Path(config.path))
    if start is not None:
        config = structs.replace(of_adapter(config), targets=_targets_of(start, config))
    targets = _targets(model, config)
    lora = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        task_type=peft.TaskType.CAUSAL_LM,
        base_model_name_or_path=model.name_or_path or None,
    )
    with torch.random.fork_rng(devices=[]):
        peft.inject_adapter_in_model(lora, model, adapter_name=NAME)
    generator = torch.Generator().manual_seed(seed)
    for layer in adapted_layers(model).values():
        for part in (layer.lora_A[NAME], layer.lora_B[NAME]):  # on the meta device peft leaves them in float32
            part.to(layer.get_base_layer().weight.dtype)
        down = layer.lora_A[NAME].weight
        random = nn.init.kaiming_uniform_(torch.empty(down.shape), a=math.sqrt(5), generator=generator)
        down.data.copy_(random)
    if start is not None:
        _load_adapters(model, start, config.path or "")
    model.eval()


def _read_adapters(folder: Path) -> dict[str, Tensor]:
    """By the names that they have in a model. Raises `ModelError`."""
    try:
        found: dict[str, Tensor] = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder / ADAPTER_WEIGHTS} cannot be read: {error}") from error
    return {_own_name(name): value for name, value in found.items()}


def _own_name(name: str) -> str:
    """The name in a model of a tensor in a file of peft's."""
    module, _, rest = name.removeprefix(PREFIX).rpartition(".lora_")
    letter, _, end = rest.partition(".")
    return f"{module}.lora_{letter}.{NAME}.{end}" if module else name


def _targets_of(start: dict[str, Tensor], config: LoraConfig) -> tuple[str, ...]:
    """The layers that an adapter is on. peft's config may have a pattern in their place."""
    found = tuple(sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in start if ".lora_" in name}))
    if config.targets and tuple(sorted(config.targets)) != found:
        raise ModelError(
            f"learner.lora.targets = {list(config.targets)}, and the adapter in {config.path!r} is on {', '.join(found)}: "
            "leave targets out"
        )
    return found


@torch.no_grad()
def _load_adapters(model: PreTrainedModel, start: dict[str, Tensor], path: str) -> None:
    own = trained_weights(model)
    if different := sorted(own.keys() ^ start.keys()):
        raise ModelError(f"the adapter in {path!r} is of another model: it differs in {', '.join(different[:4])}")
    for name, value in start.items():
        if own[name].shape != value.shape:
            sizes = f"{tuple(value.shape)} there and {tuple(own[name].shape)} here"
            raise ModelError(f"the adapter in {path!r} is of another model: {name} has the shape {sizes}")
        own[name].copy_(value)


def _targets(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    linear = {
        name.rpartition(".")[2]
        for layer in layers_of(model)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    }
    if not linear:
        raise ModelError(f"{type(model).__name__} has no linear layers in its decoder: leave [learner.lora] out")
    if strange := sorted(set(config.targets) - linear):
        raise ModelError(
            f"learner.lora.targets: {type(model).__name__} has no linear layer named {', '.join(strange)} in its decoder; "
            f"there are {', '.join(sorted(linear))}"
        )
    return sorted(config.targets or linear)


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers with an adapter, by name. Empty if the whole model is trained."""
    if not hasattr(model, "peft_config"):
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


class LowRank(NamedTuple):
    """The adapter of a linear layer: its output has scaling * up down x added to it."""

    down: Tensor  # [rank, inputs]
    up: Tensor  # [outputs, rank]
    scaling: float


def linear_parts(module: Any) -> tuple[nn.Linear, LowRank | None] | None:
    """A linear layer, and its adapter where it has one. None: it is another kind of layer, or its adapter is."""
    if type(module) is nn.Linear:
        return module, None
    base = getattr(module, "base_layer", None)
    if type(base) is not nn.Linear or getattr(module, "active_adapters", None) != [NAME]:
        return None
    down, up = module.lora_A[NAME], module.lora_B[NAME]
    is_usual = (
        not (module.merged or module.disable_adapters or getattr(module, "lora_variant", None)) and up.bias is None
    )
    if not is_usual or type(module.lora_dropout[NAME]) is not nn.Identity or down.weight.dtype != base.weight.dtype:
        return None
    return base, LowRank(down.weight, up.weight, module.scaling[NAME])


def lora_of(model: PreTrainedModel) -> LoraConfig | None:
    """What `add_adapters` made of it; None if it has none."""
    if not hasattr(model, "peft_config"):
        return None
    found = model.peft_config[NAME]
    return LoraConfig(rank=found.r, alpha=found.lora_alpha, targets=tuple(sorted(found.target_modules)))


@contextmanager
def random_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Within the block the adapters change every product by about a tenth, as trained ones might. Afterwards they are what they
    were."""
    generator = torch.Generator().manual_seed(0)
    kept = []
    for layer in adapted_layers(model).values():
        base, down, up = (one.weight.data for one in (layer.get_base_layer(), layer.lora_A[NAME], layer.lora_B[NAME]))
        kept.append((up, up.clone()))
        size = 0.1 * float(base.std() / down.std()) / (layer.scaling[NAME] * len(down) ** 0.5)
        up.copy_(size * torch.randn(up.shape, generator=generator))
    try:
        yield
    finally:
        for up, value in kept:
            up.copy_(value)


def trained_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """What training may change, which is what engines load: the adapters where there are some, else the whole model."""
    if lora_of(model) is None:
        return model_weights(model)
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def copy_of(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with trained weights of its own. What adapters stand on is never written to, and is shared."""
    shared = set[int]() if lora_of(model) is None else {id(p) for p in model.parameters() if not p.requires_grad}
    return copy.deepcopy(model, {id(p): p for p in model.parameters() if id(p) in shared})


@torch.no_grad()
def merged(model: PreTrainedModel) -> PreTrainedModel:
    """The same function as an ordinary model. Adapted layers get weights of their own, on the host; all others are shared."""
    ordinary = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    for name, layer in adapted_layers(ordinary).items():
        base = layer.get_base_layer()
        low = LowRank(layer.lora_A[NAME].weight, layer.lora_B[NAME].weight, layer.scaling[NAME])
        plain = nn.Linear(base.in_features, base.out_features, bias=False, device="meta")
        plain.weight = nn.Parameter(merged_weight(base.weight, low, base.weight.dtype).cpu())
        plain.bias = base.bias
        ordinary.set_submodule(name, plain)
    del ordinary.peft_config
    return ordinary


@torch.no_grad()
def merged_weight(weight: Tensor, low: LowRank, dtype: torch.dtype) -> Tensor:
    """Computed in float32 and rounded once."""
    product = low.up.float() @ low.down.float()
    return product.mul_(low.scaling).add_(weight).to(dtype)


def merged_weights(
    whole: Weights, adapters: Weights, scaling: float, *, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """What `merged` computes, for weights without a model, in the names of a checkpoint. `whole`: what `model_weights` gives
    of the model; `adapters` replace those in it. Merged weights have this dtype and are made on this device, one at a time;
    all others come as they are."""
    for name, weight in whole.items():
        module, is_base, part = name.partition(BASE)
        if is_base and part == "weight":
            down, up = (adapters[f"{module}.lora_{letter}.{NAME}.weight"].to(device) for letter in "AB")
            yield f"{module}.weight", merged_weight(weight.to(device), LowRank(down, up, scaling), dtype)
        elif not is_adapter(name):
            yield name.replace(BASE, "."), weight


def is_adapter(name: str) -> bool:
    """Of a tensor in a model with adapters: whether it is a part of one."""
    return ".lora_" in name


def save_adapters(model: PreTrainedModel, folder: Path) -> None:
    """In peft's format: `PeftModel.from_pretrained(base, folder)` puts them onto the model that they were trained on."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {name.replace(f".{NAME}.", "."): value for name, value in trained_weights(model).items()}
    tensors = {PREFIX + name: value.detach().to("cpu").contiguous() for name, value in found.items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (folder / ADAPTER_WEIGHTS).chmod(0o644)
    model.peft_config[NAME].save_pretrained(folder)
