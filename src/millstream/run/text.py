"""The tokenizer as environments see it: text to tokens, tokens to text, chats through the tokenizer's template."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

from jinja2 import TemplateError
from msgspec import Struct, field
from transformers import PreTrainedTokenizerBase

from millstream.env import Content
from millstream.env.tools import format_of
from millstream.errors import DataError
from millstream.run.check_machine import NO_TEMPLATE
from millstream.types import ROLES, TOOLS_ROLE, Message, Task

logger = logging.getLogger(__name__)
MAX_PROMPTS_KEPT = 32_768
NOT_SHOWN = (
    "the chat has {what}, and the model's chat template does not show them: the model would never see them. Use a model whose "
    "template does, or change the data"
)
NAME_CUT = (
    "\ufdd0"  # no character: where `render` has cut the name of a control token, which `encode` then reads as text
)
MAX_CHARACTERS_KEPT = 256  # of a text that is kept with its tokens


class TokenizerText(Struct, frozen=True, kw_only=True, eq=False):
    """A `millstream.env.Text` by one tokenizer. Encoded texts are kept, so that each is encoded once."""

    tokenizer: PreTrainedTokenizerBase
    is_watched: bool = False
    """Whether to warn, once, of text that the tokenizer does not know."""
    warnings: list[str] = field(default_factory=list)
    max_prompts_kept: int = MAX_PROMPTS_KEPT
    """Prompts kept with their tokens, however long they are."""
    _opened: dict[str | tuple[Message, ...], list[int]] = field(default_factory=dict)
    _encoded: dict[str, list[int]] = field(default_factory=dict)

    @property
    def has_chat(self) -> bool:
        return bool(self.tokenizer.chat_template)

    @property
    def end_token(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def tool_format(self) -> str:
        return format_of(str(self.tokenizer.chat_template or ""))

    def encode(self, text: str) -> list[int]:
        """Short texts are kept: environments say the same ones again and again."""
        found = self._encoded.get(text)
        if found is None:
            pieces = text.split(NAME_CUT)
            found = [token for one in pieces for token in self.tokenizer(one, add_special_tokens=False).input_ids]
            self._warn_of_unknown(text, found)
            if len(text) <= MAX_CHARACTERS_KEPT:
                if len(self._encoded) >= MAX_PROMPTS_KEPT:
                    self._encoded.clear()
                self._encoded[text] = found
        return found.copy()

    def opening(self, content: Content) -> list[int]:
        """Kept: the check before the run, or the first member of a group, encodes it."""
        key = content if isinstance(content, str) else tuple(content)
        tokens = self._opened.get(key)
        if tokens is None:
            tokens = list(self.tokenizer(key).input_ids) if isinstance(key, str) else self.encode(self.render(key))
            self._warn_of_unknown(key, tokens)
            if len(self._opened) >= self.max_prompts_kept:
                self._opened.clear()
            self._opened[key] = tokens
        return tokens

    def open_together(self, contents: Iterable[Content]) -> None:
        """Keep the openings of all that are strings, as far as there is room. Encoded one by one they would take twice as
        long."""
        new = [one for one in dict.fromkeys(one for one in contents if isinstance(one, str)) if one not in self._opened]
        if new := new[: self.max_prompts_kept - len(self._opened)]:
            for content, tokens in zip(new, self.tokenizer(new).input_ids, strict=True):
                self._opened[content] = list(tokens)
                self._warn_of_unknown(content, tokens)

    def render(self, messages: Sequence[Message]) -> str:
        if not self.tokenizer.chat_template:
            raise DataError(NO_TEMPLATE)
        chat = [self._dict(message) for message in messages if message.role != TOOLS_ROLE]
        tools = [tool for one in messages if one.role == TOOLS_ROLE for tool in json.loads(one.content)]
        if not chat:
            raise DataError("a chat without a message: expected at least one")
        try:
            rendered = self._rendered(chat, tools)
            if tools and rendered == self._rendered(chat, []):
                raise DataError(NOT_SHOWN.format(what="tools"))
            if any("tool_calls" in message for message in chat):
                others = [{key: value for key, value in one.items() if key != "tool_calls"} for one in chat]
                if rendered == self._rendered(others, tools):
                    raise DataError(NOT_SHOWN.format(what="tool_calls"))
            for role in {message["role"] for message in chat} - {*ROLES}:
                others = [one for one in chat if one["role"] != role] or [{**one, "content": ""} for one in chat]
                if rendered == self._rendered(others, tools):
                    what = f"messages of the role {role!r} (usual: {', '.join(ROLES)})"
                    raise DataError(NOT_SHOWN.format(what=what))
            return rendered
        except (TemplateError, TypeError) as error:  # a template may add what cannot be added
            roles = ", ".join(message.role for message in messages)
            raise DataError(f"the model's chat template refuses a chat of {roles}: {error}") from error

    def _dict(self, message: Message) -> dict[str, Any]:
        """As the template reads it. The name of a control token in a tool's result is text: it does not end the turn."""
        found = message.as_dict()
        if message.role == "tool":
            names = _control_tokens(self.tokenizer)
            found["content"] = names.sub(lambda name: f"{name[0][0]}{NAME_CUT}{name[0][1:]}", message.content)
        return found

    def _rendered(self, chat: list[dict[str, Any]], tools: list[Any]) -> str:
        """Without tools the template gets None: some write that there are tools for any list."""
        return str(self.tokenizer.apply_chat_template(chat, tools or None, add_generation_prompt=True, tokenize=False))

    @property
    def unknown_token(self) -> int | None:
        """What the tokenizer writes for text that it does not know. None: there is no such text, as for one of bytes."""
        tokenizer, found = self.tokenizer, self.tokenizer.unk_token_id
        others = (None, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
        return None if found in others else int(found)

    def _warn_of_unknown(self, text: object, tokens: Sequence[int]) -> None:
        """Prompts are checked before the run; what an environment says is known only when it says it."""
        if self.is_watched and not self.warnings and self.unknown_token in tokens:
            self.warnings.append(
                f"the tokenizer does not know something in {text!r}: the model sees {self.tokenizer.unk_token}"
            )
            logger.warning("%s", self.warnings[0])

    def unknown_pieces(self, task: Task) -> list[str]:
        """The pieces of a string prompt that the tokenizer does not know, each once."""
        if not isinstance(task.prompt, str) or not self.tokenizer.is_fast:
            return []
        found = self.tokenizer(task.prompt, return_offsets_mapping=True)
        spans = zip(found.input_ids, found.offset_mapping, strict=True)
        pieces = (task.prompt[begin:end] for token, (begin, end) in spans if token == self.tokenizer.unk_token_id)
        return list(dict.fromkeys(pieces))

    def decode(self, tokens: Sequence[int], *, is_raw: bool = False) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=not is_raw))


@functools.lru_cache(maxsize=16)
def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Finds the names of special tokens, such as the end of a turn."""
    names = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")
