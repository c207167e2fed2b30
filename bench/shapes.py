"""The models that are measured: a Qwen3 of any shape, with random weights, made where it is needed."""

from __future__ import annotations

from typing import Any


def qwen3(*, hidden: int, layers: int, heads: int, dim: int, words: int, context: int) -> Any:
    """Its config. Keys have half the heads; the head shares its weights with the embedding."""
    from transformers import Qwen3Config  # slow to import, and not every process needs it

    return Qwen3Config(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=dim,
        max_position_embeddings=context,
        tie_word_embeddings=True,
    )
