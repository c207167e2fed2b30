"""Lines to workers that come late, never come, stop reading or answer when nobody waits any more."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from millstream.engine.native.remote import RemoteHost, Setup, work
from msgspec import structs

from millstream.engine import EngineConfig
from millstream.engine.native import remote
from millstream.engine.native.process import plan_of
from millstream.engine.native.worker import Close, Command, Offer, Report
from millstream.env.isolated import _Elsewhere
from millstream.errors import LearnerError, LearnerGone, WeightsError, WeightsSuperseded, WeightsUnreachable
from millstream.learner import process_group as crews
from millstream.learner.messages import READY, Answer, Keep, Score
from millstream.learner.process_group import ProcessGroup, ProcessSpec
from millstream.model.load import model_weights
from millstream.rpc.frames import Frames, frame
from millstream.rpc.process import Kind
from millstream.types import Weights
from millstream.weights.transfer import WeightsRef
from millstream.weights.transfer.fetcher import WeightsFetcher
from millstream.weights.transfer.publisher import WeightsPublisher
from millstream.weights.transfer.remote_weights import RemoteWeights
from support.tiny import CONFIGS, make


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


# ---- engines -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[WeightsPublisher]:
    outbox = WeightsPublisher(tmp_path / "staged", node="", ways=["shared"])
    yield outbox
    outbox.close()


def setup_of(outbox: WeightsPublisher) -> Setup:
    model = make(next(iter(CONFIGS)))
    plan = plan_of(model, EngineConfig(slots=2), None, "cpu")
    return Setup(plan=plan, parcel=outbox.put(0, model_weights(model).items()))


class RemoteEngine:
    """A host, and the other end of its line in the hands of the test."""

    def __init__(self, outbox: WeightsPublisher, answer_s: float, *, comes_after_s: float = 0.0) -> None:
        self.worker, self.reports = NearWorker(), queue.SimpleQueue[Report]()
        self._outbox, self._comes_after_s = outbox, comes_after_s
        self.host = RemoteHost(self._launch, setup_of(outbox), self._stage, answer_s=answer_s)
        self.host.start(self.reports.put)
        self._frames = Frames(self.worker.theirs)
        assert comes_after_s or self.hears_its_setup()

    def _launch(self) -> NearWorker:
        time.sleep(self._comes_after_s)
        return self.worker

    def hears_its_setup(self) -> bool:
        return self._frames.first() is not None

    def _stage(self, weights: Weights) -> WeightsRef:
        return self._outbox.put(1, [("w", torch.zeros(4))])

    def begin(self) -> RemoteEngine:
        """Its first word: it is ready."""
        self.say(Report([], []))
        self.reports.get(timeout=5.0)
        return self

    def next_offer(self) -> Offer:
        said = self._frames.first()
        command = msgspec.msgpack.decode(said or b"", type=Command)
        assert isinstance(command, Offer)
        return command

    def say(self, report: Report) -> None:
        self.worker.theirs.sendall(frame(report))


@pytest.mark.timeout(20)
def test_an_answer_to_an_offer_that_comes_when_nobody_waits_any_more_costs_the_engine_nothing(
    outbox: WeightsPublisher,
) -> None:
    engine = RemoteEngine(outbox, answer_s=0.1).begin()
    with pytest.raises(WeightsError, match=r"not taken within 0\.1 s"):
        engine.host.offer({})
    engine.say(Report([], [(engine.next_offer().number, None)], is_aside=True))
    engine.say(Report([], [], running=7))
    assert [engine.reports.get(timeout=5.0).running for _ in range(2)] == [0, 7]
    engine.worker.kill()


@pytest.mark.timeout(20)
def test_whoever_waits_for_weights_to_be_taken_is_told_when_the_engine_is_closed(outbox: WeightsPublisher) -> None:
    engine, told = RemoteEngine(outbox, answer_s=600.0).begin(), queue.SimpleQueue[str]()

    def offer() -> None:
        try:
            engine.host.offer({})
        except WeightsError as error:
            told.put(str(error))

    async def close() -> None:
        engine.host.send(Close())
        await asyncio.to_thread(engine.host.join)

    threading.Thread(target=offer, daemon=True).start()
    engine.next_offer()
    engine.worker.kill()
    asyncio.run(close())
    assert told.get(timeout=5.0)
    with pytest.raises(WeightsError):  # nor is one that comes later kept waiting
        engine.host.offer({})


@pytest.mark.timeout(20)
def test_an_engine_that_the_machine_refuses_to_start_says_so(outbox: WeightsPublisher) -> None:
    reports = queue.SimpleQueue[Report]()
    host = RemoteHost(no_more_processes, setup_of(outbox), lambda weights: outbox.put(1, []), answer_s=1.0)
    host.start(reports.put)
    assert "Resource temporarily unavailable" in (reports.get(timeout=5.0).broken or "")


@pytest.mark.timeout(20)
def test_how_long_an_engine_takes_to_come_and_to_begin_is_not_held_against_what_it_is_offered(
    outbox: WeightsPublisher,
) -> None:
    engine = RemoteEngine(outbox, answer_s=0.2, comes_after_s=0.5)
    offering = threading.Thread(target=engine.host.offer, args=({},), daemon=True)
    offering.start()
    assert engine.hears_its_setup()
    time.sleep(0.5)  # it builds its model
    assert offering.is_alive()
    engine.begin()
    engine.say(Report([], [(engine.next_offer().number, None)], is_aside=True))
    offering.join(5.0)
    assert not offering.is_alive()
    engine.worker.kill()


@pytest.mark.timeout(20)
def test_an_engine_that_comes_and_never_begins_is_given_up(
    outbox: WeightsPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "START_S", 0.3)
    engine = RemoteEngine(outbox, answer_s=0.1)
    with pytest.raises(WeightsError, match=r"it has said nothing in the 0\.3 s since its process was started"):
        engine.host.offer({})
    assert "since its process was started" in (engine.reports.get(timeout=5.0).broken or "")
    engine.worker.kill()


@pytest.mark.timeout(20)
def test_weights_that_are_offered_to_an_engine_that_cannot_be_started_are_not_waited_for(
    outbox: WeightsPublisher,
) -> None:
    def refuse() -> NearWorker:
        time.sleep(0.3)
        raise OSError(11, "Resource temporarily unavailable")

    host = RemoteHost(refuse, setup_of(outbox), lambda weights: outbox.put(1, []), answer_s=600.0)
    host.start(lambda report: None)
    with pytest.raises(WeightsError, match="Resource temporarily unavailable"):
        host.offer({})


@pytest.mark.timeout(60)
def test_weights_that_died_with_whoever_had_staged_them_are_told_from_others_that_are_superseded(
    outbox: WeightsPublisher, tmp_path: Path
) -> None:
    worker = NearWorker()
    threading.Thread(target=work, args=(worker.theirs,), daemon=True).start()
    host = RemoteHost(lambda: worker, setup_of(outbox), lambda weights: outbox.put(1, []), answer_s=30.0)
    host.start(lambda report: None)
    rank = WeightsPublisher(tmp_path / "rank", node="", ways=["shared"])
    parcels = [rank.put(version, [("w", torch.zeros(4))]) for version in range(3)]
    with pytest.raises(WeightsSuperseded, match="version 0 is superseded by version 2"):
        host.offer(RemoteWeights(parcels[0], WeightsFetcher("")))
    rank.close()
    with pytest.raises(WeightsUnreachable, match="was closed"):
        host.offer(RemoteWeights(parcels[2], WeightsFetcher("")))
    worker.kill()


@pytest.mark.timeout(60)
def test_an_engine_whose_first_weights_are_not_to_be_had_says_why_before_it_goes(outbox: WeightsPublisher) -> None:
    ours, theirs = socket.socketpair()
    setup = setup_of(outbox)
    ours.sendall(frame(structs.replace(setup, parcel=structs.replace(setup.parcel, path="/nowhere"))))
    work(theirs)
    report = msgspec.msgpack.decode(Frames(ours).first() or b"", type=Report)
    assert "it could not begin: WeightsUnreachable" in (report.broken or "")


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
