"""Kept rollouts: every trained row exactly once, whatever is cut off and resumed; within the bound; readable after a kill."""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from millstream.errors import ConfigError, DataError, LogError
from millstream.events import (
    Event,
    GroupLeft,
    GroupRestarted,
    GroupResumed,
    GroupTaken,
    RolloutAborted,
    RolloutEnded,
    RolloutFailed,
)
from millstream.events.rollouts import Attempt, GroupFate, TakenRows, TrainedRows
from millstream.events.rollouts.reader import KeptRollout, RolloutDump
from millstream.events.rollouts.text import mask_runs, turn_texts
from millstream.events.rollouts.writer import (
    ROLLOUTS_FOLDER,
    RolloutWriter,
    read_sampled,
    stratum_file,
    stratum_of,
    void_after,
)
from millstream.events.sinks import MemorySink
from millstream.pipeline.recorded import RecordedBatches
from millstream.pipeline.reschedule import Changed
from millstream.sim.learner import SimLearner
from millstream.types import Fate, Finish, HalfFloats, Metrics, Rollout, Tokens, TrainRow
from support.examples import examples
from support.simulated import Diary, World, simulate
from support.worlds import unless_all_fail, worlds

NO_BOUND = 1e12


class Recorder(SimLearner):
    """A learner that remembers the rows that it trained, in order. The log ratio of a token is a function of the token."""

    def __init__(self) -> None:
        super().__init__(token_s=1e-4)
        self.rows: list[TrainRow] = []
        self._num_before = 0
        self._log_ratios = np.zeros(0, np.float16)

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        self.rows += rows
        await super().accumulate(rows)

    async def step(self) -> Metrics:
        trained = [log_ratio_of(row.tokens[row.loss_mask]) for row in self.rows[self._num_before :]]
        self._log_ratios = np.concatenate([np.zeros(0, np.float16), *trained])
        self._num_before = len(self.rows)
        return await super().step()

    def log_ratios(self) -> HalfFloats:
        return self._log_ratios


def log_ratio_of(tokens: Tokens) -> HalfFloats:
    return (tokens % 7 / 8).astype(np.float16)


def assert_trained_logprobs(dump: RolloutDump, *, version: int) -> None:
    """What was trained before this version has its own, and nothing else has any."""
    for one in everything(dump):
        assert (one.trained_logprobs is None) == (one.step is None or one.step > version)
        for part, found in zip(one.parts, one.trained_logprobs or (), strict=False):
            expected = np.where(part.loss_mask, part.logprobs + log_ratio_of(part.tokens), np.nan)
            assert np.array_equal(found, expected, equal_nan=True)


def writer_in(run_dir: Path, sink: MemorySink, *, first: int = 0, upto: int | None = None) -> RolloutWriter:
    folder = run_dir / ROLLOUTS_FOLDER
    if upto is not None:
        void_after(folder, upto)
    return RolloutWriter(folder, max_bytes=NO_BOUND, last_seq=lambda: first + len(sink.events))


def everything(dump: RolloutDump) -> list[KeptRollout]:
    return [one for group in dump.groups() for one in dump.rollouts(group)]


def ids_in(run_dir: Path) -> list[int]:
    return sorted(group.group_id for group in RolloutDump(run_dir).groups())


def kept_rows(dump: RolloutDump, upto: float = math.inf) -> list[TrainRow]:
    """As they were trained before this version, in order."""
    taken = [found for group in dump.groups() if (found := dump.taken_rows(group)) is not None]
    taken.sort(key=lambda one: (one.version, one.number))
    return [row for one in taken if one.version < upto for row in one.rows]


