"""Weights from one process into the tensors of another: each way beside what people do without it, in the same run.

From the beginning of the sending until the receiver has copied all of it into its own tensors. Ours verifies every byte, the
peers none. Medians of five, after two that do not count: memory that is written for the first time is several times as slow.

    .venv/bin/python bench/weight_channels.py [--json] [--quick]
"""

from __future__ import annotations

import io
import json
import pickle
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from millstream.store.segments import segment_folder
from millstream.weights import TransferWay
from millstream.weights.transfer import WeightsRef
from millstream.weights.transfer.fetcher import WeightsFetcher
from millstream.weights.transfer.publisher import WeightsPublisher

TENSOR_BYTES = 4 << 20
NOT_COUNTED, REPEAT = 2, 5
SIZES = {"64 MB": 64 << 20, "1 GB": 1 << 30}
PAIRS: list[tuple[TransferWay, str]] = [
    ("shared", "torch.save, torch.load in shared memory"),
    ("broadcast", "pickle over TCP"),
    ("files", "safetensors save_file, load_file"),
]


def model(num_bytes: int) -> dict[str, Tensor]:
    return {f"layer.{number}": torch.randn(TENSOR_BYTES // 4) for number in range(num_bytes // TENSOR_BYTES)}


class Receiver:
    """The other process: what it is told to take it copies into tensors of its own, and says so."""

    def __init__(self, num_bytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--receive", str(num_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._hear()

    def __call__(self, what: str, argument: str) -> None:
        self.tell(what, argument)
        self._hear()

    def tell(self, what: str, argument: str) -> None:
        assert self._process.stdin is not None
        print(what, argument, file=self._process.stdin, flush=True)

    def _hear(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "done\n"

    hear = _hear

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def receive(num_bytes: int) -> None:
    own, inbox = model(num_bytes), WeightsFetcher("there")
    near = WeightsFetcher("here")

    def load(found: dict[str, Tensor]) -> None:
        for name, tensor in found.items():
            own[name].copy_(tensor)

    print("done", flush=True)
    for line in sys.stdin:
        what, argument = line.split()
        match what:
            case "shared" | "broadcast" | "files":
                parcel = msgspec.msgpack.decode(bytes.fromhex(argument), type=WeightsRef)
                with (near if what == "shared" else inbox).take(parcel) as taken:
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


def ours(way: TransferWay, weights: dict[str, Tensor], receiver: Receiver, memory: Path, disk: Path) -> float:
    outbox = WeightsPublisher(memory / "slots", node="here", ways=[way], files=disk)

    def send(version: int) -> None:
        receiver(way, msgspec.msgpack.encode(outbox.put(version, weights.items())).hex())

    try:
        return _median(send)
    finally:
        outbox.close()


def theirs(way: TransferWay, weights: dict[str, Tensor], receiver: Receiver, memory: Path, disk: Path) -> float:
    def by_torch(version: int) -> None:
        torch.save(weights, memory / "weights.pt")
        receiver("torch", str(memory / "weights.pt"))

    def by_safetensors(version: int) -> None:
        save_file(weights, disk / "weights.safetensors")
        receiver("safetensors", str(disk / "weights.safetensors"))

    def by_tcp(version: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as door:
            receiver.tell("tcp", str(door.getsockname()[1]))
            end, _ = door.accept()
            with end, end.makefile("wb", buffering=io.DEFAULT_BUFFER_SIZE) as file:
                pickle.dump({name: tensor.numpy() for name, tensor in weights.items()}, file, protocol=5)
        receiver.hear()

    sends: dict[str, Callable[[int], None]] = {"shared": by_torch, "broadcast": by_tcp, "files": by_safetensors}
    return _median(sends[way])


def _median(send: Callable[[int], None]) -> float:
    """Seconds."""
    found = []
    for version in range(NOT_COUNTED + REPEAT):
        began = time.perf_counter()
        send(version)
        found.append(time.perf_counter() - began)
    return statistics.median(found[NOT_COUNTED:])


def rows(name: str, num_bytes: int) -> list[dict[str, Any]]:
    weights, receiver = model(num_bytes), Receiver(num_bytes)
    found = []
    with (
        tempfile.TemporaryDirectory(dir=segment_folder("bench", "here").parent) as memory,
        tempfile.TemporaryDirectory() as disk,
    ):
        for way, peer in PAIRS:
            places = (weights, receiver, Path(memory), Path(disk))
            mine, other = num_bytes / 1e9 / ours(way, *places), num_bytes / 1e9 / theirs(way, *places)
            found.append(
                {
                    "workload": f"{name}, {way}",
                    "metric": "GB/s",
                    "ours": round(mine, 3),
                    "peer": peer,
                    "theirs": round(other, 3),
                    "ratio": round(mine / other, 2),
                }
            )
            print(found[-1], file=sys.stderr)
    receiver.close()
    return found


def main() -> None:
    torch.set_num_threads(1)
    if "--receive" in sys.argv:
        receive(int(sys.argv[-1]))
        return
    sizes = dict(list(SIZES.items())[: 1 if "--quick" in sys.argv else None])
    found = [row for name, num_bytes in sizes.items() for row in rows(name, num_bytes)]
    if "--json" in sys.argv:
        print(json.dumps(found))
        return
    print("| workload | ours, GB/s | peer | theirs | ratio |\n|---|---|---|---|---|")
    for row in found:
        print(f"| {row['workload']} | {row['ours']} | {row['peer']} | {row['theirs']} | {row['ratio']} |")


if __name__ == "__main__":
    main()
