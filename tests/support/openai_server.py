"""A model's service on a thread, with an engine that says what is written, and the real client of OpenAI."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from millstream.engine import Engine, EngineStats, OnSampled
from millstream.run.text import TokenizerText
from millstream.serve.openai.app import host_model
from millstream.serve.openai.service import ModelServiceConfig, Served
from millstream.types import Completion, Finish, Request, RequestKey, Sampled, Weights
from support.lazy import lazy_module

if TYPE_CHECKING:
    import openai
else:
    openai = lazy_module("openai")

CONTEXT = 256


class ScriptedEngine:
    """Says what is written here, turn by turn, token by token; a turn that ends with `...` goes on until its length. See
    `millstream.engine.Engine`."""

    name, slots, version = "scripted", 8, 3

    def __init__(
        self, text: TokenizerText, says: Sequence[str] = (), *, step_s: float = 0.0, tells: bool = True
    ) -> None:
        self._text, self._says, self._step_s, self._tells = text, iter(says), step_s, tells
        self.requests: list[Request] = []
        self.aborted: list[RequestKey] = []

    async def generate(self, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        self.requests.append(request)
        said = next(self._says)
        tokens = [token for character in said.removesuffix("...") for token in self._text.encode(character)]
        tokens += [tokens[-1]] * 10_000 if said.endswith("...") else [self._text.end_token]
        tokens = tokens[: request.sampling.max_tokens]
        try:
            for token in tokens[:-1]:
                await asyncio.sleep(self._step_s)
                if on_sampled is not None and self._tells:
                    on_sampled(Sampled((token,), (-0.5,), (3,)))
        except asyncio.CancelledError:
            self.aborted.append(request.key)
            raise
        finish = Finish.STOP if tokens[-1] == self._text.end_token else Finish.LENGTH
        num = len(tokens)
        return Completion(tokens=tuple(tokens), logprobs=(-0.5,) * num, versions=(3,) * num, finish=finish)

    async def abort(self, key: RequestKey) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def load(self, version: int, weights: Weights) -> None: ...
    async def close(self) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats(running=0, waiting=0, tokens_generated=0, requests_finished=0)


def served(text: TokenizerText, engine: Engine, *, context: int = CONTEXT) -> Served:
    return Served(
        name="tiny",
        engine=engine,
        text=text,
        end_tokens=(text.end_token,),
        vocabulary=len(text.tokenizer),
        context=context,
    )


@contextmanager
def listening(make: Callable[[], Served], *, token: str | None = None, **limits: Any) -> Iterator[str]:
    """A server on a thread of its own, as it would be in another process; the address of it."""
    ready: list[str] = []
    is_up, loop = threading.Event(), asyncio.new_event_loop()

    def on_ready(url: str) -> None:
        ready.append(url)
        is_up.set()

    async def program() -> None:
        one = make()
        try:
            await host_model(one, ModelServiceConfig(port=0, **limits), token=token, on_ready=on_ready)
        finally:
            await one.engine.close()

    task = loop.create_task(program())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.gather(task, return_exceptions=True)))
    thread.start()
    assert is_up.wait(30)
    try:
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(30)
        loop.close()


def client_of(url: str, *, token: str = "none", retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{url}/v1",
        api_key=token,
        max_retries=retries,
        timeout=30,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )
