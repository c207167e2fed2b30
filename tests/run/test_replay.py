"""Learners that die: on the virtual clock at any moment of any call, and for real by SIGKILL. What is trained stays the same."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from millstream import RunConfig
from millstream.clock import RealClock, VirtualClock, run_virtual
from millstream.config import load
from millstream.errors import InvariantError, LearnerError, LearnerGone
from millstream.events import CheckpointFailed, LearnerRestarted, Resumed, RunEnded, Warned
from millstream.events.sinks import MemorySink, read_events
from millstream.learner.fsdp import FsdpLearner
from millstream.learner.messages import WriteSnapshot
from millstream.learner.processes import GroupSnapshot
from millstream.learner.snapshots import files_in
from millstream.pipeline.state import LearnerAndCritic, PipelineState
from millstream.rpc.forkserver import SOCKET_VARIABLE
from millstream.run import build, replay
from millstream.run.checkpoint import CheckpointConfig, Checkpoints, Sealed
from millstream.run.replay import MAX_LEARNER_RESTARTS, ReplayedCritic, ReplayedLearner
from millstream.run.replay_log import LearnerCall, ReplayLog
from millstream.sim.learner import SimCritic, SimLearner, SimSnapshot
from millstream.types import Floats, Metrics, TrainRow, Weights
from support.checkpoints import checkpoints_in, standing
from support.commands import start_command
from support.processes import is_alive, workers
from support.rank_cases import CASES, STEPS, batch, row, train
from support.runs import ROOT, assert_clean, command, kill_at, resume_command, steps_of, until
from support.simulated import Diary, Others, World, at_once, check, simulate
from support.worlds import unless_all_fail, worlds

CASE = CASES[0]
Heard = list[tuple[str, tuple[str, ...]]]


# ---- on the virtual clock --------------------------------------------------------------------------------------------


class Fates:
    """Which calls, counted over all learners, are the last of one of them, and when in the call: 0 before, 1 in the middle, 2 when it
    is done and only the answer is lost."""

    def __init__(self, deaths: dict[int, int]) -> None:
        self._deaths, self._num_calls = deaths, 0
        self.num_dead = 0
        self.heard: dict[str, Heard] = {}
        """By folder of a checkpoint: all that the learner had heard then."""

    def next(self) -> int | None:
        self._num_calls += 1
        moment = self._deaths.get(self._num_calls)
        self.num_dead += moment is not None
        return moment


class MortalSnapshot(SimSnapshot):
    def __init__(self, of: MortalLearner) -> None:
        super().__init__(of.num_rows)
        self._of, self._heard = of, list(of.heard)

    def write(self, folder: Path) -> None:
        self._of.look_alive()
        super().write(folder)
        self._of.fates.heard[str(folder)] = self._heard


class MortalLearner(SimLearner):
    def __init__(self, fates: Fates, token_s: float = 1e-4) -> None:
        super().__init__(token_s=token_s)
        self.fates, self.heard, self.is_dead = fates, Heard(), False

    def look_alive(self) -> None:
        if self.is_dead:
            raise LearnerGone("the learner broke, on purpose")

    async def _live(self, what: str, work: Callable[[], Awaitable[Any]], rows: Sequence[TrainRow] = ()) -> Any:
        self.look_alive()
        moment = self.fates.next()
        if moment == 1:
            await asyncio.sleep(0.05)
        result = await work() if moment in (None, 2) else None
        self.is_dead = moment is not None
        self.look_alive()
        if what:
            self.heard.append((what, tuple(one.label for one in rows)))
        return result

    async def ready(self) -> None:
        await self._live("", super().ready)

    async def begin_batch(self) -> None:
        await self._live("begin_batch", super().begin_batch)

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        await self._live("accumulate", lambda: SimLearner.accumulate(self, rows), rows)

    async def step(self) -> Metrics:
        return await self._live("step", super().step)

    async def logprobs(self, rows: Sequence[TrainRow]) -> list[Floats]:
        return await self._live("", lambda: SimLearner.logprobs(self, rows))

    async def weights(self) -> Weights:
        return await self._live("", super().weights)

    async def snapshot(self) -> SimSnapshot:
        async def take() -> SimSnapshot:
            return MortalSnapshot(self)

        return await self._live("", take)

    def restore(self, folder: Path) -> None:
        self.look_alive()
        self.is_dead = self.fates.next() is not None
        self.look_alive()
        super().restore(folder)
        self.heard = list(self.fates.heard[str(folder)])


class Sealing(Diary):
    """Checkpoints on the virtual clock: written beside training, sealed or not, the older ones removed."""

    def __init__(self, folder: Path, every: int) -> None:
        super().__init__()
        self._folder, self._every, self._writing = folder, every, asyncio.Event()
        self._writing.set()
        self._sealed: Sealed | None = None
        self._is_hurried = False
        self.num_failed = self.num_hurried = 0

    def is_due(self, version: int, *, is_last: bool) -> bool:
        return self._writing.is_set() and (version % self._every == 0 or self._is_hurried)

    async def keep(self, standing: PipelineState, mark: int, snapshot: Any, held_s: float) -> None:
        self._writing.clear()
        self._is_hurried = False
        self._task = asyncio.create_task(self._write(standing.ledger.version, snapshot))

    async def _write(self, version: int, snapshot: Any) -> None:
        folder = self._folder / f"{version}"
        folder.mkdir()
        try:
            await asyncio.sleep(0.3)
            snapshot.write(folder)
            await asyncio.sleep(0.1)
            self._sealed = Sealed(version, folder)
        except LearnerGone:
            self.num_failed += 1
        finally:
            self._writing.set()

    @property
    def version(self) -> int | None:
        return None if self._sealed is None else self._sealed.version

    async def newest_sealed(self) -> Sealed | None:
        await self._writing.wait()
        return self._sealed

    def hurry(self) -> None:
        self._is_hurried = True
        self.num_hurried += 1


class Recorder:
    """The calls of the pipeline that its learner has executed."""

    def __init__(self, learner: ReplayedLearner) -> None:
        self._learner, self.calls, self.weighed = learner, Heard(), list[int]()

    async def begin_batch(self) -> None:
        await self._learner.begin_batch()
        self.calls.append(("begin_batch", ()))

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        await self._learner.accumulate(rows)
        self.calls.append(("accumulate", tuple(one.label for one in rows)))

    async def step(self) -> Metrics:
        metrics = await self._learner.step()
        self.calls.append(("step", ()))
        return metrics

    async def weights(self) -> Weights:
        weights = await self._learner.weights()
        self.weighed.append(weights["num_rows"])
        assert weights["num_rows"] == sum(len(labels) for _, labels in self.calls)
        return weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)


class Played:
    """A world whose learners die at given calls."""

    def __init__(self, world: World, deaths: dict[int, int], folder: Path, every: int = 2) -> None:
        self.fates = Fates(deaths)
        self._world, self._folder, self._every = world, folder, every

    def run(self) -> Played:
        keeper = Sealing(self._folder, self._every)

        def new_learner(sink: MemorySink) -> Others:
            learner = ReplayedLearner(
                lambda: MortalLearner(self.fates, self._world.train_token_s),
                keeper,
                clock=VirtualClock(),
                sink=sink,
                in_thread=at_once,
            )
            self.recorder: Any = Recorder(learner)

            def survivor() -> SimLearner:
                assert isinstance(learner.inner, MortalLearner)
                return learner.inner

            return Others(self.recorder, survivor)

        self.outcome = simulate(self._world, keeper=keeper, new_learner=new_learner)
        self.keeper, self.survivor = keeper, self.outcome.learner
        assert isinstance(self.survivor, MortalLearner)
        self.restarts = self.outcome.sink.of(LearnerRestarted)
        return self


def play(world: World, deaths: dict[int, int], every: int = 2) -> Played:
    with tempfile.TemporaryDirectory() as folder:
        return Played(world, deaths, Path(folder), every).run()


deaths = st.dictionaries(st.integers(1, 150), st.integers(0, 2), max_size=MAX_LEARNER_RESTARTS)


@settings(max_examples=80, suppress_health_check=[HealthCheck.filter_too_much])
@given(world=worlds, deaths=deaths, every=st.integers(1, 4))
def test_whenever_learners_die_the_last_one_has_executed_every_call_once_and_in_order(
    world: World, deaths: dict[int, int], every: int
) -> None:
    with unless_all_fail(world):
        played = play(world, deaths, every)
    check(world, played.outcome)
    assert played.survivor.heard == played.recorder.calls
    assert len(played.restarts) <= played.fates.num_dead
    assert all(one.from_version <= one.to_version for one in played.restarts)
    versions = [one.to_version for one in played.restarts]
    assert versions == sorted(versions)


@pytest.mark.parametrize("seed", range(12))
def test_at_max_lag_zero_a_run_with_deaths_trains_and_publishes_the_same_as_an_undisturbed_run(seed: int) -> None:
    draw = random.Random(seed)
    deaths = {draw.randrange(1, 30): draw.randrange(3) for _ in range(4)}
    world = World(max_lag=0, steps=6, groups_per_step=3, mini_batches=draw.choice([1, 3]), seed=seed)
    disturbed, undisturbed = play(world, deaths), play(world, {})
    assert disturbed.restarts and not undisturbed.restarts
    assert disturbed.recorder.calls == undisturbed.recorder.calls == disturbed.survivor.heard
    assert disturbed.recorder.weighed == undisturbed.recorder.weighed


def test_the_deaths_of_these_tests_hit_every_call_and_leave_checkpoints_unsealed() -> None:
    seen, num_failed = set(), 0
    for number in range(1, 50):
        played = play(World(steps=5, max_lag=1, seed=1), {number: number % 3}, every=1)
        num_failed += played.keeper.num_failed
        seen |= {(one.num_batches_replayed > 0, one.from_version > 0) for one in played.restarts}
    assert num_failed and seen == {(True, True), (True, False), (False, False)}


def test_every_checkpoint_that_is_sealed_gives_a_restart_back() -> None:
    deaths = {36 * number: number % 3 for number in range(1, 9)}
    played = play(World(steps=60, max_lag=1), deaths, every=1)
    assert len(played.restarts) == 8 > MAX_LEARNER_RESTARTS
    assert played.survivor.heard == played.recorder.calls


# ---- the log, the budget ---------------------------------------------------------------------------------------------


def rows_of(*lengths: int) -> list[TrainRow]:
    rng = np.random.default_rng(0)
    return [row(rng, length, f"row {length}") for length in lengths]


def write_batch(log: ReplayLog, *lengths: int, steps: int = 1) -> None:
    log.append(LearnerCall("begin_batch"))
    for _ in range(steps):
        log.append(LearnerCall("accumulate", tuple(rows_of(*lengths))))
        log.append(LearnerCall("step"))


def test_the_log_counts_batches_as_versions_and_drops_what_a_checkpoint_covers() -> None:
    log = ReplayLog(7)
    write_batch(log, 5, 6, steps=2)
    log.mark()
    size = log.num_bytes
    write_batch(log, 9)
    assert (log.version, log.num_batches, log.num_rows) == (9, 2, 5)
    assert log.truncate(8) and not log.truncate(8)
    assert (log.since, log.version, log.num_batches, log.num_rows) == (8, 9, 1, 1)
    assert 0 < log.num_bytes < size
    with pytest.raises(InvariantError, match="checkpoint of version 12 is sealed: snapshots were taken of 8"):
        log.truncate(12)


class NoCheckpoints:
    version = None
    num_hurried = 0

    async def newest_sealed(self) -> None:
        return None

    def hurry(self) -> None:
        self.num_hurried += 1


def replayed(make: Callable[[], Any], sink: MemorySink, **more: Any) -> ReplayedLearner:
    return ReplayedLearner(make, NoCheckpoints(), clock=VirtualClock(), sink=sink, in_thread=at_once, **more)


def test_where_learners_die_again_and_again_it_ends_with_how_often_and_why() -> None:
    async def program() -> float:
        fates = Fates(dict.fromkeys(range(3, 100), 1))
        learner = replayed(lambda: MortalLearner(fates), MemorySink())
        await learner.ready()
        await learner.begin_batch()
        with pytest.raises(
            LearnerError, match="restarted 5 times, and died again: the learner broke, on purpose"
        ) as error:
            await learner.step()
        assert not isinstance(error.value, LearnerGone)
        return asyncio.get_running_loop().time()

    assert run_virtual(program()) > 0.5 + 1 + 2 + 4 + 8, "longer and longer pauses"


def test_a_learner_that_refuses_is_not_asked_again() -> None:
    class Stubborn(SimLearner):
        async def step(self) -> Metrics:
            raise LearnerError("4 steps in a row had a gradient that is not finite")

    async def program() -> None:
        made, sink = list[Stubborn](), MemorySink()
        learner = replayed(lambda: made.append(Stubborn()) or made[-1], sink)  # type: ignore[func-returns-value]
        await learner.begin_batch()
        with pytest.raises(LearnerError, match="not finite"):
            await learner.step()
        assert len(made) == 1 and not sink.events

    run_virtual(program())


def test_a_learner_that_does_not_answer_counts_as_dead_and_progress_is_reported() -> None:
    async def program() -> None:
        made, sink, progress = list[SimLearner](), MemorySink(), list[float]()

        class Silent(SimLearner):
            async def step(self) -> Metrics:
                if len(made) == 1:
                    await asyncio.Event().wait()
                return await super().step()

        def make() -> SimLearner:
            made.append(Silent())
            return made[-1]

        learner = replayed(make, sink, patience_s=20.0, progress=lambda: progress.append(0.0))
        await learner.begin_batch()
        await learner.accumulate(rows_of(5))
        await learner.step()
        (event,) = sink.of(LearnerRestarted)
        assert event.why == "the learner has said nothing for 20 s" and event.num_rows == 1
        assert made[1].num_rows == 1 and len(progress) == 3

    run_virtual(program())


def test_a_log_that_grows_asks_for_a_checkpoint_and_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "max_log_bytes", lambda free: 1000)

    async def program() -> None:
        sink = MemorySink()
        learner = replayed(SimLearner, sink)
        checkpoints: Any = learner._checkpoints
        await learner.accumulate(rows_of(20))
        assert not checkpoints.num_hurried
        for _ in range(20):
            await learner.accumulate(rows_of(20))
        assert checkpoints.num_hurried
        assert [event.message.partition(" of rows")[2] for event in sink.of(Warned)] == [
            " were trained since version 0 and are kept until a checkpoint covers them: none was written"
        ]

    run_virtual(program())


@pytest.mark.parametrize(
    ("free", "limit"), [(None, 256 << 20), (64 << 20, 256 << 20), (256 << 20, 32 << 20), (64 << 30, 8 << 30)]
)
def test_held_rows_may_have_a_part_of_the_shared_memory_that_is_free(free: int | None, limit: int) -> None:
    assert replay.max_log_bytes(free) == limit


def test_checkpoints_that_are_hurried_are_due_at_once_and_one_whose_ranks_die_costs_itself_alone(
    tmp_path: Path,
) -> None:
    class Lost:
        def write(self, folder: Path) -> None:
            raise LearnerGone("the learner broke, rank 1 of 2: its process ended with exit code -9")

    async def program() -> None:
        sink, config = MemorySink(), CheckpointConfig(every_s=None, every_steps=1000)
        checkpoints = checkpoints_in(tmp_path, sink, config)
        await checkpoints.keep(standing(0), 0, SimSnapshot(3), 10.0)
        found = await checkpoints.newest_sealed()
        assert found == Sealed(0, tmp_path / "checkpoints/step-000000") and found.folder.is_dir()
        assert not checkpoints.is_due(1, is_last=False)
        checkpoints.hurry()
        assert checkpoints.is_due(1, is_last=False)
        await checkpoints.keep(standing(1), 0, Lost(), 0.0)
        assert await checkpoints.newest_sealed() == found, "the one before"
        assert not checkpoints.is_due(2, is_last=False)
        (failed,) = sink.of(CheckpointFailed)
        assert failed.version == 1 and "exit code -9" in failed.message
        await checkpoints.close()

    asyncio.run(program())


class FarGroup:
    """Two ranks, and the second one is on a node that has a disk of its own where the run folder should be."""

    places = ("rank 0 of 2", "rank 1 of 2 on node far")

    def __init__(self, disk: Path, sizes: tuple[int, int]) -> None:
        self._disk, self._sizes = disk, sizes
        """How many bytes of the second one's file are here, and there."""

    def call(self, message: WriteSnapshot, answer: Any, harmless: Any) -> list[dict[str, int]]:
        here, (num_here, num_there) = Path(message.folder), self._sizes
        (here / "__0_0.distcp").write_bytes(b"1234")
        there = self._disk / here.name
        there.mkdir()
        (there / "__1_0.distcp").write_bytes(bytes(num_there))
        if num_here:
            (here / "__1_0.distcp").write_bytes(bytes(num_here))
        return [files_in(folder) for folder in (here, there)]


