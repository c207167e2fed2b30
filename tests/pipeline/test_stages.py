"""Stages on the virtual clock: every row is scored once, where it is needed, whatever becomes of its group."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from millstream.algo.advantages import ADVANTAGES, dr_grpo
from millstream.algo.credit import Penalty, credit_of, signal_of
from millstream.env import Context
from millstream.errors import InvariantError, LearnerError, StallError
from millstream.events import (
    GroupLeft,
    GroupRestarted,
    GroupTaken,
    RolloutAborted,
    RolloutEnded,
    Span,
    Stalled,
    Status,
    Stepped,
)
from millstream.pipeline.credit import columns_of
from millstream.pipeline.pipeline import Pipeline
from millstream.pipeline.schema import store_tasks
from millstream.sim.environment import SimEnvironment
from millstream.sim.learner import SimCritic, SimFollower, SimLearner, SimScorer
from millstream.store import Columns, Row
from millstream.store.memory import MemoryStore
from millstream.types import Fate, Floats, Metrics, TrainRow
from support.simulated import Diary, Outcome, WatchfulLearner, World, check, simulate, stages_of
from support.worlds import cut_and_resume, unless_all_fail, worlds

staged = st.builds(
    lambda world, reference, has_critic, mini_batches, score_token_s: replace(
        world,
        steps=min(world.steps, 5),
        reference="early" if reference == "none" and not has_critic and mini_batches == 1 else reference,
        has_critic=has_critic,
        has_proximal=mini_batches > 1,
        mini_batches=mini_batches,
        groups_per_step=-(-world.groups_per_step // mini_batches) * mini_batches,
        score_token_s=score_token_s,
    ),
    worlds,
    st.sampled_from(["none", "early", "late"]),
    st.booleans(),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([0.0, 1e-4, 1e-2, 0.1]),
)


def scored(outcome: Outcome, name: str) -> int:
    (scorer,) = [stage.scorer for stage in outcome.stages if stage.name == name]
    assert isinstance(scorer, SimScorer)
    return scorer.num_scored


@settings(max_examples=60)
@given(world=staged)
def test_in_any_world_with_stages_of_any_speed_nothing_is_lost_doubled_too_old_or_stuck(world: World) -> None:
    with unless_all_fail(world):
        outcome = simulate(world)
    check(world, outcome)
    num_rows = len(outcome.sink.of(RolloutEnded))
    for stage in outcome.stages:
        if stage.is_early:
            assert scored(outcome, stage.name) == num_rows, "every row, once, whatever becomes of its group"
        else:
            discarded = {e.group_id for e in outcome.sink.of(GroupLeft) if e.fate is Fate.ABORTED}
            most = sum(e.group_id in discarded for e in outcome.sink.of(RolloutEnded))
            assert 0 <= scored(outcome, stage.name) - outcome.learner.num_rows <= most, "what is filtered is not scored"


@settings(max_examples=30)
@given(world=staged, cut=st.randoms(use_true_random=False))
def test_from_any_checkpoint_with_rows_scored_and_unscored_nothing_is_lost_or_doubled(
    world: World, cut: random.Random
) -> None:
    with unless_all_fail(world):
        _, outcome = cut_and_resume(world, cut)
    check(world, outcome)


def test_the_cuts_of_that_test_leave_rows_scored_and_unscored() -> None:
    seen = set()
    for reference in ("early", "late"):
        world = World(max_lag=2, steps=6, slots=16, group_size=3, reference=reference, score_token_s=1e-2)  # type: ignore[arg-type]
        diary = Diary()
        simulate(world, keeper=diary)
        for kept in diary.kept:
            seen |= {(reference, "reference" in row.columns) for row in kept.standing.rows.rows}
    assert len(seen) == 4


# ---- what is where when ------------------------------------------------------------------------------------------------


class Remembering(SimLearner):
    """Keeps the rows that it has seen, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[TrainRow] = []

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        self.rows += rows
        await super().accumulate(rows)


def run(world: World, environment: SimEnvironment | None = None, **algorithm: object) -> tuple[Outcome, list[TrainRow]]:
    """With the learner's rows."""
    learner = Remembering()
    outcome = simulate(world, environment=environment, learner=learner, **algorithm)
    outcome.learner.num_rows = learner.num_rows
    check(world, outcome)
    return outcome, learner.rows


