"""The recipes of the package: listed, copied, and usable where they were copied to. The ways to start the program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import millstream
from millstream.cli.main import app
from millstream.cli.recipes import find_recipes
from millstream.config import load
from millstream.errors import ConfigError
from millstream.run.check import check_combinations
from millstream.run.config import RunConfig


def invoke(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.output


def test_every_recipe_is_listed_with_what_it_is() -> None:
    lines = invoke("recipes").splitlines()
    for name in find_recipes():
        assert any(line.startswith(f"{name} ") and len(line) > 40 for line in lines), name
    assert {"demo", "gsm8k", "cluster/slurm"} <= find_recipes().keys()


@pytest.mark.parametrize("name", find_recipes())
def test_a_recipe_is_copied_and_is_a_valid_config(tmp_path: Path, name: str) -> None:
    target = tmp_path / "mine" / "run.toml"
    command = "sim" if name.startswith("sim/") else "train"
    assert f"millstream {command} {target}" in invoke("init", "--recipe", name, str(target))
    check_combinations(load(target, RunConfig))
    assert f"recipes/{name}.toml" not in target.read_text(), "what it says to type is the copy"


def test_the_data_of_a_recipe_is_copied_next_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    invoke("init", "--recipe", "code", "mine/code.toml")
    config = load(Path("mine/code.toml"), RunConfig)
    assert config.data.path == "mine/code.jsonl" and Path("mine/code.jsonl").stat().st_size > 1000
    again = CliRunner().invoke(app, ["init", "--recipe", "code", "mine/other.toml"])
    assert again.exit_code == 1 and "code.jsonl exists already" in again.output.replace("\n", "")
    assert not Path("mine/other.toml").exists(), "all of it or nothing"


def test_an_unknown_recipe_is_answered_with_the_names_that_are_known(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["init", "--recipe", "gsm9k", str(tmp_path / "run.toml")])
    assert result.exit_code == 1 and "no recipe 'gsm9k': expected one of" in result.output and "gsm8k" in result.output
    assert "Did you mean gsm8k?" in result.output.replace("\n", " ")


def test_a_config_that_is_not_there_is_answered_with_the_nearest_name(tmp_path: Path) -> None:
    invoke("init", "--recipe", "demo", str(tmp_path / "demo.toml"))
    with pytest.raises(
        ConfigError, match=rf"demmo\.toml: No such file or directory\. Did you mean {tmp_path}/demo\.toml\?"
    ):
        load(tmp_path / "demmo.toml", RunConfig)


def test_the_package_is_a_program_and_has_types() -> None:
    out = subprocess.run(
        [sys.executable, "-m", "millstream", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout == f"millstream {millstream.__version__}\n"
    assert (Path(millstream.__file__).parent / "py.typed").is_file()


def test_the_shell_completes_commands() -> None:
    program = "from millstream.cli.main import app; app(prog_name='millstream')"
    asked = {"_MILLSTREAM_COMPLETE": "complete_bash", "COMP_WORDS": "millstream re", "COMP_CWORD": "1"}
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env={**os.environ, **asked}
    )
    assert {"recipes", "report"} <= set(out.stdout.split()), out
