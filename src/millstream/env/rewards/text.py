"""Rewards that compare text. All of them take time linear in the text: they are called where they stand, without a thread."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

from millstream.errors import ConfigError, RewardFailed
from millstream.types import Task

PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))
ARTICLES = {"a", "an", "the"}


def answer_of(task: Task) -> str:
    if task.answer is None:
        raise RewardFailed(f"no answer to compare with: task {task.id} has none; set data.answer_key")
    return task.answer


def exact_match(task: Task, completion: str) -> float:
    """1 if the completion, without surrounding space, is the task's answer."""
    return float(completion.strip() == answer_of(task).strip())


def fuzzy_match(task: Task, completion: str, *, threshold: float | None = None) -> float:
    """Token F1, as SQuAD measures answers: the harmonic mean of how many words of the completion are in the answer and how
    many of the answer are in the completion. Case, punctuation and articles do not count. With a threshold: 1 from there on,
    and 0 below."""
    found, expected = normalised(completion), normalised(answer_of(task))
    if not found or not expected:
        score = float(found == expected)
    else:
        num_common = (Counter(found) & Counter(expected)).total()
        score = 2 * num_common / (len(found) + len(expected))
    return score if threshold is None else float(score >= threshold)


def normalised(text: str) -> list[str]:
    """The words of a text: one form of each character, lower case, no punctuation, no articles."""
    plain = unicodedata.normalize("NFKC", text).casefold().translate(PUNCTUATION)
    return [word for word in plain.split() if word not in ARTICLES]


class Format:
    """1 if the completion has the form that is asked for. Either a `pattern`, a regular expression (dots match line ends) that
    must match all of the completion, surrounding space aside; or `tags`, each of them once, in this order, with nothing but
    space between them."""

    def __init__(self, *, pattern: str | None = None, tags: Sequence[str] = ("think", "answer")) -> None:
        if isinstance(tags, str) or not tags:
            raise ConfigError(
                f'reward format: args.tags = {tags!r}: expected a list of names, such as ["think", "answer"]'
            )
        self._tags = tuple(tags)
        try:
            self._pattern = None if pattern is None else re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(
                f"reward format: args.pattern is no regular expression: {error}; it is {pattern!r}"
            ) from error

    def __call__(self, task: Task, completion: str) -> float:
        if self._pattern is not None:
            return float(self._pattern.fullmatch(completion.strip()) is not None)
        return float(self._has_tags(completion.strip()))

    def _has_tags(self, rest: str) -> bool:
        """Without a regular expression, which a long completion could make very slow."""
        if any(rest.count(mark) != 1 for tag in self._tags for mark in (f"<{tag}>", f"</{tag}>")):
            return False
        for tag in self._tags:
            if not rest.startswith(f"<{tag}>"):
                return False
            _, closed, rest = rest.partition(f"</{tag}>")
            if not closed:
                return False
            rest = rest.lstrip()
        return not rest