@pytest.mark.parametrize(("sizes", "found"), [((0, 7), "is not there"), ((5, 7), "has 5 bytes"), ((7, 7), "")])
def test_a_checkpoint_is_sealed_only_if_all_that_was_written_elsewhere_is_seen_here(
    tmp_path: Path, sizes: tuple[int, int], found: str
) -> None:
    async def program() -> list[CheckpointFailed]:
        sink = MemorySink()
        checkpoints = checkpoints_in(tmp_path, sink, CheckpointConfig(keep=1))
        await checkpoints.keep(standing(0), 0, SimSnapshot(3), 0.0)
        group: Any = FarGroup(tmp_path, sizes)
        await checkpoints.keep(standing(1), 0, GroupSnapshot(group, 0), 0.0)
        await checkpoints.close()
        return sink.of(CheckpointFailed)

    failed = asyncio.run(program())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-00000{int(not found)}"]
    if found:
        (event,) = failed
        assert event.message.startswith("rank 1 of 2 on node far wrote 7 bytes of ") and "__1_0.distcp" in event.message
        assert f"here it {found}: the run folder must be on a disk that the driver and all nodes with" in event.message


async def bereft(checkpoints: Checkpoints, learner: ReplayedLearner | ReplayedCritic, die: Callable[[], None]) -> None:
    """Trains a batch, seals it, begins another one, whereupon the log drops the first; then the checkpoint is moved, and
    the learner or critic dies."""
    begin = learner.begin_batch if isinstance(learner, ReplayedLearner) else learner.ready
    await learner.ready()
    await begin()
    await learner.accumulate(rows_of(5))
    await learner.step()
    snapshot = await learner.snapshot()
    is_critic = isinstance(learner, ReplayedCritic)
    await checkpoints.keep(standing(1), 0, LearnerAndCritic(SimSnapshot(0), snapshot) if is_critic else snapshot, 0.0)
    sealed = await checkpoints.newest_sealed()
    assert sealed is not None
    await begin()
    await learner.accumulate(rows_of(6))
    sealed.folder.rename(sealed.folder.with_name("moved"))
    die()
    with pytest.raises(LearnerError, match=r"checkpoints/step-000001(/critic)?, which has everything") as error:
        await learner.step()
    assert not isinstance(error.value, LearnerGone)


