"""Programs that a model wrote, run in the sandbox against the task's tests. The reward is the share of tests that pass."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from millstream.decoding import to_type
from millstream.env.sandbox.base import Limits
from millstream.env.sandbox.keepers import SandboxBroken
from millstream.env.sandbox.programs import Contained, ProgramSandbox, what_is_contained
from millstream.errors import ConfigError, RewardFailed
from millstream.types import Task

BLOCK = re.compile(r"^```(?:python3?|py)[ \t]*\r?\n(.*?)^```", re.DOTALL | re.MULTILINE | re.IGNORECASE)
Promise = Literal["network", "writes", "reads", "environment", "signals", "processes", "survivors"]
# Without these, a program of the model can read and change what the user can: only if the user has agreed.
NEEDED: tuple[Promise, ...] = ("network", "writes", "reads", "environment")


class Pair(Struct, frozen=True, forbid_unknown_fields=True):
    """What a program reads, and what it must then print; space at the ends of lines does not count."""

    input: str
    output: str


class PythonTests:
    """The last ```python block of the completion against `task.data["tests"]`: a list of statements such as `assert f(2) == 4`,
    or of {input, output} pairs. Without a block, or with a program that breaks, hangs or is stopped, tests fail: that is a low
    reward, and no failed rollout."""

    def __init__(
        self,
        *,
        all_or_nothing: bool = False,
        program_s: float = 5.0,
        memory_mb: int = 1024,
        processes: int = 32,
        most_at_once: int | None = None,
        require: Sequence[Promise] = (),
        allow_uncontained: bool = False,
        timeout_s: float = 30.0,
    ) -> None:
        if program_s <= 0 or memory_mb < 64 or processes < 1 or (most_at_once is not None and most_at_once < 1):
            raise ConfigError(
                "reward python_tests: program_s must be above 0, memory_mb at least 64, processes and most_at_once at least 1"
            )
        self._all_or_nothing = all_or_nothing
        self._program_s = program_s
        self._timeout_s = timeout_s
        self._most_at_once = most_at_once or os.cpu_count() or 1
        self._loop: asyncio.AbstractEventLoop | None = None
        contained = _contained()
        if open_ := [name for name in require if not getattr(contained, name)]:
            raise ConfigError(
                f"reward python_tests, args.require = {list(require)}: not contained here: {', '.join(open_)}"
            )
        if not allow_uncontained and not all(getattr(contained, name) for name in NEEDED):
            raise ConfigError(
                f"reward python_tests: {contained.words()}. Expected: {', '.join(NEEDED)} are contained, by namespaces or by "
                "Landlock. Run on a machine or in a container that allows user namespaces, or agree to run the programs "
                "like this: args = { allow_uncontained = true } (--set reward.0.args.allow_uncontained=true)"
            )
        limits = Limits(cpu_s=program_s + 1, memory_bytes=memory_mb << 20, processes=processes)
        self._sandbox = ProgramSandbox(limits, walls=contained.walls)

    async def __call__(self, task: Task, completion: str) -> float:
        tests = tests_of(task)
        program = last_block(completion)
        if program is None:
            return 0.0
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._free = asyncio.Semaphore(self._most_at_once)
        async with self._free:
            try:
                has_passed = await self._passed(program, tests)
            except SandboxBroken as error:
                raise RewardFailed(f"reward python_tests: {error}") from error
        return float(all(has_passed)) if self._all_or_nothing else sum(has_passed) / len(tests)

    async def _passed(self, program: str, tests: Sequence[str] | Sequence[Pair]) -> list[bool]:
        """Of each test. What is not begun within the time limit of the reward has failed."""
        deadline = time.monotonic() + self._timeout_s
        statements = [test for test in tests if isinstance(test, str)]
        if statements:
            wall_s = min(self._program_s, self._timeout_s)
            return [not why for why in await self._sandbox.examine(program, statements, wall_s=wall_s)]
        has_passed: list[bool] = []
        for pair in (test for test in tests if isinstance(test, Pair)):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or (self._all_or_nothing and not all(has_passed)):
                has_passed.append(False)
                continue
            ran = await self._sandbox.run(program, stdin=pair.input, wall_s=min(self._program_s, left_s))
            has_passed.append(ran.how == "ended" and ran.code == 0 and _lines(ran.output) == _lines(pair.output))
        return has_passed


def _contained() -> Contained:
    try:
        return what_is_contained()
    except SandboxBroken as error:
        raise ConfigError(f"reward python_tests: no sandbox on this machine: {error}") from error


def last_block(completion: str) -> str | None:
    """The last closed ```python block."""
    blocks = BLOCK.findall(completion)
    return blocks[-1] if blocks else None


def tests_of(task: Task) -> list[str] | list[Pair]:
    """Raises `RewardFailed` where the task has none, or not in either form."""
    tests = task.data.get("tests")
    is_statements = isinstance(tests, list) and bool(tests) and isinstance(tests[0], str)
    try:
        found: list[str] | list[Pair] = to_type(tests, list[str]) if is_statements else to_type(tests, list[Pair])
        problem = "" if found else "an empty list"
    except msgspec.ValidationError as error:
        problem = str(error)
    if problem:
        raise RewardFailed(
            f"task {task.id} has no tests that can be run ({problem}): expected a field `tests`, a list of assert statements "
            "or of {input, output} pairs"
        )
    return found


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
