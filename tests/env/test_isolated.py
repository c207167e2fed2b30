"""Environments under limits, and in processes of their own: what hangs, crashes or dies fails its rollout by name, and no more."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from millstream import RunConfig
from millstream.clock import run_virtual
from millstream.config import convert
from millstream.env import Context, isolated
from millstream.env.config import EnvironmentConfig
from millstream.env.dialog import Conversation
from millstream.env.registry import Environments, Hosted
from millstream.env.resolve import find_environment
from millstream.errors import ConfigError, EngineError, EnvironmentFailed
from millstream.pipeline.limit import Limit
from millstream.rpc.process import Kind, LocalWorker
from millstream.run.check import check_combinations
from millstream.types import Message, Task
from support.processes import eventually
from support.talk import CHATML, Scripted, text_with

HANG_S = 2.0  # the limit of a step that hangs: so long that no other step reaches it, whatever the load

WILD = '''
import asyncio, ctypes, os, signal, subprocess, sys, time
from millstream.env import Step
from millstream.types import Message

class Wild:
    """Does what the task says."""
    max_turns = 4

    def reset(self, task, seed):
        self.task = task
        return f"{os.getpid()}>"

    def step(self, action):
        match self.task.prompt:
            case "raise":
                raise ValueError("no such thing")
            case "hang":
                time.sleep(60)
            case "hang with a child":
                subprocess.Popen(["sleep", "61.25"])
                time.sleep(60)
            case "exit":
                os._exit(7)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "garbage":
                for descriptor in map(int, os.listdir("/proc/self/fd")):
                    try:
                        if descriptor > 2 and os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                            os.write(descriptor, b"\\x05\\x00\\x00\\x00hello")
                    except OSError:
                        pass
                time.sleep(60)
            case "lock":
                ctypes.PyDLL(None).sleep(60)
            case "torch":
                return Step(reward=float("torch" in sys.modules), is_done=True)
            case "odd":
                return Step(reward="much", is_done=True)
            case "print":
                print("on stdout")
        return Step(reward=1.0, is_done=True, observation=f"{os.getpid()}>")

async def text(context):
    """Everything that a context can do."""
    assert context.text.decode(context.text.encode("abc")) == "abc" and context.text.has_chat
    assert context.text.opening("ab") == context.text.encode("ab")
    assert "hi" in context.text.render([Message(role="user", content="hi")])
    other = context.part(agent=1)
    first = await context.ask([Message(role="user", content="one?")])
    second = await other.ask("two?")
    other.earned(0.25)
    third = await other.generate(context.text.encode("three?"))
    context.earned(2)
    await context.waiting("nothing", asyncio.sleep(0))
    assert context.text.decode(third.tokens) == "c" and third.versions[0] == 3
    return [float(first == "a"), float(second == "b")]

async def stubborn(context):
    try:
        await context.ask("x" * 100)
    except Exception as error:
        return float(type(error).__name__ == "RequestRefused" and await context.ask("x") == "a")
'''


@pytest.fixture
def wild(tmp_path: Path) -> str:
    (tmp_path / "wild.py").write_text(WILD)
    return str(tmp_path / "wild.py")


@asynccontextmanager
async def hosted(use: str, **config: Any) -> AsyncIterator[Environments]:
    kind = find_environment(EnvironmentConfig(use=use, **config))
    assert kind.environment is not None
    environments = Environments([Hosted(kind, kind.environment, text_with(CHATML))])
    try:
        yield environments
    finally:
        await environments.close()


async def play(environments: Environments, what: str, *says: str, **options: Any) -> tuple[float, Scripted]:
    scripted = Scripted(text_with(CHATML), says or ["a"] * 9, task=Task(id="1", prompt=what), **options)
    reward = await environments.rollout(scripted.episode)
    return scripted.episode.finish(reward)[0].reward, scripted


async def failure(environments: Environments, what: str) -> str:
    with pytest.raises(EnvironmentFailed) as caught:
        await play(environments, what)
    return str(caught.value)


def pid_of(scripted: Scripted) -> int:
    return int(scripted.shown(scripted.requests[0].tokens).partition(">")[0])


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children() -> list[int]:
    """Of this process."""
    return [int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]


@pytest.fixture(autouse=True)
def no_orphans() -> Iterator[None]:
    before = set(children())
    yield
    assert set(children()) <= before, "a process was left behind"


def test_whatever_happens_in_a_process_is_told_by_name_and_the_next_episode_is_played(wild: str) -> None:
    async def program() -> None:
        async with hosted(f"{wild}:Wild", process=True, step_timeout_s=HANG_S) as environments:
            assert (await play(environments, "fine"))[0] == 1.0
            assert (await play(environments, "torch"))[0] == 0.0, "no torch is imported there"
            assert await failure(environments, "raise") == "Wild raised ValueError at wild.py:17: no such thing"
            assert "exit code 7" in await failure(environments, "exit")
            assert "exit code -9 (SIGKILL)" in await failure(environments, "kill")
            assert "exit code -11 (SIGSEGV)" in await failure(environments, "segfault")
            assert "sent something that is not a message" in await failure(environments, "garbage")
            assert f"took longer than {HANG_S:g} s between two turns; its process was killed" in await failure(
                environments, "hang"
            )
            assert (await play(environments, "fine"))[0] == 1.0

    asyncio.run(program())


def test_a_process_is_used_again_after_an_episode_and_after_one_that_raised_and_not_after_a_kill(wild: str) -> None:
    async def program() -> None:
        async with hosted(f"{wild}:Wild", process=True, step_timeout_s=HANG_S) as environments:
            first = pid_of((await play(environments, "fine"))[1])
            await failure(environments, "raise")
            assert pid_of((await play(environments, "fine"))[1]) == first
            await failure(environments, "hang")
            assert not is_alive(first)
            assert pid_of((await play(environments, "fine"))[1]) != first

    asyncio.run(program())


def test_a_process_that_died_between_two_episodes_is_replaced(wild: str) -> None:
    async def program() -> None:
        async with hosted(f"{wild}:Wild", process=True) as environments:
            first = pid_of((await play(environments, "fine"))[1])
            os.kill(first, signal.SIGKILL)
            isolated = environments.of(Task(id="1", prompt="fine"))._isolated
            assert isolated is not None
            while all(worker.error is None for worker in isolated._started):  # until its end is noticed
                await asyncio.sleep(0.01)
            assert (await play(environments, "fine"))[0] == 1.0

    asyncio.run(program())


def test_what_a_hung_environment_has_started_is_killed_with_it(wild: str) -> None:
    def sleepers() -> str:
        return subprocess.run(["pgrep", "-f", "sleep 61.25"], capture_output=True, text=True).stdout

    async def program() -> None:
        async with hosted(f"{wild}:Wild", process=True, step_timeout_s=0.5) as environments:
            await failure(environments, "hang with a child")
            assert eventually(lambda: not sleepers())

    asyncio.run(program())


def test_an_abort_kills_the_process_at_once(wild: str) -> None:
    async def program() -> None:
        async with hosted(f"{wild}:Wild", process=True) as environments:
            scripted = Scripted(text_with(CHATML), ["a"], task=Task(id="1", prompt="hang"))
            playing = asyncio.ensure_future(environments.rollout(scripted.episode))
            while not scripted.requests:
                await asyncio.sleep(0.01)
            pid = pid_of(scripted)
            assert is_alive(pid)
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing
            assert eventually(lambda: not is_alive(pid)), "long before the step would have ended"

    asyncio.run(program())


def test_everything_that_a_context_can_do_can_be_done_from_a_process(wild: str) -> None:
    async def program() -> None:
        async with hosted(f"{wild}:text", process=True) as environments:
            scripted = Scripted(text_with(CHATML), ["a", "b", "c"], task=Task(id="1", prompt="p"), max_parts=2)
            rewards = await environments.rollout(scripted.episode)
            parts = scripted.episode.finish(rewards)
            assert [(part.agent, part.reward) for part in parts] == [(0, 1.0), (1, 1.0)]
            assert [part.turn_rewards.tolist() for part in parts] == [[2.0], [0.25, 0.0]]
            assert "<|im_start|>user\none?" in scripted.shown(parts[0].tokens)
            with pytest.raises(EnvironmentFailed, match=r"rollout\.max_parts"):
                await play(environments, "p", "a", "b")

    asyncio.run(program())


def test_a_full_context_is_told_to_the_process_and_an_engine_that_breaks_ends_it(wild: str) -> None:
    async def broken(request: Any) -> Any:
        raise EngineError("it broke")

    async def program() -> None:
        async with hosted(f"{wild}:stubborn", process=True) as environments:
            assert (await play(environments, "p", "a", room=50))[0] == 1.0
            scripted = Scripted(text_with(CHATML), ["a"])
            scripted.episode._generate = broken
            with pytest.raises(EngineError, match="it broke"):
                await environments.rollout(scripted.episode)

    asyncio.run(program())


def test_an_environment_that_cannot_be_made_in_a_process_says_why(wild: str) -> None:
    broken = Path(wild)

    async def program() -> None:
        async with hosted(f"{wild}:Wild", process=True) as environments:
            await asyncio.to_thread(broken.write_text, "import nothing_of_the_kind\n")
            assert "Wild cannot be created in a process: ConfigError" in await failure(environments, "fine")

    asyncio.run(program())


def test_a_process_finds_the_modules_that_the_run_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_the_script").mkdir()
    (tmp_path / "beside_the_script" / "wild_module.py").write_text(WILD)
    monkeypatch.syspath_prepend(str(tmp_path / "beside_the_script"))

    async def program() -> None:
        async with hosted("wild_module:Wild", process=True) as environments:
            assert (await play(environments, "fine"))[0] == 1.0

    asyncio.run(program())


def test_what_an_environment_prints_does_not_reach_our_output(wild: str, capfd: pytest.CaptureFixture[str]) -> None:
    async def program() -> None:
        async with hosted(f"{wild}:Wild", process=True) as environments:
            await play(environments, "print")

    asyncio.run(program())
    captured = capfd.readouterr()
    assert captured.out == "" and "on stdout" in captured.err


PARENT = """
import asyncio
from millstream.env import isolated
from millstream.env.bytes_text import ByteText
from millstream.env.config import EnvironmentConfig
from millstream.env.resolve import find_environment
from millstream.env.registry import Hosted
from millstream.pipeline.episode import Episode
from millstream.types import Completion, Finish, RequestKey, Sampling, Task

