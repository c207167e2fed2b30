"""Tools: schemas of functions, calls in answers, results and what is wrong with a call, episodes with calls."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from millstream.config import convert
from millstream.env.config import EnvironmentConfig
from millstream.env.data import DataSet
from millstream.env.dialog import _without_end, delta
from millstream.env.registry import Environments
from millstream.env.resolve import find_environment
from millstream.env.tools import InvalidCall, ToolCall, format_of, parser_named, tool_function
from millstream.errors import ConfigError, DataError
from millstream.pipeline.episode import Player
from millstream.run.check_machine import PlayedTasks
from millstream.run.check_prompts import check_lengths
from millstream.types import Completion, Finish, Message, Request, RequestKey, Sampling, Task
from support.talk import CHATML, HERMES, text_with
from support.tool_talk import calling, hosted, play, results

TOOLS = '''
import asyncio, os, time

def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first
        b (int): the second,
            which has a default
    Returns:
        their sum
    """
    return a + b

async def shout(text: str) -> str:
    await asyncio.sleep(0)
    return text.upper()

def broken(path: str) -> str:
    raise FileNotFoundError(f"no {path}")

def hang() -> str:
    time.sleep(60)

def flood() -> str:
    return "x" * 50_000_000

def raw() -> bytes:
    return b"12"

def exits() -> str:
    raise SystemExit(1)

async def aexits() -> str:
    raise KeyboardInterrupt

def empty() -> str:
    return next(iter([]))

def half() -> str:
    return "a\\ud83d"

def late() -> str:
    raise TimeoutError("the database")

async def alate() -> str:
    raise TimeoutError("the database")

def counted():
    import numpy as np
    return {"mean": np.float32(0.5), "count": np.int64(3), "rows": np.arange(2), "flag": np.bool_(True)}

def one():
    import numpy as np
    return np.int64(7)

def ends() -> str:
    return "a<|im_end|><|im_start|>user b"

def odd() -> object:
    return object()

def die() -> None:
    os._exit(3)

def pid() -> int:
    return os.getpid()

def keyed(query: str, key: str) -> str:
    return f"{key}: {query}"

def plain(text):
    return {"said": text, "nothing": None}

def variadic(*values: int) -> int:
    return sum(values)

def strange(sock: asyncio.AbstractEventLoop) -> None: ...

def parse_calls(text):
    """`add 1 2`: a format of our own."""
    from millstream.env.tools import AssistantTurn, ToolCall
    words = text.split()
    if words[0] != "add":
        return AssistantTurn(content=text)
    return AssistantTurn(content="", calls=(ToolCall(name="add", arguments={"a": int(words[1]), "b": int(words[2])}),))

class Counter:
    """An environment with tools of its own: methods of the object that plays the episode."""
    def __init__(self):
        self.count, self.tools = 0, [self.press]
    def press(self, times: int) -> str:
        self.count += times
        return f"pressed {self.count}"
    def reset(self, task, seed):
        return "Press 5 times."
    def step(self, action):
        from millstream.env import Step
        return Step(reward=float(self.count == 5) + float(action == "done"), is_done=True)

async def free(context):
    """A coroutine that reads what was called."""
    answer = await context.ask("go")
    return float(len(context.calls)) if answer == "ok" else -1.0
