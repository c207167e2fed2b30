"""Sessions under load and under malformed requests, on the simulated engine: none is read, changed or ended without its id, none
outlives its limits, and nothing of them stays in memory."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from starlette.types import ASGIApp

from millstream.clock import Clock, RealClock
from millstream.env.bytes_text import ByteText
from millstream.serve.openai.app import model_app
from millstream.serve.openai.service import ModelServiceConfig, Served
from millstream.serve.openai.sessions import SessionLimits
from millstream.sim.engine import SimEngine
from support.asgi import Answer, send
from support.memory import held_bytes

T = TypeVar("T")
MANY = 10_000
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/sessions", "/v1/models", "/health")


class SetClock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


def service(limits: SessionLimits | None = None, clock: Clock | None = None, max_requests: int = 2 * MANY) -> ASGIApp:
    text = ByteText()
    served = Served(
        name="sim",
        engine=SimEngine(slots=MANY, token_s=1e-6, num_tokens=lambda rng: rng.randint(1, 8)),
        text=text,
        end_tokens=(text.end_token,),
        vocabulary=258,
        context=4096,
    )
    limits = limits or SessionLimits(sessions=MANY)
    return model_app(served, ModelServiceConfig(max_requests=max_requests, sessions=limits), clock=clock or RealClock())


def in_time(work: Coroutine[Any, Any, T]) -> T:
    """A request that is never answered fails the test."""

    async def program() -> T:
        async with asyncio.timeout(120):
            return await work

    return asyncio.run(program())


async def begin(app: ASGIApp) -> str:
    session_id: str = (await send(app, "POST", "/v1/sessions")).json()["id"]
    return session_id


async def ask(app: ASGIApp, session_id: str, prompt: str) -> Answer:
    body = {"prompt": prompt, "session_id": session_id, "max_tokens": 8}
    return await send(app, "POST", "/v1/completions", body)


async def num_sessions(app: ASGIApp) -> int:
    num: int = (await send(app, "GET", "/health")).json()["sessions"]
    return num


def test_ten_thousand_sessions_at_once_have_their_own_tokens_only() -> None:
    async def program() -> None:
        clock = SetClock()
        app = service(SessionLimits(sessions=MANY, idle_s=10.0), clock)
        ids = [await begin(app) for _ in range(MANY)]
        assert len(set(ids)) == MANY and await num_sessions(app) == MANY
        assert (await send(app, "POST", "/v1/sessions")).status == 429
        answers = await asyncio.gather(*(ask(app, one, f"<{number}>") for number, one in enumerate(ids)))
        assert {answer.status for answer in answers} == {200}
        for number in random.Random(0).sample(range(MANY), 500):
            (part,) = (await send(app, "GET", f"/v1/sessions/{ids[number]}")).json()["parts"]
            shown = [
                token for token, is_sampled in zip(part["token_ids"], part["loss_mask"], strict=True) if not is_sampled
            ]
            assert bytes(shown).decode() == f"<{number}>"
            assert sum(part["loss_mask"]) == answers[number].json()["usage"]["completion_tokens"]
        clock.time = 11.0
        assert await num_sessions(app) == 0

    in_time(program())


def other_ids(session_id: str, rng: random.Random) -> list[str]:
    """What a client that does not know the id may try."""
    name, digits = session_id.split("-")
    place = rng.randrange(len(digits))
    flipped = digits[:place] + rng.choice([d for d in "0123456789abcdef" if d != digits[place]]) + digits[place + 1 :]
    tried = [
        f"{name}-{flipped}",
        session_id[:-1],
        session_id + "0",
        session_id.upper(),
        digits,
        f" {session_id}",
        "*",
        "%",
    ]
    return [*tried, f"{session_id}\0", "..", "session-", name, f"{name}-{rng.randbytes(16).hex()}", "é" * 9, "0" * 9000]


def test_a_session_is_not_read_continued_or_ended_without_its_id() -> None:
    async def program() -> None:
        app, rng = service(), random.Random(1)
        mine = [await begin(app) for _ in range(20)]
        for one in mine:
            assert (await ask(app, one, "secret")).status == 200
        before = [(await send(app, "GET", f"/v1/sessions/{one}")).body for one in mine]
        for one in mine:
            for tried in other_ids(one, rng):
                for method in ("GET", "DELETE"):
                    found = await send(app, method, f"/v1/sessions/{tried}")
                    assert found.status in (404, 405) and b"secret" not in found.body
                for name in ("x-session-id", "authorization", "x-api-key"):
                    value = tried.encode("utf-8").decode("latin-1")
                    found = await send(app, "POST", "/v1/completions", {"prompt": "secret and"}, {name: value})
                    assert found.status in (400, 404) if name == "x-session-id" else found.status == 200
                assert (await ask(app, tried, "secret and")).status in (400, 404)
        assert (await send(app, "GET", "/v1/sessions")).status == 405, "sessions are not listed"
        assert [(await send(app, "GET", f"/v1/sessions/{one}")).body for one in mine] == before

    in_time(program())


def test_a_session_that_is_never_ended_ends_with_its_time() -> None:
    async def program() -> None:
        clock = SetClock()
        app = service(SessionLimits(sessions=2, idle_s=10.0), clock)
        left, used = await begin(app), await begin(app)
        clock.time = 9.0
        assert (await ask(app, used, "a")).status == 200
        assert (await send(app, "GET", f"/v1/sessions/{left}")).status == 200  # to read it is not to use it
        clock.time = 11.0
        assert (await send(app, "GET", f"/v1/sessions/{left}")).status == 404
        assert (await ask(app, left, "a")).status == 404 and (await ask(app, used, "b")).status == 200
        assert (await send(app, "POST", "/v1/sessions")).status == 201, "its place is free"
        clock.time = 99.0
        assert await num_sessions(app) == 0

    in_time(program())


# ---- malformed requests ------------------------------------------------------------------------------------------------

VALUES = (
    None, True, -1, 0, 1, 1e308, -0.5, 1 << 70, "", "a", "\ud800", "session-0", [], {}, [1, 2], [[1], ["a"]], [None], ["a", "b"],
    {"role": "user"}, [{"role": "user", "content": "a"}], [{"role": "tool", "content": None}], [{"role": 3}], "a" * 5000,
)  # fmt: skip
FIELDS = (
    "prompt", "messages", "model", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "stream", "logprobs", "tools",
    "session_id", "echo", "system", "stop_sequences", "tool_choice", "response_format", "no_such_field",
)  # fmt: skip
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
    "/v1/messages": {"model": "sim", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
}


def malformed(rng: random.Random, session_id: str) -> tuple[str, str, bytes, dict[str, str]]:
    path = rng.choice(PATHS)
    body = {**VALID.get(path, {}), **{rng.choice(FIELDS): rng.choice(VALUES) for _ in range(rng.randint(1, 3))}}
    content = json.dumps(body).encode()
    match rng.randrange(6):
        case 0:
            content = content[: rng.randrange(len(content))]
        case 1:
            content = rng.randbytes(rng.randint(1, 60))
        case 2:
            content = b"[" * 20_000 + content
        case _:
            pass
    headers = {"content-type": rng.choice(["application/json"] * 4 + ["text/plain", "application/x-msgpack", ""])}
    if rng.random() < 0.5:
        headers["x-session-id"] = rng.choice([session_id, "", "session-0", "é"])
    return rng.choice(["POST"] * 8 + ["GET", "PUT", "DELETE"]), path, content, headers


async def fuzz(app: ASGIApp, seed: int, num: int) -> dict[int, int]:
    rng, session_id = random.Random(seed), await begin(app)
    statuses: dict[int, int] = {}
    for _ in range(num):
        method, path, content, headers = malformed(rng, session_id)
        found = await send(app, method, path, content, headers)
        assert found.status < 500 and found.status != 0, (method, path, content[:300], headers, found)
        assert found.status < 300 or re.search(rb'"message":\s*".', found.body), found
        statuses[found.status] = statuses.get(found.status, 0) + 1
    await send(app, "DELETE", f"/v1/sessions/{session_id}")
    return statuses


@pytest.mark.parametrize("seed", range(3))
def test_malformed_requests_are_refused_and_never_hang_or_break_the_service(seed: int) -> None:
    async def program() -> None:
        app = service()
        statuses = await fuzz(app, seed, 700)
        assert sum(num for status, num in statuses.items() if status >= 400) > 300 and statuses.get(200, 0) > 20
        assert (await ask(app, await begin(app), "still here")).status == 200

    in_time(program())


def test_malformed_requests_and_sessions_leave_no_memory_behind() -> None:
    async def program() -> None:
        app = service(SessionLimits(sessions=64))
        sizes = []
        for seed in (7, 7, 8):  # the first fills caches
            for _ in range(50):
                one = await begin(app)
                await ask(app, one, "a" * 500)
                await send(app, "DELETE", f"/v1/sessions/{one}")
            await fuzz(app, seed, 200)
            sizes.append(held_bytes(app))
            assert await num_sessions(app) == 0 and len(asyncio.all_tasks()) == 1
        assert sizes[-1] - sizes[0] < 100_000, sizes

    gc.collect()  # clients of earlier tests: within an event loop each would start a task that closes it
    in_time(program())
