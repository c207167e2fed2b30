"""The training service, killed while clients train: what was acknowledged is there, and nothing counts twice."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from millstream.audit import audit_service
from millstream.model.load import save_model
from millstream.run.build import build_model
from millstream.run.config import ModelConfig, TinyConfig
from support.commands import Command, start_command
from support.lazy import lazy_module
from support.ports import free_port

tinker = lazy_module("tinker")
types = lazy_module("tinker.types")
NUM_KILLS = 20
NUM_STEPS = 400
KEY = "tml-a-key-of-a-test"


def data(step: int) -> list[Any]:
    tokens = [3 + (step * 7 + offset) % 20 for offset in range(9)]
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 8}
    return [types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)]


def served(folder: Path, port: int) -> Command:
    words = [
        "-m",
        "millstream.cli.main",
        "serve-training",
        str(folder / "model"),
        "--name",
        "tiny",
        "--port",
        str(port),
    ]
    command = start_command([sys.executable, *words, "--folder", str(folder / "kept"), "--device", "cpu"])
    assert command.stdout is not None
    assert any("is trained at" in line for line in iter(command.stdout.readline, ""))
    return command


def train(url: str, ledger: list[float]) -> list[float]:
    """Four steps in flight. The ledger has the version of every step that was acknowledged; the end is the model's."""
    client = tinker.ServiceClient(base_url=url, api_key=KEY).create_lora_training_client(
        base_model="tiny", rank=4, seed=3
    )
    waiting = []
    for step in range(NUM_STEPS):
        client.forward_backward(data(step), "cross_entropy")
        waiting.append(client.optim_step(types.AdamParams(learning_rate=1e-3)))
        if len(waiting) == 4:
            ledger.append(waiting.pop(0).result().metrics["version"])
    ledger += [future.result().metrics["version"] for future in waiting]
    (found,) = client.forward(data(0), "cross_entropy").result().loss_fn_outputs
    return list(found["logprobs"].data)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_service_that_is_killed_under_load_loses_no_acknowledged_step_and_repeats_none(tmp_path: Path) -> None:
    model, tokenizer = build_model(ModelConfig(tiny=TinyConfig(hidden=32, heads=2), device="cpu"), seed=0)
    save_model(model, tokenizer, tmp_path / "model")
    port, ledger, ends = free_port(), list[float](), list[list[float]]()
    command = served(tmp_path, port)
    client = threading.Thread(target=lambda: ends.append(train(f"http://127.0.0.1:{port}", ledger)))
    client.start()
    moments, num_kills = random.Random(0), 0
    while client.is_alive() and not ledger:  # the client does not repeat `create_model` for as long as a restart takes
        time.sleep(0.05)
    while client.is_alive() and num_kills < NUM_KILLS:
        time.sleep(moments.uniform(0.2, 2.0))
        command.send_signal(signal.SIGKILL)
        command.wait()
        command = served(tmp_path, port)
        num_kills += 1
    client.join()
    undisturbed: list[float] = []
    expected = train(f"http://127.0.0.1:{port}", undisturbed)
    command.send_signal(signal.SIGTERM)
    command.wait()
    assert ledger == undisturbed == [float(version) for version in range(1, NUM_STEPS + 1)]
    assert ends == [expected] and num_kills == NUM_KILLS
    found = audit_service(tmp_path / "kept")
    assert found.is_clean, found.findings
