"""Any sequence of operations: the store does what the model does, whichever store, and whoever is killed in between."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millstream.clock import VirtualClock, run_virtual
from millstream.errors import StoreError, StoreTimeout, StreamEnded
from millstream.store import Lease, Saved, Store, Want
from millstream.store.host import ShardedStore, SharedStore, make_plan
from millstream.store.memory import MemoryStore
from millstream.store.sharded import ShardedClient, shard_of
from support.examples import examples
from support.store_load import ForkedStore
from support.store_model import GROUP_TASKS, TASKS, Model, Refused, Row

T = TypeVar("T")
groups = st.integers(0, 4)
names = st.sampled_from(("left", "left", "left", "right"))
tasks = st.sampled_from(sorted(TASKS))
steps = st.integers(0, 4)
pick = st.integers(0, 200)
limits = st.one_of(st.none(), st.integers(1, 6))


class StoreMachine(RuleBasedStateMachine):
    """The rules. What is asked for is drawn first, and may be impossible: then the store is to refuse it, and not to change."""

    store: Store

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.leases: dict[int, Lease] = {}
        self.values = count()
        self.base = (0, 0, 0)
        self.prefix = ""

    def run(self, program: Coroutine[Any, Any, T]) -> T:
        raise NotImplementedError

    def agree(self, expected: Callable[[], T], program: Coroutine[Any, Any, T]) -> None:
        """The model and the store give the same answer, or both refuse."""
        try:
            answer = expected()
        except Refused:
            with pytest.raises(StoreError):
                self.run(program)
        else:
            assert self.run(program) == answer
        self.model.settle()

    def partition(self, name: str) -> str:
        return self.prefix + name

    def some_row(self, number: int) -> int:
        """One that is there, or was, or never has been."""
        given = sorted(self.model.given)
        alive = [row_id for part in self.model.parts.values() for row_id in part.rows]
        if alive and number % 10:
            return alive[number % len(alive)]
        return given[number % len(given)] if given and number % 20 else 10**6 + number

    def some_lease(self, number: int) -> Lease | None:
        alive = sorted(self.model.leases)
        numbers = alive if alive and number % 8 else sorted(self.leases)
        return self.leases[numbers[number % len(numbers)]] if numbers else None

    @rule(name=names, rows=st.lists(st.tuples(groups, st.integers(-1, 4), st.integers(0, 5)), min_size=1, max_size=4))
    def put(self, name: str, rows: list[tuple[int, int, int]]) -> None:
        self._put(name, rows, has_score=len(rows) % 2 == 0)

    @rule(name=names, group_id=groups, rows=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=3))
    def put_group(self, name: str, group_id: int, rows: list[tuple[int, int]]) -> None:
        """A whole one, that every task can have; or an empty one."""
        if rows:
            self._put(name, [(group_id, version, tokens) for version, tokens in rows], has_score=True)
        self.close(name, [group_id])

    def _put(self, name: str, rows: list[tuple[int, int, int]], *, has_score: bool) -> None:
        partition, group_ids = self.partition(name), [group_id for group_id, _, _ in rows]
        columns: dict[str, list[Any]] = {"value": [next(self.values) for _ in rows]}
        if has_score:
            columns["score"] = [f"{value}" for value in columns["value"]]
        program = self.store.put(
            group_ids,
            columns,
            versions=[version for _, version, _ in rows],
            tokens=[tokens for _, _, tokens in rows],
            partition=partition,
        )
        try:
            self.model.check_put(partition, group_ids)
        except Refused:
            with pytest.raises(StoreError):
                self.run(program)
            return
        cells = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        ids = self.run(program)
        found = [Row(g, v, t, cell) for (g, v, t), cell in zip(rows, cells, strict=True)]
        self.model.put(partition, ids, found)
        self.model.settle()

    @rule(
        numbers=st.lists(pick, min_size=1, max_size=4),
        column=st.sampled_from(("score", "score", "value")),
        over=st.booleans(),
    )
    def write(self, numbers: list[int], column: str, over: bool) -> None:
        ids = [self.some_row(number) for number in numbers]
        cells = [next(self.values) for _ in ids]
        self.agree(
            lambda: self.model.write(ids, column, cells, overwrite=over),
            self.store.write(ids, {column: cells}, overwrite=over),
        )

    @rule(name=names, group_ids=st.lists(groups, min_size=1, max_size=3))
    def close_some(self, name: str, group_ids: list[int]) -> None:
        self.close(name, group_ids)

    def close(self, name: str, group_ids: list[int]) -> None:
        partition = self.partition(name)
        self.agree(
            lambda: self.model.close(partition, group_ids), self.store.close_groups(group_ids, partition=partition)
        )

    @rule(
        name=names,
        task=tasks,
        amounts=st.tuples(limits, limits, limits),
        policy=st.sampled_from(("fifo", "fifo", "oldest_version")),
        window=st.one_of(st.none(), st.none(), st.tuples(st.integers(-1, 4), st.integers(0, 4))),
        is_patient=st.booleans(),
    )
    def claim(
        self,
        name: str,
        task: str,
        amounts: tuple[int | None, int | None, int | None],
        policy: str,
        window: tuple[int, int] | None,
        is_patient: bool,
    ) -> None:
        rows, tokens, some = amounts
        if rows is None and tokens is None and (some is None or task not in GROUP_TASKS):
            rows = 1
        patience = None if is_patient else 0.0
        want = Want(
            rows=rows,
            tokens=tokens,
            groups=some,
            policy=policy,
            versions=window,
            patience_s=patience,
            deadline_s=0.01,
        )
        self._claim(self.partition(name), task, want)

    @rule(name=names, task=tasks, is_patient=st.booleans())
    def claim_all(self, name: str, task: str, is_patient: bool) -> None:
        patience = None if is_patient else 0.0
        self._claim(self.partition(name), task, Want(rows=100, patience_s=patience, deadline_s=0.01))

    @rule(name=names, task=tasks, rows=st.integers(1, 4), step=st.one_of(st.none(), steps, steps))
    def work(self, name: str, task: str, rows: int, step: int | None) -> None:
        """Claim some, and be done with them at once."""
        want = Want(rows=rows, patience_s=0.0, deadline_s=0.01)
        if lease := self._claim(self.partition(name), task, want):
            self.agree(lambda: self.model.acknowledge(lease.lease_id, step), self.store.acknowledge(lease, step=step))

    def _claim(self, partition: str, task: str, want: Want) -> Lease | None:
        program = self.store.claim(task, want, partition=partition)
        expected = self.model.expects(partition, task, want)
        if expected != "rows":
            with pytest.raises(StreamEnded if expected == "end" else StoreTimeout):
                self.run(program)
            return None
        lease = self.run(program)
        self.model.claim(partition, task, want, lease)
        self.leases[lease.lease_id] = lease
        self.model.settle()
        return lease

    @rule(number=pick, step=st.one_of(st.none(), steps))
    def acknowledge(self, number: int, step: int | None) -> None:
        if lease := self.some_lease(number):
            self.agree(lambda: self.model.acknowledge(lease.lease_id, step), self.store.acknowledge(lease, step=step))

    @rule(number=pick)
    def give_back(self, number: int) -> None:
        if lease := self.some_lease(number):
            self.agree(lambda: self.model.give_back(lease.lease_id), self.store.give_back(lease))

    @rule(number=pick)
    def drop(self, number: int) -> None:
        if lease := self.some_lease(number):
            self.agree(lambda: self.model.drop(lease.lease_id), self.store.drop(lease))

    @rule(name=names, step=steps)
    def cover(self, name: str, step: int) -> None:
        partition = self.partition(name)
        self.agree(lambda: self.model.cover(partition, step), self.store.cover(step, partition=partition))

    @rule(name=names, task=tasks, step=st.integers(-1, 2))
    def rewind(self, name: str, task: str, step: int) -> None:
        partition = self.partition(name)
        self.agree(lambda: self.model.rewind(partition, task, step), self.store.rewind(task, step, partition=partition))

    @rule(name=names, kind=st.sampled_from(("finish", "drop", "restore", "begin anew")))
    def turn(self, name: str, kind: str) -> None:
        """What ends something: seldom, so that something has begun."""
        partition = self.partition(name)
        match kind:
            case "finish":
                self.model.part(partition).is_finished = True
                self.agree(lambda: None, self.store.finish(partition=partition))
            case "drop":
                self.agree(lambda: self.model.drop_partition(partition), self.store.drop_partition(partition))
            case "restore":
                self.restore_over(partition)
            case "begin anew":
                self.begin_anew()

    def restore_over(self, partition: str) -> None:
        """A snapshot is taken, the partition goes, and comes back."""
        saved = self.run(self.store.snapshot(partition=partition))
        if saved.is_closed:
            with pytest.raises(StoreError, match="empty"):
                self.run(self.store.restore(saved, partition=partition))
        self.model.freed_rows += self.run(self.store.drop_partition(partition))
        self.run(self.store.restore(saved, partition=partition))
        self.model.forget_leases(partition)
        self.model.settle()

    def begin_anew(self) -> None:
        """Another process takes over, by whatever means the store has."""

    @invariant()
    def the_store_says_what_the_model_says(self) -> None:
        self.model.check_stats(self.run(self.store.stats()), self.base)
        for name in list(self.model.parts):
            self.model.check_saved(name, self.run(self.store.snapshot(partition=name)))

    def drain(self) -> None:
        """Whatever has happened, the rest can be worked off: nothing is stuck."""
        for partition, part in list(self.model.parts.items()):
            for lease_id in [number for number, held in self.model.leases.items() if held.partition == partition]:
                self.agree(lambda: self.model.give_back(lease_id), self.store.give_back(self.leases[lease_id]))
            open_groups = [group_id for group_id, group in part.groups.items() if not group.is_closed]
            self.agree(
                lambda: self.model.close(partition, open_groups),
                self.store.close_groups(open_groups, partition=partition),
            )
            missing = [row_id for row_id, row in part.rows.items() if "score" not in row.cells]
            if missing:
                self.agree(
                    lambda: self.model.write(missing, "score", missing, overwrite=False),
                    self.store.write(missing, {"score": missing}),
                )
            for task in ("score", "train", "watch", "audit"):
                while part.since[task]:
                    want = Want(rows=3, patience_s=0.0, deadline_s=0.01)
                    lease = self.run(self.store.claim(task, want, partition=partition))
                    self.model.claim(partition, task, want, lease)
                    self.agree(lambda: self.model.acknowledge(lease.lease_id, None), self.store.acknowledge(lease))
            self.agree(lambda: self.model.cover(partition, 9), self.store.cover(9, partition=partition))
            assert not part.rows and not part.groups
            self.the_store_says_what_the_model_says()

    def teardown(self) -> None:
        self.drain()


class MemoryMachine(StoreMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore(TASKS, clock=VirtualClock())

    def run(self, program: Coroutine[Any, Any, T]) -> T:
        return run_virtual(program)

    def begin_anew(self) -> None:
        """Another process takes the snapshots."""
        partitions = map(self.partition, ("left", "right"))
        saved: dict[str, Saved] = {name: self.run(self.store.snapshot(partition=name)) for name in partitions}
        self.store = MemoryStore(TASKS, clock=VirtualClock())
        for name, some in saved.items():
            self.run(self.store.restore(some, partition=name))
            self.model.forget_leases(name)
        self.model.put_rows = self.model.claimed_rows = self.model.freed_rows = 0
        self.leases.clear()
        self.model.settle()


class ShortJournal(ForkedStore):
    """Its journal is written anew all the time: what comes after a death is read from a state, and from changes to it."""

    program = (
        "-c",
        "import sys; from pathlib import Path; from millstream.store import host, journal;"
        "journal.MIN_BYTES = 1000; host.coordinator_main(Path(sys.argv[1]))",
    )


class Running:
    """One coordinator for all examples, and a loop that its client lives on."""

    def __init__(self, kind: type[SharedStore]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.loop = asyncio.new_event_loop()
        self.shared = kind(make_plan(TASKS, folder=Path(self._folder.name), disconnect_s=20.0))
        self.client = self.loop.run_until_complete(self.shared.connect("the model"))
        self.num_examples = 0

    def close(self) -> None:
        self.loop.run_until_complete(self.client.close())
        self.loop.close()
        self.shared.close()
        self._folder.cleanup()


running: dict[type[SharedStore], Running] = {}


def teardown_module() -> None:
    while running:
        running.popitem()[1].close()


class SharedMachine(StoreMachine):
    kind: type[SharedStore] = ForkedStore

    def __init__(self) -> None:
        super().__init__()
        if self.kind not in running:
            running[self.kind] = Running(self.kind)
        self.running = running[self.kind]
        self.store = self.running.client
        self.running.num_examples += 1
        self.prefix = f"{self.running.num_examples} "
        self.num_kills = 0

    def run(self, program: Coroutine[Any, Any, T]) -> T:
        return self.running.loop.run_until_complete(asyncio.wait_for(program, 30))

    @initialize()
    def begin(self) -> None:
        stats = self.run(self.store.stats())
        self.base = (stats.rows_put, stats.rows_claimed, stats.rows_freed)

    @precondition(lambda self: self.num_kills < 3)
    @rule()
    def begin_anew(self) -> None:
        """The coordinator is killed, and comes back by itself: nothing has changed."""
        self.num_kills += 1
        self.running.shared.process.kill()

    def teardown(self) -> None:
        try:
            self.drain()
        finally:
            for name in ("left", "right"):
                self.run(self.store.drop_partition(self.partition(name)))


class ShortJournalMachine(SharedMachine):
    kind = ShortJournal


class Sharded(Running):
    """Two coordinators."""

    def __init__(self) -> None:
        super().__init__(ForkedStore)
        self._second = tempfile.TemporaryDirectory()
        plan = make_plan(TASKS, folder=Path(self._second.name), disconnect_s=20.0, shard=1)
        self.shards = [self.shared, ForkedStore(plan)]
        clients = [self.client, self.loop.run_until_complete(self.shards[1].connect("the model"))]
        self.client = ShardedClient(clients)  # type: ignore[assignment, arg-type]

    def close(self) -> None:
        super().close()
        self.shards[1].close()
        self._second.cleanup()


class ShardedMachine(SharedMachine):
    """The partitions of an example are in one coordinator, since a write is: of every other example in the same."""

    kind = ShardedStore  # type: ignore[assignment]

    def __init__(self) -> None:
        if self.kind not in running:
            running[self.kind] = Sharded()
        super().__init__()
        self.shard = self.running.num_examples % 2
        names = (f"{self.running.num_examples} {number} " for number in count())
        self.prefix = next(
            name for name in names if all(shard_of(name + side, 2) == self.shard for side in ("left", "right"))
        )

    @precondition(lambda self: self.num_kills < 3)
    @rule()
    def begin_anew(self) -> None:
        self.num_kills += 1
        assert isinstance(self.running, Sharded)
        self.running.shards[self.shard].process.kill()


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(examples(50, of=100), stateful_step_count=60)
TestShared = SharedMachine.TestCase
TestShared.settings = settings(max_examples=6, stateful_step_count=80)
TestSharded = ShardedMachine.TestCase
TestSharded.settings = settings(max_examples=4, stateful_step_count=60)
TestShortJournal = ShortJournalMachine.TestCase
TestShortJournal.settings = settings(max_examples=5, stateful_step_count=80)


@pytest.mark.parametrize("kind", [ForkedStore, ShortJournal])
def test_whose_turn_it_is_does_not_change_when_the_coordinator_is_killed(kind: type[SharedStore]) -> None:
    here = Running(kind)
    store = here.client

    async def program() -> None:
        ids = await store.put(0, {"value": list(range(6))})
        first, second = await store.claim("score", Want(rows=2)), await store.claim("score", Want(rows=2))
        await store.give_back(first)
        await store.give_back(second)
        for number in range(20):  # so that a short journal is written anew
            await store.write(ids, {"pad": [f"{number}" * 20] * 6}, overwrite=True)
        here.shared.process.kill()
        assert (await store.claim("score", Want(rows=6)))["value"] == [2, 3, 0, 1, 4, 5]

    try:
        here.loop.run_until_complete(program())
    finally:
        here.close()
