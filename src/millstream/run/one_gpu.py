"""Whether engine and learner are processes or threads on the GPU that they share, and why. Pure functions, as `run.sizes`: the
device's facts are passed in. docs/decisions/22-one-gpu.md has the measurements."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import structs

from millstream.errors import ConfigError
from millstream.events import Sizes
from millstream.run.config import RunConfig, critic_of, may_learn_in_process, reference_of
from millstream.run.sizes import (
    BYTES,
    Memory,
    ModelDevice,
    ModelShape,
    choose_dtype,
    choose_sizes,
    memory_warning,
    slots_for,
)

SMALL_MODEL = 2.5e8  # parameters: 135M gains from processes of its own, 474M loses
CANNOT_SHARE = (
    "processes cannot open each other's memory on the GPU here: WSL, expandable_segments in PYTORCH_ALLOC_CONF or "
    "PYTORCH_CUDA_ALLOC_CONF, or the compute mode for one process"
)
UNKNOWN_SIZE = "a model whose size is not known"


def with_process(
    config: RunConfig, device: ModelDevice, shape: ModelShape | None, recorded: Sizes | None = None
) -> RunConfig:
    """The config with an engine in a process of its own, and so a learner in another, on the GPU that they share, unless there
    is a reason against it. Raises `ConfigError` as `check_share` does."""
    check_share(config, device)
    is_open = _is_shared(config, device) and config.engine.process is None
    return _apart(config) if is_open and not why_threads(config, device, shape, recorded) else config


def check_share(config: RunConfig, device: ModelDevice) -> None:
    """Raises `ConfigError` for a share of the GPU, which divides it between threads, with processes."""
    if _is_shared(config, device) and config.engine.process and config.learner.gpu_share is not None:
        raise ConfigError(
            "learner.gpu_share with engine.process = true: processes take turns on a GPU. Leave one of the two out"
        )


def why_threads(config: RunConfig, device: ModelDevice, shape: ModelShape | None, recorded: Sizes | None = None) -> str:
    """Why engine and learner are threads on the GPU that they share; empty: they are processes, or do not share one. By default
    a model has processes if it is so small that the interpreter's lock holds up the GPU, and only where that was measured: one
    engine, one rank, no scorer. A larger model is faster on threads of one process, whose kernels run at the same time.
    `recorded`: the sizes that a resumed run keeps: it has processes where it had them."""
    if not _is_shared(config, device) or config.engine.process:
        return ""
    if config.engine.process is False:
        return "engine.process = false"
    return next(_reasons(config, device, shape, recorded), "")


def _is_shared(config: RunConfig, device: ModelDevice) -> bool:
    is_here = config.runtime == "local" and device.is_gpu and device.engine_bytes is None
    return is_here and config.engine.kind == "torch"


def _reasons(config: RunConfig, device: ModelDevice, shape: ModelShape | None, recorded: Sizes | None) -> Iterator[str]:
    """In the order in which they are looked for: what depends on the memory is the last."""
    learner = config.learner
    if config.engine.num_engines > 1 or learner.ranks > 1:
        yield "several engines or ranks"
    if learner.gpu_share is not None:
        yield f"learner.gpu_share = {learner.gpu_share:g}"
    if config.weights.is_own or not may_learn_in_process(config, learner):
        yield "parts of your own, or no learner here"
    if any((reference_of(config), critic_of(config), config.proximal)):
        yield "a reference, a critic or a proximal policy"
    if config.pipeline.is_in_lockstep:
        yield "lockstep"
    if shape is None:
        yield UNKNOWN_SIZE
        return
    if recorded is None and shape.parameters > SMALL_MODEL:
        yield f"{shape.parameters / 1e6:,.0f}M parameters, above {SMALL_MODEL / 1e6:.0f}M"
    if not device.is_shareable:
        yield CANNOT_SHARE
    first_bytes = BYTES[choose_dtype(config, device)] * shape.parameters  # with which processes begin
    if device.shared_bytes is not None and device.shared_bytes < first_bytes:
        yield f"{device.shared_bytes / 1e6:.0f} MB of shared memory, and processes need {first_bytes / 1e6:.0f}"
    if recorded is not None and not recorded.has_processes:
        yield "as in the log that gives the sizes"
    if recorded is None and _is_short(config, device, shape):
        yield "the memory of the GPU"


def _is_short(config: RunConfig, device: ModelDevice, shape: ModelShape) -> bool:
    """Processes need more memory. They are to leave a cache for as many requests and passes as large as threads would have, and
    to fit."""
    dtype = choose_dtype(config, device)
    found, threads = choose_sizes(_apart(config), device, shape), choose_sizes(config, device, shape)
    memory = Memory(config, shape, dtype=dtype, is_compiled=threads.is_compiled)
    requests, before = (
        one.slots if one.cache_gb is None else slots_for(one.cache_gb, memory, one.slots) for one in (found, threads)
    )
    is_smaller = requests < before or found.micro_batch_tokens < threads.micro_batch_tokens
    return is_smaller or bool(memory_warning(found, config))


def _apart(config: RunConfig) -> RunConfig:
    return structs.replace(config, engine=structs.replace(config.engine, process=True))
