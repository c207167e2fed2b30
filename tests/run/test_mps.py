"""Engine and learner as two processes on one GPU under MPS: with a driver's tool and a daemon that are shell scripts."""

from __future__ import annotations

import logging
import os
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millstream.config import convert
from millstream.run import mps
from millstream.run.config import RunConfig
from millstream.run.mps import LOGS, PERCENTAGE, PIPES, Mps, mps_share
from support.commands import start_command

CONTROL = """#!/bin/sh
here="$(dirname "$0")"
if [ "$1" = -d ]; then
  [ -e "$here/refuses" ] && exit 1
  env | grep '^CUDA' | sort > "$here/daemon"
  sleep 600 > /dev/null 2>&1 &
  echo $! > "$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"
  exit 0
fi
pid="$(cat "${CUDA_MPS_PIPE_DIRECTORY:-/nonexistent}/nvidia-cuda-mps-control.pid" 2> /dev/null)" || exit 1
while read word; do
  case "$word" in
    get_server_list) echo "$pid" ;;
    quit) kill "$pid"; echo quit >> "$here/quits" ;;
  esac
done
"""
TOOL = """#!/bin/sh
case "$*" in
  *compute-apps*) cat "$(dirname "$0")/others" ;;
  *) cat "$(dirname "$0")/gpus" ;;
esac
"""
USES_CUDA = ["sh", "-c", 'env | grep "^CUDA" | sort > "$(dirname "$(command -v nvidia-smi)")/client"']
PROGRAM = """
import os
from pathlib import Path
from millstream import DataConfig, EngineConfig, ModelConfig, RunConfig
from millstream.run.mps import PIPES, Mps
own = Mps(["true"])
own.prepare(RunConfig(model=ModelConfig(path="model"), data=DataConfig(toy="sort_digits"), engine=EngineConfig(process=True, mps="auto")))
print((Path(os.environ[PIPES]) / "nvidia-cuda-mps-control.pid").read_text().strip(), os.environ[PIPES], flush=True)
{end}
"""


