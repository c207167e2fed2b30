"""Rewards: where they run, what they are given, and what is built in. Plain functions are in test_data_and_rewards.py."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from millstream.config import convert, to_toml
from millstream.env.rewards import (
    BUILT_IN_REWARDS,
    CompletionScorer,
    GroupScorer,
    RewardConfig,
    check_reward,
    find_reward,
    group_scorer,
    passed,
    prepare_rewards,
)
from millstream.env.rewards.code import last_block
from millstream.env.rewards.mathematics import last_boxed
from millstream.env.rewards.text import Format, fuzzy_match
from millstream.errors import ConfigError, RewardFailed
from millstream.run.check import check_config
from millstream.run.config import RunConfig
from millstream.types import Task
from support.processes import eventually, is_alive

ROOT = Path(__file__).parents[2]
TASK = Task(id="1", prompt="2+2=", answer="4", data={"level": 3})

MINE = """
import asyncio, os, signal, time
from pathlib import Path

def right(task, completion, *, bonus=0.0):
    return float(completion == task.answer) + bonus

def identity(task, completion):
    return os.getpid()

async def later(task, completion):
    await asyncio.sleep(0.001)
    return task.data["level"]

def strange(task, completion):
    match completion:
        case "hang": time.sleep(60)
        case "tell and hang":
            Path(task.answer).write_text(str(os.getpid()))
            time.sleep(60)
        case "exit": os._exit(7)
        case "segfault": os.kill(os.getpid(), signal.SIGSEGV)
        case "memory": os.kill(os.getpid(), signal.SIGKILL)
        case "raise": return 1 / 0
        case "nan": return float("nan")
        case "slow": time.sleep(0.1)
        case "fork":
            if os.fork() == 0:
                return 99.0
            os.wait()
        case "child":
            child = os.fork()
            if child:
                Path(task.answer).write_text(str(child))
            time.sleep(60)
    return 1.0

class Counting:
    def __init__(self, start, step=1):
        self.value, self.step = start, step
    def __call__(self, task, completion):
        self.value += self.step
        return self.value

def ranks(task, completions):
    order = sorted(completions, key=len)
    return [-order.index(c) for c in completions]

async def ranks_later(task, completions, *, by=1.0):
    return [by] * len(completions)

def too_few(task, completions):
    return [1.0]
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def scorer(*configs: RewardConfig) -> CompletionScorer:
    return CompletionScorer(prepare_rewards(configs))


def score(config: RewardConfig, completion: str = "4", task: Task = TASK) -> float:
    return asyncio.run(scorer(config).score(task, completion))


def test_parts_are_named_by_their_functions_without_file_or_package(mine: Path) -> None:
    configs = [
        RewardConfig(function=name) for name in (f"{mine}:right", "exact_match", f"{mine}:identity", f"{mine}:identity")
    ]
    found = asyncio.run(scorer(*configs).score(TASK, "4"))
    assert list(found.parts) == ["right", "exact_match", "identity 3", "identity 4"]


# ---- in a process of their own -----------------------------------------------------------------------------------------------


def test_a_reward_in_a_process_is_called_like_any_other(mine: Path) -> None:
    def config(name: str, **more: Any) -> RewardConfig:
        return RewardConfig(function=f"{mine}:{name}", process=True, workers=1, **more)

    assert score(config("right", args={"bonus": 0.5}), "4") == 1.5
    assert score(config("later")) == 3.0
    assert score(config("identity")) != os.getpid()
    assert score(config("Counting", args={"start": 1})) == 2.0


