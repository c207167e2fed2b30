"""A run that is cut off at any checkpoint and taken up again: on the virtual clock, over random worlds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from millstream.errors import DataError, InvariantError
from millstream.events import (
    Event,
    GroupAdmitted,
    GroupLeft,
    GroupTaken,
    RolloutEnded,
    RolloutFailed,
    Stepped,
)
from millstream.pipeline.admission import Admission, Place
from millstream.pipeline.state import PipelineState
from millstream.store import Saved
from millstream.store.memory import MemoryStore
from support.examples import examples
from support.simulated import Diary, World, check, simulate
from support.worlds import cut_and_resume, unless_all_fail, worlds


@examples(60, of=150)
@given(world=worlds, cut=st.randoms(use_true_random=False))
def test_from_any_checkpoint_of_any_world_nothing_is_lost_nothing_is_doubled_and_nothing_is_too_old(
    world: World, cut: random.Random
) -> None:
    with unless_all_fail(world):
        _, outcome = cut_and_resume(world, cut)
    check(world, outcome)


class FarStore(MemoryStore):
    """As in another process: what is asked takes a while to get there, and so does the answer. Others are served meanwhile."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._draws = random.Random(0)

    async def _there_and_back(self, asking: Coroutine[Any, Any, Any]) -> Any:
        await asyncio.sleep(self._draws.random())
        found = await asking
        await asyncio.sleep(self._draws.random())
        return found

    async def put(self, *arguments: Any, **options: Any) -> Sequence[int]:
        ids: Sequence[int] = await self._there_and_back(super().put(*arguments, **options))
        return ids

    async def write(self, *arguments: Any, **options: Any) -> None:
        await self._there_and_back(super().write(*arguments, **options))

    async def close_groups(self, *arguments: Any, **options: Any) -> None:
        await self._there_and_back(super().close_groups(*arguments, **options))

    async def acknowledge(self, *arguments: Any, **options: Any) -> None:
        await self._there_and_back(super().acknowledge(*arguments, **options))

    async def drop(self, *arguments: Any, **options: Any) -> None:
        await self._there_and_back(super().drop(*arguments, **options))

    async def snapshot(self, *arguments: Any, **options: Any) -> Saved:
        saved: Saved = await self._there_and_back(super().snapshot(*arguments, **options))
        return saved


@examples(30, of=60)
@given(world=worlds.filter(lambda world: world.max_lag > 0), cut=st.randoms(use_true_random=False))
def test_a_checkpoint_is_one_moment_even_of_a_store_that_is_far_away(world: World, cut: random.Random) -> None:
    with unless_all_fail(world), pytest.MonkeyPatch.context() as patched:
        patched.setattr("support.simulated.MemoryStore", FarStore)
        _, outcome = cut_and_resume(world, cut)
    check(world, outcome)


def test_the_cuts_of_that_test_leave_groups_half_done_complete_and_empty() -> None:
    seen = set()
    for seed in range(30):
        world = World(max_lag=2, num_engines=2, slots=3, tail=1.5, failure=0.2, seed=seed, group_size=3)
        kept, _ = cut_and_resume(world, random.Random(seed))
        for group in kept.standing.ledger.groups.values():
            seen.add((bool(group.kept), bool(group.to_do)))
    assert seen >= {(True, True), (True, False), (False, True)}


def test_at_max_lag_zero_a_resumed_run_does_exactly_what_was_left() -> None:
    world = World(max_lag=0, failure=0.1, latency=1.0, num_turns=2, steps=6, groups_per_step=3)
    diary = Diary()
    whole = simulate(world, keeper=diary)
    kept = diary.kept[3]
    rest = simulate(world, kept=kept)

    def told(events: list[Event]) -> list[str]:
        kinds = (GroupAdmitted, RolloutEnded, RolloutFailed, GroupTaken, GroupLeft, Stepped)
        return sorted(
            repr([getattr(event, name) for name in event.__struct_fields__ if name not in ("at", "seconds")])
            for event in events
            if isinstance(event, kinds)
        )

    assert told(rest.sink.events) == told(whole.sink.events[kept.mark :])


def test_other_data_than_before_is_refused_by_name() -> None:
    diary = Diary()
    simulate(World(max_lag=2), keeper=diary)
    kept = next(k for k in diary.kept if any(g.to_do for g in k.standing.ledger.groups.values()))
    group_id, group = next((i, g) for i, g in kept.standing.ledger.groups.items() if g.to_do)
    groups = kept.standing.ledger.groups | {group_id: replace(group, task_id="another")}
    ledger = replace(kept.standing.ledger, groups=groups)
    with pytest.raises(DataError, match=f"group {group_id} at work on task 'another'"):
        simulate(World(max_lag=2), kept=replace(kept, standing=PipelineState(ledger, kept.standing.rows)))


def test_places_that_cannot_all_be_trained_in_time_are_refused() -> None:
    with pytest.raises(InvariantError, match="cannot all be trained in time"):
        Admission(groups_per_step=1, max_lag=1).restore(5, {1: Place(4, 5), 2: Place(4, 5)})
