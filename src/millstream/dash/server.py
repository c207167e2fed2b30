"""The HTTP service of `millstream dash`: the page, and the answers of `api.py`. It only reads.

Who may look: on this machine every program, under the name localhost (`serve.auth` refuses other names, so that a page from
elsewhere cannot ask); on another address only with the token. The page itself has no data and needs no token: it takes it
from the fragment of its address (`/#token=...`), which browsers do not send, and sends it with each request. Run ids are
names; no part of an address is ever a path. Requests are answered on threads: a slow one delays no other.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import millstream
from millstream.dash.api import ChangedKey, DiffAnswer, RunsAnswer
from millstream.dash.rollouts import SORTS, RolloutFilter
from millstream.dash.runs import RunCatalog, WatchedRun
from millstream.dash.series import XAxis
from millstream.errors import MillstreamError
from millstream.run.compare_runs import differing_settings
from millstream.serve.auth import AccessControl, error_response
from millstream.serve.http import HttpError
from millstream.serve.limits import HttpLimits
from millstream.serve.listen import listen

logger = logging.getLogger(__name__)
STATIC = Path(__file__).parent / "static"
MAX_REQUESTS = 64
MAX_POINTS = 4000
MAX_LIMIT = 500
MAX_NAMES = 200
MAX_RUNS_COMPARED = 20
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
T = TypeVar("T")


def dash_app(catalog: RunCatalog, *, token: str | None = None) -> ASGIApp:
    answers = _Answers(catalog)
    routes = [
        Route("/runs", _answered(answers.runs)),
        Route("/diff", _answered(answers.diff)),
        *(
            Route(f"/runs/{{run_id}}/{name}", _answered(answer))
            for name, answer in (
                ("overview", answers.overview),
                ("series", answers.series),
                ("lanes", answers.lanes),
                ("flow", answers.flow),
                ("rollouts", answers.rollouts),
                ("rollouts/{group_id}", answers.group),
            )
        ),
    ]
    guard = Middleware(AccessControl, token=token, limit=MAX_REQUESTS)
    handlers = {HTTPException: _refused, HttpError: _refused}
    api = Starlette(routes=routes, middleware=[guard], exception_handlers=handlers)  # type: ignore[arg-type]
    page = [Mount("/", StaticFiles(directory=STATIC, html=True))] if STATIC.is_dir() else []
    return _WithHeaders(
        Starlette(routes=[Mount("/api", api), *page], exception_handlers=handlers)  # type: ignore[arg-type]
    )


class _WithHeaders:
    """ASGI middleware: every response has the same headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            await send(message)

        await self._app(scope, receive, with_headers)


def _answered(answer: Callable[[Request], Struct]) -> Callable[[Request], Response]:
    """An endpoint that is not a coroutine: Starlette calls it on a thread."""

    def endpoint(request: Request) -> Response:
        try:
            return Response(msgspec.json.encode(answer(request)), media_type="application/json")
        except MillstreamError as error:
            return error_response(409, str(error))
        except OSError as error:
            return error_response(409, f"cannot read {error.filename}: {error.strerror}")
        except (HttpError, HTTPException):
            raise
        except Exception as error:
            logger.exception("%s", request.url.path)
            return error_response(500, f"a fault of the dashboard: {type(error).__name__}: {error}. Please report it")

    return endpoint


def _refused(request: Request, error: HttpError | HTTPException) -> Response:
    status = error.status if isinstance(error, HttpError) else error.status_code
    message = str(error) if isinstance(error, HttpError) else error.detail
    if status == 404 and not STATIC.is_dir():
        message = f"{message}. This installation has no page: install a wheel of millstream, which has it"
    return error_response(status, message, dict(getattr(error, "headers", None) or {}))


