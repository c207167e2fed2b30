"""The bias report: silent where losses are random, loud where they are not. Every run here has a fixed seed.

Shapes: G groups, M members of a group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from millstream.env import Context
from millstream.events import (
    Event,
    GroupAdmitted,
    GroupLeft,
    GroupRestarted,
    GroupResumed,
    GroupScored,
    RolloutAborted,
    RolloutEnded,
    RolloutFailed,
    RolloutStarted,
    Stepped,
)
from millstream.events.bias import BiasReport, BiasTest, bias_report, kaplan_meier_mean
from millstream.events.bias.bootstrap import Quantity, cut_edges, group_sums, resampled_means
from millstream.events.bias.compare import judge
from millstream.events.bias.table import GroupLog
from millstream.events.metrics import StepMetrics
from millstream.events.summary import summarise
from millstream.sim.draws import uniform
from millstream.sim.environment import SimEnvironment
from millstream.types import Fate, Finish
from support.simulated import World, simulate

Array = NDArray[np.float64]
GROUPS, MEMBERS = 500, 8
TOKENS, SECONDS, DIFFICULTY, SOURCE = range(4)


# ---- synthetic runs ----------------------------------------------------------------------------------------------------


def ended(group: int, member: int, tokens: float, *, reward: float = 1.0, attempt: int = 0) -> RolloutEnded:
    return RolloutEnded(
        at=float(group + 1),
        group_id=group,
        member=member,
        attempt=attempt,
        reward=reward,
        num_tokens=int(tokens),
        num_sampled=int(tokens),
        start_version=0,
        end_version=0,
        finish=Finish.STOP,
        seconds=tokens / 100,
    )


def failed(group: int, member: int, tokens: float, *, is_final: bool = True, has_turns: bool = True) -> RolloutFailed:
    """After `tokens`; without `has_turns` it was still in its first turn, and nobody has counted them."""
    return RolloutFailed(
        at=float(group + 1),
        group_id=group,
        member=member,
        attempt=0,
        error="EnvironmentFailed",
        message="",
        is_final=is_final,
        seconds=tokens / 100,
        num_sampled=int(tokens) if has_turns else 0,
    )


def admitted(group: int, *, task: str | None = None, source: str = "") -> GroupAdmitted:
    task = str(group) if task is None else task
    return GroupAdmitted(
        at=float(group), group_id=group, task_id=task, epoch=0, start_version=0, deadline=1, source=source
    )


def left(group: int, fate: Fate = Fate.TRAINED) -> GroupLeft:
    return GroupLeft(at=float(group + 1), group_id=group, fate=fate)


def lengths(rng: np.random.Generator, *, groups: int = GROUPS, tail: float = 0.8) -> Array:
    """Tokens: a long tail, and rollouts of one prompt are alike."""
    prompt_G1, own_GM = rng.standard_normal((groups, 1)), rng.standard_normal((groups, MEMBERS))
    tokens_GM: Array = np.round(200 * np.exp(tail * (0.5 * prompt_G1 + 0.75**0.5 * own_GM))) + 1
    return tokens_GM


def coins(rng: np.random.Generator, difficulty_G: Array) -> Array:
    return (rng.random((len(difficulty_G), MEMBERS)) >= difficulty_G[:, None]).astype(np.float64)


def run(
    rng: np.random.Generator,
    tokens_GM: Array,
    lost_GM: NDArray[np.bool_],
    *,
    seen_GM: Array | None = None,
    rewards_GM: Array | None = None,
    sources: list[str] | None = None,
    has_turns: bool = True,
) -> list[Event]:
    """The lost fail at their end, or after `seen_GM` tokens."""
    seen_GM = tokens_GM if seen_GM is None else seen_GM
    rewards_GM = coins(rng, rng.random(len(tokens_GM))) if rewards_GM is None else rewards_GM
    events: list[Event] = []
    for group, lost_M in enumerate(lost_GM.tolist()):
        events.append(admitted(group, source=sources[group] if sources else ""))
        for member, is_lost in enumerate(lost_M):
            if is_lost:
                events.append(failed(group, member, seen_GM[group, member], has_turns=has_turns))
            else:
                reward = float(rewards_GM[group, member])
                events.append(ended(group, member, tokens_GM[group, member], reward=reward))
        events.append(left(group, Fate.TRAINED if lost_M.count(False) >= 2 else Fate.FAILED))
    return events


def share(is_so: Callable[[np.random.Generator], bool], count: int) -> float:
    return sum(is_so(np.random.default_rng(seed)) for seed in range(count)) / count


def is_found(events: list[Event], quantity: int, about: float = -5.0) -> bool:
    """Whether it is called a bias, and its size is about right."""
    test = bias_report(events).tests[quantity]
    return test.verdict == "biased" and abs(test.bias - about) < 2.5


# ---- Kaplan-Meier ------------------------------------------------------------------------------------------------------


def test_kaplan_meier_by_hand() -> None:
    """1, 2+, 3, 4: survival falls to 3/4 at 1, to 3/8 at 3, to 0 at 4. The mean is 1/4 + 3 * 3/8 + 4 * 3/8."""
    values, is_cut = np.array([4.0, 2.0, 1.0, 3.0]), np.array([False, True, False, False])
    assert kaplan_meier_mean(values, is_cut) == pytest.approx(2.875)
    assert kaplan_meier_mean(values, np.zeros(4, dtype=np.bool_)) == pytest.approx(2.5)
    all_cut = np.array([True, True, True, True])
    assert kaplan_meier_mean(values, all_cut) == pytest.approx(4.0), "nobody ended before the largest"


def test_kaplan_meier_of_the_textbook() -> None:
    """Weeks in remission under 6-MP (Freireich 1963): survival .857 from 6, .807 from 7, .753, .690, .627, .538, .448 from 23."""
    ends, cuts = [6, 6, 6, 7, 10, 13, 16, 22, 23], [6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
    values, is_cut = np.array([*ends, *cuts], dtype=float), np.arange(21) >= len(ends)
    assert kaplan_meier_mean(values, is_cut) == pytest.approx(23.287, abs=1e-3)


def test_kaplan_meier_of_the_bootstrap_agrees_with_the_plain_one() -> None:
    rng = np.random.default_rng(0)
    for places, tolerance in ((5, 1e-12), (10_000, 2e-3)):
        tokens, is_cut = lengths(rng).ravel(), rng.random(GROUPS * MEMBERS) < 0.2
        tokens[is_cut] = rng.integers(1, places, is_cut.sum()) / places * 800
        group = np.repeat(np.arange(GROUPS), MEMBERS)
        sample = Quantity("tokens", group, tokens, is_cut, tokens, (is_cut, ~is_cut), 0, 0)
        edges = cut_edges(tokens[is_cut])
        whole = group_sums(sample, edges, GROUPS).sum(axis=0, keepdims=True)
        assert resampled_means(whole, edges).kaplan_meier[0] == pytest.approx(
            kaplan_meier_mean(tokens, is_cut), rel=tolerance
        )


# ---- nothing to find ---------------------------------------------------------------------------------------------------


def test_without_a_loss_there_is_exactly_no_bias() -> None:
    rng = np.random.default_rng(0)
    tokens_GM = lengths(rng)
    report = bias_report(run(rng, tokens_GM, tokens_GM < 0, sources=["a", "b"] * (GROUPS // 2)))
    assert not report.is_biased
    for test in report.tests:
        assert (test.bias, test.kaplan_meier, test.low, test.high, test.p_value) == (0, 0, 0, 0, 1)
        assert (test.verdict, test.rollouts, test.lost) == ("no bias found", GROUPS * MEMBERS, 0)
    assert bias_report([]).tests[TOKENS].verdict == "no bias found"


def random_losses(rng: np.random.Generator) -> list[Event]:
    """A run that loses at random, in one of the ways in which runs do."""
    tokens_GM = lengths(rng, groups=120, tail=rng.choice([0.4, 0.8, 1.2]))
    rate, kind, shape = rng.choice([0.02, 0.1, 0.3]), rng.integers(5), tokens_GM.shape
    sources = rng.choice(["a", "b", "c"], len(tokens_GM)).tolist()
    is_lost_GM = rng.random(shape) < rate
    if kind == 1:  # some prompts are worse than others
        is_lost_GM = rng.random(shape) < rng.beta(rate / 2, (1 - rate) / 2, (len(tokens_GM), 1))
    if kind <= 1:
        return run(rng, tokens_GM, is_lost_GM, sources=sources)
    if kind == 2:  # cut off somewhere
        return run(rng, tokens_GM, is_lost_GM, seen_GM=tokens_GM * rng.random(shape), sources=sources)
    events = run(rng, tokens_GM, tokens_GM < 0, sources=sources)
    if kind == 3:  # whole groups
        is_lost_G = rng.random(len(tokens_GM)) < rate
        return [
            replace(e, fate=Fate.FAILED) if isinstance(e, GroupLeft) and is_lost_G[e.group_id] else e for e in events
        ]
    return [attempt for event in events for attempt in retried(rng, event, rate)]


def retried(rng: np.random.Generator, event: Event, rate: float) -> list[Event]:
    """A rollout that is lost at random, and then rolled out again: here the new one is a copy."""
    if not isinstance(event, RolloutEnded) or rng.random() >= rate:
        return [event]
    seen = int(rng.integers(event.num_sampled + 1))
    return [failed(event.group_id, event.member, seen, is_final=False), replace(event, attempt=1)]


def test_losses_at_random_raise_a_false_alarm_in_few_runs() -> None:
    assert share(lambda rng: bias_report(random_losses(rng)).is_biased, 80) <= 0.07


def test_an_alarm_takes_more_than_one_small_p_value_among_four() -> None:
    tests = [
        BiasTest(
            quantity="",
            bias=0,
            kaplan_meier=0,
            low=0,
            high=0,
            p_value=p,
            verdict="no bias found",
            rollouts=9,
            lost=1,
            note="",
        )
        for p in (0.04, 0.011, 0.5, 0.02)
    ]
    judged = judge(tests)
    assert [test.p_value for test in judged] == pytest.approx([0.08, 0.044, 0.5, 0.06])
    assert [test.verdict == "biased" for test in judged] == [False, True, False, False]


# ---- a planted bias of 5% ----------------------------------------------------------------------------------------------


def solve(shift: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function passes 5%."""
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if shift(middle) < 0.05 else (low, middle)
    return low


