"""Advantages that need the whole batch: its rows wait for it, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from millstream.algo.advantages import ADVANTAGES
from millstream.algo.credit import Credited, Played
from millstream.events import GroupTaken, RolloutEnded, Span, Stepped
from millstream.sim.learner import SimLearner
from millstream.types import Metrics, TrainRow
from support.simulated import Outcome, World, check, simulate

WORLD = World(steps=4, groups_per_step=4, group_size=4, slots=16, max_lag=1, filter_zero_signal=False)


class Remembering(SimLearner):
    """Keeps the rows of every optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[TrainRow]] = [[]]

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        self.steps[-1] += rows
        await super().accumulate(rows)

    async def step(self) -> Metrics:
        self.steps.append([])
        return {"mean": float(len(self.steps)), "max_ratio": float(len(self.steps))}


def run(world: World, name: str) -> tuple[Outcome, list[list[TrainRow]]]:
    advantage, learner = ADVANTAGES[name], Remembering()
    outcome = simulate(world, learner=learner, advantage=advantage.of_group, over_batch=advantage.over_batch)
    outcome.learner.num_rows = learner.num_rows
    check(world, outcome)
    return outcome, learner.steps[:-1]


def trained(rows: Sequence[TrainRow]) -> np.ndarray:
    return np.concatenate([row.advantages[row.loss_mask] for row in rows]).astype(np.float64)


def test_reinforce_plus_plus_has_the_mean_0_and_the_deviation_1_over_the_tokens_of_each_batch() -> None:
    _, steps = run(WORLD, "reinforce_plus_plus")
    assert len(steps) == 4
    for rows in steps:
        assert len(rows) == 16
        assert abs(trained(rows).mean()) < 1e-5 and trained(rows).std() == pytest.approx(1, abs=1e-4)


def test_a_rollout_whose_advantage_is_no_number_is_no_part_of_the_batch() -> None:
    """The learner leaves it out, by name; the others are measured without it."""
    steps: list[TrainRow] = []

    class Keeping(SimLearner):
        async def accumulate(self, rows: Sequence[TrainRow]) -> None:
            steps.extend(rows)
            await super().accumulate(rows)

    def first_is_broken(group: Sequence[Played]) -> list[Credited]:
        return [Credited(np.full(len(one.turn_N), np.nan if not k else float(k))) for k, one in enumerate(group)]

    over_batch = ADVANTAGES["reinforce_plus_plus"].over_batch
    simulate(replace(WORLD, steps=1), learner=Keeping(), credit=first_is_broken, over_batch=over_batch)
    sound = [row for row in steps if np.isfinite(row.advantages).all()]
    assert (len(steps), len(sound)) == (16, 12)
    assert trained(sound).mean() == pytest.approx(0, abs=1e-5) and trained(sound).std() == pytest.approx(1, abs=1e-4)


def test_lite_ppo_is_centred_by_group_and_divided_by_the_deviation_of_the_batch() -> None:
    outcome, steps = run(WORLD, "lite_ppo")
    rewards = {(event.group_id, event.member): event.reward for event in outcome.sink.of(RolloutEnded)}
    for version, rows in enumerate(steps):
        groups = [event.group_id for event in outcome.sink.of(GroupTaken) if event.version == version]
        rewards_BG = np.array([[rewards[group, member] for member in range(4)] for group in groups])
        expected = (rewards_BG - rewards_BG.mean(1, keepdims=True)) / rewards_BG.std()
        found = [row.advantages[row.loss_mask][0] for row in rows]
        assert np.allclose(found, expected.flatten(), atol=1e-4)


@pytest.mark.parametrize("max_lag", [0, 1])
@pytest.mark.parametrize("mini_batches", [1, 2])
def test_nothing_is_trained_before_the_batch_is_complete(max_lag: int, mini_batches: int) -> None:
    outcome, steps = run(replace(WORLD, max_lag=max_lag, mini_batches=mini_batches), "reinforce_plus_plus")
    assert len(steps) == 4 * mini_batches and all(len(rows) == 16 // mini_batches for rows in steps)
    taken = 0
    for event in outcome.sink.events:
        match event:
            case GroupTaken():
                taken += 1
            case Span(what="accumulate" | "step"):
                assert taken == 4
            case Stepped():
                assert event.num_rows == 16
                taken = 0


def test_a_group_advantage_does_not_wait() -> None:
    outcome, _ = run(WORLD, "grpo")
    first_work = next(
        i for i, e in enumerate(outcome.sink.events) if isinstance(e, Span) and e.what in ("accumulate", "step")
    )
    assert sum(isinstance(event, GroupTaken) for event in outcome.sink.events[:first_work]) < 4


def test_places_that_stay_empty_are_no_part_of_the_batch() -> None:
    empty = replace(WORLD, success=1.0, filter_zero_signal=True, max_replaced_per_step=0, steps=2)
    outcome, steps = run(empty, "lite_ppo")
    assert steps == [[], []] and [step.num_groups for step in outcome.sink.of(Stepped)] == [0, 0]
    some = replace(WORLD, success=0.8, filter_zero_signal=True, max_replaced_per_step=0, group_size=2)
    outcome, steps = run(some, "lite_ppo")
    counts = [step.num_groups for step in outcome.sink.of(Stepped)]
    assert 0 < sum(counts) < 16 and [len(rows) // 2 for rows in steps] == counts
    for rows in steps:
        # groups of 0 and 1 alone: the deviation of their rewards is 0.5, of the empty ones' none
        assert not rows or np.allclose(np.abs(trained(rows)), 1, atol=1e-4)


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_a_batch_that_the_end_of_the_data_cuts_short_is_measured_by_what_it_has(mini_batches: int) -> None:
    outcome, steps = run(replace(WORLD, num_tasks=7, mini_batches=mini_batches), "reinforce_plus_plus")
    assert [step.num_groups for step in outcome.sink.of(Stepped)] == [4, 3]
    assert [len(rows) for rows in steps if rows] == ([16, 12] if mini_batches == 1 else [8, 8, 8, 4])
    last = [row for rows in steps for row in rows][16:]
    assert abs(trained(last).mean()) < 1e-5 and trained(last).std() == pytest.approx(1, abs=1e-4)


def test_of_a_maximum_the_largest_of_the_mini_batches_is_told() -> None:
    outcome, _ = run(replace(WORLD, steps=1, mini_batches=2), "grpo")
    (step,) = outcome.sink.of(Stepped)
    assert step.metrics == {"mean": 2.5, "max_ratio": 3.0}
