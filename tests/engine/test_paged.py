"""The cache in pages: who shares what, who gives way, and that nothing is lost, mixed up or left behind."""

from __future__ import annotations

import asyncio
import functools
import random
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch.utils._python_dispatch import _disable_current_modes
from transformers import Qwen3MoeConfig

from millstream.clock import RealClock
from millstream.engine import EngineConfig, OnUpdate
from millstream.engine.http.config import HttpConfig
from millstream.engine.native import fused
from millstream.engine.native.batching import Batcher
from millstream.engine.native.build import batcher_of, make_runner
from millstream.engine.native.graphs import Graphs, obstacle_in, size_for
from millstream.engine.native.paged import PagedRunner
from millstream.engine.native.pages import START, PageAllocator
from millstream.engine.native.plain import PLAIN
from millstream.engine.native.runner import Chunk
from millstream.engine.native.sequence import TokenSequence
from millstream.engine.native.slots import SlotRunner
from millstream.errors import ConfigError, EngineError, RequestRefused
from millstream.events.sinks import MemorySink
from millstream.model.adapters import add_adapters, copy_of, merged, trained_weights
from millstream.model.load import load_weights, new_model
from millstream.model.lora import LoraConfig
from millstream.run.build import build_engine
from millstream.types import Completion, Finish, Request, RequestKey
from support.decoding import alone, drain, teacher_forced
from support.tiny import CONFIGS, SHAPE, VOCABULARY, make, prompts, request
from support.tiny import plain as plain_model

PAGE_BYTES = 2 * 2 * 2 * 4 * 16 * 4
"""Of a page of four tokens of a tiny llama: layers, keys and values, heads, tokens, dimension, float32."""


def paged(
    model: Any, *, num_slots: int = 8, num_pages: int = 400, depth: int = 0, max_joined: int = 0, **options: Any
) -> Batcher:
    cache_gb = num_pages * PAGE_BYTES / 1e9
    runner = PagedRunner(model.eval(), num_slots, page=4, cache_gb=cache_gb, max_joined=max_joined)
    runner.depth = depth
    return Batcher(model, num_slots=num_slots, runner=runner, **options)


def runner_of(batcher: Batcher) -> PagedRunner:
    assert isinstance(batcher._runner, PagedRunner)
    return batcher._runner


