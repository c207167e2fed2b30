"""A run as lanes: the learner and each engine, when they were busy, and which version an engine served. As text and as SVG.

Of many engines a sample is shown, and the share of all of them that was busy. Reads only events, of a real run or a simulated
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise

from msgspec import Struct

from millstream.events.summary import Interval, merge_intervals
from millstream.events.types import Event, GroupAdmitted, Span, Stepped, WeightsLoaded

MAX_LANES = 8  # engines that are shown; of more, a sample
LEVELS = " ▁▂▃▄▅▆▇█"
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#72b7b2", "#e45756")  # of versions, in turn
LANE_HEIGHT = 18
LABEL_WIDTH = 110


class Lane(Struct, frozen=True, kw_only=True):
    """`versions`: since when an engine served which version. Empty: of the learner."""

    name: str
    busy: list[Interval]
    versions: list[tuple[float, int]] = []


class Lanes(Struct, frozen=True, kw_only=True):
    begin: float
    end: float
    learner: Lane
    engines: list[Lane]
    steps: list[float]  # when each step ended

    @property
    def shown(self) -> list[Lane]:
        """All engines, or a sample at equal distances."""
        num = len(self.engines)
        return self.engines if num <= MAX_LANES else [self.engines[i * num // MAX_LANES] for i in range(MAX_LANES)]

    def busy_share(self, lanes: Sequence[Lane], begin: float, end: float) -> float:
        """Of this stretch of time, the mean over the lanes."""
        found = sum(_overlap(lane.busy, begin, end) for lane in lanes)
        return min(1.0, found / max(1e-9, (end - begin) * len(lanes))) if lanes else 0.0


def lanes_of(events: Iterable[Event]) -> Lanes:
    """From the first admitted group to the last step."""
    begin: float | None = None
    busy: dict[str, list[Interval]] = {}
    versions: dict[str, list[tuple[float, int]]] = {}
    steps: list[float] = []
    for event in events:
        match event:
            case GroupAdmitted() if begin is None:
                begin = event.at
            case Span() if event.what == "generate" or event.worker == "learner":
                busy.setdefault(event.worker, []).append((event.at - event.seconds, event.at))
            case WeightsLoaded():
                versions.setdefault(event.engine, []).append((event.at, event.version))
            case Stepped():
                steps.append(event.at)
    first, last = begin or 0.0, steps[-1] if steps else 0.0
    learner = Lane(name="learner", busy=merge_intervals(busy.pop("learner", [])))
    names = sorted(busy, key=lambda name: (len(name), name))
    engines = [Lane(name=name, busy=merge_intervals(busy[name]), versions=versions.get(name, [])) for name in names]
    return Lanes(begin=first, end=max(first, last), learner=learner, engines=engines, steps=steps)


def _overlap(intervals: Sequence[Interval], begin: float, end: float) -> float:
    return sum(max(0.0, min(end, b) - max(begin, a)) for a, b in intervals)


# ---- text --------------------------------------------------------------------------------------------------------------


def lanes_text(lanes: Lanes, width: int = 100) -> list[str]:
    """One line a lane; the higher a column, the larger the share of its time in which the lane was busy."""
    if lanes.end <= lanes.begin:
        return ["nothing to draw: no step has ended"]
    edges = [lanes.begin + (lanes.end - lanes.begin) * i / width for i in range(width + 1)]
    rows = [("learner", [lanes.learner]), *((lane.name, [lane]) for lane in lanes.shown)]
    if len(lanes.engines) > len(lanes.shown):
        rows.append((f"all {len(lanes.engines)} engines", lanes.engines))
    label = max(len(name) for name, _ in rows)
    lines = []
    for name, some in rows:
        shares = [lanes.busy_share(some, a, b) for a, b in pairwise(edges)]
        drawn = "".join(LEVELS[round(share * (len(LEVELS) - 1))] for share in shares)
        lines.append(f"{name:{label}} |{drawn}| {sum(shares) / width:4.0%} busy")
    marks = {min(width - 1, int((at - lanes.begin) / (lanes.end - lanes.begin) * width)) for at in lanes.steps}
    lines.append(f"{'steps':{label}} |{''.join('^' if i in marks else ' ' for i in range(width))}|")
    lines.append(f"{'':{label}}  {lanes.begin:<.0f} s{f'{lanes.end:.0f} s':>{width - len(f'{lanes.begin:.0f} s')}}")
    return lines


# ---- SVG ---------------------------------------------------------------------------------------------------------------


def lanes_svg(lanes: Lanes, width: int = 1000) -> str:
    """A rectangle for each stretch of work; the color of an engine's is its version."""
    span = max(lanes.end - lanes.begin, 1e-9)
    rows = [lanes.learner, *lanes.shown]
    has_all = len(lanes.engines) > len(lanes.shown)
    height = LANE_HEIGHT * (len(rows) + has_all + 1) + 8

    def x(at: float) -> float:
        return LABEL_WIDTH + width * min(1.0, max(0.0, (at - lanes.begin) / span))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL_WIDTH + width + 10}" height="{height}" '
        'font-family="sans-serif" font-size="11">'
    ]
    for number, lane in enumerate(rows):
        top = LANE_HEIGHT * number
        parts.append(f'<text x="4" y="{top + 13}">{escape(lane.name)}</text>')
        for begin, end, version in _pieces(lane):
            color = "#888888" if version is None else COLORS[version % len(COLORS)]
            title = lane.name if version is None else f"{lane.name}, version {version}"
            parts.append(
                f'<rect x="{x(begin):.2f}" y="{top + 2}" width="{max(0.2, x(end) - x(begin)):.2f}" height="{LANE_HEIGHT - 4}" '
                f'fill="{color}"><title>{escape(title)}: {begin:.2f} to {end:.2f} s</title></rect>'
            )
    if has_all:
        parts += _all_engines(lanes, LANE_HEIGHT * len(rows), width)
    bottom = height - LANE_HEIGHT
    parts += [
        f'<line x1="{x(at):.2f}" x2="{x(at):.2f}" y1="0" y2="{bottom}" stroke="#000000" stroke-width="0.3"/>'
        for at in lanes.steps
    ]
    parts.append(f'<text x="{LABEL_WIDTH}" y="{height - 4}">{lanes.begin:.0f} s</text>')
    parts.append(f'<text x="{LABEL_WIDTH + width}" y="{height - 4}" text-anchor="end">{lanes.end:.0f} s</text>')
    return "\n".join([*parts, "</svg>\n"])


