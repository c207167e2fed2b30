"""`events.bottleneck`: what holds a run up, of runs in which it was planted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from millstream.events import Event, GroupTaken, RolloutEnded, RolloutStarted, SettingChanged, Span, Stepped
from millstream.events.bottleneck import RECENT, TimeUse, bottleneck_of
from millstream.events.sinks import read_events
from millstream.run.simulate import costs_of, simulate
from support.planted import planted_config

GOLDEN = Path(__file__).parents[1] / "golden/max_lag_2.jsonl"
PLANTED = {
    "stragglers": ("sim.lengths.sigma=1.3",),
    "learner": ("sim.train_tokens_per_s=1500",),
    "engines": (
        "engine.replicas=1",
        "engine.slots=256",
        "sim.request_s=4e-4",
        "sim.lengths.sigma=0.1",
        "pipeline.max_lag=2",
    ),
    "environment": ("sim.environment.latency_s.mean=6",),
    "slots": ("engine.slots=6",),
    "cache": ("sim.cache_tokens=3000", "rollout.max_tokens=1024", "pipeline.max_lag=2"),
    "no-signal": ("sim.environment.no_signal=0.6", "pipeline.filter_zero_signal=true"),
    "sync": ("sim.publish_s=6",),
    "failures": ("sim.environment.failure=0.3", "rollout.retries=3"),
    "turns": ("pipeline.max_lag=0", "sim.train_tokens_per_s=3000", "sim.lengths.sigma=0.1"),
}


def simulated(*changes: str) -> Sequence[Event]:
    config = planted_config("pipeline.steps=8", *changes)
    return simulate(config, costs_of(config)).events


@pytest.mark.parametrize("name", PLANTED)
def test_what_was_planted_is_named(name: str) -> None:
    found = bottleneck_of(simulated(*PLANTED[name]))
    assert found is not None and found.name == name, found
    assert "%" in found.message and sum(found.shares.values()) == pytest.approx(1, abs=0.1)


def test_where_every_group_is_filtered_nothing_else_is_named() -> None:
    found = bottleneck_of(simulated("sim.environment.no_signal=1", "pipeline.filter_zero_signal=true"))
    assert found is not None and found.name == "no-signal" and "nothing is trained" in found.message, found


def test_rollouts_that_wait_for_a_place_in_their_environment_wait_for_it() -> None:
    found = bottleneck_of(simulated("environment=[{max_concurrent=4}]"))
    assert found is not None and found.name == "environment", found


def test_engines_that_are_loading_are_what_the_learner_waits_for() -> None:
    found = bottleneck_of(simulated("sim.load_s=6"))
    assert found is not None and found.name == "sync", found


def test_a_run_of_few_steps_has_no_bottleneck() -> None:
    assert bottleneck_of([]) is None
    events = simulated("pipeline.steps=2")
    assert bottleneck_of(events) is None
    changed = SettingChanged(at=events[-1].at, key="pipeline.max_lag", old=1, new=2, version=8)
    assert bottleneck_of([*simulated(), changed]) is None, "steps under other settings do not count"


def test_a_log_in_another_order_or_of_an_earlier_version_does_not_stop_it() -> None:
    use = TimeUse()
    events = list(read_events(GOLDEN))
    for event in [*reversed(events), *events]:
        use.add(event)
    use.bottleneck()


def test_only_recent_steps_count() -> None:
    """A run that waited in its first steps and trains all the time since."""
    use, at = TimeUse(), 0.0
    for version in range(1, 3 * RECENT):
        waited = 9.0 if version < RECENT else 0.1
        use.add(RolloutStarted(at=at, group_id=version, member=0, attempt=0))
        at += waited
        use.add(_ended(at, version))
        use.add(GroupTaken(at=at, group_id=version, version=version - 1, lag=0, num_rollouts=1))
        at += 1.0
        use.add(Span(at=at, worker="learner", what="accumulate", seconds=1.0))
        use.add(_stepped(at, version, waited + 1.0))
    found = use.bottleneck()
    assert found is not None and found.name == "learner" and found.step_s == pytest.approx(1.1)


def _ended(at: float, group_id: int) -> RolloutEnded:
    return RolloutEnded(
        at=at,
        group_id=group_id,
        member=0,
        attempt=0,
        reward=1.0,
        num_tokens=2,
        num_sampled=1,
        start_version=0,
        end_version=0,
        finish="stop",  # type: ignore[arg-type]
        seconds=1.0,
    )


def _stepped(at: float, version: int, seconds: float) -> Stepped:
    return Stepped(
        at=at, version=version, num_groups=1, num_rollouts=1, num_rows=1, num_tokens=2, seconds=seconds, metrics={}
    )
