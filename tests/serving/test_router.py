"""The router: where requests go, and that nothing is lost, doubled or late when replicas leave and join. On the virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.clock import VirtualClock, run_virtual
from millstream.engine import EngineStats
from millstream.errors import EngineError, EngineGone, EngineMisconfigured, RequestRefused
from millstream.events import ReplicaJoined, ReplicaLeft, WeightsLoaded
from millstream.events.sinks import MemorySink
from millstream.pipeline.context import RunContext
from millstream.pipeline.pipeline import Pipeline
from millstream.pipeline.schema import store_tasks
from millstream.pipeline.sync import WeightSync
from millstream.pipeline.waits import Waits
from millstream.serving import replica as bounds
from millstream.serving.request import Lengths, RoutedRequest
from millstream.serving.router import Router
from millstream.sim.draws import Draw, constant, lognormal
from millstream.sim.engine import SimEngine
from millstream.store.memory import MemoryStore
from millstream.types import Completion, Finish, Request, RequestKey
from millstream.weights.local import LocalChannel
from support.sim_requests import request
from support.simulated import World, check, simulate

LENGTHS = lognormal(40, 1.0)


def engine(
    name: str,
    *,
    slots: int = 4,
    version: int = 0,
    kv_tokens: int | None = None,
    num_tokens: Draw = LENGTHS,
    news_s: float | None = 0.05,
) -> SimEngine:
    return SimEngine(name=name, slots=slots, version=version, kv_tokens=kv_tokens, num_tokens=num_tokens, news_s=news_s)


def alone(asked: Request, num_tokens: Draw = LENGTHS) -> Completion:
    """What it is answered where nothing happens."""

    async def play() -> Completion:
        return await engine("alone", num_tokens=num_tokens).generate(asked)

    return run_virtual(play())


def same_words(found: Completion, expected: Completion) -> bool:
    return (found.tokens, found.logprobs, found.finish) == (expected.tokens, expected.logprobs, expected.finish)


async def until(seconds: float, work: Coroutine[Any, Any, Completion]) -> asyncio.Task[Completion]:
    """Begun, and so far on its way."""
    task = asyncio.create_task(work)
    await asyncio.sleep(seconds)
    return task


# ---- replicas leave and join at any moment ---------------------------------------------------------------------------


class Weather:
    """Things that happen to a router's replicas, one after another, until `stop`."""

    def __init__(self, router: Router, engines: list[SimEngine], rng: random.Random) -> None:
        self.router, self.rng = router, rng
        self.engines = {one.name: one for one in engines}
        self.drained: list[SimEngine] = []
        self.num_crashed = self._num = 0
        self._version = 0

    async def blow(self) -> None:
        while True:
            await asyncio.sleep(self.rng.expovariate(2.0))
            happen = self.rng.choice([self._crash, self._stumble, self._drain, self._join, self._join, self._load])
            await happen()

    def _any(self) -> SimEngine | None:
        serving = [one.name for one in self.router.engines]
        return self.engines[self.rng.choice(serving)] if len(serving) > 1 else None

    async def _crash(self) -> None:
        if (one := self._any()) is not None:
            self.num_crashed += bool(one.stats().running)
            one.crash("lightning")

    async def _stumble(self) -> None:
        if (one := self._any()) is not None:
            one.stumble("a gust")

    async def _drain(self) -> None:
        if (one := self._any()) is not None:
            await self.router.drain(one.name, is_finishing=self.rng.random() < 0.3)
            self.drained.append(one)

    async def _join(self) -> None:
        self._num += 1
        slots = self.rng.randint(1, 5)
        new = engine(f"new-{self._num}", slots=slots, version=self.rng.choice([0, self._version]))
        self.engines[new.name] = new
        self.router.join(new)

    async def _load(self) -> None:
        """All of them, each a little later than the one before."""
        self._version += 1
        for one in self.router.engines:
            if not self.engines[one.name].is_gone:
                await one.load(self._version, {})
                self.router.dispatch()
                await asyncio.sleep(self.rng.uniform(0, 0.1))


