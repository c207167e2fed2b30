"""What a status event says of waits and of the store."""

from __future__ import annotations

from msgspec import Struct


class WaitNow(Struct, frozen=True, kw_only=True):
    owner: str
    what: str
    seconds: float
    count: int = 1  # rollouts that wait for the same thing


class PartitionNow(Struct, frozen=True, kw_only=True):
    """One partition of the store."""

    rows: int
    bytes: int
    tasks: dict[str, dict[str, int]]  # by task: its rows that are waiting, ready, leased, done


class StoreNow(Struct, frozen=True, kw_only=True):
    bytes: int
    spilled_bytes: int  # on disk
    claims_waiting: dict[str, int]  # by task
    puts_waiting: int
    operations: dict[str, int]  # by kind, since the store was created
    partitions: dict[str, PartitionNow]
