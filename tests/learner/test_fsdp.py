"""A learner over several ranks: the weights of one, whatever is sharded; a rank that fails is named; no process is left.

Processes take seconds to begin, so two ranks and four are started once each, and most tests look at what they did."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from safetensors.torch import load_file
from torch._C._distributed_c10d import TCPStore
from transformers import PreTrainedModel

from millstream import RunConfig
from millstream.algo import AlgorithmConfig
from millstream.algo.recipe import Recipe
from millstream.config import load
from millstream.env.rewards import prepare_rewards
from millstream.errors import LearnerError, LearnerGone
from millstream.events import Resumed, Span
from millstream.events.rollouts.reader import RolloutDump
from millstream.events.sinks import read_events
from millstream.learner import Learner, LearnerConfig, RunLearner
from millstream.learner.fsdp import FsdpLearner, PublishingRanks
from millstream.learner.messages import ObjectiveSource, RankPlace, TakeSnapshot, WriteSnapshot, pack_rows, unpack_rows
from millstream.learner.packing import deal
from millstream.learner.scorer import TorchScorer
from millstream.learner.share import own_device
from millstream.learner.torch import TorchLearner
from millstream.model.adapters import add_adapters
from millstream.model.load import load_model, load_weights, model_weights
from millstream.model.lora import LoraConfig
from millstream.rpc.forkserver import SOCKET_VARIABLE
from millstream.rpc.process import LocalLauncher
from millstream.run import build
from millstream.testing.learner import LearnerSuite
from millstream.types import Metrics, Sampling, TrainRow, Weights
from millstream.weights.transfer import Delivery, WeightsRef
from millstream.weights.transfer.publisher import open_publisher
from support.commands import Command
from support.processes import children, is_alive
from support.rank_cases import ADAPTERS, CASES, SETS, STEPS, WRITTEN_AFTER, Case, batch, mini_batches, row, train
from support.runs import assert_clean, command, resume, steps_of, until
from support.tiny import VOCABULARY, make

DEMO = Path(__file__).parents[2] / "recipes/demo.toml"
CASE = CASES[0]
REST = range(WRITTEN_AFTER, STEPS)


class Trained(NamedTuple):
    masters: dict[str, torch.Tensor]
    metrics: list[Metrics]
    halfway: Path
    """What it wrote after half of the steps."""


def one_learner(case: Case) -> TorchLearner:
    objective = case.recipe().objective()
    return TorchLearner(case.new_model(), case.learner, objective, temperature=case.temperature, num_steps=STEPS)


def several(case: Case, ranks: int, *changes: str) -> FsdpLearner:
    """Chosen as a run chooses it."""
    learner = build.build_learner(
        load(DEMO, RunConfig, [f"rollout.temperature={case.temperature}", *changes]),
        case.new_model(),
        None,
        learner=structs.replace(case.learner, ranks=ranks),
        recipe=case.recipe(),
        num_steps=STEPS,
    )
    assert isinstance(learner, FsdpLearner)
    return learner


def masters_of(learner: TorchLearner) -> dict[str, torch.Tensor]:
    return {name: master.clone() for name, master in learner.optimizer.state()["masters"].items()}


async def train_halves(learner: Any, folder: Path) -> list[Metrics]:
    """The snapshot is taken halfway and written at the end: later steps do not change it."""
    metrics = await train(learner, CASE, range(WRITTEN_AFTER))
    snapshot = await learner.snapshot()
    metrics += await train(learner, CASE, REST)
    snapshot.write(folder)
    return metrics


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    learner, folder = one_learner(CASE), tmp_path_factory.mktemp("one")
    metrics = asyncio.run(train_halves(learner, folder))
    return Trained(masters_of(learner), metrics, folder)


@pytest.fixture(scope="module")
def two_learner() -> Iterator[FsdpLearner]:
    learner = several(CASE, 2)
    yield learner
    asyncio.run(learner.close())


@pytest.fixture(scope="module")
def two(two_learner: FsdpLearner, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("two")
    metrics = asyncio.run(train_halves(two_learner, folder))
    return Trained(dict(asyncio.run(two_learner.weights())), metrics, folder)


def run_ranks(num_ranks: int, folder: Path, cases: str) -> None:
    store = TCPStore("127.0.0.1", 0, num_ranks + 1, is_master=True, wait_for_workers=False)
    program = [sys.executable, str(Path(__file__).parents[1] / "support/rank_cases.py")]
    ranks = [
        Command([*program, str(rank), str(num_ranks), str(store.port), str(folder), cases], 1, 2)
        for rank in range(num_ranks)
    ]
    try:
        assert [rank.wait(280) for rank in ranks] == [0] * num_ranks
    finally:
        for rank in ranks:
            rank.kill()


@pytest.fixture(scope="module")
def four(one: Trained, two: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four ranks made of every case, and of what one and two wrote halfway."""
    folder = tmp_path_factory.mktemp("four")
    (folder / "before").mkdir()
    (folder / "before" / "one").symlink_to(one.halfway)
    (folder / "before" / "two").symlink_to(two.halfway)
    run_ranks(4, folder, "few")
    return folder