class _Answers:
    def __init__(self, catalog: RunCatalog) -> None:
        self._catalog = catalog

    def runs(self, request: Request) -> RunsAnswer:
        return RunsAnswer(version=millstream.__version__, runs=[run.row() for run in self._catalog.runs()])

    def overview(self, request: Request) -> Struct:
        return self._run(request).overview()

    def series(self, request: Request) -> Struct:
        asked = request.query_params
        names = [name for name in asked.get("names", "").split(",") if name]
        if len(names) > MAX_NAMES:
            raise HttpError(400, f"names: {len(names)} of them: expected at most {MAX_NAMES}")
        x = _one_of(asked, "x", XAxis.__args__, "step")  # type: ignore[attr-defined]
        return self._run(request).series(names, x, _whole(asked, "points", 800, 1, MAX_POINTS))  # type: ignore[arg-type]

    def lanes(self, request: Request) -> Struct:
        asked = request.query_params
        points = _whole(asked, "points", 800, 1, MAX_POINTS)
        return self._run(request).lanes(_seconds(asked, "begin"), _seconds(asked, "end"), points)

    def flow(self, request: Request) -> Struct:
        asked = request.query_params
        points = _whole(asked, "points", 400, 1, MAX_POINTS)
        return self._run(request).flow(_seconds(asked, "begin"), _seconds(asked, "end"), points)

    def rollouts(self, request: Request) -> Struct:
        asked = request.query_params
        return self._run(request).rollouts(
            RolloutFilter(
                sort=_one_of(asked, "sort", ("", *SORTS), ""),
                descending=_one_of(asked, "descending", ("0", "1"), "1") == "1",
                query=asked.get("query", ""),
                environment=asked.get("environment", ""),
                fate=asked.get("fate", ""),
                step=_whole(asked, "step", 0, 0, 1 << 60) if asked.get("step") else None,
                offset=_whole(asked, "offset", 0, 0, 1 << 60),
                limit=_whole(asked, "limit", 50, 1, MAX_LIMIT),
            )
        )

    def group(self, request: Request) -> Struct:
        text = request.path_params["group_id"]
        if not (text.isascii() and text.isdecimal() and len(text) < 18):
            raise HttpError(400, "expected the number of a group, as in /rollouts/12")
        found = self._run(request).group(int(text))
        if found is None:
            raise HttpError(404, f"group {text} is not among the kept rollouts of this run")
        return found

    def diff(self, request: Request) -> DiffAnswer:
        ids = [one for one in request.query_params.get("runs", "").split(",") if one]
        if not 1 <= len(ids) <= MAX_RUNS_COMPARED:
            raise HttpError(400, f"runs: expected 1 to {MAX_RUNS_COMPARED} ids, as in runs=first,second")
        configs = [self._find(one).config() for one in ids]
        return DiffAnswer(
            runs=ids, changed=[ChangedKey(key=key, values=values) for key, values in differing_settings(configs)]
        )

    def _run(self, request: Request) -> WatchedRun:
        return self._find(request.path_params["run_id"])

    def _find(self, run_id: str) -> WatchedRun:
        found = self._catalog.run(run_id)
        if found is None:
            raise HttpError(404, "there is no such run: /api/runs lists them")
        return found


# ---- parameters ----------------------------------------------------------------------------------------------------------


def _whole(asked: QueryParams, name: str, default: int, low: int, high: int) -> int:
    text = asked.get(name) or str(default)
    value = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1
    if not low <= value <= high:
        raise HttpError(400, f"{name}: expected a whole number from {low} to {high}")
    return value


def _seconds(asked: QueryParams, name: str) -> float | None:
    text = asked.get(name) or ""
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise HttpError(400, f"{name}: expected seconds, as in {name}=12.5")
    return value


def _one_of(asked: QueryParams, name: str, values: Sequence[str], default: str) -> str:
    value = asked.get(name) or default
    if value not in values:
        raise HttpError(400, f"{name}: expected one of {', '.join(one for one in values if one)}")
    return value


# ---- the service ---------------------------------------------------------------------------------------------------------


def run_dash(
    paths: Sequence[Path], host: str, port: int, *, token: str | None, on_ready: Callable[[str], None]
) -> None:
    """Serves until it is stopped. `on_ready` is called with the address of the page: of all addresses, with this machine's
    name."""
    app = dash_app(RunCatalog(paths), token=token)

    def ready(url: str) -> None:
        for every in ("//0.0.0.0:", "//[::]:"):
            url = url.replace(every, f"//{socket.gethostname()}:")
        on_ready(f"{url}/" if token is None else f"{url}/#token={token}")

    asyncio.run(listen(app, host, port, token=token, max_requests=MAX_REQUESTS, limits=HttpLimits(), on_ready=ready))