# ---- pages -------------------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.randoms(use_true_random=False))
def test_a_page_has_one_owner_and_what_is_found_has_the_tokens_that_were_looked_for(rng: random.Random) -> None:
    pages = PageAllocator(rng.randint(2, 30), size=2)
    holds: dict[int, tuple[int, ...]] = {}
    """Page -> all tokens up to its end, as they were written."""
    held: list[tuple[list[int], tuple[int, ...]]] = []
    for _ in range(80):
        action = rng.random()
        if action < 0.55:
            sequence = tuple(rng.randint(0, 1) for _ in range(rng.randint(1, 12)))
            found, chain = pages.match(sequence)
            for place, page in enumerate(found):
                assert holds[page] == sequence[: 2 * (place + 1)], "a prefix of another sequence"
            assert len(found) * 2 < len(sequence), "the last token must be computed"
            taken = pages.take(-(-len(sequence) // 2) - len(found))
            if taken is None:
                pages.release(found)
                continue
            in_use = {page for used, _ in held for page in used}
            assert not in_use & set(taken) and not set(found) & set(taken) and 0 not in taken
            for place, page in enumerate([*found, *taken]):
                if place >= len(found) and 2 * (place + 1) <= len(sequence):
                    holds[page] = sequence[: 2 * (place + 1)]
                    chain = pages.name(page, chain, sequence[2 * place : 2 * place + 2])
                elif place >= len(found):
                    holds.pop(page, None)
            held.append(([*found, *taken], sequence))
        elif held and action < 0.95:
            used, _ = held.pop(rng.randrange(len(held)))
            pages.release(used)
        else:
            pages.forget()
            assert pages.match((0, 0, 0, 0)) == ([], START)
    for used, _ in held:
        pages.release(used)
    assert pages.num_free == pages.num_pages, "all come back"


# ---- what is computed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_prompts_that_are_rows_of_a_decode_step_give_what_a_pass_of_their_own_gives(name: str, depth: int) -> None:
    """Groups that share a prompt, prompts in chunks, preemption, a weight update and requests that continue, all in one."""
    asked = [
        structs.replace(
            request(number // 3, prompt, max_tokens=20, temperature=number % 2),
            key=RequestKey(group_id=number // 3, member=number % 3),
            seed=number,
        )
        for number, prompt in enumerate(prompt for prompt in prompts(8) for _ in range(3))
    ]
    other = trained_weights(new_model(CONFIGS[name](), seed=1))

    def run(max_joined: int) -> tuple[dict[RequestKey, Completion], list[bool]]:
        batcher = paged(make(name), num_slots=6, num_pages=60, depth=depth, max_joined=max_joined, prefill_tokens=12)
        runner = runner_of(batcher)
        can_join, joined = runner._can_join, list[bool]()

        def watched(decoding: Any, chunks: Any) -> bool:
            joined.append(can_join(decoding, chunks))
            return joined[-1]

        runner._can_join = watched  # type: ignore[method-assign]
        for one in asked:
            batcher.add(one)
        done: dict[RequestKey, Completion] = {}
        for step in range(10_000):
            if not batcher.has_work:
                break
            if step == 25:
                batcher.load(1, other)
            done.update(batcher.step())
        assert batcher.cache_used == 0
        return done, joined

    (expected, apart), (found, together) = run(0), run(64)
    assert not any(apart) and any(together)
    assert found.keys() == expected.keys() == {one.key for one in asked}
    for key, one in expected.items():
        assert found[key].tokens == one.tokens and found[key].versions == one.versions
        assert found[key].logprobs == pytest.approx(one.logprobs, abs=1e-4)


def test_a_prompt_that_would_read_too_much_as_rows_has_a_pass_of_its_own() -> None:
    batcher = paged(make("llama"), max_joined=64)
    runner = runner_of(batcher)
    sequence = TokenSequence(request(0, tuple(range(5, 45))))
    assert runner._can_join([], [Chunk(sequence, 0, 40)])
    assert not runner._can_join([], [Chunk(sequence, 0, 65)]), "more tokens than may join"
    assert not runner._can_join([], [Chunk(sequence, 3000, 3040)]), "each of them would read 3,000 others"


def test_the_members_of_a_group_compute_the_pages_of_their_prompt_once() -> None:
    batcher = paged(make("llama"))
    prompt = tuple(range(5, 34))
    for member in range(8):
        batcher.add(structs.replace(request(0, prompt), key=RequestKey(group_id=0, member=member), seed=member))
    done: dict[RequestKey, Completion] = {}
    while batcher.has_work:
        done.update(batcher.step())
    assert runner_of(batcher).num_prefilled == 29 + 7 * 1, "seven of them only the token behind the seven full pages"
    twin = plain_model(make("llama"))
    for one in done.values():
        assert torch.allclose(torch.tensor(one.logprobs), teacher_forced(twin, prompt, one.tokens), atol=1e-4)


def test_the_next_turn_of_a_conversation_computes_only_what_is_new_until_the_weights_change() -> None:
    model = make("qwen3")
    batcher, runner = paged(model), None
    runner = runner_of(batcher)
    prompt = tuple(range(3, 33))
    for turn in range(4):
        before = runner.num_prefilled
        answer = alone(batcher, request(turn, prompt, max_tokens=11))
        new = runner.num_prefilled - before
        assert new == 30 if turn == 0 else new <= 11 - 8 + 5 + 4, "what was sampled is found as well"
        expected = teacher_forced(plain_model(make("qwen3")), prompt, answer.tokens)
        assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=1e-4)
        prompt = (*prompt, *answer.tokens, 7, 8, 9, 10, 11)
    batcher.load(1, {name: value.detach().clone() for name, value in make("qwen3", seed=5).named_parameters()})
    before = runner.num_prefilled
    answer = alone(batcher, request(9, prompt, max_tokens=6))
    assert runner.num_prefilled - before == len(prompt)
    expected = teacher_forced(plain_model(make("qwen3", seed=5)), prompt, answer.tokens)
    assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=1e-4)


def test_keys_and_values_of_two_versions_are_never_found_by_others() -> None:
    batcher = paged(make("llama"))
    prompt = tuple(range(3, 20))
    batcher.add(request(0, prompt, max_tokens=30))
    for _ in range(5):
        batcher.step()
    other = make("llama", seed=1)
    batcher.load(1, {name: value.detach().clone() for name, value in other.named_parameters()})
    done: dict[int, Completion] = {}
    drain(batcher, done)
    follow = (*prompt, *done[0].tokens)
    before = runner_of(batcher).num_prefilled
    answer = alone(batcher, request(1, follow, max_tokens=5))
    assert runner_of(batcher).num_prefilled - before == len(follow)
    expected = teacher_forced(plain_model(other), follow, answer.tokens)
    assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=1e-4)


def turn_of(number: int, turn: int, tokens: tuple[int, ...]) -> Request:
    return structs.replace(request(number, tokens, max_tokens=9), key=RequestKey(group_id=number, member=0, turn=turn))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("on_update", ["keep", "recompute"])
@pytest.mark.parametrize("is_in_flight", [False, True])
def test_a_conversation_keeps_its_pages_over_an_update_and_shares_them_with_no_other(
    on_update: OnUpdate, is_in_flight: bool, depth: int
) -> None:
    """The weights that are loaded are the old ones: so kept keys and values must give the log-probabilities of any others."""
    model = make("llama")
    batcher, twin = paged(model, on_update=on_update, depth=depth), plain_model(make("llama"))
    prefilled = functools.partial(getattr, runner_of(batcher), "num_prefilled")
    prompt = tuple(range(3, 33))
    batcher.add(turn_of(0, 0, prompt))
    done: dict[int, Completion] = {}
    for _ in range(4 if is_in_flight else 0):
        batcher.step()
    if not is_in_flight:
        drain(batcher, done)
    batcher.load(1, {name: value.detach().clone() for name, value in model.named_parameters()})
    drain(batcher, done)
    follow, before = (*prompt, *done[0].tokens, 7, 8, 9), prefilled()
    answer = alone(batcher, turn_of(0, 1, follow))
    is_kept = on_update == "keep" or is_in_flight
    assert prefilled() - before == (4 if is_kept else len(follow)), "the last sampled token, and what is new"
    for tokens, said in ((prompt, done[0].tokens), (follow, answer.tokens)):
        assert torch.allclose(
            torch.tensor((done[0] if tokens is prompt else answer).logprobs),
            teacher_forced(twin, tokens, said),
            atol=1e-4,
        )
    before = prefilled()
    alone(batcher, turn_of(1, 1, follow))  # another conversation with the same tokens
    alone(batcher, turn_of(0, 0, follow[:-1]))  # the same key, from the beginning
    is_pure = on_update == "recompute"
    assert prefilled() - before == (2 if is_pure else len(follow)) + 1, "only full pages of one version are shared"
    assert batcher.cache_used == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_long_prompt_is_computed_in_chunks_while_others_decode(depth: int) -> None:
    batcher = paged(make("gemma2"), depth=depth, prefill_tokens=7)
    asked = [tuple(range(3, 13)), tuple(5 + n % 80 for n in range(90)), tuple(range(20, 60))]
    for number, prompt in enumerate(asked):
        batcher.add(request(number, prompt, max_tokens=40))
    batcher.step()
    batcher.step()
    num_before = batcher.tokens_generated
    batcher.step()
    assert batcher.tokens_generated > num_before, "the first one goes on while the second is being read"
    done: dict[int, Completion] = {}
    drain(batcher, done)
    twin = plain_model(make("gemma2"))
    for number, prompt in enumerate(asked):
        expected = teacher_forced(twin, prompt, done[number].tokens)
        assert torch.allclose(torch.tensor(done[number].logprobs), expected, atol=1e-4)


def test_where_prompts_cost_a_pass_of_their_own_requests_join_together_and_at_once_when_much_is_free() -> None:
    batcher = paged(make("llama"), num_slots=32)
    runner_of(batcher).join_every = 8
    for number, prompt in enumerate(prompts(31)):
        batcher.add(request(number, prompt, max_tokens=200))
    batcher.step()
    assert batcher.running == 31
    waited = []
    for number in range(31, 34):
        batcher.add(request(number, (5, 6), max_tokens=1))
        while batcher.waiting:
            batcher.step()
            waited.append(batcher.waiting)
    assert waited == ([1] * 7 + [0]) * 3, "one slot of 32 is free: not much"
    for number in range(4):
        batcher.abort(RequestKey(group_id=number, member=0))
    batcher.add(request(40, (5, 6), max_tokens=1))
    batcher.step()
    assert not batcher.waiting, "an eighth of the slots is free"


# ---- room --------------------------------------------------------------------------------------------------------------


@functools.cache
def with_room() -> dict[Request, Completion]:
    """Requests, and what each is answered alone in a cache with room for it."""
    whole = paged(make("llama"))
    asked = [request(number, prompt, max_tokens=30) for number, prompt in enumerate(prompts(24))]
    return {one: alone(whole, one) for one in asked}


@pytest.mark.parametrize("depth", [0, 1])
def test_when_the_cache_is_full_the_youngest_give_way_and_nobody_notices(depth: int) -> None:
    expected = {one.key.group_id: completion for one, completion in with_room().items()}
    batcher = paged(make("llama"), num_pages=30, depth=depth)
    for one in with_room():
        batcher.add(one)
    done: dict[int, Completion] = {}
    drain(batcher, done)
    assert batcher.num_preempted > 0
    assert {n: one.tokens for n, one in done.items()} == {n: one.tokens for n, one in expected.items()}
    for number, one in done.items():
        assert one.logprobs == pytest.approx(expected[number].logprobs, abs=1e-4)
    assert batcher.cache_used == 0, "every page has come back"


def test_a_cache_that_is_too_small_for_its_slots_makes_fewer_requests_run_and_no_storm_of_preemptions() -> None:
    asked = [request(number, prompt, max_tokens=60) for number, prompt in enumerate(prompts(96))]
    batcher = paged(make("llama"), num_slots=32, num_pages=100)
    for one in asked:
        batcher.add(one)
    done: dict[int, Completion] = {}
    drain(batcher, done)
    assert len(done) == len(asked)
    assert 0 < batcher.num_preempted < len(asked), "no request gives way more than once, on average"
    for one in asked[:40]:
        batcher.add(structs.replace(one, sampling=structs.replace(one.sampling, max_tokens=2)))
    drain(batcher, {})
    assert batcher._max_running == 32, "short requests need little of the cache: all slots are used again"


def test_a_request_that_could_never_fit_is_refused_and_a_cache_without_a_page_as_well() -> None:
    batcher = paged(make("llama"), num_pages=11)
    with pytest.raises(RequestRefused, match=r"40 tokens that fit into the cache: set engine\.cache_gb higher"):
        batcher.add(request(0, tuple([5] * 20), max_tokens=21))
    assert len(alone(batcher, request(0, tuple([5] * 20), max_tokens=20)).tokens) == 20
    with pytest.raises(EngineError, match=r"engine\.cache_gb"):
        paged(make("llama"), num_pages=1)


@pytest.mark.parametrize("is_process", [False, True])
def test_an_engine_says_no_to_one_request_that_does_not_fit_and_goes_on_with_others(is_process: bool) -> None:
    async def run() -> None:
        config = EngineConfig(slots=4, cache="pages", cache_gb=8.7e-5, process=is_process)
        engine = build_engine(config, make("llama"), clock=RealClock(), sink=MemorySink())
        going = asyncio.create_task(engine.generate(request(0, (5, 6, 7), max_tokens=60)))
        with pytest.raises(RequestRefused, match="200"):
            await engine.generate(request(1, (5, 6, 7), max_tokens=200))
        assert len((await going).tokens) == 60
        assert engine.stats().num_preempted == 0
        await engine.close()

    asyncio.run(run())


def test_pages_or_slots_and_their_size_are_chosen_by_the_config() -> None:
    model = make("llama").eval()
    assert isinstance(make_runner(model, EngineConfig()), SlotRunner)
    small, large = (make_runner(model, EngineConfig(cache="pages", slots=4, cache_gb=gb)) for gb in (2e-4, 1e-2))
    assert isinstance(small, PagedRunner) and isinstance(large, PagedRunner)
    assert small._allocator.num_pages < large._allocator.num_pages
    with pytest.raises(ConfigError, match=r'cache_gb = 1, and on a CPU .* engine\.cache = "pages"'):
        build_engine(EngineConfig(cache_gb=1.0), model, clock=RealClock(), sink=MemorySink())
    for wrong in ({"cache": "slots", "cache_gb": 1.0}, {"cache_gb": float("nan")}, {"cache_gb": float("inf")}):
        with pytest.raises(ValueError, match="cache_gb"):
            EngineConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="answer_s"):
        EngineConfig(answer_s=float("nan"))
    servers = HttpConfig(urls=("http://127.0.0.1:1",), flavour="openai", weights="none")
    assert EngineConfig(kind="http", http=servers).num_slots == 128
    for unread in ({"prefill_tokens": 7}, {"process": False}):
        with pytest.raises(ValueError, match="leave them out"):
            EngineConfig(kind="http", http=servers, **unread)  # type: ignore[arg-type]


