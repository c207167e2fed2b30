"""What a model costs on a kind of GPU, from its shape and the GPU's data sheet: the costs of `[sim]`, and the memory.

A roofline: bytes divided by bandwidth, operations divided by rate, each times an efficiency. GPUs and efficiencies are data,
with their sources: `gpus.toml`. Costs of a real run (`millstream calibrate`) are better than these. Light: imports no torch.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct, structs

from millstream.config import MAX_SECONDS, load
from millstream.errors import ConfigError
from millstream.run.config import RunConfig
from millstream.run.one_gpu import with_process
from millstream.run.sizes import (
    MAX_SLOTS,
    MIN_PASS,
    USABLE,
    Memory,
    ModelDevice,
    ModelShape,
    have_processes,
)
from millstream.sim.config import SimConfig

MIN_PASSES = 4  # of a batch: training begins when the first of them is complete
GPUS = re.compile(r"(?:(?P<number>\d{1,6})\s*x\s*)?(?P<kind>[A-Za-z][\w .-]*)", flags=re.I)


class GpuKind(Struct, frozen=True, kw_only=True):
    memory_gb: float
    bandwidth_gb_per_s: float
    bfloat16_tflops: float
    link_gb_per_s: float
    """To other GPUs of the node, in one direction."""
    source: str


class Efficiency(Struct, frozen=True, kw_only=True):
    """What of a GPU's rates is reached: see the comments of `gpus.toml`."""

    weights_read: float
    cache_read: float
    decode_flops: float
    layer_s: float
    prefill_flops: float
    train_parameters: tuple[float, float]
    train_flops: tuple[float, float]
    train_flops_compiled: tuple[float, float]
    recompute: float
    decode_slowdown: float
    learner_keep: float
    optimizer_s: float
    link: float
    network_gb_per_s: float
    node_gpus: int
    publish_gb_per_s: float
    load_gb_per_s: float


class GpuTable(Struct, frozen=True, kw_only=True):
    gpu: dict[str, GpuKind]
    efficiency: Efficiency


class Gpus(Struct, frozen=True, kw_only=True):
    """The GPUs of a plan."""

    name: str
    kind: GpuKind
    number: int


@functools.cache
def gpu_table() -> GpuTable:
    return load(Path(__file__).with_name("gpus.toml"), GpuTable)


def parse_gpus(text: str, option: str = "--gpus") -> Gpus:
    """`8xH200`, or `H200` for one. Raises `ConfigError` for an unknown kind, with those that are known."""
    table = gpu_table().gpu
    found = GPUS.fullmatch(text.strip())
    number = int(found["number"] or 1) if found else 0
    if found is None or not number:
        raise ConfigError(f"{option} {text}: expected a number and a kind, such as {option} 8xH200")
    names = {_plain(name): name for name in table}
    asked = _plain(found["kind"])
    if (name := names.get(asked)) is None:
        near = [one for plain, one in names.items() if plain.startswith(asked) or asked.startswith(plain)]
        costs = ", with --costs of a run on yours" if option == "--gpus" else ""
        known = f"Known kinds: {', '.join(table)}. Of another one, type the nearest{costs}"
        meant = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(f"{option} {text}: no GPU {found['kind']!r} is known.{meant} {known}")
    return Gpus(name=name, kind=table[name], number=number)


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower().removeprefix("nvidia").removeprefix("geforce")


# ---- memory ------------------------------------------------------------------------------------------------------------


class MemoryFit(Struct, frozen=True, kw_only=True):
    """What of a run is in the memory of one GPU. `lack_gb`: above 0, it does not fit, and `where` says on whose GPU."""

    micro_batch_tokens: int = 0
    is_recomputed: bool = False
    is_compiled: bool = False
    cache_tokens: int = 0
    cache_gb: float = 0.0
    learner_gb: float = 0.0
    """On a GPU of the learner; with shared GPUs everything is on each."""
    engine_gb: float = 0.0
    lack_gb: float = 0.0
    where: str = ""


