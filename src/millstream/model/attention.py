"""Attention over ragged rows, for any Hugging Face causal LM that goes through transformers' attention interface.

A forward pass sees all its tokens as one row [1, N], without padding, so that no linear layer works on padding; only the
attention itself unpacks them. What to attend to is decided by the *context* that the caller passes to the model as a keyword:
`Packed` (whole sequences, causal: training and prefill) or the engine's decode context.

Shapes: N tokens in all, R rows (sequences), L tokens in the longest, H heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from millstream.errors import ModelError

NAME = "millstream"
"""The name under which `attention` is registered: the `attn_implementation` of every model that we load."""


class Rule(NamedTuple):
    """What the model says about its scores."""

    scaling: float | None
    window: int | None
    softcap: float | None


class AttentionContext(Protocol):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D]."""
        ...


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    context: AttentionContext | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    if context is None:
        raise ModelError("the model did not hand our context to its attention: this architecture is not supported")
    if s_aux is not None or dropout:
        raise ModelError("attention sinks and attention dropout are not supported: set attention_dropout = 0.0")
    layer: int = module.layer_idx  # type: ignore[assignment]
    return context.attend(layer, query, key, value, Rule(scaling, sliding_window, softcap)), None


AttentionInterface.register(NAME, attention)


class Packed:
    """Several sequences in one row, each causal over itself.

    Rows are attended to in classes of similar length (each at most twice as long as the shortest), so that a long row among
    short ones does not make them all cost as much as it does."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.lengths = list(lengths)
        self.position_ids = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
        starts = [0, *itertools.accumulate(lengths)]
        classes: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            classes.setdefault((length - 1).bit_length(), []).append(row)
        self._classes = [_Rectangle([(starts[r], lengths[r]) for r in rows], device) for rows in classes.values()]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        if len(self._classes) == 1 and self._classes[0].is_all(query.shape[2]):
            return self._classes[0].attend(query, key, value, rule)[None]
        out = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
        for rows in self._classes:
            some_query, some_key, some_value = (x.index_select(2, rows.at_N) for x in (query, key, value))
            out = out.index_copy(0, rows.at_N, rows.attend(some_query, some_key, some_value, rule))
        return out[None]


class _Rectangle:
    """Rows of similar length, unpacked to [R, L] with zeros where a row has ended."""

    def __init__(self, spans: Sequence[tuple[int, int]], device: torch.device | str) -> None:
        lengths = [length for _, length in spans]
        self._num_rows, self._longest = len(spans), max(lengths)
        self.at_N = torch.cat([torch.arange(begin, begin + length) for begin, length in spans]).to(device)
        rows_N = torch.repeat_interleave(torch.arange(self._num_rows), torch.tensor(lengths))
        columns_N = torch.cat([torch.arange(length) for length in lengths])
        self._slot_N = (rows_N * self._longest + columns_N).to(device)

    def is_all(self, num_tokens: int) -> bool:
        return len(self.at_N) == num_tokens

    def _unpack(self, packed: Tensor) -> Tensor:
        """[1, H, N, D] -> [R, H, L, D]."""
        _, heads, _, dim = packed.shape
        rows = packed.new_zeros(self._num_rows * self._longest, heads, dim)
        rows = rows.index_copy(0, self._slot_N, packed[0].transpose(0, 1))
        return rows.view(self._num_rows, self._longest, heads, dim).transpose(1, 2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """The outputs of these rows' tokens, [N, H, D]."""
        query, key, value = self._unpack(query), self._unpack(key), self._unpack(value)
        mask = None
        if rule.window is not None or rule.softcap is not None:
            at = torch.arange(self._longest, device=query.device)
            mask = within_window(at[:, None], at[None, :], rule.window)
        rows = scores(query, key, value, mask, rule, is_causal=mask is None)
        _, heads, _, dim = rows.shape
        return rows.transpose(1, 2).reshape(self._num_rows * self._longest, heads, dim)[self._slot_N]


def within_window(query_at: Tensor, key_at: Tensor, window: int | None) -> Tensor:
    """Whether a query at one position sees the key at another: not later, and less than a window earlier."""
    seen = key_at <= query_at
    return seen if window is None else seen & (query_at - key_at < window)


def scores(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rule: Rule, *, is_causal: bool = False
) -> Tensor:
    """softmax(query key / scale) value over [R, H, *, D] with grouped key/value heads; the mask is True where seen."""
    is_grouped = query.shape[1] != key.shape[1]
    if rule.softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, scale=rule.scaling, enable_gqa=is_grouped
        )
    if is_grouped:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scale = rule.scaling if rule.scaling is not None else query.shape[-1] ** -0.5
    weights = torch.tanh(query @ key.transpose(-1, -2) * scale / rule.softcap) * rule.softcap
    assert mask is not None, "a capped score needs an explicit mask"
    return weights.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32).to(query.dtype) @ value
