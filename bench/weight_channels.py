"""Weights from one process into the tensors of another: each way beside what is common without it, in the same run.

From the start of the sending until the receiver has copied all of it into its own tensors. Ours verifies every byte, the peers
none. Medians of five, after two that do not count: memory that is written for the first time is several times as slow.

    .venv/bin/python bench/weight_channels.py [--json] [--smoke] [--sizes-mb 64,1024]
"""

from __future__ import annotations

import argparse
import io
import pickle
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from internals import segment_folder
from internals_torch import TransferWay, WeightsFetcher, WeightsPublisher, WeightsRef
from report import Options, Row, publish, rate, say

TENSOR_BYTES = 4 << 20
NOT_COUNTED = 2
PAIRS: list[tuple[TransferWay, str]] = [
    ("shared", "torch.save, torch.load in shared memory"),
    ("broadcast", "pickle over TCP"),
    ("files", "safetensors save_file, load_file"),
]


def model(num_bytes: int) -> dict[str, Tensor]:
    return {f"layer.{number}": torch.randn(TENSOR_BYTES // 4) for number in range(num_bytes // TENSOR_BYTES)}


class Receiver:
    """The other process: copies what it is sent into tensors of its own, and confirms."""

    def __init__(self, num_bytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--receive", str(num_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.hear()

    def __call__(self, what: str, argument: str) -> None:
        self.send(what, argument)
        self.hear()

    def send(self, what: str, argument: str) -> None:
        assert self._process.stdin is not None
        print(what, argument, file=self._process.stdin, flush=True)

    def hear(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "done\n"

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def receive(num_bytes: int) -> None:
    own = model(num_bytes)
    elsewhere, same_node = WeightsFetcher("there"), WeightsFetcher("here")

    def load(found: dict[str, Tensor]) -> None:
        for name, tensor in found.items():
            own[name].copy_(tensor)

    print("done", flush=True)
    for line in sys.stdin:
        what, argument = line.split()
        match what:
            case "shared" | "broadcast" | "files":
                reference = msgspec.msgpack.decode(bytes.fromhex(argument), type=WeightsRef)
                with (same_node if what == "shared" else elsewhere).take(reference) as taken:
                    assert taken.way == what
                    load(taken.weights)
            case "torch":
                load(torch.load(argument))
            case "safetensors":
                load(load_file(argument))
            case "tcp":
                with socket.create_connection(("127.0.0.1", int(argument))) as end, end.makefile("rb") as file:
                    load({name: torch.from_numpy(array) for name, array in pickle.load(file).items()})
        print("done", flush=True)


Send = Callable[[int], None]
"""Sends a version, and returns when the receiver has it."""


def ours(
    way: TransferWay, weights: dict[str, Tensor], receiver: Receiver, memory: Path, disk: Path, repeat: int
) -> float:
    publisher = WeightsPublisher(memory / "slots", node="here", ways=[way], files=disk)

    def send(version: int) -> None:
        receiver(way, msgspec.msgpack.encode(publisher.put(version, weights.items())).hex())

    try:
        return _median(send, repeat)
    finally:
        publisher.close()


def theirs(
    way: TransferWay, weights: dict[str, Tensor], receiver: Receiver, memory: Path, disk: Path, repeat: int
) -> float:
    def by_torch(version: int) -> None:
        torch.save(weights, memory / "weights.pt")
        receiver("torch", str(memory / "weights.pt"))

    def by_safetensors(version: int) -> None:
        save_file(weights, disk / "weights.safetensors")
        receiver("safetensors", str(disk / "weights.safetensors"))

    def by_tcp(version: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            receiver.send("tcp", str(server.getsockname()[1]))
            end, _ = server.accept()
            with end, end.makefile("wb", buffering=io.DEFAULT_BUFFER_SIZE) as file:
                pickle.dump({name: tensor.numpy() for name, tensor in weights.items()}, file, protocol=5)
        receiver.hear()

    sends: dict[str, Send] = {"shared": by_torch, "broadcast": by_tcp, "files": by_safetensors}
    return _median(sends[way], repeat)


def _median(send: Send, repeat: int) -> float:
    """Seconds."""
    found = []
    for version in range(NOT_COUNTED + repeat):
        began = time.perf_counter()
        send(version)
        found.append(time.perf_counter() - began)
    return statistics.median(found[NOT_COUNTED:])


def rows_of(size_mb: int, repeat: int) -> list[Row]:
    num_bytes = size_mb << 20
    weights, receiver = model(num_bytes), Receiver(num_bytes)
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(dir=segment_folder("bench", "here").parent) as memory,
        tempfile.TemporaryDirectory() as disk,
    ):
        for way, peer in PAIRS:
            mine, other = (
                num_bytes / 1e9 / side(way, weights, receiver, Path(memory), Path(disk), repeat)
                for side in (ours, theirs)
            )
            rows.append(rate(f"{size_mb} MB, {way}", "GB/s", mine, peer, other))
            say(str(rows[-1]))
    receiver.close()
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    torch.set_num_threads(1)
    parser = Options(__doc__)
    parser.add("--sizes-mb", "64,1024", smoke="8")
    parser.add("--repeat", 5, smoke=1)
    parser.add_argument("--receive", type=int, help=argparse.SUPPRESS)
    options = parser.parse(argv)
    if options.receive:
        receive(options.receive)
        return
    rows = [row for size in options.sizes_mb.split(",") for row in rows_of(int(size), options.repeat)]
    publish(rows, options)


if __name__ == "__main__":
    main()
