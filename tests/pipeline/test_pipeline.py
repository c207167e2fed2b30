"""What becomes of groups: failures, filters, the end of the data, and the traces they leave."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs

from millstream.engine import OnSampled
from millstream.env import Context
from millstream.errors import EngineError, MillstreamError, StallError
from millstream.events import (
    GroupAdmitted,
    GroupLeft,
    GroupTaken,
    RolloutEnded,
    RolloutFailed,
    Span,
    Stalled,
    Status,
    Stepped,
    decode_event,
)
from millstream.pipeline.pipeline import Pipeline
from millstream.sim.draws import constant, uniform
from millstream.sim.engine import SimEngine
from millstream.sim.environment import SimEnvironment
from millstream.sim.learner import SimLearner
from millstream.types import Completion, Fate, Floats, Request, TrainRow, Weights
from support.simulated import World, check, simulate

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("max_lag", [0, 0.5, 2])
def test_the_same_seed_gives_the_same_events_byte_for_byte(max_lag: float) -> None:
    """The golden traces are part of the contract: a refactoring may not change them."""
    world = World(
        steps=4, group_size=3, max_lag=max_lag, num_engines=2, num_turns=2, latency=0.5, failure=0.1, load=1.0
    )
    trace = simulate(world, num_tokens=uniform(1, 50)).sink.trace()
    assert trace == simulate(world, num_tokens=uniform(1, 50)).sink.trace()
    golden = GOLDEN / f"max_lag_{max_lag}.jsonl"
    assert trace == golden.read_bytes(), f"the trace differs from {golden}; to accept: see CONTRIBUTING.md"


def test_another_seed_gives_another_trace() -> None:
    assert simulate(World(seed=1)).sink.trace() != simulate(World(seed=2)).sink.trace()


def test_events_survive_their_encoding() -> None:
    sink = simulate(World(failure=0.2)).sink
    assert [decode_event(line) for line in sink.trace().splitlines()] == sink.events


class FailsFor:
    """An environment in which some members fail, always or only at first."""

    def __init__(self, members: set[int], *, attempts: int = 1_000) -> None:
        self.members, self.attempts = members, attempts
        self.tries: dict[tuple[str, int], int] = {}

    async def rollout(self, context: Context) -> float:
        await context.generate([1, 2])
        member = context._key.member  # type: ignore[attr-defined]
        tries = self.tries[context.task.id, member] = self.tries.get((context.task.id, member), 0) + 1
        if member in self.members and tries <= self.attempts:
            raise RuntimeError("the world broke")
        return float(member % 2)


def test_a_failed_member_is_retried_within_its_budget() -> None:
    world = World(group_size=4, retries=1)
    outcome = simulate(world, environment=FailsFor({0}, attempts=1))
    check(world, outcome)
    assert all(taken.num_rollouts == 4 for taken in outcome.sink.of(GroupTaken))
    failures = outcome.sink.of(RolloutFailed)
    assert failures and not any(failed.is_final for failed in failures)
    assert {ended.attempt for ended in outcome.sink.of(RolloutEnded) if ended.member == 0} == {1}


def test_past_its_retries_a_member_is_left_out_and_its_group_goes_on() -> None:
    world = World(group_size=4, retries=1)
    outcome = simulate(world, environment=FailsFor({3}))
    check(world, outcome)
    assert all(taken.num_rollouts == 3 for taken in outcome.sink.of(GroupTaken))
    final = [failed for failed in outcome.sink.of(RolloutFailed) if failed.is_final]
    assert {failed.message for failed in final} == {"the world broke"}


def test_when_every_rollout_fails_the_run_ends_at_once_and_says_why() -> None:
    with pytest.raises(MillstreamError, match=r"8 groups in a row failed.*RuntimeError: the world broke"):
        simulate(World(group_size=2), environment=FailsFor({0, 1}))


def test_a_rollout_that_never_ends_is_a_failed_rollout() -> None:
    class Hangs:
        async def rollout(self, context: Context) -> float:
            await context.generate([1])
            if context._key.member == 0:  # type: ignore[attr-defined]
                await asyncio.sleep(math.inf)
            return float(context._key.member % 2)  # type: ignore[attr-defined]

    outcome = simulate(World(group_size=4, retries=0), environment=Hangs())
    assert all(taken.num_rollouts == 3 for taken in outcome.sink.of(GroupTaken))
    assert {failed.error for failed in outcome.sink.of(RolloutFailed)} == {"RolloutTimeout"}


def test_an_environment_that_never_generates_is_told_so() -> None:
    class Silent:
        async def rollout(self, context: Context) -> float:
            return 1.0

    with pytest.raises(MillstreamError, match=r"call context\.generate"):
        simulate(World(), environment=Silent())


def test_an_environment_that_is_cancelled_from_inside_fails_its_rollout_and_hangs_nothing() -> None:
    class Cancelled(FailsFor):
        async def rollout(self, context: Context) -> float:
            await context.generate([1])
            if context._key.member == 0:  # type: ignore[attr-defined]
                raise asyncio.CancelledError
            return float(context._key.member % 2)  # type: ignore[attr-defined]

    for max_lag in (0, 1):
        outcome = simulate(World(group_size=4, max_lag=max_lag, retries=0), environment=Cancelled(set()))
        assert all(taken.num_rollouts == 3 for taken in outcome.sink.of(GroupTaken))


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_finite_number_is_a_failed_rollout_by_name(reward: float) -> None:
    class Odd:
        async def rollout(self, context: Context) -> float:
            await context.generate([1])
            return reward if context._key.member == 0 else float(context._key.member % 2)  # type: ignore[attr-defined]

    outcome = simulate(World(group_size=4, retries=0), environment=Odd())
    assert all(taken.num_rollouts == 3 for taken in outcome.sink.of(GroupTaken))
    assert "expected a finite number" in outcome.sink.of(RolloutFailed)[0].message


def test_two_turns_at_once_are_refused_as_the_environments_mistake() -> None:
    class Impatient:
        async def rollout(self, context: Context) -> float:
            await asyncio.gather(context.generate([1]), context.generate([2]))
            return 1.0

    with pytest.raises(MillstreamError, match="take turns"):
        simulate(World(), environment=Impatient())


def test_a_single_failed_group_does_not_end_a_run_of_one_group_a_step() -> None:
    class FirstFails:
        async def rollout(self, context: Context) -> float:
            await context.generate([1])
            if context.task.id == "task-0":
                raise RuntimeError("the world broke")
            return float(context._key.member % 2)  # type: ignore[attr-defined]

    world = World(groups_per_step=1, retries=0)
    check(world, simulate(world, environment=FirstFails()))


def test_waiting_at_the_gate_is_not_counted_as_the_rollouts_own_time() -> None:
    """One rollout takes almost its whole time limit between two turns; those who wait for it do not fail."""

    class TwoTurns:
        async def rollout(self, context: Context) -> float:
            await context.generate([1])
            if context._key.member == 0:  # type: ignore[attr-defined]
                await asyncio.sleep(550)
            await context.generate([1])
            await asyncio.sleep(100 if context._key.member else 0)  # type: ignore[attr-defined]
            return float(context._key.member % 2)  # type: ignore[attr-defined]

    outcome = simulate(World(steps=2, max_lag=0), environment=TwoTurns())
    assert not outcome.sink.of(RolloutFailed)


class Delayed:
    """Outcomes come from the rollout's seed, delays from another one: they differ from run to run."""

    def __init__(self, delays: random.Random, *, num_turns: int = 2) -> None:
        self.delays, self.num_turns = delays, num_turns

    async def rollout(self, context: Context) -> float:
        rng = random.Random(context.seed)
        for _ in range(self.num_turns):
            await context.generate([1, 2])
            await asyncio.sleep(self.delays.random() * 5)
            if rng.random() < 0.1:
                raise RuntimeError("the world broke")
        return float(rng.random() < 0.5)


