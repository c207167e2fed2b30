"""Temporary folders and their owners."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream import folders
from millstream.store import Reads
from millstream.store.host import make_plan


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@contextmanager
def another(program: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A process that says something and lives on, and what it said."""
    words = [sys.executable, "-c", f"{program}\nimport time\ntime.sleep(600)"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().split()
        finally:
            process.kill()


def test_a_folder_stays_while_its_owner_lives_and_goes_when_the_next_is_made_after_a_kill() -> None:
    program = "from millstream import folders; print(folders.make('some-'), flush=True)"
    with another(program) as (process, said):
        theirs = Path(said[0])
        ours = folders.make("some-")
        assert theirs.is_dir()
        process.kill()
        process.wait()
        gone: list[Path] = []
        last = folders.make("some-", gone.append)
        assert gone == [theirs] and not theirs.exists()
    assert ours.is_dir() and last.is_dir()
    folders.remove(ours)
    folders.remove(last)
    assert not ours.exists() and not last.exists()


def test_what_others_have_made_under_such_a_name_is_left_alone(tmp_path: Path) -> None:
    stranger = tmp_path / "some-stranger"
    stranger.mkdir()
    folders.remove(folders.make("some-", name="named"))
    assert stranger.is_dir()


def test_the_memory_of_a_store_whose_owner_was_killed_goes_with_the_next_store() -> None:
    program = (
        "from pathlib import Path\nfrom millstream.store.host import make_plan\nplan = make_plan({})\n"
        "Path(plan.memory).mkdir()\nprint(plan.journal, plan.memory, flush=True)"
    )
    with another(program) as (process, said):
        left = [Path(one) for one in said]
        assert len(left) == 2 and all(one.is_dir() for one in left)
        process.kill()
        process.wait()
        plan = make_plan({"train": Reads(("tokens",))})
        assert not any(one.exists() for one in left)
        folders.remove(Path(plan.journal))
