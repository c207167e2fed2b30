"""The view in a real pseudo-terminal: one box, whatever else is written and however often its size changes. Where a terminal
cannot be redrawn there are lines. `make test-trackers` has pyte, which knows what a terminal shows."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, ConsoleDimensions

from millstream.cli import main, plan
from millstream.cli.show import Lines
from millstream.cli.view import View, can_redraw
from millstream.pipeline.schedule import PipelineConfig

ROOT = Path(__file__).parents[2]


class Terminal:
    """A pseudo-terminal of this size, and all that was written to it."""

    def __init__(self, columns: int, lines: int) -> None:
        self.master, self.slave = pty.openpty()
        self.data = b""
        self.resize(columns, lines)
        threading.Thread(target=self._read, daemon=True).start()

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def _read(self) -> None:
        while True:
            try:
                self.data += os.read(self.master, 65536)
            except OSError:
                return

    def console(self) -> Console:
        return Console(file=os.fdopen(os.dup(self.slave), "w"), _environ={"TERM": "xterm"})


@pytest.fixture(autouse=True)
def no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CI", "TERM", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def test_the_view_is_drawn_in_terminals_only_not_in_pipes_dumb_terminals_and_the_logs_of_ci(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal(80, 24)
    assert can_redraw(terminal.console())
    dumb = Console(file=os.fdopen(os.dup(terminal.slave), "w"), _environ={"TERM": "dumb"})
    assert not can_redraw(dumb) and not can_redraw(Console(file=io.StringIO(), force_terminal=True))
    monkeypatch.setenv("CI", "true")
    assert not can_redraw(terminal.console())
    monkeypatch.setattr(main, "console", terminal.console())
    with main._shown(PipelineConfig()) as (shown,):
        assert isinstance(shown, Lines)


def test_a_terminal_whose_size_changes_is_cleared_and_drawn_from_the_top() -> None:
    terminal = Terminal(80, 24)
    console = terminal.console()
    console.size = ConsoleDimensions(80, 24)
    with View(console, num_steps=9, max_lag=1) as view:
        view._live.refresh()
        console.size = ConsoleDimensions(40, 24)
        view._live.refresh()
        view._live.refresh()
        until(lambda: terminal.data.count(b"\x1b[2J\x1b[H") == 1)
    until(lambda: "╯".encode() in terminal.data.rpartition(b"\x1b[2J")[2])
    after = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.data.rpartition(b"\x1b[2J")[2].decode())
    assert {len(line) for line in after.splitlines() if line.startswith("│")} == {40}


@pytest.mark.parametrize("width", [20, 40, 80])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    console.print(View(Console(file=io.StringIO()), num_steps=1000, max_lag=1))
    assert max(map(len, console.file.getvalue().splitlines())) <= width  # type: ignore[attr-defined]


def test_there_is_one_box_and_every_line_of_others_above_it_through_changes_of_size() -> None:
    pyte = pytest.importorskip("pyte")
    terminal = Terminal(100, 30)
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, str(ROOT / "tests/support/draw_view.py"), "4"]
    streams = {"stdin": terminal.slave, "stdout": terminal.slave, "stderr": terminal.slave}
    with subprocess.Popen(program, env=environment, start_new_session=True, **streams) as running:
        until(lambda: b"warning 12" in terminal.data)
        screen = shown(pyte, terminal.data, 100, 30)
        assert sum(line.startswith("╭") for line in screen) <= 1, "it may be half drawn"
        assert [line.rstrip() for line in screen[:3]] == LINES
        for columns, lines in ((50, 30), (120, 12), (40, 40)):
            terminal.resize(columns, lines)
            time.sleep(0.6)  # two drawings
        running.wait(60)
    until(lambda: b"the end" in terminal.data)
    screen = shown(pyte, terminal.data.rpartition(b"\x1b[2J\x1b[H")[2], 40, 40)
    assert sum(line.startswith("╭") for line in screen) == sum(line.startswith("╰") for line in screen) == 1
    assert [line.rstrip() for line in screen if line.strip()][-1] == "the end"
    assert not any("\x1b" in line for line in screen)


LINES = ["a line of a worker", "a line of this process", "a line that was printed"]


def shown(pyte: Any, data: bytes, columns: int, lines: int) -> list[str]:
    screen = pyte.Screen(columns, lines)
    pyte.ByteStream(screen).feed(data)
    return list(screen.display)


def until(is_true: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


class Searching:
    """A planner that has simulated a setting."""

    def report(self, num_simulated: int) -> None:
        raise AssertionError("it is replaced")


def test_a_search_for_a_plan_says_how_far_it_is_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    errors, planner = Console(file=io.StringIO()), Searching()
    monkeypatch.setattr(plan, "errors", errors)
    monkeypatch.setattr(plan, "PROGRESS_S", 0.0)
    with plan._progress(planner):  # type: ignore[arg-type]
        planner.report(3)
        planner.report(4)
    lines = errors.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines == ["searching: simulates one setting after another", "settings simulated: 3", "settings simulated: 4"]
