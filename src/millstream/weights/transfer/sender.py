"""The outbox's sender: a thread that sends a version to all who ask for it at about the same time, in one round.

It listens on one address, and hears nobody who does not begin with the token. It reads the slot as any reader does, so the
outbox may go on: what is being sent is not overwritten.
"""

from __future__ import annotations

import hmac
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from millstream.errors import WeightsError, WeightsSuperseded
from millstream.weights.transfer import WeightsRef
from millstream.weights.transfer.digests import spans
from millstream.weights.transfer.rounds import (
    TOKEN_BYTES,
    Ask,
    Backend,
    Begin,
    Done,
    Over,
    Peer,
    Refused,
    RoundFailed,
    broadcast,
    join,
    open_store,
)
from millstream.weights.transfer.slots import Held, hold

logger = logging.getLogger(__name__)
TOGETHER_S = 0.02
"""Whoever asks within this time of the first is in its round."""
GREETING_S = 5.0
CLOSE_S = 5.0
MAX_WAITING = 4096


class Asker(NamedTuple):
    talk: Peer
    serial: int


class Sender:
    """Rounds come one after the other; meanwhile others ask, and wait for the next."""

    def __init__(
        self,
        host: str,
        find: Callable[[int], WeightsRef | None],
        *,
        token: str,
        backend: Backend,
        device: torch.device,
        round_s: float,
    ) -> None:
        """`find`: what is staged under a serial number, if it still is."""
        self._host = host
        self._find = find
        self._token = token.encode()
        self._backend = backend
        self._device = device
        self._round_s = round_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listening = socket.create_server((host, 0), family=family, backlog=128)
        except OSError as error:
            raise WeightsError(f"cannot listen on {host} ({error}): `host` must be an address of this node") from error
        self.address: tuple[str, int] = (host, self._listening.getsockname()[1])
        self._asking: queue.Queue[Asker | None] = queue.Queue(MAX_WAITING)
        self._is_closing = False
        self._threads = [
            threading.Thread(target=target, name=f"weights {what}", daemon=True)
            for what, target in (("door", self._listen), ("rounds", self._work))
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Nobody is served any more. A round on its way may come to its end, for a while."""
        self._is_closing = True
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the one that accepts
        self._listening.close()
        self._asking.put(None)
        for thread in self._threads:
            thread.join(CLOSE_S)

    def _listen(self) -> None:
        while not self._is_closing:
            try:
                end, _ = self._listening.accept()
            except OSError:
                if not self._is_closing:
                    time.sleep(TOGETHER_S)  # out of descriptors, say
                continue
            threading.Thread(target=self._greet, args=(Peer(end),), name="weights greeting", daemon=True).start()

    def _greet(self, talk: Peer) -> None:
        """Before the token is right, nothing is read but as many bytes as it has."""
        try:
            talk.end.settimeout(GREETING_S)
            if not hmac.compare_digest(_exactly(talk.end, TOKEN_BYTES), self._token):
                talk.say(Refused(why="the token is not that of this outbox"))
                talk.close()
                return
            match talk.hear(GREETING_S):
                case Ask(serial=serial):
                    self._asking.put_nowait(Asker(talk, serial))
                case other:
                    raise RoundFailed(f"expected Ask, heard {type(other).__name__}")
        except (OSError, RoundFailed, queue.Full) as error:
            logger.info("somebody asked for weights and was not served: %s", error or type(error).__name__)
            talk.close()

    def _work(self) -> None:
        waiting: list[Asker] = []
        while not self._is_closing:
            if not waiting:
                waiting += self._next(None)
            until = time.monotonic() + TOGETHER_S
            while (left := until - time.monotonic()) > 0:
                waiting += self._next(left)
            together = [asker for asker in waiting if asker.serial == waiting[0].serial]
            waiting = [asker for asker in waiting if asker not in together]
            self._serve([asker for asker in together if _is_there(asker.talk.end)])
        while not self._asking.empty():
            waiting += self._next(0.0)
        for asker in waiting:
            asker.talk.close()

    def _next(self, timeout_s: float | None) -> list[Asker]:
        try:
            asker = self._asking.get(timeout=timeout_s)
        except queue.Empty:
            return []
        return [] if asker is None else [asker]

    def _serve(self, askers: Sequence[Asker]) -> None:
        """One round for those who ask for the same. Whatever becomes of it, the next one comes."""
        if not askers:
            return
        try:
            held, parcel = self._staged(askers[0].serial)
            try:
                self._round(parcel, held, [asker.talk for asker in askers])
            finally:
                held.release()
        except WeightsError as error:
            for asker in askers:
                with suppress(RoundFailed):
                    asker.talk.say(Refused(why=str(error), is_superseded=isinstance(error, WeightsSuperseded)))
        except (RoundFailed, RuntimeError, OSError) as error:
            logger.warning("a broadcast of weights to %d failed: %s", len(askers), str(error).splitlines()[0])
        finally:
            for asker in askers:
                asker.talk.close()

    def _staged(self, serial: int) -> tuple[Held, WeightsRef]:
        parcel = self._find(serial)
        if parcel is None:
            raise WeightsSuperseded("these weights are superseded by newer ones: fetch the newest")
        return hold(parcel), parcel

    def _round(self, parcel: WeightsRef, held: Held, talks: Sequence[Peer]) -> None:
        store, size = open_store(self._host, self._round_s), len(talks) + 1
        for rank, talk in enumerate(talks, 1):
            talk.say(Begin(rank=rank, size=size, port=store.port, timeout_s=self._round_s, backend=self._backend))
        group = join(store, 0, size, backend=self._backend, address=self._host, timeout_s=self._round_s)
        pieces = (held.bytes[begin:end] for begin, end in spans(parcel.num_bytes, parcel.bucket_bytes))
        if self._backend == "nccl":
            pieces = (piece.to(self._device) for piece in pieces)
        broadcast(group, pieces, lambda bucket, number: None)
        for talk in talks:
            if not isinstance(talk.hear(self._round_s), Done):
                raise RoundFailed("expected Done")
        logger.info("version %d went to %d in one broadcast", parcel.version, len(talks))
        for talk in talks:
            with suppress(RoundFailed):  # it has all that it asked for
                talk.say(Over())


def _exactly(end: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        if not (more := end.recv(num_bytes - len(found))):
            break
        found += more
    return found


def _is_there(end: socket.socket) -> bool:
    """Whether it is still connected. It has said all that it has to say, so there is something to read only if it is gone."""
    end.setblocking(False)
    try:
        end.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        end.settimeout(GREETING_S)
    return False
