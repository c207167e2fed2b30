"""Small real models of several architectures, and requests for them."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from millstream.model.load import new_model, set_up_cpu
from millstream.types import Request, RequestKey, Sampling

VOCABULARY = 97

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}

LAYERS = ["sliding_attention", "full_attention"]

CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=9),
    "gemma": lambda: GemmaConfig(**SHAPE, head_dim=16),
    "gemma3": lambda: Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=6, layer_types=LAYERS),
    # sliding windows on every second layer, capped scores, a head dimension of its own
    "gemma2": lambda: Gemma2Config(**SHAPE, head_dim=32, sliding_window=6),
    # partial rotary embeddings, parallel residuals, biases
    "gpt_neox": lambda: GPTNeoXConfig(**{k: v for k, v in SHAPE.items() if k != "num_key_value_heads"}),
}


@functools.cache
def _made(name: str, seed: int) -> PreTrainedModel:
    set_up_cpu()
    return new_model(CONFIGS[name](), seed=seed)


def make(name: str, seed: int = 0) -> PreTrainedModel:
    """A model of one's own: a copy takes half of the time in which random weights are drawn."""
    return copy.deepcopy(_made(name, seed))


def make_small(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """The same architecture, smaller. For 16 bits: a processor that has none multiplies matrices a hundred times more slowly."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 48}
    config = CONFIGS[name]()
    return new_model(type(config).from_dict({**config.to_dict(), **sizes}), seed=0, dtype=dtype)


def plain(model: PreTrainedModel) -> Any:
    """The same weights in the library's own attention, without any of our code."""
    twin = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), attn_implementation="eager")
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def prompts(count: int, seed: int = 0, longest: int = 20) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(3, VOCABULARY) for _ in range(rng.randint(2, longest))) for _ in range(count)]


def request(number: int, tokens: tuple[int, ...], *, max_tokens: int = 16, temperature: float = 1.0) -> Request:
    return Request(
        key=RequestKey(group_id=number, member=0),
        tokens=tokens,
        sampling=Sampling(max_tokens=max_tokens, temperature=temperature),
        seed=1000 + number,
    )
