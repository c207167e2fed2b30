"""Products of a decode step with what is before and after them, as Triton kernels: few rows, so that reading the weights is all
that costs. Imported only where there is Triton.

    normed_product   RMS norm, product, bias
    gated_product    RMS norm (or none), the products of gate and up, bias, activation, gate times up
    add_product      product, bias, added in place

The scale of a norm is one number for each row: the product is computed without it, and it is multiplied in at the end; the sum
of squares is taken on the way. Sums are in float32, and rounded once.

A product whose depth is split has parts: each program writes its own, and the one that arrives last adds all of them in the
order of the splits. So the same inputs give the same bits, whichever arrives last.
"""
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from millstream.engine.native.plain import Norm, Projection
from millstream.engine.native.tiles import Switches, Tile, padded, tile_for

GATES = {None: 0, "silu": 1, "gelu_tanh": 2}
MIN_COUNTERS = 1 << 14
_counters: dict[tuple[object, int], Tensor] = {}


def counters_for(device: torch.device, num: int) -> Tensor:
    """Zeros, in which programs count their arrivals and which the last one sets back to zero. One tensor for each stream, whose
    kernels follow each other."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    key = (device, stream), max(MIN_COUNTERS, triton.next_power_of_2(num))
    if key not in _counters:  # kept for ever: graphs read it
        _counters[key] = torch.zeros(key[1], dtype=torch.int32, device=device)
    return _counters[key]


def early(tensor: Tensor) -> dict[str, bool]:
    """Options of a launch: whether its programs start before the kernel before it has ended."""
    is_early = Switches.is_early and tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (9, 0)
    return {"IS_EARLY": is_early, **({"launch_pdl": True} if is_early else {})}


@triton.jit
def wait_for_inputs():
    """Nothing that the kernel before has written may be read before this, and nothing may be written. The next kernel's
    programs may start from now on."""
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def prefetch(at):
    """Bring the lines at these addresses to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _prefetch_columns(W, n, begin, last, K: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr):
    """Columns `n` of the weights, from depth `begin` to `last`."""
    at = tl.minimum(begin + tl.arange(0, LINES) * LINE, last)
    prefetch(W + n.to(tl.int64)[:, None] * K + at[None, :])


@triton.jit
def _activation(x, GATE: tl.constexpr):
    steep = x if GATE == 1 else 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(steep)