def expected(row: TrainRow, seed: int = 0) -> Floats:
    """What a `SimScorer` says of a row."""
    return (row.loss_mask * (1 + (row.tokens + seed) % 7) / -4).astype(np.float32)


PLAIN = World(steps=3, groups_per_step=4, group_size=4, filter_zero_signal=False)


@pytest.mark.parametrize("max_lag", [0, 1])
@pytest.mark.parametrize("reference", ["early", "late"])
def test_the_learner_gets_every_row_with_its_own_reference(reference: str, max_lag: int) -> None:
    _, rows = run(replace(PLAIN, reference=reference, max_lag=max_lag))
    assert len(rows) == 48
    for row in rows:
        assert row.reference is not None and np.array_equal(row.reference, expected(row))


def test_without_a_stage_rows_have_no_more_than_before() -> None:
    _, rows = run(PLAIN)
    assert all(row.reference is None and row.values is None and row.returns is None for row in rows)


def test_an_early_stage_scores_rows_while_their_group_is_at_work_and_a_late_one_what_is_settled() -> None:
    for reference, is_before in (("early", True), ("late", False)):
        world = replace(PLAIN, reference=reference, slots=1, group_size=8, groups_per_step=1, steps=1, max_lag=1)
        outcome, _ = run(world)
        first = next(span.at for span in outcome.sink.of(Span) if span.worker == "reference")
        assert (first < max(event.at for event in outcome.sink.of(RolloutEnded) if event.group_id == 0)) == is_before


def test_a_place_that_stays_empty_is_not_scored_by_a_late_stage() -> None:
    world = World(steps=4, max_lag=1, reference="late", has_critic=True, success=1.0, max_replaced_per_step=0)
    outcome = simulate(world)
    check(world, outcome)
    assert scored(outcome, "reference") == 0 < scored(outcome, "values")
    assert outcome.critic is not None and outcome.critic.num_rows == 0


def test_stages_overlap_training_and_each_other() -> None:
    """Two stages and a learner of the same speed: one after the other they would take three times as long as each alone."""
    busy = replace(PLAIN, steps=10, max_lag=4, slots=64, mean_tokens=100, train_token_s=1e-3)
    alone = simulate(busy).seconds
    together = simulate(replace(busy, reference="early", has_critic=True, score_token_s=2e-4)).seconds
    assert together < 1.3 * alone


def test_a_stage_shows_what_it_waits_for_and_leaves_spans() -> None:
    seen: list[Status] = []
    holder: list[Pipeline] = []

    class Watched(SimEnvironment):
        async def rollout(self, context: Context) -> float:
            reward = await super().rollout(context)
            seen.append(await holder[0].status())
            return reward

    world = replace(PLAIN, reference="late", has_critic=True)
    outcome = simulate(world, environment=Watched(), on_pipeline=holder.append)
    waits = {(wait.owner, wait.what) for status in seen for wait in status.waits}
    assert {("stage reference", "rows to score"), ("stage values", "rows to score")} <= waits
    assert ("critic", "a group to learn from") in waits
    spans = {(span.worker, span.what) for span in outcome.sink.of(Span)}
    assert {("reference", "score"), ("values", "score"), ("critic", "accumulate"), ("critic", "step")} <= spans


def test_a_stage_that_hangs_is_named_by_the_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(self: SimScorer, rows: Sequence[TrainRow]) -> list[Floats]:
        return await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(SimScorer, "score", hang)
    with pytest.raises(StallError, match=r"stage reference has waited .* for its rows to be scored"):
        simulate(replace(PLAIN, reference="late", deadline_s=50.0))


def test_a_stage_that_breaks_stops_the_run_with_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: SimScorer, rows: Sequence[TrainRow]) -> list[Floats]:
        raise LearnerError("the reference broke")

    monkeypatch.setattr(SimScorer, "score", broken)
    with pytest.raises(LearnerError, match="the reference broke"):
        simulate(replace(PLAIN, reference="early"))


# ---- what groups are dropped while a stage is slow -----------------------------------------------------------------------


