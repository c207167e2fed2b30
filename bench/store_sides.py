"""The two sides of `bench/store.py`, and the workloads, the same for both: our store and TransferQueue, each on a local Ray
cluster, in a Python of its own. Prints the figures as one JSON object.

    python bench/store_sides.py ours|peer '{"repeat": 5, "resident": [1000, 32000], ...}'

A side has a writer (this process) and readers (Ray actors); both time themselves, and readers sum every byte that they get.
The workloads need Ray, numpy and torch, and nothing of Millstream, which the peer's Python does not have.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

import numpy as np
import ray
from numpy.typing import NDArray

if TYPE_CHECKING:
    from internals_ray import StoreAddress, StoreClient

Columns = dict[str, Any]
RAGGED = {"tokens": np.int32, "mask": np.bool_, "logprobs": np.float32, "advantages": np.float32, "is_prompt": np.bool_}
ATTEMPTS = 3
"""Of the peer to claim rows: each waits some seconds."""


class Sizes(TypedDict):
    """How much is measured."""

    repeat: int
    rows: int
    resident: list[int]  # rows in the store when a claim is timed
    stream_batches: int


class Side(Protocol):
    """One store, from the process that started it."""

    def start(self) -> None: ...

    def put(self, partition: str, columns: Columns) -> None: ...

    def clear(self, partition: str) -> None: ...

    def reader(self) -> Any:
        """A Ray actor with `read(partition, rows, names) -> (seconds, checksum)` and
        `drain(partition, rows, names, total) -> rows`, which stops at the end of the stream or when it has seen `total`."""
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


def _checksum(cell: NDArray[Any]) -> int:
    """The fastest method for a short cell, and for a long one."""
    data = np.ascontiguousarray(cell).view(np.uint8)
    # `data.data` would take as long as the checksum of a short cell.
    return zlib.adler32(data) if data.nbytes < 2048 else int(np.bitwise_xor.reduce(data))  # type: ignore[arg-type]


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
    reader, puts, reads = side.reader(), list[float](), list[float]()
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


def _packed(columns: Columns) -> NDArray[np.uint8]:
    return np.concatenate([np.ascontiguousarray(cell).view(np.uint8) for cells in columns.values() for cell in cells])


def _bare_ray_put(columns: Columns, repeat: int) -> float:
    packed = _packed(columns)

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
    packed = _packed(columns)
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
    """Milliseconds to claim 8 rows while this many are resident."""
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
        seen: int = sum(ray.get([reader.drain.remote(partition, 16, names, total // 2) for reader in readers]))
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


def measure(side: Side, sizes: Sizes) -> dict[str, float]:
    """Every figure of one side."""
    rows, repeat = sizes["rows"], sizes["repeat"]
    began = time.perf_counter()
    ray.init(address="local", num_cpus=8, object_store_memory=1 << 30, include_dashboard=False, log_to_driver=False)
    found = {"ray_s": time.perf_counter() - began}
    began = time.perf_counter()
    side.start()
    found["start_s"] = time.perf_counter() - began

    def note(**figures: float) -> None:
        found.update(figures)
        print({name: round(value, 4) for name, value in figures.items()}, file=sys.stderr, flush=True)

    long, short, wide = ragged(rows, 1000, 8000), ragged(rows, 32, 96), dense(rows, 9, 8192)
    note(memory_short=_memory(side, short, 8), memory_long=_memory(side, long, 2))
    note(**_fresh(side, long))
    for name, columns in (("long", long), ("short", short), ("wide", wide)):
        times = _put_and_read(side, name, columns, repeat, rows)
        note(**{f"{name}_{key}": value for key, value in times.items()}, **{f"{name}_bytes": size_of(columns)})
    note(ray_put_s=_bare_ray_put(long, repeat), ray_put_wide_s=_bare_ray_put(wide, repeat))
    note(**{f"latency_{key}": value for key, value in _latency(side, repeat).items()})
    note(**_stream(side, sizes["stream_batches"]))
    note(**_resident(side, sizes["resident"]))
    return found


# ---- ours ------------------------------------------------------------------------------------------------------------------


class _Connected:
    """An actor of ours: a client of the store in a process of its own."""

    def __init__(self, address: StoreAddress) -> None:
        self._address = address
        self._client: StoreClient | None = None

    async def client(self) -> StoreClient:
        if self._client is None:
            from internals_ray import connect

            self._client = await connect(self._address)
        return self._client


class OurReader(_Connected):
    async def read(self, partition: str, rows: int, names: Sequence[str]) -> tuple[float, int]:
        from internals import Want

        store = await self.client()
        began = time.perf_counter()
        lease = await store.claim("all", Want(rows=rows), partition=partition)
        checksum = sum(checksum_of(lease[name]) for name in names)
        seconds = time.perf_counter() - began
        await store.acknowledge(lease)
        return seconds, checksum

    async def drain(self, partition: str, rows: int, names: Sequence[str], total: int) -> int:
        from internals import Want
        from millstream.errors import StreamEnded

        store, seen = await self.client(), 0
        while seen < total:
            try:
                lease = await store.claim("all", Want(rows=rows), partition=partition)
            except StreamEnded:
                break
            for name in names:
                checksum_of(lease[name])
            await store.acknowledge(lease)
            seen += len(lease)
        return seen


class OurWriter(_Connected):
    async def put(self, partition: str, columns: Columns) -> float:
        store = await self.client()
        began = time.perf_counter()
        await store.put(0, columns, partition=partition)
        return time.perf_counter() - began

    async def stream(self, partition: str, batches: Sequence[Columns]) -> None:
        for columns in batches:
            await self.put(partition, columns)


class Ours:
    def start(self) -> None:
        from internals import Reads
        from internals_ray import RayStore

        self._loop = asyncio.new_event_loop()
        self._store = RayStore({"all": Reads((), by_group=False)})
        self._client = self._loop.run_until_complete(self._store.connect())

    def put(self, partition: str, columns: Columns) -> None:
        self._loop.run_until_complete(self._client.put(0, columns, partition=partition))

    def clear(self, partition: str) -> None:
        self._loop.run_until_complete(self._client.drop_partition(partition))

    def reader(self) -> Any:
        return ray.remote(OurReader).options(num_cpus=0).remote(self._store.plan)

    def writer(self) -> Any:
        return ray.remote(OurWriter).options(num_cpus=0).remote(self._store.plan)

    def bytes_held(self) -> int:
        folder = Path(self._store.plan.memory)
        shared = sum(path.stat().st_blocks * 512 for path in folder.iterdir()) if folder.exists() else 0
        return private_bytes(self._store.ask_pid()) + shared


# ---- TransferQueue ---------------------------------------------------------------------------------------------------------


def _tensors(columns: Columns) -> Any:
    """Ragged columns as nested tensors, the layout that TransferQueue is made for."""
    import torch
    from tensordict import TensorDict

    rows = len(next(iter(columns.values())))
    return TensorDict(
        {
            name: torch.from_numpy(cells)
            if isinstance(cells, np.ndarray)
            else torch.nested.as_nested_tensor([torch.from_numpy(cell) for cell in cells], layout=torch.jagged)
            for name, cells in columns.items()
        },
        batch_size=rows,
    )


def _cells(column: Any) -> list[NDArray[Any]]:
    rows = column.unbind() if column.is_nested else list(column)
    return [row.numpy() for row in rows]


class PeerReader:
    def __init__(self) -> None:
        import transfer_queue

        transfer_queue.init()
        self._client = transfer_queue.get_client()

    def _claim(self, partition: str, rows: int, names: Sequence[str]) -> Any:
        """It answers with an error when too few rows are there for some seconds: retry, as a user has to."""
        for _ in range(ATTEMPTS):
            try:
                return self._client.get_meta(
                    data_fields=list(names), batch_size=rows, partition_id=partition, mode="fetch", task_name="all"
                )
            except RuntimeError as error:
                if "Timeout" not in str(error):
                    raise
        return None

    def read(self, partition: str, rows: int, names: Sequence[str]) -> tuple[float, int]:
        began = time.perf_counter()
        data = self._client.get_data(self._claim(partition, rows, names))
        checksum = sum(checksum_of(_cells(data[name])) for name in names)
        return time.perf_counter() - began, checksum

    def drain(self, partition: str, rows: int, names: Sequence[str], total: int) -> int:
        seen = 0
        while seen < total:
            meta = self._claim(partition, rows, names)
            if meta is None:
                break
            data = self._client.get_data(meta)
            for name in names:
                checksum_of(_cells(data[name]))
            seen += meta.size
        return seen


class PeerWriter:
    def __init__(self) -> None:
        import transfer_queue

        transfer_queue.init()
        self._client = transfer_queue.get_client()

    def put(self, partition: str, columns: Columns) -> float:
        data = _tensors(columns)
        began = time.perf_counter()
        self._client.put(data, partition_id=partition)
        return time.perf_counter() - began

    def stream(self, partition: str, batches: Sequence[Columns]) -> None:
        for columns in batches:
            self.put(partition, columns)


class Peer:
    def start(self) -> None:
        import transfer_queue

        transfer_queue.init()
        self._client = transfer_queue.get_client()
        self._ready: dict[int, Any] = {}

    def put(self, partition: str, columns: Columns) -> None:
        data = self._ready.get(id(columns))
        if data is None:  # made before the clock counts: the first round warms up
            data = self._ready[id(columns)] = _tensors(columns)
        self._client.put(data, partition_id=partition)

    def clear(self, partition: str) -> None:
        self._client.clear_partition(partition)

    def reader(self) -> Any:
        return ray.remote(PeerReader).options(num_cpus=0).remote()

    def writer(self) -> Any:
        return ray.remote(PeerWriter).options(num_cpus=0).remote()

    def bytes_held(self) -> int:
        import psutil

        names = ("TransferQueueController", "SimpleStorageUnit")
        found = [
            process.pid
            for process in psutil.process_iter(["cmdline"])
            if any(name in " ".join(process.info["cmdline"] or []) for name in names)
        ]
        assert found, "the processes of the store were not found"
        return sum(map(private_bytes, found))


def main(side: str, sizes: str) -> None:
    with tempfile.TemporaryDirectory(prefix="store-bench-", ignore_cleanup_errors=True) as folder:
        os.environ.setdefault("RAY_TMPDIR", folder)
        print(json.dumps(measure(Ours() if side == "ours" else Peer(), json.loads(sizes))))
        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
