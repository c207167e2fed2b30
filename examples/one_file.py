"""The whole idea in one file: prompts in, rollouts streaming, training as they come, weights swapped in flight, lag bounded.

Everything here is small and stands for a module of the package: the model is a table of logits, the "engine" samples from
it a token at a time, the "learner" does truncated importance sampling on GRPO advantages. No torch, no threads, only asyncio.

    python examples/one_file.py
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass

# ---- the task: a prompt is a number from 0 to 9, the right answer is three tokens, each the next number ------------------
VOCABULARY, LENGTH = 10, 3


def reward(prompt: int, tokens: list[int]) -> float:
    """A share of the answer: the demo's reward is all or nothing, this one lets a table learn in seconds."""
    return sum(token == (prompt + i + 1) % VOCABULARY for i, token in enumerate(tokens)) / LENGTH


# ---- the nouns (types.py) ------------------------------------------------------------------------------------------------
@dataclass
class Rollout:
    prompt: int
    tokens: list[int]
    logprobs: list[float]  # under the distribution each token was sampled from
    versions: list[int]  # the version of the weights that sampled it
    reward: float = 0.0
    advantage: float = 0.0


@dataclass
class Group:
    number: int
    prompt: int
    start: int  # the engine's version when it was dispatched
    rollouts: list[Rollout]


Weights = list[list[float]]  # one row of logits per (prompt, position)


def log_softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    total = math.log(sum(math.exp(x - top) for x in logits)) + top
    return [x - total for x in logits]


# ---- the engine (engine/): many requests at once, weights swapped between two tokens -------------------------------------
class Engine:
    def __init__(self, weights: Weights) -> None:
        self.version, self.weights = 0, weights

    async def generate(self, prompt: int, rng: random.Random) -> Rollout:
        rollout = Rollout(prompt, [], [], [])
        for position in range(LENGTH):
            await asyncio.sleep(rng.expovariate(1000))  # a decode step; some requests take long
            logprobs = log_softmax(self.weights[prompt * LENGTH + position])
            token = rng.choices(range(VOCABULARY), [math.exp(x) for x in logprobs])[0]
            rollout.tokens.append(token)
            rollout.logprobs.append(logprobs[token])
            rollout.versions.append(self.version)
        return rollout

    def load(self, version: int, weights: Weights) -> None:
        self.version, self.weights = version, weights


# ---- the algorithm (algo/): pure functions -------------------------------------------------------------------------------
def advantages(group: Group) -> bool:
    """GRPO: how much better than the group's mean. False if all are equal: there is nothing to learn."""
    rewards = [rollout.reward for rollout in group.rollouts]
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    for rollout in group.rollouts:
        rollout.advantage = (rollout.reward - mean) / (deviation + 1e-6)
    return deviation > 0


# ---- the learner (learner/): gradients accumulate as rows come; one division at the step ---------------------------------
class Learner:
    def __init__(self, weights: Weights, learning_rate: float) -> None:
        self.weights, self.learning_rate = [row[:] for row in weights], learning_rate
        self.gradient: dict[int, list[float]] = {}
        self.tokens = 0

    def accumulate(self, rollout: Rollout) -> None:
        for position, (token, behaviour) in enumerate(zip(rollout.tokens, rollout.logprobs, strict=True)):
            row = rollout.prompt * LENGTH + position
            logprobs = log_softmax(self.weights[row])
            weight = min(math.exp(logprobs[token] - behaviour), 1.0)  # truncated importance sampling
            gradient = self.gradient.setdefault(row, [0.0] * VOCABULARY)
            for other in range(VOCABULARY):
                gradient[other] += weight * rollout.advantage * ((other == token) - math.exp(logprobs[other]))
            self.tokens += 1

    def step(self) -> Weights:
        for row, gradient in self.gradient.items():
            for token, value in enumerate(gradient):
                self.weights[row][token] += self.learning_rate * value / self.tokens
        self.gradient, self.tokens = {}, 0
        return [row[:] for row in self.weights]


