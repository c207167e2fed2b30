"""Anonymous memory of learner ranks on a CPU: while they load a model, publish weights and write a checkpoint.

A model made on the spot is saved, and N ranks (gloo) load it as a run does. Memory is `RssAnon` of each rank's process, read
every two milliseconds; the highest of all ranks counts. Loading is measured above what a rank has after its imports, and must
stay within 1.5 times its float32 shard and the largest tensor: no rank ever has the whole model. Publishing and writing are
measured above what the rank had just before.

    .venv/bin/python bench/rank_memory.py [--json] [--smoke] [--ranks 2,4] [--hidden 768] [--layers 12] [--words 49152]
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from internals_torch import RunLearner, load_model, model_of, qwen3, ranks_of, set_up_cpu
from millstream.types import TrainRow
from report import Options, Row, cost, publish, say

EVERY_S = 0.002
MIB = 1 << 20


class Sizes(NamedTuple):
    """Of a model that is trained by several ranks, in bytes."""

    whole: int  # in float32
    shard: int
    largest: int  # tensor

    @property
    def bound(self) -> float:
        return 1.5 * self.shard + self.largest


class Peaks(NamedTuple):
    """Bytes, of the rank that had most."""

    loading: int
    publishing: int
    writing: int
    on_cluster: int  # publishing, by rank 0 alone


def anonymous_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


class Watch:
    """The memory of the ranks' processes, from a thread."""

    def __init__(self, learner: Any) -> None:
        self.learner = learner
        self._first: dict[int, int] = {}
        self._peaks: dict[int, int] = {}
        self._is_over = False
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._is_over:
            for pid in self.learner.ranks.pids:
                found = anonymous_bytes(pid)
                self._first[pid] = min(
                    found or 1 << 60, self._first.get(pid, 1 << 60)
                )  # after the imports: it only grows
                self._peaks[pid] = max(found, self._peaks.get(pid, 0))
            time.sleep(EVERY_S)

    def above(self, before: dict[int, int]) -> int:
        return max(peak - before[pid] for pid, peak in self._peaks.items())

    def above_imports(self) -> int:
        return self.above(self._first)

    def now(self) -> dict[int, int]:
        """What they have. Peaks count from here on."""
        found = {pid: anonymous_bytes(pid) for pid in self.learner.ranks.pids}
        self._peaks = dict(found)
        return found

    def close(self) -> None:
        self._is_over = True
        self._thread.join()


@contextmanager
def watching(learner: Any) -> Iterator[Watch]:
    watch = Watch(learner)
    try:
        yield watch
    finally:
        watch.close()
        asyncio.run(learner.close())


def measure(folder: Path, ranks: int) -> tuple[Sizes, Peaks]:
    """Of the model in this folder."""
    model = load_model(folder)
    sizes = [4 * parameter.numel() for parameter in model.parameters()]
    shards = [4 * -(-parameter.shape[0] // ranks) * parameter[0].numel() for parameter in model.parameters()]
    checkpoint = folder / f"checkpoint-{ranks}"
    checkpoint.mkdir()
    with watching(ranks_of(model, ranks)) as watch:
        peaks = asyncio.run(work(watch.learner, watch, checkpoint))
    with watching(ranks_of(model, ranks, is_cluster=True)) as watch:
        peaks = peaks._replace(on_cluster=asyncio.run(publishing_of(watch.learner, watch)))
    return Sizes(sum(sizes), sum(shards), max(sizes)), peaks


async def publishing_of(learner: RunLearner, watch: Watch) -> int:
    await learner.ready()
    before = watch.now()
    await learner.weights()
    return watch.above(before)


async def work(learner: RunLearner, watch: Watch, folder: Path) -> Peaks:
    await learner.ready()
    loading = watch.above_imports()
    publishing = await publishing_of(learner, watch)
    row = TrainRow(
        tokens=np.arange(8, dtype=np.int32),
        loss_mask=np.arange(8) > 0,
        logprobs=np.full(8, -1, np.float32),
        advantages=np.ones(8, np.float32),
    )
    await learner.begin_batch()
    await learner.accumulate([row] * 4)
    await learner.step()
    before = watch.now()
    (await learner.snapshot()).write(folder)
    return Peaks(loading, publishing, watch.above(before), 0)


def rows_of(ranks: int, parameters: int, sizes: Sizes, found: Peaks) -> Iterator[Row]:
    workload = f"{ranks} ranks, {parameters / 1e6:.0f}M parameters"
    loading = "MiB to load its shard, above imports"
    yield cost(
        workload, loading, found.loading / MIB, "1.5 x float32 shard + largest tensor", sizes.bound / MIB, digits=0
    )
    yield cost(workload, loading, found.loading / MIB, "the whole model in float32", sizes.whole / MIB, digits=0)
    publishing = "MiB more to publish weights"
    yield cost(workload, publishing, found.publishing / MIB, "the largest tensor", sizes.largest / MIB, digits=0)
    on_cluster = "MiB more to publish weights as on a cluster (rank 0)"
    yield cost(workload, on_cluster, found.on_cluster / MIB, "the largest tensor", sizes.largest / MIB, digits=0)
    writing = "MiB more to write a checkpoint (masters and two moments are copied)"
    yield cost(workload, writing, found.writing / MIB, "3 x float32 shard", 3 * sizes.shard / MIB, digits=0)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--ranks", "2,4", smoke="2", help="how many, several with commas")
    parser.add("--hidden", 768, smoke=128)
    parser.add("--layers", 12, smoke=2)
    parser.add("--words", 49_152, smoke=512)
    options = parser.parse(argv)
    set_up_cpu()
    shape = {"hidden": options.hidden, "layers": options.layers, "heads": options.hidden // 64 or 1, "dim": 64}
    config = qwen3(**shape, words=options.words, context=256)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="rank-memory-") as name:
        model = model_of(config, device="cpu", dtype=torch.float32)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        model.save_pretrained(name)
        del model
        for ranks in map(int, options.ranks.split(",")):
            say(f"{ranks} ranks, {parameters / 1e6:.0f}M parameters")
            rows += rows_of(ranks, parameters, *measure(Path(name), ranks))
    publish(rows, options)


if __name__ == "__main__":
    main()
