"""Checkpoints: written beside training, whole or not at all, verified before they are believed.

    RUN/checkpoints/step-000120/
        learner.pt        what the learner wrote: weights, optimizer, schedule; several ranks: .metadata, __0_0.distcp, ...
        critic/           what the critic wrote, where there is one
        rows.msgpack      the store's rows
        ledger.json       the groups in flight, the data cursor
        run.json          the run's identity, a digest of its data, the state of global generators
        manifest.json     version, the last event covered, size and SHA-256 of every file

The order of writing is the promise. Files first, into a folder under another name; then the manifest; all of it flushed to the
disk; then the event `CheckpointSealed`, flushed with every event before it; and only then the folder gets its name. Whatever is
killed when, a folder with a right name is complete, and the events that it covers are in the log.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from millstream.clock import Clock
from millstream.errors import CheckpointError, LearnerError, OutputError
from millstream.events import CheckpointFailed, CheckpointSealed, EventSink
from millstream.learner import Snapshot
from millstream.pipeline.state import Ledger, PipelineState
from millstream.rpc.threads import DaemonThreads
from millstream.store import codec

FORMAT = 2
"""1: had rows without `turn_rewards`, which would never be settled, and a state of the learner without masters."""
FOLDER = "checkpoints"
WARMUP_FOLDER = "warmup"
"""Those of supervised training; gone when the run is over."""
MANIFEST, LEDGER, ROWS, RUN = "manifest.json", "ledger.json", "rows.msgpack", "run.json"
TRIES = 3
"""Of checkpoints that a run at work removes while they are read."""
MAX_HELD = 0.01
"""The share of the time that training may stand still for checkpoints: where one takes long, they are made less often."""


class CheckpointConfig(Struct, frozen=True, kw_only=True):
    """There is always one before the first step, after the last, and at a clean stop."""

    every_s: float | None = 60.0
    """Between two steps, when so many seconds have passed since the last one. None: not by time."""
    every_steps: int | None = None
    """Instead, or as well: after every so many steps."""
    keep: int = 2
    """How many are kept: the newest ones."""
    grace_s: float = 20.0
    """After SIGTERM or Ctrl-C: how long to wait for the batch in hand, so that it is in the last checkpoint."""

    def __post_init__(self) -> None:
        if (self.every_s is not None and self.every_s <= 0) or (self.every_steps is not None and self.every_steps < 1):
            raise ValueError("every_s must be above 0, every_steps at least 1")
        if self.keep < 1 or self.grace_s < 0:
            raise ValueError("keep must be at least 1 and grace_s at least 0")


class File(Struct, frozen=True, kw_only=True):
    bytes: int
    sha256: str


class Manifest(Struct, frozen=True, kw_only=True):
    format: int
    run_id: str
    version: int
    covers_seq: int
    files: dict[str, File]


class RunState(Struct, frozen=True, kw_only=True):
    """What outlives a process beside the pipeline's own standing."""

    run_id: str
    data_digest: str
    generators: dict[str, Any]
    """Of Python, numpy and torch: rewards of the user's own may draw from them."""


class Sealed(NamedTuple):
    """A checkpoint that this process wrote, or began with."""

    version: int
    folder: Path


class Found(NamedTuple):
    """A checkpoint that was verified."""

    folder: Path
    manifest: Manifest
    digest: str

    def standing(self) -> PipelineState:
        ledger = msgspec.json.decode((self.folder / LEDGER).read_bytes(), type=Ledger)
        return PipelineState(ledger, codec.decode_snapshot((self.folder / ROWS).read_bytes()))

    def run_state(self) -> RunState:
        return msgspec.json.decode((self.folder / RUN).read_bytes(), type=RunState)


