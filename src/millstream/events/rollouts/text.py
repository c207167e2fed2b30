"""Rollouts as text: turns of the environment and of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from millstream.types import Mask, Rollout, Task

Decode = Callable[[Sequence[int]], str]


class TurnText(NamedTuple):
    speaker: Literal["environment", "model"]
    text: str


def turn_texts(rollout: Rollout, decode: Decode) -> list[TurnText]:
    """The turns of one part: the runs of its loss mask, in order. The first is the prompt."""
    return [
        TurnText("model" if is_sampled else "environment", decode(rollout.tokens[of].tolist()))
        for is_sampled, of in mask_runs(rollout.loss_mask)
    ]


def task_text(task: Task) -> str:
    """Its prompt; of a chat, a line for each message."""
    if isinstance(task.prompt, str):
        return task.prompt
    return "\n".join(f"{message.role}: {message.content}" for message in task.prompt)


def mask_runs(loss_mask: Mask) -> Iterator[tuple[bool, slice]]:
    """Where tokens were sampled (True) and where they were shown, from the first token to the last."""
    ends = [*(np.flatnonzero(loss_mask[1:] != loss_mask[:-1]) + 1).tolist(), len(loss_mask)]
    begin = 0
    for end in ends:
        if end > begin:
            yield bool(loss_mask[begin]), slice(begin, end)
        begin = end


def spoken_text(parts: Sequence[Rollout], decode: Decode) -> str:
    """Everything after the prompt: what the model wrote and, named, what the environment answered."""
    turns = [turn for part in parts for turn in turn_texts(part, decode)][1:]
    return "\n".join(text if speaker == "model" else f"[{speaker}] {text}" for speaker, text in turns)
