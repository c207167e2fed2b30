"""A learner whose other end is outside: a program claims the rows of each batch, trains, and publishes weights as a version.

    accumulate ──► batches ──► claim: a whole batch on lease, by a program outside
                                     │
    step ◄──── checked, as version n + 1 ◄── publish

Guarantees. A batch is claimed when it is complete, and is given to one program at a time. Its publication ends the step: only
version n + 1, only after the batch was claimed, only once, and only with finite weights of the model's names and shapes; what
else is published is refused by name and changes nothing. A program that dies before it has published loses its lease, and the
next one gets the same batch, to be trained from the weights of version n: no batch is lost, and none is in two versions.

A checkpoint has the weights. The optimizer's state is the program's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millstream.errors import LearnerError, StoreError
from millstream.learner.optimizer import OptimizerState
from millstream.learner.state import TorchSnapshot, read_trained
from millstream.learner.trainer import save_trained
from millstream.model.adapters import trained_weights
from millstream.model.finite import names_not_finite
from millstream.model.load import load_weights
from millstream.store.base import ONE_GROUP, TRAIN, Choose, Lease, Reads, Want
from millstream.store.memory import MemoryStore
from millstream.types import Floats, HalfFloats, Metrics, TrainRow, Weights

COLUMNS = ("tokens", "loss_mask", "logprobs", "advantages")
OPTIONAL = ("reference", "values", "proximal", "returns")
RUN_METRICS = {"micro_batch_tokens"}  # that the pipeline acts on (`pipeline.batch`)
MAX_METRICS = 256
DTYPES = ("F64", "F32", "F16", "BF16")  # of published tensors, as safetensors names them


class OfferedBatches(MemoryStore):
    """OfferedBatches for programs outside: a group for each version, closed when it is complete."""

    def __init__(self) -> None:
        super().__init__({TRAIN: Reads(COLUMNS)})
        self.leases: dict[int, Lease] = {}  # version -> the last lease of its batch

    async def claim(
        self, task: str, want: Want = ONE_GROUP, *, choose: Choose | None = None, partition: str = TRAIN
    ) -> Lease:
        lease = await super().claim(task, want, choose=choose, partition=partition)
        self.leases[lease.group_id] = lease
        return lease

    async def acknowledge(self, lease: Lease, *, step: int | None = None) -> None:
        """The publication has acknowledged it already."""
        if any(lease.lease_id == open_one.lease_id for open_one in self.leases.values()):
            raise StoreError("not published: a batch is acknowledged by the weights that it gave. Publish them first")

    async def end(self, version: int) -> None:
        """The batch is trained. Rows on a lease that has expired are claimed once more to be removed."""
        lease = self.leases.pop(version)
        try:
            await super().acknowledge(lease)
        except StoreError:
            own = await super().claim(TRAIN, Want(groups=1, versions=(version, version), deadline_s=0.0))
            await super().acknowledge(own)


class OutsideLearner:
    """A `RunLearner` (`learner.base`). It changes `model`, which has the weights of `version`. `on_published` is called with
    each version and where it is; `write` puts weights that no program has published where programs can load them. `offered`:
    the folder that programs publish in; nothing outside of it is read."""

    def __init__(
        self,
        model: PreTrainedModel,
        batches: OfferedBatches,
        *,
        version: int = 0,
        tokenizer: PreTrainedTokenizerBase | None = None,
        offered: Path,
        write: Callable[[int, Weights], str],
        on_published: Callable[[int, str], None] = lambda version, where: None,
    ) -> None:
        self._model = model
        self._batches = batches
        self._tokenizer = tokenizer
        self._offered = offered
        self._write = write
        self._on_published = on_published
        self.version = version
        self._where = ""
        self._num_rows = 0
        self._loop = asyncio.get_running_loop()
        self._publishing = asyncio.Lock()
        self._stepped: asyncio.Future[Metrics] | None = None

    async def ready(self) -> None:
        """Returns when programs outside can load the weights that training begins with."""
        self._where = await asyncio.to_thread(self._write, self.version, trained_weights(self._model))
        self._on_published(self.version, self._where)

    async def begin_batch(self) -> None:
        self._num_rows = 0

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        if not rows:
            return
        given = [name for name in OPTIONAL if all(getattr(row, name) is not None for row in rows)]
        columns = {name: [getattr(row, name) for row in rows] for name in (*COLUMNS, *given)}
        await self._batches.put(self.version, columns, versions=self.version)
        self._num_rows += len(rows)

    async def logprobs(self, rows: Sequence[TrainRow]) -> list[Floats]:
        raise LearnerError("a learner outside computes no log-probabilities for the run")

    async def step(self) -> Metrics:
        """Waits for a program outside. Ended by: `publish`."""
        if not self._num_rows:
            self.version += 1
            self._on_published(self.version, self._where)
            return {}
        self._stepped = asyncio.get_running_loop().create_future()
        await self._batches.close_groups([self.version])
        return await self._stepped

    def log_ratios(self) -> HalfFloats:
        return np.zeros(0, np.float16)

    def rank_seconds(self) -> list[float]:
        return []

    async def weights(self) -> Weights:
        return {name: tensor.detach().clone() for name, tensor in trained_weights(self._model).items()}

    async def snapshot(self) -> TorchSnapshot:
        """In the format of the run's own learner, without moments: so it can be exported, and branched from."""
        masters = {name: tensor.detach().float().cpu().clone() for name, tensor in trained_weights(self._model).items()}
        state: OptimizerState = {"masters": masters, "buffers": {}, "moments": {}, "num_steps_done": self.version}
        return TorchSnapshot(state)

    def restore(self, folder: Path) -> None:
        load_weights(self._model, read_trained(folder))
        self._where = self._write(self.version, trained_weights(self._model))
        self._loop.call_soon_threadsafe(self._on_published, self.version, self._where)

    def save(self, path: Path) -> None:
        save_trained(self._model, self._tokenizer, path)

    async def close(self) -> None:
        await self._batches.finish()

    # ---- from outside --------------------------------------------------------------------------------------------------

    async def publish(self, version: int, where: str, metrics: Metrics) -> None:
        """The weights of `version`, safetensors in a folder or file within `offered`. Raises `StoreError`: then nothing has
        changed."""
        async with self._publishing:
            if version <= self.version:
                raise StoreError(f"twice: version {version} is there, the next one is {self.version + 1}")
            if version > self.version + 1:
                raise StoreError(f"wrong version: {version}, expected {self.version + 1}")
            if self._stepped is None or self.version not in self._batches.leases:
                raise StoreError(f"not claimed: the batch that gives version {version} was not claimed yet")
            check_metrics(metrics)
            weights = await asyncio.to_thread(self._read, where)
            await self._batches.end(self.version)  # the last that may fail
            await asyncio.to_thread(self._load, weights)
            self.version = version
            self._where = where
            self._on_published(version, where)
            if not self._stepped.done():  # else the run has stopped waiting: it ends
                self._stepped.set_result(metrics)
            self._stepped = None

    def _read(self, where: str) -> Weights:
        """All that is wrong with the files is found before a tensor is read, but for values that are not finite."""
        own = trained_weights(self._model)
        paths = published_files(where, self._offered)
        try:
            with ExitStack() as opened:
                files = [opened.enter_context(safe_open(path, framework="pt")) for path in paths]
                found = {name: file for file in files for name in file.keys()}  # noqa: SIM118
                if missing := own.keys() - found.keys():
                    others = f"and {len(missing) - 1} more are missing"
                    raise StoreError(f"malformed: {where} has no {sorted(missing)[0]}, {others}")
                for name, tensor in own.items():
                    check_tensor(f"{name} in {where}", found[name].get_slice(name), tensor)
                weights = {name: found[name].get_tensor(name) for name in own}
        except (OSError, SafetensorError) as error:
            raise StoreError(f"malformed: {where} cannot be read: {error}") from error
        if names := names_not_finite(weights):
            raise StoreError(f"malformed: {names[0]} in {where} has a value that is not finite")
        return weights

    def _load(self, weights: Weights) -> None:
        with torch.no_grad():
            load_weights(self._model, weights)


