"""A chat model behind an OpenAI-compatible endpoint, with limits: how many calls at once, how many in all, how many tokens.

A 429 or a 5xx is retried, after the server's Retry-After or with exponential back-off. Past a limit every
question is refused, by name, and the refusals are counted.
"""

from __future__ import annotations

import asyncio
import email.utils
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from millstream.decoding import decode_json
from millstream.errors import ConfigError, RewardFailed

if TYPE_CHECKING:
    import httpx2

MAX_PAUSE_S = 60.0
FIRST_PAUSE_S = 0.5
SHOWN = 200  # characters of an answer that an error shows


class EndpointConfig(Struct, frozen=True, kw_only=True):
    url: str  # up to and with the version: http://host:8000/v1
    model: str
    api_key_env: str | None = None  # the name of the environment variable that holds the key. None: no key is sent.
    most_at_once: int = 8
    most_calls: int | None = None  # a run; every attempt counts. None: no limit.
    # A run, as the endpoint counts them. Those of answers in flight come on top. None: no limit.
    most_tokens: int | None = None
    retries: int = 4
    max_tokens: int = 512
    temperature: float = 0.0
    timeout_s: float = 30.0  # of one question with all its attempts, without the wait for a free connection


class Spent(Struct):
    """Since the start of the process: a resumed run counts from 0."""

    calls: int = 0
    tokens: int = 0
    refused: int = 0


class _Message(Struct):
    content: str | None = None


class _Choice(Struct):
    message: _Message


class _Usage(Struct):
    total_tokens: int = 0


class _Completion(Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class _TryAgain(Exception):
    def __init__(self, why: str, after_s: float | None) -> None:
        super().__init__(why)
        self.after_s = after_s


class Endpoint:
    """Raises `ConfigError` when made, if the key is not there; `RewardFailed` when asked."""

    def __init__(self, config: EndpointConfig, name: str) -> None:
        self._config = config
        self._name = name
        self.spent = Spent()
        self._loop: asyncio.AbstractEventLoop | None = None
        if not config.url.startswith(("http://", "https://")):
            raise ConfigError(f"reward {name}, args.url = {config.url!r}: expected something like http://host:8000/v1")
        if config.most_at_once < 1 or config.retries < 0 or config.max_tokens < 1:
            raise ConfigError(f"reward {name}: most_at_once and max_tokens must be at least 1, retries at least 0")
        if config.api_key_env is not None and not os.environ.get(config.api_key_env):
            raise ConfigError(
                f"reward {name}: no API key: export {config.api_key_env}=..., or leave args.api_key_env out"
            )

    async def ask(self, question: str) -> str:
        """The model's answer. Raises `RewardFailed`."""
        async with self._connection() as client:
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    return await self._ask(client, question)
            except TimeoutError as error:
                what = f"no answer from {self._config.url} within {self._config.timeout_s:g} s; reward.timeout_s sets the limit"
                raise RewardFailed(f"reward {self._name}: {what}") from error

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[httpx2.AsyncClient]:
        """One client per event loop, with a limit of concurrent requests."""
        import httpx2

        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._free = asyncio.Semaphore(self._config.most_at_once)
            self._client = httpx2.AsyncClient(
                timeout=None, limits=httpx2.Limits(max_connections=self._config.most_at_once)
            )
        async with self._free:
            yield self._client

    async def _ask(self, client: httpx2.AsyncClient, question: str) -> str:
        pause_s = FIRST_PAUSE_S
        began = time.monotonic()
        for attempt in range(self._config.retries + 1):
            self._count_call()
            try:
                return await self._attempt(client, question)
            except _TryAgain as error:
                after_s = min(MAX_PAUSE_S, pause_s) if error.after_s is None else error.after_s
                if attempt == self._config.retries:
                    raise RewardFailed(
                        f"reward {self._name}: {error}, {attempt + 1} times; args.retries sets how often"
                    ) from None
                if time.monotonic() - began + after_s > self._config.timeout_s:
                    what = f"{error}, and the next attempt would be in {after_s:g} s, past reward.timeout_s"
                    raise RewardFailed(f"reward {self._name}: {what} = {self._config.timeout_s:g}") from None
                await asyncio.sleep(after_s)
                pause_s *= 2
        raise AssertionError("unreachable")

    def _count_call(self) -> None:
        """Before it is made, so that many at once cannot pass the limit together."""
        spent, config = self.spent, self._config
        for name, used, most in (
            ("most_calls", spent.calls, config.most_calls),
            ("most_tokens", spent.tokens, config.most_tokens),
        ):
            if most is not None and used >= most:
                spent.refused += 1
                raise RewardFailed(
                    f"reward {self._name}: args.{name} = {most} is spent ({spent.calls} calls, {spent.tokens} tokens); "
                    f"{spent.refused} refused so far"
                )
        spent.calls += 1

    async def _attempt(self, client: httpx2.AsyncClient, question: str) -> str:
        import httpx2

        config = self._config
        headers = {"Authorization": f"Bearer {os.environ.get(config.api_key_env, '')}"} if config.api_key_env else {}
        body = {
            "model": config.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
        }
        try:
            answer = await client.post(f"{config.url.rstrip('/')}/chat/completions", json=body, headers=headers)
        except httpx2.HTTPError as error:
            raise _TryAgain(f"{config.url} cannot be asked ({type(error).__name__}: {error})", None) from error
        if answer.status_code == 429 or answer.status_code >= 500:
            raise _TryAgain(f"{config.url} answered {answer.status_code}", _seconds(answer.headers.get("retry-after")))
        if answer.status_code != 200:
            what = f"{config.url} answered {answer.status_code}: {answer.text[:SHOWN]}"
            raise RewardFailed(f"reward {self._name}: {what}")
        return self._content(answer.content)

    def _content(self, body: bytes) -> str:
        try:
            completion = decode_json(body, _Completion)
        except msgspec.MsgspecError as error:
            what = f"expected a chat completion, got {body[:SHOWN]!r} ({error})"
            raise RewardFailed(f"reward {self._name}: {what}") from error
        self.spent.tokens += completion.usage.total_tokens if completion.usage is not None else 0
        if not completion.choices or completion.choices[0].message.content is None:
            raise RewardFailed(f"reward {self._name}: the answer of {self._config.url} has no text: {body[:SHOWN]!r}")
        return completion.choices[0].message.content


def _seconds(retry_after: str | None) -> float | None:
    """Seconds, or a date; None if there is neither."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        parsed: Any = email.utils.parsedate_tz(retry_after)
        return None if parsed is None else max(0.0, email.utils.mktime_tz(parsed) - time.time())
