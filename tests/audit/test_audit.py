"""The audit passes what the pipeline does, and finds every forgery that is planted in it.

Logs are those of the production pipeline on the virtual clock. A crime is a consistent forgery: lines are renumbered,
`metrics.jsonl` and `summary.json` are made from the forged events, unless they or the numbers are the crime.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import json
import math
import random
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from msgspec import structs

import millstream.audit
from house import parsed
from millstream.audit import COUNTS, RULES, AuditReport, audit, report_lines
from millstream.audit.checkpoints import CheckpointFolder
from millstream.audit.settings_rules import ROLLOUTS, SCHEDULE, WHILE_TRAINING
from millstream.config import to_toml
from millstream.env.rewards import RewardConfig
from millstream.events import (
    CheckpointSealed,
    ConfigWritten,
    Evaluated,
    EvaluationStarted,
    Event,
    GroupAdmitted,
    GroupLeft,
    GroupRestarted,
    GroupResumed,
    GroupScored,
    GroupTaken,
    LagMoved,
    LearnerRestarted,
    Resumed,
    RolloutAborted,
    RolloutEnded,
    RolloutFailed,
    RolloutStarted,
    RunEnded,
    RunStarted,
    SettingChanged,
    Stepped,
    WarmedUp,
    WeightsLoaded,
    WeightsPublished,
    encode_event,
)
from millstream.events.metrics import StepMetrics
from millstream.events.summary import summarise
from millstream.pipeline.rollouts import RolloutConfig
from millstream.pipeline.schedule import PipelineConfig
from millstream.run.changes import RULES as CHANGE_RULES
from millstream.run.changes import WHILE_TRAINING as CHANGED_WHILE_TRAINING
from millstream.run.changes import changed_settings, effects_of
from millstream.run.config import EvaluationConfig
from millstream.types import Fate
from support.simulated import Diary, World, configs, simulate

E = TypeVar("E", bound=Event)
Rows = list[dict[str, Any]]
Member = tuple[int, int]
RUN_ID = "c0ffee"
OF_ROLLOUTS = (RolloutStarted, RolloutEnded, RolloutFailed, RolloutAborted)
OF_GROUPS = (GroupAdmitted, *OF_ROLLOUTS, GroupTaken, GroupLeft)
WORLD = World(
    steps=6,
    groups_per_step=3,
    group_size=3,
    max_lag=2,
    failure=0.3,
    num_turns=2,
    latency=3.0,
    num_engines=2,
    load=2.0,
    seed=4,
)
"""Small, with groups of every fate and lag, and at every step members that run, try again, ended, and failed for good."""
EPOCH = 7


class ResolvedConfig(msgspec.Struct):
    """What the audit reads of a config."""

    seed: int
    pipeline: PipelineConfig
    rollout: RolloutConfig


# ---- run folders ---------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A run folder before it is written. `forge_*` change what is otherwise made from the events."""

    events: list[Event]
    folders: dict[str, dict[str, bytes]] = field(default_factory=dict)
    after: dict[int, list[Event]] = field(default_factory=dict)
    """By version of a checkpoint: the events that followed in the process that made it."""
    config: str = ""  # what is in config.toml, if there is one
    forge_lines: Callable[[list[bytes]], list[bytes]] = lambda lines: lines
    forge_metrics: Callable[[Rows], Rows] = lambda rows: rows
    forge_summary: Callable[[dict[str, Any]], dict[str, Any]] = lambda summary: summary

    def write(self, path: Path) -> Path:
        path.mkdir(exist_ok=True)
        numbered = [b'{"seq":%d,%b\n' % (seq, encode_event(event)[1:]) for seq, event in enumerate(self.events)]
        (path / "events.jsonl").write_bytes(b"".join(self.forge_lines(numbered)))
        rows = self.forge_metrics(self.metrics())
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if isinstance(self.events[-1], RunEnded):
            summary = self.forge_summary(msgspec.to_builtins(summarise(self.history())))
            (path / "summary.json").write_text(json.dumps(summary))
        if self.config:
            (path / "config.toml").write_text(self.config)
        for name, files in self.folders.items():
            (path / "checkpoints" / name).mkdir(parents=True)
            for file, content in files.items():
                (path / "checkpoints" / name / file).write_bytes(content)
        return path

    def history(self, upto: int | None = None) -> list[Event]:
        """What the resumes leave of the first `upto` events."""
        kept: list[tuple[int, Event]] = []
        for seq, event in enumerate(self.events[:upto]):
            if isinstance(event, Resumed):
                kept = [(earlier, old) for earlier, old in kept if earlier <= event.from_seq]
            kept.append((seq, event))
        return [event for _, event in kept]

    def metrics(self) -> Rows:
        metrics = StepMetrics()
        return [row for event in self.history() if (row := metrics.add(event)) is not None]

    def all(self, kind: type[E], **fields: object) -> list[int]:
        """Where the events of this kind with these fields stand."""
        return [
            seq
            for seq, event in enumerate(self.events)
            if isinstance(event, kind) and all(getattr(event, name) == value for name, value in fields.items())
        ]

    def get(self, kind: type[E], seq: int) -> E:
        event = self.events[seq]
        assert isinstance(event, kind)
        return event

    def change(self, seq: int, **fields: object) -> None:
        self.events[seq] = structs.replace(self.events[seq], **fields)

    def of_fate(self, fate: Fate, which: int = 0) -> int:
        """The id of a group."""
        return self.get(GroupLeft, self.all(GroupLeft, fate=fate)[which]).group_id

    def of_member(self, group_id: int, member: int) -> list[int]:
        return sorted(seq for kind in OF_ROLLOUTS for seq in self.all(kind, group_id=group_id, member=member))

    def tokens_of(self, group_id: int) -> list[int]:
        return [self.get(RolloutEnded, seq).num_tokens for seq in self.all(RolloutEnded, group_id=group_id)]

    def rewrite(self, change: Callable[[Event], Event | None]) -> None:
        """Every event becomes another, or none."""
        self.events = [new for event in self.events if (new := change(event)) is not None]


def run_of(world: World, *, num_tasks: int = 0) -> Run:
    """A whole run. With `num_tasks`, the prompts are those of a data set of this size, epoch after epoch."""
    warmed = WarmedUp(at=0.0, step=5, max_steps=10, accuracy=0.1, stop_at=0.2)
    measured = Evaluated(at=0.0, name="sampled before", version=0, accuracy=0.1, num_tasks=8)
    begun = EvaluationStarted(at=0.0, name="sampled before", version=0, engines=("engine-0",))
    run = Run([warmed, begun, measured, _started(world, num_tasks), *_simulated(world)])
    if num_tasks:
        for seq in run.all(GroupAdmitted):
            epoch, number = divmod(run.get(GroupAdmitted, seq).group_id, num_tasks)
            run.change(seq, epoch=epoch, task_id=f"task-{number}")
    run.events.append(RunEnded(at=1e6, outcome="finished", version=len(run.all(Stepped))))
    return run


def _started(world: World, num_tasks: int = 0) -> RunStarted:
    return RunStarted(
        at=0.0,
        run_id=RUN_ID,
        seed=world.seed,
        steps=world.steps,
        num_tasks=num_tasks or world.num_tasks or 0,
        filter_zero_signal=world.filter_zero_signal,
        min_group_size=2,
        groups_per_step=world.groups_per_step,
        group_size=world.group_size,
        max_lag=world.max_lag,
        lag_bound=math.ceil(world.max_lag),
        budget=configs(world)[0].most_groups,
        extra_members=world.extra_members,
        is_first_to_finish=world.surplus == "abort",
        max_restarts=world.max_restarts if world.overdue == "restart" else 0,
        max_replaced=configs(world)[0].max_replaced,
    )


def with_config(run: Run) -> Run:
    """The run with its resolved config in the folder, and the digest of that in its log."""
    pipeline, rollout = configs(WORLD)
    run.config = to_toml(ResolvedConfig(seed=WORLD.seed, pipeline=pipeline, rollout=rollout))
    written = ConfigWritten(at=0.0, digest=hashlib.sha256(run.config.encode()).hexdigest())
    run.events.insert(0, written)
    return run


@functools.cache
def _simulated(world: World) -> tuple[Event, ...]:
    return tuple(simulate(world).sink.events)


# ---- checkpoints and crashes ---------------------------------------------------------------------------------------------


@dataclass
class GroupInFlight:
    admitted: GroupAdmitted
    ended: dict[int, RolloutEnded] = field(default_factory=dict)
    running: dict[int, int] = field(default_factory=dict)
    out: set[int] = field(default_factory=set)


def in_flight(history: list[Event]) -> dict[int, GroupInFlight]:
    groups: dict[int, GroupInFlight] = {}
    for event in history:
        match event:
            case GroupAdmitted():
                groups[event.group_id] = GroupInFlight(event)
            case GroupResumed():
                group = groups[event.group_id]
                group.ended = {member: group.ended[member] for member in event.kept}
                group.running = {}
            case RolloutStarted():
                groups[event.group_id].running[event.member] = event.attempt
            case RolloutEnded():
                groups[event.group_id].ended[event.member] = event
                del groups[event.group_id].running[event.member]
            case RolloutFailed():
                del groups[event.group_id].running[event.member]
                if event.is_final:
                    groups[event.group_id].out.add(event.member)
            case GroupLeft():
                del groups[event.group_id]
    return groups


def ledger_of(version: int, history: list[Event], size: int) -> dict[str, Any]:
    """Of the last group with a rollout that ended, one rollout is not in the store yet."""
    groups = in_flight(history)
    with_rows = [group_id for group_id, group in groups.items() if group.ended]
    listed = {}
    for group_id, group in groups.items():
        kept = sorted(group.ended)[: -1 if group_id in with_rows[-1:] else None]
        listed[str(group_id)] = {
            "task_id": group.admitted.task_id,
            "epoch": group.admitted.epoch,
            "start": group.admitted.start_version,
            "deadline": group.admitted.deadline,
            "kept": kept,
            "to_do": [member for member in range(size) if member not in kept and member not in group.out],
        }
    admitted = sum(isinstance(event, GroupAdmitted) for event in history)
    return {"version": version, "next_group": admitted, "groups": listed, "vacant": []}