async def storm(seed: int) -> tuple[dict[RequestKey, tuple[int, Completion]], dict[RequestKey, Request], Weather]:
    rng = random.Random(seed)
    engines = [engine(f"engine-{number}", slots=rng.randint(1, 5)) for number in range(rng.randint(2, 4))]
    router = Router(engines, patience_s=60.0)
    weather = Weather(router, engines, rng)
    answered: dict[RequestKey, tuple[int, Completion]] = {}
    asked = {one.key: one for one in (request(n // 3, n % 3) for n in range(45))}

    async def one(wanted: Request) -> None:
        await asyncio.sleep(rng.uniform(0, 4))
        floor = rng.choice(router.serving_versions())
        completion = await router.generate(wanted, floor=floor)
        assert wanted.key not in answered
        answered[wanted.key] = floor, completion

    blowing = asyncio.create_task(weather.blow())
    await asyncio.wait_for(_all(one(wanted) for wanted in asked.values()), 3600)
    blowing.cancel()
    assert router.num_waiting == 0
    await asyncio.sleep(1)
    assert not any(one.stats().running or one.stats().waiting for one in weather.engines.values())
    return answered, asked, weather


async def _all(work: Any) -> None:
    async with asyncio.TaskGroup() as tasks:
        for one in work:
            tasks.create_task(one)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32))
def test_whatever_happens_to_replicas_every_request_is_answered_once_as_if_nothing_had(seed: int) -> None:
    """Crashes, failures, drains, joins and new weights at random moments: the same tokens, no gap and no repeat, no version
    below the floor, nothing left behind, nothing that hangs."""
    answered, asked, _ = run_virtual(storm(seed))
    assert answered.keys() == asked.keys()
    for key, (floor, completion) in answered.items():
        assert same_words(completion, alone(asked[key]))
        assert len(completion.versions) == len(completion.tokens)
        assert min(completion.versions) >= floor


def test_the_weather_in_that_test_does_hit_requests() -> None:
    num_crashed = sum(run_virtual(storm(seed))[2].num_crashed for seed in range(10))
    assert num_crashed > 10


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([0.0, 0.5, 2.0]))
def test_a_run_continues_without_the_replicas_that_break_and_keeps_all_its_promises(seed: int, max_lag: float) -> None:
    world = World(max_lag=max_lag, num_engines=3, num_turns=2, load=0.5, latency=0.3, seed=seed % 1000)
    rng = random.Random(seed)

    def strike(pipeline: Pipeline) -> None:
        for one in rng.sample(pipeline._parts.engines, 2):
            assert isinstance(one, SimEngine)
            asyncio.get_running_loop().call_later(rng.uniform(0, 6), one.crash, "on purpose")

    outcome = simulate(world, on_pipeline=strike)
    check(world, outcome)
    lost = {event.engine for event in outcome.sink.of(ReplicaLeft)}
    assert lost <= {one.name for one in outcome.engines if one.is_gone}


# ---- a crash, step by step -------------------------------------------------------------------------------------------


def test_a_crashed_replicas_request_continues_elsewhere_with_what_it_had_generated() -> None:
    sink, wanted = MemorySink(), request(7, max_tokens=100)

    async def play() -> tuple[Completion, list[Request]]:
        first, second = (engine(name, num_tokens=constant(90)) for name in ("a", "b"))
        router = Router([first, second], clock=VirtualClock(), sink=sink)
        heard: list[Request] = []
        original = second.generate

        async def generate(asked: Request, on_sampled: Any = None) -> Completion:
            heard.append(asked)
            return await original(asked, on_sampled)

        second.generate = generate  # type: ignore[method-assign]
        turn = await until(0.42, router.generate(wanted, floor=0))
        first.crash("out of memory")
        return await turn, heard

    completion, (rest,) = run_virtual(play())
    heard = rest.num_sampled
    assert 35 <= heard <= 40 and rest.sampling.max_tokens == 100 - heard, "news every 0.05 s, at 0.01 s a token"
    assert rest.tokens == wanted.tokens + completion.tokens[:heard]
    assert same_words(completion, alone(wanted, constant(90)))
    (left,) = sink.of(ReplicaLeft)
    assert (left.engine, left.num_moved, left.num_left) == ("a", 1, 1) and "out of memory" in left.why