MANY = lengths(np.random.default_rng(1), groups=20_000)


def test_losing_long_rollouts_is_found_when_the_kept_are_5_percent_short() -> None:
    def loss(tokens_GM: Array, slope: float) -> Array:
        return np.minimum(1.0, slope * tokens_GM / 1000)

    slope = solve(lambda slope: 1 - np.average(MANY, weights=1 - loss(MANY, slope)) / MANY.mean(), 0, 1)

    def is_loss_found(rng: np.random.Generator) -> bool:
        tokens_GM = lengths(rng)
        return is_found(run(rng, tokens_GM, rng.random(tokens_GM.shape) < loss(tokens_GM, slope)), TOKENS)

    assert share(is_loss_found, 25) >= 0.9


def test_a_time_limit_is_found_when_the_kept_are_5_percent_short() -> None:
    """Nobody knows how long those would have become that it cut off, nor what they had sampled: the size is a lower bound."""

    def short_of(limit: float) -> float:
        return float(1 - MANY.mean(where=limit > MANY) / MANY.mean())

    limit = float(np.quantile(MANY, 1 - solve(lambda cut: short_of(float(np.quantile(MANY, 1 - cut))), 0, 0.5)))

    def is_limit_found(rng: np.random.Generator) -> bool:
        tokens_GM = lengths(rng)
        events = run(rng, tokens_GM, tokens_GM >= limit, seen_GM=np.full(tokens_GM.shape, limit), has_turns=False)
        return is_found(events, SECONDS, about=-3.5)

    assert share(is_limit_found, 25) >= 0.9


