"""Log-probabilities and entropies from the last hidden state and the head, without all logits at once.

The logits of M tokens over a vocabulary of V are M x V numbers: with 16,000 tokens and 150,000 words, ten gigabytes. They are
made a chunk of tokens at a time, twice: forward for the log-probabilities, and backward for the gradient, which is

    d log p(target) / d logits = (one-hot - p) / temperature        d entropy / d logits = -p (log p + entropy) / temperature

with p from the log-sum-exp that the forward pass kept. What fits into one chunk takes the plain way, `plain`, which is also
what tests hold the other to.

Shapes: M tokens, C tokens of a chunk, D hidden size, V words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 26
"""Logits that exist at one time: a quarter of a gigabyte in float32."""


class Predicted(NamedTuple):
    logprobs_M: Tensor
    entropy_M: Tensor | None
    """None: not asked for."""


def predict(
    hidden_MD: Tensor,
    head_VD: Tensor,
    targets_M: Tensor,
    *,
    temperature: float,
    needs_entropy: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Predicted:
    """Of the targets, under softmax(hidden head / temperature); in float32 whatever the dtype of the model."""
    if len(hidden_MD) * len(head_VD) <= chunk_elements:
        return plain(_logits(hidden_MD, head_VD, is_differentiable=True), targets_M, temperature, needs_entropy)
    chunk = max(1, chunk_elements // len(head_VD))
    logprobs_M, entropy_M = _Chunked.apply(hidden_MD, head_VD, targets_M, temperature, needs_entropy, chunk)  # type: ignore[no-untyped-call]
    return Predicted(logprobs_M, entropy_M if needs_entropy else None)


def plain(logits_MV: Tensor, targets_M: Tensor, temperature: float, needs_entropy: bool) -> Predicted:
    logs_MV = torch.log_softmax(logits_MV.float() / temperature, dim=-1)
    entropy_M = -(logs_MV.exp() * logs_MV).sum(-1) if needs_entropy else None
    return Predicted(logs_MV.gather(1, targets_M[:, None])[:, 0], entropy_M)


def _logits(hidden_CD: Tensor, head_VD: Tensor, *, is_differentiable: bool = False) -> Tensor:
    """A GPU sums bfloat16 products in float32 and can keep what it has: logits rounded to bfloat16 are off by a thirtieth."""
    if hidden_CD.is_cuda and hidden_CD.dtype != torch.float32 and not is_differentiable:
        return torch.mm(hidden_CD, head_VD.t(), out_dtype=torch.float32)
    return hidden_CD @ head_VD.t()


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        head_VD: Tensor,
        targets_M: Tensor,
        temperature: float,
        needs_entropy: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs_M = hidden_MD.new_empty(len(hidden_MD), dtype=torch.float32)
        norms_M = torch.empty_like(logprobs_M)
        entropy_M = torch.zeros_like(logprobs_M)
        for begin in range(0, len(hidden_MD), chunk):
            now = slice(begin, begin + chunk)
            logits_CV = _logits(hidden_MD[now], head_VD).float().div_(temperature)
            norms_M[now] = logits_CV.logsumexp(-1)
            logprobs_M[now] = logits_CV.gather(1, targets_M[now, None])[:, 0] - norms_M[now]
            if needs_entropy:
                logs_CV = logits_CV.sub_(norms_M[now, None])
                entropy_M[now] = -(logs_CV.exp() * logs_CV).sum(-1)
        ctx.save_for_backward(hidden_MD, head_VD, targets_M, norms_M, entropy_M)
        ctx.temperature, ctx.needs_entropy, ctx.chunk = temperature, needs_entropy, chunk
        return logprobs_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MD, head_VD, targets_M, norms_M, entropy_M = ctx.saved_tensors
        by_logprob_M, by_entropy_M = grads
        hidden_grad_MD = torch.empty_like(hidden_MD) if ctx.needs_input_grad[0] else None
        head_grad_VD = torch.zeros_like(head_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for begin in range(0, len(hidden_MD), ctx.chunk):
            now = slice(begin, begin + ctx.chunk)
            logs_CV = _logits(hidden_MD[now], head_VD).float().div_(ctx.temperature).sub_(norms_M[now, None])
            if ctx.needs_entropy:
                extra_CV = (logs_CV + entropy_M[now, None]).mul_(-by_entropy_M[now, None])
                grad_CV = logs_CV.exp_()
                extra_CV.mul_(grad_CV)
                grad_CV = grad_CV.mul_(-by_logprob_M[now, None]).add_(extra_CV)
            else:
                grad_CV = logs_CV.exp_().mul_(-by_logprob_M[now, None])
            grad_CV.scatter_add_(1, targets_M[now, None], by_logprob_M[now, None])
            grad_CV = grad_CV.div_(ctx.temperature).to(hidden_MD.dtype)
            if hidden_grad_MD is not None:
                torch.mm(grad_CV, head_VD, out=hidden_grad_MD[now])
            if head_grad_VD is not None:
                head_grad_VD += grad_CV.t() @ hidden_MD[now]
        head_grad = None if head_grad_VD is None else head_grad_VD.to(head_VD.dtype)
        return hidden_grad_MD, head_grad, None, None, None, None
