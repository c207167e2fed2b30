"""A run that is resumed with other settings than it had: on the virtual clock, over random worlds."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from typing import Any

from hypothesis import event, given
from hypothesis import strategies as st
from msgspec.structs import replace

from millstream.events import GroupAdmitted, GroupLeft, GroupResumed, GroupTaken, RolloutEnded, Stepped
from millstream.pipeline.admission import Admission, Place
from millstream.pipeline.reschedule import Changed
from millstream.types import Fate
from support.examples import examples
from support.simulated import Diary, Kept, Outcome, World, simulate
from support.worlds import history, unless_all_fail, with_surplus, worlds

schedules = st.fixed_dictionaries(
    {
        "groups_per_step": st.integers(1, 5),
        "max_lag": st.sampled_from([0, 0.5, 1, 1.5, 2, 4]),
        "lockstep": st.booleans(),
        "extra_groups": st.one_of(st.none(), st.integers(0, 8)),
        "surplus": st.sampled_from(["carry_over", "carry_over", "abort"]),
        "more_steps": st.integers(-4, 4),
    }
)

without_repeats = worlds.map(lambda world: replace(world, longest_first=False))
"""Longest first is drawn with prompts that repeat: here each prompt has a number of its own."""


def rescheduled(world: World, kept: Kept, schedule: dict[str, Any]) -> World:
    steps = max(kept.standing.ledger.version, world.steps + schedule["more_steps"])
    own = {name: schedule[name] for name in ("groups_per_step", "max_lag", "lockstep")}
    return with_surplus(replace(world, steps=steps, **own), schedule["extra_groups"], schedule["surplus"])


def resume_with(
    world: World, cut: random.Random, schedule: dict[str, Any], changed: Changed
) -> tuple[World, Kept, Outcome, int]:
    diary = Diary()
    whole = simulate(world, keeper=diary)
    kept = cut.choice(diary.kept)
    other = rescheduled(world, kept, schedule)
    outcome = simulate(other, kept=kept, changed=changed)
    sink = history(whole.sink.events[: kept.mark], outcome.sink.events)
    fields = {name: getattr(outcome, name) for name in outcome.__struct_fields__}
    return other, kept, Outcome(**{**fields, "sink": sink}), len(sink.events) - len(outcome.sink.events)


@examples(60, of=150)
@given(world=without_repeats, schedule=schedules, cut=st.randoms(use_true_random=False), rollouts=st.booleans())
def test_with_any_other_schedule_nothing_is_lost_doubled_or_too_old_and_superseded_prompts_are_fed_once_more(
    world: World, schedule: dict[str, Any], cut: random.Random, rollouts: bool
) -> None:
    with unless_all_fail(world):
        other, kept, outcome, begin = resume_with(world, cut, schedule, Changed(rollouts, schedule=True))
    check_changed(other, kept, outcome, begin)


@examples(30, of=60)
@given(
    world=without_repeats,
    schedule=schedules,
    cut=st.randoms(use_true_random=False),
    reference=st.sampled_from(["none", "early", "late"]),
    has_critic=st.booleans(),
    score_token_s=st.sampled_from([1e-4, 1e-2]),
    rollouts=st.booleans(),
)
def test_rows_that_a_reference_or_a_critic_has_scored_or_not_are_taken_over_as_well(
    world: World, schedule: dict[str, Any], cut: random.Random, rollouts: bool, **stages: Any
) -> None:
    with unless_all_fail(world):
        changed = Changed(rollouts, schedule=True)
        other, kept, outcome, begin = resume_with(replace(world, **stages), cut, schedule, changed)
    check_changed(other, kept, outcome, begin)


def check_changed(world: World, kept: Kept, outcome: Outcome, begin: int) -> None:
    """What must be true of a run that was resumed as another world, by the events from `begin` on and those before."""
    events = outcome.sink.events
    oldest: dict[int, int] = {}
    for one in outcome.sink.of(RolloutEnded):
        oldest[one.group_id] = min(one.start_version, oldest.get(one.group_id, one.start_version))
    for taken in (one for one in events[begin:] if isinstance(one, GroupTaken)):
        assert world.overdue == "restart" or taken.version - oldest[taken.group_id] <= math.ceil(world.max_lag)
        assert taken.lag <= math.ceil(world.max_lag)
    admitted = outcome.sink.of(GroupAdmitted)
    left = outcome.sink.of(GroupLeft)
    assert (
        sorted(one.group_id for one in admitted) == sorted(one.group_id for one in left) == list(range(len(admitted)))
    )

    task_of = {one.group_id: one.task_id for one in admitted}
    superseded = [one.group_id for one in left if one.fate is Fate.SUPERSEDED]
    event(f"superseded: {len(superseded) > 0}")
    again = Counter(task_of[group_id] for group_id in superseded)
    waiting = {f"task-{prompt}" for prompt in outcome.pipeline._context.to_feed}
    assert not waiting or outcome.pipeline.admission.is_finished
    for task_id, num in Counter(task_of.values()).items():
        assert num == 1 + again[task_id] - (task_id in waiting), "its prompt is fed again, once"
    numbers = {int(task_id.removeprefix("task-")) for task_id in task_of.values()}
    assert numbers == set(range(len(numbers))), "no prompt was skipped"
    trained = [task_of[one.group_id] for one in left if one.fate is Fate.TRAINED]
    assert len(trained) == len(set(trained)), "no prompt was trained twice"

    steps = outcome.sink.of(Stepped)
    assert [step.version for step in steps] == list(range(1, len(steps) + 1))
    new = [one for one in events[begin:] if isinstance(one, Stepped)]
    assert all(step.num_groups <= world.groups_per_step for step in new)
    if world.num_tasks is None:
        assert len(steps) == world.steps
    assert asyncio.run(outcome.store.stats()).rows == 0, "rows were left in the store"
    assert outcome.pipeline.admission.outstanding == 0
    assert not outcome.pipeline.waits.active()


def test_a_lower_max_lag_supersedes_what_is_too_old_and_a_higher_one_nothing() -> None:
    world, diary = World(max_lag=4, groups_per_step=2, steps=12, tail=1.5, num_engines=2, slots=3), Diary()
    simulate(world, keeper=diary)
    kept = max(
        diary.kept,
        key=lambda one: (
            one.standing.ledger.version - min((g.start for g in one.standing.ledger.groups.values()), default=99)
        ),
    )
    ledger = kept.standing.ledger
    old = {g for g, group in ledger.groups.items() if group.start + 1 < ledger.version}
    assert old
    lower = simulate(replace(world, max_lag=1), kept=kept, changed=Changed(schedule=True)).sink.of(GroupLeft)
    assert old <= {one.group_id for one in lower if one.fate is Fate.SUPERSEDED}
    higher = simulate(replace(world, max_lag=6), kept=kept, changed=Changed(schedule=True)).sink.of(GroupLeft)
    assert all(one.fate is not Fate.SUPERSEDED for one in higher)


def test_other_rollouts_keep_what_is_settled_and_begin_every_other_group_from_the_start() -> None:
    seen = Counter[str]()
    for seed in range(12):
        world, diary = World(max_lag=2, num_engines=2, slots=3, tail=1.5, seed=seed, group_size=3), Diary()
        simulate(world, keeper=diary)
        for kept in diary.kept:
            settled = set(kept.standing.rows.acknowledged["settle"])
            outcome = simulate(replace(world, group_size=4), kept=kept, changed=Changed(rollouts=True))
            for one in outcome.sink.of(GroupResumed):
                before = kept.standing.ledger.groups[one.group_id]
                if one.group_id in settled:
                    assert (one.kept, one.to_do) == (before.kept, before.to_do) and len(one.kept) == 3
                else:
                    assert (one.kept, one.to_do) == ([], [0, 1, 2, 3])
                    seen["partly done"] += bool(before.kept)
                seen["settled"] += one.group_id in settled
            sizes = {one.group_id: one.num_rollouts for one in outcome.sink.of(GroupTaken)}
            assert all(num == (3 if group_id in settled else 4) for group_id, num in sizes.items())
    assert seen["settled"] and seen["partly done"]


def test_at_max_lag_zero_a_resume_with_other_steps_does_what_a_run_with_those_steps_does() -> None:
    world = World(max_lag=0, failure=0.1, latency=1.0, num_turns=2, steps=6, groups_per_step=3)
    diary = Diary()
    simulate(world, keeper=diary)
    longer = replace(world, steps=9)
    whole = simulate(longer)
    kept = diary.kept[4]
    rest = simulate(longer, kept=kept, changed=Changed(schedule=True))

    def told(outcome: Outcome) -> list[tuple[object, ...]]:
        kinds = (GroupAdmitted, RolloutEnded, GroupTaken, GroupLeft, Stepped)
        found = [one for one in outcome.sink.events if isinstance(one, kinds)]
        return [
            tuple(getattr(one, name) for name in one.__struct_fields__ if name not in ("at", "seconds"))
            for one in found
        ]

    ours, all_of_it = sorted(map(repr, told(rest))), sorted(map(repr, told(whole)))
    assert ours and not Counter(ours) - Counter(all_of_it)


@given(
    places=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=40),
    size=st.integers(1, 4),
    steps=st.integers(0, 12),
    version=st.integers(0, 9),
)
def test_what_stays_within_reach_keeps_the_invariant_and_as_much_stays_as_can(
    places: list[tuple[int, int]], size: int, steps: int, version: int
) -> None:
    own = {number: Place(start, start + more) for number, (start, more) in enumerate(places)}
    admission = Admission(groups_per_step=size, max_lag=5, num_steps=max(steps, version))
    gone = admission.beyond_reach(version, own)
    kept = {number: place for number, place in own.items() if number not in gone}
    admission.restore(version, kept)  # raises if the invariant does not hold
    last = max(steps, version) - 1
    for number in gone:
        due = min(own[number].deadline, last)
        earlier = sum(min(place.deadline, last) <= due for place in kept.values())
        assert due < version or earlier >= (due - version + 1) * size, "there was room for it"
