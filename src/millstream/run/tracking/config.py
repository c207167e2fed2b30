"""The [trackers] table of a config. Light: imports none of the libraries."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

from msgspec import Struct

from millstream.errors import ConfigError

TrackerName = Literal["wandb", "tensorboard", "mlflow", "trackio"]


class TrackersConfig(Struct, frozen=True, kw_only=True):
    """Where else a run is recorded. Each library reads its own environment variables: WANDB_MODE, MLFLOW_TRACKING_URI, ..."""

    use: tuple[TrackerName, ...] = ()
    """wandb, tensorboard, mlflow, trackio; several may be named."""
    project: str = "millstream"
    """The project (MLflow: the experiment) that the run belongs to."""
    name: str | None = None
    """Of the run. None: the name of its folder."""


def check_trackers(config: TrackersConfig) -> None:
    """Raises `ConfigError` where a library is missing."""
    for name in config.use:
        if find_spec(name) is None:
            raise ConfigError(f"trackers.use has {name!r}, which is not installed: pip install 'millstream[{name}]'")
