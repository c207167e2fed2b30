"""Continuous batching, without a thread: requests join and leave at every step.

The *batcher* decides who joins, who computes how much, and who must give way; a *runner* computes: on a CPU in slots
(`slots`), on a GPU in pages (`paged`). One step computes one token for every running request and, up to a budget of tokens,
prompts that join; long ones in chunks, where the runner can.

A runner may work ahead: step k + 1 is launched before the tokens of step k are known, so that the device never waits for the
host. A request that turns out to have stopped in step k then has a token too many, which nobody sees; one that ends by its
length never does.

When the cache is full, the youngest request gives its room to the others and waits at the front of the queue; what it has
sampled is kept, and computed again when it returns. Weights are swapped between two steps: with `keep` the cache of running
requests stays, with `recompute` they all begin again. In both cases the tokens after it are sampled, and recorded, under the
new version.

What joins when depends on the order of `add`, `abort`, `load` and `step` alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from millstream.engine import EngineConfig, OnUpdate
from millstream.engine.native.paged import make_runner
from millstream.engine.native.runner import Chunk, Drawn, Runner
from millstream.engine.native.sequence import Finished, TokenSequence
from millstream.engine.native.slots import SlotRunner
from millstream.engine.native.strings import Decode, ends_with_one
from millstream.engine.request import CACHE_LIMIT, CONTEXT_LIMIT, check_request
from millstream.errors import EngineError, RequestRefused
from millstream.model.adapters import trained_weights
from millstream.model.load import check_layers, context_length
from millstream.types import Finish, Request, RequestKey, Sampled, Weights

MUCH = 8
"""When one of so many slots is free, requests join at once."""


class _Launched(NamedTuple):
    flights: list[TokenSequence]
    version: int
    drawn: Drawn


def batcher_of(model: PreTrainedModel, config: EngineConfig, decode: Decode | None = None) -> Batcher:
    check_layers(model)
    return Batcher(
        model,
        num_slots=config.slots,
        prefill_tokens=config.prefill_tokens,
        on_update=config.on_update,
        runner=make_runner(model.eval(), config),
        decode=decode,
    )


class Batcher:
    """The engine's core: `add`, `abort`, `load` between calls of `step`. Not thread-safe; see `TorchEngine`."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_slots: int,
        prefill_tokens: int = 4096,
        version: int = 0,
        on_update: OnUpdate = "keep",
        runner: Runner | None = None,
        decode: Decode | None = None,
    ) -> None:
        """`runner`: None is slots. `decode`: for stop strings; without it, requests that have some are refused."""
        check_layers(model)
        self._model = model.eval()
        self._runner = SlotRunner(model, num_slots) if runner is None else runner
        self._num_slots = num_slots
        self._prefill_tokens = prefill_tokens
        self._on_update = on_update
        self._decode = decode
        self._num_words = model.get_input_embeddings().weight.shape[0]
        self._waiting: deque[TokenSequence] = deque()
        self._running: list[TokenSequence] = []
        self._pending: deque[_Launched] = deque()
        self._early: Finished = []
        """Ended while room was made for others."""
        self.version = version
        self.tokens_generated = 0
        self.num_preempted = 0
        self._swap_s = 0.0
        self._num_since_join = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._pending or self._early)

    @property
    def swap_s(self) -> float:
        """How long the last `load` held decoding up."""
        seen = self._runner.swap_s
        return self._swap_s if seen is None else seen

    @property
    def cache_used(self) -> float:
        return self._runner.cache_used

    @property
    def max_length(self) -> int | None:
        return self._runner.max_length

    def add(self, request: Request, *, is_watched: bool = False) -> None:
        most = self._runner.max_length
        is_context = most == context_length(self._model)
        check_request(request, most, num_words=self._num_words, limit=CONTEXT_LIMIT if is_context else CACHE_LIMIT)
        if request.sampling.stop_strings and self._decode is None:
            raise RequestRefused(f"{request.key}: stop strings need a tokenizer, and this engine was built without one")
        self._waiting.append(TokenSequence(request, is_watched=is_watched))

    def news(self) -> list[tuple[RequestKey, Sampled]]:
        """Of the running requests that are watched: what each has sampled since this was asked last."""
        return [(flight.request.key, flight.news()) for flight in self._running if flight.is_watched]

    @torch.inference_mode()
    def abort(self, key: RequestKey) -> Finished:
        for flight in self._waiting:
            if flight.request.key == key:
                self._waiting.remove(flight)
                return [(key, flight.completion())]
        for place, flight in enumerate(self._running):
            if flight.request.key == key:
                flight.is_gone = True
                self._running = self._runner.leave(self._running, {place})
                return [(key, flight.completion())]
        return []

    @torch.inference_mode()
    def abort_all(self) -> Finished:
        finished = self.settle()
        keys = [flight.request.key for flight in (*self._running, *self._waiting)]
        return finished + [one for key in keys for one in self.abort(key)]

    @torch.inference_mode()
    def load(self, version: int, weights: Weights) -> None:
        """All that training may change, and nothing else: where the model has adapters, these. On a GPU the copy is only put
        into the device's queue here, behind what was launched: nobody waits for it."""
        if version < self.version:
            raise EngineError(f"version {version} was offered to an engine at {self.version}: versions never fall")
        own = trained_weights(self._model)
        if own.keys() != weights.keys():
            raise EngineError(f"the weights of version {version} do not fit: {sorted(own.keys() ^ weights.keys())[:4]}")
        if strange := [name for name, tensor in own.items() if weights[name].shape != tensor.shape]:
            found, expected = tuple(weights[strange[0]].shape), tuple(own[strange[0]].shape)
            raise EngineError(
                f"the weights of version {version} do not fit: {strange[0]} is {found}, expected {expected}: a learner must "
                "train the model that its engines were made of"
            )
        began = time.perf_counter()
        if self._on_update == "recompute":
            self._early = self.settle()
            self._begin_again(list(self._running))
        for flight in self._running:
            flight.is_mixed = True
        self._runner.forget()
        with self._runner.working():
            self._runner.swap(list(own.values()), [weights[name] for name in own])
        self.version = version
        self._swap_s = time.perf_counter() - began

    @torch.inference_mode()
    def settle(self) -> Finished:
        """Wait for all that was launched; those that ended. Nothing is sampled any more when this returns."""
        finished = self._early
        self._early = []
        while self._pending:
            finished += self._collect()
        return finished

    @torch.inference_mode()
    def step(self) -> Finished:
        """One token for every running request and the first token for those that join; the ones that ended."""
        with self._runner.working():
            is_launched = self._launch()
        finished = self._early
        self._early = []
        while len(self._pending) > (self._runner.depth if is_launched else 0):
            finished += self._collect()
        return finished

    def _launch(self) -> bool:
        decoding = self._make_room()
        chunks = self._chunks(may_join=self._may_join(len(decoding)))
        if not decoding and not chunks:
            return False
        drawn = self._runner.launch(decoding, chunks)
        sampling = [*decoding, *(chunk.flight for chunk in chunks if chunk.is_last)]
        for flight in decoding:
            flight.num_computed += 1
        for chunk in chunks:
            chunk.flight.num_computed = chunk.end
            chunk.flight.is_prefilling = not chunk.is_last
        for flight in sampling:
            flight.num_launched += 1
        self._pending.append(_Launched(sampling, self.version, drawn))
        return True

    def _make_room(self) -> list[TokenSequence]:
        """Those that decode. If their next tokens do not fit, the youngest requests leave, one after the other."""
        while True:
            decoding = [flight for flight in self._running if flight.can_decode]
            if self._runner.grow(decoding):
                return decoding
            if self._pending:
                self._early = self.settle()
            else:
                self._begin_again([self._running[-1]])
                self.num_preempted += 1

    def _begin_again(self, flights: Sequence[TokenSequence]) -> None:
        """Back to the front of the queue, in their order. Nothing may be launched that has not been collected."""
        places = {place for place, flight in enumerate(self._running) if flight in flights}
        self._running = self._runner.leave(self._running, places)
        for flight in reversed(flights):
            flight.begin_again()
            self._waiting.appendleft(flight)

    def _may_join(self, num_decoding: int) -> bool:
        """At once where it matters: when much is free. Else together with others, a few steps later."""
        self._num_since_join += 1
        num_free = self._num_slots - len(self._running)
        is_much = not num_decoding or num_free * MUCH >= self._num_slots
        return is_much or self._num_since_join >= self._runner.join_every

    def _chunks(self, *, may_join: bool) -> list[Chunk]:
        """What is computed of prompts: first of those that have begun, then of waiting ones for the free slots. Where prompts
        cannot be cut, one above the limit goes alone."""
        room, chunks = self._prefill_tokens, list[Chunk]()
        for flight in self._running:
            if flight.is_prefilling and room > 0:
                chunks.append(self._chunk(flight, room))
                room -= chunks[-1].end - chunks[-1].begin
        while may_join and self._waiting and len(self._running) < self._num_slots and room > 0:
            flight = self._waiting[0]
            if chunks and not self._runner.can_chunk and flight.length > room:
                break
            if not self._runner.begin(flight):
                break
            self._running.append(self._waiting.popleft())
            self._num_since_join = 0
            chunks.append(self._chunk(flight, room))
            room -= chunks[-1].end - chunks[-1].begin
        return chunks

    def _chunk(self, flight: TokenSequence, room: int) -> Chunk:
        begin, end = flight.num_computed, flight.length
        chunk = Chunk(flight, begin, min(end, begin + room) if self._runner.can_chunk else end)
        self._runner.will_compute(flight, chunk.end)
        return chunk

    def _collect(self) -> Finished:
        launched = self._pending.popleft()
        tokens, logprobs = launched.drawn()
        for flight, token, logprob in zip(launched.flights, tokens, logprobs, strict=True):
            if flight.finish is None and not flight.is_gone:
                flight.append(token, logprob, launched.version)
                self._look_for_strings(flight)
                self.tokens_generated += 1
        ended = {place for place, flight in enumerate(self._running) if flight.finish is not None}
        finished = [(self._running[place].request.key, self._running[place].completion()) for place in sorted(ended)]
        if ended:
            self._running = self._runner.leave(self._running, ended)
        return finished

    def _look_for_strings(self, flight: TokenSequence) -> None:
        strings = flight.request.sampling.stop_strings
        if strings and self._decode is not None and ends_with_one(flight.tokens, strings, self._decode):
            flight.finish = Finish.STOP
