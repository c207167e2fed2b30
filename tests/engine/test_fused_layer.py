"""Fused decoder layers: which models have them, and that they read the weights of their model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from millstream.engine.native import fused
from millstream.engine.native.batching import Batcher
from millstream.engine.native.fused_layer import LAYERS, FusedLayer, fuse_layers
from millstream.engine.native.paged import PagedRunner
from millstream.model.adapters import add_adapters, copy_of
from millstream.model.lora import LoraConfig
from support.decoding import alone, teacher_forced
from support.tiny import CONFIGS, make, prompts, request
from support.tiny import plain as plain_model

NUM_LAYERS = 2


def layers_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ in LAYERS]


def fused_layers_of(model: Any) -> list[Any]:
    forwards = [layer.__dict__.get("forward") for layer in layers_of(model)]
    return [one for one in forwards if isinstance(getattr(one, "forward", None), FusedLayer)]


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_are_fused_where_they_are_two_norms_an_attention_and_an_mlp(name: str) -> None:
    model = make(name)
    fused.fuse(model)
    has_them = name in ("llama", "qwen2", "qwen3", "mistral", "gemma")
    assert fuse_layers(model) == len(fused_layers_of(model)) == (NUM_LAYERS if has_them else 0)
    fused.unfuse(model)
    assert not [module for module in model.modules() if "forward" in module.__dict__]


def test_a_layer_one_of_whose_modules_is_not_fused_is_not_fused() -> None:
    model = make("llama")
    model.model.layers[1].mlp.act_fn = torch.nn.ReLU()
    fused.fuse(model)
    assert fuse_layers(model) == NUM_LAYERS - 1
    assert "forward" not in model.model.layers[1].__dict__


def test_layers_with_adapters_are_not_fused() -> None:
    model = make("llama")
    add_adapters(model, LoraConfig(rank=4), seed=0)
    fused.fuse(model)
    assert fuse_layers(model) == 0


def batcher_of(model: Any) -> Batcher:
    return Batcher(model, num_slots=4, runner=PagedRunner(model.eval(), 4, page=4, cache_gb=0.01))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma"])
def test_every_weight_of_a_new_version_reaches_the_fused_layers(name: str) -> None:
    model, other = make(name), make(name, seed=1)
    with torch.no_grad():  # norms and biases are ones and zeros in every new model
        for number, value in enumerate(other.parameters()):
            value.add_(0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(number)))
    batcher = batcher_of(model)
    assert len(fused_layers_of(model)) == NUM_LAYERS
    batcher.load(1, {key: value.detach().clone() for key, value in other.named_parameters()})
    for number, prompt in enumerate(prompts(3)):
        answer = alone(batcher, request(number, prompt))
        expected = teacher_forced(plain_model(other), prompt, answer.tokens)
        assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=1e-4)


def test_a_copy_of_a_model_with_fused_layers_has_the_layers_of_the_library() -> None:
    model = make("qwen3")
    batcher_of(model)
    copied = copy_of(model)
    assert len(fused_layers_of(model)) == NUM_LAYERS and not fused_layers_of(copied)
    tokens = torch.tensor([prompts(1)[0]])
    copied.set_attn_implementation("eager")
    with torch.no_grad():
        assert torch.allclose(copied(tokens).logits, plain_model(make("qwen3"))(tokens).logits, atol=1e-5)
