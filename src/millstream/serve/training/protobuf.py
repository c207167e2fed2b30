"""Protocol Buffers as far as the training client needs them: a reader of messages as fields by number, and a writer.

The wire format is public (https://protobuf.dev/programming-guides/encoding). The messages have a dozen fields, and a reader
of these sizes is shorter than generated code and its dependency.
"""

from __future__ import annotations

import struct
from collections import defaultdict

Value = int | bytes
MessageFields = dict[int, list[Value]]
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MAX_VARINT_BYTES = 10


class ProtobufError(ValueError):
    """The bytes are not a message, or a field has another type than expected."""


def read_message(data: bytes) -> MessageFields:
    """The values of each field, in order. Fixed-width values are their bytes. Raises `ProtobufError`."""
    fields: MessageFields = defaultdict(list)
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = _varint(data, at)
            fields[number].append(value)
            continue
        if kind == BYTES:
            size, at = _varint(data, at)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise ProtobufError(f"wire type {kind} at byte {at}: expected 0, 1, 2 or 5")
        if size > len(data) - at:
            raise ProtobufError(f"a field of {size} bytes at byte {at}, and {len(data) - at} are left")
        fields[number].append(data[at : at + size])
        at += size
    return fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(MAX_VARINT_BYTES):
        if at >= len(data):
            raise ProtobufError("the message ends within a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value & (1 << 64) - 1, at
    raise ProtobufError(f"a number of more than {MAX_VARINT_BYTES} bytes")


def bytes_of(fields: MessageFields, number: int) -> list[bytes]:
    values = fields.get(number, [])
    if not all(isinstance(value, bytes) for value in values):
        raise ProtobufError(f"field {number} is a number: expected bytes")
    return [value for value in values if isinstance(value, bytes)]


def text_of(fields: MessageFields, number: int) -> str:
    found = bytes_of(fields, number)
    try:
        return found[-1].decode() if found else ""
    except UnicodeDecodeError as error:
        raise ProtobufError(f"field {number} is not UTF-8") from error


def int_of(fields: MessageFields, number: int) -> int:
    """A signed number; 0 where it is not set."""
    value = fields.get(number, [0])[-1]
    if not isinstance(value, int):
        raise ProtobufError(f"field {number} has bytes: expected a number")
    return value - (1 << 64) if value >= 1 << 63 else value


def ints_of(fields: MessageFields, number: int) -> list[int]:
    """Of a repeated field: packed, or one by one."""
    found: list[int] = []
    for value in fields.get(number, []):
        if isinstance(value, int):
            found.append(value)
            continue
        at = 0
        while at < len(value):
            one, at = _varint(value, at)
            found.append(one)
    return [one - (1 << 64) if one >= 1 << 63 else one for one in found]


def double_of(fields: MessageFields, number: int) -> float:
    """0 where it is not set."""
    found = bytes_of(fields, number)
    if not found:
        return 0.0
    if len(found[-1]) != 8:
        raise ProtobufError(f"field {number} has {len(found[-1])} bytes: expected a double")
    return float(struct.unpack("<d", found[-1])[0])


def write_varint(value: int) -> bytes:
    made = bytearray()
    value &= (1 << 64) - 1
    while value >= 0x80:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


def write_field(number: int, value: int | float | str | bytes) -> bytes:
    match value:
        case int():
            return write_varint(number << 3 | VARINT) + write_varint(value)
        case float():
            return write_varint(number << 3 | FIXED64) + struct.pack("<d", value)
        case str():
            return write_field(number, value.encode())
        case bytes():
            return write_varint(number << 3 | BYTES) + write_varint(len(value)) + value