def test_without_reported_tokens_a_request_starts_over_and_is_answered_the_same() -> None:
    async def play() -> Completion:
        first, second = engine("a", news_s=None), engine("b", news_s=None)
        turn = await until(0.05, Router([first, second]).generate(request(7), floor=0))
        first.crash("out of memory")
        return await turn

    assert same_words(run_virtual(play()), alone(request(7)))


def test_a_continued_request_waits_for_a_replica_that_is_new_enough() -> None:
    """The only one that had the new weights breaks: the others get them soon."""

    async def play() -> Completion:
        new, old = engine("new", version=3, num_tokens=constant(50)), engine("old", version=2)
        router = Router([new, old])
        turn = await until(0.3, router.generate(request(1), floor=3))
        new.crash("on purpose")
        later = await until(0.5, router.generate(request(2), floor=3))
        assert router.num_waiting == 2, "neither may go to the old one, neither is refused"
        await old.load(3, {})
        router.dispatch()
        await later
        return await turn

    assert set(run_virtual(play()).versions) == {3}


def test_only_with_several_replicas_is_every_token_reported() -> None:
    async def play(num: int) -> bool:
        watched: list[bool] = []

        class Listening(SimEngine):
            async def generate(self, request: Request, on_sampled: Any = None) -> Completion:
                watched.append(on_sampled is not None)
                return await super().generate(request, on_sampled)

        await Router([Listening(name=str(number)) for number in range(num)]).generate(request(1), floor=0)
        return watched[0]

    assert [run_virtual(play(1)), run_virtual(play(2))] == [False, True]


def test_a_request_that_can_never_run_is_refused_and_costs_no_replica() -> None:
    async def play() -> int:
        router = Router([engine("a", kv_tokens=50), engine("b", kv_tokens=50)])
        with pytest.raises(RequestRefused):
            await router.generate(request(1), floor=0)
        return len(router.engines)

    assert run_virtual(play()) == 2


def test_an_abort_and_a_crash_at_once_end_the_request_with_what_was_reported() -> None:
    async def play() -> Completion:
        first, second = engine("a", num_tokens=constant(100)), engine("b")
        router = Router([first, second])
        turn = await until(0.42, router.generate(request(1), floor=0))
        first.crash("on purpose")
        assert await router.abort(request(1).key)
        return await turn

    completion = run_virtual(play())
    assert completion.finish is Finish.ABORT and 35 <= len(completion.tokens) <= 40


# ---- drains and joins ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_finishing", [False, True])
def test_a_drained_replica_is_empty_and_out_and_its_requests_are_answered(is_finishing: bool) -> None:
    async def play() -> tuple[float, int, list[Completion]]:
        first, second = (engine(name, num_tokens=constant(100)) for name in ("a", "b"))
        router = Router([first, second])
        turns = [asyncio.create_task(router.generate(request(number), floor=0)) for number in range(4)]
        await asyncio.sleep(0.425)
        await router.drain("a", is_finishing=is_finishing)
        at = asyncio.get_running_loop().time()
        assert router.engines == (second,) and first.stats()[:2] == (0, 0)
        await router.generate(request(9), floor=0)
        return at, second.stats().requests_finished, list(await asyncio.gather(*turns))

    at, num_second, completions = run_virtual(play())
    assert at == pytest.approx(1.0 if is_finishing else 0.425)
    assert num_second == (3 if is_finishing else 5)
    for number, completion in enumerate(completions):
        assert same_words(completion, alone(request(number), constant(100)))


