"""Real runs in one process: small, but with the real engine, learner, command line and run folder."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs
from typer.testing import CliRunner

from millstream import DataConfig, ModelConfig, RewardConfig, resume, train
from millstream.cli.main import app
from millstream.config import load
from millstream.errors import ConfigError, DataError, ModelError
from millstream.events import GroupTaken, RunEnded, Span, Warned
from millstream.events.sinks import MemorySink, read_events
from millstream.pipeline.schedule import PipelineConfig
from millstream.run.config import RunConfig, with_absolute_paths
from millstream.run.folder import RunFolder
from millstream.run.prepare import prepare_run
from millstream.types import Task
from support.commands import run_command, start_command
from support.runs import metric_rows, recipe_in, step_rows
from support.tiny import make

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "recipes/demo.toml")
SHORT = ["--set", "data.size=1000", "--set", "pipeline.steps=6", "--set", "warmup.max_steps=40", "--set", "warmup.check_every=40", "--set", "data.holdout=32", "--set", "pipeline.groups_per_step=4", "--set", "engine.process=false"]  # fmt: skip
COLD = ["--set", "data.size=1000", "--set", "pipeline.steps=2", "--set", "pipeline.filter_zero_signal=false", "--set", "data.holdout=32", "--set", "pipeline.groups_per_step=4", "--set", "engine.process=false"]  # fmt: skip
"""For a run without warm-up (`recipe_in`)."""


def run(tmp_path: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["train", *arguments, "--set", f"run_dir={tmp_path / 'run'}"])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that came to its end; beside it, what the run printed."""
    folder = tmp_path_factory.mktemp("finished")
    options = ["--set", "pipeline.max_lag=1", "--set", "evaluation.every_steps=3"]
    (folder / "output").write_text(run(folder, DEMO, *SHORT, *options))
    return folder / "run"


@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_short_run_leaves_a_folder_that_says_everything(finished: Path, tmp_path: Path, max_lag: int) -> None:
    folder, output = finished, (finished.parent / "output").read_text()
    if max_lag == 0:  # the config in a run's folder is that of another run
        folder = tmp_path / "run"
        output = run(tmp_path, str(finished / "config.toml"), "--set", "pipeline.max_lag=0")
    assert "accuracy, sampled" in output and "run folder" in output
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 6 and summary["groups_trained"] == 24 and summary["lag_max"] <= max_lag
    assert {"accuracy_before", "accuracy_after", "greedy_before", "greedy_after", "overlap_share"} <= summary.keys()
    assert summary["paths"] == {
        "engine": "a slot for each request, fused layers",
        "learner": "packed rows, padded attention, layers not compiled",
    }
    assert "learner: packed rows, padded attention" in output and "a slot for each request" in output
    events = list(read_events(folder / "events.jsonl"))
    assert sum(isinstance(event, GroupTaken) for event in events) == 24
    assert {event.what for event in events if isinstance(event, Span)} >= {"generate", "accumulate", "step"}

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert model.generate(**tokenizer("31254>", return_tensors="pt"), max_new_tokens=4).shape[1] > 6
    assert [row["step"] for row in step_rows(folder)] == [1, 2, 3, 4, 5, 6]
    measured = {row["step"]: row[name] for row in metric_rows(folder) for name in row if name == "eval/held_out/avg@1"}
    assert {0, 6} < measured.keys() and measured[6] == summary["accuracy_after"]
    measured = CliRunner().invoke(
        app, ["eval", str(folder / "config.toml"), "--model", str(folder / "model"), "--json", *SHORT]
    )
    assert json.loads(measured.output)["greedy"] == pytest.approx(summary["greedy_after"], abs=0.04)


