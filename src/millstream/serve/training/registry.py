"""Sessions, models and samplers by their ids: in memory, and in the service's folder, from which they come back.

    sessions/ID.json, sessions/ID.jsonl  a session, and its events: see `log`
    models/ID/                           a model: see `journal`
    samplers/ID.json                     a sampling session

A key sees what it made, and nothing else: to another key the same id does not exist.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from millstream.serve.http import HttpError
from millstream.serve.training.base import BaseModel
from millstream.serve.training.bodies import CreateModelBody, CreateSamplingBody, Metadata
from millstream.serve.training.futures import Futures
from millstream.serve.training.journal import MODEL, read_checkpoint, read_json_file, write_json
from millstream.serve.training.log import ModelMade, SamplerMade, SessionLogs, SessionStarted
from millstream.serve.training.models import UNNAMED, KeyTurns, ModelInfo, TrainedModel, json_result, shape_of, unnamed
from millstream.serve.training.sampling import BASE_LORA, SEQUENCE
from millstream.serve.training.turns import Sampler

T = TypeVar("T")
SCHEME = "tinker://"
KINDS = ("weights", "sampler_weights")
MAX_CACHED = 10_000  # sessions in memory, and samplers: others are read from the folder


class TrainingSession(Struct, frozen=True, kw_only=True):
    id: str
    owner: str
    max_lag: int | None  # None: data of any age is trained
    created: float


class Registry:
    """`max_models`: those in memory; others are in their folders."""

    def __init__(self, folder: Path, base: BaseModel, futures: Futures, *, max_models: int) -> None:
        self._folder = folder
        self._base = base
        self._futures = futures
        self._max_models = max_models
        self._turns = KeyTurns()
        self.logs = SessionLogs(folder / "sessions")
        self._sessions: dict[str, TrainingSession] = {}
        self._models: dict[str, TrainedModel] = {}
        self._samplers: dict[str, Sampler] = {}
        self._loading = asyncio.Lock()
        for name in ("sessions", "models", "samplers"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    # ---- sessions

    def create_session(self, owner: str, metadata: Metadata | None) -> TrainingSession:
        session = TrainingSession(
            id=secrets.token_hex(12), owner=owner, max_lag=_max_lag(metadata or {}), created=time.time()
        )
        self.logs.emit(session.id, SessionStarted(at=time.time(), session=session.id, max_lag=session.max_lag))
        write_json(self._folder / "sessions" / f"{session.id}.json", session)
        _keep(self._sessions, session.id, session)
        return session

    def session(self, session_id: str, owner: str) -> TrainingSession:
        if session_id not in self._sessions and (path := self._path("sessions", session_id)).is_file():
            _keep(self._sessions, session_id, read_json_file(path, TrainingSession))
        found = self._sessions.get(session_id)
        if found is None or found.owner != owner or found.id != session_id:
            raise HttpError(404, f"no session {session_id!r}")
        return found

    def _path(self, kind: str, name: str) -> Path:
        return self._folder / kind / f"{_file_name(name)}.json"

    # ---- models

    async def create_model(self, owner: str, body: CreateModelBody) -> str:
        """The id of the request's result. The same request again has the same one."""
        session = self.session(body.session_id, owner)
        self.check_base(body.base_model)
        if body.optimizer_config.type != "adamw":
            raise HttpError(422, f"optimizer_config.type = {body.optimizer_config.type!r}: expected adamw")
        shape_of(body.lora_config, self._base)
        model_id = f"{session.id}:train:{body.model_seq_id}"
        folder = self._folder / "models" / _file_name(model_id)
        async with self._loading:
            if not (folder / MODEL).is_file():
                given = None if body.lora_config is None else body.lora_config.seed
                info = ModelInfo(
                    id=model_id,
                    owner=owner,
                    session_id=session.id,
                    base_model=body.base_model,
                    lora=body.lora_config,
                    seed=secrets.randbits(31) if given is None else given % (1 << 63),
                    max_lag=session.max_lag,
                    created=time.time(),
                )
                folder.mkdir(exist_ok=True)
                rank = None if info.lora is None else info.lora.rank
                self.logs.emit(session.id, ModelMade(at=time.time(), model=model_id, rank=rank, seed=info.seed))
                write_json(folder / MODEL, info)
        await self.model(model_id, owner)
        request_id = f"{model_id}:0"
        if request_id not in self._futures:
            self._futures.add(request_id, owner)
        self._futures.resolve(request_id, json_result({"model_id": model_id, "type": "create_model"}))
        return request_id

    def check_base(self, name: str) -> None:
        if name != self._base.name:
            raise HttpError(404, f"no model {name!r} here: there is {self._base.name!r}")

    def model_info(self, model_id: str, owner: str) -> ModelInfo:
        """Raises `HttpError`."""
        path = self._folder / "models" / _file_name(model_id) / MODEL
        info = read_json_file(path, ModelInfo) if path.is_file() else None
        if info is None or info.owner != owner or info.id != model_id:
            raise HttpError(404, f"no model {model_id!r}")
        return info

    async def model(self, model_id: str, owner: str) -> TrainedModel:
        """In memory: brought back from its folder if it is not. Raises `HttpError`."""
        if model_id in self._models and self._models[model_id].info.owner == owner:
            return self._models[model_id]
        info = self.model_info(model_id, owner)
        async with self._loading:
            if model_id not in self._models:
                await self._make_room()
                made = await asyncio.to_thread(self._make, info)
                await made.restore()
                self._models[model_id] = made
        return self._models[model_id]

    def _make(self, info: ModelInfo) -> TrainedModel:
        def version_of(sequence_id: str) -> int | None:
            return self._version_of(sequence_id, info)

        return TrainedModel(
            info,
            self._folder / "models" / _file_name(info.id),
            self._base,
            self._futures,
            self._turns,
            self.logs,
            version_of=version_of,
            find_checkpoint=self.checkpoint,
        )

    async def _make_room(self) -> None:
        """Unload the model that was used least recently, if there are too many. Raises `HttpError` if all have work."""
        if len(self._models) < self._max_models:
            return
        idle = [model for model in self._models.values() if not model.is_busy]
        if not idle:
            raise HttpError(429, f"{self._max_models} models are being trained, which is the limit: try again")
        oldest = min(idle, key=lambda model: model.last_used)
        del self._models[oldest.info.id]
        await oldest.close()

    async def unload(self, session: TrainingSession) -> None:
        """The models of a session that is over: they stay in their folders."""
        for model in [one for one in self._models.values() if one.info.session_id == session.id and not one.is_busy]:
            del self._models[model.info.id]
            await model.close()

    def checkpoint(self, path: str, owner: str) -> tuple[ModelInfo, Path]:
        """Of a path that the client got. Raises `HttpError`."""
        model_id, _, rest = path.removeprefix(SCHEME).partition("/")
        kind, _, name = rest.partition("/")
        if not path.startswith(SCHEME) or kind not in KINDS or not name or "/" in name or name.startswith("."):
            raise HttpError(
                422, f"the path {path!r}: expected {SCHEME}MODEL/weights/NAME or {SCHEME}MODEL/sampler_weights/NAME"
            )
        info = self.model_info(model_id, owner)
        folder = self._folder / "models" / _file_name(model_id) / kind / name
        if read_checkpoint(folder) is None:
            raise HttpError(404, f"no checkpoint {path!r}, or it has expired")
        return info, folder

    def checkpoints(self, info: ModelInfo) -> list[dict[str, Any]]:
        """As the client lists them, the oldest first."""
        folders = [
            folder
            for kind in KINDS
            for folder in (self._folder / "models" / _file_name(info.id) / kind).glob("*")
            if not folder.name.startswith((".", UNNAMED))
        ]
        found = [(folder, checkpoint) for folder in folders if (checkpoint := read_checkpoint(folder)) is not None]
        return [
            {
                "checkpoint_id": f"{folder.parent.name}/{folder.name}",
                "checkpoint_type": "training" if folder.parent.name == "weights" else "sampler",
                "time": _time(one.time),
                "tinker_path": f"{SCHEME}{info.id}/{folder.parent.name}/{folder.name}",
                "size_bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
                "user_metadata": one.user_metadata,
                "expires_at": None if one.expires_at is None else _time(one.expires_at),
            }
            for folder, one in sorted(found, key=lambda pair: pair[1].time)
        ]

    # ---- samplers

    def create_sampler(self, owner: str, body: CreateSamplingBody) -> Sampler:
        """The same request again has the same one. Raises `HttpError`."""
        session = self.session(body.session_id, owner)
        sampler_id = f"{session.id}:sample:{body.sampling_session_seq_id}"
        if self._path("samplers", sampler_id).is_file():
            return self.sampler(sampler_id, owner)
        if body.model_path is None:
            self.check_base(body.base_model or "")
            return self._add_sampler(sampler_id, owner, session.id, None)
        return self._add_sampler(sampler_id, owner, session.id, body.model_path)

    def _add_sampler(self, sampler_id: str, owner: str, session_id: str, path: str | None) -> Sampler:
        info, folder = (None, None) if path is None else self.checkpoint(path, owner)
        checkpoint = None if folder is None else read_checkpoint(folder)
        made = Sampler(
            id=sampler_id,
            owner=owner,
            session_id=session_id,
            model_id=None if info is None else info.id,
            path=path,
            shape=BASE_LORA if info is None else shape_of(info.lora, self._base),
            folder=None if folder is None else str(folder),
            version=0 if checkpoint is None else checkpoint.version,
        )
        event = SamplerMade(at=time.time(), sampler=made.id, model=made.model_id, version=made.version)
        self.logs.emit(session_id, event)
        write_json(self._path("samplers", sampler_id), made)
        _keep(self._samplers, sampler_id, made)
        return made

    def sampler(self, sampler_id: str, owner: str) -> Sampler:
        """Also of weights that were saved for this session without a name. Raises `HttpError`."""
        found = self._find_sampler(sampler_id)
        if found is not None and found.owner == owner:
            return found
        session_id, _, number = sampler_id.partition(":sample:")
        if found is None and number.isdecimal():
            session = self.session(session_id, owner)
            for folder in (self._folder / "models").glob(f"{_file_name(session.id + ':train:')}*"):
                if read_checkpoint(folder / "sampler_weights" / unnamed(int(number))) is not None:
                    model_id = read_json_file(folder / MODEL, ModelInfo).id
                    path = f"{SCHEME}{model_id}/sampler_weights/{unnamed(int(number))}"
                    return self._add_sampler(sampler_id, owner, session.id, path)
        raise HttpError(404, f"no sampling session {sampler_id!r}, or its weights are gone")

    def _find_sampler(self, sampler_id: str) -> Sampler | None:
        if sampler_id not in self._samplers and (path := self._path("samplers", sampler_id)).is_file():
            _keep(self._samplers, sampler_id, read_json_file(path, Sampler))
        found = self._samplers.get(sampler_id)
        return found if found is not None and found.id == sampler_id else None

    def _version_of(self, sequence_id: str, model: ModelInfo) -> int | None:
        found = SEQUENCE.fullmatch(sequence_id)
        sampler = None if found is None else self._find_sampler(found["sampler"])
        if found is None or sampler is None or sampler.owner != model.owner or sampler.model_id != model.id:
            return None
        return sampler.version if int(found["version"]) == sampler.version else None

    async def close(self) -> None:
        for model in self._models.values():
            await model.close()


def _keep(cache: dict[str, T], name: str, value: T) -> None:
    if len(cache) >= MAX_CACHED:
        del cache[next(iter(cache))]
    cache[name] = value


def _max_lag(metadata: Metadata) -> int | None:
    given = metadata.get("max_lag")
    if given is None:
        return None
    if not str(given).isdecimal():
        raise HttpError(422, f"user_metadata has max_lag = {given!r}: expected a number of versions, at least 0")
    return int(given)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _file_name(name: str) -> str:
    """Of an id. Ids come from clients: what is not a letter, digit or hyphen becomes an underscore."""
    return "".join(one if one.isascii() and (one.isalnum() or one == "-") else "_" for one in name[:200])
