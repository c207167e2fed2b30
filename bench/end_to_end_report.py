"""What the cells of `bench/end_to_end.py` say together: the table, the rows, the timeline.

Beside every measured ratio is the one that the step model gives with the costs that were measured on the same machine, for the
lengths of the rollouts of these very cells and the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from end_to_end_cells import MODES, Failed, Result
from end_to_end_costs import MeasuredCosts
from end_to_end_loads import Workload
from report import Row, alone, not_measured, rate
from step_model import Costs, Load, StepEnd, simulate


class PeerResult(Struct, frozen=True, kw_only=True, tag="peer"):
    """A run of another trainer on one of the loads (`bench/end_to_end_trl.py`)."""

    peer: str
    workload: str
    settings: dict[str, str]
    device: str
    step_ends: list[float]
    rollouts_per_step: int
    tokens: list[int]
    """Sampled in each step."""
    memory_gib: float
    failure: str = ""
    cycle: int = 1
    """Steps for each generation."""

    @property
    def key(self) -> tuple[str, str, dict[str, str]]:
        return self.peer, self.workload, self.settings

    @property
    def step_s(self) -> float:
        steps_s = np.diff([0.0, *self.step_ends])[self._counted]
        return float(np.mean(steps_s)) if len(steps_s) else math.inf

    @property
    def _counted(self) -> slice:
        """The steps of whole generations, without the first one where there is another."""
        whole = len(self.step_ends) // self.cycle * self.cycle
        return slice(self.cycle if whole > self.cycle else 0, whole or None)

    @property
    def rollouts_per_s(self) -> float:
        return self.rollouts_per_step / self.step_s

    @property
    def tokens_per_s(self) -> float:
        """Sampled, over the same steps."""
        return float(np.mean(self.tokens[self._counted])) / self.step_s


Record = Result | MeasuredCosts | PeerResult | Failed
CellKey = tuple[str, str]
CostsKey = tuple[str, float]
"""A shape, and the share of the GPU that the learner has."""
"""Workload and mode."""


def append_record(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(msgspec.json.encode(record) + b"\n")


class Measured(Struct, kw_only=True):
    """Everything in a file of results; of a cell, and of a peer with the same settings, the last: it adds a record a step."""

    cells: dict[CellKey, Result]
    failed: dict[CellKey, str]
    costs: dict[CostsKey, MeasuredCosts]
    peers: list[PeerResult]


def read_records(path: Path) -> Measured:
    found = Measured(cells={}, failed={}, costs={}, peers=[])
    decoder = msgspec.json.Decoder(Record)
    for line in path.read_bytes().splitlines() if path.exists() else ():
        match decoder.decode(line):
            case Result() as result:
                found.cells[result.workload, result.mode] = result
                found.failed.pop((result.workload, result.mode), None)
            case MeasuredCosts() as costs:
                found.costs[costs.shape, costs.gpu_share] = costs
            case PeerResult() as peer:
                found.peers = [*(one for one in found.peers if one.key != peer.key), peer]
            case Failed() as failed:
                found.failed[failed.workload, failed.mode] = failed.why
    return found


# ---- the step model of a cell -------------------------------------------------------------------------------------------


class Modelled(Struct, frozen=True, kw_only=True):
    step_s: float
    engine_s: float
    """Of decoding alone, for these steps."""
    learner_s: float


def modelled(result: Result, workload: Workload, costs: Costs | None, measured: range) -> Modelled | None:
    """What the step model says of these steps of a cell; None where it does not describe it, or without costs."""
    if costs is None or not workload.has_model or MODES[result.mode].is_auto:
        return None
    mode, steps = MODES[result.mode], measured[-1] + 1
    ends: list[StepEnd] = simulate(
        load_of(result, workload, math.ceil((steps + mode.max_lag + 1) * workload.groups_per_step)),
        costs,
        max_lag=mode.max_lag,
        is_barrier=mode.is_barrier,
        slots=result.slots,
        steps=steps,
    )
    begin, end = ends[measured[0] - 1], ends[-1]
    return Modelled(
        step_s=(end.at - begin.at) / len(measured),
        engine_s=end.engine_s - begin.engine_s,
        learner_s=end.learner_s - begin.learner_s,
    )


def load_of(result: Result, workload: Workload, num_groups: int) -> Load:
    """The lengths that the cell had. Members that had not ended when it did get those of other groups."""
    rng, members = np.random.default_rng(0), workload.group_size
    known = np.array([length for group in result.lengths if len(group) >= members for length in group])
    lengths_GM = rng.choice(known, (num_groups, members)).astype(np.int64)
    prompts_G = rng.choice(np.array(result.prompts), num_groups).astype(np.int64)
    for number, group in enumerate(result.lengths[:num_groups]):
        lengths_GM[number, : len(group)] = group[:members]
        prompts_G[number] = result.prompts[number]
    return Load(lengths_GM=lengths_GM, prompts_G=prompts_G, groups_per_step=workload.groups_per_step)


# ---- table and rows -----------------------------------------------------------------------------------------------------


class Line(Struct, frozen=True, kw_only=True):
    """A measured cell with what it is compared to."""

    result: Result
    model: Modelled | None
    ratios: dict[str, tuple[float, float | None]]
    """Rollouts/s over those of another mode, in the steps that both measured: as measured, and by the step model."""

    @property
    def alone_over_wall(self) -> float | None:
        return None if self.model is None else (self.model.engine_s + self.model.learner_s) / self.result.wall_s


BASES = ("barrier", "0")


def lines_of(found: Measured, workloads: dict[str, Workload]) -> list[Line]:
    def model_of(result: Result, measured: range) -> Modelled | None:
        workload = workloads[result.workload]
        known = found.costs.get((workload.shape, result.gpu_share))
        return modelled(result, workload, None if known is None else known.costs, measured)

    lines = []
    for (name, mode), result in found.cells.items():
        ratios: dict[str, tuple[float, float | None]] = {}
        for base in BASES:
            other = found.cells.get((name, base))
            if base == mode or other is None or not (steps := in_both(result, other)):
                continue
            mine, theirs = model_of(result, steps), model_of(other, steps)
            expected = None if mine is None or theirs is None else theirs.step_s / mine.step_s
            ratios[base] = result.rollouts_per_s_of(steps) / other.rollouts_per_s_of(steps), expected
        lines.append(Line(result=result, model=model_of(result, result.measured_steps), ratios=ratios))
    return lines


def in_both(one: Result, other: Result) -> range:
    """The steps that both cells measured."""
    first, second = one.measured_steps, other.measured_steps
    return range(max(first.start, second.start), min(first.stop, second.stop))


HEAD = (
    "load, mode",
    "steps",
    "s a step",
    "median, p95",
    "model",
    "rollouts/s",
    "tokens/s generated, trained",
    "tail, ms a token",
    "engine, learner busy",
    "(engine + learner alone) / wall",
    "lag mean, max",
    "GiB",
    "preempted",
    "vs barrier: measured, model, share",
    "vs max_lag 0: measured, model, share",
)


def table(found: Measured, workloads: dict[str, Workload], wanted: Sequence[CellKey]) -> Iterator[str]:
    """Markdown, in the order of the wanted cells. Those that were not measured say so."""
    for costs in found.costs.values():
        yield from _cost_lines(costs)
    yield ""
    yield "| " + " | ".join(HEAD) + " |"
    yield "|---" * len(HEAD) + "|"
    lines = {(line.result.workload, line.result.mode): line for line in lines_of(found, workloads)}
    for key in wanted:
        label = f"{key[0]}, {_label(key[1])}"
        if key in lines:
            yield "| " + " | ".join([label, *_columns(lines[key])]) + " |"
        else:
            why = found.failed.get(key, "")
            yield f"| {label} | not measured{': ' + why if why else ''} " + "| " * (len(HEAD) - 2) + "|"
    for peer in found.peers:
        yield _peer_line(peer)


def _label(mode: str) -> str:
    labels = {"barrier": "barrier", "auto": "auto_lag, at most 4", "redundant": "max_lag 2, redundant"}
    return labels.get(mode, f"max_lag {mode}")


def _columns(line: Line) -> list[str]:
    result = line.result
    steps_s = result.steps_s
    p95 = float(np.percentile(steps_s, 95))
    share = line.alone_over_wall
    return [
        f"{result.warm_steps + 1} to {len(result.step_ends)}",
        f"{result.step_s:.2f}",
        f"{np.median(steps_s):.2f}, {p95:.2f}",
        "" if line.model is None else f"{line.model.step_s:.2f} s",
        f"{result.rollouts_per_s:.1f}",
        f"{result.tokens_per_s:,.0f}, {result.trained_tokens_per_s:,.0f}",
        "" if result.tail_ms_per_token is None else f"{result.tail_ms_per_token:.2f}",
        f"{result.engine_share:.0%}, {result.learner_share:.0%}",
        "" if share is None else f"{share:.2f}",
        f"{result.lag_mean:.2f}, {result.lag_max}",
        f"{result.memory_gib:.1f}",
        f"{result.preempted}",
        *(_ratio(line.ratios.get(base)) for base in BASES),
    ]


def _ratio(ratio: tuple[float, float | None] | None) -> str:
    if ratio is None:
        return ""
    measured, expected = ratio
    return f"{measured:.2f}x" if expected is None else f"{measured:.2f}x, {expected:.2f}x, {measured / expected:.2f}"


def _cost_lines(measured: MeasuredCosts) -> Iterator[str]:
    costs = measured.costs
    yield (
        f"Costs of {measured.shape} on {measured.device}, the learner on {measured.gpu_share:.0%} of it: a decode step takes "
        f"{1e3 * costs.floor_s:.2f} ms and {1e9 * costs.slope_s:.1f} ns for each token of context, {costs.slow:.2f}x as long "
        f"beside the learner; the learner trains {costs.rate:,.0f} tokens/s, and keeps {costs.keep:.2f} of it beside decoding."
    )
    for point in measured.points:
        beside = ""
        if point.beside_s is not None:
            beside = f", {1e3 * point.beside_s:.2f} ms beside the learner ({point.slow:.2f}x)"
        if point.kept is not None:
            beside += f", which keeps {point.kept:.2f} of its rate"
        yield f"- {point.rows} rows of {point.context} tokens: {1e3 * point.step_s:.2f} ms{beside}"


def shown_settings(peer: PeerResult) -> str:
    return ", ".join(f"{name} = {value}" for name, value in peer.settings.items())


def _peer_line(peer: PeerResult) -> str:
    if peer.failure:
        figures = [f"not measured: {peer.failure}", *[""] * (len(HEAD) - 2)]
    else:
        figures = [
            f"{len(peer.step_ends)}",
            f"{peer.step_s:.2f}",
            "",
            "",
            f"{peer.rollouts_per_s:.1f}",
            f"{peer.tokens_per_s:,.0f}",
            *[""] * 4,
            f"{peer.memory_gib:.1f}",
            *[""] * 3,
        ]
    return "| " + " | ".join([f"{peer.workload}, {peer.peer} ({shown_settings(peer)})", *figures]) + " |"


def rows_of(found: Measured, workloads: dict[str, Workload], wanted: Sequence[CellKey]) -> list[Row]:
    """In the format that all benchmarks share."""
    rows: list[Row] = []
    for line in lines_of(found, workloads):
        rows += _cell_rows(line, found)
    for (name, share), measured in found.costs.items():
        costs = measured.costs
        shape = name if share == 1 else f"{name}, the learner on {share:.0%}"
        rows += [
            alone(shape, "decode step: floor, ms", 1e3 * costs.floor_s),
            alone(shape, "decode step: ns a token of context", 1e9 * costs.slope_s),
            alone(shape, "decode step beside the learner, times", costs.slow),
            alone(shape, "learner alone, tokens/s", costs.rate, digits=0),
            alone(shape, "learner beside decoding, share of its speed", costs.keep),
        ]
        rows += [
            alone(f"{shape}, {point.rows} rows", "ms a token beside the learner, times that without", point.slow)
            for point in measured.points
            if point.beside_s is not None
        ]
    for peer in found.peers:
        workload = f"{peer.workload}, {peer.peer} ({shown_settings(peer)})"
        if peer.failure:
            rows.append(not_measured(workload, peer.failure))
        else:
            rows.append(alone(workload, "rollouts/s", peer.rollouts_per_s))
            rows.append(alone(workload, "tokens/s generated", peer.tokens_per_s, digits=0))
    missing = [key for key in wanted if key not in found.cells]
    return rows + [not_measured(f"{key[0]}, {_label(key[1])}", found.failed.get(key, "no run yet")) for key in missing]


def _shown(steps: range) -> str:
    return f"steps {steps.start + 1} to {steps.stop}"


def _cell_rows(line: Line, found: Measured) -> Iterator[Row]:
    result = line.result
    workload = f"{result.workload}, {_label(result.mode)}"
    peers = [peer for peer in found.peers if peer.workload == result.workload and not peer.failure]
    for base, (measured, expected) in line.ratios.items():
        other = found.cells[result.workload, base]
        steps = in_both(result, other)
        both = [one.rollouts_per_s_of(steps) for one in (result, other)]
        yield rate(workload, f"rollouts/s, {_shown(steps)}", both[0], _label(base), both[1])
        if expected is not None:
            yield rate(workload, f"gain over {_label(base)}", measured, "the step model", expected)
    if peers:
        best = max(peers, key=lambda peer: peer.rollouts_per_s)
        yield rate(workload, "rollouts/s", result.rollouts_per_s, "TRL, its best settings", best.rollouts_per_s)
        yield rate(workload, "tokens/s generated", result.tokens_per_s, "TRL, its best settings", best.tokens_per_s)
    yield alone(workload, f"rollouts/s, {_shown(result.measured_steps)}", result.rollouts_per_s)
    yield alone(workload, "tokens/s generated", result.tokens_per_s, digits=0)
    yield alone(workload, "tokens/s trained", result.trained_tokens_per_s, digits=0)
    steps_s = result.steps_s
    yield alone(workload, "s a step, mean", result.step_s)
    yield alone(workload, "s a step, median", float(np.median(steps_s)))
    yield alone(workload, "s a step, p95", float(np.percentile(steps_s, 95)))
    if line.model is not None:
        yield rate(workload, "steps/s", 1 / result.step_s, "the step model", 1 / line.model.step_s)
        yield alone(workload, "(engine alone + learner alone) / wall", line.alone_over_wall or 0.0)
    if result.tail_ms_per_token is not None:
        yield alone(workload, "ms a token of the slowest percentile", result.tail_ms_per_token)
    yield alone(workload, "engine busy", result.engine_share)
    yield alone(workload, "learner busy", result.learner_share)
    yield alone(workload, "lag, mean", result.lag_mean)
    yield alone(workload, "lag, maximum", result.lag_max)
    yield alone(workload, "peak GiB", result.memory_gib)
    yield alone(workload, "preempted requests", result.preempted)


# ---- the timeline -------------------------------------------------------------------------------------------------------

WIDTH, LEFT, PANEL, BAR, GAP = 960.0, 110.0, 130.0, 16.0, 64.0
INK, ENGINE, LEARNER = "#848d97", "#2f8fd8", "#e0722b"
RESOLUTION_S = 0.05


def draw_timeline(results: Sequence[Result], path: Path) -> None:
    """A panel a cell, on one scale of time: how many rollouts are generated, and when the learner works; a line at the end of
    every step. Words and lines can be read on white and on black."""
    seconds = max(max([*result.timeline.steps, RESOLUTION_S]) for result in results)
    most = max(max(_running(result, seconds)) for result in results)
    height = len(results) * (PANEL + BAR + GAP) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" font-family="sans-serif" '
        f'font-size="12" fill="{INK}">',
        "<title>Rollouts that are generated, and the learner's work, over time</title>",
    ]
    for number, result in enumerate(results):
        parts += _panel(result, number * (PANEL + BAR + GAP) + 24, seconds, max(1, most))
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _running(result: Result, seconds: float) -> list[int]:
    """Rollouts in generation, at every moment of the resolution."""
    times = np.arange(0.0, seconds + RESOLUTION_S, RESOLUTION_S)
    counts = np.zeros(len(times), np.int64)
    for begin, end in result.timeline.rollouts:
        counts[(times >= begin) & (times < end)] += 1
    return [int(count) for count in counts]


def _panel(result: Result, top: float, seconds: float, most: int) -> Iterator[str]:
    scale = (WIDTH - LEFT - 10) / seconds
    bottom, shown_s = top + PANEL, max([*result.timeline.steps, RESOLUTION_S])

    def x(at: float) -> str:
        return f"{LEFT + scale * at:.1f}"

    title = f"{result.workload}, {_label(result.mode)}: {result.step_s:.2f} s a step"
    yield f'<text x="{LEFT:g}" y="{top - 8:g}">{title}</text>'
    yield f'<text x="4" y="{top + PANEL / 2:g}">rollouts running</text><text x="4" y="{bottom + BAR:g}">learner</text>'
    yield f'<text x="{LEFT - 6:g}" y="{top + 10:g}" text-anchor="end">{most}</text>'
    counts = _running(result, shown_s)
    points = " ".join(f"{x(n * RESOLUTION_S)},{bottom - PANEL * count / most:.1f}" for n, count in enumerate(counts))
    last = x((len(counts) - 1) * RESOLUTION_S)
    yield f'<polygon fill="{ENGINE}" points="{x(0)},{bottom:g} {points} {last},{bottom:g}"/>'
    for begin, end in result.timeline.learner:
        width = scale * (min(end, shown_s) - begin)
        if width > 0:
            yield f'<rect fill="{LEARNER}" x="{x(begin)}" y="{bottom + 4:g}" width="{width:.1f}" height="{BAR:g}"/>'
    for at in result.timeline.steps:
        yield f'<line stroke="{INK}" x1="{x(at)}" x2="{x(at)}" y1="{top:g}" y2="{bottom + BAR + 4:g}"/>'
    for mark in range(0, math.floor(seconds) + 1, max(1, math.ceil(seconds / 10))):
        yield f'<text x="{x(mark)}" y="{bottom + BAR + 20:g}" text-anchor="middle">{mark} s</text>'
