"""Speculative tokens: right, wrong and half right drafts give the tokens and log-probabilities of plain steps, at less cost."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from millstream.clock import RealClock
from millstream.engine import EngineConfig
from millstream.engine.native import graphs, speculation
from millstream.engine.native.batching import Batcher
from millstream.engine.native.build import batcher_of
from millstream.engine.native.drafts import LONGEST_MATCH, SHORTEST_MATCH, DraftHistory
from millstream.engine.native.graphs import Graphs, wide_size
from millstream.engine.native.paged import PagedRunner
from millstream.engine.native.pages import START
from millstream.engine.native.sampling import sample, uniforms
from millstream.engine.native.sequence import TokenSequence
from millstream.engine.native.slots import SlotRunner
from millstream.engine.native.speculation import MAX_ROWS, MAX_RUNNING, PROBE_EVERY, PROBE_STEPS, Speculator
from millstream.errors import ConfigError
from millstream.events import DraftsChecked
from millstream.events.sinks import MemorySink
from millstream.events.summary import summarise
from millstream.pipeline.schedule import PipelineConfig
from millstream.run.build import build_engine
from millstream.run.check import check_combinations
from millstream.run.config import ModelConfig, RunConfig, TinyConfig, scheduled_engine
from millstream.types import Completion, Finish, Request, RequestKey, Sampling
from support.decoding import alone, teacher_forced
from support.drafting import Oracle
from support.tiny import VOCABULARY, make, prompts, request
from support.tiny import plain as plain_model

PAGE_BYTES = 2 * 2 * 2 * 4 * 16 * 4
"""As in `test_paged`: of a page of four tokens."""


def paged(model: Any, speculator: Speculator | None = None, *, depth: int = 0, **options: Any) -> Batcher:
    num_slots, num_pages = options.pop("num_slots", 8), options.pop("num_pages", 400)
    runner = PagedRunner(model.eval(), num_slots, page=4, cache_gb=num_pages * PAGE_BYTES / 1e9)
    runner.depth = depth
    return Batcher(model, num_slots=num_slots, runner=runner, speculator=speculator, **options)


def repeating(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [(*(rng.randrange(3, VOCABULARY) for _ in range(4)),) * rng.randint(1, 5) for _ in range(count)]


SAMPLINGS = [
    Sampling(max_tokens=30, temperature=0),
    Sampling(max_tokens=30, temperature=0.7),
    Sampling(max_tokens=30, temperature=1.0),
    Sampling(max_tokens=30, temperature=1.0, top_k=5),
    Sampling(max_tokens=30, temperature=0.7, top_p=0.6),
    Sampling(max_tokens=30, temperature=1.0, top_k=20, top_p=0.5),
]


def completions(batcher: Batcher, asked: Sequence[Request]) -> dict[RequestKey, Completion]:
    for one in asked:
        batcher.add(one)
    done: dict[RequestKey, Completion] = {}
    while batcher.has_work:
        done.update(batcher.step())
    assert batcher.cache_used == 0, "every page has come back"
    return done


def assert_same(found: dict[RequestKey, Completion], expected: dict[RequestKey, Completion]) -> None:
    assert {key: one.tokens for key, one in found.items()} == {key: one.tokens for key, one in expected.items()}
    for key, one in found.items():
        assert one.logprobs == pytest.approx(expected[key].logprobs, abs=1e-4)
        assert (one.finish, one.versions) == (expected[key].finish, expected[key].versions)


def tokens_of(done: dict[RequestKey, Completion]) -> dict[RequestKey, tuple[int, ...]]:
    return {key: one.tokens for key, one in done.items()}


# ---- exact -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "mistral", "gpt_neox"])
def test_whatever_is_drafted_tokens_and_log_probabilities_are_those_of_plain_steps(name: str, depth: int) -> None:
    asked = [
        structs.replace(request(number, prompt), sampling=SAMPLINGS[number % len(SAMPLINGS)])
        for number, prompt in enumerate([*repeating(9), *prompts(9)])
    ]
    expected = completions(paged(make(name), num_pages=1600), asked)
    oracle = Oracle(tokens_of(expected))
    batcher = paged(make(name), oracle, depth=depth, num_pages=1600)
    assert_same(completions(batcher, asked), expected)
    assert 100 < batcher.num_accepted < batcher.num_drafted


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_that_repeats_itself_takes_fewer_steps_and_says_the_same(depth: int) -> None:
    """Greedy answers of a tiny model soon run in circles."""
    asked = [request(n, prompt, max_tokens=220, temperature=0) for n, prompt in enumerate(repeating(4))]
    steps: list[int] = []
    done: list[dict[RequestKey, Completion]] = []
    for speculator in (None, Speculator(7, now=itertools.count().__next__)):
        batcher = paged(make("llama"), speculator, depth=depth, num_slots=4)
        for one in asked:
            batcher.add(one)
        done.append({})
        steps.append(0)
        while batcher.has_work:
            done[-1].update(batcher.step())
            steps[-1] += 1
    assert_same(done[1], done[0])
    assert batcher.num_accepted > 400 and steps[1] < 0.6 * steps[0], (steps, batcher.num_accepted)


def test_the_sampled_distribution_is_that_of_the_model_also_where_a_draft_was_right() -> None:
    """Three tokens in a row after drafts of the likeliest ones: all of their 27 outcomes, against the model's own numbers."""
    model, prompt, count = make("llama"), prompts(1)[0], 1000
    model.get_output_embeddings().weight.data *= 8  # far from uniform: drafts are right about half of the time
    twin = plain_model(model)
    sampling = Sampling(max_tokens=3, temperature=0.7, top_k=3)

    @functools.cache
    def of(past: tuple[int, ...]) -> dict[int, float]:
        with torch.no_grad():
            values, tokens = twin(torch.tensor([[*prompt, *past]])).logits[0, -1].topk(3)
        return dict(zip(tokens.tolist(), torch.softmax(values.double() / 0.7, -1).tolist(), strict=True))

    class Likeliest(Oracle):
        def draft(self, decoding: Sequence[TokenSequence]) -> None:
            for one in decoding:
                past = tuple(one.tokens)
                while len(past) < 2:
                    past = (*past, max(of(past), key=of(past).__getitem__))
                one.draft = past[len(one.tokens) :]

    batcher = paged(model, Likeliest({}, share=1.0), num_slots=16)
    found = completions(batcher, [structs.replace(request(n, prompt), sampling=sampling, seed=n) for n in range(count)])
    assert 0.2 < batcher.num_accepted / batcher.num_drafted < 0.9
    outcomes = [one.tokens for one in found.values()]
    chi_square, cells = 0.0, 0
    for first, p in of(()).items():
        for second, q in of((first,)).items():
            for third, r in of((first, second)).items():
                expected = count * p * q * r
                chi_square += (outcomes.count((first, second, third)) - expected) ** 2 / expected
                cells += 1
    assert cells == 27 and chi_square < 26 + 4 * 52**0.5 + 8, "far above what chance gives"


