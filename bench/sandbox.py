"""Sandboxes: how fast they start and run commands, with and without a pool; and a run in which a fifth of them is killed.

The run is that of recipes/coding.toml, in a process of its own. A share of its sandboxes is killed (SIGKILL) before or while a
command runs. Afterwards every attempt must have one fate, the audit must be clean, and no
process, file or mount may be left. Exits with 1 otherwise. `--model` is a checkpoint, such as SmolLM2-135M-Instruct, instead of
the recipe's model: it gets a chat template with tools.

    .venv/bin/python bench/sandbox.py [--json] [--smoke] [--sandboxes 100] [--rollouts 500] [--killed 0.2]
        [--model FOLDER] [--device auto]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from internals import Limits, SandboxConfig, SandboxPool, WalledSandbox, audit, load, read_history
from millstream import RunConfig, train
from millstream.events import RolloutAborted, RolloutEnded, RolloutFailed, RolloutStarted
from millstream.types import Task
from report import ROOT, Options, Row, alone, cost, publish, say

GROUP_SIZE = 4
GROUPS_PER_STEP = 5
AT_ONCE = 8
ZYGOTE = "forkserver.serve_forks"
CHAT_TEMPLATE = """
{%- if tools %}<|im_start|>system
Call tools so: <tool_call>{"name": NAME, "arguments": {...}}</tool_call>
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CHECKPOINT = {  # instead of the recipe's settings for its small model
    "model.tiny": "",
    "rollout.max_tokens": 48,
    "warmup.learning_rate": 1e-4,
    "learner.learning_rate": 1e-5,
    "learner.micro_batch_tokens": 16384,
}


class Fragile(WalledSandbox):
    """A share of these is killed, before or while they are used. `log`: a file with a line for each of them."""

    def __init__(self, limits: Limits, *, killed: float, log: str) -> None:
        super().__init__(limits)
        self._is_doomed = random.random() < killed
        self._log = log

    async def exec(self, command: str, *, timeout_s: float | None = None) -> Any:
        self._doom()
        return await super().exec(command, timeout_s=timeout_s)

    async def read(self, path: str) -> bytes:
        self._doom()
        return await super().read(path)

    def _doom(self) -> None:
        if self._is_doomed:
            self._is_doomed = False
            asyncio.get_running_loop().call_later(random.choice((0.0, 0.001, 0.003)), self._kill)

    def _kill(self) -> None:
        assert self.keeper_id is not None
        try:
            os.kill(self.keeper_id, signal.SIGKILL)
        except ProcessLookupError:  # it was closed before
            return
        with Path(self._log).open("a") as file:
            file.write("killed\n")


# ---- figures ---------------------------------------------------------------------------------------------------------------


async def starts(number: int, at_once: int) -> float:
    """Sandboxes started and closed per second."""
    free = asyncio.Semaphore(at_once)

    async def one() -> None:
        async with free:
            sandbox = WalledSandbox()
            await sandbox.start()
            await sandbox.close()

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(number)))
    return number / (time.perf_counter() - began)


async def latencies(number: int, action: Callable[[WalledSandbox], Awaitable[object]]) -> list[float]:
    """Milliseconds of an action, one after the other in one sandbox."""
    sandbox = WalledSandbox()
    await sandbox.start()
    await sandbox.write("a", bytes(1 << 20))
    times = []
    for _ in range(number):
        began = time.perf_counter()
        await action(sandbox)
        times.append(1000 * (time.perf_counter() - began))
    await sandbox.close()
    return times


async def until_first_command(number: int, ahead: int) -> float:
    """Milliseconds from asking a pool to the end of a first command; the model then thinks for 50 ms."""
    pool = SandboxPool(SandboxConfig(ahead=ahead))
    times = []
    for one in range(number):
        began = time.perf_counter()
        sandbox = await pool.take(Task(id=str(one), prompt=""))
        await sandbox.exec("true")
        times.append(1000 * (time.perf_counter() - began))
        await asyncio.sleep(0.05)
        await pool.give_back(sandbox)
    await pool.close()
    return statistics.median(times)


async def measured(number: int) -> list[Row]:
    await starts(1, 1)  # starts the zygote, and tries the walls
    rows = [alone("sandboxes, one at a time", "started and closed/s", await starts(number, 1), digits=1)]
    rows.append(
        alone(f"sandboxes, {AT_ONCE} at a time", "started and closed/s", await starts(number, AT_ONCE), digits=1)
    )
    for name, action in ACTIONS.items():
        times = sorted(await latencies(number, action))
        rows.append(alone(name, "ms, median", statistics.median(times)))
        rows.append(alone(name, "ms, 95th percentile", times[int(0.95 * (len(times) - 1))]))
    with_pool = await until_first_command(number, ahead=2)
    without = await until_first_command(number, ahead=0)
    rows.append(cost("asked for, started, first command", "ms, with a pool of 2", with_pool, "no pool", without))
    return rows


ACTIONS: dict[str, Callable[[WalledSandbox], Awaitable[object]]] = {
    "exec of `true`": lambda sandbox: sandbox.exec("true"),
    "write of 1 MB": lambda sandbox: sandbox.write("b", bytes(1 << 20)),
    "snapshot of 2 MB": lambda sandbox: sandbox.snapshot(),
}


# ---- a run in which some are killed ----------------------------------------------------------------------------------------


