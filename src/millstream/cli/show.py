"""Plain output of a run: lines where there is no terminal, warnings, and the tables at the end. Reads only events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.table import Table

from millstream.events import (
    EVENT_LOOP,
    WARMUP,
    CheckpointFailed,
    Estimate,
    Evaluated,
    Event,
    FindingEnded,
    FindingMade,
    LearnerRestarted,
    MicroBatchLowered,
    PathChosen,
    ReplicaJoined,
    ReplicaLeft,
    Resumed,
    RolloutFailed,
    RunEnded,
    Sample,
    SampleShown,
    SizesChosen,
    Stalled,
    Stepped,
    StopRequested,
    WarmedUp,
    Warned,
)
from millstream.events.bias import BiasReport
from millstream.events.bottleneck import RECENT, Bottleneck, TimeUse
from millstream.events.encoding import encode_json
from millstream.events.findings import PastFinding
from millstream.events.metrics import StepMetrics, is_step
from millstream.events.summary import Summary, path_words
from millstream.run.device import sizes_in_words
from millstream.run.progress import TimeLeft, finding_text, speed_words

if TYPE_CHECKING:
    from millstream.run.control import RunStatus, ScaleResult, SetResult
    from millstream.run.folder import RunResult


NEXT_LINE = "\n" + 12 * " "
Alarm = (
    CheckpointFailed
    | FindingMade
    | FindingEnded
    | LearnerRestarted
    | MicroBatchLowered
    | ReplicaLeft
    | Stalled
    | StopRequested
    | Warned
)


def alarm(event: Alarm) -> str:
    if isinstance(event, StopRequested):
        return (
            f"stopping after the current batch, in at most {event.grace_s:g} s; send the signal again to stop at once"
        )
    if isinstance(event, Warned):
        return f"warning: {event.message}"
    if isinstance(event, FindingMade):
        return finding_text(event)
    if isinstance(event, FindingEnded):
        return f"{event.name} no longer holds at step {event.step}"
    if isinstance(event, MicroBatchLowered):
        return f"the learner ran out of memory: micro-batches have {event.micro_batch_tokens:,} tokens from here on"
    if isinstance(event, LearnerRestarted):
        replayed = f"{event.num_batches_replayed} batches since step {event.from_version} were replayed"
        return f"{event.who} was restarted at step {event.to_version}: {event.why}; {replayed}, {event.seconds:.0f} s"
    if isinstance(event, ReplicaLeft):
        moved = f"{event.num_moved} requests continue on other engines" if event.num_left else "no engine is left"
        return f"{event.engine} has left: {event.why}; {moved}"
    if isinstance(event, Stalled) and event.owner == EVENT_LOOP:
        return f"{event.owner} has been blocked for {event.seconds:.0f} s by {event.what}"
    if isinstance(event, Stalled):
        return f"{event.owner} has waited {event.seconds:.0f} s for {event.what}"
    return f"the checkpoint of step {event.version} failed: {event.message}; the run continues"


def finding_lines(found: Sequence[PastFinding]) -> list[str]:
    lines = []
    for finding, until in found:
        ended = "" if until is None else f" (until step {until})"
        lines += [f"{finding.name}, since step {finding.step}{ended}: {finding.message}", f"    {finding.advice}"]
    return lines or ["no findings: nothing says that the run did not learn"]


def bottleneck_lines(found: Bottleneck | None) -> list[str]:
    """None: the run is too short to say."""
    return [] if found is None else [f"bottleneck    {found.name}: {found.message}"]


def resumed(event: Resumed) -> str:
    changes = f", with {', '.join(event.changes)}" if event.changes else ""
    return f"resumed from step {event.version}{changes}"


def sizes_line(event: SizesChosen) -> str:
    kept = ", as at its start" if event.is_kept else ""
    return f"on {event.device}: {sizes_in_words(event.sizes)}{kept}"


def joined(event: ReplicaJoined) -> str:
    return f"{event.engine} has joined at version {event.version}"


class Alarms:
    """Prints warnings only: for `--quiet`."""

    def __init__(self, console: Console, *, with_findings: bool = True) -> None:
        self._console = console
        self._left_out = () if with_findings else (FindingMade, FindingEnded)

    def emit(self, event: Event) -> None:
        if isinstance(event, Alarm) and not isinstance(event, self._left_out):
            self._console.out(alarm(event), highlight=False)


class JsonLines:
    """Prints a JSON object for each step, evaluation, sample and warning, with its `type`: for `--json-lines`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._metrics = StepMetrics()

    def emit(self, event: Event) -> None:
        row = self._metrics.add(event)
        if isinstance(event, Stepped) and row is not None:
            self.print("step", row)
        elif isinstance(event, Evaluated | SampleShown | WarmedUp | Resumed | RunEnded):
            self._print_event(event)
        elif isinstance(event, Alarm):
            self._print_event(event, text=alarm(event))

    def _print_event(self, event: Event, **more: str) -> None:
        values = msgspec.to_builtins(event)
        self.print(values.pop("kind"), values | more)

    def print(self, kind: str, values: dict[str, Any]) -> None:
        self._console.out(encode_json({"type": kind, **values}).decode(), highlight=False)


