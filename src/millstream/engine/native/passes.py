"""What attention does in one forward pass over pages: write the new keys and values, then look at what stands there.

Shapes: N tokens, H heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from millstream.engine.native.fused import operations
from millstream.engine.native.heads import Heads, Pages
from millstream.errors import ModelError
from millstream.model.attention import Rule, can_be_ragged, on_device, ragged, scores, within_window


class Pools:
    """Keys and values of all layers, and where those of every slot are. The slot after the last is nobody's, and all of its
    places are page 0."""

    def __init__(
        self,
        shapes: Mapping[int, tuple[int, int]],
        num_pages: int,
        page: int,
        num_slots: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page = page
        self.num_pages = num_pages
        self.device = device
        self.keys = {
            layer: torch.zeros(num_pages, heads, page, dim, dtype=dtype, device=device)
            for layer, (heads, dim) in shapes.items()
        }
        self.values = {layer: torch.zeros_like(keys) for layer, keys in self.keys.items()}
        self.table = torch.zeros(num_slots + 1, width, dtype=torch.int32, device=device)
        self.operations = operations(device)

    def at(self, layer: int, slots_N: Tensor, positions_N: Tensor) -> Pages:
        return Pages(self.keys[layer], self.values[layer], self.table, slots_N, positions_N)


class Probe:
    """Sees what each layer brings, and computes nothing."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        if key.shape != value.shape:
            raise ModelError('keys and values have different shapes here: set engine.cache = "slots"')
        self.shapes[layer] = (key.shape[1], key.shape[3])
        return query.transpose(1, 2)

    def check(self, model: PreTrainedModel) -> None:
        """Every layer must have come through our attention: else the model keeps a state that we do not hold."""
        expected = model.config.get_text_config().num_hidden_layers
        if len(self.shapes) != expected:
            raise ModelError(
                f"{type(model).__name__} has {expected} layers and {len(self.shapes)} use transformers' attention "
                "interface: state-space, linear-attention and cross-attention layers are not supported"
            )


class _Pass:
    def __init__(self, pools: Pools, slots_N: Tensor, positions_N: Tensor) -> None:
        self.pools = pools
        self.slots_N = slots_N
        self.positions_N = positions_N

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """See `millstream.model.attention.AttentionContext`."""
        pages = self.pools.at(layer, self.slots_N, self.positions_N)
        self.pools.operations.write(key[0].transpose(0, 1), value[0].transpose(0, 1), pages)
        return self._look(query[0].transpose(0, 1), pages, rule)[None]

    def attend_fused(
        self, layer: int, qkv_NE: Tensor, cos_ND: Tensor, sin_ND: Tensor, heads: Heads, rule: Rule
    ) -> Tensor:
        """See `millstream.engine.native.fused.FusedContext`."""
        pages = self.pools.at(layer, self.slots_N, self.positions_N)
        query_NHD = self.pools.operations.rotate_and_write(qkv_NE, cos_ND, sin_ND, heads, pages)
        return self._look(query_NHD, pages, rule).flatten(1)

    def _look(self, query_NHD: Tensor, pages: Pages, rule: Rule) -> Tensor:
        raise NotImplementedError


class DecodePass(_Pass):
    """One new token for each slot, which sees everything before it."""

    def _look(self, query_NHD: Tensor, pages: Pages, rule: Rule) -> Tensor:
        out: Tensor = self.pools.operations.decode_attention(query_NHD, pages, rule)
        return out


class PrefillPass(_Pass):
    """Some tokens in a row of each slot (slot, begin, end), which see what stands before them and each other. What another slot
    writes in this pass, and this one shares, is there in time: all write before any looks."""

    def __init__(self, pools: Pools, chunks: Sequence[tuple[int, int, int]]) -> None:
        self._lengths = [(end - begin, end) for _, begin, end in chunks]
        slots = np.repeat([slot for slot, _, _ in chunks], [count for count, _ in self._lengths])
        positions = np.concatenate([np.arange(begin, end) for _, begin, end in chunks])
        both = on_device(np.stack([slots, positions]).astype(np.int32), pools.device)
        super().__init__(pools, both[0], both[1])
        seen = np.stack(
            [
                np.repeat([slot for slot, _, _ in chunks], [end for _, _, end in chunks]),
                np.concatenate([np.arange(end) for _, _, end in chunks]),
            ]
        )
        slots_T, places_T = on_device(seen, pools.device)
        self._page_T = pools.table[slots_T, places_T // pools.page].long()
        self._offset_T = places_T % pools.page
        self._ends = np.cumsum([(0, 0), *self._lengths], axis=0).astype(np.int32)
        self._query_ends, self._key_ends = on_device(self._ends.T.copy(), pools.device)

    def _look(self, query_NHD: Tensor, pages: Pages, rule: Rule) -> Tensor:
        key_TKD = pages.keys[self._page_T, :, self._offset_T]
        value_TKD = pages.values[self._page_T, :, self._offset_T]
        if can_be_ragged(query_NHD, rule):
            longest_query, longest_key = (max(some) for some in zip(*self._lengths, strict=True))
            ends = (self._query_ends, self._key_ends, longest_query, longest_key)
            return ragged(query_NHD, key_TKD, value_TKD, *ends, rule)
        query_ends, key_ends = self._ends[1:-1].T.tolist()
        cut = (query_NHD.tensor_split(query_ends), key_TKD.tensor_split(key_ends), value_TKD.tensor_split(key_ends))
        return torch.cat([_one_look(*part, rule) for part in zip(*cut, strict=True)])


def _one_look(query_NHD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rule: Rule) -> Tensor:
    num, num_keys = len(query_NHD), len(key_TKD)
    at = torch.arange(num_keys, device=query_NHD.device)
    mask = within_window(at[num_keys - num :, None], at[None], rule.window)
    query, key, value = (one.transpose(0, 1)[None] for one in (query_NHD, key_TKD, value_TKD))
    return scores(query, key, value, mask, rule)[0].transpose(0, 1)
