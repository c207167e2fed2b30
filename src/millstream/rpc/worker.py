"""python -m millstream.rpc.worker TARGET DESCRIPTOR: the main program of a worker process on this machine.

TARGET is `package.module:function`; the function gets the connection, whose descriptor is inherited, and returns when the
worker is closed. A module without a function means its `work`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable

from millstream import imports
from millstream.rpc.process import restore_environment

Work = Callable[[socket.socket], None]
INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


def load_target(target: str) -> Work:
    found: Work = imports.load_function(target if ":" in target else f"{target}:work")
    return found


def serve_target(target: str, connection: socket.socket) -> None:
    """Returns when the worker is closed. A target that cannot be imported is the answer to its setup."""
    try:
        work = load_target(target)
    except Exception as error:  # process boundary: the other end gets the reason
        from millstream.rpc.serve import refuse_setup  # not needed otherwise

        refuse_setup(connection, error)
    else:
        work(connection)


def _ignore_interrupts() -> None:
    """In this process alone. What it starts can be ended by them: an exec drops the handlers, a fork restores the defaults, and
    interrupts are blocked until then."""

    def in_child() -> None:
        for number in INTERRUPTS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)

    for number in INTERRUPTS:
        signal.signal(number, lambda number, frame: None)
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS),
        after_in_child=in_child,
    )


def run_worker(target: str, descriptor: int) -> None:
    """Interrupts are the starter's to handle: when it ends, the connection closes."""
    _ignore_interrupts()
    os.set_inheritable(descriptor, False)
    serve_target(target, socket.socket(fileno=descriptor))
    sys.stderr.flush()
    os._exit(0)  # at once: a library's threads may keep an interpreter from exiting


if __name__ == "__main__":
    restore_environment()
    run_worker(sys.argv[1], int(sys.argv[2]))
