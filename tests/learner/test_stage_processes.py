"""Scorers and critics in worker processes: the numbers and the state of the local ones, bit for bit, also when one is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from millstream.clock import RealClock
from millstream.errors import ClusterError, LearnerError, LearnerGone, WeightsError
from millstream.events import LearnerRestarted
from millstream.events.sinks import MemorySink
from millstream.learner import CriticConfig, remote_scorer
from millstream.learner.critic import TorchCritic
from millstream.learner.messages import BeginBatch, LoadWeights, TakeTally
from millstream.learner.remote_scorer import (
    MAX_RESTARTS,
    PublishSetup,
    RemoteCritic,
    RemoteScorer,
    ScorerProcesses,
    publish_setup,
)
from millstream.learner.scorer import TorchScorer
from millstream.learner.state import read_state
from millstream.model.adapters import trained_weights
from millstream.model.load import model_weights
from millstream.pipeline.state import LearnerAndCritic
from millstream.retry import BackOff
from millstream.rpc.process import Kind, LocalLauncher, WorkerProcess
from millstream.run.checkpoint import CheckpointConfig, Sealed
from millstream.run.replay import ReplayedCritic
from millstream.sim.learner import SimSnapshot
from millstream.testing.learner import make_rows
from millstream.types import Floats
from millstream.weights.transfer.fetcher import WeightsFetcher
from millstream.weights.transfer.publisher import WeightsPublisher
from millstream.weights.transfer.remote_weights import RemoteWeights
from support.checkpoints import checkpoints_in, standing
from support.processes import is_alive
from support.stage_models import adapted, learn, returning
from support.tiny import VOCABULARY, make

TEMPERATURE = 0.7
CRITIC = CriticConfig(learning_rate=1e-2, warmup_steps=2)
T = TypeVar("T")


class CountingLauncher(LocalLauncher):
    """Counts the processes that it starts, and gives each to a callback."""

    def __init__(self, on_launch: Callable[[int, WorkerProcess], None] = lambda number, worker: None) -> None:
        super().__init__(is_warm=True)
        self.num_launched, self._on_launch = 0, on_launch

    def launch(self, kind: Kind, target: str, *, name: str, descriptors: Sequence[int] = ()) -> WorkerProcess:
        assert kind == "stage"
        worker = super().launch(kind, target, name=name, descriptors=descriptors)
        self.num_launched += 1
        self._on_launch(self.num_launched, worker)
        return worker


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[WeightsPublisher]:
    outbox = WeightsPublisher(tmp_path / "staged", node="", ways=["shared"])
    yield outbox
    outbox.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_scorer, "BACK_OFF", BackOff(first_s=0.01))


def publish(model: PreTrainedModel, folder: Path, critic: CriticConfig | None = None) -> PublishSetup:
    return lambda: publish_setup(
        lambda: model,
        lambda: WeightsPublisher(folder / "weights", node="", ways=["shared"]),
        device="cpu",
        temperature=TEMPERATURE,
        critic=critic,
        num_steps=6,
    )


def same(found: Sequence[Floats], expected: Sequence[Floats]) -> bool:
    return all(np.array_equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


async def closing(one: RemoteScorer | RemoteCritic, work: Awaitable[T]) -> T:
    """And nothing of it is left."""
    try:
        return await work
    finally:
        pids = one.pids
        await one.close()
        assert not any(map(is_alive, pids))


def staged(outbox: WeightsPublisher, model: PreTrainedModel) -> RemoteWeights:
    return RemoteWeights(outbox.put(1, trained_weights(model).items()), WeightsFetcher(""))


# ---- scorers -----------------------------------------------------------------------------------------------------------


def test_a_scorer_in_a_process_gives_the_numbers_of_a_local_one_bit_for_bit_and_follows_new_weights(
    tmp_path: Path, outbox: WeightsPublisher
) -> None:
    rows, first, second = make_rows(VOCABULARY), make("gemma2"), make("gemma2", seed=1)
    remote = RemoteScorer(publish(first, tmp_path), LocalLauncher(is_warm=True))
    local = TorchScorer(make("gemma2"), temperature=TEMPERATURE)

    async def program() -> None:
        assert same(await remote.score(rows), await local.score(rows))
        assert not (tmp_path / "weights").exists(), "what it began with is let go"
        assert same(await remote.score(rows[3:4]), [np.zeros(len(rows[3].tokens), np.float32)]), "nothing is trained"
        assert await remote.score([]) == []
        weights = staged(outbox, second)
        await remote.load(weights)
        assert not weights.is_fetched, "they do not pass through here"
        await local.load(model_weights(second))
        expected = await local.score(rows)
        assert same(await remote.score(rows), expected)
        several = await asyncio.gather(*(remote.score([row]) for row in rows))
        assert all(np.allclose(mine, theirs, atol=1e-4) for (mine,), theirs in zip(several, expected, strict=True)), (
            "calls may come at any time"
        )

    asyncio.run(closing(remote, program()))


def test_a_scorer_in_a_process_has_the_dtype_and_the_adapters_of_its_model(tmp_path: Path) -> None:
    rows = make_rows(VOCABULARY)
    remote = RemoteScorer(publish(adapted(), tmp_path), LocalLauncher(is_warm=True))
    local = TorchScorer(adapted(), temperature=TEMPERATURE)

    async def program() -> None:
        assert same(await remote.score(rows), await local.score(rows))

    asyncio.run(closing(remote, program()))


def test_a_scorer_of_this_process_releases_the_weights_of_another_once_it_has_read_them(
    tmp_path: Path, outbox: WeightsPublisher
) -> None:
    """Those that a learner's process has on a GPU have two places, and the next version needs one of them."""
    rows, followed = make_rows(VOCABULARY), make("qwen3", seed=1)
    scorer, weights = TorchScorer(make("qwen3"), temperature=TEMPERATURE), staged(outbox, followed)

    async def program() -> None:
        await scorer.load(weights)
        assert not weights.is_fetched
        assert same(await scorer.score(rows), await TorchScorer(followed, temperature=TEMPERATURE).score(rows))

    asyncio.run(program())


