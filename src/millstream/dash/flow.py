"""The flow of groups and rows through a run: what was admitted and what became of it, queue depths, and who waits for what."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millstream.dash.api import FlowAnswer, FlowCounts, FlowDepths, VersionRows, WaitRow
from millstream.dash.tiles import RunTiles
from millstream.events import (
    Event,
    GroupAdmitted,
    GroupLeft,
    GroupRestarted,
    GroupTaken,
    LagMoved,
    RolloutAborted,
    RolloutEnded,
    RolloutFailed,
    RolloutStarted,
    RunStarted,
    Status,
)
from millstream.events.index import COUNTED, DEPTHS

MAX_EXACT_TILES = 20  # of a window whose events are read
MAX_ROW_TILES = 100  # that are searched for rows which no batch has taken
MAX_WAITS = 30
COUNTS = tuple(FlowCounts.__struct_fields__)

Floats64 = NDArray[np.float64]
Key = tuple[str, str]


def window(tiles: RunTiles, begin: float | None, end: float | None) -> tuple[float, float]:
    """Within the run; never empty."""
    first, last = tiles.first, tiles.last
    begin = first if begin is None else min(max(begin, first), last)
    end = last if end is None else max(min(end, last), first)
    return (begin, end) if end > begin else (begin, begin + max(1e-6, min(1.0, last - first)))


# ---- readings of the state -----------------------------------------------------------------------------------------------


class WaitReadings(NamedTuple):
    """Per reading: how many waited for it, and how long the longest had."""

    counts: Floats64
    seconds: Floats64


class StateReadings(NamedTuple):
    """Of a window, in the order of time: every reading, or the means of tiles."""

    times: Floats64
    weights: Floats64  # the number of readings that each stands for
    depths: dict[str, Floats64]
    waits: dict[Key, WaitReadings]

    def at_points(self, edges: Floats64, values: Floats64) -> Floats64:
        """The mean of each point; of one without a reading, the reading before it. NaN before the first."""
        if not len(self.times):
            return np.full(len(edges) - 1, np.nan)
        place = np.searchsorted(edges, self.times, side="right") - 1
        place[self.times == edges[-1]] = len(edges) - 2
        inside = (place >= 0) & (place < len(edges) - 1)
        sums, nums = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
        np.add.at(sums, place[inside], values[inside])
        np.add.at(nums, place[inside], 1)
        before = np.searchsorted(self.times, edges[:-1], side="right") - 1
        held = np.where(before >= 0, values[np.maximum(before, 0)], np.nan)
        return np.where(nums > 0, sums / np.maximum(nums, 1), held)


def read_states(tiles: RunTiles, begin: float, end: float) -> StateReadings:
    numbers = tiles.tiles_between(begin, end)
    if len(numbers) and numbers[0] > 0:
        numbers = np.concatenate([numbers[:1] - 1, numbers])  # the reading before the window
    return _every_state(tiles, numbers) if len(numbers) <= MAX_EXACT_TILES + 1 else _tile_states(tiles, numbers)


def _every_state(tiles: RunTiles, numbers: NDArray[np.int64]) -> StateReadings:
    found = [one for one in tiles.events(map(int, numbers), Status) if isinstance(one, Status)]
    found.sort(key=lambda one: one.at)
    waits: dict[Key, WaitReadings] = {}
    for number, state in enumerate(found):
        for wait in state.waits:
            key = wait.owner, wait.what
            own = waits.setdefault(key, WaitReadings(np.zeros(len(found)), np.zeros(len(found))))
            own.counts[number] += wait.count
            own.seconds[number] = max(own.seconds[number], wait.seconds)
    return StateReadings(
        np.array([one.at for one in found]),
        np.ones(len(found)),
        {name: np.array([getattr(one, name) for one in found], dtype=float) for name in DEPTHS},
        waits,
    )


def _tile_states(tiles: RunTiles, numbers: NDArray[np.int64]) -> StateReadings:
    own = tiles.tiles
    readings = own.of("num_readings")[numbers]
    numbers = numbers[readings > 0]
    weights = own.of("num_readings")[numbers].astype(float)
    times = (own.of("begin")[numbers] + own.of("until")[numbers]) / 2
    order = np.argsort(times, kind="stable")
    place = np.full(len(own), -1)
    place[numbers[order]] = np.arange(len(numbers))
    waits: dict[Key, WaitReadings] = {}
    for key, columns in tiles.waits.items():
        where = place[columns.of("tile")]
        inside = where >= 0
        if inside.any():
            found = waits[key] = WaitReadings(np.zeros(len(numbers)), np.zeros(len(numbers)))
            found.counts[where[inside]] = columns.of("num")[inside]
            found.seconds[where[inside]] = columns.of("longest_s")[inside]
            found.counts[:] /= weights[order]
    depths = {name: (own.of(name)[numbers] / weights)[order] for name in DEPTHS}
    return StateReadings(times[order], weights[order], depths, waits)


# ---- the answer ----------------------------------------------------------------------------------------------------------


def flow_answer(tiles: RunTiles, begin: float | None, end: float | None, num_points: int) -> FlowAnswer:
    begin, end = window(tiles, begin, end)
    edges = np.linspace(begin, end, num_points + 1)
    counts, states = _counts(tiles, edges), read_states(tiles, begin, end)
    in_flight = [one.counts for (owner, _), one in states.waits.items() if owner == "rollouts"]
    depths = {name: states.at_points(edges, values) for name, values in states.depths.items()}
    depths["rollouts_in_flight"] = states.at_points(edges, sum(in_flight, np.zeros(len(states.times))))
    return FlowAnswer(
        begin=begin,
        end=end,
        first=tiles.first,
        last=tiles.last,
        at=edges.tolist(),
        counts=FlowCounts(**{name: counts[name].tolist() for name in COUNTS}),
        totals={name: int(counts[name].sum()) for name in COUNTS},
        depths=FlowDepths(**{name: depths[name].tolist() for name in FlowDepths.__struct_fields__}),
        rows_by_version=rows_by_version(tiles, end),
        waits=_wait_rows(states, begin, end),
    )


def _counts(tiles: RunTiles, edges: Floats64) -> dict[str, NDArray[np.int64]]:
    """Per point. Of many tiles, those of a tile are spread evenly over its time."""
    own = tiles.tiles
    begin, end = float(edges[0]), float(edges[-1])
    numbers = np.flatnonzero((own.of("begin") <= end) & (own.of("until") >= begin))
    if len(numbers) <= MAX_EXACT_TILES:
        times: dict[str, list[float]] = {name: [] for name in COUNTED}
        for event in tiles.events(map(int, numbers), *_COUNTED_KINDS):
            if begin <= event.at <= end:
                times[_counted_as(event)].append(event.at)
        return {name: np.histogram(times[name], edges)[0].astype(np.int64) for name in COUNTS}
    values = np.stack([own.of(name)[numbers].astype(float) for name in COUNTS])
    upto = np.rint(spread_over(edges, own.of("begin")[numbers], own.of("until")[numbers], values).cumsum(axis=1))
    found = np.diff(upto, axis=1, prepend=0).astype(np.int64)
    return dict(zip(COUNTS, found, strict=True))


_COUNTED_KINDS: dict[type[Event], str] = {
    GroupAdmitted: "admitted",
    GroupRestarted: "restarted",
    RolloutStarted: "rollouts_started",
    RolloutEnded: "rollouts_ended",
    RolloutFailed: "rollouts_failed",
    RolloutAborted: "rollouts_aborted",
    GroupLeft: "",
}


def _counted_as(event: Event) -> str:
    return event.fate.value if isinstance(event, GroupLeft) else _COUNTED_KINDS[type(event)]


def spread_over(edges: Floats64, begin: Floats64, end: Floats64, values: Floats64) -> Floats64:
    """How much of each row of `values` is in each point, if each is spread evenly from its begin to its end."""
    length = np.maximum(end - begin, 1e-9)
    rates = values / length
    times = np.concatenate([begin, begin + length])
    order = np.argsort(times, kind="stable")
    times = times[order]
    slopes = np.concatenate([rates, -rates], axis=1)[:, order].cumsum(axis=1)
    grown = (slopes[:, :-1] * np.diff(times)).cumsum(axis=1)
    upto = np.concatenate([np.zeros((len(values), 1)), grown], axis=1)
    sums = np.stack([np.interp(edges, times, row) for row in upto])
    found: Floats64 = np.maximum(0.0, np.diff(sums, axis=1))
    return found


def _wait_rows(states: StateReadings, begin: float, end: float) -> list[WaitRow]:
    """The most frequent first."""
    inside = (states.times >= begin) & (states.times <= end)
    total = float(states.weights[inside].sum())
    rows = []
    for (owner, what), own in states.waits.items():
        counts, seconds = own.counts[inside], own.seconds[inside]
        if counts.any():
            num = float((counts * states.weights[inside]).sum()) / total
            share = float(states.weights[inside][counts > 0].sum()) / total
            rows.append(WaitRow(owner=owner, what=what, seconds=float(seconds.max()), num=num, share=share))
    return sorted(rows, key=lambda row: (-row.share, -row.num, row.owner, row.what))[:MAX_WAITS]


def rows_by_version(tiles: RunTiles, end: float) -> list[VersionRows]:
    """Of ended rollouts whose groups no batch had taken by then. They began after the step of the oldest version that the lag
    bound allows: events are read from there, at most those of `MAX_ROW_TILES`."""
    stepped = tiles.steps.of("at") <= end
    versions, places = tiles.steps.of("version")[stepped], tiles.steps.of("tile")[stepped]
    now = int(versions[-1]) if len(versions) else 0
    bounds = [one.lag_bound for one in tiles.marked(RunStarted, LagMoved) if isinstance(one, RunStarted | LagMoved)]
    before = np.flatnonzero(versions <= now - max(bounds, default=0))
    begin = int(places[before[-1]]) if len(before) else 0
    numbers = np.flatnonzero(tiles.tiles.of("begin") <= end)
    gone, found = set[int](), Counter[int]()
    kinds = (RolloutEnded, GroupTaken, GroupLeft, GroupRestarted)
    for number in numbers[numbers >= begin][::-1][:MAX_ROW_TILES].tolist():
        for event in reversed(list(tiles.events([number], *kinds))):
            if event.at > end:
                continue
            if isinstance(event, RolloutEnded):
                found[event.start_version] += event.num_parts if event.group_id not in gone else 0
            elif isinstance(event, kinds):
                gone.add(event.group_id)
    return [VersionRows(version=one, age=now - one, num=num) for one, num in sorted(found.items()) if num]
