"""The engine against transformers itself: the same tokens, the same log-probabilities, whatever joins, leaves or is swapped."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from millstream.clock import RealClock
from millstream.engine import EngineConfig
from millstream.engine.native.batching import Batcher
from millstream.engine.native.engine import TorchEngine
from millstream.engine.native.host import ProcessHost
from millstream.engine.native.paged import PagedRunner
from millstream.engine.native.process import DECODE_NICE
from millstream.engine.native.sampling import sample, uniforms
from millstream.engine.native.strings import ends_with_one
from millstream.engine.native.worker import Command, Load, WorkerReport
from millstream.errors import EngineError, ModelError, RequestRefused
from millstream.events import Span
from millstream.events.sinks import MemorySink
from millstream.model.load import FEW_CORES, num_cores
from millstream.run.build import build_engine
from millstream.seeds import derive_seed
from millstream.types import Completion, Finish, Request, RequestKey, Sampled, Sampling, Weights
from support.commands import run_command
from support.decoding import alone, drain, kept_by, teacher_forced
from support.tiny import CONFIGS, VOCABULARY, make, plain, prompts, request

MakeBatcher = Callable[..., Batcher]


@pytest.fixture(params=["slots", "pages", "pages, a step ahead"])
def batch(request: pytest.FixtureRequest) -> MakeBatcher:
    """A batcher over each kind of cache; pages of four tokens, so that everything has several."""

    def make_it(model: Any, *, num_slots: int, **options: Any) -> Batcher:
        if request.param == "slots":
            return Batcher(model, num_slots=num_slots, **options)
        runner = PagedRunner(model.eval(), num_slots, page=4)
        runner.depth = int(request.param != "pages")
        return Batcher(model, num_slots=num_slots, runner=runner, **options)

    return make_it


def greedy_requests(rng: random.Random) -> dict[int, Request]:
    return {n: request(n, p, max_tokens=rng.randint(4, 24), temperature=0) for n, p in enumerate(prompts(16))}


@functools.cache
def generated(name: str) -> list[tuple[int, ...]]:
    """What the library's own `generate` says to each of `greedy_requests(random.Random(0))`, greedily."""
    twin, options = plain(make(name)), {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = []
    for one in greedy_requests(random.Random(0)).values():
        mask = torch.ones(1, len(one.tokens), dtype=torch.long)
        length = one.sampling.max_tokens
        out = twin.generate(torch.tensor([one.tokens]), attention_mask=mask, max_new_tokens=length, **options)
        found.append(tuple(out[0, len(one.tokens) :].tolist()))
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_output_is_that_of_generate_with_joins_and_aborts_in_between(name: str, batch: MakeBatcher) -> None:
    batcher, rng = batch(make(name), num_slots=4, prefill_tokens=32), random.Random(0)
    asked = greedy_requests(rng)
    done: dict[int, Completion] = {}
    aborted: list[int] = []
    for number, one in asked.items():  # ragged prompts join while others are anywhere in their answer
        batcher.add(one)
        for _ in range(rng.randint(0, 3)):
            if batcher.has_work:
                done.update((key.group_id, completion) for key, completion in batcher.step())
        if number % 5 == 4:
            ((key, completion),) = batcher.abort(asked[number - 1].key) or [(one.key, None)]
            if completion is not None:
                done[key.group_id] = completion
                aborted.append(key.group_id)
    drain(batcher, done)
    assert aborted and done.keys() == asked.keys()
    expected = generated(name)
    for number, one in asked.items():
        tokens = done[number].tokens
        assert done[number].finish is (Finish.ABORT if number in aborted else Finish.LENGTH)
        if number not in aborted:
            assert len(tokens) == one.sampling.max_tokens
        assert expected[number][: len(tokens)] == tokens, f"request {number}"


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probabilities_are_those_of_a_teacher_forced_forward(name: str, batch: MakeBatcher) -> None:
    model = make(name)
    twin, batcher = plain(model), batch(model, num_slots=3)
    asked = prompts(8)
    for number, prompt in enumerate(asked):
        batcher.add(request(number, prompt, max_tokens=20))
    done: dict[int, Completion] = {}
    drain(batcher, done)
    for number, prompt in enumerate(asked):
        expected = teacher_forced(twin, prompt, done[number].tokens)
        assert torch.allclose(torch.tensor(done[number].logprobs), expected, atol=1e-4)


def test_after_a_swap_in_flight_every_token_has_the_log_probability_of_the_version_recorded_for_it(
    batch: MakeBatcher,
) -> None:
    """The cache of earlier tokens is kept: a token's reference is the new weights over the old keys and values, which a
    second batcher computes from scratch by swapping at the same token."""
    old, new = make("qwen3", seed=0), make("qwen3", seed=1)
    weights = {name: p.detach().clone() for name, p in new.named_parameters()}
    prompt = prompts(1)[0]
    batcher = batch(make("qwen3", seed=0), num_slots=2)
    batcher.add(request(0, prompt, max_tokens=10))
    batcher.add(request(1, prompts(2)[1], max_tokens=30))
    done: dict[int, Completion] = {}
    for _ in range(4):
        done.update((key.group_id, completion) for key, completion in batcher.step())
    batcher.load(7, weights)
    drain(batcher, done)
    completion = done[0]
    assert completion.versions == (0,) * 4 + (7,) * 6, (
        "of the weights that sampled it, also of a token still on its way"
    )
    before = teacher_forced(plain(old), prompt, completion.tokens)[:4]
    assert torch.allclose(torch.tensor(completion.logprobs[:4]), before, atol=1e-4)

    from transformers import DynamicCache

    cache = DynamicCache(config=old.config)
    with torch.no_grad():  # the old model fills the cache up to the swap, the new one goes on over it
        plain(old)(torch.tensor([[*prompt, *completion.tokens[:3]]]), past_key_values=cache)
        expected = []
        twin = plain(new)
        for at in range(4, 10):
            logits = twin(torch.tensor([[completion.tokens[at - 1]]]), past_key_values=cache).logits[0, -1]
            expected.append(float(torch.log_softmax(logits, -1)[completion.tokens[at]]))
    assert torch.allclose(torch.tensor(completion.logprobs[4:]), torch.tensor(expected), atol=1e-4)


def test_a_request_joined_after_a_swap_never_sees_a_cache_of_older_weights(batch: MakeBatcher) -> None:
    new = make("llama", seed=1)
    batcher, prompt = batch(make("llama", seed=0), num_slots=2), prompts(1)[0]
    done: dict[int, Completion] = {}
    batcher.add(request(0, prompt))
    drain(batcher, done)
    batcher.load(1, {name: p.detach().clone() for name, p in new.named_parameters()})
    batcher.add(request(1, prompt))
    drain(batcher, done)
    expected = teacher_forced(plain(new), prompt, done[1].tokens)
    assert torch.allclose(torch.tensor(done[1].logprobs), expected, atol=1e-4)


def test_a_requests_tokens_depend_on_its_seed_and_not_on_other_requests(batch: MakeBatcher) -> None:
    asked = prompts(12)
    alone: dict[int, Completion] = {}
    for number, prompt in enumerate(asked):
        batcher = batch(make("llama"), num_slots=1)
        batcher.add(request(number, prompt))
        drain(batcher, alone)
    together: dict[int, Completion] = {}
    batcher = batch(make("llama"), num_slots=12)
    for number, prompt in enumerate(asked):
        batcher.add(request(number, prompt))
    drain(batcher, together)
    assert {n: c.tokens for n, c in alone.items()} == {n: c.tokens for n, c in together.items()}


def test_the_members_of_a_group_share_one_prompt_computation_and_still_differ(batch: MakeBatcher) -> None:
    batcher, prompt = batch(make("llama"), num_slots=8), prompts(1)[0]
    for member in range(8):
        batcher.add(structs.replace(request(0, prompt), key=RequestKey(group_id=0, member=member), seed=member))
    done: dict[RequestKey, Completion] = {}
    while batcher.has_work:
        done.update(batcher.step())
    assert len({completion.tokens for completion in done.values()}) == 8
    twin = plain(make("llama"))
    for completion in done.values():
        expected = teacher_forced(twin, prompt, completion.tokens)
        assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4)


