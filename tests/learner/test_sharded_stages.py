"""Scorers and critics of several ranks: the numbers and the training of one, whatever is sharded; a death heals; no process is
left. Over gloo, on CPUs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from millstream import resume, train
from millstream.clock import RealClock
from millstream.errors import LearnerError, LearnerGone
from millstream.events import LearnerRestarted, WorkerStarted
from millstream.events.sinks import MemorySink, read_events
from millstream.learner import CriticConfig, remote_scorer
from millstream.learner.check import check_shards
from millstream.learner.critic import TorchCritic
from millstream.learner.packing import num_computed
from millstream.learner.remote_scorer import (
    PublishSetup,
    RemoteCritic,
    RemoteScorer,
    ScorerProcesses,
    SharedSetup,
    publish_setup,
)
from millstream.learner.scorer import TorchScorer
from millstream.learner.state import read_state
from millstream.model.adapters import trained_weights
from millstream.model.load import load_model, model_weights
from millstream.retry import BackOff
from millstream.rpc.process import LocalLauncher
from millstream.run.checkpoint import CheckpointConfig
from millstream.run.replay import ReplayedCritic
from millstream.testing.learner import make_rows
from millstream.types import Floats
from millstream.weights.transfer.publisher import WeightsPublisher
from support.checkpoints import checkpoints_in
from support.processes import is_alive
from support.runs import assert_clean, step_rows
from support.stage_models import adapted, learn, returning
from support.stage_runs import config
from support.tiny import VOCABULARY, make

TEMPERATURE = 0.7
CRITIC = CriticConfig(learning_rate=1e-2, warmup_steps=2)
PASS = 40  # tokens: several passes, of which some ranks have none
STEPS = 6
T = TypeVar("T")


def publish(model: Callable[[], PreTrainedModel], folder: Path, ranks: int, critic: bool = False) -> PublishSetup:
    return SharedSetup(
        lambda: publish_setup(
            model,
            lambda: WeightsPublisher(folder / "weights", node="", ways=["shared"]),
            device="cpu",
            ranks=ranks,
            are_files_seen=True,
            temperature=TEMPERATURE,
            critic=CRITIC if critic else None,
            num_steps=STEPS,
        )
    )


def scorer(model: Callable[[], PreTrainedModel], folder: Path, *, ranks: int = 2, replicas: int = 1) -> RemoteScorer:
    return RemoteScorer(
        publish(model, folder, ranks),
        LocalLauncher(is_warm=True),
        replicas=replicas,
        pass_tokens=PASS,
        open_outbox=lambda: WeightsPublisher(folder / "outbox", node="", ways=["shared"]),
    )


def critic(folder: Path, ranks: int, model: Callable[[], PreTrainedModel] = lambda: make("qwen3")) -> RemoteCritic:
    return RemoteCritic(publish(model, folder, ranks, True), LocalLauncher(is_warm=True), pass_tokens=PASS)


def within(one: RemoteScorer | RemoteCritic | ReplayedCritic, work: Awaitable[T]) -> T:
    async def program() -> T:
        try:
            return await work
        finally:
            pids = (one.inner if isinstance(one, ReplayedCritic) else one).pids  # type: ignore[attr-defined]
            await one.close()
            assert pids and not any(map(is_alive, pids))

    return asyncio.run(program())


def assert_close(found: Sequence[object], expected: Sequence[object], *, within: float = 1e-4) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        if isinstance(mine, np.ndarray):
            assert np.allclose(mine, theirs, atol=within)  # type: ignore[arg-type]
        else:
            assert mine == pytest.approx(theirs, rel=1e-3, abs=within)


def scores_here(model: PreTrainedModel) -> list[Floats]:
    return asyncio.run(TorchScorer(model, temperature=TEMPERATURE).score(make_rows(VOCABULARY)))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_scorer, "BACK_OFF", BackOff(first_s=0.01))


def test_two_replicas_of_two_ranks_score_as_one_process_does_and_follow_its_weights(tmp_path: Path) -> None:
    """The model is read from the files that it was loaded from: nothing of it is published."""
    make("qwen3").save_pretrained(tmp_path / "base")
    remote, other = scorer(lambda: load_model(tmp_path / "base"), tmp_path, replicas=2), make("qwen3", seed=1)
    rows = make_rows(VOCABULARY)

    async def program() -> None:
        first = await remote.score(rows)
        assert len(remote.pids) == 4
        assert_close(first, scores_before)
        assert all(map(np.array_equal, await remote.score(rows), first)), "the same call has the same bits"
        assert await remote.score([]) == []
        await remote.load(dict(model_weights(other)))
        assert_close(await remote.score(rows), scores_after)
        assert_close(await remote.score(rows[:1]), scores_after[:1])

    scores_before, scores_after = scores_here(make("qwen3")), scores_here(make("qwen3", seed=1))
    within(remote, program())


def test_a_sharded_scorer_has_the_dtype_and_the_adapters_of_its_model_and_heals_when_a_rank_is_killed(
    tmp_path: Path, quick: None
) -> None:
    rows, remote = make_rows(VOCABULARY), scorer(adapted, tmp_path)
    followed = adapted()
    adapters = dict(trained_weights(followed))
    with torch.no_grad():
        for weight in adapters.values():
            weight.mul_(2)
    expected, then = scores_here(adapted()), scores_here(followed)

    async def program() -> None:
        assert_close(await remote.score(rows), expected, within=0.05)  # in 16 bits, in other passes
        await remote.load(adapters)
        before = await remote.score(rows)
        assert_close(before, then, within=0.05)
        first, second = remote.pids
        os.kill(first, signal.SIGSTOP)  # it has been asked, and has not answered
        scoring = asyncio.create_task(remote.score(rows))
        await asyncio.sleep(0.3)
        os.kill(second, signal.SIGKILL)
        assert all(map(np.array_equal, await scoring, before))
        assert len(remote.pids) == 2 and not {first, second} & set(remote.pids)
        assert not is_alive(first) and not is_alive(second)

    within(remote, program())


def test_when_a_replica_dies_only_its_own_processes_are_started_again(tmp_path: Path, quick: None) -> None:
    rows, remote = make_rows(VOCABULARY), scorer(lambda: make("qwen3"), tmp_path, ranks=1, replicas=2)

    async def program() -> None:
        before = await remote.score(rows)
        first, second = remote.pids
        os.kill(first, signal.SIGKILL)
        assert all(map(np.array_equal, await remote.score(rows), before))
        assert remote.pids[0] != first and remote.pids[1] == second

    within(remote, program())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[object], Path]]:
    """What a critic on a thread does, and its state halfway."""
    folder = tmp_path_factory.mktemp("one")
    one = TorchCritic(make("qwen3"), CRITIC, num_steps=STEPS)

    async def program() -> list[object]:
        found = await learn(one, range(2))
        (await one.snapshot()).write(folder)
        found += await learn(one, range(2, 4))
        await one.close()
        return found

    yield asyncio.run(program()), folder


def test_a_critic_of_two_ranks_trains_as_one_and_its_checkpoint_restores_into_another_number(
    trained: tuple[list[object], Path], tmp_path: Path
) -> None:
    expected, theirs = trained
    rest = expected[len(expected) // 2 :]
    two, ours = critic(tmp_path, 2), tmp_path / "ours"
    ours.mkdir()

    async def train() -> None:
        assert_close(await learn(two, range(2)), expected[: len(expected) // 2])
        assert await two.step() == {}, "without rows nothing changes"
        snapshot = await two.snapshot()
        assert_close(await learn(two, range(2, 4)), rest)
        await asyncio.to_thread(snapshot.write, ours)  # as it was when it was taken
        await asyncio.to_thread(two.restore, theirs)
        assert_close(await learn(two, range(2, 4)), rest)

    within(two, train())
    whole, own = read_state(theirs), read_state(ours)
    assert whole["masters"].keys() == own["masters"].keys()
    assert all(torch.allclose(value, own["masters"][name], atol=1e-3) for name, value in whole["masters"].items())

    local = TorchCritic(make("qwen3"), CRITIC, num_steps=STEPS)
    local.restore(ours)
    assert_close(asyncio.run(learn(local, range(2, 4))), rest)
    three = critic(tmp_path, 3)

    async def go_on() -> None:
        await three.ready()
        await asyncio.to_thread(three.restore, ours)
        assert_close(await learn(three, range(2, 4)), rest)

    within(three, go_on())


def test_a_critic_with_adapters_in_16_bits_is_sharded_with_its_head_in_32(tmp_path: Path) -> None:
    two, local = critic(tmp_path, 2, adapted), TorchCritic(adapted(), CRITIC, num_steps=STEPS)

    async def program() -> None:
        found, expected = await learn(two, range(2)), await learn(local, range(2))
        assert_close(found, expected, within=0.05)

    within(two, program())


def test_a_critic_whose_rank_is_killed_trains_as_if_nothing_had_happened(tmp_path: Path) -> None:
    sink = MemorySink()
    checkpoints = checkpoints_in(tmp_path, sink, CheckpointConfig())
    one = ReplayedCritic(lambda: critic(tmp_path, 2), checkpoints, clock=RealClock(), sink=sink)
    rows = returning(make_rows(VOCABULARY, seed=1))

    async def program() -> None:
        await one.ready()
        found = await learn(one, range(1))
        await one.accumulate(rows)
        assert isinstance(one.inner, RemoteCritic)
        os.kill(one.inner.pids[1], signal.SIGKILL)
        found += [await one.step(), *await one.score(rows)]
        assert_close(found, expected)
        await checkpoints.close()

    async def here() -> list[object]:
        local = TorchCritic(make("qwen3"), CRITIC, num_steps=STEPS)
        found = await learn(local, range(1))
        await local.accumulate(rows)
        return [*found, await local.step(), *await local.score(rows)]

    expected = asyncio.run(here())
    within(one, program())
    (restarted,) = sink.of(LearnerRestarted)
    assert restarted.who == "the critic" and "rank 1 of 2" in restarted.why


def test_the_share_of_a_replica_of_one_rank_is_computed_in_passes_of_the_tokens_that_the_config_allows() -> None:
    rows = make_rows(VOCABULARY, seed=1)
    most = max(row.num_tokens for row in rows)
    replica: Any = SimpleNamespace(group=SimpleNamespace(members=["reference 1"]), _pass_tokens=most)
    (passes,) = ScorerProcesses.deal(replica, rows)
    assert [row for some in passes for row in some] == rows and len(passes) > 1
    assert all(num_computed(some) <= most for some in passes)


ALL_THREE = [
    "algorithm.kl=loss", "algorithm.kl_coefficient=0.1", "algorithm.advantage=gae", "algorithm.loss=decoupled_ppo",
    "learner.mini_batches=2", "critic.learning_rate=3e-3", "proximal.micro_batch_tokens=4096",
    "pipeline.steps=3", "pipeline.groups_per_step=4", "pipeline.max_lag=0", "data.holdout=0", "seed=3",
]  # fmt: skip
SHARDED = ["reference.ranks=2", "proximal.ranks=2", "critic.ranks=2"]
TIMED = {"at", "rollouts_per_s", "tokens_per_s", "step_s", "waiting_s", "training_s", "sync_s", "other_s"}


def metrics(folder: Path, *changes: str) -> list[dict[str, float]]:
    folder.mkdir()
    (folder / "low.py").write_text(LOW)
    train(config(folder, *ALL_THREE, f"reward=[{{function='{folder / 'low.py'}:low'}}]", *changes))
    assert_clean(folder / "run")
    return [{name: row[name] for name in row if name not in TIMED} for row in step_rows(folder / "run")]


LOW = """
def low(task, completion):
    return sum(digit in "0123" for digit in completion) / 4  # something to learn from in every step
