"""The worker's side of `rpc.call`: what runs in a process that a `Launcher` started.

    def serve_rank(connection: socket.socket) -> None:          # launched as "package.module:serve_rank"
        serve_calls(Channel(connection), Setup, begin, Message)  # begin(setup) returns handler(message) -> value

Guarantees: the process ends when the connection does, at once and whatever it is doing, with its whole process group. Calls are
handled one after the other in the order they were made; background calls in parallel to them, one after the other too.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from msgspec import Raw

from millstream.decoding import msgpack_decoder
from millstream.errors import MillstreamError
from millstream.rpc.call import CLOSE_S, Channel, Packet, PacketKind

Handler = Callable[[Any], Any]
Jobs = queue.SimpleQueue[Packet]
CLOSE = Packet(PacketKind.CLOSE, 0, Raw(b""))


def end_process() -> None:
    """At once, with every process that it started."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def write_stacks_on_signal() -> None:
    """SIGUSR1 writes the stack of the main thread at once, also in a call that never returns to Python, and those of all
    threads when it is back in Python: to read the stacks of threads that run ends the process now and then."""
    signal.signal(signal.SIGUSR1, lambda *_: faulthandler.dump_traceback(all_threads=True))
    faulthandler.register(signal.SIGUSR1, all_threads=False, chain=True)


def serve_calls(
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
    jobs: Jobs = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, jobs, on_disconnect), name="calls", daemon=True).start()
    first = jobs.get()
    if first.kind is PacketKind.CLOSE:
        return
    try:
        handler = begin(msgpack_decoder(setup_type).decode(first.body))
    except Exception as error:  # process boundary: the other end gets the reason
        _fail(channel, first, error)
    else:
        channel.answer(first.number, None)
        _handle_all(channel, jobs, msgpack_decoder(messages).decode, handler, is_background)
    channel.drain(CLOSE_S)


def refuse_setup(connection: socket.socket, error: Exception) -> None:
    """The whole life of a worker that cannot be: its setup is answered with the reason."""
    channel = Channel(connection)
    packets: list[Packet] | None = []
    while packets == []:
        packets = channel.receive(block=True)
    if packets and packets[0].number:
        _fail(channel, packets[0], error)
    channel.drain(CLOSE_S)


def _listen(channel: Channel, jobs: Jobs, on_disconnect: Callable[[], None]) -> None:
    """Until the connection ends, or brings something that is not a packet: the worker ends with it either way."""
    try:
        while (packets := channel.receive(block=True)) is not None:
            for packet in packets:
                jobs.put(packet)
    except Exception:  # thread boundary: stderr has the reason
        traceback.print_exc()
    finally:
        on_disconnect()
        jobs.put(CLOSE)


def _handle_all(
    channel: Channel, jobs: Jobs, decode: Callable[[bytes], Any], handler: Handler, is_background: Callable[[Any], bool]
) -> None:
    """Until the close. Background calls are handled by a thread of their own."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="background calls") as background:
        while (packet := jobs.get()).kind is not PacketKind.CLOSE:
            try:
                message = decode(packet.body)
            except msgspec.ValidationError as error:  # not a message for this worker
                _fail(channel, packet, error)
                continue
            if is_background(message):
                background.submit(_handle, channel, packet, message, handler)
            else:
                _handle(channel, packet, message, handler)


def _handle(channel: Channel, packet: Packet, message: Any, handler: Handler) -> None:
    try:
        value = handler(message)
        if packet.number:
            channel.answer(packet.number, value)
    except Exception as error:  # process boundary: the caller gets the error
        _fail(channel, packet, error)


def _fail(channel: Channel, packet: Packet, error: Exception) -> None:
    """An error of a one-way message ends the worker: no caller would get it."""
    if not isinstance(error, MillstreamError | OSError):  # their text says it all
        traceback.print_exception(error)
    if not packet.number:
        raise error
    channel.fail(packet.number, error)


def exit_with(connection: socket.socket) -> None:
    """Blocks until the connection is closed, and ends this process. For a thread of a worker that may not read for a while."""
    closed = select.poll()
    closed.register(connection, getattr(select, "POLLRDHUP", 0x2000) | select.POLLHUP | select.POLLERR)
    closed.poll()
    sys.stderr.flush()
    end_process()


def exit_if_blocked(limit_s: float) -> None:
    """End this process when its interpreter runs no thread for `limit_s`: an extension that holds the interpreter's lock also
    keeps the listener from noticing that the connection is closed."""

    def beat() -> None:
        while True:
            faulthandler.dump_traceback_later(limit_s, exit=True)
            time.sleep(limit_s / 4)

    threading.Thread(target=beat, name="interpreter watchdog", daemon=True).start()
