"""The config of a small model of the same architecture: few layers, small sizes, a window of 8 tokens. Everything that decides
*how* the model computes is kept: kinds of layers, rope, norms, caps, experts.

Sizes are found by their names, in the config and in the tables inside it. Nothing is assumed of the architecture: the model's
own code may refuse what comes out, and the caller must expect any error from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WINDOW = 8
WORDS = 96
CONTEXT = 256
HEADS = 4
HEAD_DIM = 16
HIDDEN = HEADS * HEAD_DIM
MAX_KINDS = 6  # of layers that differ in any list that has an entry for every layer

SIZES = {
    "num_hidden_layers n_layer n_layers num_layers decoder_layers": 2,  # at least: see `_layers_kept`
    "encoder_layers num_encoder_layers num_decoder_layers num_nextn_predict_layers num_mtp_modules": 2,
    "hidden_size n_embd d_model model_dim embed_dim embedding_size word_embed_proj_dim emb_dim": HIDDEN,
    "intermediate_size n_inner ffn_dim d_ff ffn_hidden_size decoder_ffn_dim encoder_ffn_dim ffn_dim_hidden dff": 96,
    "moe_intermediate_size shared_expert_intermediate_size intermediate_size_mlp shared_intermediate_size": 48,
    "moe_shared_expert_intermediate_size dense_intermediate_size expert_ffn_hidden_size expert_intermediate_size": 48,
    "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads": HEADS,
    "head_dim kv_channels attention_head_size d_head v_head_dim global_head_dim swa_head_dim swa_v_head_dim": HEAD_DIM,
    "qk_rope_head_dim index_head_dim": HEAD_DIM,
    "qk_nope_head_dim rotary_dim": 8,
    "qk_head_dim": HEAD_DIM + 8,
    "q_lora_rank kv_lora_rank o_lora_rank lora_rank": 16,
    "vocab_size vocab_size_per_layer_input": WORDS,
    "hidden_size_per_layer_input": 16,
    "sliding_window sliding_window_size window_size attention_window attention_chunk_size local_attention": WINDOW,
    "local_window_size swa_window_size": WINDOW,
    "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length max_target_positions": CONTEXT,
    "original_max_position_embeddings": CONTEXT // 2,
    "num_experts n_routed_experts num_local_experts num_routed_experts moe_num_experts": 4,
    "num_experts_per_tok num_experts_per_token top_k_experts moe_topk moe_k experts_per_token": 2,
    "n_group topk_group": 1,
    "n_shared_experts num_shared_experts zero_expert_num": 1,
    "first_k_dense_replace num_dense_layers index_n_heads index_topk": 1,
    "mamba_n_heads": 2 * HEADS,  # an expansion by 2
    "linear_num_value_heads linear_num_key_heads ssm_state_size state_size mamba_d_state": 4,
    "linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim": 16,
}
SMALL = {name: size for names, size in SIZES.items() for name in names.split()}
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "swa_num_key_value_heads")
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
TABLES = ("rope_parameters", "rope_scaling", "attn_config", "ffn_config")


def shrunk(config: Any) -> Any:
    """A small config of the same class. Raises whatever the class raises at sizes that it does not take."""
    return type(config).from_dict(shrunk_table(config.to_dict()))


def shrunk_table(table: Mapping[str, Any]) -> dict[str, Any]:
    """The same table with small sizes. Tables inside it that are configs of their own are shrunk as well."""
    kept = _layers_kept(table)
    small: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping) and _is_by_layer(value):
            by_layer = {int(key): shrunk_table(one) if isinstance(one, Mapping) else one for key, one in value.items()}
            small[name] = {index: by_layer[layer] for index, layer in enumerate(kept) if layer in by_layer}
        elif isinstance(value, Mapping) and (name in TABLES or name.endswith("_config") or "hidden_size" in value):
            small[name] = shrunk_table(value)
        elif isinstance(value, Mapping):
            small[name] = {key: shrunk_table(one) if isinstance(one, Mapping) else one for key, one in value.items()}
        elif isinstance(value, list | tuple):
            small[name] = _small_list(name, value, kept, table)
        elif isinstance(value, int) and not isinstance(value, bool):
            small[name] = _small_number(name, value, kept, table)
        else:
            small[name] = value
    return small


def _is_by_layer(table: Mapping[Any, Any]) -> bool:
    return bool(table) and all(str(key).isdecimal() for key in table)


def _small_number(name: str, value: int, kept: Sequence[int], table: Mapping[str, Any]) -> int:
    if name in LAYER_COUNTS:
        return len(kept)
    if name == "num_kv_shared_layers":
        return min(value, len(kept) // 2)
    if name in KEY_HEADS:  # all of them, one, or some
        heads = _first(table, "num_attention_heads", "n_head", "n_heads") or HEADS
        return min(value, HEADS if value == heads else HEADS // 2)
    if name.endswith("_token_id"):
        return min(value, WORDS - 1 - len(name) % 8)
    return min(value, SMALL.get(name, value))


def _small_list(name: str, value: Sequence[Any], kept: Sequence[int], table: Mapping[str, Any]) -> list[Any]:
    if name in ("short_factor", "long_factor"):
        return list(value[: HEAD_DIM // 2])
    if name == "mrope_section":
        return [2, 3, 3]
    if name.endswith("_token_id"):
        return [min(one, WORDS - 1) for one in value]
    if len(value) == _first(table, *LAYER_COUNTS):
        return [
            one if isinstance(one, bool) or not isinstance(one, int) else min(one, SMALL.get(name, one))
            for one in (value[index] for index in kept)
        ]
    return list(value)


def _layers_kept(table: Mapping[str, Any]) -> list[int]:
    """The first layer of every kind, and at least two layers."""
    count = _first(table, *LAYER_COUNTS) or 0
    lists = [value for value in table.values() if isinstance(value, list | tuple) and len(value) == count]
    kinds: dict[str, int] = {}
    for index in range(count):
        kinds.setdefault(str([one[index] for one in lists]), index)
    kept = sorted({*list(kinds.values())[:MAX_KINDS], *range(min(2, count))})
    return kept * 2 if table.get("num_kv_shared_layers") else kept  # the second half has the keys of the first


def _first(table: Mapping[str, Any], *names: str) -> int | None:
    return next((table[name] for name in names if isinstance(table.get(name), int)), None)
