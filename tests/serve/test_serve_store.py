"""The store's service, by a real server and a real client: every verb, every refusal, and what waits."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import torch

from millstream.errors import ConfigError, StoreError, StoreTimeout, StreamEnded
from millstream.serve.auth import check_token, is_loopback
from millstream.serve.store import columns as encoding
from millstream.serve.store.client import HttpStore
from millstream.serve.store.service import StoreServiceConfig, host_store, task_from
from millstream.store import Reads, Store, Want
from millstream.store.blocking import BlockingClient
from millstream.store.host import SharedStore, make_plan
from millstream.store.loader import micro_batches
from millstream.store.memory import MemoryStore
from support.commands import run_command

TASKS = {"score": Reads(("tokens",), by_group=False), "train": Reads(("tokens", "reward"))}
TOKEN = "a token of the tests"
Body = dict[str, Any]


def run(program: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(program, 60))


@asynccontextmanager
async def service(
    store: Store | None = None, *, token: str | None = None, headers: dict[str, str] | None = None, **limits: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A server on a free port, and a client of it."""
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    config = StoreServiceConfig(port=0, **limits)
    serving = asyncio.create_task(
        host_store(store or MemoryStore(TASKS), config, token=token, on_ready=lambda at: url.set_result(at))
    )
    try:
        async with httpx.AsyncClient(base_url=await url, headers=headers, timeout=30, trust_env=False) as client:
            yield client
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def ok(response: Awaitable[httpx.Response], status: int = 200) -> Any:
    found = await response
    assert found.status_code == status, (found.status_code, found.text)
    return found.json() if found.content else None


async def refused(response: Awaitable[httpx.Response], status: int, *words: str) -> None:
    message = (await ok(response, status))["error"]
    assert all(word in message for word in words), message


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await is_so():
            await asyncio.sleep(0.005)


async def num_waiting(client: httpx.AsyncClient, task: str) -> int:
    count: int = (await ok(client.get("/v1/stats")))["experience"]["waiting_consumers"][task]
    return count


GROUP = {"group_ids": 7, "columns": {"tokens": [[1, 2, 3], [4, 5]], "reward": [0.5, 1.0]}, "close": True}
CLAIM = {"task": "train", "groups": 1, "lists": True}


# ---- the verbs -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "shared"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Awaitable[Store]]]:
    if request.param == "memory":

        async def memory() -> Store:
            return MemoryStore(TASKS)

        yield memory
    else:
        with SharedStore(make_plan(TASKS, folder=tmp_path)) as shared:

            async def connect() -> Store:
                return await shared.connect()

            yield connect


