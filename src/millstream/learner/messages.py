"""The messages to the learner's worker processes: to a rank, to a scorer, to a critic. MessagePack structs, no pickle.

Each worker gets a setup first (`RankSetup`, `ScorerSetup`), then calls. The comment behind a message is its answer's type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from millstream.learner.config import CriticConfig, LearnerConfig
from millstream.learner.tally import StepTally
from millstream.model.lora import LoraConfig
from millstream.model.shared_memory import Layout
from millstream.model.slices import CheckpointFiles
from millstream.store.blocks import Block, Packing
from millstream.store.coordinator import StorePlan
from millstream.types import StoredRow, TrainRow
from millstream.weights.transfer import Delivery, WeightsRef


class StoreAccess(Struct, frozen=True):
    """The store of the run, for a process that reads its rows there."""

    connect: str  # `package.module:name`; called with the plan and a name, returns a `StoreClient`
    plan: StorePlan


FindStore = Callable[[], StoreAccess | None]
"""The store of the run, where processes read rows by themselves. None: it is not open, or it is in the driver's memory."""


class RowRef(Struct, frozen=True, array_like=True):
    """A `StoredRow`, as its reader needs it."""

    row_id: int
    label: str
    scale: tuple[float, float] | None
    is_proximal_stored: bool


RowsMessage = bytes | list[RowRef]
"""Rows that are in the store; or, packed, rows that are not."""


class ObjectiveSource(Struct, frozen=True, kw_only=True):
    """An objective as data: functions do not cross processes, so each rank makes its own."""

    function: str  # `package.module:name`; called with the arguments, returns an `Objective`
    arguments: bytes


class RankPlace(Struct, frozen=True, kw_only=True):
    """Which of the processes that share one model a process is, and where they join each other."""

    rank: int = 0
    num_ranks: int = 1
    host: str = ""  # of the `TCPStore` through which ranks join: loopback unless they are on several nodes
    port: int = 0


class ShareSetup(Struct, frozen=True, kw_only=True):
    """Of the first message to any process that has a model, or a shard of one: which it is, and where its first weights are."""

    place: RankPlace = RankPlace()
    memory: int | None = None  # on this machine: the descriptor of shared memory
    layout: Layout | None = None  # and what is in it
    weights: WeightsRef | None = None  # or the first weights as they were published, perhaps on another node
    checkpoint: CheckpointFiles | None = None  # of several ranks: what they read from files, where they see them
    rest: WeightsRef | None = None  # and published what is not in these files


class RankPlan(Struct, frozen=True, kw_only=True):
    """What a rank is."""

    device: str
    dtype: str
    files: dict[str, bytes]  # the model's config, as Hugging Face saves it
    config: LearnerConfig
    objective: ObjectiveSource
    temperature: float
    num_steps: int | None
    is_fixed: bool = False  # see `Rank`
    is_proximal_given: bool = False  # rows have `proximal` where it is read: no copy of the policy is kept for it
    records_ratios: bool = True  # whether anything reads `Learner.log_ratios`
    is_head_plain: bool = False  # of several ranks: see `model.policy.has_plain_head`


class RankSetup(ShareSetup, frozen=True, kw_only=True):
    """The first message to a rank: what it is, where its first weights are, and where it puts weights."""

    plan: RankPlan
    delivery: Delivery | None = None  # on a cluster: how rank 0 publishes weights


class ScorerSetup(ShareSetup, frozen=True, kw_only=True):
    """The first message to a rank of a scorer, or, with `critic`, of a critic."""

    name: str  # of its config table
    files: dict[str, bytes]  # the model's config, as Hugging Face saves it
    dtype: str
    lora: LoraConfig | None
    device: str
    is_head_plain: bool = False  # of several ranks: see `model.policy.has_plain_head`
    temperature: float = 1.0  # of a scorer
    is_fixed: bool = False  # passes are never made smaller
    critic: CriticConfig | None = None
    num_steps: int | None = None  # of a critic: optimizer steps in all, for its schedule


