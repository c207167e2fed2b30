"""Fused layers: fewer and larger operations in the layers of known architectures. Queries, keys and values are one product,
gate and up are one, norms and activations are one kernel each.

The weights stay where the library's modules expect them, as views of the joined ones: copying new weights into the model's
parameters changes both. Modules that are not known, or that share a weight with another, stay as they are. A copy of a fused
model has the library's own layers again. `engine.native.adapted` has the modules of a model with adapters;
`engine.native.fused_layer` fuses what is between these modules; `engine.native.check` compares a fused model with the
library's pass.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from millstream.engine.native.adapted import (
    adapted_attention,
    adapted_mlp,
    are_linear,
    join,
)
from millstream.engine.native.plain import PLAIN, Heads, Norm, Normed, Operations, Projection
from millstream.model.attention import Rule

FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Gemma2", "Gemma3")
ACTIVATIONS = {"SiLUActivation": "silu", "SiLU": "silu", "GELUTanh": "gelu_tanh", "PytorchGELUTanh": "gelu_tanh"}


class FusedContext(Protocol):
    normed: Normed | None  # what one layer hands to the next

    def attend_fused(
        self, layer: int, qkv_NE: Tensor, cos_ND: Tensor, sin_ND: Tensor, heads: Heads, rule: Rule
    ) -> Tensor:
        """Queries, keys and values of N tokens -> [N, H * D]."""
        ...


def operations_for(device: torch.device) -> Operations:
    """Kernels on a GPU, their plain twins elsewhere."""
    if device.type != "cuda":
        return PLAIN
    from millstream.engine.native.kernels import KERNELS

    return KERNELS


class FusedCount(NamedTuple):
    """How many modules are fused, of those that are of a known kind."""

    num: int
    known: int

    @property
    def words(self) -> str:
        if not self.num:
            return "the library's layers"
        return "fused layers" if self.num == self.known else f"fused layers ({self.num} of {self.known} modules)"

    def why(self, model: nn.Module) -> str:
        """Why the others are not; empty: all are."""
        if not self.known:
            return f"{type(model).__name__} is none of {', '.join(FAMILIES)}"
        return "" if self.num == self.known else "the others share weights, or have another form"


def fuse(model: nn.Module) -> FusedCount:
    """In place."""
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    num = known = 0
    for module in model.modules():
        kind = type(module).__name__
        make = next((make for end, make in _MAKERS.items() if kind in {f"{name}{end}" for name in FAMILIES}), None)
        if make is None:
            continue
        known += 1
        is_shared = any(uses[id(p)] > 1 for p in module.parameters())
        forward = None if is_shared else make(module)
        if forward is not None:
            module.forward = FusedForward(module, forward)
            num += 1
    return FusedCount(num, known)


def unfuse(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), FusedForward):
            del module.__dict__["forward"]


class FusedForward:
    """A forward pass in place of the library's, over the weights of this very module: a copy of the module has its own weights,
    and the library's forward pass over them."""

    def __init__(self, module: nn.Module, forward: Any) -> None:
        self._module = module
        self.forward = forward

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.forward(*args, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> MethodType:
        module = copy.deepcopy(self._module, memo)
        return MethodType(type(module).forward, module)


class FusedNorm(NamedTuple):
    module: Any
    epsilon: float
    is_gemma: bool

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return operations_for(hidden_states.device).rms_norm(hidden_states, *self.norm)

    @property
    def norm(self) -> Norm:
        return Norm(self.module.weight, self.epsilon, self.is_gemma)


def _norm(module: Any) -> FusedNorm:
    return FusedNorm(module, _epsilon(module), _is_gemma(module))


def _is_gemma(norm: nn.Module) -> bool:
    return type(norm).__name__.startswith("Gemma")


def _epsilon(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


class FusedMLP(NamedTuple):
    """Gate and up as one product."""

    gate_up: Projection
    activation: str
    down: nn.Linear

    def __call__(self, x: Tensor) -> Tensor:
        operations = operations_for(x.device)
        normed = Normed(x.view(-1, x.shape[-1]), None, 0.0)
        inner = operations.gated_product(normed, self.gate_up, self.activation)
        out: Tensor = self.down(inner.view(*x.shape[:-1], -1))
        return out


def _mlp(module: Any) -> FusedMLP | Callable[..., Tensor] | None:
    parts = (module.gate_proj, module.up_proj)
    activation = ACTIVATIONS.get(type(module.act_fn).__name__)
    if activation is None:
        return None
    if not _are_plain(*parts, module.down_proj):
        return adapted_mlp(module, activation)
    return FusedMLP(_join_weights(parts), activation, module.down_proj)


class FusedAttention(NamedTuple):
    """Queries, keys and values as one product."""

    qkv: Projection
    heads: Heads
    rule: Rule
    layer: int
    out: nn.Linear

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *_: Any,
        context: FusedContext,
        **__: Any,
    ) -> tuple[Tensor, None]:
        qkv = F.linear(hidden_states[0], *self.qkv)
        return self.out(self.attend(qkv, position_embeddings, context)[None]), None

    def attend(self, qkv_NE: Tensor, position_embeddings: tuple[Tensor, Tensor], context: FusedContext) -> Tensor:
        cos, sin = position_embeddings
        return context.attend_fused(self.layer, qkv_NE, cos[0], sin[0], self.heads, self.rule)


def _attention(module: Any) -> FusedAttention | Callable[..., tuple[Tensor, None]] | None:
    parts = (module.q_proj, module.k_proj, module.v_proj)
    dim: int = module.head_dim
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    is_odd = dim & (dim - 1) and parts[0].weight.is_cuda  # kernels need a power of two
    if not are_linear(*parts, module.o_proj) or is_odd or (norms[0] is None) != (norms[1] is None):
        return None
    heads = Heads(
        num=parts[0].out_features // dim,
        num_keys=parts[1].out_features // dim,
        dim=dim,
        query_norm=None if norms[0] is None else norms[0].weight,
        key_norm=None if norms[1] is None else norms[1].weight,
        epsilon=0.0 if norms[0] is None else _epsilon(norms[0]),
        is_gemma=norms[0] is not None and _is_gemma(norms[0]),
    )
    window = getattr(module, "sliding_window", None)
    if type(module).__name__ == "MistralAttention":  # the one that asks its config
        window = getattr(module.config, "sliding_window", None)
    softcap = module.attn_logit_softcapping if type(module).__name__ == "Gemma2Attention" else None
    rule = Rule(module.scaling, window, softcap)
    if not _are_plain(*parts, module.o_proj):
        return adapted_attention(module, heads, rule)
    return FusedAttention(_join_weights(parts), heads, rule, module.layer_idx, module.o_proj)


def _are_plain(*modules: nn.Module) -> bool:
    return all(type(module) is nn.Linear for module in modules)


def _join_weights(parts: Sequence[nn.Linear]) -> Projection:
    """One tensor of all weights, and of all biases, of which the modules' own are views from now on."""
    weight = join([part.weight for part in parts])
    bias = None if parts[0].bias is None else join([part.bias for part in parts])
    return Projection(weight, bias)


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "RMSNorm": _norm,
    "MLP": _mlp,
    "Attention": _attention,
}
