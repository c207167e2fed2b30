"""What can be said of `engine.kind = "vllm"` without vLLM."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from millstream.clock import RealClock
from millstream.engine import EngineConfig
from millstream.engine.native.worker import Report
from millstream.engine.vllm.arguments import Plan, engine_arguments, environment
from millstream.engine.vllm.config import VllmConfig
from millstream.engine.vllm.extension import Inside
from millstream.engine.vllm.worker import Flight, VllmWorker
from millstream.env.data import DataConfig
from millstream.errors import ConfigError, EngineError, WeightsError
from millstream.events.sinks import MemorySink
from millstream.learner import LearnerConfig
from millstream.model.lora import LoraConfig
from millstream.model.shared_memory import Layout
from millstream.run.build import build_engine
from millstream.run.check import check_combinations, check_config
from millstream.run.config import ModelConfig, RunConfig, TinyConfig
from support.tiny import make, request

VLLM = EngineConfig(kind="vllm")


def plan(*, is_cpu: bool = True, memory: str | None = "somewhere", **vllm: object) -> Plan:
    return Plan(
        folder="folder",
        memory=memory,
        layout=Layout(tensors=[]),
        slots=6000,
        prefill_tokens=4096,
        max_length=256,
        dtype="float32",
        is_cpu=is_cpu,
        vllm=VllmConfig(**vllm),  # type: ignore[arg-type]
    )


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_says_what_to_type_before_a_run_and_in_it() -> None:
    expected = r'vLLM is not installed here: pip install vllm.*docs/engines-vllm\.md.*engine\.kind = "torch"'
    with pytest.raises(ConfigError, match=expected):
        build_engine(VLLM, make("llama"), clock=RealClock(), sink=MemorySink())
    with pytest.raises(ConfigError, match=expected):
        check_config(RunConfig(model=ModelConfig(tiny=TinyConfig()), engine=VLLM, data=DataConfig(toy="sort_digits")))


def test_the_guide_that_the_error_names_is_there() -> None:
    assert (Path(__file__).parents[2] / "docs/engines-vllm.md").is_file()


def test_a_table_that_nothing_would_read_is_refused() -> None:
    with pytest.raises(ValueError, match=r'\[engine\.vllm\] table.*kind = "torch"'):
        EngineConfig(vllm=VllmConfig())


@pytest.mark.parametrize("wrong", [{"tensor_parallel": 0}, {"memory": 1.5}, {"cache_gib": 0.0}, {"max_model_len": 1}])
def test_values_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        VllmConfig(**wrong)  # type: ignore[arg-type]


def test_adapters_are_refused() -> None:
    learner = LearnerConfig(lora=LoraConfig(rank=4))
    with pytest.raises(ConfigError, match=r"\[learner\.lora\] with engine\.kind"):
        check_combinations(RunConfig(model=ModelConfig(tiny=TinyConfig()), engine=VLLM, learner=learner))


def test_every_option_reaches_vllm() -> None:
    given = engine_arguments(plan(is_cpu=False, memory=None, tensor_parallel=2, cache_gib=2.5, prefix_cache=False))
    assert given["tensor_parallel_size"] == 2 and given["gpu_memory_utilization"] == 0.4
    assert given["kv_cache_memory_bytes"] == int(2.5 * 2**30) and given["enable_prefix_caching"] is False
    assert given["load_format"] == "auto" and given["enforce_eager"] is False
    assert given["max_num_batched_tokens"] == given["max_num_seqs"] == 6000, "vLLM wants room for a token of each"
    assert engine_arguments(plan(is_cpu=False))["kv_cache_memory_bytes"] is None
    assert given["enable_chunked_prefill"] and not engine_arguments(plan())["enable_chunked_prefill"]
    assert engine_arguments(plan())["kv_cache_memory_bytes"] == 2**30 and engine_arguments(plan())["enforce_eager"]


def test_the_environment_is_as_it_was_once_vllm_has_started_and_the_users_own_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    before = dict(os.environ)
    with environment(plan()):
        assert os.environ["VLLM_NO_USAGE_STATS"] == "1" and os.environ["OMP_NUM_THREADS"] == "7"
    assert dict(os.environ) == before


def test_engines_that_start_at_once_in_one_process_do_not_take_the_environment_from_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    is_in, may_leave, seen = threading.Event(), threading.Event(), list[str | None]()

    def first() -> None:
        with environment(plan()):
            is_in.set()
            may_leave.wait(5)

    def second() -> None:
        is_in.wait(5)
        threading.Timer(0.05, may_leave.set).start()
        with environment(plan()):
            threads[0].join(5)
            seen.append(os.environ.get("VLLM_NO_USAGE_STATS"))

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert seen == ["1"] and "VLLM_NO_USAGE_STATS" not in os.environ


class Worker(Inside):
    """Of vLLM, as far as a reload of weights goes: a model that takes some of them and says which."""

    def __init__(self, taken: set[str]) -> None:
        self.device = "cpu"
        self.model: Any = torch.nn.Linear(2, 2)
        self.model.load_weights = lambda weights: taken
        self.get_model = lambda: self.model

    def reload_weights(self, **source: Any) -> None:
        self.model.load_weights(source)


def test_a_layer_that_no_weights_came_for_is_an_error_and_not_a_warning() -> None:
    with pytest.raises(WeightsError, match="no weights for bias"):
        Worker({"weight"}).millstream_load_file("folder")


def test_a_token_that_was_sampled_before_the_weights_it_would_be_recorded_for_breaks_the_engine() -> None:
    worker = VllmWorker(plan(), lambda report: None)
    worker._version, worker._loaded_at = 3, 100.0
    flight = Flight(request(0, (4, 5)), None, is_watched=False)

    def sampled_at(seconds: float) -> Any:
        part = SimpleNamespace(token_ids=[7], logprobs=[{7: SimpleNamespace(logprob=-1.0)}], finish_reason=None)
        return SimpleNamespace(outputs=[part], finished=False, metrics=SimpleNamespace(last_token_ts=seconds))

    worker._take(flight, sampled_at(100.5))
    assert flight.versions == [3]
    with pytest.raises(EngineError, match="before version 3 came late"):
        worker._take(flight, sampled_at(99.5))


def test_a_vllm_that_does_not_start_is_reported_with_the_reason() -> None:
    told = list[Report]()
    worker = VllmWorker(plan(), told.append)
    asyncio.run(worker.run(asyncio.Queue()))  # there is no such folder, or no vLLM
    assert [report.broken is None for report in told] == [False] and "Error: " in str(told[0].broken)
