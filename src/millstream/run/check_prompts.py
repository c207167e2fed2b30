"""Checks of prompts that need the model's tokenizer: lengths, and text that it does not know."""

from __future__ import annotations

from transformers import PreTrainedModel

from millstream.env.data import DataSet
from millstream.env.registry import Environments
from millstream.env.single_turn import SingleTurn
from millstream.errors import DataError
from millstream.model.load import context_length
from millstream.run.config import RunConfig
from millstream.run.text import TokenizerText
from millstream.types import Task

MAX_PROMPTS_CHECKED = 10_000
MAX_PIECES = 5


def _is_prompt_shown(task: Task, environments: Environments) -> bool:
    """Whether the model is first shown the prompt itself, so that its length is known before it is played."""
    return isinstance(environments.of(task).environment, SingleTurn)


def check_lengths(
    config: RunConfig, model: PreTrainedModel, text: TokenizerText, data: DataSet, environments: Environments
) -> None:
    """Raises `DataError` for a prompt that leaves no room for an answer in the model's context."""
    limit, max_tokens = context_length(model), config.rollout.max_tokens
    if limit is None:
        return
    for task in data.tasks[:MAX_PROMPTS_CHECKED]:
        if not _is_prompt_shown(task, environments):
            continue
        try:
            length = len(text.opening(task.prompt))
        except DataError as error:
            raise DataError(f"{data.place_of(task)}: {error}") from error
        if length + max_tokens > limit:
            raise DataError(
                f"{data.place_of(task)}: the prompt has {length} tokens, which with rollout.max_tokens = {max_tokens} exceeds "
                f"the model's context of {limit}: set rollout.max_tokens lower, or drop the task"
            )


def unknown_text(text: TokenizerText, data: DataSet, environments: Environments) -> str:
    """A warning about prompts with text that the tokenizer does not know; empty if there are none."""
    tasks = [task for task in data.tasks[:MAX_PROMPTS_CHECKED] if _is_prompt_shown(task, environments)]
    strange = [task for task in tasks if not text.knows(text.opening(task.prompt))]
    if not strange:
        return ""
    pieces = ", ".join(map(repr, text.unknown_pieces(strange[0])[:MAX_PIECES]))
    return (
        f"{len(strange)} of {len(tasks)} prompts have something in them that the tokenizer does not know, and the model sees "
        f"{text.tokenizer.unk_token} instead. The first is {data.place_of(strange[0])}: {pieces or 'its text'}"
    )
