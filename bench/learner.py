"""How fast the learner trains, beside plain transformers with padding and beside TRL's loss path: one run, one table.

Rows have prompts of 64 to 256 tokens and answers of log-normal length (mean about 512, at most 4,096), no two alike. What is
timed is all of training: log-probabilities, loss, backward, clip and optimizer. MFU is 6 x parameters x real tokens (padding is
not counted) over the rate that this machine multiplies bfloat16 matrices of 8,192 at, measured in the same run.

    .venv/bin/python bench/learner.py [--json] [--smoke] [--shapes 474M,1.7B] [--ways ours,compiled,recomputed,plain,trl]

Without a GPU: the shape `tiny`, which shows that it runs. `--trl FOLDER`: the site-packages that has TRL, if not this one.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from internals_torch import Packer, TorchLearner, model_of, objective, qwen3
from millstream import AlgorithmConfig, LearnerConfig
from millstream.types import TrainRow
from report import Options, Row, cost, not_measured, publish, rate, say


class Shape(NamedTuple):
    hidden: int
    layers: int
    heads: int
    words: int
    batch_tokens: int
    micro_batch_tokens: int
    padded_rows: int
    """In a micro-batch of those that pad."""


SHAPES = {
    "smallest": Shape(64, 2, 4, 512, 512, 1024, 2),
    "tiny": Shape(64, 2, 4, 512, 4096, 2048, 4),
    "474M": Shape(1024, 28, 16, 32768, 131072, 32768, 8),
    "1.7B": Shape(2048, 28, 16, 151936, 131072, 16384, 4),
}
CLIP = 0.2
OURS = ("ours", "compiled", "recomputed")


class Found(NamedTuple):
    tokens_per_s: float
    peak_gib: float
    utilisation: float


def config_of(shape: Shape) -> Any:
    return qwen3(
        hidden=shape.hidden,
        layers=shape.layers,
        heads=shape.heads,
        dim=128 if shape.hidden > 64 else 16,
        words=shape.words,
        context=8192,
    )


def rows_of(shape: Shape, seed: int) -> list[TrainRow]:
    rng = np.random.default_rng(seed)
    rows, num_tokens = list[TrainRow](), 0
    while num_tokens < shape.batch_tokens:
        prompt = int(rng.integers(64, 257))
        answer = int(np.clip(rng.lognormal(np.log(512) - 0.5, 1.0), 8, 4096))
        length = prompt + answer
        mask = np.arange(length) >= prompt
        rows.append(
            TrainRow(
                tokens=rng.integers(0, shape.words, length).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, -np.log(shape.words), 0).astype(np.float32),
                advantages=np.full(length, rng.normal(), dtype=np.float32),
            )
        )
        num_tokens += length
    return rows


def matmul_rate(device: str) -> float:
    """Floating-point operations a second, of the best of several tries."""
    size = 8192 if device == "cuda" else 512
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = 0.0
    for _ in range(5):
        wait(device)
        began = time.perf_counter()
        for _ in range(10):
            left @ right
        wait(device)
        best = max(best, 10 * 2 * size**3 / (time.perf_counter() - began))
    return best


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# ---- the ways: each gives a function that trains on one batch ---------------------------------------------------------


def ours(
    shape: Shape, device: str, dtype: torch.dtype, *, compile: bool = False, recompute: bool = False
) -> Callable[[list[TrainRow]], None]:
    model = model_of(config_of(shape), device=device, dtype=dtype)
    goal = objective(AlgorithmConfig(name="dapo"), max_tokens=4096)
    config = LearnerConfig(
        learning_rate=1e-6, micro_batch_tokens=shape.micro_batch_tokens, compile=compile, recompute=recompute
    )
    learner = TorchLearner(model, config, goal)

    async def train(rows: list[TrainRow]) -> None:
        packer = Packer[TrainRow](shape.micro_batch_tokens)
        await learner.begin_batch()
        for row in rows:
            if full := packer.add(row):
                await learner.accumulate(full)
        await learner.accumulate(packer.flush())
        await learner.step()

    return lambda rows: asyncio.run(train(rows))


def padded(rows: list[TrainRow], device: str) -> tuple[Tensor, ...]:
    """Rows of one length: tokens, attention mask, loss mask, log-probabilities, advantages."""
    longest = max(len(row.tokens) for row in rows)

    def column(values: list[Any]) -> Tensor:
        out = np.zeros((len(values), longest), np.asarray(values[0]).dtype)
        for number, value in enumerate(values):
            out[number, : len(value)] = value
        return torch.from_numpy(out).to(device)

    return (
        column([row.tokens.astype(np.int64) for row in rows]),
        column([np.ones(len(row.tokens), np.int64) for row in rows]),
        column([row.loss_mask for row in rows]),
        column([row.logprobs for row in rows]),
        column([row.advantages for row in rows]),
    )


def clipped(logprobs: Tensor, behaviour: Tensor, advantages: Tensor) -> Tensor:
    ratio = (logprobs - behaviour).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)


def padded_way(
    shape: Shape, device: str, model: Any, logprobs_of: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Callable[[list[TrainRow]], None]:
    """Micro-batches of so many rows, as they come, padded to the longest."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def train(rows: list[TrainRow]) -> None:
        num_trained = sum(int(row.loss_mask.sum()) for row in rows)
        for begin in range(0, len(rows), shape.padded_rows):
            tokens, seen, mask, behaviour, advantages = padded(rows[begin : begin + shape.padded_rows], device)
            logprobs = logprobs_of(tokens, seen, mask)
            loss = clipped(logprobs, behaviour[:, 1:], advantages[:, 1:])
            ((loss * mask[:, 1:]).sum() / num_trained).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return train


