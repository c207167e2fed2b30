"""A round of a broadcast: the sender and those who asked for the same weights, in a process group that lives as long as it.

What is said around it goes over a socket that begins with the outbox's token: `Ask`, then `Begin` or `Refused`, then the
buckets in the group, then `Done` from everyone who has them all, then `Over`: nobody leaves while others still receive through
it. Whoever dies closes its sockets, those next to it fail and close theirs, and so on: a death ends the round for all, mostly
at once. Whoever hangs ends it after the time limit, as does a death that gloo does not notice.

The token guards the asking. The group's own connections have none; they are open while a round lasts, on the same addresses.
The group is made of torch's classes directly. The default group is not touched: it is the learner's.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Literal

import msgspec
from msgspec import Struct
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore

from millstream.rpc.frames import Frames, frame

Backend = Literal["gloo", "nccl"]
TOKEN_BYTES = 32


class Ask(Struct, frozen=True, tag=True):
    serial: int


class Begin(Struct, frozen=True, tag=True, kw_only=True):
    rank: int
    size: int
    port: int
    """Of the store at which the group meets, on the sender's host."""
    timeout_s: float
    backend: Backend


class Refused(Struct, frozen=True, tag=True, kw_only=True):
    why: str
    is_superseded: bool = False


class Done(Struct, frozen=True, tag=True): ...


class Over(Struct, frozen=True, tag=True): ...


Message = Ask | Begin | Refused | Done | Over


class RoundFailed(Exception):
    """Somebody in it died or hangs: those who live may ask again."""


class Peer:
    """Messages to one other, over its socket."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._frames = Frames(end)
        self._decoder = msgspec.msgpack.Decoder(Message)
        self._heard: list[bytes] = []

    def say(self, message: Message) -> None:
        try:
            self.end.sendall(frame(message))
        except OSError as error:
            raise RoundFailed(f"the other end is gone ({error})") from error

    def hear(self, timeout_s: float) -> Message:
        self.end.settimeout(max(timeout_s, 0.001))
        if not self._heard:
            self._heard = self._frames.receive(block=True) or []
        if not self._heard:
            raise RoundFailed("the other end is gone, or said nothing in time")
        try:
            message: Message = self._decoder.decode(self._heard.pop(0))
        except msgspec.DecodeError as error:
            raise RoundFailed(f"the other end said something else ({error})") from error
        return message

    def close(self) -> None:
        self.end.close()


def open_store(host: str, timeout_s: float) -> TCPStore:
    """Where a group meets. It listens on this address alone, unlike the class left to itself."""
    listening = socket.create_server((host, 0), family=_family(host))
    port = listening.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listening.detach(),
    )


def join(store: Store, rank: int, size: int, *, backend: Backend, address: str, timeout_s: float) -> Any:
    """A member of the group, when all are there. `address`: of this node, for the others.

    NCCL differs in this function and in where the tensors are. It has never been run across GPUs.
    """
    inside, limit = PrefixStore("weights", store), timedelta(seconds=timeout_s)
    if backend == "nccl":
        from torch._C._distributed_c10d import ProcessGroupNCCL

        nccl = ProcessGroupNCCL.Options()
        nccl._timeout = limit
        return ProcessGroupNCCL(inside, rank, size, nccl)
    gloo: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = limit
    gloo._devices = [ProcessGroupGloo.create_device(hostname=address)]
    return ProcessGroupGloo(inside, rank, size, gloo)


def broadcast(group: Any, buckets: Iterable[Tensor], on_arrival: Callable[[Tensor, int], None]) -> None:
    """From rank 0 to all, one after the other; while one is looked at, the next is on its way.

    Raises `RuntimeError` if somebody is gone.
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


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
