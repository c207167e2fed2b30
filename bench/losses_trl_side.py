"""TRL's losses on tensors that it is given: `GRPOTrainer._compute_loss` itself, on an object that has what it reads.

python bench/losses_trl_side.py GIVEN.pt ANSWER.pt
"""

from __future__ import annotations

import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.utils import nanstd

GROUPS = 3
ONE_PROCESS = SimpleNamespace(num_processes=1, gather=lambda tensor: tensor, reduce=lambda tensor, reduction: tensor)


def trainer(x: dict[str, Tensor], th: Tensor, **settings: Any) -> SimpleNamespace:
    """What `_compute_loss` reads, at the defaults that matter here. Its log-probabilities are the tensor that is given."""
    args = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1, **settings.pop("args", {})}
    known = {
        "args": SimpleNamespace(**args), "accelerator": ONE_PROCESS, "model": SimpleNamespace(training=True),
        "loss_type": "grpo", "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0,
        "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "use_vllm": False,
        "vllm_importance_sampling_correction": True, "aux_loss_enabled": False, "_entropy_bonus_enabled": False,
        "current_gradient_accumulation_steps": 1, "max_completion_length": th.shape[1],
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_get_per_token_logps_and_entropies": lambda *a, **k: (th, torch.zeros_like(th), None),
    }  # fmt: skip
    return SimpleNamespace(**{**known, **settings})


def loss(name: str, x: dict[str, Tensor], *, old: Tensor | None, ratio: Tensor | None = None, **settings: Any) -> dict:
    th = x["th"].clone().requires_grad_()
    ids, mask = torch.zeros_like(x["mask"]).long(), x["mask"]
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids, "completion_mask": mask,
        "advantages": x["advantages"], "ref_per_token_logps": x["ref"], "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    if old is not None:
        inputs["old_per_token_logps"] = old
    if ratio is not None:
        inputs["importance_sampling_ratio"] = ratio
    found = GRPOTrainer._compute_loss(trainer(x, th, **settings), None, inputs)
    (gradient,) = torch.autograd.grad(found, th)
    return {f"{name}: loss": found.detach(), f"{name}: gradient": gradient}


def weights(x: dict[str, Tensor], *, by_sequence: bool, is_mask: bool) -> Tensor:
    """Transcribed from `_generate_and_score_completions`."""
    difference = (x["prox"] - x["mu"]) * x["mask"]
    ratio = torch.exp(difference.sum(-1, keepdim=True) if by_sequence else difference)
    return ratio.masked_fill((ratio < 0.7) | (ratio > 1.5), 0.0) if is_mask else ratio.clamp(max=1.5)


def advantages(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Transcribed from `_generate_and_score_completions`."""
    rewards, size = x["rewards"], len(x["rewards"]) // GROUPS
    centred = rewards - torch.nanmean(rewards.view(-1, size), dim=1).repeat_interleave(size)
    by_group = nanstd(rewards.view(-1, size), dim=1).repeat_interleave(size)
    return {
        "advantage grpo (transcribed)": centred / (by_group + 1e-4),
        "advantage dr_grpo (transcribed)": centred,
        "advantage lite_ppo (transcribed)": centred / (nanstd(rewards) + 1e-4),
    }


def main(given: str, answer: str) -> None:
    x = torch.load(given, weights_only=True)
    mu, prox = x["mu"], x["prox"]
    found = loss("ppo, token mean", x, old=mu, loss_type="bnpo", epsilon_high=0.28)
    found |= loss("ppo, sequence mean", x, old=mu)
    found |= loss("ppo, fixed length", x, old=mu, loss_type="dr_grpo")
    found |= loss("ppo, dual clip", x, old=mu, loss_type="dapo", args={"delta": 3.0})
    found |= loss("cispo", x, old=mu, loss_type="cispo", epsilon_high=1.5)
    sequence = {"importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.1}
    found |= loss("gspo", x, old=mu, **sequence)
    found |= loss("ppo with k3", x, old=mu, loss_type="bnpo", beta=0.1)
    vllm = {"loss_type": "bnpo", "use_vllm": True}
    token = weights(x, by_sequence=False, is_mask=False)
    found |= renamed(loss("decoupled ppo", x, old=prox, ratio=token, **vllm))
    for level, how in ((level, how) for level in ("token", "sequence") for how in ("truncate", "mask")):
        ratio = weights(x, by_sequence=level == "sequence", is_mask=how == "mask")
        name = f"corrected, {level} {how}"
        # with old = th the ratio is 1: the gradient is that of reinforce, the value is not
        found |= {k: v for k, v in renamed(loss(name, x, old=None, ratio=ratio, **vllm)).items() if "gradient" in k}
    torch.save({**found, **advantages(x)}, answer)


def renamed(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their weights are transcribed, what they weigh is not."""
    return {f"{name} (transcribed)": value for name, value in found.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
