"""How long one decode step takes: milliseconds by rows and context, the line through them (the step at context 0, and what a
token of context costs), and the kernels of a layer. Beside fused layers: the same model with fused modules only.

    .venv/bin/python bench/decode_step.py [--json] [--smoke] [--rows 1,4,16] [--contexts 256,1024] [--ways layers,modules]
    .venv/bin/python bench/decode_step.py --profile 16:400        what each kernel of such a step takes (rows:context)
    .venv/bin/python bench/decode_step.py --tune 16,64            tiles of products and attention at these rows, the best first

The shape is a Qwen3 of 474M parameters (28 layers, hidden 1024, 16 heads of 128, 8 of keys). Cells that do not fit into the
cache are left out. Ways: `modules`; `layers`; `early`: fused layers whose kernels start before the one before has ended;
`once`: as soon as it has started; `held`: as `once`, and a product's programs read their weights before their rows are there.
Without a GPU: a tiny shape and the plain twins, which shows that it runs.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from internals_torch import CudaRecorder, DecodePass, Graphs, PagedRunner, model_of, paged_layers, qwen3, tiles
from report import Options, Row, alone, cost, not_measured, publish, say

IS_GPU = torch.cuda.is_available()
WAYS = {
    "layers": "fused layers",
    "early": "fused layers, early starts",
    "once": "fused layers, starts at once",
    "held": "fused layers, starts at once, weights held",
    "modules": "fused modules",
}
NUM_REPLAYS = 30


class Shape(NamedTuple):
    hidden: int
    layers: int
    heads: int
    dim: int
    words: int


class Step(NamedTuple):
    """One size of a decode step, ready to run: `run(context)` gives its milliseconds."""

    runner: Any
    rows: int

    def once(self) -> None:
        step = partial(self.runner._decode_inputs, DecodePass)
        if self.runner._graphs is None:
            step(self.rows, None)
        else:
            self.runner._graphs.replay(self.rows, self.runner._rehearse, step, None)

    def run(self, context: int | Sequence[int], repeat: int) -> float:
        place(self.runner, self.rows, context)
        with torch.inference_mode(), self.runner.working():
            return 1e3 * seconds(self.once, repeat)


def seconds(work: Callable[[], object], repeat: int) -> float:
    """Of one call; the median of three series."""
    for _ in range(2):
        work()
    found = []
    for _ in range(3):
        wait()
        began = time.perf_counter()
        for _ in range(repeat):
            work()
        wait()
        found.append((time.perf_counter() - began) / repeat)
    return statistics.median(found)


def wait() -> None:
    if IS_GPU:
        torch.cuda.synchronize()


# ---- steps -----------------------------------------------------------------------------------------------------------------


def runner_of(way: str, shape: Shape, num_slots: int, longest: int, cache_gb: float) -> Any:
    tiles.Switches.is_early = way in ("early", "once", "held")
    tiles.Switches.is_earliest = way in ("once", "held")
    tiles.Switches.holds_weights = way == "held"
    config = qwen3(**shape._asdict(), context=2 * longest)
    device, dtype = ("cuda", torch.bfloat16) if IS_GPU else ("cpu", torch.float32)
    model = model_of(config, device=device, dtype=dtype).eval()
    runner = PagedRunner(model, num_slots, cache_gb=cache_gb, max_length=longest)
    if way == "modules":
        for layer in paged_layers(model):
            del layer.__dict__["forward"]
    return runner


def place(runner: Any, rows: int, context: int | Sequence[int]) -> None:
    """Every row has pages of its own, and `context` tokens; the newest is the last."""
    lengths = np.broadcast_to(context, rows)
    width = -(-int(lengths.max()) // runner._page)
    numbers = 1 + torch.randperm(rows * width, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), runner.working():
        runner._pools.table[:rows, :width] = numbers.view(rows, width).int().to(runner._device)
        inputs = np.zeros((6, rows), np.int32)
        inputs[[0, 2, 3]] = np.arange(rows)
        inputs[1] = lengths - 1
        inputs[4:].view(np.float32)[:] = [[0.5], [1.0]]
        runner._inputs[:, :rows].copy_(torch.from_numpy(inputs))


def mixed(rows: int, longest: int) -> list[int]:
    """Contexts as in a run: most are short, one is the longest."""
    shares = -np.log((np.arange(rows) + 0.5) / rows) / 4
    return [max(32, int(longest * share)) for share in np.minimum(shares / shares.max(), 1.0)]


def fits(runner: Any, rows: int, context: int) -> bool:
    return bool(rows * -(-context // runner._page) <= runner._allocator.num_pages)


def kernels_of(step: Step, context: int, repeat: int = 1) -> dict[str, tuple[int, float]]:
    """Name -> calls and microseconds, both of one step."""
    place(step.runner, step.rows, context)
    kind = torch.profiler.ProfilerActivity.CUDA if IS_GPU else torch.profiler.ProfilerActivity.CPU
    with torch.inference_mode(), step.runner.working():
        step.once()
        wait()
        with torch.profiler.profile(activities=[kind]) as found:
            for _ in range(repeat):
                step.once()
            wait()
    events = [event for event in found.key_averages() if not IS_GPU or event.self_device_time_total > 0]
    return {
        event.key: (event.count // repeat, (event.self_device_time_total if IS_GPU else event.self_cpu_time_total) / repeat)
        for event in events
    }  # fmt: skip


class Found(NamedTuple):
    ms: dict[tuple[int, int], float]  # by rows and context
    kernels: dict[int, float]  # of a layer, by rows


def measure(way: str, shape: Shape, options: argparse.Namespace) -> Found:
    rows, contexts = numbers_in(options.rows), numbers_in(options.contexts)
    runner = runner_of(way, shape, max(rows), max(contexts) + 1, options.cache_gb)
    found = Found({}, {})
    for num in rows:
        step = Step(runner, num)
        for context in (one for one in contexts if fits(runner, num, one)):
            found.ms[num, context] = step.run(context, options.repeat)
            say(f"{WAYS[way]:<36} {num:>4} rows, context {context:>5}: {found.ms[num, context]:8.3f} ms")
        calls = [count for count, _ in kernels_of(step, min(contexts)).values()]
        found.kernels[num] = sum(count // shape.layers for count in calls)
    del runner
    free()
    return found


def free() -> None:
    gc.collect()
    if IS_GPU:
        torch.cuda.empty_cache()


def line(ms: dict[tuple[int, int], float], rows: int) -> tuple[float, float] | None:
    """Milliseconds at context 0, and nanoseconds for a token of context of any row."""
    cells = [(num * context, value) for (num, context), value in ms.items() if num == rows]
    if len(cells) < 2:
        return None
    slope, intercept = np.polyfit([tokens for tokens, _ in cells], [value for _, value in cells], 1)
    return float(intercept), 1e6 * float(slope)


def compare(found: dict[str, Found]) -> list[Row]:
    """Every way beside the first one."""
    ours, *others = found
    rows: list[Row] = []
    for peer in others or [ours]:
        mine, theirs, name = found[ours], found[peer], WAYS[peer]
        for cell in mine.ms.keys() & theirs.ms.keys():
            rows.append(cost(f"{cell[0]} rows, context {cell[1]}", "ms", mine.ms[cell], name, theirs.ms[cell]))
        for num in mine.kernels:
            rows.append(cost(f"{num} rows", "kernels a layer", mine.kernels[num], name, theirs.kernels[num]))
            own, other = line(mine.ms, num), line(theirs.ms, num)
            if own is not None and other is not None:
                rows.append(cost(f"{num} rows", "ms at context 0", own[0], name, other[0]))
                rows.append(cost(f"{num} rows", "ns a token of context", own[1], name, other[1]))
    return sorted(
        rows, key=lambda row: (row.peer, row.metric, int(row.workload.split()[0]), len(row.workload), row.workload)
    )


def profile(way: str, shape: Shape, options: argparse.Namespace) -> list[Row]:
    num, context = (int(word) for word in options.profile.split(":"))
    runner = runner_of(way, shape, num, context + 1, options.cache_gb)
    found = kernels_of(Step(runner, num), context, repeat=options.repeat)
    for name, (count, total) in sorted(found.items(), key=lambda one: -one[1][1])[:20]:
        say(f"{total:9.1f} us {count:>5} x {total / max(1, count):7.2f}  {name[:90]}")
    workload = f"{WAYS[way]}, {num} rows, context {context}"
    del runner
    free()
    return [
        alone(workload, "us in kernels, their times added", sum(total for _, total in found.values())),
        alone(workload, "kernels", sum(count for count, _ in found.values())),
    ]


# ---- tuning ----------------------------------------------------------------------------------------------------------------


class Product(NamedTuple):
    """One product of each layer, with weights of its own: what one layer reads is not in the cache from the one before."""

    kind: Any
    depth: int
    columns: int


def products_of(shape: Shape) -> dict[str, Product]:
    hidden, inner = shape.hidden, 3 * shape.hidden
    return {
        "qkv": Product("normed", hidden, 2 * shape.heads * shape.dim),
        "out": Product("added", shape.heads * shape.dim, hidden),
        "gate and up": Product("gated", hidden, inner),
        "down": Product("added", inner, hidden),
    }


def candidates(product: Product, rows: int) -> Iterator[Any]:
    for columns, depth, splits, stages in itertools.product((32, 64), (64, 128), (1, 2, 4, 8), (4, 6)):
        programs = -(-product.columns // columns) * splits
        wide = columns * (2 if product.kind == "gated" else 1)
        held = 2 * stages * depth * (tiles.padded(rows) + wide)
        if product.depth % (splits * depth) or not 90 <= programs <= 400 or not 16e3 <= held <= 150e3:
            continue
        yield tiles.Tile(columns, depth, splits, 4, stages)
    for columns, splits in itertools.product((8, 16, 32, 64), (1, 2, 3, 4, 6, 8, 12)):
        tile = tiles.holding_tile(product.kind, tiles.padded(rows), product.depth, columns, splits)
        if tile is not None and 60 <= -(-product.columns // columns) * splits <= 400:
            yield tile


def captured(work: Callable[[], object]) -> Callable[[], None]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
    return graph.replay


def layers_of(product: Product, rows: int, shape: Shape) -> Callable[[Any], Callable[[], None]]:
    """From a tile (None: what the library does) to one pass over all layers."""
    from internals_torch import KERNELS, Norm, Normed, Projection, layer_kernels

    def weights(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16).mul_(size[-1] ** -0.5)

    wide = product.columns * (2 if product.kind == "gated" else 1)
    all_weights = [Projection(weights(wide, product.depth), None) for _ in range(shape.layers)]
    norm, x = Norm(weights(product.depth), 1e-6, False), weights(rows, product.depth)
    out, next_norm = weights(rows, product.columns), Norm(weights(product.columns), 1e-6, False)
    # A product reads a square for each tile of the kernel before: 8 columns where programs hold their weights, else 32.
    squares = {
        is_held: torch.rand(rows, product.depth // (8 if is_held else 32), device="cuda") for is_held in (True, False)
    }

    def launch(one: Any, tile: Any) -> None:
        tiles.Switches.is_earliest = tile is not None and tile.slices > 0
        normed = Normed(x, squares[tiles.Switches.is_earliest], 1e-6)
        if tile is None:
            part = torch.nn.functional.linear(x if product.kind == "added" else KERNELS.rms_norm(x, *norm), one.weight)
            if product.kind == "gated":
                KERNELS.gated(part, "silu")
            elif product.kind == "added":
                out.add_(part)
        elif product.kind == "normed":
            layer_kernels.product(normed, one, tile)
        elif product.kind == "gated":
            layer_kernels.gated_product(normed, one, "silu", tile)
        else:
            layer_kernels.add_product(out, x, one, next_norm, tile)

    def all_layers(tile: Any) -> None:
        for one in all_weights:
            launch(one, tile)

    return lambda tile: partial(all_layers, tile)


def tune_products(shape: Shape, rows: int, repeat: int) -> Iterator[Row]:
    for name, product in products_of(shape).items():
        layers = layers_of(product, rows, shape)
        found: list[tuple[float, Any]] = []
        for tile in [None, *candidates(product, rows)]:
            try:
                found.append((1e6 * seconds(captured(layers(tile)), repeat) / shape.layers, tile))
                say(f"{name:>12} {rows:>3} rows: {found[-1][0]:6.2f} us  {tile or 'the library'}")
            except Exception as error:  # a tile that does not fit into a processor
                say(f"{name}, {rows} rows: {tile}: {type(error).__name__}: {str(error)[:80]}")
        library = found[0][0]
        best, tile = min(found[1:])
        key = (product.kind, tiles.padded(rows), product.depth, product.columns)
        say(f"    {key}: {tile},")
        yield cost(f"{name}, {rows} rows, {tuple(tile)}", "us a layer", best, "the library's kernels", library)
        del layers
        free()


def cuts_for(rows: int) -> Iterator[Any]:
    """What is in the table, then the same with other splits or one other thing changed."""
    now = tiles.attention_for(rows * 8)
    yield now
    for splits, span in ((4, 256), (8, 128), (8, 256), (16, 128), (16, 256), (32, 128)):
        if (splits, span) != (now.splits, now.min_span):
            yield now._replace(splits=splits, min_span=span)
    yield now._replace(warps=2)
    yield now._replace(stages=3)
    yield now._replace(splits=16, min_span=256, stages=3)


def tune_attention(shape: Shape, rows: int, options: argparse.Namespace) -> Iterator[Row]:
    """Of steps of four layers."""
    usual = [context for context in (256, 3000) if rows * context <= 250_000]
    contexts: list[int | list[int]] = [*usual, mixed(rows, 4096)]
    runner = runner_of("early", shape._replace(layers=4), rows, 4097, options.cache_gb)
    before, step = dict(tiles.ATTENTION), Step(runner, rows)
    best: tuple[float, Any] | None = None
    for cut in cuts_for(rows):
        tiles.ATTENTION.clear()
        tiles.ATTENTION[1 << 62] = cut
        runner._graphs = Graphs(CudaRecorder(runner._stream))  # the memory of graphs that are gone cannot be used again
        try:
            times = [1e3 * step.run(context, options.repeat) for context in contexts]
        except Exception as error:  # tiles that do not fit into a processor
            say(f"attention, {rows} rows: {cut}: {type(error).__name__}: {str(error)[:80]}")
            continue
        say(f"attention {rows:>3} rows: {', '.join(f'{time:7.1f}' for time in times)} us at {usual} and mixed  {cut}")
        best = min(best or (sum(times), cut), (sum(times), cut))
    tiles.ATTENTION.clear()
    tiles.ATTENTION.update(before)
    if best is not None:
        yield alone(
            f"attention, {rows} rows, {tuple(best[1])}",
            f"us of 4 layers at contexts {usual} and mixed ones, added",
            best[0],
        )
    del runner, step
    free()


def tune(shape: Shape, options: argparse.Namespace) -> list[Row]:
    if not IS_GPU:
        return [not_measured("tiles", "torch sees no GPU here")]
    rows: list[Row] = []
    for num in numbers_in(options.tune):
        if num <= tiles.MAX_ROWS and "products" in options.parts:
            rows += tune_products(shape, num, options.repeat)
        if "attention" in options.parts:
            rows += tune_attention(shape, num, options)
    return rows


def numbers_in(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--rows", "1,4,16,64,128,256,512" if IS_GPU else "1,4", smoke="1,3")
    parser.add("--contexts", "256,512,1024,2048,4096" if IS_GPU else "16,64", smoke="8,20")
    parser.add("--ways", "layers,modules", help=", ".join(WAYS))
    parser.add("--words", 512, smoke=97)
    parser.add("--repeat", NUM_REPLAYS, smoke=1)
    parser.add("--cache-gb", 40.0 if IS_GPU else 0.05)
    parser.add("--profile", "", help="rows:context")
    parser.add("--tune", "", help="rows")
    parser.add("--parts", "products,attention", help="what is tuned")
    options = parser.parse(argv)
    big = Shape(hidden=1024, layers=28, heads=16, dim=128, words=options.words)
    shape = big if IS_GPU and not options.smoke else Shape(hidden=64, layers=2, heads=4, dim=16, words=options.words)
    ways = options.ways.split(",")
    if options.tune:
        publish(tune(shape, options), options)
    elif options.profile:
        publish([row for way in ways for row in profile(way, shape, options)], options)
    else:
        publish(compare({way: measure(way, shape, options) for way in ways}), options)


if __name__ == "__main__":
    main()
