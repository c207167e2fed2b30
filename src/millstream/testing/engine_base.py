"""The base of the engine's conformance tests: what an implementation provides, and the checks that the tests share."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from millstream.engine import Engine
from millstream.types import Completion, Finish, Request, RequestKey, Sampled, Sampling, Weights

EngineTest = Callable[["EngineHarness"], None]
# Of a request in flight after new weights: see `EngineHarness.cache_after_load`.
Cache = Literal["kept", "computed again", "not said"]


def engine_test(*needs: str) -> Callable[[Callable[[Any, Engine], Awaitable[None]]], EngineTest]:
    """A test that gets an engine. It is skipped unless all these attributes of the suite are true."""

    def make(test: Callable[[Any, Engine], Awaitable[None]]) -> EngineTest:
        def run(self: EngineHarness) -> None:
            for name in needs:
                if not getattr(self, name):
                    pytest.skip(f"{type(self).__name__}.{name} is {getattr(self, name)}")

            async def program() -> None:
                async with asyncio.timeout(self.limit_s), self.opened() as engine:
                    await test(self, engine)

            self.run(program())

        run.__name__ = test.__name__
        run.__doc__ = test.__doc__  # not its signature: pytest would look for fixtures
        return run

    return make


class TrackedRequest:
    """A request in flight, and what `on_sampled` reported of it."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.request = request
        self.reported = list[Sampled]()
        self._news = asyncio.Event()
        self.future = asyncio.ensure_future(engine.generate(request, self._on_sampled))
        self.future.add_done_callback(lambda _: self._news.set())

    def _on_sampled(self, sampled: Sampled) -> None:
        self.reported.append(sampled)
        self._news.set()

    async def until_reported(self, count: int) -> None:
        """Until `count` tokens were reported, or it has ended."""
        while self.num_reported < count and not self.future.done():
            self._news.clear()
            await self._news.wait()

    @property
    def num_reported(self) -> int:
        return sum(len(sampled.tokens) for sampled in self.reported)

    def __await__(self) -> Generator[Any, Any, Completion]:
        return self.future.__await__()