# ---- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_ends_inside_a_draft_at_its_length_a_stop_token_or_a_stop_string(depth: int) -> None:
    asked = []
    for number, prompt in enumerate(prompts(24)):
        sampling = [
            Sampling(max_tokens=1 + number // 3),
            Sampling(max_tokens=40, stop=tuple(range(number, number + 12))),
            Sampling(max_tokens=40, stop_strings=("7", "1 2", "33")),
        ][number % 3]
        asked.append(structs.replace(request(number, prompt), sampling=sampling))

    def decode(tokens: Sequence[int]) -> str:
        return "".join(f" {token}" for token in tokens)

    expected = completions(paged(make("llama"), decode=decode), asked)
    free = [structs.replace(one, sampling=Sampling(max_tokens=60)) for one in asked]
    beyond = tokens_of(completions(paged(make("llama")), free))  # drafts that are right beyond the end
    batcher = paged(make("llama"), Oracle(beyond), depth=depth, decode=decode)
    assert_same(completions(batcher, asked), expected)
    assert {one.finish for one in expected.values()} == {Finish.STOP, Finish.LENGTH} and batcher.num_accepted > 50


def test_a_watched_request_reports_every_token_once_and_an_aborted_one_keeps_what_it_has() -> None:
    asked = [request(number, prompt, max_tokens=60) for number, prompt in enumerate(prompts(6))]
    expected = completions(paged(make("llama")), asked)
    batcher = paged(make("llama"), Oracle(tokens_of(expected)), num_slots=3)
    said: dict[RequestKey, list[int]] = {one.key: [] for one in asked}
    done: dict[RequestKey, Completion] = {}
    for one in asked:
        batcher.add(one, is_watched=True)
    for turn in itertools.count():
        if not batcher.has_work:
            break
        done.update(batcher.step())
        for key, sampled in batcher.take_unreported():
            said[key] += sampled.tokens
        if turn in (3, 5):
            done.update(batcher.abort(asked[turn - 3].key))
    for key, one in done.items():
        assert expected[key].tokens[: len(one.tokens)] == one.tokens
        assert one.tokens[: len(said[key])] == tuple(said[key]) and len(said[key]) > 5
    assert [done[asked[n].key].finish for n in (0, 2)] == [Finish.ABORT] * 2 and batcher.cache_used == 0


# ---- weights -----------------------------------------------------------------------------------------------------------


@functools.cache
def twin_of(seed: int) -> Any:
    return plain_model(make("llama", seed=seed))


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in make("llama", seed=seed).named_parameters()}


