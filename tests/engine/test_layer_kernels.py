"""The kernels of a decode step give what their plain twins give: on a GPU (`make test-gpu`), and in Triton's interpreter on a CPU
(`TRITON_INTERPRET=1 pytest tests/engine/test_layer_kernels.py`, where Triton is installed)."""

from __future__ import annotations

import itertools
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from millstream.engine.native import tiles
from millstream.engine.native.plain import PLAIN, Heads, Norm, Normed, Pages, Projection
from millstream.engine.native.tiles import (
    MAX_ROW_BYTES,
    MAX_SHARED,
    MAX_WEIGHT_BYTES,
    Attention,
    Tile,
    attention_for,
    fits,
    holding_tile,
    tile_for,
)
from millstream.model.attention import Rule

PAGE = 16
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 0.03}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# The interpreter takes a second for a few programs: every value of every option, and not every combination.
ROWS_AND_OPTIONS = pytest.mark.parametrize(
    ("num", "splits", "has_bias", "is_gemma"),
    [(1, 1, False, False), (3, 2, True, False), (16, 2, False, True), (17, 1, True, True), (64, 2, True, False)],
)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    pytest.importorskip("triton")
    has_gpu = torch.cuda.is_available()
    if has_gpu != (request.param == "cuda"):
        pytest.skip("torch sees no GPU here" if request.param == "cuda" else "the kernels are compiled here")
    if not has_gpu and os.environ.get("TRITON_INTERPRET") != "1":  # Triton reads it when it is imported
        pytest.skip("TRITON_INTERPRET=1 is not set")
    if not has_gpu:
        _complete_interpreter(monkeypatch)
    torch.manual_seed(0)
    return torch.device("cuda" if has_gpu else "cpu")


