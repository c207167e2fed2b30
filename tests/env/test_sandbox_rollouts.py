"""Sandboxes in rollouts: the tools bash and edit, the pool, what a task prepares, and sandboxes that are killed meanwhile."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from millstream.config import convert
from millstream.env.config import EnvironmentConfig
from millstream.env.games.shell_tasks import ShellTasks
from millstream.env.registry import Environments
from millstream.env.resolve import find_environment
from millstream.env.sandbox.base import Executed, Limits, Sandbox
from millstream.env.sandbox.config import SandboxConfig
from millstream.env.sandbox.pool import SandboxPool
from millstream.env.sandbox.walled import WalledSandbox
from millstream.env.tools import ToolCall, configured_tools, parser_named
from millstream.errors import ConfigError, EnvironmentFailed, SandboxLost
from millstream.pipeline.rollouts import RolloutConfig
from millstream.run.sft import GoldExamples
from millstream.types import Task
from support.talk import HERMES, Scripted, text_with
from support.tool_talk import calling, hosted, play, results

OWN = f"{__name__}:Memory"


class Memory:
    """A driver of the user's: files are a dictionary, and a command is `fail`, or prints itself."""

    live: ClassVar[list[Memory]] = []

    def __init__(self, limits: Limits, is_broken: bool = False) -> None:
        self._is_broken = is_broken
        self.files: dict[str, bytes] = {}

    async def start(self, snapshot: bytes | None = None) -> None:
        await asyncio.sleep(0)
        if self._is_broken:
            raise SandboxLost("the cloud is down")
        if self not in self.live:
            self.live.append(self)
        self.files = dict([snapshot.split(b"=")] if snapshot else [])  # type: ignore[arg-type]

    async def exec(self, command: str, *, timeout_s: float | None = None) -> Executed:
        await asyncio.sleep(0)
        if command == "die":
            raise SandboxLost("the sandbox is gone: the cloud has taken it")
        return Executed(how="ended", code=int(command == "fail"), output=command.encode())

    async def read(self, path: str) -> bytes:
        if path not in self.files:
            raise FileNotFoundError(2, "No such file", path)
        return self.files[path]

    async def write(self, path: str, data: bytes) -> None:
        self.files[path] = data

    async def snapshot(self) -> bytes:
        return b"a=1"

    async def close(self) -> None:
        if self in self.live:
            self.live.remove(self)


class DiesTwice(Memory):
    num_deaths: ClassVar[int] = 0

    async def exec(self, command: str, *, timeout_s: float | None = None) -> Executed:
        DiesTwice.num_deaths += 1
        return await super().exec("die" if DiesTwice.num_deaths <= 2 else command)


@pytest.fixture(autouse=True)
def no_driver_is_left() -> Any:
    yield
    assert Memory.live == []


def test_the_model_works_in_a_sandbox_with_bash_and_edit() -> None:
    config = {"tools": ["bash", "edit"], "sandbox": {"ahead": 1}}
    _, scripted = play(
        config,
        calling("edit", command="create", path="a.txt", text="one two"),
        calling("edit", command="replace", path="a.txt", old="two", text="three"),
        calling("edit", command="insert", path="a.txt", line=1, text="last"),
        calling("edit", command="insert", path="a.txt", line=0, text="first"),
        calling("edit", command="view", path="a.txt", line=2),
        calling("bash", command="cat a.txt | head -1; exit 4"),
        calling("edit", command="replace", path="a.txt", old="t", text="x"),
        calling("edit", command="view", path="none"),
        calling("edit", command="insert", path="a.txt", line=9, text="x"),
        "4",
    )
    assert results(scripted) == [
        "a.txt has 1 lines.",
        "a.txt has 1 lines.",
        "a.txt has 2 lines.",
        "a.txt has 3 lines.",
        "     2<unk>one three\n     3<unk>last",
        "first\n[exit code 4]",
        "Error: edit: a.txt: the old text is there 3 times: expected exactly once",
        "Error: edit: none: No such file or directory",
        "Error: edit: a.txt: no line 9: expected 0 to 3",
    ]


def test_output_and_files_that_are_no_text_are_shown_or_refused_and_never_changed() -> None:
    async def program(pool: SandboxPool) -> None:
        tools = configured_tools(["bash", "edit"])
        sandbox = await pool.take(Task(id="1", prompt="p"))

        async def call(name: str, **arguments: Any) -> str:
            return await tools.run(ToolCall(name=name, arguments=arguments), sandbox)

        assert await call("bash", command=r"printf '\377x' | tee data; kill -9 $$") == "\ufffdx\n[exit code -9]"
        assert "not text in UTF-8" in await call("edit", command="replace", path="data", old="x", text="y")
        assert await sandbox.read("data") == b"\xffx"
        assert (await call("bash", command="head -c 50000000 /dev/zero")).endswith("cut off]")
        assert await call("bash", command="a\0b") == "Error: bash: a command with a NUL character"
        assert "Is a directory" in await call("edit", command="view", path="/")
        assert "wrong arguments" in await call("edit", command="delete", path="a")

    pooled(SandboxConfig(ahead=0), program)


