"""How long no token comes when weights are swapped under requests in flight: `keep` beside `recompute`, in one process.

On a GPU the 474M shape in bfloat16, else `tiny` in float32. The gap is between the last token that any request had before a
swap and the first that any has after it, and between the same of the slowest request; less what is usual between two steps.
With `recompute` every request's keys and values are computed again, so that its gap grows with what is in flight.

    .venv/bin/python bench/swap.py [--json] [--smoke] [--requests 256] [--tokens 256]
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import get_args

import torch

from engine import SHAPES, config_of
from internals_torch import engine_of, model_of, set_up_cpu
from millstream.engine import EngineConfig, OnUpdate
from millstream.types import Request, RequestKey, Sampled, Sampling
from report import Options, cost, publish


async def gaps(on_update: OnUpdate, requests: int, tokens: int, swaps: int) -> tuple[float, float]:
    """Medians over swaps, in seconds: until any request has its next token, and until all have."""
    is_gpu = torch.cuda.is_available()
    shape, device = ("474M", "cuda") if is_gpu else ("tiny", "cpu")
    model = model_of(config_of(SHAPES[shape]), device=device, dtype=torch.bfloat16 if is_gpu else torch.float32)
    config = EngineConfig(slots=requests, prefill_tokens=8192, process=False, on_update=on_update, cache="pages")
    engine = engine_of(config, model)
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

    async def until(is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            if any(task.done() for task in going):
                raise SystemExit("a request ended before the last swap: set --tokens higher, or --swaps lower")
            await asyncio.sleep(0.02)

    def has_token_since(moment: float) -> bool:
        return min(times[-1] for times in heard.values()) >= moment

    await until(lambda: min(map(len, heard.values())) >= 16)
    first, last = list[float](), list[float]()
    for version in range(1, swaps + 1):
        began = time.perf_counter()
        await engine.load(version, weights)
        await until(partial(has_token_since, began + 0.05))
        first.append(_longest([time for times in heard.values() for time in times], began))
        last.append(max(_longest(times, began) for times in heard.values()))
    for task in going:
        task.cancel()
    await asyncio.gather(*going, return_exceptions=True)
    await engine.close()
    return statistics.median(first), statistics.median(last)


def _longest(times: list[float], since: float) -> float:
    """The longest gap from shortly before the swap on, less the usual one."""
    sorted_ = sorted(times)
    between = [b - a for a, b in itertools.pairwise(sorted_)]
    around = [b - a for a, b in itertools.pairwise(sorted_) if b > since]
    return max(around, default=0.0) - statistics.median(between)


def main(argv: Sequence[str] | None = None) -> None:
    is_gpu = torch.cuda.is_available()
    parser = Options(__doc__)
    parser.add("--requests", 256 if is_gpu else 32, smoke=2)
    parser.add("--tokens", 256 if is_gpu else 32, smoke=256)
    parser.add("--swaps", 5, smoke=1)
    options = parser.parse(argv)
    if not is_gpu:
        set_up_cpu()
    sizes = (options.requests, options.tokens, options.swaps)
    found = {way: asyncio.run(gaps(way, *sizes)) for way in get_args(OnUpdate)}
    workload = f"keep, {options.requests} requests of {options.tokens} tokens and more in flight"
    rows = [
        cost(workload, metric, 1000 * found["keep"][at], "recompute", 1000 * found["recompute"][at])
        for at, metric in enumerate(("ms without any token", "ms until every request has its next token"))
    ]
    publish(rows, options)


if __name__ == "__main__":
    main()
