"""What tests run as commands (`support.commands`) is what `python` would have run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import Command, run_command, start_command
from support.processes import is_alive, workers

PROGRAM = """
import atexit, os, sys, threading
atexit.register(print, "the last words")
threading.Timer(0.05, print, ["a thread is waited for"]).start()
print(__name__, sys.argv[1:], os.getcwd(), os.environ["MILLSTREAM_TEST"])
print("to stderr", file=sys.stderr)
"""


@pytest.mark.parametrize(
    "end", ["", "sys.exit(3)", "sys.exit('a message')", "raise ValueError(4)", "os.kill(os.getpid(), 9)"]
)
def test_a_command_does_and_returns_what_an_interpreter_does_and_returns(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MILLSTREAM_TEST", "of the test")
    Path("program.py").write_text(PROGRAM + end)
    for words in (["program.py", "a b", "c"], ["-m", "program", "a b"], ["-c", PROGRAM + end, "a b"]):
        ours = run_command([sys.executable, *words])
        theirs = subprocess.run([sys.executable, *words], capture_output=True, text=True)
        assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout)
        assert ours.stderr.splitlines()[-1:] == theirs.stderr.splitlines()[-1:]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, -15), (signal.SIGINT, -2)])
def test_a_signal_reaches_it_as_it_would_reach_an_interpreter(number: signal.Signals, code: int) -> None:
    process = start_command([sys.executable, "-c", "import time; print('there', flush=True); time.sleep(60)"])
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    assert os.getpgid(process.pid) == process.pid and process.poll() is None
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == code and not is_alive(process.pid)
    assert ("KeyboardInterrupt" in output) == (number == signal.SIGINT)


def test_a_command_has_the_streams_and_the_limit_that_it_is_given(tmp_path: Path) -> None:
    program = (
        "import sys; print(sys.stdin.read() == ''); f = open(sys.argv[1], 'wb', 0); f.write(bytes(1000)); f.write(b'1')"
    )
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        words = [sys.executable, "-c", program, str(tmp_path / "large")]
        assert Command(words, out.fileno(), err.fileno(), max_file_bytes=1000).wait(20) == 1
    assert (tmp_path / "out").read_text() == "True\n" and "File too large" in (tmp_path / "err").read_text()


@pytest.mark.usefixtures("own_warm_process")
def test_the_workers_of_a_command_are_found() -> None:
    program = """
import time
from millstream.rpc.process import LocalLauncher
launch = LocalLauncher(is_warm=True).launch
workers = [launch("learner", "support.rpc_worker:serve_test", name="a worker") for _ in range(2)]
print(*(worker.pid for worker in workers), flush=True)
time.sleep(60)
"""
    process = start_command([sys.executable, "-c", program])
    assert process.stdout is not None
    assert process.stdout.readline().split() == [str(pid) for pid in workers(process.pid)]
    process.kill()
    process.wait(20)
