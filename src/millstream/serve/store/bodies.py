"""Request bodies of the store's service. Unknown fields are refused by name."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from millstream.serve.http import EmptyBody
from millstream.store import TRAIN

MAX_NAME = 128
MAX_RANKS = 4096
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
ClaimRank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]


class PartitionBody(Struct, forbid_unknown_fields=True, kw_only=True):
    partition: Name = TRAIN


class PutBody(PartitionBody, kw_only=True):
    columns: dict[Name, Any]
    dtypes: dict[str, str] = {}
    group_ids: Int64 | list[Int64] | None = None  # one for all rows or one per row. Not needed for prompts
    versions: Int64 | list[Int64] | None = None
    tokens: list[Int64] | None = None
    close: bool = False  # these are all rows of their groups
    wait_s: float = 0.0  # for space in the store


class WriteBody(Struct, forbid_unknown_fields=True, kw_only=True):
    row_ids: list[Int64]
    columns: dict[Name, Any]
    dtypes: dict[str, str] = {}
    overwrite: bool = False


class ClaimBody(PartitionBody, kw_only=True):
    """See `millstream.store.Want`."""

    task: Name
    rows: Int64 | None = None
    tokens: Int64 | None = None
    groups: Int64 | None = None
    policy: str = "fifo"
    versions: tuple[Int64, Int64] | None = None
    rank: ClaimRank = 0
    patience_s: float | None = None
    wait_s: float = 0.0
    lease_s: float | None = None
    lists: bool = False  # arrays as nested lists, for a human reader


class AcknowledgeBody(EmptyBody, kw_only=True):
    step: Int64 | None = None


class GroupsBody(PartitionBody, kw_only=True):
    group_ids: list[Int64]


class CoverBody(PartitionBody, kw_only=True):
    step: Int64


class RewindBody(PartitionBody, kw_only=True):
    task: Name
    step: Int64


class NewWeights(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    version: Int64
    where: Annotated[str, Meta(max_length=4096)] | None = None  # where to fetch them. None: known to the readers
    metrics: dict[Name, float] | UnsetType = UNSET  # of the step that gave them


class KeysBody(PartitionBody, kw_only=True):
    keys: Annotated[list[Name], Meta(min_length=1)]
    columns: dict[Name, Any] = {}  # to put: one cell for each key. Empty: their tags alone
    dtypes: dict[str, str] = {}
    tags: list[dict[Name, Any]] | None = None  # one for each key


class GetKeysBody(PartitionBody, kw_only=True):
    keys: Annotated[list[Name], Meta(min_length=1)]
    columns: list[Name] | None = None  # None: all that each of them has
    lists: bool = False  # arrays as nested lists, for a human reader


class ListKeysBody(Struct, forbid_unknown_fields=True, kw_only=True):
    partition: Name | None = None  # None: all