def test_losing_hard_prompts_is_found_when_the_kept_are_5_percent_easier() -> None:
    """Difficulties are even from 0 to 1; with a loss of s * difficulty the kept have a mean of (1/2 - s/3) / (1 - s/2)."""
    slope = solve(lambda s: 1 - 2 * (1 / 2 - s / 3) / (1 - s / 2), 0, 1)

    def is_loss_found(rng: np.random.Generator) -> bool:
        tokens_GM, difficulty_G = lengths(rng), rng.random(GROUPS)
        is_lost_GM = rng.random(tokens_GM.shape) < slope * difficulty_G[:, None]
        return is_found(run(rng, tokens_GM, is_lost_GM, rewards_GM=coins(rng, difficulty_G)), DIFFICULTY)

    assert share(is_loss_found, 25) >= 0.9


def test_a_source_that_loses_5_percent_of_its_share_is_found() -> None:
    """Of a half, among losses of 5% everywhere: 0.5 (1 - s) / (1 - s/2) = 0.475."""
    extra = 0.05 / 0.525

    def is_loss_found(rng: np.random.Generator) -> bool:
        tokens_GM, is_far_G = lengths(rng), rng.random(GROUPS) < 0.5
        is_lost_GM = rng.random(tokens_GM.shape) < 1 - 0.95 * (1 - extra * is_far_G[:, None])
        sources = np.where(is_far_G, "far", "near").tolist()
        return is_found(run(rng, tokens_GM, is_lost_GM, sources=sources), SOURCE, about=2.5)

    assert share(is_loss_found, 25) >= 0.9


