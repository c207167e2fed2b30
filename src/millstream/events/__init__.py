"""What happened, as typed events: written to disk first; the terminal, the trace and the summary read the same stream.

Every group's life is here: admitted, each rollout started and ended, its fate. `at` is the run's clock in seconds.
An event is encoded as one JSON object with its name under `kind`.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
from msgspec import Struct

from millstream.types import Fate, Finish, Metrics


def _snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


class Event(Struct, frozen=True, kw_only=True, tag_field="kind", tag=_snake):
    at: float


class RunStarted(Event, frozen=True, kw_only=True):
    seed: int
    groups_per_step: int
    group_size: int
    max_lag: float
    lag_bound: int
    budget: int


class GroupAdmitted(Event, frozen=True, kw_only=True):
    group_id: int
    task_id: str
    epoch: int
    start_version: int
    deadline: int


class RolloutStarted(Event, frozen=True, kw_only=True):
    group_id: int
    member: int
    attempt: int


class RolloutEnded(Event, frozen=True, kw_only=True):
    group_id: int
    member: int
    attempt: int
    reward: float
    num_tokens: int
    num_sampled: int
    start_version: int
    end_version: int
    finish: Finish
    seconds: float


class RolloutFailed(Event, frozen=True, kw_only=True):
    """A failed attempt. `is_final` says that the member's retries are spent and its group goes on without it."""

    group_id: int
    member: int
    attempt: int
    error: str
    message: str
    is_final: bool


class GroupTaken(Event, frozen=True, kw_only=True):
    """The group joined the batch of this version; `lag` is of its oldest member."""

    group_id: int
    version: int
    lag: int
    num_rollouts: int


class GroupLeft(Event, frozen=True, kw_only=True):
    """The group's fate. `is_replaced` is False for a filtered or failed group whose place in the batch stayed empty."""

    group_id: int
    fate: Fate
    is_replaced: bool = False
    num_members: int = 0
    mean_reward: float = 0.0


class Stepped(Event, frozen=True, kw_only=True):
    """One batch was trained; `version` is the new one. `num_groups` below the batch size is a shorter step, and says so."""

    version: int
    num_groups: int
    num_rows: int
    num_tokens: int
    seconds: float
    metrics: Metrics


class WeightsPublished(Event, frozen=True, kw_only=True):
    version: int
    seconds: float


class WeightsLoaded(Event, frozen=True, kw_only=True):
    engine: str
    version: int
    seconds: float


class Span(Event, frozen=True, kw_only=True):
    """Work by one worker from `at - seconds` to `at`: what the trace and the share of overlap are made of."""

    worker: str
    what: str
    seconds: float
    num_tokens: int = 0


class Stalled(Event, frozen=True, kw_only=True):
    """A wait has lasted longer than it should. It goes on; past its deadline it becomes an error."""

    owner: str
    what: str
    seconds: float


class WaitNow(Struct, frozen=True, kw_only=True):
    owner: str
    what: str
    seconds: float
    count: int = 1
    """Rollouts that wait for the same thing are counted together."""


class Status(Event, frozen=True, kw_only=True):
    """What the run is doing, about once a second: how full everything is, and what everybody waits for."""

    requests_running: int
    requests_waiting: int
    rows_in_store: int
    groups_outstanding: int
    groups_taken: int
    budget: int
    waits: list[WaitNow]


class WarmedUp(Event, frozen=True, kw_only=True):
    """Progress of the supervised warm-up."""

    step: int
    max_steps: int
    accuracy: float
    stop_at: float


class Evaluated(Event, frozen=True, kw_only=True):
    """`version` is the engine's; None if the weights changed while it ran (a mixed evaluation)."""

    name: str
    version: int | None
    accuracy: float
    num_tasks: int


class RunEnded(Event, frozen=True, kw_only=True):
    outcome: str
    version: int


AnyEvent = (
    RunStarted
    | GroupAdmitted
    | RolloutStarted
    | RolloutEnded
    | RolloutFailed
    | GroupTaken
    | GroupLeft
    | Stepped
    | WeightsPublished
    | WeightsLoaded
    | Span
    | Stalled
    | Status
    | WarmedUp
    | Evaluated
    | RunEnded
)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyEvent)


class EventSink(Protocol):
    """Takes events in the order they happen. May be called from any thread; must not block for long; never raises."""

    def emit(self, event: Event) -> None: ...


def encode(event: Event) -> bytes:
    return _encoder.encode(event)


def decode(line: bytes | str) -> AnyEvent:
    event: AnyEvent = _decoder.decode(line)
    return event
