"""How fast engines generate, all in one run: ours, vLLM with and without log-probabilities, transformers in continuous batches.

Prompts have 64 to 256 tokens, temperature 1. The loads 128 and 512 are that many requests of 256 tokens; `tail` is 1,024
requests of log-normal length (mean 256, at most 4,096). Each engine has a process of its own, one after the other; weights are
random, lengths are imposed. Every load runs once unmeasured (graphs, kernels), then `--repeat` times, of which the median is
shown. *First token* is from the start of building the engine, weights in memory, imports done. *Tail* is the time from when 90%
of the requests were done to the end. Every figure is printed as it comes; of an engine that is not done after `--timeout-s` the
figures so far count.

Without a GPU: the shape `tiny` in float32, where the peer is transformers' continuous batching. With `--smoke` in one process.

    .venv/bin/python bench/engine.py [--json] [--smoke] [--shapes 474M,1.7B] [--loads 128,512,tail] [--engines ours,vllm,...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from report import Options, Row, cost, publish, rate, say


class Shape(NamedTuple):
    hidden: int
    layers: int
    heads: int
    dim: int
    words: int


SHAPES = {
    "tiny": Shape(128, 4, 4, 32, 512),
    "474M": Shape(1024, 28, 16, 128, 32768),
    "1.7B": Shape(2048, 28, 16, 128, 151936),
}
ENGINES = {
    "ours": "Millstream",
    "vllm": "vLLM, log-probs",
    "vllm_bare": "vLLM, no log-probs",
    "transformers": "transformers continuous batching",
}
CONTEXT = 4608
MAX_S = 45.0
"""A load that takes longer is not repeated."""


class Work(NamedTuple):
    prompts: list[list[int]]
    lengths: list[int]


def work_of(load: str, words: int) -> Work:
    rng = np.random.default_rng(7)
    if load == "tail":
        lengths = np.clip(rng.lognormal(np.log(256) - 0.5, 1.0, 1024), 4, 4096).astype(int).tolist()
    else:
        lengths = [256 if words > 1000 else 64] * int(load)
    prompt_lengths = rng.integers(64, 257, len(lengths)) if words > 1000 else rng.integers(8, 33, len(lengths))
    return Work([rng.integers(3, words, length).tolist() for length in prompt_lengths], lengths)


Timed = tuple[float, list[float]]
"""Seconds in all, and when each request was done."""


# ---- sides: each in a process of its own -------------------------------------------------------------------------------


Tell = Callable[..., None]
"""Called with what was measured (a load, or the name of a figure) and the values."""


def config_of(shape: Shape) -> Any:
    from internals_torch import qwen3  # slow to import, and vLLM may fork before CUDA is touched

    return qwen3(**shape._asdict(), context=CONTEXT)


def ours(shape: Shape, tell: Tell, loads: list[str], repeat: int) -> None:
    import torch

    from internals_torch import engine_of, model_of, set_up_cpu
    from millstream import EngineConfig
    from millstream.types import Request, RequestKey, Sampling

    is_gpu = torch.cuda.is_available()
    if not is_gpu:
        set_up_cpu()
    device, dtype = ("cuda", torch.bfloat16) if is_gpu else ("cpu", torch.float32)
    model = model_of(config_of(shape), device=device, dtype=dtype)
    began = time.perf_counter()
    config = EngineConfig(slots=512, prefill_tokens=8192 if is_gpu else 4096, process=False)

    def request(number: int, prompt: list[int], length: int) -> Request:
        sampling = Sampling(max_tokens=length, temperature=1.0)
        return Request(key=RequestKey(group_id=number, member=0), tokens=tuple(prompt), sampling=sampling, seed=number)

    async def run() -> None:
        engine = engine_of(config, model)
        one = request(0, [5] * 64, 1)
        await engine.generate(one)
        tell("first token", time.perf_counter() - began)

        async def timed(work: Work) -> Timed:
            start, ends = time.perf_counter(), list[float]()

            async def generate(number: int, prompt: list[int], length: int) -> None:
                done = await engine.generate(request(number, prompt, length))
                assert len(done.tokens) == len(done.logprobs) == length
                ends.append(time.perf_counter() - start)

            await asyncio.gather(*(generate(n, *one) for n, one in enumerate(zip(*work, strict=True))))
            return time.perf_counter() - start, ends

        for load in loads:
            work = work_of(load, shape.words)
            await timed(work)
            for _ in range(repeat):
                tell(load, *await timed(work))
        if is_gpu:
            weights = {name: value.detach().clone() for name, value in model.named_parameters()}
            seconds = list[float]()
            flights = [asyncio.create_task(engine.generate(request(n, [5] * 64, 2048))) for n in range(256)]
            for version in range(1, 8):
                await engine.load(version, weights)
                await asyncio.sleep(0.6)  # the figure comes with the next report
                seconds.append(engine.stats().swap_s)
            tell("swap", statistics.median(seconds))
            for n, task in enumerate(flights):
                await engine.abort(request(n, [5], 1).key)
                await task
        await engine.close()

    asyncio.run(run())


def vllm(shape: Shape, tell: Tell, loads: list[str], repeat: int) -> None:
    """With log-probabilities, and (`LOAD bare`) without: one start for both."""
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "spawn"
    from vllm import LLM, SamplingParams, TokensPrompt

    with tempfile.TemporaryDirectory() as folder:
        config_of(shape).save_pretrained(folder)
        path = Path(folder) / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["Qwen3ForCausalLM"]}))
        began = time.perf_counter()
        model = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=CONTEXT,
            max_num_seqs=512,
            gpu_memory_utilization=0.6,
            disable_log_stats=False,
        )

        def sampling(length: int, logprobs: int | None) -> Any:
            return SamplingParams(
                temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=logprobs, detokenize=False
            )

        model.generate([TokensPrompt(prompt_token_ids=[5] * 64)], sampling(1, None), use_tqdm=False)
        tell("first token", time.perf_counter() - began)
        for load, logprobs in [(load, logprobs) for logprobs in (0, None) for load in loads]:
            work = work_of(load, shape.words)
            prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in work.prompts]
            samplings = [sampling(length, logprobs) for length in work.lengths]
            model.generate(prompts, samplings, use_tqdm=False)
            for _ in range(repeat):
                start = time.perf_counter()
                outs = model.generate(prompts, samplings, use_tqdm=False)
                seconds = time.perf_counter() - start
                assert sum(len(out.outputs[0].token_ids) for out in outs) == sum(work.lengths)
                tell(load if logprobs == 0 else f"{load} bare", seconds, _ends(outs))


def _ends(outs: list[Any]) -> list[float]:
    """When each request was done, where vLLM says so."""
    metrics = [out.metrics for out in outs]
    if any(one is None or not getattr(one, "last_token_ts", 0) for one in metrics):
        return []
    first = min(one.queued_ts for one in metrics)
    return [one.last_token_ts - first for one in metrics]


def transformers(shape: Shape, tell: Tell, loads: list[str], repeat: int) -> None:
    import logging

    import torch
    from transformers import ContinuousBatchingConfig, GenerationConfig, Qwen3ForCausalLM

    logging.disable(logging.WARNING)
    is_gpu = torch.cuda.is_available()
    if not is_gpu:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.device("cuda" if is_gpu else "cpu"):
        model = Qwen3ForCausalLM._from_config(config_of(shape), attn_implementation="sdpa").eval()
    model = model.to(torch.bfloat16) if is_gpu else model
    began = time.perf_counter()

    def generate(prompts: list[list[int]], length: int) -> Any:
        config = GenerationConfig(
            max_new_tokens=length, do_sample=True, temperature=1.0, eos_token_id=-1, pad_token_id=0
        )
        batching = ContinuousBatchingConfig(
            return_logprobs=True, **({} if is_gpu else {"num_blocks": 192, "max_batch_tokens": 256})
        )
        return model.generate_batch(prompts, generation_config=config, continuous_batching_config=batching)

    with torch.no_grad():
        generate([[5] * 16], 1)
        tell("first token", time.perf_counter() - began)
        for load in loads:
            work = work_of(load, shape.words)
            if len(set(work.lengths)) > 1:
                continue  # one length for all requests of a call
            for _ in range(repeat):
                start = time.perf_counter()
                outs = generate(work.prompts, work.lengths[0])
                seconds = time.perf_counter() - start
                assert sum(len(out.generated_tokens) for out in outs.values()) == sum(work.lengths)
                tell(load, seconds, [])
                if seconds > MAX_S:
                    break


SIDES = {"ours": ours, "vllm": vllm, "transformers": transformers}


# ---- the run -----------------------------------------------------------------------------------------------------------


def in_this_process(name: str, shape: str, loads: list[str], repeat: int) -> Iterator[tuple[str, list[Any]]]:
    figures: list[tuple[str, list[Any]]] = []
    SIDES[name](SHAPES[shape], lambda what, *values: figures.append((what, list(values))), loads, repeat)
    yield from figures


def in_a_process(
    name: str, shape: str, loads: list[str], repeat: int, timeout_s: float
) -> Iterator[tuple[str, list[Any]]]:
    """Figures of an engine as they come. Its processes are gone when this ends; figures before a failure count."""
    command = [sys.executable, __file__, "--side", name, "--shapes", shape, "--loads", ",".join(loads)]
    process = subprocess.Popen(
        [*command, "--repeat", str(repeat)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    is_late = threading.Event()

    def end() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # vLLM's processes too, which hold the GPU and the pipe

    def too_late() -> None:
        is_late.set()
        end()

    timer = threading.Timer(timeout_s, too_late)
    timer.start()
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("TOLD "):
                what, *values = json.loads(line[5:])
                yield what, values
        if is_late.is_set():
            say(f"{ENGINES[name]}: not done after {timeout_s:.0f} s")
        elif process.wait() != 0:
            say(f"{ENGINES[name]}: ended with {process.returncode}")
    finally:
        timer.cancel()
        end()
        process.wait()


class Speed(NamedTuple):
    tokens_per_s: float
    tail_s: float | None


Found = dict[tuple[str, str, str], Speed]
"""By shape, load and engine."""
Others = dict[tuple[str, str, str], float]
"""Seconds, by shape, what and engine."""


def summary(load: str, words: int, times: list[Any]) -> Speed:
    lengths = work_of(load, words).lengths
    seconds = statistics.median(total for total, _ in times)
    tails = [total - sorted(ends)[len(lengths) * 9 // 10 - 1] for total, ends in times if ends]
    return Speed(sum(lengths) / seconds, statistics.median(tails) if tails else None)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main(argv: Sequence[str] | None = None) -> None:
    is_gpu = "--side" in (argv or sys.argv) or _has_gpu()  # a side may fork, which it cannot once CUDA is touched
    parser = Options(__doc__)
    parser.add("--shapes", "474M" if is_gpu else "tiny", smoke="tiny")
    parser.add("--loads", "128,512,tail" if is_gpu else "128,512", smoke="4")
    parser.add("--engines", "ours,vllm,transformers" if is_gpu else "ours,transformers", smoke="ours,transformers")
    parser.add("--repeat", 3, smoke=1)
    parser.add("--timeout-s", 400.0)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse(argv)
    loads = options.loads.split(",")
    if options.side:

        def tell(*what: Any) -> None:
            print("TOLD " + json.dumps(what), flush=True)

        SIDES[options.side](SHAPES[options.shapes], tell, loads, options.repeat)
        return
    found, others = Found(), Others()
    if not options.smoke:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was measured until then is printed
    try:
        for shape in options.shapes.split(","):
            for engine in options.engines.split(","):
                measure(shape, engine, loads, options, found, others)
    finally:
        publish(compare(found, others), options)


def measure(
    shape: str, engine: str, loads: list[str], options: argparse.Namespace, found: Found, others: Others
) -> None:
    """Into `found` and `others`, as the figures of an engine come."""
    times: dict[str, list[Any]] = {}
    if options.smoke:
        figures = in_this_process(engine, shape, loads, options.repeat)
    else:
        figures = in_a_process(engine, shape, loads, options.repeat, options.timeout_s)
    for what, values in figures:
        load, _, bare = what.partition(" ")
        if load not in loads:
            others[shape, what, engine] = values[0]
            say(f"{shape:>5} {what:>12} {ENGINES[engine]:<30} {values[0]:9.4f} s")
            continue
        name = f"{engine}_{bare}" if bare else engine
        times.setdefault(what, []).append(values)
        speed = found[shape, load, name] = summary(load, SHAPES[shape].words, times[what])
        tail = "" if speed.tail_s is None else f"   tail {speed.tail_s:6.2f} s"
        runs = f"   (of {len(times[what])})"
        say(f"{shape:>5} {load:>5} {ENGINES[name]:<34} {speed.tokens_per_s:>9,.0f} tokens/s{tail}{runs}")


def compare(found: Found, others: Others) -> list[Row]:
    rows: list[Row] = []
    for (shape, load, engine), theirs in found.items():
        mine, peer, workload = found.get((shape, load, "ours")), ENGINES[engine], f"{shape}, {load}"
        if engine == "ours" or mine is None:
            continue
        rows.append(rate(workload, "tokens/s", mine.tokens_per_s, peer, theirs.tokens_per_s))
        if theirs.tail_s and mine.tail_s:
            rows.append(cost(workload, "tail s", mine.tail_s, peer, theirs.tail_s))
    for (shape, what, engine), seconds in others.items():
        own = others.get((shape, what, "ours"))
        if engine != "ours" and own is not None:
            rows.append(cost(shape, f"{what}, s", own, ENGINES[engine], seconds, digits=4))
    return rows


if __name__ == "__main__":
    main()