@torch.no_grad()
def sampled_after(twin: Any, one: Request, tokens: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """What the model samples after each token, given those before it, and the log-probabilities."""
    logits = twin(torch.tensor([[*one.tokens, *tokens]])).logits[0, len(one.tokens) - 1 : -1]
    numbers = uniforms([one.seed] * len(tokens), range(len(tokens)))
    return sample(logits, [one.sampling] * len(tokens), np.minimum(numbers, 1 - 2**-24))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_a_step_is_of_one_version_and_each_of_its_tokens_records_it(on_update: Any, depth: int) -> None:
    asked = [request(number, prompt, max_tokens=40) for number, prompt in enumerate(prompts(4))]
    truth = tokens_of(completions(paged(make("llama")), asked))
    batcher = paged(make("llama"), Oracle(truth, share=0.9), depth=depth, on_update=on_update)
    for one in asked:
        batcher.add(one)
    done: dict[RequestKey, Completion] = {}
    for version in (1, 2):
        for _ in range(4):
            done.update(batcher.step())
        done.update(batcher.settle())
        before = {one.request.key: len(one.tokens) for one in batcher._running}
        batcher.load(version, weights_of(version))
        done.update(batcher.step())
        done.update(batcher.settle())
        for running in batcher._running:
            assert set(running.versions[before[running.request.key] :]) == {version}
    while batcher.has_work:
        done.update(batcher.step())
    assert {version for one in done.values() for version in one.versions} == {0, 1, 2}
    for one in asked if on_update == "recompute" else []:
        for version in range(3):
            expected, logprobs = sampled_after(twin_of(version), one, done[one.key].tokens)
            for at, label in enumerate(done[one.key].versions):
                if label == version:
                    assert done[one.key].tokens[at] == expected[at]
                    assert done[one.key].logprobs[at] == pytest.approx(logprobs[at], abs=1e-4)


# ---- pages -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_with_a_full_cache_drafts_give_way_and_the_youngest_are_preempted_as_ever(depth: int) -> None:
    asked = [request(number, prompt, max_tokens=30) for number, prompt in enumerate(prompts(24))]
    expected = completions(paged(make("llama")), asked)
    batcher = paged(make("llama"), Oracle(tokens_of(expected)), num_pages=30, depth=depth)
    assert_same(completions(batcher, asked), expected)
    assert batcher.num_preempted > 0 and batcher.num_accepted > 0


def test_no_request_is_preempted_for_a_draft() -> None:
    """Two requests that fill the cache to its last page, and drafts that would need one page more than there is."""
    asked = [request(number, (5, 6, 7), max_tokens=17) for number in range(2)]
    expected = completions(paged(make("llama")), asked)
    batcher = paged(make("llama"), Oracle(tokens_of(expected), share=1.0), num_pages=11, num_slots=2)
    assert_same(completions(batcher, asked), expected)
    assert batcher.num_preempted == 0 and batcher.num_drafted > 0


def test_pages_are_found_by_tokens_that_were_sampled_and_never_by_those_of_a_draft() -> None:
    class Wrong(Oracle):
        def draft(self, decoding: Sequence[TokenSequence]) -> None:
            super().draft(decoding)
            for one in decoding:
                one.draft = (*one.draft[:2], *((token + 1) % VOCABULARY for token in one.draft[2:]))

    prompt = tuple(range(3, 20))
    one = request(0, prompt, max_tokens=40)
    truth = tokens_of(completions(paged(make("llama")), [one]))
    batcher = paged(make("llama"), Wrong(truth, share=1.0))
    answer = alone(batcher, one)
    assert answer.tokens == truth[one.key] and batcher.num_drafted > batcher.num_accepted > 0
    runner = batcher._runner
    assert isinstance(runner, PagedRunner)
    allocator, said = runner._allocator, (*prompt, *answer.tokens)
    names = {number: (before, tokens) for (before, tokens, _), number in allocator._names.values()}
    for number in names:
        past: tuple[int, ...] = ()
        while number != START:
            number, tokens = names[number]
            past = (*tokens, *past)
        assert said[: len(past)] == past
    follow = (*prompt, *answer.tokens, 9, 8, 7)
    before = runner.num_prefilled
    rest = alone(batcher, request(1, follow, max_tokens=5))
    assert runner.num_prefilled - before <= 4 + 4, "all full pages of the answer are found"
    expected = teacher_forced(twin_of(0), follow, rest.tokens)
    assert torch.allclose(torch.tensor(rest.logprobs), expected, atol=1e-4)


@settings(max_examples=6, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(["keep", "recompute"]), st.sampled_from([0, 1]))
def test_whatever_happens_completions_are_those_of_plain_steps(rng: random.Random, on_update: Any, depth: int) -> None:
    """Requests that join, are aborted and preempted, weights that change and waits, between steps with drafts and plain ones.
    An aborted request has the beginning of its answer. With loads each token is what its version samples; with `keep`, requests
    over which weights were loaded have a past of two versions, and only their ends are compared."""
    stem = tuple(rng.randrange(3, VOCABULARY) for _ in range(20))
    asked = [
        structs.replace(
            request(number, (*stem[: rng.randint(1, 20)], *(5,) * rng.randint(0, 6)), max_tokens=rng.randint(1, 24)),
            seed=rng.getrandbits(64),
        )
        for number in range(12)
    ]
    truth = completions(paged(make("llama")), asked)
    batcher = paged(
        make("llama"),
        Oracle(tokens_of(truth), rng.getrandbits(30), share=rng.choice([0.3, 0.7, 1.0])),
        depth=depth,
        num_slots=rng.randint(1, 6),
        num_pages=rng.choice([13, 18, 25, 200]),
        on_update=on_update,
        prefill_tokens=rng.choice([3, 7, 200]),
    )
    done, mixed = dict[RequestKey, Completion](), set[RequestKey]()

    def turn() -> None:
        done.update(batcher.step())
        match rng.choice(["continue"] * 5 + ["abort", "load", "settle"]):
            case "abort":
                done.update(batcher.abort(rng.choice(asked).key))
            case "load":
                mixed.update(one.request.key for one in batcher._running if on_update == "keep")
                batcher.load(batcher.version + 1, weights_of((batcher.version + 1) % 3))
            case "settle":
                done.update(batcher.settle())
        runner = batcher._runner
        assert isinstance(runner, PagedRunner)
        held = [page for sequence in batcher._running for page in sequence.pages]
        num_users = runner._allocator._num_users
        assert num_users[1:] == [held.count(page) for page in range(1, len(num_users))], "a page is lost, or used twice"

    for one in asked:
        batcher.add(one)
        for _ in range(rng.choice([0, 1, 4])):
            turn()
    for _ in range(1000):
        if batcher.has_work:
            done.update(batcher.step())
    assert done.keys() == truth.keys() and batcher.cache_used == 0
    for one in asked:
        found = done[one.key]
        assert len(found.tokens) == one.sampling.max_tokens or found.finish is Finish.ABORT
        assert list(found.versions) == sorted(found.versions)
        for version in set(found.versions) if one.key not in mixed else ():
            expected, logprobs = sampled_after(twin_of(version % 3), one, found.tokens)
            for at, label in enumerate(found.versions):
                if label == version:
                    assert found.tokens[at] == expected[at]
                    assert found.logprobs[at] == pytest.approx(logprobs[at], abs=2e-4)


# ---- drafts, and when they pay -----------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 60), st.integers(1, 9))
def test_a_draft_is_what_followed_the_latest_occurrence_of_the_longest_match(
    tokens: list[int], num_prompt: int, length: int
) -> None:
    history = DraftHistory(tokens[:num_prompt], 7)
    while history.read(tokens[num_prompt:], 5):
        pass
    expected: tuple[int, ...] = ()
    for match in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
        ends = [at for at in range(match, len(tokens)) if tokens[at - match : at] == tokens[-match:]]
        if ends and len(tokens) > match:
            loop = tokens[ends[-1] :]
            expected = tuple(loop[i % len(loop)] for i in range(length))
            break
    assert history.guess(length) == expected


def test_a_history_that_has_not_read_everything_drafts_nothing() -> None:
    history = DraftHistory([1, 2, 3] * 5, 7)
    assert history.read([], 10) == 10 and history.guess(4) == ()
    assert history.read([], 10) == 5 and history.guess(4) == (1, 2, 3, 1)


Play = Callable[[TokenSequence], int]


class Playing:
    """Steps of a speculator over requests whose tokens are known, with a clock that says what a step costs."""

    def __init__(self, tokens: Play, *, num: int = 2, drafting_s: float = 1.0) -> None:
        self.at = 0.0
        self.speculator = Speculator(7, now=lambda: self.at)
        self.tokens = tokens
        self.running = [TokenSequence(request(n, (3, 4, 5), max_tokens=100_000)) for n in range(num)]
        self.drafting_s = drafting_s
        self.num_tokens = 0
        self.kinds: list[bool] = []

    def step(self) -> None:
        is_drafting = self.speculator.begin_step(self.running)
        if is_drafting:
            self.speculator.draft(self.running)
        self.speculator.observe(self.running)
        for one in self.running:
            for drafted in (*one.draft, None):
                one.append(self.tokens(one), -1.0, 0)
                self.num_tokens += 1
                if one.tokens[-1] != drafted:
                    break
            one.draft = ()
        self.at += self.drafting_s if is_drafting else 1.0
        self.speculator.end_step(is_pure=True)
        self.kinds.append(is_drafting)

    def steps(self, num: int) -> float:
        """Tokens a second of each request."""
        at, before = self.at, self.num_tokens
        for _ in range(num):
            self.step()
        return (self.num_tokens - before) / len(self.running) / (self.at - at)


def looping(one: TokenSequence) -> int:
    return len(one.tokens) % 11


def test_requests_that_repeat_nothing_never_have_drafts() -> None:
    rng = random.Random(0)
    playing = Playing(lambda _: rng.randrange(30_000))
    playing.steps(3000)
    assert not any(playing.kinds)


def test_a_request_that_repeats_itself_has_drafts_and_only_that_one() -> None:
    rng = random.Random(0)
    playing = Playing(lambda one: rng.randrange(30_000) if one.request.key.group_id else looping(one))
    playing.steps(100)
    assert playing.kinds[-50:] == [True] * 50
    playing.speculator.draft(playing.running)
    assert len(playing.running[0].draft) == 7 and playing.running[1].draft == ()


def test_drafts_that_cost_more_than_they_give_are_made_rarely() -> None:
    """Every draft is right, and a step with one takes ten times as long: hardly any time is lost by trying again."""
    playing = Playing(looping, drafting_s=10.0)
    playing.steps(200)
    assert playing.steps(5000) > 0.97
    assert sum(playing.kinds[-5000:]) <= PROBE_STEPS * (1 + 5000 // PROBE_EVERY)
    playing.drafting_s = 1.1
    playing.steps(PROBE_EVERY + PROBE_STEPS)
    assert playing.steps(1000) > 6, "cheap again: all but the steps that measure plain ones have drafts"


def test_many_requests_have_no_drafts_and_none_has_with_a_bound_of_zero() -> None:
    playing = Playing(looping, num=MAX_RUNNING + 1)
    playing.steps(100)
    assert not any(playing.kinds) and playing.running[0].history is None
    playing.running.pop()
    playing.steps(200)
    assert playing.kinds[-1]
    playing.speculator.draft(playing.running)
    assert sum(1 + len(one.draft) for one in playing.running) <= MAX_ROWS
    off = Playing(looping)
    off.speculator = Speculator(0)
    off.steps(50)
    assert not any(off.kinds)


def test_long_histories_are_read_a_few_tokens_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "SEEN_PER_STEP", 10)
    playing = Playing(looping, num=1)
    playing.running = [TokenSequence(request(0, (7, 8, 9) * 30, max_tokens=1000))]
    playing.steps(8)
    assert not any(playing.kinds)
    playing.steps(40)
    assert playing.kinds[-1]


# ---- graphs ------------------------------------------------------------------------------------------------------------


def test_steps_with_drafts_have_graphs_of_their_own_in_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        graphs, "_is_obstacle", lambda *_: False
    )  # the plain twin of attention asks for the longest row
    sizes = []

    class Recording:
        def record(self, step: Any, *, is_urgent: bool) -> Any:
            outputs = step()
            sizes.append(len(outputs[0]))

            def again() -> None:
                for mine, new in zip(outputs, step(), strict=True):
                    mine.copy_(new)

            return again, outputs

    asked = [request(number, prompt, max_tokens=30) for number, prompt in enumerate(prompts(12))]
    expected = completions(paged(make("llama")), asked)
    batcher = paged(make("llama"), Oracle(tokens_of(expected)), num_slots=3)
    runner = batcher._runner
    assert isinstance(runner, PagedRunner)
    runner._wide_graphs = Graphs(Recording())
    assert_same(completions(batcher, asked), expected)
    assert sizes and set(sizes) <= {8, 16, 24, 32}
    assert all(num <= wide_size(num) <= MAX_ROWS for num in range(2, MAX_ROWS + 1))