class EngineHarness:
    """What `EngineSuite` needs from an implementation. Override `make_engine`, and the attributes that differ."""

    vocabulary = 97  # prompts are of token ids 3 and above, below this
    context: int | None = None  # the most tokens of a prompt and its answer together. None: no limit to test
    # Tokens of an answer that is interrupted: enough to take some time, and within the context with a prompt of 20.
    longest = 200
    tolerance = 1e-4  # how far a log-probability may be from that of the reference
    limit_s = 60.0  # a test that takes longer hangs
    tick_s = 0.1  # time in which an engine that is not paused samples something
    token_s = 0.01  # time of one token, for an engine without `tells_tokens`

    # One engine serves all tests of the class, on one event loop; it loads the weights of reference 0 before each.
    is_shared = False

    tells_tokens = True  # `on_sampled` is called before the request ends
    is_repeatable_by_seed = True  # the same request gets the same tokens
    continues_requests = True  # `Request.num_sampled`: an interrupted request continues unchanged
    is_greedy_at_zero = True  # temperature 0 takes the most likely token
    stops_at_tokens = True
    has_top_k = True
    has_top_p = True
    joins_in_order = True  # requests started in an order join in that order
    takes_weights = True
    checks_weights = True  # weights that do not fit are refused, and change nothing
    # The cache of a request in flight after new weights: keys and values of the weights that computed them, or those of
    # the new ones. Not said: log-probabilities after new weights are not compared.
    cache_after_load: Cache = "kept"
    # A pause keeps keys and values as well; otherwise those kept over new weights may be computed again after a pause.
    keeps_cache_over_pause = True

    async def make_engine(self) -> Engine:
        """An engine with the weights of reference 0 and nothing in flight."""
        raise NotImplementedError("give the suite an engine: async def make_engine(self)")

    def make_reference(self, number: int) -> Any:
        """A causal LM of transformers, or None."""
        return None

    def make_weights(self, number: int) -> Weights:
        """Of reference `number`, as a learner would publish them."""
        model = self.make_reference(number)
        return {} if model is None else {name: p.detach().clone() for name, p in model.named_parameters()}

    def make_refused(self) -> list[Request]:
        """Requests that can never run."""
        refused = [self.request(0, ())]
        if self.context is not None:
            refused.append(self.request(1, (5,) * (self.context - 5), max_tokens=6))
        return refused

    def run(self, program: Coroutine[Any, Any, None]) -> None:
        """Run a test to its end."""
        if not self.is_shared:
            asyncio.run(program)
            return
        cls = type(self)
        if cls._runner is None:
            cls._runner = asyncio.Runner()
        cls._runner.run(program)

    _runner: asyncio.Runner | None = None
    _engine: Engine | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Engine]:
        """An engine for one test."""
        if not self.is_shared:
            engine = await self.make_engine()
            try:
                yield engine
            finally:
                await engine.close()
            return
        cls = type(self)
        if cls._engine is None:
            cls._engine = await self.make_engine()
        elif self.takes_weights:
            await cls._engine.load(cls._engine.version, self.make_weights(0))
        yield cls._engine

    @classmethod
    def teardown_class(cls) -> None:
        """Close the shared engine."""
        if cls._runner is not None:
            if cls._engine is not None:
                cls._runner.run(cls._engine.close())
            cls._runner.close()
            cls._runner = None
            cls._engine = None

    # ---- requests and checks

    def prompts(self, count: int, *, seed: int = 0) -> list[tuple[int, ...]]:
        rng = random.Random(seed)
        return [tuple(rng.randrange(3, self.vocabulary) for _ in range(rng.randint(2, 20))) for _ in range(count)]

    def request(self, number: int, tokens: tuple[int, ...], *, max_tokens: int = 16, **sampling: Any) -> Request:
        return Request(
            key=RequestKey(group_id=number, member=0),
            tokens=tokens,
            sampling=Sampling(max_tokens=max_tokens, **sampling),
            seed=1000 + number,
        )

    def requests(self, count: int, **sampling: Any) -> list[Request]:
        return [self.request(number, prompt, **sampling) for number, prompt in enumerate(self.prompts(count))]

    def greedy(self, count: int, **more: Any) -> list[Request]:
        """Requests with predictable tokens: greedy, or by their seeds."""
        return self.requests(count, temperature=0.0 if self.is_greedy_at_zero else 1.0, **more)

    def reference(self, number: int = 0) -> Reference:
        model = self.make_reference(number)
        if model is None:
            pytest.skip(f"{type(self).__name__} has no reference: make_reference returns None")
        return Reference(model)

    async def until_sampled(self, flight: TrackedRequest, count: int = 3) -> None:
        """Until the request has at least `count` tokens, and is still in flight."""
        if self.tells_tokens:
            await flight.until_reported(count)
        else:
            await asyncio.sleep((count + 0.5) * self.token_s)
        if flight.future.done():
            raise RuntimeError("the request ended before it could be interrupted: set `longest` higher")

    def check(self, flight: TrackedRequest, completion: Completion, *, first: int, last: int) -> None:
        """What holds for every completion that was sampled while versions `first` to `last` were loaded."""
        request, tokens = flight.request, completion.tokens
        assert len(tokens) == len(completion.logprobs) == len(completion.versions)
        assert len(tokens) <= request.sampling.max_tokens
        assert all(0 <= token < self.vocabulary for token in tokens)
        assert all(math.isfinite(value) and value <= 1e-6 for value in completion.logprobs)
        assert list(completion.versions) == sorted(completion.versions), "versions never decrease"
        assert all(first <= version <= last for version in completion.versions)
        is_stopped = bool(tokens) and tokens[-1] in request.sampling.stop
        match completion.finish:
            case Finish.STOP:
                assert is_stopped or not self.stops_at_tokens
            case Finish.LENGTH:
                assert len(tokens) == request.sampling.max_tokens and not is_stopped
            case Finish.ABORT:
                assert len(tokens) < request.sampling.max_tokens and not is_stopped
        for name in ("tokens", "logprobs", "versions"):
            reported = [value for sampled in flight.reported for value in getattr(sampled, name)]
            assert reported == list(getattr(completion, name))[: len(reported)], f"reported are the first {name}"

    def check_logprobs(
        self, request: Request, completion: Completion, references: dict[int, Reference], *, is_paused: bool = False
    ) -> None:
        """Every token has the log-probability of the version that is recorded for it."""
        is_mixed = is_paused and self.cache_after_load == "kept" and not self.keeps_cache_over_pause
        cache = "not said" if is_mixed else self.cache_after_load
        found, expected = completion.logprobs, logprobs_over(request, completion, references, cache)
        for at, (one, other) in enumerate(zip(found, expected, strict=False)):
            of = f"token {at} of {len(found)}, of version {completion.versions[at]}"
            assert one == pytest.approx(other, abs=self.tolerance), of


