"""Every scheduling option, on the virtual clock: what it does, that it pays, and what it costs."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

import bias
from millstream.clock import run_virtual
from millstream.env import Context
from millstream.errors import EngineError, RewardFailed
from millstream.events import (
    GroupAdmitted,
    GroupLeft,
    GroupRestarted,
    GroupScored,
    GroupTaken,
    RolloutAborted,
    RolloutEnded,
    RolloutStarted,
    Stepped,
)
from millstream.pipeline.schedule import PipelineConfig
from millstream.serving.router import Router
from millstream.sim.draws import constant
from millstream.sim.engine import SimEngine
from millstream.types import Completion, Fate, Finish, Request, RequestKey, Sampling, Task
from support.simulated import Outcome, World, check, simulate

HEAVY = World(steps=12, groups_per_step=4, group_size=4, tail=1.5, slots=64, success=0.5, filter_zero_signal=False)


def run(world: World) -> Outcome:
    outcome = simulate(world)
    check(world, outcome)
    return outcome


def request(group_id: int, member: int = 0, turn: int = 0) -> Request:
    key = RequestKey(group_id=group_id, member=member, turn=turn)
    return Request(key=key, tokens=(1,), sampling=Sampling(max_tokens=1000), seed=group_id)


# ---- queue scheduling ------------------------------------------------------------------------------------------------


def test_a_free_slot_takes_the_next_rollout_on_whichever_engine_it_is() -> None:
    """One engine is busy with a giant; what waits goes to the other, although both had the same load at first."""

    async def play() -> list[int]:
        lengths = {0: 1000.0, 1: 10.0, 2: 10.0, 3: 10.0, 4: 10.0}
        engines = [
            SimEngine(name=name, slots=1, token_s=1.0, num_tokens=lambda rng: lengths[_group_of(rng)])
            for name in ("a", "b")
        ]
        router = Router(engines)
        done: list[int] = []

        async def one(group_id: int) -> None:
            await router.generate(request(group_id), floor=0)
            done.append(group_id)

        async with asyncio.TaskGroup() as tasks:
            for group_id in range(5):
                tasks.create_task(one(group_id))
        assert router.num_waiting == 0
        return done

    done = run_virtual(play())
    assert done.index(4) < done.index(0), "the last of the short ones did not wait for the giant"


def _group_of(rng: random.Random) -> int:
    return next(group for group in range(100) if random.Random(group).getstate() == rng.getstate())


def test_what_is_due_first_goes_first_and_of_that_what_is_almost_complete() -> None:
    async def play() -> list[int]:
        ranks = {1: (5, 3), 2: (5, 1), 3: (4, 8), 4: (5, 3)}
        router = Router([SimEngine(slots=1, token_s=1.0, num_tokens=constant(10))])
        router.rank_of = ranks.get
        order: list[int] = []

        async def one(group_id: int) -> None:
            await router.generate(request(group_id), floor=0)
            order.append(group_id)

        async with asyncio.TaskGroup() as tasks:
            for group_id in (10, 11):  # these fill the engine and the place ahead of it
                tasks.create_task(one(group_id))
            await asyncio.sleep(0)
            for group_id in ranks:
                tasks.create_task(one(group_id))
            await asyncio.sleep(1)
            ranks[4] = (5, 2)
            router.rerank(4)
        return order

    assert run_virtual(play())[2:] == [3, 2, 4, 1]


def test_requests_without_a_rank_neither_starve_nor_hold_training_up() -> None:
    async def play() -> list[int]:
        router = Router([SimEngine(slots=1, token_s=1.0, num_tokens=constant(10))])
        router.rank_of = lambda group_id: (0, 0) if group_id >= 0 else None
        order: list[int] = []

        async def one(group_id: int) -> None:
            await router.generate(request(group_id), floor=0)
            order.append(group_id)

        async with asyncio.TaskGroup() as tasks:
            for number in range(12):
                tasks.create_task(one(100 + number))
                tasks.create_task(one(-1 - number))
        return order

    order = run_virtual(play())
    of_evaluation = [place for place, group_id in enumerate(order[:16]) if group_id < 0]
    assert 3 <= len(of_evaluation) <= 6, order


def test_a_request_that_is_cancelled_in_the_queue_takes_nobodys_turn() -> None:
    async def play() -> None:
        router = Router([SimEngine(slots=1, token_s=1.0, num_tokens=constant(10))])
        router.rank_of = lambda group_id: (0, 0)
        tasks = [asyncio.create_task(router.generate(request(group_id), floor=0)) for group_id in range(6)]
        await asyncio.sleep(1)
        assert router.num_waiting == 4
        for task in tasks[2:5]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert router.num_waiting == 0
        assert asyncio.get_running_loop().time() == pytest.approx(30)
        await router.generate(request(9), floor=0)

    run_virtual(play())


def test_a_request_that_is_cancelled_in_the_moment_of_its_turn_was_cancelled_and_nothing_else() -> None:
    """A slot is freed, and its turn comes, before it has heard of its own end."""

    async def play() -> object:
        router = Router([SimEngine(slots=1, token_s=1.0, num_tokens=constant(10.0))])
        first, _, cut, last = (asyncio.ensure_future(router.generate(request(number), floor=0)) for number in range(4))
        await asyncio.sleep(1.0)
        await router.abort(request(0).key)
        cut.cancel()
        (ended,) = await asyncio.gather(cut, return_exceptions=True)
        assert (await first).finish is Finish.ABORT
        await last
        return ended, router.num_waiting

    ended, num_waiting = run_virtual(play())  # type: ignore[misc]
    assert isinstance(ended, asyncio.CancelledError), ended
    assert num_waiting == 0


def test_an_engine_that_is_too_old_is_passed_over_and_served_when_it_has_loaded() -> None:
    async def play() -> tuple[Completion, Completion]:
        old, new = SimEngine(name="old", slots=1, token_s=1.0), SimEngine(name="new", slots=1, token_s=1.0, version=1)
        router = Router([old, new])
        first = [asyncio.create_task(router.generate(request(group_id), floor=1)) for group_id in range(2)]
        third = asyncio.create_task(router.generate(request(2), floor=1))
        await asyncio.sleep(0.5)
        assert router.num_waiting == 1, "the new engine is full, the old one may not"
        await old.load(1, {})
        router.dispatch()
        await asyncio.sleep(0)
        assert router.num_waiting == 0
        with pytest.raises(EngineError, match="no engine is at version 2"):
            await router.generate(request(3), floor=2)
        await asyncio.gather(*first)
        return await first[0], await third

    first, third = run_virtual(play())
    assert set(first.versions) == set(third.versions) == {1}


def test_the_members_of_a_group_are_requests_of_their_own_spread_over_the_replicas() -> None:
    world = World(steps=4, groups_per_step=1, group_size=8, num_engines=4, slots=2, max_lag=0, lockstep=False)
    outcome = run(world)
    finished = [engine.stats().requests_finished for engine in outcome.engines]
    assert all(finished), finished
    assert max(finished) < sum(finished) / 2, "no engine has half of them"


def test_without_the_gate_a_turn_waits_for_nobody_and_the_lag_is_still_zero() -> None:
    world = replace(HEAVY, max_lag=0, num_turns=4, latency=20.0)
    gated, free = run(world), run(replace(world, lockstep=False))
    assert {event.lag for event in free.sink.of(GroupTaken)} == {0}
    assert all(event.start_version == event.end_version for event in free.sink.of(RolloutEnded))
    assert free.seconds < 0.85 * gated.seconds


# ---- redundancy ------------------------------------------------------------------------------------------------------


def test_carry_over_trains_every_group_and_passes_the_stragglers() -> None:
    """The same deadline, fewer groups in flight: the surplus goes into the next batch."""
    full, spare = run(replace(HEAVY, max_lag=2)), run(replace(HEAVY, max_lag=2, extra_groups=4))
    for outcome in (full, spare):
        assert {event.fate for event in outcome.sink.of(GroupLeft)} == {Fate.TRAINED}
        assert not outcome.sink.of(RolloutAborted)
    ids = [event.group_id for event in spare.sink.of(GroupTaken)]
    assert ids != sorted(ids), "nothing was passed"


def test_more_than_the_lag_allows_cannot_be_carried_over() -> None:
    with pytest.raises(ValueError, match=r"extra_groups = 5 cannot all be trained within max_lag = 1, which allows 4"):
        PipelineConfig(groups_per_step=4, max_lag=1, extra_groups=5)
    with pytest.raises(ValueError, match="allows 0"):
        PipelineConfig(groups_per_step=4, max_lag=0, extra_groups=1)
    assert PipelineConfig(groups_per_step=4, max_lag=0, extra_groups=1, surplus="abort").most_groups == 5


def test_first_to_finish_aborts_the_surplus_at_once_and_counts_it() -> None:
    world = replace(HEAVY, max_lag=0, extra_groups=4, surplus="abort")
    outcome, waiting = run(world), run(replace(HEAVY, max_lag=0, lockstep=False))
    fates = Counter(event.fate for event in outcome.sink.of(GroupLeft))
    assert fates[Fate.TRAINED] == 48 and fates[Fate.ABORTED] == 48
    assert outcome.seconds < 0.7 * waiting.seconds
    full = {event.version: event.at for event in outcome.sink.of(GroupTaken)}
    for aborted in outcome.sink.of(RolloutAborted):
        assert aborted.why == "the batch is full"
        assert min(abs(aborted.at - at) for at in full.values()) < 0.2, "it went on after the batch was full"


def test_an_aborted_rollout_tells_how_many_tokens_it_had_sampled() -> None:
    outcome = run(replace(HEAVY, max_lag=0, extra_groups=4, surplus="abort"))
    for aborted in outcome.sink.of(RolloutAborted):
        assert aborted.num_sampled == pytest.approx(aborted.seconds / 0.01, abs=2)


def test_a_group_is_complete_with_its_first_members_and_the_others_are_aborted() -> None:
    world = replace(HEAVY, max_lag=1, extra_members=2, surplus="abort")
    outcome = run(world)
    assert {event.num_rollouts for event in outcome.sink.of(GroupTaken)} == {4}
    assert {event.why for event in outcome.sink.of(RolloutAborted)} >= {"its group is complete"}
    assert outcome.seconds < 0.8 * run(replace(HEAVY, max_lag=1)).seconds


def test_extra_members_that_are_carried_over_are_all_trained() -> None:
    outcome = run(replace(HEAVY, max_lag=1, extra_members=2))
    assert {event.num_rollouts for event in outcome.sink.of(GroupTaken)} == {6}


class Clinging:
    """Notes every end of its life, and does not let itself be cancelled at once."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()

    async def rollout(self, context: Context) -> float:
        rng = random.Random(context.seed)
        for _ in range(2):
            await context.generate([1])
            try:
                await asyncio.sleep(rng.expovariate(0.1))
            except asyncio.CancelledError:
                self.ends["cancelled"] += 1
                await context.generate([1])  # one more turn, please
                raise AssertionError("an aborted rollout may not speak") from None
        self.ends["ended"] += 1
        return rng.random()


