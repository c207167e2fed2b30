"""Checkpoints with code of their own, or with pickled weights: nothing of them runs unless the config says so."""

from __future__ import annotations

import ast
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import millstream
from house import parsed
from millstream.cli.main import app
from millstream.engine import EngineConfig
from millstream.engine.native.process import build_batcher, engine_setup
from millstream.engine.vllm.arguments import VllmSetup, engine_arguments
from millstream.engine.vllm.config import VllmConfig
from millstream.errors import ModelError
from millstream.model.load import load_model, load_tokenizer, model_weights, save_model
from millstream.model.spec import described, model_from
from millstream.model.tiny import TinyShape, character_tokenizer, tiny_model
from millstream.run.build import build_model
from millstream.run.config import ModelConfig

CODE = """
import pathlib
from transformers import Qwen3Config, Qwen3ForCausalLM

pathlib.Path({marker!r}).touch()


class OwnConfig(Qwen3Config):
    model_type = {name!r}


class OwnModel(Qwen3ForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tokenizer = character_tokenizer("0123456789+=")
    save_model(
        tiny_model(TinyShape(hidden=16, layers=1, heads=2, context=32), tokenizer, seed=0),
        tokenizer,
        tmp_path / "model",
    )
    return tmp_path / "model"


@pytest.fixture
def with_code(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model type that transformers does not know. Its code leaves a file beside the folder when it is run."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(checkpoint.parent / "modules"))
    name = f"own_{os.urandom(4).hex()}"
    config = json.loads((checkpoint / "config.json").read_text())
    auto_map = {"AutoConfig": f"{name}.OwnConfig", "AutoModelForCausalLM": f"{name}.OwnModel"}
    config |= {"model_type": name, "architectures": ["OwnModel"], "auto_map": auto_map}
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / f"{name}.py").write_text(CODE.format(marker=str(marker_of(checkpoint)), name=name))
    return checkpoint


def marker_of(checkpoint: Path) -> Path:
    return checkpoint.parent / "the code was run"


def run_command(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), input="y\n" * 50)


def test_code_of_a_folder_is_not_run_and_not_asked_about(with_code: Path) -> None:
    served = run_command("serve", str(with_code))
    shown = " ".join(served.output.split())
    assert served.exit_code == 1 and "--trust-remote-code" in shown and "model.trust_remote_code=true" in shown
    assert "[y/N]" not in shown and "Traceback" not in shown
    assert not marker_of(with_code).exists()


def test_one_line_names_the_code_and_what_to_type(with_code: Path) -> None:
    for load in (load_model, load_tokenizer):
        try:
            load(with_code)
        except ModelError as error:
            assert "\n" not in str(error) and ".py" in str(error) and "--set model.trust_remote_code=true" in str(error)
        else:
            assert load is load_tokenizer, "a tokenizer that needs no code is loaded without it"
    with pytest.raises(ModelError, match="trust_remote_code"):
        build_model(ModelConfig(path=str(with_code), device="cpu"), seed=0)
    assert not marker_of(with_code).exists()


def test_code_that_is_trusted_is_run_here_and_in_the_processes_that_get_the_model(with_code: Path) -> None:
    model, tokenizer = build_model(ModelConfig(path=str(with_code), device="cpu", trust_remote_code=True), seed=0)
    assert type(model).__name__ == "OwnModel" and marker_of(with_code).exists()
    again = model_from(described(model), dtype="float32", lora=None)
    again.load_state_dict(model.state_dict())
    assert type(again).__name__ == "OwnModel"
    setup = engine_setup(model, EngineConfig(slots=2), tokenizer, device="cpu", first=None)  # type: ignore[arg-type]
    assert build_batcher(setup, model_weights(model)) is not None
    save_model(model, tokenizer, with_code.parent / "saved")
    saved = load_model(with_code.parent / "saved", trust_remote_code=True)
    assert torch.equal(saved.lm_head.weight, model.lm_head.weight)


def test_a_model_without_code_is_described_without_code(checkpoint: Path) -> None:
    model = load_model(checkpoint)
    assert not [name for name in described(model) if name.endswith(".py")]


class Evil:
    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self._marker,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin"])
def test_a_pickle_is_not_read_and_one_line_says_how_to_convert_it(checkpoint: Path, name: str) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / name).write_bytes(pickle.dumps(Evil(marker_of(checkpoint))))
    served = run_command("serve", str(checkpoint))
    assert served.exit_code == 1 and name in served.output and "Traceback" not in served.output
    for trusted in (False, True):
        config = ModelConfig(path=str(checkpoint), device="cpu", trust_remote_code=trusted)
        with pytest.raises(ModelError, match=r"pickle.*safetensors.*save_pretrained") as refused:
            build_model(config, seed=0)
        assert "\n" not in str(refused.value)
        with pytest.raises(ModelError, match=r"no file named model\.safetensors"):
            load_model(checkpoint, trust_remote_code=trusted)
    assert not marker_of(checkpoint).exists()


def test_a_pickle_beside_safetensors_is_ignored(checkpoint: Path) -> None:
    (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(marker_of(checkpoint))))
    build_model(ModelConfig(path=str(checkpoint), device="cpu"), seed=0)
    assert not marker_of(checkpoint).exists()


def test_vllm_is_told_not_to_trust() -> None:
    fields = {
        "files": {},
        "first": None,
        "slots": 1,
        "prefill_tokens": 1,
        "max_length": 8,
        "num_words": 4,
        "dtype": "float32",
    }
    setup = VllmSetup(**fields, is_cpu=True, vllm=VllmConfig())  # type: ignore[arg-type]
    assert engine_arguments(setup, Path("f"))["trust_remote_code"] is False


def test_every_call_that_could_run_code_says_whether_it_may() -> None:
    calls = [
        (path, node)
        for path in Path(millstream.__file__).parent.rglob("*.py")
        for node in ast.walk(parsed(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("from_pretrained", "from_config", "load_dataset")
    ]
    assert len(calls) >= 5
    for path, call in calls:
        assert "trust_remote_code" in [one.arg for one in call.keywords], f"{path}:{call.lineno}"