def test_a_stop_token_ends_a_request_and_is_its_last_token(batch: MakeBatcher) -> None:
    batcher = batch(make("llama"), num_slots=4)
    for number, prompt in enumerate(prompts(20)):
        one = request(number, prompt, max_tokens=100)
        batcher.add(structs.replace(one, sampling=Sampling(max_tokens=100, stop=tuple(range(20)))))
    done: dict[int, Completion] = {}
    drain(batcher, done)
    stopped = [completion for completion in done.values() if completion.finish is Finish.STOP]
    assert len(stopped) >= 15
    assert all(c.tokens[-1] < 20 and all(token >= 20 for token in c.tokens[:-1]) for c in stopped)


@pytest.mark.parametrize("top", [{}, {"top_k": 4}, {"top_p": 0.7}, {"top_k": 6, "top_p": 0.8}, {"top_p": 1e-6}])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampling_frequencies_fit_the_distribution_and_its_log_probabilities(
    temperature: float, top: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, sampling = torch.randn(1, 12, generator=generator), Sampling(max_tokens=1, temperature=temperature, **top)
    seeds = [derive_seed(7, number) for number in range(400)]
    numbers = uniforms([seed for seed in seeds for _ in range(50)], list(range(50)) * 400)
    tokens, logprobs = sample(logits.expand(20_000, -1), [sampling] * 20_000, numbers)
    probabilities = kept_by(logits[0], sampling)
    is_kept = probabilities > 0
    counts = torch.bincount(torch.tensor(tokens), minlength=12)
    assert not counts[~is_kept].any(), "what is cut off is never sampled"
    expected = 20_000 * probabilities[is_kept]
    chi_square = float(((counts[is_kept] - expected) ** 2 / expected).sum())
    assert chi_square < 31.3, "above the 99.9% quantile of chi-square with 11 degrees of freedom"
    assert torch.allclose(torch.tensor(logprobs).double(), probabilities.log()[torch.tensor(tokens)], atol=1e-5)


def test_an_interrupted_request_continues_elsewhere_as_if_nothing_had_happened(batch: MakeBatcher) -> None:
    model = make("llama")
    whole = alone(batch(model, num_slots=2), request(0, prompts(1)[0], max_tokens=20))
    for num_before in (1, 7, 19):
        before = request(0, (*prompts(1)[0], *whole.tokens[:num_before]), max_tokens=20 - num_before)
        rest = alone(batch(model, num_slots=2), structs.replace(before, num_sampled=num_before))
        assert rest.tokens == whole.tokens[num_before:]
        assert rest.logprobs == pytest.approx(whole.logprobs[num_before:], abs=1e-5)


def spell(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token % 26) for token in tokens)


