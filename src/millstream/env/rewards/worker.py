"""python -m millstream.env.rewards.worker LINE: what a worker process runs. One call after the other, until the line closes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from millstream.env.rewards.call import is_coroutine, number, numbers, told
from millstream.env.rewards.find import bind, find
from millstream.env.rewards.pool import HEADER, Answer, Order, Plan
from millstream.errors import ConfigError, RewardFailed


def work(line: socket.socket) -> None:
    """The worker: until the line closes."""
    plan = msgspec.msgpack.decode(_receive(line) or b"", type=Plan)
    try:
        function = bind(find(plan.config.function), plan.config)
    except ConfigError as error:
        _send(line, Answer(failure=str(error)))
        return
    _send(line, Answer())  # ready
    own_id = os.getpid()
    while (order := _receive(line)) is not None:
        answer = _answer(function, plan, msgspec.msgpack.decode(order, type=Order))
        if os.getpid() != own_id:  # a child that the reward forked and that came back to us: it has no say
            os._exit(0)
        _send(line, answer)


def _answer(function: Callable[..., Any], plan: Plan, order: Order) -> Answer:
    name = plan.config.function
    try:
        value = function(order.task, order.said)
        if is_coroutine(function):
            value = asyncio.run(value)
        if isinstance(order.said, str):
            return Answer(values=(number(value, name),))
        return Answer(values=tuple(numbers(value, name, expected=len(order.said))))
    except RewardFailed as error:
        return Answer(failure=str(error))
    except Exception as error:  # the border to the user's code: told to the parent, who fails the rollout
        return Answer(failure=f"reward {name} {told(error)}")


def _end_with_parent() -> None:
    """The other end of our standard input is held by whoever started us, and by nobody else."""
    lifeline = os.dup(0)
    with open(os.devnull) as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)

    def watch() -> None:
        os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _receive(line: socket.socket) -> bytes | None:
    """A whole message; None when the other end is gone."""
    header = _exactly(line, HEADER)
    return None if header is None else _exactly(line, int.from_bytes(header, "little"))


def _exactly(line: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = line.recv(min(1 << 20, size - len(data)))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _send(line: socket.socket, answer: Answer) -> None:
    payload = msgspec.msgpack.encode(answer)
    line.sendall(len(payload).to_bytes(HEADER, "little") + payload)


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[1]), False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle; when it ends, the line closes
    _end_with_parent()
    work(socket.socket(fileno=int(sys.argv[1])))
