"""Rows beyond the memory bound: on disk, in order, once, and gone at the end."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from millstream.errors import StoreError
from millstream.store import Reads, Want
from millstream.store.client import StoreClient
from millstream.store.config import StoreConfig
from millstream.store.coordinator import Coordinator
from millstream.store.host import SharedStore, make_plan
from millstream.store.rows import BlockSpec, PartitionContent, SavedPartition
from millstream.store.segments import link_disk, segment_path, write_segment
from millstream.store.wire import PackedBlock, Payload, RestorePartition, Segment
from support.store_load import ForkedStore

TASKS = {"train": Reads(("tokens",), by_group=False)}
BOUND = 1 << 19
LARGE, SMALL = 20_000, 2000
"""Numbers of a cell: in a segment of its own, and sent with its request."""


@asynccontextmanager
async def spilling(folder: Path, memory_bytes: int = BOUND) -> AsyncIterator[tuple[SharedStore, StoreClient]]:
    (folder / "spill").mkdir()
    plan = make_plan(
        TASKS, folder=folder / "journal", memory_bytes=memory_bytes, spill=str(folder / "spill"), disconnect_s=0.2
    )
    with ForkedStore(plan) as store:
        client = await store.connect()
        yield store, client
        await client.close()


def on_disk(folder: Path) -> list[Path]:
    return sorted((folder / "spill").glob("*/*"))


def in_memory(store: SharedStore) -> int:
    return sum(path.stat().st_size for path in Path(store.address.folder).iterdir() if path.is_file())


@pytest.mark.parametrize("length", [LARGE, SMALL])
def test_rows_beyond_the_bound_are_on_disk_and_are_claimed_in_order_once(tmp_path: Path, length: int) -> None:
    num_rows = 5 * BOUND // (8 * length)

    async def program() -> None:
        async with spilling(tmp_path) as (store, client):
            for number in range(num_rows):
                await client.put(number, {"tokens": [np.full(length, number)]}, deadline_s=5)
            stats = await client.stats()
            assert stats.spilled_bytes > 3 * BOUND and stats.bytes - stats.spilled_bytes <= BOUND
            assert in_memory(store) <= BOUND and on_disk(tmp_path)
            store.process.kill()
            for number in range(num_rows):
                lease = await client.claim("train", Want(rows=1))
                assert lease.group_ids == [number] and (lease["tokens"][0] == number).all()
                await client.acknowledge(lease)
                del lease
            await client.put(0, {"tokens": [np.zeros(length)]})
            stats = await client.stats()
            assert (stats.rows_put, stats.rows_freed, stats.spilled_bytes) == (num_rows + 1, num_rows, 0)
            assert not on_disk(tmp_path), "there is memory again"

    asyncio.run(program())
    assert not list((tmp_path / "spill").iterdir())


def test_rows_that_are_written_restored_or_refused_beyond_the_bound_leave_no_file(tmp_path: Path) -> None:
    async def program() -> None:
        async with spilling(tmp_path, memory_bytes=1) as (store, client):
            ids = await client.put(0, {"tokens": [np.arange(SMALL), np.arange(LARGE)]})
            await client.write(ids, {"late": ["a", np.arange(LARGE)]})
            await client.write(ids, {"late": ["b", "c"]}, overwrite=True)
            with pytest.raises(StoreError, match="a cell is written once"):
                await client.write(ids, {"late": ["d", "e"]})
            saved = await client.snapshot()
            await client.drop_partition("train")
            await client.restore(saved)
            del saved
            await client.close_groups([0])
            for number in (SMALL, LARGE):
                with pytest.raises(StoreError, match="closed"):
                    await client.put(0, {"tokens": [np.arange(number)]})
            await client.stats()  # the refused one is released: if not, its file is removed a minute after the restart
            store.process.kill()
            lease = await client.claim("train", Want(rows=2))
            assert [len(cell) for cell in lease["tokens"]] == [SMALL, LARGE] and lease["late"] == ["b", "c"]
            await client.acknowledge(lease)
            del lease
            await asyncio.sleep(0)  # its views are reported as closed
            assert (await client.stats()).spilled_bytes == 0 and not in_memory(store)
            assert not on_disk(tmp_path)

    asyncio.run(program())


def test_the_files_of_a_store_whose_processes_were_all_killed_are_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    make_plan(TASKS)
    killed = tmp_path / "millstream-store-abc-x"
    killed.mkdir()
    (killed / ".owner").touch()
    spilled = tmp_path / "elsewhere"
    spilled.mkdir()
    memory = tmp_path / "millstream-abc-here"
    memory.mkdir()
    (memory / "disk").symlink_to(spilled)
    make_plan(TASKS)
    assert not any(folder.exists() for folder in (killed, memory, spilled))


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fail(number: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    yield


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_an_error_that_says_what_to_do_and_the_store_stays_usable(tmp_path: Path) -> None:
    async def program() -> None:
        async with spilling(tmp_path, memory_bytes=1) as (_, client):
            with pytest.raises(StoreError, match=r"No space left.*set store.spill_folder to a folder of another one"):
                await client.put(0, {"tokens": [np.arange(LARGE)]})
            await client.put(0, {"tokens": [np.arange(SMALL)]})
            assert (await client.stats()).rows == 1
            assert len(on_disk(tmp_path)) == 1

    asyncio.run(program())


def test_a_disk_that_is_full_halfway_through_a_restore_keeps_no_file_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spill").mkdir()
    plan = make_plan(TASKS, folder=tmp_path / "journal", memory_bytes=1, spill=str(tmp_path / "spill"))
    coordinator, seen = Coordinator(plan), list[list[Path]]()
    spill = coordinator.pool.spill

    def full_at_the_third(block: PackedBlock) -> PackedBlock:
        if len(seen) == 2:
            raise StoreError("No space left")
        found = spill(block)
        seen.append(on_disk(tmp_path))
        return found

    monkeypatch.setattr(coordinator.pool, "spill", full_at_the_third)
    blocks = [([number], BlockSpec(("tokens",), 3, Payload(3, b"abc"))) for number in range(3)]
    change = RestorePartition("train", SavedPartition(PartitionContent([], [], [], [], [], {}, {}, 0), blocks))
    with pytest.raises(StoreError, match="No space left"):
        coordinator._apply_and_record("client", 1, change)
    assert [len(files) for files in seen] == [1, 2] and not on_disk(tmp_path)


def test_a_disk_that_is_full_for_small_rows_is_the_same_error_and_leaves_no_file(tmp_path: Path) -> None:
    segment = Segment("here", "a-0-disk", 3)
    link_disk(tmp_path / "memory", tmp_path)
    path = segment_path(tmp_path / "memory", segment.name)
    path.symlink_to("/dev/full")
    with pytest.raises(StoreError, match=r"No space left.*set store.spill_folder to a folder of another one"):
        write_segment(tmp_path / "memory", segment, b"abc")
    assert not path.is_symlink()


class SmallFiles(ForkedStore):
    """No file of its coordinator can have more than 200,000 bytes."""

    program = (
        "-c",
        "import resource, sys; from pathlib import Path; from millstream.store import host;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)); host.coordinator_main(Path(sys.argv[1]))",
    )


def test_a_journal_that_cannot_grow_fails_the_request_with_what_to_do_and_loses_nothing(tmp_path: Path) -> None:
    async def program() -> None:
        with SmallFiles(make_plan(TASKS, folder=tmp_path)) as store:
            client, num_put = await store.connect(), 0
            with pytest.raises(StoreError, match=r"cannot write its journal.*Free space on that disk"):
                for _ in range(100):
                    await client.put(0, {"tokens": [np.arange(SMALL)]})
                    num_put += 1
            assert 5 < num_put < 100 and (await client.stats()).rows == num_put
            await client.close()

    asyncio.run(program())


def test_a_bound_that_cannot_be_is_refused_with_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="spill_folder goes with memory_gb"):
        StoreConfig(spill_folder="/tmp")
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="above 0 and finite"):
            StoreConfig(memory_gb=wrong)
    with pytest.raises(StoreError, match=r"Set store\.spill_folder to a folder that exists"):
        make_plan(TASKS, memory_bytes=1, spill=str(tmp_path / "missing"))