class MortalCritic(SimCritic):
    def __init__(self) -> None:
        super().__init__()
        self.is_dead = False

    async def ready(self) -> None: ...
    async def close(self) -> None: ...

    async def step(self) -> Metrics:
        if self.is_dead:
            raise LearnerGone("the critic broke, on purpose")
        return await super().step()


@pytest.mark.parametrize("who", ["learner", "critic"])
def test_without_the_checkpoint_before_its_log_nothing_is_restarted(tmp_path: Path, who: str) -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(MortalCritic() if who == "critic" else MortalLearner(Fates({})))
        return made[-1]

    async def program() -> None:
        sink = MemorySink()
        checkpoints = checkpoints_in(tmp_path, sink, CheckpointConfig())
        kind = ReplayedCritic if who == "critic" else ReplayedLearner
        await bereft(
            checkpoints,
            kind(make, checkpoints, clock=RealClock(), sink=sink),
            lambda: setattr(made[0], "is_dead", True),
        )
        await checkpoints.close()
        assert len(made) == 1 and not sink.of(LearnerRestarted)

    asyncio.run(program())


def test_while_the_log_is_complete_a_checkpoint_that_was_moved_is_not_needed(tmp_path: Path) -> None:
    made = list[MortalLearner]()

    async def program() -> None:
        sink = MemorySink()
        checkpoints = checkpoints_in(tmp_path, sink, CheckpointConfig())

        def make() -> MortalLearner:
            made.append(MortalLearner(Fates({})))
            return made[-1]

        learner = ReplayedLearner(make, checkpoints, clock=RealClock(), sink=sink)
        await checkpoints.keep(standing(0), 0, await learner.snapshot(), 0.0)
        sealed = await checkpoints.newest_sealed()
        assert sealed is not None
        await learner.begin_batch()
        await learner.accumulate(rows_of(5))
        sealed.folder.rename(tmp_path / "moved")
        made[0].is_dead = True
        await learner.step()
        await checkpoints.close()

    asyncio.run(program())
    assert made[1].heard == [("begin_batch", ()), ("accumulate", ("row 5",)), ("step", ())]


