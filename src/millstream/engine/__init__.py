"""The seam to whatever generates: token ids in, token ids out, with log-probabilities and a version per token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from msgspec import Struct

from millstream.engine.http.config import HttpConfig
from millstream.engine.vllm.config import VllmConfig
from millstream.types import Completion, Request, RequestKey, Sampled, Weights

OnSampled = Callable[[Sampled], None]
OnUpdate = Literal["keep", "recompute"]
PREFILL_TOKENS = 4096


class EngineConfig(Struct, frozen=True, kw_only=True):
    kind: Literal["torch", "vllm", "http"] = "torch"
    """torch: our own, over any causal LM of transformers. vllm: vLLM, where it is installed (docs/engines-vllm.md). http:
    servers, which the [engine.http] table names (docs/engines.md)."""
    vllm: VllmConfig | None = None
    """None: with kind = "vllm", the values that it has by default."""
    http: HttpConfig | None = None

    slots: int = 128
    """Requests decoded at the same time; more wait in the engine's queue."""
    prefill_tokens: int = PREFILL_TOKENS
    """Prompt tokens computed in one forward pass."""

    replicas: int = 1
    """Engines that share the rollouts. One that dies is replaced while the others go on."""

    process: bool | None = None
    """Whether the engine has a process of its own. None: on a CPU with several cores, where the interpreter's lock would
    slow both sides down. vLLM always has one."""

    cache: Literal["slots", "pages"] | None = None
    """How keys and values are kept. pages: in a pool of a fixed size that requests share; slots: one for every request, as long
    as the longest. None: pages on a GPU, slots on a CPU, where they are faster."""
    cache_gb: float | None = None
    """The size of the pool of pages; on a CPU only with cache = "pages". None: on a GPU a third of what is free, since a
    learner may live there; else 1 GB."""
    on_update: OnUpdate = "keep"
    """What becomes of the keys and values of requests in flight when new weights come: they stay, or are computed again under
    the new weights. Requests that begin later never see older ones."""

    answer_s: float = 300.0
    """An engine with work to do that says nothing for so long is declared broken, by name."""

    def __post_init__(self) -> None:
        if min(self.slots, self.prefill_tokens, self.replicas) < 1 or not 0 < self.answer_s < math.inf:
            raise ValueError("slots, prefill_tokens and replicas must be at least 1, answer_s above 0 and finite")
        if self.cache_gb is not None and (not 0 < self.cache_gb < math.inf or self.cache == "slots"):
            raise ValueError('cache_gb must be above 0 and finite, and goes with cache = "pages"')
        if (self.kind == "http") != (self.http is not None):
            raise ValueError('kind = "http" and an [engine.http] table go together: set both, or neither')
        if self.vllm is not None and self.kind != "vllm":
            raise ValueError(
                f'a [engine.vllm] table, and kind = "{self.kind}": set kind = "vllm", or leave the table out'
            )
        if self.kind == "http" and self.replicas > 1:
            raise ValueError('replicas with kind = "http": name several servers in engine.http.urls instead')
        if self.kind == "http" and (self.process, self.prefill_tokens) != (None, PREFILL_TOKENS):
            raise ValueError(
                'process and prefill_tokens are not of kind = "http", whose servers decide: leave them out'
            )
        if self.kind == "vllm" and self.process is False:
            raise ValueError('process = false with kind = "vllm", which always has a process of its own: leave it out')
        if self.kind != "torch" and (self.cache, self.cache_gb, self.on_update) != (None, None, "keep"):
            raise ValueError(
                f'cache, cache_gb and on_update are of kind = "torch", and kind = "{self.kind}": leave them out'
            )


class EngineStats(NamedTuple):
    running: int
    waiting: int
    tokens_generated: int
    requests_finished: int
    cache_used: float = 0.0
    """Share of the room for keys and values that requests in flight have taken."""
    swap_s: float = 0.0
    """How long the last `load` held decoding up."""
    num_preempted: int = 0
    """How often a request had to give its room to others and was computed again later."""


class Engine(Protocol):
    """Generates for many requests at once.

    Promises: `generate` queues its request before it first suspends, so that requests started in an order join in that
    order. It returns one log-probability per token, under the distribution the token was really sampled from, and the
    version of the weights that sampled it. `version` never falls. A request's tokens depend on its seed, on its prompt, and
    on the weights; on the requests beside it only in the last bits of floating point.
    """

    name: str
    slots: int
    """Requests that it decodes at the same time; more wait in its queue."""

    @property
    def version(self) -> int:
        """Of the weights that sample the next token."""
        ...

    async def generate(self, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        """Blocks until the request stops, reaches its length, or is aborted. Raises `EngineGone` if the engine
        breaks for good, `EngineError` if it may come back, `RequestRefused` for a request that can never run.

        `on_sampled` is told on this event loop, before this returns, what has been sampled: in order, each token at most
        once. The last tokens, or all of them if the engine works so, come with the completion alone."""
        ...

    async def abort(self, key: RequestKey) -> None:
        """The request's `generate` returns what it has, with `Finish.ABORT`. Unknown or finished keys are ignored."""
        ...

    async def pause(self) -> None:
        """No token is sampled after this returns, until `resume`. Nothing is lost; requests may still be queued."""
        ...

    async def resume(self) -> None: ...

    async def load(self, version: int, weights: Weights) -> None:
        """Swap the weights between two decode steps, requests in flight going on. Works while paused, too.
        The weights must be whole, as `Learner.weights` gives them: they may be read on another stream."""
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Stop; requests in flight end as aborted."""
        ...