async def speak(request):
    print(ByteText().decode(request.tokens).strip(">"), flush=True)
    return Completion(tokens=(97,), logprobs=(0.0,), versions=(0,), finish=Finish.STOP)

async def program():
    isolated.PATIENCE_S = 0.5
    kind = find_environment(EnvironmentConfig(use="{wild}:Wild", process=True, step_timeout_s=1.5))
    episode = Episode(Task(id="1", prompt="{what}"), RequestKey(group_id=0, member=0), generate=speak,
                      waiting=lambda what, work: work, sampling=Sampling(max_tokens=1), run_seed=0, role="train")
    await Hosted(kind, kind.environment, ByteText()).rollout(episode)

asyncio.run(program())
"""


@pytest.mark.parametrize("what", ["hang with a child", "lock"])
def test_no_process_outlives_a_run_that_is_killed(wild: str, what: str) -> None:
    """Not even one that keeps the interpreter's lock, so that no thread of its own gets a turn."""
    program = PARENT.format(wild=wild, what=what)
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.3)  # it takes its step
    assert is_alive(pid)
    parent.kill()
    parent.wait()
    limit = time.monotonic() + 30
    while is_alive(pid) or subprocess.run(["pgrep", "-f", "sleep 61.25"], capture_output=True).stdout:
        assert time.monotonic() < limit, "it is still there"
        time.sleep(0.02)