@pytest.mark.parametrize("process", ["true", "false"])
def test_a_turn_ends_with_a_stop_string_wherever_the_engine_runs(tmp_path: Path, process: str) -> None:
    changes = {
        "rollout.stop": '["4", "no such"]',
        "data.size": 1000,
        "engine.process": process,
        "pipeline.steps": 2,
        "pipeline.groups_per_step": 4,
        "pipeline.filter_zero_signal": "false",
        "run_dir": tmp_path / "run",
    }
    overrides = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    result = CliRunner().invoke(app, ["train", str(recipe_in(tmp_path)), *overrides, "--set", "data.holdout=64"])
    assert result.exit_code == 0, result.output
    shown = CliRunner().invoke(app, ["eval", str(tmp_path / "run"), "--json", "--show", "64"])
    said = [sample["completion"] for sample in json.loads(shown.stdout.splitlines()[-1])["samples"]]
    assert sum("4" in one for one in said) > 3 and all(one.index("4") == len(one) - 1 for one in said if "4" in one)
    servers = 'engine={kind="http", http={urls=["http://127.0.0.1:1"], flavour="sglang", folder="w"}}'
    refused = CliRunner().invoke(app, ["train", DEMO, "--dry-run", *overrides[:4], "--set", servers])
    assert refused.exit_code == 1 and "rollout.stop" in refused.output


def test_eval_of_a_run_folder_takes_its_model_says_so_and_gets_the_figure_of_the_run_again(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    for arguments in ([str(finished)], [str(finished / "config.toml"), "--model", str(finished)]):
        measured = CliRunner().invoke(app, ["eval", *arguments, "--json"])
        assert f"{finished} is a run folder: evaluating its model, {finished / 'model'}" in measured.stderr
        found = json.loads(measured.stdout)
        assert found["accuracy"] == pytest.approx(summary["accuracy_after"], abs=0.04)


@pytest.mark.parametrize(
    "engine",
    [
        {"kind": "vllm", "vllm.memory": 0.5, "process": ""},
        {
            "kind": "http",
            "http.urls": '["http://127.0.0.1:1"]',
            "http.flavour": "sglang",
            "http.folder": "weights",
            "process": "",
        },
        {"replicas": 2},
    ],
    ids=str,
)
def test_eval_of_a_run_is_on_our_own_engine_whatever_the_runs_was(engine: dict[str, object], finished: Path) -> None:
    keys = [word for key, value in engine.items() for word in ("--set", f"engine.{key}={value}")]
    measured = CliRunner().invoke(app, ["eval", str(finished), "--json", *keys])
    assert measured.exit_code == 0, measured.output
    accuracy = json.loads((finished / "summary.json").read_text())["accuracy_after"]
    assert json.loads(measured.stdout)["accuracy"] == pytest.approx(accuracy, abs=0.04)


def test_eval_shows_prompts_with_completion_answer_and_reward(finished: Path, tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["eval", str(finished), "--show", "2"]).stdout
    names = [line.split()[0] for line in shown.splitlines() if line]
    scores = ["held_out,", "pass@1", "avg@1"]
    assert names == ["prompt", "completion", "answer", "reward"] * 2 + scores * 2
    (tmp_path / "mine.py").write_text("def reward(task, completion):\n    return 1 / (task.answer < '05')\n")
    reward = f"reward=[{{function='{tmp_path / 'mine.py'}:reward'}}]"
    shown = CliRunner().invoke(app, ["eval", str(finished), "--show", "32", "--set", reward]).stdout
    assert "reward      0.000 (RewardFailed: " in shown and "reward      1.000\n" in shown, "a failure is shown, too"


def test_a_model_is_asked_of_a_run_that_has_none_yet(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(Path(DEMO).read_text())
    said = CliRunner().invoke(app, ["eval", str(tmp_path)]).output
    assert f"has no model yet. To resume the run:\n  millstream train --resume {tmp_path}\nTo evaluate" in said


def test_a_finished_run_says_where_its_model_is_and_what_to_type_to_go_further(finished: Path) -> None:
    result = CliRunner().invoke(app, ["train", "--resume", str(finished)])
    assert result.exit_code == 1 and f"is finished: its model is in {finished / 'model'}." in result.output
    words = shlex.split(result.output.splitlines()[-1])
    assert words[:2] == ["millstream", "train"]
    further = CliRunner().invoke(app, [*words[1:], "--dry-run", "--show-config"])
    assert further.exit_code == 0 and f'path = "{finished / "model"}"' in further.output


def test_a_run_folder_in_place_of_a_config_is_answered_with_what_to_type(finished: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", str(finished)])
    assert result.exit_code == 1 and result.output.endswith(f"\n  millstream train --resume {finished}\n")
    result = CliRunner().invoke(app, ["train", str(tmp_path)])
    assert result.exit_code == 1 and "expected a config" in result.output and "init mine.toml" in result.output


def test_a_saved_model_can_be_trained_further_on_a_file_of_ones_own(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"{i:05d}>", "answer": "".join(sorted(f"{i:05d}"))}) for i in range(40))
    )
    (tmp_path / "mine.py").write_text("def reward(task, completion):\n    return len(completion) == len(task.answer)\n")
    (tmp_path / "mine.toml").write_text(
        f"""
[model]
path = "{finished}/model"
[data]
path = "{tmp_path}/mine.jsonl"
holdout = 8
[[reward]]
function = "{tmp_path}/mine.py:reward"
[rollout]
max_tokens = 8
group_size = 4
[pipeline]
steps = 3
groups_per_step = 2
max_lag = 2
"""
    )
    assert "accuracy, sampled" in run(tmp_path / "b", str(tmp_path / "mine.toml"))


