"""Several adapters side by side in a model: the ranks of one large adapter are cut into equal parts, one for each of them.

Each row of a pass uses the part of its own adapter: the product with A is one for all, and the ranks of the others are set to 0
before B. So a batch may have any mixture of adapters, and their compute grows with their number. What is in one part never
reaches rows of another, as long as its weights are finite: 0 times infinity is not 0.

Shapes: N rows, K adapters, Q ranks of one or several layers together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from millstream.model.adapters import NAME, adapted_layers
from millstream.types import Weights

DOWN = f".lora_A.{NAME}."  # in the names of A


class AdapterRows:
    """Which adapter each row of the present pass has. A copy of a model shares it."""

    def __init__(self, num: int, rank: int, device: torch.device) -> None:
        """`rank`: of one adapter."""
        self.num = num
        self._rank = rank
        all_used = torch.ones(1, num, dtype=torch.bool, device=device)
        self._is_used = torch.cat([torch.eye(num, dtype=torch.bool, device=device), all_used])
        self._is_left_out_NK: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> AdapterRows:
        return self

    def number_of(self, adapter: int | None) -> int:
        """Of an adapter in `using`; of None, all of them."""
        return self.num if adapter is None else adapter

    @contextmanager
    def using(self, number_N: Tensor) -> Iterator[None]:
        """For the passes in this block."""
        self._is_left_out_NK = ~self._is_used[number_N.long()]
        try:
            yield
        finally:
            self._is_left_out_NK = None

    def cut(self, low: Tensor) -> Tensor:
        """The products with A, `[..., N, Q]`, with 0 in the ranks that a row does not use."""
        if self._is_left_out_NK is None:
            return low
        parts = low.view(*low.shape[:-1], -1, self.num, self._rank)
        return parts.masked_fill(self._is_left_out_NK[:, None, :, None], 0.0).flatten(-3)


def add_adapter_rows(model: nn.Module, num: int) -> None:
    """In place, to a model with adapters whose rank is a multiple of `num`."""
    layers = adapted_layers(model)
    down = next(iter(layers.values())).lora_A[NAME].weight
    rows = AdapterRows(num, len(down) // num, down.device)
    for layer in layers.values():
        layer.adapter_rows = rows
        layer.lora_A[NAME].register_forward_hook(lambda module, inputs, low: rows.cut(low))
    model.adapter_rows = rows  # type: ignore[assignment]


def adapter_rows_of(module: nn.Module) -> AdapterRows | None:
    """Of a model, or of one of its layers. None: it has one adapter, or none."""
    return getattr(module, "adapter_rows", None)


class OneAdapter(NamedTuple):
    weights: Weights
    scaling: float  # of its product with B


def side_by_side(adapters: Sequence[OneAdapter | None], shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """The weights of a model with these adapters (None: one that changes nothing), for a scaling of 1. `shapes`: of its
    weights. An adapter may have a lower rank than there is room for, and be on fewer layers."""
    made = {name: torch.zeros(*shape) for name, shape in shapes.items()}
    for number, adapter in enumerate(adapters):
        if adapter is None:
            continue
        for name, weight in adapter.weights.items():
            is_down = DOWN in name
            whole = made[name] if is_down else made[name].T
            begin = number * (len(whole) // len(adapters))
            part = weight if is_down else adapter.scaling * weight.float().T
            whole[begin : begin + len(part)] = part
    return made
