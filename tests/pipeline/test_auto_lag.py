"""The controller of `pipeline.auto_lag`: its decisions one by one, and whole runs on the virtual clock."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from millstream.events import GroupTaken, LagMoved
from millstream.pipeline.auto_lag import DID_NOT_WAIT, PATIENCE, LagController, StepSeen
from millstream.pipeline.schedule import PipelineConfig
from support.simulated import World, check, simulate
from support.worlds import unless_all_fail, worlds

STARVED = StepSeen(seconds=10.0, waited_s=2.0, room=0.5)
BUSY = StepSeen(seconds=10.0, waited_s=0.0, room=0.0)
FULL = StepSeen(seconds=10.0, waited_s=5.0, room=0.0)  # the learner waits for engines that have no room
BALANCED = StepSeen(seconds=10.0, waited_s=0.3, room=0.5)


def lags(controller: LagController, *steps: StepSeen) -> list[float]:
    found = []
    for step in steps:
        controller.add(step)
        found.append(controller.max_lag)
    return found


@pytest.mark.parametrize("step", [BUSY, FULL])
def test_lag_that_buys_nothing_is_given_up_down_to_synchronous_training(step: StepSeen) -> None:
    controller = LagController(2.0)
    assert lags(controller, *[step] * 60)[-1] == 0.0
    assert lags(controller, *[step] * 60)[-1] == 0.0


def test_the_lag_is_raised_while_the_learner_waits_and_engines_have_room_up_to_the_limit() -> None:
    controller = LagController(3.0)
    lags(controller, *[BUSY] * 60)
    found = lags(controller, *[STARVED] * 60)
    assert found == sorted(found) and found[-1] == 3.0


def test_a_step_in_balance_moves_nothing() -> None:
    controller = LagController(3.0)
    assert set(lags(controller, *[BALANCED] * 50)) == {3.0}


def test_a_lowering_that_had_to_be_taken_back_is_not_tried_again_for_twice_as_long() -> None:
    """The load needs a lag of 2: with less the learner waits."""
    controller, changed, steps = LagController(3.0), list[int](), 0
    for steps in range(600):
        before = controller.max_lag
        controller.add(BUSY if before >= 2 else STARVED)
        if controller.max_lag < before == 2.0:
            changed.append(steps)
    gaps = [after - before for before, after in itertools.pairwise(changed)]
    assert len(gaps) >= 3 and gaps[0] >= PATIENCE and all(b >= 1.7 * a for a, b in itertools.pairwise(gaps))


def test_a_low_effective_sample_size_lowers_the_lag_although_the_learner_waits() -> None:
    controller = LagController(4.0)
    off_policy = STARVED._replace(sample_size=0.3)
    assert lags(controller, *[off_policy] * 20)[-1] < 4.0
    assert lags(controller, *[off_policy] * 100)[-1] == 0.0
    assert lags(controller, *[STARVED._replace(sample_size=0.9)] * 100)[-1] == 4.0


@given(
    limit=st.sampled_from([0.5, 1.0, 2.5, 4.0]),
    steps=st.lists(
        st.builds(StepSeen, st.floats(0.1, 10), st.floats(0, 0.1), st.floats(0, 1), st.none() | st.floats(0, 1)),
        max_size=200,
    ),
)
def test_whatever_steps_show_the_lag_is_within_the_limit_and_a_move_is_given_time(
    limit: float, steps: list[StepSeen]
) -> None:
    controller, since = LagController(limit), 1000
    for step in steps:
        before = controller.max_lag
        move = controller.add(step)
        assert 0 <= controller.max_lag <= limit
        assert (move is not None) == (controller.max_lag != before)
        assert move is None or (move.why and move.max_lag == controller.max_lag and since > 2)
        since = 0 if move is not None else since + 1


@settings(max_examples=100)
@given(world=worlds)
def test_in_any_world_the_bound_holds_and_each_version_has_one_move_at_most(world: World) -> None:
    is_restart = "wait" if world.max_lag == 0 else world.overdue
    world = replace(
        world,
        max_lag=max(0.5, world.max_lag),
        auto_lag=True,
        extra_groups=None,
        surplus="carry_over",
        overdue=is_restart,
        steps=4 * world.steps,
    )
    with unless_all_fail(world):
        outcome = simulate(world)
    check(world, outcome)
    moves = outcome.sink.of(LagMoved)
    assert moves[0].version == 0 and max(Counter(move.version for move in moves[1:]).values(), default=0) <= 1
    assert all(0 <= move.max_lag <= world.max_lag for move in moves)


def test_a_learner_that_is_the_bottleneck_gets_fresh_rollouts_and_waits_no_longer() -> None:
    world = World(steps=80, groups_per_step=4, max_lag=4, slots=64, tail=0.3, train_token_s=1e-2, success=0.5)
    fixed, auto = simulate(world), simulate(replace(world, auto_lag=True))
    lag, auto_lag = (
        sum(event.lag for event in outcome.sink.of(GroupTaken)) / len(outcome.sink.of(GroupTaken))
        for outcome in (fixed, auto)
    )
    assert auto_lag < 0.6 * lag
    assert auto.seconds < (1 + 5 * DID_NOT_WAIT) * fixed.seconds


@pytest.mark.parametrize(
    "keys", [{"max_lag": 0}, {"extra_groups": 4, "max_lag": 2}, {"surplus": "abort", "max_lag": 2}]
)
def test_what_does_not_go_with_it_is_refused(keys: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="auto_lag chooses the groups in flight"):
        PipelineConfig(auto_lag=True, **keys)  # type: ignore[arg-type]
