"""The training service beside the learner that it drives: what HTTP, the journal and the event log add to a training step, and
what two clients get who train adapters on one base.

A step is a forward_backward with `cross_entropy` and an optim_step on adapters. *Directly*: the learner, in this process, with
rows that are ready. *Over HTTP*: `millstream serve-training` in a process of its own, one step after the other, each from the
client's bytes to the bytes of both results; *in flight*: four steps ahead of the results, as clients do. Model and rows are the
same; the model has random weights.

    .venv/bin/python bench/training_service.py [--json] [--smoke] [--shape 474M --device cuda] [--rows 64] [--tokens 512]
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine import SHAPES, config_of
from internals_torch import (
    AdamSettings,
    DataLimits,
    LoraConfig,
    base_of,
    build_model,
    loss_named,
    model_of,
    read_pass,
    row_of,
    save_model,
    word_tokenizer,
    write_field,
)
from millstream import EngineConfig, LearnerConfig, ModelConfig
from report import ROOT, Options, Row, alone, cost, publish, rate, say

KEYS = ("tml-one", "tml-two")
ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
IN_FLIGHT = 4
WARM_UP = 3


def data_of(rows: int, tokens: int, words: int) -> bytes:
    """The data and the loss of a ForwardBackwardRequest: rows of random tokens, without what addresses it."""
    rng, made = np.random.default_rng(0), b""
    for _ in range(rows):
        text = rng.integers(3, words, tokens + 1)
        chunk = write_field(1, write_field(1, text[:-1].astype("<i4").tobytes()))
        tensor = write_field(1, text[1:].astype("<i8").tobytes()) + write_field(3, 2) + write_field(4, tokens)
        made += write_field(
            3, write_field(1, chunk) + write_field(2, write_field(1, "target_tokens") + write_field(2, tensor))
        )
    return made + write_field(4, "cross_entropy")


def directly(folder: Path, options: argparse.Namespace, data: bytes) -> float:
    """Seconds of a step, the median."""
    model, tokenizer = build_model(ModelConfig(path=str(folder), device=options.device), seed=0)
    engine = EngineConfig(slots=8, process=False)
    base = base_of(model, tokenizer, name="base", path=str(folder), engine=engine, learner=LearnerConfig())
    targets = tuple(sorted(base.attention_layers + base.mlp_layers))
    learner = base.make_learner(LoraConfig(rank=options.rank, targets=targets), 0)
    kind, loss = loss_named("cross_entropy", {})
    limits = DataLimits(base.vocabulary, base.context)
    rows = [row_of(number, datum, kind, limits) for number, datum in enumerate(read_pass(data).data)]
    adam = AdamSettings(ADAM["learning_rate"], ADAM["beta1"], ADAM["beta2"], ADAM["eps"], 0.0, float("inf"))

    async def measure() -> float:
        times = []
        for _ in range(WARM_UP + options.steps):
            began = time.perf_counter()
            await learner.forward_backward(rows, loss)
            await learner.step_with(adam)
            times.append(time.perf_counter() - began)
        await learner.close()
        return statistics.median(times[WARM_UP:])

    return asyncio.run(measure())


class Client:
    """One key, one session, one model."""

    def __init__(self, port: int, key: str, rank: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        self._key = key
        self._number = 0
        session = self._post("create_session", {})["session_id"]
        made = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": "base",
            "lora_config": {"rank": rank, "seed": 0},
        }
        self._model = self._post("create_model", made)["model_id"]

    def _send(self, path: str, body: bytes, kind: str) -> bytes:
        self._connection.request("POST", f"/api/v1/{path}", body, {"x-api-key": self._key, "content-type": kind})
        answer = self._connection.getresponse()
        found = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{path}: {answer.status} {found[:300].decode(errors='replace')}")
        return found

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return json.loads(self._send(path, json.dumps(body).encode(), "application/json"))

    def ask(self, data: bytes) -> list[str]:
        """A step: the ids of its two results."""
        head = write_field(1, self._model) + write_field(2, self._number + 1)
        passed = json.loads(self._send("forward_backward", head + data, "application/x-protobuf"))
        self._number += 2
        step = {"model_id": self._model, "seq_id": self._number, "adam_params": ADAM}
        return [passed["request_id"], self._post("optim_step", step)["request_id"]]

    def wait(self, names: list[str]) -> None:
        for name in names:
            body = json.dumps({"request_id": name}).encode()
            while (found := self._send("retrieve_future", body, "application/json")).startswith(b'{"type":"try_again"'):
                pass
            if found.startswith(b'{"error"'):
                raise SystemExit(found.decode())

    def step_s(self, data: bytes, steps: int) -> float:
        """One after the other: the median."""
        times = []
        for _ in range(WARM_UP + steps):
            began = time.perf_counter()
            self.wait(self.ask(data))
            times.append(time.perf_counter() - began)
        return statistics.median(times[WARM_UP:])

    def train(self, data: bytes, steps: int) -> None:
        waiting: deque[list[str]] = deque()
        for _ in range(steps):
            waiting.append(self.ask(data))
            if len(waiting) == IN_FLIGHT:
                self.wait(waiting.popleft())
        while waiting:
            self.wait(waiting.popleft())


@contextmanager
def serving(model: Path, folder: Path, device: str) -> Iterator[int]:
    """The port of a service in a process of its own."""
    words = ["-m", "millstream.cli.main", "serve-training", str(model), "--name", "base", "--folder", str(folder)]
    process = subprocess.Popen(
        [sys.executable, *words, "--port", "0", "--device", device],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "MILLSTREAM_TOKEN": ",".join(KEYS)},
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        line = next((line for line in process.stdout if "is trained at" in line), "")
        if not line:
            raise SystemExit("the service did not start")
        yield int(line.rsplit(":", 1)[1].strip().rstrip("/"))
    finally:
        process.terminate()
        process.wait()


def steps_per_s(clients: Sequence[Client], data: bytes, steps: int) -> float:
    """Of all together, each with its steps in flight."""
    with ThreadPoolExecutor(len(clients)) as pool:
        began = time.perf_counter()
        for future in [pool.submit(client.train, data, steps) for client in clients]:
            future.result()
        return len(clients) * steps / (time.perf_counter() - began)


def measure(options: argparse.Namespace) -> list[Row]:
    shape = SHAPES[options.shape]
    what = f"{options.shape}, {options.rows} rows of {options.tokens} tokens, rank {options.rank}"
    data = data_of(options.rows, options.tokens, shape.words)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
        words = [f"w{number}" for number in range(shape.words - 3)]
        save_model(model_of(config_of(shape), device=options.device, dtype=dtype), word_tokenizer(words), folder)
        learner_s = directly(folder, options, data)
        say(f"directly: {1000 * learner_s:.2f} ms a step")
        with serving(folder, Path(name) / "service", options.device) as port:
            one, two = (Client(port, key, options.rank) for key in KEYS)
            service_s = one.step_s(data, options.steps)
            two.step_s(data, 1)
            single = steps_per_s([one], data, options.steps)
            both = steps_per_s([one, two], data, options.steps)
    peer, overhead = "the learner, called directly", 100 * (service_s / learner_s - 1)
    return [
        cost(what, "a step over HTTP, ms", 1000 * service_s, peer, 1000 * learner_s),
        alone(what, "what the service adds to a step, %", overhead, digits=1),
        cost(what, f"a step over HTTP with {IN_FLIGHT} in flight, ms", 1000 / single, peer, 1000 * learner_s),
        rate(what, "steps/s of two clients together", both, "one client", single),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    options = Options(__doc__)
    is_gpu = torch.cuda.is_available()
    options.add("--shape", "474M" if is_gpu else "tiny", help=f"of the model: {', '.join(SHAPES)}")
    options.add("--device", "cuda" if is_gpu else "cpu", help="cuda or cpu")
    options.add("--rows", 64 if is_gpu else 16, smoke=2, help="of a step")
    options.add("--tokens", 512 if is_gpu else 128, smoke=16, help="of a row")
    options.add("--rank", 32 if is_gpu else 8, help="of the adapters")
    options.add("--steps", 20, smoke=2, help="that are measured")
    chosen = options.parse(argv)
    publish(measure(chosen), chosen)


if __name__ == "__main__":
    main()
