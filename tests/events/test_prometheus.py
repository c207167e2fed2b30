"""The text that Prometheus reads: its format, its numbers against the events, and the dashboard that is made of it.
`make test-trackers` reads it with Prometheus' own parser as well."""

from __future__ import annotations

import json
import re

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from millstream.events import (
    CheckpointSealed,
    Estimate,
    Evaluated,
    Event,
    FindingEnded,
    FindingMade,
    GroupAdmitted,
    GroupTaken,
    PartitionNow,
    ReplicaLeft,
    RolloutEnded,
    RolloutFailed,
    Span,
    Status,
    Stepped,
    StoreNow,
    WaitNow,
    WeightsLoaded,
)
from millstream.events.metrics import StepMetrics
from millstream.events.prometheus import FAMILIES, PrometheusMetrics
from millstream.run.tracking.prometheus import DASHBOARD
from millstream.types import Finish
from support.simulated import World, simulate

STATUS = Status(
    at=99.0,
    requests_running=3,
    requests_waiting=2,
    rows_in_store=4,
    groups_outstanding=5,
    groups_taken=1,
    budget=8,
    waits=[
        WaitNow(owner="group 12", what='room in "the\nstore\\', seconds=1.0),
        WaitNow(owner="group 7", what='room in "the\nstore\\', seconds=4.0),
        WaitNow(owner="rollouts", what="an engine", seconds=2.0, count=40),
    ],
    loop_s=5.0,
    loop_lag_s=0.25,
    store=StoreNow(
        bytes=900,
        spilled_bytes=500,
        claims_waiting={"train": 2},
        puts_waiting=0,
        operations={"put": 7},
        partitions={"train": PartitionNow(rows=4, bytes=900, tasks={"train": {"ready": 3, "leased": 1}})},
    ),
)
SAMPLE = re.compile(r'^([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (\S+)$')


def events() -> list[Event]:
    scores = {"pass@1": Estimate(value=0.5, low=0.4, high=0.6)}
    more: list[Event] = [
        STATUS,
        Evaluated(at=99.0, name="step 3", version=3, accuracy=0.5, num_tasks=2, table="held_out", scores=scores),
        FindingMade(at=99.0, name="entropy-collapse", step=3, message="m", advice="a"),
        FindingMade(at=99.0, name="all-rewards-equal", step=3, message="m", advice="a"),
        FindingEnded(at=99.0, name="all-rewards-equal", step=4),
    ]
    return [*simulate(World(steps=6, failure=0.1, num_engines=2)).sink.events, *more]


def text_of(found: list[Event]) -> str:
    metrics = PrometheusMetrics()
    metrics.set_run(run_id="a1", name="mine", steps=6, lag_bound=1)
    for event in found:
        metrics.add(event)
    return metrics.text()


def samples_in(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            sample = SAMPLE.match(line)
            assert sample is not None, line
            found[line.rpartition(" ")[0]] = float(sample[3])
    return found


def test_every_metric_has_one_help_one_type_and_then_its_samples_each_once() -> None:
    seen: list[str] = []
    current = ""
    for line in text_of(events()).splitlines():
        if line.startswith("# HELP "):
            current = line.split()[2]
            assert current not in seen
            seen.append(current)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name == current and kind == FAMILIES[name.removeprefix("millstream_")].kind
            assert name.endswith("_total") == (kind == "counter"), "by the conventions of Prometheus"
        else:
            assert line.startswith(current)
    lines = [line.rpartition(" ")[0] for line in text_of(events()).splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines))
    expected = {name for name in FAMILIES if not any(one.startswith(f"millstream_{name}") for one in OTHERS)}
    assert {name.removeprefix("millstream_") for name in seen} == expected


OTHERS = {
    "millstream_checkpoint_step": 3,
    'millstream_learner_metric{name="grad_norm"}': 0.5,
    'millstream_reward_part_mean{part="right"}': 1.0,
    'millstream_tokens_generated_total{engine="engine-0"}': 64,
}


def test_what_a_simulated_run_does_not_have_is_counted_as_well() -> None:
    counts = {"num_groups": 1, "num_rollouts": 1, "num_rows": 1, "num_tokens": 9, "seconds": 1.0}
    rollout = {"num_tokens": 9, "num_sampled": 4, "start_version": 0, "end_version": 0, "finish": Finish.STOP}
    values = samples_in(
        text_of(
            [
                Span(at=1.0, worker="engine-0", what="generate", seconds=0.5, num_tokens=64),
                RolloutEnded(
                    at=2.0,
                    group_id=1,
                    member=0,
                    attempt=0,
                    reward=1.0,
                    seconds=1.0,
                    reward_parts={"right": 1.0, "short": 0.0},
                    **rollout,
                ),
                Stepped(at=3.0, version=3, metrics={"grad_norm": 0.5}, **counts),
                CheckpointSealed(at=4.0, version=3, covers_seq=2, digest="", num_bytes=1, held_s=0.0, seconds=0.0),
            ]
        )
    )
    assert {name: values[name] for name in OTHERS} == OTHERS


