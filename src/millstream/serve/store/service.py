"""The store over HTTP: prompts, experience, and notices of new weights, for programs in any language. See docs/store.md.

    POST  /v1/prompts, /v1/experience                        put rows                                         201
    PATCH                                                    write columns to rows                            204
    POST  .../claim                                          a lease; waits up to wait_s                      200, 204
    POST  .../leases/ID/acknowledge, give_back, renew, drop  end or renew a lease                             204
    POST  .../close_groups, finish, cover, rewind            as the methods of `millstream.store.Store`       204, 200
    DELETE .../partitions/NAME                               delete a partition                               200
    POST  /v1/weights {"version": 4}                         announce new weights                             200
    GET   /v1/weights?after=3&wait_s=30                      wait for weights after version 3                 200, 204
    POST  /v1/keys, /v1/keys/get, list, clear                rows by key, with tags: `serve.store.keys`               204, 200
    GET   /v1/stats, /v1/health                                                                               200

204 of a claim: nothing was ready in time; try again. 400: malformed, the message says what was expected. 401, 403: see
`serve.auth`. 404: a lease or task that does not exist. 408: no space for a put in time, nothing was put; or a body that does
not arrive. 409: refused by the store, such as a lease that has ended, a cell written twice, or more partitions, columns or
groups than fit. 410: the stream has ended. 413: a body that is too large. 415: neither JSON nor MessagePack. 503: too many
requests at once.

Prompts and experience are two stores with the same verbs. A client that disconnects while it waits loses nothing: its rows go
to another client. The lease of a client that dies is returned when it expires.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct, field, structs
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from millstream.errors import ConfigError, StoreError, StoreTimeout, StreamEnded
from millstream.serve.auth import AccessControl, error_response
from millstream.serve.http import (
    BodyReader,
    ClientGone,
    EmptyBody,
    HttpError,
    check_seconds,
    content_type_of,
    no_content,
    respond,
    until_disconnect,
)
from millstream.serve.limits import HttpLimits
from millstream.serve.listen import listen
from millstream.serve.store.bodies import (
    AcknowledgeBody,
    ClaimBody,
    CoverBody,
    GroupsBody,
    NewWeights,
    PartitionBody,
    PutBody,
    RewindBody,
    WriteBody,
)
from millstream.serve.store.bounds import BoundedNames
from millstream.serve.store.columns import JSON, BadColumns, columns_in, columns_out
from millstream.serve.store.keys import KeyValues
from millstream.store import Lease, Reads, Store, Want
from millstream.store.memory import MemoryStore
from millstream.store.policies import BUILT_IN_POLICIES

RouteHandler = Callable[[Request], Awaitable[Response]]
PROMPTS = {"rollout": Reads(("prompt",), by_group=False)}
CLIENT_GONE = 499
# Methods of `Store` that are called with the fields of the body, and those that are called with a lease as well.
STORE_VERBS: dict[str, type[PartitionBody]] = {
    "close_groups": GroupsBody,
    "finish": PartitionBody,
    "cover": CoverBody,
    "rewind": RewindBody,
}
LEASE_VERBS: dict[str, type[EmptyBody]] = {
    "acknowledge": AcknowledgeBody,
    "give_back": EmptyBody,
    "renew": EmptyBody,
    "drop": EmptyBody,
}


class StoreServiceConfig(Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"  # an address that other machines can reach (0.0.0.0) needs a token
    port: int = 7077  # 0: a free one
    max_body_bytes: int = 64 << 20
    max_requests: int = 256  # at once, including those that wait
    max_wait_s: float = 300.0
    lease_s: float = 300.0  # of a claim without lease_s
    max_lease_s: float = 86400.0
    capacity_rows: int = 1 << 20  # of each store that the service makes itself; beyond it, puts wait
    capacity_bytes: int = 4 << 30
    max_partitions: int = 256
    max_columns: int = 256  # different names of columns
    http: HttpLimits = field(default_factory=HttpLimits)

    def __post_init__(self) -> None:
        if self.max_body_bytes < 1 or self.max_requests < 1 or not 0 <= self.port < 65536:
            raise ValueError("max_body_bytes and max_requests must be at least 1, port 0 to 65535")
        if min(self.capacity_rows, self.capacity_bytes, self.max_partitions, self.max_columns) < 1:
            raise ValueError("capacity_rows, capacity_bytes, max_partitions and max_columns must be at least 1")
        if self.max_wait_s < 0 or not 0 < self.lease_s <= self.max_lease_s:
            raise ValueError("max_wait_s must be at least 0, lease_s above 0 and at most max_lease_s")


# ---- prompts and experience


class Section:
    """One store under one path. It ends only leases that it gave itself. `verbs`: those that it has; None: all."""

    def __init__(
        self,
        name: str,
        store: Store,
        bodies: BodyReader,
        config: StoreServiceConfig,
        *,
        needs_groups: bool,
        verbs: Collection[str] | None = None,
    ) -> None:
        self.name = name
        self._verbs = verbs
        self.store = store
        self._bodies = bodies
        self._config = config
        self._needs_groups = needs_groups
        self._leases: dict[int, tuple[Lease, float, float]] = {}  # id -> lease without rows, when it ends, its length
        self._last = 0
        how = f"DELETE /v1/{name}/partitions/NAME deletes one"
        self._partitions = BoundedNames("partitions", config.max_partitions, how)
        self._columns = BoundedNames("names of columns", config.max_columns, "Use those again")
        self._tasks: list[str] | None = None

    def routes(self) -> list[Route]:
        path = f"/v1/{self.name}"
        routes = {
            "put": Route(path, self.put, methods=["POST"]),
            "write": Route(path, self.write, methods=["PATCH"]),
            "drop_partition": Route(f"{path}/partitions/{{name:path}}", self.drop_partition, methods=["DELETE"]),
            "claim": Route(f"{path}/claim", self.claim, methods=["POST"]),
        }
        for verb in STORE_VERBS:
            routes[verb] = Route(f"{path}/{verb}", self._store_verb(verb), methods=["POST"])
        for verb in LEASE_VERBS:
            routes[verb] = Route(f"{path}/leases/{{lease:int}}/{verb}", self._lease_verb(verb), methods=["POST"])
        return [route for verb, route in routes.items() if self._verbs is None or verb in self._verbs]

    async def put(self, request: Request) -> Response:
        body = await self._bodies.read(request, PutBody)
        columns = self._columns_of(body, request)
        num_rows = len(next(iter(columns.values())))
        groups = body.group_ids
        if groups is None and self._needs_groups:
            raise HttpError(400, "group_ids: expected the group of all rows, or a list with that of each")
        for name, values in (("group_ids", groups), ("versions", body.versions), ("tokens", body.tokens)):
            if isinstance(values, list) and len(values) != num_rows:
                raise HttpError(400, f"{name}: expected {num_rows}, one for each row, found {len(values)}")
        (partition,) = self._partitions.use([body.partition])
        adding = self.store.put(
            0 if groups is None else groups,
            columns,
            versions=body.versions,
            tokens=body.tokens,
            partition=partition,
            deadline_s=self._bodies.wait_s(body.wait_s),
        )
        row_ids = await until_disconnect(request, adding)
        if body.close:
            closing = [groups or 0] if not isinstance(groups, list) else list(dict.fromkeys(groups))
            await self.store.close_groups(closing, partition=partition)
        return respond(request, {"row_ids": list(row_ids)}, 201)

    async def write(self, request: Request) -> Response:
        body = await self._bodies.read(request, WriteBody)
        columns = self._columns_of(body, request)
        if len(next(iter(columns.values()))) != len(body.row_ids):
            raise HttpError(400, f"row_ids: expected one for each row of the columns, found {len(body.row_ids)}")
        await self.store.write(body.row_ids, columns, overwrite=body.overwrite)
        return no_content()

    def _columns_of(self, body: PutBody | WriteBody, request: Request) -> dict[str, list[Any]]:
        columns = columns_in(body.columns, body.dtypes, is_json=content_type_of(request) == JSON)
        return dict(zip(self._columns.use(columns), columns.values(), strict=True))

    async def claim(self, request: Request) -> Response:
        body = await self._bodies.read(request, ClaimBody)
        want = self._want(body)
        await self._check_task(body.task)
        (partition,) = self._partitions.use([body.partition])
        claiming = self.store.claim(body.task, want, partition=partition)
        try:
            lease = await until_disconnect(request, claiming, self.store.give_back)
        except StoreTimeout:
            return no_content()
        try:
            response = respond(request, _lease_body(lease, want, as_lists=body.lists))
        except (StoreError, TypeError, ValueError) as wrong:  # cells that cannot be sent
            await self.store.give_back(lease)
            raise HttpError(409, f"these rows cannot be sent over HTTP: {wrong}") from wrong
        if await request.is_disconnected():
            await self.store.give_back(lease)
            raise ClientGone
        self._remember(lease, want.expires_s or self._config.lease_s)
        return response

    def _want(self, body: ClaimBody) -> Want:
        if body.policy not in BUILT_IN_POLICIES:
            raise HttpError(400, f"policy: expected {', '.join(BUILT_IN_POLICIES)}, found {body.policy!r}")
        config, lease_s = self._config, body.lease_s
        if lease_s is not None and not 0 < lease_s <= config.max_lease_s:
            raise HttpError(400, f"lease_s = {lease_s:g}: expected above 0 and at most {config.max_lease_s:g} seconds")
        patience_s = body.patience_s
        try:
            return Want(
                rows=body.rows,
                tokens=body.tokens,
                groups=body.groups,
                policy=body.policy,
                versions=body.versions,
                rank=body.rank,
                patience_s=None if patience_s is None else check_seconds("patience_s", patience_s, float("inf")),
                deadline_s=self._bodies.wait_s(body.wait_s),
                expires_s=config.lease_s if lease_s is None else lease_s,
            )
        except ValueError as wrong:
            raise HttpError(400, str(wrong)) from wrong

    async def _check_task(self, task: str) -> None:
        if self._tasks is None:
            self._tasks = list((await self.store.stats()).by_stage)
        if task not in self._tasks:
            raise HttpError(404, f"no task {task!r} for {self.name}: expected {', '.join(self._tasks)}")

    def _store_verb(self, verb: str) -> RouteHandler:
        async def handle(request: Request) -> Response:
            body = await self._bodies.read(request, STORE_VERBS[verb])
            if isinstance(body, RewindBody):
                await self._check_task(body.task)
            self._partitions.use([body.partition])
            num_rows = await getattr(self.store, verb)(**structs.asdict(body))
            return no_content() if num_rows is None else respond(request, {"rows": num_rows})

        return handle

    async def drop_partition(self, request: Request) -> Response:
        name = request.path_params["name"]
        num_rows = await self.store.drop_partition(name)
        self._partitions.free(name)
        return respond(request, {"rows": num_rows})

    # ---- leases

    def _remember(self, lease: Lease, lease_s: float) -> None:
        now = time.monotonic()
        for old in [lease_id for lease_id, (_, ends_at, _) in self._leases.items() if ends_at < now]:
            del self._leases[old]
        empty = Lease(lease_id=lease.lease_id, task=lease.task, row_ids=[], group_ids=[], versions=[], columns={})
        self._leases[lease.lease_id] = (empty, now + lease_s, lease_s)
        self._last = max(self._last, lease.lease_id)

    def _lease(self, request: Request) -> Lease:
        lease_id: int = request.path_params["lease"]
        if lease_id in self._leases:
            return self._leases[lease_id][0]
        if lease_id > self._last:
            raise HttpError(404, f"lease {lease_id} does not exist")
        raise HttpError(409, f"lease {lease_id} has ended (acknowledged, given back, dropped, or expired)")

    def _lease_verb(self, verb: str) -> RouteHandler:
        async def handle(request: Request) -> Response:
            body = await self._bodies.read(request, LEASE_VERBS[verb])
            lease = self._lease(request)
            await getattr(self.store, verb)(lease, **structs.asdict(body))
            _, _, lease_s = self._leases.pop(lease.lease_id, (lease, 0.0, self._config.lease_s))
            if verb == "renew":
                self._remember(lease, lease_s)
            return no_content()

        return handle


def _lease_body(lease: Lease, want: Want, *, as_lists: bool) -> dict[str, Any]:
    return {
        "lease_id": lease.lease_id,
        "task": lease.task,
        "expires_s": want.expires_s,
        "row_ids": lease.row_ids,
        "group_ids": lease.group_ids,
        "versions": lease.versions,
        "empty_groups": lease.empty_groups,
        "columns": columns_out(lease.columns, as_lists=as_lists),
    }


# ---- weights


class WeightsNotices:
    """The newest weights, and the requests that wait for newer ones (no polling). `publish` is called with what a client
    announces; None: it is passed on as it is."""

    def __init__(self, bodies: BodyReader, publish: Callable[[NewWeights], Awaitable[None]] | None = None) -> None:
        self.newest: NewWeights | None = None
        self._bodies = bodies
        self._publish = publish
        self._changed = asyncio.Event()

    def routes(self) -> list[Route]:
        return [Route("/v1/weights", self.announce, methods=["POST"]), Route("/v1/weights", self.wait, methods=["GET"])]

    async def announce(self, request: Request) -> Response:
        new = await self._bodies.read(request, NewWeights)
        if self._publish is not None:
            await asyncio.shield(self._publish(new))  # also if the client disconnects
        elif self.newest is not None and new.version < self.newest.version:
            raise HttpError(409, f"version {new.version}: the newest is {self.newest.version}, and versions only rise")
        else:
            self.set(new)
        return respond(request, new)

    def set(self, new: NewWeights) -> None:
        self.newest = new
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, request: Request) -> Response:
        after = _number(request, "after", int, None)
        wait_s = self._bodies.wait_s(_number(request, "wait_s", float, 0.0) or 0.0)
        if self._is_after(after):
            return respond(request, self.newest)
        try:
            async with asyncio.timeout(wait_s):
                await until_disconnect(request, self._wait(after))
        except TimeoutError:
            return no_content()
        return respond(request, self.newest)

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
        raise HttpError(400, f"{name} = {text!r}: expected a number") from wrong


# ---- the service


def store_app(
    store: Store, config: StoreServiceConfig | None = None, *, prompts: Store | None = None, token: str | None = None
) -> Starlette:
    """The service as an ASGI application, on the event loop of the stores. By default, prompts have their own store in this
    process, with the task `rollout`, which reads the column `prompt` row by row."""
    config = config or StoreServiceConfig()
    bodies = BodyReader(max_body_bytes=config.max_body_bytes, max_wait_s=config.max_wait_s)
    sections = [
        Section("prompts", prompts or _new_store(PROMPTS, config), bodies, config, needs_groups=False),
        Section("experience", store, bodies, config, needs_groups=True),
    ]
    keys = KeyValues(bodies, most_bytes=config.capacity_bytes, most_keys=config.capacity_rows)
    return sections_app(sections, WeightsNotices(bodies), config, token=token, routes=keys.routes())


def sections_app(
    sections: Sequence[Section],
    notice: WeightsNotices,
    config: StoreServiceConfig,
    *,
    token: str | None,
    routes: Sequence[Route] = (),
) -> Starlette:
    """The application of these sections and routes."""

    async def stats(request: Request) -> Response:
        found: dict[str, Any] = {section.name: await section.store.stats() for section in sections}
        return respond(request, found | {"weights": notice.newest})

    async def health(request: Request) -> Response:
        return respond(request, {"status": "ok"})

    return Starlette(
        routes=[
            *(route for section in sections for route in section.routes()),
            *notice.routes(),
            *routes,
            Route("/v1/stats", stats),
            Route("/v1/health", health),
        ],
        middleware=[Middleware(AccessControl, token=token, limit=config.max_requests)],
        exception_handlers={
            HttpError: lambda request, wrong: error_response(wrong.status, str(wrong)),
            BadColumns: lambda request, wrong: error_response(400, str(wrong)),
            StoreTimeout: lambda request, wrong: error_response(408, f"{wrong}. Nothing was put: try again"),
            StreamEnded: lambda request, wrong: error_response(410, str(wrong)),
            StoreError: lambda request, wrong: error_response(409, str(wrong)),
            ClientGone: lambda request, wrong: Response(status_code=CLIENT_GONE),
            ClientDisconnect: lambda request, wrong: Response(status_code=CLIENT_GONE),
            404: lambda request, wrong: error_response(404, f"nothing at {request.url.path}: see docs/store.md"),
            405: lambda request, wrong: error_response(
                405, f"{request.method} is not supported for {request.url.path}"
            ),
        },
    )


def _new_store(tasks: Mapping[str, Reads], config: StoreServiceConfig) -> MemoryStore:
    return MemoryStore(tasks, capacity_rows=config.capacity_rows, capacity_bytes=config.capacity_bytes)


async def host_store(
    store: Store,
    config: StoreServiceConfig | None = None,
    *,
    prompts: Store | None = None,
    token: str | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Until cancelled or stopped by a signal. `on_ready` is called with the URL."""
    config = config or StoreServiceConfig()
    app = store_app(store, config, prompts=prompts, token=token)
    await listen(
        app,
        config.host,
        config.port,
        token=token,
        max_requests=config.max_requests,
        limits=config.http,
        on_ready=on_ready,
    )


def run_store_service(
    tasks: Sequence[str],
    config: StoreServiceConfig,
    *,
    token: str | None,
    on_ready: Callable[[str], None],
) -> None:
    """A store in this process, and its service."""
    reads = dict(task_from(task) for task in tasks)
    if not reads:
        raise ConfigError("a store needs a task that reads it, such as --task train:tokens,reward")

    async def program() -> None:
        await host_store(_new_store(reads, config), config, token=token, on_ready=on_ready)

    asyncio.run(program())


def task_from(text: str) -> tuple[str, Reads]:
    """`train:tokens,reward`: whole groups; `score:tokens:rows`: any row; `train:tokens:after=score,judge`."""
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
            f"--task {text}: expected NAME:COLUMN,COLUMN optionally followed by :rows or :after=NAME, such as "
            "train:tokens,reward"
        )
    return name, Reads(names, after, by_group)