def test_workers_are_used_again_and_there_are_no_more_than_asked_for(mine: Path) -> None:
    async def program() -> set[float]:
        pool = scorer(RewardConfig(function=f"{mine}:identity", process=True, workers=2))
        return set(await asyncio.gather(*(pool.score(TASK, "4") for _ in range(50))))

    assert 1 <= len(asyncio.run(program())) <= 2


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        ("hang", r"took longer than 2 s, and its worker process was killed; reward\.timeout_s"),
        ("exit", r"its process ended with exit code 7 during the call"),
        ("segfault", r"exit code -11 \(SIGSEGV\) during the call"),
        ("memory", r"\(SIGKILL\) \(out of memory\?\)"),
        ("raise", r"raised ZeroDivisionError at mine\.py:\d+: division by zero"),
        ("nan", r"returned nan: expected a finite number"),
    ],
)
def test_a_worker_that_is_killed_or_dies_is_replaced_and_takes_no_other_call_with_it(
    mine: Path, completion: str, message: str
) -> None:
    async def program() -> list[float]:
        limit_s = 2.0 if completion == "hang" else 60.0  # so long that no other call reaches it, whatever the load
        pool = scorer(RewardConfig(function=f"{mine}:strange", process=True, workers=2, timeout_s=limit_s))
        await asyncio.gather(pool.score(TASK, "slow"), pool.score(TASK, "slow"))  # both are there
        others = [asyncio.create_task(pool.score(TASK, "slow")) for _ in range(3)]
        with pytest.raises(RewardFailed, match=message):
            await pool.score(TASK, completion)
        return [*await asyncio.gather(*others), await pool.score(TASK, "well")]

    assert asyncio.run(program()) == [1.0] * 4


def test_what_a_killed_worker_has_started_goes_with_it(mine: Path, tmp_path: Path) -> None:
    told = tmp_path / "child"
    task = Task(id="1", prompt="", answer=str(told))

    async def program() -> None:
        pool = scorer(RewardConfig(function=f"{mine}:strange", process=True, workers=1, timeout_s=2.0))
        with pytest.raises(RewardFailed, match="was killed"):
            await pool.score(task, "child")
        assert eventually(lambda: not is_alive(int(told.read_text())))

    asyncio.run(program())


def test_a_child_that_a_reward_forks_does_not_answer_in_its_place(mine: Path) -> None:
    assert score(RewardConfig(function=f"{mine}:strange", process=True, workers=1), "fork") == 1.0


def test_a_caller_that_gives_up_does_not_leave_a_busy_worker_behind(mine: Path) -> None:
    async def program() -> float:
        pool = scorer(RewardConfig(function=f"{mine}:strange", process=True, workers=1))
        await pool.score(TASK, "well")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await pool.score(TASK, "hang")
        async with asyncio.timeout(50):  # "hang" takes longer
            return await pool.score(TASK, "well")

    assert asyncio.run(program()) == 1.0


def test_a_busy_worker_ends_when_its_parent_is_killed(mine: Path, tmp_path: Path) -> None:
    told = tmp_path / "worker"
    program = f"""
import asyncio
from millstream.env.rewards import RewardConfig, CompletionScorer, prepare_rewards
from millstream.types import Task
scorer = CompletionScorer(prepare_rewards([RewardConfig(function="{mine}:strange", process=True, workers=1)]))
asyncio.run(scorer.score(Task(id="1", prompt="", answer="{told}"), "tell and hang"))
"""
    with subprocess.Popen([sys.executable, "-c", program]) as parent:
        while not (told.exists() and told.read_text()):
            time.sleep(0.01)
        worker = int(told.read_text())
        assert is_alive(worker)
        parent.send_signal(signal.SIGKILL)
    assert eventually(lambda: not is_alive(worker), 30.0)


def test_a_worker_that_cannot_start_fails_the_call_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "late.py"
    path.write_text("def f(task, completion): return 1.0\n")
    config = RewardConfig(function=f"{path}:f", process=True, workers=1)
    pool = scorer(config)
    path.write_text("import os\nos._exit(3)\n")
    with pytest.raises(RewardFailed, match="its worker did not start: its process ended with exit code 3"):
        asyncio.run(pool.score(TASK, ""))
    path.write_text("import nothing_of_the_kind\n")
    with pytest.raises(RewardFailed, match="ModuleNotFoundError"):
        asyncio.run(pool.score(TASK, ""))


