"""The parent's side of processes that publish or fetch weights. See `weight_worker` for what they do."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from millstream.decoding import decode_msgpack
from millstream.weights.transfer import WeightsRef
from support.commands import Command


class Peer:
    """The parent's side of one worker."""

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(60)
        self._end = end
        self._lines = end.makefile("rw")
        self.pid = self.hear()["pid"]

    def tell(self, do: str, **order: Any) -> None:
        print(json.dumps({"do": do, **order}), file=self._lines, flush=True)

    def hear(self) -> Any:
        return json.loads(self._lines.readline())

    def ask(self, do: str, **order: Any) -> Any:
        self.tell(do, **order)
        return self.hear()

    def take(self, ref: WeightsRef, *, node: str = "a", **options: Any) -> Any:
        self.tell_take(ref, node=node, **options)
        return self.hear()

    def tell_take(self, ref: WeightsRef, *, node: str = "a", **options: Any) -> None:
        self.tell("take", ref=msgspec.msgpack.encode(ref).hex(), node=node, **options)

    def put(self, version: int, num_bytes: int = 1 << 16, device: str = "cpu") -> WeightsRef:
        said = self.ask("put", version=version, num_bytes=num_bytes, device=device)
        return decode_msgpack(bytes.fromhex(said["ref"]), WeightsRef)

    def stop_at(self, bucket: int, ref: WeightsRef, *, node: str = "b") -> None:
        """Let it fetch by broadcast; returns when it is stopped at this bucket."""
        self.ask("fault", what="SIGSTOP", at=bucket)
        self.tell_take(ref, node=node)
        deadline = time.monotonic() + 60
        while Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            assert time.monotonic() < deadline, "it has not reached that bucket"
            time.sleep(0.01)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Returns when it is gone, and with it its locks."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(OSError):
            while self._end.recv(4096):
                pass
        deadline = time.monotonic() + 10
        while Path(f"/proc/{self.pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._end.close()


@contextmanager
def forks() -> Iterator[Callable[[], Peer]]:
    """A fresh process for each call. They are killed at the end."""
    used: list[Peer] = []
    with tempfile.TemporaryDirectory() as name, socket.socket(socket.AF_UNIX) as door:
        door.bind(f"{name}/door")
        door.listen()
        door.settimeout(60)
        words = [sys.executable, str(Path(__file__).parent / "weight_worker.py"), f"{name}/door"]
        process = Command(words, 1, 2, has_stdin=True)
        assert process.stdin is not None

        def new() -> Peer:
            process.stdin.write("\n")
            process.stdin.flush()
            used.append(Peer(door.accept()[0]))
            return used[-1]

        try:
            yield new
        finally:
            for peer in used:
                peer.kill()
            process.kill()
            process.wait()
