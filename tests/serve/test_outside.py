"""The service of a run for programs outside, over a real socket: faults of programs are refused by name; and the verbs of
AsyncFlow and TransferQueue as the client has them."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from millstream.clock import RealClock
from millstream.engine.outside import OutsideEngine
from millstream.errors import ConfigError, StoreError
from millstream.events.sinks import MemorySink
from millstream.serve.http import BodyReader
from millstream.serve.listen import listening_at
from millstream.serve.outside import OutsideService
from millstream.serve.store import client as client_module
from millstream.serve.store.bodies import NewWeights
from millstream.serve.store.client import HttpStore
from millstream.serve.store.service import StoreServiceConfig, WeightsNotices, sections_app, store_app
from millstream.serve.store.verbs import OutsideClient
from millstream.store import Reads
from millstream.store.memory import MemoryStore
from millstream.types import Completion, Request, RequestKey, Sampling
from support.servers import serving

ROOT = Path(__file__).parents[2]
SERVICE = StoreServiceConfig(lease_s=5.0)


class Run:
    """An engine outside with requests in flight, and its service."""

    def __init__(self) -> None:
        self.done: list[Completion] = []
        self._tasks: list[asyncio.Task[None]] = []

    def make(self) -> tuple[Any, Any]:
        engine = OutsideEngine(
            slots=8,
            max_length=64,
            num_words=50,
            write=lambda version, weights: f"/v{version}",
            clock=RealClock(),
            sink=MemorySink(),
        )
        engine.place_of = lambda group_id: (0, 1)
        service = OutsideService(SERVICE, engine=engine, batches=None, describe=lambda: {"run_id": "r"}, token=None)
        service.announce(0, "/v0")
        self._tasks = [asyncio.ensure_future(self._ask(engine, member)) for member in range(3)]

        async def close() -> None:
            await engine.close()
            await asyncio.gather(*self._tasks)

        return service.app, close

    async def _ask(self, engine: OutsideEngine, member: int) -> None:
        key = RequestKey(group_id=5, member=member)
        request = Request(key=key, tokens=(4, 5), sampling=Sampling(max_tokens=2), seed=member)
        self.done.append(await engine.generate(request))


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


@contextmanager
def run_of_three() -> Iterator[tuple[Run, OutsideClient, str]]:
    run = Run()
    with serving(run.make) as url, OutsideClient(url) as client:
        yield run, client, url


def test_a_program_outside_claims_puts_and_is_refused_what_the_run_did_not_ask_for() -> None:
    with run_of_three() as (run, client, url):
        assert client.init_engine() == {"run_id": "r", "version": 0, "where": "/v0"}
        offer = client.get_prompts(rows=8, version=0)
        assert offer is not None and offer["member"] == [0, 1, 2] and offer["deadline"] == [1, 1, 1]
        assert client.get_prompts(rows=8, wait_s=0) is None, "all are on lease"
        rows = {"tokens": [[7, 8]] * 2, "logprobs": [[-1.0, -1.0]] * 2, "versions": [0, 0]}
        with pytest.raises(StoreError, match=r"409: 1 of 2 rows were refused: request 99: not admitted"):
            client.put_experience({"request": [offer["request"][0], 99], **rows})
        with pytest.raises(StoreError, match=r"409: .*wrong version: versions 1 to 1, expected 0 to 0"):
            client.put_experience(
                {"request": [offer["request"][1]], **{k: v[:1] for k, v in rows.items()}, "versions": [1]}
            )
        with pytest.raises(StoreError, match=r"409: .*twice"):
            client.put_experience({"request": [offer["request"][0]], **{k: v[:1] for k, v in rows.items()}})
        client.put_experience({"request": offer["request"][1:], **rows})
        until(lambda: len(run.done) == 3)
        assert [one.tokens for one in run.done] == [(7, 8)] * 3
        client.acknowledge(offer)
        with pytest.raises(StoreError, match="not admitted: this run publishes weights itself"):
            client.notify_weights(1, "/v1")
        with httpx.Client(base_url=url, trust_env=False) as http:
            for method, path in (
                ("POST", "/v1/prompts"),
                ("POST", "/v1/experience/claim"),
                ("POST", "/v1/prompts/finish"),
            ):
                assert http.request(method, path, json={}).status_code in (404, 405)
            assert http.post("/v1/experience", json={"columns": {"tokens": [[1]]}}).status_code == 409
            assert http.post("/v1/experience", json={"columns": {}}).status_code == 400
            assert (
                http.post("/v1/experience", content=b"{", headers={"Content-Type": "application/json"}).status_code
                == 400
            )


def new_store() -> tuple[Any, Any]:
    async def close() -> None: ...

    config = StoreServiceConfig(capacity_bytes=1 << 20, capacity_rows=8)
    return store_app(MemoryStore({"train": Reads(("tokens", "reward"))}), config), close


@contextmanager
def plain_store() -> Iterator[OutsideClient]:
    with serving(new_store) as url, OutsideClient(url) as client:
        yield client


def test_the_verbs_of_asyncflow_work_with_a_store_that_has_no_run() -> None:
    with plain_store() as client:
        client.put_prompts({"prompt": ["2 + 2 =", "3 + 3 ="]})
        prompts = client.get_prompts(rows=8)
        assert prompts is not None and prompts["prompt"] == ["2 + 2 =", "3 + 3 ="]
        client.renew(prompts)
        client.put_experience({"tokens": [[1, 2], [3]], "reward": [1.0, 0.0]}, group_ids=[4, 4])
        client.acknowledge(prompts)
        assert client.get_experience(wait_s=0) is None, "the group is open"
        client.close_groups([4])
        batch = client.get_experience()
        assert batch is not None and batch.group_id == 4 and batch["reward"] == [1.0, 0.0]
        client.acknowledge(batch, step=0)
        assert client.wait_for_weights() is None
        client.notify_weights(1, "/checkpoints/1", {"loss": 0.5})
        newest = client.wait_for_weights(after=0)
        assert newest is not None and (newest.version, newest.where) == (1, "/checkpoints/1")


def test_a_publication_may_take_longer_than_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    async def check(new: NewWeights) -> None:
        await asyncio.sleep(0.5)
        taken.append(new.version)

    def make() -> tuple[Any, Any]:
        async def close() -> None: ...

        bodies = BodyReader(max_body_bytes=1 << 20, max_wait_s=1.0)
        return sections_app([], WeightsNotices(bodies, check), SERVICE, token=None), close

    async def publish(url: str) -> None:
        async with HttpStore(url, poll_s=0.0) as store:
            await store.notify_weights(1, "/v1")

    monkeypatch.setattr(client_module, "ANSWER_S", 0.1)
    with serving(make) as url:
        asyncio.run(publish(url))
    assert taken == [1]


def test_a_port_that_is_taken_is_answered_with_the_key_that_sets_it() -> None:
    async def listen(port: int) -> None:
        app = store_app(MemoryStore({"train": Reads(("tokens",))}), SERVICE)
        limits = {"max_requests": 1, "limits": SERVICE.http, "token": None}
        async with listening_at(app, "127.0.0.1", port, port_option="outside.port", **limits):  # type: ignore[arg-type]
            pass

    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match=r"Choose another outside\.port"),
    ):
        asyncio.run(listen(taken.getsockname()[1]))


def test_the_example_of_the_page_works() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/outside.md").read_text(), flags=re.S)
    with serving(new_store) as url:
        exec(compile(block, "docs/outside.md", "exec"), {"url": url})


def test_rows_by_key_have_fields_and_tags_are_listed_and_cleared() -> None:
    with plain_store() as client:
        client.kv_put(["a", "b"], {"tokens": [np.arange(3), np.arange(2)]}, tags=[{"score": 0.5}, {}])
        client.kv_put("a", {"reward": [1.0]})
        client.kv_put("b", tags=[{"score": 0.1}])
        client.kv_put("a", {"text": ["other"]}, partition="held out")
        assert client.kv_list() == {"train": {"a": {"score": 0.5}, "b": {"score": 0.1}}, "held out": {"a": {}}}
        assert client.kv_list("held out") == {"held out": {"a": {}}}
        found = client.kv_get(["b", "a"])
        assert list(found) == ["tokens"] and [cell.tolist() for cell in found["tokens"]] == [[0, 1], [0, 1, 2]]
        assert client.kv_get("a", ["reward"]) == {"reward": [1.0]}
        for wrong, why in (
            (lambda: client.kv_get("c"), "404: no key 'c'"),
            (lambda: client.kv_get(["a", "b"], ["reward"]), "404: key 'b' has no column 'reward'"),
            (lambda: client.kv_put(["a", "b"], {"reward": [1.0]}), "400: reward: expected 2"),
            (lambda: client.kv_put(["c", "c"], {"reward": [1.0, 2.0]}), "400: .*each key once"),
            (lambda: client.kv_put("c"), "400: expected columns or tags"),
            (lambda: client.kv_put("c", {"tokens": [np.zeros(1 << 18)]}), "409: .*clear some"),
            (lambda: client.kv_put([f"k{n}" for n in range(9)], tags=[{}] * 9), "409: .*clear some"),
        ):
            with pytest.raises(StoreError, match=why):
                wrong()
        client.kv_clear(["a", "b"])
        assert client.kv_list() == {"held out": {"a": {}}}
        client.kv_put("c", {"tokens": [np.zeros(1 << 16)]})  # there is room again