def test_the_token_that_completes_a_stop_string_is_the_last(batch: MakeBatcher) -> None:
    model = make("llama")
    free = alone(batch(model, num_slots=2), request(0, prompts(1)[0], max_tokens=60))
    text = spell(free.tokens)
    for begin, length in ((3, 1), (10, 2), (31, 4)):
        string = text[begin : begin + length]
        one = request(0, prompts(1)[0], max_tokens=60)
        one = structs.replace(one, sampling=structs.replace(one.sampling, stop_strings=("no such", string)))
        stopped = alone(batch(model, num_slots=2, decode=spell), one)
        assert stopped.finish is Finish.STOP
        assert stopped.tokens == free.tokens[: text.find(string) + length]
        assert len(stopped.logprobs) == len(stopped.versions) == len(stopped.tokens)
    with pytest.raises(RequestRefused, match="tokenizer"):
        batch(model, num_slots=2).add(one)


def test_a_stop_string_is_found_where_a_character_is_several_tokens() -> None:
    def decode(tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")

    said = "müß → end".encode()
    found = [at for at in range(1, len(said) + 1) if ends_with_one(said[:at], ("ß →",), decode)]
    assert found == [said.index("→".encode()) + 3]
    assert ends_with_one(b"aa", ("aa",), decode) and not ends_with_one(b"aab", ("aa",), decode)


def test_the_random_numbers_are_those_of_the_published_generator_whatever_else_is_in_the_batch() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]  # seed 1234567
    assert uniforms([1234567] * 4, range(4)).tolist() == [(number >> 11) / 2**53 for number in published]
    assert uniforms([9, 1234567, 2**63 - 1], [5, 2, 40])[1] == (published[2] >> 11) / 2**53


