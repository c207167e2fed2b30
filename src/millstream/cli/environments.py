"""`millstream env`: makes a new environment, and checks environments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from millstream.cli.common import AsJson, console, errors_shown
from millstream.cli.environment_template import environment_files
from millstream.cli.recipes import write_files
from millstream.errors import ConfigError
from millstream.paths import kind_of
from millstream.run.env_check import env_report_lines, run_env_check

env_commands = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Make and check environments.")


@env_commands.callback()
def env_options() -> None:
    """Make and check environments."""


@env_commands.command(name="check")
def env_check_command(
    use: Annotated[
        str | None,
        typer.Argument(metavar="USE", help="As environment.use: a built-in name, file.py:Name, package.module:Name."),
    ] = None,
    args: Annotated[
        list[str] | None,
        typer.Option("--args", metavar="KEY=VALUE", help="An argument of the environment: --args size=5"),
    ] = None,
    path: Annotated[
        Path | None,
        typer.Option("--config", metavar="RUN.toml", help="Take environments, data and rewards from a config."),
    ] = None,
    process: Annotated[bool, typer.Option("--process", help="Run the environment in a separate process.")] = False,
    num_tasks: Annotated[int, typer.Option("--tasks", metavar="N", min=1, help="The number of tasks to play.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Play an environment with scripted policies, without a model, and report what is wrong with it. Exit code 1 if anything
    is."""
    with errors_shown():
        reports = run_env_check(use, args or [], path, process=process, num_tasks=num_tasks)
        if as_json:
            console.out(msgspec.json.encode(reports).decode(), highlight=False)
        else:
            for line in (line for report in reports for line in env_report_lines(report)):
                console.out(line, highlight=False)
    if not all(report.is_fit for report in reports):
        raise typer.Exit(1)


@env_commands.command(name="init")
def env_init_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the package, such as word-game.")],
) -> None:
    """Make a package with a new environment. A folder with a small game to change, a test, and a config that trains it."""
    with errors_shown():
        files, folder = environment_files(name), Path(name)
        if kind_of(folder) is not None:
            raise ConfigError(f"{folder} exists already: choose another name")
        write_files({folder / file: text.encode() for file, text in files.items()})
        console.print(
            f"wrote {folder}/: {', '.join(files)}. Next: cd {folder}, then pytest, then millstream train train.toml",
            highlight=False,
            soft_wrap=True,
        )
