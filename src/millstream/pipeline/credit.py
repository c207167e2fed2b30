"""Between the store's rows and `algo.credit`: what each agent played in each member of a group, and back to a column a row.

Rows come in the order of members and their parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from millstream.algo.advantages import Rewards
from millstream.algo.credit import Credit, Played, Signal
from millstream.errors import InvariantError
from millstream.store import Row
from millstream.types import Floats


def columns_of(rows: Sequence[Row], credit: Credit) -> dict[str, list[Floats]]:
    """Advantages, and returns where there is a critic: one number a token, 0 where it is not trained."""
    found: dict[int, dict[str, Floats]] = {}
    for group in _by_agent(rows).values():
        for parts, own in zip(group, credit([played(parts) for parts in group]), strict=True):
            columns = {"advantages": own.advantages_N} | ({} if own.returns_N is None else {"returns": own.returns_N})
            for name, values_N in columns.items():
                for row, values_T in zip(parts, _spread(values_N, parts), strict=True):
                    found.setdefault(row.row_id, {})[name] = values_T
    names = found[rows[0].row_id]
    return {name: [found[row.row_id][name] for row in rows] for name in names}


def is_any_agent_credited(rows: Sequence[Row], signal: Signal) -> bool:
    """Whether the rewards of some agent have this signal."""
    return any(signal([played(parts) for parts in group]) for group in _by_agent(rows).values())


def _by_agent(rows: Sequence[Row]) -> dict[int, list[list[Row]]]:
    """Agent -> its members -> their parts."""
    found: dict[int, dict[int, list[Row]]] = {}
    for row in rows:
        found.setdefault(row.columns["agent"], {}).setdefault(row.columns["member"], []).append(row)
    return {agent: list(members.values()) for agent, members in sorted(found.items())}


def played(parts: Sequence[Row]) -> Played:
    """Of one agent in one member."""
    rewards_K = np.concatenate([row.columns["turn_rewards"] for row in parts])
    return Played(
        rewards_K=rewards_K,
        turn_N=_turns(parts),
        behaviour_N=_trained(parts, "logprobs"),
        reference_N=_trained(parts, "reference") if "reference" in parts[0].columns else None,
        values_N=_trained(parts, "values") if "values" in parts[0].columns else None,
        rest=float(parts[0].columns["reward"] - rewards_K.sum()),
        part_K=np.repeat(np.arange(len(parts)), [len(row.columns["turn_rewards"]) for row in parts]),
    )


def _turns(parts: Sequence[Row]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    turns, num_turns = [], 0
    for row in parts:
        mask_T = row.columns["loss_mask"]
        begins_T = mask_T & ~np.concatenate([[False], mask_T[:-1]])
        if (count := int(begins_T.sum())) != len(row.columns["turn_rewards"]):
            said = len(row.columns["turn_rewards"])
            raise InvariantError(f"group {row.group_id} has rewards of {said} turns in a row of {count}")
        turns.append((begins_T.cumsum() - 1)[mask_T] + num_turns)
        num_turns += count
    return np.concatenate(turns).astype(np.int64)


def _trained(parts: Sequence[Row], name: str) -> Rewards:
    return np.concatenate([row.columns[name][row.columns["loss_mask"]] for row in parts]).astype(np.float64)


def _spread(values_N: Rewards, parts: Sequence[Row]) -> list[Floats]:
    """Of the trained tokens of all parts -> of all tokens, part by part."""
    masks = [row.columns["loss_mask"] for row in parts]
    spread = []
    for mask_T, own in zip(masks, np.split(values_N, np.cumsum([mask.sum() for mask in masks])[:-1]), strict=True):
        values_T = np.zeros(len(mask_T), np.float32)
        values_T[mask_T] = own
        spread.append(values_T)
    return spread
