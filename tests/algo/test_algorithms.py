"""Algorithms as a config names them: presets, what is refused and what to set instead, and the user's own functions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec import structs

from millstream import imports
from millstream.algo import KNOWN_ADVANTAGES, AlgorithmConfig, advantage_of, check_algorithm, credit_for, recipe
from millstream.algo.advantages import ADVANTAGES
from millstream.algo.credit import ADVANTAGE_KEYS
from millstream.algo.presets import LOSSES, PRESETS
from millstream.errors import ConfigError
from millstream.objective import LossInputs


def accept(*, max_lag: float = 1, group_size: int = 8, temperature: float = 1, mini_batches: int = 1,
           filter_zero_signal: bool = False, **algorithm: object) -> AlgorithmConfig:  # fmt: skip
    config = AlgorithmConfig(**algorithm)  # type: ignore[arg-type]
    check_algorithm(
        config,
        max_lag=max_lag,
        group_size=group_size,
        temperature=temperature,
        mini_batches=mini_batches,
        filter_zero_signal=filter_zero_signal,
    )
    return config


def refuse(match: str, **settings: object) -> None:
    with pytest.raises(ConfigError, match=match):
        accept(**settings)  # type: ignore[arg-type]


# ---- presets ---------------------------------------------------------------------------------------------------------


def test_the_default_is_grpo_advantages_under_truncated_importance_weights() -> None:
    config = AlgorithmConfig()
    assert (config.advantage, config.loss, config.aggregation, config.ratio_cap) == ("grpo", "truncated_is", "token_mean", 1.0)  # fmt: skip
    assert structs.replace(AlgorithmConfig(name="truncated_is"), name=None) == config


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_off_policy_and_with_several_steps_a_batch(name: str) -> None:
    config = accept(name=name, mini_batches=2)
    assert config.advantage in KNOWN_ADVANTAGES and config.loss in LOSSES
    assert all(getattr(config, key) == value for key, value in PRESETS[name].items())  # type: ignore[index]
    recipe.objective(config, max_tokens=8)


def test_every_advantage_and_every_loss_that_corrects_has_a_preset() -> None:
    configs = [AlgorithmConfig(name=name) for name in PRESETS]
    assert {config.advantage for config in configs} == {*ADVANTAGES, *ADVANTAGE_KEYS} - {"turns", "parts"}
    assert {config.loss for config in configs} == LOSSES.keys() - {"reinforce"}
    assert len({structs.replace(config, name=None) for config in configs}) == len(configs), "two presets are the same"


def test_an_explicit_key_overrides_the_preset_and_another_loss_leaves_its_numbers_behind() -> None:
    config = AlgorithmConfig(name="dapo", clip_high=0.5, advantage="rloo")
    assert (config.clip_low, config.clip_high, config.advantage, config.loss) == (0.2, 0.5, "rloo", "ppo")
    other = AlgorithmConfig(name="ppo_clip", loss="gspo")
    assert (other.clip_low, other.clip_high, other.dual_clip, other.aggregation) == (3e-4, 4e-4, None, "token_mean")
    assert AlgorithmConfig(loss="gspo").aggregation == "sequence_mean"


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_off_policy_training_without_a_correction_is_refused_and_told_what_to_set() -> None:
    refuse(r'no off-policy correction.*Set algorithm\.loss = "truncated_is"', loss="reinforce", max_lag=0.5)
    accept(loss="reinforce", max_lag=0)
    for correction in ("truncate", "mask"):
        accept(loss="reinforce", correction=correction, correction_level="sequence", max_lag=4)


@pytest.mark.parametrize("loss", [name for name, kind in LOSSES.items() if kind.corrects])
def test_correcting_twice_is_refused(loss: str) -> None:
    refuse("corrects twice", loss=loss, correction="truncate")
    refuse("corrects twice", loss=loss, correction="mask", max_lag=0)


def test_several_optimizer_steps_a_batch_need_a_loss_that_sees_the_policy_move() -> None:
    for correction in ("none", "truncate"):
        refuse("off policy from the second one on", loss="reinforce", correction=correction, max_lag=0, mini_batches=2)
    accept(loss="decoupled_ppo", max_lag=2, mini_batches=2)


def test_a_group_of_one_and_greedy_rollouts_are_refused() -> None:
    for advantage in ("grpo", "dr_grpo", "rloo", "lite_ppo"):
        refuse('takes two.*or algorithm.advantage = "reinforce_plus_plus"', advantage=advantage, group_size=1)
    accept(advantage="reinforce_plus_plus", group_size=1)
    refuse(r"Set rollout\.temperature", temperature=0)


def test_groups_are_not_filtered_by_their_own_rewards_where_the_batch_is_the_measure() -> None:
    refuse(r"Set pipeline\.filter_zero_signal = false", advantage="reinforce_plus_plus", filter_zero_signal=True)
    accept(advantage="lite_ppo", filter_zero_signal=True)


@pytest.mark.parametrize("name", ["ppo", "distillation"])
def test_what_compares_no_members_filters_no_groups_and_takes_groups_of_one(name: str) -> None:
    refuse(
        r"has a gradient like any other\. Set pipeline\.filter_zero_signal = false", name=name, filter_zero_signal=True
    )
    accept(name=name, group_size=1)
    refuse("turns compares the rollouts of a group", advantage="turns", group_size=1)
    accept(advantage="turns", filter_zero_signal=True)


def test_a_kl_has_a_weight_a_place_and_an_estimator_that_works_there() -> None:
    refuse(r"needs a weight: set algorithm\.kl_coefficient", kl="loss")
    refuse(r'does nothing in a loss.*Set it to "k2" or "k3", or algorithm\.kl = "reward"', kl="loss", kl_estimator="k1",
           kl_coefficient=0.1)  # fmt: skip
    assert accept(kl="loss", kl_coefficient=0.1).kl_estimator == "k3"
    assert accept(kl="reward", kl_coefficient=0.1).kl_estimator == "k1"
    accept(kl="reward", kl_coefficient=0.1, kl_estimator="k2", name="ppo")
    refuse('Set kl = "none"', name="distillation", kl="loss", kl_coefficient=0.1)
    refuse("which distillation does not use", name="distillation", overlong_buffer=4)


def test_only_what_is_within_a_rollout_is_credited_by_token() -> None:
    assert credit_for(accept()) is None and credit_for(accept(kl="loss", kl_coefficient=0.1)) is None
    for others in (
        {"name": "ppo"},
        {"name": "distillation"},
        {"advantage": "turns"},
        {"kl": "reward", "kl_coefficient": 0.1},
    ):
        assert credit_for(accept(**others)) is not None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value", "others"),
    [
        ("clip_low", 0.1, {}),
        ("clip_high", 0.1, {"loss": "topr"}),
        ("dual_clip", 3.0, {"loss": "gspo"}),
        ("ratio_cap", 2.0, {"loss": "ppo"}),
        ("ratio_cap", 2.0, {"loss": "reinforce", "max_lag": 0}),
        ("positive_weight", 1.0, {"loss": "topr"}),
        ("negative_weight", 1.0, {"loss": "ppo"}),
        ("regularisation", 1.0, {"loss": "ppo"}),
        ("correction_level", "token", {"loss": "reinforce", "max_lag": 0}),
        ("ratio_floor", 0.5, {"loss": "reinforce", "correction": "truncate"}),
        ("fixed_length", 100, {"aggregation": "token_mean"}),
        ("discount", 0.9, {}),
        ("trace", 0.9, {"advantage": "turns"}),
        ("kl_coefficient", 0.1, {}),
        ("kl_estimator", "k3", {"name": "ppo"}),
    ],
)
def test_a_key_that_nothing_reads_is_refused_by_name(key: str, value: object, others: dict[str, object]) -> None:
    refuse(rf"algorithm\.{key} = {value} is not read here: .*Leave it out", **{key: value}, **others)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("clip_low", 0.0), ("clip_low", 1.5), ("clip_high", 0.0), ("dual_clip", 1.0), ("ratio_cap", 0.0), ("fixed_length", 0),
        ("regularisation", -1.0), ("entropy_bonus", -0.1), ("overlong_buffer", 0), ("negative_weight", -1.0),
        ("kl_coefficient", 0.0), ("discount", 1.1), ("trace", -0.1),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=key):
        AlgorithmConfig(**{key: value})  # type: ignore[arg-type]


# ---- one's own -------------------------------------------------------------------------------------------------------

OWN = """
import numpy as np
from millstream.objective import TokenLoss

