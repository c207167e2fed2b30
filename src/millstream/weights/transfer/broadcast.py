"""The transports "broadcast" and "nccl", fetching side and protocol: a publisher sends one version to several receivers in one
round. They differ in where the bytes are at both ends: in the host's memory (gloo), or on a GPU (NCCL).

A round is a process group of the sender and the receivers that asked for the same version; it exists as long as the round. The
messages around it go over a socket to the sender: `FetchRequest` with the publisher's token, then `RoundStart` or
`FetchRefused`, then the buckets within the group, then `Received` from each receiver that has all of them, then `RoundOver`: no
process leaves while others still receive through it. A process that dies closes its sockets, its neighbours fail and close
theirs, and so on: a death ends the round for all, mostly at once. A process that hangs ends it after the time limit, as does a
death that gloo does not notice.

The token guards the request. The group's own connections have none; they are open while a round lasts, on the same addresses.
The group is made of torch's classes directly. The default group is not touched: it is the learner's.

Not run across GPUs: `_nccl_group`. All else is tested over gloo, "nccl" with both ends' devices set to the CPU.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed
from msgspec import Struct, structs
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, HashStore, PrefixStore, ProcessGroupGloo, Store, TCPStore

from millstream.decoding import decode_msgpack, msgpack_decoder
from millstream.errors import WeightsSuperseded, WeightsUnreachable
from millstream.model.shared_memory import views_of
from millstream.retry import BackOff, Retry
from millstream.rpc.frames import FrameError, Frames, frame
from millstream.weights.base import TransferWay
from millstream.weights.transfer.base import BroadcastBackend, FetchedWeights, FetchOptions, WeightsRef
from millstream.weights.transfer.device_memory import gpu_of, own_stream
from millstream.weights.transfer.digests import bucket_spans, verify_bucket

logger = logging.getLogger(__name__)
RETRY = BackOff(first_s=0.05, longest_s=1.0)
MAX_MESSAGE_BYTES = 4096
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
NCCL_TRY_S = 20.0
"""For a version to arrive by NCCL, before the next way is tried."""
SPARE_BYTES = 2 << 30
"""Of a GPU that stay free where a whole version arrives on it: for NCCL's own buffers, and for what the engine computes."""


class BroadcastOffer(Struct, frozen=True, kw_only=True):
    host: str
    port: int
    token: str


class FetchRequest(Struct, frozen=True, tag=True):
    token: str
    serial: int
    gpu: str = ""
    """The UUID of the GPU that receives; empty: the host's memory does. NCCL has each GPU in a group once."""


class RoundStart(Struct, frozen=True, tag=True, kw_only=True):
    rank: int
    size: int
    port: int
    """Of the TCP store at which the group meets, on the sender's host."""
    timeout_s: float
    backend: BroadcastBackend


class FetchRefused(Struct, frozen=True, tag=True, kw_only=True):
    reason: str
    is_superseded: bool = False


class Received(Struct, frozen=True, tag=True): ...


class RoundOver(Struct, frozen=True, tag=True): ...


PeerMessage = FetchRequest | RoundStart | FetchRefused | Received | RoundOver


class RoundFailed(Exception):
    """A process of the round died or hangs: the others may ask again."""


