"""Records as bytes. A chunk is what one write appends to a file: it is read whole, or not at all.

    | magic | length of the head | length of the body | CRC-32 of the head | head: MessagePack | body: MessagePack, zlib |

The head has what became of groups, and which groups the body is about: a reader skips bodies that it does not need. Arrays of
all rows are concatenated. Nothing is pickled; reading a chunk imports and executes nothing.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from millstream.decoding import msgpack_decoder
from millstream.errors import LogError
from millstream.events.rollouts.records import Attempt, GroupFate, Outcome, Record, TakenRows, TrainedRows
from millstream.types import Finish, Floats, HalfFloats, Rollout, TrainRow

MAGIC = b"MSR2"
PREFIX = struct.Struct("<4sIII")
OBJECT_BYTES = 2000  # that a rollout takes in memory in addition to its numbers, about
SLICE = 64  # records: a fifth of a millisecond
LEVEL = 1  # of zlib: higher levels cost several times as much, for a tenth less
EXTRA_COLUMNS = ("advantages", "reference", "values", "returns")  # of rows that a batch took: one number a token


class TakenHead(Struct, frozen=True, array_like=True):
    seq: int
    group_id: int
    version: int
    number: int
    num_rows: int


class FateHead(Struct, frozen=True, array_like=True):
    seq: int
    group_id: int
    task_id: str
    fate: str
    rewards: list[float]
    is_vacant: bool


class RestartHead(Struct, frozen=True, array_like=True):
    seq: int
    group_id: int
    fate: str
    kept: list[int]


class TrainedHead(Struct, frozen=True, array_like=True):
    seq: int
    group_id: int
    num_tokens: list[int]  # trained tokens of each row


class ChunkHead(Struct, frozen=True, array_like=True):
    last_seq: int
    groups: list[int]  # that the body is about
    num_attempts: list[int]  # of each of them
    taken: list[TakenHead] = []
    fates: list[FateHead] = []
    restarts: list[RestartHead] = []
    cut: int | None = None
    """The run was resumed from a checkpoint here: earlier records after this number are void."""
    trained: list[TrainedHead] = []


class AttemptRow(Struct, frozen=True, array_like=True):
    seq: int
    group_id: int
    member: int
    attempt: int
    task_id: str
    epoch: int
    outcome: Outcome
    why: str
    reward_parts: dict[str, float]
    num_parts: int


class PartRow(Struct, frozen=True, array_like=True):
    part: int
    agent: int
    start_version: int
    reward: float
    turn_rewards: list[float]
    finish: Finish
    num_tokens: int


class TakenRow(Struct, frozen=True, array_like=True):
    member: int
    part: int
    reward: float
    num_tokens: int


class ChunkBody(Struct, frozen=True, array_like=True):
    attempts: list[AttemptRow] = []
    parts: list[PartRow] = []
    tokens: bytes = b""
    versions: bytes = b""
    logprobs: bytes = b""
    taken: list[TakenRow] = []
    columns: dict[str, bytes] = {}
    log_ratios: bytes = b""  # of the groups that were trained, one after the other


NO_TOKENS = np.zeros(0, np.int32)
NO_MASK = np.zeros(0, np.bool_)
NO_FLOATS = np.zeros(0, np.float32)
_head = msgpack_decoder(ChunkHead)
_body = msgpack_decoder(ChunkBody)
_encode = msgspec.msgpack.Encoder(enc_hook=dict).encode  # parts of a reward may be any mapping
Numbered = tuple[int, Record]


# ---- to bytes --------------------------------------------------------------------------------------------------------


def encode_chunk(records: Sequence[Numbered], give_way: Callable[[], None] = lambda: None) -> bytes:
    """At least one record, in the order in which they were made. `give_way` is called after every few of them. Rows are tuples
    in the order of their structs, which are quicker to make."""
    attempts, parts, taken, fates, restarts = list[Any](), list[Rollout](), list[Any](), list[Any](), list[Any]()
    takings, of_group, trained, log_ratios = list[Any](), dict[int, int](), list[Any](), list[HalfFloats]()
    for number, (seq, one) in enumerate(records, 1):
        if not number % SLICE:
            give_way()
        if isinstance(one, Attempt):
            attempts.append((seq, *one[:5], one.outcome, one.why, one.reward_parts, len(one.parts)))
            parts += one.parts
            of_group[one.group_id] = of_group.get(one.group_id, 0) + 1
        elif isinstance(one, TakenRows):
            taken.append((seq, *one[:3], len(one.rows)))
            takings += zip(one.places, one.rewards, one.rows, strict=True)
            of_group.setdefault(one.group_id, 0)
        elif isinstance(one, TrainedRows):
            trained.append((seq, one.group_id, [len(own) for own in one.log_ratios]))
            log_ratios += one.log_ratios
            of_group.setdefault(one.group_id, 0)
        elif isinstance(one, GroupFate):
            fates.append((seq, *one))
        else:
            restarts.append((seq, *one))
    groups = sorted(of_group)
    give_way()
    num_attempts = [of_group[group_id] for group_id in groups]
    head = (records[-1][0], groups, num_attempts, taken, fates, restarts, None, trained)
    body = (attempts, *_of_parts(parts), *_of_taken(takings), _flat(log_ratios, "<f2"))
    return _joined(head, body if attempts or takings or log_ratios else None)


def encode_cut(seq: int) -> bytes:
    return _joined(ChunkHead(last_seq=seq, groups=[], num_attempts=[], cut=seq), None)


def _joined(head: ChunkHead | tuple[Any, ...], body: tuple[Any, ...] | None) -> bytes:
    raw = _encode(head)
    packed = b"" if body is None else zlib.compress(_encode(body), LEVEL)
    return PREFIX.pack(MAGIC, len(raw), len(packed), zlib.crc32(raw)) + raw + packed


def _of_parts(parts: Sequence[Rollout]) -> tuple[Any, ...]:
    """`PartRow`s, tokens, versions and log-probabilities."""
    rows = [
        (one.part, one.agent, one.start_version, one.reward, one.turn_rewards.tolist(), one.finish, len(one.tokens))
        for one in parts
    ]
    tokens, versions = _flat([part.tokens for part in parts], "<i4"), _flat([part.versions for part in parts], "<i4")
    return rows, tokens, versions, _flat([part.logprobs for part in parts], "<f4")


def _of_taken(takings: Sequence[tuple[tuple[int, int], float, TrainRow]]) -> tuple[Any, ...]:
    """`TakenRow`s, and their columns."""
    rows = [row for _, _, row in takings]
    columns = {
        name: _flat([getattr(row, name) for row in rows], "<f4")
        for name in EXTRA_COLUMNS
        if rows and getattr(rows[0], name) is not None
    }
    return [(*place, reward, len(row.tokens)) for place, reward, row in takings], columns


def _flat(arrays: Sequence[Any], dtype: str) -> bytes:
    return np.concatenate(arrays, dtype=dtype, casting="unsafe").tobytes() if arrays else b""


# ---- from bytes ------------------------------------------------------------------------------------------------------


class ChunkPlace(NamedTuple):
    """Where a chunk's body is."""

    path: Path
    begin: int
    size: int

    @property
    def end(self) -> int:
        return self.begin + self.size


