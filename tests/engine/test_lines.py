"""Lines to an engine's process: several processes send it requests, and each gets its own answers."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from millstream.clock import RealClock
from millstream.decoding import msgpack_decoder
from millstream.engine.base import EngineLine
from millstream.engine.native.engine import TorchEngine
from millstream.engine.native.host import OnReport
from millstream.engine.native.lines import LineEngine, LineHello, LinkHub
from millstream.engine.native.process import ChannelLink
from millstream.engine.native.worker import Command, DecodeWorker, WorkerReport
from millstream.errors import EngineGone
from millstream.events.sinks import MemorySink
from millstream.rpc.call import Channel
from millstream.rpc.frames import frame
from millstream.types import Completion, ComputePath, Finish, Request, RequestKey, Sampling, Weights


def answer(tokens: tuple[int, ...], version: int, finish: Finish) -> Completion:
    return Completion(tokens=tokens, logprobs=(0.0,) * len(tokens), versions=(version,) * len(tokens), finish=finish)


class EchoBatcher:
    """Answers a request with its own tokens. One of token 0 is kept until it is aborted."""

    swap_s = cache_used = 0.0
    num_preempted = num_drafted = num_accepted = waiting = tokens_generated = 0
    path = ComputePath("echo")
    counts = (0, 0, 0, 0)

    def __init__(self) -> None:
        self.version = 0
        self.requests: list[Request] = []

    @property
    def running(self) -> int:
        return len(self.requests)

    @property
    def has_work(self) -> bool:
        return any(request.tokens != (0,) for request in self.requests)

    def add(self, request: Request, *, is_watched: bool = False) -> None:
        self.requests.append(request)

    def take_unreported(self) -> list[Any]:
        return []

    def settle(self) -> list[Any]:
        return []

    def abort(self, key: RequestKey) -> list[tuple[RequestKey, Completion]]:
        found = [request for request in self.requests if request.key == key]
        self.requests = [request for request in self.requests if request.key != key]
        return [(key, answer((), self.version, Finish.ABORT)) for _ in found]

    def abort_all(self) -> list[tuple[RequestKey, Completion]]:
        return [one for request in list(self.requests) for one in self.abort(request.key)]

    def load(self, version: int, weights: Weights) -> None:
        self.version = version

    def step(self) -> list[tuple[RequestKey, Completion]]:
        ready = [request for request in self.requests if request.tokens != (0,)]
        self.requests = [request for request in self.requests if request.tokens == (0,)]
        return [(request.key, answer(request.tokens, self.version, Finish.STOP)) for request in ready]


class EchoLink(ChannelLink):
    def weights(self) -> Weights:
        return {}

    def release(self) -> None: ...


class DriverHost:
    """The driver's end, of a worker on a thread of this process."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        self._channel = Channel(self._ours)
        self.batcher = EchoBatcher()
        self.num_reports = 0
        link = EchoLink(theirs)
        link.open_lines()
        self._thread = threading.Thread(target=DecodeWorker(self.batcher, link).run)  # type: ignore[arg-type]
        self._thread.start()

    def start(self, on_report: OnReport) -> None:
        def read() -> None:
            while (packets := self._channel.receive(block=True)) is not None:
                for packet in packets:
                    self.num_reports += 1
                    on_report(msgpack_decoder(WorkerReport).decode(packet.body))

        threading.Thread(target=read, daemon=True).start()

    def send(self, command: Command) -> None:
        self._channel.send(command)

    def offer(self, version: int, weights: Weights) -> str:
        return ""

    async def close(self) -> None:
        self._channel.send_close()
        await asyncio.to_thread(self._thread.join)


class Served(NamedTuple):
    host: DriverHost
    engine: TorchEngine
    open: Callable[..., LineEngine]
    on_version: asyncio.Event


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    host, changed = DriverHost(), asyncio.Event()
    engine = TorchEngine(host, slots=8, max_length=None, clock=RealClock(), sink=MemorySink())
    line = await engine.line()
    yield Served(
        host,
        engine,
        lambda on_broken=lambda engine, error: None: LineEngine(
            "engine", 4, line, changed.set, on_broken, clock=RealClock(), sink=MemorySink()
        ),
        changed,
    )
    await engine.close()


def request(group_id: int, *tokens: int) -> Request:
    return Request(key=RequestKey(group_id=group_id, member=0), tokens=tokens, sampling=Sampling(max_tokens=9), seed=0)


def test_each_line_gets_the_answers_to_its_own_requests_and_the_driver_hears_nothing_of_them() -> None:
    async def run() -> None:
        async with served() as (host, engine, open_line, _):
            lines = [open_line(), open_line()]
            assert (await engine.generate(request(0, 7))).tokens == (7,)
            before = host.num_reports
            calls = [lines[n % 2].generate(request(n, n, 1)) for n in range(1, 40)]
            assert [one.tokens for one in await asyncio.gather(*calls)] == [(n, 1) for n in range(1, 40)]
            assert host.num_reports - before <= 4, "ends of spans, and no answer"
            assert engine.stats().running == 0

    asyncio.run(run())


