"""verifiers' environments with tools and several turns, with the real package (`make test-envs`)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from millstream.env.resolve import make_tasks
from support.hosted import found, play
from support.talk import HERMES

TOOLSET = """
import verifiers.v1 as vf


class Seen(vf.State):
    count: int = 0


class Notes(vf.Toolset[vf.ToolsetConfig, Seen]):
    TOOL_PREFIX = "notes"

    @vf.tool
    def look_up(self, name: str) -> str:
        'Look up a number.'
        if name == "nobody":
            raise ValueError("there is no nobody")
        return {"mill": "12", "river": "30"}.get(name, "unknown")

    @vf.tool
    def count(self) -> int:
        'How often this was called.'
        self.state.count += 1
        return self.state.count


if __name__ == "__main__":
    Notes.run()
"""
TASKSET = """
import verifiers.v1 as vf
from note_tools import Notes, Seen


class Data(vf.TaskData):
    answer: str = ""


class Add(vf.Task[Data, Seen, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Notes(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, task, trace) -> float:
        return float(trace.last_reply.strip() == task.answer)


class Sums(vf.Taskset[Add, vf.TasksetConfig]):
    def load(self):
        yield Add(Data(prompt="mill plus river", answer="42"), self.config.task)


__all__ = ["Sums"]
"""


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@pytest.fixture
def sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers.v1")
    (tmp_path / "note_tools.py").write_text(TOOLSET)
    (tmp_path / "note_sums.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")


def test_tools_of_verifiers_are_called_and_what_the_model_sampled_is_kept(sums: None) -> None:
    kind = found("verifiers", args={"taskset": "note-sums"})
    (task,) = make_tasks([kind], 1, 0)
    says = [
        call("notes_look_up", '{"name": "mill"}') + call("notes_look_up", '{"name": "river"}'),
        call("notes_count"),
        call("notes_count"),
        "42",
    ]
    reward, scripted = asyncio.run(play(kind, task, says, HERMES))
    assert reward == 1.0
    (rollout,) = scripted.episode.finish(reward)
    assert scripted.shown(rollout.tokens[rollout.loss_mask]) == "<|im_end|>".join([*says, ""])
    shown = scripted.shown(rollout.tokens)
    answers = [part.split("</tool_response>")[0] for part in shown.split("<tool_response>")[1:]]
    assert answers == ["12", "30", "1", "2"], "tools may keep state"
    assert "Look up a number." in shown.split("<|im_end|>")[0], "the model is told of them"


def test_calls_of_verifiers_tools_that_go_wrong_are_data(sums: None) -> None:
    kind = found("verifiers", args={"taskset": "note-sums"})
    (task,) = make_tasks([kind], 1, 0)
    says = ["<tool_call>oh</tool_call>", call("fly"), call("notes_look_up", '{"name": "nobody"}'), "41"]
    reward, scripted = asyncio.run(play(kind, task, says, HERMES))
    shown = scripted.shown(scripted.requests[-1].tokens)
    assert reward == 0.0 and len(scripted.said) == 4
    assert "Error: this is not a call of a tool (not JSON" in shown
    assert "Error: there is no tool 'fly'. Tools: notes_count, notes_look_up" in shown
    assert "there is no nobody" in shown
