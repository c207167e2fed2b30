"""A process of a Ray cluster that works for a run: it calls the run, and does from then on what the run says over that line.

Ray places it and watches over it. It says who it is with a ticket that is good for one call. It ends with the line, at once and
whatever it is doing, with every process that it started.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress

import ray
from msgspec import Struct

from millstream.rpc.frames import frame
from millstream.rpc.process import HOST, NODE
from millstream.rpc.worker import load_target

CALL_S = 30.0
EXIT_S = 5.0
LOST_MS = 20_000
"""A line on which nothing is acknowledged for so long is lost: the other node may be unreachable, and say nothing."""


class Hello(Struct, frozen=True):
    ticket: str
    pid: int
    node: str


class RayProcess:
    """A Ray actor. `run` never returns: when the work is over, so is the process."""

    def run(self, module: str, host: str, port: int, ticket: str, is_on_loopback: bool) -> None:
        node = ray.get_runtime_context().get_node_id()
        os.environ[NODE] = node
        os.environ[HOST] = "127.0.0.1" if is_on_loopback else ray.util.get_node_ip_address()
        faulthandler.register(
            signal.SIGUSR1, all_threads=True
        )  # `kill -USR1`: what hangs is in Ray's log of this process
        with suppress(PermissionError):  # it leads a group already
            os.setpgid(0, 0)
        line = socket.create_connection((host, port), timeout=CALL_S)
        line.settimeout(None)
        keep_alive(line)
        line.sendall(frame(Hello(ticket, os.getpid(), node)))
        threading.Thread(target=_end_with, args=(line,), name="the line to the run", daemon=True).start()
        carry_out(module, line)
        last_resort = threading.Timer(EXIT_S, os._exit, (0,))  # a library may hold on to what it has
        last_resort.daemon = True
        last_resort.start()
        ray.actor.exit_actor()


def carry_out(module: str, line: socket.socket) -> None:
    """Returns when the work is over. Where it raises, the process ends at once: the actor would stay, with its place and with
    an open line on which nobody says anything."""
    try:
        load_target(module)(line)
    except BaseException:  # the border of the process: it ends, and its line with it
        traceback.print_exc()  # in Ray's log of this process
        _end()


def keep_alive(line: socket.socket) -> None:
    """Notice that the other end is gone, be it that its machine is and nobody can say so."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", LOST_MS),
    ):
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _end_with(line: socket.socket) -> None:
    hung_up = select.poll()
    hung_up.register(line, getattr(select, "POLLRDHUP", 0x2000) | select.POLLHUP | select.POLLERR)
    hung_up.poll()
    _end()


def _end() -> None:
    """At once, with every process that it started."""
    sys.stderr.flush()
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
