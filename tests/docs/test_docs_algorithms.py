"""docs/algorithms.md: what it shows runs, and nothing that there is is missing from it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from millstream.algo import AlgorithmConfig, advantage_of, recipe
from millstream.algo.advantages import ADVANTAGES
from millstream.algo.credit import ADVANTAGE_KEYS
from millstream.algo.presets import LOSSES, PRESETS
from millstream.cli.main import app
from millstream.config import load
from millstream.env.games import toy
from millstream.learner import CriticConfig, ReferenceConfig
from millstream.model.load import save_model
from millstream.model.tiny import TinyShape, character_tokenizer, tiny_model
from millstream.objective import LossInputs
from millstream.run.check import check_combinations
from millstream.run.config import RunConfig
from support.runs import step_rows

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs/algorithms.md").read_text()
(MINE,) = re.findall(r"```python\n(.*?)```", DOCS, flags=re.S)
DAPO, CRITIC, REFERENCE, OWN = re.findall(r"```toml\n(.*?)```", DOCS, flags=re.S)
DEMO = (ROOT / "recipes/demo.toml").read_text()
SMALL = {
    "data.size": 200, "data.holdout": 8, "pipeline.steps": 3, "pipeline.groups_per_step": 4, "pipeline.max_lag": 1,
    "rollout.group_size": 4, "pipeline.filter_zero_signal": "false", "engine.process": "false",
    "evaluation.every_steps": 1000, "warmup": "",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(folder: Path, algorithm: str, **changes: object) -> list[dict[str, float]]:
    """The demo with another [algorithm], three steps of it: its metrics."""
    text = re.sub(r"\[algorithm\]\n.*?\n\n", algorithm + "\n\n", DEMO, flags=re.S)
    (folder / "run.toml").write_text(text)
    settings = {**SMALL, **changes, "run_dir": folder / "run"}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    result = CliRunner().invoke(app, ["train", "run.toml", "--quiet", *words])
    assert result.exit_code == 0, result.output
    audited = CliRunner().invoke(app, ["audit", str(folder / "run")])
    assert audited.exit_code == 0, audited.output
    return step_rows(folder / "run")


def test_a_loss_and_an_advantage_of_ones_own_are_short_and_train(folder: Path) -> None:
    assert len(MINE.splitlines()) < 40
    metrics = run(folder, OWN)
    assert len(metrics) == 3 and all(0 < step["gate"] < 4 and step["max_ratio"] > 0 for step in metrics)
    assert {"effective_sample_size", "behaviour_kl", "behaviour_kl_k1", "ratio"} <= metrics[-1].keys()
    checked = CliRunner().invoke(app, ["train", "run.toml", "--dry-run"])
    assert "checked: the loss mine.py:soft_gate is there" in checked.output, checked.output
    saved = load(folder / "run/config.toml", RunConfig).algorithm
    assert saved.loss == f"{folder}/mine.py:soft_gate", "a run goes on from any folder"


def test_the_loss_of_the_docs_is_reinforce_on_policy_and_the_advantage_is_by_rank(folder: Path) -> None:
    config = AlgorithmConfig(loss="mine.py:soft_gate", advantage="mine.py:by_rank")
    logprobs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    x = LossInputs(logprobs, logprobs.detach(), logprobs.detach(), advantages, torch.zeros(3).long())
    loss = recipe.objective(config, max_tokens=4).token_loss(x).loss_N.sum()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert torch.allclose(gradient, -advantages)
    ranked = advantage_of(config).of_group(np.array([0.0, 100.0, 1.0]))
    assert ranked.tolist() == [-1.0, 1.0, 0.0]


def test_a_whole_batch_an_entropy_and_a_penalty_for_length_work_in_a_real_run(folder: Path) -> None:
    from millstream.events import GroupScored, RolloutEnded
    from millstream.events.sinks import read_events

    algorithm = '[algorithm]\nname = "reinforce_plus_plus"\nentropy_bonus = 0.01\noverlong_buffer = 4'
    metrics = run(folder, algorithm, **{"learner.mini_batches": 2})
    assert len(metrics) == 3 and all(step["entropy"] > 0 for step in metrics)
    events = list(read_events(folder / "run/events.jsonl"))
    ended = {(e.group_id, e.member): e for e in events if isinstance(e, RolloutEnded)}
    scored = [event for event in events if isinstance(event, GroupScored)]
    penalties = []
    for event in scored:
        for member, reward in enumerate(event.rewards):
            rollout = ended[event.group_id, member]
            penalties.append(rollout.reward - reward)
            assert penalties[-1] == pytest.approx(np.clip((rollout.num_sampled - 4) / 4, 0, 1))
    assert scored and max(penalties) == 1.0 and min(penalties) < 1.0


def test_the_config_of_the_docs_is_valid(folder: Path) -> None:
    text = '[model]\npath = "m"\n[data]\npath = "d.jsonl"\n[rollout]\nmax_tokens = 2048\n'
    (folder / "run.toml").write_text(text + DAPO)
    config = load(folder / "run.toml", RunConfig)
    check_combinations(config)
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.3)


def test_the_configs_of_a_critic_and_of_a_reference_train(folder: Path) -> None:
    metrics = run(folder, CRITIC)
    assert len(metrics) == 3 and all(np.isfinite(step["critic_explained"]) for step in metrics)
    assert metrics[0]["critic_value"] == 0.0, "its head says 0 in the beginning"
    shutil.rmtree(folder / "run")
    tokenizer = character_tokenizer(toy.ALPHABET)
    shape = TinyShape(hidden=16, layers=1, heads=2, context=64)
    save_model(tiny_model(shape, tokenizer, seed=3), tokenizer, folder / "checkpoints/base")
    assert all(step["reference_kl"] > 0 for step in run(folder, REFERENCE))


def test_every_name_and_every_key_is_documented() -> None:
    keys = (*AlgorithmConfig.__struct_fields__, *CriticConfig.__struct_fields__, *ReferenceConfig.__struct_fields__)
    for name in (*PRESETS, *LOSSES, *ADVANTAGES, *ADVANTAGE_KEYS, *keys):
        assert f"`{name}`" in DOCS, name


@pytest.mark.parametrize("name", PRESETS)
def test_the_table_says_what_a_name_stands_for(name: str) -> None:
    config = AlgorithmConfig(name=name)  # type: ignore[arg-type]
    (row,) = re.findall(rf"^\| (?:\(none\), )?`{name}` \| (\w+) \| (\w+)[^|]*\| (\w+) \|", DOCS, flags=re.M)
    assert row == (config.advantage, config.loss, config.aggregation)
