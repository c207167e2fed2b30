"""Access control of every service: the token, and the number of requests at once.

On an address that other machines can reach, a token is required. Without one, a page in a browser on this machine must not be
able to use the service: requests with an Origin header, or for a host name other than this machine's, are refused.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from millstream.errors import ConfigError

OPEN_PATHS = ("/v1/health", "/health")
Refuse = Callable[[int, str, dict[str, str] | None], Response]  # status, message, headers -> the response of a service
RETRY_AFTER_S = 1
MAX_MESSAGE = 2000  # characters of an error: it may quote what was sent


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_token(host: str, token: str | None) -> None:
    if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token and token):
        raise ConfigError("the token is empty, or has spaces at its ends or characters that a header cannot contain")
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"to listen on {host}, which other machines can reach, set a token that clients must send: "
            "export MILLSTREAM_TOKEN=$(openssl rand -hex 16). Or listen on 127.0.0.1"
        )


def error_response(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": message[:MAX_MESSAGE]}, status, headers)


class AccessControl:
    """ASGI middleware. `limit` counts waiting requests as well: each may hold a body in memory. `full` is the status of
    requests beyond it. Of several tokens any one is accepted."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | Sequence[str] | None,
        limit: int,
        refuse: Refuse = error_response,
        full: int = 503,
    ) -> None:
        self._app = app
        self._limit = limit
        self._num_requests = 0
        self._refusal = refuse
        self._full = full
        tokens = [token] if isinstance(token, str) else token
        self._tokens = None if tokens is None else [one.encode() for one in tokens]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        refusal = self._check(Headers(scope=scope))
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        self._num_requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_requests -= 1

    def _check(self, headers: Headers) -> Response | None:
        if self._tokens is not None:
            given = given_token(headers).encode()
            if not any(hmac.compare_digest(given, token) for token in self._tokens):
                why = "expected the header 'Authorization: Bearer TOKEN' with this service's token"
                return self._refusal(401, why, {"WWW-Authenticate": "Bearer"})
        elif "origin" in headers or not is_loopback(_name(headers.get("host", ""))):
            why = "without a token, only programs on this machine are served, under the host name localhost"
            return self._refusal(403, why, None)
        if self._num_requests >= self._limit:
            why = f"{self._limit} requests are being served, which is the limit: try again"
            return self._refusal(self._full, why, {"Retry-After": str(RETRY_AFTER_S)})
        return None


def given_token(headers: Headers) -> str:
    """What the client sent; empty: nothing."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return (given if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip()


def _name(host: str) -> str:
    """The name in a Host header, without the port."""
    return host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
