"""The package as a whole: light to import, and the summary of a run from its events."""

from __future__ import annotations

import pydoc
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import millstream
from millstream.events.sinks import JsonlSink, read_events
from millstream.events.summary import intersect_intervals, merge_intervals, summarise, total_length
from support.commands import run_command
from support.simulated import World, simulate

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "module",
    [
        "millstream",
        "millstream.cli.main",
        "millstream.sim.engine",
        "millstream.pipeline.pipeline",
        "millstream.dash.server",
    ],
)
def test_importing_stays_light(module: str) -> None:
    program = f"import sys, {module}; print(*(m for m in ('torch', 'transformers') if m in sys.modules))"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == ""


def test_the_public_names_are_listed_and_explained() -> None:
    names = set(millstream.__all__)
    assert names <= set(dir(millstream)) and {"train", "resume", "RunConfig", "__version__"} <= names
    text = pydoc.render_doc(millstream, renderer=pydoc.plaintext)
    assert all(line in text for line in ("\n    class RunConfig(", "\n    train(", "\n    resume("))


def test_the_example_is_short_and_learns() -> None:
    path = ROOT / "examples/one_file.py"
    assert len(path.read_text().splitlines()) < 200
    out = run_command([sys.executable, str(path)], timeout=240)
    assert out.returncode == 0, out.stderr
    before, after = (float(line.split()[-1]) for line in out.stdout.splitlines() if line.startswith("accuracy"))
    assert after > before + 0.2, out.stdout


intervals = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 10)).map(lambda x: (x[0], x[0] + x[1])), max_size=12)


@given(left=intervals, right=intervals)
def test_the_overlap_of_two_sets_of_spans_is_that_of_their_points(
    left: list[tuple[int, int]], right: list[tuple[int, int]]
) -> None:
    points = [{p for begin, end in spans for p in range(begin, end)} for spans in (left, right)]
    assert total_length(intersect_intervals(merge_intervals(left), merge_intervals(right))) == len(
        points[0] & points[1]
    )
    assert total_length(merge_intervals(left)) == len(points[0])


def test_the_summary_adds_up(tmp_path: Path) -> None:
    outcome = simulate(World(steps=5, groups_per_step=3, failure=0.1, max_lag=1))
    sink = JsonlSink(tmp_path / "events.jsonl")
    for event in outcome.sink.events:
        sink.emit(event)
    sink.close()
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"kind":"stepped","at":')  # what a crash leaves
    summary = summarise(read_events(tmp_path / "events.jsonl"))
    assert summary == summarise(outcome.sink.events)
    assert summary.steps == 5 and summary.groups_trained == 15
    assert summary.groups_admitted == summary.groups_trained + summary.groups_filtered + summary.groups_failed
    assert sum(summary.lag_histogram.values()) == summary.groups_trained and summary.lag_max <= 1
    assert summary.rollouts_trained == outcome.learner.num_rows


def test_a_run_without_events_has_a_summary_of_zeros() -> None:
    assert summarise([]).steps == 0
