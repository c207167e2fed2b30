"""A stand-in for an SGLang server, which cannot run here. NOT SGLang: it was made from SGLang's documentation and the source of
its release 0.5.23, and speaks the part of its HTTP API that `engine/http` uses. Behind it is our real engine with a real small
model: real tokens, real log-probabilities, real swaps.

What it keeps of the original: `/generate` streams events with all tokens so far (or, started so, the new ones alone), each with
`meta_info`; randomness by `sampling_seed` and the token's place in the sequence; a pause by abort ends every request with what it
has, and those that come later wait; who hangs up is aborted. Updates take place one after the other, and no request runs during
one: it waits for what runs, requests that come later wait for it, and in a pause it is not gone on before the update has ended. An
update whose client has hung up takes place all the same.

Faults can be switched on, each with a probability for every request or call.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from millstream.engine import Engine
from millstream.errors import EngineError, RequestRefused
from millstream.types import Finish, Request, RequestKey, Sampled, Sampling

Json = dict[str, Any]


class Faults(Struct, kw_only=True):
    """Probabilities. They may be changed while it runs."""

    error: float = 0.0
    """500 in place of an answer."""
    busy: float = 0.0
    """503, with Retry-After."""
    hang: float = 0.0
    """Nothing comes any more, from some token on."""
    cut: float = 0.0
    """The connection ends in the middle of an answer."""
    wrong_lengths: float = 0.0
    """An event with a log-probability too few."""
    garbage: float = 0.0
    """An event that is no JSON."""
    call: float = 0.0
    """500 in place of an answer to anything but /generate."""
    slow_update_s: float = 0.0
    """An update takes up to so long: half of it before it begins, half of it while it takes place."""
    start_s: float = 0.0
    """503 to everything for so long after it was first asked."""
    at: int | None = None
    """The token at which an answer goes wrong. None: any."""
    seed: int = 0
    """Of all chances; read when the server starts."""


class Contract:
    def __init__(self, engine: Engine, faults: Faults | None = None, *, is_incremental: bool = False) -> None:
        self.engine, self.faults, self.is_incremental = engine, faults or Faults(), is_incremental
        self._rng, self._numbers = random.Random(self.faults.seed), itertools.count()
        self._began: float | None = None
        self._going = asyncio.Condition()
        """Whoever pauses, goes on, or updates in a pause holds it."""
        self._is_paused = False
        self._writing, self._loading = asyncio.Lock(), asyncio.Lock()
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        """`_open`: no update waits for what runs."""
        self._open.set()
        self._idle.set()
        self._running: dict[str, RequestKey] = {}
        self.label = "default"
        self.calls: list[str] = []
        """Paths, in the order they were asked."""
        self.updates: list[Json] = []
        """What was asked of /update_weights_from_disk."""
        self.num_faults = 0

    def app(self) -> Starlette:
        routes = {
            "/generate": self.generate,
            "/pause_generation": self.pause,
            "/continue_generation": self.go_on,
            "/abort_request": self.abort,
            "/update_weights_from_disk": self.update,
            "/flush_cache": self.flush,
        }
        posts = [Route(path, self._guarded(work), methods=["POST"]) for path, work in routes.items()]
        return Starlette(routes=[*posts, Route("/model_info", self._guarded(self.model_info))])

    def _guarded(self, work: Any) -> Any:
        async def guarded(request: HttpRequest) -> Response:
            self.calls.append(request.url.path)
            now = asyncio.get_running_loop().time()
            self._began = now if self._began is None else self._began
            if now < self._began + self.faults.start_s:
                return Response("starting", 503)
            is_generate = request.url.path == "/generate"
            if self._happens(self.faults.error if is_generate else self.faults.call):
                return JSONResponse({"error": {"message": "on purpose"}}, 500)
            if is_generate and self._happens(self.faults.busy):
                return Response("busy", 503, {"Retry-After": "0"})
            response: Response = await work(request)
            return response

        return guarded

    def _happens(self, probability: float) -> bool:
        happens = self._rng.random() < probability
        self.num_faults += happens
        return happens

    # ---- generation --------------------------------------------------------------------------------------------------

    async def generate(self, request: HttpRequest) -> Response:
        body = await request.json()
        assert body["stream"] and body["return_logprob"], "all that the engine asks"
        return StreamingResponse(self._stream(body), media_type="text/event-stream")

    def _request(self, body: Json) -> Request:
        asked = body["sampling_params"]
        return Request(
            key=RequestKey(group_id=next(self._numbers), member=0),
            tokens=tuple(body["input_ids"]),
            sampling=Sampling(
                max_tokens=asked["max_new_tokens"],
                temperature=asked["temperature"],
                stop=tuple(asked["stop_token_ids"]),
            ),
            seed=asked["sampling_seed"],
            num_sampled=len(body["input_ids"]) - 1,  # its randomness is of the seed and of the place in the sequence
        )

    async def _stream(self, body: Json) -> AsyncIterator[bytes]:
        while self._is_paused or not self._open.is_set():
            async with self._going:
                await self._going.wait_for(lambda: not self._is_paused)
            await self._open.wait()
        request, heard = self._request(body), asyncio.Queue[Sampled | None]()
        name = body.get("rid") or str(request.key.group_id)
        self._running[name] = request.key
        self._idle.clear()
        work = asyncio.ensure_future(self.engine.generate(request, heard.put_nowait))
        work.add_done_callback(lambda _: heard.put_nowait(None))
        anywhere = self._rng.randint(0, request.sampling.max_tokens)
        fault_at = anywhere if self.faults.at is None else self.faults.at
        try:
            async for event in self._events(request, heard, work, name, fault_at):
                yield b"data: " + event + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:  # nothing here may wait: whoever hung up has cancelled it
            work.cancel()
            self._running.pop(name, None)
            if not self._running:
                self._idle.set()

    async def _events(
        self,
        request: Request,
        heard: asyncio.Queue[Sampled | None],
        work: asyncio.Future[Any],
        name: str,
        fault_at: int,
    ) -> AsyncIterator[bytes]:
        tokens: list[int] = []
        logprobs: list[float] = []
        plan = [
            self._happens(p)
            for p in (self.faults.hang, self.faults.cut, self.faults.wrong_lengths, self.faults.garbage)
        ]
        label = self.label
        while (sampled := await heard.get()) is not None:
            begin = len(tokens)
            tokens += sampled.tokens
            logprobs += sampled.logprobs
            if begin <= fault_at < len(tokens) and any(plan):
                yield await self._misbehave(plan, name, tokens, logprobs, label)
            yield self._event(name, tokens, logprobs, begin, None, label)
        try:
            completion = work.result()
        except RequestRefused as wrong:
            error = {"message": str(wrong), "type": "invalid_request_error", "code": 400, "retryable": False}
            yield msgspec.json.encode({"error": error})
            return
        begin = len(tokens)
        tokens += completion.tokens[begin:]
        logprobs += completion.logprobs[begin:]
        if completion.finish is Finish.ABORT and not tokens and self._rng.random() < 0.5:
            return  # nothing but the end: vLLM does so, and a request that was aborted in a queue may
        yield self._event(name, tokens, logprobs, begin, _reason(completion.finish, tokens), label)

    async def _misbehave(
        self, plan: list[bool], name: str, tokens: list[int], logprobs: list[float], label: str
    ) -> bytes:
        hangs, cuts, wrong_lengths, _ = plan
        if hangs:
            await asyncio.sleep(3600)
        if cuts:
            raise ConnectionResetError("cut on purpose")
        if wrong_lengths:
            return self._event(name, tokens, logprobs[:-1], len(tokens) - 1, None, label)
        return b'{"output_ids": [1, 2'

    def _event(
        self, name: str, tokens: list[int], logprobs: list[float], begin: int, reason: Json | None, label: str
    ) -> bytes:
        first = begin if self.is_incremental else 0
        triples = [[logprob, token, None] for logprob, token in zip(logprobs[first:], tokens[first:], strict=False)]
        about = {
            "id": name,
            "finish_reason": reason,
            "completion_tokens": len(tokens),
            "weight_version": label,
            "output_token_logprobs": triples,
        }
        return msgspec.json.encode({"text": "", "output_ids": tokens[first:], "meta_info": about})

    # ---- what is told to it ------------------------------------------------------------------------------------------

    async def pause(self, request: HttpRequest) -> Response:
        assert (await request.json())["mode"] == "abort", "the mode that the engine uses"
        async with self._going:
            self._is_paused = True
            await self._abort_all()
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def _abort_all(self) -> None:
        while self._running or self._writing.locked():
            for key in list(self._running.values()):
                await self.engine.abort(key)
            await asyncio.wait([asyncio.ensure_future(self._idle.wait())], timeout=0.05)

    async def go_on(self, request: HttpRequest) -> Response:
        async with self._going:
            self._is_paused = False
            self._going.notify_all()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def abort(self, request: HttpRequest) -> Response:
        key = self._running.get((await request.json())["rid"])
        if key is not None:
            await self.engine.abort(key)
        return Response(status_code=200)

    async def update(self, request: HttpRequest) -> Response:
        body = await request.json()
        self.updates.append(body)
        await self._dawdle()
        async with self._going:
            if self._is_paused:
                return await self._load(body)
        async with self._writing:
            self._open.clear()
            try:
                await self._idle.wait()
                return await self._load(body)
            finally:
                self._open.set()

    async def _load(self, body: Json) -> Response:
        async with self._loading:
            await self._dawdle()
            try:
                weights = await asyncio.to_thread(load_file, Path(body["model_path"]) / "model.safetensors")
                await self.engine.load(self.engine.version + 1, weights)
            except (OSError, SafetensorError, EngineError) as wrong:
                return JSONResponse({"success": False, "message": str(wrong), "num_paused_requests": 0}, 400)
            self.label = body.get("weight_version") or self.label
        return JSONResponse({"success": True, "message": "Succeeded.", "num_paused_requests": 0})

    async def _dawdle(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.0, self.faults.slow_update_s / 2))

    async def flush(self, request: HttpRequest) -> Response:
        return Response("Cache flushed.\n", 400 if self._running else 200)

    async def model_info(self, request: HttpRequest) -> Response:
        return JSONResponse({"model_path": "tiny", "is_generation": True, "weight_version": self.label})


def _reason(finish: Finish, tokens: list[int]) -> Json:
    match finish:
        case Finish.STOP:
            return {"type": "stop", "matched": tokens[-1]}
        case Finish.LENGTH:
            return {"type": "length", "length": len(tokens)}
    return {"type": "abort", "message": "Aborted"}
