"""Who has which page of the cache. A page that several requests need is shared, and one that nobody needs any more is kept for
those who may come, until somebody else needs the room.

Pages are found by what stands in them *and before them*: a page's name is the number of the page before it, and its tokens.
Numbers are never used twice, so that nothing is found behind a page that is gone. Only full pages have names.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

START = 0
"""The number of the nothing that a sequence begins with."""
Name = tuple[int, tuple[int, ...]]


class Blocks:
    """`size`: tokens in a block. Block 0 is nobody's: what has no place is written there."""

    def __init__(self, num_blocks: int, size: int) -> None:
        self.num_blocks = num_blocks - 1
        self.size = size
        self._free = list(range(num_blocks - 1, 0, -1))
        self._users = [0] * num_blocks
        self._found: dict[Name, int] = {}
        self._names: dict[int, tuple[Name, int]] = {}
        """Block -> its name and its number."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Named blocks that nobody uses, the longest unused first."""
        self._numbers = itertools.count(START + 1)

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._idle)

    def take(self, count: int) -> list[int] | None:
        """So many, or none."""
        if count > self.num_free:
            return None
        taken = [self._free.pop() if self._free else self._oldest_idle() for _ in range(count)]
        for block in taken:
            self._users[block] = 1
        return taken

    def _oldest_idle(self) -> int:
        block, _ = self._idle.popitem(last=False)
        name, _ = self._names.pop(block)
        del self._found[name]
        return block

    def match(self, sequence: Sequence[int]) -> tuple[list[int], int]:
        """The blocks with which this begins, all but its last token at most, and the number of the last of them. They are
        the caller's to give back."""
        blocks, number = list[int](), START
        for begin in range(0, (len(sequence) - 1) // self.size * self.size, self.size):
            block = self._found.get((number, tuple(sequence[begin : begin + self.size])))
            if block is None:
                break
            if self._users[block] == 0:
                del self._idle[block]
            self._users[block] += 1
            number = self._names[block][1]
            blocks.append(block)
        return blocks, number

    def name(self, block: int, before: int, tokens: tuple[int, ...]) -> int:
        """From now on others find it. Returns its number; if another block has the same name, that one's."""
        found = self._found.setdefault((before, tokens), block)
        if found == block and block not in self._names:
            self._names[block] = ((before, tokens), next(self._numbers))
        return self._names[found][1]

    def give_back(self, blocks: Sequence[int]) -> None:
        """The last ones first, so that a beginning outlives what follows it."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                if block in self._names:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def forget(self) -> None:
        """No block has a name any more."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._found.clear()
        self._names.clear()