# ---- for real --------------------------------------------------------------------------------------------------------


def two_ranks() -> FsdpLearner:
    learner = build.build_learner(
        load(ROOT / "recipes/demo.toml", RunConfig, [f"rollout.temperature={CASE.temperature}"]),
        CASE.new_model(),
        None,
        learner=structs.replace(CASE.learner, ranks=2),
        recipe=CASE.recipe(),
        num_steps=STEPS,
    )
    assert isinstance(learner, FsdpLearner)
    return learner


async def with_a_death(learner: ReplayedLearner, work: Awaitable[Any]) -> Any:
    """A rank stands still, so that the call is sure to be at work when the rank is killed."""
    assert isinstance(learner.inner, FsdpLearner)
    pid = learner.inner.ranks.pids[1]
    os.kill(pid, signal.SIGSTOP)
    doing = asyncio.ensure_future(work)
    await asyncio.sleep(0.1)
    assert not doing.done()
    os.kill(pid, signal.SIGKILL)
    return await doing


async def one_step(learner: ReplayedLearner, number: int, dies_in: str) -> Any:
    def do(what: str, work: Awaitable[Any]) -> Awaitable[Any]:
        return with_a_death(learner, work) if what == dies_in else work

    await learner.begin_batch()
    for rows in batch(10 * number):
        await do("accumulate", learner.accumulate(rows))
        dies_in = "" if dies_in == "accumulate" else dies_in
    await do("step", learner.step())
    return await do("weights", learner.weights())


