"""The calls that a learner has executed since its newest checkpoint, for a learner that must execute them again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, Protocol

import numpy as np
from msgspec import structs

from millstream.errors import InvariantError
from millstream.run.checkpoint import Sealed
from millstream.types import StoredRow, TrainRow

MIN_SEGMENT_BYTES = 4096
STORED_TOKEN_BYTES = 17  # of a row in the store: tokens, versions, mask, log-probabilities and a column of a stage


class LearnerCall(NamedTuple):
    what: Literal["begin_batch", "accumulate", "step"]
    rows: tuple[TrainRow, ...] = ()


class ReplayLog:
    """The executed calls since `since`, in order. Versions are counted here: a batch with at least one step is one."""

    def __init__(self, version: int) -> None:
        self.since = version
        self.version = version
        self.num_bytes = 0
        self._calls: list[LearnerCall] = []
        self._snapshots: dict[int, int] = {}  # by version: the number of calls before its snapshot
        self._has_stepped = False

    def __iter__(self) -> Iterator[LearnerCall]:
        return iter(self._calls)

    @property
    def num_batches(self) -> int:
        return sum(call.what == "begin_batch" for call in self._calls)

    @property
    def num_rows(self) -> int:
        return sum(len(call.rows) for call in self._calls)

    def append(self, call: LearnerCall) -> None:
        if call.what == "begin_batch":
            self._has_stepped = False
        elif call.what == "step" and not self._has_stepped:
            self._has_stepped = True
            self.version += 1
        self._calls.append(call)
        self.num_bytes += _num_bytes(call)

    def mark(self) -> None:
        """A snapshot is taken here, between two batches."""
        self._snapshots[self.version] = len(self._calls)

    def truncate(self, version: int) -> bool:
        """Remove the calls that the checkpoint of this version covers. Returns whether there were any."""
        if version == self.since:
            return False
        if version not in self._snapshots:
            known = ", ".join(map(str, [self.since, *self._snapshots]))
            raise InvariantError(f"a checkpoint of version {version} is sealed: snapshots were taken of {known}")
        place = self._snapshots[version]
        self._calls = self._calls[place:]
        self.since = version
        self._snapshots = {later: at - place for later, at in self._snapshots.items() if later > version}
        self.num_bytes = sum(map(_num_bytes, self._calls))
        return True


def _num_bytes(call: LearnerCall) -> int:
    return sum(map(_row_bytes, call.rows))


def _row_bytes(row: TrainRow) -> int:
    """In the memory of this process; of a stored row, in that of its node."""
    if isinstance(row, StoredRow):
        return max(MIN_SEGMENT_BYTES, STORED_TOKEN_BYTES * row.num_tokens)
    return sum(column.nbytes for column in structs.astuple(row) if isinstance(column, np.ndarray))


class CheckpointView(Protocol):
    """What a replay reads of checkpoints: see `run.checkpoint.Checkpoints`."""

    @property
    def version(self) -> int | None:
        """Of the newest sealed one; None if there is none."""
        ...

    async def newest_sealed(self) -> Sealed | None:
        """Waits until the one that is being written, if any, is sealed or has failed. Its folder may have been moved since."""
        ...

    def hurry(self) -> None:
        """Make the next one due as soon as possible."""
        ...