def test_a_scorer_that_is_killed_while_it_scores_answers_all_the_same_under_the_weights_that_it_followed(
    tmp_path: Path, outbox: WeightsPublisher, quick: None
) -> None:
    launcher, rows, followed = CountingLauncher(), make_rows(VOCABULARY), make("qwen3", seed=1)
    remote = RemoteScorer(publish(make("qwen3"), tmp_path), launcher, name="proximal")

    async def program() -> None:
        await remote.load(staged(outbox, followed))
        (pid,) = remote.pids
        os.kill(pid, signal.SIGSTOP)  # it has been asked, and has not answered
        scoring = asyncio.create_task(remote.score(rows))
        await asyncio.sleep(0.3)
        assert not scoring.done()
        os.kill(pid, signal.SIGKILL)
        assert same(await scoring, await TorchScorer(followed, temperature=TEMPERATURE).score(rows))
        assert remote.pids != [pid] and not is_alive(pid)

    asyncio.run(closing(remote, program()))
    assert launcher.num_launched == 2


def test_a_scorer_that_dies_before_it_is_ready_is_started_again(tmp_path: Path, quick: None) -> None:
    launcher = CountingLauncher(lambda number, worker: worker.kill() if number <= 2 else None)
    remote, model = RemoteScorer(publish(make("qwen3"), tmp_path), launcher), make("qwen3")

    async def program() -> None:
        await remote.ready()
        rows = make_rows(VOCABULARY)
        assert same(await remote.score(rows), await TorchScorer(model, temperature=TEMPERATURE).score(rows))

    asyncio.run(closing(remote, program()))
    assert launcher.num_launched == 3


def test_a_scorer_that_dies_again_and_again_is_an_error_that_says_how_often(tmp_path: Path, quick: None) -> None:
    launcher = CountingLauncher(lambda number, worker: worker.kill())
    remote = RemoteScorer(publish(make("qwen3"), tmp_path), launcher)

    async def program() -> None:
        with pytest.raises(LearnerError, match=r"the reference was started again 5 times in a row.*exit code -9"):
            await remote.score(make_rows(VOCABULARY))

    asyncio.run(closing(remote, program()))
    assert launcher.num_launched == MAX_RESTARTS + 1