async def killed_in_everything(folder: Path, sink: MemorySink) -> Weights:
    """Deaths before and after the first checkpoint, and while one is taken and written."""
    checkpoints = checkpoints_in(folder, sink, CheckpointConfig())
    learner = ReplayedLearner(two_ranks, checkpoints, clock=RealClock(), sink=sink)
    try:
        await learner.ready()
        for number, dies_in in enumerate(["accumulate", "step", "weights", "", ""]):
            weights = await one_step(learner, number, dies_in)
            if number == 1:
                await checkpoints.keep(standing(2), 0, await learner.snapshot(), 0.0)
                assert (await checkpoints.newest_sealed() or Sealed(0, folder)).version == 2
            if number == 3:
                snapshot = await with_a_death(learner, learner.snapshot())
                writing = checkpoints.keep(standing(4), 0, snapshot, 0.0)
                assert isinstance(learner.inner, FsdpLearner)
                os.kill(learner.inner.ranks.pids[0], signal.SIGKILL)
                await writing
        await asyncio.to_thread(learner.save, folder / "model")
        return weights
    finally:
        await checkpoints.close()
        await learner.close()


@pytest.mark.slow
def test_ranks_that_are_killed_in_any_call_leave_the_weights_of_an_undisturbed_learner_bit_for_bit(
    tmp_path: Path,
) -> None:
    async def undisturbed() -> Weights:
        learner = two_ranks()
        try:
            await train(learner, structs.replace(CASE), range(5))
            return await learner.weights()
        finally:
            await learner.close()

    sink = MemorySink()
    expected, found = asyncio.run(undisturbed()), asyncio.run(killed_in_everything(tmp_path, sink))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    restarts = sink.of(LearnerRestarted)
    assert [(one.from_version, one.to_version) for one in restarts] == [(0, 0), (0, 1), (2, 3), (2, 4), (2, 4)]
    assert all("its process ended with exit code -9" in one.why for one in restarts)
    (failed,) = sink.of(CheckpointFailed)
    assert failed.version == 4 and (tmp_path / "model/model.safetensors").exists()