# ---- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["slots", "pages", "pages, a step ahead"])
def test_with_recompute_every_token_has_the_numbers_of_its_version_over_its_whole_past(kind: str) -> None:
    model = make("qwen3")
    batcher = (
        Batcher(model, num_slots=4, on_update="recompute")
        if kind == "slots"
        else paged(model, num_slots=4, depth=int(kind != "pages"), on_update="recompute")
    )
    asked = prompts(6)
    for number, prompt in enumerate(asked):
        batcher.add(request(number, prompt, max_tokens=20))
    done: dict[int, Completion] = {}
    twins = [plain_model(make("qwen3", seed=seed)) for seed in range(3)]
    for version in (1, 2):
        for _ in range(6):
            done.update((key.group_id, one) for key, one in batcher.step())
        weights = {name: value.detach().clone() for name, value in make("qwen3", seed=version).named_parameters()}
        batcher.load(version, weights)
    drain(batcher, done)
    for number, prompt in enumerate(asked):
        one = done[number]
        assert len(one.tokens) == 20 and list(one.versions) == sorted(one.versions)
        for version, twin in enumerate(twins):
            chosen = [at for at, label in enumerate(one.versions) if label == version]
            expected = teacher_forced(twin, prompt, one.tokens)[chosen]
            assert torch.allclose(torch.tensor(one.logprobs)[chosen], expected, atol=1e-4)
    assert {version for one in done.values() for version in one.versions} == {0, 1, 2}


