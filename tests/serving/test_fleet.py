"""Engines that die, and those that take their place; engines that are added to a run at work, and taken away."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from typer.testing import CliRunner

from millstream import RunConfig, resume, train
from millstream.cli.main import app
from millstream.clock import VirtualClock, run_virtual
from millstream.config import load
from millstream.engine import EngineConfig
from millstream.engine.http.config import HttpConfig
from millstream.errors import (
    ConfigError,
    EngineError,
    EngineMisconfigured,
    StallError,
    WeightsError,
    WeightsUnreachable,
)
from millstream.events import Evaluated, ReplicaJoined, ReplicaLeft, RunEnded, Warned, WeightsLoaded
from millstream.events.sinks import MemorySink, read_events
from millstream.pipeline.sync import MAX_WEIGHTS_FAILED
from millstream.rpc.frames import frame
from millstream.run import control, run
from millstream.run.backend import BackendContext, LocalBackend, build_fleet
from millstream.run.config import ModelConfig, TinyConfig
from millstream.run.control import Control, ControlError, RunStatus, ScaleRequest, ScaleResult, StatusRequest
from millstream.run.evaluate import Evaluator
from millstream.run.places import Places
from millstream.serving.fleet import MAX_REPLACED, REPLACE_BACK_OFF, SERVED_S, Fleet
from millstream.sim.draws import constant
from millstream.sim.engine import SimEngine
from millstream.types import RequestKey, Weights
from millstream.weights import NOTHING, Publication
from millstream.weights.local import LocalChannel
from support.commands import start_command
from support.processes import workers
from support.runs import SETTINGS, assert_clean, command, recipe_in, steps_of, until
from support.sim_requests import request
from support.simulated import Diary, OnFleet, World, check, fleet_of, simulate
from support.tiny import make
from support.worlds import unless_all_fail, worlds

BACK_OFF_S = REPLACE_BACK_OFF.first_s


class Yard:
    """Makes engines, and keeps them."""

    def __init__(self, fails: Callable[[int], bool] = lambda number: False) -> None:
        self.made, self.at, self._fails, self._num = list[SimEngine](), list[float](), fails, 0

    def make(self, name: str) -> SimEngine:
        self._num += 1
        if self._fails(self._num):
            raise RuntimeError("out of memory")
        self.at.append(asyncio.get_running_loop().time())
        self.made.append(SimEngine(name=name))
        return self.made[-1]

    def newest(self, name: str) -> SimEngine:
        return next(engine for engine in reversed(self.made) if engine.name == name)


# ---- replaced ----------------------------------------------------------------------------------------------------------


def lose_often(num: int, pause_s: float, name: str = "engine-1") -> tuple[list[float], list[str], int]:
    """One of two engines dies, again and again: when the next ones were made, what was said, and who is left."""

    async def play() -> tuple[list[float], list[str], int]:
        sink, yard = MemorySink(), Yard()
        fleet = fleet_of(yard.make, 2, sink)
        replacing = asyncio.create_task(fleet.replace(lambda engine: False))
        await asyncio.sleep(pause_s)
        delays = []
        for number in range(num):
            yard.newest(name).crash("on purpose")
            died, num_made = asyncio.get_running_loop().time(), len(yard.made)
            await fleet.load(1 + number, {})  # finds it broken
            await asyncio.sleep(pause_s)
            delays += [at - died for at in yard.at[num_made:]]
        replacing.cancel()
        return delays, [event.message for event in sink.of(Warned)], len(fleet.router.engines)

    return run_virtual(play())


def test_engines_that_die_are_replaced_after_a_growing_back_off_within_a_budget() -> None:
    delays, said, num_left = lose_often(MAX_REPLACED + 1, pause_s=40.0)
    assert delays == pytest.approx([BACK_OFF_S * 2**number for number in range(MAX_REPLACED)])
    assert said == ["engine-1 is not replaced: 5 were, and served for less than 10 minutes in all"] and num_left == 1


def test_one_that_has_served_for_a_while_is_replaced_at_once_and_the_budget_is_for_a_stretch_of_time() -> None:
    delays, said, num_left = lose_often(3 * MAX_REPLACED, pause_s=SERVED_S + 10)
    assert delays == pytest.approx([BACK_OFF_S] * 3 * MAX_REPLACED) and not said and num_left == 2


def test_a_server_is_tried_again_beyond_the_budget_until_requests_have_waited_for_any_long_enough() -> None:
    async def play() -> tuple[list[float], list[str], list[str]]:
        sink, made = MemorySink(), list[SimEngine]()
        at = list[float]()

        def make_engine(name: str) -> SimEngine:
            at.append(asyncio.get_running_loop().time())
            made.append(SimEngine(name=name))
            if len(made) > 2:
                made[-1].crash("nothing listens there")
            return made[-1]

        fleet = fleet_of(make_engine, 2, sink, is_given_up=False)
        replacing = asyncio.create_task(fleet.replace(lambda engine: False))
        fleet.router.lose(made[0], EngineError("found dead"))
        await asyncio.sleep(300)
        fleet.router.lose(made[1], EngineError("found dead, too"))
        lost_at = asyncio.get_running_loop().time()
        with pytest.raises(
            EngineError, match=r"no engine for 1000 s; the last one was engine-.: .*nothing listens there"
        ):
            await fleet.router.generate(request(1), floor=0)
        assert asyncio.get_running_loop().time() - lost_at == pytest.approx(1000)
        replacing.cancel()
        return at, fleet.names, [event.message for event in sink.of(Warned)]

    at, names, said = run_virtual(play())
    waits = [later - earlier for earlier, later in pairwise(at[1:])]
    longest = REPLACE_BACK_OFF.longest_s
    assert waits[:8] == pytest.approx([1, 2, 4, 8, 16, longest, longest, longest])
    assert names == ["engine-0", "engine-1"] and not [message for message in said if "is not replaced" in message]


@pytest.mark.parametrize("down_s", [200, 7200])
def test_after_an_outage_of_any_length_a_server_is_used_again_and_the_same_service_restores_its_budget(
    down_s: float,
) -> None:
    async def play() -> list[float]:
        sink, yard = MemorySink(), Yard(fails=lambda number: number > 1 and asyncio.get_running_loop().time() < down_s)
        fleet = fleet_of(yard.make, 1, sink, is_given_up=False, patience_s=10_000)
        replacing = asyncio.create_task(fleet.replace(lambda engine: False))
        fleet.router.lose(yard.made[0], EngineError("found dead"))
        await fleet.router.generate(request(1), floor=0)
        waits = [asyncio.get_running_loop().time() - down_s]
        await asyncio.sleep(MAX_REPLACED * SERVED_S)
        lost_at = asyncio.get_running_loop().time()
        fleet.router.lose(yard.made[-1], EngineError("found dead again"))
        await fleet.router.generate(request(2), floor=0)
        replacing.cancel()
        return [*waits, asyncio.get_running_loop().time() - lost_at]

    after_outage, after_service = run_virtual(play())
    assert after_outage <= REPLACE_BACK_OFF.longest_s + 1 and after_service == pytest.approx(BACK_OFF_S, abs=1)


def test_an_engine_that_cannot_be_made_is_tried_again_and_the_others_do_not_wait_for_it() -> None:
    async def play() -> tuple[list[str], list[str]]:
        sink, yard = MemorySink(), Yard(fails=lambda number: number in (4, 6))
        fleet, adopted = fleet_of(yard.make, 3, sink), list[str]()

        def adopt(engine: Any) -> bool:
            adopted.append(engine.name)
            return True

        replacing = asyncio.create_task(fleet.replace(adopt))
        for engine in yard.made[:2]:
            engine.crash("on purpose")
        await fleet.load(1, {})
        await asyncio.sleep(60)
        replacing.cancel()
        return adopted, [event.message for event in sink.of(Warned)]

    adopted, said = run_virtual(play())
    assert adopted == ["engine-1", "engine-0"]
    assert said == ["engine-0 could not be replaced: RuntimeError: out of memory"] * 2


class Homeless(SimEngine):
    """Waits for room for a long time, finds none, and breaks. `of_two` makes it, but for the two that there are first."""

    async def resume(self) -> None:
        if not self.is_gone:
            await asyncio.sleep(300)
            self.crash("no room")
        await super().resume()

    async def load(self, version: int, weights: Weights) -> None:
        await self.resume()

    @staticmethod
    def of_two(made: list[SimEngine]) -> Callable[[str], SimEngine]:
        def make(name: str) -> SimEngine:
            made.append(SimEngine(name=name) if len(made) < 2 else Homeless(name=name))
            return made[-1]

        return make


def adopting(fleet: Fleet) -> Callable[[Any], bool]:
    """Takes engines in as training does, and says no more of one that breaks than training says."""
    tasks = set[asyncio.Task[None]]()

    async def take_in(engine: Any) -> None:
        try:
            await engine.load(1, {})
        except EngineError:
            fleet.router.report_lost(engine)
        else:
            fleet.router.join(engine)

    def adopt(engine: Any) -> bool:
        tasks.add(asyncio.create_task(take_in(engine)))
        return True

    return adopt


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("is_loaded", [True, False])
def test_replacements_that_never_serve_run_out_of_budget_however_long_each_takes(
    is_training: bool, is_loaded: bool
) -> None:
    async def play() -> tuple[int, list[str], list[str], float]:
        sink, made = MemorySink(), list[SimEngine]()
        fleet = fleet_of(Homeless.of_two(made), 2, sink)
        replacing = asyncio.create_task(fleet.replace(adopting(fleet) if is_training else lambda engine: False))
        made[0].crash("on purpose")
        if is_loaded:
            await fleet.load(1, {})
        else:
            fleet.router.lose(made[0], EngineError("found dead"))
        while "engine-0" in fleet.names:
            await asyncio.sleep(1)
        replacing.cancel()
        said = [event.message for event in sink.of(Warned)]
        return len(made) - 2, fleet.names, said, asyncio.get_running_loop().time()

    num_replaced, names, said, seconds = run_virtual(play())
    assert num_replaced == MAX_REPLACED and names == ["engine-1"]
    assert said[-1] == "engine-0 is not replaced: 5 were, and served for less than 10 minutes in all"
    pauses = sum(BACK_OFF_S * 2**number for number in range(MAX_REPLACED))
    assert seconds == pytest.approx(MAX_REPLACED * 300 + pauses, abs=2), "to wait for a start is no service"


@pytest.mark.parametrize("is_lone_replaced", [True, False])
def test_requests_wait_for_the_replacement_of_the_only_engine_if_it_is_replaced(is_lone_replaced: bool) -> None:
    async def play() -> float:
        yard = Yard()
        fleet = fleet_of(yard.make, 1, MemorySink())
        fleet._is_lone_replaced = is_lone_replaced
        fleet._set_patience()
        replacing = asyncio.create_task(fleet.replace(lambda engine: False))
        turn = asyncio.create_task(fleet.router.generate(request(1), floor=0))
        await asyncio.sleep(0.01)
        yard.made[0].crash("on purpose")
        try:
            await turn
            assert yard.made[1].stats().requests_finished == 1
            return asyncio.get_running_loop().time()
        finally:
            replacing.cancel()

    if is_lone_replaced:
        assert run_virtual(play()) > BACK_OFF_S
    else:
        with pytest.raises(EngineError, match="engine broke: on purpose"):
            run_virtual(play())


def test_where_the_only_engine_dies_too_often_waiting_requests_fail_at_once_with_the_reason() -> None:
    async def play() -> float:
        yard = Yard()
        fleet = fleet_of(yard.make, 1, MemorySink())

        def adopt(engine: Any) -> bool:
            asyncio.get_running_loop().call_soon(engine.crash, "again")
            return False

        replacing = asyncio.create_task(fleet.replace(adopt))
        yard.made[0].crash("on purpose")
        try:
            with pytest.raises(EngineError, match=r"no engine; .*engine broke: again; engine is not replaced: 5 were"):
                await fleet.router.generate(request(1), floor=0)
            with pytest.raises(EngineError, match="there is no engine"):
                await fleet.router.generate(request(2), floor=0)
            return asyncio.get_running_loop().time()
        finally:
            replacing.cancel()

    assert run_virtual(play()) == pytest.approx(31, abs=1), "the pauses, and no patience after them"


def test_a_replacement_that_can_never_work_is_given_up_at_once_where_no_engine_has_ever_answered() -> None:
    async def play() -> tuple[int, float]:
        yard = Yard()
        fleet = fleet_of(yard.make, 1, MemorySink())
        replacing = asyncio.create_task(fleet.replace(lambda engine: False))

        async def refuse(self: SimEngine) -> None:
            raise EngineMisconfigured("engine broke: it could not begin: no such layer")

        yard.made[0].crash("on purpose")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SimEngine, "resume", refuse)
            with pytest.raises(EngineError, match=r"engine is not replaced: engine broke: it could not begin: no such"):
                await fleet.router.generate(request(1), floor=0)
        replacing.cancel()
        return len(yard.made), asyncio.get_running_loop().time()

    num_made, seconds = run_virtual(play())
    assert num_made == 2 and seconds == pytest.approx(BACK_OFF_S, abs=0.1)


def test_an_engine_that_joins_outside_of_training_gets_what_was_loaded_last_or_what_training_has() -> None:
    async def play() -> list[int]:
        yard, found = Yard(), list[int]()
        fleet, channel = fleet_of(yard.make, 2, MemorySink()), LocalChannel()
        await channel.publish(3, {})
        replacing = asyncio.create_task(fleet.replace(lambda engine: False))

        async def lose() -> None:
            fleet.router.lose(yard.newest("engine-0"), EngineError("found dead"))
            await asyncio.sleep(10)
            found.append(yard.newest("engine-0").version)

        await lose()
        await fleet.load(2, {})
        await lose()
        fleet.weights = channel
        await lose()
        await channel.publish(4, {"number": 4})
        await lose()
        replacing.cancel()
        return found

    assert run_virtual(play()) == [0, 2, 3, 4]


def test_an_engine_that_is_just_about_to_join_when_others_are_loaded_joins_with_that() -> None:
    async def play() -> list[int]:
        made, sink = list[SimEngine](), MemorySink()

        def make(name: str) -> SimEngine:
            made.append(SimEngine(name=name, load_s=constant(5.0)))
            return made[-1]

        fleet = fleet_of(make, 2, sink)
        replacing = asyncio.create_task(fleet.replace(lambda engine: False))
        await fleet.load(1, {})
        fleet.router.lose(made[0], EngineError("found dead"))
        await asyncio.sleep(2 * BACK_OFF_S)
        await fleet.load(2, {})
        await asyncio.sleep(10)
        replacing.cancel()
        return [event.version for event in sink.of(ReplicaJoined)]

    assert run_virtual(play()) == [2]


def test_the_weights_that_engines_start_with_are_published_like_any_other_version() -> None:
    async def play() -> None:
        channel = LocalChannel()
        assert channel.version == NOTHING
        with pytest.raises(WeightsError, match="nothing has been published yet"):
            await channel.fetch()
        await channel.publish(7, {"number": 7})
        assert await channel.fetch() == (7, {"number": 7}) and channel.version == 7
        with pytest.raises(WeightsError, match="version 7 published after 7"):
            await channel.publish(7, {"number": 7})
        await channel.publish(8, {"number": 8})
        assert await channel.fetch() == (8, {"number": 8}) and channel.version == 8

    asyncio.run(play())


def test_an_engine_that_is_being_made_when_the_run_ends_is_closed_with_the_others() -> None:
    async def play() -> list[SimEngine]:
        made, is_making, may_go_on = list[SimEngine](), threading.Event(), threading.Event()

        def make(name: str) -> SimEngine:
            if len(made) == 2:
                is_making.set()
                may_go_on.wait(5)
            made.append(SimEngine(name=name))
            return made[-1]

        fleet = Fleet(make, 2, is_queueing=True, patience_s=5.0, clock=VirtualClock(), sink=MemorySink())
        replacing = asyncio.create_task(fleet.replace(lambda engine: True))
        made[0].crash("on purpose")
        await fleet.load(1, {})
        await asyncio.to_thread(is_making.wait, 5)
        replacing.cancel()
        closing = asyncio.create_task(fleet.close())
        await asyncio.sleep(0.01)
        may_go_on.set()
        await closing
        return made

    made = asyncio.run(play())
    assert len(made) == 3 and all(engine._is_closed for engine in made)


class Picky(SimEngine):
    """Lives, and cannot have its weights for the first few times."""

    num_refused = 0

    async def load(self, version: int, weights: Weights) -> None:
        if Picky.num_refused < 1:
            Picky.num_refused += 1
            raise WeightsError("they died with whoever had staged them")
        await super().load(version, weights)


def test_a_new_engine_that_cannot_have_its_weights_is_closed_and_another_one_tries() -> None:
    async def play() -> tuple[list[SimEngine], list[str], list[str]]:
        sink, made = MemorySink(), list[SimEngine]()

        def make(name: str) -> SimEngine:
            made.append(SimEngine(name=name) if len(made) < 2 else Picky(name=name))
            return made[-1]

        fleet = fleet_of(make, 2, sink)
        replacing = asyncio.create_task(fleet.replace(lambda engine: False))
        made[0].crash("on purpose")
        await fleet.load(1, {})
        await asyncio.sleep(30)
        replacing.cancel()
        return made, [engine.name for engine in fleet.router.engines], [event.message for event in sink.of(Warned)]

    Picky.num_refused = 0
    made, serving, said = run_virtual(play())
    assert serving == ["engine-1", "engine-0"] and [engine._is_closed for engine in made[2:]] == [True, False]
    assert said == ["engine-0 could not be replaced: WeightsError: they died with whoever had staged them"]


def test_an_engine_that_dies_and_cannot_even_be_closed_is_replaced_all_the_same() -> None:
    class Stubborn(SimEngine):
        async def close(self) -> None:
            raise RuntimeError("no")

    async def play() -> tuple[list[str], list[str]]:
        sink, made = MemorySink(), list[SimEngine]()

        def make(name: str) -> SimEngine:
            made.append(Stubborn(name=name) if not made else SimEngine(name=name))
            return made[-1]

        fleet = fleet_of(make, 2, sink)
        replacing = asyncio.create_task(fleet.replace(lambda engine: False))
        made[0].crash("on purpose")
        await fleet.load(1, {})
        await asyncio.sleep(30)
        replacing.cancel()
        return [engine.name for engine in fleet.router.engines], [event.message for event in sink.of(Warned)]

    assert run_virtual(play()) == (["engine-1", "engine-0"], ["engine-0 could not be closed: RuntimeError: no"])


def test_an_engine_that_is_taken_away_while_its_replacement_is_made_does_not_come_back() -> None:
    async def play() -> tuple[list[str], list[str], bool]:
        made, may_go_on = list[SimEngine](), asyncio.Event()

        async def in_thread(make: Callable[[str], SimEngine], name: str) -> SimEngine:
            await may_go_on.wait()
            return make(name)

        def make(name: str) -> SimEngine:
            made.append(SimEngine(name=name))
            return made[-1]

        options = {"is_queueing": True, "patience_s": 5.0, "clock": VirtualClock(), "sink": MemorySink()}
        fleet = Fleet(make, 2, **options, in_thread=in_thread)  # type: ignore[arg-type]
        replacing = asyncio.create_task(fleet.replace(lambda engine: False))
        made[1].crash("on purpose")
        await fleet.load(1, {})
        await asyncio.sleep(2 * BACK_OFF_S)
        await fleet.scale(1)
        may_go_on.set()
        await asyncio.sleep(1)
        replacing.cancel()
        return fleet.names, [engine.name for engine in fleet.router.engines], made[2]._is_closed

    assert run_virtual(play()) == (["engine-0"], ["engine-0"], True)


def test_an_engine_that_is_just_being_taken_away_when_the_run_ends_is_closed() -> None:
    class Deaf(SimEngine):
        async def abort(self, key: RequestKey) -> None:
            await asyncio.sleep(1000)

    async def play() -> bool:
        made = list[SimEngine]()

        def make(name: str) -> SimEngine:
            made.append(Deaf(name=name))
            return made[-1]

        fleet = fleet_of(make, 2, MemorySink())
        asking = [asyncio.create_task(fleet.router.generate(request(number), floor=0)) for number in range(4)]
        await asyncio.sleep(0.001)
        scaling = asyncio.create_task(fleet.scale(1))
        await asyncio.sleep(0.001)
        scaling.cancel()
        await asyncio.gather(scaling, return_exceptions=True)
        await fleet.close()
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        return made[1]._is_closed

    assert run_virtual(play())


# ---- in runs, on the virtual clock -------------------------------------------------------------------------------------


def crashes(times: list[float], draw: random.Random) -> OnFleet:
    async def play(fleet: Fleet) -> None:
        for pause in times:
            await asyncio.sleep(pause)
            alive: list[Any] = [engine for engine in fleet._engines.values() if engine is not None]
            draw.choice(alive).crash("on purpose")

    return play


def simulated(world: World, on_fleet: OnFleet) -> Any:
    with unless_all_fail(world):
        return simulate(world, on_fleet=on_fleet)


@settings(max_examples=80, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    world=worlds,
    times=st.lists(st.floats(0, 8), max_size=MAX_REPLACED),
    draw=st.randoms(use_true_random=False),
)
def test_engines_that_die_at_any_moment_even_the_only_one_and_even_before_a_publication_cost_time_alone(
    world: World, times: list[float], draw: random.Random
) -> None:
    check(world, simulated(world, crashes(times, draw)))


@pytest.mark.parametrize("max_lag", [0, 1])
def test_the_only_engine_of_a_run_may_die_before_anything_is_published(max_lag: int) -> None:
    world = World(num_engines=1, max_lag=max_lag, steps=4)
    outcome = simulate(world, on_fleet=crashes([0.05], random.Random(0)))
    check(world, outcome)
    first = outcome.sink.of(WeightsLoaded)[0]
    assert first.version == 0 and [event.version for event in outcome.sink.of(ReplicaJoined)] == [0]


def test_an_engine_that_dies_before_it_could_join_is_replaced_too() -> None:
    async def play(fleet: Fleet) -> None:
        await asyncio.sleep(0.05)
        for _ in range(2):
            current: Any = fleet._engines["engine"]
            current.crash("on purpose")
            while fleet._engines["engine"] is current:
                await asyncio.sleep(0.01)

    world = World(num_engines=1, load=5.0, steps=3)
    outcome = simulate(world, on_fleet=play)
    check(world, outcome)
    assert len(outcome.engines) == 3
    assert "engine broke before it could join" in " ".join(event.message for event in outcome.sink.of(Warned))


def failing(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third transfer does not arrive, until so many have not."""
    original, calls = LocalChannel.fetch, [0, 0]

    async def fetch(self: LocalChannel) -> Publication:
        calls[0] += 1
        if calls[1] < num and (calls[0] % 3 == 1 or num > 100):
            calls[1] += 1
            raise WeightsError("version 1 was superseded")
        return await original(self)

    monkeypatch.setattr(LocalChannel, "fetch", fetch)