@pytest.mark.parametrize("reference", ["early", "late"])
@pytest.mark.parametrize("options", [{"surplus": "abort", "extra_groups": 4}, {"overdue": "restart"}])
def test_groups_that_are_aborted_or_begin_anew_never_leave_while_a_stage_has_them(
    reference: str, options: dict[str, object]
) -> None:
    fates = set[Fate]()
    for seed in range(6):
        world = World(
            steps=5, max_lag=2, tail=2.0, slots=64, groups_per_step=2, reference=reference, has_critic=True,
            score_token_s=5e-3, filter_zero_signal=False, seed=seed, **options,  # type: ignore[arg-type]
        )  # fmt: skip
        outcome = simulate(world)
        check(world, outcome)
        fates |= {event.fate for event in outcome.sink.of(GroupLeft)}
    assert Fate.TRAINED in fates and (Fate.ABORTED in fates) == ("surplus" in options)


@pytest.mark.parametrize("max_lag", [0, 1])
def test_groups_without_a_survivor_pass_by_the_stages(max_lag: float) -> None:
    class SomeFail(SimEnvironment):
        async def rollout(self, context: Context) -> float:
            reward = await super().rollout(context)
            if int(context.task.id.removeprefix("task-")) % 3 == 0:
                raise RuntimeError("the world broke")
            return reward

    for reference in ("early", "late"):
        for most in (0, None):
            world = World(
                steps=4, max_lag=max_lag, retries=0, reference=reference, has_critic=True, max_replaced_per_step=most
            )  # type: ignore[arg-type]
            outcome = simulate(world, environment=SomeFail())
            check(world, outcome)
            assert Fate.FAILED in {event.fate for event in outcome.sink.of(GroupLeft)}


# ---- numbers, by hand, through the whole path ------------------------------------------------------------------------


def test_the_kl_of_a_rollout_is_taken_off_what_its_group_is_compared_by_and_not_off_what_is_told() -> None:
    penalty = Penalty("k1", 0.5)
    credit = credit_of("dr_grpo", dr_grpo, discount=1, trace=1, penalty=penalty)
    outcome, rows = run(replace(PLAIN, reference="early", steps=1), credit=credit)
    told = {(event.group_id, event.member): event.reward for event in outcome.sink.of(RolloutEnded)}
    groups = [event.group_id for event in outcome.sink.of(GroupTaken)]
    for number, group_id in enumerate(groups):
        members = rows[4 * number : 4 * number + 4]
        compared = [
            told[group_id, member] - 0.5 * float((row.logprobs - expected(row))[row.loss_mask].sum())
            for member, row in enumerate(members)
        ]
        for row, reward in zip(members, compared, strict=True):
            assert np.allclose(row.advantages[row.loss_mask], reward - np.mean(compared), atol=1e-4)
            assert not row.advantages[~row.loss_mask].any()
    left = {event.group_id: event.mean_reward for event in outcome.sink.of(GroupLeft)}
    assert set(told.values()) == {0.0, 1.0}
    assert all(left[g] == pytest.approx(np.mean([told[g, m] for m in range(4)])) for g in groups)


class TwoTurns(SimEnvironment):
    """The first turn earns what its member's number says, the second one more; half a point is said to be of no turn."""

    async def rollout(self, context: Context) -> float:
        member = context._key.member  # type: ignore[attr-defined]
        await context.generate([1, 2])
        context.earned(float(member))
        await context.generate([3])
        context.earned(1.0)
        return member + 1.5


def test_gae_of_two_turns_by_hand() -> None:
    credit = credit_of("gae", dr_grpo, discount=0.9, trace=0.8, penalty=None)
    world = replace(PLAIN, has_critic=True, steps=1, groups_per_step=1, group_size=2, mean_tokens=3, tail=0.1)
    _, rows = run(world, TwoTurns(), credit=credit)
    for member, row in enumerate(rows):
        assert row.values is not None and np.array_equal(row.values, expected(row, seed=1))
        trained = np.flatnonzero(row.loss_mask)
        ends = [t for t in trained if t + 1 == len(row.tokens) or not row.loss_mask[t + 1]]
        assert len(ends) == 2
        earned = dict(zip(ends, [member, 1.5], strict=True))  # what no turn was said to have earned is the last one's
        later, after = 0.0, 0.0
        for t in reversed(trained):
            later = earned.get(t, 0.0) + 0.9 * after - row.values[t] + 0.9 * 0.8 * later
            after = row.values[t]
            assert row.advantages[t] == pytest.approx(later, abs=1e-5)
            assert row.returns is not None and row.returns[t] == pytest.approx(later + after, abs=1e-5)


