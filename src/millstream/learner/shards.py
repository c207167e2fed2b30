"""The files of torch's distributed checkpoints: what torch itself would do with them that we must not.

Guarantees. Reading one runs nothing that is in it: torch unpickles `.metadata` without limits, and here it may name what a
learner's state is described with and nothing else. Writing one never makes its folder: torch would make it on every node, and
shards on a disk that only their own rank sees would pass for a checkpoint.
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

from millstream.learner.shared_disk import look_for_folder

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
"""Not `BytesStorageMetadata`: what it describes torch unpickles without limits, and a learner's state has only tensors."""
KNOWN: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__qualname__): kind for kind in CLASSES},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): PurePosixPath,  # the folder that it was written to, which nobody reads
    ("pathlib._local", "PosixPath"): PurePosixPath,  # the same, as Python 3.13 writes it
}


class Unpickler(pickle.Unpickler):
    """Of what is in `KNOWN`. Raises `UnpicklingError` that names whatever else is asked for."""

    def find_class(self, module: str, name: str) -> Any:
        found = KNOWN.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(
                f"{_metadata_fn} asks for {module}.{name}, of which no learner's state is made. It was not called: Millstream "
                "did not write this checkpoint"
            )
        return found


class Reader(FileSystemReader):
    def read_metadata(self, *arguments: Any, **options: Any) -> Metadata:
        """Raises `OSError`, or `UnpicklingError`."""
        with (Path(self.path) / _metadata_fn).open("rb") as file:
            try:
                metadata = Unpickler(file).load()
                described = list(metadata.state_dict_metadata.values())
            except pickle.UnpicklingError:
                raise
            except Exception as error:  # whatever a spoiled pickle comes to: it has no errors of its own for that
                raise pickle.UnpicklingError(f"{_metadata_fn} is not what torch writes: {error!r}") from error
        if type(metadata) is not Metadata or any(type(one) is not TensorStorageMetadata for one in described):
            raise pickle.UnpicklingError(f"{_metadata_fn} describes something else than tensors")
        return metadata


class Writer(FileSystemWriter):
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """What is raised here is raised in every rank."""
        look_for_folder(Path(self.path))
        return super().prepare_local_plan(plan)
