"""A causal language model as the learner sees it: packed tokens in, log-probabilities of chosen tokens out.

A module of its own, so that whatever wraps modules (sharding, compilation) wraps all of what is differentiated.
Shapes: N tokens to compute, M of them predicted; D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from millstream.errors import LearnerError, ModelError
from millstream.model.attention import Packed, rows_of
from millstream.model.load import rope_limit
from millstream.model.logprobs import Predicted, plain_logprobs, predict

MIN_OFFLOADED = 1024  # numbers in a tensor: a smaller one is not worth a copy
RECOMPILE_LIMIT = 32  # numbers of tokens, each with and without a gradient, before torch gives up compiling


class Policy(nn.Module):
    """No dropout: the log-probabilities of a row must not depend on chance. `is_head_plain`: see `has_plain_head`; None: it is
    tried."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        is_compiled: bool = False,
        is_head_plain: bool | None = None,
    ) -> None:
        super().__init__()
        self.model = model.eval()
        self._temperature = temperature
        self._is_compiled = is_compiled
        self._has_plain_head = has_plain_head(model) if is_head_plain is None else is_head_plain
        if is_compiled:
            compile_layers(model)

    def forward(
        self, tokens_N: Tensor, packed: Packed, before_M: Tensor, targets_M: Tensor, needs_entropy: bool = False
    ) -> Predicted:
        """Each target is predicted from the token at `before`, at the sampling temperature."""
        if not self._has_plain_head:
            logits_MV = self.model(logits_to_keep=before_M, **_inputs(self.model, tokens_N, packed)).logits[0]
            return plain_logprobs(logits_MV, targets_M, self._temperature, needs_entropy)
        hidden_MD = hidden_states(self.model, tokens_N, packed)[before_M]
        return predict(
            hidden_MD,
            self.model.get_output_embeddings().weight,
            targets_M,
            temperature=self._temperature,
            needs_entropy=needs_entropy,
            is_compiled=self._is_compiled,
        )


def _inputs(model: PreTrainedModel, tokens_N: Tensor, packed: Packed) -> dict[str, Any]:
    """Raises `LearnerError` for a row whose length would change the rope of all others."""
    limit = rope_limit(model.config.get_text_config())
    if limit is not None and packed.longest > limit:
        raise LearnerError(
            f"a row of {packed.longest} tokens, and beyond {limit} the rope of {type(model).__name__} has other frequencies "
            "for all rows of a pass: set rollout.max_tokens lower"
        )
    return {
        "input_ids": tokens_N[None],
        "position_ids": packed.position_ids,
        "use_cache": False,
        "context": packed,
    }


def hidden_states(model: PreTrainedModel, tokens_N: Tensor, packed: Packed) -> Tensor:
    """The last ones, of every token."""
    hidden_ND: Tensor = model.get_decoder()(**_inputs(model, tokens_N, packed)).last_hidden_state[0]
    return hidden_ND


@torch.no_grad()
def has_plain_head(model: PreTrainedModel) -> bool:
    """Whether the logits are the head times the last hidden states, and nothing else: found by trying. Models that scale or
    cap their logits, or have adapters on their head, make them themselves."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        return False
    device = head.weight.device
    tokens_N, packed = torch.arange(4, device=device) % head.out_features, Packed(rows_of([4]), device)
    found = model(**_inputs(model, tokens_N, packed)).logits[0]
    return torch.equal(
        head(hidden_states(model, tokens_N, packed)), found
    )  # a cap changes small logits in their last bits


def layers_of(model: nn.Module) -> list[GradientCheckpointingLayer]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def recompute_activations(model: PreTrainedModel) -> None:
    """Layers keep what comes into them and compute the rest again in the backward pass: more time, much less memory.

    transformers does so in training mode only. It is the layer that is set to it, not what is inside: no dropout begins."""
    layers = layers_of(model)
    if not layers:
        raise ModelError(f"{type(model).__name__} has no layers that can be recomputed: leave learner.recompute out")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        layer.training = True


def activations_on_host() -> saved_tensors_hooks:
    """Within the block, what a backward pass will need is copied to the host's memory, and back when it is needed. Not the
    parameters, which stay where they are, nor small tensors."""

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if tensor.numel() < MIN_OFFLOADED or isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return tensor.device, host.copy_(tensor, non_blocking=True)

    def unpack(kept: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept[1].to(kept[0], non_blocking=True)

    return saved_tensors_hooks(pack, unpack)


def compile_layers(model: PreTrainedModel) -> None:
    """Each layer is compiled by itself; they are alike, so it is done once for every number of tokens. The attention is not."""
    torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
    for layer in layers_of(model):
        layer.compile(dynamic=False)
