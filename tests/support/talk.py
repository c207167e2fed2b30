"""Tokenizers with chat templates, made on the spot, and episodes that are played with a script."""

from __future__ import annotations

import asyncio
import string
from collections.abc import Awaitable, Sequence
from typing import Any

from millstream.env.dialog import Conversation
from millstream.errors import RequestRefused
from millstream.model.tiny import character_tokenizer
from millstream.pipeline.episode import Episode
from millstream.run.text import TokenizerText
from millstream.types import Completion, Finish, Request, RequestKey, Sampling, Task

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set content = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "Call: <tool_call>...</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }} <|im_end|>{% endif %}{% endfor %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>"]
THINKING = ["<think>", "</think>"]


def text_with(template: str | None) -> TokenizerText:
    tokenizer: Any = character_tokenizer(string.ascii_letters + string.digits + " \n.,?!:+-*/=<>|[](){}_'\"^;")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.add_tokens(THINKING)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = template
    return TokenizerText(tokenizer=tokenizer)


def completion(tokens: Sequence[int], finish: Finish = Finish.STOP) -> Completion:
    logprobs = tuple(-0.1 * (1 + index) for index in range(len(tokens)))
    return Completion(tokens=tuple(tokens), logprobs=logprobs, versions=(3,) * len(tokens), finish=finish)


class Scripted:
    """An episode whose model says what is written here, turn by turn; a turn that ends with `...` is cut by its length."""

    def __init__(
        self,
        text: TokenizerText,
        says: Sequence[str],
        *,
        task: Task | None = None,
        thinking: str = "keep",
        max_parts: int = 1,
        room: int | None = None,
    ) -> None:
        self.text, self.requests, self.said = text, list[Request](), list[Completion]()
        self._says, self._room = iter(says), room
        self.episode = Episode(
            task or Task(id="1", prompt="p"),
            RequestKey(group_id=0, member=0),
            generate=self._generate,
            waiting=self._waiting,
            sampling=Sampling(max_tokens=64),
            run_seed=0,
            role="train",
            max_parts=max_parts,
        )
        self.context = Conversation(self.episode, text, thinking=thinking)

    async def _generate(self, request: Request) -> Completion:
        if self._room is not None and len(request.tokens) > self._room:
            raise RequestRefused("no room")
        said = next(self._says)
        await asyncio.sleep(0)
        is_cut = said.endswith("...")
        tokens = self.text.encode(said.removesuffix("..."))
        found = completion(tokens, Finish.LENGTH) if is_cut else completion([*tokens, self.text.end_token])
        self.requests.append(request)
        self.said.append(found)
        return found

    @staticmethod
    async def _waiting(what: str, work: Awaitable[Any]) -> Any:
        return await work

    def shown(self, tokens: Sequence[int]) -> str:
        return str(self.text.tokenizer.decode(tokens))
