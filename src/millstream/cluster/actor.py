"""A worker process on a node of a Ray cluster: it connects to the run, and serves that connection as a local worker does.

Ray places it and reports its death. It identifies itself with a ticket that is valid for one connection. It exits when the
connection closes, at once and whatever it is doing, with every process that it started.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from contextlib import suppress

import ray
from msgspec import Struct

from millstream.rpc.frames import frame, keep_alive
from millstream.rpc.process import HOST, NO_GPUS, NODE
from millstream.rpc.serve import end_process, exit_with, write_stacks_on_signal
from millstream.rpc.worker import serve_target

CONNECT_S = 30.0
EXIT_S = 5.0


class RayHello(Struct, frozen=True):
    """The first message on a connection, from the worker."""

    ticket: str
    pid: int
    node: str


class RayProcess:
    """A Ray actor. `run` never returns: the process exits when the worker has finished."""

    def run(self, target: str, host: str, port: int, is_on_loopback: bool, ticket: str, sees_gpus: bool) -> None:
        if not sees_gpus:  # Ray leaves all GPUs of the node visible to an actor that has none
            os.environ.update(NO_GPUS)
        node = ray.get_runtime_context().get_node_id()
        os.environ[NODE] = node
        os.environ[HOST] = "127.0.0.1" if is_on_loopback else ray.util.get_node_ip_address()
        with suppress(ValueError):  # `kill -USR1` writes its stacks to Ray's log
            write_stacks_on_signal()
        with suppress(PermissionError):  # it leads a process group already
            os.setpgid(0, 0)
        connection = socket.create_connection((host, port), timeout=CONNECT_S)
        connection.settimeout(None)
        keep_alive(connection)
        connection.sendall(frame(RayHello(ticket, os.getpid(), node)))
        threading.Thread(target=exit_with, args=(connection,), name="connection watch", daemon=True).start()
        serve_connection(target, connection)
        last_resort = threading.Timer(EXIT_S, os._exit, (0,))  # a library may keep the interpreter from exiting
        last_resort.daemon = True
        last_resort.start()
        ray.actor.exit_actor()


def serve_connection(target: str, connection: socket.socket) -> None:
    """Returns when the worker has finished. If it raises, the process is killed at once: otherwise the actor would keep its
    resources, and an open connection on which nothing is sent."""
    try:
        serve_target(target, connection)
    except BaseException:  # process boundary: Ray's log has the traceback, the run sees the connection close
        traceback.print_exc()
        _kill_group()


def _kill_group() -> None:
    sys.stderr.flush()
    end_process()
