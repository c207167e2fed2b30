"""The transports "broadcast" and "nccl", publisher's side: a thread that sends a version to all receivers that ask at about the
same time.

It listens on one address, and ignores requests without the token. It locks the slot as any reader does, so that the publisher
can continue: weights that are being sent are not overwritten.
"""

from __future__ import annotations

import hmac
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from millstream.errors import WeightsError, WeightsSuperseded
from millstream.weights.transfer.base import StagedCopy, StagedVersion, StageOptions, TransportStage, WeightsRef
from millstream.weights.transfer.broadcast import (
    BroadcastOffer,
    FetchRefused,
    FetchRequest,
    Peer,
    Received,
    RoundFailed,
    RoundOver,
    RoundStart,
    address_family,
    backend_of,
    broadcast_buckets,
    join_group,
    open_group_store,
    why_no_nccl,
)
from millstream.weights.transfer.device_memory import gpu_of, own_stream
from millstream.weights.transfer.digests import bucket_spans
from millstream.weights.transfer.slots import LockedSlot, lock_slot

logger = logging.getLogger(__name__)
TOGETHER_S = 0.02
"""Receivers that ask within this time of the first are in the same round."""
FETCH_REQUEST_S = 5.0
SENDER_CLOSE_S = 5.0
MAX_WAITING = 4096


class Receiver(NamedTuple):
    peer: Peer
    serial: int
    gpu: str  # empty: it receives in the host's memory


class BroadcastStage(TransportStage):
    """Runs the sender. Rounds come one after another; meanwhile other receivers wait for the next."""

    copy: StagedCopy = "host"
    gpu = ""  # that it sends from

    def __init__(self, options: StageOptions) -> None:
        super().__init__(options)
        host = options.host
        self._token = secrets.token_hex(16)
        try:
            self._listening = socket.create_server((host, 0), family=address_family(host), backlog=128)
        except OSError as error:
            raise WeightsError(f"cannot listen on {host} ({error}): `host` must be an address of this node") from error
        offer = BroadcastOffer(host=host, port=self._listening.getsockname()[1], token=self._token)
        self._offer = msgspec.msgpack.encode(offer)
        self._receivers: queue.Queue[Receiver | None] = queue.Queue(MAX_WAITING)
        self._is_closing = False
        self._threads = [
            threading.Thread(target=target, name=f"weights {what}", daemon=True)
            for what, target in (("listener", self._listen), ("rounds", self._send_rounds))
        ]
        for thread in self._threads:
            thread.start()

    def stage(self, staged: StagedVersion) -> bytes:
        return self._offer

    def close(self) -> None:
        """No receiver is served any more. A round in progress may finish, for `SENDER_CLOSE_S`."""
        self._is_closing = True
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listening.close()
        self._receivers.put(None)
        for thread in self._threads:
            thread.join(SENDER_CLOSE_S)

    def _listen(self) -> None:
        while not self._is_closing:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                if not self._is_closing:
                    time.sleep(TOGETHER_S)  # such as out of file descriptors
                continue
            threading.Thread(target=self._greet, args=(Peer(connection),), name="weights request", daemon=True).start()

    def _greet(self, peer: Peer) -> None:
        try:
            match peer.receive(FETCH_REQUEST_S):
                case FetchRequest(token=token) if not hmac.compare_digest(token.encode(), self._token.encode()):
                    peer.send(FetchRefused(reason="the token is not that of this publisher"))
                    peer.close()
                case FetchRequest(gpu=gpu) if gpu and gpu == self.gpu:
                    peer.send(FetchRefused(reason=f"both ends use GPU {gpu}, which NCCL does not allow"))
                    peer.close()
                case FetchRequest(serial=serial, gpu=gpu):
                    self._receivers.put_nowait(Receiver(peer, serial, gpu))
                case other:
                    raise RoundFailed(f"expected FetchRequest, received {type(other).__name__}")
        except (OSError, RoundFailed, queue.Full) as error:
            logger.info("a request for weights was not served: %s", error or type(error).__name__)
            peer.close()

    def _send_rounds(self) -> None:
        waiting: list[Receiver] = []
        while not self._is_closing:
            if not waiting:
                waiting += self._next(None)
            until = time.monotonic() + TOGETHER_S
            while (left := until - time.monotonic()) > 0:
                waiting += self._next(left)
            together = one_round(waiting)
            waiting = [receiver for receiver in waiting if receiver not in together]
            self._serve([receiver for receiver in together if _is_connected(receiver.peer.connection)])
        while not self._receivers.empty():
            waiting += self._next(0.0)
        for receiver in waiting:
            receiver.peer.close()

    def _next(self, timeout_s: float | None) -> list[Receiver]:
        try:
            receiver = self._receivers.get(timeout=timeout_s)
        except queue.Empty:
            return []
        return [] if receiver is None else [receiver]

    def _serve(self, receivers: Sequence[Receiver]) -> None:
        """One round for receivers of the same version. A failure does not affect the next round."""
        if not receivers:
            return
        try:
            ref = self._options.find(receivers[0].serial)
            if ref is None:
                raise WeightsSuperseded("these weights are superseded by newer ones: fetch the newest")
            locked = lock_slot(ref)
            try:
                self._send(ref, locked, [receiver.peer for receiver in receivers])
            finally:
                locked.release()
        except WeightsError as error:
            refused = FetchRefused(reason=str(error), is_superseded=isinstance(error, WeightsSuperseded))
            for receiver in receivers:
                with suppress(RoundFailed):
                    receiver.peer.send(refused)
        except (RoundFailed, RuntimeError, OSError) as error:
            logger.warning("a broadcast of weights to %d failed: %s", len(receivers), str(error).splitlines()[0])
        finally:
            for receiver in receivers:
                receiver.peer.close()

    @property
    def _device(self) -> torch.device:
        """That it sends from."""
        return torch.device("cpu")

    def _source(self, ref: WeightsRef, locked: LockedSlot) -> Tensor:
        """The bytes of a version, which stay as they are while its slot is locked."""
        return locked.bytes

    def _send(self, ref: WeightsRef, locked: LockedSlot, peers: Sequence[Peer]) -> None:
        options, source, device = self._options, self._source(ref, locked), self._device
        backend = backend_of(device)
        store, size = open_group_store(options.host, options.round_s), len(peers) + 1
        for rank, peer in enumerate(peers, 1):
            peer.send(RoundStart(rank=rank, size=size, port=store.port, timeout_s=options.round_s, backend=backend))
        with own_stream(device):
            group = join_group(store, 0, size, backend=backend, address=options.host, timeout_s=options.round_s)
            spans = bucket_spans(ref.num_bytes, ref.bucket_bytes)
            buckets = (source[begin:end].to(device) for begin, end in spans)
            broadcast_buckets(group, buckets, lambda bucket, number: None)
        for peer in peers:
            if not isinstance(peer.receive(options.round_s), Received):
                raise RoundFailed("expected Received")
        logger.info("version %d went to %d in one broadcast", ref.version, len(peers))
        for peer in peers:
            with suppress(RoundFailed):  # it has all that it asked for
                peer.send(RoundOver())


