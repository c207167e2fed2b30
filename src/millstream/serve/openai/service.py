"""A model over HTTP, as OpenAI's API has it. See docs/serving.md.

    GET    /v1/models, /v1/models/NAME, /health                                           200
    POST   /v1/completions, /v1/chat/completions         whole, or a stream of events     200
    GET    /v1/sessions/ID                               what was said, as tokens         200
    DELETE /v1/sessions/ID                               it is over                       200
    POST   /v1/millstream/weights                        new weights, from a folder       200

400: not what was expected, or not supported; `error.param` names it. 401, 403: see `serve.auth`. 404: no such model, session or
path. 408: a body that does not come. 409: weights that the engine does not take. 413: a body that is too large. 429: too many
requests, or sessions, at once. 503: the engine broke.

Every answer goes through the engine's seam and nothing else. A client that hangs up aborts its requests there; nothing is kept
of them, in a session neither.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from msgspec import Struct, field
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from millstream.clock import Clock, RealClock
from millstream.engine import Engine
from millstream.env import Text
from millstream.errors import DataError, EngineError, EngineGone, EnvironmentFailed, RequestRefused, WeightsError
from millstream.seeds import derive_seed
from millstream.serve.auth import RETRY_AFTER_S, Gate
from millstream.serve.http import HungUp, Refused, Talk, unless_hung_up
from millstream.serve.listen import listen
from millstream.serve.openai.detokenize import Piece, TextStream
from millstream.serve.openai.request_schema import Ask, BadAsk, Body, ChatBody, CompletionBody, Prompt, ask_of
from millstream.serve.openai.response_schema import DONE, Writer, event, fault, refusal, reply
from millstream.serve.openai.sessions import SessionLimits, Sessions, Turn, as_shown, continued, opening
from millstream.types import Finish, RequestKey, Sampled, Sampling
from millstream.types import Request as EngineRequest

T = TypeVar("T")
B = TypeVar("B", CompletionBody, ChatBody)
# Told of more of an answer, by its index; and, without a piece, of its end.
OnPiece = Callable[[int, Piece | None, Finish | None], None]
Said = tuple[TextStream, Finish]
HUNG_UP, TOO_MANY = 499, 429
BODY_S = 60.0  # a body that has not come by then does not come
FIELD = re.compile(r"`\$\.?(\w+)|(?:field|unknown field) `(\w+)`")


class ModelServiceConfig(Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"  # beyond this machine (0.0.0.0, say) only with a token
    port: int = 8000  # 0: one that is free
    max_body_bytes: int = 4 << 20
    max_requests: int = 256  # at once, those that wait for a slot of the engine included
    sessions: SessionLimits = field(default_factory=SessionLimits)
    # Whoever may ask may have weights loaded from folders within this one. None: nobody may.
    weights_from: str | None = None

    def __post_init__(self) -> None:
        if self.max_body_bytes < 1 or self.max_requests < 1 or not 0 <= self.port < 65536:
            raise ValueError("max_body_bytes and max_requests must be at least 1, port 0 to 65535")


class WeightsBody(Struct, forbid_unknown_fields=True, kw_only=True):
    path: str  # as `millstream.model.safetensors_io` writes them
    version: int


class Served(Struct, frozen=True, kw_only=True):
    """A model, and what the service must know of it. The engine is the service's alone."""

    name: str
    engine: Engine
    text: Text
    end_tokens: tuple[int, ...]
    vocabulary: int  # token ids are below it
    context: int  # tokens of a prompt and its answer together, at most


class Answering(Struct, frozen=True, kw_only=True):
    """One request on its way: what was asked, as tokens."""

    ask: Ask
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]  # for each prompt
    turn: Turn | None  # in a session
    seed: int


