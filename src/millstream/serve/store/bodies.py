"""Request bodies of the store's service. Unknown fields are refused by name."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from millstream.store import TRAIN


class EmptyBody(Struct, forbid_unknown_fields=True, kw_only=True): ...


class PartitionBody(Struct, forbid_unknown_fields=True, kw_only=True):
    partition: str = TRAIN


class PutBody(PartitionBody, kw_only=True):
    columns: dict[str, Any]
    dtypes: dict[str, str] = {}
    group_ids: int | list[int] | None = None  # one for all rows or one per row. Not needed for prompts
    versions: int | list[int] | None = None
    tokens: list[int] | None = None
    close: bool = False  # these are all rows of their groups
    wait_s: float = 0.0  # for space in the store


class WriteBody(Struct, forbid_unknown_fields=True, kw_only=True):
    row_ids: list[int]
    columns: dict[str, Any]
    dtypes: dict[str, str] = {}
    overwrite: bool = False


class ClaimBody(PartitionBody, kw_only=True):
    """See `millstream.store.Want`."""

    task: str
    rows: int | None = None
    tokens: int | None = None
    groups: int | None = None
    policy: str = "fifo"
    versions: tuple[int, int] | None = None
    rank: int = 0
    patience_s: float | None = None
    wait_s: float = 0.0
    lease_s: float | None = None
    lists: bool = False  # arrays as nested lists, for a human reader


class AcknowledgeBody(EmptyBody, kw_only=True):
    step: int | None = None


class GroupsBody(PartitionBody, kw_only=True):
    group_ids: list[int]


class CoverBody(PartitionBody, kw_only=True):
    step: int


class RewindBody(PartitionBody, kw_only=True):
    task: str
    step: int


class NewWeights(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    version: int
    where: str | None = None  # where to fetch them. None: known to the readers
