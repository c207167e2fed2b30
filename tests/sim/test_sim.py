"""The simulated parts keep the promises of the real ones, and the simulator drives the production code unchanged."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from millstream.clock import run_virtual
from millstream.errors import EngineError, EnvironmentFailed, RequestRefused
from millstream.events import GroupTaken, RolloutFailed
from millstream.sim.config import DrawConfig
from millstream.sim.costs import H200, Costs
from millstream.sim.draws import (
    Draw,
    at_most,
    constant,
    lognormal,
    mixture,
    pareto,
    truncated_normal,
    uniform,
)
from millstream.sim.engine import SimEngine
from millstream.sim.environment import SimDriver, SimEnvironment, SimFailure, by_prompt, longer_is_harder
from millstream.sim.learner import SimLearner
from millstream.sim.sharing import Sharing
from millstream.types import Completion, Finish, Request, RequestKey, Sampling, Task
from support.simulated import World, simulate


def request(number: int, *, prompt: int = 4, max_tokens: int = 10_000) -> Request:
    return Request(
        key=RequestKey(group_id=number, member=0),
        tokens=(1,) * prompt,
        sampling=Sampling(max_tokens=max_tokens),
        seed=number,
    )


def now() -> float:
    return asyncio.get_running_loop().time()


# ---- by hand ---------------------------------------------------------------------------------------------------------


def test_at_a_constant_rate_a_request_takes_its_tokens_times_the_rate() -> None:
    async def program() -> tuple[int, float]:
        engine = SimEngine(token_s=0.5, num_tokens=constant(7))
        completion = await engine.generate(request(0))
        return len(completion.tokens), now()

    assert run_virtual(program()) == (7, 3.5)


def test_a_step_takes_longer_the_more_requests_run_and_the_more_they_hold() -> None:
    async def program() -> float:
        engine = SimEngine(costs=Costs(step_s=1.0, request_s=0.1, context_token_s=0.01), num_tokens=constant(10))
        await asyncio.gather(*(engine.generate(request(number, prompt=5)) for number in range(4)))
        return now()

    # 10 steps of 1.0 + 4 * 0.1 + 0.01 * 4 * (5 + k), k from 0 to 10 on average 5
    assert run_virtual(program()) == pytest.approx(10 * (1.4 + 0.01 * 4 * 10))


def test_a_prompt_is_computed_while_nobody_decodes() -> None:
    async def program() -> list[float]:
        engine = SimEngine(costs=Costs(step_s=1.0, prefill_token_s=0.5), num_tokens=constant(10))
        ends: list[float] = []

        async def one(number: int, at: float) -> None:
            await asyncio.sleep(at)
            await engine.generate(request(number, prompt=4))
            ends.append(now())

        await asyncio.gather(one(0, 0.0), one(1, 5.0))
        return ends

    assert run_virtual(program()) == [2 + 10 + 2, 5 + 2 + 10]


def test_the_default_costs_are_those_that_were_measured() -> None:
    """256 tokens for prompts of 64 to 256: 5.7 ms a step with 128 requests, 10.0 ms with 512."""

    async def program(num_requests: int) -> float:
        engine = SimEngine(costs=H200, slots=512, num_tokens=constant(256))
        prompts = [64 + 192 * number // num_requests for number in range(num_requests)]
        await asyncio.gather(*(engine.generate(request(i, prompt=prompt)) for i, prompt in enumerate(prompts)))
        return (now() - H200.prefill_token_s * sum(prompts)) / 256

    assert run_virtual(program(128)) == pytest.approx(5.7e-3, rel=0.02)
    assert run_virtual(program(512)) == pytest.approx(10.0e-3, rel=0.02)


def test_when_the_cache_runs_over_the_newest_request_goes_back_and_pays_again() -> None:
    async def program() -> tuple[list[tuple[int, float]], int]:
        costs = Costs(step_s=1.0, prefill_token_s=0.1)
        engine = SimEngine(costs=costs, kv_tokens=30, num_tokens=constant(15))
        ends: list[tuple[int, float]] = []

        async def one(number: int) -> None:
            completion = await engine.generate(request(number, prompt=10, max_tokens=20))
            assert len(completion.tokens) == 15
            ends.append((number, now()))

        await asyncio.gather(one(0), one(1))
        return ends, engine.num_preempted

    # two prefills of 1 s; full after 5 steps at t = 7; the first goes on alone for 10 s; then a prefill of 15 tokens and 10 steps
    assert run_virtual(program()) == ([(0, 17.0), (1, 17 + 1.5 + 10)], 1)


def test_a_request_whose_prompt_does_not_fit_waits_and_one_that_never_fits_is_refused() -> None:
    async def program() -> None:
        engine = SimEngine(token_s=1.0, kv_tokens=30, num_tokens=constant(5))
        first = asyncio.create_task(engine.generate(request(0, prompt=20, max_tokens=10)))
        second = asyncio.create_task(engine.generate(request(1, prompt=20, max_tokens=10)))
        await asyncio.sleep(1)
        assert engine.stats()[:2] == (1, 1)
        await asyncio.gather(first, second)
        assert now() == 10
        with pytest.raises(RequestRefused, match="may need 31 tokens of cache, engine has 30"):
            await engine.generate(request(2, prompt=20, max_tokens=11))

    run_virtual(program())


@pytest.mark.parametrize("how", ["abort", "cancel"])
def test_what_an_aborted_or_cancelled_request_held_is_free_in_that_moment(how: str) -> None:
    async def program() -> None:
        engine = SimEngine(token_s=1.0, slots=1, kv_tokens=200, num_tokens=constant(100))
        long = asyncio.create_task(engine.generate(request(0, prompt=50, max_tokens=100)))
        short = asyncio.create_task(engine.generate(request(1, prompt=99, max_tokens=3)))
        await asyncio.sleep(10.5)
        assert engine.tokens_held == 60
        if how == "abort":
            await engine.abort(request(0).key)
            assert (engine.stats()[:2], engine.tokens_held) == ((1, 0), 99)
            cut = await long
            assert (len(cut.tokens), cut.finish) == (10, Finish.ABORT)
        else:
            long.cancel()
            with pytest.raises(asyncio.CancelledError):
                await long
            assert (engine.stats()[:2], engine.tokens_held, engine.num_discarded) == ((1, 0), 99, 10)
        await short
        assert now() == 13.5

    run_virtual(program())


def test_a_request_that_waits_can_be_aborted_and_comes_back_empty() -> None:
    async def program() -> None:
        engine = SimEngine(token_s=1.0, slots=1, num_tokens=constant(10))
        first, second = (asyncio.create_task(engine.generate(request(number))) for number in range(2))
        await asyncio.sleep(1)
        await engine.abort(request(1).key)
        assert (await second).tokens == () and now() == 1
        await engine.abort(request(7).key)  # unknown: ignored
        assert len((await first).tokens) == 10

    run_virtual(program())


def test_a_pause_stops_decoding_and_loses_nothing() -> None:
    async def program() -> None:
        engine = SimEngine(token_s=1.0, num_tokens=constant(10))
        first = asyncio.create_task(engine.generate(request(0)))
        await asyncio.sleep(4)
        await engine.pause()
        second = asyncio.create_task(engine.generate(request(1)))
        await asyncio.sleep(100)
        await engine.load(1, {})
        assert engine.stats()[:2] == (1, 1) and engine.tokens_held == 4 + 4
        await engine.resume()
        assert (await first).versions == (0,) * 4 + (1,) * 6 and now() == 110
        assert (await second).versions == (1,) * 10 and now() == 114

    run_virtual(program())


def test_weights_are_swapped_between_two_tokens_and_an_older_version_is_an_error() -> None:
    async def program() -> None:
        engine = SimEngine(token_s=1.0, num_tokens=constant(10), load_s=constant(3.5))
        running = asyncio.create_task(engine.generate(request(0)))
        await engine.load(1, {})
        await engine.load(2, {})
        assert (await running).versions == (0,) * 4 + (1,) * 3 + (2,) * 3
        with pytest.raises(EngineError, match="version 1 after 2"):
            await engine.load(1, {})

    run_virtual(program())


def test_a_closed_engine_aborts_what_it_has_and_takes_nothing_more() -> None:
    async def program() -> None:
        engine = SimEngine(token_s=1.0, slots=1, num_tokens=constant(10))
        running = [asyncio.create_task(engine.generate(request(number))) for number in range(2)]
        await asyncio.sleep(3)
        await engine.close()
        assert [(len(c.tokens), c.finish) for c in await asyncio.gather(*running)] == [(3, "abort"), (0, "abort")]
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request(2))

    run_virtual(program())


# ---- in any world ----------------------------------------------------------------------------------------------------


class Call(Struct, frozen=True):
    """A request that arrives at some time and, perhaps, is cut some time later."""

    at: float
    prompt: int
    length: int
    cut: str
    after: float


class Machine(Struct, frozen=True):
    calls: list[Call]
    slots: int
    kv_tokens: int
    costs: Costs
    loads: list[float]
    pauses: list[tuple[float, float]]


seconds = st.floats(0, 60, allow_subnormal=False)
machines = st.builds(
    Machine,
    calls=st.lists(
        st.builds(
            Call, seconds, st.integers(0, 40), st.integers(1, 60), st.sampled_from(["", "", "abort", "cancel"]), seconds
        ),
        min_size=1,
        max_size=12,
    ),
    slots=st.integers(1, 6),
    kv_tokens=st.integers(100, 250),
    costs=st.builds(
        Costs,
        step_s=st.sampled_from([0.1, 0.37, 1.0]),
        request_s=st.sampled_from([0.0, 0.1]),
        context_token_s=st.sampled_from([0.0, 0.003]),
        prefill_token_s=st.sampled_from([0.0, 0.01]),
    ),
    loads=st.lists(seconds, max_size=4),
    pauses=st.lists(st.tuples(seconds, st.floats(0, 20)), max_size=2),
)


class Seen(Struct):
    completions: dict[int, Completion] = {}
    ends: dict[int, float] = {}
    engine: Any = None
    versions_at_start: dict[int, int] = {}


async def drive(machine: Machine) -> Seen:
    """Run it to its end, looking at slots and cache at every tenth of a second."""
    lengths = {number: call.length for number, call in enumerate(machine.calls)}
    by_seed: Draw = lambda rng: lengths[wanted[rng.random()]]  # noqa: E731
    wanted = {random.Random(number).random(): number for number in lengths}
    engine = SimEngine(
        slots=machine.slots, costs=machine.costs, kv_tokens=machine.kv_tokens, num_tokens=by_seed, name="sim"
    )
    seen = Seen(engine=engine)

    async def one(number: int, call: Call) -> None:
        await asyncio.sleep(call.at)
        seen.versions_at_start[number] = engine.version
        asked = request(number, prompt=call.prompt, max_tokens=60)
        generating = asyncio.create_task(engine.generate(asked))
        if call.cut:
            await asyncio.wait([generating], timeout=call.after)
            if call.cut == "abort":
                await engine.abort(asked.key)
            else:
                generating.cancel()
        await asyncio.wait([generating])
        seen.ends[number] = now()
        if not generating.cancelled():
            seen.completions[number] = generating.result()

    async def load() -> None:
        for version, at in enumerate(sorted(machine.loads), start=1):
            await asyncio.sleep(at - now())
            await engine.load(version, {})

    async def pause() -> None:
        for at, lasting in machine.pauses:
            await asyncio.sleep(at)
            await engine.pause()
            await asyncio.sleep(lasting)
            await engine.resume()

    async def watch() -> None:
        while True:
            assert engine.stats().running <= machine.slots
            assert engine.tokens_held <= machine.kv_tokens
            await asyncio.sleep(0.1)

    watching = asyncio.create_task(watch())
    await asyncio.gather(load(), pause(), *(one(number, call) for number, call in enumerate(machine.calls)))
    assert not watching.done(), watching.exception()
    watching.cancel()
    return seen


@settings(max_examples=80)
@given(machine=machines)
def test_in_any_world_tokens_are_conserved_versions_never_fall_and_nothing_is_held_at_the_end(machine: Machine) -> None:
    seen = run_virtual(drive(machine))
    for number, completion in seen.completions.items():
        call = machine.calls[number]
        assert len(completion.tokens) == len(completion.logprobs) == len(completion.versions)
        assert list(completion.versions) == sorted(completion.versions)
        assert all(version >= seen.versions_at_start[number] for version in completion.versions)
        assert all(logprob < 0 for logprob in completion.logprobs)
        if completion.finish is Finish.ABORT:
            assert call.cut == "abort" and len(completion.tokens) <= call.length
            assert seen.ends[number] == pytest.approx(call.at + call.after)
        else:
            assert len(completion.tokens) == call.length
            assert seen.ends[number] >= call.at + call.length * machine.costs.step_s - 1e-9
    kept = sum(len(completion.tokens) for completion in seen.completions.values())
    stats = seen.engine.stats()
    assert stats.tokens_generated == kept + seen.engine.num_discarded
    assert stats.requests_finished == len(machine.calls)
    assert (stats.running, stats.waiting) == (0, 0)


@settings(max_examples=30)
@given(machine=machines)
def test_the_same_world_gives_the_same_completions_at_the_same_times(machine: Machine) -> None:
    first, second = run_virtual(drive(machine)), run_virtual(drive(machine))
    assert (first.completions, first.ends) == (second.completions, second.ends)


def test_a_request_that_was_cut_has_the_first_tokens_of_what_it_would_have_been() -> None:
    async def program(cut: float) -> Completion:
        engine = SimEngine(token_s=1.0, num_tokens=constant(20))
        running = asyncio.create_task(engine.generate(request(3)))
        await asyncio.sleep(cut)
        await engine.abort(request(3).key)
        return await running

    whole = run_virtual(program(100))
    for cut in range(1, 20):
        part = run_virtual(program(cut + 0.5))
        assert part.tokens == whole.tokens[:cut] and part.logprobs == whole.logprobs[:cut]


def step_by_step(machine: Machine) -> dict[int, float]:
    """The plain twin: a loop over steps that admits and ends between two of them. No cuts, no pauses, no end to the cache."""
    time, waiting, ends = 0.0, sorted(range(len(machine.calls)), key=lambda n: (machine.calls[n].at, n)), {}
    left: dict[int, int] = {}
    held: dict[int, int] = {}
    while waiting or left:
        if not left:
            time = max(time, machine.calls[waiting[0]].at)
        while waiting and machine.calls[waiting[0]].at <= time and len(left) < machine.slots:
            number = waiting.pop(0)
            call = machine.calls[number]
            left[number], held[number] = call.length, call.prompt
            time += machine.costs.prefill_token_s * call.prompt
        time += machine.costs.of_step(len(left), sum(held.values()))
        for number in list(left):
            left[number] -= 1
            held[number] += 1
            if not left[number]:
                ends[number] = time
                del left[number], held[number]
    return ends


@settings(max_examples=60)
@given(machine=machines)
def test_without_a_loop_over_tokens_it_ends_where_the_loop_does(machine: Machine) -> None:
    """To a step or two a request that runs beside it: a real engine lets nobody in during a step."""
    calls = [Call(call.at + 1e-6 * n, call.prompt, call.length, "", 0.0) for n, call in enumerate(machine.calls)]
    machine = Machine(calls, machine.slots, 100_000, machine.costs, [], [])
    found, expected = run_virtual(drive(machine)).ends, step_by_step(machine)
    slowest = machine.costs.of_step(machine.slots, machine.slots * 100)
    for number in found:
        assert found[number] == pytest.approx(expected[number], abs=2 * len(calls) * slowest)


@settings(max_examples=50)
@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=20), costs=st.sampled_from([H200, Costs(step_s=0.1)]))
def test_requests_that_start_together_end_to_the_permille_where_the_loop_ends_them(
    lengths: list[int], costs: Costs
) -> None:
    calls = [Call(0.0, 50, length, "", 0.0) for length in lengths]
    machine = Machine(calls, len(calls), 10**6, costs, [], [])

    async def program() -> dict[int, float]:
        ends: dict[int, float] = {}
        wanted = {random.Random(number).random(): length for number, length in enumerate(lengths)}
        engine = SimEngine(costs=costs, num_tokens=lambda rng: wanted[rng.random()])

        async def one(number: int) -> None:
            await engine.generate(request(number, prompt=50))
            ends[number] = now()

        await asyncio.gather(*map(one, range(len(lengths))))
        return ends

    found, expected = run_virtual(program()), step_by_step(machine)
    for number, end in found.items():
        assert end == pytest.approx(expected[number], rel=1e-3)


# ---- environments and distributions ------------------------------------------------------------------------------------


class Alone:
    """A context whose model always says the same."""

    def __init__(self, seed: int, num_tokens: int = 10, task: str = "task") -> None:
        self.task, self.seed, self.num_turns = Task(id=task, prompt="?"), seed, 0
        self._num_tokens = num_tokens

    async def generate(self, tokens: object) -> Completion:
        self.num_turns += 1
        count = self._num_tokens
        return Completion(tokens=(1,) * count, logprobs=(-1.0,) * count, versions=(0,) * count, finish=Finish.STOP)

    async def waiting(self, what: str, work: Any) -> Any:
        return await work


def rewards(environment: SimEnvironment, **context: Any) -> float:
    async def program() -> float:
        return statistics.mean([await environment.rollout(Alone(seed, **context)) for seed in range(400)])

    return run_virtual(program())


def test_longer_rollouts_may_be_the_harder_ones() -> None:
    environment = SimEnvironment(success=longer_is_harder(100))
    assert rewards(environment, num_tokens=100) == pytest.approx(0.5, abs=0.06)
    assert rewards(environment, num_tokens=20) > 0.9 and rewards(environment, num_tokens=500) < 0.1


def test_a_prompt_may_have_a_chance_of_its_own() -> None:
    environment = SimEnvironment(success=by_prompt(mixture((1, constant(0.0)), (1, constant(1.0)))))
    assert {rewards(environment, task=f"task-{number}") for number in range(20)} == {0.0, 1.0}


def test_turns_and_latencies_add_up() -> None:
    async def program() -> tuple[int, float]:
        context = Alone(1)
        await SimEnvironment(num_turns=uniform(5, 5), latency_s=constant(2.0)).rollout(context)
        return context.num_turns, now()

    assert run_virtual(program()) == (5, 10.0)


def test_a_step_may_raise_hang_or_return_garbage() -> None:
    async def program() -> None:
        with pytest.raises(EnvironmentFailed):
            await SimEnvironment(failure=1.0).rollout(Alone(1))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000):
                await SimEnvironment(failure=1.0, failures=[SimFailure.HANG]).rollout(Alone(1))
        assert math.isnan(await SimEnvironment(failure=1.0, failures=[SimFailure.GARBAGE]).rollout(Alone(1)))

    run_virtual(program())


def test_the_pipeline_survives_all_kinds_of_failure_and_names_them() -> None:
    world = World(steps=10, groups_per_step=3, group_size=4, max_lag=1)
    outcome = simulate(world, environment=SimEnvironment(failure=0.15, failures=list(SimFailure)))
    failures = outcome.sink.of(RolloutFailed)
    assert {failed.error for failed in failures} == {"EnvironmentFailed", "RolloutTimeout"}
    assert {"a simulated failure", "no reward after 600 s"} <= {f.message.partition(":")[0] for f in failures}
    assert any("expected a finite number" in failed.message for failed in failures)
    assert len(outcome.sink.of(GroupTaken)) == 30


@pytest.mark.parametrize(
    ("draw", "mean", "low", "high"),
    [
        (constant(3), 3, 3, 3),
        (uniform(1, 3), 2, 1, 3),
        (lognormal(5, 0.5), 5, 0, math.inf),
        # the mean of a normal(10, 10) above 0 is 10 + 10 * 0.2420 / 0.8413
        (truncated_normal(10, 10), 12.88, 0, math.inf),
        (pareto(2, 3), 3, 2, math.inf),
        (mixture((3, constant(1)), (1, constant(5))), 2, 1, 5),
        (at_most(2, uniform(1, 3)), 1.75, 1, 2),
    ],
)
def test_draws_have_the_mean_and_the_range_that_they_claim(draw: Draw, mean: float, low: float, high: float) -> None:
    rng = random.Random(0)
    drawn = [draw(rng) for _ in range(20_000)]
    assert statistics.mean(drawn) == pytest.approx(mean, rel=0.03)
    assert low <= min(drawn) and max(drawn) <= high


def test_a_normal_that_has_nothing_above_its_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="next to nothing above 0"):
        truncated_normal(-10, 1)


# ---- what the simulator stands on --------------------------------------------------------------------------------------


def test_the_simulator_drives_the_production_pipeline_admission_rule_and_store() -> None:
    """No subclass of any of them, no other module in their place; and no torch."""
    program = """
