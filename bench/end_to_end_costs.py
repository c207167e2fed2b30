"""The model of `bench/end_to_end.py`, made on the spot, and what its parts cost: alone, and beside each other.

Measured are the numbers of the step model (`bench/step_model.py`): decode steps at several numbers of rows and tokens of
context, with the learner idle and with it at work, and the learner's tokens/s with the engine idle and with it at work. Engine
and learner are those that a run with the same config has.
"""

from __future__ import annotations

import asyncio
import gc
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from msgspec import Struct

from end_to_end_loads import FIRST_WORD, SHAPES, word
from internals_torch import (
    Engine,
    Packer,
    TorchLearner,
    choose_sizes,
    engine_of,
    gpu_share,
    load_model,
    measure_device,
    measure_shape,
    model_of,
    objective,
    qwen3,
    save_model,
    set_up_cpu,
    with_sizes,
    word_tokenizer,
)
from millstream import RunConfig
from millstream.types import Request, RequestKey, Sampled, Sampling, TrainRow
from report import say
from step_model import Costs


def make_model(shape_name: str, context: int, folder: Path) -> Path:
    """A checkpoint with random weights and a tokenizer of words; made once."""
    path, shape = folder / f"model-{shape_name}-{context}", SHAPES[shape_name]
    if (path / "tokenizer.json").exists():
        return path
    config = qwen3(
        hidden=shape.hidden,
        layers=shape.layers,
        heads=shape.heads,
        dim=shape.dim,
        words=shape.words,
        context=context,
    )
    tokenizer = word_tokenizer([word(number) for number in range(FIRST_WORD, shape.words)])
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    has_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if has_gpu else torch.float32
    save_model(model_of(config, device="cuda" if has_gpu else "cpu", dtype=dtype), tokenizer, path)
    free_memory()
    return path


# ---- what is measured ---------------------------------------------------------------------------------------------------


class Point(Struct, frozen=True, kw_only=True):
    """Decoding at a number of rows, with this many tokens of context each. `beside_s`: with the learner at work; None if
    that was not measured."""

    rows: int
    context: int
    step_s: float
    beside_s: float | None = None
    kept: float | None = None
    """Of the learner's rate alone, while it works beside these rows."""

    @property
    def slow(self) -> float:
        return math.nan if self.beside_s is None else self.beside_s / self.step_s


class MeasuredCosts(Struct, frozen=True, kw_only=True, tag="costs"):
    shape: str
    settings: list[str]
    device: str
    costs: Costs
    points: list[Point]
    seconds: float
    gpu_share: float = 1.0
    """Of the multiprocessors, that the learner had."""


MIN_REPORTS = 8


class Plan(Struct, frozen=True, kw_only=True):
    """What is decoded and trained to measure the costs. `points`: rows, tokens of the prompt, whether also beside the
    learner."""

    points: tuple[tuple[int, int, bool], ...]
    tokens: int
    """Sampled by each request."""
    batch_tokens: int
    """Of the learner's batches."""
    row_tokens: int
    batches: int


ON_GPU = Plan(
    points=(
        (1, 128, False),
        (16, 128, True),
        (16, 3000, False),
        (64, 128, True),
        (64, 1500, False),
        (512, 128, True),
        (512, 400, False),
    ),
    tokens=512,
    batch_tokens=24_576,
    row_tokens=800,
    batches=6,
)
SMOKE = Plan(points=((1, 8, False), (4, 8, True), (4, 32, False)), tokens=24, batch_tokens=64, row_tokens=16, batches=2)


