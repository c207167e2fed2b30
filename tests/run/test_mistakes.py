"""Mistakes of a new user: each is one message that says what was found and what to type, found by a dry run as by the start,
quickly, and nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from safetensors.torch import load_file
from typer.testing import CliRunner

from millstream import RunConfig, resume, train
from millstream.algo import AlgorithmConfig
from millstream.cli.main import app
from millstream.config import load
from millstream.errors import ConfigError, MillstreamError, Stopped
from millstream.model.load import save_model
from millstream.model.tiny import TinyShape, character_tokenizer, tiny_model
from millstream.run.active import ActiveRun
from millstream.run.folder import LOCK, RunFolder
from support.commands import start_command
from support.runs import command, until
from support.stop_at import StopAt

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz >"
RESUME = "millstream train --resume"
RECORDS = [{"prompt": f"{number}>", "answer": str(number)} for number in range(6)]
RUN = """
run_dir = "out"
[model]
path = "model"
[data]
path = "data.jsonl"
holdout = 1
[[reward]]
function = "mine.py:reward"
[rollout]
max_tokens = 4
group_size = 2
[pipeline]
steps = 1
groups_per_step = 2
[engine]
process = false
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "model"
    tokenizer = character_tokenizer(ALPHABET)
    save_model(tiny_model(TinyShape(hidden=16, layers=1, heads=2, context=32), tokenizer, seed=0), tokenizer, folder)
    return folder