def _pieces(lane: Lane) -> list[tuple[float, float, int | None]]:
    """Stretches of work, cut where the version changes."""
    if lane.name == "learner":
        return [(begin, end, None) for begin, end in lane.busy]
    cuts, found = [(float("-inf"), 0), *lane.versions, (float("inf"), 0)], list[tuple[float, float, int | None]]()
    for (since, version), (until, _) in pairwise(cuts):
        for begin, end in lane.busy:
            if max(begin, since) < min(end, until):
                found.append((max(begin, since), min(end, until), version))
    return found


def _all_engines(lanes: Lanes, top: int, width: int, columns: int = 200) -> list[str]:
    """The share of all engines that is busy, as a column for each stretch of time."""
    parts, step = (
        [f'<text x="4" y="{top + 13}">{len(lanes.engines)} engines</text>'],
        (lanes.end - lanes.begin) / columns,
    )
    for number in range(columns):
        share = lanes.busy_share(lanes.engines, lanes.begin + number * step, lanes.begin + (number + 1) * step)
        high = share * (LANE_HEIGHT - 4)
        parts.append(
            f'<rect x="{LABEL_WIDTH + width * number / columns:.2f}" y="{top + LANE_HEIGHT - 2 - high:.2f}" '
            f'width="{width / columns:.2f}" height="{high:.2f}" fill="#4c78a8"/>'
        )
    return parts
