"""From a model and a config to a batcher that is ready to decode: the runner is chosen here, and its passes are checked."""

from __future__ import annotations

from transformers import PreTrainedModel

from millstream.engine import EngineConfig
from millstream.engine.native.batching import Batcher
from millstream.engine.native.check import CacheKind, check_engine
from millstream.engine.native.paged import PagedRunner
from millstream.engine.native.runner import Runner
from millstream.engine.native.slots import SlotRunner
from millstream.engine.native.speculation import Speculator
from millstream.engine.native.strings import DecodeTokens
from millstream.model.concurrent import shield_from_tracers


def batcher_of(model: PreTrainedModel, config: EngineConfig, decode: DecodeTokens | None = None) -> Batcher:
    runner = make_runner(model.eval(), config)
    shield_from_tracers(model)  # a learner in this process may compile at any time
    return Batcher(
        model,
        num_slots=config.num_slots,
        prefill_tokens=config.prefill_tokens,
        on_update=config.on_update,
        runner=runner,
        decode=decode,
        speculator=Speculator(config.max_draft if runner.can_draft else 0),
    )


def make_runner(model: PreTrainedModel, config: EngineConfig) -> Runner:
    """Raises `ModelError` for a model that would give other numbers than in transformers."""
    kind = cache_kind(config, model.device.type)
    why_unfused = check_engine(model, kind)
    if kind == "slots":
        return SlotRunner(model, config.num_slots, why_unfused=why_unfused)
    runner = PagedRunner(model, config.num_slots, cache_gb=config.pool_gb, why_unfused=why_unfused)
    runner.make_graphs()
    return runner


def cache_kind(config: EngineConfig, device: str) -> CacheKind:
    return config.cache or ("pages" if device == "cuda" else "slots")
