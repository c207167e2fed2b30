"""A model over HTTP with OpenAI's API (chats, completions, responses), and Anthropic's Messages API. See docs/serving.md.

    GET    /v1/models, /v1/models/NAME, /health                                           200
    POST   /v1/completions, /v1/chat/completions         complete, or a stream of events  200
    POST   /v1/responses                                 the same by the Responses API    200
    POST   /v1/messages                                  the same by Anthropic's API      200
    POST   /v1/sessions                                  begin a session                  201
    GET    /v1/sessions/ID                               its tokens                       200
    DELETE /v1/sessions/ID                               delete it                        200
    POST   /v1/millstream/weights                        new weights, from a folder       200

400: malformed or not supported; `error.param` is the field. 401, 403: see `serve.auth`. 404: no such model, session or path.
408: a body that is not received in time. 409: weights that the engine does not load. 413: a body that is too large. 429: too
many requests, or sessions, at once. 503: the engine broke.

Every answer goes through the `Engine` protocol. When a client disconnects, its requests are aborted there and leave nothing
behind, in a session neither.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

from msgspec import Meta, Struct, field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from millstream.clock import Clock
from millstream.engine import Engine
from millstream.env import Text
from millstream.env.tools import parser_named
from millstream.errors import (
    EngineError,
    EngineGone,
    RolloutError,
    WeightsError,
)
from millstream.seeds import derive_seed
from millstream.serve.http import BodyReader, EmptyBody, HttpError, until_disconnect
from millstream.serve.limits import HttpLimits
from millstream.serve.openai.detokenize import TextPiece, TextStream
from millstream.serve.openai.messages import MessagesBody, MessageWriter, parse_messages
from millstream.serve.openai.prompt_scores import PromptScores, ScorePrompt
from millstream.serve.openai.request_schema import (
    BadRequest,
    ChatBody,
    CompletionBody,
    CompletionFields,
    CompletionRequest,
    check_prompt,
    parse_request,
)
from millstream.serve.openai.response_schema import (
    ResponseWriter,
    error_object,
    json_response,
    stream_event,
)
from millstream.serve.openai.responses import ResponsesBody, ResponsesWriter, new_response_id, parse_responses
from millstream.serve.openai.sessions import (
    SessionLimits,
    SessionPart,
    Sessions,
    Turn,
    continued,
    opening,
    session_json,
)
from millstream.types import Completion, Finish, RequestKey, Sampled, Sampling
from millstream.types import Request as EngineRequest

B = TypeVar("B", CompletionBody, ChatBody)
OnPiece = Callable[[int, TextPiece | None, Finish | None], None]  # index of the answer; its next text, or its end
Answered = tuple[TextStream, Finish]
AnswerWriter = ResponseWriter | ResponsesWriter | MessageWriter
MakeWriter = Callable[[Sequence[Sequence[int]]], AnswerWriter]  # of the prompts' tokens
LONG_PROMPT = 1 << 14  # characters


class ModelServiceConfig(Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"  # an address that other machines can reach (0.0.0.0) needs a token
    port: int = 8000  # 0: a free one
    max_body_bytes: int = 4 << 20
    max_requests: int = 256  # at once, including those that wait for a slot of the engine
    http: HttpLimits = field(default_factory=HttpLimits)
    sessions: SessionLimits = field(default_factory=SessionLimits)
    weights_from: str | None = None  # clients may load weights from folders within this one. None: they may not

    def __post_init__(self) -> None:
        if self.max_body_bytes < 1 or self.max_requests < 1 or not 0 <= self.port < 65536:
            raise ValueError("max_body_bytes and max_requests must be at least 1, port 0 to 65535")


class WeightsBody(Struct, forbid_unknown_fields=True, kw_only=True):
    path: str  # as `millstream.model.safetensors_io` writes them
    version: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Served(Struct, frozen=True, kw_only=True):
    """A model and its properties. The service is the only user of the engine."""

    name: str
    engine: Engine
    text: Text
    end_tokens: tuple[int, ...]
    vocabulary: int  # token ids are below it
    context: int  # the most tokens of a prompt and its answer together
    score_prompt: ScorePrompt | None = (
        None  # of the weights with version 0. None: log-probabilities of prompts are refused
    )


class Generation(Struct, frozen=True, kw_only=True):
    """One request in progress: its prompts as tokens."""

    call: CompletionRequest
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]  # for each prompt
    turn: Turn | None  # in a session
    seed: int


class ModelService:
    def __init__(self, served: Served, config: ModelServiceConfig, clock: Clock) -> None:
        self._served = served
        self._numbers = itertools.count()
        self._bodies = BodyReader(max_body_bytes=config.max_body_bytes, max_wait_s=0.0)
        self._sessions = Sessions(config.sessions, clock)
        self._weights_from = None if config.weights_from is None else Path(config.weights_from).resolve()
        self._short_prompts = ThreadPoolExecutor(1, "tokenizer")  # tokenizing must not block the event loop,
        self._long_prompts = ThreadPoolExecutor(1, "tokenizer of long prompts")  # nor a long prompt the short ones
        self._scoring = ThreadPoolExecutor(1, "prompt scores")
        self._parse = parser_named(served.text.tool_format)
        self._broken: str | None = None

    def routes(self) -> list[Route]:
        updates = [Route("/v1/millstream/weights", self.load_weights, methods=["POST"])]
        return [
            *(updates if self._weights_from is not None else []),
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/responses", self.respond, methods=["POST"]),
            Route("/v1/messages", self.message, methods=["POST"]),
            Route("/v1/sessions", self.begin_session, methods=["POST"]),
            Route("/v1/sessions/{session_id}", self.session, methods=["GET"]),
            Route("/v1/sessions/{session_id}", self.end_session, methods=["DELETE"]),
        ]

    # ---- handlers

    async def health(self, request: Request) -> Response:
        if self._broken is not None:
            return json_response({"status": "broken", "why": self._broken}, 503)
        stats = self._served.engine.stats()
        found = {"running": stats.running, "waiting": stats.waiting, "sessions": len(self._sessions)}
        return json_response({"status": "ok", "version": self._served.engine.version} | found)

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return json_response(self._card())

    async def complete(self, request: Request) -> Response:
        return await self._answer(request, CompletionBody)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, ChatBody)

    async def respond(self, request: Request) -> Response:
        """OpenAI's Responses API."""
        body: ResponsesBody = await self._bodies.read(request, ResponsesBody)
        session_id, response_id = self._session_id(request, body.model), new_response_id()
        before = self._sessions.messages_until(session_id, body.previous_response_id)
        parsed = parse_responses(body, before, session_id=session_id, response_id=response_id)
        return await self._respond(
            request,
            parsed,
            lambda prompts: ResponsesWriter(body, prompts[0], model=self._served.name, response_id=response_id),
        )

    async def message(self, request: Request) -> Response:
        """Anthropic's Messages API."""
        body: MessagesBody = await self._bodies.read(request, MessagesBody)
        parsed = parse_messages(body, session_id=self._session_id(request, body.model))
        return await self._respond(request, parsed, lambda prompts: MessageWriter(prompts[0], model=self._served.name))

    async def begin_session(self, request: Request) -> Response:
        await self._bodies.read(request, EmptyBody)
        session_id = self._sessions.create()
        return json_response(session_json(session_id, self._sessions.find(session_id)), 201)

    async def session(self, request: Request) -> Response:
        session_id = request.path_params["session_id"]
        return json_response(session_json(session_id, self._sessions.find(session_id)))

    async def end_session(self, request: Request) -> Response:
        session_id = request.path_params["session_id"]
        self._sessions.delete(session_id)
        return json_response({"id": session_id, "object": "session", "deleted": True})

    async def load_weights(self, request: Request) -> Response:
        """Requests in flight continue; their tokens have the new version from then on."""
        body: WeightsBody = await self._bodies.read(request, WeightsBody)
        folder = await asyncio.to_thread(self._allowed, body.path)
        from millstream.model.safetensors_io import read_weights  # imports torch

        try:
            manifest, weights = await asyncio.to_thread(read_weights, folder)
            await self._served.engine.load(body.version, weights)
        except EngineGone as broken:
            self._broken = str(broken)
            raise
        except (WeightsError, EngineError) as wrong:
            raise BadRequest(f"version {body.version} was not loaded: {wrong}", "path", status=409) from wrong
        return json_response({"version": body.version, "bytes": manifest.num_bytes, "digest": manifest.digest})

    def _allowed(self, path: str) -> Path:
        """Symbolic links are resolved before the check."""
        folder = Path(path)
        if not folder.is_absolute() or "\0" in path or self._weights_from not in folder.resolve().parents:
            raise BadRequest(
                f"path: expected an absolute path to a folder within {self._weights_from}", "path", status=403
            )
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
            raise BadRequest(why, "model", status=404, code="model_not_found")

    # ---- from a body to tokens

    async def _answer(self, request: Request, kind: type[B]) -> Response:
        body: CompletionFields = await self._bodies.read(request, kind)
        assert isinstance(body, CompletionBody | ChatBody)
        parsed = parse_request(body, session_id=self._session_id(request, body.model))
        served = self._served
        return await self._respond(
            request, parsed, lambda prompts: ResponseWriter(parsed, prompts, model=served.name, text=served.text)
        )

    async def _respond(self, request: Request, parsed: CompletionRequest, make_writer: MakeWriter) -> Response:
        self._check_model(parsed.model)
        generation = await until_disconnect(request, self._tokenize(parsed))
        writer = make_writer(generation.prompts)
        if parsed.is_streamed:
            return StreamingResponse(self._events(generation, writer), media_type="text/event-stream")
        scores = await until_disconnect(request, self._scores(generation)) if parsed.is_echoed else None
        answers = await until_disconnect(request, self._all(generation))
        return json_response(writer.whole(((answer.whole(), finish) for answer, finish in answers), scores))

    def _session_id(self, request: Request, model: str | None) -> str | None:
        return request.headers.get("x-session-id")

    async def _scores(self, generation: Generation) -> list[PromptScores] | None:
        """Of every prompt; None if no log-probabilities were asked for."""
        score, version = self._served.score_prompt, self._served.engine.version
        if not generation.call.has_logprobs:
            return None
        if score is None or version:
            why = (
                f"the engine has loaded version {version}: serve that checkpoint"
                if version
                else "there is no model for it"
            )
            raise BadRequest(f"log-probabilities of prompts (echo with logprobs) are not available: {why}", "echo")
        run = partial(asyncio.get_running_loop().run_in_executor, self._scoring)
        return [await run(score, prompt) for prompt in generation.prompts]

    async def _tokenize(self, call: CompletionRequest) -> Generation:
        names = [f"prompt {number}" if call.is_list else "the prompt" for number in range(len(call.prompts))]
        sizes = [
            check_prompt(prompt, name, context=self._served.context)
            for prompt, name in zip(call.prompts, names, strict=True)
        ]
        thread = self._long_prompts if sum(sizes) > LONG_PROMPT else self._short_prompts
        run = partial(asyncio.get_running_loop().run_in_executor, thread)
        turn = None
        if call.session_id is not None:
            parts = self._sessions.parts(call.session_id)
            before, tokens = await run(continued, parts, call.prompts[0], self._served.text)
            turn = self._sessions.begin(call.session_id, call.prompts[0], tokens, before)
            prompts = [turn.tokens]
        else:
            prompts = [tuple(await run(opening, prompt, self._served.text)) for prompt in call.prompts]
        for tokens, name in zip(prompts, names, strict=True):
            self._check_tokens(tokens, name)
        room = None if turn is None else turn.room
        return Generation(
            call=call,
            prompts=tuple(prompts),
            max_tokens=tuple(self._max_tokens(call, tokens, room) for tokens in prompts),
            turn=turn,
            seed=secrets.randbits(62) if call.seed is None else call.seed,
        )

    def _check_tokens(self, tokens: Sequence[int], what: str) -> None:
        if not tokens:
            raise BadRequest(f"{what} has no tokens: expected at least one", "prompt")
        if not (min(tokens) >= 0 and max(tokens) < self._served.vocabulary):
            strange = next(token for token in tokens if not 0 <= token < self._served.vocabulary)
            raise BadRequest(f"{what} has token {strange}: expected 0 to {self._served.vocabulary - 1}", "prompt")

    def _max_tokens(self, call: CompletionRequest, tokens: Sequence[int], session_room: int | None) -> int:
        """`max_tokens` of the request; without it, the rest of the context or of the session."""
        context, room = self._served.context, self._served.context - len(tokens)
        asked = "" if call.max_tokens is None else f" and max_tokens = {call.max_tokens}"
        if room < (call.max_tokens or 1):
            why = f"a prompt of {len(tokens)} tokens{asked} exceeds the context of {context} tokens"
            raise BadRequest(why, "messages" if call.is_chat else "prompt", code="context_length_exceeded")
        if session_room is not None and session_room < (call.max_tokens or 1):
            excess = (call.max_tokens or 1) - session_room
            why = f"a prompt of {len(tokens)} tokens{asked} exceeds the limit of the session by {excess}"
            raise BadRequest(f"{why}: begin another session", "session_id")
        return call.max_tokens or min(room, room if session_room is None else session_room)

    # ---- from tokens to answers

    async def _all(self, generation: Generation, on_piece: OnPiece | None = None) -> list[Answered]:
        """All answers, in the order of their prompts. An answer in a session is added to it."""
        indices = range(len(generation.prompts) * generation.call.num_choices)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._answer_one(generation, index, on_piece)) for index in indices]
        except ExceptionGroup as failed:  # the first error is reported; the other answers were aborted
            raise failed.exceptions[0] from None
        found = [task.result() for task in tasks]
        if generation.turn is not None:
            answer, finish = found[0]
            if generation.call.response is not None:
                self._sessions.keep_response(generation.turn.session_id, generation.call.response, answer.message())
            is_ended_by_model = answer.tokens[-1] in self._served.end_tokens
            self._on_part(
                generation.turn,
                self._sessions.end(generation.turn, answer, finish, is_ended_by_model=is_ended_by_model),
            )
        return found

    def _on_part(self, turn: Turn, part: SessionPart | None) -> None:
        """A session has grown by this turn. None: it was deleted meanwhile."""

    async def _answer_one(self, generation: Generation, index: int, on_piece: OnPiece | None) -> Answered:
        """One answer. A stop string ends it as soon as it is complete."""
        answer = TextStream(self._served.text, generation.call.stops)
        streams = on_piece is not None and not generation.call.has_tools  # a call is no text: it must be whole

        def on_sampled(sampled: Sampled) -> None:
            answer.add(sampled)
            if answer.is_stopped:
                generating.cancel()  # aborts it in the engine
            elif streams and (piece := answer.take()) is not None:
                assert on_piece is not None
                on_piece(index, piece, None)

        request = self._request(generation, index)
        generating = asyncio.ensure_future(self._generate(generation, request, on_sampled))
        finish = Finish.STOP
        try:
            completion = await generating
            begin = len(answer.tokens)
            rest = (completion.tokens[begin:], completion.logprobs[begin:], completion.versions[begin:])
            answer.add(Sampled(*rest))
            answer.end()
            finish = Finish.STOP if answer.is_stopped else completion.finish
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if not answer.is_stopped or (own is not None and own.cancelling()):  # not only the future that it awaits
                raise
            answer.end()
        except EngineGone as broken:
            self._broken = str(broken)
            raise
        if finish is Finish.ABORT:
            raise EngineError("the engine was closed before the answer was done")
        if generation.call.has_tools:
            answer.find_calls(self._parse, self._served.end_tokens)
        if on_piece is not None:
            on_piece(index, answer.whole() if generation.call.has_tools else answer.take(), None)
            on_piece(index, None, finish)
        return answer, finish

    async def _generate(
        self, generation: Generation, request: EngineRequest, on_sampled: Callable[[Sampled], None]
    ) -> Completion:
        return await self._served.engine.generate(request, on_sampled)

    def _request(self, generation: Generation, index: int) -> EngineRequest:
        number, call = index // generation.call.num_choices, generation.call
        return EngineRequest(
            key=RequestKey(group_id=next(self._numbers), member=0),
            tokens=generation.prompts[number],
            sampling=Sampling(
                max_tokens=generation.max_tokens[number],
                temperature=call.temperature,
                top_k=call.top_k,
                top_p=call.top_p,
                stop=self._served.end_tokens if call.stop_tokens is None else call.stop_tokens,
            ),
            seed=derive_seed(generation.seed, "serve", index),
            num_sampled=call.num_sampled,
        )

    async def _events(self, generation: Generation, writer: AnswerWriter) -> AsyncIterator[bytes]:
        """Server-sent events; the queue is bounded by the length of the answers. If the client disconnects, the answers are
        aborted."""
        for event in writer.stream_begin():
            yield event
        queue: asyncio.Queue[tuple[int, TextPiece | None, Finish | None] | None] = asyncio.Queue()
        work = asyncio.create_task(self._all(generation, lambda *item: queue.put_nowait(item)))
        work.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (item := await queue.get()) is not None:
                index, piece, finish = item
                if piece is not None or finish is not None:
                    for event in writer.stream_piece(index, piece, finish):
                        yield event
            for event in writer.stream_end(sum(len(answer.tokens) for answer, _ in work.result())):
                yield event
        except (EngineError, RolloutError, HttpError) as wrong:
            status = 503 if isinstance(wrong, EngineError) else getattr(wrong, "status", 400)
            yield stream_event({"error": error_object(status, str(wrong))})
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
