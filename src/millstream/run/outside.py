"""The address of a run whose engine or learner is outside: `serve.outside`, from the run's start to its end. Imports torch.

    RUN/outside.url                       where programs connect
    RUN/outside/PROCESS/version-000003.4  weights that programs load, the fourth that this process wrote; the newest are kept
    RUN/outside/published                 where a learner outside writes its weights: nothing else is read

No two folders of weights have the same name, also after a resume: a program has the newest if it has loaded that folder.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from transformers import PreTrainedModel

from millstream.clock import Clock
from millstream.engine import EngineConfig
from millstream.engine.outside import OutsideEngine
from millstream.errors import EngineError
from millstream.events import EventSink
from millstream.learner.outside import OfferedBatches, OutsideLearner
from millstream.model.adapters import trained_weights
from millstream.model.load import context_length
from millstream.model.safetensors_io import write_weights
from millstream.pipeline.admission import Admission
from millstream.run.config import MAX_LEASE_S
from millstream.serve.listen import listening_at
from millstream.serve.outside import OutsideService
from millstream.serve.store.service import StoreServiceConfig
from millstream.serving.fleet import Fleet
from millstream.types import Weights

if TYPE_CHECKING:
    from millstream.run.active import ActiveRun

OUTSIDE_FOLDER = "outside"
OUTSIDE_URL = "outside.url"
PUBLISHED = "published"
NUM_KEPT = 3  # versions on disk: a program may still read the one before the newest


class VersionFolders:
    """Writes versions for programs outside. Called on threads, by one at a time."""

    def __init__(self, root: Path, model: PreTrainedModel) -> None:
        self._root = root / secrets.token_hex(4)
        self._config = model.config
        self._shapes = {name: tuple(tensor.shape) for name, tensor in trained_weights(model).items()}
        self._written: list[Path] = []

    def write(self, version: int, weights: Weights) -> str:
        if {name: tuple(tensor.shape) for name, tensor in weights.items()} != self._shapes:
            raise EngineError(f"the weights of version {version} do not fit the model")
        folder = self._root / f"version-{version:06d}.{len(self._written)}"
        write_weights(folder, version, weights, self._config)
        self._written.append(folder)
        for old in self._written[:-NUM_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        return str(folder)

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)


def build_outside_engine(
    config: EngineConfig, model: PreTrainedModel, folder: Path, *, clock: Clock, sink: EventSink, name: str
) -> OutsideEngine:
    return OutsideEngine(
        slots=config.num_slots,
        max_length=context_length(model),
        num_words=int(model.get_input_embeddings().num_embeddings),
        write=VersionFolders(folder / OUTSIDE_FOLDER, model).write,
        clock=clock,
        sink=sink,
        name=name,
    )


class OutsideParts:
    """What of a run is outside, and its service."""

    def __init__(self, run: ActiveRun, fleet: Fleet, token: str | None) -> None:
        self._run = run
        engines = [engine for engine in fleet.router.engines if isinstance(engine, OutsideEngine)]
        self.engine = engines[0] if engines else None
        self.batches = OfferedBatches() if run.config.learner.kind == "outside" else None
        self.service = OutsideService(
            service_config(run), engine=self.engine, batches=self.batches, describe=self._describe, token=token
        )
        self._warned: set[str] = set()
        self._offered = (run.folder.path / OUTSIDE_FOLDER / PUBLISHED).absolute()
        if self.batches is not None:
            self._offered.mkdir(parents=True, exist_ok=True)
        if self.engine is not None:
            self.engine.on_refused = self._warn

    def _describe(self) -> dict[str, Any]:
        run, config = self._run, self._run.config
        return {
            "run_id": run.run_id,
            "is_engine_outside": self.engine is not None,
            "is_learner_outside": self.batches is not None,
            "steps": config.pipeline.steps,
            "groups_per_step": config.pipeline.groups_per_step,
            "group_size": config.rollout.group_size,
            "max_lag": config.pipeline.max_lag,
            "publish_in": str(self._offered) if self.batches is not None else None,
            "sampling": msgspec.to_builtins(run.prepared.sampling),
        }

    def _warn(self, why: str) -> None:
        """The first row of each reason: the others are in the answers alone."""
        reason = why.partition(": ")[2].partition(":")[0]
        if reason not in self._warned:
            self._warned.add(reason)
            self._run.warn(f"a row from outside was refused: {why}. Others with this reason are not reported")

    def build_learner(self, run: ActiveRun) -> OutsideLearner:
        assert self.batches is not None
        self.service.learner = OutsideLearner(
            run.prepared.model,
            self.batches,
            version=run.start_version,
            tokenizer=run.prepared.tokenizer,
            offered=self._offered,
            write=VersionFolders(run.folder.path / OUTSIDE_FOLDER, run.prepared.model).write,
            on_published=self.service.on_published,
        )
        return self.service.learner

    def use(self, admission: Admission) -> None:
        """Requests of its groups are offered with their start and their deadline."""
        if self.engine is not None:
            self.engine.place_of = lambda group_id: admission.place(group_id) if group_id in admission else None

    async def close(self) -> None:
        """Claims that wait are answered that the run is over."""
        if self.engine is not None:
            await self.engine.close()
        if self.batches is not None:
            await self.batches.finish()


def service_config(run: ActiveRun) -> StoreServiceConfig:
    outside = run.config.outside
    return StoreServiceConfig(host=outside.host, port=outside.port, lease_s=outside.lease_s, max_lease_s=MAX_LEASE_S)


@asynccontextmanager
async def serving_outside(run: ActiveRun, fleet: Fleet) -> AsyncIterator[OutsideParts | None]:
    """Serves while the block lasts; None where nothing is outside. Raises `ConfigError` if it cannot listen."""
    if "outside" not in (run.config.engine.kind, run.config.learner.kind):
        yield None
        return
    token, config, file = os.environ.get("MILLSTREAM_TOKEN") or None, service_config(run), run.folder.path / OUTSIDE_URL
    parts = OutsideParts(run, fleet, token)
    async with listening_at(
        parts.service.app,
        config.host,
        config.port,
        token=token,
        max_requests=config.max_requests,
        limits=config.http,
        port_option="outside.port",
    ) as url:
        file.write_text(f"{url}\n")
        try:
            if parts.engine is not None:
                await parts.engine.load(0, trained_weights(run.prepared.model))
            yield parts
        finally:
            await parts.close()
            file.unlink(missing_ok=True)
            shutil.rmtree(run.folder.path / OUTSIDE_FOLDER, ignore_errors=True)
