"""The state of a run in this process, shared by its phases: its parts, its progress, whether it must stop."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec import UNSET, UnsetType, structs

from millstream.clock import RealClock
from millstream.config import load
from millstream.engine import Engine
from millstream.errors import ConfigError
from millstream.events import (
    ConfigWritten,
    Resumed,
    RunEnded,
    SettingChanged,
    SizesChosen,
    Status,
    Warned,
)
from millstream.events.rollouts.writer import RolloutWriter
from millstream.pipeline.pipeline import Pipeline
from millstream.pipeline.reschedule import UNCHANGED
from millstream.run.best import BestCheckpoint
from millstream.run.changes import WHILE_TRAINING, ChangedSetting, changed_settings, effects_of, tables_of
from millstream.run.check import check_combinations
from millstream.run.checkpoint import FOLDER, WARMUP_FOLDER, Checkpoints, RunState
from millstream.run.config import RunConfig
from millstream.run.evaluate import new_waits
from millstream.run.folder import RunFolder, resume_command
from millstream.run.log import RunLog, run_started
from millstream.run.prepare import Prepared
from millstream.run.resume import ResumePoint, random_states
from millstream.run.sizes import memory_warning

if TYPE_CHECKING:
    from millstream.run.learn import LearningEndpoint
    from millstream.run.outside import OutsideParts


class Stoppable(Protocol):
    def stop(self) -> None:
        """End after the current batch, with a checkpoint."""
        ...


class ActiveRun:
    """One process of a run, started new (`resumed` is None) or from a checkpoint."""

    def __init__(self, prepared: Prepared, folder: RunFolder, log: RunLog, resumed: ResumePoint | None) -> None:
        self.prepared = prepared
        self.config = prepared.config
        self.folder = folder
        self.log = log
        self.resumed = resumed
        self.found = None if resumed is None else resumed.found
        self.changed = UNCHANGED if resumed is None else effects_of(resumed.changes)
        self.is_config_new = resumed is not None and (bool(resumed.changes) or resumed.is_edited)
        self.incarnation = 0 if resumed is None else resumed.previous.incarnation + 1
        self.clock = RealClock(0.0 if resumed is None else resumed.previous.ended_at)
        self.waits = new_waits(self.config, self.clock, log)
        self.state = None if self.found is None else self.found.run_state()
        self.run_id = secrets.token_hex(8) if self.state is None else self.state.run_id
        self.start_version = 0 if resumed is None else resumed.version
        self.pipeline: Pipeline | None = None
        self.rollouts: RolloutWriter | None = None
        self.checkpoints: Checkpoints | None = None
        self.best: BestCheckpoint | None = None  # with checkpoint.keep_best
        self.sft_step_kept = 0  # the step of the newest checkpoint of supervised training that this process wrote
        self.has_begun = False  # whether training has
        self.at_work: Stoppable | None = None  # what a first signal lets finish its batch
        self.stopped_by: signal.Signals | None = None
        self.grace: asyncio.TimerHandle | None = None
        self.send_alerts: Callable[[], None] = lambda: None  # those that wait; called where the process ends at once
        self.is_done = False
        self.endpoint: LearningEndpoint | None = None  # of a run that learns from its use
        self.outside: OutsideParts | None = None  # where programs outside sample or train for it

    @property
    def version(self) -> int:
        """The version that training is at."""
        return self.start_version if self.pipeline is None else self.pipeline.admission.version

    @property
    def is_stopping(self) -> bool:
        return self.stopped_by is not None

    @property
    def is_untouched(self) -> bool:
        """Whether nothing of this new run is worth keeping: it ended before training began, or was stopped in the first step,
        without a checkpoint."""
        folder = self.folder
        is_new = self.resumed is None and not self.version and not any((folder.path / WARMUP_FOLDER).glob("*"))
        has_checkpoint = any((folder.path / FOLDER).glob("*")) and (self.is_stopping or self.config.warmup is not None)
        has_stacks = folder.stacks.exists() and folder.stacks.stat().st_size > 0
        was_stopped = self.is_stopping and not self.config.pipeline.rollouts_only
        return is_new and not has_checkpoint and not has_stacks and (was_stopped or not self.has_begun)

    def end_grace(self) -> None:
        """The grace period is for the batch; the last checkpoint may take as long as it needs."""
        if self.grace is not None:
            self.grace.cancel()

    def adopt(self, engine: Engine) -> bool:
        """Whether the pipeline, if there is one, takes this new engine in."""
        return self.pipeline is not None and self.pipeline.sync.adopt(engine)

    def sync(self) -> None:
        """Returns when the log and the rollouts so far are on the disk."""
        if self.rollouts is not None:
            self.rollouts.sync()
        self.log.sync()

    def checkpoint_state(self) -> RunState:
        return RunState(run_id=self.run_id, data_digest=self.prepared.data_digest, generators=random_states())

    async def status(self) -> Status:
        if self.pipeline is not None:
            return await self.pipeline.status()
        return Status(
            at=self.clock.now(),
            requests_running=0,
            requests_waiting=0,
            rows_in_store=0,
            groups_outstanding=0,
            groups_taken=0,
            budget=0,
            waits=self.waits.counted(),
        )

    # ---- events ------------------------------------------------------------------------------------------------------

    def emit_begun(self) -> None:
        """That an earlier process is continued, and with which config; of a new run, what there is to warn of."""
        resumed, found = self.resumed, self.found
        if resumed is not None:
            self.log.emit(
                Resumed(
                    at=self.clock.now(),
                    incarnation=self.incarnation,
                    version=self.start_version,
                    from_seq=-1 if found is None else found.manifest.covers_seq,
                    digest="" if found is None else found.digest,
                    changes=tuple(map(str, resumed.changes)),
                )
            )
        self._emit_config(
            self.prepared.written if self.is_config_new else None, () if resumed is None else resumed.changes
        )
        if resumed is None and self.prepared.warning:
            self.warn(self.prepared.warning)
        self._emit_sizes()

    def _emit_config(self, own: RunConfig | None, changes: Iterable[ChangedSetting]) -> None:
        """`own`: a config that is to replace the one in the folder."""
        text, digest = self.folder.config_text(own), self.folder.config_digest(own)
        self.log.emit(ConfigWritten(at=self.clock.now(), digest=digest, text=text))
        for key, old, new in changes:
            self.log.emit(SettingChanged(at=self.clock.now(), key=key, old=old, new=new, version=self.version))

    def begin(self, work: Stoppable) -> None:
        """Training begins. A start that fails before leaves nothing behind; a resume, the config as it was."""
        self.at_work = work
        self.has_begun = True
        if self.is_config_new:
            self.log.sync()  # a config is in the folder only if its digest is in the log
            self.folder.keep(self.prepared.written)
            (self.folder.path / "summary.json").unlink(missing_ok=True)  # of a finished run that trains on

    def change_settings(self, settings: Sequence[str]) -> list[ChangedSetting]:
        """Change settings of the active run, each as `KEY=VALUE`, for the groups that start from now on. Each is an event, and
        is in the config of the folder. Raises `ConfigError`, and has changed nothing, if one may not change while it trains."""
        written = load(self.folder.config, RunConfig, settings)
        changes = changed_settings(tables_of(self.prepared.written), tables_of(written))
        instead = f"Stop the run (Ctrl-C), and resume it:\n  {resume_command(self.folder.path, *settings)}"
        if other := [change.key for change in changes if change.key not in WHILE_TRAINING]:
            raise ConfigError(
                f"{other[0]} cannot change while the run trains; {', '.join(WHILE_TRAINING)} can. {instead}"
            )
        if self.config.pipeline.is_in_lockstep or written.pipeline.is_in_lockstep:
            raise ConfigError(f"a run cannot begin or end lockstep (pipeline.max_lag = 0) while it trains. {instead}")
        check_combinations(written)
        if self.pipeline is None or self.pipeline.admission.is_finished or self.config.data.rollouts is not None:
            raise ConfigError("the run has no groups whose lag could change: it does not train on new rollouts now")
        if changes:
            self._use(written, changes)
        return changes

    def _use(self, written: RunConfig, changes: Sequence[ChangedSetting]) -> None:
        assert self.pipeline is not None
        self.prepared = structs.replace(self.prepared, written=written)
        self.config = structs.replace(self.config, pipeline=written.pipeline)
        self._emit_config(written, changes)
        self.pipeline.change_lag(written.pipeline)
        self.log.sync()  # a config is in the folder only if its digest is in the log
        self.folder.keep(written)

    def _emit_sizes(self) -> None:
        sizes, are_kept = self.prepared.sizes, self.prepared.are_sizes_kept
        device = self.prepared.places.words() or str(self.prepared.model.device)
        device = "cluster" if self.config.runtime == "ray" else device
        self.log.emit(SizesChosen(at=self.clock.now(), sizes=sizes, device=device, is_kept=are_kept))
        if warning := memory_warning(sizes, self.prepared.config, written=self.prepared.written, are_kept=are_kept):
            self.warn(warning)

    def emit_started(self) -> None:
        data = self.config.data
        is_from_data = data.rollouts is None and not data.sessions and not data.sampler
        num_tasks = len(self.prepared.data.train) if is_from_data else 0
        self.log.emit(run_started(self.config, at=self.clock.now(), run_id=self.run_id, num_tasks=num_tasks))

    def emit_ended(self, outcome: str, message: str | UnsetType = UNSET) -> None:
        self.log.emit(RunEnded(at=self.clock.now(), outcome=outcome, version=self.version, message=message))

    def warn(self, message: str) -> None:
        self.log.emit(Warned(at=self.clock.now(), message=message))