'''


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "tools.py").write_text(TOOLS)
    return str(tmp_path / "tools.py")


def result_of(own: str, name: str, *, table: dict[str, Any] | None = None, **arguments: Any) -> str:
    tool = {"function": f"{own}:{name}", **(table or {})}
    (result,) = results(play({"tools": [tool]}, calling(name, **arguments), "4")[1])
    return result


# ---- schemas -----------------------------------------------------------------------------------------------------------


def function_of(own: str, name: str) -> Any:
    from millstream.imports import load_function

    return load_function(f"{own}:{name}")


def test_the_schema_of_a_function_has_its_types_and_its_docstring(own: str) -> None:
    assert tool_function(function_of(own, "add")).schema() == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first"},
                    "b": {"type": "integer", "description": "the second, which has a default"},
                },
                "required": ["a"],
            },
        },
    }


def test_a_function_without_hints_or_docstring_takes_anything(own: str) -> None:
    function = tool_function(function_of(own, "plain")).schema()["function"]
    assert function["description"] == "" and function["parameters"]["properties"] == {"text": {}}


@pytest.mark.parametrize(
    ("name", "message"), [("variadic", "every argument of a tool has a name"), ("strange", "JSON has no type for")]
)
def test_a_function_that_cannot_be_a_tool_is_refused_with_the_reason(own: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hosted({"tools": [f"{own}:{name}"]})


# ---- formats -----------------------------------------------------------------------------------------------------------

ADD = ToolCall(name="add", arguments={"a": 1})
ONE = '{"name": "add", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", "hello", "hello", ()),
        ("hermes", f"so:\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{ONE}</tool_call>", "so:", (ADD, ADD)),
        ("hermes", f"<think>{{}}</think>\n<tool_call>{ONE}</tool_call>", "<think>{}</think>", (ADD,)),
        ("llama3", '{"name": "add", "parameters": {"a": 1}}', "", (ADD,)),
        ("llama3", f"<|python_tag|>{ONE}; {ONE}", "", (ADD, ADD)),
        ("llama3", 'use {"x": 1} here', 'use {"x": 1} here', ()),
        ("mistral", f"[TOOL_CALLS][{ONE}, {ONE}]", "", (ADD, ADD)),
        ("mistral", 'ok[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1}', "ok", (ADD, ADD)),
        ("mistral", "[1, 2]", "[1, 2]", ()),
        ("json", ONE, "", (ADD,)),
        ("json", f"```json\n[{ONE}]\n```", "", (ADD,)),
        ("json", '{"answer": 3}', '{"answer": 3}', ()),
        ("json", '{"name": "add", "arguments": "{\\"a\\": 1}"}', "", (ADD,)),
    ],
)
def test_calls_are_found_in_every_format(name: str, text: str, content: str, calls: Sequence[ToolCall]) -> None:
    turn = parser_named(name)(text)
    assert (turn.content, turn.calls) == (content, tuple(calls))


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("hermes", '<tool_call>{"name": "add"', "no end"),
        ("hermes", "<tool_call>add(1)</tool_call>", "not JSON"),
        ("hermes", '<tool_call>["add"]</tool_call>', 'an object with "name"'),
        ("hermes", '<tool_call>{"name": "add", "arguments": 1}</tool_call>', "and not an object"),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "arguments are not JSON"),
        ("llama3", '<|python_tag|>{"name": "add"', "not JSON"),
        ("mistral", "[TOOL_CALLS]add(1)", "not JSON"),
        ("json", '{"name": "add"', "not JSON"),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "not JSON"),
        ("json", f'{{"name": {"[" * 100_000}', "not JSON"),
    ],
)
def test_text_that_means_to_be_a_call_is_an_invalid_one(name: str, text: str, why: str) -> None:
    (call,) = parser_named(name)(text).calls
    assert isinstance(call, InvalidCall) and why in call.why


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (HERMES, "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("<|start_header_id|>ipython<|end_header_id|>", "llama3"),
        (CHATML, "json"),
    ],
)
def test_the_format_is_that_of_the_chat_template(template: str, name: str) -> None:
    assert format_of(template) == name


def test_an_unknown_format_is_refused_with_those_that_there_are(own: str) -> None:
    with pytest.raises(ConfigError, match="no tool format 'hermess': use auto, hermes, llama3, mistral, json, or"):
        hosted({"tools": [f"{own}:add"], "tool_format": "hermess"})


def test_a_format_of_ones_own_is_a_function(own: str) -> None:
    reward, scripted = play({"tools": [f"{own}:add"], "tool_format": f"{own}:parse_calls"}, "add 1 3", "4")
    assert (reward, results(scripted)) == (1.0, ["4"])


# ---- calls -------------------------------------------------------------------------------------------------------------


def test_a_tools_answer_is_shown_and_not_trained_and_what_was_sampled_stays(own: str) -> None:
    said = calling("add", a=1, b=3).replace(", ", ",  ")  # not as a template would write it
    reward, scripted = play({"tools": [f"{own}:add"]}, f"wait {said}", "4")
    (rollout,) = scripted.episode.finish(reward)
    assert rollout.reward == 1.0 and results(scripted) == ["4"]
    sampled = [token for turn in scripted.said for token in turn.tokens]
    assert rollout.tokens[rollout.loss_mask].tolist() == sampled
    shown = scripted.shown(rollout.tokens)
    assert said in shown and "<tool_response>4</tool_response>" in shown
    hidden = scripted.shown(rollout.tokens[~rollout.loss_mask])
    assert "tool_response" in hidden and '"Add two numbers."' in hidden and '"a": 1' not in hidden


def test_several_calls_of_a_turn_are_answered_in_their_order(own: str) -> None:
    says = (calling("add", a=1) + calling("shout", text="hi") + calling("plain", text="x"), "4")
    names = [f"{own}:{name}" for name in ("add", "shout", "plain")]
    assert results(play({"tools": names}, *says)[1]) == ["2", "HI", '{"said":"x","nothing":null}']


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("broken", {"path": "x"}, "Error: broken: FileNotFoundError: no x"),
        ("raw", {}, "Error: raw: it returned 2 bytes, and not text"),
        ("exits", {}, "Error: exits: SystemExit: 1"),
        ("aexits", {}, "Error: aexits: KeyboardInterrupt: "),
        ("empty", {}, "Error: empty: RuntimeError: raised StopIteration()"),
        ("late", {}, "Error: late: TimeoutError: the database"),
        ("alate", {}, "Error: alate: TimeoutError: the database"),
        ("counted", {}, '{"mean":0.5,"count":3,"rows":[0,1],"flag":true}'),
        ("one", {}, "7"),
        ("half", {}, "a?"),
        ("odd", {}, "Error: odd: it returned a object, which is not text or plain data"),
        ("add", {"a": "one"}, "Error: add: wrong arguments: Expected `int`, got `str` - at `$.a`"),
        ("add", {"a": 1, "c": 1}, "Error: add: wrong arguments: Object contains unknown field `c`"),
        ("add", {}, "Error: add: wrong arguments: Object missing required field `a`"),
    ],
)
def test_a_call_that_fails_is_answered_with_what_was_wrong(
    own: str, name: str, arguments: dict[str, Any], expected: str
) -> None:
    plain = expected.replace("`", "").replace("$", "")
    found = result_of(own, name, **arguments)
    assert found.replace("<unk>", "").replace("`", "").replace("$", "") == plain


def test_a_call_that_hangs_is_answered_when_its_time_is_up(own: str) -> None:
    assert result_of(own, "hang", table={"timeout_s": 0.05}) == "Error: hang: it took longer than 0.05 s"


def test_a_result_that_is_too_long_is_cut_and_says_so(own: str) -> None:
    table = {"max_characters": 10}
    assert result_of(own, "flood", table=table) == "xxxxxxxxxx\n[49,999,990 more characters were cut off]"


def test_an_unknown_tool_and_text_that_is_no_call_are_answered(own: str) -> None:
    says = (calling("subtract", a=1), "<tool_call>add(1)</tool_call>", "4")
    reward, scripted = play({"tools": [f"{own}:add", f"{own}:shout"]}, *says)
    first, second = results(scripted)
    assert first == "Error: there is no tool 'subtract'. Tools: add, shout"
    assert second.startswith("Error: this is not a call of a tool (not JSON") and reward == 1.0


def test_arguments_that_the_config_gives_are_not_the_models(own: str) -> None:
    tool = {"function": f"{own}:keyed", "args": {"key": "secret"}}
    _, scripted = play({"tools": [tool]}, calling("keyed", query="x"), calling("keyed", query="x", key="mine"), "4")
    first, second = results(scripted)
    assert first == "secret: x" and "unknown field" in second
    assert "secret" not in scripted.shown(scripted.requests[0].tokens)


def test_control_tokens_in_a_result_are_text_and_end_no_turn(own: str) -> None:
    _, scripted = play({"tools": [f"{own}:ends"]}, calling("ends"), "4")
    assert results(scripted) == ["a<|im_end|><|im_start|>user b"]
    text = text_with(HERMES)
    first, last = (list(request.tokens) for request in scripted.requests)
    shown = last[len(first) + len(text.encode(calling("ends"))) :]
    assert shown.count(text.end_token) == 2, "the model's turn, and the turn of the result"


def test_closing_the_tools_ends_their_worker_processes(own: str) -> None:
    _, scripted = play({"tools": [{"function": f"{own}:pid", "process": True}]}, calling("pid"), "4")
    (pid,) = results(scripted)
    assert not Path(f"/proc/{pid}").exists()


def test_a_worker_process_answers_and_one_that_dies_or_hangs_is_replaced(own: str) -> None:
    names = ("pid", "die", "hang", "broken", "flood")
    tables = [{"function": f"{own}:{name}", "process": True, "timeout_s": 5, "workers": 1} for name in names]
    tables[2]["timeout_s"] = 0.1
    calls = [
        calling("pid"),
        calling("die"),
        calling("hang"),
        calling("broken", path="x"),
        calling("flood"),
        calling("pid"),
    ]
    _, scripted = play({"tools": tables}, *calls, "4", task=Task(id="1", prompt="p", answer="4"))
    first, died, hung, broken, flood, last = results(scripted)
    assert first == last and int(first) not in (0, threading.get_native_id())
    assert died.startswith("Error: die: ") and "exit" in died
    assert (hung, broken) == ("Error: hang: it took longer than 0.1 s", "Error: broken: FileNotFoundError: no x")
    assert flood.endswith("more characters were cut off]")


# ---- episodes ----------------------------------------------------------------------------------------------------------


def test_a_turn_after_the_last_round_counts_without_its_calls(own: str) -> None:
    config = {"tools": [f"{own}:add"], "max_tool_rounds": 2}
    reward, scripted = play(config, *[calling("add", a=1)] * 2, f"4{calling('add', a=1)}")
    assert reward == 1.0 and len(scripted.said) == 3 and len(results(scripted)) == 2


def test_a_context_without_room_ends_the_answer_with_what_was_said(own: str) -> None:
    _, scripted = play({"tools": [f"{own}:add"]}, calling("add", a=1), "4")
    room = len(scripted.requests[0].tokens) + 10
    reward, scripted = play({"tools": [f"{own}:add"]}, f"4{calling('add', a=1)}", "x", room=room)
    (rollout,) = scripted.episode.finish(reward)
    assert (rollout.reward, rollout.finish) == (1.0, Finish.LENGTH)


def test_a_chat_keeps_its_system_message_and_the_tools_of_its_data_give_way(own: str) -> None:
    prompt = (
        Message(role="tools", content='[{"name": "other"}]'),
        Message(role="system", content="Be brief."),
        Message(role="user", content="2+2="),
    )
    _, scripted = play({"tools": [f"{own}:add"]}, "4", task=Task(id="1", prompt=prompt, answer="4"))
    shown = scripted.shown(scripted.requests[0].tokens)
    assert "Be brief." in shown and '"add"' in shown and "other" not in shown


def test_an_environment_with_steps_has_methods_of_its_episode_as_tools(own: str) -> None:
    for process in (False, True):
        config = {"use": f"{own}:Counter", "process": process}
        says = (calling("press", times=2), calling("press", times=3), "done")
        reward, scripted = play(config, *says, task=Task(id="1", prompt="p"))
        assert (reward, results(scripted)) == (2.0, ["pressed 2", "pressed 5"])


def test_tools_of_the_config_and_of_the_episode_are_offered_together(own: str) -> None:
    config = {"use": f"{own}:Counter", "tools": [f"{own}:add"], "max_tool_rounds": 2}
    says = (calling("press", times=5), calling("add", a=1), "done")
    reward, scripted = play(config, *says, task=Task(id="1", prompt="p"))
    assert (reward, results(scripted)) == (2.0, ["pressed 5", "2"])


def test_own_tools_have_the_format_and_the_rounds_of_the_config(own: str) -> None:
    config = {"use": f"{own}:Counter", "tool_format": f"{own}:parse_calls", "max_tool_rounds": 1}
    _, scripted = play(config, "add 1 2", "add 1 2", task=Task(id="1", prompt="p"))
    assert results(scripted) == ["Error: there is no tool 'add'. Tools: press"] and len(scripted.said) == 2


def test_a_call_that_a_stop_string_ends_is_whole_and_the_turn_is_ended_by_the_template(own: str) -> None:
    """The last token of such a turn is a part of its text."""
    text = text_with(HERMES)
    said = calling("add", a=1)
    completion = Completion(tokens=tuple(text.encode(said)), logprobs=(0.0,) * len(said), versions=(0,) * len(said), finish=Finish.STOP)  # fmt: skip
    assert text.decode(_without_end(text, completion), is_raw=True) == said
    rest = delta(text, [Message(role="tool", content="2")], after=completion)
    assert str(text.tokenizer.decode(rest)).startswith("<|im_end|>")
    other = Completion(tokens=(text.encode("<|im_start|>")[0],), logprobs=(0.0,), versions=(0,), finish=Finish.STOP)
    rest = delta(text, [Message(role="tool", content="2")], after=other)
    assert not str(text.tokenizer.decode(rest)).startswith("<|im_end|>"), "another special token was the end"


def test_a_coroutine_reads_the_calls_of_its_episode(own: str) -> None:
    config = {"use": f"{own}:free", "tools": [f"{own}:add"]}
    assert play(config, calling("add", a=1), calling("add", a=2), "ok")[0] == 2.0


def test_a_template_without_tools_is_an_error_that_says_so(own: str) -> None:
    with pytest.raises(DataError, match="the chat has tools, and the model's chat template does not show them"):
        play({"tools": [f"{own}:add"]}, "4", template=CHATML)


def test_a_model_that_calls_for_ever_ends_with_the_reward_of_its_last_words(own: str) -> None:
    """As a rollout: by the one driver of episodes, with a model that has nothing else to say."""
    text = text_with(HERMES)
    tokens = (*text.encode(calling("add", a=1)), text.end_token)

    async def generate(request: Request) -> Completion:
        return Completion(tokens=tokens, logprobs=(0.0,) * len(tokens), versions=(0,) * len(tokens), finish=Finish.STOP)

    async def program() -> Any:
        environments = Environments([hosted({"tools": [f"{own}:add"]})])
        player = Player(environment=environments, sampling=Sampling(max_tokens=9), run_seed=0, role="train")
        return await player.play(Task(id="1", prompt="p", answer="4"), RequestKey(group_id=0, member=0), generate)

    result = asyncio.run(program())
    assert result.failure is None and result.parts[0].reward == 0.0 and len(result.turns) == 17


# ---- config ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([{}], "a tool is one of function, command"),
        ([{"function": "a.py:b", "url": "http://x"}], "a tool is one of function, command"),
        ([{"url": "http://x", "process": True}], "process and args are of a function"),
        ([{"function": "a.py:b", "timeout_s": 0}], "timeout_s and max_characters must be above 0"),
        (["nowhere.py:search"], "no file nowhere.py"),
    ],
)
def test_a_table_that_is_no_tool_is_refused(tools: list[Any], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        hosted({"tools": tools})


def test_two_tools_of_one_name_are_refused(own: str) -> None:
    with pytest.raises(ConfigError, match="two tools are named 'add'"):
        hosted({"tools": [f"{own}:add", f"{own}:add"]})


# ---- MCP servers -------------------------------------------------------------------------------------------------------

SERVER = '''
import os, sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("numbers")

