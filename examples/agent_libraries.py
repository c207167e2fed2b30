"""Agents of other libraries, each as its documentation shows it, with the address and the key of the rollout.

    millstream train examples/agent_libraries.toml --set environment.0.args.function=examples/agent_libraries.py:pydantic_ai

The task is a sum, and a tool adds. What each library needs: docs/agents.md.
"""

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

from openai import AsyncOpenAI, DefaultHttpxClient

from millstream.env.tools.parse import call_text
from millstream.types import Task

# Connections are shared by all rollouts: to make a client takes 60 ms of CPU time.
CLIENT = AsyncOpenAI(base_url="http://127.0.0.1", api_key="none")
HTTP = DefaultHttpxClient()


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def trained(agent: Callable[..., Any]) -> Any:
    """Where the tasks come from, and what a perfect model says, for [warmup]."""
    agent.tasks = tasks  # type: ignore[attr-defined]
    agent.gold = lambda task: [call_text("add", **task.data), task.answer]  # type: ignore[attr-defined]
    return agent


def tasks(num: int, seed: int) -> Iterator[Task]:
    rng = random.Random(seed)
    for number in range(num):
        a, b = rng.randrange(10), rng.randrange(10)
        yield Task(id=str(number), prompt=f"{a}+{b}", answer=str(a + b), data={"a": a, "b": b})


async def run_openai_agent(task: Task, access: Any, model_class: Callable[..., Any]) -> str:
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    client = CLIENT.with_options(base_url=access.base_url, api_key=access.api_key)
    agent = Agent(name="adder", model=model_class(access.model, client), tools=[function_tool(add)])
    return str((await Runner.run(agent, task.prompt)).final_output)


@trained
async def openai_agents(task: Task, access: Any) -> str:
    from agents import OpenAIResponsesModel

    return await run_openai_agent(task, access, OpenAIResponsesModel)


@trained
async def openai_agents_chat(task: Task, access: Any) -> str:
    from agents import OpenAIChatCompletionsModel

    return await run_openai_agent(task, access, OpenAIChatCompletionsModel)


@trained
async def pydantic_ai(task: Task, access: Any) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    client = CLIENT.with_options(base_url=access.base_url, api_key=access.api_key)
    provider = OpenAIProvider(openai_client=client)
    agent = Agent(OpenAIChatModel(access.model, provider=provider), tools=[add])
    return str((await agent.run(task.prompt)).output)


@trained
def langgraph(task: Task, access: Any) -> str:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(model=access.model, base_url=access.base_url, api_key=access.api_key)
    found = create_react_agent(model, [add]).invoke({"messages": [("user", task.prompt)]})
    return str(found["messages"][-1].content)


@trained
def smolagents(task: Task, access: Any) -> str:
    from smolagents import CodeAgent, OpenAIModel, tool

    shared = {"http_client": HTTP}
    model = OpenAIModel(access.model, api_base=access.base_url, api_key=access.api_key, client_kwargs=shared)
    return str(CodeAgent(tools=[tool(add)], model=model, max_steps=4, verbosity_level=0).run(task.prompt))


smolagents.gold = lambda task: [f"<code>\nfinal_answer(add(a={task.data['a']}, b={task.data['b']}))\n</code>"]


@trained
def mini_swe_agent(task: Task, access: Any) -> str:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it is downloaded
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    place = {"api_base": access.base_url, "api_key": access.api_key}
    model = LitellmModel(model_name=f"openai/{access.model}", model_kwargs=place, cost_tracking="ignore_errors")
    shell = LocalEnvironment(cwd=str(access.folder))
    agent = DefaultAgent(model, shell, system_template="Use bash.", instance_template="{{task}}", step_limit=4)
    return str(agent.run(task.prompt).get("submission", ""))


END = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; expr {a} + {b}"
mini_swe_agent.gold = lambda task: [call_text("bash", command=END.format(**task.data))]