# ---- fused layers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_known_architectures_take_joined_steps_and_others_stay_as_they_are_and_the_path_says_so(name: str) -> None:
    model = make(name)
    path = batcher_of(model, EngineConfig(slots=8, cache="pages", cache_gb=4000 * PAGE_BYTES / 1e9)).path
    joined = [module for module in model.modules() if "forward" in module.__dict__]
    assert bool(joined) == (name != "gpt_neox")
    if name == "gpt_neox":
        assert path.name == "pages, the library's layers" and path.why.startswith("GPTNeoXForCausalLM is none of Llama")
    else:
        assert (path.name, path.why) == ("pages, fused layers", "")
    if joined:
        assert len(joined) >= 2 * 4, "attention, gate and two norms of every layer"


def test_fused_layers_that_give_other_numbers_are_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # another test may have found that they are right
    right = PLAIN.rms_norm
    monkeypatch.setattr(PLAIN, "rms_norm", lambda *args, **options: right(*args, **options) * 1.5)
    model = make("llama")
    batcher = batcher_of(model, EngineConfig(slots=8, cache="pages", cache_gb=400 * PAGE_BYTES / 1e9))
    assert batcher.path.name == "pages, the library's layers"
    assert "LlamaForCausalLM gives other numbers in the engine (pages, fused)" in batcher.path.why
    assert not [module for module in model.modules() if "forward" in module.__dict__]
    answer = alone(batcher, request(0, prompts(1)[0]))
    expected = teacher_forced(plain_model(make("llama")), prompts(1)[0], answer.tokens)
    assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=1e-4)


