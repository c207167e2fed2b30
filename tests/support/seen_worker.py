"""A worker that says which GPUs it sees, for tests of where processes are placed."""

from __future__ import annotations

import os
import socket

from msgspec import Struct

from millstream.rpc.frames import Frames, frame
from millstream.rpc.process import WorkerProcess


class Seen(Struct):
    gpus: str | None  # CUDA_VISIBLE_DEVICES
    node: str


def serve_seen(connection: socket.socket) -> None:
    connection.recv(1)  # the starter speaks first, as in every worker's protocol
    connection.sendall(frame(Seen(os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("MILLSTREAM_NODE", ""))))
    connection.recv(1)  # until the other end is closed


def ask(worker: WorkerProcess) -> Seen:
    """In the starter's process."""
    worker.connection.settimeout(60)
    worker.connection.sendall(b"?")
    found = Frames(worker.connection).first_as(Seen)
    assert found is not None
    return found