def pack(version: int, covers_seq: int, ledger: dict[str, Any], run_id: str = RUN_ID) -> dict[str, bytes]:
    """The files of a checkpoint."""
    files = {"ledger.json": json.dumps(ledger).encode(), "rows.msgpack": b"rows", "learner.pt": b"weights" * version}
    listed = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()
    }
    manifest = {"format": 2, "run_id": run_id, "version": version, "covers_seq": covers_seq, "files": listed}
    return {**files, "manifest.json": json.dumps(manifest, indent=2).encode()}


def digest_of(files: dict[str, bytes]) -> str:
    return hashlib.sha256(files["manifest.json"]).hexdigest()


def name_of(version: int) -> str:
    return f"step-{version:06d}"


def sealed(version: int, covers_seq: int, files: dict[str, bytes]) -> CheckpointSealed:
    digest = digest_of(files)
    return CheckpointSealed(
        at=0.0, version=version, covers_seq=covers_seq, digest=digest, num_bytes=9, held_s=0.0, seconds=0.0
    )


def seal(run: Run, version: int) -> None:
    """The run makes a checkpoint right after it published this version (the last time it did), or before its first step."""
    covers_seq = run.all(WeightsPublished, version=version)[-1] if version else run.all(RunStarted)[-1]
    size = run.get(RunStarted, run.all(RunStarted)[-1]).group_size
    ledger = ledger_of(version, run.history(covers_seq + 1), size)
    files = run.folders[name_of(version)] = pack(version, covers_seq, ledger)
    run.after[version] = run.events[covers_seq + 1 :]
    run.events.insert(covers_seq + 4, sealed(version, covers_seq, files))


def resume(run: Run, version: int, *, crash: int) -> None:
    """The process dies before event `crash`. The next one resumes from a checkpoint, with the same events as before, except
    that members without a row are rolled out again."""
    files = run.folders[name_of(version)]
    covers_seq, groups = json.loads(files["manifest.json"])["covers_seq"], json.loads(files["ledger.json"])["groups"]
    then = in_flight(run.history(covers_seq + 1))
    incarnation = 1 + sum(isinstance(event, Resumed) for event in run.events[:crash])
    new: list[Event] = [
        Resumed(at=0.0, incarnation=incarnation, version=version, from_seq=covers_seq, digest=digest_of(files))
    ]
    shift: dict[Member, int] = {}
    for group_id, group in groups.items():
        kept, to_do = group["kept"], group["to_do"]
        new.append(GroupResumed(at=0.0, group_id=int(group_id), incarnation=incarnation, kept=kept, to_do=to_do))
    for group_id, group in groups.items():
        for member in group["to_do"]:
            new += _begin_again(then[int(group_id)], int(group_id), member, shift)
    run.events = run.events[:crash] + new + [_shifted(event, shift) for event in run.after[version]]


def _begin_again(group: GroupInFlight, group_id: int, member: int, shift: dict[Member, int]) -> list[Event]:
    started = RolloutStarted(at=0.0, group_id=group_id, member=member, attempt=0)
    if member in group.ended:
        return [started, structs.replace(group.ended[member], attempt=0)]
    if member in group.running:
        shift[group_id, member] = group.running[member]
        return [started]
    return []


def _shifted(event: Event, shift: dict[Member, int]) -> Event:
    if not isinstance(event, OF_ROLLOUTS):
        return event
    return structs.replace(event, attempt=event.attempt - shift.get((event.group_id, event.member), 0))


def resumed_run() -> Run:
    """Three processes: two steps lost, then, after one more checkpoint, one step."""
    run = run_of(WORLD, num_tasks=EPOCH)
    seal(run, 0)
    seal(run, 1)
    resume(run, 1, crash=run.all(Stepped, version=3)[0] + 5)
    seal(run, 4)
    resume(run, 4, crash=run.all(Stepped, version=5)[-1] + 2)
    return run


# ---- what is right is found right ----------------------------------------------------------------------------------------

FIRST_TO_FINISH = World(
    extra_groups=4, extra_members=2, surplus="abort", tail=2.0, failure=0.1, max_replaced_per_step=1
)
RESTARTED = World(overdue="restart", max_restarts=2, max_lag=2, tail=2.5, slots=64, failure=0.1, steps=12)
WORLDS = {
    "plain": World(),
    "synchronous": World(max_lag=0, groups_per_step=3, failure=0.1, num_engines=2),
    "lag 1, failures": World(failure=0.3, group_size=4, num_turns=2),
    "lag 2, a long tail": World(max_lag=2, tail=2.0, latency=5.0, group_size=3),
    "lag 2.5": World(max_lag=2.5, groups_per_step=4, load=3.0),
    "lag 4, slow engines": World(max_lag=4, groups_per_step=3, num_engines=3, load=20.0, failure=0.1),
    "a small budget": World(max_lag=3, extra_groups=1, groups_per_step=3),
    "synchronous, without a gate": World(max_lag=0, groups_per_step=3, lockstep=False, failure=0.1, num_turns=3),
    "first to finish": FIRST_TO_FINISH,
    "first to finish, synchronous": World(max_lag=0, extra_groups=3, surplus="abort", tail=1.5, success=0.9),
    "overdue groups are restarted": RESTARTED,
    "larger groups": World(extra_members=2, failure=0.2, tail=1.5),
    "much filtering": World(success=0.9, group_size=3),
    "no filtering": World(success=0.9, filter_zero_signal=False),
    "empty places": World(success=0.9, max_replaced_per_step=1, failure=0.1),
    "the data end": World(num_tasks=11, steps=20),
    "mini-batches": World(groups_per_step=4, mini_batches=2, failure=0.1),
}


@pytest.mark.parametrize("name", WORLDS)
def test_a_run_of_the_pipeline_is_clean_and_every_event_of_it_was_checked(name: str, tmp_path: Path) -> None:
    run = run_of(WORLDS[name])
    report = audit(run.write(tmp_path))
    assert report.findings == []
    assert report.is_clean
    assert report.events == len(run.events) and report.processes == 1 and report.void_events == 0
    assert report.checks > 3 * sum(isinstance(event, OF_GROUPS) for event in run.events)
    fates = report.groups_trained, report.groups_filtered, report.groups_failed, report.groups_aborted
    assert sum(fates) == report.groups_admitted == len(run.all(GroupAdmitted))
    assert report.lag_max <= math.ceil(WORLDS[name].max_lag) == report.lag_bound


def test_the_worlds_have_what_the_audit_is_about() -> None:
    runs = [run_of(world) for world in WORLDS.values()]
    lags = [run.get(GroupTaken, seq).lag for run in runs for seq in run.all(GroupTaken)]
    assert {0, 1, 2, 3, 4} <= set(lags)
    for kind in (
        {"fate": Fate.FILTERED},
        {"fate": Fate.FAILED},
        {"fate": Fate.FILTERED, "is_replaced": False},
        {"fate": Fate.TRAINED, "num_members": 2},
    ):
        assert any(run.all(GroupLeft, **kind) for run in runs), kind


def test_a_run_over_several_epochs_is_clean(tmp_path: Path) -> None:
    run = run_of(WORLD, num_tasks=EPOCH)
    assert run.get(GroupAdmitted, run.all(GroupAdmitted)[-1]).epoch >= 2
    assert audit(run.write(tmp_path)).findings == []


def test_a_run_with_crashes_and_checkpoints_is_clean(tmp_path: Path) -> None:
    run = resumed_run()
    report = audit(run.write(tmp_path))
    assert report.findings == []
    assert report.processes == 3 and report.checkpoints == report.checkpoints_verified == 3
    assert report.void_events == len(run.events) - len(run.history()) > 50
    whole = audit(run_of(WORLD, num_tasks=EPOCH).write(tmp_path / "whole"))
    for name in ("groups_admitted", "groups_trained", "groups_filtered", "groups_failed", "rollouts_trained", "steps"):
        assert getattr(report, name) == getattr(whole, name), name


@functools.cache
def undisturbed(world: World) -> Diary:
    diary = Diary()
    simulate(world, keeper=diary)
    return diary


def killed_and_resumed(world: World, cut: random.Random, *, processes: int) -> Run:
    """The pipeline's own resumes: each process is killed somewhere, and the next resumes from one of its checkpoints."""
    diary = undisturbed(world)
    run = Run([_started(world), *diary.sink.events])
    before = 1
    for incarnation in range(1, processes):
        # the first one is that which the process began with
        kept = copy.deepcopy(cut.choice(diary.kept[1 : 3 + incarnation]))
        version, covers_seq = kept.standing.ledger.version, before + kept.mark - 1
        files = pack(version, covers_seq, msgspec.to_builtins(kept.standing.ledger, str_keys=True))
        run.folders = {name_of(version): files}
        run.events.insert(covers_seq + 1, sealed(version, covers_seq, files))
        del run.events[cut.randint(covers_seq + 2, len(run.events)) :]
        run.events.append(
            Resumed(at=0.0, incarnation=incarnation, version=version, from_seq=covers_seq, digest=digest_of(files))
        )
        before, diary = len(run.events), Diary()
        simulate(world, keeper=diary, kept=kept)
        run.events += diary.sink.events
        for seq in run.all(GroupResumed):
            if seq >= before:
                run.change(seq, incarnation=incarnation)
    run.events.append(RunEnded(at=1e6, outcome="finished", version=world.steps))
    return run


@pytest.mark.parametrize("name", [name for name, world in WORLDS.items() if world.num_tasks is None])
def test_a_run_that_the_pipeline_resumed_is_clean(name: str, tmp_path: Path) -> None:
    for seed in range(4):
        run = killed_and_resumed(WORLDS[name], random.Random(seed), processes=4)
        report = audit(run.write(tmp_path / str(seed)))
        assert report.findings == []
        assert report.processes == 4 and report.checkpoints_verified == 1


def test_the_resumed_run_has_members_of_every_kind() -> None:
    run = resumed_run()
    for seq in run.all(Resumed):
        covers_seq = run.get(Resumed, seq).from_seq
        groups = in_flight(run.history(covers_seq + 1))
        attempts = [attempt for group in groups.values() for attempt in group.running.values()]
        assert 0 in attempts and 1 in attempts and any(group.out for group in groups.values())
        incarnation = run.get(Resumed, seq).incarnation
        again = [run.get(GroupResumed, one) for one in run.all(GroupResumed, incarnation=incarnation)]
        assert any(groups[one.group_id].ended.keys() & set(one.to_do) for one in again)
        assert any(one.kept for one in again)