def plain(x):
    return -x.advantages_N * x.logprobs_N

def aware(x):
    weight_N = (x.logprobs_N - x.behaviour_N).exp().detach().clamp(max=2)
    return TokenLoss(weight_N * plain(x), {"weight": weight_N.sum()})

aware.corrects = True

def wrong(x):
    return plain(x).mean()

def none(x): ...

def ranks(rewards_G):
    return rewards_G.argsort().argsort() - (len(rewards_G) - 1) / 2

def spread(rewards_G):
    return rewards_G - rewards_G.mean()

spread.over_batch = lambda rewards_R, advantages_N: (0.0, 2 * rewards_R.std())

def broken(rewards_G):
    return rewards_G / 0
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path / 'own.py'}"


def some() -> LossInputs:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    return LossInputs(logprobs, torch.tensor([-3.0, -2.0]), logprobs.detach(), torch.ones(2), torch.zeros(2).long())


def test_a_loss_of_ones_own_is_called_and_says_whether_it_corrects(own: str) -> None:
    refuse(r"no off-policy correction.*needs loss\.corrects = True", loss=f"{own}:plain")
    refuse(r"off policy from the second.*loss\.corrects = True", loss=f"{own}:plain", max_lag=0, mini_batches=2)
    refuse("corrects twice", loss=f"{own}:aware", correction="truncate")
    refuse("clip_low = 0.2 is not read", loss=f"{own}:aware", clip_low=0.2)
    aware = recipe.objective(accept(loss=f"{own}:aware", mini_batches=2), max_tokens=8).token_loss(some())
    assert aware.loss_N.tolist() == pytest.approx([2.0, 2.0]) and float(aware.metrics["weight"]) == 3.0
    config = accept(loss=f"{own}:plain", correction="truncate", ratio_cap=3.0)
    corrected = recipe.objective(config, max_tokens=8).token_loss(some())
    assert corrected.loss_N.tolist() == pytest.approx([3.0, 2.0])


