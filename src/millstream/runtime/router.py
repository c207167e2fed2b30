"""One front for all engine replicas: the least loaded one whose weights are new enough.

A group's requests go only to engines at its start version or later, so that no token is older than the lag bound allows.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.engine import Engine
from millstream.errors import EngineError
from millstream.types import Completion, Request


class Router:
    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        self._in_flight = [0] * len(self.engines)

    def serving_versions(self) -> list[int]:
        """The versions a new group could start at: the oldest lets every replica serve it, the newest only some."""
        return sorted({engine.version for engine in self.engines})

    async def generate(self, request: Request, *, floor: int) -> Completion:
        """Dispatch to an engine at version `floor` or later. The request is queued there before this first suspends."""
        index = self._choose(floor)
        self._in_flight[index] += 1
        try:
            completion = await self.engines[index].generate(request)
        finally:
            self._in_flight[index] -= 1
        if completion.versions and min(completion.versions) < floor:
            raise EngineError(
                f"{self.engines[index].name} sampled {request.key} with version {min(completion.versions)} after it had "
                f"shown version {floor}: an engine's version must never fall"
            )
        return completion

    def _choose(self, floor: int) -> int:
        fresh = [index for index, engine in enumerate(self.engines) if engine.version >= floor]
        if not fresh:
            raise EngineError(f"no engine is at version {floor} or later: they are at {self.serving_versions()}")
        return min(fresh, key=lambda index: (self._in_flight[index], index))
