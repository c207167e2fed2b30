"""`millstream plot`: a file with every metric, and errors that say what to type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millstream.cli.main import app
from millstream.cli.plot import chosen_metrics, running_mean


def run_in(folder: Path, steps: int = 40) -> Path:
    folder.mkdir()
    rows = [
        {"step": n, "at": float(n), "reward": n / steps, "entropy": 1.0, "lag_mean": 0.5} for n in range(1, steps + 1)
    ]
    scores = ("eval/mine/pass@1", "eval/mine/avg@4", "eval/mine/greedy/pass@1")
    rows += [{"step": n, "at": float(n), **dict.fromkeys(scores, 0.5)} for n in (0, steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 41, "rew')
    return folder


def test_runs_are_plotted_to_png_and_svg(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [str(run_in(tmp_path / "one")), str(run_in(tmp_path / "two", steps=5))]
    shown = CliRunner().invoke(app, ["plot", runs[0]])
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "one/plot.png").read_bytes().startswith(b"\x89PNG")
    shown = CliRunner().invoke(app, ["plot", *runs, "--out", str(tmp_path / "both.svg"), "--metric", "reward"])
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "both.svg").read_text().count("<svg") == 1


def test_one_step_is_a_point_that_is_seen_and_missing_values_are_left_out(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = run_in(tmp_path / "one", steps=1)
    with (run / "metrics.jsonl").open("w") as file:
        file.write('{"step": 1, "at": 0.5, "reward": 0.5}\n{"step": 2, "at": 0.6, "reward": null}\n')
    shown = CliRunner().invoke(app, ["plot", str(run), "--out", str(run / "one.svg")])
    assert shown.exit_code == 0, shown.output
    assert 'style="fill: #1f77b4' in (run / "one.svg").read_text(), "the marker of a point"


def test_what_cannot_be_plotted_says_what_to_type(tmp_path: Path) -> None:
    run, begun, odd, broken = str(run_in(tmp_path / "one")), tmp_path / "begun", tmp_path / "odd", tmp_path / "broken"
    begun.mkdir()
    (begun / "config.toml").touch()
    for folder, text in ((odd, '{"step": 1, "reward": 1, "note": "a"}\n'), (broken, "[1]\n")):
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(text)
    for words, expected in (
        ([run, "--metric", "rewrad"], "no metric 'rewrad' in these runs: choose among entropy, eval/mine/avg@4,"),
        ([run, "--out", "a.xyz"], ".png, .svg, .pdf"),
        ([str(tmp_path)], "is not a run folder: it has no config.toml"),
        ([str(begun)], "metrics.jsonl has no steps yet: plot the run when it has made some"),
        ([str(odd), "--metric", "note"], "no metric 'note' in these runs: choose among reward"),
        ([str(broken)], "metrics.jsonl cannot be read: "),
    ):
        shown = CliRunner().invoke(app, ["plot", *words])
        assert shown.exit_code == 1 and expected in " ".join(shown.output.split()), shown.output


def test_matplotlib_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    shown = CliRunner().invoke(app, ["plot", str(run_in(tmp_path / "one"))])
    assert shown.exit_code == 1 and "pip install 'millstream[plots]'" in " ".join(shown.output.split())


def test_the_usual_metrics_are_those_that_the_runs_have() -> None:
    rows = [{"step": 1, "at": 0.0, "reward": 1.0, "own": 2.0}]
    assert chosen_metrics({"a": rows}, []) == ["reward"]
    scores = {"eval/mine/pass@1": 0.5, "eval/mine/pass@4": 0.5, "eval/mine/greedy/pass@1": 0.5}
    assert chosen_metrics({"a": [*rows, {"step": 1, **scores}]}, []) == ["reward", "eval/mine/pass@1"]


def test_a_running_mean_is_that_of_the_last_values() -> None:
    assert running_mean([1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]
    assert running_mean([float(n) for n in range(40)])[-1] == pytest.approx(38.5)
