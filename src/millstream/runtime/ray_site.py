"""A run on a Ray cluster: engines, learner ranks, those beside them, environments, rewards and the store's coordinator are
processes that Ray places.

    driver          the pipeline: admission, router, settling, checkpoints, events
    coordinator     the store's books (`store.ray`), on the driver's node; payloads in shared memory on every node
    engine-0 ...    `engine.remote`, each with its place in the run's placement group
    rank 0 ...      `learner.rank_main`, likewise; rank 0 lets engines have weights (`parcels`)
    reference ...   `learner.stage_main`: a reference, a critic, a proximal policy, where there is room
    others          environments and rewards that have processes of their own, where there is room

The driver itself needs no GPU. Weights of the start are staged by the driver, all others by rank 0: they never pass through the
driver. Whatever dies is replaced (`runtime.fleet`, `runtime.replay`, Ray for the coordinator); without the driver all of it
ends, and `millstream resume` goes on from its checkpoint.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millstream.algo.recipe import Recipe
from millstream.clock import Clock
from millstream.engine import Engine
from millstream.engine.process import plan_of
from millstream.engine.remote import MODULE, RemoteHost
from millstream.engine.remote import Setup as EngineSetup
from millstream.engine.torch import TorchEngine
from millstream.errors import ClusterError
from millstream.events import EventSink
from millstream.learner import LearnerConfig
from millstream.learner.fsdp import Elsewhere, FsdpLearner
from millstream.learner.orders import Source
from millstream.model.load import context_length, model_weights
from millstream.parcels import Delivery, Parcel, Way
from millstream.parcels.outbox import Outbox, open_outbox
from millstream.runtime import build
from millstream.runtime.build_stages import Lasting, Place, Staff, build_remote_staff
from millstream.runtime.cluster import Cluster, RayWorker
from millstream.runtime.config import RunConfig
from millstream.runtime.resources import placement_of
from millstream.runtime.stages import Stage
from millstream.store import Store
from millstream.store.client import StoreClient
from millstream.store.ray import RayStore
from millstream.types import Weights
from millstream.weights import WeightChannel
from millstream.weights.remote import RemoteChannel
from millstream.workers import Kind, Launcher


class RaySite:
    """See `millstream.runtime.site.Site` for the promises. It launches processes itself, once it is open."""

    is_elsewhere = True

    def __init__(self, config: RunConfig) -> None:
        self._config, self._resources = config, config.resources
        self.launcher: Launcher | None = self
        self._cluster: Cluster | None = None
        self._store: RayStore | None = None
        self._client: StoreClient | None = None
        self._outbox: Outbox | None = None
        self._numbers = itertools.count(1)

    @property
    def cluster(self) -> Cluster:
        if self._cluster is None:
            raise ClusterError("the cluster is not open")
        return self._cluster

    def launch(self, kind: Kind, module: str, *, name: str, descriptors: Sequence[int] = ()) -> RayWorker:
        return self.cluster.launch(kind, module, name=name, descriptors=descriptors)

    async def open(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._model, self._tokenizer = model, tokenizer
        config = self._config
        placement = placement_of(config.resources, replicas=config.engine.replicas, ranks=config.learner.ranks)
        self._cluster = await asyncio.to_thread(Cluster, config.resources, placement)
        self._outbox = open_outbox(self._delivery(), node=self.cluster.node, host=self.cluster.host)
        self._first = await asyncio.to_thread(self._stage, model_weights(model))

    def _delivery(self, files: Path | None = None) -> Delivery:
        """Over the network only where there is one, on the device only where there is one."""
        cluster = self.cluster
        ways: list[Way]
        match self._resources.weights:
            case "auto":
                ways = ["shared"] if cluster.is_on_loopback else ["shared", "broadcast"]
            case way:
                ways = [way]
        return Delivery(ways=tuple(ways), files=None if files is None else str(files))

    def _stage(self, weights: Weights) -> Parcel:
        assert self._outbox is not None
        return self._outbox.put(next(self._numbers), weights.items())

    # ---- parts -------------------------------------------------------------------------------------------------------

    def make_engine(self, name: str, *, clock: Clock, sink: EventSink) -> Engine:
        config = self._config.engine
        if config.kind != "torch":
            return build.build_engine(config, self._model, clock=clock, sink=sink, name=name, seed=self._config.seed)
        device = "cuda" if self._resources.engine_gpus else "cpu"
        plan = plan_of(self._model, config, self._tokenizer, device)
        host = RemoteHost(
            lambda: self.launch("engine", MODULE, name=name),
            EngineSetup(plan=plan, parcel=self._first),
            self._stage,
            answer_s=config.answer_s,
        )
        return TorchEngine(
            host,
            slots=config.slots,
            max_length=context_length(self._model),
            clock=clock,
            sink=sink,
            answer_s=config.answer_s,
            name=name,
        )

    def build_learner(
        self, tokenizer: PreTrainedTokenizerBase, *, learner: LearnerConfig, recipe: Recipe, num_steps: int | None
    ) -> FsdpLearner:
        config, cluster = self._config, self.cluster
        self._first = self._stage(model_weights(self._model))
        return FsdpLearner(
            self._model,
            learner,
            Source(function="millstream.algo.recipe:from_json", arguments=msgspec.json.encode(recipe)),
            temperature=config.rollout.temperature,
            num_steps=num_steps,
            tokenizer=tokenizer,
            is_proximal_given=config.proximal is not None,
            elsewhere=Elsewhere(
                launcher=self,
                host=cluster.host,
                node=cluster.node,
                first=self._first,
                delivery=self._delivery(),
                device="cuda" if self._resources.learner_gpus else "cpu",
            ),
        )

    def build_staff(self, kept: Path | None, lasting: Lasting) -> Staff:
        cluster = self.cluster
        place = Place(
            launcher=self,
            open_outbox=lambda: open_outbox(self._delivery(), node=cluster.node, host=cluster.host),
            device="cuda" if self._resources.stage_gpus else "cpu",
            lasting=lasting,
        )
        return build_remote_staff(self._config, self._model, kept, place)

    async def open_store(self, stages: Sequence[Stage]) -> Store:
        tasks, capacity = build.store_plan(self._config, stages)
        self._store = await asyncio.to_thread(RayStore, tasks, capacity_rows=capacity)
        self._client = await self._store.connect("pipeline")
        return self._client

    def new_channel(self, version: int) -> WeightChannel:
        return RemoteChannel(version)

    async def close(self) -> None:
        """Numbered, since each leans on the next: 1. our line to the store, 2. the store, 3. staged weights, 4. the cluster."""
        if self._client is not None:
            await self._client.close()
        if self._store is not None:
            await asyncio.to_thread(self._store.close)
        if self._outbox is not None:
            self._outbox.close()
        if self._cluster is not None:
            await asyncio.to_thread(self._cluster.close)
