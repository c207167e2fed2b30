"""The keys that each loss reads, and the presets: algorithms by name, as values of the other keys. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]
AlgorithmName = Literal[
    "grpo", "dr_grpo", "dapo", "rloo", "reinforce_plus_plus", "lite_ppo", "ppo_clip", "decoupled_ppo", "truncated_is",
    "cispo", "topr", "weighted_topr", "gspo", "kimi", "ppo", "distillation",
]  # fmt: skip


class LossKind(NamedTuple):
    keys: Mapping[str, float | None]  # the keys that it reads, with their defaults; None: off
    # Whether it weighs by the behaviour policy itself, and sees how far the policy has moved within a batch.
    corrects: bool = True
    aggregation: Aggregation = "token_mean"
    reads_proximal: bool = False  # whether the policy of the batch's start is in it


PPO_CLIP = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
LOSSES: dict[str, LossKind] = {
    "truncated_is": LossKind({"ratio_cap": 1.0}),
    "decoupled_ppo": LossKind({**PPO_CLIP, "ratio_cap": 5.0}, reads_proximal=True),
    "ppo": LossKind(PPO_CLIP),
    "cispo": LossKind({"clip_low": 1.0, "clip_high": 4.0}),
    "topr": LossKind({"ratio_cap": 1.0}, aggregation="fixed_length"),
    "weighted_topr": LossKind(
        {"ratio_cap": 1.0, "positive_weight": 1.0, "negative_weight": 0.5}, aggregation="fixed_length"
    ),
    "gspo": LossKind({"clip_low": 3e-4, "clip_high": 4e-4}, aggregation="sequence_mean"),
    "kimi": LossKind({"regularisation": 0.1}, aggregation="fixed_length"),
    "reinforce": LossKind({}, corrects=False),
}
# Where a correction cuts off, by its level. A mask's floor is one over it.
CORRECTION_CAPS = {"token": 5.0, "sequence": 5.0, "geometric": 1.01}

PRESETS: dict[AlgorithmName, dict[str, Any]] = {
    "grpo": {"advantage": "grpo", "loss": "ppo", "aggregation": "sequence_mean"},
    "dr_grpo": {"advantage": "dr_grpo", "loss": "ppo", "aggregation": "fixed_length"},
    "dapo": {"advantage": "grpo", "loss": "ppo", "clip_high": 0.28, "aggregation": "token_mean"},
    "rloo": {"advantage": "rloo", "loss": "truncated_is", "aggregation": "fixed_length"},
    "reinforce_plus_plus": {"advantage": "reinforce_plus_plus", "loss": "ppo", "aggregation": "token_mean"},
    "lite_ppo": {"advantage": "lite_ppo", "loss": "ppo", "aggregation": "token_mean"},
    "ppo_clip": {"advantage": "grpo", "loss": "ppo", "dual_clip": 3.0, "aggregation": "token_mean"},
    "decoupled_ppo": {"advantage": "grpo", "loss": "decoupled_ppo"},
    "truncated_is": {"advantage": "grpo", "loss": "truncated_is"},
    "cispo": {"advantage": "grpo", "loss": "cispo"},
    "topr": {"advantage": "dr_grpo", "loss": "topr"},
    "weighted_topr": {"advantage": "dr_grpo", "loss": "weighted_topr"},
    "gspo": {"advantage": "grpo", "loss": "gspo"},
    "kimi": {"advantage": "dr_grpo", "loss": "kimi"},
    "ppo": {"advantage": "gae", "loss": "ppo"},
    "distillation": {"advantage": "distillation", "loss": "truncated_is"},
}
DEFAULT_PRESET: AlgorithmName = "truncated_is"  # what a config without a name starts from
KL_ESTIMATORS = {"loss": "k3", "reward": "k1"}  # where the config has none
SHAPE = ("advantage", "loss", "aggregation")
