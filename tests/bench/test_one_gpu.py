"""bench/one_gpu.py: parts in their order, within a limit, over several calls."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

import one_gpu
from limited import GRACE_S
from one_gpu import read_outcomes, rows_of, run_parts, table
from one_gpu_parts import Part, plan
from report import alone

ROWS = msgspec.json.encode([alone("a load", "tokens/s", 5.0)]).decode()
PROGRAMS = {
    "works": f"print('''{ROWS}''')",
    "fails": "import sys; sys.exit('no GPU')",
    "lasts": "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])",
}


class Program(Part, frozen=True, kw_only=True):
    """A part that is no benchmark."""

    def words(self, given: object, left_s: float) -> list[str]:
        return [sys.executable, "-c", PROGRAMS[self.command.split()[0]]]


def program(name: str, *, expected_s: float = 1.0, limit_s: float = 60.0, needs: str = "") -> Program:
    return Program(name=name, letter="a", command=f"{name} {needs}", expected_s=expected_s, limit_s=limit_s)


def given(folder: Path) -> dict[str, str]:
    return {"folder": str(folder), "work": str(folder / "work")}


def statuses(folder: Path) -> dict[str, str]:
    return {name: outcome.status for name, outcome in read_outcomes(folder).items()}


@pytest.fixture(autouse=True)
def _has_little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_gpu, "GRACE_S", 0.0)


def test_a_later_call_continues_with_what_is_missing_and_failures_are_tried_again_if_asked(tmp_path: Path) -> None:
    parts = [program("works"), program("fails"), program("lasts", limit_s=0.5), program("later", needs="{model}")]
    run_parts(parts, given(tmp_path), tmp_path, 60.0)
    first = {"works": "measured", "fails": "failed", "lasts": "over its limit"}
    assert statuses(tmp_path) == first
    run_parts(parts, given(tmp_path), tmp_path, 60.0)
    assert len((tmp_path / "parts.jsonl").read_text().splitlines()) == 3, "nothing was missing"
    run_parts(parts, given(tmp_path), tmp_path, 60.0, is_retried=True)
    assert len((tmp_path / "parts.jsonl").read_text().splitlines()) == 5, (
        "the one that failed and the one over its limit"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts.jsonl", "work"]
    assert read_outcomes(tmp_path)["fails"].log == "no GPU"
    lines = list(table(parts, {}, tmp_path))
    assert lines[3].endswith("| failed no GPU |") and lines[5].endswith("| needs --model |")
    rows = {row.workload: row for row in rows_of(parts, tmp_path)}
    assert rows["a load"].ours == 5.0 and rows["later"].metric == "not measured: not reached"


def test_a_part_that_does_not_fit_is_left_and_one_that_the_call_ends_is_started_again(tmp_path: Path) -> None:
    parts = [program("fails", expected_s=100.0), program("lasts", expected_s=0.1), program("works", expected_s=50.0)]
    run_parts(parts, given(tmp_path), tmp_path, 1.0)
    assert statuses(tmp_path) == {"lasts": "ended by the call's limit"}
    run_parts(parts, given(tmp_path), tmp_path, 0.0)
    assert len((tmp_path / "parts.jsonl").read_text().splitlines()) == 1
    run_parts(parts, given(tmp_path), tmp_path, 1.0)
    assert len((tmp_path / "parts.jsonl").read_text().splitlines()) == 2


def test_every_part_fits_into_a_call_of_nine_minutes_and_has_a_name_of_its_own() -> None:
    parts = plan(300.0)
    assert len({part.name for part in parts}) == len(parts)
    assert [
        part.name for part in parts if not part.expected_s <= 540.0 - GRACE_S or part.limit_s < part.expected_s
    ] == []
    letters = [part.letter for part in parts]
    assert letters == sorted(letters) and set(letters) == set("abcdefg")


def test_parts_are_chosen_by_letters_and_by_words_in_their_names() -> None:
    chosen = [part.name for part in plan(300.0) if one_gpu.is_one_of(part, ["b", "log-normal", "1 of 3"])]
    assert len(chosen) == 6 and chosen[-1] == "quality 300 s, 1 of 3 together"
