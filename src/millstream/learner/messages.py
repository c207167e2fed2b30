"""What is said to processes that learn or score, a learner's ranks and those who work beside it: orders out, answers back. The
same in memory and on the wire; no pickle.

Every rank gets the same orders in the same order, each with a number that its answer bears.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from millstream.learner import CriticConfig, LearnerConfig
from millstream.learner.optimizer import Stepped
from millstream.learner.rank import Tally
from millstream.model.lora import LoraConfig
from millstream.model.shared_memory import Layout
from millstream.store.blocks import Block, Packing
from millstream.types import Metrics, TrainRow
from millstream.weights.transfer import Delivery, WeightsRef


class Source(Struct, frozen=True, kw_only=True):
    """An objective as data: functions do not cross a border between processes, so each rank makes its own."""

    function: str
    """`package.module:name`; given the arguments, returns an `Objective`."""
    arguments: bytes


class Plan(Struct, frozen=True, kw_only=True):
    """What a rank needs to know, beside the model's own config."""

    rank: int
    num_ranks: int
    host: str
    """Where the ranks meet: on loopback, unless they are on several nodes."""
    port: int
    device: str
    dtype: str
    files: dict[str, bytes]
    """The model's config, as it is saved."""
    config: LearnerConfig
    objective: Source
    temperature: float
    num_steps: int | None
    is_proximal_given: bool = False
    """Whether rows bring `proximal` where it is read: no copy of the policy is kept for it."""


class Setup(Struct, frozen=True, kw_only=True):
    """The first message to a rank: what it is, and where weights come from and go to."""

    plan: Plan
    memory: int | None = None
    """The descriptor of shared memory, for a process of this machine..."""
    layout: Layout | None = None
    parcel: WeightsRef | None = None
    """... or weights that may be on another node, to begin with,"""
    delivery: Delivery | None = None
    """and how rank 0 lets others have them."""


class StageSetup(Struct, frozen=True, kw_only=True):
    """The first message to whoever works beside the learner: a scorer, or with `critic` a critic."""

    files: dict[str, bytes]
    """The model's config, as it is saved."""
    dtype: str
    lora: LoraConfig | None
    device: str
    parcel: WeightsRef
    """The whole model, to begin with."""
    temperature: float = 1.0
    """Of a scorer."""
    critic: CriticConfig | None = None
    num_steps: int | None = None
    """Of a critic: over how many its learning rate is planned."""


class BeginBatch(Struct, frozen=True, tag=True, array_like=True): ...


class Accumulate(Struct, frozen=True, tag=True, array_like=True):
    passes: list[bytes]
    """As many for every rank: rows, or nothing, for one forward and backward pass each."""


class Measure(Struct, frozen=True, tag=True, array_like=True):
    """Log-probabilities, and no gradient."""

    passes: list[bytes]


class Count(Struct, frozen=True, tag=True, array_like=True): ...


class Step(Struct, frozen=True, tag=True, array_like=True):
    counted: Tally


class GatherWeights(Struct, frozen=True, tag=True, array_like=True):
    """Into the shared memory; or, under a number, to where other nodes can have them."""

    number: int = 0


class Keep(Struct, frozen=True, tag=True, array_like=True):
    """A copy of the state, under a number."""

    snapshot: int


class Write(Struct, frozen=True, tag=True, array_like=True):
    """Beside other orders. Of all, the only one whose failure leaves the rank as it was."""

    snapshot: int
    folder: str


class Restore(Struct, frozen=True, tag=True, array_like=True):
    folder: str


class Close(Struct, frozen=True, tag=True, array_like=True): ...


class Score(Struct, frozen=True, tag=True, array_like=True):
    """A stage alone: what it says of these rows."""

    rows: bytes


class Load(Struct, frozen=True, tag=True, array_like=True):
    """A scorer alone: what is scored from here on is under these weights."""

    parcel: WeightsRef


class Learn(Struct, frozen=True, tag=True, array_like=True):
    """A critic alone: its step, by what it has counted itself."""


Order = (
    BeginBatch
    | Accumulate
    | Measure
    | Count
    | Step
    | GatherWeights
    | Keep
    | Write
    | Restore
    | Close
    | Score
    | Load
    | Learn
)


class Numbered(Struct, frozen=True, array_like=True):
    number: int
    order: Order


class Answer(Struct, frozen=True, kw_only=True):
    number: int
    tally: Tally | None = None
    scores: bytes = b""
    """Log-probabilities, or a critic's values: in float32, of the rows' trained tokens, one after the other."""
    metrics: Metrics | None = None
    """Of a critic's step."""
    stepped: Stepped | None = None
    parcel: WeightsRef | None = None
    """Where gathered weights are to be had."""
    files: dict[str, int] = {}
    """Of a snapshot that is written: what this process sees in its folder, sizes by name."""
    refused: tuple[int, str] | None = None
    """The operating system's number and words for why a snapshot could not be written."""
    error: str | None = None
    """Why it can never go on, if it cannot."""
    is_own: bool = True
    """Whether the error began here: a rank whose neighbour died says so, too."""


READY = 0
"""The number of the first answer, which no order asked for: it is built."""
COLUMNS = ("tokens", "loss_mask", "logprobs", "advantages", "reference", "proximal", "values", "returns", "label")


def pack(rows: Sequence[TrainRow]) -> bytes:
    """Empty if there are none."""
    return bytes(Packing({name: [getattr(row, name) for row in rows] for name in COLUMNS}).to_bytes()) if rows else b""


def unpack(data: bytes) -> list[TrainRow]:
    if not data:
        return []
    block = Block(data)
    count = block.num_rows
    columns = {name: block.cells(name, 0, count) for name in COLUMNS}
    return [TrainRow(**{name: cells[i] for name, cells in columns.items()}) for i in range(count)]
