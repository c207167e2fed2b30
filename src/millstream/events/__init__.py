"""What happened, as typed events: written to disk first; the terminal, the trace and the summary read the same stream.

Every group's life is here: admitted, each rollout started and ended, its fate. `at` is the run's clock in seconds.
An event is encoded as one JSON object with its name under `kind`; in a file each has a number, `seq`, in the order of writing.

Crashes and resumes. A run that is resumed writes on in the same file, beginning with `Resumed`: of what stands before it, only
the events up to `from_seq` belong to the history behind the weights; the rest was undone by the crash (`sinks.read_history`).
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from msgspec import Struct

from millstream.types import Fate, Finish, Metrics


def _snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


class Event(Struct, frozen=True, kw_only=True, tag_field="kind", tag=_snake):
    at: float


class RunStarted(Event, frozen=True, kw_only=True):
    """The first group is about to be admitted."""

    run_id: str
    """Drawn anew for every run, kept by its resumes: checkpoints of another run are not taken for its own."""
    seed: int
    steps: int
    num_tasks: int
    """Tasks of an epoch; 0 if that is not known."""
    filter_zero_signal: bool
    min_group_size: int
    groups_per_step: int
    group_size: int
    max_lag: float
    lag_bound: int
    budget: int
    extra_members: int = 0
    """Members that a group has beyond `group_size`."""
    is_first_to_finish: bool = False
    """Whether what is over is aborted: declared biased."""
    max_restarts: int = 0
    """How often an overdue group may begin anew: declared biased."""


class Resumed(Event, frozen=True, kw_only=True):
    """A process takes up the run of another that died or was stopped. Events after `from_seq` and before this one are void."""

    incarnation: int
    """Lives of the run before this one."""
    version: int
    from_seq: int
    """The last event that the checkpoint covers; -1 if there was no checkpoint, and all begins anew."""
    digest: str
    """That of the checkpoint, as `CheckpointSealed` told it; empty without one."""
    changes: tuple[str, ...] = ()
    """What of the config is another from here on, as it was typed: `learner.ranks=1`."""


class GroupAdmitted(Event, frozen=True, kw_only=True):
    group_id: int
    task_id: str
    epoch: int
    start_version: int
    deadline: int
    source: str = ""
    """Where the task comes from: its field `source`, if it has one."""


class GroupResumed(Event, frozen=True, kw_only=True):
    """A group that was in flight at the checkpoint goes on under its own id and deadline."""

    group_id: int
    incarnation: int
    kept: list[int]
    """Members whose rollouts are in the checkpoint. What the events before say of any other is void."""
    to_do: list[int]
    """Members that are rolled out again. A member in neither list has failed for good."""


class RolloutStarted(Event, frozen=True, kw_only=True):
    group_id: int
    member: int
    attempt: int


class RolloutEnded(Event, frozen=True, kw_only=True):
    group_id: int
    member: int
    attempt: int
    reward: float
    rewards: list[float] = []
    """Of each agent, where there are several; `reward` is that of the first."""
    num_tokens: int
    num_sampled: int
    num_parts: int = 1
    """Token sequences that it is made of: each is a row."""
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
    seconds: float = 0.0
    num_sampled: int = 0
    """Tokens of the turns it had finished."""


class RolloutAborted(Event, frozen=True, kw_only=True):
    """A rollout was ended on purpose, in the engine and in its environment."""

    group_id: int
    member: int
    attempt: int
    why: str
    seconds: float
    num_sampled: int
    """Tokens that it had sampled: how long it would have become is not known."""


class GroupRestarted(Event, frozen=True, kw_only=True):
    """An overdue group begins anew, whole, under its own id. Its rollouts so far are void."""

    group_id: int
    start_version: int
    deadline: int
    restarts: int
    first_attempt: int
    """The number that its rollouts' attempts begin with."""


class GroupScored(Event, frozen=True, kw_only=True):
    """Rewards that were given to a complete group as a whole; each member's own are in them."""

    group_id: int
    rewards: list[float]
    """Of the members that ended, in their order. Empty if it failed."""
    seconds: float
    failure: str = ""


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
    num_rollouts: int
    num_rows: int
    """Token sequences: a rollout of several parts has several."""
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


class ReplicaLeft(Event, frozen=True, kw_only=True):
    """An engine takes no requests any more: it broke, failed again and again, or was drained."""

    engine: str
    why: str
    num_moved: int
    """Requests that it had, which go on elsewhere with what they had generated."""
    num_left: int
    """Engines that still serve."""


class ReplicaJoined(Event, frozen=True, kw_only=True):
    """An engine came while the run was going on, a replacement, say."""

    engine: str
    version: int


class WorkerStarted(Event, frozen=True, kw_only=True):
    """A process of a cluster has begun to work for the run."""

    worker: str
    what: str
    """engine, learner, stage, environment, reward or store."""
    pid: int
    node: str


