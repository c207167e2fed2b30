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
from millstream.learner import LearnerConfig
from millstream.learner.torch import TorchLearner
from millstream.model.attention import Indices, Packed, Rule, _Ragged, _Rectangles
from millstream.model.load import new_model
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
}


@pytest.mark.parametrize("changes", ALGORITHMS.values(), ids=ALGORITHMS)
def test_a_run_in_bfloat16_goes_to_its_end_and_its_audit_is_clean(changes: list[str], tmp_path: Path) -> None:
    small = ["pipeline.steps=4", "warmup.max_steps=20", "warmup.check_every=20", "data.holdout=32", "model.device=cuda"]
    words = [f"run_dir={tmp_path / 'run'}", "model.dtype=bfloat16", *small, *changes]
    result = train(load(ROOT / "recipes/demo.toml", RunConfig, words))
    assert result.summary.steps == 4 and result.summary.lag_max <= 2
    assert audit(tmp_path / "run").is_clean
