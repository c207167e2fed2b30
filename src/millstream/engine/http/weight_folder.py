"""The weights of a run in a folder that servers read: written whole, checked before anybody is told of them, and removed when
nobody needs them any more."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

from transformers import PreTrainedModel

from millstream.engine.http.dialects import Pushed
from millstream.errors import EngineError, WeightsError
from millstream.model.adapters import lora_of, trained_weights
from millstream.model.safetensors_io import Manifest, write_weights
from millstream.types import Weights


class Pushes:
    """Of one engine. It begins with the model's weights, as version 0. Not thread-safe: one call at a time."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        if lora_of(model) is not None:
            raise EngineError("a server over HTTP takes whole models, not adapters: leave [learner.lora] out")
        weights = trained_weights(model)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        self._config = model.config
        self._name = secrets.token_hex(4)
        self._own = folder.resolve() / f"millstream-{self._name}"
        """No other run writes there."""
        self._manifest: Manifest | None = None
        self.write(0, weights)

    def label(self, version: int) -> str:
        """What servers that name their weights are to call them."""
        return f"millstream-{self._name}-{version}"

    def write(self, version: int, weights: Weights) -> None:
        """Raises `EngineError` for weights that are not the model's; they then change nothing."""
        strange = sorted(self._shapes.keys() ^ weights.keys())
        strange += [name for name in self._shapes.keys() & weights.keys() if self._shapes[name] != weights[name].shape]
        if strange:
            raise EngineError(f"the weights of version {version} do not fit: {strange[:4]}")
        try:
            self._manifest = write_weights(self._folder(version), version, weights, self._config)
        except WeightsError as wrong:
            raise EngineError(f"{wrong}. Set engine.http.folder to one that can be written") from wrong

    def newest(self, base: int) -> Pushed:
        """What was written last, for a server that counts versions from `base`."""
        manifest = self._manifest
        assert manifest is not None
        folder = str(self._folder(manifest.version))
        return Pushed(folder, base + manifest.version, self.label(manifest.version), manifest)

    def forget_older(self) -> None:
        """Nobody is to read them any more: an update to them that comes late fails."""
        assert self._manifest is not None
        newest = self._folder(self._manifest.version)
        for folder in self._own.iterdir():
            if folder != newest:
                shutil.rmtree(folder, ignore_errors=True)

    def remove(self) -> None:
        shutil.rmtree(self._own, ignore_errors=True)

    def _folder(self, version: int) -> Path:
        return self._own / f"version-{version:06d}"
