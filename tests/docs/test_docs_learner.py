"""docs/learner.md: what it shows runs, and what it says of sizes is so."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from millstream.cli.main import app
from millstream.config import load
from millstream.events import Span
from millstream.events.sinks import read_events
from millstream.learner import LearnerConfig, ProximalConfig
from millstream.model.adapters import trained_weights
from millstream.model.load import save_model
from millstream.model.lora import LoraConfig
from millstream.model.tiny import TinyShape, character_tokenizer, tiny_model
from millstream.run.build import build_model
from millstream.run.check import check_combinations
from millstream.run.config import RunConfig
from support.simulated import World, simulate

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs/learner.md").read_text()
PROXIMAL, LORA, SUPERVISED = re.findall(r"```toml\n(.*?)```", DOCS, flags=re.S)


@pytest.mark.parametrize("lora", ["", LORA], ids=["whole", "lora"])
def test_the_config_for_pairs_of_ones_own_trains_with_and_without_adapters(
    lora: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = character_tokenizer("0123456789+=")
    shape = TinyShape(hidden=16, layers=1, heads=2, context=32)
    save_model(tiny_model(shape, tokenizer, seed=0), tokenizer, Path("base"))
    pairs = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(24)]
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    Path("sft.toml").write_text(f"{SUPERVISED}\n{lora}")
    faster = ["--set", "warmup.learning_rate=0.02", "--set", "engine.process=false", "--set", "run_dir=run"]
    result = CliRunner().invoke(app, ["train", "sft.toml", "--quiet", *faster])
    assert result.exit_code == 0, result.output
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["held_out_loss_after"] < summary["held_out_loss_before"]
    assert Path("run/model/adapter/adapter_config.json").exists() == bool(lora)


def test_the_config_of_the_proximal_policy_trains_beside_a_critic_and_a_reference(tmp_path: Path) -> None:
    tables = tomllib.loads(PROXIMAL)
    assert tables["proximal"].keys() == set(ProximalConfig.__struct_fields__), "every key is shown"
    shown = [f"{table}.{key}={value}" for table, keys in tables.items() for key, value in keys.items()]
    changes = ["algorithm={}", *shown]
    check_combinations(load(ROOT / "recipes/demo.toml", RunConfig, changes))
    few = [
        "pipeline.steps=2",
        "pipeline.groups_per_step=8",
        "data.size=200",
        "data.holdout=0",
        "warmup=",
        "engine.process=false",
    ]
    others = [
        "algorithm.advantage=gae",
        "pipeline.filter_zero_signal=false",
        "algorithm.kl=loss",
        "algorithm.kl_coefficient=0.1",
    ]
    changes += [*few, *others, "proximal.device=cpu", f"run_dir={tmp_path / 'run'}"]
    words = [word for change in changes for word in ("--set", change)]
    result = CliRunner().invoke(app, ["train", str(ROOT / "recipes/demo.toml"), "--quiet", *words])
    assert result.exit_code == 0, result.output
    spans = [event for event in read_events(tmp_path / "run/events.jsonl") if isinstance(event, Span)]
    assert {"proximal", "critic", "values", "reference"} <= {span.worker for span in spans}


def test_what_it_says_of_the_virtual_clock_is_so() -> None:
    alone = World(
        steps=10, groups_per_step=8, group_size=4, mini_batches=4, max_lag=4, slots=64, mean_tokens=100,
        filter_zero_signal=False, train_token_s=1e-3, score_token_s=1e-3,
    )  # fmt: skip
    beside = simulate(replace(alone, has_proximal=True))
    seconds = simulate(alone).seconds
    scoring = sum(span.seconds for span in beside.sink.of(Span) if span.worker == "proximal")
    said = re.findall(
        r"ten steps take ([\d.]+) s with scoring, ([\d.]+) s without, and ([\d.]+) s", " ".join(DOCS.split())
    )
    assert said == [(f"{beside.seconds:.1f}", f"{seconds:.1f}", f"{seconds + scoring:.1f}")]


def test_the_sizes_of_what_is_sent_are_those_of_the_demo() -> None:
    config = load(ROOT / "recipes/demo.toml", RunConfig)

    def num_bytes(lora: LoraConfig | None) -> int:
        model, _ = build_model(config.model, seed=0, lora=lora)
        return sum(value.numel() * value.element_size() for value in trained_weights(model).values())

    said = [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) bytes", DOCS)]
    assert said == [num_bytes(None), num_bytes(LoraConfig(rank=8))]


def test_every_key_of_the_table_but_those_of_the_optimizer_is_explained() -> None:
    usual = {"learning_rate", "schedule", "warmup_steps", "weight_decay", "max_grad_norm"}
    keys = set(LearnerConfig.__struct_fields__) - usual - {"lora"}
    assert [key for key in sorted(keys) if f"`{key}`" not in DOCS] == []
