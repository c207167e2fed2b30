from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of numpy and torch spin while other tests have the cores

import pytest
import typer.testing
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, print_blob=True
)
settings.load_profile("default")
gc.set_threshold(50_000, 20, 50)  # imports make a million objects, and no garbage
typer.testing._get_command = functools.cache(typer.testing._get_command)  # all commands, 20 ms for every call of one

SOCKET_VARIABLE = "MILLSTREAM_FORKSERVER"
WARM = pytest.StashKey[tuple[subprocess.Popen[bytes], tempfile.TemporaryDirectory[str]]]()


def pytest_configure(config: pytest.Config) -> None:
    """One warm process (`millstream.rpc.forkserver`) for the session: its tests, and the runs that they start. The processes of
    xdist inherit it. It imports nothing large before a test needs a worker."""
    if SOCKET_VARIABLE in os.environ or hasattr(config, "workerinput"):
        return
    folder = tempfile.TemporaryDirectory(prefix="millstream-tests-")
    os.environ["XDG_CACHE_HOME"] = str(Path(folder.name) / "cache")
    checked = Path(folder.name) / "cache/millstream/checked"
    checked.parent.mkdir(parents=True)
    if hasattr(config, "cache"):  # start-up checks of models are made once, until the code or a library changes
        checked.symlink_to(config.cache.mkdir("checked-models"))
    os.environ[SOCKET_VARIABLE] = str(Path(folder.name) / "socket")
    words = [sys.executable, "-m", "millstream.rpc.forkserver", os.environ[SOCKET_VARIABLE], "support"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    process = subprocess.Popen(words, stdin=subprocess.PIPE, process_group=0, env=environment)
    config.stash[WARM] = (process, folder)


def pytest_collection_finish() -> None:
    """What test modules have imported stays: no garbage collection looks at it again, those of pytest at its end included."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    if WARM in config.stash:
        process, folder = config.stash[WARM]
        process.communicate()
        folder.cleanup()


@pytest.fixture
def own_warm_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For this test alone: its children are the command that the test starts and the workers of that command."""
    from support import commands

    with commands.own_warm_process() as socket:
        monkeypatch.setenv(SOCKET_VARIABLE, socket)
        yield
