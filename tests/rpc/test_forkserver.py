"""The warm process: its workers are as if freshly started, nothing is left behind, and what it cannot do is done without it."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from millstream.errors import WorkerExited
from millstream.rpc import warm
from millstream.rpc.call import Remote
from millstream.rpc.forkserver import SOCKET_VARIABLE, ForkRequest, _place
from millstream.rpc.process import LocalLauncher, LocalWorker, WorkerProcess
from millstream.rpc.warm import ForkedWorker, WarmProcess
from support.processes import children, eventually, is_alive
from support.rpc_worker import Do, WorkerSetup

TARGET = "support.rpc_worker:serve_test"
pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux only")]


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[WarmProcess]:
    """A warm process of this test, which is the one that launchers use."""
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    process = WarmProcess()
    monkeypatch.setattr(warm, "WARM", process)
    yield process
    server = process._process
    process.close()
    assert server is None or not is_alive(server.pid)


def launch(descriptors: tuple[int, ...] = ()) -> WorkerProcess:
    return LocalLauncher(is_warm=True).launch("learner", TARGET, name="a warm worker", descriptors=descriptors)


def start(launch: Callable[[], WorkerProcess] = launch) -> Remote:
    remote = Remote(launch, WorkerSetup(), name="a worker")
    remote.ready.result(60.0)
    return remote


def server_of(process: WarmProcess) -> int:
    assert process._process is not None
    return process._process.pid


def ask(remote: Remote, what: str, argument: Any = None, answer: Any = Any) -> Any:
    return remote.call(Do(what, argument), answer).result(20.0)


def test_a_forked_worker_is_as_if_freshly_started(
    process: WarmProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = start()
    monkeypatch.setenv("MILLSTREAM_TEST", "set after the warm process was started")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    forked, fresh = start(), start(lambda: LocalWorker(TARGET, "a warm worker"))
    assert isinstance(forked.process, ForkedWorker) and isinstance(fresh.process, LocalWorker)
    found, expected, other = ask(forked, "self"), ask(fresh, "self"), ask(first, "self")
    for same in ("group", "folder", "environment", "stdin", "handlers"):
        assert found[same] == expected[same], same
    assert found["environment"] == dict(os.environ), "what it starts gets no other import path"
    assert found["path"] == sys.path and found["name"] == "a warm worker"
    assert len(found["descriptors"]) <= len(expected["descriptors"]), (
        "none of the warm process's or of another worker's"
    )
    numbers = {*found["random"], *other["random"], random.random()}
    assert len(numbers) == 5, "random numbers of its own"
    for remote in (first, forked, fresh):
        remote.close()
        assert remote.exited.result(5.0) == "its process ended with exit code 0"


def test_descriptors_arrive_under_their_numbers(process: WarmProcess) -> None:
    memory = os.memfd_create("shared")
    os.write(memory, b"weights")
    high = os.dup2(memory, 450)
    remote = start(lambda: launch((memory, high)))
    assert isinstance(remote.process, ForkedWorker)
    assert [ask(remote, "read", number, bytes) for number in (memory, high)] == [b"weights"] * 2
    remote.close()
    os.close(memory)
    os.close(high)


def test_a_worker_has_no_descriptor_but_its_own() -> None:
    """Also when one of the warm process's is between those that it gets."""
    request = ForkRequest(
        target="", name="", connection=300, numbers=[], environment={}, folder="", path=[], package=""
    )
    reading, writing = os.pipe()
    between = os.dup2(reading, 302)  # the worker's are moved to 301 and 303
    pid = os.fork()
    if pid == 0:
        _place([writing, writing], request)
        os.write(300, repr(sorted(map(int, os.listdir("/proc/self/fd")))).encode())  # noqa: PTH208
        os._exit(0)
    os.close(writing)
    os.close(between)
    with os.fdopen(reading) as file:
        assert file.read() == "[0, 1, 2, 3, 300]", "3: of the folder that was listed"
    os.waitpid(pid, 0)


