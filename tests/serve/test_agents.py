"""Agents that are programs: their calls over OpenAI's API, by its real client, become the parts of a rollout, token for token."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream.config import convert
from millstream.env.config import EnvironmentConfig
from millstream.env.games.lookup import Lookup
from millstream.env.resolve import find_environment
from millstream.errors import ConfigError, EnvironmentFailed
from support.agents import Model, play, play_several
from support.commands import start_command

ROOT = Path(__file__).parents[2]
AGENT = '''
import json, os, pathlib, subprocess, sys, time
from openai import OpenAI, AsyncOpenAI, APIStatusError
from millstream.env import SplitReward

def client(access, kind=OpenAI):
    return kind(base_url=access.base_url, api_key=access.api_key, max_retries=0)

def say(c, messages, model="policy", **more):
    return c.chat.completions.create(model=model, messages=messages, **more).choices[0].message

def solve(task, access):
    """Two turns of one conversation; the second answer counts."""
    c, messages = client(access), [{"role": "user", "content": task.prompt}]
    messages += [say(c, messages), {"role": "user", "content": "sure?"}]
    return say(c, messages).content

async def asolve(task, access):
    c = client(access, AsyncOpenAI)
    found = await c.chat.completions.create(model="policy", messages=[{"role": "user", "content": task.prompt}])
    return found.choices[0].message.content

def texts(task, access):
    """Completions of text, each after what was said before."""
    c = client(access)
    more = lambda prompt, **stop: prompt + c.completions.create(model="policy", prompt=prompt, max_tokens=20, **stop).choices[0].text
    return more(more("one:") + " two:")

def number(task, access):
    say(client(access), [{"role": "user", "content": "a"}])
    return 0.25

def several(task, access):
    """A planner, a worker of its own, the planner again; then the first question again with another ending."""
    c, plan = client(access), [{"role": "user", "content": "plan"}]
    first = say(c, plan)
    say(c, [{"role": "system", "content": "worker"}, {"role": "user", "content": "work"}])
    say(c, [*plan, first, {"role": "user", "content": "go on"}])
    say(c, [*plan, first, {"role": "user", "content": "or not"}])
    return "4"

def team(task, access):
    """A planner, a solver that is asked twice, and the solver in the planner's conversation."""
    c, plan = client(access), [{"role": "user", "content": "plan"}]
    first = say(c, plan, model="planner")
    say(c, [{"role": "user", "content": "work"}], model="solver")
    say(c, [{"role": "user", "content": "work"}], model="solver")
    say(c, [*plan, first, {"role": "user", "content": "now you"}], model="solver")
    say(c, [*plan, first, {"role": "user", "content": "go on"}], model="planner")
    return "4"

def team_score(task, result):
    return {"planner": 1.0, "solver": 0.25}

def by_turn(task, result):
    return SplitReward(reward={"solver": 3.0, "planner": 1.0}, turns=[1, 2, 3, 4, 5])

def wrong_team(task, result):
    return {"planner": 1.0, "sover": 0.25}

def wrong_model(task, access):
    return say(client(access), [{"role": "user", "content": "a"}], model="sover").content

def tooled(task, access):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    c, messages = client(access), [{"role": "user", "content": task.prompt}]
    while (answer := say(c, messages, tools=tools)).tool_calls:
        messages.append(answer)
        for call in answer.tool_calls:
            total = sum(json.loads(call.function.arguments).values())
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
    return answer.content

def short(task, access):
    return say(client(access), [{"role": "user", "content": "a"}], max_tokens=3, stop=["x"], temperature=0.2).content

def silent(task, access):
    return "4"

def raises(task, access):
    raise KeyError("lost")

def exits(task, access):
    sys.exit(0)

def swallows(task, access):
    for _ in range(9):
        try:
            say(client(access), [{"role": "user", "content": "a"}])
        except APIStatusError:
            pass
    return "4"

def endless(task, access):
    while True:
        say(client(access), [{"role": "user", "content": "a"}])

def hangs(task, access):
    say(client(access), [{"role": "user", "content": "a"}])
    time.sleep(60)

def leaves(task, access):
    say(client(access), [{"role": "user", "content": "a"}])
    (access.folder / "note").write_text("left")
    return "x"

def bad_score(task, result):
    sys.exit(1)

def score(task, result):
    return 0.5 + len((result.folder / "note").read_text())

def full(task, access):
    c = client(access)
    try:
        say(c, [{"role": "user", "content": "long " * 99}])
    except APIStatusError as error:
        return f"{error.status_code}"
    return "4"
