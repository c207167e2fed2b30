"""A run whose processes are killed: started and resumed through the command line, followed by its events.

It is observed from outside only: its event log, its run folder, and the processes of the machine.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

import run_parts

GROUPS = 4
GROUP_SIZE = 4
ENGINES = ("engine-0", "engine-1")
LOCAL_ENGINES = ("engine",)
COORDINATOR = "ray::_CoordinatorActor"
SETTINGS = {"PYTHONUNBUFFERED": "1", "RAY_worker_niceness": "0"}
"""By default Ray gives its workers a low priority."""
POLL_S = 0.001
GONE_S = 60.0
"""For processes to follow a driver that was killed."""
HELPERS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Ray's own, one of each a node: when its other processes are gone, they try for a minute to reach the cluster, then end."""
HELPERS_S = 120.0


class Failed(Exception):
    """A promise was broken; the message says which."""


def config_of(
    run_dir: Path, *, steps: int, seed: int, address: str | None, is_local: bool = False, num_workers: int = 0
) -> str:
    """Two engines, two ranks, environments and rewards in processes; a checkpoint after every step. `address`: of a cluster of
    several nodes, over which they are spread. Local: without Ray, all of it in the driver, but for the workers of rollouts and
    their engine. `num_workers`: of rollouts."""
    data = run_dir.with_suffix(".jsonl")
    data.write_text("".join(json.dumps(task) + "\n" for task in run_parts.tasks(1000, seed)))
    on = "" if address is None else f'address = "{address}"\nspread = "spread"\nweights = ["shared", "broadcast"]'
    return f"""
seed = {seed}
runtime = "{"local" if is_local else "ray"}"
run_dir = "{run_dir}"
[model.tiny]
hidden = 32
layers = 2
heads = 4
context = 64
alphabet = "{run_parts.ALPHABET}"
[data]
path = "{data}"
holdout = 4
[[environment]]
use = "{run_parts.HERE}:Counting"
name = "counting"
{"" if is_local else "process = true"}
max_concurrent = 4
[[environment]]
use = "single_turn"
[[reward]]
function = "{run_parts.HERE}:closeness"
{"" if is_local else f"process = true{chr(10)}workers = 2"}
[engine]
slots = 32
{f"process = {str(num_workers > 0).lower()}" if is_local else f"replicas = {len(ENGINES)}"}
[rollout]
group_size = {GROUP_SIZE}
max_tokens = 6
retries = 4
workers = {num_workers}
[pipeline]
steps = {steps}
groups_per_step = {GROUPS}
max_lag = 2
deadline_s = 240.0
[algorithm]
loss = "ppo"
clip_high = 0.28
[learner]
ranks = {1 if is_local else 2}
learning_rate = 4e-4
micro_batch_tokens = 256
[checkpoint]
every_steps = 1
{"" if is_local else f"[resources]{chr(10)}{on}"}
"""


class Started(NamedTuple):
    worker: str
    what: str
    process: psutil.Process
    """Which knows when it was started: another one that gets its number later is not taken for it."""
    node: str


