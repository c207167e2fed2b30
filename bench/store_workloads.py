"""The workloads of `bench/store.py`, the same for both stores. Needs Ray, numpy and torch, and nothing of ours.

A side has a writer (this process) and readers (Ray actors); both time themselves, and readers sum every byte that they get.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import ray

Columns = dict[str, Any]
RAGGED = {"tokens": np.int32, "mask": np.bool_, "logprobs": np.float32, "advantages": np.float32, "is_prompt": np.bool_}


class Side(Protocol):
    """One store, from the process that started it."""

    def start(self) -> None: ...

    def put(self, partition: str, columns: Columns) -> None: ...

    def clear(self, partition: str) -> None: ...

    def reader(self) -> Any:
        """A Ray actor with `read(partition, rows, names) -> (seconds, checksum)` and
        `drain(partition, rows, names, total) -> rows`, which stops when it has been told or has seen `total`."""
        ...

    def writer(self) -> Any:
        """A Ray actor with `put(partition, columns) -> seconds` and `stream(partition, batches) -> None`."""
        ...

    def bytes_held(self) -> int:
        """Memory of the store's own processes that is theirs alone, and its shared memory."""
        ...


def ragged(rows: int, least: int, most: int, seed: int = 0) -> Columns:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(least, most + 1, rows)
    return {
        name: [rng.integers(0, 2 if kind is np.bool_ else 100, int(length)).astype(kind) for length in lengths]
        for name, kind in RAGGED.items()
    }


def dense(rows: int, columns: int, width: int) -> Columns:
    rng = np.random.default_rng(1)
    return {f"c{i}": rng.random((rows, width), dtype=np.float32) for i in range(columns)}


def size_of(columns: Columns) -> int:
    return sum(
        cells.nbytes if isinstance(cells, np.ndarray) else sum(cell.nbytes for cell in cells)
        for cells in columns.values()
    )


def checksum_of(arrays: Any) -> int:
    """Of every byte of every cell, and of their order. As fast as memory: what is measured is the store."""
    return sum(number * _checksum(cell) for number, cell in enumerate(arrays, 1))


def _checksum(cell: np.ndarray) -> int:
    """The fastest that there is for a short cell, and for a long one."""
    data = np.ascontiguousarray(cell).view(np.uint8)
    return zlib.adler32(data) if data.nbytes < 2048 else int(np.bitwise_xor.reduce(data))


def private_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


def _median(measure: Callable[[], float], repeat: int) -> float:
    return statistics.median(measure() for _ in range(repeat))


def _put_and_read(side: Side, name: str, columns: Columns, repeat: int, rows: int) -> dict[str, float]:
    """Seconds to put all of it, and to claim and read all of it in another process; the first round warms up."""
    reader, puts, reads = side.reader(), [], []
    expected = sum(checksum_of(cells) for cells in columns.values())
    for number in range(repeat + 1):
        partition = f"{name}{number}"
        began = time.perf_counter()
        side.put(partition, columns)
        puts.append(time.perf_counter() - began)
        seconds, checksum = ray.get(reader.read.remote(partition, rows, list(columns)))
        assert checksum == expected, "what was read is not what was written"
        reads.append(seconds)
        side.clear(partition)
    ray.kill(reader)
    return {"put_s": statistics.median(puts[1:]), "read_s": statistics.median(reads[1:])}


def _bare_ray_put(columns: Columns, repeat: int) -> float:
    packed = np.concatenate([np.ascontiguousarray(cell).view(np.uint8) for cells in columns.values() for cell in cells])

    def once() -> float:
        began = time.perf_counter()
        reference = ray.put(packed)
        seconds = time.perf_counter() - began
        del reference
        time.sleep(0.3)
        return seconds

    once()
    return _median(once, repeat)


def _fresh(side: Side, columns: Columns) -> dict[str, float]:
    """Puts that are kept, into memory that was not used before: ours, and a bare `ray.put` of the packed bytes."""
    packed = np.concatenate([np.ascontiguousarray(cell).view(np.uint8) for cells in columns.values() for cell in cells])
    ours, bare, kept = [], [], []
    for _ in range(8):
        began = time.perf_counter()
        side.put("fresh", columns)
        ours.append(time.perf_counter() - began)
        began = time.perf_counter()
        kept.append(ray.put(packed))
        bare.append(time.perf_counter() - began)
    side.clear("fresh")
    del kept
    return {"long_put_fresh_s": statistics.median(ours[4:]), "ray_put_fresh_s": statistics.median(bare[4:])}


