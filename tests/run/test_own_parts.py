"""Parts of one's own: named in a config, passed from Python, or brought by a package; what is wrong with them is said before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millstream import imports, resume, train
from millstream.audit import audit
from millstream.cli.main import app
from millstream.config import load
from millstream.env.config import EnvironmentConfig
from millstream.env.resolve import find_environment
from millstream.errors import ConfigError, Stopped
from millstream.events import GroupAdmitted, GroupLeft, Stepped
from millstream.events.sinks import read_events
from millstream.run.changes import rule_of
from millstream.run.check import check_combinations, check_config
from millstream.run.config import RunConfig, with_absolute_paths
from millstream.run.folder import resume_command
from millstream.run.own_parts import BUILT_IN, KEYS, checked_own_parts, with_passed
from millstream.run.simulate import costs_of, simulate
from millstream.types import Fate, FinishedGroup, Task
from support.runs import assert_clean, step_rows
from support.stage_runs import config
from support.stop_at import StopAt

ROOT = Path(__file__).parents[2]
SMALL = (
    "pipeline.steps=6",
    "pipeline.groups_per_step=4",
    "data.size=60",
    "data.holdout=4",
    "evaluation.at_start=false",
)
SIMULATED = (
    "pipeline.steps=12",
    "pipeline.groups_per_step=4",
    "rollout.group_size=4",
    "engine.slots=16",
    "sim.lengths.mean=30",
)
PARTS = """
import numpy as np

def half(group, most=0.5):
    return sum(group.rewards) / len(group.rewards) <= most

def none(group):
    return False

def broken(group):
    return group.nonsense

def vague(group):
    return 1

def by_length(group, rest=0):
    return sum(map(len, group.tokens)) % 3 != rest

class Game:
    def reset(self, task, seed): ...
    def step(self, action): ...

def first_one(tasks, seed):
    return iter([tasks[0]])

class Engine:
    def __init__(self, context): ...

class Learner:
    def __init__(self, context): ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def simulated(folder: Path, *changes: str) -> Path:
    settings = load(ROOT / "recipes/sim/one_gpu.toml", RunConfig, [*SIMULATED, *changes])
    simulate(settings, costs_of(settings), out=folder / "sim")
    return folder / "sim"


def lefts(run: Path) -> list[GroupLeft]:
    return [event for event in read_events(run / "events.jsonl") if isinstance(event, GroupLeft)]


# ---- filters -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_lag", [0, 2])
def test_a_refused_group_leaves_once_with_the_name_of_the_filter_and_the_audit_knows_it(
    folder: Path, max_lag: int
) -> None:
    run = simulated(folder, "pipeline.filter=mine.py:half", f"pipeline.max_lag={max_lag}")
    assert_clean(run)
    refused = [event for event in lefts(run) if isinstance(event.refused_by, str)]
    assert refused and all(event.fate is Fate.FILTERED and event.mean_reward > 0.5 for event in refused)
    assert {event.refused_by for event in refused} == {str(folder / "mine.py:half")}
    admitted = [event.group_id for event in read_events(run / "events.jsonl") if isinstance(event, GroupAdmitted)]
    left = [event.group_id for event in lefts(run)]
    assert len(left) == len(set(left)) and set(left) <= set(admitted)
    assert all(event.mean_reward <= 0.5 for event in lefts(run) if event.fate is Fate.TRAINED)


def test_a_filter_has_the_arguments_of_the_config(folder: Path) -> None:
    run = simulated(folder, "pipeline.filter=mine.py:half", "pipeline.filter_args={most = 0.8}")
    assert_clean(run)
    trained = [event.mean_reward for event in lefts(run) if event.fate is Fate.TRAINED]
    assert 0.5 < max(trained) <= 0.8