def test_a_resume_may_swallow_an_earlier_one(tmp_path: Path) -> None:
    run = run_of(WORLD)
    seal(run, 2)
    for _ in range(3):
        resume(run, 2, crash=run.all(Stepped, version=4)[-1] + 3)
    report = audit(run.write(tmp_path))
    assert report.findings == []
    assert report.processes == 4 and report.steps == WORLD.steps


def test_a_run_without_a_checkpoint_may_start_over(tmp_path: Path) -> None:
    run = run_of(WORLD)
    resumed = Resumed(at=0.0, incarnation=1, version=0, from_seq=-1, digest="")
    run.events = [*run.events[:90], resumed, *run.events]
    report = audit(run.write(tmp_path))
    assert report.findings == []
    assert report.void_events == 90 and report.processes == 2


def test_a_run_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    """The beginning of a clean log is a clean log, with the checkpoints that it records."""
    whole = resumed_run()
    for length in range(1, len(whole.events), 5):
        run = copy.copy(whole)
        run.events = whole.events[:length]
        recorded = {event.digest for event in run.events if isinstance(event, CheckpointSealed)}
        run.folders = {name: files for name, files in whole.folders.items() if digest_of(files) in recorded}
        report = audit(run.write(tmp_path / str(length)))
        assert report.findings == [] and report.outcome is None and report.events == length


def test_a_torn_last_line_and_missing_metrics_are_those_of_a_killed_run(tmp_path: Path) -> None:
    run = run_of(WORLD)
    run.events = run.events[: run.all(Stepped)[3]]
    run.forge_lines = lambda lines: [*lines, lines[-1][:20]]
    run.forge_metrics = lambda rows: rows[:-1]
    report = audit(run.write(tmp_path))
    assert report.findings == []
    assert report.groups_in_flight > 0
    assert report.groups_admitted == report.groups_in_flight + report.groups_trained + report.groups_filtered + (
        report.groups_failed
    )


def test_groups_whose_place_stays_empty_are_in_the_ledger_as_vacant(tmp_path: Path) -> None:
    run = run_of(WORLD)
    seal(run, 2)
    files = run.folders[name_of(2)]
    ledger = json.loads(files["ledger.json"])
    ledger["vacant"] = [run.of_fate(Fate.FILTERED)]
    ledger["groups"][str(ledger["vacant"][0])] = {"kept": [0, 1, 2], "to_do": []}
    reseal(run, 2, ledger)
    assert audit(run.write(tmp_path)).findings == []


def test_what_is_unfinished_or_set_aside_gets_a_note(tmp_path: Path) -> None:
    run = resumed_run()
    run.folders |= {".step-000009.tmp": {"learner.pt": b"half"}, "step-000008.corrupt": {"manifest.json": b""}}
    report = audit(run.write(tmp_path))
    assert report.is_clean
    assert [note for note in report.notes if "step-000009" in note] and [n for n in report.notes if "corrupt" in n]


def test_a_folder_without_events_proves_nothing(tmp_path: Path) -> None:
    assert [finding.rule for finding in audit(tmp_path).findings] == ["log"]
    (tmp_path / "events.jsonl").touch()
    assert [finding.rule for finding in audit(tmp_path).findings] == ["log"]


def test_the_versions_of_recorded_batches_need_not_be_loaded(tmp_path: Path) -> None:
    run = run_of(WORLD)
    run.rewrite(lambda event: None if isinstance(event, WeightsLoaded) else event)
    assert "weights" in {finding.rule for finding in audit(run.write(tmp_path / "own")).findings}
    run.change(run.all(RunStarted)[0], rollouts_from="another")
    assert audit(run.write(tmp_path / "recorded")).findings == []
    with_config(run)
    assert {finding.rule for finding in audit(run.write(tmp_path / "forged")).findings} == {"config"}


def test_the_report_says_what_was_counted_and_found(tmp_path: Path) -> None:
    run = resumed_run()
    text = "\n".join(report_lines(audit(run.write(tmp_path / "clean"))))
    assert "clean" in text and "processes: 3" in text and "3 of 3 verified" in text and "finished" in text
    run.change(run.all(Stepped)[0], num_tokens=1)
    text = "\n".join(report_lines(audit(run.write(tmp_path / "forged"))))
    assert "1 findings" in text and "[totals] events.jsonl:" in text


def test_findings_are_bounded(tmp_path: Path) -> None:
    run = run_of(WORLD)
    run.forge_lines = lambda lines: [b"?\n"] * 5000
    report = audit(run.write(tmp_path))
    assert len(report.findings) < 2000 and report.findings_left_out >= 3000


def test_the_audit_imports_nothing_but_the_standard_library() -> None:
    """It cannot share a mistake with what it audits."""
    for path in Path(millstream.audit.__file__).parent.glob("*.py"):
        tree = parsed(path.read_text())
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        others = {name for name in imported if not name.startswith("millstream.audit.")}
        assert {name.split(".")[0] for name in others} <= sys.stdlib_module_names


# ---- planted crimes ------------------------------------------------------------------------------------------------------

Crime = Callable[[Run], None]
Where = dict[str, object]


def changed(kind: type[Event], which: int = 0, where: Where | None = None, **fields: Any) -> Crime:
    """The fields of one event are forged; what a function returns for the present value, or a value."""

    def commit(run: Run) -> None:
        seq = run.all(kind, **(where or {}))[which]
        now = run.events[seq]
        run.change(seq, **{name: new(getattr(now, name)) if callable(new) else new for name, new in fields.items()})

    return commit


def dropped(kind: type[Event], which: int = 0, **where: object) -> Crime:
    def commit(run: Run) -> None:
        del run.events[run.all(kind, **where)[which]]

    return commit


def doubled(kind: type[Event], which: int = 0, *, later: int = 1, **where: object) -> Crime:
    def commit(run: Run) -> None:
        seq = run.all(kind, **where)[which]
        run.events.insert(seq + later, run.events[seq])

    return commit


def lines_forged(forge: Callable[[list[bytes]], list[bytes]]) -> Crime:
    return lambda run: setattr(run, "forge_lines", forge)


def metrics_forged(forge: Callable[[Rows], Rows]) -> Crime:
    return lambda run: setattr(run, "forge_metrics", forge)


def one_more(value: int) -> int:
    return value + 1


def one_less(value: int) -> int:
    return value - 1


def swap(run: Run, one: int, other: int) -> None:
    run.events[one], run.events[other] = run.events[other], run.events[one]


# ---- of groups


def group_dropped(fate: Fate, which: int = 0, *, is_gap_closed: bool = False) -> Crime:
    """All its events. To close the gap, those after it move up."""

    def commit(run: Run) -> None:
        group_id = run.of_fate(fate, which)

        def change(event: Event) -> Event | None:
            if not isinstance(event, OF_GROUPS) or event.group_id < group_id:
                return event
            if event.group_id == group_id:
                return None
            return structs.replace(event, group_id=event.group_id - 1) if is_gap_closed else event

        run.rewrite(change)

    return commit


def train_a_group_twice(run: Run) -> None:
    """By its batch, and by the next one instead of another group; the totals are right."""
    group_id = run.of_fate(Fate.TRAINED)
    taken = run.get(GroupTaken, run.all(GroupTaken, group_id=group_id)[0])
    left = run.get(GroupLeft, run.all(GroupLeft, group_id=group_id)[0])
    seq = run.all(Stepped, version=taken.version + 2)[0]
    other, stepped = run.get(GroupLeft, seq - 1).group_id, run.get(Stepped, seq)
    more, less = run.tokens_of(group_id), run.tokens_of(other)
    rows, tokens = stepped.num_rows + len(more) - len(less), stepped.num_tokens + sum(more) - sum(less)
    sums = {"num_rollouts": rows, "num_rows": rows, "num_tokens": tokens}
    again = structs.replace(taken, version=taken.version + 1)
    run.events[seq - 1 : seq + 1] = [again, left, structs.replace(stepped, **sums)]
    del run.events[run.all(GroupTaken, group_id=other)[0]]


def train_a_group_too_late(run: Run) -> None:
    """Its start, its deadline and its rollouts are older than the bound allows, consistently."""
    group_id = run.get(GroupTaken, run.all(GroupTaken, lag=2)[0]).group_id
    changed(GroupAdmitted, 0, {"group_id": group_id}, start_version=one_less, deadline=one_less)(run)
    changed(GroupTaken, 0, {"group_id": group_id}, lag=one_more)(run)
    for seq in run.all(RolloutEnded, group_id=group_id):
        run.change(seq, start_version=run.get(RolloutEnded, seq).start_version - 1)


def let_a_group_be_overdue(run: Run) -> None:
    """A filtered group leaves only after its deadline."""
    for seq in run.all(GroupLeft, fate=Fate.FILTERED):
        left = run.get(GroupLeft, seq)
        deadline = run.get(GroupAdmitted, run.all(GroupAdmitted, group_id=left.group_id)[0]).deadline
        if late := run.all(Stepped, version=deadline + 1):
            run.events.insert(late[0] + 1, left)
            del run.events[seq]
            return
    raise AssertionError("no such group")


def skip_an_attempt(run: Run) -> None:
    seq = run.all(RolloutStarted, attempt=1)[0]
    group_id, member = run.get(RolloutStarted, seq).group_id, run.get(RolloutStarted, seq).member
    for seq in run.of_member(group_id, member):
        event = run.events[seq]
        if isinstance(event, OF_ROLLOUTS) and event.attempt == 1:
            run.change(seq, attempt=2)


def rename_a_member(run: Run) -> None:
    """To one that a group of this size does not have."""
    for seq in run.of_member(run.of_fate(Fate.TRAINED), 0):
        run.change(seq, member=7)


def lose_every_trace_of_a_member(run: Run) -> None:
    """The group says so, and the rewards of the others ask for the same fate."""
    group_id = run.of_fate(Fate.FILTERED)
    for seq in reversed(run.of_member(group_id, 0)):
        del run.events[seq]
    changed(GroupLeft, 0, {"group_id": group_id}, num_members=one_less)(run)


