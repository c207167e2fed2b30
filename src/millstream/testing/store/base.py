"""What the promises of the store have in common: tasks, helpers, and how a test opens and runs a store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, TypeVar

import msgspec
import pytest

from millstream.errors import StoreError, StoreTimeout
from millstream.store import TRAIN, Lease, Reads, Store, StoreStats, Want

T = TypeVar("T")
GROUPS = {"score": Reads(("text",)), "train": Reads(("text", "score"), after=("score",))}
"""Two stages that work on whole groups."""
ROWS = {"read": Reads(("value",), by_group=False)}
"""One task that takes any row."""
MIXED = {
    "score": Reads(("value",), by_group=False),
    "train": Reads(("value", "score"), after=("score",)),
    "watch": Reads(("value",)),
}
"""Rows are scored one by one; groups are trained on, and watched meanwhile."""
StoreTest = Callable[["StoreSuiteBase"], None]


def store_promise(
    tasks: Mapping[str, Reads], *, capacity_rows: int | None = None, capacity_bytes: int | None = None
) -> Callable[[Callable[[Any, Store], Awaitable[None]]], StoreTest]:
    """A test of a store for these tasks."""

    def make(test: Callable[[Any, Store], Awaitable[None]]) -> StoreTest:
        def run(self: StoreSuiteBase) -> None:
            async def program() -> None:
                async with asyncio.timeout(self.limit_s), self.open(tasks, capacity_rows, capacity_bytes) as store:
                    await test(self, store)

            self.run(program())

        run.__name__ = test.__name__
        run.__doc__ = test.__doc__  # and not its arguments, which pytest would look for
        return run

    return make


async def put_values(store: Store, values: Sequence[Any], group_id: int = 0, **more: Any) -> list[int]:
    return list(await store.put(group_id, {"value": list(values)}, **more))


async def put_group(store: Store, group_id: int, texts: Sequence[str], **more: Any) -> list[int]:
    ids = list(await store.put(group_id, {"text": list(texts)}, **more))
    await store.close_groups([group_id], **({"partition": more["partition"]} if "partition" in more else {}))
    return ids


async def score(store: Store) -> Lease:
    """Do the first stage's work on one group."""
    lease = await store.claim("score")
    if lease.row_ids:
        await store.write(lease.row_ids, {"score": [1.0] * len(lease)})
    await store.acknowledge(lease)
    return lease


async def values_now(store: Store, task: str = "read", **more: Any) -> list[Any]:
    """Everything that is ready, acknowledged."""
    try:
        lease = await store.claim(task, Want(rows=10**6, patience_s=0, deadline_s=0.05), **more)
    except StoreTimeout:
        return []
    await store.acknowledge(lease)
    return lease["value"] if lease.row_ids else []


async def stop(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def lasting(stats: StoreStats) -> StoreStats:
    """A report without what changes by itself."""
    return msgspec.structs.replace(stats, oldest_s=0.0, waiting=[])


@asynccontextmanager
async def refused(store: Store, match: str | None = None) -> AsyncIterator[None]:
    """What is inside raises `StoreError` and changes nothing."""
    before = lasting(await store.stats())
    with pytest.raises(StoreError, match=match):
        yield
    assert lasting(await store.stats()) == before


class StoreSuiteBase:
    """How to open and to run a store: see `millstream.testing.store`."""

    tick_s = 0.05
    """Within this time everything has happened that is going to happen by itself."""
    limit_s = 60.0
    """A test that takes longer hangs."""
    beside = TRAIN
    """A partition that shares its capacity with the partition `eval`."""

    def open(
        self, tasks: Mapping[str, Reads], capacity_rows: int | None = None, capacity_bytes: int | None = None
    ) -> AbstractAsyncContextManager[Store]:
        """A new store for these tasks, closed at the end."""
        raise NotImplementedError("override `open`: an async context manager that yields a Store")

    def run(self, program: Coroutine[Any, Any, None]) -> None:
        """Run a test to its end."""
        asyncio.run(program)

    async def soon(self, waits: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin something, and let it come as far as it can."""
        task = asyncio.ensure_future(waits)
        await asyncio.sleep(self.tick_s)
        return task

    async def still_waits(self, task: asyncio.Future[Any]) -> bool:
        await asyncio.sleep(self.tick_s)
        return not task.done()
