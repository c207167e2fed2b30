"""The arguments that vLLM gets: at its start, and with each request. The same for 0.23 and 0.32."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from msgspec import Struct

from millstream.engine.vllm.config import SHARED_MEMORY, OnUpdate, VllmConfig
from millstream.model.spec import has_own_code
from millstream.seeds import derive_seed
from millstream.types import Request
from millstream.weights.transfer import WeightsRef

EXTENSION = "millstream.engine.vllm.extension.WorkerExtension"


class VllmSetup(Struct, frozen=True, kw_only=True):
    """The first message to the worker process."""

    files: dict[str, bytes]  # the model's config and, for stop strings, the tokenizer: as they are saved
    has_tokenizer: bool = False
    first: WeightsRef  # the whole model
    scaling: float | None = None  # of the model's adapters: later weights are adapters alone. None: it has none
    slots: int
    prefill_tokens: int
    max_length: int | None
    num_words: int  # that the model has an embedding for: vLLM does not refuse others
    dtype: str
    is_cpu: bool
    on_update: OnUpdate = "keep"
    vllm: VllmConfig
    has_lines: bool = False  # whether it takes requests of rollout workers

    @property
    def is_eager(self) -> bool:
        return self.is_cpu if self.vllm.enforce_eager is None else self.vllm.enforce_eager


def set_environment(setup: VllmSetup) -> None:
    """The environment variables that vLLM and the processes that it starts read. A variable that the user has set stays."""
    found = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process with threads may hang
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    if setup.is_cpu:
        found |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        if setup.is_eager:
            found["TORCH_COMPILE_DISABLE"] = "1"  # its sampler would still compile for ten seconds
    for name, value in found.items():
        os.environ.setdefault(name, value)


def engine_arguments(setup: VllmSetup, folder: Path) -> dict[str, Any]:
    """For vLLM's `AsyncEngineArgs`. `folder`: with the setup's files."""
    vllm = setup.vllm
    cache_gib = 1.0 if vllm.cache_gib is None and setup.is_cpu else vllm.cache_gib
    return {
        "model": str(folder),
        "trust_remote_code": has_own_code(folder),  # which the process that wrote the folder's files has run already
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # not the model's own: a request has every sampling parameter
        "load_format": "dummy",  # the first weights are fetched as all others are
        "use_tqdm_on_load": False,
        "dtype": setup.dtype,
        "max_model_len": setup.max_length,
        "max_num_seqs": setup.slots,
        "max_num_batched_tokens": max(setup.prefill_tokens, setup.slots, setup.max_length or 0 if setup.is_cpu else 0),
        # A prompt in chunks rewinds its request's random generator, which vLLM can do on a GPU only.
        "enable_chunked_prefill": not setup.is_cpu,
        "enable_prefix_caching": vllm.prefix_cache,
        "tensor_parallel_size": vllm.tensor_parallel,
        "distributed_executor_backend": "mp" if vllm.tensor_parallel > 1 else "uni",  # not Ray, also in its actors
        "gpu_memory_utilization": SHARED_MEMORY if vllm.memory is None else vllm.memory,
        "kv_cache_memory_bytes": None if cache_gib is None else int(cache_gib * 2**30),
        "enforce_eager": setup.is_eager,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        "worker_extension_cls": EXTENSION,
        **vllm.args,
    }


def sampling_parameters(request: Request) -> Any:
    """A continued request has randomness of its own: vLLM's generators cannot be advanced to where it was."""
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
        logprobs=0,  # of the sampled token only
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
