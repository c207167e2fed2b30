"""Learners and scorers that read rows from the store by themselves, on the virtual clock: the run knows their ids and sizes, and
everything happens as with rows that it hands over."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace

from millstream.algo.advantages import whiten_tokens
from millstream.errors import RowsLost
from millstream.events import Span
from millstream.learner.base import PackedScores
from millstream.sim.learner import SimScorer
from millstream.store import Lease
from millstream.store.blocks import Block, Packing
from millstream.store.memory import _cells_of
from millstream.store.rows import BlockSpec
from millstream.store.wire import PackedBlock, Payload
from millstream.types import StoredRow, TrainRow, scaled_advantages
from support.rollout_workers import StagingStore
from support.simulated import Diary, WatchfulLearner, World, check, simulate
from support.worlds import cut_and_resume


class SharedFake(StagingStore):
    """A store of many processes, in this one. Claims bring nothing but the columns that were asked for."""

    now: ClassVar[SharedFake]
    num_to_lose: ClassVar[int] = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        SharedFake.now = self
        self.only: dict[str, set[str]] = {}

    def open_only(self, task: str, columns: Sequence[str]) -> None:
        self.only[task] = set(columns)

    async def claim(self, task: str, *arguments: Any, **options: Any) -> Lease:
        lease = await super().claim(task, *arguments, **options)
        only = self.only.get(task)
        if only is None or not len(lease):
            return lease
        assert only <= lease.columns.keys()
        return replace(lease, columns={name: lease.columns[name] for name in only})

    async def write_staged(self, row_ids: Sequence[int], block: PackedBlock, *, overwrite: bool = False) -> None:
        if SharedFake.num_to_lose:
            SharedFake.num_to_lose -= 1
            raise RowsLost("the process that packed them is gone")
        found = Block(block.payload.data)
        await self.write(row_ids, {n: found.cells(n, 0, found.num_rows) for n in found.names}, overwrite=overwrite)

    def rows(self, rows: Sequence[TrainRow]) -> list[TrainRow]:
        """As a process of the learner reads them."""
        return [self._row(row) for row in rows]

    def _row(self, row: TrainRow) -> TrainRow:
        assert isinstance(row, StoredRow)
        cells = _cells_of(self._table.row(row.row_id))
        columns = {name: cells[name] for name in TrainRow.__struct_fields__ if name in cells}
        columns.setdefault("advantages", cells["logprobs"])
        found = TrainRow(**columns)
        assert (found.num_tokens, found.num_trained) == (row.num_tokens, row.num_trained)
        if row.scale is not None:
            found = replace(found, advantages=scaled_advantages(found.advantages, *row.scale))
        return found if row.is_proximal_stored else replace(found, proximal=None)


class ReadingLearner(WatchfulLearner):
    reads_store = True

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        await super().accumulate(SharedFake.now.rows(rows))


async def score_stored(scorer: SimScorer, rows: Sequence[TrainRow], column: str) -> list[PackedScores]:
    data = bytes(Packing({column: await scorer.score(SharedFake.now.rows(rows))}).to_bytes())
    ids = [row.row_id for row in rows if isinstance(row, StoredRow)]
    return [PackedScores(ids, BlockSpec((column,), len(data), Payload(len(data), data)))]


@pytest.fixture
def reading() -> Iterator[None]:
    """Learner and scorers read for themselves."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("support.simulated.StagingStore", SharedFake)
        patched.setattr("support.simulated.WatchfulLearner", ReadingLearner)
        patched.setattr(SimScorer, "reads_store", True, raising=False)
        patched.setattr(SimScorer, "score_stored", score_stored, raising=False)
        yield
    SharedFake.num_to_lose = 0


PLAIN = World(workers=2, steps=5, groups_per_step=4, group_size=3, max_lag=2, failure=0.1, slots=8, keep_gb=0.0)
WORLDS = {
    "plain": PLAIN,
    "in lockstep": replace(PLAIN, max_lag=0),
    "late reference": replace(PLAIN, reference="late"),
    "proximal policy": replace(PLAIN, has_proximal=True, mini_batches=2),
    "critic and reference": replace(PLAIN, has_critic=True, reference="late"),
    "places that stay empty": replace(PLAIN, reference="late", success=0.9, max_replaced_per_step=0),
}


@pytest.mark.parametrize("name", WORLDS)
def test_the_events_are_those_of_a_run_that_hands_over_the_rows(name: str, reading: None) -> None:
    world = WORLDS[name]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("support.simulated.StagingStore", StagingStore)
        patched.setattr("support.simulated.WatchfulLearner", WatchfulLearner)
        patched.setattr(SimScorer, "reads_store", False)
        given = simulate(world)
    read = simulate(world)
    check(world, read)
    assert read.sink.events == given.sink.events
    assert isinstance(read.store, SharedFake) and "tokens" not in read.store.only["train"]


def test_statistics_of_the_whole_batch_need_no_tokens(reading: None) -> None:
    seen: list[list[float]] = []

    class Noting(ReadingLearner):
        async def accumulate(self, rows: Sequence[TrainRow]) -> None:
            seen.append([float(row.advantages[0]) for row in SharedFake.now.rows(rows)])
            await super().accumulate(rows)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("support.simulated.WatchfulLearner", Noting)
        outcome = simulate(PLAIN, over_batch=whiten_tokens)
    assert isinstance(outcome.store, SharedFake) and "tokens" not in outcome.store.only["train"]
    assert any(abs(value) > 0 for some in seen for value in some)


def test_scores_that_were_lost_with_the_process_that_packed_them_are_computed_again(reading: None) -> None:
    world = WORLDS["late reference"]
    whole = simulate(world)
    SharedFake.num_to_lose = 3
    outcome = simulate(world)
    check(world, outcome)
    assert not SharedFake.num_to_lose
    assert len(outcome.sink.of(Span)) == len(whole.sink.of(Span)) + 3


def test_trained_rows_stay_until_a_checkpoint_covers_them_and_are_in_none(reading: None) -> None:
    diary = Diary()
    outcome = simulate(PLAIN, keeper=diary)
    assert not any(kept.standing.rows.steps for kept in diary.kept)
    admitted = [kept.standing.ledger.groups.keys() for kept in diary.kept]
    assert all(
        {row.group_id for row in kept.standing.rows.rows} <= of for kept, of in zip(diary.kept, admitted, strict=True)
    )
    left = {row.group.id for row in outcome.store._table.rows.values()}
    assert len(left) == PLAIN.groups_per_step, "those of the last batch, which no later one frees"


@pytest.mark.parametrize("name", WORLDS)
def test_from_any_checkpoint_nothing_is_lost_or_doubled(name: str, reading: None) -> None:
    for seed in range(3):
        _, outcome = cut_and_resume(WORLDS[name], random.Random(seed))
        check(WORLDS[name], outcome)
