"""The log of a run: `events.jsonl` and `metrics.jsonl` in its folder, and the sinks that show the same events elsewhere.
Findings (`events.findings`) are made here, from the events as they are written."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

from millstream.algo import advantage_of
from millstream.errors import OutputError
from millstream.events import WARMUP, Evaluated, Event, EventSink, RecallingSink, RunEnded, RunStarted
from millstream.events.findings import Watch
from millstream.events.sinks import JsonlSink, MetricsSink, Tee
from millstream.run.config import RunConfig
from millstream.run.folder import RunFolder


class RunLog:
    """An event sink. `upto`: the version that a resumed run continues from, -1 if it starts over; later metrics are removed.
    `own`: sinks that get every event at once, as the files do, and not soon, as `sinks` do. Raises `OutputError` where a file
    cannot be written."""

    def __init__(
        self, folder: RunFolder, sinks: Sequence[EventSink], *, upto: int, own: Sequence[EventSink] = ()
    ) -> None:
        self._folder = folder
        try:
            self._events = JsonlSink(folder.events)
            self._metrics = MetricsSink(folder.metrics, upto=upto)
        except OSError as error:
            raise OutputError(folder.cannot_write(folder.events, error)) from error
        self._tee = Tee([self._events, self._metrics, *own], sinks)
        self._recalling = [sink for sink in sinks if isinstance(sink, RecallingSink)]
        self._watch = Watch(folder.path)
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        if type(event) not in Watch.READ:
            self._tee.emit(event)
            return
        with self._lock:  # findings are made in the order of the file
            made = self._watch.add(event)
            for one in (*made, event) if isinstance(event, RunEnded) else (event, *made):
                self._tee.emit(one)

    def recall(self, event: Event) -> None:
        """An event of an earlier process, which is in the files already: findings continue from it, and evaluations are shown
        again where they are shown at all. Trackers have it."""
        self._watch.add(event)
        if isinstance(event, Evaluated) and event.name != WARMUP:
            for sink in self._recalling:
                sink.recall(event)

    def last_seq(self) -> int:
        """The number of the last event so far; -1 before the first."""
        return self._events.last_seq

    def sync(self) -> None:
        """Returns when everything so far is on the disk."""
        self._events.sync()
        self._metrics.sync()

    def show_rest(self) -> None:
        """To the sinks, for a few seconds at most. They get nothing afterwards."""
        self._tee.close()

    def close(self) -> None:
        self.show_rest()
        try:
            self._metrics.close()
            self._events.close()
        except OSError as error:
            raise OutputError(self._folder.cannot_write(self._folder.events, error)) from error


def run_started(config: RunConfig, *, at: float, run_id: str, num_tasks: int, is_simulated: bool = False) -> RunStarted:
    """The terms of a run. `num_tasks`: of an epoch; 0: unknown."""
    pipeline, rollout = config.pipeline, config.rollout
    return RunStarted(
        at=at,
        run_id=run_id,
        seed=config.seed,
        steps=pipeline.steps,
        num_tasks=num_tasks,
        filter_zero_signal=pipeline.filter_zero_signal,
        min_group_size=rollout.min_group_size,
        groups_per_step=pipeline.groups_per_step,
        group_size=rollout.group_size,
        max_lag=pipeline.max_lag,
        lag_bound=math.ceil(pipeline.max_lag),
        budget=pipeline.most_groups,
        extra_members=rollout.extra_members,
        is_first_to_finish=pipeline.is_first_to_finish,
        max_restarts=pipeline.max_restarts if pipeline.overdue == "restart" else 0,
        max_replaced=pipeline.max_replaced,
        rollouts_from=config.data.rollouts or "",
        compares_members=advantage_of(config.algorithm).compares_members,
        learns_from_rewards=config.algorithm.advantage != "distillation" and not pipeline.rollouts_only,
        is_simulated=is_simulated,
    )
