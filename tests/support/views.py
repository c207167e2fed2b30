"""The terminal view as text."""

from __future__ import annotations

import io

from rich.console import Console

from millstream.cli.view import View


def drawn(view: View) -> str:
    console = Console(file=io.StringIO(), width=110)
    console.print(view)
    return console.file.getvalue()  # type: ignore[attr-defined]
