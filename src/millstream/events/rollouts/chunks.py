"""Records as bytes. A chunk is what one write appends to a file: it is read whole, or not at all.

    | magic | length of the head | length of the body | CRC-32 of the head | head | body |

The head has what became of groups, and which groups the body is about: a reader skips bodies that it does not need. Head and
body are MessagePack. The body is compressed with zlib; after it, as they are, come log-probabilities and log ratios of sampled
tokens, which take most of a compressor's time and hardly become smaller. Arrays of all rows are concatenated. Nothing is
pickled; reading a chunk imports and executes nothing.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from millstream.decoding import msgpack_decoder
from millstream.errors import LogError
from millstream.events.rollouts.records import Attempt, GroupFate, Outcome, Record, TakenRows, TrainedRows
from millstream.types import Finish, Floats, HalfFloats, Rollout, TrainRow

MAGIC = b"MSR3"
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
    attempts: list[AttemptRow]
    parts: list[PartRow]
    tokens: bytes  # of 16 bits each, or of 32 like the versions if one of them needs it
    versions: bytes
    taken: list[TakenRow]
    columns: dict[str, bytes]
    checksum: int  # of what is not compressed


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
    places, rewards, rows = list[tuple[int, int]](), list[float](), list[TrainRow]()
    of_group, trained, log_ratios = dict[int, int](), list[Any](), list[HalfFloats]()
    for number, (seq, one) in enumerate(records, 1):
        if not number % SLICE:
            give_way()
        if isinstance(one, Attempt):
            group_id, member, attempt, task_id, epoch, own, outcome, why, reward_parts, _ = one
            attempts.append((seq, group_id, member, attempt, task_id, epoch, outcome, why, reward_parts, len(own)))
            parts += own
            of_group[group_id] = of_group.get(group_id, 0) + 1
        elif isinstance(one, TakenRows):
            taken.append((seq, *one[:3], len(one.rows)))
            places += one.places
            rewards += one.rewards
            rows += one.rows
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
    if not (attempts or rows or log_ratios):
        return _joined(head, None)
    *of_parts, logprobs = _of_parts(parts)
    uncompressed = logprobs + _flat(log_ratios, "<f2", sum(map(len, log_ratios)))
    body = (attempts, *of_parts, *_of_taken(places, rewards, rows), zlib.crc32(uncompressed))
    return _joined(head, body, uncompressed)


def encode_cut(seq: int) -> bytes:
    return _joined(ChunkHead(last_seq=seq, groups=[], num_attempts=[], cut=seq), None)


def _joined(
    head: ChunkHead | tuple[Any, ...], body: ChunkBody | tuple[Any, ...] | None, uncompressed: bytes = b""
) -> bytes:
    raw = _encode(head)
    packed = b"" if body is None else zlib.compress(_encode(body), LEVEL)
    prefix = PREFIX.pack(MAGIC, len(raw), len(packed) + len(uncompressed), zlib.crc32(raw))
    return b"".join((prefix, raw, packed, uncompressed))


def _of_parts(parts: Sequence[Rollout]) -> tuple[Any, ...]:
    """`PartRow`s, tokens, versions, and log-probabilities of what was sampled."""
    rows = [
        (one.part, one.agent, one.start_version, one.reward, one.turn_rewards.tolist(), one.finish, len(one.tokens))
        for one in parts
    ]
    num_tokens = sum(row[-1] for row in rows)
    tokens = _flat([part.tokens for part in parts], "<i4", num_tokens)
    versions = _flat([part.versions for part in parts], "<i4", num_tokens)
    logprobs_N = np.frombuffer(_flat([part.logprobs for part in parts], "<f4", num_tokens), "<f4")
    tokens_N = np.frombuffer(tokens, "<u4")
    if num_tokens and tokens_N.max() < 1 << 16:
        tokens = tokens_N.astype("<u2").tobytes()
    return rows, tokens, versions, logprobs_N[np.frombuffer(versions, "<i4") >= 0].tobytes()


def _of_taken(places: Sequence[tuple[int, int]], rewards: Sequence[float], rows: Sequence[TrainRow]) -> tuple[Any, ...]:
    """`TakenRow`s, and their columns."""
    lengths = [len(row.tokens) for row in rows]
    num_tokens = sum(lengths)
    columns = {
        name: _flat([getattr(row, name) for row in rows], "<f4", num_tokens)
        for name in EXTRA_COLUMNS
        if rows and getattr(rows[0], name) is not None
    }
    taken = zip(places, rewards, lengths, strict=True)
    return [(member, part, reward, length) for (member, part), reward, length in taken], columns


def _flat(arrays: Sequence[Any], dtype: str, num: int) -> bytes:
    """The `num` values of all of them. Arrays of this type are joined as they are, which takes a third of the time."""
    with suppress(TypeError):  # values that are not one after the other in memory
        joined = b"".join(arrays)
        if len(joined) == num * np.dtype(dtype).itemsize:
            return joined
    return np.concatenate(arrays, dtype=dtype, casting="unsafe").tobytes()


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
            data = file.read(place.size)
        packed = zlib.decompressobj()
        raw, numbers = packed.decompress(data), packed.unused_data
        body = _body.decode(raw)
        if not packed.eof or zlib.crc32(numbers) != body.checksum:
            raise ValueError("a wrong checksum")
        attempts: dict[int, list[tuple[int, Attempt]]] = {}
        for seq, one in _attempts(body, numbers):
            attempts.setdefault(one.group_id, []).append((seq, one))
        num_bytes = len(raw) + len(numbers) + OBJECT_BYTES * (len(body.parts) + len(body.taken))
        return DecodedChunk(attempts, list(_all_taken(head, body)), list(_all_trained(head, numbers)), num_bytes)
    except OSError as error:
        raise LogError(
            f"cannot read {place.path}: {error.strerror}. An active run may have sampled it away: try again"
        ) from error
    except (zlib.error, msgspec.DecodeError, ValueError) as error:
        raise LogError(f"{place.path}, byte {place.begin}: a chunk cannot be read: {error}") from error


def _attempts(body: ChunkBody, numbers: bytes) -> Iterator[tuple[int, Attempt]]:
    versions_N = np.frombuffer(body.versions, "<i4")
    is_short = len(body.tokens) < len(body.versions)
    tokens_N = np.frombuffer(body.tokens, "<u2" if is_short else "<i4").astype(np.int32)
    is_sampled_N = versions_N >= 0
    logprobs_N = np.zeros(len(versions_N), np.float32)
    logprobs_N[is_sampled_N] = np.frombuffer(numbers, "<f4", np.count_nonzero(is_sampled_N))
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
                    loss_mask=is_sampled_N[of],
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


def _all_trained(head: ChunkHead, numbers: bytes) -> Iterator[TrainedRows]:
    num_trained = sum(sum(one.num_tokens) for one in head.trained)
    found_N, end = np.frombuffer(numbers[len(numbers) - 2 * num_trained :], "<f2"), 0
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
