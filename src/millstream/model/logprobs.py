"""Log-probabilities and entropies from the last hidden state and the head, without all logits at once.

The logits of M tokens over a vocabulary of V are M x V numbers: with 16,000 tokens and 150,000 words, ten gigabytes. They are
made a chunk of tokens at a time, twice: forward for the log-probabilities, and backward for the gradient, which is

    d log p(target) / d logits = (one-hot - p) / temperature        d entropy / d logits = -p (log p + entropy) / temperature

with p from the log-sum-exp that the forward pass kept. On a CPU, what fits into one chunk takes the plain way, `plain`, which
is also what tests hold the other to.

Shapes: M tokens, C tokens of a chunk, D hidden size, V words.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


class Predicted(NamedTuple):
    logprobs_M: Tensor
    entropy_M: Tensor | None  # None: not asked for


def chunk_elements_on(device: torch.device) -> int:
    """Logits that exist at one time: in float32 a gigabyte on a GPU, a quarter of one elsewhere."""
    return 1 << (28 if device.type == "cuda" else 26)


def predict(
    hidden_MD: Tensor,
    head_VD: Tensor,
    targets_M: Tensor,
    *,
    temperature: float,
    needs_entropy: bool = False,
    is_compiled: bool = False,
    chunk_elements: int | None = None,
) -> Predicted:
    """Of the targets, under softmax(hidden head / temperature); in float32 whatever the dtype of the model."""
    most = chunk_elements_on(hidden_MD.device) if chunk_elements is None else chunk_elements
    if not hidden_MD.is_cuda and len(hidden_MD) * len(head_VD) <= most:
        return plain_logprobs(hidden_MD @ head_VD.t(), targets_M, temperature, needs_entropy)
    how = _How(temperature, needs_entropy, is_compiled, max(1, most // len(head_VD)))
    logprobs_M, entropy_M = _Chunked.apply(hidden_MD, head_VD, targets_M, how)  # type: ignore[no-untyped-call]
    return Predicted(logprobs_M, entropy_M if needs_entropy else None)


def plain_logprobs(logits_MV: Tensor, targets_M: Tensor, temperature: float, needs_entropy: bool) -> Predicted:
    logs_MV = torch.log_softmax(logits_MV.float() / temperature, dim=-1)
    entropy_M = -(logs_MV.exp() * logs_MV).sum(-1) if needs_entropy else None
    return Predicted(logs_MV.gather(1, targets_M[:, None])[:, 0], entropy_M)


class _How(NamedTuple):
    temperature: float
    needs_entropy: bool
    is_compiled: bool
    chunk: int

    def run(self, function: F, num_tokens: int) -> F:
        """Compiled for whole chunks, of which there are many alike. What is left over is different every time."""
        return _compiled(function) if self.is_compiled and num_tokens == self.chunk else function


@cache
def _compiled(function: F) -> F:
    compiled: F = torch.compile(function, dynamic=False)  # type: ignore[assignment]
    return compiled


def _logits(hidden_CD: Tensor, head_VD: Tensor) -> Tensor:
    """A GPU sums bfloat16 products in float32 and can keep what it has: logits rounded to bfloat16 are off by a thirtieth."""
    if hidden_CD.is_cuda and hidden_CD.dtype != torch.float32:
        return torch.mm(hidden_CD, head_VD.t(), out_dtype=torch.float32)
    return (hidden_CD @ head_VD.t()).float()


def _norms(logits_CV: Tensor, temperature: float) -> Tensor:
    return (logits_CV / temperature).logsumexp(-1)


def _entropies(logits_CV: Tensor, norms_C: Tensor, temperature: float) -> Tensor:
    logs_CV = logits_CV / temperature - norms_C[:, None]
    return -(logs_CV.exp() * logs_CV).sum(-1)


def _slopes(logits_CV: Tensor, norms_C: Tensor, targets_C: Tensor, by_logprob_C: Tensor, temperature: float) -> Tensor:
    """What each logit does to the log-probabilities, weighted by what these do to the loss."""
    p_CV = (logits_CV / temperature - norms_C[:, None]).exp()
    is_target_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == targets_C[:, None]
    return (is_target_CV.float() - p_CV) * (by_logprob_C[:, None] / temperature)


def _entropy_slopes(
    logits_CV: Tensor, norms_C: Tensor, entropy_C: Tensor, by_entropy_C: Tensor, temperature: float
) -> Tensor:
    logs_CV = logits_CV / temperature - norms_C[:, None]
    return -logs_CV.exp() * (logs_CV + entropy_C[:, None]) * (by_entropy_C[:, None] / temperature)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_MD: Tensor, head_VD: Tensor, targets_M: Tensor, how: _How) -> tuple[Tensor, Tensor]:
        logprobs_M = hidden_MD.new_empty(len(hidden_MD), dtype=torch.float32)
        norms_M = torch.empty_like(logprobs_M)
        entropy_M = torch.zeros_like(logprobs_M)
        for begin in range(0, len(hidden_MD), how.chunk):
            now = slice(begin, begin + how.chunk)
            logits_CV = _logits(hidden_MD[now], head_VD)
            norms_M[now] = how.run(_norms, len(logits_CV))(logits_CV, how.temperature)
            logprobs_M[now] = logits_CV.gather(1, targets_M[now, None])[:, 0] / how.temperature - norms_M[now]
            if how.needs_entropy:
                entropy_M[now] = how.run(_entropies, len(logits_CV))(logits_CV, norms_M[now], how.temperature)
        ctx.save_for_backward(hidden_MD, head_VD, targets_M, norms_M, entropy_M)
        ctx.how = how
        return logprobs_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MD, head_VD, targets_M, norms_M, entropy_M = ctx.saved_tensors
        how: _How = ctx.how
        by_logprob_M, by_entropy_M = grads
        hidden_grad_MD = torch.empty_like(hidden_MD) if ctx.needs_input_grad[0] else None
        head_grad_VD = torch.zeros_like(head_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for begin in range(0, len(hidden_MD), how.chunk):
            now = slice(begin, begin + how.chunk)
            logits_CV, norms_C = _logits(hidden_MD[now], head_VD), norms_M[now]
            of_logprobs = (logits_CV, norms_C, targets_M[now], by_logprob_M[now], how.temperature)
            slopes_CV = how.run(_slopes, len(logits_CV))(*of_logprobs)
            if how.needs_entropy:
                more = (logits_CV, norms_C, entropy_M[now], by_entropy_M[now], how.temperature)
                slopes_CV += how.run(_entropy_slopes, len(logits_CV))(*more)
            slopes_CV = slopes_CV.to(hidden_MD.dtype)
            if hidden_grad_MD is not None:
                torch.mm(slopes_CV, head_VD, out=hidden_grad_MD[now])
            if head_grad_VD is not None:
                head_grad_VD += slopes_CV.t() @ hidden_MD[now]
        return hidden_grad_MD, None if head_grad_VD is None else head_grad_VD.to(head_VD.dtype), None, None
