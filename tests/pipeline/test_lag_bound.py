"""The guarantees of the whole pipeline, on the virtual clock, over random worlds; and two rules that the same test catches."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from millstream.errors import LagError
from millstream.events import (
    GroupAdmitted,
    GroupLeft,
    GroupRestarted,
    GroupTaken,
    RolloutEnded,
    Stepped,
    WeightsLoaded,
)
from millstream.pipeline import policy
from millstream.pipeline.admission import Admission
from millstream.pipeline.pipeline import Pipeline
from support.examples import examples
from support.simulated import World, check, configs, simulate
from support.worlds import unless_all_fail, worlds


@examples(100, of=300)
@given(world=worlds)
def test_in_any_world_no_rollout_is_too_old_none_is_lost_none_is_doubled_and_nothing_hangs(world: World) -> None:
    with unless_all_fail(world):
        outcome = simulate(world)
    check(world, outcome)


@examples(50, of=100)
@given(world=worlds, lags=st.lists(st.sampled_from([0.5, 1, 1.5, 2, 4]), min_size=1, max_size=6))
def test_when_max_lag_changes_with_every_step_each_group_keeps_the_bound_that_it_was_admitted_with(
    world: World, lags: list[float]
) -> None:
    world = replace(world, max_lag=lags[0], extra_groups=None, surplus="carry_over", num_tasks=None)
    pipelines: list[Pipeline] = []

    async def change(version: int) -> None:
        config, _ = configs(replace(world, max_lag=lags[version % len(lags)]))
        pipelines[0].change_lag(config)

    with unless_all_fail(world):
        outcome = simulate(world, after_step=change, on_pipeline=pipelines.append)
    admitted, left = outcome.sink.of(GroupAdmitted), outcome.sink.of(GroupLeft)
    assert sorted(event.group_id for event in admitted) == sorted(event.group_id for event in left)
    assert {event.deadline - event.start_version for event in admitted} <= {math.ceil(lag) for lag in lags}
    bounds = {event.group_id: event.deadline - event.start_version for event in admitted}
    for restarted in outcome.sink.of(GroupRestarted):
        bound = restarted.deadline - restarted.start_version
        assert bound <= max(map(math.ceil, lags))
        bounds[restarted.group_id] = max(bound, bounds[restarted.group_id])
    assert all(event.lag <= bounds[event.group_id] for event in outcome.sink.of(GroupTaken))
    assert len(outcome.sink.of(Stepped)) == world.steps


class BudgetWithoutOrder(Admission):
    """Mutant 1: at most `budget` groups in flight, taken as they complete."""

    def may_admit(self, start: int) -> bool:
        in_flight = self.outstanding + self.taken
        return in_flight < min(self.budget, self._room_until_the_end())

    def may_take(self, group_id: int) -> bool:
        return not self.is_batch_full and group_id in self._places

    def choose(self, ready):  # type: ignore[no-untyped-def]
        return next(iter(ready), None)


class DeadlineFirst(BudgetWithoutOrder):
    """Mutant 2: the complete group with the earliest deadline first, and nothing admitted that is late at birth."""

    def may_admit(self, start: int) -> bool:
        return super().may_admit(start) and start + self.bound >= self.version

    def choose(self, ready):  # type: ignore[no-untyped-def]
        return min(ready, key=lambda g: self._places[g].deadline, default=None)


def violations(rule: type[Admission], monkeypatch: pytest.MonkeyPatch) -> int:
    """In how many of some heavy-tailed worlds the bound breaks."""
    monkeypatch.setattr(policy, "Admission", rule)
    broken = 0
    for max_lag in (1, 2):
        for seed in range(20):
            world = World(steps=15, groups_per_step=1, max_lag=max_lag, tail=2.0, slots=64, load=1.0, seed=seed)
            try:
                check(world, simulate(world))
            except LagError:
                broken += 1
    return broken


def test_the_rule_holds_in_the_worlds_that_break_the_mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    assert violations(Admission, monkeypatch) == 0


@pytest.mark.parametrize("mutant", [BudgetWithoutOrder, DeadlineFirst])
def test_a_rule_without_the_invariant_is_caught(mutant: type[Admission], monkeypatch: pytest.MonkeyPatch) -> None:
    assert violations(mutant, monkeypatch) >= 3


@pytest.mark.parametrize("max_lag", [0.5, 1, 2, 4])
def test_the_lag_really_reaches_the_bound_and_asynchrony_really_pays(max_lag: float) -> None:
    """A bound that is never approached would hold for the wrong reason."""
    world = World(steps=20, groups_per_step=4, max_lag=max_lag, tail=1.5, slots=64, train_token_s=2e-3)
    outcome = simulate(world)
    lags = [event.lag for event in outcome.sink.of(GroupTaken)]
    assert max(lags) == math.ceil(max_lag)
    synchronous = simulate(World(steps=20, groups_per_step=4, max_lag=0, tail=1.5, slots=64, train_token_s=2e-3))
    assert outcome.seconds < 0.9 * synchronous.seconds


def test_at_max_lag_zero_every_rollout_is_of_the_version_that_trains_on_it() -> None:
    outcome = simulate(World(steps=10, groups_per_step=3, group_size=4, max_lag=0, num_turns=2, load=2.0, latency=1.0))
    assert {event.lag for event in outcome.sink.of(GroupTaken)} == {0}
    assert all(e.start_version == e.end_version for e in outcome.sink.of(RolloutEnded))


def test_engines_that_lag_serve_under_the_same_bound() -> None:
    world = World(steps=12, groups_per_step=2, max_lag=1, num_engines=3, load=20.0, tail=1.5)
    outcome = simulate(world)
    check(world, outcome)
    loads = {event.engine for event in outcome.sink.of(WeightsLoaded)}
    assert loads == {"engine-0", "engine-1", "engine-2"}
