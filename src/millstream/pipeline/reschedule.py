"""What a resume with changed settings takes over of the groups in flight.

All settings are in force from the resumed version on. A group keeps its id, its start and its deadline, unless a lower
`max_lag` makes that earlier. Two rules, by what was changed:

    rollouts     a settled group keeps its rollouts, log-probabilities and scores; one that is not settled is rolled out again
                 as a whole, so that no group compares rollouts of two temperatures or two rewards
    schedule     groups stay in the order of their deadlines and ids, as long as the batches have room for them in time; the
                 others are superseded: they leave, and their prompts are fed again before any new one. A run that is in
                 lockstep from here on begins with nothing in flight

Which groups are superseded depends on starts and ids alone, not on how far their rollouts are.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from msgspec.structs import replace

from millstream.pipeline.admission import Admission, Place
from millstream.pipeline.schema import REFERENCE, SETTLE, VALUES
from millstream.pipeline.state import Ledger, PipelineState
from millstream.store import Saved

ROW_TASKS = (REFERENCE, VALUES)  # the others read whole groups; so do these in lockstep, where nothing is in flight


class Changed(NamedTuple):
    """What the settings of a resumed run change for the groups in flight."""

    rollouts: bool = False
    schedule: bool = False


UNCHANGED = Changed()


class TakenOver(NamedTuple):
    """A state that fits the new settings, and the groups that left it: those of them that had no fate yet."""

    state: PipelineState
    superseded: list[int]


def take_over(state: PipelineState, changed: Changed, admission: Admission, num_members: int) -> TakenOver:
    """`admission`: by the new settings. `num_members`: rollouts that a group starts by them."""
    if changed.rollouts:
        state = _rolled_out_again(state, num_members)
    return _rescheduled(state, admission) if changed.schedule else TakenOver(state, [])


def _rolled_out_again(state: PipelineState, num_members: int) -> PipelineState:
    ledger, rows = state
    again = ledger.groups.keys() - set(rows.acknowledged.get(SETTLE, ()))
    groups = {
        group_id: replace(group, kept=[], to_do=list(range(num_members))) if group_id in again else group
        for group_id, group in ledger.groups.items()
    }
    return PipelineState(replace(ledger, groups=groups), _without(rows, again))


def _rescheduled(state: PipelineState, admission: Admission) -> TakenOver:
    ledger, rows = state
    places = {
        group_id: Place(group.start, min(group.deadline, group.start + admission.bound))
        for group_id, group in ledger.groups.items()
    }
    gone = admission.beyond_reach(ledger.version, places)
    superseded = sorted(gone - set(ledger.vacant))  # the fate of a group whose place was to stay empty is recorded
    kept = {
        group_id: replace(group, deadline=places[group_id].deadline)
        for group_id, group in ledger.groups.items()
        if group_id not in gone
    }
    prompts = [ledger.groups[group_id].prompt_of(group_id) for group_id in superseded]
    ledger = Ledger(
        version=ledger.version,
        next_group=ledger.next_group,
        groups=kept,
        vacant=[group_id for group_id in ledger.vacant if group_id in kept],
        num_replaced=ledger.num_replaced,
        num_failed_in_a_row=ledger.num_failed_in_a_row,
        next_prompt=ledger.next_prompt,
        to_feed=sorted([*ledger.to_feed, *prompts]),
    )
    return TakenOver(PipelineState(ledger, _without(rows, gone)), superseded)


def _without(saved: Saved, groups: Collection[int]) -> Saved:
    """The snapshot without the rows of these groups."""
    gone = {row.row_id for row in saved.rows if row.group_id in groups}
    return replace(
        saved,
        rows=tuple(row for row in saved.rows if row.group_id not in groups),
        is_closed={group_id: closed for group_id, closed in saved.is_closed.items() if group_id not in groups},
        acknowledged={
            task: tuple(one for one in ids if one not in (gone if task in ROW_TASKS else groups))
            for task, ids in saved.acknowledged.items()
        },
        versions={row: version for row, version in saved.versions.items() if row not in gone},
        tokens={row: num for row, num in saved.tokens.items() if row not in gone},
        steps={row: steps for row, steps in saved.steps.items() if row not in gone},
    )
