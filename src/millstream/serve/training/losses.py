"""The losses of the training client by their names there: sums over tokens, never divided. p: the policy that is trained; q:
the policy that sampled; A: the advantage. Formulas: https://tinker-docs.thinkingmachines.ai/tinker/losses

They are the losses of `millstream.algo` where these have the same formula; the client gives thresholds of the ratio where
ours take their distances from 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from millstream.algo import losses
from millstream.algo.aggregate import row_sums
from millstream.algo.corrections import bounded_exp
from millstream.learner.trainer import DirectLoss
from millstream.objective import LossInputs, TokenLoss
from millstream.serve.http import HttpError

LossColumns = Mapping[str, Tensor]
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
NOT_HERE = {
    "stable_reinforce": "it needs what only its own sampler records",
    "custom": "losses of your own run in the client: client.forward_backward_custom with a function",
}


class ClientLoss(NamedTuple):
    make: Callable[[Mapping[str, float]], DirectLoss]  # from its settings
    settings: Mapping[str, float | None] = {}  # with their defaults; None: it has to be given
    is_sampled: bool = True  # whether it reads the log-probabilities and advantages of sampled tokens; else weights
    columns: tuple[str, ...] = ()  # further inputs that it needs
    may_read: tuple[str, ...] = ()  # further inputs that it reads where they are given


def _cross_entropy(settings: Mapping[str, float]) -> DirectLoss:
    """-w log p."""
    return lambda x, columns: losses.reinforce(x)


def _importance_sampling(settings: Mapping[str, float]) -> DirectLoss:
    """-(p/q) A: PPO without a clip."""
    return lambda x, columns: losses.ppo(x, clip_low=math.inf, clip_high=math.inf)


def _ppo(settings: Mapping[str, float]) -> DirectLoss:
    """-min(r A, clip(r, low, high) A), r = p/q."""

    def loss(x: LossInputs, columns: LossColumns) -> TokenLoss:
        low, high = _thresholds(settings, columns)
        return losses.ppo(x, clip_low=1 - low, clip_high=high - 1)

    return loss


def _cispo(settings: Mapping[str, float]) -> DirectLoss:
    """-sg(clip(p/q, low, high)) A log p."""

    def loss(x: LossInputs, columns: LossColumns) -> TokenLoss:
        low, high = _thresholds(settings, columns)
        return losses.cispo(x, clip_low=1 - low, clip_high=high - 1)

    return loss


def _thresholds(settings: Mapping[str, float], columns: LossColumns) -> tuple[float, float]:
    """Of the whole batch; or of every token, where its inputs have them: tensors, which the losses take as numbers."""
    low, high = (columns.get(name, settings[name]) for name in CLIP)
    return low, high  # type: ignore[return-value]


def _dro(settings: Mapping[str, float]) -> DirectLoss:
    """-(A log p - beta / 2 (log p - log q)^2): arXiv 2405.19107. Per token, where `losses.kimi` has the square of the row."""
    beta = settings["beta"]

    def loss(x: LossInputs, columns: LossColumns) -> TokenLoss:
        square_N = (x.logprobs_N - x.behaviour_N).square()
        return TokenLoss(beta / 2 * square_N - x.advantages_N * x.logprobs_N, {})

    return loss


def _gspo(settings: Mapping[str, float]) -> DirectLoss:
    """GSPO-token, -min(s A, clip(s, low, high) A), s = sg(mean over the masked tokens of the row of p/q, geometric) p/sg(p):
    arXiv 2507.18071. `losses.gspo` is the sequence's variant."""

    def loss(x: LossInputs, columns: LossColumns) -> TokenLoss:
        is_in_N = (columns["sequence_ratio_mask"] != 0).float()
        now_N = x.logprobs_N.detach()
        mean_N = row_sums((now_N - x.behaviour_N) * is_in_N, x.row_N) / row_sums(is_in_N, x.row_N).clamp(min=1)
        ratio_N = bounded_exp(mean_N + x.logprobs_N - now_N)
        low, high = settings["clip_low_threshold"], settings["clip_high_threshold"]
        gain_N = torch.minimum(ratio_N * x.advantages_N, ratio_N.clamp(low, high) * x.advantages_N)
        return TokenLoss(-gain_N, {})

    return loss


CLIENT_LOSSES: dict[str, ClientLoss] = {
    "cross_entropy": ClientLoss(_cross_entropy, is_sampled=False),
    "importance_sampling": ClientLoss(_importance_sampling),
    "ppo": ClientLoss(_ppo, CLIP, may_read=tuple(CLIP)),
    "cispo": ClientLoss(_cispo, CLIP, may_read=tuple(CLIP)),
    "dro": ClientLoss(_dro, {"beta": None}),
    "gspo": ClientLoss(_gspo, dict.fromkeys(CLIP), columns=("sequence_ratio_mask",)),
}


def loss_named(name: str, given: Mapping[str, float | str]) -> tuple[ClientLoss, DirectLoss]:
    """With its settings. Raises `HttpError` for what is not known."""
    known = ", ".join(CLIENT_LOSSES)
    if name not in CLIENT_LOSSES:
        why = f": {NOT_HERE[name]}" if name in NOT_HERE else ""
        raise HttpError(422, f"loss_fn = {name!r} is not supported{why}. Supported: {known}")
    kind = CLIENT_LOSSES[name]
    if strange := sorted(set(given) - set(kind.settings)):
        expected = ", ".join(kind.settings) or "none"
        raise HttpError(422, f"loss_fn_config of {name} has {', '.join(strange)}: expected {expected}")
    settings: dict[str, float] = {}
    for key, default in kind.settings.items():
        value = given.get(key, default)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise HttpError(422, f"loss_fn_config of {name}: {key} = {value!r}, expected a number")
        settings[key] = float(value)
    return kind, kind.make(settings)
