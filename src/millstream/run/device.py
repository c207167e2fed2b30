"""The device that a run's model gets, as far as it can be known without torch: for `--dry-run`."""

from __future__ import annotations

import math
import os
import platform
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from millstream.decoding import decode_json
from millstream.errors import MillstreamError
from millstream.events import Sizes
from millstream.model.locate import HUB_NAME
from millstream.model.lora import LoraConfig, of_adapter
from millstream.run.config import RunConfig
from millstream.run.one_gpu import why_threads, with_process
from millstream.run.places import VISIBLE, Gpu, Machine, Places
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
from millstream.store.segments import free_shared_memory

QUERY = ["--query-gpu=memory.free,compute_mode", "--format=csv,noheader,nounits"]
EXCLUSIVE = "exclusive"  # of the modes in which one process alone can use a GPU
MEBIBYTE = 2**20
QUERY_S = 10.0
PROCESS_BYTES = 0.6e9  # of the interpreter with its libraries


def estimated_lines(config: RunConfig, places: Places, machine: Machine | None) -> list[str]:
    """What a run on this machine would choose, in words."""
    device, shape = with_places(find_device(config, machine), places), find_shape(config, is_cache_read=True)
    where = "on a GPU" if device.is_gpu else "on a CPU"
    if device.is_gpu and shape is None:
        return [f"not estimated: sizes {where}, since the model's config.json is not here, or has other names"]
    why = why_threads(config, device, shape)
    sizes = structs.replace(choose_sizes(with_process(config, device, shape), device, shape), why_threads=why)
    if not device.is_gpu and shape is not None and config.runtime == "local":
        return [f"estimated: {where} {sizes_in_words(sizes)}", *_memory_line(config, sizes, shape)]
    warning = memory_warning(sizes, config)
    return [f"estimated: {where} {sizes_in_words(sizes)}", *([f"warning: {warning}"] if warning else [])]


def _memory_line(config: RunConfig, sizes: Sizes, shape: ModelShape) -> list[str]:
    """Of a run on a CPU: what it needs, and what is available."""
    memory = Memory(config, shape, dtype=choose_dtype(config, CPU), is_compiled=False)
    needed = memory.fixed + memory.pass_bytes(sizes.micro_batch_tokens)
    needed = (needed + config.engine.num_replicas * memory.cache_for(sizes.slots) + PROCESS_BYTES) / 1e9
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
    why = f", engine and learner as threads ({sizes.why_threads})" if sizes.why_threads else ""
    apart = ", engine and learner as processes" if sizes.has_processes else why
    return f"{sizes.dtype}, {sizes.slots} slots{cache}, {passes}{compiled}{apart}{memory}"


def on_cluster(config: RunConfig) -> ModelDevice:
    """The memory of a cluster's GPUs is not known before its processes run."""
    return ModelDevice(is_gpu=bool(config.resources.learner_gpus or config.resources.gpus))


def with_places(device: ModelDevice, places: Places) -> ModelDevice:
    """Where engines have GPUs of their own: the memory of the smallest share of one. Where it is not known, GPUs of one machine
    are taken to be alike."""
    if any(gpu.is_exclusive for gpu in places.ranks):
        device = structs.replace(device, is_shareable=False)
    used = [gpus[0] for gpus in places.engines]
    if not used:
        return device
    like = math.inf if device.free_bytes is None else device.free_bytes
    shares = [(like if gpu.free_bytes is None else gpu.free_bytes) / used.count(gpu) for gpu in used]
    return structs.replace(device, engine_bytes=min(shares))


