"""Adapters: they alone are trained, sent and kept in checkpoints, and what is saved is an ordinary model."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from msgspec import structs
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from millstream.algo import AlgorithmConfig, recipe
from millstream.audit import audit
from millstream.clock import RealClock
from millstream.config import load
from millstream.engine import EngineConfig
from millstream.engine.native.batching import Batcher
from millstream.engine.native.engine import TorchEngine
from millstream.errors import ConfigError, EngineError, LearnerError, ModelError
from millstream.events.sinks import MemorySink
from millstream.learner import LearnerConfig
from millstream.learner.torch import TorchLearner
from millstream.model.adapters import (
    add_adapters,
    copy_of,
    lora_of,
    merged,
    merged_weights,
    random_adapters,
    trained_weights,
)
from millstream.model.load import model_weights
from millstream.model.lora import LoraConfig
from millstream.run.build import build_engine
from millstream.run.check import check_combinations
from millstream.run.config import ModelConfig, RunConfig, TinyConfig
from millstream.run.evaluate import evaluate
from millstream.run.run import resume
from millstream.run.run import train as run
from millstream.types import TrainRow
from support.learners import rows
from support.runs import ROOT, SETTINGS
from support.tiny import CONFIGS, make, make_small, prompts, request

LORA = LoraConfig(rank=4, alpha=8.0)


def adapted(name: str = "qwen3", lora: LoraConfig = LORA) -> PreTrainedModel:
    model = make(name)
    add_adapters(model, lora, seed=1)
    return model


def learner(model: PreTrainedModel | None = None, **changes: Any) -> TorchLearner:
    config = LearnerConfig(learning_rate=1e-2, **changes)
    return TorchLearner(model or adapted(), config, recipe.supervised())


async def train(one: TorchLearner, batch: list[TrainRow], steps: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        await one.begin_batch()
        await one.accumulate(batch)
        losses.append((await one.step())["loss"])
    return losses


def gold(count: int) -> list[TrainRow]:
    return [structs.replace(row, advantages=np.ones_like(row.advantages)) for row in rows(count)]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    tokens = torch.tensor([prompts(1, longest=20)[0]])
    found: torch.Tensor = model(input_ids=tokens).logits
    return found


def plainly(model: PreTrainedModel, folder: Path) -> Any:
    """The base as the libraries load it, without any of our code."""
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_before_the_first_step_the_policy_is_the_bases_bit_for_bit(name: str) -> None:
    batch = rows(6)
    objective = recipe.objective(AlgorithmConfig(), max_tokens=16)
    found, expected = (
        asyncio.run(TorchLearner(model, LearnerConfig(), objective).logprobs(batch))
        for model in (adapted(name), make(name))
    )
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_have_a_finite_gradient_and_nothing_else_changes(name: str) -> None:
    one = learner(adapted(name))
    before = {key: value.detach().clone() for key, value in model_weights(one.model).items()}
    losses = asyncio.run(train(one, gold(6)))
    assert losses[-1] < losses[0] and np.isfinite(losses).all()
    changed = {key for key, value in model_weights(one.model).items() if not torch.equal(value, before[key])}
    assert changed == set(trained_weights(one.model)) and all(".lora_" in key for key in changed)
    assert all(p.requires_grad == (".lora_" in key) for key, p in one.model.named_parameters())


def test_every_linear_layer_of_the_decoder_has_an_adapter_unless_some_are_named_and_the_head_never() -> None:
    def layers_of(model: PreTrainedModel) -> set[str]:
        return {name.split(".")[-4] for name in trained_weights(model)}

    assert layers_of(adapted()) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    some = LoraConfig(targets=("q_proj", "v_proj"))
    assert layers_of(adapted(lora=some)) == {"q_proj", "v_proj"}
    assert lora_of(adapted(lora=some)) == some and lora_of(make("qwen3")) is None
    with pytest.raises(
        ModelError, match=r"targets: Qwen3ForCausalLM has no linear layer named lm_head.*there are down_proj, gate_"
    ):
        adapted(lora=LoraConfig(targets=("lm_head", "q_proj")))


def test_the_same_seed_gives_the_same_adapters_and_draws_from_no_global_generator() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one = trained_weights(adapted())
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    other = trained_weights(adapted())
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
def test_engines_load_the_adapters_alone_and_their_log_probabilities_are_the_learners(process: bool) -> None:
    async def program() -> None:
        one = learner()
        engine = _engine(one.model, process)
        await train(one, gold(6))
        weights = await one.weights()
        assert _num_bytes(weights) < 0.3 * _num_bytes(model_weights(one.model))
        await engine.load(1, weights)
        asked = [request(number, prompt) for number, prompt in enumerate(prompts(6))]
        said = await asyncio.gather(*(engine.generate(each) for each in asked))
        played = [
            _row([*ask.tokens, *completion.tokens], len(ask.tokens))
            for ask, completion in zip(asked, said, strict=True)
        ]
        for completion, found in zip(said, await one.logprobs(played), strict=True):
            assert np.allclose(completion.logprobs, found, atol=1e-4) and set(completion.versions) == {1}
        everything = {name: value.detach() for name, value in model_weights(one.model).items()}
        for wrong in (everything, dict(list(weights.items())[1:])):
            with pytest.raises(EngineError, match="do not fit"):
                await engine.load(2, wrong)
        await engine.close()

    asyncio.run(program())


def test_an_incomplete_version_of_a_whole_model_is_refused() -> None:
    async def program() -> None:
        model = make("qwen3")
        engine = _engine(model, process=False)
        with pytest.raises(EngineError, match="do not fit"):
            await engine.load(1, dict(list(model_weights(model).items())[1:]))
        await engine.close()

    asyncio.run(program())


def _engine(model: PreTrainedModel, process: bool) -> TorchEngine:
    return build_engine(EngineConfig(process=process), model, clock=RealClock(), sink=MemorySink())


def _num_bytes(weights: Any) -> int:
    return sum(value.numel() * value.element_size() for value in weights.values())


def _row(tokens: list[int], num_prompt: int) -> TrainRow:
    at = np.arange(len(tokens))
    zeros = np.zeros(len(tokens), np.float32)
    return TrainRow(tokens=np.array(tokens, np.int32), loss_mask=at >= num_prompt, logprobs=zeros, advantages=zeros)


def test_copies_in_one_process_share_what_is_frozen_and_nothing_else() -> None:
    model = adapted()
    own, theirs = model_weights(model), model_weights(copy_of(model))
    shared = {name for name in own if own[name].data_ptr() == theirs[name].data_ptr()}
    assert shared == {name for name, p in model.named_parameters() if not p.requires_grad}
    whole = make("qwen3")
    next(iter(whole.parameters())).requires_grad_(False)  # without adapters, a load writes to all of it
    own, theirs = model_weights(whole), model_weights(copy_of(whole))
    assert not any(own[name].data_ptr() == theirs[name].data_ptr() for name in own)


@pytest.mark.parametrize("name", ["qwen3", "gpt_neox"])  # the second has biases
def test_what_is_saved_is_an_ordinary_model_and_beside_it_the_adapter_in_pefts_format(
    name: str, tmp_path: Path
) -> None:
    base = plainly(make(name), tmp_path / "base")
    one = learner(adapted(name))
    before = logits(base)
    asyncio.run(train(one, gold(6)))
    expected = copy.deepcopy(one.model)
    expected.set_attn_implementation("eager")
    one.save(tmp_path / "model")
    found, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert not any("lora" in key for key in found.state_dict())
    assert torch.allclose(logits(found.eval()), logits(expected), atol=1e-4)
    assert not torch.allclose(logits(found), before, atol=1e-2)
    onto = peft.PeftModel.from_pretrained(base, tmp_path / "model" / "adapter").eval()
    assert torch.allclose(logits(onto), logits(expected), atol=1e-5)
    asyncio.run(train(one, gold(6), steps=1))  # the learner continues


@pytest.mark.parametrize(
    "lora", [LORA, LoraConfig(rank=3, alpha=5.0, targets=("q_proj", "down_proj"))], ids=["all", "some"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_without_a_model_are_those_of_the_merged_model_bit_for_bit(
    lora: LoraConfig, dtype: torch.dtype
) -> None:
    """Any number of times: what they are merged with stays as it is."""
    model = make("qwen2").to(dtype)  # it has biases
    add_adapters(model, lora, seed=1)
    scaling = lora.alpha / lora.rank
    whole = {name: value.detach().clone() for name, value in model_weights(model).items()}

    def again() -> dict[str, torch.Tensor]:
        return dict(merged_weights(whole, trained_weights(model), scaling, dtype=dtype, device=torch.device("cpu")))

    unchanged = make("qwen2").to(dtype)
    assert all(torch.equal(again()[name], value) for name, value in model_weights(unchanged).items())
    with random_adapters(model):
        expected = model_weights(merged(model))
        for found in (again(), again()):
            assert found.keys() == expected.keys() == model_weights(unchanged).keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
        layer = model.get_submodule("model.layers.1.self_attn.q_proj")
        product = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
        exact = layer.base_layer.weight.double() + scaling * product
        error = (found["model.layers.1.self_attn.q_proj.weight"].double() - exact).abs()
        assert bool((error <= 0.51 * torch.finfo(dtype).eps * exact.abs() + 1e-7).all()), "rounded once"
    moved = {name for name in found if not torch.equal(found[name], model_weights(unchanged)[name])}
    targets = lora.targets or ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert moved == {name for name in found if name.split(".")[-2] in targets and name.endswith(".weight")}


def test_a_snapshot_holds_adapters_and_their_optimizer_alone_and_training_goes_on_from_it_bit_for_bit(
    tmp_path: Path,
) -> None:
    async def program() -> None:
        one, other = learner(), learner()
        await train(one, gold(6), steps=2)
        (await one.snapshot()).write(tmp_path)
        state = torch.load(tmp_path / "learner.pt")
        assert set(state["masters"]) == set(trained_weights(one.model)) and not state["buffers"]
        other.restore(tmp_path)
        await train(one, gold(4))
        await train(other, gold(4))
        found, expected = await other.weights(), await one.weights()
        assert all(torch.equal(found[name], expected[name]) for name in expected)

    asyncio.run(program())


def test_a_snapshot_of_adapters_of_another_rank_is_refused_with_what_to_set(tmp_path: Path) -> None:
    asyncio.run(learner().snapshot()).write(tmp_path)
    with pytest.raises(LearnerError, match=r"lora_A.* has the shape \(4, .* there and \(8, .*\[learner.lora\]"):
        learner(adapted(lora=LoraConfig(rank=8))).restore(tmp_path)


def test_with_mini_batches_the_proximal_policy_is_that_of_the_batchs_start() -> None:
    async def program() -> None:
        one = TorchLearner(
            adapted(),
            LearnerConfig(learning_rate=1e-2, mini_batches=2),
            recipe.objective(AlgorithmConfig(name="decoupled_ppo"), max_tokens=16),
        )
        batch = gold(6)
        await one.begin_batch()
        start = await one.logprobs(batch)
        await one.accumulate(batch)
        await one.step()
        assert one.rank._proximal is not None
        other = TorchLearner(one.rank._proximal.model, LearnerConfig(), recipe.supervised())
        kept, moved = await other.logprobs(batch), await one.logprobs(batch)
        assert all(np.array_equal(a, b) for a, b in zip(kept, start, strict=True))
        assert not any(len(a) and np.array_equal(a, b) for a, b in zip(moved, start, strict=True))
        await one.begin_batch()
        assert all(np.array_equal(a, b) for a, b in zip(await other.logprobs(batch), moved, strict=True))

    asyncio.run(program())


def test_recomputed_activations_give_the_same_adapters() -> None:
    plain, again = learner(), learner(recompute=True)
    for one in (plain, again):
        asyncio.run(train(one, gold(6)))
    found, expected = trained_weights(again.model), trained_weights(plain.model)
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)


def test_in_bfloat16_the_masters_of_the_adapters_are_float32() -> None:
    model = make_small("qwen3", torch.bfloat16)
    add_adapters(model, LORA, seed=1)
    one = learner(model)
    assert {p.dtype for p in trained_weights(model).values()} == {torch.bfloat16}
    assert {master.dtype for master in one.optimizer.state()["masters"].values()} == {torch.float32}
    losses = asyncio.run(train(one, gold(2), steps=2))
    assert losses[1] < losses[0]


def test_a_batcher_on_a_copy_does_not_change_the_learners_adapters() -> None:
    model = adapted()
    batcher = Batcher(copy_of(model), num_slots=2)
    before = {name: value.detach().clone() for name, value in trained_weights(model).items()}
    batcher.load(1, {name: value + 1 for name, value in before.items()})
    assert all(torch.equal(value, before[name]) for name, value in trained_weights(model).items())


def config_for(folder: Path) -> RunConfig:
    changes = {
        "run_dir": folder,
        "learner.lora.rank": 4,
        "algorithm.kl": "loss",
        "algorithm.kl_coefficient": 0.1,
        "warmup.max_steps": 12,
        "warmup.check_every": 12,
        "warmup.learning_rate": 1e-2,
        "pipeline.steps": 8,
        "pipeline.max_lag": 0,
        "checkpoint.keep": 9,
        "checkpoint.every_steps": 1,
    }
    overrides = [f"{key}={value}" for key, value in {**SETTINGS, **changes}.items()]
    return load(ROOT / "recipes/demo.toml", RunConfig, overrides)


def as_if_killed(whole: Path, cut: Path, *, before_step: int) -> int:
    """The run folder as a kill leaves it that comes right after the last checkpoint below this step; which one that is."""
    shutil.copytree(whole, cut)
    (cut / "summary.json").unlink()
    shutil.rmtree(cut / "model")
    lines = (cut / "events.jsonl").read_bytes().splitlines(keepends=True)
    kept = [
        (at, event["version"])
        for at, event in enumerate(map(json.loads, lines))
        if event["kind"] == "checkpoint_sealed" and event["version"] < before_step
    ]
    at, version = kept[-1]
    (cut / "events.jsonl").write_bytes(b"".join(lines[: at + 1]))
    for folder in (cut / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > version:
            shutil.rmtree(folder)
    return int(version)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("millstream.run.checkpoint.MAX_HELD", 1e9)  # a checkpoint at every step, or nearly
        run(config_for(folder))
    return folder


@pytest.mark.parametrize("before_step", [1, 8])
def test_a_killed_run_with_a_warm_up_goes_on_and_ends_with_the_same_bits(
    before_step: int, whole: Path, tmp_path: Path
) -> None:
    """The warm-up trains the adapters, too: what a checkpoint holds is all that differs from the base."""
    version = as_if_killed(whole, tmp_path / "cut", before_step=before_step)
    assert (version == 0) == (before_step == 1)
    resume(tmp_path / "cut")
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        ours, theirs = (load_file(folder / "model" / name) for folder in (tmp_path / "cut", whole))
        assert ours.keys() == theirs.keys() and all(np.array_equal(ours[key], theirs[key]) for key in ours)
    assert audit(tmp_path / "cut").is_clean


def test_a_runs_checkpoints_are_small_and_its_model_is_measured_without_adapters(whole: Path) -> None:
    kept = (whole / "checkpoints/step-000008/learner.pt").stat().st_size
    assert kept < 3 * (whole / "model/adapter/adapter_model.safetensors").stat().st_size + 100_000
    assert "lora" not in (whole / "model/config.json").read_text()
    config = load(whole / "config.toml", RunConfig)
    model = structs.replace(config.model, path=str(whole / "model"), tiny=None)
    found = evaluate(structs.replace(config, model=model))
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["held_out_loss_after"] < 0.9 * summary["held_out_loss_before"], "adapters alone learn"
    assert found.accuracy == summary["accuracy_after"] and found.greedy == summary["greedy_after"]
    with pytest.raises(ConfigError, match=r"--set learner\.lora= --set warmup="):
        resume(whole)


def test_what_is_wrong_with_the_table_is_said_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="rank must be at least 1, alpha above 0"):
        LoraConfig(rank=0)
    config = RunConfig(model=ModelConfig(tiny=TinyConfig()), learner=LearnerConfig(lora=LORA))
    check_combinations(config)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("millstream.model.lora.find_spec", lambda name: None if name == "peft" else find_spec(name))
    with pytest.raises(ConfigError, match=r"pip install millstream\[lora\]"):
        check_combinations(config)