def test_a_token_of_probability_zero_is_never_sampled() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]])
    tokens, _ = sample(logits.expand(3, -1), [Sampling(max_tokens=1)] * 3, [0.0, 0.5, 1 - 1e-16])
    assert tokens == [1, 3, 3]


def test_a_request_that_cannot_run_is_refused_with_what_to_set() -> None:
    batcher = Batcher(make("llama"), num_slots=1)
    with pytest.raises(RequestRefused, match=r"context of 256.*rollout\.max_tokens"):
        batcher.add(request(0, tuple([5] * 250), max_tokens=7))
    with pytest.raises(RequestRefused, match="empty"):
        batcher.add(request(0, ()))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"seed": -1}, "seed = -1"),
        ({"seed": 2**64}, "seed = 18446744073709551616"),
        ({"tokens": (5, VOCABULARY)}, f"token {VOCABULARY}.*less than {VOCABULARY}"),
        ({"tokens": (5, -1)}, "token -1"),
        ({"num_sampled": 2}, "num_sampled"),
        ({"sampling": Sampling(max_tokens=2, temperature=-1.0)}, "temperature = -1: expected 0"),
        ({"sampling": Sampling(max_tokens=2, temperature=1e-300)}, "temperature"),
        ({"sampling": Sampling(max_tokens=2, temperature=float("nan"))}, "temperature = nan"),
        ({"sampling": Sampling(max_tokens=2, top_k=2**63)}, "top_k"),
        ({"sampling": Sampling(max_tokens=2, top_p=float("nan"))}, "top_p"),
    ],
)
def test_a_request_that_would_break_others_is_refused_alone(
    changed: dict[str, Any], reason: str, batch: MakeBatcher
) -> None:
    batcher = batch(make("llama"), num_slots=2)
    batcher.add(request(0, (4, 5, 6)))
    with pytest.raises(RequestRefused, match=reason):
        batcher.add(structs.replace(request(1, (4, 5)), **changed))
    done: dict[int, Completion] = {}
    drain(batcher, done)
    assert len(done[0].tokens) == 16


def test_a_padded_vocabulary_counts_with_its_padding(batch: MakeBatcher) -> None:
    model = make("llama")
    model.resize_token_embeddings(VOCABULARY + 31)
    prompt = (4, VOCABULARY + 30)
    answer = alone(batch(model, num_slots=2), request(0, prompt))
    expected = teacher_forced(plain(model), prompt, answer.tokens)
    assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=1e-4)


def test_weights_of_another_shape_are_refused_before_any_is_taken(batch: MakeBatcher) -> None:
    batcher = batch(make("llama"), num_slots=2)
    weights = {name: value.detach().clone() for name, value in make("llama", seed=1).named_parameters()}
    with pytest.raises(EngineError, match=r"model\.norm\.weight is \(1,\), expected \(64,\)"):
        batcher.load(1, weights | {"model.norm.weight": torch.ones(1)})
    answer = alone(batcher, request(0, (4, 5, 6)))
    assert set(answer.versions) == {0}
    assert torch.allclose(
        torch.tensor(answer.logprobs), teacher_forced(plain(make("llama")), (4, 5, 6), answer.tokens), atol=1e-4
    )


def test_a_model_without_the_attention_interface_is_refused() -> None:
    from transformers import MambaConfig

    from millstream.model.load import new_model

    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises((ModelError, ValueError, TypeError)):
        batcher = Batcher(new_model(config, seed=0), num_slots=1)
        batcher.add(request(0, (4, 5)))
        batcher.step()


