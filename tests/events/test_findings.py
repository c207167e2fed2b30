"""Findings: every rule finds its failure in made-up events, and none is found in healthy ones. Real runs: `test_findings_for_real`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import takewhile

import pytest

from millstream.events import (
    Event,
    FindingEnded,
    FindingMade,
    GroupLeft,
    GroupScored,
    Resumed,
    RolloutEnded,
    RunEnded,
    RunStarted,
    Stepped,
)
from millstream.events.findings import RULES, Watch, findings_of
from millstream.types import Fate, Finish

GROUPS, MEMBERS = 8, 8
Rewards = Callable[[int, random.Random], list[float]]
Metrics = Callable[[int], dict[str, float]]


def started(**keys: bool) -> RunStarted:
    terms = {"run_id": "r", "seed": 0, "steps": 9, "num_tasks": 9, "filter_zero_signal": True, "min_group_size": 2}
    sizes = {"groups_per_step": GROUPS, "group_size": MEMBERS, "max_lag": 1.0, "lag_bound": 1, "budget": 16}
    return RunStarted(at=0.0, **terms, **sizes, **{"compares_members": True, **keys})  # type: ignore[arg-type]


def rollout(group: int, member: int, reward: float, length: int, finish: Finish = Finish.STOP) -> RolloutEnded:
    return RolloutEnded(
        at=0.0,
        group_id=group,
        member=member,
        attempt=0,
        reward=reward,
        num_tokens=length + 4,
        num_sampled=length,
        start_version=0,
        end_version=0,
        finish=finish,
        seconds=1.0,
    )


def run(
    steps: int,
    rewards: Rewards,
    *,
    metrics: Metrics = lambda step: {"entropy": 1.0, "behaviour_kl": 1e-3, "effective_sample_size": 0.99},
    length: Callable[[int], int] = lambda step: 20,
    cut: Callable[[int], bool] = lambda step: False,
    is_filtered: bool = True,
    seed: int = 0,
    groups: int = GROUPS,
) -> Iterator[Event]:
    """A run whose groups are judged as the pipeline does: equal rewards are filtered, and replaced up to as many times."""
    rng, group = random.Random(seed), 0
    for step in range(1, steps + 1):
        trained = replaced = 0
        while trained < groups and replaced < groups:
            found = rewards(step, rng)
            finish = Finish.LENGTH if cut(step) else Finish.STOP
            for member, reward in enumerate(found):
                yield rollout(group, member, reward, length(step) + rng.randrange(3), finish)
            fate = Fate.FILTERED if is_filtered and min(found) == max(found) else Fate.TRAINED
            trained += fate is Fate.TRAINED
            replaced += fate is Fate.FILTERED
            yield GroupLeft(
                at=0.0, group_id=group, fate=fate, num_members=len(found), mean_reward=sum(found) / len(found)
            )
            group += 1
        yield Stepped(
            at=float(step),
            version=step,
            num_groups=trained,
            num_rollouts=trained * MEMBERS,
            num_rows=trained * MEMBERS,
            num_tokens=1,
            seconds=1.0,
            metrics={"grad_norm": 0.5, **metrics(step)} if trained else {},
        )


def right(chance: Callable[[int], float], *, spread: float = 0.0) -> Rewards:
    """1 or 0. Tasks are of different difficulty: the chance of each differs by up to `spread`."""

    def rewards(step: int, rng: random.Random) -> list[float]:
        own = min(max(chance(step) + rng.uniform(-spread, spread), 0.0), 1.0)
        return [float(rng.random() < own) for _ in range(MEMBERS)]

    return rewards


def names(events: Iterator[Event], **keys: bool) -> dict[str, int]:
    """Findings and the steps at which they were made."""
    return {past.finding.name: past.finding.step for past in findings_of([started(**keys), *events])}


def falling(first: float, factor: float) -> Metrics:
    return lambda step: {"entropy": first * factor**step, "behaviour_kl": 1e-3, "effective_sample_size": 0.99}


HALF = right(lambda step: 0.5)
PLANTED: dict[str, tuple[int, Callable[[], Iterator[Event]]]] = {
    "all-rewards-equal": (5, lambda: run(8, lambda step, rng: [0.0] * MEMBERS)),
    "no-signal": (7, lambda: run(8, lambda step, rng: [float(rng.random() < 0.3)] * MEMBERS)),
    "empty-steps": (5, lambda: run(8, lambda step, rng: [float(rng.random() < 0.3)] * MEMBERS)),
    "reward-flat": (60, lambda: run(60, HALF, groups=32)),
    "entropy-collapsed": (25, lambda: run(40, right(lambda step: 0.2), metrics=falling(1.0, 0.8))),
    "ratio-exploded": (
        5,
        lambda: run(9, HALF, metrics=lambda step: {"behaviour_kl": 3.0, "effective_sample_size": 0.01}),
    ),
    "kl-exploded": (5, lambda: run(9, HALF, metrics=lambda step: {"reference_kl": 9.0})),
    "length-runaway": (25, lambda: run(40, HALF, length=lambda step: 20 + 2 * step)),
    "answers-cut": (10, lambda: run(12, right(lambda step: 0.2), cut=lambda step: True)),
    "weights-truncated": (
        5,
        lambda: run(9, HALF, metrics=lambda step: {"truncated_share": 0.6, "truncated_weight": 0.3}),
    ),
}


def test_every_rule_has_a_planted_failure() -> None:
    assert PLANTED.keys() == RULES.keys()


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_failure_is_named_within_its_number_of_steps(name: str) -> None:
    within, events = PLANTED[name]
    found = names(events())
    assert name in found and found[name] <= within, found


def logistic(low: float, high: float, middle: float, width: float) -> Callable[[int], float]:
    return lambda step: low + (high - low) / (1 + math.exp(-(step - middle) / width))


HEALTHY = {
    "it learns and stays below the top": lambda seed: run(
        80, right(logistic(0.2, 0.8, 30, 10), spread=0.2), seed=seed, metrics=falling(1.0, 0.97)
    ),
    "it solves the task, and its entropy goes": lambda seed: run(
        80, right(logistic(0.2, 1.0, 20, 5)), seed=seed, metrics=falling(1.0, 0.9), length=lambda step: 20
    ),
    "it solves the task at once": lambda seed: run(40, right(lambda step: 0.3 if step < 3 else 1.0), seed=seed),
    "it learns slowly": lambda seed: run(120, right(lambda step: 0.3 + 0.002 * step, spread=0.3), seed=seed),
    "few rollouts say little": lambda seed: run(40, HALF, seed=seed, groups=1),
    "answers grow as the reward does": lambda seed: run(
        60, right(logistic(0.2, 0.7, 25, 8)), seed=seed, length=lambda step: 20 + 2 * step
    ),
    "answers are cut at a length that suffices": lambda seed: run(
        60, right(logistic(0.2, 0.7, 5, 2)), seed=seed, cut=lambda step: True
    ),
    "half of the weights are cut by nearly nothing": lambda seed: run(
        60,
        right(logistic(0.2, 0.7, 25, 8)),
        seed=seed,
        metrics=lambda step: {"truncated_share": 0.5, "truncated_weight": 0.02},
    ),
    "a hard task, one answer in thirty": lambda seed: run(60, right(logistic(0.03, 0.5, 25, 8)), seed=seed),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_in_a_healthy_run(name: str) -> None:
    assert [names(HEALTHY[name](seed)) for seed in range(12)] == [{}] * 12


def test_groups_of_one_have_a_signal() -> None:
    events = run(20, lambda step, rng: [float(rng.random() < 0.02 * step)], is_filtered=False)
    assert names(events, compares_members=False) == {}


def test_equal_rewards_that_are_trained_have_no_signal_only_where_members_are_compared() -> None:
    def events() -> Iterator[Event]:
        return run(8, lambda step, rng: [float(rng.random() < 0.3)] * MEMBERS, is_filtered=False)

    assert "no-signal" in names(events())
    assert names(events(), compares_members=False) == {}


def test_a_run_that_follows_a_teacher_needs_no_reward() -> None:
    events = run(40, lambda step, rng: [0.0] * MEMBERS, is_filtered=False, metrics=lambda step: {"reference_kl": 9.0})
    assert names(events, learns_from_rewards=False) == {}


def test_a_ranking_has_a_flat_mean_and_is_not_called_flat() -> None:
    def ranked() -> Iterator[Event]:
        for event in run(60, HALF, groups=32):
            if isinstance(event, GroupLeft):
                scores = [member / MEMBERS for member in range(MEMBERS)]
                yield GroupScored(at=0.0, group_id=event.group_id, rewards=scores, seconds=0.0)
            yield event

    assert names(run(60, HALF, groups=32)).keys() == {"reward-flat"} and names(ranked()) == {}


def test_a_step_without_a_gradient_has_trained_nothing() -> None:
    assert "empty-steps" in names(run(9, HALF, metrics=lambda step: {"grad_norm": 0.0}))


def test_a_finding_ends_when_it_has_not_held_for_ten_steps_and_may_return() -> None:
    def chance(step: int) -> float:
        return 0.5 if 11 <= step <= 40 else 0.0

    watch = Watch()
    made = [one for event in [started(), *run(60, right(chance))] for one in watch.add(event)]
    told = [(type(one), one.step) for one in made if one.name == "all-rewards-equal"]
    assert told == [(FindingMade, 5), (FindingEnded, 20), (FindingMade, 50)] and "all-rewards-equal" in watch.open
    past = [one for one in findings_of(run(60, right(chance))) if one.finding.name == "all-rewards-equal"]
    assert [one.until for one in past] == [20, None]


def test_a_run_too_short_for_any_window_is_judged_at_its_end() -> None:
    short = list(run(2, lambda step, rng: [0.0] * MEMBERS))
    assert names(iter(short)) == {}
    assert names(iter([*short, RunEnded(at=9.0, outcome="finished", version=2)])).keys() == {
        "all-rewards-equal",
        "empty-steps",
    }
    assert names(iter([RunEnded(at=9.0, outcome="finished", version=0)])) == {}


def test_rollouts_of_groups_that_a_crash_took_are_not_counted_twice() -> None:
    """A group restored from a checkpoint has its mean alone; one that is rolled out again counts once."""
    events = list(run(12, HALF))
    lost = list(takewhile(lambda event: not isinstance(event, GroupLeft), run(1, lambda step, rng: [7.0] * MEMBERS)))
    resumed = Resumed(at=6.0, incarnation=1, version=6, from_seq=1, digest="")
    cut = next(n for n, event in enumerate(events) if isinstance(event, Stepped) and event.version == 6) + 1
    assert names(iter([*events[:cut], *lost, resumed, *events[cut:]])) == names(iter(events)) == {}


def test_the_memory_of_a_watch_does_not_grow_with_the_run() -> None:
    watch = Watch()
    for event in run(400, HALF, groups=2):
        watch.add(event)
    assert len(watch._so_far.last) == 20 and len(watch._so_far.first) == 10 and not watch._rewards


def test_findings_say_what_to_do_with_figures_and_nothing_but_plain_numbers() -> None:
    for within, events in PLANTED.values():
        for past in findings_of([started(), *events()], "my runs/first"):
            finding = past.finding
            assert finding.figures and all(math.isfinite(value) for value in finding.figures.values()), within
            assert any(character.isdigit() for character in finding.message) and len(finding.advice) > 40
            assert "RUN" not in finding.advice
            assert (
                "millstream eval" not in finding.advice or "millstream eval 'my runs/first' --show 3" in finding.advice
            )