def _complete_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Triton's interpreter leaves out: every scalar is an array with one element, of which numpy 2.4 makes no int; and
    numbers in bfloat16 are multiplied as if they were integers."""
    from triton import language
    from triton.runtime import interpreter

    patch_before, dot_before = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch(tensor: Any, scope: Any) -> None:
        patch_before(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def wide(handle: Any) -> Any:
        if handle.dtype != language.bfloat16:
            return handle
        data = interpreter._convert_float(handle.data, language.bfloat16, language.float32, None)
        return interpreter.TensorHandle(data.view("float32"), language.float32)

    def dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot_before(self, wide(a), wide(b), *others)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def noise(*shape: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(shape)).to(device, dtype)


def are_close(found: torch.Tensor, expected: torch.Tensor, bound: float) -> bool:
    return torch.allclose(found.float(), expected.float(), atol=bound, rtol=bound)


def exact(value: Any) -> Any:
    """The same numbers in float32."""
    if isinstance(value, tuple):
        return type(value)(*(exact(one) for one in value))  # type: ignore[call-arg]
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


# ---- attention -----------------------------------------------------------------------------------------------------------


def pages_at(
    positions: list[int], *, heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Pages, Pages]:
    """Of these newest tokens, twice: one for the kernel, one for its twin."""
    num, width = len(positions), max(positions) // PAGE + 1
    keys, values = (noise(1 + num * width, heads, PAGE, dim, dtype=dtype, device=device) for _ in range(2))
    table = 1 + torch.randperm(num * width).int().view(num, width).to(device)
    slots = torch.randperm(num).int().to(device)
    pages = Pages(keys, values, table, slots, torch.tensor(positions, dtype=torch.int32, device=device))
    return pages, pages._replace(keys=keys.clone(), values=values.clone())


# The first token of a request, the last and the first of a page and of a split, and many splits.
POSITIONS = [0, PAGE - 1, PAGE, 31, 32, 100]
# Tiles of one page, and of two.
CUTS = [
    Attention(16, splits=4, min_span=16, warps=4, stages=3),
    Attention(32, splits=2, min_span=32, warps=4, stages=3),
]


@DTYPES
@pytest.mark.parametrize(
    ("norm", "rule", "cut"),
    [
        ("none", Rule(None, None, None), CUTS[0]),
        ("llama", Rule(0.2, 40, None), CUTS[0]),
        ("gemma", Rule(None, None, 5.0), CUTS[1]),
        ("llama", Rule(0.3, 7, 20.0), CUTS[1]),
    ],
)
def test_attention_with_new_keys_is_that_of_its_plain_twin_and_writes_the_same_pages(
    device: torch.device, dtype: torch.dtype, norm: str, rule: Rule, cut: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    from millstream.engine.native.kernels import KERNELS

    monkeypatch.setattr(tiles, "ATTENTION", {1 << 62: cut})
    num, dim = len(POSITIONS), 32
    pages, twin = pages_at(POSITIONS, heads=2, dim=dim, dtype=dtype, device=device)
    qkv = noise(num, (6 + 4) * dim, dtype=dtype, device=device)
    cos, sin = (noise(num, dim, dtype=dtype, device=device) for _ in range(2))
    weights = [None, None] if norm == "none" else [noise(dim, dtype=dtype, device=device) for _ in range(2)]
    heads = Heads(6, 2, dim, *weights, 1e-6, is_gemma=norm == "gemma")
    found = KERNELS.attend_new(qkv, cos, sin, heads, pages, rule)
    expected = PLAIN.attend_new(qkv, cos, sin, heads, twin, rule)
    bound = 1e-4 if dtype == torch.float32 else 0.1
    assert are_close(pages.keys, twin.keys, bound) and torch.equal(pages.values, twin.values)
    assert are_close(found, expected, bound)


@DTYPES
@pytest.mark.parametrize(
    ("num", "heads", "dim"), [(1, (2, 1), 32), (3, (3, 1), 32), (17, (2, 2), 64), (70, (4, 2), 32)]
)
def test_attention_repeats_bit_for_bit_whatever_the_number_of_splits(
    device: torch.device, dtype: torch.dtype, num: int, heads: tuple[int, int], dim: int
) -> None:
    from millstream.engine.native.kernels import KERNELS

    if device.type == "cpu" and num > 3:
        pytest.skip("too slow in the interpreter")
    positions = [(37 * number) % 150 for number in range(num - 1)] + [300]
    pages, twin = pages_at(positions, heads=heads[1], dim=dim, dtype=dtype, device=device)
    qkv = noise(num, (heads[0] + 2 * heads[1]) * dim, dtype=dtype, device=device)
    cos, sin = (noise(num, dim, dtype=dtype, device=device) for _ in range(2))
    shape, rule = Heads(*heads, dim, None, None, 0.0, is_gemma=False), Rule(None, None, None)
    first = KERNELS.attend_new(qkv, cos, sin, shape, pages, rule)
    again = KERNELS.attend_new(qkv, cos, sin, shape, pages, rule)
    assert torch.equal(first, again), "the counters are at zero after each call, and the order of the sums is fixed"
    assert are_close(first, PLAIN.attend_new(qkv, cos, sin, shape, twin, rule), 1e-4 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("dim", [8, 22, 80])
def test_attention_over_heads_of_any_dimension_is_that_of_its_plain_twin(
    device: torch.device, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from millstream.engine.native.kernels import KERNELS

    monkeypatch.setattr(tiles, "ATTENTION", {1 << 62: CUTS[0]})
    pages, _ = pages_at(POSITIONS, heads=2, dim=dim, dtype=torch.float32, device=device)
    query = noise(len(POSITIONS), 6, dim, dtype=torch.float32, device=device)
    for rule in (Rule(None, None, None), Rule(0.2, 9, None)):
        expected = PLAIN.decode_attention(query, pages, rule)
        assert are_close(KERNELS.decode_attention(query, pages, rule), expected, 1e-4)


def test_heads_that_are_too_small_for_a_matrix_unit_are_written_and_attended_to(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from millstream.engine.native.kernels import KERNELS

    monkeypatch.setattr(tiles, "ATTENTION", {1 << 62: CUTS[0]})
    num, dim = len(POSITIONS), 8
    pages, twin = pages_at(POSITIONS, heads=2, dim=dim, dtype=torch.float32, device=device)
    qkv = noise(num, 8 * dim, dtype=torch.float32, device=device)
    cos, sin = (noise(num, dim, dtype=torch.float32, device=device) for _ in range(2))
    heads, rule = Heads(4, 2, dim, None, None, 0.0, is_gemma=False), Rule(None, None, None)
    found = KERNELS.attend_new(qkv, cos, sin, heads, pages, rule)
    assert are_close(found, PLAIN.attend_new(qkv, cos, sin, heads, twin, rule), 1e-4)
    assert torch.equal(pages.keys, twin.keys) or are_close(pages.keys, twin.keys, 1e-5)


def test_a_recorded_step_counts_in_what_the_step_before_it_had_not_in_what_its_replays_would_make(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from millstream.engine.native import layer_kernels

    now = {"stream": 1, "is_recording": False}
    cuda = SimpleNamespace(
        current_stream=lambda device: SimpleNamespace(cuda_stream=now["stream"]),
        is_current_stream_capturing=lambda: now["is_recording"],
    )
    zeros = lambda size, dtype, device: torch.zeros(size, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(layer_kernels, "torch", SimpleNamespace(cuda=cuda, zeros=zeros, int32=torch.int32))
    monkeypatch.setattr(layer_kernels, "_counters", {})
    gpu = torch.device("cuda")
    first = layer_kernels.counters_for(gpu, 8)
    now.update(stream=2, is_recording=True)
    assert layer_kernels.counters_for(gpu, 8) is first
    now.update(is_recording=False)
    other = layer_kernels.counters_for(gpu, 8)
    assert other is not first, "kernels of two streams run at the same time"
    now.update(stream=1)
    assert layer_kernels.counters_for(gpu, 8) is first and layer_kernels.counters_for(gpu, 1 << 15) is not first


# ---- products ------------------------------------------------------------------------------------------------------------


def projection(columns: int, depth: int, *, has_bias: bool, dtype: torch.dtype, device: torch.device) -> Projection:
    weight = noise(columns, depth, dtype=dtype, device=device, scale=depth**-0.5)
    return Projection(weight, noise(columns, dtype=dtype, device=device) if has_bias else None)


def norm_of(depth: int, *, is_gemma: bool, dtype: torch.dtype, device: torch.device) -> Norm:
    return Norm(noise(depth, dtype=dtype, device=device), 1e-5, is_gemma)


def unscaled(x: torch.Tensor, norm: Norm) -> Normed:
    """What a kernel hands to the next one: rows without the scale of their norm, and the squares of three tiles of columns."""
    weight = norm.weight.float() + (1 if norm.is_gemma else 0)
    squares = [part.float().pow(2).sum(1) for part in x.tensor_split(3, dim=1)]
    return Normed((x.float() * weight).to(x.dtype), torch.stack(squares, 1), norm.epsilon)


@DTYPES
@ROWS_AND_OPTIONS
def test_a_product_of_normed_rows_is_that_of_its_plain_twin(
    device: torch.device, dtype: torch.dtype, num: int, splits: int, has_bias: bool, is_gemma: bool
) -> None:
    from millstream.engine.native import layer_kernels

    depth, columns = 192, 80
    x = noise(num, depth, dtype=dtype, device=device, scale=30)
    norm = norm_of(depth, is_gemma=is_gemma, dtype=dtype, device=device)
    weights = projection(columns, depth, has_bias=has_bias, dtype=dtype, device=device)
    expected = PLAIN.product(PLAIN.normed(exact(x), exact(norm)), exact(weights))
    for tile in (Tile(32, 32, splits, warps=4, stages=3), Tile(32, 16, splits, warps=4, stages=1, slices=4)):
        found = layer_kernels.product(unscaled(x, norm), weights, tile)
        assert found.dtype == dtype and are_close(found, expected, BOUNDS[dtype])
    scaled = PLAIN.normed(x, norm)  # of the first layer: its scale is in it
    assert are_close(layer_kernels.product(scaled, weights), expected, BOUNDS[dtype])


@DTYPES
@ROWS_AND_OPTIONS
@pytest.mark.parametrize(("activation", "has_norm"), [("silu", True), ("gelu_tanh", False)])
def test_gate_and_up_are_those_of_their_plain_twin(
    device: torch.device,
    dtype: torch.dtype,
    num: int,
    splits: int,
    has_bias: bool,
    is_gemma: bool,
    activation: str,
    has_norm: bool,
) -> None:
    from millstream.engine.native import layer_kernels

    depth, columns = 128, 72
    x = noise(num, depth, dtype=dtype, device=device)
    norm = norm_of(depth, is_gemma=is_gemma, dtype=dtype, device=device)
    weights = projection(2 * columns, depth, has_bias=has_bias, dtype=dtype, device=device)
    rows, exact_rows = Normed(x, None, 0.0), Normed(exact(x), None, 0.0)
    if has_norm:
        rows, exact_rows = unscaled(x, norm), PLAIN.normed(exact(x), exact(norm))
    expected = PLAIN.gated_product(exact_rows, exact(weights), activation)
    for tile in (Tile(32, 64, splits, warps=4, stages=3), Tile(16, 32, splits, warps=2, stages=1, slices=2)):
        found = layer_kernels.gated_product(rows, weights, activation, tile)
        assert found.dtype == dtype and are_close(found, expected, BOUNDS[dtype])


@DTYPES
@ROWS_AND_OPTIONS
@pytest.mark.parametrize("slices", [0, 8])
def test_an_added_product_and_the_next_norm_are_those_of_the_plain_twin_and_repeat_bit_for_bit(
    device: torch.device, dtype: torch.dtype, num: int, splits: int, has_bias: bool, is_gemma: bool, slices: int
) -> None:
    from millstream.engine.native import layer_kernels

    depth, columns = 256, 80
    before, x = noise(num, columns, dtype=dtype, device=device), noise(num, depth, dtype=dtype, device=device)
    weights = projection(columns, depth, has_bias=has_bias, dtype=dtype, device=device)
    norm = norm_of(columns, is_gemma=is_gemma, dtype=dtype, device=device)
    expected, found, again = exact(before).clone(), before.clone(), before.clone()
    tile = Tile(columns=32, depth=64, splits=2 * splits, warps=4, stages=3) if splits > 1 else None
    if slices:
        tile = Tile(columns=16, depth=128 // slices, splits=splits, warps=slices, stages=1, slices=slices)
    normed = PLAIN.add_product(expected, exact(x), exact(weights), exact(norm))
    handed = [layer_kernels.add_product(target, x, weights, norm, tile) for target in (found, again)]
    assert torch.equal(found, again), "the counters are at zero after each call, and the order of the sums is fixed"
    assert are_close(found, expected, BOUNDS[dtype])
    assert torch.equal(handed[0].values, handed[1].values) and torch.equal(handed[0].squares, handed[1].squares)
    scale = torch.rsqrt(handed[0].squares.sum(1, keepdim=True) / columns + norm.epsilon)
    assert are_close(handed[0].values.float() * scale, normed.values, 2 * BOUNDS[dtype])
    assert layer_kernels.add_product(again, x, weights, None, tile) is None


@pytest.mark.parametrize(
    ("num", "depth", "dtype"), [(65, 64, torch.float32), (3, 24, torch.float32), (3, 64, torch.float16)]
)
def test_products_that_our_kernels_do_not_compute_are_those_of_the_plain_twin(
    device: torch.device, num: int, depth: int, dtype: torch.dtype
) -> None:
    """Many rows, a depth that is no multiple of 16, and float16."""
    if device.type == "cpu" and dtype == torch.float16:
        pytest.skip("numbers of 16 bits are multiplied by the GPU's library")
    from millstream.engine.native.kernels import KERNELS

    x, norm = noise(num, depth, dtype=dtype, device=device), norm_of(depth, is_gemma=False, dtype=dtype, device=device)
    weights = projection(48, depth, has_bias=True, dtype=dtype, device=device)
    bound = 1e-4 if dtype == torch.float32 else 0.03
    normed = KERNELS.normed(x, norm)
    assert are_close(normed.values, PLAIN.normed(x, norm).values, bound)
    assert are_close(KERNELS.product(normed, weights), PLAIN.product(normed, weights), bound)
    found, expected = (one.gated_product(normed, weights, "silu") for one in (KERNELS, PLAIN))
    assert are_close(found, expected, bound)
    added, expected = torch.zeros(2, num, 48, dtype=dtype, device=device)
    norm = norm_of(48, is_gemma=False, dtype=dtype, device=device)
    handed, expected_normed = (
        one.add_product(target, x, weights, norm) for one, target in ((KERNELS, added), (PLAIN, expected))
    )
    assert are_close(added, expected, bound) and are_close(handed.values, expected_normed.values, 2 * bound)


# ---- sampling ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [12, 97, 5000, 9000])
def test_drawn_tokens_are_those_of_the_plain_twin_and_never_impossible(device: torch.device, size: int) -> None:
    from millstream.engine.native.kernels import KERNELS

    rows = 16
    logits, numbers = 3 * torch.randn(rows, size), torch.rand(rows)
    logits[:, ::5] = float("-inf")
    logits[4:8, 5000:] = float("-inf")  # the last tiles are impossible as a whole
    logits[8:12, : min(4200, size - 7)] = float("-inf")  # and the first one
    numbers[4:12] = torch.tensor([0.0, 0.5, 1 - 2**-24, 1 - 2**-24] * 2)
    temperatures = torch.tensor([0.0, 0.5, 1.0, 2.0]).repeat(rows // 4)
    logits, numbers, temperatures = (one.to(device) for one in (logits, numbers, temperatures))
    tokens, logprobs = KERNELS.sample(logits, numbers, temperatures)
    expected, expected_logprobs = PLAIN.sample(logits, numbers, temperatures)
    same = tokens == expected
    assert same.sum() >= rows - 2, "but for numbers that fall on the border of two tokens"
    assert torch.allclose(logprobs[same], expected_logprobs[same], atol=1e-4)
    assert logits.gather(1, tokens[:, None]).isfinite().all()


# ---- how work is cut -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 16, 33, 64])
@pytest.mark.parametrize(
    ("depth", "columns"), [(1024, 4096), (2048, 1024), (3072, 1024), (576, 960), (4864, 896), (64, 96)]
)
def test_every_tile_divides_its_depth(rows: int, depth: int, columns: int) -> None:
    for kind in ("normed", "gated", "added"):
        tile = tile_for(kind, rows, depth, columns)  # type: ignore[arg-type]
        assert fits(depth) and depth % (tile.splits * tile.depth) == 0


@pytest.mark.parametrize("depth", [64, 576, 896, 1024, 1536, 2048, 3072, 4864, 14336])
def test_a_tile_that_holds_its_weights_reads_its_whole_depth(depth: int) -> None:
    splits_and_rows = itertools.product((1, 2, 3, 4, 8), (16, 32))
    for kind, width, (splits, rows) in itertools.product(("normed", "gated", "added"), (8, 16, 32), splits_and_rows):
        tile = holding_tile(kind, rows, depth, width, splits)  # type: ignore[arg-type]
        if tile is not None:
            parts = -(-depth // splits // (tile.slices * tile.depth))
            held, wide = parts * tile.slices * tile.depth, width * (2 if kind == "gated" else 1)
            assert depth % splits == 0 and held >= depth // splits and tile.slices == tile.warps
            assert 2 * held * wide <= MAX_WEIGHT_BYTES and 2 * held * rows <= MAX_ROW_BYTES
    assert any(holding_tile("added", 16, depth, 8, splits) for splits in (1, 2, 8))


def test_a_row_is_cut_into_a_power_of_two_of_splits() -> None:
    for programs, token_bytes in itertools.product((1, 33, 100, 5000), (64, 512, 2048, 4096)):
        cut = attention_for(programs, token_bytes)
        assert cut.splits & (cut.splits - 1) == 0 and cut.min_span % cut.tokens == 0
        assert (cut.stages - 1) * cut.tokens * token_bytes <= MAX_SHARED
