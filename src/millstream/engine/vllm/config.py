"""The `[engine.vllm]` table. Light: imports neither torch nor vLLM."""

from __future__ import annotations

import importlib.util
from typing import Literal

from msgspec import Struct

from millstream.errors import ConfigError


class VllmConfig(Struct, frozen=True, kw_only=True):
    tensor_parallel: int = 1
    """GPUs that the model of one engine is split over."""
    memory: float = 0.4
    """The share of a GPU's memory that vLLM takes, for weights and cache together. The learner needs the rest. A CPU has no
    share: set `cache_gib`."""
    cache_gib: float | None = None
    """Memory for keys and values. None: what `memory` leaves after the weights; on a CPU, 1 GiB."""
    max_model_len: int | None = None
    """Tokens of a prompt and its answer together. None: the model's context."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """None: the learner's."""
    enforce_eager: bool | None = None
    """Whether to run without compilation and CUDA graphs. None: on a CPU, where compilation takes longer than it saves."""
    prefix_cache: bool = True
    """Whether a prefix that prompts share is computed once. After new weights, requests in flight are then computed again, so
    that every token is sampled under its version only. False: each prompt is computed by itself, and requests in flight keep
    the keys and values of the weights before, as in our own engine."""
    weights: Literal["shared", "file"] = "shared"
    """How weights reach vLLM's workers: through shared memory, or through a file in the folder for temporary files, for a
    machine whose shared memory is too small."""

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1 or not 0 < self.memory <= 1:
            raise ValueError("tensor_parallel must be at least 1, memory above 0 and at most 1")
        if (self.cache_gib is not None and self.cache_gib <= 0) or (self.max_model_len or 2) < 2:
            raise ValueError("cache_gib must be above 0, max_model_len at least 2")


def check_installed() -> None:
    """Raises `ConfigError` that says what to type. Imports nothing: that would take seconds."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            'engine.kind = "vllm", and vLLM is not installed here: pip install vllm on a machine with a GPU, see '
            'docs/engines-vllm.md for one without, or set engine.kind = "torch"'
        )
