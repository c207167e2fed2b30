"""The worker's side of `rpc.call`: what runs in a process that a `Launcher` started.

    def work(connection: socket.socket) -> None:
        serve(Channel(connection), Setup, begin, Message)      # begin(setup) returns handler(message) -> value

    if __name__ == "__main__":
        main(work)

Guarantees: the process ends when the connection does, at once and whatever it is doing, with its whole process group. Calls are
handled one after the other in the order they were made; background calls beside them, one after the other too.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from msgspec import Raw

from millstream.rpc.call import CLOSE_S, Channel, Packet, PacketKind, decoder_of

Handler = Callable[[Any], Any]
Calls = queue.SimpleQueue[Packet]
CLOSE = Packet(PacketKind.CLOSE, 0, Raw(b""))


def end_process() -> None:
    """At once, with every process that it started."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def serve(
    channel: Channel,
    setup_type: Any,
    begin: Callable[[Any], Handler],
    messages: Any,
    *,
    is_background: Callable[[Any], bool] = lambda message: False,
    on_disconnect: Callable[[], None] = end_process,
) -> None:
    """The life of a worker: its setup, then calls until it is closed. Returns after the close, with every call answered, or
    when `begin` raised, which the other end then knows. `messages`: the type of what the handler gets."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    calls: Calls = queue.SimpleQueue()
    background: Calls = queue.SimpleQueue()

    def listen() -> None:
        while (packets := channel.receive(block=True)) is not None:
            for packet in packets:
                calls.put(packet)
        on_disconnect()
        calls.put(CLOSE)

    def handle(packet: Packet, message: Any) -> None:
        try:
            value = handler(message)
        except Exception as error:  # process boundary: the caller is told
            traceback.print_exc()
            if not packet.number:
                raise  # a message without an answer: its error ends the worker
            channel.fail(packet.number, error)
        else:
            if packet.number:
                channel.answer(packet.number, value)

    def handle_background() -> None:
        while (packet := background.get()).kind is not PacketKind.CLOSE:
            handle(packet, decoder_of(messages).decode(packet.body))

    threading.Thread(target=listen, name="calls", daemon=True).start()
    first = calls.get()
    if first.kind is PacketKind.CLOSE:
        return
    try:
        handler = begin(decoder_of(setup_type).decode(first.body))
    except Exception as error:  # process boundary: the other end is told why there is no worker
        traceback.print_exc()
        channel.fail(first.number, error)
        channel.drain(CLOSE_S)
        return
    channel.answer(first.number, None)
    beside = threading.Thread(target=handle_background, name="background calls", daemon=True)
    beside.start()
    while (packet := calls.get()).kind is not PacketKind.CLOSE:
        message = decoder_of(messages).decode(packet.body)
        if is_background(message):
            background.put(packet)
        else:
            handle(packet, message)
    background.put(CLOSE)
    beside.join(CLOSE_S)
    channel.drain(CLOSE_S)


def main(work: Callable[[socket.socket], None]) -> None:
    """Of `python -m MODULE DESCRIPTOR`. Interrupts are the starter's to handle: when it ends, the connection closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(int(sys.argv[1]), False)
    work(socket.socket(fileno=int(sys.argv[1])))
    sys.stderr.flush()
    os._exit(0)  # at once: a library's threads may keep an interpreter from exiting


def exit_if_blocked(limit_s: float) -> None:
    """End this process when its interpreter runs no thread for `limit_s`: an extension that holds the interpreter's lock also
    keeps the listener from noticing that the connection is closed."""

    def beat() -> None:
        while True:
            faulthandler.dump_traceback_later(limit_s, exit=True)
            time.sleep(limit_s / 4)

    threading.Thread(target=beat, name="interpreter watchdog", daemon=True).start()
