"""What a server is asked besides generation: to identify itself, to load weights, to end all requests, to accept them again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from millstream.clock import Clock
from millstream.engine.http.dialects import Dialect, ServerCall, UpdateArguments
from millstream.engine.http.server import ServerConnection, TransientFailure, UpdateUnconfirmed
from millstream.engine.http.weight_folder import WeightLink
from millstream.errors import EngineError, RequestRefused
from millstream.retry import BackOff, Retry

ATTEMPT_BACK_OFF = BackOff(first_s=0.1, longest_s=10.0)
HINT = "look whether the server is up; engine.http.retries and engine.http.timeout_s set the limits"


class ServerControl:
    """`link` None: the server takes no weights, and is neither held nor released. Methods raise `EngineError` when `retries`
    are used up, but for `prepare`, which tries once."""

    def __init__(
        self, server: ServerConnection, dialect: Dialect, link: WeightLink | None, *, retries: int, clock: Clock
    ) -> None:
        self._server = server
        self._dialect = dialect
        self._link = link
        self._retries = retries
        self._clock = clock
        self._is_identified = False
        self.has_weights = link is None  # whether it has those of the link, as far as is known

    @property
    def is_prepared(self) -> bool:
        return self.has_weights and self._is_identified

    @property
    def version_offset(self) -> int:
        """A server that counts versions calls our version n this much more: what it had before is older."""
        return self._server.served_version + (self._link is not None)

    async def identify(self) -> None:
        """Once: that it is what the config says. Raises `EngineMisconfigured` if it is not."""
        await self._insist(self._identify)

    async def hold(self) -> None:
        """It ends all requests, and starts none until `release`."""
        await self._insist_on(self._dialect.hold)

    async def release(self) -> None:
        await self._insist_on(self._dialect.release)

    async def update(self) -> None:
        """It loads the weights of the link."""
        for call in self._update_calls():
            await self._insist_on(call)
        self.has_weights = True

    async def prepare(self) -> None:
        """Identify it and load the weights of the link. It is new, or may have been restarted: whatever else runs there, of an
        earlier run perhaps, is ended first. Raises `TransientFailure`, too."""
        await self._identify()
        if self._link is not None and not self.has_weights:
            for call in (self._dialect.hold, *self._update_calls(), self._dialect.release):
                if call is not None:
                    await self._server.call(call)
            self.has_weights = True

    async def _identify(self) -> None:
        if not self._is_identified:
            await self._server.identify(self._dialect)
            self._is_identified = True

    def _update_calls(self) -> list[ServerCall]:
        assert self._link is not None
        written = self._link.written
        served_version = self.version_offset + written.version
        return self._dialect.update(UpdateArguments(self._link.path, served_version, written.label, written.manifest))

    async def _insist_on(self, call: ServerCall | None) -> None:
        if call is not None and self._is_identified and self._link is not None:
            await self._insist(lambda: self._server.call(call))

    async def _insist(self, work: Callable[[], Awaitable[object]]) -> None:
        """Retried; but an update that was not answered in time is not asked for again."""
        retry = Retry(ATTEMPT_BACK_OFF, max_failures=self._retries)
        while True:
            try:
                await work()
                return
            except RequestRefused as error:
                raise EngineError(str(error)) from error
            except UpdateUnconfirmed as error:
                raise EngineError(f"{error}. Look what the server does, or set that higher") from error
            except TransientFailure as failure:
                if (wait_s := retry.failed(self._clock.now())) is None:
                    raise EngineError(f"{failure}. That is {retry.num_failures} failures in a row: {HINT}") from failure
                await asyncio.sleep(max(wait_s, failure.after_s))
