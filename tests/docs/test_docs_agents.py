"""docs/agents.md: its agent and its tables are those of the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from millstream.config import convert
from millstream.env.agent import AgentConfig
from millstream.env.config import EnvironmentConfig
from millstream.env.resolve import find_environment
from support.agents import Model, play

DOCS = (Path(__file__).parents[2] / "docs/agents.md").read_text()
AGENT, TEAM = re.findall(r"```python\n(.*?)```", DOCS, flags=re.S)
FUNCTION, COMMAND, NAMED = (
    tomllib.loads(text)["environment"][0] for text in re.findall(r"```toml\n(.*?)```", DOCS, flags=re.S)
)


def test_the_agent_of_the_docs_is_trained_on_both_of_its_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_agent.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    model = Model("5", "4")
    (part,) = play(FUNCTION["args"], model).parts
    assert part.reward == 1.0 and model.text.decode(part.tokens[part.loss_mask].tolist()) == "54"
    assert find_environment(convert(COMMAND, EnvironmentConfig, where="environment")).environment is None


def test_the_agents_of_the_docs_have_rewards_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_agent.py").write_text(f"from openai import OpenAI\n\n{TEAM}")
    monkeypatch.chdir(tmp_path)
    planner, solver = play(NAMED["args"], Model("add", "4")).parts
    assert (planner.agent, planner.reward, solver.agent, solver.reward) == (0, 1.0, 1, 1.0)


def test_every_argument_of_an_agent_is_in_the_docs() -> None:
    for name in AgentConfig.__struct_fields__:
        assert f"| `{name}` |" in DOCS, name
