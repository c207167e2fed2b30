"""Workers that start late, never start, stop reading, or answer after the caller's timeout."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from millstream.errors import LearnerError, LearnerGone
from millstream.learner.messages import ScoreRows, ShareSetup, TakeSnapshot
from millstream.learner.processes import LearnerProcesses
from millstream.learner.remote_scorer import RemoteScorer
from millstream.rpc import group as rpc_group
from millstream.rpc.call import Channel, Remote
from millstream.rpc.process import Kind
from millstream.run.build_scorers import Scorers
from support.near_worker import NearWorker, no_more_processes


class NearLauncher:
    def __init__(self, launch: Callable[[], NearWorker]) -> None:
        self._launch = launch

    def launch(self, kind: Kind, module: str, *, name: str, descriptors: Sequence[int] = ()) -> NearWorker:
        return self._launch()


def group_of(launch: Callable[[], NearWorker]) -> LearnerProcesses:
    return LearnerProcesses([Remote(launch, TakeSnapshot(0), name="rank 0 of 1")], who="the learner")


@pytest.mark.timeout(20)
def test_a_caller_gets_the_reason_when_the_machine_refuses_to_start_a_process() -> None:
    with pytest.raises(LearnerGone, match=r"rank 0 of 1: it could not be started: .*temporarily unavailable"):
        group_of(no_more_processes).wait()


@pytest.mark.timeout(20)
def test_the_processes_of_all_scorers_start_in_parallel() -> None:
    both = threading.Barrier(2)
    workers = [NearWorker(), NearWorker()]

    def launch() -> NearWorker:
        worker = workers[both.wait(10.0)]
        Channel(worker.theirs).answer(1, None)  # its setup is the first call
        return worker

    setup: Any = ShareSetup()  # the test's other end does not read it
    made = [RemoteScorer(lambda: nullcontext(setup), NearLauncher(launch)) for _ in range(2)]
    asyncio.run(Scorers(reference=made[0], proximal=made[1]).ready())
    for worker in workers:
        worker.kill()
    for scorer in made:
        scorer.end()


@pytest.mark.timeout(20)
def test_a_process_that_stopped_reading_in_the_middle_of_a_call_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rpc_group, "CLOSE_S", 0.2)
    worker = NearWorker()
    group = group_of(lambda: worker)
    channel = Channel(worker.theirs)
    (setup,) = channel.receive(block=True) or []
    channel.answer(setup.number, None)
    group.wait()

    def ask() -> None:
        with pytest.raises(LearnerError):
            group.call(ScoreRows([bytes(1 << 24)]), bytes)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    time.sleep(0.2)  # it is in the middle of it
    closing = threading.Thread(target=group.close, daemon=True)
    closing.start()
    closing.join(5.0)
    asking.join(5.0)
    assert not closing.is_alive() and not asking.is_alive() and worker.is_killed.is_set()
