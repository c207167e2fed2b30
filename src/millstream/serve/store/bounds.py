"""Names that clients invent: bounded in number and length, and kept once however often they are sent."""

from __future__ import annotations

from collections.abc import Iterable

from millstream.serve.http import HttpError


class BoundedNames:
    """The names of one kind that are in use. `how` says how to make room."""

    def __init__(self, kind: str, limit: int, how: str) -> None:
        self._kind = kind
        self._limit = limit
        self._how = how
        self._names: dict[str, str] = {}

    def use(self, names: Iterable[str]) -> list[str]:
        """The same names as they are kept. Raises `HttpError` if there would be too many; then none is added."""
        names = list(names)
        new = [name for name in names if name not in self._names]
        if len(self._names) + len(new) > self._limit:
            why = f"there are {len(self._names)} {self._kind}, and {new[0]!r} is new: the limit is {self._limit}"
            raise HttpError(409, f"{why}. {self._how}")
        return [self._names.setdefault(name, name) for name in names]

    def free(self, name: str) -> None:
        self._names.pop(name, None)
