"""docs/environments.md: what it shows runs, and is as short as it says."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millstream.cli.main import app
from millstream.config import load
from millstream.env.config import EnvironmentConfig
from millstream.env.registry import Environments, Hosted
from millstream.env.resolve import BUILT_IN_ENVIRONMENTS, find_environment
from millstream.run.check import check_combinations
from millstream.run.config import RunConfig
from millstream.run.env_check import WHAT_TO_DO
from millstream.types import Task
from support.talk import Scripted, text_with

DOCS = (Path(__file__).parents[2] / "docs/environments.md").read_text()
GUESS, SPLIT, NIM = re.findall(r"```python\n(.*?)```", DOCS, flags=re.S)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "guess.py").write_text(GUESS)
    (tmp_path / "nim.py").write_text(NIM)
    (tmp_path / "split.py").write_text(SPLIT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_environment_of_the_docs_is_short_and_fit(folder: Path) -> None:
    assert len(GUESS.splitlines()) < 60
    result = CliRunner().invoke(app, ["env", "check", "guess.py:Guess"])
    assert result.exit_code == 0 and re.fullmatch(r"Guess: fit \(8 tasks, \d+ episodes\)\n", result.output), (
        result.output
    )


def test_the_config_of_the_docs_is_valid(folder: Path) -> None:
    text, *others = re.findall(r"```toml\n(.*?)```", DOCS, flags=re.S)
    (folder / "run.toml").write_text(text)
    config = load(folder / "run.toml", RunConfig)
    check_combinations(config)
    assert find_environment(config.environment[0]).make_tasks is not None
    for other in others:  # of libraries that may not be installed
        (folder / "run.toml").write_text(f'{other}\n[model]\npath = "m"\n')
        assert load(folder / "run.toml", RunConfig).environment[0].use in BUILT_IN_ENVIRONMENTS


def test_what_the_check_finds_in_a_broken_one_is_what_the_docs_show(folder: Path) -> None:
    broken = GUESS.replace("reward=1.0", "reward=0.5").replace("self.answer = int(", "Guess.answer = int(")
    (folder / "broken.py").write_text(broken)
    result = CliRunner().invoke(app, ["env", "check", "broken.py:Guess"])
    (shown,) = re.findall(r"\$ millstream env check broken.py:Guess\n(.*?)```", DOCS, flags=re.S)
    without_count = [re.sub(r"\d+ episodes", "episodes", text) for text in (shown, result.output)]
    assert result.exit_code == 1 and without_count[0] == without_count[1]


def test_two_copies_of_the_model_play_nim_against_each_other(folder: Path) -> None:
    kind = find_environment(EnvironmentConfig(use="nim.py:nim"))
    assert kind.make_tasks is not None and kind.environment is not None
    text = text_with(None)
    environments = Environments([Hosted(kind, kind.environment, text)])
    for says, rewards in ((["1", "3", "1"], [1.0, 0.0]), (["1", "4"], [1.0, 0.0]), (["3", "2"], [0.0, 1.0])):
        scripted = Scripted(text, says, task=kind.make_tasks(1, 0)[0], max_parts=2)
        parts = scripted.episode.finish(asyncio.run(environments.rollout(scripted.episode)))  # type: ignore[arg-type]
        assert [part.reward for part in parts] == rewards and [part.agent for part in parts] == [0, 1]
    result = CliRunner().invoke(app, ["env", "check", "nim.py:nim", "--tasks", "3"])
    assert result.exit_code == 0 and "note no-gold" in result.output, result.output


def test_the_split_reward_of_the_docs_is_that_of_its_turns_and_agents(folder: Path) -> None:
    kind = find_environment(EnvironmentConfig(use="split.py:draft_and_review"))
    assert kind.environment is not None
    text = text_with(None)
    environments = Environments([Hosted(kind, kind.environment, text)])
    scripted = Scripted(text, ["News!", "yes"], task=Task(id="1", prompt="?"), max_parts=2)
    parts = scripted.episode.finish(asyncio.run(environments.rollout(scripted.episode)))  # type: ignore[arg-type]
    assert [(part.reward, part.turn_rewards.tolist()) for part in parts] == [(1.0, [0.5]), (1.0, [0.0])]


def test_every_finding_every_key_and_every_built_in_environment_is_documented() -> None:
    for name in (*WHAT_TO_DO, *BUILT_IN_ENVIRONMENTS, *EnvironmentConfig.__struct_fields__):
        assert f"`{name}`" in DOCS, name