@triton.jit
def _finish(acc, BIAS, OUT, m, n, num, columns, HAS_BIAS: tl.constexpr, IS_ADDED: tl.constexpr):
    is_there = (m < num)[:, None] & (n < columns)[None, :]
    place = OUT + m.to(tl.int64)[:, None] * columns + n[None, :]
    if HAS_BIAS:
        acc += tl.load(BIAS + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    if IS_ADDED:
        acc += tl.load(place, mask=is_there, other=0.0).to(tl.float32)
    tl.store(place, acc.to(OUT.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize=["num"])
def _product(
    X, W, NORM, BIAS, OUT, epsilon, num, columns,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HAS_NORM: tl.constexpr,
    IS_GEMMA: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
    IS_EVEN: tl.constexpr, PRECISION: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """A product whose depth is in one program; with GATE: of the columns n and columns + n."""
    m, n, k = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    near = tl.minimum(n, columns - 1)
    if LINES > 0:
        _prefetch_columns(W, near, 0, K - 1, K, LINES, LINE)
        if GATE > 0:
            _prefetch_columns(W, near + columns, 0, K - 1, K, LINES, LINE)
    if IS_EARLY:
        wait_for_inputs()
    x_at = X + m.to(tl.int64)[:, None] * K + k[None, :]
    w_at = W + near.to(tl.int64)[:, None] * K + k[None, :]
    up_at = W + (near + columns).to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    squares = tl.zeros([BM, BK], tl.float32)
    if HAS_NORM:
        weight = tl.load(NORM + k)
    for at in range(0, K, BK):
        x = tl.load(x_at + at) if IS_EVEN else tl.load(x_at + at, mask=(m < num)[:, None], other=0.0)
        if HAS_NORM:
            wide = x.to(tl.float32)
            squares += wide * wide
            factor = weight.to(tl.float32) + 1.0 if IS_GEMMA else weight.to(tl.float32)
            x = (wide * factor[None, :]).to(x.dtype)
            weight = tl.load(NORM + at + BK + k, mask=at + BK + k < K, other=0.0)  # one tile before it is needed
        acc = tl.dot(x, tl.trans(tl.load(w_at + at)), acc, input_precision=PRECISION)
        if GATE > 0:
            up = tl.dot(x, tl.trans(tl.load(up_at + at)), up, input_precision=PRECISION)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, 1) / K + epsilon)[:, None]
        acc *= scale
        up *= scale
    if GATE > 0:
        if HAS_BIAS:
            acc += tl.load(BIAS + near).to(tl.float32)[None, :]
            up += tl.load(BIAS + columns + near).to(tl.float32)[None, :]
        _finish(_activation(acc, GATE) * up, BIAS, OUT, m, n, num, columns, False, False)
    else:
        _finish(acc, BIAS, OUT, m, n, num, columns, HAS_BIAS, False)


@triton.jit(do_not_specialize=["num"])
def _add_product(
    X, W, BIAS, OUT, PARTS, COUNTERS, num, columns,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr, IS_EVEN: tl.constexpr,
    PRECISION: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    m, n, k = tl.arange(0, BM), tile * BN + tl.arange(0, BN), tl.arange(0, BK)
    near = tl.minimum(n, columns - 1)
    begin = split * (K // SPLITS)
    if LINES > 0:
        _prefetch_columns(W, near, begin, begin + K // SPLITS - 1, K, LINES, LINE)
    if IS_EARLY:
        wait_for_inputs()
    x_at = X + m.to(tl.int64)[:, None] * K + begin + k[None, :]
    w_at = W + near.to(tl.int64)[:, None] * K + begin + k[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for at in range(0, K // SPLITS, BK):
        x = tl.load(x_at + at) if IS_EVEN else tl.load(x_at + at, mask=(m < num)[:, None], other=0.0)
        acc = tl.dot(x, tl.trans(tl.load(w_at + at)), acc, input_precision=PRECISION)
    if SPLITS == 1:
        _finish(acc, BIAS, OUT, m, n, num, columns, HAS_BIAS, True)
    else:
        is_there = (m < num)[:, None] & (n < columns)[None, :]
        place = PARTS + m.to(tl.int64)[:, None] * columns + n[None, :]
        size = num * columns
        tl.store(place + split * size, acc, mask=is_there)
        tl.debug_barrier()  # every thread has written before one of them counts
        if tl.atomic_add(COUNTERS + tile, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros([BM, BN], tl.float32)
            for number in tl.static_range(SPLITS):
                total += tl.load(place + number * size, mask=is_there, other=0.0, cache_modifier=".cg")
            tl.store(COUNTERS + tile, 0)
            _finish(total, BIAS, OUT, m, n, num, columns, HAS_BIAS, True)


def normed_product(x_NE: Tensor, norm: Norm, projection: Projection, tile: Tile | None = None) -> Tensor:
    columns, depth = projection.weight.shape
    out = torch.empty(len(x_NE), columns, dtype=x_NE.dtype, device=x_NE.device)
    tile = tile or tile_for("normed", len(x_NE), depth, columns, x_NE.element_size())
    _launch_product(x_NE, norm, projection, None, out, tile)
    return out


def gated_product(
    x_NE: Tensor, norm: Norm | None, projection: Projection, activation: str, tile: Tile | None = None
) -> Tensor:
    columns, depth = projection.weight.shape[0] // 2, projection.weight.shape[1]
    out = torch.empty(len(x_NE), columns, dtype=x_NE.dtype, device=x_NE.device)
    tile = tile or tile_for("gated", len(x_NE), depth, columns, x_NE.element_size())
    _launch_product(x_NE, norm, projection, activation, out, tile)
    return out


def _launch_product(
    x_NE: Tensor, norm: Norm | None, projection: Projection, activation: str | None, out: Tensor, tile: Tile
) -> None:
    num, columns = out.shape
    _product[(triton.cdiv(columns, tile.columns),)](
        x_NE, projection.weight, x_NE if norm is None else norm.weight,
        x_NE if projection.bias is None else projection.bias, out, 0.0 if norm is None else norm.epsilon, num, columns,
        HAS_NORM=norm is not None, IS_GEMMA=norm is not None and norm.is_gemma, GATE=GATES[activation],
        **_shared(x_NE, projection, tile),
    )  # fmt: skip


def add_product(sum_NE: Tensor, x_NF: Tensor, projection: Projection, tile: Tile | None = None) -> None:
    num, columns = sum_NE.shape
    tile = tile or tile_for("added", num, x_NF.shape[1], columns, x_NF.element_size())
    programs = triton.cdiv(columns, tile.columns)
    parts, counters = sum_NE, sum_NE
    if tile.splits > 1:
        parts = torch.empty(tile.splits, num, columns, dtype=torch.float32, device=sum_NE.device)
        counters = counters_for(sum_NE.device, programs)
    _add_product[(programs, tile.splits)](
        x_NF, projection.weight, x_NF if projection.bias is None else projection.bias, sum_NE, parts, counters,
        num, columns, SPLITS=tile.splits, **_shared(x_NF, projection, tile),
    )  # fmt: skip


def _shared(x_NE: Tensor, projection: Projection, tile: Tile) -> dict[str, object]:
    """Options that both kernels have."""
    num, depth = x_NE.shape
    line = 128 // x_NE.element_size()  # a line of the cache
    has_prefetch = Switches.has_prefetch and x_NE.is_cuda
    return {
        "K": depth, "BM": padded(num), "BN": tile.columns, "BK": tile.depth, "HAS_BIAS": projection.bias is not None,
        "LINES": triton.next_power_of_2(triton.cdiv(depth // tile.splits, line)) if has_prefetch else 0, "LINE": line,
        "IS_EVEN": padded(num) == num, "PRECISION": "ieee" if x_NE.dtype == torch.float32 else "tf32",
        "num_warps": tile.warps, "num_stages": tile.stages, **early(x_NE),
    }  # fmt: skip
