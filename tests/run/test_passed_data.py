"""Runs whose records and reward come from Python, in TRL's form: trained, resumed with the same records, evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from millstream import DataConfig, ModelConfig, RunConfig, TinyConfig, evaluate, resume, train
from millstream.engine import EngineConfig
from millstream.errors import CheckpointError, DataError
from millstream.pipeline.rollouts import RolloutConfig
from millstream.pipeline.schedule import PipelineConfig
from millstream.run.checkpoint import CheckpointConfig

RECORDS = [{"prompt": f"{n}>", "answer": str(n), "level": n % 3} for n in range(24)]


def config_in(folder: Path, **changes: Any) -> RunConfig:
    config = RunConfig(
        model=ModelConfig(tiny=TinyConfig(hidden=16, layers=1, heads=2, context=16)),
        data=DataConfig(holdout=4),
        run_dir=str(folder / "run"),
        rollout=RolloutConfig(group_size=2, max_tokens=4),
        pipeline=PipelineConfig(steps=2, groups_per_step=2, filter_zero_signal=False),
        checkpoint=CheckpointConfig(every_steps=1),
        engine=EngineConfig(process=False),
    )
    return structs.replace(config, **changes)


def test_a_run_takes_records_and_a_reward_of_trl_from_python_and_resumes_with_the_same(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    seen: set[int] = set()

    def reward(prompts: list[str], completions: list[str], level: list[int], **columns: Any) -> list[float]:
        seen.update(level)
        return [len(set(completion)) / 4 for completion in completions]

    config = config_in(tmp_path)
    result = train(config, reward=reward, data=datasets.Dataset.from_list(RECORDS))
    assert result.summary.steps == 2 and result.summary.rollouts_trained and seen == {0, 1, 2}
    assert evaluate(config, reward=reward, data=RECORDS).samples[0].prompt.endswith(">")
    run_dir = Path(result.run_dir)
    (run_dir / "summary.json").unlink()
    events = (run_dir / "events.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "events.jsonl").write_text("".join(events[:-1]))  # as if it was killed before its end
    with pytest.raises(DataError, match=r"they were passed to train\. .*millstream\.resume\(RUN, data=records\)"):
        resume(run_dir, reward=reward)
    with pytest.raises(CheckpointError, match=r"the data set is not the one that the run .* began with"):
        resume(run_dir, reward=reward, data=RECORDS[1:])
    assert resume(run_dir, reward=reward, data=RECORDS).summary.steps == 2
