"""GRPO without a correction, forced: what `algo.checks` refuses, so that it can be seen why."""

from __future__ import annotations

from millstream.algo.losses import reinforce
from millstream.objective import LossInputs, TokenLoss


def uncorrected(x: LossInputs) -> TokenLoss:
    """-A log th, whoever sampled: x.behaviour_N is not looked at."""
    return reinforce(x)


uncorrected.corrects = True  # type: ignore[attr-defined]  # the lie: it does not, and off policy its gradient is another one
