"""The data of a forward and backward pass, from the client's protobuf to the learner's rows, and the results back.

Shapes: T tokens of a sequence, K targets of each position (one, unless target_tokens has two dimensions).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from millstream.learner.trainer import DirectRow, RowScore
from millstream.serve.http import HttpError
from millstream.serve.training.bodies import RequestAddress
from millstream.serve.training.losses import ClientLoss
from millstream.serve.training.protobuf import (
    MessageFields,
    ProtobufError,
    bytes_of,
    double_of,
    int_of,
    ints_of,
    read_message,
    text_of,
    write_field,
)
from millstream.types import Completion, Finish

Array = NDArray[Any]
FLOAT32 = 1
DTYPES: dict[int, np.dtype[Any]] = {FLOAT32: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
MAX_CELLS = 1 << 24  # of one tensor of a datum: a sparse one may claim any shape
STOP_REASONS = {Finish.STOP: 0, Finish.LENGTH: 1}


class TokenSource(NamedTuple):
    """Where some tokens of a datum come from: a sequence that was sampled here."""

    sequence_id: str
    length: int


class Datum(NamedTuple):
    tokens: Array
    inputs: Mapping[str, Array]
    sources: Sequence[TokenSource]  # of its targets that were sampled; empty: the client does not say


class PassRequest(Struct, frozen=True, kw_only=True, eq=False):
    loss_fn: str
    settings: Mapping[str, float | str]
    is_forward_only: bool
    data: Sequence[Datum]


def read_address(body: bytes) -> RequestAddress:
    """Raises `HttpError`."""
    try:
        fields = read_message(body)
        model_id, number = text_of(fields, 1), int_of(fields, 2)
    except ProtobufError as error:
        raise HttpError(422, f"the body is not a ForwardBackwardRequest: {error}") from error
    if not model_id or number < 1:
        raise HttpError(
            422, f"model_id = {model_id!r}, seq_id = {number}: expected a model, and a number of at least 1"
        )
    return RequestAddress(model_id=model_id, seq_id=number)


def read_pass(body: bytes) -> PassRequest:
    """Raises `HttpError`."""
    try:
        fields = read_message(body)
        data = [_datum(read_message(one)) for one in bytes_of(fields, 3)]
        settings = _settings(fields)
        loss_fn, is_forward_only = text_of(fields, 4), bool(int_of(fields, 6))
    except ProtobufError as error:
        raise HttpError(422, f"the body is not a ForwardBackwardRequest: {error}") from error
    if not data:
        raise HttpError(422, "the request has no data")
    return PassRequest(loss_fn=loss_fn, settings=settings, is_forward_only=is_forward_only, data=data)


def _settings(fields: MessageFields) -> dict[str, float | str]:
    """The second version of the map has texts as well; the first one repeats its numbers."""
    found: dict[str, float | str] = {}
    for entry in map(read_message, bytes_of(fields, 5)):
        found[text_of(entry, 1)] = double_of(entry, 2)
    for entry in map(read_message, bytes_of(fields, 7)):
        value = read_message((bytes_of(entry, 2) or [b""])[-1])
        found[text_of(entry, 1)] = text_of(value, 2) if 2 in value else double_of(value, 1)
    return found


def _datum(fields: MessageFields) -> Datum:
    chunks = [read_message(one) for one in bytes_of(fields, 1)]
    if any(1 not in chunk for chunk in chunks):
        raise HttpError(422, "a datum has a chunk of an image or of sound: expected encoded text")
    texts = [read_message(bytes_of(chunk, 1)[-1]) for chunk in chunks]
    tokens = [_array(part, DTYPES[3]) for text in texts for part in bytes_of(text, 1)]
    inputs = {}
    for entry in map(read_message, bytes_of(fields, 2)):
        inputs[text_of(entry, 1)] = _tensor(read_message((bytes_of(entry, 2) or [b""])[-1]))
    spans = [read_message(one) for one in bytes_of(fields, 4)]
    sampled = [read_message(bytes_of(span, 2)[-1]) for span in spans if 2 in span]
    return Datum(
        np.concatenate(tokens) if tokens else np.zeros(0, np.int32),
        inputs,
        [TokenSource(text_of(one, 1), int_of(one, 3)) for one in sampled],
    )


def _array(data: bytes, dtype: np.dtype[Any]) -> Array:
    if len(data) % dtype.itemsize:
        raise ProtobufError(f"{len(data)} bytes of {dtype}")
    return np.frombuffer(data, dtype)


def _tensor(fields: MessageFields) -> Array:
    """Dense: what a sparse one leaves out is 0."""
    kind, shape = int_of(fields, 3), ints_of(fields, 4)
    if kind not in DTYPES:
        raise ProtobufError(f"a tensor of dtype {kind}: expected float32, int64 or int32")
    if any(size < 0 for size in shape) or math.prod(shape) > MAX_CELLS:
        raise ProtobufError(f"a tensor of shape {shape}: expected at most {MAX_CELLS} entries")
    if 2 not in fields:
        values = _array(b"".join(bytes_of(fields, 1)[-1:]), DTYPES[kind])
        if shape and math.prod(shape) != len(values):
            raise ProtobufError(f"a tensor of shape {shape} with {len(values)} entries")
        return values.reshape(shape) if shape else values
    sparse = read_message(bytes_of(fields, 2)[-1])
    parts = (b"".join(bytes_of(sparse, number)[-1:]) for number in (1, 2, 3))
    values, rows, columns = (
        _array(part, dtype) for part, dtype in zip(parts, (DTYPES[kind], *[DTYPES[2]] * 2), strict=True)
    )
    is_whole = len(shape) == 2 and len(rows) == shape[0] + 1 and len(columns) == len(values)
    if not is_whole or rows[0] != 0 or rows[-1] != len(values) or (np.diff(rows) < 0).any():
        raise ProtobufError(f"a sparse tensor of shape {shape} whose indices do not fit")
    if len(columns) and not (columns.min() >= 0 and columns.max() < shape[1]):
        raise ProtobufError(f"a sparse tensor of shape {shape} with a column outside of it")
    dense: Array = np.zeros(shape, DTYPES[kind])
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense


class DataLimits(NamedTuple):
    vocabulary: int
    context: int


def row_of(number: int, datum: Datum, loss: ClientLoss, limits: DataLimits) -> DirectRow:
    """Raises `HttpError` for a datum that the loss cannot use."""
    what = f"datum {number}"
    length = len(datum.tokens)
    if not 1 <= length <= limits.context:
        raise HttpError(422, f"{what} has {length} tokens: expected 1 to {limits.context}, the model's context")
    needed = ("logprobs", "advantages", *loss.columns) if loss.is_sampled else ()
    others = loss.may_read if loss.is_sampled else ("weights",)
    found = datum.inputs
    if missing := [name for name in ("target_tokens", *needed) if name not in found]:
        raise HttpError(422, f"{what} has no {', '.join(missing)} in loss_fn_inputs")
    if strange := sorted(set(found) - {"target_tokens", *needed, *others}):
        known = ", ".join(("target_tokens", *needed, *others))
        raise HttpError(422, f"{what} has {', '.join(strange)} in loss_fn_inputs: this loss reads {known}")
    targets = found["target_tokens"]
    if targets.ndim not in (1, 2) or len(targets) != length or targets.dtype.kind != "i" or not targets.size:
        raise HttpError(
            422,
            f"{what}: target_tokens are {targets.dtype} of shape {targets.shape}, expected int64 of [{length}] or "
            f"[{length}, K]",
        )
    for name, tokens in (("tokens", datum.tokens), ("target_tokens", targets)):
        if tokens.min() < 0 or tokens.max() >= limits.vocabulary:
            raise HttpError(422, f"{what}: {name} has an id that is not in the vocabulary of {limits.vocabulary}")
    columns = {name: _column(what, name, found[name], targets.shape) for name in found if name != "target_tokens"}
    zeros = np.zeros(targets.size, np.float32)
    weights = columns.pop("advantages" if loss.is_sampled else "weights", zeros + 1)
    return DirectRow(
        tokens=datum.tokens.astype(np.int32),
        at=np.repeat(np.arange(length), targets.size // length),
        targets=targets.reshape(-1).astype(np.int64),
        advantages=weights,
        behaviour=columns.pop("logprobs", zeros),
        columns=columns,
    )


def _column(what: str, name: str, values: Array, shape: tuple[int, ...]) -> NDArray[np.float32]:
    if values.shape != shape:
        raise HttpError(422, f"{what}: {name} has the shape {values.shape}, expected that of target_tokens, {shape}")
    if not np.isfinite(values).all():
        raise HttpError(422, f"{what}: {name} has a number that is not finite")
    return values.reshape(-1).astype(np.float32)


def write_pass(scores: Sequence[RowScore], shapes: Sequence[tuple[int, ...]]) -> bytes:
    """A ForwardBackwardOutput. `shapes`: of each datum's targets."""
    records = []
    begin = 0
    while begin < len(scores):  # a record's tensors have the same K
        end = begin + 1
        while end < len(scores) and shapes[end][1:] == shapes[begin][1:]:
            end += 1
        records.append(_record([score.logprobs for score in scores[begin:end]], shapes[begin][1:]))
        begin = end
    entry = write_field(1, "loss:sum") + write_field(2, float(sum(score.loss for score in scores)))
    return write_field(1, "TorchLossReturn") + b"".join(write_field(2, one) for one in records) + write_field(3, entry)


def _record(logprobs: Sequence[NDArray[np.float32]], trailing: tuple[int, ...]) -> bytes:
    ends = np.cumsum([0, *(4 * len(one) for one in logprobs)]).astype("<i8")
    tensor = write_field(1, np.concatenate(logprobs).astype("<f4").tobytes()) + write_field(2, ends.tobytes())
    tensor += write_field(3, FLOAT32) + b"".join(write_field(4, size) for size in trailing)
    field = write_field(1, "logprobs") + write_field(2, tensor)
    return write_field(1, "TorchLossReturn") + write_field(2, field) + write_field(3, len(logprobs))


def write_samples(completions: Sequence[Completion], prompt_logprobs: Sequence[float] | None) -> bytes:
    """A SampleResponse."""
    made = b""
    for completion in completions:
        tokens = np.array(completion.tokens, "<i4").tobytes()
        logprobs = np.array(completion.logprobs, "<f4").tobytes()
        reason = STOP_REASONS[completion.finish]
        made += write_field(1, write_field(1, reason) + write_field(2, tokens) + write_field(3, logprobs))
    if prompt_logprobs is not None:
        made += write_field(2, np.array(prompt_logprobs, "<f4").tobytes())
    return made
