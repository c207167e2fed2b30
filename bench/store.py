"""Our store beside TransferQueue, the same workloads one after the other in one run, each in a Python of its own.

Both run on a local Ray cluster with writers and readers in processes of their own; readers sum every byte that they get
(`store_sides.py`). What runs in one process only (`memory`) has no peer.

    make bench-store        or:   .venv/bin/python bench/store.py [--json] [--smoke] [--repeat 5] [--quick]

With `--nodes 1,2,4,8` or `--clients 1,2,4,8` only what `store_nodes.py` measures, which needs neither Ray nor TransferQueue.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from internals import MemoryStore, Reads, Want
from report import ROOT, Options, Row, alone, not_measured, publish, say
from report import cost as report_cost
from report import rate as report_rate
from store_nodes import coordinator_rows, node_rows

if TYPE_CHECKING:
    from store_sides import Sizes

PEER = ROOT / ".venv-tq/bin/python"
VERSION = "TransferQueue 0.1.11"
Figures = dict[str, float]


def side(python: str, name: str, sizes: Sizes) -> Figures:
    say(f"--- {name}")
    script = Path(__file__).with_name("store_sides.py")
    words = [python, str(script), name, json.dumps(sizes)]
    done = subprocess.run(words, stdout=subprocess.PIPE, check=True, text=True)
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


class Comparison:
    """Rows of two sides' figures, which are seconds, milliseconds or shares under the same names."""

    def __init__(self, ours: Figures, peer: str, theirs: Figures) -> None:
        self._ours = ours
        self._peer = peer
        self._theirs = theirs
        self.rows: list[Row] = []

    def rate(self, workload: str, metric: str, key: str, *, per: float) -> None:
        """The figures are seconds for `per` of something."""
        ours, theirs = per / self._ours[key], per / self._theirs[key]
        self.rows.append(report_rate(workload, metric, ours, self._peer, theirs))

    def more(self, workload: str, metric: str, key: str) -> None:
        self.rows.append(report_rate(workload, metric, self._ours[key], self._peer, self._theirs[key]))

    def less(self, workload: str, metric: str, key: str) -> None:
        if key in self._theirs:
            self.rows.append(report_cost(workload, metric, self._ours[key], self._peer, self._theirs[key]))
        else:
            self.rows.append(alone(workload, f"{metric} (peer: not tried)", self._ours[key]))


def compare(ours: Figures, peer: str, theirs: Figures, num_rows: int) -> list[Row]:
    table = Comparison(ours, peer, theirs)
    long, wide = _words(num_rows), f"{num_rows:,} x 9 x 8,192 float32"
    for what in ("put", "read"):
        table.rate(long, f"{what} GB/s", f"long_{what}_s", per=ours["long_bytes"] / 1e9)
        table.rate(wide, f"{what} GB/s", f"wide_{what}_s", per=ours["wide_bytes"] / 1e9)
        table.rate(f"{num_rows:,} rows of 32 to 96 tokens", f"{what} rows/s", f"short_{what}_s", per=num_rows)
        table.less("8 rows x 5 columns", f"{what} p50 ms", f"latency_{what}_ms")
    for key in [key for key in ours if key.startswith("claim_ms_at_")]:
        table.less(f"claim of 8 rows, {key.removeprefix('claim_ms_at_')} resident", "p50 ms", key)
    streaming = "streaming, 2 producers, 2 consumers, 16 rows at a time"
    table.more(streaming, "rows/s", "stream_rows_per_s")
    table.more(streaming, "share of rows seen", "stream_share_seen")
    for name in ("long", "short"):
        table.less(f"memory over payload, {name} rows", "x", f"memory_{name}")
    table.less("start, beyond Ray's own", "s", "start_s")
    return table.rows


def against_ray(ours: Figures, num_rows: int) -> list[Row]:
    """A put against a bare `ray.put` of the same bytes, packed already, in the same run: into memory used before, and
    into fresh memory."""
    size, words, peer = ours["long_bytes"] / 1e9, _words(num_rows), "bare ray.put, packed"
    return [
        report_rate(words, f"put GB/s, {memory}", size / ours[mine], peer, size / ours[theirs])
        for memory, mine, theirs in (
            ("memory used before", "long_put_s", "ray_put_s"),
            ("fresh memory", "long_put_fresh_s", "ray_put_fresh_s"),
        )
    ]


