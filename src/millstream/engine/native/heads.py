"""What kernels and their plain twins are told of a layer."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Heads(NamedTuple):
    """Of one attention layer, whose queries, keys and values are one product."""

    num: int
    num_keys: int
    dim: int
    query_norm: Tensor | None
    """The weight of a norm over each head; of the keys as well, or of neither."""
    key_norm: Tensor | None
    epsilon: float
    is_gemma: bool
    """Whether norms multiply by 1 + weight, before they round."""


class Pages(NamedTuple):
    """Where the keys and values of some tokens are."""

    keys: Tensor
    """[P, K, S, D], and the values as well."""
    values: Tensor
    table: Tensor
    """[slots, pages of a slot], int32."""
    slots_N: Tensor
    positions_N: Tensor
