"""The Ray backend: engines, learner ranks, scorers, environments, rewards and the store's coordinator are processes that Ray
places.

    driver          the pipeline: admission, router, settling, checkpoints, events
    coordinator     the store's index (`cluster.store`), on the driver's node; payloads in shared memory on every node
    engine-0 ...    `engine.native.process` or `engine.vllm.worker`, each with its place in the run's placement group
    rank 0 ...      `learner.rank_worker`, likewise; rank 0 publishes weights to engines (`weights.transfer`)
    rollouts-0 ...  `run.rollout_worker`, with `rollout.workers`, where there is room
    reference ...   `learner.scorer_worker`: a reference, a critic, a proximal policy, where there is room
    others          environments and rewards that run in processes, where there is room

The driver needs no GPU. It publishes the first weights; rank 0 publishes all others, which never pass through the driver. A
process that dies is replaced (`serving.fleet`, `run.replay`, Ray for the coordinator). If the driver dies everything ends, and
`millstream train --resume RUN` continues from the newest checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import msgspec
from transformers import PreTrainedTokenizerBase

from millstream.algo.recipe import Recipe
from millstream.cluster.driver import Cluster, RayWorker
from millstream.cluster.resources import Placement
from millstream.cluster.store import RayStore
from millstream.engine import Engine
from millstream.engine.processes import EngineSupply, process_engine
from millstream.errors import ClusterError
from millstream.events import WorkerStarted
from millstream.learner import LearnerConfig, RunLearner
from millstream.learner.fsdp import FsdpLearner, PublishingRanks
from millstream.learner.messages import ObjectiveSource, StoreAccess
from millstream.model.load import model_weights
from millstream.pipeline.schema import Stage
from millstream.pipeline.workers import WorkerPlan
from millstream.rpc.process import Kind, Launcher
from millstream.rpc.threads import DaemonThreads
from millstream.run import build
from millstream.run.backend import BackendContext, LocalEngines, remote_channel
from millstream.run.build_scorers import DurableCritic, Scorers, StageProcesses, build_scorers
from millstream.run.config import RunConfig, scheduled_engine, uses_lines, weight_ways
from millstream.run.places import Places, placed_bundles
from millstream.run.rollout_worker import plan_workers
from millstream.store import Store
from millstream.store.client import StoreClient
from millstream.types import Weights
from millstream.weights import TransferWay, WeightChannel
from millstream.weights.transfer import Delivery, WeightsRef
from millstream.weights.transfer.cached_ref import CachedRef
from millstream.weights.transfer.publisher import WeightsPublisher, open_publisher
from millstream.weights.transfer.remote_weights import RemoteWeights
from millstream.weights.transfer.transports import TRANSPORTS

logger = logging.getLogger(__name__)
ON_HOST: dict[TransferWay, TransferWay] = {"ipc": "shared", "nccl": "broadcast"}
"""What a process without a GPU publishes by instead."""
OPENING_S = 30.0  # for Ray to be reached or started, when the run is already closing


class RayBackend:
    """See `millstream.run.backend.Backend` for the promises. It launches processes itself, once it is open."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._servers: LocalEngines | None = None  # engines that others have started
        self._resources = config.resources
        self.launcher: Launcher | None = self
        self._cluster: Cluster | None = None
        self._store: RayStore | None = None
        self._client: StoreClient | None = None
        # several caches, so that none evicts another: first weights of engines and ranks; weights that engines are offered
        self._beginning = CachedRef(self._new_publisher)
        self._offers = CachedRef(self._new_publisher)
        self._rest = CachedRef(self._new_publisher)  # first weights of ranks that read the others from files
        self._files = ""
        self._stopping = threading.Event()
        self._opened = threading.Event()
        self._opened.set()
        self._thread = DaemonThreads("cluster", most=1)  # Ray's processes end with the thread that has started them

    @property
    def cluster(self) -> Cluster:
        if self._cluster is None:
            raise ClusterError("the cluster is not open")
        return self._cluster

    def launch(self, kind: Kind, module: str, *, name: str, descriptors: Sequence[int] = ()) -> RayWorker:
        worker = self.cluster.launch(kind, module, name=name, descriptors=descriptors)
        self._emit_started(name, kind, worker.pid, worker.node)
        return worker

    def _emit_started(self, worker: str, what: str, pid: int, node: str) -> None:
        at = self._context.clock.now()
        self._context.sink.emit(WorkerStarted(at=at, worker=worker, what=what, pid=pid, node=node))

    async def open(self, context: BackendContext) -> None:
        self._context = context
        self._servers = LocalEngines(self._config, context, Places())
        self._model = context.model
        self._files = str((context.folder / "weights").absolute())
        placement = placed_bundles(self._config)
        self._opened.clear()
        await self._thread.call(lambda: self._open_cluster(placement))
        for number in (signal.SIGINT, signal.SIGTERM):  # Ray has put handlers of its own in the place of the run's
            with suppress(ValueError):  # only the main thread may handle signals
                signal.signal(number, signal.getsignal(number))
        self._first = await asyncio.to_thread(self._stage_first)

    def _open_cluster(self, placement: Placement) -> None:
        """Not cancelled with its caller: `close` makes it end soon."""
        try:
            self._cluster = Cluster(self._resources, placement, self._stopping)
        finally:
            self._opened.set()

    def _delivery(self, *, is_of_rank: bool) -> Delivery:
        """Broadcast only between nodes, and GPU memory only from ranks: the driver has no GPU, and offers the nearest first."""
        ways: tuple[TransferWay, ...] = weight_ways(self._config, is_one_node=self.cluster.is_on_loopback)
        if not is_of_rank:
            on_host = {ON_HOST.get(way, way) for way in ways}
            ways = tuple(way for way in TRANSPORTS if way in on_host)
        return Delivery(ways=ways, files=self._files if "files" in ways else None)

    def _stage_first(self) -> WeightsRef:
        """Publish the weights of the model as it is now."""
        return self._beginning.put(model_weights(self._model))

    # ---- parts -------------------------------------------------------------------------------------------------------

    @property
    def is_lone_engine_replaced(self) -> bool:
        return True

    @property
    def learner_device(self) -> str:
        return "cuda" if self._resources.learner_gpus else "cpu"

    def has_learner_processes(self, learner: LearnerConfig) -> bool:
        return True

    def make_engine(self, name: str) -> Engine:
        config, context = scheduled_engine(self._config), self._context
        if config.kind == "http":
            assert self._servers is not None
            return self._servers.make(name)
        device = "cuda" if self._resources.engine_gpus else "cpu"
        supply = EngineSupply(self, lambda: self._first, self._publish, device, has_lines=uses_lines(self._config))
        return process_engine(
            config, self._model, context.tokenizer, supply, clock=context.clock, sink=context.sink, name=name
        )

    def _publish(self, version: int, weights: Weights) -> WeightsRef:
        """Weights of a rank are published already; those of this process are published here."""
        return weights.ref if isinstance(weights, RemoteWeights) else self._offers.put(weights)

    def build_learner(
        self, tokenizer: PreTrainedTokenizerBase, *, learner: LearnerConfig, recipe: Recipe, num_steps: int | None
    ) -> FsdpLearner:
        config, cluster = self._config, self.cluster
        self._first = self._stage_first()
        return FsdpLearner(
            self._model,
            learner,
            ObjectiveSource(function="millstream.algo.recipe:from_json", arguments=msgspec.json.encode(recipe)),
            temperature=config.rollout.temperature,
            num_steps=num_steps,
            tokenizer=tokenizer,
            is_proximal_given=config.proximal is not None,
            is_fixed=config.pipeline.is_in_lockstep,
            records_ratios=config.rollout.keep_gb > 0,
            device=self.learner_device,
            store=self._find_store,
            publishing=PublishingRanks(
                launcher=self,
                host=cluster.host,
                node=cluster.node,
                first=self._first,
                publish=self._rest.put,
                delivery=self._delivery(is_of_rank=True),
            ),
        )

    def _find_store(self) -> StoreAccess | None:
        return None if self._store is None else StoreAccess("millstream.cluster.store:connect", self._store.plan)

    def build_scorers(self, saved: Path | None, durable: DurableCritic) -> Scorers:
        processes = StageProcesses(
            launcher=self,
            open_publisher=self._new_publisher,
            device="cuda" if self._resources.stage_gpus else "cpu",
            durable=durable,
            store=self._find_store,
            host=self.cluster.host,
            are_all=True,
        )
        return build_scorers(self._config, self._model, saved, processes)

    def _new_publisher(self) -> WeightsPublisher:
        return open_publisher(self._delivery(is_of_rank=False), node=self.cluster.node, host=self.cluster.host)

    async def open_store(self, stages: Sequence[Stage]) -> Store:
        config = self._config.store
        self._store = await asyncio.to_thread(
            RayStore,
            build.store_plan(self._config, stages),
            memory_bytes=config.memory_bytes,
            spill=config.spill_folder,
        )
        self._emit_started("the store's coordinator", "store", self._store.pid, self.cluster.node)
        self._client = await self._store.connect("pipeline")
        return self._client

    def plan_workers(self, tokenizer: PreTrainedTokenizerBase) -> WorkerPlan | None:
        if not self._config.rollout.workers or self._store is None or self._client is None:
            return None
        store, has_lines = (self._store.plan, self._client), uses_lines(self._config)
        return plan_workers(self._config, tokenizer, store, self, has_lines=has_lines)

    def new_channel(self, learner: RunLearner) -> WeightChannel:
        return remote_channel(learner)

    async def close(self) -> None:
        """Close in this order, since each needs the next, and each even if one before it fails: 1. the connection to the store,
        2. the store, 3. published weights, 4. the cluster, 5. weight files of dead processes. A cluster that is still being
        opened is waited for: otherwise nothing would close it."""
        self._stopping.set()
        if not await asyncio.to_thread(self._opened.wait, OPENING_S):
            logger.warning("Ray is still being reached or started after %.0f s: it is not closed", OPENING_S)
        async with AsyncExitStack() as closing:
            if self._files:
                closing.callback(shutil.rmtree, self._files, ignore_errors=True)
            if self._servers is not None:
                closing.push_async_callback(asyncio.to_thread, self._servers.close)
            closing.callback(self._thread.let_go)
            if self._cluster is not None:
                closing.push_async_callback(asyncio.to_thread, self._cluster.close)
            for cached in (self._beginning, self._offers, self._rest):
                closing.push_async_callback(asyncio.to_thread, cached.close)
            if self._store is not None:
                closing.push_async_callback(asyncio.to_thread, self._store.close)
            if self._client is not None:
                closing.push_async_callback(self._client.close)
