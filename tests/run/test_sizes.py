"""Sizes: what `auto` is on any GPU, by a pure function; a CPU has fixed ones; a run says, records and keeps them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from typer.testing import CliRunner

from millstream import resume, train
from millstream.algo import AlgorithmConfig
from millstream.cli.main import app
from millstream.cli.show import alarm
from millstream.config import load
from millstream.engine import EngineConfig
from millstream.env.data import DataConfig
from millstream.events import MicroBatchLowered, SizesChosen, Warned
from millstream.events.sinks import MemorySink, read_events
from millstream.learner import CriticConfig, LearnerConfig, ReferenceConfig
from millstream.learner.packing import num_computed
from millstream.learner.rank import Rank
from millstream.model.lora import LoraConfig
from millstream.pipeline.rollouts import RolloutConfig
from millstream.pipeline.schedule import PipelineConfig
from millstream.run import build
from millstream.run.config import ModelConfig, RunConfig
from millstream.run.device import sizes_in_words
from millstream.run.one_gpu import SMALL_MODEL, why_threads, with_process
from millstream.run.sizes import (
    CPU,
    MAX_PASS,
    MAX_SLOTS,
    MIN_PASS,
    MIN_SLOTS,
    Memory,
    ModelDevice,
    ModelShape,
    choose_sizes,
    memory_warning,
    shape_from,
    with_recorded,
    with_sizes,
)
from millstream.types import TrainRow
from support.runs import recipe_in

QWEN3_474M = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
              "intermediate_size": 3072, "vocab_size": 32768, "tie_word_embeddings": True, "max_position_embeddings": 8192}  # fmt: skip
QWEN3_1_7B = QWEN3_474M | {"hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 151936}
SMOLLM2 = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
           "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True, "max_position_embeddings": 8192}  # fmt: skip
QWEN3_8B = {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 12288, "vocab_size": 151936, "tie_word_embeddings": False, "max_position_embeddings": 40960}  # fmt: skip


def shape(config: dict[str, Any], **more: Any) -> ModelShape:
    found = shape_from(config, **more)
    assert found is not None
    return found


def gpu(gigabytes: float) -> ModelDevice:
    return ModelDevice(is_gpu=True, free_bytes=gigabytes * 1e9)


def run_config(**tables: Any) -> RunConfig:
    return RunConfig(model=tables.pop("model", ModelConfig(path="m")), **tables)


LARGE = run_config(
    rollout=RolloutConfig(group_size=8, max_tokens=4096),
    pipeline=PipelineConfig(steps=100, groups_per_step=64, max_lag=2),
)
"""512 rollouts a step, three batches in flight."""


def test_on_a_cpu_every_auto_is_what_it_always_was() -> None:
    sizes = choose_sizes(LARGE, CPU, shape(QWEN3_474M))
    assert (sizes.dtype, sizes.slots, sizes.cache_gb) == ("float32", 128, None)
    assert (sizes.micro_batch_tokens, sizes.is_compiled, sizes.needed_gb) == (8192, False, None)
    old = with_sizes(LARGE, sizes)
    engine, learner = EngineConfig(slots=128, replicas=1), LearnerConfig(micro_batch_tokens=8192, compile=False)
    assert (old.engine, old.learner) == (engine, learner)


def test_on_a_large_gpu_the_defaults_are_what_an_expert_would_set() -> None:
    sizes = choose_sizes(LARGE, gpu(140), shape(QWEN3_474M))
    assert (sizes.dtype, sizes.is_compiled, sizes.micro_batch_tokens) == ("bfloat16", True, MAX_PASS)
    assert 512 <= sizes.slots <= MAX_SLOTS, "1,536 rollouts can be in flight"
    assert sizes.cache_gb is not None and 30 < sizes.cache_gb < 100


@pytest.mark.parametrize(
    ("model", "gigabytes", "fits"),
    [
        (SMOLLM2, 8, True),
        (SMOLLM2, 24, True),
        (QWEN3_474M, 8, False),
        (QWEN3_474M, 24, True),
        (QWEN3_1_7B, 80, True),
        (QWEN3_1_7B, 24, False),
        (QWEN3_8B, 141, False),
    ],
)
def test_what_fits_fits_and_what_does_not_is_said_before_the_start(
    model: dict[str, Any], gigabytes: float, fits: bool
) -> None:
    sizes = choose_sizes(LARGE, gpu(gigabytes), shape(model))
    assert bool(memory_warning(sizes, LARGE)) is not fits, sizes_in_words(sizes)
    assert sizes.slots >= MIN_SLOTS and sizes.micro_batch_tokens >= MIN_PASS


def test_a_warning_of_memory_names_the_size_that_was_typed_and_nothing_that_is_set() -> None:
    lora = LearnerConfig(micro_batch_tokens=32768, recompute=True, lora=LoraConfig())
    few = structs.replace(LARGE, learner=LearnerConfig(micro_batch_tokens=32768))
    for config, ways in (
        (few, "leave learner.micro_batch_tokens = 32768 out, or learner.recompute = true, or [learner.lora]"),
        (structs.replace(few, learner=lora), "leave learner.micro_batch_tokens = 32768 out"),
        (LARGE, "learner.recompute = true, or [learner.lora]"),
    ):
        sizes = choose_sizes(config, gpu(8 if config is LARGE else 24), shape(QWEN3_474M))
        assert memory_warning(sizes, config).endswith(f": {ways}")


def test_a_typed_size_that_leaves_a_cache_for_few_requests_is_named() -> None:
    typed = structs.replace(LARGE, learner=LearnerConfig(micro_batch_tokens=32768))
    free = next(gb for gb in range(1, 200) if not memory_warning(choose_sizes(typed, gpu(gb), shape(SMOLLM2)), typed))
    sizes = choose_sizes(typed, gpu(free - 1), shape(SMOLLM2))
    said = memory_warning(sizes, typed)
    assert ("For more requests at a time: " in said) == ((sizes.needed_gb or 0) <= (sizes.free_gb or 0))
    assert "its cache is enough for 8 requests at a time, and 1,536 can be in flight" in said
    assert "leave learner.micro_batch_tokens = 32768 out" in said


def test_few_slots_of_each_of_several_engines_are_no_warning() -> None:
    written = structs.replace(
        LARGE, learner=LearnerConfig(micro_batch_tokens=16384), rollout=RolloutConfig(group_size=1)
    )
    pipeline = PipelineConfig(steps=1, groups_per_step=8, max_lag=2)
    written = structs.replace(written, pipeline=pipeline, data=DataConfig(holdout=0))
    placed = structs.replace(written, engine=EngineConfig(replicas=3))
    sizes = choose_sizes(placed, structs.replace(gpu(80), engine_bytes=80e9), shape(SMOLLM2))
    assert sizes.slots == 8 and not memory_warning(sizes, placed, written=written)


@given(st.floats(8, 40))
def test_sizes_that_are_chosen_are_not_warned_of_however_much_is_free(free: float) -> None:
    config = structs.replace(LARGE, rollout=RolloutConfig(group_size=16, max_tokens=96))
    sizes = choose_sizes(config, gpu(free), shape(SMOLLM2))
    assert not memory_warning(sizes, config)
    assert not memory_warning(structs.replace(sizes, free_gb=0.95 * free), config, are_kept=True)


def test_with_adapters_a_large_model_fits() -> None:
    lora = shape(QWEN3_8B, parameters=8_190_000_000, trained=40_000_000)
    assert not memory_warning(choose_sizes(LARGE, gpu(80), lora), LARGE)


def test_the_estimate_of_a_pass_is_near_what_was_measured() -> None:
    """docs/benchmarks.md, peak GiB on an H200; an estimate may be above it by half, and hardly below."""
    cases: list[tuple[dict[str, Any], int, dict[str, Any], float]] = [
        (QWEN3_474M, 32768, {}, 78),
        (QWEN3_474M, 32768, {"compile": True}, 52),
        (QWEN3_474M, 32768, {"recompute": True}, 15),
        (QWEN3_1_7B, 16384, {}, 106),
        (QWEN3_1_7B, 16384, {"compile": True}, 63),
    ]
    for model, tokens, options, measured in cases:
        config = run_config(learner=LearnerConfig(**options))
        memory = Memory(config, shape(model), dtype="bfloat16", is_compiled=config.learner.is_compiled)
        alone = 2 * shape(model).parameters + 16 * shape(model).parameters
        estimated = (alone + memory.pass_bytes(tokens)) / 2**30
        assert 0.9 * measured < estimated < 1.5 * measured, (model, options)


configs = st.builds(
    lambda groups, members, lag, tokens, replicas, minis, recompute, has_critic, has_reference: run_config(
        rollout=RolloutConfig(group_size=members, max_tokens=tokens),
        pipeline=PipelineConfig(groups_per_step=minis * groups, max_lag=lag),
        engine=EngineConfig(replicas=replicas),
        learner=LearnerConfig(mini_batches=minis, recompute=recompute),
        algorithm=AlgorithmConfig(name="ppo") if has_critic else AlgorithmConfig(),
        critic=CriticConfig() if has_critic else None,
        reference=ReferenceConfig() if has_reference else None,
    ),
    st.integers(1, 128),
    st.integers(2, 16),
    st.integers(0, 4),
    st.integers(16, 8192),
    st.integers(1, 3),
    st.integers(1, 2),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
shapes = st.sampled_from([shape(one) for one in (SMOLLM2, QWEN3_474M, QWEN3_1_7B, QWEN3_8B)])
gigabytes = st.floats(4, 300)


@given(configs, shapes, gigabytes)
def test_sizes_are_within_their_bounds_and_fit_wherever_the_smallest_would(
    config: RunConfig, model: ModelShape, free: float
) -> None:
    sizes = choose_sizes(config, gpu(free), model)
    assert 1 <= sizes.slots <= MAX_SLOTS and MIN_PASS <= sizes.micro_batch_tokens <= MAX_PASS
    assert sizes.cache_gb is not None and sizes.cache_gb > 0 and sizes.needed_gb is not None
    memory = Memory(config, model, dtype="bfloat16", is_compiled=sizes.is_compiled)
    engine = 2 * memory.cache_for(1) + 2e7 + memory.decoding(MAX_SLOTS)
    smallest = memory.fixed + memory.pass_bytes(MIN_PASS) + config.engine.replicas * engine
    if smallest < 0.9 * free * 1e9:
        assert sizes.needed_gb <= free and not memory_warning(sizes, config)
    assert sizes.cache_gb * 1e9 >= 0.9 * memory.cache_for(1), "a rollout of full length fits into the cache alone"


@pytest.mark.parametrize("model", [SMOLLM2, QWEN3_474M, QWEN3_1_7B])
def test_an_engine_and_a_learner_in_processes_on_one_gpu_need_contexts_and_room_for_staged_versions(
    model: dict[str, Any],
) -> None:
    thread, process = (run_config(engine=EngineConfig(process=is_process)) for is_process in (False, True))
    one, two = (choose_sizes(config, gpu(141), shape(model)) for config in (thread, process))
    assert one.needed_gb is not None and two.needed_gb is not None
    fixed = {"slots": one.slots, "cache_gb": one.cache_gb, "micro_batch_tokens": one.micro_batch_tokens}
    assert fixed == {"slots": two.slots, "cache_gb": two.cache_gb, "micro_batch_tokens": two.micro_batch_tokens}
    weights = 2 * shape(model).parameters / 1e9
    assert two.needed_gb - one.needed_gb == pytest.approx(2 * 0.65 + weights, abs=0.02), (
        "the driver's; a learner stages two versions where a thread copies two"
    )
    small = choose_sizes(process, gpu(one.needed_gb + 0.5), shape(model))
    assert small.needed_gb is not None and small.needed_gb <= one.needed_gb + 0.5, "they still fit"


@given(configs, shapes, gigabytes, st.floats(1, 4))
def test_more_memory_never_makes_a_pass_smaller(
    config: RunConfig, model: ModelShape, free: float, factor: float
) -> None:
    less, more = (choose_sizes(config, gpu(many), model) for many in (free, factor * free))
    assert less.micro_batch_tokens <= more.micro_batch_tokens


@given(configs, shapes, gigabytes)
def test_what_the_config_says_is_kept_and_choosing_twice_changes_nothing(
    config: RunConfig, model: ModelShape, free: float
) -> None:
    sizes = choose_sizes(config, gpu(free), model)
    sized = with_sizes(config, sizes)
    assert choose_sizes(sized, gpu(free / 2), model) == structs.replace(sizes, free_gb=round(free / 2, 2))
    own = structs.replace(
        config,
        model=structs.replace(config.model, dtype="float32"),
        engine=structs.replace(config.engine, slots=7, cache_gb=3.5),
        learner=structs.replace(config.learner, micro_batch_tokens=777, compile=True),
    )
    assert with_sizes(own, choose_sizes(own, gpu(free), model)) == own


def test_engines_the_critic_and_the_reference_are_counted() -> None:
    def needed(**tables: Any) -> float:
        config = run_config(engine=tables.pop("engine", EngineConfig(slots=8, cache_gb=1.0)), **tables)
        sizes = choose_sizes(structs.replace(config, learner=LearnerConfig(micro_batch_tokens=1024)), gpu(80), model)
        assert sizes.needed_gb is not None
        return sizes.needed_gb

    model = shape(QWEN3_474M)
    alone, weights = needed(), 2 * model.parameters / 1e9
    assert needed(engine=EngineConfig(slots=8, cache_gb=1.0, replicas=3)) == pytest.approx(
        alone + 2 * (weights + 1), abs=0.1
    )
    assert alone + weights < needed(reference=ReferenceConfig()) < alone + weights + 7, (
        "weights and the logits of a pass"
    )
    assert needed(reference=ReferenceConfig(device="cpu")) == alone
    assert needed(algorithm=AlgorithmConfig(name="ppo")) > alone + 9 * weights, "weights, optimizer, activations"


def test_slots_follow_the_load_and_the_cache() -> None:
    model = shape(SMOLLM2)
    few = structs.replace(
        LARGE, pipeline=PipelineConfig(groups_per_step=4, max_lag=1), data=structs.replace(LARGE.data, holdout=0)
    )
    assert choose_sizes(few, gpu(80), model).slots == 2 * 4 * 8
    shared = structs.replace(few, engine=EngineConfig(replicas=2))
    assert choose_sizes(shared, gpu(80), model).slots == 4 * 8
    small = structs.replace(LARGE, engine=EngineConfig(cache_gb=1.0))
    assert MIN_SLOTS <= choose_sizes(small, gpu(80), model).slots < 100, "its cache has room for no more"


def test_layers_are_compiled_only_where_the_run_is_long_enough() -> None:
    long, short = LARGE, structs.replace(LARGE, pipeline=PipelineConfig(steps=2, groups_per_step=8))
    assert choose_sizes(long, gpu(80), shape(QWEN3_474M)).is_compiled
    assert not choose_sizes(short, gpu(80), shape(QWEN3_474M)).is_compiled
    never = structs.replace(long, learner=LearnerConfig(compile=False))
    assert not choose_sizes(never, gpu(80), shape(QWEN3_474M)).is_compiled


def test_where_the_memory_is_not_known_only_what_needs_none_is_chosen() -> None:
    sizes = choose_sizes(LARGE, ModelDevice(is_gpu=True), shape(QWEN3_474M))
    assert (sizes.dtype, sizes.slots, sizes.cache_gb) == ("bfloat16", MAX_SLOTS, None)
    assert (sizes.micro_batch_tokens, sizes.needed_gb) == (8192, None)
    assert choose_sizes(LARGE, gpu(80), None).micro_batch_tokens == 8192
    assert shape_from({"model_type": "strange"}) is None


def test_the_shape_of_a_config_has_about_the_parameters_of_the_model() -> None:
    assert shape(QWEN3_474M).parameters == pytest.approx(474e6, rel=0.01)
    assert shape(QWEN3_8B).parameters == pytest.approx(8.19e9, rel=0.01)
    assert shape_from({"text_config": QWEN3_474M}) == shape_from(QWEN3_474M)


# ---- runs ------------------------------------------------------------------------------------------------------------


def small_run(folder: Path, *, max_lag: float) -> RunConfig:
    overrides: dict[str, object] = {
        "data.size": 300,
        "data.holdout": 8,
        "pipeline.steps": 1,
        "pipeline.groups_per_step": 2,
    }
    overrides |= {"rollout.group_size": 2, "pipeline.filter_zero_signal": "false", "engine.process": "false"}
    overrides |= {"run_dir": folder / "run", "pipeline.max_lag": max_lag, "engine.cache": "pages"}
    unset = ["engine.slots=", "learner.micro_batch_tokens="]
    return load(recipe_in(folder), RunConfig, [*(f"{key}={value}" for key, value in overrides.items()), *unset])


def stop_late(run_dir: Path) -> None:
    """As a run that was killed just before its end."""
    (run_dir / "summary.json").unlink()
    lines = (run_dir / "events.jsonl").read_bytes().splitlines(keepends=True)
    assert b'"run_ended"' in lines[-1]
    (run_dir / "events.jsonl").write_bytes(b"".join(lines[:-1]))


def chosen_in(run_dir: Path) -> list[SizesChosen]:
    return [event for event in read_events(run_dir / "events.jsonl") if isinstance(event, SizesChosen)]


def test_engine_and_learner_of_a_small_model_are_processes_on_one_gpu() -> None:
    small, large = shape(SMOLLM2), shape(QWEN3_474M)
    assert small.parameters < SMALL_MODEL < large.parameters
    chosen = with_process(run_config(), gpu(80), small)
    assert chosen.engine.process is True
    sizes = choose_sizes(chosen, gpu(80), small)
    assert sizes.has_processes and "engine and learner as processes" in sizes_in_words(sizes)
    elsewhere = structs.replace(gpu(80), engine_bytes=80e9)  # engines have GPUs of their own
    closed = structs.replace(gpu(80), is_shareable=False)
    for device, model in ((CPU, small), (gpu(80), large), (gpu(80), None), (elsewhere, small), (closed, small)):
        assert with_process(run_config(), device, model).engine.process is None


@pytest.mark.parametrize(
    ("tables", "device", "why"),
    [
        ({"engine": EngineConfig(process=False)}, gpu(80), "engine.process = false"),
        ({"engine": EngineConfig(replicas=2)}, gpu(80), "several engines or ranks"),
        ({"learner": LearnerConfig(gpu_share=0.5)}, gpu(80), "learner.gpu_share = 0.5"),
        ({"reference": ReferenceConfig()}, gpu(80), "a reference, a critic or a proximal policy"),
        ({"pipeline": PipelineConfig(steps=1, groups_per_step=1, max_lag=0)}, gpu(80), "lockstep"),
        ({}, ModelDevice(is_gpu=True, free_bytes=80e9, is_shareable=False), "processes cannot open each other's memory"),
        ({}, ModelDevice(is_gpu=True, free_bytes=80e9, shared_bytes=64e6), "64 MB of shared memory, and processes need 269"),
        ({}, gpu(4), "the memory of the GPU"),
        ({"engine": EngineConfig(process=True)}, gpu(4), ""),
        ({"engine": EngineConfig(kind="vllm")}, gpu(80), ""),
        ({}, CPU, ""),
        ({}, gpu(80), ""),
    ],
)  # fmt: skip
def test_the_line_of_sizes_says_why_engine_and_learner_are_threads(
    tables: dict[str, Any], device: ModelDevice, why: str
) -> None:
    said = why_threads(run_config(**tables), device, shape(SMOLLM2))
    assert said.startswith(why) and bool(said) == bool(why)
    sizes = structs.replace(choose_sizes(run_config(**tables), device, shape(SMOLLM2)), why_threads=said)
    assert (f"engine and learner as threads ({said})" in sizes_in_words(sizes)) == bool(why)


def test_of_a_larger_model_its_size_is_the_reason() -> None:
    assert why_threads(run_config(), gpu(80), shape(QWEN3_474M)) == "474M parameters, above 250M"
    assert why_threads(run_config(), gpu(80), None) == "a model whose size is not known"


@given(st.floats(1, 80), st.sampled_from(["auto", 32768]), st.sampled_from(["auto", 64]))
def test_processes_are_chosen_where_they_cost_no_request_and_no_pass_and_fit(
    free: float, tokens: Literal["auto"] | int, slots: Literal["auto"] | int
) -> None:
    learner, engine = LearnerConfig(micro_batch_tokens=tokens), EngineConfig(slots=slots)
    config, device = structs.replace(LARGE, learner=learner, engine=engine), gpu(free)
    chosen = with_process(config, device, shape(SMOLLM2))
    threads, sizes = (choose_sizes(one, device, shape(SMOLLM2)) for one in (config, chosen))
    processes = choose_sizes(
        structs.replace(config, engine=structs.replace(config.engine, process=True)), device, shape(SMOLLM2)
    )
    assert sizes == (processes if sizes.has_processes else threads)
    is_as_large = processes.slots == threads.slots and processes.micro_batch_tokens == threads.micro_batch_tokens
    if sizes.has_processes:
        assert is_as_large and not memory_warning(sizes, config)
    elif is_as_large and not memory_warning(processes, config):
        assert slots != "auto", "then the cache decides over the slots"
        assert (processes.cache_gb or 0) < (threads.cache_gb or 0)


def test_a_gpu_with_room_for_threads_alone_has_threads() -> None:
    kinds = {
        free: with_process(run_config(), gpu(free), shape(SMOLLM2)).engine.process for free in (4, 6, 8, 10, 16, 80)
    }
    assert kinds[4] is None and kinds[80] is True and list(kinds.values()) == sorted(kinds.values(), key=bool)


def test_a_container_with_little_shared_memory_has_threads() -> None:
    first_bytes = 2.0 * shape(SMOLLM2).parameters
    for shared, process in ((first_bytes - 1, None), (first_bytes, True), (None, True)):
        device = structs.replace(gpu(80), shared_bytes=shared)
        assert with_process(run_config(), device, shape(SMOLLM2)).engine.process is process


def test_a_run_that_keeps_its_sizes_gets_no_processes_that_it_did_not_have() -> None:
    before = choose_sizes(run_config(), gpu(8), shape(SMOLLM2))
    assert not before.has_processes, "as of every run that was recorded before there were any"
    config = with_recorded(run_config(), before)
    for free in (8, 80):
        assert with_process(config, gpu(free), shape(SMOLLM2), before) is config
    had = structs.replace(before, has_processes=True)
    for free in (80, 8, 4):
        assert with_process(config, gpu(free), shape(SMOLLM2), had).engine.process is True
    closed = structs.replace(gpu(80), is_shareable=False)
    assert with_process(config, closed, shape(SMOLLM2), had).engine.process is None


@pytest.mark.parametrize(
    "tables",
    [
        {"engine": EngineConfig(process=False)},
        {"engine": EngineConfig(replicas=2)},
        {"learner": LearnerConfig(gpu_share=0.5)},
        {"learner": LearnerConfig(ranks=2)},
        {"pipeline": PipelineConfig(steps=1, groups_per_step=1, max_lag=0)},
        {"pipeline": PipelineConfig(steps=1, groups_per_step=1, max_lag=1, rollouts_only=True)},
        {"learner": LearnerConfig(kind="outside")},
        {"reference": ReferenceConfig()},
        {"runtime": "ray"},
    ],
    ids=str,
)
def test_what_was_not_measured_as_processes_of_one_gpu_stays_as_the_config_says(tables: dict[str, Any]) -> None:
    config = run_config(**tables)
    assert with_process(config, gpu(80), shape(SMOLLM2)) is config


@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_run_says_and_records_its_sizes_and_in_lockstep_a_resume_keeps_them_and_says_if_they_do_not_fit(
    tmp_path: Path, max_lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = train(small_run(tmp_path, max_lag=max_lag))
    run_dir = tmp_path / "run"
    (first,) = chosen_in(run_dir)
    assert (first.sizes.slots, first.sizes.micro_batch_tokens, first.sizes.dtype) == (128, 8192, "float32")
    assert first.device == "cpu" and not first.is_kept and result.summary.sizes == first.sizes
    assert json.loads((run_dir / "summary.json").read_text())["sizes"]["slots"] == 128
    assert 'slots = "auto"' in (run_dir / "config.toml").read_text(), "the config stays as it was written"
    stop_late(run_dir)
    monkeypatch.setattr(build, "measure_device", lambda config: gpu(1e-3))
    seen = MemorySink()
    resume(run_dir, sinks=[seen])
    second = chosen_in(run_dir)[-1]
    warnings = [event.message for event in seen.events if isinstance(event, Warned)]
    if max_lag == 0:
        assert second.is_kept and (second.sizes.slots, second.sizes.dtype) == (128, "float32")
        assert len(warnings) == 1 and "Its sizes are those of its start" in warnings[0]
    else:
        assert not second.is_kept and (second.sizes.slots, second.sizes.dtype) == (8, "bfloat16")


def test_sizes_may_be_changed_when_a_run_is_resumed(tmp_path: Path) -> None:
    train(small_run(tmp_path, max_lag=0))
    stop_late(tmp_path / "run")
    resume(tmp_path / "run", changes=["learner.micro_batch_tokens=512", "engine.slots=4"])
    last = chosen_in(tmp_path / "run")[-1]
    assert (last.sizes.micro_batch_tokens, last.sizes.slots, last.is_kept) == (512, 4, True)


def test_a_dry_run_shows_sizes_as_an_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the driver's tool: 80 GB are free."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 76293\n")
    tool.chmod(0o755)
    config = recipe_in(tmp_path)
    here = CliRunner().invoke(app, ["train", str(config), "--dry-run", "--set", "model.device=cpu"])
    assert "estimated: on a CPU float32, 128 slots, micro-batches of 2,048 tokens\n" in here.output
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    there = CliRunner().invoke(app, ["train", str(config), "--dry-run", "--set", "engine.slots="])
    assert there.exit_code == 0 and "estimated: on a GPU bfloat16, " in there.output
    assert " of 80.0 GB)" in there.output and "GB of cache" in there.output


def test_a_learner_that_runs_out_of_memory_says_so_in_one_event_and_the_run_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, limit = Rank._add, 40

    def failing(self: Rank, rows: Sequence[TrainRow]) -> None:
        if num_computed(rows) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory (a test)")
        add(self, rows)

    monkeypatch.setattr(Rank, "_add", failing)
    seen = MemorySink()
    result = train(small_run(tmp_path, max_lag=1), sinks=[seen])
    (lowered,) = (event for event in seen.events if isinstance(event, MicroBatchLowered))
    assert lowered.micro_batch_tokens <= limit and result.summary.steps == 1
    assert alarm(lowered).startswith("the learner ran out of memory: micro-batches have ")