class ModelService:
    def __init__(self, served: Served, config: ModelServiceConfig, clock: Clock) -> None:
        self._served = served
        self._numbers = itertools.count()
        self._talk = Talk(max_body_bytes=config.max_body_bytes, max_wait_s=0.0)
        self._sessions = Sessions(config.sessions, clock)
        self._weights_from = None if config.weights_from is None else Path(config.weights_from).resolve()
        self._scribe = ThreadPoolExecutor(1, "tokenizer")  # long prompts do not hold up the event loop
        self._broken: str | None = None

    def routes(self) -> list[Route]:
        updates = [Route("/v1/millstream/weights", self.take_weights, methods=["POST"])]
        return [
            *(updates if self._weights_from is not None else []),
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/sessions/{session_id}", self.session, methods=["GET"]),
            Route("/v1/sessions/{session_id}", self.end_session, methods=["DELETE"]),
        ]

    # ---- what is asked ---------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        if self._broken is not None:
            return reply({"status": "broken", "why": self._broken}, 503)
        stats = self._served.engine.stats()
        found = {"running": stats.running, "waiting": stats.waiting, "sessions": len(self._sessions)}
        return reply({"status": "ok", "version": self._served.engine.version} | found)

    async def models(self, request: Request) -> Response:
        return reply({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return reply(self._card())

    async def complete(self, request: Request) -> Response:
        return await self._answer(request, CompletionBody)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, ChatBody)

    async def session(self, request: Request) -> Response:
        session_id = request.path_params["session_id"]
        return reply(as_shown(session_id, self._sessions.find(session_id)))

    async def end_session(self, request: Request) -> Response:
        session_id = request.path_params["session_id"]
        self._sessions.delete(session_id)
        return reply({"id": session_id, "object": "session", "deleted": True})

    async def take_weights(self, request: Request) -> Response:
        """What is in flight goes on, and says from which token on it is of the new version."""
        body: WeightsBody = await self._talk.read(request, WeightsBody)
        folder = await asyncio.to_thread(self._allowed, body.path)
        from millstream.model.safetensors_io import read_weights  # imports torch

        try:
            manifest, weights = await asyncio.to_thread(read_weights, folder)
            await self._served.engine.load(body.version, weights)
        except EngineGone as broken:
            self._broken = str(broken)
            raise
        except (WeightsError, EngineError) as wrong:
            raise BadAsk(f"version {body.version} was not taken: {wrong}", "path", status=409) from wrong
        return reply({"version": body.version, "bytes": manifest.num_bytes, "digest": manifest.digest})

    def _allowed(self, path: str) -> Path:
        """Links are followed before it is decided."""
        folder = Path(path)
        if not folder.is_absolute() or "\0" in path or self._weights_from not in folder.resolve().parents:
            raise BadAsk(f"path: expected an absolute path to a folder within {self._weights_from}", "path", status=403)
        return folder.resolve()

    def _card(self) -> dict[str, object]:
        served = self._served
        return {
            "id": served.name,
            "object": "model",
            "created": 0,
            "owned_by": "millstream",
            "context": served.context,
            "version": served.engine.version,
        }

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._served.name):
            why = f"no model {name!r} here: expected {self._served.name!r}"
            raise BadAsk(why, "model", status=404, code="model_not_found")

    # ---- from a body to tokens -------------------------------------------------------------------------------------

    async def _answer(self, request: Request, kind: type[B]) -> Response:
        try:
            async with asyncio.timeout(BODY_S):
                body: Body = await self._talk.read(request, kind)
        except TimeoutError as late:
            raise BadAsk(f"the body did not come within {BODY_S:g} s", status=408) from late
        assert isinstance(body, CompletionBody | ChatBody)
        ask = ask_of(body, session_id=request.headers.get("x-session-id"))
        self._check_model(ask.model)
        answering = await self._read(ask)
        writer = Writer(ask, answering.prompts, model=self._served.name, text=self._served.text)
        if ask.is_streamed:
            return StreamingResponse(self._events(answering, writer), media_type="text/event-stream")
        said = await unless_hung_up(request, self._all(answering))
        return reply(writer.whole((speech.whole(), finish) for speech, finish in said))

    async def _read(self, ask: Ask) -> Answering:
        turn = None if ask.session_id is None else await self._turn(ask.session_id, ask.prompts[0])
        if turn is not None:
            prompts = [turn.tokens]
        else:
            prompts = [tuple(await self._in_thread(opening, prompt, self._served.text)) for prompt in ask.prompts]
        for number, tokens in enumerate(prompts):
            self._check_tokens(tokens, f"prompt {number}" if ask.is_list else "the prompt")
        room = None if turn is None else turn.room
        return Answering(
            ask=ask,
            prompts=tuple(prompts),
            max_tokens=tuple(self._max_tokens(ask, tokens, room) for tokens in prompts),
            turn=turn,
            seed=secrets.randbits(62) if ask.seed is None else ask.seed,
        )

    async def _turn(self, session_id: str, prompt: Prompt) -> Turn:
        parts = self._sessions.parts(session_id)
        before, tokens = await self._in_thread(continued, parts, prompt, self._served.text)
        return self._sessions.begin(session_id, prompt, tokens, before)

    async def _in_thread(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._scribe, work, *args)

    def _check_tokens(self, tokens: Sequence[int], what: str) -> None:
        if not tokens:
            raise BadAsk(f"{what} has no tokens: expected at least one", "prompt")
        if not (min(tokens) >= 0 and max(tokens) < self._served.vocabulary):
            strange = next(token for token in tokens if not 0 <= token < self._served.vocabulary)
            raise BadAsk(f"{what} has token {strange}: expected 0 to {self._served.vocabulary - 1}", "prompt")

    def _max_tokens(self, ask: Ask, tokens: Sequence[int], session_room: int | None) -> int:
        """As many as were asked for, or as there is room for."""
        context, room = self._served.context, self._served.context - len(tokens)
        asked = "" if ask.max_tokens is None else f" and max_tokens = {ask.max_tokens}"
        if room < (ask.max_tokens or 1):
            why = f"a prompt of {len(tokens)} tokens{asked} exceeds the context of {context} tokens"
            raise BadAsk(why, "messages" if ask.is_chat else "prompt", code="context_length_exceeded")
        if session_room is not None and session_room < (ask.max_tokens or 1):
            excess = (ask.max_tokens or 1) - session_room
            why = f"a prompt of {len(tokens)} tokens{asked} exceeds what the session may hold by {excess}"
            raise BadAsk(f"{why}: begin another session", "session_id")
        return ask.max_tokens or min(room, room if session_room is None else session_room)

    # ---- from tokens to answers ------------------------------------------------------------------------------------

    async def _all(self, answering: Answering, on_piece: OnPiece | None = None) -> list[Said]:
        """All answers, in the order of their prompts. What was said in a session is then part of it."""
        indices = range(len(answering.prompts) * answering.ask.num_choices)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._say(answering, index, on_piece)) for index in indices]
        except ExceptionGroup as failed:  # one is enough to say why; the others were aborted
            raise failed.exceptions[0] from None
        found = [task.result() for task in tasks]
        if answering.turn is not None:
            speech, finish = found[0]
            is_ended_by_model = speech.tokens[-1] in self._served.end_tokens
            self._sessions.end(answering.turn, speech, finish, is_ended_by_model=is_ended_by_model)
        return found

    async def _say(self, answering: Answering, index: int, on_piece: OnPiece | None) -> Said:
        """One answer. A stop string ends it as soon as it is heard."""
        speech = TextStream(self._served.text, answering.ask.stops)

        def hear(sampled: Sampled) -> None:
            speech.hear(sampled)
            if speech.is_stopped:
                generating.cancel()  # which aborts it in the engine
            elif on_piece is not None and (piece := speech.take()) is not None:
                on_piece(index, piece, None)

        request = self._request(answering, index)
        generating = asyncio.ensure_future(self._served.engine.generate(request, hear))
        finish = Finish.STOP
        try:
            completion = await generating
            begin = len(speech.tokens)
            rest = (completion.tokens[begin:], completion.logprobs[begin:], completion.versions[begin:])
            speech.hear(Sampled(*rest))
            speech.end()
            finish = Finish.STOP if speech.is_stopped else completion.finish
        except asyncio.CancelledError:
            if not speech.is_stopped or _is_cancelled():
                raise
            speech.end()
        except EngineGone as broken:
            self._broken = str(broken)
            raise
        if finish is Finish.ABORT:
            raise EngineError("the engine was closed before the answer was done")
        if on_piece is not None:
            on_piece(index, speech.take(), None)
            on_piece(index, None, finish)
        return speech, finish

    def _request(self, answering: Answering, index: int) -> EngineRequest:
        number, ask = index // answering.ask.num_choices, answering.ask
        return EngineRequest(
            key=RequestKey(group_id=next(self._numbers), member=0),
            tokens=answering.prompts[number],
            sampling=Sampling(
                max_tokens=answering.max_tokens[number],
                temperature=ask.temperature,
                top_k=ask.top_k,
                top_p=ask.top_p,
                stop=self._served.end_tokens if ask.stop_tokens is None else ask.stop_tokens,
            ),
            seed=derive_seed(answering.seed, "serve", index),
            num_sampled=ask.num_sampled,
        )

    async def _events(self, answering: Answering, writer: Writer) -> AsyncIterator[bytes]:
        """Bounded by the answers' lengths. If whoever listens goes away, the answers are aborted."""
        for chunk in writer.first_chunks():
            yield event(chunk)
        heard: asyncio.Queue[tuple[int, Piece | None, Finish | None] | None] = asyncio.Queue()
        work = asyncio.create_task(self._all(answering, lambda *news: heard.put_nowait(news)))
        work.add_done_callback(lambda _: heard.put_nowait(None))
        try:
            while (news := await heard.get()) is not None:
                index, piece, finish = news
                if piece is not None or finish is not None:
                    yield event(writer.chunk(index, piece, finish))
            said = work.result()
            usage = writer.last_chunk(sum(len(speech.tokens) for speech, _ in said))
            if usage is not None:
                yield event(usage)
            yield DONE
        except (EngineError, RequestRefused) as wrong:
            yield event({"error": fault(503 if isinstance(wrong, EngineError) else 400, str(wrong))})
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