def test_an_abort_reaches_the_environment_too_and_ends_one_that_clings() -> None:
    environment = Clinging()
    world = replace(HEAVY, max_lag=0, extra_groups=4, surplus="abort")
    outcome = simulate(world, environment=environment)
    check(world, outcome)
    assert environment.ends["cancelled"] > 10 and environment.ends["ended"] >= 48 * 4


# ---- overdue groups --------------------------------------------------------------------------------------------------


class Relay:
    """The model speaks in a task of the environment's own, which waits for what it says."""

    async def rollout(self, context: Context) -> float:
        said: asyncio.Queue[Completion] = asyncio.Queue()

        async def speak() -> None:
            await said.put(await context.generate([1]))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(speak())
            completion = await said.get()
        return float(len(completion.tokens) % 2)


def test_an_abort_ends_an_environment_that_speaks_in_tasks_of_its_own() -> None:
    world = replace(HEAVY, surplus="abort", max_lag=0, extra_groups=4)
    outcome = simulate(world, environment=Relay())
    check(world, outcome)
    assert outcome.sink.of(RolloutAborted)
    assert outcome.seconds < 600.0, "somebody waited for rollout.timeout_s"


class Deaf:
    """Takes its cancellation for the end of the episode, or for an error of its own."""

    def __init__(self, *, is_raising: bool) -> None:
        self.is_raising, self.last_s = is_raising, 0.0

    async def rollout(self, context: Context) -> float:
        try:
            said = await context.generate([1])
            await asyncio.sleep(len(said.tokens))
        except asyncio.CancelledError:
            if self.is_raising:
                raise ValueError("cancelled?") from None
            return 0.5
        finally:
            self.last_s = asyncio.get_running_loop().time()
        return float(len(said.tokens) % 2)


