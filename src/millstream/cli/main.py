"""`millstream train RUN.toml`: read the config, run it, show it. Exit code 0, or 1 with a message that says what to type."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from millstream import config as configs
from millstream.cli.show import Lines, result_table
from millstream.errors import MillstreamError
from millstream.runtime.config import RunConfig, check_run

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, help=__doc__
)
console, errors = Console(), Console(stderr=True)


@app.callback()
def main() -> None:
    """Millstream: asynchronous reinforcement learning for language models."""


@app.command()
def train(
    path: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The config of the run.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key: --set pipeline.max_lag=2")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and print the resolved config; run nothing.")
    ] = False,
) -> None:
    """Train a model by reinforcement learning."""
    try:
        config = configs.load(path, RunConfig, overrides or [])
        check_run(config)
        if dry_run:
            console.out(configs.to_toml(config), end="", highlight=False)
            return
        _train(config, path.stem)
    except MillstreamError as error:
        errors.print(f"[bold red]{type(error).__name__}[/]: ", end="")
        errors.out(str(error), highlight=False)
        raise typer.Exit(1) from error


def _train(config: RunConfig, name: str) -> None:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from millstream.runtime import local  # torch: not for --help or --dry-run

    result = local.train(config, sinks=[Lines(console, num_steps=config.pipeline.steps)], name=name)
    console.print(result_table(result))
    console.print(f"run folder    {result.run_dir}")
    console.print(f"saved model   {result.run_dir}/model")


if __name__ == "__main__":
    app()
