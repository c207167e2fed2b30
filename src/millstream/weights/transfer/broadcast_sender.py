"""The transport "broadcast", publisher's side: a thread that sends a version to all receivers that ask at about the same time.

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
from typing import NamedTuple

import msgspec

from millstream.errors import WeightsError, WeightsSuperseded
from millstream.weights.transfer.base import StagedVersion, StageOptions, TransportStage, WeightsRef
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
    broadcast_buckets,
    join_group,
    open_group_store,
)
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


class BroadcastStage(TransportStage):
    """Runs the sender. Rounds come one after another; meanwhile other receivers wait for the next."""

    needs_host_copy = True

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
                case FetchRequest(serial=serial):
                    self._receivers.put_nowait(Receiver(peer, serial))
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
            together = [receiver for receiver in waiting if receiver.serial == waiting[0].serial]
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

    def _send(self, ref: WeightsRef, locked: LockedSlot, peers: Sequence[Peer]) -> None:
        options = self._options
        store, size = open_group_store(options.host, options.round_s), len(peers) + 1
        for rank, peer in enumerate(peers, 1):
            peer.send(
                RoundStart(rank=rank, size=size, port=store.port, timeout_s=options.round_s, backend=options.backend)
            )
        group = join_group(store, 0, size, backend=options.backend, address=options.host, timeout_s=options.round_s)
        buckets = (locked.bytes[begin:end] for begin, end in bucket_spans(ref.num_bytes, ref.bucket_bytes))
        if options.backend == "nccl":
            buckets = (bucket.to(options.device) for bucket in buckets)
        broadcast_buckets(group, buckets, lambda bucket, number: None)
        for peer in peers:
            if not isinstance(peer.receive(options.round_s), Received):
                raise RoundFailed("expected Received")
        logger.info("version %d went to %d in one broadcast", ref.version, len(peers))
        for peer in peers:
            with suppress(RoundFailed):  # it has all that it asked for
                peer.send(RoundOver())


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
