"""The `[engine.vllm]` table. Light: imports neither torch nor vLLM."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, field

from millstream.errors import ConfigError

OnUpdate = Literal["keep", "recompute"]
SHARED_MEMORY = 0.4  # of a GPU that the learner uses, too
OWN_ARGS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "max_num_seqs": "engine.slots",
    "max_num_batched_tokens": "engine.prefill_tokens",
    "tensor_parallel_size": "engine.vllm.tensor_parallel",
    "gpu_memory_utilization": "engine.vllm.memory",
    "kv_cache_memory_bytes": "engine.vllm.cache_gib",
    "max_model_len": "engine.vllm.max_model_len",
    "dtype": "engine.vllm.dtype",
    "enforce_eager": "engine.vllm.enforce_eager",
    "enable_prefix_caching": "engine.vllm.prefix_cache",
    "seed": "seed",
}
"""Arguments of vLLM that have a key of ours."""
FIXED_ARGS = (
    *("skip_tokenizer_init", "generation_config", "load_format", "use_tqdm_on_load", "logprobs_mode"),
    *("worker_extension_cls", "worker_cls", "distributed_executor_backend", "enable_chunked_prefill", "enable_lora"),
    *("pipeline_parallel_size", "data_parallel_size", "nnodes", "node_rank", "weight_transfer_config", "runner"),
)
"""Arguments on which versions, log-probabilities or places depend: a run sets them."""


class VllmConfig(Struct, frozen=True, kw_only=True):
    tensor_parallel: int = 1
    """GPUs that the model of one engine is split over, on one node."""
    memory: float | None = None
    """The share of a GPU's memory that vLLM takes, for weights and cache together. A CPU has no share: set `cache_gib`. None:
    0.4 on a GPU that the learner uses, too; 0.9 of what resources.engine_gpus gives the engine; 0.9 of a GPU of its own."""
    cache_gib: float | None = None
    """Memory for keys and values. None: what `memory` leaves after the weights; on a CPU, 1 GiB."""
    max_model_len: int | None = None
    """Tokens of a prompt and its answer together. None: the model's context."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """None: the learner's."""
    enforce_eager: bool | None = None
    """Whether to run without compilation and CUDA graphs. None: on a CPU, where compilation takes longer than it saves."""
    prefix_cache: bool = True
    """Whether a prefix that prompts share is computed once. Keys and values of older weights are never shared."""
    weights: Literal["shared", "file"] = "shared"
    """How weights reach vLLM's workers on one machine without Ray, unless resources.weights says it: through shared memory, or
    through a file in the folder for temporary files, for a machine whose shared memory is too small."""
    args: dict[str, Any] = field(default_factory=dict)
    """More arguments of vLLM's engine, by its own names: { quantization = "fp8" }, say. Those that a run sets are refused."""

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1 or (self.memory is not None and not 0 < self.memory <= 1):
            raise ValueError("tensor_parallel must be at least 1, memory above 0 and at most 1")
        if (self.cache_gib is not None and self.cache_gib <= 0) or (self.max_model_len or 2) < 2:
            raise ValueError("cache_gib must be above 0, max_model_len at least 2")
        for name in self.args:
            if name in OWN_ARGS:
                raise ValueError(f"args has {name}: set {OWN_ARGS[name]} instead")
            if name in FIXED_ARGS:
                raise ValueError(f"args has {name}, which the run itself sets: leave it out")


def is_installed() -> bool:
    """Imports nothing: that would take seconds."""
    return importlib.util.find_spec("vllm") is not None


def check_installed() -> None:
    """Raises `ConfigError` that says what to type."""
    if not is_installed():
        raise ConfigError(
            'engine.kind = "vllm", and vLLM is not installed here: pip install vllm on a machine with a GPU, see '
            'docs/engines-vllm.md for one without, or set engine.kind = "torch"'
        )


def check_args(config: VllmConfig) -> None:
    """Raises `ConfigError` for an argument that this version of vLLM does not have."""
    known = known_args()
    for name in config.args:
        if known and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"Did you mean {near[0]}?" if near else "`vllm serve --help` lists them, with - for _"
            raise ConfigError(f"engine.vllm.args has {name}, which vLLM does not know here. {meant}")


def known_args() -> list[str]:
    """The arguments of vLLM's engine, read from its source without importing it; empty if it is not installed."""
    found = importlib.util.find_spec("vllm")
    source = Path(found.origin).parent / "engine" / "arg_utils.py" if found is not None and found.origin else None
    if source is None or not source.is_file():
        return []
    classes = [one for one in ast.parse(source.read_text()).body if isinstance(one, ast.ClassDef)]
    own = [one for one in classes if one.name in ("EngineArgs", "AsyncEngineArgs")]
    fields = [one.target for part in own for one in part.body if isinstance(one, ast.AnnAssign)]
    return [one.id for one in fields if isinstance(one, ast.Name)]
