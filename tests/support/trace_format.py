"""The rules of the Chrome trace format, by which Perfetto reads `trace.json`."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

REQUIRED = {
    "X": {"name", "pid", "tid", "ts", "dur"},
    "i": {"name", "pid", "tid", "ts", "s"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
    "C": {"name", "pid", "ts", "args"},
    "M": {"name", "pid", "args"},
}
Entry = dict[str, Any]
Track = tuple[int, int]


def problems_of(trace: dict[str, list[Entry]]) -> list[str]:
    found: list[str] = []
    entries = trace["traceEvents"]
    slices: dict[Track, list[Entry]] = defaultdict(list)
    for entry in entries:
        phase = entry.get("ph")
        if phase not in REQUIRED:
            found.append(f"unknown phase: {entry}")
        elif missing := REQUIRED[phase] - entry.keys():
            found.append(f"no {missing}: {entry}")
        elif phase != "M" and not all(isinstance(entry.get(key, 0), int) for key in ("ts", "dur")):
            found.append(f"not in whole microseconds, which viewers round in different ways: {entry}")
        elif phase == "X":
            slices[entry["pid"], entry["tid"]].append(entry)
            found += [f"a negative duration: {entry}"] if entry["dur"] < 0 else []
        elif phase == "C" and not all(isinstance(value, int | float) for value in entry["args"].values()):
            found.append(f"a counter that is no number: {entry}")
    for track, own in slices.items():
        found += [f"slices overlap on track {track}: {pair}" for pair in _overlapping(own)]
    named = {(e["pid"], e["tid"]) for e in entries if e["ph"] == "M" and e["name"] == "thread_name"}
    found += [f"track {track} has no name" for track in slices if track not in named]
    return found + _arrow_problems(entries, slices)


def _overlapping(slices: list[Entry]) -> list[tuple[Entry, Entry]]:
    """Pairs of which neither is inside the other."""
    found, around = [], list[Entry]()
    for one in sorted(slices, key=lambda one: (one["ts"], -one["dur"])):
        while around and around[-1]["ts"] + around[-1]["dur"] <= one["ts"]:
            around.pop()
        if around and one["ts"] + one["dur"] > around[-1]["ts"] + around[-1]["dur"]:
            found.append((around[-1], one))
        around.append(one)
    return found


def _arrow_problems(entries: list[Entry], slices: dict[Track, list[Entry]]) -> list[str]:
    """An arrow has one start and one end with its id, and each is inside a slice of its track."""
    starts = {entry["id"]: entry for entry in entries if entry["ph"] == "s"}
    ends = {entry["id"]: entry for entry in entries if entry["ph"] == "f"}
    found = [f"an arrow without an end: {number}" for number in starts.keys() ^ ends.keys()]
    found += [f"an arrow to the past: {number}" for number, end in ends.items() if end["ts"] < starts[number]["ts"]]
    for entry in (*starts.values(), *ends.values()):
        own = slices.get((entry["pid"], entry["tid"]), [])
        if not any(one["ts"] <= entry["ts"] <= one["ts"] + one["dur"] for one in own):
            found.append(f"an arrow from or to nothing: {entry}")
    return found
