"""What the cache has of a conversation when its next turn comes.

A full page is found by every request with the same past under the same weights. The last page of a turn, which is not full, and
pages that were computed under several versions are found only by later turns of the same conversation. So a turn computes no
token that an earlier turn has computed, unless the room was needed for others.

A conversation's pages have the *root* of the weights under which it began. New weights have a root of their own: a conversation
that begins under them never sees older keys and values.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from millstream.engine.native.pages import PageAllocator
from millstream.engine.native.sequence import TokenSequence

MAX_CONVERSATIONS = 1 << 14  # that are remembered


class _Remembered(NamedTuple):
    root: int
    num_last: int = 0  # tokens in its last page, if that is not full


class ConversationPages:
    """Finds and names the pages of sequences."""

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._remembered: OrderedDict[tuple[int, int, int, int], _Remembered] = OrderedDict()

    def begin(self, sequence: TokenSequence) -> None:
        """Give the sequence the pages that have its first tokens, without the last token in any case."""
        tokens, key, size = sequence.all_tokens, sequence.request.key, self._allocator.size
        present = self._allocator.root_of(sequence.request.adapter)
        root, num_last = self._remembered.get(key.conversation, _Remembered(present))
        if key.is_first_turn:
            root = present
        sequence.pages, sequence.last_page_number = self._allocator.match(tokens, root, key.conversation)
        sequence.num_named = len(sequence.pages)
        sequence.num_computed = sequence.num_named * size
        sequence.is_mixed = root != present
        end = sequence.num_computed + num_last
        if end < len(tokens):
            part = tokens[sequence.num_computed : end]
            last = self._allocator.take_last(sequence.last_page_number, part, key.conversation)
            if last is not None:
                sequence.pages.append(last)
                sequence.num_computed = end
        self._remember(sequence, _Remembered(root))

    def name(self, sequence: TokenSequence, end: int) -> None:
        """Full pages up to this token are found from now on."""
        tokens, size = sequence.all_tokens, self._allocator.size
        owner = sequence.request.key.conversation if sequence.is_mixed else None
        for index in range(sequence.num_named, min(end, len(tokens)) // size):
            part = tokens[index * size : (index + 1) * size]
            number = self._allocator.name(sequence.pages[index], sequence.last_page_number, part, owner)
            sequence.last_page_number = number
            sequence.num_named = index + 1

    def end(self, sequence: TokenSequence) -> None:
        """Name and release all pages of the sequence."""
        self.name(sequence, sequence.num_computed)
        conversation, begin = sequence.request.key.conversation, sequence.num_named * self._allocator.size
        part = sequence.all_tokens[begin : sequence.num_computed]
        if part:
            last = sequence.pages[sequence.num_named]
            self._allocator.name(last, sequence.last_page_number, part, conversation)
        if conversation in self._remembered:
            self._remember(sequence, self._remembered[conversation]._replace(num_last=len(part)))
        self._allocator.release(sequence.pages)
        sequence.pages = []

    def _remember(self, sequence: TokenSequence, what: _Remembered) -> None:
        conversation = sequence.request.key.conversation
        self._remembered[conversation] = what
        self._remembered.move_to_end(conversation)
        if len(self._remembered) > MAX_CONVERSATIONS:
            self._remembered.popitem(last=False)

    def update(self, *, is_kept: bool) -> None:
        """The weights have changed. `is_kept`: conversations that have begun keep their pages."""
        if is_kept:
            self._allocator.renew()
        else:
            self._allocator.forget()
            self._remembered.clear()
