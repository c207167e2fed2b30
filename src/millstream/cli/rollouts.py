"""`millstream rollouts`: what the model and the environment wrote, and what became of it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Annotated

import msgspec
import typer

from millstream.cli.common import CONTROL, console, errors, errors_shown, keep_stdout
from millstream.events.rollouts.reader import RolloutDump
from millstream.paths import program
from millstream.run.folder import RunFolder, holder_of
from millstream.run.missing_rollouts import missing_rollouts
from millstream.run.read_rollouts import RolloutQuery, RolloutText, as_text, find_rollouts, open_dump, write_parquet

MAX_SHOWN_ROLLOUTS = 20
"""Without --best, --worst or --json."""
COLUMN = 12
"""Characters before the text of a turn."""


def rollouts_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, of an active run or not.")],
    step: Annotated[int | None, typer.Option("--step", metavar="N", help="Only what step N trained.")] = None,
    version: Annotated[
        int | None, typer.Option("--version", metavar="N", help="Only what version N of the weights sampled.")
    ] = None,
    group: Annotated[int | None, typer.Option("--group", metavar="ID", help="Only this group.")] = None,
    task: Annotated[str | None, typer.Option("--task", metavar="ID", help="Only this task.")] = None,
    fate: Annotated[
        str | None,
        typer.Option(
            "--fate",
            metavar="FATE",
            help="Only trained, filtered, failed, aborted, superseded, restarted or in flight.",
        ),
    ] = None,
    sort: Annotated[
        str | None, typer.Option("--sort", metavar="KEY", help="Sort by reward, advantage, length or lag.")
    ] = None,
    best: Annotated[
        int | None, typer.Option("--best", metavar="N", min=1, help="Only the N highest. By reward without --sort.")
    ] = None,
    worst: Annotated[
        int | None, typer.Option("--worst", metavar="N", min=1, help="Only the N lowest. By reward without --sort.")
    ] = None,
    parquet: Annotated[
        Path | None, typer.Option("--parquet", metavar="FILE", help="Write them to a Parquet file instead.")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object per line: text, tokens, log-probabilities, versions.",
            callback=keep_stdout,
        ),
    ] = False,
) -> None:
    """Show rollouts of a run. The conversation with the environment's turns, rewards, advantage, lag and fate."""
    with errors_shown():
        query = RolloutQuery(
            step=step, version=version, group=group, task=task, fate=fate, sort=sort, best=best, worst=worst
        )
        dump, decode = open_dump(run_dir)
        found = find_rollouts(dump, query)
        texts = (as_text(one, decode) for one in found)
        if parquet is not None:
            console.out(f"wrote {write_parquet(texts, parquet)} rollouts to {parquet}", highlight=False)
        elif as_json:
            for one in texts:
                console.out(msgspec.json.encode(one).decode(), highlight=False)
        else:
            is_limited = best is not None or worst is not None
            _show(texts if is_limited else itertools.islice(texts, MAX_SHOWN_ROLLOUTS))
            if num_more := sum(1 for _ in found):
                console.out(f"and {num_more} more: choose with --step, --group, --best N, --worst N", highlight=False)
        if line := _missing_line(dump, run_dir):
            (errors if as_json else console).out(line, highlight=False)


def _show(texts: Iterator[RolloutText]) -> None:
    num_shown = 0
    for one in texts:
        num_shown += 1
        for line in rollout_lines(one):
            console.out(line.translate(CONTROL), highlight=False)
    if not num_shown:
        console.out("no kept rollout matches; those that failed have no reward to be sorted by", highlight=False)


def _missing_line(dump: RolloutDump, run_dir: Path) -> str:
    """What the run's log has and its files do not; empty: nothing is missing."""
    events = RunFolder(run_dir).events
    num_away, num_lost, _ = missing_rollouts(dump, events) if events.exists() else (0, 0, {})
    if not num_away and not num_lost:
        return ""
    why = "the run was killed, the disk was full, or rollout.keep_gb was 0"
    if holder_of(run_dir) is not None:
        why = "the run is active, and writes them every five seconds"
    lost = f", and {num_lost} were not written ({why})" if num_lost else ""
    away = f"{num_away} were sampled away (rollout.keep_gb)"
    return f"{num_away + num_lost} rollouts of the run are not in its files: {away}{lost}"


def kept_lines(run_dir: str) -> list[str]:
    """The end of a run that only keeps rollouts."""
    dump = RolloutDump(Path(run_dir))
    fates = Counter(one.fate for group in dump.groups() for one in dump.rollouts(group))
    counts = ", ".join(f"{count} {fate}" for fate, count in fates.most_common())
    folder, config, again = quote(run_dir), quote(f"{run_dir}/config.toml"), quote(f"run_dir={run_dir}-trained")
    return [
        f"rollouts      {counts or 'none'}; nothing was trained",
        f"run folder    {run_dir}",
        f"to read them  {program()} rollouts {folder} --best 5",
        f"to train      {program()} train {config} --set {quote(f'data.rollouts={run_dir}')} "
        f"--set pipeline.rollouts_only=false --set {again}",
    ]


def rollout_lines(one: RolloutText) -> Iterator[str]:
    """A heading, what the reward is made of, and the turns."""
    yield "  ".join(_heading(one))
    if one.reward_parts:
        parts = ", ".join(f"{name} {value:.3f}" for name, value in one.reward_parts.items())
        yield f"{'':2}{'rewards':{COLUMN}}{parts}"
    if one.why:
        yield f"{'':2}{'why':{COLUMN}}{one.why}"
    for number, part in enumerate(one.parts):
        if len(one.parts) > 1:
            yield f"  part {number}, agent {part.agent}, {part.finish}"
        earned = iter(part.turn_rewards if any(part.turn_rewards) else [])
        for speaker, text in part.turns:
            value = next(earned, None) if speaker == "model" else None
            end = "" if value is None else f"  [earned {value:.3f}]"
            lines = (text + end).split("\n")
            yield f"{'':2}{speaker:{COLUMN}}{lines[0]}"
            yield from (f"{'':{COLUMN + 2}}{line}" for line in lines[1:])
    yield ""


def _heading(one: RolloutText) -> Iterator[str]:
    yield f"group {one.group} member {one.member}" + (f" attempt {one.attempt}" if one.attempt else "")
    yield f"task {one.task}"
    if one.step is not None:
        yield f"step {one.step}"
    yield one.fate
    if one.reward is not None:
        yield f"reward {one.reward:.3f}"
    if one.advantage is not None:
        yield f"advantage {one.advantage:+.3f}"
    if one.lag is not None:
        yield f"lag {one.lag}"
    if one.versions is not None:
        first, last = one.versions
        yield f"version {first}" if first == last else f"versions {first} to {last}"
    yield f"{one.num_sampled} tokens" + (f", {one.parts[-1].finish}" if one.parts else "")
