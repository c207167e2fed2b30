"""The model's service as an ASGI application, and on a socket."""

from __future__ import annotations

import re
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from millstream.clock import Clock, RealClock
from millstream.errors import DataError, EngineError, EnvironmentFailed, RequestRefused
from millstream.serve.auth import RETRY_AFTER_S, AccessControl
from millstream.serve.http import ClientGone, HttpError
from millstream.serve.listen import listen
from millstream.serve.openai.request_schema import BadRequest
from millstream.serve.openai.response_schema import error_json
from millstream.serve.openai.service import ModelService, ModelServiceConfig, Served

CLIENT_GONE = 499
TOO_MANY = 429
FIELD = re.compile(r"`\$\.?(\w+)|(?:field|unknown field) `(\w+)`")


def model_app(
    served: Served,
    config: ModelServiceConfig | None = None,
    *,
    token: str | None = None,
    clock: Clock | None = None,
) -> Starlette:
    """The service as an ASGI application, on the event loop of the engine."""
    config = config or ModelServiceConfig()
    service = ModelService(served, config, clock or RealClock())
    return service_app(service, token=token, max_requests=config.max_requests)


def service_app(service: ModelService, *, token: str | None, max_requests: int) -> Starlette:
    return Starlette(
        routes=service.routes(),
        middleware=[
            Middleware(AccessControl, token=token, limit=max_requests, refuse=error_json, full=TOO_MANY),
        ],
        exception_handlers={
            HttpError: lambda request, wrong: _refused(wrong),
            DataError: lambda request, wrong: error_json(400, str(wrong), param="messages"),
            EnvironmentFailed: lambda request, wrong: error_json(400, str(wrong), param="messages"),
            RequestRefused: lambda request, wrong: error_json(400, str(wrong)),
            EngineError: lambda request, wrong: error_json(503, str(wrong)),
            ClientGone: lambda request, wrong: Response(status_code=CLIENT_GONE),
            ClientDisconnect: lambda request, wrong: Response(status_code=CLIENT_GONE),
            404: lambda request, wrong: error_json(404, f"nothing at {request.url.path}: see docs/serving.md"),
            405: lambda request, wrong: error_json(405, f"{request.method} is not supported for {request.url.path}"),
        },
    )


def _refused(wrong: HttpError) -> Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if wrong.status == TOO_MANY else None
    if isinstance(wrong, BadRequest):
        return error_json(wrong.status, str(wrong), headers, param=wrong.param, code=wrong.code)
    found = FIELD.search(str(wrong))
    return error_json(wrong.status, str(wrong), headers, param=next(filter(None, found.groups())) if found else None)


async def host_model(
    served: Served,
    config: ModelServiceConfig | None = None,
    *,
    token: str | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Until cancelled or stopped by a signal. `on_ready` is called with the URL."""
    config = config or ModelServiceConfig()
    app = model_app(served, config, token=token)
    await listen(
        app,
        config.host,
        config.port,
        token=token,
        max_requests=config.max_requests,
        limits=config.http,
        on_ready=on_ready,
    )