def _words(num_rows: int) -> str:
    return f"{num_rows:,} rows, 5 ragged columns, 1k to 8k tokens"


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
    """Rows a second through a store that this many consumers wait at, one row each."""
    store = MemoryStore({"all": Reads(("x",), by_group=False)})
    waiting = [asyncio.create_task(store.claim("all", Want(rows=1))) for _ in range(num_consumers)]
    await asyncio.sleep(0)
    began = time.perf_counter()
    for first in range(0, num_consumers, 100):
        await store.put(range(first, first + 100), {"x": list(range(100))})
    await asyncio.gather(*waiting)
    return num_consumers / (time.perf_counter() - began)


def memory_rows(scale: int) -> list[Row]:
    """One process. `scale` divides the numbers of rows."""
    figures = {
        "put and claimed, batches of 256, 1 task": in_memory(200_000 // scale, 1, 256),
        "put and claimed, batches of 256, 1 task, 1M rows resident": in_memory(
            200_000 // scale, 1, 256, 1_000_000 // scale
        ),
        "put and claimed, batches of 256, 8 tasks": in_memory(50_000 // scale, 8, 256),
        "10,000 waiting consumers, one row each": many_waiting(10_000 // scale),
    }
    return [alone(f"memory: {name}", "rows/s", asyncio.run(work), digits=0) for name, work in figures.items()]


def on_ray(options: argparse.Namespace) -> list[Row]:
    if importlib.util.find_spec("ray") is None:
        return [not_measured("the store on Ray", "needs Ray: type `make bench-store`")]
    if not PEER.exists() and not options.smoke:
        sys.exit(f"{PEER} is missing: type make bench-store")
    resident = [400] if options.smoke else [1_000, 32_000]
    sizes: Sizes = {
        "repeat": options.repeat,
        "rows": options.rows,
        "resident": resident + [1_000_000] * (not options.quick and not options.smoke),
        "stream_batches": 2 if options.smoke else 1000,
    }
    ours = side(sys.executable, "ours", sizes)
    if PEER.exists():
        fewer: Sizes = {**sizes, "resident": resident, "stream_batches": min(100, sizes["stream_batches"])}
        rows = compare(ours, VERSION, side(str(PEER), "peer", fewer), options.rows)
    else:
        rows = compare(ours, f"stub ({VERSION} is not installed)", ours, options.rows)
    return [*rows, *against_ray(ours, options.rows)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--repeat", 5, smoke=1)
    parser.add("--rows", 1024, smoke=8)
    parser.add_argument("--quick", action="store_true", help="not a million resident rows")
    parser.add("--nodes", [], kind=_numbers, help="payload bandwidth against this many nodes: 1,2,4,8")
    parser.add_argument("--ray", action="store_true", help="--nodes are of a Ray cluster on this machine")
    parser.add("--clients", [], kind=_numbers, help="operations/s of the coordinator with this many clients: 1,2,4,8")
    parser.add("--shards", [1], kind=_numbers, help="--clients of stores of this many coordinators: 1,2,4")
    parser.add("--seconds", 3.0, smoke=0.2, help="of each measurement of nodes and clients")
    options = parser.parse(argv)
    if options.nodes or options.clients:
        rows = node_rows(options.nodes, options.seconds, on_ray=options.ray)
        publish([*rows, *coordinator_rows(options.clients, options.shards, options.seconds)], options)
        return
    rows = [*on_ray(options), *memory_rows(100 if options.smoke else 1)]
    if options.smoke:
        rows += [*node_rows([2], options.seconds, on_ray=False), *coordinator_rows([1], [2], options.seconds)]
    publish(rows, options)


def _numbers(words: str) -> list[int]:
    return [int(word) for word in words.split(",")]


if __name__ == "__main__":
    main()
