"""The slot runner, for a CPU: one slot for every request, so that the keys and values of the batch are a view and not a copy.

Running requests fill the slots 0..R-1 without gaps: when one leaves, the last takes its slot. One step is one forward pass over
the prompts that join (each distinct one is computed once) and over the newest token of every request that was running.

Shapes: R requests running, V vocabulary, T tokens in the longest of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millstream.engine.native import fused
from millstream.engine.native.memory import check_fits
from millstream.engine.native.runner import Chunk, Drawn
from millstream.engine.native.sampling import sample, uniforms
from millstream.engine.native.sequence import TokenSequence
from millstream.errors import ModelError
from millstream.model.attention import Packed, Rule, rows_of, scores, within_window
from millstream.model.load import context_length


class SlotRunner:
    """See `millstream.engine.native.runner.Runner`. The cache grows with the longest request and is never full."""

    depth = 0
    join_every = 1
    can_chunk = False
    cache_used = 0.0
    swap_s = None

    def __init__(self, model: PreTrainedModel, num_slots: int) -> None:
        fused.unfuse(model)  # it may come from a paged runner
        self._model = model
        self._device = next(model.parameters()).device
        self._cache = SlotCache(num_slots)
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
            self._cache.move(movers, gaps)
        return left

    def forget(self) -> None:
        """Nothing is kept of requests that have left."""

    def working(self) -> AbstractContextManager[None]:
        return nullcontext()

    def swap(self, own: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        torch._foreach_copy_(list(own), list(new))

    def launch(self, decoding: Sequence[TokenSequence], chunks: Sequence[Chunk]) -> Drawn:
        joining = [chunk.sequence for chunk in chunks]
        sequences = [*decoding, *joining]
        self._cache.reserve(max(sequence.length for sequence in sequences))
        prefill = _Prefill(self._cache, joining, first_slot=len(decoding), device=self._device) if joining else None
        decode = _Decode(self._cache, decoding, device=self._device) if decoding else None
        logits_RV = self._forward(decode, prefill)
        positions = [sequence.request.num_sampled + len(sequence.tokens) for sequence in sequences]
        uniforms_R = uniforms([sequence.request.seed for sequence in sequences], positions)
        drawn = sample(logits_RV, [sequence.request.sampling for sequence in sequences], uniforms_R)
        return lambda: drawn

    def _forward(self, decode: _Decode | None, prefill: _Prefill | None) -> Tensor:
        """The logits [R, V] that follow the newest token of each request, those that decode first."""
        parts = [part for part in (decode, prefill) if part is not None]
        context = _StepContext(decode, prefill)
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
            self._check_fits(key, grown, len(self._layers))
            self._layers[layer] = (_grow(key, grown), _grow(value, grown))
        self._capacity = grown

    def layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The cache of a layer; `key` and `value` [1, K, N, D] show what its entries look like."""
        if layer not in self._layers:
            self._check_fits(key, self._capacity, len(self._layers) + 1)
            self._layers[layer] = (self._new(key), self._new(value))
        return self._layers[layer]

    def _check_fits(self, like: Tensor, capacity: int, num_layers: int) -> None:
        num_values = self._num_slots * like.shape[1] * capacity * like.shape[3]
        check_fits(2 * num_layers * num_values * like.itemsize, like.device, "engine.slots")

    def _new(self, like: Tensor) -> Tensor:
        return like.new_zeros(self._num_slots, like.shape[1], self._capacity, like.shape[3])

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        for key, value in self._layers.values():
            key[target] = key[source]
            value[target] = value[source]

    def check(self, model: PreTrainedModel) -> None:
        """Every layer must have used our attention: else the model has a state that is not in our cache."""
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

    def __init__(
        self, cache: SlotCache, joining: Sequence[TokenSequence], *, first_slot: int, device: torch.device
    ) -> None:
        all_tokens = [sequence.all_tokens for sequence in joining]
        prompts = list(dict.fromkeys(all_tokens))
        row_of = {prompt: row for row, prompt in enumerate(prompts)}
        self.lengths = [len(prompt) for prompt in prompts]
        super().__init__(rows_of(self.lengths), device)
        self.tokens = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        self.last = torch.tensor(self.lengths, device=device).cumsum(0) - 1
        rows = [row_of[tokens] for tokens in all_tokens]
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
    """One new token for each of the first R slots, which attends to all tokens before it in its slot."""

    def __init__(self, cache: SlotCache, decoding: Sequence[TokenSequence], *, device: torch.device) -> None:
        self.tokens = torch.tensor([sequence.tokens[-1] for sequence in decoding], device=device)
        self.last = torch.arange(len(decoding), device=device)
        self._at = torch.tensor([sequence.length - 1 for sequence in decoding], device=device)
        self.position_ids = self._at[None]
        self._cache = cache
        self._longest = max(sequence.length for sequence in decoding)
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


class _StepContext:
    """One forward pass over decoding requests and joining prompts, in that order."""

    def __init__(self, decode: _Decode | None, prefill: _Prefill | None) -> None:
        self._decode = decode
        self._prefill = prefill
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
