"""The typed events of a run: written to disk first; the terminal, the trace and the summary read the same stream.

An event is one JSON object with its name under `kind` and its number in the file under `seq`. `at`: the run's clock in seconds.

Crashes and resumes. A run that is resumed appends to the same file, beginning with `Resumed`: of the events before it, only
those up to `from_seq` belong to the history behind the weights; the rest was undone by the crash (`sinks.read_history`).
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, runtime_checkable

from msgspec import UNSET, Struct, UnsetType

from millstream.events.depths import StoreNow, WaitNow
from millstream.types import Fate, Finish, Metrics


def _snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


class Event(Struct, frozen=True, kw_only=True, tag_field="kind", tag=_snake):
    at: float


class ConfigWritten(Event, frozen=True, kw_only=True):
    """A process of the run has begun, or its settings were changed: with the `config.toml` of this SHA-256."""

    digest: str
    text: str = ""  # of that file; empty in logs of earlier versions


class SettingChanged(Event, frozen=True, kw_only=True):
    """A config key has another value from this version on: in a resumed run than its checkpoint has, or, while the run trains,
    for the groups that start from then on."""

    key: str
    old: Any  # None: it was not set
    new: Any
    version: int


class LagMoved(Event, frozen=True, kw_only=True):
    """`pipeline.auto_lag` has chosen how much lag the groups may have that start from now on."""

    version: int
    max_lag: float
    lag_bound: int
    budget: int  # groups in flight
    why: str


class RunBranched(Event, frozen=True, kw_only=True):
    """A new run begins with the weights and the optimizer's state of another run's checkpoint."""

    run_dir: str
    run_id: str
    step: int
    digest: str  # of the checkpoint, as in `CheckpointSealed`


class Sizes(Struct, frozen=True, kw_only=True):
    """What the keys of a config are that may be `auto`, and what the run needs by estimate. See `run.sizes`."""

    dtype: Literal["float32", "bfloat16"]
    slots: int  # of each engine
    cache_gb: float | None  # of each engine; None: it has no pages, or decides itself
    micro_batch_tokens: int
    is_compiled: bool
    replicas: int | None = None  # None: the log does not say
    needed_gb: float | None = None  # of the GPU; None: there is none, or its memory is not known
    free_gb: float | None = None
    has_processes: bool = False  # whether engine and learner are processes on one GPU
    why_threads: str = ""  # why they are threads there


class SizesChosen(Event, frozen=True, kw_only=True):
    """A process of the run has begun, with these sizes."""

    sizes: Sizes
    device: str
    is_kept: bool = False  # those of the run's start, where others would change the last bits


class RunStarted(Event, frozen=True, kw_only=True):
    """The first group is about to be admitted."""

    run_id: str  # new for every run, kept by its resumes: a checkpoint of another run is never resumed
    seed: int
    steps: int
    num_tasks: int  # tasks of an epoch; 0: unknown
    filter_zero_signal: bool
    min_group_size: int
    groups_per_step: int
    group_size: int
    max_lag: float
    lag_bound: int
    budget: int
    extra_members: int = 0  # members that a group has beyond `group_size`
    is_first_to_finish: bool = False  # whether the surplus is aborted: declared biased
    max_restarts: int = 0  # of an overdue group: declared biased
    max_replaced: int | None = None  # groups that a step replaces before places stay empty; None: the log does not say
    rollouts_from: str = ""  # the run whose recorded batches are trained; empty: rollouts are new
    compares_members: bool = False  # whether a group whose rewards are all equal has no gradient
    learns_from_rewards: bool = True  # False: from a teacher
    is_simulated: bool = False  # by `millstream sim`: there is no model


class Resumed(Event, frozen=True, kw_only=True):
    """A new process continues a run that died or was stopped. Events after `from_seq` and before this one are void."""

    incarnation: int  # processes of the run before this one
    version: int
    from_seq: int  # the last event that the checkpoint covers; -1: no checkpoint, the run starts over
    digest: str  # of the checkpoint, as in `CheckpointSealed`; empty without one
    changes: tuple[str, ...] = ()  # config keys that differ from here on, as typed: `learner.ranks=1`


class GroupAdmitted(Event, frozen=True, kw_only=True):
    group_id: int
    task_id: str
    epoch: int
    start_version: int
    deadline: int
    source: str = ""  # where the task comes from: its field `source`, if it has one


class GroupResumed(Event, frozen=True, kw_only=True):
    """A group that was in flight at the checkpoint continues under its id and deadline."""

    group_id: int
    incarnation: int
    kept: list[int]  # members whose rollouts are in the checkpoint. Earlier events of all others are void
    to_do: list[int]  # members that are rolled out again. A member in neither list has failed for good


class RolloutStarted(Event, frozen=True, kw_only=True):
    group_id: int
    member: int
    attempt: int


class RolloutEnded(Event, frozen=True, kw_only=True):
    group_id: int
    member: int
    attempt: int
    reward: float
    rewards: list[float] = []  # of each agent, where there are several; `reward` is that of the first
    num_tokens: int
    num_sampled: int
    num_parts: int = 1  # token sequences: each is a row
    start_version: int
    end_version: int
    finish: Finish
    seconds: float
    reward_parts: dict[str, float] | UnsetType = UNSET  # by reward function, before weights, where there are several
    is_partial: bool | UnsetType = UNSET  # True: the reward of its whole group is still to be added, in `GroupScored`


class RolloutFailed(Event, frozen=True, kw_only=True):
    """A failed attempt. `is_final` says that the member's retries are spent and its group continues without it."""

    group_id: int
    member: int
    attempt: int
    error: str
    message: str
    is_final: bool
    seconds: float = 0.0
    num_sampled: int = 0  # tokens of the turns it had finished


