"""Conformance tests of losses and advantages, for your own. Needs pytest.

from millstream.testing.algorithm import AdvantageSuite, LossSuite

class TestMyLoss(LossSuite):
    loss = staticmethod(my_loss)
    is_reinforce_on_policy = True    # where the policy is the one that sampled, the gradient is that of -A log th

class TestMyAdvantage(AdvantageSuite):
    advantage = staticmethod(my_advantage)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millstream.algo.advantages import Rewards
from millstream.objective import LossInputs, TokenLoss

ROW_TOKENS = (3, 1, 7, 2)  # trained tokens of each row


def make_inputs(*, seed: int = 0, distance: float = 0.3, advantage: float | None = None) -> LossInputs:
    """Four rows. `distance`: how far the policy has moved from the behaviour policy, in log-probability per token."""
    rng = np.random.default_rng(seed)
    num_tokens = sum(ROW_TOKENS)
    behaviour = rng.uniform(-4, -0.1, num_tokens)
    advantages_R = rng.normal(size=len(ROW_TOKENS)) if advantage is None else np.full(len(ROW_TOKENS), advantage)
    logprobs = torch.tensor(behaviour + distance * rng.normal(size=num_tokens), dtype=torch.float64)
    return LossInputs(
        logprobs_N=logprobs.requires_grad_(),
        behaviour_N=torch.tensor(behaviour, dtype=torch.float64),
        proximal_N=logprobs.detach(),
        advantages_N=torch.tensor(np.repeat(advantages_R, ROW_TOKENS), dtype=torch.float64),
        row_N=torch.tensor(np.repeat(np.arange(len(ROW_TOKENS)), ROW_TOKENS)),
        entropy_N=torch.tensor(rng.uniform(0, 2, num_tokens), dtype=torch.float64).requires_grad_(),
        reference_N=torch.tensor(behaviour + distance * rng.normal(size=num_tokens), dtype=torch.float64),
    )


def _some_rows(x: LossInputs, rows: list[int]) -> LossInputs:
    """Only these rows, in this order."""
    at = torch.cat([torch.nonzero(x.row_N == row)[:, 0] for row in rows])
    number_N = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([ROW_TOKENS[row] for row in rows]))
    chosen = {name: None if value is None else value.detach()[at] for name, value in x._asdict().items()}
    some = LossInputs(**{**chosen, "row_N": number_N})  # type: ignore[arg-type]
    some.logprobs_N.requires_grad_()
    return some


class LossSuite:
    is_reinforce_on_policy = True  # whether its gradient is that of -A log th where the policy is the one that sampled

    loss: Callable[[LossInputs], Any]

    def of(self, x: LossInputs) -> Tensor:
        """One value per token."""
        found = type(self).loss(x)
        return found.loss_N if isinstance(found, TokenLoss) else found

    def gradient(self, x: LossInputs) -> Tensor:
        (found,) = torch.autograd.grad(self.of(x).sum(), x.logprobs_N)
        return found

    def test_there_is_a_loss_for_every_token_and_it_has_a_gradient(self) -> None:
        x = make_inputs()
        loss_N = self.of(x)
        assert loss_N.shape == x.logprobs_N.shape
        assert self.gradient(x).abs().max() > 0

    def test_neither_the_order_nor_the_split_of_rows_changes_the_gradient_of_a_row(self) -> None:
        x = make_inputs()
        whole = self.gradient(x)
        for rows in ([2, 0, 3, 1], [1], [3, 2]):
            found = self.gradient(_some_rows(x, rows))
            expected = torch.cat([whole[x.row_N == row] for row in rows])
            assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)

    def test_ratios_that_are_far_off_do_not_overflow(self) -> None:
        for distance in (50.0, 1e4):
            for sign in (1, -1):
                x = make_inputs(distance=0)
                far = (x.logprobs_N.detach() + sign * distance).requires_grad_()
                x = x._replace(logprobs_N=far, proximal_N=far.detach())
                assert self.of(x).isfinite().all() and self.gradient(x).isfinite().all()

    def test_on_policy_it_is_reinforce_if_it_says_so(self) -> None:
        if not self.is_reinforce_on_policy:
            return
        x = make_inputs(distance=0)
        assert torch.allclose(self.gradient(x), -x.advantages_N, rtol=1e-6, atol=1e-9)

    def test_what_was_good_becomes_likelier_and_what_was_bad_less_likely(self) -> None:
        assert self.gradient(make_inputs(distance=0, advantage=1.0)).sum() < 0
        assert self.gradient(make_inputs(distance=0, advantage=-1.0)).sum() > 0

    def test_metrics_are_sums_without_a_gradient(self) -> None:
        found = type(self).loss(make_inputs())
        if isinstance(found, TokenLoss):
            assert all(value.ndim == 0 and not value.requires_grad for value in found.metrics.values())


class AdvantageSuite:
    advantage: Callable[[Rewards], Any]

    def of(self, rewards: list[float]) -> Rewards:
        return np.asarray(type(self).advantage(np.array(rewards, dtype=np.float64)), dtype=np.float64)

    def test_there_is_one_finite_number_for_every_rollout(self) -> None:
        for rewards in ([0.0, 1.0, 1.0, 0.25], [3.0], [1e6, -1e6], [0.0, 0.0]):
            found = self.of(rewards)
            assert found.shape == (len(rewards),) and np.isfinite(found).all()

    def test_the_order_of_rollouts_does_not_matter(self) -> None:
        rewards = [0.0, 1.0, 0.5, 0.5, -2.0]
        order = [3, 1, 4, 0, 2]
        assert np.allclose(self.of([rewards[i] for i in order]), self.of(rewards)[order])

    def test_a_better_reward_is_never_a_worse_advantage(self) -> None:
        found = self.of([-1.0, 0.0, 0.5, 2.0])
        assert (np.diff(found) >= 0).all()

    def test_it_does_not_change_the_rewards(self) -> None:
        rewards = np.array([0.0, 1.0, 0.5])
        type(self).advantage(rewards)
        assert rewards.tolist() == [0.0, 1.0, 0.5]
