"""How the work of a decode step is cut into programs of a GPU: one table for all kernels, and rules for shapes that it does not
have. `bench/decode_step.py --tune` measures what could stand here.

No kernel needs its programs to be resident at the same time: a program never waits for another. Where several share a sum, the
one that arrives last adds the parts, always in the same order.
"""

from __future__ import annotations

import itertools
from typing import Literal, NamedTuple

ProductKind = Literal["normed", "gated", "added"]
MAX_ROWS = 64  # of a product that our kernels compute: with more rows cuBLAS does
NUM_PROCESSORS = 132
MIN_PROGRAMS = 120
MAX_PROGRAM_DEPTH = 768  # of a program, if it can be split
MIN_DEPTH = 16  # what one instruction of a matrix unit multiplies
MAX_SHARED = 160_000  # bytes of a processor's shared memory for a program's loads in flight
# Of programs that hold their weights: what leaves room for a second one on a processor, so that the next kernel's can begin.
HELD_WARPS = 8
MAX_WEIGHT_BYTES, MAX_ROW_BYTES, MAX_PART_BYTES = 64 << 10, 96 << 10, 96 << 10  # the last: of one part of the depth
MAX_HELD_ROWS, MAX_HELD_SUMS = 32, 1024  # every warp of such a program has sums of all of its rows and columns
MIN_HELD_PROGRAMS, MAX_HELD_PROGRAMS = 96, 2 * NUM_PROCESSORS  # all of them are there at once
PART_COST = 256  # of a part of the depth, which waits for the part before: numbers that could be read meanwhile


class Tile(NamedTuple):
    """A program of a product [rows, depth] x [columns, depth]: it has all rows."""

    columns: int
    depth: int  # at a time
    splits: int  # of the depth, each in a program of its own
    warps: int
    stages: int  # loads in flight
    # 0: weights are read as they are multiplied. Else the program holds its weights: it reads all of them before its rows are
    # there, and each of its warps, of which there are as many, multiplies a slice of the depth (`depth` at a time).
    slices: int = 0


class Attention(NamedTuple):
    """A program of the attention over pages: one row, one key/value head, one split of the tokens."""

    tokens: int  # at a time: fastest where it is the size of a page
    splits: int  # a power of two
    min_span: int  # tokens of a split
    warps: int
    stages: int


class Switches:
    """What the benchmark turns on or off to see what it is worth."""

    # The programs of a kernel start while those of the kernel before it still run, and wait where they need its results.
    is_early: bool = True
    # They start as soon as those of the kernel before have started, and not when those have read what they need.
    is_earliest: bool = False
    # Programs of products read all of their weights before their rows are there, where they can hold them.
    holds_weights: bool = False


# (kind, rows rounded up to 16, 32 or 64, depth, columns) -> what was best on an H200
TILES: dict[tuple[ProductKind, int, int, int], Tile] = {
    ("added", 16, 2048, 1024): Tile(columns=32, depth=64, splits=4, warps=4, stages=5),
    ("added", 16, 3072, 1024): Tile(columns=32, depth=128, splits=4, warps=4, stages=5),
}
# rows x key/value heads, at most -> about as many programs as an H200 can have at once; not tuned yet
ATTENTION: dict[int, Attention] = {
    32: Attention(tokens=32, splits=16, min_span=64, warps=4, stages=4),
    64: Attention(tokens=32, splits=8, min_span=64, warps=4, stages=4),
    128: Attention(tokens=32, splits=4, min_span=128, warps=4, stages=4),
    1 << 62: Attention(tokens=32, splits=4, min_span=512, warps=4, stages=4),
}


def padded(rows: int) -> int:
    """16, 32 or 64."""
    return max(16, 1 << (rows - 1).bit_length())


def fits(depth: int) -> bool:
    """Whether a product of this depth can be computed by our kernels."""
    return depth % MIN_DEPTH == 0


def tile_for(kind: ProductKind, rows: int, depth: int, columns: int, itemsize: int = 2) -> Tile:
    found = None
    if itemsize == 2 and Switches.holds_weights:
        found = _holding(kind, padded(rows), depth, columns)
    if itemsize == 2 and found is None:
        found = TILES.get((kind, padded(rows), depth, columns))
    return found or _by_rule(kind, padded(rows), depth, columns, itemsize)


def attention_for(programs: int, token_bytes: int = 512) -> Attention:
    """`programs`: rows x key/value heads. `token_bytes`: of the key and the value of one head."""
    found = next(value for most, value in ATTENTION.items() if programs <= most)
    while (found.stages - 1) * found.tokens * token_bytes > MAX_SHARED:
        found = (
            found._replace(stages=found.stages - 1) if found.stages > 2 else found._replace(tokens=found.tokens // 2)
        )
    return found


def _by_rule(kind: ProductKind, rows: int, depth: int, columns: int, itemsize: int) -> Tile:
    """About as many programs as processors, or more, none of which has a long way to go."""
    wide = 64 if columns >= 64 * NUM_PROCESSORS else 32
    splits = 1
    while (-(-columns // wide) * splits < MIN_PROGRAMS or depth // splits > MAX_PROGRAM_DEPTH) and _can_split(
        depth, 2 * splits
    ):
        splits *= 2
    stages = 4 if rows < 64 else 3
    in_flight = (stages - 1) * (rows + wide * (2 if kind == "gated" else 1)) * itemsize
    sizes = (128, 64, 32, 16)
    at_once = next(
        size for size in sizes if depth // splits % size == 0 and (size == 16 or size * in_flight <= MAX_SHARED)
    )
    return Tile(wide, at_once, splits, warps=4, stages=stages)


def holding_tile(kind: ProductKind, rows: int, depth: int, width: int, splits: int) -> Tile | None:
    """Of programs with `width` columns that hold their weights, in 16 bits, where they can."""
    sizes = (256, 128, 64, 32, 16)
    parts = {size: -(-depth // (splits * HELD_WARPS * size)) for size in sizes}
    at_once = min(sizes, key=lambda size: (HELD_WARPS * size + PART_COST) * parts[size])
    part = 2 * HELD_WARPS * at_once  # bytes of a row
    wide = width * (2 if kind == "gated" else 1)
    fits_in = (
        rows * wide <= MAX_HELD_SUMS
        and wide * part * parts[at_once] <= MAX_WEIGHT_BYTES
        and rows * part * parts[at_once] <= MAX_ROW_BYTES
        and (wide + rows) * part <= MAX_PART_BYTES
    )
    if depth % splits or rows > MAX_HELD_ROWS or not fits_in:
        return None
    return Tile(width, at_once, splits, HELD_WARPS, stages=1, slices=HELD_WARPS)


def _holding(kind: ProductKind, rows: int, depth: int, columns: int) -> Tile | None:
    """The fewest splits that are possible, and with them the widest programs of which there are enough."""
    for splits, width in itertools.product((1, 2, 3, 4, 6, 8), (64, 32, 16, 8)):
        programs = -(-columns // width) * splits
        is_enough = width == 8 or programs >= MIN_HELD_PROGRAMS
        tile = holding_tile(kind, rows, depth, width, splits)
        if tile is not None and is_enough and programs <= MAX_HELD_PROGRAMS:
            return tile
    return None


def _can_split(depth: int, splits: int) -> bool:
    return depth % (splits * MIN_DEPTH) == 0 and depth // splits >= 256
