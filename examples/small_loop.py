"""Asynchronous reinforcement learning with the real parts of Millstream, written out as one loop that you can copy and change.

Between `one_file.py`, which has no dependency, and the package: a language model, the real engine (continuous batching, weights
swapped while it generates), the real learner (packed rows, AdamW) and the real admission rule. A run of the package adds
environments, checkpoints, an event log, retries and several processes around this loop.

The data goes round like this:

    feed (admission) -> roll out a group (engine, reward, advantage) -> train (learner) -> weights -> engine

The task: the prompt is a digit, the answer is the next three. The model is built on the spot and knows nothing at first.

    python examples/small_loop.py [--steps 100] [--max-lag 2] [--model FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import Callable

import numpy as np

from millstream import AlgorithmConfig, EngineConfig, LearnerConfig, ModelConfig, TinyConfig
from millstream.algo.advantages import grpo
from millstream.algo.recipe import objective
from millstream.clock import RealClock
from millstream.events.sinks import MemorySink
from millstream.learner.torch import TorchLearner
from millstream.model.load import set_up_cpu
from millstream.pipeline.admission import Admission
from millstream.run.build import build_engine, build_model
from millstream.seeds import derive_seed
from millstream.types import Completion, Request, RequestKey, Sampling, TrainRow

GROUPS_PER_STEP = 8
GROUP_SIZE = 16
MAX_TOKENS = 3
LEARNING_RATE = 2e-3
TINY = ModelConfig(tiny=TinyConfig(hidden=128, layers=1, heads=4, context=16, alphabet="0123456789>"), device="cpu")


def reward(prompt: str, answer: str) -> float:
    """The share of the three digits that are right."""
    right = [str((int(prompt[0]) + i + 1) % 10) for i in range(MAX_TOKENS)]
    return sum(found == expected for found, expected in zip(answer, right, strict=False)) / MAX_TOKENS


def row_of(prompt: list[int], completion: Completion, advantage: float) -> TrainRow:
    """An answer as the learner sees it: all tokens, which of them were sampled, how likely they were then, and how good."""
    before, length = len(prompt), len(prompt) + len(completion.tokens)
    logprobs = np.zeros(length, np.float32)
    logprobs[before:] = completion.logprobs  # the engine's own: with them, training on old samples is correct
    return TrainRow(
        tokens=np.array([*prompt, *completion.tokens], np.int32),
        loss_mask=np.arange(length) >= before,
        logprobs=logprobs,
        advantages=np.full(length, advantage, np.float32),
    )


class Loop:
    """Three kinds of coroutines on one event loop: one `feed`, one `train`, and a `roll_out` for every group in flight."""

    def __init__(self, steps: int, max_lag: int, config: ModelConfig = TINY, seed: int = 0) -> None:
        set_up_cpu()
        self.steps = steps
        self.max_lag = max_lag
        self.seed = seed
        model, self.tokenizer = build_model(config, seed=seed)
        # The engine generates with a copy of the model; the learner trains the model itself.
        engine_config = EngineConfig(slots=256, process=False)
        self.engine = build_engine(engine_config, model, clock=RealClock(), sink=MemorySink())
        loss = objective(AlgorithmConfig(loss="ppo", clip_high=0.28), max_tokens=MAX_TOKENS)
        self.learner = TorchLearner(model, LearnerConfig(learning_rate=LEARNING_RATE), loss)
        self.admission = Admission(groups_per_step=GROUPS_PER_STEP, max_lag=max_lag, num_steps=steps)
        self.ready: dict[int, list[TrainRow]] = {}  # groups that can be trained
        self.seen: list[float] = []  # rewards since the last step
        self.changed = asyncio.Condition()
        self.rewards: list[float] = []  # of every step
        self.lags: list[int] = []  # of every group that was trained

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            feeding = tasks.create_task(self.feed(tasks))
            await self.train()
            feeding.cancel()
        await self.engine.close()
        await self.learner.close()

    async def feed(self, tasks: asyncio.TaskGroup) -> None:
        """Prompts in, groups in flight out. Waits for room: the admission rule says whether a group that starts now can still
        be trained before it is older than `max_lag` versions."""
        for number in itertools.count():
            await self.until(lambda: self.admission.may_admit(self.engine.version))
            self.admission.admit(number, self.engine.version)
            tasks.create_task(self.roll_out(number, f"{number % 10}>"))

    async def roll_out(self, number: int, text: str) -> None:
        """A prompt in, a ready group out. Waits for the engine, which may load new weights between two tokens."""
        prompt = list(self.tokenizer(text, add_special_tokens=False).input_ids)

        def request(member: int) -> Request:
            key, seed = RequestKey(group_id=number, member=member), derive_seed(self.seed, "request", number, member)
            return Request(key=key, tokens=tuple(prompt), sampling=Sampling(max_tokens=MAX_TOKENS), seed=seed)

        completions = await asyncio.gather(*(self.engine.generate(request(member)) for member in range(GROUP_SIZE)))
        rewards_G = np.array([reward(text, self.tokenizer.decode(one.tokens)) for one in completions])
        self.seen += list(rewards_G)
        self.ready[number] = [row_of(prompt, *pair) for pair in zip(completions, grpo(rewards_G), strict=True)]
        await self.notify()

    async def train(self) -> None:
        """Ready groups in, versions out. Waits for a group that may be taken: the one with the earliest deadline."""
        for version in range(1, self.steps + 1):
            await self.learner.begin_batch()
            while not self.admission.is_batch_full:
                await self.until(lambda: self.admission.choose(self.ready) is not None)
                number = self.admission.choose(self.ready)
                assert number is not None
                self.lags.append(self.admission.version - self.admission.take(number).start)
                assert self.lags[-1] <= self.max_lag, "a sample is older than allowed"
                await self.learner.accumulate(self.ready.pop(number))  # while other groups are still generated
            await self.learner.step()
            self.admission.step()
            await self.engine.load(version, await self.learner.weights())  # requests in flight continue
            await self.notify()
            self.rewards.append(float(np.mean(self.seen)) if self.seen else self.rewards[-1])
            self.seen.clear()
            print(f"step {version:3}  reward {self.rewards[-1]:.2f}  lags {self.lags[-GROUPS_PER_STEP:]}", flush=True)

    async def notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(condition)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--max-lag", type=int, default=2)
    parser.add_argument("--model", help="a Hugging Face folder, in place of the model that is built here")
    options = parser.parse_args()
    model = ModelConfig(path=options.model) if options.model else TINY
    asyncio.run(Loop(options.steps, options.max_lag, model).run())
