"""The store over HTTP: prompts, experience, and notice of new weights, for programs in any language. See docs/store.md.

    POST  /v1/prompts, /v1/experience                        put rows                                         201
    PATCH                                                    write columns to rows                            204
    POST  .../claim                                          a lease; waits up to wait_s                      200, 204
    POST  .../leases/ID/acknowledge, give_back, renew, drop  what becomes of it                               204
    POST  .../close_groups, finish, cover, rewind            as the methods of `millstream.store.Store`       204, 200
    DELETE .../partitions/NAME                               forget all of it                                 200
    POST  /v1/weights {"version": 4}                         new weights are there                            200
    GET   /v1/weights?after=3&wait_s=30                      wait for weights after version 3                 200, 204
    GET   /v1/stats, /v1/health                                                                               200

204 of a claim: nothing was ready in time; ask again. 400: not what was expected, the message says what was. 401, 403: see
`serve.auth`. 404: a lease that was never given, a task that is not there. 408: no room for a put in time; nothing was put.
409: what the store refuses, such as a lease that has ended or a cell written twice. 410: the stream has ended. 413: a body that
is too large. 415: neither JSON nor MessagePack. 503: too many requests at once.

Prompts and experience are two stores with the same verbs. A client that hangs up while it waits loses nothing: what it would
have got goes to another. One that dies with a lease gives it back when the lease expires.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from msgspec import Struct
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from millstream.errors import ConfigError, StoreError, StoreTimeout, StreamEnded
from millstream.serve.auth import Gate, error
from millstream.serve.http import HungUp, Refused, Talk, answer, done, seconds, sent_in, unless_hung_up
from millstream.serve.listen import listen
from millstream.serve.store import columns as cells
from millstream.serve.store.bodies import (
    ClaimBody,
    CoverBody,
    GroupsBody,
    PartitionBody,
    PutBody,
    RewindBody,
    StepBody,
    Weights,
    WriteBody,
)
from millstream.store import Lease, Reads, Store, Want
from millstream.store.memory import MemoryStore
from millstream.store.policies import BUILT_IN

Answer = Callable[[Request], Awaitable[Response]]
PROMPTS = {"rollout": Reads(("prompt",), by_group=False)}
HUNG_UP = 499


class StoreServiceConfig(Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"  # beyond this machine (0.0.0.0, say) only with a token
    port: int = 7077  # 0: one that is free
    max_body_bytes: int = 64 << 20
    max_requests: int = 256  # at once, those that wait included
    max_wait_s: float = 300.0
    lease_s: float = 300.0  # how long a lease lasts that does not say
    max_lease_s: float = 86400.0

    def __post_init__(self) -> None:
        if self.max_body_bytes < 1 or self.max_requests < 1 or not 0 <= self.port < 65536:
            raise ValueError("max_body_bytes and max_requests must be at least 1, port 0 to 65535")
        if self.max_wait_s < 0 or not 0 < self.lease_s <= self.max_lease_s:
            raise ValueError("max_wait_s must be at least 0, lease_s above 0 and at most max_lease_s")


# ---- prompts, and experience -----------------------------------------------------------------------------------------


class Section:
    """One store, under one path. Knows the leases that it gave, so that nobody ends those of others."""

    def __init__(self, name: str, store: Store, talk: Talk, config: StoreServiceConfig, *, needs_groups: bool) -> None:
        self.name = name
        self.store = store
        self._talk = talk
        self._config = config
        self._needs_groups = needs_groups
        # By id: the lease without its rows, when it expires, how long it lasts.
        self._leases: dict[int, tuple[Lease, float, float]] = {}
        self._last = 0
        self._tasks: list[str] | None = None

    def routes(self) -> list[Route]:
        path = f"/v1/{self.name}"
        verbs: dict[str, Answer] = {
            "claim": self.claim,
            "leases/{lease:int}/acknowledge": self.acknowledge,
            "leases/{lease:int}/give_back": self.give_back,
            "leases/{lease:int}/renew": self.renew,
            "leases/{lease:int}/drop": self.drop,
            "close_groups": self.close_groups,
            "finish": self.finish,
            "cover": self.cover,
            "rewind": self.rewind,
        }
        return [
            Route(path, self.put, methods=["POST"]),
            Route(path, self.write, methods=["PATCH"]),
            Route(f"{path}/partitions/{{name:path}}", self.drop_partition, methods=["DELETE"]),
            *(Route(f"{path}/{verb}", method, methods=["POST"]) for verb, method in verbs.items()),
        ]

    async def put(self, request: Request) -> Response:
        body = await self._talk.read(request, PutBody)
        columns = cells.columns_in(body.columns, body.dtypes, is_json=sent_in(request) == cells.JSON)
        num_rows = len(next(iter(columns.values())))
        groups = body.group_ids
        if groups is None and self._needs_groups:
            raise Refused(400, "group_ids: expected the group of all rows, or a list with that of each")
        for name, values in (("group_ids", groups), ("versions", body.versions), ("tokens", body.tokens)):
            if isinstance(values, list) and len(values) != num_rows:
                raise Refused(400, f"{name}: expected {num_rows}, one for each row, found {len(values)}")
        adding = self.store.put(
            0 if groups is None else groups,
            columns,
            versions=body.versions,
            tokens=body.tokens,
            partition=body.partition,
            deadline_s=self._talk.wait_s(body.wait_s),
        )
        row_ids = await unless_hung_up(request, adding)
        if body.close:
            closing = [groups or 0] if not isinstance(groups, list) else list(dict.fromkeys(groups))
            await self.store.close_groups(closing, partition=body.partition)
        return answer(request, {"row_ids": list(row_ids)}, 201)

    async def write(self, request: Request) -> Response:
        body = await self._talk.read(request, WriteBody)
        columns = cells.columns_in(body.columns, body.dtypes, is_json=sent_in(request) == cells.JSON)
        if len(next(iter(columns.values()))) != len(body.row_ids):
            raise Refused(400, f"row_ids: expected one for each row of the columns, found {len(body.row_ids)}")
        await self.store.write(body.row_ids, columns, overwrite=body.overwrite)
        return done()

    async def claim(self, request: Request) -> Response:
        body = await self._talk.read(request, ClaimBody)
        want = self._want(body)
        await self._check_task(body.task)
        claiming = self.store.claim(body.task, want, partition=body.partition)
        try:
            lease = await unless_hung_up(request, claiming, self.store.give_back)
        except StoreTimeout:
            return done()
        try:
            response = answer(request, _shown(lease, want, as_lists=body.lists))
        except (StoreError, TypeError, ValueError) as wrong:  # cells that cannot be sent
            await self.store.give_back(lease)
            raise Refused(409, f"these rows cannot be sent over HTTP: {wrong}") from wrong
        if await request.is_disconnected():
            await self.store.give_back(lease)
            raise HungUp
        self._remember(lease, want.expires_s or self._config.lease_s)
        return response

    def _want(self, body: ClaimBody) -> Want:
        if body.policy not in BUILT_IN:
            raise Refused(400, f"policy: expected {', '.join(BUILT_IN)}, found {body.policy!r}")
        config, lease_s = self._config, body.lease_s
        if lease_s is not None and not 0 < lease_s <= config.max_lease_s:
            raise Refused(400, f"lease_s = {lease_s:g}: expected above 0 and at most {config.max_lease_s:g} seconds")
        patience_s = body.patience_s
        try:
            return Want(
                rows=body.rows,
                tokens=body.tokens,
                groups=body.groups,
                policy=body.policy,
                versions=body.versions,
                rank=body.rank,
                patience_s=None if patience_s is None else seconds("patience_s", patience_s, float("inf")),
                deadline_s=self._talk.wait_s(body.wait_s),
                expires_s=config.lease_s if lease_s is None else lease_s,
            )
        except ValueError as wrong:
            raise Refused(400, str(wrong)) from wrong

    async def _check_task(self, task: str) -> None:
        if self._tasks is None:
            self._tasks = list((await self.store.stats()).by_stage)
        if task not in self._tasks:
            raise Refused(404, f"no task {task!r} for {self.name}: there is {', '.join(self._tasks)}")

    # ---- leases ------------------------------------------------------------------------------------------------------

    def _remember(self, lease: Lease, lease_s: float) -> None:
        now = time.monotonic()
        for old in [at for at, (_, until, _) in self._leases.items() if until < now]:
            del self._leases[old]
        empty = Lease(lease_id=lease.lease_id, task=lease.task, row_ids=[], group_ids=[], versions=[], columns={})
        self._leases[lease.lease_id] = (empty, now + lease_s, lease_s)
        self._last = max(self._last, lease.lease_id)

    def _lease(self, request: Request) -> Lease:
        lease_id: int = request.path_params["lease"]
        if lease_id in self._leases:
            return self._leases[lease_id][0]
        if lease_id > self._last:
            raise Refused(404, f"lease {lease_id} was never given")
        raise Refused(409, f"lease {lease_id} has ended (acknowledged, given back, dropped, or expired)")

    async def acknowledge(self, request: Request) -> Response:
        body = await self._talk.read(request, StepBody)
        lease = self._lease(request)
        return await self._end(lease, self.store.acknowledge(lease, step=body.step))

    async def give_back(self, request: Request) -> Response:
        lease = self._lease(request)
        return await self._end(lease, self.store.give_back(lease))

    async def drop(self, request: Request) -> Response:
        lease = self._lease(request)
        return await self._end(lease, self.store.drop(lease))

    async def _end(self, lease: Lease, ending: Coroutine[Any, Any, None]) -> Response:
        await ending
        self._leases.pop(lease.lease_id, None)
        return done()

    async def renew(self, request: Request) -> Response:
        lease = self._lease(request)
        kept = self._leases[lease.lease_id][2]
        await self.store.renew(lease)
        self._remember(lease, kept)
        return done()

    # ---- groups, steps, partitions -----------------------------------------------------------------------------------

    async def close_groups(self, request: Request) -> Response:
        body = await self._talk.read(request, GroupsBody)
        await self.store.close_groups(body.group_ids, partition=body.partition)
        return done()

    async def finish(self, request: Request) -> Response:
        body = await self._talk.read(request, PartitionBody)
        await self.store.finish(partition=body.partition)
        return done()

    async def cover(self, request: Request) -> Response:
        body = await self._talk.read(request, CoverBody)
        await self.store.cover(body.step, partition=body.partition)
        return done()

    async def rewind(self, request: Request) -> Response:
        body = await self._talk.read(request, RewindBody)
        await self._check_task(body.task)
        return answer(request, {"rows": await self.store.rewind(body.task, body.step, partition=body.partition)})

    async def drop_partition(self, request: Request) -> Response:
        return answer(request, {"rows": await self.store.drop_partition(request.path_params["name"])})


def _shown(lease: Lease, want: Want, *, as_lists: bool) -> dict[str, Any]:
    return {
        "lease_id": lease.lease_id,
        "task": lease.task,
        "expires_s": want.expires_s,
        "row_ids": lease.row_ids,
        "group_ids": lease.group_ids,
        "versions": lease.versions,
        "empty_groups": lease.empty_groups,
        "columns": cells.columns_out(lease.columns, as_lists=as_lists),
    }


# ---- weights ---------------------------------------------------------------------------------------------------------


class Notice:
    """The newest weights. Who waits is woken, and asks nobody meanwhile."""

    def __init__(self, talk: Talk) -> None:
        self.newest: Weights | None = None
        self._talk = talk
        self._changed = asyncio.Event()

    def routes(self) -> list[Route]:
        return [Route("/v1/weights", self.tell, methods=["POST"]), Route("/v1/weights", self.ask, methods=["GET"])]

    async def tell(self, request: Request) -> Response:
        told = await self._talk.read(request, Weights)
        if self.newest is not None and told.version < self.newest.version:
            raise Refused(409, f"version {told.version}: the newest is {self.newest.version}, and versions only rise")
        self.newest = told
        self._changed.set()
        self._changed = asyncio.Event()
        return answer(request, told)

    async def ask(self, request: Request) -> Response:
        after = _number(request, "after", int, None)
        wait_s = self._talk.wait_s(_number(request, "wait_s", float, 0.0) or 0.0)
        if self._is_after(after):
            return answer(request, self.newest)
        try:
            async with asyncio.timeout(wait_s):
                await unless_hung_up(request, self._wait(after))
        except TimeoutError:
            return done()
        return answer(request, self.newest)

    def _is_after(self, after: int | None) -> bool:
        return self.newest is not None and (after is None or self.newest.version > after)

    async def _wait(self, after: int | None) -> None:
        while not self._is_after(after):
            await self._changed.wait()


N = TypeVar("N", int, float)


def _number(request: Request, name: str, kind: type[N], default: N | None) -> N | None:
    text = request.query_params.get(name)
    try:
        return default if text is None else kind(text)
    except ValueError as wrong:
        raise Refused(400, f"{name} = {text!r}: expected a number") from wrong


# ---- the service -----------------------------------------------------------------------------------------------------


def make_app(
    store: Store, config: StoreServiceConfig | None = None, *, prompts: Store | None = None, token: str | None = None
) -> Starlette:
    """The service as an ASGI application, on the event loop of the stores. By default prompts have a store of their own in this
    process, with the task `rollout`, which reads the column `prompt` row by row."""
    config = config or StoreServiceConfig()
    talk = Talk(max_body_bytes=config.max_body_bytes, max_wait_s=config.max_wait_s)
    sections = [
        Section("prompts", prompts or MemoryStore(PROMPTS), talk, config, needs_groups=False),
        Section("experience", store, talk, config, needs_groups=True),
    ]
    notice = Notice(talk)

    async def stats(request: Request) -> Response:
        found: dict[str, Any] = {section.name: await section.store.stats() for section in sections}
        return answer(request, found | {"weights": notice.newest})

    async def health(request: Request) -> Response:
        return answer(request, {"status": "ok"})

    return Starlette(
        routes=[
            *(route for section in sections for route in section.routes()),
            *notice.routes(),
            Route("/v1/stats", stats),
            Route("/v1/health", health),
        ],
        middleware=[Middleware(Gate, token=token, limit=config.max_requests)],
        exception_handlers={
            Refused: lambda request, wrong: error(wrong.status, str(wrong)),
            cells.BadCells: lambda request, wrong: error(400, str(wrong)),
            StoreTimeout: lambda request, wrong: error(408, f"{wrong}. Nothing was put: ask again"),
            StreamEnded: lambda request, wrong: error(410, str(wrong)),
            StoreError: lambda request, wrong: error(409, str(wrong)),
            HungUp: lambda request, wrong: Response(status_code=HUNG_UP),
            ClientDisconnect: lambda request, wrong: Response(status_code=HUNG_UP),
            404: lambda request, wrong: error(404, f"nothing at {request.url.path}: see docs/store.md"),
            405: lambda request, wrong: error(405, f"{request.method} is no verb of {request.url.path}"),
        },
    )


async def serve(
    store: Store,
    config: StoreServiceConfig | None = None,
    *,
    prompts: Store | None = None,
    token: str | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Until cancelled or stopped by a signal. `on_ready` is told where it listens."""
    config = config or StoreServiceConfig()
    app = make_app(store, config, prompts=prompts, token=token)
    await listen(app, config.host, config.port, token=token, on_ready=on_ready)


