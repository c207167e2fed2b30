"""The rows of one group, by member and by agent. Everything here is in the order of members and parts, not of arrival."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from millstream.algo.advantages import Rewards
from millstream.store import Lease, Row
from millstream.types import Tokens


class AgentRewards(NamedTuple):
    """What one agent earned in each member of a group; in a rollout of one agent, what the rollout earned."""

    agent: int
    members: list[int]
    rewards_G: Rewards


def by_member(lease: Lease) -> list[Row]:
    return sorted(lease.rows, key=lambda row: (row.columns["member"], row.columns["part"]))


def row_order(lease: Lease) -> list[int]:
    """The same order, as indices into the columns."""
    if not lease.row_ids:
        return []
    members, parts = lease["member"], lease["part"]
    return sorted(range(len(members)), key=lambda index: (members[index], parts[index]))


def by_agent(lease: Lease) -> list[AgentRewards]:
    earned: dict[int, dict[int, float]] = {}
    for index in row_order(lease):
        earned.setdefault(lease["agent"][index], {})[lease["member"][index]] = lease["reward"][index]
    return [
        AgentRewards(agent, list(of), np.array(list(of.values()), dtype=np.float64))
        for agent, of in sorted(earned.items())
    ]


def rewards_of(lease: Lease) -> Rewards:
    """The reward of each member: that of its first part."""
    first: dict[int, float] = {}
    for index in row_order(lease):
        first.setdefault(lease["member"][index], lease["reward"][index])
    return np.array(list(first.values()), dtype=np.float64)


def sampled_by_member(lease: Lease) -> list[Tokens]:
    """The tokens that each member sampled, in all of its parts."""
    parts = dict[int, list[Tokens]]()
    for row in by_member(lease):
        parts.setdefault(row.columns["member"], []).append(row.columns["tokens"][row.columns["loss_mask"]])
    return [np.concatenate(of) for of in parts.values()]


def members_of(lease: Lease) -> list[int]:
    return sorted(set(lease["member"])) if lease.row_ids else []