def test_new_weights_reach_fused_ones_through_the_names_of_the_library() -> None:
    model = make("qwen2")
    names = {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert fused.fuse(model).num > 0
    assert {name: tuple(value.shape) for name, value in model.named_parameters()} == names
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.k_proj.weight.fill_(3.0)
    assert attention.k_proj.weight.data_ptr() != attention.q_proj.weight.data_ptr()
    assert attention.k_proj.weight._base is attention.q_proj.weight._base


def other_weights(name: str = "llama", seed: int = 1) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in make(name, seed=seed).named_parameters()}


@pytest.mark.parametrize("kind", ["slots", "pages"])
def test_a_copy_of_a_joined_model_is_a_model_of_its_own(kind: str) -> None:
    model = make("llama")
    first = paged(model)
    copied = copy_of(model)
    second = paged(copied) if kind == "pages" else Batcher(copied, num_slots=2)
    second.load(1, other_weights())
    for batcher, seed in ((first, 0), (second, 1)):
        answer = alone(batcher, request(0, (5, 6, 7, 8)))
        expected = teacher_forced(plain_model(make("llama", seed=seed)), (5, 6, 7, 8), answer.tokens)
        assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=1e-4)


def test_a_model_that_had_joined_steps_runs_in_slots_as_well() -> None:
    model = make("llama")
    paged(model)
    answer = alone(Batcher(model, num_slots=2), request(0, (5, 6, 7, 8)))
    expected = teacher_forced(plain_model(make("llama")), (5, 6, 7, 8), answer.tokens)
    assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=1e-4)


def test_a_forward_pass_that_is_somebody_elses_stays() -> None:
    model = make("gpt_neox")
    head = model.get_output_embeddings()
    head.forward = lambda hidden: torch.nn.functional.linear(hidden, head.weight) * 0.5
    answer = alone(paged(model, num_pages=4000), request(0, (5, 6, 7, 8), temperature=0))
    with torch.no_grad():
        logits = plain_model(make("gpt_neox"))(torch.tensor([(5, 6, 7, 8)])).logits[0, -1] * 0.5
    assert answer.logprobs[0] == pytest.approx(float(torch.log_softmax(logits, -1).max()), abs=1e-4)