OWN_DISK = ["unshare", "-rm", "sh", "-ce", 'mount -t tmpfs none "$1"; mkdir -p "$2"; shift 2; exec "$@"', "own disk"]
"""Begins a process that has a disk of its own, with one folder, where others have the first path."""


def elsewhere(monkeypatch: pytest.MonkeyPatch, run_dir: Path, with_folder: Path) -> None:
    """The second process that is started from here on has a disk of its own in place of the run folder."""
    started, begin = itertools.count(), subprocess.Popen

    def start_one(words: list[str], **more: Any) -> Any:
        return begin([*OWN_DISK, str(run_dir), str(with_folder), *words] if next(started) == 1 else words, **more)

    monkeypatch.setattr(subprocess, "Popen", start_one)
    monkeypatch.setenv(SOCKET_VARIABLE, "off")


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("unshare")
    or subprocess.run([*OWN_DISK, "/mnt", "/mnt/one", "true"], capture_output=True).returncode != 0,
    reason="mounts are not allowed here",
)
@pytest.mark.parametrize(
    ("folder", "said"),
    [
        (".", r"has no folder .*\.step-000001\.tmp"),
        (".step-000001.tmp", r"rank 1 of 2 wrote \d+ bytes of .*__1_0\.distcp"),
    ],
    ids=["that has nothing", "that has a folder of the same name"],
)
def test_a_rank_with_a_disk_of_its_own_costs_the_checkpoint_and_not_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, said: str
) -> None:
    async def program() -> list[CheckpointFailed]:
        sink = MemorySink()
        checkpoints = checkpoints_in(tmp_path, sink, CheckpointConfig(keep=1))
        await checkpoints.keep(standing(0), 0, SimSnapshot(0), 0.0)
        learner = two_ranks()
        try:
            await learner.ready()
            await checkpoints.keep(standing(1), 0, await learner.snapshot(), 0.0)
            await checkpoints.close()
            await learner.weights()
        finally:
            await learner.close()
        return sink.of(CheckpointFailed)

    elsewhere(monkeypatch, tmp_path, tmp_path / "checkpoints" / folder)
    (event,) = asyncio.run(program())
    assert re.search(said + ".*: the run folder must be on a disk that", event.message), event.message
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000"]


