"""What every engine has to know of a request: which ones can never run, and the tokens that have been sampled so far."""

from __future__ import annotations

import math

from millstream.errors import RequestRefused
from millstream.types import Completion, Finish, Request, Sampled, Sampling

MIN_DIVISOR = 1e-6  # of logits: divided by a smaller temperature they leave the range of 32 bits
CONTEXT_LIMIT = "the model's context of {}: set rollout.max_tokens lower"
ROPE_LIMIT = "the {} tokens beyond which the model's rope changes for all requests: set rollout.max_tokens lower"
CACHE_LIMIT = "the {} tokens that fit into the cache: set engine.cache_gb higher, rollout.max_tokens lower"


class PartialCompletion:
    """The tokens that were sampled for a request so far, and whether it has ended."""

    __slots__ = ("finish", "logprobs", "request", "tokens", "versions")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.finish: Finish | None = None

    def append(self, token: int, logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.request.sampling.stop:
            self.finish = Finish.STOP
        elif len(self.tokens) == self.request.sampling.max_tokens:
            self.finish = Finish.LENGTH

    def since(self, begin: int) -> Sampled:
        return Sampled(tuple(self.tokens[begin:]), tuple(self.logprobs[begin:]), tuple(self.versions[begin:]))

    def completion(self) -> Completion:
        """Aborted, if it has not ended."""
        return Completion(
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish=self.finish or Finish.ABORT,
        )


def check_request(
    request: Request,
    max_length: int | None,
    *,
    num_words: int | None = None,
    num_adapters: int | None = 0,
    limit: str = CONTEXT_LIMIT,
    checks_tokens: bool = True,
) -> None:
    """Raises `RequestRefused` for a request that can never run, or whose failure would break others. `max_length`, `num_words`
    (ids that the model has an embedding for) and `num_adapters` None: there is no limit, or it is not known here. `limit`: what
    sets `max_length`. `checks_tokens`: whether each token is looked at, which takes longer in every turn of a conversation."""
    wrong = _wrong_sampling(request.sampling) or _wrong_numbers(request)
    if wrong is None and checks_tokens:
        wrong = _wrong_tokens(request, num_words)
    if wrong is not None:
        raise RequestRefused(f"{request.key}: {wrong}")
    if request.adapter is not None and num_adapters is not None and not 0 <= request.adapter < num_adapters:
        raise RequestRefused(
            f"{request.key}: adapter {request.adapter}, and this engine has {num_adapters} to choose from"
        )
    if max_length is not None and len(request.tokens) + request.sampling.max_tokens > max_length:
        raise RequestRefused(
            f"{request.key}: a prompt of {len(request.tokens)} tokens and max_tokens = {request.sampling.max_tokens} "
            f"exceed {limit.format(max_length)}, or drop the prompt"
        )


def _wrong_sampling(sampling: Sampling) -> str | None:
    if sampling.max_tokens < 1:
        return "max_tokens must be at least 1"
    if not 0 <= sampling.top_k < 2**63 or not 0 < sampling.top_p <= 1:
        return "top_k must be at least 0 and fit into 64 bits, top_p above 0 and at most 1"
    if sampling.temperature != 0 and not MIN_DIVISOR <= sampling.temperature < math.inf:
        expected = f"0, which is greedy, or at least {MIN_DIVISOR:g} and finite"
        return f"temperature = {sampling.temperature:g}: expected {expected}"
    return None


def _wrong_numbers(request: Request) -> str | None:
    if not request.tokens:
        return "the prompt is empty"
    if not 0 <= request.num_sampled < len(request.tokens):
        return "num_sampled must be at least 0 and less than the number of tokens"
    if not 0 <= request.seed < 2**64:
        return f"seed = {request.seed}: expected at least 0 and less than 2**64"
    return None


def _wrong_tokens(request: Request, num_words: int | None) -> str | None:
    low, high = min(request.tokens), max(request.tokens)
    if low < 0 or (num_words is not None and high >= num_words):
        wrong = low if low < 0 else high
        most = "" if num_words is None else f" and less than {num_words}, the model's vocabulary"
        return f"the token {wrong} in the prompt: expected at least 0{most}; is the tokenizer another model's?"
    return None
