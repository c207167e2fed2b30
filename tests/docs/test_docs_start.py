"""The pages that a newcomer reads first: their commands exist, their figures are those of the code, and nothing is left out."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from millstream.algo.presets import LOSSES
from millstream.cli.main import app
from millstream.config import load
from millstream.run.check import check_combinations
from millstream.run.config import RunConfig

ROOT = Path(__file__).parents[2]
START = ("quick-start", "max-lag", "recipes", "your-own", "concepts")
COMMAND = re.compile(r"^    (millstream .*)$|`(millstream [a-z][^`]*)`", flags=re.M)
ARXIV = re.compile(r"\b[12]\d{3}\.\d{5}\b")


def page(name: str) -> str:
    return (ROOT / f"docs/{name}.md").read_text()


def commands() -> list[str]:
    found = [line or words for name in START for line, words in COMMAND.findall(page(name))]
    return sorted(set(found))


@pytest.mark.parametrize("command", commands())
def test_every_command_of_these_pages_is_one_with_these_options(command: str) -> None:
    words = shlex.split(command)[1:]
    name = words[:2] if words[0] == "env" else words[:1]
    shown = CliRunner().invoke(app, [*name, "--help"], terminal_width=200)
    assert shown.exit_code == 0, shown.output
    missing = [word for word in words if word.startswith("--") and word.partition("=")[0] not in shown.output]
    assert missing == [], f"{command}: not among the options of millstream {' '.join(name)}"


@pytest.mark.parametrize("recipe", sorted(set(re.findall(r"--recipe ([\w/]+)", page("quick-start")))))
def test_every_recipe_of_the_quick_start_is_copied_and_is_a_valid_config(recipe: str, tmp_path: Path) -> None:
    written = CliRunner().invoke(app, ["init", "--recipe", recipe, str(tmp_path / "run.toml")])
    assert written.exit_code == 0, written.output
    check_combinations(load(tmp_path / "run.toml", RunConfig))


def test_the_simulated_seconds_and_lags_of_max_lag_are_those_of_the_simulator() -> None:
    recipe = ROOT / "recipes/sim/one_gpu.toml"
    for lag in ("0", "2"):
        result = CliRunner().invoke(app, ["sim", str(recipe), "--set", f"pipeline.max_lag={lag}", "--json"])
        summary = msgspec.json.decode(result.stdout)["summary"]
        (seconds, mean) = re.findall(rf"^\| {lag} \| ([\d.]+) \| [\d.]+x \| ([\d.]+) \|$", page("max-lag"), flags=re.M)[
            0
        ]
        assert (seconds, mean) == (f"{summary['seconds']:.1f}", f"{summary['lag_mean']:.2f}")


def test_the_readme_and_the_makefile_name_the_python_versions_of_the_package() -> None:
    versions = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    named = f"Python {', '.join(versions[:-1])} or {versions[-1]}"
    assert all(named in (ROOT / file).read_text() for file in ("README.md", "Makefile"))


def test_every_recipe_is_on_the_page_of_recipes() -> None:
    text = page("recipes")
    names = sorted(path.stem for path in (ROOT / "recipes").glob("*.toml"))
    assert [name for name in names if f"recipes/{name}.toml" not in text] == []


def test_every_paper_that_the_algorithms_name_and_every_loss_is_among_the_papers_to_cite() -> None:
    text = page("citing")
    code = "".join(path.read_text() for path in sorted((ROOT / "src/millstream/algo").glob("*.py")))
    assert sorted(set(ARXIV.findall(code)) - set(ARXIV.findall(text))) == []
    assert [loss for loss in LOSSES if loss != "reinforce" and f'loss = "{loss}"' not in text] == []


def test_the_comparison_says_for_every_system_which_commit_of_which_day_was_read() -> None:
    text = page("comparison")
    rows = re.findall(
        r"^\| ([\w-]+) \| \w[\w.-]*/[^|]* \| [^|]+ \| [0-9a-f]{8,} \| \d{4}-\d\d-\d\d \|$", text, flags=re.M
    )
    bounds = text.partition("## How staleness is bounded")[2].partition("\n## ")[0]
    systems = {re.split(r"[ ,(]", row)[0] for row in re.findall(r"^\| ([^|]+) \|", bounds, flags=re.M)}
    assert systems - {"system", "---", "Millstream", "---|---|---|---"} == set(rows)
