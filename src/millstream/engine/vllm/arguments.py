"""What vLLM is told: as it starts, and with each request. The same for 0.23 and 0.32."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from millstream.engine.vllm.config import VllmConfig
from millstream.model.shared_memory import Layout
from millstream.seeds import derive_seed
from millstream.types import Request

INSIDE = "millstream.engine.vllm.extension.Inside"
STARTING = threading.Lock()


class Plan(Struct, frozen=True, kw_only=True):
    """What the worker needs to know."""

    folder: str
    """The model's config and, if weights come in files, its weights."""
    memory: str | None
    """Where any process of this user finds the shared weights. None: they come in files."""
    layout: Layout
    slots: int
    prefill_tokens: int
    max_length: int | None
    dtype: str
    is_cpu: bool
    vllm: VllmConfig

    @property
    def is_eager(self) -> bool:
        return self.is_cpu if self.vllm.enforce_eager is None else self.vllm.enforce_eager


@contextmanager
def environment(plan: Plan) -> Iterator[None]:
    """What vLLM and the processes that it starts read as they start. Whatever the user has set comes first. Of several engines
    on threads of one process, one starts at a time: they share its environment."""
    found = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process with threads may hang
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    if plan.is_cpu:
        found |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        if plan.is_eager:
            found["TORCH_COMPILE_DISABLE"] = "1"  # its sampler would compile for ten seconds all the same
    with STARTING:
        added = {name: value for name, value in found.items() if name not in os.environ}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                os.environ.pop(name, None)


def engine_arguments(plan: Plan) -> dict[str, Any]:
    """For vLLM's `AsyncEngineArgs`."""
    vllm = plan.vllm
    cache_gib = 1.0 if vllm.cache_gib is None and plan.is_cpu else vllm.cache_gib
    return {
        "model": plan.folder,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # nothing of the model's own: a request says everything
        "load_format": "auto" if plan.memory is None else "dummy",
        "use_tqdm_on_load": False,
        "dtype": plan.dtype,
        "max_model_len": plan.max_length,
        "max_num_seqs": plan.slots,
        "max_num_batched_tokens": max(plan.prefill_tokens, plan.slots, plan.max_length or 0 if plan.is_cpu else 0),
        # A prompt in pieces winds its request's random generator back, which vLLM can do on a GPU alone.
        "enable_chunked_prefill": not plan.is_cpu,
        "enable_prefix_caching": vllm.prefix_cache,
        "tensor_parallel_size": vllm.tensor_parallel,
        "gpu_memory_utilization": vllm.memory,
        "kv_cache_memory_bytes": None if cache_gib is None else int(cache_gib * 2**30),
        "enforce_eager": plan.is_eager,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        "worker_extension_cls": INSIDE,
    }


def sampling_parameters(request: Request) -> Any:
    """A request that goes on has randomness of its own: vLLM's generators cannot be wound forward to where it was."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling, seed = request.sampling, request.seed
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        stop_token_ids=list(sampling.stop),
        seed=derive_seed(seed, "goes on", request.num_sampled) if request.num_sampled else seed,
        ignore_eos=True,  # `stop` names every token that ends a turn
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
