"""Data sets and rewards: every mistake is named, none is fatal that need not be."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from millstream.env.data import DataConfig, in_order, read
from millstream.env.games import toy
from millstream.env.rewards import CompletionScorer, RewardConfig, exact_match, find_reward
from millstream.env.single_turn import SingleTurn
from millstream.errors import ConfigError, DataError, RewardFailed
from millstream.rpc.threads import DaemonThreads
from millstream.types import Message, Task

TASK = Task(id="1", prompt="2+2=", answer="4", data={"level": 3})


def data(tmp_path: Path, *lines: object, **config: Any) -> DataConfig:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return DataConfig(path=str(path), **{"holdout": 0, **config})


def test_a_record_becomes_a_task_with_its_other_fields_for_the_reward(tmp_path: Path) -> None:
    config = data(tmp_path, {"question": "2+2=", "answer": 4, "level": 3}, prompt_key="question")
    assert read(config, seed=0).train == (TASK,)


def test_chat_prompts_are_kept_as_messages(tmp_path: Path) -> None:
    (task,) = read(data(tmp_path, {"prompt": [{"role": "user", "content": "hi"}]}), seed=0).train
    assert not isinstance(task.prompt, str) and task.prompt[0].content == "hi" and task.answer is None


def test_a_system_message_makes_a_chat_of_a_string_and_leaves_a_chat_as_it_is(tmp_path: Path) -> None:
    lines = {"prompt": "2+2="}, {"prompt": [{"role": "user", "content": "hi"}]}
    string, chat = (Message(role="user", content=text) for text in ("2+2=", "hi"))
    system = Message(role="system", content="Be brief.")
    for set_to, expected in (
        ("Be brief.", ((system, string), (chat,))),
        ("", ((string,), (chat,))),
        (None, ("2+2=", (chat,))),
    ):
        tasks = read(data(tmp_path, *lines, system=set_to), seed=0).train
        assert tuple(task.prompt for task in tasks) == expected


def test_options_of_a_data_set_that_is_read_are_refused_where_none_is() -> None:
    with pytest.raises(ValueError, match="system goes with path or name"):
        DataConfig(toy="sort_digits", system="Be brief.")
    with pytest.raises(ValueError, match="subset goes with name"):
        DataConfig(path="data.jsonl", subset="main")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"prompt": "a"}, "{oops"], r"data\.jsonl, line 2: not JSON"),
        ([[1, 2]], r"line 1: expected an object, got list"),
        ([{"question": "a"}], r"line 1: no key 'prompt' among 'question': set data\.prompt_key"),
        ([{"prompt": ""}], r"line 1: the prompt must be a non-empty string or list of messages, got ''$"),
        ([{"prompt": [{"content": "x"}]}], r"line 1: a chat prompt is a list of objects with role and content"),
        ([{"prompt": ["hi"]}], r"line 1: a chat prompt .*, and message 0 is hi"),
        (
            [{"prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": None}]}],
            r"line 1: message 1: the content is None: expected a string, or a list of parts",
        ),
        (
            [{"prompt": [{"role": None, "content": "x"}]}],
            r"line 1: message 0: the role is None: expected system, user, assistant, tool",
        ),
        (
            [{"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}],
            r"line 1: message 0, part 0 is \{'type': 'image_url'.*: expected text",
        ),
        ([{"prompt": None}], r"line 1: the prompt must be a non-empty string or list of messages, got None"),
        ([{"prompt": "a", "answer": math.nan}], r"line 1: answer is nan: expected a string or a finite number"),
        ([{"prompt": "a", "answer": ["b"]}], r"line 1: answer is \['b'\]: expected a string or a finite number"),
        (['{"prompt": "a", "answer": 1e999}'], r"line 1: answer is inf: expected a string or a finite number"),
        ([{"prompt": "a", "id": {}}], r"line 1: id is \{\}: expected a string or a finite number"),
        (['{"prompt": "\\ud800"}'], r"line 1: half of a surrogate pair"),
        (['{"prompt": "a", "other": [{"\\uDC00": 1}]}'], r"line 1: half of a surrogate pair"),
        (["[" * 100_000], r"line 1: objects or lists nested too deeply"),
        (['{"prompt": "a", "x": ' + "[" * 500 + "]" * 500 + "}"], r"line 1: objects or lists nested too deeply"),
        (['{"prompt": "a", "n": ' + "1" * 5000 + "}"], r"line 1: not JSON: Exceeds the limit \(4300 digits\)"),
        (
            [{"x" * 5000: 1, **{str(n): n for n in range(99)}}],
            r"no key 'prompt' among 'x{80}\.\.\.', '0', .*, \.\.\.: set",
        ),
        ([], "has no tasks"),
        (["", "  "], "has no tasks"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(data(tmp_path, *lines), seed=0)


def test_a_line_that_python_can_only_just_read_is_refused_as_too_deep(tmp_path: Path) -> None:
    limit = sys.getrecursionlimit()
    for depth in range(limit - 200, limit):
        with pytest.raises(DataError, match="line 1: objects or lists nested too deeply"):
            read(data(tmp_path, f'{{"prompt": "a", "other": {"[" * depth}"\\ud83d\\ude00"{"]" * depth}}}'), seed=0)


def test_parts_of_text_are_joined_and_null_is_no_answer_and_no_id(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    lines = (
        {"prompt": [{"role": "user", "content": parts}], "answer": None, "id": None},
        {"prompt": "\ud83d\ude00", "answer": 1.5, "id": None, "other": math.nan},
    )
    first, second = read(data(tmp_path, *lines), seed=0).train
    assert (first.prompt, first.answer, first.id) == ((Message(role="user", content="ab"),), None, "1")
    assert (second.prompt, second.answer, second.id) == ("\U0001f600", "1.5", "2")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (".", r"data\.path = \. is a folder: expected a JSONL file .*--set data\.path= --set data\.name=\."),
        ("/dev/null", r"data\.path = /dev/null is not a file"),
        ("x" * 300, r"cannot look at data\.path = x{80}\.\.\.: File name too long"),
        ("a\0b", r"cannot look at data\.path = a\\x00b: embedded null"),
        ("nowhere.jsonl", r"cannot read data\.path = nowhere\.jsonl: No such file"),
    ],
)
def test_a_path_that_is_no_file_says_what_it_is(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(DataConfig(path=path), seed=0)


def test_a_parquet_file_is_read_like_a_jsonl_file(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "data.parquet"
    chat = [{"role": "user", "content": "hi"}]
    parquet.write_table(pyarrow.table({"question": [chat], "answer": [4], "level": [3]}), path)
    (task,) = read(DataConfig(path=str(path), prompt_key="question", holdout=0), seed=0).train
    assert not isinstance(task.prompt, str) and task.prompt[0].content == "hi"
    assert (task.answer, task.data) == ("4", {"level": 3})
    path.write_text("no parquet")
    with pytest.raises(DataError, match="is not a Parquet file"):
        read(DataConfig(path=str(path), holdout=0), seed=0)


def test_a_data_set_of_the_datasets_library_is_read_by_name(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "c", "answer": "d"}\n')
    tasks = read(DataConfig(name=str(tmp_path / "mine"), holdout=0), seed=0).train
    assert [(task.prompt, task.answer) for task in tasks] == [("a", "b"), ("c", "d")]
    with pytest.raises(DataError, match="datasets cannot load"):
        read(DataConfig(name=str(tmp_path / "nowhere"), holdout=0), seed=0)


def test_a_subset_of_a_data_set_is_read_by_its_name(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: main\n  data_files: main.jsonl\n"
        "- config_name: socratic\n  data_files: socratic.jsonl\n---\n"
    )
    for subset in ("main", "socratic"):
        (tmp_path / f"{subset}.jsonl").write_text(json.dumps({"prompt": f"of {subset}"}))
        (task,) = read(DataConfig(name=str(tmp_path), subset=subset, holdout=0), seed=0).train
        assert task.prompt == f"of {subset}"
    with pytest.raises(DataError, match=r"datasets cannot load .*, subset 'other', split 'train'"):
        read(DataConfig(name=str(tmp_path), subset="other", holdout=0), seed=0)


def test_a_missing_file_and_a_holdout_that_takes_everything_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read data\.path = nowhere\.jsonl: No such file"):
        read(DataConfig(path="nowhere.jsonl"), seed=0)
    with pytest.raises(DataError, match=r"Set data\.holdout lower"):
        read(data(tmp_path, {"prompt": "a"}, holdout=1), seed=0)


def test_the_holdout_is_chosen_by_seed_and_never_trained(tmp_path: Path) -> None:
    config = data(tmp_path, *({"prompt": f"p{i}"} for i in range(50)), holdout=10)
    first, again, other = (read(config, seed=seed) for seed in (1, 1, 2))
    assert first == again and first.held_out != other.held_out
    assert len(first.held_out) == 10 and not {t.id for t in first.held_out} & {t.id for t in first.train}


def test_every_epoch_has_every_task_once_in_an_order_of_its_own() -> None:
    tasks = toy.make_toy_tasks("sort_digits", 20, seed=0)
    first = list(itertools.islice(in_order(tasks, seed=3, shuffle=True), 40))
    assert first == list(itertools.islice(in_order(tasks, seed=3, shuffle=True), 40))
    epochs = [[task.id for epoch, task in first if epoch == number] for number in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(task.id for task in tasks) and epochs[0] != epochs[1]
    assert [t.id for _, t in itertools.islice(in_order(tasks, seed=3, shuffle=False), 20)] == [t.id for t in tasks]


@pytest.mark.parametrize("name", toy.TASKS)
def test_the_gold_answer_of_every_toy_task_scores_one(name: str) -> None:
    tasks = toy.make_toy_tasks(name, 200, seed=1)
    assert len({task.prompt for task in tasks}) == len(tasks) == 200
    assert all(exact_match(task, task.answer or "") == 1.0 for task in tasks)
    assert all(set(str(task.prompt) + str(task.answer)) <= set(toy.ALPHABET) for task in tasks)


def test_an_unknown_toy_task_is_an_error_that_lists_them() -> None:
    with pytest.raises(ConfigError, match="choose one of sort_digits"):
        toy.make_toy_tasks("sort_numbers", 1, seed=0)


# ---- rewards -----------------------------------------------------------------------------------------------------------


def score(function: Any, *, timeout_s: float = 5.0, weight: float = 1.0) -> float:
    config = RewardConfig(function="mine", timeout_s=timeout_s, weight=weight)
    return asyncio.run(CompletionScorer([(function, config)]).score(TASK, "4"))


def test_plain_and_async_functions_are_called_with_task_and_completion() -> None:
    async def slow(task: Task, completion: str) -> float:
        await asyncio.sleep(0.001)
        return float(completion == task.answer)

    assert score(slow) == 1.0
    assert score(lambda task, completion: task.data["level"], weight=0.5) == 1.5


def test_several_rewards_add_up_with_their_weights() -> None:
    scorer = CompletionScorer([(exact_match, RewardConfig(weight=2.0)), (lambda t, c: -1, RewardConfig(weight=0.5))])
    assert asyncio.run(scorer.score(TASK, " 4\n")) == 1.5


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda t, c: 1 / 0,
            r"reward mine raised ZeroDivisionError at test_data_and_rewards\.py:\d+: division by zero",
        ),
        (lambda t, c: float("nan"), "returned nan: expected a finite number"),
        (lambda t, c: [1.0, 2.0], r"returned \[1.0, 2.0\]: expected one number"),
        (lambda t, c: None, "returned None: expected one number"),
        (lambda t, c: time.sleep(60), r"took longer than 0\.2 s; reward\.timeout_s"),
    ],
)
def test_a_reward_that_breaks_fails_its_rollout_and_says_how(function: Any, message: str) -> None:
    began = time.monotonic()
    with pytest.raises(RewardFailed, match=message):
        score(function, timeout_s=0.2)
    assert time.monotonic() - began < 10


def test_a_reward_that_raises_is_named_with_the_line_of_its_own_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import json\n\ndef helper(text):\n    return json.loads(text)\n\ndef reward(task, completion):\n    return helper('{')\n"
        "\nasync def later(task, completion):\n    return task.data['hrd']\n\ndef one_argument(task):\n    return 1.0\n"
    )
    for name, message in {
        "reward": r"raised JSONDecodeError at mine\.py:4: Expecting",
        "later": r"raised KeyError at mine\.py:10: 'hrd'",
        "one_argument": r"raised TypeError at its call: one_argument\(\) takes 1 positional argument but 2 were given",
    }.items():
        with pytest.raises(RewardFailed, match=message):
            score(find_reward(f"{path}:{name}"))


def test_calls_that_hang_hold_back_nobody_else() -> None:
    async def program() -> None:
        threads = DaemonThreads("test", most=2)
        hung = [threads.call(lambda: time.sleep(60), timeout_s=0.05) for _ in range(2)]
        assert all(isinstance(e, TimeoutError) for e in await asyncio.gather(*hung, return_exceptions=True))
        assert await asyncio.wait_for(threads.call(lambda: 7), 5) == 7

    asyncio.run(program())


def test_the_time_limit_of_a_reward_does_not_count_the_queue_for_a_thread() -> None:
    def slow(task: Task, completion: str) -> float:
        time.sleep(0.05)
        return 1.0

    async def program() -> list[float]:
        scorer = CompletionScorer([(slow, RewardConfig(timeout_s=1.0))])
        before = threading.active_count()
        scores = await asyncio.gather(*(scorer.score(TASK, "4") for _ in range(400)))
        assert threading.active_count() - before <= 16
        return scores

    assert asyncio.run(program()) == [1.0] * 400


def test_a_task_without_an_answer_is_no_match_for_an_empty_completion() -> None:
    with pytest.raises(RewardFailed, match=r"set data\.answer_key"):
        exact_match(Task(id="1", prompt="?"), "")


def test_characters_that_look_like_line_ends_are_no_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text('{"prompt": "a\u2028b\x85c"}\n', encoding="utf-8")
    (task,) = read(DataConfig(path=str(path), holdout=0), seed=0).train
    assert task.prompt == "a\u2028b\x85c"


def test_two_records_with_one_id_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 2: the id '7' is that of .*line 1"):
        read(data(tmp_path, {"id": 7, "prompt": "a"}, {"id": 7, "prompt": "b"}), seed=0)


def test_a_reward_is_found_by_name_module_or_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def reward(task, completion):\n    return 0.25\n")
    assert find_reward("exact_match") is exact_match
    assert find_reward("millstream.env.rewards:exact_match") is exact_match
    assert find_reward(f"{path}:reward")(TASK, "") == 0.25


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact_mach", "no reward 'exact_mach': use exact_match"),
        ("no.such.module:f", "cannot import no.such.module"),
        ("nowhere.py:f", r"no file nowhere\.py"),
        ("millstream.env.rewards:nothing", "has no function 'nothing'"),
    ],
)
def test_a_reward_that_is_not_there_is_a_config_error(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_reward(name)


def test_a_reward_file_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import nothing_of_the_kind\n")
    with pytest.raises(ConfigError, match="ModuleNotFoundError"):
        find_reward(f"{path}:f")


def test_the_single_turn_environment_shows_the_prompt_and_scores_the_answer() -> None:
    class Context:
        task, seed = TASK, 0

        async def waiting(self, what, work):  # type: ignore[no-untyped-def]
            assert what == "reward exact_match"
            return await work

        async def ask(self, content: object) -> str:
            assert content == TASK.prompt
            return "4"

    environment = SingleTurn(CompletionScorer([(exact_match, RewardConfig())]))
    assert asyncio.run(environment.rollout(Context())) == 1.0