class NcclStage(BroadcastStage):
    """Sends from the copy on the device. Where there is one on the host only, since another transport needs it, each bucket is
    brought to the device: another copy of the whole model would take memory from the learner."""

    copy: StagedCopy = "either"

    def __init__(self, options: StageOptions) -> None:
        device = options.buffers.device
        if why := why_no_nccl(device):
            raise WeightsError(
                f'resources.weights has "nccl", and it does not work here ({why}): use "shared" on one node, "broadcast" '
                "between nodes"
            )
        if device.type == "cuda":
            self.gpu = gpu_of(torch.cuda.current_device() if device.index is None else device.index)
        super().__init__(options)

    @property
    def _device(self) -> torch.device:
        return self._options.buffers.device

    def _source(self, ref: WeightsRef, locked: LockedSlot) -> Tensor:
        found = self._options.buffers.find(Path(ref.path))
        return locked.bytes if found is None else found.bytes


def one_round(waiting: Sequence[Receiver]) -> list[Receiver]:
    """Those that ask for the same version as the first. Of receivers on one GPU only the first."""
    asked = [receiver for receiver in waiting if receiver.serial == waiting[0].serial]
    seen = [receiver.gpu for receiver in asked]
    return [one for number, one in enumerate(asked) if not one.gpu or one.gpu not in seen[:number]]


def _is_connected(connection: socket.socket) -> bool:
    """A receiver sends nothing while it waits: its socket is readable only if it is gone."""
    connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        connection.settimeout(FETCH_REQUEST_S)
    return False
