"""What a pipeline is made of: one implementation of each seam, and what it must know of the learning algorithm."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from msgspec import Struct

from millstream import imports
from millstream.algo.advantages import OverBatch, Rewards
from millstream.algo.credit import Credit, Signal
from millstream.clock import Clock
from millstream.engine import Engine
from millstream.env import Environment
from millstream.events import EventSink
from millstream.events.rollouts import NO_ROLLOUTS, RolloutSink
from millstream.learner import Critic, Follower, Learner
from millstream.learner.base import reads_store
from millstream.pipeline.schedule import PipelineConfig
from millstream.pipeline.schema import (
    CRITIC,
    LEARN,
    PROXIMAL,
    PROXIMAL_VERSION,
    SETTLE,
    SMALL_COLUMNS,
    TRAIN,
    SharedColumns,
    Stage,
)
from millstream.pipeline.waits import Waits
from millstream.pipeline.workers import WorkerPlan
from millstream.store import Store
from millstream.types import FinishedGroup, Sampling, Task
from millstream.weights import WeightChannel

AfterStep = Callable[[int], Coroutine[Any, Any, None]]
"""Called with every new version: concurrently with training or, in lockstep, between two steps."""
TokenGroupReward = Callable[[Task, Sequence[Sequence[int]]], Awaitable[Sequence[float]]]
"""The reward that each member gets in addition to its own, from the task and the tokens that each member sampled."""


GroupFilter = Callable[[FinishedGroup], bool]
"""Whether a finished group is trained."""


def group_filter(config: PipelineConfig) -> GroupFilter | None:
    """The user's own filter, with its arguments; None: there is none. Raises `ConfigError`."""
    if not config.filter:
        return None
    part = imports.load_part("filter", config.filter)
    return imports.bound(part, config.filter_args, "pipeline.filter_args", ("group",))


class Parts(Struct, frozen=True, kw_only=True, eq=False):
    """One implementation of each seam."""

    engines: tuple[Engine, ...]
    environment: Environment
    learner: Learner
    store: Store
    channel: WeightChannel
    """The weights that the engines start with must have been published to it."""
    clock: Clock
    sink: EventSink
    waits: Waits
    stages: tuple[Stage, ...] = ()
    """Computed for every row; the store must have been made for them (`schema.store_tasks`)."""
    critic: Critic | None = None
    """Trained concurrently with the learner. None: there is none."""
    proximal: Follower | None = None
    """Scores rows with the policy of the batch's start. None: the learner does so itself, if it needs it."""
    rollouts: RolloutSink = NO_ROLLOUTS
    """Keeps the rollouts."""
    workers: WorkerPlan | None = None
    """Play the rollouts, in processes of their own. None: they are played here."""
    records_turns: bool = False
    """Whether turns and named waits of rollouts are events (`RolloutSpan`)."""


class Algorithm(Struct, frozen=True, kw_only=True, eq=False):
    """What the pipeline needs to know of the learning algorithm."""

    advantage: Callable[[Rewards], Rewards]
    sampling: Sampling
    micro_batch_tokens: int
    mini_batches: int = 1
    group_reward: TokenGroupReward | None = None
    """Scores a complete group as a whole. None: every rollout has only its own reward."""
    over_batch: OverBatch | None = None
    """Shift and scale of advantages over the whole batch: its rows wait until it is complete. None: trained as they come."""
    credit: Credit | None = None
    """Advantages per token, instead of `advantage`. None: every token has the advantage of its rollout."""
    signal: Signal | None = None
    """Whether one agent's rewards in a group give a gradient. None: if those of its rollouts differ."""
    critic_batch_tokens: int = 8192
    """As micro_batch_tokens, for the critic."""
    proximal_batch_tokens: int = 8192
    """As micro_batch_tokens, for the proximal policy."""


def open_less(parts: Parts, algorithm: Algorithm, config: PipelineConfig, *, are_kept: bool) -> None:
    """Of rows that other processes read by themselves, this one reads only what does not grow with a rollout, unless it has to
    compute with their tokens. `are_kept`: it writes rollouts to the disk."""
    store, per_token = parts.store, (algorithm.credit, algorithm.signal, algorithm.group_reward)
    if not isinstance(store, SharedColumns):
        return
    if all(one is None for one in per_token) and not config.filter:
        store.open_only(SETTLE, SMALL_COLUMNS)
    readers = {stage.name: stage.scorer for stage in parts.stages} | {CRITIC: parts.critic, PROXIMAL: parts.proximal}
    for task, reader in readers.items():
        if reads_store(reader):
            store.open_only(task, SMALL_COLUMNS)
    if reads_store(parts.proximal) and reads_store(parts.learner):  # otherwise the scores are joined to rows here
        store.open_only(LEARN, (*SMALL_COLUMNS, PROXIMAL_VERSION))
    is_scaled = algorithm.over_batch is not None
    if reads_store(parts.learner) and not are_kept and not (is_scaled and algorithm.credit is not None):
        store.open_only(TRAIN, (*SMALL_COLUMNS, "advantages") if is_scaled else SMALL_COLUMNS)