def plain(shape: Shape, device: str, dtype: torch.dtype) -> Callable[[list[TrainRow]], None]:
    """transformers as it comes: its own attention, all logits."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(shape), attn_implementation="sdpa", dtype=dtype)

    def logprobs_of(tokens: Tensor, seen: Tensor, mask: Tensor) -> Tensor:
        logits = model(input_ids=tokens, attention_mask=seen, use_cache=False).logits[:, :-1].float()
        return torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])[..., 0]

    return padded_way(shape, device, model, logprobs_of)


def trl(shape: Shape, device: str, *, recompute: bool) -> Callable[[list[TrainRow]], None]:
    """What TRL's GRPO trainer does with rows: its fused head on a padded batch, bfloat16 by autocast over float32 weights."""
    from trl.trainer.utils import add_fused_lm_head

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(shape), attn_implementation="sdpa", dtype=torch.float32)
    model.train()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))

    def logprobs_of(tokens: Tensor, seen: Tensor, mask: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            out = model(
                input_ids=tokens, attention_mask=seen, labels=tokens.masked_fill(~mask, -100), fused_lm_head=True
            )
        found: Tensor = out.log_probs
        return found[:, -(tokens.shape[1] - 1) :]

    return padded_way(shape, device, model, logprobs_of)


WAYS: dict[str, tuple[str, Callable[[Shape, str, torch.dtype], Callable[[list[TrainRow]], None]]]] = {
    "ours": ("Millstream", ours),
    "compiled": ("Millstream, learner.compile", lambda s, d, t: ours(s, d, t, compile=True)),
    "recomputed": ("Millstream, learner.recompute", lambda s, d, t: ours(s, d, t, recompute=True)),
    "plain": ("transformers, padded", plain),
    "trl": ("TRL 1.16 loss path", lambda s, d, t: trl(s, d, recompute=False)),
    "trl_recomputed": ("TRL 1.16 loss path, gradient checkpointing (its default)", lambda s, d, t: trl(s, d, recompute=True)),
}  # fmt: skip


def measure(train: Callable[[list[TrainRow]], None], shape: Shape, device: str, rate: float, repeat: int) -> Found:
    batches = [rows_of(shape, seed) for seed in range(repeat + 1)]
    train(batches[0])  # compilation, caches
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    speeds = []
    for rows in batches[1:]:
        wait(device)
        began = time.perf_counter()
        train(rows)
        wait(device)
        speeds.append(sum(len(row.tokens) for row in rows) / (time.perf_counter() - began))
    speed = statistics.median(speeds)
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config_of(shape)).parameters())
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return Found(speed, peak, 6 * num_parameters * speed / rate)


def measure_all(options: argparse.Namespace) -> tuple[dict[tuple[str, str], Found], list[Row]]:
    """Figures by shape and way, and a row for every way that could not be measured."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    speed = matmul_rate(device)
    say(f"matrix products: {speed / 1e12:.1f} TFLOP/s; torch {torch.__version__}")
    found: dict[tuple[str, str], Found] = {}
    missing: list[Row] = []
    for name in options.shapes.split(","):
        shape = SHAPES[name]
        if options.micro_batch_tokens:
            shape = shape._replace(micro_batch_tokens=options.micro_batch_tokens)
        for way in options.ways.split(","):
            words, build = WAYS[way]
            began = time.perf_counter()
            try:
                result = measure(build(shape, device, dtype), shape, device, speed, options.repeat)
            except (ImportError, torch.OutOfMemoryError) as error:
                missing.append(not_measured(f"{name}, {words}", f"{type(error).__name__}: {str(error)[:90]}"))
            else:
                found[name, way] = result
                say(
                    f"{name:>6} {words:<58} {result.tokens_per_s:>9,.0f} tokens/s   MFU {result.utilisation:.3f}   peak "
                    f"{result.peak_gib:6.1f} GiB   ({time.perf_counter() - began:.0f} s in all)"
                )
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    return found, missing


def compare(found: dict[tuple[str, str], Found]) -> list[Row]:
    rows: list[Row] = []
    pairs = ((mine, peer) for mine in found if mine[1] in OURS for peer in found if peer[1] not in OURS)
    for mine, peer in [(mine, peer) for mine, peer in pairs if mine[0] == peer[0]]:
        workload, name, ours, theirs = f"{mine[0]}, {WAYS[mine[1]][0]}", WAYS[peer[1]][0], found[mine], found[peer]
        rows += [
            rate(workload, "tokens/s", ours.tokens_per_s, name, theirs.tokens_per_s),
            rate(workload, "MFU", ours.utilisation, name, theirs.utilisation),
        ]
        if ours.peak_gib:
            rows.append(cost(workload, "peak GiB", ours.peak_gib, name, theirs.peak_gib))
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--shapes", "474M,1.7B" if torch.cuda.is_available() else "tiny", smoke="smallest")
    parser.add("--ways", ",".join(WAYS), smoke="ours,recomputed,plain,trl")
    parser.add("--repeat", 3, smoke=1)
    parser.add("--micro-batch-tokens", None, kind=int)
    parser.add("--trl", None, kind=str, help="a site-packages folder that has TRL")
    options = parser.parse(argv)
    if options.trl:
        sys.path.append(options.trl)
    found, missing = measure_all(options)
    publish([*compare(found), *missing], options)


if __name__ == "__main__":
    main()
