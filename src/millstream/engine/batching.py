"""Continuous batching over a Hugging Face causal LM, without a thread: requests join and leave at every step.

One step is one forward pass: waiting requests take the free slots (each distinct prompt is computed once), and every request
that was running decodes one token. Running requests fill the slots 0..R-1 without gaps, so that the key/value cache
of the batch is a view and not a copy: when one leaves, the last takes its slot.

What joins when depends on the order of `add`, `abort` and `step` alone. Weights are swapped between two steps; the cache
of running requests is kept, the tokens after it are sampled (and recorded) under the new version.

Shapes: R requests running, V vocabulary, T tokens in the longest of them.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millstream.engine.sampling import sample, uniforms
from millstream.errors import EngineError, ModelError, RequestRefused
from millstream.model.adapters import trained_weights
from millstream.model.attention import Packed, Rule, rows_of, scores, within_window
from millstream.model.load import check_layers, context_length
from millstream.types import Completion, Finish, Request, RequestKey, Sampled, Weights


class InFlight:
    """One request on its way."""

    __slots__ = ("finish", "is_watched", "logprobs", "num_told", "request", "tokens", "versions")

    def __init__(self, request: Request, *, is_watched: bool = False) -> None:
        self.request, self.is_watched, self.num_told = request, is_watched, 0
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.finish: Finish | None = None

    @property
    def length(self) -> int:
        """Tokens whose keys and values are in the cache once the newest token has been fed."""
        return len(self.request.tokens) + len(self.tokens)

    def append(self, token: int, logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.request.sampling.stop:
            self.finish = Finish.STOP
        elif len(self.tokens) == self.request.sampling.max_tokens:
            self.finish = Finish.LENGTH

    def news(self) -> Sampled:
        """What was sampled since this was asked last."""
        begin, self.num_told = self.num_told, len(self.tokens)
        return Sampled(tuple(self.tokens[begin:]), tuple(self.logprobs[begin:]), tuple(self.versions[begin:]))

    def completion(self) -> Completion:
        return Completion(
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish=self.finish or Finish.ABORT,
        )


Finished = list[tuple[RequestKey, Completion]]


class Batcher:
    """The engine's core: `add`, `abort`, `load` between calls of `step`. Not thread-safe; see `TorchEngine`."""

    def __init__(self, model: PreTrainedModel, *, num_slots: int, prefill_tokens: int = 4096, version: int = 0) -> None:
        check_layers(model)
        self._model = model.eval()
        self._device = next(model.parameters()).device
        self._num_slots = num_slots
        self._prefill_tokens = prefill_tokens
        self._max_length = context_length(model)
        self._cache = SlotCache(num_slots)
        self._waiting: deque[InFlight] = deque()
        self._running: list[InFlight] = []
        self.version = version
        self.tokens_generated = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, request: Request, *, is_watched: bool = False) -> None:
        check_request(request, self._max_length)
        self._waiting.append(InFlight(request, is_watched=is_watched))

    def news(self) -> list[tuple[RequestKey, Sampled]]:
        """Of the running requests that are watched: what each has sampled since this was asked last."""
        return [(flight.request.key, flight.news()) for flight in self._running if flight.is_watched]

    @torch.inference_mode()
    def abort(self, key: RequestKey) -> Finished:
        for flight in self._waiting:
            if flight.request.key == key:
                self._waiting.remove(flight)
                return [(key, flight.completion())]
        for slot, flight in enumerate(self._running):
            if flight.request.key == key:
                self._leave([slot])
                return [(key, flight.completion())]
        return []

    def abort_all(self) -> Finished:
        keys = [flight.request.key for flight in (*self._running, *self._waiting)]
        return [finished for key in keys for finished in self.abort(key)]

    @torch.inference_mode()
    def load(self, version: int, weights: Weights) -> None:
        """All that training may change, and nothing else: where the model has adapters, these."""
        if version < self.version:
            raise EngineError(f"version {version} was offered to an engine at {self.version}: versions never fall")
        own = trained_weights(self._model)
        if own.keys() != weights.keys():
            raise EngineError(f"the weights of version {version} do not fit: {sorted(own.keys() ^ weights.keys())[:4]}")
        for name, parameter in own.items():
            parameter.copy_(weights[name])
        self.version = version

    @torch.inference_mode()
    def step(self) -> Finished:
        """One token for every running request and the first token for those that join; the ones that ended.

        Prompts and running requests share one forward pass: everything but the attention sees one row of tokens."""
        decoding, joining = list(self._running), self._join()
        self._running.extend(joining)
        self._cache.reserve(max(flight.length for flight in self._running))
        prefill = _Prefill(self._cache, joining, first_slot=len(decoding), device=self._device) if joining else None
        decode = _Decode(self._cache, decoding, device=self._device) if decoding else None
        self._sample([*decoding, *joining], self._forward(decode, prefill))
        ended = [slot for slot, flight in enumerate(self._running) if flight.finish is not None]
        finished = [(self._running[slot].request.key, self._running[slot].completion()) for slot in ended]
        self._leave(ended)
        return finished

    def _join(self) -> list[InFlight]:
        """Waiting requests for the free slots, as many as fit into one pass; a prompt above the limit goes alone."""
        free, room = self._num_slots - len(self._running), self._prefill_tokens
        joining: list[InFlight] = []
        while self._waiting and len(joining) < free:
            room -= len(self._waiting[0].request.tokens)
            if room < 0 and joining:
                break
            joining.append(self._waiting.popleft())
        return joining

    def _leave(self, slots: Sequence[int]) -> None:
        """Free these slots; requests of the last slots move into the gaps."""
        num_left = len(self._running) - len(slots)
        gaps = [slot for slot in slots if slot < num_left]
        leaving = set(slots)
        movers = [slot for slot in range(num_left, len(self._running)) if slot not in leaving]
        for source, target in zip(movers, gaps, strict=True):
            self._running[target] = self._running[source]
        del self._running[num_left:]
        if gaps:
            self._cache.move(movers, gaps)

    def _forward(self, decode: _Decode | None, prefill: _Prefill | None) -> Tensor:
        """The logits [R, V] that follow the newest token of each request, those that decode first."""
        parts = [part for part in (decode, prefill) if part is not None]
        context = _Step(decode, prefill)
        out = self._model(
            input_ids=torch.cat([part.tokens for part in parts])[None],
            position_ids=torch.cat([part.position_ids for part in parts], dim=1),
            use_cache=False,
            context=context,
            logits_to_keep=torch.cat([part.last + context.offset(part) for part in parts]),
        )
        if prefill is None:
            return out.logits[0].float()  # type: ignore[no-any-return]
        self._cache.check(self._model)
        num_decoding = 0 if decode is None else len(decode.tokens)
        rows = torch.cat([torch.arange(num_decoding, device=self._device), num_decoding + prefill.rows])
        return out.logits[0].float()[rows]  # type: ignore[no-any-return]

    def _sample(self, flights: Sequence[InFlight], logits_RV: Tensor) -> None:
        positions = [flight.request.num_sampled + len(flight.tokens) for flight in flights]
        uniforms_R = uniforms([flight.request.seed for flight in flights], positions)
        tokens, logprobs = sample(logits_RV, [flight.request.sampling for flight in flights], uniforms_R)
        for flight, token, logprob in zip(flights, tokens, logprobs, strict=True):
            flight.append(token, logprob, self.version)
        self.tokens_generated += len(flights)


