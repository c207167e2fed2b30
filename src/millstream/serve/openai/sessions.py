"""Sessions: the calls of a program that works with text, joined into one rollout of tokens.

A call whose prompt continues an earlier one (its messages, its answer, and more) is sent to the model with the tokens of the
earlier call, the sampled ones as they were sampled; only the new text is tokenized (`env.dialog`). Any other prompt begins a
new part. A token is sampled, and marked so in the loss mask, in one part only.

The id of a session is made here, and is a secret: a client that does not know it can neither read nor change the session.

Bounded: the number of sessions, the time that an idle one is kept, the tokens of each, and those of all together.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence

from msgspec import Struct, structs

from millstream.clock import Clock
from millstream.env import Text
from millstream.env.dialog import delta
from millstream.serve.openai.detokenize import TextStream
from millstream.serve.openai.request_schema import BadRequest, PromptInput, ResponseInput
from millstream.types import Completion, Finish, Message


class SessionLimits(Struct, frozen=True, kw_only=True):
    sessions: int = 1024
    idle_s: float = 3600.0  # without a call for this long, it is deleted
    tokens: int = 1 << 18  # of all parts of one session, at about 100 bytes of memory each
    all_tokens: int = 1 << 23  # of all sessions

    def __post_init__(self) -> None:
        if min(self.sessions, self.tokens, self.all_tokens) < 1 or not self.idle_s > 0:
            raise ValueError("sessions, tokens and all_tokens must be at least 1, idle_s above 0")


class SessionPart(Struct, frozen=True, kw_only=True, eq=False):
    """One sequence of a session, as in `types.Rollout`: 0 and -1 where nothing was sampled."""

    content: PromptInput  # prompt and answers as the caller knows them
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    last: Completion
    finish_reason: str


class Turn(Struct, frozen=True, kw_only=True, eq=False):
    """A call in a session, before its answer."""

    session_id: str
    prompt: PromptInput
    tokens: tuple[int, ...]
    room: int  # tokens that the session has left for the answer
    before: SessionPart | None  # the part that it continues. None: it begins a new one


class Session:
    def __init__(self, used_at: float) -> None:
        self.parts: list[SessionPart] = []
        self.responses: dict[str, ResponseInput] = {}  # with their answers, by id
        self.used_at = used_at

    @property
    def num_tokens(self) -> int:
        return sum(len(part.token_ids) for part in self.parts)


class Sessions:
    """All sessions; independent of the engine. A call: `parts`, `continued` (slow: it tokenizes), `begin`, and after the answer
    `end`. A call that fails leaves nothing behind."""

    def __init__(self, limits: SessionLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # least recently used first
        self._num_tokens = 0  # of all sessions
        self.on_idle: Callable[[str], None] = lambda session_id: None  # called with one that was idle for too long

    def __len__(self) -> int:
        self._delete_idle()
        return len(self._sessions)

    def create(self) -> str:
        """The id of a new session. Raises `BadRequest` if there are too many sessions."""
        self._delete_idle()
        if len(self._sessions) >= self._limits.sessions:
            why = f"there are {self._limits.sessions} sessions, which is the limit: DELETE /v1/sessions/ID ends one"
            raise BadRequest(why, "session_id", status=429, code="rate_limit_exceeded")
        session_id = f"session-{secrets.token_hex(16)}"
        self._sessions[session_id] = Session(self._clock.now())
        return session_id

    def find(self, session_id: str) -> Session:
        self._delete_idle()
        if session_id not in self._sessions:
            why = f"no session {session_id[:64]!r}: POST /v1/sessions begins one and returns its id"
            why = f"{why}. It was never begun, was deleted, or was idle for {self._limits.idle_s:g} s"
            raise BadRequest(why, "session_id", status=404)
        return self._sessions[session_id]

    def delete(self, session_id: str) -> None:
        self._num_tokens -= self.find(session_id).num_tokens
        del self._sessions[session_id]

    def put_back(self, session_id: str, session: Session) -> None:
        """One that was deleted."""
        self._sessions[session_id] = session
        self._num_tokens += session.num_tokens
        self._use(session_id, session)

    def parts(self, session_id: str) -> Sequence[SessionPart]:
        return tuple(self.find(session_id).parts)

    def begin(self, session_id: str, prompt: PromptInput, tokens: Sequence[int], before: SessionPart | None) -> Turn:
        """Raises `BadRequest` if these tokens and an answer exceed the limit of the session."""
        session = self.find(session_id)
        num_others = session.num_tokens - (0 if before is None else len(before.token_ids))
        room = self._limits.tokens - num_others - len(tokens)
        if room < 1:
            why = f"{len(tokens)} tokens in a session that has {num_others} others: more than its {self._limits.tokens}"
            raise BadRequest(f"{why}. Begin another session", "session_id")
        if self._num_tokens - session.num_tokens + num_others + len(tokens) > self._limits.all_tokens:
            why = f"all sessions have {self._num_tokens} tokens, and the limit is {self._limits.all_tokens}"
            why = f"{why}: DELETE /v1/sessions/ID ends one"
            raise BadRequest(why, "session_id", status=429, code="rate_limit_exceeded")
        self._use(session_id, session)
        return Turn(session_id=session_id, prompt=prompt, tokens=tuple(tokens), room=room, before=before)

    def end(self, turn: Turn, answer: TextStream, finish: Finish, *, is_ended_by_model: bool) -> SessionPart | None:
        """Add the answer; the part that has it. If another call has continued the same part meanwhile, this one becomes a part
        of its own, in which the shared tokens are not marked as sampled. Nothing is added to a session that was deleted
        meanwhile."""
        session = self._sessions.get(turn.session_id)
        if session is None:
            return None
        self._num_tokens -= session.num_tokens
        self._use(turn.session_id, session)
        place = next((n for n, part in enumerate(session.parts) if part is turn.before), None)
        is_shared = turn.before is not None and place is None and bool(session.parts)
        part = _grown(turn, answer, finish, is_shared=is_shared, is_ended_by_model=is_ended_by_model)
        if place is None:
            session.parts.append(part)
        else:
            session.parts[place] = part
        self._num_tokens += session.num_tokens
        return part

    def keep_response(self, session_id: str, sent: ResponseInput, answer: Message) -> None:
        """A later call may begin where this one has ended. Nothing is kept in a session that was deleted meanwhile."""
        if session_id in self._sessions:
            kept = structs.replace(sent, messages=(*sent.messages, answer))
            self._sessions[session_id].responses[sent.id] = kept

    def messages_until(self, session_id: str | None, response_id: str | None) -> list[Message]:
        """The messages up to the answer of this response. Raises `BadRequest` if the session does not have it."""
        turns: list[ResponseInput] = []
        while response_id is not None:
            known = {} if session_id is None else self.find(session_id).responses
            if response_id not in known:
                why = f"previous_response_id: no response {response_id[:64]!r} in this session"
                why = (
                    why
                    if session_id
                    else "previous_response_id needs a session: POST /v1/sessions, and send X-Session-Id"
                )
                raise BadRequest(why, "previous_response_id")
            turns.append(known[response_id])
            response_id = known[response_id].previous_id
        return [message for turn in reversed(turns) for message in turn.messages]

    def _use(self, session_id: str, session: Session) -> None:
        session.used_at = self._clock.now()
        self._sessions.move_to_end(session_id)

    def _delete_idle(self) -> None:
        limit = self._clock.now() - self._limits.idle_s
        while self._sessions and next(iter(self._sessions.values())).used_at < limit:
            session_id, session = self._sessions.popitem(last=False)
            self._num_tokens -= session.num_tokens
            self.on_idle(session_id)


def continued(
    parts: Sequence[SessionPart], prompt: PromptInput, text: Text
) -> tuple[SessionPart | None, Sequence[int]]:
    """The newest part that the prompt continues, and the tokens to send."""
    for part in reversed(parts):
        tokens = _after(part, prompt, text)
        if tokens is not None:
            return part, tokens
    return None, opening(prompt, text)


def opening(prompt: PromptInput, text: Text) -> Sequence[int]:
    """The tokens of a prompt that begins a part."""
    if isinstance(prompt, str):
        return text.opening(prompt)
    messages = [one for one in prompt if isinstance(one, Message)]
    return text.opening(messages) if messages else [one for one in prompt if isinstance(one, int)]


def _after(part: SessionPart, prompt: PromptInput, text: Text) -> Sequence[int] | None:
    """The tokens of a prompt that continues this part; None if it does not."""
    if isinstance(prompt, str):
        is_next = isinstance(part.content, str) and prompt.startswith(part.content) and len(prompt) > len(part.content)
        if part.last.finish is Finish.STOP:
            return None  # an end token is no part of its text: the model would see it in the middle
        return (*part.token_ids, *text.encode(prompt[len(part.content) :])) if is_next else None
    if prompt[: len(part.token_ids)] == part.token_ids:
        return [one for one in prompt if isinstance(one, int)]
    if isinstance(part.content, str) or prompt[: len(part.content)] != part.content:
        return None
    new = [one for one in prompt[len(part.content) :] if isinstance(one, Message)]
    return (*part.token_ids, *delta(text, new, after=part.last)) if new else None


def _grown(turn: Turn, answer: TextStream, finish: Finish, *, is_shared: bool, is_ended_by_model: bool) -> SessionPart:
    before, num_sampled = turn.before, len(answer.tokens)
    shown = len(turn.tokens) - (0 if before is None else len(before.token_ids))
    mask, logprobs, versions = (before.loss_mask, before.logprobs, before.versions) if before else ((), (), ())
    if is_shared:
        mask, logprobs, versions = (False,) * len(mask), (0.0,) * len(mask), (-1,) * len(mask)
    sampled = answer.sampled()
    # an answer cut by a stop string was not ended by the model: its end-of-turn token is still missing
    last = Finish.STOP if is_ended_by_model else Finish.LENGTH
    return SessionPart(
        content=_and_answer(turn.prompt, answer),
        token_ids=(*turn.tokens, *sampled.tokens),
        loss_mask=(*mask, *(False,) * shown, *(True,) * num_sampled),
        logprobs=(*logprobs, *(0.0,) * shown, *sampled.logprobs),
        versions=(*versions, *(-1,) * shown, *sampled.versions),
        last=Completion(
            tokens=sampled.tokens[-1:], logprobs=sampled.logprobs[-1:], versions=sampled.versions[-1:], finish=last
        ),
        finish_reason=finish.value,
    )


def _and_answer(prompt: PromptInput, answer: TextStream) -> PromptInput:
    if isinstance(prompt, str):
        return prompt + answer.all_text()  # with a stop string: it is in the tokens
    messages = tuple(one for one in prompt if isinstance(one, Message))
    if messages:
        return (*messages, answer.message())
    return (*(one for one in prompt if isinstance(one, int)), *answer.tokens)


def session_json(session_id: str, session: Session) -> dict[str, object]:
    names = ("token_ids", "loss_mask", "logprobs", "versions", "finish_reason")
    parts = [{name: getattr(part, name) for name in names} for part in session.parts]
    return {"id": session_id, "object": "session", "parts": parts}
