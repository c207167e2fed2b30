"""Environments of verifiers 0.1, with the real package (`make test-envs`)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from millstream.env.resolve import make_tasks
from millstream.errors import ConfigError, RequestRefused
from millstream.run.env_check import run_env_check
from support.hosted import found, play
from support.talk import CHATML, HERMES, Scripted, text_with

PACKAGE = '''
import verifiers as vf
from datasets import Dataset

ROWS = [{"question": "mill plus river", "answer": "42"}, {"question": "river", "answer": "30"}]
NUMBERS = {"mill": 12, "river": 30}


def right(completion, answer) -> float:
    return float((completion[-1].content or "").strip() == answer)


def look_up(name: str) -> int:
    """Look up a number."""
    return NUMBERS[name]


def count(step: int, calls: list) -> str:
    """Count calls."""
    calls.append(step)
    return str(len(calls))


class Counting(vf.StatefulToolEnv):
    def __init__(self, **options):
        super().__init__(**options)
        self.add_tool(count, args_to_skip=["calls"])

    async def setup_state(self, state, **others):
        state["calls"] = []
        return await super().setup_state(state, **others)

    def update_tool_args(self, tool_name, tool_args, messages, state, **others):
        return {**tool_args, "calls": state["calls"]}


class Hints(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **others):
        return [vf.UserMessage(content="Again.")]

    @vf.stop
    async def is_right(self, state) -> bool:
        said = state["trajectory"]
        return bool(said) and (said[-1]["completion"][-1].content or "").strip() == state["answer"]


def load_environment(kind: str = "tools"):
    options = {"dataset": Dataset.from_list(ROWS), "rubric": vf.Rubric(funcs=[right]), "max_turns": 4}
    if kind == "tools":
        return vf.ToolEnv(tools=[look_up], **options)
    return Counting(tools=[], **options) if kind == "state" else Hints(system_prompt="Be brief.", **options)
'''


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verifiers = pytest.importorskip("verifiers")
    if not hasattr(verifiers, "ToolEnv"):
        pytest.skip("a later version of verifiers")
    (tmp_path / "classic_sums.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))


def played(kind: str, says: list[str], template: str) -> tuple[float, Scripted]:
    environment = found("verifiers_classic", args={"id": "classic-sums", "options": {"kind": kind}})
    task, *_ = make_tasks([environment], 2, 0)
    return asyncio.run(play(environment, task, says, template))


def answers_in(scripted: Scripted) -> list[str]:
    shown = scripted.shown(scripted.requests[-1].tokens)
    return [part.split("</tool_response>")[0] for part in shown.split("<tool_response>")[1:]]


def test_a_tool_environment_calls_its_tools_and_gives_its_reward(package: None) -> None:
    both = call("look_up", '{"name": "mill"}') + call("look_up", '{"name": "river"}')
    reward, scripted = played("tools", [both, "42"], HERMES)
    assert reward == 1.0 and answers_in(scripted) == ["12", "30"]
    (rollout,) = scripted.episode.finish(reward)
    assert scripted.shown(rollout.tokens[rollout.loss_mask]) == f"{both}<|im_end|>42<|im_end|>"
    assert "Look up a number." in scripted.shown(rollout.tokens)


def test_a_call_that_goes_wrong_is_answered(package: None) -> None:
    reward, scripted = played("tools", [call("look_up", '{"name": "sky"}'), "41"], HERMES)
    assert reward == 0.0 and "sky" in answers_in(scripted)[0]


def test_a_tool_environment_may_keep_state(package: None) -> None:
    reward, scripted = played("state", [call("count", '{"step": 1}'), call("count", '{"step": 2}'), "42"], HERMES)
    assert reward == 1.0 and answers_in(scripted) == ["1", "2"]


def test_an_environment_of_several_turns_continues_one_sequence(package: None) -> None:
    reward, scripted = played("hints", ["40", "41", "42"], CHATML)
    (rollout,) = scripted.episode.finish(reward)
    shown = scripted.shown(rollout.tokens)
    assert reward == 1.0 and shown.count("Be brief.") == 1 and shown.count("Again.") == 2
    assert scripted.shown(rollout.tokens[rollout.loss_mask]) == "40<|im_end|>41<|im_end|>42<|im_end|>"


def test_what_is_refused_or_not_there_is_named(package: None) -> None:
    with pytest.raises(ConfigError, match="verifiers cannot load 'no-such'"):
        found("verifiers_classic", args={"id": "no-such"})
    environment = found("verifiers_classic", args={"id": "classic-sums"})
    (task,) = make_tasks([environment], 1, 0)
    assert environment.environment is not None
    scripted = Scripted(text_with(HERMES), ["a"], task=task, room=1)
    with pytest.raises(RequestRefused):
        asyncio.run(environment.environment.rollout(scripted.context))  # type: ignore[arg-type]


def test_env_check_calls_the_tools(package: None) -> None:
    (report,) = run_env_check("verifiers_classic", ['id="classic-sums"'], None, num_tasks=2)
    findings: dict[str, Any] = {one.name: one.what for one in report.findings}
    assert report.is_fit and "look_up" not in findings, findings
