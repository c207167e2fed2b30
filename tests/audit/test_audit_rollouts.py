"""The audit of kept rollouts: what the pipeline keeps is clean, and every forgery that is planted in the files is found."""

from __future__ import annotations

import functools
import random
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from millstream.audit import AuditReport, audit, report_lines, rollout_files
from millstream.events import Event, Resumed, RunEnded, RunStarted, encode_event
from millstream.events.rollouts.chunks import ChunkBody, ChunkHead, _body, _joined, read_heads
from millstream.events.rollouts.writer import RolloutWriter, stratum_of, void_after
from millstream.events.sinks import MemorySink
from support.simulated import Diary, World, simulate

WORLD = World(
    steps=6, groups_per_step=3, group_size=3, max_lag=2, failure=0.3, num_turns=2, latency=3.0, num_engines=2, seed=4
)
WORLDS = {
    "retries and lag": WORLD,
    "empty places": World(success=0.9, max_replaced_per_step=1, failure=0.1),
    "first to finish": World(surplus="abort", extra_groups=6, extra_members=1, max_lag=2, latency=1.0, group_size=3),
    "restarts": World(overdue="restart", max_restarts=2, max_lag=1, tail=2.0, num_engines=2, slots=2, seed=2),
}


def started(world: World) -> RunStarted:
    return RunStarted(
        at=0.0,
        run_id="c0ffee",
        seed=world.seed,
        steps=world.steps,
        num_tasks=0,
        filter_zero_signal=world.filter_zero_signal,
        min_group_size=2,
        groups_per_step=world.groups_per_step,
        group_size=world.group_size,
        max_lag=world.max_lag,
        lag_bound=-int(-world.max_lag // 1),
        budget=10**6,
        extra_members=world.extra_members,
        is_first_to_finish=world.surplus == "abort" or bool(world.extra_members),
        max_restarts=world.max_restarts if world.overdue == "restart" else 0,
    )


def findings(report: AuditReport) -> list[str]:
    return [one.message for one in report.findings if one.rule == "rollouts"]


def write_log(run_dir: Path, events: Sequence[Event]) -> None:
    lines = [b'{"seq":%d,%b\n' % (seq, encode_event(event)[1:]) for seq, event in enumerate(events)]
    (run_dir / "events.jsonl").write_bytes(b"".join(lines))


@functools.cache
def simulated(folder: Path, name: str) -> Path:
    """A run that was killed and resumed, with rollouts in several chunks a file."""
    world, run_dir, diary = WORLDS[name], folder / name.replace(" ", "-"), Diary()
    writers: list[RolloutWriter] = []

    def keep(first: int) -> Callable[[MemorySink], RolloutWriter]:
        def made(sink: MemorySink) -> RolloutWriter:
            last = lambda: first + len(sink.events) - 1  # noqa: E731
            writers.append(RolloutWriter(run_dir / "rollouts", max_bytes=1e12, last_seq=last))
            add = writers[-1].add

            def adding(record: object) -> None:
                add(record)  # type: ignore[arg-type]
                if draws.random() < 0.02:
                    writers[-1].flush()

            writers[-1].add = adding  # type: ignore[method-assign, assignment]
            return writers[-1]

        return made

    draws = random.Random(1)
    outcome = simulate(world, keeper=diary, rollouts=keep(1))
    writers[0].close()
    kept = diary.kept[2]
    events: list[Event] = [started(world), *outcome.sink.events]
    covered = kept.mark
    events.append(Resumed(at=0.0, incarnation=1, version=kept.standing.ledger.version, from_seq=covered, digest=""))
    void_after(run_dir / "rollouts", covered)
    outcome = simulate(world, kept=kept, rollouts=keep(len(events)))
    writers[1].close()
    events += [*outcome.sink.events, RunEnded(at=1e6, outcome="finished", version=world.steps)]
    write_log(run_dir, events)
    return run_dir


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made")


@pytest.mark.parametrize("name", WORLDS)
def test_what_the_pipeline_keeps_through_a_crash_is_clean(name: str, made: Path) -> None:
    report = audit(simulated(made, name))
    assert findings(report) == []
    assert report.rollouts_verified == report.rollouts_trained > 5
    assert f"{report.rollouts_verified} of them are kept, 0 were sampled away" in "\n".join(report_lines(report))


# ---- planted crimes ------------------------------------------------------------------------------------------------------

Chunk = tuple[ChunkHead, ChunkBody | None]
Forge = Callable[[list[Chunk]], None]


def forged(run_dir: Path, forge: Forge) -> None:
    """In the file of the first stratum, which has half of the groups."""
    path = run_dir / "rollouts" / "00.rollouts"
    raw, chunks, uncompressed = path.read_bytes(), list[Chunk](), {0: b""}
    for head, place in read_heads(path):
        packed = zlib.decompressobj()
        data = packed.decompress(raw[place.begin : place.end])
        body = _body.decode(data) if data else None
        chunks.append((head, body))
        uncompressed[0 if body is None else body.checksum] = packed.unused_data
    forge(chunks)
    path.write_bytes(
        b"".join(_joined(head, body, uncompressed[0 if body is None else body.checksum]) for head, body in chunks)
    )


def where(chunks: list[Chunk], is_it: Callable[[ChunkHead], bool]) -> int:
    """The last chunk of the kind: nothing after it is void."""
    return max(number for number, (head, _) in enumerate(chunks) if head.cut is None and is_it(head))


def change_reward(chunks: list[Chunk]) -> None:
    at = where(chunks, lambda head: any(one.fate == "trained" for one in head.fates))
    head, body = chunks[at]
    fates = [replace(one, rewards=[one.rewards[0] + 0.1, *one.rewards[1:]]) for one in head.fates]
    chunks[at] = replace(head, fates=fates), body


def change_reward_of_attempts(chunks: list[Chunk]) -> None:
    for at, (head, body) in enumerate(chunks):
        if body is not None:
            parts = [replace(part, reward=part.reward + 0.1) for part in body.parts]
            chunks[at] = head, replace(body, parts=parts)


def change_reward_of_rows(chunks: list[Chunk]) -> None:
    at = where(chunks, lambda head: any(one.num_rows for one in head.taken))
    head, body = chunks[at]
    assert body is not None
    chunks[at] = head, replace(body, taken=[replace(row, reward=row.reward - 0.1) for row in body.taken])


def change_step(chunks: list[Chunk]) -> None:
    at = where(chunks, lambda head: any(one.num_rows for one in head.taken))
    head, body = chunks[at]
    chunks[at] = replace(head, taken=[replace(one, version=one.version + 1) for one in head.taken]), body


def change_start(chunks: list[Chunk]) -> None:
    for at, (head, body) in enumerate(chunks):
        if body is not None:
            chunks[at] = head, replace(body, parts=[replace(part, start_version=7) for part in body.parts])


def repeat(chunks: list[Chunk]) -> None:
    chunks.append(chunks[where(chunks, lambda head: any(one.fate == "trained" for one in head.fates))])


def repeat_attempts(chunks: list[Chunk]) -> None:
    at = where(chunks, lambda head: any(head.num_attempts))
    chunks.insert(at, chunks[at])


def leave_out(chunks: list[Chunk]) -> None:
    del chunks[where(chunks, lambda head: any(one.fate == "trained" for one in head.fates))]


def leave_out_attempts(chunks: list[Chunk]) -> None:
    at = where(chunks, lambda head: any(head.num_attempts))
    head, body = chunks[at]
    assert body is not None
    empty = replace(body, attempts=[], parts=[], tokens=b"", versions=b"")
    chunks[at] = replace(head, num_attempts=[0] * len(head.groups)), empty


def leave_out_marks(chunks: list[Chunk]) -> None:
    """What the resume has undone is there again."""
    chunks[:] = [chunk for chunk in chunks if chunk[0].cut is None]


CRIMES = {
    "reward": (change_reward, "its rewards are"),
    "own reward": (change_reward_of_attempts, "has reward"),
    "reward of rows": (change_reward_of_rows, "was trained with rewards"),
    "step": (change_step, "it was taken for the steps"),
    "version": (change_start, "has versions"),
    "a chunk twice": (repeat, "twice"),
    "attempts twice": (repeat_attempts, "twice"),
    "a chunk left out": (leave_out, "is missing"),
    "attempts left out": (leave_out_attempts, "are missing"),
    "a mark left out": (leave_out_marks, ""),
}


@pytest.mark.parametrize("name", CRIMES)
def test_a_forgery_in_the_files_is_found(name: str, made: Path, tmp_path: Path) -> None:
    forge, words = CRIMES[name]
    run_dir = shutil.copytree(simulated(made, "retries and lag"), tmp_path / "run")
    forged(run_dir, forge)
    found = findings(audit(run_dir))
    assert found and any(words in one for one in found), found


def test_a_missing_file_is_found_and_what_was_sampled_away_or_lost_is_counted(made: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(simulated(made, "retries and lag"), tmp_path / "run")
    rollouts = run_dir / "rollouts"
    whole = audit(run_dir).rollouts_verified
    (rollouts / "00.rollouts").unlink()
    (found,) = findings(audit(run_dir))
    assert found.startswith("rollouts/00.rollouts is missing: ")
    (rollouts / "sampled.json").write_text('{"level":1,"num_lost":0}')
    report = audit(run_dir)
    assert findings(report) == [] and report.rollouts_verified + report.rollouts_sampled_away == whole
    (rollouts / "sampled.json").write_text('{"level":0,"num_lost":3}')
    report = audit(run_dir)
    assert findings(report) == [] and report.rollouts_verified + report.rollouts_not_written == whole
    (rollouts / "sampled.json").unlink()
    (rollouts / "00.rollouts").write_bytes(b"\0" * 100)
    assert any("cannot be read" in one for one in findings(audit(run_dir)))


def test_a_killed_run_may_lack_what_no_checkpoint_covers(made: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(simulated(made, "retries and lag"), tmp_path / "run")
    lines = (run_dir / "events.jsonl").read_bytes().splitlines(keepends=True)
    (run_dir / "events.jsonl").write_bytes(b"".join(lines[:-1]))
    forged(run_dir, leave_out)
    report = audit(run_dir)
    assert findings(report) == [] and report.rollouts_not_written
    (run_dir / "events.jsonl").write_bytes(b"".join(lines[:-100]))
    assert findings(audit(run_dir)) == [], "the files of an active run may be ahead of what was read of its log"


def test_strata_are_those_of_the_writer() -> None:
    assert all(rollout_files.stratum_due(number) == stratum_of(number) for number in range(2000))


def test_files_of_another_version_of_the_format_are_a_finding_that_says_so(made: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(simulated(made, "retries and lag"), tmp_path / "run")
    path = run_dir / "rollouts" / "00.rollouts"
    path.write_bytes(b"MSR2" + path.read_bytes()[4:])
    found = findings(audit(run_dir))
    assert any("written by another version of Millstream: audit it with that one" in one for one in found), found
