"""The audit of a training service's folder: what became of every request that was acknowledged, session by session.

    sessions/ID.jsonl                  every event against the history before it
    models/ID/snapshot-N, journal-N    every acknowledged request is in the snapshot or in the journal     service_disk.py

A `model_restored` event takes the model's history back to the request that it names; later ones are void, and are compared with
what is computed again. The folder of a service that is running can be audited as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from millstream.audit.report import MALFORMED, AuditReport, Fields, reason_of
from millstream.audit.service_disk import DiskState, disk_state

SERVICE_RULES = {
    "log": "every line is an event with its fields; only the last may be torn",
    "seq": "events of a session are numbered without a gap, over all processes of the service",
    "session": "session_started comes first, and once; models and samplers are made before they are used",
    "order": "requests of a model are done in the order of their numbers, each once",
    "version": "a request begins at the version that the one before it left; only a step or a load raises it, by one",
    "restored": "a model is restored at a request that was done, with the version that it had then",
    "replay": "a request that is computed again is the same one, and leaves the same version",
    "acknowledged": "every acknowledged request is done and in the snapshot, or in the journal, byte for byte",
    "sampled": "of a session with max_lag, rows were sampled from their model, at the version that they name",
    "lag": "of a session with max_lag, no row of a loss for samples is older than that when it is trained",
}
RAISES_VERSION = ("optim_step", "load_weights")
SEQUENCE = re.compile(r"(?P<sampler>.+):(?P<seq_id>\d+):\d+:v(?P<version>\d+)")


@dataclass(slots=True)
class ServiceReport(AuditReport):
    """Counts describe the history behind the newest weights."""

    sessions: int = 0
    models: int = 0
    requests: int = 0
    requests_refused: int = 0
    rows_trained: int = 0
    samples: int = 0
    replayed: int = 0  # requests that were computed again after a restart
    replayed_exactly: int = 0  # with the same result, bit for bit
    lag_unknown: int = 0  # trained rows that do not say what they were sampled from


class DoneRequest(NamedTuple):
    request: str
    next_version: int
    digest: int
    is_refused: bool
    num_rows: int  # that were trained
    num_unknown: int
    sequences: tuple[str, ...]  # that were trained


@dataclass(slots=True)
class ModelHistory:
    accepted: dict[int, tuple[int, int]] = field(
        default_factory=dict
    )  # by number: digest, and the end of the event's line
    done: list[DoneRequest] = field(default_factory=list)  # number 1 first
    void: dict[int, DoneRequest] = field(default_factory=dict)  # done before the last restore

    def version_after(self, number: int) -> int:
        return self.done[number - 1].next_version if number else 0


class Samples:
    """Of all sessions: a sampler may be used by another session of the same key."""

    def __init__(self) -> None:
        self.samplers: dict[str, tuple[str | None, int]] = {}  # the model, and its version
        self.done: set[tuple[str, int]] = set()

    def add(self, event: Fields) -> None:
        if event["kind"] == "sampler_made":
            self.samplers[event["sampler"]] = (event["model"], event["version"])
        elif event["kind"] == "samples_done":
            self.done.add((event["sampler"], event["seq_id"]))


def is_service_folder(folder: Path) -> bool:
    return (folder / "sessions").is_dir() and (folder / "models").is_dir()


def audit_service(folder: Path) -> ServiceReport:
    """Never raises for what it finds in the folder."""
    report, samples = ServiceReport(folder), Samples()
    logs = sorted((folder / "sessions").glob("*.jsonl"))
    for path in logs:
        for _, _, line in _lines(path):
            if b'"kind":"sample' in line:
                try:
                    samples.add(json.loads(line))
                except MALFORMED:  # the second reading reports it
                    continue
    for path in logs:
        SessionReplay(path, folder, samples, report).run()
    for path in sorted((folder / "sessions").glob("*.json")):
        report.expect(path.with_suffix(".jsonl") in logs, "session", f"{path.name} has no event log")
    report.expect(bool(logs), "log", f"{folder} has no session: nothing is proved")
    return report


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Complete lines: number, end in the file, and text."""
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            end += len(line)
            yield number, end, line


