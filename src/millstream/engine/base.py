"""The protocol of an engine: it generates for many requests at once, and takes new weights between two decode steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from msgspec import Struct

from millstream.clock import Clock
from millstream.events import EventSink
from millstream.types import Completion, Request, RequestKey, Sampled, Weights

OnSampled = Callable[[Sampled], None]
SPAN_S = 0.25  # the longest stretch of generation that is reported as one


class EngineStats(NamedTuple):
    running: int
    waiting: int
    tokens_generated: int
    requests_finished: int
    cache_used: float = 0.0  # share of the cache for keys and values that requests in flight occupy
    swap_s: float = 0.0  # how long the last `load` delayed decoding
    num_preempted: int = 0  # how often a request lost its part of the cache to others and was computed again later
    num_drafted: int = 0  # tokens of drafts that were checked
    num_accepted: int = 0  # tokens of drafts that were right
    way: str = ""  # by which the weights came that were loaded last (`resources.weights`); empty: within the process


class EngineContext(Struct, frozen=True, kw_only=True, eq=False):
    """What an engine of the user's own is made with: `Engine(context, **args)`."""

    name: str
    slots: int  # `engine.slots`
    model: Any  # of transformers, with the library's attention; a copy that only this engine has
    max_length: int | None  # tokens of a prompt and its answer together. None: the model has no limit
    clock: Clock
    sink: EventSink


NO_REQUEST = RequestKey(group_id=-1, member=0)  # the key of none: an abort of it only asks for an answer


class EngineLine(Struct, frozen=True, array_like=True):
    """Where another process reaches an engine. The token is a secret: every process that has it may send requests."""

    host: str
    port: int
    token: str


@runtime_checkable
class HasLine(Protocol):
    """An engine that takes requests from other processes, too."""

    async def line(self) -> EngineLine:
        """Waits until the engine has started. Raises `EngineGone`."""
        ...


class Engine(Protocol):
    """Generates for many requests at once.

    Promises: `generate` queues its request before it first suspends, so that requests started in an order join in that
    order. It returns one log-probability per token, under the distribution the token was really sampled from, and the
    version of the weights that sampled it. `version` never falls. A request's tokens depend on its seed, on its prompt, and
    on the weights; on other requests in flight only in the last bits of floating point.
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
        breaks for good, `EngineMisconfigured` if it can never work as it is set up, `EngineError` if it may recover,
        `RequestRefused` for a request that can never run.

        `on_sampled` is called on this event loop, before this returns, with what has been sampled: in order, each token at
        most once. The last tokens, or all of them if the engine works so, come with the completion alone."""
        ...

    async def abort(self, key: RequestKey) -> None:
        """The request's `generate` returns what it has, with `Finish.ABORT`. Unknown or finished keys are ignored."""
        ...

    async def pause(self) -> None:
        """No token is sampled after this returns, until `resume`. Nothing is lost; requests may still be queued."""
        ...

    async def resume(self) -> None:
        """An engine that is starting answers when it has started."""
        ...

    async def load(self, version: int, weights: Weights) -> None:
        """Swap the weights between two decode steps; requests in flight continue. Works while paused, too.
        The weights must be whole, as `Learner.weights` gives them: they may be read on another stream."""
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Stop; requests in flight end as aborted."""
        ...