def test_a_replica_that_joins_takes_what_waits_as_soon_as_its_version_allows() -> None:
    sink = MemorySink()

    async def play() -> tuple[float, float]:
        router = Router([engine("a", slots=1, version=1, num_tokens=constant(100))], clock=VirtualClock(), sink=sink)
        turns = [asyncio.create_task(router.generate(request(number), floor=1)) for number in range(4)]
        await asyncio.sleep(0.1)
        late = engine("b", slots=2, num_tokens=constant(100))
        router.join(late)
        await asyncio.sleep(0.1)
        assert router.num_waiting == 2, "it is too old"
        await late.load(1, {})
        router.dispatch()
        await asyncio.sleep(0)
        assert router.num_waiting == 0
        with pytest.raises(ValueError, match="two engines are called 'b'"):
            router.join(engine("b"))
        await asyncio.gather(*turns)
        return asyncio.get_running_loop().time(), late.stats().requests_finished

    assert run_virtual(play()) == (pytest.approx(2.0), 2)
    assert [event.engine for event in sink.of(ReplicaJoined)] == ["b"]


def test_without_a_replica_requests_wait_for_one_to_join_and_fail_by_name_when_none_does() -> None:
    async def play(joins_at: float) -> Completion:
        first = engine("a")
        router = Router([first], patience_s=10.0)
        turn = await until(0.01, router.generate(request(1), floor=0))
        first.crash("on purpose")
        asyncio.get_running_loop().call_later(joins_at, lambda: router.join(engine("b")))
        return await turn

    assert same_words(run_virtual(play(9.0)), alone(request(1)))
    with pytest.raises(EngineError, match="no engine for 10 s; the last one was a: a broke: on purpose"):
        run_virtual(play(11.0))


# ---- replicas that fail ----------------------------------------------------------------------------------------------


def test_a_replica_that_fails_rests_and_after_three_failures_in_a_row_is_not_used_any_more() -> None:
    sink = MemorySink()

    async def play() -> list[float]:
        bad, good = engine("bad"), engine("good", slots=64)
        router, tried = Router([bad, good], clock=VirtualClock(), sink=sink), list[float]()

        async def fail(asked: Request, on_sampled: Any = None) -> Completion:
            tried.append(asyncio.get_running_loop().time())
            raise EngineError("bad failed: no route")

        bad.generate = fail  # type: ignore[method-assign]
        for number in range(100):
            await until(0.1, router.generate(request(number), floor=0))
        return tried

    first, second, third = run_virtual(play())
    assert 1.0 <= second - first < 1.5 and 2.0 <= third - second < 2.5
    (left,) = sink.of(ReplicaLeft)
    assert left.engine == "bad" and "that is 3 failures that no success has made up for" in left.why


def test_what_a_replica_still_had_when_it_was_given_up_continues_elsewhere_once_it_is_closed() -> None:
    async def play() -> Completion:
        bad, good = engine("bad", num_tokens=constant(100)), engine("good", num_tokens=constant(100))
        router = Router([bad, good])
        router.listeners.append(
            lambda change: closing.append(asyncio.create_task(change.engine.close())) if change.is_lost else None
        )
        closing: list[asyncio.Task[None]] = []
        turn = await until(0.4, router.generate(request(1), floor=0))
        router.lose(bad, EngineError("three failures in a row"))
        await asyncio.gather(*closing)
        return await turn

    assert same_words(run_virtual(play()), alone(request(1), constant(100)))


def misconfigured() -> Any:
    bad = engine("bad", slots=64)

    async def refuse(asked: Request, on_sampled: Any = None) -> Completion:
        raise EngineMisconfigured("bad answered 401: set the token")

    bad.generate = refuse  # type: ignore[method-assign]
    return bad


