"""Draws docs/terminal.svg, the terminal view of a real run, from its events: `.venv/bin/python docs/terminal.py RUN`."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console

from millstream.cli.view import View
from millstream.config import load
from millstream.events import Stepped
from millstream.events.sinks import read_events
from millstream.run.config import RunConfig

SHARE = 0.6


def main(run_dir: Path) -> None:
    pipeline = load(run_dir / "config.toml", RunConfig).pipeline
    num_steps = pipeline.steps
    view = View(Console(file=io.StringIO()), num_steps=num_steps, max_lag=pipeline.max_lag)
    for event in read_events(run_dir / "events.jsonl"):
        view.emit(event)
        if isinstance(event, Stepped) and event.version >= SHARE * num_steps:
            break
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(view)
    Path("docs/terminal.svg").write_text(console.export_svg(title="make demo"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