'''
PROGRAM = """
import json, os, subprocess, sys, urllib.request
mode = sys.argv[1]
task = json.load(open(os.environ["MILLSTREAM_TASK"]))
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": task["prompt"]}]}
if mode == "plain":  # the real client takes two seconds to import
    from openai import OpenAI
    answer = OpenAI(max_retries=0).chat.completions.create(**body).choices[0].message.content
else:
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    call = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(call) as response:
        answer = json.load(response)["choices"][0]["message"]["content"]
if mode == "child":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    open(sys.argv[2], "w").write(f"{child.pid} {os.getcwd()}")
if mode == "hangs":
    open(sys.argv[2], "w").write(f"{os.getpid()} {os.getcwd()}")
    import time; time.sleep(99)
if mode == "reward":
    json.dump(json.loads(sys.argv[2]), open("reward.json", "w"))
print(answer, end="")
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "program.py").write_text(PROGRAM)
    return str(tmp_path / "agent.py")


def failure(args: dict[str, Any], model: Model | None = None, **more: Any) -> str:
    result = play(args, model or Model(), **more)
    assert isinstance(result.failure, EnvironmentFailed), result
    return str(result.failure)


# ---- calls become parts ------------------------------------------------------------------------------------------------


def test_the_turns_of_a_conversation_are_one_part_with_the_tokens_that_were_sampled(own: str) -> None:
    model = Model("maybe 5", "4")
    result = play({"function": f"{own}:solve"}, model)
    assert result.failure is None, result.failure
    (part,) = result.parts
    ends = model.text.end_token
    sampled = [*model.text.encode("maybe 5"), ends, *model.text.encode("4"), ends]
    assert part.reward == 1.0 and part.tokens[part.loss_mask].tolist() == sampled
    assert part.tokens[: len(model.requests[1].tokens)].tolist() == list(model.requests[1].tokens)
    assert (part.versions[part.loss_mask] == 3).all() and (part.versions[~part.loss_mask] == -1).all()


def test_other_conversations_and_other_continuations_are_parts_of_their_own(own: str) -> None:
    model = Model("first", "second", "third", "fourth")
    parts = play({"function": f"{own}:several"}, model).parts
    said = [model.text.decode(part.tokens[part.loss_mask].tolist()) for part in parts]
    assert said == ["firstthird", "second", "fourth"], "every sampled token is trained in one part only"
    shown = [model.text.decode(part.tokens.tolist()) for part in parts]
    assert "go on" in shown[0] and "worker" in shown[1] and "first" in shown[2] and "or not" in shown[2]


def test_text_that_continues_after_an_end_token_is_a_part_of_its_own(own: str) -> None:
    model = Model("a", "b")
    parts = play({"function": f"{own}:texts"}, model).parts
    assert [model.text.decode(part.tokens[part.loss_mask].tolist()) for part in parts] == ["a", "b"]
    assert model.text.end_token not in model.requests[1].tokens, "the agent's text has no end token"


def test_calls_of_tools_stay_in_their_part(own: str) -> None:
    call = '<tool_call>{"name":  "add", "arguments": {"a": 1, "b": 3}}</tool_call>'
    model = Model(call, "4")
    (part,) = play({"function": f"{own}:tooled"}, model).parts
    shown = str(model.text.tokenizer.decode(part.tokens))
    assert part.reward == 1.0 and call in shown and "<tool_response>4</tool_response>" in shown


def test_a_call_only_shortens_what_the_run_samples(own: str) -> None:
    model = Model("abcdef")
    play({"function": f"{own}:short"}, model)
    sampling = model.requests[0].sampling
    assert (sampling.max_tokens, sampling.stop_strings, sampling.temperature) == (3, ("x",), 1.0)


def test_more_parts_than_the_rollout_may_have_fail_it_by_name(own: str) -> None:
    said = failure({"function": f"{own}:several"}, max_parts=1)
    assert said.startswith("more than 1 sequences in one rollout"), "whatever the agent makes of it"


def test_a_prompt_without_room_is_refused_and_the_agent_decides(own: str) -> None:
    result = play({"function": f"{own}:full"}, Model(room=50))
    assert result.failure is not None and "without a token sampled" in str(result.failure)


def test_the_same_agent_in_the_run_and_as_a_program_sends_the_same_tokens_with_the_same_seeds() -> None:
    task = next(iter(Lookup.tasks(1, 0, failures=1.0)))
    gold = Lookup.gold(task)
    inside, outside = Model(*gold), Model(*gold)
    white = play({}, inside, use="lookup", task=task)
    black = play({"function": f"{ROOT}/recipes/data/lookup_agent.py:solve"}, outside, task=task)
    assert [part.reward for part in (*white.parts, *black.parts)] == [1.0, 1.0] and len(inside.requests) == 8
    assert inside.requests == outside.requests
    for name in ("tokens", "loss_mask", "versions"):
        assert (getattr(white.parts[0], name) == getattr(black.parts[0], name)).all()


# ---- functions and programs --------------------------------------------------------------------------------------------


def test_a_coroutine_a_number_and_a_score_are_rewards(own: str) -> None:
    assert play({"function": f"{own}:asolve"}, Model()).parts[0].reward == 1.0
    assert play({"function": f"{own}:number"}, Model()).parts[0].reward == 0.25
    assert play({"function": f"{own}:leaves", "score": f"{own}:score"}, Model()).parts[0].reward == 4.5


def test_agents_of_one_program_have_parts_and_rewards_of_their_own(own: str) -> None:
    team = {"function": f"{own}:team", "agents": ["planner", "solver"]}
    parts = play({**team, "score": f"{own}:team_score"}, Model()).parts
    assert sorted((part.agent, part.reward, len(part.turn_rewards)) for part in parts) == [
        (0, 1.0, 2), (1, 0.25, 1), (1, 0.25, 1), (1, 0.25, 1),
    ]  # fmt: skip
    parts = play({**team, "score": f"{own}:by_turn"}, Model()).parts
    assert sorted((part.agent, part.reward, part.turn_rewards.tolist()) for part in parts) == [
        (0, 1.0, [1.0, 5.0]), (1, 3.0, [2.0]), (1, 3.0, [3.0]), (1, 3.0, [4.0]),
    ]  # fmt: skip
    found = failure({**team, "score": f"{own}:wrong_team"})
    assert "score rewards the agents planner, sover: expected planner, solver" in found
    found = failure({"function": f"{own}:team", "score": f"{own}:team_score"})
    assert "no model 'planner'" in found
    found = failure({**team, "function": f"{own}:wrong_model"})
    assert "no model 'sover'" in found


@pytest.mark.parametrize(
    ("left", "reward", "turn_rewards", "message"),
    [
        ({"turns": [0.25]}, 0.25, [0.25], ""),
        ({"turns": [0.25, 1]}, 0, [], "rewards of 2 turns, and the rollout has 1"),
        ({"reward": "good"}, 0, [], "reward.json that is not"),
    ],
)
def test_a_program_may_leave_the_rewards_of_its_turns(
    own: str, left: Any, reward: float, turn_rewards: list[float], message: str
) -> None:
    command = [sys.executable, str(Path(own).with_name("program.py")), "reward", json.dumps(left)]
    if message:
        assert message in failure({"command": command})
    else:
        (part,) = play({"command": command}, Model()).parts
        assert (part.reward, part.turn_rewards.tolist()) == (reward, turn_rewards)


def test_a_score_that_exits_fails_its_rollout_alone(own: str) -> None:
    args = {"function": f"{own}:leaves", "score": f"{own}:bad_score"}
    assert "its score raised SystemExit: 1" in failure(args)


def test_a_program_gets_its_task_and_its_key_by_variables_and_its_output_is_scored(own: str) -> None:
    command = [sys.executable, str(Path(own).with_name("program.py"))]
    assert play({"command": [*command, "plain"]}, Model()).parts[0].reward == 1.0
    assert play({"command": [*command, "reward", '{"reward": 0.75}']}, Model("nonsense")).parts[0].reward == 0.75
    assert "ended with code 3: so sorry" in failure({"command": ["sh", "-c", "echo so sorry >&2; exit 3"]})
    assert "left a reward.json that is not" in failure({"command": ["sh", "-c", "echo good > reward.json"]})
    assert "cannot be started: /no/such/program" in failure({"command": ["/no/such/program"]})


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_nothing_is_left_of_a_program_that_has_ended(own: str, tmp_path: Path) -> None:
    command = [sys.executable, str(Path(own).with_name("program.py")), "child", str(tmp_path / "left")]
    assert play({"command": command}, Model()).failure is None
    assert_gone(tmp_path / "left")


def test_a_child_that_holds_the_output_of_a_program_does_not_hold_the_rollout() -> None:
    said = failure({"command": ["sh", "-c", "sleep 99 & echo 4"]}, limit_s=20.0)
    assert "without a token sampled" in said


def test_nothing_is_left_of_a_program_whose_time_is_up(tmp_path: Path) -> None:
    command = ["sh", "-c", f"sleep 99 & echo $! $(pwd) > {tmp_path}/left; wait"]
    assert "no reward after 2 s" in str(play({"command": command}, Model(), limit_s=2.0).failure)
    assert_gone(tmp_path / "left")


KILLED = """
import sys
sys.path[:0] = {path!r}
from support.agents import Model, play
play({{"command": {command!r}}}, Model())
"""


def test_nothing_is_left_of_a_program_whose_run_was_killed(own: str, tmp_path: Path) -> None:
    command = [sys.executable, str(Path(own).with_name("program.py")), "hangs", str(tmp_path / "left")]
    code = KILLED.format(path=sys.path, command=command)
    with start_command([sys.executable, "-c", code]) as run:
        while not (tmp_path / "left").is_file() or len((tmp_path / "left").read_text().split()) < 2:
            assert run.poll() is None
            time.sleep(0.05)
        run.kill()
    assert_gone(tmp_path / "left")


def assert_gone(left: Path) -> None:
    """The process and the folder that are written there."""
    pid, folder = left.read_text().split()
    for _ in range(200):
        if not is_alive(int(pid)) and not Path(folder).parent.exists():
            return
        time.sleep(0.05)
    raise AssertionError((is_alive(int(pid)), Path(folder).parent.exists()))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("silent", "the environment ended without a token sampled"),
        ("raises", "raised KeyError: 'lost'"),
        ("exits", "raised SystemExit: 0"),
        ("endless", "the agent made more than 5 calls: args.max_calls sets the limit"),
        ("swallows", "the agent made more than 5 calls: args.max_calls sets the limit"),
    ],
)
def test_an_agent_that_goes_wrong_is_a_failed_rollout_by_name(own: str, name: str, message: str) -> None:
    assert message in failure({"function": f"{own}:{name}", "max_calls": 5})


def test_an_agent_that_hangs_fails_when_its_time_between_two_turns_is_up(own: str) -> None:
    assert "took longer than 0.5 s between two turns" in failure({"function": f"{own}:hangs"}, step_timeout_s=0.5)


def test_waiting_for_a_thread_is_not_the_agents_time(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.serve.agents.environment.MAX_THREADS", 1)
    model = Model(turn_s=1.5)  # the model's time does not count, so that each agent needs next to nothing
    played = play_several(3, {"function": f"{own}:number"}, model, step_timeout_s=1.0)
    assert [result.failure for result in played] == [None] * 3


# ---- who may call ------------------------------------------------------------------------------------------------------

SPY = '''
import httpx, pathlib
def spy(task, access):
    """Another's key, no key, and what is not for agents; then one right call."""
    def post(path, key, body=None):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body = {"messages": [{"role": "user", "content": "a"}]} if body is None else body
        return httpx.post(f"{access.base_url}/{path}", headers=headers, json=body, trust_env=False).status_code
    seen = [post("chat/completions", "session-" + "0" * 32), post("chat/completions", ""), post("sessions", access.api_key, {}),
            httpx.get(f"{access.base_url}/sessions/{access.api_key}", trust_env=False).status_code,
            post("millstream/weights", access.api_key, {"path": "/", "version": 1}), post("chat/completions", access.api_key)]
    pathlib.Path(task.data["out"]).write_text(repr((seen, access.base_url, access.api_key)))
    return "4"
