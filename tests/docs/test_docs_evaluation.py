"""The config and the commands of docs/evaluation.md."""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

from millstream.cli.main import app
from millstream.config import load
from millstream.run.check import check_combinations
from millstream.run.config import EvaluationConfig, RunConfig

PAGE = (Path(__file__).parents[2] / "docs/evaluation.md").read_text()


def test_the_config_of_the_page_is_one_that_a_run_takes(tmp_path: Path) -> None:
    (table,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "run.toml").write_text('[model.tiny]\n[data]\ntoy = "sort_digits"\n' + table)
    config = load(tmp_path / "run.toml", RunConfig)
    check_combinations(config)
    assert [one.name for one in config.evaluations] == ["held_out", "competition"]


def test_every_key_of_an_evaluation_is_on_the_page() -> None:
    assert all(re.search(rf"`(\[\[evaluation\.)?{name}(\]\])?`", PAGE) for name in EvaluationConfig.__struct_fields__)


def test_every_option_on_the_page_is_one_of_the_command() -> None:
    shown = CliRunner().invoke(app, ["eval", "--help"], env={"COLUMNS": "200"}).output
    commands = re.findall(r"^    millstream eval (.*)$", PAGE, re.MULTILINE)
    assert len(commands) >= 5
    assert all(option in shown for command in commands for option in re.findall(r"--\w+", command))
