"""Checks of prompts that need the model's tokenizer: lengths, and text that it does not know."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from millstream.env.tools import configured_tools, tool_call_fields, tool_function
from millstream.errors import ConfigError, DataError, ModelError
from millstream.model.load import load_tokenizer
from millstream.model.tiny import character_tokenizer
from millstream.run.check_machine import PlayedTasks, find_context
from millstream.run.config import ModelConfig, RunConfig
from millstream.run.text import TokenizerText
from millstream.types import TOOLS_ROLE, Message

MAX_PIECES = 5
RESULT = "result of the tool"
SERVER_TOOL = tool_function(lambda text: text).schema()  # in place of those of an MCP server, which is not started yet


def checked_with_tokenizer(config: RunConfig, played: PlayedTasks) -> Iterator[str]:
    """What `checked_room` cannot tell, with the model's own tokenizer: loads no weights."""
    text = TokenizerText(tokenizer=tokenizer_of(config.model))
    number = check_lengths(played, find_context(config), text)
    of = f" of the evaluation {played.evaluation}" if played.evaluation else ""
    yield f"checked: {number} prompts{of} fit into the model's context, by its tokenizer"
    if warning := unknown_text(text, played):
        yield f"warning: {warning}"


def tokenizer_of(config: ModelConfig) -> PreTrainedTokenizerBase:
    if config.tiny is None:
        return load_checked_tokenizer(config)
    return character_tokenizer(config.tiny.alphabet, config.tiny.tokens, config.tiny.chat_template)


def load_checked_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Raises `ModelError` for a tokenizer without an end token."""
    path = config.path or ""
    tokenizer = load_tokenizer(path, trust_remote_code=config.trust_remote_code)
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer in {path} has no end token: a rollout could never stop by itself. Set eos_token in "
            f"{Path(path) / 'tokenizer_config.json'}"
        )
    return tokenizer


def check_lengths(played: PlayedTasks, limit: int | None, text: TokenizerText) -> int:
    """Raises `DataError` for a prompt that the chat template refuses, or that leaves no room for an answer in the model's
    context, of `limit` tokens. The number of prompts checked."""
    check_tools(played, text)
    tasks = played.shown_tasks()
    text.open_together(task.prompt for task in tasks)
    for task in tasks:
        place = played.data.place_of(task)
        try:
            length = len(text.opening(task.prompt))
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
        if limit is not None:
            played.check_length(length, limit, place)
    return len(tasks)


def check_tools(played: PlayedTasks, text: TokenizerText) -> None:
    """Raises `ConfigError` for an environment with tools, if the chat template shows either them or their results not."""
    for kind in played.kinds:
        if not kind.config.tools:
            continue
        schemas = configured_tools(kind.config.tools).schemas or [SERVER_TOOL]
        offer = Message(role=TOOLS_ROLE, content=json.dumps(schemas))
        called = {"tool_calls": [tool_call_fields("call00001", "?", {})]}
        asked = (Message(role="user", content="?"), Message(role="assistant", content="", fields=json.dumps(called)))
        result = Message(role="tool", content=RESULT, fields=json.dumps({"tool_call_id": "call00001", "name": "?"}))
        try:
            if RESULT not in text.render([offer, *asked, result]):
                raise DataError("the model's chat template does not show messages of the role tool")
        except DataError as error:
            raise ConfigError(f"the environment {kind.name} has tools: {error}") from error


def unknown_text(text: TokenizerText, played: PlayedTasks) -> str:
    """A warning about prompts with text that the tokenizer does not know; empty if there are none."""
    tasks, unknown = played.shown_tasks(), text.unknown_token
    strange = [task for task in tasks if unknown in text.opening(task.prompt)]
    if unknown is None or not strange:
        return ""
    tokens = [token for task in tasks for token in text.opening(task.prompt)]
    share = tokens.count(unknown) / len(tokens)
    pieces = ", ".join(map(repr, text.unknown_pieces(strange[0])[:MAX_PIECES]))
    return (
        f"{len(strange)} of {len(tasks)} prompts have something in them that the tokenizer does not know: the model sees "
        f"{text.tokenizer.unk_token} for {share:.0%} of their tokens. The first is {played.data.place_of(strange[0])}: "
        f"{pieces or 'its text'}"
    )
