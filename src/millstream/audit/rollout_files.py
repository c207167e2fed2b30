"""The files of RUN/rollouts/, read by their format (docs/rollouts.md) and not by the code that wrote them.

One group after the other, as they left the run; what a resume has undone is left out. Memory: the groups that were in flight at
one moment, with their rollouts."""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

MAGIC = b"MSR3"
PREFIX = struct.Struct("<4sIII")
NUM_STRATA = 16
NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
SIZED = {
    0xC4: (">B", "bytes"), 0xC5: (">H", "bytes"), 0xC6: (">I", "bytes"),
    0xD9: (">B", "text"), 0xDA: (">H", "text"), 0xDB: (">I", "text"),
    0xDC: (">H", "list"), 0xDD: (">I", "list"), 0xDE: (">H", "map"), 0xDF: (">I", "map"),
}  # fmt: skip
CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


class KeptAttempt(NamedTuple):
    """A rollout that ended. `rewards`: of its parts."""

    seq: int
    member: int
    attempt: int
    rewards: list[float]
    num_tokens: int
    start: int
    end: int  # the last version that sampled it


class KeptTaken(NamedTuple):
    seq: int
    group_id: int
    version: int
    rewards: dict[int, list[float]]  # by member: of its rows


class KeptFate(NamedTuple):
    seq: int
    group_id: int
    task_id: str
    fate: str
    rewards: list[float]  # of its members
    is_vacant: bool


class KeptRestart(NamedTuple):
    seq: int
    group_id: int
    fate: str
    kept: list[int]


KeptRecord = KeptTaken | KeptFate | KeptRestart


@dataclass(slots=True)
class FiledGroup:
    group_id: int
    attempts: list[KeptAttempt] = field(default_factory=list)
    taken: list[KeptTaken] = field(default_factory=list)
    fates: list[KeptFate] = field(default_factory=list)

    @property
    def has_left(self) -> bool:
        return bool(self.fates) and (not self.fates[0].is_vacant or bool(self.taken))

    def add(self, record: KeptRecord) -> None:
        match record:
            case KeptTaken():
                self.taken.append(record)
            case KeptFate():
                self.fates.append(record)
            case KeptRestart(seq=seq, kept=kept):  # what had ended before does not count, but for members that are kept
                self.attempts = [one for one in self.attempts if one.seq > seq or one.member in kept]


def stratum_due(group_id: int) -> int:
    checksum = zlib.crc32(group_id.to_bytes(8, "little", signed=True)) | 1 << (NUM_STRATA - 1)
    return (checksum & -checksum).bit_length() - 1


def read_groups(path: Path) -> Iterator[FiledGroup]:
    """Those that left; then the others. Raises `ValueError` for bytes that are not of this format."""
    try:
        yield from _read_groups(path)
    except (zlib.error, struct.error, IndexError) as error:
        raise ValueError(f"not of this format: {error}") from error


def _read_groups(path: Path) -> Iterator[FiledGroup]:
    cuts = [(begin, head[6]) for begin, head, _ in _chunks(path, has_body=False) if head[6] is not None]
    in_flight: dict[int, FiledGroup] = {}
    for begin, head, body in _chunks(path):
        if head[6] is not None:
            continue
        upto = min((seq for where, seq in cuts if where > begin), default=head[0])
        for group_id, attempt in _attempts(body):
            if attempt.seq <= upto:
                in_flight.setdefault(group_id, FiledGroup(group_id)).attempts.append(attempt)
        for record in sorted(_records(head, body), key=attrgetter("seq")):
            if record.seq <= upto:
                group = in_flight.setdefault(record.group_id, FiledGroup(record.group_id))
                group.add(record)
                if group.has_left:
                    yield in_flight.pop(record.group_id)
    yield from in_flight.values()


def _chunks(path: Path, *, has_body: bool = True) -> Iterator[tuple[int, list[Any], list[Any]]]:
    """Where each whole chunk begins, its head and its body. One that a kill has cut short ends the file."""
    size, begin = path.stat().st_size, 0
    with path.open("rb") as file:
        while len(prefix := file.read(PREFIX.size)) == PREFIX.size:
            magic, head_size, body_size, checksum = PREFIX.unpack(prefix)
            if begin + PREFIX.size + head_size + body_size > size:
                return
            raw, packed = file.read(head_size), file.read(body_size)
            if magic[:-1] == MAGIC[:-1] and magic != MAGIC:
                raise ValueError("written by another version of Millstream: audit it with that one")
            if magic != MAGIC or zlib.crc32(raw) != checksum:
                raise ValueError(f"byte {begin}: not a chunk")
            is_read = has_body and bool(packed)
            yield begin, _unpack(raw, 0)[0], _body(packed) if is_read else []
            begin = file.tell()


def _body(data: bytes) -> list[Any]:
    """Without the log-probabilities after it, which are only compared with their checksum."""
    packed = zlib.decompressobj()
    body: list[Any] = _unpack(packed.decompress(data), 0)[0]
    if not packed.eof or zlib.crc32(packed.unused_data) != body[6]:
        raise ValueError("a chunk with a wrong checksum")
    return body


def _attempts(body: list[Any]) -> Iterator[tuple[int, KeptAttempt]]:
    """Those that ended, each with its group."""
    if not body:
        return
    versions, parts, begin = array("i", body[3]), iter(body[1]), 0
    for seq, group_id, member, number, _, _, outcome, _, _, num_parts in body[0]:
        own = list(islice(parts, num_parts))
        num_tokens = sum(part[6] for part in own)
        end = max(versions[begin : begin + num_tokens], default=-1)
        begin += num_tokens
        if outcome == "ended":
            start = min(part[2] for part in own)
            yield group_id, KeptAttempt(seq, member, number, [part[3] for part in own], num_tokens, start, end)


def _records(head: list[Any], body: list[Any]) -> Iterator[KeptRecord]:
    """What else a chunk says of groups."""
    rows = iter(body[4] if body else ())
    for seq, group_id, version, _, num_rows in head[3]:
        rewards: dict[int, list[float]] = {}
        for member, _, reward, _ in islice(rows, num_rows):
            rewards.setdefault(member, []).append(reward)
        yield KeptTaken(seq, group_id, version, rewards)
    yield from (KeptFate(*fields) for fields in head[4])
    yield from (KeptRestart(*fields) for fields in head[5])


def _unpack(raw: bytes, at: int) -> tuple[Any, int]:
    """A value of MessagePack, and where it ends."""
    tag, at = raw[at], at + 1
    if tag < 0x80 or tag >= 0xE0:
        return tag - (0x100 if tag >= 0xE0 else 0), at
    if tag in CONSTANTS:
        return CONSTANTS[tag], at
    if tag in NUMBERS:
        return struct.unpack_from(NUMBERS[tag], raw, at)[0], at + struct.calcsize(NUMBERS[tag])
    if tag in SIZED:
        width, kind = SIZED[tag]
        size, at = struct.unpack_from(width, raw, at)[0], at + struct.calcsize(width)
    elif tag < 0xC0:
        kind, size = ("map", tag - 0x80) if tag < 0x90 else ("list", tag - 0x90) if tag < 0xA0 else ("text", tag - 0xA0)
    else:
        raise ValueError(f"byte {at}: no MessagePack of this format has {tag:#x}")
    if kind in ("bytes", "text"):
        found = raw[at : at + size]
        return found if kind == "bytes" else found.decode(), at + size
    values = []
    for _ in range(size if kind == "list" else 2 * size):
        value, at = _unpack(raw, at)
        values.append(value)
    return values if kind == "list" else dict(zip(values[::2], values[1::2], strict=True)), at
