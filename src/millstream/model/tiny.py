"""A language model made on the spot, in Hugging Face format: small enough to learn on a laptop, real enough to be loaded by
the same code as any other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3Config

from millstream.model.load import new_model


class TinyShape(Struct, frozen=True, kw_only=True):
    hidden: int
    layers: int
    heads: int
    context: int


def character_tokenizer(alphabet: str, tokens: Sequence[str] = (), chat_template: str = "") -> PreTrainedTokenizerBase:
    """One token a character, <pad>, <eos>, <unk> before them, and `tokens` after them."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    made.add_tokens(list(tokens))
    made.chat_template = chat_template or None
    return made


def tiny_model(
    shape: TinyShape, tokenizer: PreTrainedTokenizerBase, *, seed: int, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return new_model(config, seed=seed, dtype=dtype)
