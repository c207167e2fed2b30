"""The protocols of what trains and of what scores: `Learner`, `Scorer`, `Follower`, `Critic`, and their snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from msgspec import Struct

from millstream.learner.config import LearnerConfig
from millstream.store.wire import PackedBlock
from millstream.types import Floats, HalfFloats, Metrics, TrainRow, Weights


class LearnerContext(Struct, frozen=True, kw_only=True, eq=False):
    """What a learner of the user's own is made with: `Learner(context, **args)`."""

    model: Any  # of transformers, with the library's attention; a copy that only this learner has
    tokenizer: Any  # of transformers, to save with the model
    objective: Any  # `millstream.objective.Objective`: the loss of [algorithm], or of supervised training
    config: LearnerConfig
    temperature: float  # that rollouts are sampled with
    num_steps: int | None  # optimizer steps in all. None: unknown


class Snapshot(Protocol):
    """A learner's or critic's whole state at one moment: weights, optimizer, schedule. Later steps do not change it."""

    def write(self, folder: Path) -> None:
        """Write files into this folder that `restore` reads. May be slow; called on a thread while training continues."""
        ...


class Learner(Protocol):
    """Trains the policy: rows are accumulated as they come, and divided once at the step. Promises: any split and order of a
    batch's rows into calls of `accumulate` gives the same gradient to float tolerance, and the same order gives the same bits.
    Methods are called one at a time. May raise `LearnerError`; `LearnerGone` if a new learner could continue from the last
    snapshot."""

    async def begin_batch(self) -> None:
        """From here on the proximal policy is the weights as they are now."""
        ...

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        """Add the unnormalised gradient of these rows. Their `proximal` log-probabilities, where they have them, are used
        after the batch's first step."""
        ...

    async def logprobs(self, rows: Sequence[TrainRow]) -> list[Floats]:
        """The current policy's log-probabilities of each row's trained tokens, at the sampling temperature."""
        ...

    async def step(self) -> Metrics:
        """Divide by the whole batch, clip, update, clear the gradient. Without rows the weights stay as they are."""
        ...

    def log_ratios(self) -> HalfFloats:
        """Of the trained tokens of the last step, in the order in which their rows were accumulated: the policy's
        log-probability in the pass that trained the token, less the behaviour policy's. NaN: its row was left out. Empty: they
        are not recorded."""
        ...

    def rank_seconds(self) -> list[float]:
        """Of each of several ranks, how long the last `accumulate` or `step` took it. Empty: there is one rank."""
        ...

    async def weights(self) -> Weights:
        """The weights that training may change, and only these: with adapters, the adapters. A copy that later steps do not
        change, complete when this returns: it may be read from another thread or stream."""
        ...

    async def snapshot(self) -> Snapshot:
        """Taken between two batches."""
        ...

    def restore(self, folder: Path) -> None:
        """Return to the state of the snapshot that was written there."""
        ...

    def save(self, path: Path) -> None:
        """Write the model as a Hugging Face checkpoint."""
        ...


class RunLearner(Learner, Protocol):
    """A learner that a run starts and closes."""

    async def ready(self) -> None:
        """Returns when it can train, which may take as long as processes take to start."""
        ...

    async def close(self) -> None:
        """Let the work in hand finish. No thread or process of it is left. May be called twice."""
        ...


class Scorer(Protocol):
    """Computes one number per token: a reference its log-probability, a critic its value. Calls may come at any time and are
    served one after the other. May raise `LearnerError`."""

    async def score(self, rows: Sequence[TrainRow]) -> list[Floats]:
        """For each row one number per token, 0 where the token is not trained. Rows of one call are computed together; each
        gets the number that it would get alone, to float tolerance."""
        ...


@runtime_checkable
class ReadsStore(Protocol):
    """A learner, scorer or critic whose processes may read rows from the store by themselves."""

    @property
    def reads_store(self) -> bool:
        """Whether they do in this run: then it is given `StoredRow`s, once the store is open."""
        ...


def reads_store(part: object) -> bool:
    return isinstance(part, ReadsStore) and part.reads_store


class PackedScores(NamedTuple):
    """A column of some rows, by their ids, where one process of a scorer has packed it."""

    row_ids: list[int]
    block: PackedBlock


@runtime_checkable
class StoreScorer(ReadsStore, Protocol):
    async def score_stored(self, rows: Sequence[TrainRow], column: str) -> list[PackedScores]:
        """Score these `StoredRow`s, and pack the scores under this name where they are computed, for the store to write."""
        ...


class Follower(Scorer, Protocol):
    """A scorer that is given a learner's weights: it scores under the policy of one moment while the learner continues."""

    async def load(self, weights: Weights) -> None:
        """Later calls of `score` are under these weights, which are a learner's `weights()`. They are copied."""
        ...


class Critic(Scorer, Protocol):
    """Predicts, at every trained token, the return that is still to come when the token is about to be sampled. It trains as a
    learner does: `accumulate` and `step` are called one at a time, and change its scores only at the step."""

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        """Add the unnormalised gradient of these rows, which have `values` and `returns`."""
        ...

    async def step(self) -> Metrics:
        """Divide by the whole batch, clip, update, clear the gradient. Without rows the weights stay as they are."""
        ...

    async def snapshot(self) -> Snapshot:
        """Taken between two batches."""
        ...

    def restore(self, folder: Path) -> None:
        """Return to the state of the snapshot that was written there."""
        ...


class RunCritic(Critic, Protocol):
    """A critic that a run starts and closes, in a process that may die: then it raises `LearnerGone`."""

    async def ready(self) -> None:
        """Returns when it can train, which may take as long as processes take to start."""
        ...

    async def close(self) -> None:
        """Let the work in hand finish. No thread or process of it is left. May be called twice."""
        ...