def assert_same(case: Case, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Measured by how far the steps moved each weight: a difference in the steps is not hidden by what they began with."""
    start = {name: value.detach().float() for name, value in case.new_model().named_parameters()}
    start_of = {name: start[name] for name in expected}
    moved = torch.cat([(expected[name] - value).flatten() for name, value in start_of.items()])
    differs = torch.cat([(found[name] - expected[name]).flatten() for name in start_of])
    assert moved.norm() > 0.1 and found.keys() == expected.keys()
    assert float(differs.norm() / moved.norm()) < case.tolerance


def assert_alike(found: list[Metrics], expected: list[Metrics], *, within: float = 1e-4) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=within, abs=1e-5)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["whole", "adapters"])
def test_one_rank_in_a_process_gives_the_bits_of_one_on_a_thread_and_only_what_it_trains(
    lora: LoraConfig | None,
) -> None:
    def new_model() -> PreTrainedModel:
        model = CASE.new_model()
        if lora is not None:
            add_adapters(model, lora, seed=1)
        return model

    def made(is_process: bool) -> RunLearner:
        config = load(DEMO, RunConfig, [f"engine.process={is_process}".lower()])
        own = structs.replace(CASE.learner, lora=lora)
        return build.build_learner(config, new_model(), None, learner=own, recipe=CASE.recipe(), num_steps=STEPS)

    async def trained(is_process: bool) -> tuple[RunLearner, list[Metrics], Weights]:
        learner = made(is_process)
        await learner.ready()
        try:
            return learner, await train(learner, CASE, range(2)), await learner.weights()
        finally:
            await learner.close()

    (thread, expected, weights), (process, metrics, found) = (asyncio.run(trained(one)) for one in (False, True))
    assert isinstance(thread, TorchLearner) and isinstance(process, FsdpLearner)
    assert metrics == expected and found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_two_ranks_train_adapters_as_one_does_and_nothing_else_and_save_the_merged_model(tmp_path: Path) -> None:
    """The base is read from the files that the model was loaded from, and the adapters are sent."""
    base = tmp_path / "base"
    make(ADAPTERS.model).save_pretrained(base)

    def new_model() -> PreTrainedModel:
        model = load_model(base)
        add_adapters(model, ADAPTERS.learner.lora or LoraConfig(), seed=1)
        return model

    def made(ranks: int) -> RunLearner:
        config = load(DEMO, RunConfig, [f"engine.process={ranks > 1}".lower()])
        own = structs.replace(ADAPTERS.learner, ranks=ranks)
        return build.build_learner(config, new_model(), None, learner=own, recipe=ADAPTERS.recipe(), num_steps=STEPS)

    async def trained(ranks: int) -> tuple[list[Metrics], Weights]:
        learner = made(ranks)
        await learner.ready()
        try:
            found = await train(learner, ADAPTERS, range(3)), await learner.weights()
            learner.save(tmp_path / str(ranks))
            return found
        finally:
            await learner.close()

    (expected, one), (metrics, two) = (asyncio.run(trained(ranks)) for ranks in (1, 2))
    assert_alike(metrics, expected)
    assert_same(ADAPTERS, dict(two), dict(one))
    assert all(".lora_" in name for name in two)
    saved = [load_file(tmp_path / ranks / "model.safetensors") for ranks in "12"]
    assert all(torch.allclose(value, saved[1][name], atol=1e-4) for name, value in saved[0].items())


def test_ranks_of_a_cluster_read_their_slices_from_files_and_publish_what_they_trained(
    two: Trained, tmp_path: Path
) -> None:
    """Ranks as a cluster starts them, here on one machine. What was published at first is wrong: they must not read it."""
    make(CASE.model).save_pretrained(tmp_path / "base")

    async def trained() -> Weights:
        model, publishers = load_model(tmp_path / "base"), ExitStack()

        def publish(weights: Weights) -> WeightsRef:
            publisher = publishers.enter_context(closing(open_publisher(Delivery(ways=("shared",)))))
            return publisher.put(1, weights.items())

        publishing = PublishingRanks(
            launcher=LocalLauncher(is_warm=True),
            host="127.0.0.1",
            node="",
            first=publish({name: torch.zeros_like(value) for name, value in model_weights(model).items()}),
            publish=publish,
            delivery=Delivery(ways=("shared",)),
        )
        own = structs.replace(CASE.learner, ranks=2)
        source = ObjectiveSource(
            function="millstream.algo.recipe:from_json", arguments=msgspec.json.encode(CASE.recipe())
        )
        learner = FsdpLearner(model, own, source, temperature=CASE.temperature, num_steps=STEPS, publishing=publishing)
        try:
            await train(learner, CASE, range(STEPS))
            return {name: value.clone() for name, value in (await learner.weights()).items()}
        finally:
            await learner.close()
            publishers.close()

    found = asyncio.run(trained())
    assert all(torch.equal(found[name], two.masters[name]) for name in two.masters), "bit for bit"


def test_two_ranks_give_the_weights_and_the_metrics_of_one_after_ten_steps(one: Trained, two: Trained) -> None:
    assert_same(CASE, two.masters, one.masters)
    assert max(float((two.masters[name] - one.masters[name]).abs().max()) for name in one.masters) < 5e-5
    assert_alike(two.metrics, one.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_four_ranks_give_the_weights_and_the_metrics_of_one_after_ten_steps(case: Case, four: Path) -> None:
    learner, found = one_learner(case), torch.load(four / f"{case.name}.pt")
    metrics = asyncio.run(train(learner, case, range(STEPS)))
    assert_same(case, found["masters"], masters_of(learner))
    assert_alike(found["metrics"], metrics)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks, cases", [(2, "more"), (4, "more"), (2, "compiled")])
def test_every_option_gives_the_weights_of_one_on_any_number_of_ranks(
    num_ranks: int, cases: str, tmp_path: Path
) -> None:
    (tmp_path / "before").mkdir()
    run_ranks(num_ranks, tmp_path, cases)
    for case in SETS[cases]:
        learner, found = one_learner(case), torch.load(tmp_path / f"{case.name}.pt")
        metrics = asyncio.run(train(learner, case, range(STEPS)))
        assert_same(case, found["masters"], masters_of(learner))
        assert_alike(found["metrics"], metrics, within=0.05 if case.dtype == "bfloat16" else 1e-4)


def must_be_read_by_one(folder: Path, one: Trained) -> None:
    learner = one_learner(CASE)
    learner.restore(folder)
    assert_alike(asyncio.run(train(learner, CASE, REST)), one.metrics[WRITTEN_AFTER:])
    assert_same(CASE, masters_of(learner), one.masters)


def test_what_two_ranks_wrote_is_read_by_one(one: Trained, two: Trained) -> None:
    must_be_read_by_one(two.halfway, one)


@pytest.mark.slow
def test_what_four_ranks_wrote_is_read_by_one(one: Trained, four: Path) -> None:
    must_be_read_by_one(four / "shards", one)


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["one", "two"])
def test_what_one_or_two_ranks_wrote_is_read_by_four(writer: str, one: Trained, four: Path) -> None:
    found = torch.load(four / f"from {writer}.pt")
    assert_same(CASE, found["masters"], one.masters)
    assert_alike(found["metrics"], one.metrics[WRITTEN_AFTER:])


def test_two_ranks_go_on_from_what_one_wrote_and_from_what_they_wrote(
    one: Trained, two: Trained, two_learner: FsdpLearner
) -> None:
    two_learner.restore(two.halfway)
    asyncio.run(train(two_learner, CASE, REST))
    again = asyncio.run(two_learner.weights())
    assert all(torch.equal(again[name], two.masters[name]) for name in again), "bit for bit"
    two_learner.restore(one.halfway)
    assert_alike(asyncio.run(train(two_learner, CASE, REST)), one.metrics[WRITTEN_AFTER:])
    assert_same(CASE, dict(asyncio.run(two_learner.weights())), one.masters)


def test_weights_are_a_copy_in_the_order_and_the_dtype_of_one_and_the_saved_model_has_them(
    two: Trained, two_learner: FsdpLearner, tmp_path: Path
) -> None:
    before = asyncio.run(two_learner.weights())
    kept = {name: value.clone() for name, value in before.items()}
    asyncio.run(train(two_learner, CASE, range(1)))
    assert all(torch.equal(before[name], kept[name]) for name in kept)
    expected = asyncio.run(one_learner(CASE).weights())
    assert [(name, value.dtype) for name, value in before.items()] == [(n, v.dtype) for n, v in expected.items()]
    now = asyncio.run(two_learner.weights())
    two_learner.save(tmp_path / "model")
    saved = load_file(tmp_path / "model/model.safetensors")
    assert all(torch.equal(value, now[name]) for name, value in saved.items())


def test_log_probabilities_are_those_of_one_whatever_rank_has_the_row(two: Trained, two_learner: FsdpLearner) -> None:
    rows = [row for some in batch(0) for row in some]
    weights = asyncio.run(two_learner.weights())
    one = one_learner(CASE)
    load_weights(one.model, weights)
    assert_logprobs(asyncio.run(two_learner.logprobs(rows)), asyncio.run(one.logprobs(rows)))


def test_what_was_measured_before_a_restore_or_a_step_is_not_measured_again(
    one: Trained, two: Trained, two_learner: FsdpLearner
) -> None:
    """Without a backward pass after it, a rank would keep whole weights that are no longer those of its shards."""
    rows = batch(0)[0]

    async def program() -> None:
        await two_learner.logprobs(rows)
        two_learner.restore(one.halfway)
        alone = one_learner(CASE)
        alone.restore(one.halfway)
        assert_logprobs(await two_learner.logprobs(rows), await alone.logprobs(rows))
        for learner in (two_learner, alone):
            await learner.accumulate(rows)
            await learner.logprobs(rows)
            await learner.step()
        assert np.allclose(two_learner.log_ratios(), alone.log_ratios(), atol=1e-3)
        assert len(two_learner.rank_seconds()) == 2 and min(two_learner.rank_seconds()) > 0 and not alone.rank_seconds()
        assert_logprobs(await two_learner.logprobs(rows), await alone.logprobs(rows))

    asyncio.run(program())


def assert_logprobs(found: list[Any], expected: list[Any]) -> None:
    assert all(np.allclose(mine, theirs, atol=1e-4) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.slow
class TestTwoRanks(LearnerSuite):
    vocabulary = VOCABULARY

    def open(self, num_steps: int | None = None) -> Learner:
        config = LearnerConfig(learning_rate=1e-3, schedule="linear", ranks=2)
        recipe = Recipe(algorithm=AlgorithmConfig(), max_tokens=32)
        model = make("qwen3")
        return build.build_learner(
            load(DEMO, RunConfig), model, None, learner=config, recipe=recipe, num_steps=num_steps
        )


def test_rows_with_a_number_that_is_not_finite_are_left_out_by_name_on_whatever_rank_they_are(
    two: Trained, two_learner: FsdpLearner, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(1)
    rows = [row(rng, 9, f"row {number}") for number in range(4)]
    bad = [structs.replace(r, logprobs=np.full(9, np.nan, np.float32)) for r in rows]

    async def step(some: list[TrainRow]) -> Metrics:
        await two_learner.begin_batch()
        await two_learner.accumulate(some)
        return await two_learner.step()

    assert asyncio.run(step([])) == {}
    assert asyncio.run(step(bad)) == {"skipped_rows": 4.0}
    assert np.isnan(two_learner.log_ratios()).all()
    assert asyncio.run(step([*rows[:3], bad[3]]))["skipped_rows"] == 1.0
    counts = [np.count_nonzero(row.loss_mask) for row in rows]
    assert np.array_equal(np.isnan(two_learner.log_ratios()), np.repeat([False, False, False, True], counts))
    until_said(caplog, "row 3 is left out")


def until_said(caplog: pytest.LogCaptureFixture, what: str) -> None:
    limit = time.monotonic() + 10
    while what not in caplog.text and time.monotonic() < limit:
        time.sleep(0.01)
    assert what in caplog.text


def test_a_step_whose_gradient_is_not_finite_is_left_out_by_every_rank_and_said_once(
    two: Trained, two_learner: FsdpLearner, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(2)
    rows = [row(rng, 9, f"row {number}") for number in range(4)]
    rows[2] = structs.replace(rows[2], advantages=np.full(9, 3e38, np.float32), logprobs=np.full(9, -20, np.float32))

    async def program() -> None:
        before = await two_learner.weights()
        await two_learner.accumulate(rows)
        assert (await two_learner.step())["skipped_steps"] == 1
        after = await two_learner.weights()
        assert all(torch.equal(before[name], after[name]) for name in before)

    asyncio.run(program())
    until_said(caplog, "the loss of row 2 is not finite")
    assert caplog.text.count("is left out") == 1


def test_a_snapshot_that_cannot_be_written_costs_itself_alone(
    two: Trained, two_learner: FsdpLearner, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "nowhere"):
        snapshot = asyncio.run(two_learner.snapshot())
        with pytest.raises(OSError, match=f"has no folder {folder}: the run folder must be on a disk that"):
            snapshot.write(folder)
    assert not (tmp_path / "nowhere").exists(), "one that only its own rank sees would pass for a checkpoint"
    assert asyncio.run(train(two_learner, CASE, range(1)))


def test_every_rank_says_which_files_it_sees_where_it_has_written(
    two: Trained, two_learner: FsdpLearner, tmp_path: Path
) -> None:
    two_learner.ranks.call(TakeSnapshot(1000))
    for files in two_learner.ranks.call(WriteSnapshot(1000, str(tmp_path)), dict[str, int]):
        assert files == {path.name: path.stat().st_size for path in tmp_path.iterdir()}
        assert files.keys() >= {".metadata", "__0_0.distcp", "__1_0.distcp"}


def test_a_killed_rank_ends_the_learner_within_seconds_and_by_name(two: Trained, two_learner: FsdpLearner) -> None:
    pids = two_learner.ranks.pids
    os.kill(pids[1], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(LearnerGone, match="rank 1 of 2: its process ended with exit code -9"):
        asyncio.run(train(two_learner, CASE, range(100)))
    assert time.monotonic() - began < 10 and not any(map(is_alive, pids))
    with pytest.raises(LearnerGone, match="rank 1 of 2"):
        asyncio.run(two_learner.weights())


@pytest.mark.slow
def test_a_killed_run_of_two_ranks_leaves_no_process_and_goes_on_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)  # it has its own warm process, which must go, too
    run_dir = tmp_path / "run"
    words = command(run_dir, {"learner.ranks": 2, "pipeline.steps": 120})
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: any(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*")), process)
    (warm,) = children(process.pid)
    ranks = children(warm)
    started = [*ranks, warm]
    process.kill()
    process.wait()
    limit = time.monotonic() + 10
    while any(map(is_alive, started)) and time.monotonic() < limit:
        time.sleep(0.02)
    assert len(ranks) == 2 and not any(map(is_alive, started))
    assert list((run_dir / "checkpoints").glob("step-*/__1_0.distcp")), "each rank wrote its part"
    done = resume(run_dir, "learner.ranks=1")
    assert done.returncode == 0, done.stderr
    assert_clean(run_dir)
    assert any(isinstance(event, Resumed) and event.version > 0 for event in read_events(run_dir / "events.jsonl"))
    assert (run_dir / "model/model.safetensors").exists() and steps_of(run_dir) == 120


@pytest.mark.slow
def test_two_ranks_learn_from_rows_that_bring_the_proximal_policy_as_one_does_and_keep_no_copy_of_it() -> None:
    """A rank that has no row of a micro-batch has nothing to bring, and takes part all the same."""
    case = CASES[1]

    async def train(learner: Learner) -> list[Metrics]:
        scorer, found = TorchScorer(case.new_model()), []
        for step in range(3):
            await learner.begin_batch()
            await scorer.load(await learner.weights())
            for number, micro_batches in enumerate(mini_batches(case, step)):
                for rows in micro_batches:
                    said = await scorer.score(rows) if number else [None] * len(rows)
                    brought = [structs.replace(row, proximal=one) for row, one in zip(rows, said, strict=True)]
                    await learner.accumulate(brought)
                found.append(await learner.step())
        return found

    one, two = one_learner(case), several(case, 2, "proximal.micro_batch_tokens=100")
    try:
        assert_alike(asyncio.run(train(two)), asyncio.run(train(one)))
        assert_same(case, dict(asyncio.run(two.weights())), masters_of(one))
    finally:
        asyncio.run(two.close())


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["proximal.micro_batch_tokens=60"]], ids=["own", "scorer"])
def test_a_run_of_two_ranks_with_a_warm_up_and_mini_batches_goes_to_its_end(tmp_path: Path, more: list[str]) -> None:
    changes = ["data.size=64", "data.holdout=8", "warmup.max_steps=4", "warmup.check_every=2", "pipeline.steps=3",
               "learner.ranks=2", "learner.mini_batches=2", "pipeline.groups_per_step=4", "algorithm.loss=decoupled_ppo",
               f"run_dir={tmp_path / 'run'}", "pipeline.filter_zero_signal=false", *more]  # fmt: skip
    words = [word for change in changes for word in ("--set", change)]
    done = subprocess.run(
        [sys.executable, "-m", "millstream.cli.main", "train", str(DEMO), *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert_clean(tmp_path / "run")
    assert steps_of(tmp_path / "run") == 3
    spans = [one for one in read_events(tmp_path / "run/events.jsonl") if isinstance(one, Span) and one.rank_seconds]
    assert {(one.worker, one.what, len(one.rank_seconds or [])) for one in spans} == {
        ("learner", "accumulate", 2),
        ("learner", "step", 2),
    }
    dump = RolloutDump(tmp_path / "run")
    kept = [one for group in dump.groups() for one in dump.rollouts(group)]
    assert all((one.trained_logprobs is None) == (one.step is None) for one in kept)


@pytest.mark.slow
def test_weights_that_are_not_finite_leave_no_rank_whichever_has_them() -> None:
    """The rows of one step: with this rate every weight overflows, on every rank."""

    async def program() -> None:
        learner = several(structs.replace(CASE, learner=LearnerConfig(learning_rate=1e39)), 2)
        try:
            await learner.begin_batch()
            await learner.accumulate(batch(0)[0])
            assert "skipped_steps" not in await learner.step()
            with pytest.raises(LearnerError, match=r"not finite.* after the learner's optimizer step 0; .* lower"):
                await learner.weights()
        finally:
            await learner.close()

    asyncio.run(program())


def test_a_rank_that_raises_ends_all_of_them_and_is_quoted() -> None:
    async def program() -> None:
        learner = several(CASE, 2)
        rows = batch(0)[0]
        short = min(range(len(rows)), key=lambda number: len(rows[number].tokens))
        rows[short] = structs.replace(rows[short], loss_mask=np.ones_like(rows[short].loss_mask))
        try:
            with pytest.raises(
                LearnerError, match=r"rank \d of 2: the first token of a row cannot be trained"
            ) as error:
                await learner.accumulate(rows)
            assert type(error.value) is LearnerError, "it would do so again"
            assert not any(map(is_alive, learner.ranks.pids))
        finally:
            await learner.close()

    asyncio.run(program())


def test_rows_cross_the_border_between_processes_as_they_were() -> None:
    rng = np.random.default_rng(0)
    rows = [row(rng, length, f"row {length}") for length in (3, 8)]
    rows[1] = structs.replace(rows[1], reference=rows[1].logprobs)
    found = unpack_rows(pack_rows(rows))
    assert (
        [r.label for r in found] == ["row 3", "row 8"]
        and found[0].reference is None
        and unpack_rows(pack_rows([])) == []
    )
    for mine, theirs in zip(found, rows, strict=True):
        for name in ("tokens", "loss_mask", "logprobs", "advantages"):
            assert getattr(mine, name).dtype == getattr(theirs, name).dtype
            assert np.array_equal(getattr(mine, name), getattr(theirs, name))
    assert np.array_equal(found[1].reference, rows[1].logprobs)


@given(
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=30),
    num_ranks=st.integers(1, 5),
    budget=st.integers(20, 200),
)
def test_every_row_is_dealt_once_within_the_budget_and_every_rank_has_as_many_passes(
    lengths: list[int], num_ranks: int, budget: int
) -> None:
    rng = np.random.default_rng(0)
    rows = [row(rng, length) for length in lengths]
    dealt = deal(rows, num_ranks, max_tokens=budget)
    assert sorted(id(r) for passes in dealt for some in passes for r in some) == sorted(map(id, rows))
    assert len(dealt) == num_ranks and len({len(passes) for passes in dealt}) == 1
    assert all(len(some) == 1 or sum(len(r.tokens) for r in some) <= budget for passes in dealt for some in passes)
    loads = [sum(len(r.tokens) for some in passes for r in some) for passes in dealt]
    assert max(loads) <= 1.1 * (sum(lengths) / num_ranks + max(lengths)), "the bound of the largest first"
    again = deal(rows, num_ranks, max_tokens=budget)
    assert [[[id(r) for r in some] for some in p] for p in again] == [[[id(r) for r in s] for s in p] for p in dealt]


def test_rows_of_one_prompt_stay_on_one_rank_unless_the_balance_suffers() -> None:
    rng = np.random.default_rng(0)

    def member(prompt: int, length: int) -> TrainRow:
        tokens = np.concatenate([np.full(8, prompt, np.int32), rng.integers(3, 90, length).astype(np.int32)])
        return structs.replace(row(rng, len(tokens)), tokens=tokens, loss_mask=np.arange(len(tokens)) >= 8)

    def prompts_by_rank(rows: list[TrainRow]) -> list[set[int]]:
        dealt = deal(rows, 2, max_tokens=10_000)
        return [{int(r.tokens[0]) for some in passes for r in some} for passes in dealt]

    together = prompts_by_rank([member(prompt, 10) for _ in range(4) for prompt in (1, 2, 3, 4)])
    assert not together[0] & together[1]
    apart = prompts_by_rank([member(1, 10) for _ in range(4)])
    assert apart == [{1}, {1}]


def test_a_rank_uses_the_only_gpu_that_it_sees_or_of_several_the_one_with_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def device(rank: int, device: str = "cuda") -> str:
        return str(own_device(device, RankPlace(rank=rank)))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert [device(rank) for rank in (0, 3)] == ["cuda:0", "cuda:3"] and device(3, "cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # CUDA_VISIBLE_DEVICES of its process
    assert device(3) == "cuda:0"


def test_ranks_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="ranks must be at least 1"):
        LearnerConfig(ranks=0)


def test_a_micro_batch_is_as_large_as_all_ranks_together_can_take() -> None:
    config = load(DEMO, RunConfig, ["learner.ranks=3", "learner.micro_batch_tokens=100"])
    algorithm = build.build_algorithm(config, Sampling(max_tokens=8), None, prepare_rewards(config.reward))
    assert algorithm.micro_batch_tokens == 300
