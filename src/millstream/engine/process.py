"""A worker in a process of its own: commands and reports over a socket, weights in shared memory. No pickle.

The child is started as `python -m millstream.engine.process`, so that a script of the user's needs no guard around its main
part. It ends when the socket closes, however the parent died; if it dies itself, the parent reports the engine as broken.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from transformers import AutoConfig, PreTrainedModel

from millstream.engine import EngineConfig
from millstream.engine.batching import batcher_of
from millstream.engine.torch import CLOSE_S, OnReport
from millstream.engine.worker import Close, Command, Report, Worker
from millstream.errors import EngineError, WeightsError
from millstream.frames import Frames, frame
from millstream.model.adapters import add_adapters, lora_of, trained_weights
from millstream.model.load import model_weights, new_model, set_up_cpu
from millstream.model.lora import LoraConfig
from millstream.model.shared import Layout, SharedWeights, anonymous_memory, layout_of
from millstream.types import Weights

SOCKET_BUFFER = 4 << 20


class Plan(Struct, frozen=True, kw_only=True):
    """What the child needs to know, beside the model's own config."""

    config: EngineConfig
    layout: Layout
    dtype: str
    lora: LoraConfig | None
    loaded: list[str]
    """Names of what a `Load` brings: with adapters, these; else everything."""


def _memory_for(layout: Layout) -> int:
    try:
        return anonymous_memory(layout.ends[-1])
    except OSError as error:
        raise EngineError(
            f"no room for {layout.ends[-1] / 2**20:.0f} MiB of shared weights ({error.strerror}): set engine.process = false"
        ) from error


class ProcessHost:
    """Our end. See `millstream.engine.torch.Host`."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        weights = model_weights(model)
        self._loaded = list(trained_weights(model))
        plan = Plan(
            config=config,
            dtype=str(model.dtype).removeprefix("torch."),
            layout=layout_of(weights),
            lora=lora_of(model),
            loaded=self._loaded,
        )
        memory = _memory_for(plan.layout)
        self._shared = SharedWeights(memory, plan.layout)
        self._shared.write(weights)
        folder = Path(tempfile.mkdtemp(prefix="millstream-"))  # a few kilobytes; the child removes it
        model.config.save_pretrained(folder)
        (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
        self._socket, theirs = socket.socketpair()
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        descriptors = [theirs.fileno(), memory]
        command = [sys.executable, "-m", "millstream.engine.process", *map(str, descriptors), str(folder)]
        self._child = subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL, process_group=0)
        theirs.close()
        os.close(memory)
        self._is_closing = False
        self._outbox = bytearray()
        self._pending, self._is_due = b"", False
        self._sending = threading.Lock()

    def start(self, on_report: OnReport) -> None:
        self._reader = threading.Thread(target=self._read, args=(on_report,), name="engine reports", daemon=True)
        self._reader.start()

    def offer(self, weights: Weights) -> None:
        try:
            self._shared.write(weights, only=self._loaded)
        except WeightsError as error:
            raise EngineError(str(error)) from error

    def send(self, command: Command) -> None:
        """Commands of one turn of the event loop go out together: a group's requests are one call to the system."""
        self._is_closing = self._is_closing or isinstance(command, Close)
        self._pending += frame(command)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._send_pending)

    def _send_pending(self) -> None:
        self._is_due = False
        frames, self._pending = self._pending, b""
        with self._sending:
            is_first = not self._outbox
            if is_first:
                try:
                    frames = frames[self._socket.send(frames, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    pass
                except OSError:  # the process is gone: the reader says so to everybody who waits
                    return
            self._outbox += frames
            is_thread_needed = is_first and bool(self._outbox)
        if is_thread_needed:  # it reads more slowly than we write, or not at all: that must not hold the event loop up
            threading.Thread(target=self._send_rest, name="engine commands", daemon=True).start()

    def _send_rest(self) -> None:
        while True:
            with self._sending:
                piece = bytes(self._outbox[: 1 << 20])
            try:
                sent = self._socket.send(piece)
            except OSError:
                sent = len(self._outbox)
            with self._sending:
                del self._outbox[:sent]
                if not self._outbox:
                    return

    def _read(self, on_report: OnReport) -> None:
        frames = Frames(self._socket)
        decoder = msgspec.msgpack.Decoder(Report)
        while (payloads := frames.receive(block=True)) is not None:
            for payload in payloads:
                on_report(decoder.decode(payload))
        code = self._child.wait()
        if not self._is_closing:
            on_report(Report([], [], broken=f"its process ended with exit code {code}"))

    def join(self) -> None:
        try:
            self._child.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
        self._reader.join()
        self._socket.close()


class SocketLink:
    """The child's end. See `millstream.engine.worker.Link`."""

    def __init__(self, line: socket.socket, loaded: Weights) -> None:
        self._line, self._loaded = line, loaded
        self._frames = Frames(line)
        self._decoder = msgspec.msgpack.Decoder(Command)

    def receive(self, *, block: bool) -> list[Command]:
        payloads = self._frames.receive(block=block)
        if payloads is None:
            return [Close()]
        return [self._decoder.decode(payload) for payload in payloads]

    def send(self, report: Report) -> None:
        with suppress(OSError):  # nobody listens any more: the next receive says so
            self._line.sendall(frame(report))

    def weights(self) -> Weights:
        return self._loaded


def main(line: int, memory: int, folder: Path) -> None:
    """The child: rebuild the model from its config and the shared weights, and work until the socket closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent's to handle; when it ends, the socket closes
    set_up_cpu()
    plan = msgspec.json.decode((folder / "plan.json").read_bytes(), type=Plan)
    config = AutoConfig.from_pretrained(folder)
    shutil.rmtree(folder)
    shared = SharedWeights(memory, plan.layout)
    model = new_model(config, seed=0, dtype=getattr(torch, plan.dtype))
    if plan.lora is not None:
        add_adapters(model, plan.lora, seed=0)
    with torch.no_grad():
        for name, own in model_weights(model).items():
            own.copy_(shared.views[name])
    batcher = batcher_of(model, plan.config)
    link = SocketLink(socket.socket(fileno=line), {name: shared.views[name] for name in plan.loaded})
    link.send(Report([], []))  # ready: from here on, silence with work to do is a fault
    Worker(batcher, link).run()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