def test_json_output_is_json_and_nothing_else(tmp_path: Path) -> None:
    result = json.loads(run(tmp_path, str(recipe_in(tmp_path)), *COLD, "--json"))
    assert result["summary"]["steps"] == 2 and Path(result["run_dir"]).is_dir()


def test_a_dry_run_prints_the_resolved_config_on_request_and_runs_nothing(tmp_path: Path) -> None:
    short = CliRunner().invoke(app, ["train", DEMO, "--dry-run"])
    assert short.exit_code == 0 and "group_size" not in short.output and len(short.output.splitlines()) < 10
    assert short.output.splitlines()[-1].startswith("found: nothing to change. To start")
    result = CliRunner().invoke(app, ["train", DEMO, "--dry-run", "--show-config", "--set", "pipeline.max_lag=3"])
    assert result.output.splitlines()[-1].startswith("# found: nothing to change"), "findings come last"
    assert result.exit_code == 0 and "max_lag = 3" in result.output and "group_size" in result.output
    assert "# run_dir = (unset)" in result.output and "# warmup_steps" not in result.output
    (tmp_path / "again.toml").write_text(result.output)
    changed = load(Path(DEMO), RunConfig, ["pipeline.max_lag=3"])
    assert load(tmp_path / "again.toml", RunConfig) == changed, "comments and all, it is a config"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.path=nowhere.jsonl", "cannot read data.path = nowhere.jsonl"),
        ("data.holdout=3", "Set data.holdout lower"),
        ("reward.0.function=mine.py:rewrd", "mine.py has no function 'rewrd'. Did you mean mine.py:reward?"),
        ("model.path=nowhere/at/all", "no such folder"),
        ("model.path=bare", "no tokenizer in bare"),
        ("model.path=.", "has no config.json; found: bare, data.jsonl, mine.py, model, run.toml. Expected a folder"),
    ],
)
def test_a_dry_run_finds_what_a_run_would_stumble_over(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the folder holds what is written here
    Path("model").symlink_to(finished / "model")
    Path("bare").mkdir()
    Path("bare/config.json").write_text("{}")
    Path("data.jsonl").write_text('{"prompt": "1>"}\n' * 3)
    Path("mine.py").write_text("def reward(task, completion):\n    return 1.0\n")
    Path("run.toml").write_text(
        "[model]\npath = 'model'\n[data]\npath = 'data.jsonl'\nholdout = 1\n[[reward]]\nfunction = 'mine.py:reward'\n"
        "[rollout]\nmax_tokens = 8\n"
    )
    well = CliRunner().invoke(app, ["train", "run.toml", "--dry-run"])
    assert well.exit_code == 0 and "checked: 2 tasks to train on, 1 held out" in well.output
    result = CliRunner().invoke(app, ["train", "run.toml", "--dry-run", "--set", change])
    assert result.exit_code == 1 and message in result.output, result.output


def test_a_dry_run_loads_no_torch() -> None:
    program = "import sys; from millstream.cli.main import app; app(['train', sys.argv[1], '--dry-run'], standalone_mode=False); print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", program, DEMO], capture_output=True, text=True, check=True)
    assert out.stdout.endswith("False\n")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("org/name", ["org/name is neither a folder here", "nor could it be loaded from the Hugging Face hub", "Expected a folder"]),
        ("./name", ["no such folder (looked for it from", "Expected a folder in Hugging Face format", "--set model.path="]),
        ("RUN", ["is a run folder", "--set model.path=", "run/model"]),
    ],
)  # fmt: skip
def test_a_wrong_model_is_answered_with_what_was_found_and_expected(
    finished: Path, path: str, words: list[str]
) -> None:
    config = load(Path(DEMO), RunConfig, ["model.tiny=", f"model.path={path.replace('RUN', str(finished))}"])
    with pytest.raises(ModelError) as caught:
        prepare_run(config)
    assert all(word in str(caught.value) for word in words), caught.value