def read_heads(path: Path, end: float = math.inf) -> Iterator[tuple[ChunkHead, ChunkPlace]]:
    """Every whole chunk of a file, in order. One that is being written, or that a killed run left unfinished, ends it. `end`:
    what is after this byte is not read."""
    with path.open("rb") as file:
        size = min(end, file.seek(0, 2))
        begin = 0
        while (found := _read_head(file, begin, size)) is not None:
            head, place = found
            yield head, ChunkPlace(path, *place)
            begin = sum(place)


def _read_head(file: BinaryIO, begin: int, size: float) -> tuple[ChunkHead, tuple[int, int]] | None:
    file.seek(begin)
    prefix = file.read(PREFIX.size)
    if len(prefix) < PREFIX.size:
        return None
    magic, head_size, body_size, checksum = PREFIX.unpack(prefix)
    body_begin = begin + PREFIX.size + head_size
    if magic[:-1] == MAGIC[:-1] and magic != MAGIC:
        raise LogError(f"{file.name} was written by another version of Millstream: read it with that one")
    if magic != MAGIC or body_begin + body_size > size:
        return None
    raw = file.read(head_size)
    if zlib.crc32(raw) != checksum:
        return None
    try:
        return _head.decode(raw), (body_begin, body_size)
    except msgspec.DecodeError as error:
        raise LogError(f"{file.name}, byte {begin}: not a chunk that this version reads: {error}") from error


