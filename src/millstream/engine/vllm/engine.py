"""vLLM as an engine: its continuous batching, its kernels and its tensor parallelism behind the promises of `Engine`.

vLLM's core, which schedules and samples, has a process of its own. The rest of it (AsyncLLM: requests out, outputs in, a few
hundred microseconds of Python a step) runs in a process of ours (`vllm.worker`): Ctrl-C does not reach it, what vLLM changes in
an interpreter stays there, and a user's script needs no guard around its main part, although vLLM starts its core from the main
module.

Weights are published in the names and shapes of a checkpoint; vLLM's workers fetch them, and vLLM's `reload_weights` converts
them to its own layout.

What differs from our own engine: a continued request (`Request.num_sampled`) has the right distribution and new randomness, not
that which it would have had; a greedy request's log-probabilities are those of temperature 1 without top-k and top-p.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import PreTrainedModel

from millstream.clock import Clock
from millstream.engine import EngineConfig, OnSampled
from millstream.engine.native.engine import TorchEngine
from millstream.engine.native.host import EngineHost, ProcessHost
from millstream.engine.vllm.arguments import VllmSetup
from millstream.engine.vllm.config import VllmConfig, check_installed
from millstream.errors import EngineError, RequestRefused, WeightsError
from millstream.events import EventSink
from millstream.model.load import context_length, model_weights
from millstream.model.spec import has_own_code, save_description
from millstream.rpc.process import LocalLauncher, own_node
from millstream.types import Completion, Request
from millstream.weights.transfer import WeightsRef
from millstream.weights.transfer.publisher import WeightsPublisher, slot_folder

VLLM_WORKER = "millstream.engine.vllm.worker:serve_vllm"


class VllmEngine(TorchEngine):
    """See `millstream.engine.Engine` for the promises."""

    def __init__(
        self,
        host: EngineHost,
        *,
        vocabulary: int,
        slots: int,
        max_length: int | None,
        clock: Clock,
        sink: EventSink,
        answer_s: float,
        name: str,
    ) -> None:
        self._vocabulary = vocabulary
        super().__init__(host, slots=slots, max_length=max_length, clock=clock, sink=sink, answer_s=answer_s, name=name)

    async def generate(self, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        if strange := [token for token in request.tokens if not 0 <= token < self._vocabulary]:
            raise RequestRefused(
                f"{request.key}: the model has {self._vocabulary} tokens, and the prompt has {strange[0]}"
            )
        return await super().generate(request, on_sampled)


def build_vllm(
    config: EngineConfig, model: PreTrainedModel, *, clock: Clock, sink: EventSink, name: str = "engine"
) -> VllmEngine:
    """The model itself is only read, here and now."""
    check_installed()
    vllm = config.vllm or VllmConfig()
    publisher = _open_publisher(vllm)
    try:
        first = publisher.put(0, model_weights(model).items())
    except WeightsError as error:
        publisher.close()
        other = "file" if vllm.weights == "shared" else "shared"
        raise EngineError(f'{error}, or set engine.vllm.weights = "{other}"') from error
    setup = _setup(config, vllm, model, first)

    def close() -> None:
        publisher.close()
        shutil.rmtree(setup.folder, ignore_errors=True)

    host = ProcessHost(
        lambda: LocalLauncher().launch("engine", VLLM_WORKER, name=name),
        setup,
        lambda version, weights: publisher.put(version, weights.items()),
        name=name,
        answer_s=config.answer_s,
        on_close=close,
    )
    return VllmEngine(
        host,
        vocabulary=int(model.get_input_embeddings().num_embeddings),
        slots=config.num_slots,
        max_length=setup.max_length,
        clock=clock,
        sink=sink,
        answer_s=config.answer_s,
        name=name,
    )


def _open_publisher(config: VllmConfig) -> WeightsPublisher:
    """Both are files that vLLM's workers map and verify: in shared memory, or in the folder for temporary files."""
    temporary = Path(tempfile.gettempdir()) / f"millstream-weights-files-{os.getuid()}"
    folder = slot_folder() if config.weights == "shared" else temporary
    return WeightsPublisher(folder, node=own_node(), ways=["shared"])


def _setup(config: EngineConfig, vllm: VllmConfig, model: PreTrainedModel, first: WeightsRef) -> VllmSetup:
    folder = tempfile.mkdtemp(prefix="millstream-vllm-")
    described = copy.deepcopy(model.config)
    described.architectures = [type(model).__name__]
    save_description(model, folder, described)
    limits = [limit for limit in (context_length(model), vllm.max_model_len) if limit is not None]
    return VllmSetup(
        folder=folder,
        trust_remote_code=has_own_code(folder),
        first=first,
        slots=config.num_slots,
        prefill_tokens=config.prefill_tokens,
        max_length=min(limits, default=None),
        dtype=vllm.dtype or str(model.dtype).removeprefix("torch."),
        is_cpu=not torch.cuda.is_available(),
        vllm=vllm,
    )
