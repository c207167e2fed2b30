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

from millstream.rpc.forkserver import SOCKET_VARIABLE, import_variables
from millstream.run import garbage

settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, print_blob=True
)
settings.load_profile("default")
gc.set_threshold(50_000, 20, 50)  # imports make a million objects, and no garbage
typer.testing._get_command = functools.cache(typer.testing._get_command)  # all commands, 20 ms for every call of one

IMPORTED_WITH = import_variables(dict(os.environ))
LONGEST = (
    "test_paged.py", "test_engine.py", "test_http_engine.py", "test_fused.py", "test_scheduling_figures.py",
    "test_stages_for_real.py", "test_engine_conformance.py", "test_audit.py", "test_changes.py", "test_learner.py",
    "test_fleet.py", "test_recipes.py", "test_local.py", "test_speculation.py", "test_agents.py", "test_outside.py",
    "test_checkpoint.py", "test_training_service.py", "test_outside_engine.py", "test_advise.py", "test_tools.py",
    "test_replay.py", "test_synchronous.py", "test_sandbox.py", "test_models.py", "test_fsdp.py", "test_passes.py",
    "test_compare.py", "test_docs_parts.py", "test_scheduling.py", "test_calibrate.py", "test_agent_libraries.py",
    "test_env_init.py", "test_rewards.py", "test_lora.py", "test_plan.py", "test_audit_service.py",
    "test_mistakes.py", "test_critic.py", "test_faults.py", "test_responses.py", "test_sandbox_forgeries.py",
    "test_forkserver.py", "test_chaos.py", "test_resume.py", "test_store_model.py", "test_simulate.py",
    "test_rollouts.py", "test_store.py", "test_push.py",
)  # fmt: skip
"""Files that take eight seconds or more of CPU time, the longest first."""
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The processes of xdist take files in this order: the longest ones first, so that none of them is the last."""
    if hasattr(config, "workerinput"):
        places = {name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))


def pytest_collection_finish() -> None:
    """What test modules have imported stays: no garbage collection looks at it again, those of pytest at its end included. It
    is counted once, and not by every run."""
    gc.collect()
    gc.freeze()
    num_frozen = gc.get_freeze_count()
    garbage.count_frozen = lambda: num_frozen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """A test leaves what libraries read at import as it was. Otherwise the warm process would refuse every later worker of this
    process, and each would take 6 s of CPU to start."""
    yield
    left = import_variables(dict(os.environ))
    left.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)  # vLLM sets it when it is imported
    if left != IMPORTED_WITH:
        for name in left.keys() | IMPORTED_WITH.keys():
            os.environ.pop(name, None)
        os.environ.update(IMPORTED_WITH)
        pytest.fail(
            f"the test leaves the environment variables {left}, expected {IMPORTED_WITH}: use monkeypatch.setenv"
        )


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