def check_metrics(metrics: Metrics) -> None:
    """Raises `StoreError`."""
    if len(metrics) > MAX_METRICS:
        raise StoreError(f"malformed: {len(metrics)} metrics, expected at most {MAX_METRICS}")
    if own := sorted(RUN_METRICS & metrics.keys()):
        raise StoreError(f"malformed: the metric {own[0]} is the run's own, which acts on it: give it another name")


def published_files(where: str, offered: Path) -> list[Path]:
    """Of a publication: a folder or a file within the folder that was offered, links followed. Raises `StoreError`."""
    given = Path(where)
    if "\0" in where or not given.is_absolute():
        raise StoreError(f"malformed: where = {where!r}: expected an absolute path, within {offered}")
    try:
        path, root = given.resolve(), offered.resolve()
        if not path.is_relative_to(root):
            raise StoreError(f"malformed: {where} is not within {offered}, where this run reads weights")
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if strange := [file.name for file in files if not S_ISREG(file.lstat().st_mode)]:
            raise StoreError(f"malformed: {strange[0]} in {where} is not a regular file")
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise StoreError(f"malformed: {where} cannot be read: {error}") from error
    if not files:
        raise StoreError(f"malformed: no file ends in .safetensors in {where}")
    return files


def check_tensor(what: str, header: Any, own: Tensor) -> None:
    """By the header of its file. Raises `StoreError`."""
    dtype, shape = header.get_dtype(), header.get_shape()
    if dtype not in DTYPES or shape != list(own.shape):
        known = f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]}"
        raise StoreError(f"malformed: {what} is {dtype} {shape}, expected {known} of shape {list(own.shape)}")
