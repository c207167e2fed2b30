"""References, critics, teachers and proximal policies in real runs of a small model: they learn, they hold, they repeat and
they resume."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from millstream import resume, train
from millstream.algo import AlgorithmConfig, credit_for, recipe
from millstream.algo.advantages import grpo
from millstream.clock import RealClock
from millstream.config import load
from millstream.engine import EngineConfig
from millstream.errors import LearnerError, MillstreamError, ModelError, Stopped
from millstream.events import GroupTaken, Span, Stepped
from millstream.events.sinks import MemorySink, read_events
from millstream.learner import CriticConfig
from millstream.learner.critic import TorchCritic
from millstream.learner.scorer import TorchScorer
from millstream.learner.torch import TorchLearner
from millstream.model.adapters import merged
from millstream.model.load import save_model
from millstream.model.tiny import TinyShape, character_tokenizer, tiny_model
from millstream.pipeline.pipeline import Algorithm, Parts, Pipeline
from millstream.pipeline.rollouts import RolloutConfig
from millstream.pipeline.schedule import PipelineConfig
from millstream.pipeline.schema import REFERENCE, VALUES, Stage, store_tasks
from millstream.pipeline.waits import Waits
from millstream.run.build import build_engine, build_model
from millstream.run.build_scorers import build_scorers
from millstream.run.check import check_config
from millstream.run.config import RunConfig
from millstream.store.memory import MemoryStore
from millstream.testing.learner import make_rows
from millstream.types import Floats, Task, TrainRow, Weights
from millstream.weights.local import LocalChannel
from support.delayed import LEARNER, SAMPLING, DelayedReward, tasks
from support.runs import assert_clean, step_rows
from support.stage_runs import CONFIG, config
from support.stop_at import StopAt
from support.tiny import make

SHAPE = TinyShape(hidden=32, layers=1, heads=2, context=64)


def ones(task: Task, completion: str) -> float:
    """To be learned without a warm-up: the share of ones."""
    return completion.count("1") / 4


def metrics(folder: Path, *changes: str) -> list[dict[str, float]]:
    """Of every step of a run, which passes its audit."""
    train(config(folder, *changes), reward=ones)
    assert_clean(folder / "run")
    return step_rows(folder / "run")


def mean(steps: Sequence[dict[str, float]], name: str) -> float:
    return float(np.mean([step[name] for step in steps]))


def test_ppo_with_a_critic_learns_asynchronously_from_groups_of_one(tmp_path: Path) -> None:
    steps = metrics(
        tmp_path, "algorithm.name=ppo", "critic.learning_rate=3e-3", "rollout.group_size=1", "rollout.min_group_size=1",
        "pipeline.groups_per_step=32", "algorithm.trace=0.95",
    )  # fmt: skip
    assert mean(steps[-4:], "reward") > 4 * mean(steps[:4], "reward") > 0
    assert max(step["lag_max"] for step in steps) == 1
    assert steps[0]["critic_value"] == 0 and steps[-1]["critic_value"] > 0.15
    events = list(read_events(tmp_path / "run/events.jsonl"))
    work = {(span.worker, span.what) for span in events if isinstance(span, Span)}
    assert {("values", "score"), ("critic", "accumulate"), ("critic", "step")} <= work


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """Of a run that a reference measures, and does not hold."""
    return metrics(tmp_path_factory.mktemp("free"), "reference.micro_batch_tokens=300")


@pytest.mark.parametrize(("place", "coefficient"), [("loss", 1.0), ("reward", 0.3)])
def test_a_kl_holds_the_policy_nearer_to_the_reference(
    tmp_path: Path, free: list[dict[str, float]], place: str, coefficient: float
) -> None:
    held = metrics(tmp_path, f"algorithm.kl={place}", f"algorithm.kl_coefficient={coefficient}")
    assert held[0]["reference_kl"] == pytest.approx(0, abs=1e-6), "it starts from there"
    assert 0 < mean(held[-4:], "reference_kl") < 0.5 * mean(free[-4:], "reference_kl")
    assert mean(free[-4:], "reward") > mean(held[-4:], "reward")


def test_a_model_in_16_bits_is_warmed_up_and_then_trained_with_a_critic_and_a_reference(tmp_path: Path) -> None:
    few = ("pipeline.steps=3", "pipeline.groups_per_step=4", "warmup.max_steps=2", "warmup.check_every=2")
    kl = ("algorithm.kl=reward", "algorithm.kl_coefficient=0.1", "reference.dtype=float32")
    steps = metrics(tmp_path, "model.dtype=bfloat16", "algorithm.name=ppo", *kl, *few)
    assert len(steps) == 3 and all(step["critic_loss"] > 0 and step["reference_kl"] > 0 for step in steps)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with opinions: what the student begins with, sharpened."""
    tokenizer = character_tokenizer(config(tmp_path_factory.mktemp("config")).model.tiny.alphabet)  # type: ignore[union-attr]
    model = tiny_model(SHAPE, tokenizer, seed=0)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8)
    save_model(model, tokenizer, folder := tmp_path_factory.mktemp("teacher"))
    return folder


