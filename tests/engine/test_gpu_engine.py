"""On a GPU: kernels give what their plain twins give, and the engine what transformers gives. `make test-gpu`."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from transformers import Qwen3MoeConfig

from millstream.clock import RealClock
from millstream.engine import EngineConfig
from millstream.engine.native import graphs
from millstream.engine.native.batching import Batcher
from millstream.engine.native.check import check_engine
from millstream.engine.native.paged import PagedRunner
from millstream.engine.native.plain import PLAIN, Heads, Pages
from millstream.engine.native.speculation import Speculator
from millstream.events.sinks import MemorySink
from millstream.model import compare
from millstream.model.adapters import add_adapters, copy_of, merged, trained_weights
from millstream.model.attention import Rule
from millstream.model.load import load_weights, new_model
from millstream.model.lora import LoraConfig
from millstream.run.build import build_engine
from millstream.types import Completion, RequestKey, Sampling
from support.decoding import drain, kept_by, teacher_forced
from support.drafting import Oracle
from support.tiny import CONFIGS, SHAPE, VOCABULARY, prompts, request
from support.tiny import plain as plain_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
CUDA = torch.device("cuda")
BOUND = 0.03
"""How far a log-probability in bfloat16 may be from that of the same weights in float32, in the mean, for tiny models."""


def pages_of(dtype: torch.dtype, *, num: int, longest: int, heads: int, dim: int, size: int = 32) -> Pages:
    torch.manual_seed(0)
    width = -(-longest // size)
    shape = (1 + num * width, heads, size, dim)
    keys, values = (torch.randn(shape, device=CUDA).to(dtype) for _ in range(2))
    table = 1 + torch.randperm(num * width, device=CUDA).int().view(num, width)
    positions = torch.randint(0, longest, (num,), device=CUDA).int()
    return Pages(keys, values, table, torch.randperm(num, device=CUDA).int(), positions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rule", [Rule(None, None, None), Rule(0.2, 40, None), Rule(None, None, 5.0), Rule(0.3, 7, 20.0)]
)
@pytest.mark.parametrize(
    ("num", "heads", "dim"),
    [
        (1, (16, 8), 128),
        (3, (4, 4), 64),
        (5, (6, 2), 80),
        (9, (4, 2), 8),
        (9, (4, 4), 22),
        (70, (8, 1), 32),
        (300, (16, 8), 128),
    ],
)
def test_decode_attention_is_that_of_its_plain_twin(
    dtype: torch.dtype, rule: Rule, num: int, heads: tuple[int, int], dim: int
) -> None:
    from millstream.engine.native.kernels import KERNELS

    pages = pages_of(dtype, num=num, longest=300, heads=heads[1], dim=dim)
    query = torch.randn(num, heads[0], dim, device=CUDA).to(dtype)
    found = KERNELS.decode_attention(query, pages, rule)
    exact = pages._replace(keys=pages.keys.float(), values=pages.values.float())
    expected = PLAIN.decode_attention(query.float(), exact, rule)
    assert torch.allclose(found.float(), expected, atol=1e-4 if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", ["none", "llama", "gemma"])
def test_rotated_queries_and_written_pages_are_those_of_the_plain_twin(dtype: torch.dtype, norm: str) -> None:
    from millstream.engine.native.kernels import KERNELS

    num, dim = 50, 64
    pages = pages_of(dtype, num=num, longest=100, heads=2, dim=dim)
    twin = pages._replace(keys=pages.keys.clone(), values=pages.values.clone())
    qkv = torch.randn(num, (6 + 4) * dim, device=CUDA).to(dtype)
    cos, sin = (torch.randn(num, dim, device=CUDA).to(dtype) for _ in range(2))
    weights = [None, None] if norm == "none" else [torch.randn(dim, device=CUDA).to(dtype) for _ in range(2)]
    heads = Heads(6, 2, dim, *weights, 1e-6, is_gemma=norm == "gemma")
    found, expected = (
        KERNELS.rotate_and_write(qkv, cos, sin, heads, pages),
        PLAIN.rotate_and_write(qkv, cos, sin, heads, twin),
    )
    bound = 1e-4 if dtype == torch.float32 else 0.1
    for one, other in ((found, expected), (pages.keys, twin.keys), (pages.values, twin.values)):
        assert torch.allclose(one.float(), other.float(), atol=bound, rtol=bound)
    key, value = torch.randn(2, num, 2, dim, device=CUDA).to(dtype)
    KERNELS.write(key, value, pages)
    PLAIN.write(key, value, twin)
    assert torch.equal(pages.values, twin.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_gemma", [False, True])
def test_norms_and_gates_are_those_of_their_plain_twins(dtype: torch.dtype, is_gemma: bool) -> None:
    from millstream.engine.native.kernels import KERNELS

    x, weight = torch.randn(37, 200, device=CUDA).to(dtype), torch.randn(200, device=CUDA).to(dtype)
    bound = 1e-5 if dtype == torch.float32 else 0.05
    found = KERNELS.rms_norm(x, weight, 1e-6, is_gemma=is_gemma)
    assert torch.allclose(found, PLAIN.rms_norm(x, weight, 1e-6, is_gemma=is_gemma), atol=bound, rtol=bound)
    for activation in ("silu", "gelu_tanh"):
        assert torch.allclose(KERNELS.gated(x, activation), PLAIN.gated(x, activation), atol=bound, rtol=bound)


@pytest.mark.parametrize("size", [12, 97, 5000, 32768])
def test_sampled_tokens_are_those_of_the_plain_twin_and_so_are_their_log_probabilities(size: int) -> None:
    from millstream.engine.native.kernels import KERNELS

    torch.manual_seed(0)
    logits, numbers = 3 * torch.randn(512, size, device=CUDA), torch.rand(512, device=CUDA)
    logits[:, ::5] = float("-inf")
    numbers[:3] = torch.tensor([0.0, 0.5, 1 - 2**-24])
    temperatures = torch.tensor([0.0, 0.5, 1.0, 2.0], device=CUDA).repeat(128)
    tokens, logprobs = KERNELS.sample(logits, numbers, temperatures)
    expected, expected_logprobs = PLAIN.sample(logits, numbers, temperatures)
    same = tokens == expected
    assert same.float().mean() > 0.99, "but for numbers that fall on the border of two tokens"
    assert torch.allclose(logprobs[same], expected_logprobs[same], atol=1e-4)
    assert logits.gather(1, tokens[:, None]).isfinite().all(), "what is impossible is never sampled"


def batcher_on_gpu(name: str, dtype: torch.dtype, *, num_slots: int = 4, **options: Any) -> Batcher:
    model = new_model(CONFIGS[name](), seed=0, dtype=dtype).to(CUDA).eval()
    return Batcher(model, num_slots=num_slots, runner=PagedRunner(model, num_slots, cache_gb=0.2), **options)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_output_and_log_probabilities_are_those_of_the_library_in_float32(name: str) -> None:
    batcher, asked = batcher_on_gpu(name, torch.float32, prefill_tokens=24), prompts(12)
    for number, prompt in enumerate(asked):
        batcher.add(request(number, prompt, max_tokens=40, temperature=0))
    done: dict[int, Completion] = {}
    drain(batcher, done)
    twin = plain_model(new_model(CONFIGS[name](), seed=0))
    for number, prompt in enumerate(asked):
        out = twin.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert tuple(out[0, len(prompt) :].tolist()) == done[number].tokens
        expected = teacher_forced(twin, prompt, done[number].tokens)
        assert torch.allclose(torch.tensor(done[number].logprobs), expected, atol=1e-3)


@pytest.mark.parametrize("name", CONFIGS)
def test_in_bfloat16_log_probabilities_are_within_the_bound(name: str) -> None:
    batcher, asked = batcher_on_gpu(name, torch.bfloat16), prompts(12)
    for number, prompt in enumerate(asked):
        batcher.add(request(number, prompt, max_tokens=40))
    done: dict[int, Completion] = {}
    drain(batcher, done)
    twin = plain_model(new_model(CONFIGS[name](), seed=0, dtype=torch.bfloat16)).float()
    for number, prompt in enumerate(asked):
        expected = teacher_forced(twin, prompt, done[number].tokens)
        assert (torch.tensor(done[number].logprobs) - expected).abs().mean() < BOUND


def test_sampling_frequencies_fit_the_distribution_with_top_k_and_top_p() -> None:
    batcher = batcher_on_gpu("llama", torch.float32, num_slots=64)
    prompt = prompts(1)[0]
    twin = plain_model(new_model(CONFIGS["llama"](), seed=0))
    with torch.no_grad():
        logits = twin(torch.tensor([prompt])).logits[0, -1]
    for top in ({}, {"top_k": 4}, {"top_p": 0.3}, {"top_k": 20, "top_p": 0.2}):
        sampling = Sampling(max_tokens=1, temperature=0.7, **top)  # type: ignore[arg-type]
        for number in range(4000):
            batcher.add(structs.replace(request(number, prompt), sampling=sampling))
        done: dict[int, Completion] = {}
        drain(batcher, done)
        counts = torch.bincount(torch.tensor([one.tokens[0] for one in done.values()]), minlength=VOCABULARY)
        expected = 4000 * kept_by(logits, sampling)
        assert not counts[expected == 0].any()
        chi_square = float(((counts - expected) ** 2 / expected)[expected > 0].sum())
        degrees = int((expected > 0).sum()) - 1
        assert chi_square < degrees + 4 * (2 * degrees) ** 0.5 + 8, "far above what chance gives"


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_with_drafts_give_the_tokens_of_plain_steps_in_float32(name: str) -> None:
    """In captured graphs of their own; the host is a step ahead in between."""
    asked = [
        structs.replace(request(number, prompt), sampling=Sampling(max_tokens=60, temperature=number % 3 / 2))
        for number, prompt in enumerate(prompts(24))
    ]

    def completions(speculator: Speculator | None) -> tuple[dict[RequestKey, Completion], Batcher]:
        batcher = batcher_on_gpu(name, torch.float32, num_slots=8, speculator=speculator)
        for one in asked:
            batcher.add(one)
        done: dict[RequestKey, Completion] = {}
        while batcher.has_work:
            done.update(batcher.step())
        return done, batcher

    expected, _ = completions(None)
    found, batcher = completions(Oracle({key: one.tokens for key, one in expected.items()}))
    assert batcher.num_drafted > batcher.num_accepted > 200 and batcher.cache_used == 0
    runner = batcher._runner
    assert isinstance(runner, PagedRunner) and runner._wide_graphs is not None and runner._wide_graphs._graphs
    same = [found[key].tokens == one.tokens for key, one in expected.items()]
    assert sum(same) >= 23, "but for a number that falls on the border of two tokens"
    for key, one in expected.items():
        if found[key].tokens == one.tokens:
            assert found[key].logprobs == pytest.approx(one.logprobs, abs=1e-3)


def test_swaps_preemption_and_aborts_on_the_gpu_leave_every_token_with_the_numbers_of_its_version() -> None:
    model = new_model(CONFIGS["qwen3"](), seed=0).to(CUDA).eval()
    runner = PagedRunner(model, 16, cache_gb=1.34e-4, page=16)
    batcher = Batcher(model, num_slots=16, runner=runner, on_update="recompute")
    other = new_model(CONFIGS["qwen3"](), seed=1).to(CUDA)
    asked = prompts(40)
    for number, prompt in enumerate(asked):
        batcher.add(request(number, prompt, max_tokens=100))
    done: dict[int, Completion] = {}
    for _ in range(30):
        done.update((key.group_id, one) for key, one in batcher.step())
    batcher.load(1, {name: value.detach().clone() for name, value in other.named_parameters()})
    drain(batcher, done)
    assert batcher.num_preempted > 0 and batcher.cache_used == 0
    twins = [plain_model(new_model(CONFIGS["qwen3"](), seed=seed)) for seed in (0, 1)]
    for number, prompt in enumerate(asked):
        one = done[number]
        assert len(one.tokens) == 100
        for version, twin in enumerate(twins):
            chosen = [at for at, label in enumerate(one.versions) if label == version]
            expected = teacher_forced(twin, prompt, one.tokens)[chosen]
            assert torch.allclose(torch.tensor(one.logprobs)[chosen], expected, atol=1e-3)


@pytest.mark.parametrize("is_known_before", [True, False])
def test_a_mixture_of_experts_that_no_graph_can_hold_is_launched_kernel_by_kernel_and_torch_is_left_in_order(
    is_known_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_known_before:  # then the capture itself fails
        monkeypatch.setattr(graphs, "_is_obstacle", lambda *_: False)
    model = new_model(Qwen3MoeConfig(**SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2), seed=0)
    twin = plain_model(model)
    model.set_experts_implementation("eager")
    model = model.to(CUDA).eval()
    batcher = Batcher(model, num_slots=4, runner=PagedRunner(model, 4, cache_gb=0.2))
    for number, prompt in enumerate(prompts(6)):
        batcher.add(request(number, prompt))
    done: dict[int, Completion] = {}
    drain(batcher, done)
    for number, prompt in enumerate(prompts(6)):
        expected = teacher_forced(twin, prompt, done[number].tokens)
        assert torch.allclose(torch.tensor(done[number].logprobs), expected, atol=1e-3)
    assert batcher.path.name.endswith("decode steps kernel by kernel") and "no graph can be made" in batcher.path.why
    assert torch.rand(3, device=CUDA).isfinite().all(), "random numbers can still be drawn"
    beside, before = torch.cuda.Stream(), torch.cuda.memory_allocated()
    for _ in range(3):
        tensor = torch.zeros(1 << 20, device=CUDA)
        tensor.record_stream(beside)
        del tensor
    torch.cuda.synchronize()
    torch.zeros(1, device=CUDA)
    assert torch.cuda.memory_allocated() - before < 1 << 20, "what another stream has used comes back"


def test_an_engine_on_the_gpu_answers_everybody_and_says_how_long_a_swap_took() -> None:
    async def run() -> None:
        model = new_model(CONFIGS["llama"](), seed=0, dtype=torch.bfloat16).to(CUDA)
        engine = build_engine(EngineConfig(slots=32, cache_gb=0.1), model, clock=RealClock(), sink=MemorySink())
        weights = {name: value.detach().clone() for name, value in model.named_parameters()}
        going = [
            asyncio.create_task(engine.generate(request(n, p, max_tokens=200))) for n, p in enumerate(prompts(100))
        ]
        await asyncio.sleep(0.5)
        await engine.load(3, weights)
        done = await asyncio.gather(*going)
        assert all(len(one.tokens) == 200 and sorted(one.versions) == list(one.versions) for one in done)
        assert engine.stats().swap_s > 0
        await engine.close()

    asyncio.run(run())


# ---- fused layers with adapters ------------------------------------------------------------------------------------------


def with_adapters(name: str, dtype: torch.dtype) -> Any:
    """A tiny model whose norms and attention matter, with adapters that change its numbers."""
    model = new_model(CONFIGS[name](), seed=0)
    compare.randomize(model, torch.Generator().manual_seed(0))
    add_adapters(model, LoraConfig(rank=4, alpha=8.0), seed=1)
    return model.to(CUDA, dtype).eval()


@pytest.mark.parametrize("has_adapters", [False, True], ids=["whole", "adapters"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "gpt_neox"])
def test_every_family_starts_with_fused_layers(
    name: str, dtype: torch.dtype, has_adapters: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = with_adapters(name, dtype)
    if not has_adapters:
        model = merged(model).to(CUDA, dtype)
    assert check_engine(model, "pages") == ""


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_fused_adapters_give_the_numbers_of_the_merged_model_and_new_ones_take_effect(name: str) -> None:
    model = with_adapters(name, torch.float32)
    copies = [copy_of(model), copy_of(model)]
    runners = [PagedRunner(copies[0], 8, cache_gb=0.01)]
    before = torch.cuda.memory_allocated()
    runners.append(PagedRunner(copies[1], 8, cache_gb=0.01))
    frozen = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    assert torch.cuda.memory_allocated() - before < 0.0101e9 + frozen / 2, "joined once, for all of them"
    batcher = Batcher(copies[0], num_slots=8, runner=runners[0])
    for version in (1, 2):
        generator = torch.Generator().manual_seed(version)
        weights = {
            key: 0.1 * torch.randn(value.shape, generator=generator).to(CUDA)
            for key, value in trained_weights(model).items()
        }
        load_weights(model, weights)
        batcher.load(version, weights)
        twin, done = plain_model(copy.deepcopy(merged(model)).cpu()), dict[int, Completion]()
        for number, prompt in enumerate(prompts(8)):
            batcher.add(request(number, prompt))
        drain(batcher, done)
        for number, prompt in enumerate(prompts(8)):
            expected = teacher_forced(twin, prompt, done[number].tokens)
            assert torch.allclose(torch.tensor(done[number].logprobs), expected, atol=1e-3)
    assert batcher.path.name == "pages, fused layers, decode steps as CUDA graphs" and not batcher.path.why


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_attention_in_float32_is_there_for_every_dimension_of_a_head(dim: int) -> None:
    """The start-up check runs a copy of the model in float32 through the kernels."""
    from millstream.engine.native.kernels import KERNELS

    pages = pages_of(torch.float32, num=5, longest=100, heads=2, dim=dim)
    query, rule = torch.randn(5, 8, dim, device=CUDA), Rule(None, None, None)
    found, expected = (of.decode_attention(query, pages, rule) for of in (KERNELS, PLAIN))
    assert torch.allclose(found, expected, atol=1e-4)
