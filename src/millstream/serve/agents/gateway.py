"""The engines of a run for programs that speak OpenAI's API.

Each rollout has a key of its own, which is the id of a session (`serve.openai.sessions`). A call with this key is generated in
the rollout's own task through its `Context`, so that the lag bound, time limits, aborts and retries hold as for any other
environment. A call that continues an earlier one extends that part, token for token; any other begins a new part. Sampling is
that of the run: `max_tokens` and `stop` of a call only shorten its answer, its temperature and seed have no effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from millstream.clock import RealClock
from millstream.engine import EngineStats
from millstream.env import Context, Text
from millstream.env.tools import Parser
from millstream.errors import EnvironmentFailed, RequestRefused, RolloutError
from millstream.serve.limits import HttpLimits
from millstream.serve.listen import listen
from millstream.serve.openai.app import service_app
from millstream.serve.openai.request_schema import BadRequest
from millstream.serve.openai.service import Generation, ModelService, ModelServiceConfig, Served
from millstream.serve.openai.sessions import SessionLimits, SessionPart, Turn
from millstream.types import Completion, Sampled, TurnLimits
from millstream.types import Request as EngineRequest

MODEL = "policy"  # its name for agents
HOST = "127.0.0.1"
ENDED = "the rollout of this key has ended"
MANY = 1 << 20
LIMITS = SessionLimits(sessions=MANY, idle_s=float(1 << 30), tokens=1 << 40, all_tokens=1 << 50)
"""The rollout bounds its session: in time, calls and tokens."""
PATIENT = HttpLimits(headers_s=3600.0, stall_s=3600.0)
"""An agent may think between two calls of one connection, and be slow to read. A client that loses its connection calls
again, which begins a part."""


class AgentCall:
    """One call of an agent, until the rollout has answered it."""

    def __init__(self, turn: Turn, limits: TurnLimits, agent: int) -> None:
        self.turn = turn
        self.agent = agent
        self.limits = limits
        self.reply: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()


class AgentSession:
    """The calls of one rollout, and the parts that they become. `url` and `key` are what its program needs."""

    def __init__(self, url: str, ids: Sequence[str], context: Context) -> None:
        self.url = url
        self.ids = ids  # of the session of each agent
        self.key = ids[0]
        self.num_calls = 0
        self.failure: RolloutError | None = None  # ends the rollout, whatever the agent makes of it
        self.calls: asyncio.Queue[AgentCall | None] = asyncio.Queue()  # None: the program has ended
        self._context = context
        self._unused: list[list[Context]] = [[context], *([] for _ in ids[1:])]  # of each agent
        self._parts: dict[SessionPart, Context] = {}  # those that can be continued
        self._generated: dict[Turn, Context] = {}  # of answers that are on their way to the agent
        self._lengths: dict[Context, int] = {}  # tokens of each part

    async def answer(self, call: AgentCall) -> None:
        """Generate this turn. Raises what ends the rollout; what only refuses the call is raised in the agent."""
        before = call.turn.before
        part = None if before is None else self._parts.pop(before, None)
        is_new = part is None  # a new conversation, an edited history, or the second call that continues one place
        unused = self._unused[call.agent]
        if part is None:
            part = unused.pop() if unused else self._context.part(call.agent)
        num_known = 0 if is_new or before is None else len(before.token_ids)
        completion: Completion | None = None
        refusal: Exception = BadRequest(ENDED, status=401)
        try:
            completion = await self._unless_gone(call, part, call.turn.tokens[num_known:])
        except RolloutError as error:
            refusal = error
            if not isinstance(error, RequestRefused):
                self.failure = error
        finally:
            if completion is None and not call.reply.done():
                call.reply.set_exception(refusal)
        if completion is not None:
            self._lengths[part] = len(call.turn.tokens) + len(completion.tokens)
            if not call.reply.done():  # else the agent has gone in this moment: the part is not continued
                self._generated[call.turn] = part
                call.reply.set_result(completion)
        elif is_new or before is None:
            unused.append(part)
        else:
            self._parts[before] = part

    async def _unless_gone(self, call: AgentCall, part: Context, tokens: Sequence[int]) -> Completion | None:
        """None: the agent does not wait for its answer any more. The turn was aborted, and leaves nothing behind."""
        generating = asyncio.ensure_future(part.generate(tokens, call.limits))
        call.reply.add_done_callback(lambda reply: generating.cancel())
        try:
            return await generating
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if own is not None and own.cancelling():
                generating.cancel()
                raise
            if call.reply.cancelled():
                return None
            raise

    def keep(self, turn: Turn, grown: SessionPart) -> None:
        """The next call may continue this part, unless the agent got another text than the tokens of the rollout have: a call
        that continues it then begins a part of its own."""
        part = self._generated.pop(turn)
        if len(grown.token_ids) == self._lengths[part]:
            self._parts[grown] = part

    def close(self) -> None:
        while not self.calls.empty():
            call = self.calls.get_nowait()
            if call is not None and not call.reply.done():
                call.reply.set_exception(BadRequest(ENDED, status=401))


class AgentGateway(ModelService):
    """Started by the first rollout, on a free port of this machine; closed with the environment."""

    def __init__(
        self,
        text: Text,
        *,
        end_tokens: tuple[int, ...],
        vocabulary: int,
        max_calls: int,
        takes_stops: bool,
        parse: Parser,
        agents: tuple[str, ...] = (),
    ) -> None:
        served = Served(
            name=MODEL, engine=_NoEngine(), text=text, end_tokens=end_tokens, vocabulary=vocabulary, context=MANY
        )
        super().__init__(served, ModelServiceConfig(port=0, sessions=LIMITS, max_requests=MANY), RealClock())
        self._max_calls = max_calls
        self._names = agents or (MODEL,)
        self._takes_stops = takes_stops
        self._parse = parse
        self._agents: dict[str, AgentSession] = {}
        self._url = ""
        self._listening: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[str] | None = None

    @asynccontextmanager
    async def opened(self, context: Context) -> AsyncIterator[AgentSession]:
        """A session for one rollout. Its key is refused afterwards."""
        await self._start()
        ids = [self._sessions.create() for _ in self._names]
        session = AgentSession(f"{self._url}/v1", ids, context)
        self._agents |= dict.fromkeys(ids, session)
        try:
            yield session
        finally:
            for session_id in ids:
                del self._agents[session_id]
                self._sessions.delete(session_id)
            session.close()

    def routes(self) -> list[Route]:
        """Without those that make and show sessions."""
        return [route for route in super().routes() if not route.path.startswith("/v1/sessions")]

    async def close(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)

    async def _start(self) -> None:
        """The first rollout starts the server; it stays if that rollout is cancelled."""
        if self._ready is None or self._listening is None:
            self._ready = asyncio.get_running_loop().create_future()
            serving = listen(
                service_app(self, token=None, max_requests=MANY),
                HOST,
                0,
                token=None,
                max_requests=MANY,
                limits=PATIENT,
                on_ready=self._ready.set_result,
                handles_signals=False,
            )
            self._listening = asyncio.create_task(serving)
        both: list[asyncio.Future[Any]] = [self._ready, self._listening]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            await self._listening  # raises why
        self._url = self._ready.result()

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._names:
            why = f"no model {name[:64]!r} here: expected {' or '.join(map(repr, self._names))}"
            raise BadRequest(why, "model", status=404, code="model_not_found")

    def _session_id(self, request: Request, model: str | None) -> str:
        """That of the agent that the call names as its model: agents do not continue each other's parts. The key is that of
        the rollout, as OpenAI's clients send it, or Anthropic's."""
        key = request.headers.get("x-api-key") or request.headers.get("authorization", "").partition(" ")[2].strip()
        if key not in self._agents:
            raise BadRequest("no rollout has this key, or it has ended", status=401)
        self._check_model(model)
        return self._agents[key].ids[0 if model is None else self._names.index(model)]

    async def _generate(
        self, generation: Generation, request: EngineRequest, on_sampled: Callable[[Sampled], None]
    ) -> Completion:
        turn = generation.turn
        session = None if turn is None else self._agents.get(turn.session_id)
        if turn is None or session is None:
            raise BadRequest(ENDED, status=401)
        session.num_calls += 1
        if session.num_calls > self._max_calls:
            why = f"the agent made more than {self._max_calls} calls: args.max_calls sets the limit"
            session.failure = EnvironmentFailed(why)
            session.calls.put_nowait(None)
            raise BadRequest(why, status=429)
        if generation.call.stops and not self._takes_stops:
            raise BadRequest("stop is not supported by the engine of this run: leave it out", "stop")
        most = generation.call.max_tokens
        limits = TurnLimits(max_tokens=most, stop_strings=generation.call.stops)
        call = AgentCall(turn, limits, session.ids.index(turn.session_id))
        session.calls.put_nowait(call)
        return await call.reply

    def _on_part(self, turn: Turn, part: SessionPart | None) -> None:
        session = self._agents.get(turn.session_id)
        if session is not None and part is not None:
            session.keep(turn, part)


class _NoEngine:
    """What the service shows of an engine: rollouts generate by themselves."""

    name = MODEL
    slots = MANY
    version = 0

    def stats(self) -> EngineStats:
        return EngineStats(running=0, waiting=0, tokens_generated=0, requests_finished=0)

    async def generate(self, request: EngineRequest, on_sampled: Any = None) -> Completion:
        raise EnvironmentFailed("an agent calls with the key of its rollout")

    async def abort(self, key: Any) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def load(self, version: int, weights: Any) -> None: ...
    async def close(self) -> None: ...
