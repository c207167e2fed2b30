"""What a config with an engine or a learner outside may say. Light: imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator

from millstream.errors import ConfigError
from millstream.run.config import OutsideConfig, RunConfig


def check_outside(config: RunConfig) -> None:
    """Raises `ConfigError` for a combination that cannot work."""
    found = [key for key, table in (("engine", config.engine), ("learner", config.learner)) if table.kind == "outside"]
    if not found:
        if config.outside != OutsideConfig():
            raise ConfigError('an [outside] table, and neither engine.kind nor learner.kind is "outside": leave it out')
        return
    what = f'{found[0]}.kind = "outside"'
    if config.runtime == "ray":
        raise ConfigError(
            f'{what} with runtime = "ray": programs outside connect to one machine. Set runtime = "local"'
        )
    if "engine" in found and config.warmup is not None:
        raise ConfigError(
            f"{what} with a [warmup] table, whose weights have no version: warm up first, then train --from it"
        )
    if "learner" in found and (config.learner.lora is not None or config.learner.mini_batches > 1):
        raise ConfigError(
            f"{what}: the program makes its own optimizer steps of the whole model. Leave learner.lora and mini_batches out"
        )
    if "learner" in found and config.pipeline.rollouts_only:
        raise ConfigError(f"{what} with pipeline.rollouts_only, which trains nothing: leave one of them out")
    from millstream.serve.auth import check_token  # imports a server's library, which other runs do not need

    check_token(config.outside.host, os.environ.get("MILLSTREAM_TOKEN"))


def checked_outside(config: RunConfig) -> Iterator[str]:
    """Programs outside need not be up yet."""
    found = [key for key, table in (("engine", config.engine), ("learner", config.learner)) if table.kind == "outside"]
    if found:
        address = f"http://{config.outside.host}:{config.outside.port}"
        yield f"not checked: the programs that are the run's {' and '.join(found)}, which connect to {address}"