def test_a_scorer_that_is_closed_while_it_is_started_again_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_scorer, "BACK_OFF", BackOff(first_s=60.0))
    died = threading.Event()
    workers: list[WorkerProcess] = []

    def die(number: int, worker: WorkerProcess) -> None:
        workers.append(worker)
        worker.kill()
        died.set()

    remote = RemoteScorer(publish(make("qwen3"), tmp_path), CountingLauncher(die))

    async def program() -> None:
        scoring = asyncio.create_task(remote.score(make_rows(VOCABULARY)))
        await asyncio.to_thread(died.wait)
        await asyncio.sleep(0.5)  # it waits, to be started again
        await remote.close()
        with pytest.raises(LearnerError, match="the reference is closed"):
            await scoring

    asyncio.run(asyncio.wait_for(program(), 30))
    assert not any(is_alive(worker.pid) for worker in workers)


def test_what_a_stage_refuses_is_not_asked_again(tmp_path: Path, outbox: WeightsPublisher) -> None:
    launcher = CountingLauncher()
    remote = RemoteScorer(publish(make("qwen3"), tmp_path), launcher)

    async def program() -> None:
        with pytest.raises(WeightsError, match="was given a dict, expected RemoteWeights: publish the weights first"):
            await remote.load(dict(model_weights(make("qwen3"))))
        for _ in range(2):
            with pytest.raises(LearnerError, match=r"the reference broke: .*size") as found:
                await remote.load(
                    RemoteWeights(outbox.put(1, [("lm_head.weight", torch.ones(3, 3))]), WeightsFetcher(""))
                )
            assert not isinstance(found.value, LearnerGone)

    asyncio.run(closing(remote, program()))
    assert launcher.num_launched == 1


def test_a_stage_that_finds_no_place_says_why(tmp_path: Path, quick: None) -> None:
    class NoRoom(LocalLauncher):
        def launch(self, kind: Kind, target: str, *, name: str, descriptors: Sequence[int] = ()) -> WorkerProcess:
            raise ClusterError(f"waited 300 s for {name}")

    remote = RemoteScorer(publish(make("qwen3"), tmp_path), NoRoom())

    async def program() -> None:
        with pytest.raises(LearnerError, match="gone again: the reference broke: waited 300 s for reference"):
            await remote.ready()

    asyncio.run(closing(remote, program()))


# ---- the critic --------------------------------------------------------------------------------------------------------


def equal(found: Sequence[object], expected: Sequence[object]) -> bool:
    return all(
        np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs
        for mine, theirs in zip(found, expected, strict=True)
    )


def test_a_critic_in_a_process_has_the_numbers_and_the_state_of_a_local_one_and_each_goes_on_from_the_other(
    tmp_path: Path,
) -> None:
    remote = RemoteCritic(publish(make("qwen3"), tmp_path, CRITIC), LocalLauncher(is_warm=True))
    local = TorchCritic(make("qwen3"), CRITIC, num_steps=6)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for folder in (theirs, ours):
        folder.mkdir()

    async def program() -> None:
        assert equal(await learn(remote, range(3)), await learn(local, range(3)))
        assert await remote.step() == await local.step() == {}, "without rows nothing changes"
        snapshots = await remote.snapshot(), await local.snapshot()
        rest = await learn(local, range(3, 5))
        assert equal(await learn(remote, range(3, 5)), rest)
        for snapshot, folder in zip(snapshots, (theirs, ours), strict=True):  # as it was when it was taken
            await asyncio.to_thread(snapshot.write, folder)
        await asyncio.to_thread(remote.restore, ours)
        assert equal(await learn(remote, range(3, 5)), rest)
        local.restore(theirs)
        assert equal(await learn(local, range(3, 5)), rest)

    asyncio.run(closing(remote, program()))
    one, other = read_state(theirs), read_state(ours)
    assert one.keys() == other.keys()
    assert all(torch.equal(one["masters"][name], other["masters"][name]) for name in one["masters"])