def measure_costs(
    shape_name: str, config: RunConfig, model_path: Path, plan: Plan, settings: Sequence[str]
) -> MeasuredCosts:
    """Of the engine and the learner that a run with this config has, with the sizes that it would choose and its share of the
    GPU. Frees them before it returns."""
    began = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        set_up_cpu()
    found, share = measure_device(config), gpu_share(config, config.learner)
    model = load_model(str(model_path), device=device, dtype=getattr(torch, config.model.dtype))
    config = with_sizes(config, choose_sizes(config, found, measure_shape(model)))
    loss = objective(config.algorithm, max_tokens=config.rollout.max_tokens)
    learner = TorchLearner(model, config.learner, loss, gpu_share=share)
    engine = engine_of(config.engine, model)
    words = SHAPES[shape_name].words
    costs, points = asyncio.run(_measure(engine, Batches(learner, config, plan, words), plan, words))
    del model, engine, learner
    free_memory()
    return MeasuredCosts(
        shape=shape_name,
        settings=list(settings),
        device=torch.cuda.get_device_name() if device == "cuda" else "cpu",
        costs=costs,
        points=points,
        seconds=time.perf_counter() - began,
        gpu_share=share,
    )


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Batches:
    """The learner at work: batch after batch, each with an optimizer step, after which the device has nothing left to do."""

    def __init__(self, learner: TorchLearner, config: RunConfig, plan: Plan, words: int) -> None:
        self._learner = learner
        self._micro_batch_tokens = config.learner.pass_tokens
        rng = np.random.default_rng(1)
        self._rows = [_row(rng, words, plan.row_tokens) for _ in range(plan.batch_tokens // plan.row_tokens)]
        self._num_tokens = sum(len(row.tokens) for row in self._rows)
        self.is_stopping = False
        self._rates: list[float] = []

    async def train(self, num: int) -> None:
        for _ in range(num):
            await self._train_one()

    async def train_until_stopped(self) -> None:
        self.is_stopping = False
        while not self.is_stopping:
            await self._train_one()

    async def _train_one(self) -> None:
        began, packer = time.perf_counter(), Packer[TrainRow](self._micro_batch_tokens)
        await self._learner.begin_batch()
        for row in self._rows:
            if full := packer.add(row):
                await self._learner.accumulate(full)
        await self._learner.accumulate(packer.flush())
        await self._learner.step()
        self._rates.append(self._num_tokens / (time.perf_counter() - began))

    def take_rate(self) -> float:
        """Tokens/s of the batches since it was last asked: the median."""
        rates = self._rates
        self._rates = []
        return statistics.median(rates) if rates else math.nan

    async def close(self) -> None:
        await self._learner.close()


def _row(rng: np.random.Generator, words: int, usual: int) -> TrainRow:
    length = int(rng.integers(usual // 2, usual * 3 // 2))
    mask = np.arange(length) >= min(128, usual // 4)
    return TrainRow(
        tokens=rng.integers(FIRST_WORD, words, length).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -np.log(words), 0).astype(np.float32),
        advantages=np.full(length, rng.normal(), dtype=np.float32),
    )


async def _measure(engine: Engine, batches: Batches, plan: Plan, words: int) -> tuple[Costs, list[Point]]:
    await batches.train(1)  # compilation
    batches.take_rate()
    await batches.train(plan.batches)
    rate = batches.take_rate()
    say(f"  the learner alone: {rate:,.0f} tokens/s")
    points, kept = list[Point](), list[float]()
    for number, (rows, prompt, is_also_beside) in enumerate(plan.points):
        found = await decode(engine, rows, prompt, plan.tokens, words, seed=number)
        if found is None:
            say(f"  {rows} rows of {prompt} tokens did not run together for {MIN_REPORTS} steps: left out")
            continue
        beside, share = None, None
        if is_also_beside:
            training = asyncio.create_task(batches.train_until_stopped())
            beside = await decode(engine, rows, prompt, plan.tokens, words, seed=number)
            share = batches.take_rate() / rate
            kept.append(share)
            batches.is_stopping = True
            await training
            batches.take_rate()
        (step_s, context), beside_s = found, None if beside is None else beside[0]
        point = Point(rows=rows, context=context, step_s=step_s, beside_s=beside_s, kept=share)
        points.append(point)
        also = (
            ""
            if beside_s is None
            else f", {1e3 * beside_s:.2f} beside the learner ({point.slow:.2f}x), which keeps {kept[-1]:.2f}"
        )
        say(f"  {rows} rows of {context} tokens: {1e3 * step_s:.2f} ms a step{also}")
    await engine.close()
    await batches.close()
    return fitted(points, rate, kept), points


def fitted(points: Sequence[Point], rate: float, kept: Sequence[float]) -> Costs:
    """Least squares of the relative errors of floor + slope x context; the slow-down is the geometric mean over the points."""
    times = np.array([point.step_s for point in points])
    contexts = np.array([float(point.rows * point.context) for point in points])
    matrix = np.stack([1 / times, contexts / times], axis=1)
    floor_s, slope_s = np.linalg.lstsq(matrix, np.ones(len(points)), rcond=None)[0]
    slows = [point.slow for point in points if point.beside_s is not None]
    finite = [share for share in kept if math.isfinite(share)]
    return Costs(
        floor_s=max(0.0, float(floor_s)),
        slope_s=max(0.0, float(slope_s)),
        slow=statistics.geometric_mean(slows) if slows else 1.0,
        rate=rate,
        keep=statistics.mean(finite) if finite else 1.0,
    )


async def decode(
    engine: Engine, rows: int, prompt: int, tokens: int, words: int, *, seed: int
) -> tuple[float, int] | None:
    """Seconds a decode step and tokens of context a row, of the time in which all rows run: from the first token of the last
    request to start until the first request ends. Only that request is watched, as a run with one engine watches none. None:
    they did not run together for long enough."""
    reports: list[tuple[float, int, int]] = []  # when; tokens sampled by that request, and by all
    ends: list[float] = []
    rng, before = np.random.default_rng(seed), engine.stats().tokens_generated

    def hear(sampled: Sampled) -> None:
        known = reports[-1][1] if reports else 0
        total = engine.stats().tokens_generated - before
        reports.append((time.perf_counter(), known + len(sampled.tokens), total))

    async def generate(number: int) -> None:
        request = Request(
            key=RequestKey(group_id=number, member=0),
            tokens=tuple(rng.integers(FIRST_WORD, words, prompt).tolist()),
            sampling=Sampling(max_tokens=tokens),
            seed=number,
        )
        await engine.generate(request, hear if number == rows - 1 else None)
        ends.append(time.perf_counter())

    await asyncio.gather(*(generate(number) for number in range(rows)))
    counted = [report for report in reports if report[1]]
    all_running = [report for report in counted if report[0] <= min(ends)]
    if len(all_running) < MIN_REPORTS:
        return None
    (begin, first, total), (end, last, final) = all_running[0], all_running[-1]
    return (end - begin) / (last - first), prompt + (total + final) // (2 * rows)
