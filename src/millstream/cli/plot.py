"""`millstream plot`: the metrics of one or several runs as a PNG or SVG file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from millstream.cli.common import console, errors_shown
from millstream.decoding import decode_json
from millstream.errors import ConfigError, LogError
from millstream.events.metrics import is_step
from millstream.paths import kind_of
from millstream.run.folder import RunFolder

FIRST_SCORE = re.compile(r"eval/[^/]+/pass@1")  # of each evaluation, sampled
DEFAULT = ("reward", "reward_std", "entropy", "length", "behaviour_kl", "lag_mean", "groups_filtered", "step_s")
FORMATS = (".png", ".svg", ".pdf")
COLUMNS = 2
SMOOTH = 20  # steps of the running mean are the run's length by this number

Rows = list[dict[str, Any]]


def plot_command(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, of active runs or not: one line each.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="A .png, .svg or .pdf file. Default: plot.png, in RUN if there is one."
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric", metavar="NAME", help="A key of metrics.jsonl. May be repeated. Default: the usual ones."
        ),
    ] = None,
) -> None:
    """Plot the metrics of runs. Each metric is one graph over the steps, with a line for each run; thin: every step, thick: the
    running mean."""
    with errors_shown():
        target = out or (run_dirs[0] / "plot.png" if len(run_dirs) == 1 else Path("plot.png"))
        if target.suffix not in FORMATS:
            raise ConfigError(f"--out {target}: expected a name that ends with {', '.join(FORMATS)}")
        runs = {str(path): read_metrics(path) for path in run_dirs}
        draw(runs, chosen_metrics(runs, metric or []), target)
        console.out(f"wrote {target}", highlight=False)


def read_metrics(run_dir: Path) -> Rows:
    """The rows of `metrics.jsonl`. An incomplete last line is left out."""
    path = RunFolder(run_dir).metrics
    if kind_of(path) != "file":
        RunFolder.of_run(run_dir)
    try:
        lines = path.read_bytes().splitlines(keepends=True) if kind_of(path) == "file" else []
        rows: Rows = [decode_json(line, dict[str, Any]) for line in lines if line.endswith(b"\n")]
    except (OSError, msgspec.MsgspecError) as error:
        raise LogError(f"{path} cannot be read: {error}") from error
    if not any(map(is_step, rows)):
        raise ConfigError(f"{path} has no steps yet: plot the run when it has made some")
    return rows


def chosen_metrics(runs: Mapping[str, Rows], asked: Sequence[str]) -> list[str]:
    """Raises `ConfigError` for one that no run has."""
    known = sorted({key for rows in runs.values() for row in rows for key in numbers_of(row)} - {"step", "at"})
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise ConfigError(f"no metric {unknown[0]!r} in these runs: choose among {', '.join(known)}")
    default = [*(name for name in DEFAULT if name in known), *filter(FIRST_SCORE.fullmatch, known)]
    names = list(asked) or default or known
    if not names:
        raise ConfigError(f"no numbers in the metrics of {', '.join(runs)}: expected some of {', '.join(DEFAULT)}")
    return names


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in row.items() if isinstance(value, int | float)}


def draw(runs: Mapping[str, Rows], names: Sequence[str], target: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib, which is not installed: pip install 'millstream[plots]'") from error
    columns = min(COLUMNS, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(6 * columns, 3 * lines), layout="constrained")
    graphs = figure.subplots(lines, columns, squeeze=False).flat
    for name, graph in zip(names, graphs, strict=False):
        for number, (run, rows) in enumerate(runs.items()):
            numbers = map(numbers_of, rows)
            points = sorted((found["step"], found[name]) for found in numbers if {"step", name} <= found.keys())
            steps, values = [step for step, _ in points], [value for _, value in points]
            marker = "o" if len(points) == 1 else ""  # a line through one point is not seen
            graph.plot(steps, values, color=f"C{number}", alpha=0.3, linewidth=0.8)
            graph.plot(steps, running_mean(values), marker, color=f"C{number}", label=Path(run).name)
        graph.set_title(name, fontsize=10)
        graph.grid(visible=True, alpha=0.3)
    for graph in list(graphs)[len(names) :]:
        graph.set_axis_off()
    figure.axes[0].legend(fontsize=8)
    try:
        figure.savefig(target)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}") from error


def running_mean(values: Sequence[float]) -> list[float]:
    """Over the last twentieth of the run."""
    width, total, means = max(1, len(values) // SMOOTH), 0.0, list[float]()
    for number, value in enumerate(values):
        total += value - (values[number - width] if number >= width else 0.0)
        means.append(total / min(number + 1, width))
    return means
