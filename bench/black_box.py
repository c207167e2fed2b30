"""The agent of recipes/tools.toml in the run (a white box), and as a program that calls the model by OpenAI's client
(recipes/agent.toml, a black box): the same tasks with the same seeds, on one engine. Tokens and rewards must be equal, and
log-probabilities nearly: decode batches have other sequences. Exits with 1 otherwise. The rates show what a program costs.

`--model` is that of a run of either recipe (RUN/model): the recipes' own has random weights, and calls no tool.

    .venv/bin/python bench/black_box.py [--json] [--smoke] [--model RUN/model] [--tasks 256]
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec import structs

from internals import EpisodeResult, MemorySink, Player, Router, recipe
from internals_torch import Prepared, RealClock, build_engine, prepare_run
from millstream.types import RequestKey, Rollout
from report import ROOT, Options, Row, alone, publish, rate, say

AT_ONCE = 64
TOLERANCE = 1e-4  # of a log-probability: float32, and batches of other sequences


async def played(prepared: Prepared, router: Router) -> tuple[list[EpisodeResult], float]:
    """Every held-out task once, and the seconds."""
    player = Player(prepared.environment, prepared.sampling, run_seed=0, role="train")
    free = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> EpisodeResult:
        async with free:
            key = RequestKey(group_id=number, member=0)
            return await player.play(prepared.held_out[number], key, lambda request: router.generate(request, floor=0))

    began = time.perf_counter()
    results = await asyncio.gather(*(one(number) for number in range(len(prepared.held_out))))
    return results, time.perf_counter() - began


def same_tokens(white: Rollout, black: Rollout) -> bool:
    return white.reward == black.reward and all(
        np.array_equal(getattr(white, name), getattr(black, name)) for name in ("tokens", "loss_mask")
    )


async def compared(white: Prepared, black: Prepared) -> tuple[list[Row], bool]:
    engine = build_engine(
        white.config.engine, white.model, clock=RealClock(), sink=MemorySink(), tokenizer=white.tokenizer
    )
    try:
        router = Router([engine])
        inside, inside_s = await played(white, router)
        outside, outside_s = await played(black, router)
    finally:
        await engine.close()
        for one in (white, black):
            await one.close()
    failures = [str(one.failure) for one in (*inside, *outside) if one.failure is not None]
    for message in sorted(set(failures)):
        say(f"{failures.count(message)} x {message}")
    pairs = [(a.parts[0], b.parts[0]) for a, b in zip(inside, outside, strict=True) if a.parts and b.parts]
    num_different = len(inside) - sum(same_tokens(a, b) for a, b in pairs)
    away = max((float(np.abs(a.logprobs - b.logprobs).max()) for a, b in pairs if same_tokens(a, b)), default=0.0)
    num_turns = [sum(len(part.turn_rewards) for one in side for part in one.parts) for side in (inside, outside)]
    work = f"{len(inside)} tasks, {num_turns[0]} turns"
    rows = [
        alone(work, "rollouts with other tokens or another reward", num_different),
        alone(work, "largest difference of a log-probability", away, digits=8),
        alone(work, "mean reward", float(np.mean([a.reward for a, _ in pairs]))),
        rate(work, "turns/s, agent in the run", num_turns[0] / inside_s, "as a program", num_turns[1] / outside_s),
    ]
    return rows, not num_different and not failures and away < TOLERANCE


def main(argv: Sequence[str] | None = None) -> None:
    options = Options(__doc__)
    options.add("--model", "", help="a folder with a checkpoint. Default: the recipes' own, with random weights")
    options.add("--tasks", 256, smoke=4)
    given = options.parse(argv)
    words = [f"data.holdout={given.tasks}", "engine.process=false", "rollout.workers=0"]
    words += [f"model.path={Path(given.model).resolve()}", "model.tiny="] if given.model else []
    prepared = []
    for name in ("tools", "agent"):
        config = recipe(name, *words)
        agent = str(ROOT / "recipes/data/lookup_agent.py:solve")
        environment = tuple(
            structs.replace(one, args={"function": agent}) if one.use == "agent" else one for one in config.environment
        )
        prepared.append(prepare_run(structs.replace(config, environment=environment)))
    rows, is_same = asyncio.run(compared(*prepared))
    publish(rows, given)
    if (
        given.model and not is_same
    ):  # random weights make calls that cannot be read: the program takes one for the answer
        sys.exit(1)


if __name__ == "__main__":
    main()
