"""`millstream advise`: gains that are simulated from a run's own costs, and what came of the last advice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millstream.cli import main
from millstream.decoding import decode_json
from millstream.errors import MillstreamError
from millstream.events import Event, Resumed, SettingChanged, Stepped, encode_event
from millstream.events.bottleneck import Bottleneck
from millstream.events.sinks import read_history
from millstream.run import advise as module
from millstream.run.advise import Advice, PromisedGain, advise, keep_advice, outcome_of, read_advice
from millstream.run.candidates import TriedChange
from millstream.run.folder import RunFolder
from millstream.run.simulate import costs_of, simulate
from support.planted import planted_config

SYNCHRONOUS = ("pipeline.max_lag=0", "sim.train_tokens_per_s=3000", "sim.lengths.sigma=0.1")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few simulations, of few steps."""
    monkeypatch.setattr(module, "NUM_ROLLOUTS", 0)
    monkeypatch.setattr(module, "MIN_SIMULATED", 5)
    monkeypatch.setattr(module, "NUM_DRAWS", 0)


def a_run(out: Path, *changes: str) -> Path:
    config = planted_config("pipeline.steps=10", *changes)
    simulate(config, costs_of(config), out=out)
    return out


def run_s(*changes: str) -> float:
    config = planted_config("pipeline.steps=12", "seed=5", *changes)
    ends = [event.at for event in simulate(config, costs_of(config)).events if isinstance(event, Stepped)]
    return ends[-2] - ends[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_run(tmp_path_factory.mktemp("advise") / "run", *SYNCHRONOUS)


def said(*arguments: str) -> str:
    result = CliRunner().invoke(main.app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_advice_promises_what_the_change_gives_and_is_kept_and_reported(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NUM_DRAWS", 1)
    found = decode_json(said("advise", str(run), "--json"), Advice)
    assert found.bottleneck.name == "turns" and not found.why_none
    promise = next(one for one in found.promises if one.settings == ("pipeline.max_lag=1",))
    gave = run_s(*SYNCHRONOUS) / run_s(*SYNCHRONOUS, "pipeline.max_lag=1")
    assert promise.gain == pytest.approx(gave, rel=0.2) and promise.low <= promise.gain <= promise.high
    assert promise.command.endswith("/config.toml --set pipeline.max_lag=1")
    assert read_advice(RunFolder(run)) == [found]
    assert f"{promise.gain:.2f}x  with max_lag 1" in said("report", str(run))
    assert json.loads(said("report", str(run), "--json"))["advice"]["bottleneck"]["name"] == "turns"


@pytest.mark.parametrize(
    ("changes", "words", "change"),
    [
        (("engine.slots=6",), "12 slots", "engine.slots=12"),
        (("environment=[{max_concurrent=4}]",), "8 episodes of single_turn at once", "environment.0.max_concurrent=8"),
    ],
)
def test_the_promise_for_what_was_planted_is_near(
    tmp_path: Path, changes: tuple[str, ...], words: str, change: str
) -> None:
    found = advise(a_run(tmp_path / "run", *changes))
    promise = next(one for one in found.promises if one.words.startswith(words))
    assert promise.gain == pytest.approx(run_s(*changes) / run_s(*changes, change), rel=0.2)
    assert promise.settings in ((), (change,))


def test_a_run_that_cannot_be_simulated_has_a_bottleneck_and_a_reason(run: Path, tmp_path: Path) -> None:
    lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    text = (run / "config.toml").read_text()
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text(text)
    (folder / "events.jsonl").write_bytes(b"".join(line for line in lines if b'"generate"' not in line))
    found = advise(folder)
    assert found.bottleneck.name == "turns" and "spans of decoding with counts of steps" in found.why_none
    assert "is not known: the run in" in said("advise", str(folder))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "is not a run folder: it has no config.toml"),
        (["config.toml"], "has no events.jsonl: name a run that has trained"),
        (["config.toml", "events.jsonl"], r"too few steps for advice: at least 3 .*\n.* train --resume "),
    ],
)
def test_a_run_with_too_little_is_refused(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).write_text("[model.tiny]\n" if name == "config.toml" else "")
    with pytest.raises(MillstreamError, match=message):
        advise(tmp_path)


# ---- the last advice -----------------------------------------------------------------------------------------------------


