"""Supervised training: which examples, in what pieces, measured how, and that it is as resumable as everything else."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
import sys
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from msgspec import structs
from rich.console import Console
from safetensors.numpy import load_file
from typer.testing import CliRunner

from millstream.algo import recipe
from millstream.audit import audit
from millstream.cli.main import app
from millstream.cli.view import View
from millstream.clock import RealClock
from millstream.config import convert
from millstream.errors import ConfigError, Stopped
from millstream.events import Evaluated, Event, WarmedUp, WarmupSealed
from millstream.events.sinks import MemorySink, read_events
from millstream.learner import LearnerConfig
from millstream.learner.packing import packed
from millstream.learner.torch import TorchLearner
from millstream.pipeline.waits import Waits
from millstream.run import build
from millstream.run.check import check_combinations
from millstream.run.config import RunConfig, WarmupConfig
from millstream.run.evaluate import evaluate
from millstream.run.run import resume, train
from millstream.run.sft import SupervisedTraining, learner_config, sft_batches
from millstream.seeds import derive_seed
from millstream.types import Floats, Metrics, Task, TrainRow, Weights
from support.commands import start_command
from support.learners import rows
from support.runs import until
from support.stop_at import PromptSink
from support.tiny import make_small
from support.views import drawn

TASKS = [Task(id=str(number), prompt=f"{number}+{number}=", answer=str(2 * number)) for number in range(10)]


def config_of(**changes: Any) -> RunConfig:
    return convert({"model": {"tiny": {}}, **changes}, RunConfig, where="")


# ---- which examples --------------------------------------------------------------------------------------------------


def test_an_epoch_has_every_example_once_in_an_order_of_its_own_and_batches_are_full_but_the_last() -> None:
    config = WarmupConfig(epochs=3, batch_size=4)
    found = list(sft_batches(TASKS, config, seed=0))
    assert [len(batch) for batch in found] == [4] * 7 + [2] and len(found) == config.num_steps(len(TASKS))
    order = [task.id for batch in found for task in batch]
    epochs = [order[begin : begin + 10] for begin in (0, 10, 20)]
    assert all(Counter(epoch) == Counter(task.id for task in TASKS) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    assert found == list(sft_batches(TASKS, config, seed=0)) != list(sft_batches(TASKS, config, seed=1))


def test_with_max_steps_examples_are_drawn_with_replacement_as_they_always_were() -> None:
    rng = random.Random(derive_seed(7, "warmup"))
    expected = [rng.choices(TASKS, k=5) for _ in range(6)]
    assert list(sft_batches(TASKS, WarmupConfig(max_steps=6, batch_size=5), seed=7)) == expected
    assert WarmupConfig().num_steps(10) == 400


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"max_steps": 5, "epochs": 1}, "set either max_steps .* or epochs"),
        ({"epochs": 0}, "must be at least 1"),
        ({"warmup_steps": -1}, "warmup_steps at least 0"),
    ],
)
def test_what_is_wrong_with_the_table_is_said(table: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_of(warmup=table)


def test_no_step_of_anything_is_refused_with_what_to_type() -> None:
    with pytest.raises(ConfigError, match=r"there is no \[warmup\] table: add one, or set pipeline.steps"):
        check_combinations(config_of(pipeline={"steps": 0}, data={"toy": "sort_digits"}))


# ---- in what pieces --------------------------------------------------------------------------------------------------


class Recorder:
    """A learner that remembers what it was given."""

    def __init__(self) -> None:
        self.calls: list[list[TrainRow]] = []

    async def begin_batch(self) -> None: ...

    async def accumulate(self, rows: list[TrainRow]) -> None:
        self.calls.append(list(rows))

    async def step(self) -> Metrics:
        return {"loss": 1.0}

    async def logprobs(self, rows: list[TrainRow]) -> list[Floats]:
        return [np.full(int(row.loss_mask.sum()), -2.0, dtype=np.float32) for row in rows]

    async def weights(self) -> Weights:
        return {}

    def restore(self, folder: Path) -> None: ...


class Gold:
    """Examples without an environment."""

    def __init__(self) -> None:
        self.skipped = 0

    async def rows(self, task: Task) -> list[TrainRow]:
        return rows(1, seed=int(task.id))

    def skip(self, tasks: list[Task]) -> None:
        self.skipped += len(tasks)


class NoCheckpoints:
    """Checkpoints that are never due. `stop` is called at a step."""

    def __init__(self, stop_after: int) -> None:
        self._stop_after = stop_after
        self.stop = lambda: None

    def resume_from(self, version: int) -> None: ...

    def is_due(self, step: int, *, is_last: bool) -> bool:
        if step >= self._stop_after:
            self.stop()
        return False

    async def close(self) -> None: ...


def supervise(
    config: WarmupConfig,
    *,
    after_step: int = 0,
    accuracy: float = 0.0,
    stop_after: int = 10**9,
    micro_batch_tokens: int = 40,
) -> tuple[Recorder, Gold, list[WarmedUp]]:
    """The learner, the examples, and what was reported after step 0."""
    learner, examples, sink = Recorder(), list[Gold](), MemorySink()

    def new_examples() -> Any:
        examples.append(Gold())
        return examples[-1]

    async def accuracy_of(weights: Weights) -> float:
        return accuracy

    async def program() -> None:
        clock, checkpoints = RealClock(), NoCheckpoints(stop_after)
        training = SupervisedTraining(
            config,
            cast(Any, learner),
            cast(Any, checkpoints),
            tasks=TASKS,
            held_out=TASKS[:2],
            new_examples=new_examples,
            accuracy_of=accuracy_of,
            micro_batch_tokens=micro_batch_tokens,
            seed=0,
            clock=clock,
            sink=sink,
            waits=Waits(clock=clock, sink=sink, stall_s=30, deadline_s=30),
        )
        checkpoints.stop = training.stop
        found: Any = SimpleNamespace(folder=Path(), manifest=SimpleNamespace(version=after_step))
        await training.run(found if after_step else None)

    asyncio.run(program())
    first, *reports = sink.of(WarmedUp)
    assert first.step == 0 and first.held_out_loss == 2.0
    return learner, examples[-1], reports


def test_a_batch_is_packed_into_passes_of_limited_tokens_and_no_row_is_lost() -> None:
    learner, _, _ = supervise(WarmupConfig(epochs=1, batch_size=10))
    assert len(learner.calls) > 1
    assert all(sum(len(row.tokens) for row in call) <= 40 or len(call) == 1 for call in learner.calls)
    assert sum(map(len, learner.calls)) == 10
    whole, _, _ = supervise(WarmupConfig(epochs=1, batch_size=10), micro_batch_tokens=10**6)
    assert len(whole.calls) == 1
    assert list(packed([], 10)) == []


def test_it_is_measured_at_intervals_and_after_the_last_step_and_stops_by_accuracy() -> None:
    _, _, reports = supervise(WarmupConfig(max_steps=7, batch_size=2, check_every=3))
    assert [(each.step, each.accuracy) for each in reports] == [(3, None), (6, None), (7, None)]
    assert reports[0].loss == 1.0 and reports[0].held_out_loss == 2.0
    _, _, reports = supervise(WarmupConfig(max_steps=7, batch_size=2, check_every=3, stop_at=0.5), accuracy=0.6)
    assert [(each.step, each.accuracy) for each in reports] == [(3, 0.6)]


def test_resumed_training_has_the_remaining_batches() -> None:
    config = WarmupConfig(epochs=2, batch_size=4)
    whole, _, _ = supervise(config, micro_batch_tokens=10**6)
    first, _, _ = supervise(config, micro_batch_tokens=10**6, stop_after=2)
    rest, script, _ = supervise(config, micro_batch_tokens=10**6, after_step=2)
    joined = [*first.calls, *rest.calls]
    assert [[row.tokens.tolist() for row in call] for call in joined] == [
        [row.tokens.tolist() for row in call] for call in whole.calls
    ]
    assert script.skipped == 8


def test_what_bounds_memory_and_time_is_that_of_the_learners_table() -> None:
    table = LearnerConfig(micro_batch_tokens=96, ranks=2, recompute=True, compile=True, max_skipped_steps=0)
    config = structs.replace(config_of(model={"tiny": {}}, warmup={"learning_rate": 0.5}), learner=table)
    assert config.warmup is not None
    assert learner_config(config, config.warmup) == structs.replace(table, learning_rate=0.5)


def test_a_model_in_bfloat16_may_be_another_learners_when_the_first_has_closed() -> None:
    async def program() -> None:
        model = make_small("qwen3", torch.bfloat16)
        for _ in range(2):
            learner = TorchLearner(model, LearnerConfig(), recipe.supervised())
            await learner.begin_batch()
            await learner.accumulate(rows(2))
            assert (await learner.step())["grad_norm"] > 0
            await learner.close()

    asyncio.run(program())


# ---- whole runs ------------------------------------------------------------------------------------------------------


def pairs(folder: Path) -> Path:
    """Examples of a user's: two digits and their successors. One has no answer, and is left out."""
    path = folder / "pairs.jsonl"
    made = [{"prompt": f"{number}>", "answer": f"{number + 1}"} for number in range(10, 50)]
    path.write_text("".join(json.dumps(record) + "\n" for record in [*made, {"prompt": "99>"}]))
    return path


