"""The check of environments: every finding has a planted environment that shows it, and one that is fit has none."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millstream.cli.main import app
from millstream.env.bytes_text import ByteText
from millstream.env.config import EnvironmentConfig
from millstream.env.resolve import find_environment
from millstream.errors import ConfigError
from millstream.run.env_check import NOTES, WHAT_TO_DO, EnvironmentReport, check_environment
from millstream.types import Message

BEGIN = """
import asyncio, itertools, math, random, time
from millstream.env import Step
from millstream.types import Task

class Game:
    is_quick = True
    max_turns = 4

    @staticmethod
    def tasks(num, seed):
        return [Task(id=str(i), prompt="p", answer=str(i)) for i in range(num)]

    @staticmethod
    def gold(task):
        return ["no", task.answer]

    def reset(self, task, seed):
        self.answer, self.rng = task.answer, random.Random(seed)
        return f"{self.rng.random()}?"

    def step(self, action):
        return Step(observation="more?", reward=float(action == self.answer), is_done=action == self.answer)
"""


def with_tool(first: str, result: str) -> tuple[str, str]:
    tool = f"\n    def look(self, name: str, limit: int = 3):\n        {first}\n        return {result}\n\n"
    return "    max_turns = 4\n", f"    max_turns = 4\n    tools = property(lambda self: [self.look])\n{tool}"


PLANTED = {
    "no-tasks": ("range(num)]", "range(0)]"),
    "duplicate-ids": ("Task(id=str(i)", "Task(id=str(i // 2)"),
    "task-without-id": ("Task(id=str(i)", "Task(id=str(i or '')"),
    "raises": ('return Step(observation="more?"', 'int(action or 0); return Step(observation="more?"'),
    "empty-observation": ('observation="more?"', 'observation=""'),
    "reward-not-finite": ("float(action == self.answer)", "math.inf"),
    "gold-below-one": ("float(action == self.answer)", "0.7 * (action == self.answer)"),
    "not-repeatable": ("random.Random(seed)", "random.Random()"),
    "shared-state": ("self.answer, self.rng =", "Game.answer, self.rng ="),
    "blocks": ('return Step(observation="more?"', 'time.sleep(0.1); return Step(observation="more?"'),
    "too-slow": (
        "    def step(self, action):\n",
        "    async def step(self, action):\n        await asyncio.sleep(1)\n",
    ),
    "reward-out-of-range": (
        "is_done=action",
        "is_done=action",
        "float(action == self.answer)",
        "2.0 * (action == 'x') - 1",
    ),
    "no-gold": ('return ["no", task.answer]', "return []"),
    "tool-breaks": with_tool("'Look.'", "b'12'"),
    "tool-error": with_tool("'Look.'", "{}[name]"),
    "tool-undocumented": with_tool("pass", "name"),
    "not-in-a-process": ("import asyncio,", "import os\nassert os.getpid() == PID\nimport asyncio,"),
    "never-ends": (
        "class Game:",
        "class Game:\n    async def rollout(self, context):\n        while True:\n            await context.ask('more?')\n\n",
        "def reset(",
        "def not_reset(",
    ),
}


def checked(path: Path, source: str, num_tasks: int = 3, block_s: float = 1.0, **config: Any) -> EnvironmentReport:
    path.write_text(source)
    kind = find_environment(EnvironmentConfig(use=f"{path}:Game", step_timeout_s=0.5, **config))
    assert kind.make_tasks is not None
    return asyncio.run(check_environment(kind, kind.make_tasks(num_tasks, 0), block_s=block_s))


def test_every_finding_is_planted_and_has_something_to_do() -> None:
    assert set(PLANTED) == set(WHAT_TO_DO) and set(NOTES) <= set(PLANTED)


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_found_by_name(tmp_path: Path, name: str) -> None:
    import os

    source, changes = BEGIN, PLANTED[name]
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in source
        source = source.replace(old, new).replace("PID", str(os.getpid()))
    num_tasks = 1 if name in ("blocks", "too-slow") else 3
    block_s = 0.08 if name == "blocks" else 1.0  # a busy machine makes the event loop late, too
    verdict = checked(tmp_path / "game.py", source, num_tasks, block_s, process=name == "not-in-a-process")
    found = {finding.name: finding for finding in verdict.findings}
    assert name in found, found
    assert found[name].what and found[name].do == WHAT_TO_DO[name]
    assert verdict.is_fit == (set(found) <= set(NOTES))
    others = {"reward-out-of-range": {"gold-below-one"}, "too-slow": set(), "never-ends": set()}
    assert set(found) - {name} <= others.get(name, set()), "and nothing else is"


def test_an_environment_that_is_fit_has_no_findings(tmp_path: Path) -> None:
    verdict = checked(tmp_path / "game.py", BEGIN)
    assert verdict.is_fit and not verdict.findings and verdict.num_episodes > 3 * 4
    assert checked(tmp_path / "game.py", BEGIN, process=True).findings == ()


def test_the_command_says_what_it_found_and_ends_with_one(tmp_path: Path) -> None:
    path = tmp_path / "game.py"
    path.write_text(BEGIN)
    result = CliRunner().invoke(app, ["env", "check", f"{path}:Game", "--tasks", "2"])
    assert result.exit_code == 0 and result.output.startswith("Game: fit (2 tasks, "), result.output
    path.write_text(BEGIN.replace(*PLANTED["gold-below-one"]))
    result = CliRunner().invoke(app, ["env", "check", f"{path}:Game", "--tasks", "2"])
    assert result.exit_code == 1
    assert "FOUND gold-below-one: on task '0' gold earns 0.7; it says 'no', '0'\n  what to do: " in result.output
    assert "Game: not fit" in result.output
    as_json = json.loads(CliRunner().invoke(app, ["env", "check", f"{path}:Game", "--tasks", "2", "--json"]).output)
    assert as_json[0]["findings"][0]["name"] == "gold-below-one"


def test_a_config_gives_environments_data_and_rewards(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(BEGIN)
    (tmp_path / "mine.py").write_text("def half(task, completion):\n    return 0.5\n")
    config = tmp_path / "run.toml"
    config.write_text(
        f'[model.tiny]\n[[environment]]\nuse = "frozen_lake"\n[[environment]]\nuse = "{tmp_path / "game.py"}:Game"\n'
    )
    result = CliRunner().invoke(app, ["env", "check", "--config", str(config), "--tasks", "2"])
    assert result.exit_code == 0 and "frozen_lake: fit" in result.output and "Game: fit" in result.output
    result = CliRunner().invoke(app, ["env", "check", "frozen_lake", "--args", "size=11", "--config", str(config)])
    assert result.exit_code == 1 and "frozen_lake: tasks raised ValueError: size must be from 2 to 10" in result.output
    config.write_text('[model.tiny]\n[data]\ntoy = "sort_digits"\n')
    result = CliRunner().invoke(app, ["env", "check", "--config", str(config), "--tasks", "2"])
    assert result.exit_code == 0 and "single_turn: fit" in result.output, result.output
    config.write_text(
        f'[model.tiny]\n[data]\ntoy = "sort_digits"\n[[reward]]\nfunction = "{tmp_path / "mine.py"}:half"\n'
    )
    result = CliRunner().invoke(app, ["env", "check", "single_turn", "--config", str(config), "--tasks", "2"])
    assert result.exit_code == 1 and "FOUND gold-below-one" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "type what to check"),
        (["single_turn"], "environment single_turn makes no tasks of its own: give the data set with --config"),
        (["frozen_lake", "--args", "size"], "--args size: expected KEY=VALUE"),
        (["frozen_lak"], "no environment 'frozen_lak'"),
    ],
)
def test_what_cannot_be_checked_says_what_to_type(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["env", "check", *arguments])
    assert result.exit_code == 1 and message in " ".join(result.output.split())


def test_a_file_without_a_name_in_it_says_which_names_it_has(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(BEGIN + "\nasync def chat(context): ...\ndef helper(): ...\n")
    with pytest.raises(ConfigError, match=r"use \S+/game\.py:Game or \S+/game\.py:chat$"):
        find_environment(EnvironmentConfig(use=str(tmp_path / "game.py")))


def test_a_tokenizer_of_bytes_gives_back_what_it_got() -> None:
    text = ByteText()
    chat = [Message(role="user", content="ä<|im_end|>")]
    assert text.opening(chat)[0] == 257 and text.opening(chat).count(256) == 2
    assert text.decode([*text.encode("häß"), text.end_token]) == "häß"
