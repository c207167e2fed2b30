"""Checkpoints: written while training continues, complete or not at all, verified before they are used.

    RUN/checkpoints/step-000120/
        learner.pt        what the learner wrote: weights, optimizer, schedule; several ranks: .metadata, __0_0.distcp, ...
        critic/           what the critic wrote, where there is one
        rows.msgpack      the store's rows
        ledger.json       the groups in flight, the data cursor
        run.json          the run's identity, a digest of its data, the state of global generators
        manifest.json     version, the last event covered, size and SHA-256 of every file

The order of writing is the promise. 1. The files, into a folder under a temporary name. 2. The manifest. 3. All of it is synced
to the disk. 4. The event `CheckpointSealed` is emitted, and synced with every event before it. 5. The folder is renamed to its
final name. Whatever is killed at whatever time, a folder with a final name is complete, and the events that it covers are in
the log.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import Struct

from millstream.clock import Clock
from millstream.decoding import decode_json
from millstream.errors import CheckpointError, LearnerError, OutputError
from millstream.events import CheckpointFailed, CheckpointSealed, EventSink
from millstream.learner import Snapshot
from millstream.paths import program, sync_path
from millstream.pipeline.state import Ledger, PipelineState
from millstream.rpc.threads import DaemonThreads
from millstream.store import blocks

FORMAT = 2  # 1 had rows without `turn_rewards`, which would never be settled, and a learner state without masters
FOLDER = "checkpoints"
WARMUP_FOLDER = "warmup"  # of supervised training; removed when the model is saved
MANIFEST = "manifest.json"
LEDGER = "ledger.json"
ROWS = "rows.msgpack"
RUN = "run.json"
MAX_REMOVED = 3  # checkpoints that an active run may remove while they are read
MAX_HELD = 0.01  # the share of the time that training may stand still for checkpoints: slow ones are made less often


class CheckpointConfig(Struct, frozen=True, kw_only=True):
    """When checkpoints are written, and how many are kept. There is always one before the first step, after the last, and at a
    clean stop."""

    every_s: float | None = 60.0
    """Seconds between two checkpoints. None: not by time."""
    every_steps: int | None = None
    """Instead, or as well: steps between two checkpoints."""
    keep: int = 2
    """The number of newest checkpoints that are kept."""
    grace_s: float = 20.0
    """After SIGTERM or Ctrl-C: how long to wait for the current batch, so that it is in the last checkpoint."""
    keep_every: int | None = None
    """Steps between two checkpoints that are kept for ever, in addition to the newest ones. None: there are none."""
    keep_best: str | None = None
    """A score of an evaluation, such as "held_out:pass@1": the checkpoint with the highest one is never removed, and there is
    a checkpoint of every step that is evaluated. None: only the newest ones are kept."""

    def __post_init__(self) -> None:
        if (self.every_s is not None and self.every_s <= 0) or (self.every_steps is not None and self.every_steps < 1):
            raise ValueError("every_s must be above 0, every_steps at least 1")
        if self.keep < 1 or self.grace_s < 0:
            raise ValueError("keep must be at least 1 and grace_s at least 0")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"keep_every = {self.keep_every}: expected at least 1")

    def is_kept(self, step: int) -> bool:
        """Whether the checkpoint of this step is kept for ever."""
        return self.keep_every is not None and step > 0 and step % self.keep_every == 0


class ManifestFile(Struct, frozen=True, kw_only=True):
    bytes: int
    sha256: str


class CheckpointManifest(Struct, frozen=True, kw_only=True):
    format: int
    run_id: str
    version: int
    covers_seq: int
    files: dict[str, ManifestFile]


class RunState(Struct, frozen=True, kw_only=True):
    """What a resumed run needs in addition to the state of its pipeline and learner."""

    run_id: str
    data_digest: str
    generators: dict[str, Any]
    """The random states of Python, numpy and torch, which rewards written by users may use."""


class Best(Protocol):
    """Which checkpoints an evaluation needs: see `run.best`."""

    def is_due(self, version: int) -> bool: ...

    def kept(self, versions: Iterable[int]) -> set[int]: ...


class Sealed(NamedTuple):
    """A checkpoint that this process wrote, or resumed from."""

    version: int
    folder: Path


class Found(NamedTuple):
    """A checkpoint that was verified."""

    folder: Path
    manifest: CheckpointManifest
    digest: str

    def pipeline_state(self) -> PipelineState:
        ledger = decode_json((self.folder / LEDGER).read_bytes(), Ledger)
        return PipelineState(ledger, blocks.decode_snapshot((self.folder / ROWS).read_bytes()))

    def run_state(self) -> RunState:
        return decode_json((self.folder / RUN).read_bytes(), RunState)


class Checkpoints:
    """A `Checkpointer` that writes to the run folder, on its own thread, one checkpoint at a time."""

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        *,
        last_step: int,
        clock: Clock,
        sink: EventSink,
        last_seq: Callable[[], int],
        sync: Callable[[], None],
        run_state: Callable[[], RunState],
        best: Best | None = None,
    ) -> None:
        self._best = best
        self._folder = folder
        self._config = config
        self._last_step = last_step
        self._clock = clock
        self._sink = sink
        self._last_seq = last_seq
        self._sync = sync
        self._run_state = run_state
        self._thread = DaemonThreads("checkpoint", most=1)
        self._began_at: float | None = None
        self._version: int | None = None
        self._rest_s = 0.0
        self._writing: asyncio.Task[None] | None = None
        self._written: int | None = None
        self._is_hurried = False
        _tidy(self._folder)

    def resume_from(self, version: int) -> None:
        """The run was resumed from the checkpoint of this version, which is not written again."""
        self._began_at = self._clock.now()
        self._version = version
        self._written = version

    def is_due(self, version: int, *, is_last: bool) -> bool:
        if version == self._version:
            return False
        if self._began_at is None or version >= self._last_step or is_last or self._config.is_kept(version):
            return True
        if self._best is not None and self._best.is_due(version):
            return True
        is_writing = self._writing is not None and not self._writing.done()
        if is_writing or (self._clock.now() - self._began_at < self._rest_s and not self._is_hurried):
            return False
        if self._is_hurried:
            return True
        by_step, by_time = self._config.every_steps, self._config.every_s
        if by_step is not None and version % by_step == 0:
            return True
        return by_time is not None and self._clock.now() - self._began_at >= by_time

    def hurry(self) -> None:
        """Make the next one due as soon as no other is being written, whatever the config says."""
        self._is_hurried = True

    def mark(self) -> int:
        return self._last_seq()

    async def keep(self, pipeline: PipelineState, mark: int, snapshot: Snapshot, held_s: float) -> None:
        """Start writing a snapshot while training continues; waits for the one before it to be written."""
        if self._writing is not None:
            await asyncio.shield(self._writing)
        self._began_at = self._clock.now()
        self._version = pipeline.ledger.version
        self._rest_s = held_s / MAX_HELD
        self._is_hurried = False
        state = self._run_state()
        self._writing = asyncio.create_task(self._try(pipeline, mark, snapshot, state, held_s))

    async def close(self) -> None:
        """Wait until the last one is written, even if the caller is cancelled."""
        if self._writing is not None:
            await asyncio.shield(self._writing)
        await self._thread.close()

    @property
    def version(self) -> int | None:
        """The version of the newest one that is written; None if there is none."""
        return self._written

    async def newest_sealed(self) -> Sealed | None:
        """Waits until the one that is being written is sealed or has failed. Whether its folder still exists is not checked."""
        if self._writing is not None:
            await asyncio.shield(self._writing)
        return None if self._written is None else Sealed(self._written, self._folder / _name(self._written))

    async def _try(
        self, pipeline: PipelineState, mark: int, snapshot: Snapshot, state: RunState, held_s: float
    ) -> None:
        version = pipeline.ledger.version
        try:
            await self._thread.call(lambda: self._write(pipeline, mark, snapshot, state, held_s))
            self._written = version
        except (OSError, RuntimeError, LearnerError) as error:  # torch wraps errors of its file; ranks may die of it
            self._sink.emit(CheckpointFailed(at=self._clock.now(), version=version, message=_reason(error)))
            shutil.rmtree(self._unfinished(version), ignore_errors=True)

    # ---- on the thread -------------------------------------------------------------------------------------------------

    def _unfinished(self, version: int) -> Path:
        return self._folder / f".{_name(version)}.tmp"

    def _write(self, pipeline: PipelineState, mark: int, snapshot: Snapshot, state: RunState, held_s: float) -> None:
        began, version = self._clock.now(), pipeline.ledger.version
        folder = self._unfinished(version)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        snapshot.write(folder)
        (folder / ROWS).write_bytes(blocks.encode_snapshot(pipeline.rows))
        (folder / LEDGER).write_bytes(msgspec.json.encode(pipeline.ledger))
        (folder / RUN).write_bytes(msgspec.json.encode(state))
        written = sorted(path for path in folder.rglob("*") if path.is_file())
        files = {
            path.relative_to(folder).as_posix(): ManifestFile(bytes=path.stat().st_size, sha256=_sha256(path))
            for path in written
        }
        manifest = CheckpointManifest(format=FORMAT, run_id=state.run_id, version=version, covers_seq=mark, files=files)
        (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
        for path in (*folder.rglob("*"), folder):
            sync_path(path)
        self._sync()  # an event may be on the disk before the next one: what it covers must be
        event = CheckpointSealed(
            at=self._clock.now(),
            version=version,
            covers_seq=mark,
            digest=_sha256(folder / MANIFEST),
            num_bytes=sum(file.bytes for file in files.values()),
            held_s=held_s,
            seconds=self._clock.now() - began,
        )
        self._sink.emit(event)
        self._sync()
        folder.rename(self._folder / _name(version))
        sync_path(self._folder)
        folders = _all(self._folder)
        best = set[int]() if self._best is None else self._best.kept(map(_version, folders))
        for old in folders[: -self._config.keep]:
            if _version(old) not in best and not self._config.is_kept(_version(old)):
                _remove(old)


def find_newest(run_dir: Path, sealed: Collection[str], folder: str = FOLDER) -> tuple[Found | None, list[str]]:
    """The newest checkpoint that is intact and that the run's own log mentions (`sealed` has the digests), and what is wrong
    with newer ones. Changes nothing. Raises `CheckpointError` if there are checkpoints and none is usable."""
    troubles: list[str] = []
    found = None
    for path in reversed(_all(run_dir / folder)):
        try:
            found = verify(path)
            if found.digest in sealed:
                break
            troubles.append(f"{path} is not a checkpoint of this run: it is not in the run's log")
        except CheckpointError as error:
            troubles.append(str(error))
        found = None
    if troubles and found is None:
        raise CheckpointError(
            f"no checkpoint in {run_dir} is usable: {'; '.join(troubles)}. To start again with the same config:\n"
            f"  {program()} train {quote(str(run_dir / 'config.toml'))} --set run_dir=ANOTHER"
        )
    return found, troubles


def set_aside_newer(found: Found) -> None:
    """Rename checkpoints that are newer than the one that `find_newest` found to `.corrupt`: they are not usable."""
    for path in _all(found.folder.parent):
        if _version(path) > found.manifest.version:
            aside = path.with_name(path.name + ".corrupt")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def find_for_reading(run_dir: Path, folder: str, step: int | None) -> tuple[Found | None, list[str]]:
    """The newest intact checkpoint, or that of a step, and what is wrong with others that were read. Changes nothing, so that
    the run may be active: one that it removes meanwhile is skipped, and a newer one is looked for. Raises `CheckpointError` if
    the run removes one after the other."""
    troubles: list[str] = []
    looked_at: list[str] = []
    while len(looked_at) - len(troubles) < MAX_REMOVED:
        there = [path for path in _all(run_dir / folder) if step is None or path.name == _name(step)]
        path = next((path for path in reversed(there) if path.name not in looked_at), None)
        if path is None:
            return None, troubles
        looked_at.append(path.name)
        try:
            return verify(path), troubles
        except (CheckpointError, OutputError) as error:
            if path.exists():
                if isinstance(error, OutputError):
                    raise
                troubles.append(str(error))
    raise CheckpointError(
        f"the run in {run_dir} removed {', '.join(looked_at)} while they were read. Try again, or let it keep more of them: "
        "set checkpoint.keep higher"
    )


def steps_in(run_dir: Path) -> list[int]:
    """The steps that have checkpoints, intact or not, oldest first."""
    return [_version(path) for path in _all(run_dir / FOLDER)]


def verify(folder: Path) -> Found:
    """Verify every byte. Raises `CheckpointError` that names the file that differs from what was written."""
    try:
        raw = (folder / MANIFEST).read_bytes()
        manifest = decode_json(raw, CheckpointManifest)
        if manifest.format != FORMAT:
            raise CheckpointError(f"{folder} has format {manifest.format}; this version of Millstream reads {FORMAT}")
        if _name(manifest.version) != folder.name:
            raise CheckpointError(f"{folder / MANIFEST} is not the manifest of this checkpoint")
        for name, expected in manifest.files.items():
            path = folder / name
            if path.stat().st_size != expected.bytes:
                raise CheckpointError(f"{path} has {path.stat().st_size} bytes instead of {expected.bytes}")
            if _sha256(path) != expected.sha256:
                raise CheckpointError(f"{path} is not as it was written: its SHA-256 differs")
    except (FileNotFoundError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{folder} is not a complete checkpoint: {error}") from error
    except OSError as error:  # says nothing about the checkpoint itself: it is not renamed
        raise OutputError(f"cannot read {folder}: {error.strerror}. Repair that, and try again") from error
    return Found(folder, manifest, hashlib.sha256(raw).hexdigest())


def _name(version: int) -> str:
    return f"step-{version:06d}"


def _version(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _all(folder: Path) -> list[Path]:
    """Every checkpoint folder, oldest first."""
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(found, key=_version)


def _tidy(folder: Path) -> None:
    """Remove folders that a killed process left partly written or partly removed."""
    for path in (*folder.glob(".step-*.tmp"), *folder.glob(".step-*.old")):
        shutil.rmtree(path, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Renamed first: a partly removed folder must not look like a checkpoint."""
    old = folder.with_name(f".{folder.name}.old")
    folder.rename(old)
    shutil.rmtree(old, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reason(error: BaseException) -> str:
    """The operating system's message, if its refusal was the first cause."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error).split("\n")[0]