@pytest.mark.parametrize("is_raising", [False, True])
def test_a_run_that_is_cancelled_ends_as_such_whatever_environments_make_of_it(is_raising: bool) -> None:
    runs: list[asyncio.Task[object] | None] = []
    cancelled_s: list[float] = []
    environment = Deaf(is_raising=is_raising)

    async def cancel(version: int) -> None:
        if version == 3 and runs[0] is not None:
            cancelled_s.append(asyncio.get_running_loop().time())
            runs[0].cancel()

    world = replace(HEAVY, surplus="abort", max_lag=1, extra_groups=8, extra_members=1)
    with pytest.raises(asyncio.CancelledError):
        simulate(
            world,
            environment=environment,
            after_step=cancel,
            on_pipeline=lambda pipeline: runs.append(asyncio.current_task()),
        )
    assert cancelled_s == [environment.last_s], "something was begun after the end"


def test_an_overdue_group_is_waited_for_or_begins_anew_with_other_numbers() -> None:
    world = replace(HEAVY, steps=20, groups_per_step=2, max_lag=2, tail=2.5)
    waiting, restarting = run(world), run(replace(world, overdue="restart", max_restarts=2))
    restarted = restarting.sink.of(GroupRestarted)
    assert restarted and not waiting.sink.of(GroupRestarted)
    assert restarting.seconds < waiting.seconds
    for event in restarted:
        assert event.first_attempt == 2 * event.restarts
        again = [s for s in restarting.sink.of(RolloutStarted) if s.group_id == event.group_id]
        assert {s.attempt for s in again} >= {0, event.first_attempt}
        left = [e for e in restarting.sink.of(GroupLeft) if e.group_id == event.group_id]
        assert [e.fate for e in left] == [Fate.TRAINED], "it is trained under its own id"