# ---- limits, without processes ---------------------------------------------------------------------------------------


class Slow:
    """Thinks before and between its turns."""

    def __init__(self, seconds: float, num_turns: int = 3) -> None:
        self._seconds, self._num_turns = seconds, num_turns

    async def rollout(self, context: Context) -> float:
        for _ in range(self._num_turns):
            await asyncio.sleep(self._seconds)
            await context.ask("?")
        return 1.0


def slow(seconds: float, **config: Any) -> Hosted:
    kind = find_environment(EnvironmentConfig(use=f"{__file__}:Slow", args={"seconds": seconds}, **config))
    assert kind.environment is not None
    return Hosted(kind, kind.environment, text_with(None))


def slow_model(seconds: float, task: Task | None = None) -> Scripted:
    scripted = Scripted(text_with(None), ["a"] * 99, task=task)
    generate = scripted.episode._generate

    async def slowly(request: Any) -> Any:
        await asyncio.sleep(seconds)
        return await generate(request)

    scripted.episode._generate = slowly
    return scripted


def test_the_step_limit_is_for_what_lies_between_two_turns_and_the_models_time_does_not_count() -> None:
    async def program(step_s: float) -> Any:
        return await slow(step_s, step_timeout_s=10.0).rollout(slow_model(1000.0).episode)

    assert run_virtual(program(9.0)) == 1.0
    with pytest.raises(
        EnvironmentFailed, match=r"Slow took longer than 10 s between two turns\. environment\.step_timeout_s"
    ):
        run_virtual(program(11.0))