def roll_out_on_older_weights(run: Run) -> None:
    admitted = run.get(GroupAdmitted, run.all(GroupAdmitted, start_version=2)[0])
    changed(RolloutEnded, 0, {"group_id": admitted.group_id}, start_version=1)(run)


def rewards_forged(fate: Fate, reward: Callable[[int], float]) -> Crime:
    """Of a whole group, by member; its mean agrees."""

    def commit(run: Run) -> None:
        group_id, rewards = run.of_fate(fate), []
        for seq in run.all(RolloutEnded, group_id=group_id):
            rewards.append(reward(run.get(RolloutEnded, seq).member))
            run.change(seq, reward=rewards[-1])
        changed(GroupLeft, 0, {"group_id": group_id}, mean_reward=sum(rewards) / len(rewards))(run)

    return commit


# ---- of steps, prompts, order


def skip_a_step(run: Run) -> None:
    """All later versions are one higher, everywhere."""

    def change(event: Event) -> Event:
        match event:
            case Stepped() | WeightsPublished() | WeightsLoaded() | GroupTaken() | RunEnded() if event.version >= 3:
                return structs.replace(event, version=event.version + 1)
        return event

    run.rewrite(change)


def take_and_not_train(run: Run) -> None:
    """The step's totals agree with those that left."""
    seq = run.all(Stepped)[2]
    tokens, stepped = run.tokens_of(run.get(GroupLeft, seq - 1).group_id), run.get(Stepped, seq)
    rows, all_tokens = stepped.num_rows - len(tokens), stepped.num_tokens - sum(tokens)
    run.change(seq, num_groups=stepped.num_groups - 1, num_rollouts=rows, num_rows=rows, num_tokens=all_tokens)
    del run.events[seq - 1]


def leave_before_being_taken(run: Run) -> None:
    group_id = run.of_fate(Fate.TRAINED, 3)
    swap(run, run.all(GroupTaken, group_id=group_id)[0], run.all(GroupLeft, group_id=group_id)[0])


def step_before_the_groups_leave(run: Run) -> None:
    seq = run.all(Stepped)[1]
    swap(run, seq - 1, seq)


def be_taken_before_the_last_rollout_ends(run: Run) -> None:
    group_id = run.of_fate(Fate.TRAINED, 3)
    swap(run, run.all(RolloutEnded, group_id=group_id)[-1], run.all(GroupTaken, group_id=group_id)[0])


def end_a_rollout_before_it_starts(run: Run) -> None:
    ended = run.get(RolloutEnded, run.all(RolloutEnded)[5])
    it: dict[str, object] = {"group_id": ended.group_id, "member": ended.member, "attempt": ended.attempt}
    swap(run, run.all(RolloutStarted, **it)[0], run.all(RolloutEnded, **it)[0])


def skip_the_last_prompt_of_an_epoch(run: Run) -> None:
    """Everything after it is one prompt early."""
    for seq in run.all(GroupAdmitted):
        group_id = run.get(GroupAdmitted, seq).group_id
        epoch, number = divmod(group_id + (group_id >= EPOCH - 1), EPOCH)
        run.change(seq, epoch=epoch, task_id=f"task-{number}")


def skip_an_epoch(run: Run) -> None:
    for seq in run.all(GroupAdmitted):
        epoch = run.get(GroupAdmitted, seq).epoch
        run.change(seq, epoch=epoch + (epoch > 0))


def drop_the_last_weights(run: Run) -> None:
    """Nobody loads them, either."""
    last = WORLD.steps
    for seq in reversed(run.all(WeightsPublished, version=last) + run.all(WeightsLoaded, version=last)):
        del run.events[seq]


def evaluate_across_a_load(run: Run) -> None:
    """From the start of the run to the end of the last load, on an engine that has loaded by then."""
    last = run.all(WeightsLoaded)[-1]
    engine, (begun,), (seq,) = run.get(WeightsLoaded, last).engine, run.all(EvaluationStarted), run.all(Evaluated)
    run.change(begun, engines=(engine,))
    run.events.insert(last, run.events.pop(seq))


def restart_while_running(run: Run) -> None:
    seq = run.all(GroupRestarted)[0]
    group_id = run.get(GroupRestarted, seq).group_id
    swap(run, max(s for s in run.all(RolloutAborted, group_id=group_id) if s < seq), seq)


def restart_the_learner(from_version: int, to_version: int) -> Crime:
    """After the third step."""

    def crime(run: Run) -> None:
        why, seq = "rank 1 of 2: its process ended with exit code -9", run.all(Stepped)[2] + 1
        restarted = LearnerRestarted(
            at=0.0,
            why=why,
            from_version=from_version,
            to_version=to_version,
            num_batches_replayed=1,
            num_rows=1,
            seconds=1.0,
        )
        run.events.insert(seq, restarted)

    return crime


def test_a_learner_that_is_restarted_and_reaches_the_version_of_the_run_is_no_crime(tmp_path: Path) -> None:
    for to_version in (3, 4):  # the latter: after one of several steps of a batch
        run = run_of(WORLD)
        restart_the_learner(0, to_version)(run)
        assert audit(run.write(tmp_path / str(to_version))).findings == []
    run = run_of(WORLD)
    seal(run, 1)
    restart_the_learner(1, 3)(run)
    assert audit(run.write(tmp_path / "sealed")).findings == []


def raise_the_bound(run: Run) -> None:
    """Everywhere in the log: in the terms of the run, and in every deadline."""
    changed(RunStarted, max_lag=5.0, lag_bound=5)(run)
    for seq in run.all(GroupAdmitted):
        run.change(seq, deadline=run.get(GroupAdmitted, seq).start_version + 5)


def in_the_folder_of(commit: Crime) -> Crime:
    """A crime in a run with its config beside its log."""
    return lambda run: commit(with_config(run))


def edit_the_config(run: Run) -> None:
    assert "max_lag = 2" in run.config
    run.config += "# a comment\n"


def lose_the_config(run: Run) -> None:
    run.config = ""


def drop_the_loads(run: Run) -> None:
    """Of a version that rollouts used."""
    assert run.all(RolloutEnded, end_version=2)
    for seq in reversed(run.all(WeightsLoaded, version=2)):
        del run.events[seq]


def change_a_reward_and_its_mean(run: Run) -> None:
    """The fate is the same. Nothing but the metrics, which were written before, has the old one."""
    before = run.metrics()
    group_id = run.of_fate(Fate.TRAINED)
    seq = run.all(RolloutEnded, group_id=group_id)[0]
    rewards = [run.get(RolloutEnded, one).reward for one in run.all(RolloutEnded, group_id=group_id)]
    run.change(seq, reward=rewards[0] + 5)
    changed(GroupLeft, 0, {"group_id": group_id}, mean_reward=(sum(rewards) + 5) / len(rewards))(run)
    run.forge_metrics = lambda rows: before


def go_on_after_the_end(run: Run) -> None:
    run.events.append(run.events[run.all(GroupAdmitted)[0]])


