"""Fused modules of a model with adapters: linear layers that have the same input are one product, and so are the A of their
adapters; each B is added in place.

Shapes: N tokens, I inputs, E outputs of all layers together, Q ranks of all adapters together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from millstream.engine.native.plain import PLAIN, Heads
from millstream.model.adapter_rows import AdapterRows, adapter_rows_of
from millstream.model.adapters import linear_parts
from millstream.model.attention import Rule

if TYPE_CHECKING:
    from millstream.engine.native.fused import FusedContext


class LowRankPart(NamedTuple):
    """The adapter of one of the layers of a product."""

    outputs: slice  # of the layer, among E
    ranks: slice  # of the adapter, among Q
    up: Tensor
    scaling: float


class Product:
    """The weights of the layers one after the other. Without adapters, `down_QI` is None and `adapters` is empty. `rows`: where
    there are several adapters side by side."""

    def __init__(
        self,
        weight_EI: Tensor,
        bias_E: Tensor | None,
        down_QI: Tensor | None,
        adapters: Sequence[LowRankPart],
        rows: AdapterRows | None,
    ) -> None:
        self._weight = weight_EI
        self._bias = bias_E
        self._down = down_QI
        self._adapters = adapters
        self._rows = rows

    def __call__(self, x_NI: Tensor) -> Tensor:
        out_NE = F.linear(x_NI, self._weight, self._bias)
        if self._down is not None:
            low_NQ = F.linear(x_NI, self._down)
            if self._rows is not None:
                low_NQ = self._rows.cut(low_NQ)
            for part in self._adapters:
                out_NE[:, part.outputs].addmm_(low_NQ[:, part.ranks], part.up.T, alpha=part.scaling)
        return out_NE


def are_linear(*modules: nn.Module) -> bool:
    """With adapters, or without."""
    return all(linear_parts(module) is not None for module in modules)


def product_of(*modules: nn.Module) -> Product | None:
    """None: they are not all linear layers, or not alike."""
    parts = [found for found in map(linear_parts, modules) if found is not None]
    bases = [base for base, _ in parts]
    if len(parts) < len(modules) or len({base.bias is None for base in bases}) > 1:
        return None
    downs, low, at, rank = list[Tensor](), list[LowRankPart](), 0, 0
    for base, adapter in parts:
        end = at + base.out_features
        if adapter is not None:
            ranks = slice(rank, rank + len(adapter.down))
            low.append(LowRankPart(slice(at, end), ranks, adapter.up, adapter.scaling))
            downs.append(adapter.down)
            rank = ranks.stop
        at = end
    weight = join([base.weight for base in bases])
    bias = None if bases[0].bias is None else join([base.bias for base in bases])
    return Product(weight, bias, join(downs) if downs else None, low, adapter_rows_of(modules[0]))


def adapted_mlp(module: Any, activation: str) -> Callable[..., Tensor] | None:
    gate_up, down = product_of(module.gate_proj, module.up_proj), product_of(module.down_proj)
    if gate_up is None or down is None:
        return None

    def forward(x: Tensor) -> Tensor:
        inner_NE = PLAIN.gated(gate_up(x.flatten(0, -2)), activation)
        return down(inner_NE).view(*x.shape[:-1], -1)

    return forward


def adapted_attention(module: Any, heads: Heads, rule: Rule) -> Callable[..., tuple[Tensor, None]] | None:
    qkv, output = product_of(module.q_proj, module.k_proj, module.v_proj), product_of(module.o_proj)
    if qkv is None or output is None:
        return None

    def forward(
        hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *_: Any, context: FusedContext, **__: Any
    ) -> tuple[Tensor, None]:
        cos, sin = position_embeddings
        attended_NE = context.attend_fused(module.layer_idx, qkv(hidden_states[0]), cos[0], sin[0], heads, rule)
        return output(attended_NE)[None], None

    return forward


@torch.inference_mode(False)
@torch.no_grad()
def join(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor of all of them, of which they are views from now on. If they are that already, the one that there is: what
    copies of a model share is joined once."""
    if _are_joined(parameters):
        first = parameters[0].data
        return first.as_strided((sum(map(len, parameters)), *first.shape[1:]), first.stride())
    joined = torch.cat([parameter.data for parameter in parameters])
    at = 0
    for parameter in parameters:
        if (
            joined.is_cuda
        ):  # what is freed here may be used by another stream: it must have been read before it is reused
            parameter.data.record_stream(torch.cuda.current_stream(joined.device))
        parameter.data = joined[at : at + len(parameter)]
        at += len(parameter)
    return joined


def _are_joined(parameters: Sequence[Tensor]) -> bool:
    """Whether each begins where the one before it ends, in one storage."""
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    ends = itertools.accumulate((one.numel() for one in parameters), initial=parameters[0].storage_offset())
    is_next = all(one.storage_offset() == begin for one, begin in zip(parameters, ends, strict=False))
    return len(storages) == 1 and is_next and all(one.is_contiguous() for one in parameters)