def run(
    tasks: Sequence[str],
    config: StoreServiceConfig,
    *,
    capacity_rows: int | None,
    token: str | None,
    on_ready: Callable[[str], None],
) -> None:
    """A store in this process, and its service."""
    reads = dict(task_from(task) for task in tasks)
    if not reads:
        raise ConfigError("a store needs a task that reads it, such as --task train:tokens,reward")

    async def program() -> None:
        store = MemoryStore(reads, capacity_rows=capacity_rows)
        await serve(store, config, token=token, on_ready=on_ready)

    asyncio.run(program())


def task_from(text: str) -> tuple[str, Reads]:
    """`train:tokens,reward`, whole groups; `score:tokens:rows`, any row; `train:tokens:after=score,judge`."""
    name, _, rest = text.partition(":")
    columns, *options = rest.split(":")
    by_group, after = True, tuple[str, ...]()
    for option in options:
        key, _, value = option.partition("=")
        if option in ("rows", "groups"):
            by_group = option == "groups"
        elif key == "after" and value:
            after = tuple(value.split(","))
        else:
            columns = ""
    names = tuple(columns.split(","))
    if not name or not all(names):
        raise ConfigError(
            f"--task {text}: expected NAME:COLUMN,COLUMN with :rows or :after=NAME behind it if need be, such as "
            "train:tokens,reward"
        )
    return name, Reads(names, after, by_group)
