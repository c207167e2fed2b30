"""How weights reach engines that are processes of this machine: what `resources.weights` allows, and the default. On a cluster:
`cluster.resources.ways_of`. Light: imports no torch."""

from __future__ import annotations

from millstream.cluster.resources import ways_in_words
from millstream.errors import ConfigError
from millstream.run.config import RunConfig
from millstream.run.device import find_device, find_shape, with_places
from millstream.run.one_gpu import UNKNOWN_SIZE, why_threads, with_process
from millstream.run.places import Machine, Places
from millstream.weights import TransferWay


def local_ways(
    config: RunConfig, places: Places, *, is_gpu: bool, is_shareable: bool = True
) -> tuple[TransferWay, ...]:
    """How weights reach engines that are processes of this machine. `is_gpu`: whether the learner is on one; `is_shareable`:
    whether processes can open each other's memory there. By default through the host's memory, or that of the GPU that both are
    on: from one GPU to another has not been measured. Raises `ConfigError` for a way that cannot be used here."""
    asked, engine = config.resources.weights, config.engine
    is_one_gpu = is_gpu and not places.engines
    if asked is None:
        return ("ipc",) if is_one_gpu and is_shareable and engine.kind == "torch" else ("shared",)
    if not is_gpu and (needing := [way for way in asked if way in ("ipc", "nccl")]):
        raise ConfigError(
            f'resources.weights has "{needing[0]}", which is for GPUs, and the run has none: use "shared"'
        )
    is_process = engine.process or (engine.process is None and not is_gpu)  # see `build.has_process`
    if not places.engines and engine.kind != "vllm" and not (engine.kind == "torch" and is_process):
        other = "the engine is a thread of the run: set engine.process = true, or leave it out"
        raise ConfigError(
            "resources.weights says how weights reach engines that are processes, and here "
            + (other if engine.kind == "torch" else "the run starts no engine: leave it out")
        )
    if "ipc" in asked and not is_one_gpu:
        raise ConfigError(
            'resources.weights has "ipc", for processes on one GPU, and engines are on other GPUs than the learner: use "nccl" '
            'or "shared"'
        )
    if "nccl" in asked and is_one_gpu:
        raise ConfigError(
            'resources.weights has "nccl", from one GPU to another, and engine and learner are on the same one: use "ipc" or '
            '"shared"'
        )
    if asked == ("nccl",) and config.learner.ranks > 1:
        raise ConfigError(
            f'resources.weights = ["nccl"] with learner.ranks = {config.learner.ranks}: ranks write weights into the host\'s '
            'memory, from which they are sent: set it to ["nccl", "shared"]'
        )
    return asked


def checked_ways(machine: Machine, config: RunConfig, places: Places) -> str:
    """A line of `--dry-run`. Raises `ConfigError` as `local_ways` does."""
    device, shape, engine = with_places(find_device(config, machine), places), find_shape(config), config.engine
    is_on_one = device.is_gpu and not places.engines and engine.kind == "torch"
    if is_on_one and engine.process is None and why_threads(config, device, shape) == UNKNOWN_SIZE:
        return (
            "not checked: resources.weights, since the model is not here: its size decides whether the engine is a process, to "
            "which weights are sent"
        )
    decided = with_process(config, device, shape)
    ways = local_ways(decided, places, is_gpu=device.is_gpu, is_shareable=device.is_shareable)
    return f"checked: {ways_in_words(ways)}"
