"""`millstream diff`: two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from millstream.cli.common import CONTROL, console, errors_shown
from millstream.cli.rollouts import rollout_lines
from millstream.run.compare_runs import FIRST_METRICS, RunComparison, TaskPair, compare_runs

MAX_METRICS_SHOWN = 4
"""Side by side in a terminal; --json has all of them."""


def diff_command(
    first: Annotated[Path, typer.Argument(metavar="RUN1", help="A run folder, of an active run or not.")],
    second: Annotated[Path, typer.Argument(metavar="RUN2", help="Another one.")],
    num_tasks: Annotated[
        int, typer.Option("--tasks", metavar="N", min=0, help="The number of tasks whose rollouts are shown.")
    ] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")] = False,
) -> None:
    """Compare two runs. Settings that differ, metrics at the same steps, rollouts of the same tasks."""
    with errors_shown():
        found = compare_runs(first, second, num_tasks=num_tasks)
        if as_json:
            console.out(msgspec.json.encode(found).decode(), highlight=False)
            return
        console.print(settings_table(found))
        console.print(metrics_table(found))
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


def metrics_table(found: RunComparison) -> Table:
    """One row a step; two columns a metric."""
    steps = f"{found.num_steps[0]} and {found.num_steps[1]} steps"
    table = Table(title=f"Metrics at the same steps ({steps})", title_justify="left")
    present = list(dict.fromkeys(pair.metric for pair in found.metrics))
    names = [name for name in (*FIRST_METRICS, *present) if name in present]
    names = list(dict.fromkeys(names))[:MAX_METRICS_SHOWN]
    table.add_column("step", justify="right")
    for name in names:
        table.add_column(f"{name}, 1", justify="right")
        table.add_column("2", justify="right")
    values = {(pair.step, pair.metric): pair.values for pair in found.metrics}
    for step in dict.fromkeys(pair.step for pair in found.metrics):
        both = [value for name in names for value in values.get((step, name), (None, None))]
        shown = [f"{value:.4g}" if isinstance(value, (int, float)) else "-" for value in both]
        if {*shown} != {"-"}:  # a step that was evaluated, and has none of these
            table.add_row(str(step), *shown)
    return table


def task_table(pair: TaskPair) -> Table:
    rewards = " and ".join(f"{value:.3f}" for value in pair.mean_rewards)
    table = Table(title=Text(f"task {pair.task}: mean reward {rewards}".translate(CONTROL)), title_justify="left")
    for heading in ("the best of run 1", "the best of run 2"):
        table.add_column(heading, overflow="fold", ratio=1)
    table.add_row(*(Text("\n".join(rollout_lines(one)).rstrip().translate(CONTROL)) for one in pair.rollouts))
    return table
