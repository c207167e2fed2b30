"""The rows of `metrics.jsonl`, from made-up events."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from msgspec import structs

from millstream.events import (
    WARMUP,
    Estimate,
    Evaluated,
    GroupLeft,
    GroupScored,
    GroupTaken,
    RolloutEnded,
    RunStarted,
    Span,
    Stepped,
    WeightsPublished,
    decode_event,
    encode_event,
)
from millstream.events.metrics import StepMetrics, is_step
from millstream.events.sinks import MetricsSink
from millstream.types import Fate, Finish

DOCS = Path(__file__).parents[2] / "docs"


def ended(member: int, reward: float, start: int, end: int, **parts: float) -> RolloutEnded:
    terms = {"at": 1.0, "group_id": 1, "attempt": 0, "num_tokens": 9, "num_sampled": 4, "seconds": 1.0}
    known = {"reward_parts": parts} if parts else {}
    versions = {"start_version": start, "end_version": end, "finish": Finish.STOP}
    return RolloutEnded(member=member, reward=reward, **terms, **versions, **known)  # type: ignore[arg-type]


def started(at: float) -> RunStarted:
    return RunStarted(
        at=at,
        run_id="r",
        seed=0,
        steps=1,
        num_tasks=1,
        filter_zero_signal=True,
        min_group_size=2,
        groups_per_step=1,
        group_size=2,
        max_lag=4.0,
        lag_bound=4,
        budget=5,
    )


def stepped(at: float, seconds: float) -> Stepped:
    return Stepped(
        at=at,
        version=7,
        num_groups=1,
        num_rollouts=2,
        num_rows=2,
        num_tokens=18,
        seconds=seconds,
        metrics={"loss": 0.5, "my own metric": 1.0},
    )


def row() -> dict[str, float]:
    metrics, found = StepMetrics(), None
    for event in (
        started(10.0),
        ended(0, 1.0, 2, 4, correct=1.0, form=0.5),
        ended(1, 0.0, 3, 3, correct=0.0, form=1.0),
        WeightsPublished(at=11.0, version=6, seconds=0.5),
        GroupTaken(at=12.0, group_id=1, version=6, lag=4, num_rollouts=2),
        Span(at=13.0, worker="learner", what="accumulate", seconds=1.0),
        Span(at=14.0, worker="learner", what="step", seconds=0.5),
        Span(at=14.0, worker="learner", what="copy weights", seconds=9.0),  # a part of the publication
        stepped(at=15.0, seconds=4.0),
    ):
        found = metrics.add(event)
    assert found is not None
    return found


def test_seconds_say_where_they_went_and_add_up() -> None:
    found = row()
    assert {name: found[name] for name in ("step_s", "waiting_s", "training_s", "sync_s", "other_s")} == pytest.approx(
        {"step_s": 5.0, "waiting_s": 2.5, "training_s": 1.5, "sync_s": 0.5, "other_s": 0.5}
    )


def test_lag_is_split_by_flight_and_waiting() -> None:
    found = row()
    assert (found["lag_mean"], found["lag_flight"], found["lag_waiting"]) == (4, 1.0, 2.5)


def test_rewards_have_a_deviation_and_their_parts() -> None:
    found = row()
    assert (found["reward"], found["reward_std"], found["reward/correct"], found["reward/form"]) == (
        0.5,
        0.5,
        0.5,
        0.75,
    )


def test_rewards_of_a_whole_group_are_those_of_its_rollouts() -> None:
    """They are known when the group is scored, which may be after the next step."""
    metrics = StepMetrics()
    for member in range(2):
        metrics.add(structs.replace(ended(member, 0.0, 2, 2), is_partial=True))
    first = metrics.add(stepped(at=15.0, seconds=4.0))
    metrics.add(GroupScored(at=16.0, group_id=1, rewards=[0.25, 0.75], seconds=1.0))
    metrics.add(GroupScored(at=16.0, group_id=2, rewards=[], seconds=1.0, failure="RewardFailed: no"))
    second = metrics.add(stepped(at=20.0, seconds=4.0))
    assert first is not None and second is not None
    assert first["length"] == 4.0 and first["rollouts_per_s"] > 0 == second["rollouts_per_s"]
    assert (second["reward"], second["reward_std"]) == (0.5, 0.25)
    third = metrics.add(stepped(at=25.0, seconds=4.0))
    assert third is not None and (third["reward"], third["reward_std"]) == (0.5, 0.25), "as before: none is new"


def test_the_first_step_after_a_resume_has_the_rewards_of_its_groups_where_no_rollout_has_ended() -> None:
    metrics = StepMetrics()
    for mean_reward in (0.25, 0.75):
        metrics.add(GroupLeft(at=1.0, group_id=1, fate=Fate.TRAINED, num_members=2, mean_reward=mean_reward))
    found = metrics.add(stepped(at=2.0, seconds=1.0))
    assert found is not None and found["reward"] == 0.5


def test_an_evaluation_is_a_row_under_the_version_that_was_measured() -> None:
    scores = {"pass@1": Estimate(value=0.5, low=0.3, high=0.7), "avg@4": Estimate(value=0.4, low=0.2, high=0.6)}
    event = Evaluated(at=9.0, name="mine step 4", version=4, accuracy=0.4, num_tasks=8, table="mine", scores=scores)
    metrics = StepMetrics()
    assert metrics.add(event) == {"step": 4, "at": 9.0, "eval/mine/pass@1": 0.5, "eval/mine/avg@4": 0.4}
    greedy = metrics.add(structs.replace(event, is_greedy=True))
    assert greedy is not None and "eval/mine/greedy/pass@1" in greedy and not is_step(greedy)
    assert metrics.add(structs.replace(event, name=WARMUP, table="")) is None
    row = metrics.add(stepped(at=15.0, seconds=4.0))
    assert row is not None and is_step(row) and not any(key.startswith("eval/") for key in row)


def test_an_evaluation_that_a_resume_repeats_has_one_line_the_last(tmp_path: Path) -> None:
    def scored(at: float, value: float, *, table: str = "mine", version: int = 4) -> Evaluated:
        scores = {"pass@1": Estimate(value=value, low=0.0, high=1.0)}
        return Evaluated(at=at, name="", version=version, accuracy=0.0, num_tasks=8, table=table, scores=scores)

    path = tmp_path / "metrics.jsonl"
    for upto, events in (
        (-1, [structs.replace(stepped(1.0, 1.0), version=4), scored(2.0, 0.1), scored(3.0, 0.2, table="other")]),
        (4, [scored(4.0, 0.3), scored(5.0, 0.4, version=5)]),
    ):
        sink = MetricsSink(path, upto=upto)
        for event in events:
            sink.emit(event)
        sink.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["at"]) for row in rows] == [(4, 1.0), (4, 3.0), (4, 4.0), (5, 5.0)]


def test_the_key_of_a_part_has_neither_dots_nor_paths() -> None:
    metrics = StepMetrics()
    metrics.add(ended(0, 1.0, 0, 0, **{"right 2": 1.0, "an/environment's.own": 0.5, "exact_match": 0.0}))
    found = metrics.add(stepped(at=15.0, seconds=4.0))
    assert found is not None
    assert {"reward/right_2", "reward/an_environment_s_own", "reward/exact_match"} <= found.keys()


def test_parts_of_a_reward_are_in_the_log_only_where_there_are_some() -> None:
    with_parts, without = ended(0, 1.0, 0, 0, a=1.0, b=0.0), ended(0, 1.0, 0, 0)
    assert decode_event(encode_event(with_parts)) == with_parts and decode_event(encode_event(without)) == without
    assert "reward_parts" not in json.loads(encode_event(without))


def test_keys_have_no_spaces_and_all_of_ours_are_documented() -> None:
    found = row()
    assert found["my_own_metric"] == 1.0
    assert not any(" " in key for key in found)
    documented = set(re.findall(r"`([\w/]+)`", (DOCS / "tracking.md").read_text()))
    documented |= set(re.findall(r"`([\w/]+)`", (DOCS / "algorithms.md").read_text()))
    own = {key for key in found if not key.startswith(("reward/", "my_own"))}
    assert own <= documented, own - documented
