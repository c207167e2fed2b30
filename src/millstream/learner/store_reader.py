"""Rows as a process of the learner reads them from the store of the run, by their ids.

A row comes from the node that has it: through shared memory, where that is this process's own. The run holds it in the store:
by its lease, and, once it is trained, until a checkpoint covers the step.
"""

from __future__ import annotations

from typing import Any

from millstream import imports
from millstream.errors import LearnerError
from millstream.learner.messages import COLUMNS, OpenStore, RowRef, RowsMessage, unpack_rows
from millstream.store.base import Columns
from millstream.store.blocking import BlockingClient
from millstream.store.client import StoreClient
from millstream.store.wire import PackedBlock
from millstream.types import TrainRow, scaled_advantages


class StoreReader:
    """The store, once `OpenStore` has come."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._client: BlockingClient[StoreClient] | None = None

    def open(self, message: OpenStore) -> None:
        if self._client is None:
            connect, plan = imports.load_function(message.access.connect), message.access.plan
            self._client = BlockingClient(lambda: connect(plan, self._name))

    @property
    def client(self) -> BlockingClient[StoreClient]:
        if self._client is None:
            raise LearnerError(f"{self._name} was given rows of a store, and no store: expected OpenStore before")
        return self._client

    def rows(self, rows: RowsMessage) -> list[TrainRow]:
        if isinstance(rows, bytes):
            return unpack_rows(rows)
        cells = self.client.call(self.client.store.read([row.row_id for row in rows]))
        return [_train_row(ref, own) for ref, own in zip(rows, cells, strict=True)]

    def pack(self, columns: Columns) -> PackedBlock:
        return self.client.call(self.client.store.stage_columns(columns))

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def _train_row(ref: RowRef, cells: dict[str, Any]) -> TrainRow:
    columns = {name: cells[name] for name in COLUMNS if name in cells}
    if not ref.is_proximal_stored:
        columns["proximal"] = None
    if "advantages" not in columns:  # of a row to score
        columns["advantages"] = columns["logprobs"]
    if ref.scale is not None:
        columns["advantages"] = scaled_advantages(columns["advantages"], *ref.scale)
    return TrainRow(**{**columns, "label": ref.label})