def end_of(path: Path) -> int:
    """The number of bytes of its whole chunks."""
    end = 0
    for _, place in read_heads(path):
        end = place.end
    return end


class DecodedChunk(NamedTuple):
    attempts: dict[int, list[tuple[int, Attempt]]]  # by group, with their numbers
    taken: list[TakenRows]  # as in the head, in its order
    trained: list[TrainedRows]  # the same
    num_bytes: int  # that it takes in memory, about


def read_body(head: ChunkHead, place: ChunkPlace) -> DecodedChunk:
    """Raises `LogError` for bytes that are not those that were written."""
    if not place.size:
        return DecodedChunk({}, [_taken(one, [], {}, 0) for one in head.taken], [], 0)
    try:
        with place.path.open("rb") as file:
            file.seek(place.begin)
            raw = zlib.decompress(file.read(place.size))
        body = _body.decode(raw)
        attempts: dict[int, list[tuple[int, Attempt]]] = {}
        for seq, one in _attempts(body):
            attempts.setdefault(one.group_id, []).append((seq, one))
        num_bytes = len(raw) + OBJECT_BYTES * (len(body.parts) + len(body.taken))
        return DecodedChunk(attempts, list(_all_taken(head, body)), list(_all_trained(head, body)), num_bytes)
    except OSError as error:
        raise LogError(
            f"cannot read {place.path}: {error.strerror}. An active run may have sampled it away: try again"
        ) from error
    except (zlib.error, msgspec.DecodeError, ValueError) as error:
        raise LogError(f"{place.path}, byte {place.begin}: a chunk cannot be read: {error}") from error


def _attempts(body: ChunkBody) -> Iterator[tuple[int, Attempt]]:
    tokens_N, versions_N = np.frombuffer(body.tokens, "<i4"), np.frombuffer(body.versions, "<i4")
    logprobs_N = np.frombuffer(body.logprobs, "<f4")
    parts, begin = iter(body.parts), 0
    for row in body.attempts:
        own = []
        for _ in range(row.num_parts):
            part = next(parts)
            of = slice(begin, begin + part.num_tokens)
            begin += part.num_tokens
            own.append(
                Rollout(
                    group_id=row.group_id,
                    member=row.member,
                    part=part.part,
                    agent=part.agent,
                    attempt=row.attempt,
                    start_version=part.start_version,
                    reward=part.reward,
                    turn_rewards=np.array(part.turn_rewards, np.float64),
                    finish=part.finish,
                    tokens=tokens_N[of],
                    loss_mask=versions_N[of] >= 0,
                    logprobs=logprobs_N[of],
                    versions=versions_N[of],
                )
            )
        yield (
            row.seq,
            Attempt(
                *(row.group_id, row.member, row.attempt, row.task_id, row.epoch),
                tuple(own),
                row.outcome,
                row.why,
                row.reward_parts,
            ),
        )


def _all_taken(head: ChunkHead, body: ChunkBody) -> Iterator[TakenRows]:
    columns = {name: np.frombuffer(data, "<f4") for name, data in body.columns.items()}
    row, begin = 0, 0
    for one in head.taken:
        own = body.taken[row : row + one.num_rows]
        yield _taken(one, own, columns, begin)
        row += one.num_rows
        begin += sum(each.num_tokens for each in own)


def _all_trained(head: ChunkHead, body: ChunkBody) -> Iterator[TrainedRows]:
    found_N, end = np.frombuffer(body.log_ratios, "<f2"), 0
    for one in head.trained:
        ends = end + np.cumsum(one.num_tokens, dtype=np.int64)
        begin, end = end, int(ends[-1]) if len(ends) else end
        yield TrainedRows(one.group_id, np.split(found_N[begin:end], ends[:-1] - begin))


def _taken(head: TakenHead, own: Sequence[TakenRow], columns: dict[str, Floats], begin: int) -> TakenRows:
    """Rows without tokens, which are those of the rollouts: `reader` joins them."""
    rows = []
    for row in own:
        of = slice(begin, begin + row.num_tokens)
        begin += row.num_tokens
        own_columns: dict[str, Any] = {name: values[of] for name, values in columns.items()}
        rows.append(TrainRow(tokens=NO_TOKENS, loss_mask=NO_MASK, logprobs=NO_FLOATS, **own_columns))
    return TakenRows(
        head.group_id,
        head.version,
        head.number,
        [(row.member, row.part) for row in own],
        [row.reward for row in own],
        rows,
    )