# ---- the admission rule (pipeline/admission.py) ---------------------------------------------------------------------------
class Admission:
    """For every d >= version: outstanding groups with deadline <= d number at most (d - version + 1) B - taken."""

    def __init__(self, groups_per_step: int, max_lag: int) -> None:
        self.batch, self.max_lag, self.version, self.taken = groups_per_step, max_lag, 0, 0
        self.deadlines: dict[int, int] = {}

    def holds(self, deadlines: list[int], taken: int) -> bool:
        counts = enumerate(sorted(deadlines), start=1)
        return taken <= self.batch and all(n <= (d - self.version + 1) * self.batch - taken for n, d in counts)

    def may_admit(self, start: int) -> bool:
        return self.holds([*self.deadlines.values(), start + self.max_lag], self.taken)

    def may_take(self, number: int) -> bool:
        return self.holds([d for n, d in self.deadlines.items() if n != number], self.taken + 1)


# ---- the pipeline (pipeline/pipeline.py): feed -> roll out -> settle -> train -> sync -------------------------------------
async def run(steps: int, groups_per_step: int, group_size: int, max_lag: int, seed: int = 0) -> None:
    start_weights = [[0.0] * VOCABULARY for _ in range(VOCABULARY * LENGTH)]
    engine, learner = Engine(start_weights), Learner(start_weights, learning_rate=60.0)
    admission, changed, ready, lags = Admission(groups_per_step, max_lag), asyncio.Condition(), list[Group](), [0] * 9
    print(f"accuracy before  {await accuracy(engine):.2f}")

    async def notify() -> None:
        async with changed:
            changed.notify_all()

    async def wait_for(condition) -> None:  # type: ignore[no-untyped-def]
        async with changed:
            await changed.wait_for(condition)

    async def roll_out(group: Group) -> None:
        async def member(index: int) -> None:
            rollout = await engine.generate(group.prompt, random.Random(f"{seed}/{group.number}/{index}"))
            rollout.reward = reward(group.prompt, rollout.tokens)
            group.rollouts.append(rollout)

        await asyncio.gather(*(member(index) for index in range(group_size)))
        if advantages(group):
            ready.append(group)
        else:
            del admission.deadlines[group.number]  # no signal: its place is free for another prompt
        await notify()

    async def feed(tasks: asyncio.TaskGroup) -> None:
        for number in range(10**9):
            await wait_for(lambda: admission.may_admit(engine.version))
            admission.deadlines[number] = engine.version + max_lag
            tasks.create_task(roll_out(Group(number, number % VOCABULARY, engine.version, [])))

    async def train() -> None:
        for version in range(1, steps + 1):
            for admission.taken in range(groups_per_step):
                await wait_for(lambda: any(admission.may_take(group.number) for group in ready))
                group = min((g for g in ready if admission.may_take(g.number)), key=lambda g: (g.start, g.number))
                ready.remove(group)
                del admission.deadlines[group.number]
                lag = admission.version - group.start
                assert lag <= max_lag, "a sample staler than allowed"
                lags[lag] += 1
                for rollout in group.rollouts:  # while others are still being generated
                    learner.accumulate(rollout)
            admission.version, admission.taken = version, 0
            engine.load(version, learner.step())  # between two tokens: rollouts in flight go on
            await notify()

    async with asyncio.TaskGroup() as tasks:
        feeding = tasks.create_task(feed(tasks))
        await train()
        feeding.cancel()
    print(f"accuracy after   {await accuracy(engine):.2f}")
    print(f"groups trained at each lag: { {lag: n for lag, n in enumerate(lags) if n} }")


async def accuracy(engine: Engine) -> float:
    rollouts = await asyncio.gather(*(engine.generate(i % VOCABULARY, random.Random(i)) for i in range(200)))
    return sum(reward(rollout.prompt, rollout.tokens) for rollout in rollouts) / len(rollouts)


if __name__ == "__main__":
    asyncio.run(run(steps=25, groups_per_step=4, group_size=8, max_lag=2))
