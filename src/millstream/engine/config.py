"""The `[engine]` table."""

from __future__ import annotations

import math
from typing import Any, Literal

from msgspec import Struct

from millstream import imports
from millstream.engine.http.config import HttpConfig
from millstream.engine.vllm.config import OnUpdate, VllmConfig

ENGINE_KINDS = ("torch", "vllm", "http", "outside")
PREFILL_TOKENS = 4096
SLOTS = 128
MAX_REPLICAS = 65_536
MAX_DRAFT = 63
DRAFT_TOKENS = 7  # of a draft with speculation = "auto"
NEWS_S = 0.02  # for each engine of a run


class EngineConfig(Struct, frozen=True, kw_only=True):
    kind: str = "torch"
    """torch: the native one, over any causal LM of transformers. vllm: vLLM, where it is installed (docs/engines-vllm.md).
    http: servers, which the [engine.http] table names (docs/engines.md). outside: programs that connect to the run
    (docs/outside.md). Or one of your own: file.py:Name (docs/parts.md)."""
    args: dict[str, Any] = {}
    """Keyword arguments of an engine of your own."""
    vllm: VllmConfig | None = None
    """None: with kind = "vllm", its defaults."""
    http: HttpConfig | None = None

    slots: int | Literal["auto"] = "auto"
    """Requests decoded at the same time by one engine (kind = "http": by all servers together); more wait in a queue. auto: on
    a GPU the rollouts that can be in flight, if the cache is large enough, at most 1,024; otherwise 128."""
    prefill_tokens: int = PREFILL_TOKENS
    """Prompt tokens computed in one forward pass."""

    replicas: int | Literal["auto"] = "auto"
    """Engines that share the rollouts. One that dies is replaced while the others continue. auto: as many as there are GPUs for
    (docs/cluster.md); on a CPU, one."""

    process: bool | None = None
    """Whether the engine has a process of its own, and a learner of one rank another. None: where the interpreter's lock would
    slow all sides down, on a CPU with several cores and for a small model on one GPU (docs/engines.md). vLLM always has one."""

    cache: Literal["slots", "pages"] | None = None
    """How keys and values are kept. pages: in a pool of a fixed size that requests share; slots: one for every request, as long
    as the longest. None: pages on a GPU, slots on a CPU, where they are faster."""
    cache_gb: float | Literal["auto"] = "auto"
    """The size of the pool of pages; on a CPU only with cache = "pages". auto: on a GPU what the slots need, as far as the
    learner leaves it (a third of what is free where that is not known); else 1 GB."""
    on_update: OnUpdate = "keep"
    """What happens to the keys and values of rollouts in flight when new weights are loaded: they are kept, or computed again
    under the new weights. Of our own engine also those between two turns. With kind = "http" the servers decide. Rollouts that
    start later never see older ones."""
    speculation: Literal["auto", "off"] | int = "auto"
    """Speculative decoding while few requests run, with cache = "pages": tokens that a request has repeated before are guessed,
    and one step checks all of them. Tokens and log-probabilities are the same. auto: where it is faster; off in lockstep. A
    number: likewise, with drafts of at most that many tokens."""

    answer_s: float = 300.0
    """An engine with work to do that reports nothing for so long is declared broken, by name."""

    def __post_init__(self) -> None:
        self._check_kind()
        if min(self.num_slots, self.prefill_tokens, self.num_replicas) < 1 or not 0 < self.answer_s < math.inf:
            raise ValueError("slots, prefill_tokens and replicas must be at least 1, answer_s above 0 and finite")
        if self.num_replicas > MAX_REPLICAS:
            raise ValueError(f"replicas = {self.replicas}: expected at most {MAX_REPLICAS:,}")
        if self.pool_gb is not None and (not 0 < self.pool_gb < math.inf or self.cache == "slots"):
            raise ValueError('cache_gb must be above 0 and finite, and goes with cache = "pages"')
        if self.kind == "http" and self.num_replicas > 1:
            raise ValueError('replicas with kind = "http": name several servers in engine.http.urls instead')
        if self.kind == "outside" and self.num_replicas > 1:
            raise ValueError('replicas with kind = "outside": start several programs that connect to the run instead')
        if self.kind == "vllm" and self.process is False:
            raise ValueError('process = false with kind = "vllm", which always has a process of its own: leave it out')
        is_elsewhere = self.kind in ("http", "outside")
        if is_elsewhere and (self.process, self.prefill_tokens) != (None, PREFILL_TOKENS):
            raise ValueError(
                f'process and prefill_tokens are not of kind = "{self.kind}", whose servers decide: leave them out'
            )
        if self.kind != "torch" and (self.cache, self.cache_gb, self.speculation) != (None, "auto", "auto"):
            raise ValueError(
                f'cache, cache_gb and speculation are of kind = "torch", and kind = "{self.kind}": leave them out'
            )
        if self.kind == "http" and self.on_update != "keep":
            raise ValueError('on_update with kind = "http", whose servers decide: leave it out')
        if isinstance(self.speculation, int):
            if not 1 <= self.speculation <= MAX_DRAFT:
                raise ValueError(
                    f'speculation = {self.speculation}: expected "auto", "off", or 1 to {MAX_DRAFT} tokens'
                )
            if self.cache == "slots":
                raise ValueError('speculation is of cache = "pages", and cache = "slots": leave it out')

    def _check_kind(self) -> None:
        if not self.is_own and self.args:
            raise ValueError(f'args are of an engine of your own, and kind = "{self.kind}": leave them out')
        if self.is_own and not imports.is_part("engine", self.kind):
            raise ValueError(imports.unknown_part("engine", self.kind, ENGINE_KINDS))
        if self.is_own and (self.process, self.prefill_tokens) != (None, PREFILL_TOKENS):
            raise ValueError("process and prefill_tokens are not of an engine of your own: leave them out, or use args")
        if (self.kind == "http") != (self.http is not None):
            raise ValueError('kind = "http" and an [engine.http] table go together: set both, or neither')
        if self.vllm is not None and self.kind != "vllm":
            raise ValueError(
                f'a [engine.vllm] table, and kind = "{self.kind}": set kind = "vllm", or leave the table out'
            )

    @property
    def is_own(self) -> bool:
        """Whether the engine is the user's."""
        return self.kind not in ENGINE_KINDS

    @property
    def max_draft(self) -> int:
        """Tokens of the longest draft; 0: there are none."""
        if isinstance(self.speculation, int):
            return self.speculation
        return DRAFT_TOKENS if self.speculation == "auto" else 0

    @property
    def num_slots(self) -> int:
        """A run decides before what `auto` is (`run.sizes`); an engine alone has 128."""
        return self.slots if isinstance(self.slots, int) else SLOTS

    @property
    def pool_gb(self) -> float | None:
        """The size of the pool of pages. None: the engine decides."""
        return None if isinstance(self.cache_gb, str) else self.cache_gb

    @property
    def news_s(self) -> float:
        """Seconds between reports of a request's tokens by the native engine; 0: at every decode step. Proportional to the
        number of engines, so that the driver's load does not grow with it."""
        return 0.0 if self.num_replicas == 1 else NEWS_S * self.num_replicas

    @property
    def num_replicas(self) -> int:
        """A run decides before what `auto` is (`run.places`); an engine alone is one."""
        return self.replicas if isinstance(self.replicas, int) else 1

    @property
    def takes_stops(self) -> bool:
        """Whether it looks for stop strings."""
        return self.is_placed

    @property
    def is_placed(self) -> bool:
        """Whether the run starts it, on a GPU of its choice: not with servers, programs outside, or an engine of the user's."""
        return self.kind in ("torch", "vllm")

    @property
    def gpus_each(self) -> int:
        """GPUs that one engine computes on, where it has any of its own."""
        return (self.vllm or VllmConfig()).tensor_parallel if self.kind == "vllm" else 1

    @property
    def num_engines(self) -> int:
        """That a run starts: each server is one engine."""
        return self.num_replicas if self.http is None else len(self.http.urls)