def test_weights_that_do_not_arrive_are_retried_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(5, monkeypatch)
    world = World(num_engines=2, steps=10)
    outcome = simulate(world)
    check(world, outcome)
    (said,) = outcome.sink.of(Warned)
    assert said.message.startswith("sync of engine-") and "superseded; it is tried again" in said.message


def test_weights_that_never_arrive_end_the_run_with_their_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(10**6, monkeypatch)
    with pytest.raises(WeightsError, match="superseded"):
        simulate(World(num_engines=1))
    assert MAX_WEIGHTS_FAILED == 5


def unreachable(monkeypatch: pytest.MonkeyPatch, is_cut_off: Callable[[SimEngine], bool]) -> None:
    """Engines that live and are asked, and to which no weights lead."""
    original = SimEngine.load

    async def load(self: SimEngine, version: int, weights: Weights) -> None:
        if is_cut_off(self):
            raise WeightsUnreachable(f"{self.name} sees nobody who has version {version}")
        await original(self, version, weights)

    monkeypatch.setattr(SimEngine, "load", load)


SLOW = {"steps": 30, "train_token_s": 0.02}
"""A run that is not over before an engine is given up."""


def test_a_replacement_that_can_never_have_its_weights_is_given_up_and_the_run_continues_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = set[SimEngine]()

    async def play(fleet: Fleet) -> None:
        engines: list[Any] = list(fleet._engines.values())
        first.update(engines)
        await asyncio.sleep(0.05)
        engines[1].crash("on purpose")

    unreachable(monkeypatch, lambda engine: engine not in first)
    world = World(num_engines=2, **SLOW)  # type: ignore[arg-type]
    outcome = simulate(world, on_fleet=play)
    check(world, outcome)
    said = [event.message for event in outcome.sink.of(Warned)]
    assert any("engine-1 does not get its weights: engine-1 sees nobody" in one for one in said)
    assert len(outcome.engines) > 3 and outcome.engines[2]._is_closed


