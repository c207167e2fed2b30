"""The published gains of scheduling, on the virtual clock, where time is exact: the rows of `bench/published.py` in which
training takes no time, over fewer seeds. About half a minute, because the worlds are those of the table."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from millstream.events import GroupLeft, GroupTaken, RolloutAborted, RolloutEnded, Stepped
from millstream.seeds import request_seed
from millstream.sim.costs import Costs
from millstream.sim.draws import Draw, at_most, constant, lognormal
from millstream.types import Fate, RequestKey
from published import Case, measure, rollouts
from scheduling import HEAVY, NORMAL, agentic, batch_by_batch, held_together, ours, reasoning

CASES = rollouts(agent_steps=2)


@pytest.mark.parametrize("case", CASES, ids=[f"{case.workload}, {case.peer}" for case in CASES])
def test_a_published_gain_is_reached_or_the_floor_that_the_documentation_explains(case: Case) -> None:
    num_seeds = 2 if "8 x 8" in case.workload else 1  # a step of a few groups varies more
    figures = measure(case, num_seeds)
    assert figures.theirs / figures.ours >= case.least


def test_counting_running_prompts_explains_the_published_gain_of_queue_scheduling_without_additional_prompts() -> None:
    """Complete prompts do not count in ROLL's queue: it generates ahead. Four extra groups do so here, and gain more."""
    without, with_four = (measure(case, 2) for case in CASES[:2])
    assert without.paper is not None
    assert without.theirs / without.paper > 2.16 > without.theirs / without.ours
    assert with_four.ours < without.paper


# ---- whether the comparison is fair ------------------------------------------------------------------------------------

SMALL = replace(agentic(HEAVY), groups=4, members=4, num_turns=5, steps=3)


def test_the_hand_written_barrier_is_not_much_slower_than_the_gate_of_synchronous_training() -> None:
    """The peer of environment-level asynchrony is not a straw man. Our own lockstep lets an environment take its step while
    others still generate, and saves about the generation of a turn by that."""
    world = replace(agentic(NORMAL), groups=8, num_turns=6)
    gate, barrier = ours(world, 0, lockstep=True).seconds, batch_by_batch(world, 0)
    assert 0.8 * barrier < gate <= barrier


def test_both_sides_play_the_same_rollouts() -> None:
    """Without anything to schedule, the plain loops and the pipeline take the same time."""
    world = replace(reasoning(4, 4), latency_s=constant(1.0))
    expected = ours(world, 3).seconds
    assert batch_by_batch(world, 3) == pytest.approx(expected, rel=0.02)
    assert held_together(world, 3) == pytest.approx(expected, rel=0.1)  # which replica a group is on differs


def test_first_to_finish_trains_whole_batches_of_whole_groups_and_names_what_it_threw_away() -> None:
    found = ours(SMALL, 0, surplus="abort", extra_groups=2, extra_members=2)
    sink = found.sink
    assert [step.num_groups for step in sink.of(Stepped)] == [4, 4, 4]
    assert {taken.num_rollouts for taken in sink.of(GroupTaken)} == {4}
    fates = [left.fate for left in sink.of(GroupLeft)]
    assert fates.count(Fate.TRAINED) == 12 and fates.count(Fate.ABORTED) > 0
    started = 6 * len(fates)
    assert len(sink.of(RolloutEnded)) + len(sink.of(RolloutAborted)) == started
    assert all(engine.stats()[:2] == (0, 0) for engine in found.engines), "nothing is left in an engine"


def test_carry_over_throws_nothing_away() -> None:
    found = ours(SMALL, 0, max_lag=1.0)
    assert {left.fate for left in found.sink.of(GroupLeft)} == {Fate.TRAINED}
    assert not found.sink.of(RolloutAborted)
    assert found.seconds < ours(SMALL, 0).seconds


# ---- the bound of greedy dispatch --------------------------------------------------------------------------------------


def lengths_of(draw: Draw, seed: int, groups: int, members: int) -> list[int]:
    keys = (RequestKey(group_id=g, member=m) for g, m in itertools.product(range(groups), range(members)))
    return [max(1, round(draw(random.Random(request_seed(seed, "train", key))))) for key in keys]


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), slots=st.integers(1, 16), sigma=st.floats(0.1, 1.5))
def test_a_step_takes_no_longer_than_greedy_dispatch_can(seed: int, slots: int, sigma: float) -> None:
    """(Q / K) mean + longest, for Q requests on K slots; and no less than either the work or the longest needs."""
    token_s, draw = 0.01, at_most(1000, lognormal(100, sigma))
    machine: dict[str, Any] = {"replicas": 1, "slots": slots, "costs": Costs(step_s=token_s)}
    world = reasoning(4, 4, lengths=draw, latency_s=constant(0.0), prompt_tokens=0, **machine)
    seconds = ours(world, seed).seconds
    lengths = lengths_of(draw, seed, 4, 4)
    work, longest = token_s * sum(lengths) / slots, token_s * max(lengths)
    assert max(work, longest) - 1e-6 <= seconds <= work + longest + 1e-6
