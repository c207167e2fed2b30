"""Decoding and training on one GPU: the rule is tested everywhere, the driver's part of it where there is a GPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from millstream import EngineConfig, LearnerConfig, ModelConfig, PipelineConfig, RolloutConfig, RunConfig
from millstream.model.gpu_share import TRAINING_SHARE, Turns, training_share, training_stream
from millstream.run.build import gpu_share

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")


def config(**pipeline: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path="model"),
        pipeline=PipelineConfig(**pipeline),
        rollout=RolloutConfig(group_size=8),
    )


@pytest.mark.parametrize(
    ("num_requests", "max_lag", "share"),
    [
        (192, 2, TRAINING_SHARE),
        (384, 4, TRAINING_SHARE),
        (385, 4, 1.0),
        (1536, 2, 1.0),
        (64, 0, 1.0),
        (8, 0.5, TRAINING_SHARE),
    ],
)
def test_training_leaves_multiprocessors_free_where_few_requests_decode_beside_it(
    num_requests: int, max_lag: float, share: float
) -> None:
    assert training_share(num_requests, max_lag) == share


def test_the_share_of_a_run_follows_from_the_rollouts_that_may_be_in_flight() -> None:
    assert gpu_share(config(groups_per_step=8, max_lag=2), LearnerConfig()) == TRAINING_SHARE
    assert gpu_share(config(groups_per_step=64, max_lag=2), LearnerConfig()) == 1.0


def test_a_share_that_is_set_is_taken() -> None:
    assert gpu_share(config(groups_per_step=64, max_lag=2), LearnerConfig(gpu_share=0.5)) == 0.5


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="gpu_share"):
        LearnerConfig(gpu_share=share)


@pytest.mark.parametrize("engine", [EngineConfig(kind="vllm"), EngineConfig(process=True)])
def test_an_engine_in_another_process_leaves_training_the_whole_gpu_unless_a_share_is_set(engine: EngineConfig) -> None:
    run = RunConfig(
        model=ModelConfig(path="model"),
        engine=engine,
        pipeline=PipelineConfig(groups_per_step=8, max_lag=2),
        rollout=RolloutConfig(group_size=8),
    )
    assert gpu_share(run, LearnerConfig()) == 1.0
    assert gpu_share(run, LearnerConfig(gpu_share=0.5)) == 0.5


def test_a_capture_never_runs_beside_training_and_does_not_wait_for_it() -> None:
    turns = Turns()
    with turns.training(), turns.capture() as is_free:
        assert not is_free
    with turns.capture() as is_free:
        assert is_free


def test_training_lets_a_capture_that_found_it_at_work_go_first() -> None:
    turns, order = Turns(), list[str]()
    with turns.training(), turns.capture():
        pass
    waiting = threading.Thread(target=lambda: _train(turns, order))
    waiting.start()
    with turns.capture() as is_free:
        assert is_free, "training waits for it"
        order.append("captured")
    waiting.join()
    assert order == ["captured", "trained"]


def _train(turns: Turns, order: list[str]) -> None:
    with turns.training():
        order.append("trained")


def test_an_engine_that_wanted_to_capture_and_has_nothing_to_do_any_more_stops_training_once_only() -> None:
    turns = Turns()
    with turns.training(), turns.capture():
        pass
    with turns.training():  # after a short wait
        pass
    assert not turns._is_wanted.is_set()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("share", [0.25, TRAINING_SHARE, 1.0])
def test_a_kernel_of_training_runs_on_its_share_of_the_multiprocessors_and_no_other(share: float) -> None:
    from support.multiprocessors import where  # which imports Triton

    device = torch.device("cuda")
    num = torch.cuda.get_device_properties(device).multi_processor_count
    used = torch.full((64 * num,), -1, dtype=torch.int32, device=device)
    torch.cuda.synchronize()
    stream = training_stream(device, share)
    with torch.cuda.stream(stream):
        where[(len(used),)](used, 20_000, num_warps=8)
    stream.synchronize()
    found = len(set(used.tolist()))
    assert found == num if share == 1.0 else abs(found - share * num) < 8