# ---- the reference ---------------------------------------------------------------------------------------------------


class Reference:
    """Tokens and log-probabilities of a plain model of transformers. Independent of the engines' sampling code, token by token
    and without a batch, so that the two do not share a mistake."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()

    @torch.no_grad()
    def generate(self, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Greedily, by transformers itself."""
        out = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return tuple(out[0, len(prompt) :].tolist())

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], cache: Any = None) -> Tensor:
        """The logits after each of these tokens, which follow the content of the cache."""
        out = self.model(torch.tensor([list(tokens)]), past_key_values=cache, use_cache=cache is not None)
        return out.logits[0].float()  # type: ignore[no-any-return]

    def probabilities(self, prompt: Sequence[int], sampling: Sampling) -> dict[int, float]:
        """Of the possible next tokens."""
        left = kept_probabilities(self.logits(prompt)[-1], sampling)
        return {token: float(left[token]) for token in left.nonzero()[:, 0].tolist()}


def kept_probabilities(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that is sampled from, in float64: the most likely tokens within top_k and top_p. Greedy: all tokens."""
    probabilities_V = torch.softmax(logits_V.double() / (sampling.temperature or 1.0), -1)
    order = probabilities_V.argsort(descending=True).tolist()[: sampling.top_k or None]
    if sampling.top_p < 1.0:
        total, before, kept = float(probabilities_V[order].sum()), 0.0, list[int]()
        for token in order:
            if before / total >= sampling.top_p:
                break
            kept.append(token)
            before += float(probabilities_V[token])
        order = kept
    left_V = torch.zeros_like(probabilities_V)
    left_V[order] = probabilities_V[order]
    return left_V / left_V.sum()


def logprobs_over(
    request: Request, completion: Completion, references: dict[int, Reference], cache: Cache
) -> list[float]:
    """The expected log-probabilities of a completion, each under the weights of the version recorded for it. Ends before the
    first token that cannot be predicted."""
    tokens, versions = completion.tokens, completion.versions
    if not tokens:
        return []
    if cache == "kept" and len(set(versions)) > 1:
        logits = _over_kept_cache(request.tokens, tokens, versions, references)
    else:
        logits = _computed_again(request.tokens, tokens, versions, references)
    end = len(tokens) if cache != "not said" else versions.count(versions[0])
    distributions = [kept_probabilities(logits[at], request.sampling) for at in range(end)]
    return [float(one[token].log()) for one, token in zip(distributions, tokens, strict=False)]


def _computed_again(
    prompt: Sequence[int], tokens: Sequence[int], versions: Sequence[int], references: dict[int, Reference]
) -> list[Tensor]:
    """One forward pass over all tokens for each version."""
    begin = len(prompt) - 1
    passes = {version: references[version].logits([*prompt, *tokens])[begin:] for version in set(versions)}
    return [passes[version][at] for at, version in enumerate(versions)]


def _over_kept_cache(
    prompt: Sequence[int], tokens: Sequence[int], versions: Sequence[int], references: dict[int, Reference]
) -> list[Tensor]:
    """The keys and values of a token are those of the weights that read it and sampled the next one."""
    from transformers import DynamicCache

    cache = DynamicCache(config=references[versions[0]].model.config)
    found = [references[versions[0]].logits(prompt, cache)[-1]]
    for token, version in zip(tokens, versions[1:], strict=False):
        found.append(references[version].logits([token], cache)[-1])
    return found