def test_advantages_by_turn_by_hand() -> None:
    credit = credit_of("turns", dr_grpo, discount=0.5, trace=1, penalty=None)
    world = replace(PLAIN, steps=1, groups_per_step=1, group_size=2)
    _, rows = run(world, TwoTurns(), credit=credit, signal=signal_of("turns"))
    # turns earn 0 1.5 and 1 1.5: to go 0.75 1.5 and 1.75 1.5, the means 1.25 1.5
    for row, (first, second) in zip(rows, [(-0.5, 0.0), (0.5, 0.0)], strict=True):
        begins = np.flatnonzero(row.loss_mask & ~np.concatenate([[False], row.loss_mask[:-1]]))
        assert len(begins) == 2
        assert row.advantages[begins].tolist() == pytest.approx([first, second])


class SameSum(SimEnvironment):
    """One point a rollout, in the first turn or in the second; in every second group all in the first."""

    async def rollout(self, context: Context) -> float:
        is_same = int(context.task.id.removeprefix("task-")) % 2
        is_first = is_same or context._key.member % 2  # type: ignore[attr-defined]
        for turn in (True, False):
            await context.generate([1])
            context.earned(float(bool(is_first) == turn))
        return 1.0


def test_a_group_has_a_signal_by_its_turns_where_those_are_compared() -> None:
    credit = credit_of("turns", dr_grpo, discount=1, trace=1, penalty=None)
    world = replace(PLAIN, filter_zero_signal=True, steps=2)
    outcome, rows = run(world, SameSum(), credit=credit, signal=signal_of("turns"))
    fates = {event.group_id % 2: event.fate for event in outcome.sink.of(GroupLeft)}
    assert fates == {0: Fate.TRAINED, 1: Fate.FILTERED}
    assert any(row.advantages.any() for row in rows)


def row(number: int, member: int, part: int, agent: int, mask: str, reward: float, turns: list[float]) -> Row:
    loss_mask = np.array([one == "x" for one in mask])
    columns = {
        "member": member, "part": part, "agent": agent, "reward": reward, "turn_rewards": np.array(turns),
        "loss_mask": loss_mask, "tokens": np.arange(len(mask), dtype=np.int32), "logprobs": np.zeros(len(mask), np.float32),
        "values": np.where(loss_mask, 0.5, 7.0).astype(np.float32),
    }  # fmt: skip
    return Row(row_id=number, group_id=0, columns=columns)


def test_parts_of_a_rollout_are_one_after_the_other_and_agents_are_by_themselves() -> None:
    rows = [
        row(1, 0, 0, 0, ".xx", 3.0, [1.0]),
        row(2, 0, 1, 1, ".x", 5.0, [5.0]),
        row(3, 0, 2, 0, ".x.x", 3.0, [0.0, 1.0]),
    ]
    credit = credit_of("gae", dr_grpo, discount=1, trace=1, penalty=None)
    assert credit is not None
    columns = columns_of(rows, credit)
    # agent 0 earns 0 1 and then 0 2: 3 3 2 2 to go, less 0.5 everywhere
    assert [values.tolist() for values in columns["advantages"]] == [[0, 2.5, 2.5], [0, 4.5], [0, 1.5, 0, 1.5]]
    assert [values.tolist() for values in columns["returns"]] == [[0, 3, 3], [0, 5], [0, 2, 0, 2]]