def test_a_loss_that_is_not_one_a_token_stops_the_run(own: str) -> None:
    for name, found in (("wrong", r"the shape \(\)"), ("none", "NoneType")):
        objective = recipe.objective(AlgorithmConfig(loss=f"{own}:{name}"), max_tokens=8)
        with pytest.raises(
            ConfigError, match=rf"own\.py:{name} returned {found}: expected one loss per token, of the shape \(2,\)"
        ):
            objective.token_loss(some())


def test_an_advantage_of_ones_own_is_called_and_may_need_the_whole_batch(own: str) -> None:
    import numpy as np

    ranks = advantage_of(accept(advantage=f"{own}:ranks", group_size=1, filter_zero_signal=True))
    assert ranks.of_group(np.array([5.0, 1.0, 3.0])).tolist() == [1.0, -1.0, 0.0] and ranks.over_batch is None
    spread = advantage_of(AlgorithmConfig(advantage=f"{own}:spread"))
    assert spread.over_batch is not None and spread.over_batch(np.array([0.0, 2.0]), np.zeros(3)) == (0.0, 2.0)
    broken = advantage_of(AlgorithmConfig(advantage=f"{own}:broken"))
    with pytest.raises(ConfigError, match=r"own\.py:broken returned \[inf inf\] .*: expected a finite number for each"), np.errstate(all="ignore"):  # fmt: skip
        broken.of_group(np.array([1.0, 2.0]))


def test_one_that_is_not_there_is_named(own: str) -> None:
    refuse(r"no file nowhere\.py", loss="nowhere.py:loss")
    refuse("has no function 'mine'", advantage=f"{own}:mine")
    refuse("cannot import no_such_package", loss="no_such_package.module:loss")
    assert imports.absolute("a.py:f").endswith("/a.py:f") and imports.absolute("a.b:f") == "a.b:f"
