"""Results that clients come back for: a request is answered at once with an id, and its result is retrieved by that id.

Guarantees: an id has one result, which does not change; the same request sent twice has one id. A result is kept until it was
retrieved, and the last `MAX_KEPT` of a key after that, for a client whose connection broke while it received one. Where a key
has too many, results that no client has come for in `ABANDONED_S` are dropped: their client is gone.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, defaultdict

from msgspec import Struct

from millstream.serve.http import HttpError

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
MAX_KEPT = 256
MAX_REPLAYED = 1024
NUM_UNSURE = 8  # retrieved results that a snapshot has
ABANDONED_S = 600.0


class Result(Struct, frozen=True):
    media_type: str
    body: bytes


class _Promise:
    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self.resolved_at = math.inf


class Futures:
    """`max_open`: results of one key that are not retrieved yet, or not even there."""

    def __init__(self, *, max_open: int) -> None:
        self._max_open = max_open
        self._promises: dict[str, _Promise] = {}
        self._num_open: defaultdict[str, int] = defaultdict(int)
        self._replayed: defaultdict[str, OrderedDict[str, None]] = defaultdict(OrderedDict)
        self._retrieved: defaultdict[str, OrderedDict[str, None]] = defaultdict(OrderedDict)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._promises

    def is_done(self, request_id: str) -> bool:
        """Whether its result is there."""
        return request_id in self._promises and self._promises[request_id].result.done()

    def check_room(self, owner: str) -> None:
        """Raises `HttpError` with 429: the client tries again."""
        if self._num_open[owner] >= self._max_open:
            self._drop_abandoned(owner)
        if self._num_open[owner] >= self._max_open:
            raise HttpError(429, f"{self._max_open} results wait to be retrieved, which is the limit: try again")

    def add(self, request_id: str, owner: str, *, is_replayed: bool = False) -> None:
        """Once for every id. `is_replayed`: a client may have its result already, before a restart. So it is not counted, and
        of too many the first ones are dropped."""
        self._promises[request_id] = _Promise(owner)
        if not is_replayed:
            self._num_open[owner] += 1
            return
        replayed = self._replayed[owner]
        replayed[request_id] = None
        if len(replayed) > MAX_REPLAYED:
            oldest, _ = replayed.popitem(last=False)
            del self._promises[oldest]

    def resolve(self, request_id: str, result: Result) -> None:
        """Of an id that was dropped meanwhile: nothing happens."""
        promise = self._promises.get(request_id)
        if promise is not None and not promise.result.done():
            promise.result.set_result(result)
            promise.resolved_at = time.monotonic()

    def needed(self, prefix: str) -> dict[str, Result]:
        """The results with ids of this prefix that no client has come for, and the last ones that a client has come for: it may
        not have received them."""
        found: dict[str, Result] = {}
        for request_id, promise in self._promises.items():
            if request_id.startswith(prefix) and promise.result.done():
                retrieved = self._retrieved[promise.owner]
                if request_id not in retrieved or request_id in list(retrieved)[-NUM_UNSURE:]:
                    found[request_id] = promise.result.result()
        return found

    async def wait(self, request_id: str, owner: str, *, wait_s: float) -> Result | None:
        """None: it is not there yet. Raises `HttpError` with 404 for an id that this key does not have."""
        promise = self._promises.get(request_id)
        if promise is None or promise.owner != owner:
            raise HttpError(404, f"no request {request_id!r}, or its result was retrieved long ago")
        done, _ = await asyncio.wait({promise.result}, timeout=wait_s)
        return promise.result.result() if done else None

    def mark_retrieved(self, request_id: str) -> None:
        """After the response was sent."""
        promise = self._promises.get(request_id)
        if promise is None:
            return
        kept = self._retrieved[promise.owner]
        if request_id not in kept and self._replayed[promise.owner].pop(request_id, kept) is kept:
            self._num_open[promise.owner] -= 1
        kept[request_id] = None
        while len(kept) > MAX_KEPT:
            oldest, _ = kept.popitem(last=False)
            del self._promises[oldest]

    def _drop_abandoned(self, owner: str) -> None:
        before = time.monotonic() - ABANDONED_S
        for request_id, promise in list(self._promises.items()):
            is_open = request_id not in self._retrieved[owner] and request_id not in self._replayed[owner]
            if promise.owner == owner and promise.resolved_at < before and is_open:
                del self._promises[request_id]
                self._num_open[owner] -= 1
