"""The first page of a run: its state, what it waits for, what holds it up, findings, advice, evaluations, its history."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from millstream.dash.api import (
    AdviceRow,
    BottleneckRow,
    EvaluationRow,
    FindingRow,
    NoteRow,
    OverviewAnswer,
    RunRow,
    ScoreRow,
    SkippedRow,
    WaitRow,
)
from millstream.dash.series import MetricColumns, series_infos
from millstream.dash.tiles import RunTiles
from millstream.decoding import decode_json
from millstream.events import (
    WARMUP,
    CheckpointFailed,
    ConfigWritten,
    Evaluated,
    Event,
    FindingEnded,
    FindingMade,
    LagMoved,
    LearnerRestarted,
    MicroBatchLowered,
    PathChosen,
    ReplicaJoined,
    ReplicaLeft,
    Resumed,
    RunBranched,
    RunEnded,
    RunStarted,
    SettingChanged,
    SizesChosen,
    Stalled,
    StopRequested,
    WarmedUp,
    Warned,
)
from millstream.events.bottleneck import RECENT, Bottleneck, TimeUse
from millstream.run.advise import read_advice
from millstream.run.folder import NOTES, RunFolder
from millstream.run.progress import TimeLeft

MAX_HISTORY = 200
MAX_SKIPPED_SHOWN = 20
MAX_TEXT = 4000  # characters of one text
MAX_NOTES = 1 << 20  # bytes
LAST_TILES = 40  # that are read for what holds a run up, at most
SUMMARY = "summary.json"


class _Summary(Struct, frozen=True):
    bottleneck: Bottleneck | None = None


def overview_answer(
    run: RunRow,
    folder: RunFolder,
    tiles: RunTiles | None,
    metrics: MetricColumns,
    held_up: BottleneckRow | None,
    damaged: list[SkippedRow],
) -> OverviewAnswer:
    """`tiles`: None where there is no log. `held_up`: see `bottleneck_row`. `damaged`: of the rollouts."""
    rest = [] if run.state == "running" else _rest(tiles, metrics, folder)  # of an active run it will be a line
    skipped = [*rest, *metrics.skipped, *damaged]
    status = None
    if tiles is not None:
        skipped = [SkippedRow(file=tiles.path.name, line=one.line, why=one.why) for _, one in tiles.skipped] + skipped
        status = tiles.last_status()
    advice = read_advice(folder)
    return OverviewAnswer(
        run=run,
        left_s=_left_s(tiles, run) if tiles is not None and run.state == "running" else None,
        latest=metrics.latest(),
        series=series_infos(metrics.names()),
        waits=[]
        if status is None
        else [
            WaitRow(owner=one.owner, what=one.what, seconds=one.seconds, num=one.count, share=1.0)
            for one in status.waits
        ],
        waits_at=None if status is None else status.at,
        bottleneck=held_up,
        findings=[] if tiles is None else _findings(tiles),
        advice=[
            AdviceRow(words=one.words, gain=one.gain, low=one.low, high=one.high, command=one.command, note=one.note)
            for one in (advice[-1].promises if advice else ())
        ],
        evaluations=[]
        if tiles is None
        else [_evaluation(one) for one in tiles.marked(Evaluated) if one.name != WARMUP],
        history=[] if tiles is None else _history(tiles),
        config=_text(folder.config),
        notes=_text(folder.path / NOTES),
        skipped=skipped[:MAX_SKIPPED_SHOWN],
        num_skipped=len(rest) + metrics.num_skipped + len(damaged) + (0 if tiles is None else tiles.num_skipped),
    )


def _rest(tiles: RunTiles | None, metrics: MetricColumns, folder: RunFolder) -> list[SkippedRow]:
    """What a run that is over has left without the end of a line."""
    log = [] if tiles is None else [(tiles.path.name, tiles.next_line, tiles.num_rest)]
    return [
        SkippedRow(file=name, line=line, why=f"the last line is not whole: {num_rest} bytes without an end")
        for name, line, num_rest in (*log, (folder.metrics.name, metrics.num_lines + 1, metrics.num_rest))
        if num_rest
    ]


def _text(path: Path) -> str:
    """Empty if it is not there or cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(MAX_NOTES).decode("utf-8", "replace")
    return ""


def _left_s(tiles: RunTiles, run: RunRow) -> float | None:
    left = TimeLeft(run.steps)
    for event in tiles.marked(RunStarted, Resumed):
        left.add(event)
    if not len(tiles.steps):
        return None
    left.step(tiles.steps.last("at"), int(tiles.steps.last("version")))
    return left.seconds()


def bottleneck_row(folder: RunFolder, tiles: RunTiles, run: RunRow) -> BottleneckRow | None:
    """As the summary says; without one, from the last events."""
    found = None
    if run.state == "ended":
        with suppress(OSError, msgspec.DecodeError):
            found = decode_json((folder.path / SUMMARY).read_bytes(), _Summary).bottleneck
    if found is None:
        found = _bottleneck_now(tiles)
    return None if found is None else BottleneckRow(name=found.name, text=found.message, shares=found.shares)


