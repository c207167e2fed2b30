"""The operations of a forward pass over pages, in plain torch: for a CPU, and as the twins of the kernels in tests.

`Operations` is what the paged runner needs; `PLAIN` is this file's, `engine.native.kernels.KERNELS` is a GPU's.

Keys and values are kept in pages [P, K, S, D]. `table` [slots, pages of a slot] has the pages of each slot; a token is found by
its slot and its position.

Shapes: N tokens, H heads, K key/value heads, D head dimension, P pages, S tokens in a page, R rows, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from millstream.model.attention import Rule, scores, within_window


class Heads(NamedTuple):
    """One attention layer whose queries, keys and values are one product."""

    num: int
    num_keys: int
    dim: int
    query_norm: Tensor | None  # the weight of a norm over each head; the keys have one too, or neither has
    key_norm: Tensor | None
    epsilon: float
    is_gemma: bool  # whether norms multiply by 1 + weight, before they round


class Norm(NamedTuple):
    """An RMS norm over the hidden dimension."""

    weight: Tensor
    epsilon: float
    is_gemma: bool  # as of `Heads`


class Normed(NamedTuple):
    """Rows after an RMS norm. Kernels may leave its scale to the next product."""

    values: Tensor  # [N, E]
    squares: Tensor | None  # [N, tiles of columns]: sums of squares, whose scale is still to be multiplied in
    epsilon: float


class Projection(NamedTuple):
    """The weights of one linear module, or of several that are joined."""

    weight: Tensor  # [columns, depth]
    bias: Tensor | None


class Pages(NamedTuple):
    """Where the keys and values of some tokens are."""

    keys: Tensor  # [P, K, S, D]
    values: Tensor  # [P, K, S, D]
    table: Tensor  # [slots, pages of a slot], int32
    slots_N: Tensor
    positions_N: Tensor


class Operations(Protocol):
    def write(self, key_NKD: Tensor, value_NKD: Tensor, pages: Pages) -> None: ...

    def rotate_and_write(self, qkv_NE: Tensor, cos_ND: Tensor, sin_ND: Tensor, heads: Heads, pages: Pages) -> Tensor:
        """Norm and rotate queries and keys, write keys and values to their pages; the queries [N, H, D]."""
        ...

    def decode_attention(self, query_NHD: Tensor, pages: Pages, rule: Rule) -> Tensor:
        """Each query is the newest token of its slot and attends to all tokens of the slot up to its own position."""
        ...

    def attend_new(
        self, qkv_NE: Tensor, cos_ND: Tensor, sin_ND: Tensor, heads: Heads, pages: Pages, rule: Rule
    ) -> Tensor:
        """`rotate_and_write`, then `decode_attention`: one new token for each slot."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, is_gemma: bool) -> Tensor: ...

    def normed(self, x_NE: Tensor, norm: Norm) -> Normed: ...

    def product(self, normed: Normed, projection: Projection) -> Tensor: ...

    def gated_product(self, normed: Normed, projection: Projection, activation: str) -> Tensor:
        """The activation of the first half of the columns, times the second half."""
        ...

    def add_product(self, sum_NE: Tensor, x_NF: Tensor, projection: Projection, norm: Norm | None) -> Normed | None:
        """Add a product in place. Returns the sum after the next norm, if there is one."""
        ...

    def sample(self, logits_RV: Tensor, uniforms_R: Tensor, temperatures_R: Tensor) -> tuple[Tensor, Tensor]:
        """As `engine.native.sampling.sample`, with tensors: tokens and log-probabilities. Temperature 0 takes the likeliest."""
        ...