def test_experience_is_put_written_to_claimed_and_acknowledged(open_store: Callable[[], Awaitable[Store]]) -> None:
    async def program() -> None:
        async with service(await open_store()) as client:
            body = {"group_ids": [7, 7], "columns": {"tokens": [[1, 2, 3], [4, 5]]}, "versions": 3}
            row_ids = (await ok(client.post("/v1/experience", json=body), 201))["row_ids"]
            assert len(row_ids) == 2
            await ok(client.post("/v1/experience/close_groups", json={"group_ids": [7]}), 204)
            await ok(client.post("/v1/experience/claim", json=CLAIM), 204)
            written = {"row_ids": row_ids, "columns": {"reward": [0.5, 1.0]}}
            await ok(client.patch("/v1/experience", json=written), 204)
            lease = await ok(client.post("/v1/experience/claim", json=CLAIM | {"lease_s": 60}))
            assert lease["columns"] == {"tokens": [[1, 2, 3], [4, 5]], "reward": [0.5, 1.0]}
            assert (lease["row_ids"], lease["group_ids"], lease["versions"]) == (row_ids, [7, 7], [3, 3])
            assert (lease["task"], lease["expires_s"], lease["empty_groups"]) == ("train", 60, [])
            at = f"/v1/experience/leases/{lease['lease_id']}"
            await ok(client.post(f"{at}/renew"), 204)
            await ok(client.post(f"{at}/give_back"), 204)
            again = await ok(client.post("/v1/experience/claim", json=CLAIM))
            assert again["row_ids"] == row_ids and again["lease_id"] != lease["lease_id"]
            at = f"/v1/experience/leases/{again['lease_id']}"
            await ok(client.post(f"{at}/acknowledge", json={"step": 4}), 204)
            await refused(client.post(f"{at}/acknowledge"), 409, "has ended")
            assert (await ok(client.post("/v1/experience/rewind", json={"task": "train", "step": 3}))) == {"rows": 2}
            third = await ok(client.post("/v1/experience/claim", json=CLAIM))
            await ok(client.post(f"/v1/experience/leases/{third['lease_id']}/acknowledge", json={"step": 4}), 204)
            scored = await ok(client.post("/v1/experience/claim", json={"task": "score", "rows": 2}))
            await ok(client.post(f"/v1/experience/leases/{scored['lease_id']}/acknowledge"), 204)
            assert (await ok(client.get("/v1/stats")))["experience"]["rows"] == 2, "kept for step 4"
            await ok(client.post("/v1/experience/cover", json={"step": 4}), 204)
            assert (await ok(client.get("/v1/stats")))["experience"]["rows"] == 0
            await ok(client.post("/v1/experience", json=GROUP | {"partition": "eval"}), 201)
            assert (await ok(client.delete("/v1/experience/partitions/eval"))) == {"rows": 2}
            await ok(client.post("/v1/experience", json=GROUP), 201)
            last = await ok(client.post("/v1/experience/claim", json={"task": "score", "rows": 2}))
            await ok(client.post(f"/v1/experience/leases/{last['lease_id']}/drop"), 204)
            await ok(client.post("/v1/experience/finish"), 204)
            await refused(client.post("/v1/experience/claim", json={"task": "score", "rows": 1}), 410, "ended")

    run(program())


def test_prompts_are_put_and_claimed_and_come_back_when_their_lease_expires() -> None:
    async def program() -> None:
        async with service() as client:
            body = {"columns": {"prompt": ["2 + 2?", "3 + 3?"], "answer": ["4", "6"]}}
            await ok(client.post("/v1/prompts", json=body), 201)
            claim = {"task": "rollout", "rows": 2, "lease_s": 0.05}
            first = await ok(client.post("/v1/prompts/claim", json=claim))
            assert first["columns"] == body["columns"]
            again = await ok(client.post("/v1/prompts/claim", json=claim | {"wait_s": 10, "lease_s": 10}))
            assert again["row_ids"] == first["row_ids"]
            await refused(client.post(f"/v1/prompts/leases/{first['lease_id']}/acknowledge"), 409, "ended")
            await ok(client.post(f"/v1/prompts/leases/{again['lease_id']}/acknowledge"), 204)
            assert (await ok(client.get("/v1/stats")))["prompts"]["rows"] == 0

    run(program())


def test_new_weights_wake_who_waits_for_them() -> None:
    async def program() -> None:
        async with service() as client:
            await ok(client.get("/v1/weights"), 204)
            waiting = [asyncio.create_task(ok(client.get(f"/v1/weights?after={n}&wait_s=20"))) for n in (2, 3)]
            await ok(client.post("/v1/weights", json={"version": 3, "where": "/models/3"}))
            assert await waiting[0] == {"version": 3, "where": "/models/3"}
            assert not waiting[1].done()
            await ok(client.get("/v1/weights?after=3"), 204)
            await ok(client.get("/v1/weights?after=3&wait_s=0.01"), 204)
            assert (await ok(client.get("/v1/weights?after=2")))["version"] == 3
            await ok(client.post("/v1/weights", json={"version": 4}))
            assert (await waiting[1])["version"] == 4
            await ok(client.post("/v1/weights", json={"version": 4}))
            await refused(client.post("/v1/weights", json={"version": 3}), 409, "newest is 4")
            await refused(client.get("/v1/weights?after=x"), 400, "after = 'x'", "number")
            assert (await ok(client.get("/v1/stats")))["weights"]["version"] == 4
            assert await ok(client.get("/v1/health")) == {"status": "ok"}

    run(program())


# ---- columns ---------------------------------------------------------------------------------------------------------


