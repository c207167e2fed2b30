"""What every benchmark shares: its options, its rows, and how they are printed.

A benchmark is a file with `main(argv)`. It measures, and hands rows to `publish`: as JSON (`--json`: only the list of rows, on
standard output) or as a Markdown table. Progress goes to standard error (`say`). `--smoke` is the smallest setting, a few
seconds on one core: `make smoke` runs every benchmark so, which shows that it still runs, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

ROOT = Path(__file__).parent.parent
Number = float | int | None
"""None: not measured."""


class Row(Struct, frozen=True, kw_only=True):
    """One figure of ours beside the same figure of a peer."""

    workload: str
    metric: str
    ours: Number
    peer: str
    theirs: Number
    ratio: Number  # how many times better ours is: above 1, ours is better


def rate(workload: str, metric: str, ours: float, peer: str, theirs: float, *, digits: int = 3) -> Row:
    """A row whose figures are better the higher they are."""
    return _row(workload, metric, ours, peer, theirs, _ratio(ours, theirs), digits)


def cost(workload: str, metric: str, ours: float, peer: str, theirs: float, *, digits: int = 3) -> Row:
    """A row whose figures are better the lower they are."""
    return _row(workload, metric, ours, peer, theirs, _ratio(theirs, ours), digits)


def alone(workload: str, metric: str, ours: float, *, digits: int = 3) -> Row:
    """A figure of ours that has no peer."""
    return _row(workload, metric, ours, "none", None, None, digits)


def not_measured(workload: str, why: str) -> Row:
    return Row(workload=workload, metric=f"not measured: {why}", ours=None, peer="none", theirs=None, ratio=None)


def _row(workload: str, metric: str, ours: Number, peer: str, theirs: Number, ratio: Number, digits: int) -> Row:
    ours, theirs = _rounded(ours, digits), _rounded(theirs, digits)
    return Row(workload=workload, metric=metric, ours=ours, peer=peer, theirs=theirs, ratio=_rounded(ratio, 3))


def _ratio(better: float, than: float) -> float | None:
    return better / than if than else None


def _rounded(value: Number, digits: int) -> Number:
    """JSON has neither NaN nor infinity: they are None."""
    return round(value, digits) if value is not None and math.isfinite(value) else None


class Options(argparse.ArgumentParser):
    """The options of a benchmark: `--json` and `--smoke`, and those that `add` names with two defaults."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--json", action="store_true", help="print the rows as JSON, and nothing else")
        self.add_argument("--smoke", action="store_true", help="the smallest setting: does it still run?")
        self._smoke: dict[str, Any] = {}

    def add(
        self, name: str, default: Any, *, smoke: Any = None, kind: Callable[[str], Any] | None = None, help: str = ""
    ) -> None:
        """An option with a default, and another one with `--smoke` (None: the same)."""
        action = self.add_argument(name, default=default, type=kind or type(default), help=help or None)
        if smoke is not None:
            self._smoke[action.dest] = smoke

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        words = sys.argv[1:] if argv is None else list(argv)
        if "--smoke" in words:
            self.set_defaults(**self._smoke)
        return self.parse_args(words)


def publish(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Print the rows on standard output, as JSON or as a Markdown table."""
    if options.json:
        print(json.dumps([structs.asdict(row) for row in rows]), flush=True)
        return
    print("| workload | metric | ours | peer | theirs | ratio |\n|---|---|---|---|---|---|")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
        print(f"| {row.workload} | {row.metric} | {_shown(row.ours)} | {row.peer} | {_shown(row.theirs)} | {ratio} |")


def _shown(value: Number) -> str:
    return "" if value is None else f"{value:,}"


def say(text: str) -> None:
    """A line of progress, on standard error."""
    print(text, file=sys.stderr, flush=True)
