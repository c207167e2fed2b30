"""The rules of a run: start, resumes, checkpoints, weights and end."""

from __future__ import annotations

import copy
import math
from collections import Counter

from millstream.audit.checkpoints import CheckpointFolder
from millstream.audit.config_rules import terms_of
from millstream.audit.history import Cursor, History, RunningEvaluation, RunTerms
from millstream.audit.report import Fields


class RunRules:
    def __init__(self, cursor: Cursor, checkpoints: list[CheckpointFolder]) -> None:
        self._cursor = cursor
        self._holds = cursor.report.holds
        self._expect = cursor.expect
        self._finding = cursor.add_finding
        self._checkpoints = checkpoints
        self._marks = {checkpoint.covers_seq for checkpoint in checkpoints}  # events after which the history is needed
        self._covered: dict[int, list[int]] = {}  # event -> versions of checkpoints that cover it as their last
        self._num_resumes: Counter[int] = Counter()  # event -> resumes from it that are still ahead in the log
        self._snapshots = {-1: History()}  # event -> the history after it, for those resumes
        self._sealed: dict[str, tuple[int, int]] = {}  # digest -> version, last event covered
        self._void: list[tuple[int, int]] = []

    @property
    def _now(self) -> History:
        return self._cursor.now

    def on_run_started(self, event: Fields) -> None:
        now, max_lag, bound = self._now, event["max_lag"], event["lag_bound"]
        self._expect(now.terms is None, "start", "run_started a second time")
        self._expect(bound == math.ceil(max_lag), "start", f"the bound is {bound}, and max_lag {max_lag}")
        optional = RunTerms._field_defaults
        now.terms = RunTerms(
            **{name: event[name] for name in RunTerms._fields if name in event or name not in optional}
        )
        for name, due in terms_of(now.config).items() if now.config is not None else ():
            found = getattr(now.terms, name)
            self._expect(due is None or found == due, "config", f"run_started says {name} {found}, the config {due}")

    # ---- events that refer to earlier ones

    def look_ahead(self, event: Fields) -> None:
        """First reading: mark the events after which the history is compared or copied."""
        if event["kind"] == "resumed":
            self._num_resumes[event["from_seq"]] += 1
            self._marks.add(event["from_seq"])
        elif event["kind"] == "checkpoint_sealed":
            self._covered.setdefault(event["covers_seq"], []).append(event["version"])
            self._marks.add(event["covers_seq"])

    def after_event(self) -> None:
        """Called after every event of the second reading."""
        seq, now = self._cursor.seq, self._now
        if seq not in self._marks:
            return
        for version in self._covered.pop(seq, ()):
            where = f"version {now.version}" + ("" if now.is_between_batches else ", in the middle of a batch")
            if not self._holds(version == now.version and now.is_between_batches):
                self._finding("seal", f"the checkpoint of version {version} covers this event, which is at {where}")
        for checkpoint in self._checkpoints:
            if checkpoint.covers_seq == seq and not checkpoint.is_passed:
                checkpoint.compare(now)
        if self._num_resumes[seq]:
            self._snapshots[seq] = copy.deepcopy(now)

    def _is_past(self, seq: int) -> bool:
        """Whether the history has this event, and no resume has undone it."""
        return seq < self._cursor.seq and not any(begin < seq < end for begin, end in self._void)

    # ---- crashes

    def on_resumed(self, event: Fields) -> None:
        report, version, from_seq, digest = self._cursor.report, event["version"], event["from_seq"], event["digest"]
        if self._now.outcome == "finished":
            asked = [
                change.partition("=")[2] for change in event.get("changes", ()) if change.startswith("pipeline.steps=")
            ]
            is_longer = bool(asked) and int(asked[-1]) > self._now.version
            self._expect(is_longer, "end", "a run that finished was resumed, and not for more steps")
        if not self._holds(event["incarnation"] == report.processes):
            self._finding("resume", f"it counts {event['incarnation']} processes before, there were {report.processes}")
        due = self._sealed.get(digest) if digest else (0, -1)
        if not self._holds(due == (version, from_seq)):
            self._finding(
                "resume",
                f"version {version} from seq {from_seq}, checkpoint {digest[:12] or 'none'}: "
                f"version and seq of that checkpoint are {due}",
            )
        report.processes += 1
        self._cursor.incarnation = event["incarnation"]
        self._cursor.ledger = next((found.ledger for found in self._checkpoints if found.digest == digest), {})
        self._go_back(from_seq)
        now = self._now
        for undone in [one for one in self._cursor.trained if one >= now.version]:
            del self._cursor.trained[undone]
        if not self._holds(now.version == version and now.is_between_batches):
            self._finding("resume", f"version {version} was resumed, the events had reached {now.version}")

    def _go_back(self, from_seq: int) -> None:
        """Restore the history of a point between two batches; the newest published version is the one that was resumed."""
        cursor = self._cursor
        is_known = from_seq in self._snapshots
        if not self._holds(is_known and self._is_past(from_seq)):
            self._finding("resume", f"seq {from_seq} is not in the history: it was undone, or comes later")
        if is_known:
            self._num_resumes[from_seq] -= 1
            cursor.now = copy.deepcopy(self._snapshots[from_seq])
            cursor.now.num_events += 1  # this one
            self._void.append((from_seq, cursor.seq))
            if from_seq >= 0 and not self._num_resumes[from_seq]:
                del self._snapshots[from_seq]
        now = cursor.now
        now.published = now.version
        now.load_version(now.version)  # every engine begins with it
        now.unloaded = {}
        now.evaluating = {}
        now.rewards = []  # metrics.jsonl begins again, too
        now.to_resume = set(now.groups)
        now.outcome = None
        now.is_training = False

    # ---- checkpoints

    def on_checkpoint_sealed(self, event: Fields) -> None:
        covers_seq, version = event["covers_seq"], event["version"]
        if not self._holds(covers_seq >= 0 and self._is_past(covers_seq)):
            self._finding("seal", f"the checkpoint of version {version} covers seq {covers_seq}: not in the history")
        self._sealed[event["digest"]] = (version, covers_seq)

    @property
    def last_covered(self) -> int:
        """The last event that a checkpoint covers; -1: there is none."""
        return max((seq for _, seq in self._sealed.values()), default=-1)

    def finish(self) -> None:
        """Every checkpoint on the disk has its event, and covers one that was read."""
        for found in self._checkpoints:
            recorded = self._sealed.get(found.digest)
            is_recorded = recorded == (found.version, found.covers_seq) and found.is_passed
            found.expect(
                is_recorded, "seal", f"no event has its digest {found.digest[:12]}, covering {found.covers_seq}"
            )
            if is_recorded and not self._is_past(found.covers_seq):
                self._cursor.report.notes.append(f"checkpoints/{found.path.name} covers events that were undone")

    def on_learner_restarted(self, event: Fields) -> None:
        """After the first of several steps of a batch, the learner is one version ahead of the events."""
        now, begun, reached = self._now, event["from_version"], event["to_version"]
        if now.terms is None:  # supervised training has no versions
            return
        if not self._holds(begun == 0 or any(version == begun for version, _ in self._sealed.values())):
            self._finding(
                "replay", f"the learner was restarted with version {begun}, of which no checkpoint was sealed"
            )
        if not self._holds(begun <= reached and reached in (now.version, now.version + 1)):
            self._finding(
                "replay", f"the learner went from version {begun} to {reached}, and the run is at {now.version}"
            )

    # ---- weights, end

    def on_weights_published(self, event: Fields) -> None:
        now, version = self._now, event["version"]
        if not self._holds(version == now.published + 1 == now.version):
            self._finding("weights", f"version {version} was published after {now.published}, at {now.version}")
        now.published = version

    def on_weights_loaded(self, event: Fields) -> None:
        version, published = event["version"], self._now.published
        if not self._holds(version <= published):
            self._finding("weights", f"{event['engine']} loaded version {version}, {published} is the newest")
        for running in self._now.evaluating.values():
            if event["engine"] in running.engines and version != running.version:
                running.loaded.append(f"{event['engine']} loaded version {version}")
        self._now.load_version(version)

    def on_replica_joined(self, event: Fields) -> None:
        self._now.load_version(event["version"])

    def on_replica_left(self, event: Fields) -> None:
        for running in self._now.evaluating.values():
            running.engines.discard(event["engine"])  # another one of this name may come

    def on_evaluation_started(self, event: Fields) -> None:
        self._now.evaluating[event["name"]] = RunningEvaluation(event["version"], {*event["engines"]}, [])

    def on_evaluated(self, event: Fields) -> None:
        """It is of one version, which its engines kept from its start. Logs of earlier releases do not say where it ran."""
        now, name, version = self._now, event["name"], event["version"]
        now.accuracies[name] = event["accuracy"]
        started = now.evaluating.pop(name, None)
        if "scores" not in event:
            return
        now.first_table = now.first_table or event["table"]
        if not self._holds(started is not None and started.version == version):
            begun = "it never started" if started is None else f"it started with version {started.version}"
            self._finding("evaluation", f"{name} is of version {version}, and {begun}")
        loaded = [] if started is None else started.loaded
        self._expect(not loaded, "evaluation", f"{name} is of version {version}, and meanwhile {', '.join(loaded)}")

    def on_run_ended(self, event: Fields) -> None:
        now, outcome = self._now, str(event["outcome"])
        self._expect(now.outcome is None, "end", f"it ended before: {now.outcome}")
        if not self._holds(event["version"] == now.version):
            self._finding("end", f"it says version {event['version']}, the events had reached {now.version}")
        if outcome == "finished":
            self._check_finished(now, now.terms)
        now.outcome = outcome

    def _check_finished(self, now: History, terms: RunTerms | None) -> None:
        if terms is None:
            self._cursor.add_finding("start", "it finished, and there was no run_started")
            return
        if not self._holds(now.published == now.version):
            self._finding("weights", f"version {now.version} was not published, {now.published} is the newest")
        unloaded = sorted(now.unloaded)
        self._expect(not unloaded, "weights", f"versions {unloaded} were used, and no engine loaded them")
        self._expect(not now.groups, "end", f"groups {sorted(now.groups)[:10]} have no fate")
        is_data_over = terms.num_tasks in (0, len(now.prompts)) and not now.to_feed
        if not self._holds(now.version == terms.steps or (now.version < terms.steps and is_data_over)):
            self._finding("end", f"it made {now.version} steps, {terms.steps} were planned")