def routes(world: World, delays: int) -> dict[str, list[str]]:
    """Which engine served which request."""
    served: dict[str, list[str]] = {}
    original = SimEngine.generate

    async def generate(self: SimEngine, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        served.setdefault(self.name, []).append(f"{request.key}")
        return await original(self, request, on_sampled)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimEngine, "generate", generate)
        simulate(world, environment=Delayed(random.Random(delays)))
    return served


def test_synchronous_training_sends_the_same_requests_to_the_same_engines_whatever_the_timing() -> None:
    world = World(steps=6, max_lag=0, num_engines=3, groups_per_step=4)
    slow = structs.replace(world, load=5.0, train_token_s=1e-2)
    assert routes(world, delays=1) == routes(world, delays=2) == routes(slow, delays=3)


def test_synchronous_training_decides_by_ids_which_place_stays_empty() -> None:
    def fates(delays: int) -> list[tuple[int, Fate, bool]]:
        world = World(steps=8, max_lag=0, groups_per_step=4, max_replaced_per_step=1, retries=0, mini_batches=2)
        left = simulate(world, environment=Delayed(random.Random(delays))).sink.of(GroupLeft)
        return sorted((event.group_id, event.fate, event.is_replaced) for event in left)

    assert fates(1) == fates(2) == fates(3)
    assert any(not is_replaced for _, fate, is_replaced in fates(1) if fate is not Fate.TRAINED)