def run(text: str = "[engine]\nprocess = true\nmps = 'auto'\n[pipeline]\nmax_lag = 2") -> RunConfig:
    return convert(tomllib.loads(f"{text}\n[model.tiny]\n[data]\ntoy = 'sort_digits'\n"), RunConfig, where="run.toml")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One GPU that no process uses, and a daemon that can be started: the folder of both scripts."""
    for name, text in (("nvidia-cuda-mps-control", CONTROL), ("nvidia-smi", TOOL), ("others", ""), ("gpus", "80000\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name in (PIPES, LOGS, PERCENTAGE, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # so that what the run sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(mps, "ENDED_S", 0.0)
    yield tmp_path


def ended(pid: int, folder: Path) -> bool:
    """Whether the daemon and its folder are gone, soon."""
    until = time.monotonic() + 30
    while (_is_alive(pid) or folder.exists()) and time.monotonic() < until:
        time.sleep(0.01)
    return not _is_alive(pid) and not folder.exists()


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def daemon_of(folder: Path) -> int:
    return int((folder / "nvidia-cuda-mps-control.pid").read_text())


def test_the_learner_has_a_share_of_the_gpu_and_the_engine_s_process_all_of_it(machine: Path) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    own = Mps(USES_CUDA)
    own.prepare(run())
    folder = Path(os.environ[PIPES])
    pid = daemon_of(folder)
    assert os.environ[LOGS] == str(folder) and os.environ[PERCENTAGE] == "61"
    assert own.engine_environment() == {PERCENTAGE: "100"}
    assert (machine / "daemon").read_text().split() == [f"{LOGS}={folder}", f"{PIPES}={folder}"], "it limits nothing"
    seen = [f"{LOGS}={folder}", f"{PIPES}={folder}", "CUDA_VISIBLE_DEVICES=0"]
    assert (machine / "client").read_text().split() == seen, "it was tried before this process uses it"
    own.prepare(run())
    assert Path(os.environ[PIPES]) == folder, "a second run of this process uses the same"
    own.end()
    assert ended(pid, folder) and (machine / "quits").read_text() == "quit\n"


@pytest.mark.parametrize("end", ["", "raise RuntimeError", "os.kill(os.getpid(), 9)"])
def test_the_daemon_ends_with_the_process_that_started_it_however_that_ends(machine: Path, end: str) -> None:
    process = start_command([sys.executable, "-c", PROGRAM.format(end=end)])
    pid, folder = process.communicate(timeout=60)[0].splitlines()[0].split()
    assert ended(int(pid), Path(folder)) and (machine / "quits").read_text() == "quit\n"


@pytest.mark.parametrize(
    ("why", "break_it"),
    [
        ("not on the PATH", lambda folder: (folder / "nvidia-cuda-mps-control").unlink()),
        ("other processes use the GPU (4711)", lambda folder: (folder / "others").write_text("4711\n")),
        ("did not start a daemon", lambda folder: (folder / "refuses").touch()),
    ],
)
def test_a_run_without_a_daemon_says_why_once(
    machine: Path, caplog: pytest.LogCaptureFixture, why: str, break_it: Callable[[Path], object]
) -> None:
    break_it(machine)
    own = Mps(["true"])
    with caplog.at_level(logging.WARNING):
        own.prepare(run())
        own.prepare(run())
    assert [why in record.getMessage() for record in caplog.records] == [True]
    assert PIPES not in os.environ and PERCENTAGE not in os.environ and own.engine_environment() == {}


def test_a_daemon_that_no_process_can_use_is_ended_again(machine: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = Mps(["sh", "-c", 'echo "the driver gave 805" >&2; exit 1'])
    own.prepare(run())
    assert "the driver gave 805" in caplog.text and PIPES not in os.environ
    assert (machine / "quits").read_text() == "quit\n"


def test_a_daemon_of_the_user_s_is_used_and_not_ended(machine: Path) -> None:
    theirs = Mps(["true"])
    theirs.prepare(run())
    folder, share = os.environ[PIPES], os.environ.pop(PERCENTAGE)
    own = Mps(["true"])
    own.prepare(run("[engine]\nprocess = true\nmps = 'auto'\n[learner]\ngpu_share = 0.5\n[pipeline]\nmax_lag = 2"))
    assert os.environ[PIPES] == folder
    own.end()
    assert not (machine / "quits").exists()
    assert (share, os.environ[PERCENTAGE]) == ("61", "50")
    pid = daemon_of(Path(folder))
    theirs.end()
    assert ended(pid, Path(folder))


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("", 1),
        ("[engine]\nprocess = true", 1),
        ("[engine]\nprocess = true\nmps = 'auto'", 2),
        ("[engine]\nprocess = true\nmps = 'auto'", 0),
        ("[engine]\nkind = 'vllm'\nprocess = true\nmps = 'auto'", 1),
        ("runtime = 'ray'", 1),
    ],
)
def test_other_runs_start_no_daemon(machine: Path, text: str, gpus: int, caplog: pytest.LogCaptureFixture) -> None:
    (machine / "gpus").write_text("80000\n" * gpus)
    Mps(["true"]).prepare(run(text))
    assert PIPES not in os.environ and not (machine / "daemon").exists() and not caplog.records


def test_the_share_of_the_learner_is_the_config_s_or_that_which_was_measured() -> None:
    assert mps_share(run()) == 0.61
    assert mps_share(run("[pipeline]\nmax_lag = 2\ngroups_per_step = 512")) == 0.61, "however many requests there are"
    assert mps_share(run("[pipeline]\nmax_lag = 0")) == 1.0
    assert mps_share(run("[learner]\ngpu_share = 1.0\n[pipeline]\nmax_lag = 2")) == 1.0
