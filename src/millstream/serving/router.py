"""One front for all engine replicas: which request is next, on which replica, and what becomes of it when that replica goes.

A group's requests go only to engines at its start version or later, so that no token is older than the lag bound allows.
While there is room, a request goes to a replica at once; when there is none, it waits here, and not in the queue of an engine
that may turn out to be the slow one. Who is next: the group with the earliest deadline, of these the one with the fewest
members to go (`rank`), of these the oldest. Requests without a rank (an evaluation's) have every fourth turn, so that they
neither starve nor hold training up.

Where it goes: of the replicas with room, to the one that would be done first with all that it has and with this request's
prompt (`Replica.price`). A prompt that a replica has computed costs nothing there. So the turns of a conversation stay where
their history is, and the members of a group where their prompt is, until that replica has so much more to do than another
that computing the prompt again is the smaller loss. Ties: the fewest requests, then the order of the replicas.

Every request is answered once. If its replica breaks or is drained, it goes on elsewhere behind the tokens that were heard
of, still at its floor or later; the answer is the tokens in a row. A replica that fails is left alone for a while, one that
fails again and again, or says that it is gone, is not used any more. Without any replica, requests wait `patience_s` for one
to join, and fail.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from millstream.clock import Clock
from millstream.engine import Engine
from millstream.errors import EngineError, EngineGone
from millstream.events import EventSink, ReplicaJoined, ReplicaLeft
from millstream.serving.replica import MAX_FAILURES, Replica
from millstream.serving.request import Lengths, Prefixes, RoutedRequest
from millstream.serving.waiting import Rank, Waiter, Waiting
from millstream.types import Completion, Finish, Request, RequestKey

__all__ = ["Rank", "RankOf", "ReplicaChange", "Router"]
logger = logging.getLogger(__name__)
RankOf = Callable[[int], Rank | None]
"""Of a group; None for one that is nobody's, such as an evaluation's."""
TURNS = 4
"""One turn in so many is for requests without a rank."""


class ReplicaChange(NamedTuple):
    """What has happened to an engine: it serves now, or it does not serve any more, or it is lost and needs a replacement."""

    engine: Engine
    is_serving: bool = False
    is_lost: bool = False
    why: str = ""


class Router:
    """`is_queueing` False: everything goes to the engines at once, in the order of the calls, and the choice depends on these
    calls and on what has ended, not on measurements. That is what synchronous training needs to be repeatable.

    `rank_of` gives the rank of a group; `listeners` are called with every `ReplicaChange`. `patience_s` may be set at any
    time."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        is_queueing: bool = True,
        patience_s: float = 0.0,
        clock: Clock | None = None,
        sink: EventSink | None = None,
    ) -> None:
        self._is_queueing = is_queueing
        self.patience_s = patience_s
        self._clock = clock
        self._sink = sink
        self._lengths = Lengths()
        self._prefixes = Prefixes()
        self._flights: dict[RequestKey, RoutedRequest] = {}
        self._ranked = Waiting()
        self._others = Waiting()
        self._turn = 0
        self._num_waiting = 0
        self._newest = 0
        self._why_none = "none was given to the router"
        self._giving_up: asyncio.TimerHandle | None = None
        self._replicas: dict[str, Replica] = {}
        self._is_many = False
        """Whether there was more than one at some time."""
        for engine in engines:
            self._add(engine)
        self.rank_of: RankOf = lambda group_id: None
        self.listeners: list[Callable[[ReplicaChange], None]] = []

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Those that have or may get requests."""
        return tuple(replica.engine for replica in self._replicas.values())

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def most_for(self, name: str) -> float:
        """Requests that a replica may have, as its cache allows."""
        return self._replicas[name].most

    def serving_versions(self) -> list[int]:
        """The versions a new group could start at: the oldest lets every replica serve it, the newest only some. Empty while
        there is no replica."""
        versions = sorted({replica.engine.version for replica in self._serving()})
        self._newest = max([self._newest, *versions])
        return versions

    @property
    def newest_version(self) -> int:
        """That a replica has served, be it one that has left: the others get there."""
        self.serving_versions()
        return self._newest

    def _serving(self) -> list[Replica]:
        return [replica for replica in self._replicas.values() if not replica.is_leaving]

    # ---- one request -------------------------------------------------------------------------------------------------

    async def generate(self, request: Request, *, floor: int) -> Completion:
        """On engines at version `floor` or later. If one has room, the request is queued there before this first suspends."""
        if request.key in self._flights:
            raise EngineError(f"{request.key} is in flight already")
        self._check_floor(floor)
        flight = self._flights[request.key] = RoutedRequest(request, floor)
        try:
            while flight.finish is None:
                await self._send(flight)
        finally:
            del self._flights[request.key]
        completion = flight.completion()
        if completion.finish is not Finish.ABORT:
            self._lengths.add(len(completion.tokens))
        if completion.versions and min(completion.versions) < floor:
            raise EngineError(
                f"{request.key} was sampled with version {min(completion.versions)} by an engine that had shown version "
                f"{floor}: an engine's version must never fall"
            )
        return completion

    async def _send(self, flight: RoutedRequest) -> None:
        """To one replica, until that has answered or failed."""
        flight.known = self._prefixes.of(flight.asked) if self._is_many else []
        replica = None if self._num_waiting else self._choose(flight)
        if replica is None:
            replica = await self._wait_for_replica(flight)
        else:
            replica.add(flight)
        asked, engine = flight.asked, replica.engine
        if self._is_many:
            self._prefixes.sent(asked, replica.name, engine.version)
        on_sampled = partial(replica.hear, flight) if self._is_many else None  # alone, nobody could go on with it
        try:
            completion = await engine.generate(asked, on_sampled)
        except EngineError as error:
            self._fail(replica, flight, error)
        else:
            replica.succeed(flight)
            flight.answer(completion)
            if self._is_many:
                self._prefixes.ended(asked, completion, replica.name, engine.version)
        finally:
            replica.remove(flight)
            if self._num_waiting:
                self.dispatch()

    def _check_floor(self, floor: int) -> None:
        """Whoever loses a replica waits for the others to get as far; a version that nobody has had is a mistake."""
        if self._replicas and floor > self._newest and floor > self.newest_version:
            raise EngineError(f"no engine is at version {floor} or later: they are at {self.serving_versions()}")

    async def abort(self, key: RequestKey) -> bool:
        """Whether the request is with an engine: its `generate` then returns what there is, with `Finish.ABORT`."""
        flight = self._flights.get(key)
        if flight is None or flight.engine is None:
            return False
        flight.is_aborted = True
        with suppress(EngineGone):  # its `generate` hears of it, too
            await flight.engine.abort(key)
        return True

    # ---- who is next, and where --------------------------------------------------------------------------------------

    def rerank(self, group_id: int) -> None:
        """The group's rank has changed."""
        if group_id in self._ranked:
            self._ranked.rerank(group_id, self.rank_of(group_id))

    def dispatch(self) -> None:
        """Room or versions have changed: whoever is next goes."""
        while self._num_waiting and self._has_room():
            first, second = (self._ranked, self._others) if self._turn % TURNS else (self._others, self._ranked)
            found = first.pop(self._choose, self._has_room) or second.pop(self._choose, self._has_room)
            if found is None:
                return
            waiter, replica = found
            self._turn += 1
            self._num_waiting -= 1
            if not waiter.replica.done():
                replica.add(waiter.flight)
                waiter.replica.set_result(replica)

    async def _wait_for_replica(self, flight: RoutedRequest) -> Replica:
        waiter, group_id = Waiter(flight, asyncio.get_running_loop().create_future()), flight.request.key.group_id
        rank = self.rank_of(group_id)
        queue = self._others if rank is None else self._ranked
        queue.push(waiter, rank or (0, 0))
        self._num_waiting += 1
        self._begin_to_give_up()
        self.dispatch()
        try:
            return await waiter.replica
        except (asyncio.CancelledError, EngineError):
            if waiter.replica.done() and not waiter.replica.cancelled() and waiter.replica.exception() is None:
                waiter.replica.result().remove(flight)  # it was its turn in the same moment
            elif queue.remove(waiter):
                self._num_waiting -= 1
            self.dispatch()
            raise

    def _choose(self, flight: RoutedRequest) -> Replica | None:
        """The cheapest one that is new enough and has room."""
        now = asyncio.get_running_loop().time()
        able = [replica for replica in self._replicas.values() if replica.may_take(flight.floor, now)]
        return min(able, key=lambda replica: replica.price(flight)) if len(able) > 1 else able[0] if able else None

    def _has_room(self) -> bool:
        now = asyncio.get_running_loop().time()
        return any(replica.may_take(0, now) for replica in self._replicas.values())

    # ---- replicas leave and join -------------------------------------------------------------------------------------

    def join(self, engine: Engine) -> None:
        """It takes requests as soon as its version allows. Its name must not be that of another."""
        self._add(engine)
        self._say(ReplicaJoined, engine=engine.name, version=engine.version)
        self._announce(ReplicaChange(engine, is_serving=True))
        self.dispatch()

    def abandon(self, why: str) -> None:
        """No engine will come: whoever waits for one is told, and whoever comes later."""
        self.patience_s = 0.0
        self._why_none = f"{self._why_none}; {why}"
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        self._begin_to_give_up()

    async def drain(self, name: str, *, is_finishing: bool = False) -> None:
        """No new requests go there; those in flight go on elsewhere at once or, if `is_finishing`, end there. When this
        returns the engine is out, and whoever gave it may close it. Waits for the engine to answer."""
        if name not in self._replicas:
            raise ValueError(f"no engine is called {name!r}: there are {', '.join(self._replicas) or 'none'}")
        replica = self._replicas[name]
        replica.leave()
        self._begin_to_give_up()
        moving = [] if is_finishing else list(replica.flights.values())
        for flight in moving:
            flight.is_moving = True
        with suppress(EngineGone):  # what it had goes on elsewhere anyway
            await asyncio.gather(*(replica.engine.abort(flight.request.key) for flight in moving))
        await replica.emptied.wait()
        self._remove(replica, "it was drained", len(moving))

    def lose(self, engine: Engine, error: EngineError) -> None:
        """It is gone: what it had goes on elsewhere. Raises `EngineError` if it was the last and none is waited for."""
        replica = self._replicas.get(engine.name)
        if replica is not None and replica.engine is engine:
            self._remove(replica, str(error), len(replica.flights))
            self.report_lost(engine)
        if not self._replicas and not self.patience_s:
            raise EngineError(str(error)) from error

    def report_lost(self, engine: Engine, why: str = "") -> None:
        """The engine broke or was given up, perhaps before it joined: the owner of the engines is to replace it. `why`: empty
        if the engine itself says so when it is called."""
        self._announce(ReplicaChange(engine, is_lost=True, why=why))

    def _announce(self, change: ReplicaChange) -> None:
        for listener in self.listeners:
            listener(change)

    def _fail(self, replica: Replica, flight: RoutedRequest, error: EngineError) -> None:
        """A request goes on elsewhere; what becomes of the replica."""
        flight.lose()
        if isinstance(error, EngineGone):
            self.lose(replica.engine, error)
            return
        loop = asyncio.get_running_loop()
        is_new = replica.fail(flight, loop.time())
        if replica.is_hopeless:
            self.lose(replica.engine, EngineError(f"{error}; that is {MAX_FAILURES} failures in a row"))
        elif is_new:
            rest_s = replica.rests_until - loop.time()
            logger.warning("%s failed and is left alone for %g s: %s", replica.name, rest_s, error)
            loop.call_at(replica.rests_until, self.dispatch)

    def _add(self, engine: Engine) -> None:
        if engine.name in self._replicas:
            raise ValueError(f"two engines are called {engine.name!r}: each needs a name of its own")
        self._replicas[engine.name] = Replica(engine, self._lengths, is_measured=self._is_queueing)
        self._is_many = self._is_many or len(self._replicas) > 1
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    def _remove(self, replica: Replica, why: str, num_moved: int) -> None:
        if self._replicas.get(replica.name) is not replica:
            return
        del self._replicas[replica.name]
        replica.leave()
        for flight in replica.flights.values():
            flight.is_moving = True  # whoever closes the engine aborts what it has: it goes on elsewhere
        self._why_none = f"the last one was {replica.name}: {why}"
        num_left = len(self._serving())
        self._say(ReplicaLeft, engine=replica.name, why=why, num_moved=num_moved, num_left=num_left)
        self._begin_to_give_up()
        self._announce(ReplicaChange(replica.engine))

    def _begin_to_give_up(self) -> None:
        if self._num_waiting and self._giving_up is None and not self._serving():
            self._giving_up = asyncio.get_running_loop().call_later(self.patience_s, self._give_up)

    def _give_up(self) -> None:
        """Nobody came: whoever waits is told, and whoever comes later waits anew."""
        self._giving_up = None
        for waiter in [*self._ranked, *self._others]:
            if not waiter.replica.done():
                waiter.replica.set_exception(
                    EngineError(f"there has been no engine for {self.patience_s:g} s; {self._why_none}")
                    if self.patience_s
                    else EngineError(f"there is no engine; {self._why_none}")
                )

    def _say(self, kind: Callable[..., ReplicaLeft | ReplicaJoined], **fields: str | int) -> None:
        """An event, or, where nobody takes events, a line in the log."""
        if self._sink is not None and self._clock is not None:
            self._sink.emit(kind(at=self._clock.now(), **fields))
        else:
            logger.warning("%s", kind(at=0.0, **fields))
