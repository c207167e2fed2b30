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

import threading

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
_latest = threading.local()  # those of the latest step of this thread, by device and size


def counters_for(device: torch.device, num: int) -> Tensor:
    """Zeros, in which programs count their arrivals and which the last one sets back to zero. One tensor for each stream, whose
    kernels follow each other. While a CUDA graph is captured: the tensor of the step that this thread ran before, on whose
    stream the graph is replayed. A tensor made during the capture would be filled with zeros by replays of that graph only."""
    size = max(MIN_COUNTERS, triton.next_power_of_2(num))
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    if stream is None or not torch.cuda.is_current_stream_capturing():
        key = (device, stream), size
        if key not in _counters:  # kept for ever: graphs read it
            _counters[key] = torch.zeros(size, dtype=torch.int32, device=device)
        vars(_latest).setdefault("counters", {})[device, size] = _counters[key]
    return _latest.counters[device, size]


def early(tensor: Tensor) -> dict[str, bool]:
    """Options of a launch: whether its programs start before the kernel before it has ended, and whether those of the next one
    may start at once."""
    is_early = Switches.is_early and tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (9, 0)
    options = {"IS_EARLY": is_early, "IS_EARLIEST": Switches.is_earliest}
    return {**options, "launch_pdl": True} if is_early else options


@triton.jit
def wait_for_inputs(IS_EARLY: tl.constexpr):
    """Nothing that a kernel of this step writes may be read before this, and nothing may be written."""
    if IS_EARLY:
        gdc_wait()


@triton.jit
def let_next_start(IS_EARLY: tl.constexpr):
    """The next kernel's programs may start from now on, and wait for this kernel's end."""
    if IS_EARLY:
        gdc_launch_dependents()


@triton.jit
def _activation(x, GATE: tl.constexpr):
    steep = x if GATE == 1 else 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(steep)