@pytest.mark.slow
def test_ranks_that_do_not_answer_are_killed_and_replaced() -> None:
    async def program() -> list[LearnerRestarted]:
        sink = MemorySink()
        learner = ReplayedLearner(two_ranks, NoCheckpoints(), clock=RealClock(), sink=sink, patience_s=20.0)
        try:
            await learner.ready()
            first = learner.inner
            assert isinstance(first, FsdpLearner)
            os.kill(first.ranks.pids[0], signal.SIGSTOP)
            await one_step(learner, 0, "")
            assert not any(map(is_alive, first.ranks.pids))
        finally:
            await learner.close()
        return sink.of(LearnerRestarted)

    (event,) = asyncio.run(program())
    assert event.why == "the learner has said nothing for 20 s"


@pytest.mark.slow
@pytest.mark.usefixtures("own_warm_process")
def test_a_run_whose_rank_is_killed_goes_to_its_end_and_its_audit_is_clean(tmp_path: Path) -> None:
    """A whole run with two ranks, and two more after the kill: most of its time is that of interpreters that import torch."""
    run_dir = tmp_path / "run"
    process = start_command(command(run_dir, {"learner.ranks": 2, "pipeline.steps": 12, "checkpoint.every_steps": 2}))
    until(lambda: steps_of(run_dir) >= 3, process)
    ranks = workers(process.pid)
    os.kill(ranks[1], signal.SIGKILL)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert "the learner was restarted at step" in output and "exit code -9" in output
    events = list(read_events(run_dir / "events.jsonl"))
    (restarted,) = [event for event in events if isinstance(event, LearnerRestarted)]
    assert restarted.to_version >= 3
    replayed = restarted.num_batches_replayed - (restarted.to_version - restarted.from_version)
    assert replayed in (0, 1), "all since the checkpoint, and the one in hand"
    assert isinstance(events[-1], RunEnded) and events[-1].outcome == "finished" and events[-1].version == 12
    assert_clean(run_dir)
    assert not any(map(is_alive, ranks))