class RolloutSpan(Event, frozen=True, kw_only=True):
    """A part of a rollout, with `[traces]`: a turn ("generate"), or what its environment waited for by name, as a tool."""

    group_id: int
    member: int
    attempt: int
    what: str
    seconds: float
    num_tokens: int = 0  # that a turn sampled


class RolloutAborted(Event, frozen=True, kw_only=True):
    """A rollout was ended on purpose, in the engine and in its environment."""

    group_id: int
    member: int
    attempt: int
    why: str
    seconds: float
    num_sampled: int  # tokens sampled so far: its full length is unknown


class GroupRestarted(Event, frozen=True, kw_only=True):
    """An overdue group is restarted as a whole under its id. Its rollouts so far are void."""

    group_id: int
    start_version: int
    deadline: int
    restarts: int
    first_attempt: int  # the number of its rollouts' next attempts


class GroupScored(Event, frozen=True, kw_only=True):
    """Rewards of a complete group, scored as a whole; each includes the member's own reward."""

    group_id: int
    rewards: list[float]  # of the members that ended, in their order. Empty if scoring failed
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
    refused_by: str | UnsetType = UNSET  # the `pipeline.filter` that refused it. UNSET: there is another reason


class Stepped(Event, frozen=True, kw_only=True):
    """One batch was trained; `version` is the new one. A `num_groups` below the batch size marks a shorter step."""

    version: int
    num_groups: int
    num_rollouts: int
    num_rows: int  # token sequences: a rollout of several parts has several
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
    way: str | UnsetType = UNSET
    """By which they came to the engine's process (`resources.weights`). UNSET: it says none."""


class ReplicaLeft(Event, frozen=True, kw_only=True):
    """An engine no longer takes requests: it broke, failed repeatedly, or was drained."""

    engine: str
    why: str
    num_moved: int  # its requests, which continue on other engines with the tokens they have
    num_left: int  # engines that still serve


class ReplicaJoined(Event, frozen=True, kw_only=True):
    """An engine joined during the run, for example as a replacement."""

    engine: str
    version: int


class WorkerStarted(Event, frozen=True, kw_only=True):
    """A process of the run has started on a cluster."""

    worker: str
    what: str  # engine, learner, stage, environment, reward or store
    pid: int
    node: str


class PathChosen(Event, frozen=True, kw_only=True):
    """What computes in an engine or in the learner from now on: at its start, and when it changes."""

    worker: str
    path: str
    why: str = ""  # why it is not the fastest one; empty: it is


class MicroBatchLowered(Event, frozen=True, kw_only=True):
    """The learner was out of memory in a pass: its rows were computed again in smaller passes, as are all rows from here on."""

    micro_batch_tokens: int


class LearnerRestarted(Event, frozen=True, kw_only=True):
    """Processes of the learner or the critic died and were replaced, from a checkpoint and a replay of the batches since."""

    who: str = "the learner"
    why: str
    from_version: int  # of the checkpoint; without one, of the initial weights
    to_version: int
    num_batches_replayed: int  # including the current one
    num_rows: int
    seconds: float  # for which training stopped


class Span(Event, frozen=True, kw_only=True):
    """Work of one worker from `at - seconds` to `at`: the data of the trace and of the overlap."""

    worker: str
    what: str
    seconds: float
    num_tokens: int = 0
    num_steps: int | UnsetType = UNSET  # of an engine that counts them: decode steps,
    num_context: int | UnsetType = UNSET  # tokens in the cache, summed over these steps,
    num_prompt: int | UnsetType = UNSET  # and tokens of prompts that were computed
    rank_seconds: list[float] | UnsetType = UNSET  # of a learner with several ranks: how long each of them worked


class DraftsChecked(Event, frozen=True, kw_only=True):
    """Speculative tokens of an engine since its last such event. Those that were right are tokens of its spans."""

    engine: str
    num_drafted: int
    num_accepted: int


WARMUP = "warmup"  # the name of the warm-up's evaluations
EVENT_LOOP = "the event loop"  # an owner of stalls that does not wait but is blocked


