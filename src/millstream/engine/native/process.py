"""A worker in a process of its own: commands and reports over a socket (`engine.native.child`), weights in shared memory."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from msgspec import Struct
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from millstream.engine import EngineConfig
from millstream.engine.native.batching import Batcher, batcher_of
from millstream.engine.native.child import ChildHost, SocketLink
from millstream.engine.native.worker import Report, Worker
from millstream.errors import EngineError, WeightsError
from millstream.model.adapters import add_adapters, lora_of, trained_weights
from millstream.model.load import decoder_of, load_tokenizer, model_weights, new_model, set_up_cpu
from millstream.model.lora import LoraConfig
from millstream.model.shared_memory import Layout, SharedWeights, anonymous_memory, layout_of
from millstream.rpc.frames import Frames
from millstream.rpc.process import LocalLauncher
from millstream.types import Weights

MODULE = "millstream.engine.native.process"


class Plan(Struct, frozen=True, kw_only=True):
    """What a worker needs to know to build the model and to begin."""

    config: EngineConfig
    dtype: str
    device: str
    lora: LoraConfig | None
    files: dict[str, bytes]
    """The model's config and, where it must look for text, the tokenizer: as they are saved."""
    has_tokenizer: bool


class Setup(Struct, frozen=True, kw_only=True):
    """The first message."""

    plan: Plan
    memory: int
    """The descriptor of the shared memory."""
    layout: Layout
    loaded: list[str]
    """Names of what a `Load` brings: with adapters, these; else everything."""


def plan_of(
    model: PreTrainedModel, config: EngineConfig, tokenizer: PreTrainedTokenizerBase | None, device: str
) -> Plan:
    with tempfile.TemporaryDirectory(prefix="millstream-") as name:
        folder = Path(name)
        model.config.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return Plan(
        config=config,
        dtype=str(model.dtype).removeprefix("torch."),
        device=device,
        lora=lora_of(model),
        files=files,
        has_tokenizer=tokenizer is not None,
    )


def batcher_from(plan: Plan, weights: Mapping[str, Tensor]) -> Batcher:
    """The model as the plan has it, with these weights, ready to decode."""
    with tempfile.TemporaryDirectory(prefix="millstream-") as folder:
        for name, data in plan.files.items():
            (Path(folder) / name).write_bytes(data)
        config = AutoConfig.from_pretrained(folder)
        decode = decoder_of(load_tokenizer(folder)) if plan.has_tokenizer else None
    with torch.device(plan.device):  # at once where it will be: random numbers for all of it take long on a CPU
        model = new_model(config, seed=0, dtype=getattr(torch, plan.dtype))
    if plan.lora is not None:
        add_adapters(model, plan.lora, seed=0)
    with torch.no_grad():
        for name, own in model_weights(model).items():
            own.copy_(weights[name])
    return batcher_of(model, plan.config, decode)


class ProcessHost(ChildHost):
    """Our end. See `millstream.engine.native.engine.Host`."""

    def __init__(
        self, model: PreTrainedModel, config: EngineConfig, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        weights = model_weights(model)
        layout = layout_of(weights)
        self._loaded = list(trained_weights(model))
        memory = _memory_for(layout)
        self._shared = SharedWeights(memory, layout)
        self._shared.write(weights)
        plan = plan_of(model, config, tokenizer, device="cpu")
        child = LocalLauncher().launch("engine", MODULE, name="engine", descriptors=[memory])
        super().__init__(lambda: child, Setup(plan=plan, memory=memory, layout=layout, loaded=self._loaded))
        self._child = child
        os.close(memory)

    def offer(self, weights: Weights) -> None:
        try:
            self._shared.write(weights, only=self._loaded)
        except WeightsError as error:
            raise EngineError(str(error)) from error


def _memory_for(layout: Layout) -> int:
    try:
        return anonymous_memory(layout.ends[-1])
    except OSError as error:
        raise EngineError(
            f"no room for {layout.ends[-1] / 2**20:.0f} MiB of shared weights ({error.strerror}): set engine.process = false"
        ) from error


def work(line: socket.socket) -> None:
    """The worker: until the socket closes."""
    set_up_cpu()
    frames = Frames(line)
    setup = frames.first_as(Setup)
    if setup is None:
        return
    shared = SharedWeights(setup.memory, setup.layout)
    link = SocketLink(line, frames, {name: shared.views[name] for name in setup.loaded})
    batcher = batcher_from(setup.plan, shared.views)
    link.send(Report([], []))  # ready: from here on, silence with work to do is a fault
    Worker(batcher, link).run()


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent's to handle; when it ends, the socket closes
    work(socket.socket(fileno=int(sys.argv[1])))
