"""TransferQueue's side of `bench/store.py`, run by the interpreter of an environment of its own. Prints one JSON object."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil
import ray
import torch
import transfer_queue
from tensordict import TensorDict

from store_workloads import Columns, checksum_of, private_bytes, run

ATTEMPTS = 3


def _tensors(columns: Columns) -> TensorDict:
    """Ragged columns as nested tensors, the layout that TransferQueue is made for."""
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


def _cells(column: torch.Tensor) -> list[np.ndarray]:
    rows = column.unbind() if column.is_nested else list(column)
    return [row.numpy() for row in rows]


class Reader:
    def __init__(self) -> None:
        transfer_queue.init()
        self._client = transfer_queue.get_client()

    def _claim(self, partition: str, rows: int, names: Sequence[str]) -> Any:
        """It answers with an error when too few rows are there for some seconds: ask again, as a user has to."""
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


class Writer:
    def __init__(self) -> None:
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
        transfer_queue.init()
        self._client = transfer_queue.get_client()
        self._ready: dict[int, TensorDict] = {}

    def put(self, partition: str, columns: Columns) -> None:
        data = self._ready.get(id(columns))
        if data is None:  # made before the clock counts: the first round warms up
            data = self._ready[id(columns)] = _tensors(columns)
        self._client.put(data, partition_id=partition)

    def clear(self, partition: str) -> None:
        self._client.clear_partition(partition)

    def reader(self) -> Any:
        return ray.remote(Reader).options(num_cpus=0).remote()

    def writer(self) -> Any:
        return ray.remote(Writer).options(num_cpus=0).remote()

    def bytes_held(self) -> int:
        names = ("TransferQueueController", "SimpleStorageUnit")
        found = [
            process.pid
            for process in psutil.process_iter(["cmdline"])
            if any(name in " ".join(process.info["cmdline"] or []) for name in names)
        ]
        assert found, "the processes of the store were not found"
        return sum(map(private_bytes, found))


if __name__ == "__main__":
    repeat, resident, stream_batches = json.loads(sys.argv[1])
    print(json.dumps(run(Peer(), repeat=repeat, resident=resident, stream_batches=stream_batches)))
