"""What shows a run elsewhere: trackers, Prometheus, OpenTelemetry, alerts. Opened when it begins, finished with its result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import structs

from millstream.events import EventSink
from millstream.run.active import ActiveRun
from millstream.run.config import RunConfig, with_absolute_paths
from millstream.run.folder import RunResult
from millstream.run.tracking.adapters import opener_of
from millstream.run.tracking.alerts import AlertSink
from millstream.run.tracking.config import alert_url
from millstream.run.tracking.prometheus import PrometheusSink
from millstream.run.tracking.sink import TrackedRun, TrackerSink
from millstream.run.tracking.spans import SpanSink


class Tracking:
    """`sinks` take the run's events from the beginning; `start` says which run it is."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._trackers = [TrackerSink(name, opener_of(name)) for name in config.trackers.use]
        address, url = config.metrics.prometheus, config.traces.opentelemetry
        self._prometheus = None if address is None else PrometheusSink(address)
        self._spans = None if url is None else SpanSink(url)
        self._alerts = AlertSink(config.alerts, alert_url(config.alerts)) if config.alerts.is_on else None
        others = (self._prometheus, self._spans, self._alerts)
        self.sinks: list[EventSink] = [*self._trackers, *(sink for sink in others if sink is not None)]

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
        if self._prometheus is not None:
            steps, lag_bound = self._config.pipeline.steps, math.ceil(self._config.pipeline.max_lag)
            self._prometheus.start(run_id=run.run_id, name=tracked.name, steps=steps, lag_bound=lag_bound)
        if self._spans is not None:
            self._spans.start(tracked, run.clock.now(), run.warn)
        if self._alerts is not None:
            self._alerts.start(folder, run.run_id, run.warn)
        for tracker in self._trackers:
            tracker.start(tracked, run.warn)

    def send_alerts(self) -> None:
        """Those that wait. No more are sent afterwards."""
        if self._alerts is not None:
            self._alerts.finish()

    def finish(self, result: RunResult | None) -> None:
        """`result`: None if the run was stopped or has failed."""
        self.send_alerts()
        for tracker in self._trackers:
            tracker.finish({} if result is None else _numbers(result), is_finished=result is not None)
        if self._spans is not None:
            self._spans.finish()
        if self._prometheus is not None:
            self._prometheus.finish()


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