class Peer:
    """Messages to and from one other process."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._frames = Frames(connection, MAX_MESSAGE_BYTES)
        self._decoder = msgpack_decoder(PeerMessage)

    def send(self, message: PeerMessage) -> None:
        try:
            self.connection.sendall(frame(message))
        except OSError as error:
            raise RoundFailed(f"the other end is gone ({error})") from error

    def receive(self, timeout_s: float) -> PeerMessage:
        self.connection.settimeout(max(timeout_s, 0.001))
        try:
            data = self._frames.first()
        except FrameError as error:
            raise RoundFailed(str(error)) from error
        if data is None:
            raise RoundFailed("the other end is gone, or did not answer in time")
        try:
            message: PeerMessage = self._decoder.decode(data)
        except msgspec.DecodeError as error:
            raise RoundFailed(f"the other end sent something else ({error})") from error
        return message

    def close(self) -> None:
        self.connection.close()


# ---- the process group of a round ------------------------------------------------------------------------------------


def open_group_store(host: str, timeout_s: float) -> TCPStore:
    """Where a group meets. It listens on this address alone, unlike the class by default."""
    listening = socket.create_server((host, 0), family=address_family(host))
    port = listening.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listening.detach(),
    )


def join_group(store: Store, rank: int, size: int, *, backend: BroadcastBackend, address: str, timeout_s: float) -> Any:
    """Returns the group when all are there. `address`: of this node, for the others."""
    inside, limit = PrefixStore("weights", store), timedelta(seconds=timeout_s)
    if backend == "nccl":
        return _nccl_group(inside, rank, size, limit)
    gloo: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = limit
    gloo._devices = [ProcessGroupGloo.create_device(hostname=address)]
    return ProcessGroupGloo(inside, rank, size, gloo)


def _nccl_group(store: Store, rank: int, size: int, limit: timedelta) -> Any:
    """One whose waits raise when the limit is over. Otherwise torch would end the process."""
    from torch._C._distributed_c10d import ProcessGroupNCCL

    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"  # read by the constructor; other groups of this process keep their own setting
    try:
        options = ProcessGroupNCCL.Options()
        options._timeout = limit
        return ProcessGroupNCCL(store, rank, size, options)
    finally:
        if before is None:
            del os.environ[BLOCKING_WAIT]
        else:
            os.environ[BLOCKING_WAIT] = before


def why_no_nccl(device: torch.device) -> str:
    """Why no group of NCCL can be made here; empty if one can, of this process alone. A device that is no GPU has gloo."""
    if device.type == "cuda" and not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return "torch sees no GPU here, or has no NCCL"
    try:
        group = join_group(HashStore(), 0, 1, backend=backend_of(device), address="127.0.0.1", timeout_s=NCCL_TRY_S)
        broadcast_buckets(group, [torch.zeros(8, dtype=torch.uint8, device=device)], lambda bucket, number: None)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def backend_of(device: torch.device) -> BroadcastBackend:
    return "nccl" if device.type == "cuda" else "gloo"


def broadcast_buckets(group: Any, buckets: Iterable[Tensor], on_arrival: Callable[[Tensor, int], None]) -> None:
    """From rank 0 to all, one after another; while one is checked, the next is sent.

    Raises `RuntimeError` if a process of the group is gone.
    """
    options = BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    before: tuple[Any, Tensor, int] | None = None
    for number, bucket in enumerate(buckets):
        work = group.broadcast([bucket], options)
        if before is not None:
            _arrive(*before, on_arrival)
        before = (work, bucket, number)
    if before is not None:
        _arrive(*before, on_arrival)


def _arrive(work: Any, bucket: Tensor, number: int, on_arrival: Callable[[Tensor, int], None]) -> None:
    work.wait()
    on_arrival(bucket, number)


def address_family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


# ---- fetching --------------------------------------------------------------------------------------------------------


class ReceiveBuffer(NamedTuple):
    """Where a version arrives."""

    flat: Tensor
    bounce: tuple[Tensor, ...] = ()
    """Two buckets that the group writes to, one after the other, if `flat` is elsewhere. Empty: it writes to `flat`."""


class BroadcastFetch:
    """Receives into memory of its own, which is reused after a release. A round that fails is repeated until the timeout."""

    way: TransferWay = "broadcast"
    gpu = ""

    def __init__(self, options: FetchOptions) -> None:
        self._timeout_s = options.timeout_s
        self._free: list[ReceiveBuffer] = []
        self._lock = threading.Lock()

    def can_fetch(self, ref: WeightsRef) -> bool:
        return True

    def fetch(self, ref: WeightsRef) -> FetchedWeights:
        buffer = self._find_memory(ref)  # before a sender waits for it in a round
        request = FetchRequest(offer_in(ref, self.way).token, ref.serial, self.gpu)
        deadline = time.monotonic() + self._timeout_s
        receive(ref, self.way, request, buffer, deadline=deadline)  # after a failure the memory is not reused
        return FetchedWeights(ref, self.way, views_of(buffer.flat, ref.layout), lambda: self._free.append(buffer))

    def _find_memory(self, ref: WeightsRef) -> ReceiveBuffer:
        with self._lock:
            for index, buffer in enumerate(self._free):
                if len(buffer.flat) == ref.num_bytes:
                    return self._free.pop(index)
            self._free.clear()
        return self._allocate(ref)

    def _allocate(self, ref: WeightsRef) -> ReceiveBuffer:
        return ReceiveBuffer(torch.empty(ref.num_bytes, dtype=torch.uint8))


class NcclFetch(BroadcastFetch):
    """Receives on the GPU, all of a version if `SPARE_BYTES` are still free then. Otherwise it arrives in the host's memory,
    through two buckets on the GPU. After a first try that fails, and whenever there is no memory, it is not tried
    again: the next transport is used from then on."""

    way: TransferWay = "nccl"

    def __init__(self, options: FetchOptions) -> None:
        super().__init__(structs.replace(options, timeout_s=min(options.timeout_s, NCCL_TRY_S)))
        self._device = options.device
        self._is_usable: bool | None = None  # None: not known yet

    def can_fetch(self, ref: WeightsRef) -> bool:
        if self._is_usable is None and self._device.type == "cuda":
            self._is_usable = None if torch.cuda.is_available() and torch.distributed.is_nccl_available() else False
        return self._is_usable is not False

    def fetch(self, ref: WeightsRef) -> FetchedWeights:
        if self._device.type == "cuda":
            self.gpu = gpu_of(torch.cuda.current_device() if self._device.index is None else self._device.index)
        try:
            with own_stream(self._device):
                found = super().fetch(ref)
        except WeightsUnreachable:
            self._is_usable = self._is_usable or False
            if not self._is_usable and self._device.type == "cuda":
                torch.cuda.empty_cache()  # of a buffer that is not needed any more
            raise
        self._is_usable = True
        return found

    def _allocate(self, ref: WeightsRef) -> ReceiveBuffer:
        if self._has_room(ref.num_bytes):
            with suppress(torch.OutOfMemoryError):  # what was free may be in use by now
                return ReceiveBuffer(torch.empty(ref.num_bytes, dtype=torch.uint8, device=self._device))
        try:
            bucket_bytes = min(ref.bucket_bytes, ref.num_bytes)
            bounce = [torch.empty(bucket_bytes, dtype=torch.uint8, device=self._device) for _ in range(2)]
            return ReceiveBuffer(host_buffer(ref.num_bytes, is_pinned=self._device.type == "cuda"), tuple(bounce))
        except RuntimeError as error:
            self._is_usable = False
            raise WeightsUnreachable(
                f"no memory was had for the {ref.num_bytes / 1e9:.1f} GB of a version, neither on {self._device} nor in the "
                f"host's memory ({str(error).splitlines()[0]})"
            ) from error

    def _has_room(self, num_bytes: int) -> bool:
        return self._device.type != "cuda" or num_bytes + SPARE_BYTES <= torch.cuda.mem_get_info(self._device)[0]


def host_buffer(num_bytes: int, *, is_pinned: bool) -> Tensor:
    """Pinned: a GPU copies to and from it at full speed. torch's own pinned memory would be rounded up to a power of two."""
    flat = torch.empty(num_bytes, dtype=torch.uint8)
    if is_pinned:
        cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(cuda.cudaHostRegister(flat.data_ptr(), num_bytes, 0))
        weakref.finalize(flat, cuda.cudaHostUnregister, flat.data_ptr()).atexit = False
    return flat


