"""A program that draws the terminal view in the terminal that it is started in, with lines of other processes in between."""

from __future__ import annotations

import subprocess
import sys
import time

from rich.console import Console

from millstream.cli.view import View
from millstream.events import SampleShown, Status, WaitNow, Warned
from millstream.events.types import Sample


def main(seconds: float) -> None:
    console = Console()
    waits = [WaitNow(owner="rollouts", what="an engine", seconds=2.0, count=40)]
    counts = {"requests_running": 1, "requests_waiting": 0, "rows_in_store": 0, "groups_outstanding": 1}
    with View(console, num_steps=9, max_lag=1) as view:
        end, number = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            number += 1
            view.emit(Status(at=float(number), groups_taken=0, budget=8, waits=waits * (number % 3), **counts))
            view.emit(Warned(at=float(number), message=f"warning {number} " + "x" * (7 * number % 90)))
            sample = Sample(prompt="2+2=\n\x1b[2J", completion="4" * number, reward=1.0)
            view.emit(SampleShown(at=float(number), group_id=1, member=0, sample=sample))
            if number == 3:
                subprocess.run([sys.executable, "-c", "import os; os.write(2, b'a line of a worker\\n')"], check=True)
                sys.stderr.write("a line of this process\n")
                print("a line that was printed")
            time.sleep(0.1)
    console.print("the end")


if __name__ == "__main__":
    main(float(sys.argv[1]))
