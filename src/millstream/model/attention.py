"""Attention over ragged rows, for any Hugging Face causal LM that goes through transformers' attention interface.

A forward pass sees all its tokens as one row [1, N], without padding, so that no linear layer works on padding; only the
attention itself unpacks them. What to attend to is decided by the *context* that the caller passes to the model as a keyword:
`Packed` (whole sequences, causal: training and prefill) or the engine's decode context.

Shapes: N tokens in all, R rows (sequences), L tokens in the longest, H heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from millstream.errors import ModelError

# The name under which `attention` is registered: the `attn_implementation` of every model that we load.
NAME = "millstream"


Indices = np.ndarray[Any, np.dtype[np.int64]]


class Rule(NamedTuple):
    """The model's rule for attention scores."""

    scaling: float | None
    window: int | None
    softcap: float | None


class AttentionContext(Protocol):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D]."""
        ...


@torch.compiler.disable  # type: ignore[untyped-decorator]  # what the rows look like is different every time
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
    """Several sequences in one row of N tokens, each causal over itself.

    A sequence is given by the indices of its tokens among the N. Sequences may share a beginning, which is then computed once:
    every layer but the attention sees it once, and only keys, values and scores are repeated.

    On a GPU in 16 bits one kernel attends to them as they are (`_Ragged`). Elsewhere they are unpacked into rectangles
    (`_Rectangles`): the plain twin."""

    def __init__(self, rows: Sequence[Indices], device: torch.device | str = "cpu") -> None:
        self._rows = rows
        self._device = torch.device(device)
        self.longest = max(map(len, rows))
        self.position_ids = on_device(_positions(rows)[None], device)
        self._ragged: _Ragged | None = None
        self._rectangles: _Rectangles | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        if can_be_ragged(query, rule):
            self._ragged = self._ragged or _Ragged(self._rows, self._device)
            return self._ragged.attend(query, key, value, rule)
        self._rectangles = self._rectangles or _Rectangles(self._rows, self._device)
        return self._rectangles.attend(query, key, value, rule)


def on_device(array: np.ndarray[Any, Any], device: torch.device | str) -> Tensor:
    """A copy there. A copy to a GPU is asynchronous: this does not wait for the GPU."""
    tensor = torch.from_numpy(array)
    return (
        tensor.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else tensor.to(device)
    )


def can_be_ragged(query: Tensor, rule: Rule) -> bool:
    return not why_padded(query.device.type, query.dtype, rule.softcap, query.shape[-1])


def why_padded(device: str, dtype: torch.dtype, softcap: float | None, head_dim: int) -> str:
    """Why attention over ragged rows needs padding; empty: it does not."""
    if device != "cuda":
        return "ragged attention needs a GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"ragged attention needs 16 bits, and the model has {str(dtype).removeprefix('torch.')}"
    if softcap is not None:
        return "the model caps its attention scores"
    return f"heads of {head_dim} are above {MAX_HEAD_DIM}" if head_dim > MAX_HEAD_DIM else ""


MAX_HEAD_DIM = 256
# Older versions of torch need no leave for fewer key/value heads.
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def ragged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_key: int,
    rule: Rule,
    kernel: Callable[..., Any] = varlen_attn,
) -> Tensor:
    """Attention of rows [*, H, D] one after the other. Where a row has fewer queries than keys, they are its last ones.

    Heads of any dimension: the kernel wants multiples of 8, and zeros at the end of keys and values change nothing."""
    dim = query.shape[-1]
    if missing := -dim % 8:
        query, key, value = (F.pad(one, (0, missing)) for one in (query, key, value))
    out: Tensor = kernel(
        query,
        key,
        value,
        query_ends,
        key_ends,
        longest_query,
        longest_key,
        scale=dim**-0.5 if rule.scaling is None else rule.scaling,
        window_size=(-1 if rule.window is None else rule.window - 1, 0),
        **_GROUPED,
    )
    return out[..., :dim]


class _Ragged:
    """Flash attention over rows of any length, one after the other.

    A row whose beginning stands elsewhere has queries for its own tokens alone, and keys for all of them: the last query sees
    every key, the one before it all but the last."""

    def __init__(self, rows: Sequence[Indices], device: torch.device, kernel: Callable[..., Any] = varlen_attn) -> None:
        self._kernel = kernel
        queries = _own_parts(rows)
        at_Q, at_K = np.concatenate(queries), np.concatenate(rows)
        self._query_at = _unless_in_order(at_Q, device)
        self._key_at = _unless_in_order(at_K, device)
        self._query_ends = _ends(queries, device)
        self._key_ends = _ends(rows, device)
        self._longest_query = max(map(len, queries))
        self._longest_key = max(map(len, rows))
        place_N = np.empty(len(at_Q), np.int64)
        place_N[at_Q] = np.arange(len(at_Q))
        self._place = _unless_in_order(place_N, device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        out = ragged(
            _gather(query, self._query_at),
            _gather(key, self._key_at),
            _gather(value, self._key_at),
            self._query_ends,
            self._key_ends,
            self._longest_query,
            self._longest_key,
            rule,
            kernel=self._kernel,
        )
        return (out if self._place is None else out[self._place])[None]


def _own_parts(rows: Sequence[Indices]) -> list[Indices]:
    """Of each row, what no row before it has: all of it, or what follows a beginning that they share."""
    seen = np.zeros(max(int(row.max()) for row in rows) + 1, np.bool_)
    own = []
    for row in rows:
        own.append(row[int(np.count_nonzero(seen[row])) :])
        seen[row] = True
    return own


def _unless_in_order(at: Indices, device: torch.device) -> Tensor | None:
    """None for 0, 1, 2, ...: nothing needs to be moved."""
    return None if np.array_equal(at, np.arange(len(at))) else on_device(at, device)


def _ends(rows: Sequence[Indices], device: torch.device) -> Tensor:
    return on_device(np.cumsum([0, *map(len, rows)], dtype=np.int32), device)


def _gather(packed: Tensor, at: Tensor | None) -> Tensor:
    """[1, H, N, D] -> [*, H, D]. By indexing, whose backward pass adds in a fixed order."""
    rows = packed[0].transpose(0, 1)
    return rows if at is None else rows[at]


class _Rectangles:
    """Sequences in classes of similar length (each at most twice as long as the shortest), so that a long one among short ones
    does not make them all cost as much as it does."""

    def __init__(self, rows: Sequence[Indices], device: torch.device) -> None:
        classes: dict[int, list[Indices]] = {}
        for row in rows:
            classes.setdefault((len(row) - 1).bit_length(), []).append(row)
        self._rectangles = [_Rectangle(some, device) for some in classes.values()]
        slot_N = np.zeros(max(int(row.max()) for row in rows) + 1, np.int64)
        num_slots = 0
        for some in classes.values():
            longest = max(map(len, some))
            for row in some:
                slot_N[row] = np.arange(num_slots, num_slots + len(row))
                num_slots += longest
        self._slot_N = torch.from_numpy(slot_N).to(device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        outs = [rows.attend(query, key, value, rule) for rows in self._rectangles]
        return (outs[0] if len(outs) == 1 else torch.cat(outs))[self._slot_N][None]


def rows_of(lengths: Sequence[int]) -> list[Indices]:
    """Sequences one after the other, sharing nothing."""
    ends = np.cumsum(lengths)
    return [np.arange(end - length, end) for length, end in zip(lengths, ends, strict=True)]


def _positions(rows: Sequence[Indices]) -> Indices:
    at_N = np.concatenate(rows)
    positions_N = np.zeros(at_N.max() + 1, np.int64)
    positions_N[at_N] = np.concatenate([np.arange(len(row)) for row in rows])
    return positions_N


class _Rectangle:
    """Rows of similar length, unpacked to [R, L]. Past a row's end stands any token: it comes later, so that none sees it."""

    def __init__(self, rows: Sequence[Indices], device: torch.device | str) -> None:
        self._num_rows = len(rows)
        self._longest = max(map(len, rows))
        at_RL = np.zeros((self._num_rows, self._longest), np.int64)
        for number, row in enumerate(rows):
            at_RL[number, : len(row)] = row
            at_RL[number, len(row) :] = row[-1]
        self._at = torch.from_numpy(at_RL.ravel()).to(device)

    def _unpack(self, packed: Tensor) -> Tensor:
        """[1, H, N, D] -> [R, H, L, D]."""
        _, heads, _, dim = packed.shape
        rows = packed[0].transpose(0, 1)[self._at]
        return rows.view(self._num_rows, self._longest, heads, dim).transpose(1, 2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """The output of every place of the rectangle, [R * L, H, D]."""
        query, key, value = self._unpack(query), self._unpack(key), self._unpack(value)
        mask = None
        if rule.window is not None or rule.softcap is not None:
            at = torch.arange(self._longest, device=query.device)
            mask = within_window(at[:, None], at[None, :], rule.window)
        rows = scores(query, key, value, mask, rule, is_causal=mask is None)
        _, heads, _, dim = rows.shape
        return rows.transpose(1, 2).reshape(self._num_rows * self._longest, heads, dim)


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
