"""One front for all engine replicas: which request is next, on which replica, and what happens to it when that replica is lost.

A group's requests go only to engines at its start version or later, so that no token is older than the lag bound allows.
While there is room, a request goes to a replica at once; when there is none, it waits in the router's queue, and not in the
queue of an engine that may turn out to be the slow one. Next is the group with the earliest deadline, of these the one with the
fewest members left (`rank`), of these the oldest. Requests without a rank (an evaluation's) have every fourth turn. An
evaluation's requests go only to engines that keep their weights for it (`serving.pins`). With expected lengths (`length_of`)
all requests pass through the queue: those of one turn of the event loop are sent in the order of their ranks.

A request goes to the replica with room that would finish first with all that it has and with this request's prompt
(`Replica.price`). A prompt that a replica has computed costs nothing there. So the turns of a conversation stay where their
history is, and the members of a group where their prompt is, until that replica has so much more to do than another that
computing the prompt again is the smaller loss. Ties: the fewest requests, then the order of the replicas.

Every request is answered once. If its replica breaks or is drained, it continues on another one after the tokens that were
reported, still at its floor or later; the answer is the tokens in a row. A replica that fails is left alone for a back-off; one
that fails again and again, or is gone, is not used any more. Without any replica, requests wait `patience_s` for one to join,
and fail. An engine that cannot work as it is set up (`EngineMisconfigured`) is lost like any other. Only where no other engine
is there, and none has ever answered a request, its error is raised at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from millstream.clock import Clock
from millstream.engine import Engine
from millstream.engine.failures import NOT_FORGIVEN
from millstream.errors import EngineError, EngineGone, EngineMisconfigured, InvariantError, PinLost
from millstream.events import EventSink, ReplicaJoined, ReplicaLeft
from millstream.serving.order import ReplicaOrder
from millstream.serving.pins import Pins
from millstream.serving.queue import RequestQueue, RequestRank, WaitingRequest
from millstream.serving.replica import MAX_FAILURES, Replica
from millstream.serving.request import Lengths, Pin, PrefixMap, RoutedRequest
from millstream.types import Completion, Finish, Request, RequestKey

DRAINED = "it was drained"  # why an engine left that was to leave
__all__ = ["DRAINED", "RankOf", "ReplicaChange", "RequestRank", "Router"]
logger = logging.getLogger(__name__)
RankOf = Callable[[int], RequestRank | None]  # by group; None for one that is not in training, such as an evaluation's


class ReplicaChange(NamedTuple):
    """What has happened to an engine: it serves now, or it does not serve any more, or it is lost and needs a replacement."""

    engine: Engine
    is_serving: bool = False
    is_lost: bool = False
    why: str = ""


class Router:
    """`is_queueing` False: everything goes to the engines at once, in the order of the calls, and the choice depends on these
    calls and on what has ended, not on measurements. That is what synchronous training needs to be repeatable.

    `rank_of` gives the rank of a group, `length_of` how long its requests are expected to be, relative to others; `listeners`
    are called with every `ReplicaChange`. `patience_s` may be set at any time, and `prefixes.are_kept`: whether engines that
    load new weights keep the keys and values of conversations between two turns. `newest_seen` may be raised to a version that
    an engine has served, as another process has seen: requests for it wait until it is seen here."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        is_queueing: bool = True,
        patience_s: float = 0.0,
        clock: Clock | None = None,
        sink: EventSink | None = None,
    ) -> None:
        self.patience_s = patience_s
        self.prefixes = PrefixMap()
        self.rank_of: RankOf = lambda group_id: None
        self.length_of: Callable[[int], float] | None = None
        self.listeners: list[Callable[[ReplicaChange], None]] = []
        self._is_queueing = is_queueing
        self._clock = clock
        self._sink = sink
        self._lengths = Lengths()
        self._requests: dict[RequestKey, RoutedRequest] = {}
        self._queue = RequestQueue()
        self.newest_seen = 0
        self._why_none = "none was given to the router"
        self._giving_up: asyncio.TimerHandle | None = None
        self._replicas: dict[str, Replica] = {}
        self._numbers = itertools.count()
        self._order = ReplicaOrder(self._replicas)
        self._is_dispatching = False  # in the next turn of the event loop
        self._is_many = False  # whether there was more than one at some time
        self._has_answered = False  # whether a replica has, at some time
        self.pins = Pins(
            self._serving,
            on_waiting=self._start_patience,
            on_released=lambda engine: self._announce(ReplicaChange(engine)),
        )
        for engine in engines:
            self._add(engine)

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Those that have or may get requests."""
        return tuple(replica.engine for replica in self._replicas.values())

    def serves(self, engine: Engine) -> bool:
        """Whether it is one of `engines`."""
        replica = self._replicas.get(engine.name)
        return replica is not None and replica.engine is engine

    def num_requests(self, engine: Engine) -> int:
        """That it has."""
        return len(self._replicas[engine.name].requests) if self.serves(engine) else 0

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def serving_versions(self) -> list[int]:
        """The versions a new group could start at: the oldest lets every replica serve it, the newest only some. Empty while
        there is no replica."""
        versions = sorted({replica.engine.version for replica in self._serving()})
        self.newest_seen = max([self.newest_seen, *versions])
        return versions

    @property
    def newest_version(self) -> int:
        """The newest that a replica has served, including replicas that have left: the others reach it later."""
        self.serving_versions()
        return self.newest_seen

    def _serving(self) -> list[Replica]:
        return [replica for replica in self._replicas.values() if not replica.is_leaving]

    # ---- one request -------------------------------------------------------------------------------------------------

    async def generate(self, request: Request, *, floor: int, pin: Pin | None = None) -> Completion:
        """On engines at version `floor` or later, or on those of a pin. Without `length_of`, if one has room, the request is
        queued there before this first suspends. Raises `PinLost` when the last engine of the pin is gone."""
        if request.key in self._requests:
            raise EngineError(f"{request.key} is in flight already")
        if (
            self._replicas and floor > self.newest_seen and floor > self.newest_version
        ):  # what a lost replica had is waited for
            raise EngineError(f"no engine is at version {floor} or later: they are at {self.serving_versions()}")
        routed = self._requests[request.key] = RoutedRequest(request, floor, pin)
        try:
            while routed.finish is None:
                await self._send(routed)
        finally:
            del self._requests[request.key]
        completion = routed.completion()
        if completion.finish is not Finish.ABORT:
            self._lengths.add(len(completion.tokens))
        if completion.versions and min(completion.versions) < floor:
            raise EngineError(
                f"{request.key} was sampled with version {min(completion.versions)} by an engine that had shown version "
                f"{floor}: an engine's version must never fall"
            )
        if pin is not None and completion.versions and {*completion.versions} != {pin.version}:
            raise InvariantError(
                f"{request.key} was sampled with versions {sorted({*completion.versions})} by engines pinned to version "
                f"{pin.version}: a pinned engine must not load other weights"
            )
        return completion

    async def _send(self, routed: RoutedRequest) -> None:
        """To one replica, until that has answered or failed."""
        if routed.pin is not None:
            routed.pin.raise_if_lost()
        routed.prefixes = self.prefixes.of(routed.remaining) if self._is_many else []
        routed.length = 1.0 if self.length_of is None else self.length_of(routed.request.key.group_id)
        replica = None if self._queue or self.length_of is not None else self._order.cheapest(routed)
        if replica is None:
            replica = await self._wait_for_replica(routed)
        else:
            replica.add(routed)
        remaining, engine = routed.remaining, replica.engine
        if self._is_many:
            self.prefixes.on_sent(remaining, replica.name, engine.version)
        # with one replica no other could continue after the tokens that are reported
        on_sampled = partial(replica.on_sampled, routed) if self._is_many else None
        try:
            if routed.is_aborted or routed.is_moving:  # between the choice of a replica and here
                routed.lose_replica()
                return
            completion = await engine.generate(remaining, on_sampled)
        except EngineError as error:
            self._on_failure(replica, routed, error)
        else:
            self._has_answered = True
            replica.failures.succeeded(routed.failure_mark)
            routed.complete(completion)
            if self._is_many:
                self.prefixes.on_ended(remaining, completion, replica.name, engine.version)
        finally:
            replica.remove(routed)
            if self._queue:
                self.dispatch()

    async def abort(self, key: RequestKey) -> bool:
        """Whether the request is with an engine: its `generate` then returns what there is, with `Finish.ABORT`."""
        routed = self._requests.get(key)
        if routed is None or routed.engine is None:
            return False
        routed.is_aborted = True
        with suppress(EngineGone):  # its `generate` raises it, too
            await routed.engine.abort(key)
        return True

    # ---- which request is next, and where it goes --------------------------------------------------------------------

    def rerank(self, group_id: int) -> None:
        """The group's rank has changed."""
        if self._queue.has_ranked(group_id):
            self._queue.rerank(group_id, self.rank_of(group_id))

    def dispatch(self) -> None:
        """Room or versions have changed: send what can be sent."""
        self._is_dispatching = False
        self.pins.grant()
        while self._queue and self._order.has_room():
            found = self._queue.pop(self._order.cheapest, self._order.has_room)
            if found is None:
                return
            waiting, replica = found
            if not waiting.replica.done():
                replica.add(waiting.routed)
                waiting.replica.set_result(replica)

    async def _wait_for_replica(self, routed: RoutedRequest) -> Replica:
        waiting = WaitingRequest(routed, asyncio.get_running_loop().create_future())
        self._queue.push(waiting, self.rank_of(routed.request.key.group_id))
        self._start_patience()
        if self.length_of is None:
            self.dispatch()
        elif not self._is_dispatching:
            self._is_dispatching = True
            asyncio.get_running_loop().call_soon(self.dispatch)
        try:
            return await waiting.replica
        except (asyncio.CancelledError, EngineError):
            if waiting.replica.done() and not waiting.replica.cancelled() and waiting.replica.exception() is None:
                waiting.replica.result().remove(routed)  # it was sent in the same moment
            else:
                self._queue.remove(waiting)
            self.dispatch()
            raise

    # ---- replicas leave and join -------------------------------------------------------------------------------------

    def join(self, engine: Engine) -> None:
        """It takes requests as soon as its version allows. Its name must not be that of another."""
        self._add(engine)
        self._report(ReplicaJoined, engine=engine.name, version=engine.version)
        self._announce(ReplicaChange(engine, is_serving=True))
        self.dispatch()

    def abandon(self, why: str) -> None:
        """No engine will come: requests that wait for one fail now, and those that come later at once."""
        self.patience_s = 0.0
        self._why_none = f"{self._why_none}; {why}"
        self._stop_patience()
        self._start_patience()

    async def drain(self, name: str, *, is_finishing: bool = False) -> None:
        """No new requests go there; those in flight continue elsewhere at once or, if `is_finishing`, end there. When this
        returns the engine is out, and its owner may close it. Waits for the engine to answer."""
        if name not in self._replicas:
            raise ValueError(f"no engine is called {name!r}: there are {', '.join(self._replicas) or 'none'}")
        replica = self._replicas[name]
        replica.leave()
        self._start_patience()
        moving = [] if is_finishing else list(replica.requests.values())
        for routed in moving:
            routed.is_moving = True
        with suppress(EngineGone):  # what it had continues elsewhere in any case
            await asyncio.gather(*(replica.engine.abort(routed.request.key) for routed in moving))
        await replica.emptied.wait()
        self._remove(replica, DRAINED, len(moving))

    def lose(self, engine: Engine, error: EngineError) -> None:
        """It is gone: its requests continue elsewhere. Raises `EngineError` if it was the last and none is waited for, and what
        `raise_if_final` does."""
        self.raise_if_final(engine, error)
        replica = self._replicas.get(engine.name)
        if replica is not None and replica.engine is engine:
            self._remove(replica, str(error), len(replica.requests))
            self.report_lost(engine)
        if not self._replicas and not self.patience_s:
            raise EngineError(str(error)) from error

    def raise_if_final(self, engine: Engine, error: EngineError) -> None:
        """Raise `EngineMisconfigured` if there is no other engine and none has ever answered: the run cannot work as it is set
        up. Otherwise the engine may work later, or the others suffice."""
        if self.is_final(engine, error):
            raise error

    def is_final(self, engine: Engine, error: EngineError) -> bool:
        is_alone = all(one is engine for one in self.engines)
        return isinstance(error, EngineMisconfigured) and is_alone and not self._has_answered

    def report_lost(self, engine: Engine, why: str = "") -> None:
        """The engine broke or was given up, perhaps before it joined: the owner of the engines is to replace it. `why`: empty
        if the engine itself says so when it is called."""
        if why and not self._replicas:
            self._why_none = f"the last one was {engine.name}: {why}"
        self._announce(ReplicaChange(engine, is_lost=True, why=why))

    def _announce(self, change: ReplicaChange) -> None:
        for listener in self.listeners:
            listener(change)

    def _on_failure(self, replica: Replica, routed: RoutedRequest, error: EngineError) -> None:
        """The request continues elsewhere; the replica is left alone for a back-off, or lost."""
        routed.lose_replica()
        if isinstance(error, EngineGone):
            self.lose(replica.engine, error)
            return
        loop, failures = asyncio.get_running_loop(), replica.failures
        is_new = failures.failed(routed.failure_mark, loop.time())
        if failures.is_used_up:
            self.lose(replica.engine, EngineError(f"{error}; that is {MAX_FAILURES} {NOT_FORGIVEN}"))
        elif is_new:
            rest_s = failures.retry_at - loop.time()
            logger.warning("%s failed and is left alone for %g s: %s", replica.name, rest_s, error)
            loop.call_at(failures.retry_at, self.dispatch)

    def _add(self, engine: Engine) -> None:
        if engine.name in self._replicas:
            raise ValueError(f"two engines are called {engine.name!r}: each needs a name of its own")
        self._replicas[engine.name] = replica = Replica(
            engine,
            self._lengths,
            is_measured=self._is_queueing,
            number=next(self._numbers),
            on_change=self._order.change,
        )
        self._order.change(replica)
        self._is_many = self._is_many or len(self._replicas) > 1
        self._stop_patience()

    def _remove(self, replica: Replica, why: str, num_moved: int) -> None:
        if self._replicas.get(replica.name) is not replica:
            return
        del self._replicas[replica.name]
        replica.leave()
        for routed in replica.requests.values():
            routed.is_moving = True  # closing the engine aborts what it has: it continues elsewhere
        self._why_none = f"the last one was {replica.name}: {why}"
        self._lose_pins(replica.name, why)
        num_left = len(self._serving())
        self._report(ReplicaLeft, engine=replica.name, why=why, num_moved=num_moved, num_left=num_left)
        self._start_patience()
        self._announce(ReplicaChange(replica.engine))

    def _lose_pins(self, name: str, why: str) -> None:
        """Requests that wait for an engine of a pin, and will get none, fail; those in flight do when they move."""
        self.pins.lose(name, why)
        for waiting in list(self._queue):
            pin = waiting.routed.pin
            if pin is not None and not pin.engines and not waiting.replica.done():
                waiting.replica.set_exception(PinLost(f"no engine with version {pin.version} is left: {pin.why_lost}"))

    def _start_patience(self) -> None:
        if (self._queue or self.pins.num_waiting) and self._giving_up is None and not self._serving():
            self._giving_up = asyncio.get_running_loop().call_later(self.patience_s, self._on_patience_timeout)

    def _stop_patience(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    def _on_patience_timeout(self) -> None:
        """No engine has joined: requests that wait fail, and those that come later wait as long."""
        self._giving_up = None
        how_long = f"there has been no engine for {self.patience_s:g} s" if self.patience_s else "there is no engine"
        for waiting in list(self._queue):
            if not waiting.replica.done():
                waiting.replica.set_exception(EngineError(f"{how_long}; {self._why_none}"))
        self.pins.fail(EngineError(f"{how_long}; {self._why_none}"))

    def _report(self, kind: Callable[..., ReplicaLeft | ReplicaJoined], **fields: str | int) -> None:
        """An event, or, without an event sink, a line in the log."""
        if self._sink is not None and self._clock is not None:
            self._sink.emit(kind(at=self._clock.now(), **fields))
        else:
            logger.warning("%s", kind(at=0.0, **fields))
