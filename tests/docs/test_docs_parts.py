"""docs/parts.md: every part that it shows runs, is resumed, and passes the tests of its kind."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs
from typer.testing import CliRunner

from millstream import resume, train
from millstream.cli.main import app
from millstream.config import load
from millstream.env.tools import parser_named
from millstream.env.tools.parse import ToolCall
from millstream.errors import Stopped
from millstream.events import GroupLeft
from millstream.events.sinks import read_events
from millstream.imports import installed
from millstream.model.load import load_model
from millstream.run.check import check_config
from millstream.run.config import RunConfig
from millstream.testing.conformance import suite_of
from millstream.types import Fate, Task
from support.commands import run_command
from support.runs import assert_clean, step_rows
from support.stage_runs import CONFIG
from support.stop_at import StopAt

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs/parts.md").read_text()
FILES = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", DOCS, flags=re.S))
TABLES = re.findall(r"```toml\n(?!# )(.*?)```", DOCS, flags=re.S)
PYPROJECT, NAMED = re.findall(r"```toml\n# .*?\n(.*?)```", DOCS, flags=re.S)
SMALL = ("pipeline.groups_per_step=4", "data.size=60", "data.holdout=4", "evaluation.at_start=false")
QUICK = {
    "engine": ["a_stop_token_ends_an_answer_and_is_its_last_token", "an_aborted_request_returns_what_it_has",
               "a_version_never_falls", "an_answer_has_max_tokens_at_most", "aborting_what_is_unknown_or_done_is_ignored"],
    "learner": ["a_step_without_rows_leaves_the_weights_as_they_are", "metrics_are_finite_numbers",
                "weights_are_a_copy_that_later_steps_do_not_change"],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(folder: Path, *names: str, changes: tuple[str, ...] = ()) -> RunConfig:
    """A small run with the tables of the page that name these files."""
    tables = [table for table in TABLES if any(f'"{name}:' in table for name in names)]
    keys = [key for table in tables for key in _settings(table)]
    (folder / "run.toml").write_text(CONFIG)
    return load(folder / "run.toml", RunConfig, [*SMALL, f"run_dir={folder / 'run'}", *keys, *changes])


def _settings(table: str) -> list[str]:
    header, *lines = table.strip().splitlines()
    place = f"{header.strip('[]')}.0" if header.startswith("[[") else header.strip("[]")
    return [f"{place}.{line.replace(' = ', '=', 1)}" for line in lines]


def ones(task: Task, completion: str) -> float:
    """A reward that a model without training gets, too."""
    return completion.count("1") / 4


def test_every_part_of_the_page_is_short() -> None:
    assert len(FILES) == 9 and len(TABLES) == 9
    assert max(len(text.splitlines()) + 1 for text in FILES.values()) < 100


def test_the_filter_sampler_schedule_store_channel_and_tracker_of_the_page_train_and_are_resumed(folder: Path) -> None:
    names = ("my_filter.py", "my_sampler.py", "my_schedule.py", "my_store.py", "my_channel.py", "my_tracker.py")
    config = config_of(folder, *names, changes=("pipeline.steps=8", "rollout.group_size=4", "learner.warmup_steps=0"))
    assert all(any(name in line for line in check_config(config).findings) for name in names)
    with pytest.raises(Stopped):
        train(config, reward=ones, sinks=[StopAt(4)], progress=False)
    result = resume(folder / "run", reward=ones, progress=False)
    assert result.summary.steps == 8
    assert_clean(folder / "run")
    rows = step_rows(folder / "run")
    assert [row["learning_rate"] for row in rows] == pytest.approx([3e-3 * (1 + n / 20) ** -0.5 for n in range(8)])
    left = [event for event in read_events(folder / "run/events.jsonl") if isinstance(event, GroupLeft)]
    refused = [event for event in left if event.refused_by == str(folder / "my_filter.py:keep")]
    assert refused and {event.fate for event in refused} == {Fate.FILTERED}
    assert all(event.mean_reward < 0.05 or event.mean_reward > 0.9 for event in refused)
    assert all(0.05 <= event.mean_reward <= 0.9 for event in left if event.fate is Fate.TRAINED)
    assert len((folder / "rows.jsonl").read_text().splitlines()) > 8
    assert sorted(int(path.stem) for path in (folder / "versions").iterdir()) == list(range(9))
    tracked = [json.loads(line) for line in (folder / "run/my_tracker.jsonl").read_text().splitlines()]
    begun = [line["begins_at"] for line in tracked if "begins_at" in line]
    assert begun[0] == 0 < 4 <= begun[1] and tracked[-1]["is_finished"]


def test_the_engine_and_the_learner_of_the_page_train_a_model_and_are_resumed(folder: Path) -> None:
    config = config_of(
        folder, "my_engine.py", "my_learner.py", changes=("pipeline.steps=4", "engine.process=", "rollout.group_size=8")
    )
    with pytest.raises(Stopped):
        train(config, reward=ones, sinks=[StopAt(2)], progress=False)
    result = resume(folder / "run", reward=ones, progress=False)
    assert result.summary.steps == 4
    assert_clean(folder / "run")
    assert max(row["grad_norm"] for row in step_rows(folder / "run")) > 0
    load_model(folder / "run/model")


def test_the_format_of_tool_calls_of_the_page_is_read(folder: Path) -> None:
    (use,) = config_of(folder, "my_format.py").environment
    turn = parser_named(use.tool_format)('First @add({"a": 1})@ then @add(1)@')
    assert turn.calls[0] == ToolCall(name="add", arguments={"a": 1}) and "no object" in str(turn.calls[1])


@pytest.mark.parametrize("kind", ["filter", "sampler", "schedule", "tool_format", "tracker", "weights"])
def test_the_small_parts_of_the_page_pass_the_tests_of_their_kind(folder: Path, kind: str) -> None:
    name = {"filter": "my_filter.py:keep", "sampler": "my_sampler.py:short_first", "schedule": "my_schedule.py:inverse_root",
            "tool_format": "my_format.py:parse", "tracker": "my_tracker.py:Lines",
            "weights": "my_channel.py:FolderChannel"}[kind]  # fmt: skip
    suite = suite_of(kind, name, {}, {})
    for test in [test for test in dir(suite) if test.startswith("test_")]:
        run_test(suite, test.removeprefix("test_"), folder)


@pytest.mark.parametrize("kind", QUICK)
def test_the_engine_and_the_learner_of_the_page_keep_promises_of_their_kind(folder: Path, kind: str) -> None:
    suite = suite_of(kind, f"my_{kind}.py:{kind.title()}", {}, {})
    for test in QUICK[kind]:
        run_test(suite, test, folder)


FAULTS = {
    "the weights of a load are not used": (
        "my_engine.py", "self._model.load_state_dict(weights, strict=False)", "...",
        "what_begins_after_a_load_is_of_the_new_weights_alone",
    ),
    "the temperature is not in the log-probabilities": (
        "my_engine.py", "float(logprobs[int(token)])", "float(torch.log_softmax(logits.double(), -1)[int(token)])",
        "every_token_has_the_log_probability_of_the_distribution_it_was_sampled_from",
    ),
    "an older version is loaded": ("my_engine.py", "version < self.version or ", "", "a_version_never_falls"),
    "an aborted request says that it is whole": (
        "my_engine.py", "Finish.ABORT", "Finish.LENGTH", "an_aborted_request_returns_what_it_has",
    ),
    "a request that is too long is accepted": (
        "my_engine.py", "> self._most", "> 10**9", "a_request_that_can_never_run_is_refused_and_leaves_nothing",
    ),
    "weights are the learner's own": (
        "my_learner.py", "parameter.detach().clone()", "parameter.detach()",
        "weights_are_a_copy_that_later_steps_do_not_change",
    ),
    "a snapshot changes with the learner": (
        "my_learner.py", "copy.deepcopy(state)", "state", "it_resumes_from_a_snapshot_whatever_came_after_it",
    ),
    "a row that is not finite is trained": (
        "my_learner.py", "if not (behaviour", "if False and not (behaviour", "a_row_that_is_not_finite_is_left_out",
    ),
    "log ratios of the last batch stay": (
        "my_learner.py", ".astype(np.float16), []", ".astype(np.float16), self._ratios",
        "log_ratios_are_of_the_trained_tokens_of_the_last_step_in_their_order",
    ),
    "a store without its bound": (
        "my_store.py", "super().__init__(tasks, **capacity)", "super().__init__(tasks)",
        "a_write_does_not_wait_for_room_and_counts",
    ),
    "a filter that remembers": (
        "my_filter.py", "return least", "keep.calls = getattr(keep, 'calls', 0) + 1\n    return keep.calls % 3 > 0 and least",
        "the_same_group_gets_the_same_answer_whatever_came_before_it",
    ),
    "a filter that answers with a number": (
        "my_filter.py", "return least", "return 1 or least", "it_answers_true_or_false_for_every_group",
    ),
    "a filter that refuses everything": ("my_filter.py", "return least", "return False and least", "some_group_is_kept"),
    "a filter that writes": (
        "my_filter.py", "return least", "group.tokens[0][:] = 0\n    return least", "it_does_not_change_the_group",
    ),
    "a sampler without a seed": (
        "my_sampler.py", "random.Random(seed)", "random.Random()", "the_same_seed_gives_the_same_order",
    ),
    "a sampler that ends": ("my_sampler.py", "while True:", "for _ in tasks:", "it_does_not_end"),
    "a schedule that falls below 0": (
        "my_schedule.py", "(1 + step / half_at) ** -0.5", "1 - step / half_at", "every_step_has_a_finite_share_of_at_least_0",
    ),
    "a schedule of a known length": (
        "my_schedule.py", "(1 + step / half_at) ** -0.5", "1 - step / num_steps",
        "it_works_where_the_number_of_steps_is_not_known",
    ),
    "a format that raises": (
        "my_format.py", "(ValueError, RecursionError)", "KeyError",
        "whatever_the_model_writes_is_an_answer_or_a_call_and_never_an_error",
    ),
    "a tracker that begins again": ("my_tracker.py", '.open("a")', '.open("x")', "a_resumed_run_continues"),
    "a channel that takes older versions": (
        "my_channel.py", "if version <= self.version", "if version < 0", "versions_only_rise",
    ),
    "a channel that announces a version before its file is there": (
        "my_channel.py", "        data = await asyncio.to_thread(save",
        "        self.version = version\n        data = await asyncio.to_thread(save",
        "a_fetch_while_the_next_version_is_published_gets_one_of_them_whole",
    ),
}  # fmt: skip
PARTS = {
    "my_engine.py": ("engine", "Engine"), "my_learner.py": ("learner", "Learner"), "my_store.py": ("store", "Recorded"),
    "my_filter.py": ("filter", "keep"), "my_sampler.py": ("sampler", "short_first"), "my_schedule.py": ("schedule", "inverse_root"),
    "my_format.py": ("tool_format", "parse"), "my_tracker.py": ("tracker", "Lines"), "my_channel.py": ("weights", "FolderChannel"),
}  # fmt: skip


def run_test(suite: type, name: str, folder: Path) -> None:
    method = getattr(suite(), f"test_{name}")
    takes_folder = "tmp_path" in inspect.signature(method).parameters
    method(folder) if takes_folder else method()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_part_of_the_page_is_caught_by_the_tests_of_its_kind(folder: Path, fault: str) -> None:
    file, right, wrong, test = FAULTS[fault]
    kind, name = PARTS[file]
    text = FILES[file]
    assert right in text, "the page has changed: change the fault as well"
    run_test(suite_of(kind, f"{file}:{name}", {}, {}), test, folder)
    shutil.rmtree(
        folder / "__pycache__", ignore_errors=True
    )  # a file of the same size in the same second looks unchanged
    (folder / file).write_text(text.replace(right, wrong))
    suite = suite_of(kind, f"{file}:{name}", {}, {})
    with pytest.raises((Exception, pytest.fail.Exception)):
        run_test(suite, test, folder)


def test_a_broken_promise_is_printed_in_words_with_exit_code_1(folder: Path) -> None:
    (folder / "my_filter.py").write_text(FILES["my_filter.py"].replace("return least", "return 1 or least"))
    check = [sys.executable, "-m", "millstream.cli.main", "check", "filter", str(folder / "my_filter.py:keep")]
    done = run_command(check)
    assert done.returncode == 1 and "3 kept, 1 broken, 0 skipped" in done.stdout, done.stdout + done.stderr
    assert "broken: it answers true or false for every group\n    it returned 1 for rewards " in done.stdout
    done = run_command([*check, "--promise", "keps=false"])
    assert done.returncode == 1 and "the tests of a filter have no attribute 'keps'" in done.stderr, (
        done.stdout + done.stderr
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["filter", "my_filter.py:kep"], "Did you mean my_filter.py:keep?"),
        (["fliter", "my_filter.py:keep"], "Did you mean filter?"),
        (["engine", "torch"], "is built in"),
        (["reward", "my_filter.py:keep"], "--dry-run"),
        (["filter", "my_filter.py:keep", "--args", "least"], "expected KEY=VALUE"),
    ],
)
def test_a_part_that_cannot_be_checked_is_refused(folder: Path, words: list[str], message: str) -> None:
    refused = CliRunner().invoke(app, ["check", *words])
    assert refused.exit_code == 1 and message in refused.stderr.replace("\n", " "), refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", ["engine my_engine.py:Engine", "learner my_learner.py:Learner", "store my_store.py:Recorded"]
)
def test_the_large_parts_of_the_page_keep_all_promises(folder: Path, part: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "millstream.cli.main", "check", *part.split()], capture_output=True, text=True
    )
    assert done.returncode == 0 and " 0 broken" in done.stdout, done.stdout + done.stderr


def test_the_package_of_the_page_is_installed_and_its_parts_are_found_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("setuptools")
    source, target = folder / "source", folder / "site"
    source.mkdir()
    (source / "pyproject.toml").write_text(PYPROJECT)
    reward = "\n\ndef short_words(task, completion):\n    return float(len(completion) < 5)\n"
    (source / "word_tools.py").write_text(FILES["my_filter.py"] + reward)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True, capture_output=True)
    monkeypatch.syspath_prepend(str(target))
    assert installed("filter")["middling"][0].package == "word-tools"
    shown = CliRunner().invoke(app, ["parts"])
    assert shown.exit_code == 0 and "middling: word_tools:keep, of the package word-tools" in shown.output
    (folder / "run.toml").write_text(
        CONFIG.replace("[pipeline]\n", '[pipeline]\nfilter = "middling"\n') + NAMED.partition("\n\n")[2]
    )
    config = load(folder / "run.toml", RunConfig, [*SMALL, "pipeline.steps=2", f"run_dir={folder / 'run'}"])
    assert config.pipeline.filter == "middling" and config.reward[0].function == "short_words"
    filtered = structs.replace(config, pipeline=structs.replace(config.pipeline, filter_args={"most": 1.0}))
    train(filtered, progress=False)
    assert_clean(folder / "run")