@pytest.mark.parametrize("num_engines", [1, 2])
def test_a_replacement_that_does_not_come_in_time_ends_the_run_only_where_no_other_engine_serves(
    num_engines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, original = set[SimEngine](), SimEngine.load

    async def load(self: SimEngine, version: int, weights: Weights) -> None:
        if self not in first:
            await asyncio.sleep(1000)  # a cluster looks for room
        await original(self, version, weights)

    async def play(fleet: Fleet) -> None:
        engines: list[Any] = list(fleet._engines.values())
        first.update(engines)
        await asyncio.sleep(0.05)
        engines[-1].crash("on purpose")

    monkeypatch.setattr(SimEngine, "load", load)
    world = World(num_engines=num_engines, deadline_s=20.0, **SLOW)  # type: ignore[arg-type]
    if num_engines == 1:
        with pytest.raises(StallError, match="has waited 20 s for"):
            simulate(world, on_fleet=play)
        return
    outcome = simulate(world, on_fleet=play)
    check(world, outcome)
    said = [event.message for event in outcome.sink.of(Warned)]
    assert any("sync of engine-1 has waited 20 s for engine-1 to load version" in one for one in said)


def test_an_engine_that_no_weights_reach_any_more_is_lost_and_the_run_continues_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut_off = set[SimEngine]()

    async def play(fleet: Fleet) -> None:
        await asyncio.sleep(0.05)
        engines: list[Any] = list(fleet._engines.values())
        cut_off.add(engines[0])

    unreachable(monkeypatch, cut_off.__contains__)
    world = World(num_engines=2, **SLOW)  # type: ignore[arg-type]
    outcome = simulate(world, on_fleet=play)
    check(world, outcome)
    (left,) = outcome.sink.of(ReplicaLeft)
    assert left.engine == "engine-0" and "does not get its weights: engine-0 sees nobody" in left.why
    assert [event.engine for event in outcome.sink.of(ReplicaJoined)] == ["engine-0"]


def test_where_no_other_engine_serves_weights_that_never_arrive_end_the_run_with_their_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unreachable(monkeypatch, lambda engine: True)
    for num_engines in (1, 2):
        with pytest.raises(WeightsUnreachable, match="sees nobody who has version"):
            simulate(World(num_engines=num_engines), on_fleet=crashes([0.05], random.Random(0)))


def test_weights_that_cannot_be_reached_are_staged_again_and_loaded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dead, restaged = {3}, list[int]()
    newest = [0]

    async def restage(channel: LocalChannel) -> Weights:
        restaged.append(channel.version)
        dead.clear()
        return {}

    def is_cut_off(engine: SimEngine) -> bool:
        return newest[0] in dead

    async def fetch(channel: LocalChannel) -> Publication:
        newest[0] = channel.version
        return await original(channel)

    original = LocalChannel.fetch
    monkeypatch.setattr(LocalChannel, "fetch", fetch)
    monkeypatch.setattr(LocalChannel, "restage", restage)
    plain = simulate(World(num_engines=1))
    unreachable(monkeypatch, is_cut_off)
    outcome = simulate(World(num_engines=1))
    assert restaged == [3] and outcome.seconds == plain.seconds


@pytest.mark.parametrize("when", ["it serves", "it joins"])
def test_an_engine_that_is_set_up_wrong_is_lost_and_tried_again_while_the_run_continues_with_the_others(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, first, refused = SimEngine.load, set[SimEngine](), list[float]()

    async def load(self: SimEngine, version: int, weights: Weights) -> None:
        is_joining = self not in first
        if self.name == "engine-1" and is_joining == (when == "it joins") and not refused:
            refused.append(version)
            raise EngineMisconfigured("http://b/v1/models answered 404")
        await original(self, version, weights)

    async def play(fleet: Fleet) -> None:
        engines: list[Any] = list(fleet._engines.values())
        first.update(engines)
        await asyncio.sleep(0.5)
        if when == "it joins":
            engines[1].crash("the server was restarted")

    monkeypatch.setattr(SimEngine, "load", load)
    world = World(num_engines=2, **SLOW)  # type: ignore[arg-type]
    outcome = simulate(world, on_fleet=play)
    check(world, outcome)
    assert refused and [event.engine for event in outcome.sink.of(ReplicaJoined)] == ["engine-1"]
    said = [event.message for event in outcome.sink.of(Warned)] + [event.why for event in outcome.sink.of(ReplicaLeft)]
    assert any("http://b/v1/models answered 404" in one for one in said)


class SlowDiary(Diary):
    async def keep(self, *arguments: Any) -> None:
        await asyncio.sleep(10)
        await super().keep(*arguments)


def test_an_engine_that_is_adopted_during_the_first_checkpoint_loads_every_version_once() -> None:
    async def play(fleet: Fleet) -> None:
        await asyncio.sleep(1)
        fleet.router.lose(fleet.router.engines[1], EngineError("found dead"))

    world = World(num_engines=2)
    outcome = simulate(world, on_fleet=play, keeper=SlowDiary())
    check(world, outcome)
    assert [event.engine for event in outcome.sink.of(ReplicaJoined)] == ["engine-1"]
    loaded = [event.version for event in outcome.sink.of(WeightsLoaded) if event.engine == "engine-1"]
    assert loaded == sorted(set(loaded))


# ---- added and taken away ----------------------------------------------------------------------------------------------


def test_engines_are_added_and_removed_during_a_run_and_nothing_is_lost() -> None:
    done: list[tuple[list[str], list[str]]] = []

    async def play(fleet: Fleet) -> None:
        for num in (3, 1, 2, 2):
            await asyncio.sleep(0.5)
            done.append(await fleet.scale(num))
            assert len(fleet.router.engines) == len(fleet.names) == num

    world = World(num_engines=1, steps=30, max_lag=2, load=0.5, slots=3)
    outcome = simulate(world, on_fleet=play)
    check(world, outcome)
    assert done == [
        (["engine-0", "engine-1"], []),
        ([], ["engine-1", "engine-0"]),
        (["engine-0"], []),
        ([], []),
    ]
    assert [event.why for event in outcome.sink.of(ReplicaLeft)] == ["it was drained"] * 2


@settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    world=worlds,
    script=st.lists(st.tuples(st.floats(0, 3), st.integers(0, 4)), max_size=5),
    draw=st.randoms(use_true_random=False),
)
def test_at_any_moment_of_any_world_engines_may_come_go_and_die(
    world: World, script: list[tuple[float, int]], draw: random.Random
) -> None:
    world = replace(world, lockstep=False)

    async def play(fleet: Fleet) -> None:
        for pause, num in script:
            await asyncio.sleep(pause)
            if num:
                await fleet.scale(num)
            else:
                alive: list[Any] = [engine for engine in fleet._engines.values() if engine is not None]
                draw.choice(alive).crash("on purpose")

    check(world, simulated(world, play))


@pytest.mark.parametrize("is_training", [True, False])
def test_a_new_engine_that_never_serves_is_the_end_of_that_scale_and_the_next_one_is_carried_out(
    is_training: bool,
) -> None:
    async def play() -> tuple[str, float, list[SimEngine], list[str]]:
        sink, made = MemorySink(), list[SimEngine]()
        fleet = fleet_of(Homeless.of_two(made), 2, sink)
        replacing = asyncio.create_task(fleet.replace(adopting(fleet) if is_training else lambda engine: False))
        with pytest.raises(EngineError) as raised:
            await fleet.scale(4)
        seconds = asyncio.get_running_loop().time()
        assert fleet.names == ["engine-0", "engine-1"] and await fleet.scale(1) == ([], ["engine-1"])
        await asyncio.sleep(10_000)
        replacing.cancel()
        return str(raised.value), seconds, made, [event.message for event in sink.of(Warned)]

    error, seconds, made, said = run_virtual(play())
    assert error == (
        "engine-2 could not be started: engine-2 broke: no room. It is not tried again, and the run continues with engine-0, "
        "engine-1: ask for fewer engines, or make room for more and ask again"
    )
    assert seconds == pytest.approx(300), "nor is another one tried, which would fail as well"
    assert len(made) == 3 and made[2]._is_closed and "engine-2 could not be started: engine-2 broke: no room" in said


def test_engines_that_training_has_taken_in_and_not_seen_join_are_replaced_or_given_up_when_it_is_over() -> None:
    async def play() -> tuple[list[str], bool, str]:
        yard, is_over = Yard(), False
        fleet = fleet_of(yard.make, 2, MemorySink())
        adopted = list[Any]()

        def adopt(engine: Any) -> bool:
            adopted.append(engine)
            return not is_over

        replacing = asyncio.create_task(fleet.replace(adopt))
        yard.made[0].crash("on purpose")
        fleet.router.lose(yard.made[0], EngineError("found dead"))
        scaling = asyncio.create_task(fleet.scale(3))
        await asyncio.sleep(10)
        assert len(yard.made) == 4 and not scaling.done()
        is_over = True
        for engine in list(adopted):
            fleet.router.report_lost(engine, "training was over before it could join")
        with pytest.raises(EngineError) as raised:
            await scaling
        await asyncio.sleep(10)
        replacing.cancel()
        serving = [engine.name for engine in fleet.router.engines]
        return serving, all(engine._is_closed for engine in yard.made[2:4]), str(raised.value)

    serving, are_closed, error = run_virtual(play())
    assert serving == ["engine-1", "engine-0"] and are_closed
    assert error.startswith("engine-2 could not be started: training was over before it could join. ")


def test_what_cannot_be_scaled_is_refused_and_says_why(tmp_path: Path) -> None:
    async def play() -> None:
        yard = Yard(fails=lambda number: number == 4)
        fleet = fleet_of(yard.make, 2, MemorySink())
        for num in (0, 65):
            with pytest.raises(ConfigError, match=f"engines={num}: expected a number from 1 to 64"):
                await fleet.scale(num)
        with pytest.raises(EngineError, match="engine-3 could not be started"):
            await fleet.scale(4)
        assert fleet.names == ["engine-0", "engine-1", "engine-2"] and len(fleet.router.engines) == 3
        with pytest.raises(ConfigError, match="max_lag = 0"):
            await fleet_of(yard.make, 2, MemorySink(), is_queueing=False).scale(3)
        http = EngineConfig(
            kind="http", http=HttpConfig(urls=("http://127.0.0.1:1",), flavour="millstream", folder=str(tmp_path))
        )
        site = LocalBackend(RunConfig(model=ModelConfig(tiny=TinyConfig()), engine=http), Places())
        clock, sink = VirtualClock(), MemorySink()
        await site.open(BackendContext(model=make("qwen3"), tokenizer=None, folder=tmp_path, clock=clock, sink=sink))
        servers = build_fleet(site, http, is_queueing=True, clock=clock, sink=sink)
        with pytest.raises(ConfigError, match="servers that others have started"):
            await servers.scale(2)

    run_virtual(play())


# ---- the socket --------------------------------------------------------------------------------------------------------


def folder_in(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.toml").touch()
    return path


def socket_of(folder: Path) -> Path:
    return Path(json.loads((folder / "control.json").read_bytes())["folder"]) / "socket"


async def served(folder: Path, ask: Callable[[], Any]) -> Any:
    async def carry(question: control.Question) -> control.ControlReply:
        if isinstance(question, ScaleRequest) and question.engines == 13:
            raise ConfigError("not thirteen")
        if isinstance(question, ScaleRequest) and question.engines == 14:
            raise EngineError("engine-3 could not be started: no room")
        now = RunStatus(
            version=1, engines=[], requests_waiting=0, groups_in_flight=0, budget=0, rows_in_store=0, waits=[]
        )
        return ScaleResult(joined=["a"], left=[], engines=["a"]) if isinstance(question, ScaleRequest) else now

    door = Control(folder, carry)
    await door.open()
    try:
        return await asyncio.to_thread(ask)
    finally:
        await door.close()


@pytest.mark.parametrize("name", ["run", "r" * 90 + "/" + "u" * 90])
def test_a_run_can_be_asked_through_a_socket_that_is_its_owners_alone_however_long_its_path(
    tmp_path: Path, name: str
) -> None:
    folder = folder_in(tmp_path / name)
    (folder / "control.json").touch()  # a run that was killed has left it behind

    def ask() -> tuple[ScaleResult, RunStatus]:
        mode = socket_of(folder).stat().st_mode
        assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600
        with pytest.raises(ConfigError, match="not thirteen"):
            control.ask_run(folder, ScaleRequest(engines=13))
        return control.ask_run(folder, ScaleRequest(engines=2)), control.ask_run(folder, StatusRequest())

    scaled, now = asyncio.run(served(folder, ask))
    assert scaled.joined == ["a"] and now.version == 1
    assert not (folder / "control.json").exists()


def test_the_folder_of_an_active_run_can_be_copied_and_the_copy_is_not_that_run(tmp_path: Path) -> None:
    folder = folder_in(tmp_path / "run")

    def ask() -> Path:
        copy = shutil.copytree(folder, tmp_path / "copy")
        with pytest.raises(ConfigError, match="is not running"):
            control.ask_run(copy, StatusRequest())
        folder.rename(tmp_path / "moved")
        assert control.ask_run(tmp_path / "moved", StatusRequest()).version == 1
        (tmp_path / "moved").rename(folder)
        return socket_of(folder)

    assert not asyncio.run(served(folder, ask)).parent.exists()


def test_the_types_in_json_output_do_not_change_with_the_names_of_classes() -> None:
    replies = [
        ScaleResult(joined=[], left=[], engines=["a"]),
        ControlError(message="no"),
        RunStatus(version=1, engines=[], requests_waiting=0, groups_in_flight=0, budget=0, rows_in_store=0, waits=[]),
    ]
    assert [msgspec.to_builtins(reply)["type"] for reply in replies] == ["Scaled", "Refused", "Now"]


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n\r\n", frame({"type": "Scale", "engines": "many"}), frame(["x"]), b"\xff" * 9]
)
def test_whatever_comes_through_the_socket_is_refused_and_the_next_is_answered(tmp_path: Path, said: bytes) -> None:
    folder = folder_in(tmp_path / "run")

    def ask() -> None:
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(socket_of(folder)))
            line.sendall(said)
            line.shutdown(socket.SHUT_WR)
            answer = line.recv(1 << 16)
        if answer:
            assert isinstance(msgspec.msgpack.decode(answer[4:], type=control.ControlReply), ControlError)
        assert control.ask_run(folder, StatusRequest()).version == 1

    asyncio.run(served(folder, ask))