def _latency(side: Side, repeat: int) -> dict[str, float]:
    columns = ragged(8, 32, 96, seed=3)
    reader, writer = side.reader(), side.writer()
    puts, reads = [], []
    for _ in range(repeat * 20 + 5):
        puts.append(ray.get(writer.put.remote("latency", columns)))
        reads.append(ray.get(reader.read.remote("latency", 8, list(columns)))[0])
    side.clear("latency")
    ray.kill(reader)
    ray.kill(writer)
    return {"put_ms": 1e3 * statistics.median(puts[5:]), "read_ms": 1e3 * statistics.median(reads[5:])}


def _resident(side: Side, sizes: list[int]) -> dict[str, float]:
    """Milliseconds to claim 8 rows with so many resident."""
    found, resident = {}, 0
    reader = side.reader()
    for size in sizes:
        while resident < size:
            count = min(4096, size - resident)
            side.put("resident", {"value": np.arange(2 * count, dtype=np.int32).reshape(count, 2)})
            resident += count
        times = [ray.get(reader.read.remote("resident", 8, ["value"]))[0] for _ in range(25)]
        resident -= 8 * 25
        found[f"claim_ms_at_{size}"] = 1e3 * statistics.median(times[5:])
    side.clear("resident")
    ray.kill(reader)
    return found


def _stream(side: Side, batches: int) -> dict[str, float]:
    """Rows a second through two producers and two consumers, 16 at a time. Two batches are there before: a partition that two
    producers make at the same moment lost rows of TransferQueue's."""
    readers, writers = [side.reader() for _ in range(2)], [side.writer() for _ in range(2)]
    names, batch = list(RAGGED), ragged(16, 32, 96, seed=4)

    def through(partition: str, count: int) -> float:
        side.put(partition, batch)
        side.put(partition, batch)
        total = (2 * count + 2) * 16
        work = [writer.stream.remote(partition, [batch] * count) for writer in writers]
        seen = sum(ray.get([reader.drain.remote(partition, 16, names, total // 2) for reader in readers]))
        ray.get(work)
        side.clear(partition)
        return seen / total

    through("warm", 2)
    began = time.perf_counter()
    share = through("stream", batches)
    seconds = time.perf_counter() - began
    for actor in (*readers, *writers):
        ray.kill(actor)
    return {"stream_rows_per_s": share * (2 * batches + 2) * 16 / seconds, "stream_share_seen": share}


def _memory(side: Side, columns: Columns, copies: int) -> float:
    before = side.bytes_held()
    for _ in range(copies):
        side.put("memory", columns)
    time.sleep(0.5)
    after = side.bytes_held()
    side.clear("memory")
    return (after - before) / (copies * size_of(columns))


def run(side: Side, *, repeat: int, resident: list[int], stream_batches: int) -> dict[str, float]:
    """Every figure of one side."""
    os.environ.setdefault("RAY_TMPDIR", f"/tmp/store-bench-{os.getpid()}")
    Path(os.environ["RAY_TMPDIR"]).mkdir(exist_ok=True)
    began = time.perf_counter()
    ray.init(address="local", num_cpus=8, object_store_memory=1 << 30, include_dashboard=False, log_to_driver=False)
    found = {"ray_s": time.perf_counter() - began}
    began = time.perf_counter()
    side.start()
    found["start_s"] = time.perf_counter() - began

    def note(**figures: float) -> None:
        found.update(figures)
        print({name: round(value, 4) for name, value in figures.items()}, file=sys.stderr, flush=True)

    long, short, wide = ragged(1024, 1000, 8000), ragged(1024, 32, 96), dense(1024, 9, 8192)
    note(memory_short=_memory(side, short, 8), memory_long=_memory(side, long, 2))
    note(**_fresh(side, long))
    for name, columns in (("long", long), ("short", short), ("wide", wide)):
        times = _put_and_read(side, name, columns, repeat, 1024)
        note(**{f"{name}_{key}": value for key, value in times.items()}, **{f"{name}_bytes": size_of(columns)})
    note(ray_put_s=_bare_ray_put(long, repeat), ray_put_wide_s=_bare_ray_put(wide, repeat))
    note(**{f"latency_{key}": value for key, value in _latency(side, repeat).items()})
    note(**_stream(side, stream_batches))
    note(**_resident(side, resident))
    return found
