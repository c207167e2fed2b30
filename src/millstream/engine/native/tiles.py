"""How the work of a decode step is cut into programs of a GPU: one table for all kernels, and rules for shapes that it does not
have. `bench/decode_step.py --tune` measures what could stand here.

No kernel needs its programs to be resident at the same time: a program never waits for another. Where several share a sum, the
one that arrives last adds the parts, always in the same order.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

ProductKind = Literal["normed", "gated", "added"]
MAX_ROWS = 64  # of a product that our kernels compute: with more rows cuBLAS does
NUM_PROCESSORS = 132
MIN_PROGRAMS = 120
MAX_PROGRAM_DEPTH = 768  # of a program, if it can be split
MIN_DEPTH = 16  # what one instruction of a matrix unit multiplies
MAX_SHARED = 160_000  # bytes of a processor's shared memory for a program's loads in flight


class Tile(NamedTuple):
    """A program of a product [rows, depth] x [columns, depth]: it has all rows."""

    columns: int
    depth: int  # at a time
    splits: int  # of the depth, each in a program of its own
    warps: int
    stages: int  # loads in flight


class Attention(NamedTuple):
    """A program of the attention over pages: one row, one key/value head, one split of the tokens."""

    tokens: int  # at a time: fastest where it is the size of a page
    splits: int  # a power of two
    min_span: int  # tokens of a split
    warps: int
    stages: int


class Switches:
    """What the benchmark turns on to see what it is worth."""

    # The programs of a kernel start while those of the kernel before it still run, and wait where they need its results.
    is_early: bool = True
    # Weights, and the first keys and values of a split, are brought to the L2 cache first.
    has_prefetch: bool = False


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
    found = TILES.get((kind, padded(rows), depth, columns)) if itemsize == 2 else None
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
    held = (stages - 1) * (rows + wide * (2 if kind == "gated" else 1)) * itemsize
    sizes = (128, 64, 32, 16)
    at_once = next(size for size in sizes if depth // splits % size == 0 and (size == 16 or size * held <= MAX_SHARED))
    return Tile(wide, at_once, splits, warps=4, stages=stages)


def _can_split(depth: int, splits: int) -> bool:
    return depth % (splits * MIN_DEPTH) == 0 and depth // splits >= 256