@pytest.mark.parametrize("turn_s", [0.0, 3.0, 10.0, 17.0, 1000.0])
@pytest.mark.parametrize("num_turns", [1, 3])
def test_the_step_limit_ends_a_step_when_it_is_over_however_long_the_turns_before_it_took(
    turn_s: float, num_turns: int
) -> None:
    async def program() -> float:
        environment = slow(4.0, step_timeout_s=10.0)
        played: Any = environment.kind.environment
        played._num_turns, scripted = num_turns + 1, slow_model(turn_s)
        ask = scripted.episode._generate

        async def last_is_slow(request: Any) -> Any:
            played._seconds = 4.0 if request.key.turn + 1 < num_turns else 1e6
            return await ask(request)

        scripted.episode._generate = last_is_slow
        with pytest.raises(EnvironmentFailed, match="between two turns"):
            await environment.rollout(scripted.episode)
        return asyncio.get_running_loop().time()

    assert run_virtual(program()) == pytest.approx(num_turns * (4.0 + turn_s) + 10.0)


class Stubborn:
    """Ignores that it is ended, and asks again."""

    async def rollout(self, context: Context) -> float:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(1e6)
        await context.ask("?")
        return 1.0


def test_an_environment_that_ignores_the_end_of_its_time_gets_no_turn() -> None:
    async def program() -> list[Any]:
        kind = find_environment(EnvironmentConfig(use=f"{__file__}:Stubborn", step_timeout_s=10.0))
        assert kind.environment is not None
        scripted = slow_model(0.0)
        with pytest.raises(EnvironmentFailed, match="after the step limit of 10 s had passed"):
            await Hosted(kind, kind.environment, text_with(None)).rollout(scripted.episode)
        return scripted.episode.all_turns

    assert run_virtual(program()) == []


def test_no_more_episodes_at_once_than_allowed_and_first_come_is_first_served() -> None:
    async def program() -> tuple[list[int], float, list[str]]:
        environment, order, named = slow(10.0, max_concurrent=2), list[int](), list[str]()

        async def waiting(what: str, work: Awaitable[Any]) -> Any:
            named.append(what)
            return await work

        async def one(number: int) -> None:
            scripted = slow_model(0.0)
            scripted.episode._wait = waiting
            await environment.rollout(scripted.episode)
            order.append(number)

        await asyncio.gather(*(one(number) for number in range(6)))
        return order, asyncio.get_running_loop().time(), named

    order, seconds, named = run_virtual(program())
    assert order == list(range(6)) and seconds == pytest.approx(90.0)
    assert named == ["a place in Slow"] * 6


def test_waiting_for_a_place_does_not_count_against_a_rollouts_time() -> None:
    async def program() -> list[bool]:
        environment, is_late = slow(10.0, max_concurrent=1), list[bool]()

        async def one() -> None:
            scripted = slow_model(0.0)
            limit = scripted.episode._limit = Limit(35.0)
            try:
                async with limit:
                    await environment.rollout(scripted.episode)
            except TimeoutError:
                is_late.append(True)

        await asyncio.gather(*(one() for _ in range(4)))
        return is_late

    assert run_virtual(program()) == []


def test_a_paused_limit_goes_on_with_what_was_left() -> None:
    async def program() -> float:
        with pytest.raises(TimeoutError):
            async with Limit(10.0) as limit:
                await asyncio.sleep(4.0)
                with limit.paused():
                    await asyncio.sleep(1000.0)
                await asyncio.sleep(1000.0)
        return asyncio.get_running_loop().time()

    assert run_virtual(program()) == pytest.approx(1010.0)


def test_a_limit_that_is_paused_for_two_reasons_goes_on_when_both_are_over() -> None:
    """The parts of a rollout may wait at the same time, and the first to begin may be the first to end."""

    async def wait(limit: Limit, after_s: float, seconds: float) -> None:
        await asyncio.sleep(after_s)
        with limit.paused():
            await asyncio.sleep(seconds)

    async def program() -> tuple[float, float]:
        limit = Limit(10.0)
        with pytest.raises(TimeoutError):
            async with limit:
                await asyncio.gather(wait(limit, 1.0, 100.0), wait(limit, 51.0, 100.0))
                await asyncio.sleep(1000.0)
        return asyncio.get_running_loop().time(), limit.paused_s

    assert run_virtual(program()) == pytest.approx((160.0, 150.0))


def test_a_place_is_given_back_by_an_episode_that_fails_or_is_cancelled() -> None:
    async def program() -> Any:
        environment = slow(11.0, max_concurrent=1, step_timeout_s=10.0)
        with pytest.raises(EnvironmentFailed):
            await environment.rollout(slow_model(0.0).episode)
        cut = [asyncio.ensure_future(environment.rollout(slow_model(0.0).episode)) for _ in range(2)]
        await asyncio.sleep(1.0)
        for task in cut:
            task.cancel()
        await asyncio.gather(*cut, return_exceptions=True)
        environment.kind.environment._seconds = 1.0  # type: ignore[union-attr]
        return await environment.rollout(slow_model(0.0).episode)

    assert run_virtual(program()) == 1.0


