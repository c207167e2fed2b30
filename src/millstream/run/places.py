"""Places: which GPUs the learner's ranks, scorers and engines get. A pure function of the config and the GPUs that are visible
(`place`), so that any machine can be tried anywhere (`--dry-run --machine 4x8xH100`). Light: imports no torch.

On one machine (`runtime = "local"`), where there is more than one GPU:

1. rank i of the learner has GPU i;
2. a reference, a critic or a proximal policy of several processes (`ranks`, `replicas`) has the GPUs after those, one each;
3. the engines have the GPUs after those, `engine.vllm.tensor_parallel` each, in a process that sees no others;
4. `engine.replicas = "auto"`: as many engines as these GPUs are enough for;
5. engines share GPUs only if the config limits the memory of each (`engine.vllm.memory`, `engine.cache_gb`).

On a cluster Ray assigns the GPUs. `resources.gpus` says how many the run has, and they are divided in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, structs

from millstream.cluster.resources import Placement, ResourcesConfig, placement_of
from millstream.engine import EngineConfig
from millstream.engine.vllm.config import SHARED_MEMORY, VllmConfig
from millstream.errors import ConfigError, EngineError
from millstream.learner.config import StageConfig, num_processes, replicas_of
from millstream.rpc.process import engine_names, replica_names, shard_names
from millstream.run.config import RunConfig, critic_of, reference_of
from millstream.run.roofline import parse_gpus
from millstream.run.sizes import Memory, ModelDevice, ModelShape, choose_dtype

ALONE_MEMORY = 0.9  # of a GPU that one vLLM has to itself
VISIBLE = "CUDA_VISIBLE_DEVICES"
STAGES = {"reference": "reference", "critic": "critic", "proximal": "proximal policy"}  # by table, in words


class Gpu(Struct, frozen=True, kw_only=True):
    name: str
    """As CUDA_VISIBLE_DEVICES names it: its number, or its UUID."""
    free_bytes: float | None = None
    """None: not known."""
    is_exclusive: bool = False
    """Whether only one process at a time can use it (its compute mode)."""


class Machine(Struct, frozen=True, kw_only=True):
    """The GPUs of each node, as far as they are known. Without Ray there is one node."""

    nodes: tuple[tuple[Gpu, ...], ...] = ()
    is_described: bool = False
    """Typed (`--machine`), not found here."""

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return tuple(gpu for node in self.nodes for gpu in node)


class Places(Struct, frozen=True, kw_only=True):
    """The GPUs of the parts of a local run."""

    ranks: tuple[Gpu, ...] = ()
    """Of rank i; empty: it is on a CPU."""
    engines: tuple[tuple[Gpu, ...], ...] = ()
    """Of engine i, in a process of its own; empty: engines are where the model is."""
    spare: tuple[tuple[Gpu, ...], ...] = ()
    """For engines that are added later."""
    stages: tuple[tuple[str, Gpu], ...] = ()
    """Of each process of a reference, a critic or a proximal policy, by its name."""

    def stage_environment(self, name: str) -> dict[str, str]:
        """What this process of a scorer gets."""
        gpu = dict(self.stages).get(name)
        return {} if gpu is None else {VISIBLE: gpu.name}

    def device(self, of_model: str) -> str:
        """Of the learner and of engines, "cpu" or "cuda". `of_model`: the device of the driver's model, which says it where no
        place is known."""
        return "cuda" if self.ranks else of_model

    def environment(self, name: str, added: Sequence[str] = ()) -> dict[str, str]:
        """What the process of this engine gets. `added`: the names that have been added, in their order. Raises `EngineError`
        for one that there is no GPU for."""
        if not self.engines:
            return {}
        gpus = dict(zip(engine_names(len(self.engines)), self.engines, strict=True))
        gpus |= zip([one for one in added if one not in gpus], self.spare, strict=False)
        if name not in gpus:
            raise EngineError(
                f"there is no GPU for {name}: all of {_numbers(self.ranks)} and {_numbers(sum(self.engines, ()))} are in use. "
                "Ask for fewer engines"
            )
        return {VISIBLE: ",".join(gpu.name for gpu in gpus[name])}

    def words(self) -> str:
        """One line; empty where there is nothing to say."""
        if not self.engines and not self.stages and len(self.ranks) < 2:
            return ""
        several = f"{len(self.ranks)} learner ranks on GPUs"
        parts = [f"{'the learner on GPU' if len(self.ranks) == 1 else several} {_numbers(self.ranks)}"]
        for table in STAGES:
            gpus = [gpu for name, gpu in self.stages if name.startswith(table)]
            parts += [f"{len(gpus)} processes of the {STAGES[table]} on GPUs {_numbers(gpus)}"] if gpus else []
        if self.engines:
            num, used = len(self.engines), tuple(dict.fromkeys(sum(self.engines, ())))
            each = f", {len(self.engines[0])} each" if len(self.engines[0]) > 1 else ""
            parts.append(f"{num} engine{'s' * (num > 1)} on GPU{'s' * (len(used) > 1)} {_numbers(used)}{each}")
        return ", ".join(parts)


def parse_machine(text: str) -> Machine:
    """`8xH100`: a node with eight of them; `4x8xH100`: four such nodes; `cpu`: none. Raises `ConfigError`."""
    if text.strip() == "cpu":
        return Machine(is_described=True)
    nodes, _, rest = text.partition("x")
    several = nodes.isdigit() and rest.partition("x")[0].isdigit()
    found = parse_gpus(rest if several else text, "--machine")
    gpus = tuple(Gpu(name=str(n), free_bytes=found.kind.memory_gb * 1e9) for n in range(found.number))
    return Machine(nodes=(gpus,) * (int(nodes) if several else 1), is_described=True)


def place(config: RunConfig, machine: Machine | None) -> tuple[RunConfig, Places]:
    """The config with a number for every `auto` that depends on places, and the GPUs of each part of a local run. None: the
    machine is not known, and nothing is compared with it. Raises `ConfigError` for what the machine does not have."""
    if config.runtime == "ray":
        placed = _on_ray(config)
        if machine is not None:
            _check_room(placed, machine)
        return placed, Places()
    if machine is None or config.model.device == "cpu" or not machine.gpus:
        if config.resources.gpus and machine is not None:
            raise ConfigError(f"resources.gpus = {config.resources.gpus}, and the run has no GPU: leave it out")
        return structs.replace(config, engine=_with(config.engine, config.engine.num_replicas, SHARED_MEMORY)), Places()
    return _on_machine(config, _limited(config.resources, machine.gpus))


# ---- one machine -----------------------------------------------------------------------------------------------------


def _limited(resources: ResourcesConfig, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    asked = len(gpus) if resources.gpus is None else resources.gpus
    if asked > len(gpus):
        raise ConfigError(
            f"resources.gpus = {asked}, and {_count(len(gpus), 'GPU')} can be seen: set resources.gpus = {len(gpus)}, or "
            f"{VISIBLE} to more"
        )
    return tuple(gpus[:asked])


def _on_machine(config: RunConfig, gpus: tuple[Gpu, ...]) -> tuple[RunConfig, Places]:
    engine, ranks = config.engine, config.learner.ranks
    if ranks > len(gpus):
        raise ConfigError(
            f"learner.ranks = {ranks}, and {_count(len(gpus), 'GPU')} can be seen: set learner.ranks = {len(gpus)}"
        )
    stages, scored = stage_processes(config), _scorer_gpus(config)
    has_engine = engine.is_placed and engine.process is not False
    learner, rest = gpus[:ranks], tuple(gpu for at, gpu in enumerate(gpus) if at >= ranks and at not in scored)
    if stages:
        _check_stages(config, len(stages), len(gpus), len(rest), engine.gpus_each if has_engine else 0)
    places = Places(ranks=learner, stages=tuple(zip(stages, rest[: len(stages)], strict=True)))
    rest = rest[len(stages) :]
    if not engine.is_placed:
        placed = (
            config if engine.replicas != "auto" else structs.replace(config, engine=_with(engine, 1, SHARED_MEMORY))
        )
        return placed, places
    if len(gpus) == 1 or engine.process is False:
        if engine.gpus_each > len(gpus):
            raise ConfigError(
                f"engine.vllm.tensor_parallel = {engine.gpus_each}, and {_count(len(gpus), 'GPU')} can be seen: set it to 1"
            )
        _check_shared(engine, engine.num_replicas, learner)
        if learner[0].is_exclusive and (engine.process or engine.kind == "vllm"):
            raise ConfigError(
                f"GPU {learner[0].name} is for one process at a time (its compute mode), and the engine would be another: set "
                'engine.process = false with engine.kind = "torch", or type nvidia-smi -c DEFAULT'
            )
        return structs.replace(config, engine=_with(engine, engine.num_replicas, SHARED_MEMORY)), places
    each = engine.gpus_each
    if each > len(rest):
        parallel = 1 << (max(1, len(rest)).bit_length() - 1)  # heads are mostly divided by powers of two
        is_room = each < len(gpus)
        fewer = f"learner.ranks = {len(gpus) - each}" if is_room else f"engine.vllm.tensor_parallel = {parallel}"
        raise ConfigError(
            f"{_count(len(gpus), 'GPU')} can be seen, learner.ranks = {ranks} of them train, and an engine needs {each}: set "
            f"{fewer}, or use fewer GPUs of the machine for the learner and scorers"
        )
    groups = tuple(rest[at : at + each] for at in range(0, len(rest) - each + 1, each))
    num = len(groups) if engine.replicas == "auto" else engine.replicas
    _check_shared(engine, -(-num // len(groups)), groups[0], num=num, groups=len(groups))
    engines = tuple(groups[n % len(groups)] for n in range(num))
    share = ALONE_MEMORY / -(-num // len(groups))
    places = structs.replace(places, engines=engines, spare=groups[num:])
    return structs.replace(config, engine=_with(engine, num, share)), places


def _tables(config: RunConfig) -> dict[str, StageConfig]:
    """Of the reference, the critic and the proximal policy, those that the run has."""
    found = {"reference": reference_of(config), "critic": critic_of(config), "proximal": config.proximal}
    return {name: table for name, table in found.items() if table is not None}


def stage_numbers(config: RunConfig) -> dict[str, int]:
    """Of each scorer, in words, its processes with Ray."""
    return {STAGES[name]: num_processes(table) for name, table in _tables(config).items()}


def stage_processes(config: RunConfig) -> list[str]:
    """The names of the processes of scorers that are no threads of the driver without Ray."""
    return [
        process
        for name, table in _tables(config).items()
        if num_processes(table) > 1
        for replica in replica_names(name, replicas_of(table))
        for process in shard_names(replica, table.ranks)
    ]


def _check_stages(config: RunConfig, num: int, gpus: int, free: int, engine: int) -> None:
    """`num`: processes of scorers; `free`: GPUs that neither the learner nor a `device` has; `engine`: GPUs of one engine that
    must be left."""
    ranks = config.learner.ranks
    if num + engine <= free:
        return
    name, table = max(_tables(config).items(), key=lambda one: num_processes(one[1]))
    room, named = free - engine - (num - num_processes(table)), gpus - ranks - free
    asked = " and ".join(
        f"{name}.ranks = {table.ranks}" + (f" x replicas = {replicas_of(table)}" if replicas_of(table) > 1 else "")
        for name, table in _tables(config).items()
        if num_processes(table) > 1
    )
    if replicas_of(table) > 1 and room >= table.ranks:
        to_type = f"{name}.replicas = {room // table.ranks}"
    else:
        to_type = f"{name}.ranks = {max(1, room)}" + (f", {name}.replicas = 1" if replicas_of(table) > 1 else "")
    if engine and ranks + engine > gpus > engine:
        to_type += f", learner.ranks = {gpus - engine}"
    raise ConfigError(
        f"{_count(gpus, 'GPU')} can be seen; learner.ranks = {ranks} and {asked} need {ranks + num}"
        + (f", and an engine {engine}" if engine else "")
        + (f"; {named} more {'are' if named > 1 else 'is'} named by a device" if named else "")
        + f": set {to_type}"
    )


def _scorer_gpus(config: RunConfig) -> set[int]:
    """That a reference, a critic or a proximal policy names: cuda:1, say."""
    named = [table.device or "" for table in (config.reference, config.critic, config.proximal) if table is not None]
    return {int(one.removeprefix("cuda:")) for one in named if one.startswith("cuda:")}


def _check_shared(
    engine: EngineConfig, on_one: int, gpus: Sequence[Gpu], *, num: int | None = None, groups: int = 1
) -> None:
    """`on_one`: engines that a GPU would have."""
    memory = (engine.vllm or VllmConfig()).memory if engine.kind == "vllm" else None
    if memory is not None and on_one * memory > 1:
        raise ConfigError(
            f"engine.vllm.memory = {memory:g} of each of {on_one} engines on one GPU is more than the GPU: set it to "
            f"{_floored(ALONE_MEMORY / on_one):g}, or engine.replicas = {groups * int(1 / memory)}"
        )
    if num is not None and on_one > 1 and memory is None and engine.pool_gb is None:
        limit = (
            f"engine.vllm.memory = {_floored(ALONE_MEMORY / on_one):g}" if engine.kind == "vllm" else "engine.cache_gb"
        )
        raise ConfigError(
            f"engine.replicas = {num}, and there are GPUs for {groups} ({engine.gpus_each} each, after the learner's "
            f"and those of scorers): set engine.replicas = {groups}, or let {on_one} share a GPU by limiting the memory of "
            f"each: {limit}"
        )


def _with(engine: EngineConfig, num: int, memory: float) -> EngineConfig:
    """`memory`: the share of a GPU that vLLM takes, unless the config says it."""
    if engine.kind in ("http", "outside"):
        return engine
    if engine.kind == "vllm":
        vllm = engine.vllm or VllmConfig()
        share = _floored(memory) if vllm.memory is None else vllm.memory
        engine = structs.replace(engine, vllm=structs.replace(vllm, memory=share))
    return structs.replace(engine, replicas=num)


# ---- a cluster -------------------------------------------------------------------------------------------------------


def _on_ray(config: RunConfig) -> RunConfig:
    resources, engine, ranks = config.resources, config.engine, config.learner.ranks
    if resources.gpus is not None:
        default = (0.5, 0.5) if resources.colocate else (float(engine.gpus_each), 1.0)
        resources = structs.replace(
            resources,
            engine_gpus=resources.engine_gpus or default[0],
            learner_gpus=resources.learner_gpus or default[1],
        )
    _check_engine_gpus(engine, resources)
    _check_stage_gpus(config, resources)
    num = engine.num_replicas
    if engine.is_placed and engine.replicas == "auto":
        num = _num_engines(resources, ranks)
    if resources.gpus is not None and engine.is_placed:
        _check_divided(resources, num, ranks)
    share = ALONE_MEMORY * min(1.0, resources.engine_gpus) if resources.engine_gpus else ALONE_MEMORY
    return structs.replace(config, resources=resources, engine=_with(engine, num, share))


def _num_engines(resources: ResourcesConfig, ranks: int) -> int:
    if resources.colocate:
        return ranks
    if resources.gpus is None or not resources.engine_gpus:
        return 1
    return max(1, math.floor((resources.gpus - ranks * resources.learner_gpus) / resources.engine_gpus))


def _check_engine_gpus(engine: EngineConfig, resources: ResourcesConfig) -> None:
    each, asked = engine.gpus_each, resources.engine_gpus
    if engine.kind == "torch" and asked > 1:
        raise ConfigError(
            f"resources.engine_gpus = {asked:g}, and our own engine computes on one GPU: set resources.engine_gpus = 1 and "
            f'engine.replicas = {int(asked)}, or engine.kind = "vllm" with engine.vllm.tensor_parallel = {int(asked)}'
        )
    if engine.kind == "vllm" and asked and asked != each and not (each == 1 and asked < 1):
        raise ConfigError(
            f"engine.vllm.tensor_parallel = {each}, and resources.engine_gpus = {asked:g}: an engine has as many GPUs as its "
            f"model is split over. Set resources.engine_gpus = {each}"
        )


def _check_stage_gpus(config: RunConfig, resources: ResourcesConfig) -> None:
    asked = resources.stage_gpus
    if asked > 1:
        raise ConfigError(
            f"resources.stage_gpus = {asked:g}: a reference, a critic or a proximal policy computes on one GPU. "
            "Set resources.stage_gpus = 1, and ranks in its table to shard it over several"
        )
    sharded = [f"{name}.ranks = {table.ranks}" for name, table in _tables(config).items() if table.ranks > 1]
    if sharded and (0 < asked < 1 or (not asked and resources.learner_gpus)):
        raise ConfigError(
            f"{' and '.join(sharded)} with resources.stage_gpus = {asked:g}: each of several ranks needs a GPU of its own. Set "
            "resources.stage_gpus = 1"
        )


def _check_divided(resources: ResourcesConfig, num: int, ranks: int) -> None:
    gpus, each = resources.gpus or 0, resources.engine_gpus
    placement = placement_of(resources, replicas=num, ranks=ranks)
    needed = math.ceil(placement.total.get("GPU", 0.0) - 1e-6)
    if needed <= gpus:
        return
    left = gpus - ranks * resources.learner_gpus
    if resources.colocate or left < each:
        most = gpus if resources.colocate else int(gpus - each)
        to_type = f"learner.ranks = {most}" if most >= 1 else f"resources.gpus = {needed}"
    else:
        to_type = f"engine.replicas = {math.floor(left / each)}"
    raise ConfigError(
        f"resources.gpus = {gpus}, and {_count(ranks, 'learner rank')} of {resources.learner_gpus:g} and "
        f"{_count(num, 'engine')} of {each:g} need {needed}: set {to_type}"
    )


def _check_room(config: RunConfig, machine: Machine) -> None:
    """Bundles are on one node each: the largest first, each on the first node with room."""
    shares = [bundle["GPU"] for bundle in placed_bundles(config).bundles if "GPU" in bundle]
    scorers = [config.resources.stage_gpus] * sum(stage_numbers(config).values())
    shares += scorers
    asked, nodes = sum(shares), [float(len(node)) for node in machine.nodes]
    there = f"{_count(len(machine.gpus), 'GPU')} on {_count(len(nodes), 'node')}"
    other = "" if machine.is_described else ". To check a config for another machine: --dry-run --machine 8xH100"
    if asked > sum(nodes):
        left = math.floor(len(machine.gpus) - sum(scorers))
        to_type = f"engine.replicas or learner.ranks lower, or resources.gpus = {left}"
        if left < 1 and any(scorers):
            to_type = " or ".join(f"{name}.ranks" for name in _tables(config)) + " lower"
        need = f"engines, ranks and scorers need {asked:g} GPUs, scorers {sum(scorers):g} of them"
        if not any(scorers):
            need = f"engines and ranks need {asked:g} GPUs"
        raise ConfigError(f"{need}, and there are {there}: set {to_type}{other}")
    for share in sorted(filter(None, shares), reverse=True):
        found = next((at for at, free in enumerate(nodes) if free >= share - 1e-6), None)
        if found is None:
            raise ConfigError(
                f"{there} have no room for an engine, a rank or a scorer with {share:g} GPUs on one node: set "
                f"engine.vllm.tensor_parallel to a number that divides the GPUs of a node, or engine.replicas lower{other}"
            )
        nodes[found] -= share


def placed_bundles(config: RunConfig) -> Placement:
    """Of a config with numbers in the place of every `auto`."""
    return placement_of(config.resources, replicas=config.engine.num_replicas, ranks=config.learner.ranks)


# ---- the model -------------------------------------------------------------------------------------------------------


def check_heads(engine: EngineConfig, described: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a tensor-parallel size that does not divide the heads of a model's `config.json`."""
    parallel, text = engine.gpus_each, described.get("text_config") or described
    heads = next((text[key] for key in ("num_attention_heads", "n_head") if text.get(key)), None)
    if not isinstance(heads, int) or heads % parallel == 0:
        return
    fitting = ", ".join(str(number) for number in (1, 2, 4, 8, 16, 32) if heads % number == 0)
    raise ConfigError(
        f"engine.vllm.tensor_parallel = {parallel} does not divide the model's {heads} attention heads: set it to one of "
        f"{fitting}"
    )