def offer_in(ref: WeightsRef, way: TransferWay) -> BroadcastOffer:
    return decode_msgpack(ref.offers[way], BroadcastOffer)


def receive(
    ref: WeightsRef, way: TransferWay, request: FetchRequest, buffer: ReceiveBuffer, *, deadline: float
) -> None:
    """All bytes, verified where they have landed.

    Raises `WeightsUnreachable` if the sender is gone or refuses, `WeightsSuperseded` if it has newer weights in their place.
    """
    retry = Retry(RETRY)
    while True:
        try:
            return _receive_once(ref, offer_in(ref, way), request, buffer, deadline)
        except RoundFailed as failure:
            reason, wait_s = str(failure), retry.failed(time.monotonic()) or 0.0
        if time.monotonic() + wait_s > deadline:
            raise WeightsUnreachable(f"the last broadcast failed ({reason}), and the time is over")
        logger.warning("a broadcast of version %d failed (%s): asking again", ref.version, reason)
        time.sleep(wait_s)


def _receive_once(
    ref: WeightsRef, offer: BroadcastOffer, request: FetchRequest, buffer: ReceiveBuffer, deadline: float
) -> None:
    peer = _connect(ref, offer, deadline)
    try:
        peer.send(request)
        match peer.receive(deadline - time.monotonic()):
            case RoundStart() as start:
                _take_part(ref, offer, start, buffer, peer)
            case FetchRefused(reason=reason, is_superseded=is_superseded):
                raise (
                    WeightsSuperseded(reason) if is_superseded else WeightsUnreachable(f"the sender refused: {reason}")
                )
            case other:
                raise RoundFailed(f"expected RoundStart, received {type(other).__name__}")
    finally:
        peer.close()


def _connect(ref: WeightsRef, offer: BroadcastOffer, deadline: float) -> Peer:
    try:
        timeout_s = max(deadline - time.monotonic(), 0.001)
        return Peer(socket.create_connection((offer.host, offer.port), timeout=timeout_s))
    except OSError as error:
        raise WeightsUnreachable(
            f"no sender at {offer.host}:{offer.port} ({error}): node {ref.node}, or its publisher, is gone"
        ) from error


def _take_part(ref: WeightsRef, offer: BroadcastOffer, start: RoundStart, buffer: ReceiveBuffer, peer: Peer) -> None:
    try:
        store = TCPStore(offer.host, start.port, is_master=False, timeout=timedelta(seconds=start.timeout_s))
        group = join_group(
            store,
            start.rank,
            start.size,
            backend=start.backend,
            address=peer.connection.getsockname()[0],
            timeout_s=start.timeout_s,
        )
        _receive_buckets(group, ref, buffer)
    except RuntimeError as error:
        raise RoundFailed(str(error).splitlines()[0]) from error
    try:
        peer.send(Received())
        peer.receive(start.timeout_s)  # others may receive through this process until the round is over
    except RoundFailed as failure:
        logger.info("the broadcast of version %d failed for others: %s", ref.version, failure)


def _receive_buckets(group: Any, ref: WeightsRef, buffer: ReceiveBuffer) -> None:
    spans, bounce = bucket_spans(ref.num_bytes, ref.bucket_bytes), buffer.bounce
    places = [buffer.flat[begin:end] for begin, end in spans]
    # of two bounce buffers, one is copied and verified while the other one is written
    received = (bounce[number % 2][: len(place)] if bounce else place for number, place in enumerate(places))

    def arrive(bucket: Tensor, number: int) -> None:
        if bounce:
            places[number].copy_(bucket)
        verify_bucket(places[number], number, ref)

    broadcast_buckets(group, received, arrive)