def test_arrays_go_as_base64_in_json_and_as_bytes_in_messagepack() -> None:
    async def program() -> None:
        tokens = [np.arange(5, dtype=np.int32), np.arange(3, dtype=np.int32)]
        async with service() as client:
            sent = {
                "group_ids": 0,
                "columns": {
                    "tokens": [
                        {"dtype": "int32", "shape": [len(a)], "data": base64.b64encode(a.tobytes()).decode()}
                        for a in tokens
                    ],
                    "reward": {"dtype": "float32", "shape": [2], "data": base64.b64encode(np.ones(2, "f4")).decode()},
                    "text": ["a", "b"],
                    "empty": [[], [1.5]],
                    "typed": [[], [7]],
                    "odd": [[1, "x"], None],
                },
                "dtypes": {"typed": "int16"},
                "close": True,
            }
            await ok(client.post("/v1/experience", json=sent), 201)
            claim = {"task": "train", "groups": 1}
            lease = await ok(client.post("/v1/experience/claim", json=claim))
            found = lease["columns"]
            for cell, array in zip(found["tokens"], tokens, strict=True):
                assert cell["dtype"] == "int32" and cell["shape"] == [len(array)]
                assert base64.b64decode(cell["data"]) == array.tobytes()
            assert found["text"] == ["a", "b"] and found["reward"] == [1.0, 1.0] and found["odd"] == [[1, "x"], None]
            assert [cell["dtype"] for cell in found["empty"]] == ["float64"] * 2, "one type for a column"
            assert [cell["dtype"] for cell in found["typed"]] == ["int16"] * 2
            await ok(client.post(f"/v1/experience/leases/{lease['lease_id']}/give_back"), 204)
            packed = {"Content-Type": encoding.MESSAGEPACK}
            answer = await client.post("/v1/experience/claim", content=msgspec.msgpack.encode(claim), headers=packed)
            assert answer.headers["content-type"] == encoding.MESSAGEPACK
            lease = msgspec.msgpack.decode(answer.content)
            assert lease["columns"]["tokens"][0] == {"dtype": "int32", "shape": [5], "data": tokens[0].tobytes()}
            await ok(client.post(f"/v1/experience/leases/{lease['lease_id']}/give_back"), 204)
            answer = await client.post("/v1/experience/claim", json=claim, headers={"Accept": "application/x-msgpack"})
            assert msgspec.msgpack.decode(answer.content)["columns"]["text"] == ["a", "b"]

    run(program())


@pytest.mark.parametrize(
    ("columns", "dtypes", "words"),
    [
        ({}, {}, ("at least one",)),
        ({"a": []}, {}, ("at least one",)),
        ({"a": [1], "b": [1, 2]}, {}, ("'a': 1, 'b': 2",)),
        ({"a": 5}, {}, ("column 'a'", "expected a list")),
        ({"a": [{"dtype": "object", "shape": [1], "data": ""}]}, {}, ("dtype 'object'", "int8 to int64")),
        ({"a": [{"dtype": "nonsense", "shape": [1], "data": ""}]}, {}, ("dtype 'nonsense'",)),
        ({"a": [{"dtype": ["i4"], "shape": [1], "data": ""}]}, {}, ("dtype",)),
        ({"a": [{"dtype": "int32", "shape": [2], "data": "AAAA"}]}, {}, ("expected 8 bytes", "found 3")),
        ({"a": [{"dtype": "int32", "shape": [-1], "data": ""}]}, {}, ("shape", "sizes")),
        ({"a": [{"dtype": "int32", "shape": "x", "data": ""}]}, {}, ("shape", "sizes")),
        ({"a": [{"dtype": "int32", "shape": [0], "data": "?"}]}, {}, ("not base64",)),
        ({"a": [{"dtype": "int32", "shape": [0], "data": 5}]}, {}, ("base64", "found int")),
        ({"a": {"dtype": "int32", "shape": [], "data": "AAAAAA=="}}, {}, ("no rows",)),
        ({"a": [[1.5]]}, {"a": "int32"}, ("fit int32", "float64")),
        ({"a": [[300]]}, {"a": "int8"}, ("column 'a'",)),
        ({"a": [[1]]}, {"b": "int8"}, ("dtypes names b",)),
    ],
)
def test_columns_that_are_none_are_refused_with_what_was_expected(
    columns: Any, dtypes: dict[str, str], words: tuple[str, ...]
) -> None:
    with pytest.raises(encoding.BadColumns) as refusal:
        encoding.columns_in(columns, dtypes, is_json=True)
    assert all(word in str(refusal.value) for word in words), refusal.value


