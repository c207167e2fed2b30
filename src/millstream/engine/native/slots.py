"""The slot runner, for a CPU: one slot for every request, so that the keys and values of the batch are a view and not a copy.

Running requests fill the slots 0..R-1 without gaps: when one leaves, the last takes its slot. One step is one forward pass over
the prompts that join (each distinct one is computed once) and over the newest token of every request that was running.

Shapes: R requests running, V vocabulary, T tokens in the longest of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from millstream.engine.native import fused
from millstream.engine.native.fused_layer import fuse_model
from millstream.engine.native.memory import check_fits
from millstream.engine.native.plain import PLAIN, Heads, Normed
from millstream.engine.native.runner import Chunk, Drawn
from millstream.engine.native.sampling import sample, uniforms
from millstream.engine.native.sequence import TokenSequence
from millstream.errors import ModelError
from millstream.model.adapter_rows import adapter_rows_of
from millstream.model.attention import Packed, Rule, on_device, rows_of, scores, within_window
from millstream.model.load import context_length
from millstream.types import ComputePath


class SlotRunner:
    """See `millstream.engine.native.runner.Runner`. The cache grows with the longest request and is never full."""

    depth = 0
    join_every = 1
    can_chunk = False
    can_draft = False
    cache_used = 0.0
    swap_s = None

    def __init__(self, model: PreTrainedModel, num_slots: int, *, why_unfused: str = "") -> None:
        """`why_unfused`: as of `PagedRunner`."""
        fused.unfuse(model)  # it may come from another runner
        count = fused.FusedCount(0, 0) if why_unfused else fuse_model(model)
        self.path = ComputePath(f"a slot for each request, {count.words}", why_unfused or count.why(model))
        self._model = model
        self._adapters = adapter_rows_of(model)
        self._device = next(model.parameters()).device
        self._cache = SlotCache(num_slots)
        self._num_layers = model.config.get_text_config().num_hidden_layers
        self.max_length = context_length(model)

    def begin(self, sequence: TokenSequence) -> bool:
        sequence.num_computed = 0
        return True

    def will_compute(self, sequence: TokenSequence, end: int) -> None:
        """Equal prompts are found when they are computed."""

    def grow(self, sequences: Sequence[TokenSequence]) -> bool:
        return True

    def leave(self, running: list[TokenSequence], leaving: set[int]) -> list[TokenSequence]:
        """Requests of the last slots move into the gaps."""
        num_left = len(running) - len(leaving)
        gaps = [slot for slot in sorted(leaving) if slot < num_left]
        movers = [slot for slot in range(num_left, len(running)) if slot not in leaving]
        left = running[:num_left]
        for source, target in zip(movers, gaps, strict=True):
            left[target] = running[source]
        if gaps:
            self._cache.move(movers, gaps, longest=max(running[slot].length for slot in movers))
        return left

    def forget(self, *, is_kept: bool) -> None:
        """Nothing is kept of requests that have left."""

    def working(self) -> AbstractContextManager[None]:
        return nullcontext()

    def swap(self, own: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        torch._foreach_copy_(list(own), list(new))

    def launch(self, decoding: Sequence[TokenSequence], chunks: Sequence[Chunk]) -> Drawn:
        joining = [chunk.sequence for chunk in chunks]
        sequences = [*decoding, *joining]
        lengths = [sequence.length for sequence in sequences]
        self._cache.reserve(max(lengths))
        prefill = _Prefill(self._cache, joining, first_slot=len(decoding), device=self._device) if joining else None
        decode = _Decode(self._cache, decoding, lengths[: len(decoding)], device=self._device) if decoding else None
        context = _StepContext(decode, prefill)
        with self._using(decoding, prefill):
            out = self._model(**context.inputs(), use_cache=False, context=context)
        self._check_layers()
        logits_RV = context.per_request(out.logits[0].float())
        positions = [sequence.request.num_sampled + len(sequence.tokens) for sequence in sequences]
        uniforms_R = uniforms([sequence.request.seed for sequence in sequences], positions)
        drawn = sample(logits_RV, [sequence.request.sampling for sequence in sequences], uniforms_R)
        return lambda: drawn

    def _using(self, decoding: Sequence[TokenSequence], prefill: _Prefill | None) -> AbstractContextManager[None]:
        """The adapter of every row, where there are several."""
        if self._adapters is None:
            return nullcontext()
        of_rows = [sequence.request.adapter for sequence in decoding] + ([] if prefill is None else prefill.adapters)
        numbers = [self._adapters.number_of(adapter) for adapter in of_rows]
        return self._adapters.using(torch.tensor(numbers, device=self._device))

    def _check_layers(self) -> None:
        """Every layer must have used our attention: else the model has a state that is not in our cache."""
        if self._cache.num_layers != self._num_layers:
            raise ModelError(
                f"{type(self._model).__name__} has {self._num_layers} layers and {self._cache.num_layers} use transformers' "
                "attention interface: state-space, linear-attention and cross-attention layers are not supported"
            )


class SlotCache:
    """Keys and values of the running requests: per layer [slots, capacity, heads, dim], grown as requests get longer. All of a
    token, and all tokens of a request, lie side by side.

    Heads and dimension are read off the first keys that a layer brings: nothing is assumed of the architecture.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.capacity = 0

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def reserve(self, length: int) -> None:
        if length <= self.capacity:
            return
        self.capacity = max(32, 1 << (length - 1).bit_length())
        for layer, (key, value) in self._layers.items():
            self._layers[layer] = (self._grown(key), self._grown(value))

    def _grown(self, cache: Tensor) -> Tensor:
        grown = self._new(cache, self.num_layers)
        grown[:, : cache.shape[1]] = cache
        return grown

    def _new(self, like: Tensor, num_layers: int) -> Tensor:
        """An empty cache for tokens like these, `[..., heads, dim]`."""
        shape = (self._num_slots, self.capacity, *like.shape[-2:])
        check_fits(2 * num_layers * math.prod(shape) * like.itemsize, like.device, "engine.slots")
        return like.new_zeros(shape)

    def write(self, layer: int, place_N: Tensor, key_NKD: Tensor, value_NKD: Tensor) -> tuple[Tensor, Tensor]:
        """The cache of a layer, with these tokens in it: number p of request r has the place r * capacity + p."""
        if layer not in self._layers:
            num_layers = self.num_layers + 1
            self._layers[layer] = (self._new(key_NKD, num_layers), self._new(value_NKD, num_layers))
        keys, values = self._layers[layer]
        keys.flatten(0, 1).index_copy_(0, place_N, key_NKD)
        values.flatten(0, 1).index_copy_(0, place_N, value_NKD)
        return keys, values

    def move(self, source: Sequence[int], target: Sequence[int], *, longest: int) -> None:
        """The first `longest` tokens of some slots, to others."""
        for cache in (cache for layer in self._layers.values() for cache in layer):
            device = cache.device
            rows = cache.flatten(1)[:, : longest * cache[0, 0].numel()]
            rows.index_copy_(0, torch.tensor(target, device=device), rows[torch.tensor(source, device=device)])