# ---- the engine --------------------------------------------------------------------------------------------------------


def test_an_engine_says_how_many_tokens_it_drafted_and_how_many_were_right() -> None:
    async def run(value: Any) -> tuple[Completion, Any, MemorySink]:
        sink = MemorySink()
        config = EngineConfig(slots=4, cache="pages", cache_gb=2e-3, process=False, speculation=value)
        engine = build_engine(config, make("llama"), clock=RealClock(), sink=sink)
        done = await engine.generate(request(0, repeating(1)[0], max_tokens=200, temperature=0))
        stats = engine.stats()
        await engine.close()
        return done, stats, sink

    plain, none, _ = asyncio.run(run("off"))
    assert none.num_drafted == none.num_accepted == 0
    for value in ("auto", 3):
        done, stats, sink = asyncio.run(run(value))
        assert done.tokens == plain.tokens and done.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
        assert stats.num_drafted >= stats.num_accepted > 0
        assert sum(event.num_drafted for event in sink.of(DraftsChecked)) == stats.num_drafted
        summary = summarise(sink.events)
        assert (summary.tokens_drafted, summary.tokens_accepted) == (stats.num_drafted, stats.num_accepted)


def test_the_config_says_off_in_lockstep_and_refuses_what_would_not_be_read() -> None:
    model = make("llama").eval()
    assert isinstance(batcher_of(model, EngineConfig())._runner, SlotRunner)
    pages = EngineConfig(cache="pages", cache_gb=1e-3, slots=2)
    assert [structs.replace(pages, speculation=one).max_draft for one in ("auto", "off", 3)] == [7, 0, 3]
    with pytest.raises(ConfigError, match=r'speculation = 3, and on a CPU .* engine\.cache = "pages"'):
        build_engine(EngineConfig(speculation=3), model, clock=RealClock(), sink=MemorySink())
    for wrong in ({"speculation": 0}, {"speculation": 64}, {"speculation": 2, "cache": "slots"}):
        with pytest.raises(ValueError, match="speculation"):
            EngineConfig(**wrong)
    with pytest.raises(ValueError, match="speculation are of kind"):
        EngineConfig(kind="vllm", speculation="off")
    tiny = ModelConfig(tiny=TinyConfig())
    for max_lag, lockstep, draft in ((0, True, 0), (0, False, 7), (1, True, 7)):
        config = RunConfig(model=tiny, pipeline=PipelineConfig(max_lag=max_lag, lockstep=lockstep))
        assert scheduled_engine(config).max_draft == draft
    config = RunConfig(
        model=tiny, engine=EngineConfig(cache="pages", speculation=4), pipeline=PipelineConfig(max_lag=0)
    )
    with pytest.raises(ConfigError, match=r"engine\.speculation = 4 with pipeline\.max_lag = 0: .*lockstep = false"):
        check_combinations(config)
