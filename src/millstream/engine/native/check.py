"""The start-up check of the engine: requests of different lengths through the batcher and the runner that will serve.

One prompt joins while others decode, and one is cut into chunks where the runner can."""

from __future__ import annotations

from functools import partial
from typing import Literal

import numpy as np
from transformers import PreTrainedModel

from millstream.engine.native import fused
from millstream.engine.native.batching import Batcher
from millstream.engine.native.paged import PagedRunner
from millstream.engine.native.slots import SlotRunner
from millstream.errors import ModelError
from millstream.model.compare import CheckLengths, Scored, check_pass
from millstream.types import Completion, Request, RequestKey, Sampling

CacheKind = Literal["slots", "pages"]
REMEDIES: dict[CacheKind, str] = {
    "slots": 'Set engine.kind = "vllm"',
    "pages": 'Set engine.cache = "slots", or engine.kind = "vllm"',
}


def check_engine(model: PreTrainedModel, kind: CacheKind, *, is_small_only: bool = False) -> str:
    """Why the model's layers are not fused; empty: they can be. Raises `ModelError` if its requests have other
    log-probabilities than in the library's own pass, fused or not."""
    why = "fused layers of slots are for a CPU"
    if kind == "pages" or model.device.type == "cpu":
        try:
            what = f"the engine ({kind}, fused)"
            check_pass(model, what, partial(requests, kind, True), "", is_small_only=is_small_only)
            return ""
        except ModelError as error:
            why = str(error)
    check_pass(
        model, f"the engine ({kind})", partial(requests, kind, False), REMEDIES[kind], is_small_only=is_small_only
    )
    return why


def requests(kind: CacheKind, is_fused: bool, model: PreTrainedModel, lengths: CheckLengths) -> list[Scored]:
    """What a small engine samples for them. Afterwards the model is as it was."""
    num_words = model.get_input_embeddings().weight.shape[0]
    rng = np.random.default_rng(0)
    asked = {
        RequestKey(group_id=number, member=0): tuple(rng.integers(0, num_words, length).tolist())
        for number, length in enumerate(lengths.prompts)
    }
    try:
        batcher = _small_batcher(kind, is_fused, model, lengths)
        for number, (key, tokens) in enumerate(asked.items()):
            sampling = Sampling(max_tokens=lengths.answer, temperature=1.0)
            batcher.add(Request(key=key, tokens=tokens, sampling=sampling, seed=number))
        done: dict[RequestKey, Completion] = {}
        while batcher.has_work:
            done.update(batcher.step())
    finally:
        fused.unfuse(model)
    return [Scored((*tokens, *done[key].tokens), done[key].logprobs) for key, tokens in asked.items()]


def _small_batcher(kind: CacheKind, is_fused: bool, model: PreTrainedModel, lengths: CheckLengths) -> Batcher:
    num_slots, longest = len(lengths.prompts), max(lengths.prompts) + lengths.answer
    why_unfused = "" if is_fused else "for the check"
    runner: SlotRunner | PagedRunner
    if kind == "pages":
        runner = PagedRunner(model, num_slots, why_unfused=why_unfused, max_length=longest, has_graphs=False)
    else:
        runner = SlotRunner(model, num_slots, why_unfused=why_unfused)
    first, second, _ = lengths.prompts
    return Batcher(model, num_slots=num_slots, prefill_tokens=first + second, runner=runner)