@pytest.mark.slow
@pytest.mark.usefixtures("own_warm_process")
def test_a_rank_that_is_killed_after_a_resume_with_other_micro_batches_is_replaced_and_the_audit_is_clean(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    kill_at(run_dir, 3, {"learner.ranks": 2, "pipeline.steps": 200, "checkpoint.every_steps": 2})
    changes = ["--set", "learner.micro_batch_tokens=64", "--set", "pipeline.groups_per_step=2"]
    process = start_command([*resume_command(run_dir), *changes])

    def versions() -> list[int]:
        return [event.version for event in read_events(run_dir / "events.jsonl") if isinstance(event, Resumed)]

    until(lambda: bool(versions()) and steps_of(run_dir) >= versions()[0] + 3, process)
    os.kill(workers(process.pid)[1], signal.SIGKILL)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0 and "the learner was restarted at step" in output, output
    assert_clean(run_dir)


@pytest.mark.slow
@pytest.mark.usefixtures("own_warm_process")
def test_at_max_lag_zero_the_model_of_a_run_whose_rank_was_killed_is_that_of_an_undisturbed_run(tmp_path: Path) -> None:
    changes = {"learner.ranks": 2, "pipeline.steps": 10, "pipeline.max_lag": 0, "checkpoint.every_steps": 3}
    models = []
    for name in ("killed", "undisturbed"):
        run_dir = tmp_path / name / "run"
        process = start_command(command(run_dir, changes))
        until(lambda: steps_of(run_dir) >= 5, process)
        if name == "killed":
            os.kill(workers(process.pid)[0], signal.SIGKILL)
        output = process.communicate(timeout=120)[0]
        assert process.returncode == 0, output
        assert ("the learner was restarted" in output) == (name == "killed")
        assert_clean(run_dir)
        models.append((run_dir / "model/model.safetensors").read_bytes())
    assert models[0] == models[1]


@pytest.mark.slow
@pytest.mark.usefixtures("own_warm_process")
def test_supervised_training_whose_rank_is_killed_has_the_weights_of_an_undisturbed_run(tmp_path: Path) -> None:
    models = []
    for name in ("killed", "undisturbed"):
        run_dir = tmp_path / name
        changes = ["data.size=64", "data.holdout=8", "warmup.max_steps=60", "warmup.check_every=10", "pipeline.steps=0",
                   "warmup.stop_at=", "learner.ranks=2", "checkpoint.every_steps=7", "engine.process=false",
                   f"run_dir={run_dir}"]  # fmt: skip
        words = [word for change in changes for word in ("--set", change)]
        process = start_command(
            [sys.executable, "-m", "millstream.cli.main", "train", str(ROOT / "recipes/demo.toml"), *words]
        )
        log = run_dir / "events.jsonl"
        until(lambda: log.exists() and b'"step":20' in log.read_bytes(), process)
        if name == "killed":
            os.kill(workers(process.pid)[1], signal.SIGKILL)
        output = process.communicate(timeout=120)[0]
        assert process.returncode == 0, output
        restarts = [event for event in read_events(log) if isinstance(event, LearnerRestarted)]
        assert [event.to_version >= 20 for event in restarts] == [True] * (name == "killed")
        models.append((run_dir / "model/model.safetensors").read_bytes())
    assert models[0] == models[1]
