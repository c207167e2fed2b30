"""Losses and advantages against numbers worked out by hand and against finite differences; and what is refused."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millstream.algo import AlgorithmConfig, aggregate, check, losses, recipe
from millstream.algo.advantages import dr_grpo, grpo, has_signal
from millstream.errors import ConfigError
from millstream.model.objective import LossInputs, TokenLoss


def inputs(th: list[float], mu: list[float], prox: list[float], advantage: list[float]) -> LossInputs:
    """From probabilities, in double precision."""
    as_log = [torch.tensor(values, dtype=torch.float64).log() for values in (th, mu, prox)]
    return LossInputs(*as_log, torch.tensor(advantage, dtype=torch.float64), torch.zeros(len(th), dtype=torch.long))


def values(loss: TokenLoss) -> list[float]:
    return [round(float(value), 6) for value in loss.loss_N]


def test_grpo_divides_by_the_population_deviation() -> None:
    assert np.allclose(grpo(np.array([1.0, 0.0, 0.0, 1.0])), [1, -1, -1, 1], atol=1e-5)
    assert np.allclose(grpo(np.array([3.0, 1.0])), [1, -1], atol=1e-5)
    assert np.allclose(grpo(np.array([0.5, 0.5])), [0, 0])


def test_dr_grpo_only_centres() -> None:
    assert np.allclose(dr_grpo(np.array([3.0, 1.0, 2.0])), [1, -1, 0])


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=16))
def test_advantages_sum_to_zero_and_vanish_without_signal(rewards: list[float]) -> None:
    array = np.array(rewards)
    for function in (grpo, dr_grpo):
        assert abs(function(array).sum()) < 1e-6
        if not has_signal(array):
            assert np.abs(function(array)).max() < 1e-8


def test_truncated_is_by_hand() -> None:
    x = inputs(th=[0.5, 0.2], mu=[0.25, 0.4], prox=[0.5, 0.2], advantage=[1.0, -2.0])
    # ratios 2 (cut to 1) and 0.5
    assert values(losses.truncated_is(x, cap=1.0)) == [
        round(-1 * 1.0 * math.log(0.5), 6),
        round(-0.5 * -2.0 * math.log(0.2), 6),
    ]
    assert float(losses.truncated_is(x, cap=1.0).metrics["truncated_share"]) == 1


def test_ppo_by_hand() -> None:
    x = inputs(th=[0.5, 0.5, 0.1, 0.1], mu=[0.25, 0.25, 0.2, 0.2], prox=[0.3] * 4, advantage=[1.0, -1.0, 1.0, -1.0])
    # ratios 2, 2, 0.5, 0.5 clipped to [0.8, 1.3]: the pessimistic side of each
    assert values(losses.ppo(x, clip_low=0.2, clip_high=0.3)) == [-1.3, 2.0, -0.5, 0.8]


def test_decoupled_ppo_by_hand() -> None:
    x = inputs(th=[0.6, 0.1], mu=[0.2, 0.4], prox=[0.4, 0.2], advantage=[1.0, -1.0])
    # prox/mu: 2 (cut to 1.5) and 0.5; th/prox: 1.5 clipped to 1.2, and 0.5 clipped to 0.8
    loss = losses.decoupled_ppo(x, clip_low=0.2, clip_high=0.2, cap=1.5)
    assert values(loss) == [-1.8, 0.4]
    assert float(loss.metrics["clipped_share"]) == 2 and float(loss.metrics["truncated_share"]) == 1


LOSSES = {
    "truncated_is": partial(losses.truncated_is, cap=1.0),
    "ppo": partial(losses.ppo, clip_low=0.2, clip_high=0.2),
    "decoupled_ppo": partial(losses.decoupled_ppo, clip_low=0.2, clip_high=0.2, cap=5.0),
    "reinforce": losses.reinforce,
    "corrected": lambda x: losses.corrected(x, losses.reinforce(x), cap=5.0),
}


def surrogate(name: str, x: LossInputs, logprobs: torch.Tensor) -> torch.Tensor:
    """The function whose gradient the loss claims to be, with every stop-gradient written out as a constant."""
    ratio = (x.logprobs_N - x.behaviour_N).exp()
    weight = (x.proximal_N - x.behaviour_N).exp().clamp(max=5.0)
    match name:
        case "truncated_is":
            return (-ratio.clamp(max=1.0) * x.advantages_N * logprobs).sum()
        case "corrected":
            return (-weight * x.advantages_N * logprobs).sum()
    return LOSSES[name](x._replace(logprobs_N=logprobs)).loss_N.sum()


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_agree_with_finite_differences(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    th, mu, prox = (torch.rand(12, generator=generator, dtype=torch.float64) * 0.8 + 0.1 for _ in range(3))
    advantages = torch.randn(12, generator=generator, dtype=torch.float64)
    x = LossInputs(th.log().requires_grad_(), mu.log(), prox.log(), advantages, torch.zeros(12, dtype=torch.long))
    (gradient,) = torch.autograd.grad(LOSSES[name](x).loss_N.sum(), x.logprobs_N)
    epsilon = 1e-6
    for index in range(12):
        shift = torch.zeros(12, dtype=torch.float64)
        shift[index] = epsilon
        logprobs = x.logprobs_N.detach()
        with torch.no_grad():
            up, down = surrogate(name, x, logprobs + shift), surrogate(name, x, logprobs - shift)
        assert math.isclose(float(gradient[index]), float((up - down) / (2 * epsilon)), rel_tol=1e-4, abs_tol=1e-7)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name: str) -> None:
    logprobs = torch.tensor([-0.5, -1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([1.0, -0.5, 2.0])
    same = logprobs.detach()
    x = LossInputs(logprobs, same, same, advantages, torch.zeros(3, dtype=torch.long))
    (gradient,) = torch.autograd.grad(LOSSES[name](x).loss_N.sum(), logprobs)
    assert torch.allclose(gradient, -advantages)


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_ratios_do_not_overflow(name: str) -> None:
    logprobs = torch.tensor([-1e4, -1e-4, -1e4, -1e-4], requires_grad=True)
    behaviour = torch.tensor([-1e-4, -1e4, -1e-4, -1e4])
    x = LossInputs(logprobs, behaviour, logprobs.detach(), torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.zeros(4).long())
    loss = LOSSES[name](x).loss_N.sum()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all()


def test_aggregations_by_hand() -> None:
    counts = torch.tensor([2.0, 6.0, 0.0])
    assert aggregate.token_mean_weights(counts).tolist() == [1, 1, 1] and aggregate.token_mean_units(counts) == 8
    assert aggregate.sequence_mean_weights(counts)[:2].tolist() == [0.5, pytest.approx(1 / 6)]
    assert aggregate.num_rows_units(counts) == 2, "a row without a trained token is no row"
    assert aggregate.fixed_length_weights(counts, length=4).tolist() == [0.25] * 3


def test_the_objective_follows_the_config() -> None:
    x = inputs(th=[0.5], mu=[0.25], prox=[0.5], advantage=[1.0])
    for loss, expected in [("truncated_is", 0.693147), ("ppo", -1.2), ("decoupled_ppo", -2.0), ("reinforce", 0.693147)]:
        objective = recipe.objective(AlgorithmConfig(loss=loss), max_tokens=8)  # type: ignore[arg-type]
        assert values(objective.token_loss(x)) == [expected]
    corrected = recipe.objective(AlgorithmConfig(loss="reinforce", correction="truncate", ratio_cap=1.5), max_tokens=8)
    assert values(corrected.token_loss(x)) == [round(1.5 * 0.693147, 6)]
    fixed = recipe.objective(AlgorithmConfig(aggregation="fixed_length"), max_tokens=8)
    assert fixed.row_weights(torch.tensor([3.0])).tolist() == [1 / 8]
    fixed = recipe.objective(AlgorithmConfig(aggregation="fixed_length", fixed_length=2), max_tokens=8)
    assert fixed.row_weights(torch.tensor([3.0])).tolist() == [1 / 2]
    assert recipe.advantage_function(AlgorithmConfig(advantage="dr_grpo")) is dr_grpo


def refuse(match: str, *, max_lag: float = 1, group_size: int = 8, temperature: float = 1, **algorithm: str) -> None:
    config = AlgorithmConfig(**algorithm)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=match):
        check(config, max_lag=max_lag, group_size=group_size, temperature=temperature)


def test_off_policy_training_without_a_correction_is_refused_and_told_what_to_set() -> None:
    refuse(r'no off-policy correction.*Set algorithm\.loss = "truncated_is"', loss="reinforce", max_lag=0.5)
    check(AlgorithmConfig(loss="reinforce"), max_lag=0, group_size=8, temperature=1)
    check(AlgorithmConfig(loss="reinforce", correction="truncate"), max_lag=4, group_size=8, temperature=1)


@pytest.mark.parametrize("loss", ["truncated_is", "decoupled_ppo", "ppo"])
def test_correcting_twice_is_refused(loss: str) -> None:
    refuse("corrects twice", loss=loss, correction="truncate")


def test_several_optimizer_steps_a_batch_need_a_loss_that_sees_the_policy_move() -> None:
    for correction in ("none", "truncate"):
        config = AlgorithmConfig(loss="reinforce", correction=correction)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="off policy from the second one on"):
            check(config, max_lag=0, group_size=8, temperature=1, mini_batches=2)
    check(AlgorithmConfig(loss="decoupled_ppo"), max_lag=2, group_size=8, temperature=1, mini_batches=2)


def test_a_group_of_one_and_greedy_rollouts_are_refused() -> None:
    refuse("takes two", group_size=1)
    refuse(r"Set rollout\.temperature", temperature=0)