def run_config(folder: Path, run: str = "run", **warmup: Any) -> RunConfig:
    folder.mkdir(exist_ok=True)
    return config_of(
        model={"tiny": {"hidden": 32, "layers": 1, "heads": 2}},
        data={"path": str(pairs(folder)), "holdout": 8},
        warmup={
            "epochs": 12,
            "batch_size": 8,
            "learning_rate": 1e-2,
            "schedule": "cosine",
            "warmup_steps": 4,
            **warmup,
        },
        learner={"micro_batch_tokens": 24},
        rollout={"max_tokens": 4},
        pipeline={"steps": 0},
        engine={"process": False},
        checkpoint={"every_steps": 1},
        run_dir=str(folder / run),
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("supervised")
    train(run_config(folder, "whole"))
    return folder / "whole"


def test_without_steps_of_reinforcement_supervised_training_is_the_run(whole: Path) -> None:
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["held_out_loss_after"] < 0.7 * summary["held_out_loss_before"]
    assert summary["accuracy_before"] == 0.0 and summary["steps"] == 0
    report = audit(whole)
    assert report.is_clean and report.outcome == "finished", report.findings
    events = list(read_events(whole / "events.jsonl"))
    warmed = [event for event in events if isinstance(event, WarmedUp)]
    assert [event.step for event in warmed] == [0, 10, 20, 30, 40, 50]  # 33 tasks, 8 a step, 12 times
    assert all(event.held_out_loss is not None and event.accuracy is None for event in warmed)
    names = [event.name for event in events if isinstance(event, Evaluated)]
    assert names == ["sampled before", "greedy before", "sampled after", "greedy after"]
    assert not (whole / "warmup").exists() and (whole / "model/model.safetensors").exists()


def test_the_commands_that_read_a_run_read_one_of_supervised_training(whole: Path) -> None:
    for command in ("audit", "report", "trace"):
        result = CliRunner().invoke(app, [command, str(whole)])
        assert result.exit_code == 0, result.output
    found = evaluate(
        convert(
            {"model": {"path": str(whole / "model")}, "data": {"path": str(whole.parent / "pairs.jsonl"), "holdout": 8},
             "rollout": {"max_tokens": 4}, "engine": {"process": False}}, RunConfig, where="")
    )  # fmt: skip
    assert found.accuracy == json.loads((whole / "summary.json").read_text())["accuracy_after"]


def test_when_reinforcement_begins_nothing_is_left_of_the_supervised_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its masters and moments are several times the model."""
    build_learner, built = build.build_learner, list[weakref.ref[Any]]()
    left: list[list[bool]] = []

    def watched(*arguments: Any, **options: Any) -> Any:
        gc.collect()
        left.append([one() is not None for one in built])
        learner = build_learner(*arguments, **options)
        built.append(weakref.ref(learner))
        return learner

    monkeypatch.setattr(build, "build_learner", watched)
    config = run_config(tmp_path, epochs=1)
    pipeline = structs.replace(config.pipeline, steps=1, groups_per_step=1, filter_zero_signal=False)
    train(structs.replace(config, pipeline=pipeline))
    assert left == [[], [False]]


class AtStep(PromptSink):
    """A sink that sends a signal to this process at a supervised step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def emit(self, event: Event) -> None:
        if isinstance(event, WarmedUp) and event.step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


def assert_same_model(one: Path, other: Path) -> None:
    ours, theirs = (load_file(folder / "model/model.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_a_stop_in_supervised_training_keeps_the_current_step_and_the_run_is_resumed_with_the_same_bits(whole: Path, tmp_path: Path) -> None:  # fmt: skip
    with pytest.raises(Stopped, match=r"the checkpoint of supervised step \d+ is written"):
        train(run_config(tmp_path, "whole"), sinks=[AtStep(10)])  # type: ignore[list-item]
    run_dir = tmp_path / "whole"
    (run_dir / "config.toml").write_text((whole / "config.toml").read_text().replace(str(whole.parent), str(tmp_path)))
    result = resume(run_dir)
    assert_same_model(run_dir, whole)
    before = json.loads((whole / "summary.json").read_text())["held_out_loss_before"]
    assert result.held_out_loss_before == pytest.approx(before) and result.accuracy_before == 0.0
    reports = [event.step for event in read_events(run_dir / "events.jsonl") if isinstance(event, WarmedUp)]
    assert reports.count(0) == 2 and [step for step in reports if step] == [10, 20, 30, 40, 50], (
        "no step was made twice"
    )
    assert audit(run_dir).is_clean


def test_a_run_killed_in_supervised_training_is_resumed_from_its_checkpoint_with_the_same_bits(whole: Path, tmp_path: Path) -> None:  # fmt: skip
    """In a process of its own, by SIGKILL: several seconds."""
    run_dir = tmp_path / "whole"
    run_config(tmp_path)
    text = (whole / "config.toml").read_text().replace(str(whole.parent), str(tmp_path))
    (tmp_path / "config.toml").write_text(text)
    process = start_command([sys.executable, "-m", "millstream.cli.main", "train", str(tmp_path / "config.toml")])
    until(lambda: any((run_dir / "warmup").glob("step-*")), process)
    process.kill()
    process.wait()
    assert not (run_dir / "checkpoints").exists()
    resume(run_dir)
    assert_same_model(run_dir, whole)
    sealed = [event.step for event in read_events(run_dir / "events.jsonl") if isinstance(event, WarmupSealed)]
    assert sealed and sealed == sorted(sealed)
    assert audit(run_dir).is_clean


def test_the_view_of_supervised_training_alone_shows_its_steps() -> None:
    view = View(Console(), num_steps=0, max_lag=1)
    assert "step 0/0" in drawn(view)
    view.emit(WarmedUp(at=1.0, step=5, max_steps=20, loss=1.25, held_out_loss=1.5))
    assert "step 5/20" in drawn(view) and "loss 1.250  held out 1.500" in drawn(view)
