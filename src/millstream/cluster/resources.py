"""The `[resources]` table: what a run gets of a Ray cluster. Light: imports neither Ray nor torch.

Every engine replica and every learner rank is a process with a share of CPUs and GPUs. Together they are one placement group: a
run gets all of it or waits, so that two runs never hold half of what each needs. Rollout workers, environments, rewards and
scorers take what is free outside of the group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Literal

from msgspec import Struct

from millstream.errors import ConfigError
from millstream.rpc.process import Kind, engine_names, rank_name
from millstream.weights import TransferWay

TRANSFER_WORDS: dict[TransferWay, str] = {
    "ipc": "on the GPU of rank 0",
    "shared": "on its node",
    "nccl": "from GPU to GPU",
    "broadcast": "to other nodes",
    "files": "through the run folder",
}


class ResourcesConfig(Struct, frozen=True, kw_only=True):
    address: str = "local"
    """local: Ray is started on this machine for this run, on loopback. auto: the cluster of this machine. Otherwise the
    address of a cluster, HOST:PORT."""
    gpus: int | None = None
    """GPUs of the run: each learner rank has one (learner.ranks), and engines have the others, as many as engine.replicas says
    or as there is room for. None: without Ray all that can be seen; with Ray what the keys below say."""
    engine_cpus: float = 1.0
    """CPUs of each engine replica."""
    engine_gpus: float = 0.0
    """GPUs of each engine replica: 0 is a CPU, 0.5 half of a GPU, above 1 what engine.vllm.tensor_parallel says. Ray counts
    shares and does not enforce them: engine.cache_gb or engine.vllm.memory limits the memory of an engine."""
    learner_cpus: float = 1.0
    """CPUs of each learner rank."""
    learner_gpus: float = 0.0
    """GPUs of each learner rank."""
    stage_cpus: float = 0.0
    """CPUs of each process of a scorer: a reference, a critic, a proximal policy."""
    stage_gpus: float = 0.0
    """GPUs of each of these processes."""
    rollout_cpus: float = 0.0
    """CPUs of each rollout worker."""
    environment_cpus: float = 0.0
    """CPUs of each process of an environment."""
    reward_cpus: float = 0.0
    """CPUs of each process that computes rewards."""
    reward_gpus: float = 0.0
    """GPUs of each process that computes rewards, for rewards that are models; 0: it sees none. Without Ray, above 0: it sees
    those of the run."""
    colocate: bool = False
    """Whether engine i and rank i share one GPU, on which both shares must fit. Otherwise no two of them share one."""
    spread: Literal["pack", "spread", "strict_pack", "strict_spread"] = "pack"
    """How engines and ranks are placed on nodes: on as few as possible, or on as many; strict: only so."""
    weights: tuple[TransferWay, ...] | None = None
    """How weights may reach engines that are processes, with Ray or without; each engine uses the first that works for it: ipc
    (in the memory of a GPU that both use), shared (in the memory of a node), nccl (from GPU to GPU, of one node or several),
    broadcast (to other nodes), files (in the run folder, which all nodes must then see). None: ipc where engines and ranks
    share GPUs, shared unless all are on one GPU, and where there are several nodes nccl, if both ends have GPUs, and broadcast,
    if nccl does not work."""
    patience_s: float = 300.0
    """How long a process waits for room on the cluster before that is an error."""

    def __post_init__(self) -> None:
        shares = (self.engine_cpus, self.engine_gpus, self.learner_cpus, self.learner_gpus, self.stage_cpus)
        more = (self.stage_gpus, self.rollout_cpus, self.environment_cpus, self.reward_cpus, self.reward_gpus)
        if min(*shares, *more) < 0 or self.patience_s <= 0:
            raise ValueError("CPUs and GPUs must be at least 0, patience_s above 0")
        if self.gpus is not None and self.gpus < 1:
            raise ValueError(f"gpus = {self.gpus}: expected at least 1, or leave it out")
        gpus = (self.engine_gpus, self.learner_gpus, self.stage_gpus, self.reward_gpus)
        if any(share > 1 and share != int(share) for share in gpus):
            raise ValueError(
                "engine_gpus, learner_gpus, stage_gpus and reward_gpus above 1 must be whole numbers: Ray shares a GPU, not "
                "several"
            )
        if self.learner_gpus > 1:
            raise ValueError("learner_gpus is at most 1: a rank has one GPU; learner.ranks says how many there are")
        if self.weights is not None and (not self.weights or len(set(self.weights)) < len(self.weights)):
            raise ValueError("weights must name at least one way, and each of them once")
        is_divided = self.gpus is not None and not self.engine_gpus + self.learner_gpus
        if self.colocate and not is_divided and not 0 < self.engine_gpus + self.learner_gpus <= 1:
            raise ValueError(
                "colocate puts an engine and a rank on one GPU: engine_gpus + learner_gpus must be above 0 and at most 1, 0.5 "
                "and 0.5, say"
            )

    def shares(self, kind: Kind) -> tuple[float, float]:
        """CPUs and GPUs of one process of this kind."""
        match kind:
            case "engine":
                return self.engine_cpus, self.engine_gpus
            case "learner":
                return self.learner_cpus, self.learner_gpus
            case "stage":
                return self.stage_cpus, self.stage_gpus
            case "rollout":
                return self.rollout_cpus, 0.0
            case "environment":
                return self.environment_cpus, 0.0
            case "reward":
                return self.reward_cpus, self.reward_gpus


Bundle = dict[str, float]


class Placement(Struct, frozen=True, kw_only=True):
    """The bundles of a placement group, and which engine or rank has which."""

    bundles: list[Bundle]
    engines: list[int]  # of engine i, its bundle
    ranks: list[int]  # of rank i, its bundle

    @property
    def total(self) -> Bundle:
        kinds = {kind for bundle in self.bundles for kind in bundle}
        return {kind: sum(bundle.get(kind, 0.0) for bundle in self.bundles) for kind in sorted(kinds)}

    def bundle_of(self, kind: Kind, name: str) -> int | None:
        """The bundle reserved for the process with this name. None: nothing is, as for engines that are added later."""
        match kind:
            case "engine":
                return dict(zip(engine_names(len(self.engines)), self.engines, strict=True)).get(name)
            case "learner":
                return {rank_name(number): bundle for number, bundle in enumerate(self.ranks)}.get(name)
            case _:
                return None


def placement_of(config: ResourcesConfig, *, replicas: int, ranks: int) -> Placement:
    """Raises `ConfigError` where engines and ranks share GPUs and their numbers differ."""
    engine, learner = _bundle(*config.shares("engine")), _bundle(*config.shares("learner"))
    if not config.colocate:
        bundles = [learner] * ranks + [engine] * replicas
        return Placement(bundles=bundles, ranks=list(range(ranks)), engines=[ranks + n for n in range(replicas)])
    if replicas != ranks:
        raise ConfigError(
            f"resources.colocate = true puts engine i and rank i together, and there are {replicas} engines and {ranks} ranks: "
            f"set engine.replicas = {ranks}, or colocate = false"
        )
    both = _bundle(config.engine_cpus + config.learner_cpus, _whole(config.engine_gpus + config.learner_gpus))
    return Placement(bundles=[both] * ranks, ranks=list(range(ranks)), engines=list(range(ranks)))


def ways_of(config: ResourcesConfig, *, ranks: int, has_proximal: bool, is_one_node: bool) -> tuple[TransferWay, ...]:
    """How rank 0 publishes weights. A copy in the memory of its GPU alone is enough only where every reader uses that GPU: one
    rank with its engine, and no proximal policy. Raises `ConfigError` where the config asks for that alone and it is not
    enough, and for ways that need a GPU where there is none."""
    is_on_gpu = bool(config.colocate and config.learner_gpus and config.engine_gpus)
    is_one_gpu = is_on_gpu and ranks == 1 and not has_proximal
    asked = config.weights or ()
    for way, instead in (("ipc", "shared"), ("nccl", "broadcast")):
        if way in asked and not config.learner_gpus:
            raise ConfigError(
                f'resources.weights has "{way}", which is for GPUs, and resources.learner_gpus = 0: use "{instead}"'
            )
    if asked and not {"shared", "broadcast", "files"} & set(asked) and not ("ipc" in asked and is_one_gpu):
        alone = 'resources.colocate = true, learner.ranks = 1 and no [proximal] table make "ipc" enough for one engine'
        raise ConfigError(
            f"resources.weights = {list(asked)} is in the memory of GPUs alone, and the driver, which saves the model, and "
            f'other processes read weights as well ({alone}): add "shared", or leave resources.weights out'
        )
    if asked:
        return asked
    ways: list[TransferWay] = ["ipc"] if is_on_gpu else []
    if not (is_one_gpu and is_one_node):
        ways.append("shared")
    if not is_one_node:
        ways += ["nccl", "broadcast"] if config.learner_gpus and config.engine_gpus else ["broadcast"]
    return tuple(ways)


def check_ray_installed() -> None:
    if find_spec("ray") is None:
        raise ConfigError(
            'runtime = "ray", and Ray is not installed here: pip install "millstream[ray]", on every node of the cluster'
        )


def placement_lines(config: ResourcesConfig, *, replicas: int, ranks: int, has_proximal: bool) -> list[str]:
    """In words: what is placed where, and how weights reach engines."""
    placement = placement_of(config, replicas=replicas, ranks=ranks)
    engines, learners = (f"{_shares(*config.shares(kind))} each" for kind in ("engine", "learner"))
    parts = f"{_count(ranks, 'learner rank')} ({learners}) and {_count(replicas, 'engine')} ({engines})"
    together = ", engine i and rank i on one GPU" if config.colocate else ""
    where = {
        "pack": "on as few nodes as they fit on",
        "spread": "on as many nodes as there are",
        "strict_pack": "on one node",
        "strict_spread": "each on a node of its own",
    }
    total = _shares(placement.total.get("CPU", 0.0), placement.total.get("GPU", 0.0))
    place = "Ray is started here, on loopback" if config.address == "local" else f"the Ray cluster at {config.address}"
    ways = ways_of(config, ranks=ranks, has_proximal=has_proximal, is_one_node=config.address == "local")
    return [
        f"{parts}{together}: {total} in all, {where[config.spread]}; {place}",
        ways_in_words(ways),
    ]


def stage_lines(config: ResourcesConfig, stages: Mapping[str, int]) -> list[str]:
    """In words: processes of scorers, by what they compute; nothing is reserved for them."""
    each = _shares(*config.shares("stage"))
    return [
        f"{num} process{'' if num == 1 else 'es'} of the {what} ({each} each), where there is room"
        for what, num in stages.items()
    ]


def ways_in_words(ways: Sequence[TransferWay]) -> str:
    words = ways[0] if len(ways) == 1 else ", ".join(f"{way} {TRANSFER_WORDS[way]}" for way in ways)
    return f"weights reach engines by {words}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _shares(cpus: float, gpus: float) -> str:
    return ", ".join(f"{share:g} {kind}" for kind, share in (("CPU", cpus), ("GPU", gpus)) if share) or "nothing"


def _bundle(cpus: float, gpus: float) -> Bundle:
    """A bundle for Ray, which refuses empty ones."""
    shares = {"CPU": cpus, "GPU": gpus}
    return {kind: share for kind, share in shares.items() if share} or {"CPU": 0.001}


def _whole(share: float) -> float:
    return round(share, 4)
