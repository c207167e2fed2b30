"""Fused layers: with adapters they give the numbers of the layers that they replace, and a fault in one of them is found."""

from __future__ import annotations

import asyncio
import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config

from millstream.clock import RealClock
from millstream.engine import EngineConfig
from millstream.engine.native import fused, graphs
from millstream.engine.native.batching import Batcher
from millstream.engine.native.check import check_engine, requests
from millstream.engine.native.graphs import Graphs
from millstream.engine.native.paged import PagedRunner
from millstream.engine.native.slots import SlotRunner
from millstream.errors import ModelError
from millstream.events import PathChosen
from millstream.events.sinks import MemorySink
from millstream.learner import LearnerConfig
from millstream.learner.path import learner_path
from millstream.learner.trainer import save_trained
from millstream.model import compare
from millstream.model.adapters import add_adapters, copy_of, merged, trained_weights
from millstream.model.load import load_model, load_weights, new_model
from millstream.model.lora import LoraConfig
from millstream.run.build import build_engine
from support.decoding import alone, drain, teacher_forced
from support.faults import FAULTS, forgotten_adapter
from support.tiny import CONFIGS, SHAPE, make, make_small, prompts, request
from support.tiny import plain as plain_model

FAMILIES = [name for name in CONFIGS if name != "gpt_neox"]
TARGETS = {"all": (), "some": ("q_proj", "v_proj", "up_proj"), "last": ("o_proj", "down_proj")}


def adapted(name: str, targets: tuple[str, ...] = (), dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = make(name).to(dtype)
    add_adapters(model, LoraConfig(rank=4, alpha=8.0, targets=targets), seed=1)
    return model.eval()


def other_adapters(model: PreTrainedModel, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(value.shape, generator=generator) * 0.1).to(value)
        for name, value in trained_weights(model).items()
    }


def paged(model: PreTrainedModel, why_unfused: str = "") -> Batcher:
    runner = PagedRunner(model, 4, page=4, cache_gb=0.01, why_unfused=why_unfused)
    return Batcher(model, num_slots=4, runner=runner)


# ---- adapters ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_fused_engine_with_adapters_gives_the_numbers_of_the_merged_model_and_loads_new_ones(
    name: str, targets: str
) -> None:
    model = adapted(name, TARGETS[targets])
    fast, plain = paged(copy_of(model)), paged(copy_of(model), why_unfused="the plain twin")
    assert fast.path.name == "pages, fused layers" and plain.path.name == "pages, the library's layers"
    for version in (1, 2):
        weights = other_adapters(model, seed=version)
        load_weights(model, weights)
        twin, asked = plain_model(merged(model)), prompts(6)
        for batcher in (fast, plain):
            batcher.load(version, weights)
            for number, prompt in enumerate(asked):
                batcher.add(request(number, prompt))
            done: dict[int, Any] = {}
            drain(batcher, done)
            for number, prompt in enumerate(asked):
                expected = teacher_forced(twin, prompt, done[number].tokens)
                assert torch.allclose(torch.tensor(done[number].logprobs), expected, atol=1e-4)


@pytest.mark.parametrize("name", [*FAMILIES, "heads of 22"])
def test_slots_sample_the_same_tokens_with_fused_layers_as_with_the_librarys(name: str) -> None:
    odd = Qwen3Config(**{**SHAPE, "hidden_size": 88}, head_dim=22)
    model = new_model(odd, seed=0, dtype=torch.float32) if name == "heads of 22" else make(name)
    found: list[dict[int, Any]] = []
    for why_unfused, words in (("", "fused layers"), ("the plain twin", "the library's layers")):
        own = copy_of(model)
        batcher = Batcher(own, num_slots=4, runner=SlotRunner(own, 4, why_unfused=why_unfused))
        assert batcher.path.name == f"a slot for each request, {words}"
        for number, prompt in enumerate(prompts(6)):
            batcher.add(request(number, prompt))
        found.append({})
        drain(batcher, found[-1])
    for number, fast in found[0].items():
        plain = found[1][number]
        assert fast.tokens == plain.tokens
        assert torch.allclose(torch.tensor(fast.logprobs), torch.tensor(plain.logprobs), atol=1e-5)


def num_bytes() -> int:
    """Of all parameters and of what they are views of, in this process."""
    gc.collect()
    storages = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in gc.get_objects()
        if issubclass(type(one), torch.Tensor)
    }
    return sum(storages.values())


def test_frozen_weights_are_joined_once_for_the_learner_and_all_engines() -> None:
    model, before = adapted("llama"), num_bytes()
    frozen = {name: value.clone() for name, value in model.named_parameters() if not value.requires_grad}
    size = sum(value.numel() * value.element_size() for value in frozen.values())
    copies = [copy_of(model) for _ in range(3)]
    for one in copies:
        assert fused.fuse(one).num == fused.fuse(one).known, "the second time, what is joined is left as it is"
    assert num_bytes() - before < size + 0.5 * size, "the values kept above, and adapters"
    for name, value in frozen.items():
        assert torch.equal(model.get_parameter(name), value)
        assert len({one.get_parameter(name).data_ptr() for one in (model, *copies)}) == 1
    attention = model.model.layers[0].self_attn
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert len({part.base_layer.weight.untyped_storage().data_ptr() for part in parts}) == 1


