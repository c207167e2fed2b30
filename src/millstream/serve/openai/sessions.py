"""Sessions: the calls of a program that knows nothing of tokens, put together into one rollout.

A call whose prompt goes on from what was said before (the messages of an earlier call, the answer that it got, and more) is
sent to the model as the tokens that stood there, the sampled ones as they were sampled; only what is new is tokenised
(`env.dialog`). A prompt that does not begins a new part. A token is sampled, and masked as such, in one part alone.

Bounded: the number of sessions, how long one is kept without a call, and the tokens of each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from msgspec import Struct

from millstream.clock import Clock
from millstream.env import Text
from millstream.env.dialog import delta
from millstream.serve.openai.detokenize import TextStream
from millstream.serve.openai.request_schema import BadAsk, Prompt
from millstream.types import Completion, Finish, Message


class SessionLimits(Struct, frozen=True, kw_only=True):
    most: int = 1024
    idle_s: float = 3600.0  # without a call for so long, it is forgotten
    tokens: int = 1 << 18  # of all parts of one session. Each takes some 100 bytes of memory.

    def __post_init__(self) -> None:
        if self.most < 1 or self.idle_s <= 0 or self.tokens < 1:
            raise ValueError("most and tokens must be at least 1, idle_s above 0")


class Part(Struct, frozen=True, kw_only=True, eq=False):
    """One sequence of a session, as in `types.Rollout`: 0 and -1 where nothing was sampled."""

    said: Prompt  # all of it as the caller knows it, the answers included
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    last: Completion
    finish_reason: str


class Turn(Struct, frozen=True, kw_only=True, eq=False):
    """A call in a session, before it is answered."""

    session_id: str
    prompt: Prompt
    tokens: tuple[int, ...]
    room: int  # tokens that the session has left for an answer
    before: Part | None  # what it goes on from. None: it begins a new part.


class Session:
    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.used_at = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(len(part.token_ids) for part in self.parts)


class Sessions:
    """Knows no engine. A call: `parts`, `continued` (which takes time), `begin`, and, if it was answered, `end`. One that fails
    leaves nothing behind."""

    def __init__(self, limits: SessionLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # the one used longest ago first

    def __len__(self) -> int:
        self._forget()
        return len(self._sessions)

    def find(self, session_id: str) -> Session:
        self._forget()
        if session_id not in self._sessions:
            why = f"no session {session_id!r}: it never began, was ended, or was idle for {self._limits.idle_s:g} s"
            raise BadAsk(why, "session_id", status=404)
        return self._sessions[session_id]

    def delete(self, session_id: str) -> None:
        self.find(session_id)
        del self._sessions[session_id]

    def parts(self, session_id: str) -> Sequence[Part]:
        """As they are now; none of a session that is new. Raises `BadAsk` where there is no room for one more."""
        self._forget()
        session = self._sessions.get(session_id)
        if session is None and len(self._sessions) >= self._limits.most:
            why = f"there are {self._limits.most} sessions, as many as there may be: DELETE /v1/sessions/ID ends one"
            raise BadAsk(why, "session_id", status=429, code="rate_limit_exceeded")
        return () if session is None else tuple(session.parts)

    def begin(self, session_id: str, prompt: Prompt, tokens: Sequence[int], before: Part | None) -> Turn:
        """Raises `BadAsk` where the session has no room for these tokens and an answer."""
        session = self._sessions.get(session_id) or Session()
        num_others = session.num_tokens - (0 if before is None else len(before.token_ids))
        room = self._limits.tokens - num_others - len(tokens)
        if room < 1:
            why = f"{len(tokens)} tokens in a session that has {num_others} others: more than its {self._limits.tokens}"
            raise BadAsk(f"{why}. Begin another session", "session_id")
        return Turn(session_id=session_id, prompt=prompt, tokens=tuple(tokens), room=room, before=before)

    def end(self, turn: Turn, speech: TextStream, finish: Finish, *, is_ended_by_model: bool) -> None:
        """It was said. If another call has gone on from the same place meanwhile, this one becomes a part of its own, in which
        what both share is not sampled."""
        session = self._sessions.setdefault(turn.session_id, Session())
        session.used_at = self._clock.now()
        self._sessions.move_to_end(turn.session_id)
        place = next((n for n, part in enumerate(session.parts) if part is turn.before), None)
        is_shared = turn.before is not None and place is None and bool(session.parts)
        part = _grown(turn, speech, finish, is_shared=is_shared, is_ended_by_model=is_ended_by_model)
        if place is None:
            session.parts.append(part)
        else:
            session.parts[place] = part

    def _forget(self) -> None:
        limit = self._clock.now() - self._limits.idle_s
        while self._sessions and next(iter(self._sessions.values())).used_at < limit:
            self._sessions.popitem(last=False)


def continued(parts: Sequence[Part], prompt: Prompt, text: Text) -> tuple[Part | None, Sequence[int]]:
    """The newest part that the prompt goes on from, and the tokens to send."""
    for part in reversed(parts):
        tokens = _after(part, prompt, text)
        if tokens is not None:
            return part, tokens
    return None, opening(prompt, text)


def opening(prompt: Prompt, text: Text) -> Sequence[int]:
    """The tokens of a prompt by itself."""
    if isinstance(prompt, str):
        return text.opening(prompt)
    messages = [one for one in prompt if isinstance(one, Message)]
    return text.opening(messages) if messages else [one for one in prompt if isinstance(one, int)]


def _after(part: Part, prompt: Prompt, text: Text) -> Sequence[int] | None:
    """The tokens of a prompt that goes on from this part; None if it does not."""
    if isinstance(prompt, str):
        is_next = isinstance(part.said, str) and prompt.startswith(part.said) and len(prompt) > len(part.said)
        return (*part.token_ids, *text.encode(prompt[len(part.said) :])) if is_next else None
    if prompt[: len(part.token_ids)] == part.token_ids:
        return [one for one in prompt if isinstance(one, int)]
    if isinstance(part.said, str) or prompt[: len(part.said)] != part.said:
        return None
    new = [one for one in prompt[len(part.said) :] if isinstance(one, Message)]
    return (*part.token_ids, *delta(text, new, after=part.last)) if new else None


def _grown(turn: Turn, speech: TextStream, finish: Finish, *, is_shared: bool, is_ended_by_model: bool) -> Part:
    before, said = turn.before, len(speech.tokens)
    shown = len(turn.tokens) - (0 if before is None else len(before.token_ids))
    mask, logprobs, versions = (before.loss_mask, before.logprobs, before.versions) if before else ((), (), ())
    if is_shared:
        mask, logprobs, versions = (False,) * len(mask), (0.0,) * len(mask), (-1,) * len(mask)
    sampled = speech.sampled()
    # an answer that a stop string has cut is not one that the model has ended: its end of turn is still to be shown
    last = Finish.STOP if is_ended_by_model else Finish.LENGTH
    return Part(
        said=_and_answer(turn.prompt, speech),
        token_ids=(*turn.tokens, *sampled.tokens),
        loss_mask=(*mask, *(False,) * shown, *(True,) * said),
        logprobs=(*logprobs, *(0.0,) * shown, *sampled.logprobs),
        versions=(*versions, *(-1,) * shown, *sampled.versions),
        last=Completion(
            tokens=sampled.tokens[-1:], logprobs=sampled.logprobs[-1:], versions=sampled.versions[-1:], finish=last
        ),
        finish_reason=finish.value,
    )


def _and_answer(prompt: Prompt, speech: TextStream) -> Prompt:
    if isinstance(prompt, str):
        return prompt + speech.said
    messages = tuple(one for one in prompt if isinstance(one, Message))
    if messages:
        return (*messages, Message(role="assistant", content=speech.said))
    return (*(one for one in prompt if isinstance(one, int)), *speech.tokens)


def as_shown(session_id: str, session: Session) -> dict[str, object]:
    names = ("token_ids", "loss_mask", "logprobs", "versions", "finish_reason")
    parts = [{name: getattr(part, name) for name in names} for part in session.parts]
    return {"id": session_id, "object": "session", "parts": parts}