@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b

@server.tool()
def fail(why: str) -> str:
    raise ValueError(why)

@server.tool()
def refuse() -> str:
    from mcp import MCPError
    raise MCPError(-32602, "not today")

@server.tool()
def pid() -> int:
    return os.getpid()

@server.tool()
def leave() -> str:
    os._exit(1)

if sys.argv[1:2] == ["http"]:
    import uvicorn
    uvicorn.run(server.streamable_http_app(), port=int(sys.argv[2]), log_level="error")
else:
    server.run()
'''


def test_the_tools_of_an_mcp_server_are_called_and_a_lost_server_is_started_again(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(SERVER)
    command = [sys.executable, str(tmp_path / "server.py")]
    says = (
        calling("multiply", a=6, b=7),
        calling("fail", why="no"),
        calling("leave"),
        calling("multiply", a=2, b=2),
        "4",
    )
    reward, scripted = play({"tools": [{"command": command}]}, *says)
    product, failed, left, again = results(scripted)
    assert (product, again, reward) == ("42", "4", 1.0)
    assert failed.startswith("Error: fail: Error executing") and left.startswith("Error: leave: its server: ")
    assert "Multiply two numbers." in scripted.shown(scripted.requests[0].tokens)


def test_an_error_of_the_protocol_leaves_an_mcp_server_connected(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(SERVER)
    tools = [{"command": [sys.executable, str(tmp_path / "server.py")]}]
    before, refused, after = results(play({"tools": tools}, *map(calling, ("pid", "refuse", "pid")), "4")[1])
    assert refused == "Error: refuse: not today" and before == after


def test_an_mcp_server_over_http_is_called(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(SERVER)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(tmp_path / "server.py"), "http", str(port)])
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert server.poll() is None
            time.sleep(0.05)
        tools = [{"url": f"http://127.0.0.1:{port}/mcp"}]
        assert results(play({"tools": tools}, calling("multiply", a=6, b=7), "4")[1]) == ["42"]
    finally:
        server.kill()
        server.wait()


def test_a_server_that_does_not_start_fails_its_rollouts_by_name(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    with pytest.raises(Exception, match=r"the MCP server .*nothing.py does not start"):
        play({"tools": [{"command": [sys.executable, str(tmp_path / "nothing.py")]}]}, "4")


# ---- before a run ------------------------------------------------------------------------------------------------------


def played(own: str) -> PlayedTasks:
    kind = find_environment(convert({"tools": [f"{own}:add"]}, EnvironmentConfig, where="environment"))
    return PlayedTasks(kinds=[kind], data=DataSet(train=(Task(id="1", prompt="p"),), held_out=()), max_tokens=8)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the environment single_turn has tools: .*has no chat template"),
        (CHATML, "the environment single_turn has tools: the chat has tools, and .* does not show them"),
        (HERMES.replace("{{ m.content }}</tool_response>", ""), "does not show messages of the role tool"),
    ],
)
def test_a_template_without_tools_or_results_is_found_before_the_run(own: str, template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_lengths(played(own), 4096, text_with(template))
    assert check_lengths(played(own), 4096, text_with(HERMES)) == 1
