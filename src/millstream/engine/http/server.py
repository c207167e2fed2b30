"""One server: what is said to it, and what its troubles mean.

`Transient` is a failure that may pass: the caller may retry. Everything else is an `EngineError` that names the URL and says
what to do, or a `RequestRefused`, if the server says that the request itself is wrong.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import httpx
import msgspec

from millstream.engine.http.config import HttpConfig
from millstream.engine.http.dialects import Call, Flavour, Json
from millstream.engine.http.patience import Breaker, Budget
from millstream.errors import EngineError, RequestRefused

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
CONNECT_S = 10.0
LONGEST_RETRY_AFTER_S = 30.0
MAX_SHOWN = 300
"""Characters of an answer in a message."""


class Transient(Exception):
    """It may pass. `after_s`: what the server asks to wait."""

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


class Unreachable(Transient):
    """Nobody listens there: whoever does so next may be a server that was started anew, with the weights it starts with."""


class WrongWeights(Transient):
    """The server does not have the weights that it was given."""


class Unanswered(Transient):
    """It was given weights, and did not say in time that it took them. It may still do so."""


class Server:
    def __init__(self, url: str, config: HttpConfig, *, token: str | None, now: float) -> None:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self.url = url.rstrip("/")
        self._timeout = _timeout(config.timeout_s)
        self._weights_timeout = _timeout(config.weights_timeout_s)
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=self._timeout, limits=limits, trust_env=False
        )
        self._token_variable = config.token_variable
        self.breaker = Breaker()
        self.budget = Budget(now)
        self.num_streams = 0
        self.model: str | None = None
        self.base = 0
        """A server that counts versions calls our version n so: base + n."""
        self.has_weights = False
        """Whether it has those of the engine's version, as far as we know."""

    async def close(self) -> None:
        await self._http.aclose()

    async def greet(self, flavour: Flavour, *, is_updated: bool) -> None:
        """Find out what must be known of it."""
        for call in flavour.greetings:
            await self.tell(call)
        if flavour.swaps_in_flight:
            health = await self.tell(
                Call("GET", "/health", wrong=lambda a: None if "version" in a else "it has no version")
            )
            self.base = int(health["version"]) + is_updated
        elif flavour.path == "/v1/completions":
            models = await self.tell(
                Call("GET", "/v1/models", wrong=lambda a: None if a["data"] else "it has no model")
            )
            self.model = models["data"][0]["id"]

    async def tell(self, call: Call) -> Any:
        """What it answers. None where that is nothing, or no JSON."""
        timeout = self._weights_timeout if call.is_update else self._timeout
        try:
            response = await self._http.request(call.method, call.path, json=call.body, timeout=timeout)
        except httpx.ReadTimeout as late:
            trouble = self._trouble(call.path, late)
            if not call.is_update:
                raise trouble from late
            limit = f"engine.http.weights_timeout_s is {timeout.read:g}"
            raise Unanswered(f"{trouble}: it did not say in time that it took the weights ({limit})") from late
        except httpx.HTTPError as wrong:
            raise self._trouble(call.path, wrong) from wrong
        if response.status_code == 404 and call.is_optional:
            return None
        if not response.is_success:
            raise self._refusal(call.path, response)
        try:
            answer = msgspec.json.decode(response.content) if response.content else None
        except msgspec.DecodeError:
            answer = None
        try:
            found = call.wrong(answer)
        except (KeyError, TypeError, IndexError, AttributeError) as strange:
            found = f"it answered {_shown(response)} ({strange!r})"
        if found is not None:
            raise EngineError(f"{self.url}{call.path}: {found}")
        return answer

    async def events(self, path: str, body: Json) -> AsyncGenerator[Json, None]:
        """Of a stream, until it says that it is done. Raises `Transient` if it ends before that."""
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise self._refusal(path, response)
                async for line in response.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line[5:].strip()
                    if data == "[DONE]":
                        return
                    yield self._event(path, data)
        except httpx.HTTPError as wrong:
            raise self._trouble(path, wrong) from wrong
        raise Transient(f"{self.url}{path}: the stream ended before the answer did")

    def _event(self, path: str, data: str) -> Json:
        try:
            event = msgspec.json.decode(data)
        except msgspec.DecodeError as wrong:
            raise Transient(f"{self.url}{path}: an event that is no JSON: {data[:MAX_SHOWN]}") from wrong
        if not isinstance(event, dict):
            raise Transient(f"{self.url}{path}: an event that is no object: {data[:MAX_SHOWN]}")
        if (error := event.get("error")) is not None:
            about = error if isinstance(error, dict) else {"message": error}
            message = f"{self.url}{path}: {about.get('message', error)}"
            if about.get("code") in (400, 422) or about.get("type") == "invalid_request_error":
                raise RequestRefused(message)
            raise Transient(message)
        return event

    def _trouble(self, path: str, wrong: httpx.HTTPError) -> Transient:
        kind = Unreachable if isinstance(wrong, httpx.ConnectError | httpx.ConnectTimeout) else Transient
        return kind(f"{self.url}{path}: {type(wrong).__name__} {wrong}".rstrip())

    def _refusal(self, path: str, response: httpx.Response) -> Exception:
        said = f"{self.url}{path} answered {response.status_code}: {_shown(response)}"
        match response.status_code:
            case status if status in PASSING:
                return Transient(said, _retry_after(response))
            case 400 | 413 | 422:
                return RequestRefused(said)
            case 401 | 403:
                hint = "set engine.http.token_variable to the name of an environment variable that has its token"
                if self._token_variable is not None:
                    hint = f"the environment variable {self._token_variable} has another token than it expects"
                return EngineError(f"{said}. {hint[0].upper()}{hint[1:]}")
            case 404 | 405:
                return EngineError(
                    f"{said}. Look whether engine.http.flavour is what runs there, and whether it was started so that it takes "
                    "weights: docs/engines.md"
                )
        return EngineError(said)


def _timeout(seconds: float) -> httpx.Timeout:
    return httpx.Timeout(seconds, connect=min(CONNECT_S, seconds), pool=None)


def _shown(response: httpx.Response) -> str:
    return response.text[:MAX_SHOWN] or "nothing"


def _retry_after(response: httpx.Response) -> float:
    value = response.headers.get("retry-after", "0")
    return min(float(value), LONGEST_RETRY_AFTER_S) if value.isdecimal() else 0.0