def check_request(request: Request, max_length: int | None) -> None:
    """Raises `RequestRefused` for a request that can never run. None: the model sets no limit."""
    length = len(request.tokens) + request.sampling.max_tokens
    if not request.tokens:
        raise RequestRefused(f"{request.key}: the prompt is empty")
    if request.sampling.max_tokens < 1:
        raise RequestRefused(f"{request.key}: max_tokens must be at least 1")
    if request.sampling.top_k < 0 or not 0 < request.sampling.top_p <= 1:
        raise RequestRefused(f"{request.key}: top_k must be at least 0, top_p above 0 and at most 1")
    if not 0 <= request.num_sampled < len(request.tokens):
        raise RequestRefused(f"{request.key}: num_sampled must be at least 0 and less than the number of tokens")
    if max_length is not None and length > max_length:
        raise RequestRefused(
            f"{request.key}: a prompt of {len(request.tokens)} tokens and max_tokens = {request.sampling.max_tokens} "
            f"exceed the model's context of {max_length}: set rollout.max_tokens lower, or drop the prompt"
        )


class SlotCache:
    """Keys and values of the running requests: per layer [slots, heads, capacity, dim], grown as requests get longer.

    Heads and dimension are read off the first keys that a layer brings: nothing is assumed of the architecture.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._capacity = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, length: int) -> None:
        if length <= self._capacity:
            return
        grown = max(32, 1 << (length - 1).bit_length())
        for layer, (key, value) in self._layers.items():
            self._layers[layer] = (_grow(key, grown), _grow(value, grown))
        self._capacity = grown

    def layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The cache of a layer; `key` and `value` [1, K, N, D] show what its entries look like."""
        if layer not in self._layers:
            self._layers[layer] = (self._new(key), self._new(value))
        return self._layers[layer]

    def _new(self, like: Tensor) -> Tensor:
        return like.new_zeros(self._num_slots, like.shape[1], self._capacity, like.shape[3])

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        for key, value in self._layers.values():
            key[target] = key[source]
            value[target] = value[source]

    def check(self, model: PreTrainedModel) -> None:
        """Every layer must have come through our attention: else the model keeps a state that we do not hold."""
        expected = model.config.get_text_config().num_hidden_layers
        if len(self._layers) != expected:
            raise ModelError(
                f"{type(model).__name__} has {expected} layers and {len(self._layers)} use transformers' attention "
                "interface: state-space, linear-attention and cross-attention layers are not supported"
            )