def test_a_task_that_cannot_be_sent_is_named(mine: Path) -> None:
    task = Task(id="odd", prompt="", answer="4", data={"thing": object()})
    with pytest.raises(RewardFailed, match="task odd cannot be sent to a worker process"):
        score(RewardConfig(function=f"{mine}:right", process=True, workers=1), task=task)


def test_a_function_passed_from_python_has_no_name_for_another_process() -> None:
    def own(task: Task, completion: str) -> float:
        return 1.0

    (config,) = passed(own, [RewardConfig(process=True)])
    with pytest.raises(ConfigError, match=r"Put it into a file, and set function = \"file\.py:function\""):
        CompletionScorer(prepare_rewards([config], own))


# ---- arguments -----------------------------------------------------------------------------------------------------------------


def test_arguments_go_to_functions_and_classes_are_made_once(mine: Path) -> None:
    assert score(RewardConfig(function=f"{mine}:right", args={"bonus": 2.0}), "5") == 2.0
    counting = scorer(RewardConfig(function=f"{mine}:Counting", args={"start": 10, "step": 5}))
    assert [asyncio.run(counting.score(TASK, "")) for _ in range(2)] == [15.0, 20.0]


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("MINE:right", {"bonos": 1}, r"has no argument 'bonos'\. Did you mean bonus\?"),
        ("MINE:identity", {"x": 1}, r"has no argument 'x': it takes none"),
        ("MINE:right", {"task": 1}, r"has no argument 'task'"),
        ("MINE:Counting", {}, r"needs an argument 'start': set args = \{ start = \.\.\. \}"),
        ("exact_match", {"strip": True}, r"has no argument 'strip': it takes none"),
        ("fuzzy_match", {"treshold": 0.5}, r"Did you mean threshold\?"),
        ("fuzzy_match", {"threshold": "high"}, r"args\.threshold = 'high': Expected `float \| null`, got `str`"),
        ("format", {"pattern": "(<a>"}, r"args\.pattern is no regular expression: missing \)"),
        ("format", {"tags": []}, r"expected a list of names"),
        ("shortest_right", {}, r"is a reward of a whole group: set group = true"),
        ("judge", {"url": "http://x/v1"}, r"needs an argument 'model'"),
        ("judge", {"url": "x", "model": "m"}, r"expected something like http://host:8000/v1"),
        (
            "judge",
            {"url": "http://x/v1", "model": "m", "api_key_env": "NO_SUCH_KEY"},
            r"no API key: export NO_SUCH_KEY=",
        ),
        ("judge", {"url": "http://x/v1", "model": "m", "score_pattern": r"\d+"}, r"has no group"),
        ("judge", {"url": "http://x/v1", "model": "m", "score_pattern": "("}, r"is no regular expression"),
        ("judge", {"url": "http://x/v1", "model": "m", "prompt": "well?"}, r"has no \{completion\}"),
        ("judge", {"url": "http://x/v1", "model": "m", "low": 3, "high": 3}, r"must be below"),
        ("python_tests", {"memory_mb": 1}, r"memory_mb at least 64"),
        ("python_tests", {"require": ["netwrk"]}, r"args\.require"),
    ],
)
def test_a_wrong_argument_is_found_before_the_run(mine: Path, name: str, args: dict[str, Any], message: str) -> None:
    config = RewardConfig(function=name.replace("MINE", str(mine)), args=args)
    with pytest.raises(ConfigError, match=message):
        check_reward(find_reward(config.function), config)
    with pytest.raises(ConfigError, match=message):
        scorer(config)


def test_an_extra_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = RewardConfig(function="math_answer")
    with pytest.raises(ConfigError, match=r"needs math_verify: pip install 'millstream\[math\]'"):
        check_reward(find_reward(config.function), config)


