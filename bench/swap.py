"""How long no token comes when weights are swapped under requests in flight: `keep` beside `recompute`, in one process.

    .venv/bin/python bench/swap.py [--json] [--requests 256] [--tokens 256]

On a GPU the 474M shape in bfloat16, else `tiny` in float32. The gap is between the last token that any request had before a
swap and the first that any has after it, and between the same of the slowest request; less what is usual between two steps.
With `recompute` every request's keys and values are computed anew, so that its gap grows with what is in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time

import torch

from engine import SHAPES, config_of
from millstream.clock import RealClock
from millstream.engine import EngineConfig, OnUpdate
from millstream.events.sinks import MemorySink
from millstream.model.load import new_model, set_up_cpu
from millstream.run.build import build_engine
from millstream.types import Request, RequestKey, Sampled, Sampling

SWAPS = 5


async def gaps(on_update: OnUpdate, requests: int, tokens: int) -> tuple[float, float]:
    """Medians over swaps, in seconds: until any request goes on, and until all do."""
    is_gpu = torch.cuda.is_available()
    with torch.device("cuda" if is_gpu else "cpu"):
        model = new_model(config_of(SHAPES["474M" if is_gpu else "tiny"]), seed=0, dtype=_dtype(is_gpu=is_gpu))
    config = EngineConfig(slots=requests, prefill_tokens=8192, process=False, on_update=on_update, cache="pages")
    engine = build_engine(config, model, clock=RealClock(), sink=MemorySink())
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    heard: dict[int, list[float]] = {number: [] for number in range(requests)}

    def ask(number: int) -> asyncio.Task[object]:
        sampling = Sampling(max_tokens=3 * tokens, temperature=1.0)
        key = RequestKey(group_id=number, member=0)
        request = Request(key=key, tokens=(5,) * tokens, sampling=sampling, seed=number)

        def hear(sampled: Sampled) -> None:
            heard[number].append(time.perf_counter())

        return asyncio.create_task(engine.generate(request, hear))

    going = [ask(number) for number in range(requests)]
    while min(map(len, heard.values())) < 16:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    first, last = list[float](), list[float]()
    for version in range(1, SWAPS + 1):
        began = time.perf_counter()
        await engine.load(version, weights)
        while min(times[-1] for times in heard.values()) < began + 0.05:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        first.append(_longest([time for times in heard.values() for time in times], began))
        last.append(max(_longest(times, began) for times in heard.values()))
    for task in going:
        task.cancel()
    await asyncio.gather(*going, return_exceptions=True)
    await engine.close()
    return statistics.median(first), statistics.median(last)


def _dtype(*, is_gpu: bool) -> torch.dtype:
    return torch.bfloat16 if is_gpu else torch.float32


def _longest(times: list[float], since: float) -> float:
    """The longest gap from shortly before the swap on, less the usual one."""
    sorted_ = sorted(times)
    between = [b - a for a, b in itertools.pairwise(sorted_)]
    around = [b - a for a, b in itertools.pairwise(sorted_) if b > since]
    return max(around, default=0.0) - statistics.median(between)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--requests", type=int, default=256 if torch.cuda.is_available() else 32)
    parser.add_argument("--tokens", type=int, default=256 if torch.cuda.is_available() else 32)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        set_up_cpu()
    found = {way: asyncio.run(gaps(way, options.requests, options.tokens)) for way in ("keep", "recompute")}
    workload = f"{options.requests} requests of {options.tokens} tokens and more in flight"
    rows = [
        {
            "workload": workload,
            "metric": metric,
            "ours": found["keep"][at],
            "peer": "recompute",
            "theirs": found["recompute"][at],
            "ratio": found["recompute"][at] / max(found["keep"][at], 1e-9),
        }
        for at, metric in enumerate(("s without any token", "s until every request goes on"))
    ]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(workload)
    for row in rows:
        print(f"{row['metric']:32} keep {1000 * row['ours']:8.1f} ms   recompute {1000 * row['theirs']:8.1f} ms")


if __name__ == "__main__":
    main()
