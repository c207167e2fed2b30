"""One request on its way through our engine."""

from __future__ import annotations

from millstream.engine.native.drafts import DraftHistory
from millstream.engine.request import PartialCompletion
from millstream.types import Completion, Request, RequestKey, Sampled

Completions = list[tuple[RequestKey, Completion]]


class TokenSequence(PartialCompletion):
    """A request in the engine: its tokens, and how far it is. `slot`, `pages`, `num_named` and `last_page_number` belong to its
    runner, `history` to the speculator."""

    __slots__ = (
        "draft",
        "history",
        "is_aborted",
        "is_mixed",
        "is_prefilling",
        "is_watched",
        "last_page_number",
        "num_computed",
        "num_launched",
        "num_named",
        "num_reported",
        "pages",
        "slot",
    )

    def __init__(self, request: Request, *, is_watched: bool = False) -> None:
        super().__init__(request)
        self.is_watched = is_watched  # whether its tokens are reported before it ends
        self.num_reported = 0
        self.num_launched = (
            0  # tokens that were sampled or are being sampled: at most one more than those that are known
        )
        self.num_computed = (
            0  # tokens whose keys and values are in the cache, or will be when what was launched is done
        )
        self.is_prefilling = True  # whether tokens before the newest are still to be computed
        self.is_aborted = False  # what is sampled for it from now on is dropped
        self.is_mixed = False  # whether its keys and values are of several versions
        self.draft: tuple[int, ...] = ()  # guesses of the tokens after the newest, which the next step checks
        self.history: DraftHistory | None = None
        self.slot = -1
        self.pages: list[int] = []
        self.num_named = 0  # pages that other requests can find
        self.last_page_number = 0  # the number of the last of them

    @property
    def length(self) -> int:
        """Tokens that are known: the prompt's and the sampled ones."""
        return len(self.request.tokens) + len(self.tokens)

    @property
    def all_tokens(self) -> tuple[int, ...]:
        return (*self.request.tokens, *self.tokens)

    @property
    def next_number(self) -> int:
        """Of the token that the next step samples, among all that are sampled for the request."""
        return self.request.num_sampled + self.num_launched

    @property
    def can_decode(self) -> bool:
        return not self.is_prefilling and self.finish is None and self.num_launched < self.request.sampling.max_tokens

    def restart(self) -> None:
        """Its keys and values are gone: they are computed again before the next token is sampled."""
        self.num_computed = 0
        self.num_launched = len(self.tokens)
        self.is_prefilling = True
        self.is_mixed = False

    def take_unreported(self) -> Sampled:
        """The tokens that were sampled since the last call."""
        begin = self.num_reported
        self.num_reported = len(self.tokens)
        return self.since(begin)
