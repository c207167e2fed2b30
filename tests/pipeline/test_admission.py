"""The admission rule by itself: random interleavings of everything that can happen to a group."""

from __future__ import annotations

import math
import random
from decimal import Decimal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millstream.errors import InvariantError, LagError
from millstream.pipeline.admission import Admission, Place, full_budget
from millstream.pipeline.schedule import PipelineConfig

LAGS = [0, 0.25, 0.5, 1, 1.75, 2, 3, 4]


def invariant_holds(admission: Admission, deadlines: list[int]) -> bool:
    """The invariant as the design states it, word for word, over a plain list."""
    n, taken, batch = admission.version, admission.taken, admission.groups_per_step
    return all(
        sum(deadline <= d for deadline in deadlines) <= (d - n + 1) * batch - taken
        for d in range(n, max([n, *deadlines]) + 2)
    ) and all(deadline >= n for deadline in deadlines)


@given(groups=st.integers(1, 10_000), lag=st.decimals(0, 1000, places=4, allow_nan=False, allow_infinity=False))
@example(groups=60, lag=Decimal("1.05"))
def test_the_full_budget_is_that_of_the_number_that_was_written(groups: int, lag: Decimal) -> None:
    scaled = int(lag * 10_000)
    assert full_budget(groups, float(lag)) == groups + groups * scaled // 10_000
    assert PipelineConfig(groups_per_step=groups, max_lag=float(lag)).most_groups == full_budget(groups, float(lag))


@given(
    groups_per_step=st.integers(1, 5),
    max_lag=st.sampled_from(LAGS),
    slack=st.floats(0, 1),
    changes=st.lists(st.sampled_from(LAGS), max_size=4),
    seed=st.integers(0, 2**32),
)
def test_under_random_interleavings_the_bound_holds_and_some_move_is_always_possible(
    groups_per_step: int, max_lag: float, slack: float, changes: list[float], seed: int
) -> None:
    """`changes`: values that max_lag changes to on the way. Each group keeps the bound that it was admitted with."""
    rng = random.Random(seed)
    full = full_budget(groups_per_step, max_lag)
    budget = groups_per_step + round(slack * (full - groups_per_step))
    admission = Admission(groups_per_step=groups_per_step, max_lag=max_lag, budget=budget, num_steps=25)
    engine, next_id = 0, 0
    running: dict[int, Place] = {}
    complete: dict[int, Place] = {}
    while not admission.is_finished:
        moves: list[tuple[str, int]] = []
        if admission.may_admit(engine):
            moves.append(("admit", next_id))
        moves += [("finish", g) for g in running]
        moves += [("filter", g) for g in complete if rng.random() < 0.1]
        moves += [("restart", g) for g in running if rng.random() < 0.02]
        choice = admission.choose(rng.sample(list(complete), len(complete)))
        in_order = sorted(complete, key=lambda group: (complete[group].deadline, group))
        assert choice == next((group for group in in_order if admission.may_take(group)), None)
        if choice is not None:
            moves.append(("take", choice))
        moves += [("take", g) for g in complete if admission.may_take(g)]
        if engine < admission.version:
            moves.append(("sync", rng.randint(engine + 1, admission.version)))
        assert moves, f"deadlock: {admission}"
        if changes and rng.random() < 0.05:
            max_lag = changes.pop()
            admission.change_terms(max_lag, full_budget(groups_per_step, max_lag))
            continue
        move, which = rng.choice(moves)
        if move == "admit":
            running[next_id] = admission.admit(next_id, engine)
            assert running[next_id].bound == math.ceil(max_lag)
            assert len(running) + len(complete) + admission.taken <= admission.budget
            next_id += 1
        elif move == "finish":
            complete[which] = running.pop(which)
        elif move == "filter":
            complete.pop(which)
            admission.remove(which)
        elif move == "restart":
            again = admission.restart(which, max(engine, running[which].start))
            assert again.bound <= max(math.ceil(max_lag), running[which].bound)
            running[which] = again
        elif move == "sync":
            engine = which
        else:
            place = complete.pop(which)
            assert admission.version - place.start <= place.bound
            admission.take(which)
            if admission.is_batch_full:
                admission.step()
        deadlines = [place.deadline for place in (*running.values(), *complete.values())]
        assert invariant_holds(admission, deadlines)
    assert not running and not complete, "the last step leaves nothing behind"


@pytest.mark.parametrize(("max_lag", "bound", "budget"), [(0, 0, 4), (0.25, 1, 5), (0.5, 1, 6), (1, 1, 8), (2, 2, 12)])
def test_the_bound_is_the_ceiling_and_the_budget_the_floor(max_lag: float, bound: int, budget: int) -> None:
    admission = Admission(groups_per_step=4, max_lag=max_lag)
    assert (admission.bound, admission.budget) == (bound, budget)
    for group_id in range(budget):
        admission.admit(group_id, start=0)
    assert not admission.may_admit(start=0)


def test_an_overdue_straggler_is_waited_for_when_the_budget_is_full() -> None:
    admission = Admission(groups_per_step=1, max_lag=1)
    admission.admit(0, start=0)
    admission.admit(1, start=0)
    assert admission.choose([1]) == 1, "one batch may pass the straggler"
    admission.take(1)
    admission.step()
    admission.admit(2, start=1)
    assert admission.choose([2]) is None, "a second would leave group 0 no batch within its deadline"
    assert admission.choose([0, 2]) == 0


def test_a_smaller_budget_leaves_room_to_pass_a_straggler() -> None:
    admission = Admission(groups_per_step=2, max_lag=2, budget=4)
    for group_id in range(4):
        admission.admit(group_id, start=0)
    for passing in (1, 2):
        assert admission.choose([passing]) == passing
        admission.take(passing)
    admission.step()
    assert admission.place(0).deadline == 2 and admission.may_admit(start=1)


def test_synchronous_training_takes_groups_in_the_order_of_their_ids() -> None:
    admission = Admission(groups_per_step=3, max_lag=0, is_in_order=True)
    for group_id in range(3):
        admission.admit(group_id, start=0)
    assert admission.choose([2, 1]) is None
    assert admission.choose([2, 0]) == 0


def test_a_group_of_an_engine_that_lags_too_far_is_not_admitted() -> None:
    admission = Admission(groups_per_step=1, max_lag=1)
    for group_id in range(2):
        admission.admit(group_id, start=admission.version)
        admission.take(group_id)
        admission.step()
    assert not admission.may_admit(start=0)
    assert admission.may_admit(start=1)


def test_nothing_is_admitted_that_no_step_would_train() -> None:
    admission = Admission(groups_per_step=2, max_lag=3, num_steps=1)
    admission.admit(0, start=0)
    admission.admit(1, start=0)
    assert not admission.may_admit(start=0)


def test_a_broken_promise_stops_the_run() -> None:
    admission = Admission(groups_per_step=1, max_lag=0)
    admission.admit(0, start=0)
    with pytest.raises(InvariantError):
        admission.admit(0, start=0)
    with pytest.raises(InvariantError):
        admission.admit(1, start=0)
    with pytest.raises(InvariantError):
        admission.step()
    admission.version = 5
    with pytest.raises(LagError):
        admission.take(0)
