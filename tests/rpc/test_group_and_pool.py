"""Groups: all answer or none does, and the error names the first to fail. Pools: a worker that hangs or dies takes one job."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from millstream.errors import ConfigError, LearnerError, LearnerGone, MillstreamError, WorkerError, WorkerExited
from millstream.rpc import group as group_module
from millstream.rpc.call import Remote
from millstream.rpc.group import WorkerGroup
from millstream.rpc.pool import WorkerPool
from millstream.rpc.process import WorkerProcess
from support.processes import eventually, is_alive, launch_worker
from support.rpc_worker import Do, WorkerSetup

pytestmark = pytest.mark.timeout(60)


def error_of(message: str, may_heal: bool) -> MillstreamError:
    return LearnerGone(message) if may_heal else LearnerError(message)


class Groups:
    def __init__(self) -> None:
        self.made: list[WorkerGroup] = []

    def make(self, setups: Sequence[WorkerSetup] = (WorkerSetup(), WorkerSetup())) -> WorkerGroup:
        members = [Remote(launch_worker, setup, name=f"member {number}") for number, setup in enumerate(setups)]
        self.made.append(
            WorkerGroup(members, who="the group", make_error=error_of, is_echo=lambda error: "echo" in str(error))
        )
        return self.made[-1]


@pytest.fixture
def groups() -> Iterator[Groups]:
    groups = Groups()
    yield groups
    for group in groups.made:
        group.close()
        assert not any(map(is_alive, group.pids))


def test_a_call_goes_to_all_and_answers_are_in_the_order_of_the_members(groups: Groups) -> None:
    group = groups.make()
    assert group.call(Do("echo", 7), int) == [7, 7]
    assert group.call([Do("echo", "a"), Do("echo", "b")], str) == ["a", "b"]
    with pytest.raises(OSError, match="No space left"):
        group.call([Do("full disk"), Do("echo", 1)], harmless=(OSError,))
    assert group.call(Do("echo", 8), int) == [8, 8]


def test_a_member_that_raises_is_named_and_ends_the_group(groups: Groups) -> None:
    group = groups.make()
    for _ in range(2):
        with pytest.raises(LearnerError, match="the group broke, member 1: ZeroDivisionError: bug") as found:
            group.call([Do("bug", "echo"), Do("bug", "bug")])
        assert not isinstance(found.value, LearnerGone)
    assert not any(map(is_alive, group.pids))


def test_a_death_is_named_before_the_failures_it_caused(groups: Groups) -> None:
    group = groups.make()
    with pytest.raises(LearnerGone, match="the group broke, member 1: its process ended with exit code -9"):
        group.call([Do("bug", "because of the other"), Do("die", "")])


def test_a_member_that_cannot_be_built_will_not_heal(groups: Groups) -> None:
    with pytest.raises(LearnerError, match="member 1: no such model") as found:
        groups.make([WorkerSetup(), WorkerSetup(refuses="no such model")]).wait()
    assert not isinstance(found.value, LearnerGone)


def launch_reward() -> WorkerProcess:
    return launch_worker("reward")


def pool_of(
    setup: WorkerSetup | None = None,
    *,
    size: int = 2,
    start_s: float = 20.0,
    launch: Callable[[], WorkerProcess] = launch_reward,
) -> WorkerPool:
    def start(loop: asyncio.AbstractEventLoop) -> Remote:
        return Remote(launch, setup or WorkerSetup(), name="r", loop=loop)

    return WorkerPool(start, size=size, start_s=start_s)


async def ask(pool: WorkerPool, message: Do, timeout_s: float = 20.0) -> int:
    async with pool.worker() as worker, asyncio.timeout(timeout_s):
        found: int = await asyncio.wrap_future(worker.call(message, int))
        return found


def test_a_pool_gives_each_worker_one_job_at_a_time_and_keeps_those_that_are_well() -> None:
    async def program() -> None:
        pool = pool_of()
        first = await asyncio.gather(*(ask(pool, Do("pid")) for _ in range(8)))
        assert len(set(first)) == 2
        async with pool.worker() as worker:
            with pytest.raises(WorkerError, match="ZeroDivisionError"):
                await asyncio.wrap_future(worker.call(Do("bug", "")))
        assert {await ask(pool, Do("pid")) for _ in range(4)} <= set(first), "an error of its job costs no worker"
        await pool.close()
        assert not any(map(is_alive, first))

    asyncio.run(program())


def test_the_reason_of_a_failure_is_told_however_late_it_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a heavy load the thread that delivers a failure may wait long for its next turn."""
    monkeypatch.setattr(group_module, "SETTLE_S", 0.1)
    is_killed = threading.Event()

    class Watched(WorkerGroup):
        def kill(self) -> None:
            is_killed.set()
            super().kill()

    member = Remote(launch_worker, WorkerSetup(refuses="no such model"), name="member")
    member.ready.add_done_callback(lambda _: is_killed.wait(20.0))  # before the group notes it
    with pytest.raises(LearnerError, match="the group broke, member: no such model"):
        Watched([member], who="the group", make_error=error_of).wait()


def test_a_worker_that_hangs_dies_or_is_left_by_its_caller_is_killed_and_replaced() -> None:
    async def program() -> None:
        pool = pool_of(size=1)
        before = await ask(pool, Do("pid"))
        with pytest.raises(TimeoutError):
            await ask(pool, Do("sleep", 600), timeout_s=0.1)
        after = await ask(pool, Do("pid"))
        assert after != before and eventually(lambda: not is_alive(before))
        with pytest.raises(WorkerExited, match="exit code -9"):
            await ask(pool, Do("die", ""))
        job = asyncio.create_task(ask(pool, Do("sleep", 600)))
        await asyncio.sleep(0.5)
        job.cancel()
        idle = await ask(pool, Do("pid"))
        os.kill(idle, signal.SIGKILL)  # between two jobs
        while all(remote.error is None for remote in pool._all):  # until its end is noticed
            await asyncio.sleep(0.01)
        assert await ask(pool, Do("echo", 5)) == 5
        await pool.close()

    asyncio.run(program())


def test_the_time_that_a_cluster_needs_for_a_process_is_not_part_of_the_start_limit() -> None:
    async def program() -> None:
        allowed = threading.Event()

        def launch() -> WorkerProcess:
            allowed.wait()
            return launch_reward()

        pool = pool_of(launch=launch)
        clock = asyncio.get_running_loop()
        job = asyncio.create_task(ask(pool, Do("echo", 5)))
        await asyncio.sleep(0)
        later = clock.time() + 1000.0
        clock.time = lambda: later  # type: ignore[method-assign]
        done, _ = await asyncio.wait([job], timeout=0.0)
        assert not done
        allowed.set()
        assert await job == 5
        await pool.close()

    asyncio.run(program())


def test_a_pool_whose_worker_cannot_be_built_says_why_and_one_that_is_late_is_a_timeout() -> None:
    async def program() -> None:
        refusing, late = (
            pool_of(WorkerSetup(refuses="no such function")),
            pool_of(WorkerSetup(sleeps_s=60), start_s=0.5),
        )
        with pytest.raises(ConfigError, match="no such function"):
            await ask(refusing, Do("pid"))
        with pytest.raises(TimeoutError):
            await ask(late, Do("pid"))
        await refusing.close()
        await late.close()

    asyncio.run(program())
