"""`millstream dash`: runs in a browser; the same as one file (`report --html`); notes, which it shows."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Annotated

import typer

from millstream.cli.common import console, errors_shown
from millstream.cli.serve import HostOption, PortOption, TokenOption
from millstream.errors import ConfigError, OutputError
from millstream.run.folder import NOTES, RunFolder

RUNS = Path("runs")  # where `train` makes the folders of runs


def dash_command(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN...]", help="Run folders, or folders of them. Default: the runs in runs/."),
    ] = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8090,
    token: TokenOption = None,
) -> None:
    """Show runs in a browser. Curves, a timeline, queues and rollouts, of active runs as they train and of others. Only reads
    run folders. On an address that other machines can reach, a token is required: one is made if none is given."""
    with errors_shown():
        from millstream.dash.runs import check_paths
        from millstream.dash.server import run_dash
        from millstream.serve.auth import is_loopback

        check_paths(paths or [])
        if token is None and not is_loopback(host):
            token = secrets.token_urlsafe(24)
        run_dash(
            paths or [RUNS],
            host,
            port,
            token=token,
            on_ready=lambda url: console.out(f"open {url}  (Ctrl-C ends it)", highlight=False),
        )


def write_html(run_dir: Path, file: Path) -> None:
    from millstream.dash.report import write_report

    write_report(run_dir, file)
    console.out(f"wrote {file}: open it in a browser", highlight=False)


def note_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, of an active run or not.")],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="One line or several.")],
) -> None:
    """Add a note to a run. It is appended to RUN/notes.md, with the time; the dashboard and the report show that file."""
    with errors_shown():
        path = RunFolder.of_run(run_dir).path / NOTES
        if not text.strip():
            raise ConfigError("the note is empty: expected a text")
        try:
            with path.open("a", encoding="utf-8", errors="replace") as file:
                file.write(f"- {time.strftime('%Y-%m-%d %H:%M')} {text.strip()}\n")
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}") from error
        console.out(f"added to {path}", highlight=False)
