"""The published figures where training takes time: small versions of the rows of `bench/published.py`.
Virtual time is exact, so that every figure is the same on every machine. The bands are around what the small versions give."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from millstream.sim.draws import uniform
from published import Gains, ablation, measure, rlvr
from published_sides import Environments, by_environments, by_pipeline
from published_worlds import ALFWORLD, BASE, THINK, Lengths, Split, agents, without_training


def gains_of(found: Gains) -> tuple[float, float]:
    """Of the paper's policy, and of ours."""
    assert found.paper is not None
    return found.theirs / found.paper, found.theirs / found.ours


@pytest.mark.parametrize("lengths", [BASE, THINK], ids=lambda lengths: lengths.name)
def test_asynchronous_training_gains_on_many_gpus_and_ours_gains_more_than_the_papers_policy(lengths: Lengths) -> None:
    paper, ours = gains_of(measure(rlvr(lengths, 128, share=32), 1))
    assert 1.2 < paper < ours < 3.0


def test_streaming_gains_over_one_task_after_the_other_and_an_asynchronous_workflow_gains_more() -> None:
    streaming, both = (gains_of(measure(case, 1)) for case in ablation(share=32))
    for before, after in zip(streaming, both, strict=True):
        assert 1.0 < before < after < 3.5
    assert both[1] > both[0], "ours is faster than the paper's workflow"


def test_redundant_environments_shorten_a_step_in_both_directions_of_the_grid_and_ours_as_much_as_theirs() -> None:
    whole = without_training(agents(ALFWORLD, Split(8, 8)))
    world = replace(whole, groups=4, members=4, num_turns=uniform(3, 10), replicas=2)
    seconds = []
    for groups, members in ((4, 4), (4, 5), (5, 4)):
        theirs = by_environments(world, Environments(groups=groups, members=members), 0, window=2)
        extra = {"extra_groups": groups - 4, "extra_members": members - 4}
        ours = by_pipeline(world, 0, window=2, surplus="abort", **extra)
        assert ours == pytest.approx(theirs, rel=0.05)
        seconds.append(theirs)
    assert max(seconds) == seconds[0]