def check_model_fits(config: RunConfig, machine: Machine, shape: ModelShape | None) -> None:
    """Raises `ConfigError` for a model whose weights alone, or with what training them needs, are larger than a GPU. `config`:
    as `place` returns it."""
    known = [gpu.free_bytes for gpu in machine.gpus if gpu.free_bytes is not None]
    is_on_gpu = config.runtime == "local" or config.resources.learner_gpus > 0
    if not known or shape is None or not is_on_gpu or config.model.device == "cpu":
        return
    largest, dtype = max(known), choose_dtype(config, ModelDevice(is_gpu=True))
    memory = Memory(config, shape, dtype=dtype, is_compiled=False)
    if config.learner.kind == "torch" and not config.pipeline.rollouts_only:
        _check_learner(config, memory, largest, len(machine.gpus))
    each, weights = config.engine.gpus_each, memory.whole
    if config.engine.is_placed and weights / each > largest:
        parallel = next(n for n in (1, 2, 4, 8, 16, 32, 64, 1 << 30) if weights / n < 0.7 * largest)
        to_type = f'engine.kind = "vllm" with engine.vllm.tensor_parallel = {parallel}'
        raise ConfigError(
            f"the model's weights are {weights / 1e9:.1f} GB, an engine has {_count(each, 'GPU')}, and the largest GPU has "
            f"{largest / 1e9:.1f} GB free: set {to_type}, or train a smaller model"
        )