@pytest.mark.parametrize(
    "cell",
    [np.arange(6).reshape(2, 3), np.zeros((0, 4), np.float16), np.array([True, False]), np.arange(3, dtype=">i4")],
)
def test_an_array_comes_back_as_it_was(cell: np.ndarray[Any, Any]) -> None:
    for kind, decode in ((encoding.JSON, msgspec.json.decode), (encoding.MESSAGEPACK, msgspec.msgpack.decode)):
        (back,) = encoding.columns_in(decode(encoding.encode_body(encoding.columns_out({"a": [cell]}), kind)))["a"]
        assert back.shape == cell.shape and (back == cell).all() and back.dtype == cell.dtype.newbyteorder("=")


def test_tensors_go_out_as_arrays() -> None:
    out = encoding.columns_out({"a": [torch.ones(2, dtype=torch.bfloat16), torch.tensor([1, 2])]}, as_lists=True)
    assert out == {"a": [[1.0, 1.0], [1, 2]]}
    (back,) = encoding.columns_in(encoding.columns_out({"a": [torch.ones(2, dtype=torch.bfloat16)]}))["a"]
    assert back.dtype == np.float32


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_what_was_not_expected_is_answered_by_400_and_what_was() -> None:
    async def program() -> None:
        async with service(max_wait_s=5) as client:
            put, claim = "/v1/experience", "/v1/experience/claim"
            for path, body, words in [
                (put, {"columns": {"tokens": [[1]]}}, ("group_ids", "the group of all rows")),
                (put, {"group_ids": [1, 2], "columns": {"tokens": [[1]]}}, ("group_ids: expected 1", "found 2")),
                (put, {"group_ids": 1, "columns": {"tokens": [[1]]}, "versions": []}, ("versions: expected 1",)),
                (put, {"group_ids": 1, "columns": {"tokens": [[1]]}, "tokens": [1, 2]}, ("tokens: expected 1",)),
                (put, {"group_ids": 1, "columns": {"tokens": []}}, ("at least one",)),
                (put, {"group_ids": 1, "colums": {}}, ("unknown field `colums`", "columns, dtypes")),
                (put, {"group_ids": 1, "columns": {"tokens": [[1]]}, "extra": 1}, ("unknown field `extra`",)),
                (put, {"group_ids": 1, "columns": {"tokens": [[1]]}, "wait_s": 6}, ("wait_s = 6", "0 to 5")),
                (claim, {"rows": 1}, ("task",)),
                (claim, {"task": "train"}, ("rows, tokens or groups",)),
                (claim, {"task": "train", "rows": 0}, ("at least 1",)),
                (claim, {"task": "train", "rows": "1"}, ("Expected `int | null`, got `str`", "$.rows")),
                (claim, {"task": "train", "rows": 1, "policy": "os:system"}, ("policy: expected fifo",)),
                (claim, {"task": "train", "rows": 1, "lease_s": 0}, ("lease_s = 0",)),
                (claim, {"task": "train", "rows": 1, "wait_s": -1}, ("wait_s = -1",)),
                (claim, {"task": "train", "rows": 1, "patience_s": -1}, ("patience_s = -1",)),
            ]:
                await refused(client.post(path, json=body), 400, *words)
            body = {"row_ids": [1], "columns": {"reward": [1, 2]}}
            await refused(client.patch("/v1/experience", json=body), 400, "row_ids")
            json = {"Content-Type": "application/json"}
            await refused(client.post(put, content=b"{", headers=json), 400, "truncated")
            await refused(client.post(put, content=b"[" * 100000, headers=json), 400)
            await refused(client.post(put, content=b"\xc1", headers={"Content-Type": encoding.MESSAGEPACK}), 400)
            nan = msgspec.msgpack.encode({"task": "train", "rows": 1, "wait_s": float("nan")})
            await refused(client.post(claim, content=nan, headers={"Content-Type": encoding.MESSAGEPACK}), 400, "nan")
            await refused(client.post(put, content=b"a=1"), 415, "application/json")
            await refused(client.post(put, data={"a": "1"}), 415, "application/msgpack")
            assert (await ok(client.get("/v1/stats")))["experience"]["rows"] == 0

    run(program())


