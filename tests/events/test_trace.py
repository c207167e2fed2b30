"""The Perfetto trace keeps the rules of its format, and has what happened: phases, rollouts with their fates, versions."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.events import (
    ConfigWritten,
    Evaluated,
    EvaluationStarted,
    Event,
    FindingMade,
    Resumed,
    RolloutAborted,
    RolloutEnded,
    RolloutFailed,
    RolloutSpan,
    RolloutStarted,
    RunEnded,
    RunStarted,
    Span,
    Stepped,
    WarmedUp,
)
from millstream.events.trace import PHASES, ROLLOUTS, RUN, perfetto
from support.simulated import World, simulate
from support.trace_format import problems_of

WORLDS = {
    "failures": World(steps=8, failure=0.2, num_engines=2),
    "aborts": World(steps=8, surplus="abort", extra_groups=4, extra_members=1, tail=3.0),
    "restarts": World(steps=8, overdue="restart", tail=4.0, max_lag=1.0),
    "stages": World(steps=6, reference="late", has_critic=True, has_proximal=True, num_turns=3),
    "lockstep": World(steps=4, max_lag=0.0),
}


def entries(events: list[Event], phase: str = "X") -> list[dict[str, Any]]:
    trace = perfetto(events)
    assert problems_of(trace) == []
    return [entry for entry in trace["traceEvents"] if entry["ph"] == phase]


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_the_trace_of_a_run_keeps_the_rules_of_the_format_and_has_every_rollout_with_its_fate(world: World) -> None:
    events = list(simulate(world).sink.events)
    rollouts = [entry for entry in entries(events) if entry["pid"] == ROLLOUTS]
    for kind, word in ((RolloutFailed, "failed"), (RolloutAborted, "aborted")):
        expected = sum(isinstance(event, kind) for event in events)
        assert sum(entry["name"].endswith(word) for entry in rollouts) == expected
    ended = [entry for entry in rollouts if "reward" in entry["args"]]
    assert len(ended) == sum(isinstance(event, RolloutEnded) for event in events)
    versions = [entry["name"] for entry in entries(events, "i") if entry["cat"] == "stepped"]
    assert versions == [f"version {event.version}" for event in events if isinstance(event, Stepped)]


def test_an_arrow_leads_from_every_trained_rollout_to_the_step_that_trained_it() -> None:
    events = list(simulate(World(steps=6)).sink.events)
    trained = sum(event.num_rollouts for event in events if isinstance(event, Stepped))
    assert len(entries(events, "s")) == len(entries(events, "f")) == trained > 0


def started(at: float) -> RunStarted:
    terms = {"seed": 0, "num_tasks": 9, "filter_zero_signal": True, "min_group_size": 2, "groups_per_step": 1}
    return RunStarted(at=at, run_id="1", steps=2, group_size=2, max_lag=1.0, lag_bound=1, budget=2, **terms)


def stepped(at: float, version: int) -> Stepped:
    return Stepped(
        at=at, version=version, num_groups=1, num_rollouts=2, num_rows=2, num_tokens=9, seconds=1.0, metrics={}
    )


def test_the_phases_of_every_process_follow_each_other_and_evaluations_that_overlap_have_tracks_of_their_own() -> None:
    key = {"group_id": 1, "member": 0, "attempt": 0}
    events: list[Event] = [
        ConfigWritten(at=0.0, digest="1"),
        WarmedUp(at=2.0, step=0, max_steps=2),
        WarmedUp(at=3.0, step=1, max_steps=2),
        EvaluationStarted(at=4.0, name="a before", version=0, engines=("engine",)),
        EvaluationStarted(at=4.5, name="b before", version=0, engines=("engine",)),
        Evaluated(at=6.0, name="a before", version=0, accuracy=0.5, num_tasks=3),
        Evaluated(at=7.0, name="b before", version=0, accuracy=0.5, num_tasks=3),
        started(7.5),
        RolloutStarted(at=8.0, **key),
        stepped(9.0, 1),
        Resumed(at=11.0, incarnation=1, version=1, from_seq=3, digest="1"),
        ConfigWritten(at=11.5, digest="2"),
        RolloutStarted(at=12.0, **key),
        RolloutSpan(at=13.0, what="generate", seconds=0.5, num_tokens=4, **key),
        RolloutSpan(at=13.8, what="my tool", seconds=0.4, **key),
        RolloutAborted(at=14.0, why="too late", seconds=2.0, num_sampled=4, **key),
        FindingMade(at=14.5, name="entropy-collapse", step=1, message="m", advice="a"),
        stepped(15.0, 2),
        RunEnded(at=16.0, outcome="finished", version=2),
    ]
    found = entries(events)
    phases = [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in found if (e["pid"], e["tid"]) == (RUN, PHASES)]
    assert phases[:3] == [("start", 0.0, 2.0), ("supervised training", 2.0, 5.5), ("reinforcement learning", 7.5, 3.5)]
    assert [name for name, _, _ in phases[3:]] == ["start"], "of the resumed process: no group was admitted"
    assert len({e["tid"] for e in found if e["name"] in ("a before", "b before")}) == 2
    rollouts = {e["name"]: e for e in found if e["pid"] == ROLLOUTS}
    assert set(rollouts) == {"group 1, not ended", "group 1, aborted", "generate", "my tool"}
    assert rollouts["group 1, not ended"]["dur"] == 4e6, "until it was started again"
    marks = [entry["name"] for entry in entries(events, "i") if entry["cat"] != "stepped"]
    assert marks == ["resumed from version 1", "finding: entropy-collapse", "the run ended: finished"]


def test_work_that_is_reported_late_does_not_overlap_what_was_reported_before() -> None:
    """Found with Perfetto's own trace processor, which drops a slice that overlaps another in part."""
    spans: list[Event] = [Span(at=at, worker="engine", what="generate", seconds=0.5) for at in (1.0, 1.2, 1.1, 3.0)]
    found = [(entry["ts"] / 1e6, entry["dur"] / 1e6) for entry in entries(spans)]
    assert found == [(0.5, 0.5), (1.0, pytest.approx(0.2)), (1.1, 0.0), (2.5, 0.5)]


def test_the_rules_find_what_is_wrong_with_a_trace() -> None:
    name = {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "a"}}
    one = {"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 0, "dur": 10}
    assert problems_of({"traceEvents": [name, one, {**one, "ts": 2, "dur": 5}]}) == [], "one is inside the other"
    assert problems_of({"traceEvents": [name, one, {**one, "ts": 5}]})[0].startswith("slices overlap")
    assert problems_of({"traceEvents": [name, {**one, "ts": 0.5}]})[0].startswith("not in whole microseconds")
    assert problems_of({"traceEvents": [one]}) == ["track (1, 1) has no name"]
    arrow = {"ph": "s", "name": "a", "cat": "a", "id": 1, "pid": 1, "tid": 1, "ts": 50}
    assert len(problems_of({"traceEvents": [name, one, arrow]})) == 2, "it ends nowhere, and begins in nothing"