CRIMES: dict[str, dict[str, Crime]] = {
    "admitted": {
        "a trained group is gone": group_dropped(Fate.TRAINED, 4),
        "a filtered group is gone": group_dropped(Fate.FILTERED),
        "a group is admitted twice": doubled(GroupAdmitted, 3),
    },
    "totals": {
        "a trained group is gone and the gap is closed": group_dropped(Fate.TRAINED, 4, is_gap_closed=True),
        "a mean reward is forged": changed(GroupLeft, 0, {"fate": Fate.TRAINED}, mean_reward=0.9),
        "a step has fewer groups": changed(Stepped, 2, num_groups=one_less),
        "a step has more rollouts": changed(Stepped, 2, num_rollouts=one_more),
        "a step has more rows": changed(Stepped, 2, num_rows=one_more),
        "a step has more tokens": changed(Stepped, 2, num_tokens=one_more),
        "a step comes before its groups leave": step_before_the_groups_leave,
    },
    "prompt": {
        "a filtered group is gone and the gap is closed": group_dropped(Fate.FILTERED, is_gap_closed=True),
        "the last prompt of an epoch is skipped": skip_the_last_prompt_of_an_epoch,
        "a prompt comes twice": changed(GroupAdmitted, 3, {"epoch": 1}, task_id="task-0"),
        "an epoch is skipped": skip_an_epoch,
        "a prompt is invented in place of a real one": changed(GroupAdmitted, 3, {"epoch": 1}, task_id="invented"),
        "a prompt is invented in an epoch that does not end": changed(GroupAdmitted, -1, task_id="invented"),
    },
    "replay": {
        "a learner is restarted with a version without a checkpoint": restart_the_learner(2, 3),
        "a learner comes to a version that the run has not": restart_the_learner(0, 5),
        "a learner falls behind the run": restart_the_learner(0, 2),
    },
    "in flight": {
        "a group is trained twice": train_a_group_twice,
        "a group leaves twice": doubled(GroupLeft, later=3, fate=Fate.FILTERED),
    },
    "lag": {
        "a group is trained too late": train_a_group_too_late,
        "a lag is said to be smaller": changed(GroupTaken, 0, {"lag": 2}, lag=1),
        "a group is overdue": let_a_group_be_overdue,
    },
    "deadline": {
        "a deadline is one later": changed(GroupAdmitted, 5, deadline=one_more),
        "a group starts at a version to come": changed(GroupAdmitted, 0, start_version=one_more, deadline=one_more),
        "a group is overdue when it starts": changed(GroupAdmitted, -1, start_version=0, deadline=2),
    },
    "budget": {"more groups than the budget": changed(RunStarted, budget=one_less)},
    "rollout": {
        "a rollout never began": dropped(RolloutStarted, 4),
        "a rollout ended twice": doubled(RolloutEnded, 2),
        "an attempt comes again": changed(RolloutStarted, 0, {"attempt": 1}, attempt=0),
        "an attempt is skipped": skip_an_attempt,
        "a member that the group does not have": rename_a_member,
        "a rollout ends on older weights than it starts": changed(RolloutEnded, -1, end_version=-1),
        "a rollout on weights older than its group": roll_out_on_older_weights,
        "a rollout on weights to come": changed(RolloutEnded, end_version=3),
        "a rollout ends before it starts": end_a_rollout_before_it_starts,
    },
    "members": {
        "a rollout never ended": dropped(RolloutEnded, 4),
        "a member is gone": lose_every_trace_of_a_member,
        "a member is lost on the way to training": changed(GroupTaken, num_rollouts=one_less),
        "a group is taken before its last rollout ends": be_taken_before_the_last_rollout_ends,
    },
    "fate": {
        "a group with signal is filtered": rewards_forged(Fate.FILTERED, float),
        "a group without signal is trained": rewards_forged(Fate.TRAINED, lambda member: 0.5),
        "a group with survivors failed": changed(GroupLeft, 0, {"fate": Fate.FILTERED}, fate=Fate.FAILED),
        "a failed group is called filtered": changed(GroupLeft, 0, {"fate": Fate.FAILED}, fate=Fate.FILTERED),
        "groups are filtered that should not be": changed(RunStarted, filter_zero_signal=False),
    },
    "step": {"a step is skipped": skip_a_step, "a step is gone": dropped(Stepped, 2)},
    "batch": {
        "a trained group is said to be replaced": changed(GroupLeft, 0, {"fate": Fate.TRAINED}, is_replaced=True),
        "a group is taken and not trained": take_and_not_train,
        "a group is trained and was not taken": dropped(GroupTaken, 4),
        "a group leaves before it is taken": leave_before_being_taken,
        "a group is taken by another version": changed(GroupTaken, 4, version=one_less),
        "a step has more groups than places": changed(RunStarted, groups_per_step=one_less),
        "a step has empty places": changed(RunStarted, groups_per_step=one_more),
    },
    "weights": {
        "the loads of a version that was used are gone": drop_the_loads,
        "an engine loads what was not published": changed(WeightsLoaded, 1, version=5),
        "a version is published twice": doubled(WeightsPublished, 1),
        "the last version is not published": drop_the_last_weights,
    },
    "evaluation": {
        "it has no version": changed(Evaluated, version=None),
        "it is of another version": changed(Evaluated, version=1),
        "it never started": dropped(EvaluationStarted),
        "its engine loads other weights": evaluate_across_a_load,
    },
    "start": {
        "it starts twice": doubled(RunStarted),
        "it never starts": dropped(RunStarted),
        "the bound is wider than max_lag": changed(RunStarted, lag_bound=one_more),
    },
    "end": {
        "it finishes with a group in flight": dropped(GroupLeft, -1, fate=Fate.FILTERED),
        "it finishes early": changed(RunStarted, steps=one_more),
        "it finishes at another version": changed(RunEnded, version=one_more),
        "it ends twice": doubled(RunEnded),
        "events follow after the end": go_on_after_the_end,
    },
    "seq": {
        "a line is deleted": lines_forged(lambda lines: lines[:50] + lines[51:]),
        "a line that says nothing of a group is deleted": lines_forged(lambda lines: [lines[0], *lines[2:]]),
        "a line is doubled": lines_forged(lambda lines: [*lines[:50], lines[49], *lines[50:]]),
    },
    "log": {
        "a line is torn": lines_forged(lambda lines: [*lines[:50], lines[50][:30] + b"\n", *lines[51:]]),
        "a line that says nothing of a group is torn": lines_forged(lambda lines: [lines[0][:40] + b"\n", *lines[1:]]),
        "a field is missing": lines_forged(
            lambda lines: [line.replace(b'"num_rollouts"', b'"rows"') for line in lines]
        ),
    },
    "config": {
        "the bound is raised": in_the_folder_of(raise_the_bound),
        "the budget is raised": in_the_folder_of(changed(RunStarted, budget=one_more)),
        "the seed is another": in_the_folder_of(changed(RunStarted, seed=one_more)),
        "more groups may be replaced": in_the_folder_of(changed(RunStarted, max_replaced=one_more)),
        "the config is edited": in_the_folder_of(edit_the_config),
        "the config is gone": in_the_folder_of(lose_the_config),
    },
    "metrics": {
        "a reward is changed together with its mean": change_a_reward_and_its_mean,
        "a line of metrics is doubled": metrics_forged(lambda rows: [*rows[:2], *rows[1:]]),
        "the last line of metrics is gone": metrics_forged(lambda rows: rows[:-1]),
        "the groups of a line are forged": metrics_forged(lambda rows: [*rows[:-1], {**rows[-1], "groups": 7}]),
        "a line of metrics cannot be read": metrics_forged(lambda rows: [*rows[:-1], {}]),
    },
}


def cases(crimes: dict[str, dict[str, Crime]]) -> list[Any]:
    return [pytest.param(rule, crime, id=name) for rule, some in crimes.items() for name, crime in some.items()]


def rules_broken(report: AuditReport) -> set[str]:
    rules = {finding.rule for finding in report.findings}
    assert rules <= RULES.keys()
    return rules


@pytest.mark.parametrize(("rule", "crime"), cases(CRIMES))
def test_a_planted_crime_is_found(rule: str, crime: Crime, tmp_path: Path) -> None:
    run = run_of(WORLD, num_tasks=EPOCH)
    crime(run)
    assert rule in rules_broken(audit(run.write(tmp_path)))


def test_a_run_with_its_config_is_clean_and_so_is_one_of_a_version_that_logged_no_digest(tmp_path: Path) -> None:
    run = with_config(run_of(WORLD, num_tasks=EPOCH))
    assert audit(run.write(tmp_path / "new")).findings == []
    del run.events[0]
    changed(RunStarted, max_replaced=None)(run)
    assert audit(run.write(tmp_path / "old")).findings == []


def test_a_config_that_was_edited_is_named_by_its_keys(tmp_path: Path) -> None:
    run = with_config(run_of(WORLD, num_tasks=EPOCH))
    written = run.config
    run.change(0, text=written)
    edits = {"pipeline.lockstep is False, in the log True": ("lockstep = true", "lockstep = false")}
    for expected, edit in {
        **edits,
        "its text was edited, and no key differs": ("[pipeline]", "[pipeline] # mine"),
    }.items():
        run.config = written.replace(*edit)
        (finding,) = audit(run.write(tmp_path / edit[1].partition(" ")[2])).findings
        assert finding.message == f"config.toml is not as the run wrote it: {expected}"


EMPTY_PLACES = World(success=0.9, max_replaced_per_step=1, failure=0.1)


@pytest.mark.parametrize(
    ("world", "is_replaced"), [(WORLD, True), (EMPTY_PLACES, True), (EMPTY_PLACES, False)], ids=str
)
def test_a_place_that_is_falsely_said_to_be_filled_or_empty_is_found(
    world: World, is_replaced: bool, tmp_path: Path
) -> None:
    """Each, unless it is one of the last: no group is admitted after it that would prove it wrong."""
    run, found = run_of(world), 0
    last = run.all(GroupAdmitted)[-1]
    places = [seq for fate in (Fate.FILTERED, Fate.FAILED) for seq in run.all(GroupLeft, fate=fate) if seq < last]
    for seq in (seq for seq in places if run.get(GroupLeft, seq).is_replaced is is_replaced):
        forged = run_of(world)
        forged.change(seq, is_replaced=not is_replaced)
        assert "batch" in rules_broken(audit(forged.write(tmp_path))), run.events[seq]
        found += 1
    assert found >= 3


def test_a_prompt_that_comes_twice_is_found_where_the_size_of_the_data_set_is_unknown(tmp_path: Path) -> None:
    run = run_of(WORLD)
    changed(GroupAdmitted, 9, task_id="task-3")(run)
    assert rules_broken(audit(run.write(tmp_path))) == {"prompt"}


@pytest.mark.parametrize("name", COUNTS)
def test_a_forged_total_of_the_summary_is_found(name: str, tmp_path: Path) -> None:
    run = run_of(WORLD)
    run.forge_summary = lambda summary: {**summary, name: summary[name] + 1}
    assert rules_broken(audit(run.write(tmp_path))) == {"summary"}


def test_a_forged_accuracy_of_the_summary_is_found(tmp_path: Path) -> None:
    run = run_of(WORLD)
    run.forge_summary = lambda summary: {**summary, "accuracy_before": 0.1, "greedy_after": None}
    assert audit(run.write(tmp_path / "right")).findings == []
    run.forge_summary = lambda summary: {**summary, "accuracy_before": 0.1, "greedy_after": 0.9}
    assert rules_broken(audit(run.write(tmp_path / "wrong"))) == {"summary"}


def test_a_summary_that_cannot_be_read_is_found(tmp_path: Path) -> None:
    run = run_of(WORLD)
    run.forge_summary = lambda summary: {}
    assert rules_broken(audit(run.write(tmp_path))) == {"summary"}


# ---- planted crimes: checkpoints and crashes -----------------------------------------------------------------------------


def file_forged(name: str, forge: Callable[[bytes], bytes | None]) -> Crime:
    """A file of the newest checkpoint becomes another, or none."""

    def commit(run: Run) -> None:
        files = run.folders[name_of(4)]
        content = forge(files.pop(name, b""))
        if content is not None:
            files[name] = content

    return commit


def reseal(run: Run, version: int, ledger: dict[str, Any], *, is_event_forged: bool = True) -> None:
    """Another ledger, a manifest that agrees with it, and, by a thorough forger, events that agree with both."""
    seq = run.all(CheckpointSealed, version=version)[-1]
    files = run.folders[name_of(version)] = pack(version, run.get(CheckpointSealed, seq).covers_seq, ledger)
    if is_event_forged:
        for seq in run.all(CheckpointSealed, version=version) + run.all(Resumed, version=version):
            run.change(seq, digest=digest_of(files))


def ledger_forged(forge: Callable[[dict[str, Any]], object], *, is_event_forged: bool = True) -> Crime:
    def commit(run: Run) -> None:
        ledger = json.loads(run.folders[name_of(4)]["ledger.json"])
        forge(ledger)
        reseal(run, 4, ledger, is_event_forged=is_event_forged)

    return commit


def lose_a_group(ledger: dict[str, Any]) -> None:
    ledger["groups"].popitem()


def call_a_group_vacant(ledger: dict[str, Any]) -> None:
    ledger["vacant"].append(int(next(iter(ledger["groups"]))))


def add_a_group_that_has_left(ledger: dict[str, Any]) -> None:
    ledger["groups"]["0"] = next(iter(ledger["groups"].values()))