def _bottleneck_now(tiles: RunTiles) -> Bottleneck | None:
    num, steps = len(tiles.tiles), tiles.steps.of("tile")
    begin = max(0, num - LAST_TILES, int(steps[-RECENT - 1]) if len(steps) > RECENT else 0)
    use = TimeUse()
    for event in tiles.marked(ConfigWritten, SizesChosen, RunStarted, Resumed) if begin else ():
        use.add(event)
    if begin:
        use.begin_at(tiles.tiles.sorted_by("begin")[begin], in_flight(tiles, begin))
    for one in tiles.events(range(begin, num), *TimeUse.READ):
        use.add(one)
    return use.bottleneck()


def in_flight(tiles: RunTiles, upto: int) -> int:
    """Rollouts at the beginning of this tile."""
    resumed = [number for number, mark in tiles.marks if mark.kind in ("resumed", "run_started") and number < upto]
    begin = resumed[-1] if resumed else 0
    sums = {
        name: int(tiles.tiles.of(f"rollouts_{name}", begin, upto).sum())
        for name in ("started", "ended", "failed", "aborted")
    }
    return max(0, sums["started"] - sums["ended"] - sums["failed"] - sums["aborted"])


def _findings(tiles: RunTiles) -> list[FindingRow]:
    found: list[FindingRow] = []
    for event in tiles.marked(FindingMade, FindingEnded):
        if isinstance(event, FindingMade):
            name, step = event.name, event.step
            found.append(FindingRow(name=name, step=step, until=None, message=event.message, advice=event.advice))
        elif isinstance(event, FindingEnded):
            ended, step = event.name, event.step
            found = [replace(one, until=step) if one.name == ended and one.until is None else one for one in found]
    return found


def _evaluation(event: Evaluated) -> EvaluationRow:
    scores = [ScoreRow(name=name, value=one.value, low=one.low, high=one.high) for name, one in event.scores.items()]
    return EvaluationRow(
        name=event.name,
        at=event.at,
        version=event.version,
        accuracy=event.accuracy,
        num_tasks=event.num_tasks,
        num_failed=event.num_failed,
        scores=scores,
    )


# ---- history -------------------------------------------------------------------------------------------------------------


def _history(tiles: RunTiles) -> list[NoteRow]:
    """The newest `MAX_HISTORY`, in their order."""
    return list(_notes(tiles))[-MAX_HISTORY:]


def _notes(tiles: RunTiles) -> Iterator[NoteRow]:
    kinds: tuple[type[Event], ...] = (
        *(RunStarted, RunBranched, Resumed, SettingChanged, LagMoved, SizesChosen, PathChosen, ReplicaLeft),
        *(ReplicaJoined, LearnerRestarted, MicroBatchLowered, Stalled, CheckpointFailed, Warned, WarmedUp),
        *(StopRequested, RunEnded),
    )
    for event in tiles.marked(*kinds):
        if (text := _words(event)) is not None:
            yield NoteRow(at=event.at, kind=str(event.__struct_config__.tag), text=text[:MAX_TEXT])


def _words(event: Event) -> str | None:
    match event:
        case RunStarted():
            return f"started: {event.steps} steps, max_lag {event.max_lag:g}"
        case RunBranched():
            return f"begins with the weights of step {event.step} of {event.run_dir}"
        case Resumed():
            changes = f", with {', '.join(event.changes)}" if event.changes else ""
            return f"resumed from step {event.version}{changes}"
        case SettingChanged():
            return f"{event.key} = {event.new}, before {event.old}, from version {event.version} on"
        case LagMoved():
            return f"max_lag {event.max_lag:g} from version {event.version} on: {event.why}"
        case SizesChosen():
            return f"on {event.device}: {event.sizes.slots} slots, passes of {event.sizes.micro_batch_tokens} tokens"
        case PathChosen():
            return f"{event.worker}: {event.path}{f' ({event.why})' if event.why else ''}"
        case ReplicaLeft():
            return f"{event.engine} has left: {event.why}. {event.num_left} engines serve"
        case ReplicaJoined():
            return f"{event.engine} has joined at version {event.version}"
        case LearnerRestarted():
            return f"{event.who} was restarted: {event.why}. Training stopped for {event.seconds:.0f} s"
        case MicroBatchLowered():
            return f"out of memory: passes of {event.micro_batch_tokens} tokens from here on"
        case Stalled():
            return f"{event.owner} has waited {event.seconds:.0f} s for {event.what}"
        case CheckpointFailed():
            return f"the checkpoint of step {event.version} could not be written: {event.message}"
        case Warned():
            return event.message
        case StopRequested():
            return f"{event.signal}: the current batch is finished first"
        case RunEnded():
            return f"{event.outcome} at step {event.version}"
    return None
