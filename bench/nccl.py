"""NCCL as a transport for weights: what one GPU can show, and two where there are two. Without a GPU: the same code over gloo.

Seconds to make a group of one process, and GB/s of a version from one process to another: by `nccl` where each has a GPU of its
own, beside `broadcast` through the host's memory. On one GPU NCCL refuses two processes: then only `broadcast` is measured,
after the refusal. NCCL between two GPUs has not been run yet.

    .venv/bin/python bench/nccl.py [--json] [--smoke] [--megabytes 1024]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from internals import segment_folder
from internals_torch import TransferWay, WeightsFetcher, WeightsPublisher, WeightsRef, why_no_nccl
from report import Options, Row, alone, not_measured, publish, rate, say

REPEATS = 3
TENSOR_BYTES = 4 << 20


def receive(device: str) -> None:
    """The other process: fetches every reference that it reads, and answers by which way."""
    fetcher = WeightsFetcher("elsewhere", device=torch.device(device))
    for line in sys.stdin:
        with fetcher.take(msgspec.msgpack.decode(bytes.fromhex(line), type=WeightsRef)) as taken:
            print(taken.way, flush=True)


def seconds(ways: Sequence[TransferWay], here: str, there: str, megabytes: int) -> tuple[str, float]:
    """The way that was used, and the median time from a published version to one that has arrived and is verified."""
    weights = {f"{number}": torch.randn(TENSOR_BYTES // 4, device=here) for number in range(megabytes // 4)}
    with tempfile.TemporaryDirectory(dir=segment_folder("bench", "nccl").parent) as folder:
        publisher = WeightsPublisher(Path(folder) / "slots", node="here", ways=ways, device=torch.device(here))
        receiver = subprocess.Popen(
            [sys.executable, __file__, "--receive", there], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert receiver.stdin is not None and receiver.stdout is not None
        took, way = list[float](), ""
        try:
            for version in range(REPEATS + 1):
                ref = publisher.put(version, weights.items())
                began = time.perf_counter()
                print(msgspec.msgpack.encode(ref).hex(), file=receiver.stdin, flush=True)
                way = receiver.stdout.readline().strip()
                took.append(time.perf_counter() - began)
        finally:
            receiver.kill()
            receiver.wait()
            publisher.close()
    return way, statistics.median(took[1:])


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--megabytes", 1024, smoke=8, help="of a version")
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    options = parser.parse(argv)
    if options.receive:
        receive(options.receive)
        return
    gpus = torch.cuda.device_count()
    here, there = ("cuda:0", f"cuda:{min(1, gpus - 1)}") if gpus else ("cpu", "cpu")
    what = f"{gpus} GPUs" if gpus else "no GPU, over gloo"
    began = time.perf_counter()
    why = why_no_nccl(torch.device(here))
    rows: list[Row] = [
        not_measured(what, why) if why else alone(what, "seconds to make a group of one", time.perf_counter() - began)
    ]
    way, took = seconds(["nccl", "broadcast"], here, there, options.megabytes)
    say(f"nccl was offered first, and {way} was used")
    _, plain = seconds(["broadcast"], here, there, options.megabytes)
    gigabytes = options.megabytes / 1024
    rows.append(rate(what, f"GB/s by {way}, where nccl is first", gigabytes / took, "broadcast", gigabytes / plain))
    publish(rows, options)


if __name__ == "__main__":
    main()
