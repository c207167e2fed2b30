"""On a GPU: the fast ways give what their plain twins give, within a stated bound. `make test-gpu`."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from millstream import RunConfig, train
from millstream.algo import AlgorithmConfig, recipe
from millstream.audit import audit
from millstream.config import load
from millstream.engine.native.build import make_runner
from millstream.engine.native.paged import PagedRunner
from millstream.events import SizesChosen
from millstream.events.sinks import MemorySink
from millstream.learner import LearnerConfig
from millstream.learner.torch import TorchLearner
from millstream.model.attention import Indices, Packed, Rule, _Ragged, _Rectangles
from millstream.model.load import new_model
from millstream.run.prepare import prepare_run
from millstream.run.sizes import memory_warning
from millstream.types import TrainRow
from support.tiny import CONFIGS, VOCABULARY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
CUDA = torch.device("cuda")
ROOT = Path(__file__).parents[2]


def layout() -> list[Indices]:
    """Two prompts with three answers each, and a row that shares nothing."""
    rows: list[Indices] = []
    end = 0
    for prompt_length, answers in ((37, (100, 5, 64)), (200, (1, 300, 17)), (0, (129,))):
        prompt, end = np.arange(end, end + prompt_length), end + prompt_length
        for answer in answers:
            rows.append(np.concatenate([prompt, np.arange(end, end + answer)]))
            end += answer
    return rows


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
@pytest.mark.parametrize("dim", [64, 22])
def test_ragged_attention_and_its_gradient_are_those_of_rectangles(
    window: int | None, heads: tuple[int, int], dim: int
) -> None:
    rows, rule = layout(), Rule(None, window, None)
    num_tokens = int(max(row.max() for row in rows)) + 1
    torch.manual_seed(0)
    shapes = [(1, h, num_tokens, dim) for h in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(shape, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    exact = [value.detach().float().requires_grad_() for value in inputs]
    pull = torch.randn(1, num_tokens, heads[0], dim, device=CUDA)
    found = _Ragged(rows, CUDA).attend(*inputs, rule)
    expected = _Rectangles(rows, CUDA).attend(*exact, rule)
    assert torch.allclose(found.float(), expected, atol=0.03)
    (found.float() * pull).sum().backward()
    (expected * pull).sum().backward()
    for value, twin in zip(inputs, exact, strict=True):
        assert value.grad is not None and twin.grad is not None
        assert (value.grad.float() - twin.grad).norm() < 0.02 * twin.grad.norm()


def rows(count: int) -> list[TrainRow]:
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, VOCABULARY, 20)
    made = []
    for _ in range(count):
        answer = int(rng.integers(4, 120))
        mask = np.arange(20 + answer) >= 20
        made.append(
            TrainRow(
                tokens=np.concatenate([prompt, rng.integers(3, VOCABULARY, answer)]).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, -4.5, 0).astype(np.float32),
                advantages=np.full(20 + answer, rng.normal(), dtype=np.float32),
            )
        )
    return made


def gradient(one: TorchLearner, batch: list[TrainRow]) -> torch.Tensor:
    asyncio.run(one.accumulate(batch))
    found = torch.cat([grad.flatten() for grad in one.optimizer.gradients().values()]).float().cpu()
    one.optimizer._adam.zero_grad()
    return found


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("compiled", [False, True])
def test_in_bfloat16_log_probabilities_and_gradients_are_near_those_in_float32(name: str, compiled: bool) -> None:
    model = new_model(CONFIGS[name](), seed=0, dtype=torch.bfloat16)
    objective = recipe.objective(AlgorithmConfig(), max_tokens=128)
    exact = TorchLearner(copy.deepcopy(model).float(), LearnerConfig(), objective)
    one = TorchLearner(model.to(CUDA), LearnerConfig(compile=compiled), objective)
    batch = rows(8)
    for mine, other in zip(asyncio.run(one.logprobs(batch)), asyncio.run(exact.logprobs(batch)), strict=True):
        assert np.abs(mine - other).max() < 0.02
    found, expected = gradient(one, batch), gradient(exact, batch)
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_a_float32_learner_on_a_gpu_is_that_of_the_cpu() -> None:
    model = new_model(CONFIGS["qwen3"](), seed=0)
    objective = recipe.objective(AlgorithmConfig(), max_tokens=128)
    exact = TorchLearner(copy.deepcopy(model), LearnerConfig(), objective)
    one = TorchLearner(model.to(CUDA), LearnerConfig(), objective)
    found, expected = gradient(one, rows(8)), gradient(exact, rows(8))
    assert (found - expected).norm() < 1e-3 * expected.norm()


def test_nothing_but_the_step_waits_for_the_device() -> None:
    model = new_model(CONFIGS["qwen3"](), seed=0, dtype=torch.bfloat16).to(CUDA)
    one = TorchLearner(model, LearnerConfig(), recipe.objective(AlgorithmConfig(), max_tokens=128))
    asyncio.run(one.accumulate(rows(4)))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        one.rank.accumulate(rows(4))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert Packed(layout(), CUDA).position_ids.is_cuda


ALGORITHMS = {
    "a reference": ["algorithm={name='dapo', kl='loss', kl_estimator='k3', kl_coefficient=0.01}"],
    "a critic": ["algorithm={name='ppo'}", "pipeline.filter_zero_signal=false"],
    "adapters": ["learner.lora={rank=4}"],
    "an engine in a process": ["engine.process=true"],
    "adapters, and an engine in a process": ["learner.lora={rank=4}", "engine.process=true"],
}


@pytest.mark.parametrize("changes", ALGORITHMS.values(), ids=ALGORITHMS)
def test_a_run_in_bfloat16_goes_to_its_end_and_its_audit_is_clean(changes: list[str], tmp_path: Path) -> None:
    small = ["pipeline.steps=4", "warmup.max_steps=20", "warmup.check_every=20", "data.holdout=32", "model.device=cuda"]
    words = [f"run_dir={tmp_path / 'run'}", "model.dtype=bfloat16", *small, *changes]
    result = train(load(ROOT / "recipes/demo.toml", RunConfig, words))
    assert result.summary.steps == 4 and result.summary.lag_max <= 2
    assert audit(tmp_path / "run").is_clean


# ---- sizes -----------------------------------------------------------------------------------------------------------


def plain_demo(*changes: str) -> RunConfig:
    """The demo without the sizes that it sets for a CPU."""
    return load(ROOT / "recipes/demo.toml", RunConfig, ["engine.slots=", "learner.micro_batch_tokens=", *changes])


def test_by_default_a_gpu_gets_bfloat16_pages_and_compiled_layers_where_the_run_is_long() -> None:
    long, short = (prepare_run(plain_demo(f"pipeline.steps={steps}", "warmup=")) for steps in (10**6, 10))
    assert long.model.device.type == "cuda" and long.model.dtype == torch.bfloat16
    assert (long.config.learner.compile, short.config.learner.compile) == (True, False)
    assert isinstance(make_runner(long.model, long.config.engine), PagedRunner)
    assert long.config.engine.slots == 512, "48 groups of 8 can be in flight, and 512 tasks are held out"
    assert long.config.learner.micro_batch_tokens == 8192, "a batch has no more tokens"
    assert not memory_warning(long.sizes, long.written)


def test_a_run_with_all_defaults_goes_to_its_end_and_says_its_sizes(tmp_path: Path) -> None:
    changes = ["pipeline.steps=4", "warmup.max_steps=20", "warmup.check_every=20", "data.holdout=32"]
    seen = MemorySink()
    result = train(plain_demo(f"run_dir={tmp_path / 'run'}", *changes), sinks=[seen])
    (chosen,) = (event for event in seen.events if isinstance(event, SizesChosen))
    assert chosen.device.startswith("cuda") and chosen.sizes.dtype == "bfloat16" and chosen.sizes.needed_gb is not None
    assert result.summary.steps == 4 and audit(tmp_path / "run").is_clean


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_learner_that_really_runs_out_of_memory_continues_with_the_gradient_of_an_undisturbed_one(
    dtype: torch.dtype, compiled: bool
) -> None:
    batch, objective = rows(4000), recipe.objective(AlgorithmConfig(), max_tokens=128)
    config = LearnerConfig(micro_batch_tokens=1 << 19, compile=compiled)
    model = new_model(CONFIGS["qwen3"](), seed=0, dtype=dtype).to(CUDA)
    calm = gradient(TorchLearner(copy.deepcopy(model), config, objective), batch)
    one = TorchLearner(model, config, objective)
    torch.cuda.empty_cache()
    total, room = torch.cuda.get_device_properties(CUDA).total_memory, 2**28 * dtype.itemsize
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
    try:
        asyncio.run(one.accumulate(batch))
        found = torch.cat([grad.flatten() for grad in one.optimizer.gradients().values()]).float().cpu()
        assert asyncio.run(one.step())["micro_batch_tokens"] < sum(len(row.tokens) for row in batch)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    assert (found - calm).norm() < (0.02 if dtype == torch.bfloat16 else 1e-3) * calm.norm()


def test_an_engine_and_a_learner_with_chosen_sizes_fit_on_the_gpu_and_the_estimate_is_near(tmp_path: Path) -> None:
    """365M parameters; 64 rollouts of up to 1,024 tokens a step, which random weights hardly ever end earlier."""
    words = ["model.tiny.hidden=1024", "model.tiny.layers=28", "model.tiny.heads=16", "model.tiny.context=2048"]
    words += ["rollout.max_tokens=1024", "pipeline.groups_per_step=8", "pipeline.steps=3", "data.holdout=8", "warmup="]
    words += ["pipeline.filter_zero_signal=false", f"run_dir={tmp_path / 'run'}", "engine.prefill_tokens=4096"]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    result = train(plain_demo(*words))
    sizes, used = result.summary.sizes, torch.cuda.max_memory_allocated() / 1e9
    assert result.summary.steps == 3 and sizes is not None and sizes.needed_gb is not None
    assert 0.4 * sizes.needed_gb < used < 1.1 * sizes.needed_gb, (used, sizes)
