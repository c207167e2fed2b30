"""A real vLLM and adapters: its workers merge them, and what it samples has the log-probabilities of the merged model.

Two engines: one worker with weights in shared memory, and two workers, of which each keeps a part of every merged weight."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
import torch

from millstream.clock import RealClock
from millstream.engine import EngineConfig
from millstream.engine.native.engine import TorchEngine
from millstream.engine.vllm.config import VllmConfig
from millstream.errors import EngineError
from millstream.events.sinks import MemorySink
from millstream.model.adapters import add_adapters, merged, trained_weights
from millstream.model.load import model_weights
from millstream.model.lora import LoraConfig
from millstream.run.build import build_engine
from millstream.types import Completion
from support.tiny import plain, prompts, request
from support.vllm_engines import DEVICE, SLOTS, model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
pytest.importorskip("vllm")

CLOSE = 1e-4 if DEVICE == "cpu" else 2e-3  # of log-probabilities in float32: see test_vllm.py
ASKED = [request(number, prompt) for number, prompt in enumerate(prompts(SLOTS))]


def adapt(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """Give it other adapters, in place. What a learner publishes of them."""
    generator = torch.Generator().manual_seed(seed)
    for adapter in trained_weights(model).values():
        adapter.data.copy_(0.02 * torch.randn(adapter.shape, generator=generator))
    return {name: adapter.detach().clone() for name, adapter in trained_weights(model).items()}


@torch.no_grad()
def worst_error(twin: Any, completions: list[Completion]) -> float:
    """Of the log-probabilities that the engine reported, against transformers."""
    worst = 0.0
    for asked, said in zip(ASKED, completions, strict=True):
        logprobs = torch.log_softmax(twin(torch.tensor([[*asked.tokens, *said.tokens]])).logits[0].float(), -1)
        own = torch.arange(len(asked.tokens) - 1, len(asked.tokens) + len(said.tokens) - 1)
        found = logprobs[own, torch.tensor(said.tokens)]
        worst = max(worst, float((found - torch.tensor(said.logprobs)).abs().max()))
    return worst


@pytest.mark.parametrize(("num_workers", "place"), [(1, "shared"), (2, "file")])
def test_log_probabilities_are_the_merged_models_from_the_start_and_after_every_version(
    num_workers: int, place: Literal["shared", "file"]
) -> None:
    if DEVICE == "cuda" and num_workers > torch.cuda.device_count():
        pytest.skip(f"needs {num_workers} GPUs")
    adapted = model()
    add_adapters(adapted, LoraConfig(rank=4, alpha=8.0), seed=1)
    adapt(adapted, 0)
    twins = [plain(merged(adapted))]
    vllm = VllmConfig(tensor_parallel=num_workers, weights=place, cache_gib=0.25, enforce_eager=True)
    config = EngineConfig(kind="vllm", slots=SLOTS, prefill_tokens=64, vllm=vllm)
    engine: TorchEngine = build_engine(config, adapted.to(DEVICE), clock=RealClock(), sink=MemorySink())

    async def sampled() -> list[Completion]:
        return await asyncio.gather(*map(engine.generate, ASKED))

    async def program() -> list[list[Completion]]:
        found, versions = [await sampled()], []
        for seed in (1, 2):
            versions.append(adapt(adapted, seed))
            twins.append(plain(merged(adapted).cpu()))
            await engine.load(seed, versions[-1])
            found.append(await sampled())
        with pytest.raises(EngineError, match="do not fit"):
            await engine.load(3, {name: value.detach() for name, value in model_weights(adapted).items()})
        await engine.load(3, versions[0])
        found.append(await sampled())
        await engine.close()
        return found

    found = asyncio.run(asyncio.wait_for(program(), 400))
    errors = [worst_error(twin, said) for twin, said in zip([*twins, twins[1]], found, strict=True)]
    print(f"\n{num_workers} workers: within {max(errors):.1e} nats of the merged model")
    assert max(errors) < CLOSE, errors
    assert all(worst_error(twins[0], said) > 100 * CLOSE for said in found[1:]), "the versions differ"
    if DEVICE == "cpu":
        again = [(one.tokens, one.logprobs) for one in found[3]]
        assert again == [(one.tokens, one.logprobs) for one in found[1]], "nothing of version 2 is left"
