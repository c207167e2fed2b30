"""One request on its way through the router, and what is known of others like it.

A routed request has at most one replica at a time. The tokens that have been reported for it are its own: if its replica is
lost, the next one continues after them, and the answer is all of it in a row, no token twice and none left out.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from millstream.engine import Engine
from millstream.errors import PinLost
from millstream.types import Completion, Finish, Request, Sampled

NUM_RECENT = 256  # answers from whose lengths the next ones are estimated
MAX_PREFIXES = 1 << 14  # conversations and prompts whose replica is remembered


class CachedPrefix(NamedTuple):
    """The first tokens of a request, and which replicas have computed them: versions by the names of replicas."""

    num_tokens: int
    digest: int
    versions: dict[str, int]
    is_kept: bool = False  # whether it is there whatever the replica has loaded since

    def is_cached(self, replica: str, version: int) -> bool:
        return replica in self.versions and (self.is_kept or self.versions[replica] == version)


class Pin:
    """A version, and the names of the engines that keep it: see `serving.pins`."""

    def __init__(self, version: int, engines: Sequence[str]) -> None:
        self.version = version
        self.engines = set(engines)
        self.why_lost = ""

    def raise_if_lost(self) -> None:
        if not self.engines:
            raise PinLost(f"no engine with version {self.version} is left: {self.why_lost}")


class RoutedRequest:
    """`remaining` is what its replica is asked for: the request, or what is left of it."""

    def __init__(self, request: Request, floor: int, pin: Pin | None = None) -> None:
        self.request = request
        self.remaining = request
        self.floor = floor
        self.pin = pin  # only its engines may have it; None: any
        self.prefixes: list[CachedPrefix] = []
        self.length = 1.0  # expected, relative to others
        self.work = 0.0  # tokens that it counts for on its replica
        self.prompt_work = 0.0  # how many of them for a prompt that is not computed yet
        self.engine: Engine | None = None  # that has it; None: it waits for one
        self.failure_mark = 0  # of that engine's failures, when it was sent there
        self.is_aborted = False
        self.is_moving = False  # its replica aborts it so that it continues elsewhere
        self.has_moved = False
        self.finish: Finish | None = None
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._num_kept = 0  # tokens of replicas before the one that has it now

    @property
    def num_sampled(self) -> int:
        return len(self._tokens)

    def add(self, sampled: Sampled | Completion) -> None:
        self._tokens += sampled.tokens
        self._logprobs += sampled.logprobs
        self._versions += sampled.versions

    def complete(self, completion: Completion) -> None:
        """Its replica has ended it. What was reported before is part of the completion."""
        for values in (self._tokens, self._logprobs, self._versions):
            del values[self._num_kept :]
        self.add(completion)
        if completion.finish is not Finish.ABORT or self.is_aborted or not self.is_moving:
            self.finish = completion.finish
        else:
            self.lose_replica()

    def lose_replica(self) -> None:
        """It continues after the tokens that were reported, or they were all."""
        sampling, num = self.request.sampling, len(self._tokens)
        if num and self._tokens[-1] in sampling.stop:
            self.finish = Finish.STOP
        elif num >= sampling.max_tokens:
            self.finish = Finish.LENGTH
        elif self.is_aborted:
            self.finish = Finish.ABORT
        elif num > self._num_kept:
            self.remaining = self.request.behind(self._tokens)
        self._num_kept = num
        self.is_moving = False
        self.has_moved = True

    def completion(self) -> Completion:
        return Completion(
            tokens=tuple(self._tokens),
            logprobs=tuple(self._logprobs),
            versions=tuple(self._versions),
            finish=self.finish or Finish.ABORT,
        )


class Lengths:
    """Estimates how much a request still has to sample, from the answers that ended last. Running ones are not among them, so
    that the estimate is short until the first long ones have ended."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._sum = 0

    def add(self, num_tokens: int) -> None:
        self._recent.append(num_tokens)
        insort(self._sorted, num_tokens)
        self._sum += num_tokens
        if len(self._recent) > NUM_RECENT:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
            self._sum -= oldest

    def tokens_left(self, num_sampled: float, at_most: float) -> float:
        """The mean of what longer answers had left at this point; of one that is longer than all of them, as much again."""
        if not self._sorted:
            return at_most
        if num_sampled < self._sorted[0]:  # all are longer, as for every request without tokens
            return min(at_most, self._sum / len(self._sorted) - num_sampled)
        longer = self._sorted[bisect_right(self._sorted, num_sampled) :]
        rest = sum(longer) / len(longer) - num_sampled if longer else max(1, num_sampled)
        return min(at_most, rest)


class PrefixMap:
    """Which replica has computed the first tokens of a request: its conversation's last turn, or its group's prompt.

    Compared by tokens, not by names: a history that was rewritten is not the one that was computed. An entry counts as long as
    the replica serves the version that computed it: with new weights, keys and values are others; a conversation's last turn
    also later, if engines keep it (`are_kept`). Which entry is dropped first depends on the order in which requests were sent,
    never on when they ended."""

    def __init__(self) -> None:
        self.are_kept = False
        self._prefixes: OrderedDict[tuple[int, ...], CachedPrefix] = OrderedDict()

    def of(self, request: Request) -> list[CachedPrefix]:
        key = request.key
        found = (self._prefixes.get(key.conversation), self._prefixes.get((key.group_id,)))
        return [prefix for prefix in found if prefix is not None and _starts_with(request.tokens, prefix)]

    def on_sent(self, request: Request, replica: str, version: int) -> None:
        """The replica is about to compute it."""
        group = (request.key.group_id,)
        whole = CachedPrefix(len(request.tokens), hash(request.tokens), {replica: version}, self.are_kept)
        shared = self._prefixes.get(group)
        if shared is not None and _starts_with(request.tokens, shared):
            shared.versions[replica] = version
        else:
            shared = whole._replace(is_kept=False)
        for key, prefix in ((group, shared), (request.key.conversation, whole)):
            self._prefixes[key] = prefix
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.popitem(last=False)

    def on_ended(self, request: Request, completion: Completion, replica: str, version: int) -> None:
        """The replica has computed it, and its answer."""
        tokens, conversation = request.tokens + completion.tokens, request.key.conversation
        if conversation in self._prefixes:
            self._prefixes[conversation] = CachedPrefix(len(tokens), hash(tokens), {replica: version}, self.are_kept)


def num_cached(prefixes: list[CachedPrefix], replica: str, version: int) -> int:
    """Tokens that the replica need not compute."""
    if not prefixes:
        return 0
    return max((one.num_tokens for one in prefixes if one.is_cached(replica, version)), default=0)


def _starts_with(tokens: tuple[int, ...], prefix: CachedPrefix) -> bool:
    return len(tokens) >= prefix.num_tokens and hash(tokens[: prefix.num_tokens]) == prefix.digest