class LearnerRestarted(Event, frozen=True, kw_only=True):
    """The learner's processes died, or the critic's, and others took their place: from a checkpoint, through all that had been
    trained since."""

    who: str = "the learner"
    why: str
    from_version: int
    """That of the checkpoint; where there was none yet, that of the weights it had begun with."""
    to_version: int
    num_batches_replayed: int
    """The one in hand included."""
    num_rows: int
    seconds: float
    """For how long training stood still."""


class Span(Event, frozen=True, kw_only=True):
    """Work by one worker from `at - seconds` to `at`: what the trace and the share of overlap are made of."""

    worker: str
    what: str
    seconds: float
    num_tokens: int = 0


WARMUP = "warmup"
"""The name of the evaluations that the warm-up makes for itself."""
EVENT_LOOP = "the event loop"
"""An owner of stalls: not one who waits, but one who is blocked."""


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
    """Progress of supervised training. Step 0 is how it was before."""

    step: int
    max_steps: int
    accuracy: float | None = None
    """Sampled, on training tasks; None where it was not measured."""
    stop_at: float | None = None
    loss: float | None = None
    """Of the step's examples: mean negative log-likelihood a token. None before the first."""
    held_out_loss: float | None = None
    """The same of held-out tasks; None if there are none."""


class WarmupSealed(Event, frozen=True, kw_only=True):
    """All files of a checkpoint of supervised training are on the disk; it gets its name right after this event is."""

    step: int
    digest: str
    """SHA-256 of its manifest."""
    num_bytes: int
    seconds: float


class Sample(Struct, frozen=True, kw_only=True):
    """One rollout as text, to look at."""

    prompt: str
    completion: str
    reward: float
    answer: str | None = None
    failure: str = ""
    """Why it has no reward of its own; it counts 0."""


class Evaluated(Event, frozen=True, kw_only=True):
    """`version` is the engine's; None if the weights changed while it ran (a mixed evaluation)."""

    name: str
    version: int | None
    accuracy: float
    num_tasks: int
    num_failed: int = 0
    """Rollouts that failed; they count 0."""
    failure: str = ""
    """Why the last of them did."""
    sample: Sample | None = None
    """The rollout of the first task."""


class CheckpointSealed(Event, frozen=True, kw_only=True):
    """All files of a checkpoint are on the disk; it gets its name right after this event is."""

    version: int
    covers_seq: int
    """The last event that it covers."""
    digest: str
    """SHA-256 of its manifest, which holds those of its files."""
    num_bytes: int
    held_s: float
    """For how long training stood still for it."""
    seconds: float


class CheckpointFailed(Event, frozen=True, kw_only=True):
    """It could not be written. The run goes on, and tries again when the next one is due."""

    version: int
    message: str


class Warned(Event, frozen=True, kw_only=True):
    """Something that a person should know before the run goes far; said once."""

    message: str


class StopRequested(Event, frozen=True, kw_only=True):
    """Ctrl-C or SIGTERM: the batch in hand is finished first, for at most `grace_s`."""

    signal: str
    grace_s: float


class RunEnded(Event, frozen=True, kw_only=True):
    outcome: str
    version: int


AnyEvent = (
    RunStarted
    | Resumed
    | GroupAdmitted
    | GroupResumed
    | RolloutStarted
    | RolloutEnded
    | RolloutFailed
    | RolloutAborted
    | GroupRestarted
    | GroupScored
    | GroupTaken
    | GroupLeft
    | Stepped
    | WeightsPublished
    | WeightsLoaded
    | ReplicaLeft
    | ReplicaJoined
    | WorkerStarted
    | LearnerRestarted
    | Span
    | Stalled
    | Status
    | WarmedUp
    | WarmupSealed
    | Evaluated
    | CheckpointSealed
    | CheckpointFailed
    | Warned
    | StopRequested
    | RunEnded
)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyEvent)


class EventSink(Protocol):
    """Takes events in the order they happen. May be called from any thread; must not block for long; never raises. Nobody
    changes an event, or what is in it, once it was emitted: it may be written later."""

    def emit(self, event: Event) -> None: ...


def encode(event: Event) -> bytes:
    """Never fails: what is not Unicode in a text (half a character, out of a subprocess, say) becomes a question mark."""
    try:
        return _encoder.encode(event)
    except UnicodeEncodeError:
        return _encoder.encode(_in_unicode(msgspec.to_builtins(event)))


def _in_unicode(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_in_unicode(key): _in_unicode(item) for key, item in value.items()}
    return [_in_unicode(item) for item in value] if isinstance(value, list) else value


def decode(line: bytes | str) -> AnyEvent:
    event: AnyEvent = _decoder.decode(line)
    return event
