"""The run folder: the files of a run, readable whether the run is active, stopped or finished.

config.toml      the resolved config
start/           of a run that began with another run's checkpoint: see `run.branch`
events.jsonl     every event
events.index     where they are and what they add up to: see `events.index`. Can be deleted
metrics.jsonl    one line a step, and one an evaluation
checkpoints/     see `run.checkpoint`
rollouts/        what was sampled, and what became of it: see `events.rollouts`
warmup/          checkpoints of supervised training, until the model is saved
reference/       the model after its warm-up, where that is the reference
model/           the trained model
summary.json     the run in numbers; written when the run is finished
advice.jsonl     what `millstream advise` said: see `run.advise`
notes.md         what was noted about the run (`millstream note`)
trace.json       a timeline for ui.perfetto.dev
control.json     while the run is active, where its control socket is: see `run.control`
stacks.txt       waits and stacks, written when the run stalls or on SIGUSR1
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import shutil
import tomllib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import BinaryIO

import msgspec
from msgspec import Struct, structs

from millstream.config import load, to_toml
from millstream.errors import ConfigError, OutputError
from millstream.events import (
    ConfigWritten,
    Estimate,
    Evaluated,
    Event,
    FindingMade,
    Resumed,
    RunEnded,
    RunStarted,
    WarmedUp,
)
from millstream.events.findings import findings_of
from millstream.events.sinks import read_events, read_history, read_kinds
from millstream.events.summary import Summary, summarise
from millstream.events.trace import perfetto
from millstream.imports import PASSED
from millstream.paths import kind_of, program
from millstream.run.changes import ChangedSetting, Tables, changed_settings, refused_change, tables_in, tables_of
from millstream.run.config import HELD_OUT, RunConfig, with_absolute_paths
from millstream.run.own_parts import passed_kinds

FINISHED = "finished"
LOCK = ".lock"
NOTES = "notes.md"
WRITTEN = (
    "config.toml",
    "metrics.jsonl",
    "summary.json",
    "trace.json",
    "model",
    "reference",
    "start",
    "checkpoints",
    "rollouts",
)
_HELD: set[Path] = set()  # folders that runs of this process have locked


class RunResult(Struct, frozen=True, kw_only=True):
    """The result of a run. Accuracies are mean rewards on the tasks of the first evaluation; None if it has none."""

    run_dir: str
    accuracy_before: float | None
    accuracy_after: float | None
    greedy_before: float | None
    greedy_after: float | None
    held_out_loss_before: float | None = None
    """Of supervised training: mean negative log-likelihood of a token of the held-out tasks; None without it."""
    held_out_loss_after: float | None = None
    summary: Summary
    findings: tuple[FindingMade, ...] = ()
    """What held at the end of the run: see docs/findings.md. Empty: nothing was found."""
    scores: dict[str, dict[str, Estimate]] = {}
    """Of every evaluation, by its name: pass@1, pass@k and avg@k with intervals. Of equal names, the last."""


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.events = path / "events.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.reference = path / "reference"
        self.config = path / "config.toml"
        self.start = path / "start"
        self.model = path / "model"
        self.stacks = path / "stacks.txt"
        self._lock: BinaryIO | None = None
        self._found: set[str] = set()  # names that were in the folder before it was this run's
        self._made: list[Path] = []  # folders that were made for it, the innermost first

    @classmethod
    def create(cls, config: RunConfig, name: str, fill: Callable[[RunFolder], None] = lambda folder: None) -> RunFolder:
        """A locked folder for a new run, with what `fill` writes and, last, the resolved config in it. Whatever ends this,
        nothing is left behind. `discard` removes what was made for it."""
        if config.run_dir is not None:
            check_free(config.run_dir)
            folder = cls(Path(config.run_dir))
        else:
            named = (cls(Path("runs") / f"{name}-{number}") for number in itertools.count(1))
            folder = next(folder for folder in named if not folder.path.exists())
        try:
            folder._make()
            if config.run_dir is None and folder.path not in folder._made:  # another process was faster
                return cls.create(config, name, fill)
            folder._found = {entry.name for entry in folder.path.iterdir()}
            folder.lock()
            fill(folder)
            folder.config.write_bytes(_config_file(config))
        except BaseException as error:
            folder.discard()
            if isinstance(error, OSError):
                raise ConfigError(f"cannot write the run folder {folder.path}: {error.strerror}") from error
            raise
        return folder

    def _make(self) -> None:
        """The folder and those around it. Which ones were made here is known exactly: another process may make some, too."""
        for place in reversed((self.path, *self.path.parents)):
            with suppress(FileExistsError):
                if not place.exists():
                    place.mkdir()
                    self._made.insert(0, place)

    def discard(self) -> None:
        """Remove what this run has made: files, and folders that were not there and are no runs; then unlock. For a run that
        has trained nothing. What another run has locked is not touched."""
        entries = list(self.path.iterdir()) if self._is_locked() else []
        for entry in entries:
            with suppress(OSError):
                if entry.name not in self._found and not (entry / LOCK).exists():
                    shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)
        for place in self._made:
            with suppress(OSError):  # something else is in it
                place.rmdir()
        self.unlock()

    @classmethod
    def of_run(cls, path: Path, name: str = "config.toml") -> RunFolder:
        """Raises `ConfigError` unless it has a file of this name, as the folder of a run does."""
        if kind_of(path / name) != "file":
            raise ConfigError(f"{path} is not a run folder: it has no {name}")
        return cls(path)

    @classmethod
    def reopen(cls, path: Path, changes: Sequence[str] = ()) -> tuple[RunFolder, RunConfig]:
        """The locked folder of a run that was stopped or died, and its config with `changes`, such as `learner.ranks=1`. Raises
        `ConfigError` if there is nothing to resume, or a change may not be."""
        folder = cls.of_run(path)
        config = folder.config_to_resume(changes)
        folder.check_resumable(config)
        folder.lock()
        return folder, config

    def check_resumable(self, config: RunConfig) -> None:
        """Raises `ConfigError` if the run is active, or finished with as many steps as `config` has."""
        if holder_of(self.path) is not None:
            raise ConfigError(is_active(self.path))
        is_over = (self.path / "summary.json").exists() and self.is_finished()
        done, steps = self.steps_done() if is_over else 0, config.pipeline.steps
        if is_over and steps <= done:
            fewer = f"{done} steps are trained, and pipeline.steps = {steps} asks for fewer. " if steps < done else ""
            raise ConfigError(
                f"the run in {self.path} is finished: its model is in {self.model}. {fewer}To train it for more steps, N "
                f"above {done}:\n  {resume_command(self.path, 'pipeline.steps=N')}\n"
                f"To train its model further, in a new run:\n  {_further_command(self, config)}"
            )

    def config_to_resume(self, changes: Sequence[str] = ()) -> RunConfig:
        """The config in the folder, edited by hand or not, with these changes. Raises `ConfigError` for a change that may not
        be, with what to type."""
        self.check_trained()
        now = load(self.config, RunConfig)
        config, logged = load(self.config, RunConfig, changes), self.logged_config()
        if logged is None and self.is_edited():
            raise ConfigError(
                f"{self.config} is not as the run wrote it: it was edited, and the log has no copy to compare it with. Restore "
                f"that file, or start another run with this one:\n  {self._as_new()}"
            )
        before = tables_of(now) if logged is None else logged
        if (refused := refused_change(changed_settings(before, tables_of(config)))) is not None:
            without = ["warmup="] if now.warmup is not None else []
            raise ConfigError(self._refusal(*refused, [*without, *changes]))
        return config

    def check_trained(self) -> None:
        """Raises `ConfigError` for the folder of a simulated run, which has no model and no checkpoints."""
        if self.is_simulated():
            raise ConfigError(
                f"the run in {self.path} is a simulated one: it has no model and no checkpoints. To train with its config:\n"
                f"  {self._as_new()}"
            )

    def is_simulated(self) -> bool:
        started = read_kinds(self.events, RunStarted) if self.events.exists() else ()
        return any(isinstance(event, RunStarted) and event.is_simulated for _, event in started)

    def _refusal(self, change: ChangedSetting, why: str, changes: Sequence[str]) -> str:
        is_typed = any(typed.partition("=")[0].strip() == change.key for typed in changes)
        who = f"--set {change}" if is_typed else f"{self.config} was edited: {change}"
        words = [
            self._as_new(),
            "--from",
            quote(str(self.path)),
            *(f"--set {quote(typed)}" for typed in changes),
        ]
        return (
            f"{who} does not go with --resume, and the run has {change.old!r}: {why}. To begin a new run with the weights and "
            f"the optimizer's state of this one:\n  {' '.join(words)}"
        )

    def _as_new(self) -> str:
        return f"{program()} train {quote(str(self.config))} --set run_dir=ANOTHER"

    def logged_config(self, upto: int | None = None) -> Tables | None:
        """The config that is in force by the log, or was after event `upto`. None: the log of an earlier version has none."""
        written = [event for event in self._configs(upto) if event.text]
        if not written:
            return None
        own = self.config_digest()
        last = next((event for event in reversed(written) if upto is None and event.digest == own), written[-1])
        return tables_in(last.text, str(self.events))

    def is_edited(self) -> bool:
        """Whether `config.toml` is none that a process of this run wrote. Earlier versions did not log that."""
        digests = {event.digest for event in self._configs()}
        return bool(digests) and self.config_digest() not in digests

    def _configs(self, upto: int | None = None) -> list[ConfigWritten]:
        """Of all processes of the run; or those in the history that ends with event `upto`."""
        found: list[tuple[int, ConfigWritten]] = []
        for seq, event in read_kinds(self.events, ConfigWritten, Resumed) if self.events.exists() else ():
            if upto is not None and seq > upto:
                break
            if isinstance(event, ConfigWritten):
                found.append((seq, event))
            elif isinstance(event, Resumed) and upto is not None:
                found = [(before, one) for before, one in found if before <= event.from_seq]
        return [event for _, event in found]

    def config_text(self, config: RunConfig | None = None) -> str:
        """Of `config.toml`: as it is, or as `keep` writes it for this config."""
        return (self.config.read_bytes() if config is None else _config_file(config)).decode()

    def config_digest(self, config: RunConfig | None = None) -> str:
        """SHA-256 of `config_text`."""
        return hashlib.sha256(self.config_text(config).encode()).hexdigest()

    def keep(self, config: RunConfig) -> None:
        """Replace the config in the folder by the one that the run is resumed with. Its digest must be in the log."""
        self._write(self.config.name, _config_file(config))

    def lock(self) -> None:
        """Held until `unlock` or the end of this process: two runs must not write to one folder."""
        if self.path.resolve() in _HELD:
            raise ConfigError(is_active(self.path))
        file = (self.path / LOCK).open("a+b")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by forked processes; ends with its process
        except OSError as error:
            file.close()
            raise ConfigError(is_active(self.path)) from error
        self._lock = file
        _HELD.add(self.path.resolve())
        file.truncate(0)
        file.write(str(os.getpid()).encode())
        file.flush()

    def unlock(self) -> None:
        if self._lock is not None and self._is_locked():
            _HELD.discard(self.path.resolve())
            self._lock.close()

    def _is_locked(self) -> bool:
        return self._lock is not None and not self._lock.closed

    def is_finished(self) -> bool:
        """Whether the last process of the run finished it, with or without writing the summary."""
        last = next(iter(deque(read_events(self.events), maxlen=1)), None) if self.events.exists() else None
        return isinstance(last, RunEnded) and last.outcome == FINISHED

    def steps_done(self) -> int:
        """The version that the last process of the run ended with."""
        ended = [event for _, event in read_kinds(self.events, RunEnded) if isinstance(event, RunEnded)]
        return ended[-1].version if ended else 0

    def conclude(self) -> RunResult:
        """Compute the result from the events; write `trace.json` and, last, `summary.json`."""
        result = result_of(read_history(self.events), str(self.path))
        flat = {**structs.asdict(result), **structs.asdict(result.summary)}
        del flat["summary"]
        self.write_trace()
        self._write("summary.json", msgspec.json.format(msgspec.json.encode(flat), indent=2) + b"\n")
        return result

    def write_trace(self) -> Path:
        return self._write("trace.json", msgspec.json.encode(perfetto(read_events(self.events))))

    def _write(self, name: str, data: bytes) -> Path:
        path = self.path / name
        new = path.with_name(f".{name}.new")
        try:
            new.write_bytes(data)
            new.replace(path)
        except OSError as error:
            raise OutputError(self.cannot_write(path, error)) from error
        return path

    def write(self, path: Path, write: Callable[[Path], None]) -> None:
        """Write something large. Raises `OutputError` with what to type, where that fails."""
        try:
            write(path)
        except OSError as error:
            raise OutputError(self.cannot_write(path, error)) from error

    def write_folder(self, path: Path, write: Callable[[Path], None]) -> None:
        """As `write`, under another name until it is complete: a process that is killed leaves the folder that was there, or
        none."""
        new, old = path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")

        def replace(path: Path) -> None:
            for left in (new, old):
                shutil.rmtree(left, ignore_errors=True)
            try:
                write(new)
                if path.exists():
                    path.rename(old)
                new.rename(path)
            finally:
                shutil.rmtree(new, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)

        self.write(path, replace)

    def cannot_write(self, path: Path, error: OSError) -> str:
        found = f"cannot write {path}: {error.strerror}. The run is not lost: repair that, then type"
        return f"{found}\n  {resume_command(self.path)}"


def result_of(events: Iterable[Event], run_dir: str) -> RunResult:
    """The result of a run with these events."""
    history = list(events)
    evaluated = [event for event in history if isinstance(event, Evaluated)]
    accuracy = {event.name: event.accuracy for event in evaluated}
    first = next((event.table for event in evaluated if event.table), HELD_OUT)
    of_first = "" if first == HELD_OUT else f"{first} "
    losses = [event.held_out_loss for event in history if isinstance(event, WarmedUp)]
    return RunResult(
        run_dir=run_dir,
        accuracy_before=accuracy.get(f"{of_first}sampled before"),
        accuracy_after=accuracy.get(f"{of_first}sampled after"),
        greedy_before=accuracy.get(f"{of_first}greedy before"),
        greedy_after=accuracy.get(f"{of_first}greedy after"),
        held_out_loss_before=losses[0] if losses else None,
        held_out_loss_after=losses[-1] if losses else None,
        summary=summarise(history),
        findings=tuple(past.finding for past in findings_of(history, run_dir) if past.until is None),
        scores={event.name: event.scores for event in evaluated if event.table},
    )


def _config_file(config: RunConfig) -> bytes:
    return to_toml(with_absolute_paths(config)).encode()


def check_free(run_dir: str) -> None:
    """Raises `ConfigError` for a folder that a new run cannot have: another run's, a file, or one that cannot be written."""
    path = Path(run_dir)
    if kind_of(path, "run_dir") not in (None, "folder"):
        raise ConfigError(f"run_dir = {run_dir!r} is a file: expected a folder, or a name that is free")
    if holder_of(path) is not None:
        raise ConfigError(f"{is_active(path)}. For a new run, choose another run_dir")
    if kind_of(path / "events.jsonl", "run_dir") is not None:
        if RunFolder(path).is_simulated():
            raise ConfigError(f"{path} holds a simulated run already: choose another folder, or remove this one")
        raise ConfigError(
            f"{path} holds a run already: choose another run_dir, or resume the run:\n  {resume_command(path)}"
        )
    if taken := [name for name in WRITTEN if kind_of(path / name, "run_dir") is not None]:
        raise ConfigError(f"run_dir = {run_dir!r} has {taken[0]}, which a run would replace: choose another run_dir")