def test_a_disk_that_refuses_a_critics_snapshot_leaves_it_as_it_was_and_one_that_is_killed_is_gone(
    tmp_path: Path,
) -> None:
    remote = RemoteCritic(publish(make("qwen3"), tmp_path, CRITIC), LocalLauncher(is_warm=True))

    async def program() -> None:
        snapshot = await remote.snapshot()
        with pytest.raises(OSError, match="has no folder /proc/nowhere: the run folder must be"):
            await asyncio.to_thread(snapshot.write, Path("/proc/nowhere"))
        assert await learn(remote, range(1))
        snapshot = await remote.snapshot()
        os.kill(remote.pids[0], signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(LearnerGone, match="the critic broke: its process ended with exit code -9"):
                await remote.step()
        with pytest.raises(LearnerGone):
            snapshot.write(tmp_path)

    asyncio.run(closing(remote, program()))


def test_a_message_for_another_kind_of_worker_is_refused_by_name(tmp_path: Path, outbox: WeightsPublisher) -> None:
    cases: list[tuple[CriticConfig | None, Any, str]] = [
        (None, TakeTally(), "TakeTally is not a message for a scorer"),
        (CRITIC, LoadWeights(outbox.put(1, [("w", torch.ones(1))])), "LoadWeights is not a message for a critic"),
        (CRITIC, BeginBatch(), "Invalid value 'BeginBatch'"),
    ]
    launcher = LocalLauncher(is_warm=True)
    processes = [ScorerProcesses(publish(make("qwen3"), tmp_path, critic), launcher, "stage") for critic, _, _ in cases]
    for process, (_, message, expected) in zip(processes, cases, strict=True):
        with pytest.raises(LearnerError, match=expected):
            process.call(message)
        process.close()


async def with_a_death(critic: ReplayedCritic, work: Awaitable[T]) -> T:
    """It stands still, so that the call is sure to be at work when it is killed."""
    assert isinstance(critic.inner, RemoteCritic)
    (pid,) = critic.inner.pids
    os.kill(pid, signal.SIGSTOP)
    doing = asyncio.ensure_future(work)
    await asyncio.sleep(0.1)
    assert not doing.done()
    os.kill(pid, signal.SIGKILL)
    return await doing


def test_a_critic_whose_process_is_killed_in_any_call_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Before the first checkpoint and after it. Most of the time is that of interpreters that import torch."""
    sink, local = MemorySink(), TorchCritic(make("qwen3"), CRITIC, num_steps=6)
    checkpoints = checkpoints_in(tmp_path, sink, CheckpointConfig())
    start = publish(make("qwen3"), tmp_path, CRITIC)
    critic = ReplayedCritic(
        lambda: RemoteCritic(start, LocalLauncher(is_warm=True)), checkpoints, clock=RealClock(), sink=sink
    )
    rows = returning(make_rows(VOCABULARY, seed=1))

    async def program() -> None:
        await critic.ready()
        expected = await learn(local, range(1))
        assert equal(await learn(critic, range(1)), expected)
        expected_here = [await local.score(rows), await local.accumulate(rows), await local.step()]
        found = [await with_a_death(critic, critic.score(rows)), await critic.accumulate(rows)]
        found.append(await with_a_death(critic, critic.step()))
        assert equal([*found[0], found[2]], [*expected_here[0], expected_here[2]])
        snapshot = LearnerAndCritic(SimSnapshot(0), await critic.snapshot())
        await checkpoints.keep(standing(2), 0, snapshot, 0.0)
        assert (await checkpoints.newest_sealed() or Sealed(0, tmp_path)).version == 2
        assert equal(await learn(critic, range(2, 3)), await learn(local, range(2, 3)))
        await local.accumulate(rows)
        scores, _ = await asyncio.gather(with_a_death(critic, critic.score(rows)), critic.accumulate(rows))
        assert equal(scores, await local.score(rows)), "both were asked, and each once"
        assert await critic.step() == await local.step()

    async def closed() -> None:
        try:
            await program()
        finally:
            await checkpoints.close()
            await critic.close()

    asyncio.run(closed())
    restarts = sink.of(LearnerRestarted)
    assert [(one.who, one.from_version, one.to_version) for one in restarts] == [
        ("the critic", 0, 1),
        ("the critic", 0, 1),
        ("the critic", 2, 3),
    ]
    assert [one.num_rows for one in restarts] == [9, 18, 9]
