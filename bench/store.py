"""Our store beside TransferQueue, the same workloads one after the other in one run, each in an environment of its own.

Both run on a local Ray cluster with writers and readers in processes of their own; readers sum every byte that they get. What
runs in one process only (`memory`) has no peer and is printed by itself.

    make bench-store        or:   .venv/bin/python bench/store.py [--json] [--repeat 5] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from millstream.store import Reads, Want
from millstream.store.memory import MemoryStore

HERE = Path(__file__).parent
PEER = HERE.parent / ".venv-tq/bin/python"
VERSION = "TransferQueue 0.1.11"
Row = dict[str, Any]


def side(interpreter: str, script: str, arguments: list[Any]) -> dict[str, float]:
    print(f"--- {script}", file=sys.stderr)
    done = subprocess.run(
        [interpreter, script, json.dumps(arguments)], cwd=HERE, stdout=subprocess.PIPE, check=True, text=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def rate(workload: str, metric: str, ours: float, theirs: float, *, per: float = 1.0) -> Row:
    """Both in seconds; the more in one second, the better."""
    return _row(workload, metric, per / ours, per / theirs, per / ours / (per / theirs))


def cost(workload: str, metric: str, ours: float, theirs: float) -> Row:
    """The less, the better."""
    return _row(workload, metric, ours, theirs, theirs / ours)


def _row(workload: str, metric: str, ours: float, theirs: float, ratio: float) -> Row:
    return {
        "workload": workload,
        "metric": metric,
        "ours": round(ours, 3),
        "peer": VERSION,
        "theirs": round(theirs, 3),
        "ratio": round(ratio, 2),
    }


def compare(ours: dict[str, float], theirs: dict[str, float]) -> list[Row]:
    rows = []
    for name, words in (
        ("long", "1,024 rows, 5 ragged columns, 1k to 8k tokens"),
        ("wide", "1,024 x 9 x 8,192 float32"),
    ):
        size = ours[f"{name}_bytes"] / 1e9
        rows += [
            rate(words, f"{what} GB/s", ours[f"{name}_{what}_s"], theirs[f"{name}_{what}_s"], per=size)
            for what in ("put", "read")
        ]
    words = "1,024 rows of 32 to 96 tokens"
    rows += [
        rate(words, f"{what} rows/s", ours[f"short_{what}_s"], theirs[f"short_{what}_s"], per=1024)
        for what in ("put", "read")
    ]
    words = "8 rows x 5 columns"
    rows += [
        cost(words, f"{what} p50 ms", ours[f"latency_{what}_ms"], theirs[f"latency_{what}_ms"])
        for what in ("put", "read")
    ]
    for key in [key for key in ours if key.startswith("claim_ms_at_")]:
        words = f"claim of 8 rows, {key.removeprefix('claim_ms_at_')} resident"
        if key in theirs:
            rows.append(cost(words, "p50 ms", ours[key], theirs[key]))
        else:
            rows.append(_row(words, "p50 ms (peer: not tried)", ours[key], float("nan"), float("nan")))
    words = "streaming, 2 producers, 2 consumers, 16 rows at a time"
    rows.append(_row(words, "rows/s", ours["stream_rows_per_s"], theirs["stream_rows_per_s"],
                     ours["stream_rows_per_s"] / theirs["stream_rows_per_s"]))  # fmt: skip
    rows.append(_row(words, "share of rows seen", ours["stream_share_seen"], theirs["stream_share_seen"],
                     ours["stream_share_seen"] / max(theirs["stream_share_seen"], 1e-9)))  # fmt: skip
    rows += [cost(f"memory over payload, {name} rows", "x", ours[f"memory_{name}"], theirs[f"memory_{name}"])
             for name in ("long", "short")]  # fmt: skip
    rows.append(cost("start, beyond Ray's own", "s", ours["start_s"], theirs["start_s"]))
    return rows


def against_ray(ours: dict[str, float]) -> list[Row]:
    """A put against a bare `ray.put` of the same bytes, packed already, in the same run: into memory used before, and
    into fresh memory."""
    size, words = ours["long_bytes"] / 1e9, "1,024 rows, 5 ragged columns, 1k to 8k tokens"
    used = rate(words, "put GB/s, memory used before", ours["long_put_s"], ours["ray_put_s"], per=size)
    fresh = rate(words, "put GB/s, fresh memory", ours["long_put_fresh_s"], ours["ray_put_fresh_s"], per=size)
    return [{**row, "peer": "bare ray.put, packed"} for row in (used, fresh)]


async def in_memory(num_rows: int, num_tasks: int, batch: int, resident: int = 0) -> float:
    """Rows a second that are put, claimed by every task and acknowledged, in one process."""
    tasks = {f"task{i}": Reads(("tokens",), by_group=False) for i in range(num_tasks)}
    store = MemoryStore(tasks)
    cells = [np.arange(64, dtype=np.int32)] * batch
    if resident:
        await store.put(range(resident), {"tokens": [cells[0]] * resident}, partition="resident")
    began = time.perf_counter()
    for first in range(0, num_rows, batch):
        await store.put([row // 8 for row in range(first, first + batch)], {"tokens": cells})
        for task in tasks:
            await store.acknowledge(await store.claim(task, Want(rows=batch)))
    return num_rows / (time.perf_counter() - began)


async def many_waiting(num_consumers: int) -> float:
    """Rows a second through a store that so many consumers wait at, one row each."""
    store = MemoryStore({"all": Reads(("x",), by_group=False)})
    waiting = [asyncio.create_task(store.claim("all", Want(rows=1))) for _ in range(num_consumers)]
    await asyncio.sleep(0)
    began = time.perf_counter()
    for first in range(0, num_consumers, 100):
        await store.put(range(first, first + 100), {"x": list(range(100))})
    await asyncio.gather(*waiting)
    return num_consumers / (time.perf_counter() - began)


def memory_table() -> None:
    figures = {
        "put and claimed, batches of 256, 1 task": asyncio.run(in_memory(200_000, 1, 256)),
        "put and claimed, batches of 256, 1 task, 1M rows resident": asyncio.run(in_memory(200_000, 1, 256, 1_000_000)),
        "put and claimed, batches of 256, 8 tasks": asyncio.run(in_memory(50_000, 8, 256)),
        "10,000 waiting consumers, one row each": asyncio.run(many_waiting(10_000)),
    }
    print("\n| `memory`, one process | rows/s |\n|---|---|", file=sys.stderr)
    for name, value in figures.items():
        print(f"| {name} | {value:,.0f} |", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="not a million resident rows")
    options = parser.parse_args()
    if not PEER.exists():
        sys.exit(f"{PEER} is missing: type make bench-store")
    resident = [1_000, 32_000]
    theirs = side(str(PEER), "store_peer.py", [options.repeat, resident, 100])
    ours = side(sys.executable, "store_ours.py", [options.repeat, resident + [1_000_000] * (not options.quick), 1000])
    rows = [*compare(ours, theirs), *against_ray(ours)]
    if options.json:
        print(json.dumps(rows))
    print("| workload | metric | ours | peer | theirs | ratio |\n|---|---|---|---|---|---|", file=sys.stderr)
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |", file=sys.stderr)
    memory_table()


if __name__ == "__main__":
    main()
