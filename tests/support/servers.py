"""Services on a thread and an event loop of their own, as a client meets them: over a real socket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from starlette.types import ASGIApp
from transformers import PreTrainedModel

from millstream.clock import RealClock
from millstream.engine import EngineConfig
from millstream.engine.native.engine import TorchEngine
from millstream.env.bytes_text import ByteText
from millstream.events.sinks import MemorySink
from millstream.run.build import build_engine
from millstream.serve.limits import HttpLimits
from millstream.serve.listen import listen
from millstream.serve.openai.app import model_app
from millstream.serve.openai.service import ModelServiceConfig, Served

Close = Callable[[], Awaitable[None]]


@contextmanager
def serving(make: Callable[[], tuple[ASGIApp, Close]], port: int = 0) -> Iterator[str]:
    """The URL of an application that is made on its own event loop."""
    urls: list[str] = []
    is_up, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    def ready(url: str) -> None:
        urls.append(url)
        is_up.set()

    async def program() -> None:
        app, close = make()
        serving = listen(app, "127.0.0.1", port, token=None, max_requests=256, limits=HttpLimits(), on_ready=ready)
        task = asyncio.create_task(serving)
        await stop.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(program()), daemon=True)
    thread.start()
    assert is_up.wait(20)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        loop.close()


def thread_engine(model: PreTrainedModel, slots: int = 4) -> TorchEngine:
    engine = build_engine(EngineConfig(slots=slots, process=False), model, clock=RealClock(), sink=MemorySink())
    assert isinstance(engine, TorchEngine)
    return engine


def millstream_serve(
    model: PreTrainedModel, vocabulary: int, context: int, weights_from: Path, *, token: str | None = None
) -> tuple[ASGIApp, Close]:
    """What `millstream serve --weights-from` serves, with a text of bytes for its tokenizer."""
    engine = thread_engine(model)
    served = Served(name="tiny", engine=engine, text=ByteText(), end_tokens=(), vocabulary=vocabulary, context=context)
    return model_app(served, ModelServiceConfig(weights_from=str(weights_from)), token=token), engine.close
