"""NVIDIA's MPS for a run whose engine and learner are two processes on one GPU. Without it their kernels never run at the same
time.

CUDA looks for the daemon of MPS when a process first uses it. So the daemon is started, and the environment of this process
set, before that; processes that it starts inherit it. The daemon is this process's own, in a fresh folder, and ends with it:
what has used CUDA through it cannot use CUDA without it. A keeper waits at a pipe for the end of this process, normal, by an
error or by `kill -9`, then ends the daemon and removes the folder. Where there is a daemon already, that one is used.

The learner gets a share of the multiprocessors (`CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`), the engine all of them.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from millstream.model.gpu_share import TRAINING_SHARE
from millstream.run.config import RunConfig
from millstream.run.device import visible_gpus
from millstream.run.places import VISIBLE

logger = logging.getLogger(__name__)
CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
ALL = "100"
START_S = 20.0
END_S = 40.0
ANSWER_S = 10.0
ENDED_S = 10.0
POLL_S = 0.5
CLIENT_S = 60.0  # the first client starts the server
KEEPER = f"""
{CONTROL} -d < /dev/null > "$1/start.log" 2>&1 || exit 1
echo started
exec > /dev/null 2>&1
cat
echo quit | timeout 30 {CONTROL} || kill "$(cat "$1/nvidia-cuda-mps-control.pid")"
rm -rf "$1"
"""
CLIENT = """
import ctypes, sys
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
failed = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
failed = failed or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
sys.exit(f"the driver gave {failed}" if failed else 0)
"""
NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


class Mps:
    """The daemon that this process uses, if any. `client`: a program that uses CUDA, and exits with 0 if it could."""

    def __init__(self, client: Sequence[str] = (sys.executable, "-c", CLIENT)) -> None:
        self._client = client
        self._keeper: subprocess.Popen[bytes] | None = None
        self._pipe: int | None = None  # closed by the kernel when this process ends, and not before
        self._is_tried = False
        self._has_set_share = False
        self._lock = threading.Lock()

    def prepare(self, config: RunConfig) -> None:
        """Before this process uses CUDA: a daemon for a run that gains by it. Where there can be none, a warning says why,
        once, and the run does without."""
        with self._lock:
            if self._is_tried or not wants_mps(config):
                return
            self._is_tried = True
            if why := self._start():
                logger.warning("engine and learner take turns on the GPU, which slows both down: no MPS, since %s", why)
                return
            share = mps_share(config)
            if share < 1 and PERCENTAGE not in os.environ:
                os.environ[PERCENTAGE] = str(round(100 * share))
                self._has_set_share = True
            logger.info("MPS: the learner has %s%% of the multiprocessors", os.environ.get(PERCENTAGE, ALL))

    def engine_environment(self) -> dict[str, str]:
        """What an engine's process gets on top of this process's."""
        return {PERCENTAGE: ALL} if self._has_set_share else {}

    def _start(self) -> str:
        """Why there is no daemon; empty: there is one, and this process's environment names it."""
        if shutil.which(CONTROL) is None:
            return f"{CONTROL} is not on the PATH"
        if _uses_cuda():
            return "this process has used CUDA before the run: start the run in a process of its own"
        if _answers():
            return ""
        if others := _others():
            return f"other processes use the GPU ({', '.join(others)})"
        folder = tempfile.mkdtemp(prefix="millstream-mps-")
        own = {PIPES: folder, LOGS: folder}
        plain = {name: value for name, value in os.environ.items() if name not in (VISIBLE, PERCENTAGE)}
        reading, self._pipe = os.pipe()
        self._keeper = subprocess.Popen(
            ["sh", "-c", KEEPER, "sh", folder],
            env={**plain, **own},  # the daemon knows all GPUs by their own numbers
            stdin=reading,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        os.close(reading)
        if why := self._why_not({**os.environ, **own}):
            self.end()
            shutil.rmtree(folder, ignore_errors=True)
            return why
        os.environ.update(own)
        return ""

    def end(self) -> None:
        """End the daemon of this process, if it has one, before this process ends: where nothing has used CUDA through it."""
        if self._keeper is not None and self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
            with suppress(subprocess.TimeoutExpired):
                self._keeper.communicate(timeout=END_S)

    def _why_not(self, environment: dict[str, str]) -> str:
        assert self._keeper is not None and self._keeper.stdout is not None
        is_there = select.select([self._keeper.stdout], [], [], START_S)[0]
        if not is_there or not self._keeper.stdout.readline():
            return f"{CONTROL} -d did not start a daemon"
        try:
            subprocess.run(self._client, env=environment, capture_output=True, text=True, timeout=CLIENT_S, check=True)
        except subprocess.CalledProcessError as error:
            return f"a process cannot use CUDA through it: {error.stderr.strip()}"
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"a process cannot use CUDA through it: {error}"
        return ""


MPS = Mps()  # of this process


def wants_mps(config: RunConfig) -> bool:
    """Whether engine and learner are two processes on one GPU."""
    engine = config.engine
    is_here = config.runtime == "local" and config.model.device != "cpu"
    if not is_here or engine.kind != "torch" or not engine.process or engine.mps == "off":
        return False
    gpus = visible_gpus()
    return bool(gpus) and min(len(gpus), config.resources.gpus or len(gpus)) == 1


def mps_share(config: RunConfig) -> float:
    """Of the multiprocessors, for the learner's process. With all of them its long kernels leave no place for the short ones of
    a decode step, however many requests there are."""
    if config.learner.gpu_share is not None:
        return config.learner.gpu_share
    return TRAINING_SHARE if config.pipeline.max_lag > 0 else 1.0


def _answers() -> bool:
    """Whether there is a daemon that processes with this environment use."""
    try:
        asked = subprocess.run([CONTROL], input=b"get_server_list\n", capture_output=True, timeout=ANSWER_S)
        return asked.returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _uses_cuda() -> bool:
    try:
        count = ctypes.c_int()
        return bool(ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count)) != NOT_INITIALIZED)
    except (OSError, AttributeError):
        return False


def _others() -> list[str]:
    """The numbers of processes that use the GPU for longer than those of a run that has just ended."""
    until = time.monotonic() + ENDED_S
    while (found := _processes()) and time.monotonic() < until:
        time.sleep(POLL_S)
    return found


def _processes() -> list[str]:
    """As far as the driver's tool says."""
    which = [] if VISIBLE not in os.environ else [f"--id={os.environ[VISIBLE]}"]
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader", *which]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in found.stdout.splitlines() if line.strip().isdigit()]
