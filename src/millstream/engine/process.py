"""A worker in a process of its own: commands and reports over a socket, weights in shared memory. No pickle.

The child is started as `python -m millstream.engine.process`, so that a script of the user's needs no guard around its main
part. It ends when the socket closes, however the parent died; if it dies itself, the parent reports the engine as broken.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from transformers import AutoConfig, PreTrainedModel

from millstream.engine import EngineConfig
from millstream.engine.batching import Batcher
from millstream.engine.torch import OnReport
from millstream.engine.worker import Close, Command, Report, Worker
from millstream.errors import EngineError
from millstream.model.load import new_model, set_up_cpu
from millstream.types import Weights

HEADER = 4
SOCKET_BUFFER = 4 << 20


class Plan(Struct, frozen=True, kw_only=True):
    """What the child needs to know. Lies as JSON beside the model's config and the shared weights."""

    config: EngineConfig
    dtype: str
    parameters: list[tuple[str, tuple[int, ...]]]


class SharedWeights:
    """All parameters in one file that both processes map."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        dtype = getattr(torch, plan.dtype)
        sizes = [torch.Size(shape).numel() for _, shape in plan.parameters]
        flat = torch.from_file(str(folder / "weights"), shared=True, size=sum(sizes), dtype=dtype)
        parts = torch.split(flat, sizes)
        self.views = {name: part.view(shape) for (name, shape), part in zip(plan.parameters, parts, strict=True)}

    def write(self, weights: Weights) -> None:
        if weights.keys() != self.views.keys():
            raise EngineError(f"the weights do not fit: {sorted(weights.keys() ^ self.views.keys())[:4]}")
        for name, view in self.views.items():
            view.copy_(weights[name].detach())


class ProcessHost:
    """Our end. See `millstream.engine.torch.Host`."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        shared_memory = Path("/dev/shm")
        self._folder = tempfile.TemporaryDirectory(
            prefix="millstream-", dir=shared_memory if shared_memory.is_dir() else None
        )
        folder = Path(self._folder.name)
        parameters = dict(model.named_parameters())
        plan = Plan(
            config=config,
            dtype=str(next(iter(parameters.values())).dtype).removeprefix("torch."),
            parameters=[(name, tuple(parameter.shape)) for name, parameter in parameters.items()],
        )
        model.config.save_pretrained(folder)
        (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
        self._shared = SharedWeights(folder, plan)
        self._shared.write(parameters)
        self._socket, theirs = socket.socketpair()
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        command = [sys.executable, "-m", "millstream.engine.process", str(theirs.fileno()), str(folder)]
        self._child = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._is_closing = False

    def start(self, on_report: OnReport) -> None:
        self._reader = threading.Thread(target=self._read, args=(on_report,), name="engine reports", daemon=True)
        self._reader.start()

    def send(self, command: Command, weights: Weights | None = None) -> None:
        if weights is not None:
            self._shared.write(weights)
        self._is_closing = self._is_closing or isinstance(command, Close)
        with suppress(OSError):  # the process is gone: the reader says so to everybody who waits
            self._socket.sendall(_frame(command))

    def _read(self, on_report: OnReport) -> None:
        frames = _Frames(self._socket)
        decoder = msgspec.msgpack.Decoder(Report)
        while (payloads := frames.receive(block=True)) is not None:
            for payload in payloads:
                on_report(decoder.decode(payload))
        code = self._child.wait()
        if not self._is_closing:
            on_report(Report([], [], broken=f"its process ended with exit code {code}"))

    def join(self) -> None:
        self._child.wait()
        self._reader.join()
        self._socket.close()
        self._folder.cleanup()


def _frame(message: Any) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(HEADER, "little") + payload


class _Frames:
    """Whole messages out of a stream of bytes."""

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        self._buffer = bytearray()

    def receive(self, *, block: bool) -> list[bytes] | None:
        """The messages that are there; with `block`, at least one. None when the other end is gone."""
        while True:
            frames = list(self._cut())
            if frames:
                return frames
            flags = 0 if block else socket.MSG_DONTWAIT
            try:
                data = self._source.recv(1 << 20, flags)
            except BlockingIOError:
                return []
            except OSError:
                return None
            if not data:
                return None
            self._buffer += data

    def _cut(self) -> Iterator[bytes]:
        while len(self._buffer) >= HEADER:
            end = HEADER + int.from_bytes(self._buffer[:HEADER], "little")
            if len(self._buffer) < end:
                return
            yield bytes(self._buffer[HEADER:end])
            del self._buffer[:end]


class SocketLink:
    """The child's end. See `millstream.engine.worker.Link`."""

    def __init__(self, line: socket.socket, shared: SharedWeights) -> None:
        self._line, self._shared = line, shared
        self._frames = _Frames(line)
        self._decoder = msgspec.msgpack.Decoder(Command)

    def receive(self, *, block: bool) -> list[Command]:
        payloads = self._frames.receive(block=block)
        if payloads is None:
            return [Close()]
        return [self._decoder.decode(payload) for payload in payloads]

    def send(self, report: Report) -> None:
        with suppress(OSError):  # nobody listens any more: the next receive says so
            self._line.sendall(_frame(report))

    def weights(self) -> Weights:
        return self._shared.views


def main(descriptor: int, folder: Path) -> None:
    """The child: rebuild the model from its config and the shared weights, and work until the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to handle
    set_up_cpu()
    plan = msgspec.json.decode((folder / "plan.json").read_bytes(), type=Plan)
    shared = SharedWeights(folder, plan)
    model = new_model(AutoConfig.from_pretrained(folder), seed=0, dtype=getattr(torch, plan.dtype))
    batcher = Batcher(model, num_slots=plan.config.slots, prefill_tokens=plan.config.prefill_tokens)
    batcher.load(0, shared.views)
    Worker(batcher, SocketLink(socket.socket(fileno=descriptor), shared)).run()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