def test_where_no_engine_can_work_as_it_is_set_up_requests_fail_at_once() -> None:
    async def play() -> float:
        router = Router([misconfigured()], patience_s=60.0)
        for _ in range(2):
            with pytest.raises(EngineMisconfigured, match="set the token"):
                await router.generate(request(1), floor=0)
        return asyncio.get_running_loop().time()

    assert run_virtual(play()) == 0


@pytest.mark.parametrize("is_other_there", [True, False])
def test_an_engine_that_is_set_up_wrong_is_lost_if_another_serves_or_has_served(is_other_there: bool) -> None:
    sink = MemorySink()

    async def play() -> list[Completion]:
        bad, good = misconfigured(), engine("good", slots=64)
        router = Router([good], patience_s=60.0, clock=VirtualClock(), sink=sink)
        found = [await router.generate(request(1), floor=0)]
        if not is_other_there:
            router.lose(good, EngineError("found dead"))
        router.join(bad)
        turns = asyncio.gather(*(router.generate(request(2, member), floor=0) for member in range(8)))
        await asyncio.sleep(5)
        assert "bad" not in {one.name for one in router.engines}
        if not is_other_there:
            router.join(engine("another", slots=64))
        return found + await turns

    assert len(run_virtual(play())) == 9
    left = sink.of(ReplicaLeft)[-1]
    assert left.engine == "bad" and left.why == "bad answered 401: set the token"


def test_draining_an_engine_that_is_not_there_says_which_are() -> None:
    with pytest.raises(ValueError, match="no engine is called 'c': there are a, b"):
        run_virtual(Router([engine("a"), engine("b")]).drain("c"))


def test_many_requests_that_fail_together_are_one_failure_and_a_success_forgives() -> None:
    async def play() -> int:
        shaky, other = engine("a", slots=8), engine("b", slots=8)
        router = Router([shaky, other])
        turns = []
        for round_number in range(5):
            turns += [asyncio.create_task(router.generate(request(round_number, m), floor=0)) for m in range(8)]
            await asyncio.sleep(0.005)
            assert shaky.stats().running
            shaky.stumble("a gust")
            await asyncio.sleep(2.0)
            turns += [asyncio.create_task(router.generate(request(50 + round_number, m), floor=0)) for m in range(8)]
            await asyncio.sleep(2.0)
        await asyncio.gather(*turns)
        return len(router.engines)

    assert run_virtual(play()) == 2


def test_a_single_replica_that_breaks_ends_it_at_once_with_its_own_error() -> None:
    async def play() -> None:
        only = engine("engine")
        router = Router([only])
        turns = [asyncio.create_task(router.generate(request(number), floor=0)) for number in range(9)]
        await asyncio.sleep(0.01)
        only.crash("out of memory")
        for error in await asyncio.gather(*turns, return_exceptions=True):
            assert type(error) is EngineError and "engine broke: out of memory" in str(error)

    run_virtual(play())


# ---- where requests go -----------------------------------------------------------------------------------------------


class Places(Router):
    """A router, and which replica each request was sent to."""

    def where(self, key: RequestKey) -> str:
        flight = self._requests[key]
        assert flight.engine is not None
        return flight.engine.name


async def placed(router: Places, asked: Request) -> str:
    task = await until(0.0, router.generate(asked, floor=0))
    where = router.where(asked.key)
    await task
    return where


HISTORY = tuple(range(1000))


