"""Our losses and advantages beside those of TRL and verl: the same tensors, double precision, the largest difference.

The peers' own code runs, in processes of their own (`losses_peers.py`): TRL's `GRPOTrainer._compute_loss`, verl's `core_algos`.
TRL makes advantages and the weights of its mismatch correction within a method that also generates, verl the weights in its
trainer: these few lines are transcribed there, and marked so below. Why some differ is in `docs/algorithms.md`.

    .venv/bin/python bench/losses_vs_peers.py [--json] [--smoke] [--trl-python .venv-trl/bin/python] [--verl .peer-verl]

verl's wheel is enough: `make bench-losses` downloads it and unzips it into `.peer-verl`. A peer that is not installed is left
out; with `--smoke` a stub takes its place, which answers with our own values.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from internals import ADVANTAGES, Advantage, Estimator, gae
from internals_torch import LossInputs, Objective, TokenLoss, kl, losses, objective
from losses_peers import GROUPS
from millstream import AlgorithmConfig
from report import ROOT, Options, Row, not_measured, publish, say

ROWS = 12
LONGEST = 9
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
        found |= of_objective(name, objective(config, max_tokens=LONGEST), x)
    base = objective(AlgorithmConfig(loss="reinforce"), max_tokens=LONGEST)

    def with_k3(inputs: LossInputs) -> TokenLoss:
        return kl.with_kl_penalty(
            inputs, losses.ppo(inputs, clip_low=0.2, clip_high=0.2), estimator="k3", coefficient=0.1
        )

    found |= of_objective("ppo with k3", base._replace(token_loss=with_k3), x)
    for estimator in get_args(Estimator):
        found[f"kl {estimator}"] = kl.kl_estimate(estimator, x["th"], x["ref"]) * x["mask"]
    rewards_BG = x["rewards"].view(GROUPS, -1).numpy()
    for name, advantage in ADVANTAGES.items():
        found[f"advantage {name}"] = torch.from_numpy(advantages(rewards_BG, x["mask"], advantage)).flatten()
    found["advantage gae"] = torch.stack([of_critic(x, row) for row in range(ROWS)])
    return found


def of_objective(name: str, goal: Objective, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss of the batch, and its gradient by the log-probability of every token."""
    th, mask = x["th"].clone().requires_grad_(), x["mask"].bool()
    row_N = mask.nonzero()[:, 0]
    inputs = LossInputs(
        logprobs_N=th[mask],
        behaviour_N=x["mu"][mask],
        proximal_N=x["prox"][mask],
        advantages_N=x["advantages"][row_N],
        row_N=row_N,
        reference_N=x["ref"][mask],
    )
    counts_R = x["mask"].sum(1)
    loss_N = goal.token_loss(inputs).loss_N
    loss = (loss_N * goal.row_weights(counts_R)[row_N]).sum() / goal.units(counts_R)
    (gradient,) = torch.autograd.grad(loss, th)
    return {f"{name}: loss": loss.detach(), f"{name}: gradient": gradient}


def advantages(rewards_BG: NDArray[np.float64], mask: Tensor, advantage: Advantage) -> NDArray[np.float64]:
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


def ask(python: Path, x: dict[str, Tensor], *peer: str) -> dict[str, Tensor]:
    """A peer's answers, computed in a process of its own. `peer`: its name, and its folder if it needs one."""
    with tempfile.TemporaryDirectory() as folder:
        given, answer = Path(folder) / "given.pt", Path(folder) / "answer.pt"
        torch.save(x, given)
        script = Path(__file__).with_name("losses_peers.py")
        subprocess.run([str(python), str(script), peer[0], str(given), str(answer), *peer[1:]], check=True)
        result: dict[str, Tensor] = torch.load(answer, weights_only=True)
        return result


def compare(peer: str, mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[Row]:
    """A row each; the ratio is that of the norms: 1 where both agree."""
    rows: list[Row] = []
    say(f"\n{peer}")
    for name, value in theirs.items():
        own = mine[name.removesuffix(" (transcribed)")]
        difference = float((own - value).abs().max())
        verdict = "same" if difference < SAME else f"differs, {scaling(own, value)}"
        say(f"  {name:48s} {difference:9.1e}  {verdict}")
        ours, norm = float(own.norm()), float(value.norm())
        metric = f"norm; largest difference {difference:.1e}"
        ratio = round(ours / norm, 9) if norm else None
        rows.append(Row(workload=name, metric=metric, ours=ours, peer=peer, theirs=norm, ratio=ratio))
    return rows


def scaling(mine: Tensor, theirs: Tensor) -> str:
    """Whether the difference is a factor: the smallest and the largest quotient."""
    is_large = theirs.abs() > 1e-6
    if not is_large.any():
        return "theirs is 0"
    quotients = mine[is_large] / theirs[is_large]
    return f"ours / theirs between {float(quotients.min()):.6f} and {float(quotients.max()):.6f}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--trl-python", ROOT / ".venv-trl/bin/python", kind=Path, help="a Python that has TRL")
    parser.add("--verl", ROOT / ".peer-verl", kind=Path, help="the folder that has verl/trainer/ppo/core_algos.py")
    parser.add("--seed", 0)
    options = parser.parse(argv)
    x = tensors(options.seed)
    mine = ours(x)
    peers = {
        "TRL": (options.trl_python, partial(ask, options.trl_python, x, "trl")),
        "verl": (options.verl / "verl", partial(ask, Path(sys.executable), x, "verl", str(options.verl))),
    }
    rows: list[Row] = []
    for name, (path, answers) in peers.items():
        if path.exists():
            rows += compare(name, mine, answers())
        elif options.smoke:
            rows += compare(f"stub ({name} is not installed)", mine, mine)
        else:
            rows.append(not_measured(f"losses beside {name}", f"{path} is missing: type `make bench-losses`"))
    publish(rows, options)


if __name__ == "__main__":
    main()
