"""Answers that are mathematics, compared by what they mean: 1/2, 0.5 and \\frac{1}{2} are one answer. Needs the extra `math`.

math-verify limits its own time with SIGALRM, which works in the main thread alone and raises everywhere else. Its limits are
therefore off, and ours hold instead: this reward runs in a worker process unless the config sets process = false.
"""

from __future__ import annotations

import logging
from typing import Any

from millstream.env.rewards.text import answer_of
from millstream.errors import RewardFailed
from millstream.types import Task

BOX = "\\boxed{"
# Before the answer, in GSM8K's solutions.
MARK = "####"


def math_answer(task: Task, completion: str, *, boxed_only: bool = False, precision: int = 6) -> float:
    """1 if the completion's answer is the task's. The answer is what stands in the last \\boxed{}; without a box, what follows
    the last ####; without that, the final expression (with boxed_only: nothing, and the score is 0). Numbers are compared to
    `precision` decimal places."""
    gold = _last_part(answer_of(task))
    boxed = last_boxed(completion)
    if boxed is None and boxed_only:
        return 0.0
    found = boxed if boxed is not None else _last_part(completion)
    if _plain(found) == _plain(gold):
        return 1.0
    is_marked = boxed is not None or MARK in completion
    expected = _parse(f"${gold}$") or _parse(gold)
    if not expected:
        raise RewardFailed(f"task {task.id}: its answer {gold!r} is no mathematics that math-verify can read")
    answers = (_parse(f"${found}$") or _parse(found)) if is_marked else _parse(found)
    return float(_verify(expected, answers, precision))


def last_boxed(text: str) -> str | None:
    """What stands in the last \\boxed{...} that is closed, inner braces and all. None without one."""
    end = len(text)
    while (begin := text.rfind(BOX, 0, end)) >= 0:
        depth = 0
        for place in range(begin + len(BOX) - 1, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[begin + len(BOX) : place].strip()
        end = begin
    return None


def _last_part(text: str) -> str:
    boxed = last_boxed(text)
    return boxed if boxed is not None else text.rpartition(MARK)[2].strip()


def _plain(text: str) -> str:
    return text.replace(" ", "").replace("$", "").replace(",\\!", "").rstrip(".")


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    _silence()
    return list(parse(text, parsing_timeout=None))


def _verify(gold: list[Any], found: list[Any], precision: int) -> bool:
    from math_verify import verify

    return bool(found) and bool(verify(gold, found, float_rounding=precision, timeout_seconds=None))


def _silence() -> None:
    """It warns that its time limits are off, which they are on purpose."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