def test_the_turns_of_a_conversation_stay_where_their_history_is_until_another_is_much_less_loaded() -> None:
    """A history of 1000 tokens is worth a queue of 1000 that are to be sampled."""

    async def play(extra_tokens: int) -> list[str]:
        router = Places([engine(name, slots=64, num_tokens=constant(20)) for name in ("a", "b", "c")])
        others = [await until(0.0, router.generate(request(100 + n), floor=0)) for n in range(2)]
        tokens, found = HISTORY, list[str]()
        for turn in range(4):
            wanted = request(1, turn=turn, tokens=tokens)
            task = await until(0.0, router.generate(wanted, floor=0))
            found.append(router.where(wanted.key))
            tokens = (*tokens, *(await task).tokens, 7, 7, 7)
            extra = request(50 + turn, tokens=(1,), max_tokens=extra_tokens)
            router._lengths = router._replicas["c"]._lengths = Lengths()  # so that what is to come is max_tokens
            router._replicas["c"].add(RoutedRequest(extra, 0))
        await asyncio.gather(*others)
        return found

    assert run_virtual(play(extra_tokens=60)) == ["c"] * 4, "a and b had something to do; c is never 1000 tokens ahead"
    first, *later = run_virtual(play(extra_tokens=1200))
    assert first == "c" and "c" not in later, "the history is better computed again"
    assert len(set(later)) == 1, "and then it has a new home"


def test_a_long_prompt_keeps_its_group_together_and_a_short_one_is_spread() -> None:
    async def play(num_tokens: int) -> set[str]:
        router = Places([engine(name, slots=64) for name in ("a", "b", "c", "d")])
        wanted = [request(1, member, tokens=range(num_tokens), max_tokens=100) for member in range(4)]
        tasks = [await until(0.0, router.generate(one, floor=0)) for one in wanted]
        found = {router.where(one.key) for one in wanted}
        await asyncio.gather(*tasks)
        return found

    assert run_virtual(play(10_000)) == {"a"}
    assert run_virtual(play(10)) == {"a", "b", "c", "d"}


def test_new_weights_and_a_rewritten_history_make_a_prefix_worthless() -> None:
    async def play(change: str) -> str:
        engines = [engine(name, slots=64, num_tokens=constant(20)) for name in ("a", "b")]
        router = Places(engines)
        assert await placed(router, request(1, tokens=HISTORY)) == "a"
        router._replicas["a"].add(RoutedRequest(request(9, tokens=(1,), max_tokens=100), 0))
        tokens = (*HISTORY, 5)
        if change == "weights":
            for one in engines:
                await one.load(1, {})
        elif change == "history":
            tokens = (99, *tokens)
        return await placed(router, request(1, turn=1, tokens=tokens))

    assert run_virtual(play("nothing")) == "a", "its history outweighs one request more"
    assert run_virtual(play("weights")) == run_virtual(play("history")) == "b"


def test_load_is_counted_in_tokens_and_not_in_requests() -> None:
    """One replica has a giant, the other three that are almost done."""

    async def play() -> str:
        router = Places([engine(name, slots=8, num_tokens=_by_group) for name in ("a", "b")])
        await router.generate(request(50), floor=0)  # so that lengths of 20 are known
        giant = await until(0.0, router.generate(request(1, max_tokens=5000), floor=0))
        assert router.where(giant_key := request(1).key) == "a"
        await asyncio.sleep(10.0)
        short = [request(2, member) for member in range(2)]
        tasks = [await until(0.0, router.generate(one, floor=0)) for one in short]
        assert [router.where(one.key) for one in short] == ["b", "b"], "a has more to come than two of them"
        assert router.where(giant_key) == "a"
        await asyncio.gather(giant, *tasks)
        return "done"

    assert run_virtual(play()) == "done"


def _by_group(rng: random.Random) -> float:
    is_giant = rng.getstate() == random.Random(request(1).seed).getstate()
    return 4000.0 if is_giant else 20.0


def test_synchronously_the_choice_depends_on_calls_alone_and_not_on_measurements() -> None:
    async def play(delay: float) -> list[str]:
        engines = [engine(name, slots=8, kv_tokens=2000, news_s=0.01 * (1 + delay)) for name in ("a", "b", "c")]
        router, found = Places(engines, is_queueing=False), list[str]()
        for opening in range(4):
            wanted = [request(g, m, turn=opening, tokens=range(10 + g)) for g in range(5) for m in range(3)]
            for one in engines:
                await one.pause()
            tasks = [await until(0.0, router.generate(one, floor=0)) for one in wanted]
            found += [router.where(one.key) for one in wanted]
            for one in engines:
                await asyncio.sleep(delay)
                await one.resume()
            await asyncio.gather(*tasks)
        return found

    assert run_virtual(play(0.0)) == run_virtual(play(0.3)) == run_virtual(play(2.0))
    assert set(run_virtual(play(0.0))) == {"a", "b", "c"}


