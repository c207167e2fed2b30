"""Weights that are not numbers: found before they leave a learner."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


@torch.no_grad()
def names_not_finite(weights: Mapping[str, Tensor]) -> list[str]:
    """The weights that have a NaN or an infinity. Every weight is read once, and the device is waited for once."""
    found = {name: weight for name, weight in weights.items() if weight.is_floating_point() and weight.numel()}
    if not found:
        return []
    device = next(iter(found.values())).device  # a merged model may have weights on several
    bounds = [bound.to(device) for weight in found.values() for bound in torch.aminmax(weight)]  # NaN if one is NaN
    is_finite = torch.stack(bounds).view(-1, 2).isfinite().all(dim=1).tolist()
    return [name for name, is_sound in zip(found, is_finite, strict=True) if not is_sound]
