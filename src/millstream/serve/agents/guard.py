"""A process that outlives the run by a moment: it ends the agents of a run that was killed, and removes their folder.

Reads lines from its standard input: `+PID` when an agent has started, `-PID` when it has ended, `end` at the end of the run.
When the run's process is gone, what is still there is killed, with its process group. Started as a file, with nothing but the
standard library.
"""

import os
import select
import shutil
import signal
import sys
from contextlib import suppress

LOOK_S = 1.0


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends its agents by itself
    parent, running, rest, is_over = int(sys.argv[2]), set[int](), b"", False
    while os.getppid() == parent and not is_over:  # the pipe may be held open by a process that the run has forked
        if not select.select([0], [], [], LOOK_S)[0]:
            continue
        read = os.read(0, 1 << 16)
        *lines, rest = (rest + read).split(b"\n")
        is_over = not read or b"end" in lines
        for line in lines:
            if line != b"end":
                (running.add if line[:1] == b"+" else running.discard)(int(line[1:]))
    for pid in running:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