def test_synchronously_neither_progress_nor_a_full_cache_changes_the_choice() -> None:
    class Full(SimEngine):
        def stats(self) -> EngineStats:
            return super().stats()._replace(cache_used=1.0)

    async def play(is_queueing: bool) -> list[str]:
        engines = [
            kind(name=name, news_s=0.05, num_tokens=constant(100)) for name, kind in (("a", Full), ("b", SimEngine))
        ]
        router, found, tasks = Places(engines, is_queueing=is_queueing), list[str](), []
        for number, max_tokens in enumerate((100, 90, 100)):
            tasks.append(
                await until(0.5 * (number == 0), router.generate(request(number, max_tokens=max_tokens), floor=0))
            )
            found.append(router.where(request(number).key))
        await asyncio.gather(*tasks)
        return found

    assert run_virtual(play(is_queueing=False)) == ["a", "b", "b"], "100 tokens were asked of a, 90 of b"
    assert run_virtual(play(is_queueing=True)) == ["b", "b", "b"], "a is full"


# ---- pressure --------------------------------------------------------------------------------------------------------


def test_a_replica_whose_cache_is_too_small_is_given_fewer_and_recovers_when_it_is_not() -> None:
    async def play() -> tuple[list[float], int, float]:
        crowded = engine("a", slots=32, kv_tokens=1000, num_tokens=constant(150))
        router, most = Router([crowded]), list[float]()

        async def one(number: int, max_tokens: int) -> None:
            await router.generate(request(number, max_tokens=max_tokens), floor=0)
            most.append(router._replicas["a"].max_requests)

        await _all(one(number, 400) for number in range(300))
        num_preempted = crowded.num_preempted
        await _all(one(number, 5) for number in range(1000))
        return most, num_preempted, router._replicas["a"].max_requests

    most, num_preempted, at_last = run_virtual(play())
    assert num_preempted > 0
    assert min(most) < 16, "1000 tokens hold few of 100 to 200 each"
    assert min(most) >= 32 // bounds.LEAST
    assert at_last == 32 + 32 // bounds.AHEAD


def test_a_replica_with_a_full_cache_comes_last() -> None:
    async def play() -> str:
        full, busy = (engine(name, slots=8, kv_tokens=300, num_tokens=constant(100)) for name in ("full", "busy"))
        router = Places([full, busy])
        held = asyncio.create_task(full.generate(request(90, tokens=range(190), max_tokens=110)))
        others = [await until(0.0, router.generate(request(n), floor=0)) for n in range(2)]
        await asyncio.sleep(0.97)
        assert full.stats().cache_used >= bounds.CROWDED
        router._replicas["busy"].add(RoutedRequest(request(9, max_tokens=500), 0))
        where = await placed(router, request(5))
        await asyncio.gather(held, *others)
        return where

    assert run_virtual(play()) == "busy"


# ---- runs ------------------------------------------------------------------------------------------------------------


