"""The driver of episodes: a failed episode is a result; only what ends the run, and the caller's cancellation, is raised."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from millstream.clock import VirtualClock, run_virtual
from millstream.env import Context, SplitReward
from millstream.errors import EngineError, EnvironmentFailed, RolloutTimeout
from millstream.events.sinks import MemorySink
from millstream.pipeline.episode import EndOfScript, EpisodeResult, Player
from millstream.pipeline.limit import Limit
from millstream.pipeline.waits import Waits
from millstream.types import Completion, Finish, Request, RequestKey, Sampling, Task

Play = Callable[[Context], Coroutine[Any, Any, float]]


class Game:
    def __init__(self, play: Play) -> None:
        self.rollout = play


async def speak(request: Request) -> Completion:
    return Completion(tokens=(7, 8), logprobs=(-0.5, -0.25), versions=(3, 3), finish=Finish.STOP)


async def played(play: Play, generate: Any = speak, *, limit_s: float = 10.0, **options: Any) -> EpisodeResult:
    waits = Waits(clock=VirtualClock(), sink=MemorySink(), stall_s=100.0, deadline_s=100.0)
    player = Player(
        environment=Game(play), sampling=Sampling(max_tokens=2), run_seed=0, role="test", max_parts=2, waits=waits
    )
    key = RequestKey(group_id=1, member=0)
    return await player.play(Task(id="1", prompt="?"), key, generate, owner="me", limit=Limit(limit_s), **options)


def test_an_episode_has_its_parts_and_turns() -> None:
    async def two_parts(context: Context) -> float:
        await context.generate([1])
        await context.part().generate([2, 3])
        return 0.5

    result = run_virtual(played(two_parts))
    assert result.failure is None and result.num_sampled == 4
    assert [part.tokens.tolist() for part in result.parts] == [[1, 7, 8], [2, 3, 7, 8]]
    assert {part.reward for part in result.parts} == {0.5}


@pytest.mark.parametrize(("logprobs", "versions"), [((-0.5,), (3, 3)), ((-0.5, -0.5), (3,)), ((), ())])
def test_an_answer_that_lacks_a_log_probability_or_a_version_of_a_token_ends_the_run(
    logprobs: tuple[float, ...], versions: tuple[int, ...]
) -> None:
    async def careless(request: Request) -> Completion:
        return Completion(tokens=(7, 8), logprobs=logprobs, versions=versions, finish=Finish.STOP)

    async def one_turn(context: Context) -> float:
        await context.generate([1])
        return 0.5

    with pytest.raises(EngineError, match=f"2 tokens, {len(logprobs)} log-probabilities and {len(versions)} versions"):
        run_virtual(played(one_turn, careless))


def three_turns(reward: Any) -> Play:
    """The first part, another agent's, the first again."""

    async def play(context: Context) -> Any:
        other = context.part(agent=1)
        for part in (other, context, other):
            await part.generate([1])
        context.earned(0.25)
        return reward

    return play