class OpenStore(Struct, frozen=True, tag=True, array_like=True):
    """-> None. Rows may be `RowRef`s from here on."""

    access: StoreAccess


class BeginBatch(Struct, frozen=True, tag=True, array_like=True):
    """-> None"""


class Accumulate(Struct, frozen=True, tag=True, array_like=True):
    """-> float: the seconds that it took. The same number of passes for every rank: the rows,
    perhaps none, of one forward and backward pass each."""

    passes: list[RowsMessage]


class ComputeLogprobs(Struct, frozen=True, tag=True, array_like=True):
    """-> bytes: float32, of all trained tokens of the passes."""

    passes: list[RowsMessage]


class TakeTally(Struct, frozen=True, tag=True, array_like=True):
    """-> StepTally: the counts since the last one."""


class ApplyStep(Struct, frozen=True, tag=True, array_like=True):
    """-> tuple[StepResult, float]: and the seconds that it took"""

    counted: StepTally


class GatherWeights(Struct, frozen=True, tag=True, array_like=True):
    """-> WeightsRef | None. Rank 0 writes them into the shared memory; on a cluster it publishes them under this number."""

    number: int


class TakeSnapshot(Struct, frozen=True, tag=True, array_like=True):
    """-> None. Keep a copy of the state under a number."""

    snapshot: int


class WriteSnapshot(Struct, frozen=True, tag=True, array_like=True):
    """-> dict[str, int]: the files that this process then sees there. A background call: training continues. An `OSError`
    leaves the worker as it was."""

    snapshot: int
    folder: str


class RestoreSnapshot(Struct, frozen=True, tag=True, array_like=True):
    """-> None"""

    folder: str


class ScoreRows(Struct, frozen=True, tag=True, array_like=True):
    """-> bytes: float32, of all trained tokens of the passes. The same number of passes for every rank, as in `Accumulate`."""

    passes: list[RowsMessage]


class PackScores(Struct, frozen=True, tag=True, array_like=True):
    """-> PackedBlock | None: the scores of all tokens of the rows, as a column for the store to write. None: no rows."""

    passes: list[RowsMessage]
    column: str


class LoadWeights(Struct, frozen=True, tag=True, array_like=True):
    """-> None. Later scores are under these weights."""

    weights: WeightsRef


RankMessage = (
    OpenStore
    | BeginBatch
    | Accumulate
    | ComputeLogprobs
    | TakeTally
    | ApplyStep
    | GatherWeights
    | TakeSnapshot
    | WriteSnapshot
    | RestoreSnapshot
)
ScorerMessage = OpenStore | ScoreRows | PackScores | LoadWeights
CriticMessage = (
    OpenStore
    | ScoreRows
    | PackScores
    | Accumulate
    | TakeTally
    | ApplyStep
    | TakeSnapshot
    | WriteSnapshot
    | RestoreSnapshot
)
COLUMNS = ("tokens", "loss_mask", "logprobs", "advantages", "reference", "proximal", "values", "returns", "label")


def row_refs(rows: Sequence[TrainRow]) -> list[RowRef]:
    """Of those that are in the store."""
    stored = [row for row in rows if isinstance(row, StoredRow)]
    return [RowRef(row.row_id, row.label, row.scale, row.is_proximal_stored) for row in stored]


def rows_message(rows: Sequence[TrainRow]) -> RowsMessage:
    """Rows of one kind: those of a store by their ids."""
    return row_refs(rows) or pack_rows(rows)


def pack_rows(rows: Sequence[TrainRow]) -> bytes:
    """Empty if there are none."""
    return bytes(Packing({name: [getattr(row, name) for row in rows] for name in COLUMNS}).to_bytes()) if rows else b""


def unpack_rows(data: bytes) -> list[TrainRow]:
    if not data:
        return []
    block = Block(data)
    count = block.num_rows
    columns = {name: block.cells(name, 0, count) for name in COLUMNS}
    return [TrainRow(**{name: cells[i] for name, cells in columns.items()}) for i in range(count)]
