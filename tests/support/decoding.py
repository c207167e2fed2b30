"""Decoding with a batcher, and what a plain forward pass gives for the same tokens."""

from __future__ import annotations

import torch

from millstream.engine.native.batching import Batcher
from millstream.types import Completion, Request, Sampling


def drain(batcher: Batcher, done: dict[int, Completion]) -> None:
    while batcher.has_work:
        done.update((key.group_id, completion) for key, completion in batcher.step())


def alone(batcher: Batcher, one: Request) -> Completion:
    done = dict[int, Completion]()
    batcher.add(one)
    drain(batcher, done)
    return done[one.key.group_id]


@torch.no_grad()
def teacher_forced(model: torch.nn.Module, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities of the tokens in one plain forward pass."""
    ids = torch.tensor([[*prompt, *tokens]])
    logprobs = torch.log_softmax(model(ids).logits[0].float(), -1)
    at = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
    return logprobs[at, torch.tensor(tokens)]


def kept_by(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distribution, token by token: the likeliest ones until there are enough of them."""
    probabilities = torch.softmax(logits / sampling.temperature, -1).double()
    order = probabilities.argsort(descending=True).tolist()[: sampling.top_k or None]
    total, kept = float(probabilities[order].sum()), list[int]()
    for token in order:
        if sum(float(probabilities[one]) for one in kept) / total >= sampling.top_p:
            break
        kept.append(token)
    left = torch.zeros_like(probabilities)
    left[kept] = probabilities[kept]
    return left / left.sum()
