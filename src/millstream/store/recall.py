"""The books as one record, and back: what a journal begins with when it is written anew."""

from __future__ import annotations

from collections.abc import Mapping

from millstream.store.entries import Block, GroupEntry, RowEntry, Unit
from millstream.store.journal import BlockState, Grant, GroupState, LeaseState, PartitionState, RowState, State
from millstream.store.pool import Pool
from millstream.store.table import Partition, RowTable
from millstream.store.wire import Lost


def state_of(
    catalog: RowTable, numbers: Mapping[int, int], results: dict[str, dict[int, bytes]], lost: list[Lost]
) -> State:
    """`numbers`: the request of its holder that each lease was given for."""
    blocks = {
        block.id: block for part in catalog.partitions.values() for row in part.rows.values() for block, _ in row.parts
    }
    return State(
        partitions=[_partition(name, part) for name, part in catalog.partitions.items()],
        blocks=[BlockState(block.id, sorted(block.columns), block.payload) for block in blocks.values()],
        leases=[
            LeaseState(
                lease.holder,
                numbers.get(lease.id, 0),
                Grant(lease.id, lease.task.name, [unit.id for unit in lease.units], lease.partition, lease.want),
            )
            for lease in catalog.leases.values()
        ],
        counters=catalog.counters,
        totals=(catalog.rows_put, catalog.rows_claimed, catalog.rows_freed),
        results=results,
        lost=lost,
    )


def _partition(name: str, part: Partition) -> PartitionState:
    return PartitionState(
        name=name,
        groups=[GroupState(g.id, g.is_closed, g.leased, g.done) for g in part.groups.values()],
        rows=[
            RowState(
                row.id,
                row.group.id,
                row.version,
                row.tokens,
                row.since,
                row.leased,
                row.done,
                list(row.steps),
                [(block.id, index) for block, index in row.parts],
            )
            for row in part.rows.values()
        ],
        covered=part.covered,
        is_finished=part.is_finished,
        turns={task: [unit.id for unit in ready.in_order(None)] for task, ready in part.ready.items()},
        ranks={task: ready.tokens_of_rank for task, ready in part.ready.items() if ready.tokens_of_rank},
    )


def load_state(state: State, catalog: RowTable, pool: Pool) -> None:
    """Into empty books."""
    blocks = {}
    for saved in state.blocks:
        segment = saved.payload.segment
        nbytes = saved.payload.nbytes if segment is None else segment.size
        blocks[saved.id] = Block(saved.id, saved.columns, saved.payload, nbytes, 0)
        if segment is not None:
            pool.adopt(segment)
    for partition in state.partitions:
        _load_partition(partition, catalog, blocks)
    catalog.num_bytes = sum(block.nbytes for block in blocks.values())
    catalog.counters = state.counters
    catalog.rows_put, catalog.rows_claimed, catalog.rows_freed = state.totals
    for lease in state.leases:
        grant, task = lease.grant, catalog.task(lease.grant.task)
        part = catalog.partition(grant.partition)
        found: Mapping[int, Unit] = part.groups if task.reads.by_group else part.rows
        catalog.hold(
            grant.lease_id, task, [found[unit] for unit in grant.units], grant.partition, lease.holder, grant.want
        )
    catalog.rebuild()
    for partition in state.partitions:
        for name, ready in catalog.partition(partition.name).ready.items():
            ready.reorder(partition.turns[name])
            ready.tokens_of_rank = partition.ranks.get(name, {})


def _load_partition(saved: PartitionState, catalog: RowTable, blocks: Mapping[int, Block]) -> None:
    part = catalog.partition(saved.name)
    part.covered = saved.covered
    part.is_finished = saved.is_finished
    for one in saved.groups:
        group = part.groups[one.id] = GroupEntry(one.id)
        group.is_closed = one.is_closed
        group.leased = one.leased
        group.done = one.done
    for row in saved.rows:
        parts = tuple((blocks[block_id], index) for block_id, index in row.parts)
        entry = RowEntry(row.id, part.groups[row.group], row.version, row.tokens, row.since, 0, parts[0])
        entry.parts = parts
        entry.leased = row.leased
        entry.done = row.done
        entry.steps = tuple(row.steps)
        catalog.adopt(saved.name, entry)
