"""A worker in a process of its own: commands and reports over a socket (`engine.child`), weights in shared memory."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from millstream.engine import EngineConfig
from millstream.engine.batching import batcher_of
from millstream.engine.child import ChildHost, SocketLink
from millstream.engine.worker import Report, Worker
from millstream.errors import EngineError, WeightsError
from millstream.model.adapters import add_adapters, lora_of, trained_weights
from millstream.model.load import decoder_of, load_tokenizer, model_weights, new_model, set_up_cpu
from millstream.model.lora import LoraConfig
from millstream.model.shared import Layout, SharedWeights, anonymous_memory, layout_of
from millstream.types import Weights


class Plan(Struct, frozen=True, kw_only=True):
    """What the child needs to know, beside the model's own config."""

    config: EngineConfig
    layout: Layout
    dtype: str
    lora: LoraConfig | None
    loaded: list[str]
    """Names of what a `Load` brings: with adapters, these; else everything."""
    has_tokenizer: bool


def _memory_for(layout: Layout) -> int:
    try:
        return anonymous_memory(layout.ends[-1])
    except OSError as error:
        raise EngineError(
            f"no room for {layout.ends[-1] / 2**20:.0f} MiB of shared weights ({error.strerror}): set engine.process = false"
        ) from error


class ProcessHost(ChildHost):
    """Our end. See `millstream.engine.torch.Host`."""

    def __init__(
        self, model: PreTrainedModel, config: EngineConfig, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        weights = model_weights(model)
        self._loaded = list(trained_weights(model))
        plan = Plan(
            config=config,
            dtype=str(model.dtype).removeprefix("torch."),
            layout=layout_of(weights),
            lora=lora_of(model),
            loaded=self._loaded,
            has_tokenizer=tokenizer is not None,
        )
        memory = _memory_for(plan.layout)
        self._shared = SharedWeights(memory, plan.layout)
        self._shared.write(weights)
        folder = Path(tempfile.mkdtemp(prefix="millstream-"))  # small; the child removes it
        model.config.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
        super().__init__("millstream.engine.process", str(folder), descriptors=[memory])
        os.close(memory)

    def offer(self, weights: Weights) -> None:
        try:
            self._shared.write(weights, only=self._loaded)
        except WeightsError as error:
            raise EngineError(str(error)) from error


def main(line: int, memory: int, folder: Path) -> None:
    """The child: rebuild the model from its config and the shared weights, and work until the socket closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent's to handle; when it ends, the socket closes
    set_up_cpu()
    plan = msgspec.json.decode((folder / "plan.json").read_bytes(), type=Plan)
    config = AutoConfig.from_pretrained(folder)
    decode = decoder_of(load_tokenizer(str(folder))) if plan.has_tokenizer else None
    shutil.rmtree(folder)
    shared = SharedWeights(memory, plan.layout)
    model = new_model(config, seed=0, dtype=getattr(torch, plan.dtype))
    if plan.lora is not None:
        add_adapters(model, plan.lora, seed=0)
    with torch.no_grad():
        for name, own in model_weights(model).items():
            own.copy_(shared.views[name])
    batcher = batcher_of(model, plan.config, decode)
    link = SocketLink(socket.socket(fileno=line), {name: shared.views[name] for name in plan.loaded})
    link.send(Report([], []))  # ready: from here on, silence with work to do is a fault
    Worker(batcher, link).run()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
