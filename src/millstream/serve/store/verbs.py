"""The verbs of AsyncFlow and TransferQueue as one client, for programs without `await`. See docs/outside.md.

    client = OutsideClient("http://127.0.0.1:7077", token=...)
    run = client.init_engine()                                   # what to load, and how to sample
    offer = client.get_prompts(rows=8, version=run["version"])   # a lease; None: nothing to do yet
    client.put_experience({"request": offer["request"], "tokens": ..., "logprobs": ..., "versions": ...})

It speaks to a run (`serve.outside`) and to `millstream serve-store`, which has the same paths. `StreamEnded`: the run is over,
or its process has died.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import httpx2

from millstream.errors import StoreError, StoreTimeout, StreamEnded
from millstream.serve.store.bodies import NewWeights
from millstream.serve.store.client import HttpStore
from millstream.serve.store.columns import columns_in, columns_out
from millstream.store import TRAIN, Columns, Lease, Want
from millstream.store.blocking import BlockingClient

OLDEST = -(1 << 62)
T = TypeVar("T")


class OutsideClient:
    """Raises `StoreError` for what is refused, with the service's own words."""

    def __init__(self, url: str, *, token: str | None = None) -> None:
        async def connect() -> HttpStore:
            return HttpStore(url, token=token)

        self._client = BlockingClient(connect)
        self._prompts = HttpStore(url, token=token, section="prompts")
        self._has_answered = False

    def __enter__(self) -> OutsideClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if not self._client.is_closed:
            self._client.call(self._prompts.close())
            self._client.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            found = self._client.call(work)
        except StoreError as error:
            is_gone = isinstance(error.__cause__, httpx2.TransportError)
            if self._has_answered and is_gone and not isinstance(error.__cause__, httpx2.ReadTimeout):
                raise StreamEnded(f"the service does not answer any more: it has ended. {error}") from error
            raise
        self._has_answered = True
        return found

    # ---- AsyncFlow

    def init_engine(self) -> dict[str, Any]:
        """What an engine or a learner must know of a run: see docs/outside.md."""
        found: dict[str, Any] = self._call(self._client.store.request("GET", "/v1/run"))
        return found

    def put_prompts(self, columns: Columns) -> Sequence[int]:
        """To `serve-store`; a run offers its own."""
        return self._call(self._prompts.put(0, columns))

    def get_prompts(
        self, rows: int, *, version: int | None = None, wait_s: float = 1.0, lease_s: float | None = None
    ) -> Lease | None:
        """As many as there are, at most `rows`. `version`: only those that an engine with these weights may answer."""
        versions = None if version is None else (OLDEST, version)
        want = Want(rows=rows, versions=versions, patience_s=0.0, deadline_s=wait_s, expires_s=lease_s)
        return self._claim(self._prompts, "rollout", want)

    def put_experience(self, columns: Columns, *, group_ids: int | Sequence[int] = 0) -> Sequence[int]:
        """To a run: the columns `request`, `tokens`, `logprobs`, `versions`, and `begin` for the rest of an answer."""
        return self._call(self._client.store.put(group_ids, columns))

    def get_experience(
        self, task: str = TRAIN, *, groups: int = 1, wait_s: float = 1.0, lease_s: float | None = None
    ) -> Lease | None:
        """Of a run: the next batch, whose `group_id` is the version that it is to be trained from."""
        want = Want(groups=groups, deadline_s=wait_s, expires_s=lease_s)
        return self._claim(self._client.store, task, want)

    def _claim(self, store: HttpStore, task: str, want: Want) -> Lease | None:
        try:
            return self._call(store.claim(task, want))
        except StoreTimeout:
            return None

    def close_groups(self, group_ids: Sequence[int]) -> None:
        """To `serve-store`: these groups are complete, and may be claimed."""
        self._call(self._client.store.close_groups(group_ids))

    def acknowledge(self, lease: Lease, *, step: int | None = None) -> None:
        store = self._prompts if lease.task == "rollout" else self._client.store
        self._call(store.acknowledge(lease, step=step))

    def renew(self, lease: Lease) -> None:
        """A lease that is longer than its time."""
        self._call((self._prompts if lease.task == "rollout" else self._client.store).renew(lease))

    def notify_weights(self, version: int, where: str, metrics: Mapping[str, float] | None = None) -> None:
        """These weights are there. Of a run whose learner is outside, this ends the step."""
        self._call(self._client.store.notify_weights(version, where, metrics))

    def wait_for_weights(self, after: int | None = None, *, wait_s: float = 0.0) -> NewWeights | None:
        """The newest, once they are newer than `after`; None: not in this time."""
        return self._call(self._client.store.wait_for_weights(after, wait_s))

    # ---- TransferQueue

    def kv_put(
        self,
        keys: str | Sequence[str],
        fields: Columns | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
        *,
        partition: str = TRAIN,
    ) -> None:
        """One cell of each field, and one tag, for each key."""
        body = {"keys": _listed(keys), "columns": columns_out(fields or {}), "partition": partition}
        self._post("", body if tags is None else body | {"tags": [dict(tag) for tag in tags]})

    def kv_get(
        self, keys: str | Sequence[str], fields: Sequence[str] | None = None, *, partition: str = TRAIN
    ) -> dict[str, list[Any]]:
        found = self._post("/get", {"keys": _listed(keys), "columns": fields, "partition": partition})["columns"]
        return columns_in(found) if found else {}

    def kv_list(self, partition: str | None = None) -> dict[str, dict[str, Any]]:
        """By partition, the keys and the tag of each."""
        found: dict[str, dict[str, Any]] = self._post("/list", {"partition": partition})
        return found

    def kv_clear(self, keys: str | Sequence[str], *, partition: str = TRAIN) -> None:
        self._post("/clear", {"keys": _listed(keys), "partition": partition})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._call(self._client.store.request("POST", f"/v1/keys{path}", body))


def _listed(keys: str | Sequence[str]) -> list[str]:
    return [keys] if isinstance(keys, str) else list(keys)