def test_only_a_newline_ends_a_line_of_a_file() -> None:
    async def program(pool: SandboxPool) -> None:
        tools = configured_tools(["edit"])
        sandbox = await pool.take(Task(id="1", prompt="p"))
        await sandbox.write("a", "1\n\f2\u20282\r\n3\n".encode())
        inserted = {"command": "insert", "path": "a", "line": 2, "text": "new"}
        assert await tools.run(ToolCall(name="edit", arguments=inserted), sandbox) == "a has 4 lines."
        assert (await sandbox.read("a")).decode() == "1\n\f2\u20282\r\nnew\n3\n"
        viewed = await tools.run(ToolCall(name="edit", arguments={"command": "view", "path": "a", "line": 3}), sandbox)
        assert viewed == "     3\tnew\n     4\t3"

    pooled(SandboxConfig(use=OWN, ahead=0), program)


def test_a_command_past_the_limit_of_its_tool_is_stopped_and_the_model_sees_it() -> None:
    tools = [{"function": "bash", "timeout_s": 0.5}]
    _, scripted = play({"tools": tools, "sandbox": {"ahead": 0}}, calling("bash", command="sleep 60"), "4")
    assert results(scripted) == ["[stopped: it took longer than 0.5 s]"]


def test_the_output_of_a_command_is_cut_at_the_limit_of_its_tool() -> None:
    tools = [{"function": "bash", "max_characters": 40}]
    _, scripted = play({"tools": tools, "sandbox": {"ahead": 0}}, calling("bash", command="seq 100"), "4")
    (cut,) = results(scripted)
    assert "more characters were cut off" in cut


def test_an_environment_scores_the_files_of_its_sandbox() -> None:
    task = Task(id="7", prompt="sum", answer="50", data={"files": {"n": "31+4+15\n"}})
    assert play(SHELL, calling("bash", command="expr 31 + 4 + 15 > out"), "done", task=task)[0] == 1.0
    assert play(SHELL, calling("bash", command="echo 51 > out"), "50", task=task)[0] == 0.0
    assert play(SHELL, "50", task=task)[0] == 0.0


SHELL = {"use": "shell_tasks", "tools": ["bash"], "sandbox": {"ahead": 0}}


def test_the_commands_of_a_perfect_player_solve_the_tasks() -> None:
    async def program(pool: SandboxPool) -> None:
        for task in ShellTasks.tasks(6, seed=0):
            sandbox = await pool.take(task)
            (call,) = parser_named("hermes")(ShellTasks.gold(task)[0]).calls
            assert isinstance(call, ToolCall)
            await sandbox.exec(call.arguments["command"])
            assert (await sandbox.read("out")).decode().strip() == task.answer

    pooled(SandboxConfig(ahead=2), program)


def test_a_sandbox_that_is_lost_fails_the_rollout_by_name() -> None:
    config = {"tools": ["bash"], "sandbox": {"use": OWN}}
    with pytest.raises(SandboxLost, match="the cloud has taken it"):
        play(config, calling("bash", command="die"), "4")
    with pytest.raises(SandboxLost, match="the cloud is down"):
        play({**config, "sandbox": {"use": OWN, "args": {"is_broken": True}}}, "4")


def test_a_rollout_that_is_cancelled_gives_its_sandbox_back() -> None:
    async def program() -> None:
        one = hosted({"tools": ["bash"], "sandbox": {"ahead": 0}})
        scripted = Scripted(text_with(HERMES), [calling("bash", command="sleep 60")], task=Task(id="1", prompt="p"))
        playing = asyncio.create_task(one.rollout(scripted.episode))
        await asyncio.sleep(0.5)
        assert one._sandboxes is not None and len(one._sandboxes._given) == 1
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert not one._sandboxes._given and not one._sandboxes._closing
        await one.close()

    asyncio.run(program())


def test_a_gold_example_whose_sandbox_is_lost_is_played_again() -> None:
    config = {"use": "shell_tasks", "tools": ["bash"], "sandbox": {"use": f"{__name__}:DiesTwice", "ahead": 0}}

    async def program() -> int:
        environments = Environments([hosted(config)])
        settings: Any = SimpleNamespace(rollout=RolloutConfig(max_tokens=64), seed=0)
        rows = await GoldExamples(environments, text_with(HERMES), settings).rows(
            Task(id="1", prompt="write owl", answer="owl")
        )
        await environments.close()
        return len(rows)

    assert asyncio.run(program()) == 1 and DiesTwice.num_deaths == 3


# ---- the pool --------------------------------------------------------------------------------------------------------------


