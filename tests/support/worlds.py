"""Random worlds for simulated runs, and a run that is cut off at one of its checkpoints and resumed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import assume
from hypothesis import strategies as st
from msgspec.structs import replace

from millstream.errors import MillstreamError
from millstream.events import Event, GroupResumed, RolloutAborted, RolloutEnded, RolloutFailed, RolloutStarted
from millstream.events.sinks import MemorySink
from support.simulated import Diary, Kept, Outcome, World, simulate

worlds = st.builds(
    World,
    steps=st.integers(1, 10),
    groups_per_step=st.integers(1, 4),
    group_size=st.integers(2, 4),
    max_lag=st.sampled_from([0, 0.5, 1, 1.5, 2, 4]),
    num_tasks=st.one_of(st.none(), st.integers(1, 30)),
    num_engines=st.integers(1, 3),
    slots=st.integers(1, 16),
    num_turns=st.integers(1, 3),
    tail=st.floats(0.1, 2.0),
    latency=st.sampled_from([0.0, 1.0]),
    failure=st.sampled_from([0.0, 0.1, 0.3]),
    success=st.sampled_from([0.2, 0.5, 0.9]),
    retries=st.integers(0, 2),
    load=st.sampled_from([0.0, 0.5, 10.0]),
    train_token_s=st.sampled_from([1e-5, 1e-3, 1e-2]),
    max_replaced_per_step=st.sampled_from([None, 0, 2]),
    filter_zero_signal=st.booleans(),
    lockstep=st.booleans(),
    longest_first=st.booleans(),
    overdue=st.sampled_from(["wait", "restart"]),
    max_restarts=st.integers(1, 2),
    extra_members=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)


def with_surplus(world: World, extra_groups: int | None, surplus: str) -> World:
    most = math.floor(world.max_lag * world.groups_per_step)
    if surplus == "carry_over" and extra_groups is not None:
        extra_groups = min(extra_groups, most)
    overdue = "wait" if surplus == "abort" or world.max_lag == 0 else world.overdue
    return replace(world, extra_groups=extra_groups, surplus=surplus, overdue=overdue)


worlds = st.builds(
    with_surplus,
    worlds,
    st.one_of(st.none(), st.integers(0, 8)),
    st.sampled_from(["carry_over", "carry_over", "abort"]),
)

MEMBER_EVENTS = (RolloutStarted, RolloutEnded, RolloutFailed, RolloutAborted)


def history(first: list[Event], second: list[Event]) -> MemorySink:
    """What counts: the events that the checkpoint covers, without the work that is done again, and those after it."""
    to_do = {(e.group_id, member) for e in second if isinstance(e, GroupResumed) for member in e.to_do}
    sink = MemorySink()
    sink.events = [e for e in first if not (isinstance(e, MEMBER_EVENTS) and (e.group_id, e.member) in to_do)] + second
    return sink


def cut_and_resume(world: World, cut: random.Random) -> tuple[Kept, Outcome]:
    diary = Diary()
    whole = simulate(world, keeper=diary)
    kept = cut.choice(diary.kept)
    outcome = simulate(world, kept=kept)
    sink = history(whole.sink.events[: kept.mark], outcome.sink.events)
    return kept, Outcome(**{**{f: getattr(outcome, f) for f in outcome.__struct_fields__}, "sink": sink})


@contextmanager
def unless_all_fail(world: World) -> Iterator[None]:
    """The one lawful end of a run before its last step: a whole batch of groups failed, one after the other. Such an example is
    left out."""
    try:
        yield
    except MillstreamError as error:
        assert world.failure > 0 and "in a row failed" in str(error), error
        assume(False)
