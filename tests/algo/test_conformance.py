"""The suites that others may hold their parts to, held to ours; and, of every promise, a part that breaks it and is caught."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millstream.algo import AlgorithmConfig, advantages, losses, recipe
from millstream.learner import Learner, LearnerConfig
from millstream.learner.torch import TorchLearner
from millstream.objective import LossInputs, TokenLoss
from millstream.testing.algorithm import AdvantageSuite, LossSuite
from millstream.testing.learner import LearnerSuite
from millstream.types import TrainRow
from support.tiny import VOCABULARY, make


class TestTorchLearner(LearnerSuite):
    vocabulary = VOCABULARY

    def open(self, num_steps: int | None = None) -> Learner:
        config = LearnerConfig(learning_rate=1e-3, schedule="linear")
        return TorchLearner(
            make("qwen3"), config, recipe.objective(AlgorithmConfig(), max_tokens=32), num_steps=num_steps
        )


@pytest.mark.slow  # a CPU takes its time over bfloat16
class TestTorchLearnerInBfloat16(TestTorchLearner):
    tolerance = 0.5  # a weight of bfloat16 may round the other way

    def open(self, num_steps: int | None = None) -> Learner:
        objective = recipe.objective(AlgorithmConfig(name="grpo"), max_tokens=32)
        config = LearnerConfig(learning_rate=1e-2)
        return TorchLearner(make("llama").to(torch.bfloat16), config, objective, num_steps=num_steps)


class TestTorchLearnerWithMiniBatches(TestTorchLearner):
    def open(self, num_steps: int | None = None) -> Learner:
        objective = recipe.objective(AlgorithmConfig(name="decoupled_ppo"), max_tokens=32)
        config = LearnerConfig(learning_rate=1e-3, mini_batches=2, recompute=True)
        return TorchLearner(make("qwen3"), config, objective, num_steps=num_steps)


class Plain(LossSuite):
    loss = staticmethod(losses.reinforce)


class TruncatedIs(LossSuite):
    loss = staticmethod(partial(losses.truncated_is, cap=2.0))


class Cispo(LossSuite):
    loss = staticmethod(partial(losses.cispo, clip_low=1.0, clip_high=4.0))


class Topr(LossSuite):
    loss = staticmethod(partial(losses.topr, cap=1.0))


class Ppo(LossSuite):
    loss = staticmethod(partial(losses.ppo, clip_low=0.2, clip_high=0.2, dual_clip=3.0))


class Decoupled(LossSuite):
    loss = staticmethod(partial(losses.decoupled_ppo, clip_low=0.2, clip_high=0.2, cap=5.0))


class Gspo(LossSuite):
    loss = staticmethod(partial(losses.gspo, clip_low=0.2, clip_high=0.2))


class Kimi(LossSuite):
    loss = staticmethod(partial(losses.kimi, regularisation=0.1))


LOSSES = (Plain, TruncatedIs, Cispo, Topr, Ppo, Decoupled, Gspo, Kimi)
PROMISES = [name for name in dir(LossSuite) if name.startswith("test_")]


@pytest.mark.parametrize("suite", LOSSES, ids=lambda suite: suite.__name__)
@pytest.mark.parametrize("promise", PROMISES)
def test_every_loss_keeps_the_promises_of_losses(suite: type[LossSuite], promise: str) -> None:
    getattr(suite(), promise)()


@pytest.mark.parametrize("name", advantages.ADVANTAGES)
@pytest.mark.parametrize("promise", [name for name in dir(AdvantageSuite) if name.startswith("test_")])
def test_every_advantage_keeps_the_promises_of_advantages(name: str, promise: str) -> None:
    class Suite(AdvantageSuite):
        advantage = staticmethod(advantages.ADVANTAGES[name].of_group)

    getattr(Suite(), promise)()


def averaged(x: LossInputs) -> TokenLoss:
    """Breaks the split: its weight is a mean over the micro-batch."""
    weight = (x.logprobs_N - x.behaviour_N).exp().mean().detach()
    return TokenLoss(-weight * x.advantages_N * x.logprobs_N, {})


def overflowing(x: LossInputs) -> TokenLoss:
    return TokenLoss(-(x.logprobs_N - x.behaviour_N).exp() * x.advantages_N, {})


def upside_down(x: LossInputs) -> TokenLoss:
    return TokenLoss(x.advantages_N * x.logprobs_N, {})


def doubled(x: LossInputs) -> TokenLoss:
    return TokenLoss(-2 * x.advantages_N * x.logprobs_N, {"size": x.logprobs_N.sum()})


def summed(x: LossInputs) -> Any:
    return (-x.advantages_N * x.logprobs_N).sum()


@pytest.mark.parametrize(
    ("loss", "promise"),
    [
        (averaged, "test_neither_the_order_nor_the_split_of_rows_changes_the_gradient_of_a_row"),
        (overflowing, "test_ratios_that_are_far_off_do_not_overflow"),
        (upside_down, "test_what_was_good_becomes_likelier_and_what_was_bad_less_likely"),
        (doubled, "test_on_policy_it_is_reinforce_if_it_says_so"),
        (doubled, "test_metrics_are_sums_without_a_gradient"),
        (summed, "test_there_is_a_loss_for_every_token_and_it_has_a_gradient"),
    ],
)
def test_a_loss_that_breaks_a_promise_is_caught(loss: Any, promise: str) -> None:
    class Suite(LossSuite):
        pass

    Suite.loss = staticmethod(loss)  # type: ignore[assignment]
    with pytest.raises(AssertionError):
        getattr(Suite(), promise)()


class Forgetful(TorchLearner):
    """Restores the weights, and not the moments."""

    def restore(self, folder: Path) -> None:
        super().restore(folder)
        self.optimizer._adam.state.clear()


class Averaging(TorchLearner):
    """Divides every micro-batch by itself: the split matters."""

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        await super().accumulate(rows)
        for gradient in self.optimizer.gradients().values():
            gradient /= 1 + len(rows)


class Unmasked(TorchLearner):
    """Looks at what is not trained."""

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        await super().accumulate([row for row in rows if np.isfinite(row.advantages).all()])


@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        (Forgetful, "test_it_resumes_from_a_snapshot_whatever_came_after_it"),
        (Averaging, "test_any_split_and_order_of_rows_gives_the_same_step"),
        (Unmasked, "test_what_is_not_trained_changes_nothing"),
    ],
)
def test_a_learner_that_breaks_a_promise_is_caught(kind: type[TorchLearner], promise: str, tmp_path: Path) -> None:
    class Suite(LearnerSuite):
        vocabulary = VOCABULARY

        def open(self, num_steps: int | None = None) -> Learner:
            objective = recipe.objective(AlgorithmConfig(), max_tokens=32)
            return kind(make("qwen3"), LearnerConfig(learning_rate=1e-3), objective, num_steps=num_steps)

    test = getattr(Suite(), promise)
    with pytest.raises(AssertionError):
        test(tmp_path) if "snapshot" in promise else test()
