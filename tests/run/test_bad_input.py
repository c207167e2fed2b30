"""Real runs on bad input: what is not finite, empty, alone, all the same or too long costs what it must, and the run says so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from millstream import RunConfig, train
from millstream.audit import audit
from millstream.config import load
from millstream.errors import LearnerError
from millstream.events import GroupLeft, Stepped
from millstream.events.sinks import read_events
from millstream.objective import LossInputs, TokenLoss
from millstream.types import Fate

ROOT = Path(__file__).parents[2]
SMALL = {
    "model.tiny.layers": 1,
    "pipeline.steps": 4,
    "pipeline.groups_per_step": 4,
    "pipeline.max_lag": 0,
    "rollout.group_size": 4,
    "data.holdout": 0,
    "data.size": 200,
    "engine.process": "false",
}


def run(folder: Path, **changes: Any) -> None:
    settings: Mapping[str, Any] = SMALL | {name.replace("__", "."): value for name, value in changes.items()}
    words = [f"run_dir={folder}", *(f"{name}={value}" for name, value in settings.items())]
    train(load(ROOT / "recipes/demo.toml", RunConfig, words))


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of supervised training alone: a model whose samples are right now and then."""
    folder = tmp_path_factory.mktemp("warm") / "run"
    run(folder, warmup__max_steps=30, warmup__check_every=30, pipeline__steps=0)
    return folder


def run_from(warm: Path, folder: Path, **changes: Any) -> None:
    run(folder, warmup="", model__tiny="", model__path=warm / "model", **changes)


def steps_of(folder: Path) -> list[Stepped]:
    return [event for event in read_events(folder / "events.jsonl") if isinstance(event, Stepped)]


def weights(folder: Path) -> torch.Tensor:
    return torch.cat([value.flatten() for _, value in sorted(load_file(folder / "model/model.safetensors").items())])


calls = 0


def sometimes_not_finite(x: LossInputs) -> TokenLoss:
    """Every third micro-batch has a row whose loss is not a number."""
    global calls
    calls += 1
    spoil_N = torch.where((x.row_N == 1) & (calls % 3 == 0), torch.nan, 1.0)
    return TokenLoss(-spoil_N * x.advantages_N * x.logprobs_N, {})


def never_finite(x: LossInputs) -> TokenLoss:
    return TokenLoss(torch.where(x.row_N == 1, torch.inf, -x.advantages_N) * x.logprobs_N, {})


def own(loss: str) -> str:
    return f"{{loss='{__file__}:{loss}'}}"


def test_a_step_whose_loss_is_not_a_number_is_skipped_and_the_run_continues(warm: Path, tmp_path: Path) -> None:
    run_from(warm, tmp_path / "run", algorithm=own("sometimes_not_finite"), pipeline__steps=6)
    skipped = [step.metrics.get("skipped_steps", 0) for step in steps_of(tmp_path / "run")]
    assert len(skipped) == 6 and 1 <= sum(skipped) <= 3
    assert weights(tmp_path / "run").isfinite().all()
    assert audit(tmp_path / "run").is_clean


def test_too_many_of_them_end_the_run_and_the_rows_are_named(warm: Path, tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match=r"the loss of group \d+, member \d+ is not finite"):
        run_from(warm, tmp_path / "run", algorithm=own("never_finite"), learner__max_skipped_steps=1)


@pytest.mark.parametrize("table", ["learner", "warmup"])
def test_a_model_that_is_not_finite_is_never_saved(warm: Path, tmp_path: Path, table: str) -> None:
    with pytest.raises(LearnerError, match=r"has a value that is not finite.* optimizer step \d+; .* lower"):
        if table == "learner":
            run_from(warm, tmp_path / "run", learner__learning_rate=1e39)
        else:
            run(tmp_path / "run", warmup__learning_rate=1e39, warmup__max_steps=1)
    assert not (tmp_path / "run/model").exists()
    for state in (tmp_path / "run").rglob("learner.pt"):
        masters = torch.load(state, weights_only=True)["masters"]
        assert all(master.isfinite().all() for master in masters.values())


def test_rollouts_longer_than_the_token_budget_are_trained_each_on_its_own(tmp_path: Path) -> None:
    few = {"warmup.max_steps": 1, "warmup.check_every": 1, "pipeline.filter_zero_signal": "false"}
    run(tmp_path / "wide", **few)
    run(tmp_path / "narrow", **few, learner__micro_batch_tokens=1)
    assert [step.num_rows for step in steps_of(tmp_path / "narrow")] == [16] * 4
    assert torch.allclose(weights(tmp_path / "narrow"), weights(tmp_path / "wide"), atol=1e-3)


def always_the_same(text: str, answer: str) -> float:
    return 0.5


def test_rewards_that_are_all_equal_leave_empty_batches_and_the_weights_as_they_are(warm: Path, tmp_path: Path) -> None:
    same = f"[{{function='{__file__}:always_the_same'}}]"
    run_from(warm, tmp_path / "run", reward=same, pipeline__max_replaced_per_step=2)
    assert [(step.num_groups, step.num_rows) for step in steps_of(tmp_path / "run")] == [(0, 0)] * 4
    left = [event for event in read_events(tmp_path / "run/events.jsonl") if isinstance(event, GroupLeft)]
    assert {event.fate for event in left} == {Fate.FILTERED}
    assert torch.equal(weights(tmp_path / "run"), weights(warm))
    assert audit(tmp_path / "run").is_clean


def test_a_group_of_one_is_trained_by_what_compares_batches(warm: Path, tmp_path: Path) -> None:
    run_from(
        warm,
        tmp_path / "run",
        rollout__group_size=1,
        algorithm="{name='reinforce_plus_plus'}",
        pipeline__filter_zero_signal="false",
        pipeline__groups_per_step=16,
    )
    assert [step.num_rows for step in steps_of(tmp_path / "run")] == [16] * 4
    assert audit(tmp_path / "run").is_clean
