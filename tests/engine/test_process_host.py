"""Engine workers that start late, never start, stop reading or answer too late, behind a `ProcessHost`."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec import structs

from millstream.clock import RealClock
from millstream.decoding import decode_msgpack
from millstream.engine import EngineConfig
from millstream.engine.native import host as hosts
from millstream.engine.native.engine import TorchEngine
from millstream.engine.native.host import ProcessHost
from millstream.engine.native.process import EngineSetup, engine_setup, serve_engine
from millstream.engine.native.worker import Abort, Offer, WorkerReport
from millstream.errors import EngineGone, WeightsSuperseded, WeightsUnreachable, WorkerExited
from millstream.events.sinks import MemorySink
from millstream.model.load import model_weights
from millstream.rpc.call import Channel, Packet, PacketKind
from millstream.rpc.frames import Frames, frame
from millstream.types import RequestKey, Weights
from millstream.weights.transfer import WeightsRef
from millstream.weights.transfer.publisher import WeightsPublisher
from support.near_worker import NearWorker, no_more_processes
from support.tiny import CONFIGS, make


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[WeightsPublisher]:
    publisher = WeightsPublisher(tmp_path / "staged", node="", ways=["shared"])
    yield publisher
    publisher.close()


def setup_of(publisher: WeightsPublisher) -> EngineSetup:
    model = make(next(iter(CONFIGS)))
    first = publisher.put(0, model_weights(model).items())
    return engine_setup(model, EngineConfig(slots=2), None, device="cpu", first=first)


class NearEngine:
    """A host, and the other end of its connection in the hands of the test."""

    def __init__(self, publisher: WeightsPublisher, answer_s: float, *, starts_after_s: float = 0.0) -> None:
        self.worker = NearWorker()
        self.reports = queue.SimpleQueue[WorkerReport]()
        self._publisher = publisher
        self._starts_after_s = starts_after_s
        self.host = ProcessHost(self._launch, setup_of(publisher), self._publish, name="engine", answer_s=answer_s)
        self.host.start(self.reports.put)
        self._frames = Frames(self.worker.theirs)
        assert starts_after_s or self.gets_its_setup()

    def _launch(self) -> NearWorker:
        time.sleep(self._starts_after_s)
        return self.worker

    def gets_its_setup(self) -> bool:
        return self.next().kind is PacketKind.CALL

    def _publish(self, version: int, weights: Weights) -> WeightsRef:
        return self._publisher.put(version, [("w", torch.zeros(4))])

    def begin(self) -> NearEngine:
        """It is ready."""
        self.answer(1)
        self.reports.get(timeout=5.0)
        return self

    def next(self) -> Packet:
        return decode_msgpack(self._frames.first() or b"", Packet)

    def next_offer(self) -> int:
        """Its number."""
        packet = self.next()
        decode_msgpack(packet.body, Offer)
        return packet.number

    def answer(self, number: int) -> None:
        self.worker.theirs.sendall(frame((PacketKind.ANSWER, number, "shared")))

    def report(self, report: WorkerReport) -> None:
        self.worker.theirs.sendall(frame((PacketKind.MESSAGE, 0, report)))


@pytest.mark.timeout(20)
def test_an_answer_to_an_offer_that_comes_too_late_does_not_break_the_engine(publisher: WeightsPublisher) -> None:
    engine = NearEngine(publisher, answer_s=0.1).begin()
    with pytest.raises(WeightsUnreachable, match=r"not fetched within 0\.1 s"):
        engine.host.offer(1, {})
    engine.answer(engine.next_offer())
    engine.report(WorkerReport([], [], running=7))
    assert engine.reports.get(timeout=5.0).running == 7
    engine.worker.kill()


@pytest.mark.timeout(20)
def test_an_offer_that_waits_fails_when_the_engine_is_closed(publisher: WeightsPublisher) -> None:
    engine = NearEngine(publisher, answer_s=600.0).begin()
    failed = queue.SimpleQueue[str]()

    def offer() -> None:
        try:
            engine.host.offer(1, {})
        except WorkerExited as error:
            failed.put(str(error))

    threading.Thread(target=offer, daemon=True).start()
    engine.next_offer()
    engine.worker.kill()
    asyncio.run(engine.host.close())
    assert failed.get(timeout=5.0)
    with pytest.raises(WorkerExited):  # nor does a later one wait
        engine.host.offer(2, {})


@pytest.mark.timeout(20)
def test_commands_of_one_turn_of_the_loop_are_sent_together_and_a_worker_that_does_not_read_blocks_nothing(
    publisher: WeightsPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = NearEngine(publisher, answer_s=1.0).begin()
    written, write = list[int](), Channel._write

    def count(channel: Channel, data: bytes) -> None:
        written.append(len(data))
        write(channel, data)

    monkeypatch.setattr(Channel, "_write", count)

    async def program() -> float:
        began = time.monotonic()
        for _ in range(3):
            for number in range(10_000):
                engine.host.send(Abort(number, RequestKey(group_id=1 << 60, member=number)))
            await asyncio.sleep(0)
        return time.monotonic() - began

    assert asyncio.run(program()) < 10.0 and len(written) == 3
    for number in [*range(10_000)] * 3:
        assert decode_msgpack(engine.next().body, Abort).number == number
    engine.worker.kill()


@pytest.mark.timeout(20)
def test_an_engine_that_the_machine_refuses_to_start_reports_that(publisher: WeightsPublisher) -> None:
    reports = queue.SimpleQueue[WorkerReport]()
    host = ProcessHost(
        no_more_processes,
        setup_of(publisher),
        lambda version, weights: publisher.put(1, []),
        name="engine",
        answer_s=1.0,
    )
    host.start(reports.put)
    assert "Resource temporarily unavailable" in (reports.get(timeout=5.0).broken or "")


@pytest.mark.timeout(20)
def test_the_time_that_an_engine_takes_to_start_does_not_count_against_an_offer(publisher: WeightsPublisher) -> None:
    engine = NearEngine(publisher, answer_s=0.2, starts_after_s=0.5)
    offering = threading.Thread(target=engine.host.offer, args=(1, {}), daemon=True)
    offering.start()
    assert engine.gets_its_setup()
    time.sleep(0.5)  # it builds its model
    assert offering.is_alive()
    engine.begin()
    engine.answer(engine.next_offer())
    offering.join(5.0)
    assert not offering.is_alive()
    engine.worker.kill()


@pytest.mark.timeout(20)
def test_an_engine_that_starts_and_never_begins_is_given_up(
    publisher: WeightsPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "ENGINE_START_S", 0.3)
    worker = NearWorker()

    async def program() -> None:
        host = ProcessHost(
            lambda: worker, setup_of(publisher), lambda version, weights: publisher.put(1, []), name="one", answer_s=0.1
        )
        engine = TorchEngine(host, slots=1, max_length=None, clock=RealClock(), sink=MemorySink(), answer_s=0.1)
        for _ in range(2):
            with pytest.raises(
                EngineGone, match=r"it has reported nothing in the 0\.3 s since its process was started"
            ):
                await engine.load(1, {})

    asyncio.run(program())
    assert worker.is_killed.is_set()


@pytest.mark.timeout(20)
def test_an_offer_to_an_engine_that_cannot_be_started_does_not_wait(publisher: WeightsPublisher) -> None:
    def refuse() -> NearWorker:
        time.sleep(0.3)
        raise OSError(11, "Resource temporarily unavailable")

    host = ProcessHost(
        refuse, setup_of(publisher), lambda version, weights: publisher.put(1, []), name="engine", answer_s=600.0
    )
    host.start(lambda report: None)
    with pytest.raises(WorkerExited, match="Resource temporarily unavailable"):
        host.offer(1, {})


@pytest.mark.timeout(60)
def test_weights_whose_publisher_has_died_are_told_from_others_that_are_superseded(
    publisher: WeightsPublisher, tmp_path: Path
) -> None:
    worker = NearWorker()
    threading.Thread(target=serve_engine, args=(worker.theirs,), daemon=True).start()
    rank = WeightsPublisher(tmp_path / "rank", node="", ways=["shared"])
    refs = [rank.put(version, [("w", torch.zeros(4))]) for version in range(3)]
    host = ProcessHost(
        lambda: worker, setup_of(publisher), lambda version, weights: refs[version], name="engine", answer_s=30.0
    )
    host.start(lambda report: None)
    with pytest.raises(WeightsSuperseded, match="version 0 is superseded by version 2"):
        host.offer(0, {})
    rank.close()
    with pytest.raises(WeightsUnreachable, match="was closed"):
        host.offer(2, {})
    worker.kill()


@pytest.mark.timeout(60)
def test_an_engine_whose_first_weights_cannot_be_fetched_reports_why(publisher: WeightsPublisher) -> None:
    worker = NearWorker()
    setup = setup_of(publisher)
    wrong = structs.replace(setup, first=structs.replace(setup.first, path="/nowhere"))
    reports = queue.SimpleQueue[WorkerReport]()
    host = ProcessHost(lambda: worker, wrong, lambda version, weights: setup.first, name="engine", answer_s=30.0)
    host.start(reports.put)
    serve_engine(worker.theirs)
    with pytest.raises(WorkerExited, match="it could not begin: WeightsUnreachable"):
        host.offer(1, {})
    worker.kill()
    assert "it could not begin: WeightsUnreachable" in (reports.get(timeout=5.0).broken or "")