# ---- bias, shown -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", bias.POLICIES)
def test_waiting_and_carrying_over_pass_the_bias_report_and_whatever_throws_the_slow_away_fails_it(policy: str) -> None:
    found = bias.run(policy, steps=20, seed=1)
    assert found.report.is_biased == (policy not in bias.FAIR), found.report.tests
    if found.report.is_biased:
        assert found.bias("sampled tokens") < -3


# ---- rewards of whole groups -----------------------------------------------------------------------------------------


def ranked(task: Task, said: Sequence[Sequence[int]]) -> list[float]:
    """The shorter the better."""
    return [-float(sorted(map(len, said)).index(len(tokens))) for tokens in said]


def scored(world: World, score: object) -> Outcome:
    return simulate(world, group_reward=score)


def test_a_group_is_rewarded_as_a_whole_when_it_is_complete_and_nobody_waits_for_it() -> None:
    at_once: list[int] = []
    most = 0

    async def slow(task: Task, said: Sequence[Sequence[int]]) -> list[float]:
        nonlocal most
        at_once.append(1)
        most = max(most, len(at_once))
        await asyncio.sleep(5)
        at_once.pop()
        return ranked(task, said)

    world = replace(HEAVY, max_lag=1, success=1.0, filter_zero_signal=True)
    outcome = scored(world, slow)
    check(world, outcome)
    assert most > 1, "one group's reward held up another's"
    fates = Counter(event.fate for event in outcome.sink.of(GroupLeft))
    assert set(fates) == {Fate.TRAINED}, "their own rewards are all alike, those of the group are not"
    lengths = {(e.group_id, e.member): e.num_sampled for e in outcome.sink.of(RolloutEnded)}
    for event in outcome.sink.of(GroupScored):
        own = [lengths[event.group_id, member] for member in range(4)]
        assert event.rewards == [1.0 - sorted(own).index(length) for length in own]


def test_nobody_waits_for_the_reward_of_a_group_that_is_thrown_away() -> None:
    ended: list[str] = []

    async def slow_for_some(task: Task, said: Sequence[Sequence[int]]) -> list[float]:
        if int(task.id.removeprefix("task-")) % 4 == 3:
            try:
                await asyncio.sleep(1000)
            finally:
                ended.append(task.id)
        return ranked(task, said)

    world = replace(HEAVY, steps=4, groups_per_step=2, surplus="abort", max_lag=0, extra_groups=2, tail=0.1)
    outcome = scored(world, slow_for_some)
    check(world, outcome)
    assert Fate.ABORTED in {event.fate for event in outcome.sink.of(GroupLeft)}
    assert ended and outcome.seconds < 100


def test_a_group_whose_reward_fails_has_failed_and_is_replaced() -> None:
    async def broken(task: Task, said: Sequence[Sequence[int]]) -> list[float]:
        if int(task.id.rpartition("-")[2]) % 3 == 0:
            raise RewardFailed("no")
        return ranked(task, said)

    world = replace(HEAVY, max_lag=1)
    outcome = scored(world, broken)
    check(world, outcome)
    failed = {event.group_id for event in outcome.sink.of(GroupLeft) if event.fate is Fate.FAILED}
    assert failed == {event.group_id for event in outcome.sink.of(GroupAdmitted) if event.group_id % 3 == 0}
    assert {event.failure for event in outcome.sink.of(GroupScored) if event.failure} == {"RewardFailed: no"}
    assert all(step.num_groups == 4 for step in outcome.sink.of(Stepped))


# ---- partial rollouts ------------------------------------------------------------------------------------------------


def test_finished_turns_outlive_weight_updates_and_say_which_version_sampled_each() -> None:
    world = replace(HEAVY, max_lag=4, num_turns=6, latency=5.0, train_token_s=1e-3)
    outcome = run(world)
    ended = outcome.sink.of(RolloutEnded)
    assert any(event.end_version - event.start_version >= 2 for event in ended), "no rollout lived through two updates"
    assert not any(event.finish is Finish.ABORT for event in ended)
    starts = Counter((event.group_id, event.member) for event in outcome.sink.of(RolloutStarted))
    assert set(starts.values()) == {1}, "a turn was thrown away"
