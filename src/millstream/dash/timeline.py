"""A run as lanes: who worked when, and for what. Of a window with few events every piece of work, and the waits between two; of
others, the share of each point of time, from tiles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from millstream.dash.api import EvaluationSpan, LaneKind, LaneRow, LanesAnswer, LaneSpan, VersionMark, WorkKind
from millstream.dash.flow import MAX_EXACT_TILES, Floats64, StateReadings, read_states, spread_over, window
from millstream.dash.tiles import RunTiles
from millstream.events import (
    CheckpointSealed,
    Evaluated,
    EvaluationStarted,
    GroupScored,
    RunEnded,
    Span,
    WeightsLoaded,
    WeightsPublished,
)
from millstream.events.index import DRIVER, RANK_LANE, REWARDS
from millstream.events.metrics import LEARNING

MAX_LANES_SHOWN = 64
MAX_RANKS_SHOWN = 8
ALL_ENGINES = "all engines"
FLAT = 0.02  # shares that differ by less are drawn as one
SEVERAL = ", several"  # in labels of pieces that were joined
LEAST = 0.002  # share that is drawn
ELSEWHERE = (
    "an engine",
    "the other rollouts of the step",
    "room in the store",
)  # where a rollout may be but in environments
# from top to bottom
KINDS: tuple[LaneKind, ...] = ("learner", "rank", "engine", "worker", "environment", "stage", "evaluation", "driver")
EVALUATIONS = "evaluations"


class _Piece(NamedTuple):
    begin: float
    end: float
    what: WorkKind
    busy: float
    num_tokens: int
    label: str


def lanes_answer(tiles: RunTiles, begin: float | None, end: float | None, num_points: int) -> LanesAnswer:
    begin, end = window(tiles, begin, end)
    found = tiles.tiles_between(begin, end)
    is_exact = len(found) <= MAX_EXACT_TILES
    lanes = _exact(tiles, found, begin, end, num_points) if is_exact else _shares(tiles, begin, end, num_points)
    states = read_states(tiles, begin, end)
    if is_exact:
        lanes |= _with_waits(lanes, tiles, states, begin, end, num_points)
    lanes |= _of_rollouts(states, begin, end, num_points)
    evaluations = list(evaluations_between(tiles, begin, end))
    if evaluations:
        lanes[EVALUATIONS] = [_evaluation_piece(one, begin, end) for one in evaluations]
    kinds = {name: _lane_kind(name, tiles) for name in lanes}
    names = sorted(lanes, key=lambda name: (KINDS.index(kinds[name]), len(name), name))
    ranks = [name for name in names if kinds[name] == "rank"][MAX_RANKS_SHOWN:]
    names = [name for name in names if name not in ranks]
    if len(names) > MAX_LANES_SHOWN:
        engines = [name for name in names if kinds[name] == "engine"]
        lanes[ALL_ENGINES] = _all_engines(tiles, engines, begin, end, num_points)
        kinds[ALL_ENGINES] = "engine"
        names.insert(names.index(engines[0]) if engines else 0, ALL_ENGINES)
    return LanesAnswer(
        begin=begin,
        end=end,
        first=tiles.first,
        last=tiles.last,
        is_exact=is_exact and not any(SEVERAL in one.label for pieces in lanes.values() for one in pieces),
        lanes=[_lane(name, kinds[name], lanes[name], begin, end) for name in names[:MAX_LANES_SHOWN]],
        num_left_out=max(0, len(names) - MAX_LANES_SHOWN) + len(ranks),
        versions=_versions(tiles, begin, end, num_points),
        evaluations=evaluations,
    )


def _lane(name: str, kind: LaneKind, pieces: list[_Piece], begin: float, end: float) -> LaneRow:
    busy = sum(one.busy for one in pieces if one.what != "wait")
    spans = [
        LaneSpan(one.begin, one.end, one.what, _share(one), one.num_tokens, one.label)
        for one in sorted(pieces, key=lambda one: one.begin)
    ]
    return LaneRow(name=name, kind=kind, idle_share=max(0.0, 1.0 - busy / (end - begin)), spans=spans)


def _share(piece: _Piece) -> float:
    return round(min(1.0, piece.busy / max(1e-9, piece.end - piece.begin)), 4)


def _lane_kind(name: str, tiles: RunTiles) -> LaneKind:
    if name == "learner":
        return "learner"
    if name.startswith(RANK_LANE):
        return "rank"
    if name == DRIVER:
        return "driver"
    if name == "rollouts":
        return "worker"
    if name == EVALUATIONS:
        return "evaluation"
    if name == REWARDS or ("rollouts", name) in tiles.waits:
        return "environment"
    return "stage" if {(name, "score"), (name, "step")} & tiles.work.keys() else "engine"


def work_kind(worker: str, what: str) -> WorkKind:
    if what == "generate":
        return "generate"
    if what in ("load weights", "publish weights", "copy weights"):
        return "sync"
    if worker == REWARDS:
        return "environment"
    if what == "score":
        return "score"
    return "train" if what in LEARNING else "other"


# ---- every piece of work -------------------------------------------------------------------------------------------------


def _exact(
    tiles: RunTiles, numbers: Iterable[int], begin: float, end: float, num_points: int
) -> dict[str, list[_Piece]]:
    found: dict[str, list[_Piece]] = {}
    kinds = (Span, WeightsLoaded, WeightsPublished, GroupScored, CheckpointSealed)
    for event in tiles.events(map(int, numbers), *kinds):
        if not isinstance(event, kinds) or event.at < begin or event.at - event.seconds > end:
            continue
        worker, what, label, num_tokens = _named(event)
        began = event.at - event.seconds
        work = [(worker, event.at, num_tokens)]
        if isinstance(event, Span) and event.rank_seconds:
            work += [(f"{RANK_LANE}{rank}", began + seconds, 0) for rank, seconds in enumerate(event.rank_seconds)]
        for name, ended, tokens in work:
            since, until = max(begin, began), min(end, ended)
            if until >= since:
                piece = _Piece(since, until, work_kind(name, what), until - since, tokens, label)
                found.setdefault(name, []).append(piece)
    point = (end - begin) / num_points
    return {name: _joined(pieces, point) for name, pieces in found.items()}


def _named(
    event: Span | WeightsLoaded | WeightsPublished | GroupScored | CheckpointSealed,
) -> tuple[str, str, str, int]:
    """The lane, the work, how it is called, and its tokens."""
    match event:
        case Span():
            return event.worker, event.what, event.what.replace("_", " "), event.num_tokens
        case WeightsLoaded():
            return event.engine, "load weights", f"load version {event.version}", 0
        case WeightsPublished():
            return DRIVER, "publish weights", f"publish version {event.version}", 0
        case GroupScored():
            return REWARDS, "score", f"rewards of group {event.group_id}", 0
    return DRIVER, "checkpoint", f"checkpoint of step {event.version}", 0


def _joined(pieces: list[_Piece], point: float) -> list[_Piece]:
    """Neighbours of one kind that are shorter than a point become one piece."""
    found: list[_Piece] = []
    open_: dict[str, int] = {}
    for piece in sorted(pieces, key=lambda one: one.begin):
        place = open_.get(piece.what)
        last = None if place is None else found[place]
        if last is not None and place is not None and max(last.end, piece.end) - last.begin < point:
            label = piece.what + SEVERAL
            busy, num_tokens = last.busy + piece.busy, last.num_tokens + piece.num_tokens
            found[place] = _Piece(last.begin, max(last.end, piece.end), piece.what, busy, num_tokens, label)
        else:
            open_[piece.what] = len(found)
            found.append(piece)
    return found


def _with_waits(
    lanes: dict[str, list[_Piece]],
    tiles: RunTiles,
    states: StateReadings,
    begin: float,
    end: float,
    num_points: int,
) -> dict[str, list[_Piece]]:
    """The lanes of engines, stages and the learner, with the waits between their pieces that are longer than a point."""
    found: dict[str, list[_Piece]] = {}
    for name, (first, last) in _lives(tiles).items():
        kind, pieces = _lane_kind(name, tiles), lanes.get(name, [])
        if kind not in ("learner", "rank", "engine", "stage") or first > end or last < begin:
            continue
        gaps = _gaps(pieces, max(begin, first), min(end, last), (end - begin) / num_points)
        waits = [_Piece(a, b, "wait", b - a, 0, _why(name, kind, states, a, b)) for a, b in gaps]
        found[name] = [*pieces, *waits]
    return found


def _lives(tiles: RunTiles) -> dict[str, tuple[float, float]]:
    """By worker: when its first piece of work began, and when its last one ended."""
    found: dict[str, tuple[float, float]] = {}
    for (worker, _), columns in tiles.work.items():
        first, last = found.get(worker, (math.inf, -math.inf))
        found[worker] = (
            min(first, float(columns.of("begin").min(initial=math.inf))),
            max(last, float(columns.of("end").max(initial=-math.inf))),
        )
    return found


def _gaps(pieces: Iterable[_Piece], begin: float, end: float, shortest: float) -> Iterator[tuple[float, float]]:
    for piece in sorted(pieces, key=lambda one: one.begin):
        if piece.begin - begin > shortest:
            yield begin, piece.begin
        begin = max(begin, piece.end)
    if end - begin > shortest:
        yield begin, end


def _why(name: str, kind: LaneKind, states: StateReadings, begin: float, end: float) -> str:
    """By a reading within this time: what was waited for. An engine has nothing to do while no group may start."""
    low, high = np.searchsorted(states.times, (begin, end))
    if low == high:
        return "wait"
    owners = {"learner": ("train",), "rank": ("train",), "engine": ("feed",)}.get(kind, (name, f"stage {name}"))
    seen = {what: own.counts[low:high].sum() for (owner, what), own in states.waits.items() if owner in owners}
    what = max(seen, key=lambda one: seen[one], default="")
    if not what or not seen[what]:
        return "wait"
    if what.startswith("the learner to"):  # it works: this rank has ended
        return "waits for the other ranks"
    return f"no requests: new groups wait for {what}" if kind == "engine" else f"waits for {what}"


# ---- shares of points ----------------------------------------------------------------------------------------------------


def _shares(tiles: RunTiles, begin: float, end: float, num_points: int) -> dict[str, list[_Piece]]:
    edges = np.linspace(begin, end, num_points + 1)
    sums: dict[tuple[str, WorkKind], list[Floats64]] = {}
    for (worker, what), columns in tiles.work.items():
        since, until = columns.of("begin"), columns.of("end")
        inside = (until >= begin) & (since <= end)
        if inside.any():
            values = np.stack([columns.of("busy"), columns.of("num_tokens").astype(float)])[:, inside]
            spread = spread_over(edges, since[inside], until[inside], values)
            sums.setdefault((worker, work_kind(worker, what)), []).append(spread)
    found: dict[str, list[_Piece]] = {}
    for (worker, kind), parts in sums.items():
        busy, num_tokens = np.sum(parts, axis=0)
        found.setdefault(worker, []).extend(_pieces(edges, busy, num_tokens, kind))
    return found


def _all_engines(tiles: RunTiles, engines: list[str], begin: float, end: float, num_points: int) -> list[_Piece]:
    """The mean of all engines, where there are more lanes than are shown."""
    edges, own = np.linspace(begin, end, num_points + 1), [tiles.work.get((name, "generate")) for name in engines]
    columns = [one for one in own if one is not None]
    if not columns:
        return []
    since, until, busy, tokens = (
        np.concatenate([one.of(name) for one in columns]).astype(np.float64)
        for name in ("begin", "end", "busy", "num_tokens")
    )
    shares, num_tokens = spread_over(edges, since, until, np.stack([busy, tokens]))
    return list(_pieces(edges, shares / len(engines), num_tokens, "generate"))


def _pieces(edges: Floats64, busy: Floats64, num_tokens: Floats64, kind: WorkKind) -> Iterator[_Piece]:
    """Points whose shares differ little are one piece."""
    length = float(edges[1] - edges[0])
    shares = busy / length
    begin = 0
    for point in range(1, len(shares) + 1):
        if point < len(shares) and abs(shares[point] - shares[begin]) < FLAT:
            continue
        if shares[begin] > LEAST:
            total, tokens = float(busy[begin:point].sum()), int(num_tokens[begin:point].sum())
            yield _Piece(float(edges[begin]), float(edges[point]), kind, total, tokens, str(kind))
        begin = point


# ---- rollouts and environments -------------------------------------------------------------------------------------------


def _of_rollouts(states: StateReadings, begin: float, end: float, num_points: int) -> dict[str, list[_Piece]]:
    """How many rollouts were in flight, and how many in environments and rewards, as shares of the most that were at once."""
    edges = np.linspace(begin, end, num_points + 1)
    found = dict[str, list[_Piece]]()
    for name in ("rollouts", *(what for owner, what in states.waits if owner == "rollouts" and what not in ELSEWHERE)):
        keys = [key for key in states.waits if key[0] == "rollouts" and name in ("rollouts", key[1])]
        counts = sum((states.waits[key].counts for key in keys), np.zeros(len(states.times)))
        if (most := float(counts.max(initial=0.0))) > 0:
            shares = np.nan_to_num(states.at_points(edges, counts)) / most
            kind: WorkKind = "generate" if name == "rollouts" else "environment"
            pieces = _pieces(edges, shares * (edges[1] - edges[0]), np.zeros(num_points), kind)
            found[name] = [one._replace(label=f"{_share(one) * most:.0f} of {most:.0f}") for one in pieces]
    return found


# ---- marks ---------------------------------------------------------------------------------------------------------------


def _versions(tiles: RunTiles, begin: float, end: float, num_points: int) -> list[VersionMark]:
    at, version = tiles.steps.of("at"), tiles.steps.of("version")
    inside = np.flatnonzero((at >= begin) & (at <= end))
    some = inside[:: max(1, -(-len(inside) // num_points))]
    return [VersionMark(float(at[i]), int(version[i])) for i in some]


def _evaluation_piece(one: EvaluationSpan, begin: float, end: float) -> _Piece:
    since, until = max(begin, one.begin), min(end, one.end)
    label = one.name + (f", on {', '.join(one.engines)}" if one.engines else "")
    return _Piece(since, until, "evaluate", until - since, 0, label)


def evaluations_between(tiles: RunTiles, begin: float, end: float) -> Iterator[EvaluationSpan]:
    """Also one that did not end."""
    begun: dict[str, EvaluationStarted] = {}
    for event in tiles.marked(EvaluationStarted, Evaluated, RunEnded):
        if isinstance(event, EvaluationStarted):
            begun.setdefault(event.name, event)
            continue
        for name in [event.name] if isinstance(event, Evaluated) else list(begun):
            if (start := begun.pop(name, None)) is not None and start.at <= end and event.at >= begin:
                yield EvaluationSpan(begin=start.at, end=event.at, name=name, engines=list(start.engines))
    for start in begun.values():
        if start.at <= end:
            yield EvaluationSpan(begin=start.at, end=tiles.last, name=start.name, engines=list(start.engines))
