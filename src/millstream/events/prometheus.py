"""A run as Prometheus metrics, from its events: the text that a scrape gets. What is measured per step is from the rows of
`metrics.jsonl`. Counters begin at 0 with each process of a run, as Prometheus expects of a restart.

Labels are bounded: numbers in the names of waits ("group 12") are left out.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping
from typing import Literal, NamedTuple

from msgspec import UNSET

from millstream.events.bottleneck import TimeUse
from millstream.events.depths import StoreNow, WaitNow
from millstream.events.metrics import StepMetrics, is_step, metric_key
from millstream.events.types import (
    CheckpointFailed,
    CheckpointSealed,
    Evaluated,
    Event,
    FindingEnded,
    FindingMade,
    GroupAdmitted,
    GroupLeft,
    GroupRestarted,
    GroupTaken,
    LagMoved,
    LearnerRestarted,
    ReplicaJoined,
    ReplicaLeft,
    Resumed,
    RolloutAborted,
    RolloutEnded,
    RolloutFailed,
    SettingChanged,
    Span,
    Stalled,
    Status,
    Stepped,
    Warned,
    WeightsLoaded,
)
from millstream.types import Fate

Labels = tuple[tuple[str, str], ...]
LAG_BUCKETS = (0, 1, 2, 4, 8, 16)
PREFIX = "millstream_"


class Family(NamedTuple):
    kind: Literal["counter", "gauge", "histogram"]
    help: str


FAMILIES: Mapping[str, Family] = {
    "run_info": Family("gauge", "1, with the run's id and name."),
    "run_seconds": Family("gauge", "Time of the run so far, with its earlier processes."),
    "step": Family("gauge", "Version of the newest weights: steps trained."),
    "steps_planned": Family("gauge", "Steps that the run will train: pipeline.steps."),
    "reward_mean": Family("gauge", "Mean reward of the last step, as reward in metrics.jsonl."),
    "reward_stddev": Family("gauge", "Standard deviation of the rewards of the last step."),
    "reward_part_mean": Family("gauge", "Mean of each reward function before its weight, in the last step."),
    "rollout_tokens_mean": Family(
        "gauge", "Mean number of sampled tokens of the rollouts that ended in the last step."
    ),
    "lag_mean": Family("gauge", "Mean lag of the groups of the last step, in versions."),
    "lag_max": Family("gauge", "Highest lag of the groups of the last step, in versions."),
    "lag_bound": Family("gauge", "Bound on the lag of groups that start now."),
    "group_lag": Family("histogram", "Lag of the groups that were taken for training, in versions."),
    "learner_metric": Family(
        "gauge", "What the learner and the loss measured in the last step, by its name in metrics.jsonl."
    ),
    "evaluation_score": Family("gauge", "Score of the last evaluation of each table."),
    "rollouts_total": Family("counter", "Rollouts by outcome: ended, retried, failed for good, or aborted."),
    "rollouts_trained_total": Family("counter", "Rollouts that were trained."),
    "tokens_generated_total": Family("counter", "Tokens that each engine generated, with those of evaluations."),
    "tokens_trained_total": Family("counter", "Tokens that were trained, with those of prompts."),
    "groups_admitted_total": Family("counter", "Groups that were admitted."),
    "groups_left_total": Family("counter", "Groups by fate."),
    "groups_restarted_total": Family("counter", "Restarts of overdue groups."),
    "learner_seconds_total": Family(
        "counter", "Time of the steps by what the learner did: training, waiting, sync, other."
    ),
    "busy_seconds_total": Family("counter", "Time in which a worker was busy, by what it did."),
    "requests_running": Family("gauge", "Requests that are being decoded."),
    "requests_waiting": Family("gauge", "Requests that wait for an engine with room."),
    "store_rows": Family("gauge", "Rows in the store."),
    "store_bytes": Family("gauge", "Bytes of the rows in the store, in memory and on disk."),
    "store_spilled_bytes": Family("gauge", "Bytes of the store on disk."),
    "store_partition_rows": Family("gauge", "Rows of a partition of the store."),
    "store_partition_bytes": Family("gauge", "Bytes of a partition of the store."),
    "store_task_rows": Family("gauge", "Rows by partition, task and state: waiting, ready, leased, done."),
    "store_claims_waiting": Family("gauge", "Claims that wait for rows, by task."),
    "store_puts_waiting": Family("gauge", "Puts that wait for room."),
    "store_operations_total": Family("counter", "Operations that the store has carried out, by kind."),
    "groups_in_flight": Family("gauge", "Groups that were admitted and have not left."),
    "groups_in_flight_limit": Family("gauge", "The most groups that may be in flight."),
    "waiters": Family("gauge", "What waits for what now: their number."),
    "wait_seconds_max": Family("gauge", "What waits for what now: the longest wait so far."),
    "engines": Family("gauge", "Engines that serve."),
    "engine_weights_version": Family("gauge", "Version of the weights that an engine has."),
    "finding": Family("gauge", "1 while a finding holds, 0 when it does no longer."),
    "bottleneck": Family("gauge", "1 for what holds the run up most."),
    "event_loop_lag_seconds": Family("gauge", "By how much the driver's event loop woke up too late."),
    "event_loop_busy_seconds_total": Family("counter", "Processor time of the driver's event loop."),
    "stalls_total": Family("counter", "Waits that were longer than pipeline.stall_s."),
    "warnings_total": Family("counter", "Warnings."),
    "checkpoint_step": Family("gauge", "Step of the newest checkpoint."),
    "checkpoint_failures_total": Family("counter", "Checkpoints that could not be written."),
    "learner_restarts_total": Family("counter", "Restarts of the processes of the learner or the critic."),
}
"""By name, without the prefix."""
OF_ROW = {
    "reward": "reward_mean",
    "reward_std": "reward_stddev",
    "length": "rollout_tokens_mean",
    "lag_mean": "lag_mean",
    "lag_max": "lag_max",
}
"""Keys of a row of `metrics.jsonl`, and their families."""
LEARNER_SECONDS = ("training", "waiting", "sync", "other")
PLAIN_COUNTERS = (
    *("groups_admitted_total", "groups_restarted_total", "rollouts_trained_total", "tokens_trained_total"),
    *("stalls_total", "warnings_total", "checkpoint_failures_total", "learner_restarts_total"),
)


FLOW = frozenset(
    (
        *(Span, RolloutEnded, RolloutFailed, RolloutAborted, GroupAdmitted, GroupRestarted, GroupTaken, GroupLeft),
        Stepped,
    )
)
STATE = frozenset(
    (
        *(
            Resumed,
            SettingChanged,
            LagMoved,
            Status,
            WeightsLoaded,
            ReplicaJoined,
            ReplicaLeft,
            FindingMade,
            FindingEnded,
        ),
        *(Evaluated, Stalled, Warned, CheckpointSealed, CheckpointFailed, LearnerRestarted),
    )
)


class PrometheusMetrics:
    """Takes events on one thread; `text` may be called on another."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Labels, float]] = {name: {} for name in FAMILIES}
        self._metrics = StepMetrics()
        self._use = TimeUse()
        self._lock = threading.Lock()
        self._lags = [0] * (len(LAG_BUCKETS) + 1)
        self._lag_sum = 0
        self._now = 0.0
        self._engines: set[str] = set()
        self._begin_counters()

    def _begin_counters(self) -> None:
        """A rate is right from the first increase on only where the counter was 0 before."""
        for name in PLAIN_COUNTERS:
            self._add(name, 0)
        for outcome in ("ended", "retried", "failed", "aborted"):
            self._add("rollouts_total", 0, outcome=outcome)
        for fate in Fate:
            self._add("groups_left_total", 0, fate=fate.value)

    def set_run(self, *, run_id: str, name: str, steps: int, lag_bound: int) -> None:
        with self._lock:
            self._set("run_info", 1, run_id=run_id, run=name)
            self._set("steps_planned", steps)
            self._set("lag_bound", lag_bound)

    def add(self, event: Event) -> None:
        with self._lock:
            self._now = max(self._now, event.at)
            row = self._metrics.add(event)
            self._use.add(event)
            if row is not None and is_step(row):
                for key, name in OF_ROW.items():
                    self._set(name, row[key])
                for state in LEARNER_SECONDS:
                    self._add("learner_seconds_total", row[f"{state}_s"], state=state)
                for key, value in row.items():
                    if key.startswith("reward/"):
                        self._set("reward_part_mean", value, part=key.removeprefix("reward/"))
            kind = type(event)
            if kind in FLOW:
                self._add_flow(event)
            elif kind in STATE:
                self._add_state(event)

    def _add_flow(self, event: Event) -> None:
        """What rollouts and groups came to, and what was trained."""
        match event:
            case Span():
                self._add("busy_seconds_total", event.seconds, worker=event.worker, work=event.what)
                if event.what == "generate" and event.worker != "learner":
                    self._add("tokens_generated_total", event.num_tokens, engine=event.worker)
                    self._engines.add(event.worker)
            case RolloutEnded():
                self._add("rollouts_total", 1, outcome="ended")
            case RolloutFailed():
                self._add("rollouts_total", 1, outcome="failed" if event.is_final else "retried")
            case RolloutAborted():
                self._add("rollouts_total", 1, outcome="aborted")
            case GroupAdmitted():
                self._add("groups_admitted_total", 1)
            case GroupRestarted():
                self._add("groups_restarted_total", 1)
            case GroupTaken():
                self._lags[next((i for i, most in enumerate(LAG_BUCKETS) if event.lag <= most), len(LAG_BUCKETS))] += 1
                self._lag_sum += event.lag
            case GroupLeft():
                self._add("groups_left_total", 1, fate=Fate(event.fate).value)
            case Stepped():
                self._set("step", event.version)
                self._add("rollouts_trained_total", event.num_rollouts)
                self._add("tokens_trained_total", event.num_tokens)
                for name, value in event.metrics.items():
                    self._set("learner_metric", value, name=metric_key(name))
                found, names = self._use.bottleneck(), self._values["bottleneck"]
                names.clear()
                if found is not None:
                    self._set("bottleneck", 1, name=found.name)

    def _add_state(self, event: Event) -> None:
        match event:
            case Resumed():
                self._set("step", event.version)
            case SettingChanged(key="pipeline.max_lag"):
                self._set("lag_bound", math.ceil(event.new))
            case LagMoved():
                self._set("lag_bound", event.lag_bound)
            case Status():
                self._set_status(event)
            case WeightsLoaded() | ReplicaJoined():
                self._engines.add(event.engine)
                self._set("engine_weights_version", event.version, engine=event.engine)
            case ReplicaLeft():
                self._engines.discard(event.engine)
                self._values["engine_weights_version"].pop((("engine", event.engine),), None)
            case FindingMade() | FindingEnded():
                self._set("finding", isinstance(event, FindingMade), name=event.name)
            case Evaluated() if event.table:
                decoding = "greedy" if event.is_greedy else "sampled"
                for score, one in event.scores.items():
                    self._set("evaluation_score", one.value, evaluation=event.table, decoding=decoding, score=score)
            case Stalled():
                self._add("stalls_total", 1)
            case Warned():
                self._add("warnings_total", 1)
            case CheckpointSealed():
                self._set("checkpoint_step", event.version)
            case CheckpointFailed():
                self._add("checkpoint_failures_total", 1)
            case LearnerRestarted():
                self._add("learner_restarts_total", 1)

    def _set_status(self, event: Status) -> None:
        self._set("requests_running", event.requests_running)
        self._set("requests_waiting", event.requests_waiting)
        self._set("store_rows", event.rows_in_store)
        self._set("groups_in_flight", event.groups_outstanding + event.groups_taken)
        self._set("groups_in_flight_limit", event.budget)
        self._set_waits(event.waits)
        if event.store is not UNSET:
            self._set_store(event.store)
        if event.loop_s is not UNSET:
            self._set("event_loop_busy_seconds_total", event.loop_s)
        if event.loop_lag_s is not UNSET:
            self._set("event_loop_lag_seconds", event.loop_lag_s)

    def _set_store(self, store: StoreNow) -> None:
        self._set("store_bytes", store.bytes)
        self._set("store_spilled_bytes", store.spilled_bytes)
        self._set("store_puts_waiting", store.puts_waiting)
        for name in ("store_partition_rows", "store_partition_bytes", "store_task_rows"):
            self._values[name].clear()  # a partition may be gone
        for task, count in store.claims_waiting.items():
            self._set("store_claims_waiting", count, task=task)
        for operation, count in store.operations.items():
            self._set("store_operations_total", count, operation=operation)
        for partition, part in store.partitions.items():
            self._set("store_partition_rows", part.rows, partition=partition)
            self._set("store_partition_bytes", part.bytes, partition=partition)
            for task, states in part.tasks.items():
                for state, count in states.items():
                    self._set("store_task_rows", count, partition=partition, task=task, state=state)

    def _set_waits(self, waits: list[WaitNow]) -> None:
        counts, longest = self._values["waiters"], self._values["wait_seconds_max"]
        counts.clear()
        longest.clear()
        for wait in waits:
            labels = (("owner", _without_numbers(wait.owner)), ("what", _without_numbers(wait.what)))
            counts[labels] = counts.get(labels, 0) + wait.count
            longest[labels] = max(longest.get(labels, 0.0), wait.seconds)

    def _set(self, name: str, value: float, /, **labels: str) -> None:
        self._values[name][tuple(labels.items())] = value

    def _add(self, name: str, value: float, /, **labels: str) -> None:
        values, key = self._values[name], tuple(labels.items())
        values[key] = values.get(key, 0) + value

    # ---- text --------------------------------------------------------------------------------------------------------

    def text(self) -> str:
        """In the text format, version 0.0.4. A metric without a value so far is left out."""
        with self._lock:
            self._set("run_seconds", self._now)
            self._set("engines", len(self._engines))
            lines: list[str] = []
            for name, family in FAMILIES.items():
                samples = self._lag_lines() if family.kind == "histogram" else _samples(name, self._values[name])
                if samples:
                    lines += [f"# HELP {PREFIX}{name} {family.help}", f"# TYPE {PREFIX}{name} {family.kind}", *samples]
        return "\n".join(lines) + "\n"

    def _lag_lines(self) -> list[str]:
        lines, total = [], 0
        for most, count in zip((*LAG_BUCKETS, math.inf), self._lags, strict=True):
            total += count
            lines.append(f'{PREFIX}group_lag_bucket{{le="{_number(most)}"}} {total}')
        return [*lines, f"{PREFIX}group_lag_sum {self._lag_sum}", f"{PREFIX}group_lag_count {total}"]


def _samples(name: str, values: Mapping[Labels, float]) -> list[str]:
    return [f"{PREFIX}{name}{_in_braces(labels)} {_number(value)}" for labels, value in values.items()]


def _in_braces(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}" if labels else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else f"{float(value):.17g}"


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "N", text)
