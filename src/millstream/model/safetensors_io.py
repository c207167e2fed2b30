"""Weights as a folder that other programs can load: a Hugging Face checkpoint, and what it must be when it arrives.

A folder is whole or not there: it is written under another name and then renamed. `millstream.json` in it has the size and the
digest of the file with the tensors, so that a reader can check that it is complete and the right one.
"""

from __future__ import annotations

import json
import shutil
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from millstream.decoding import decode_json
from millstream.errors import WeightsError
from millstream.paths import sync_path
from millstream.types import Weights

TENSORS, MANIFEST = "model.safetensors", "millstream.json"
PIECE = 1 << 24
PAGE = 4096


class Manifest(Struct, frozen=True, kw_only=True):
    version: int
    num_bytes: int
    digest: str


def write_weights(folder: Path, version: int, weights: Weights, config: Any | None) -> Manifest:
    """`config`: the model's, as transformers has it; None for the tensors alone. A folder of that name is replaced."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in weights.items()}
        save_file(tensors, partial / TENSORS, metadata={"format": "pt"})
        if config is not None:
            config.save_pretrained(partial)
        found = Manifest(
            version=version, num_bytes=(partial / TENSORS).stat().st_size, digest=_digest(partial / TENSORS)
        )
        (partial / MANIFEST).write_bytes(msgspec.json.encode(found))
        for file in partial.iterdir():
            file.chmod(0o644)  # safetensors makes them readable by their owner alone
            sync_path(file)  # a server on another machine may read it next
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except OSError as wrong:
        shutil.rmtree(partial, ignore_errors=True)
        raise WeightsError(f"cannot write weights to {folder}: {wrong.strerror or wrong}") from wrong
    return found


def read_weights(folder: Path) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """Raises `WeightsError` if the folder is not what was written."""
    try:
        manifest = decode_json((folder / MANIFEST).read_bytes(), Manifest)
        num_bytes = (folder / TENSORS).stat().st_size
        if num_bytes != manifest.num_bytes:
            raise WeightsError(f"{folder / TENSORS} has {num_bytes} bytes, expected {manifest.num_bytes}")
        if (digest := _digest(folder / TENSORS)) != manifest.digest:
            raise WeightsError(f"{folder / TENSORS} has the digest {digest}, expected {manifest.digest}")
        return manifest, load_file(folder / TENSORS)
    except (OSError, msgspec.DecodeError, SafetensorError, json.JSONDecodeError) as wrong:
        raise WeightsError(f"{folder} has no readable weights ({wrong}): write them again") from wrong


def _digest(path: Path) -> str:
    """At the speed of memory. It detects faults (a flipped bit, a page that is missing or in another place), not attacks."""
    found = blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            found.update(_page_sums(piece))
    return found.hexdigest()


def _page_sums(piece: bytes) -> bytes:
    """The sum of the 8-byte words of each page modulo 2^64, the last page filled up with zeros."""
    whole = piece + bytes(-len(piece) % PAGE)
    sums: NDArray[np.uint64] = np.frombuffer(whole, np.uint64).reshape(-1, PAGE // 8).sum(axis=1)
    return sums.tobytes()
