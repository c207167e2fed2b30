"""Engines with a real vLLM, and how to give them other weights."""

from __future__ import annotations

from typing import Literal

import torch
from transformers import LlamaConfig, PreTrainedModel

from millstream.clock import RealClock
from millstream.engine import EngineConfig, OnUpdate
from millstream.engine.native.engine import TorchEngine
from millstream.engine.processes import EngineSupply, LocalWeights, process_engine
from millstream.engine.vllm.config import VllmConfig
from millstream.events.sinks import MemorySink
from millstream.model.load import new_model, set_up_cpu
from millstream.model.tiny import character_tokenizer
from millstream.rpc.process import LocalLauncher
from support.tiny import SHAPE, VOCABULARY

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS = 8


def model(seed: int = 0, *, ties: bool = True) -> PreTrainedModel:
    """Heads of 32: vLLM has no smaller ones on a CPU. `ties`: its head shares its weights with its embedding, as in many small
    models."""
    set_up_cpu()
    config = LlamaConfig(**{**SHAPE, "hidden_size": 128, "tie_word_embeddings": ties})
    return new_model(config, seed=seed)


class Started:
    """An engine that takes requests of other processes, too, and how to give it other weights."""

    def __init__(self, kind: Literal["shared", "file"]) -> None:
        self.kind = kind
        self.sink = MemorySink()
        self.keeps_cache = kind == "file"
        vllm = VllmConfig(
            tensor_parallel=2 if kind == "file" and DEVICE == "cpu" else 1,
            weights=kind,
            cache_gib=1.0,
            enforce_eager=True,
        )
        on_update: OnUpdate = "keep" if self.keeps_cache else "recompute"
        config = EngineConfig(kind="vllm", slots=SLOTS, prefill_tokens=64, on_update=on_update, vllm=vllm)
        # so few tokens of prompts at a time that what is computed again after a swap takes several steps
        self.tokenizer = character_tokenizer("".join(map(chr, range(33, 33 + VOCABULARY - 3))))
        begin = model().to(DEVICE)
        staged = LocalWeights(config, begin)
        supply = EngineSupply(LocalLauncher(), staged.first, staged.publish, DEVICE, has_lines=True)
        self.engine: TorchEngine = process_engine(
            config,
            begin,
            self.tokenizer,
            supply,
            clock=RealClock(),
            sink=self.sink,
            name="engine",
            on_close=staged.close,
        )

    async def load(self, seed: int) -> int:
        """As the next version."""
        weights = {name: p.detach().clone() for name, p in model(seed).to(DEVICE).named_parameters()}
        await self.engine.load(self.engine.version + 1, weights)
        return self.engine.version
