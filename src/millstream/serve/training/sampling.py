"""Sampling from the weights that a client asks for, while others train: one engine for each shape of weights, used in turns.

Guarantees: every token of a sample is from the weights of its sampler, for weights are exchanged only when no request runs.
Keys take turns, and so do the samplers of one key: when others wait, a sampler starts at most `TURN_REQUESTS` requests in its
turn. At most `MAX_SHAPES` engines are in memory.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import re
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
from msgspec import Struct

from millstream.engine import Engine
from millstream.errors import RequestRefused
from millstream.learner.scorer import TorchScorer
from millstream.learner.state import read_trained
from millstream.model.lora import LoraConfig
from millstream.model.safetensors_io import read_weights
from millstream.seeds import derive_seed
from millstream.serve.http import HttpError
from millstream.serve.training.base import BaseModel, Shape
from millstream.serve.training.bodies import SampleBody, SamplingBody
from millstream.serve.training.data import write_samples
from millstream.serve.training.futures import PROTOBUF, Result
from millstream.serve.training.models import TENSORS
from millstream.types import Completion, Finish, Request, RequestKey, Sampling, TrainRow, Weights

TURN_REQUESTS = 256
MAX_SHAPES = 4  # of which there is an engine, or a scorer, in memory
MAX_WEIGHTS = 8  # of samplers that are kept in memory; others are read again from their folders
BASE_LORA = LoraConfig(rank=1)  # of an engine that samples from the base: adapters that change nothing
SEQUENCE = re.compile(r"(?P<sampler>.+):\d+:\d+:v(?P<version>\d+)")


class Sampler(Struct, frozen=True, kw_only=True):
    """A sampling session of the client: one version of the weights."""

    id: str
    owner: str
    session_id: str
    model_id: str | None  # None: the base
    path: str | None  # as the client names it
    shape: Shape
    folder: str | None  # of the checkpoint
    version: int

    def sequence_id(self, seq_id: int, index: int) -> str:
        """It tells the version that samples all tokens of the sequence."""
        return f"{self.id}:{seq_id}:{index}:v{self.version}"


class _Waiting:
    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.futures: deque[asyncio.Future[None]] = deque()


class TurnEngine:
    """One engine, used by one sampler at a time."""

    def __init__(self, engine: Engine, weights_of: WeightsCache) -> None:
        self._engine = engine
        self._weights_of = weights_of
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()  # samplers of one key in the order of their turns
        self._last_turn: dict[str, int] = {}  # of each key
        self._current: str | None = None
        self._num_running = 0
        self._num_left = 0  # requests that it may start in this turn while others wait
        self._num_loads = 0
        self._num_turns = 0
        self._switching: asyncio.Task[None] | None = None

    async def generate(self, sampler: Sampler, request: Request) -> Completion:
        """Raises what the engine raises."""
        waiting = self._waiting.setdefault(sampler.id, _Waiting(sampler))
        turn = asyncio.get_running_loop().create_future()
        waiting.futures.append(turn)
        self._advance()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave()
            raise
        try:
            return await self._engine.generate(request)
        finally:
            self._leave()

    def _leave(self) -> None:
        self._num_running -= 1
        self._advance()

    def _advance(self) -> None:
        """Start what may start now; when nothing runs, exchange the weights for those of the next sampler."""
        if self._switching is not None and not self._switching.done():
            return
        own = self._waiting.get(self._current or "")
        while own is not None and own.futures and (self._num_left > 0 or len(self._waiting) == 1):
            turn = own.futures.popleft()
            if not turn.done():  # else its caller is gone
                self._num_running += 1
                self._num_left -= 1
                turn.set_result(None)
        if own is not None and not own.futures:
            del self._waiting[own.sampler.id]
        if self._num_running == 0 and self._waiting:
            self._switching = asyncio.create_task(self._switch())

    async def _switch(self) -> None:
        if self._current is not None and self._current in self._waiting:
            self._waiting.move_to_end(self._current)
        waiting = min(self._waiting.values(), key=lambda one: self._last_turn.get(one.sampler.owner, -1))
        sampler = waiting.sampler
        self._num_turns += 1
        self._last_turn[sampler.owner] = self._num_turns
        try:
            if sampler.id != self._current:
                weights = await self._weights_of.get(sampler)
                self._num_loads += 1
                await self._engine.load(self._num_loads, weights)
            self._current = sampler.id
            self._num_left = TURN_REQUESTS
        except Exception as error:  # those who wait for these weights get the reason, and the next sampler has its turn
            self._current = None
            del self._waiting[sampler.id]
            for turn in waiting.futures:
                if not turn.done():
                    turn.set_exception(error)
        self._switching = None
        self._advance()

    async def close(self) -> None:
        if self._switching is not None:
            self._switching.cancel()
        await self._engine.close()


class WeightsCache:
    """The weights of samplers, the last ones used in memory."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self._kept: OrderedDict[str, Weights] = OrderedDict()

    async def get(self, sampler: Sampler) -> Weights:
        """Raises `HttpError` if their checkpoint is gone."""
        if sampler.id not in self._kept:
            self._kept[sampler.id] = await asyncio.to_thread(self._read, sampler)
            if len(self._kept) > MAX_WEIGHTS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(sampler.id)
        return self._kept[sampler.id]

    def _read(self, sampler: Sampler) -> Weights:
        if sampler.folder is None:
            assert sampler.shape is not None
            return self._base.initial_weights(sampler.shape)
        folder = Path(sampler.folder)
        if not folder.is_dir():
            raise HttpError(
                404,
                f"the weights of {sampler.id} are gone: save weights with a name (save_weights_for_sampler) to keep them",
            )
        return read_weights(folder / TENSORS)[1] if (folder / TENSORS).is_dir() else read_trained(folder)


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


class SamplingPool:
    """Engines and scorers by the shape of their weights."""

    def __init__(self, base: BaseModel) -> None:
        weights = WeightsCache(base)
        self._base = base
        self._engines = ShapePool(lambda shape: TurnEngine(base.make_engine(shape), weights))
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
            async with self._engines.of(sampler.shape) as engine, asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(engine, index)) for index in range(body.num_samples)]
                scoring = group.create_task(self._prompt_logprobs(sampler, body, tokens))
        except* RequestRefused as refused:
            raise HttpError(422, str(refused.exceptions[0])) from refused
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