class Books:
    """What the events so far say of a run."""

    def __init__(self, engines: Sequence[str] = ENGINES, *, are_there: bool = False) -> None:
        """`are_there`: no event says that they have started."""
        self.engines = frozenset(engines)
        self.version = 0
        self.num_steps = 0
        self.num_taken = 0
        self.num_events = 0
        self.in_flight: set[tuple[int, int]] = set()
        self.loaded: dict[str, int] = {}
        self.serving: set[str] = set(engines) if are_there else set()
        self.started: dict[int, Started] = {}
        self.nodes: set[str] = set()
        self.stepped_at: deque[float] = deque(maxlen=20)
        self.outcome: str | None = None
        self.counts: dict[str, int] = {}
        self.said: list[str] = []

    def add(self, event: dict[str, Any]) -> None:
        self.num_events += 1
        kind = event["kind"]
        self.counts[kind] = self.counts.get(kind, 0) + 1
        match kind:
            case "worker_started":
                self._start(event["worker"], event["what"], event["pid"], event["node"])
            case "rollout_started":
                self.in_flight.add((event["group_id"], event["member"]))
            case "rollout_ended" | "rollout_failed" | "rollout_aborted":
                self.in_flight.discard((event["group_id"], event["member"]))
            case "group_taken":
                self.num_taken += 1
            case "stepped":
                self.version = event["version"]
                self.num_taken = 0
                self.num_steps += 1
                self.stepped_at.append(time.monotonic())
            case "weights_loaded":
                self.loaded[event["engine"]] = event["version"]
            case "replica_left":
                self.serving.discard(event["engine"])
            case "replica_joined":
                self.serving.add(event["engine"])
            case "resumed":
                self.in_flight.clear()
                self.serving = set(self.engines)
                self.version = event["version"]
                self.num_taken = 0
                self.outcome = None
                self.loaded = dict.fromkeys(self.engines, self.version)
            case "run_ended":
                self.outcome = event["outcome"]
            case "warned" | "checkpoint_failed":
                self.said.append(f"{kind}: {event['message']}")

    def _start(self, worker: str, what: str, pid: int, node: str) -> None:
        with suppress(psutil.Error):  # it may be gone already
            self.started[pid] = Started(worker, what, psutil.Process(pid), node)
        self.nodes.add(node)
        if what == "engine" and worker not in self.loaded:  # one that replaces another says when it joins
            self.serving.add(worker)
            self.loaded[worker] = 0

    @property
    def is_publishing(self) -> bool:
        return any(self.loaded.get(engine, 0) < self.version for engine in self.serving)


