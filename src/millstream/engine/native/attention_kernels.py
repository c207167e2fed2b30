"""Attention of a decode step over pages, as one Triton kernel. Imported only where there is Triton.

A program has one row, one key/value head with all its queries, and one split of the tokens. What it is given is either queries
(`attend`: keys and values are in their pages already), or the product of queries, keys and values (`attend_new`): then every
program norms and rotates its queries, and the one that has the newest token also norms and rotates its key, starts from it, and
writes key and value to their page.

A row has as many splits as its length needs. The program of a row and head that arrives last joins the splits, always in the
same order; no program waits for another.
"""
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millstream.engine.native.layer_kernels import counters_for, early, prefetch, wait_for_inputs
from millstream.engine.native.plain import Heads, Pages
from millstream.engine.native.tiles import Switches, attention_for
from millstream.model.attention import Rule

AHEAD = 128  # tokens of a split that are brought to the L2 cache before the kernel's inputs are there


@triton.jit
def turned(
    BASE, at, is_there, COS, SIN, NORM, epsilon, D: tl.constexpr, HAS_NORM: tl.constexpr, IS_GEMMA: tl.constexpr
):
    """Heads whose first numbers are at `at`, normed and rotated."""
    d = tl.arange(0, D)
    other = (d + D // 2) % D
    raw = tl.load(BASE + at[:, None] + d[None, :], mask=is_there[:, None], other=0.0)
    x = raw.to(tl.float32)
    y = tl.load(BASE + at[:, None] + other[None, :], mask=is_there[:, None], other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + epsilon)[:, None]
        wx, wy = tl.load(NORM + d).to(tl.float32)[None, :], tl.load(NORM + other).to(tl.float32)[None, :]
        if IS_GEMMA:
            x, y = x * scale * (1.0 + wx), y * scale * (1.0 + wy)
        else:
            x, y = (x * scale).to(raw.dtype).to(tl.float32) * wx, (y * scale).to(raw.dtype).to(tl.float32) * wy
        x, y = x.to(raw.dtype).to(tl.float32), y.to(raw.dtype).to(tl.float32)
    cos, sin = tl.load(COS + d).to(tl.float32)[None, :], tl.load(SIN + d).to(tl.float32)[None, :]
    return (x * cos + tl.where(d < D // 2, -1.0, 1.0)[None, :] * y * sin).to(raw.dtype)


@triton.jit
def _capped(x, softcap, HAS_CAP: tl.constexpr):
    if HAS_CAP:
        x = softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0)
    return x


@triton.jit
def _newest(
    q, QKV, COS, SIN, KNORM, K, V, TABLE, row, head, slot, position, is_here, scale, softcap, epsilon, table_stride,
    page_stride, H: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_NORM: tl.constexpr, IS_GEMMA: tl.constexpr,
):  # fmt: skip
    """The newest token, if it is here: its key and value are written to their page. Returns the state of a softmax over it:
    highest score, sum, weighted values."""
    d, one = tl.arange(0, D), tl.zeros([1], tl.int64)
    base = row * (H + 2 * KH) * D + head * D
    key = turned(
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
    page = tl.load(TABLE + slot * table_stride + position // S).to(tl.int64)
    place = page * page_stride + head * S * D + (position % S) * D + d
    tl.store(K + place[None, :], key, mask=((d < D) & is_here)[None, :])
    tl.store(V + place, value, mask=(d < D) & is_here)
    x = _capped(tl.sum(q.to(tl.float32) * key.to(tl.float32), 1) * scale, softcap, HAS_CAP)
    top = tl.where(is_here, x, -1e30)
    total = tl.where(is_here, tl.full(x.shape, 1.0, tl.float32), 0.0)
    return top, total, total[:, None] * value.to(tl.float32)[None, :]


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
def _prefetch_pages(K, V, TABLE, slot, head, lo, hi, table_stride, page_stride, D: tl.constexpr, S: tl.constexpr,
                    AHEAD: tl.constexpr, LINE: tl.constexpr):  # fmt: skip
    """Bring the first keys and values of a split to the L2 cache."""
    t = tl.maximum(tl.minimum(lo + tl.arange(0, AHEAD), hi - 1), 0)
    page = tl.load(TABLE + slot * table_stride + t // S).to(tl.int64)
    place = page * page_stride + head * S * D + (t % S) * D
    for at in tl.static_range(0, D, LINE):
        prefetch(K + place + at)
        prefetch(V + place + at)


@triton.jit
def _attend(
    Q, COS, SIN, QNORM, KNORM, K, V, OUT, PARTS, STATES, COUNTERS, TABLE, SLOTS, POSITIONS,
    scale, softcap, window, epsilon, table_stride, page_stride,
    H: tl.constexpr, KH: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    S: tl.constexpr, T: tl.constexpr, SPLITS: tl.constexpr, MIN_SPAN: tl.constexpr, AHEAD: tl.constexpr,
    LINE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, IS_NEW: tl.constexpr, HAS_NORM: tl.constexpr,
    IS_GEMMA: tl.constexpr, PRECISION: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
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
    if AHEAD > 0:  # noqa: SIM102  # known to the compiler, and the other is not
        if split < live:
            _prefetch_pages(K, V, TABLE, slot, head, lo, hi, table_stride, page_stride, D, S, AHEAD, LINE)
    if IS_EARLY:
        wait_for_inputs()
    if split < live:
        g, d = tl.arange(0, GP), tl.arange(0, DP)
        if IS_NEW:
            heads = row * (H + 2 * KH) * D + (head * G + g) * D
            q = turned(Q, heads, g < G, COS + row * D, SIN + row * D, QNORM, epsilon, D, HAS_NORM, IS_GEMMA)
            top, total, acc = _newest(
                q, Q, COS, SIN, KNORM, K, V, TABLE, row, head, slot, end - 1, split == live - 1, scale, softcap, epsilon,
                table_stride, page_stride, H, KH, D, S, HAS_CAP, HAS_NORM, IS_GEMMA,
            )  # fmt: skip
            hi = tl.minimum(hi, end - 1)
        else:
            is_own = (g < G)[:, None] & (d < D)[None, :]
            q = tl.load(Q + (row * H + head * G + g)[:, None] * D + d[None, :], mask=is_own, other=0.0)
            top = tl.full([GP], -1e30, tl.float32)
            total = tl.zeros([GP], tl.float32)
            acc = tl.zeros([GP, DP], tl.float32)
        top, total, acc = _over_pages(
            q, top, total, acc, K, V, TABLE + slot * table_stride, head, first, lo, hi, scale, softcap, page_stride,
            D, DP, S, T, HAS_CAP, PRECISION,
        )  # fmt: skip
        _write_out(
            top, total, acc, OUT, PARTS, STATES, COUNTERS + row * KH + head, row, head, split, live,
            H, G, GP, D, DP, SPLITS,
        )  # fmt: skip


@triton.jit
def _over_pages(
    q, top, total, acc, K, V, TABLE, head, first, lo, hi, scale, softcap, page_stride,
    D: tl.constexpr, DP: tl.constexpr, S: tl.constexpr, T: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A softmax over the tokens from `lo` to `hi`, from this state on. The pages of a tile are read one tile before: so the
    compiler knows the addresses of keys and values early, and has several tiles in flight."""
    d = tl.arange(0, DP)
    page = tl.load(TABLE + (lo + tl.arange(0, T)) // S, mask=lo + tl.arange(0, T) < hi, other=0)
    for at in range(lo, hi, T):
        t = at + tl.arange(0, T)
        is_seen = (t < hi) & (t >= first)
        where = (page.to(tl.int64) * page_stride + head * S * D + (t % S) * D)[:, None] + d[None, :]
        page = tl.load(TABLE + (t + T) // S, mask=t + T < hi, other=0)
        is_there = (t < hi)[:, None]
        if DP > D:
            is_there = is_there & (d < D)[None, :]
        k = tl.load(K + where, mask=is_there, other=0.0)
        v = tl.load(V + where, mask=is_there, other=0.0)
        x = _capped(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, softcap, HAS_CAP)
        x = tl.where(is_seen[None, :], x, -1e30)
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
        tl.store(out_at, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=is_own)
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
    padded_dim = max(16, triton.next_power_of_2(dim))
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
        AHEAD=AHEAD if Switches.has_prefetch and out.is_cuda else 0, LINE=128 // out.element_size(),
        HAS_WINDOW=rule.window is not None, HAS_CAP=rule.softcap is not None, IS_NEW=heads is not None,
        HAS_NORM=has_norm, IS_GEMMA=has_norm and heads.is_gemma,
        PRECISION="ieee" if out.dtype == torch.float32 else "tf32",
        num_warps=cut.warps, num_stages=cut.stages, **early(out),
    )  # fmt: skip
