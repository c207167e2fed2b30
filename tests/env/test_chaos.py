"""Steps that raise, hang, kill their process and return garbage: the run finishes, every prompt has its fate, nothing is biased."""

from __future__ import annotations

from pathlib import Path

import pytest

import chaos


def test_a_run_in_chaos_finishes_with_every_prompts_fate_and_without_a_bias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For real: episodes in processes of their own, which are killed and replaced."""
    found = chaos.run(tmp_path / "run", steps=6, groups=3)
    assert found["steps"] == 6
    assert found["findings"] == []
    assert not found["is_biased"], found["tests"]
    assert found["failures"].keys() <= {"raised", "hung, killed", "killed itself", "garbage"}, (
        "a failure by another name"
    )
    assert found["failures"].keys() >= {"raised", "hung, killed"}
