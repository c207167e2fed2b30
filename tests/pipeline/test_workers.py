"""Rollout workers on the virtual clock: what holds of a run without them holds with them, and when they are killed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from millstream.engine.base import EngineLine
from millstream.env import Context
from millstream.errors import EngineError, MillstreamError, RowsLost
from millstream.events import (
    Event,
    GroupLeft,
    GroupTaken,
    RolloutEnded,
    RolloutFailed,
    RolloutSpan,
    RolloutStarted,
    Stepped,
    WeightsLoaded,
)
from millstream.events.rollouts import Attempt
from millstream.pipeline.worker_host import LineLost, OpenLine
from millstream.sim.draws import constant
from millstream.sim.environment import SimEnvironment
from millstream.types import Fate
from support.rollout_workers import FakeWorkers, StagingStore
from support.simulated import Outcome, World, check, simulate
from support.worlds import unless_all_fail, worlds

LOST = "RolloutWorkerLost"


def killer(times: Sequence[float]) -> object:
    """Kills the worker with the most attempts at each of these times."""

    async def kill(workers: FakeWorkers) -> None:
        for time in sorted(times):
            await asyncio.sleep(max(0.0, time - asyncio.get_running_loop().time()))
            busy = sorted(workers.living, key=lambda worker: len(worker.host._tasks))
            if busy:
                busy[-1].kill()

    return kill


def without_times(events: Sequence[Event], *kinds: type[Event]) -> list[Event]:
    return [replace(event, at=0.0) for event in events if isinstance(event, kinds)]


@settings(max_examples=30)
@given(world=worlds, num=st.integers(1, 3), has_lines=st.booleans())
def test_in_any_world_rollouts_that_are_played_by_workers_are_neither_too_old_nor_lost_nor_doubled(
    world: World, num: int, has_lines: bool
) -> None:
    world = replace(world, workers=num, has_lines=has_lines)
    with unless_all_fail(world):
        check(world, simulate(world))


@settings(max_examples=30)
@given(
    world=worlds,
    num=st.integers(1, 3),
    has_lines=st.booleans(),
    times=st.lists(st.floats(0.0, 20.0), min_size=1, max_size=3),
)
def test_whenever_workers_are_killed_every_attempt_ends_once_and_every_group_leaves_once(
    world: World, num: int, has_lines: bool, times: list[float]
) -> None:
    world = replace(world, workers=num, has_lines=has_lines, retries=2)
    with unless_all_fail(world):
        outcome = simulate(world, on_workers=killer(times))
        check(world, outcome)
        attempts = Counter((e.group_id, e.member, e.attempt) for e in outcome.sink.of(RolloutStarted))
        assert set(attempts.values()) <= {1}


@pytest.mark.parametrize("num", [1, 2])
def test_in_lockstep_workers_change_nothing_of_what_is_trained(num: int) -> None:
    world = World(max_lag=0, num_engines=2, num_turns=2, latency=1.0, failure=0.1, group_size=3, groups_per_step=3)

    def trained(world: World) -> list[Event]:
        outcome = simulate(world)
        check(world, outcome)
        return without_times(outcome.sink.events, GroupTaken, GroupLeft, Stepped)

    ended = [replace(event, seconds=0.0) if isinstance(event, Stepped) else event for event in trained(world)]
    with_workers = trained(replace(world, workers=num))
    assert [replace(event, seconds=0.0) if isinstance(event, Stepped) else event for event in with_workers] == ended


def test_a_killed_worker_fails_its_attempts_by_name_they_are_retried_and_the_worker_is_replaced() -> None:
    world = World(steps=4, workers=2, has_lines=True, retries=2)
    started: list[FakeWorkers] = []

    async def kill(workers: FakeWorkers) -> None:
        started.append(workers)
        await asyncio.sleep(0.5)
        workers.workers[0].kill()

    outcome = simulate(world, on_workers=kill)
    check(world, outcome)
    failed = outcome.sink.of(RolloutFailed)
    assert failed and {event.error for event in failed} == {LOST}
    assert all("rollout worker 0 is gone: killed" in event.message for event in failed)
    ended = {(e.group_id, e.member): e.attempt for e in outcome.sink.of(RolloutEnded)}
    assert all(ended[event.group_id, event.member] == event.attempt + 1 for event in failed)
    assert len(started[0].workers) == 3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_of_engines_that_all_have_requests_no_more_than_half_load_at_once_whoever_sent_the_requests(
    num_workers: int,
) -> None:
    world = World(
        num_engines=4, slots=4, groups_per_step=4, group_size=4, max_lag=3, load=0.2, mean_tokens=200.0, success=0.7,
        workers=num_workers, has_lines=num_workers > 0,
    )  # fmt: skip
    outcome = simulate(world)
    check(world, outcome)
    loads = [load for load in outcome.sink.of(WeightsLoaded) if load.version < world.steps - world.max_lag]
    assert len(loads) > 4, "later ones are of engines that have nothing left to do"
    begins = [load.at - load.seconds for load in loads]
    at_once = [sum(one.at - one.seconds <= begin + 1e-9 < one.at for one in loads) for begin in begins]
    assert max(at_once) == 2


def test_rows_that_are_lost_before_they_are_put_fail_the_attempt_and_its_retry_is_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(steps=3, workers=1, has_lines=True, surplus="abort", extra_members=1, filter_zero_signal=False)
    put, lost = StagingStore.put_staged, iter([True])

    async def lose_one(store: StagingStore, group_id: int, rows: object) -> None:
        if next(lost, False):
            store.drop_staged(rows)  # type: ignore[arg-type]
            raise RowsLost("gone")
        await put(store, group_id, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(StagingStore, "put_staged", lose_one)
    outcome = simulate(world)
    check(world, outcome)
    assert [(event.error, event.is_final) for event in outcome.sink.of(RolloutFailed)] == [(LOST, False)]
    sizes = {event.num_members for event in outcome.sink.of(GroupLeft) if event.fate is Fate.TRAINED}
    assert sizes == {world.group_size}


def test_a_worker_that_only_dies_ends_the_run_by_its_reason() -> None:
    async def kill(workers: FakeWorkers) -> None:
        while True:
            for worker in workers.living:
                worker.kill()
            await asyncio.sleep(0.01)

    with pytest.raises(MillstreamError, match="rollout worker 0 died 6 times, and played nothing in between: killed"):
        simulate(World(workers=1, retries=100), on_workers=kill)


def test_an_engine_that_dies_is_replaced_though_only_workers_had_requests_there() -> None:
    world = World(steps=6, workers=2, has_lines=True, num_engines=2)

    async def break_one(fleet: object) -> None:
        await asyncio.sleep(1.0)
        fleet.router.engines[0].crash("broken")  # type: ignore[attr-defined]

    outcome = simulate(world, on_fleet=break_one)
    check(world, outcome)
    assert len(outcome.engines) == 3
    assert not outcome.sink.of(RolloutFailed), "its requests continued elsewhere"


def test_without_any_engine_the_run_ends_with_the_reason() -> None:
    world = World(steps=6, workers=2, has_lines=True)

    async def break_all(fleet: object) -> None:
        def no_more(name: str) -> NoReturn:
            raise EngineError("no room for it")

        fleet._make = no_more  # type: ignore[attr-defined]
        await asyncio.sleep(1.0)
        fleet.router.engines[0].crash("broken")  # type: ignore[attr-defined]

    with pytest.raises(EngineError):
        simulate(world, on_fleet=break_all)


def test_turns_are_events_as_without_workers() -> None:
    world = World(steps=2, num_turns=3, records_turns=True)

    def spans(world: World) -> Counter[tuple[str, int]]:
        return Counter((event.what, event.num_tokens) for event in simulate(world).sink.of(RolloutSpan))

    assert spans(replace(world, workers=2)) == spans(world) != Counter()


def test_what_passes_between_driver_and_worker_for_a_rollout_does_not_depend_on_its_length() -> None:
    def num_bytes(num_tokens: int) -> float:
        world = World(steps=3, workers=1, has_lines=True, keep_gb=0.0, num_turns=2)
        started: list[FakeWorkers] = []

        async def watch(workers: FakeWorkers) -> None:
            started.append(workers)

        outcome = simulate(world, num_tokens=constant(num_tokens), on_workers=watch)
        total = sum(worker.num_bytes for worker in started[0].workers)
        return total / len(outcome.sink.of(RolloutEnded))

    assert num_bytes(1000) < 1.05 * num_bytes(300)


def test_of_rollouts_that_are_not_kept_one_a_second_is_sent_to_be_shown() -> None:
    class Shown:
        parts: ClassVar[list[int]] = []

        def add(self, record: object) -> None:
            if isinstance(record, Attempt):
                self.parts.append(sum(len(part.tokens) for part in record.parts))

    world = World(steps=8, workers=1, has_lines=True, keep_gb=0.0)
    outcome = simulate(world, num_tokens=constant(300), rollouts=lambda sink: Shown())
    shown = [num for num in Shown.parts if num]
    assert set(shown) == {256} and 1 <= len(shown) <= outcome.seconds + 1 < len(Shown.parts)


def test_a_worker_that_dies_uses_up_no_retries_of_the_groups_that_were_there() -> None:
    world = World(steps=3, workers=1, has_lines=True, retries=0)

    async def kill(workers: FakeWorkers) -> None:
        await asyncio.sleep(0.05)
        workers.workers[0].kill()

    outcome: Outcome = simulate(world, on_workers=kill)
    check(world, outcome)
    failed = outcome.sink.of(RolloutFailed)
    assert failed and not any(event.is_final for event in failed)
    assert Fate.FAILED not in {event.fate for event in outcome.sink.of(GroupLeft)}


@pytest.mark.parametrize("num", [1, 2])
def test_a_task_that_kills_every_worker_fails_by_name_and_no_other_does(num: int) -> None:
    world = World(steps=6, groups_per_step=4, max_lag=2, workers=num, has_lines=True, filter_zero_signal=False)
    usual = SimEnvironment()
    started: list[FakeWorkers] = []

    class Deadly:
        async def rollout(self, context: Context) -> float:
            if context.task.id == "task-3":
                next(one for one in started[0].living if 3 in one.host._num_playing).kill()
                await asyncio.sleep(0)
            return await usual.rollout(context)

    async def watch(workers: FakeWorkers) -> None:
        started.append(workers)

    outcome = simulate(world, environment=Deadly(), on_workers=watch)
    check(world, outcome)
    final = [event for event in outcome.sink.of(RolloutFailed) if event.is_final]
    assert {event.group_id for event in final} == {3} and {event.error for event in final} == {LOST}
    assert all("Task 'task-3' was on each of" in event.message for event in final)
    assert {e.group_id for e in outcome.sink.of(GroupLeft) if e.fate is Fate.FAILED} == {3}


def test_attempts_beyond_the_retries_do_not_collide_with_those_of_a_restart() -> None:
    world = World(
        steps=6, workers=1, retries=0, has_lines=True, overdue="restart", max_restarts=2, tail=2.0, max_lag=0.5
    )
    check(world, simulate(world, on_workers=killer([0.05, 0.3, 0.6, 1.2, 2.4])))  # type: ignore[arg-type]


def test_a_worker_that_does_not_answer_is_killed_and_replaced() -> None:
    world = World(steps=4, workers=2, has_lines=True)
    started: list[FakeWorkers] = []

    async def stop(workers: FakeWorkers) -> None:
        started.append(workers)
        await asyncio.sleep(0.5)
        workers.workers[0].stop()

    outcome = simulate(world, on_workers=stop)
    check(world, outcome)
    failed = outcome.sink.of(RolloutFailed)
    assert failed and all("did not answer for 750 s; rollout.timeout_s sets the limit" in one.message for one in failed)
    assert len(started[0].workers) == 3


def test_a_line_that_breaks_without_a_request_is_opened_again_after_a_back_off() -> None:
    cuts, times = 5, list[float]()

    async def cut(workers: FakeWorkers) -> None:
        await asyncio.sleep(1.0)
        while len(times) < cuts:
            num = len(workers.lines)
            times.append(asyncio.get_running_loop().time())
            workers.lines[-1].cut()
            while len(workers.lines) == num:
                await asyncio.sleep(0.01)

    world = World(steps=8, groups_per_step=4, workers=1, has_lines=True, latency=2.0)
    outcome = simulate(world, on_workers=cut)
    check(world, outcome)
    waits = [later - time for time, later in pairwise(times)]
    assert waits == sorted(waits) and waits[-1] > 4 * waits[0]
    assert not outcome.sink.of(RolloutFailed)


def test_a_line_that_is_opened_again_by_order_is_not_reported_as_lost() -> None:
    sent: list[object] = []

    async def reopen(workers: FakeWorkers) -> None:
        await asyncio.sleep(1.0)
        host = workers.living[0].host
        send = host._link.post
        host._link.post = lambda message: (sent.append(message), send(message))[1]  # type: ignore[method-assign, func-returns-value]
        for name in list(host._engines):
            host.handle(OpenLine(name, 4, EngineLine("", 0, name)), 0)
        assert len(host._engines) == 2

    world = World(workers=1, has_lines=True, num_engines=2)
    check(world, simulate(world, on_workers=reopen))
    assert not [one for one in sent if isinstance(one, LineLost)]
