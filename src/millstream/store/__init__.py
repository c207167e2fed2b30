"""The stream store: rows are rollouts, columns are fields, and every task (a kind of consumer) sees every row once.

`base` has the interface and its promises, `memory` the store of one process, `client` and `host` the store of many processes,
`loader` and `loader_torch` turn rows into micro-batches.
"""

from millstream.store.base import (
    ONE_GROUP,
    TRAIN,
    Choose,
    Columns,
    Lease,
    Reads,
    Row,
    Saved,
    Store,
    StoreStats,
    StoreWaiter,
    Want,
)

__all__ = [
    "ONE_GROUP",
    "TRAIN",
    "Choose",
    "Columns",
    "Lease",
    "Reads",
    "Row",
    "Saved",
    "Store",
    "StoreStats",
    "StoreWaiter",
    "Want",
]
