"""Calls to a worker process: every future ends, every error keeps its class, every end has one reason, nothing is left."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from millstream import errors
from millstream.errors import ClusterError, ConfigError, MillstreamError, WeightsSuperseded, WorkerError, WorkerExited
from millstream.rpc import call
from millstream.rpc.call import Channel, Remote
from millstream.rpc.frames import frame
from millstream.rpc.process import LocalLauncher, WorkerProcess
from support.processes import eventually, is_alive, launch_worker
from support.rpc_worker import CountUp, Do, WorkerSetup

Make = Callable[..., Remote]
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Remote] = []

    def make(
        setup: WorkerSetup | None = None, launch: Callable[[], WorkerProcess] = launch_worker, **options: Any
    ) -> Remote:
        made.append(Remote(launch, setup or WorkerSetup(), name="the worker", **options))
        return made[-1]

    yield make
    for remote in made:
        remote.close()
        assert remote.process is None or eventually(lambda: not is_alive(remote.process.pid))


def test_calls_are_answered_in_order_and_by_their_number(make: Make) -> None:
    remote = make()
    remote.send(Do("note", 1), Do("note", 2))
    answers = [remote.call(Do("echo", number), int) for number in range(50)]
    assert [answer.result(20.0) for answer in answers] == list(range(50))
    assert remote.call(Do("noted"), list[int]).result(5.0) == [1, 2]
    big = os.urandom(8 << 20)
    assert remote.call(Do("echo", big), bytes).result(20.0) == big


def test_an_error_arrives_with_its_class_and_leaves_the_worker_at_work(make: Make) -> None:
    remote = make()
    with pytest.raises(WeightsSuperseded, match="version 2 is newer"):
        remote.call(Do("superseded", "version 2 is newer")).result(20.0)
    with pytest.raises(OSError, match="No space left") as refused:
        remote.call(Do("full disk")).result(5.0)
    assert refused.value.errno == 28
    with pytest.raises(WorkerError, match="ZeroDivisionError: by nothing"):
        remote.call(Do("bug", "by nothing")).result(5.0)
    assert remote.call(Do("echo", "still there"), str).result(5.0) == "still there" and remote.is_idle


def test_an_error_of_another_class_does_not_arrive_as_one_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    class NeedsTwo(MillstreamError):
        def __init__(self, first: str, second: str) -> None:
            super().__init__(first + second)

    foreign = type("ConfigError", (Exception,), {})("of a library")
    NeedsTwo.__module__ = errors.__name__
    monkeypatch.setattr(errors, "NeedsTwo", NeedsTwo, raising=False)
    for error, words in ((foreign, "ConfigError: of a library"), (NeedsTwo("a", "b"), "ab")):
        found = call.error_from(call.describe_error(error))
        assert type(found) is WorkerError and str(found) == words


def test_a_worker_that_cannot_be_built_says_why_to_everyone_who_waits(make: Make) -> None:
    remote = make(WorkerSetup(refuses="model.path = nothing"))
    early = remote.call(Do("echo", 1), int)
    for future in (remote.ready, early):
        with pytest.raises(ConfigError, match=r"model\.path = nothing"):
            future.result(20.0)
    with pytest.raises(ConfigError):
        remote.call(Do("echo", 1)).result(5.0)


def test_a_worker_whose_code_cannot_be_imported_says_why_instead_of_dying(make: Make, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_the_kind\n")
    for target, reason in {
        f"{broken}:serve": "No module named 'nothing_of_the_kind'",
        "support.rpc_worker:nothing": "support.rpc_worker has no function 'nothing'",
        "support.nothing:serve": "cannot import support.nothing",
    }.items():
        remote = make(launch=partial(LocalLauncher().launch, "learner", target, name="a worker"))
        with pytest.raises(ConfigError, match=reason):
            remote.ready.result(20.0)


def test_a_death_ends_every_call_with_one_reason_that_has_the_last_words(make: Make) -> None:
    told = queue.SimpleQueue[Exception]()
    remote = make(on_exit=told.put)
    child = remote.call(Do("spawn"), int).result(20.0)
    calls = [remote.call(Do("die", "out of memory, say")), remote.call(Do("echo", 1), int)]
    for one in calls:
        with pytest.raises(WorkerExited, match=r"exit code -9 .*stderr: out of memory, say") as found:
            one.result(20.0)
        assert found.value.is_death
    assert eventually(lambda: not is_alive(child)), "what it had started was killed before the reason was told"
    assert remote.exited.result(5.0) == str(told.get(timeout=5.0)) == str(remote.error)
    with pytest.raises(WorkerExited):
        remote.call(Do("echo", 1)).result(5.0)


def test_a_process_that_cannot_be_started_is_an_end_like_any_other(make: Make) -> None:
    def refused() -> WorkerProcess:
        raise OSError(11, "Resource temporarily unavailable")

    def no_room() -> WorkerProcess:
        raise ClusterError("waited 300 s for room")

    for launch, words in ((refused, "could not be started: .*temporarily"), (no_room, "^waited 300 s for room$")):
        with pytest.raises(WorkerExited, match=words) as found:
            make(launch=launch).ready.result(5.0)
        assert found.value.is_death


def test_what_is_not_a_message_ends_the_worker_by_name(make: Make) -> None:
    for remote in (make(), make(max_bytes=1000)):
        with pytest.raises(WorkerExited, match="it sent something that is not a message: "):
            remote.call(Do("garbage")).result(20.0)


def test_an_answer_of_another_type_ends_its_own_call_too(make: Make) -> None:
    remote = make()
    for answer in [remote.call(Do("echo", "one"), int), remote.call(Do("echo", 2), int)]:
        with pytest.raises(WorkerExited, match=r"it sent something that is not a message: .*`int`, got `str`"):
            answer.result(20.0)


def test_a_message_above_the_bound_is_refused_where_it_is_sent(make: Make) -> None:
    remote = make(max_bytes=1000)
    for send in (remote.call, remote.send):
        with pytest.raises(ValueError, match=r"a message of 10\d\d bytes .*at most 1000"):
            send(Do("echo", bytes(1000)))
    assert remote.call(Do("echo", 1), int).result(20.0) == 1 and remote.is_idle


@pytest.mark.parametrize("sent", [(1 << 31).to_bytes(4, "little"), frame("not a packet"), frame((1, 9, None))])
def test_a_worker_that_is_sent_something_else_than_a_message_ends(sent: bytes) -> None:
    worker = launch_worker()
    worker.connection.sendall(sent)
    found = worker.exit_reason(20.0)
    worker.kill()
    assert found is not None and found.startswith("its process ended with exit code -9")


def test_the_worker_sends_events_and_calls_back(make: Make) -> None:
    events = queue.SimpleQueue[Any]()

    def on_message(message: Do | CountUp, number: int) -> None:
        if isinstance(message, CountUp):
            remote.answer(number, message.number + 1)
        else:
            events.put(message.argument)

    remote = make(messages=Do | CountUp, on_message=on_message)
    remote.call(Do("event", "hello")).result(20.0)
    assert events.get(timeout=5.0) == "hello"
    assert remote.call(Do("count", 41), int).result(5.0) == 42


def test_background_calls_do_not_hold_up_the_others_and_are_finished_before_the_end(make: Make) -> None:
    remote = make()
    writing = remote.call(Do("write", 0.5))
    assert remote.call(Do("echo", 1), int).result(20.0) == 1 and not writing.done()
    remote.close()
    assert writing.result(1.0) is None
    with pytest.raises(WorkerExited, match="the worker is closed"):
        remote.call(Do("echo", 1)).result(1.0)


def test_a_value_that_cannot_be_sent_is_an_error_of_its_call(make: Make) -> None:
    remote = make()
    for what in ("object", "write object"):  # the second one in the background
        with pytest.raises(WorkerError, match="TypeError: Encoding objects of type object is unsupported"):
            remote.call(Do(what)).result(20.0)
    assert remote.call(Do("echo", 1), int).result(5.0) == 1


def test_close_kills_a_worker_that_does_not_finish_and_what_it_started(make: Make) -> None:
    remote = make()
    child = remote.call(Do("spawn"), int).result(20.0)
    hanging = remote.call(Do("sleep", 600))
    remote.close(0.2)
    assert hanging.exception(5.0) is not None
    assert eventually(lambda: not is_alive(child))


def test_a_worker_ignores_interrupts_and_what_it_starts_does_not(make: Make) -> None:
    remote = make()
    remote.ready.result(20.0)
    assert remote.process is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(remote.process.pid, number)
        codes = [remote.call(Do(what, int(number)), int).result(10.0) for what in ("end child", "end fork")]
        assert codes == [-number, -number]


def test_sending_never_blocks_and_a_worker_that_stopped_reading_can_be_closed(make: Make) -> None:
    remote = make()
    remote.ready.result(20.0)
    assert remote.process is not None
    os.kill(remote.process.pid, signal.SIGSTOP)
    unread = remote.call(Do("echo", bytes(32 << 20)), bytes)  # it would never return
    remote.close(0.2)
    assert isinstance(unread.exception(20.0), WorkerExited)


def test_a_worker_that_is_stopped_can_be_killed_and_its_error_says_why(make: Make) -> None:
    remote = make()
    remote.ready.result(20.0)
    assert remote.process is not None
    os.kill(remote.process.pid, signal.SIGSTOP)
    unanswered = remote.call(Do("echo", 1), int)
    remote.kill("it did not answer")
    with pytest.raises(WorkerExited, match="it did not answer"):
        unanswered.result(20.0)


def test_what_is_posted_in_one_turn_of_the_event_loop_is_sent_at_once_and_is_not_overtaken(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, written = make(), list[int]()
    remote.ready.result(20.0)
    write = Channel._write
    monkeypatch.setattr(Channel, "_write", lambda channel, data: (written.append(len(data)), write(channel, data))[1])

    async def post() -> list[int]:
        for number in range(20):
            remote.post(Do("note", number))
        await asyncio.sleep(0)
        remote.post(Do("note", 20))
        found: list[int] = await asyncio.wrap_future(remote.call(Do("noted"), list[int]))
        return found

    assert asyncio.run(post()) == list(range(21))
    assert len(written) == 2


def test_a_worker_that_is_closed_while_it_is_started_is_killed_when_it_comes(make: Make) -> None:
    workers: list[WorkerProcess] = []

    def late() -> WorkerProcess:
        time.sleep(0.5)
        workers.append(launch_worker())
        return workers[-1]

    remote = make(launch=late)
    remote.close()
    with pytest.raises(WorkerExited, match="the worker is closed"):
        remote.ready.result(1.0)
    remote.exited.result(10.0)
    assert not is_alive(workers[0].pid)


def test_on_an_event_loop_answers_and_the_end_are_delivered_on_it(make: Make) -> None:
    async def program() -> None:
        remote = make(loop=asyncio.get_running_loop())
        await asyncio.wrap_future(remote.ready)
        assert await asyncio.wrap_future(remote.call(Do("echo", [1, 2]), list[int])) == [1, 2]
        cancelled = asyncio.wrap_future(remote.call(Do("sleep", 0.2)))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(cancelled, 0.05)
        assert not remote.is_idle, "its answer is still to come"
        assert await asyncio.wrap_future(remote.call(Do("echo", 3), int)) == 3 and remote.is_idle
        with pytest.raises(WorkerExited, match="exit code 5"):
            await asyncio.wait_for(asyncio.wrap_future(remote.call(Do("orphan"))), 10.0)

    asyncio.run(program())


class LostWorker:
    """A worker on a node that is lost: its connection ends, and its exit is never reported. The test has the other end."""

    pid, node, has_died = 0, "lost", True

    def __init__(self) -> None:
        self.connection, self.theirs = socket.socketpair()

    def kill(self) -> None: ...

    def exit_reason(self, timeout_s: float | None = None) -> str | None:
        threading.Event().wait(timeout_s)
        return None


def test_on_an_event_loop_every_call_ends_when_the_connection_does_although_no_exit_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call, "EXIT_S", 0.01)

    async def program() -> None:
        worker = LostWorker()
        remote = Remote(lambda: worker, WorkerSetup(), name="the worker", loop=asyncio.get_running_loop())
        answer = remote.call(Do("echo", 1), int)
        worker.theirs.close()
        for future in (remote.ready, answer):
            with pytest.raises(WorkerExited, match="its process closed its connection"):
                await asyncio.wait_for(asyncio.wrap_future(future), 10.0)

    asyncio.run(program())


def test_no_worker_outlives_the_process_that_started_it(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import time
        from support.rpc_worker import Do, WorkerSetup
        from millstream.rpc.call import Channel, Remote
        from millstream.rpc.process import LocalLauncher
        remote = Remote(lambda: LocalLauncher().launch("learner", "support.rpc_worker:serve_test", name="w"), WorkerSetup(), name="w")
        print(remote.call(Do("pid"), int).result(), remote.call(Do("spawn"), int).result(), flush=True)
        remote.call(Do("sleep", 600))
        time.sleep(600)
        """
    )
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert all(map(is_alive, pids))
        owner.kill()
    assert eventually(lambda: not any(map(is_alive, pids)))