def test_a_dry_run_looks_at_arguments_and_tells_what_the_sandbox_contains(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(
        '{"prompt": "a", "answer": "```python\\nx = 1\\n```", "tests": ["assert x == 1"]}\n'
    )
    data = {"path": str(tmp_path / "data.jsonl"), "holdout": 0}

    def run(**reward: Any) -> RunConfig:
        tables = {"model": {"tiny": {}}, "data": data, "reward": [reward], "rollout": {"max_tokens": 8}}
        return convert(tables, RunConfig, where="here")

    said = "\n".join(check_config(run(function="python_tests")).findings)
    assert "the reward python_tests gives 1 for the gold answer, 0 for nonsense" in said and "a program runs " in said
    with pytest.raises(ConfigError, match="Did you mean tags"):
        check_config(run(function="format", args={"tag": ["a"]}))


def test_arguments_survive_the_run_folder() -> None:
    reward = {
        "function": "format",
        "args": {"pattern": 'a"\\d\n.*', "tags": ["a", "b"]},
        "weight": 0.5,
        "process": True,
    }
    config = convert(
        {"model": {"tiny": {}}, "data": {"toy": "sort_digits"}, "reward": [reward, {}]}, RunConfig, where="x"
    )
    import tomllib

    assert convert(tomllib.loads(to_toml(config)), RunConfig, where="y") == config


# ---- what is built in --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("The Eiffel-Tower!", "eiffel tower", 1.0),
        ("Ｐａｒｉｓ", "paris", 1.0),
        ("in Paris, France", "Paris", 0.5),
        ("London", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("", "", 1.0),
    ],
)
def test_fuzzy_match_is_the_token_f1_of_normalised_text(completion: str, answer: str, expected: float) -> None:
    task = Task(id="1", prompt="", answer=answer)
    assert fuzzy_match(task, completion) == expected
    assert fuzzy_match(task, completion, threshold=0.5) == float(expected >= 0.5)


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("\n<think>\na\n</think>\n\n<answer>b</answer>  ", 1.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think>b", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("so: <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> and", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a<answer></think>b</answer>", 0.0),
    ],
)
def test_format_wants_every_tag_once_in_order_and_nothing_else(completion: str, expected: float) -> None:
    assert score(RewardConfig(function="format"), completion) == expected
    pattern = r"<think>(?:(?!<answer>).)*</think>\s*<answer>(?:(?!<answer>).)*</answer>"
    assert Format(pattern=pattern)(TASK, completion) == expected


@pytest.mark.parametrize(
    ("gold", "completion", "expected"),
    [
        ("Anna has 6 * 7 = 42 eggs.\n#### 42", "So it is \\boxed{42}.", 1.0),
        ("6 * 7 = <<6*7=42>>42\n#### 42", "6 * 7 = 41\n#### 42", 1.0),
        ("#### 1,234", "\\boxed{1234}", 1.0),
        ("#### 42", "First \\boxed{42}, no: \\boxed{43}", 0.0),
        ("42", "The answer is 42.", 1.0),
        ("42", "I tried 42 and then found that the answer is 43.", 0.0),
        ("\\frac{1}{2}", "\\boxed{0.5}", 1.0),
        ("1/2", "\\boxed{\\frac{2}{4}}", 1.0),
        ("x^2+2x+1", "\\boxed{(x+1)^2}", 1.0),
        ("(1, 2)", "\\boxed{(1,2)}", 1.0),
        ("(1, 2)", "\\boxed{(2,1)}", 0.0),
        ("\\boxed{\\sqrt{8}}", "thus \\boxed{2\\sqrt{2}}", 1.0),
        ("42", "I do not know", 0.0),
        ("42", "", 0.0),
        ("42", "\\boxed{\\frac{1}{", 0.0),
    ],
)
def test_math_answers_are_compared_by_what_they_mean(gold: str, completion: str, expected: float) -> None:
    pytest.importorskip("math_verify")
    assert BUILT_IN_REWARDS["math_answer"].function(Task(id="1", prompt="", answer=gold), completion) == expected