def pooled(config: SandboxConfig, program: Callable[[SandboxPool], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        pool = SandboxPool(config)
        try:
            return await program(pool)
        finally:
            await pool.close()

    return asyncio.run(whole())


def test_members_of_a_group_start_with_copies_of_files_that_were_prepared_once() -> None:
    setup = "echo base > base; head -c 8 /dev/urandom | od -An -tx1 > unique"
    task = Task(
        id="t", prompt="p", data={"files": {"d/a": "1"}, "setup": "head -c 8 /dev/urandom >> unique; cat base >> d/a"}
    )

    async def program(pool: SandboxPool) -> None:
        taken = await asyncio.gather(*(pool.take(task) for _ in range(4)))
        other = await pool.take(Task(id="u", prompt="p"))
        unique = [await one.read("unique") for one in taken]
        assert len(set(unique)) == 1 and unique[0].startswith(await other.read("unique"))
        await taken[0].write("d/a", b"changed")
        assert [await one.read("d/a") for one in taken[1:]] == [b"1base\n"] * 3
        with pytest.raises(OSError):
            await other.read("d/a")
        for one in (*taken, other):
            await pool.give_back(one)

    pooled(SandboxConfig(setup=setup, ahead=2), program)


def test_tasks_of_two_data_sets_with_the_same_id_get_files_of_their_own() -> None:
    async def program(pool: SandboxPool) -> None:
        for text in ("of training", "of the evaluation"):
            sandbox = await pool.take(Task(id="1", prompt="p", data={"files": {"a": text}}))
            assert await sandbox.read("a") == text.encode()
            await pool.give_back(sandbox)

    pooled(SandboxConfig(ahead=0), program)


class CountsSetups(Memory):
    num_setups: ClassVar[int] = 0

    async def exec(self, command: str, *, timeout_s: float | None = None) -> Executed:
        CountsSetups.num_setups += 1
        return await super().exec(command)


def test_a_second_attempt_at_a_setup_is_one_for_all_who_wait() -> None:
    async def program(pool: SandboxPool) -> None:
        async def take_twice() -> None:
            for _ in range(2):
                with pytest.raises(EnvironmentFailed):
                    await pool.take(Task(id="1", prompt="p", data={"setup": "fail"}))

        await asyncio.gather(take_twice(), take_twice(), take_twice())

    pooled(SandboxConfig(use=f"{__name__}:CountsSetups", ahead=0), program)
    assert CountsSetups.num_setups == 2


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"setup": "echo no; exit 3"}, "the setup of a sandbox ended with 3: .* printed 'no"),
        ({"files": {"/usr/x": "1"}}, "cannot be prepared: .*Read-only"),
        ({"files": ["a"]}, "task t: .*expected `files`, a table of paths and texts"),
    ],
)
def test_a_task_that_cannot_be_prepared_fails_by_name_and_is_tried_again(data: dict[str, Any], problem: str) -> None:
    async def program(pool: SandboxPool) -> None:
        for _ in range(2):
            with pytest.raises(EnvironmentFailed, match=problem):
                await pool.take(Task(id="t", prompt="p", data=data))

    pooled(SandboxConfig(ahead=0), program)


def test_sandboxes_are_started_ahead_up_to_a_bound_and_a_dead_one_is_replaced() -> None:
    async def program(pool: SandboxPool) -> None:
        first = await pool.take(Task(id="1", prompt="p"))
        assert pool._filling is not None
        await pool._filling
        assert len(pool._ready) == 3
        for dead in list(pool._ready):
            assert isinstance(dead, WalledSandbox) and dead.keeper_id is not None
            os.kill(dead.keeper_id, signal.SIGKILL)
            assert dead._commands is not None
            ended, _, _ = await asyncio.to_thread(select.select, [dead._commands.fileno()], [], [], 60.0)
            assert ended, "its connection ends with its last process"
        second = await pool.take(Task(id="1", prompt="p"))
        assert (await second.exec("echo well")).output == b"well\n" and second is not first
        await pool.give_back(first)

    pooled(SandboxConfig(ahead=3), program)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"tools": ["bash"]}, "the tool bash needs a sandbox"),
        ({"tools": [{"function": "edit", "process": True}], "sandbox": {}}, "neither process nor args"),
        ({"use": "agent", "args": {"command": ["x"]}, "sandbox": {}}, "leave sandbox or process out"),
        ({"sandbox": {"memory_mb": 1}}, "memory_mb must be at least 16"),
        ({"sandbox": {"memmory_mb": 64}}, "memory_mb"),
        ({"sandbox": {"use": "chroot"}}, "no sandbox 'chroot': use walls, docker, podman, or"),
    ],
)
def test_a_config_that_cannot_work_is_refused(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        find_environment(convert(config, EnvironmentConfig, where="environment"))


def test_the_drivers_are_sandboxes() -> None:
    for one in (WalledSandbox(), Memory(Limits())):
        checked: Sandbox = one
        assert checked
