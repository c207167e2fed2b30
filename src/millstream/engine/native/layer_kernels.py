"""Products of a decode step with what is before and after them, as one Triton kernel: few rows, so that reading the weights is
all that costs. Imported only where there is Triton.

    product         product, scale of the norm, bias
    gated_product   the products of gate and up, scale of the norm, bias, activation, gate times up
    add_product     product, bias, added in place; then the first part of the next norm

The scale of a norm is one number for each row, so that it can be multiplied in after the product. So a norm has two parts: the
kernel that makes the rows also writes them multiplied by the norm's weight, and the sums of their squares, one for each tile of
columns; the kernel that needs the normed rows multiplies the first, and takes the scale from the second. Sums are in float32.

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

from millstream.engine.native.plain import Norm, Normed, Projection
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
def wait_for_inputs(IS_EARLY: tl.constexpr):
    """Nothing that the kernel before has written may be read before this, and nothing may be written."""
    if IS_EARLY:
        gdc_wait()


@triton.jit
def let_next_start(IS_EARLY: tl.constexpr):
    """The next kernel's programs may start from now on, and wait for this kernel's end."""
    if IS_EARLY:
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
def _finish(
    acc, up, IN_SQUARES, BIAS, OUT, NORM, NORMED, SQUARES, m, n, num, columns, in_tiles, epsilon, K: tl.constexpr,
    IN_TILES: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr, IS_ADDED: tl.constexpr,
    HAS_NEXT: tl.constexpr, IS_GEMMA: tl.constexpr,
):  # fmt: skip
    """All that comes after the product."""
    is_there = (m < num)[:, None] & (n < columns)[None, :]
    at = m.to(tl.int64)[:, None] * columns + n[None, :]
    if IN_TILES > 0:
        i = tl.arange(0, IN_TILES)
        is_square = (m < num)[:, None] & (i < in_tiles)[None, :]
        squares = tl.load(IN_SQUARES + m[:, None] * in_tiles + i[None, :], mask=is_square, other=0.0)
        scale = tl.rsqrt(tl.sum(squares, 1) / K + epsilon)[:, None]
        acc *= scale
        up *= scale
    if HAS_BIAS:
        acc += tl.load(BIAS + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    if GATE > 0:
        if HAS_BIAS:
            up += tl.load(BIAS + columns + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
        acc = _activation(acc, GATE) * up
    if IS_ADDED:
        acc += tl.load(OUT + at, mask=is_there, other=0.0).to(tl.float32)
    rounded = acc.to(OUT.dtype.element_ty)
    tl.store(OUT + at, rounded, mask=is_there)
    if HAS_NEXT:
        x = tl.where(is_there, rounded.to(tl.float32), 0.0)
        weight = tl.load(NORM + n, mask=n < columns, other=0.0).to(tl.float32)
        if IS_GEMMA:
            weight += 1.0
        tl.store(NORMED + at, (x * weight[None, :]).to(OUT.dtype.element_ty), mask=is_there)
        tl.store(SQUARES + m * tl.num_programs(0) + tl.program_id(0), tl.sum(x * x, 1), mask=m < num)


@triton.jit(do_not_specialize=["num"])
def _product(
    X, W, BIAS, IN_SQUARES, OUT, NORM, NORMED, SQUARES, PARTS, COUNTERS, epsilon, num, columns, in_tiles,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
    IN_TILES: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr, IS_ADDED: tl.constexpr,
    HAS_NEXT: tl.constexpr, IS_GEMMA: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr, IS_EVEN: tl.constexpr,
    PRECISION: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """With GATE: of the columns n and columns + n."""
    tile, split = tl.program_id(0), tl.program_id(1)
    m, n, k = tl.arange(0, BM), tile * BN + tl.arange(0, BN), tl.arange(0, BK)
    near = tl.minimum(n, columns - 1)
    begin = split * (K // SPLITS)
    if LINES > 0:
        _prefetch_columns(W, near, begin, begin + K // SPLITS - 1, K, LINES, LINE)
        if GATE > 0:
            _prefetch_columns(W, near + columns, begin, begin + K // SPLITS - 1, K, LINES, LINE)
    wait_for_inputs(IS_EARLY)
    x_at = X + m.to(tl.int64)[:, None] * K + begin + k[None, :]
    w_at = W + near.to(tl.int64)[:, None] * K + begin + k[None, :]
    up_at = W + (near + columns).to(tl.int64)[:, None] * K + begin + k[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    for at in range(0, K // SPLITS, BK):
        x = tl.load(x_at + at) if IS_EVEN else tl.load(x_at + at, mask=(m < num)[:, None], other=0.0)
        acc = tl.dot(x, tl.trans(tl.load(w_at + at)), acc, input_precision=PRECISION)
        if GATE > 0:
            up = tl.dot(x, tl.trans(tl.load(up_at + at)), up, input_precision=PRECISION)
    let_next_start(IS_EARLY)
    if SPLITS == 1:
        _finish(acc, up, IN_SQUARES, BIAS, OUT, NORM, NORMED, SQUARES, m, n, num, columns, in_tiles, epsilon, K, IN_TILES,
                HAS_BIAS, GATE, IS_ADDED, HAS_NEXT, IS_GEMMA)  # fmt: skip
    else:
        is_there = (m < num)[:, None] & (n < columns)[None, :]
        wide = columns * 2 if GATE > 0 else columns
        place = PARTS + m.to(tl.int64)[:, None] * wide + n[None, :]
        tl.store(place + split * (num * wide), acc, mask=is_there)
        if GATE > 0:
            tl.store(place + split * (num * wide) + columns, up, mask=is_there)
        tl.debug_barrier()  # every thread has written before one of them counts
        if tl.atomic_add(COUNTERS + tile, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros([BM, BN], tl.float32)
            total_up = tl.zeros([BM, BN], tl.float32)
            for number in tl.static_range(SPLITS):
                part = place + number * (num * wide)
                total += tl.load(part, mask=is_there, other=0.0, cache_modifier=".cg")
                if GATE > 0:
                    total_up += tl.load(part + columns, mask=is_there, other=0.0, cache_modifier=".cg")
            tl.store(COUNTERS + tile, 0)
            _finish(total, total_up, IN_SQUARES, BIAS, OUT, NORM, NORMED, SQUARES, m, n, num, columns, in_tiles, epsilon, K,
                    IN_TILES, HAS_BIAS, GATE, IS_ADDED, HAS_NEXT, IS_GEMMA)  # fmt: skip


def product(normed: Normed, projection: Projection, tile: Tile | None = None) -> Tensor:
    columns, depth = projection.weight.shape
    out = torch.empty(len(normed.values), columns, dtype=normed.values.dtype, device=normed.values.device)
    tile = tile or tile_for("normed", len(out), depth, columns, out.element_size())
    _launch(normed, projection, out, tile)
    return out


def gated_product(normed: Normed, projection: Projection, activation: str, tile: Tile | None = None) -> Tensor:
    columns, depth = projection.weight.shape[0] // 2, projection.weight.shape[1]
    out = torch.empty(len(normed.values), columns, dtype=normed.values.dtype, device=normed.values.device)
    tile = tile or tile_for("gated", len(out), depth, columns, out.element_size())
    _launch(normed, projection, out, tile, activation=activation)
    return out


def add_product(
    sum_NE: Tensor, x_NF: Tensor, projection: Projection, norm: Norm | None, tile: Tile | None = None
) -> Normed | None:
    num, columns = sum_NE.shape
    tile = tile or tile_for("added", num, x_NF.shape[1], columns, x_NF.element_size())
    found = None
    if norm is not None:
        squares = torch.empty(num, triton.cdiv(columns, tile.columns), dtype=torch.float32, device=sum_NE.device)
        found = Normed(torch.empty_like(sum_NE), squares, norm.epsilon)
    _launch(Normed(x_NF, None, 0.0), projection, sum_NE, tile, is_added=True, norm=norm, found=found)
    return found


def _launch(
    normed: Normed,
    projection: Projection,
    out: Tensor,
    tile: Tile,
    *,
    activation: str | None = None,
    is_added: bool = False,
    norm: Norm | None = None,
    found: Normed | None = None,
) -> None:
    x, (num, columns), depth = normed.values, out.shape, normed.values.shape[1]
    programs = triton.cdiv(columns, tile.columns)
    parts, counters = out, out
    if tile.splits > 1:
        width = columns if activation is None else 2 * columns
        parts = torch.empty(tile.splits, num, width, dtype=torch.float32, device=out.device)
        counters = counters_for(out.device, programs)
    in_tiles = 0 if normed.squares is None else normed.squares.shape[1]
    line = 128 // x.element_size()  # of the cache
    has_prefetch = Switches.has_prefetch and x.is_cuda
    _product[(programs, tile.splits)](
        x, projection.weight, x if projection.bias is None else projection.bias,
        x if normed.squares is None else normed.squares, out, x if norm is None else norm.weight,
        x if found is None else found.values, x if found is None else found.squares, parts, counters,
        normed.epsilon, num, columns, in_tiles,
        K=depth, BM=padded(num), BN=tile.columns, BK=tile.depth, SPLITS=tile.splits,
        IN_TILES=triton.next_power_of_2(in_tiles) if in_tiles else 0, HAS_BIAS=projection.bias is not None,
        GATE=GATES[activation], IS_ADDED=is_added, HAS_NEXT=found is not None,
        IS_GEMMA=norm is not None and norm.is_gemma,
        LINES=triton.next_power_of_2(triton.cdiv(depth // tile.splits, line)) if has_prefetch else 0, LINE=line,
        IS_EVEN=padded(num) == num, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps, num_stages=tile.stages, **early(x),
    )  # fmt: skip
