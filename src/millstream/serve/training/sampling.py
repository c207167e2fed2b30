"""Sampling from the weights that a client asks for, while others train.

Adapters of similar ranks share an engine, and a batch (`turns`); models that are trained whole have an engine of their own. At
most `MAX_SHAPES` engines are in memory, and as many scorers.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import re
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

import numpy as np

from millstream.errors import MillstreamError, RequestRefused
from millstream.learner.scorer import TorchScorer
from millstream.model.lora import LoraConfig
from millstream.seeds import derive_seed
from millstream.serve.http import HttpError
from millstream.serve.training.base import BaseModel, Shape
from millstream.serve.training.bodies import SampleBody, SamplingBody
from millstream.serve.training.data import write_samples
from millstream.serve.training.futures import PROTOBUF, Result
from millstream.serve.training.turns import Sampler, TurnEngine, WeightsCache, joined_adapters
from millstream.types import Completion, Finish, Request, RequestKey, Sampling, TrainRow

MAX_SHAPES = 4  # of which there is an engine, or a scorer, in memory
NUM_PLACES = 4  # adapters side by side in an engine; its compute for adapters grows with them
MIN_RANK = 8  # of a place; others are twice as large, four times, ...
BASE_LORA = LoraConfig(rank=1)  # of an engine that samples from the base: adapters that change nothing
SEQUENCE = re.compile(r"(?P<sampler>.+):\d+:\d+:v(?P<version>\d+)")


class _TurnScorer:
    """Scores prompts under the weights of any sampler, one after the other."""

    def __init__(self, scorer: TorchScorer, weights_of: WeightsCache) -> None:
        self._scorer = scorer
        self._weights_of = weights_of
        self._lock = asyncio.Lock()
        self._current: str | None = None

    async def score(self, sampler: Sampler, tokens: Sequence[int]) -> list[float]:
        """Of every token but the first, for which there is none: NaN."""
        row = TrainRow(
            tokens=np.array(tokens, np.int32),
            loss_mask=np.arange(len(tokens)) > 0,
            logprobs=np.zeros(len(tokens), np.float32),
            advantages=np.zeros(len(tokens), np.float32),
        )
        async with self._lock:
            if self._current != sampler.id:
                self._current = None
                await self._scorer.load(await self._weights_of.get(sampler))
                self._current = sampler.id
            (scores,) = await self._scorer.score([row])
        return [math.nan, *scores[1:].tolist()]

    async def close(self) -> None:
        await self._scorer.close()


class _Closable(Protocol):
    async def close(self) -> None: ...


P = TypeVar("P", bound=_Closable)


class ShapePool(Generic[P]):
    """One part for each shape of weights, made when it is first asked for. Where there are `MAX_SHAPES`, the one that was used
    least recently makes room, when no request uses it."""

    def __init__(self, make: Callable[[Shape], P]) -> None:
        self._make = make
        self._parts: OrderedDict[Shape, P] = OrderedDict()
        self._num_users: Counter[Shape] = Counter()
        self._freed = asyncio.Event()
        self._making = asyncio.Lock()  # FIFO: a new shape is not overtaken by requests for those that are there

    @asynccontextmanager
    async def of(self, shape: Shape) -> AsyncIterator[P]:
        async with self._making:
            if shape not in self._parts:
                await self._make_room()
                await self._add(shape)
            self._parts.move_to_end(shape)
            self._num_users[shape] += 1
        try:
            yield self._parts[shape]
        finally:
            self._num_users[shape] -= 1
            self._freed.set()

    async def _add(self, shape: Shape) -> None:
        """If the caller is cancelled, the part is made all the same, and kept."""
        making = asyncio.ensure_future(asyncio.to_thread(self._make, shape))
        try:
            await asyncio.shield(making)
        finally:
            self._parts[shape] = await making

    async def _make_room(self) -> None:
        while len(self._parts) >= MAX_SHAPES:
            idle = [shape for shape in self._parts if not self._num_users[shape]]
            if idle:
                del self._num_users[idle[0]]
                await self._parts.pop(idle[0]).close()
            else:
                self._freed.clear()
                await self._freed.wait()

    async def close(self) -> None:
        for part in self._parts.values():
            await part.close()


def engine_shape(shape: Shape) -> Shape:
    """Of the engine for weights of this shape: `NUM_PLACES` adapters on all layers, with a scaling of 1; or the whole model."""
    if shape is None:
        return None
    rank = NUM_PLACES * max(MIN_RANK, 1 << (shape.rank - 1).bit_length())
    return LoraConfig(rank=rank, alpha=float(rank))


def _turn_engine(shape: Shape, base: BaseModel, weights: WeightsCache) -> TurnEngine:
    if shape is None:
        return TurnEngine(base.make_engine(None, 1), weights)
    shapes = {name: tuple(weight.shape) for name, weight in base.initial_weights(shape).items()}
    engine = base.make_engine(shape, NUM_PLACES)
    return TurnEngine(engine, weights, num_places=NUM_PLACES, joined=joined_adapters(shapes))


class SamplingPool:
    """Engines and scorers by the shape of their weights."""

    def __init__(self, base: BaseModel) -> None:
        weights = WeightsCache(base)
        self._base = base
        self._engines = ShapePool(lambda shape: _turn_engine(shape, base, weights))
        self._scorers = ShapePool(lambda shape: _TurnScorer(base.make_scorer(shape), weights))
        self._numbers = itertools.count()

    async def sample(self, sampler: Sampler, body: SampleBody) -> tuple[Result, int]:
        """Also the number of tokens that were sampled. Raises `HttpError`, and what engines raise."""
        body.check()
        tokens = body.prompt.tokens()
        sampling = sampling_of(body.sampling_params, len(tokens), self._base)
        number, given = next(self._numbers), body.sampling_params.seed

        async def one(engine: TurnEngine, index: int) -> Completion:
            names = (index,) if given is not None else (sampler.id, body.seq_id, index)
            seed = derive_seed(given or 0, *names)
            key = RequestKey(group_id=number, member=index)
            return await engine.generate(sampler, Request(key=key, tokens=tokens, sampling=sampling, seed=seed))

        try:
            async with self._engines.of(engine_shape(sampler.shape)) as engine, asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(engine, index)) for index in range(body.num_samples)]
                scoring = group.create_task(self._prompt_logprobs(sampler, body, tokens))
        except* RequestRefused as refused:
            raise HttpError(422, str(refused.exceptions[0])) from refused
        except* HttpError as refused:
            first = refused.exceptions[0]
            raise HttpError(first.status if isinstance(first, HttpError) else 500, str(first)) from refused
        except* MillstreamError as failed:
            raise HttpError(500, str(failed.exceptions[0])) from failed
        completions = [task.result() for task in tasks]
        if any(completion.finish is Finish.ABORT for completion in completions):
            raise HttpError(503, "the engine was closed while it sampled: try again")
        num_tokens = sum(len(completion.tokens) for completion in completions)
        return Result(PROTOBUF, write_samples(completions, scoring.result())), num_tokens

    async def _prompt_logprobs(self, sampler: Sampler, body: SampleBody, tokens: Sequence[int]) -> list[float] | None:
        if not body.prompt_logprobs:
            return None
        async with self._scorers.of(sampler.shape) as scorer:
            found = await scorer.score(sampler, tokens)
        num_skipped = 0 if body.prompt_logprobs_last_n is None else max(0, len(found) - body.prompt_logprobs_last_n)
        return [math.nan] * num_skipped + found[num_skipped:]

    async def close(self) -> None:
        await self._engines.close()
        await self._scorers.close()


def sampling_of(body: SamplingBody, num_prompt: int, base: BaseModel) -> Sampling:
    """Stops come to the tokens that end a turn; an empty list leaves out these as well. Raises `HttpError`."""
    room = base.context - num_prompt
    if not num_prompt > 0 or room < 1:
        raise HttpError(
            422, f"a prompt of {num_prompt} tokens: expected 1 to {base.context - 1}, the model's context less one"
        )
    stops = [body.stop] if isinstance(body.stop, str) else body.stop
    ends = () if stops == [] else base.end_tokens
    stops = stops or []
    return Sampling(
        max_tokens=min(body.max_tokens or room, room),
        temperature=body.temperature,
        stop=tuple(sorted({*ends, *(one for one in stops if isinstance(one, int))})),
        stop_strings=tuple(one for one in stops if isinstance(one, str)),
        top_k=0 if body.top_k == -1 else body.top_k,
        top_p=body.top_p,
    )
