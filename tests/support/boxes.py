"""Programs in the sandbox behind every kind of walls, as root, as root without the right to make namespaces, and as an ordinary
user: many of them by one driver process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

import millstream

DRIVER = Path(__file__).with_name("box_driver.py")
# Who runs the sandbox, and behind which walls: by default, and with `-m slow`.
PLACES = (("root", "root"), ("bare root", "user"), ("user", "user"), ("user", "none"))
MORE_PLACES = (("root", "user"), ("root", "none"), ("bare root", "none"))
LIMITS = {"memory_bytes": 256 << 20, "scratch_bytes": 4 << 20, "file_bytes": 2 << 20, "processes": 24}


def cases(names: Iterable[str], by_default: Sequence[str]) -> list[Any]:
    """Parameters: every place with every name; slow, if the place or the name is not tried by default."""
    return [
        pytest.param(*place, name, marks=() if place in PLACES and name in by_default else pytest.mark.slow)
        for place in (*PLACES, *MORE_PLACES)
        for name in names
    ]


def drive(
    identity: str, walls: str, jobs: Sequence[dict[str, Any]], *, wall_s: float = 60.0, at_once: int = 4
) -> list[Any]:
    """What each job has come to. Skips where this identity cannot be taken, or these walls cannot be had."""
    if identity != "user" and os.geteuid() != 0:
        pytest.skip(f"walls {walls!r} as {identity!r}: the tests are not run by root")
    package = Path(millstream.__file__).parent
    whole = [{"walls": walls, "limits": {**LIMITS, "wall_s": wall_s}, **job} for job in jobs]
    ran = subprocess.run(
        [sys.executable, str(DRIVER), identity],
        input=json.dumps({"jobs": whole, "at_once": at_once}),
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(package.parent), "BOX_INSIDE": str(package / "env/sandbox")},
        cwd="/",
        timeout=240,
    )
    if "SandboxBroken: the sandbox cannot be set up" in ran.stderr:
        pytest.skip(f"walls {walls!r} cannot be had as {identity!r}: {ran.stderr.splitlines()[-1]}")
    assert ran.returncode == 0, ran.stderr
    answers: list[Any] = json.loads(ran.stdout)
    return answers
