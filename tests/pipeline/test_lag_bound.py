"""The guarantees of the whole pipeline, on the virtual clock, over random worlds; and two rules that the same test catches."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from millstream.errors import LagError
from millstream.events import RolloutEnded
from millstream.pipeline import pipeline
from millstream.pipeline.admission import Admission
from support.simulated import World, check, simulate

worlds = st.builds(
    World,
    steps=st.integers(1, 10),
    groups_per_step=st.integers(1, 4),
    group_size=st.integers(2, 4),
    max_lag=st.sampled_from([0, 0.5, 1, 1.5, 2, 4]),
    num_tasks=st.one_of(st.none(), st.integers(1, 30)),
    num_engines=st.integers(1, 3),
    slots=st.integers(1, 16),
    num_turns=st.integers(1, 3),
    tail=st.floats(0.1, 2.0),
    latency=st.sampled_from([0.0, 1.0]),
    failure=st.sampled_from([0.0, 0.1, 0.3]),
    success=st.sampled_from([0.2, 0.5, 0.9]),
    retries=st.integers(0, 2),
    load=st.sampled_from([0.0, 0.5, 10.0]),
    train_token_s=st.sampled_from([1e-5, 1e-3, 1e-2]),
    max_replaced_per_step=st.sampled_from([None, 0, 2]),
    filter_zero_signal=st.booleans(),
    lockstep=st.booleans(),
    overdue=st.sampled_from(["wait", "restart"]),
    max_restarts=st.integers(1, 2),
    extra_members=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)


def with_surplus(world: World, extra_groups: int | None, surplus: str) -> World:
    most = math.floor(world.max_lag * world.groups_per_step)
    if surplus == "carry_over" and extra_groups is not None:
        extra_groups = min(extra_groups, most)
    overdue = "wait" if surplus == "abort" or world.max_lag == 0 else world.overdue
    return replace(world, extra_groups=extra_groups, surplus=surplus, overdue=overdue)


worlds = st.builds(
    with_surplus,
    worlds,
    st.one_of(st.none(), st.integers(0, 8)),
    st.sampled_from(["carry_over", "carry_over", "abort"]),
)


@settings(max_examples=300)
@given(world=worlds)
def test_in_any_world_no_rollout_is_too_old_none_is_lost_none_is_doubled_and_nothing_hangs(world: World) -> None:
    try:
        outcome = simulate(world)
    except pipeline.MillstreamError as error:
        # the one lawful end before the last step: a whole batch of groups failed, one after the other
        assert world.failure > 0 and "in a row failed" in str(error), error
        return
    check(world, outcome)


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
    monkeypatch.setattr(pipeline, "Admission", rule)
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
    lags = [event.lag for event in outcome.sink.of(pipeline.GroupTaken)]
    assert max(lags) == math.ceil(max_lag)
    synchronous = simulate(World(steps=20, groups_per_step=4, max_lag=0, tail=1.5, slots=64, train_token_s=2e-3))
    assert outcome.seconds < 0.9 * synchronous.seconds


def test_at_max_lag_zero_every_rollout_is_of_the_version_that_trains_on_it() -> None:
    outcome = simulate(World(steps=10, groups_per_step=3, group_size=4, max_lag=0, num_turns=2, load=2.0, latency=1.0))
    assert {event.lag for event in outcome.sink.of(pipeline.GroupTaken)} == {0}
    assert all(e.start_version == e.end_version for e in outcome.sink.of(RolloutEnded))


def test_engines_that_lag_serve_under_the_same_bound() -> None:
    world = World(steps=12, groups_per_step=2, max_lag=1, num_engines=3, load=20.0, tail=1.5)
    outcome = simulate(world)
    check(world, outcome)
    loads = {event.engine for event in outcome.sink.of(pipeline.WeightsLoaded)}
    assert loads == {"engine-0", "engine-1", "engine-2"}