class Checkpoints:
    """A `Checkpointer` that writes to the run folder, on a thread of its own, one at a time."""

    def __init__(
        self,
        run_dir: Path,
        config: CheckpointConfig,
        *,
        last_step: int,
        clock: Clock,
        sink: EventSink,
        last_seq: Callable[[], int],
        sync: Callable[[], None],
        run_state: Callable[[], RunState],
        folder: str = FOLDER,
    ) -> None:
        self._folder = run_dir / folder
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

    def goes_on_from(self, version: int) -> None:
        """The run was resumed: this one is there already."""
        self._began_at = self._clock.now()
        self._version = version
        self._written = version

    def is_due(self, version: int, *, is_last: bool) -> bool:
        if version == self._version:
            return False
        if self._began_at is None or version >= self._last_step or is_last:
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
        """The next one is due as soon as no other is being written, whatever the config says."""
        self._is_hurried = True

    def mark(self) -> int:
        return self._last_seq()

    async def keep(self, standing: PipelineState, mark: int, snapshot: Snapshot, held_s: float) -> None:
        """The copies are made; the writing goes on beside training, one at a time."""
        if self._writing is not None:
            await asyncio.shield(self._writing)
        self._began_at = self._clock.now()
        self._version = standing.ledger.version
        self._rest_s = held_s / MAX_HELD
        self._is_hurried = False
        state = self._run_state()
        self._writing = asyncio.create_task(self._try(standing, mark, snapshot, state, held_s))

    async def close(self) -> None:
        """Wait until the last one is written, even if whoever waits is told to stop."""
        if self._writing is not None:
            await asyncio.shield(self._writing)
        await self._thread.close()

    @property
    def version(self) -> int | None:
        """That of the newest one that is written; None if there is none."""
        return self._written

    async def newest_sealed(self) -> Sealed | None:
        """Waits until the one that is being written is sealed, or has failed. Nobody has looked whether it is still there."""
        if self._writing is not None:
            await asyncio.shield(self._writing)
        return None if self._written is None else Sealed(self._written, self._folder / _name(self._written))

    async def _try(
        self, standing: PipelineState, mark: int, snapshot: Snapshot, state: RunState, held_s: float
    ) -> None:
        version = standing.ledger.version
        try:
            await self._thread.call(lambda: self._write(standing, mark, snapshot, state, held_s))
            self._written = version
        except (
            OSError,
            RuntimeError,
            LearnerError,
        ) as error:  # torch wraps the errors of its file; ranks may die of it
            self._sink.emit(CheckpointFailed(at=self._clock.now(), version=version, message=_reason(error)))
            shutil.rmtree(self._unfinished(version), ignore_errors=True)

    # ---- on the thread -------------------------------------------------------------------------------------------------

    def _unfinished(self, version: int) -> Path:
        return self._folder / f".{_name(version)}.tmp"

    def _write(self, standing: PipelineState, mark: int, snapshot: Snapshot, state: RunState, held_s: float) -> None:
        began, version = self._clock.now(), standing.ledger.version
        folder = self._unfinished(version)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        snapshot.write(folder)
        (folder / ROWS).write_bytes(codec.encode_snapshot(standing.rows))
        (folder / LEDGER).write_bytes(msgspec.json.encode(standing.ledger))
        (folder / RUN).write_bytes(msgspec.json.encode(state))
        written = sorted(path for path in folder.rglob("*") if path.is_file())
        files = {
            path.relative_to(folder).as_posix(): File(bytes=path.stat().st_size, sha256=_sha256(path))
            for path in written
        }
        manifest = Manifest(format=FORMAT, run_id=state.run_id, version=version, covers_seq=mark, files=files)
        (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
        for path in (*folder.rglob("*"), folder):
            _sync(path)
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
        _sync(self._folder)
        for old in _all(self._folder)[: -self._config.keep]:
            _remove(old)


def newest(run_dir: Path, sealed: Collection[str], folder: str = FOLDER) -> tuple[Found | None, list[str]]:
    """The newest checkpoint that is whole and that the run's own log tells of (`sealed` has the digests), and what is wrong
    with the newer ones, which are set aside under another name. Raises `CheckpointError` if there are some and none will do."""
    troubles: list[str] = []
    spoiled: list[Path] = []
    found = None
    for path in reversed(_all(run_dir / folder)):
        try:
            found = verify(path)
            if found.digest in sealed:
                break
            troubles.append(f"{path} is not a checkpoint of this run: its log knows nothing of it")
        except CheckpointError as error:
            troubles.append(str(error))
        found = None
        spoiled.append(path)
    if spoiled and found is None:
        raise CheckpointError(
            f"no checkpoint in {run_dir} will do: {'; '.join(troubles)}. To begin anew, with the same config: "
            f"millstream train {run_dir / 'config.toml'} --set run_dir=ANOTHER"
        )
    for path in spoiled:
        aside = path.with_name(path.name + ".corrupt")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    return found, troubles


def look_for(run_dir: Path, folder: str, step: int | None) -> tuple[Found | None, list[str]]:
    """The newest checkpoint that is whole, or that of a step, and what is wrong with others that were looked at. Touches
    nothing, so that the run may be alive: one that it removes meanwhile is none, and there may be a newer one then. Raises
    `CheckpointError` where it removes one after the other."""
    troubles: list[str] = []
    looked_at: list[str] = []
    while len(looked_at) - len(troubles) < TRIES:
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
        "checkpoint.keep"
    )


def steps_in(run_dir: Path) -> list[int]:
    """Those of which there are checkpoints, whole or not; the oldest first."""
    return [int(path.name.removeprefix("step-")) for path in _all(run_dir / FOLDER)]


def verify(folder: Path) -> Found:
    """Every byte. Raises `CheckpointError` that names the file that is not as it was written."""
    try:
        raw = (folder / MANIFEST).read_bytes()
        manifest = msgspec.json.decode(raw, type=Manifest)
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
        raise CheckpointError(f"{folder} is not a whole checkpoint: {error}") from error
    except OSError as error:  # not a word about the checkpoint itself: it stays where it is
        raise OutputError(f"cannot read {folder}: {error.strerror}. Mend that, and try again") from error
    return Found(folder, manifest, hashlib.sha256(raw).hexdigest())


def _name(version: int) -> str:
    return f"step-{version:06d}"


def _all(folder: Path) -> list[Path]:
    """The oldest first."""
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _tidy(folder: Path) -> None:
    """Remove what a kill left half written or half removed."""
    for path in (*folder.glob(".step-*.tmp"), *folder.glob(".step-*.old")):
        shutil.rmtree(path, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Under another name first: what is half removed must not look like a checkpoint."""
    old = folder.with_name(f".{folder.name}.old")
    folder.rename(old)
    shutil.rmtree(old, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException) -> str:
    """In the operating system's words, if it was its refusal that began it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error).split("\n")[0]
