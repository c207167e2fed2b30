"""The trackers: one small class per library. Each library is imported where its tracker is opened, and reads its own
environment variables for servers, keys and offline modes."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from millstream import imports
from millstream.run.tracking.sink import TrackedRun, Tracker

MLFLOW_BATCH = 100  # parameters of one call
MLFLOW_CHARACTERS = 500  # of one parameter


class WandbTracker:
    """Weights & Biases. Every row has its step as a value, so that a resumed run may repeat steps."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            resume="allow",
            config=run.config,
            dir=str(run.folder),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({"step": step, name: self._wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)})

    def finish(self, summary: Mapping[str, float], *, is_finished: bool) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=0 if is_finished else 1)


class TensorboardTracker:
    """TensorBoard: event files in RUN/tensorboard."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purged = {"purge_step": run.version + 1} if run.version else {}
        self._writer: Any = SummaryWriter(log_dir=str(run.folder / "tensorboard"), **purged)
        self._step = run.version
        self.text(run.version, "config", json.dumps(run.config, indent=2, default=str))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._step = max(step, self._step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, "    " + text.replace("\n", "\n    "), step)  # Markdown: as it is

    def finish(self, summary: Mapping[str, float], *, is_finished: bool) -> None:
        self.text(self._step, "summary", json.dumps(dict(summary), indent=2))
        self._writer.close()


class MlflowTracker:
    """MLflow: the project is its experiment. A resumed run is found by its tag."""

    def __init__(self, run: TrackedRun) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = client = mlflow.MlflowClient()
        experiment = client.get_experiment_by_name(run.project)
        experiment_id = client.create_experiment(run.project) if experiment is None else experiment.experiment_id
        earlier = client.search_runs([experiment_id], f"tags.`millstream.run_id` = '{run.run_id}'", max_results=1)
        if earlier:
            self._run_id = earlier[0].info.run_id
            return
        tags = {"mlflow.runName": run.name, "millstream.run_id": run.run_id}
        self._run_id = client.create_run(experiment_id, tags=tags).info.run_id
        parameters = [Param(key, str(value)[:MLFLOW_CHARACTERS]) for key, value in run.config.items()]
        for begin in range(0, len(parameters), MLFLOW_BATCH):
            client.log_batch(self._run_id, params=parameters[begin : begin + MLFLOW_BATCH])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name.replace("@", "_"), float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def text(self, step: int, name: str, text: str) -> None:
        self._client.log_text(self._run_id, text, f"{name}/step-{step}.txt")

    def finish(self, summary: Mapping[str, float], *, is_finished: bool) -> None:
        self._client.log_dict(self._run_id, dict(summary), "summary.json")
        self._client.set_terminated(self._run_id, "FINISHED" if is_finished else "FAILED")


class TrackioTracker:
    """trackio: a local database, or a Space of the hub (TRACKIO_SPACE_ID). A resumed run is found by its name, which has the
    beginning of its id: trackio keeps names apart, not ids."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._run: Any = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.run_id[:6]}",
            config=run.config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._step = run.version

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._step = max(step, self._step)
        self._run.log(dict(values), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({name: text}, step=step)

    def finish(self, summary: Mapping[str, float], *, is_finished: bool) -> None:
        self._run.log({f"summary/{name}": value for name, value in summary.items()}, step=self._step)
        self._run.finish()


OPENERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": WandbTracker,
    "tensorboard": TensorboardTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}


def opener_of(name: str) -> Callable[[TrackedRun], Tracker]:
    """Of a tracker that a config names. Raises `ConfigError`."""
    if name in OPENERS:
        return OPENERS[name]
    part: Callable[[TrackedRun], Tracker] = imports.load_part("tracker", name, OPENERS)
    return part