def swap_a_prompt(ledger: dict[str, Any]) -> None:
    next(iter(ledger["groups"].values()))["task_id"] = "task-99"


def lose_a_member(ledger: dict[str, Any]) -> None:
    next(group for group in ledger["groups"].values() if group["to_do"])["to_do"].pop()


def list_a_member_twice(ledger: dict[str, Any]) -> None:
    group = next(group for group in ledger["groups"].values() if group["kept"])
    group["to_do"].append(group["kept"][0])


def keep_a_rollout_that_never_ended(run: Run) -> None:
    ledger = json.loads(run.folders[name_of(4)]["ledger.json"])
    groups = in_flight(run.history(_covers(run, 4) + 1))
    group_id, member = next(
        (g, m) for g in groups for m in ledger["groups"][str(g)]["to_do"] if m not in groups[g].ended
    )
    ledger["groups"][str(group_id)]["to_do"].remove(member)
    ledger["groups"][str(group_id)]["kept"].append(member)
    reseal(run, 4, ledger)


def _covers(run: Run, version: int) -> int:
    return run.get(CheckpointSealed, run.all(CheckpointSealed, version=version)[-1]).covers_seq


def put_another_step_under_the_name(run: Run) -> None:
    run.folders[name_of(4)] = run.folders[name_of(1)]


def put_another_run_under_the_name(run: Run) -> None:
    run.folders[name_of(4)] = pack(4, _covers(run, 4), {}, run_id="decaf")


def manifest_forged(**fields: object) -> Crime:
    """The events agree."""

    def commit(run: Run) -> None:
        files = run.folders[name_of(4)]
        files["manifest.json"] = json.dumps({**json.loads(files["manifest.json"]), **fields}).encode()
        for seq in run.all(CheckpointSealed, version=4) + run.all(Resumed, version=4):
            run.change(seq, digest=digest_of(files))

    return commit


def make_a_checkpoint_without_an_event(run: Run) -> None:
    run.folders[name_of(3)] = pack(3, run.all(WeightsPublished, version=3)[-1], {})


def cover_the_future(run: Run) -> None:
    run.folders[name_of(3)] = pack(3, len(run.events) + 5, {})


def seal_in_the_middle_of_a_batch(run: Run) -> None:
    del run.folders[name_of(0)]
    seq = run.all(CheckpointSealed, version=0)[0]
    run.change(seq, covers_seq=run.all(GroupTaken)[0])
    swap(run, seq, run.all(WeightsPublished)[0])


def seal_another_version(run: Run) -> None:
    del run.folders[name_of(0)]
    changed(CheckpointSealed, 0, {"version": 0}, version=1)(run)


def seal_what_was_undone(run: Run) -> None:
    lost = run.all(Stepped, version=3)[0]
    assert lost < run.all(Resumed)[0]
    again = structs.replace(run.events[run.all(CheckpointSealed)[0]], version=3, covers_seq=lost, digest="another")
    run.events.insert(len(run.events) - 1, again)


def resume_a_group_that_has_left(run: Run) -> None:
    seq = run.all(GroupResumed)[-1]
    run.events.insert(seq, structs.replace(run.events[seq], group_id=0))


def keep_more_than_the_checkpoint_has(run: Run) -> None:
    """The rollout did end before the checkpoint; its row was not in the store yet."""
    groups = in_flight(run.history(_covers(run, 4) + 1))
    for seq in run.all(GroupResumed, incarnation=2):
        resumed = run.get(GroupResumed, seq)
        if more := sorted(groups[resumed.group_id].ended.keys() & set(resumed.to_do)):
            to_do = [member for member in resumed.to_do if member not in more]
            run.change(seq, kept=sorted([*resumed.kept, *more]), to_do=to_do)
            return
    raise AssertionError("no such group")


def forget_a_member(run: Run) -> None:
    """The checkpoint is no longer there to say so."""
    del run.folders[name_of(4)]
    seq = next(seq for seq in reversed(run.all(GroupResumed)) if run.get(GroupResumed, seq).to_do)
    run.change(seq, to_do=run.get(GroupResumed, seq).to_do[1:])


def hide_a_process(run: Run) -> None:
    for seq in run.all(Resumed, incarnation=2) + run.all(GroupResumed, incarnation=2):
        run.change(seq, incarnation=1)


def resume_without_undoing(run: Run) -> None:
    """What was trained between the checkpoint and the crash stays, and is trained once more."""
    seq = run.all(Resumed)[-1]
    run.change(seq, from_seq=seq - 1)


def resume_from_what_was_undone(run: Run) -> None:
    """Back onto the stretch between the first checkpoint and the first crash."""
    undone = run.all(WeightsPublished, version=2)[0]
    assert run.get(Resumed, run.all(Resumed)[0]).from_seq < undone < run.all(Resumed)[0]
    changed(Resumed, -1, from_seq=undone, version=2)(run)


def train_twice_across_a_crash(run: Run) -> None:
    """Nothing says that there was a crash, and nothing is void."""
    last = run.all(Resumed)[-1]
    run.events = [e for seq, e in enumerate(run.events) if seq < last or not isinstance(e, Resumed | GroupResumed)]


def resume_a_finished_run(run: Run) -> None:
    run.events.append(structs.replace(run.events[run.all(Resumed)[-1]], incarnation=3))


CRIMES_OF_CRASHES: dict[str, dict[str, Crime]] = {
    "checkpoint": {
        "a bit is flipped": file_forged("learner.pt", lambda old: bytes([old[0] ^ 1]) + old[1:]),
        "a file is truncated": file_forged("learner.pt", lambda old: old[:-1]),
        "a file is gone": file_forged("rows.msgpack", lambda old: None),
        "the manifest is gone": file_forged("manifest.json", lambda old: None),
        "the manifest cannot be read": file_forged("manifest.json", lambda old: old[:-9]),
        "the format is another": manifest_forged(format=3),
        "a file is added": file_forged("more.pt", lambda old: b"more"),
        "another step is under the name": put_another_step_under_the_name,
    },
    "seal": {
        "another run is under the name": put_another_run_under_the_name,
        "another run is under the name, events forged": manifest_forged(run_id="decaf"),
        "no event records a checkpoint": make_a_checkpoint_without_an_event,
        "a checkpoint covers the future": cover_the_future,
        "the ledger lost a group": ledger_forged(lose_a_group, is_event_forged=False),
        "a checkpoint in the middle of a batch": seal_in_the_middle_of_a_batch,
        "a checkpoint of another version": seal_another_version,
        "a checkpoint of what was undone": seal_what_was_undone,
    },
    "ledger": {
        "the ledger lost a group, events forged": ledger_forged(lose_a_group),
        "a group in flight is said to be vacant": ledger_forged(call_a_group_vacant),
        "the ledger has a group that has left": ledger_forged(add_a_group_that_has_left),
        "the data cursor is moved": ledger_forged(lambda ledger: ledger.update(next_group=ledger["next_group"] + 1)),
        "the ledger has another version": ledger_forged(lambda ledger: ledger.update(version=5)),
        "a prompt is swapped": ledger_forged(swap_a_prompt),
        "the ledger lost a member": ledger_forged(lose_a_member),
        "the ledger has a member twice": ledger_forged(list_a_member_twice),
        "the ledger is empty": ledger_forged(dict.clear),
        "a rollout is kept that never ended": keep_a_rollout_that_never_ended,
    },
    "resume": {
        "a group is not resumed": dropped(GroupResumed, -1),
        "a group is resumed twice": doubled(GroupResumed, -1),
        "a group is resumed that has left": resume_a_group_that_has_left,
        "more is kept than the checkpoint has": keep_more_than_the_checkpoint_has,
        "a member is forgotten": forget_a_member,
        "a group is resumed by another process": changed(GroupResumed, -1, incarnation=one_more),
        "a resume from what the checkpoint does not cover": changed(Resumed, -1, from_seq=one_less),
        "a resume undoes nothing": resume_without_undoing,
        "a resume from an unknown checkpoint": changed(Resumed, -1, digest="0" * 64),
        "a resume from no checkpoint": changed(Resumed, -1, digest=""),
        "a resume from what was undone": resume_from_what_was_undone,
        "a resume of another version": changed(Resumed, -1, version=one_less),
        "a process is hidden": hide_a_process,
    },
    "in flight": {"work is counted twice across a crash": train_twice_across_a_crash},
    "end": {"a finished run is resumed": resume_a_finished_run},
}


@pytest.mark.parametrize(("rule", "crime"), cases(CRIMES_OF_CRASHES))
def test_a_crime_planted_among_crashes_is_found(rule: str, crime: Crime, tmp_path: Path) -> None:
    run = resumed_run()
    crime(run)
    assert rule in rules_broken(audit(run.write(tmp_path)))


def test_a_resume_from_a_checkpoint_that_an_earlier_resume_has_undone_is_found(tmp_path: Path) -> None:
    run = run_of(WORLD)
    seal(run, 1)
    seal(run, 3)
    resume(run, 1, crash=run.all(Stepped, version=5)[0])
    assert audit(run.write(tmp_path / "clean")).is_clean
    resume(run, 3, crash=run.all(Stepped, version=5)[-1])
    assert "resume" in rules_broken(audit(run.write(tmp_path / "crime")))


