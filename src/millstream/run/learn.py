"""The endpoint of a run that learns from its use: `serve.learn` on its engines, while the pipeline trains. Imports torch."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from shlex import quote

from msgspec import Struct, structs

from millstream.config import load
from millstream.errors import ConfigError
from millstream.events import SessionDropped
from millstream.model.load import context_length
from millstream.paths import program
from millstream.pipeline.schedule import PipelineConfig
from millstream.run.active import ActiveRun
from millstream.run.config import RunConfig
from millstream.run.folder import RunFolder
from millstream.serve.auth import check_token
from millstream.serve.learn import LearningService, RoutedEngine, SessionJournal
from millstream.serve.listen import listening_at
from millstream.serve.openai.app import service_app
from millstream.serve.openai.service import ModelServiceConfig, Served
from millstream.serving.router import Router

JOURNAL = "sessions.jsonl"


class LearningEndpoint(Struct, frozen=True, kw_only=True, eq=False):
    """Where a run that learns from its use is served. `on_ready` is called with the URL."""

    service: ModelServiceConfig
    token: str | None
    name: str  # of the model, for clients
    on_ready: Callable[[str], None] = lambda url: None


def check_endpoint(config: RunConfig, endpoint: LearningEndpoint | None) -> None:
    """Raises `ConfigError` where one is missing, or nothing would use it."""
    if config.data.sessions and endpoint is None:
        raise ConfigError(f"a run with data.sessions learns from its use. Serve it:\n  {program()} serve RUN --learn")
    if endpoint is not None and endpoint.token is None:
        raise ConfigError(
            "clients that reward sessions decide what the model learns: --learn needs a token that they must send: "
            "export MILLSTREAM_TOKEN=$(openssl rand -hex 16)"
        )
    if endpoint is not None:
        check_token(endpoint.service.host, endpoint.token)


def learning_config(folder: RunFolder, changes: tuple[str, ...]) -> RunConfig:
    """That of a new run, which begins with the newest checkpoint of this one and learns from its use."""
    config = load(folder.config, RunConfig, changes)
    is_same_folder = config.run_dir is not None and Path(config.run_dir).resolve() == folder.path.resolve()
    return structs.replace(
        config,
        warmup=None,
        data=structs.replace(config.data, sessions=True, rollouts=None),
        run_dir=None if is_same_folder else config.run_dir,
    )


async def open_journal(run: ActiveRun) -> SessionJournal:
    path, on_dropped = run.folder.path / JOURNAL, partial(drop_session, run)
    opening = asyncio.to_thread(SessionJournal, path, run.start_version, on_dropped)
    return await run.waits.on("the run", f"{JOURNAL} to be read", opening)


def drop_session(run: ActiveRun, session: str, why: str) -> None:
    run.log.emit(SessionDropped(at=run.clock.now(), session=session[:16], why=why))


@asynccontextmanager
async def serving(run: ActiveRun, router: Router, journal: SessionJournal) -> AsyncIterator[None]:
    """Serves while the block lasts. Raises `ConfigError` if it cannot listen."""
    endpoint, prepared, pipeline = run.endpoint, run.prepared, run.pipeline
    assert endpoint is not None and pipeline is not None, "see `check_endpoint`"
    context = context_length(prepared.model)
    served = Served(
        name=endpoint.name,
        engine=RoutedEngine(router),
        text=prepared.text,
        end_tokens=prepared.sampling.stop,
        vocabulary=int(prepared.model.get_input_embeddings().num_embeddings),
        context=8192 if context is None else context,
    )
    limits = structs.replace(endpoint.service.sessions, idle_s=run.config.rollout.timeout_s)
    service = LearningService(
        served,
        structs.replace(endpoint.service, sessions=limits, weights_from=None),
        run.clock,
        sampling=prepared.sampling,
        max_parts=run.config.rollout.max_parts,
        admission=pipeline.admission,
        journal=journal,
        on_dropped=partial(drop_session, run),
    )
    max_requests = endpoint.service.max_requests
    async with listening_at(
        service_app(service, token=endpoint.token, max_requests=max_requests),
        endpoint.service.host,
        endpoint.service.port,
        token=endpoint.token,
        max_requests=max_requests,
        limits=endpoint.service.http,
    ) as url:
        endpoint.on_ready(url)
        yield
    if pipeline.admission.is_finished and (num_waiting := len(journal) - pipeline.num_fed):
        run.warn(waiting_message(num_waiting, run.config.pipeline, run.folder.path))


def waiting_message(num_sessions: int, config: PipelineConfig, folder: Path) -> str:
    """Rewarded sessions that a run had no step left for."""
    steps = config.steps + math.ceil(num_sessions / config.groups_per_step)
    return (
        f"the run has made its last step, and rewarded sessions wait in {JOURNAL}: {num_sessions}. To train them: "
        f"{program()} serve {quote(str(folder))} --learn --set pipeline.steps={steps}"
    )