def test_leases_and_tasks_that_are_not_there_are_told_from_those_that_have_ended() -> None:
    async def program() -> None:
        store = MemoryStore(TASKS)
        async with service(store) as client:
            await refused(client.post("/v1/experience/leases/1/acknowledge"), 404, "does not exist")
            await refused(client.post("/v1/experience/leases/x/acknowledge"), 404, "nothing at")
            await refused(client.post("/v1/experience/claim", json={"task": "tarin", "rows": 1}), 404, "score, train")
            await refused(client.post("/v1/experience/rewind", json={"task": "tarin", "step": 1}), 404, "tarin")
            await refused(client.get("/v1/nothing"), 404, "docs/store.md")
            await refused(client.get("/v1/experience/claim"), 405, "GET")
            await ok(client.post("/v1/experience", json=GROUP), 201)
            await refused(client.post("/v1/experience", json=GROUP), 409, "closed")
            other = await store.claim("train")
            mine = await ok(client.post("/v1/experience/claim", json={"task": "score", "rows": 1}))
            verbs = ("acknowledge", "give_back", "renew", "drop")
            for verb in verbs:
                at = f"/v1/experience/leases/{other.lease_id}/{verb}"
                await refused(client.post(at), 409, "has ended")  # another's: not one of this service's
            await store.acknowledge(other)
            await ok(client.post(f"/v1/experience/leases/{mine['lease_id']}/acknowledge"), 204)
            for verb in verbs:
                await refused(client.post(f"/v1/experience/leases/{mine['lease_id']}/{verb}"), 409, "has ended")
            gone = {"row_ids": mine["row_ids"], "columns": {"late": [1]}}
            await refused(client.patch("/v1/experience", json=gone), 409, "freed or dropped")

    run(program())


def test_a_put_without_room_waits_and_then_has_put_nothing() -> None:
    async def program() -> None:
        store = MemoryStore({"score": TASKS["score"]}, capacity_rows=2)
        async with service(store) as client:
            body = {"group_ids": 1, "columns": {"tokens": [[1], [2]]}}
            await ok(client.post("/v1/experience", json=body), 201)
            await refused(client.post("/v1/experience", json=body), 408, "no room", "Nothing was put")
            await refused(client.post("/v1/experience", json=body | {"wait_s": 0.05}), 408)
            waiting = asyncio.create_task(ok(client.post("/v1/experience", json=body | {"wait_s": 20}), 201))
            lease = await ok(client.post("/v1/experience/claim", json={"task": "score", "rows": 2}))
            await ok(client.post(f"/v1/experience/leases/{lease['lease_id']}/acknowledge"), 204)
            assert len((await waiting)["row_ids"]) == 2
            three = {"group_ids": 1, "columns": {"tokens": [[1], [2], [3]]}}
            await refused(client.post("/v1/experience", json=three), 409, "put fewer")

    run(program())


def test_a_body_that_is_too_large_is_refused_whether_it_says_so_or_not() -> None:
    async def program() -> None:
        async def drops() -> AsyncIterator[bytes]:
            for _ in range(50):
                yield b" " * 100

        async with service(max_body_bytes=1000) as client:
            json = {"Content-Type": "application/json"}
            await refused(client.post("/v1/experience", content=b" " * 1001, headers=json), 413, "1000 bytes")
            await refused(client.post("/v1/experience", content=drops(), headers=json), 413, "1000 bytes")
            await ok(client.post("/v1/experience", json=GROUP), 201)

    run(program())


def test_too_many_at_once_are_asked_to_come_again() -> None:
    async def program() -> None:
        async with service(max_requests=2) as client:
            waiting = [
                asyncio.create_task(ok(client.post("/v1/experience/claim", json=CLAIM | {"wait_s": 20})))
                for _ in range(2)
            ]

            async def is_full() -> bool:
                return (await client.get("/v1/stats")).status_code == 503

            await until(is_full)
            busy = await client.post("/v1/experience", json=GROUP)
            assert (
                busy.status_code == 503 and busy.headers["retry-after"] == "1" and "2 requests" in busy.json()["error"]
            )
            await ok(client.get("/v1/health"))
            waiting[0].cancel()

            async def is_free() -> bool:
                return (await client.get("/v1/stats")).status_code == 200

            await until(is_free)
            await ok(client.post("/v1/experience", json=GROUP), 201)
            await waiting[1]

    run(program())