def test_the_store_is_counted_by_partition_and_task_and_a_partition_that_is_gone_has_no_sample() -> None:
    assert STATUS.store is not UNSET
    values = samples_in(text_of([STATUS]))
    assert values["millstream_store_spilled_bytes"] == 500 and values["millstream_store_bytes"] == 900
    assert values['millstream_store_task_rows{partition="train",task="train",state="ready"}'] == 3
    assert values['millstream_store_claims_waiting{task="train"}'] == 2
    assert values['millstream_store_operations_total{operation="put"}'] == 7
    gone = replace(STATUS, store=replace(STATUS.store, partitions={}))
    assert not [name for name in samples_in(text_of([STATUS, gone])) if "partition" in name]


def test_the_numbers_are_those_of_the_events_and_of_the_metrics_rows() -> None:
    found, rows = events(), StepMetrics()
    last = [row for event in found if (row := rows.add(event)) is not None and "reward" in row][-1]
    values = samples_in(text_of(found))
    steps = [event for event in found if isinstance(event, Stepped)]
    assert values["millstream_step"] == steps[-1].version == 6 and values["millstream_steps_planned"] == 6
    assert values["millstream_reward_mean"] == pytest.approx(last["reward"])
    assert values["millstream_lag_mean"] == pytest.approx(last["lag_mean"])
    assert values["millstream_rollouts_trained_total"] == sum(step.num_rollouts for step in steps)
    ended, failed = (sum(isinstance(event, kind) for event in found) for kind in (RolloutEnded, RolloutFailed))
    assert values['millstream_rollouts_total{outcome="ended"}'] == ended
    tried = [f'millstream_rollouts_total{{outcome="{outcome}"}}' for outcome in ("retried", "failed")]
    assert sum(values[name] for name in tried) == failed > 0
    assert values["millstream_groups_admitted_total"] == sum(isinstance(event, GroupAdmitted) for event in found)
    spans = [event for event in found if isinstance(event, Span) and event.worker == "learner" and event.what == "step"]
    busy = values['millstream_busy_seconds_total{worker="learner",work="step"}']
    assert busy == pytest.approx(sum(span.seconds for span in spans))
    taken = [event.lag for event in found if isinstance(event, GroupTaken)]
    assert values['millstream_group_lag_bucket{le="+Inf"}'] == values["millstream_group_lag_count"] == len(taken)
    assert values['millstream_group_lag_bucket{le="0"}'] == taken.count(0)
    assert values["millstream_engines"] == 2
    assert values['millstream_evaluation_score{evaluation="held_out",decoding="sampled",score="pass@1"}'] == 0.5
    holding = {
        name: values[f'millstream_finding{{name="{name}"}}'] for name in ("entropy-collapse", "all-rewards-equal")
    }
    assert holding == {"entropy-collapse": 1, "all-rewards-equal": 0}
    assert values["millstream_event_loop_lag_seconds"] == 0.25


def test_waits_are_counted_by_name_without_the_numbers_of_groups() -> None:
    values = samples_in(text_of([STATUS]))
    room = '{owner="group N",what="room in \\"the\\nstore\\\\"}'
    assert values[f"millstream_waiters{room}"] == 2 and values[f"millstream_wait_seconds_max{room}"] == 4.0
    assert values['millstream_waiters{owner="rollouts",what="an engine"}'] == 40


def test_an_engine_that_has_left_is_not_counted() -> None:
    loaded = [WeightsLoaded(at=1.0, engine=f"engine-{number}", version=3, seconds=0.1) for number in (0, 1)]
    left = ReplicaLeft(at=2.0, engine="engine-1", why="it broke", num_moved=0, num_left=1)
    values = samples_in(text_of([*loaded, left]))
    assert values["millstream_engines"] == 1
    assert [name for name in values if "weights_version" in name] == [
        'millstream_engine_weights_version{engine="engine-0"}'
    ]


def test_every_expression_of_the_dashboard_names_metrics_that_the_endpoint_has_with_labels_that_they_have() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]] + queries
    names = {name for expression in expressions for name in re.findall(r"millstream_\w+", expression)}
    known = {f"millstream_{name}{end}" for name, one in FAMILIES.items() for end in _ends(one.kind)}
    assert names <= known and len(names) >= len(FAMILIES) - 5
    labels = {
        name: set(re.findall(r'(\w+)="', line)) for line in text_of(events()).splitlines() for name in _name_in(line)
    }
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            (name, *_) = re.findall(r"millstream_\w+", target["expr"])
            wanted = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert wanted <= labels.get(name, wanted), (panel["title"], target)


def _ends(kind: str) -> tuple[str, ...]:
    return ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)


def _name_in(line: str) -> list[str]:
    return re.findall(r"^millstream_\w+", line)


def test_prometheus_own_parser_reads_every_metric_with_its_type() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    text = text_of(events())
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    for name, family in families.items():
        plain = name.removeprefix("millstream_")
        assert family.type == FAMILIES[plain if plain in FAMILIES else f"{plain}_total"].kind
    parsed = [sample for family in families.values() for sample in family.samples]
    assert len(parsed) == len(samples_in(text))
    (room,) = [s.labels["what"] for s in families["millstream_waiters"].samples if s.labels["owner"] == "group N"]
    assert room == 'room in "the\nstore\\'
