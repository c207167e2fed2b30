"""A learner's state in files: one (`learner.pt`), or torch's distributed checkpoint, where every rank writes its shards.

Whoever reads takes either: a state that two ranks wrote is read by four, by one, and the other way round. In a distributed
checkpoint the state is flat, by names such as `moments:exp_avg:model.norm.weight`.
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
from torch import Tensor

from millstream.errors import LearnerError
from millstream.learner.optimizer import State
from millstream.learner.shared_disk import look_for_folder

STATE = "learner.pt"
LITTLE_BYTES = 1 << 20
"""What is left on a disk that is full for anything that a learner writes."""
SHARDS = ".metadata"
"""The file by which a distributed checkpoint is known; the shards are beside it."""


def on_host(value: Any) -> Any:
    """A copy in the host's memory of everything in these dictionaries."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return {key: on_host(item) for key, item in value.items()} if isinstance(value, dict) else value


def write_state(state: State, folder: Path) -> None:
    look_for_folder(folder)
    with (folder / STATE).open("wb") as file:  # a file of ours: its errors say what is wrong
        torch.save(state, file)


def read_state(folder: Path) -> State:
    """Whole tensors, whoever wrote them."""
    return _read_file(folder / STATE) if (folder / STATE).exists() or not _is_sharded(folder) else _read_all(folder)


def read_trained(folder: Path) -> dict[str, Tensor]:
    """What was trained, by the names that it has in the model, as float32; moments are not read."""
    if (folder / STATE).exists() or not _is_sharded(folder):
        state = _read_file(folder / STATE, is_mapped=True)
    else:
        state = _load(folder, {}, None, kinds=("masters", "buffers", "num_steps_done"))
    return {**state["masters"], **state["buffers"]}


def _read_file(path: Path, *, is_mapped: bool = False) -> State:
    try:
        state: State = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise LearnerError(f"cannot read the learner's state in {path}: {error}") from error
    return state


def _is_sharded(folder: Path) -> bool:
    return (folder / SHARDS).exists()


def flat(state: State) -> dict[str, Tensor]:
    made = {f"masters:{name}": value for name, value in state["masters"].items()}
    made |= {f"buffers:{name}": value for name, value in state["buffers"].items()}
    for name, moments in state["moments"].items():
        made |= {f"moments:{kind}:{name}": value for kind, value in moments.items()}
    return made | {"num_steps_done": torch.tensor(state["num_steps_done"])}


def _unflat(values: dict[str, Tensor]) -> State:
    state: State = {"masters": {}, "buffers": {}, "moments": {}, "num_steps_done": int(values["num_steps_done"])}
    for key, value in values.items():
        kind, _, rest = key.partition(":")
        if kind in ("masters", "buffers"):
            state[kind][rest] = value
        elif kind == "moments":
            moment, _, name = rest.partition(":")
            state["moments"].setdefault(name, {})[moment] = value
    return state


def write_shards(state: State, folder: Path, group: Any) -> None:
    """Called by all ranks of the group at once; each writes what it has. Raises `OSError`, in all of them."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    from millstream.learner.shards import Writer

    try:
        save(flat(state), storage_writer=Writer(folder), process_group=group)
    except CheckpointException as error:
        cause = next((failure for failure, _ in error.failures.values() if isinstance(failure, OSError)), None)
        if cause is None and shutil.disk_usage(folder).free < LITTLE_BYTES:  # torch says only where a short write was
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise OSError(cause.errno if cause else errno.EIO, cause.strerror if cause else str(error)) from error


def _read_all(folder: Path) -> State:
    return _load(folder, {}, None)


def read_shards(folder: Path, like: dict[str, Tensor], group: Any) -> State:
    """What this rank has of it, sharded as the masters in `like` are. Called by all ranks at once."""
    if _is_sharded(folder):
        return _load(folder, like, group)
    from torch.distributed.tensor import distribute_tensor

    state = _read_file(folder / STATE, is_mapped=True)

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


def _load(folder: Path, like: dict[str, Tensor], group: Any, kinds: Collection[str] | None = None) -> State:
    """`kinds`: of what is in it, as the first part of its name says. None: all of it."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    from millstream.learner.shards import Reader

    try:
        reader = Reader(folder)
        found = reader.read_metadata().state_dict_metadata
        wanted = {key: entry for key, entry in found.items() if kinds is None or key.partition(":")[0] in kinds}
        values = {key: _room(key, entry, like) for key, entry in wanted.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one device reads by itself
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


def _room(key: str, entry: Any, like: dict[str, Tensor]) -> Tensor:
    """Sharded as the master of this name is, where it has its shape; else whole."""
    master = like.get(key.rpartition(":")[2])
    if master is not None and master.shape == entry.size:
        return torch.empty_like(master, dtype=entry.properties.dtype)
    return torch.empty(entry.size, dtype=entry.properties.dtype)
