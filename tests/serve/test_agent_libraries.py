"""Agents of other libraries (examples/agent_libraries.py), unchanged, against the run's service: token for token, in as many
parts as they have histories. A library that is not installed is skipped: `make test-agents` installs all."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from millstream import imports
from millstream.pipeline.episode import EpisodeResult
from millstream.types import Task
from support.agents import Model, play

FILE = Path(__file__).parents[2] / "examples" / "agent_libraries.py"
PACKAGES = {
    "openai_agents": "agents",
    "openai_agents_chat": "agents",
    "pydantic_ai": "pydantic_ai",
    "langgraph": "langchain_openai",
    "smolagents": "smolagents",
    "mini_swe_agent": "minisweagent",
}
CALL = '<tool_call>{"name":  "add", "arguments": {"a": 1, "b": 2}}</tool_call>'  # two spaces: no library writes it so


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-agents")


def played(name: str, *says: str) -> tuple[EpisodeResult, Model]:
    need(PACKAGES[name])
    task = Task(id="1", prompt="1+2", answer="3")
    model = Model(*says)
    return play({"function": f"{FILE}:{name}"}, model, task=task, limit_s=120.0), model


def sampled(result: EpisodeResult, model: Model) -> list[str]:
    """What the model said, part by part; each turn ends with an end token."""
    assert result.failure is None, result.failure
    raw = [model.text.decode(part.tokens[part.loss_mask].tolist(), is_raw=True) for part in result.parts]
    return [one.replace("<|im_end|>", "/") for one in raw]


@pytest.mark.parametrize("name", ["openai_agents", "openai_agents_chat", "pydantic_ai", "langgraph"])
def test_the_calls_of_an_agent_with_tools_are_one_part_token_for_token(name: str) -> None:
    result, model = played(name, f"so: {CALL}{CALL}", CALL, "3")
    assert sampled(result, model) == [f"so: {CALL}{CALL}/{CALL}/3/"]
    (part,) = result.parts
    last = model.requests[-1].tokens
    assert part.reward == 1.0 and part.tokens[: len(last)].tolist() == list(last)
    assert model.text.decode(part.tokens.tolist()).count("<tool_response>3</tool_response>") == 3


def test_an_agent_that_writes_its_history_anew_begins_a_part_with_each_step() -> None:
    steps = ("I think\n<code>\nx = add(a=1, b=1)\n</code>", "<code>\nfinal_answer(x + 1)\n</code>")
    result, model = played("smolagents", *steps)
    assert sampled(result, model) == [f"{step}/" for step in steps]
    assert [part.reward for part in result.parts] == [1.0, 1.0]


def test_an_answer_that_an_agent_leaves_out_of_its_history_ends_its_part() -> None:
    look = '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
    end = look.replace("ls", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; expr 1 + 2")
    result, model = played("mini_swe_agent", f"so: {look}", "no call", end)
    assert sampled(result, model) == [f"so: {look}/no call/", f"{end}/"]
    assert result.parts[0].reward == 1.0


@pytest.mark.parametrize("name", PACKAGES)
def test_a_perfect_player_of_each_example_gets_the_reward(name: str) -> None:
    agent: Any = imports.load_function(f"{FILE}:{name}")
    need(PACKAGES[name])
    task = next(agent.tasks(1, 0))
    result = play({"function": f"{FILE}:{name}"}, Model(*agent.gold(task)), task=task, limit_s=120.0)
    assert result.failure is None and [part.reward for part in result.parts] == [1.0], result.failure


SUB_AGENTS = """
async def openai_agents(task, access):
    from agents import Agent, OpenAIResponsesModel, Runner, set_tracing_disabled
    from openai import AsyncOpenAI
    set_tracing_disabled(True)
    model = OpenAIResponsesModel(access.model, AsyncOpenAI(base_url=access.base_url, api_key=access.api_key))
    worker = Agent(name="worker", instructions="Work.", model=model)
    tools = [worker.as_tool(tool_name="work", tool_description="Work.")]
    return (await Runner.run(Agent(name="planner", model=model, tools=tools), task.prompt)).final_output

async def pydantic_ai(task, access):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    model = OpenAIChatModel(access.model, provider=OpenAIProvider(base_url=access.base_url, api_key=access.api_key))
    worker = Agent(model, instructions="Work.")
    async def work(input: str) -> str:
        return (await worker.run(input)).output
    return (await Agent(model, tools=[work]).run(task.prompt)).output
"""


@pytest.mark.parametrize("name", ["openai_agents", "pydantic_ai"])
def test_an_agent_that_is_a_tool_of_another_is_a_part_of_its_own(name: str, tmp_path: Path) -> None:
    need(PACKAGES[name])
    (tmp_path / "planner.py").write_text(SUB_AGENTS)
    call = '<tool_call>{"name": "work", "arguments": {"input": "add"}}</tool_call>'
    model = Model(call, "worked", "4")
    result = play({"function": f"{tmp_path}/planner.py:{name}"}, model, limit_s=120.0)
    assert sampled(result, model) == [f"{call}/4/", "worked/"]
    assert [part.reward for part in result.parts] == [1.0, 1.0]
