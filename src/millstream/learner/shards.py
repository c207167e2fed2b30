"""Reader and writer of torch's distributed checkpoints, without two things that torch does.

Guarantees. Reading runs no code from the checkpoint: torch unpickles `.metadata` without limits; here it may only name the few
classes that describe a learner's state. Writing never creates the folder: torch would create it on every node, and shards on a
disk that only their own rank sees would pass for a checkpoint.
"""

from __future__ import annotations

import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _metadata_fn, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from millstream.learner.snapshots import check_folder

CLASSES: tuple[type, ...] = (
    Metadata,
    TensorStorageMetadata,
    TensorProperties,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    _StorageInfo,
    _MEM_FORMAT_ENCODING,
)
"""Without `BytesStorageMetadata`: torch unpickles what it describes without limits, and a learner's state has only tensors."""
KNOWN: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__qualname__): kind for kind in CLASSES},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): PurePosixPath,  # the folder it was written to: unused
    ("pathlib._local", "PosixPath"): PurePosixPath,  # the same, as Python 3.13 writes it
}


class RestrictedUnpickler(pickle.Unpickler):
    """Finds only what is in `KNOWN`. Raises `UnpicklingError` that names anything else."""

    def find_class(self, module: str, name: str) -> Any:
        found = KNOWN.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(
                f"{_metadata_fn} asks for {module}.{name}, which is no part of a learner's state. It was not called: "
                "Millstream did not write this checkpoint"
            )
        return found


class ShardReader(FileSystemReader):
    def read_metadata(self, *arguments: Any, **options: Any) -> Metadata:
        """Raises `OSError`, or `UnpicklingError`."""
        with (Path(self.path) / _metadata_fn).open("rb") as file:
            try:
                metadata = RestrictedUnpickler(file).load()
                described = list(metadata.state_dict_metadata.values())
            except pickle.UnpicklingError:
                raise
            except Exception as error:  # a corrupt pickle may raise anything
                raise pickle.UnpicklingError(f"{_metadata_fn} is not what torch writes: {error!r}") from error
        if type(metadata) is not Metadata or any(type(one) is not TensorStorageMetadata for one in described):
            raise pickle.UnpicklingError(f"{_metadata_fn} describes something else than tensors")
        return metadata


class ShardWriter(FileSystemWriter):
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """An error raised here is raised in every rank."""
        check_folder(Path(self.path))
        return super().prepare_local_plan(plan)