class SessionReplay:
    def __init__(self, path: Path, folder: Path, samples: Samples, report: ServiceReport) -> None:
        self._path = path
        self._folder = folder
        self._samples = samples
        self._report = report
        self._models: dict[str, ModelHistory] = {}
        self._is_started = False
        self._max_lag: int | None = None
        self._where = ""
        self._end = 0
        self._rules = {
            "session_started": self._on_session_started,
            "model_made": self._on_model_made,
            "model_restored": self._on_model_restored,
            "request_accepted": self._on_request_accepted,
            "request_done": self._on_request_done,
            "sampler_made": self._on_sampler,
            "samples_done": self._on_sampler,
        }

    def run(self) -> None:
        """The size of the log is read, then the folders of the models, then the log: what was acknowledged up to that size is
        on the disk, and what a snapshot there covers is in the log."""
        size = self._path.stat().st_size
        disks = {path.name: disk_state(path) for path in (self._folder / "models").glob(f"{self._path.stem}_train_*")}
        due = 0
        for number, end, line in _lines(self._path):
            self._end = end
            self._where = f"sessions/{self._path.name}:{number}"
            due = self._check(line, due)
        self._report.sessions += 1
        for name, history in self._models.items():
            self._compare(name, history, disks.get(_folder_name(name)), size)
            self._count(history)

    def _expect(self, is_right: bool, rule: str, message: str) -> bool:
        return self._report.expect(is_right, rule, f"{self._where}: {message}")

    def _check(self, line: bytes, due: int) -> int:
        """Returns the number of the next event."""
        try:
            event = json.loads(line)
            seq, kind = int(event["seq"]), str(event["kind"])
        except MALFORMED as error:
            self._report.add_finding("log", f"{self._where} is not an event: {reason_of(error)}")
            return due + 1
        self._report.events += 1
        self._expect(seq == due, "seq", f"seq is {seq}, {due} was expected")
        is_first = kind == "session_started"
        self._expect(
            is_first != self._is_started, "session", f"{kind} {'again' if is_first else 'before session_started'}"
        )
        try:
            rule = self._rules.get(kind)
            if rule is None:
                self._report.add_finding("log", f"{self._where}: {kind} is not an event of a session")
            else:
                rule(event)
        except MALFORMED as error:
            self._report.add_finding("log", f"{self._where}: {kind} is malformed: {reason_of(error)}")
        return seq + 1

    def _on_session_started(self, event: Fields) -> None:
        self._is_started = True
        self._max_lag = event["max_lag"]

    def _on_model_made(self, event: Fields) -> None:
        """A crash may repeat it before the model is used."""
        name = event["model"]
        is_new = name not in self._models or not self._models[name].accepted
        self._expect(is_new, "session", f"{name} is made again, and has requests")
        self._models[name] = ModelHistory()

    def _on_sampler(self, event: Fields) -> None:
        name, version = event["sampler"], event["version"]
        _, made = self._samples.samplers.get(name, (None, None))
        self._expect(made == version, "sampled", f"{name} samples at version {version}, and was made of {made}")
        self._report.samples += event.get("num_samples", 0)

    def _model(self, event: Fields) -> ModelHistory | None:
        name = event["model"]
        self._expect(name in self._models, "session", f"{event['kind']} of {name}, which was not made")
        return self._models.get(name)

    def _on_model_restored(self, event: Fields) -> None:
        model, number, version = self._model(event), event["next_seq_id"], event["version"]
        if model is None:
            return
        is_known = self._expect(
            1 <= number <= len(model.done) + 1,
            "restored",
            f"{event['model']} is restored at request {number}, and {len(model.done)} were done",
        )
        if is_known:
            before = model.version_after(number - 1)
            self._expect(
                before == version,
                "restored",
                f"it is restored at version {version}, and request {number} began at {before}",
            )
            model.void = model.void | dict(enumerate(model.done[number - 1 :], number))
            del model.done[number - 1 :]

    def _on_request_accepted(self, event: Fields) -> None:
        model, number = self._model(event), event["seq_id"]
        if model is not None:
            is_new = number not in model.accepted and number > len(model.done)
            self._expect(is_new, "order", f"request {number} of {event['model']} is accepted twice")
            model.accepted[number] = (event["digest"], self._end)

    def _on_request_done(self, event: Fields) -> None:
        model, number, request = self._model(event), event["seq_id"], event["request"]
        if model is None:
            return
        version, after, is_refused = event["version"], event["next_version"], event.get("error") is not None
        due = len(model.done) + 1
        if not self._expect(number == due, "order", f"request {number} is done, {due} was expected"):
            return
        before, rises = model.version_after(number - 1), request in RAISES_VERSION and not is_refused
        self._expect(
            version == before, "version", f"request {number} begins at {version}, the one before left {before}"
        )
        self._expect(after == version + rises, "version", f"{request} took version {version} to {after}")
        passed = event.get("passed")
        rows = passed["rows"] if passed is not None and passed["is_backward"] else []
        sequences = tuple(name for _, names in rows for name in names)
        num_unknown = sum(not names for _, names in rows) if passed is not None and passed["is_sampled"] else 0
        made = DoneRequest(request, after, event["digest"], is_refused, len(rows), num_unknown, sequences)
        if passed is not None and passed["is_sampled"]:
            self._check_rows(event["model"], version, passed["rows"])
        if (void := model.void.pop(number, None)) is not None:
            self._compare_replay(number, void, made)
        model.done.append(made)

    def _compare_replay(self, number: int, void: DoneRequest, made: DoneRequest) -> None:
        what = "request {} was {} to version {}, and {} to {} when it was computed again"
        is_same = (void.request, void.next_version) == (made.request, made.next_version)
        self._expect(
            is_same, "replay", what.format(number, void.request, void.next_version, made.request, made.next_version)
        )
        self._report.replayed += 1
        self._report.replayed_exactly += void.digest == made.digest

    def _check_rows(self, model: str, version: int, rows: list[tuple[int, list[str]]]) -> None:
        for number, (_, names) in enumerate(rows):
            if self._max_lag is not None:
                self._expect(bool(names), "lag", f"row {number} does not say what it was sampled from")
            for name in names:
                found = SEQUENCE.fullmatch(name)
                sampler = "" if found is None else found["sampler"]
                own, sampled_at = self._samples.samplers.get(sampler, (None, None))
                if found is None or sampled_at is None:
                    self._expect(self._max_lag is None, "sampled", f"row {number}: no sampler has made {name}")
                    continue
                lag = version - sampled_at
                self._report.lag_max = max(self._report.lag_max, lag)
                if self._max_lag is None:
                    continue
                is_right = own == model and int(found["version"]) == sampled_at
                is_right = is_right and (sampler, int(found["seq_id"])) in self._samples.done
                self._expect(is_right, "sampled", f"row {number}: {name} was not sampled from {model} like this")
                self._expect(lag <= self._max_lag, "lag", f"row {number} has lag {lag}, max_lag is {self._max_lag}")

    def _compare(self, name: str, history: ModelHistory, disk: DiskState | str | None, size: int) -> None:
        """With what is on the disk. `size`: of the log before the disk was read."""
        self._where = f"models/{_folder_name(name)}"
        acknowledged = {number: digest for number, (digest, end) in history.accepted.items() if end <= size}
        if disk is None or isinstance(disk, str):
            self._expect(not acknowledged, "acknowledged", f"{len(acknowledged)} requests, and {disk or 'no folder'}")
            return
        first = disk.next_seq_id
        is_known = self._expect(
            first <= len(history.done) + 1, "acknowledged", f"the snapshot is ahead of the log: {first}"
        )
        if is_known:
            left = history.version_after(first - 1)
            self._expect(disk.version == left, "version", f"the snapshot has {disk.version}, the log {left}")
        for number, digest in acknowledged.items():
            if number >= first:
                is_there = disk.journal.get(number) == digest
                self._expect(is_there, "acknowledged", f"request {number} is not in the journal as it was acknowledged")

    def _count(self, history: ModelHistory) -> None:
        report = self._report
        report.models += 1
        report.requests += len(history.done)
        report.requests_refused += sum(one.is_refused for one in history.done)
        report.steps += sum(one.request == "optim_step" and not one.is_refused for one in history.done)
        report.rows_trained += sum(one.num_rows for one in history.done)
        report.lag_unknown += sum(one.num_unknown for one in history.done)


def _folder_name(model: str) -> str:
    return "".join(one if one.isascii() and (one.isalnum() or one == "-") else "_" for one in model[:200])


def service_lines(report: ServiceReport) -> list[str]:
    """The report as text for a terminal."""
    num_findings = len(report.findings) + report.findings_left_out
    left_out = [f"  FOUND        and {report.findings_left_out:,} more"] if report.findings_left_out else []
    unknown = f", {report.lag_unknown:,} rows do not say what they were sampled from" if report.lag_unknown else ""
    return [
        f"{report.run_dir}: {f'{num_findings:,} findings' if num_findings else 'clean'}, {report.checks:,} checks",
        f"  events       {report.events:,} of {report.sessions:,} sessions",
        f"  models       {report.models:,} with {report.requests:,} requests, {report.requests_refused:,} of them refused",
        f"  steps        {report.steps:,} with {report.rows_trained:,} rows",
        f"  samples      {report.samples:,}",
        f"  lag          at most {report.lag_max}{unknown}",
        f"  replayed     {report.replayed:,} requests, {report.replayed_exactly:,} of them bit for bit",
        *(f"  FOUND        [{finding.rule}] {finding.message}" for finding in report.findings),
        *left_out,
    ]
