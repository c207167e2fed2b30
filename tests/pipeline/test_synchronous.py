"""With max_lag = 0 the asynchronous pipeline is synchronous training, bit for bit.

The reference is a plain generate-then-train loop that uses only engine, learner and algorithm functions: no pipeline, no
admission, no store, no events.
"""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
import torch

from millstream.algo import AlgorithmConfig, recipe
from millstream.algo.advantages import grpo, has_signal
from millstream.clock import RealClock
from millstream.engine import EngineConfig
from millstream.engine.native.engine import TorchEngine
from millstream.events import GroupLeft, GroupTaken, WeightsLoaded
from millstream.events.sinks import MemorySink
from millstream.learner.packing import Packer
from millstream.learner.torch import TorchLearner
from millstream.pipeline.pipeline import (
    Algorithm,
    Parts,
    Pipeline,
)
from millstream.pipeline.rollouts import RolloutConfig
from millstream.pipeline.schedule import PipelineConfig
from millstream.pipeline.schema import store_tasks
from millstream.pipeline.waits import Waits
from millstream.run.build import build_engine
from millstream.seeds import request_seed
from millstream.store.memory import MemoryStore
from millstream.types import Completion, Fate, Request, RequestKey, Task, TrainRow, Weights
from millstream.weights.local import LocalChannel
from support.delayed import LEARNER, SAMPLING, DelayedReward, prompt, reward, tasks
from support.tiny import make

STEPS, GROUPS, MEMBERS, SLOTS, SEED = 10, 4, 4, 6, 5


def make_engine(name: str = "engine", *, is_process: bool = False) -> TorchEngine:
    config = EngineConfig(slots=SLOTS, process=is_process)
    engine = build_engine(config, make("qwen3"), clock=RealClock(), sink=MemorySink(), name=name)
    assert isinstance(engine, TorchEngine)
    return engine


def parts(*, is_process: bool = False) -> tuple[TorchEngine, TorchLearner]:
    return make_engine(is_process=is_process), TorchLearner(
        make("qwen3"), LEARNER, recipe.objective(AlgorithmConfig(), max_tokens=12), num_steps=STEPS
    )


# ---- the plain loop ----------------------------------------------------------------------------------------------------


async def generate(
    engine: TorchEngine, groups: list[tuple[int, Task]]
) -> dict[int, list[tuple[list[int], Completion]]]:
    """All rollouts of these groups, queued in the order of their ids before the engine starts."""
    await engine.pause()
    flights = []
    for group_id, task in groups:
        for member in range(MEMBERS):
            key = RequestKey(group_id=group_id, member=member)
            request = Request(
                key=key, tokens=tuple(prompt(task)), sampling=SAMPLING, seed=request_seed(SEED, "train", key)
            )
            flights.append(asyncio.ensure_future(engine.generate(request)))
    await asyncio.sleep(0)
    await engine.resume()
    done = iter(await asyncio.gather(*flights))
    return {group_id: [(prompt(task), next(done)) for _ in range(MEMBERS)] for group_id, task in groups}


def rows(rollouts: list[tuple[list[int], Completion]]) -> list[TrainRow]:
    advantages = grpo(np.array([reward(completion) for _, completion in rollouts]))
    made = []
    for (context, completion), advantage in zip(rollouts, advantages, strict=True):
        shown = len(context)
        tokens = np.array([*context, *completion.tokens], dtype=np.int32)
        logprobs = np.array([*[0.0] * shown, *completion.logprobs], dtype=np.float32)
        mask = np.arange(len(tokens)) >= shown
        per_token = np.full(len(tokens), advantage, dtype=np.float32)
        made.append(TrainRow(tokens=tokens, loss_mask=mask, logprobs=logprobs, advantages=per_token))
    return made


async def plain_loop() -> Weights:
    engine, learner = parts()
    numbered = enumerate(tasks())
    for version in range(1, STEPS + 1):
        kept: dict[int, list[tuple[list[int], Completion]]] = {}
        while len(kept) < GROUPS:  # groups without signal are replaced by new prompts
            wave = [next(numbered) for _ in range(GROUPS - len(kept))]
            found = await generate(engine, wave)
            kept |= {g: r for g, r in found.items() if has_signal(np.array([reward(c) for _, c in r]))}
        packer = Packer[TrainRow](LEARNER.micro_batch_tokens)
        await learner.begin_batch()
        for group_id in sorted(kept):
            for row in rows(kept[group_id]):
                if micro_batch := packer.add(row):
                    await learner.accumulate(micro_batch)
        await learner.accumulate(packer.flush())
        await learner.step()
        await engine.load(version, await learner.weights())
    await engine.close()
    return await learner.weights()


@pytest.fixture(scope="module")
def plain() -> Weights:
    return asyncio.run(plain_loop())


# ---- the pipeline ------------------------------------------------------------------------------------------------------


async def pipeline(
    delay_seed: int, sink: MemorySink, *, max_lag: float = 0, is_process: bool = False, num_more: int = 0
) -> Weights:
    """`num_more`: replicas beside the engine."""
    engine, learner = parts(is_process=is_process)
    engines = (engine, *(make_engine(f"engine-{number}") for number in range(num_more)))
    clock = RealClock()
    channel = LocalChannel()
    await channel.publish(0, await learner.weights())
    run = Pipeline(
        Parts(
            engines=engines,
            environment=DelayedReward(random.Random(delay_seed)),
            learner=learner,
            store=MemoryStore(store_tasks(), capacity_rows=100),
            channel=channel,
            clock=clock,
            sink=sink,
            waits=Waits(clock=clock, sink=sink, stall_s=30.0, deadline_s=120.0),
        ),
        ((0, task) for task in tasks()),
        Algorithm(advantage=grpo, sampling=SAMPLING, micro_batch_tokens=LEARNER.micro_batch_tokens),
        config=PipelineConfig(steps=STEPS, groups_per_step=GROUPS, max_lag=max_lag),
        rollout=RolloutConfig(group_size=MEMBERS),
        seed=SEED,
    )
    await run.run()
    for one in engines:
        await one.close()
    return await learner.weights()


@pytest.mark.parametrize("delay_seed", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_ten_steps_at_max_lag_zero_give_the_weights_of_a_plain_loop_bit_for_bit(
    delay_seed: int, plain: Weights
) -> None:
    sink = MemorySink()
    ours = asyncio.run(pipeline(delay_seed, sink, is_process=delay_seed == 2))
    assert len(sink.of(GroupTaken)) == STEPS * GROUPS
    assert Fate.FILTERED in {event.fate for event in sink.of(GroupLeft)}, "replacements are part of what is compared"
    assert all(torch.equal(ours[name], plain[name]) for name in plain)
    start = dict(make("qwen3").named_parameters())
    assert any(not torch.equal(ours[name], start[name]) for name in start), "it trained"


def test_with_a_lag_the_weights_differ_so_the_comparison_can_fail(plain: Weights) -> None:
    asynchronous = asyncio.run(pipeline(0, MemorySink(), max_lag=1))
    assert any(not torch.equal(plain[name], asynchronous[name]) for name in plain)


@pytest.mark.slow
def test_with_two_replicas_the_weights_are_the_same_however_long_rewards_take() -> None:
    """To the last bits they need not be those of one engine: other requests are decoded together."""
    sinks = [MemorySink(), MemorySink()]
    first, second = (asyncio.run(pipeline(seed, sink, num_more=1)) for seed, sink in enumerate(sinks))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert {event.engine for event in sinks[0].of(WeightsLoaded)} == {"engine", "engine-0"}
