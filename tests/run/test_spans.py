"""OpenTelemetry: spans from the events of a run, by the SDK's in-memory exporter and over OTLP/HTTP to a receiver.
`make test-trackers` installs the packages."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from millstream import train
from millstream.errors import ConfigError
from millstream.events import (
    RolloutAborted,
    RolloutEnded,
    RolloutFailed,
    RolloutSpan,
    RolloutStarted,
    RunEnded,
    Stalled,
    Stepped,
    Warned,
)
from millstream.events.sinks import read_events
from millstream.run.tracking.spans import RunSpans
from millstream.types import Task
from support.runs import assert_clean
from support.simulated import World, simulate
from support.stage_runs import config

SMALL = ("pipeline.steps=4", "pipeline.groups_per_step=4", "data.size=60", "data.holdout=4")
WORLD = World(steps=5, num_turns=3, latency=0.5, failure=0.1, records_turns=True, surplus="abort", extra_members=1)


def ones(task: Task, completion: str) -> float:
    return completion.count("1") / 4


def test_turns_are_events_only_where_they_are_asked_for_and_change_nothing_else() -> None:
    recorded = [e for e in simulate(WORLD).sink.events if not isinstance(e, RolloutSpan)]
    plain = simulate(
        World(steps=5, num_turns=3, latency=0.5, failure=0.1, surplus="abort", extra_members=1)
    ).sink.events
    assert recorded == plain
    spans = [e for e in simulate(WORLD).sink.events if isinstance(e, RolloutSpan)]
    turns = sum(span.num_tokens for span in spans if span.what == "generate")
    ended = [e for e in plain if isinstance(e, RolloutEnded)]
    assert turns >= sum(event.num_sampled for event in ended) > 0


def exported(events: list[Any]) -> list[Any]:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = RunSpans(provider.get_tracer("millstream"), zero=1e9, begun=0.0, attributes={"millstream.folder": "here"})
    for event in events:
        spans.add(event)
    return list(exporter.get_finished_spans())


def test_a_run_is_spans_of_its_steps_rollouts_turns_and_tool_calls_with_their_times() -> None:
    events = [*simulate(WORLD).sink.events]
    events += [Stalled(at=events[-1].at, owner="feed", what="room", seconds=31.0)]
    events += [RunEnded(at=events[-1].at, outcome="LearnerError", version=5, message="it broke")]
    spans = exported(events)
    by_name = defaultdict(list)
    for span in spans:
        by_name[span.name].append(span)
    assert len(by_name["run"]) == 1 and len(by_name["step"]) == 5
    run = by_name["run"][0]
    assert run.status.description == "it broke" and [event.name for event in run.events] == ["stalled"]
    assert all(step.parent.span_id == run.context.span_id for step in by_name["step"])
    rollouts = {span.context.span_id: span for span in by_name["rollout"]}
    assert len(rollouts) == sum(isinstance(event, RolloutStarted) for event in events)
    assert len({span.context.trace_id for span in rollouts.values()}) == len(rollouts), "a trace each"
    assert all(link.context.span_id == run.context.span_id for span in rollouts.values() for link in span.links)
    for kind, outcome in (
        (RolloutEnded, "rollout_ended"),
        (RolloutFailed, "rollout_failed"),
        (RolloutAborted, "rollout_aborted"),
    ):
        found = [span for span in rollouts.values() if span.attributes["millstream.outcome"] == outcome]
        assert len(found) == sum(isinstance(event, kind) for event in events)
        assert all(span.status.is_ok == (kind is not RolloutFailed) for span in found)
    linked = [link.context.span_id for step in by_name["step"] for link in step.links]
    assert (
        len(linked) == sum(e.num_rollouts for e in events if isinstance(e, Stepped)) and set(linked) <= rollouts.keys()
    )
    assert len(by_name["generate"]) > len(rollouts) and by_name["environment"], "several turns, and steps between them"
    for span in (*by_name["generate"], *by_name["environment"]):
        rollout = rollouts[span.parent.span_id]
        assert rollout.start_time <= span.start_time <= span.end_time <= rollout.end_time
    assert run.start_time == 1_000_000_000 * 10**9


class Collector:
    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []


@contextmanager
def collector() -> Iterator[Collector]:
    """Takes OTLP over HTTP, as the OpenTelemetry Collector does: POST /v1/traces with a protobuf, compressed or not."""
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    import gzip

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            assert self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
            request = service.ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                found.resources.append({pair.key: pair.value.string_value for pair in resource.resource.attributes})
                found.spans += [span for scope in resource.scope_spans for span in scope.spans]
            answer = service.ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Collector(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield found
        server.shutdown()


def test_a_run_sends_its_spans_to_a_collector(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with collector() as found:
        train(config(tmp_path, *SMALL, f"traces.opentelemetry={found.url}"), reward=ones, progress=False)
    names = [span.name for span in found.spans]
    assert (
        names.count("run") == 1 and names.count("step") == 4 and names.count("generate") >= names.count("rollout") >= 32
    )
    assert {one["service.name"] for one in found.resources} == {"millstream"} and all(
        one["millstream.run"] == "run" for one in found.resources
    )
    events = list(read_events(tmp_path / "run/events.jsonl"))
    assert names.count("rollout") == sum(isinstance(event, RolloutStarted) for event in events)
    assert names.count("evaluation") == 4, "sampled and greedy, before and after"
    assert not any(isinstance(event, Warned) for event in events)
    assert_clean(tmp_path / "run")


def test_a_collector_that_is_not_there_is_one_warning_and_the_run_ends_as_it_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setattr("millstream.run.tracking.spans.EXPORT_S", 0.5)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    result = train(config(tmp_path, *SMALL, "traces.opentelemetry=http://127.0.0.1:1"), reward=ones, progress=False)
    assert result.summary.steps == 4
    warned = [event.message for event in read_events(tmp_path / "run/events.jsonl") if isinstance(event, Warned)]
    assert len(warned) <= 1 and all("http://127.0.0.1:1 (traces.opentelemetry)" in message for message in warned)
    assert_clean(tmp_path / "run")


def test_without_the_packages_a_run_is_refused_with_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.run.tracking.config.has_opentelemetry", lambda: False)
    with pytest.raises(ConfigError, match=r"pip install 'millstream\[otel\]'"):
        train(config(tmp_path, *SMALL, "traces.opentelemetry=http://localhost:4318"), reward=ones, progress=False)
    assert not (tmp_path / "run").exists()


def test_a_url_that_is_none_is_refused_with_an_example(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'traces: opentelemetry must begin with http.*"http://localhost:4318"'):
        config(tmp_path, *SMALL, "traces.opentelemetry=localhost:4318")
