"""One model that a client trains: its requests run in the order of their numbers, whatever the order in which they arrive.

A model is in memory, or only in its folder: the first request after a restart, or after it was unloaded, brings it back
(`journal`). A request that is refused still has its turn, and fails there: a gap in the numbers would block all later ones.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from millstream.errors import MillstreamError
from millstream.events import Event
from millstream.learner.trainer import Trainer
from millstream.model.lora import LoraConfig
from millstream.model.safetensors_io import write_weights
from millstream.serve.http import HttpError
from millstream.serve.training.base import BaseModel, Shape
from millstream.serve.training.bodies import LoadBody, LoraBody, OptimStepBody, SaveBody, read_json
from millstream.serve.training.data import DataLimits, Datum, read_pass, row_of, write_pass
from millstream.serve.training.futures import JSON, PROTOBUF, Futures, Result
from millstream.serve.training.journal import (
    CheckpointInfo,
    JournalEntry,
    RequestJournal,
    SnapshotInfo,
    read_checkpoint,
    write_checkpoint,
)
from millstream.serve.training.log import (
    ModelRestored,
    PassRecord,
    RequestAccepted,
    RequestDone,
    SessionLogs,
    TrainedRow,
    digest_of,
)
from millstream.serve.training.losses import loss_named

logger = logging.getLogger(__name__)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
UNNAMED = "_session-"  # begins the names of weights that were saved for one sampling client
TENSORS = "tensors"  # the folder of a sampler checkpoint's weights
LORA_ALPHA = 32.0  # the client's; it sends the rank alone
MAX_JOURNAL_BYTES = 64 << 20  # of requests that are done: then a snapshot replaces them
MAX_WAITING_BYTES = 512 << 20  # of one model's requests
MAX_REPLAY_S = 30.0  # of computing, since the last snapshot
MAX_UNNAMED = 16  # weights of one model that were saved for a sampling client and have no name: the newest


class ModelInfo(Struct, frozen=True, kw_only=True):
    """What a model was made with."""

    id: str
    owner: str
    session_id: str
    base_model: str
    lora: LoraBody | None  # None: the whole model is trained
    seed: int
    max_lag: int | None = None  # of its session
    created: float = 0.0


class KeyTurns:
    """Requests that train run one at a time. Keys take turns, whatever the number of their models and requests."""

    def __init__(self) -> None:
        self._all = asyncio.Lock()  # locks are FIFO
        self._of_owner: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        async with self._of_owner[owner], self._all:
            yield


def shape_of(lora: LoraBody | None, base: BaseModel) -> Shape:
    if lora is None:
        return None
    targets = (base.attention_layers if lora.train_attn else ()) + (base.mlp_layers if lora.train_mlp else ())
    if not targets:
        raise HttpError(422, "train_attn and train_mlp are both false: adapters are on these layers, never on the head")
    return LoraConfig(rank=lora.rank, alpha=LORA_ALPHA, targets=tuple(sorted(targets)))


def json_result(value: dict[str, Any]) -> Result:
    return Result(JSON, msgspec.json.encode(value))


def failure(message: str, category: str) -> Result:
    return json_result({"error": message, "category": category})


def _refused(message: str, category: str) -> _Answer:
    return _Answer(failure(message, category), message)


VersionOf = Callable[[str], int | None]
"""From a sequence_id to the version that sampled it. None: it was not sampled from this model."""
FindCheckpoint = Callable[[str, str], tuple[ModelInfo, Path]]
"""From a path and an owner to the model that it is of, and its folder."""


class _Answer(NamedTuple):
    result: Result
    error: str | None = None
    passed: PassRecord | None = None


class TrainedModel:
    """In memory. `restore` comes first."""

    def __init__(
        self,
        info: ModelInfo,
        folder: Path,
        base: BaseModel,
        futures: Futures,
        turns: KeyTurns,
        logs: SessionLogs,
        *,
        version_of: VersionOf,
        find_checkpoint: FindCheckpoint,
    ) -> None:
        self.info = info
        self.folder = folder
        self.version = 0
        self.last_used = time.monotonic()
        self._base = base
        self._futures = futures
        self._turns = turns
        self._logs = logs
        self._version_of = version_of
        self._find_checkpoint = find_checkpoint
        self._journal = RequestJournal(folder)
        self._writing = asyncio.Lock()
        self._waiting: dict[int, JournalEntry] = {}
        self._next = 1
        self._replay_s = 0.0
        self._is_closed = False
        self._working: asyncio.Task[None] | None = None
        self.trainer: Trainer = base.make_trainer(shape_of(info.lora, base), info.seed)

    @property
    def is_busy(self) -> bool:
        return self._working is not None and not self._working.done()

    async def restore(self) -> None:
        """The last snapshot, and the requests since then: they run again, as if they had just come."""
        snapshot = self._journal.info()
        if (folder := self._journal.snapshot_folder) is not None:
            await self.trainer.restore_from(folder, has_optimizer=True)
        self.version = snapshot.version
        self._next = snapshot.next_seq_id
        self._emit(ModelRestored(at=time.time(), model=self.info.id, version=self.version, next_seq_id=self._next))
        for request_id, result in snapshot.results.items():
            self._promise(request_id, is_replayed=True)
            self._futures.resolve(request_id, result)
        for entry in self._journal.entries():
            self._promise(self.request_id(entry.seq_id), is_replayed=True)
            self._waiting[entry.seq_id] = entry
        self._work_on()

    def _emit(self, event: Event) -> None:
        self._logs.emit(self.info.session_id, event)

    def request_id(self, seq_id: int) -> str:
        return f"{self.info.id}:{seq_id}"

    def _promise(self, request_id: str, *, is_replayed: bool = False) -> None:
        if request_id not in self._futures:
            self._futures.add(request_id, self.info.owner, is_replayed=is_replayed)

    async def submit(self, entry: JournalEntry) -> str:
        """The id of its result. When this returns, the request survives a crash. One that was sent before has its id again."""
        self.last_used = time.monotonic()
        request_id = self.request_id(entry.seq_id)
        async with self._writing:
            if entry.seq_id < self._next or entry.seq_id in self._waiting:
                return request_id
            if self._is_closed:
                raise HttpError(429, f"{self.info.id} is being unloaded: try again")
            if entry.seq_id != self._next:  # the one that all others wait for is never refused
                self._check_room(len(entry.body))
            await asyncio.to_thread(self._journal.append, entry)
            self._emit(
                RequestAccepted(
                    at=time.time(),
                    model=self.info.id,
                    seq_id=entry.seq_id,
                    request=entry.kind,
                    digest=digest_of(entry.body),
                )
            )
            self._promise(request_id)
            self._waiting[entry.seq_id] = entry
        self._work_on()
        return request_id

    def _check_room(self, num_bytes: int) -> None:
        """Raises `HttpError` with 429: the client tries again."""
        self._futures.check_room(self.info.owner)
        if num_bytes + self._num_waiting() > MAX_WAITING_BYTES:
            raise HttpError(429, f"more than {MAX_WAITING_BYTES} bytes wait to be trained: try again")

    def _num_waiting(self) -> int:
        """Bytes of requests that are not done."""
        return sum(len(entry.body) for entry in self._waiting.values())

    def _work_on(self) -> None:
        if not self.is_busy and not self._is_closed:
            self._working = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while (entry := self._waiting.get(self._next)) is not None:
            async with self._turns.turn(self.info.owner):
                began, version = time.monotonic(), self.version
                answer = await self._answer(entry)
                self._replay_s += time.monotonic() - began
                self._emit(
                    RequestDone(
                        at=time.time(),
                        model=self.info.id,
                        seq_id=entry.seq_id,
                        request=entry.kind,
                        version=version,
                        next_version=self.version,
                        digest=digest_of(answer.result.body),
                        error=answer.error,
                        passed=answer.passed,
                    )
                )
            del self._waiting[entry.seq_id]
            self._next += 1
            self._futures.resolve(self.request_id(entry.seq_id), answer.result)
            self.last_used = time.monotonic()
            num_done = self._journal.num_bytes - self._num_waiting()
            is_long = num_done > MAX_JOURNAL_BYTES or self._replay_s > MAX_REPLAY_S
            if is_long or entry.kind == "load_weights":
                await self._snapshot()

    async def _snapshot(self) -> None:
        try:
            taken = await self.trainer.capture()
            async with self._writing:
                results = self._futures.needed(f"{self.info.id}:")
                info = SnapshotInfo(version=self.version, next_seq_id=self._next, results=results)
                waiting = [self._waiting[seq_id] for seq_id in sorted(self._waiting)]
                await asyncio.to_thread(self._journal.begin_next, taken.write, info, waiting)
        except (OSError, RuntimeError, MillstreamError) as error:  # torch.save raises RuntimeError
            # the journal stays as it is, and becomes longer
            logger.warning("no snapshot of %s: %s", self.info.id, error)
        self._replay_s = 0.0

    async def _answer(self, entry: JournalEntry) -> _Answer:
        try:
            match entry.kind:
                case "forward_backward":
                    return await self._pass(entry.body)
                case "optim_step":
                    return _Answer(await self._step(read_json(entry.body, OptimStepBody)))
                case "save_weights":
                    return _Answer(await self._save(read_json(entry.body, SaveBody)))
                case "save_weights_for_sampler":
                    return _Answer(await self._save_for_sampler(read_json(entry.body, SaveBody)))
                case "load_weights":
                    return _Answer(await self._load(read_json(entry.body, LoadBody)))
                case other:
                    return _refused(f"{other} is not supported", "user")
        except HttpError as refused:
            return _refused(str(refused), "user" if refused.status < 500 else "server")
        except MillstreamError as error:
            return _refused(str(error), "server")
        except Exception as error:  # one request fails, and the service continues: the client gets the reason
            logger.exception("%s %s of %s failed", entry.kind, entry.seq_id, self.info.id)
            return _refused(f"{type(error).__name__}: {error}", "server")

    async def _pass(self, body: bytes) -> _Answer:
        asked = read_pass(body)
        kind, loss = loss_named(asked.loss_fn, asked.settings)
        limits = DataLimits(self._base.vocabulary, self._base.context)
        rows = [row_of(number, datum, kind, limits) for number, datum in enumerate(asked.data)]
        if len({frozenset(row.columns) for row in rows}) > 1:
            raise HttpError(422, "some data have inputs that others have not: give all of them the same loss_fn_inputs")
        if kind.is_sampled and self.info.max_lag is not None:
            for number, datum in enumerate(asked.data):
                self._check_lag(number, datum, self.info.max_lag)
        if asked.is_forward_only:
            scores = await self.trainer.forward(rows, loss)
        else:
            scores = await self.trainer.forward_backward(rows, loss)
        shapes = [datum.inputs["target_tokens"].shape for datum in asked.data]
        record = PassRecord(
            loss_fn=asked.loss_fn,
            is_backward=not asked.is_forward_only,
            is_sampled=kind.is_sampled,
            rows=[TrainedRow(len(one.tokens), sorted({of.sequence_id for of in one.sources})) for one in asked.data],
        )
        return _Answer(Result(PROTOBUF, write_pass(scores, shapes)), passed=record)

    def _check_lag(self, number: int, datum: Datum, max_lag: int) -> None:
        """Raises `HttpError` for data that is older than the session's bound, or does not say how old it is."""
        if not datum.sources:
            raise HttpError(
                422,
                f"LagError: datum {number} has no provenance, and the session has max_lag = {max_lag}: name the sequences "
                "that it was sampled in (Datum.with_provenance)",
            )
        for source in datum.sources:
            found = self._version_of(source.sequence_id)
            if found is None:
                raise HttpError(
                    422, f"LagError: datum {number}: {source.sequence_id!r} was not sampled from this model"
                )
            if self.version - found > max_lag:
                raise HttpError(
                    422,
                    f"LagError: datum {number} was sampled at version {found}, and the model is at {self.version}: "
                    f"{self.version - found} versions, where max_lag = {max_lag} of the session allows {max_lag}",
                )

    async def _step(self, body: OptimStepBody) -> Result:
        stepped = await self.trainer.step_with(body.adam_params.settings())
        self.version += 1
        return json_result({"metrics": {**stepped.metrics(), "version": float(self.version)}})

    async def _save(self, body: SaveBody) -> Result:
        name = body.path or f"step-{self.version:06d}-{body.seq_id}"
        path = f"tinker://{self.info.id}/weights/{name}"
        if self._is_to_be_saved("weights", name, body):
            taken = await self.trainer.snapshot()
            await self._write("weights", name, body, taken.write)
        return json_result({"path": path, "type": "save_weights"})

    async def _save_for_sampler(self, body: SaveBody) -> Result:
        if body.path is None and body.sampling_session_seq_id is None:
            raise HttpError(422, "save_weights_for_sampler needs a path, or a sampling_session_seq_id")
        name = body.path or unnamed(body.sampling_session_seq_id or 0)
        if self._is_to_be_saved("sampler_weights", name, body):
            weights = await self.trainer.weights()

            def write(folder: Path) -> None:
                write_weights(folder / TENSORS, self.version, weights, None)

            await self._write("sampler_weights", name, body, write)
        path = f"tinker://{self.info.id}/sampler_weights/{name}"
        if body.path is not None:
            return json_result({"path": path, "type": "save_weights_for_sampler"})
        await asyncio.to_thread(self._drop_unnamed)
        session = f"{self.info.session_id}:sample:{body.sampling_session_seq_id}"
        return json_result({"sampling_session_id": session, "type": "save_weights_for_sampler"})

    def _is_to_be_saved(self, kind: str, name: str, body: SaveBody) -> bool:
        """False: this request has saved it before the service was restarted. Raises `HttpError`."""
        is_own = name.startswith(UNNAMED) and body.path is None
        if NAME.fullmatch(name.removeprefix(UNNAMED) if is_own else name) is None:
            raise HttpError(
                422, f"the name {name!r}: expected letters, digits, dots, hyphens and underscores, at most 128"
            )
        found = read_checkpoint(self.folder / kind / name)
        if found is not None and found.seq_id >= body.seq_id:
            return False
        if found is not None and not body.overwrite:
            raise HttpError(409, f"there is a checkpoint {name!r} already: choose another name, or overwrite = True")
        return True

    async def _write(self, kind: str, name: str, body: SaveBody, write: Callable[[Path], None]) -> None:
        now = time.time()
        info = CheckpointInfo(
            seq_id=body.seq_id,
            version=self.version,
            time=now,
            expires_at=None if body.ttl_seconds is None else now + body.ttl_seconds,
            user_metadata=body.user_metadata,
        )
        await asyncio.to_thread(write_checkpoint, self.folder / kind / name, info, write)

    def _drop_unnamed(self) -> None:
        folders = [one for one in (self.folder / "sampler_weights").iterdir() if one.name.startswith(UNNAMED)]
        infos = {folder: read_checkpoint(folder) for folder in folders}
        newest = sorted((info.seq_id, folder) for folder, info in infos.items() if info is not None)
        for _, folder in newest[:-MAX_UNNAMED]:
            shutil.rmtree(folder, ignore_errors=True)

    async def _load(self, body: LoadBody) -> Result:
        owner, folder = self._find_checkpoint(body.path, self.info.owner)
        if "/weights/" not in body.path:
            raise HttpError(422, f"{body.path!r} has weights to sample from: load what save_state has saved")
        if shape_of(owner.lora, self._base) != shape_of(self.info.lora, self._base):
            raise HttpError(422, f"{body.path!r} is of a model with {owner.lora}, and this one has {self.info.lora}")
        await self.trainer.restore_from(folder, has_optimizer=body.optimizer)
        self.version += 1
        return json_result({"path": body.path, "model_id": self.info.id, "type": "load_weights"})

    async def close(self) -> None:
        """Its folder has all of it. A request that runs is computed again when the model comes back."""
        self._is_closed = True
        async with self._writing:
            if self._working is not None:
                self._working.cancel()
                await asyncio.wait({self._working})
            self._journal.close()
        await self.trainer.close()


def unnamed(sampling_session_seq_id: int) -> str:
    """The name of weights that belong to one sampling session: the client has none for them."""
    return f"{UNNAMED}{sampling_session_seq_id}"
