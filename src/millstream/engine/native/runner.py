"""The protocol between the two halves of our engine: the batcher decides what is computed, a runner computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from millstream.engine.native.sequence import TokenSequence
from millstream.types import ComputePath

Drawn = Callable[[], tuple[list[int], list[float]]]  # waits for what was launched: tokens and log-probabilities


class Chunk(NamedTuple):
    """Tokens `begin` to `end` of a request, to be computed in one pass. The last chunk samples the token that follows."""

    sequence: TokenSequence
    begin: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == self.sequence.length


class Runner(Protocol):
    depth: int  # steps that may be launched before the tokens of the first of them are known
    # Steps between two in which requests may join while others decode. Above 1 where a pass over prompts costs as much as a
    # step, however short they are: better one for several of them.
    join_every: int
    can_chunk: bool  # whether a prompt can be computed in several passes
    can_draft: bool  # whether a step can check drafts
    max_length: int | None  # tokens of the longest request that can run; None: there is no limit

    @property
    def path(self) -> ComputePath:
        """What computes now. It may become a slower one while it runs."""
        ...

    @property
    def cache_used(self) -> float:
        """Share of the cache that requests in flight occupy."""
        ...

    def begin(self, sequence: TokenSequence) -> bool:
        """Allocate room for all of its tokens, and set `num_computed` to what the cache has of them. False: no room now."""
        ...

    def will_compute(self, sequence: TokenSequence, end: int) -> None:
        """Its tokens up to `end` are computed with the next launch."""
        ...

    def grow(self, sequences: Sequence[TokenSequence]) -> bool:
        """Room for one more token of each and for its draft, or, False, for none."""
        ...

    def leave(self, running: list[TokenSequence], leaving: set[int]) -> list[TokenSequence]:
        """Free the room of those at these indices. Returns the others, in the order of the next launch."""
        ...

    def forget(self, *, is_kept: bool) -> None:
        """The weights have changed: no request that starts from now on may use what was computed before. `is_kept`: only later
        turns of a conversation may use what was computed for it."""
        ...

    def working(self) -> AbstractContextManager[Any]:
        """The context in which all of a step runs."""
        ...

    def swap(self, own: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        """Copy new weights into the model's own, after what was launched. Need not wait for it."""
        ...

    @property
    def swap_s(self) -> float | None:
        """How long the last swap delayed decoding on the device; 0 while that is not known. None: as long as the call."""
        ...

    def launch(self, decoding: Sequence[TokenSequence], chunks: Sequence[Chunk]) -> Drawn:
        """For each sequence that decodes, one token after its newest and one after each of its draft; then one for each chunk
        that is a request's last."""
        ...
