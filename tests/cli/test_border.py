"""The border of the command line: what goes wrong is one message that names the place, and never a traceback."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millstream.cli import main
from millstream.errors import LogError, ModelError
from millstream.events.sinks import JsonlSink, MetricsSink, read_events, read_history
from millstream.model.load import load_model, load_tokenizer, save_model
from millstream.model.tiny import TinyShape, character_tokenizer, tiny_model

GOLDEN = Path(__file__).parents[1] / "golden/max_lag_2.jsonl"
LONG = "x" * 300


def said(*arguments: str) -> str:
    """The one line of a command that fails."""
    result = CliRunner().invoke(main.app, list(arguments))
    assert result.exit_code == 1 and result.stdout == "", result.output
    (line,) = result.stderr.splitlines()
    return line


def test_an_error_that_is_not_expected_is_one_line_and_its_traceback_is_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path) -> None:
        raise KeyError("millstream\n\x1b[31m")

    monkeypatch.setattr(main, "audit", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "events.jsonl").touch()
    line = said("audit", str(tmp_path))
    found = re.fullmatch(r"KeyError: 'millstream\\n\\x1b\[31m'\. That is not expected: the traceback is in (\S+)", line)
    assert found is not None, line
    written = Path(found[1]).read_text()
    assert (
        written.startswith("millstream 0.")
        and "Traceback (most recent call last)" in written
        and "in broken" in written
    )


def test_where_the_traceback_cannot_be_written_it_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(main, "audit", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    (tmp_path / "events.jsonl").touch()
    result = CliRunner().invoke(main.app, ["audit", str(tmp_path)])
    assert result.exit_code == 1
    assert "the traceback cannot be written to a file (No such file or directory)" in result.stderr
    assert "in broken" in result.stderr


def test_a_message_has_no_character_that_a_terminal_acts_on(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[model.tiny]\ncontext = 512\n[data]\npath = "\\u001b[31m\\u0007"\n')
    assert "\\x1b[31m\\x07" in said("train", str(tmp_path / "a.toml"), "--dry-run")


@pytest.mark.parametrize(
    "command",
    [
        ["train", LONG],
        ["train", "--resume", LONG],
        ["eval", LONG],
        ["report", LONG],
        ["trace", LONG],
        ["audit", LONG],
        ["status", LONG],
        ["scale", LONG, "engines=2"],
        ["export", LONG, "out"],
        ["init", LONG],
        ["serve", LONG],
        ["env", "check", "--config", LONG],
        ["env", "check", f"{LONG}.py:Game"],
    ],
    ids=" ".join,
)
def test_a_file_name_that_is_too_long_is_named(command: list[str]) -> None:
    assert re.match(r"ConfigError: cannot (look at|read) x+.*: File name too long", said(*command))


@pytest.mark.parametrize("key", ["model.path", "data.path", "run_dir", "reference.path"])
def test_a_path_of_a_config_that_is_too_long_is_named_with_its_key(tmp_path: Path, key: str) -> None:
    (tmp_path / "a.toml").write_text('[model.tiny]\n[data]\ntoy = "sort_digits"\n[rollout]\nmax_tokens = 8\n')
    unset = {"model.path": ["--set", "model.tiny="], "data.path": ["--set", "data.toy="]}.get(key, [])
    line = said("train", str(tmp_path / "a.toml"), "--dry-run", *unset, "--set", f"{key}={LONG}")
    assert re.fullmatch(rf"ConfigError: cannot look at {key} = x{{80}}\.\.\.: File name too long", line)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("resources.engine_gpus=inf", r"resources\.engine_gpus = inf: expected a finite number"),
        ("model.tiny.heads=0", r"model\.tiny: heads = 0: expected 1 to 1,024"),
        ("model.tiny.hidden=6", r"model\.tiny: hidden = 6 must be a multiple of 2 \* heads = 8"),
        ("model.tiny.layers=9223372036854775807", r"model\.tiny: layers = 9223372036854775807: expected 1 to 1,024"),
        ("data.size=9223372036854775807", r"data: .*size from 1 to 10,000,000"),
        ("learner.ranks=9223372036854775807", r"learner: ranks = 9223372036854775807: expected at most 65,536"),
        ("engine.replicas=9223372036854775807", r"engine: replicas = 9223372036854775807: expected at most 65,536"),
    ],
)
def test_a_number_that_nothing_can_be_made_of_is_refused_by_key(tmp_path: Path, change: str, message: str) -> None:
    (tmp_path / "a.toml").write_text('[model.tiny]\n[data]\ntoy = "sort_digits"\n[rollout]\nmax_tokens = 8\n')
    assert re.search(message, said("train", str(tmp_path / "a.toml"), "--dry-run", "--set", change))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"null"),
        ("config.json", b'{"model_type": "qwen3", "num_attention_heads": 0}'),
        ("config.json", b"[" * 100_000),
        ("tokenizer.json", b"null"),
        ("tokenizer_config.json", b"[]"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
        ("generation_config.json", b"null"),
    ],
)
def test_a_damaged_file_of_a_model_is_a_model_error(tmp_path: Path, name: str, content: bytes) -> None:
    tokenizer = character_tokenizer("ab")
    save_model(tiny_model(TinyShape(hidden=8, layers=1, heads=2, context=8), tokenizer, seed=0), tokenizer, tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=re.escape(str(tmp_path))):
        load_tokenizer(tmp_path)
        load_model(tmp_path)


def test_an_argument_of_a_built_in_reward_is_finite(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        '[model.tiny]\ncontext = 512\n[data]\ntoy = "sort_digits"\n[[reward]]\nfunction = "judge"\n'
        'args = { url = "http://x", model = "y", prompt = "{completion}", temperature = nan }\n'
    )
    line = said("train", str(tmp_path / "a.toml"), "--dry-run")
    assert re.search(r"reward judge, args\.temperature = nan: expected a finite number", line)


# ---- logs ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A log with a bad line in the middle."""
    lines = [b'{"seq":%d,%b' % (number, line[1:]) for number, line in enumerate(GOLDEN.read_bytes().splitlines())]
    lines[70] = lines[70][:20]
    (tmp_path / "events.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    (tmp_path / "config.toml").write_text('[model.tiny]\n[data]\ntoy = "sort_digits"\n[rollout]\nmax_tokens = 8\n')
    return tmp_path


@pytest.mark.parametrize("command", [["report"], ["report", "--json"], ["trace"], ["train", "--resume"]], ids=" ".join)
def test_a_bad_line_in_the_middle_of_a_log_is_named(run_dir: Path, command: list[str]) -> None:
    line = said(*command, str(run_dir))
    place = re.escape(f"{run_dir}/events.jsonl, line 71 cannot be read: ")
    assert re.match(rf"LogError: {place}.* Found: b'.*'\. .*: millstream audit ", line)


def test_a_line_that_speaks_of_a_resume_is_not_taken_for_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(
        b'{"seq":0,"kind":"warned","at":0.0,"message":"a \\"kind\\":\\"resumed\\" b","kind2":{"kind":"resumed"}}\n'
    )
    assert len(list(read_history(path))) == 1


def test_the_log_and_the_metrics_of_a_run_that_goes_on_must_be_readable(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b"garbage\n")
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step":1}\n{"stop":2}\n')
    with pytest.raises(LogError, match=r"events\.jsonl, the last line cannot be read"):
        JsonlSink(tmp_path / "events.jsonl")
    with pytest.raises(LogError, match=r"metrics\.jsonl, line 2 cannot be read"):
        MetricsSink(tmp_path / "metrics.jsonl", upto=5)
    with pytest.raises(LogError, match=r"cannot read .*nowhere\.jsonl: No such file"):
        list(read_events(tmp_path / "nowhere.jsonl"))
