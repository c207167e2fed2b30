"""One record of a data set as a task: Millstream's own form, and those of TRL and verl.

    prompt        a string, or a list of messages: {role, content, ...}. `data.prompt_key` names another field
    messages      in place of a prompt: a whole chat. Its last message, the assistant's, is the answer
    answer        a string or a number. `data.answer_key` names another field
    completion    in place of an answer (TRL): a string, or a list of one message of the assistant
    reward_model  in place of an answer (verl): an object. Its `ground_truth` is the answer if it is a string or a number
    tools         of a chat: the functions that the model may call, a list of JSON schemas, or that list as a string

Every other field is there for the reward to read. With `data.system` a string becomes a chat. Nothing else is turned into text:
what is neither is refused, and so are images. Nothing that a chat template could show is dropped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence, Sized
from datetime import date
from decimal import Decimal
from typing import Any, NamedTuple

from millstream.config import MAX_DEPTH, is_deeper
from millstream.errors import DataError, shown
from millstream.types import ROLES, TOOLS_ROLE, Message, Task

ONE_A_LINE = "Expected one JSON object a line (JSONL), with a prompt"
MAX_NAMES = 8  # of keys in a message
MEDIA = ("image", "images", "video", "videos", "audio", "audios")  # fields in which other libraries have them
TEXT_PART = "{'type': 'text', 'text': '...'}"
NOT_TRAINED = "images and other media are not trained. Drop the record, or the {} if it is not needed"


class RecordKeys(NamedTuple):
    """Where in a record a task is; `system`: see `DataConfig`."""

    prompt: str
    answer: str
    system: str | None = None


def task_of(fields: Any, where: str, number: int, keys: RecordKeys) -> Task:
    """`where`: the file and line, for errors; `number`: its id where it has none. Raises `DataError`."""
    if not isinstance(fields, Mapping):
        raise DataError(f"{where}: expected an object, got {type(fields).__name__}. {ONE_A_LINE}")
    if is_deeper(fields, MAX_DEPTH):
        raise DataError(f"{where}: objects or lists nested too deeply: expected at most {MAX_DEPTH}")
    prompt, answer = _prompt_and_answer(fields, where, keys)
    own_id = _plain_text(fields.get("id"), f"{where}: id")
    return Task(
        id=str(number) if own_id is None else own_id,
        prompt=prompt,
        answer=answer,
        data={key: value for key, value in fields.items() if key not in (keys.prompt, keys.answer)},
        answer_key=keys.answer,
    )


def _prompt_and_answer(
    fields: Mapping[str, Any], where: str, keys: RecordKeys
) -> tuple[str | tuple[Message, ...], str | None]:
    prompt, completion = fields.get(keys.prompt), fields.get("completion")
    if keys.prompt not in fields:
        if not isinstance(fields.get("messages"), list):
            raise DataError(f"{where}: no key {keys.prompt!r} among {_names(fields)}: set data.prompt_key")
        prompt, completion = fields["messages"][:-1], fields["messages"][-1:]
    _check_media({name: value for name, value in fields.items() if name != keys.prompt}, where)
    shown_prompt = _prompt(prompt, where, keys.system)
    if not isinstance(shown_prompt, str) and fields.get("tools"):
        shown_prompt = (_tools(fields["tools"], where), *shown_prompt)
    return shown_prompt, _answer(fields, completion, where, keys)


def _check_media(fields: Mapping[str, Any], where: str) -> None:
    """Of a record or of a message. A string or a number is a remark about one."""
    for name in MEDIA:
        value = _without_null(fields.get(name))
        is_empty = isinstance(value, Sized) and not len(value)
        if value is not None and not is_empty and not isinstance(value, str | int | float):
            raise DataError(f"{where}: {name} is {shown(value)}: {NOT_TRAINED.format('field')}")


def _answer(fields: Mapping[str, Any], completion: Any, where: str, keys: RecordKeys) -> str | None:
    graded = fields.get("reward_model")
    if fields.get(keys.answer) is not None:
        return _plain_text(fields[keys.answer], f"{where}: {keys.answer}")
    if isinstance(graded, Mapping) and "ground_truth" in graded:  # in another form it is for the reward alone
        return _as_plain_text(graded["ground_truth"])
    if completion is None or isinstance(completion, str):
        return completion
    if not isinstance(completion, list) or len(completion) != 1:
        raise DataError(f"{where}: the completion is {shown(completion)}: expected a string, or one message")
    message = _message(completion[0], where, len(fields.get("messages") or [0]) - 1)
    if message.role != "assistant" or message.fields:
        what = f"of the role {message.role!r}" if message.role != "assistant" else f"with {shown(message.fields)}"
        raise DataError(f"{where}: the completion is a message {what}: expected text of the assistant")
    return message.content


def _names(fields: Mapping[str, Any]) -> str:
    names = [repr(shown(name)) for name in fields]
    return ", ".join([*names[:MAX_NAMES], *(["..."] if len(names) > MAX_NAMES else [])]) or "none"


def _plain_text(value: Any, where: str) -> str | None:
    """A string, or a finite number, a truth value or a date as a string. None: there is none."""
    text = _as_plain_text(value)
    if text is None and value is not None:
        raise DataError(
            f"{where} is {shown(value)}: expected a string or a finite number. Leave it out where there is none; what a reward "
            "reads in another form goes under another key"
        )
    return text


def _as_plain_text(value: Any) -> str | None:
    """None where it is neither a string, a finite number, a truth value nor a date."""
    if isinstance(value, str):
        return value
    is_plain = isinstance(value, int | float | Decimal | date)
    return str(value) if is_plain and not (isinstance(value, float | Decimal) and not math.isfinite(value)) else None


def _prompt(value: Any, where: str, system: str | None) -> str | tuple[Message, ...]:
    if isinstance(value, str) and value:
        return value if system is None else _chat(system, value)
    if isinstance(value, list) and value:
        return tuple(_message(message, where, number) for number, message in enumerate(value))
    raise DataError(f"{where}: the prompt must be a non-empty string or list of messages, got {shown(repr(value))}")


def _chat(system: str, prompt: str) -> tuple[Message, ...]:
    opening = (Message(role="system", content=system),) if system else ()
    return (*opening, Message(role="user", content=prompt))


def _message(message: Any, where: str, number: int) -> Message:
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys() | _implied(message):
        raise DataError(
            f"{where}: a chat prompt is a list of objects with role and content, and message {number} is {shown(message)}"
        )
    where = f"{where}: message {number}"
    role, content = message["role"], message.get("content")
    if not isinstance(role, str) or not role or role == TOOLS_ROLE:
        hint = (
            ". The functions that the model may call are the record's own field 'tools'" if role == TOOLS_ROLE else ""
        )
        raise DataError(f"{where}: the role is {shown(repr(role))}: expected {', '.join(ROLES)}{hint}")
    if isinstance(content, list):
        content = "".join(_text_of_part(part, f"{where}, part {number}") for number, part in enumerate(content))
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise DataError(
            f"{where}: the content is {shown(content)}: expected a string, or a list of parts {TEXT_PART}; "
            f"{NOT_TRAINED.format('content')}"
        )
    _check_media(message, where)
    others = {key: value for key, value in message.items() if key not in ("role", "content")}
    return Message(role=role, content=content, fields=_as_json(others, where) if _without_null(others) else "")


def _implied(message: Mapping[str, Any]) -> set[str]:
    """What a message need not have: one that calls functions needs no content."""
    return {"content"} if message.get("tool_calls") else set()


def _text_of_part(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
    if not isinstance(text, str):
        raise DataError(f"{where} is {shown(part)}: expected text, as {TEXT_PART}; {NOT_TRAINED.format('part')}")
    return text


def _tools(value: Any, where: str) -> Message:
    tools = value
    if isinstance(value, str):
        try:
            tools = json.loads(value)
        except ValueError as error:
            raise DataError(f"{where}: tools is a string that is not JSON: {error}") from error
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(
            f"{where}: tools is {shown(value)}: expected a list of JSON schemas of functions, or that list as a JSON string. "
            "Rename the field if it is something else"
        )
    return Message(role=TOOLS_ROLE, content=_as_json(tools, f"{where}: tools"))


def _as_json(value: Any, where: str) -> str:
    """Arrow gives every object of a column the fields of all of them: those that are null are left out."""
    try:
        return json.dumps(_without_null(value), ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: {shown(value)} cannot be written as JSON: {error}") from error


def _without_null(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_null(one) for key, one in value.items() if one is not None}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_without_null(one) for one in value]
    return value