def load_times(*, busy: Sequence[str], idle: Sequence[str] = (), is_lost: bool = False) -> dict[str, float]:
    """When each replica began to load a version that was published at 0.1 s; it takes 2 s. `is_lost`: the last idle replica is
    lost in the moment of the publication."""

    async def play() -> dict[str, float]:
        engines = [SimEngine(name=name, num_tokens=constant(2000), load_s=constant(2.0)) for name in (*busy, *idle)]
        router, channel, clock, sink = Router(engines), LocalChannel(), VirtualClock(), MemorySink()
        waits = Waits(clock=clock, sink=sink, stall_s=1e6, deadline_s=1e6)
        context = RunContext(store=MemoryStore(store_tasks()), waits=waits, clock=clock, sink=sink)
        sync = WeightSync(context, channel, router, is_in_lockstep=False)
        await channel.publish(0, {})
        async with asyncio.TaskGroup() as context.tasks:
            sync.start(0)
            tasks = [await until(0.0, router.generate(request(n, max_tokens=2000), floor=0)) for n in range(len(busy))]
            await asyncio.sleep(0.1)
            await sync.publish(1, {}, began=0.0)
            if is_lost:
                router.lose(engines[-1], EngineGone("as planned"))
            await asyncio.sleep(10)
            sync.finish(are_joining_lost=False)
            await asyncio.gather(*tasks)
        return {event.engine: round(event.at - event.seconds, 3) for event in sink.of(WeightsLoaded)}

    return run_virtual(play())


@pytest.mark.parametrize("num_engines", [2, 3, 5])
def test_of_several_replicas_that_work_at_most_half_load_at_the_same_time(num_engines: int) -> None:
    begins = load_times(busy="abcde"[:num_engines]).values()
    assert len(begins) == num_engines
    assert max(Counter(begins).values()) == max(1, num_engines // 2)


def test_replicas_without_requests_load_new_weights_at_once_and_get_the_groups_that_need_them() -> None:
    assert load_times(busy="a", idle="bcd") == {"b": 0.1, "c": 0.1, "d": 0.1, "a": 2.1}
    assert sorted(load_times(busy="", idle="abc").values()) == [0.1, 0.1, 2.1], "one is left that serves"


def test_a_replica_that_is_lost_when_weights_are_published_holds_no_other_up() -> None:
    assert load_times(busy="a", idle="b", is_lost=True) == {"a": 0.1}


def test_an_abort_reaches_a_request_whose_replica_was_chosen_in_the_same_moment() -> None:
    async def play() -> tuple[Completion, float]:
        router = Router([engine("one", num_tokens=constant(120))])
        router.length_of = lambda group_id: 1.0
        task = asyncio.create_task(router.generate(request(1), floor=0))
        while not await router.abort(request(1).key):
            await asyncio.sleep(0)
        return await task, asyncio.get_running_loop().time()

    completion, seconds = run_virtual(play())
    assert completion.finish is Finish.ABORT and not completion.tokens and seconds < 0.1


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num=st.integers(1, 12), is_queueing=st.booleans())
def test_the_replica_that_is_chosen_is_that_of_a_comparison_of_all(seed: int, num: int, is_queueing: bool) -> None:
    """Whatever slots, work, versions, caches and prefixes they have."""
    rng = random.Random(seed)

    async def play() -> None:
        engines = [
            engine(f"e{i}", slots=rng.choice([2, 2, 3]), version=rng.randint(0, 1), kv_tokens=rng.choice([None, 400]))
            for i in range(num)
        ]
        router = Router(engines, is_queueing=is_queueing)

        cheapest = router._order.cheapest

        def choose(routed: RoutedRequest) -> bounds.Replica | None:
            now, replicas = asyncio.get_running_loop().time(), router._replicas.values()
            able = [one for one in replicas if one.may_take(routed.floor, now, routed.pin)]
            expected = min(able, key=lambda one: (one.is_crowded, one.price(routed)), default=None)
            assert router._order.has_room() == any(one.may_take(0, now) for one in replicas)
            assert cheapest(routed) is expected
            return expected

        router._order.cheapest = choose  # type: ignore[method-assign]

        async def one(number: int) -> None:
            await asyncio.sleep(rng.random() * 2)
            tokens = range(1 + 7 * (number // 3 % 3))
            asked = request(number // 3, number % 3, tokens=tokens)
            await router.generate(asked, floor=min(router.newest_version, rng.randint(0, 1)))

        await asyncio.gather(*map(one, range(40)))

    run_virtual(play())
