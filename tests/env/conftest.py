"""Tests of sandboxes start fork bombs: while one file has them, other files of sandboxes wait."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="module")
def _one_file_of_sandboxes(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.path.name.startswith("test_sandbox"):
        yield
        return
    with (Path(tempfile.gettempdir()) / "millstream-tests-sandboxes").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
