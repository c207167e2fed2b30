"""A process that outlives the run by a moment: it ends the agents of a run that was killed, and removes their folder.

Reads lines from its standard input: `+PID` when an agent has started, `-PID` when it has ended. When the input ends, what is
still there is killed, with its process group. Started as a file, with nothing but the standard library.
"""

import os
import shutil
import signal
import sys
from contextlib import suppress


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends its agents by itself
    running: set[int] = set()
    for line in sys.stdin:
        (running.add if line[0] == "+" else running.discard)(int(line[1:]))
    for pid in running:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
