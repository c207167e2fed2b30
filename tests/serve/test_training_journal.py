"""The journal of a model that a client trains, and the results that wait to be retrieved."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

from millstream.serve.http import HttpError
from millstream.serve.training import futures as results
from millstream.serve.training.futures import JSON, Futures, Result
from millstream.serve.training.journal import JournalEntry, RequestJournal, SnapshotInfo

ENTRIES = [JournalEntry(number, "optim_step", b"x" * number) for number in range(1, 6)]


def fail(*_: object) -> NoReturn:
    raise OSError(28, "No space left on device")


def reopened(folder: Path) -> tuple[SnapshotInfo, list[JournalEntry]]:
    journal = RequestJournal(folder)
    found = journal.info(), journal.entries()
    journal.close()
    return found


@pytest.mark.parametrize("num_cut", [1, 5, 40])
def test_a_record_that_was_cut_off_is_removed_and_the_next_follows_what_is_whole(tmp_path: Path, num_cut: int) -> None:
    journal = RequestJournal(tmp_path)
    for entry in ENTRIES:
        journal.append(entry)
    os.truncate(tmp_path / "journal-0", journal.num_bytes - num_cut)
    journal = RequestJournal(tmp_path)
    assert journal.entries() == ENTRIES[: -1 if num_cut < 40 else -2]
    journal.append(ENTRIES[4])
    assert reopened(tmp_path)[1][-1] == ENTRIES[4]


@pytest.mark.parametrize("is_after_a_snapshot", [False, True])
def test_a_record_that_could_not_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_after_a_snapshot: bool
) -> None:
    journal = RequestJournal(tmp_path)
    if is_after_a_snapshot:
        journal.begin_next(lambda folder: None, SnapshotInfo(version=0, next_seq_id=1), [])
    journal.append(ENTRIES[0])
    with monkeypatch.context() as broken, pytest.raises(OSError, match="No space"):
        broken.setattr("os.fsync", fail)
        journal.append(ENTRIES[1])
    journal.append(ENTRIES[2])
    assert reopened(tmp_path)[1] == [ENTRIES[0], ENTRIES[2]]


def test_a_snapshot_counts_when_it_is_whole_and_not_before(tmp_path: Path) -> None:
    journal = RequestJournal(tmp_path)
    for entry in ENTRIES[:3]:
        journal.append(entry)
    info = SnapshotInfo(version=2, next_seq_id=3, results={"a": Result(JSON, b"{}")})
    with pytest.raises(OSError, match="No space"):
        journal.begin_next(fail, info, [])
    journal.append(ENTRIES[3])
    assert reopened(tmp_path) == (SnapshotInfo(version=0, next_seq_id=1), ENTRIES[:4])
    journal.begin_next(lambda folder: None, info, ENTRIES[2:4])
    journal.append(ENTRIES[4])
    assert reopened(tmp_path) == (info, ENTRIES[2:])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["current", "journal-1", "snapshot-1"]


@pytest.mark.parametrize(
    ("broken", "number"),
    [*(("os.fsync", number) for number in range(6)), *(("pathlib.Path.replace", n) for n in (0, 1))],
)
def test_whichever_sync_or_rename_of_a_snapshot_fails_no_request_is_lost_and_nothing_partial_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, number: int
) -> None:
    journal = RequestJournal(tmp_path)
    for entry in ENTRIES[:3]:
        journal.append(entry)
    info, calls = SnapshotInfo(version=2, next_seq_id=3), 0
    real = {"os.fsync": os.fsync, "pathlib.Path.replace": Path.replace}[broken]

    def sometimes(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return fail() if calls == number + 1 else real(*arguments)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(broken, sometimes)
        journal.begin_next(lambda folder: folder.joinpath("learner.pt").touch(), info, ENTRIES[2:3])
    is_renamed = (broken, number) == ("os.fsync", 5)  # the last: only the rename itself may not be on the disk yet
    old, new = ["journal-0"], ["current", "journal-1", "snapshot-1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*old, *new] if is_renamed else old)
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr("os.fsync", fail)
        journal.append(ENTRIES[3])
    journal.append(ENTRIES[4])
    assert sorted(path.name for path in tmp_path.iterdir()) == (new if is_renamed else old)
    whole = SnapshotInfo(version=0, next_seq_id=1), [*ENTRIES[:3], ENTRIES[4]]
    assert reopened(tmp_path) == ((info, [ENTRIES[2], ENTRIES[4]]) if is_renamed else whole)
    journal.begin_next(lambda folder: None, info, [])
    assert reopened(tmp_path) == (info, [])


def test_results_are_bounded_and_those_that_no_client_comes_for_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def program() -> None:
        futures, done = Futures(max_open=3), Result(JSON, b"{}")
        for number in range(3):
            futures.add(f"m:{number}", "owner")
        with pytest.raises(HttpError, match="3 results wait"):
            futures.check_room("owner")
        futures.check_room("another")
        futures.resolve("m:0", done)
        assert await futures.wait("m:0", "owner", wait_s=1) == done
        assert await futures.wait("m:1", "owner", wait_s=0) is None
        with pytest.raises(HttpError, match="no request"):
            await futures.wait("m:0", "another", wait_s=0)
        futures.mark_retrieved("m:0")
        futures.mark_retrieved("m:0")
        futures.check_room("owner")
        assert await futures.wait("m:0", "owner", wait_s=1) == done  # its response may have been lost
        futures.add("m:3", "owner")
        futures.resolve("m:1", done)
        monkeypatch.setattr(results, "ABANDONED_S", -1.0)
        futures.check_room("owner")
        assert "m:1" not in futures and "m:2" in futures
        for number in range(results.MAX_REPLAYED + 5):
            futures.add(f"r:{number}", "owner", is_replayed=True)
        futures.check_room("owner")
        assert "r:4" not in futures and "r:5" in futures
        for number in range(5, results.MAX_KEPT + 10):
            futures.mark_retrieved(f"r:{number}")
        assert "r:5" not in futures and "m:0" not in futures

    asyncio.run(program())
