"""vLLM behind our seam, measured on this machine: start, speed, how long a swap of weights holds decoding up, and whether
log-probabilities and versions are right. About two minutes on a GPU.

    python bench/vllm_check.py                       # a small model in float32: everything is compared with transformers
    python bench/vllm_check.py --size 0.5b           # the shape of a real one in bfloat16
    python bench/vllm_check.py --weights file --no-prefix-cache
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from millstream.clock import RealClock
from millstream.engine import Engine, EngineConfig
from millstream.engine.vllm.config import VllmConfig
from millstream.events.sinks import MemorySink
from millstream.model.load import new_model, set_up_cpu
from millstream.run.build import build_engine
from millstream.types import Completion, Request, RequestKey, Sampling

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


def make(size: str, seed: int, device: str) -> PreTrainedModel:
    dtype = torch.float32 if size == "tiny" else torch.bfloat16
    heads = {"head_dim": 32 if size == "tiny" else 128}
    with torch.device(device):
        return new_model(Qwen3Config(**SHAPE, **heads, **SIZES[size]), seed=seed, dtype=dtype)


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


async def measure(engine: Engine, size: str, device: str, *, is_recomputed: bool) -> None:
    began = time.perf_counter()
    await engine.generate(ask(0, 4))
    print(f"start                  {time.perf_counter() - began:8.1f} s")
    first = twin(size, 0, device)
    asked = [ask(number, 128) for number in range(2 * engine.slots)]
    began = time.perf_counter()
    completions = await asyncio.gather(*map(engine.generate, asked))
    seconds = time.perf_counter() - began
    print(
        f"speed                  {sum(len(c.tokens) for c in completions) / seconds:8.0f} tokens/s, {engine.slots} at a time"
    )
    worst = max(worst_error({0: first}, one, c) for one, c in zip(asked[:8], completions, strict=False))
    print(f"log-probabilities      {worst:8.1e} nats from transformers at worst")

    models, pauses, waits = {0: first, 1: twin(size, 1, device)}, list[float](), list[float]()
    weights = {version: {name: p.detach() for name, p in model.named_parameters()} for version, model in models.items()}
    asked = [ask(number, 1500) for number in range(min(engine.slots, 64))]
    flights = [asyncio.ensure_future(engine.generate(one)) for one in asked]
    before = engine.stats().tokens_generated
    for version in range(1, 7):
        while engine.stats().tokens_generated < before + 20 * version * len(flights):
            done, _ = await asyncio.wait(flights, timeout=0.005, return_when=asyncio.FIRST_EXCEPTION)
            for flight in done:
                flight.result()  # an engine that broke says so here
        began = time.perf_counter()
        await engine.load(version, weights[version % 2])
        waits.append(time.perf_counter() - began)
        pauses.append(engine.stats().swap_s)
    await asyncio.sleep(0.3)
    for one in asked:
        await engine.abort(one.key)
    completions = await asyncio.gather(*flights)
    middle, most = statistics.median(pauses), max(pauses)
    print(f"swap, {len(flights):3} in flight    {1000 * middle:8.1f} ms without a token (at most {1000 * most:.1f})")
    print(f"load, copy and swap    {1000 * statistics.median(waits):8.1f} ms")
    assert all(list(c.versions) == sorted(c.versions) and len(set(c.versions)) >= 3 for c in completions)
    if is_recomputed:
        served = {version: models[version % 2] for version in range(7)}
        worst = max(worst_error(served, one, c) for one, c in list(zip(asked, completions, strict=True))[:8])
        print(f"across swaps           {worst:8.1e} nats from transformers at worst, each token under its version")
        assert worst < (5e-3 if size == "tiny" else 0.5), "a token has another version's log-probability"


async def main(arguments: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    set_up_cpu()
    vllm = VllmConfig(
        weights=arguments.weights, prefix_cache=arguments.prefix_cache, enforce_eager=arguments.eager or device == "cpu"
    )
    config = EngineConfig(kind="vllm", slots=arguments.slots, vllm=vllm)
    model = make(arguments.size, 0, device)
    engine = build_engine(config, model, clock=RealClock(), sink=MemorySink())
    try:
        await measure(engine, arguments.size, device, is_recomputed=arguments.prefix_cache)
    finally:
        await engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--weights", choices=["shared", "file"], default="shared")
    parser.add_argument("--prefix-cache", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--eager", action="store_true", help="no compiling, no CUDA graphs: starts faster")
    asyncio.run(main(parser.parse_args()))