@pytest.mark.parametrize("lora", [[], ["learner.lora.rank=2"]], ids=["whole", "lora"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_reference_that_is_the_start_says_what_the_policy_says_and_what_it_says_when_it_is_read_again(
    dtype: str, lora: list[str], tmp_path: Path
) -> None:
    """Bit for bit: positions are not rounded to 16 bits where the weights are."""
    changes = [f"model.dtype={dtype}", "algorithm.kl=loss", "algorithm.kl_coefficient=0.1", *lora]
    (tmp_path / "config.toml").write_text(CONFIG)
    config = load(tmp_path / "config.toml", RunConfig, changes)
    model, tokenizer = build_model(config.model, seed=0, lora=config.learner.lora)
    save_model(model if not lora else merged(model), tokenizer, tmp_path / "kept")
    some = [row for row in make_rows(10) if row.loss_mask.any()]
    expected = asyncio.run(TorchLearner(model, config.learner, recipe.supervised()).logprobs(some))
    for kept in (None, tmp_path / "kept"):
        on_threads: Any = SimpleNamespace(device="cpu", has=lambda table: False)
        reference = build_scorers(config, model, kept, on_threads).reference
        assert reference is not None
        for row, found, own in zip(some, asyncio.run(reference.score(some)), expected, strict=True):
            assert np.array_equal(found[row.loss_mask], own)


def test_distillation_brings_the_student_to_the_teacher_whatever_the_rewards_say(tmp_path: Path, teacher: Path) -> None:
    more = ("pipeline.steps=40", "rollout.group_size=4")
    steps = metrics(tmp_path, "algorithm.name=distillation", f"reference.path={teacher}", *more)
    assert mean(steps[-4:], "reference_kl") < 0.6 * mean(steps[:2], "reference_kl")
    saved = load(tmp_path / "run/config.toml", RunConfig)
    assert saved.reference is not None and saved.reference.path == str(teacher)


def test_a_reference_that_says_no_numbers_ends_the_run_and_is_named(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(config(tmp_path).model.tiny.alphabet)  # type: ignore[union-attr]
    model = tiny_model(SHAPE, tokenizer, seed=0)
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(torch.nan)
    save_model(model, tokenizer, tmp_path / "broken")
    few = ("pipeline.steps=8", "pipeline.groups_per_step=4", "data.holdout=0", "learner.max_skipped_steps=2")
    with pytest.raises(
        LearnerError,
        match=r"no row of the last 3 optimizer steps was finite.*max_skipped_steps = 2.*"
        r"group \d+, member \d \(reference\).*reference\.path",
    ):
        train(config(tmp_path, f"reference.path={tmp_path / 'broken'}", *few), reward=ones)


LAKE = ("environment=[{use='frozen_lake', args={size=3, max_turns=4}}]", "model.tiny.alphabet=pfhgldru=>", "data.toy=",
        "data.size=50", "model.tiny.context=128", "pipeline.steps=3", "rollout.max_tokens=2")  # fmt: skip


@pytest.mark.parametrize("algorithm", [("advantage=turns", "discount=0.9"), ("name=ppo", "trace=0.9")])
def test_agents_of_several_turns_are_credited_turn_by_turn(tmp_path: Path, algorithm: tuple[str, str]) -> None:
    train(config(tmp_path, *LAKE, *(f"algorithm.{key}" for key in algorithm)))
    assert_clean(tmp_path / "run")
    told = step_rows(tmp_path / "run")
    assert len(told) == 3 and all(np.isfinite(step["loss"]) for step in told)
    assert all(("critic_loss" in step) == (algorithm[0] == "name=ppo") for step in told)


def test_a_teacher_with_another_tokenizer_is_refused_before_the_run(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("xyz")
    save_model(tiny_model(SHAPE, tokenizer, seed=5), tokenizer, tmp_path / "teacher")
    changes = ("algorithm.name=distillation", f"reference.path={tmp_path / 'teacher'}")
    with pytest.raises(ModelError, match=r"reference\.path = .* has another tokenizer than the model: the token"):
        train(config(tmp_path, *changes), reward=ones)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["reference.path", "critic.path"])
def test_a_dry_run_looks_for_every_checkpoint_that_is_named(tmp_path: Path, teacher: Path, key: str) -> None:
    algorithm = "algorithm.name=ppo" if key == "critic.path" else "algorithm.name=grpo"
    said = check_config(config(tmp_path, algorithm, f"{key}={teacher}", "model.tiny.hidden=32")).findings
    assert f"checked: {teacher} is a checkpoint's folder with whole weights and a tokenizer" in said
    with pytest.raises(ModelError, match=rf"{key} = 'no/such/folder/here': no such folder.*--set {key}=FOLDER"):
        check_config(config(tmp_path, algorithm, f"{key}=no/such/folder/here"))


def test_a_critic_may_begin_as_another_checkpoint(tmp_path: Path, teacher: Path) -> None:
    few = ("pipeline.steps=2", "pipeline.groups_per_step=2", "data.holdout=0")
    steps = metrics(tmp_path, "algorithm.name=ppo", f"critic.path={teacher}", *few)
    assert len(steps) == 2 and steps[0]["critic_value"] == 0.0 and steps[0]["critic_grad_norm"] > 0


def test_a_gpu_that_is_not_there_is_refused_by_the_key_that_names_it(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    several = ("algorithm.name=decoupled_ppo", "learner.mini_batches=2")
    for key, more in (("reference", ()), ("proximal", several)):
        with pytest.raises(MillstreamError, match=rf'{key}\.device = "cuda:1", and torch sees no GPU here'):
            train(config(tmp_path, f"{key}.device=cuda:1", *more), reward=ones)


# ---- the proximal policy ---------------------------------------------------------------------------------------------

SEVERAL = ("algorithm.name=decoupled_ppo", "learner.mini_batches=4", "algorithm.clip_low=0.02", "algorithm.clip_high=0.02",
           "pipeline.steps=6", "data.holdout=0")  # fmt: skip
BESIDE = "proximal.micro_batch_tokens=60"


@pytest.mark.parametrize("lora", [[], ["learner.lora.rank=2", "learner.learning_rate=3e-2"]], ids=["whole", "lora"])
def test_the_proximal_policy_beside_the_learner_gives_the_weights_that_the_learners_own_gives(
    tmp_path: Path, lora: list[str]
) -> None:
    """To 1e-6 of the largest weight: micro-batches are others, and with them the order of sums. Adapters have a higher learning
    rate: rounding grows to 1e-5 on some processors. A policy that is one batch old gives 0.96, and 0.06 without adapters."""
    own = metrics(tmp_path / "own", *SEVERAL, "pipeline.max_lag=0", *lora)
    beside = metrics(tmp_path / "beside", *SEVERAL, "pipeline.max_lag=0", *lora, BESIDE)
    again = metrics(tmp_path / "again", *SEVERAL, "pipeline.max_lag=0", *lora, BESIDE)
    theirs, ours, twice = (
        load_file(tmp_path / name / "run/model/model.safetensors") for name in ("own", "beside", "again")
    )
    largest = max(float(np.abs(theirs[name]).max()) for name in theirs)
    limit = (1e-4 if lora else 1e-6) * largest
    assert max(float(np.abs(ours[name] - theirs[name]).max()) for name in theirs) < limit
    assert all(np.array_equal(ours[name], twice[name]) for name in ours), "the same bits, whatever the timing"
    assert [step["reward"] for step in beside] == [step["reward"] for step in own]
    assert mean(beside, "clipped_share") > 0.02, "it matters what it says"
    assert again[-1]["loss"] == beside[-1]["loss"]


def test_an_asynchronous_run_with_the_proximal_policy_beside_the_learner_learns(tmp_path: Path) -> None:
    steps = metrics(tmp_path, "algorithm.name=decoupled_ppo", "learner.mini_batches=2", BESIDE)
    assert mean(steps[-4:], "reward") > 4 * mean(steps[:4], "reward") > 0
    assert max(step["lag_max"] for step in steps) == 1
    spans = [event for event in read_events(tmp_path / "run/events.jsonl") if isinstance(event, Span)]
    trained = sum(span.num_tokens for span in spans if (span.worker, span.what) == ("learner", "accumulate"))
    scored = [span.num_tokens for span in spans if (span.worker, span.what) == ("proximal", "score")]
    assert sum(scored) == pytest.approx(trained / 2, rel=0.05), "the second half of every batch"
    assert max(scored) <= 60
    assert sum((span.worker, span.what) == ("proximal", "load") for span in spans) == 24


def test_a_run_that_was_stopped_goes_on_with_the_proximal_policy_of_its_next_batch(tmp_path: Path) -> None:
    changes = (*SEVERAL, "pipeline.max_lag=0", BESIDE)
    train(config(tmp_path / "whole", *changes), reward=ones)
    with pytest.raises(Stopped):
        train(config(tmp_path / "cut", *changes), reward=ones, sinks=[StopAt(3)])
    resume(tmp_path / "cut/run", reward=ones)
    assert_clean(tmp_path / "cut/run")
    ours, theirs = (load_file(tmp_path / name / "run/model/model.safetensors") for name in ("cut", "whole"))
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


# ---- synchronous: the same bits, whatever the timing -----------------------------------------------------------------


class Delayed:
    """A scorer or a critic that takes its time, differently in every run."""

    def __init__(self, one: TorchScorer | TorchCritic, delays: random.Random) -> None:
        self._one, self._delays = one, delays

    def __getattr__(self, name: str) -> object:
        return getattr(self._one, name)

    async def score(self, rows: Sequence[TrainRow]) -> list[Floats]:
        await asyncio.sleep(self._delays.random() * 0.02)
        return await self._one.score(rows)


async def synchronous(delay_seed: int, sink: MemorySink, *, max_lag: float = 0) -> Weights:
    """PPO with a critic and the KL in the reward."""
    algorithm = AlgorithmConfig(name="ppo", kl="reward", kl_coefficient=0.05, trace=0.9)
    delays, clock = random.Random(delay_seed), RealClock()
    engine = build_engine(EngineConfig(slots=6, process=False), make("qwen3"), clock=clock, sink=sink)
    learner = TorchLearner(make("qwen3"), LEARNER, recipe.objective(algorithm, max_tokens=12), num_steps=3)
    critic = Delayed(TorchCritic(make("qwen3"), CriticConfig(learning_rate=3e-3)), delays)
    reference = Delayed(TorchScorer(make("qwen3")), delays)
    stages = (Stage(REFERENCE, reference, 64, is_early=True), Stage(VALUES, critic, 64, is_early=True))
    reads = store_tasks(stages, has_critic=True, is_in_lockstep=max_lag == 0)
    channel = LocalChannel()
    await channel.publish(0, await learner.weights())
    run = Pipeline(
        Parts(
            engines=(engine,),
            environment=DelayedReward(delays),
            learner=learner,
            store=MemoryStore(reads, capacity_rows=100),
            channel=channel,
            clock=clock,
            sink=sink,
            waits=Waits(clock=clock, sink=sink, stall_s=30.0, deadline_s=120.0),
            stages=stages,
            critic=critic,  # type: ignore[arg-type]
        ),
        ((0, task) for task in tasks()),
        Algorithm(
            advantage=grpo,
            sampling=SAMPLING,
            micro_batch_tokens=LEARNER.micro_batch_tokens,
            credit=credit_for(algorithm),
            critic_batch_tokens=64,
        ),
        config=PipelineConfig(steps=3, groups_per_step=4, max_lag=max_lag, filter_zero_signal=False),
        rollout=RolloutConfig(group_size=4),
        seed=5,
    )
    await run.run()
    await engine.close()
    return await learner.weights()


def test_at_max_lag_zero_ppo_with_a_critic_and_a_kl_gives_the_same_bits_whatever_the_timing() -> None:
    sinks = [MemorySink(), MemorySink()]
    first, second = (asyncio.run(synchronous(seed, sink)) for seed, sink in enumerate(sinks))
    assert all(torch.equal(first[name], second[name]) for name in first)
    told = [[step.metrics for step in sink.of(Stepped)] for sink in sinks]
    assert told[0] == told[1] and told[0][-1]["critic_explained"] != 0 and told[0][-1]["reference_kl"] > 0
    assert [e.group_id for e in sinks[0].of(GroupTaken)] == [e.group_id for e in sinks[1].of(GroupTaken)]


# ---- resume ------------------------------------------------------------------------------------------------------------


def test_a_run_with_a_critic_and_a_reference_goes_on_from_an_older_checkpoint_with_the_same_bits(
    tmp_path: Path,
) -> None:
    changes = (
        "algorithm.name=ppo", "algorithm.kl=reward", "algorithm.kl_coefficient=0.1", "critic.learning_rate=3e-3",
        "pipeline.max_lag=0", "pipeline.steps=7", "pipeline.groups_per_step=4", "checkpoint.every_steps=2", "checkpoint.keep=9",
        "warmup.max_steps=3", "warmup.check_every=3",
    )  # fmt: skip
    train(config(tmp_path / "whole", *changes), reward=ones)
    with pytest.raises(Stopped):
        train(config(tmp_path / "cut", *changes), reward=ones, sinks=[StopAt(5)])
    run_dir = tmp_path / "cut/run"
    *_, before, last = sorted((run_dir / "checkpoints").glob("step-*"))
    assert (before / "critic/learner.pt").is_file() and (run_dir / "reference/config.json").is_file()
    shutil.rmtree(last)
    resume(run_dir, reward=ones)
    assert_clean(run_dir)
    ours, theirs = (load_file(tmp_path / name / "run/model/model.safetensors") for name in ("cut", "whole"))
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    first, second = (step_rows(tmp_path / name / "run")[-1] for name in ("cut", "whole"))
    assert {k: v for k, v in first.items() if k.startswith(("critic_", "reference_"))} == {
        k: v for k, v in second.items() if k.startswith(("critic_", "reference_"))
    }
    assert first["critic_loss"] > 0
