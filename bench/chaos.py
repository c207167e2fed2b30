"""Chaos: of an environment's steps 5% raise, 2% hang, 1% kill their process, 1% return garbage. Does the run finish, does every
prompt have its fate, is what was trained a fair sample?

A real run on this machine: a tiny model walks over frozen lakes, every episode in a process of its own. Prints what happened,
what `millstream audit` and the bias report say of it, and exits with 1 if one of them objects.

    .venv/bin/python bench/chaos.py [--json] [--smoke] [--steps 40] [--groups 8]
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import run_parts
from internals import audit, bias_report, read_history
from millstream import (
    DataConfig,
    EngineConfig,
    EnvironmentConfig,
    ModelConfig,
    PipelineConfig,
    RolloutConfig,
    RunConfig,
    TinyConfig,
    train,
)
from millstream.events import RolloutEnded, RolloutFailed
from report import Options, Row, publish, say

STEP_TIMEOUT_S = 2.0


def config(run_dir: Path, *, steps: int, groups: int) -> RunConfig:
    return RunConfig(
        model=ModelConfig(tiny=TinyConfig(hidden=32, layers=1, heads=2, context=192, alphabet="pfhgldru0123456789=>")),
        environment=(
            EnvironmentConfig(
                use=f"{run_parts.HERE}:Chaos",
                args={"max_turns": 6},
                process=True,
                step_timeout_s=STEP_TIMEOUT_S,
                max_concurrent=12,
            ),
        ),
        data=DataConfig(size=4000, holdout=0),
        engine=EngineConfig(slots=64, process=False),
        rollout=RolloutConfig(group_size=4, max_tokens=2, retries=3),
        pipeline=PipelineConfig(steps=steps, groups_per_step=groups, max_lag=1, filter_zero_signal=False),
        run_dir=str(run_dir),
    )


def run(run_dir: Path, *, steps: int, groups: int) -> dict[str, Any]:
    result = train(config(run_dir, steps=steps, groups=groups))
    history = list(read_history(run_dir / "events.jsonl"))
    report = audit(run_dir)
    bias = bias_report(history)
    return {
        "steps": result.summary.steps,
        "rollouts": sum(isinstance(event, RolloutEnded) for event in history),
        "failures": dict(Counter(_kind(event.message) for event in history if isinstance(event, RolloutFailed))),
        "lost": sum(isinstance(event, RolloutFailed) and event.is_final for event in history),
        "findings": [finding.message for finding in report.findings],
        "checks": report.checks,
        "is_biased": bias.is_biased,
        "tests": {test.quantity: test.verdict for test in bias.tests},
        "seconds": result.summary.seconds,
    }


def _kind(message: str) -> str:
    kinds = {"cracked": "raised", "longer than": "hung, killed", "SIGKILL": "killed itself", "expected Step": "garbage"}
    return next((kind for sign, kind in kinds.items() if sign in message), message)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--steps", 40, smoke=1)
    parser.add("--groups", 8, smoke=2)
    options = parser.parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder) / "run", steps=options.steps, groups=options.groups)
    for name, value in found.items():
        say(f"{name:10} {value}")
    workload = f"chaos, {found['rollouts']} rollouts, {sum(found['failures'].values())} failures"
    figures = {"audit findings": len(found["findings"]), "biases found": int(found["is_biased"])}
    rows = [
        Row(workload=workload, metric=metric, ours=ours, peer="none is allowed", theirs=0, ratio=float(not ours))
        for metric, ours in figures.items()
    ]
    publish(rows, options)
    if found["findings"] or (found["is_biased"] and not options.smoke):  # a few rollouts may look biased by chance
        sys.exit(1)


if __name__ == "__main__":
    main()
