"""Losses, corrections and KL against numbers worked out by hand and against finite differences, and what is true of all."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from millstream.algo import AlgorithmConfig, aggregate, corrections, credit, kl, losses, recipe
from millstream.algo.aggregate import row_counts, row_means, row_sums
from millstream.algo.presets import LOSSES as KINDS
from millstream.errors import ConfigError
from millstream.objective import LossInputs, TokenLoss

Function = Callable[[LossInputs], TokenLoss]


def inputs(
    th: list[float], mu: list[float], prox: list[float], advantage: list[float], rows: list[int] | None = None
) -> LossInputs:
    """From probabilities, in double precision."""
    as_log = [torch.tensor(values, dtype=torch.float64).log() for values in (th, mu, prox)]
    row_N = torch.tensor(rows or [0] * len(th))
    return LossInputs(*as_log, torch.tensor(advantage, dtype=torch.float64), row_N)


def values(loss: TokenLoss) -> list[float]:
    return [round(float(value), 6) for value in loss.loss_N]


def rounded(*numbers: float) -> list[float]:
    return [round(number, 6) for number in numbers]


# ---- by hand ---------------------------------------------------------------------------------------------------------


def test_sums_and_means_over_rows_by_hand() -> None:
    numbers, row_N = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0, 0, 2, 2])
    assert row_sums(numbers, row_N).tolist() == [3, 3, 12, 12]
    assert row_means(numbers, row_N).tolist() == [1.5, 1.5, 6, 6]
    assert row_counts(row_N).tolist() == [2, 2, 2, 2]


def test_truncated_is_by_hand() -> None:
    x = inputs(th=[0.5, 0.2], mu=[0.25, 0.4], prox=[0.5, 0.2], advantage=[1.0, -2.0])
    # ratios 2 (cut to 1) and 0.5
    loss = losses.truncated_is(x, cap=1.0)
    assert values(loss) == rounded(-1 * 1.0 * math.log(0.5), -0.5 * -2.0 * math.log(0.2))
    assert float(loss.metrics["truncated_share"]) == 1


def test_cispo_by_hand() -> None:
    x = inputs(th=[0.5, 0.1, 0.3], mu=[0.25, 0.4, 0.3], prox=[0.3] * 3, advantage=[1.0, -2.0, 1.0])
    # ratios 2 and 0.25, clipped to [0.6, 1.5], and 1
    loss = losses.cispo(x, clip_low=0.4, clip_high=0.5)
    assert values(loss) == rounded(-1.5 * math.log(0.5), -0.6 * -2.0 * math.log(0.1), -math.log(0.3))
    assert float(loss.metrics["clipped_share"]) == 2


def test_topr_by_hand() -> None:
    x = inputs(
        th=[0.5, 0.4, 0.2, 0.5, 0.6, 0.4],
        mu=[0.1, 0.1, 0.4, 0.8, 0.3, 0.4],
        prox=[0.3] * 6,
        advantage=[1.0, 1.0, -2.0, -2.0, -1.0, -1.0],
        rows=[0, 0, 1, 1, 2, 2],
    )
    # the ratio is of the trajectory: any for the positive one; 0.5 * 0.625 = 0.3125; 2 * 1 = 2, cut to 1
    expected = [-math.log(0.5), -math.log(0.4), 0.625 * math.log(0.2), 0.625 * math.log(0.5), math.log(0.6), math.log(0.4)]  # fmt: skip
    loss = losses.topr(x, cap=1.0)
    assert values(loss) == rounded(*expected)
    assert float(loss.metrics["truncated_share"]) == 2
    weighted = losses.topr(x, cap=1.0, positive_weight=3.0, negative_weight=0.5)
    weights = [3.0, 3.0, 0.5, 0.5, 0.5, 0.5]
    assert values(weighted) == rounded(*(w * value for w, value in zip(weights, expected, strict=True)))


def test_ppo_by_hand() -> None:
    x = inputs(th=[0.5, 0.5, 0.1, 0.1], mu=[0.25, 0.25, 0.2, 0.2], prox=[0.3] * 4, advantage=[1.0, -1.0, 1.0, -1.0])
    # ratios 2, 2, 0.5, 0.5 clipped to [0.8, 1.3]: the pessimistic side of each
    assert values(losses.ppo(x, clip_low=0.2, clip_high=0.3)) == [-1.3, 2.0, -0.5, 0.8]


def test_the_dual_clip_bounds_what_negatives_can_cost() -> None:
    x = inputs(th=[0.5, 0.5, 0.5], mu=[0.05, 0.05, 0.25], prox=[0.3] * 3, advantage=[-2.0, 2.0, -2.0])
    # ratios 10, 10 and 2; negatives lose at most 3 * 2
    loss = losses.ppo(x, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert values(loss) == [6.0, -2.4, 4.0]
    assert float(loss.metrics["dual_clipped_share"]) == 1


def test_decoupled_ppo_by_hand() -> None:
    x = inputs(th=[0.6, 0.1], mu=[0.2, 0.4], prox=[0.4, 0.2], advantage=[1.0, -1.0])
    # prox/mu: 2 (cut to 1.5) and 0.5; th/prox: 1.5 clipped to 1.2, and 0.5 clipped to 0.8
    loss = losses.decoupled_ppo(x, clip_low=0.2, clip_high=0.2, cap=1.5)
    assert values(loss) == [-1.8, 0.4]
    assert float(loss.metrics["clipped_share"]) == 2 and float(loss.metrics["truncated_share"]) == 1
    apart = inputs(th=[0.8], mu=[0.1], prox=[0.1], advantage=[-1.0])
    assert values(losses.decoupled_ppo(apart, clip_low=0.2, clip_high=0.2, cap=1.5, dual_clip=3.0)) == [3.0]


def test_gspo_by_hand() -> None:
    x = inputs(
        th=[0.4, 0.9, 0.2, 0.3], mu=[0.1, 0.9, 0.2, 0.3], prox=[0.3] * 4, advantage=[1, 1, -1, -1], rows=[0, 0, 1, 1]
    )
    # the first row: the root of 4 * 1 = 2, clipped to 1.5; the second: 1
    loss = losses.gspo(x, clip_low=0.2, clip_high=0.5)
    assert values(loss) == [-1.5, -1.5, 1.0, 1.0]
    assert float(loss.metrics["clipped_share"]) == 2


def test_kimi_by_hand() -> None:
    x = inputs(th=[0.4, 0.2, 0.5], mu=[0.2, 0.1, 0.5], prox=[0.3] * 3, advantage=[2, 2, 1], rows=[0, 0, 1])
    # the first row: log th - log mu = log 4, its square shared by two tokens
    half = 0.1 / 2 * math.log(4) ** 2 / 2
    assert values(losses.kimi(x, regularisation=0.1)) == rounded(
        -2 * math.log(0.4) + half, -2 * math.log(0.2) + half, -math.log(0.5)
    )


def test_corrections_by_hand() -> None:
    x = inputs(th=[0.5, 0.5, 0.5], mu=[0.1, 0.4, 0.5], prox=[0.4, 0.2, 0.1], advantage=[1.0, 1.0, 1.0], rows=[0, 0, 1])
    plain = losses.reinforce(x)
    unit = -math.log(0.5)
    # prox/mu: 4, 0.5, 0.2; by sequence 2 and 0.2; geometric: the root of 2, and 0.2
    truncated = {"token": [3, 0.5, 0.2], "sequence": [2, 2, 0.2], "geometric": [2**0.5, 2**0.5, 0.2]}
    masked = {"token": [0, 0.5, 0], "sequence": [2, 2, 0], "geometric": [2**0.5, 2**0.5, 0]}
    for level in ("token", "sequence", "geometric"):
        cut = corrections.truncated(x, plain, level=level, cap=3.0)
        assert values(cut) == rounded(*(w * unit for w in truncated[level]))
        kept = corrections.masked(x, plain, level=level, floor=0.25, cap=3.0)
        assert values(kept) == rounded(*(w * unit for w in masked[level]))
        assert float(kept.metrics["masked_share"]) == masked[level].count(0)
    assert float(corrections.truncated(x, plain, level="token", cap=3.0).metrics["truncated_share"]) == 1


def test_kl_estimators_by_hand() -> None:
    th, ref = torch.tensor([0.5, 0.2]).double().log(), torch.tensor([0.25, 0.4]).double().log()
    two = math.log(2)
    expected = {
        "k1": [two, -two],
        "k2": [two**2 / 2, two**2 / 2],
        "k3": [0.5 + two - 1, 2 - two - 1],
    }
    for name, numbers in expected.items():
        found = kl.kl_estimate(name, th, ref)  # type: ignore[arg-type]
        assert torch.allclose(found, torch.tensor(numbers).double())
        without_gradient = credit.kl_numbers(name, th.numpy(), ref.numpy())  # type: ignore[arg-type]
        assert np.allclose(without_gradient, numbers), "the twin"


def test_k1_is_no_loss_and_a_kl_needs_a_reference() -> None:
    x = inputs(th=[0.5], mu=[0.5], prox=[0.5], advantage=[1.0])
    with pytest.raises(ConfigError, match="Use k2 or k3, or k1 in the reward"):
        kl.with_kl_penalty(x, losses.reinforce(x), estimator="k1", coefficient=0.1)
    with pytest.raises(ConfigError, match="reference_N is None"):
        kl.with_kl_penalty(x, losses.reinforce(x), estimator="k3", coefficient=0.1)
    near = x._replace(reference_N=torch.tensor([0.25]).double().log())
    loss = kl.with_kl_penalty(near, losses.reinforce(near), estimator="k3", coefficient=2.0)
    assert values(loss) == rounded(-math.log(0.5) + 2 * (0.5 + math.log(2) - 1))
    assert "reference_kl" not in kl.with_kl_metric(x, loss).metrics
    for held in (AlgorithmConfig(), AlgorithmConfig(kl="loss", kl_coefficient=2.0, kl_estimator="k2")):
        found = recipe.objective(held, max_tokens=8).token_loss(near)
        assert float(found.metrics["reference_kl"]) == pytest.approx(0.5 + math.log(2) - 1), (
            "by k3, whatever the loss has"
        )
        plain = recipe.objective(AlgorithmConfig(), max_tokens=8).token_loss(x)
        more = 2 * math.log(2) ** 2 / 2 if held.kl == "loss" else 0.0
        assert float(found.loss_N - plain.loss_N) == pytest.approx(more)


def test_the_gradient_of_k1_has_the_mean_0_and_that_of_k2_is_the_kls() -> None:
    """Over a whole distribution, exactly: why k1 is refused as a loss."""
    logits = torch.tensor([0.3, -0.8, 1.1, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([1.0, 0.2, -0.5, 0.0]).double(), -1)
    logprobs = torch.log_softmax(logits, -1)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    (true_gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)

    def mean_gradient(name: str) -> Tensor:
        mean = (logprobs.exp().detach() * kl.kl_estimate(name, logprobs, reference)).sum()  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(mean, logits, retain_graph=True)
        return gradient

    assert mean_gradient("k1").abs().max() < 1e-12
    assert torch.allclose(mean_gradient("k2"), true_gradient)
    assert true_gradient.abs().max() > 0.1


def test_aggregations_by_hand() -> None:
    counts = torch.tensor([2.0, 6.0, 0.0])
    assert aggregate.token_mean_weights(counts).tolist() == [1, 1, 1] and aggregate.token_mean_units(counts) == 8
    assert aggregate.sequence_mean_weights(counts)[:2].tolist() == [0.5, pytest.approx(1 / 6)]
    assert aggregate.num_rows_units(counts) == 2, "a row without a trained token is no row"
    assert aggregate.fixed_length_weights(counts, length=4).tolist() == [0.25] * 3


# ---- what is true of all ---------------------------------------------------------------------------------------------


def with_kl(x: LossInputs, estimator: kl.Estimator) -> TokenLoss:
    near = x._replace(reference_N=x.behaviour_N)
    return kl.with_kl_penalty(near, losses.reinforce(x), estimator=estimator, coefficient=0.3)


LOSSES: dict[str, Function] = {
    "truncated_is": partial(losses.truncated_is, cap=1.0),
    "cispo": partial(losses.cispo, clip_low=0.2, clip_high=0.3),
    "topr": partial(losses.topr, cap=1.0),
    "weighted_topr": partial(losses.topr, cap=1.0, positive_weight=2.0, negative_weight=0.5),
    "ppo": partial(losses.ppo, clip_low=0.2, clip_high=0.2),
    "dual_clip": partial(losses.ppo, clip_low=0.2, clip_high=0.2, dual_clip=1.5),
    "decoupled_ppo": partial(losses.decoupled_ppo, clip_low=0.2, clip_high=0.2, cap=5.0),
    "gspo": partial(losses.gspo, clip_low=0.3, clip_high=0.3),
    "kimi": partial(losses.kimi, regularisation=0.1),
    "reinforce": losses.reinforce,
    **{
        f"truncated, {level}": partial(
            lambda x, level: corrections.truncated(x, losses.reinforce(x), level=level, cap=3.0), level=level
        )
        for level in ("token", "sequence", "geometric")
    },
    **{
        f"masked, {level}": partial(
            lambda x, level: corrections.masked(x, losses.reinforce(x), level=level, floor=0.5, cap=2.0), level=level
        )
        for level in ("token", "sequence", "geometric")
    },
    "k2": partial(with_kl, estimator="k2"),
    "k3": partial(with_kl, estimator="k3"),
}


def test_every_loss_of_the_config_is_among_them() -> None:
    assert KINDS.keys() <= LOSSES.keys()


ROWS = [0] * 5 + [1] * 3 + [2] * 4


def random_inputs(seed: int = 3, rows: list[int] = ROWS) -> LossInputs:
    """An advantage a row, as a run has them; rows 0 and 2 of one sign, 1 of the other."""
    generator = torch.Generator().manual_seed(seed)
    th, mu, prox = (torch.rand(len(rows), generator=generator, dtype=torch.float64) * 0.8 + 0.1 for _ in range(3))
    row_N = torch.tensor(rows)
    advantages_R = torch.randn(int(row_N.max()) + 1, generator=generator, dtype=torch.float64).abs()
    advantages_R[1::2] *= -1
    return LossInputs(th.log().requires_grad_(), mu.log(), prox.log(), advantages_R[row_N], row_N)


def gradient_of(function: Function, x: LossInputs) -> Tensor:
    (gradient,) = torch.autograd.grad(function(x).loss_N.sum(), x.logprobs_N)
    return gradient


def surrogate(name: str, x: LossInputs, logprobs: Tensor) -> Tensor:
    """The function whose gradient the loss claims to be, with every stop-gradient written out as a constant."""
    ratio = (x.logprobs_N - x.behaviour_N).exp()
    weight_of = {"truncated_is": ratio.clamp(max=1.0), "cispo": ratio.clamp(0.8, 1.3)}
    for topr, positive, negative in (("topr", 1.0, 1.0), ("weighted_topr", 2.0, 0.5)):
        of_row = torch.stack([ratio[x.row_N == row].prod() for row in range(3)])[x.row_N].clamp(max=1.0)
        weight_of[topr] = torch.where(x.advantages_N >= 0, positive, negative * of_row)
    if name in weight_of:
        return (-weight_of[name] * x.advantages_N * logprobs).sum()
    return LOSSES[name](x._replace(logprobs_N=logprobs)).loss_N.sum()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", [3, 4])
def test_gradients_agree_with_finite_differences(name: str, seed: int) -> None:
    x = random_inputs(seed)
    gradient = gradient_of(LOSSES[name], x)
    epsilon, logprobs = 1e-6, x.logprobs_N.detach()
    for index in range(len(ROWS)):
        shift = torch.zeros(len(ROWS), dtype=torch.float64)
        shift[index] = epsilon
        with torch.no_grad():
            up, down = surrogate(name, x, logprobs + shift), surrogate(name, x, logprobs - shift)
        assert math.isclose(float(gradient[index]), float((up - down) / (2 * epsilon)), rel_tol=1e-4, abs_tol=1e-7)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "weighted_topr"])
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name: str) -> None:
    x = random_inputs()
    same = x.logprobs_N.detach()
    x = x._replace(behaviour_N=same, proximal_N=same)
    assert torch.allclose(gradient_of(LOSSES[name], x), -x.advantages_N)


@pytest.mark.parametrize("name", LOSSES)
def test_an_advantage_of_0_has_a_gradient_only_where_the_loss_holds_to_a_policy(name: str) -> None:
    x = random_inputs()
    gradient = gradient_of(LOSSES[name], x._replace(advantages_N=torch.zeros(len(ROWS)).double()))
    assert bool(gradient.abs().max() > 1e-6) == (name in ("kimi", "k2", "k3"))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_ratios_do_not_overflow(name: str, dtype: torch.dtype) -> None:
    """Log-ratios of 1e4 either way, one a row and many a row."""
    small, large = [-1e4, -1e-4, -1e4, -1e-4], [-1e-4, -1e4, -1e-4, -1e4]
    for rows in ([0, 1, 2, 3], [0, 0, 1, 1], [0, 0, 0, 0]):
        for th, mu in ((small, large), ([-1e4] * 4, [-1e-4] * 4), ([-1e-4] * 4, [-1e4] * 4)):
            for prox in (th, mu):
                logprobs = torch.tensor(th, dtype=dtype, requires_grad=True)
                others = (torch.tensor(mu, dtype=dtype), torch.tensor(prox, dtype=dtype))
                advantages = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=dtype)
                loss = LOSSES[name](LossInputs(logprobs, *others, advantages, torch.tensor(rows))).loss_N.sum()
                (gradient,) = torch.autograd.grad(loss, logprobs)
                assert torch.isfinite(loss) and torch.isfinite(gradient).all()


@pytest.mark.parametrize("distance", [15.0, 20.5, 60.0, 700.0])
@pytest.mark.parametrize("name", ["ppo", "gspo", "decoupled_ppo"])
def test_a_bad_token_that_became_far_too_likely_is_pushed_back_however_far_it_is(name: str, distance: float) -> None:
    """By value and by finite differences. A good one is clipped, as ever."""
    slope = math.exp(min(distance, 20.0))
    for advantage in (-2.0, 2.0):
        logprobs = torch.tensor([-0.5], dtype=torch.float64, requires_grad=True)
        old = logprobs.detach() - distance
        x = LossInputs(logprobs, old, old, torch.tensor([advantage]).double(), torch.tensor([0]))
        loss = LOSSES[name](x).loss_N.sum()
        (gradient,) = torch.autograd.grad(loss, logprobs)
        step = 1e-4
        up, down = (LOSSES[name](x._replace(logprobs_N=logprobs.detach() + by)).loss_N.sum() for by in (step, -step))
        assert math.isclose(float(gradient), float(up - down) / (2 * step), rel_tol=1e-6, abs_tol=1e-6)
        if advantage < 0:
            assert math.isclose(float(loss.detach()), 2 * slope * (1 + max(0.0, distance - 20)), rel_tol=1e-12)
            assert math.isclose(float(gradient), 2 * slope, rel_tol=1e-12)
        else:
            assert float(gradient) == 0


@pytest.mark.parametrize("distance", [-700.0, -60.0, -20.5, -3.0, 3.0, 20.5, 60.0, 700.0])
def test_k3_pulls_back_to_the_reference_from_any_distance(distance: float) -> None:
    """log th - log ref. In the reward it has the same value, without a gradient."""
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    reference = logprobs.detach() - distance
    found = kl.kl_estimate("k3", logprobs, reference)
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    far = max(0.0, -distance - 20)
    growth = math.exp(min(-distance, 20.0))
    assert math.isclose(float(found.detach()), growth * (1 + far) + distance - 1, rel_tol=1e-12)
    assert math.isclose(float(gradient), 1 - growth, rel_tol=1e-12)
    numbers = credit.kl_numbers("k3", logprobs.detach().numpy(), reference.numpy())
    assert math.isclose(float(numbers[0]), float(found.detach()), rel_tol=1e-12)


def test_the_ratio_of_a_token_that_has_become_impossible_is_0() -> None:
    new = torch.tensor([-math.inf, -1.0, 19.0], requires_grad=True)  # the last one: at e^20, where the tangent begins
    found = corrections.ratio(new, torch.tensor([-2.0, -1.0, -1.0]))
    (gradient,) = torch.autograd.grad(found.sum(), new)
    assert torch.equal(found.detach(), torch.tensor([-math.inf, 0.0, 20.0]).exp())
    assert torch.equal(gradient, found.detach())
    k3 = credit.kl_numbers("k3", np.array([-1.0]), np.array([-math.inf]))
    assert k3.tolist() == [math.inf]  # infinitely far from a reference that never says it


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_ratios_within_e20_are_what_they_were_bit_for_bit(level: corrections.Level) -> None:
    torch.manual_seed(0)
    new = (torch.randn(64) * 3).requires_grad_()
    old, row_N = torch.randn(64), torch.arange(64) // 2
    found = corrections.ratio_at(level, new, old, row_N)
    of_row = {
        "token": lambda x: x,
        "sequence": lambda x: row_sums(x, row_N),
        "geometric": lambda x: row_means(x, row_N),
    }
    clamped = of_row[level](new - old).clamp(-20, 20).exp()
    assert torch.equal(found, clamped)
    weights = torch.randn(64)
    pair = [torch.autograd.grad((one * weights).sum(), new, retain_graph=True)[0] for one in (found, clamped)]
    assert torch.equal(*pair)


def part(x: LossInputs, rows: list[int]) -> LossInputs:
    """These rows of a micro-batch, in this order, as a micro-batch of their own."""
    at = torch.cat([torch.nonzero(x.row_N == row)[:, 0] for row in rows])
    row_N = torch.cat([torch.full((int((x.row_N == row).sum()),), number) for number, row in enumerate(rows)])
    return LossInputs(
        x.logprobs_N[at], x.behaviour_N[at], x.proximal_N[at], x.advantages_N[at], row_N,
        reference_N=None if x.reference_N is None else x.reference_N[at],
    )  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_neither_the_order_of_rows_nor_the_split_into_micro_batches_changes_anything(name: str) -> None:
    whole = random_inputs(rows=[0] * 2 + [1] * 7 + [2] * 1 + [3] * 4 + [4] * 3)
    expected = gradient_of(LOSSES[name], whole)
    metrics = LOSSES[name](whole).metrics

    @settings(max_examples=20)
    @given(order=st.permutations(range(5)), cut=st.integers(1, 4))
    def holds(order: list[int], cut: int) -> None:
        parts = [LOSSES[name](part(whole, rows)) for rows in (order[:cut], order[cut:])]
        total = sum(loss.loss_N.sum() for loss in parts)
        (found,) = torch.autograd.grad(total, whole.logprobs_N)  # type: ignore[arg-type]
        assert torch.allclose(found, expected, rtol=1e-10)
        for key, value in metrics.items():
            assert float(sum(loss.metrics[key] for loss in parts)) == pytest.approx(float(value))

    holds()


# ---- from a config ---------------------------------------------------------------------------------------------------


def test_the_objective_follows_the_config() -> None:
    x = inputs(th=[0.5], mu=[0.25], prox=[0.5], advantage=[1.0])
    unit = 0.693147
    expected = {
        "truncated_is": unit, "ppo": -1.2, "decoupled_ppo": -2.0, "reinforce": unit, "cispo": 2 * unit, "topr": unit,
        "weighted_topr": unit, "gspo": -1.0004, "kimi": unit + 0.05 * unit**2,
    }  # fmt: skip
    assert expected.keys() == KINDS.keys()
    for loss, number in expected.items():
        objective = recipe.objective(AlgorithmConfig(loss=loss), max_tokens=8)
        assert values(objective.token_loss(x)) == [pytest.approx(number, abs=2e-6)], loss
        assert not objective.needs_entropy


def test_every_knob_reaches_its_loss() -> None:
    low = inputs(th=[0.1], mu=[0.5], prox=[0.1], advantage=[-1.0])
    high = inputs(th=[0.5], mu=[0.05], prox=[0.5], advantage=[-1.0])
    good = high._replace(advantages_N=-high.advantages_N)

    def found(x: LossInputs, **algorithm: object) -> float:
        objective = recipe.objective(AlgorithmConfig(**algorithm), max_tokens=8)  # type: ignore[arg-type]
        return float(objective.token_loss(x).loss_N)

    unit = -math.log(0.5)
    assert found(low, loss="ppo", clip_low=0.3) == pytest.approx(0.7)
    assert found(good, loss="ppo", clip_high=0.5) == pytest.approx(-1.5)
    assert found(high, loss="ppo", dual_clip=2.0) == pytest.approx(2.0)
    assert found(good, loss="truncated_is", ratio_cap=3.0) == pytest.approx(3 * unit)
    assert found(good, loss="weighted_topr", positive_weight=0.25) == pytest.approx(0.25 * unit)
    assert found(high, loss="weighted_topr", negative_weight=0.25, ratio_cap=4.0) == pytest.approx(-unit)
    assert found(good, loss="kimi", regularisation=0.0) == pytest.approx(unit)
    assert found(good, loss="reinforce", correction="truncate", ratio_cap=1.5) == pytest.approx(1.5 * unit)
    assert found(good, loss="reinforce", correction="truncate") == pytest.approx(5 * unit)
    assert found(good, loss="reinforce", correction="mask", ratio_cap=20.0) == pytest.approx(10 * unit)
    assert found(good, loss="reinforce", correction="mask") == 0
    floor = {"loss": "reinforce", "correction": "mask"}
    assert found(low, **floor, ratio_floor=0.1) == pytest.approx(0.2 * math.log(0.1))
    assert found(low, **floor, ratio_floor=0.3) == 0
    two = inputs(th=[0.5, 0.5], mu=[0.25, 0.5], prox=[0.5, 0.5], advantage=[1.0, 1.0])
    for level, weight in (("token", 2), ("sequence", 2), ("geometric", 1.01)):
        algorithm = AlgorithmConfig(loss="reinforce", correction="truncate", correction_level=level)  # type: ignore[arg-type]
        first = recipe.objective(algorithm, max_tokens=8).token_loss(two).loss_N[0]
        assert float(first) == pytest.approx(weight * unit)


def test_the_aggregation_follows_the_config() -> None:
    fixed = recipe.objective(AlgorithmConfig(aggregation="fixed_length"), max_tokens=8)
    assert fixed.row_weights(torch.tensor([3.0])).tolist() == [1 / 8]
    fixed = recipe.objective(AlgorithmConfig(aggregation="fixed_length", fixed_length=2), max_tokens=8)
    assert fixed.row_weights(torch.tensor([3.0])).tolist() == [1 / 2]
    mean = recipe.objective(AlgorithmConfig(aggregation="sequence_mean"), max_tokens=8)
    assert mean.row_weights(torch.tensor([4.0])).tolist() == [1 / 4]


def test_the_entropy_is_taken_off_the_loss() -> None:
    x = inputs(th=[0.5], mu=[0.5], prox=[0.5], advantage=[1.0])._replace(entropy_N=torch.tensor([2.0]).double())
    objective = recipe.objective(AlgorithmConfig(loss="reinforce", entropy_bonus=0.1), max_tokens=8)
    assert objective.needs_entropy
    loss = objective.token_loss(x)
    assert values(loss) == rounded(-math.log(0.5) - 0.2) and float(loss.metrics["entropy"]) == 2.0