class Placed(Struct, frozen=True, kw_only=True):
    """How GPUs are divided: ranks and engines with one GPU each, or on shared GPUs one of both on each."""

    ranks: int
    engines: int
    is_shared: bool

    @property
    def words(self) -> str:
        if self.is_shared:
            return "shared" if self.ranks == 1 else f"{self.ranks} shared"
        return f"{self.ranks} + {self.engines}"


def fit_memory(
    config: RunConfig, shape: ModelShape, gpus: Gpus, placed: Placed, *, longest_request: int, batch_tokens: float
) -> MemoryFit:
    """The largest passes and cache that fit; layers are recomputed where the activations would not fit otherwise."""
    is_auto = config.learner.compile == "auto" and not config.learner.offload and placed.ranks == 1
    is_compiled = config.learner.is_compiled or is_auto
    config = _placed(config, placed)
    device = ModelDevice(is_gpu=True, free_bytes=gpus.kind.memory_gb * 1e9)
    has_processes = gpus.number == 1 and have_processes(with_process(config, device, shape), device)
    found = MemoryFit(lack_gb=math.inf)
    for is_recomputed in dict.fromkeys((config.learner.recompute, True)):
        learner = structs.replace(config.learner, recompute=is_recomputed)
        memory = Memory(structs.replace(config, learner=learner), shape, dtype="bfloat16", is_compiled=is_compiled)
        processes = memory.processes(placed.engines, with_learner=True) if has_processes else 0.0
        found = _fit(config, memory, gpus.kind, placed, longest_request, batch_tokens, processes=processes)
        found = structs.replace(found, is_recomputed=is_recomputed, is_compiled=is_compiled)
        if found.lack_gb <= 0:
            break
    return found


def _placed(config: RunConfig, placed: Placed) -> RunConfig:
    """With what a plan sets, as far as memory depends on it."""
    return structs.replace(
        config,
        engine=structs.replace(config.engine, replicas=placed.engines),
        learner=structs.replace(config.learner, ranks=placed.ranks),
        pipeline=structs.replace(config.pipeline, lockstep=False),
    )


def _fit(
    config: RunConfig,
    memory: Memory,
    gpu: GpuKind,
    placed: Placed,
    longest_request: int,
    batch_tokens: float,
    *,
    processes: float,
) -> MemoryFit:
    """`processes`: what they need beyond threads."""
    room = USABLE * gpu.memory_gb * 1e9
    learner = processes + (memory.learner if placed.ranks == 1 else memory.sharded(placed.ranks))
    engine = memory.engine + memory.decoding(MAX_SLOTS)
    is_auto, least_cache = config.learner.micro_batch_tokens == "auto", longest_request * memory.token_bytes
    least_pass = max(longest_request, MIN_PASS if is_auto else config.learner.pass_tokens)
    for_pass = room - learner - (engine + least_cache if placed.is_shared else 0.0)
    for_cache = room - engine - (learner + memory.pass_bytes(least_pass) if placed.is_shared else 0.0)
    lacks = [memory.pass_bytes(least_pass) - for_pass, least_cache - for_cache]
    if max(lacks) > 0:
        where = "a GPU of the learner" if lacks[0] > 0 else "the GPU of an engine"
        return MemoryFit(
            lack_gb=max(lacks) / 1e9, where="a GPU of both learner and engine" if placed.is_shared else where
        )
    tokens = least_pass
    if is_auto:
        few = _power_of_two(max(least_pass, batch_tokens / MIN_PASSES / placed.ranks))
        tokens = min(few, max(least_pass, memory.largest_pass(for_pass / 2 if placed.is_shared else for_pass)))
    passing = memory.pass_bytes(tokens)
    cache = for_cache - (passing - memory.pass_bytes(least_pass) if placed.is_shared else 0.0)
    both = engine + cache
    return MemoryFit(
        micro_batch_tokens=tokens if is_auto else config.learner.pass_tokens,
        cache_tokens=int(cache / memory.token_bytes),
        cache_gb=max(1, math.floor(cache / 1e7)) / 100,
        learner_gb=(learner + passing + (both if placed.is_shared else 0.0)) / 1e9,
        engine_gb=(both + (learner + passing if placed.is_shared else 0.0)) / 1e9,
    )


