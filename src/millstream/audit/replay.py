"""The replay of the event log: reads it twice, first for the few events that refer to earlier ones, then for all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from millstream.audit.checkpoints import CheckpointFolder
from millstream.audit.group_rules import GroupRules
from millstream.audit.history import Cursor, History
from millstream.audit.report import MALFORMED, AuditReport, Fields, reason_of
from millstream.audit.rollout_rules import check_rollouts
from millstream.audit.run_rules import RunRules
from millstream.audit.settings_rules import SettingsRules

HEAD = re.compile(rb'\{"seq":(\d+),"kind":"(\w+)"')
# Kinds that do not change a group's fate: only their number is checked.
SKIPPED = frozenset(
    b"span status stalled warmed_up warmup_sealed checkpoint_failed stop_requested".split(),
)


class Replay:
    def __init__(
        self, path: Path, checkpoints: list[CheckpointFolder], report: AuditReport, *, has_rollouts: bool = False
    ) -> None:
        self._path = path
        self._report = report
        self._size = path.stat().st_size if path.exists() else 0  # a run that is still writing: what is there now
        self._cursor = cursor = Cursor(report, are_compared=has_rollouts)
        self._run = run = RunRules(cursor, checkpoints)
        self._settings = settings = SettingsRules(cursor)
        groups = GroupRules(cursor, settings)
        self._in_training: dict[str, Callable[[Fields], None]] = {
            "group_admitted": groups.on_group_admitted,
            "rollout_started": groups.on_rollout_started,
            "rollout_ended": groups.on_rollout_ended,
            "rollout_failed": groups.on_rollout_failed,
            "rollout_aborted": groups.on_rollout_aborted,
            "group_restarted": groups.on_group_restarted,
            "group_scored": groups.on_group_scored,
            "group_taken": groups.on_group_taken,
            "group_left": groups.on_group_left,
            "group_resumed": groups.on_group_resumed,
            "stepped": groups.on_stepped,
            "weights_published": run.on_weights_published,
            "weights_loaded": run.on_weights_loaded,
        }
        self._at_any_time: dict[str, Callable[[Fields], None]] = {
            "config_written": settings.on_config_written,
            "lag_moved": settings.on_lag_moved,
            "setting_changed": settings.on_setting_changed,
            "run_started": run.on_run_started,
            "replica_joined": run.on_replica_joined,
            "replica_left": run.on_replica_left,
            "resumed": run.on_resumed,
            "checkpoint_sealed": run.on_checkpoint_sealed,
            "learner_restarted": run.on_learner_restarted,
            "evaluation_started": run.on_evaluation_started,
            "evaluated": run.on_evaluated,
            "run_ended": run.on_run_ended,
        }

    @property
    def settings(self) -> SettingsRules:
        return self._settings

    def compare_rollouts(self, folder: Path) -> None:
        check_rollouts(folder, self._cursor, self._run.last_covered, self._report)

    def run(self) -> History:
        """The history at the end of the log."""
        report, cursor = self._report, self._cursor
        for _, line in self._lines():
            self._look_ahead(line)
        for number, line in self._lines():
            cursor.line = number
            report.processes = max(1, report.processes)
            self._check(line)
            self._run.after_event()
        self._run.finish()
        report.void_events = report.events - cursor.now.num_events
        report.expect(report.events > 0, "log", f"{self._path} has no event: nothing is proved")
        return cursor.now

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Complete lines, numbered. A last line that a kill cut short is left out."""
        left = self._size
        if not left:
            return
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                left -= len(line)
                if left < 0 or not line.endswith(b"\n"):
                    return
                yield number, line

    def _look_ahead(self, line: bytes) -> None:
        head = HEAD.match(line)
        if head is None or head[2] in (b"resumed", b"checkpoint_sealed"):
            with suppress(*MALFORMED):  # the second reading reports it
                self._run.look_ahead(json.loads(line))

    def _check(self, line: bytes) -> None:
        cursor = self._cursor
        try:
            seq, kind, event = _parse(line)
        except MALFORMED as error:
            self._report.add_finding("log", f"events.jsonl:{cursor.line} is not an event: {reason_of(error)}")
            return
        due = cursor.seq + 1
        cursor.seq = seq
        self._report.events += 1
        cursor.now.num_events += 1
        cursor.expect(seq == due, "seq", f"seq {due} was expected")
        handle = self._handler(kind)
        try:
            handle(event)
        except MALFORMED as error:
            cursor.add_finding("log", f"{kind} is malformed: {reason_of(error)}")

    def _handler(self, kind: str) -> Callable[[Fields], None]:
        """The rule of an event; none, if it does not change a group's fate or comes before `run_started`."""
        now, cursor = self._cursor.now, self._cursor
        if kind not in self._in_training:
            return self._at_any_time.get(kind, _ignore)
        cursor.expect(now.outcome is None, "end", f"{kind} after the run ended: {now.outcome}")
        is_started = cursor.expect(now.terms is not None, "start", f"{kind} before run_started")
        return self._in_training[kind] if is_started else _ignore


def _ignore(event: Fields) -> None: ...


def _parse(line: bytes) -> tuple[int, str, Fields]:
    """Number, kind and fields; of a kind that is skipped, the number alone."""
    head = HEAD.match(line)
    if head is not None and head[2] in SKIPPED and line.endswith(b"}\n"):
        return int(head[1]), "", {}
    event = json.loads(line)
    return int(event["seq"]), str(event["kind"]), event
