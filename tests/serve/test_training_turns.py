"""Turns of the training service: between keys that train, and between samplers of one engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from millstream.engine import EngineStats, OnSampled
from millstream.model.lora import LoraConfig
from millstream.serve.training.base import Shape
from millstream.serve.training.models import KeyTurns
from millstream.serve.training.sampling import MAX_SHAPES, ShapePool
from millstream.serve.training.turns import TURN_REQUESTS, EnginePlace, Sampler, TurnEngine, WeightsCache
from millstream.types import Completion, Finish, Request, RequestKey, Sampling, Weights


def test_a_key_with_many_models_and_requests_waits_as_one() -> None:
    async def program() -> list[str]:
        turns, order = KeyTurns(), list[str]()

        async def request(owner: str) -> None:
            async with turns.turn(owner):
                order.append(owner)
                await asyncio.sleep(0)

        greedy = [asyncio.create_task(request("greedy")) for _ in range(50)]
        await asyncio.sleep(0)
        await asyncio.gather(*greedy, *(request("other") for _ in range(3)))
        return order

    assert asyncio.run(program())[:7] == ["greedy", "other", "greedy", "other", "greedy", "other", "greedy"]


class WeightEngine:
    """Its tokens are the weights in the place of the request, before and after. See `millstream.engine.Engine`."""

    name, slots, version = "weights", 4, 0

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once  # places that requests wait for, in use beside each other
        self.loaded: list[tuple[int, ...]] = []
        self.running: Counter[int] = Counter()
        self.most_places = 0

    async def generate(self, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        place = request.adapter or 0
        self.running[place] += 1
        self.most_places = max(self.most_places, sum(num > 0 for num in self.running.values()))
        before = self.loaded[-1][place]
        while self.most_places < self.at_once:
            await asyncio.sleep(0)
        for _ in range(request.seed % 5):
            await asyncio.sleep(0)
        self.running[place] -= 1
        after = self.loaded[-1][place]
        return Completion(tokens=(before, after), logprobs=(0.0, 0.0), versions=(0, 0), finish=Finish.STOP)

    async def load(self, version: int, weights: Weights) -> None:
        values, before = weights["values"], self.loaded[-1] if self.loaded else ()
        changed = [place for place, (old, new) in enumerate(zip(before, values, strict=False)) if old != new]
        assert not any(self.running[place] for place in changed), "a place is loaded only when no request uses it"
        await asyncio.sleep(0)
        self.loaded.append(values)

    async def abort(self, key: RequestKey) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def close(self) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats(running=0, waiting=0, tokens_generated=0, requests_finished=0)


def joined(places: Sequence[EnginePlace]) -> Weights:
    return {"values": tuple(place.weights.get("value", -1) for place in places)}


class NumberedWeights(WeightsCache):
    def __init__(self) -> None: ...

    async def get(self, sampler: Sampler) -> Weights:
        if sampler.version == 9:
            raise OSError("no such weights")
        return {"value": sampler.version}


def sampler(number: int) -> Sampler:
    owner = "other" if number == 8 else "a"
    return Sampler(
        id=f"s{number}", owner=owner, session_id="s", model_id=None, path=None, shape=None, folder=None, version=number
    )


def sampled(
    numbers: Sequence[int], *, cancelled: Sequence[int] = (), num_places: int = 1, at_once: int = 1
) -> tuple[list[Any], WeightEngine]:
    async def program() -> tuple[list[Any], WeightEngine]:
        engine = WeightEngine(at_once)
        turns = TurnEngine(engine, NumberedWeights(), num_places=num_places, joined=joined)
        tasks = []
        for place, number in enumerate(numbers):
            key = RequestKey(group_id=place, member=0)
            request = Request(key=key, tokens=(1,), sampling=Sampling(max_tokens=2), seed=place)
            tasks.append(asyncio.create_task(turns.generate(sampler(number), request)))
        for place in cancelled:
            await asyncio.sleep(0)
            tasks[place].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True), engine

    return asyncio.run(program())


@pytest.mark.parametrize("num_places", [1, 2, 3])
def test_every_token_is_from_the_weights_of_its_sampler(num_places: int) -> None:
    numbers = [place * 7 % 5 for place in range(100)]
    found, engine = sampled(numbers, num_places=num_places, at_once=num_places)
    assert [one.tokens for one in found] == [(number, number) for number in numbers]
    assert len(engine.loaded) == 5  # requests of one sampler run together, and beside those of others


def test_a_sampler_with_many_requests_lets_others_have_their_turn() -> None:
    _, engine = sampled([0] * (2 * TURN_REQUESTS + 1) + [1])
    assert engine.loaded == [(0,), (1,), (0,)]


def test_a_key_with_many_samplers_waits_as_one() -> None:
    _, engine = sampled([0, 1, 2, 3, 4, 5, 8])
    assert engine.loaded == [(number,) for number in (0, 8, 1, 2, 3, 4, 5)]


@pytest.mark.parametrize("num_places", [1, 3])
def test_weights_that_are_gone_fail_their_requests_and_no_others(num_places: int) -> None:
    found, _ = sampled([9, 0, 9, 1], num_places=num_places)
    assert [type(one) for one in found] == [OSError, Completion, OSError, Completion]


@pytest.mark.parametrize("num_places", [1, 2])
def test_a_cancelled_request_leaves_no_place_taken(num_places: int) -> None:
    found, _ = sampled([0, 1, 0, 1, 2], cancelled=[0, 3, 1], num_places=num_places)
    assert [type(one) for one in found] == [
        asyncio.CancelledError, asyncio.CancelledError, Completion, asyncio.CancelledError, Completion
    ]  # fmt: skip


class Part:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True


def test_engines_are_bounded_and_one_in_use_is_never_closed() -> None:
    made: list[Part] = []

    def make(shape: Shape) -> Part:
        made.append(Part(shape))
        return made[-1]

    async def program() -> None:
        pool = ShapePool(make)

        async def use(rank: int) -> None:
            async with pool.of(LoraConfig(rank=rank)) as part:
                for _ in range(rank % 3):
                    await asyncio.sleep(0)
                    assert not part.is_closed and part.shape == LoraConfig(rank=rank)
                    assert sum(not one.is_closed for one in made) <= MAX_SHAPES

        async with asyncio.timeout(60):
            await asyncio.gather(*(use(1 + number * 5 % 7) for number in range(60)))
            users = [asyncio.create_task(use(20 + number)) for number in range(6)]
            await asyncio.sleep(0)
            users[0].cancel()  # while its part is made
            await asyncio.wait(users)
        await pool.close()
        assert all(part.is_closed for part in made)

    asyncio.run(program())
