"""One request on its way through the router, and what is known of others like it.

A flight has at most one replica at a time. What it has heard of its tokens is its own: if the replica goes, the next one goes
on behind them, and the answer is all of it in a row, no token twice and none left out.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import NamedTuple

from millstream.engine import Engine
from millstream.types import Completion, Finish, Request, RequestKey, Sampled

RECENT = 256
"""Answers from whose lengths the next ones are guessed."""
MAX_KNOWN = 1 << 14
"""Conversations and prompts whose place is remembered."""


class Known(NamedTuple):
    """So many tokens at the beginning of a request, and who has computed them: versions by the names of replicas."""

    num_tokens: int
    digest: int
    on: dict[str, int]


class RoutedRequest:
    """`asked` is what its replica is asked for: the request, or what is left of it."""

    def __init__(self, request: Request, floor: int) -> None:
        self.request = self.asked = request
        self.floor = floor
        self.known: list[Known] = []
        self.work = 0.0
        self.prompt_work = 0.0
        """Tokens that it counts for on the replica that has it, and how many of them for a prompt that is not computed yet."""
        self.engine: Engine | None = None
        """That has it. None: it waits for one."""
        self.num_failures = 0
        """How often that engine had failed when it was sent there."""
        self.is_aborted = False
        self.is_moving = False
        """Its replica was told to abort it, so that it goes on elsewhere."""
        self.has_moved = False
        self.finish: Finish | None = None
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._num_kept = 0
        """Tokens of replicas before the one that has it now."""

    @property
    def num_sampled(self) -> int:
        return len(self._tokens)

    def hear(self, sampled: Sampled | Completion) -> None:
        self._tokens += sampled.tokens
        self._logprobs += sampled.logprobs
        self._versions += sampled.versions

    def answer(self, completion: Completion) -> None:
        """Its replica is done with it. What was heard before is part of the completion."""
        for heard in (self._tokens, self._logprobs, self._versions):
            del heard[self._num_kept :]
        self.hear(completion)
        if completion.finish is not Finish.ABORT or self.is_aborted or not self.is_moving:
            self.finish = completion.finish
        else:
            self.lose()

    def lose(self) -> None:
        """Its replica has it no more: it goes on behind what was heard, or that was all."""
        sampling, num = self.request.sampling, len(self._tokens)
        if num and self._tokens[-1] in sampling.stop:
            self.finish = Finish.STOP
        elif num >= sampling.max_tokens:
            self.finish = Finish.LENGTH
        elif self.is_aborted:
            self.finish = Finish.ABORT
        elif num > self._num_kept:
            self.asked = self.request.behind(self._tokens)
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
    """How much a request still has to sample, from the answers that ended last. Those that still run are not among them, so
    that the guess is short while the first long ones are on their way."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, num_tokens: int) -> None:
        self._recent.append(num_tokens)
        insort(self._sorted, num_tokens)
        if len(self._recent) > RECENT:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]

    def still_to_come(self, num_sampled: int, at_most: int) -> float:
        """The mean of what longer answers had left at this point; of one that is longer than all of them, as much again."""
        if not self._sorted:
            return at_most
        longer = self._sorted[bisect_right(self._sorted, num_sampled) :]
        rest = sum(longer) / len(longer) - num_sampled if longer else max(1, num_sampled)
        return min(at_most, rest)


class Prefixes:
    """Which replica has computed the beginning of a request: its conversation's last turn, or its group's prompt.

    Told by tokens, not by names: a history that was rewritten is not the one that was computed. It counts as long as the
    replica serves the version that computed it: with new weights, keys and values are others. What is forgotten first depends
    on the order in which requests were sent, never on when they ended."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, ...], Known] = OrderedDict()

    def of(self, request: Request) -> list[Known]:
        key = request.key
        found = (self._known.get(_conversation(key)), self._known.get((key.group_id,)))
        return [known for known in found if known is not None and _begins_with(request.tokens, known)]

    def sent(self, request: Request, replica: str, version: int) -> None:
        """The replica is about to compute it."""
        group, whole = (request.key.group_id,), Known(len(request.tokens), hash(request.tokens), {replica: version})
        known = self._known.get(group)
        if known is not None and _begins_with(request.tokens, known):
            known.on[replica] = version
        else:
            known = whole
        for key, one in ((group, known), (_conversation(request.key), whole)):
            self._known[key] = one
            self._known.move_to_end(key)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def ended(self, request: Request, completion: Completion, replica: str, version: int) -> None:
        """The replica has it, and its answer."""
        tokens, conversation = request.tokens + completion.tokens, _conversation(request.key)
        if conversation in self._known:
            self._known[conversation] = Known(len(tokens), hash(tokens), {replica: version})


def num_known(known: list[Known], replica: str, version: int) -> int:
    """Tokens that it need not compute."""
    return max((one.num_tokens for one in known if _has(one.on, replica, version)), default=0)


def _has(on: Mapping[str, int], replica: str, version: int) -> bool:
    return on.get(replica) == version


def _begins_with(tokens: tuple[int, ...], known: Known) -> bool:
    return len(tokens) >= known.num_tokens and hash(tokens[: known.num_tokens]) == known.digest


def _conversation(key: RequestKey) -> tuple[int, ...]:
    return key.group_id, key.member, key.attempt