def test_engines_that_cannot_be_started_are_an_error_with_the_reason(tmp_path: Path) -> None:
    folder = folder_in(tmp_path / "run")
    result = asyncio.run(served(folder, lambda: CliRunner().invoke(app, ["scale", str(folder), "engines=14"])))
    assert result.exit_code == 1 and "engine-3 could not be started: no room" in result.output


def test_a_run_that_is_not_there_is_said_to_be_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run folder"):
        control.ask_run(tmp_path, StatusRequest())
    folder = folder_in(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"is not running. To resume it:\n  millstream train --resume"):
        control.ask_run(folder, StatusRequest())
    program = "import fcntl,sys;f=open(sys.argv[1],'wb');fcntl.lockf(f,2);print(1,flush=True);sys.stdin.read()"
    words = [sys.executable, "-c", program, str(folder / ".lock")]
    holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline()
    with pytest.raises(ConfigError, match="is starting or ending"):
        control.ask_run(folder, StatusRequest())
    holder.communicate()
    (folder / "summary.json").touch()
    result = CliRunner().invoke(app, ["scale", str(folder), "engines=3"])
    assert result.exit_code == 1 and "is finished" in result.output
    result = CliRunner().invoke(app, ["scale", str(folder), "engine=3"])
    assert result.exit_code == 1 and "expected engines=NUMBER" in result.output


