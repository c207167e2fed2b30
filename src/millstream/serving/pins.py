"""Pins: engines that keep their weights while something is measured with them.

A pin is one version and the engines that serve it. Requests with a pin go only to these engines, and none of them loads other
weights until the pin is released: what is measured under a pin is of one version, whatever training does meanwhile. A pinned
engine also serves rollouts of training whose start its version allows. An engine that is loading cannot be pinned, and a
pinned one does not begin to load (`WeightSync` asks `is_pinned` and loads within `loading`). When the last engine of a pin is
lost, its requests fail with `PinLost`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from millstream.engine import Engine
from millstream.errors import EngineError
from millstream.serving.replica import Replica
from millstream.serving.request import Pin

PINNED_SHARE = 4  # during training: one engine in this number is pinned, and at least one


class _Wanted(NamedTuple):
    at_least: int
    in_training: bool
    pin: asyncio.Future[Pin]


class Pins:
    """`serving`: the replicas that may be pinned. `on_waiting` is called when something waits for a pin, `on_released` with
    every engine that may load again."""

    def __init__(
        self,
        serving: Callable[[], list[Replica]],
        *,
        on_waiting: Callable[[], None],
        on_released: Callable[[Engine], None],
    ) -> None:
        self._serving = serving
        self._on_waiting = on_waiting
        self._on_released = on_released
        self._pins: list[Pin] = []
        self._wanted: list[_Wanted] = []
        self._loading: set[Engine] = set()

    @property
    def num_waiting(self) -> int:
        return len(self._wanted)

    def __len__(self) -> int:
        return len(self._pins)

    def is_pinned(self, engine: Engine) -> bool:
        return any(engine.name in pin.engines for pin in self._pins)

    async def take(self, at_least: int, *, in_training: bool) -> Pin:
        """The newest version that is served, as soon as that is `at_least`. All engines that serve it or, during training, a
        quarter of the engines. Ended by: an engine that has loaded the version; `fail`."""
        wanted = _Wanted(at_least, in_training, asyncio.get_running_loop().create_future())
        self._wanted.append(wanted)
        self.grant()
        self._on_waiting()
        try:
            return await wanted.pin
        except asyncio.CancelledError:
            if wanted in self._wanted:
                self._wanted.remove(wanted)
            elif not wanted.pin.cancelled() and wanted.pin.exception() is None:
                self.release(wanted.pin.result())  # it was given in the same moment
            raise

    def release(self, pin: Pin) -> None:
        self._pins.remove(pin)
        for replica in self._serving():
            if replica.name in pin.engines:
                self._on_released(replica.engine)

    @contextmanager
    def loading(self, engine: Engine) -> Iterator[None]:
        """The engine gets other weights in this block. A version that is waited for is pinned at its end, before the engine can
        load the next one."""
        self._loading.add(engine)
        try:
            yield
        finally:
            self._loading.discard(engine)
            self.grant()

    def grant(self) -> None:
        """Engines or their versions have changed: give the pins that can be given."""
        for wanted in list(self._wanted):
            free = [replica for replica in self._serving() if replica.engine not in self._loading]
            newest = max((replica.engine.version for replica in free), default=-1)
            if newest < wanted.at_least:
                continue
            names = [replica.name for replica in free if replica.engine.version == newest]
            most = max(1, len(self._serving()) // PINNED_SHARE) if wanted.in_training else len(names)
            self._wanted.remove(wanted)
            if not wanted.pin.done():  # else it is cancelled, and about to leave
                self._pins.append(pin := Pin(newest, names[:most]))
                wanted.pin.set_result(pin)

    def lose(self, name: str, why: str) -> None:
        """The engine of this name serves no more."""
        for pin in self._pins:
            if name in pin.engines:
                pin.engines.discard(name)
                pin.why_lost = f"{name}: {why}"

    def fail(self, error: EngineError) -> None:
        """No engine will come: those that wait for a pin get the error."""
        for wanted in self._wanted:
            if not wanted.pin.done():
                wanted.pin.set_exception(error)
        self._wanted.clear()
