"""What a client can make the store's service keep: each kind is bounded, and refused with a status and a reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

from millstream.serve.store.service import StoreServiceConfig, store_app
from millstream.store import Reads
from millstream.store.memory import MemoryStore
from support.memory import held_bytes

TASKS = {"score": Reads(("tokens",), by_group=False), "train": Reads(("tokens", "reward"))}
MIB = 1 << 20
Attack = Callable[[httpx.AsyncClient, int], Awaitable[httpx.Response]]


def run(program: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(program, 120))


@asynccontextmanager
async def service(**limits: Any) -> AsyncIterator[httpx.AsyncClient]:
    """The application of `millstream serve-store`, with capacities that are filled quickly."""
    config = StoreServiceConfig(**({"capacity_rows": 200, "capacity_bytes": MIB} | limits))
    store = MemoryStore(TASKS, capacity_rows=config.capacity_rows, capacity_bytes=config.capacity_bytes)
    transport = httpx.ASGITransport(store_app(store, config))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=20) as client:
        yield client


async def put_prompts(client: httpx.AsyncClient, number: int) -> httpx.Response:
    return await client.post("/v1/prompts", json={"columns": {"prompt": [f"{number}" + "a" * 100_000]}})


async def put_nested(client: httpx.AsyncClient, number: int) -> httpx.Response:
    cell = {f"{number}": [["a" * 1000] * 50, {"b": "c" * 50_000}]}
    return await client.post("/v1/experience", json={"group_ids": number, "columns": {"tokens": [cell]}})


async def put_mixed(client: httpx.AsyncClient, number: int) -> httpx.Response:
    columns = {"tokens": [1, f"{number}" + "a" * 100_000]}
    return await client.post("/v1/experience", json={"group_ids": number, "columns": columns})


async def put_empty_lists(client: httpx.AsyncClient, number: int) -> httpx.Response:
    body = msgspec.msgpack.encode({"group_ids": number, "columns": {"tokens": [[[] for _ in range(5000)]]}})
    return await client.post("/v1/experience", content=body, headers={"content-type": "application/msgpack"})


async def put_many_columns(client: httpx.AsyncClient, number: int) -> httpx.Response:
    columns = {f"{name:0128d}": [0] for name in range(256)}
    return await client.post("/v1/experience", json={"group_ids": number, "columns": columns})


async def put_invented_columns(client: httpx.AsyncClient, number: int) -> httpx.Response:
    columns = {f"{number:064d}{name:064d}": [0] for name in range(10)}
    return await client.post("/v1/experience", json={"group_ids": 0, "columns": columns})


async def write_invented_columns(client: httpx.AsyncClient, number: int) -> httpx.Response:
    if not number:
        await client.post("/v1/experience", json={"group_ids": 0, "columns": {"tokens": ["a"]}})
    columns = {f"column {number}": ["a" * 100_000]}
    return await client.patch("/v1/experience", json={"row_ids": [0], "columns": columns})


async def overwrite_in_parts(client: httpx.AsyncClient, number: int) -> httpx.Response:
    """Each write hides a part of the ones before, and none of them whole."""
    if not number:
        await client.post("/v1/experience", json={"group_ids": 0, "columns": {"tokens": ["a"]}})
    columns = {"shared": ["a" * 100_000], f"column {number}": [0]}
    return await client.patch("/v1/experience", json={"row_ids": [0], "columns": columns, "overwrite": True})


async def close_groups(client: httpx.AsyncClient, number: int) -> httpx.Response:
    ids = list(range(number * 100, number * 100 + 100))
    return await client.post("/v1/experience/close_groups", json={"group_ids": ids})


async def put_and_drop(client: httpx.AsyncClient, number: int) -> httpx.Response:
    """Leaves open groups without rows."""
    ids = list(range(number * 100, number * 100 + 100))
    put = await client.post("/v1/experience", json={"group_ids": ids, "columns": {"tokens": ["a"] * 100}})
    claim = {"task": "score", "rows": 100, "patience_s": 0}
    lease = await client.post("/v1/experience/claim", json=claim)
    if lease.status_code == 200:
        await client.post(f"/v1/experience/leases/{lease.json()['lease_id']}/drop")
    return put


async def name_partitions(client: httpx.AsyncClient, number: int) -> httpx.Response:
    verbs: list[tuple[str, dict[str, Any]]] = [
        ("/claim", {"task": "score", "rows": 1}),
        ("/finish", {}),
        ("/cover", {"step": 1}),
        ("/rewind", {"task": "score", "step": 1}),
        ("/close_groups", {"group_ids": []}),
        ("", {"group_ids": number, "columns": {"tokens": ["a"]}}),
    ]
    verb, body = verbs[number % len(verbs)]
    return await client.post(f"/v1/experience{verb}", json=body | {"partition": f"{number:0128d}"})


@pytest.mark.parametrize(
    ("attack", "status", "words"),
    [
        (put_prompts, 408, "no room"),
        (put_nested, 408, "no room"),
        (put_mixed, 408, "no room"),
        (put_empty_lists, 408, "no room"),
        (put_many_columns, 408, "no room"),
        (put_invented_columns, 409, "names of columns"),
        (write_invented_columns, 409, "2097152"),
        (overwrite_in_parts, 409, "2097152"),
        (close_groups, 409, "400 groups"),
        (put_and_drop, 409, "400 groups"),
        (name_partitions, 409, "DELETE /v1/experience/partitions/NAME"),
    ],
)
def test_what_a_client_makes_is_bounded_and_refused_with_the_reason(attack: Attack, status: int, words: str) -> None:
    async def program() -> None:
        async with service() as client:
            number = 0
            while (answer := await attack(client, number)).is_success:
                number += 1
                assert number < 500
            assert answer.status_code == status and words in answer.json()["error"], answer.text
            held = held_bytes(client)
            for further in range(number, number + 40):
                assert (await attack(client, further)).status_code == status
            grown = held_bytes(client) - held
            assert grown < 20_000, f"{grown} bytes kept of what was refused"
            assert (await client.get("/v1/stats")).status_code == 200

    run(program())


def test_bytes_are_counted_as_the_memory_that_they_take() -> None:
    async def program() -> None:
        for attack in (put_prompts, put_nested, put_mixed, put_empty_lists, put_many_columns):
            async with service(capacity_bytes=64 * MIB) as client:
                await attack(client, 0)
                held = held_bytes(client)
                for number in range(1, 11):
                    assert (await attack(client, number)).status_code == 201
                taken = held_bytes(client) - held
                stats = (await client.get("/v1/stats")).json()
                counted = max(stats["prompts"]["bytes"], stats["experience"]["bytes"])
                assert 0.25 * counted < taken < 1.5 * counted, (attack.__name__, taken, counted)

    run(program())


def test_groups_that_have_rows_can_be_closed_when_no_other_fits() -> None:
    async def program() -> None:
        async with service(capacity_rows=10) as client:
            ids = list(range(10))
            put = {"group_ids": ids, "columns": {"tokens": ["a"] * 10, "reward": [0.0] * 10}}
            assert (await client.post("/v1/experience", json=put)).status_code == 201
            empty = await client.post("/v1/experience/close_groups", json={"group_ids": list(range(10, 20))})
            assert empty.status_code == 204
            more = await client.post("/v1/experience/close_groups", json={"group_ids": [0, 20]})
            assert more.status_code == 409
            assert (await client.post("/v1/experience/claim", json={"task": "train", "groups": 11})).status_code == 204
            assert (await client.post("/v1/experience/close_groups", json={"group_ids": ids})).status_code == 204
            claim = {"task": "train", "groups": 20}
            lease = (await client.post("/v1/experience/claim", json=claim)).json()
            assert len(lease["empty_groups"]) == 10 and len(lease["row_ids"]) == 10

    run(program())


def test_a_partition_that_is_deleted_makes_room_for_another() -> None:
    async def program() -> None:
        async with service(max_partitions=2) as client:
            for name, status in (("a", 204), ("b", 204), ("c", 409)):
                answer = await client.post("/v1/prompts/finish", json={"partition": name})
                assert answer.status_code == status, answer.text
            assert (await client.delete("/v1/prompts/partitions/a")).status_code == 200
            assert (await client.post("/v1/prompts/finish", json={"partition": "c"})).status_code == 204
            assert (await client.post("/v1/experience/finish", json={"partition": "d"})).status_code == 204

    run(program())


BIG = 1 << 70


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/experience", {"group_ids": 0, "columns": {"tokens": ["a"]}, "partition": "a" * 129}),
        ("/v1/experience", {"group_ids": 0, "columns": {"tokens": ["a"]}, "partition": ""}),
        ("/v1/experience", {"group_ids": 0, "columns": {"a" * 129: ["a"]}}),
        ("/v1/experience", {"group_ids": BIG, "columns": {"tokens": ["a"]}}),
        ("/v1/experience", {"group_ids": [BIG], "columns": {"tokens": ["a"]}}),
        ("/v1/experience", {"group_ids": 0, "columns": {"tokens": ["a"]}, "versions": BIG}),
        ("/v1/experience", {"group_ids": 0, "columns": {"tokens": ["a"]}, "tokens": [BIG]}),
        ("/v1/experience/claim", {"task": "score", "rows": 1, "rank": 4096, "policy": "balanced"}),
        ("/v1/experience/claim", {"task": "score", "rows": 1, "rank": -1, "policy": "balanced"}),
        ("/v1/experience/claim", {"task": "a" * 129, "rows": 1}),
        ("/v1/experience/close_groups", {"group_ids": [BIG]}),
        ("/v1/experience/cover", {"step": BIG}),
        ("/v1/weights", {"version": 1, "where": "a" * 5000}),
        ("/v1/weights", {"version": BIG}),
    ],
)
def test_long_names_and_large_numbers_are_refused(path: str, body: dict[str, Any]) -> None:
    async def program() -> None:
        async with service() as client:
            answer = await client.post(path, json=body)
            assert answer.status_code == 400 and "Expected" in answer.json()["error"], answer.text

    run(program())


@pytest.mark.parametrize("wrong", ["capacity_rows", "capacity_bytes", "max_partitions", "max_columns"])
def test_bounds_that_cannot_be_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        StoreServiceConfig(**{wrong: 0})


def test_an_error_quotes_no_more_than_a_part_of_what_was_sent() -> None:
    async def program() -> None:
        async with service() as client:
            answer = await client.post("/v1/experience", json={"a" * 1_000_000: 1})
            assert answer.status_code == 400 and "unknown field" in answer.json()["error"] and len(answer.text) < 5000

    run(program())
