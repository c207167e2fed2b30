"""Clients that are silent, slow or endless, on real sockets: each is cut off in time, and another client is served meanwhile."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import ExitStack, asynccontextmanager
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

from millstream.serve.limits import SPARE_CONNECTIONS, ConnectionTable, HttpLimits
from millstream.serve.store.service import StoreServiceConfig, host_store
from millstream.store import Reads
from millstream.store.memory import MemoryStore

TOKEN = "a-token-of-the-tests"
TASKS = {"train": Reads(("tokens",), by_group=False)}
SHORT = HttpLimits(headers_s=0.3, stall_s=0.3)
JSON_HEADERS = "Host: localhost\r\nContent-Type: application/json\r\n"
Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Running(NamedTuple):
    port: int
    store: MemoryStore
    client: httpx.AsyncClient

    async def line(self, data: str = "") -> Line:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data.encode())
        return reader, writer


@asynccontextmanager
async def running(
    limits: HttpLimits = SHORT, *, token: str | None = None, max_requests: int = 256
) -> AsyncIterator[Running]:
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    config = StoreServiceConfig(port=0, http=limits, max_requests=max_requests)
    store = MemoryStore(TASKS)
    serving = asyncio.create_task(host_store(store, config, token=token, on_ready=url.set_result))
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        async with httpx.AsyncClient(base_url=await url, headers=headers, timeout=20, trust_env=False) as client:
            yield Running(int((await url).rpartition(":")[2]), store, client)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def run(program: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(program, 60))


async def rest(reader: asyncio.StreamReader) -> bytes:
    """Everything until the service closes the connection."""
    found = b""
    try:
        while data := await reader.read(65536):
            found += data
    except ConnectionError:
        pass
    return found


async def drip(writer: asyncio.StreamWriter, data: bytes) -> None:
    """The same few bytes again and again, until the connection is closed."""
    try:
        while not writer.is_closing():
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0.02)
    except ConnectionError:
        pass


def test_silent_connections_beyond_the_open_files_do_not_lock_a_client_out() -> None:
    command = f"ulimit -n 256; exec {sys.executable} -m millstream.cli.main serve-store --task train:tokens --port 0"
    served = subprocess.Popen(
        ["bash", "-c", command],
        env=os.environ | {"MILLSTREAM_TOKEN": TOKEN},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert served.stdout is not None
        url = served.stdout.readline().split()[-1]
        port = int(url.rpartition(":")[2])
        with ExitStack() as lines:
            for _ in range(400):
                line = lines.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
                line.sendall(b"GET /v1/stats HTTP/1.1\r\nHost: ")
            begin = time.monotonic()
            answer = httpx.get(f"{url}/v1/stats", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=8)
            assert answer.status_code == 200 and time.monotonic() - begin < 8
    finally:
        served.send_signal(signal.SIGTERM)
        _, errors = served.communicate(timeout=20)
    assert "Traceback" not in errors and "out of system resource" not in errors, errors


@pytest.mark.parametrize(
    "sent", ["", "GET /v1/health HTTP/1.1\r\n", "GET /v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n"]
)
@pytest.mark.parametrize("dripped", [b"", b"a: b\r\n"])
def test_headers_that_do_not_come_in_time_end_the_connection(sent: str, dripped: bytes) -> None:
    async def program() -> None:
        async with running(token=TOKEN) as service:
            begin = time.monotonic()
            reader, writer = await service.line(sent)
            dripping = asyncio.create_task(drip(writer, dripped) if dripped else asyncio.sleep(0))
            found = await rest(reader)
            assert (b"200 OK" in found) == sent.endswith("\r\n\r\n")
            assert time.monotonic() - begin < 10
            writer.close()
            await dripping

    run(program())


@pytest.mark.parametrize("kind", ["Content-Length: 100000000", "Transfer-Encoding: chunked"])
def test_a_body_that_goes_on_after_its_refusal_ends_with_the_connection(kind: str) -> None:
    async def program() -> None:
        async with running(token=TOKEN) as service:
            reader, writer = await service.line(f"POST /v1/experience HTTP/1.1\r\n{JSON_HEADERS}{kind}\r\n\r\n")
            dripping = asyncio.create_task(drip(writer, b"1\r\na\r\n"))
            assert (await rest(reader)).startswith(b"HTTP/1.1 401")
            writer.close()
            await dripping

    run(program())


@pytest.mark.parametrize("kind", ["Content-Length: 100000", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("dripped", [b"", b"1\r\na\r\n"])
@pytest.mark.parametrize("path", ["/v1/experience", "/v1/prompts/claim", "/v1/weights"])
def test_half_bodies_end_with_408_and_make_room(path: str, dripped: bytes, kind: str) -> None:
    async def program() -> None:
        async with running(max_requests=4) as service:
            head = f"POST {path} HTTP/1.1\r\n{JSON_HEADERS}{kind}\r\n\r\n"
            lines = [await service.line(head) for _ in range(4)]
            dripping = [asyncio.create_task(drip(writer, dripped)) for _, writer in lines if dripped]
            found = await asyncio.gather(*(rest(reader) for reader, _ in lines))
            assert all(one.startswith(b"HTTP/1.1 408") and b"bytes/s" in one for one in found), found
            assert (await service.client.get("/v1/stats")).status_code == 200
            for _, writer in lines:
                writer.close()
            await asyncio.gather(*dripping)

    run(program())


def test_a_large_body_at_a_fair_rate_is_received_however_long_it_takes() -> None:
    async def program() -> None:
        limits = HttpLimits(headers_s=1, stall_s=1, bytes_per_s=20_000)
        async with running(limits) as service:

            async def slowly() -> AsyncIterator[bytes]:
                yield b'{"group_ids": 0, "columns": {"tokens": ["'
                for _ in range(15):
                    yield b"a" * 20_000
                    await asyncio.sleep(0.1)
                yield b'"]}}'

            headers = {"Content-Type": "application/json"}
            answer = await service.client.post("/v1/experience", content=slowly(), headers=headers)
            assert answer.status_code == 201, answer.text

    run(program())


def _received(line: socket.socket) -> int:
    """The bytes until the connection is closed."""
    count = 0
    try:
        while data := line.recv(1 << 20):
            count += len(data)
    except ConnectionError:
        pass
    return count


@pytest.mark.parametrize("num_requests", [1, 2])
def test_a_response_that_is_not_read_ends_with_the_connection(num_requests: int) -> None:
    async def program() -> None:
        async with running(max_requests=1) as service:
            size = 24 << 20  # more than the system keeps for a client
            await service.store.put(range(2), {"tokens": [np.zeros(size, np.uint8) for _ in range(2)]})
            body = '{"task": "train", "rows": 1}'
            head = f"POST /v1/experience/claim HTTP/1.1\r\n{JSON_HEADERS}Content-Length: {len(body)}\r\n\r\n{body}"
            with socket.create_connection(("127.0.0.1", service.port), timeout=10) as line:
                line.sendall((head * num_requests).encode())
                async with asyncio.timeout(10):
                    while (await service.store.stats()).leases < 1:
                        await asyncio.sleep(0.01)
                await asyncio.sleep(1.5)  # more than the stall that is allowed
                received = await asyncio.to_thread(_received, line)
            assert received < size
            assert (await service.client.get("/v1/stats")).status_code == 200

    run(program())


def test_headers_that_are_too_large_are_refused_in_one_piece_or_in_many() -> None:
    async def program() -> None:
        async with running(HttpLimits()) as service:
            large = "a" * 20_000
            for path, headers in (("/v1/health", {"x-large": large}), (f"/v1/health?{large}", {}), (f"/{large}", {})):
                answer = await service.client.get(path, headers=headers)
                assert answer.status_code == 431 and "16384 bytes" in answer.json()["error"]
            reader, writer = await service.line("GET /v1/health HTTP/1.1\r\n")
            writer.write(b"a: " + b"b" * 9000 + b"\r\n")
            await asyncio.sleep(0.05)
            writer.write(b"a: " + b"b" * 9000 + b"\r\n")
            assert (await rest(reader)).startswith(b"HTTP/1.1 4")
            writer.close()

    run(program())


def test_the_longest_idle_connection_of_a_peer_makes_room_for_a_new_one_and_a_busy_one_does_not() -> None:
    async def program() -> None:
        async with running(HttpLimits(), max_requests=2) as service:
            body = '{"task": "train", "rows": 1, "wait_s": 30}'
            head = f"POST /v1/experience/claim HTTP/1.1\r\n{JSON_HEADERS}Content-Length: {len(body)}\r\n\r\n{body}"
            waiting = await service.line(head)
            async with asyncio.timeout(10):
                while (await service.store.stats()).waiting_consumers["train"] < 1:
                    await asyncio.sleep(0.01)
            idle = [await service.line() for _ in range(3 * SPARE_CONNECTIONS)]
            assert (await service.client.get("/v1/stats")).status_code == 200
            assert await rest(idle[0][0]) == b""
            await service.store.put(0, {"tokens": ["a"]})
            assert (await waiting[0].read(4096)).startswith(b"HTTP/1.1 200")
            for _, writer in (waiting, *idle):
                writer.close()

    run(program())


def test_the_bytes_of_all_bodies_together_are_bounded() -> None:
    async def program() -> None:
        store_full = {"group_ids": 0, "columns": {"tokens": ["a" * 1000]}}
        async with running(HttpLimits(body_bytes=2500)) as service:
            head = f"POST /v1/experience HTTP/1.1\r\n{JSON_HEADERS}Content-Length: 2000\r\n\r\n"
            _, writer = await service.line(head + " " * 1990)
            async with asyncio.timeout(10):
                while (answer := await service.client.post("/v1/experience", json=store_full)).status_code == 201:
                    await asyncio.sleep(0.01)
            assert answer.status_code == 503 and "2500 bytes" in answer.json()["error"]
            writer.close()
            async with asyncio.timeout(10):
                while (await service.client.post("/v1/experience", json=store_full)).status_code == 503:
                    await asyncio.sleep(0.01)

    run(program())


def test_old_and_pipelined_requests_are_served_and_upgrades_are_ignored() -> None:
    async def program() -> None:
        async with running() as service:
            reader, writer = await service.line("GET /v1/health HTTP/1.0\r\nHost: localhost\r\n\r\n")
            assert (await rest(reader)).startswith(b"HTTP/1.1 200")
            writer.close()
            reader, writer = await service.line("GET /v1/stats HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5)
            assert (await rest(reader)).count(b"HTTP/1.1 200") == 5
            writer.close()
            upgrade = (
                "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: a\r\nSec-WebSocket-Version: 13\r\n"
            )
            reader, writer = await service.line(f"GET /v1/stats HTTP/1.1\r\nHost: localhost\r\n{upgrade}\r\n")
            assert (await rest(reader)).startswith(b"HTTP/1.1 200")
            writer.close()

    run(program())


@pytest.mark.parametrize(
    "garbage", ["\x00\x01\r\n\r\n", "GET / HTTP/9.9\r\n\r\n", "POST /v1/weights HTTP/1.1\r\na b: c\r\n\r\n"]
)
def test_malformed_requests_fill_no_log(garbage: str, capfd: pytest.CaptureFixture[str]) -> None:
    async def program() -> None:
        async with running(token=TOKEN) as service:
            for head in ("", f"POST /v1/experience HTTP/1.1\r\n{JSON_HEADERS}Transfer-Encoding: chunked\r\n\r\n"):
                reader, writer = await service.line(head)
                if head:
                    assert (await reader.read(4096)).startswith(b"HTTP/1.1 401")
                writer.write(garbage.encode())
                await rest(reader)
                writer.close()
            assert (await service.client.get("/v1/stats")).status_code == 200

    run(program())
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("num_files", [resource.RLIM_INFINITY, 20_000, 1024, 256])
def test_the_open_files_bound_the_connections(num_files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (num_files, num_files))
    backlog = ConnectionTable(256).backlog
    assert backlog == (2048 if num_files in (resource.RLIM_INFINITY, 20_000) else num_files // 16)


@pytest.mark.parametrize("wrong", [{"headers_s": 0}, {"stall_s": float("nan")}, {"bytes_per_s": 0}, {"body_bytes": 0}])
def test_limits_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        HttpLimits(**wrong)


def test_a_claim_may_wait_longer_than_any_limit_of_a_body() -> None:
    async def program() -> None:
        async with running() as service:
            claim = asyncio.create_task(
                service.client.post("/v1/experience/claim", json={"task": "train", "rows": 1, "wait_s": 20})
            )
            await asyncio.sleep(1)
            await service.store.put(0, {"tokens": ["a"]})
            assert (await claim).status_code == 200

    run(program())