def test_a_checkpoint_that_is_not_sound_does_not_count_as_verified(tmp_path: Path) -> None:
    run = resumed_run()
    file_forged("learner.pt", lambda old: old[:-1])(run)
    report = audit(run.write(tmp_path))
    assert report.checkpoints == 3 and report.checkpoints_verified == 2


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_checkpoint_that_the_run_removes_while_it_is_read_is_no_finding(
    is_replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = resumed_run().write(tmp_path)
    oldest = min((run_dir / "checkpoints").iterdir())
    check_files = CheckpointFolder.check_files

    def removed(checkpoint: CheckpointFolder, files: dict[str, Any]) -> None:
        if checkpoint.path == oldest:
            oldest.rename(tmp_path / "removed")
            if is_replaced:
                oldest.mkdir()
                (oldest / "manifest.json").write_text("{}")
        check_files(checkpoint, files)

    monkeypatch.setattr(CheckpointFolder, "check_files", removed)
    report = audit(run_dir)
    assert report.is_clean and report.checkpoints == report.checkpoints_verified == 2
    assert any("was removed by the run" in note for note in report.notes)


def a_failure_recorded_as_an_abort(run: Run) -> None:
    """It may not be aborted: its group was not complete without it, and was not restarted."""
    seq = run.all(RolloutFailed, is_final=True, group_id=run.of_fate(Fate.FAILED))[-1]
    failed = run.events[seq]
    assert isinstance(failed, RolloutFailed)
    run.events[seq] = RolloutAborted(
        at=failed.at,
        group_id=failed.group_id,
        member=failed.member,
        attempt=failed.attempt,
        why="it is slow",
        seconds=failed.seconds,
        num_sampled=failed.num_sampled,
    )


DECLARED_CRIMES: dict[str, tuple[str, World, Crime]] = {
    "a rollout is aborted in a run that waits": (
        "declared",
        FIRST_TO_FINISH,
        changed(RunStarted, is_first_to_finish=False),
    ),
    "a group is aborted before the batch is full": (
        "declared",
        FIRST_TO_FINISH,
        changed(RunStarted, groups_per_step=one_more),
    ),
    "a group is restarted more often than it may": ("declared", RESTARTED, changed(RunStarted, max_restarts=0)),
    "a restart is counted twice": ("declared", RESTARTED, changed(GroupRestarted, restarts=one_more)),
    "a group is restarted with a later deadline": ("deadline", RESTARTED, changed(GroupRestarted, deadline=one_more)),
    "a group is restarted while it is running": ("rollout", RESTARTED, restart_while_running),
    "an attempt of before comes again": ("rollout", RESTARTED, changed(GroupRestarted, first_attempt=0)),
    "an aborted rollout is gone": ("members", FIRST_TO_FINISH, dropped(RolloutAborted)),
    "an abort is recorded twice": ("rollout", FIRST_TO_FINISH, doubled(RolloutAborted)),
    "a rollout is aborted and its group is not restarted": (
        "declared",
        msgspec.structs.replace(RESTARTED, retries=0, failure=0.2),
        a_failure_recorded_as_an_abort,
    ),
    "a rollout is aborted before its group is complete": (
        "declared",
        msgspec.structs.replace(FIRST_TO_FINISH, retries=0, failure=0.2),
        a_failure_recorded_as_an_abort,
    ),
    "a restart is gone": ("members", RESTARTED, dropped(GroupRestarted)),
}


@pytest.mark.parametrize("name", DECLARED_CRIMES)
def test_what_is_declared_is_checked_too(name: str, tmp_path: Path) -> None:
    rule, world, commit = DECLARED_CRIMES[name]
    run = run_of(world)
    assert audit(run.write(tmp_path / "right")).is_clean
    commit(run)
    assert rule in {finding.rule for finding in audit(run.write(tmp_path / "wrong")).findings}


def test_a_reward_of_the_whole_group_decides_its_fate(tmp_path: Path) -> None:
    run = run_of(WORLD)
    group_id = run.of_fate(Fate.TRAINED)
    last = max(run.all(RolloutEnded, group_id=group_id))
    size = len(run.all(RolloutEnded, group_id=group_id))
    for seq in run.all(RolloutEnded, group_id=group_id):
        run.change(seq, is_partial=True)
    scored = GroupScored(at=0.0, group_id=group_id, rewards=[0.5] * size, seconds=0.1)
    run.events.insert(last + 1, scored)
    rules = {finding.rule for finding in audit(run.write(tmp_path / "wrong")).findings}
    assert rules == {"fate", "totals"}
    rewards = [0.5 + member for member in range(size)]
    run.change(last + 1, rewards=rewards)
    run.change(run.all(GroupLeft, group_id=group_id)[0], mean_reward=sum(rewards) / size)
    assert audit(run.write(tmp_path / "right")).is_clean


@pytest.mark.parametrize("advantage", ["turns", "parts", "grpo"])
def test_equal_rewards_of_rollouts_may_be_trained_where_turns_or_parts_are_compared(
    advantage: str, tmp_path: Path
) -> None:
    run = run_of(WORLD)
    group_id = run.of_fate(Fate.TRAINED)
    for seq in run.all(RolloutEnded, group_id=group_id):
        run.change(seq, reward=0.5, rewards=[])
    run.change(run.all(GroupLeft, group_id=group_id)[0], mean_reward=0.5)
    run = with_config(run)
    run.config += f'\n[algorithm]\nadvantage = "{advantage}"\n'
    digest = hashlib.sha256(run.config.encode()).hexdigest()
    run.events[0] = ConfigWritten(at=0.0, digest=digest, text=run.config)
    rules = {finding.rule for finding in audit(run.write(tmp_path / "run")).findings}
    assert rules == ({"fate"} if advantage == "grpo" else set())


def test_every_rule_has_a_crime_that_breaks_it() -> None:
    declared = {rule for rule, _, _ in DECLARED_CRIMES.values()}
    crimes = CRIMES.keys() | CRIMES_OF_CRASHES.keys() | CRIMES_OF_CHANGES.keys()
    assert crimes | {"summary", "rollouts"} | declared == RULES.keys()


# ---- changed settings ----------------------------------------------------------------------------------------------------

FAST = World(steps=8, groups_per_step=3, group_size=3, max_lag=4, num_engines=2, slots=3, tail=1.5, seed=3)
CHANGED_WORLDS = {
    "a smaller batch": structs.replace(FAST, groups_per_step=1),
    "a larger batch": structs.replace(FAST, groups_per_step=4),
    "a lower max_lag": structs.replace(FAST, max_lag=1),
    "a fraction": structs.replace(FAST, max_lag=1.5),
    "synchronous": structs.replace(FAST, max_lag=0),
    "a higher max_lag": structs.replace(FAST, max_lag=6),
    "more steps": structs.replace(FAST, steps=11),
    "fewer steps": structs.replace(FAST, steps=5),
    "first to finish": structs.replace(FAST, surplus="abort", extra_groups=9),
    "larger groups": structs.replace(FAST, group_size=4),
    "no filter": structs.replace(FAST, filter_zero_signal=False),
    "more retries": structs.replace(FAST, retries=3, failure=0.2),
}


class LearnerTable(msgspec.Struct):
    learning_rate: float = 1e-3
    schedule: str = "constant"
    warmup_steps: int = 0


class ConfigWithLearner(ResolvedConfig):
    learner: LearnerTable = msgspec.field(default_factory=LearnerTable)
    evaluation: EvaluationConfig = msgspec.field(default_factory=EvaluationConfig)


def config_written(
    world: World, learner: LearnerTable | None = None, evaluation: EvaluationConfig | None = None
) -> ConfigWritten:
    pipeline, rollout = configs(world)
    config = ConfigWithLearner(
        world.seed, pipeline, rollout, learner or LearnerTable(), evaluation or EvaluationConfig()
    )
    text = to_toml(config)
    return ConfigWritten(at=0.0, digest=hashlib.sha256(text.encode()).hexdigest(), text=text)


def with_rates(events: list[Event], rate: float) -> list[Event]:
    return [
        structs.replace(event, metrics={"learning_rate": rate}) if isinstance(event, Stepped) else event
        for event in events
    ]


def changed_run(
    other: World,
    first: World = FAST,
    *,
    at: int = 3,
    learner: LearnerTable | None = None,
    evaluations: tuple[EvaluationConfig | None, EvaluationConfig | None] = (None, None),
) -> Run:
    """A run that is killed and resumed as another world: the pipeline's own events, and those of the run around them."""
    diary = undisturbed(first)
    kept = diary.kept[at]
    version, covers_seq = kept.standing.ledger.version, 1 + kept.mark
    files = pack(version, covers_seq, msgspec.to_builtins(kept.standing.ledger, str_keys=True))
    before = config_written(first, evaluation=evaluations[0])
    run = Run([before, _started(first), *with_rates(diary.sink.events[: kept.mark + 20], 1e-3)])
    run.folders = {name_of(version): files}
    run.events.insert(covers_seq + 1, sealed(version, covers_seq, files))
    written = config_written(other, learner, evaluations[1])
    run.config = written.text
    found = changed_settings(tomllib.loads(run.get(ConfigWritten, 0).text), tomllib.loads(written.text))
    resumed = Resumed(at=0.0, incarnation=1, version=version, from_seq=covers_seq, digest=digest_of(files))
    changes = [SettingChanged(at=0.0, key=key, old=old, new=new, version=version) for key, old, new in found]
    rest = simulate(other, kept=kept, changed=effects_of(found)).sink.events
    rate = (learner or LearnerTable()).learning_rate
    run.events += [resumed, written, *changes, *with_rates(rest, rate)]
    run.events.append(RunEnded(at=1e6, outcome="finished", version=other.steps))
    return run


@pytest.mark.parametrize("name", CHANGED_WORLDS)
@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_run_that_is_resumed_with_other_settings_is_clean(name: str, at: int, tmp_path: Path) -> None:
    run = changed_run(CHANGED_WORLDS[name], at=at)
    report = audit(run.write(tmp_path))
    assert report.findings == []
    assert report.groups_superseded == len(run.all(GroupLeft, fate=Fate.SUPERSEDED))


@pytest.mark.parametrize(
    ("before", "after"),
    [((), ("math_answer",)), (("math_answer",), ()), (("math_answer",), ("exact_match", "contains"))],
    ids=["added", "removed", "changed and added"],
)
def test_rewards_of_an_evaluation_that_change_at_a_resume_are_clean(
    before: tuple[str, ...], after: tuple[str, ...], tmp_path: Path
) -> None:
    of = tuple(EvaluationConfig(reward=tuple(RewardConfig(function=one) for one in some)) for some in (before, after))
    run = changed_run(CHANGED_WORLDS["more steps"], evaluations=(of[0], of[1]))
    assert any("evaluation.reward" in run.get(SettingChanged, seq).key for seq in run.all(SettingChanged))
    assert audit(run.write(tmp_path)).findings == []


def test_some_of_those_runs_have_groups_that_were_superseded_and_fed_again() -> None:
    for name in ("a smaller batch", "a lower max_lag", "synchronous"):
        assert changed_run(CHANGED_WORLDS[name]).all(GroupLeft, fate=Fate.SUPERSEDED), name


def test_the_audit_knows_what_changes_the_schedule_and_what_the_rollouts() -> None:
    by_effect = {
        effect: {key for key, rule in CHANGE_RULES.items() if rule.effect == effect}
        for effect in ("schedule", "rollouts")
    }
    assert by_effect == {"schedule": set(SCHEDULE), "rollouts": set(ROLLOUTS)}
    assert WHILE_TRAINING == CHANGED_WHILE_TRAINING


def of_change(name: str, commit: Crime, **options: Any) -> Callable[[], Run]:
    def make() -> Run:
        run = changed_run(CHANGED_WORLDS[name], **options)
        commit(run)
        return run

    return make


def keep_the_old_batch_size(run: Run) -> None:
    """The config says that batches are smaller, and the steps are as before."""
    whole = changed_run(FAST)
    begin, other = run.all(Resumed)[0], whole.all(Resumed)[0]
    head = [event for event in run.events[begin:] if isinstance(event, Resumed | ConfigWritten | SettingChanged)]
    run.events = [
        *run.events[:begin],
        *head,
        *[e for e in whole.events[other:] if not isinstance(e, Resumed | ConfigWritten)],
    ]


def feed_no_prompt_again(run: Run) -> None:
    group_id = run.get(GroupLeft, run.all(GroupLeft, fate=Fate.SUPERSEDED)[0]).group_id
    task_id = run.get(GroupAdmitted, run.all(GroupAdmitted, group_id=group_id)[0]).task_id
    run.change(run.all(GroupAdmitted, task_id=task_id)[-1], task_id="another")


def feed_a_prompt_twice(run: Run) -> None:
    admitted = run.all(GroupAdmitted)
    group_id = run.get(GroupLeft, run.all(GroupLeft, fate=Fate.SUPERSEDED)[0]).group_id
    task_id = run.get(GroupAdmitted, run.all(GroupAdmitted, group_id=group_id)[0]).task_id
    run.change(admitted[-1], task_id=task_id)


def supersede_what_could_be_trained(run: Run) -> None:
    seq = run.all(GroupResumed)[-1]
    group_id = run.get(GroupResumed, seq).group_id
    own = [i for i, event in enumerate(run.events) if i > seq and getattr(event, "group_id", None) == group_id]
    for index in reversed(own):
        del run.events[index]
    run.events[seq] = GroupLeft(at=0.0, group_id=group_id, fate=Fate.SUPERSEDED)


def mix_two_settings(run: Run) -> None:
    """A group that was partly done keeps what it has, although a temperature or a group size was changed."""
    ledger = json.loads(run.folders[name_of(4)]["ledger.json"]) if name_of(4) in run.folders else {}
    listed = ledger.get("groups", {})
    for seq in run.all(GroupResumed):
        own = listed.get(str(run.get(GroupResumed, seq).group_id), {})
        if own.get("kept") and own.get("to_do"):
            run.change(seq, kept=own["kept"], to_do=own["to_do"])
            return
    raise AssertionError("no group is partly done")


AUTO = structs.replace(FAST, auto_lag=True, steps=40, train_token_s=1e-2, slots=64)


def auto_run(commit: Crime = lambda run: None) -> Callable[[], Run]:
    """Of a run whose lag moves."""

    def make() -> Run:
        run = Run([config_written(AUTO), _started(AUTO), *with_rates(simulate(AUTO).sink.events, 1e-3)])
        run.config = run.get(ConfigWritten, 0).text
        run.events.append(RunEnded(at=1e6, outcome="finished", version=AUTO.steps))
        commit(run)
        return run

    return make


def test_a_run_whose_lag_moves_is_clean(tmp_path: Path) -> None:
    run = auto_run()()
    assert len(run.all(LagMoved)) > 3
    assert audit(run.write(tmp_path)).findings == []


@pytest.mark.parametrize("at", range(2, 20, 3))
def test_a_run_whose_lag_moves_is_clean_when_it_is_resumed(at: int, tmp_path: Path) -> None:
    assert audit(changed_run(AUTO, AUTO, at=at).write(tmp_path)).findings == []


def changed_while_training(world: World, learner: LearnerTable | None = None) -> Crime:
    """Before the fifth group is admitted the settings of this world are in force, by the log."""

    def commit(run: Run) -> None:
        seq = run.all(GroupAdmitted)[4]
        written = config_written(world, learner)
        found = changed_settings(tomllib.loads(run.get(ConfigWritten, 0).text), tomllib.loads(written.text))
        version = max((run.get(Stepped, one).version for one in run.all(Stepped) if one < seq), default=0)
        changes = [SettingChanged(at=0.0, key=key, old=old, new=new, version=version) for key, old, new in found]
        run.events[seq:seq] = [written, *changes]

    return commit


CRIMES_OF_CHANGES: dict[str, dict[str, Callable[[], Run]]] = {
    "deadline": {
        "a group is admitted with the bound of before a move": auto_run(dropped(LagMoved, 2)),
        "a group is admitted with the bound of before": of_change(
            "more steps", changed_while_training(structs.replace(FAST, max_lag=FAST.max_lag + 1))
        ),
    },
    "settings": {
        "the lag moves above max_lag": auto_run(changed(LagMoved, 1, max_lag=9.0, lag_bound=9, budget=30)),
        "the lag moves twice at one version": auto_run(doubled(LagMoved, 2)),
        "the lag moves, and the bound does not": auto_run(changed(LagMoved, 1, lag_bound=one_more)),
        "the lag moves by itself": of_change(
            "more steps",
            lambda run: run.events.insert(
                run.all(GroupAdmitted)[4], LagMoved(at=0.0, version=0, max_lag=1.0, lag_bound=1, budget=6, why="")
            ),
        ),
        "a key changes that may not while the run trains": of_change(
            "more steps", changed_while_training(FAST, LearnerTable(1e-4))
        ),
        "a change has no event": of_change("a smaller batch", dropped(SettingChanged)),
        "a change from another value": of_change("a smaller batch", changed(SettingChanged, old=7)),
        "a change to another value": of_change("a smaller batch", changed(SettingChanged, new=7)),
        "a change from a later version on": of_change("a smaller batch", changed(SettingChanged, version=one_more)),
        "a change that is none": of_change("a smaller batch", changed(SettingChanged, key="pipeline.max_restarts")),
        "a step with the learning rate of before": of_change(
            "more steps", lambda run: None, learner=LearnerTable(1e-4)
        ),
        "a group has rollouts of two settings": of_change("larger groups", mix_two_settings, at=4),
    },
    "superseded": {
        "a group that could be trained": of_change("more steps", supersede_what_could_be_trained),
        "a prompt is not fed again": of_change("a lower max_lag", feed_no_prompt_again),
    },
    "prompt": {"a prompt is fed again twice": of_change("a lower max_lag", feed_a_prompt_twice)},
    "batch": {"a step has the batch size of before": of_change("a smaller batch", keep_the_old_batch_size)},
    "config": {"the text of a config is forged": of_change("more steps", changed(ConfigWritten, 1, text="seed = 1"))},
}


@pytest.mark.parametrize(
    ("rule", "make"),
    [pytest.param(rule, make, id=name) for rule, some in CRIMES_OF_CHANGES.items() for name, make in some.items()],
)
def test_a_step_against_the_wrong_settings_is_found(rule: str, make: Callable[[], Run], tmp_path: Path) -> None:
    run = make()
    if rule == "settings" and run.all(SettingChanged, key="learner.learning_rate"):
        run.events = [*run.events[: run.all(Resumed)[0]], *with_rates(run.events[run.all(Resumed)[0] :], 1e-3)]
    assert rule in rules_broken(audit(run.write(tmp_path)))


# ---- every event counts --------------------------------------------------------------------------------------------------

SMALL = World(steps=3, groups_per_step=2, group_size=3, max_lag=1, failure=0.3, seed=3)
NEEDED = (RunStarted, *OF_GROUPS, Stepped, WeightsPublished)


def test_no_event_can_be_left_out_unnoticed(tmp_path: Path) -> None:
    whole = run_of(SMALL)
    for seq, event in enumerate(whole.events):
        if isinstance(event, NEEDED):
            run = Run(whole.events[:seq] + whole.events[seq + 1 :])
            assert not audit(run.write(tmp_path)).is_clean, event


def test_no_event_can_be_recorded_twice_unnoticed(tmp_path: Path) -> None:
    whole = run_of(SMALL)
    for seq, event in enumerate(whole.events):
        if isinstance(event, (*NEEDED, RunEnded)):
            run = Run([*whole.events[: seq + 1], *whole.events[seq:]])
            assert not audit(run.write(tmp_path)).is_clean, event


def test_no_event_of_a_resume_can_be_left_out_unnoticed(tmp_path: Path) -> None:
    whole = resumed_run()
    for seq in range(whole.all(Resumed)[-1], len(whole.events)):
        if isinstance(whole.events[seq], (*NEEDED, Resumed, GroupResumed)):
            run = Run(whole.events[:seq] + whole.events[seq + 1 :], folders=whole.folders)
            assert not audit(run.write(tmp_path / str(seq))).is_clean, whole.events[seq]


NUMBERS: dict[type[Event], tuple[str, ...]] = {
    GroupAdmitted: ("group_id", "start_version", "deadline"),
    RolloutStarted: ("group_id", "member", "attempt"),
    RolloutEnded: ("group_id", "member", "attempt", "end_version"),
    RolloutFailed: ("group_id", "member", "attempt"),
    GroupTaken: ("group_id", "version", "lag", "num_rollouts"),
    GroupLeft: ("group_id", "num_members", "mean_reward"),
    Stepped: ("version", "num_groups", "num_rows", "num_tokens"),
    WeightsPublished: ("version",),
    RunEnded: ("version",),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_no_number_can_be_raised_unnoticed(kind: type[Event], tmp_path: Path) -> None:
    whole = run_of(SMALL)
    for name in NUMBERS[kind]:
        for seq in whole.all(kind):
            run = Run(list(whole.events))
            value = getattr(run.events[seq], name)
            run.change(seq, **{name: SMALL.steps + 1 if name == "end_version" else value + 1})
            assert not audit(run.write(tmp_path)).is_clean, (name, whole.events[seq])
