"""The device that a run's model gets, as far as it can be known without torch: for `--dry-run`."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import msgspec

from millstream.events import Sizes
from millstream.run.config import RunConfig
from millstream.run.sizes import CPU, ModelDevice, ModelShape, choose_sizes, memory_warning, shape_from, tiny_shape

QUERY = ["--query-gpu=memory.free", "--format=csv,noheader,nounits"]
MEBIBYTE = 2**20
QUERY_S = 10.0


def estimated_lines(config: RunConfig) -> list[str]:
    """What a run on this machine would choose, in words."""
    device, shape = find_device(config), find_shape(config)
    where = "on a GPU" if device.is_gpu else "on a CPU"
    if device.is_gpu and shape is None:
        return [f"not estimated: sizes {where}, since the model's config.json is not here, or has other names"]
    sizes = choose_sizes(config, device, shape)
    warning = memory_warning(sizes)
    return [f"estimated: {where} {sizes_in_words(sizes)}", *([f"estimated: {warning}"] if warning else [])]


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


def find_shape(config: RunConfig) -> ModelShape | None:
    """From the `[model.tiny]` table or the checkpoint's folder; None where neither says it."""
    if config.model.tiny is not None:
        return tiny_shape(config.model.tiny)
    try:
        found = msgspec.json.decode((Path(config.model.path or "") / "config.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
    return shape_from(found) if isinstance(found, dict) else None