# ---- waiting ---------------------------------------------------------------------------------------------------------


class Counting(MemoryStore):
    num_claims = 0

    async def claim(self, *args: Any, **rest: Any) -> Any:
        self.num_claims += 1
        return await super().claim(*args, **rest)


def test_a_claim_that_waits_is_woken_by_what_comes_and_asks_once() -> None:
    async def program() -> None:
        store = Counting(TASKS)
        async with service(store) as client:
            begin = time.monotonic()
            await ok(client.post("/v1/experience/claim", json=CLAIM | {"wait_s": 0.3}), 204)
            assert 0.3 <= time.monotonic() - begin < 2 and store.num_claims == 1
            waiting = asyncio.create_task(ok(client.post("/v1/experience/claim", json=CLAIM | {"wait_s": 30})))

            async def is_waiting() -> bool:
                return await num_waiting(client, "train") == 1

            await until(is_waiting)
            await ok(client.post("/v1/experience", json=GROUP), 201)
            begin = time.monotonic()
            assert len((await waiting)["row_ids"]) == 2
            assert time.monotonic() - begin < 1 and store.num_claims == 2

    run(program())


def test_a_client_that_hangs_up_while_it_waits_loses_nothing(open_store: Callable[[], Awaitable[Store]]) -> None:
    async def program() -> None:
        store = await open_store()
        async with service(store) as client:
            waiting = asyncio.create_task(client.post("/v1/experience/claim", json=CLAIM | {"wait_s": 30}))

            async def is_waiting() -> bool:
                return await num_waiting(client, "train") == 1

            await until(is_waiting)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

            async def is_gone() -> bool:
                return await num_waiting(client, "train") == 0

            await until(is_gone)
            await ok(client.post("/v1/experience", json=GROUP), 201)
            assert len((await ok(client.post("/v1/experience/claim", json=CLAIM)))["row_ids"]) == 2
            assert (await ok(client.get("/v1/stats")))["experience"]["leases"] == 1

    run(program())


def test_a_client_that_hangs_up_at_the_moment_of_the_put_loses_nothing() -> None:
    async def program() -> None:
        async with service(MemoryStore({"score": TASKS["score"]})) as client:
            claim = {"task": "score", "rows": 1, "wait_s": 30, "lease_s": 0.05}

            async def is_waiting() -> bool:
                return await num_waiting(client, "score") == 1

            for number in range(30):
                waiting = asyncio.create_task(ok(client.post("/v1/experience/claim", json=claim)))
                await until(is_waiting)
                body = {"group_ids": number, "columns": {"tokens": [[number]]}}
                putting = asyncio.create_task(ok(client.post("/v1/experience", json=body), 201))
                for _ in range(number):
                    await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
                row_ids = (await putting)["row_ids"]
                # what reached nobody comes back: at once, or when its lease expires
                lease = await ok(client.post("/v1/experience/claim", json=claim | {"lease_s": 30}))
                assert lease["row_ids"] == row_ids
                await ok(client.post(f"/v1/experience/leases/{lease['lease_id']}/acknowledge"), 204)

    run(program())


def test_a_service_that_stops_lets_those_who_wait_go() -> None:
    async def program() -> None:
        store = MemoryStore(TASKS)
        async with service(store) as client:
            waiting = asyncio.create_task(client.post("/v1/experience/claim", json=CLAIM | {"wait_s": 30}))

            async def is_waiting() -> bool:
                return (await store.stats()).waiting_consumers["train"] == 1

            await until(is_waiting)
        assert (await store.stats()).waiting_consumers["train"] == 0
        await asyncio.gather(waiting, return_exceptions=True)

    run(program())


# ---- who may come in -------------------------------------------------------------------------------------------------


