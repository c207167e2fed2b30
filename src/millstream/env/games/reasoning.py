"""Reasoning Gym's generators as tasks of a single turn, scored by the generator's own rule.

A task is the name of a generator, a seed and a number: it is made again, exactly, wherever it is scored.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from millstream.decoding import decode_json
from millstream.env.base import Context
from millstream.errors import ConfigError
from millstream.rpc.threads import DaemonThreads
from millstream.seeds import derive_seed
from millstream.types import Message, Task

ALL = "all"
MAX_THREADS = 8
CHUNK = 16  # entries of one generator at a time. They count on: the seed of entry n is the seed of entry 0 and n.
NEEDS_CONFIG = ("composite",)  # it combines others, and needs their names


class ReasoningGym:
    """`names` of generators, or "all"; `configs`, by name, are what a generator takes. With `is_chat` the question goes through
    the chat template, after `system` and the `examples`, which are turns of the chat: {question, answer}, by generator. An
    answer stands between <answer> and </answer>, or is the whole text."""

    def __init__(
        self,
        *,
        names: list[str] | str = ALL,
        configs: dict[str, dict[str, Any]] | None = None,
        is_chat: bool = False,
        system: str = "",
        examples: dict[str, list[dict[str, str]]] | None = None,
    ) -> None:
        self._configs = configs or {}
        self._system = system
        self._examples = {name: example_turns(name, some, is_chat=is_chat) for name, some in (examples or {}).items()}
        self._names = chosen(names, [*self._configs, *self._examples])
        self._is_chat = is_chat
        self._threads: DaemonThreads | None = None

    def tasks(self, num: int, seed: int) -> Iterator[Task]:
        """Of all generators in turn, until there are enough."""
        start = derive_seed(seed, "reasoning_gym") % 2**31
        for number in range(num):
            name, index = self._names[number % len(self._names)], number // len(self._names)
            entry, _ = self._entry(name, start, index)
            yield Task(
                id=f"{name}/{index}",
                prompt=self._prompt(name, entry["question"]),
                answer=None if entry["answer"] is None else str(entry["answer"]),
                data={"source": name, "seed": start, "index": index},
            )

    def gold(self, task: Task) -> list[str]:
        return [] if task.answer is None else [task.answer]

    async def rollout(self, context: Context) -> float:
        task, said = context.task, await context.ask(context.task.prompt)
        if task.answer is not None and has_plain_rule(str(task.data["source"])):
            return plain_score(said, task.answer)
        self._threads = self._threads or DaemonThreads("reasoning_gym", most=MAX_THREADS)
        scoring = self._threads.call(functools.partial(self.score, said, task.data))
        scored: float = await context.waiting("reasoning_gym to score", scoring)
        return scored

    def score(self, said: str, data: Mapping[str, Any]) -> float:
        """By the generator's rule, of an answer to the task with this data. Some take seconds to make their entry again."""
        entry, generator = self._entry(str(data["source"]), int(data["seed"]), int(data["index"]))
        try:
            return float(generator.score_answer(answer_in(said), entry))
        except Exception:  # some rules raise on an answer that they cannot read: it is wrong, and no failure
            return 0.0

    def _prompt(self, name: str, question: str) -> str | tuple[Message, ...]:
        if not self._is_chat:
            return f"{self._system}{question}"
        system = (Message(role="system", content=self._system),) if self._system else ()
        return (*system, *self._examples.get(name, ()), Message(role="user", content=question))

    def _entry(self, name: str, seed: int, index: int) -> tuple[dict[str, Any], Any]:
        """And its generator. Some make all that they are asked for at once: they are asked for a few at a time."""
        first, within = index - index % CHUNK, index % CHUNK
        generator = made(name, seed + first, msgspec.json.encode(self._configs.get(name, {})))
        return generator[within], generator


@functools.lru_cache(maxsize=512)
def made(name: str, seed: int, config: bytes) -> Any:
    """Some read files when they are made: once is enough."""
    settings = decode_json(config, dict[str, Any])
    try:
        return _library().create_dataset(name, **{"size": CHUNK, "seed": seed, **settings})
    except Exception as error:  # a library that raises many kinds: reported as one, with its cause
        raise ConfigError(f"reasoning_gym cannot make {name!r} with {settings}: {error}") from error


def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError("environment reasoning_gym needs the library: pip install 'millstream[reasoning]'") from error
    return reasoning_gym


def example_turns(name: str, examples: list[dict[str, str]], *, is_chat: bool) -> tuple[Message, ...]:
    """A user's and an assistant's message for each example. Raises `ConfigError`."""
    where = f"environment reasoning_gym: examples of {name}"
    if not is_chat:
        raise ConfigError(f"{where} are turns of a chat: set is_chat = true, or put them into system as text")
    for example in examples:
        if not isinstance(example, dict) or example.keys() != {"question", "answer"}:
            raise ConfigError(f'{where}: found {example!r}, expected {{ question = "...", answer = "..." }}')
    turns = ((("user", one["question"]), ("assistant", one["answer"])) for one in examples)
    return tuple(Message(role=role, content=content) for turn in turns for role, content in turn)


def chosen(names: list[str] | str, described: Collection[str]) -> list[str]:
    """Every generator there is, or those that are named. `described`: the names that other options have. Raises `ConfigError`
    for one that is not there."""
    _library()
    from reasoning_gym.factory import DATASETS

    if names == ALL:
        return sorted(name for name in DATASETS if name not in NEEDS_CONFIG or name in described)
    wanted = [names] if isinstance(names, str) else list(names)
    if strangers := [name for name in (*wanted, *described) if name not in DATASETS]:
        raise ConfigError(f"reasoning_gym has no {strangers[0]!r}; it has {', '.join(sorted(DATASETS))}")
    if not wanted:
        raise ConfigError('environment reasoning_gym: names is empty; expected names of generators, or "all"')
    return wanted


@functools.cache
def has_plain_rule(name: str) -> bool:
    """Whether a generator has the library's rule for one right answer, which compares two texts."""
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS

    return name in DATASETS and DATASETS[name][0].score_answer is ProceduralDataset.score_answer


def plain_score(said: str, right: str) -> float:
    """By that rule, at once: a thread would take longer than the comparison."""
    from reasoning_gym.dataset import ProceduralDataset

    return float(ProceduralDataset.score_answer(None, answer_in(said), {"answer": right}))


def answer_in(said: str) -> str:
    from reasoning_gym.utils import extract_answer

    found = extract_answer(said)
    return said.strip() if found is None else str(found)