def is_gpu_memory_shareable() -> bool:
    """Whether other processes can open what this one has on a GPU. Not on WSL; and what the allocator keeps in segments that
    expand is opened in a way that containers refuse."""
    is_wsl = "microsoft" in platform.release().lower()
    settings = (os.environ.get("PYTORCH_ALLOC_CONF", ""), os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    return not is_wsl and not any("expandable_segments:true" in one.lower().replace(" ", "") for one in settings)


def gpu_device(free_bytes: float | None) -> ModelDevice:
    """A GPU of this machine."""
    return ModelDevice(
        is_gpu=True,
        free_bytes=free_bytes,
        is_shareable=is_gpu_memory_shareable(),
        shared_bytes=free_shared_memory() or 0.0,
    )


def find_device(config: RunConfig, machine: Machine | None = None) -> ModelDevice:
    if config.runtime == "ray":
        return on_cluster(config)
    gpus = () if config.model.device == "cpu" else visible_gpus() if machine is None else machine.gpus
    if not gpus:
        return gpu_device(None) if config.model.device == "cuda" else CPU
    is_here = machine is None or not machine.is_described
    return gpu_device(gpus[0].free_bytes) if is_here else ModelDevice(is_gpu=True, free_bytes=gpus[0].free_bytes)


def find_machine(config: RunConfig) -> Machine | None:
    """The GPUs of this machine. None: the run is for another one, or for a cluster that is not this machine."""
    gpus = visible_gpus()
    is_elsewhere = config.runtime == "ray" and (config.resources.address != "local" or not gpus)
    return None if is_elsewhere else Machine(nodes=(gpus,))


def visible_gpus() -> tuple[Gpu, ...]:
    """That this process may use, as the driver's tool says."""
    visible = os.environ.get(VISIBLE)
    if shutil.which("nvidia-smi") is None or visible in ("", "-1"):
        return ()
    try:
        which = [] if visible is None else [f"--id={visible}"]
        asked = subprocess.run(
            ["nvidia-smi", *QUERY, *which], capture_output=True, text=True, timeout=QUERY_S, check=True
        )
        lines = [line.partition(",") for line in asked.stdout.splitlines() if line.strip()]
        found = [(float(free) * MEBIBYTE, EXCLUSIVE in mode.lower()) for free, _, mode in lines]
    except (OSError, subprocess.SubprocessError, ValueError):
        return () if visible is None else tuple(Gpu(name=name) for name in visible.split(","))
    names = map(str, range(len(found))) if visible is None else visible.split(",")
    return tuple(
        Gpu(name=name, free_bytes=free, is_exclusive=is_exclusive)
        for name, (free, is_exclusive) in zip(names, found, strict=False)
    )


def has_gpu_device() -> bool:
    """Whether torch could see a GPU here, as far as the system says."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return shutil.which("nvidia-smi") is not None or any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def find_shape(config: RunConfig, *, is_cache_read: bool = False) -> ModelShape | None:
    """From the `[model.tiny]` table or the `config.json` of the checkpoint's folder; None where neither says it. Of adapters
    their number is an estimate: those of all linear layers. `is_cache_read`: also from the hub's cache, for estimates: a model
    of the hub is checked when it is loaded and counted."""
    lora = config.learner.lora
    if config.model.tiny is not None:
        return _with_adapters(tiny_shape(config.model.tiny), lora)
    found = read_model_config(config, is_cache_read=is_cache_read)
    return None if found is None else _with_adapters(shape_from(found), lora)


def _with_adapters(shape: ModelShape | None, lora: LoraConfig | None) -> ModelShape | None:
    if shape is None or lora is None:
        return shape
    with suppress(MillstreamError):  # the check of the adapter says what is wrong with it
        trained = of_adapter(lora).rank * shape.layers * _ends_of_layers(shape)
        return structs.replace(shape, trained=trained, parameters=shape.parameters + trained)
    return shape


def _ends_of_layers(shape: ModelShape) -> int:
    """Inputs and outputs of the linear layers of a decoder's layer, added up."""
    attention = 2 * (shape.hidden + shape.queries) + 2 * (shape.hidden + shape.keys)
    return attention + 3 * (shape.hidden + shape.inner)


def heads_of(config: RunConfig) -> dict[str, Any]:
    """What a model's `config.json` says of its attention heads; empty: nothing, or it is not here."""
    if config.model.tiny is not None:
        return {"num_attention_heads": config.model.tiny.heads}
    return read_model_config(config) or {}


def _in_hub_cache(name: str) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    with suppress(ValueError):  # no name that the hub could have
        found = try_to_load_from_cache(name, "config.json")
        return found if isinstance(found, str) else None
    return None


def read_model_config(config: RunConfig, *, is_cache_read: bool = False) -> dict[str, Any] | None:
    """The `config.json` of the checkpoint's folder, or perhaps of the hub's cache; None if it is in neither."""
    path = config.model.path or ""
    file = Path(path) / "config.json"
    try:
        if is_cache_read and HUB_NAME.fullmatch(path) and not Path(path).is_dir():
            file = Path(_in_hub_cache(path) or file)
        found = decode_json(file.read_bytes(), Any)
    except (OSError, msgspec.DecodeError):
        return None
    return found if isinstance(found, dict) else None