# ---- the engine as the pipeline sees it: on a thread, and in a process of its own ------------------------------------------


MakeEngine = Callable[..., TorchEngine]


@pytest.fixture(params=["thread", "process"])
def engine(request: pytest.FixtureRequest) -> MakeEngine:
    def make_engine(slots: int = 8, sink: MemorySink | None = None) -> TorchEngine:
        config = EngineConfig(slots=slots, process=request.param == "process")
        return build_engine(config, make("llama"), clock=RealClock(), sink=sink or MemorySink())

    return make_engine


def test_requests_queued_while_paused_join_in_the_order_they_were_started(engine: MakeEngine) -> None:
    async def program() -> list[tuple[float, ...]]:
        e = engine(slots=3)
        await e.pause()
        flights = [asyncio.ensure_future(e.generate(request(n, p))) for n, p in enumerate(prompts(9))]
        await asyncio.sleep(0)
        await e.resume()
        completions = await asyncio.gather(*flights)
        await e.close()
        return [completion.logprobs for completion in completions]

    assert asyncio.run(program()) == asyncio.run(program()), "bit for bit"


def test_a_key_that_is_used_again_right_after_a_cancellation_gets_its_own_answer(engine: MakeEngine) -> None:
    async def program() -> None:
        e = engine(slots=2)
        one = request(0, prompts(1)[0], max_tokens=30)
        expected = await e.generate(one)
        for _ in range(10):
            going = asyncio.create_task(e.generate(structs.replace(one, seed=5)))
            await asyncio.sleep(0.003)
            going.cancel()
            with pytest.raises(asyncio.CancelledError):
                await going
            assert await e.generate(one) == expected
        await e.close()

    asyncio.run(program())


def test_what_is_reported_of_a_key_that_is_used_again_has_no_gap(engine: MakeEngine) -> None:
    async def program() -> None:
        e = engine(slots=2)
        one = request(0, prompts(1)[0], max_tokens=30)
        for _ in range(20):
            going = asyncio.create_task(e.generate(structs.replace(one, seed=5), lambda sampled: None))
            await asyncio.sleep(0.003)
            going.cancel()
            told = list[int]()
            again = asyncio.create_task(e.generate(one, lambda sampled, told=told: told.extend(sampled.tokens)))  # type: ignore[misc]
            with pytest.raises(asyncio.CancelledError):
                await going
            assert (await again).tokens[: len(told)] == tuple(told)
        await e.close()

    asyncio.run(program())


def test_one_of_many_engines_reports_its_tokens_less_often_and_loses_none() -> None:
    async def program(replicas: int) -> tuple[list[Sampled], Completion]:
        config, told = EngineConfig(slots=2, process=False, replicas=replicas), list[Sampled]()
        e = build_engine(config, make("llama"), clock=RealClock(), sink=MemorySink())
        found = await e.generate(request(0, prompts(1)[0], max_tokens=30), told.append)
        await e.close()
        return told, found

    told_alone, expected = asyncio.run(program(1))
    told, found = asyncio.run(program(10_000))  # every 200 s
    assert len(told) <= 2 < len(told_alone) and found == expected


