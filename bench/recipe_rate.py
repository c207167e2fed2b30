"""How fast a recipe trains on this machine: rollouts/s, tokens/s generated and trained, over `--steps` steps after the warm-up.

.venv/bin/python bench/recipe_rate.py [RECIPE] [--set model.path=FOLDER ...] [--steps 6] [--limit 200] [--json] [--smoke]
.venv/bin/python bench/recipe_rate.py gsm8k --set model.path=FOLDER --set data.name= --set data.subset= --set data.path=FILE
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import structs

from end_to_end_cells import Budget, NotMeasured, Watch, measured
from internals import recipe, without_checkpoints
from internals_torch import device_name
from millstream import CheckpointConfig, EvaluationConfig, RunConfig, train
from millstream.errors import Stopped
from report import Options, Row, alone, not_measured, publish

MANY_STEPS = 100_000


def endless(config: RunConfig) -> RunConfig:
    """Without evaluations, checkpoints and an end."""
    return structs.replace(
        config,
        pipeline=structs.replace(config.pipeline, steps=MANY_STEPS),
        learner=structs.replace(config.learner, schedule="constant"),
        checkpoint=CheckpointConfig(grace_s=0.0),
        evaluation=EvaluationConfig(tasks=1),
    )


def rows_of(name: str, config: RunConfig, steps: int, limit_s: float) -> list[Row]:
    warm_steps = 2 + math.ceil(config.pipeline.max_lag)
    watch = Watch(warm_steps, Budget(seconds=0.0, min_steps=steps, limit_s=limit_s))
    with tempfile.TemporaryDirectory() as folder, without_checkpoints(), suppress(Stopped):
        train(structs.replace(endless(config), run_dir=str(Path(folder) / "run")), sinks=[watch])
    try:
        found = measured(watch.events, warm_steps, steps)
    except NotMeasured as error:
        return [not_measured(name, str(error))]
    ends: list[float] = found["step_ends"]
    wall_s = ends[-1] - ends[warm_steps - 1]
    return [
        alone(name, "steps measured", len(ends) - warm_steps),
        alone(name, "s a step", wall_s / (len(ends) - warm_steps)),
        alone(name, "rollouts/s", found["rollouts_per_s"]),
        alone(name, "tokens/s generated", found["tokens_per_s"], digits=0),
        alone(name, "tokens/s trained", sum(found["step_tokens"][warm_steps:]) / wall_s, digits=0),
        alone(name, "engine busy", found["engine_share"]),
        alone(name, "learner busy", found["learner_share"]),
        alone(name, "peak GiB", watch.memory_bytes / 2**30),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add_argument("recipe", nargs="?", default="smollm2", help="of recipes/, without .toml")
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="a.b=c")
    parser.add("--steps", 6, smoke=2, help="measured, after two more than max_lag")
    parser.add("--limit", 200.0, smoke=60.0, help="seconds after which it ends with what it has")
    options = parser.parse(argv)
    name = "demo" if options.smoke else options.recipe
    config = recipe(name, *options.changes, is_smoke=options.smoke)
    changed = [change for change in options.changes if not change.startswith(("model.", "data."))]
    workload = ", ".join([f"recipes/{name}.toml", *changed, device_name()])
    publish(rows_of(workload, config, options.steps, options.limit), options)


if __name__ == "__main__":
    main()
