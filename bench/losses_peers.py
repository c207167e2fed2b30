"""The peers' side of `bench/losses_vs_peers.py`: TRL's and verl's own losses and advantages, on the tensors of a file.

    python bench/losses_peers.py trl GIVEN.pt ANSWER.pt             # a Python that has TRL
    python bench/losses_peers.py verl GIVEN.pt ANSWER.pt FOLDER     # FOLDER has verl/trainer/ppo/core_algos.py

TRL: `GRPOTrainer._compute_loss` itself, on an object that has the attributes that it reads. verl: `core_algos` itself; what it
imports beside torch is replaced where it is not installed: the config classes by plain ones, decorators by nothing.
`verl.utils.torch_functional` and `verl.utils.groupwise` are verl's own. Imports nothing of Millstream.
"""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

GROUPS = 3
Named = dict[str, Tensor]


def transcribed(found: Named) -> Named:
    """Names that say that some of the peer's lines were copied: its weights, and not the loss that they weigh."""
    return {f"{name} (transcribed)": value for name, value in found.items()}


# ---- TRL -------------------------------------------------------------------------------------------------------------------

ONE_PROCESS = SimpleNamespace(num_processes=1, gather=lambda tensor: tensor, reduce=lambda tensor, reduction: tensor)


def trl_trainer(th: Tensor, **settings: Any) -> SimpleNamespace:
    """What `_compute_loss` reads, at the defaults that matter here. Its log-probabilities are `th`."""
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


def trl_loss(
    name: str, x: Named, old: Tensor | None, settings: dict[str, Any], *, ratio: Tensor | None = None
) -> Named:
    from trl import GRPOTrainer

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
    found = GRPOTrainer._compute_loss(trl_trainer(th, **settings), None, inputs)
    (gradient,) = torch.autograd.grad(found, th)
    return {f"{name}: loss": found.detach(), f"{name}: gradient": gradient}


def trl_weights(x: Named, *, by_sequence: bool, is_mask: bool) -> Tensor:
    """Transcribed from `_generate_and_score_completions`."""
    difference = (x["prox"] - x["mu"]) * x["mask"]
    ratio = torch.exp(difference.sum(-1, keepdim=True) if by_sequence else difference)
    return ratio.masked_fill((ratio < 0.7) | (ratio > 1.5), 0.0) if is_mask else ratio.clamp(max=1.5)


def trl_advantages(x: Named) -> Named:
    """Transcribed from `_generate_and_score_completions`."""
    from trl.trainer.utils import nanstd

    rewards, size = x["rewards"], len(x["rewards"]) // GROUPS
    centred = rewards - torch.nanmean(rewards.view(-1, size), dim=1).repeat_interleave(size)
    by_group = nanstd(rewards.view(-1, size), dim=1).repeat_interleave(size)
    return {
        "advantage grpo (transcribed)": centred / (by_group + 1e-4),
        "advantage dr_grpo (transcribed)": centred,
        "advantage lite_ppo (transcribed)": centred / (nanstd(rewards) + 1e-4),
    }


