"""The paged cache: which request has which page, the tensors of the pages, and attention over them in one forward pass.

A pass writes the new keys and values to their pages, then attends to what is there.

Shapes: N tokens, T tokens that are attended to, H heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from millstream.engine.native.fused import operations_for
from millstream.engine.native.plain import Heads, Normed, Pages
from millstream.errors import ModelError
from millstream.model.adapter_rows import adapter_rows_of
from millstream.model.attention import Rule, can_be_ragged, on_device, ragged, scores, within_window

START = 0  # the number of the empty prefix that every sequence starts with, under the first weights
PageOwner = tuple[int, int, int, int] | None  # the only conversation that may use a page. None: all may
PageName = tuple[int, tuple[int, ...], PageOwner]


class PageAllocator:
    """Which request has which page. `size`: tokens in a page. Page 0 belongs to no request: what has no place is written there.

    A page that several requests need is shared, and one that none needs any more is kept for later requests until the room is
    needed. Pages are found by their tokens *and all tokens before them*: a page's name is the number of the page before it,
    its tokens, and its owner. Numbers are never used twice, so that nothing is found after a page that is gone. Full pages have
    names, and the last page of a conversation between two turns, which only that conversation finds. `root` is the number of
    the empty prefix under the present weights, `root_of` that under one of several adapters.
    """

    def __init__(self, num_pages: int, size: int) -> None:
        self.num_pages = num_pages - 1
        self.size = size
        self._free = list(range(num_pages - 1, 0, -1))
        self._num_users = [0] * num_pages
        self._found: dict[PageName, int] = {}
        self._names: dict[int, tuple[PageName, int]] = {}  # page -> its name and its number
        self._idle: OrderedDict[int, None] = OrderedDict()  # named pages without a user, the longest unused first
        self._numbers = itertools.count(START + 1)
        self.root = START
        self._adapter_roots: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._idle)

    def root_of(self, adapter: int | None) -> int:
        if adapter is None:
            return self.root
        if adapter not in self._adapter_roots:
            self._adapter_roots[adapter] = next(self._numbers)
        return self._adapter_roots[adapter]

    def take(self, count: int) -> list[int] | None:
        """`count` pages, or none."""
        if count > self.num_free:
            return None
        taken = [self._free.pop() if self._free else self._oldest_idle() for _ in range(count)]
        for page in taken:
            self._num_users[page] = 1
        return taken

    def _oldest_idle(self) -> int:
        page, _ = self._idle.popitem(last=False)
        name, _ = self._names.pop(page)
        del self._found[name]
        return page

    def match(self, tokens: Sequence[int], root: int | None = None, owner: PageOwner = None) -> tuple[list[int], int]:
        """The pages that have the first of these tokens, without the last token in any case, and the number of the last page.
        `root`: None is that of the present weights. The caller must release them."""
        pages, number = list[int](), self.root if root is None else root
        for begin in range(0, (len(tokens) - 1) // self.size * self.size, self.size):
            part = tuple(tokens[begin : begin + self.size])
            page = self._found.get((number, part, None)) or self._found.get((number, part, owner))
            if page is None:
                break
            if self._num_users[page] == 0:
                del self._idle[page]
            self._num_users[page] += 1
            number = self._names[page][1]
            pages.append(page)
        return pages, number

    def take_last(self, before: int, tokens: tuple[int, ...], owner: PageOwner) -> int | None:
        """The page with these tokens, fewer than it has room for, if it is there. It loses its name: its next user fills it."""
        page = self._found.get((before, tokens, owner)) if tokens else None
        if page is None:
            return None
        del self._found[before, tokens, owner], self._names[page], self._idle[page]
        self._num_users[page] = 1
        return page

    def name(self, page: int, before: int, tokens: tuple[int, ...], owner: PageOwner = None) -> int:
        """From now on other requests find it. Returns its number; if another page has the same name, that one's."""
        found = self._found.setdefault((before, tokens, owner), page)
        if found == page and page not in self._names:
            self._names[page] = ((before, tokens, owner), next(self._numbers))
        return self._names[found][1]

    def release(self, pages: Sequence[int]) -> None:
        """The last ones first, so that a prefix stays longer than what follows it."""
        for page in reversed(pages):
            self._num_users[page] -= 1
            if self._num_users[page] == 0:
                if page in self._names:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def renew(self) -> None:
        """The weights have changed: pages of the old ones are found only from their own root."""
        self.root = next(self._numbers)
        self._adapter_roots.clear()

    def forget(self) -> None:
        """No page has a name any more."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._found.clear()
        self._names.clear()


class PagePools:
    """Keys and values of all layers, and the table of every slot's pages. The slot after the last belongs to no request:
    all of its entries are page 0."""

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
        self.operations = operations_for(device)

    def at(self, layer: int, slots_N: Tensor, positions_N: Tensor) -> Pages:
        return Pages(self.keys[layer], self.values[layer], self.table, slots_N, positions_N)


class SlotAdapters:
    """The adapter of every slot, on the device, where a model has several (`model.adapter_rows`)."""

    def __init__(self, model: PreTrainedModel, num_slots: int, device: torch.device) -> None:
        self._rows = adapter_rows_of(model)
        self._numbers = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._changes: dict[int, int] = {}

    def set(self, slot: int, adapter: int | None) -> None:
        """From the next `update` on."""
        if self._rows is not None:
            self._changes[slot] = self._rows.number_of(adapter)

    def update(self) -> None:
        if self._changes:
            slots, numbers = on_device(np.array(list(self._changes.items()), np.int64).T.copy(), self._numbers.device)
            self._numbers.index_put_((slots,), numbers)
            self._changes.clear()

    def using(self, slots_N: Tensor) -> AbstractContextManager[None]:
        """For a pass with rows of these slots."""
        return nullcontext() if self._rows is None else self._rows.using(self._numbers[slots_N.long()])


class ShapeProbe:
    """Records the shapes of each layer's keys and values, and computes nothing."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        if key.shape != value.shape:
            raise ModelError('keys and values have different shapes here: set engine.cache = "slots"')
        self.shapes[layer] = (key.shape[1], key.shape[3])
        return query.transpose(1, 2)

    def check(self, model: PreTrainedModel) -> None:
        """Every layer must have used our attention: else the model has a state that is not in our cache."""
        expected = model.config.get_text_config().num_hidden_layers
        if len(self.shapes) != expected:
            raise ModelError(
                f"{type(model).__name__} has {expected} layers and {len(self.shapes)} use transformers' attention "
                "interface: state-space, linear-attention and cross-attention layers are not supported"
            )