def test_a_token_is_required_where_there_is_one() -> None:
    async def program() -> None:
        async with service(token=TOKEN) as client:
            for header in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": TOKEN},
                {"Authorization": "Basic x"},
            ):
                answer = await client.get("/v1/stats", headers=header)
                assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
                assert TOKEN not in answer.text
            await ok(client.get("/v1/health"))
            await ok(client.get("/v1/stats", headers={"Authorization": f"Bearer {TOKEN}"}))
            far = {"Authorization": f"bearer {TOKEN}", "Host": "gpu7.example", "Origin": "http://x"}
            await ok(client.get("/v1/stats", headers=far))

    run(program())


def test_without_a_token_pages_in_a_browser_are_refused() -> None:
    async def program() -> None:
        async with service() as client:
            await refused(client.get("/v1/stats", headers={"Origin": "http://evil.example"}), 403, "localhost")
            await refused(client.get("/v1/stats", headers={"Host": "evil.example:7077"}), 403)
            for host in ("localhost:7077", "127.0.0.1", "[::1]:7077"):
                await ok(client.get("/v1/stats", headers={"Host": host}))

    run(program())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "gpu7.example", ""])
def test_beyond_this_machine_a_service_without_a_token_does_not_start(host: str) -> None:
    with pytest.raises(ConfigError, match="set a token"):
        asyncio.run(host_store(MemoryStore(TASKS), StoreServiceConfig(host=host, port=0)))
    check_token(host, TOKEN)
    for token in ("", " x", "ä"):
        with pytest.raises(ConfigError, match="the token is empty"):
            check_token(host, token)


def test_what_is_this_machine() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.1.2.3", "::1", "[::1]")))
    assert not any(map(is_loopback, ("0.0.0.0", "localhost.evil.example", "10.0.0.1", "")))


def test_a_port_that_is_taken_is_named() -> None:
    async def program() -> None:
        async with service() as client:
            with pytest.raises(ConfigError, match=f"{client.base_url.port}: Address already in use"):
                await host_store(MemoryStore(TASKS), StoreServiceConfig(port=client.base_url.port or 0))

    run(program())


# ---- the client ------------------------------------------------------------------------------------------------------


def test_the_client_is_a_store(open_store: Callable[[], Awaitable[Store]]) -> None:
    async def program() -> None:
        async with service(await open_store(), token=TOKEN) as http:
            url = str(http.base_url)
            with pytest.raises(StoreError, match="401"):
                await HttpStore.connect(url)
            async with await HttpStore.connect(url, token=TOKEN, poll_s=0.05) as store:
                waiting = asyncio.create_task(store.claim("train", Want(groups=1)))
                await asyncio.sleep(0.2)
                tokens = [np.arange(3, dtype=np.int32), np.arange(4, dtype=np.int32)]
                row_ids = await store.put(np.array([5, 5]), {"tokens": tokens, "text": ["a", "b"]}, versions=2)
                await store.close_groups([5])
                await store.write(row_ids, {"reward": [0.0, 1.0]})
                lease = await waiting
                assert lease.row_ids == list(row_ids) and lease.group_id == 5 and lease.versions == [2, 2]
                assert all((a == b).all() and a.dtype == b.dtype for a, b in zip(lease["tokens"], tokens, strict=True))
                await store.renew(lease)
                await store.give_back(lease)
                lease = await store.claim("train", Want(groups=9, patience_s=0.1, expires_s=5))
                await store.acknowledge(lease, step=1)
                assert await store.rewind("train", 0) == 2
                await store.acknowledge(await store.claim("train"), step=1)
                await store.drop(await store.claim("score", Want(rows=2)))
                await store.cover(1)
                assert (await store.stats()).rows == 0
                with pytest.raises(StoreTimeout):
                    await store.claim("train", Want(rows=1, deadline_s=0.1))
                with pytest.raises(StoreError, match="409"):
                    await store.acknowledge(lease)
                await store.put(np.int64(1), {"tokens": tokens}, partition="a/b ?")  # type: ignore[arg-type]
                assert await store.drop_partition("a/b ?") == 2
                assert await store.wait_for_weights(deadline_s=0.1) is None
                hearing = asyncio.create_task(store.wait_for_weights(after=6))
                await store.notify_weights(7, "/models/7")
                heard = await hearing
                assert heard is not None and (heard.version, heard.where) == (7, "/models/7")
                await store.finish()
                with pytest.raises(StreamEnded):
                    await store.claim("train")
                for wrong in (store.snapshot(), store.claim("train", choose=lambda ready: None)):
                    with pytest.raises(StoreError, match="HTTP"):
                        await wrong

    run(program())