import sys
sys.path[:0] = ["tests", "bench"]
import internals
from support import simulated
from millstream.pipeline import admission, components, pipeline, policy, settle
from millstream.store import memory
for user in (simulated, internals):
    assert user.Pipeline is pipeline.Pipeline and user.MemoryStore is memory.MemoryStore
assert policy.Admission is admission.Admission and components.GroupFinalizer is settle.GroupFinalizer
for part in (pipeline.Pipeline, admission.Admission, settle.GroupFinalizer, memory.MemoryStore):
    others = [one.__module__ for one in part.__subclasses__() if not one.__module__.endswith(".outside")]  # their claims
    assert set(others) <= {"support.rollout_workers"}, part
outcome = simulated.simulate(simulated.World(steps=2))
assert type(outcome.pipeline) is pipeline.Pipeline and type(outcome.pipeline.admission) is admission.Admission
assert type(outcome.store) is memory.MemoryStore
print(*(name for name in ("torch", "transformers") if name in sys.modules))
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (out.stdout.strip(), out.stderr) == ("", "")


# ---- GPUs that are shared ---------------------------------------------------------------------------------------------


def test_decoding_is_slower_while_the_learner_works_and_the_learner_while_an_engine_decodes() -> None:
    async def program() -> tuple[float, float]:
        sharing, ends = Sharing(slowdown=2.0, keep=0.5), list[float]()
        engine = SimEngine(token_s=1.0, num_tokens=constant(10), sharing=sharing)
        learner = SimLearner(step_s=constant(4.0), sharing=sharing)
        training = asyncio.create_task(learner.step())
        training.add_done_callback(lambda _: ends.append(now()))
        await engine.generate(request(0))
        decoded = now()
        await learner.step()
        assert now() - decoded == pytest.approx(4), "alone it has all of its rate"
        return decoded, ends[0]

    # 4 s of work at half the rate take 8 s, in which 4 tokens are sampled; the other 6 take 6 s
    assert run_virtual(program()) == pytest.approx((14, 8))


