"""vLLM as an engine of ours, measured on this machine: start, speed, how long a swap of weights holds decoding up, and whether
log-probabilities and versions are right. About two minutes on a GPU. With `--smoke` and without vLLM our own engine takes its
place, which shows that the benchmark runs.

    python bench/vllm_check.py                       # a small model in float32: everything is compared with transformers
    python bench/vllm_check.py --size 0.5b           # the shape of a real one in bfloat16
    python bench/vllm_check.py --weights file --no-prefix-cache
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from internals_torch import VllmConfig, engine_of, model_of, set_up_cpu
from millstream import EngineConfig
from millstream.engine import Engine
from millstream.types import Completion, Request, RequestKey, Sampling
from report import Options, Row, alone, publish

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4},
    "0.5b": {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
}
SHAPE = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
PROMPT = tuple(range(10, 74))
SWAPS = 6


def make(size: str, seed: int, device: str) -> PreTrainedModel:
    dtype = torch.float32 if size == "tiny" else torch.bfloat16
    heads = {"head_dim": 32 if size == "tiny" else 128}
    return model_of(Qwen3Config(**SHAPE, **heads, **SIZES[size]), device=device, dtype=dtype, seed=seed)


def twin(size: str, seed: int, device: str) -> PreTrainedModel:
    """The same weights in the library's own attention, without any of our code."""
    model = make(size, seed, device)
    with torch.device(device):
        plain = AutoModelForCausalLM.from_config(model.config, attn_implementation="sdpa", dtype=model.dtype)
    plain.load_state_dict(model.state_dict())
    return plain.eval()


def ask(number: int, max_tokens: int) -> Request:
    key = RequestKey(group_id=number, member=0)
    return Request(key=key, tokens=(*PROMPT, number % 500), sampling=Sampling(max_tokens=max_tokens), seed=number)


@torch.no_grad()
def worst_error(models: dict[int, PreTrainedModel], request: Request, completion: Completion) -> float:
    """Of log-probabilities, against a forward pass of transformers under each token's version, in nats."""
    device = next(iter(models.values())).device
    ids = torch.tensor([[*request.tokens, *completion.tokens]], device=device)
    at, errors = len(request.tokens) - 1, list[float]()
    for version, model in models.items():
        logprobs = torch.log_softmax(model(ids).logits[0, at:-1].float(), -1)
        own = logprobs.gather(1, ids[0, at + 1 :, None])[:, 0].tolist()
        rows = zip(own, completion.logprobs, completion.versions, strict=True)
        errors += [abs(one - other) for one, other, of in rows if of == version]
    return max(errors)


async def measure(engine: Engine, name: str, device: str, options: argparse.Namespace) -> list[Row]:
    size, workload = options.size, f"{name}, {options.size}, {engine.slots} at a time"
    began = time.perf_counter()
    await engine.generate(ask(0, 4))
    rows = [alone(workload, "start, s", time.perf_counter() - began)]
    first = twin(size, 0, device)
    asked = [ask(number, options.tokens) for number in range(2 * engine.slots)]
    began = time.perf_counter()
    completions = await asyncio.gather(*map(engine.generate, asked))
    seconds = time.perf_counter() - began
    rows.append(alone(workload, "tokens/s", sum(len(c.tokens) for c in completions) / seconds, digits=0))
    worst = max(worst_error({0: first}, one, c) for one, c in zip(asked[:8], completions, strict=False))
    rows.append(alone(workload, "log-probabilities: nats from transformers at worst", worst, digits=7))

    models, pauses, waits = {0: first, 1: twin(size, 1, device)}, list[float](), list[float]()
    weights = {version: {name: p.detach() for name, p in model.named_parameters()} for version, model in models.items()}
    asked = [ask(number, 12 * options.tokens) for number in range(min(engine.slots, 64))]
    flights = [asyncio.ensure_future(engine.generate(one)) for one in asked]
    before = engine.stats().tokens_generated
    for version in range(1, SWAPS + 1):
        while engine.stats().tokens_generated < before + 20 * version * len(flights):
            done, _ = await asyncio.wait(flights, timeout=0.005, return_when=asyncio.FIRST_EXCEPTION)
            for flight in done:
                flight.result()  # raises what broke the engine
        began = time.perf_counter()
        await engine.load(version, weights[version % 2])
        waits.append(time.perf_counter() - began)
        pauses.append(engine.stats().swap_s)
    await asyncio.sleep(0.3)
    for one in asked:
        await engine.abort(one.key)
    completions = await asyncio.gather(*flights)
    in_flight = f"{workload}, {len(flights)} in flight"
    rows += [
        alone(in_flight, "swap: ms without a token, median", 1000 * statistics.median(pauses)),
        alone(in_flight, "swap: ms without a token, at most", 1000 * max(pauses)),
        alone(in_flight, "load: ms for copy and swap", 1000 * statistics.median(waits)),
    ]
    assert all(list(c.versions) == sorted(c.versions) and len(set(c.versions)) >= 3 for c in completions)
    served = {version: models[version % 2] for version in range(SWAPS + 1)}
    worst = max(worst_error(served, one, c) for one, c in list(zip(asked, completions, strict=True))[:8])
    rows.append(alone(in_flight, "across swaps: nats from transformers at worst", worst, digits=7))
    assert worst < (5e-3 if size == "tiny" else 0.5), "a token has another version's log-probability"
    return rows


async def run(options: argparse.Namespace) -> list[Row]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    set_up_cpu()
    if options.smoke and importlib.util.find_spec("vllm") is None:
        name = "stub (vLLM is not installed): our own engine"
        config = EngineConfig(slots=options.slots, process=False, on_update="recompute", cache="pages")
    else:
        name = "vLLM"
        vllm = VllmConfig(
            weights=options.weights, prefix_cache=options.prefix_cache, enforce_eager=options.eager or device == "cpu"
        )
        config = EngineConfig(kind="vllm", slots=options.slots, on_update="recompute", vllm=vllm)
    engine = engine_of(config, make(options.size, 0, device))
    try:
        return await measure(engine, name, device, options)
    finally:
        await engine.close()


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add("--slots", 64, smoke=4)
    parser.add("--tokens", 128, smoke=16, help="of an answer; twelve times as many where weights are swapped")
    parser.add_argument("--weights", choices=["shared", "file"], default="shared")
    parser.add_argument("--prefix-cache", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--eager", action="store_true", help="no compiling, no CUDA graphs: starts faster")
    options = parser.parse(argv)
    publish(asyncio.run(run(options)), options)


if __name__ == "__main__":
    main()
