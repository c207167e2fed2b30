"""A worker for the tests of `millstream.rpc`: does what its messages say."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from millstream.errors import ConfigError, WeightsSuperseded
from millstream.rpc.call import Channel
from millstream.rpc.serve import serve_calls


class WorkerSetup(Struct):
    refuses: str = ""
    exits: int = 0
    sleeps_s: float = 0.0


class Do(Struct, tag=True):
    what: str
    argument: Any = None


class CountUp(Struct, tag=True):
    """To be answered by the other end: one more."""

    number: int


def about_itself() -> dict[str, Any]:
    """What a freshly started process has of its own."""
    status = Path("/proc/self/status").read_text()
    return {
        "group": os.getpgid(0) == os.getpid(),
        "folder": os.getcwd(),  # noqa: PTH109
        "environment": dict(os.environ),
        "path": sys.path,
        "stdin": os.read(0, 1),
        "random": [random.random(), float(np.random.random())],
        "handlers": [
            signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
            signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL,
        ],
        "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd")),  # noqa: PTH208
        "name": status.splitlines()[0].partition(":")[2].strip(),
    }


def begin_with(channel: Channel) -> Callable[[WorkerSetup], Callable[[Do], Any]]:
    done: list[Any] = []

    def begin(setup: WorkerSetup) -> Callable[[Do], Any]:
        time.sleep(setup.sleeps_s)
        if setup.exits:
            os._exit(setup.exits)
        if setup.refuses:
            raise ConfigError(setup.refuses)
        return handle

    def handle(message: Do) -> Any:
        argument = message.argument
        match message.what:
            case "echo":
                return argument
            case "pid":
                return os.getpid()
            case "self":
                return about_itself()
            case "read":
                return os.pread(argument, 100, 0)
            case "note":
                done.append(argument)
            case "noted":
                return done
            case "sleep" | "write":
                time.sleep(argument)
            case "object" | "write object":
                return object()
            case "superseded":
                raise WeightsSuperseded(argument)
            case "full disk":
                raise OSError(28, "No space left on device")
            case "bug":
                raise ZeroDivisionError(argument)
            case "die":
                print(argument, file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            case "event":
                channel.send(Do("event", argument))
            case "count":
                return channel.call(CountUp(argument), int).result(10.0)
            case "garbage":
                channel._connection.sendall(b"\xff" * 64)  # type: ignore[union-attr]
                time.sleep(60)
            case "spawn":
                return subprocess.Popen(["sleep", "600"]).pid
            case "end child":
                with subprocess.Popen(["sleep", "600"]) as child:
                    child.send_signal(argument)
                    return child.wait()
            case "end fork":
                pid = os.fork()
                if pid == 0:
                    time.sleep(600)
                    os._exit(0)
                os.kill(pid, argument)
                return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            case "orphan":  # a child that keeps the connection open
                if os.fork() == 0:
                    time.sleep(600)
                os._exit(5)
        return None

    return begin


def serve_test(connection: socket.socket) -> None:
    channel = Channel(connection)
    serve_calls(
        channel, WorkerSetup, begin_with(channel), Do, is_background=lambda message: message.what.startswith("write")
    )
