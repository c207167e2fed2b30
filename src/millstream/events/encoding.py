"""Events as JSON, which can always be written."""

from __future__ import annotations

from typing import Any

import msgspec

from millstream.decoding import json_decoder
from millstream.events.types import (
    CheckpointFailed,
    CheckpointSealed,
    ConfigWritten,
    DraftsChecked,
    Evaluated,
    EvaluationStarted,
    Event,
    FindingEnded,
    FindingMade,
    GroupAdmitted,
    GroupLeft,
    GroupRestarted,
    GroupResumed,
    GroupScored,
    GroupTaken,
    LagMoved,
    LearnerRestarted,
    MicroBatchLowered,
    PathChosen,
    ReplicaJoined,
    ReplicaLeft,
    Resumed,
    RolloutAborted,
    RolloutEnded,
    RolloutFailed,
    RolloutSpan,
    RolloutStarted,
    RunBranched,
    RunEnded,
    RunStarted,
    SampleShown,
    SessionDropped,
    SettingChanged,
    SizesChosen,
    Span,
    Stalled,
    Status,
    Stepped,
    StopRequested,
    WarmedUp,
    WarmupSealed,
    Warned,
    WeightsLoaded,
    WeightsPublished,
    WorkerStarted,
)

AnyEvent = (
    ConfigWritten
    | SettingChanged
    | LagMoved
    | RunBranched
    | SizesChosen
    | RunStarted
    | Resumed
    | GroupAdmitted
    | GroupResumed
    | RolloutStarted
    | RolloutEnded
    | RolloutFailed
    | RolloutSpan
    | RolloutAborted
    | GroupRestarted
    | GroupScored
    | GroupTaken
    | GroupLeft
    | Stepped
    | WeightsPublished
    | WeightsLoaded
    | ReplicaLeft
    | ReplicaJoined
    | WorkerStarted
    | PathChosen
    | MicroBatchLowered
    | LearnerRestarted
    | Span
    | DraftsChecked
    | Stalled
    | Status
    | WarmedUp
    | WarmupSealed
    | SampleShown
    | EvaluationStarted
    | Evaluated
    | CheckpointSealed
    | CheckpointFailed
    | Warned
    | SessionDropped
    | FindingMade
    | FindingEnded
    | StopRequested
    | RunEnded
)
_encoder = msgspec.json.Encoder()
_decoder = json_decoder(AnyEvent)


def encode_event(event: Event) -> bytes:
    return encode_json(event)


def decode_event(line: bytes | str) -> AnyEvent:
    event: AnyEvent = _decoder.decode(line)
    return event


def encode_json(value: Any) -> bytes:
    """Never fails on text: what is not Unicode (half a character from a subprocess) becomes a question mark."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        return _encoder.encode(_in_unicode(msgspec.to_builtins(value)))


def _in_unicode(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_in_unicode(key): _in_unicode(item) for key, item in value.items()}
    return [_in_unicode(item) for item in value] if isinstance(value, list | tuple) else value