def test_a_filter_that_refuses_everything_leaves_empty_steps_and_no_deadlock(folder: Path) -> None:
    run = simulated(folder, "pipeline.filter=mine.py:none", "pipeline.max_replaced_per_step=2")
    assert_clean(run)
    steps = [event for event in read_events(run / "events.jsonl") if isinstance(event, Stepped)]
    assert [event.num_groups for event in steps] == [0] * 12


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", r"pipeline.filter = 'mine.py:broken', for group \d+ .*AttributeError"),
        ("vague", "returned 1: expected True"),
    ],
)
def test_a_filter_that_fails_ends_the_run_and_is_named(folder: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulated(folder, f"pipeline.filter=mine.py:{name}")


def test_the_audit_finds_a_group_that_says_it_was_refused_and_no_filter_is_in_the_config(folder: Path) -> None:
    run = simulated(folder, "pipeline.filter=mine.py:half")
    lines = (run / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    at = next(n for n, event in enumerate(events) if "refused_by" in event)
    for other, what in (({**events[at], "refused_by": "other.py:f"}, "was refused by the filter other.py:f"),
                        ({k: v for k, v in events[at].items() if k != "refused_by"}, "left as filtered")):  # fmt: skip
        (run / "events.jsonl").write_text("\n".join([*lines[:at], json.dumps(other), *lines[at + 1 :]]) + "\n")
        found = [str(one) for one in audit(run).findings]
        assert any(what in one for one in found), found


def keep_some(group: FinishedGroup) -> bool:
    return sum(map(len, group.tokens)) % 3 > 0


def test_an_object_from_python_takes_the_place_of_a_name_and_a_resume_asks_for_it_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(folder, *SMALL, "rollout.group_size=4")
    with pytest.raises(Stopped):
        train(settings, filter=keep_some, schedule=lambda step, num_steps: 0.5, sinks=[StopAt(3)], progress=False)
    run = folder / "run"
    assert resume_command(run) == f"millstream.resume({str(run)!r}, filter=..., schedule=...), from Python"
    with monkeypatch.context() as another, pytest.raises(ConfigError, match="was passed to train from Python"):
        another.setattr(imports, "_passed", {})
        resume(run, progress=False)
    with pytest.raises(ConfigError, match=r"has its loss from its config.toml, 'truncated_is': leave loss= out"):
        resume(run, loss=keep_some, progress=False)
    resume(run, filter=keep_some, schedule=lambda step, num_steps: 0.5, progress=False)
    assert_clean(run)
    assert {event.refused_by for event in lefts(run) if isinstance(event.refused_by, str)} == {
        f"callable:{__name__}.keep_some (filter)"
    }
    with pytest.raises(TypeError, match="take no argument 'engines'"):
        train(settings, engines=1, progress=False)  # type: ignore[call-arg]


def test_two_functions_without_a_name_stay_apart(folder: Path) -> None:
    config = with_passed(
        load(ROOT / "recipes/demo.toml", RunConfig), {"filter": lambda group: True, "schedule": lambda step: 0.5}
    )
    assert imports.load_part("filter", config.pipeline.filter)(None) is True
    assert imports.load_part("schedule", config.learner.schedule)(3) == 0.5


def test_filter_schedule_store_and_channel_change_at_a_resume_and_the_audit_is_clean(folder: Path) -> None:
    own = ("pipeline.filter=mine.py:by_length", "learner.schedule=mine.py:rate", "learner.schedule_args={share=0.5}")
    (folder / "mine.py").write_text(
        PARTS
        + "\nfrom millstream.store.memory import MemoryStore as Store\nfrom millstream.weights.local import LocalChannel\n"
        + "\ndef rate(step, num_steps, share=1.0):\n    return share\n"
    )
    settings = config(folder, *SMALL, "rollout.group_size=4", "checkpoint.every_steps=1", *own)
    with pytest.raises(Stopped):
        train(settings, reward=ones, sinks=[StopAt(3)], progress=False)
    changes = ["pipeline.filter_args={rest=1}", "learner.schedule_args={share=0.25}", "store.kind=mine.py:Store",
               "weights.kind=mine.py:LocalChannel"]  # fmt: skip
    resume(folder / "run", reward=ones, changes=changes, progress=False)
    assert_clean(folder / "run")
    rates = [row.get("learning_rate") for row in step_rows(folder / "run")]
    assert rates[0] == pytest.approx(1.5e-3) and rates[-1] == pytest.approx(0.75e-3)


def ones(task: Task, completion: str) -> float:
    return completion.count("1") / 4


# ---- what is refused before a run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("engine.kind=torhc", r"engine: no engine 'torhc': use torch, vllm, http, outside, or .*Did you mean torch\?"),
        ("learner.kind=x", "no learner 'x': use torch, outside, or one of your own"),
        ("learner.schedule=cosin", r"no schedule 'cosin': use constant, linear, cosine, or .*Did you mean cosine\?"),
        ("pipeline.filter=keep", "no filter 'keep': use one of your own: file.py:name"),
        ("data.sampler=x", "no sampler 'x'"),
        ("store.kind=redis", "no store 'redis': use auto, or"),
        ("weights.kind=x", "no weights 'x': use auto, or"),
        ('trackers.use=["wand"]', r"no tracker 'wand': use wandb, .*Did you mean wandb\?"),
        ("engine.args={a=1}", 'args are of an engine of your own, and kind = "torch"'),
        ("pipeline.filter_args={a=1}", "filter_args are of pipeline.filter, which is not set"),
        ("learner.schedule_args={a=1}", "schedule_args are of a schedule of your own"),
    ],
)
def test_a_name_that_nothing_has_is_answered_with_those_that_there_are(
    folder: Path, setting: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config(folder, setting)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["engine.kind=mine.py:Engine", "engine.process="],
            "has no method generate, abort, .*: see millstream.engine.Engine",
        ),
        (
            ["engine.kind=mine.py:Engine", "engine.process=", "engine.args={a=1}"],
            r"engine.args = \{'a': 1\} does not fit",
        ),
        (["learner.kind=mine.py:Learner"], "has no method begin_batch"),
        (["pipeline.filter=mine.py:half", "pipeline.filter_args={x=1}"], "does not fit half"),
        (["pipeline.filter=mine.py:hlf"], r"has no function 'hlf'. Did you mean mine.py:half\?"),
        (["store.kind=nowhere.py:Store"], "no file nowhere.py"),
    ],
)
def test_a_part_that_is_not_there_or_does_not_fit_is_found_by_the_check(
    folder: Path, settings: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(config(folder, *SMALL, *settings))


def test_a_sampler_is_not_called_by_the_check_and_may_need_tasks(folder: Path) -> None:
    found = config(folder, *SMALL, "data.sampler=mine.py:first_one")
    assert f"checked: the sampler {found.data.sampler} is there" in list(checked_own_parts(found))
    with pytest.raises(ConfigError, match="does not fit first_one"):
        list(checked_own_parts(config(folder, *SMALL, "data.sampler=mine.py:first_one", "data.sampler_args={x=1}")))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["engine.kind=mine.py:Engine"], 'serve your engine over HTTP, and set engine.kind = "http"'),
        (["learner.kind=mine.py:Learner"], 'learner.kind = "torch"'),
        (["store.kind=mine.py:Engine"], r"leave \[store\] out"),
        (["weights.kind=mine.py:Engine"], r"leave \[weights\] out"),
        (["learner.schedule=__main__:rate"], "the learner's processes cannot import it from this one"),
    ],
)
def test_what_cannot_be_on_a_cluster_is_refused_with_what_to_use_instead(
    folder: Path, settings: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_combinations(config(folder, "runtime=ray", "engine.process=", *settings))


def test_every_kind_has_a_key_a_group_of_entry_points_and_a_rule_for_resumes(folder: Path) -> None:
    assert BUILT_IN.keys() == imports.ENTRY_POINTS.keys() and KEYS.keys() <= BUILT_IN.keys()
    assert all(rule_of(f"{table}.{key}") is not None for table, key in KEYS.values())


def test_the_run_folder_names_files_by_absolute_paths(folder: Path) -> None:
    keys = {"engine.kind": "a.py:E", "learner.schedule": "b.py:s", "pipeline.filter": "c.py:f", "data.sampler": "d.py:o",
            "store.kind": "e.py:S", "weights.kind": "f.py:C", "learner.kind": "h.py:L"}  # fmt: skip
    found = with_absolute_paths(
        config(folder, "engine.process=", 'trackers.use=["g.py:T"]', *(f"{key}={value}" for key, value in keys.items()))
    )
    for key, value in keys.items():
        table, name = key.split(".")
        assert getattr(getattr(found, table), name) == str(folder / value)
    assert found.trackers.use == (str(folder / "g.py:T"),)
    table = '[{tool_format="a.py:p", tools=["a.py:t", {function="a.py:u"}], sandbox={use="a.py:S"}}]'
    (one,) = with_absolute_paths(config(folder, f"environment={table}")).environment
    assert one.tool_format == str(folder / "a.py:p") and one.tools[0] == str(folder / "a.py:t")
    assert one.sandbox is not None and one.sandbox.use == str(folder / "a.py:S")


# ---- packages ------------------------------------------------------------------------------------------------------------


def package(folder: Path, name: str, points: Mapping[str, Mapping[str, str]], code: str = "") -> None:
    """As pip leaves it: a module, and a folder that describes it."""
    described = folder / f"{name}-1.0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [
        line
        for group, parts in points.items()
        for line in (f"[millstream.{group}]", *(f"{k} = {v}" for k, v in parts.items()))
    ]
    (described / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (folder / f"{name}.py").write_text(code)


@pytest.fixture
def site(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    site = folder / "site"
    site.mkdir()
    yield site
    for name in [name for name in sys.modules if name in ("brought", "other")]:
        del sys.modules[name]


def test_parts_of_a_package_are_found_by_name_and_imported_only_where_they_are_used(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {"filters": {"half": "brought:half"}, "losses": {"mine": "brought:loss"}, "environments": {"game": "brought:Game"},
              "engines": {"slow": "brought:Engine"}, "trackers": {"lines": "brought:Lines"}}  # fmt: skip
    package(
        site,
        "brought",
        points,
        PARTS + "\ndef loss(x):\n    return -x.advantages_N * x.logprobs_N\n\nloss.corrects = True\n",
    )
    monkeypatch.syspath_prepend(str(site))
    settings = config(site.parent, *SMALL, "algorithm.loss=mine", "pipeline.filter=half", 'trackers.use=["lines"]')
    assert "brought" not in sys.modules
    with pytest.raises(
        ConfigError, match="the tracker 'lines' of the package brought: brought has no function 'Lines'"
    ):
        check_config(settings)
    assert "brought" in sys.modules
    assert find_environment(EnvironmentConfig(use="game")).name == "game"
    with pytest.raises(ConfigError, match=r"no environment 'gam': use single_turn, .*, game, or"):
        find_environment(EnvironmentConfig(use="gam"))
    found = CliRunner().invoke(app, ["parts", "--json"])
    kinds = {one["kind"]: one["installed"] for one in json.loads(found.output)}
    assert kinds["engine"] == [["slow", "brought:Engine", "brought"]] and kinds["environment"][0][0] == "game"
    with pytest.raises(ConfigError, match="no filter 'hlf': use half, or one of your own"):
        config(site.parent, "pipeline.filter=hlf")


def test_two_packages_with_a_part_of_one_name_are_an_error_that_names_both(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(site, "brought", {"filters": {"half": "brought:half"}, "rewards": {"exact_match": "brought:half"}}, PARTS)
    package(site, "other", {"filters": {"half": "other:half"}}, PARTS)
    monkeypatch.syspath_prepend(str(site))
    both = (
        r"two have a filter named 'half': the package (brought|other) .* and the package (brought|other) .*by its path"
    )
    with pytest.raises(ConfigError, match=both):
        check_config(config(site.parent, *SMALL, "pipeline.filter=half"))
    built_in = "two have a reward named 'exact_match': the package brought .* and Millstream itself"
    with pytest.raises(ConfigError, match=built_in):
        check_config(config(site.parent, *SMALL))
    shown = CliRunner().invoke(app, ["parts"])
    assert shown.exit_code == 1 and "two have a" in shown.stderr


def test_neither_the_package_nor_its_help_asks_installed_packages_what_they_bring(site: Path) -> None:
    package(site, "brought", {"filters": {"half": "brought:half"}}, "raise RuntimeError('imported')")
    program = (
        "import sys; import millstream; from millstream import imports; from typer.testing import CliRunner; "
        "from millstream.cli.main import app; done = CliRunner().invoke(app, ['--help']); "
        "print(done.exit_code, imports._installed.cache_info().misses, 'brought' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": f"{site}:{ROOT / 'src'}"},
    )
    assert done.stdout.split() == ["0", "0", "False"]