def test_a_line_hears_of_new_weights_and_of_those_that_were_there_before_it() -> None:
    async def run() -> None:
        async with served() as (_, engine, open_line, changed):
            await engine.load(3, {})
            line = open_line()
            await changed.wait()
            assert line.version == 3
            changed.clear()
            await engine.load(4, {})
            await changed.wait()
            assert (await line.generate(request(1, 5))).versions == (line.version,) == (4,)

    asyncio.run(run())


def test_a_request_is_aborted_by_its_own_line_or_when_that_is_gone() -> None:
    async def run() -> None:
        async with served() as (host, engine, open_line, _):
            line, other = open_line(), open_line()
            kept = asyncio.create_task(line.generate(request(1, 0)))
            lost = asyncio.create_task(other.generate(request(2, 0)))
            mine = asyncio.create_task(engine.generate(request(3, 0)))
            while len(host.batcher.requests) < 3:
                await asyncio.sleep(0.001)
            await line.abort(request(1, 0).key)
            assert (await kept).finish is Finish.ABORT
            await other.close()
            with pytest.raises(EngineGone):
                await lost
            while len(host.batcher.requests) > 1:
                await asyncio.sleep(0.001)
            await engine.abort(request(3, 0).key)
            assert (await mine).finish is Finish.ABORT

    asyncio.run(run())


def test_when_the_engine_closes_requests_of_lines_can_continue_elsewhere() -> None:
    async def run() -> None:
        async with served() as (host, _, open_line, _):
            line = open_line()
            waiting = asyncio.create_task(line.generate(request(1, 0)))
            while not host.batcher.requests:
                await asyncio.sleep(0.001)
        with pytest.raises(EngineGone, match="its line was closed"):
            await waiting

    asyncio.run(run())


def test_a_client_with_another_token_is_disconnected() -> None:
    async def run() -> None:
        async with served() as (_, engine, open_line, changed):
            line = await engine.line()
            stranger = LineEngine(
                "engine",
                1,
                EngineLine(line.host, line.port, "guess"),
                changed.set,
                lambda engine, error: None,
                clock=RealClock(),
                sink=MemorySink(),
            )
            with pytest.raises(EngineGone, match="refused"):
                await stranger.generate(request(1, 5))
            assert (await open_line().generate(request(2, 5))).tokens == (5,)

    asyncio.run(run())


def test_a_line_that_breaks_without_a_request_in_flight_is_reported() -> None:
    async def run() -> None:
        broken = asyncio.get_running_loop().create_future()
        async with served() as (_, _, open_line, _):
            line = open_line(lambda engine, error: broken.done() or broken.set_result((engine, error)))
            await line.generate(request(1, 5))
        engine, error = await broken
        assert engine is line and "its line was closed" in str(error)

    asyncio.run(run())


def test_a_key_that_comes_on_a_second_line_is_not_mixed_up_with_the_first() -> None:
    """After a partition that only the worker has noticed: the engine still has its first line, and the request of it."""

    async def run() -> None:
        async with served() as (host, _, open_line, _):
            first, second = open_line(), open_line()
            lost = asyncio.create_task(first.generate(request(1, 0)))
            while not host.batcher.requests:
                await asyncio.sleep(0.001)
            assert (await second.generate(request(1, 7))).tokens == (7,)
            assert (await lost).finish is Finish.ABORT
            kept = asyncio.create_task(second.generate(request(1, 0)))
            while not host.batcher.requests:
                await asyncio.sleep(0.001)
            await first.abort(request(1, 0).key)  # it arrives late
            await first.close()
            assert (await second.generate(request(2, 7))).tokens == (7,)
            assert host.batcher.requests and not kept.done()
            await second.abort(request(1, 0).key)
            assert (await kept).finish is Finish.ABORT

    asyncio.run(run())


def test_a_line_that_opens_while_a_report_is_sent_waits_until_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's worker reads on another thread than that which reports."""
    hub, (driver, _other) = LinkHub(), socket.socketpair()
    sending, is_read = threading.Event(), threading.Event()

    def connect() -> socket.socket:
        connection = socket.create_connection((hub.address.host, hub.address.port))
        connection.sendall(frame(LineHello(hub.address.token)))
        assert connection.recv(1) == b"1"
        return connection

    def read() -> None:
        assert sending.wait(60)
        hub.wait(driver, block=True)
        is_read.set()

    lines = [connect(), connect()]
    while len(hub._lines) < 2:
        hub.wait(driver, block=True)
    tell = hub._tell

    def slowly(line: Any, report: WorkerReport) -> None:
        sending.set()
        assert not is_read.wait(0.2), "a line was opened while a report is sent"
        tell(line, report)

    lines.append(connect())
    monkeypatch.setattr(hub, "_tell", slowly)
    reader = threading.Thread(target=read)
    reader.start()
    hub.split(WorkerReport([], [], version=3))
    monkeypatch.setattr(hub, "_tell", tell)
    reader.join(60)
    assert is_read.is_set() and len(hub._lines) == 3
    hub.close()
    for line in lines:
        line.close()