def run(folder: Path, rollouts: int, killed: float, model: str, device: str) -> None:
    """In a process of its own: it ends, and with it everything that it has started."""
    steps = max(1, round(rollouts / GROUP_SIZE / GROUPS_PER_STEP))
    changes: dict[str, object] = {
        "model.device": device,
        "run_dir": folder / "run",
        "environment.0.sandbox.use": f"{Path(__file__).resolve()}:Fragile",
        "environment.0.sandbox.args.killed": killed,
        "environment.0.sandbox.args.log": folder / "killed",
        "rollout.group_size": GROUP_SIZE,
        "rollout.retries": 5,
        "pipeline.steps": steps,
        "pipeline.groups_per_step": GROUPS_PER_STEP,
        "pipeline.filter_zero_signal": "false",
        "warmup.max_steps": 40,
        "warmup.check_every": 40,
        "data.holdout": 4,
        "evaluation.every_steps": steps,
    }
    if model:
        changes |= CHECKPOINT | {"model.path": with_tools(Path(model), folder / "model")}
    words = [f"{key}={value}" for key, value in changes.items()]
    train(load(ROOT / "recipes/coding.toml", RunConfig, words))


def with_tools(model: Path, folder: Path) -> Path:
    """The same checkpoint in another folder, with a chat template that shows tools."""
    folder.mkdir()
    for path in model.iterdir():
        if path.name != "chat_template.jinja":
            (folder / path.name).symlink_to(path.resolve())
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def accounted(folder: Path) -> dict[str, Any]:
    history = list(read_history(folder / "run/events.jsonl"))
    started = Counter(_attempt(event) for event in history if isinstance(event, RolloutStarted))
    fates = [event for event in history if isinstance(event, RolloutEnded | RolloutFailed | RolloutAborted)]
    fate_of = Counter(_attempt(event) for event in fates)
    failures = [event for event in fates if isinstance(event, RolloutFailed)]
    report = audit(folder / "run")
    return {
        "attempts": len(started),
        "fates": dict(Counter(type(event).__name__ for event in fates)),
        "without exactly one fate": sum(fate_of[one] != 1 for one in started | fate_of),
        "failures": dict(Counter(f"{event.error}: {event.message.partition(':')[0]}" for event in failures)),
        "lost after all retries": sum(event.is_final for event in failures),
        "audit": [finding.message for finding in report.findings],
        "checks": report.checks,
    }


def _attempt(event: Any) -> tuple[int, int, int]:
    return event.group_id, event.member, event.attempt


def sandbox_processes() -> set[int]:
    """Zygotes of this package, their keepers and first processes."""
    found = set()
    package = str(ROOT / "src").encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if ZYGOTE.encode() in command and package in command:
                found.add(int(entry.name))
    return found


def killed_run(given: argparse.Namespace) -> tuple[list[Row], bool]:
    mounts, before = Path("/proc/mounts").read_text(), sandbox_processes()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        (folder / "killed").touch()
        began = time.perf_counter()
        options = {"run-in": name} | {key: getattr(given, key) for key in ("rollouts", "killed", "model", "device")}
        command = [sys.executable, __file__, *(f"--{key}={value}" for key, value in options.items())]
        environment = {**os.environ, "TMPDIR": str(folder / "tmp")}
        subprocess.run(command, env=environment, stdout=sys.stderr, check=True)
        seconds = time.perf_counter() - began
        found = accounted(folder)
        found["killed, with warmup"] = (folder / "killed").read_text().count("killed")
        time.sleep(1.0)  # the zygote ends when it has noticed the end of the run
        files = [path.name for path in (folder / "tmp").iterdir()]
    found["processes left"] = len(sandbox_processes() - before)
    found["files left"] = len(files)
    found["mounts left"] = int(Path("/proc/mounts").read_text() != mounts)
    for key, value in found.items():
        say(f"{key:26} {json.dumps(value)}")
    num_failed = found["fates"].get("RolloutFailed", 0)
    workload = (
        f"{given.rollouts} rollouts, {num_failed} of {found['attempts']} attempts lost their sandbox, {seconds:.0f} s"
    )
    bad = {key: found[key] for key in ("without exactly one fate", "processes left", "files left", "mounts left")}
    bad["audit findings"] = len(found["audit"])
    rows = [
        Row(workload=workload, metric=metric, ours=ours, peer="none is allowed", theirs=0, ratio=float(not ours))
        for metric, ours in bad.items()
    ]
    rows.append(alone(workload, "members lost after all retries", found["lost after all retries"]))
    return rows, not any(bad.values())


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--sandboxes", 100, smoke=3)
    parser.add("--rollouts", 500, smoke=20)
    parser.add("--killed", 0.2, help="share of the sandboxes that are killed")
    parser.add("--model", "", help="a folder with a checkpoint. Default: the recipe's small model")
    parser.add("--device", "auto", help="cpu or cuda")
    parser.add("--run-in", "", help="(the run itself, started by this script)")
    options = parser.parse(argv)
    if options.run_in:
        run(Path(options.run_in), options.rollouts, options.killed, options.model, options.device)
        return
    rows = asyncio.run(measured(options.sandboxes))
    more, is_clean = killed_run(options)
    publish([*rows, *more], options)
    if not is_clean:
        sys.exit(1)


if __name__ == "__main__":
    main()