'''


def test_only_the_key_of_a_rollout_is_served_and_only_while_it_lasts(tmp_path: Path) -> None:
    (tmp_path / "spy.py").write_text(SPY.replace('task.data["out"]', repr(str(tmp_path / "out"))))
    assert play({"function": f"{tmp_path}/spy.py:spy"}, Model()).failure is None
    seen, url, key = eval((tmp_path / "out").read_text())
    assert seen == [401, 401, 404, 404, 404, 200] and len(key) > 30
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/models", trust_env=False)


# ---- config ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"args": {}}, "an agent is one of command and function"),
        ({"args": {"function": "nowhere.py:solve"}}, "no file nowhere.py"),
        ({"args": {"command": ["a"], "max_calls": 0}}, "max_calls must be at least 1"),
        ({"args": {"commands": ["a"]}}, "commands"),
        ({"args": {"command": ["a"], "agents": ["b", "b"]}}, "agents: expected names that differ"),
        ({"args": {"command": ["a"]}, "tools": ["a.py:b"]}, "an agent has its own tools"),
        ({"args": {"command": ["a"]}, "process": True}, "agent needs no process"),
    ],
)
def test_a_table_that_is_no_agent_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        find_environment(convert({"use": "agent", **config}, EnvironmentConfig, where="environment"))
