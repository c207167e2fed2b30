"""Rows by key, with tags: what TransferQueue calls its key-value interface, over HTTP.

    POST /v1/keys        {"keys": ["a"], "columns": {"tokens": [[1, 2]]}, "tags": [{"score": 0.5}]}    204
    POST /v1/keys/get    {"keys": ["a"], "columns": ["tokens"]}                                        200
    POST /v1/keys/list   {"partition": "train"}: {"train": {"a": {"score": 0.5}}}                      200
    POST /v1/keys/clear  {"keys": ["a"]}                                                               204

A put adds columns to a key, and replaces those that it names; a tag replaces the key's tag. Rows by key are apart from prompts
and experience: no task claims them, and they stay until they are cleared. 404: a key or a column that is not there. 409: more
keys or bytes than the service's capacity; nothing was put. They are in the memory of the service's process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from millstream.serve.http import BodyReader, HttpError, content_type_of, no_content, respond
from millstream.serve.store.bodies import GetKeysBody, KeysBody, ListKeysBody
from millstream.serve.store.columns import JSON, columns_in, columns_out
from millstream.store.rows import num_bytes_of


class KeyedRow:
    """What one key has."""

    __slots__ = ("cells", "num_bytes", "tag")

    def __init__(self, cells: dict[str, Any], tag: Mapping[str, Any]) -> None:
        self.cells = cells
        self.tag = tag
        self.num_bytes = num_bytes_of({name: [cell] for name, cell in cells.items()} | {"tag": [dict(tag)]}, 1)


class KeyValues:
    """All partitions."""

    def __init__(self, bodies: BodyReader, *, most_bytes: int, most_keys: int) -> None:
        self._bodies = bodies
        self._most_bytes = most_bytes
        self._most_keys = most_keys
        self._rows: dict[tuple[str, str], KeyedRow] = {}  # by partition and key
        self._num_bytes = 0

    def routes(self) -> list[Route]:
        return [
            Route("/v1/keys", self.put, methods=["POST"]),
            Route("/v1/keys/get", self.get, methods=["POST"]),
            Route("/v1/keys/list", self.list_all, methods=["POST"]),
            Route("/v1/keys/clear", self.clear, methods=["POST"]),
        ]

    async def put(self, request: Request) -> Response:
        body: KeysBody = await self._bodies.read(request, KeysBody)
        tags = body.tags
        columns: dict[str, list[Any]] = {}
        if body.columns:
            columns = columns_in(body.columns, body.dtypes, is_json=content_type_of(request) == JSON)
        for name, found in {**columns, **({} if tags is None else {"tags": tags})}.items():
            if len(found) != len(body.keys):
                raise HttpError(400, f"{name}: expected {len(body.keys)}, one for each key, found {len(found)}")
        if (not columns and tags is None) or len(set(body.keys)) < len(body.keys):
            raise HttpError(400, "expected columns or tags, and each key once")
        new: dict[tuple[str, str], KeyedRow] = {}
        for place, key in enumerate(body.keys):
            old = self._rows.get((body.partition, key), KeyedRow({}, {}))
            cells = old.cells | {name: cells[place] for name, cells in columns.items()}
            new[body.partition, key] = KeyedRow(cells, old.tag if tags is None else tags[place])
        num_bytes = self._num_bytes + sum(row.num_bytes for row in new.values()) - self._size_of(new)
        num_keys = len(self._rows.keys() | new.keys())
        if num_bytes > self._most_bytes or num_keys > self._most_keys:
            found_now = f"{num_keys} keys with {num_bytes} bytes"
            raise HttpError(409, f"{found_now}, more than {self._most_keys} and {self._most_bytes}: clear some")
        self._rows |= new
        self._num_bytes = num_bytes
        return no_content()

    def _size_of(self, keys: Mapping[tuple[str, str], object]) -> int:
        return sum(self._rows[key].num_bytes for key in keys if key in self._rows)

    async def get(self, request: Request) -> Response:
        body: GetKeysBody = await self._bodies.read(request, GetKeysBody)
        rows = [self._row(body.partition, key) for key in body.keys]
        names = body.columns
        if names is None:
            names = [name for name in rows[0].cells if all(name in row.cells for row in rows)]
        for key, row in zip(body.keys, rows, strict=True):
            if missing := [name for name in names if name not in row.cells]:
                raise HttpError(404, f"key {key!r} has no column {missing[0]!r}: it has {', '.join(row.cells)}")
        columns = {name: [row.cells[name] for row in rows] for name in names}
        found: dict[str, Any] = {"keys": body.keys, "tags": [row.tag for row in rows]}
        return respond(request, found | {"columns": columns_out(columns, as_lists=body.lists)})

    def _row(self, partition: str, key: str) -> KeyedRow:
        if (partition, key) not in self._rows:
            raise HttpError(404, f"no key {key!r} in the partition {partition!r}")
        return self._rows[partition, key]

    async def list_all(self, request: Request) -> Response:
        body: ListKeysBody = await self._bodies.read(request, ListKeysBody)
        found: dict[str, dict[str, Any]] = {}
        for (partition, key), row in self._rows.items():
            if body.partition in (None, partition):
                found.setdefault(partition, {})[key] = row.tag
        return respond(request, found)

    async def clear(self, request: Request) -> Response:
        body: GetKeysBody = await self._bodies.read(request, GetKeysBody)
        for key in body.keys:
            self._row(body.partition, key)
        for key in set(body.keys):
            self._num_bytes -= self._rows.pop((body.partition, key)).num_bytes
        return no_content()