class _Prefill(Packed):
    """Prompts attend to themselves; their keys and values are stored in the slots that start at `first_slot`.

    Each distinct prompt of an adapter is computed once; `rows` says which one each joining request has."""

    def __init__(
        self, cache: SlotCache, joining: Sequence[TokenSequence], *, first_slot: int, device: torch.device
    ) -> None:
        asked = [(sequence.request.adapter, sequence.all_tokens) for sequence in joining]
        row_of = {one: row for row, one in enumerate(dict.fromkeys(asked))}
        prompts = [tokens for _, tokens in row_of]
        self.adapters = [adapter for adapter, tokens in row_of for _ in tokens]  # of each token
        lengths_P = np.array([len(prompt) for prompt in prompts])
        ends_P = lengths_P.cumsum()
        super().__init__(rows_of(lengths_P.tolist()), device)
        self.tokens = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        self.last = on_device(ends_P - 1, device)
        rows_J = np.array([row_of[one] for one in asked])
        self.rows = on_device(rows_J, device)
        lengths_J = lengths_P[rows_J]
        begins_J = lengths_J.cumsum() - lengths_J
        joining_T = np.repeat(np.arange(len(rows_J)), lengths_J)  # of each token to store: whose it is, and where
        at_T = np.arange(len(joining_T)) - begins_J[joining_T]
        self._source = on_device((ends_P - lengths_P)[rows_J][joining_T] + at_T, device)
        self._place = on_device((first_slot + joining_T) * cache.capacity + at_T, device)
        self._cache = cache

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        stored = (packed[0].transpose(0, 1)[self._source] for packed in (key, value))
        self._cache.write(layer, self._place, *stored)
        return super().attend(layer, query, key, value, rule)


