"""Time that can be trusted: the virtual clock jumps, repeats and detects deadlocks; every wait has a name and a deadline."""

from __future__ import annotations

import asyncio
import time

import pytest

from millstream.clock import RealClock, VirtualClock, run_virtual
from millstream.errors import Deadlock, StallError
from millstream.events import Stalled
from millstream.events.sinks import MemorySink
from millstream.pipeline.notify import Notifier
from millstream.pipeline.waits import Waits


def waits(sink: MemorySink, *, deadline_s: float = 100.0) -> Waits:
    return Waits(clock=VirtualClock(), sink=sink, stall_s=10.0, deadline_s=deadline_s)


def test_virtual_time_passes_without_real_time() -> None:
    async def program() -> float:
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(7200))
        return VirtualClock().now()

    began = time.monotonic()
    assert run_virtual(program()) == 7200
    assert time.monotonic() - began < 5


def test_a_program_in_which_nothing_can_happen_raises_deadlock() -> None:
    async def program() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock):
        run_virtual(program())


def test_the_real_clock_starts_at_zero_and_never_falls() -> None:
    clock = RealClock()
    times = [clock.now() for _ in range(100)]
    assert times == sorted(times) and 0 <= times[0] < 1


def test_a_long_wait_becomes_an_event_and_then_an_error_that_names_it() -> None:
    sink = MemorySink()

    async def program() -> None:
        await waits(sink).on("train", "a complete group", asyncio.get_running_loop().create_future())

    with pytest.raises(StallError, match=r"train has waited 100 s for a complete group.*deadline_s"):
        run_virtual(program())
    assert [(e.owner, e.what, e.seconds) for e in sink.of(Stalled)] == [("train", "a complete group", 10.0)]


def test_a_wait_for_something_that_gets_on_has_its_deadline_counted_anew() -> None:
    async def program() -> tuple[str, float]:
        w, loop = waits(MemorySink()), asyncio.get_running_loop()
        for at in (90, 180):
            loop.call_later(at, w.renew, "train", "the run")
        waiting = [w.on(owner, "news", loop.create_future()) for owner in ("train", "another")]
        ended = [asyncio.create_task(one) for one in waiting]
        done, _ = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        assert done == {ended[1]} and loop.time() == 100
        error = (await asyncio.gather(*ended, return_exceptions=True))[0]
        return str(error), loop.time()

    said, at = run_virtual(program())
    assert said.startswith("train has waited 100 s for news") and at == 280


def test_a_wait_without_a_deadline_goes_on_and_shows_among_the_active_ones() -> None:
    sink = MemorySink()

    async def program() -> None:
        w = waits(sink)
        wait = asyncio.ensure_future(w.on("feed", "room", asyncio.sleep(1000), deadline=False))
        await asyncio.sleep(500)
        assert [(x.owner, x.what, x.since) for x in w.active()] == [("feed", "room", 0.0)]
        await wait
        assert w.active() == []

    run_virtual(program())


def test_a_timeout_of_the_thing_waited_for_is_not_taken_for_a_stall() -> None:
    async def fails() -> None:
        raise TimeoutError("its own")

    async def program() -> None:
        with pytest.raises(TimeoutError, match="its own"):
            await waits(MemorySink()).on("a", "b", fails())

    run_virtual(program())


def test_a_pulse_wakes_whoever_waits_for_a_condition() -> None:
    async def program() -> None:
        pulse, state = Notifier(), {"value": 0}
        waiting = asyncio.ensure_future(pulse.until(lambda: state["value"] if state["value"] > 1 else None))
        for value in (1, 2):
            await asyncio.sleep(1)
            state["value"] = value
            pulse.notify()
        assert await waiting == 2

    run_virtual(program())
