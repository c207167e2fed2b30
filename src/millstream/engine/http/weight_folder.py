"""The weights of a run on disk, for servers to load: each version is written once, however many servers load it.

    FOLDER/millstream-NAME/version-000003.7/         the seventh that was written: whole, and checked before it is used
    FOLDER/millstream-NAME/engine-0.1/version-000003.7  ->  ../version-000003.7

Each engine has a link of its own, and a server is given the path of that link. Before a server is asked to load newer weights,
its engine's link to the older ones is removed: an update that reaches the server late finds nothing to load. A version is
deleted when no engine has a link to it and a newer one is written, all of them when the last user has closed.
"""

from __future__ import annotations

import secrets
import shutil
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel

from millstream.errors import EngineError, WeightsError
from millstream.model.adapters import lora_of, trained_weights
from millstream.model.safetensors_io import Manifest, write_weights
from millstream.types import Weights


class WrittenWeights(NamedTuple):
    """One version on disk. `label` is its name for servers that name their weights: no two that were written share one."""

    version: int
    folder: Path
    label: str
    manifest: Manifest


class WeightWrite(NamedTuple):
    """One version on its way to disk. `done` has the result."""

    number: int
    version: int
    folder: Path
    done: Future[WrittenWeights]


class WeightFolder:
    """Shared by the engines of one run; starts with the model's weights as version 0. May be called on any thread: while one
    thread writes, others wait for it only if they need what it writes."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        if lora_of(model) is not None:
            raise EngineError("a server over HTTP takes whole models, not adapters: leave [learner.lora] out")
        weights = trained_weights(model)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        self._config = model.config
        self._name = secrets.token_hex(4)
        self._root = folder.resolve() / f"millstream-{self._name}"  # no other run writes there
        self._lock = threading.Lock()
        self._num_written = 0
        self._num_links = 0
        self._num_users = 0
        self._links: dict[Path, WrittenWeights] = {}  # by the folder of an engine's link
        self._reserved: dict[Path, WeightWrite] = {}  # what that engine's link will lead to next
        self._source: Weights | None = None  # what `_latest` is written from
        self._latest = self._begin(0, weights)  # the last write that was begun
        self._newest = self._latest  # the last one that is whole
        self._write(self._latest, weights)
        self._latest.done.result()

    def write(self, link: Path, version: int, weights: Weights) -> None:
        """Written unless another engine has brought the same weights already, and kept for this link, which `move` then moves
        to it. Raises `EngineError` for weights that are not the model's; they then change nothing."""
        with self._lock:
            is_new = self._source is not weights or self._latest.version != version
            if is_new:
                self._latest = self._begin(version, weights)
                self._source = weights
            write = self._reserved[link] = self._latest
            self._num_users += 1  # the folder stays while a thread writes
        try:
            if is_new:
                self._write(write, weights)
            write.done.result()
        finally:
            self.close()

    def _begin(self, version: int, weights: Weights) -> WeightWrite:
        unknown = sorted(self._shapes.keys() ^ weights.keys())
        unknown += [name for name in self._shapes.keys() & weights.keys() if self._shapes[name] != weights[name].shape]
        if unknown:
            raise EngineError(f"the weights of version {version} do not fit the model: {unknown[:4]}")
        self._num_written += 1
        folder = self._root / f"version-{version:06d}.{self._num_written}"
        return WeightWrite(self._num_written, version, folder, Future())

    def _write(self, write: WeightWrite, weights: Weights) -> None:
        """Sets `write.done`. The lock is not held: other engines move their links meanwhile."""
        try:
            manifest = write_weights(write.folder, write.version, weights, self._config)
        except BaseException as error:
            with self._lock:
                if self._latest is write:
                    self._source = None  # the next attempt writes them again
            if isinstance(error, WeightsError):
                error = EngineError(f"{error}. Set engine.http.folder to one that can be written")
            write.done.set_exception(error)
            return
        label = f"millstream-{self._name}-{write.number}"
        with self._lock:
            write.done.set_result(WrittenWeights(write.version, write.folder, label, manifest))
            self._newest = max(self._newest, write, key=lambda one: one.number)

    # ---- users -------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """One more user: the files stay until each has called `close`."""
        with self._lock:
            self._num_users += 1

    def close(self) -> None:
        with self._lock:
            self._num_users -= 1
            if not self._num_users:
                shutil.rmtree(self._root, ignore_errors=True)

    def new_link(self, engine: str) -> WeightLink:
        """To the newest weights, for an engine of this name."""
        with self._lock:
            self._num_links += 1
            self._num_users += 1
            link = self._root / f"{engine}.{self._num_links}"
            self._reserved[link] = self._newest
        return WeightLink(self, link)

    def move(self, link: Path) -> WrittenWeights:
        """The link leads to what was written for it last, and to nothing else."""
        with self._lock:
            shutil.rmtree(link, ignore_errors=True)
            written = self._links[link] = self._reserved.pop(link).done.result()
            link.mkdir()
            (link / written.folder.name).symlink_to(Path("..") / written.folder.name)
            self._delete_unused()
            return written

    def remove(self, link: Path) -> None:
        with self._lock:
            shutil.rmtree(link, ignore_errors=True)
            self._links.pop(link, None)
            self._reserved.pop(link, None)
            self._delete_unused()
        self.close()

    def _delete_unused(self) -> None:
        used = {write.folder for write in (self._newest, self._latest, *self._reserved.values())}
        used |= {written.folder for written in self._links.values()}
        for old in set(self._root.glob("version-*")) - used:
            shutil.rmtree(old, ignore_errors=True)


class WeightLink:
    """One engine's link: to the weights that its server has, or is asked to load."""

    def __init__(self, weights: WeightFolder, folder: Path) -> None:
        self._weights = weights
        self._folder = folder
        self.written = weights.move(folder)

    @property
    def path(self) -> str:
        """What the server is asked to load."""
        return str(self._folder / self.written.folder.name)

    def write(self, version: int, weights: Weights) -> None:
        """To disk: the link still leads to what it led to."""
        self._weights.write(self._folder, version, weights)

    def move(self) -> None:
        """To what was written last. From here on the server cannot load what the link led to before."""
        self.written = self._weights.move(self._folder)

    def close(self) -> None:
        self._weights.remove(self._folder)