def test_a_time_limit_is_found_behind_retries_that_succeed() -> None:
    """In the end no rollout is missing: each that was cut off has been replaced by a shorter one."""
    rng = np.random.default_rng(0)
    events = run(rng, np.minimum(lengths(rng), 300), np.zeros((GROUPS, MEMBERS), dtype=np.bool_))
    short = [event for event in events if isinstance(event, RolloutEnded) and event.num_sampled < 300]
    again = iter(short * 9)
    cut: list[Event] = []
    for event in events:
        if isinstance(event, RolloutEnded) and event.num_sampled == 300:
            cut.append(failed(event.group_id, event.member, 300, is_final=False))
            event = replace(next(again), group_id=event.group_id, member=event.member, attempt=1)
        cut.append(event)
    report = bias_report(cut)
    assert report.rows[0].rollouts == report.rows[1].rollouts == GROUPS * MEMBERS
    assert report.tests[TOKENS].verdict == report.tests[SECONDS].verdict == "biased"
    assert report.tests[TOKENS].high < 0
    assert "ended at another attempt" in report.tests[TOKENS].note


def test_failures_somewhere_on_the_way_leave_the_interval_wide_and_the_verdict_open() -> None:
    rng = np.random.default_rng(0)
    tokens_GM = lengths(rng)
    is_lost_GM = rng.random(tokens_GM.shape) < 0.1
    test = bias_report(run(rng, tokens_GM, is_lost_GM, seen_GM=tokens_GM * rng.random(tokens_GM.shape))).tests[TOKENS]
    assert test.low < test.kaplan_meier < test.bias == 0 < test.high
    assert test.verdict == "no bias found"


# ---- the production pipeline on the virtual clock ----------------------------------------------------------------------

WORLD = World(steps=30, groups_per_step=4, group_size=4, slots=64, tail=1.0, latency=0.2, success=0.5)


class Limited:
    """An environment that gives up on whatever takes longer than the limit."""

    def __init__(self, limit_s: float) -> None:
        self._inner, self._limit_s = SimEnvironment(latency_s=uniform(0, 0.2)), limit_s

    async def rollout(self, context: Context) -> float:
        async with asyncio.timeout(self._limit_s):
            return await self._inner.rollout(context)


def by_name(report: BiasReport) -> dict[str, int]:
    return {row.name: row.rollouts for row in report.rows}


def test_a_run_that_waits_for_stragglers_has_no_bias() -> None:
    events = simulate(WORLD).sink.events
    report, counts = bias_report(events), by_name(bias_report(events))
    assert not report.is_biased
    assert all(test.bias == 0 for test in report.tests)
    assert counts["trained"] == 30 * 4 * 4
    assert counts["filtered"] == counts["admitted"] - counts["trained"] > 0


def test_a_run_whose_environment_fails_at_random_has_no_bias() -> None:
    report = bias_report(simulate(replace(WORLD, failure=0.2)).sink.events)
    assert by_name(report)["failed"] > 0
    assert not report.is_biased


def test_a_run_in_which_long_rollouts_fail_is_biased() -> None:
    report = bias_report(simulate(WORLD, environment=Limited(0.6)).sink.events)
    assert report.is_biased
    assert report.tests[SECONDS].verdict == "biased"
    assert report.tests[SECONDS].high < 0