def test_what_does_not_go_together_is_refused() -> None:
    def config(lockstep: bool = True, extra_members: int = 0, **environment: Any) -> RunConfig:
        table = {"use": "frozen_lake", **environment}
        pipeline, rollout = {"max_lag": 0, "lockstep": lockstep}, {"extra_members": extra_members}
        tables = {"model": {"tiny": {}}, "environment": [table], "pipeline": pipeline, "rollout": rollout}
        return convert(tables, RunConfig, where="")

    check_combinations(config(max_concurrent=128))
    check_combinations(config(max_concurrent=8, lockstep=False))
    with pytest.raises(ConfigError, match="all 144 rollouts"):
        check_combinations(config(max_concurrent=128, extra_members=1))
    with pytest.raises(
        ConfigError, match=r"max_concurrent = 8 does not go with pipeline\.max_lag = 0.*all 128 rollouts"
    ):
        check_combinations(config(max_concurrent=8))
    with pytest.raises(ConfigError, match="single_turn needs no process"):
        config(use="single_turn", process=True)
    with pytest.raises(ConfigError, match="max_concurrent must be at least 1"):
        config(max_concurrent=0)
    with pytest.raises(ConfigError, match="step_timeout_s"):
        config(step_timeout_s=0)


def test_a_hung_step_on_a_thread_fails_its_rollout_and_holds_back_nobody(wild: str) -> None:
    Path(wild).write_text(WILD.replace("time.sleep(60)", "time.sleep(2.5)"))

    async def program() -> None:
        async with hosted(f"{wild}:Wild", step_timeout_s=0.2) as environments:
            assert "took longer than 0.2 s" in await failure(environments, "hang")
            assert (await play(environments, "fine"))[0] == 1.0

    asyncio.run(program())


def test_messages_cross_the_border_as_messages(tmp_path: Path) -> None:
    (tmp_path / "chat.py").write_text(
        "from millstream.types import Message\nfrom millstream.env import Step\n"
        "class Chat:\n"
        "    def reset(self, task, seed): return [Message(role='user', content=task.prompt[0].content)]\n"
        "    def step(self, action): return Step(reward=float(action == 'a'), is_done=True)\n"
    )

    async def program() -> float:
        async with hosted(f"{tmp_path / 'chat.py'}:Chat", process=True) as environments:
            task = Task(id="1", prompt=(Message(role="user", content="hello"),))
            scripted = Scripted(text_with(CHATML), ["a"], task=task)
            reward = await environments.rollout(scripted.episode)
            assert "user\nhello<|im_end|>" in scripted.shown(scripted.requests[0].tokens)
            return float(reward)  # type: ignore[arg-type]

    assert asyncio.run(program()) == 1.0


def test_a_cluster_process_whose_end_is_not_reported_delays_nothing(wild: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster may report the end of a process on an unreachable node much later."""
    reported = threading.Event()

    class Silent(LocalWorker):
        def exit_reason(self, timeout_s: float | None = None) -> str | None:
            return super().exit_reason(timeout_s) if reported.wait(30) else None

    class Cluster:
        def launch(self, kind: Kind, module: str, *, name: str, descriptors: Sequence[int] = ()) -> Silent:
            return Silent(module, name, descriptors)

    async def program() -> None:
        environment = isolated.Isolated(EnvironmentConfig(use=f"{wild}:Wild", process=True), Cluster())
        scripted = Scripted(text_with(CHATML), ["a"], task=Task(id="1", prompt="fine"))
        assert await environment.rollout(Conversation(scripted.episode, text_with(CHATML))) == 1.0
        await environment.close()
        assert not reported.is_set()
        reported.set()
        await asyncio.sleep(0.5)

    monkeypatch.setattr(isolated, "GONE_S", 0.05)
    asyncio.run(asyncio.wait_for(program(), 30))


def test_a_worker_leaves_no_thread_behind_when_it_has_ended(wild: str) -> None:
    async def program() -> None:
        async with hosted(f"{wild}:Wild", process=True) as environments:
            assert (await play(environments, "fine"))[0] == 1.0

    asyncio.run(program())
    deadline = time.monotonic() + 5.0
    while left := [one.name for one in threading.enumerate() if "a process for Wild" in one.name]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
