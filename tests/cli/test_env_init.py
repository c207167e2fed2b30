"""`millstream env init` makes a package that works as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millstream.cli.main import app
from millstream.config import load
from millstream.run.config import RunConfig


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["env", "init", "word-game"]).exit_code == 0
    return tmp_path / "word-game"


def test_a_new_environment_passes_its_test_and_the_check_and_has_a_config(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(Path(__file__).parents[2] / "src")
    passed = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
    )
    assert passed.returncode == 0 and "2 passed" in passed.stdout, passed.stdout
    monkeypatch.chdir(folder)
    checked = CliRunner().invoke(app, ["env", "check", "--config", "train.toml"])
    assert checked.exit_code == 0 and "WordGame: fit" in checked.stdout, checked.stdout
    assert load(folder / "train.toml", RunConfig).environment[0].use == "word_game.py:WordGame"


def test_a_new_environment_replaces_nothing(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    again = CliRunner().invoke(app, ["env", "init", "word-game"])
    assert again.exit_code == 1 and "word-game exists already" in again.output
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    "name",
    ["", "Word", "word game", "../word", "word/game", "-word", "1word", "class", "random", "millstream", "a" * 65],
)
def test_a_name_that_cannot_be_a_package_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, ["env", "init", "--", name])
    assert found.exit_code == 1 and "Traceback" not in found.output and not list(tmp_path.iterdir())
