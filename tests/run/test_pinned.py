"""An evaluation beside training is of one version, whatever is loaded, lost or joined meanwhile. On the virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec import structs

from millstream.clock import VirtualClock, run_virtual
from millstream.config import load
from millstream.env import Context
from millstream.errors import EngineError, PinLost
from millstream.events import Evaluated, EvaluationStarted, Event, ReplicaLeft, Warned, WeightsLoaded
from millstream.events.sinks import MemorySink
from millstream.pipeline.pipeline import Pipeline
from millstream.pipeline.waits import Waits
from millstream.run.best import BestCheckpoint
from millstream.run.config import EvaluationConfig, RunConfig
from millstream.run.evaluate import Evaluator
from millstream.run.prepare_evaluation import PreparedEvaluation
from millstream.serving.fleet import Fleet
from millstream.serving.queue import RequestQueue, WaitingRequest
from millstream.serving.request import Pin, RoutedRequest
from millstream.serving.router import Router
from millstream.sim.draws import constant, lognormal
from millstream.sim.engine import SimEngine
from millstream.types import Sampling, Task
from support.sim_requests import request
from support.simulated import Outcome, World, check, configs, simulate


class TwoTurns:
    """Keeps the versions that sampled each rollout."""

    def __init__(self) -> None:
        self.versions: list[set[int]] = []

    async def rollout(self, context: Context) -> float:
        first = await context.generate([1, 2])
        await asyncio.sleep(random.Random(context.seed).random())
        second = await context.generate([3])
        self.versions.append({*first.versions, *second.versions})
        return float(len(first.tokens) % 2)


def table(environment: Any, **keys: Any) -> PreparedEvaluation:
    config, tasks = EvaluationConfig(**keys), tuple(Task(id=str(number), prompt="?") for number in range(6))
    sampling = Sampling(max_tokens=200)
    return PreparedEvaluation(config=config, tasks=tasks, environment=environment, sampling=sampling)


class Beside:
    """The evaluator of a simulated run, made when there is a pipeline."""

    def __init__(self, world: World, tables: Sequence[PreparedEvaluation]) -> None:
        self._world = world
        self._prepared: Any = SimpleNamespace(
            evaluations=tables,
            environment=None,
            config=SimpleNamespace(
                seed=0, rollout=SimpleNamespace(max_parts=1, timeout_s=1e6), pipeline=configs(world)[0]
            ),
            text=SimpleNamespace(decode=str),
        )

    def attach(self, pipeline: Pipeline) -> None:
        sink = pipeline._parts.sink
        self._evaluator = Evaluator(self._prepared, pipeline.router, VirtualClock(), sink, pipeline.waits)

    async def after_step(self, version: int) -> None:
        await self._evaluator.after_step(version)


def check_pinned(events: Sequence[Event]) -> int:
    """What the audit checks, from the events alone. Returns the number of evaluations."""
    running, num = dict[str, EvaluationStarted](), 0
    for event in events:
        match event:
            case EvaluationStarted():
                running[event.name] = event
            case Evaluated():
                assert event.version == running.pop(event.name).version
                num += 1
            case ReplicaLeft():  # another one of this name may come
                for name, one in running.items():
                    running[name] = structs.replace(one, engines=tuple({*one.engines} - {event.engine}))
            case WeightsLoaded():
                for one in running.values():
                    assert event.engine not in one.engines, f"{event} during {one}"
    return num


def simulated(world: World, *, is_losing: bool = False) -> tuple[Outcome, list[set[int]]]:
    environment = TwoTurns()
    tables = [table(environment, every_steps=1, samples=2), table(environment, name="other", every_steps=2)]
    beside, draw = Beside(world, tables), random.Random(world.seed)

    async def lose_some(fleet: Fleet) -> None:
        for _ in range(3):  # more than 5 of one name are not replaced
            await asyncio.sleep(2 * draw.random())
            engine = draw.choice(fleet.router.engines) if fleet.router.engines else None
            if isinstance(engine, SimEngine):
                engine.crash("it was killed")

    outcome = simulate(
        world,
        after_step=beside.after_step,
        on_pipeline=beside.attach,
        on_fleet=lose_some if is_losing else None,
    )
    return outcome, environment.versions


WORLDS = st.builds(
    World,
    steps=st.integers(3, 6),
    max_lag=st.sampled_from([0.5, 1.0, 3.0]),
    num_engines=st.integers(1, 5),
    slots=st.integers(2, 8),
    load=st.sampled_from([0.0, 0.1, 2.0]),
    latency=st.sampled_from([0.0, 1.0]),
    tail=st.sampled_from([0.5, 1.5]),
    train_token_s=st.sampled_from([1e-5, 1e-3]),
    overdue=st.sampled_from(["wait", "restart"]),
    lockstep=st.booleans(),
    seed=st.integers(0, 1000),
)


@settings(max_examples=30, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(world=WORLDS)
def test_an_evaluation_beside_training_is_of_one_version_whatever_is_loaded_meanwhile(world: World) -> None:
    outcome, versions = simulated(world)
    check(world, outcome)
    assert check_pinned(outcome.sink.events) >= 1
    assert all(len(one) == 1 for one in versions), "a rollout of two versions"
    for event in outcome.sink.of(Evaluated):
        assert event.version is not None and event.name.endswith(f"step {event.version}")


@settings(max_examples=15, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(world=WORLDS)
def test_an_evaluation_whose_engines_are_lost_starts_again_on_one_version(world: World) -> None:
    outcome, _ = simulated(world, is_losing=True)
    assert check_pinned(outcome.sink.events) >= 0
    assert not outcome.pipeline.router.pins, "a pin is left"


def test_evaluations_of_two_tables_that_are_due_together_are_of_the_same_version() -> None:
    world, environment = World(steps=5, max_lag=3.0, num_engines=2, load=0.5), TwoTurns()
    beside = Beside(world, [table(environment, every_steps=2), table(environment, name="other", every_steps=2)])
    outcome = simulate(world, after_step=beside.after_step, on_pipeline=beside.attach)
    found = {event.name: event.version for event in outcome.sink.of(Evaluated)}
    assert found["other step 2"] == found["step 2"] == 2


def test_there_is_a_checkpoint_of_every_version_that_is_evaluated_whatever_the_engines_skip(tmp_path: Path) -> None:
    """Weights take longer to load than a step does: engines do not get every version."""
    (tmp_path / "run.toml").write_text('[model.tiny]\n[data]\ntoy = "sort_digits"\n[evaluation]\nevery_steps = 4')
    best = BestCheckpoint(load(tmp_path / "run.toml", RunConfig, ["checkpoint.keep_best=pass@1"]))
    world, due = World(steps=24, max_lag=6.0, num_engines=2, load=3.0, mean_tokens=10.0, tail=0.1), set[int]()
    beside = Beside(world, [table(TwoTurns(), every_steps=4)])

    async def after_step(version: int) -> None:
        if best.is_due(version):  # asked at the same moment for a checkpoint
            due.add(version)
        await beside.after_step(version)

    def attach(pipeline: Pipeline) -> None:
        beside.attach(pipeline)
        best.is_awaited = lambda: beside._evaluator.is_awaited("held_out")

    outcome = simulate(world, after_step=after_step, on_pipeline=attach)
    evaluated = {event.version for event in outcome.sink.of(Evaluated)}
    assert any(version is not None and version % 4 for version in evaluated), "no version was skipped"
    assert evaluated <= due and len(due) < 24


def test_training_with_one_engine_continues_up_to_the_lag_bound_while_that_is_pinned() -> None:
    """The engine keeps version 1 for the evaluation; the learner makes the steps that the bound allows, and then waits."""
    environment = TwoTurns()
    world = World(steps=12, max_lag=3.0, mean_tokens=10.0, tail=0.1)
    beside = Beside(world, [table(environment, every_steps=1, samples=64)])
    outcome = simulate(world, after_step=beside.after_step, on_pipeline=beside.attach)
    check(world, outcome)
    events = outcome.sink.events
    first = next(event for event in events if isinstance(event, Evaluated))
    during = [event for event in events if isinstance(event, WeightsLoaded) and event.at < first.at]
    assert [event.version for event in during] == [1]
    assert any("is still running" in event.message for event in outcome.sink.of(Warned))
    stepped = [event.at for event in events if type(event).__name__ == "Stepped"]
    assert sum(at < first.at for at in stepped) >= 3


def test_an_evaluation_of_a_run_that_is_stopped_is_cancelled_and_keeps_no_engine() -> None:
    world, environment, pipelines = World(steps=50, max_lag=1.0), TwoTurns(), list[Pipeline]()
    beside = Beside(world, [table(environment, every_steps=2, samples=2000)])

    def attach(pipeline: Pipeline) -> None:
        pipelines.append(pipeline)
        beside.attach(pipeline)

    async def stop_then_evaluate(version: int) -> None:
        if version == 2:
            asyncio.get_running_loop().call_later(1.0, pipelines[0].stop)
        await beside.after_step(version)

    outcome = simulate(world, after_step=stop_then_evaluate, on_pipeline=attach)
    assert outcome.sink.of(EvaluationStarted) and not outcome.sink.of(Evaluated)
    assert not outcome.pipeline.router.pins and not outcome.pipeline.waits.active()
    assert {one.version for one in outcome.engines} == {outcome.pipeline.admission.version}


# ---- the pins themselves -------------------------------------------------------------------------------------------------


def engine(name: str, version: int = 0) -> SimEngine:
    return SimEngine(name=name, slots=4, version=version, num_tokens=constant(20), load_s=constant(1.0))


def test_a_version_that_is_waited_for_is_pinned_when_its_load_ends_and_not_while_it_loads() -> None:
    async def play() -> None:
        one, other = engine("one"), engine("other")
        router = Router([one, other])
        taking = asyncio.create_task(router.pins.take(1, in_training=True))
        with router.pins.loading(one):
            await one.load(1, {})
            router.dispatch()
            await asyncio.sleep(0)
            assert not taking.done()
        pin = await taking
        assert (pin.version, pin.engines) == (1, {"one"})
        assert router.pins.is_pinned(one) and not router.pins.is_pinned(other)
        found = await router.generate(request(0), floor=1, pin=pin)
        assert {*found.versions} == {1}
        router.pins.release(pin)
        assert not router.pins.is_pinned(one)

    run_virtual(play())


def test_requests_of_a_pin_fail_when_its_last_engine_is_lost_and_other_requests_continue() -> None:
    async def play() -> None:
        one, other = engine("one", 1), engine("other")
        router = Router([one, other])
        pin = await router.pins.take(1, in_training=True)
        pinned = [asyncio.create_task(router.generate(request(n), floor=1, pin=pin)) for n in range(20)]
        plain = asyncio.create_task(router.generate(request(99), floor=0))
        await asyncio.sleep(0.05)
        one.crash("it was killed")
        for task in pinned:
            with pytest.raises(PinLost, match="no engine with version 1 is left: one: "):
                await task
        assert (await plain).tokens
        router.pins.release(pin)

    run_virtual(play())


def test_a_pin_is_not_waited_for_where_no_engine_will_come() -> None:
    async def play() -> None:
        router = Router([], patience_s=5.0)
        with pytest.raises(EngineError, match="there has been no engine for 5 s"):
            await router.pins.take(0, in_training=False)

    run_virtual(play())


def test_a_pin_whose_taker_is_cancelled_is_not_left() -> None:
    async def play() -> None:
        router = Router([engine("one")])
        for _ in range(2):
            taking = asyncio.create_task(router.pins.take(5, in_training=True))
            await asyncio.sleep(0)
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
        router.dispatch()
        assert not router.pins and not router.pins.num_waiting

    run_virtual(play())


def test_requests_that_wait_for_a_pinned_engine_are_not_looked_at_one_by_one() -> None:
    async def play() -> None:
        queue, pins, asked = RequestQueue(), [Pin(1, ["one"]), Pin(1, ["other"])], list[Pin | None]()
        replica: Any = object()

        def push(number: int, pin: Pin | None) -> None:
            routed = RoutedRequest(request(number), 1, pin)
            waiting = WaitingRequest(routed, asyncio.get_running_loop().create_future())
            queue.push(waiting, (0, 0) if pin is None else None)

        def has_room_for(*able: Pin | None) -> Callable[[RoutedRequest], Any]:
            def choose(routed: RoutedRequest) -> Any:
                asked.append(routed.pin)
                return replica if routed.pin in able else None

            return choose

        for number in range(1000):
            push(-1 - number, pins[number % 2])
        for number in range(20):
            push(number, None)
            found = queue.pop(has_room_for(None), lambda: True)
            assert found is not None and found[0].routed.pin is None
            assert queue.pop(has_room_for(None), lambda: True) is None, "no pinned engine has room"
        assert len(asked) < 100
        turns = [queue.pop(has_room_for(*pins), lambda: True) for _ in range(1000)]
        assert [found[0].routed.pin for found in turns if found] == 500 * pins, "they take turns"
        assert not queue and queue.pop(has_room_for(*pins), lambda: True) is None

    run_virtual(play())


def test_at_an_end_all_engines_serve_the_evaluation_and_beside_training_a_quarter() -> None:
    async def play() -> None:
        router = Router([engine(f"engine-{number}") for number in range(8)])
        everything = await router.pins.take(0, in_training=False)
        some = await router.pins.take(0, in_training=True)
        assert (len(everything.engines), len(some.engines)) == (8, 2)

    run_virtual(play())


class Crowd:
    """Counts its rollouts that run at the same time."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0

    async def rollout(self, context: Context) -> float:
        self.now += 1
        self.most = max(self.most, self.now)
        await context.generate([1, 2])
        self.now -= 1
        return 1.0