def test_parts_are_compared_with_all_parts_of_their_agent_in_the_group() -> None:
    rows = [
        row(1, 0, 0, 0, ".x", 1.0, [1.0]),
        row(2, 0, 1, 1, ".x", 4.0, [0.0]),
        row(3, 0, 2, 1, ".xx", 4.0, [2.0]),
        row(4, 1, 0, 0, ".x", 0.0, [0.0]),
        row(5, 1, 1, 1, ".x", 0.0, [0.0]),
    ]
    credit = credit_of("parts", dr_grpo, discount=1, trace=1, penalty=None)
    assert credit is not None
    # agent 0: 1 and 0. Agent 1: 0 and 2 with the 2 that no part has earned, and 0; the mean of 2 4 0 is 2
    found = [values.tolist() for values in columns_of(rows, credit)["advantages"]]
    assert found == [[0, 0.5], [0, 0], [0, 2, 2], [0, -0.5], [0, -2]]


def test_rewards_of_more_turns_than_were_played_break_an_invariant() -> None:
    credit = credit_of("turns", dr_grpo, discount=1, trace=1, penalty=None)
    assert credit is not None
    with pytest.raises(InvariantError, match="rewards of 2 turns in a row of 1"):
        columns_of([row(1, 0, 0, 0, ".xx", 3.0, [1.0, 2.0])], credit)


# ---- the critic --------------------------------------------------------------------------------------------------------


class Noting(SimCritic):
    """Notes what it learned from, and how many steps it had made when it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.learned: list[TrainRow] = []
        self.num_steps = 0
        self.asked_at: list[int] = []

    async def score(self, rows: Sequence[TrainRow]) -> list[Floats]:
        self.asked_at.append(self.num_steps)
        return [np.full(len(row.tokens), self.num_steps, np.float32) for row in rows]

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        self.learned += rows
        await super().accumulate(rows)

    async def step(self) -> Metrics:
        await asyncio.sleep(1.0)
        self.num_steps += 1
        return {"loss": float(self.num_steps)}


def with_critic(world: World, critic: Noting) -> tuple[Outcome, list[TrainRow]]:
    learner = Remembering()
    return simulate(world, learner=learner, critic=critic), learner.rows


@pytest.mark.parametrize("max_lag", [0, 1])
def test_the_critic_learns_from_what_is_trained_in_that_order_and_steps_with_the_batch(max_lag: int) -> None:
    critic = Noting()
    outcome, rows = with_critic(replace(PLAIN, has_critic=True, max_lag=max_lag), critic)
    assert [row.tokens.tobytes() for row in critic.learned] == [row.tokens.tobytes() for row in rows]
    assert [step.metrics["critic_loss"] for step in outcome.sink.of(Stepped)] == [1.0, 2.0, 3.0]


def test_what_a_critic_says_that_is_no_number_is_left_out_of_the_events() -> None:
    class Diverged(Noting):
        async def step(self) -> Metrics:
            return {"grad_norm": float("nan"), "loss": float("inf"), "learning_rate": 1.0}

    outcome, _ = with_critic(replace(PLAIN, has_critic=True), Diverged())
    told = [msgspec.json.decode(msgspec.json.encode(step), type=Stepped) for step in outcome.sink.of(Stepped)]
    assert [step.metrics for step in told] == [{"critic_learning_rate": 1.0}] * 3


def test_a_critic_whose_batch_takes_longer_than_a_wait_may_is_no_stall_while_it_works() -> None:
    world = replace(PLAIN, has_critic=True, steps=2, score_token_s=1e-2, deadline_s=12.0)
    outcome = simulate(world)
    check(world, outcome)
    spans = [span for span in outcome.sink.of(Span) if span.worker == "critic"]
    assert max(span.seconds for span in spans) < 12 < sum(span.seconds for span in spans) / 2


def test_a_quick_critic_is_done_with_a_batch_before_the_learner_is() -> None:
    """It does not wait for the learner's step to learn from the last group."""
    spans = simulate(replace(PLAIN, has_critic=True, score_token_s=1e-6)).sink.of(Span)
    steps = {
        name: [span.at for span in spans if (span.worker, span.what) == (name, "step")]
        for name in ("learner", "critic")
    }
    assert len(steps["critic"]) == 3
    assert all(critic < learner for critic, learner in zip(steps["critic"], steps["learner"], strict=True))


def test_at_max_lag_zero_values_are_those_of_the_critic_after_the_last_batch() -> None:
    critic = Noting()
    _, rows = with_critic(replace(PLAIN, has_critic=True, max_lag=0), critic)
    versions = [int(row.values[0]) for row in rows if row.values is not None]
    assert versions == [0] * 16 + [1] * 16 + [2] * 16


