"""The environments of a run behind one seam: a task goes to the one that it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millstream.env import Context, Environment, Reward, Text
from millstream.env.data import DataSet
from millstream.env.dialog import Conversation
from millstream.env.find import Kind
from millstream.errors import ConfigError, DataError
from millstream.types import Task


class Hosted:
    """One environment, with words for its contexts."""

    def __init__(self, kind: Kind, environment: Environment, text: Text) -> None:
        self.kind, self.environment, self._text = kind, environment, text

    async def rollout(self, context: Context) -> Reward:
        talk = Conversation(context, self._text, thinking=self.kind.config.thinking)
        return await self.environment.rollout(talk)


class Environments:
    """All of a run's, by name."""

    def __init__(self, hosted: Sequence[Hosted]) -> None:
        self._by_name: Mapping[str, Hosted] = {one.kind.name: one for one in hosted}

    async def rollout(self, context: Context) -> Reward:
        return await self.of(context.task).rollout(context)

    def of(self, task: Task) -> Hosted:
        """Raises `DataError` for a task that names none, or one that is not there."""
        return self._by_name[name_of(task, list(self._by_name))]

    def gold(self, task: Task) -> list[str]:
        """What a perfect player says to it, turn after turn; nothing where nobody knows."""
        gold = self.of(task).kind.gold
        return [] if gold is None else gold(task)


def check_tasks(environments: Environments, data: DataSet, *, needs_gold: bool) -> None:
    """Every task has its environment, and an environment that is to be warmed up says how it is played."""
    is_golden = dict[str, bool]()
    for task in data.tasks:
        name = environments.of(task).kind.name
        if needs_gold and not is_golden.get(name):
            is_golden[name] = bool(environments.gold(task))
    for name, is_known in is_golden.items():
        if not is_known:
            raise ConfigError(
                f"[warmup] trains on gold turns, and no task of the environment {name} has any: give it `gold(task)` (a data "
                "set an answer), or leave [warmup] out"
            )


def name_of(task: Task, names: Sequence[str]) -> str:
    """Of the environment that a task goes to."""
    named = task.data.get("environment")
    if named is None and len(names) == 1:
        return names[0]
    if named not in names:
        said = "has no field 'environment'" if named is None else f"is for the environment {named!r}"
        raise DataError(f"task {task.id} {said}: expected one of {', '.join(names)}, the names of [[environment]]")
    return str(named)