def _grow(cache: Tensor, capacity: int) -> Tensor:
    grown = cache.new_zeros(*cache.shape[:2], capacity, cache.shape[3])
    grown[:, :, : cache.shape[2]] = cache
    return grown


class _Prefill(Packed):
    """Prompts attend to themselves; their keys and values are stored in the slots that start at `first_slot`.

    Each distinct prompt is computed once; `rows` says which one each joining request has."""

    def __init__(self, cache: SlotCache, joining: Sequence[InFlight], *, first_slot: int, device: torch.device) -> None:
        prompts = list(dict.fromkeys(flight.request.tokens for flight in joining))
        row_of = {prompt: row for row, prompt in enumerate(prompts)}
        self.lengths = [len(prompt) for prompt in prompts]
        super().__init__(rows_of(self.lengths), device)
        self.tokens = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        self.last = torch.tensor(self.lengths, device=device).cumsum(0) - 1
        rows = [row_of[flight.request.tokens] for flight in joining]
        self.rows = torch.tensor(rows, device=device)
        starts = [0, *itertools.accumulate(self.lengths)]
        counts = torch.tensor([self.lengths[row] for row in rows])
        self._source = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in rows]).to(device)
        self._slots = (first_slot + torch.repeat_interleave(torch.arange(len(rows)), counts)).to(device)
        self._at = torch.cat([torch.arange(self.lengths[row]) for row in rows]).to(device)
        self._cache = cache

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        keys, values = self._cache.layer(layer, key, value)
        keys[self._slots, :, self._at] = key[0].transpose(0, 1)[self._source]
        values[self._slots, :, self._at] = value[0].transpose(0, 1)[self._source]
        return super().attend(layer, query, key, value, rule)


class _Decode:
    """One new token for each of the first R slots, which sees everything before it in its slot."""

    def __init__(self, cache: SlotCache, decoding: Sequence[InFlight], *, device: torch.device) -> None:
        self.tokens = torch.tensor([flight.tokens[-1] for flight in decoding], device=device)
        self.last = torch.arange(len(decoding), device=device)
        self._at = torch.tensor([flight.length - 1 for flight in decoding], device=device)
        self.position_ids = self._at[None]
        self._cache = cache
        self._longest = max(flight.length for flight in decoding)
        self._key_at = torch.arange(self._longest, device=device)
        self._masks: dict[int | None, Tensor] = {}

    def _mask(self, window: int | None) -> Tensor:
        if window not in self._masks:
            self._masks[window] = within_window(self._at[:, None], self._key_at[None], window)[:, None, None]
        return self._masks[window]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        keys, values = self._cache.layer(layer, key, value)
        keys[self.last, :, self._at] = key[0].transpose(0, 1)
        values[self.last, :, self._at] = value[0].transpose(0, 1)
        num = len(self.last)
        out = scores(
            query[0].transpose(0, 1)[:, :, None],
            keys[:num, :, : self._longest],
            values[:num, :, : self._longest],
            self._mask(rule.window),
            rule,
        )
        return out[None, :, :, 0]


class _Step:
    """One forward pass over decoding requests and joining prompts, in that order."""

    def __init__(self, decode: _Decode | None, prefill: _Prefill | None) -> None:
        self._decode, self._prefill = decode, prefill
        self._split = 0 if decode is None else len(decode.tokens)

    def offset(self, part: _Decode | _Prefill) -> int:
        return self._split if part is self._prefill else 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        cut = self._split
        outs = []
        if self._decode is not None:
            part = (query[:, :, :cut], key[:, :, :cut], value[:, :, :cut])
            outs.append(self._decode.attend(layer, *part, rule))
        if self._prefill is not None:
            part = (query[:, :, cut:], key[:, :, cut:], value[:, :, cut:])
            outs.append(self._prefill.attend(layer, *part, rule))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
