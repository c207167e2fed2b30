"""The operations of a forward pass over pages as Triton kernels (`KERNELS`). Imported only where there is a GPU.

Each has a plain twin in `engine.native.plain`. All of them read the slot and the position of a token from memory, so that a
captured graph serves any batch of its size.
"""
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millstream.engine.native.plain import Heads, Pages
from millstream.model.attention import Rule

TILE = 64  # tokens whose scores a program of the attention computes at a time
PROGRAMS = 512  # with fewer programs than this the device is not full, and requests are split
MAX_SPLITS = 32
VOCABULARY_TILE = 4096


@triton.jit
def _decode(
    Q, K, V, OUT, PART, MAX, SUM, TABLE, SLOTS, POSITIONS, scale, softcap, window, table_stride, page_stride,
    H: tl.constexpr, KH: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    S: tl.constexpr, T: tl.constexpr, SPLITS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(SLOTS + row).to(tl.int64)
    end = tl.load(POSITIONS + row) + 1
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(end - window, 0)
    begin = first // T * T
    span = tl.cdiv(tl.cdiv(end - begin, SPLITS), T) * T
    lo = begin + split * span
    hi = tl.minimum(lo + span, end)
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    q_at = row.to(tl.int64) * H * D + (head * G + g)[:, None] * D + d[None, :]
    is_own = (g < G)[:, None]
    if DP > D:
        is_own = is_own & (d < D)[None, :]
    q = tl.load(Q + q_at, mask=is_own, other=0.0)
    top = tl.full([GP], -1e30, tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    for at in range(lo, hi, T):
        t = at + tl.arange(0, T)
        is_seen = t < hi
        if HAS_WINDOW:
            is_seen = is_seen & (t >= first)
        page = tl.load(TABLE + slot * table_stride + t // S, mask=t < hi, other=0).to(tl.int64)
        where = page * page_stride + head * S * D + (t % S) * D
        is_there = (t < hi)[:, None]
        if DP > D:
            is_there = is_there & (d < D)[None, :]
        k = tl.load(K + where[:, None] + d[None, :], mask=is_there, other=0.0)
        v = tl.load(V + where[:, None] + d[None, :], mask=is_there, other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_CAP:
            x = softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0)
        x = tl.where(is_seen[None, :], x, -1e30)
        new_top = tl.maximum(top, tl.max(x, 1))
        shrink = tl.exp(top - new_top)
        p = tl.where(is_seen[None, :], tl.exp(x - new_top[:, None]), 0.0)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        top = new_top
    if SPLITS == 1:
        tl.store(OUT + q_at, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=is_own)
    else:
        part = (row.to(tl.int64) * H + head * G + g) * SPLITS + split
        tl.store(PART + part[:, None] * D + d[None, :], acc, mask=is_own)
        tl.store(MAX + part, top, mask=g < G)
        tl.store(SUM + part, total, mask=g < G)


@triton.jit
def _join_splits(PART, MAX, SUM, OUT, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, SPLITS), tl.arange(0, DP)
    top = tl.load(MAX + row * SPLITS + s)
    weight = tl.exp(top - tl.max(top, 0))
    total = tl.sum(tl.load(SUM + row * SPLITS + s) * weight, 0)
    parts = tl.load(PART + (row * SPLITS + s)[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    tl.store(OUT + row * D + d, (tl.sum(parts * weight[:, None], 0) / total).to(OUT.dtype.element_ty), mask=d < D)


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
def _sample(X, U, TEMPERATURES, TOKENS, LOGPROBS, stride, V, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(TEMPERATURES + row)
    is_greedy = temperature == 0.0
    divisor = tl.where(is_greedy, 1.0, temperature)
    best, best_at = -float("inf"), 0
    top, total = -float("inf"), 0.0
    for at in range(0, V, B):
        v = at + tl.arange(0, B)
        x = tl.load(X + row * stride + v, mask=v < V, other=-float("inf")).to(tl.float32) / divisor
        highest = tl.max(x, 0)
        if highest > best:
            best, best_at = highest, at + tl.argmax(x, 0)
        new_top = tl.maximum(top, highest)
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), 0)
        top = new_top
    threshold = tl.load(U + row) * total
    before, chosen, last = 0.0, -1, best_at
    for at in range(0, V, B):
        if chosen < 0:
            v = at + tl.arange(0, B)
            x = tl.load(X + row * stride + v, mask=v < V, other=-float("inf")).to(tl.float32) / divisor
            weight = tl.exp(x - top)
            sums = before + tl.cumsum(weight, 0)
            crossed = tl.min(tl.where((sums > threshold) & (weight > 0), v, V), 0)
            last = tl.maximum(last, tl.max(tl.where(weight > 0, v, 0), 0))
            if crossed < V:
                chosen = crossed
            before += tl.sum(weight, 0)
    token = tl.where(is_greedy, best_at, tl.where(chosen < 0, last, chosen))
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
        """Heads of any dimension: what is missing to a power of two is masked."""
        num, heads, dim = query_NHD.shape
        key_heads, size = pages.keys.shape[1], pages.keys.shape[2]
        group = heads // key_heads
        splits = min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(PROGRAMS, num * key_heads)))
        padded = max(16, triton.next_power_of_2(dim))
        query_NHD = query_NHD.contiguous()
        out = torch.empty_like(query_NHD)
        parts, tops, sums = out, out, out
        if splits > 1:
            parts = torch.empty(num * heads * splits, dim, dtype=torch.float32, device=out.device)
            tops, sums = torch.empty(2, num * heads * splits, dtype=torch.float32, device=out.device)
        _decode[(num, key_heads, splits)](
            query_NHD, pages.keys, pages.values, out, parts, tops, sums, pages.table, pages.slots_N, pages.positions_N,
            dim**-0.5 if rule.scaling is None else rule.scaling, rule.softcap or 1.0, rule.window or 0,
            pages.table.stride(0), pages.keys.stride(0),
            H=heads, KH=key_heads, G=group, GP=max(16, triton.next_power_of_2(group)), D=dim, DP=padded,
            S=size, T=TILE, SPLITS=splits,
            HAS_WINDOW=rule.window is not None, HAS_CAP=rule.softcap is not None,
            PRECISION="ieee" if query_NHD.dtype == torch.float32 else "tf32", num_warps=4, num_stages=3,
        )  # fmt: skip
        if splits > 1:
            _join_splits[(num * heads,)](parts, tops, sums, out, D=dim, DP=padded, SPLITS=splits, num_warps=1)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, *, is_gemma: bool) -> Tensor:
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
        _sample[(num,)](
            logits_RV, uniforms_R, temperatures_R, tokens, logprobs, logits_RV.stride(0), size, B=tile, num_warps=8
        )
        return tokens, logprobs


KERNELS = KernelOperations()