def test_a_request_that_cannot_be_sent_leaves_no_descriptor_open(
    process: WarmProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(process, "_connected", lambda: socket.socket(socket.AF_UNIX))
    monkeypatch.setattr(warm, "send_descriptors", refuse)
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    assert process.fork(TARGET, "a worker", keeps_stderr=True) is None
    assert eventually(lambda: before.issuperset(os.listdir("/proc/self/fd")))  # noqa: PTH208


def test_a_worker_that_is_killed_says_so_and_takes_what_it_started_with_it(process: WarmProcess) -> None:
    remote = start()
    child = ask(remote, "spawn", answer=int)
    with pytest.raises(
        WorkerExited, match=r"exit code -9 \(SIGKILL\); its last line on stderr: out of memory"
    ) as found:
        ask(remote, "die", "out of memory")
    assert found.value.is_death and eventually(lambda: not is_alive(child))
    hanging = start()
    child = ask(hanging, "spawn", answer=int)
    hanging.call(Do("sleep", 600))
    hanging.close(0.1)
    assert hanging.process is not None
    assert eventually(lambda: not is_alive(child)) and not is_alive(hanging.process.pid)


def test_many_are_forked_at_once_and_none_is_left(process: WarmProcess) -> None:
    with ThreadPoolExecutor(16) as threads:
        remotes = list(threads.map(lambda _: start(), range(16)))
        pids = list(threads.map(lambda remote: ask(remote, "pid", answer=int), remotes))
        assert len(set(pids)) == 16 and sorted(children(server_of(process))) == sorted(pids)
        list(threads.map(Remote.close, remotes))
    assert not any(map(is_alive, pids)) and children(server_of(process)) == []


def test_workers_outlive_a_warm_process_that_is_killed_and_the_next_launch_starts_another(process: WarmProcess) -> None:
    before = start()
    first = server_of(process)
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: not is_alive(first))
    assert ask(before, "echo", 1, int) == 1
    after = start()
    assert isinstance(after.process, ForkedWorker) and server_of(process) != first
    with pytest.raises(WorkerExited, match="its process ended, and the warm process that could say how is gone"):
        ask(before, "die", "")
    after.close()


def test_what_the_warm_process_cannot_serve_is_started_without_it(
    process: WarmProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    start().close()
    with monkeypatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "7")  # a library that is imported has read it already
        other = start()
    monkeypatch.setattr(warm, "own_package", lambda: "/another/checkout")
    elsewhere = start()
    monkeypatch.setenv(SOCKET_VARIABLE, "off")
    off = start()
    for remote in (other, elsewhere, off):
        assert isinstance(remote.process, LocalWorker) and ask(remote, "echo", 1, int) == 1
        remote.close()


def test_a_warm_process_of_others_is_shared_and_one_that_is_gone_is_not_missed(
    process: WarmProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "socket"
    shared = warm.start_forkserver(path)
    assert eventually(path.exists, 30.0)
    monkeypatch.setenv(SOCKET_VARIABLE, str(path))
    remote = start()
    assert remote.process is not None and children(shared.pid) == [remote.process.pid]
    warm.end_forkserver(shared)
    with pytest.raises(WorkerExited):  # its workers go with it
        ask(remote, "sleep", 60)
    again = start()
    assert isinstance(again.process, ForkedWorker) and process._process is not None
    again.close()


def test_nothing_is_left_when_the_owner_is_killed(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import time
        from support.rpc_worker import Do, WorkerSetup
        from millstream.rpc import warm
        from millstream.rpc.call import Remote
        from millstream.rpc.process import LocalLauncher
        launch = lambda: LocalLauncher(is_warm=True).launch("reward", "support.rpc_worker:serve_test", name="w")
        remotes = [Remote(launch, WorkerSetup(), name="w") for _ in range(3)]
        pids = [remote.call(Do("pid"), int).result() for remote in remotes]
        print(warm.WARM._process.pid, *pids, remotes[0].call(Do("spawn"), int).result(), flush=True)
        remotes[1].call(Do("sleep", 600))
        time.sleep(600)
        """
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    environment.pop(SOCKET_VARIABLE, None)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 5 and all(map(is_alive, pids))
        owner.kill()
    assert eventually(lambda: not any(map(is_alive, pids)))


def test_a_second_worker_is_there_within_a_second_of_cpu_time(process: WarmProcess) -> None:
    """Of a module of ours with torch: the first one imports it, which takes seconds."""
    target = "millstream.learner.scorer_worker:serve_scorer"
    for _ in range(2):
        worker = process.fork(target, "scorer")
        assert worker is not None
    ticks = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    assert sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK") < 1.0
    began = time.monotonic()
    worker.connection.close()  # nothing was sent yet: it ends by itself
    assert worker.exit_reason(20.0) is not None and time.monotonic() - began < 20.0
