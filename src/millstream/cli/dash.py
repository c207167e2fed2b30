"""`millstream dash`: runs in a browser."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from millstream.cli.common import console, errors_shown
from millstream.cli.serve import HostOption, PortOption, TokenOption

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
