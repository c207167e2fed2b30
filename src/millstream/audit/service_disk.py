"""What the folder of a model has, read without the service: the snapshot that counts, and the requests after it."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from millstream.audit.report import MALFORMED

HEADER = struct.Struct("<II")
TRIES = 5  # a service that is running may replace the snapshot meanwhile
SIZES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDE: 2}


class DiskState(NamedTuple):
    version: int
    next_seq_id: int
    journal: dict[int, int]  # by number: CRC-32 of the body


def disk_state(folder: Path) -> DiskState | str:
    """A text: why it cannot be read."""
    why = ""
    for _ in range(TRIES):
        try:
            return _read(folder)
        except (*MALFORMED, struct.error, IndexError) as error:
            why = f"its snapshot or journal cannot be read: {error}"
    return why


def _read(folder: Path) -> DiskState:
    current = folder / "current"
    number = int(current.read_text()) if current.exists() else 0
    version, next_seq_id = 0, 1
    if number:
        info, _ = _unpack((folder / f"snapshot-{number}" / "snapshot.msgpack").read_bytes(), 0)
        version, next_seq_id = info["version"], info["next_seq_id"]
    path = folder / f"journal-{number}"
    data, at, found = path.read_bytes() if path.exists() or number else b"", 0, dict[int, int]()
    while at + HEADER.size <= len(data):
        length, checksum = HEADER.unpack_from(data, at)
        record = data[at + HEADER.size : at + HEADER.size + length]
        if len(record) < length or zlib.crc32(record) != checksum:
            break
        (seq_id, _, body), _ = _unpack(record, 0)
        found[seq_id] = zlib.crc32(body)
        at += HEADER.size + length
    return DiskState(version, next_seq_id, found)


def _unpack(data: bytes, at: int) -> tuple[Any, int]:
    """MessagePack, as far as these files have it: the value, and where the next one begins."""
    head = data[at]
    at += 1
    if head < 0x80:
        return head, at
    if head >= 0xE0:
        return head - 0x100, at
    if head < 0xC0:
        kind, size = (
            ("map" if head < 0x90 else "array" if head < 0xA0 else "text"),
            head & (0x1F if head >= 0xA0 else 0xF),
        )
    elif head in SIZES:
        end = at + SIZES[head]
        size, at = int.from_bytes(data[at:end], "big"), end
        kind = {0xC: "bytes", 0xD: "text"}[head >> 4]
        kind = "number" if 0xCC <= head <= 0xCF else {0xDC: "array", 0xDE: "map"}.get(head, kind)
    else:
        raise ValueError(f"byte {head:#x} at {at - 1}")
    if kind == "number":
        return size, at
    if kind in ("bytes", "text"):
        value = data[at : at + size]
        return (value if kind == "bytes" else value.decode()), at + size
    values = []
    for _ in range(size * (2 if kind == "map" else 1)):
        value, at = _unpack(data, at)
        values.append(value)
    return (values if kind == "array" else dict(zip(values[::2], values[1::2], strict=True))), at
