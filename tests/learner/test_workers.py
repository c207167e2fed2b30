"""Lines to workers that come late, never come, stop reading or answer when nobody waits any more."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from millstream.env.isolated import _Elsewhere
from millstream.errors import LearnerError, LearnerGone
from millstream.learner import process_group as crews
from millstream.learner.messages import READY, Answer, Keep, Score
from millstream.learner.process_group import ProcessGroup, ProcessSpec
from millstream.rpc.frames import frame
from millstream.rpc.process import Kind


class NearWorker:
    """A worker without a process: whoever has the other end is it."""

    pid, node = 0, ""

    def __init__(self) -> None:
        self.connection, self.theirs = socket.socketpair()
        self.is_killed = threading.Event()

    def kill(self) -> None:
        self.is_killed.set()
        self.theirs.close()

    def exit_reason(self, timeout_s: float | None = None) -> str | None:
        return "it was killed" if self.is_killed.wait(timeout_s) else None

    @property
    def has_died(self) -> bool:
        return self.is_killed.is_set()


class NearLauncher:
    def __init__(self, launch: Callable[[], NearWorker]) -> None:
        self._launch = launch

    def launch(self, kind: Kind, module: str, *, name: str, descriptors: Sequence[int] = ()) -> NearWorker:
        return self._launch()


def no_more_processes() -> NearWorker:
    raise OSError(11, "Resource temporarily unavailable")


def crew_of(launch: Callable[[], NearWorker]) -> ProcessGroup:
    return ProcessGroup(
        [ProcessSpec("learner", "", "rank 0", Keep(0), place="rank 0 of 1")], NearLauncher(launch), who="the learner"
    )


@pytest.mark.timeout(20)
def test_whoever_waits_for_a_process_that_the_machine_refuses_to_start_is_told() -> None:
    with pytest.raises(LearnerGone, match=r"rank 0 of 1: it could not be started: .*temporarily unavailable"):
        crew_of(no_more_processes).wait()


@pytest.mark.timeout(20)
def test_a_process_that_has_stopped_reading_in_the_middle_of_an_order_is_ended_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crews, "CLOSE_S", 0.2)
    worker = NearWorker()
    crew = crew_of(lambda: worker)
    worker.theirs.sendall(frame(Answer(number=READY)))
    crew.wait()

    def ask() -> None:
        with pytest.raises(LearnerError):
            crew.ask(Score(bytes(1 << 24)))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    time.sleep(0.2)  # it is in the middle of it
    closing = threading.Thread(target=crew.close, daemon=True)
    closing.start()
    closing.join(5.0)
    asking.join(5.0)
    assert not closing.is_alive() and not asking.is_alive() and worker.is_killed.is_set()


# ---- environments ------------------------------------------------------------------------------------------------------


def test_an_environments_process_leaves_no_thread_behind_when_it_has_ended() -> None:
    async def play() -> None:
        for _ in range(3):
            process = await _Elsewhere.start(NearLauncher(NearWorker), "a game")
            ending = asyncio.ensure_future(process.wait())
            await asyncio.sleep(0.01)
            process.kill()
            assert await ending == "it was killed"

    asyncio.run(play())
    deadline = time.monotonic() + 5.0
    while left := [one.name for one in threading.enumerate() if "of an environment" in one.name]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
