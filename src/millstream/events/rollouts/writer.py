"""Writes RUN/rollouts/: a thread encodes and appends, every five seconds, and sooner where many records wait. It gives
way to the event loop every fraction of a millisecond: a thread that computes keeps the interpreter's lock for 5 ms whenever the
event loop has waited for anything.

Guarantees. A killed run's files can be read up to the last whole chunk, and what a checkpoint covers is in them (`sync`). A run
that resumes voids what its checkpoint does not cover with one mark, so that each trained row is there exactly once. The files
stay within the bound: every group belongs to a stratum by its id, stratum 0 has half of all groups, stratum 1 a quarter, and so
on, each in a file of its own. Above the bound the lowest stratum is deleted, and none of its groups is kept any more: what is
left is a fair sample of whole groups over the whole run. What is missing follows from the run's log: `run.missing_rollouts`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct, structs

from millstream.decoding import decode_json
from millstream.errors import LogError
from millstream.events.rollouts.chunks import SLICE, Numbered, encode_chunk, encode_cut, end_of
from millstream.events.rollouts.records import Record

logger = logging.getLogger(__name__)
ROLLOUTS_FOLDER = "rollouts"
SAMPLED_FILE = "sampled.json"
NUM_STRATA = 16


class SampledAway(Struct, frozen=True, kw_only=True):
    """What is not in the files. Groups of strata below `level` are not kept; `num_lost` records could not be written."""

    level: int = 0
    num_lost: int = 0


@lru_cache(maxsize=4096)  # a group has several records
def stratum_of(group_id: int) -> int:
    """The number of trailing zeros in a checksum of the id."""
    checksum = zlib.crc32(group_id.to_bytes(8, "little", signed=True)) | 1 << (NUM_STRATA - 1)
    return (checksum & -checksum).bit_length() - 1


def stratum_file(folder: Path, stratum: int) -> Path:
    return folder / f"{stratum:02d}.rollouts"


def read_sampled(folder: Path) -> SampledAway:
    path = folder / SAMPLED_FILE
    try:
        return decode_json(path.read_bytes(), SampledAway) if path.exists() else SampledAway()
    except (OSError, msgspec.DecodeError) as error:
        raise LogError(f"{path} cannot be read: {error}") from error


def void_after(folder: Path, seq: int) -> None:
    """Mark what was recorded after event `seq` as void: the run is resumed from a checkpoint that covers no more. Also a run
    that keeps no rollouts from here on does so, or a later resume would find its steps twice."""
    for path in sorted(folder.glob("*.rollouts")):
        _cut_off_unfinished(path)
        with path.open("ab") as file:
            file.write(encode_cut(seq))
            file.flush()
            os.fsync(file.fileno())


def _cut_off_unfinished(path: Path) -> int:
    """The chunk that a killed process left. Returns the size."""
    end = end_of(path)
    os.truncate(path, end)
    return end


class RolloutWriter:
    """A `RolloutSink`. `last_seq`: the number of the last event. A disk that takes nothing costs the records of that moment,
    which are counted, and not the run."""

    FLUSH_S = 5.0
    MAX_WAITING = 8192  # records
    PAUSE_S = 2e-4

    def __init__(self, folder: Path, *, max_bytes: float, last_seq: Callable[[], int]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._max_bytes = max_bytes
        self._last_seq = last_seq
        self._records: list[Numbered] = []
        self._files: dict[int, BinaryIO] = {}
        self._sizes: dict[int, int] = {}
        self._torn: set[int] = set()  # strata whose file may end with a part of a chunk
        self._lock = threading.Lock()
        self._is_due = threading.Event()
        self._is_closing = False
        self._is_failing = False
        self._is_saved = True  # what was sampled away
        self.sampled = read_sampled(folder)
        for stratum in range(NUM_STRATA):
            path = stratum_file(folder, stratum)
            if stratum < self.sampled.level:
                path.unlink(missing_ok=True)
            elif path.exists():
                self._sizes[stratum] = _cut_off_unfinished(path)
        self._thread = threading.Thread(target=self._write, name="rollouts", daemon=True)
        self._thread.start()

    def add(self, record: Record) -> None:
        self._records.append((self._last_seq(), record))
        if len(self._records) == self.MAX_WAITING:
            self._is_due.set()

    def sync(self) -> None:
        """Returns when everything so far is on the disk."""
        self.flush()
        with self._lock:
            for file in self._files.values():
                os.fsync(file.fileno())

    def close(self) -> None:
        self._is_closing = True
        self._is_due.set()
        self._thread.join()
        self.flush()
        for file in self._files.values():
            file.close()

    def flush(self, give_way: Callable[[], None] = lambda: None) -> None:
        with self._lock:
            count = len(self._records)  # the event loop appends meanwhile
            records = self._records[:count]
            del self._records[:count]
            by_stratum: dict[int, list[Numbered]] = defaultdict(list)
            for numbered in records:
                by_stratum[stratum_of(numbered[1].group_id)].append(numbered)
            del records
            for stratum, own in by_stratum.items():
                if stratum >= self.sampled.level:
                    self._append(stratum, own, give_way)
                while own:  # to free all of them at once would keep the event loop waiting for 20 ms
                    del own[-SLICE:]
                    give_way()
            while sum(self._sizes.values()) > self._max_bytes and self.sampled.level < NUM_STRATA:
                self._drop_lowest()
            if not self._is_saved:
                self._save()

    # ---- on the thread -------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        while not self._is_closing:
            self._is_due.wait(self.FLUSH_S)
            self._is_due.clear()
            self.flush(partial(time.sleep, self.PAUSE_S))

    def _append(self, stratum: int, records: list[Numbered], give_way: Callable[[], None]) -> None:
        chunk, size = encode_chunk(records, give_way), self._sizes.get(stratum, 0)
        try:
            if stratum not in self._files:
                self._files[stratum] = stratum_file(self._folder, stratum).open("ab", buffering=0)
            self._cut_torn(stratum)
            self._torn.add(stratum)
            if self._files[stratum].write(chunk) < len(chunk):
                raise OSError(28, "no space left")
            self._torn.discard(stratum)
            self._sizes[stratum] = size + len(chunk)
            self._is_failing = False
        except OSError as error:
            with suppress(OSError):  # else before the next write
                self._cut_torn(stratum)
            self.sampled = structs.replace(self.sampled, num_lost=self.sampled.num_lost + len(records))
            self._is_saved = False
            if not self._is_failing:
                logger.warning("rollouts are not kept: cannot write %s: %s", self._folder, error.strerror)
            self._is_failing = True

    def _cut_torn(self, stratum: int) -> None:
        if stratum in self._torn:
            self._files[stratum].truncate(self._sizes.get(stratum, 0))
            self._torn.discard(stratum)

    def _drop_lowest(self) -> None:
        stratum = self.sampled.level
        self.sampled = structs.replace(self.sampled, level=stratum + 1)
        self._save()
        if stratum in self._files:
            self._files.pop(stratum).close()
        self._sizes.pop(stratum, None)
        self._torn.discard(stratum)
        stratum_file(self._folder, stratum).unlink(missing_ok=True)

    def _save(self) -> None:
        """On a full disk: at the next flush."""
        path = self._folder / SAMPLED_FILE
        new = path.with_suffix(".new")
        try:
            new.write_bytes(msgspec.json.encode(self.sampled))
            new.replace(path)
            self._is_saved = True
        except OSError as error:
            self._is_saved = False
            logger.warning("cannot write %s: %s", path, error.strerror)
