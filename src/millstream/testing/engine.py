"""Conformance tests of `millstream.engine.Engine`, for any implementation. Needs pytest.

    from millstream.testing.engine import EngineSuite

    class TestMyEngine(EngineSuite):
        vocabulary = 97

        async def make_engine(self):
            return MyEngine(...)                  # with the weights of `make_reference(0)`, and nothing in flight

        def make_reference(self, number):
            return AutoModelForCausalLM...        # on the CPU, float32; each number: other weights of the same shape

With a reference, tokens and log-probabilities are compared with a plain forward pass of transformers; without one (None),
only their form is. What an engine does not support is declared by an attribute (`is_repeatable_by_seed = False`), which skips
the tests that need it. An engine that is slow to start can serve all tests of a class (`is_shared = True`). Few slots (2 to
8) test more than many. The attributes are in `testing.engine_base`; see docs/engines.md."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from msgspec import structs

from millstream.engine import Engine
from millstream.errors import EngineError, EngineGone, RequestRefused
from millstream.testing.engine_base import EngineHarness, TrackedRequest, engine_test
from millstream.types import Finish, Request, RequestKey

CHI_SQUARE_3 = 25.9  # the 99.999% quantile of chi-square with 3 degrees of freedom
POLL_S = 0.001


class EngineSuite(EngineHarness):
    # ---- tokens and log-probabilities

    @engine_test()
    async def test_every_token_has_the_log_probability_of_the_distribution_it_was_sampled_from(self, e: Engine) -> None:
        reference, version = self.reference(), e.version
        for temperature in (1.0, 0.6):
            asked = self.requests(8, temperature=temperature)
            for one, completion in zip(asked, await asyncio.gather(*map(e.generate, asked)), strict=True):
                assert completion.finish is Finish.LENGTH and set(completion.versions) == {version}
                self.check_logprobs(one, completion, {version: reference})

    @engine_test("is_greedy_at_zero")
    async def test_greedy_tokens_are_those_of_transformers_with_log_probabilities_of_temperature_one(
        self, e: Engine
    ) -> None:
        reference, asked = self.reference(), self.requests(6, temperature=0.0)
        for one, completion in zip(asked, await asyncio.gather(*map(e.generate, asked)), strict=True):
            assert completion.tokens == reference.generate(one.tokens, one.sampling.max_tokens)
            self.check_logprobs(one, completion, {e.version: reference})

    @engine_test("has_top_k")
    async def test_top_k_samples_among_the_likeliest_with_their_probabilities(self, e: Engine) -> None:
        await self._check_restricted(e, top_k=4)

    @engine_test("has_top_p")
    async def test_top_p_samples_among_the_likeliest_with_their_probabilities(self, e: Engine) -> None:
        await self._check_restricted(e, top_p=0.5, temperature=0.3)

    @engine_test("has_top_k", "has_top_p")
    async def test_top_p_is_of_what_top_k_leaves(self, e: Engine) -> None:
        await self._check_restricted(e, top_k=6, top_p=0.7, temperature=0.5)

    async def _check_restricted(self, e: Engine, **sampling: Any) -> None:
        """A token that was not allowed shows as a log-probability of minus infinity."""
        reference, asked = self.reference(), self.requests(8, **sampling)
        for one, completion in zip(asked, await asyncio.gather(*map(e.generate, asked)), strict=True):
            self.check_logprobs(one, completion, {e.version: reference})

    @engine_test("has_top_k")
    async def test_what_is_sampled_often_is_what_is_likely(self, e: Engine) -> None:
        reference, prompt = self.reference(), self.prompts(1)[0]
        asked = [self.request(number, prompt, max_tokens=1, top_k=4) for number in range(300)]
        found = Counter(completion.tokens[0] for completion in await asyncio.gather(*map(e.generate, asked)))
        expected = {token: 300 * p for token, p in reference.probabilities(prompt, asked[0].sampling).items()}
        assert found.keys() <= expected.keys()
        assert sum((found[token] - count) ** 2 / count for token, count in expected.items()) < CHI_SQUARE_3

    @engine_test("is_repeatable_by_seed")
    async def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(self, e: Engine) -> None:
        one = self.requests(1)[0]
        first, again = await e.generate(one), await e.generate(one)
        assert first.tokens == again.tokens
        assert first.tokens != (await e.generate(structs.replace(one, seed=one.seed + 7))).tokens

    @engine_test()
    async def test_many_at_once_get_what_each_gets_alone(self, e: Engine) -> None:
        asked = self.greedy(max(12, 3 * min(e.slots, 8)))
        together = await asyncio.gather(*map(e.generate, asked))
        for one, completion in list(zip(asked, together, strict=True))[::4]:
            assert (await e.generate(one)).tokens == completion.tokens

    # ---- how an answer ends

    @engine_test()
    async def test_an_answer_has_max_tokens_at_most(self, e: Engine) -> None:
        for length in (1, 2, 17):
            flight = TrackedRequest(e, self.request(length, (4, 5, 6), max_tokens=length))
            completion = await flight
            self.check(flight, completion, first=e.version, last=e.version)
            assert completion.finish is Finish.LENGTH

    @engine_test("stops_at_tokens")
    async def test_a_stop_token_ends_an_answer_and_is_its_last_token(self, e: Engine) -> None:
        stop = tuple(range(self.vocabulary // 5))
        flights = [TrackedRequest(e, one) for one in self.requests(12, max_tokens=100, stop=stop)]
        for flight in flights:
            self.check(flight, await flight, first=e.version, last=e.version)
            assert not set((await flight).tokens[:-1]) & set(stop)
        assert sum([(await flight).finish is Finish.STOP for flight in flights]) >= 9

    @engine_test("stops_at_tokens")
    async def test_a_stop_token_that_is_the_last_one_allowed_is_a_stop(self, e: Engine) -> None:
        one = self.request(0, (4, 5, 6), max_tokens=1, stop=tuple(range(self.vocabulary)))
        assert (await e.generate(one)).finish is Finish.STOP

    @engine_test()
    async def test_a_request_that_can_never_run_is_refused_and_leaves_nothing(self, e: Engine) -> None:
        for refused in self.make_refused():
            with pytest.raises(RequestRefused):
                await e.generate(refused)
            assert len((await e.generate(self.request(0, (4, 5, 6), max_tokens=3))).tokens) == 3

    @engine_test("tells_tokens")
    async def test_who_watches_a_request_hears_its_tokens_in_order_before_it_ends(self, e: Engine) -> None:
        flights = [TrackedRequest(e, one) for one in self.requests(3, max_tokens=24)]
        for flight in flights:
            self.check(flight, await flight, first=e.version, last=e.version)
            assert len(flight.reported) > 1, "as they come, not all at once"

    # ---- aborts and cancellation

    @engine_test()
    async def test_an_aborted_request_returns_what_it_has(self, e: Engine) -> None:
        flight = TrackedRequest(e, self.greedy(1, max_tokens=self.longest)[0])
        await self.until_sampled(flight, 5)
        await e.abort(flight.request.key)
        completion = await flight
        self.check(flight, completion, first=e.version, last=e.version)
        assert completion.finish is Finish.ABORT and 5 <= len(completion.tokens) < self.longest
        whole = await e.generate(_with_length(flight.request, len(completion.tokens)))
        assert whole.tokens == completion.tokens, "the beginning of what it would have been"

    @engine_test()
    async def test_a_request_that_is_aborted_in_the_queue_returns_nothing(self, e: Engine) -> None:
        flights = [TrackedRequest(e, one) for one in self.requests(e.slots + 2, max_tokens=self.longest)]
        await self.until_sampled(flights[0])
        await e.abort(flights[-1].request.key)
        completion = await flights[-1]
        self.check(flights[-1], completion, first=e.version, last=e.version)
        assert completion.finish is Finish.ABORT
        if self.joins_in_order:
            assert completion.tokens == ()
        await _end(e, flights)

    @engine_test()
    async def test_aborting_what_is_unknown_or_done_is_ignored(self, e: Engine) -> None:
        one = self.request(0, (4, 5, 6))
        await e.generate(one)
        await e.abort(one.key)
        await e.abort(RequestKey(group_id=99, member=7))
        assert len((await e.generate(one)).tokens) == 16

    @engine_test()
    async def test_an_abort_leaves_the_others_as_they_would_be_alone(self, e: Engine) -> None:
        flights = [TrackedRequest(e, one) for one in self.greedy(4, max_tokens=min(80, self.longest))]
        await self.until_sampled(flights[0], 4)
        for number in (0, 2):
            await e.abort(flights[number].request.key)
        ended = [await flight for flight in flights]
        assert [c.finish for c in ended] == [Finish.ABORT, Finish.LENGTH] * 2
        for number in (1, 3):
            assert ended[number].tokens == (await e.generate(flights[number].request)).tokens

    @engine_test()
    async def test_cancelled_requests_free_their_slots(self, e: Engine) -> None:
        flights = [TrackedRequest(e, one) for one in self.requests(e.slots + 2, max_tokens=self.longest)]
        await self.until_sampled(flights[0])
        for flight in flights:
            flight.future.cancel()
        await asyncio.gather(*(flight.future for flight in flights), return_exceptions=True)
        again = [self.request(100 + number, (7, 8), max_tokens=3) for number in range(e.slots + 2)]
        assert [len(c.tokens) for c in await asyncio.gather(*map(e.generate, again))] == [3] * len(again)
        assert e.stats().running == e.stats().waiting == 0

    # ---- the queue, and holding it

    @engine_test("joins_in_order")
    async def test_requests_join_in_the_order_they_were_started(self, e: Engine) -> None:
        ended: list[int] = []

        async def ask(one: Request) -> None:
            await e.generate(one)
            ended.append(one.key.group_id)

        await asyncio.gather(*(ask(one) for one in self.requests(3 * e.slots, max_tokens=6)))
        for at, number in enumerate(ended):
            assert all(later < number + e.slots for later in ended[:at]), (
                "no request overtakes one that came `slots` before"
            )

    @engine_test()
    async def test_while_paused_nothing_is_sampled_requests_queue_and_nothing_is_lost(self, e: Engine) -> None:
        asked = self.greedy(2, max_tokens=min(60, self.longest))
        flight = TrackedRequest(e, asked[0])
        await self.until_sampled(flight)
        await e.pause()
        count, reported = e.stats().tokens_generated, flight.num_reported
        later = TrackedRequest(e, asked[1])
        await asyncio.sleep(self.tick_s)
        assert e.stats().tokens_generated == count and flight.num_reported == reported and later.num_reported == 0
        assert not flight.future.done() and not later.future.done()
        await e.resume()
        for one in (flight, later):
            self.check(one, await one, first=e.version, last=e.version)
            assert (await one).tokens == (await e.generate(one.request)).tokens, "as if there had been no pause"

    @engine_test()
    async def test_a_request_that_is_aborted_while_paused_returns_what_it_has(self, e: Engine) -> None:
        flights = [TrackedRequest(e, one) for one in self.requests(2, max_tokens=self.longest)]
        await self.until_sampled(flights[0])
        await e.pause()
        await e.abort(flights[0].request.key)
        completion = await asyncio.wait_for(flights[0].future, self.limit_s / 2)
        assert completion.finish is Finish.ABORT and len(completion.tokens) >= 3
        await e.resume()
        await _end(e, flights[1:])

    # ---- weights

    @engine_test("takes_weights")
    async def test_a_load_in_flight_changes_the_version_and_every_token_is_of_the_version_recorded_for_it(
        self, e: Engine
    ) -> None:
        before = e.version
        flights = [TrackedRequest(e, one) for one in self.requests(2, max_tokens=min(60, self.longest))]
        await self.until_sampled(flights[0], 4)
        await e.load(before + 3, self.make_weights(1))
        assert e.version == before + 3
        for flight in flights:
            completion = await flight
            self.check(flight, completion, first=before, last=before + 3)
            assert completion.versions[0] == before and completion.versions[-1] == before + 3
            if self.make_reference(0) is not None:
                references = {before: self.reference(0), before + 3: self.reference(1)}
                self.check_logprobs(flight.request, completion, references)

    @engine_test("takes_weights")
    async def test_what_begins_after_a_load_is_of_the_new_weights_alone(self, e: Engine) -> None:
        one = self.greedy(1)[0]
        old = await e.generate(one)
        await e.load(e.version + 1, self.make_weights(1))
        new = await e.generate(one)
        assert set(new.versions) == {e.version} and set(old.versions) == {e.version - 1}
        if self.make_reference(1) is not None:
            self.check_logprobs(one, new, {e.version: self.reference(1)})

    @engine_test("takes_weights")
    async def test_a_load_while_paused_holds_for_all_that_comes_after_it(self, e: Engine) -> None:
        before = e.version
        flight = TrackedRequest(e, self.request(0, (4, 5, 6), max_tokens=min(60, self.longest)))
        await self.until_sampled(flight)
        await e.pause()
        later = TrackedRequest(e, self.request(1, (7, 8, 9), max_tokens=5))
        await e.load(before + 1, self.make_weights(1))
        await asyncio.sleep(self.tick_s)
        assert e.version == before + 1 and not flight.future.done() and later.num_reported == 0
        await e.resume()
        assert (await later).versions == (before + 1,) * 5
        completion = await flight
        assert completion.versions[0] == before and completion.versions[-1] == before + 1

    @engine_test("takes_weights")
    async def test_a_version_never_falls(self, e: Engine) -> None:
        await e.load(e.version + 5, self.make_weights(1))
        version, one = e.version, self.greedy(1)[0]
        tokens = (await e.generate(one)).tokens
        with pytest.raises(EngineError):
            await e.load(version - 1, self.make_weights(0))
        assert e.version == version and (await e.generate(one)).tokens == tokens

    @engine_test("takes_weights", "checks_weights")
    async def test_weights_that_do_not_fit_are_refused_and_change_nothing(self, e: Engine) -> None:
        version, one = e.version, self.greedy(1)[0]
        tokens = (await e.generate(one)).tokens
        weights = dict(self.make_weights(1))
        weights["nonsense"] = weights.pop(next(iter(weights)))
        with pytest.raises(EngineError):
            await e.load(version + 1, weights)
        assert e.version == version and (await e.generate(one)).tokens == tokens

    # ---- continued requests

    @engine_test("continues_requests")
    async def test_an_interrupted_request_goes_on_as_if_nothing_had_happened(self, e: Engine) -> None:
        sampled = self.requests(1, max_tokens=20) if self.is_repeatable_by_seed else []
        for one in self.greedy(1, max_tokens=20) + sampled:
            whole = await e.generate(one)
            for cut in (1, 7, 19):
                rest = await e.generate(_continued(one, whole.tokens[:cut]))
                assert rest.tokens == whole.tokens[cut:]
                assert rest.logprobs == pytest.approx(whole.logprobs[cut:], abs=self.tolerance)
                assert len(rest.versions) == 20 - cut

    # ---- statistics, and the end

    @engine_test()
    async def test_stats_count_the_requests(self, e: Engine) -> None:
        assert e.slots >= 1 and e.name
        before = e.stats()
        flights = [TrackedRequest(e, one) for one in self.requests(e.slots + 1, max_tokens=min(60, self.longest))]
        await self.until_sampled(flights[0])
        during = e.stats()
        assert 1 <= during.running <= e.slots and during.running + during.waiting <= len(flights)
        ended = [await flight for flight in flights]
        after = e.stats()
        assert after.running == after.waiting == 0
        assert after.requests_finished == before.requests_finished + len(flights)
        assert after.tokens_generated == before.tokens_generated + sum(len(c.tokens) for c in ended)
        for stats in (before, during, after):
            assert 0.0 <= stats.cache_used <= 1.0 and stats.swap_s >= 0.0 and stats.num_preempted >= 0
            assert 0 <= stats.num_accepted <= stats.num_drafted

    def test_closing_ends_what_is_in_flight_as_aborted_and_refuses_what_comes_later(self) -> None:
        async def program() -> None:
            async with asyncio.timeout(self.limit_s):
                e = await self.make_engine()
                flights = [TrackedRequest(e, one) for one in self.requests(e.slots + 2, max_tokens=self.longest)]
                await self.until_sampled(flights[0])
                await e.close()
                for flight in flights:
                    completion = await flight
                    self.check(flight, completion, first=e.version, last=e.version)
                    assert completion.finish is Finish.ABORT
                assert len((await flights[0]).tokens) >= 3
                with pytest.raises(EngineGone):
                    await e.generate(self.request(0, (4, 5, 6)))

        self.run(program())

    # ---- all of it at once

    @engine_test()
    async def test_in_a_soak_of_aborts_cancellations_pauses_and_swaps_each_request_is_answered_once(
        self, e: Engine
    ) -> None:
        rng, first = random.Random(0), e.version
        numbers = {first: 0}
        asked = [self._any_request(number, prompt, rng) for number, prompt in enumerate(self.prompts(48, seed=3))]
        flights: list[TrackedRequest] = []
        cancelled: set[int] = set()
        for number, one in enumerate(asked):
            flights.append(TrackedRequest(e, one))
            await asyncio.sleep(rng.random() * self.tick_s / 10)
            victim = flights[rng.randrange(len(flights))]
            match rng.randrange(8):
                case 0 | 1:
                    await e.abort(victim.request.key)
                case 2 if not victim.future.done():
                    victim.future.cancel()
                    cancelled.add(victim.request.key.group_id)
                case 3 if self.takes_weights and number % 2:
                    numbers[e.version + 1] = len(numbers) % 3
                    await e.load(e.version + 1, self.make_weights(numbers[e.version + 1]))
                case 4:
                    await e.pause()
                    await asyncio.sleep(self.tick_s / 20)
                    await e.resume()
        await asyncio.gather(*(flight.future for flight in flights), return_exceptions=True)
        self._check_soak(flights, cancelled, numbers)
        await _settled(e)

    def _any_request(self, number: int, prompt: tuple[int, ...], rng: random.Random) -> Request:
        stop = (3, 4, 5) if self.stops_at_tokens and rng.random() < 0.5 else ()
        return self.request(number, prompt, max_tokens=rng.randint(1, 40), stop=stop)

    def _check_soak(self, flights: Sequence[TrackedRequest], cancelled: set[int], numbers: dict[int, int]) -> None:
        has_reference = self.make_reference(0) is not None
        known = {number: self.reference(number) for number in set(numbers.values())} if has_reference else {}
        for flight in flights:
            if flight.request.key.group_id in cancelled and flight.future.cancelled():
                continue
            completion = flight.future.result()
            self.check(flight, completion, first=min(numbers), last=max(numbers))
            if has_reference:
                references = {version: known[number] for version, number in numbers.items()}
                self.check_logprobs(flight.request, completion, references, is_paused=True)


def _with_length(request: Request, length: int) -> Request:
    return structs.replace(request, sampling=structs.replace(request.sampling, max_tokens=length))


def _continued(request: Request, tokens: Sequence[int]) -> Request:
    """The rest of a request that was interrupted after these tokens."""
    rest = _with_length(request, request.sampling.max_tokens - len(tokens))
    return structs.replace(rest, tokens=(*request.tokens, *tokens), num_sampled=len(tokens))


async def _end(engine: Engine, flights: Sequence[TrackedRequest]) -> None:
    for flight in flights:
        await engine.abort(flight.request.key)
    await asyncio.gather(*(flight.future for flight in flights))


async def _settled(engine: Engine) -> None:
    """Cancelled requests may leave shortly after their `generate`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(5.0):
            while engine.stats().running or engine.stats().waiting:
                await engine.abort(RequestKey(group_id=-1, member=0))
                await asyncio.sleep(POLL_S)
    assert engine.stats().running == engine.stats().waiting == 0