def test_math_answer_runs_in_a_process_which_is_killed_when_an_answer_takes_too_long() -> None:
    pytest.importorskip("math_verify")

    async def program() -> float:
        pool = scorer(RewardConfig(function="math_answer", timeout_s=2.0, workers=1))
        task = Task(id="1", prompt="", answer="42")
        with pytest.raises(RewardFailed, match="its worker process was killed"):
            await pool.score(task, "\\boxed{9^{9^{9^{9}}}!}")
        patient = scorer(RewardConfig(function="math_answer", timeout_s=60.0, workers=1))  # its import takes seconds
        return await patient.score(task, "\\boxed{41+1}")

    assert asyncio.run(program()) == 1.0


def test_math_answer_works_on_a_thread_where_signals_do_not() -> None:
    pytest.importorskip("math_verify")
    config = RewardConfig(function="math_answer", process=False, args={"boxed_only": True})
    assert score(config, "\\boxed{2+2}") == 1.0 and score(config, "2+2") == 0.0


def test_the_last_closed_box_counts_with_its_inner_braces() -> None:
    assert last_boxed("\\boxed{1} \\boxed{\\frac{1}{2}} \\boxed{3") == "\\frac{1}{2}"
    assert last_boxed("nothing") is None


def test_python_tests_give_the_share_that_passes() -> None:
    tests = ["assert double(2) == 4", "assert double('a') == 'aa'", "assert double(2) == 5", "assert double([]) == []"]
    task = Task(id="1", prompt="", data={"tests": tests})
    right = "First:\n```python\nbroken(\n```\nBetter:\n```python\ndef double(x):\n    return x * 2\n```\nDone."
    assert score(RewardConfig(function="python_tests"), right, task) == 0.75
    assert score(RewardConfig(function="python_tests", args={"all_or_nothing": True}), right, task) == 0.0
    assert score(RewardConfig(function="python_tests"), "def double(x): return x * 2", task) == 0.0
    assert (
        score(
            RewardConfig(function="python_tests", args={"program_s": 0.3}), "```python\nwhile True: print()\n```", task
        )
        == 0.0
    )


def test_python_tests_compare_what_a_program_prints() -> None:
    pairs = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5", "output": "10"}, {"input": "0 0", "output": "1"}]
    task = Task(id="1", prompt="", data={"tests": pairs})
    program = "```py\nprint(sum(map(int, input().split())), ' ')\n```"
    assert score(RewardConfig(function="python_tests"), program, task) == pytest.approx(2 / 3)
    hangs = "```python\nimport time\ntime.sleep(60)\n```"
    began = time.monotonic()
    assert score(RewardConfig(function="python_tests", timeout_s=0.5), hangs, task) == 0.0
    assert time.monotonic() - began < 50, "it does not wait for the program"


@pytest.mark.parametrize(
    "tests", [None, [], "assert f()", [1], [{"input": "a"}], ["assert f()", {"input": "", "output": ""}]]
)
def test_a_task_without_tests_that_can_be_run_fails_its_rollout(tests: Any) -> None:
    task = Task(id="7", prompt="", data={"tests": tests} if tests is not None else {})
    with pytest.raises(RewardFailed, match="task 7 has no tests that can be run"):
        score(RewardConfig(function="python_tests"), "```python\npass\n```", task)


def test_the_last_python_block_is_the_program() -> None:
    assert last_block("```python\na\n```\n```\nb\n```\n```Python3 \nc\n```") == "c\n"
    assert last_block("```python\nnever closed") is None


# ---- groups --------------------------------------------------------------------------------------------------------------------


def groups(*configs: RewardConfig, completions: Sequence[str] = ("ccc", "a", "bb")) -> list[float]:
    group = group_scorer(prepare_rewards(configs))
    assert isinstance(group, GroupScorer)
    return asyncio.run(group.score(TASK, completions))


