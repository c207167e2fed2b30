"""Fused decoder layers: five operations a layer, each of which is one kernel where there are few rows.

    qkv = product(normed)            attention      x += product, normed = norm(x)
    inner = gated_product(normed)                   x += product, normed = norm(x)

The last norm is that of the next layer: the pass's context hands it on.
For the known architectures (`engine.native.fused.FAMILIES`) whose layers are a norm and an attention, a norm and an MLP, and
whose modules `fused.fuse` has replaced. Other layers, such as those of Gemma 2 and 3, keep their fused modules.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from millstream.engine.native.fused import (
    FAMILIES,
    FusedAttention,
    FusedContext,
    FusedCount,
    FusedForward,
    FusedMLP,
    FusedNorm,
    fuse,
    operations_for,
)
from millstream.engine.native.plain import Projection

LAYERS = frozenset(f"{name}DecoderLayer" for name in FAMILIES)
PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
Part = TypeVar("Part")


def fuse_model(model: nn.Module) -> FusedCount:
    """Its modules and its layers, in place."""
    with torch.inference_mode():
        found = fuse(model)
        fuse_layers(model)
    return found


def fuse_layers(model: nn.Module) -> int:
    """In place, after `fused.fuse`. Returns the number of fused layers. `fused.unfuse` undoes it."""
    found = [(module, _layer(module)) for module in model.modules() if type(module).__name__ in LAYERS]
    layers = [(module, layer) for module, layer in found if layer is not None]
    by_number = {layer.attention.layer: layer for _, layer in layers}
    for module, layer in layers:
        number = layer.attention.layer
        after = by_number.get(number + 1)
        linked = layer._replace(is_first=number - 1 not in by_number, next_norm=after and after.first_norm)
        module.forward = FusedForward(module, linked)
    return len(layers)


class FusedLayer(NamedTuple):
    attention: FusedAttention
    mlp: FusedMLP
    first_norm: FusedNorm
    second_norm: FusedNorm
    is_first: bool = True  # the layer before it is not fused
    next_norm: FusedNorm | None = None  # of the layer after it, if that is fused

    def __call__(
        self,
        hidden_states: Tensor,
        *_: Any,
        position_embeddings: tuple[Tensor, Tensor],
        context: FusedContext,
        **__: Any,
    ) -> Tensor:
        """Changes `hidden_states` in place, and returns them."""
        operations, x_NE = operations_for(hidden_states.device), hidden_states[0]
        normed = operations.normed(x_NE, self.first_norm.norm) if self.is_first else context.normed
        assert normed is not None, "the layer before has made it"
        qkv_NE = operations.product(normed, self.attention.qkv)
        attended_NE = self.attention.attend(qkv_NE, position_embeddings, context)
        normed = operations.add_product(x_NE, attended_NE, _projection(self.attention.out), self.second_norm.norm)
        assert normed is not None, "it has a norm"
        inner_NE = operations.gated_product(normed, self.mlp.gate_up, self.mlp.activation)
        next_norm = None if self.next_norm is None else self.next_norm.norm
        context.normed = operations.add_product(x_NE, inner_NE, _projection(self.mlp.down), next_norm)
        return hidden_states


def _layer(module: Any) -> FusedLayer | None:
    if {name for name, _ in module.named_children()} != PARTS:
        return None
    attention, mlp = _fused(module.self_attn, FusedAttention), _fused(module.mlp, FusedMLP)
    norms = [_fused(norm, FusedNorm) for norm in (module.input_layernorm, module.post_attention_layernorm)]
    if attention is None or mlp is None or norms[0] is None or norms[1] is None:
        return None
    return FusedLayer(attention, mlp, norms[0], norms[1])


def _fused(module: nn.Module, kind: type[Part]) -> Part | None:
    forward = module.__dict__.get("forward")
    found = forward.forward if isinstance(forward, FusedForward) else None
    return found if isinstance(found, kind) else None


def _projection(linear: nn.Linear) -> Projection:
    return Projection(linear.weight, linear.bias)
