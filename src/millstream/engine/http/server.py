"""The connection to one server: its calls, its streams, and what each of its failures means.

A `TransientFailure` may pass: the caller may retry. Everything else is an error with the URL in it: `EngineMisconfigured` for
what no retry repairs (it says what to set), `RequestRefused` where the server calls the request wrong, else `EngineError`.
"""

from __future__ import annotations

import functools
import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import httpx2
import msgspec

from millstream.decoding import decode_json
from millstream.engine.http.config import HttpConfig
from millstream.engine.http.dialects import Dialect, JsonObject, ServerCall, StreamedTokens
from millstream.errors import EngineError, EngineMisconfigured, RequestRefused

TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
CONNECT_S = 10.0
MAX_RETRY_AFTER_S = 30.0
MAX_SHOWN_CHARACTERS = 300  # of an answer in a message


@functools.cache
def _tls_context() -> ssl.SSLContext:
    """One for all servers: to read the certificates takes 40 ms."""
    return httpx2.create_ssl_context(trust_env=False)


class TransientFailure(Exception):
    """A failure that may pass. `after_s`: how long the server asks to wait."""

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


class Unreachable(TransientFailure):
    """Nothing listens at the URL: what listens there next may be a restarted server, with the weights that it starts with."""


class WrongWeights(TransientFailure):
    """The server does not have the weights that it was given."""


class UpdateUnconfirmed(TransientFailure):
    """The server was given weights, and did not confirm in time that it loaded them. It may still do so."""


class ServerConnection:
    def __init__(self, url: str, config: HttpConfig, token: str | None) -> None:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=256)
        self.url = url.rstrip("/")
        self._timeout = _timeout(config.timeout_s)
        self._weights_timeout = _timeout(config.weights_timeout_s)
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=self._timeout,
            limits=limits,
            trust_env=False,
            verify=_tls_context(),
        )
        self._token_variable = config.token_variable
        self._flavour = config.flavour
        self.model: str | None = None
        self.served_version = 0  # of a server that counts versions: the one that it had at first

    async def close(self) -> None:
        await self._http.aclose()

    async def identify(self, dialect: Dialect) -> None:
        """Check that it is the kind of server that the config says, and read its model's name or its version. Raises
        `EngineMisconfigured` if it is another kind."""
        try:
            for call in dialect.first_calls:
                await self.call(call)
            if dialect.swaps_in_flight:
                health = await self.call(
                    ServerCall("GET", "/health", check=lambda a: None if "version" in a else "it has no version")
                )
                self.served_version = int(health["version"])
            elif dialect.path == "/v1/completions":
                models = await self.call(
                    ServerCall("GET", "/v1/models", check=lambda a: None if a["data"] else "it has no model")
                )
                self.model = models["data"][0]["id"]
        except EngineError as error:
            raise EngineMisconfigured(str(error)) from error

    async def call(self, call: ServerCall) -> Any:
        """Its answer. None where that is empty, or no JSON."""
        timeout = self._weights_timeout if call.is_update else self._timeout
        try:
            response = await self._http.request(call.method, call.path, json=call.body, timeout=timeout)
        except httpx2.ReadTimeout as late:
            failure = self._failure(call.path, late)
            if not call.is_update:
                raise failure from late
            limit = f"engine.http.weights_timeout_s is {timeout.read:g}"
            raise UpdateUnconfirmed(
                f"{failure}: it did not confirm in time that it loaded the weights ({limit})"
            ) from late
        except httpx2.HTTPError as error:
            raise self._failure(call.path, error) from error
        if response.status_code == 404 and call.is_optional:
            return None
        if not response.is_success:
            raise self._refusal(call.path, response)
        try:
            answer = decode_json(response.content, Any) if response.content else None
        except msgspec.DecodeError:
            answer = None
        try:
            found = call.check(answer)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            found = f"it answered {_shown(response)} ({error!r})"
        if found is not None:
            raise EngineError(f"{self.url}{call.path}: {found}")
        return answer

    async def tokens(self, dialect: Dialect, body: JsonObject) -> AsyncGenerator[StreamedTokens, None]:
        """The new tokens of each event of a stream, until it says that it is done. Raises `TransientFailure` if it ends before
        that, or has something else in it."""
        num_before, url = 0, f"{self.url}{dialect.path}"
        async with aclosing(self._events(dialect.path, body)) as events:
            async for event in events:
                try:
                    new = dialect.read(event, num_before)
                except (KeyError, TypeError, ValueError, IndexError) as error:
                    found = f"not an answer of {self._flavour} ({error!r}): {str(event)[:MAX_SHOWN_CHARACTERS]}"
                    raise TransientFailure(f"{url}: {found}") from error
                if len(new.tokens) != len(new.logprobs):
                    found = f"{len(new.tokens)} tokens with {len(new.logprobs)} log-probabilities"
                    raise TransientFailure(f"{url}: {found}, expected as many")
                num_before += len(new.tokens)
                yield new

    async def _events(self, path: str, body: JsonObject) -> AsyncGenerator[JsonObject, None]:
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
        except httpx2.HTTPError as error:
            raise self._failure(path, error) from error
        raise TransientFailure(f"{self.url}{path}: the stream ended before the answer did")

    def _event(self, path: str, data: str) -> JsonObject:
        try:
            event = decode_json(data, Any)
        except msgspec.DecodeError as wrong:
            raise TransientFailure(
                f"{self.url}{path}: an event that is no JSON: {data[:MAX_SHOWN_CHARACTERS]}"
            ) from wrong
        if not isinstance(event, dict):
            raise TransientFailure(f"{self.url}{path}: an event that is no object: {data[:MAX_SHOWN_CHARACTERS]}")
        if (error := event.get("error")) is not None:
            about = error if isinstance(error, dict) else {"message": error}
            message = f"{self.url}{path}: {about.get('message', error)}"
            if about.get("code") in (400, 422) or about.get("type") == "invalid_request_error":
                raise RequestRefused(message)
            raise TransientFailure(message)
        return event

    def _failure(self, path: str, error: httpx2.HTTPError) -> TransientFailure:
        kind = Unreachable if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout) else TransientFailure
        return kind(f"{self.url}{path}: {type(error).__name__} {error}".rstrip())

    def _refusal(self, path: str, response: httpx2.Response) -> Exception:
        said = f"{self.url}{path} answered {response.status_code}: {_shown(response)}"
        match response.status_code:
            case status if status in TRANSIENT_STATUS:
                return TransientFailure(said, _retry_after(response))
            case 400 | 413 | 422:
                return RequestRefused(said)
            case 401 | 403:
                hint = "set engine.http.token_variable to the name of an environment variable that has its token"
                if self._token_variable is not None:
                    hint = f"the environment variable {self._token_variable} has another token than it expects"
                return EngineMisconfigured(f"{said}. {hint[0].upper()}{hint[1:]}")
            case 404 | 405:
                return EngineMisconfigured(
                    f"{said}. Look whether engine.http.flavour is what runs there, and whether it was started so that it takes "
                    "weights: docs/engines.md"
                )
        return EngineError(said)


def _timeout(seconds: float) -> httpx2.Timeout:
    return httpx2.Timeout(seconds, connect=min(CONNECT_S, seconds), pool=None)


def _shown(response: httpx2.Response) -> str:
    return response.text[:MAX_SHOWN_CHARACTERS] or "nothing"


def _retry_after(response: httpx2.Response) -> float:
    value = response.headers.get("retry-after", "0")
    return min(float(value), MAX_RETRY_AFTER_S) if value.isdecimal() else 0.0