class _PagedPass:
    def __init__(self, pools: PagePools, slots_N: Tensor, positions_N: Tensor) -> None:
        self.pools = pools
        self.slots_N = slots_N
        self.positions_N = positions_N
        self.normed: Normed | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """See `millstream.model.attention.AttentionContext`."""
        pages = self.pools.at(layer, self.slots_N, self.positions_N)
        self.pools.operations.write(key[0].transpose(0, 1), value[0].transpose(0, 1), pages)
        return self._attend(query[0].transpose(0, 1), pages, rule)[None]

    def attend_fused(
        self, layer: int, qkv_NE: Tensor, cos_ND: Tensor, sin_ND: Tensor, heads: Heads, rule: Rule
    ) -> Tensor:
        """See `millstream.engine.native.fused.FusedContext`."""
        pages = self.pools.at(layer, self.slots_N, self.positions_N)
        query_NHD = self.pools.operations.rotate_and_write(qkv_NE, cos_ND, sin_ND, heads, pages)
        return self._attend(query_NHD, pages, rule).flatten(1)

    def _attend(self, query_NHD: Tensor, pages: Pages, rule: Rule) -> Tensor:
        raise NotImplementedError


class DecodePass(_PagedPass):
    """One new token for each slot, which attends to all tokens before it."""

    def attend_fused(
        self, layer: int, qkv_NE: Tensor, cos_ND: Tensor, sin_ND: Tensor, heads: Heads, rule: Rule
    ) -> Tensor:
        pages = self.pools.at(layer, self.slots_N, self.positions_N)
        return self.pools.operations.attend_new(qkv_NE, cos_ND, sin_ND, heads, pages, rule).flatten(1)

    def _attend(self, query_NHD: Tensor, pages: Pages, rule: Rule) -> Tensor:
        out: Tensor = self.pools.operations.decode_attention(query_NHD, pages, rule)
        return out


class WidePass(_PagedPass):
    """Several new tokens for a slot: the newest and a draft after it, or a prompt. Each is a row as in a `DecodePass`, which
    attends to the tokens before it in the same pass: all rows must be written before any attends."""

    def _attend(self, query_NHD: Tensor, pages: Pages, rule: Rule) -> Tensor:
        out: Tensor = self.pools.operations.decode_attention(query_NHD, pages, rule)
        return out


class PrefillPass(_PagedPass):
    """Consecutive tokens of each slot (slot, begin, end), which attend to all tokens before them. Pages that are shared with
    another slot of this pass are complete in time: all slots write before any attends."""

    def __init__(self, pools: PagePools, chunks: Sequence[tuple[int, int, int]]) -> None:
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

    def _attend(self, query_NHD: Tensor, pages: Pages, rule: Rule) -> Tensor:
        key_TKD = pages.keys[self._page_T, :, self._offset_T]
        value_TKD = pages.values[self._page_T, :, self._offset_T]
        if can_be_ragged(query_NHD, rule):
            longest_query, longest_key = (max(some) for some in zip(*self._lengths, strict=True))
            ends = (self._query_ends, self._key_ends, longest_query, longest_key)
            return ragged(query_NHD, key_TKD, value_TKD, *ends, rule)
        query_ends, key_ends = self._ends[1:-1].T.tolist()
        cut = (query_NHD.tensor_split(query_ends), key_TKD.tensor_split(key_ends), value_TKD.tensor_split(key_ends))
        return torch.cat([_attend_once(*part, rule) for part in zip(*cut, strict=True)])


def _attend_once(query_NHD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rule: Rule) -> Tensor:
    num, num_keys = len(query_NHD), len(key_TKD)
    at = torch.arange(num_keys, device=query_NHD.device)
    mask = within_window(at[num_keys - num :, None], at[None], rule.window)
    query, key, value = (one.transpose(0, 1)[None] for one in (query_NHD, key_TKD, value_TKD))
    return scores(query, key, value, mask, rule)[0].transpose(0, 1)
