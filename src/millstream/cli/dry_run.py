"""`millstream train --dry-run` and `--show-config`: what a start would find, and the config with all keys."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from millstream import config as configs
from millstream.cli.common import console
from millstream.paths import program
from millstream.run.config import RunConfig
from millstream.run.dry_run import find_all
from millstream.run.places import parse_machine

DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check all that a start would: config, data, rewards (each is called), model, context, disk. Run nothing.",
    ),
]
OtherMachine = Annotated[
    str | None,
    typer.Option(
        "--machine",
        metavar="[NODESx]NUMBERxKIND",
        help="With --dry-run: check for this machine instead of the present one: 8xH100, 4x8xH100, cpu.",
    ),
]
ShowConfig = Annotated[
    bool, typer.Option("--show-config", help="Print the config with all keys and their values. Run nothing.")
]


def show_config(config: RunConfig) -> None:
    console.out(configs.to_toml(config), end="", highlight=False)


def show_dry_run(
    config: RunConfig,
    *,
    path: Path | None,
    resume: Path | None,
    from_run: str | None,
    machine: str | None,
    is_commented: bool,
) -> None:
    """A line for each finding, warnings last, then what to type. `is_commented`: below a config, as comments of it."""
    described = None if machine is None else parse_machine(machine)
    findings = find_all(config, resume=resume, from_run=from_run, machine=described)
    what = quote(str(path)) if path is not None else f"--resume {quote(str(resume))}"
    warnings = sum(line.startswith("warning") for line in findings)
    said = (
        "nothing to change"
        if not warnings
        else f"{warnings} warning{'s' * (warnings > 1)}, and nothing that stops a run"
    )
    for line in (*findings, f"found: {said}. To start, with the same options: {program()} train {what}"):
        console.out(f"# {line}" if is_commented else line, highlight=False)