def _check_learner(config: RunConfig, memory: Memory, largest: float, num_gpus: int) -> None:
    ranks = config.learner.ranks
    needed = memory.least(ranks)
    if needed <= largest:
        return
    more = next((n for n in range(ranks + 1, num_gpus + 1) if memory.least(n) < 0.8 * largest), None)
    has_lora = config.learner.lora is not None
    if more is None:
        to_type = f"{'' if has_lora else '[learner.lora], '}more GPUs, or a smaller model"
    else:
        to_type = f"learner.ranks = {more}{'' if has_lora else ', or [learner.lora]'}"
    raise ConfigError(
        f"training needs at least {needed / 1e9:.1f} GB on each GPU of learner.ranks = {ranks} (weights, gradients and the "
        f"optimizer's state), and the largest GPU has {largest / 1e9:.1f} GB free: set {to_type}"
    )


# ---- in words --------------------------------------------------------------------------------------------------------


def _numbers(gpus: Sequence[Gpu]) -> str:
    names = [gpu.name for gpu in gpus]
    if (
        len(names) > 2
        and names[0].isdigit()
        and names == [str(number) for number in range(int(names[0]), int(names[0]) + len(names))]
    ):
        return f"{names[0]} to {names[-1]}"
    return ", ".join(names)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _floored(share: float) -> float:
    return math.floor(100 * share + 1e-9) / 100
