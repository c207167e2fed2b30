"""An agent as anybody may have one: it speaks to an OpenAI-compatible server, has tools of its own, and returns its answer.

`recipes/agent.toml` trains the model that it calls. Needs: pip install openai
"""

import json

from openai import BadRequestError, OpenAI

from millstream.env.games.lookup import Lookup
from millstream.env.tools import tool_function

MAX_ROUNDS = 16
CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="none")  # its connections are shared: to make a client takes 60 ms
SCHEMAS = [tool_function(function).schema() for function in Lookup().tools]


def solve(task, access):
    """Look numbers up, compute with them, answer. A search that is busy is made again, if the model wants it."""
    game = Lookup()
    game.reset(task, seed=0)
    tools = {function.__name__: function for function in game.tools}
    client = CLIENT.with_options(base_url=access.base_url, api_key=access.api_key)
    messages = [{"role": "user", "content": task.prompt}]
    said = ""
    for _ in range(MAX_ROUNDS):
        try:
            chat = client.chat.completions.create(model=access.model, messages=messages, tools=SCHEMAS)
        except BadRequestError:  # the model's context is full: what it said last is its answer
            break
        answer = chat.choices[0].message
        said = answer.content or ""
        if not answer.tool_calls:
            break
        messages.append(answer)
        for call in answer.tool_calls:
            result = called(tools, call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return said


def called(tools, name, arguments):
    try:
        return str(tools[name](**arguments))
    except Exception as error:
        return f"Error: {name}: {type(error).__name__}: {error}"


solve.tasks = Lookup.tasks  # where the tasks come from; with a data set: [data] path = "tasks.jsonl"
solve.gold = Lookup.gold  # what a perfect model would say, turn by turn: for [warmup]
