"""Several adapters side by side in one engine: every request has the tokens and log-probabilities that its adapter gives alone,
whatever else is in the batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from millstream.engine import EngineConfig
from millstream.engine.native.batching import Batcher
from millstream.engine.native.build import batcher_of
from millstream.errors import RequestRefused
from millstream.model.adapter_rows import OneAdapter, add_adapter_rows, side_by_side
from millstream.model.adapters import add_adapters, trained_weights
from millstream.model.load import set_up_cpu
from millstream.model.lora import LoraConfig
from millstream.run.build import build_model
from millstream.run.config import ModelConfig, TinyConfig
from millstream.types import Completion, Request, RequestKey, Sampling

NUM = 3
RANKS = (2, 4, 3)
ROOM = 4
PLACES = pytest.mark.parametrize(
    ("device", "cache"),
    [("cpu", "slots"), ("cpu", "pages"), pytest.param("cuda", "pages", marks=pytest.mark.gpu)],
)
TARGETS = (("q_proj", "v_proj"), (), ("down_proj", "gate_proj", "o_proj"))


@pytest.fixture(scope="module")
def base() -> Any:
    set_up_cpu()
    tiny = ModelConfig(tiny=TinyConfig(hidden=32, layers=2, heads=2, context=128), device="cpu")
    return build_model(tiny, seed=0)[0]


def with_adapters(base: Any, config: LoraConfig) -> Any:
    model = copy.deepcopy(base)
    add_adapters(model, config, seed=0)
    return model


def trained(base: Any, number: int) -> tuple[Any, OneAdapter]:
    """A model with one adapter, as if it was trained; and that adapter."""
    config = LoraConfig(rank=RANKS[number], alpha=8.0, targets=TARGETS[number])
    model, generator = with_adapters(base, config), torch.Generator().manual_seed(number)
    for weight in trained_weights(model).values():
        weight.data.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    weights = {name: weight.detach().clone() for name, weight in trained_weights(model).items()}
    return model, OneAdapter(weights, config.alpha / config.rank)


def many(base: Any, adapters: list[OneAdapter | None]) -> tuple[Any, dict[str, torch.Tensor]]:
    model = with_adapters(base, LoraConfig(rank=NUM * ROOM, alpha=float(NUM * ROOM)))
    weights = side_by_side(adapters, {name: tuple(one.shape) for name, one in trained_weights(model).items()})
    add_adapter_rows(model, NUM)
    return model, weights


def requests(adapter: int | None, number: int) -> Iterator[Request]:
    """The same prompts for every adapter, some of them alike for longer than a page."""
    for place, prompt in enumerate([(5, 6, 7), (9,) * 40, (9,) * 40 + (3,), (4,)]):
        key = RequestKey(group_id=number, member=place)
        sampling = Sampling(max_tokens=12, temperature=1.0)
        yield Request(key=key, tokens=prompt, sampling=sampling, seed=place, adapter=adapter)


def finish(batcher: Batcher) -> dict[RequestKey, Completion]:
    done: dict[RequestKey, Completion] = {}
    while batcher.has_work:
        done.update(batcher.step())
    return done


def by_member(done: dict[RequestKey, Completion], number: int) -> list[Completion]:
    return [completion for key, completion in sorted(done.items()) if key.group_id == number]


@PLACES
def test_a_batch_of_several_adapters_samples_what_each_samples_alone(base: Any, device: str, cache: Any) -> None:
    base = copy.deepcopy(base).to(device)
    config = EngineConfig(slots=16, process=False, cache=cache, prefill_tokens=64)
    found = [trained(base, number) for number in range(NUM)]
    model, weights = many(base, [adapter for _, adapter in found])
    together = batcher_of(model, config)
    together.load(1, weights)
    asked = [list(requests(number, number)) for number in range(NUM)]
    for one in (request for group in zip(*asked, strict=True) for request in group):
        together.add(one)
    done = finish(together)
    for number, (own, _) in enumerate(found):
        alone = batcher_of(own, config)
        for request in requests(None, number):
            alone.add(request)
        expected = finish(alone)
        for mine, its in zip(by_member(done, number), by_member(expected, number), strict=True):
            assert mine.tokens == its.tokens
            assert mine.logprobs == pytest.approx(its.logprobs, abs=1e-4)
    assert len({completion.tokens for completion in done.values()}) > NUM


@PLACES
def test_an_adapter_is_exchanged_while_requests_of_others_run(base: Any, device: str, cache: Any) -> None:
    base = copy.deepcopy(base).to(device)
    config = EngineConfig(slots=16, process=False, cache=cache)
    adapters = [adapter for _, adapter in (trained(base, number) for number in range(NUM))]

    def sampled(*, is_exchanged: bool) -> tuple[list[Completion], list[Completion]]:
        model, weights = many(base, [adapters[0], adapters[1], None])
        batcher = batcher_of(model, config)
        batcher.load(1, weights)
        for request in requests(0, 0):
            batcher.add(request)
        done: dict[RequestKey, Completion] = {}
        for _ in range(4):
            done.update(batcher.step())
        if is_exchanged:
            batcher.load(2, many(base, [adapters[0], adapters[2], None])[1])
        for request in requests(1, 1):
            batcher.add(request)
        done |= finish(batcher)
        return by_member(done, 0), by_member(done, 1)

    (kept, before), (again, after) = sampled(is_exchanged=False), sampled(is_exchanged=True)
    assert [one.tokens for one in kept] == [one.tokens for one in again]
    assert [one.tokens for one in before] != [one.tokens for one in after]


def test_an_adapter_that_an_engine_does_not_have_is_refused(base: Any) -> None:
    config = EngineConfig(slots=2, process=False)
    plain, rows = batcher_of(trained(base, 0)[0], config), batcher_of(many(base, [None] * NUM)[0], config)
    for batcher, adapter in ((plain, 0), (rows, NUM), (rows, -1)):
        with pytest.raises(RequestRefused, match=f"adapter {adapter}, and this engine has"):
            batcher.add(next(requests(adapter, 0)))
