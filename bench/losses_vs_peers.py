"""Our losses and advantages beside those of TRL and verl: the same tensors, double precision, the largest difference.

The peers' own code runs, in processes of their own: TRL's `GRPOTrainer._compute_loss` on an object that has what the method
reads and hands it these log-probabilities; verl's `core_algos` with its config classes replaced by plain ones. TRL makes
advantages and the weights of its mismatch correction within a method that also generates, verl the weights in its trainer:
these few lines are transcribed in the scripts beside this one, and marked so below.
Why some differ is in `docs/algorithms.md`.

    .venv/bin/python bench/losses_vs_peers.py --trl-python .venv-trl/bin/python --verl FOLDER   # FOLDER: verl, unpacked

verl's wheel is enough: pip download verl --no-deps, then unzip it into FOLDER. A peer that is not named is left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millstream.algo import AlgorithmConfig, kl, losses, recipe
from millstream.algo.advantages import ADVANTAGES
from millstream.algo.credit import gae
from millstream.objective import LossInputs, Objective

HERE = Path(__file__).parent
ROWS, LONGEST, GROUPS = 12, 9, 3
SAME = 1e-9

ALGORITHMS: dict[str, AlgorithmConfig] = {
    "ppo, token mean": AlgorithmConfig(loss="ppo", clip_high=0.28),
    "ppo, sequence mean": AlgorithmConfig(name="grpo"),
    "ppo, fixed length": AlgorithmConfig(name="dr_grpo", fixed_length=LONGEST),
    "ppo, dual clip": AlgorithmConfig(loss="ppo", dual_clip=3.0),
    "cispo": AlgorithmConfig(loss="cispo", clip_high=0.5),
    "cispo, clipped below": AlgorithmConfig(loss="cispo", clip_low=0.2, clip_high=0.28),
    "gspo": AlgorithmConfig(loss="gspo", clip_low=0.1, clip_high=0.1),
    "gspo, token mean": AlgorithmConfig(loss="gspo", clip_low=0.1, clip_high=0.1, aggregation="token_mean"),
    "kimi": AlgorithmConfig(loss="kimi", regularisation=0.1, fixed_length=1),
    "decoupled ppo": AlgorithmConfig(loss="decoupled_ppo", ratio_cap=1.5),
    "corrected, token truncate": AlgorithmConfig(loss="reinforce", correction="truncate", ratio_cap=1.5),
    "corrected, token mask": AlgorithmConfig(loss="reinforce", correction="mask", ratio_cap=1.5, ratio_floor=0.7),
    "corrected, sequence truncate": AlgorithmConfig(
        loss="reinforce", correction="truncate", correction_level="sequence", ratio_cap=1.5
    ),
    "corrected, sequence mask": AlgorithmConfig(
        loss="reinforce", correction="mask", correction_level="sequence", ratio_cap=1.5, ratio_floor=0.7
    ),
}


def tensors(seed: int = 0) -> dict[str, Tensor]:
    """Ragged rows with gaps in their masks, as agents make them; log-ratios that every clip cuts some of."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    th = -normal(ROWS, LONGEST).abs() - 0.1
    lengths = torch.randint(2, LONGEST + 1, (ROWS, 1), generator=generator)
    mask = (torch.arange(LONGEST)[None] < lengths).double()
    mask[:, 1] *= (torch.arange(ROWS) % 3 != 0).double()
    return {
        "th": th,
        "mu": th + 0.9 * normal(ROWS, LONGEST),
        "prox": th + 0.2 * normal(ROWS, LONGEST),
        "ref": th + 0.3 * normal(ROWS, LONGEST),
        "values": normal(ROWS, LONGEST),
        "mask": mask,
        "advantages": normal(ROWS),
        "rewards": (torch.rand(ROWS, generator=generator) < 0.5).double() + 0.1 * torch.arange(ROWS) % 3,
    }


def ours(x: dict[str, Tensor]) -> dict[str, Tensor]:
    found = dict[str, Tensor]()
    for name, config in ALGORITHMS.items():
        found |= of_objective(name, recipe.objective(config, max_tokens=LONGEST), x)
    base = recipe.objective(AlgorithmConfig(loss="reinforce"), max_tokens=LONGEST)

    def with_k3(inputs: LossInputs) -> Any:
        return kl.with_kl_penalty(
            inputs, losses.ppo(inputs, clip_low=0.2, clip_high=0.2), estimator="k3", coefficient=0.1
        )

    found |= of_objective("ppo with k3", base._replace(token_loss=with_k3), x)
    for name in ("k1", "k2", "k3"):
        found[f"kl {name}"] = kl.kl_estimate(name, x["th"], x["ref"]) * x["mask"]  # type: ignore[arg-type]
    rewards_BG = x["rewards"].view(GROUPS, -1).numpy()
    for name, advantage in ADVANTAGES.items():
        found[f"advantage {name}"] = torch.from_numpy(advantages(rewards_BG, x["mask"], advantage)).flatten()
    found["advantage gae"] = torch.stack([of_critic(x, row) for row in range(ROWS)])
    return found