def _is_cancelled() -> bool:
    """Whether the task that asks was cancelled, and not just something that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


# ---- the service -----------------------------------------------------------------------------------------------------


def make_app(
    served: Served,
    config: ModelServiceConfig | None = None,
    *,
    token: str | None = None,
    clock: Clock | None = None,
) -> Starlette:
    """The service as an ASGI application, on the event loop of the engine."""
    config = config or ModelServiceConfig()
    service = ModelService(served, config, clock or RealClock())
    return Starlette(
        routes=service.routes(),
        middleware=[
            Middleware(Gate, token=token, limit=config.max_requests, refuse=refusal, full=TOO_MANY),
        ],
        exception_handlers={
            Refused: lambda request, wrong: _refused(wrong),
            DataError: lambda request, wrong: refusal(400, str(wrong), param="messages"),
            EnvironmentFailed: lambda request, wrong: refusal(400, str(wrong), param="messages"),
            RequestRefused: lambda request, wrong: refusal(400, str(wrong)),
            EngineError: lambda request, wrong: refusal(503, str(wrong)),
            HungUp: lambda request, wrong: Response(status_code=HUNG_UP),
            ClientDisconnect: lambda request, wrong: Response(status_code=HUNG_UP),
            404: lambda request, wrong: refusal(404, f"nothing at {request.url.path}: see docs/serving.md"),
            405: lambda request, wrong: refusal(405, f"{request.method} is no verb of {request.url.path}"),
        },
    )


def _refused(wrong: Refused) -> Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if wrong.status == TOO_MANY else None
    if isinstance(wrong, BadAsk):
        return refusal(wrong.status, str(wrong), headers, param=wrong.param, code=wrong.code)
    found = FIELD.search(str(wrong))
    return refusal(wrong.status, str(wrong), headers, param=next(filter(None, found.groups())) if found else None)


async def serve(
    served: Served,
    config: ModelServiceConfig | None = None,
    *,
    token: str | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Until cancelled or stopped by a signal. `on_ready` is told where it listens."""
    config = config or ModelServiceConfig()
    app = make_app(served, config, token=token)
    await listen(app, config.host, config.port, token=token, on_ready=on_ready)