"""


def test_a_run_with_sharded_scorers_and_critic_has_the_metrics_of_one_without_ray_or_processes(tmp_path: Path) -> None:
    """The learner is a thread of the driver, and trains the model in place: what scorers begin with is kept apart. They read
    the rows from the store, which this learner does not."""
    expected = metrics(tmp_path / "threads")
    found = metrics(tmp_path / "sharded", *SHARDED, "rollout.workers=1")
    assert [pytest.approx(step, rel=1e-3, abs=1e-5) for step in expected] == found
    assert found[-1]["reference_kl"] > 0 and found[-1]["critic_value"] > 0
    started = {
        event.worker for event in read_events(tmp_path / "sharded/run/events.jsonl") if isinstance(event, WorkerStarted)
    }
    assert started >= {f"{name} rank {rank}" for name in ("reference", "proximal", "critic") for rank in range(2)}


@pytest.mark.slow
def test_a_lockstep_run_with_sharded_scorers_repeats_bit_for_bit_and_continues_with_another_number_of_ranks(
    tmp_path: Path,
) -> None:
    more = [*SHARDED, "reference.replicas=2"]
    first = metrics(tmp_path / "first", *more)
    assert metrics(tmp_path / "second", *more) == first
    run = tmp_path / "first/run"
    changes = ["pipeline.steps=5", "reference.ranks=1", "reference.replicas=1", "proximal.replicas=2", "critic.ranks=1"]
    resume(run, changes=changes)
    assert_clean(run)
    expected = metrics(tmp_path / "whole", *more, "pipeline.steps=5")
    found = [{name: row[name] for name in row if name not in TIMED} for row in step_rows(run)]
    assert [pytest.approx(step, rel=1e-3, abs=1e-5) for step in expected] == found


def test_what_a_rank_refuses_names_it_and_is_no_death(tmp_path: Path) -> None:
    remote = scorer(lambda: make("qwen3"), tmp_path)

    async def program() -> None:
        with pytest.raises(
            LearnerError, match=r"the reference broke, rank \d of 2: .*size \(3, 3\), expected"
        ) as found:
            await remote.load({"model.embed_tokens.weight": torch.ones(3, 3)})
        assert not isinstance(found.value, LearnerGone)

    pids_checked = scorer_closed(remote, program())
    assert pids_checked


def scorer_closed(remote: RemoteScorer, work: Awaitable[None]) -> bool:
    async def program() -> None:
        try:
            await work
        finally:
            await remote.close()

    asyncio.run(program())
    assert remote.pids
    return not any(map(is_alive, remote.pids))


def test_a_model_that_cannot_be_sharded_is_refused_by_name() -> None:
    mixed = make("qwen3")
    mixed.lm_head.to(torch.bfloat16)  # type: ignore[union-attr]
    with pytest.raises(LearnerError, match=r"\[critic\] has parameters of bfloat16, float32.*set critic.ranks = 1"):
        check_shards(mixed, "critic")
    scalar = make("qwen3")
    scalar.register_parameter("scale", torch.nn.Parameter(torch.tensor(1.0)))
    with pytest.raises(LearnerError, match=r"scale of the model of \[reference\] is a single number"):
        check_shards(scalar, "reference")
