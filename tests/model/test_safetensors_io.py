"""Folders with weights: what arrives is what was written, and nothing else is taken for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from millstream.errors import WeightsError
from millstream.model import safetensors_io
from millstream.model.safetensors_io import MANIFEST, PAGE, TENSORS, read_weights, write_weights


def written(folder: Path) -> Path:
    """Four pages and a part of one."""
    weights = {"a": torch.arange(4200, dtype=torch.float32), "b": torch.ones(7, dtype=torch.bfloat16)}
    write_weights(folder / "version", 3, weights, None)
    return folder / "version"


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    folder = written(tmp_path)
    manifest, weights = read_weights(folder)
    assert manifest.version == 3 and manifest.num_bytes == (folder / TENSORS).stat().st_size
    assert torch.equal(weights["a"], torch.arange(4200.0)) and torch.equal(weights["b"], torch.ones(7).bfloat16())


def test_a_digest_does_not_depend_on_how_the_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path)
    monkeypatch.setattr(safetensors_io, "PIECE", PAGE)
    assert read_weights(folder)[0].version == 3


def test_others_may_read_the_files(tmp_path: Path) -> None:
    assert all(file.stat().st_mode & 0o777 == 0o644 for file in written(tmp_path).iterdir())


def _flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def _swapped(data: bytes) -> bytes:
    return data[:PAGE] + data[2 * PAGE : 3 * PAGE] + data[PAGE : 2 * PAGE] + data[3 * PAGE :]


def _zeroed(data: bytes) -> bytes:
    return data[:PAGE] + bytes(PAGE) + data[2 * PAGE :]


def _cut(data: bytes) -> bytes:
    return data[:-PAGE]


@pytest.mark.parametrize("damage", [_flipped, _swapped, _zeroed, _cut])
def test_a_file_of_which_a_bit_a_page_or_the_end_differs_is_refused(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    folder = written(tmp_path)
    data = (folder / TENSORS).read_bytes()
    damaged = damage(data)
    assert damaged != data
    (folder / TENSORS).write_bytes(damaged)
    with pytest.raises(WeightsError, match="expected"):
        read_weights(folder)


def test_a_folder_without_its_manifest_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path)
    (folder / MANIFEST).unlink()
    with pytest.raises(WeightsError, match="write them again"):
        read_weights(folder)