def test_new_weights_reach_both_layers_that_have_one_in_common() -> None:
    models = [make("llama", seed=seed) for seed in (0, 1)]
    for model in models:
        first, second = model.model.layers
        second.mlp.gate_proj.weight = first.mlp.gate_proj.weight
        second.self_attn.k_proj.weight = first.self_attn.k_proj.weight
    batcher = paged(models[0])
    batcher.load(1, dict(models[1].named_parameters()))
    answer = alone(batcher, request(0, (5, 6, 7, 8)))
    expected = teacher_forced(plain_model(models[1]), (5, 6, 7, 8), answer.tokens)
    assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=1e-4)


def test_what_adapters_stand_on_stays_shared_with_the_learner_and_they_alone_are_loaded() -> None:
    model = make("qwen3")
    add_adapters(model, LoraConfig(rank=2, alpha=4.0, targets=("q_proj", "v_proj")), seed=0)
    batcher, beside = paged(copy_of(model)), paged(copy_of(model))
    for one in (batcher, beside):
        for name, value in one._model.named_parameters():
            assert (value.data_ptr() == model.get_parameter(name).data_ptr()) == (not value.requires_grad)
    torch.manual_seed(0)
    weights = {name: torch.randn_like(value) * 0.1 for name, value in trained_weights(model).items()}
    batcher.load(1, weights)
    load_weights(model, weights)
    for engine, twin in ((batcher, plain_model(merged(model))), (beside, plain_model(make("qwen3")))):
        answer = alone(engine, request(0, (5, 6, 7, 8)))
        expected = teacher_forced(twin, (5, 6, 7, 8), answer.tokens)
        assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=1e-4)