class Stalled(Event, frozen=True, kw_only=True):
    """A wait has passed its warning time. It continues; past its deadline it becomes an error."""

    owner: str
    what: str
    seconds: float


class Status(Event, frozen=True, kw_only=True):
    """The state of the run, about once a second: queue depths and current waits."""

    requests_running: int
    requests_waiting: int
    rows_in_store: int
    groups_outstanding: int
    groups_taken: int
    budget: int
    waits: list[WaitNow]
    loop_s: float | UnsetType = UNSET  # processor time of the driver's event loop, since its thread began
    loop_lag_s: float | UnsetType = UNSET  # by which the event loop woke up too late since the last reading
    store: StoreNow | UnsetType = UNSET


class WarmedUp(Event, frozen=True, kw_only=True):
    """Progress of supervised training. Step 0 is the state before it."""

    step: int
    max_steps: int
    accuracy: float | None = None  # sampled, on training tasks; None where it was not measured
    stop_at: float | None = None
    loss: float | None = None  # of the step's examples: mean negative log-likelihood a token. None before the first.
    held_out_loss: float | None = None  # the same of held-out tasks; None if there are none


class WarmupSealed(Event, frozen=True, kw_only=True):
    """All files of a checkpoint of supervised training are on the disk; it gets its name right after this event is written."""

    step: int
    digest: str  # SHA-256 of its manifest
    num_bytes: int
    seconds: float


class Sample(Struct, frozen=True, kw_only=True):
    """One rollout as text, to show."""

    prompt: str
    completion: str
    reward: float
    answer: str | None = None
    failure: str = ""  # why it has no reward; it counts 0


class Estimate(Struct, frozen=True, kw_only=True):
    """A measured number with its 95% interval."""

    value: float
    low: float
    high: float


class SampleShown(Event, frozen=True, kw_only=True):
    """A rollout of training, every few seconds."""

    group_id: int
    member: int
    sample: Sample


class EvaluationStarted(Event, frozen=True, kw_only=True):
    """Until its `Evaluated`, only these engines sample for it, and none of them loads other weights. If all of them are lost,
    it starts again, with this event again."""

    name: str
    version: int
    engines: tuple[str, ...]


class Evaluated(Event, frozen=True, kw_only=True):
    """`version` is of the weights that sampled all of it. None in logs of earlier releases: the weights changed meanwhile."""

    name: str  # of the table, how it was sampled, and when: "sampled before", "gsm8k step 20"
    version: int | None
    accuracy: float  # the mean reward
    num_tasks: int
    num_failed: int = 0  # rollouts that failed; they count 0
    failure: str = ""  # of the last one that failed
    sample: Sample | None = None  # the first rollout of the first task
    table: str = ""  # the name of the [[evaluation]] table; empty for the warm-up's
    is_greedy: bool = False
    num_samples: int = 1  # of each task
    scores: dict[str, Estimate] = {}  # by name: "pass@1", "pass@4", "avg@4"


class CheckpointSealed(Event, frozen=True, kw_only=True):
    """All files of a checkpoint are on the disk; it gets its name right after this event is written."""

    version: int
    covers_seq: int  # the last event that it covers
    digest: str  # SHA-256 of its manifest, which holds those of its files
    num_bytes: int
    held_s: float  # for which training stopped for it
    seconds: float


class CheckpointFailed(Event, frozen=True, kw_only=True):
    """A checkpoint could not be written. The run continues, and writes the next one when it is due."""

    version: int
    message: str


class Warned(Event, frozen=True, kw_only=True):
    """A warning that a user should see early in the run; written once."""

    message: str


class SessionDropped(Event, frozen=True, kw_only=True):
    session: str  # the beginning of its id; of one that was rewarded, `session-NUMBER` by its place in `sessions.jsonl`
    why: str


class FindingMade(Event, frozen=True, kw_only=True):
    """The run does not learn as it should, by one rule of `events.findings`. It holds until a `FindingEnded` of that name."""

    name: str
    step: int
    message: str  # with the figures
    advice: str  # what to do, what to type
    figures: dict[str, float] = {}


class FindingEnded(Event, frozen=True, kw_only=True):
    name: str  # of a finding that no longer holds
    step: int


class StopRequested(Event, frozen=True, kw_only=True):
    """Ctrl-C or SIGTERM: the current batch is finished first, for at most `grace_s`."""

    signal: str
    grace_s: float


class RunEnded(Event, frozen=True, kw_only=True):
    outcome: str
    version: int
    message: str | UnsetType = UNSET  # of the error that ended it


class EventSink(Protocol):
    """Takes events in the order in which they happen. May be called from any thread; must not block for long; never raises. An
    event, and what it contains, must not change after `emit`: it may be written later."""

    def emit(self, event: Event) -> None: ...


@runtime_checkable
class RecallingSink(Protocol):
    """An event sink that also shows evaluations of earlier processes of the run; other sinks get what happens in theirs."""

    def recall(self, event: Evaluated) -> None:
        """Before the first `emit`."""