def test_a_settled_group_is_never_taken_by_the_critic_alone() -> None:
    tasks = store_tasks(stages_of(World(reference="late"), SimCritic()), has_critic=True)
    assert tasks["train"].after == ("settle", "reference") and tasks["critic"].after == ("settle",)
    assert tasks["settle"].after == ("values",) and not tasks["reference"].by_group
    lockstep = store_tasks(stages_of(World(reference="late"), SimCritic()), has_critic=True, is_in_lockstep=True)
    assert lockstep["reference"].by_group and lockstep["values"].by_group


# ---- the proximal policy --------------------------------------------------------------------------------------------

STEPS = World(steps=4, groups_per_step=4, group_size=4, mini_batches=2, has_proximal=True, filter_zero_signal=False)


@pytest.mark.parametrize("max_lag", [0, 2])
@pytest.mark.parametrize("mini_batches", [2, 4])
def test_rows_after_a_step_are_scored_once_under_the_version_of_their_batch_and_others_are_not(
    max_lag: int, mini_batches: int
) -> None:
    """What the learner asserts of every row: see `simulated.WatchfulLearner`."""
    world = replace(STEPS, max_lag=max_lag, mini_batches=mini_batches)
    outcome = simulate(world)
    check(world, outcome)
    assert outcome.proximal is not None and outcome.proximal.num_loaded == 4
    assert outcome.proximal.num_scored == 4 * 16 * (mini_batches - 1) // mini_batches


def test_an_advantage_of_the_whole_batch_goes_with_the_proximal_policy_beside_the_learner() -> None:
    outcome = simulate(STEPS, over_batch=ADVANTAGES["reinforce_plus_plus"].over_batch)
    check(STEPS, outcome)
    assert outcome.proximal is not None and outcome.proximal.num_scored == 32