class Rewards:
    """Groups with and without signal, in turn."""

    def __init__(self, without_signal: int) -> None:
        self.without_signal = without_signal

    async def rollout(self, context: Context) -> float:
        await context.generate([1])
        number = int(context.task.id.removeprefix("task-"))
        return float(context._key.member % 2) if number % (self.without_signal + 1) == 0 else 1.0  # type: ignore[attr-defined]


def test_groups_without_signal_are_replaced_and_counted() -> None:
    world = World(max_lag=1, groups_per_step=2)
    outcome = simulate(world, environment=Rewards(without_signal=2))
    check(world, outcome)
    left = outcome.sink.of(GroupLeft)
    assert all(event.is_replaced for event in left if event.fate is Fate.FILTERED)
    assert all(step.num_groups == 2 for step in outcome.sink.of(Stepped))


def test_past_the_filters_budget_a_step_trains_with_fewer_groups_and_says_so() -> None:
    world = World(max_lag=1, groups_per_step=2, max_replaced_per_step=1)
    outcome = simulate(world, environment=Rewards(without_signal=3))
    check(world, outcome)
    assert any(step.num_groups < 2 for step in outcome.sink.of(Stepped))
    assert any(not event.is_replaced for event in outcome.sink.of(GroupLeft) if event.fate is Fate.FILTERED)


def test_without_the_filter_groups_without_signal_are_trained() -> None:
    world = World(filter_zero_signal=False)
    outcome = simulate(world, environment=Rewards(without_signal=1))
    check(world, outcome)
    assert {event.fate for event in outcome.sink.of(GroupLeft)} == {Fate.TRAINED}


@pytest.mark.parametrize("max_lag", [0, 1, 3])
@pytest.mark.parametrize("num_tasks", [1, 7, 8, 9])
def test_at_the_end_of_the_data_the_last_step_is_shorter_and_nothing_is_lost(num_tasks: int, max_lag: float) -> None:
    world = World(steps=100, groups_per_step=4, num_tasks=num_tasks, max_lag=max_lag, filter_zero_signal=False)
    outcome = simulate(world)
    check(world, outcome)
    assert len(outcome.sink.of(GroupAdmitted)) == num_tasks
    assert [step.num_groups for step in outcome.sink.of(Stepped)] == [4] * (num_tasks // 4) + (
        [num_tasks % 4] if num_tasks % 4 else []
    )


def test_micro_batches_are_trained_while_the_rest_of_the_batch_is_generated() -> None:
    outcome = simulate(World(steps=3, groups_per_step=8, max_lag=0, slots=4, group_size=4, filter_zero_signal=False))
    first_step = outcome.sink.of(Stepped)[0].at
    accumulated = [span.at for span in outcome.sink.of(Span) if span.what == "accumulate" and span.at < first_step]
    last_rollout = max(e.at for e in outcome.sink.of(RolloutEnded) if e.at < first_step)
    assert sum(at < last_rollout for at in accumulated) >= 3


@pytest.mark.parametrize("has_proximal", [False, True])
def test_no_row_of_a_batch_is_in_memory_when_its_weights_are_published(has_proximal: bool) -> None:
    class Learner(SimLearner):
        def __init__(self) -> None:
            super().__init__()
            self.rows: list[weakref.ref[Floats]] = []
            self.num_left: list[int] = []

        async def accumulate(self, rows: Sequence[TrainRow]) -> None:
            self.rows += [weakref.ref(row.advantages) for row in rows]
            await super().accumulate(rows)

        async def weights(self) -> Weights:
            gc.collect()
            if self.rows:
                self.num_left.append(sum(row() is not None for row in self.rows))
            return await super().weights()

    learner = Learner()
    simulate(World(steps=3, has_proximal=has_proximal), learner=learner)
    assert learner.num_left == [0, 0, 0]


def test_members_of_a_group_are_spread_over_the_replicas() -> None:
    outcome = simulate(World(steps=2, groups_per_step=2, group_size=4, num_engines=4, slots=1, max_lag=0))
    assert all(engine.stats().requests_finished >= 2 for engine in outcome.engines)


