"""The index beside the events, and its tiles in memory: they add up to the events that count, however these came about."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.dash import tiles as module
from millstream.dash.tiles import RunTiles
from millstream.events import (
    Event,
    GroupAdmitted,
    GroupLeft,
    Resumed,
    RolloutStarted,
    RunEnded,
    RunStarted,
    Span,
    Status,
    Stepped,
    WaitNow,
    Warned,
    index,
)
from millstream.events.index import index_of, read_tiles
from millstream.events.sinks import JsonlSink, read_events, read_history
from millstream.types import Fate

SIZE = 5
GROUP, LEFT, STARTED = "admitted", "trained", "rollouts_started"


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (index, module):
        monkeypatch.setattr(place, "TILE", SIZE)
    monkeypatch.setattr(module, "MIN_TO_WRITE", 1)


def event_of(kind: int, number: int) -> Event:
    at = float(number)
    return (
        Span(at=at, worker="learner", what="step", seconds=0.5, num_tokens=3),
        Span(at=at, worker="engine", what="generate", seconds=2.0, num_tokens=number),
        GroupAdmitted(at=at, group_id=number, task_id="t", epoch=0, start_version=0, deadline=1, source="math"),
        RolloutStarted(at=at, group_id=number, member=0, attempt=0),
        GroupLeft(at=at, group_id=number, fate=Fate.TRAINED),
        status(at),
        Warned(at=at, message=f"warning {number}"),
        stepped(at, number),
    )[kind]


def status(at: float) -> Status:
    waits = [WaitNow(owner="train", what="a complete group", seconds=at)]
    return Status(
        at=at,
        requests_running=3,
        requests_waiting=1,
        rows_in_store=2,
        groups_outstanding=4,
        groups_taken=1,
        budget=8,
        waits=waits,
    )


def stepped(at: float, version: int) -> Stepped:
    return Stepped(
        at=at, version=version, num_groups=1, num_rollouts=2, num_rows=2, num_tokens=9, seconds=1.0, metrics={}
    )


def assert_adds_up(found: RunTiles, path: Path) -> None:
    history = list(read_history(path))
    kinds = Counter(type(event) for event in history)
    counted = {name: int(found.tiles.of(name).sum()) for name in (GROUP, LEFT, STARTED)}
    assert counted == {GROUP: kinds[GroupAdmitted], LEFT: kinds[GroupLeft], STARTED: kinds[RolloutStarted]}
    assert int(found.tiles.of("num_readings").sum()) == kinds[Status]
    assert found.steps.of("version").tolist() == [one.version for one in history if isinstance(one, Stepped)]
    for worker in ("learner", "engine"):
        busy = sum(float(columns.of("busy").sum()) for key, columns in found.work.items() if key[0] == worker)
        assert busy == sum(one.seconds for one in history if isinstance(one, Span) and one.worker == worker)
    assert list(found.marked(Warned)) == [one for one in history if isinstance(one, Warned)]
    assert list(found.events(range(len(found.tiles)))) == history
    last = [one for one in history if isinstance(one, Status)]
    assert found.last_status() == (last[-1] if last else None)


def written(path: Path, lives: list[list[int]], resumes: list[int], cut: bool = False) -> Iterator[None]:
    """Each life of the run writes some events; the next resumes from one of those before."""
    number = 0
    for life, events in enumerate(lives):
        sink = JsonlSink(path)
        if life:
            from_seq = resumes[life - 1] % (number + 1) - 1
            sink.emit(Resumed(at=float(number), incarnation=life, version=0, from_seq=from_seq, digest=""))
            number += 1
        for kind in events:
            sink.emit(event_of(kind, number))
            number += 1
        sink.close()
        if cut:
            with path.open("ab") as file:
                file.write(b'{"seq":99,"kind"')
        yield


LIVES = st.lists(st.lists(st.integers(0, 7), max_size=23), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    lives=LIVES,
    resumes=st.lists(st.integers(0, 60), min_size=4, max_size=4),
    cut=st.booleans(),
    has_index=st.booleans(),
)
def test_tiles_add_up_to_the_events_that_count_whatever_was_undone_with_and_without_an_index(
    lives: list[list[int]], resumes: list[int], cut: bool, has_index: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        follows = RunTiles(path)
        for _ in written(path, lives, resumes, cut):
            if not has_index:
                index_of(path).unlink(missing_ok=True)
            follows.refresh()
            assert_adds_up(follows, path)
            fresh = RunTiles(path)
            while not fresh.refresh(0.0):
                pass
            assert_adds_up(fresh, path)


def test_the_index_is_written_with_the_events_and_covers_every_whole_tile(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for _ in written(path, [[0] * 12, [1] * 9], [10]):
        tiles = [tile for tile, _ in read_tiles(index_of(path))]
        assert all(tile.num_lines == SIZE for tile in tiles)
        assert [tile.line for tile in tiles] == [1 + SIZE * number for number in range(len(tiles))]
    assert len(tiles) == len(list(read_events(path))) // SIZE


def test_an_index_that_is_missing_is_written_only_where_that_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    list(written(path, [[0, 2, 3, 4, 5] * 4], []))
    as_written = index_of(path).read_bytes()
    index_of(path).unlink()
    RunTiles(path).refresh(may_write=lambda: False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["events.jsonl"]
    RunTiles(path).refresh(may_write=lambda: True)
    assert index_of(path).read_bytes() == as_written


@pytest.mark.parametrize("damage", ["another log", "a line", "the end", "text"])
def test_an_index_that_is_damaged_or_of_another_log_does_not_count(tmp_path: Path, damage: str) -> None:
    path, other = tmp_path / "events.jsonl", tmp_path / "other.jsonl"
    list(written(path, [[0, 2, 3, 4, 5] * 4], []))
    list(written(other, [[3] * 40], []))
    data = index_of(path).read_bytes()
    lines = data.splitlines(keepends=True)
    index_of(path).write_bytes(
        {
            "another log": index_of(other).read_bytes(),
            "a line": b"".join([lines[0], b"[1, 2]\n", *lines[2:]]),
            "the end": data[:-7],
            "text": b"not an index\n",
        }[damage]
    )
    found = RunTiles(path)
    found.refresh()
    assert_adds_up(found, path)
    sink = JsonlSink(path)  # a resumed run continues it, or leaves it
    for number in range(SIZE):
        sink.emit(event_of(3, 100 + number))
    sink.close()
    again = RunTiles(path)
    again.refresh()
    assert_adds_up(again, path)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("format", lambda old: "1"),
        ("counts", lambda old: old[:-1]),
        ("counts", lambda old: [*old, 0]),
        ("counts", lambda old: [10**30, *old[1:]]),
        ("depths", lambda old: old[1:]),
        ("end", lambda old: 0),
        ("first_seq", lambda old: 10**30),
        ("marks", lambda old: [["warned", 1, 10**12, 5]]),
        ("status", lambda old: ["status", 1, 0, 10**15]),
    ],
)
def test_an_index_of_another_format_or_with_impossible_numbers_is_made_again(
    tmp_path: Path, field: str, change: Callable[[Any], Any]
) -> None:
    path = tmp_path / "events.jsonl"
    list(written(path, [[0, 2, 3, 4, 5, 6] * 5], []))
    as_written = index_of(path).read_bytes()
    tiles = [json.loads(line) for line in as_written.splitlines()]
    for tile in tiles:
        place = index.EventTile.__struct_fields__.index(field)
        tile[place] = change(tile[place])
    index_of(path).write_text("".join(json.dumps(tile) + "\n" for tile in tiles))
    damaged = index_of(path).read_bytes()
    found = RunTiles(path)
    found.refresh(may_write=lambda: True)
    assert_adds_up(found, path)
    assert index_of(path).read_bytes() == as_written
    index_of(path).write_bytes(damaged)
    JsonlSink(path).close()  # a resumed run
    assert index_of(path).read_bytes() == as_written


@pytest.mark.parametrize("field", ["seq", "num_tokens"])
def test_a_line_with_an_integer_beyond_64_bits_is_skipped(tmp_path: Path, field: str) -> None:
    path = tmp_path / "events.jsonl"
    list(written(path, [[0, 1] * 4], []))
    lines = path.read_bytes().splitlines(keepends=True)
    line = json.loads(lines[3])
    for value in (10**30, 2**63 - 1):
        lines.append(json.dumps({**line, field: value}, separators=(",", ":")).encode() + b"\n")
    path.write_bytes(b"".join(lines))
    found = RunTiles(path)
    assert found.refresh()
    assert found.num_skipped == 2 and [one.line for _, one in found.skipped] == [9, 10]


def test_lines_that_cannot_be_read_are_counted_and_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    list(written(path, [[2, 3, 4] * 5], []))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2:2] = [b"\x00\xff garbage\n", b'{"seq":2,"kind":"of_a_newer_version","at":1.0}\n', b"\n"]
    path.write_bytes(b"".join(lines))
    found = RunTiles(path)
    found.refresh()
    assert found.num_skipped == 3
    assert [one.line for _, one in found.skipped] == [3, 4, 5]
    assert "of_a_newer_version" in found.skipped[1][1].why
    assert int(found.tiles.of(GROUP).sum()) == 5


def test_a_log_that_was_replaced_by_a_shorter_one_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    list(written(path, [[2] * 30], []))
    found = RunTiles(path)
    found.refresh()
    path.unlink()
    index_of(path).unlink()
    list(written(path, [[4] * 3], []))
    found.refresh()
    assert_adds_up(found, path)


def test_a_clock_that_goes_back_leaves_every_event_in_its_window(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    sink = JsonlSink(path)
    for at in [*range(50, 80), *range(10, 40)]:
        sink.emit(Span(at=float(at), worker="learner", what="step", seconds=1.0))
    sink.close()
    found = RunTiles(path)
    found.refresh()
    assert (found.first, found.last) == (10.0, 79.0)
    for begin, end in ((20.0, 30.0), (60.0, 70.0)):
        inside = {one.at for one in found.events(map(int, found.tiles_between(begin, end)))}
        assert {float(at) for at in range(int(begin), int(end) + 1)} <= inside


def test_an_index_that_cannot_be_written_costs_the_run_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    index_of(path).mkdir()
    list(written(path, [[0] * 20], []))
    assert len(list(read_events(path))) == 20


def test_a_run_that_has_just_begun_has_tiles(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    sink = JsonlSink(path)
    sink.emit(RunEnded(at=1.0, outcome="finished", version=0))
    sink.close()
    found = RunTiles(path)
    assert found.refresh()
    assert found.num_skipped == 0 and list(found.marked(RunEnded, RunStarted))