def test_turns_and_parts_have_the_rewards_that_were_returned_for_them() -> None:
    def rewards(reward: Any) -> list[tuple[float, list[float]]]:
        result = run_virtual(played(three_turns(reward)))
        assert result.failure is None
        return [(part.reward, part.turn_rewards.tolist()) for part in result.parts]

    # by agent: what no turn has earned stays unassigned, for the algorithm to place
    assert rewards([1.0, 0.5]) == [(1.0, [0.25]), (0.5, [0.0, 0.0])]
    assert rewards(SplitReward(reward=2.0, turns=[1, 2, 3])) == [(2.0, [2.25]), (2.0, [1.0, 3.0])]
    # without a reward it is the sum; parts come in the order of their first turns
    assert rewards(SplitReward(turns=[1.0, 2.0, 3.0])) == [(2.25, [2.25]), (4.0, [1.0, 3.0])]
    assert rewards(SplitReward(parts=[5.0, 7.0])) == [(7.25, [7.25]), (5.0, [0.0, 5.0])]
    assert rewards(SplitReward(reward=[1.0, 2.0], parts=np.ones(2))) == [(1.0, [1.25]), (2.0, [0.0, 1.0])]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (SplitReward(turns=[1.0]), "rewards of 1 turns, and the rollout has 3: expected one for each"),
        (SplitReward(parts=[]), "rewards of 0 parts, and the rollout has 2: expected one for each"),
        (SplitReward(turns=[1.0, float("nan"), 0.0]), "expected a finite number"),
        (SplitReward(parts=[1.0, float("inf")]), "expected a finite number"),
        (SplitReward(reward=[0.5]), "1 rewards, and agent 1 spoke: expected one for each agent"),
        (SplitReward(reward={"planner": 1.0}), "agents have names in args.agents of an agent only"),
        (SplitReward(turns=["good"] * 3), "expected a number, or one per agent"),  # type: ignore[list-item]
        (SplitReward(turns=3.0), "expected a number, or one per agent"),  # type: ignore[arg-type]
    ],
)
def test_rewards_that_fit_no_turn_or_part_fail_the_rollout_by_name(reward: SplitReward, message: str) -> None:
    result = run_virtual(played(three_turns(reward)))
    assert isinstance(result.failure, EnvironmentFailed) and message in str(result.failure)


def test_what_an_environment_raises_is_a_result_with_the_turns_before_it() -> None:
    async def breaks(context: Context) -> float:
        await context.generate([1])
        raise KeyError("mine")

    result = run_virtual(played(breaks))
    assert isinstance(result.failure, KeyError) and not result.parts and result.num_sampled == 2


def test_an_episode_that_takes_too_long_fails_with_what_it_waited_for() -> None:
    async def slow(context: Context) -> float:
        await context.generate([1])
        await context.waiting("a place", asyncio.sleep(60), is_timed=False)
        await context.waiting("a slow reward", asyncio.sleep(60))
        return 1.0

    failure = run_virtual(played(slow)).failure
    assert isinstance(failure, RolloutTimeout)
    assert "no reward after 10 s: 10 s of it it waited for a slow reward" in str(failure)


def test_a_script_that_ends_ends_the_episode_with_what_was_played() -> None:
    turns = iter([speak])

    async def scripted(request: Request) -> Completion:
        turn = next(turns, None)
        if turn is None:
            raise EndOfScript("no more turns")
        return await turn(request)

    async def endless(context: Context) -> float:
        while True:
            await context.generate([1])

    result = run_virtual(played(endless, scripted))
    assert result.failure is None and [part.reward for part in result.parts] == [0.0]


def test_an_engine_that_fails_ends_more_than_the_episode() -> None:
    async def broken(request: Request) -> Completion:
        raise EngineError("no engine is left")

    async def asks(context: Context) -> float:
        await context.generate([1])
        return 1.0

    with pytest.raises(EngineError, match="no engine is left"):
        run_virtual(played(asks, broken))


async def forever(context: Context) -> float:
    await context.generate([1])
    await asyncio.get_running_loop().create_future()
    return 1.0


@pytest.mark.parametrize("is_aborted", [True, False])
def test_a_cancelled_caller_stays_cancelled_unless_the_episode_alone_was_aborted(is_aborted: bool) -> None:
    async def program() -> EpisodeResult:
        task = asyncio.create_task(played(forever, is_aborted=lambda: is_aborted))
        await asyncio.sleep(1)
        task.cancel()
        return await task

    if not is_aborted:
        with pytest.raises(asyncio.CancelledError):
            run_virtual(program())
        return
    result = run_virtual(program())
    assert isinstance(result.failure, EnvironmentFailed) and result.num_sampled == 2


def test_an_environment_that_cancels_itself_has_failed() -> None:
    async def cancels(context: Context) -> float:
        raise asyncio.CancelledError

    assert isinstance(run_virtual(played(cancels)).failure, EnvironmentFailed)