def test_the_folder_of_a_run_keeps_paths_that_hold_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("data.jsonl").write_text('{"prompt": "1>"}\n')
    Path("run.toml").write_text(
        "run_dir = 'run'\n[model]\npath = 'model'\n[data]\npath = 'data.jsonl'\n"
        "[[reward]]\nfunction = 'mine.py:reward'\n[[reward]]\nfunction = 'exact_match'\n[[reward]]\nfunction = 'a.b:c'\n"
    )
    config = load(Path("run.toml"), RunConfig)
    RunFolder.create(config, "run").unlock()
    kept = load(tmp_path / "run/config.toml", RunConfig)
    assert (kept.model.path, kept.data.path) == (str(tmp_path / "model"), str(tmp_path / "data.jsonl"))
    assert [reward.function for reward in kept.reward] == [f"{tmp_path / 'mine.py'}:reward", "exact_match", "a.b:c"]
    assert with_absolute_paths(kept) == kept
    on_hub = load(Path("run.toml"), RunConfig, ["model.path=org/name"])
    assert with_absolute_paths(on_hub).model.path == "org/name", "a name on the hub stays one"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pipeline.maxlag=1", "Did you mean max_lag?"),
        ("data.toy=sort", "choose one of"),
        ("rollout.max_tokens=100", "exceeds the model's context of 64"),
        ("reward=[{function='nowhere.py:f'}]", "no file nowhere.py"),
    ],
)
def test_a_mistake_ends_with_one_clear_message_and_exit_code_1(tmp_path: Path, override: str, message: str) -> None:
    result = CliRunner().invoke(app, ["train", DEMO, *SHORT, "--set", override, "--set", f"run_dir={tmp_path / 'run'}"])
    assert result.exit_code == 1
    assert message in " ".join(result.output.split()), result.output
    assert "Traceback" not in result.output


def test_a_mistake_that_is_found_before_the_run_leaves_no_folder_behind(tmp_path: Path) -> None:
    arguments = ["train", DEMO, "--set", f"run_dir={tmp_path / 'run'}", "--set", "data.toy=sort"]
    assert CliRunner().invoke(app, arguments).exit_code == 1
    assert not (tmp_path / "run").exists()


def test_a_run_that_fails_says_so_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "calls = 0\n\ndef reward(task, completion):\n    global calls\n    calls += 1\n    if calls > 200:\n"
        "        raise RuntimeError('no judge today')\n    return calls % 2\n"
    )
    reward = f"reward=[{{function='{tmp_path / 'mine.py'}:reward'}}]"
    arguments = ["train", str(recipe_in(tmp_path)), *COLD, "--set", reward, "--set", f"run_dir={tmp_path / 'run'}"]
    result = CliRunner().invoke(app, [*arguments, "--set", "pipeline.steps=50"])
    assert result.exit_code == 1 and "no judge today" in " ".join(result.output.split())
    *_, last = read_events(tmp_path / "run/events.jsonl")
    assert isinstance(last, RunEnded) and last.outcome == "MillstreamError"


