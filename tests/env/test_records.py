"""Records in the forms of TRL and verl, and records that are passed from Python: each becomes the task that its author meant."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from millstream.env.data import DataConfig, read
from millstream.env.games.toy import ALPHABET
from millstream.errors import ConfigError, DataError
from millstream.types import TOOLS_ROLE, Message, Task
from support.talk import CHATML, text_with

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
TOOL_TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}CALL {{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def tasks_of(*records: Any, **config: Any) -> tuple[Task, ...]:
    return read(DataConfig(**{"holdout": 0, **config}), seed=0, passed=list(records)).train


class Image:
    """What PIL gives: an object that is neither text nor JSON."""

    def __repr__(self) -> str:
        return "<an image of PIL>"


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_tool_calls_and_other_fields_of_a_message_reach_the_chat_template() -> None:
    chat = [
        user("Rain?"),
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "content": "yes"},
    ]
    (task,) = tasks_of({"prompt": chat})
    assert not isinstance(task.prompt, str)
    rendered = text_with(TOOL_TEMPLATE).render(task.prompt)
    assert 'CALL weather {"city": "Ulm"}' in rendered and "tool: yes" in rendered
    assert task.prompt[2].as_dict() == chat[2]


@pytest.mark.parametrize("tools", [[WEATHER], json.dumps([WEATHER])])
def test_the_tools_of_a_chat_are_passed_to_the_chat_template(tools: object) -> None:
    (task,) = tasks_of({"prompt": [user("Rain?")], "tools": tools})
    assert not isinstance(task.prompt, str) and task.prompt[0].role == TOOLS_ROLE
    assert text_with(TOOL_TEMPLATE).render(task.prompt) == f"TOOLS {json.dumps([WEATHER])}\nuser: Rain?\nassistant: "


def test_tools_and_calls_that_the_template_would_not_show_are_refused() -> None:
    with_tools, with_calls = tasks_of(
        {"prompt": [user("Rain?")], "tools": [WEATHER]},
        {"prompt": [user("Rain?"), {"role": "assistant", "content": None, "tool_calls": [CALL]}, user("So?")]},
    )
    for task, what in ((with_tools, "tools"), (with_calls, "tool_calls")):
        assert not isinstance(task.prompt, str)
        with pytest.raises(DataError, match=f"the chat has {what}, and the model's chat template does not show them"):
            text_with(CHATML).render(task.prompt)


def test_a_role_of_one_s_own_is_passed_to_the_template_and_refused_where_that_would_drop_it() -> None:
    (task,) = tasks_of({"prompt": [{"role": "critic", "content": "Why?"}, user("So?")]})
    assert not isinstance(task.prompt, str)
    assert "critic\nWhy?" in text_with(CHATML).render(task.prompt)
    two_roles = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(DataError, match=r"the role 'critic' \(usual: system, user, assistant, tool\), and .* does not"):
        text_with(two_roles).render(task.prompt)
    alone = task.prompt[:1]
    assert "critic\nWhy?" in text_with(CHATML).render(alone)
    with pytest.raises(DataError, match="the role 'critic'"):
        text_with(two_roles).render(alone)
    with pytest.raises(DataError, match="without a message"):
        text_with(CHATML).render([])


def test_parts_of_text_are_joined_and_empty_columns_of_media_are_none() -> None:
    parts = [{"type": "text", "text": "2+"}, {"text": "2="}]
    (task,) = tasks_of({"prompt": [{"role": "user", "content": parts}], "images": [], "image": {"bytes": None}})
    assert task.prompt == (Message(role="user", content="2+2="),)


def test_fields_that_are_null_in_a_message_are_left_out_as_arrow_adds_them() -> None:
    (task,) = tasks_of({"prompt": [{"role": "user", "content": "hi", "tool_calls": None, "name": None}]})
    assert task.prompt == (Message(role="user", content="hi"),)


def test_a_digest_of_plain_messages_is_what_it_was() -> None:
    assert repr(Message(role="user", content="hi")) == "Message(role='user', content='hi')"


def test_a_completion_is_the_answer_where_there_is_none() -> None:
    string, chat, both = tasks_of(
        {"prompt": "2+2=", "completion": "4"},
        {"prompt": [user("2+2=")], "completion": [{"role": "assistant", "content": "4"}]},
        {"prompt": "2+2=", "completion": "four", "answer": "4"},
    )
    assert (string.answer, chat.answer, both.answer) == ("4", "4", "4")


def test_a_whole_chat_is_a_prompt_and_the_last_turn_of_the_assistant() -> None:
    (task,) = tasks_of({"messages": [user("2+2="), {"role": "assistant", "content": "4"}]})
    assert (task.prompt, task.answer) == ((Message(role="user", content="2+2="),), "4")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [user("a"), user("b")]}, "the completion is a message of the role 'user': expected text"),
        ({"prompt": "a", "completion": [user("b"), user("c")]}, "expected a string, or one message"),
        (
            {"prompt": [user("a")], "completion": [{"role": "assistant", "tool_calls": [CALL]}]},
            "a message with .*tool_calls",
        ),
        ({"messages": [{"role": "assistant", "content": "4"}]}, "the prompt must be a non-empty string or list"),
        ({"prompt": [user("a")], "tools": ["weather"]}, r"tools is \['weather'\]: expected a list of JSON schemas"),
        ({"prompt": [user("a")], "tools": "weather"}, "tools is a string that is not JSON"),
        ({"prompt": "<image> a", "images": [b"png"]}, "images is .*: images and other media are not trained. Drop the"),
        ({"prompt": "a", "image": {"bytes": b"png", "path": None}}, "image is .* are not trained. Drop the record, or"),
        ({"prompt": "a", "image": Image()}, "image is <an image of PIL>: .* Drop the record, or the field"),
        ({"prompt": [user("a") | {"images": ["aGk="]}]}, "message 0: images is .* not trained"),
        (
            {"prompt": [{"role": "user", "content": {"type": "image", "url": "a"}}]},
            "message 0: the content is .*images",
        ),
        ({"prompt": [{"role": "user", "content": Image()}]}, "message 0: the content is <an image of PIL>: .*images"),
        ({"prompt": [{"role": "user", "content": [Image()]}]}, "message 0, part 0 is <an image of PIL>: .*images"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
            "part 0 .*images .* or the part if it is not needed",
        ),
        (
            {"prompt": [{"role": "tools", "content": "yes"}]},
            "the role is 'tools': expected system, user, assistant, tool. The functions .* field 'tools'",
        ),
        ({"prompt": [{"role": 7, "content": "yes"}]}, "the role is 7: expected system, user, assistant, tool"),
        ({"prompt": [user("a"), {"role": "user", "content": [{"type": "image"}]}]}, "message 1, part 0 .*images"),
        ({"prompt": [{"role": "tool", "content": "a", "raw": b"\0"}]}, "message 0: .* cannot be written as JSON"),
    ],
)
def test_what_cannot_be_trained_is_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"data=, record 1: .*{message}"):
        tasks_of(record)


def test_ground_truth_of_verl_is_the_answer_where_it_is_text_and_the_reward_s_alone_otherwise() -> None:
    text, number, tests = tasks_of(
        *(
            {"prompt": [user("a")], "reward_model": {"style": "rule", "ground_truth": one}}
            for one in ("4", 4, {"in": [1]})
        )
    )
    assert (text.answer, number.answer, tests.answer) == ("4", "4", None)
    assert tests.data["reward_model"]["ground_truth"] == {"in": [1]}


def test_verl_s_parquet_is_read_with_every_field(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    row = {
        "data_source": "openai/gsm8k",
        "prompt": [user("2+2=")],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": 0},
    }
    path = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    (task,) = read(DataConfig(path=str(path), holdout=0), seed=0).train
    assert (task.prompt, task.answer) == ((Message(role="user", content="2+2="),), "4")
    assert task.data == {key: value for key, value in row.items() if key != "prompt"}


def test_records_are_passed_as_a_list_or_as_a_data_set_of_the_library() -> None:
    datasets = pytest.importorskip("datasets")
    records = [{"prompt": [user(f"{n}+1=")], "answer": n + 1} for n in range(4)]
    from_list = read(DataConfig(holdout=1), seed=3, passed=records)
    from_library = read(DataConfig(holdout=1), seed=3, passed=datasets.Dataset.from_list(records))
    assert from_list.tasks == from_library.tasks and len(from_list.held_out) == 1
    assert from_list.place_of(from_list.train[0]).startswith("data=, record ")


@pytest.mark.parametrize(
    ("passed", "message"),
    [
        ({"train": [], "test": []}, "data= is a dict: .*; it has the splits train, test: pass one"),
        ("data.jsonl", "data= is a str: expected a list of dicts, or a datasets.Dataset"),
        (7, "data= is a int: expected a list of dicts"),
        ([], "data= has no tasks"),
        ([1], "data=, record 1: expected an object, got int"),
    ],
)
def test_what_is_no_list_of_records_is_refused(passed: Iterable[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(DataConfig(), seed=0, passed=passed)


def test_data_that_is_passed_and_data_that_is_named_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"data= was passed, and the config has data.toy = 'sort_digits'"):
        read(DataConfig(toy="sort_digits"), seed=0, passed=[{"prompt": ALPHABET}])


def test_a_system_message_is_put_before_prompts_that_are_passed_and_refused_where_tasks_are_made() -> None:
    (task,) = tasks_of({"prompt": "2+2="}, system="Be brief.")
    assert task.prompt == (Message(role="system", content="Be brief."), Message(role="user", content="2+2="))
    with pytest.raises(DataError, match="system goes with path or name"):
        read(DataConfig(system="Be brief."), seed=0, make=lambda num, seed: [task])
