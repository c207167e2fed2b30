"""A model without the memory of its weights, and weights of which only a slice is read.

A process that keeps a shard of a model builds it with its parameters on the meta device (`parameters_on_meta`), then reads its
slice of each tensor: from the safetensors files of the checkpoint (`CheckpointFiles`), or from tensors that are mapped into it.
At no time does it have more than its shards and one slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from millstream.model.load import model_weights

ReadSlice = Callable[[str, slice], Tensor]
"""Some of a tensor, by its name and a range of its first dimension; `EVERYTHING` for all of it, also of one without dimensions.
Raises `KeyError` for a name that is not there."""
EVERYTHING = slice(None)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are built within the block have parameters without memory. Their buffers, and whatever else they compute
    when they are built (the frequencies of a rope), are real."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:  # one that is there already is tied to another
            module._parameters[name] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def slices_of(weights: Mapping[str, Tensor]) -> ReadSlice:
    """Of tensors that this process has, or has mapped."""
    return lambda name, part: weights[name] if part == EVERYTHING else weights[name][part]


class CheckpointFiles(Struct, frozen=True, kw_only=True):
    """The tensors of a model that are the same in the files of a checkpoint."""

    folder: str
    sizes: dict[str, int]  # by file
    files: dict[str, str]  # by tensor: its file

    def are_here(self) -> bool:
        """Whether this process sees them: on another node the folder may not be there, or be another one."""
        paths = {Path(self.folder) / name: size for name, size in self.sizes.items()}
        return all(path.is_file() and path.stat().st_size == size for path, size in paths.items())

    @contextmanager
    def opened(self, otherwise: ReadSlice) -> Iterator[ReadSlice]:
        """Reads from the files what they have, and from `otherwise` what they do not."""
        with ExitStack() as open_files:
            files = {
                name: open_files.enter_context(safe_open(Path(self.folder) / name, framework="pt"))
                for name in self.sizes
            }

            def read(name: str, part: slice) -> Tensor:
                file = self.files.get(name)
                if file is None:
                    return otherwise(name, part)
                found: Tensor = (
                    files[file].get_tensor(name) if part == EVERYTHING else files[file].get_slice(name)[part]
                )
                return found

            yield read


def checkpoint_files(model: PreTrainedModel) -> CheckpointFiles | None:
    """What the folder that the model was loaded from has of its weights as they are now, bit for bit: every tensor is compared.
    None: it was not loaded from a folder, or nothing of it is left."""
    folder = Path(model.name_or_path or "")
    if not model.name_or_path or not folder.is_dir():
        return None
    own, found = model_weights(model), dict[str, str]()
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                found |= {name: path.name for name in file.keys() if name in own and _is_equal(file, name, own[name])}  # noqa: SIM118
    except (OSError, SafetensorError):  # it was removed or replaced since: nothing depends on it
        return None
    sizes = {name: (folder / name).stat().st_size for name in sorted(set(found.values()))}
    return CheckpointFiles(folder=str(folder.absolute()), sizes=sizes, files=found) if found else None


@torch.no_grad()
def _is_equal(file: Any, name: str, own: Tensor) -> bool:
    """A dtype that is wider here than in the file has the same numbers."""
    if tuple(file.get_slice(name).get_shape()) != tuple(own.shape):
        return False
    value: Tensor = file.get_tensor(name)
    is_exact = value.dtype.itemsize <= own.dtype.itemsize
    return is_exact and torch.equal(value.to(own.dtype), own.detach().to(value.device))