@pytest.fixture
def place(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder, in which all is right: a model, data, a reward and a config."""
    folder = tmp_path / "my own runs"
    folder.mkdir()
    monkeypatch.chdir(folder)
    subprocess.run(["cp", "-r", str(model), "model"], check=True)
    write("data.jsonl", "".join(json.dumps(record) + "\n" for record in RECORDS))
    write("mine.py", "def reward(task, completion):\n    return float(completion == task.answer)\n")
    write("run.toml", RUN)
    yield folder


def write(name: str, text: str) -> None:
    Path(name).write_text(text)


def files() -> set[str]:
    """All that is there, but for what the interpreter keeps of the reward."""
    return {str(path) for path in Path().rglob("*") if "__pycache__" not in path.parts}


def said(*words: str) -> list[str]:
    """The lines of a command that is refused: quickly, without a traceback, and leaving nothing behind."""
    before, began = files(), time.monotonic()
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output and "not expected" not in result.output, result.output
    assert files() == before, "it leaves nothing behind"
    assert time.monotonic() - began < 30
    return result.stderr.splitlines()


def refused(*changes: str) -> str:
    """The error of a start, which is that of a dry run."""
    words = ["train", "run.toml", *(word for change in changes for word in ("--set", change))]
    dry, start = said(*words, "--dry-run"), said(*words)
    assert dry == start, "a dry run finds what a start does"
    return dry[0]


def test_what_is_right_is_found_to_be_so_and_leaves_nothing_behind(place: Path) -> None:
    before = files()
    result = CliRunner().invoke(app, ["train", "run.toml", "--dry-run"])
    assert result.exit_code == 0, result.output
    assert (
        "checked: the reward mine.py:reward gives 1 for the gold answer, 0 for nonsense (data.jsonl, line "
        in result.output
    )
    assert result.output.splitlines()[-1] == (
        "found: nothing to change. To start, with the same options: millstream train run.toml"
    )
    assert files() == before


# ---- the config ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("algorithm.name=grpoo", r"--set algorithm\.name=grpoo: .* = 'grpoo': expected grpo, .*\. Did you mean grpo\?"),
        ("algorithm.loss=pppo", r"no loss 'pppo': use .*Did you mean ppo\?"),
        ("engine.kind=torc", r"no engine 'torc': use torch, vllm, http, outside, or .*Did you mean torch\?"),
        ("model.dtype=float16", r"expected auto, float32, bfloat16"),
        ("learner.schedule=cos", r"no schedule 'cos': use constant, linear, cosine, or"),
        ("pipeline.stepss=3", r"--set pipeline\.stepss=3: unknown key pipeline\.stepss\. Did you mean steps\?"),
        ("lr=3", r"--set lr=3: unknown key lr\. .*learning_rate"),
        ("pipeline.steps=many", r"--set pipeline\.steps=many: pipeline\.steps: expected `int`, got `str`"),
        ("engine.process=auto", r"engine\.process: expected `bool` \(or leave the key out\), got `str`"),
        ("pipeline.steps=2.5", r"--set pipeline\.steps=2\.5: pipeline\.steps: expected `int`, got `float`"),
        ("pipeline.steps=0", r"pipeline\.steps = 0 means supervised training alone, and there is no \[warmup\]"),
        ("pipeline.steps=-1", r"--set pipeline\.steps=-1: pipeline: steps"),
        ("pipeline.groups_per_step=0", r"--set pipeline\.groups_per_step=0: pipeline: .*groups_per_step"),
        ("pipeline.max_lag=-1", r"--set pipeline\.max_lag=-1: pipeline: max_lag = -1"),
        ("rollout.group_size=-1", r"--set rollout\.group_size=-1: rollout: group_size = -1: expected at least 1"),
        ("rollout.group_size=1", r"group_size = 1"),
        ("rollout.max_tokens=0", r"rollout: max_tokens must be at least 1"),
        ("rollout.temperature=0", r"rollout\.temperature = 0.*Set rollout\.temperature = 1\.0"),
        ("rollout.temperature=nan", r"rollout\.temperature = nan: expected a finite number"),
        ("learner.learning_rate=-1", r"--set learner\.learning_rate=-1: learner: "),
        ("data.holdout=-1", r"--set data\.holdout=-1: data: holdout must be at least 0"),
        ("reward=[]", r"no \[\[reward\]\] table: without a reward there is nothing to learn"),
        ("reward.5.weight=2", r"--set reward\.5\.weight=2: no table '5' in a list of 1"),
        ("pipeline.steps", r"--set pipeline\.steps: expected KEY=VALUE"),
        ("engine.cache_gb=1", r"engine\.cache_gb = 1, and on a CPU every request has a slot"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_valid(place: Path, change: str, message: str) -> None:
    assert re.search(message, refused(change))


def test_a_gpu_that_is_not_there_is_said_so(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert 'model.device = "cuda", and torch sees no GPU here: set model.device = "cpu"' in refused("model.device=cuda")


def test_the_file_is_blamed_for_what_is_wrong_in_the_file(place: Path) -> None:
    write("run.toml", RUN + '[algorithm]\nname = "grpoo"\n')
    assert refused().startswith("ConfigError: run.toml: algorithm.name = 'grpoo'")
    assert refused("seed=3").startswith("ConfigError: run.toml: algorithm.name = 'grpoo'")
    both = refused("algorithm.name=grpo", "seed=3", "rollout.group_size=0")
    assert both.startswith("ConfigError: --set rollout.group_size=0: rollout: group_size = 0")


def test_in_python_a_name_that_is_not_valid_is_answered_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"no name 'grpoo': use grpo, .* Did you mean grpo\?"):
        AlgorithmConfig(name="grpoo")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"cannot read run\.toml: No such file"),
        ("", r"run\.toml: .*model"),
        ("model = ", r"run\.toml is not TOML"),
        ("\x00\x01", r"run\.toml is not TOML"),
        ("{}", r"run\.toml is not TOML"),
        ("[model]\npath = 'model'\n[model]\n", r"run\.toml is not TOML: .*twice"),
        ("[model.tiny]\n[model]\npath = 'model'\n", r"set either path"),
        ("[reward]\nfunction = 'exact_match'\n[model.tiny]\n", r"two brackets"),
    ],
)
def test_a_file_that_is_no_config_is_named(place: Path, text: str | None, message: str) -> None:
    Path("run.toml").unlink()
    if text is not None:
        write("run.toml", text)
    assert re.search(message, refused())


# ---- data ----------------------------------------------------------------------------------------------------------------


def records(*some: Any) -> str:
    return "".join(json.dumps(one) + "\n" for one in some)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"data\.jsonl has no tasks"),
        ("\n\n\n", r"data\.jsonl has no tasks"),
        ("prompt,answer\n1,2\n", r"data\.jsonl, line 1: not JSON: .*Expected one JSON object a line"),
        ("[\n" + records(*RECORDS) + "]", r"line 1: not JSON: .*Expected one JSON object a line"),
        (json.dumps(RECORDS), r"line 1: expected an object, got list\. Expected one JSON object a line"),
        (records(*RECORDS)[:-8], r"data\.jsonl, line 6: not JSON"),
        (
            records({"question": "1", "answer": "1"}),
            r"no key 'prompt' among 'question', 'answer': set data\.prompt_key",
        ),
        (records({"prompt": ""}), r"the prompt must be a non-empty string or list of messages, got ''"),
        (records({"prompt": 3}), r"the prompt must be a non-empty string or list of messages, got 3"),
        (records({"prompt": [{"role": "user"}]}), r"a chat prompt is a list of objects with role and content"),
        (records({"prompt": "1>", "answer": ["1"]}), r"answer is \['1'\]: expected a string or a finite number"),
        (records({"id": "a", "prompt": "1>"}, {"id": "a", "prompt": "2>"}), r"line 2: the id 'a' is that of .*line 1"),
        (records(RECORDS[0]), r"has 1 tasks and data\.holdout = 1 sets them all aside: .*Set data\.holdout lower"),
        (records(*RECORDS, {"prompt": "1" * 40, "answer": "1"}), r"line 7: the prompt has 40 tokens, .*context of 32"),
        (records(*RECORDS, {"prompt": [{"role": "user", "content": "1"}]}), r"line 7: .*has no chat template"),
    ],
)
def test_data_that_cannot_be_trained_on_is_named_by_its_line(place: Path, text: str, message: str) -> None:
    write("data.jsonl", text)
    assert re.search(message, refused())


def test_data_that_is_not_text_is_named(place: Path) -> None:
    Path("data.jsonl").write_bytes(records(*RECORDS).encode("utf-16"))
    assert "data.jsonl is not UTF-8 text" in refused()
    Path("data.jsonl").unlink()
    Path("data.jsonl").mkdir()
    assert "data.jsonl is a folder: expected a JSONL file" in refused()


def test_a_misspelled_file_is_answered_with_the_nearest_name(place: Path) -> None:
    assert "No such file (looked for it from" in (line := refused("data.path=dta.jsonl"))
    assert line.endswith("Did you mean data.jsonl?")


def test_files_of_windows_are_read(place: Path) -> None:
    Path("data.jsonl").write_bytes(b"\xef\xbb\xbf" + records(*RECORDS).replace("\n", "\r\n").encode())
    Path("run.toml").write_bytes(b"\xef\xbb\xbf" + RUN.replace("\n", "\r\n").encode())
    result = CliRunner().invoke(app, ["train", "run.toml", "--dry-run"])
    assert result.exit_code == 0 and "checked: 5 tasks to train on, 1 held out" in result.output


def test_a_batch_larger_than_the_data_is_a_warning(place: Path) -> None:
    result = CliRunner().invoke(app, ["train", "run.toml", "--dry-run", "--set", "pipeline.groups_per_step=16"])
    lines = result.output.splitlines()
    assert result.exit_code == 0 and "there are 5 tasks to train on: the same task is more than once" in lines[-2]
    assert lines[-2].startswith("warning: ") and lines[-1].startswith("found: 1 warning"), "warnings come last"


def test_a_data_set_that_cannot_be_loaded_is_said_at_once(place: Path) -> None:
    pytest.importorskip("datasets")
    assert "datasets cannot load 'org/nowhere'" in refused("data.path=", "data.name=org/nowhere")


# ---- the model -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("modle", r"modle is neither a folder here .* nor .* hub: .*\. Did you mean model\? Expected a folder"),
        ("./modle", r"no such folder .*Did you mean model\?"),
        ("org/nowhere", r"org/nowhere is neither a folder here"),
        ("data.jsonl", r"model\.path = 'data\.jsonl' is a file\. Expected a folder"),
        ("empty", r"has no config\.json; found: nothing"),
        ("", r"set either path"),
    ],
)
def test_a_model_that_is_not_there_is_said_at_once(place: Path, path: str, message: str) -> None:
    Path("empty").mkdir()
    assert re.search(message, refused(f"model.path={path}"))


def test_a_hub_that_cannot_be_reached_costs_seconds_and_not_a_minute(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")  # bound, and nothing listens
        began = time.monotonic()
        assert "cannot be reached from here (Connection refused)" in refused("model.path=org/nowhere")
    assert time.monotonic() - began < 15


def damage_weights() -> None:
    path = Path("model/model.safetensors")
    path.write_bytes(path.read_bytes()[:-100])


def point_to_weights() -> None:
    Path("model/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")


def forget_a_shard() -> None:
    weights = load_file("model/model.safetensors")
    shards = {name: f"model-0000{number % 2 + 1}-of-00002.safetensors" for number, name in enumerate(weights)}
    write("model/model.safetensors.index.json", json.dumps({"weight_map": shards}))


def forget_weights() -> None:
    Path("model/model.safetensors").unlink()


def change_tokenizer(**keys: Any) -> None:
    path = Path("model/tokenizer_config.json")
    found = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in (found | keys).items() if value is not None}))


def forget_end_token() -> None:
    change_tokenizer(eos_token=None)


def refuse_chats() -> None:
    change_tokenizer(chat_template="{{ raise_exception('no system message, please') }}")
    write("data.jsonl", records(*({"prompt": [{"role": "system", "content": "1"}], "answer": "1"} for _ in range(3))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (damage_weights, r"model\.safetensors is damaged: it has .* bytes, and its header says"),
        (point_to_weights, r"model\.safetensors is damaged: it has 43 bytes, and no header of safetensors"),
        (forget_a_shard, r"lacks 2 of the 2 files of its weights: model-00001-of-00002\.safetensors is not there"),
        (forget_weights, r"model has no weights: expected a file that ends in \.safetensors"),
        (
            forget_end_token,
            r"the tokenizer in model has no end token: .* Set eos_token in model/tokenizer_config\.json",
        ),
        (refuse_chats, r"line \d: the model's chat template refuses a chat of system: no system message, please"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_model_that_cannot_be_trained_is_said_before_it_is_loaded(place: Path, change: Any, message: str) -> None:
    change()
    assert re.search(message, refused())


def test_a_tokenizer_without_padding_is_no_mistake(place: Path) -> None:
    change_tokenizer(pad_token=None)
    assert CliRunner().invoke(app, ["train", "run.toml", "--dry-run"]).exit_code == 0
    assert CliRunner().invoke(app, ["train", "run.toml"]).exit_code == 0


# ---- rewards and environments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('x')", r"mine\.py:reward raised KeyError at mine\.py:2: 'x'\. That was the gold answer"),
        ("return 'good'", r"returned 'good': expected one number"),
        ("return '1.0'", r"returned '1\.0': expected one number"),
        ("return [1.0]", r"returned \[1\.0\]: expected one number"),
        ("return {'score': 1.0}", r"returned \{'score': 1\.0\}: expected one number"),
        ("return None", r"returned None: expected one number\. Does it end without a return\?"),
        ("return float('nan')", r"returned nan: expected a finite number"),
        ("return 1 / 0", r"raised ZeroDivisionError at mine\.py:2"),
        ("return task['answer']", r"raised TypeError at mine\.py:2"),
        ("return task.anser", r"raised AttributeError at mine\.py:2"),
    ],
)
def test_a_reward_that_fails_is_called_before_the_run(place: Path, body: str, message: str) -> None:
    write("mine.py", f"def reward(task, completion):\n    {body}\n")
    assert re.search(message, refused())


def test_in_a_process_of_its_own_it_is_refused_with_the_same_words(place: Path) -> None:
    write("mine.py", "def reward(task, completion):\n    return '1.0'\n")
    assert "returned '1.0': expected one number" in refused("reward.0.process=true")


@pytest.mark.parametrize(
    ("text", "function", "message"),
    [
        (None, "mine.py:reward", r"no file mine\.py \(looked for it from"),
        ("x = 1\n", "mine.py:reward", r"mine\.py has no function 'reward'"),
        ("def rewrd(task, text): ...\n", "mine.py:reward", r"Did you mean mine\.py:rewrd\?"),
        ("def reward(task, completion)\n", "mine.py:reward", r"mine\.py cannot be imported: SyntaxError"),
        ("import no_such_module\n", "mine.py:reward", r"mine\.py cannot be imported: ModuleNotFoundError"),
        ("import sys\nsys.exit(3)\n", "mine.py:reward", r"mine\.py cannot be imported: SystemExit: 3"),
        ("", "exact_mach", r"no reward 'exact_mach': use exact_match.*Did you mean exact_match\?"),
        ("", "no.module:reward", r"cannot import no\.module: No module named 'no'"),
    ],
)
def test_a_reward_that_is_not_there_is_said_so(place: Path, text: str | None, function: str, message: str) -> None:
    Path("mine.py").unlink()
    if text is not None:
        write("mine.py", text)
    assert re.search(message, refused(f"reward.0.function={function}"))


def test_a_reward_that_is_slow_is_a_warning_and_one_that_prints_or_forks_is_fine(place: Path) -> None:
    write("mine.py", "import time\n\ndef reward(task, completion):\n    time.sleep(3)\n    return 1.0\n")
    slow = CliRunner().invoke(app, ["train", "run.toml", "--dry-run", "--set", "reward.0.timeout_s=0.2"])
    assert slow.exit_code == 0 and "warning: the reward mine.py:reward gave no number within 0.2 s" in slow.output
    write(
        "mine.py",
        "import subprocess\n\ndef reward(task, completion):\n    print('!')\n    subprocess.run(['true'])\n    return True\n",
    )
    result = CliRunner().invoke(app, ["train", "run.toml", "--dry-run"])
    assert result.exit_code == 0 and "gives 1 for the gold answer, 1 for nonsense" in result.output


def warnings_of(*changes: str) -> list[str]:
    words = ["train", "run.toml", "--dry-run", *(word for change in changes for word in ("--set", change))]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return [line for line in result.output.splitlines() if line.startswith("warning")]


def test_a_reward_that_gives_the_gold_answer_and_nonsense_the_same_is_a_warning(place: Path) -> None:
    write("mine.py", "def reward(task, completion):\n    return 0.5 * (completion == task.id)\n")
    (found,) = warnings_of()
    assert found.startswith(
        "warning: the reward mine.py:reward gives 0 for the gold answer, 0 for nonsense (data.jsonl, "
    )
    assert found.endswith("): it cannot tell one from the other")
    write("run.toml", RUN + '[[reward]]\nfunction = "exact_match"\n')
    assert warnings_of() == [], "a reward of the form alone is useful with another"


@pytest.mark.parametrize("parameters", ["completion, answer", "answer, completion", "text, task"])
def test_a_reward_whose_parameters_are_swapped_is_a_warning(place: Path, parameters: str) -> None:
    write(
        "mine.py",
        f"def reward({parameters}, bonus=1.0):\n    return float(len(str(completion if 'completion' in dir() else 1)))\n",
    )
    found = warnings_of()[0]
    assert f"the reward mine.py:reward takes ({parameters}), and is called with the task" in found
    assert found.endswith("and then the completion: expected (task, completion)")


def test_prompts_that_a_tiny_model_does_not_know_are_a_warning_of_a_dry_run(place: Path) -> None:
    tiny = ["model.path=", "model.tiny={}"]
    assert warnings_of(*tiny) == []
    write("data.jsonl", '{"prompt": "ÄÖÜ1", "answer": "1"}\n' * 4)
    (found,) = warnings_of(*tiny)
    assert found.startswith(
        "warning: model.tiny.alphabet does not have 75% of the characters of the prompts ('Ä', 'Ö', 'Ü')"
    )
    write("data.jsonl", json.dumps({"prompt": [{"role": "user", "content": "ÄÖ"}], "answer": "1"}) + "\n")


def test_a_reward_that_fails_only_for_nonsense_is_a_warning(place: Path) -> None:
    write("mine.py", "def reward(task, completion):\n    return float(completion)\n")
    result = CliRunner().invoke(app, ["train", "run.toml", "--dry-run"])
    assert result.exit_code == 0, result.output
    assert re.search(r"warning: the reward .* for the gold answer, an error for nonsense \(.*ValueError", result.output)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("frozen_lak", r"no environment 'frozen_lak': use single_turn, agent, frozen_lake.*Did you mean frozen_lake\?"),
        ("game.py:Gme", r"game\.py has no function 'Gme'\. Did you mean game\.py:Game\?"),
        ("gme.py:Game", r"no file gme\.py"),
        ("game.py:Half", r"game\.py:Half is not an environment: expected a class with reset"),
        ("game.py:Game", r"environment Game makes no tasks of its own"),
    ],
)
def test_an_environment_that_is_not_one_is_said_so(place: Path, use: str, message: str) -> None:
    write(
        "game.py",
        "class Game:\n    def reset(self, task, seed): ...\n    def step(self, action): ...\n\n"
        "class Half:\n    def reset(self, task, seed): ...\n",
    )
    assert re.search(message, refused("data.path=", f"environment.0.use={use}"))


EVALUATION = 'evaluation=[{name="mine", at_end=false, data={path="%s"}%s}]'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            EVALUATION % ("data.jsonl", ", max_tokens=64"),
            r"evaluation mine: max_tokens = 64 exceeds .*: set max_tokens lower",
        ),
        (
            EVALUATION % ("long.jsonl", ""),
            r"evaluation mine: long\.jsonl, line 1: the prompt has 31 tokens, which with",
        ),
        (
            EVALUATION % ("data.jsonl", ', reward=[{function="bad.py:reward"}]'),
            r"evaluation mine: reward bad\.py:reward raised KeyError at bad\.py:2",
        ),
        (EVALUATION % ("nowhere.jsonl", ""), r"evaluation mine: cannot read data\.path = nowhere\.jsonl"),
        ('evaluation=[{name="mine", data={name="org/nowhere"}}]', r"evaluation mine: .*org/nowhere"),
    ],
)
def test_an_evaluation_that_would_fail_is_refused_by_its_name(place: Path, change: str, message: str) -> None:
    write("long.jsonl", records({"prompt": "1" * 31, "answer": "1"}))
    write("bad.py", "def reward(task, completion):\n    raise KeyError('x')\n")
    assert re.search(message, refused(change))


def test_a_dry_run_finds_what_resume_and_from_would_refuse(place: Path, model: Path) -> None:
    tokenizer = character_tokenizer(ALPHABET)
    wide = TinyShape(hidden=32, layers=1, heads=2, context=32)
    save_model(tiny_model(wide, tokenizer, seed=0), tokenizer, Path("wide"))
    assert CliRunner().invoke(app, ["train", "run.toml"]).exit_code == 0
    new = ("train", "run.toml", "--set", "run_dir=again")
    for words, message in (
        (("train", "--resume", "out"), r"the run in out is finished: its model is in out/model"),
        (("train", "--resume", "model"), r"model is not a run folder"),
        ((*new, "--from", "model"), r"model is not a run folder"),
        ((*new, "--from", "out@7"), r"no checkpoint of step 7; it has those of steps 0, 1: type --from out@1"),
        ((*new, "--from", "out", "--set", "model.path=wide"), r"of another model than \[model\]: .* has the shape"),
        (
            (*new, "--from", "out", "--set", "learner.lora={}"),
            r"has trained a whole model, and \[learner\.lora\] is set",
        ),
    ):
        dry, start = said(*words, "--dry-run"), said(*words)
        assert dry == start and re.search(message, dry[0]), (dry, start)
    assert CliRunner().invoke(app, [*new, "--from", "out", "--dry-run"]).exit_code == 0
    more = ("train", "--resume", "out", "--set", "pipeline.steps=2")
    result = CliRunner().invoke(app, [*more, "--dry-run"])
    assert result.exit_code == 0 and "checked: the run continues from step 1, with 1 changed settings" in result.output
    write("data.jsonl", records(*RECORDS[1:], RECORDS[0]))
    assert said(*more, "--dry-run") == said(*more)
    write("data.jsonl", records(*RECORDS))
    for file in Path("out/checkpoints").glob("*/learner.pt"):
        file.write_bytes(b"")
    assert said(*more, "--dry-run") == said(*more)


# ---- folders -------------------------------------------------------------------------------------------------------------


def test_a_run_folder_that_cannot_be_had_is_said_before_the_model_is_loaded(place: Path) -> None:
    assert "run_dir = 'run.toml' is a file: expected a folder" in refused("run_dir=run.toml")
    assert "run.toml is no folder that can be written to: it is a file" in refused("run_dir=run.toml/out")


def test_a_live_run_refuses_a_second_process_at_once_and_a_dead_one_does_not(place: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from millstream.run.folder import RunFolder; "
        "folder = RunFolder(Path('out')); folder.path.mkdir(); folder.lock(); print('locked', flush=True); time.sleep(600)"
    )
    other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        line = refused()
        assert (
            f"the run in out is active: process {other.pid} is writing to it" in line
            and "choose another run_dir" in line
        )
    finally:
        other.kill()
        other.wait()
    assert Path("out", LOCK).exists(), "what a dead process leaves is taken over"
    assert CliRunner().invoke(app, ["train", "run.toml"]).exit_code == 0


def test_a_run_without_a_name_takes_a_folder_that_no_other_process_takes(place: Path) -> None:
    config = load(Path("run.toml"), RunConfig, ["run_dir="])
    first, second = RunFolder.create(config, "run"), RunFolder.create(config, "run")
    assert [first.path, second.path] == [Path("runs/run-1"), Path("runs/run-2")]
    second.discard()
    first.discard()
    assert not Path("runs").exists()


def test_what_was_in_a_folder_before_a_run_that_failed_stays_there(place: Path) -> None:
    Path("out").mkdir()
    write("out/notes.txt", "mine")
    folder = RunFolder.create(load(Path("run.toml"), RunConfig), "run")
    folder.discard()
    assert [entry.name for entry in Path("out").iterdir()] == ["notes.txt"]


def failing_loss(*inputs: Any) -> Any:
    raise RuntimeError("a loss of mine")


def test_what_fails_in_the_first_step_keeps_its_log_and_says_where_it_is(place: Path) -> None:
    loss = f"algorithm={{loss='{__file__}:failing_loss'}}"
    words = ["train", "run.toml", "--set", loss, "--set", "pipeline.max_lag=0", "--set", "run_dir=my out"]
    result = CliRunner().invoke(app, [*words, "--set", "pipeline.filter_zero_signal=false"])
    lines = result.stderr.splitlines()
    assert result.exit_code == 1 and "a loss of mine" in lines[0]
    assert lines[-2:] == ["The log of the run is my out/events.jsonl. To resume the run:", f"  {RESUME} 'my out'"]
    assert b"run_ended" in Path("my out/events.jsonl").read_bytes().splitlines()[-1]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), MemoryError(), OSError(28, "No space left")])
def test_whatever_ends_a_start_leaves_neither_a_folder_nor_a_lock(
    place: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(Path("run.toml"), RunConfig, ["run_dir=deep/out"])
    expected = ConfigError if isinstance(error, OSError) else type(error)
    before = files()

    def fill(folder: RunFolder) -> None:
        (folder.path / "half").mkdir()
        raise error

    def begin(run: ActiveRun) -> None:
        raise error

    with pytest.raises(expected):
        RunFolder.create(config, "run", fill)
    with pytest.raises(expected):
        RunFolder.create(structs.replace(config, run_dir=None), "run", fill)
    monkeypatch.setattr(ActiveRun, "emit_begun", begin)
    with pytest.raises(type(error)):
        train(config)
    assert files() == before
    RunFolder.create(config, "run").discard()
    assert files() == before, "nothing holds the folder"


def test_a_start_that_another_process_was_faster_than_removes_nothing_of_its(place: Path) -> None:
    config = load(Path("run.toml"), RunConfig)
    first = RunFolder.create(config, "run")
    there = files()
    with pytest.raises(ConfigError, match="is active"):
        RunFolder(first.path).lock()
    second = RunFolder(first.path)
    second.discard()
    assert files() == there
    first.discard()


def test_a_run_with_a_passed_reward_says_how_it_is_resumed_from_python(place: Path) -> None:
    config = load(Path("run.toml"), RunConfig, ["pipeline.steps=2"])
    train(config, reward=lambda task, completion: float(len(completion)))
    Path("out/summary.json").unlink()
    line = said("status", "out")
    assert line[-1].strip() == "millstream.resume('out', reward=function), from Python"


def test_a_run_with_passed_data_says_how_it_is_resumed_and_resumes_so(place: Path) -> None:
    config = load(Path("run.toml"), RunConfig, ["data.path=", "pipeline.steps=400", "checkpoint.every_steps=1"])
    with pytest.raises(Stopped, match=r"To resume the run:\n  millstream\.resume\('out', data=records\), from Python"):
        train(config, data=RECORDS, sinks=[StopAt(2)])
    assert "data=records" in said("train", "--resume", "out")[0] and "data=records" in said("status", "out")[-1]
    assert resume("out", data=RECORDS, changes=["pipeline.steps=60"]).summary.steps == 60
    in_a_file = ["data.passed=false", "data.path=data.jsonl", "pipeline.steps=61"]
    assert resume("out", changes=in_a_file).summary.steps == 61, "the same records, in a file"


def test_printed_commands_can_be_typed_where_paths_have_spaces(place: Path) -> None:
    result = CliRunner().invoke(app, ["train", "run.toml", "--set", "run_dir=my out"])
    assert result.exit_code == 0
    commands = [shlex.split(line) for line in result.output.splitlines() if line.startswith("    millstream ")]
    assert ["millstream", "audit", "my out"] in commands and ["millstream", "report", "my out"] in commands
    (line,) = (line for line in said("train", "my out") if line.startswith("  millstream"))
    assert shlex.split(line) == ["millstream", "train", "--resume", "my out"]
    lines = said("train", "--resume", "my out")
    assert [line for line in lines if line.startswith("  millstream")] == lines[1::2], "a command has a line of its own"
    assert "millstream export 'my out' DIR" in said("export", "my out")[0]
    assert "type --from 'my out@1'" in said("train", "run.toml", "--set", "run_dir=b", "--from", "my out@7")[0]
    Path("my data").mkdir()
    assert refused("data.path=my data").endswith("--set data.path= --set 'data.name=my data'")
    Path("my data/adapter_config.json").touch()
    assert "--set 'learner.lora.path=my data'" in refused("model.path=my data")
    for file in Path("my out/checkpoints").glob("*/learner.pt"):
        file.unlink()
    lines = said("train", "--resume", "my out", "--set", "pipeline.steps=2")
    assert lines[1] == "  millstream train 'my out/config.toml' --set run_dir=ANOTHER"
    Path("my out/events.jsonl").write_text("{}\n")
    assert said("report", "my out")[0].endswith("millstream audit 'my out'")


def test_a_half_started_run_says_what_it_is(place: Path) -> None:
    """One that was killed between the making of its folder and its first event: it can be resumed, and that says so."""
    RunFolder.create(load(Path("run.toml"), RunConfig), "run").unlock()
    assert said("status", "out")[0].startswith("ConfigError: the run in out is not running. To resume it:")
    assert "no events.jsonl" in said("report", "out")[0]
    assert CliRunner().invoke(app, ["train", "--resume", "out"]).exit_code == 0
    assert "is finished" in said("train", "--resume", "out")[0]


@pytest.mark.parametrize("command", ["status", "report", "audit", "trace"])
def test_a_folder_that_is_no_run_is_said_so(place: Path, command: str) -> None:
    assert "model is not a run folder: it has no " in said(command, "model")[0]
    assert "nowhere is not a run folder: it has no " in said(command, "nowhere")[0]


def test_a_port_that_is_taken_is_said_so(place: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert (
            f"cannot listen on 127.0.0.1:{port}: Address already in use. Choose another --port"
            in said("serve", "model", "--port", str(port))[0]
        )


def test_a_full_disk_is_found_before_the_run(place: Path) -> None:
    """On a real small disk, where the kernel lets us mount one."""
    script = 'mkdir small && mount -t tmpfs -o size=1m none small && exec "$0" -m millstream.cli.main "$@"'
    unshare = ["unshare", "-rm", "sh", "-c", script, sys.executable]
    words = ["train", "run.toml", "--set", "run_dir=small/out"]
    for options in (["--dry-run"], []):
        result = subprocess.run([*unshare, *words, *options], capture_output=True, text=True)
        if "unshare" in result.stderr or "mount" in result.stderr:
            pytest.skip(result.stderr.strip())
        assert result.returncode == 1 and "small has 0.00 GB free, and the trained model alone needs" in result.stderr
        Path("small").rmdir()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_what_may_not_be_read_or_written_is_said_so(place: Path) -> None:
    Path("data.jsonl").chmod(0)
    assert "cannot read data.path = data.jsonl: Permission denied" in refused()
    Path("data.jsonl").chmod(0o600)
    Path("closed").mkdir(0o500)
    assert "closed is no folder that can be written to: no permission" in refused("run_dir=closed/out")


# ---- Ctrl-C --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["checks", "evaluation"])
def test_ctrl_c_before_the_first_step_leaves_nothing_behind(tmp_path: Path, phase: str) -> None:
    began = f"open({str(tmp_path / 'began')!r}, 'w').close()\n"
    at_import = f"{began}time.sleep(20)\n" if phase == "checks" else ""
    (tmp_path / "mine.py").write_text(
        f"import time\n{at_import}\ndef reward(task, completion):\n"
        f"    if completion not in (task.answer, '~?~'):\n        {began}        time.sleep(20)\n    return 1.0\n"
    )
    changes: dict[str, object] = {"reward": f"[{{function='{tmp_path / 'mine.py'}:reward'}}]"}
    process = start_command(command(tmp_path / "run", changes))
    until(lambda: (tmp_path / "began").exists(), process)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "Traceback" not in output, output
    assert not (tmp_path / "run").exists()
    said = {"checks": "stopped by Ctrl-C", "evaluation": "SIGINT; nothing was trained yet, and nothing is left behind"}
    assert said[phase] in output


def test_a_config_made_in_python_is_checked_like_a_file(place: Path) -> None:
    config = load(Path("run.toml"), RunConfig)
    wrong = structs.replace(config, rollout=structs.replace(config.rollout, max_tokens=64))
    before = files()
    with pytest.raises(MillstreamError, match=r"rollout\.max_tokens = 64 exceeds the model's context of 32"):
        train(wrong)
    assert files() == before
