"""verl's losses and advantages on tensors that it is given: `core_algos` itself, without the rest of verl.

What `core_algos` imports beside torch is replaced where it is not installed: the config classes by plain ones, decorators by
nothing. `verl.utils.torch_functional` and `verl.utils.groupwise` are verl's own.

python bench/losses_verl_side.py GIVEN.pt ANSWER.pt FOLDER
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

GROUPS = 3


class Config(SimpleNamespace):
    """In place of verl's config classes."""

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


def loss(verl: Any, name: str, x: dict[str, Tensor], kind: str, mode: str, *, old: str = "mu", **settings: Any) -> dict:
    weights = settings.pop("weights", None)
    known = {
        "clip_ratio": 0.2,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "clip_ratio_c": 1e9,
        "global_batch_info": {},
    }
    th = x["th"].clone().requires_grad_()
    found, _ = verl.get_policy_loss_fn(kind)(
        old_log_prob=x[old],
        log_prob=th,
        advantages=x["advantages"][:, None].expand_as(th),
        response_mask=x["mask"],
        loss_agg_mode=mode,
        config=Config(**{**known, **settings}),
        rollout_is_weights=weights,
    )
    (gradient,) = torch.autograd.grad(found, th)
    return {f"{name}: loss": found.detach(), f"{name}: gradient": gradient}


def advantages(verl: Any, x: dict[str, Tensor]) -> dict[str, Tensor]:
    mask, rewards = x["mask"], torch.zeros_like(x["mask"])
    last = (mask * torch.arange(mask.shape[1])).argmax(1)
    rewards[torch.arange(len(mask)), last] = x["rewards"]
    groups = np.repeat(np.arange(GROUPS), len(mask) // GROUPS)
    first = torch.arange(len(mask)), mask.argmax(1)
    config = Config(gamma=1.0)
    grpo, _ = verl.compute_grpo_outcome_advantage(rewards, mask, groups)
    dr_grpo, _ = verl.compute_grpo_outcome_advantage(rewards, mask, groups, norm_adv_by_std_in_grpo=False)
    rloo, _ = verl.compute_rloo_outcome_advantage(rewards, mask, groups)
    plus_plus, _ = verl.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config=config)
    _, returns = verl.compute_gae_advantage_return(rewards, x["values"], mask, 0.99, 0.95)
    return {
        "advantage grpo": grpo[first],
        "advantage dr_grpo": dr_grpo[first],
        "advantage rloo": rloo[first],
        "advantage reinforce_plus_plus": plus_plus[first],
        "advantage gae": returns * mask,
    }


def main(given: str, answer: str, folder: str) -> None:
    verl, x = core_algos(Path(folder)), torch.load(given, weights_only=True)
    found = loss(verl, "ppo, token mean", x, "vanilla", "token-mean", clip_ratio_high=0.28)
    found |= loss(verl, "ppo, sequence mean", x, "vanilla", "seq-mean-token-mean")
    found |= loss(verl, "ppo, fixed length", x, "vanilla", "seq-mean-token-sum-norm")
    found |= loss(verl, "ppo, dual clip", x, "vanilla", "token-mean", clip_ratio_c=3.0)
    found |= loss(verl, "cispo, clipped below", x, "cispo", "token-mean", clip_ratio_high=0.28)
    close = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1}
    found |= loss(verl, "gspo", x, "gspo", "seq-mean-token-mean", **close)
    found |= loss(verl, "gspo, token mean", x, "gspo", "token-mean", **close)
    dro = SimpleNamespace(dro_beta=0.1)
    found |= loss(verl, "kimi", x, "dro", "seq-mean-token-sum", policy_loss=dro)
    weights = (x["prox"] - x["mu"]).exp().clamp(max=1.5)  # made elsewhere in verl: transcribed
    decoupled = loss(verl, "decoupled ppo", x, "vanilla", "token-mean", old="prox", weights=weights)
    found |= {f"{name} (transcribed)": value for name, value in decoupled.items()}
    for name in ("k1", "k2", "k3"):
        found[f"kl {name}"] = verl.kl_penalty_forward(x["th"], x["ref"], name) * x["mask"]
    torch.save({**found, **advantages(verl, x)}, answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
