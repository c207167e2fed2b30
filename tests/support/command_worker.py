"""The other side of `support.commands`: what an interpreter does with its arguments, in a process that is forked from one that has
imported this module, and with it what almost every run imports."""

from __future__ import annotations

import atexit
import functools
import os
import resource
import runpy
import signal
import socket
import sys
import threading
import weakref
from pathlib import Path
from types import ModuleType

import pydantic.types  # noqa: F401
import rich.live  # noqa: F401
import tomlkit  # noqa: F401
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
import typer.main

import millstream.audit
import millstream.cli.main
import millstream.events.bias
import millstream.run.env_check
import millstream.run.run
import millstream.store.host
from millstream.cli.common import console, errors
from millstream.rpc.forkserver import ForkServer
from millstream.rpc.frames import Frames
from millstream.run import garbage
from support.commands import CommandSetup

garbage.count_frozen = lambda: 1_000_000  # the warm process has frozen what it has imported: no run has to count it
for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
    finalizer.atexit = False  # torch takes its tables of operations apart, which takes 45 ms and changes nothing
typer.main.get_params_from_function = functools.cache(typer.main.get_params_from_function)
typer.main.get_command(millstream.cli.main.app)  # the parameters of all commands, which take longer to find than to use


def serve_command(connection: socket.socket) -> None:
    setup = Frames(connection).first_as(CommandSetup)
    assert setup is not None
    connection.close()
    if setup.stdin is not None:
        os.dup2(setup.stdin, 0)
    os.dup2(setup.stdout, 1)
    os.dup2(setup.stderr, 2)
    for descriptor in {setup.stdin, setup.stdout, setup.stderr} - {None, 0, 1, 2}:
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for shown, options in ((console, {}), (errors, {"stderr": True})):
        shown.__init__(**options)  # type: ignore[misc]  # they have looked at the streams and variables of the warm process
    if setup.max_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (setup.max_file_bytes, setup.max_file_bytes))
    code = 1
    try:
        _run(setup.words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    _end(code)


def _run(words: list[str]) -> None:
    """As `python` does."""
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, str(Path.cwd()))
        sys.modules.pop(words[1], None)  # it is run, and not the one that is imported
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


def _end(code: int) -> None:
    """As an interpreter ends, up to what it does to its memory. Negative: by that signal."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve_forks(connection: socket.socket) -> None:
    """A warm process of one test, forked from that of all: its workers are found below it."""
    path = Frames(connection).first_as(str)
    assert path is not None
    server = ForkServer(path, owner=connection.fileno())
    connection.sendall(b"\n")
    server.run()
