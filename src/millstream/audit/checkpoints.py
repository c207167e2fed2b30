"""The checkpoints on the disk: their files against their manifests, their ledgers against the history."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from millstream.audit.history import History, TrackedGroup
from millstream.audit.report import MALFORMED, AuditReport, Fields, reason_of

FORMATS = (1, 2)  # of checkpoints: what is read here is the same in both


@dataclass(slots=True)
class CheckpointFolder:
    """A folder whose manifest could be read. It is sound until a check fails."""

    path: Path
    report: AuditReport
    version: int
    covers_seq: int
    run_id: str
    digest: str
    ledger: Fields = field(default_factory=dict)
    is_sound: bool = True
    is_passed: bool = False  # the last event that it covers was read

    def expect(self, is_right: bool, rule: str, message: str) -> None:
        if not self.report.expect(is_right, rule, f"checkpoints/{self.path.name}: {message}"):
            self.is_sound = False

    def check_files(self, files: Fields) -> None:
        """The folder has every file of the manifest, intact, and no other."""
        found = {path.relative_to(self.path).as_posix() for path in self.path.rglob("*") if path.is_file()}
        for name in sorted(files.keys() | found - {"manifest.json"}):
            self.expect(name in found, "checkpoint", f"{name} is missing")
            self.expect(name in files, "checkpoint", f"{name} is not in the manifest")
            if name in found and name in files:
                self._check_file(self.path / name, files[name]["bytes"], files[name]["sha256"])

    def _check_file(self, path: Path, size: int, sha256: str) -> None:
        found = path.stat().st_size
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self.expect(found == size, "checkpoint", f"{path.name} has {found} bytes, not {size}")
        self.expect(digest == sha256, "checkpoint", f"{path.name} was changed: its SHA-256 differs")

    def compare(self, now: History) -> None:
        """With the history at the last event that it covers."""
        self.is_passed = True
        run_id = None if now.terms is None else now.terms.run_id
        self.expect(self.run_id == run_id, "seal", f"it is of run {self.run_id}, the events are of run {run_id}")
        try:
            self._compare_ledger(now)
        except MALFORMED as error:
            self.expect(False, "ledger", f"ledger.json is malformed: {reason_of(error)}")

    def _compare_ledger(self, now: History) -> None:
        version, next_group, vacant = self.ledger["version"], self.ledger["next_group"], set(self.ledger["vacant"])
        listed = {int(group_id): group for group_id, group in self.ledger["groups"].items()}
        is_now = version == self.version == now.version
        self.expect(is_now, "ledger", f"the ledger is of version {version}, the events of {now.version}")
        is_next = next_group == now.next_group
        self.expect(is_next, "ledger", f"next_group is {next_group}, the events have {now.next_group}")
        to_feed = len(self.ledger.get("to_feed", ()))
        are_fed = to_feed == len(now.to_feed)
        self.expect(are_fed, "ledger", f"{to_feed} prompts are to be fed again, the events have {len(now.to_feed)}")
        for group_id in sorted(now.groups.keys() | listed.keys() - vacant):
            self.expect(group_id in listed.keys() - vacant, "ledger", f"group {group_id} is in flight and not listed")
            self.expect(group_id in now.groups, "ledger", f"group {group_id} is listed and not in flight")
            if group_id in listed and group_id in now.groups:
                self._compare_group(group_id, listed[group_id], now.groups[group_id])

    def _compare_group(self, group_id: int, listed: Fields, group: TrackedGroup) -> None:
        recorded = [*(listed[name] for name in ("task_id", "epoch", "start", "deadline")), listed.get("restarts", 0)]
        due = [group.task_id, group.epoch, group.start, group.deadline, group.restarts]
        self.expect(recorded == due, "ledger", f"group {group_id} is {recorded} in the ledger, {due} in the events")
        for objection in group.objections(listed["kept"], listed["to_do"], group.own_terms.num_members):
            self.expect(not objection, "ledger", f"group {group_id}: {objection}")


def read_checkpoints(folder: Path, report: AuditReport) -> list[CheckpointFolder]:
    """The folders named `step-N`. Other names (unfinished, being removed, set aside by a resume) get a note."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if re.fullmatch(r"step-\d+", path.name) is None:
            report.notes.append(f"checkpoints/{path.name} is not named like a checkpoint: not checked")
            continue
        before, part = _read_manifest(path), AuditReport(report.run_dir)
        try:
            checkpoint = _read_checkpoint(path, part)
        except MALFORMED as error:
            checkpoint = None
            part.add_finding("checkpoint", f"checkpoints/{path.name} cannot be read: {reason_of(error)}")
        if not path.is_dir() or _read_manifest(path) != before:
            report.notes.append(f"checkpoints/{path.name} was removed by the run while it was read")
            continue
        report.checkpoints += 1
        report.merge(part)
        if checkpoint is not None:
            checkpoint.report = report
            found.append(checkpoint)
    return found


def _read_manifest(path: Path) -> bytes:
    with suppress(OSError):
        return (path / "manifest.json").read_bytes()
    return b""


def _read_checkpoint(path: Path, report: AuditReport) -> CheckpointFolder:
    raw = (path / "manifest.json").read_bytes()
    manifest = json.loads(raw)
    version, covers_seq, run_id = int(manifest["version"]), int(manifest["covers_seq"]), str(manifest["run_id"])
    found = CheckpointFolder(path, report, version, covers_seq, run_id, digest=hashlib.sha256(raw).hexdigest())
    found.expect(manifest["format"] in FORMATS, "checkpoint", f"its format is {manifest['format']}, not 1 or 2")
    found.expect(path.name == f"step-{version:06d}", "checkpoint", f"its manifest is that of step {version}")
    found.check_files(manifest["files"])
    with suppress(*MALFORMED):  # an empty ledger then disagrees with the events
        found.ledger = json.loads((path / "ledger.json").read_bytes())
    return found
