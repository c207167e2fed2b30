"""What all commands share: the two consoles, how errors are printed, and which model a path means."""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import Annotated, TextIO

import typer
from rich.console import Console

import millstream
from millstream.errors import ConfigError, MillstreamError, Stopped, shown
from millstream.paths import kind_of, program
from millstream.run.folder import RunFolder, resume_command

console = Console()
errors = Console(stderr=True)
CONTROL = {code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160)) if chr(code) != "\n"}
"""Characters that a terminal would act on, as they are shown."""


def keep_stdout(context: typer.Context, is_json: bool) -> bool:
    """Callback of the options that ask for JSON. Standard output then has what `console` prints and nothing else: what others
    print, a reward, a library or a process that they start, goes to standard error."""
    if is_json and console._file is None:
        context.with_resource(_stdout_kept())
    return is_json


@contextmanager
def _stdout_kept() -> Iterator[None]:
    stdout = sys.stdout
    if _descriptor_of(stdout) == 1:
        stdout.flush()
        console.file = os.fdopen(os.dup(1), "w", encoding=stdout.encoding, errors=stdout.errors)
        with suppress(OSError):  # standard error is closed
            os.dup2(2, 1)  # to the end of the process: a C library writes what it has printed when it exits
    else:  # a caller in this process reads it
        console.file = stdout
        sys.stdout = sys.stderr
    try:
        yield
    finally:
        console._file = None
        sys.stdout = stdout


def _descriptor_of(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (AttributeError, ValueError):  # it is closed, or in memory
        return None


AsJson = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON and nothing else.", callback=keep_stdout)
]


@contextmanager
def errors_shown() -> Iterator[None]:
    """A `MillstreamError` becomes one message and exit code 1; a stop, the command that resumes the run and the signal's
    exit code; any other error one line that names the file with its traceback, and exit code 1."""
    try:
        yield
    except MillstreamError as error:
        _print_error(error, [str(error), *getattr(error, "__notes__", ())])
        raise typer.Exit(1) from error
    except Stopped as stopped:
        errors.out(str(stopped), highlight=False)
        raise typer.Exit(stopped.exit_code) from None
    except KeyboardInterrupt:
        errors.print("stopped by Ctrl-C")
        raise typer.Exit(130) from None
    except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):  # typer's own, and a reader such as `head`
        raise
    except Exception as error:  # border of the command line: one line for the user, the traceback in a file
        found = f"{shown(str(error))}. That is not expected: {_write_traceback(error)}"
        _print_error(error, [found, *getattr(error, "__notes__", ())])
        raise typer.Exit(1) from error


def _print_error(error: Exception, messages: list[str]) -> None:
    """A line for each; what to type is on a line of its own, after two spaces. A library's message may have many lines."""
    errors.print(f"[bold red]{type(error).__name__}[/]: ", end="")
    errors.out("\n".join(_lines_of(message) for message in messages).translate(CONTROL), highlight=False)


def _lines_of(message: str) -> str:
    first, *rest = message.split("\n")
    text, was_command = first.rstrip(), False
    for line in rest:
        is_command = re.match(r"  \S", line) is not None
        text += f"\n{line.rstrip()}" if is_command or was_command else f" {line.strip()}"
        was_command = is_command
    return text


def _write_traceback(error: Exception) -> str:
    """Where it is, in words."""
    command = " ".join(sys.argv[1:2])  # not all of it: a token may have been typed
    header = f"millstream {millstream.__version__} {command}, Python {platform.python_version()}\n\n"
    text = header + "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile("wb", prefix="millstream-error-", suffix=".txt", delete=False) as file:
            file.write(text.encode("utf-8", "backslashreplace"))
    except OSError as failure:
        return f"the traceback cannot be written to a file ({failure.strerror}): {text}"
    return f"the traceback is in {file.name}"


def model_in(path: str, what: str) -> str:
    """The path itself, or the model of the run whose folder it is."""
    folder = RunFolder(Path(path))
    if kind_of(folder.config) != "file":
        return path
    if not folder.model.is_dir():
        folder.check_trained()
        raise ConfigError(
            f"the run in {path} has no model yet. To resume the run:\n  {resume_command(folder.path)}\n"
            f"To evaluate or export a checkpoint:\n  {program()} eval {quote(f'{path}@STEP')}\n"
            f"  {program()} export {quote(path)}"
        )
    errors.out(f"{path} is a run folder: {what} its model, {folder.model}", highlight=False)
    return str(folder.model)