class Lines:
    """Prints one line every few seconds, a rollout now and then, and a line for every unusual event."""

    EVERY_S = 5.0
    SAMPLE_S = 60.0

    def __init__(self, console: Console, *, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._left = TimeLeft(num_steps)
        self._metrics = StepMetrics()
        self._shown_at = float("-inf")
        self._rows: list[dict[str, Any]] = []  # of steps since then
        self._counted_at = float("-inf")
        self._repeats: Counter[str] = Counter()
        self._paths: dict[str, str] = {}
        self._use = TimeUse()
        self._bottleneck = ""
        self._sampled_at = float("-inf")

    def emit(self, event: Event) -> None:
        row = self._metrics.add(event)
        self._left.add(event)
        self._rows += [row] if row is not None and is_step(row) else []
        self._use.add(event)
        match event:
            case WarmedUp() if event.at - self._shown_at >= self.EVERY_S or event.step in (0, event.max_steps):
                self._say(event.at, f"supervised step {warmed_words(event)}")
                self._shown_at = event.at
            case Stepped() if event.at - self._shown_at >= self.EVERY_S or event.version == self._num_steps:
                assert row is not None
                self._say(
                    event.at,
                    f"step {event.version}/{self._num_steps}  reward {row['reward']:.3f}  groups {event.num_groups}  "
                    + "  ".join([f"lag {row['lag_mean']:.2f}", *speed_words(self._rows), self._left.words()]),
                )
                self._rows = []
                self._shown_at = event.at
                self._say_bottleneck(event.at)
            case Evaluated() if event.name != WARMUP:
                failed = f" ({event.num_failed} failed: {event.failure})" if event.num_failed else ""
                found = f"accuracy {event.accuracy:.3f} on {event.num_tasks} tasks{failed}"
                self._say(event.at, f"{event.name}: {found}{scores_words(event)}")
                if event.sample is not None:
                    self._say(event.at, f"a sample of it: {sample_line(event.sample)}")
            case SampleShown() if event.at - self._sampled_at >= self.SAMPLE_S:
                self._sampled_at = event.at
                self._say(event.at, f"a rollout: {sample_line(event.sample)}")
            case Resumed():
                self._say(event.at, resumed(event))
            case SizesChosen():
                self._say(event.at, sizes_line(event))
            case _ if isinstance(event, Alarm):
                self._say(event.at, alarm(event))
            case ReplicaJoined():
                self._say(event.at, joined(event))
            case PathChosen() if self._paths.get(event.worker) != path_words(event):
                self._paths[event.worker] = path_words(event)
                self._say(event.at, f"{event.worker}: {path_words(event)}")
            case RolloutFailed() if event.is_final:
                self._say_failed(event)
            case RunEnded():
                self._say_repeats(event.at)

    recall = emit

    def _say_bottleneck(self, at: float) -> None:
        """When it is known, and when it is another."""
        found = self._use.bottleneck()
        if found is not None and found.name != self._bottleneck and found.steps >= RECENT // 4:
            self._bottleneck = found.name
            self._say(at, f"bottleneck: {found.message}")

    def _say_failed(self, event: RolloutFailed) -> None:
        """In full the first time; repetitions are counted, and the counts printed from time to time."""
        if event.at - self._counted_at >= self.EVERY_S:
            self._say_repeats(event.at)
        kind = _kind_of(event)
        if kind not in self._repeats:
            self._say(event.at, f"group {event.group_id} continues without member {event.member}: {event.message}")
        self._repeats[kind] += kind in self._repeats

    def _say_repeats(self, at: float) -> None:
        for kind, count in self._repeats.items():
            if count:
                self._say(at, f"the same, {'once' if count == 1 else f'{count} times'} more: {kind}")
        self._repeats = Counter(dict.fromkeys(self._repeats, 0))
        self._counted_at = at

    def _say(self, at: float, text: str) -> None:
        self._console.out(f"[{at:7.1f} s] {text}", highlight=False)


def warmed_words(event: WarmedUp) -> str:
    """The step of supervised training, and what was measured."""
    found = [f"{event.step}/{event.max_steps}"]
    found += [] if event.loss is None else [f"loss {event.loss:.3f}"]
    found += [] if event.held_out_loss is None else [f"held out {event.held_out_loss:.3f}"]
    if event.accuracy is not None:
        goal = "" if event.stop_at is None else f" of {event.stop_at:.2f}"
        found.append(f"sampled accuracy {event.accuracy:.3f}{goal}")
    return "  ".join(found)


def scores_words(event: Evaluated) -> str:
    """pass@1, pass@k and their 95% intervals; empty for a log of an earlier release."""
    found = (f"{name} {estimate_words(one)}" for name, one in event.scores.items() if name.startswith("pass@"))
    return "".join(f", {words}" for words in found)


def estimate_words(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"


def _kind_of(event: RolloutFailed) -> str:
    """The same for failures that differ only in details."""
    return f"{event.error}: {event.message.partition(': ')[0]}"


def sample_text(sample: Sample) -> str:
    """A rollout in full, as a paragraph."""
    parts = [("prompt", sample.prompt), ("completion", sample.completion)]
    parts += [] if sample.answer is None else [("answer", sample.answer)]
    parts += [("reward", f"{sample.reward:.3f}{_because(sample)}")]
    return "".join(f"{name:10}  {text.replace(chr(10), NEXT_LINE)}\n" for name, text in parts)


def sample_line(sample: Sample) -> str:
    """A rollout in short, as one line."""
    answer = "" if sample.answer is None else f", answer {_clipped(sample.answer)}"
    reward = f"reward {sample.reward:.3f}{_because(sample)}"
    return f"{_clipped(sample.prompt)} -> {_clipped(sample.completion)}  {reward}{answer}"


def _because(sample: Sample) -> str:
    return f" ({sample.failure})" if sample.failure else ""


def _clipped(text: str, max_length: int = 40) -> str:
    return repr(text if len(text) <= max_length else text[:max_length] + "…")


def _scores_before_and_after(result: RunResult) -> Iterator[tuple[str, str, str, str]]:
    """Of every evaluation: its name, pass@1 and pass@k, each before and after training with its interval."""
    for name, scores in result.scores.items():
        label, _, when = name.rpartition(" ")
        before = result.scores.get(f"{label} before", {})
        passed = [score for score in scores if score.startswith("pass@")]
        for score in dict.fromkeys((*passed[:1], *passed[-1:])) if when == "after" else ():
            yield label, score, estimate_words(before[score]) if score in before else "", estimate_words(scores[score])


def result_table(result: RunResult) -> Table:
    table = Table(title="The run", show_header=True, header_style="bold")
    for column in ("", "before", "after"):
        table.add_column(column, justify="left" if not column else "right")
    if result.accuracy_before is not None and result.accuracy_after is not None:
        table.add_row("accuracy, sampled", f"{result.accuracy_before:.3f}", f"{result.accuracy_after:.3f}")
    if result.greedy_before is not None and result.greedy_after is not None:
        table.add_row("accuracy, greedy", f"{result.greedy_before:.3f}", f"{result.greedy_after:.3f}")
    for label, score, before, after in _scores_before_and_after(result):
        table.add_row(f"{label}, {score}", before, after)
    if result.held_out_loss_before is not None and result.held_out_loss_after is not None:
        losses = (f"{result.held_out_loss_before:.3f}", f"{result.held_out_loss_after:.3f}")
        table.add_row("held-out loss, supervised", *losses)
    summary = result.summary
    if summary.paths:
        table.add_section()
    for path, workers in _by_path(summary).items():
        table.add_row(workers, "", path)
    if not summary.steps:  # supervised training alone, or a run that had no data
        return table
    table.add_section()
    lags = "  ".join(f"{lag}: {count}" for lag, count in summary.lag_histogram.items())
    for name, value in (
        ("seconds of training", f"{summary.seconds:.1f}"),
        ("steps", str(summary.steps)),
        *([("steps that trained nothing", str(summary.steps_empty))] if summary.steps_empty else []),
        ("rollouts trained", str(summary.rollouts_trained)),
        ("rollouts/s trained", f"{summary.rollouts_per_s:.0f}"),
        *([("tokens/s generated", f"{summary.tokens_per_s:.0f}")] if summary.tokens_per_s else []),
        *_speculation(summary),
        ("groups admitted", str(summary.groups_admitted)),
        (
            "groups trained, filtered, failed",
            f"{summary.groups_trained}, {summary.groups_filtered}, {summary.groups_failed}",
        ),
        *_failures(summary),
        *_declared(summary),
        *([("restarts of the learner", str(summary.learner_restarts))] if summary.learner_restarts else []),
        ("groups by lag", lags),
        ("training overlapped by generation", f"{summary.overlap_share:.0%}"),
        *([] if summary.sizes is None else [("sizes", sizes_in_words(summary.sizes))]),
    ):
        table.add_row(name, "", value)
    return table


def _speculation(summary: Summary) -> list[tuple[str, str]]:
    if not summary.tokens_drafted:
        return []
    return [("speculative tokens, accepted", f"{summary.tokens_drafted}, {summary.tokens_accepted}")]


def _by_path(summary: Summary) -> dict[str, str]:
    """Paths, each with the workers that have it."""
    found: dict[str, str] = {}
    for worker, path in summary.paths.items():
        found[path] = f"{found[path]}, {worker}" if path in found else worker
    return found


def _failures(summary: Summary) -> list[tuple[str, str]]:
    if not summary.rollouts_failed and not summary.rollouts_retried:
        return []
    return [("rollouts failed, retried", f"{summary.rollouts_failed}, {summary.rollouts_retried}")]


def _declared(summary: Summary) -> list[tuple[str, str]]:
    """What was aborted because the config said so, and what a resume with another schedule replaced."""
    superseded = (
        [("groups superseded by a resume", str(summary.groups_superseded))] if summary.groups_superseded else []
    )
    if not summary.rollouts_aborted:
        return superseded
    return [
        *superseded,
        ("groups aborted, restarted", f"{summary.groups_aborted}, {summary.groups_restarted}"),
        ("rollouts aborted", str(summary.rollouts_aborted)),
    ]


def scaled_lines(found: ScaleResult) -> list[str]:
    lines = [f"{name} has joined" for name in found.joined] + [f"{name} has left" for name in found.left]
    return [*(lines or ["nothing to do"]), f"engines: {', '.join(found.engines)}"]


def changed_lines(found: SetResult) -> list[str]:
    return [f"{change}, for groups that start from version {found.version} on" for change in found.changes] or [
        "nothing to do"
    ]


def status_lines(now: RunStatus) -> list[str]:
    bound = "" if now.lag_bound is None else f", groups that start now may have a lag of {now.lag_bound}"
    lines = [f"version {now.version}{bound}"]
    for one in now.engines:
        if one.version is None:
            lines.append(f"{one.name}: starting")
        else:
            lines.append(
                f"{one.name}: version {one.version}, {one.running} requests decoding of {one.slots}, {one.waiting} queued"
            )
    lines.append(f"{now.requests_waiting} requests wait for an engine")
    lines.append(f"{now.groups_in_flight} of {now.budget} groups in flight, {now.rows_in_store} rows in the store")
    return [*lines, *(f"{wait.owner} waits for {wait.what}, {wait.seconds:.0f} s" for wait in now.waits)]


def bias_tables(report: BiasReport) -> list[Table]:
    classes = Table(title="Rollouts by what became of them")
    for heading in ("", "rollouts", "tokens, mean", "median", "95%", "seconds", "reward", "sources"):
        classes.add_column(heading, justify="left" if heading in ("", "sources") else "right")
    for row in report.rows:
        at_least = "≥ " if row.is_lower_bound else ""
        classes.add_row(
            row.name,
            str(row.rollouts),
            *(at_least + _number(value, 1) for value in (row.tokens_mean, row.tokens_p50, row.tokens_p95)),
            _number(row.seconds_mean, 3),
            _number(row.reward_mean, 3),
            ", ".join(f"{name} {share:.0%}" for name, share in row.sources.items()),
        )
    tests = Table(
        title="Is what was kept a fair sample of what was admitted?",
        caption="declared: what filter_zero_signal leaves out on purpose, groups whose rewards are all equal",
    )
    for heading in ("", "bias", "95% interval", "p", "lost", "verdict", ""):
        is_word = heading in ("", "verdict")
        tests.add_column(heading, justify="left" if is_word else "right", no_wrap=heading == "verdict")
    for number, test in enumerate((*report.tests, *report.declared)):
        if number == len(report.tests):
            tests.add_section()
        style = {"biased": "bold red", "no bias found": "green"}.get(test.verdict, "dim")
        tests.add_row(
            test.quantity if number < len(report.tests) else f"{test.quantity}, trained only",
            f"{test.bias:+.2f}%",
            f"{test.low:+.2f}% to {test.high:+.2f}%",
            f"{test.p_value:.3f}",
            str(test.lost),
            f"[{style}]{test.verdict}[/]",
            test.note,
        )
    return [classes, tests]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
