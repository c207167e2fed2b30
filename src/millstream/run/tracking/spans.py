"""A run as OpenTelemetry spans, made from its events.

    run ── step, step, ...      one trace; each step links to the rollouts that it trained
     └──── evaluation, ...      findings, stalls and warnings are events of the run's span
    rollout ── generate, environment, generate, ...      a trace each, linked to the run: no backend opens a trace of a million
                                                         spans, and a sampler (OTEL_TRACES_SAMPLER) can leave some out

"environment" is the time between two turns, and after the last: a step of the environment, a tool, a reward. What an
environment waits for by name (`context.waiting`) is a span of that name. Spans are sent by a thread of the SDK, which drops
them while the collector does not answer: the run neither waits nor ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from millstream.events import (
    Evaluated,
    EvaluationStarted,
    Event,
    FindingMade,
    GroupLeft,
    GroupRestarted,
    GroupTaken,
    LearnerRestarted,
    ReplicaLeft,
    Resumed,
    RolloutAborted,
    RolloutEnded,
    RolloutFailed,
    RolloutSpan,
    RolloutStarted,
    RunEnded,
    RunStarted,
    Stalled,
    Stepped,
    Warned,
)
from millstream.events.metrics import StepMetrics, is_step
from millstream.run.folder import FINISHED
from millstream.run.tracking.config import public_url
from millstream.run.tracking.sink import TrackedRun

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext, Tracer

logger = logging.getLogger(__name__)
EXPORT_S = 10.0  # for one batch of spans
MIN_GAP_S = 1e-3  # between two turns: a shorter one is no span
MAX_LINKS = 4096  # of a step
MemberKey = tuple[int, int, int]


class RunSpans:
    """Turns events into spans. `zero`: the Unix time at which the run's clock was 0."""

    def __init__(self, tracer: Tracer, *, zero: float, begun: float, attributes: Mapping[str, Any]) -> None:
        self._tracer = tracer
        self._zero = zero
        self._metrics = StepMetrics()
        self._run = tracer.start_span("run", start_time=self._time(begun), attributes=attributes)
        self._stepped_at = begun
        self._playing: dict[MemberKey, Span] = {}
        self._turned_at: dict[MemberKey, float] = {}  # when the last turn of a rollout ended
        self._ended: dict[int, list[SpanContext]] = {}  # rollouts of groups in flight
        self._batch: list[SpanContext] = []
        self._evaluations: dict[str, Span] = {}

    def _time(self, at: float) -> int:
        return round((self._zero + at) * 1e9)

    def add(self, event: Event) -> None:
        row = self._metrics.add(event)
        match event:
            case RolloutStarted():
                self._start_rollout(event)
            case RolloutSpan():
                self._add_part(event)
            case RolloutEnded() | RolloutFailed() | RolloutAborted():
                self._end_rollout(event)
            case GroupTaken():
                self._batch += self._ended.pop(event.group_id, [])
            case GroupLeft() | GroupRestarted():
                self._ended.pop(event.group_id, None)
            case RunStarted() | Resumed():
                self._stepped_at = event.at
            case Stepped() if row is not None and is_step(row):
                self._add_step(event, row)
            case EvaluationStarted():
                self._evaluations[event.name] = self._child(self._run, "evaluation", event.at, {"name": event.name})
            case Evaluated() if event.name in self._evaluations:
                span = self._evaluations.pop(event.name)
                span.set_attributes({f"millstream.{name}": one.value for name, one in event.scores.items()})
                span.set_attribute("millstream.accuracy", event.accuracy)
                span.end(self._time(event.at))
            case FindingMade():
                self._say(event, {"name": event.name, "message": event.message})
            case Stalled():
                self._say(event, {"owner": event.owner, "what": event.what, "seconds": event.seconds})
            case Warned():
                self._say(event, {"message": event.message})
            case ReplicaLeft() | LearnerRestarted():
                self._say(event, {"why": event.why})
            case RunEnded():
                self._end(event)

    def _child(self, parent: Span, name: str, at: float, attributes: Mapping[str, Any]) -> Span:
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(parent)
        return self._tracer.start_span(name, context=context, start_time=self._time(at), attributes=_named(attributes))

    def _say(self, event: Event, attributes: Mapping[str, Any]) -> None:
        self._run.add_event(str(event.__struct_config__.tag), _named(attributes), self._time(event.at))

    # ---- rollouts ----------------------------------------------------------------------------------------------------

    def _start_rollout(self, event: RolloutStarted) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import Link

        attributes = _named({"group": event.group_id, "member": event.member, "attempt": event.attempt})
        self._playing[_key(event)] = self._tracer.start_span(
            "rollout",
            context=Context(),
            links=[Link(self._run.get_span_context())],
            start_time=self._time(event.at),
            attributes=attributes,
        )

    def _add_part(self, event: RolloutSpan) -> None:
        if (rollout := self._playing.get(_key(event))) is None:
            return
        begun = event.at - event.seconds
        if event.what == "generate":
            self._add_gap(event, rollout, begun)
            self._turned_at[_key(event)] = event.at
        attributes = {"tokens": event.num_tokens} if event.num_tokens else {}
        self._child(rollout, event.what, begun, attributes).end(self._time(event.at))

    def _add_gap(self, event: RolloutSpan | RolloutEnded | RolloutFailed, rollout: Span, end: float) -> None:
        """What the environment did since the last turn."""
        begun = self._turned_at.pop(_key(event), None)
        if begun is not None and end - begun >= MIN_GAP_S:
            self._child(rollout, "environment", begun, {}).end(self._time(end))

    def _end_rollout(self, event: RolloutEnded | RolloutFailed | RolloutAborted) -> None:
        from opentelemetry.trace import StatusCode

        rollout = self._playing.pop(_key(event), None)
        if rollout is None:  # it began before this process
            return
        rollout.set_attributes(_named({"outcome": event.__struct_config__.tag, "tokens": event.num_sampled}))
        if isinstance(event, RolloutAborted):
            self._turned_at.pop(_key(event), None)
            rollout.set_attributes(_named({"why": event.why}))
        else:
            self._add_gap(event, rollout, event.at)
        if isinstance(event, RolloutFailed):
            rollout.set_status(StatusCode.ERROR, f"{event.error}: {event.message}")
        elif isinstance(event, RolloutEnded):
            rollout.set_attributes(_named({"reward": event.reward, "finish": str(event.finish)}))
            rollout.set_attributes(_named({"start_version": event.start_version, "end_version": event.end_version}))
            self._ended.setdefault(event.group_id, []).append(rollout.get_span_context())
        rollout.end(self._time(event.at))

    # ---- steps, and the end ------------------------------------------------------------------------------------------

    def _add_step(self, event: Stepped, row: Mapping[str, Any]) -> None:
        from opentelemetry.trace import Link, set_span_in_context

        self._tracer.start_span(
            "step",
            context=set_span_in_context(self._run),
            links=[Link(context) for context in self._batch],
            start_time=self._time(self._stepped_at),
            attributes=_named(row),
        ).end(self._time(event.at))
        self._stepped_at = event.at
        self._batch = []

    def _end(self, event: RunEnded) -> None:
        from opentelemetry.trace import StatusCode

        for span in (*self._playing.values(), *self._evaluations.values()):
            span.set_attributes(_named({"outcome": "the run ended"}))
            span.end(self._time(event.at))
        self._run.set_attributes(_named({"outcome": event.outcome, "step": event.version}))
        if event.outcome != FINISHED:
            self._run.set_status(StatusCode.ERROR, event.outcome if event.message is UNSET else event.message)
        self._run.end(self._time(event.at))


