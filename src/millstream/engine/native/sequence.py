"""One request on its way through an engine, and what makes a request one that can never run."""

from __future__ import annotations

import math

from millstream.errors import RequestRefused
from millstream.types import Completion, Finish, Request, RequestKey, Sampled, Sampling

MIN_TEMPERATURE = 1e-6
"""Below it, logits that are divided by it leave what 32 bits hold."""
CONTEXT = "the model's context of {}: set rollout.max_tokens lower"
CACHE = "the {} tokens that fit into the cache: set engine.cache_gb higher, rollout.max_tokens lower"


class Answer:
    """What was sampled for a request so far, and whether it has ended."""

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


class TokenSequence(Answer):
    """What was sampled for a request, and how far it is. `slot` and `blocks` belong to whoever runs it."""

    __slots__ = (
        "blocks",
        "chain",
        "is_gone",
        "is_mixed",
        "is_prefilling",
        "is_watched",
        "num_computed",
        "num_indexed",
        "num_launched",
        "num_told",
        "slot",
    )

    def __init__(self, request: Request, *, is_watched: bool = False) -> None:
        super().__init__(request)
        self.is_watched = is_watched
        self.num_told = 0
        self.num_launched = 0
        """Tokens that were sampled or are being sampled: at most one more than those that are known."""
        self.num_computed = 0
        """Tokens whose keys and values are in the cache, or will be when what was launched is done."""
        self.is_prefilling = True
        """Whether tokens before the newest are still to be computed."""
        self.is_gone = False
        """Whether it was aborted: what is sampled for it from now on is nobody's."""
        self.is_mixed = False
        """Whether its keys and values are of several versions."""
        self.slot = -1
        self.blocks: list[int] = []
        self.num_indexed = 0
        self.chain = 0
        """Of its blocks, those that others can find; and the number of the last of them."""

    @property
    def length(self) -> int:
        """Tokens that are known: the prompt's and the sampled ones."""
        return len(self.request.tokens) + len(self.tokens)

    @property
    def sequence(self) -> tuple[int, ...]:
        return (*self.request.tokens, *self.tokens)

    @property
    def can_decode(self) -> bool:
        return not self.is_prefilling and self.finish is None and self.num_launched < self.request.sampling.max_tokens

    def begin_again(self) -> None:
        """Its keys and values are gone: they are computed anew before the next token is sampled."""
        self.num_computed = 0
        self.num_launched = len(self.tokens)
        self.is_prefilling = True
        self.is_mixed = False

    def news(self) -> Sampled:
        """What was sampled since this was asked last."""
        begin = self.num_told
        self.num_told = len(self.tokens)
        return self.since(begin)


Finished = list[tuple[RequestKey, Completion]]


def check_request(
    request: Request, max_length: int | None, *, num_words: int | None = None, limit: str = CONTEXT
) -> None:
    """Raises `RequestRefused` for a request that can never run, or that would take others with it. None: there is no limit, or
    it is not known here. `num_words`: ids that the model has an embedding for; `limit`: what sets `max_length`."""
    wrong = _wrong_sampling(request.sampling) or _wrong_tokens(request, num_words)
    if wrong is not None:
        raise RequestRefused(f"{request.key}: {wrong}")
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
    if sampling.temperature != 0 and not MIN_TEMPERATURE <= sampling.temperature < math.inf:
        expected = f"0, which is greedy, or at least {MIN_TEMPERATURE:g} and finite"
        return f"temperature = {sampling.temperature:g}: expected {expected}"
    return None


def _wrong_tokens(request: Request, num_words: int | None) -> str | None:
    if not request.tokens:
        return "the prompt is empty"
    if not 0 <= request.num_sampled < len(request.tokens):
        return "num_sampled must be at least 0 and less than the number of tokens"
    if not 0 <= request.seed < 2**64:
        return f"seed = {request.seed}: expected at least 0 and less than 2**64"
    low, high = min(request.tokens), max(request.tokens)
    if low < 0 or (num_words is not None and high >= num_words):
        wrong = low if low < 0 else high
        most = "" if num_words is None else f" and less than {num_words}, the model's vocabulary"
        return f"the token {wrong} in the prompt: expected at least 0{most}; is the tokenizer another model's?"
    return None