class _Decode:
    """One new token for each of the first R slots, which attends to all tokens before it in its slot."""

    def __init__(
        self, cache: SlotCache, decoding: Sequence[TokenSequence], lengths: Sequence[int], *, device: torch.device
    ) -> None:
        self.tokens = torch.tensor([sequence.tokens[-1] for sequence in decoding], device=device)
        self.last = torch.arange(len(decoding), device=device)
        self._at = torch.tensor(lengths, device=device) - 1
        self._place = self.last * cache.capacity + self._at
        self.position_ids = self._at[None]
        self._cache = cache
        self._longest = max(lengths)
        self._key_at = torch.arange(self._longest, device=device)
        self._masks: dict[int | None, Tensor] = {}

    def _mask(self, window: int | None) -> Tensor:
        if window not in self._masks:
            self._masks[window] = within_window(self._at[:, None], self._key_at[None], window)[:, None, None]
        return self._masks[window]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        caches = self._cache.write(layer, self._place, key[0].transpose(0, 1), value[0].transpose(0, 1))
        keys, values = (cache[: len(self.last), : self._longest].transpose(1, 2) for cache in caches)
        out = scores(
            query[0].transpose(0, 1)[:, :, None],
            keys,
            values,
            self._mask(rule.window),
            rule,
        )
        return out[None, :, :, 0]


class _StepContext:
    """One forward pass over decoding requests and joining prompts, in that order."""

    def __init__(self, decode: _Decode | None, prefill: _Prefill | None) -> None:
        self._decode = decode
        self._prefill = prefill
        self._split = 0 if decode is None else len(decode.tokens)
        self.normed: Normed | None = None

    def inputs(self) -> dict[str, Tensor]:
        """Of the model, which computes logits for the last token of each request and of each distinct prompt."""
        parts = [part for part in (self._decode, self._prefill) if part is not None]
        last = [part.last if part is self._decode else part.last + self._split for part in parts]
        return {
            "input_ids": torch.cat([part.tokens for part in parts])[None],
            "position_ids": torch.cat([part.position_ids for part in parts], dim=1),
            "logits_to_keep": torch.cat(last),
        }

    def per_request(self, logits: Tensor) -> Tensor:
        """A row for each request, those that decode first."""
        if self._prefill is None:
            return logits
        decoding = torch.arange(self._split, device=logits.device)
        return logits[torch.cat([decoding, self._split + self._prefill.rows])]

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

    def attend_fused(
        self, layer: int, qkv_NE: Tensor, cos_ND: Tensor, sin_ND: Tensor, heads: Heads, rule: Rule
    ) -> Tensor:
        parts = PLAIN.rotated(qkv_NE, cos_ND, sin_ND, heads)
        query, key, value = (part.transpose(0, 1)[None] for part in parts)
        return self.attend(layer, query, key, value, rule)[0].flatten(1)
