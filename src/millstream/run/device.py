"""The device that a run's model gets, as far as it can be known without torch: for `--dry-run`."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from millstream.events import Sizes
from millstream.run.config import RunConfig
from millstream.run.sizes import (
    CPU,
    Memory,
    ModelDevice,
    ModelShape,
    choose_dtype,
    choose_sizes,
    memory_warning,
    shape_from,
    tiny_shape,
)

QUERY = ["--query-gpu=memory.free", "--format=csv,noheader,nounits"]
MEBIBYTE = 2**20
QUERY_S = 10.0
PROCESS_BYTES = 0.6e9  # of the interpreter with its libraries


def estimated_lines(config: RunConfig) -> list[str]:
    """What a run on this machine would choose, in words."""
    device, shape = find_device(config), find_shape(config)
    where = "on a GPU" if device.is_gpu else "on a CPU"
    if device.is_gpu and shape is None:
        return [f"not estimated: sizes {where}, since the model's config.json is not here, or has other names"]
    sizes = choose_sizes(config, device, shape)
    if not device.is_gpu and shape is not None and config.runtime == "local":
        return [f"estimated: {where} {sizes_in_words(sizes)}", *_memory_line(config, sizes, shape)]
    warning = memory_warning(sizes)
    return [f"estimated: {where} {sizes_in_words(sizes)}", *([f"warning: {warning}"] if warning else [])]


def _memory_line(config: RunConfig, sizes: Sizes, shape: ModelShape) -> list[str]:
    """Of a run on a CPU: what it needs, and what is available."""
    memory = Memory(config, shape, dtype=choose_dtype(config, CPU), is_compiled=False)
    needed = memory.fixed + memory.pass_bytes(sizes.micro_batch_tokens)
    needed = (needed + config.engine.replicas * memory.cache_for(sizes.slots) + PROCESS_BYTES) / 1e9
    free = available_memory()
    if free is None:
        return [f"estimated: about {needed:.1f} GB of memory"]
    if needed <= free / 1e9:
        return [f"estimated: about {needed:.1f} of {free / 1e9:.1f} GB of memory"]
    return [
        f"warning: the run needs about {needed:.1f} GB of memory, and {free / 1e9:.1f} GB are available: set "
        "learner.micro_batch_tokens or engine.slots lower, learner.recompute = true, or train a smaller model"
    ]


def available_memory() -> float | None:
    """Bytes that this process may still take: of the machine, and of its control group. None where the system does not say."""
    found = list[float]()
    with suppress(OSError, ValueError, IndexError):
        line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
        found.append(float(line.split()[1]) * 1024)
    with suppress(OSError, ValueError):  # "max": no limit
        group = Path("/sys/fs/cgroup")
        found.append(float((group / "memory.max").read_text()) - float((group / "memory.current").read_text()))
    return min(found, default=None)


def sizes_in_words(sizes: Sizes) -> str:
    """One line."""
    cache = "" if sizes.cache_gb is None else f", {sizes.cache_gb:g} GB of cache"
    compiled = ", compiled" if sizes.is_compiled else ""
    memory = "" if sizes.needed_gb is None else f" (about {sizes.needed_gb:.1f} of {sizes.free_gb:.1f} GB)"
    passes = f"micro-batches of {sizes.micro_batch_tokens:,} tokens"
    return f"{sizes.dtype}, {sizes.slots} slots{cache}, {passes}{compiled}{memory}"


def on_cluster(config: RunConfig) -> ModelDevice:
    """The memory of a cluster's GPUs is not known before its processes run."""
    return ModelDevice(is_gpu=config.resources.learner_gpus > 0)


def find_device(config: RunConfig) -> ModelDevice:
    if config.runtime == "ray":
        return on_cluster(config)
    free = None if config.model.device == "cpu" else _free_by_driver()
    if free is None:
        return ModelDevice(is_gpu=True) if config.model.device == "cuda" else CPU
    return ModelDevice(is_gpu=True, free_bytes=free)


def _free_by_driver() -> float | None:
    """Of the first GPU that this process may use, as the driver's tool says. None: there is none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shutil.which("nvidia-smi") is None or visible in ("", "-1"):
        return None
    which = [] if visible is None else [f"--id={visible.split(',')[0]}"]
    try:
        asked = subprocess.run(
            ["nvidia-smi", *QUERY, *which], capture_output=True, text=True, timeout=QUERY_S, check=True
        )
        return float(asked.stdout.splitlines()[0]) * MEBIBYTE
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def has_gpu_device() -> bool:
    """Whether torch could see a GPU here, as far as the system says."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return shutil.which("nvidia-smi") is not None or any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def find_shape(config: RunConfig) -> ModelShape | None:
    """From the `[model.tiny]` table or the checkpoint's folder; None where neither says it."""
    if config.model.tiny is not None:
        return tiny_shape(config.model.tiny)
    found = read_model_config(config)
    return None if found is None else shape_from(found)


def read_model_config(config: RunConfig) -> dict[str, Any] | None:
    """The `config.json` of the checkpoint's folder; None if it is not here."""
    try:
        found = msgspec.json.decode((Path(config.model.path or "") / "config.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
    return found if isinstance(found, dict) else None