def given(at: float, step_s: float, *settings: str) -> Advice:
    seen = Bottleneck(name="turns", message="turns", steps=8, step_s=step_s, shares={})
    return Advice(
        at=at,
        version=8,
        bottleneck=seen,
        promises=(PromisedGain(words="a change", gain=1.3, low=1.2, high=1.4, settings=settings),),
    )


def changed(at: float, key: str, new: object) -> SettingChanged:
    return SettingChanged(at=at, key=key, old=None, new=new, version=8)


def steps(begin: float, num: int, step_s: float) -> list[Event]:
    return [
        Stepped(
            at=begin + step_s * number,
            version=8 + number,
            num_groups=1,
            num_rollouts=1,
            num_rows=1,
            num_tokens=1,
            seconds=step_s,
            metrics={},
        )
        for number in range(1, num + 1)
    ]


def test_the_last_advice_is_held_against_the_steps_after_the_change() -> None:
    advice = given(100, 5.0, "pipeline.max_lag=3")
    after = [changed(110, "pipeline.max_lag", 3.0), *steps(110, 20, 4.0)]
    found = outcome_of([advice], after)
    assert found is not None and (found.promised, found.gain, found.steps) == (1.3, 1.25, 16)
    early = outcome_of([advice], after[:5])
    assert early is not None and early.gain is None, "groups that began under the old settings do not count"


def test_a_change_that_was_not_advised_is_held_against_nothing() -> None:
    events = [changed(110, "pipeline.max_lag", 4), *steps(110, 20, 4.0)]
    found = outcome_of([given(100, 5.0, "pipeline.max_lag=3")], events)
    assert found is not None and found.promised is None and found.gain == 1.25
    assert outcome_of([given(120, 5.0)], events) is None, "the change came before the advice"
    assert outcome_of([], events) is None and outcome_of([given(100, 5.0)], steps(0, 9, 1.0)) is None
    more = [changed(110, "pipeline.steps", 99), *steps(110, 20, 4.0)]
    assert outcome_of([given(100, 5.0)], more) is None, "more steps are no change of speed"


def test_the_command_says_what_came_of_the_last_advice(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text((run / "config.toml").read_text())
    events = list(read_history(run / "events.jsonl"))[:-1]
    at = events[-1].at
    resumed = Resumed(
        at=at + 1, incarnation=1, version=8, from_seq=len(events) - 1, digest="", changes=("pipeline.max_lag=1",)
    )
    more = [*events, resumed, changed(at + 1, "pipeline.max_lag", 1.0), *steps(at + 1, 9, 4.0)]
    lines = [b'{"seq":%d,%b\n' % (number, encode_event(event)[1:]) for number, event in enumerate(more)]
    (folder / "events.jsonl").write_bytes(b"".join(lines))
    keep_advice(folder, given(at, 5.2, "pipeline.max_lag=1"))
    with (folder / "advice.jsonl").open("ab") as file:
        file.write(b"not advice\n")
    line = "The last advice promised 1.30x for pipeline.max_lag=1.0; 1.30x came of it, over 7 steps."
    assert line in said("advise", str(folder)) and line in said("report", str(folder))


def test_the_command_to_type_fits_the_state_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the run were a real one: finished, or active."""
    folder = a_run(tmp_path / "run", "engine.slots=6")
    events = folder / "events.jsonl"
    events.write_bytes(events.read_bytes().replace(b'"is_simulated":true', b'"is_simulated":false'))
    lag = TriedChange(words="max_lag 2", settings=("pipeline.max_lag=2",))
    slots = TriedChange(words="12 slots", settings=("engine.slots=12",))
    monkeypatch.setattr(module, "candidates", lambda *_: [lag, slots])
    monkeypatch.setattr(module, "WORTH", 0.0)

    def commands() -> dict[str, str]:
        return {one.words: one.command for one in advise(folder).promises}

    assert commands()["12 slots"].endswith(f"train --resume {folder} --set engine.slots=12 --set pipeline.steps=N")
    monkeypatch.setattr(module, "holder_of", lambda path: 1)
    found = commands()
    assert found["max_lag 2"].endswith(f"set {folder} pipeline.max_lag=2")
    assert found["12 slots"].endswith(f"train --resume {folder} --set engine.slots=12")
