"""The messages between clients and the coordinator: frames of MessagePack (`rpc.frames`), requests answered in any order.

A request that changes something may be sent twice (after a reconnect the client does not know whether it was carried out). It
has a number of its client's, and is carried out once. Small payloads are part of the message; for others the message names a
segment of shared memory.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from millstream.store import rows
from millstream.store.base import StoreStats, Want

MAX_GREETING_BYTES = 16 << 10
"""The size bound of a message before the client is authenticated."""
INLINE_BYTES = 32 << 10
"""Payloads up to this size are sent with their request."""
DISK = "disk"
"""The names of segments on disk end with it. In a folder of segments: the link to theirs."""


class _Tagged(Struct, tag=True, array_like=True): ...


class Segment(Struct, frozen=True, array_like=True):
    """A file of a node, in shared memory or on disk."""

    node: str
    name: str
    size: int

    @property
    def is_on_disk(self) -> bool:
        return self.name.endswith(DISK)


class Payload(Struct, frozen=True, array_like=True):
    """One packed block: its bytes, or the segment that holds them."""

    nbytes: int
    data: bytes | None = None
    segment: Segment | None = None
    is_private: bool = False
    """It holds tensors, which cannot be made read-only: readers map it privately (copy on write)."""


PackedBlock = rows.BlockSpec[Payload]


class StagedRows(Struct, frozen=True, array_like=True):
    """Rows that one process has packed and another puts, by a message whose size does not depend on theirs. They are gone with
    the process that packed them, until they are put."""

    block: PackedBlock
    versions: list[int]
    tokens: list[int]
    small: PackedBlock | None = None
    """More of their columns, as part of the message."""


# ---- requests --------------------------------------------------------------------------------------------------------


class StoreHello(_Tagged):
    client: str
    token: str
    node: str
    address: tuple[str, int] | None = None
    """Where a segment server serves the segments of its node; None for other clients."""
    waiting: list[int] = []
    """Requests that this client waits for: it has received the answers to all others."""


class ReserveSegment(_Tagged):
    """Room for rows with a large payload, and a segment for it. Without rows (a write, a restore) it does not wait."""

    num_rows: int
    nbytes: int
    deadline_s: float | None


class ReleaseSegment(_Tagged):
    name: str


class PartitionRequest(_Tagged):
    """A request about one partition."""

    partition: str


class PutRows(PartitionRequest):
    group_ids: list[int]
    block: PackedBlock
    versions: list[int]
    tokens: list[int]
    deadline_s: float | None = None
    small: PackedBlock | None = None
    """More columns of the same rows."""


class WriteCells(_Tagged):
    row_ids: list[int]
    block: PackedBlock
    overwrite: bool


class CloseGroups(PartitionRequest):
    group_ids: list[int]


class ClaimRows(PartitionRequest):
    task: str
    want: Want
    group_id: int | None = None
    """This group, if it is ready; else the answer is `Accepted`."""


class WatchReady(PartitionRequest):
    """Answered when the groups that are ready differ from those at the change `seen`."""

    task: str
    seen: int


class LeaseRequest(_Tagged):
    """A request about one lease."""

    lease_id: int


class AcknowledgeLease(LeaseRequest):
    step: int | None


class DropLease(LeaseRequest): ...


class GiveBackLease(LeaseRequest): ...


class RenewLease(LeaseRequest): ...


class CoverStep(PartitionRequest):
    step: int


class RewindTask(PartitionRequest):
    task: str
    step: int


class FinishPartition(PartitionRequest): ...


class DropPartition(PartitionRequest): ...


class ReadPartition(PartitionRequest):
    """All rows of a partition, for a snapshot. `with_held`: also those that were acknowledged for a step."""

    with_held: bool = True


class ReadRows(_Tagged):
    """Rows by their ids, on lease to any client or to none."""

    row_ids: list[int]


class RestorePartition(PartitionRequest):
    saved: rows.SavedPartition[Payload]


class FindNode(_Tagged):
    """The address of a segment server that was not connected when rows were granted."""

    node: str


class GetStats(_Tagged): ...


class GetLostRows(_Tagged): ...


class CancelRequest(_Tagged):
    number: int


class CloseViews(_Tagged):
    """Views of these segments are closed: a name for each view."""

    names: list[str]


LeaseChange = AcknowledgeLease | DropLease | GiveBackLease
PartitionChange = CloseGroups | CoverStep | RewindTask | FinishPartition | DropPartition
PayloadChange = PutRows | WriteCells | RestorePartition
SegmentRequest = ReserveSegment | ReleaseSegment | CloseViews
Question = ClaimRows | WatchReady | RenewLease | ReadRows | ReadPartition | FindNode | GetStats | GetLostRows
RequestBody = StoreHello | CancelRequest | LeaseChange | PartitionChange | PayloadChange | SegmentRequest | Question


class StoreRequest(Struct, array_like=True):
    number: int
    received: list[int]
    """Requests whose answers have arrived since the last one was sent."""
    body: RequestBody


# ---- replies ---------------------------------------------------------------------------------------------------------


class Welcome(_Tagged): ...


class SegmentReserved(_Tagged):
    segment: Segment


class Accepted(_Tagged): ...


class RowsAdded(_Tagged):
    """The ids of added rows are consecutive."""

    first: int
    count: int


class RowCount(_Tagged):
    count: int


class Run(Struct, array_like=True):
    """A stretch of rows whose cells are adjacent: in which blocks, from which index, how many."""

    blocks: list[int]
    starts: list[int]
    count: int


class LeaseGranted(_Tagged):
    lease_id: int
    row_ids: list[int]
    group_ids: list[int]
    versions: list[int]
    runs: list[Run]
    blocks: dict[int, Payload]
    empty_groups: list[int]
    addresses: dict[str, tuple[str, int]]
    """By node: the address of its segment server."""


class ReadyGroups(_Tagged):
    change: int
    group_ids: list[int]
    is_over: bool


class PartitionReply(_Tagged):
    granted: LeaseGranted
    content: rows.PartitionContent


class NodeFound(_Tagged):
    address: tuple[str, int] | None
    """None: the node is gone."""


class StatsReply(_Tagged):
    stats: StoreStats


class LostRow(Struct, array_like=True):
    row_id: int
    group_id: int
    partition: str
    node: str


class LostRowsReply(_Tagged):
    rows: list[LostRow]


class RequestFailed(_Tagged):
    kind: str
    message: str


class UnlinkSegments(_Tagged):
    """To a segment server: these segments are not needed any more."""

    names: list[str]


RowsReply = RowsAdded | RowCount | LeaseGranted | ReadyGroups | PartitionReply
ReplyBody = (
    Welcome
    | Accepted
    | RequestFailed
    | RowsReply
    | NodeFound
    | StatsReply
    | LostRowsReply
    | SegmentReserved
    | UnlinkSegments
)


class StoreReply(Struct, array_like=True):
    number: int
    body: ReplyBody


def segments_of(change: Any) -> list[Segment]:
    """The segments that hold the payload of a change."""
    match change:
        case PutRows() | WriteCells():
            blocks = [change.block]
        case RestorePartition():
            blocks = [block for _, block in change.saved.blocks]
        case _:
            blocks = []
    return [block.payload.segment for block in blocks if block.payload.segment is not None]
