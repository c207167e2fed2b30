"""The reference of the engine tests: tokens and log-probabilities from a plain model of transformers. Imports torch.

Independent of the engines' sampling code, token by token and without a batch, so that the two do not share a mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from millstream.types import Completion, Request, Sampling

# Of a request in flight after new weights: see `EngineHarness.cache_after_load`.
Cache = Literal["kept", "computed again", "not said"]


class Reference:
    def __init__(self, model: Any) -> None:
        self.model = model.eval()

    @torch.no_grad()
    def generate(self, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Greedily, by transformers itself."""
        out = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return tuple(out[0, len(prompt) :].tolist())

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], cache: Any = None) -> Tensor:
        """The logits after each of these tokens, which follow the content of the cache."""
        out = self.model(torch.tensor([list(tokens)]), past_key_values=cache, use_cache=cache is not None)
        return out.logits[0].float()  # type: ignore[no-any-return]

    def probabilities(self, prompt: Sequence[int], sampling: Sampling) -> dict[int, float]:
        """Of the possible next tokens."""
        left = kept_probabilities(self.logits(prompt)[-1], sampling)
        return {token: float(left[token]) for token in left.nonzero()[:, 0].tolist()}


def kept_probabilities(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that is sampled from, in float64: the most likely tokens within top_k and top_p. Greedy: all tokens."""
    probabilities_V = torch.softmax(logits_V.double() / (sampling.temperature or 1.0), -1)
    order = probabilities_V.argsort(descending=True).tolist()[: sampling.top_k or None]
    if sampling.top_p < 1.0:
        total, before, kept = float(probabilities_V[order].sum()), 0.0, list[int]()
        for token in order:
            if before / total >= sampling.top_p:
                break
            kept.append(token)
            before += float(probabilities_V[token])
        order = kept
    left_V = torch.zeros_like(probabilities_V)
    left_V[order] = probabilities_V[order]
    return left_V / left_V.sum()


def logprobs_over(
    request: Request, completion: Completion, references: dict[int, Reference], cache: Cache
) -> list[float]:
    """The expected log-probabilities of a completion, each under the weights of the version recorded for it. Ends before the
    first token that cannot be predicted."""
    tokens, versions = completion.tokens, completion.versions
    if not tokens:
        return []
    if cache == "kept" and len(set(versions)) > 1:
        logits = _over_kept_cache(request.tokens, tokens, versions, references)
    else:
        logits = _computed_again(request.tokens, tokens, versions, references)
    end = len(tokens) if cache != "not said" else versions.count(versions[0])
    distributions = [kept_probabilities(logits[at], request.sampling) for at in range(end)]
    return [float(one[token].log()) for one, token in zip(distributions, tokens, strict=False)]


def _computed_again(
    prompt: Sequence[int], tokens: Sequence[int], versions: Sequence[int], references: dict[int, Reference]
) -> list[Tensor]:
    """One forward pass over all tokens for each version."""
    begin = len(prompt) - 1
    passes = {version: references[version].logits([*prompt, *tokens])[begin:] for version in set(versions)}
    return [passes[version][at] for at, version in enumerate(versions)]


def _over_kept_cache(
    prompt: Sequence[int], tokens: Sequence[int], versions: Sequence[int], references: dict[int, Reference]
) -> list[Tensor]:
    """The keys and values of a token are those of the weights that read it and sampled the next one."""
    from transformers import DynamicCache

    cache = DynamicCache(config=references[versions[0]].model.config)
    found = [references[versions[0]].logits(prompt, cache)[-1]]
    for token, version in zip(tokens, versions[1:], strict=False):
        found.append(references[version].logits([token], cache)[-1])
    return found
