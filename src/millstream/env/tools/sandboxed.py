"""Tools that act in the rollout's sandbox: `bash` runs a command, `edit` views and changes a file.

What goes wrong with a command or a path is an answer that the model sees. A sandbox that is lost fails the rollout."""

from __future__ import annotations

import functools
import io
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from millstream.env.sandbox.base import Executed, Sandbox
from millstream.env.tools.call import ToolFailed, bound_arguments
from millstream.env.tools.config import ToolConfig
from millstream.env.tools.schema import tool_function

EDITS = Literal["view", "create", "replace", "insert"]


async def bash(sandbox: Sandbox, timeout_s: float, command: str) -> str:
    """Run a shell command and return what it prints. Every command has a shell of its own; files stay.

    Args:
        command: the command, of one line or several
    """
    try:
        done = await sandbox.exec(command, timeout_s=timeout_s)
    except ValueError as error:
        raise ToolFailed(str(error)) from error
    return "\n".join(filter(None, (done.output.decode(errors="replace").rstrip("\n"), _end(done, timeout_s))))


async def edit(
    sandbox: Sandbox, timeout_s: float, command: EDITS, path: str, text: str = "", old: str = "", line: int = 0
) -> str:
    """View or change a text file.

    Args:
        command: view the file, create it with a text, replace an old text by a new one, or insert a text after a line
        path: the file
        text: the new text, of create, replace and insert
        old: of replace: the old text, which must be in the file exactly once
        line: of insert: the line after which the text comes, 0 for the beginning; of view: the first line that is shown
    """
    try:
        if command == "create":
            await sandbox.write(path, _encoded(text))
            return f"{path} has {len(_lines(text))} lines."
        whole = _decoded(await sandbox.read(path), path)
        if command == "view":
            first = max(line, 1)
            shown = [one.removesuffix("\n") for one in _lines(whole)[first - 1 :]]
            return "\n".join(f"{number:6}\t{one}" for number, one in enumerate(shown, first))
        new = _replaced(whole, old, text, path) if command == "replace" else _inserted(whole, text, line, path)
        await sandbox.write(path, _encoded(new))
        return f"{path} has {len(_lines(new))} lines."
    except OSError as error:
        raise ToolFailed(f"{path}: {error.strerror}") from error


SANDBOX_TOOLS: Mapping[str, Callable[..., Awaitable[str]]] = {"bash": bash, "edit": edit}


class SandboxTool:
    """A tool of `SANDBOX_TOOLS`. `config.timeout_s` is the limit of a command."""

    def __init__(self, config: ToolConfig) -> None:
        self.config = config
        self._function = SANDBOX_TOOLS[config.function]
        self._known = tool_function(self._function, {"sandbox": None, "timeout_s": None})
        self.schema = self._known.schema()

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox | None) -> str:
        bound = bound_arguments(self._known, arguments)
        if sandbox is None:
            raise ToolFailed("there is no sandbox")
        return await functools.partial(self._function, sandbox, self.config.timeout_s)(**bound)


def _end(done: Executed, timeout_s: float) -> str:
    match done.how:
        case "ended":
            return f"[exit code {done.code}]" if done.code else ""
        case "time":
            return f"[stopped: it took longer than {timeout_s:g} s]"
        case how:
            return f"[stopped: more {how} than allowed]"


def _replaced(whole: str, old: str, text: str, path: str) -> str:
    number = whole.count(old) if old else 0
    if number != 1:
        raise ToolFailed(f"{path}: the old text is there {number} times: expected exactly once")
    return whole.replace(old, text)


def _inserted(whole: str, text: str, line: int, path: str) -> str:
    lines = _lines(whole)
    if not 0 <= line <= len(lines):
        raise ToolFailed(f"{path}: no line {line}: expected 0 to {len(lines)}")
    if line and not lines[line - 1].endswith("\n"):
        lines[line - 1] += "\n"
    if text and not text.endswith("\n") and line < len(lines):
        text += "\n"
    return "".join((*lines[:line], text, *lines[line:]))


def _decoded(data: bytes, path: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ToolFailed(f"{path}: it is not text in UTF-8: use bash") from error


def _encoded(text: str) -> bytes:
    return text.encode(errors="replace")  # half of a surrogate pair is no text


def _lines(text: str) -> list[str]:
    """With their ends. Only a newline ends one, as for `sed` and `grep`."""
    return list(io.StringIO(text))