def of_objective(name: str, objective: Objective, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss of the batch, and its gradient by the log-probability of every token."""
    th, mask = x["th"].clone().requires_grad_(), x["mask"].bool()
    row_N = mask.nonzero()[:, 0]
    flat = [tensor[mask] for tensor in (th, x["mu"], x["prox"])]
    inputs = LossInputs(*flat, x["advantages"][row_N], row_N, reference_N=x["ref"][mask])
    counts_R = x["mask"].sum(1)
    loss_N = objective.token_loss(inputs).loss_N
    loss = (loss_N * objective.row_weights(counts_R)[row_N]).sum() / objective.units(counts_R)
    (gradient,) = torch.autograd.grad(loss, th)
    return {f"{name}: loss": loss.detach(), f"{name}: gradient": gradient}


def advantages(rewards_BG: np.ndarray, mask: Tensor, advantage: Any) -> np.ndarray:
    found_BG = np.stack([advantage.of_group(rewards_G) for rewards_G in rewards_BG])
    if advantage.over_batch is None:
        return found_BG
    tokens_N = np.repeat(found_BG.flatten(), mask.sum(1).int().numpy())
    shift, divisor = advantage.over_batch(rewards_BG.flatten(), tokens_N)
    return np.asarray((found_BG - shift) / divisor)


def of_critic(x: dict[str, Tensor], row: int) -> Tensor:
    """The reward at the last trained token; returns, which verl does not whiten."""
    mask = x["mask"][row].bool()
    rewards_T = np.zeros(int(mask.sum()))
    rewards_T[-1] = float(x["rewards"][row])
    _, returns_T = gae(rewards_T, x["values"][row][mask].numpy(), discount=0.99, trace=0.95)
    found = torch.zeros(LONGEST, dtype=torch.float64)
    found[mask] = torch.from_numpy(returns_T)
    return found


def ask(python: Path, script: str, x: dict[str, Tensor], *arguments: str) -> dict[str, Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        given, answer = Path(folder) / "given.pt", Path(folder) / "answer.pt"
        torch.save(x, given)
        subprocess.run([str(python), str(HERE / script), str(given), str(answer), *arguments], check=True)
        result: dict[str, Tensor] = torch.load(answer, weights_only=True)
        return result


def compare(peer: str, mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[dict[str, Any]]:
    """A row each; the ratio is that of the norms: 1 is what is hoped for."""
    rows = []
    print(f"\n{peer}", file=sys.stderr)
    for name, value in theirs.items():
        own = mine[name.removesuffix(" (transcribed)")]
        difference = float((own - value).abs().max())
        verdict = "same" if difference < SAME else f"differs, {scaling(own, value)}"
        print(f"  {name:48s} {difference:9.1e}  {verdict}", file=sys.stderr)
        ours, norm = float(own.norm()), float(value.norm())
        metric = f"norm; largest difference {difference:.1e}"
        ratio = round(ours / norm, 9) if norm else 0.0
        rows.append({"workload": name, "metric": metric, "ours": ours, "peer": peer, "theirs": norm, "ratio": ratio})
    return rows


def scaling(mine: Tensor, theirs: Tensor) -> str:
    """Whether it is a factor: between the smallest and the largest quotient."""
    is_large = theirs.abs() > 1e-6
    if not is_large.any():
        return "theirs is 0"
    quotients = mine[is_large] / theirs[is_large]
    return f"ours / theirs between {float(quotients.min()):.6f} and {float(quotients.max()):.6f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trl-python", type=Path, help="a Python that has TRL")
    parser.add_argument("--verl", type=Path, help="the folder that has verl/trainer/ppo/core_algos.py")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    x = tensors(asked.seed)
    mine = ours(x)
    peers: dict[str, Callable[[], dict[str, Tensor]]] = {}
    if asked.trl_python:
        peers["TRL"] = lambda: ask(asked.trl_python, "losses_trl_side.py", x)
    if asked.verl:
        peers["verl"] = lambda: ask(Path(sys.executable), "losses_verl_side.py", x, str(asked.verl))
    rows = [row for name, answer in peers.items() for row in compare(name, mine, answer())]
    if asked.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