def test_a_learner_whose_frozen_weights_were_joined_saves_an_ordinary_model(tmp_path: Path) -> None:
    """Of joined weights only some have adapters: the others are saved as the views that they are."""
    model = adapted("qwen2", TARGETS["some"])
    paged(copy_of(model))
    load_weights(model, other_adapters(model))
    save_trained(model, None, tmp_path / "saved")
    prompt = prompts(1)[0]
    answer = alone(paged(model), request(0, prompt))
    expected = teacher_forced(plain_model(load_model(tmp_path / "saved")), prompt, answer.tokens)
    assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=1e-4)


def test_an_adapter_of_another_kind_is_left_to_its_library() -> None:
    model = adapted("llama")
    attention = model.model.layers[0].self_attn
    attention.q_proj.lora_dropout["default"] = torch.nn.Dropout(0.5)
    count = fused.fuse(model)
    assert count.num == count.known - 1 and "forward" not in attention.__dict__
    assert "fused layers (" in paged(model).path.name and "the others share weights" in paged(model).path.why


# ---- the path --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
def test_the_path_of_an_engine_is_an_event_wherever_it_runs(process: bool) -> None:
    async def program() -> list[PathChosen]:
        sink = MemorySink()
        config = EngineConfig(process=process, cache="pages", cache_gb=0.01, slots=2)
        engine = build_engine(config, adapted("qwen3"), clock=RealClock(), sink=sink, name="engine-3")
        await engine.generate(request(0, (5, 6, 7)))
        await engine.close()
        return sink.of(PathChosen)

    (found,) = asyncio.run(program())
    assert (found.worker, found.path, found.why) == ("engine-3", "pages, fused layers", "")


def test_a_path_that_changes_while_it_runs_is_an_event_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoGraphs:
        def record(self, step: Any, *, is_urgent: bool) -> Any:
            raise RuntimeError("operation not permitted")

    async def program() -> list[PathChosen]:
        sink = MemorySink()
        config = EngineConfig(process=False, cache="pages", cache_gb=0.01, slots=2)
        engine = build_engine(config, make("llama"), clock=RealClock(), sink=sink)
        runners[0]._graphs = Graphs(NoGraphs())
        for number in range(2):
            await engine.generate(request(number, (5, 6, 7)))
        await engine.close()
        return sink.of(PathChosen)

    runners, right = list[Any](), PagedRunner.__init__

    def kept(self: Any, *args: Any, **options: Any) -> None:
        right(self, *args, **options)
        runners.insert(0, self)

    monkeypatch.setattr(PagedRunner, "__init__", kept)
    monkeypatch.setattr(graphs, "obstacle_in", lambda step: None)
    *_, last = asyncio.run(program())
    assert last.path == "pages, fused layers, decode steps kernel by kernel"
    assert last.why == "no graph can be made: operation not permitted"


def test_the_path_of_a_learner_says_what_keeps_it_from_the_fastest_one() -> None:
    half, full = (new_model(CONFIGS["llama"](), seed=0, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    compiled = LearnerConfig(compile=True)
    fastest = learner_path(half, compiled, "cuda")
    assert (fastest.name, fastest.why) == ("packed rows, ragged attention, compiled layers", "")
    slow = learner_path(full, LearnerConfig(), "cuda")
    assert slow.name == "packed rows, padded attention, layers not compiled"
    assert slow.why == "ragged attention needs 16 bits, and the model has float32; learner.compile = false"
    capped = learner_path(new_model(CONFIGS["gemma2"](), seed=0, dtype=torch.bfloat16), compiled, "cuda")
    assert capped.why == "the model caps its attention scores"
    assert learner_path(full, LearnerConfig(), "cpu").why == "", "there is no faster one"


# ---- faults --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def varied(name: str, dtype: torch.dtype, has_adapters: bool = False) -> PreTrainedModel:
    """A tiny model whose norms, biases and attention matter, as those of a trained one do."""
    model = make_small(name, torch.float32)
    compare.randomize(model, torch.Generator().manual_seed(0))
    model = model.to(dtype)
    if has_adapters:
        add_adapters(model, LoraConfig(rank=4, alpha=8.0), seed=1)
    return model.eval()


@pytest.mark.usefixtures("nothing_remembered")
@pytest.mark.parametrize("has_adapters", [False, True], ids=["whole", "adapters"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_starts_with_fused_layers(name: str, dtype: torch.dtype, has_adapters: bool) -> None:
    model = varied(name, dtype, has_adapters)
    before = {name: value.clone() for name, value in model.named_parameters()}
    assert check_engine(model, "pages") == ""
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_fused_path_is_found_by_the_check(
    fault: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the model itself: what a small one would find is not asked."""
    for name in ("qwen3", "gemma3"):
        model = varied(name, dtype)
        with monkeypatch.context() as planted:
            FAULTS[fault](planted, model)
            with pytest.raises(ModelError, match="gives other numbers in the fused path"):
                compare.check_itself(model, "the fused path", partial(requests, "pages", True), "")


@pytest.mark.usefixtures("nothing_remembered")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_that_is_left_out_is_found_by_the_check_although_adapters_begin_at_zero(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = varied("llama", dtype, has_adapters=True)
    forgotten_adapter(monkeypatch, model)
    assert "gives other numbers in the engine (pages, fused)" in check_engine(model, "pages")
    with pytest.raises(ModelError, match="gives other numbers"):
        compare.check_itself(model, "the fused path", partial(requests, "pages", True), "")