class PlainOperations:
    """See `Operations`."""

    def write(self, key_NKD: Tensor, value_NKD: Tensor, pages: Pages) -> None:
        keys, values, table, slots_N, positions_N = pages
        size = keys.shape[2]
        page_N = table[slots_N.long(), positions_N.long() // size].long()
        offset_N = positions_N.long() % size
        keys[page_N, :, offset_N] = key_NKD
        values[page_N, :, offset_N] = value_NKD

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, is_gemma: bool) -> Tensor:
        normed = F.rms_norm(x.float(), x.shape[-1:], None, epsilon)
        if is_gemma:
            return (normed * (1.0 + weight.float())).to(x.dtype)
        return weight * normed.to(x.dtype)

    def rotated(self, qkv_NE: Tensor, cos_ND: Tensor, sin_ND: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys after their norms and the rotation, and values: each [N, heads, D]."""
        both, value = qkv_NE.view(len(qkv_NE), -1, heads.dim).tensor_split([heads.num + heads.num_keys], dim=1)
        if heads.query_norm is not None and heads.key_norm is not None:
            weights = heads.query_norm.expand(heads.num, -1), heads.key_norm.expand(heads.num_keys, -1)
            both = self.rms_norm(both, torch.cat(weights), heads.epsilon, heads.is_gemma)
        query, key = _rotate(both, cos_ND, sin_ND).tensor_split([heads.num], dim=1)
        return query, key, value

    def rotate_and_write(self, qkv_NE: Tensor, cos_ND: Tensor, sin_ND: Tensor, heads: Heads, pages: Pages) -> Tensor:
        query, key, value = self.rotated(qkv_NE, cos_ND, sin_ND, heads)
        self.write(key, value, pages)
        return query

    def decode_attention(self, query_NHD: Tensor, pages: Pages, rule: Rule) -> Tensor:
        keys, values, table, slots_N, positions_N = pages
        size, longest = keys.shape[2], int(positions_N.max()) + 1
        num_pages = -(-longest // size)
        page_NP = table[slots_N.long(), :num_pages].long()
        key = keys[page_NP].transpose(1, 2).flatten(2, 3)[:, :, :longest]
        value = values[page_NP].transpose(1, 2).flatten(2, 3)[:, :, :longest]
        at = torch.arange(longest, device=query_NHD.device)
        mask = within_window(positions_N[:, None], at[None], rule.window)[:, None, None]
        return scores(query_NHD[:, :, None], key, value, mask, rule)[:, :, 0]

    def attend_new(
        self, qkv_NE: Tensor, cos_ND: Tensor, sin_ND: Tensor, heads: Heads, pages: Pages, rule: Rule
    ) -> Tensor:
        return self.decode_attention(self.rotate_and_write(qkv_NE, cos_ND, sin_ND, heads, pages), pages, rule)

    def gated(self, gate_up_NE: Tensor, activation: str) -> Tensor:
        gate, up = gate_up_NE.chunk(2, dim=-1)
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    def normed(self, x_NE: Tensor, norm: Norm) -> Normed:
        return Normed(self.rms_norm(x_NE, *norm), None, norm.epsilon)

    def product(self, normed: Normed, projection: Projection) -> Tensor:
        return F.linear(normed.values, *projection)

    def gated_product(self, normed: Normed, projection: Projection, activation: str) -> Tensor:
        return self.gated(F.linear(normed.values, *projection), activation)

    def add_product(self, sum_NE: Tensor, x_NF: Tensor, projection: Projection, norm: Norm | None) -> Normed | None:
        sum_NE += F.linear(x_NF, *projection)
        return None if norm is None else self.normed(sum_NE, norm)

    def sample(self, logits_RV: Tensor, uniforms_R: Tensor, temperatures_R: Tensor) -> tuple[Tensor, Tensor]:
        is_greedy_R = temperatures_R == 0
        logprobs_RV = torch.log_softmax(logits_RV.float() / temperatures_R.where(~is_greedy_R, 1.0)[:, None], dim=-1)
        cumulative_RV = logprobs_RV.double().exp().cumsum(-1)
        threshold_R1 = uniforms_R.double()[:, None] * cumulative_RV[:, -1:]
        tokens_R1 = torch.searchsorted(cumulative_RV, threshold_R1, right=True).clamp_(max=logits_RV.shape[-1] - 1)
        tokens_R1 = torch.where(is_greedy_R[:, None], logprobs_RV.argmax(-1, keepdim=True), tokens_R1)
        return tokens_R1[:, 0], logprobs_RV.gather(1, tokens_R1)[:, 0]


def _rotate(x_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> Tensor:
    half = x_NHD.shape[-1] // 2
    turned = torch.cat((-x_NHD[..., half:], x_NHD[..., :half]), dim=-1)
    return x_NHD * cos_ND[:, None] + turned * sin_ND[:, None]


PLAIN = PlainOperations()