def assert_same(kept: Sequence[TrainRow], trained: Sequence[TrainRow]) -> None:
    assert [row.label for row in kept] == [row.label for row in trained]
    for one, other in zip(kept, trained, strict=True):
        for name in ("tokens", "loss_mask", "logprobs", "advantages", "reference"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name


@examples(30, of=60)
@given(world=worlds, cut=st.randoms(use_true_random=False))
def test_every_trained_row_is_kept_exactly_once_wherever_the_run_is_cut_off_and_resumed(
    world: World, cut: random.Random
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_dir, diary, first, second = Path(folder), Diary(), Recorder(), Recorder()
        writers: list[RolloutWriter] = []

        def keep(sink: MemorySink) -> RolloutWriter:
            writers.append(writer_in(run_dir, sink))
            return writers[-1]

        try:
            with unless_all_fail(world):
                whole = simulate(world, keeper=diary, learner=first, rollouts=keep)
                writers[0].close()
                assert_same(kept_rows(RolloutDump(run_dir)), first.rows)
                assert_trained_logprobs(RolloutDump(run_dir), version=whole.pipeline.admission.version)
                kept = cut.choice(diary.kept)
                last = len(whole.sink.events)

                def keep_on(sink: MemorySink) -> RolloutWriter:
                    writers.append(writer_in(run_dir, sink, first=last, upto=kept.mark))
                    return writers[-1]

                again = simulate(world, kept=kept, learner=second, rollouts=keep_on)
        finally:
            writers[-1].close()
        dump = RolloutDump(run_dir)
        rows = kept_rows(dump, kept.standing.ledger.version)
        assert_same(kept_rows(dump), [*first.rows[: len(rows)], *second.rows])
        assert_trained_logprobs(dump, version=again.pipeline.admission.version)
        assert len(rows) == kept.num_rows or kept.num_rows == 0


@examples(30, of=60)
@given(world=worlds, cut=st.randoms(use_true_random=False), fewer=st.booleans(), schedule=st.booleans())
def test_after_a_resume_with_other_settings_each_rollout_has_the_fate_that_it_ended_with(
    world: World, cut: random.Random, fewer: bool, schedule: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_dir, diary, writers = Path(folder), Diary(), list[RolloutWriter]()
        other = replace(world, group_size=max(2, world.group_size - fewer))
        try:
            with unless_all_fail(world):
                whole = simulate(world, keeper=diary, rollouts=lambda sink: made(writers, writer_in(run_dir, sink)))
                writers[0].close()
                kept, last = cut.choice(diary.kept), len(whole.sink.events)
                again = simulate(
                    other,
                    kept=kept,
                    changed=Changed(rollouts=True, schedule=schedule),
                    rollouts=lambda sink: made(writers, writer_in(run_dir, sink, first=last, upto=kept.mark)),
                )
        finally:
            writers[-1].close()
        expected = Counter(fates_of([*whole.sink.events[: kept.mark], *again.sink.events]))
        found = Counter((one.group_id, one.member, one.fate) for one in everything(RolloutDump(run_dir)))
        assert {key: num for key, num in found.items() if key[2] in ("trained", "filtered")} == expected


def made(writers: list[RolloutWriter], writer: RolloutWriter) -> RolloutWriter:
    writers.append(writer)
    return writer


def fates_of(events: Sequence[Event]) -> Iterator[tuple[int, int, str]]:
    """Of every rollout that a group was settled with, and that was trained or filtered."""
    ended: dict[int, set[int]] = {}
    for event in events:
        if isinstance(event, RolloutEnded):
            ended.setdefault(event.group_id, set()).add(event.member)
        elif isinstance(event, GroupResumed):
            ended[event.group_id] = ended.get(event.group_id, set()) & set(event.kept)
        elif isinstance(event, GroupRestarted):
            ended[event.group_id] = set()
        elif isinstance(event, GroupLeft) and event.fate in (Fate.TRAINED, Fate.FILTERED):
            yield from ((event.group_id, member, event.fate.value) for member in ended[event.group_id])


def test_groups_of_a_batch_are_in_the_order_in_which_they_joined_it_although_no_event_divides_them(
    tmp_path: Path,
) -> None:
    """A place that stays empty has no event of its own. Mini-batches are made by this order."""
    writer = RolloutWriter(tmp_path / ROLLOUTS_FOLDER, max_bytes=NO_BOUND, last_seq=lambda: 0)
    for number, group_id in enumerate((7, 5, 6)):
        writer.add(attempt(group_id))
        writer.add(GroupFate(group_id, "t", "filtered", [0.5], is_vacant=True))
        writer.add(TakenRows(group_id, 0, number, [], [], []))
    writer.close()
    batches = RecordedBatches(RolloutDump(tmp_path), groups_per_step=3)
    assert [one.name.split(",")[1] for one in batches.read(0)] == [f" group {g} of {tmp_path.name}" for g in (7, 5, 6)]


def test_what_left_before_training_is_kept_with_its_fate(tmp_path: Path) -> None:
    world = World(
        failure=0.3, max_lag=2, surplus="abort", extra_groups=6, num_turns=2, group_size=3, latency=1.0, seed=3
    )
    writers: list[RolloutWriter] = []

    def keep(sink: MemorySink) -> RolloutWriter:
        writers.append(writer_in(tmp_path, sink))
        return writers[-1]

    outcome = simulate(world, rollouts=keep)
    writers[0].close()
    found = everything(RolloutDump(tmp_path))
    fates = {event.group_id: event.fate for event in outcome.sink.of(GroupLeft)}
    expected = Counter(fates[event.group_id].value for event in outcome.sink.of(RolloutEnded))
    expected["failed"] += len(outcome.sink.of(RolloutFailed))
    expected["aborted"] += len(outcome.sink.of(RolloutAborted))
    assert Counter(one.fate for one in found) == expected
    assert {"trained", "filtered", "failed", "aborted"} <= expected.keys()
    versions = {event.group_id: event.version for event in outcome.sink.of(GroupTaken)}
    for one in found:
        is_trained = one.fate == "trained"
        assert (one.step is not None) == (one.advantages is not None) == is_trained
        if is_trained:
            assert one.step == versions[one.group_id] + 1
            assert one.lag == versions[one.group_id] - one.parts[0].start_version
        assert bool(one.why) == (one.fate in ("failed", "aborted") and np.isnan(one.reward))


def attempt(group_id: int, *, num_tokens: int = 50, member: int = 0) -> Attempt:
    mask = np.arange(num_tokens) >= num_tokens // 2
    draws = np.random.default_rng(group_id)
    part = Rollout(
        group_id=group_id,
        member=member,
        attempt=0,
        start_version=1,
        reward=0.5,
        turn_rewards=np.array([0.5]),
        finish=Finish.STOP,
        tokens=draws.integers(0, 1000, num_tokens).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, draws.standard_normal(num_tokens), 0).astype(np.float32),
        versions=np.where(mask, 1, -1).astype(np.int32),
    )
    parts = MappingProxyType({"exact": 0.5})  # an environment's own may be any mapping
    return Attempt(group_id, member, 0, f"task-{group_id}", 0, (part,), reward_parts=parts)


def test_beyond_the_bound_whole_groups_are_sampled_and_what_is_gone_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / ROLLOUTS_FOLDER
    writer = RolloutWriter(folder, max_bytes=200_000, last_seq=lambda: 0)
    for group_id in range(3000):
        for member in range(2):
            writer.add(attempt(group_id, member=member))
        writer.add(GroupFate(group_id, "t", Fate.FILTERED, [0.5, 0.5]))
        if group_id % 100 == 0:
            writer.flush()
    writer.close()
    dump, sampled = RolloutDump(tmp_path), read_sampled(folder)
    assert sum(path.stat().st_size for path in folder.glob("*.rollouts")) <= 200_000
    assert 0 < sampled.level < 8
    groups = [g for g in range(3000) if stratum_of(g) >= sampled.level]
    assert ids_in(tmp_path) == groups, "by the id alone, over the whole run"
    assert len(everything(dump)) == 2 * len(groups), "whole groups"
    writer = RolloutWriter(folder, max_bytes=200_000, last_seq=lambda: 0)
    away = next(g for g in range(3000, 4000) if stratum_of(g) < sampled.level)
    writer.add(attempt(away))
    writer.close()
    assert away not in ids_in(tmp_path), "a resumed run samples as before"


def test_half_of_the_groups_are_in_the_first_stratum_and_a_quarter_in_the_next() -> None:
    counts = Counter(map(stratum_of, range(100_000)))
    for stratum in range(6):
        assert counts[stratum] == pytest.approx(100_000 / 2 ** (stratum + 1), rel=0.1)


def test_an_unfinished_chunk_is_not_read_and_the_next_writer_cuts_it_off(tmp_path: Path) -> None:
    folder, groups = tmp_path / ROLLOUTS_FOLDER, [g for g in range(100) if stratum_of(g) == 0]
    writer = RolloutWriter(folder, max_bytes=NO_BOUND, last_seq=lambda: 7)
    writer.add(attempt(groups[0]))
    writer.flush()
    size = stratum_file(folder, 0).stat().st_size
    writer.add(attempt(groups[1]))
    writer.close()
    whole = stratum_file(folder, 0).read_bytes()
    for end in range(size, len(whole)):
        stratum_file(folder, 0).write_bytes(whole[:end])
        assert ids_in(tmp_path) == groups[:1]
    void_after(folder, 7)
    writer = RolloutWriter(folder, max_bytes=NO_BOUND, last_seq=lambda: 9)
    writer.add(attempt(groups[2]))
    writer.close()
    assert ids_in(tmp_path) == [groups[0], groups[2]]
    (found,) = [one for one in everything(RolloutDump(tmp_path)) if one.group_id == groups[2]]
    part, expected = found.parts[0], attempt(groups[2]).parts[0]
    assert found.reward_parts == {"exact": 0.5} and found.fate == "in flight"
    for name in ("tokens", "loss_mask", "logprobs", "versions", "turn_rewards"):
        assert np.array_equal(getattr(part, name), getattr(expected, name)), name


def test_many_records_are_written_before_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RolloutWriter, "FLUSH_S", 1e6)
    writer = RolloutWriter(tmp_path / ROLLOUTS_FOLDER, max_bytes=NO_BOUND, last_seq=lambda: 0)
    for rounds in range(1, 3):
        for member in range(RolloutWriter.MAX_WAITING):
            writer.add(attempt(7 * rounds, num_tokens=2, member=member))
        while len(everything(RolloutDump(tmp_path))) < rounds * RolloutWriter.MAX_WAITING:
            time.sleep(0.05)
    writer.close()


@pytest.mark.parametrize("can_truncate", [True, False])
def test_a_full_disk_costs_rollouts_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_truncate: bool
) -> None:
    folder = tmp_path / ROLLOUTS_FOLDER
    writer = RolloutWriter(folder, max_bytes=NO_BOUND, last_seq=lambda: 0)
    writer.FLUSH_S = 1e9
    group = next(g for g in range(100) if stratum_of(g) == 0)
    writer.add(attempt(group))
    writer.flush()
    file = writer._files[0]

    class Full:
        def __getattr__(self, name: str) -> object:
            return getattr(file, name)

        def write(self, data: bytes) -> int:
            return file.write(data[: len(data) // 2])

        def truncate(self, size: int) -> int:
            if not can_truncate:
                raise OSError(5, "input/output error")
            return file.truncate(size)

    with monkeypatch.context() as patched:
        patched.setitem(writer._files, 0, Full())
        writer.add(attempt(group, member=1))
        writer.flush()
    writer.add(attempt(group, member=2))
    writer.close()
    assert [one.member for one in everything(RolloutDump(tmp_path))] == [0, 2]
    assert read_sampled(folder).num_lost == 1


def test_a_group_whose_rollouts_could_not_all_be_written_is_shown_and_cannot_be_trained_again(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path / ROLLOUTS_FOLDER, max_bytes=NO_BOUND, last_seq=lambda: 0)
    own = [attempt(5, member=member).parts[0] for member in range(2)]
    rows = [
        TrainRow(tokens=part.tokens, loss_mask=part.loss_mask, logprobs=part.logprobs, advantages=part.logprobs)
        for part in own
    ]
    writer.add(attempt(5, member=1))
    writer.add(TakenRows(5, 3, 0, [(0, 0), (1, 0)], [0.5, 0.5], rows))
    writer.add(GroupFate(5, "t", "trained", [0.5, 0.5]))
    writer.close()
    dump = RolloutDump(tmp_path)
    group = dump.group(5)
    assert group is not None
    (found,) = dump.rollouts(group)
    assert (found.member, found.step, found.lag, found.fate) == (1, 4, 2, "trained")
    with pytest.raises(DataError, match="trained with 2 rows, and 1 of them are missing"):
        dump.taken_rows(group)


def kept_group(folder: Path, one: Attempt, log_ratios: HalfFloats) -> Path:
    """A trained group of one rollout; the file that has it."""
    writer = RolloutWriter(folder / ROLLOUTS_FOLDER, max_bytes=NO_BOUND, last_seq=lambda: 0)
    part, group_id = one.parts[0], one.group_id
    row = TrainRow(tokens=part.tokens, loss_mask=part.loss_mask, logprobs=part.logprobs, advantages=part.logprobs)
    for record in (one, TakenRows(group_id, 3, 0, [(0, 0)], [0.5], [row]), TrainedRows(group_id, [log_ratios])):
        writer.add(record)
    writer.add(GroupFate(group_id, "t", "trained", [0.5]))
    writer.close()
    return stratum_file(folder / ROLLOUTS_FOLDER, stratum_of(group_id))


@pytest.mark.parametrize("highest", [7, (1 << 16) - 1, 1 << 16, (1 << 31) - 1])
@pytest.mark.parametrize("is_wide", [False, True], ids=["as they are", "of 64 bits"])
def test_what_is_read_is_what_was_written_whatever_the_tokens_and_the_width_of_arrays(
    highest: int, is_wide: bool, tmp_path: Path
) -> None:
    (part,) = attempt(5).parts
    part = replace(part, tokens=np.append(part.tokens[1:], highest).astype(np.int32))
    wide = replace(
        part,
        tokens=part.tokens.astype(np.int64),
        versions=part.versions.astype(np.int64),
        logprobs=part.logprobs.astype(np.float64),
    )
    kept_group(tmp_path, attempt(5)._replace(parts=(wide if is_wide else part,)), np.full(25, 0.5, np.float16))
    (found,) = everything(RolloutDump(tmp_path))
    for name in ("tokens", "versions", "logprobs", "loss_mask"):
        expected, read = getattr(part, name), getattr(found.parts[0], name)
        assert read.dtype == expected.dtype and read.tobytes() == expected.tobytes(), name
    assert found.trained_logprobs is not None
    assert np.allclose(found.trained_logprobs[0][part.loss_mask], part.logprobs[part.loss_mask] + 0.5)


@pytest.mark.parametrize("place", [-1, -60, -200])
def test_a_byte_that_has_changed_is_an_error_that_names_the_file(place: int, tmp_path: Path) -> None:
    path = kept_group(tmp_path, attempt(5), np.full(25, 0.5, np.float16))
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(LogError, match=rf"{path.name}, byte \d+: a chunk cannot be read"):
        everything(RolloutDump(tmp_path))


def test_files_of_another_version_of_the_format_are_refused_by_name(tmp_path: Path) -> None:
    path = kept_group(tmp_path, attempt(5), np.full(25, 0.5, np.float16))
    path.write_bytes(b"MSR2" + path.read_bytes()[4:])
    with pytest.raises(LogError, match=rf"{path.name} was written by another version of Millstream"):
        RolloutDump(tmp_path)


def test_a_run_without_rollouts_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.keep_gb = 0"):
        RolloutDump(tmp_path)


def test_turns_are_the_runs_of_the_mask() -> None:
    part = attempt(0, num_tokens=4).parts[0]
    assert [one.speaker for one in turn_texts(part, str)] == ["environment", "model"]
    mask = np.array([True, True, False, True])
    assert list(mask_runs(mask)) == [(True, slice(0, 2)), (False, slice(2, 3)), (True, slice(3, 4))]
    assert list(mask_runs(mask[:0])) == []
