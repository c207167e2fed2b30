"""`millstream doctor`: whether this machine is ready for a run."""

from __future__ import annotations

import msgspec
import typer

from millstream.cli.common import AsJson, console, errors_shown
from millstream.run.doctor import CheckLevel, examine_machine

SHOWN: dict[CheckLevel, tuple[str, str]] = {
    "ok": ("OK  ", "green"),
    "warn": ("warn", "yellow"),
    "fail": ("FAIL", "bold red"),
}


def doctor_command(
    as_json: AsJson = False,
) -> None:
    """Check this machine. Python, torch, GPUs, memory, disk, ports, limits, optional packages, each with what to type. Exit
    code 1 if a run would fail."""
    with errors_shown():
        found = examine_machine()
        if as_json:
            console.out(msgspec.json.encode(found).decode(), highlight=False)
        else:
            width = max(len(check.name) for check in found)
            for check in found:
                word, style = SHOWN[check.level]
                console.print(f"{word}  ", style=style, end="", highlight=False)
                helps = f". To do: {check.to_type}" if check.to_type else ""
                console.out(f"{check.name:{width}}  {check.found}{helps}", highlight=False)
    if any(check.level == "fail" for check in found):
        raise typer.Exit(1)
