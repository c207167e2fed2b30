"""How fast the learner trains, beside plain transformers with padding and beside TRL's loss path: one run, one table.

Rows have prompts of 64 to 256 tokens and answers of log-normal length (mean about 512, at most 4,096), no two alike. What is
timed is all of training: log-probabilities, loss, backward, clip and optimizer. MFU is 6 x parameters x real tokens (padding is
not counted) over the rate that this machine multiplies bfloat16 matrices of 8,192 at, measured in the same run.

    .venv/bin/python bench/learner.py [--json] [--shapes 474M,1.7B] [--ways ours,compiled,recomputed,plain,trl] [--trl FOLDER]

Without a GPU: `--shapes tiny`, which shows that it runs. `--trl` is where TRL is installed, if not here (site-packages).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from millstream.algo import AlgorithmConfig, recipe
from millstream.learner import LearnerConfig
from millstream.learner.packing import Packer
from millstream.learner.torch import TorchLearner
from millstream.model.load import new_model
from millstream.types import TrainRow
from shapes import qwen3


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
    "tiny": Shape(64, 2, 4, 512, 4096, 2048, 4),
    "474M": Shape(1024, 28, 16, 32768, 131072, 32768, 8),
    "1.7B": Shape(2048, 28, 16, 151936, 131072, 16384, 4),
}
CLIP = 0.2


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


def ours(shape: Shape, device: str, dtype: torch.dtype, **options: bool) -> Callable[[list[TrainRow]], None]:
    with torch.device(device):
        model = new_model(config_of(shape), seed=0, dtype=dtype)
    objective = recipe.objective(AlgorithmConfig(name="dapo"), max_tokens=4096)
    config = LearnerConfig(learning_rate=1e-6, micro_batch_tokens=shape.micro_batch_tokens, **options)
    learner = TorchLearner(model, config, objective)

    async def train(rows: list[TrainRow]) -> None:
        packer = Packer(shape.micro_batch_tokens)
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
            ((loss * mask[:, 1:]).sum() / num_trained).backward()
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


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--shapes", default="474M,1.7B" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--micro-batch-tokens", type=int)
    parser.add_argument("--trl", help="a site-packages folder that has TRL")
    options = parser.parse_args()
    if options.trl:
        sys.path.append(options.trl)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rate = matmul_rate(device)
    say(f"matrix products: {rate / 1e12:.1f} TFLOP/s; torch {torch.__version__}")
    found: dict[tuple[str, str], Found] = {}
    for name in options.shapes.split(","):
        shape = SHAPES[name]
        if options.micro_batch_tokens:
            shape = shape._replace(micro_batch_tokens=options.micro_batch_tokens)
        for way in options.ways.split(","):
            began = time.perf_counter()
            try:
                result = measure(WAYS[way][1](shape, device, dtype), shape, device, rate, options.repeat)
            except (ImportError, torch.OutOfMemoryError) as error:
                say(f"{name:>6} {WAYS[way][0]:<58} {type(error).__name__}: {str(error)[:90]}")
            else:
                found[name, way] = result
                say(
                    f"{name:>6} {WAYS[way][0]:<58} {result.tokens_per_s:>9,.0f} tokens/s   MFU {result.utilisation:.3f}   peak "
                    f"{result.peak_gib:6.1f} GiB   ({time.perf_counter() - began:.0f} s in all)"
                )
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    if options.json:
        print(json.dumps(compare(found), indent=1))


def compare(found: dict[tuple[str, str], Found]) -> list[dict[str, Any]]:
    rows = []
    for (name, way), result in found.items():
        if way not in ("ours", "compiled", "recomputed"):
            continue
        for peer in ("plain", "trl", "trl_recomputed"):
            if (name, peer) not in found:
                continue
            other = found[name, peer]
            pairs = (
                ("tokens/s", result.tokens_per_s, other.tokens_per_s, result.tokens_per_s / other.tokens_per_s),
                ("MFU", result.utilisation, other.utilisation, result.utilisation / other.utilisation),
                ("peak GiB", result.peak_gib, other.peak_gib, other.peak_gib / max(result.peak_gib, 1e-9)),
            )
            for metric, mine, theirs, ratio in pairs:
                rows.append(
                    {
                        "workload": f"{name}, {WAYS[way][0]}",
                        "metric": metric,
                        "ours": round(mine, 3),
                        "peer": WAYS[peer][0],
                        "theirs": round(theirs, 3),
                        "ratio": round(ratio, 2),
                    }
                )
    return rows


if __name__ == "__main__":
    main()