class SlowHost:
    """A worker that executes a command when the test says so."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def start(self, on_report: Callable[[WorkerReport], None]) -> None:
        self.on_report = on_report

    def offer(self, version: int, weights: Weights) -> str:
        self.said.append(dict(weights))
        return ""

    def send(self, command: Command) -> None:
        self.said.append(command)

    def execute(self, number: int) -> None:
        self.on_report(WorkerReport([], [(number, None)]))

    async def close(self) -> None:
        pass


def test_weights_are_not_offered_before_those_of_a_load_that_was_cancelled_are_taken() -> None:
    async def program() -> None:
        host = SlowHost()
        e = TorchEngine(host, slots=1, max_length=None, clock=RealClock(), sink=MemorySink())
        first = asyncio.create_task(e.load(1, {"a": 1}))
        while len(host.said) < 2:
            await asyncio.sleep(0.001)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(e.load(2, {"a": 2}))
        await asyncio.sleep(0.05)
        assert host.said == [{"a": 1}, Load(0, 1)], "the worker has not read what was offered first"
        host.execute(0)
        while len(host.said) < 4:
            await asyncio.sleep(0.001)
        assert e.version == 1 and host.said[2:] == [{"a": 2}, Load(1, 2)]
        host.execute(1)
        await second
        assert e.version == 2
        await e.close()

    asyncio.run(program())


def break_it(engine: TorchEngine) -> str:
    """A model that raises, or a process that is killed; what the error then says."""
    if isinstance(engine._host, ProcessHost):
        engine._host.remote.kill()
        return "engine broke: its process ended with exit code -9"
    engine._host._batcher._model.forward = None  # type: ignore[attr-defined]
    return "engine broke: TypeError"


def test_a_broken_engine_fails_every_request_that_waits_and_every_later_one(engine: MakeEngine) -> None:
    async def program() -> None:
        e = engine()
        expected = break_it(e)
        with pytest.raises(EngineError, match=expected):
            await asyncio.wait_for(e.generate(request(0, (4, 5), max_tokens=200)), 30)
        with pytest.raises(EngineError, match=expected):
            await e.generate(request(1, (4, 5)))
        with pytest.raises(EngineError, match=expected):
            await e.pause()

    asyncio.run(program())


def test_work_is_reported_as_spans(engine: MakeEngine) -> None:
    async def program() -> MemorySink:
        sink = MemorySink()
        e = engine(sink=sink)
        await e.generate(request(0, (4, 5, 6), max_tokens=50))
        await e.close()
        return sink

    spans = asyncio.run(program()).of(Span)
    assert sum(span.num_tokens for span in spans) == 50 and all(span.seconds > 0 for span in spans)
    counted = [(span.num_steps, span.num_context, span.num_prompt) for span in spans]
    assert [sum(of) for of in zip(*counted, strict=True)] == [50, sum(range(4, 53)), 3], (
        "the first comes with the prompt"
    )


def test_a_thread_and_a_process_give_the_same_bits() -> None:
    async def program(is_process: bool) -> list[Completion]:
        config = EngineConfig(slots=3, process=is_process)
        e = build_engine(config, make("gemma2"), clock=RealClock(), sink=MemorySink())
        await e.load(2, {name: p.detach().clone() for name, p in make("gemma2", seed=2).named_parameters()})
        await e.pause()
        flights = [asyncio.ensure_future(e.generate(request(n, p))) for n, p in enumerate(prompts(9))]
        await asyncio.sleep(0)
        await e.resume()
        completions = await asyncio.gather(*flights)
        await e.close()
        return completions

    assert asyncio.run(program(False)) == asyncio.run(program(True))


def test_the_decode_loop_of_a_process_gives_way_where_cores_are_few() -> None:
    async def program() -> int:
        e = build_engine(EngineConfig(process=True), make("llama"), clock=RealClock(), sink=MemorySink())
        await e.generate(request(0, (4, 5), max_tokens=2))
        assert isinstance(e._host, ProcessHost) and e._host.remote.process is not None
        found = os.getpriority(os.PRIO_PROCESS, e._host.remote.process.pid)
        await e.close()
        return found

    more = DECODE_NICE if num_cores() <= FEW_CORES else 0
    assert asyncio.run(program()) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + more)


def test_a_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from support.tiny import make
import asyncio
from millstream.clock import RealClock
from millstream.engine import EngineConfig
from millstream.events.sinks import MemorySink
from millstream.run.build import build_engine

async def started():
    return build_engine(EngineConfig(process=True), make("llama"), clock=RealClock(), sink=MemorySink())._host

host = asyncio.run(started())
host._is_launched.wait()
while host.remote.process is None: pass
print(host.remote.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    out = run_command([sys.executable, str(script)])
    child = Path(f"/proc/{int(out.stdout)}/stat")
    for _ in range(300):
        if not child.exists() or " Z " in child.read_text():
            return
        time.sleep(0.1)
    raise AssertionError("the engine's process outlived its parent")
