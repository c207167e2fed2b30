"""What all commands share: the two consoles, how errors are printed, and which model a path means."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console

from millstream.errors import ConfigError, MillstreamError, Stopped
from millstream.run.folder import RunFolder, resume_command

console = Console()
errors = Console(stderr=True)


@contextmanager
def errors_shown() -> Iterator[None]:
    """A `MillstreamError` becomes one message and exit code 1; a stop, the command that resumes the run and the signal's
    exit code."""
    try:
        yield
    except MillstreamError as error:
        errors.print(f"[bold red]{type(error).__name__}[/]: ", end="")
        errors.out("\n".join([str(error), *getattr(error, "__notes__", ())]), highlight=False)
        raise typer.Exit(1) from error
    except Stopped as stopped:
        errors.out(str(stopped), highlight=False)
        raise typer.Exit(stopped.exit_code) from None
    except KeyboardInterrupt:
        errors.print("stopped by Ctrl-C")
        raise typer.Exit(130) from None


def model_in(path: str, what: str) -> str:
    """The path itself, or the model of the run whose folder it is."""
    folder = RunFolder(Path(path))
    if not folder.config.is_file():
        return path
    if not folder.model.is_dir():
        raise ConfigError(f"the run in {path} has no model yet. To resume the run:\n  {resume_command(folder.path)}")
    errors.out(f"{path} is a run folder: {what} its model, {folder.model}", highlight=False)
    return str(folder.model)