@pytest.mark.parametrize("process", [False, True])
def test_rewards_of_groups_add_up_with_their_weights(mine: Path, process: bool) -> None:
    ranks = RewardConfig(function=f"{mine}:ranks", group=True, weight=2.0, process=process, workers=1)
    more = RewardConfig(function=f"{mine}:ranks_later", group=True, args={"by": 0.5}, process=process, workers=1)
    assert groups(ranks, more) == [-3.5, 0.5, -1.5]
    assert groups(ranks, completions=()) == []


def test_each_scorer_has_its_own_rewards_and_leaves_the_others(mine: Path) -> None:
    both = prepare_rewards([RewardConfig(), RewardConfig(function=f"{mine}:ranks", group=True)])
    assert (
        asyncio.run(CompletionScorer(both).score(TASK, "4")) == 1.0
        and CompletionScorer(both).name == "reward exact_match"
    )
    group = group_scorer(both)
    assert group is not None and asyncio.run(group.score(TASK, ["4"])) == [0.0]
    assert group_scorer(both[:1]) is None
    assert asyncio.run(CompletionScorer(both[1:]).score(TASK, "4")) == 0.0


@pytest.mark.parametrize("process", [False, True])
def test_a_group_reward_that_returns_too_few_numbers_fails(mine: Path, process: bool) -> None:
    with pytest.raises(RewardFailed, match="returned 1 numbers: expected 3, one per completion"):
        groups(RewardConfig(function=f"{mine}:too_few", group=True, process=process, workers=1))


def test_among_right_answers_the_shortest_gets_most() -> None:
    config = RewardConfig(function="shortest_right", group=True)
    completions = ["4", " 4 ", "5", "4  ", "4    "]
    assert groups(config, completions=completions) == [
        1.0,
        pytest.approx(1 - 0.5 / 3),
        0.0,
        pytest.approx(1 - 0.5 / 3),
        0.5,
    ]
    assert groups(config, completions=["5", "4   "]) == [0.0, 1.0]
    assert groups(config, completions=["5", "6"]) == [0.0, 0.0]


# ---- the documentation ---------------------------------------------------------------------------------------------------------


def test_a_reward_is_written_in_under_ten_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first program of docs/rewards.md, through the real scorer, by the config that stands below it."""
    text = (ROOT / "docs" / "rewards.md").read_text()
    code, config = (re.search(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("python", "toml"))
    assert code is not None and config is not None and len(code.group(1).splitlines()) < 10
    monkeypatch.chdir(tmp_path)
    Path("my_reward.py").write_text(code.group(1))
    import tomllib

    run = convert(
        {"model": {"tiny": {}}, "data": {"toy": "sort_digits"}, **tomllib.loads(config.group(1))},
        RunConfig,
        where="docs",
    )
    own = CompletionScorer(prepare_rewards(run.reward))
    assert asyncio.run(own.score(TASK, "The answer is 4")) > asyncio.run(own.score(TASK, "The answer is 5"))


def test_every_built_in_and_each_of_its_options_is_documented() -> None:
    import inspect

    text = (ROOT / "docs" / "rewards.md").read_text()
    for name, built_in in BUILT_IN_REWARDS.items():
        assert f"`{name}`" in text
        parameters = inspect.signature(built_in.function).parameters.values()
        for parameter in parameters:
            if parameter.kind is parameter.KEYWORD_ONLY:
                assert f"`{parameter.name}`" in text, f"{name}: {parameter.name}"


def test_a_file_of_ones_own_may_have_dataclasses_and_the_name_of_a_standard_module(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Rule:\n"
        "    worth: float = 0.5\n"
        "def reward(task, completion):\n"
        "    return Rule().worth\n"
    )
    import code

    assert find_reward(f"{tmp_path}/code.py:reward")(None, "") == 0.5
    assert hasattr(code, "InteractiveConsole")