class Run:
    """One run folder, over as many resumed drivers as it takes."""

    def __init__(
        self,
        run_dir: Path,
        *,
        steps: int,
        seed: int,
        address: str | None = None,
        is_local: bool = False,
        num_workers: int = 0,
    ) -> None:
        self.run_dir = run_dir
        self.log = run_dir.with_suffix(".log")
        self.steps = steps
        self.books = Books(LOCAL_ENGINES if is_local else ENGINES, are_there=is_local)
        self._config = run_dir.with_suffix(".toml")
        self._config.write_text(
            config_of(run_dir, steps=steps, seed=seed, address=address, is_local=is_local, num_workers=num_workers)
        )
        self._offset = 0
        self._helpers: set[psutil.Process] = set()
        self.seen: set[psutil.Process] = set()
        """All processes that were ever found working for it."""
        self.start()

    def start(self) -> None:
        """From the beginning, or from the newest checkpoint."""
        words = [sys.executable, "-m", "millstream.cli.main", "train", "--quiet"]
        words += ["--resume", str(self.run_dir)] if (self.run_dir / "events.jsonl").exists() else [str(self._config)]
        with self.log.open("ab") as log:
            self.driver = subprocess.Popen(words, stdout=log, stderr=log, env={**os.environ, **SETTINGS})

    # ---- what it is doing --------------------------------------------------------------------------------------------

    def read(self) -> Books:
        """Up to now."""
        path = self.run_dir / "events.jsonl"
        if path.exists():
            if path.stat().st_size < self._offset:
                self._offset = path.stat().st_size  # a resumed life cut off a line that was half written, and half read
            with path.open("rb") as file:
                file.seek(self._offset)
                whole = file.read().rpartition(b"\n")
            self._offset += len(whole[0]) + len(whole[1])
            for line in whole[0].splitlines():
                self.books.add(json.loads(line))
        return self.books

    @property
    def is_writing(self) -> bool:
        return any((self.run_dir / "checkpoints").glob(".step-*.tmp"))

    def is_at(self, moment: str) -> bool:
        books = self.read()
        match moment:
            case "generating":
                is_busy = books.num_taken or books.is_publishing or self.is_writing
                return bool(books.in_flight) and not is_busy
            case "training":
                return books.num_taken >= GROUPS // 2
            case "publishing":
                return books.is_publishing
            case "checkpointing":
                return self.is_writing
        raise ValueError(moment)

    def until(self, claim: Callable[[], bool], what: str, timeout_s: float, poll_s: float = POLL_S) -> None:
        """Raises `Failed` if it does not come to that, or the run ends before."""
        deadline = time.monotonic() + timeout_s
        while not claim():
            if self.driver.poll() is not None and not claim():
                raise Ended(
                    f"the run ended with exit code {self.driver.returncode} before {what}: {self.last_output()}"
                )
            if time.monotonic() > deadline:
                raise Failed(f"waited {timeout_s:.0f} s for {what} without success: {self.last_output()}")
            time.sleep(poll_s)

    def last_output(self) -> str:
        return " | ".join([*self.books.said[-3:], *self.log.read_text(errors="replace").strip().splitlines()[-6:]])

    # ---- its processes -----------------------------------------------------------------------------------------------

    def living(self, what: str) -> list[Started]:
        return [one for one in self.read().started.values() if one.what == what and is_alive(one.process)]

    def look(self, *others: int) -> None:
        """Note the processes of the run: the driver's, and those of nodes that it did not start (`others`)."""
        for pid in (self.driver.pid, *others):
            self.seen |= set(descendants(pid))

    def coordinator(self, *others: int) -> psutil.Process | None:
        for pid in (self.driver.pid, *others):
            for process in descendants(pid):
                with suppress(psutil.Error):
                    if process.cmdline()[:1] == [COORDINATOR]:
                        return process
        return None

    def kill_driver(self) -> None:
        self.driver.kill()
        self.driver.wait()

    def end(self) -> None:
        """Stop the run, whatever it is doing: for when the script itself ends."""
        if self.driver.poll() is None:
            self.driver.send_signal(signal.SIGTERM)
            try:
                self.driver.wait(60)
            except subprocess.TimeoutExpired:
                self.kill_driver()

    def must_be_gone(self, processes: set[psutil.Process]) -> None:
        """Raises `Failed` if one of them outlives the driver. Ray's helpers are looked for at the run's end."""
        self._helpers |= {one for one in processes if " ".join(_words(one)).strip() in HELPERS}
        _none_alive(processes - self._helpers, GONE_S)

    def helpers_must_be_gone(self) -> None:
        _none_alive(self._helpers, HELPERS_S)

    def shared_memory(self) -> list[str]:
        """What is left of it there: folders that are named after its nodes, and weights of processes that worked for it."""
        return [
            path.name
            for path in Path("/dev/shm").glob("millstream-*")
            if any(node and node in path.name for node in self.books.nodes)
        ]


class Ended(Failed):
    """The run ended by itself."""


def _none_alive(processes: set[psutil.Process], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while left := [one for one in processes if is_alive(one)]:
        if time.monotonic() > deadline:
            named = "; ".join(f"{one.pid} {' '.join(_words(one)).strip()[:80]}" for one in left)
            raise Failed(f"still there {timeout_s:.0f} s after the driver had ended: {named}")
        time.sleep(0.1)


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return list(process.cmdline())
    return []


def descendants(pid: int) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return list(psutil.Process(pid).children(recursive=True))
    return []


def is_alive(process: psutil.Process) -> bool:
    """Whether this process runs; another one with the same id does not count."""
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


WEIGHTS = re.compile(r"/dev/shm/millstream-weights-\d+/[0-9a-f]+")


def weights_of(processes: set[psutil.Process]) -> set[str]:
    """Files of shared memory in which these processes have staged weights, by their beginning."""
    found = set[str]()
    for process in processes:
        with suppress(psutil.Error, OSError):
            for entry in Path(f"/proc/{process.pid}/fd").iterdir():
                with suppress(OSError):
                    if match := WEIGHTS.match(os.readlink(entry)):  # noqa: PTH115
                        found.add(match[0])
    return found
