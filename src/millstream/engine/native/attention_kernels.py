"""Attention of a decode step over pages, as one Triton kernel. Imported only where there is Triton.

A program has one row, one key/value head with all its queries, and one split of the tokens. What it is given is either queries
(`attend`: keys and values are in their pages already), or the product of queries, keys and values (`attend_new`): then every
program norms and rotates its queries, and the one that has the newest token first norms and rotates its key, and writes key and
value to their page. Queries and keys are multiplied in halves, since a rotation turns one half into the other.

A row has as many splits as its length needs. The program of a row and head that arrives last joins the splits, always in the
same order; no program waits for another.
"""
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millstream.engine.native.layer_kernels import counters_for, early, let_next_start, wait_for_inputs
from millstream.engine.native.plain import Heads, Pages
from millstream.engine.native.tiles import attention_for
from millstream.model.attention import Rule


@triton.jit
def _turned(
    BASE, at, is_there, COS, SIN, NORM, epsilon, D: tl.constexpr, HAS_NORM: tl.constexpr, IS_GEMMA: tl.constexpr
):
    """Heads whose first numbers are at `at`, normed and rotated: both halves."""
    d = tl.arange(0, D // 2)
    place = BASE + at[:, None] + d[None, :]
    raw = tl.load(place, mask=is_there[:, None], other=0.0)
    x, y = raw.to(tl.float32), tl.load(place + D // 2, mask=is_there[:, None], other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x + y * y, 1) / D + epsilon)[:, None]
        wx, wy = tl.load(NORM + d).to(tl.float32)[None, :], tl.load(NORM + D // 2 + d).to(tl.float32)[None, :]
        if IS_GEMMA:
            x, y = x * scale * (1.0 + wx), y * scale * (1.0 + wy)
        else:
            x, y = (x * scale).to(raw.dtype).to(tl.float32) * wx, (y * scale).to(raw.dtype).to(tl.float32) * wy
        x, y = x.to(raw.dtype).to(tl.float32), y.to(raw.dtype).to(tl.float32)
    cos_x, sin_x = tl.load(COS + d).to(tl.float32)[None, :], tl.load(SIN + d).to(tl.float32)[None, :]
    cos_y = tl.load(COS + D // 2 + d).to(tl.float32)[None, :]
    sin_y = tl.load(SIN + D // 2 + d).to(tl.float32)[None, :]
    return (x * cos_x - y * sin_x).to(raw.dtype), (y * cos_y + x * sin_y).to(raw.dtype)


@triton.jit
def _capped(x, softcap, HAS_CAP: tl.constexpr):
    if HAS_CAP:
        x = softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0)
    return x


@triton.jit
def _write_newest(
    QKV, COS, SIN, KNORM, K, V, TABLE, row, head, position, is_here, epsilon, page_stride,
    H: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, S: tl.constexpr, HAS_NORM: tl.constexpr, IS_GEMMA: tl.constexpr,
):  # fmt: skip
    """The key and the value of the newest token to their page, if it is here. No branch: so this program's other loads are not
    behind these."""
    d, half, one = tl.arange(0, D), tl.arange(0, D // 2), tl.zeros([1], tl.int64)
    base = row * (H + 2 * KH) * D + head * D
    x, y = _turned(
        QKV,
        base + H * D + one,
        (one == 0) & is_here,
        COS + row * D,
        SIN + row * D,
        KNORM,
        epsilon,
        D,
        HAS_NORM,
        IS_GEMMA,
    )
    value = tl.load(QKV + base + (H + KH) * D + d, mask=(d < D) & is_here, other=0.0)
    page = tl.load(TABLE + position // S).to(tl.int64)
    place = page * page_stride + head * S * D + (position % S) * D
    is_half = ((half < D) & is_here)[None, :]
    tl.store(K + place + half[None, :], x, mask=is_half)
    tl.store(K + place + D // 2 + half[None, :], y, mask=is_half)
    tl.store(V + place + d, value, mask=(d < D) & is_here)


@triton.jit
def _join(PARTS, STATES, OUT, row, head, live, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
          SPLITS: tl.constexpr):  # fmt: skip
    """The splits of a row and head, one query at a time."""
    s, d = tl.arange(0, SPLITS), tl.arange(0, DP)
    is_there = (s < live)[:, None] & (d < D)[None, :]
    for g in tl.static_range(G):
        query = row * H + head * G + g
        at = query * SPLITS + s
        top = tl.load(STATES + 2 * at, mask=s < live, other=-1e30, cache_modifier=".cg")
        weight = tl.exp(top - tl.max(top, 0))
        total = tl.sum(tl.load(STATES + 2 * at + 1, mask=s < live, other=0.0, cache_modifier=".cg") * weight, 0)
        parts = tl.load(PARTS + at[:, None] * D + d[None, :], mask=is_there, other=0.0, cache_modifier=".cg")
        joined = tl.sum(parts * weight[:, None], 0) / total
        tl.store(OUT + query * D + d, joined.to(OUT.dtype.element_ty), mask=d < D)


@triton.jit
def _page_at(TABLE, at, hi, S: tl.constexpr, T: tl.constexpr):
    """The page of a tile that is one page, else the page of each of its tokens [T, 1]."""
    if T == S:
        return tl.load(TABLE + at // S, mask=at < hi, other=0)
    else:  # noqa: RET505  # only one of them is compiled
        t = at + tl.arange(0, T)
        return tl.load(TABLE + t // S, mask=t < hi, other=0)[:, None]


@triton.jit
def _attend(
    Q, COS, SIN, QNORM, KNORM, K, V, OUT, PARTS, STATES, COUNTERS, TABLE, SLOTS, POSITIONS,
    scale, softcap, window, epsilon, table_stride, page_stride,
    H: tl.constexpr, KH: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    S: tl.constexpr, T: tl.constexpr, SPLITS: tl.constexpr, MIN_SPAN: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, IS_NEW: tl.constexpr, HAS_NORM: tl.constexpr,
    IS_GEMMA: tl.constexpr, PRECISION: tl.constexpr, IS_EARLY: tl.constexpr, IS_EARLIEST: tl.constexpr,
):  # fmt: skip
    let_next_start(IS_EARLY and IS_EARLIEST)
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    slot = tl.load(SLOTS + row).to(tl.int64)  # slots, positions and table are as they were at the start of the step
    end = tl.load(POSITIONS + row) + 1
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(end - window, 0)
    begin = first // T * T
    span = tl.maximum(tl.cdiv(tl.cdiv(end - begin, SPLITS), T) * T, MIN_SPAN)
    live = tl.cdiv(end - begin, span)
    lo = begin + split * span
    hi = tl.minimum(lo + span, end)
    page = _page_at(TABLE + slot * table_stride, lo, hi, S, T)
    wait_for_inputs(IS_EARLY)
    if split < live:
        g, d = tl.arange(0, GP), tl.arange(0, DP // 2)
        if IS_NEW:
            _write_newest(
                Q, COS, SIN, KNORM, K, V, TABLE + slot * table_stride, row, head, end - 1, split == live - 1, epsilon,
                page_stride, H, KH, D, S, HAS_NORM, IS_GEMMA,
            )  # fmt: skip
            heads = row * (H + 2 * KH) * D + (head * G + g) * D
            q, other_q = _turned(Q, heads, g < G, COS + row * D, SIN + row * D, QNORM, epsilon, D, HAS_NORM, IS_GEMMA)
            tl.debug_barrier()  # what this program has written is read below
        else:
            heads = Q + (row * H + head * G + g)[:, None] * D + d[None, :]
            q = tl.load(heads, mask=(g < G)[:, None] & (d < D)[None, :], other=0.0)
            other_q = tl.load(heads + DP // 2, mask=(g < G)[:, None] & (d + DP // 2 < D)[None, :], other=0.0)
        top, total, acc = _over_pages(
            q, other_q, page, K, V, TABLE + slot * table_stride, head, first, lo, hi, scale, softcap, page_stride,
            GP, D, DP, S, T, HAS_CAP, PRECISION,
        )  # fmt: skip
        let_next_start(IS_EARLY and not IS_EARLIEST)
        _write_out(
            top, total, acc, OUT, PARTS, STATES, COUNTERS + row * KH + head, row, head, split, live,
            H, G, GP, D, DP, SPLITS,
        )  # fmt: skip


@triton.jit
def _over_pages(
    q, other_q, page, K, V, TABLE, head, first, lo, hi, scale, softcap, page_stride, GP: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, S: tl.constexpr, T: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A softmax over the tokens from `lo` to `hi`: highest score, sum, weighted values. The pages of a tile are read one tile
    before: so the compiler knows the addresses of keys and values early, and has several tiles in flight."""
    d, half = tl.arange(0, DP), tl.arange(0, DP // 2)
    top = tl.full([GP], -1e30, tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    for at in range(lo, hi, T):
        t = at + tl.arange(0, T)
        is_seen = (t < hi) & (t >= first)
        inside = tl.arange(0, T) if T == S else t % S
        where = page.to(tl.int64) * page_stride + head * S * D + (inside * D)[:, None]
        page = _page_at(TABLE, at + T, hi, S, T)
        is_there = (t < hi)[:, None]
        if DP == D:
            k = tl.load(K + where + half[None, :], mask=is_there, other=0.0)
            other_k = tl.load(K + where + DP // 2 + half[None, :], mask=is_there, other=0.0)
            v = tl.load(V + where + d[None, :], mask=is_there, other=0.0)
        else:
            k = tl.load(K + where + half[None, :], mask=is_there & (half < D)[None, :], other=0.0)
            is_other = is_there & (half + DP // 2 < D)[None, :]
            other_k = tl.load(K + where + DP // 2 + half[None, :], mask=is_other, other=0.0)
            v = tl.load(V + where + d[None, :], mask=is_there & (d < D)[None, :], other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        x = tl.dot(other_q, tl.trans(other_k), x, input_precision=PRECISION)
        x = tl.where(is_seen[None, :], _capped(x * scale, softcap, HAS_CAP), -1e30)
        new_top = tl.maximum(top, tl.max(x, 1))
        shrink = tl.exp(top - new_top)
        p = tl.where(is_seen[None, :], tl.exp(x - new_top[:, None]), 0.0)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        top = new_top
    return top, total, acc


@triton.jit
def _write_out(
    top, total, acc, OUT, PARTS, STATES, COUNT, row, head, split, live, H: tl.constexpr, G: tl.constexpr,
    GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The result of a row and head that has one split; else a part of it."""
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    is_own = (g < G)[:, None] & (d < D)[None, :]
    queries = row * H + head * G + g
    if live == 1:
        out_at = OUT + queries[:, None] * D + d[None, :]
        tl.store(out_at, (acc * (1.0 / total)[:, None]).to(OUT.dtype.element_ty), mask=is_own)
    else:
        part = queries * SPLITS + split
        tl.store(PARTS + part[:, None] * D + d[None, :], acc, mask=is_own)
        tl.store(STATES + 2 * part, top, mask=g < G)
        tl.store(STATES + 2 * part + 1, total, mask=g < G)
        tl.debug_barrier()  # every thread has written before one of them counts
        if tl.atomic_add(COUNT, 1, sem="acq_rel") == live - 1:
            _join(PARTS, STATES, OUT, row, head, live, H, G, D, DP, SPLITS)
            tl.store(COUNT, 0)


def attend(query_NHD: Tensor, pages: Pages, rule: Rule) -> Tensor:
    """Heads of any dimension: what is missing to a power of two is masked."""
    query_NHD = query_NHD.contiguous()
    out = torch.empty_like(query_NHD)
    _launch(query_NHD, None, None, None, pages, rule, out)
    return out


def attend_new(qkv_NE: Tensor, cos_ND: Tensor, sin_ND: Tensor, heads: Heads, pages: Pages, rule: Rule) -> Tensor:
    """Heads whose dimension is a power of two."""
    out = torch.empty(len(qkv_NE), heads.num, heads.dim, dtype=qkv_NE.dtype, device=qkv_NE.device)
    _launch(qkv_NE.contiguous(), cos_ND.contiguous(), sin_ND.contiguous(), heads, pages, rule, out)
    return out


def _launch(
    query: Tensor,
    cos_ND: Tensor | None,
    sin_ND: Tensor | None,
    heads: Heads | None,
    pages: Pages,
    rule: Rule,
    out: Tensor,
) -> None:
    num, num_heads, dim = out.shape
    key_heads, size = pages.keys.shape[1], pages.keys.shape[2]
    group = num_heads // key_heads
    padded_dim = max(32, triton.next_power_of_2(dim))
    cut = attention_for(num * key_heads, 2 * padded_dim * out.element_size())
    parts = torch.empty(num * num_heads * cut.splits, dim, dtype=torch.float32, device=out.device)
    states = torch.empty(num * num_heads * cut.splits, 2, dtype=torch.float32, device=out.device)
    has_norm = heads is not None and heads.query_norm is not None
    _attend[(num, key_heads, cut.splits)](
        query, query if cos_ND is None else cos_ND, query if sin_ND is None else sin_ND,
        heads.query_norm if has_norm else query, heads.key_norm if has_norm else query,
        pages.keys, pages.values, out, parts, states, counters_for(out.device, num * key_heads),
        pages.table, pages.slots_N, pages.positions_N,
        dim**-0.5 if rule.scaling is None else rule.scaling, rule.softcap or 1.0, rule.window or 0,
        heads.epsilon if has_norm else 0.0, pages.table.stride(0), pages.keys.stride(0),
        H=num_heads, KH=key_heads, G=group, GP=max(16, triton.next_power_of_2(group)),
        D=dim, DP=padded_dim, S=size, T=cut.tokens, SPLITS=cut.splits, MIN_SPAN=cut.min_span,
        HAS_WINDOW=rule.window is not None, HAS_CAP=rule.softcap is not None, IS_NEW=heads is not None,
        HAS_NORM=has_norm, IS_GEMMA=has_norm and heads.is_gemma,
        PRECISION="ieee" if out.dtype == torch.float32 else "tf32",
        num_warps=cut.warps, num_stages=cut.stages, **early(out),
    )  # fmt: skip