def test_sizes_of_graphs_have_room_and_waste_little() -> None:
    for most in (1, 100, 512):
        for num in range(1, most + 1):
            assert num <= size_for(num, most) <= max(1, min(most, num + max(7, num // 7)))
    assert len({size_for(num, 512) for num in range(1, 513)}) < 40


# ---- graphs, and what is done without them -----------------------------------------------------------------------------


class PlayBack:
    """A recorder without a GPU: a graph is the step itself, whose outputs stay where they were."""

    def __init__(self, *, error: str | None = None) -> None:
        self.error, self.num_recorded = error, 0

    def record(self, step: Any, *, is_urgent: bool) -> Any:
        self.num_recorded += 1
        if self.error is not None:
            raise RuntimeError(self.error)
        outputs = step()

        def again() -> None:
            for mine, new in zip(outputs, step(), strict=True):
                mine.copy_(new)

        return again, outputs


def with_graphs(model: Any, recorder: PlayBack, monkeypatch: pytest.MonkeyPatch) -> Batcher:
    """The plain twin of attention asks for the longest row, which the kernel does not: that is not seen."""
    batcher = paged(model, num_pages=1600)
    runner, right = runner_of(batcher), PLAIN.decode_attention
    runner._graphs = Graphs(recorder)

    def without_asking(query: Any, pages: Any, rule: Any) -> Any:
        with _disable_current_modes():
            return right(query, pages, rule)

    monkeypatch.setattr(PLAIN, "decode_attention", without_asking)
    return batcher


def test_graphs_that_are_made_at_the_start_are_all_that_steps_need(monkeypatch: pytest.MonkeyPatch) -> None:
    model, recorder = make("llama"), PlayBack()
    twin, batcher = plain_model(model), with_graphs(model, recorder, monkeypatch)
    runner = runner_of(batcher)
    runner._wide_graphs = Graphs(recorder)
    runner.make_graphs()
    num_made, done = recorder.num_recorded, dict[int, Completion]()
    asked = prompts(9)
    for number, prompt in enumerate(asked):
        batcher.add(request(number, prompt))
    drain(batcher, done)
    assert recorder.num_recorded == num_made > 0
    for number, prompt in enumerate(asked):
        expected = teacher_forced(twin, prompt, done[number].tokens)
        assert torch.allclose(torch.tensor(done[number].logprobs), expected, atol=1e-4)


def mixture(implementation: str) -> Any:
    model = new_model(
        Qwen3MoeConfig(**SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32), seed=0
    )
    model.set_experts_implementation(implementation)
    return model


@pytest.mark.parametrize(
    ("name", "is_captured", "error"),
    [
        *((name, True, None) for name in CONFIGS),
        ("llama", False, "operation not permitted when stream is capturing"),
        ("batched_mm", True, None),
        ("eager", False, None),
    ],
)
def test_a_step_that_no_graph_can_hold_is_launched_kernel_by_kernel_and_the_path_says_why(
    name: str, is_captured: bool, error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(name) if name in CONFIGS else mixture(name)
    twin, recorder = plain_model(model), PlayBack(error=error)
    batcher = with_graphs(model, recorder, monkeypatch)
    asked = prompts(9)
    for number, prompt in enumerate(asked):
        one = request(number, prompt, max_tokens=4 + 2 * number)
        batcher.add(structs.replace(one, sampling=structs.replace(one.sampling, top_k=number % 2 * VOCABULARY)))
    done: dict[int, Completion] = {}
    drain(batcher, done)
    for number, prompt in enumerate(asked):
        expected = teacher_forced(twin, prompt, done[number].tokens)
        assert torch.allclose(torch.tensor(done[number].logprobs), expected, atol=1e-4)
    path = runner_of(batcher).path
    if is_captured:
        assert path.name.endswith("decode steps as CUDA graphs") and "graph" not in path.why
        assert recorder.num_recorded >= 3, "a graph for every size, and for those with top_k"
    else:
        assert path.name.endswith("decode steps kernel by kernel")
        assert "no graph can be made" in path.why and (error or "aten") in path.why
        assert recorder.num_recorded == int(error is not None), "what cannot be recorded is not tried, or once"


def test_what_the_host_must_see_is_an_obstacle_and_nothing_else() -> None:
    x = torch.arange(6.0).view(2, 3)
    for step, found in [
        (lambda: x[torch.tensor([1, 0])] @ x.T, None),
        (lambda: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]), None),
        (lambda: x[x > 2], "index"),
        (lambda: x.nonzero(), "nonzero"),
        (lambda: torch.where(x > 2), "nonzero"),
        (lambda: x.max().item(), "_local_scalar_dense"),
        (lambda: 1 if x.sum() > 2 else 0, "_local_scalar_dense"),
        (lambda: torch.nn.functional.one_hot(x.long()), "_local_scalar_dense"),
        (lambda: x.repeat_interleave(torch.tensor([1, 2]), 0), "repeat_interleave"),
        (lambda: x.to("meta"), "_to_copy"),
    ]:
        seen = obstacle_in(step)
        assert (seen is None) if found is None else found in (seen or ""), (found, seen)


# ---- everything at once ------------------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(["keep", "recompute"]), st.sampled_from([0, 1]))
def test_whatever_happens_everybody_is_answered_once_and_every_page_comes_back(
    rng: random.Random, on_update: Any, depth: int
) -> None:
    batcher = paged(make("llama"), num_slots=5, num_pages=40, depth=depth, on_update=on_update, prefill_tokens=16)
    weights = {name: value.detach().clone() for name, value in make("llama", seed=1).named_parameters()}
    asked: dict[RequestKey, int] = {}
    done: dict[RequestKey, Completion] = {}

    def hear(finished: Any) -> None:
        for key, one in finished:
            assert key not in done, "answered twice"
            done[key] = one

    stems = [tuple(rng.randrange(3, VOCABULARY) for _ in range(30)) for _ in range(3)]
    for number in range(30):
        prompt = (*rng.choice(stems)[: rng.randint(1, 30)], *(5,) * rng.randint(0, 9))
        one = structs.replace(request(number, prompt, max_tokens=rng.randint(1, 20)))
        asked[one.key] = one.sampling.max_tokens
        batcher.add(one)
        for _ in range(rng.randint(0, 6)):
            if batcher.has_work:
                hear(batcher.step())
        if rng.random() < 0.2:
            hear(batcher.abort(rng.choice(list(asked))))
        if rng.random() < 0.1:
            batcher.load(batcher.version + 1, weights)
        if rng.random() < 0.1:
            hear(batcher.settle())
    while batcher.has_work:
        hear(batcher.step())
    assert done.keys() == asked.keys() and batcher.cache_used == 0
    assert all(len(one.tokens) == asked[key] or one.finish is Finish.ABORT for key, one in done.items())
    assert all(list(one.versions) == sorted(one.versions) for one in done.values())


TWINS = 3
"""Models that are loaded in turn: version n is that of seed n % TWINS."""


@settings(max_examples=8, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(["keep", "recompute"]), st.sampled_from([0, 1]))
def test_whatever_happens_every_token_has_the_numbers_of_its_version(
    rng: random.Random, on_update: Any, depth: int
) -> None:
    """Prompts that begin alike, in chunks of a few tokens, through a cache that is nearly full, with aborts, swaps and waits
    between any two steps. With `keep`, requests over which weights were swapped have a past of two versions, and are left out."""
    batcher = paged(
        make("llama"),
        num_slots=rng.randint(1, 6),
        num_pages=rng.choice([15, 18, 25, 200]),
        depth=depth,
        on_update=on_update,
        prefill_tokens=rng.choice([1, 3, 7, 16, 200]),
    )
    runner_of(batcher).join_every = rng.choice([1, 3])
    asked, done, mixed = dict[RequestKey, Any](), dict[RequestKey, Completion](), set[RequestKey]()

    def turn() -> None:
        done.update(batcher.step())
        match rng.choice(["go on", "go on", "go on", "abort", "load", "settle"]):
            case "abort":
                done.update(batcher.abort(rng.choice(list(asked))))
            case "load":
                if on_update == "keep":
                    mixed.update(flight.request.key for flight in batcher._running)
                version = batcher.version + 1
                batcher.load(version, other_weights(seed=version % TWINS))
            case "settle":
                done.update(batcher.settle())
        held = [page for sequence in batcher._running for page in sequence.pages]
        assert runner_of(batcher)._allocator._num_users[1:] == [held.count(page) for page in range(1, 1 + num_pages)]

    num_pages = runner_of(batcher)._allocator.num_pages
    stem = tuple(rng.randrange(3, VOCABULARY) for _ in range(30))
    for number in range(14):
        prompt = (*stem[: rng.choice([30, 30, rng.randint(1, 30)])], *(5,) * rng.choice([0, rng.randint(0, 9)]))
        one = request(number, prompt, max_tokens=rng.randint(1, 14))
        stop = tuple(range(rng.choice([0, 20])))
        asked[one.key] = structs.replace(one, sampling=structs.replace(one.sampling, stop=stop))
        batcher.add(asked[one.key])
        for _ in range(rng.choice([0, 1, 3])):
            turn()
    for _ in range(2000):
        if batcher.has_work:
            done.update(batcher.step())
    assert done.keys() == asked.keys() and batcher.cache_used == 0, "nobody waits for ever"
    for key, one in done.items():
        for version in set(one.versions) if key not in mixed else ():
            chosen = [at for at, label in enumerate(one.versions) if label == version]
            expected = teacher_forced(twin_of(version % TWINS), asked[key].tokens, one.tokens)[chosen]
            assert torch.allclose(torch.tensor(one.logprobs)[chosen], expected, atol=2e-4)


@functools.cache
def twin_of(seed: int) -> Any:
    return plain_model(make("llama", seed=seed))


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["pages", "slots"])
def test_twenty_thousand_requests_with_aborts_and_swaps_leave_nothing_behind(cache: Any) -> None:
    """Every one is answered exactly once, no page is left, and memory does not grow with the number of requests."""

    async def run() -> None:
        rng, model = random.Random(0), make("llama")
        options = {"cache_gb": 300 * 8 * PAGE_BYTES / 1e9} if cache == "pages" else {}
        config = EngineConfig(slots=64, cache=cache, process=False, **options)
        engine = build_engine(config, model, clock=RealClock(), sink=MemorySink())
        weights = {name: value.detach().clone() for name, value in model.named_parameters()}
        answers, version, room = 0, 0, asyncio.Semaphore(200)

        async def ask(number: int) -> None:
            nonlocal answers
            one = request(number, tuple(rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 60))))
            one = structs.replace(one, sampling=structs.replace(one.sampling, max_tokens=rng.randint(1, 24)))
            going = asyncio.create_task(engine.generate(one))
            if rng.random() < 0.1:
                await asyncio.sleep(rng.random() * 0.05)
                await engine.abort(one.key)
            done = await going
            assert done.finish is Finish.ABORT or len(done.tokens) == one.sampling.max_tokens
            answers += 1
            room.release()

        sizes, tasks = list[int](), set[asyncio.Task[None]]()
        for number in range(20_000):
            await room.acquire()
            task = asyncio.create_task(ask(number))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if number % 200 == 199:
                version += 1
                await engine.load(version, weights)
            if number % 5_000 == 4_999:
                sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        await asyncio.gather(*tasks)
        assert answers == 20_000 and engine.stats().requests_finished == 20_000
        assert engine.stats().cache_used == 0 and not engine._requests
        assert sizes[-1] - sizes[0] < 60_000, f"it grew by {(sizes[-1] - sizes[0]) / 1000:.0f} MB"
        await engine.close()

    asyncio.run(run())
