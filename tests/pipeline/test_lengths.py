"""Longest first: what is expected of a prompt, and what the order and the place of its requests make of it."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from millstream.clock import run_virtual
from millstream.events import GroupAdmitted, GroupTaken
from millstream.pipeline import lengths as module
from millstream.pipeline.lengths import ExpectedLengths
from millstream.pipeline.state import Ledger
from millstream.serving.router import Router
from millstream.sim.draws import constant
from millstream.sim.engine import SimEngine
from support.sim_requests import request
from support.simulated import NUM_PROMPTS, Diary, World, check, simulate


def expected(**rollouts: list[int]) -> ExpectedLengths:
    lengths = ExpectedLengths()
    for task_id, of_task in rollouts.items():
        for num_sampled in of_task:
            lengths.add(task_id, num_sampled)
    return lengths


def test_a_prompt_is_expected_to_be_as_long_as_it_was_and_an_unknown_one_as_long_as_all() -> None:
    lengths = expected(long=[300] * 8, short=[100] * 8)
    assert lengths.relative("long") == pytest.approx((8 * 1.5 + module.PRIOR) / (8 + module.PRIOR))
    assert lengths.relative("short") < lengths.relative("unknown") == 1.0 < lengths.relative("long")
    assert ExpectedLengths().relative("unknown") == 1.0


def test_one_long_rollout_says_less_than_many() -> None:
    lengths = expected(once=[300], often=[300] * 8, others=[100] * 8)
    assert 1 < lengths.relative("once") < lengths.relative("often")


def test_lengths_of_long_ago_are_forgotten() -> None:
    lengths = expected(task=[1000] * 16 + [100] * 100, other=[100])
    assert lengths.relative("task") == pytest.approx(1.0, abs=0.05)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PROMPTS", 2)
    lengths = expected(a=[900], b=[100], c=[100])
    assert list(lengths.state()) == ["b", "c"] and lengths.relative("b") == 1.0


# ---- where requests go ---------------------------------------------------------------------------------------------------


def sent(engines: list[SimEngine], length: dict[int, float]) -> tuple[list[int], list[set[int]]]:
    """Groups in the order in which they end, and those that each engine had. Their requests come at once, one of each."""
    ended: list[int] = []
    had: list[set[int]] = []

    async def one(router: Router, group_id: int) -> None:
        await router.generate(request(group_id), floor=0)
        ended.append(group_id)

    async def play() -> None:
        router = Router(engines)
        await router.generate(request(99), floor=0)  # from now on it knows a length
        router.rank_of = lambda group_id: (1, -length[group_id], 1)
        router.length_of = lambda group_id: length[group_id]
        async with asyncio.TaskGroup() as tasks:
            for group_id in length:
                tasks.create_task(one(router, group_id))
            await asyncio.sleep(0.05)
            had.extend({key.group_id for key in one._jobs} for one in engines)

    run_virtual(play())
    return ended, had


def test_of_requests_that_come_together_the_longest_is_sent_first_even_where_there_is_room() -> None:
    ended, _ = sent([SimEngine(slots=1, num_tokens=constant(10))], {1: 0.5, 2: 1.0, 3: 2.0})
    assert ended == [3, 2, 1]


def test_a_long_request_has_an_engine_to_itself_as_long_as_others_have_less_to_do() -> None:
    engines = [SimEngine(name=f"engine-{number}", slots=8, num_tokens=constant(10)) for number in range(2)]
    _, had = sent(engines, {1: 1.0, 2: 1.0, 3: 1.0, 4: 6.0})
    assert had == [{4}, {1, 2, 3}]


# ---- whole runs ------------------------------------------------------------------------------------------------------------


def lengths_of_prompts(rng: random.Random) -> float:
    return rng.choice([5, 50, 500])


WORLD = World(steps=12, groups_per_step=3, group_size=4, slots=4, num_engines=2, load=0.2, filter_zero_signal=False)


@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_the_order_of_admission_the_bound_and_what_is_trained_are_those_of_a_run_without_it(max_lag: float) -> None:
    world = msgspec.structs.replace(WORLD, max_lag=max_lag, lockstep=False, longest_first=True)
    outcome = simulate(world, num_tokens=lengths_of_prompts)
    check(world, outcome)
    admitted = outcome.sink.of(GroupAdmitted)
    assert [event.task_id for event in admitted] == [f"task-{n % NUM_PROMPTS}" for n in range(len(admitted))]
    assert len(outcome.sink.of(GroupTaken)) == len(admitted) == world.steps * world.groups_per_step


def test_in_lockstep_it_changes_nothing() -> None:
    world = msgspec.structs.replace(WORLD, max_lag=0, num_tasks=4)
    assert simulate(world).sink.trace() == simulate(msgspec.structs.replace(world, longest_first=True)).sink.trace()


def test_a_resumed_run_expects_what_the_first_did() -> None:
    world, diary = msgspec.structs.replace(WORLD, longest_first=True), Diary()
    simulate(world, num_tokens=lengths_of_prompts, keeper=diary)
    kept, again = diary.kept[6], Diary()
    assert kept.standing.ledger.lengths
    simulate(world, num_tokens=lengths_of_prompts, kept=kept, keeper=again)
    assert again.kept[0].standing.ledger.lengths == kept.standing.ledger.lengths


def test_a_checkpoint_of_a_run_without_it_is_read() -> None:
    ledger = b'{"version":1,"next_group":2,"groups":{},"vacant":[],"num_replaced":0,"num_failed_in_a_row":0}'
    assert msgspec.json.decode(ledger, type=Ledger).lengths == {}
