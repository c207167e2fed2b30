"""One request on its way through our engine."""

from __future__ import annotations

from millstream.engine.request import PartialCompletion
from millstream.types import Completion, Request, RequestKey, Sampled

Finished = list[tuple[RequestKey, Completion]]


class TokenSequence(PartialCompletion):
    """A request in the engine: its tokens, and how far it is. `slot` and `blocks` belong to its runner."""

    __slots__ = (
        "blocks",
        "chain",
        "is_gone",
        "is_mixed",
        "is_prefilling",
        "is_watched",
        "num_computed",
        "num_indexed",
        "num_launched",
        "num_told",
        "slot",
    )

    def __init__(self, request: Request, *, is_watched: bool = False) -> None:
        super().__init__(request)
        self.is_watched = is_watched
        self.num_told = 0
        self.num_launched = 0
        """Tokens that were sampled or are being sampled: at most one more than those that are known."""
        self.num_computed = 0
        """Tokens whose keys and values are in the cache, or will be when what was launched is done."""
        self.is_prefilling = True
        """Whether tokens before the newest are still to be computed."""
        self.is_gone = False
        """Whether it was aborted: what is sampled for it from now on is nobody's."""
        self.is_mixed = False
        """Whether its keys and values are of several versions."""
        self.slot = -1
        self.blocks: list[int] = []
        self.num_indexed = 0
        self.chain = 0
        """Of its blocks, those that others can find; and the number of the last of them."""

    @property
    def length(self) -> int:
        """Tokens that are known: the prompt's and the sampled ones."""
        return len(self.request.tokens) + len(self.tokens)

    @property
    def sequence(self) -> tuple[int, ...]:
        return (*self.request.tokens, *self.tokens)

    @property
    def can_decode(self) -> bool:
        return not self.is_prefilling and self.finish is None and self.num_launched < self.request.sampling.max_tokens

    def begin_again(self) -> None:
        """Its keys and values are gone: they are computed anew before the next token is sampled."""
        self.num_computed = 0
        self.num_launched = len(self.tokens)
        self.is_prefilling = True
        self.is_mixed = False

    def news(self) -> Sampled:
        """What was sampled since this was asked last."""
        begin = self.num_told
        self.num_told = len(self.tokens)
        return self.since(begin)