class SpanSink:
    """An event sink. Events wait until `start`, which connects to the collector at `url`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._early: list[Event] = []
        self._spans: RunSpans | None = None
        self._provider: Any = None
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        with self._lock:
            if self._spans is None:
                self._early.append(event)
            else:
                self._spans.add(event)

    def start(self, run: TrackedRun, now: float, warn: Callable[[str], None]) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        for name in ("opentelemetry.exporter", "opentelemetry.sdk"):  # one warning of ours instead, once
            logging.getLogger(name).setLevel(logging.CRITICAL)
        url = self._url if self._url.rstrip("/").endswith("/v1/traces") else f"{self._url.rstrip('/')}/v1/traces"
        named = {"service.name": "millstream", "millstream.run": run.name, "millstream.run_id": run.run_id}
        limits = SpanLimits(max_links=MAX_LINKS)
        self._provider = TracerProvider(resource=Resource.create(named), span_limits=limits, shutdown_on_exit=False)
        self._exporter = _watched(OTLPSpanExporter(endpoint=url, timeout=EXPORT_S), public_url(url), warn)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        attributes = {"millstream.folder": str(run.folder), "millstream.start_version": run.version}
        with self._lock:
            tracer, zero = self._provider.get_tracer("millstream"), time.time() - now
            self._spans = RunSpans(tracer, zero=zero, begun=now, attributes=attributes)
            for event in self._early:
                self._spans.add(event)
            self._early = []

    def finish(self) -> None:
        """Waits for what is left to be sent, for at most `EXPORT_S`."""
        if self._provider is None:
            return
        self._exporter.is_finishing = True
        closing = threading.Thread(target=self._provider.shutdown, name="opentelemetry", daemon=True)
        closing.start()
        closing.join(EXPORT_S)


def _watched(exporter: Any, place: str, warn: Callable[[str], None]) -> Any:
    """An exporter that warns when spans are lost, once until some arrive again."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Watched(SpanExporter):  # type: ignore[misc]  # an optional package: mypy does not read it
        is_finishing = False

        def __init__(self) -> None:
            self._is_failing = False

        def export(self, spans: Sequence[Any]) -> SpanExportResult:
            result = exporter.export(spans)
            is_failing = result is not SpanExportResult.SUCCESS
            if is_failing and not self._is_failing:
                message = f"spans cannot be sent to {place} (traces.opentelemetry), and are dropped until it answers"
                logger.warning("%s", message) if self.is_finishing else warn(message)  # at the end, the log is closed
            self._is_failing = is_failing
            return SpanExportResult.FAILURE if is_failing else SpanExportResult.SUCCESS

        def shutdown(self) -> None:
            exporter.shutdown()

    return Watched()


def _key(event: RolloutStarted | RolloutSpan | RolloutEnded | RolloutFailed | RolloutAborted) -> MemberKey:
    return event.group_id, event.member, event.attempt


def _named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"millstream.{name}": value for name, value in attributes.items()}
