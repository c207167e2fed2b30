"""Samplers take turns at an engine: one version of the weights each, in one of the engine's places.

An engine of adapters has several places (`model.adapter_rows`), so that requests of several samplers are in one batch; one of
the whole model has one.

Guarantees: every token of a sample is from the weights of its sampler, for the weights of a place are exchanged only when no
request uses it. Keys take turns, and so do the samplers of one key: while others wait for a place, a sampler starts at most
`TURN_REQUESTS` requests in its turn.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from msgspec import Struct, structs

from millstream.engine import Engine
from millstream.learner.state import read_trained
from millstream.model.adapter_rows import OneAdapter, side_by_side
from millstream.model.safetensors_io import read_weights
from millstream.serve.http import HttpError
from millstream.serve.training.base import BaseModel, Shape
from millstream.serve.training.journal import read_checkpoint
from millstream.serve.training.models import TENSORS
from millstream.types import Completion, Request, Weights

TURN_REQUESTS = 256
MAX_WEIGHTS = 8  # of samplers that are kept in memory; others are read again from their folders


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
        _check_version(sampler, folder)
        found = read_weights(folder / TENSORS)[1] if (folder / TENSORS).is_dir() else read_trained(folder)
        _check_version(sampler, folder)  # they may have been overwritten meanwhile
        if not all(torch.isfinite(weight).all() for weight in found.values()):
            raise HttpError(
                422, f"the weights of {sampler.id} have numbers that are not finite: nothing can be sampled"
            )
        return found


def _check_version(sampler: Sampler, folder: Path) -> None:
    """Raises `HttpError` if the checkpoint is gone or has other weights: a sampler never gives another version than its own."""
    found = read_checkpoint(folder)
    if found is None:
        raise HttpError(
            404,
            f"the weights of {sampler.id} are gone: save weights with a name (save_weights_for_sampler) to keep them",
        )
    if found.version != sampler.version:
        raise HttpError(
            410,
            f"the weights of {sampler.id}, version {sampler.version}, were overwritten by version {found.version}: make a new "
            "sampling client, or save weights under different names",
        )


class _Waiting:
    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.turns: deque[asyncio.Future[EnginePlace]] = deque()


class EnginePlace:
    """Room for one sampler's weights in an engine."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.sampler: Sampler | None = None  # None: it is empty, or being loaded
        self.weights: Weights = {}
        self.num_running = 0
        self.num_left = 0  # requests that it may start in this turn while others wait
        self.last_turn = 0


Joined = Callable[[Sequence[EnginePlace]], Weights]
"""The weights of an engine from those of its places."""


def only_one(places: Sequence[EnginePlace]) -> Weights:
    (place,) = places
    return place.weights


def joined_adapters(shapes: Mapping[str, Sequence[int]]) -> Joined:
    """`shapes`: of the engine's weights."""

    def join(places: Sequence[EnginePlace]) -> Weights:
        return side_by_side([_adapter(place) for place in places], shapes)

    return join


def _adapter(place: EnginePlace) -> OneAdapter | None:
    shape = None if place.sampler is None else place.sampler.shape
    return None if shape is None else OneAdapter(place.weights, shape.alpha / shape.rank)


class TurnEngine:
    """One engine, and the samplers that have or wait for a place in it."""

    def __init__(
        self, engine: Engine, weights_of: WeightsCache, *, num_places: int = 1, joined: Joined = only_one
    ) -> None:
        self._engine = engine
        self._weights_of = weights_of
        self._places = [EnginePlace(number) for number in range(num_places)]
        self._joined = joined
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()  # of one key, in the order of their turns
        self._last_turn: dict[str, int] = {}  # of each key
        self._num_loads = 0
        self._num_turns = 0
        self._switching: asyncio.Task[None] | None = None

    async def generate(self, sampler: Sampler, request: Request) -> Completion:
        """Raises what the engine raises."""
        waiting = self._waiting.setdefault(sampler.id, _Waiting(sampler))
        turn: asyncio.Future[EnginePlace] = asyncio.get_running_loop().create_future()
        waiting.turns.append(turn)
        self._advance()
        try:
            place = await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave(turn.result())
            raise
        try:
            adapter = place.number if len(self._places) > 1 else None
            return await self._engine.generate(structs.replace(request, adapter=adapter))
        finally:
            self._leave(place)

    def _leave(self, place: EnginePlace) -> None:
        place.num_running -= 1
        self._advance()

    def _advance(self) -> None:
        """Start what may start now; and give a free place to the sampler whose turn is next."""
        placed = {place.sampler.id: place for place in self._places if place.sampler is not None}
        do_others_wait = any(name not in placed for name in self._waiting)
        for name, place in placed.items():
            waiting = self._waiting.get(name)
            while waiting is not None and waiting.turns and (place.num_left > 0 or not do_others_wait):
                turn = waiting.turns.popleft()
                if not turn.done():  # else its caller is gone
                    place.num_running += 1
                    place.num_left -= 1
                    turn.set_result(place)
            if waiting is not None and not waiting.turns:
                del self._waiting[name]
        if self._waiting and self._switching is None and (found := self._next(placed)) is not None:
            self._switching = asyncio.create_task(self._switch(*found))

    def _next(self, placed: dict[str, EnginePlace]) -> tuple[_Waiting, EnginePlace] | None:
        """Who has the next turn, and where: in its own place if it has one, else in the one that was used least recently."""
        idle = [place for place in self._places if not place.num_running]
        if not idle:
            return None
        ready = [one for one in self._waiting.values() if placed.get(one.sampler.id, idle[0]) in idle]
        if not ready:
            return None
        first = min(ready, key=lambda one: self._last_turn.get(one.sampler.owner, -1))
        return first, placed.get(first.sampler.id) or min(idle, key=lambda place: place.last_turn)

    async def _switch(self, waiting: _Waiting, place: EnginePlace) -> None:
        sampler = waiting.sampler
        self._num_turns += 1
        self._last_turn[sampler.owner] = place.last_turn = self._num_turns
        if sampler.id in self._waiting:
            self._waiting.move_to_end(sampler.id)
        try:
            if place.sampler is None or place.sampler.id != sampler.id:
                await self._load(place, sampler)
            place.num_left = TURN_REQUESTS
        except (
            Exception
        ) as error:  # requests that wait for these weights get the reason, and the next sampler has its turn
            place.sampler = None
            self._waiting.pop(sampler.id, None)
            for turn in waiting.turns:
                if not turn.done():
                    turn.set_exception(error)
        self._switching = None
        self._advance()

    async def _load(self, place: EnginePlace, sampler: Sampler) -> None:
        place.sampler = None
        weights = await self._weights_of.get(sampler)
        loaded = EnginePlace(place.number)
        loaded.sampler = sampler
        loaded.weights = weights
        places = [loaded if one is place else one for one in self._places]
        self._num_loads += 1
        await self._engine.load(self._num_loads, await asyncio.to_thread(self._joined, places))
        place.weights = weights
        place.sampler = sampler

    async def close(self) -> None:
        if self._switching is not None:
            self._switching.cancel()
        await self._engine.close()
