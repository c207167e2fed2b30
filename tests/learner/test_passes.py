"""Out of memory: the rows of a pass that failed are computed again in smaller passes, and every row counts once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from millstream.algo import AlgorithmConfig, recipe
from millstream.errors import LearnerError
from millstream.learner import CriticConfig, LearnerConfig
from millstream.learner.critic import TorchCritic
from millstream.learner.optimizer import Optimizer
from millstream.learner.scorer import TorchScorer
from millstream.learner.torch import TorchLearner
from millstream.model.policy import layers_of
from millstream.types import TrainRow
from support.learners import rows
from support.tiny import make, make_small

AT = ["forward", "first layer", "last layer", "embeddings", "head"]


def exhaust(model: Any, limit: int, at: str) -> list[int]:
    """Makes passes of more than `limit` tokens fail, as torch does without memory: while they go forward, or in the backward
    pass when the gradient reaches that place. Returns the tokens of all passes that were begun, as they begin."""
    begun: list[int] = []
    layers = layers_of(model)

    def fail(*_: Any) -> None:
        if begun[-1] > limit:
            raise torch.OutOfMemoryError("CUDA out of memory (a test)")

    def begin(module: Any, args: Any, options: Any) -> None:
        begun.append(options["input_ids"].numel() if "input_ids" in options else args[0].numel())

    model.get_decoder().register_forward_pre_hook(begin, with_kwargs=True)
    if at == "forward":
        layers[-1].register_forward_hook(fail)
    elif at in ("first layer", "last layer"):
        layers[0 if at == "first layer" else -1].register_full_backward_pre_hook(fail)
    else:
        module = model.get_input_embeddings() if at == "embeddings" else model.get_output_embeddings()
        module.weight.register_hook(fail)
    return begun


def learner_of(dtype: torch.dtype, *, is_fixed: bool = False, **config: Any) -> TorchLearner:
    objective = recipe.objective(AlgorithmConfig(entropy_bonus=0.01), max_tokens=16)
    return TorchLearner(make_small("qwen3", dtype), LearnerConfig(**config), objective, is_fixed=is_fixed)


def total(batch: Sequence[TrainRow]) -> int:
    return sum(len(row.tokens) for row in batch)


def sums(one: Optimizer) -> torch.Tensor:
    return torch.cat([grad.flatten() for grad in one.gradients().values()]).clone()


def accumulate(one: TorchLearner | TorchCritic, *batches: Sequence[TrainRow]) -> None:
    for batch in batches:
        asyncio.run(one.accumulate(batch))


@pytest.mark.parametrize(
    ("at", "dtype", "recompute", "share"),
    [
        *((at, dtype, False, 2) for at in AT for dtype in (torch.float32, torch.bfloat16)),
        *(("first layer", dtype, True, 5) for dtype in (torch.float32, torch.bfloat16)),
    ],
)
def test_gradients_and_metrics_after_running_out_of_memory_are_those_of_an_undisturbed_learner(
    at: str, dtype: torch.dtype, recompute: bool, share: int
) -> None:
    before, batch = rows(4, seed=1), rows(12)
    calm, shaken = (learner_of(dtype, recompute=recompute) for _ in range(2))
    accumulate(calm, before, batch)
    accumulate(shaken, before)
    begun = exhaust(shaken.model, total(batch) // share, at)
    accumulate(shaken, batch)
    assert max(begun) > total(batch) // share, "it did run out of memory"
    expected, found = sums(calm.optimizer), sums(shaken.optimizer)
    assert expected.norm() > 1e-2
    assert (found - expected).norm() < (1e-5 if dtype == torch.float32 else 2e-2) * expected.norm()
    metrics, others = asyncio.run(calm.step()), asyncio.run(shaken.step())
    assert np.allclose(shaken.log_ratios(), calm.log_ratios(), atol=1e-3 if dtype == torch.float32 else 5e-2)
    assert others.pop("micro_batch_tokens") <= total(batch) // share
    assert others == pytest.approx(metrics, rel=1e-4 if dtype == torch.float32 else 2e-2, abs=1e-4)


def test_without_the_undoing_rows_would_count_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    batch = rows(12)
    calm, shaken = learner_of(torch.float32), learner_of(torch.float32)
    accumulate(calm, batch)
    exhaust(shaken.model, total(batch) // 2, "first layer")
    monkeypatch.setattr(Optimizer, "added", lambda self, since: set())
    accumulate(shaken, batch)
    expected = sums(calm.optimizer)
    assert (sums(shaken.optimizer) - expected).norm() > 0.1 * expected.norm()


def test_later_passes_stay_smaller_and_it_is_reported_once() -> None:
    batch = rows(12)
    one = learner_of(torch.float32)
    begun = exhaust(one.model, 3 * total(batch) // 4, "last layer")
    accumulate(one, batch)
    assert asyncio.run(one.step())["micro_batch_tokens"] == total(batch) // 2
    begun.clear()
    accumulate(one, batch)
    assert len(begun) >= 2 and max(begun) <= total(batch) // 2, "none was tried in full again"
    assert "micro_batch_tokens" not in asyncio.run(one.step())
    assert len(asyncio.run(one.logprobs(batch))) == len(batch)


def test_a_row_that_is_too_much_alone_ends_with_what_to_set() -> None:
    one = learner_of(torch.float32)
    exhaust(one.model, 1, "first layer")
    with pytest.raises(LearnerError, match=r"1 rows, \d+ tokens, and a row cannot be split: set engine\.cache_gb"):
        accumulate(one, rows(6))


def test_in_lockstep_no_pass_is_made_smaller() -> None:
    batch = rows(6)
    one = learner_of(torch.float32, is_fixed=True)
    exhaust(one.model, 3 * total(batch) // 4, "forward")
    with pytest.raises(LearnerError, match=rf"max_lag = 0 .* set learner\.micro_batch_tokens = {total(batch) // 2}"):
        accumulate(one, batch)


def test_a_compiled_learner_fills_no_pass_up_beyond_its_limit() -> None:
    batch = rows(12)
    one = learner_of(torch.float32, micro_batch_tokens=8 * total(batch))
    one.rank._quantum = 2 * total(batch)  # as `compile` sets it
    begun = exhaust(one.model, total(batch), "forward")
    accumulate(one, batch)
    assert begun[0] == 2 * total(batch) and begun[-1] <= total(batch) // 2


@pytest.mark.parametrize("at", ["forward", "first layer"])
def test_a_critic_and_a_scorer_survive_it_as_well(at: str) -> None:
    def with_values(row: TrainRow) -> TrainRow:
        ones = np.ones(len(row.tokens), np.float32)
        return structs.replace(row, values=0 * ones, returns=ones)

    batch = [with_values(row) for row in rows(12)]
    calm, shaken = (TorchCritic(make("qwen3"), CriticConfig()) for _ in range(2))
    exhaust(shaken.rank.values.body, total(batch) // 2, at)
    for one in (calm, shaken):
        accumulate(one, batch)
    expected = sums(calm.rank.optimizer)
    assert (sums(shaken.rank.optimizer) - expected).norm() < 1e-5 * expected.norm()
    assert asyncio.run(shaken.step()) == pytest.approx(asyncio.run(calm.step()), rel=1e-4)
    plain, tight = (TorchScorer(make("qwen3")) for _ in range(2))
    exhaust(tight.rank._policy.model, total(batch) // 2, "forward")
    for mine, other in zip(asyncio.run(tight.score(batch)), asyncio.run(plain.score(batch)), strict=True):
        assert mine == pytest.approx(other, abs=1e-5)
