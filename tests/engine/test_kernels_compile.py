"""The kernels of a decode step compile for a Hopper GPU on a machine without one (`make test-kernels`). What the compiler makes of
them is read: no register is spilled, and before a kernel waits for its inputs it reads what no kernel of the step writes."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from millstream.engine.native.tiles import ProductKind, Switches, Tile, tile_for

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the kernels are interpreted")

WAIT = "ACQBULK"  # for the kernel before, in the GPU's own instructions
REGISTERS, SHARED_BYTES = 65_536, 227 << 10  # of a processor
SHAPES: list[tuple[ProductKind, int, int]] = [  # of a 474M Qwen3, of SmolLM2-135M, and one of an 8B Llama
    ("normed", 1024, 4096), ("added", 2048, 1024), ("gated", 1024, 3072), ("added", 3072, 1024),
    ("normed", 576, 960), ("added", 576, 576), ("gated", 576, 1536), ("added", 1536, 576),
    ("gated", 4096, 14_336),
]  # fmt: skip


class Compiled:
    """Instructions of a kernel, and what a program needs."""

    def __init__(self, kernel: Any, folder: Path, warps: int) -> None:
        from triton import knobs

        binary = folder / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        tools = [str(tool.path) for tool in (knobs.nvidia.nvdisasm, knobs.nvidia.cuobjdump)]
        self.instructions = _output([tools[0], "-c", str(binary)]).splitlines()
        found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", _output([tools[1], "-res-usage", str(binary)]))
        assert found is not None
        self.registers = 32 * warps * -(-int(found[1]) // 8) * 8
        self.spilled_bytes = int(found[2]) + int(found[3])
        self.shared_bytes = kernel.metadata.shared

    def loads_before_the_wait(self) -> int:
        """Of 16 bytes, from the GPU's memory: page numbers and single weights are smaller."""
        (wait,) = (number for number, line in enumerate(self.instructions) if WAIT in line)
        return sum(bool(re.search(r"LDG\.E\.128|LDGSTS.*\.128", line)) for line in self.instructions[:wait])


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, object], folder: Path, *, warps: int, stages: int
) -> Compiled:
    """`types`: of the arguments that are no constants. Pointers, and what ends in `columns` or `stride`, are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = [one.name for one in kernel.params]
    signature = {name: "constexpr" if name in constants else types.get(name, "*bf16") for name in names}
    even = [n for n in names if signature[n].startswith("*") or n.endswith(("columns", "stride", "in_tiles"))]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in even},
    )
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": True}
    return Compiled(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options), folder, warps)


def product(kind: ProductKind, depth: int, tile: Tile, folder: Path, *, rows: int, has_bias: bool) -> Compiled:
    from millstream.engine.native import layer_kernels

    types = {"PARTS": "*fp32", "IN_SQUARES": "*fp32", "SQUARES": "*fp32", "COUNTERS": "*i32", "epsilon": "fp32"}
    types |= dict.fromkeys(("num", "columns", "in_tiles"), "i32")
    tiles_before = -(-depth // tile_for("added", rows, depth, depth).columns)
    constants = {
        "K": depth, "BM": rows, "BN": tile.columns, "BK": tile.depth, "SLICES": tile.slices, "SPLITS": tile.splits,
        "IN_TILES": 0 if kind == "added" else 1 << (tiles_before - 1).bit_length(), "HAS_BIAS": has_bias,
        "GATE": int(kind == "gated"), "IS_ADDED": kind == "added", "HAS_NEXT": kind == "added", "IS_GEMMA": False,
        "IS_EVEN": False, "PRECISION": "tf32", "IS_EARLY": True, "IS_EARLIEST": tile.slices > 0,
    }  # fmt: skip
    kernel = layer_kernels._product
    return compiled(kernel, types, constants, folder, warps=tile.warps, stages=tile.stages)


@pytest.mark.parametrize("holds_weights", [False, True])
@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize(("kind", "depth", "columns"), SHAPES)
def test_products_spill_nothing_and_those_that_hold_their_weights_read_these_alone_before_they_wait(
    kind: ProductKind,
    depth: int,
    columns: int,
    rows: int,
    holds_weights: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Switches, "holds_weights", holds_weights)
    tile = tile_for(kind, rows, depth, columns)
    is_held = tile.slices > 0
    assert is_held == holds_weights or rows > 16 or columns == 14_336, "the 474M model and SmolLM2, up to 16 rows"
    found = product(kind, depth, tile, tmp_path, rows=rows, has_bias=depth == 576)
    assert found.spilled_bytes == 0 and found.shared_bytes < SHARED_BYTES
    if not is_held:
        assert found.loads_before_the_wait() == 0
        return
    assert 2 * found.registers <= REGISTERS and 2 * found.shared_bytes <= SHARED_BYTES, "the next kernel's can begin"
    part = tile.slices * tile.depth
    weight_bytes = 2 * tile.columns * (2 if kind == "gated" else 1) * -(-depth // tile.splits // part) * part
    assert found.loads_before_the_wait() == weight_bytes // (16 * 32 * tile.warps), "and no row, square or sum"


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(16, 8, 128), (9, 3, 64)])
def test_attention_spills_nothing(heads: int, key_heads: int, dim: int, is_new: bool, tmp_path: Path) -> None:
    from millstream.engine.native import attention_kernels

    types = {
        "PARTS": "*fp32",
        "STATES": "*fp32",
        "epsilon": "fp32",
        "scale": "fp32",
        "softcap": "fp32",
        "window": "i32",
    }
    types |= dict.fromkeys(("COUNTERS", "TABLE", "SLOTS", "POSITIONS"), "*i32")
    types |= dict.fromkeys(("table_stride", "page_stride"), "i32")
    constants = {
        "H": heads, "KH": key_heads, "G": heads // key_heads, "GP": 16, "D": dim, "DP": dim, "S": 32, "T": 32,
        "SPLITS": 4, "MIN_SPAN": 128, "HAS_WINDOW": False, "HAS_CAP": False, "IS_NEW": is_new, "HAS_NORM": is_new,
        "IS_GEMMA": False, "PRECISION": "tf32", "IS_EARLY": True, "IS_EARLIEST": True,
    }  # fmt: skip
    found = compiled(attention_kernels._attend, types, constants, tmp_path, warps=4, stages=4)
    assert found.spilled_bytes == 0