def test_a_learner_that_outlasts_decoding_gets_faster_when_that_ends() -> None:
    async def program() -> float:
        sharing = Sharing(slowdown=1.0, keep=0.5)
        engine = SimEngine(token_s=1.0, num_tokens=constant(4), sharing=sharing)
        await asyncio.gather(engine.generate(request(0)), SimLearner(step_s=constant(10.0), sharing=sharing).step())
        return now()

    assert run_virtual(program()) == pytest.approx(4 + (10 - 4 * 0.5))


def test_the_draws_of_a_config_have_the_means_that_they_name() -> None:
    rng = random.Random(0)
    for config in (
        DrawConfig(kind="geometric", mean=50.0),
        DrawConfig(kind="geometric", mean=0.5),
        DrawConfig(kind="lognormal", mean=50.0, sigma=0.5),
        DrawConfig(kind="fixed", mean=50.0),
    ):
        draw = config.read().draw
        found = statistics.mean(draw(rng) for _ in range(20_000))
        assert found == pytest.approx(config.mean, rel=0.03), config


def test_a_prompt_takes_longer_while_the_learner_works() -> None:
    async def program() -> float:
        sharing = Sharing(slowdown=2.0, keep=0.5)
        costs = Costs(step_s=1.0, prefill_token_s=0.5)
        engine = SimEngine(costs=costs, num_tokens=constant(1), sharing=sharing)
        training = asyncio.create_task(SimLearner(step_s=constant(100.0), sharing=sharing).step())
        await asyncio.sleep(0)
        await engine.generate(request(0, prompt=4))
        training.cancel()
        return now()

    assert run_virtual(program()) == pytest.approx(2 * (4 * 0.5 + 1))