def test_ctrl_c_is_a_clean_stop_with_an_exit_code_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "millstream.cli.main", "train", DEMO, "--set", f"run_dir={tmp_path / 'run'}"]
    process = start_command([*command, "--set", "data.size=1000"])
    assert process.stdout is not None
    for line in process.stdout:
        if "step" in line:
            break
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert (
        process.wait(timeout=60) == 130
        and "To resume the run:\n  millstream train --resume" in rest
        and "Traceback" not in rest
    )
    *_, last = read_events(tmp_path / "run/events.jsonl")
    assert isinstance(last, RunEnded) and last.outcome == "Stopped"


def test_a_learner_that_hangs_does_not_keep_the_process_from_ending(tmp_path: Path) -> None:
    script = tmp_path / "hang.py"
    script.write_text(
        f"""
import time
from pathlib import Path
from millstream import RunConfig, train
from millstream.config import load
from millstream.learner.torch import TorchLearner
TorchLearner._step = lambda self: time.sleep(1000)
changes = ["pipeline.deadline_s=5", "run_dir={tmp_path / "run"}", "data.holdout=0", "data.size=64", "engine.process=false"]
config = load(Path({DEMO!r}), RunConfig, changes)
import msgspec
train(msgspec.structs.replace(config, warmup=None, pipeline=msgspec.structs.replace(config.pipeline, filter_zero_signal=False)))
"""
    )
    out = run_command([sys.executable, str(script)], timeout=120)
    assert out.returncode == 1 and "train has waited 5 s for the learner to step" in out.stderr


def test_a_folder_that_holds_a_run_is_not_written_over(finished: Path) -> None:
    result = CliRunner().invoke(app, ["train", DEMO, *SHORT, "--set", f"run_dir={finished}"])
    assert result.exit_code == 1 and "holds a run already" in " ".join(result.output.split())


def test_a_model_folder_without_a_tokenizer_is_refused_with_what_to_type(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 3)
    (tmp_path / "run.toml").write_text(
        f"[model]\npath = '{tmp_path / 'model'}'\n[data]\npath = '{tmp_path / 'data.jsonl'}'\nholdout = 1\n[rollout]\nmax_tokens = 8\n"
    )
    result = CliRunner().invoke(app, ["train", str(tmp_path / "run.toml"), "--set", f"run_dir={tmp_path / 'run'}"])
    said = " ".join(result.output.split())
    assert result.exit_code == 1 and "Traceback" not in said
    assert f"ModelError: no tokenizer in {tmp_path / 'model'}" in said and "tokenizer.save_pretrained" in said
    assert not (tmp_path / "run").exists(), "it costs nothing"


def test_a_chat_without_a_template_is_refused_by_name(finished: Path, tmp_path: Path) -> None:
    chat = '{"prompt": [{"role": "user", "content": "31254>"}], "answer": "12345"}\n'
    (tmp_path / "chat.jsonl").write_text(chat * 3)
    (tmp_path / "run.toml").write_text(
        f"[model]\npath = '{finished / 'model'}'\n[data]\npath = '{tmp_path / 'chat.jsonl'}'\nholdout = 1\n"
        "[rollout]\nmax_tokens = 8\n"
    )
    result = CliRunner().invoke(app, ["train", str(tmp_path / "run.toml"), "--set", f"run_dir={tmp_path / 'run'}"])
    said = " ".join(result.output.split())
    assert result.exit_code == 1 and "the model's tokenizer has no chat template" in said and "Traceback" not in said


def own_data(finished: Path, tmp_path: Path, *prompts: str) -> RunConfig:
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps({"prompt": p, "answer": "1"}) + "\n" for p in prompts))
    changes = ["model.tiny=", f"model.path={finished / 'model'}", "data.toy=", f"data.path={tmp_path / 'mine.jsonl'}"]
    return load(
        finished / "config.toml", RunConfig, [*changes, "data.holdout=1", "warmup=", f"run_dir={tmp_path / 'run'}"]
    )


