"""A process that publishes or fetches weights: a line of JSON in, a line of JSON out.

`python weight_worker.py SOCKET` imports what is needed, and for every line on its standard input it forks such a process, which
connects to the socket: a new one takes milliseconds, where importing torch takes seconds.

Faults are real: `{"do": "fault", "what": "SIGKILL", "at": 3}` sends itself that signal when the third bucket of a broadcast arrives.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from millstream.decoding import decode_msgpack
from millstream.errors import WeightsError
from millstream.types import Weights
from millstream.weights.transfer import WeightsRef, broadcast
from millstream.weights.transfer.base import FetchedWeights
from millstream.weights.transfer.fetcher import WeightsFetcher
from millstream.weights.transfer.publisher import WeightsPublisher


def weights(version: int, num_bytes: int = 1 << 16, device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """Of several types and odd shapes, another content for every version, one after the other."""
    torch.manual_seed(version)
    yield "embedding", torch.randn(num_bytes // 4).to(device)
    yield "half", torch.randn(7, 5).bfloat16().to(device)
    yield "odd", torch.randn(3, 1, 2, 33).to(device)[..., ::2]
    yield "scalar", torch.tensor(float(version)).to(device)
    yield "count", torch.tensor(version).to(device)
    yield "nothing", torch.empty(0, 4).to(device)
    yield "flags", (torch.rand(13) > 0.5).to(device)


def fingerprint(found: Weights) -> str:
    """Names, types, shapes and every byte."""
    said = blake2b(digest_size=16)
    for name, tensor in found.items():
        said.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        said.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return said.hexdigest()


class Worker:
    def __init__(self) -> None:
        self.fetchers: dict[str, WeightsFetcher] = {}
        self.fetched: FetchedWeights | None = None
        self.publisher: WeightsPublisher | None = None

    def take(self, ref: str, node: str, timeout_s: float = 20.0, device: str = "cuda") -> dict[str, Any]:
        """`device`: where "nccl" receives; on a CPU it is gloo."""
        new = WeightsFetcher(node, timeout_s=timeout_s, device=torch.device(device))
        fetcher = self.fetchers.setdefault(f"{node} {device}", new)
        try:
            self.fetched = fetcher.take(decode_msgpack(bytes.fromhex(ref), WeightsRef))
        except WeightsError as error:
            return {"error": type(error).__name__, "says": str(error)}
        return {"version": self.fetched.version, "way": self.fetched.way, **self.look()}

    def look(self) -> dict[str, Any]:
        assert self.fetched is not None
        first = self.fetched.weights["embedding"]
        return {"fingerprint": fingerprint(self.fetched.weights), "at": first.data_ptr(), "device": first.device.type}

    def release(self) -> dict[str, Any]:
        assert self.fetched is not None
        self.fetched.release()
        return {}

    def fault(self, what: str, at: int) -> dict[str, Any]:
        """A signal to itself at bucket `at` of what is fetched next, once."""
        whole = broadcast.verify_bucket

        def verify(bucket: Tensor, number: int, ref: WeightsRef) -> None:
            whole(bucket, number, ref)
            if number == at:
                broadcast.verify_bucket = whole
                os.kill(os.getpid(), signal.Signals[what])

        broadcast.verify_bucket = verify
        return {}

    def open(self, folder: str, ways: list[Any], **options: Any) -> dict[str, Any]:
        self.publisher = WeightsPublisher(Path(folder), node="a", ways=ways, **options)
        return {}

    def put(self, version: int, num_bytes: int = 1 << 16, device: str = "cpu") -> dict[str, Any]:
        assert self.publisher is not None
        return {"ref": msgspec.msgpack.encode(self.publisher.put(version, weights(version, num_bytes, device))).hex()}

    def close(self) -> dict[str, Any]:
        assert self.publisher is not None
        self.publisher.close()
        return {}


def work(address: str) -> None:
    worker = Worker()
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(address)
        lines = end.makefile("rw")
        print(json.dumps({"pid": os.getpid()}), file=lines, flush=True)
        for line in lines:
            order = json.loads(line)
            print(json.dumps(getattr(worker, order.pop("do"))(**order)), file=lines, flush=True)


def main(address: str) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # they are not waited for
    for _ in sys.stdin:
        if not os.fork():
            try:
                work(address)
            finally:
                os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
