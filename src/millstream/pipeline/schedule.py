"""The `[pipeline]` table: how much is in flight, and what becomes of slow groups. What is biased against them says so."""

from __future__ import annotations

import math
from typing import Any, Literal

from msgspec import Struct

from millstream import imports
from millstream.pipeline.admission import full_budget


class PipelineConfig(Struct, frozen=True, kw_only=True):
    steps: int = 100
    """Batches of reinforcement learning. 0: none; what the `[warmup]` table says is all the training there is."""
    groups_per_step: int = 16  # groups of a batch; rollout.group_size rollouts each
    max_lag: float = 1.0
    """The asynchronous ratio: how many versions old a rollout's start may be when it is trained. 0 is synchronous."""
    auto_lag: bool = False
    """Use as little of max_lag as training needs, and say so: the lag is raised while the learner waits and engines have room,
    and lowered where it buys nothing (`pipeline.auto_lag`)."""
    longest_first: bool = False
    """Of the requests with one deadline, start those first whose prompt had the longest rollouts before, and spread them by
    their expected lengths (`pipeline.lengths`). Not in lockstep."""
    lockstep: bool = True
    """With max_lag = 0: let decode batches depend on ids alone, so that a run repeats bit for bit. Every turn then waits for
    all others; without it, every rollout continues on its own."""
    extra_groups: int | None = None
    """Groups in flight beyond those of one batch. None: as many as the lag allows, floor(max_lag * groups_per_step). Fewer
    leave room to pass a straggler, which is then trained in a later batch."""
    surplus: Literal["carry_over", "abort"] = "carry_over"
    """What becomes of groups that a batch does not need. "carry_over": a later batch trains them. "abort": first to finish;
    groups that could not be trained in time any more are aborted, and extra_groups may be any number. Faster, and biased
    against slow rollouts."""
    overdue: Literal["wait", "restart"] = "wait"
    """When a batch lacks only groups that are not complete: wait for them, or restart them and take others instead, which is
    biased against slow rollouts."""
    max_restarts: int = 1
    """How often one group may be restarted."""
    filter_zero_signal: bool = True
    """Replace groups whose rewards are all equal: they have no gradient."""
    filter: str = ""
    """A function of your own that decides which finished groups are trained: file.py:name (docs/parts.md). Others are replaced,
    as groups without a signal are. Empty: there is none."""
    filter_args: dict[str, Any] = {}
    """Keyword arguments of the filter."""
    max_replaced_per_step: int | None = None
    """Groups a step may replace before places stay empty. None: 8 * groups_per_step."""
    stall_s: float = 30.0
    """A wait this long is reported."""
    deadline_s: float = 1800.0
    """A wait for an engine or the learner this long ends the run with an error that names it."""
    rollouts_only: bool = False
    """Generate, score and keep rollouts, and train nothing: every version has the weights of the start."""

    def __post_init__(self) -> None:
        for key, least in (("steps", 0), ("groups_per_step", 1), ("max_lag", 0)):
            if not least <= (value := getattr(self, key)) < math.inf:
                raise ValueError(f"{key} = {value}: expected a finite number of at least {least}")
        if self.extra_groups is not None and self.extra_groups < 0:
            raise ValueError("extra_groups must be at least 0")
        most = full_budget(self.groups_per_step, self.max_lag) - self.groups_per_step
        if self.surplus == "carry_over" and self.extra_groups is not None and self.extra_groups > most:
            raise ValueError(
                f"extra_groups = {self.extra_groups} cannot all be trained within max_lag = {self.max_lag:g}, which allows "
                f"{most}: "
                'set max_lag higher, or surplus = "abort" (first to finish: biased against slow rollouts)'
            )
        if self.overdue == "restart" and (self.is_first_to_finish or self.max_lag == 0):
            raise ValueError(
                'overdue = "restart" has nothing to do here: with surplus = "abort" what is overdue is aborted, and with '
                'max_lag = 0 no other group could take its place. Set overdue = "wait"'
            )
        if self.auto_lag and (self.max_lag == 0 or self.extra_groups is not None or self.is_first_to_finish):
            raise ValueError(
                "auto_lag chooses the groups in flight within max_lag: it needs a max_lag above 0, the highest that you allow, "
                'and goes neither with extra_groups nor with surplus = "abort"'
            )
        if self.max_restarts < 1:
            raise ValueError('max_restarts must be at least 1; overdue = "wait" restarts nothing')
        if self.filter and not imports.is_part("filter", self.filter):
            raise ValueError(imports.unknown_part("filter", self.filter))
        if self.filter_args and not self.filter:
            raise ValueError("filter_args are of pipeline.filter, which is not set: leave them out")
        if self.stall_s <= 0 or self.deadline_s <= 0:
            raise ValueError("stall_s and deadline_s must be above 0")

    @property
    def most_groups(self) -> int:
        """In flight."""
        full = full_budget(self.groups_per_step, self.max_lag)
        return full if self.extra_groups is None else self.groups_per_step + self.extra_groups

    @property
    def max_replaced(self) -> int:
        """Groups that a step may replace."""
        replaced = self.max_replaced_per_step
        return 8 * self.groups_per_step if replaced is None else replaced

    @property
    def is_first_to_finish(self) -> bool:
        return self.surplus == "abort"

    @property
    def is_in_lockstep(self) -> bool:
        return self.max_lag == 0 and self.lockstep and not self.is_first_to_finish
