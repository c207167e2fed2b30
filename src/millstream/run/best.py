"""The best checkpoint: the one with the highest score of an evaluation (`checkpoint.keep_best`), which is never removed.

A checkpoint is written at every step that is evaluated, and kept until its score is known. A step that is due is evaluated
with the first weights from that step on that an engine loads; engines that load slowly skip some, so that there is a checkpoint
of every step until an evaluation has its engines. Light: imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from millstream.config import load
from millstream.errors import ConfigError
from millstream.events import Evaluated, Event, Resumed
from millstream.events.sinks import read_kinds
from millstream.run.checkpoint import steps_in
from millstream.run.config import RunConfig
from millstream.run.estimates import pass_ks
from millstream.run.folder import RunFolder


class BestCheckpoint:
    """An event sink that remembers the score of every version that was evaluated."""

    def __init__(self, config: RunConfig) -> None:
        table, self.metric = split_metric(config)
        (self.table,) = (one for one in config.evaluations if one.name == table)
        self.scores: dict[int, float] = {}  # by version
        self.is_awaited: Callable[[], bool] = lambda: False  # whether an evaluation of the table waits for its engines
        self._awaited: set[int] = set()  # versions that it may be of

    def emit(self, event: Event) -> None:
        if isinstance(event, Resumed):  # later versions are trained again
            self.scores = {version: score for version, score in self.scores.items() if version <= event.version}
        if not isinstance(event, Evaluated) or event.table != self.table.name or event.version is None:
            return
        if event.is_greedy == (not self.table.is_sampled) and self.metric in event.scores:
            self.scores[event.version] = event.scores[self.metric].value

    def is_due(self, version: int) -> bool:
        """Whether this version may be evaluated while training runs: its checkpoint is then kept until a score is known."""
        if self.is_awaited():
            self._awaited.add(version)
        return self._may_be_evaluated(version)

    def _may_be_evaluated(self, version: int) -> bool:
        is_step_due = self.table.every_steps is not None and version % self.table.every_steps == 0
        return is_step_due or version in self._awaited

    def read(self, folder: RunFolder) -> None:
        """What earlier processes of the run have measured, also of versions before the checkpoint that one resumed from."""
        for _, event in read_kinds(folder.events, Evaluated, Resumed):
            self.emit(event)

    def best_of(self, versions: Iterable[int]) -> int | None:
        """The one with the highest score, of equal ones the newest; None if none was evaluated."""
        scored = [version for version in versions if version in self.scores]
        return max(scored, key=lambda version: (self.scores[version], version), default=None)

    def kept(self, versions: Iterable[int]) -> set[int]:
        """The best one, and those whose score is still to come."""
        versions, newest = list(versions), max(self.scores, default=-1)
        pending = {version for version in versions if version > newest and self._may_be_evaluated(version)}
        best = self.best_of(versions)
        return pending if best is None else {*pending, best}


def split_metric(config: RunConfig) -> tuple[str, str]:
    """`checkpoint.keep_best` as the name of a table and of a score. Raises `ConfigError` if there is no such table or score."""
    keep_best, tables = config.checkpoint.keep_best or "", {one.name: one for one in config.evaluations}
    name, _, metric = keep_best.rpartition(":")
    table = tables.get(name) if name else next(iter(tables.values()), None)
    if table is None:
        raise ConfigError(
            f"checkpoint.keep_best = {keep_best!r}: no evaluation is named {name!r}: expected one of {', '.join(tables)}"
        )
    num = table.samples if table.is_sampled else 1
    known = [f"pass@{k}" for k in pass_ks(num)] + [f"avg@{num}"]
    if metric not in known:
        raise ConfigError(
            f"checkpoint.keep_best = {keep_best!r}: the evaluation {table.name} has no score {metric!r}: expected "
            f"{', '.join(f'{table.name}:{one}' for one in known)}"
        )
    return table.name, metric


def best_step(run_dir: Path) -> tuple[int, float]:
    """The step of a run's best checkpoint, and its score. Raises `ConfigError` if the run keeps none, or none was evaluated
    yet."""
    folder = RunFolder.of_run(run_dir)
    config = load(folder.config, RunConfig)
    if config.checkpoint.keep_best is None:
        raise ConfigError(
            f"the run in {run_dir} does not keep its best checkpoint: set checkpoint.keep_best, such as held_out:pass@1, "
            f"before a run. It has checkpoints of the steps {', '.join(map(str, steps_in(run_dir)))}: name one"
        )
    best = BestCheckpoint(config)
    best.read(folder)
    found = best.best_of(steps_in(run_dir))
    if found is None:
        raise ConfigError(
            f"no checkpoint of the run in {run_dir} has been evaluated yet: leave --best out for the newest"
        )
    return found, best.scores[found]
