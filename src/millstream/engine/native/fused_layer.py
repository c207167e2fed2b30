"""Fused decoder layers: norm and product, attention, product and residual sum are one operation each, five in a layer.

    qkv = normed_product(x)     attention     x += product     inner = gated_product(x)     x += product

For the known architectures (`engine.native.fused.FAMILIES`) whose layers are a norm and an attention, a norm and an MLP, and
whose modules `fused.fuse` has replaced. Other layers, such as those of Gemma 2 and 3, keep their fused modules.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from millstream.engine.native.fused import (
    FAMILIES,
    FusedAttention,
    FusedContext,
    FusedForward,
    FusedMLP,
    FusedNorm,
    operations_for,
)
from millstream.engine.native.plain import Projection

LAYERS = frozenset(f"{name}DecoderLayer" for name in FAMILIES)
PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
Part = TypeVar("Part")


def fuse_layers(model: nn.Module) -> int:
    """In place, after `fused.fuse`. Returns the number of fused layers. `fused.unfuse` undoes it."""
    num = 0
    for module in model.modules():
        if type(module).__name__ in LAYERS and (layer := _layer(module)) is not None:
            module.forward = FusedForward(module, layer)
            num += 1
    return num


class FusedLayer(NamedTuple):
    attention: FusedAttention
    mlp: FusedMLP
    first_norm: FusedNorm
    second_norm: FusedNorm

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
        qkv_NE = operations.normed_product(x_NE, self.first_norm.norm, self.attention.qkv)
        attended_NE = self.attention.attend(qkv_NE, position_embeddings, context)
        operations.add_product(x_NE, attended_NE, _projection(self.attention.out))
        inner_NE = operations.gated_product(x_NE, self.second_norm.norm, self.mlp.gate_up, self.mlp.activation)
        operations.add_product(x_NE, inner_NE, _projection(self.mlp.down))
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