@triton.jit
def _streamed(x_at, w_at, up_at, has_row, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DEPTH: tl.constexpr,
              GATE: tl.constexpr, IS_EVEN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The products: weights and rows of a part of the depth at a time, a few of them on their way."""
    acc, up = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
    for at in range(0, DEPTH, BK):
        x = tl.load(x_at + at) if IS_EVEN else tl.load(x_at + at, mask=has_row[:, None], other=0.0)
        acc = tl.dot(x, tl.trans(tl.load(w_at + at)), acc, input_precision=PRECISION)
        if GATE > 0:
            up = tl.dot(x, tl.trans(tl.load(up_at + at)), up, input_precision=PRECISION)
    return acc, up


@triton.jit
def _weights(at, k, SLICES: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr, DEPTH: tl.constexpr):
    """All weights of a program."""
    weights = ()
    for chunk in tl.static_range(CHUNKS):
        if (chunk + 1) * SLICES * BK <= DEPTH:
            part = tl.load(at + chunk * SLICES * BK)
        else:
            part = tl.load(at + chunk * SLICES * BK, mask=k < DEPTH - chunk * SLICES * BK, other=0.0)
        weights = weights + (part,)  # noqa: RUF005  # what Triton can compile
    return weights


@triton.jit
def _added(parts, SLICES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """The sum over the first dimension, by halves: a warp gets what it adds in one exchange, where `tl.sum` shuffles."""
    total = tl.permute(parts, (1, 2, 0))
    for level in tl.static_range(5):
        if SLICES >> level > 1:
            even, odd = tl.split(tl.reshape(total, [BM, BN, SLICES >> (level + 1), 2]))
            total = even + odd
    return tl.reshape(total, [BM, BN])


@triton.jit
def _with_held(x_at, k, weights, ups, has_row, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SLICES: tl.constexpr,
               CHUNKS: tl.constexpr, DEPTH: tl.constexpr, GATE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The products with weights that the program has. Each warp multiplies a slice of the depth, and the slices are added."""
    rows = ()
    for chunk in tl.static_range(CHUNKS):
        is_there = has_row[None, :, None] & (k < DEPTH - chunk * SLICES * BK)
        rows = rows + (tl.load(x_at + chunk * SLICES * BK, mask=is_there, other=0.0),)  # noqa: RUF005
    acc, up = tl.zeros([SLICES, BM, BN], tl.float32), tl.zeros([SLICES, BM, BN], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        acc = tl.dot(rows[chunk], tl.trans(weights[chunk], (0, 2, 1)), acc, input_precision=PRECISION)
        if GATE > 0:
            up = tl.dot(rows[chunk], tl.trans(ups[chunk], (0, 2, 1)), up, input_precision=PRECISION)
    return _added(acc, SLICES, BM, BN), _added(up, SLICES, BM, BN)


@triton.jit
def _parameters(BIAS, NORM, n, columns, BN: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr,
                HAS_NEXT: tl.constexpr, IS_GEMMA: tl.constexpr):  # fmt: skip
    """Of the program's columns: both biases, and the weight of the next norm."""
    bias, up_bias, norm = tl.zeros([BN], tl.float32), tl.zeros([BN], tl.float32), tl.zeros([BN], tl.float32)
    if HAS_BIAS:
        bias = tl.load(BIAS + n, mask=n < columns, other=0.0).to(tl.float32)
        if GATE > 0:
            up_bias = tl.load(BIAS + columns + n, mask=n < columns, other=0.0).to(tl.float32)
    if HAS_NEXT:
        norm = tl.load(NORM + n, mask=n < columns, other=0.0).to(tl.float32) + (1.0 if IS_GEMMA else 0.0)
    return bias, up_bias, norm


@triton.jit
def _inputs(IN_SQUARES, OUT, m, n, num, columns, in_tiles, BM: tl.constexpr, BN: tl.constexpr, IN_TILES: tl.constexpr,
            IS_ADDED: tl.constexpr):  # fmt: skip
    """What the product needs besides its rows: their squares, and what it is added to."""
    squares, before = tl.zeros([BM, 1], tl.float32), tl.zeros([BM, BN], tl.float32)
    if IN_TILES > 0:
        i = tl.arange(0, IN_TILES)
        is_square = (m < num)[:, None] & (i < in_tiles)[None, :]
        squares = tl.load(IN_SQUARES + m[:, None] * in_tiles + i[None, :], mask=is_square, other=0.0)
    if IS_ADDED:
        is_there = (m < num)[:, None] & (n < columns)[None, :]
        at = OUT + m.to(tl.int64)[:, None] * columns + n[None, :]
        before = tl.load(at, mask=is_there, other=0.0).to(tl.float32)
    return squares, before


@triton.jit
def _finish(
    acc, up, loaded, IN_SQUARES, BIAS, OUT, NORM, NORMED, SQUARES, m, n, num, columns, in_tiles, epsilon,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SLICES: tl.constexpr, IN_TILES: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATE: tl.constexpr, IS_ADDED: tl.constexpr, HAS_NEXT: tl.constexpr, IS_GEMMA: tl.constexpr,
):  # fmt: skip
    """All that comes after the product. `loaded`: what a program that holds its weights has read before."""
    if SLICES == 0:
        parameters = _parameters(BIAS, NORM, n, columns, BN, HAS_BIAS, GATE, HAS_NEXT, IS_GEMMA)
        loaded = parameters + _inputs(IN_SQUARES, OUT, m, n, num, columns, in_tiles, BM, BN, IN_TILES, IS_ADDED)
    bias, up_bias, norm, squares, before = loaded
    is_there = (m < num)[:, None] & (n < columns)[None, :]
    at = m.to(tl.int64)[:, None] * columns + n[None, :]
    if IN_TILES > 0:
        scale = tl.rsqrt(tl.sum(squares, 1) / K + epsilon)[:, None]
        acc *= scale
        up *= scale
    if HAS_BIAS:
        acc += bias[None, :]
        up += up_bias[None, :]
    if GATE > 0:
        acc = _activation(acc, GATE) * up
    if IS_ADDED:
        acc += before
    rounded = acc.to(OUT.dtype.element_ty)
    tl.store(OUT + at, rounded, mask=is_there)
    if HAS_NEXT:
        x = tl.where(is_there, rounded.to(tl.float32), 0.0)
        tl.store(NORMED + at, (x * norm[None, :]).to(OUT.dtype.element_ty), mask=is_there)
        tl.store(SQUARES + m * tl.num_programs(0) + tl.program_id(0), tl.sum(x * x, 1), mask=m < num)


@triton.jit
def _count(acc, up, place, COUNTER, is_there, split, num, wide, columns, GATE: tl.constexpr):
    """Write a program's part. How many have written theirs before."""
    tl.store(place + split * (num * wide), acc, mask=is_there)
    if GATE > 0:
        tl.store(place + split * (num * wide) + columns, up, mask=is_there)
    tl.debug_barrier()  # every thread has written before one of them counts
    return tl.atomic_add(COUNTER, 1, sem="acq_rel")


@triton.jit
def _sums(
    place, is_there, num, wide, columns, BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, GATE: tl.constexpr
):
    """Of all parts, in the order of the splits."""
    total, total_up = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
    for number in tl.static_range(SPLITS):
        part = place + number * (num * wide)
        total += tl.load(part, mask=is_there, other=0.0, cache_modifier=".cg")
        if GATE > 0:
            total_up += tl.load(part + columns, mask=is_there, other=0.0, cache_modifier=".cg")
    return total, total_up


@triton.jit(do_not_specialize=["num"])
def _product(
    X, W, BIAS, IN_SQUARES, OUT, NORM, NORMED, SQUARES, PARTS, COUNTERS, epsilon, num, columns, in_tiles,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SLICES: tl.constexpr, SPLITS: tl.constexpr,
    IN_TILES: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr, IS_ADDED: tl.constexpr,
    HAS_NEXT: tl.constexpr, IS_GEMMA: tl.constexpr, IS_EVEN: tl.constexpr, PRECISION: tl.constexpr,
    IS_EARLY: tl.constexpr, IS_EARLIEST: tl.constexpr,
):  # fmt: skip
    """With GATE: of the columns n and columns + n."""
    let_next_start(IS_EARLY and IS_EARLIEST)
    tile, split = tl.program_id(0), tl.program_id(1)
    DEPTH: tl.constexpr = K // SPLITS
    m, n = tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    has_row, near = m < num, tl.minimum(n, columns - 1).to(tl.int64)
    loaded = ()
    if SLICES > 0:
        CHUNKS: tl.constexpr = (DEPTH + SLICES * BK - 1) // (SLICES * BK)
        k = tl.arange(0, SLICES)[:, None, None] * BK + tl.arange(0, BK)[None, None, :]
        x_at = X + m.to(tl.int64)[None, :, None] * K + split * DEPTH + k
        weights = _weights(W + near[None, :, None] * K + split * DEPTH + k, k, SLICES, BK, CHUNKS, DEPTH)
        ups = weights
        if GATE > 0:
            ups = _weights(W + (near + columns)[None, :, None] * K + split * DEPTH + k, k, SLICES, BK, CHUNKS, DEPTH)
        loaded = _parameters(BIAS, NORM, n, columns, BN, HAS_BIAS, GATE, HAS_NEXT, IS_GEMMA)
        wait_for_inputs(IS_EARLY)
        loaded = loaded + _inputs(IN_SQUARES, OUT, m, n, num, columns, in_tiles, BM, BN, IN_TILES, IS_ADDED)
        acc, up = _with_held(x_at, k, weights, ups, has_row, BM, BN, BK, SLICES, CHUNKS, DEPTH, GATE, PRECISION)
    else:
        wait_for_inputs(IS_EARLY)
        k = tl.arange(0, BK)[None, :] + split * DEPTH
        x_at, w_at = X + m.to(tl.int64)[:, None] * K + k, W + near[:, None] * K + k
        up_at = W + (near + columns)[:, None] * K + k
        acc, up = _streamed(x_at, w_at, up_at, has_row, BM, BN, BK, DEPTH, GATE, IS_EVEN, PRECISION)
    let_next_start(IS_EARLY and not IS_EARLIEST)
    if SPLITS == 1:
        _finish(acc, up, loaded, IN_SQUARES, BIAS, OUT, NORM, NORMED, SQUARES, m, n, num, columns, in_tiles, epsilon,
                K, BM, BN, SLICES, IN_TILES, HAS_BIAS, GATE, IS_ADDED, HAS_NEXT, IS_GEMMA)  # fmt: skip
    else:
        is_there = has_row[:, None] & (n < columns)[None, :]
        wide = columns * 2 if GATE > 0 else columns
        place = PARTS + m.to(tl.int64)[:, None] * wide + n[None, :]
        if _count(acc, up, place, COUNTERS + tile, is_there, split, num, wide, columns, GATE) == SPLITS - 1:
            acc, up = _sums(place, is_there, num, wide, columns, BM, BN, SPLITS, GATE)
            tl.store(COUNTERS + tile, 0)
            _finish(acc, up, loaded, IN_SQUARES, BIAS, OUT, NORM, NORMED, SQUARES, m, n, num, columns, in_tiles, epsilon,
                    K, BM, BN, SLICES, IN_TILES, HAS_BIAS, GATE, IS_ADDED, HAS_NEXT, IS_GEMMA)  # fmt: skip


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
    _product[(programs, tile.splits)](
        x, projection.weight, x if projection.bias is None else projection.bias,
        x if normed.squares is None else normed.squares, out, x if norm is None else norm.weight,
        x if found is None else found.values, x if found is None else found.squares, parts, counters,
        normed.epsilon, num, columns, in_tiles,
        K=depth, BM=padded(num), BN=tile.columns, BK=tile.depth, SLICES=tile.slices, SPLITS=tile.splits,
        IN_TILES=triton.next_power_of_2(in_tiles) if in_tiles else 0, HAS_BIAS=projection.bias is not None,
        GATE=GATES[activation], IS_ADDED=is_added, HAS_NEXT=found is not None,
        IS_GEMMA=norm is not None and norm.is_gemma,
        IS_EVEN=padded(num) == num, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps, num_stages=tile.stages, **early(x),
    )  # fmt: skip
