"""Chaos: of an environment's steps 5% raise, 2% hang, 1% kill their process, 1% return garbage. Does the run finish, does every
prompt have its fate, is what was trained a fair sample?

A real run on this machine: a tiny model walks over frozen lakes, every episode in a process of its own. Prints what happened,
what `millstream audit` and the bias report say of it, and exits with 1 if one of them objects.

    .venv/bin/python bench/chaos.py [--steps 40] [--groups 8] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from millstream import (
    DataConfig,
    EngineConfig,
    EnvironmentConfig,
    ModelConfig,
    PipelineConfig,
    RolloutConfig,
    RunConfig,
    TinyConfig,
)
from millstream.env import Step
from millstream.env.games.frozen_lake import FrozenLake
from millstream.seeds import derive_seed
from millstream.types import Task

RAISE, HANG, KILL, GARBAGE = 0.05, 0.02, 0.01, 0.01
STEP_TIMEOUT_S = 2.0
HOUR_S = 3600.0


class Chaos(FrozenLake):
    """A frozen lake on which steps go wrong, by a coin of their own that knows nothing of the walk."""

    async def reset(self, task: Task, seed: int) -> str:
        self._coins = random.Random(derive_seed(seed, "chaos"))
        return await super().reset(task, seed)

    async def step(self, action: str) -> Step:
        coin = self._coins.random()
        if coin < RAISE:
            raise ValueError("the ice cracked")
        if coin < RAISE + HANG:
            time.sleep(HOUR_S)  # noqa: ASYNC251 (with the whole process)
        if coin < RAISE + HANG + KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if coin < RAISE + HANG + KILL + GARBAGE:
            return "garbage"  # type: ignore[return-value]
        return await super().step(action)


def config(run_dir: Path, *, steps: int, groups: int) -> RunConfig:
    return RunConfig(
        model=ModelConfig(tiny=TinyConfig(hidden=32, layers=1, heads=2, context=192, alphabet="pfhgldru0123456789=>")),
        environment=(
            EnvironmentConfig(
                use=f"{Path(__file__).resolve()}:Chaos",
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
    from millstream import train
    from millstream.audit import audit
    from millstream.events import RolloutEnded, RolloutFailed
    from millstream.events.bias import bias_report
    from millstream.events.sinks import read_history

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder) / "run", steps=args.steps, groups=args.groups)
    rows = [
        {
            "workload": f"chaos, {found['rollouts']} rollouts, {sum(found['failures'].values())} failures",
            "metric": metric,
            "ours": ours,
            "peer": "none may be",
            "theirs": 0,
            "ratio": float(not ours),
        }
        for metric, ours in (("audit findings", len(found["findings"])), ("biases found", int(found["is_biased"])))
    ]
    if args.json:
        print(json.dumps(rows))
    else:
        for name, value in found.items():
            print(f"{name:10} {value}")
    sys.exit(any(row["ours"] for row in rows))


if __name__ == "__main__":
    main()