def test_a_row_that_was_scored_under_another_version_is_scored_anew_and_what_was_said_is_never_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is in the store of groups whose number divides by 3 is of the version before, and wrong."""
    num_stale, write = 0, MemoryStore.write

    async def haunted(store: MemoryStore, row_ids: Sequence[int], columns: Columns, *, overwrite: bool = False) -> None:
        nonlocal num_stale
        rows = store._table.partition("train").rows
        if "proximal" in columns and all(rows[row_id].group.id % 3 == 0 for row_id in row_ids):
            num_stale += sum(cell is not None for cell in columns["proximal"])
            wrong = [None if cell is None else cell + 1 for cell in columns["proximal"]]
            columns = {"proximal": wrong, "proximal_version": [one - 1 for one in columns["proximal_version"]]}
        await write(store, row_ids, columns, overwrite=overwrite)

    monkeypatch.setattr(MemoryStore, "write", haunted)
    outcome = simulate(replace(STEPS, max_lag=1))
    assert outcome.proximal is not None and isinstance(outcome.learner, WatchfulLearner)
    assert 0 < num_stale < outcome.learner.num_after_a_step == 32
    assert outcome.proximal.num_scored == 32 + num_stale


def test_what_a_row_has_of_a_version_before_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    put = MemoryStore.put

    async def stale(store: MemoryStore, group_ids: int, columns: Columns, **more: Any) -> Sequence[int]:
        old = {"proximal": [np.full(len(tokens), 9.0, np.float32) for tokens in columns["tokens"]]}
        return await put(store, group_ids, {**columns, **old, "proximal_version": [0] * len(old["proximal"])}, **more)

    monkeypatch.setattr(MemoryStore, "put", stale)
    outcome = simulate(replace(STEPS, max_lag=1))
    check(STEPS, outcome)
    assert outcome.proximal is not None and outcome.proximal.num_scored == 32


def test_the_proximal_policy_is_computed_while_the_learner_makes_the_steps_before() -> None:
    busy = replace(STEPS, steps=10, max_lag=4, slots=64, mean_tokens=100, mini_batches=4, groups_per_step=8)
    busy = replace(busy, train_token_s=1e-3, score_token_s=1e-3)
    outcome = simulate(busy)
    spans = outcome.sink.of(Span)
    scoring = sum(span.seconds for span in spans if span.worker == "proximal")
    alone = simulate(replace(busy, has_proximal=False)).seconds
    assert scoring > 0.5 * alone, "one after the other it would show"
    assert outcome.seconds < 1.01 * alone
    first_step = next(span.at for span in spans if (span.worker, span.what) == ("learner", "step"))
    first_score = next(span.at for span in spans if (span.worker, span.what) == ("proximal", "score"))
    assert first_score < first_step


def test_the_first_mini_batch_does_not_wait_for_weights_to_be_loaded() -> None:
    def set_up(pipeline: Pipeline) -> None:
        assert isinstance(pipeline._parts.proximal, SimFollower)
        pipeline._parts.proximal._load_s = 1000.0

    spans = simulate(replace(STEPS, steps=1), on_pipeline=set_up).sink.of(Span)
    steps = [span.at for span in spans if (span.worker, span.what) == ("learner", "step")]
    loaded = next(span.at for span in spans if (span.worker, span.what) == ("proximal", "load"))
    assert steps[0] < loaded < steps[1]


def test_a_place_that_stays_empty_is_not_scored_by_the_proximal_policy() -> None:
    world = replace(STEPS, success=1.0, filter_zero_signal=True, max_replaced_per_step=0)
    outcome = simulate(world)
    check(world, outcome)
    assert outcome.proximal is not None and outcome.proximal.num_scored == outcome.proximal.num_loaded == 0


def test_groups_that_are_taken_ahead_do_not_make_others_begin_anew_while_the_learner_is_busy() -> None:
    """But as soon as it waits for them: as many as without the stage."""
    for seed, train_token_s in [*((seed, 1e-3) for seed in range(6)), (6, 1e-2)]:
        world = replace(STEPS, max_lag=1, tail=2.0, slots=64, overdue="restart", train_token_s=train_token_s, seed=seed)
        outcome = simulate(world)
        check(world, outcome)
        restarts = outcome.sink.of(GroupRestarted)
        assert len(restarts) == len(simulate(replace(world, has_proximal=False)).sink.of(GroupRestarted))
        assert restarts or seed == 3
        spans = [span for span in outcome.sink.of(Span) if span.worker == "learner"]
        for restart in restarts:
            aborted = max(e.at for e in outcome.sink.of(RolloutAborted) if e.at <= restart.at)
            assert not any(span.at - span.seconds < aborted < span.at for span in spans)


def test_the_proximal_policy_shows_what_it_waits_for_and_one_that_hangs_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Status] = []
    holder: list[Pipeline] = []

    class Watched(SimEnvironment):
        async def rollout(self, context: Context) -> float:
            reward = await super().rollout(context)
            seen.append(await holder[0].status())
            return reward

    simulate(replace(STEPS, max_lag=1), environment=Watched(), on_pipeline=holder.append)
    waits = {(wait.owner, wait.what) for status in seen for wait in status.waits}
    assert {("stage proximal", "a group to score"), ("train, ahead", "a complete group")} <= waits

    async def hang(self: SimFollower, *anything: object) -> None:
        await asyncio.get_running_loop().create_future()

    for name, what in (("load", "the weights of the batch's start"), ("score", "its rows to be scored")):
        with monkeypatch.context() as patch:
            patch.setattr(SimFollower, name, hang)
            with pytest.raises(StallError, match=f"stage proximal has waited .* for {what}"):
                simulate(replace(STEPS, deadline_s=50.0))


def test_the_proximal_policy_comes_after_settling_and_the_learner_after_it() -> None:
    tasks = store_tasks(has_proximal=True)
    assert tasks["proximal"].after == ("settle",) and tasks["learn"].after == ("proximal",)
    assert set(store_tasks()) == {"settle", "train"}


def test_a_slow_stage_does_not_count_as_a_stall_while_it_works() -> None:
    outcome = simulate(replace(PLAIN, reference="early", score_token_s=0.1, steps=2))
    assert not [event for event in outcome.sink.of(Stalled) if event.owner.startswith("stage")]
    assert outcome.seconds > 30, "it was slow enough to be a stall"
