"""A user's second day is walked to its end. From a wheel in a clean environment: `make second-day`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import second_day
from support.commands import run_command

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_second_day_is_walked_with_the_installed_package() -> None:
    out = run_command([sys.executable, str(ROOT / "examples/second_day.py")], timeout=500)
    assert out.returncode == 0, out.stdout + out.stderr
    assert out.stdout.rstrip().endswith(f"{len(second_day.STEPS)} passed, 0 failed")


def test_every_step_is_listed_once_and_says_what_it_is() -> None:
    steps = second_day.STEPS
    assert len({step.__name__ for step in steps}) == len(steps) and all(step.__doc__ for step in steps)
