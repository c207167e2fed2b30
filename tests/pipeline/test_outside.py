"""Rollouts from outside, on the virtual clock: whenever their rewards come, none is trained too old, twice, or unadmitted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import Deadlock
from millstream.events import GroupAdmitted, GroupLeft, GroupTaken, RolloutEnded, Stalled
from millstream.pipeline.outside import OutsideEnvironment, OutsideRollout, OutsideTurn
from millstream.pipeline.pipeline import Pipeline
from millstream.pipeline.reschedule import Changed
from millstream.serve.learn import SessionJournal
from millstream.types import Completion, Fate, Finish, Task
from support.simulated import Diary, World, check, simulate


class Users:
    """Their rewards come after `seconds` each, for sessions that began up to `age` versions ago."""

    def __init__(self, seed: int, *, seconds: float, age: int) -> None:
        self._rng = random.Random(seed)
        self._seconds = seconds
        self._age = age
        self.versions: list[tuple[int, int]] = []
        self.dropped: list[str] = []

    def attach(self, pipeline: Pipeline) -> None:
        self._admission = pipeline.admission

    async def __aiter__(self) -> AsyncIterator[Task]:
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / self._seconds))
            newest = self._admission.version
            self.versions.append((max(0, newest - self._rng.randint(0, self._age)), newest))
            yield Task(id=f"session-{len(self.versions) - 1}", prompt="")

    def oldest_version(self, task: Task) -> int:
        return self.versions[int(task.id.removeprefix("session-"))][0]

    async def read(self, task: Task) -> OutsideRollout:
        versions = self.versions[int(task.id.removeprefix("session-"))]
        answer = Completion(tokens=(5, 6), logprobs=(-0.5, -0.25), versions=versions, finish=Finish.STOP)
        return OutsideRollout(reward=self._rng.random(), parts=[[OutsideTurn([1], answer), OutsideTurn([2], answer)]])

    def drop(self, task: Task, version: int) -> None:
        assert self.oldest_version(task) + self._admission.bound < version
        self.dropped.append(task.id)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    max_lag=st.sampled_from([1, 1.5, 2, 4]),
    groups=st.integers(1, 4),
    seconds=st.sampled_from([0.01, 1.0, 20.0]),
    age=st.integers(0, 6),
    train_token_s=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_rollouts_from_outside_are_trained_once_within_the_bound_or_dropped(
    seed: int, max_lag: float, groups: int, seconds: float, age: int, train_token_s: float
) -> None:
    users = Users(seed, seconds=seconds, age=age)
    world = World(
        steps=6, groups_per_step=groups, group_size=1, max_lag=max_lag, filter_zero_signal=False, train_token_s=train_token_s
    )  # fmt: skip
    outcome = simulate(world, outside=users, environment=OutsideEnvironment(users), on_pipeline=users.attach)
    task_of = {event.group_id: event.task_id for event in outcome.sink.of(GroupAdmitted)}
    trained = [task_of[event.group_id] for event in outcome.sink.of(GroupLeft) if event.fate is Fate.TRAINED]
    assert len(trained) == len(set(trained)) == 6 * groups
    assert not set(trained) & set(users.dropped) and set(task_of.values()) | set(users.dropped) <= {
        f"session-{number}" for number in range(len(users.versions))
    }
    check(world, outcome)
    assert outcome.engines[0].stats().requests_finished == 0, "nothing is generated for training"
    for ended in outcome.sink.of(RolloutEnded):
        assert ended.start_version == users.versions[int(task_of[ended.group_id].removeprefix("session-"))][0]


class Journal(SessionJournal):
    """Sessions of these versions, rewarded before this process. It reads without threads, which no virtual clock knows of."""

    def __init__(self, path: Path, *versions: int, resumed_at: int = 0) -> None:
        with path.open("ab") as file:
            for version in versions:
                answer = Completion(tokens=(5, 6), logprobs=(-0.5, -0.25), versions=(version,) * 2, finish=Finish.STOP)
                rollout = OutsideRollout(reward=1.0, parts=[[OutsideTurn([1], answer)]])
                file.write(msgspec.json.encode(rollout) + b"\n")
        self.dropped: list[str] = []
        super().__init__(path, resumed_at, lambda session, why: self.dropped.append(session))

    async def read(self, task: Task) -> OutsideRollout:
        return self._read(int(task.id.removeprefix("session-")))


def test_sessions_that_lost_versions_have_sampled_are_trained_within_the_bound_or_dropped(tmp_path: Path) -> None:
    journal, pipelines = Journal(tmp_path / "sessions", *[3, 4] * 4), list[Pipeline]()
    world = World(steps=3, groups_per_step=2, group_size=1, max_lag=1, filter_zero_signal=False)
    with pytest.raises(Deadlock):
        simulate(world, outside=journal, environment=OutsideEnvironment(journal), on_pipeline=pipelines.append)
    assert pipelines[0].admission.version == 2
    assert journal.dropped == [f"session-{number}" for number in range(4, 8)]


@pytest.mark.parametrize("are_superseded", [False, True])
def test_sessions_that_wait_when_the_last_step_is_made_are_trained_by_a_resume_with_more_steps(
    tmp_path: Path, are_superseded: bool
) -> None:
    trained, task_of, kept = list[str](), dict[int, str](), None
    for steps in (4, 2, 4) if are_superseded else (2, 4):
        journal, diary = Journal(tmp_path / "sessions", *([] if kept else [0] * 8)), Diary()
        world = World(steps=steps, groups_per_step=2, group_size=1, max_lag=3, filter_zero_signal=False)
        outcome = simulate(
            world,
            outside=journal,
            environment=OutsideEnvironment(journal),
            keeper=diary,
            kept=kept,
            changed=Changed(schedule=kept is not None),
        )
        assert len(journal) - outcome.pipeline.num_fed == 8 - 2 * steps and not journal.dropped
        kept = diary.kept[1 if are_superseded and not trained else -1]
        until = kept.standing.ledger.version
        task_of |= {event.group_id: event.task_id for event in outcome.sink.of(GroupAdmitted)}
        trained += [task_of[event.group_id] for event in outcome.sink.of(GroupTaken) if event.version < until]
    assert sorted(trained) == [f"session-{number}" for number in range(8)]


def test_waiting_for_users_is_no_stall() -> None:
    users = Users(0, seconds=600.0, age=0)
    world = World(steps=2, groups_per_step=1, group_size=1, filter_zero_signal=False)
    outcome = simulate(world, outside=users, environment=OutsideEnvironment(users), on_pipeline=users.attach)
    assert outcome.seconds > 60.0 and not outcome.sink.of(Stalled)
