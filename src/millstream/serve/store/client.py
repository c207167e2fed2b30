"""The client of the store's service: a `millstream.store.Store` over HTTP in MessagePack, with the same guarantees.

    async with HttpStore("http://127.0.0.1:7077", token=...) as store:
        lease = await store.claim("train", Want(groups=8))

Differences: no connection ends with its client, so a lease lasts for `expires_s` (by default the service's `lease_s`) and must
be renewed to last longer. A put or an acknowledgement whose response is lost may have happened. Cells come back as MessagePack
types or arrays: a tuple as a list, a struct as a dictionary, a tensor as an array.
For synchronous code: `store.blocking.BlockingClient(lambda: HttpStore.connect(url))`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx2
import msgspec
import numpy as np

from millstream.decoding import decode_json, decode_msgpack, to_type
from millstream.errors import StoreError, StoreTimeout, StreamEnded
from millstream.serve.store.bodies import NewWeights
from millstream.serve.store.columns import MESSAGEPACK, columns_in, columns_out, encode_body
from millstream.store import ONE_GROUP, TRAIN, Choose, Columns, Lease, Saved, StoreStats, Want

POLL_S = 30.0  # the wait of one request; a claim that waits longer sends several
ANSWER_S = 30.0  # on top of that: then the service counts as unreachable
PUBLISH_S = 3600.0  # for weights that the service reads and checks before it answers


class HttpStore:
    """`section` is experience or prompts."""

    def __init__(
        self, url: str, *, token: str | None = None, section: str = "experience", poll_s: float = POLL_S
    ) -> None:
        headers = {"Content-Type": MESSAGEPACK, "Accept": MESSAGEPACK}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        timeout = httpx2.Timeout(ANSWER_S, read=poll_s + ANSWER_S)
        limits = httpx2.Limits(max_connections=None)  # a waiting claim occupies one
        self._http = httpx2.AsyncClient(base_url=url, headers=headers, timeout=timeout, limits=limits, trust_env=False)
        self._section = section
        self._poll_s = poll_s

    @classmethod
    async def connect(
        cls, url: str, *, token: str | None = None, section: str = "experience", poll_s: float = POLL_S
    ) -> HttpStore:
        """Raises `StoreError` if no service answers there."""
        store = cls(url, token=token, section=section, poll_s=poll_s)
        await store.stats()
        return store

    async def __aenter__(self) -> HttpStore:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, answer_s: float | None = None
    ) -> Any:
        """The decoded response; None if it is empty. Retries while the service is busy (503): it has done nothing then.
        `answer_s`: how long the response may take, where that is longer than usual."""
        content = None if body is None else encode_body(body, MESSAGEPACK)
        timeout = self._http.timeout if answer_s is None else httpx2.Timeout(ANSWER_S, read=answer_s)
        while True:
            try:
                response = await self._http.request(method, path, content=content, timeout=timeout)
            except httpx2.HTTPError as error:
                raise StoreError(f"{method} {path}: {error or type(error).__name__}") from error
            if response.status_code != 503:
                break
            await asyncio.sleep(float(response.headers.get("retry-after", "1")))
        if response.is_success:
            return decode_msgpack(response.content, Any) if response.content else None
        kind = {408: StoreTimeout, 410: StreamEnded}.get(response.status_code, StoreError)
        raise kind(f"{response.status_code}: {_message(response)}")

    async def _post(self, verb: str, body: dict[str, Any] | None = None) -> Any:
        return await self.request("POST", f"/v1/{self._section}{verb}", body or {})

    async def put(
        self,
        group_ids: int | Sequence[int],
        columns: Columns,
        *,
        versions: int | Sequence[int] | None = None,
        tokens: Sequence[int] | None = None,
        partition: str = TRAIN,
        deadline_s: float | None = None,
    ) -> Sequence[int]:
        body = {
            "group_ids": _plain(group_ids),
            "columns": columns_out(columns),
            "versions": _plain(versions),
            "tokens": _plain(tokens),
            "partition": partition,
        }
        loop = asyncio.get_running_loop()
        until = None if deadline_s is None else loop.time() + deadline_s
        while True:
            left = self._poll_s if until is None else max(0.0, until - loop.time())
            try:
                answer = await self._post("", body | {"wait_s": min(left, self._poll_s)})
            except StoreTimeout:
                if until is not None and loop.time() >= until:
                    raise
                continue
            row_ids: list[int] = answer["row_ids"]
            return row_ids

    async def write(self, row_ids: Sequence[int], columns: Columns, *, overwrite: bool = False) -> None:
        body = {"row_ids": _plain(row_ids), "columns": columns_out(columns), "overwrite": overwrite}
        await self.request("PATCH", f"/v1/{self._section}", body)

    async def close_groups(self, group_ids: Sequence[int], *, partition: str = TRAIN) -> None:
        await self._post("/close_groups", {"group_ids": _plain(group_ids), "partition": partition})

    async def claim(
        self, task: str, want: Want = ONE_GROUP, *, choose: Choose | None = None, partition: str = TRAIN
    ) -> Lease:
        if choose is not None:
            raise StoreError("`choose` does not work over HTTP: use a policy")
        fields = {key: value for key, value in msgspec.to_builtins(want).items() if value is not None}
        deadline_s, lease_s, patience_s = want.deadline_s, fields.pop("expires_s", None), want.patience_s
        fields.pop("deadline_s", None)
        body = fields | {"task": task, "partition": partition} | ({} if lease_s is None else {"lease_s": lease_s})
        loop = asyncio.get_running_loop()
        begin = loop.time()
        while True:
            waited = loop.time() - begin
            left = self._poll_s if deadline_s is None else max(0.0, deadline_s - waited)
            if patience_s is not None:
                body["patience_s"] = max(0.0, patience_s - waited)
            answer = await self._post("/claim", body | {"wait_s": min(left, self._poll_s)})
            if answer is not None:
                return _lease(answer)
            if deadline_s is not None and loop.time() - begin >= deadline_s:
                raise StoreTimeout(f"nothing to claim for {task} after {deadline_s:g} s")

    async def renew(self, lease: Lease) -> None:
        await self._post(f"/leases/{lease.lease_id}/renew")

    async def acknowledge(self, lease: Lease, *, step: int | None = None) -> None:
        await self._post(f"/leases/{lease.lease_id}/acknowledge", {"step": step})

    async def drop(self, lease: Lease) -> None:
        await self._post(f"/leases/{lease.lease_id}/drop")

    async def give_back(self, lease: Lease) -> None:
        await self._post(f"/leases/{lease.lease_id}/give_back")

    async def cover(self, step: int, *, partition: str = TRAIN) -> None:
        await self._post("/cover", {"step": step, "partition": partition})

    async def rewind(self, task: str, step: int, *, partition: str = TRAIN) -> int:
        rows: int = (await self._post("/rewind", {"task": task, "step": step, "partition": partition}))["rows"]
        return rows

    def wake(self) -> None:
        """Nothing to wake: `choose` is not supported."""

    async def finish(self, *, partition: str = TRAIN) -> None:
        await self._post("/finish", {"partition": partition})

    async def drop_partition(self, partition: str) -> int:
        rows: int = (await self.request("DELETE", f"/v1/{self._section}/partitions/{quote(partition, safe='')}"))[
            "rows"
        ]
        return rows

    async def snapshot(self, *, partition: str = TRAIN) -> Saved:
        raise StoreError("snapshots are made in the store's process, not over HTTP")

    async def restore(self, saved: Saved, *, partition: str = TRAIN) -> None:
        raise StoreError("snapshots are restored in the store's process, not over HTTP")

    async def stats(self) -> StoreStats:
        return to_type((await self.request("GET", "/v1/stats"))[self._section], StoreStats)

    # ---- weights -----------------------------------------------------------------------------------------------------

    async def notify_weights(
        self, version: int, where: str | None = None, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Announce new weights. A run whose learner is outside has read and checked them when this returns."""
        body = {"version": version, "where": where} | ({} if metrics is None else {"metrics": dict(metrics)})
        await self.request("POST", "/v1/weights", body, answer_s=PUBLISH_S)

    async def wait_for_weights(self, after: int | None = None, deadline_s: float | None = None) -> NewWeights | None:
        """The newest weights, once they are newer than `after`; None at the deadline."""
        loop = asyncio.get_running_loop()
        until = None if deadline_s is None else loop.time() + deadline_s
        while True:
            left = self._poll_s if until is None else max(0.0, until - loop.time())
            query = f"wait_s={min(left, self._poll_s)}" + ("" if after is None else f"&after={after}")
            answer = await self.request("GET", f"/v1/weights?{query}")
            if answer is not None:
                return to_type(answer, NewWeights)
            if until is not None and loop.time() >= until:
                return None


def _plain(values: Any) -> Any:
    """Python numbers, from lists, ranges and arrays."""
    if values is None:
        return None
    return int(values) if isinstance(values, int | np.integer) else [int(value) for value in values]


def _message(response: httpx2.Response) -> str:
    try:
        return str(decode_json(response.content, dict[str, Any])["error"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return response.text[:200]


def _lease(answer: dict[str, Any]) -> Lease:
    columns = answer["columns"]
    return Lease(
        lease_id=answer["lease_id"],
        task=answer["task"],
        row_ids=answer["row_ids"],
        group_ids=answer["group_ids"],
        versions=answer["versions"],
        columns=columns_in(columns) if answer["row_ids"] and columns else columns,
        empty_groups=answer["empty_groups"],
    )
