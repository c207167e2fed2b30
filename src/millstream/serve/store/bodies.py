"""What is sent to the store's service. Unknown fields are refused by name."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from millstream.store import TRAIN


class PutBody(Struct, forbid_unknown_fields=True, kw_only=True):
    columns: dict[str, Any]
    dtypes: dict[str, str] = {}
    group_ids: int | list[int] | None = None  # one for all rows or one for each. Prompts need none.
    versions: int | list[int] | None = None
    tokens: list[int] | None = None
    close: bool = False  # these are all rows of their groups
    partition: str = TRAIN
    wait_s: float = 0.0  # for room


class WriteBody(Struct, forbid_unknown_fields=True, kw_only=True):
    row_ids: list[int]
    columns: dict[str, Any]
    dtypes: dict[str, str] = {}
    overwrite: bool = False


class ClaimBody(Struct, forbid_unknown_fields=True, kw_only=True):
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
    partition: str = TRAIN
    lists: bool = False  # arrays as nested lists, to be read by people


class GroupsBody(Struct, forbid_unknown_fields=True, kw_only=True):
    group_ids: list[int]
    partition: str = TRAIN


class PartitionBody(Struct, forbid_unknown_fields=True, kw_only=True):
    partition: str = TRAIN


class StepBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Of an acknowledgement."""

    step: int | None = None


class CoverBody(Struct, forbid_unknown_fields=True, kw_only=True):
    step: int
    partition: str = TRAIN


class RewindBody(Struct, forbid_unknown_fields=True, kw_only=True):
    task: str
    step: int
    partition: str = TRAIN


class Weights(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    version: int
    where: str | None = None  # where they can be fetched; None if that is known
