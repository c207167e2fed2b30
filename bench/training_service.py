"""The training service beside the trainer that it drives: what HTTP, the journal and the event log add to a training step, what
two clients get who train adapters on one base, and what one gets while another has 200 requests in the queue.

A step is a forward_backward with `cross_entropy` and an optim_step on adapters. *Directly*: the trainer, in this process, with
rows that are ready. *Over HTTP*: `millstream serve-training` in a process of its own, one request after the other, from the
bytes of a request to those of its result; *in flight*: four steps ahead of the results, as clients do. Model and rows are the
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
from typing import Any, NamedTuple

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
IDLE_S = 2.0  # a connection that was not used for longer is not used again
WARM_UP = 3
GREEDY_STEPS = 100  # that a greedy client asks for at once


class StepTimes(NamedTuple):
    """Seconds, medians."""

    forward_backward: float
    step: float  # with the optimizer step


def medians(times: Sequence[tuple[float, float, float]]) -> StepTimes:
    """Of each step: when it began, when its pass was done, when it was done."""
    passes, steps = zip(*((passed - began, done - began) for began, passed, done in times), strict=True)
    return StepTimes(statistics.median(passes), statistics.median(steps))


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


def directly(folder: Path, options: argparse.Namespace, data: bytes) -> StepTimes:
    model, tokenizer = build_model(ModelConfig(path=str(folder), device=options.device), seed=0)
    engine = EngineConfig(slots=8, process=False)
    base = base_of(model, tokenizer, name="base", path=str(folder), engine=engine, learner=LearnerConfig())
    targets = tuple(sorted(base.attention_layers + base.mlp_layers))
    trainer = base.make_trainer(LoraConfig(rank=options.rank, targets=targets), 0)
    kind, loss = loss_named("cross_entropy", {})
    limits = DataLimits(base.vocabulary, base.context)
    rows = [row_of(number, datum, kind, limits) for number, datum in enumerate(read_pass(data).data)]
    adam = AdamSettings(ADAM["learning_rate"], ADAM["beta1"], ADAM["beta2"], ADAM["eps"], 0.0, float("inf"))

    async def measure() -> StepTimes:
        times = []
        for _ in range(WARM_UP + options.steps):
            began = time.perf_counter()
            await trainer.forward_backward(rows, loss)
            passed = time.perf_counter()
            await trainer.step_with(adam)
            times.append((began, passed, time.perf_counter()))
        await trainer.close()
        return medians(times[WARM_UP:])

    return asyncio.run(measure())


class Client:
    """One key, one session, one model."""

    def __init__(self, port: int, key: str, rank: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        self._key = key
        self._number = 0
        self._used_at = time.monotonic()
        session = self._post("create_session", {})["session_id"]
        made = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": "base",
            "lora_config": {"rank": rank, "seed": 0},
        }
        self._model = self._post("create_model", made)["model_id"]

    def _send(self, path: str, body: bytes, kind: str) -> bytes:
        if time.monotonic() - self._used_at > IDLE_S:
            self._connection.close()  # the service may have closed it, too; the request opens it again
        self._connection.request("POST", f"/api/v1/{path}", body, {"x-api-key": self._key, "content-type": kind})
        answer = self._connection.getresponse()
        found = answer.read()
        self._used_at = time.monotonic()
        if answer.status != 200:
            raise SystemExit(f"{path}: {answer.status} {found[:300].decode(errors='replace')}")
        return found

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return json.loads(self._send(path, json.dumps(body).encode(), "application/json"))

    def ask_pass(self, data: bytes) -> str:
        """The id of its result."""
        self._number += 1
        head = write_field(1, self._model) + write_field(2, self._number)
        asked: str = json.loads(self._send("forward_backward", head + data, "application/x-protobuf"))["request_id"]
        return asked

    def ask_step(self) -> str:
        self._number += 1
        step = {"model_id": self._model, "seq_id": self._number, "adam_params": ADAM}
        asked: str = self._post("optim_step", step)["request_id"]
        return asked

    def wait(self, name: str) -> None:
        body = json.dumps({"request_id": name}).encode()
        while (found := self._send("retrieve_future", body, "application/json")).startswith(b'{"type":"try_again"'):
            pass
        if found.startswith(b'{"error"'):
            raise SystemExit(found.decode())

    def measure(self, data: bytes, steps: int, warm_up: int = WARM_UP) -> StepTimes:
        """One request after the other."""
        times = []
        for _ in range(warm_up + steps):
            began = time.perf_counter()
            self.wait(self.ask_pass(data))
            passed = time.perf_counter()
            self.wait(self.ask_step())
            times.append((began, passed, time.perf_counter()))
        return medians(times[warm_up:])

    def ask(self, data: bytes, steps: int) -> None:
        """Without waiting for a result."""
        for _ in range(steps):
            self.ask_pass(data)
            self.ask_step()

    def train(self, data: bytes, steps: int) -> None:
        waiting: deque[str] = deque()
        for _ in range(steps):
            waiting += [self.ask_pass(data), self.ask_step()]
            while len(waiting) > 2 * (IN_FLIGHT - 1):
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
        own = directly(folder, options, data)
        say(f"directly: {1000 * own.step:.2f} ms a step")
        with serving(folder, Path(name) / "service", options.device) as port:
            one, two = (Client(port, key, options.rank) for key in KEYS)
            served = one.measure(data, options.steps)
            two.measure(data, 1)
            single = steps_per_s([one], data, options.steps)
            both = steps_per_s([one, two], data, options.steps)
            one.ask(data, GREEDY_STEPS)
            beside = two.measure(data, 5, warm_up=1)
    peer, overhead = "the trainer, called directly", 100 * (served.forward_backward / own.forward_backward - 1)
    passes = 1000 * served.forward_backward, peer, 1000 * own.forward_backward
    return [
        cost(what, "a forward_backward over HTTP, ms", *passes),
        alone(what, "what the service adds to a forward_backward, %", overhead, digits=1),
        cost(what, "a step over HTTP, ms", 1000 * served.step, peer, 1000 * own.step),
        cost(what, f"a step over HTTP with {IN_FLIGHT} in flight, ms", 1000 / single, peer, 1000 * own.step),
        rate(what, "steps/s of two clients together", both, "one client", single),
        cost(
            what,
            f"a step while another client has {2 * GREEDY_STEPS} requests in the queue, ms",
            1000 * beside.step,
            "the same client, alone",
            1000 * served.step,
        ),
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
