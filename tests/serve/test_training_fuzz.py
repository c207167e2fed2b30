"""Malformed requests to every endpoint of the training service: refused by name, never a hang, nothing left in memory."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest
from starlette.types import ASGIApp

from millstream.serve.training import futures
from millstream.serve.training import service as serving
from millstream.serve.training.base import BaseModel
from millstream.serve.training.protobuf import write_field
from millstream.serve.training.service import TrainingService, TrainingServiceConfig, training_app
from support.asgi import Answer, send
from support.memory import held_bytes
from support.training_server import KEY, small_base

T = TypeVar("T")
VALUES = (
    None, True, -1, 0, 1, 1e308, -0.5, 1 << 70, "", "a", "\ud800", "../../x", [], {}, [1, 2], [[1], ["a"]], [None], "a" * 5000,
    {"rank": 0}, {"rank": 4, "seed": -1, "train_mlp": False, "train_attn": False}, {"learning_rate": "a"}, {"chunks": [{}]},
    {"max_tokens": 0}, {"temperature": -1}, {"top_p": 7}, {"stop": [-5]}, {"stop": [[]]}, {"max_lag": "-1"}, {"max_lag": []},
)  # fmt: skip


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return small_base()


def in_time(work: Coroutine[Any, Any, T]) -> T:
    """A request that is never answered fails the test."""

    async def program() -> T:
        async with asyncio.timeout(120):
            return await work

    return asyncio.run(program())


def array(values: list[int], kind: str) -> bytes:
    return np.array(values, kind).tobytes()


def pass_body(model_id: str, number: int, tokens: list[int], loss_fn: str = "cross_entropy") -> bytes:
    """A ForwardBackwardRequest."""
    chunk = write_field(1, write_field(1, array(tokens[:-1], "<i4")))
    tensor = write_field(1, array(tokens[1:], "<i8")) + write_field(3, 2) + write_field(4, len(tokens) - 1)
    weights = (
        write_field(1, array([1] * (len(tokens) - 1), "<f4")) + write_field(3, 1) + write_field(4, len(tokens) - 1)
    )
    inputs = [
        write_field(1, name) + write_field(2, one) for name, one in (("target_tokens", tensor), ("weights", weights))
    ]
    datum = write_field(1, chunk) + b"".join(write_field(2, one) for one in inputs)
    return write_field(1, model_id) + write_field(2, number) + write_field(3, datum) + write_field(4, loss_fn)


class Client:
    """A session with a model and a sampler, whose requests are right until they are mutated."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.number = 0  # of the last request of the model
        self.num_samples = 0
        self.model = self.sampler = self.session = ""

    async def send(self, path: str, body: Any, method: str = "POST") -> Answer:
        return await send(self.app, method, f"/api/v1/{path}", body, {"x-api-key": KEY})

    async def begin(self) -> Client:
        self.session = (await self.send("create_session", {})).json()["session_id"]
        made = {
            "session_id": self.session,
            "model_seq_id": 0,
            "base_model": "tiny",
            "lora_config": {"rank": 2, "seed": 1},
        }
        self.model = (await self.send("create_model", made)).json()["model_id"]
        asked = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        self.sampler = (await self.send("create_sampling_session", asked)).json()["sampling_session_id"]
        return self

    def bodies(self) -> dict[str, Any]:
        of_model = {"model_id": self.model, "seq_id": self.number + 1}
        sample = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]},
            "sampling_params": {"max_tokens": 2},
        }
        return {
            "client/config": {"sdk_version": "0"},
            "client/dynamic_config": {"sdk_version": "0"},
            "session_heartbeat": {"session_id": self.session},
            "forward_backward": pass_body(self.model, self.number + 1, [3, 4, 5, 6]),
            "optim_step": {**of_model, "adam_params": {"learning_rate": 1e-3}},
            "save_weights": {**of_model, "path": "a", "overwrite": True},
            "load_weights": {**of_model, "path": f"tinker://{self.model}/weights/a", "optimizer": True},
            "save_weights_for_sampler": {**of_model, "path": "b", "overwrite": True},
            "create_sampling_session": {
                "session_id": self.session, "sampling_session_seq_id": 0, "base_model": "tiny"
            },
            "asample": {**sample, "sampling_session_id": self.sampler, "seq_id": self.num_samples},
            "retrieve_future": {"request_id": f"{self.model}:1"},
            "cancel_future": {"request_id": f"{self.model}:1"},
            "get_info": {"model_id": self.model},
            "weights_info": {"tinker_path": f"tinker://{self.model}/weights/a"},
        }  # fmt: skip

    async def result(self, request_id: str) -> Answer:
        while True:
            found = await self.send("retrieve_future", {"request_id": request_id})
            if b'"try_again"' not in found.body[:20]:
                return found

    async def try_one(self, rng: random.Random) -> int:
        bodies = self.bodies()
        path = rng.choice(list(bodies))
        return await self.try_body(path, mutated(bodies[path], rng))

    async def try_body(self, path: str, body: bytes) -> int:
        """A request that may be wrong: it is refused at once, or its result is an error, or it was right all the same."""
        found = await self.send(path, body)
        assert found.status == 200 or found.status == 204 or 400 <= found.status < 500, (path, body, found)
        if found.status >= 400:
            assert found.json()["error"], (path, body, found)
            return found.status
        request_id = found.json().get("request_id") if found.body.startswith(b"{") else None
        if request_id is None or path in ("retrieve_future", "cancel_future"):
            return found.status
        is_next = request_id == f"{self.model}:{self.number + 1}"
        if is_next or path == "asample":
            self.number += is_next
            self.num_samples += not is_next
            result = await self.result(request_id)
            is_failed = result.body.startswith(b'{"error"')
            assert result.status == 200 and (not is_failed or result.json()["category"] == "user"), (path, body, result)
            return 299 if is_failed else 200
        return found.status


