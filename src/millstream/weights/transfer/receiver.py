"""A receiver's part in broadcasts: it asks until a round brings all of it."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from datetime import timedelta

from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from millstream.errors import WeightsSuperseded, WeightsUnreachable
from millstream.weights.transfer import WeightsRef
from millstream.weights.transfer.digests import check, spans
from millstream.weights.transfer.rounds import Ask, Backend, Begin, Done, Peer, Refused, RoundFailed, broadcast, join

logger = logging.getLogger(__name__)
AGAIN_S = 0.05


def receive(parcel: WeightsRef, memory: Callable[[Backend], Tensor], *, deadline: float) -> Tensor:
    """The verified bytes, in the memory that is given for them: on the host for gloo, on a device for NCCL.

    A round that fails is followed by the next, until the deadline. Raises `WeightsUnreachable` if the sender is gone or
    refuses, `WeightsSuperseded` if it has something newer in their place.
    """
    while True:
        try:
            return _round(parcel, memory, deadline)
        except RoundFailed as failure:
            why = str(failure)
        if time.monotonic() + AGAIN_S > deadline:
            raise WeightsUnreachable(f"the last broadcast failed ({why}), and the time is over")
        logger.warning("a broadcast of version %d failed (%s): asking again", parcel.version, why)
        time.sleep(AGAIN_S)


def _round(parcel: WeightsRef, memory: Callable[[Backend], Tensor], deadline: float) -> Tensor:
    talk = _call(parcel, deadline)
    try:
        talk.say(Ask(parcel.serial))
        match talk.hear(deadline - time.monotonic()):
            case Begin() as begin:
                flat = memory(begin.backend)
                _take_part(parcel, begin, flat, talk)
                return flat
            case Refused(why=why, is_superseded=is_superseded):
                raise WeightsSuperseded(why) if is_superseded else WeightsUnreachable(f"the sender refused: {why}")
            case other:
                raise RoundFailed(f"expected Begin, heard {type(other).__name__}")
    finally:
        talk.close()


def _call(parcel: WeightsRef, deadline: float) -> Peer:
    assert parcel.sender is not None
    try:
        end = socket.create_connection(parcel.sender, timeout=max(deadline - time.monotonic(), 0.001))
        end.sendall(parcel.token.encode())
    except OSError as error:
        host, port = parcel.sender
        raise WeightsUnreachable(
            f"no sender at {host}:{port} ({error}): node {parcel.node}, or its outbox, is gone"
        ) from error
    return Peer(end)


def _take_part(parcel: WeightsRef, begin: Begin, flat: Tensor, talk: Peer) -> None:
    assert parcel.sender is not None
    try:
        store = TCPStore(parcel.sender[0], begin.port, is_master=False, timeout=timedelta(seconds=begin.timeout_s))
        group = join(
            store,
            begin.rank,
            begin.size,
            backend=begin.backend,
            address=talk.end.getsockname()[0],
            timeout_s=begin.timeout_s,
        )
        buckets = (flat[start:end] for start, end in spans(parcel.num_bytes, parcel.bucket_bytes))
        broadcast(group, buckets, lambda bucket, number: check(bucket, number, parcel))
    except RuntimeError as error:
        raise RoundFailed(str(error).splitlines()[0]) from error
    try:
        talk.say(Done())
        talk.hear(begin.timeout_s)  # others may receive through us until it is over
    except RoundFailed as failure:
        logger.info("the broadcast of version %d failed for others: %s", parcel.version, failure)