def is_active(path: Path) -> str:
    """In words. The number of the process is not known where a run of an earlier version, or on another machine, has it."""
    holder = holder_of(path)
    who = f"process {holder}" if holder else "another process"
    return f"the run in {path} is active: {who} is writing to it. To see what it does: {program()} status {quote(str(path))}"


def holder_of(path: Path) -> int | None:
    """The process that has the lock of a run folder: 0 if it is not known which, None if there is none."""
    if path.resolve() in _HELD:  # a lock is the process's: asking for it would release it
        return os.getpid()
    try:
        file = (path / LOCK).open("rb")
    except OSError:  # there is none, or this user may not look
        return None
    with file:
        pid = file.read(20)
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return int(pid) if pid.isdigit() else 0
    return None


def resume_command(path: Path, *changes: str) -> str:
    """What to type; in Python where a part or the data were passed from there."""
    with suppress(OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        text = (path / "config.toml").read_text()
        marks = {"reward=function": f'\nfunction = "{PASSED}', "data=records": "\npassed = true\n"}
        passed = [argument for argument, mark in marks.items() if mark in text]
        if passed := [*passed, *(f"{kind}=..." for kind in passed_kinds(tomllib.loads(text)))]:
            arguments = [repr(str(path)), *passed, *([f"changes={list(changes)!r}"] if changes else [])]
            return f"millstream.resume({', '.join(arguments)}), from Python"
    return " ".join([program(), "train", "--resume", quote(str(path)), *(f"--set {quote(one)}" for one in changes)])


def _further_command(folder: RunFolder, config: RunConfig) -> str:
    """Trains a finished run's model further, with the run's own config."""
    changes = [f"model.path={folder.model}"]
    changes += ["model.tiny="] if config.model.tiny is not None else []
    changes += ["learner.lora="] if config.learner.lora is not None else []
    changes += ["warmup="] if config.warmup is not None else []
    changes += [f"run_dir={config.run_dir}-further"] if config.run_dir is not None else []
    return " ".join([program(), "train", quote(str(folder.config)), *(f"--set {quote(change)}" for change in changes)])
