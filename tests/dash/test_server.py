"""`millstream dash` over HTTP, in this process: every answer, whatever is in the folders, and who may look."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from millstream.dash import rollouts, runs
from millstream.dash.report import write_report
from millstream.dash.runs import RunCatalog
from millstream.dash.server import dash_app
from millstream.events import (
    Estimate,
    Evaluated,
    EvaluationStarted,
    Event,
    FindingEnded,
    FindingMade,
    GroupAdmitted,
    GroupLeft,
    Resumed,
    RunEnded,
    RunStarted,
    Span,
    Status,
    Stepped,
    WaitNow,
    Warned,
)
from millstream.events.sinks import JsonlSink, read_events
from millstream.events.summary import summarise
from millstream.run.folder import RunFolder
from millstream.serve.http import HttpError
from millstream.types import Fate
from support.dash_runs import ask, client_of, run_with_rollouts, sim_run, write_run

HOSTILE = '</script><img src=x onerror="alert(1)">\u2028\x00\u202e'
VIEWS = ("overview", "series", "series?x=samples", "series?x=seconds", "lanes", "flow", "rollouts")


@pytest.fixture(scope="module")
def sim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sim_run(tmp_path_factory.mktemp("runs") / "sim")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_with_rollouts(tmp_path_factory.mktemp("kept") / "kept")


def started(at: float = 0.0, **changes: Any) -> RunStarted:
    terms: dict[str, Any] = {"run_id": "r", "seed": 0, "steps": 4, "num_tasks": 9, "filter_zero_signal": False}
    terms |= {"min_group_size": 1, "groups_per_step": 1, "group_size": 1, "max_lag": 1.0, "lag_bound": 1, "budget": 2}
    return RunStarted(at=at, **terms, **changes)


def step(version: int, at: float) -> list[Event]:
    group = version
    return [
        GroupAdmitted(at=at - 2, group_id=group, task_id="t", epoch=0, start_version=version - 1, deadline=version),
        Span(at=at, worker="learner", what="step", seconds=1.0, num_tokens=10),
        GroupLeft(at=at, group_id=group, fate=Fate.TRAINED),
        Stepped(
            at=at,
            version=version,
            num_groups=1,
            num_rollouts=8,
            num_rows=8,
            num_tokens=9,
            seconds=2.0,
            metrics={"loss": 1 / version},
        ),
    ]


# ---- answers ---------------------------------------------------------------------------------------------------------------


def test_a_run_is_listed_with_its_state_and_what_it_is(sim: Path) -> None:
    (row,) = ask(client_of(sim), "runs")["runs"]
    assert (row["id"], row["state"], row["is_simulated"], row["step"], row["steps"]) == ("sim", "ended", True, 6, 6)
    assert row["problem"] is None and row["indexed"] == 1.0 and row["seconds"] > 0


def test_a_folder_of_runs_shows_runs_as_they_come_and_go(sim: Path, tmp_path: Path) -> None:
    client = client_of(tmp_path)
    assert ask(client, "runs")["runs"] == []
    for name in ("a", "b c"):
        shutil.copytree(sim, tmp_path / name)
    assert {row["id"] for row in ask(client, "runs")["runs"]} == {"a", "b_c"}
    shutil.rmtree(tmp_path / "a")
    assert [row["id"] for row in ask(client, "runs")["runs"]] == ["b_c"]
    assert client.get("/api/runs/a/overview").status_code == 404


def test_two_runs_of_one_name_have_ids_of_their_own(sim: Path, tmp_path: Path) -> None:
    for name in ("x", "y"):
        shutil.copytree(sim, tmp_path / name / "run")
    client = client_of(tmp_path / "x/run", tmp_path / "y/run")
    rows = ask(client, "runs")["runs"]
    assert [row["id"] for row in rows] == ["run", "run~2"]
    assert ask(client, "runs/run~2/overview")["run"]["path"] == str(tmp_path / "y/run")


def test_lanes_have_the_busy_time_of_the_summary_at_every_zoom(sim: Path) -> None:
    client = client_of(sim)
    summary = summarise(read_events(sim / "events.jsonl"))
    for points in (50, 800):
        found = ask(client, f"runs/sim/lanes?points={points}")
        lanes = {lane["name"]: lane for lane in found["lanes"]}
        assert {"learner", "engine-0", "engine-1", "rollouts"} <= lanes.keys()
        seconds = found["last"] - found["first"]
        assert math.isclose(
            (1 - lanes["learner"]["idle_share"]) * seconds, summary.learner_share * summary.seconds, rel_tol=0.02
        )
    whole = ask(client, "runs/sim/lanes?points=400")
    middle = (whole["first"] + whole["last"]) / 2
    part = ask(client, f"runs/sim/lanes?points=400&begin={middle}&end={middle + 0.2}")
    assert part["is_exact"] and part["begin"] == middle
    assert all(middle <= span[0] <= span[1] <= middle + 0.2 for lane in part["lanes"] for span in lane["spans"])


def reading(at: float, *waits: tuple[str, str, float]) -> Status:
    depths = dict.fromkeys(("requests_running", "requests_waiting", "rows_in_store", "groups_taken", "budget"), 0)
    now = [WaitNow(owner=owner, what=what, seconds=seconds) for owner, what, seconds in waits]
    return Status(at=at, groups_outstanding=0, waits=now, **depths)


def test_ranks_and_evaluations_have_lanes_and_waits_say_for_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = [
        started(),
        Span(at=1.0, worker="engine-0", what="generate", seconds=1.0, num_tokens=5),
        Span(at=2.0, worker="learner", what="accumulate", seconds=1.0, num_tokens=5, rank_seconds=[1.0, 0.25]),
        EvaluationStarted(at=2.0, name="held out step 1", version=1, engines=("engine-0",)),
        reading(3.0, ("train", "a complete group", 1.0), ("feed", "room under the lag bound", 2.0)),
        Evaluated(at=3.5, name="held out step 1", version=1, accuracy=1.0, num_tasks=1),
        Span(at=5.0, worker="engine-0", what="generate", seconds=1.0, num_tokens=5),
        Span(at=5.0, worker="learner", what="step", seconds=1.0, rank_seconds=[1.0, 0.5]),
    ]
    run = write_run(tmp_path / "run", events)
    found = ask(client_of(run), "runs/run/lanes?points=50")
    lanes = {lane["name"]: lane for lane in found["lanes"]}
    assert [*lanes] == ["learner", "learner rank 0", "learner rank 1", "engine-0", "evaluations"]
    waits = {name: [span for span in lane["spans"] if span[2] == "wait"] for name, lane in lanes.items()}
    assert waits["learner"] == [[2.0, 4.0, "wait", 1.0, 0, "waits for a complete group"]]
    assert waits["learner rank 1"][0][:2] == [1.25, 4.0]
    assert waits["engine-0"] == [
        [1.0, 4.0, "wait", 1.0, 0, "no requests: new groups wait for room under the lag bound"]
    ]
    assert lanes["evaluations"]["spans"] == [[2.0, 3.5, "evaluate", 1.0, 0, "held out step 1, on engine-0"]]
    idle = {"learner": 0.6, "learner rank 0": 0.6, "learner rank 1": 0.85, "engine-0": 0.6, "evaluations": 0.7}
    assert {name: lane["idle_share"] for name, lane in lanes.items()} == pytest.approx(idle)
    monkeypatch.setattr("millstream.dash.timeline.MAX_EXACT_TILES", 0)
    coarse = ask(client_of(run), "runs/run/lanes?points=50")["lanes"]
    assert {lane["name"]: lane["idle_share"] for lane in coarse} == pytest.approx(idle, abs=0.03)


def test_lanes_and_flow_from_tiles_agree_with_those_from_events(sim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = [ask(client_of(sim), f"runs/sim/{view}?points=10") for view in ("lanes", "flow")]
    for module in ("timeline", "flow"):
        monkeypatch.setattr(f"millstream.dash.{module}.MAX_EXACT_TILES", 0)
    tiles = [ask(client_of(sim), f"runs/sim/{view}?points=10") for view in ("lanes", "flow")]
    assert not tiles[0]["is_exact"]
    assert tiles[1]["totals"] == exact[1]["totals"]
    idle = [{lane["name"]: lane["idle_share"] for lane in one["lanes"]} for one in (exact[0], tiles[0])]
    for name in ("learner", "engine-0", "engine-1"):
        assert idle[1][name] == pytest.approx(idle[0][name], abs=0.03)


def test_the_flow_counts_every_group_once(sim: Path) -> None:
    found = ask(client_of(sim), "runs/sim/flow?points=7")
    events = list(read_events(sim / "events.jsonl"))
    assert found["totals"]["admitted"] == sum(isinstance(one, GroupAdmitted) for one in events)
    assert found["totals"]["trained"] == sum(isinstance(one, GroupLeft) for one in events)
    assert len(found["at"]) == 8 and all(len(values) == 7 for values in found["counts"].values())
    assert {wait["owner"] for wait in found["waits"]} >= {"train", "feed"}


def test_rows_in_the_store_are_listed_by_version_and_age(sim: Path) -> None:
    client = client_of(sim)
    last = ask(client, "runs/sim/flow")["last"]
    found = [ask(client, f"runs/sim/flow?end={last * share}")["rows_by_version"] for share in (0.3, 0.5, 0.7)]
    assert any(found)
    assert all(0 <= row["age"] <= 2 and row["num"] > 0 for rows in found for row in rows)


def test_series_are_curves_over_steps_seconds_and_samples(tmp_path: Path) -> None:
    score = {"pass@1": Estimate(value=0.5, low=0.4, high=0.6)}
    evaluated = Evaluated(
        at=5.0, name="held_out step 2", version=2, accuracy=0.5, num_tasks=9, table="held_out", scores=score
    )
    events = [
        started(),
        *step(1, 2.0),
        *step(2, 4.0),
        EvaluationStarted(at=4.5, name="held_out step 2", version=2, engines=("e",)),
    ]
    client = client_of(write_run(tmp_path / "run", [*events, evaluated, *step(3, 6.0), *step(4, 8.0)]))
    for x, expected in (("step", [1, 2, 3, 4]), ("seconds", [2, 4, 6, 8]), ("samples", [8, 16, 24, 32])):
        found = ask(client, f"runs/run/series?x={x}&names=loss,nothing")["curves"]
        assert list(found) == ["loss"] and found["loss"]["x"] == expected
    found = ask(client, "runs/run/series?names=eval/held_out/pass@1")["curves"]["eval/held_out/pass@1"]
    assert found == {"x": [2], "values": [0.5], "low": [0.4], "high": [0.6]}
    few = ask(client, "runs/run/series?points=2&names=loss")["curves"]["loss"]
    assert few["values"] == pytest.approx([0.75, 7 / 24]) and few["low"] == pytest.approx([0.5, 0.25])
    overview = ask(client, "runs/run/overview")
    assert overview["evaluations"][0]["scores"][0] == {"name": "pass@1", "value": 0.5, "low": 0.4, "high": 0.6}
    assert ask(client, "runs/run/lanes")["evaluations"] == [
        {"begin": 4.5, "end": 5.0, "name": "held_out step 2", "engines": ["e"]}
    ]


def test_the_overview_says_what_was_found_and_what_happened(tmp_path: Path) -> None:
    made = FindingMade(at=3.0, name="no-signal", step=1, message="all equal", advice="other data")
    events = [
        started(),
        *step(1, 2.0),
        made,
        FindingEnded(at=5.0, name="no-signal", step=3),
        Warned(at=6.0, message="careful"),
    ]
    run = write_run(
        tmp_path / "run", [*events, RunEnded(at=7.0, outcome="Stopped", version=1)], "[pipeline]\nsteps = 4\n"
    )
    (run / "notes.md").write_text("a note")
    found = ask(client_of(run), "runs/run/overview")
    assert found["run"]["state"] == "stopped" and found["run"]["steps"] == 4
    assert [(one["name"], one["until"]) for one in found["findings"]] == [("no-signal", 3)]
    assert "careful" in [one["text"] for one in found["history"]]
    assert found["notes"] == "a note" and found["config"] == "[pipeline]\nsteps = 4\n"
    assert found["latest"]["loss"] == 1.0


def test_rollouts_are_sorted_searched_and_read_turn_by_turn(kept: Path) -> None:
    client = client_of(kept)
    rows = ask(client, "runs/kept/rollouts?sort=reward&descending=1&limit=500")
    rewards = [row["reward"] for row in rows["rows"] if row["reward"] is not None]
    assert rows["total"] == rows["num_kept"] == rows["num_read"] > 8 and rows["why_none"] is None
    assert rewards == sorted(rewards, reverse=True)
    trained = ask(client, "runs/kept/rollouts?fate=trained&sort=step&limit=2&offset=1")
    assert len(trained["rows"]) == 2 and {row["fate"] for row in trained["rows"]} == {"trained"}
    row = trained["rows"][0]
    assert ask(client, f"runs/kept/rollouts?query={row['task']}&step={row['step']}")["total"] >= 1
    assert ask(client, f"runs/kept/rollouts?query={row['fate']}&limit=500")["total"] >= trained["total"]
    group = ask(client, f"runs/kept/rollouts/{row['group_id']}")
    (member,) = [one for one in group["members"] if one["row"]["member"] == row["member"]]
    sampled = [turn for turn in member["turns"] if turn["role"] == "model"]
    assert member["turns"][0]["role"] == "prompt" and sampled
    tokens = sampled[0]["tokens"]
    assert len(tokens["texts"]) == len(tokens["versions"]) == len(tokens["log_probs"]) == len(tokens["advantages"])
    life = member["life"]
    assert life["admitted"] <= life["started"] <= life["generated"] <= life["taken"] <= life["trained"]


def test_the_search_reads_the_whole_text_of_every_rollout_and_continues_where_it_was(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = ask(client_of(kept), "runs/kept/rollouts?limit=500")
    assert every["num_searched"] is None and not every["is_searching"]
    groups = {row["group_id"] for row in every["rows"]}
    texts = {
        (number, one["row"]["member"], one["row"]["attempt"]): "".join(turn["text"] for turn in one["turns"])
        for number in groups
        for one in ask(client_of(kept), f"runs/kept/rollouts/{number}")["members"]
    }
    words = next(text[-12:] for text in texts.values() if len(text) > 200)
    expected = {place for place, text in texts.items() if words in text}
    monkeypatch.setattr("millstream.dash.runs.ANSWER_S", 0.0)
    client = client_of(kept)
    stamps, found = set(), ask(client, f"runs/kept/rollouts?query={words}&limit=500")
    while found["is_searching"] or found["num_read"] < found["num_kept"]:
        stamps.add(ask(client, "runs")["runs"][0]["stamp"])
        monkeypatch.setattr("millstream.dash.runs.ANSWER_S", 1e-4)
        found = ask(client, f"runs/kept/rollouts?query={words}&limit=500")
    assert {(row["group_id"], row["member"], row["attempt"]) for row in found["rows"]} == expected
    assert found["num_searched"] == found["num_kept"] and len(stamps) > 1


def test_a_search_ends_at_its_bound_with_the_newest(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.dash.search.MAX_SEARCHED_TOKENS", 100)
    found = ask(client_of(kept), "runs/kept/rollouts?query=%201&limit=500")
    assert 0 < found["num_searched"] < found["num_kept"] and not found["is_searching"]
    newest = ask(client_of(kept), "runs/kept/rollouts?limit=500")["rows"][: found["num_searched"]]
    assert {row["group_id"] for row in found["rows"]} <= {row["group_id"] for row in newest}


def test_config_differences_name_the_keys_that_differ(tmp_path: Path) -> None:
    for name, lag in (("a", 0), ("b", 2)):
        write_run(tmp_path / name, [started()], f"seed = 1\nrun_dir = '{name}'\n[pipeline]\nmax_lag = {lag}\n")
    found = ask(client_of(tmp_path), "diff?runs=a,b")
    assert found["changed"] == [{"key": "pipeline.max_lag", "values": ["0", "2"]}]


# ---- live ------------------------------------------------------------------------------------------------------------------


def test_a_run_that_trains_changes_its_stamp_and_its_answers_and_ends(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, [], "[pipeline]\nsteps = 4\n")
    client, lock = client_of(folder), RunFolder(folder)
    assert ask(client, "runs")["runs"][0]["state"] == "dead"
    lock.lock()
    sink, seen = JsonlSink(folder / "events.jsonl"), set()
    try:
        for version in (1, 2):
            for event in [started(), *step(1, 2.0)] if version == 1 else step(version, 2.0 * version):
                sink.emit(event)
            sink.sync()
            (row,) = ask(client, "runs")["runs"]
            seen.add(row["stamp"])
            assert row["state"] == "running" and row["seconds"] == 2.0 * version
            assert len(ask(client, "runs/run/lanes")["versions"]) == version
        assert ask(client, "runs/run/overview")["left_s"] == pytest.approx(4.0)
        sink.emit(RunEnded(at=9.0, outcome="finished", version=2))
    finally:
        sink.close()
        lock.unlock()
    (row,) = ask(client, "runs")["runs"]
    assert row["state"] == "ended" and len({*seen, row["stamp"]}) == 3


def test_what_a_resume_has_undone_is_not_shown(tmp_path: Path) -> None:
    events = [started(), *step(1, 2.0), *step(2, 4.0), *step(3, 6.0)]
    back = Resumed(at=7.0, incarnation=1, version=1, from_seq=4, digest="")
    client = client_of(write_run(tmp_path / "run", [*events, back, *step(2, 9.0)]))
    found = ask(client, "runs/run/lanes")
    assert found["versions"] == [[2.0, 1], [9.0, 2]]
    assert ask(client, "runs/run/flow")["totals"]["trained"] == 2
    assert "resumed from step 1" in [one["text"] for one in ask(client, "runs/run/overview")["history"]]


# ---- bad input -------------------------------------------------------------------------------------------------------------


def assert_answers(client: TestClient, run_id: str) -> dict[str, Any]:
    for view in VIEWS:
        ask(client, f"runs/{run_id}/{view}")
    return dict(ask(client, f"runs/{run_id}/overview"))


@pytest.mark.parametrize("num_bytes", [0, 1, 70, 5000, 40_001])
def test_a_log_that_was_cut_anywhere_is_shown_as_far_as_it_goes(sim: Path, tmp_path: Path, num_bytes: int) -> None:
    run = shutil.copytree(sim, tmp_path / "run")
    os.truncate(run / "events.jsonl", num_bytes)
    is_whole = (run / "events.jsonl").read_bytes()[-1:] in (b"", b"\n")
    found = assert_answers(client_of(run), "run")
    assert found["num_skipped"] == (0 if is_whole else 1)
    folder = RunFolder(run)
    folder.lock()
    assert assert_answers(client_of(run), "run")["num_skipped"] == 0  # an active run may still write the rest
    folder.unlock()


def test_zeros_at_the_end_of_a_log_are_named_and_hide_nothing(sim: Path, tmp_path: Path) -> None:
    run = shutil.copytree(sim, tmp_path / "run")
    before = ask(client_of(run), "runs/run/overview")
    for name in ("events.jsonl", "metrics.jsonl"):
        with (run / name).open("ab") as file:
            file.write(bytes(1 << 20))
    found = assert_answers(client_of(run), "run")
    assert [found["run"][name] for name in ("state", "step", "seconds")] == [
        before["run"][name] for name in ("state", "step", "seconds")
    ]
    assert [(one["file"], str(1 << 20) in one["why"]) for one in found["skipped"]] == [
        ("events.jsonl", True),
        ("metrics.jsonl", True),
    ]


def test_a_log_with_damaged_lines_says_which_were_skipped(sim: Path, tmp_path: Path) -> None:
    run = shutil.copytree(sim, tmp_path / "run")
    lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    lines[10] = b"\xff\xfe\x00" + lines[10]
    lines[20] = lines[20][:30] + b"\n"
    lines[30] = b'{"seq":30,"kind":"of_the_future","at":1}\n'
    lines[40] = b"[" * 100_000 + b"\n"
    (run / "events.jsonl").write_bytes(b"".join(lines))
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": "x"}\nnonsense\n{"step": 7, "reward": %s}\n' % (b"9" * 400))
    found = assert_answers(client_of(run), "run")
    skipped = [(one["file"], one["line"]) for one in found["skipped"]]
    assert skipped == [
        *(("events.jsonl", line) for line in (11, 21, 31, 41)),
        *(("metrics.jsonl", line) for line in (7, 8, 9)),
    ]
    assert found["num_skipped"] == 7 and "of_the_future" in found["skipped"][2]["why"]


def test_an_empty_run_is_shown(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("")
    found = assert_answers(client_of(run), "run")
    assert found["series"] == [] and found["run"]["state"] == "dead"
    (run / "events.jsonl").write_bytes(b"")
    assert_answers(client_of(run), "run")


def test_a_run_of_a_newer_version_is_shown_as_far_as_it_is_understood(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [started(), *step(1, 2.0)], "[of_the_future]\nkey = 1\n")
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    newer = [*({**line, "a_new_field": 1} for line in lines), {"seq": 5, "kind": "a_new_kind", "at": 3.0}]
    (run / "events.jsonl").write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in newer))
    found = assert_answers(client_of(run), "run")
    assert found["num_skipped"] == 1 and found["latest"]["loss"] == 1.0


def test_a_run_of_an_older_version_without_an_index_and_newer_fields_is_shown(sim: Path, tmp_path: Path) -> None:
    run = shutil.copytree(sim, tmp_path / "run")
    (run / "events.index").unlink(missing_ok=True)
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    for line in lines:
        for name in ("source", "is_simulated", "max_replaced", "loop_s", "num_parts", "rewards", "num_steps"):
            line.pop(name, None)
    (run / "events.jsonl").write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    assert assert_answers(client_of(run), "run")["num_skipped"] == 0


def test_a_folder_without_permission_is_listed_with_the_reason(sim: Path, tmp_path: Path) -> None:
    run = shutil.copytree(sim, tmp_path / "runs" / "run")
    for mode_of in (run / "events.jsonl", run):
        mode_of.chmod(0)
        try:
            if os.access(mode_of, os.R_OK):
                pytest.skip("this user may read everything")
            client = client_of(tmp_path / "runs")
            (row,) = ask(client, "runs")["runs"]
            assert row["state"] == "unreadable" and "Permission denied" in row["problem"]
            assert client.get("/api/runs/run/overview").status_code == 409
        finally:
            mode_of.chmod(0o755)


def test_a_file_that_cannot_be_opened_is_an_error_that_names_it(
    sim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(sim, tmp_path / "run")

    def refuse(path: Path, *arguments: Any, **named: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    client = client_of(run)
    monkeypatch.setattr(Path, "open", refuse)
    (row,) = ask(client, "runs")["runs"]
    assert row["state"] == "unreadable" and "Permission denied" in row["problem"]
    response = client.get("/api/runs/run/lanes")
    assert response.status_code == 409 and str(run / "events.jsonl") in response.json()["error"]


def test_a_folder_that_becomes_none_of_a_run_is_an_error_that_says_so(sim: Path, tmp_path: Path) -> None:
    run = shutil.copytree(sim, tmp_path / "run")
    client = client_of(run)
    assert ask(client, "runs")["runs"]
    for name in ("events.jsonl", "config.toml"):
        (run / name).unlink()
    assert client.get("/api/runs/run/overview").status_code == 404


def test_files_that_are_links_to_the_outside_are_not_read(sim: Path, tmp_path: Path) -> None:
    run, secret = shutil.copytree(sim, tmp_path / "run"), tmp_path / "secret.txt"
    secret.write_text("the secret")
    (run / "notes.md").symlink_to(secret)
    client = client_of(run)
    (row,) = ask(client, "runs")["runs"]
    assert row["state"] == "unreadable" and "link" in row["problem"]
    response = client.get("/api/runs/run/overview")
    assert response.status_code == 409 and "the secret" not in response.text
    (run / "notes.md").unlink()
    os.mkfifo(run / "notes.md")
    assert client.get("/api/runs/run/overview").status_code == 409


@pytest.mark.parametrize(
    "name", [".lock", "rollouts/0.rollouts", "rollouts/tokenizer", "rollouts/tokenizer/tokenizer.json"]
)
def test_links_and_pipes_are_not_read_wherever_they_are(kept: Path, tmp_path: Path, name: str) -> None:
    run = shutil.copytree(kept, tmp_path / "run")
    client, file = client_of(run), run / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    for make in (lambda: file.symlink_to("/etc"), lambda: os.mkfifo(file)):
        make()
        (row,) = ask(client, "runs")["runs"]
        assert row["state"] == "unreadable" and str(file) in row["problem"]
        for view in ("overview", "rollouts", "rollouts/1"):
            assert client.get(f"/api/runs/run/{view}").status_code == 409
        file.unlink()


def test_hostile_text_stays_text_in_json(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [started(), Warned(at=1.0, message=HOSTILE), *step(1, 2.0)])
    (run / "notes.md").write_text(HOSTILE)
    response = client_of(run).get("/api/runs/run/overview")
    assert (
        response.headers["content-type"] == "application/json"
        and response.headers["x-content-type-options"] == "nosniff"
    )
    assert response.json()["notes"] == HOSTILE
    assert HOSTILE in [one["text"] for one in response.json()["history"]]


# ---- who may look ------------------------------------------------------------------------------------------------------------


def test_with_a_token_nothing_is_answered_without_it(sim: Path) -> None:
    client = client_of(sim, token="right", host="example.org")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}):
        for path in ("/api/runs", "/api/runs/sim/overview", "/api/nothing", "/api/runs?token=right"):
            assert client.get(path, headers=headers).status_code == 401
    assert client.get("/api/runs", headers={"Authorization": "Bearer right"}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "192.168.0.1", ""])
def test_without_a_token_only_names_of_this_machine_are_answered(sim: Path, host: str) -> None:
    client = client_of(sim)
    assert client.get("/api/runs", headers={"Host": host}).status_code == 403
    assert client.get("/api/runs", headers={"Origin": "http://evil.example"}).status_code == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_only_reading_is_possible(sim: Path, method: str) -> None:
    client = client_of(sim)
    before = sorted((path, path.stat().st_mtime_ns) for path in sim.rglob("*"))
    for path in ("/api/runs", "/api/runs/sim/overview", "/", "/app.js"):
        assert client.request(method, path).status_code == 405
    assert_answers(client, "sim")
    assert sorted((path, path.stat().st_mtime_ns) for path in sim.rglob("*")) == before


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/../secret/overview",
        "/api/runs/%2e%2e/overview",
        "/api/runs/..%2fsecret/overview",
        "/api/runs/%2fetc%2fpasswd/overview",
        "/api/runs/sim/rollouts/../../secret",
        "/../secret/config.toml",
        "/%2e%2e/%2e%2e/server.py",
        "/..%2fserver.py",
        "/api/runs/sim%00/overview",
    ],
)
def test_no_path_outside_the_runs_and_the_page_is_served(sim: Path, path: str) -> None:
    """The path as it is on the wire: a client would shorten it."""
    (sim.parent / "secret").mkdir(exist_ok=True)
    (sim.parent / "secret" / "config.toml").write_text("the secret")

    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(dash_app(RunCatalog([sim])), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            url = httpx.URL("http://localhost").copy_with(raw_path=path.encode())
            return await client.get(url)

    response = asyncio.run(get())
    assert response.status_code in (400, 404), response.text
    assert "secret" not in response.text and "import" not in response.text


@pytest.mark.parametrize(
    "query",
    [
        "series?points=1000000",
        "series?points=-1",
        "series?points=x",
        "series?x=other",
        "series?names=" + ",".join("a" * 300),
        "lanes?points=0",
        "lanes?begin=nan",
        "lanes?end=inf",
        "flow?points=9999999999999999999999",
        "rollouts?limit=100000",
        "rollouts?offset=-1",
        "rollouts?sort=__class__",
        "rollouts?step=x",
        "rollouts/x",
        "rollouts/-1",
        "rollouts/99999999999999999999",
    ],
)
def test_a_request_out_of_bounds_is_refused_with_what_was_expected(sim: Path, query: str) -> None:
    response = client_of(sim).get(f"/api/runs/sim/{query}")
    assert response.status_code == 400 and "expected" in response.json()["error"]


def test_windows_outside_the_run_are_moved_into_it(sim: Path) -> None:
    client = client_of(sim)
    for window in ("begin=-5&end=-3", "begin=1e9&end=2e9", "begin=3&end=2", "begin=1&end=1"):
        for view in ("lanes", "flow"):
            found = ask(client, f"runs/sim/{view}?{window}")
            assert found["begin"] < found["end"]


def test_the_page_may_run_no_script_but_its_own(sim: Path) -> None:
    response = client_of(sim).get("/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert response.status_code == 200 and "<script>" not in response.text


def test_a_slow_request_delays_no_other(sim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()

    def slow(*arguments: Any) -> Any:
        assert may_end.wait(30)
        raise HttpError(400, "it was slow")

    monkeypatch.setattr("millstream.dash.runs.flow_answer", slow)

    async def both() -> None:
        transport = httpx.ASGITransport(dash_app(RunCatalog([sim])))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            waiting = [asyncio.create_task(client.get("/api/runs/sim/flow")) for _ in range(3)]
            await asyncio.sleep(0)
            assert (await client.get("/api/runs")).status_code == 200
            assert not any(task.done() for task in waiting)
            may_end.set()
            await asyncio.gather(*waiting)

    asyncio.run(both())


def test_of_more_engines_than_lanes_a_lane_has_their_mean(tmp_path: Path) -> None:
    spans = [
        Span(at=float(at), worker=f"engine-{number}", what="generate", seconds=0.5, num_tokens=10)
        for at in range(1, 5)
        for number in range(100)
    ]
    found = ask(client_of(write_run(tmp_path / "run", spans)), "runs/run/lanes?points=7")
    assert len(found["lanes"]) == 64 and found["num_left_out"] == 37
    lane = found["lanes"][0]
    assert (lane["name"], lane["kind"]) == ("all engines", "engine")
    assert sum(span[4] for span in lane["spans"]) == pytest.approx(
        4000 * 6 / 7, rel=0.01
    )  # from 1 s to 4 s of 0.5 to 4
    assert lane["idle_share"] == pytest.approx(1 - 4 * 0.5 / 3.5, abs=0.02)


def test_the_folder_of_runs_need_not_be_there_yet(tmp_path: Path) -> None:
    client = client_of(tmp_path / "runs")
    assert ask(client, "runs")["runs"] == []
    write_run(tmp_path / "runs" / "first", [started()])
    assert [row["id"] for row in ask(client, "runs")["runs"]] == ["first"]


def test_a_damaged_file_of_rollouts_leaves_the_rest_and_says_so(kept: Path, tmp_path: Path) -> None:
    run = shutil.copytree(kept, tmp_path / "run")
    file = max((run / "rollouts").glob("*.rollouts"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-200:-100] = bytes(100)
    file.write_bytes(data)
    client = client_of(run)
    found = ask(client, "runs/run/rollouts")
    assert 0 < found["num_read"] < found["num_kept"] and found["why_none"] is None
    (skipped,) = ask(client, "runs/run/overview")["skipped"]
    assert skipped["file"] == "rollouts" and file.name in skipped["why"]


def test_rollouts_with_a_damaged_tokenizer_are_shown_as_numbers(kept: Path, tmp_path: Path) -> None:
    run = shutil.copytree(kept, tmp_path / "run")
    (run / "rollouts" / "tokenizer").mkdir()
    (run / "rollouts" / "tokenizer" / "tokenizer.json").write_text("{")
    client = client_of(run)
    assert ask(client, "runs/run/rollouts") == ask(client_of(kept), "runs/kept/rollouts")
    (skipped,) = ask(client, "runs/run/overview")["skipped"]
    assert "tokenizer" in skipped["why"] and "numbers" in skipped["why"]
    write_report(run, tmp_path / "report.html")


def test_of_more_rollouts_than_the_limit_the_newest_are_kept_in_memory(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = ask(client_of(kept), "runs/kept/rollouts?limit=500")["rows"]
    monkeypatch.setattr(rollouts, "MAX_KEPT_ROWS", 9)
    client = client_of(kept)
    for _ in range(3):
        found = ask(client, "runs/kept/rollouts?limit=500")
        assert 0 < found["num_read"] <= 9 and found["rows"] == everything[: found["num_read"]]


def test_a_run_that_was_deleted_and_made_again_is_another_run(tmp_path: Path) -> None:
    run = run_with_rollouts(tmp_path / "run")
    client = client_of(run)
    assert_answers(client, "run")
    other = run_with_rollouts(tmp_path / "other", failure=0.3, retries=2)
    with (other / "events.jsonl").open("ab") as file:  # longer than the first
        file.write((other / "events.jsonl").read_bytes().splitlines(keepends=True)[-1] * 2000)
    for name in {one.relative_to(folder) for folder in (run, other) for one in folder.rglob("*.*") if one.is_file()}:
        data = (other / name).read_bytes() if (other / name).exists() else b""
        (run / name).write_bytes(data)  # the same inodes
    for view in ("flow", "series", "rollouts?limit=500"):
        assert ask(client, f"runs/run/{view}") == ask(client_of(other), f"runs/other/{view}")


def test_a_fault_of_a_view_is_an_error_answer(sim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "flow_answer", lambda *_: 1 // 0)
    response = client_of(sim).get("/api/runs/sim/flow")
    assert response.status_code == 500 and "ZeroDivisionError" in response.json()["error"]
