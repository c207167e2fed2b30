"""What the cells of `bench/quality.py` say together: tables, verdicts and figures.

How a difference and its interval are computed is in `curves.py`.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from curves import INK, Difference, Point, draw_curves, paired, plots
from quality_cells import LAGS, LOSSES, UNCORRECTED, Cell, Result, Settings, cells, read_results
from report import Row, rate

BEGIN, END = "<!-- made by bench/quality.py: begin -->", "<!-- made by bench/quality.py: end -->"
MIN_FORCED = 0.95
LAST_POINTS = 2
COLOURS = {0: "#8a8a8a", 2: "#2f8fd8", 8: "#e0722b"}


class Finished(Struct, frozen=True, kw_only=True):
    """Results of seeds whose cells are all there, with the lag that they should have."""

    settings: Settings
    results: dict[Cell, Result]
    seeds: list[int]

    def of(self, loss: str, max_lag: int) -> list[Result]:
        """In the order of the seeds."""
        return [self.results[Cell(loss, max_lag, seed)] for seed in self.seeds]


def read_finished(folder: Path) -> Finished:
    """Raises `SystemExit` for fewer than two whole seeds, and for a cell whose real lag, or number of samples, is another: all
    of them by name."""
    settings, results = read_results(folder)
    known = sorted({cell.seed for cell in results})
    missing = {seed: [cell for cell in cells(seed + 1) if cell.seed == seed and cell not in results] for seed in known}
    seeds = [seed for seed in known if not missing[seed]]
    if len(seeds) < 2:
        left = "; ".join(f"seed {seed} lacks {len(lacking)}" for seed, lacking in missing.items())
        raise SystemExit(f"{len(seeds)} seeds are whole, and an interval takes two ({left}): go on with `run {folder}`")
    whole = {cell: result for cell, result in results.items() if cell.seed in seeds}
    expected = settings.steps * settings.groups_per_step * settings.group_size
    for cell, result in whole.items():
        if (samples := result.curve[-1].samples) != expected:
            raise SystemExit(f"{cell}: {samples} rollouts were trained, and {expected} in the others. Did some fail?")
        if result.forced_share < MIN_FORCED:
            raise SystemExit(
                f"{cell}: {result.forced_share:.1%} of its groups have the lag {cell.max_lag}, where {MIN_FORCED:.0%} are "
                f"expected (found: {result.lags}). Was the machine busy? Take its line out of the results and run it again"
            )
    return Finished(settings=settings, results=whole, seeds=seeds)


# ---- numbers -------------------------------------------------------------------------------------------------------------


def final_accuracy(result: Result) -> float:
    return statistics.mean(point.accuracy for point in result.curve[-LAST_POINTS:])


def beside_synchronous(finished: Finished, loss: str, max_lag: int) -> Difference:
    ours, theirs = (list(map(final_accuracy, finished.of(loss, lag))) for lag in (max_lag, 0))
    return paired(ours, theirs)


def json_rows(finished: Finished) -> list[Row]:
    rows: list[Row] = []
    for loss in LOSSES:
        for lag in LAGS[1:]:
            ours, theirs = (statistics.mean(map(final_accuracy, finished.of(loss, at))) for at in (lag, 0))
            workload = f"{finished.settings.toy}, {loss}, max_lag {lag}"
            rows.append(rate(workload, "held-out accuracy, sampled", ours, "synchronous", theirs, digits=4))
    return rows


# ---- tables --------------------------------------------------------------------------------------------------------------


def tables(finished: Finished) -> str:
    return "\n\n".join([_settings_in_words(finished), _accuracies(finished), _conclusion(finished), _lags(finished)])


def _settings_in_words(finished: Finished) -> str:
    settings, seeds = finished.settings, finished.seeds
    first = [finished.results[Cell(UNCORRECTED, 0, seed)].curve[0].accuracy for seed in seeds]
    seconds = [result.curve[-1].seconds for result in finished.results.values()]
    return (
        f"{len(seeds)} seeds; {settings.steps} steps of {settings.groups_per_step} groups of {settings.group_size}: "
        f"{settings.steps * settings.groups_per_step * settings.group_size:,} rollouts are trained in every cell. "
        f"Learning rate {settings.learning_rate:g}, {settings.schedule}. The warm-ups end at {min(first):.3f} to "
        f"{max(first):.3f} accuracy. Training takes {min(seconds):.0f} to {max(seconds):.0f} s a cell, the median is "
        f"{statistics.median(seconds):.0f} s."
    )


def _accuracies(finished: Finished) -> str:
    lagging = LAGS[1:]
    lines = [
        f"| loss | {' | '.join(f'lag {lag}' for lag in LAGS)} | {' | '.join(f'{lag} less 0 | verdict' for lag in lagging)} |",
        f"|---|{'---|' * (len(LAGS) + 2 * len(lagging))}",
    ]
    for loss in LOSSES:
        means = [f"{statistics.mean(map(final_accuracy, finished.of(loss, lag))):.3f}" for lag in LAGS]
        for lag in lagging:
            difference = beside_synchronous(finished, loss, lag)
            means += [str(difference), verdict(difference)]
        lines.append(f"| {loss} | {' | '.join(means)} |")
    return "\n".join(lines)


def verdict(difference: Difference) -> str:
    if difference.is_within_noise:
        return "within noise"
    return "worse" if difference.mean < 0 else "better"


def _conclusion(finished: Finished) -> str:
    said = []
    for lag in LAGS[1:]:
        verdicts = {loss: verdict(beside_synchronous(finished, loss, lag)) for loss in LOSSES}
        corrected = [loss for loss in LOSSES if loss != UNCORRECTED]
        within = [loss for loss in corrected if verdicts[loss] == "within noise"]
        others = [f"{loss} {verdicts[loss]}" for loss in corrected if loss not in within]
        rest = f" ({'; '.join(others)})" if others else ""
        said.append(
            f"At lag {lag} {len(within)} of {len(corrected)} corrected losses are within noise of synchronous training{rest}; "
            f"without a correction: {verdicts[UNCORRECTED]}."
        )
    return " ".join(said)


def _lags(finished: Finished) -> str:
    """Over all losses: what is forced does not depend on them. The effective sample size does."""
    lines = [
        "| max_lag | groups by lag, after the first max_lag batches | at max_lag | oldest token | newest token | "
        "effective sample size |",
        "|---|---|---|---|---|---|",
    ]
    for lag in LAGS:
        results = [result for cell, result in finished.results.items() if cell.max_lag == lag]
        counts = sum((Counter(result.lags) for result in results), Counter[str]())
        sizes = [result.metrics["effective_sample_size"] for result in results]
        cells_ = [
            str(lag),
            ", ".join(f"{at}: {counts[at]:,}" for at in sorted(counts, key=int)),
            f"{counts[str(lag)] / sum(counts.values()):.2%}",
            f"{statistics.mean(result.oldest_token for result in results):.2f}",
            f"{statistics.mean(result.newest_token for result in results):.2f}",
            f"{min(sizes):.2f} to {max(sizes):.2f}",
        ]
        lines.append(f"| {' | '.join(cells_)} |")
    return "\n".join(lines)


def write_report(finished: Finished, docs: Path) -> None:
    """The part of quality.md between its two marks, and the figures beside it."""
    page = docs / "quality.md"
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(
            f"{page} must have the line {BEGIN} once, and {END} once after it: put them where the tables belong"
        )
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{tables(finished)}\n{END}{after}")
    draw(finished, docs / "quality-samples.svg", lambda point: point.samples / 1000, "thousand rollouts trained")
    draw(finished, docs / "quality-seconds.svg", lambda point: point.seconds, "seconds of training")


# ---- figures -------------------------------------------------------------------------------------------------------------


COLUMNS = 3


def draw(finished: Finished, path: Path, across: Callable[[Point], float], label: str) -> None:
    """A panel a loss, a line a lag."""
    with plots("quality") as pyplot:
        num_rows = -(-(len(LOSSES) + 1) // COLUMNS)  # one more, for what the lines are
        figure, axes = pyplot.subplots(
            num_rows, COLUMNS, figsize=(11, 2.5 * num_rows), sharex=True, sharey=True, layout="constrained"
        )
        panels = list(axes.flat)
        for panel, loss in zip(panels, LOSSES, strict=False):
            panel.set_title(loss, fontsize=9, color=INK)
            for lag in LAGS:
                results = finished.of(loss, lag)
                curves = [(list(map(across, one.curve)), [point.accuracy for point in one.curve]) for one in results]
                draw_curves(panel, curves, colour=COLOURS[lag], label=f"max_lag = {lag}")
        for panel, above in zip(panels[len(LOSSES) :], panels[len(LOSSES) - COLUMNS :], strict=False):
            panel.axis("off")
            above.tick_params(labelbottom=True)
        handles, names = panels[0].get_legend_handles_labels()
        panels[-1].legend(handles, names, loc="center", frameon=False, labelcolor=INK)
        figure.supxlabel(label, color=INK, fontsize=9)
        figure.supylabel("held-out accuracy, sampled", color=INK, fontsize=9)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        pyplot.close(figure)
