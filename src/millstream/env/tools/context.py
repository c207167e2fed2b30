"""A `Context` whose model may call tools: `ask` returns when the model answers without a call."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from millstream.env.base import Content, Context, Text
from millstream.env.sandbox.base import Sandbox
from millstream.env.tools.parse import AssistantTurn, InvalidCall, Parser, ToolCall, parser_named
from millstream.env.tools.toolset import ToolSet
from millstream.errors import EnvironmentFailed, RequestRefused
from millstream.types import TOOLS_ROLE, Completion, Message, TurnLimits

T = TypeVar("T")
MAX_ROUNDS = 16
MAX_CALLS = 64
"""Of one turn: a model that repeats itself would otherwise call for as long as its turn lasts."""


class ToolContext:
    """`parse` finds the calls in an answer; None: by the format of the chat template. `max_rounds`: turns with calls that one
    `ask` may have; the calls of the turn after these are not made."""

    def __init__(
        self,
        context: Context,
        tools: ToolSet,
        *,
        parse: Parser | None = None,
        max_rounds: int = MAX_ROUNDS,
        sandbox: Sandbox | None = None,
    ) -> None:
        self.task = context.task
        self.seed = context.seed
        self.calls: list[tuple[ToolCall | InvalidCall, str]] = []  # of the episode, with what the model saw
        self.sandbox = sandbox  # of the rollout. None: the environment has none
        self._context = context
        self._tools = tools
        self._parse = parse or parser_named(context.text.tool_format)
        self._max_rounds = max_rounds
        self._has_schemas = False

    @property
    def text(self) -> Text:
        return self._context.text

    async def open(self) -> None:
        """Wait until all tools are known."""
        await self._tools.open()

    async def ask(self, content: Content, *, is_raw: bool = False) -> str:
        await self._tools.open()
        if not self._tools.schemas:
            return await self._context.ask(content, is_raw=is_raw)
        turn = self._parsed(await self._context.ask(self._with_schemas(content), is_raw=True))
        self._has_schemas = True
        for _ in range(self._max_rounds):
            if not turn.calls:
                break
            results = [await self._answered(call) for call in turn.calls[:MAX_CALLS]]
            try:
                turn = self._parsed(await self._context.ask(results, is_raw=True))
            except RequestRefused:  # the context is full: what was said so far counts, and the rollout is marked as cut
                break
        return turn.content

    def _with_schemas(self, content: Content) -> Content:
        """The first messages say which tools there are."""
        if self._has_schemas:
            return content
        messages = [Message(role="user", content=content)] if isinstance(content, str) else list(content)
        if isinstance(content, str) and not isinstance(self.task.prompt, str):
            messages = [*(one for one in self.task.prompt if one.role == "system"), *messages]
        others = [one for one in messages if one.role != TOOLS_ROLE]
        return [Message(role=TOOLS_ROLE, content=json.dumps(self._tools.schemas)), *others]

    def _parsed(self, answer: str) -> AssistantTurn:
        turn = self._parse(answer)
        if not isinstance(turn, AssistantTurn):
            raise EnvironmentFailed(f"the tool format returned {type(turn).__name__}: expected AssistantTurn")
        return turn

    async def _answered(self, call: ToolCall | InvalidCall) -> Message:
        name = call.name if isinstance(call, ToolCall) else ""
        result = await self._context.waiting(
            f"the tool {name}" if name else "a tool", self._tools.run(call, self.sandbox)
        )
        self.calls.append((call, result))
        # Mistral's templates want nine letters or digits
        fields = {"tool_call_id": f"call{len(self.calls):05d}", **({"name": name} if name else {})}
        return Message(role="tool", content=result, fields=json.dumps(fields))

    async def generate(self, tokens: Sequence[int], limits: TurnLimits | None = None) -> Completion:
        return await self._context.generate(tokens, limits)

    async def waiting(self, what: str, work: Awaitable[T], *, is_timed: bool = True) -> T:
        return await self._context.waiting(what, work, is_timed=is_timed)

    def earned(self, reward: float) -> None:
        self._context.earned(reward)

    def adding(self, tools: ToolSet) -> ToolContext:
        """The same conversation with more tools."""
        both = self._tools.joined(tools)
        return self._like(self._context, both)

    def part(self, agent: int = 0) -> ToolContext:
        return self._like(self._context.part(agent), self._tools)

    def _like(self, context: Context, tools: ToolSet) -> ToolContext:
        return ToolContext(context, tools, parse=self._parse, max_rounds=self._max_rounds, sandbox=self.sandbox)
