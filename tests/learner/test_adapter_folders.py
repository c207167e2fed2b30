"""Adapters of other programs: a folder that peft wrote is trained further, and what is exported is a folder that peft reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from msgspec import structs
from transformers import AutoModelForCausalLM, PreTrainedModel

from millstream import DataConfig, ModelConfig, RunConfig, evaluate, export, train
from millstream.engine import EngineConfig
from millstream.errors import ConfigError, ModelError
from millstream.learner import LearnerConfig
from millstream.model.adapters import add_adapters, lora_of, trained_weights
from millstream.model.load import load_model, save_model
from millstream.model.locate import check_path
from millstream.model.lora import LoraConfig, check_lora
from millstream.model.tiny import TinyShape, character_tokenizer, tiny_model
from millstream.pipeline.rollouts import RolloutConfig
from millstream.pipeline.schedule import PipelineConfig
from millstream.run.build import build_model
from millstream.run.checkpoint import CheckpointConfig

TOKENS = torch.arange(3, 15)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tokenizer = character_tokenizer("0123456789>ab")
    save_model(tiny_model(TinyShape(hidden=32, layers=2, heads=2, context=32), tokenizer, seed=3), tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As peft writes it, trained elsewhere: B is not 0. Its targets are a pattern."""
    return written(base, tmp_path_factory.mktemp("adapter"), target_modules=r".*\.(q_proj|down_proj)")


def written(base: Path, folder: Path, **changes: Any) -> Path:
    lora = peft.LoraConfig(
        **{"r": 6, "lora_alpha": 9, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **changes}
    )
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder


def logits(model: PreTrainedModel | peft.PeftModel) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def onto(base: Path, adapter: Path) -> peft.PeftModel:
    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)


def config_in(folder: Path, base: Path, adapter: Path) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path=str(base), device="cpu"),
        data=DataConfig(holdout=4),
        run_dir=str(folder / "run"),
        learner=LearnerConfig(learning_rate=1e-2, lora=LoraConfig(path=str(adapter))),
        rollout=RolloutConfig(group_size=2, max_tokens=4),
        pipeline=PipelineConfig(steps=2, groups_per_step=2, filter_zero_signal=False),
        checkpoint=CheckpointConfig(every_steps=1),
        engine=EngineConfig(process=False),
    )


def test_a_model_with_an_adapter_of_peft_is_what_peft_makes_of_it(base: Path, adapter: Path) -> None:
    model, _ = build_model(ModelConfig(path=str(base), device="cpu"), seed=0, lora=LoraConfig(path=str(adapter)))
    model.set_attn_implementation("eager")
    assert lora_of(model) == LoraConfig(rank=6, alpha=9.0, targets=("down_proj", "q_proj"))
    assert torch.allclose(logits(model), logits(onto(base, adapter)), atol=1e-5)
    assert not torch.allclose(logits(model), logits(AutoModelForCausalLM.from_pretrained(base)), atol=1e-2)


def test_an_adapter_is_trained_further_and_what_is_exported_is_read_by_peft(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    def reward(completions: list[str], **columns: Any) -> list[float]:
        return [len(set(completion)) / 4 for completion in completions]

    records = [{"prompt": f"{n}>"} for n in range(20)]
    config = config_in(tmp_path, base, adapter)
    before = evaluate(config, reward=reward, data=records)
    result = train(config, reward=reward, data=records)
    assert before.greedy == result.greedy_before, "an evaluation has the adapter that training starts from"
    export(result.run_dir, tmp_path / "whole")
    export(result.run_dir, tmp_path / "adapter", adapter_only=True)
    found = logits(onto(base, tmp_path / "adapter"))
    assert torch.allclose(found, logits(AutoModelForCausalLM.from_pretrained(tmp_path / "whole")), atol=1e-4)
    assert not torch.allclose(found, logits(onto(base, adapter)), atol=1e-4), "it was trained"
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        base
    )
    whole = structs.replace(config, learner=LearnerConfig(), run_dir=str(tmp_path / "other"))
    other = train(whole, reward=reward, data=records)
    with pytest.raises(ConfigError, match=r"trained the whole model: there is no adapter to export"):
        export(other.run_dir, tmp_path / "none", adapter_only=True)


def test_what_cannot_be_started_from_is_refused_with_what_was_expected(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"is an adapter of peft's, not a model. .*--set learner.lora.path="):
        check_path(str(adapter))
    with pytest.raises(ModelError, match=r"is not the folder of an adapter: no adapter_model.safetensors"):
        check_lora(LoraConfig(path=str(base)))
    with pytest.raises(ModelError, match="has use_dora = True: expected plain LoRA"):
        check_lora(LoraConfig(path=str(written(base, tmp_path / "dora", use_dora=True))))
    with pytest.raises(ConfigError, match=r"learner.lora.rank = 8, and .* has 6: leave it out"):
        check_lora(LoraConfig(path=str(adapter), rank=8))
    tokenizer = character_tokenizer("01")
    other = tiny_model(TinyShape(hidden=64, layers=2, heads=2, context=32), tokenizer, seed=3)
    with pytest.raises(ModelError, match=r"is of another model: .*lora_A.* has the shape .* there and .* here"):
        add_adapters(other, LoraConfig(path=str(adapter)), seed=0)
    assert trained_weights(load_model(str(base), device="cpu", dtype=torch.float32))
