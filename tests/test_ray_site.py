"""A run on Ray is the run that it is on one machine. `make test-ray`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.frames import Frames, frame
from runs import assert_clean

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

RECIPE = """
seed = 0
[model.tiny]
hidden = 32
[data]
toy = "sort_digits"
size = 2000
holdout = 16
[warmup]
learning_rate = 2e-3
max_steps = 80
check_every = 80
[engine]
slots = 64
[rollout]
group_size = 4
max_tokens = 8
[pipeline]
steps = 6
groups_per_step = 4
max_lag = 0
[algorithm]
loss = "ppo"
[learner]
learning_rate = 4e-4
"""


def train(folder: Path, name: str, *changes: str) -> Path:
    recipe, run = folder / "recipe.toml", folder / name
    recipe.write_text(RECIPE)
    changes = (*changes, f"run_dir={run}")
    words = [sys.executable, "-m", "millstream.cli.main", "train", str(recipe)]
    words += [word for change in changes for word in ("--set", change)]
    subprocess.run(words, check=True, timeout=500, stdout=subprocess.DEVNULL)
    assert_clean(run)
    return run


def test_with_max_lag_0_a_run_on_ray_has_the_weights_of_a_local_one_bit_for_bit(tmp_path: Path) -> None:
    local, ray = train(tmp_path, "local"), train(tmp_path, "ray", "runtime=ray")
    assert (local / "model/model.safetensors").read_bytes() == (ray / "model/model.safetensors").read_bytes()


def test_whoever_calls_without_a_ticket_is_hung_up_on_and_a_ticket_is_good_once() -> None:
    from millstream.runtime.cluster import Switchboard
    from millstream.runtime.seat import Hello

    board = Switchboard("127.0.0.1")
    coming = board.expect("secret")

    def call(message: bytes) -> socket.socket:
        line = socket.create_connection(("127.0.0.1", board.port), timeout=10)
        line.sendall(message)
        return line

    strangers = [call(frame(Hello("guess", os.getpid(), "n"))), call(b"GET / HTTP/1.1\r\n\r\n"), call(frame(["x"]))]
    strangers[1].shutdown(socket.SHUT_WR)
    assert [Frames(line).first() for line in strangers] == [None, None, None]
    assert not coming.done()
    call(frame(Hello("secret", 7, "n")))
    _, hello = coming.result(10)
    assert hello.pid == 7
    assert Frames(call(frame(Hello("secret", 8, "n")))).first() is None
    board.close()