def test_an_engine_that_was_replaced_does_not_speak_for_its_successor() -> None:
    async def program() -> float:
        sharing = Sharing(slowdown=2.0, keep=0.5)
        old = SimEngine(token_s=1.0, num_tokens=constant(10), sharing=sharing)
        old.crash("its node has failed")
        new = SimEngine(token_s=1.0, num_tokens=constant(10), sharing=sharing)
        decoding = asyncio.create_task(new.generate(request(0)))
        await asyncio.sleep(1.0)
        await old.close()
        assert len(sharing.listeners) == 1
        await SimLearner(step_s=constant(1.0), sharing=sharing).step()
        trained = now()
        await decoding
        await new.close()
        assert not sharing.listeners
        return trained

    assert run_virtual(program()) == pytest.approx(1 + 1 / 0.5), (
        "the new engine decodes: the learner has half of its rate"
    )


def test_three_that_work_on_two_cores_have_two_thirds_of_one_each() -> None:
    async def program() -> tuple[float, float, float]:
        sharing, ends = Sharing(cores=2), dict[str, float]()
        engine = SimEngine(token_s=1.0, num_tokens=constant(10), sharing=sharing)
        jobs = {
            "engine": engine.generate(request(0)),
            "learner": SimLearner(step_s=constant(4.0), sharing=sharing).step(),
            "driver": SimDriver(sharing).work(2.0),
        }

        async def timed(name: str) -> None:
            await jobs[name]
            ends[name] = now()

        await asyncio.gather(*map(timed, jobs))
        return ends["driver"], ends["learner"], ends["engine"]

    # the driver's 2 s take 3; the learner then has 2 of its 4 s to go, and the engine 8 of 10 tokens, each on a core of its own
    assert run_virtual(program()) == pytest.approx((3, 5, 11))


def test_a_driver_whose_work_is_cancelled_leaves_its_core() -> None:
    async def program() -> float:
        sharing = Sharing(cores=1)
        driver = SimDriver(sharing)
        works = [asyncio.create_task(driver.work(5.0)) for _ in range(3)]
        await asyncio.sleep(1)
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)
        await SimLearner(step_s=constant(4.0), sharing=sharing).step()
        return now()

    assert run_virtual(program()) == pytest.approx(5)
