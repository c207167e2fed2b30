"""Every command of a benchmark that a page or a benchmark itself shows, or that bench/one_gpu.py starts, is one that its parser
takes. Nothing is measured."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from one_gpu_parts import FOLDERS, PYTHONS, plan, smoke_plan

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
RUN = r"(?:[\w./-]*python )?bench/(\w+)\.py"
IN_LINE = re.compile(rf"`{RUN}( [^`]+)`")
ON_A_LINE = re.compile(rf"^(?: {{4}}|\$ )(?:[^`]*: )?{RUN}(.*(?:\n {{8,}}\[.*)*)$", flags=re.M)
PROSE = re.compile(r" {2,}(?![-\[ ]).*")
"""What an option does, after it and on the same line."""
HAS_PARSER = re.compile(r"\b(ArgumentParser|Options)\(")


def shown_in(text: str) -> Iterator[str]:
    text = text.replace("\\\n", " ")
    for name, words in [*IN_LINE.findall(text), *ON_A_LINE.findall(text)]:
        arguments = shlex.split(PROSE.sub("", re.sub(r"\n *", " ", words)), comments=True)
        chosen = [word.strip("[]") for word in arguments if word.strip("[]") != "..."]
        if HAS_PARSER.search((ROOT / f"bench/{name}.py").read_text()):
            yield shlex.join([name, *chosen])


def commands() -> list[str]:
    texts = [page.read_text() for page in PAGES]
    for path in sorted((ROOT / "bench").glob("*.py")):
        texts.append(ast.get_docstring(ast.parse(path.read_text())) or "")
    given = dict.fromkeys([*FOLDERS, *PYTHONS, "folder", "work"], "GIVEN")
    planned = (shlex.join([part.script, *part.words(given, 300.0)[2:]]) for part in [*plan(300.0), *smoke_plan()])
    return sorted({*(command for text in texts for command in shown_in(text)), *planned})


@pytest.mark.parametrize("command", commands())
def test_every_command_of_a_benchmark_that_is_shown_is_one_that_its_parser_takes(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *words = shlex.split(command)
    parse = argparse.ArgumentParser.parse_args

    class ParsedError(Exception):
        pass

    def parse_only(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        parse(self, args, namespace)
        raise ParsedError

    if importlib.util.find_spec("trl") is None:
        monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(GRPOConfig=None, GRPOTrainer=None))
    module = importlib.import_module(name)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr(sys, "argv", [name, *words])
    with pytest.raises((ParsedError, SystemExit)) as ended:
        module.main()
    assert ended.type is ParsedError, capsys.readouterr().err


def test_the_commands_of_pages_are_found() -> None:
    found = commands()
    assert len(found) > 60
    alone = "time_to_quality run FILE --modes 2 --seeds 2 --seconds 45 --trl-seconds 80 --points 9"
    assert f"{alone} --set model.path=FOLDER/SmolLM2-135M-Instruct" in found