def mutated(body: Any, rng: random.Random) -> bytes:
    if isinstance(body, bytes):
        data = bytearray(body)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data) // 3, len(data)) if rng.random() < 0.9 else rng.randrange(len(data))
            data[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
        return bytes(data)
    changed = dict(body)
    for _ in range(rng.randint(1, 2)):
        match rng.randrange(4):
            case 0:
                changed.pop(rng.choice(list(body)), None)
            case 1:
                changed[rng.choice(["no_such_field", "type", "path", "prompt_logprobs"])] = rng.choice(VALUES)
            case _:
                changed[rng.choice(list(body))] = rng.choice(VALUES)
    content = json.dumps(changed).encode()
    match rng.randrange(8):
        case 0:
            return content[: rng.randrange(len(content))]
        case 1:
            return rng.randbytes(rng.randint(0, 60))
        case 2:
            return b"[" * 20_000 + content
        case _:
            return content


@asynccontextmanager
async def served(folder: Path, base: BaseModel) -> AsyncIterator[Client]:
    config = TrainingServiceConfig(folder=str(folder))
    service = TrainingService(base, config)
    try:
        yield await Client(training_app(service, config, tokens=[KEY])).begin()
    finally:
        await service.close()


@pytest.fixture
def _quick_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "POLL_S", 0.05)


@pytest.mark.usefixtures("_quick_answers")
@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_wrong_is_refused_and_the_model_goes_on(base: BaseModel, tmp_path: Path, seed: int) -> None:
    async def program() -> None:
        async with served(tmp_path, base) as client:
            rng = random.Random(seed)
            statuses = Counter([await client.try_one(rng) for _ in range(500)])
            assert sum(num for status, num in statuses.items() if status >= 400) > 150
            assert statuses[299] > 30 and statuses[200] > 20, statuses
            body = pass_body(client.model, client.number + 1, [3, 4, 5, 6])
            asked = (await client.send("forward_backward", body)).json()["request_id"]
            assert b"loss:sum" in (await client.result(asked)).body

    in_time(program())


@pytest.mark.usefixtures("_quick_answers")
def test_malformed_requests_leave_nothing_in_memory(
    base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "MAX_KEPT", 16)

    async def program() -> None:
        async with served(tmp_path, base) as client:
            sizes, handles, tasks = list[int](), list[int](), list[int]()
            for name in client.bodies():  # engines and scorers are made once
                right = (
                    {**client.bodies()["asample"], "prompt_logprobs": True}
                    if name == "asample"
                    else client.bodies()[name]
                )
                await client.try_body(name, right if isinstance(right, bytes) else json.dumps(right).encode())
            for seed in (7, 7, 7):  # the first fills caches
                rng = random.Random(seed)
                for _ in range(150):
                    await client.try_one(rng)
                sizes.append(held_bytes(client))
                handles.append(psutil.Process().num_fds())
                tasks.append(len(asyncio.all_tasks()))
            assert sizes[-1] - sizes[0] < 200_000, sizes
            assert handles[-1] - handles[0] < 20 and tasks[-1] - tasks[0] < 20, (handles, tasks)  # of 150 requests

    in_time(program())


def test_no_endpoint_answers_without_a_key(base: BaseModel, tmp_path: Path) -> None:
    async def program() -> None:
        config = TrainingServiceConfig(folder=str(tmp_path))
        service = TrainingService(base, config)
        app = training_app(service, config, tokens=[KEY])
        for route in service.routes():
            for method in ("POST", "GET", "PUT"):
                for headers in ({}, {"x-api-key": "tml-other"}, {"x-api-key": KEY[:-1]}, {"authorization": "Bearer"}):
                    found = await send(app, method, route.path, {}, headers)
                    assert found.status == 401 and set(found.json()) == {"error"}, (method, route.path, headers)
        assert not list((tmp_path / "sessions").iterdir())
        await service.close()

    in_time(program())


@pytest.mark.usefixtures("_quick_answers")
def test_samples_and_passes_of_200_futures_in_flight_are_retrieved_in_any_order(
    base: BaseModel, tmp_path: Path
) -> None:
    async def program() -> None:
        async with served(tmp_path, base) as client:
            asked = []
            for number in range(100):
                sample = {**client.bodies()["asample"], "seq_id": number}
                body = pass_body(client.model, number + 1, [3, 4, 5 + number % 5, 6])
                asked += [await client.send("asample", sample), await client.send("forward_backward", body)]
            names = [one.json()["request_id"] for one in asked]
            assert len(set(names)) == 200
            random.Random(3).shuffle(names)
            results = await asyncio.gather(*(client.result(name) for name in names))
            again = await asyncio.gather(*(client.result(name) for name in names))
            assert all(one.status == 200 and not one.body.startswith(b"{") for one in results) and again == results

    in_time(program())
