"""A run for programs outside: their engines sample for it, their learners train for it. See docs/outside.md.

The verbs are those of the store's service (`serve.store.service`), under the same paths:

    GET   /v1/run                  what a program must know: the run's id, version, sampling, and what is outside   200
    POST  /v1/prompts/claim        requests of admitted groups, on lease (`engine.outside`)                         200, 204
    POST  /v1/experience           what was sampled for them                                                       201
    POST  /v1/experience/claim     a batch to train, on lease (`learner.outside`)                                   200, 204
    POST  /v1/weights              the weights that it gave                                                         200
    GET   /v1/weights              wait for weights                                                                 200, 204
    POST  .../leases/ID/renew, give_back, acknowledge                                                               204

409: refused, with the name of the reason first. 410: the run is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import UNSET
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from millstream.engine.outside import OutsideEngine
from millstream.errors import StoreError
from millstream.learner.outside import OfferedBatches, OutsideLearner
from millstream.serve.http import BodyReader, respond
from millstream.serve.store.bodies import NewWeights, PutBody
from millstream.serve.store.service import Section, StoreServiceConfig, WeightsNotices, sections_app
from millstream.types import Metrics

CLAIMS = ("claim", "renew", "give_back", "acknowledge")


class OutsideExperience(Section):
    """Rows come from engines outside, and batches go to learners outside."""

    engine: OutsideEngine | None = None

    async def put(self, request: Request) -> Response:
        body = await self._bodies.read(request, PutBody)
        columns = self._columns_of(body, request)
        assert self.engine is not None, "without it there is no such route"
        await self.engine.put(columns)
        return respond(request, {"row_ids": columns["request"]}, 201)


class OutsideService:
    """`engine`: of the run, where it is outside. `batches`: of its learner, where that is. `describe`: the answer to GET
    /v1/run. The learner is set when it is made."""

    def __init__(
        self,
        config: StoreServiceConfig,
        *,
        engine: OutsideEngine | None,
        batches: OfferedBatches | None,
        describe: Callable[[], dict[str, Any]],
        token: str | None,
    ) -> None:
        self.learner: OutsideLearner | None = None
        self._describe = describe
        bodies = BodyReader(max_body_bytes=config.max_body_bytes, max_wait_s=config.max_wait_s)
        self.notices = WeightsNotices(bodies, self._publish)
        self._has_engine = engine is not None
        sections: list[Section] = []
        if engine is not None:
            engine.on_loaded = self.announce
            sections.append(Section("prompts", engine.offers, bodies, config, needs_groups=False, verbs=CLAIMS))
        verbs = (*(() if engine is None else ("put",)), *(() if batches is None else CLAIMS))
        experience = OutsideExperience(
            "experience", batches or OfferedBatches(), bodies, config, needs_groups=False, verbs=verbs
        )
        experience.engine = engine
        self.app: Starlette = sections_app(
            [*sections, experience], self.notices, config, token=token, routes=[Route("/v1/run", self.show)]
        )

    def announce(self, version: int, where: str) -> None:
        """Of an engine outside: what it is to load."""
        self.notices.set(NewWeights(version=version, where=where))

    def on_published(self, version: int, where: str) -> None:
        """Of a learner outside. Engines outside get a notice from their own `load`, when the run has the version."""
        if not self._has_engine:
            self.announce(version, where)

    async def show(self, request: Request) -> Response:
        newest = self.notices.newest
        found = self._describe()
        found |= (
            {"version": None, "where": None} if newest is None else {"version": newest.version, "where": newest.where}
        )
        return respond(request, found)

    async def _publish(self, new: NewWeights) -> None:
        if self.learner is None:
            raise StoreError("not admitted: this run publishes weights itself, or does not train yet")
        metrics: Metrics = {} if new.metrics is UNSET else new.metrics
        await self.learner.publish(new.version, new.where or "", metrics)
