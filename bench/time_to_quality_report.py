"""What the cells of `bench/time_to_quality.py` show together: a table, rows and two figures.

Intervals are of 95%. Of a difference of final accuracies: Student's over the seeds that both modes have, in pairs; or, with one
seed, the normal one over the held-out tasks, which leaves out how much runs differ. What was not measured is shown as such.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from curves import INK, Difference, Point, draw_curves, paired, plots
from modes import BARRIER, MODES
from report import Row, alone, cost, not_measured, rate, say
from time_to_quality_cells import LAST_POINTS, TimedCell, TimedResult
from time_to_quality_trl import TRL

COLOURS = {BARRIER: "#8a8a8a", "0": "#7a5fc0", "1": "#2fa88f", "2": "#2f8fd8", "4": "#e0722b", TRL: "#c0392b"}
NORMAL = 1.96
Results = Mapping[TimedCell, TimedResult]


def named(mode: str) -> str:
    return {BARRIER: "barrier", TRL: "TRL"}.get(mode, f"max_lag = {mode}")


def of_mode(results: Results, mode: str) -> list[TimedResult]:
    """In the order of the seeds."""
    return [result for cell, result in sorted(results.items()) if cell.mode == mode]


def modes_in(results: Results) -> list[str]:
    return [mode for mode in (*MODES, TRL) if of_mode(results, mode)]


def difference(results: Results, mode: str, base: str) -> Difference | None:
    """Of the final accuracies, over the seeds of both. None: they have none."""
    seeds = sorted({cell.seed for cell in results if cell.mode == mode} & {c.seed for c in results if c.mode == base})
    ours, theirs = ([results[TimedCell(one, seed)].final for seed in seeds] for one in (mode, base))
    if len(seeds) >= 2:
        return paired(ours, theirs)
    return of_one_seed(results[TimedCell(mode, seeds[0])], results[TimedCell(base, seeds[0])]) if seeds else None


def of_one_seed(ours: TimedResult, theirs: TimedResult) -> Difference:
    """Each final accuracy is a mean over the last points of as many answers as there are held-out tasks."""
    variance = sum(one.final * (1 - one.final) / (LAST_POINTS * one.held_out) for one in (ours, theirs))
    return Difference(ours.final - theirs.final, NORMAL * math.sqrt(variance))


def default_target(results: Results) -> float:
    """The highest accuracy that every run reaches at a point of its curve, rounded down to hundredths."""
    return math.floor(100 * min(max(point.accuracy for point in one.curve) for one in results.values())) / 100


def mean_seconds(results: Results, mode: str, target: float) -> float:
    return statistics.mean(one.seconds_to(target) for one in of_mode(results, mode))


def mean_of(results: Results, mode: str, value: Callable[[TimedResult], float]) -> float:
    return statistics.mean(map(value, of_mode(results, mode)))


def json_rows(results: Results, target: float | None) -> list[Row]:
    """Every mode beside the barrier (TRL: beside max_lag = 2)."""
    target = default_target(results) if target is None else target
    rows = []
    for mode in (*MODES[1:], TRL):
        ours, base = (mode, BARRIER) if mode != TRL else ("2", TRL)
        workload, present = f"{named(ours)}", modes_in(results)
        if ours not in present or base not in present:
            rows.append(not_measured(f"{named(ours)} beside {named(base)}", "a cell is missing"))
            continue

        def both(value: Callable[[TimedResult], float], ours: str = ours, base: str = base) -> tuple[float, str, float]:
            return mean_of(results, ours, value), named(base), mean_of(results, base, value)

        rows += [
            rate(workload, "held-out accuracy at the end, sampled", *both(lambda one: one.final)),
            rate(workload, "rollouts trained/s", *both(lambda one: one.rollouts_per_s), digits=1),
            cost(workload, f"seconds to {target:.2f}", *both(lambda one: one.seconds_to(target)), digits=1),
        ]
        if (found := difference(results, ours, base)) is not None:
            rows.append(
                alone(workload, f"half of the 95% interval of the difference to {named(base)}", found.half_width)
            )
    return rows


# ---- the page ------------------------------------------------------------------------------------------------------------


def table(results: Results, target: float) -> str:
    base = BARRIER if of_mode(results, BARRIER) else modes_in(results)[0]
    lines = [
        f"| mode | seeds | before | after | greedy after | less {named(base)} | rollouts/s | ratio | seconds to {target:.2f} "
        "| ratio | steps | lag |",
        f"|---|{'---|' * 11}",
    ]
    for mode in (*MODES, TRL):
        if not of_mode(results, mode):
            lines.append(f"| {named(mode)} | not measured |{' |' * 10}")
            continue
        speed, seconds = mean_of(results, mode, lambda one: one.rollouts_per_s), mean_seconds(results, mode, target)
        speed_of_base = mean_of(results, base, lambda one: one.rollouts_per_s)
        apart = difference(results, mode, base) if mode != base else None
        cells = [
            named(mode),
            str(len(of_mode(results, mode))),
            f"{mean_of(results, mode, lambda one: one.curve[0].accuracy):.3f}",
            shown_all([one.final for one in of_mode(results, mode)]),
            f"{mean_of(results, mode, lambda one: one.curve[-1].greedy):.3f}",
            "" if apart is None else str(apart),
            f"{speed:.1f}",
            f"{speed / speed_of_base:.2f}x",
            f"{seconds:.0f}" if math.isfinite(seconds) else "not reached",
            f"{mean_seconds(results, base, target) / seconds:.2f}x" if 0 < seconds < math.inf else "",
            f"{mean_of(results, mode, lambda one: one.steps):.0f}",
            f"{mean_of(results, mode, lambda one: one.mean_lag):.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shown_all(values: Sequence[float]) -> str:
    """The mean, and each of several values."""
    mean = f"{statistics.mean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} [{', '.join(f'{value:.3f}' for value in values)}]"


def in_words(results: Results) -> str:
    """What all cells share, and how the intervals are made."""
    any_one = next(iter(results.values()))
    lengths = [one.mean_tokens for one in results.values()]
    counts = [len(of_mode(results, mode)) for mode in modes_in(results)]
    trl_seconds = any_one.settings.trl_seconds
    trl = f" (TRL: {trl_seconds:.0f} s)" if trl_seconds is not None and of_mode(results, TRL) else ""
    also = "" if any_one.settings.is_split_by_prompt else " (their prompts are trained, too, where tasks repeat)"
    interval = "Student's over the seeds where there are several, else normal over the held-out tasks"
    if max(counts) == 1:
        interval = "normal, over the held-out tasks of one seed"
    elif min(counts) > 1:
        interval = "Student's, over the seeds"
    return (
        f"`recipes/{any_one.settings.recipe}.toml`, {any_one.settings.seconds:.0f} s of training a run{trl}, "
        f"{any_one.held_out} held-out tasks{also}, {any_one.device}, {min(one.at for one in results.values())[:10]}. "
        f"Accuracy is the share of tasks solved, sampled; at the end, the mean of the last {LAST_POINTS} points. 95% "
        f"intervals: {interval}. Rollouts have {min(lengths):.0f} to {max(lengths):.0f} tokens on average. A run took "
        f"{statistics.mean(one.start_s for one in results.values()):.0f} s before and after training, and "
        f"{statistics.mean(one.evaluation_s for one in results.values()):.0f} s for its evaluations, outside of the clock."
    )


def write_report(results: Results, target: float | None, docs: Path | None) -> None:
    """The table on standard output, and the figures in the folder, if there is one."""
    if not results:
        raise SystemExit("the file has no cells: type `time_to_quality.py run FILE` first")
    target = default_target(results) if target is None else target
    print(f"{in_words(results)}\n\n{table(results, target)}")
    if docs is None:
        return
    for name, across, label in (
        ("time-to-quality-seconds.svg", seconds_of, "seconds of training"),
        ("time-to-quality-samples.svg", thousands_of, "thousand rollouts trained"),
    ):
        draw(results, docs / name, across, label)
        say(f"written: {docs / name}")


def seconds_of(point: Point) -> float:
    return point.seconds


def thousands_of(point: Point) -> float:
    return point.samples / 1000


def draw(results: Results, path: Path, across: Callable[[Point], float], label: str) -> None:
    """A line a mode."""
    with plots("time-to-quality") as pyplot:
        figure, panel = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
        for mode in modes_in(results):
            runs = of_mode(results, mode)
            curves = [(list(map(across, one.curve)), [point.accuracy for point in one.curve]) for one in runs]
            draw_curves(panel, curves, colour=COLOURS[mode], label=named(mode))
        panel.legend(frameon=False, labelcolor=INK)
        panel.set_xlabel(label)
        panel.set_ylabel("held-out accuracy, sampled")
        figure.savefig(path, transparent=True, metadata={"Date": None})
        pyplot.close(figure)
