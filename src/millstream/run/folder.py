"""The run folder: the files of a run, readable whether the run is active, stopped or finished.

config.toml      the resolved config
events.jsonl     every event
metrics.jsonl    one line a step
checkpoints/     see `run.checkpoint`
warmup/          checkpoints of supervised training, until the model is saved
reference/       the model after its warm-up, where that is the reference
model/           the trained model
summary.json     the run in numbers; written when the run is finished
trace.json       a timeline for ui.perfetto.dev
control.json     while the run is active, where its control socket is: see `run.control`
stacks.txt       waits and stacks, written when the run stalls or on SIGUSR1
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct, structs

from millstream.config import load, to_toml
from millstream.errors import ConfigError, OutputError
from millstream.events import ConfigWritten, Evaluated, FindingMade, RunEnded, WarmedUp
from millstream.events.findings import findings_of
from millstream.events.sinks import read_events, read_history
from millstream.events.summary import Summary, summarise
from millstream.events.trace import perfetto
from millstream.paths import kind_of
from millstream.run.config import RunConfig, with_absolute_paths

FINISHED = "finished"
LOCK = ".lock"
MAY_CHANGE = (
    *("runtime", "resources", "learner.ranks", "engine.replicas", "engine.process", "model.device"),
    *("engine.slots", "engine.cache_gb", "learner.micro_batch_tokens"),
)
"""Keys that may change when a run is resumed: where its parts run, how many there are, and how much memory they take.
`engine.process` and `model.device` are refused on a cluster, so that a run which has them could otherwise never move to one."""


class RunResult(Struct, frozen=True, kw_only=True):
    """The result of a run. Accuracies are mean rewards on the held-out tasks; None if there are none."""

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


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.events = path / "events.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.reference = path / "reference"
        self.config = path / "config.toml"
        self.model = path / "model"
        self.stacks = path / "stacks.txt"
        self._lock: BinaryIO | None = None

    @classmethod
    def create(cls, config: RunConfig, name: str) -> RunFolder:
        """A locked folder for a new run, with the resolved config in it."""
        if config.run_dir is not None:
            path = Path(config.run_dir)
            if kind_of(path / "events.jsonl", "run_dir") is not None:
                raise ConfigError(
                    f"{path} holds a run already: choose another run_dir, or resume the run:\n  {resume_command(path)}"
                )
        else:
            number = 1
            while (path := Path("runs") / f"{name}-{number}").exists():
                number += 1
        folder = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder.lock()
            folder.config.write_bytes(_config_file(config))
        except OSError as error:
            raise ConfigError(f"cannot write the run folder {path}: {error.strerror}") from error
        return folder

    @classmethod
    def of_run(cls, path: Path, name: str = "config.toml") -> RunFolder:
        """Raises `ConfigError` unless it has a file of this name, as the folder of a run does."""
        if kind_of(path / name) != "file":
            raise ConfigError(f"{path} is not a run folder: it has no {name}")
        return cls(path)

    @classmethod
    def reopen(cls, path: Path, changes: Sequence[str] = ()) -> tuple[RunFolder, RunConfig]:
        """The locked folder of a run that was stopped or died, and its config with `changes` of where its parts run, such as
        `learner.ranks=1`. Raises `ConfigError` if there is nothing to resume."""
        folder = cls.of_run(path)
        check_changes(changes)
        config = load(folder.config, RunConfig, changes)
        if (path / "summary.json").exists():
            raise ConfigError(
                f"the run in {path} is finished: its model is in {folder.model}. To train that further, in a new run:\n"
                f"  {_further_command(folder, config)}"
            )
        folder.lock()
        folder._check_config()
        return folder, config

    def _check_config(self) -> None:
        """Raises `ConfigError` if `config.toml` is none that a process of this run wrote. Earlier versions did not log that."""
        logged = (event for event in read_events(self.events) if isinstance(event, ConfigWritten))
        digests = {event.digest for event in logged} if self.events.exists() else set()
        if digests and self.config_digest() not in digests:
            raise ConfigError(
                f"{self.config} is not as the run wrote it: it was edited. A run is resumed with the config that it began "
                f"with: restore that file, or start another run with this one:\n"
                f"  {program()} train {self.config} --set run_dir=ANOTHER\n"
                f"Where the parts of a run are ({', '.join(MAY_CHANGE)}) is changed by --resume RUN --set KEY=VALUE"
            )

    def config_digest(self, config: RunConfig | None = None) -> str:
        """SHA-256 of `config.toml`: as it is, or as `keep` writes it for this config."""
        return hashlib.sha256(self.config.read_bytes() if config is None else _config_file(config)).hexdigest()

    def keep(self, config: RunConfig) -> None:
        """Replace the config in the folder by the one that the run is resumed with. Its digest must be in the log."""
        self._write(self.config.name, _config_file(config))

    def lock(self) -> None:
        """Held until `unlock` or the end of this process: two processes must not write to one run."""
        self._lock = (self.path / LOCK).open("wb")
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by forked processes
        except OSError as error:
            raise ConfigError(f"the run in {self.path} is active: another process is writing to it") from error

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def is_finished(self) -> bool:
        """Whether the last process of the run finished it, with or without writing the summary."""
        last = next(iter(deque(read_events(self.events), maxlen=1)), None) if self.events.exists() else None
        return isinstance(last, RunEnded) and last.outcome == FINISHED

    def conclude(self) -> RunResult:
        """Compute the result from the events; write `trace.json` and, last, `summary.json`."""
        history = list(read_history(self.events))
        accuracy = {event.name: event.accuracy for event in history if isinstance(event, Evaluated)}
        losses = [event.held_out_loss for event in history if isinstance(event, WarmedUp)]
        result = RunResult(
            run_dir=str(self.path),
            accuracy_before=accuracy.get("sampled before"),
            accuracy_after=accuracy.get("sampled after"),
            greedy_before=accuracy.get("greedy before"),
            greedy_after=accuracy.get("greedy after"),
            held_out_loss_before=losses[0] if losses else None,
            held_out_loss_after=losses[-1] if losses else None,
            summary=summarise(history),
            findings=tuple(past.finding for past in findings_of(history) if past.until is None),
        )
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

    def cannot_write(self, path: Path, error: OSError) -> str:
        found = f"cannot write {path}: {error.strerror}. The run is not lost: repair that, then type"
        return f"{found}\n  {resume_command(self.path)}"


def _config_file(config: RunConfig) -> bytes:
    return to_toml(with_absolute_paths(config)).encode()


def check_changes(changes: Sequence[str]) -> None:
    """Raises `ConfigError` unless all of them are in `MAY_CHANGE`: other data, algorithm or seed make another run."""
    for change in changes:
        key = change.partition("=")[0].strip()
        if key not in MAY_CHANGE and not key.startswith("resources."):
            raise ConfigError(
                f"--set {change} does not go with --resume: a run is resumed with the config it began with, but for where its "
                f"parts run ({', '.join(MAY_CHANGE)}, resources.*). For another config, start another run"
            )


def resume_command(path: Path) -> str:
    return f"{program()} train --resume {path}"


def _further_command(folder: RunFolder, config: RunConfig) -> str:
    """Trains a finished run's model further, with the run's own config."""
    changes = [f"model.path={folder.model}"]
    changes += ["model.tiny="] if config.model.tiny is not None else []
    changes += ["learner.lora="] if config.learner.lora is not None else []
    changes += ["warmup="] if config.warmup is not None else []
    changes += [f"run_dir={config.run_dir}-further"] if config.run_dir is not None else []
    return " ".join([program(), "train", str(folder.config), *(f"--set {change}" for change in changes)])


def program() -> str:
    """What to type for `millstream`: its path where the shell would not find it by name."""
    typed = Path(sys.argv[0])
    is_found = typed.name != "millstream" or shutil.which("millstream") is not None
    return "millstream" if is_found else str(typed)
