"""Engines that are processes: our own and vLLM's, started by a launcher on this machine or on a node of a cluster.

The launcher decides where a process runs and which GPUs it sees (`Launcher.launch`, by the engine's name). Nothing in a setup
names a folder of this machine: a process gets the model's description and the tokenizer as bytes, and all weights by reference.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millstream.clock import Clock
from millstream.engine.config import EngineConfig
from millstream.engine.native.engine import TorchEngine
from millstream.engine.native.host import ProcessHost, Publish
from millstream.engine.native.process import ENGINE_WORKER, engine_setup
from millstream.engine.vllm.config import VllmConfig
from millstream.engine.vllm.engine import VLLM_WORKER, vllm_setup
from millstream.errors import EngineError, WeightsError
from millstream.events import EventSink
from millstream.model.adapters import is_adapter
from millstream.model.load import context_length, model_weights
from millstream.rpc.process import Launcher
from millstream.types import Weights
from millstream.weights.transfer import Delivery, WeightsRef
from millstream.weights.transfer.cached_ref import CachedRef
from millstream.weights.transfer.publisher import WeightsPublisher, open_publisher, slot_folder
from millstream.weights.transfer.remote_weights import RemoteWeights

SHARED = Delivery(ways=("shared",))


class EngineSupply(NamedTuple):
    """What engines in processes get from the backend that makes them."""

    launcher: Launcher
    first: Callable[[], WeightsRef]  # the weights to begin with: the whole model
    publish: Publish  # makes weights of this process available to an engine's process
    device: str  # "cuda", which is what the launcher lets the process see, or "cpu"
    has_lines: bool = False  # whether they take requests of rollout workers


def process_engine(
    config: EngineConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    supply: EngineSupply,
    *,
    clock: Clock,
    sink: EventSink,
    name: str,
    on_close: Callable[[], object] = lambda: None,
) -> TorchEngine:
    """Perhaps not ready yet. The model is only read, here and now. `tokenizer`: for stop strings. `on_close`: called when the
    engine has ended."""
    is_vllm = config.kind == "vllm"
    setup: Any
    if is_vllm:
        is_cpu, first = supply.device == "cpu", supply.first()
        setup = vllm_setup(model, config, tokenizer, is_cpu=is_cpu, first=first, has_lines=supply.has_lines)
    else:
        setup = engine_setup(
            model, config, tokenizer, device=supply.device, first=supply.first(), has_lines=supply.has_lines
        )
    host = ProcessHost(
        lambda: supply.launcher.launch("engine", VLLM_WORKER if is_vllm else ENGINE_WORKER, name=name),
        setup,
        supply.publish,
        name=name,
        answer_s=config.answer_s,
        on_close=on_close,
    )
    return TorchEngine(
        host,
        slots=config.num_slots,
        max_length=setup.max_length if is_vllm else context_length(model),
        clock=clock,
        sink=sink,
        answer_s=config.answer_s,
        name=name,
    )


class LocalWeights:
    """Weights of this process for engines on this machine: each version is staged once, however many engines fetch it.
    `find_delivery`: how versions are published, asked before the first; what engines begin with is in the host's memory."""

    def __init__(
        self, config: EngineConfig, model: PreTrainedModel, find_delivery: Callable[[], Delivery] = lambda: SHARED
    ) -> None:
        self._model = model
        self._find_delivery = find_delivery
        self._is_vllm = config.kind == "vllm"
        self._place = (config.vllm or VllmConfig()).weights if self._is_vllm else "shared"
        self._beginning = CachedRef(self._open)
        self._publisher: WeightsPublisher | None = None
        self._newest: tuple[int, Weights, WeightsRef] | None = None
        self._lock = threading.Lock()

    def _open(self, delivery: Delivery = SHARED) -> WeightsPublisher:
        """With slots in shared memory, or in the folder for temporary files."""
        temporary = Path(tempfile.gettempdir()) / f"millstream-weights-files-{os.getuid()}"
        return open_publisher(delivery, folder=slot_folder() if self._place == "shared" else temporary)

    def first(self, *, is_exact: bool = False) -> WeightsRef:
        """Of the model as it is now. Once a version was published, adapters may be older ones: an engine that starts then loads
        the newest version before it serves, and those that run keep the memory of what they began with. `is_exact`: they may
        not, for a learner that begins with them."""
        is_replaced = is_adapter if self._newest is not None and not is_exact else lambda name: False
        try:
            return self._beginning.put(model_weights(self._model), is_replaced)
        except WeightsError as error:
            other = f'engine.vllm.weights = "{"file" if self._place == "shared" else "shared"}"'
            raise EngineError(f"{error}, or set {other if self._is_vllm else 'engine.process = false'}") from error

    def publish(self, version: int, weights: Weights) -> WeightsRef:
        """Weights of a rank that publishes by itself are there already."""
        with self._lock:
            newest = self._newest
            if isinstance(weights, RemoteWeights):
                newest = self._newest = (version, weights, weights.ref)
            elif newest is None or newest[0] != version or newest[1] is not weights:
                if self._publisher is None:
                    self._publisher = self._open(self._find_delivery())
                newest = self._newest = (version, weights, self._publisher.put(version, weights.items()))
            return newest[2]

    def close(self) -> None:
        """Remove what is staged. Engines keep what they have fetched."""
        self._beginning.close()
        if self._publisher is not None:
            self._publisher.close()