def test_the_loader_reads_from_a_service() -> None:
    async def program() -> None:
        async with service() as http, HttpStore(str(http.base_url)) as store:
            await store.put(range(20), {"tokens": [np.zeros(10, np.int32)] * 20})
            async with micro_batches(store, "score", tokens=40, rows_per_step=10) as batches:
                assert [len(lease) async for lease in batches] == [4, 4, 2]
                await batches.finish_step(0)
                await anext(batches)
            stages = (await store.stats()).by_stage["score"]
            assert (stages["done"], stages["ready"], stages["leased"]) == (10, 10, 0)

    run(program())


def test_a_client_waits_while_a_service_is_busy() -> None:
    async def program() -> None:
        async with service(max_requests=1) as http, HttpStore(str(http.base_url)) as store:
            waiting = asyncio.create_task(http.get("/v1/weights?wait_s=0.5"))
            await asyncio.sleep(0.1)
            await store.put(0, {"tokens": [[1]]})
            assert (await waiting).status_code == 204

    run(program())


# ---- the command -----------------------------------------------------------------------------------------------------


def test_a_task_is_told_in_one_word() -> None:
    assert task_from("train:tokens,reward") == ("train", Reads(("tokens", "reward")))
    assert task_from("score:tokens:rows") == ("score", Reads(("tokens",), by_group=False))
    assert task_from("train:tokens:after=score,judge:groups") == ("train", Reads(("tokens",), ("score", "judge")))
    for wrong in ("train", "train:", ":tokens", "train:tokens,", "train:tokens:row", "train:tokens:after="):
        with pytest.raises(ConfigError, match="such as train:tokens,reward"):
            task_from(wrong)


def test_the_command_serves_until_it_is_stopped_and_code_that_does_not_await_can_use_it() -> None:
    command = [sys.executable, "-m", "millstream.cli.main", "serve-store", "--port", "0", "--task", "train:tokens:rows"]
    environment = os.environ | {"MILLSTREAM_TOKEN": TOKEN, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            client = BlockingClient(lambda: HttpStore.connect(url, token=TOKEN))
            client.call(client.store.put(0, {"tokens": [np.arange(3)]}))
            assert client.call(client.store.claim("train", Want(rows=1)))["tokens"][0].tolist() == [0, 1, 2]
            client.close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("options", "words"),
    [([], "needs a task"), (["--task", "train"], "expected NAME"), (["--host", "0.0.0.0"], "token")],
)
def test_the_command_says_what_is_missing(options: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [] if "--task" in options or not options else ["--task", "train:tokens"]
    command = [sys.executable, "-m", "millstream.cli.main", "serve-store", *tasks, *options]
    monkeypatch.delenv("MILLSTREAM_TOKEN", raising=False)
    out = run_command(command, timeout=60)
    assert out.returncode == 1 and words in out.stderr, out.stderr


def test_rows_that_cannot_be_sent_are_given_back() -> None:
    async def program() -> None:
        store = MemoryStore({"score": TASKS["score"]})
        await store.put(0, {"tokens": [[1]], "odd": [object()]})
        async with service(store) as client:
            await refused(client.post("/v1/experience/claim", json={"task": "score", "rows": 1}), 409, "type object")
        assert (await store.stats()).leases == 0

    run(program())


@pytest.mark.parametrize("module", ["millstream", "millstream.cli.main", "millstream.store.loader", "millstream.serve"])
def test_who_does_not_serve_does_not_load_a_server(module: str) -> None:
    program = f"import sys, {module}; print(*{{'torch', 'starlette', 'uvicorn', 'httpx', 'httpx2'}} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == ""


def test_the_examples_of_the_page_run() -> None:
    page = (Path(__file__).parents[2] / "docs/store.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(examples) == 5
    for example in examples:
        strict = "import warnings\nwarnings.simplefilter('error', RuntimeWarning)\n"
        out = run_command([sys.executable, "-c", strict + example], timeout=60)
        assert out.returncode == 0, out.stderr