def _power_of_two(number: float) -> int:
    """The next one that is not below."""
    return int(2 ** math.ceil(math.log2(number)))


# ---- time --------------------------------------------------------------------------------------------------------------


def costs_on(sim: SimConfig, shape: ModelShape, gpus: Gpus, placed: Placed, fitted: MemoryFit) -> SimConfig:
    """The table with the costs of this shape on these GPUs. Lengths, prompts, environment and failures stay as they are."""
    gpu, share = gpus.kind, gpu_table().efficiency
    bandwidth, flops = gpu.bandwidth_gb_per_s * 1e9, gpu.bfloat16_tflops * 1e12
    weight_bytes, cache_bytes = 2 * shape.parameters, 4 * shape.keys * shape.layers
    forward = min(MAX_SECONDS, share.prefill_flops * flops / (2 * shape.parameters))
    return structs.replace(
        sim,
        floor_s=share.layer_s * shape.layers,
        weights_s=weight_bytes / (share.weights_read * bandwidth),
        request_s=2 * shape.parameters / (share.decode_flops * flops),
        context_token_s=cache_bytes / (share.cache_read * bandwidth),
        prefill_tokens_per_s=forward,
        score_tokens_per_s=forward,
        train_tokens_per_s=min(MAX_SECONDS, _train_tokens_per_s(shape, gpu, placed, fitted)),
        train_step_s=share.optimizer_s + 30 * shape.trained / placed.ranks / (share.weights_read * bandwidth),
        publish_s=weight_bytes / (share.publish_gb_per_s * 1e9),
        load_s=weight_bytes / (share.load_gb_per_s * 1e9),
    )


def _train_tokens_per_s(shape: ModelShape, gpu: GpuKind, placed: Placed, fitted: MemoryFit) -> float:
    """Of one rank. Several gather every layer twice a pass in bfloat16 and sum its gradients in float32, while they compute."""
    share = gpu_table().efficiency
    found = share.train_flops_compiled if fitted.is_compiled else share.train_flops
    reached = _between(share.train_parameters, found, shape.parameters) * (
        share.recompute if fitted.is_recomputed else 1.0
    )
    rate = reached * gpu.bfloat16_tflops * 1e12 / (6 * shape.parameters)
    if placed.ranks == 1:
        return rate
    link = gpu.link_gb_per_s if placed.ranks <= share.node_gpus else min(gpu.link_gb_per_s, share.network_gb_per_s)
    pass_s = 8 * shape.parameters * (1 - 1 / placed.ranks) / (share.link * link * 1e9)
    return min(rate, fitted.micro_batch_tokens / pass_s)


def _between(sizes: Sequence[float], values: Sequence[float], size: float) -> float:
    """On a line over the logarithm of the size; outside of the sizes, the value of the nearest."""
    part = math.log(size / sizes[0]) / math.log(sizes[1] / sizes[0])
    return values[0] + (values[1] - values[0]) * min(1.0, max(0.0, part))


def with_sharing(sim: SimConfig, placed: Placed) -> SimConfig:
    """Engines and learner slow each other down only on shared GPUs. Costs of a run that shared none say nothing about it: then
    by how much was measured on one H200."""
    if not placed.is_shared:
        return structs.replace(sim, decode_slowdown=1.0, learner_keep=1.0)
    if (sim.decode_slowdown, sim.learner_keep) != (1.0, 1.0):
        return sim
    share = gpu_table().efficiency
    return structs.replace(sim, decode_slowdown=share.decode_slowdown, learner_keep=share.learner_keep)
