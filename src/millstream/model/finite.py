"""Weights that are not numbers: found before they leave a learner."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


@torch.no_grad()
def names_not_finite(weights: Mapping[str, Tensor]) -> list[str]:
    """The weights that have a NaN or an infinity. Every weight is read once, and the device is waited for once."""
    found = {name: weight for name, weight in weights.items() if weight.is_floating_point() and weight.numel()}
    if not found:
        return []
    largest = torch._foreach_norm(list(found.values()), ord=math.inf)  # the largest magnitude, or NaN
    is_finite = torch.stack(largest).isfinite().tolist()
    return [name for name, is_sound in zip(found, is_finite, strict=True) if not is_sound]
