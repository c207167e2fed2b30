"""A training service that the `tinker` client speaks to. See docs/training_service.md.

    POST /api/v1/client/config, client/dynamic_config      settings of the client
    POST /api/v1/create_session, session_heartbeat         a session
    POST /api/v1/create_model                              a future: new adapters on the base
    POST /api/v1/forward_backward                          a future; protobuf
    POST /api/v1/optim_step, save_weights, load_weights, save_weights_for_sampler    futures
    POST /api/v1/create_sampling_session, asample          a sampling session; a future
    POST /api/v1/retrieve_future, cancel_future            the result of a future; the end of a sample
    GET  /api/v1/get_server_capabilities, healthz, samplers/ID, training_runs/ID/checkpoints
    POST /api/v1/get_info, weights_info, telemetry

422: malformed or not supported. 401, 403: see `serve.auth`. 404: no such session, model, sampler, checkpoint or future. 410: a
sample that a restart has ended: the client samples again. 413: a body that is too large. 429: too much at once: the client
waits and tries again. Errors of a future are its result: an `error` and its `category`, user or server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, field
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from millstream.errors import MillstreamError
from millstream.serve.auth import AccessControl, error_response, given_token
from millstream.serve.http import BodyReader, HttpError
from millstream.serve.limits import HttpLimits
from millstream.serve.listen import listen
from millstream.serve.training import bodies
from millstream.serve.training.base import BaseModel
from millstream.serve.training.data import read_address
from millstream.serve.training.futures import Futures
from millstream.serve.training.journal import JournalEntry
from millstream.serve.training.log import SamplesDone
from millstream.serve.training.models import failure
from millstream.serve.training.registry import Registry
from millstream.serve.training.sampling import SamplingPool
from millstream.serve.training.turns import Sampler

logger = logging.getLogger(__name__)
B = TypeVar("B", bound=Struct)
CLIENT_GONE = 499
POLL_S = 20.0  # that a retrieval waits for its result; the client gives up after 45
HttpHandler = Callable[[Request], Awaitable[Response]]


class TrainingServiceConfig(Struct, frozen=True, kw_only=True):
    folder: str  # for checkpoints, journals and sessions
    host: str = "127.0.0.1"  # an address that other machines can reach (0.0.0.0) needs a token
    port: int = 8100  # 0: a free one
    max_body_bytes: int = 64 << 20
    max_requests: int = 1024  # at once, including those that wait for a result
    max_futures: int = 2048  # of one key: results that it has not retrieved
    max_models: int = 16  # in memory; others are in their folders
    http: HttpLimits = field(default_factory=HttpLimits)


class TrainingService:
    """On the event loop of its engines."""

    def __init__(self, base: BaseModel, config: TrainingServiceConfig) -> None:
        self._base = base
        self._futures = Futures(max_open=config.max_futures)
        self._registry = Registry(Path(config.folder), base, self._futures, max_models=config.max_models)
        self._pool = SamplingPool(base)
        self._bodies = BodyReader(max_body_bytes=config.max_body_bytes, max_wait_s=POLL_S)
        self._sampling: dict[str, asyncio.Task[None]] = {}

    def routes(self) -> list[Route]:
        posts: dict[str, HttpHandler] = {
            "client/config": self._client_config,
            "client/dynamic_config": self._dynamic_config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session}/finish": self._finish,
            "create_model": self._create_model,
            "create_sampling_session": self._create_sampling_session,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
            "get_info": self._info,
            "weights_info": self._weights_info,
            "telemetry": self._telemetry,
        }
        posts |= dict.fromkeys(("optim_step", "save_weights", "load_weights", "save_weights_for_sampler"), self._submit)
        posts["forward_backward"] = self._submit
        gets: dict[str, HttpHandler] = {
            "get_server_capabilities": self._capabilities,
            "healthz": self._health,
            "samplers/{sampler}": self._sampler_info,
            "training_runs/{model}/checkpoints": self._checkpoints,
        }
        return [Route(f"/api/v1/{path}", endpoint, methods=["POST"]) for path, endpoint in posts.items()] + [
            Route(f"/api/v1/{path}", endpoint, methods=["GET"]) for path, endpoint in gets.items()
        ]

    async def close(self) -> None:
        """Samples in flight end; what models were asked to do is in their folders."""
        for task in self._sampling.values():
            task.cancel()
        await self._registry.close()
        await self._pool.close()

    async def _read(self, request: Request, kind: type[B]) -> B:
        return bodies.read_json(await self._bodies.raw(request), kind)

    # ---- the client's settings, sessions

    async def _client_config(self, request: Request) -> Response:
        await self._read(request, bodies.ConfigBody)
        return JSONResponse({"fwdbwd_max_chunk_len": 256, "sample_max_concurrent_requests": 512})

    async def _dynamic_config(self, request: Request) -> Response:
        await self._read(request, bodies.ConfigBody)
        return JSONResponse({"sample_cancel_enabled": True})

    async def _create_session(self, request: Request) -> Response:
        body = await self._read(request, bodies.CreateSessionBody)
        session = self._registry.create_session(key_digest(request), body.user_metadata)
        bound = "" if session.max_lag is None else f"max_lag = {session.max_lag}: older data is refused"
        return JSONResponse({"type": "create_session", "session_id": session.id, "info_message": bound or None})

    async def _heartbeat(self, request: Request) -> Response:
        body = await self._read(request, bodies.SessionBody)
        self._registry.session(body.session_id, key_digest(request))
        return JSONResponse({"type": "session_heartbeat"})

    async def _finish(self, request: Request) -> Response:
        session = self._registry.session(request.path_params["session"], key_digest(request))
        await self._registry.unload(session)
        return Response(status_code=204)

    async def _capabilities(self, request: Request) -> Response:
        model = {"model_name": self._base.name, "max_context_length": self._base.context}
        return JSONResponse({"supported_models": [{**model, "trainable": True, "sampleable": True}]})

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _telemetry(self, request: Request) -> Response:
        """Nothing is kept."""
        await self._bodies.raw(request)
        return JSONResponse({"status": "accepted"})

    # ---- models

    async def _create_model(self, request: Request) -> Response:
        body = await self._read(request, bodies.CreateModelBody)
        request_id = await self._registry.create_model(key_digest(request), body)
        return JSONResponse({"request_id": request_id, "model_id": request_id.rpartition(":")[0]})

    async def _submit(self, request: Request) -> Response:
        """A request to a model: only its address is read here. What else is wrong with it is its result."""
        kind, body = request.url.path.rpartition("/")[2], await self._bodies.raw(request)
        address = read_address(body) if kind == "forward_backward" else bodies.read_json(body, bodies.RequestAddress)
        model = await self._registry.model(address.model_id, key_digest(request))
        request_id = await model.submit(JournalEntry(address.seq_id, kind, body))
        return JSONResponse({"request_id": request_id, "model_id": address.model_id})

    async def _info(self, request: Request) -> Response:
        body = await self._read(request, bodies.ModelBody)
        info = self._registry.model_info(body.model_id, key_digest(request))
        name = {"model_name": info.base_model}
        data = {"arch": self._base.architecture, "tokenizer_id": self._base.tokenizer, **name}
        rank = None if info.lora is None else info.lora.rank
        found = {"model_id": info.id, "is_lora": rank is not None, "lora_rank": rank, **name}
        return JSONResponse({"type": "get_info", "model_data": data, **found})

    async def _weights_info(self, request: Request) -> Response:
        body = await self._read(request, bodies.WeightsInfoBody)
        info, _ = self._registry.checkpoint(body.tinker_path, key_digest(request))
        found: dict[str, Any] = {"base_model": info.base_model, "is_lora": info.lora is not None}
        if info.lora is not None:
            targets = {"train_mlp": info.lora.train_mlp, "train_attn": info.lora.train_attn, "train_unembed": False}
            found |= {"lora_rank": info.lora.rank, **targets}
        return JSONResponse(found)

    async def _checkpoints(self, request: Request) -> Response:
        info = self._registry.model_info(request.path_params["model"], key_digest(request))
        return JSONResponse({"checkpoints": await asyncio.to_thread(self._registry.checkpoints, info)})

    # ---- sampling

    async def _create_sampling_session(self, request: Request) -> Response:
        body = await self._read(request, bodies.CreateSamplingBody)
        sampler = self._registry.create_sampler(key_digest(request), body)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler.id})

    async def _sampler_info(self, request: Request) -> Response:
        sampler = self._registry.sampler(request.path_params["sampler"], key_digest(request))
        return JSONResponse({"sampler_id": sampler.id, "base_model": self._base.name, "model_path": sampler.path})

    async def _sample(self, request: Request) -> Response:
        owner, body = key_digest(request), await self._read(request, bodies.SampleBody)
        sampler = self._registry.sampler(body.sampling_session_id, owner)
        request_id = f"{sampler.id}:{body.seq_id}"
        if request_id not in self._futures:
            self._futures.check_room(owner)
            self._futures.add(request_id, owner)
            self._sampling[request_id] = asyncio.create_task(self._run_sample(request_id, sampler, body))
        sequences = [sampler.sequence_id(body.seq_id, index) for index in range(body.num_samples)]
        return JSONResponse({"request_id": request_id, "sample_sequence_ids": sequences})

    async def _run_sample(self, request_id: str, sampler: Sampler, body: bodies.SampleBody) -> None:
        try:
            result, num_tokens = await self._pool.sample(sampler, body)
            self._registry.logs.emit(
                sampler.session_id,
                SamplesDone(
                    at=time.time(),
                    sampler=sampler.id,
                    seq_id=body.seq_id,
                    version=sampler.version,
                    num_samples=body.num_samples,
                    num_tokens=num_tokens,
                ),
            )
        except asyncio.CancelledError:
            result = failure("the sample was cancelled", "user")
        except HttpError as refused:
            result = failure(str(refused), "user" if refused.status < 500 else "server")
        except Exception as error:  # as in a model: the client gets the reason
            is_known = isinstance(error, MillstreamError)
            if not is_known:
                logger.exception("sample %s failed", request_id)
            result = failure(str(error) if is_known else f"{type(error).__name__}: {error}", "server")
        self._futures.resolve(request_id, result)
        del self._sampling[request_id]

    async def _cancel(self, request: Request) -> Response:
        body = await self._read(request, bodies.CancelBody)
        await self._futures.wait(body.request_id, key_digest(request), wait_s=0)
        if body.request_id in self._sampling:
            self._sampling[body.request_id].cancel()
        return Response(status_code=204)

    # ---- results

    async def _retrieve(self, request: Request) -> Response:
        owner, body = key_digest(request), await self._read(request, bodies.RetrieveBody)
        if not self._futures.is_done(body.request_id):
            await self._bring_back(body.request_id, owner)
        result = await self._futures.wait(body.request_id, owner, wait_s=POLL_S)
        if result is None:
            again = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return JSONResponse(again)
        done = BackgroundTask(self._futures.mark_retrieved, body.request_id)
        return Response(result.body, media_type=result.media_type, background=done)

    async def _bring_back(self, request_id: str, owner: str) -> None:
        """After a restart: a model computes again what it was asked for; samples are gone."""
        if ":sample:" in request_id and request_id not in self._futures:
            self._registry.sampler(request_id.rpartition(":")[0], owner)
            raise HttpError(410, f"{request_id} was being sampled when the service was restarted: sample again")
        if ":train:" in request_id:
            await self._registry.model(request_id.rpartition(":")[0], owner)


def key_digest(request: Request) -> str:
    """The key that the client sent, as a digest: keys are not written to the disk."""
    return blake2b(given_token(request.headers).encode(), digest_size=12).hexdigest()


def training_app(service: TrainingService, config: TrainingServiceConfig, *, tokens: list[str] | None) -> Starlette:
    return Starlette(
        routes=service.routes(),
        middleware=[Middleware(AccessControl, token=tokens, limit=config.max_requests, full=429)],
        exception_handlers={
            HttpError: lambda request, wrong: error_response(wrong.status, str(wrong)),
            MillstreamError: lambda request, wrong: error_response(500, str(wrong)),
            OSError: lambda request, wrong: error_response(
                503, f"the folder of the service: {wrong.strerror or wrong}"
            ),
            ClientDisconnect: lambda request, wrong: Response(status_code=CLIENT_GONE),
            404: lambda request, wrong: error_response(
                404, f"nothing at {request.url.path}: see docs/training_service.md"
            ),
            405: lambda request, wrong: error_response(
                405, f"{request.method} is not supported for {request.url.path}"
            ),
        },
    )


async def host_training(
    base: BaseModel, config: TrainingServiceConfig, *, tokens: list[str] | None, on_ready: Callable[[str], None]
) -> None:
    """Until cancelled or stopped by a signal. `on_ready` is called with the URL."""
    service = TrainingService(base, config)
    try:
        await listen(
            training_app(service, config, tokens=tokens),
            config.host,
            config.port,
            token=tokens[0] if tokens else None,
            max_requests=config.max_requests,
            limits=config.http,
            on_ready=on_ready,
        )
    finally:
        await service.close()
