"""Continuous batching, without a thread: requests join and leave at every step.

The *batcher* decides which requests join, how much of each is computed, and which are preempted; a *runner* computes: on a CPU
in slots (`slots`), on a GPU in pages (`paged`). One step computes one token for every running request and, up to a budget of
tokens, prompts that join; long ones in chunks, where the runner can.

A runner may work ahead: step k + 1 is launched before the tokens of step k are known, so that the device never waits for the
host. A request that turns out to have stopped in step k then has one token too many, which is dropped; one that ends by its
length never has. A step that checks drafts (`speculation`) is collected before the next is launched.

When the cache is full, the youngest request is preempted: it waits at the front of the queue, and what it has sampled is kept
and computed again when it returns. From then on no more requests run than are left, so that it does not return only to be
preempted again. Every request that ends raises that limit by one.

Weights are swapped between two steps: with `keep` the cache of running requests stays, and that of conversations between two
turns; with `recompute` they all restart. In both cases the tokens after it are sampled, and recorded, under the new version.

What joins when depends on the order of `add`, `abort`, `load` and `step` alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from millstream.engine import OnUpdate
from millstream.engine.native.runner import Chunk, Drawn, Runner
from millstream.engine.native.sequence import Completions, TokenSequence
from millstream.engine.native.slots import SlotRunner
from millstream.engine.native.speculation import Speculator
from millstream.engine.native.strings import DecodeTokens, ends_with_one
from millstream.engine.request import CACHE_LIMIT, CONTEXT_LIMIT, ROPE_LIMIT, check_request
from millstream.errors import EngineError, RequestRefused
from millstream.model.adapter_rows import adapter_rows_of
from millstream.model.adapters import trained_weights
from millstream.model.load import check_layers, context_length, rope_limit
from millstream.types import ComputePath, Finish, Request, RequestKey, Sampled, Weights

MIN_FREE = 8  # when one slot in this number is free, requests join at once


class _LaunchedStep(NamedTuple):
    """Its rows: what is sampled for which request, and what the draft of the request has there. None: its draft ends before."""

    sequences: list[TokenSequence]
    drafted: Sequence[int | None]
    version: int
    drawn: Drawn


def _limit_of(model: PreTrainedModel, longest: int | None) -> str:
    """What limits the length of a request, in words."""
    if longest != context_length(model):
        return CACHE_LIMIT
    return CONTEXT_LIMIT if longest != rope_limit(model.config.get_text_config()) else ROPE_LIMIT


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
        decode: DecodeTokens | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        """`runner`: None is slots. `decode`: for stop strings; without it, requests that have some are refused. `speculator`:
        None: there are no drafts."""
        check_layers(model)
        self._model = model.eval()
        self._runner = SlotRunner(model, num_slots) if runner is None else runner
        self._num_slots = num_slots
        self._prefill_tokens = prefill_tokens
        self._on_update = on_update
        self._decode = decode
        self._speculator = Speculator(0) if speculator is None else speculator
        self._limit = _limit_of(model, self._runner.max_length)
        self._num_words = model.get_input_embeddings().weight.shape[0]
        rows = adapter_rows_of(model)
        self._num_adapters = 0 if rows is None else rows.num
        self._waiting: deque[TokenSequence] = deque()
        self._running: list[TokenSequence] = []
        self._pending: deque[_LaunchedStep] = deque()
        self._early: Completions = []  # of requests that ended while room was made for others
        self.version = version
        self.tokens_generated = 0
        self._num_steps = 0
        self._num_context = 0
        self._num_prompt = 0
        self.num_preempted = 0
        self._swap_s = 0.0
        self._num_since_join = 0
        self._has_prompts = False  # whether the last launch had chunks
        self._max_running = num_slots

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
    def counts(self) -> tuple[int, int, int, int]:
        """So far: tokens generated, steps, tokens in the cache summed over the steps, tokens of prompts computed."""
        return self.tokens_generated, self._num_steps, self._num_context, self._num_prompt

    @property
    def swap_s(self) -> float:
        """How long the last `load` delayed decoding."""
        measured = self._runner.swap_s
        return self._swap_s if measured is None else measured

    @property
    def path(self) -> ComputePath:
        return self._runner.path

    @property
    def cache_used(self) -> float:
        return self._runner.cache_used

    @property
    def num_drafted(self) -> int:
        """Tokens of drafts that were checked."""
        return self._speculator.num_drafted

    @property
    def num_accepted(self) -> int:
        """Tokens of drafts that were right."""
        return self._speculator.num_accepted

    @property
    def max_length(self) -> int | None:
        return self._runner.max_length

    def add(self, request: Request, *, is_watched: bool = False) -> None:
        check_request(
            request,
            self._runner.max_length,
            num_words=self._num_words,
            num_adapters=self._num_adapters,
            limit=self._limit,
        )
        if request.sampling.stop_strings and self._decode is None:
            raise RequestRefused(f"{request.key}: stop strings need a tokenizer, and this engine was built without one")
        self._waiting.append(TokenSequence(request, is_watched=is_watched))

    def take_unreported(self) -> list[tuple[RequestKey, Sampled]]:
        """Of the running requests that are watched: what each has sampled since the last call."""
        return [(one.request.key, one.take_unreported()) for one in self._running if one.is_watched]

    @torch.inference_mode()
    def abort(self, key: RequestKey) -> Completions:
        for sequence in self._waiting:
            if sequence.request.key == key:
                self._waiting.remove(sequence)
                return [(key, sequence.completion())]
        for index, sequence in enumerate(self._running):
            if sequence.request.key == key:
                sequence.is_aborted = True
                self._running = self._runner.leave(self._running, {index})
                return [(key, sequence.completion())]
        return []

    @torch.inference_mode()
    def abort_all(self) -> Completions:
        finished = self.settle()
        keys = [sequence.request.key for sequence in (*self._running, *self._waiting)]
        return finished + [one for key in keys for one in self.abort(key)]

    @torch.inference_mode()
    def load(self, version: int, weights: Weights) -> None:
        """All that training may change, and nothing else: where the model has adapters, these. On a GPU the copy is only put
        into the device's queue here, after what was launched: nothing waits for it."""
        if version < self.version:
            raise EngineError(f"version {version} was offered to an engine at {self.version}: versions never fall")
        own = trained_weights(self._model)
        if own.keys() != weights.keys():
            raise EngineError(f"the weights of version {version} do not fit: {sorted(own.keys() ^ weights.keys())[:4]}")
        if misfits := [name for name, tensor in own.items() if weights[name].shape != tensor.shape]:
            found, expected = tuple(weights[misfits[0]].shape), tuple(own[misfits[0]].shape)
            raise EngineError(
                f"the weights of version {version} do not fit: {misfits[0]} is {found}, expected {expected}: a learner must "
                "train the model that its engines were made of"
            )
        began = time.perf_counter()
        if self._on_update == "recompute":
            self._early = self.settle()
            self._restart(list(self._running))
        for sequence in self._running:
            sequence.is_mixed = True
        self._runner.forget(is_kept=self._on_update == "keep")
        with self._runner.working():
            self._runner.swap(list(own.values()), [weights[name] for name in own])
        self.version = version
        self._swap_s = time.perf_counter() - began

    @torch.inference_mode()
    def settle(self) -> Completions:
        """Wait for all that was launched. Returns what has ended. Nothing is sampled any more when this returns."""
        finished = self._early
        self._early = []
        while self._pending:
            finished += self._collect()
        return finished

    @torch.inference_mode()
    def step(self) -> Completions:
        """One token for every running request, more where a draft was right, and the first token for those that join. Returns
        what has ended."""
        is_drafting = self._speculator.begin_step(self._running)
        if is_drafting:
            self._early = self.settle()
        with self._runner.working():
            is_launched = self._launch(is_drafting=is_drafting)
        self._speculator.observe(self._running)  # while the device works
        finished = self._early
        self._early = []
        while len(self._pending) > (self._runner.depth if is_launched and not is_drafting else 0):
            finished += self._collect()
        self._speculator.end_step(is_pure=not self._has_prompts)
        return finished

    def _launch(self, *, is_drafting: bool) -> bool:
        decoding = self._make_room()
        if is_drafting:
            self._draft(decoding)
        chunks = self._chunks(may_join=self._may_join(len(decoding)))
        self._has_prompts = bool(chunks)
        if not decoding and not chunks:
            return False
        drawn = self._runner.launch(decoding, chunks)
        sampling = [*decoding, *(chunk.sequence for chunk in chunks if chunk.is_last)]
        self._num_steps += 1
        for sequence in decoding:
            sequence.num_computed += 1
            self._num_context += sequence.num_computed
        for chunk in chunks:
            self._num_prompt += chunk.end - chunk.begin
            chunk.sequence.num_computed = chunk.end
            chunk.sequence.is_prefilling = not chunk.is_last
        for sequence in sampling:
            sequence.num_launched += 1
        rows, drafted = self._rows_of(sampling) if is_drafting else (sampling, [None] * len(sampling))
        self._pending.append(_LaunchedStep(rows, drafted, self.version, drawn))
        return True

    def _rows_of(self, sampling: list[TokenSequence]) -> tuple[list[TokenSequence], list[int | None]]:
        """See `_LaunchedStep`. Drafts end here."""
        rows = [(sequence, token) for sequence in sampling for token in (*sequence.draft, None)]
        for sequence in sampling:
            sequence.draft = ()
        self._speculator.num_drafted += len(rows) - len(sampling)
        return [sequence for sequence, _ in rows], [token for _, token in rows]

    def _draft(self, decoding: list[TokenSequence]) -> None:
        """No request is preempted for a draft: without room for all of them there is none."""
        self._speculator.draft(decoding)
        if not self._runner.grow(decoding):
            for sequence in decoding:
                sequence.draft = ()

    def _make_room(self) -> list[TokenSequence]:
        """The sequences that decode. If their next tokens do not fit, the youngest are preempted, one after the other."""
        while True:
            decoding = [sequence for sequence in self._running if sequence.can_decode]
            if self._runner.grow(decoding):
                return decoding
            if self._pending:
                self._early = self.settle()
            else:
                self._restart([self._running[-1]])
                self.num_preempted += 1
                self._max_running = max(1, len(self._running))

    def _restart(self, sequences: Sequence[TokenSequence]) -> None:
        """Back to the front of the queue, in their order. Everything that was launched must have been collected."""
        indices = {index for index, sequence in enumerate(self._running) if sequence in sequences}
        self._running = self._runner.leave(self._running, indices)
        for sequence in reversed(sequences):
            sequence.restart()
            self._waiting.appendleft(sequence)

    def _may_join(self, num_decoding: int) -> bool:
        """At once where it matters: when many slots are free. Else together with others, a few steps later."""
        self._num_since_join += 1
        num_free = self._max_running - len(self._running)
        are_many_free = not num_decoding or num_free * MIN_FREE >= self._max_running
        return are_many_free or self._num_since_join >= self._runner.join_every

    def _chunks(self, *, may_join: bool) -> list[Chunk]:
        """What is computed of prompts: first of those that have started, then of waiting ones for the free slots. Where prompts
        cannot be cut, one above the limit is computed alone."""
        room, chunks = self._prefill_tokens, list[Chunk]()
        for sequence in self._running:
            if sequence.is_prefilling and room > 0:
                chunks.append(self._chunk(sequence, room))
                room -= chunks[-1].end - chunks[-1].begin
        while may_join and self._waiting and len(self._running) < self._max_running and room > 0:
            sequence = self._waiting[0]
            if chunks and not self._runner.can_chunk and sequence.length > room:
                break
            if not self._runner.begin(sequence):
                break
            self._running.append(self._waiting.popleft())
            self._num_since_join = 0
            chunks.append(self._chunk(sequence, room))
            room -= chunks[-1].end - chunks[-1].begin
        return chunks

    def _chunk(self, sequence: TokenSequence, room: int) -> Chunk:
        begin, end = sequence.num_computed, sequence.length
        chunk = Chunk(sequence, begin, min(end, begin + room) if self._runner.can_chunk else end)
        self._runner.will_compute(sequence, chunk.end)
        return chunk

    def _collect(self) -> Completions:
        launched = self._pending.popleft()
        tokens, logprobs = launched.drawn()
        wrong = None  # the request whose draft differs from what was sampled: its next rows came after another token
        for sequence, drafted, token, logprob in zip(
            launched.sequences, launched.drafted, tokens, logprobs, strict=True
        ):
            if sequence is wrong or sequence.finish is not None or sequence.is_aborted:
                continue
            sequence.append(token, logprob, launched.version)
            self._check_stop_strings(sequence)
            self.tokens_generated += 1
            if token == drafted:
                self._speculator.num_accepted += 1
                sequence.num_computed += 1
                sequence.num_launched += 1
            else:
                wrong = sequence
        ended = {index for index, sequence in enumerate(self._running) if sequence.finish is not None}
        finished = [(self._running[index].request.key, self._running[index].completion()) for index in sorted(ended)]
        if ended:
            self._running = self._runner.leave(self._running, ended)
            self._max_running = min(self._num_slots, self._max_running + len(ended))
        return finished

    def _check_stop_strings(self, sequence: TokenSequence) -> None:
        strings = sequence.request.sampling.stop_strings
        if strings and self._decode is not None and ends_with_one(sequence.tokens, strings, self._decode):
            sequence.finish = Finish.STOP
