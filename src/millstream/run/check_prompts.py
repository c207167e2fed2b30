"""Checks of prompts that need the model's tokenizer: lengths, and text that it does not know."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from millstream.env.data import DataSet
from millstream.env.registry import single_turn_tasks
from millstream.env.resolve import EnvironmentKind
from millstream.errors import DataError, ModelError
from millstream.model.load import load_tokenizer
from millstream.model.tiny import character_tokenizer
from millstream.run.check_machine import MAX_PROMPTS_CHECKED, check_length, find_context
from millstream.run.config import ModelConfig, RunConfig
from millstream.run.text import TokenizerText
from millstream.types import Task

MAX_PIECES = 5


def _shown_tasks(kinds: Sequence[EnvironmentKind], data: DataSet) -> list[Task]:
    """Those whose length is known before they are played."""
    return list(single_turn_tasks(kinds, data.tasks[:MAX_PROMPTS_CHECKED]))


def check_with_tokenizer(config: RunConfig, kinds: Sequence[EnvironmentKind], data: DataSet) -> int:
    """What `checked_room` cannot tell, with the model's own tokenizer: loads no weights. The number of prompts checked."""
    text = TokenizerText(tokenizer=tokenizer_of(config.model))
    return check_lengths(config, find_context(config), text, data, kinds)


def tokenizer_of(config: ModelConfig) -> PreTrainedTokenizerBase:
    return load_checked_tokenizer(config) if config.tiny is None else character_tokenizer(config.tiny.alphabet)


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


def check_lengths(
    config: RunConfig, limit: int | None, text: TokenizerText, data: DataSet, kinds: Sequence[EnvironmentKind]
) -> int:
    """Raises `DataError` for a prompt that the chat template refuses, or that leaves no room for an answer in the model's
    context, of `limit` tokens. The number of prompts checked."""
    tasks = _shown_tasks(kinds, data)
    for task in tasks:
        try:
            length = len(text.opening(task.prompt))
        except DataError as error:
            raise DataError(f"{data.place_of(task)}: {error}") from error
        if limit is not None:
            check_length(config, length, limit, data.place_of(task))
    return len(tasks)


def unknown_text(text: TokenizerText, data: DataSet, kinds: Sequence[EnvironmentKind]) -> str:
    """A warning about prompts with text that the tokenizer does not know; empty if there are none."""
    tasks = _shown_tasks(kinds, data)
    strange = [task for task in tasks if not text.knows(text.opening(task.prompt))]
    if not strange:
        return ""
    pieces = ", ".join(map(repr, text.unknown_pieces(strange[0])[:MAX_PIECES]))
    return (
        f"{len(strange)} of {len(tasks)} prompts have something in them that the tokenizer does not know, and the model sees "
        f"{text.tokenizer.unk_token} instead. The first is {data.place_of(strange[0])}: {pieces or 'its text'}"
    )
