"""`millstream diff`: two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from millstream.cli.common import CONTROL, AsJson, console, errors_shown
from millstream.cli.rollouts import rollout_lines
from millstream.run.compare_runs import FIRST_METRICS, RunComparison, TaskPair, compare_runs

BORDER = 3  # characters of a table between two columns


def diff_command(
    first: Annotated[Path, typer.Argument(metavar="RUN1", help="A run folder, of an active run or not.")],
    second: Annotated[Path, typer.Argument(metavar="RUN2", help="Another one.")],
    num_tasks: Annotated[
        int, typer.Option("--tasks", metavar="N", min=0, help="The number of tasks whose rollouts are shown.")
    ] = 3,
    as_json: AsJson = False,
) -> None:
    """Compare two runs. Settings that differ, metrics at the same steps, rollouts of the same tasks."""
    with errors_shown():
        found = compare_runs(first, second, num_tasks=num_tasks)
        if as_json:
            console.out(msgspec.json.encode(found).decode(), highlight=False)
            return
        console.print(settings_table(found))
        console.print(metrics_table(found, console.width))
        if found.num_common_tasks is None:
            console.out("one of them has no rollouts: nothing to compare", highlight=False)
            return
        console.out(f"{found.num_common_tasks} tasks were trained by both; largest differences:", highlight=False)
        for pair in found.tasks:
            console.print(task_table(pair))


def settings_table(found: RunComparison) -> Table:
    table = Table(title="Settings that differ" if found.settings else "No setting differs", title_justify="left")
    for heading in ("key", *found.runs):
        table.add_column(heading, overflow="fold")
    for pair in found.settings:
        table.add_row(pair.key, *(Text(value or "-") for value in pair.values))
    return table


def metrics_table(found: RunComparison, width: int) -> Table:
    """One row a step; two columns a metric, for as many metrics as fit side by side. --json has all of them."""
    runs = "\n".join(
        f"{number}: {run}, {steps} steps"
        for number, (run, steps) in enumerate(zip(found.runs, found.num_steps, strict=True), 1)
    )
    table = Table(title=Text(f"Metrics at the same steps\n{runs}"), title_justify="left")
    present = list(dict.fromkeys(pair.metric for pair in found.metrics))
    columns = {name: _columns(found, name) for name in dict.fromkeys([*FIRST_METRICS, *present]) if name in present}
    table.add_column("step", justify="right", no_wrap=True)
    steps = list(dict.fromkeys(pair.step for pair in found.metrics))
    used, shown = 1 + BORDER + max(map(len, ["step", *map(str, steps)])), list[tuple[dict[int, str], dict[int, str]]]()
    for name, both in columns.items():
        headings = f"{name} 1", "2"
        used += sum(
            BORDER + max(map(len, [heading, *own.values()])) for heading, own in zip(headings, both, strict=True)
        )
        if used > width and shown:
            break
        shown.append(both)
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
    for step in steps:
        cells = [own.get(step, "-") for both in shown for own in both]
        if {*cells} != {"-"}:  # a step that was evaluated, and has none of these
            table.add_row(str(step), *cells)
    return table


def _columns(found: RunComparison, metric: str) -> tuple[dict[int, str], dict[int, str]]:
    """The values of both runs, by step."""
    pairs = [(pair.step, pair.values) for pair in found.metrics if pair.metric == metric]
    first, second = (
        {step: f"{values[run]:.4g}" for step, values in pairs if isinstance(values[run], int | float)} for run in (0, 1)
    )
    return first, second


def task_table(pair: TaskPair) -> Table:
    rewards = " and ".join(f"{value:.3f}" for value in pair.mean_rewards)
    table = Table(title=Text(f"task {pair.task}: mean reward {rewards}".translate(CONTROL)), title_justify="left")
    for heading in ("the best of run 1", "the best of run 2"):
        table.add_column(heading, overflow="fold", ratio=1)
    table.add_row(*(Text("\n".join(rollout_lines(one)).rstrip().translate(CONTROL)) for one in pair.rollouts))
    return table