@pytest.mark.parametrize(("in_training", "most"), [(True, 8), (False, 32)])
def test_an_evaluation_starts_as_many_rollouts_at_a_time_as_its_engines_have_slots(
    in_training: bool, most: int
) -> None:
    """Of 8 engines with 4 slots, 2 are pinned beside training: those that wait for a slot have not begun, nor their limits."""
    environment, world = Crowd(), World(steps=4, max_lag=1.0)
    beside = Beside(world, [table(environment, every_steps=1, samples=20, decoding="sampled")])

    async def play() -> None:
        clock, sink = VirtualClock(), MemorySink()
        router = Router([engine(f"engine-{number}", 1) for number in range(8)])
        waits = Waits(clock=clock, sink=sink, stall_s=30.0, deadline_s=60.0)
        evaluator = Evaluator(beside._prepared, router, clock, sink, waits)
        await (evaluator.after_step(1) if in_training else evaluator.before())
        assert len(sink.of(Evaluated)) == 1 and environment.most == most

    run_virtual(play())


def test_an_evaluation_has_scores_of_k_samples_and_fails_no_rollout() -> None:
    clock, sink, environment = VirtualClock(), MemorySink(), TwoTurns()
    rollout = SimpleNamespace(max_parts=1, timeout_s=1e6)
    one = table(environment, samples=4, name="mine", pass_reward=1.0)
    prepared: Any = SimpleNamespace(
        evaluations=[one],
        environment=environment,
        config=SimpleNamespace(seed=0, rollout=rollout),
        text=SimpleNamespace(decode=str),
    )

    async def play() -> None:
        waits = Waits(clock=clock, sink=sink, stall_s=30.0, deadline_s=60.0)
        router = Router([SimEngine(num_tokens=lognormal(20, 1.0))])
        found = await Evaluator(prepared, router, clock, sink, waits).before()
        sampled, greedy = (evaluation.result for evaluation in found)
        assert (sampled.name, greedy.name) == ("mine sampled before", "mine greedy before")
        assert (sampled.num_samples, greedy.num_samples, sampled.num_tasks) == (4, 1, 6)
        assert list(sampled.scores) == ["pass@1", "pass@2", "pass@4", "avg@4"] and list(greedy.scores) == [
            "pass@1",
            "avg@1",
        ]
        assert sampled.scores["pass@1"].value <= sampled.scores["pass@4"].value
        assert len(found[0].samples) == 24 and [len(rewards) for rewards in found[0].rewards()] == [4] * 6

    run_virtual(play())
