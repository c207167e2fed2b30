"""The seam within our engine: the batcher decides what is computed, a runner computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from millstream.engine.native.sequence import TokenSequence

Drawn = Callable[[], tuple[list[int], list[float]]]
"""Tokens and log-probabilities of what was launched; waits for them."""


class Chunk(NamedTuple):
    """Tokens `begin` to `end` of a request, to be computed in one pass. The last chunk samples the token that follows."""

    flight: TokenSequence
    begin: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == self.flight.length


class Runner(Protocol):
    depth: int
    """Steps that may be launched before the tokens of the first of them are known."""
    join_every: int
    """Steps between two in which requests may join while others decode. Above 1 where a pass over prompts costs as much as a
    step, however short they are: better one for several of them."""
    can_chunk: bool
    """Whether a prompt can be computed in several passes."""
    max_length: int | None
    """Tokens of the longest request that can run. None: there is no limit."""

    @property
    def cache_used(self) -> float:
        """Share of the cache that requests in flight have taken."""
        ...

    def begin(self, flight: TokenSequence) -> bool:
        """Give it room for all that is known of it, and set `num_computed` to what the cache has of it. False: not now."""
        ...

    def will_compute(self, flight: TokenSequence, end: int) -> None:
        """Its tokens up to here are computed with the next launch."""
        ...

    def grow(self, flights: Sequence[TokenSequence]) -> bool:
        """Room for one more token of each, or, False, for none."""
        ...

    def leave(self, running: list[TokenSequence], leaving: set[int]) -> list[TokenSequence]:
        """Take the room of those at these places. Returns the others, in the order that the next launch has them in."""
        ...

    def forget(self) -> None:
        """The weights have changed: no request that begins from now on may see what was computed before."""
        ...

    def working(self) -> AbstractContextManager[Any]:
        """All of a step happens within this."""
        ...

    def swap(self, own: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        """Copy new weights into the model's own, behind what was launched. Need not wait for it."""
        ...

    @property
    def swap_s(self) -> float | None:
        """How long the last swap kept the device from decoding; 0 while that is not known. None: as long as the call."""
        ...

    def launch(self, decoding: Sequence[TokenSequence], chunks: Sequence[Chunk]) -> Drawn:
        """One token for each that decodes, then for each chunk that is a request's last."""
        ...
