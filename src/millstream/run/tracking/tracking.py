"""All trackers of a run: opened when it begins, finished with its result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import structs

from millstream.run.active import ActiveRun
from millstream.run.config import RunConfig, with_absolute_paths
from millstream.run.folder import RunResult
from millstream.run.tracking.adapters import OPENERS
from millstream.run.tracking.sink import TrackedRun, TrackerSink


class Tracking:
    """`sinks` take the run's events from the beginning; `start` says which run it is."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.sinks = [TrackerSink(name, OPENERS[name]) for name in config.trackers.use]

    def start(self, run: ActiveRun) -> None:
        trackers, folder = self._config.trackers, run.folder.path.resolve()
        tracked = TrackedRun(
            project=trackers.project,
            name=trackers.name or folder.name,
            run_id=run.run_id,
            folder=folder,
            config=flat(msgspec.to_builtins(with_absolute_paths(self._config))),
            version=run.start_version,
        )
        for sink in self.sinks:
            sink.start(tracked, run.warn)

    def finish(self, result: RunResult | None) -> None:
        """`result`: None if the run was stopped or has failed."""
        for sink in self.sinks:
            sink.finish({} if result is None else _numbers(result), is_finished=result is not None)


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables by dotted keys."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _numbers(result: RunResult) -> dict[str, float]:
    every = {**structs.asdict(result.summary), **structs.asdict(result)}
    numbers = {name: float(value) for name, value in every.items() if isinstance(value, int | float)}
    return numbers | {"findings": float(len(result.findings))}