def test_what_is_in_flight_when_the_log_ends_is_not_lost() -> None:
    events = simulate(WORLD).sink.events
    report = bias_report(events[: len(events) // 2])
    counts = by_name(report)
    assert counts["in flight"] > 0
    assert counts["admitted"] == sum(counts.values()) - counts["admitted"]
    assert not report.is_biased
    assert report.tests[TOKENS].rollouts == counts["trained"] + counts["filtered"]


# ---- the table, and what counts as what --------------------------------------------------------------------------------


def test_the_rows_tell_what_each_class_is_made_of() -> None:
    events: list[Event] = [
        admitted(0, source="a"),
        ended(0, 0, 100, reward=1.0),
        ended(0, 1, 300, reward=0.0),
        failed(0, 2, 50),
        left(0),
        admitted(1, source="b"),
        ended(1, 0, 200, reward=1.0),
        left(1, Fate.FILTERED),
        admitted(2, source="b"),
        RolloutStarted(at=3.0, group_id=2, member=0, attempt=0),
        RolloutStarted(at=4.0, group_id=2, member=1, attempt=0),
        replace(ended(2, 1, 70), at=10.0),
    ]
    report = bias_report(events)
    rows = {row.name: row for row in report.rows}
    assert by_name(report) == {
        "admitted": 6,
        "trained": 2,
        "filtered": 1,
        "failed": 1,
        "group failed": 0,
        "aborted": 0,
        "in flight": 1,
        "open": 1,
    }
    assert (rows["trained"].tokens_mean, rows["trained"].seconds_mean, rows["trained"].reward_mean) == (200, 2, 0.5)
    assert rows["trained"].tokens_p95 == pytest.approx(290)
    assert rows["trained"].sources == {"a": 1.0}
    assert rows["admitted"].sources == {"a": 0.5, "b": 0.5}
    assert (rows["failed"].tokens_mean, rows["failed"].reward_mean) == (50, None)
    assert (rows["in flight"].tokens_mean, rows["in flight"].seconds_mean) == (None, 7)
    assert rows["failed"].is_lower_bound and rows["in flight"].is_lower_bound and not rows["trained"].is_lower_bound
    assert msgspec.json.decode(msgspec.json.encode(report), type=BiasReport) == report


def test_a_rollout_that_failed_counts_once_and_alike_in_the_report_the_summary_and_the_metrics() -> None:
    """One that ended in a group that failed is not one of them, and a retried attempt is not a failed rollout."""
    whole = simulate(replace(WORLD, failure=0.3, retries=1)).sink.events
    report, summary, metrics = bias_report(whole), summarise(whole), StepMetrics()
    finals = [event.is_final for event in whole if isinstance(event, RolloutFailed)]
    rows = [row for event in whole if (row := metrics.add(event)) is not None]
    assert summary.rollouts_failed == by_name(report)["failed"] == finals.count(True) > 0
    assert summary.rollouts_retried == finals.count(False) > 0
    last = max(number for number, event in enumerate(whole) if isinstance(event, Stepped))
    late = [event.is_final for event in whole[last:] if isinstance(event, RolloutFailed)]
    assert sum(row["rollouts_failed"] for row in rows) == summary.rollouts_failed - late.count(True)
    assert sum(row["rollouts_retried"] for row in rows) == summary.rollouts_retried - late.count(False)
    events: list[Event] = [admitted(0), ended(0, 0, 100), failed(0, 1, 50), failed(0, 2, 50), left(0, Fate.FAILED)]
    counts = by_name(bias_report(events))
    assert (counts["failed"], counts["group failed"]) == (2, 1)


def test_rewards_are_those_of_the_whole_group_where_it_is_scored_as_one() -> None:
    partial = [replace(ended(0, member, 100, reward=0.0), is_partial=True) for member in (1, 0)]
    events: list[Event] = [
        admitted(0),
        *partial,
        failed(0, 2, 50),
        GroupScored(at=2.0, group_id=0, rewards=[0.25, 1.0], seconds=1.0),
        left(0),
    ]
    assert {row.name: row for row in bias_report(events).rows}["trained"].reward_mean == 0.625
    lines = GroupLog(events).table()
    assert lines.reward[:2].tolist() == [1.0, 0.25], "member 1 ended first"


def test_the_declared_filter_is_shown_and_is_no_bias() -> None:
    rng = np.random.default_rng(0)
    events = run(rng, lengths(rng), np.zeros((GROUPS, MEMBERS), dtype=np.bool_))
    is_long_G = {e.group_id for e in events if isinstance(e, RolloutEnded) and e.num_sampled > 1000}
    events = [
        replace(e, fate=Fate.FILTERED) if isinstance(e, GroupLeft) and e.group_id in is_long_G else e for e in events
    ]
    report = bias_report(events)
    assert not report.is_biased
    assert report.tests[TOKENS].bias == 0
    assert report.declared[TOKENS].high < -5
    assert {test.verdict for test in report.declared} == {"declared"}


def test_the_difficulty_of_a_group_without_survivors_is_that_of_its_task_in_another_epoch_or_unknown() -> None:
    lost: list[Event] = [failed(1, 0, 10), left(1, Fate.FAILED), failed(2, 0, 10), left(2, Fate.FAILED)]
    events = [
        admitted(0, task="a"),
        ended(0, 0, 10, reward=0.0),
        ended(0, 1, 10, reward=0.5),
        left(0),
        admitted(1, task="a"),
        admitted(2, task="b"),
        *lost,
        admitted(3, task="c"),
        ended(3, 0, 10, reward=1.0),
        left(3),
    ]
    test = bias_report(events).tests[DIFFICULTY]
    assert (test.rollouts, test.lost, test.note) == (4, 2, "nothing is known of 1 lost")
    everything, kept = (1 + 0.5 + 0.75 + 0) / 4, (1 + 0.5 + 0) / 3
    assert test.bias == pytest.approx(100 * (kept - everything) / everything)
    assert bias_report([admitted(2, task="b"), *lost]).tests[DIFFICULTY].verdict == "not tested"


def test_a_member_that_is_rolled_out_again_after_a_crash_counts_once() -> None:
    events: list[Event] = [
        admitted(0),
        ended(0, 0, 10),
        ended(0, 1, 1000),
        RolloutStarted(at=1.0, group_id=0, member=2, attempt=0),
        failed(0, 3, 5),
        GroupResumed(at=2.0, group_id=0, incarnation=1, kept=[0], to_do=[1, 2]),
        RolloutStarted(at=2.0, group_id=0, member=1, attempt=0),
        ended(0, 1, 20),
        ended(0, 2, 30),
        left(0),
    ]
    report = bias_report(events)
    assert by_name(report) == {
        "admitted": 4,
        "trained": 3,
        "filtered": 0,
        "failed": 1,
        "group failed": 0,
        "aborted": 0,
        "in flight": 0,
        "open": 0,
    }
    assert report.rows[1].tokens_mean == 20


def test_a_run_that_keeps_nothing_is_not_tested() -> None:
    report = bias_report([admitted(0), failed(0, 0, 10), left(0, Fate.FAILED)])
    assert {test.verdict for test in report.tests} == {"not tested"}
    assert not report.is_biased


def test_the_same_events_and_seed_give_the_same_report() -> None:
    events = random_losses(np.random.default_rng(3))
    assert bias_report(events, seed=7) == bias_report(events, seed=7)


def hanging(seconds: float, *, num_groups: int = 300) -> list[Event]:
    """Rollouts of about a second, of which one in twenty is cut off after so many; its second attempt is another draw."""
    rng, events = np.random.default_rng(0), list[Event]()
    for group in range(num_groups):
        events.append(admitted(group))
        for member in range(4):
            is_cut, tokens = rng.random() < 0.05, 100 * rng.lognormal(0, 0.3)
            if is_cut:
                events.append(failed(group, member, 100 * seconds, is_final=False, has_turns=False))
            events.append(ended(group, member, tokens, attempt=int(is_cut)))
        events.append(left(group, Fate.TRAINED))
    return events


def test_a_step_that_hangs_is_not_taken_for_a_slow_one_that_was_lost() -> None:
    """Nothing that ended took half as long as the limit that ended those."""
    report = bias_report(hanging(60.0))
    seconds = next(test for test in report.tests if test.quantity == "seconds")
    assert not report.is_biased and seconds.lost > 20
    assert f"nothing is known of {seconds.lost} lost" in seconds.note or seconds.verdict == "not tested"


def test_a_limit_that_others_come_near_is_one_that_cuts_the_slow_off() -> None:
    assert bias_report(hanging(1.4)).is_biased


def test_a_resume_does_not_forget_what_a_group_drew_before_it_began_anew() -> None:
    events: list[Event] = [
        admitted(0),
        RolloutStarted(at=0.0, group_id=0, member=0, attempt=0),
        RolloutAborted(at=1.0, group_id=0, member=0, attempt=0, why="slow", seconds=90.0, num_sampled=9000),
        GroupRestarted(at=1.0, group_id=0, start_version=1, deadline=2, restarts=1, first_attempt=2),
        RolloutStarted(at=1.0, group_id=0, member=0, attempt=2),
        GroupResumed(at=2.0, group_id=0, incarnation=1, kept=[], to_do=[0]),
        RolloutStarted(at=2.0, group_id=0, member=0, attempt=2),
        ended(0, 0, 10, attempt=2),
        left(0),
    ]
    tokens = bias_report(events).tests[TOKENS]
    assert (tokens.rollouts, tokens.lost) == (1, 1), "its first draw was thrown away"