def test_a_run_that_cannot_have_its_socket_warns_and_continues(tmp_path: Path) -> None:
    (tmp_path / "run/control.json/in the way").mkdir(parents=True)
    sink, changes = MemorySink(), {"pipeline.steps": 1, "data.holdout": 0, "run_dir": tmp_path / "run"}
    overrides = [f"{key}={value}" for key, value in (SETTINGS | changes).items()]
    train(load(recipe_in(tmp_path), RunConfig, overrides), sinks=[sink])
    assert any("cannot be asked or scaled" in event.message for event in sink.of(Warned))
    assert sink.of(RunEnded)[0].outcome == "finished"


# ---- for real ----------------------------------------------------------------------------------------------------------


def asked(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.output


def test_a_run_at_work_is_scaled_up_and_down_and_its_audit_is_clean(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start_command(command(run_dir, {"pipeline.steps": 100000}))
    until(lambda: steps_of(run_dir) >= 2, process)
    assert asked("scale", str(run_dir), "engines=3").splitlines() == [
        "engine-0 has joined",
        "engine-1 has joined",
        "engines: engine, engine-0, engine-1",
    ]
    shown = asked("status", str(run_dir))
    assert shown.startswith("version ") and "engine-1: version" in shown and "groups in flight" in shown
    assert "engine-1 has left" in asked("scale", str(run_dir), "engines=1")
    assert "nothing to do" in asked("scale", str(run_dir), "engines=1")
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 130, output
    events = list(read_events(run_dir / "events.jsonl"))
    assert [event.engine for event in events if isinstance(event, ReplicaJoined)] == ["engine-0", "engine-1"]
    assert [event.engine for event in events if isinstance(event, ReplicaLeft)] == ["engine-1", "engine-0"]
    assert_clean(run_dir)
    assert not (run_dir / "control.json").exists()


def test_an_engine_that_is_lost_while_the_model_of_a_resumed_run_is_saved_comes_back_with_the_last_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed in its last evaluation: nothing is published any more."""
    changes = {"pipeline.steps": 2, "data.holdout": 8, "engine.replicas": 2, "run_dir": tmp_path / "run"}
    config = load(recipe_in(tmp_path), RunConfig, [f"{key}={value}" for key, value in (SETTINGS | changes).items()])

    async def skipped(evaluator: Evaluator) -> None:
        """No evaluation."""

    async def killed(evaluator: Evaluator) -> None:
        raise EngineError("killed")

    with monkeypatch.context() as patched, pytest.raises(EngineError, match="killed"):
        patched.setattr(Evaluator, "before", skipped)
        patched.setattr(Evaluator, "after", killed)
        train(config)
    sink, fleets, loop, has_joined = MemorySink(), list[Fleet](), list[Any](), threading.Event()

    def build(*arguments: Any, **options: Any) -> Fleet:
        loop.append(asyncio.get_running_loop())
        fleets.append(build_fleet(*arguments, **options))
        return fleets[0]

    def lose() -> None:
        router = fleets[0].router
        router.listeners.append(lambda change: has_joined.set() if change.is_serving else None)
        router.lose(router.engines[0], EngineError("found dead"))

    save = run._write_model

    def save_slowly(one: Any, learner: Any) -> None:
        loop[0].call_soon_threadsafe(lose)
        assert has_joined.wait(60)
        save(one, learner)

    monkeypatch.setattr(run, "build_fleet", build)
    monkeypatch.setattr(run, "_write_model", save_slowly)
    resume(tmp_path / "run", sinks=[sink])
    assert [event.version for event in sink.of(ReplicaJoined)] == [2]
    assert {event.name: event.version for event in sink.of(Evaluated)} == {"sampled after": 2, "greedy after": 2}


@pytest.mark.usefixtures("own_warm_process")
def test_a_run_whose_only_engine_is_killed_continues_with_another(tmp_path: Path) -> None:
    """Twice: before anything is published, while rollouts are far from their end, and later."""
    run_dir = tmp_path / "run"
    process = start_command(command(run_dir, {"engine.process": "true", "pipeline.steps": 25}))
    events_file = run_dir / "events.jsonl"
    until(lambda: events_file.exists() and b"rollout_started" in events_file.read_bytes(), process)
    until(lambda: bool(workers(process.pid)), process)
    os.kill(workers(process.pid)[0], signal.SIGKILL)
    until(lambda: steps_of(run_dir) >= 5, process)
    os.kill(workers(process.pid)[-1], signal.SIGKILL)  # it was started after the learner
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    events = list(read_events(run_dir / "events.jsonl"))
    assert len([event for event in events if isinstance(event, ReplicaJoined)]) == 2, output
    assert isinstance(events[-1], RunEnded) and events[-1].version == 25
    assert_clean(run_dir)