def test_several_mini_batches_are_several_optimizer_steps_and_one_version() -> None:
    world = World(steps=3, groups_per_step=4, mini_batches=2)
    outcome = simulate(world)
    check(world, outcome)
    assert sum(span.what == "step" for span in outcome.sink.of(Span)) == 6
    assert outcome.pipeline.admission.version == 3


def test_an_engine_that_breaks_stops_the_run_with_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: SimEngine, *args: object) -> None:
        raise EngineError("engine-0 broke: out of memory")

    monkeypatch.setattr(SimEngine, "generate", broken)
    with pytest.raises(EngineError, match="engine-0 broke"):
        simulate(World())


def test_an_engine_that_never_loads_is_named_by_the_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(self: SimEngine, *args: object) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(SimEngine, "load", hang)
    with pytest.raises(StallError, match=r"sync of engine-0 has waited .* for engine-0 to load version 1"):
        simulate(World(deadline_s=50.0))


def test_a_learner_that_never_steps_is_named_by_the_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(self: SimLearner) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(SimLearner, "step", hang)
    with pytest.raises(StallError, match=r"train has waited .* for the learner to step"):
        simulate(World(deadline_s=50.0))


def test_a_straggler_is_reported_while_it_is_waited_for() -> None:
    class Straggler(SimEnvironment):
        async def rollout(self, context: Context) -> float:
            if context.task.id == "task-0":
                await asyncio.sleep(200)
            return await super().rollout(context)

    world = World(steps=6, groups_per_step=1, max_lag=1, filter_zero_signal=False)
    outcome = simulate(world, environment=Straggler())
    check(world, outcome)
    assert outcome.seconds > 200
    stalls = {(event.owner, event.what) for event in outcome.sink.of(Stalled)}
    assert ("train", "a complete group") in stalls
    assert Fate.TRAINED in {event.fate for event in outcome.sink.of(GroupLeft) if event.group_id == 0}


def test_weights_that_change_after_they_were_published_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from millstream.errors import WeightsError
    from millstream.weights.local import LocalChannel

    async def publish(self: LocalChannel, version: int, weights: dict[str, int]) -> None:
        await original(self, version, weights)
        weights["num_rows"] += 1

    original = LocalChannel.publish
    monkeypatch.setattr(LocalChannel, "publish", publish)
    with pytest.raises(WeightsError, match="changed after"):
        simulate(World())


def test_fixed_latencies_give_a_schedule_that_can_be_worked_out_by_hand() -> None:
    """Two groups of two, 10 tokens each at 10 ms: the first batch is there after 0.1 s, a step takes 0.1 s, and with
    max_lag = 0 nothing overlaps but the accumulation."""
    world = World(steps=2, groups_per_step=2, max_lag=0, filter_zero_signal=False, train_token_s=0.0)
    outcome = simulate(world, num_tokens=constant(10))
    assert [round(step.at, 6) for step in outcome.sink.of(Stepped)] == [0.2, 0.4]


def test_what_comes_after_a_step_has_the_engines_to_itself_when_training_is_synchronous() -> None:
    is_idle: dict[float, list[bool]] = {0: [], 1: []}
    for max_lag, found in is_idle.items():
        pipelines: list[Pipeline] = []

        async def after_step(version: int) -> None:
            await asyncio.sleep(0.2)
            found.append((await pipelines[0].status()).requests_running == 0)

        world = World(steps=10, max_lag=max_lag)
        check(world, simulate(world, after_step=after_step, on_pipeline=pipelines.append))
        assert len(found) == 10
    assert all(is_idle[0]), "nothing else runs"
    assert not all(is_idle[1]), "it runs beside training"


def test_the_status_says_how_full_everything_is_and_what_everybody_waits_for() -> None:
    seen: list[Status] = []
    holder: list[Pipeline] = []

    class Watched(SimEnvironment):
        async def rollout(self, context: Context) -> float:
            reward = await super().rollout(context)
            seen.append(await holder[0].status())
            return reward

    world = World(steps=3, groups_per_step=2, group_size=3, max_lag=1, slots=2)
    simulate(world, environment=Watched(), on_pipeline=holder.append)
    status = seen[len(seen) // 2]
    assert status.requests_running <= 2 and status.requests_waiting > 0
    assert status.groups_outstanding + status.groups_taken <= status.budget == 4
    waits = {(wait.owner, wait.what): wait for wait in status.waits}
    assert waits["rollouts", "an engine"].count > 1
    assert ("feed", "room under the lag bound") in waits and ("settle", "a finished group") in waits