def test_a_prompt_beyond_the_context_is_named_by_file_and_line(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"mine\.jsonl, line 2: the prompt has 61 tokens.*model's context of 64"):
        prepare_run(own_data(finished, tmp_path, "1>", 60 * "1" + ">", "2>"))


def test_text_that_the_tokenizer_does_not_know_is_reported_once_at_the_start(finished: Path, tmp_path: Path) -> None:
    assert prepare_run(own_data(finished, tmp_path, "1>", "2>")).warning == ""
    warning = prepare_run(own_data(finished, tmp_path, "1>", "Ä2É>", "3>", "X>")).warning
    assert warning.startswith("2 of 4 prompts have something in them") and "tokens. The first is" in warning
    assert re.search(r"mine\.jsonl, line 2: 'Ä', 'É'$|mine\.jsonl, line 4: 'X'$", warning)
    sink = MemorySink()
    train(
        structs.replace(own_data(finished, tmp_path, "1>", "X>", "2>"), pipeline=PipelineConfig(steps=1)), sinks=[sink]
    )
    assert len(sink.of(Warned)) == 1 and isinstance(sink.events[1], Warned), "after the config, before all else"


def test_a_function_is_passed_from_python_and_the_run_folder_tells_of_it(finished: Path, tmp_path: Path) -> None:
    seen: list[str] = []

    def mine(task: Task, completion: str) -> float:
        seen.append(task.id)
        return float(len(completion) % 2)

    config = structs.replace(own_data(finished, tmp_path, "1>", "2>", "3>"), pipeline=PipelineConfig(steps=1))
    run_dir = Path(train(config, reward=mine).run_dir)
    assert seen and f'"callable:{__name__}.test_a_function_is_passed' in (run_dir / "config.toml").read_text()
    (run_dir / "summary.json").unlink()
    (run_dir / "events.jsonl").unlink()
    result = CliRunner().invoke(app, ["train", "--resume", str(run_dir)])
    assert result.exit_code == 1 and "millstream.resume(RUN, reward=function)" in result.output
    assert "<locals>.mine" in result.output, "it says which function that was"
    (tmp_path / "config.toml").write_text(Path(DEMO).read_text())
    with pytest.raises(ConfigError, match="has its reward from its config"):
        resume(tmp_path, reward=mine)
    shutil.rmtree(run_dir / "checkpoints")
    seen.clear()
    assert resume(run_dir, reward=mine).summary.steps == 1 and seen


def test_in_python_one_reward_is_enough_and_a_function_in_a_config_is_refused_with_what_to_do() -> None:
    model, data = ModelConfig(path="m"), DataConfig(path="d.jsonl")
    config = RunConfig(model=model, data=data, reward=RewardConfig(weight=2.0))  # type: ignore[arg-type]
    assert config.reward == (RewardConfig(weight=2.0),)
    with pytest.raises(ConfigError, match=r"train\(config, reward=function\)"):
        RunConfig(model=model, data=data, reward=lambda task, completion: 1.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"train\(config, reward=function\)"):
        RewardConfig(function=lambda task, completion: 1.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="stands for one reward, and the config has 2"):
        prepare_run(structs.replace(config, reward=(RewardConfig(), RewardConfig())), lambda task, completion: 1.0)


def test_a_reward_that_always_fails_is_found_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(task, completion):\n    return task.data['hrd']\n")
    reward = f"reward=[{{function='{tmp_path / 'mine.py'}:reward'}}]"
    words = ["train", str(recipe_in(tmp_path)), *COLD, "--set", reward, "--set", f"run_dir={tmp_path / 'run'}"]
    result = CliRunner().invoke(app, words)
    said = " ".join(result.output.split())
    assert result.exit_code == 1 and "mine.py:reward raised KeyError at mine.py:2: 'hrd'" in said
    assert not (tmp_path / "run").exists(), "and it leaves nothing behind"
