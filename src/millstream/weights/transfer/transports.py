"""The table of transports, the nearest first."""

from __future__ import annotations

from typing import NamedTuple

from millstream.weights.base import TransferWay
from millstream.weights.transfer.base import TransportFetch, TransportStage
from millstream.weights.transfer.broadcast import BroadcastFetch, NcclFetch
from millstream.weights.transfer.broadcast_sender import BroadcastStage, NcclStage
from millstream.weights.transfer.device import IpcFetch, IpcStage
from millstream.weights.transfer.files import FilesFetch, FilesStage
from millstream.weights.transfer.shared import SharedFetch, SharedStage


class Transport(NamedTuple):
    stage: type[TransportStage]
    fetch: type[TransportFetch]


TRANSPORTS: dict[TransferWay, Transport] = {
    "ipc": Transport(IpcStage, IpcFetch),
    "shared": Transport(SharedStage, SharedFetch),
    "nccl": Transport(NcclStage, NcclFetch),
    "broadcast": Transport(BroadcastStage, BroadcastFetch),
    "files": Transport(FilesStage, FilesFetch),
}
