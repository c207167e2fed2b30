"""The table of models in docs/models.md is what the check finds today."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
CHECKED = ("llama", "qwen2_moe", "phi3", "diffllama", "bert")
"""One of each verdict: right, wrong with a window, a rope that is cut, right in the learner alone, wrong."""


@pytest.fixture
def models() -> Any:
    if f"transformers {transformers.__version__}:" not in PAGE.read_text():
        pytest.skip("the table is of another version of transformers")
    return importlib.import_module("models")


def rows() -> dict[str, str]:
    return {line.split(" | ")[0].removeprefix("| "): line for line in PAGE.read_text().splitlines() if "|" in line}


@pytest.mark.parametrize("kind", CHECKED)
def test_a_row_of_the_table_is_what_the_check_finds(kind: str, models: Any) -> None:
    assert models.line_of(models.try_kind(kind)) == rows()[kind]


def test_every_causal_lm_of_the_library_has_a_row_and_each_is_right_or_has_a_reason(models: Any) -> None:
    table = rows()
    for kind in models.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        cells = [cell.strip() for cell in table[kind].strip("| ").split("|")]
        is_right = cells[1:4] == ["right"] * 3
        assert is_right or re.search(r"\w", table[kind].rstrip("| ").rpartition("|")[2]), table[kind]


@pytest.mark.slow
def test_every_row_of_the_table_is_what_the_check_finds_without_its_variants(models: Any) -> None:
    table = rows()
    for kind in models.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        found = models.line_of(models.try_kind(kind, has_variants=False)).split(" | ")
        assert found[:4] == table[kind].split(" | ")[:4], kind
