"""Our engines, held to the engine's promises; and, of many a promise, an engine that breaks it and is caught."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Literal

import pytest
from msgspec import structs

from millstream.clock import RealClock, run_virtual
from millstream.engine import Engine, EngineConfig, OnSampled, OnUpdate
from millstream.events.sinks import MemorySink
from millstream.run.build import build_engine
from millstream.sim.draws import constant
from millstream.sim.engine import SimEngine
from millstream.testing.engine import EngineSuite
from millstream.types import Completion, Finish, Request, RequestKey, Sampled, Weights
from support.tiny import SHAPE, VOCABULARY, make, plain

TWINS = {number: plain(make("llama", seed=number)) for number in range(3)}


class TestTorchEngineOnAThread(EngineSuite):
    vocabulary = VOCABULARY
    context = SHAPE["max_position_embeddings"]
    is_process = False
    cache: Literal["slots", "pages"] = "slots"
    on_update: OnUpdate = "keep"

    async def make_engine(self) -> Engine:
        config = EngineConfig(slots=4, process=self.is_process, cache=self.cache, on_update=self.on_update)
        return build_engine(config, make("llama"), clock=RealClock(), sink=MemorySink())

    def make_reference(self, number: int) -> Any:
        return TWINS[number]


class TestTorchEngineInAProcess(TestTorchEngineOnAThread):
    is_process = is_shared = True  # a process takes seconds to start


class TestTorchEngineInPages(TestTorchEngineOnAThread):
    cache = "pages"


class TestTorchEngineInPagesThatComputesAgain(TestTorchEngineInPages):
    on_update = "recompute"
    cache_after_load = "computed again"


class TestSimEngine(EngineSuite):
    """Its tokens are made up: they have no distribution."""

    vocabulary = 256
    context = 1000
    tells_tokens = False
    is_greedy_at_zero = False
    stops_at_tokens = False
    has_top_k = has_top_p = False
    checks_weights = False

    async def make_engine(self) -> Engine:
        return SimEngine(slots=4, kv_tokens=self.context, token_s=self.token_s, num_tokens=constant(1e9))

    def make_refused(self) -> list[Request]:
        return super().make_refused()[1:]  # it does not look at prompts

    def run(self, program: Coroutine[Any, Any, None]) -> None:
        run_virtual(program)


class TestSimEngineWithNews(TestSimEngine):
    tells_tokens = True

    async def make_engine(self) -> Engine:
        return SimEngine(
            slots=4, kv_tokens=self.context, token_s=self.token_s, num_tokens=constant(1e9), news_s=self.token_s
        )


# ---- engines that break a promise ------------------------------------------------------------------------------------------


class Wrapped:
    """Our engine, through which everything goes unchanged."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.name, self.slots = engine, engine.name, engine.slots

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(self, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        return await self.engine.generate(request, on_sampled)


class Unscaled(Wrapped):
    """Gives the log-probabilities of temperature 1, whatever was sampled from."""

    async def generate(self, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        found = await super().generate(request)
        divided = tuple(value * (request.sampling.temperature or 1.0) for value in found.logprobs)
        return structs.replace(found, logprobs=divided)


class Unrestricted(Wrapped):
    async def generate(self, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        sampling = structs.replace(request.sampling, top_k=0, top_p=1.0)
        return await super().generate(structs.replace(request, sampling=sampling), on_sampled)


class Hasty(Wrapped):
    """Says that all tokens of an answer are of the weights it ended with."""

    async def generate(self, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        found = await super().generate(request, on_sampled)
        return structs.replace(found, versions=(self.engine.version,) * len(found.tokens))


class OneLate(Wrapped):
    """The first token after a swap bears the version before it."""

    async def generate(self, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        before: list[int] = []

        def tell(sampled: Sampled) -> None:
            versions = (*(before or sampled.versions)[-1:], *sampled.versions[:-1])
            before.extend(sampled.versions)
            if on_sampled is not None:
                on_sampled(Sampled(sampled.tokens, sampled.logprobs, versions))

        found = await super().generate(request, tell)
        return structs.replace(found, versions=(*found.versions[:1], *found.versions[:-1]))


class Forgetful(Wrapped):
    """What is aborted is lost."""

    async def generate(self, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        found = await super().generate(request, on_sampled)
        if found.finish is Finish.ABORT:
            return structs.replace(found, tokens=(), logprobs=(), versions=())
        return found


class Stuttering(Wrapped):
    """Tells of some tokens twice."""

    async def generate(self, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        told = on_sampled or (lambda sampled: None)
        return await super().generate(request, lambda sampled: (told(sampled), told(sampled))[0])


class Restless(Wrapped):
    async def pause(self) -> None: ...

    async def resume(self) -> None: ...


class Humble(Wrapped):
    """Takes any version."""

    async def load(self, version: int, weights: Weights) -> None:
        await self.engine.load(max(version, self.engine.version), weights)


class Picky(Wrapped):
    async def abort(self, key: RequestKey) -> None:
        if not self.engine.stats().running:
            raise KeyError(key)
        await self.engine.abort(key)


class Restarting(Wrapped):
    """A request that goes on draws its numbers from the beginning."""

    async def generate(self, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        return await super().generate(structs.replace(request, num_sampled=0), on_sampled)


class Endless(Wrapped):
    """Does not know stop tokens."""

    async def generate(self, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        sampling = structs.replace(request.sampling, stop=())
        return await super().generate(structs.replace(request, sampling=sampling), on_sampled)


@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        (Unscaled, "test_every_token_has_the_log_probability_of_the_distribution_it_was_sampled_from"),
        (Unrestricted, "test_top_k_samples_among_the_likeliest_with_their_probabilities"),
        (Unrestricted, "test_top_p_samples_among_the_likeliest_with_their_probabilities"),
        (Unrestricted, "test_what_is_sampled_often_is_what_is_likely"),
        (Hasty, "test_a_load_in_flight_changes_the_version_and_every_token_is_of_the_version_recorded_for_it"),
        (OneLate, "test_a_load_in_flight_changes_the_version_and_every_token_is_of_the_version_recorded_for_it"),
        (OneLate, "test_in_a_soak_of_aborts_cancellations_pauses_and_swaps_each_request_is_answered_once"),
        (Forgetful, "test_an_aborted_request_returns_what_it_has"),
        (Forgetful, "test_closing_ends_what_is_in_flight_as_aborted_and_refuses_what_comes_later"),
        (Stuttering, "test_who_watches_a_request_hears_its_tokens_in_order_before_it_ends"),
        (Restless, "test_while_paused_nothing_is_sampled_requests_queue_and_nothing_is_lost"),
        (Humble, "test_a_version_never_falls"),
        (Picky, "test_aborting_what_is_unknown_or_done_is_ignored"),
        (Restarting, "test_an_interrupted_request_goes_on_as_if_nothing_had_happened"),
        (Endless, "test_a_stop_token_ends_an_answer_and_is_its_last_token"),
    ],
)
def test_an_engine_that_breaks_a_promise_is_caught(kind: type[Wrapped], promise: str) -> None:
    class Suite(TestTorchEngineOnAThread):
        async def make_engine(self) -> Engine:
            return kind(await super().make_engine())

    with pytest.raises((AssertionError, KeyError, pytest.fail.Exception)):
        getattr(Suite(), promise)()