def trl(x: Named) -> Named:
    mu, prox = x["mu"], x["prox"]
    sequence = {"importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.1}
    found = trl_loss("ppo, token mean", x, mu, {"loss_type": "bnpo", "epsilon_high": 0.28})
    found |= trl_loss("ppo, sequence mean", x, mu, {})
    found |= trl_loss("ppo, fixed length", x, mu, {"loss_type": "dr_grpo"})
    found |= trl_loss("ppo, dual clip", x, mu, {"loss_type": "dapo", "args": {"delta": 3.0}})
    found |= trl_loss("cispo", x, mu, {"loss_type": "cispo", "epsilon_high": 1.5})
    found |= trl_loss("gspo", x, mu, sequence)
    found |= trl_loss("ppo with k3", x, mu, {"loss_type": "bnpo", "beta": 0.1})
    vllm = {"loss_type": "bnpo", "use_vllm": True}
    token = trl_weights(x, by_sequence=False, is_mask=False)
    found |= transcribed(trl_loss("decoupled ppo", x, prox, vllm, ratio=token))
    for level, how in ((level, how) for level in ("token", "sequence") for how in ("truncate", "mask")):
        ratio = trl_weights(x, by_sequence=level == "sequence", is_mask=how == "mask")
        # with old = th the ratio is 1: the gradient is that of reinforce, the value is not
        corrected = transcribed(trl_loss(f"corrected, {level} {how}", x, None, vllm, ratio=ratio))
        found |= {name: value for name, value in corrected.items() if "gradient" in name}
    return {**found, **trl_advantages(x)}


# ---- verl ------------------------------------------------------------------------------------------------------------------


class Config(SimpleNamespace):
    """Takes the place of verl's config classes."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def core_algos(folder: Path) -> Any:
    def stand_in(name: str, path: str = "", **content: Any) -> ModuleType:
        module = ModuleType(name)
        module.__dict__.update(content)
        if path:
            module.__path__ = [str(folder / path)]
        sys.modules[name] = module
        return module

    stand_in("omegaconf", DictConfig=Config)
    stand_in("tensordict", TensorDict=dict)
    for name in ("verl", "verl.trainer", "verl.trainer.ppo", "verl.utils"):
        stand_in(name, name.replace(".", "/"))
    stand_in("verl.utils.device", get_device_name=lambda: "cpu", get_torch_device=lambda: torch.cpu)
    stand_in("verl.utils.import_utils", deprecated=lambda *a, **k: lambda function: function)
    stand_in("verl.trainer.config", AlgoConfig=type("AlgoConfig", (), {}))
    stand_in("verl.workers")
    stand_in("verl.workers.config", ActorConfig=Config)
    sys.modules["verl.utils"].as_torch_index = None  # type: ignore[attr-defined]
    sys.modules["verl.utils"].group_mean_std = None  # type: ignore[attr-defined]
    return importlib.import_module("verl.trainer.ppo.core_algos")


def verl_loss(
    core: Any,
    name: str,
    x: Named,
    kind: str,
    mode: str,
    settings: dict[str, Any] | None = None,
    *,
    old: str = "mu",
    weights: Tensor | None = None,
) -> Named:
    known = {
        "clip_ratio": 0.2,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "clip_ratio_c": 1e9,
        "global_batch_info": {},
    }
    th = x["th"].clone().requires_grad_()
    found, _ = core.get_policy_loss_fn(kind)(
        old_log_prob=x[old],
        log_prob=th,
        advantages=x["advantages"][:, None].expand_as(th),
        response_mask=x["mask"],
        loss_agg_mode=mode,
        config=Config(**{**known, **(settings or {})}),
        rollout_is_weights=weights,
    )
    (gradient,) = torch.autograd.grad(found, th)
    return {f"{name}: loss": found.detach(), f"{name}: gradient": gradient}


def verl_advantages(core: Any, x: Named) -> Named:
    mask, rewards = x["mask"], torch.zeros_like(x["mask"])
    last = (mask * torch.arange(mask.shape[1])).argmax(1)
    rewards[torch.arange(len(mask)), last] = x["rewards"]
    groups = np.repeat(np.arange(GROUPS), len(mask) // GROUPS)
    first = torch.arange(len(mask)), mask.argmax(1)
    config = Config(gamma=1.0)
    grpo, _ = core.compute_grpo_outcome_advantage(rewards, mask, groups)
    dr_grpo, _ = core.compute_grpo_outcome_advantage(rewards, mask, groups, norm_adv_by_std_in_grpo=False)
    rloo, _ = core.compute_rloo_outcome_advantage(rewards, mask, groups)
    plus_plus, _ = core.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config=config)
    _, returns = core.compute_gae_advantage_return(rewards, x["values"], mask, 0.99, 0.95)
    return {
        "advantage grpo": grpo[first],
        "advantage dr_grpo": dr_grpo[first],
        "advantage rloo": rloo[first],
        "advantage reinforce_plus_plus": plus_plus[first],
        "advantage gae": returns * mask,
    }


def verl(x: Named, folder: Path) -> Named:
    core = core_algos(folder)
    close = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1}
    found = verl_loss(core, "ppo, token mean", x, "vanilla", "token-mean", {"clip_ratio_high": 0.28})
    found |= verl_loss(core, "ppo, sequence mean", x, "vanilla", "seq-mean-token-mean")
    found |= verl_loss(core, "ppo, fixed length", x, "vanilla", "seq-mean-token-sum-norm")
    found |= verl_loss(core, "ppo, dual clip", x, "vanilla", "token-mean", {"clip_ratio_c": 3.0})
    found |= verl_loss(core, "cispo, clipped below", x, "cispo", "token-mean", {"clip_ratio_high": 0.28})
    found |= verl_loss(core, "gspo", x, "gspo", "seq-mean-token-mean", close)
    found |= verl_loss(core, "gspo, token mean", x, "gspo", "token-mean", close)
    dro = {"policy_loss": SimpleNamespace(dro_beta=0.1)}
    found |= verl_loss(core, "kimi", x, "dro", "seq-mean-token-sum", dro)
    weights = (x["prox"] - x["mu"]).exp().clamp(max=1.5)  # computed elsewhere in verl: transcribed
    found |= transcribed(verl_loss(core, "decoupled ppo", x, "vanilla", "token-mean", old="prox", weights=weights))
    for name in ("k1", "k2", "k3"):
        found[f"kl {name}"] = core.kl_penalty_forward(x["th"], x["ref"], name) * x["mask"]
    return {**found, **verl_advantages(core, x)}


def main(peer: str, given: str, answer: str, *folder: str) -> None:
    x = torch.load(given, weights_only=True)
    torch.save(trl(x) if peer == "trl" else verl(x, Path(folder[0])), answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
