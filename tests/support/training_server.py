"""A training service on a thread, with a small model made on the spot, and the real client of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from millstream.engine import EngineConfig
from millstream.learner import LearnerConfig
from millstream.model.load import set_up_cpu
from millstream.run.build import build_model
from millstream.run.config import ModelConfig, TinyConfig
from millstream.run.serve_training import base_of
from millstream.serve.training.base import BaseModel
from millstream.serve.training.service import TrainingServiceConfig, host_training

KEY = "tml-a-key-of-a-test"


def small_base() -> BaseModel:
    """Its head is larger than a new model's: adapters are never on the head, and could not move small logits."""
    set_up_cpu()
    tiny = ModelConfig(tiny=TinyConfig(hidden=32, layers=2, heads=2, context=64), device="cpu")
    model, tokenizer = build_model(tiny, seed=0)
    model.get_output_embeddings().weight.data.mul_(20)
    engine = EngineConfig(slots=8, process=False)
    return base_of(model, tokenizer, name="tiny", path="tiny", engine=engine, learner=LearnerConfig())


@contextmanager
def listening(
    folder: Path, *, tokens: list[str] | None = None, base: BaseModel | None = None, **limits: Any
) -> Iterator[str]:
    """On a thread of its own, as it would be in another process; the address of it."""
    ready: list[str] = []
    is_up, loop = threading.Event(), asyncio.new_event_loop()

    def on_ready(url: str) -> None:
        ready.append(url)
        is_up.set()

    made = base or small_base()
    config = TrainingServiceConfig(folder=str(folder), port=0, **limits)
    serving = loop.create_task(host_training(made, config, tokens=tokens, on_ready=on_ready))
    thread = threading.Thread(target=loop.run_until_complete, args=[asyncio.wait({serving})])
    thread.start()
    try:
        assert is_up.wait(60), "the service did not start"
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        thread.join()
        loop.close()
