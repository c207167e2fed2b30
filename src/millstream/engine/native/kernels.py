"""The operations of a forward pass over pages as Triton kernels (`KERNELS`). Imported only where there is a GPU.

Each has a plain twin in `engine.native.plain`. Attention of decode steps is in `attention_kernels`, products of few rows are in
`layer_kernels`; with more rows cuBLAS multiplies. All of them read the slot and the position of a token from memory, so that a
captured graph serves any batch of its size.
"""
# mypy: ignore-errors

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from millstream.engine.native import attention_kernels, layer_kernels
from millstream.engine.native.plain import Heads, Norm, Normed, Pages, Projection
from millstream.engine.native.tiles import MAX_ROWS, fits
from millstream.model.attention import Rule

VOCABULARY_TILE = 4096
MIN_HEAD_DIM = 32  # a matrix unit multiplies halves of it


@triton.jit
def _rotate_and_write(
    QKV, COS, SIN, QNORM, KNORM, Q, K, V, TABLE, SLOTS, POSITIONS, epsilon, qkv_stride, table_stride, page_stride,
    H: tl.constexpr, KH: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
    HAS_NORM: tl.constexpr, IS_GEMMA: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, HP), tl.arange(0, D)
    other = (d + D // 2) % D
    is_there = (h < H + 2 * KH)[:, None]
    base = QKV + n * qkv_stride + h[:, None] * D
    raw = tl.load(base + d[None, :], mask=is_there, other=0.0)
    x, y = raw.to(tl.float32), tl.load(base + other[None, :], mask=is_there, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + epsilon)[:, None]
        is_query = (h < H)[:, None]
        wx = tl.where(is_query, tl.load(QNORM + d)[None, :], tl.load(KNORM + d)[None, :]).to(tl.float32)
        wy = tl.where(is_query, tl.load(QNORM + other)[None, :], tl.load(KNORM + other)[None, :]).to(tl.float32)
        if IS_GEMMA:
            x, y = x * scale * (1.0 + wx), y * scale * (1.0 + wy)
        else:
            x, y = (x * scale).to(raw.dtype).to(tl.float32) * wx, (y * scale).to(raw.dtype).to(tl.float32) * wy
        x, y = x.to(raw.dtype).to(tl.float32), y.to(raw.dtype).to(tl.float32)
    cos = tl.load(COS + n * D + d).to(tl.float32)[None, :]
    sin = tl.load(SIN + n * D + d).to(tl.float32)[None, :]
    turned = (x * cos + tl.where(d < D // 2, -1.0, 1.0)[None, :] * y * sin).to(raw.dtype)
    tl.store(Q + n * H * D + h[:, None] * D + d[None, :], turned, mask=(h < H)[:, None])
    position = tl.load(POSITIONS + n)
    page = tl.load(TABLE + tl.load(SLOTS + n).to(tl.int64) * table_stride + position // S).to(tl.int64)
    place = page * page_stride + (position % S) * D + d[None, :]
    is_key = (h >= H) & (h < H + KH)
    is_value = (h >= H + KH) & (h < H + 2 * KH)
    tl.store(K + place + ((h - H) * S * D)[:, None], turned, mask=is_key[:, None])
    tl.store(V + place + ((h - H - KH) * S * D)[:, None], raw, mask=is_value[:, None])


@triton.jit
def _write(KEY, VALUE, K, V, TABLE, SLOTS, POSITIONS, table_stride, page_stride, E: tl.constexpr, EP: tl.constexpr,
           D: tl.constexpr, S: tl.constexpr):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EP)
    position = tl.load(POSITIONS + n)
    page = tl.load(TABLE + tl.load(SLOTS + n).to(tl.int64) * table_stride + position // S).to(tl.int64)
    place = page * page_stride + (e // D) * S * D + (position % S) * D + e % D
    tl.store(K + place, tl.load(KEY + n * E + e, mask=e < E), mask=e < E)
    tl.store(V + place, tl.load(VALUE + n * E + e, mask=e < E), mask=e < E)


@triton.jit
def _rms_norm(X, W, Y, epsilon, E: tl.constexpr, EP: tl.constexpr, IS_GEMMA: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EP)
    raw = tl.load(X + n * E + e, mask=e < E, other=0.0)
    x = raw.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / E + epsilon)
    w = tl.load(W + e, mask=e < E, other=0.0).to(tl.float32)
    y = x * (1.0 + w) if IS_GEMMA else x.to(raw.dtype).to(tl.float32) * w
    tl.store(Y + n * E + e, y.to(raw.dtype), mask=e < E)


@triton.jit
def _gated(X, Y, E, IS_SILU: tl.constexpr, B: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * B + tl.arange(0, B)
    gate = tl.load(X + n * 2 * E + e, mask=e < E, other=0.0)
    up = tl.load(X + n * 2 * E + E + e, mask=e < E, other=0.0).to(tl.float32)
    g = gate.to(tl.float32)
    steep = g if IS_SILU else 1.5957691216057308 * (g + 0.044715 * g * g * g)
    g = g * tl.sigmoid(steep)
    tl.store(Y + n * E + e, (g.to(gate.dtype).to(tl.float32) * up).to(gate.dtype), mask=e < E)


@triton.jit
def _sum_tile(X, TEMPERATURES, TOPS, BEST, SUMS, stride, V, B: tl.constexpr):
    """Of a tile of the vocabulary: the highest logit, the token that has it, and the sum of the weights against it."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(TEMPERATURES + row)
    v = tile * B + tl.arange(0, B)
    x = tl.load(X + row * stride + v, mask=v < V, other=-float("inf")).to(tl.float32)
    x /= tl.where(temperature == 0.0, 1.0, temperature)
    top = tl.max(x, 0)
    at = row * tl.num_programs(1) + tile
    tl.store(TOPS + at, top)
    tl.store(BEST + at, tile * B + tl.argmax(x, 0))
    tl.store(SUMS + at, tl.sum(tl.where(x > -float("inf"), tl.exp(x - top), 0.0), 0))


@triton.jit
def _draw(
    X, U, TEMPERATURES, TOPS, BEST, SUMS, TOKENS, LOGPROBS, stride, V, tiles, TILES: tl.constexpr, B: tl.constexpr
):
    """The tile in which the cumulative sum crosses the threshold, then the token in it."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(TEMPERATURES + row)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    i = tl.arange(0, TILES)
    tops = tl.load(TOPS + row * tiles + i, mask=i < tiles, other=-float("inf"))
    top = tl.max(tops, 0)
    sums = tl.load(SUMS + row * tiles + i, mask=i < tiles, other=0.0) * tl.exp(tops - top)
    total = tl.sum(sums, 0)
    threshold = tl.load(U + row) * total
    until = tl.cumsum(sums, 0)
    last = tl.max(tl.where(sums > 0, i, 0), 0)
    chosen = tl.minimum(tl.min(tl.where((until > threshold) & (sums > 0), i, TILES), 0), last)
    before = tl.sum(tl.where(i < chosen, sums, 0.0), 0)
    v = chosen * B + tl.arange(0, B)
    x = tl.load(X + row * stride + v, mask=v < V, other=-float("inf")).to(tl.float32) / divisor
    weight = tl.exp(x - top)
    crossed = tl.min(tl.where((before + tl.cumsum(weight, 0) > threshold) & (weight > 0), v, V), 0)
    token = tl.minimum(crossed, tl.max(tl.where(weight > 0, v, 0), 0))
    if temperature == 0.0:
        token = tl.load(BEST + row * tiles + tl.argmax(tops, 0))
    value = tl.load(X + row * stride + token).to(tl.float32) / divisor
    tl.store(TOKENS + row, token.to(tl.int64))
    tl.store(LOGPROBS + row, value - top - tl.log(total))


class KernelOperations:
    """See `engine.native.plain.Operations`."""

    def write(self, key_NKD: Tensor, value_NKD: Tensor, pages: Pages) -> None:
        num, heads, dim = key_NKD.shape
        _write[(num,)](
            key_NKD.contiguous(), value_NKD.contiguous(), pages.keys, pages.values,
            pages.table, pages.slots_N, pages.positions_N, pages.table.stride(0), pages.keys.stride(0),
            E=heads * dim, EP=triton.next_power_of_2(heads * dim), D=dim, S=pages.keys.shape[2],
        )  # fmt: skip

    def rotate_and_write(self, qkv_NE: Tensor, cos_ND: Tensor, sin_ND: Tensor, heads: Heads, pages: Pages) -> Tensor:
        query = torch.empty(len(qkv_NE), heads.num, heads.dim, dtype=qkv_NE.dtype, device=qkv_NE.device)
        has_norm = heads.query_norm is not None
        padded = triton.next_power_of_2(heads.num + 2 * heads.num_keys)
        _rotate_and_write[(len(qkv_NE),)](
            qkv_NE, cos_ND, sin_ND, heads.query_norm if has_norm else cos_ND, heads.key_norm if has_norm else cos_ND, query,
            pages.keys, pages.values, pages.table, pages.slots_N, pages.positions_N,
            heads.epsilon, qkv_NE.stride(0), pages.table.stride(0), pages.keys.stride(0),
            H=heads.num, KH=heads.num_keys, HP=padded, D=heads.dim, S=pages.keys.shape[2],
            HAS_NORM=has_norm, IS_GEMMA=heads.is_gemma, num_warps=4 if padded * heads.dim <= 4096 else 8,
        )  # fmt: skip
        return query

    def decode_attention(self, query_NHD: Tensor, pages: Pages, rule: Rule) -> Tensor:
        return attention_kernels.attend(query_NHD, pages, rule)

    def attend_new(
        self, qkv_NE: Tensor, cos_ND: Tensor, sin_ND: Tensor, heads: Heads, pages: Pages, rule: Rule
    ) -> Tensor:
        if heads.dim < MIN_HEAD_DIM:
            return self.decode_attention(self.rotate_and_write(qkv_NE, cos_ND, sin_ND, heads, pages), pages, rule)
        return attention_kernels.attend_new(qkv_NE, cos_ND, sin_ND, heads, pages, rule)

    def normed(self, x_NE: Tensor, norm: Norm) -> Normed:
        return Normed(self.rms_norm(x_NE, *norm), None, norm.epsilon)

    def product(self, normed: Normed, projection: Projection) -> Tensor:
        if _are_few_rows(normed.values, projection.weight):
            return layer_kernels.product(normed, projection)
        return F.linear(normed.values, *projection)

    def gated_product(self, normed: Normed, projection: Projection, activation: str) -> Tensor:
        if _are_few_rows(normed.values, projection.weight):
            return layer_kernels.gated_product(normed, projection, activation)
        return self.gated(F.linear(normed.values, *projection), activation)

    def add_product(self, sum_NE: Tensor, x_NF: Tensor, projection: Projection, norm: Norm | None) -> Normed | None:
        if _are_few_rows(x_NF, projection.weight, sum_NE) and fits(sum_NE.shape[1]):
            return layer_kernels.add_product(sum_NE, x_NF, projection, norm)
        sum_NE.addmm_(x_NF, projection.weight.t())
        if projection.bias is not None:
            sum_NE += projection.bias
        return None if norm is None else self.normed(sum_NE, norm)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, is_gemma: bool) -> Tensor:
        x = x.contiguous()
        y, size = torch.empty_like(x), x.shape[-1]
        padded = triton.next_power_of_2(size)
        _rms_norm[(x.numel() // size,)](
            x, weight, y, epsilon, E=size, EP=padded, IS_GEMMA=is_gemma, num_warps=min(16, max(1, padded // 512))
        )
        return y

    def gated(self, gate_up_NE: Tensor, activation: str) -> Tensor:
        num, size = len(gate_up_NE), gate_up_NE.shape[-1] // 2
        out = torch.empty(num, size, dtype=gate_up_NE.dtype, device=gate_up_NE.device)
        _gated[(num, triton.cdiv(size, 1024))](gate_up_NE, out, size, IS_SILU=activation == "silu", B=1024, num_warps=4)
        return out

    def sample(self, logits_RV: Tensor, uniforms_R: Tensor, temperatures_R: Tensor) -> tuple[Tensor, Tensor]:
        num, size = logits_RV.shape
        tokens = torch.empty(num, dtype=torch.int64, device=logits_RV.device)
        logprobs = torch.empty(num, dtype=torch.float32, device=logits_RV.device)
        tile = min(VOCABULARY_TILE, triton.next_power_of_2(size))
        tiles = triton.cdiv(size, tile)
        tops, sums = torch.empty(2, num, tiles, dtype=torch.float32, device=logits_RV.device)
        best = torch.empty(num, tiles, dtype=torch.int32, device=logits_RV.device)
        _sum_tile[(num, tiles)](
            logits_RV, temperatures_R, tops, best, sums, logits_RV.stride(0), size, B=tile, num_warps=4
        )
        _draw[(num,)](
            logits_RV, uniforms_R, temperatures_R, tops, best, sums, tokens, logprobs, logits_RV.stride(0), size, tiles,
            TILES=triton.next_power_of_2(tiles), B=tile, num_warps=8,
        )  # fmt: skip
        return tokens, logprobs


def _are_few_rows(*tensors: Tensor) -> bool:
    """Whether our kernels compute the product of the first of these tensors. In float16 it could overflow before it is
    multiplied by the scale of its norm."""
    num, depth = tensors[0].shape
    return num <= MAX_ROWS and fits(depth) and all(t.is_contiguous() and t.dtype != torch.float16 for t in tensors)


KERNELS = KernelOperations()
