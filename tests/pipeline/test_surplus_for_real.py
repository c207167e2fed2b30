"""Aborts and restarts with the real engine and learner, and SIGKILL in the middle of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.events import GroupRestarted, RolloutAborted
from millstream.events.sinks import read_history
from support.runs import assert_clean, kill_at, resume

SMALL: dict[str, object] = {
    "model.tiny.hidden": 32,
    "model.tiny.layers": 1,
    "pipeline.steps": 16,
    "rollout.max_tokens": 48,
    "evaluation.at_start": "false",
    "evaluation.at_end": "false",
}
"""Long rollouts of a small model: a step takes long enough to be killed in."""
FIRST_TO_FINISH = {**SMALL, "pipeline.surplus": '"abort"', "pipeline.extra_groups": 6, "rollout.extra_members": 2}
BEGIN_ANEW = {**SMALL, "pipeline.overdue": '"restart"'}


@pytest.mark.parametrize(
    "changes",
    [
        FIRST_TO_FINISH,
        pytest.param({**FIRST_TO_FINISH, "pipeline.max_lag": 0}, marks=pytest.mark.slow),
        BEGIN_ANEW,
    ],
)
def test_a_run_that_aborts_is_killed_goes_on_and_its_books_are_in_order(
    changes: dict[str, object], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    kill_at(run_dir, 5, changes)
    assert_clean(run_dir)
    done = resume(run_dir)
    assert done.returncode == 0, done.stderr
    assert_clean(run_dir)
    events = list(read_history(run_dir / "events.jsonl"))
    aborted = [event for event in events if isinstance(event, RolloutAborted)]
    if changes is not BEGIN_ANEW:
        assert len(aborted) > 16, "nothing was over"
        assert any(event.num_sampled > 0 for event in aborted), "the engine did not say how far they had come"
    else:
        assert len(aborted) >= sum(isinstance(event, GroupRestarted) for event in events)
