"""vLLM as an engine: its continuous batching, its kernels and its tensor parallelism behind the promises of `Engine`.

vLLM's core, which schedules and samples, has a process of its own. The rest of it (AsyncLLM: requests out, outputs in, a few
hundred microseconds of Python a step) runs in a process of ours (`vllm.worker`): Ctrl-C does not reach it, what vLLM changes in
an interpreter stays there, and a user's script needs no guard around its main part, although vLLM starts its core from the main
module.

Weights are published in the names and shapes of a checkpoint; vLLM's workers fetch them, and vLLM's `reload_weights` converts
them to its own layout. Of a model with adapters these alone are published: vLLM's workers merge them, and vLLM has an ordinary
model.

What differs from our own engine: a continued request (`Request.num_sampled`) has the right distribution and new randomness, not
that which it would have had; a greedy request's log-probabilities are those of temperature 1 without top-k and top-p.
"""

from __future__ import annotations

import copy

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millstream.engine.config import EngineConfig
from millstream.engine.vllm.arguments import VllmSetup
from millstream.engine.vllm.config import VllmConfig
from millstream.model.adapters import lora_of
from millstream.model.load import context_length
from millstream.model.spec import described
from millstream.weights.transfer import WeightsRef

VLLM_WORKER = "millstream.engine.vllm.worker:serve_vllm"


def vllm_setup(
    model: PreTrainedModel,
    config: EngineConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    is_cpu: bool,
    first: WeightsRef,
    has_lines: bool = False,
) -> VllmSetup:
    vllm = config.vllm or VllmConfig()
    own = copy.deepcopy(model.config)
    own.architectures = [type(model).__name__]
    lora = lora_of(model)
    limits = [limit for limit in (context_length(model), vllm.max_model_len) if limit is not None]
    return VllmSetup(
        files=described(model, tokenizer, config=own),
        has_tokenizer=tokenizer is not None,
        first=first,
        scaling=None if lora is None else lora.alpha / lora.rank,
        slots=config.num_slots,
        prefill_tokens=config.prefill_tokens,
        max_length=min(limits, default=None),
        num_words=int(model.get_input_embeddings().num_embeddings),
        dtype=vllm.dtype or str(model.dtype).removeprefix("torch."),
        is_cpu=is_cpu,
        on_update=config.on_update,
        vllm=vllm,
        has_lines=has_lines,
    )
