"""A conversation as tokens, exact because it is append-only.

The sampled tokens are the trained tokens: they are decoded for reading, and never encoded again. A later turn of a chat is
appended as the *difference* in the chat template: a small chat is rendered with a placeholder for the model's turn, and the
text after the placeholder (end of turn, new messages, start of the next turn) is encoded alone. If the model has ended its
turn itself, that end is not repeated; if it was cut short, it is added, untrained.

Some templates remove the thinking of earlier turns. With `thinking = "keep"` it stays (the model then sees what it was trained
on); with "drop" every turn gets what the template renders, and a new part begins where that differs from the sequence so far.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import TypeVar

from millstream.env.base import Content, Context, Text
from millstream.errors import EnvironmentFailed
from millstream.types import TOOLS_ROLE, Completion, Finish, Message, TurnLimits

T = TypeVar("T")
# Text that no environment sends and no template changes: it has neither space nor markup.
PLACEHOLDER = "\u2016millstream\u2016"
SMALL_CHAT = (Message(role="user", content="?"), Message(role="assistant", content=PLACEHOLDER))


def as_messages(content: Content) -> tuple[Message, ...]:
    return (Message(role="user", content=content),) if isinstance(content, str) else tuple(content)


def delta(text: Text, new: Sequence[Message], *, after: Completion) -> list[int]:
    """The tokens between the model's last turn and its next one."""
    tokens = text.encode(after_placeholder(text, new))
    return tokens if after.finish is not Finish.STOP else without_end(text, tokens, after)


def after_placeholder(text: Text, new: Sequence[Message]) -> str:
    rendered = text.render([*SMALL_CHAT, *new])
    before, found, rest = rendered.rpartition(PLACEHOLDER)
    if not found or PLACEHOLDER in before:
        raise EnvironmentFailed(
            "the model's chat template does not render the assistant's turn exactly once: its turns cannot be appended one by "
            "one. Use string prompts, or a model with another template"
        )
    return rest


def without_end(text: Text, tokens: list[int], after: Completion) -> list[int]:
    """Without the end of the turn if the model has sampled it; only space may come before it. If it has sampled another special
    token, that one is the end."""
    if not after.tokens or not is_special(text, after.tokens[-1]):
        return tokens
    if after.tokens[-1] not in tokens:
        return tokens[1:] if tokens and is_special(text, tokens[0]) else tokens
    place = tokens.index(after.tokens[-1])
    return tokens[place + 1 :] if not text.decode(tokens[:place]).strip() else tokens


def is_special(text: Text, token: int) -> bool:
    return not text.decode([token])


def _without_end(text: Text, completion: Completion) -> Sequence[int]:
    is_ended = completion.finish is Finish.STOP and completion.tokens and is_special(text, completion.tokens[-1])
    return completion.tokens[:-1] if is_ended else completion.tokens


class Conversation:
    """A `millstream.env.Context` that adds text to a context of tokens."""

    def __init__(self, context: Context, text: Text, *, thinking: str = "keep", agent: int = 0) -> None:
        self._first = self._context = context
        self.task = context.task
        self.seed = context.seed
        self.text = text
        self._is_dropping = thinking == "drop"
        self._agent = agent
        self._shown: list[int] = []  # the sequence so far, sampled and not
        self._messages: list[Message] = []
        self._last: Completion | None = None
        self._is_chat = False

    async def ask(self, content: Content, *, is_raw: bool = False) -> str:
        if self._last is None:
            self._is_chat = not isinstance(content, str) or self._is_task_chat()
        if not self._is_chat and not isinstance(content, str):
            raise EnvironmentFailed("the conversation began as plain text: messages cannot be added to it")
        num_messages = len(self._messages)
        try:
            tokens = self._tokens_for(content)
            completion = await self._context.generate(tokens)
        except BaseException:  # including cancellation
            del self._messages[num_messages:]  # they were not sent
            raise
        self._add(tokens, completion)
        answer = self.text.decode(_without_end(self.text, completion) if is_raw else completion.tokens, is_raw=is_raw)
        if self._is_chat:
            self._messages.append(Message(role="assistant", content=answer))
        return answer

    async def generate(self, tokens: Sequence[int], limits: TurnLimits | None = None) -> Completion:
        completion = await self._context.generate(tokens, limits)
        self._add(tokens, completion)
        return completion

    def _add(self, tokens: Sequence[int], completion: Completion) -> None:
        self._shown += [*tokens, *completion.tokens]
        self._last = completion

    async def waiting(self, what: str, work: Awaitable[T], *, is_timed: bool = True) -> T:
        return await self._context.waiting(what, work, is_timed=is_timed)

    def earned(self, reward: float) -> None:
        self._context.earned(reward)

    def part(self, agent: int = 0) -> Conversation:
        thinking = "drop" if self._is_dropping else "keep"
        return Conversation(self._first.part(agent), self.text, thinking=thinking, agent=agent)

    def _is_task_chat(self) -> bool:
        return self.text.has_chat and not isinstance(self.task.prompt, str)

    def _tokens_for(self, content: Content) -> list[int]:
        """The tokens to append; in a new part, its beginning."""
        if not self._is_chat:
            assert isinstance(content, str)
            return self.text.opening(content) if self._last is None else self.text.encode(content)
        new = as_messages(content)
        if self._last is None:
            self._messages += [*self._system(content), *new]
            return self.text.opening(self._messages)
        self._messages += new
        return self._after_rewriting() if self._is_dropping else delta(self.text, new, after=self._last)

    def _system(self, content: Content) -> Sequence[Message]:
        """The task's tools and system messages, if the environment sends a string."""
        if isinstance(self.task.prompt, str) or not isinstance(content, str):
            return ()
        return [message for message in self.task.prompt if message.role in (TOOLS_ROLE, "system")]

    def _after_rewriting(self) -> list[int]:
        """The whole chat as the template renders it now. If the sequence is its beginning, the rest; otherwise a new part
        begins."""
        tokens = self.text.encode(self.text.render(self._messages))
        if tokens[: len(self._shown)] == self._shown:
            return tokens[len(self._shown) :]
        self._context = self._first.part(self._agent)
        self._shown = []
        return tokens
