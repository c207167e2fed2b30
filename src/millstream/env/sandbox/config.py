"""The `sandbox` table of an `[[environment]]`, and the driver that it names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from millstream import imports
from millstream.env.sandbox.base import Limits, Sandbox
from millstream.env.sandbox.container import ContainerSandbox
from millstream.env.sandbox.walled import WalledSandbox, check_walls
from millstream.errors import ConfigError

MIN_MB = 16
DRIVERS = ("walls", "docker", "podman")
METHODS = ("start", "exec", "read", "write", "snapshot", "close")


class SandboxConfig(Struct, frozen=True, kw_only=True):
    """Every rollout gets a sandbox of its own, without a network."""

    use: str = "walls"  # walls: namespaces of Linux; docker, podman; or a class of your own: `file.py:Name`
    args: dict[str, Any] = {}  # arguments of the driver. docker and podman: image
    setup: str = ""  # a shell command that is run once; every sandbox starts with the files that it left
    ahead: int = 4  # sandboxes that are started before they are needed
    memory_mb: int = 1024  # of all processes together
    disk_mb: int = 64  # of all files together
    processes: int = 64  # at a time
    cpu_s: float = 60.0  # of each process
    lifetime_s: float = 3600.0  # of a sandbox
    output_kb: int = 1024  # of one command, which is stopped past it

    def __post_init__(self) -> None:
        if self.memory_mb < MIN_MB or self.disk_mb < 1 or self.processes < 1 or self.output_kb < 1 or self.ahead < 0:
            raise ValueError(
                f"memory_mb must be at least {MIN_MB}, disk_mb, processes and output_kb at least 1, ahead at least 0"
            )
        if self.cpu_s < 1 or self.lifetime_s <= 0:
            raise ValueError("cpu_s must be at least 1, and lifetime_s above 0")

    @property
    def limits(self) -> Limits:
        disk = self.disk_mb << 20
        return Limits(
            lifetime_s=self.lifetime_s,
            cpu_s=self.cpu_s,
            memory_bytes=self.memory_mb << 20,
            scratch_bytes=disk,
            file_bytes=disk,
            processes=self.processes,
            open_files=256,
            output_bytes=self.output_kb << 10,
        )


def sandbox_maker(config: SandboxConfig) -> Callable[[], Sandbox]:
    """Makes sandboxes that are not started. Raises `ConfigError`, also where this machine cannot have them."""
    make: Callable[..., Any]
    match config.use:
        case "walls":
            check_walls()
            make = WalledSandbox
        case "docker" | "podman":
            if "image" not in config.args:
                raise ConfigError(
                    f"sandbox.use = {config.use!r} needs an image: "
                    '[environment.sandbox] args = { image = "python:3.12-slim" }'
                )
            make = functools.partial(ContainerSandbox, program=config.use)
        case _:
            make = imports.load_part("sandbox", config.use, DRIVERS)
    maker = functools.partial(make, config.limits, **config.args)
    try:
        made = maker()
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"[environment.sandbox] use = {config.use!r}, args = {config.args}: {error}") from error
    if missing := [name for name in METHODS if not callable(getattr(made, name, None))]:
        raise ConfigError(f"sandbox.use = {config.use!r} has no method {missing[0]}: see millstream.env.sandbox.base")
    return maker
