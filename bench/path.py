"""What computes for a model, how exact it is and how fast: the path that the start-up check chooses, log-probabilities against
teacher forcing, and tokens/s with fused layers and with the library's.

Log-probabilities: `--texts` prompts of real text (this repository's pages, 32 to 512 tokens), each continued by `--tokens`
tokens at temperature 1 and greedily. Each token's log-probability is compared with transformers' eager pass over the same
tokens in float32. The peer is that eager pass in the model's own dtype: what its rounding costs the library itself. Speed: as
many requests as slots, prompts of 128 tokens, `--tokens` tokens each, the second of two runs; the peer is the engine without
fused layers.

    .venv/bin/python bench/path.py --model FOLDER [--json] [--smoke] [--dtype bfloat16] [--slots 64,256,1024] [--lora 16]

Without `--model`: a small Qwen3 with random weights and random tokens.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch

from internals_torch import (
    Batcher,
    LoraConfig,
    PagedRunner,
    Scored,
    add_adapters,
    check_engine,
    library_logprobs,
    load_model,
    load_tokenizer,
    model_of,
    qwen3,
    randomize,
    set_up_cpu,
    unfuse,
)
from millstream.types import Completion, Request, RequestKey, Sampling
from report import ROOT, Options, Row, alone, cost, not_measured, publish, rate, say

LAYERS = {"fused layers": "", "the library's layers": "the plain twin"}
PROMPT = 128


def main(argv: Sequence[str] | None = None) -> None:
    here = "cuda" if torch.cuda.is_available() else "cpu"
    options = Options(__doc__)
    options.add("--model", "", help="a folder with a checkpoint")
    options.add("--device", here)
    options.add("--dtype", "bfloat16" if here == "cuda" else "float32")
    options.add("--texts", 8, smoke=2)
    options.add("--tokens", 200, smoke=4)
    options.add("--slots", "64,256,1024" if here == "cuda" else "8", smoke="2")
    options.add("--lora", 0, help="the rank of adapters on every linear layer, with random weights; 0: none")
    chosen = options.parse(argv)
    set_up_cpu()
    model, words = model_and_words(chosen)
    workload = f"{chosen.model or 'small Qwen3'}, {chosen.dtype}, {chosen.device}"
    workload += f", adapters of rank {chosen.lora}" if chosen.lora else ""
    began = time.perf_counter()
    why = check_engine(model, "pages")
    rows = [alone(workload, "start-up check, s", time.perf_counter() - began)]
    rows += exactness(model, words, workload, chosen.texts, chosen.tokens, why)
    for slots in map(int, chosen.slots.split(",")):
        rows.append(speed(model, words, workload, slots, chosen.tokens, why))
    publish(rows, chosen)


def model_and_words(chosen: Any) -> tuple[Any, list[int]]:
    """The model, and tokens of a long text."""
    dtype = getattr(torch, chosen.dtype)
    if chosen.model:
        model = load_model(chosen.model, device=chosen.device, dtype=dtype).eval()
        text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
        words = load_tokenizer(chosen.model)(text)["input_ids"]
    else:
        config = qwen3(hidden=64, layers=2, heads=4, dim=16, words=512, context=1024)
        model = model_of(config, device=chosen.device, dtype=torch.float32).eval()
        randomize(model.cpu(), torch.Generator().manual_seed(0))
        model = model.to(chosen.device, dtype)
        words = np.random.default_rng(0).integers(3, 512, 20_000).tolist()
    if chosen.lora:
        add_adapters(model, LoraConfig(rank=chosen.lora), seed=0)
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.data.normal_(std=0.01)
    return model, words


# ---- how exact ---------------------------------------------------------------------------------------------------------


def exactness(model: Any, words: list[int], workload: str, num_texts: int, num_tokens: int, why: str) -> list[Row]:
    lengths = np.geomspace(32, 512, num_texts).astype(int).tolist()
    prompts = [tuple(words[1000 * index :][:length]) for index, length in enumerate(lengths)]
    exact = copy.deepcopy(model).float()
    rows = []
    for layers, unfused in LAYERS.items():
        if why and not unfused:
            rows.append(not_measured(workload, f"{layers}: {why}"))
            continue
        batcher = batcher_of(model, 2 * num_texts, unfused)
        rows.append(
            Row(
                workload=workload,
                metric=f"path: {batcher.path.name}" + (f" ({batcher.path.why})" if batcher.path.why else ""),
                ours=None,
                peer="none",
                theirs=None,
                ratio=None,
            )
        )
        say(f"{workload}: {batcher.path.name}")
        answers = generate(batcher, [*prompts, *prompts], num_tokens, [1.0] * num_texts + [0.0] * num_texts)
        unfuse(model)
        for name, some in (("temperature 1", answers[:num_texts]), ("greedy", answers[num_texts:])):
            rows += differences(model, exact, some, workload, f"{layers}, {name}")
    return rows


def differences(model: Any, exact: Any, answers: list[Scored], workload: str, name: str) -> list[Row]:
    ours = torch.cat([torch.tensor(one.logprobs, dtype=torch.float64) for one in answers])
    right, theirs = (torch.cat(library_logprobs(one, answers)) for one in (exact, model))
    found, library = ((one - right).abs() for one in (ours, theirs))
    statistics: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "mean": torch.mean,
        "median": torch.median,
        "maximum": torch.max,
    }
    return [
        cost(
            workload,
            f"{name}: log-prob from float32, {what}",
            float(of(found)),
            "transformers in this dtype",
            float(of(library)),
            digits=6,
        )
        for what, of in statistics.items()
    ]


# ---- how fast ----------------------------------------------------------------------------------------------------------


def speed(model: Any, words: list[int], workload: str, slots: int, num_tokens: int, why: str) -> Row:
    found = {}
    for layers, unfused in LAYERS.items():
        if why and not unfused:
            continue
        batcher = batcher_of(model, slots, unfused)
        text = islice(cycle(words), 2 * PROMPT * slots)
        for _ in range(2):  # with other prompts; the first time graphs are made
            prompts = [tuple(islice(text, PROMPT)) for _ in range(slots)]
            began = time.perf_counter()
            generate(batcher, prompts, num_tokens, [1.0] * slots)
            found[layers] = slots * num_tokens / (time.perf_counter() - began)
        say(f"{workload}: {slots} slots, {layers}: {found[layers]:,.0f} tokens/s")
        unfuse(model)
    if why:
        return alone(
            workload, f"{slots} slots, the library's layers, tokens/s", found["the library's layers"], digits=0
        )
    return rate(workload, f"{slots} slots, tokens/s", *_both(found), digits=0)


def _both(found: dict[str, float]) -> tuple[float, str, float]:
    return found["fused layers"], "the library's layers", found["the library's layers"]


def batcher_of(model: Any, slots: int, why_unfused: str) -> Batcher:
    runner = PagedRunner(model, slots, why_unfused=why_unfused)
    return Batcher(model, num_slots=slots, prefill_tokens=8192, runner=runner)


def generate(
    batcher: Batcher, prompts: Sequence[tuple[int, ...]], num_tokens: int, temperatures: Sequence[float]
) -> list[Scored]:
    for number, (prompt, temperature) in enumerate(zip(prompts, temperatures, strict=True)):
        sampling = Sampling(max_tokens=num_tokens, temperature=temperature)
        key = RequestKey(group_id=number, member=0)
        batcher.add(Request(key=key, tokens=prompt, sampling=sampling, seed=number))
    done: dict[int, Completion] = {}
    while batcher.has_work:
        done.update((key.group_id, completion) for key, completion in batcher.step())
    return [Scored((*prompt, *done[n].tokens), done[n].logprobs) for n, prompt in enumerate(prompts)]


if __name__ == "__main__":
    main()
