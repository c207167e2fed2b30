"""The transport "files": safetensors files in a folder that all nodes see."""

from __future__ import annotations

import shutil
from pathlib import Path

from millstream.errors import WeightsError, WeightsUnreachable
from millstream.model.safetensors_io import read_weights, write_weights
from millstream.model.shared_memory import layout_of, views_of
from millstream.weights.transfer.base import (
    FetchedWeights,
    FetchOptions,
    StagedCopy,
    StagedVersion,
    StageOptions,
    TransportStage,
    WeightsRef,
)

MAX_FOLDERS = 2


class FilesStage(TransportStage):
    """Keeps the last `MAX_FOLDERS` versions. The offer is the path of the version's folder."""

    copy: StagedCopy = "host"

    def __init__(self, options: StageOptions) -> None:
        super().__init__(options)
        if options.files is None:
            raise WeightsError('resources.weights has "files": say in which folder, one that all nodes see')
        self._root = options.files.absolute()
        self._folders: list[Path] = []

    def stage(self, staged: StagedVersion) -> bytes:
        # the name is unique: another publisher, such as a restarted learner, may use the same version numbers
        folder = self._root / f"version-{staged.version:06d}-{self._options.name}"
        write_weights(folder, staged.version, views_of(staged.flat, staged.layout), None)
        self._folders = [*(one for one in self._folders if one != folder), folder]
        for old in self._folders[:-MAX_FOLDERS]:
            shutil.rmtree(old, ignore_errors=True)
        self._folders = self._folders[-MAX_FOLDERS:]
        return str(folder).encode()

    def close(self) -> None:
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)


class FilesFetch:
    def __init__(self, options: FetchOptions) -> None: ...

    def can_fetch(self, ref: WeightsRef) -> bool:
        return True

    def fetch(self, ref: WeightsRef) -> FetchedWeights:
        folder = Path(ref.offers["files"].decode())
        try:
            manifest, weights = read_weights(folder)
        except WeightsError as error:
            raise WeightsUnreachable(str(error)) from error
        weights = {name: weights[name] for name, _, _ in ref.layout.tensors if name in weights}
        if manifest.version != ref.version or layout_of(weights) != ref.layout:
            raise WeightsUnreachable(f"{folder} holds version {manifest.version}, expected {ref.version}")
        return FetchedWeights(ref, "files", weights, lambda: None)
