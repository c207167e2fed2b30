"""A learner's state in files: one (`learner.pt`), or torch's distributed checkpoint, where every rank writes its shards.

Guarantee: every reader accepts both. A state that two ranks wrote is read by four ranks or by one, and the other way round. In
a distributed checkpoint the state is flat, with names such as `moments:exp_avg:model.norm.weight`.
"""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from millstream.errors import LearnerError
from millstream.learner.optimizer import OptimizerState
from millstream.learner.snapshots import check_folder, files_in

STATE_FILE = "learner.pt"
METADATA_FILE = ".metadata"  # of a distributed checkpoint; the shards are in the same folder
FULL_DISK_BYTES = 1 << 20  # a disk with less free space counts as full


def on_host(value: Any) -> Any:
    """A copy of nested dictionaries of tensors in the host's memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return {key: on_host(item) for key, item in value.items()} if isinstance(value, dict) else value


class TorchSnapshot:
    """A `Snapshot` (`learner.base`): a copy of the state in the host's memory."""

    def __init__(self, state: OptimizerState) -> None:
        self._state = state

    def write(self, folder: Path) -> None:
        write_state(self._state, folder)


def write_state(state: OptimizerState, folder: Path) -> None:
    check_folder(folder)
    with (folder / STATE_FILE).open("wb") as file:  # our own file object: its errors have the reason
        torch.save(state, file)


def read_state(folder: Path) -> OptimizerState:
    """Whole tensors, from either format."""
    return (
        _read_file(folder / STATE_FILE)
        if (folder / STATE_FILE).exists() or not _is_sharded(folder)
        else _read_all(folder)
    )


def read_trained(folder: Path) -> dict[str, Tensor]:
    """The trained weights by their names in the model, as float32. The optimizer's moments are not read."""
    if (folder / STATE_FILE).exists() or not _is_sharded(folder):
        state = _read_file(folder / STATE_FILE, is_mapped=True)
    else:
        state = _load(folder, {}, None, kinds=("masters", "buffers", "num_steps_done"))
    return {**state["masters"], **state["buffers"]}


def _read_file(path: Path, *, is_mapped: bool = False) -> OptimizerState:
    try:
        state: OptimizerState = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise LearnerError(f"cannot read the learner's state in {path}: {error}") from error
    return state


def _is_sharded(folder: Path) -> bool:
    return (folder / METADATA_FILE).exists()


def flat_state(state: OptimizerState) -> dict[str, Tensor]:
    made = {f"masters:{name}": value for name, value in state["masters"].items()}
    made |= {f"buffers:{name}": value for name, value in state["buffers"].items()}
    for name, moments in state["moments"].items():
        made |= {f"moments:{kind}:{name}": value for kind, value in moments.items()}
    return made | {"num_steps_done": torch.tensor(state["num_steps_done"])}


def _unflat(values: dict[str, Tensor]) -> OptimizerState:
    state: OptimizerState = {
        "masters": {},
        "buffers": {},
        "moments": {},
        "num_steps_done": int(values["num_steps_done"]),
    }
    for key, value in values.items():
        kind, _, rest = key.partition(":")
        if kind in ("masters", "buffers"):
            state[kind][rest] = value
        elif kind == "moments":
            moment, _, name = rest.partition(":")
            state["moments"].setdefault(name, {})[moment] = value
    return state


def write_shards(state: OptimizerState, folder: Path, group: Any) -> None:
    """A collective: every rank of the group writes its shards. Raises `OSError`, in all of them."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    from millstream.learner.shards import ShardWriter

    try:
        save(flat_state(state), storage_writer=ShardWriter(folder), process_group=group)
    except CheckpointException as error:
        cause = next((failure for failure, _ in error.failures.values() if isinstance(failure, OSError)), None)
        if cause is None and shutil.disk_usage(folder).free < FULL_DISK_BYTES:  # torch does not report the reason
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise OSError(cause.errno if cause else errno.EIO, cause.strerror if cause else str(error)) from error


class StateFiles:
    """How a process writes its state, and reads it again: alone in one file, of several ranks each its shards. Created by all
    ranks at the same time."""

    def __init__(self, *, num_ranks: int) -> None:
        # snapshots have their own process group: training uses the other one at the same time
        self._group = None if num_ranks == 1 else torch.distributed.new_group(backend="gloo")

    def write(self, state: OptimizerState, folder: Path) -> dict[str, int]:
        """Returns the files that this process then sees there."""
        if self._group is None:
            write_state(state, folder)
        else:
            write_shards(state, folder, self._group)
        return files_in(folder)

    def read(self, folder: Path, like: dict[str, Tensor]) -> OptimizerState:
        return read_state(folder) if self._group is None else read_shards(folder, like, self._group)


def _read_all(folder: Path) -> OptimizerState:
    return _load(folder, {}, None)


def read_shards(folder: Path, like: dict[str, Tensor], group: Any) -> OptimizerState:
    """This rank's part, sharded as the masters in `like` are. A collective."""
    if _is_sharded(folder):
        return _load(folder, like, group)
    from torch.distributed.tensor import distribute_tensor

    state = _read_file(folder / STATE_FILE, is_mapped=True)

    def shard(name: str, value: Any) -> Any:
        model: Any = like.get(name)
        if model is None or not isinstance(value, Tensor) or value.shape != model.shape:
            return value
        return distribute_tensor(value.to(model.device), model.device_mesh, model.placements, src_data_rank=None)

    state["masters"] = {name: shard(name, value) for name, value in state["masters"].items()}
    state["moments"] = {
        name: {kind: shard(name, value) for kind, value in moments.items()}
        for name, moments in state["moments"].items()
    }
    return state


def _load(folder: Path, like: dict[str, Tensor], group: Any, kinds: Collection[str] | None = None) -> OptimizerState:
    """`kinds`: the first parts of the names to read. None: all."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    from millstream.learner.shards import ShardReader

    try:
        reader = ShardReader(folder)
        found = reader.read_metadata().state_dict_metadata
        wanted = {key: entry for key, entry in found.items() if kinds is None or key.partition(":")[0] in kinds}
        values = {key: _empty(key, entry, like) for key, entry in wanted.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one device reads alone
            load(values, storage_reader=reader, process_group=group, no_dist=not like)
    except (
        OSError,
        RuntimeError,
        ValueError,
        pickle.UnpicklingError,
        EOFError,
        CheckpointException,
    ) as error:
        raise LearnerError(f"cannot read the learner's state in {folder}: {error}") from error
    return _unflat(values)


def _empty(key: str, entry: Any, like: dict[str, Tensor]) -> Tensor:
    """An empty tensor to read into: sharded as the master of this name is, if it has its shape; else whole."""
    master = like.get(key.rpartition(":")[2])
    if master is not None and master.shape == entry.size:
        return torch.empty_like(master, dtype=entry.properties.dtype)
    return torch.empty(entry.size, dtype=entry.properties.dtype)
