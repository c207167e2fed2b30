"""Parts of the user's own in a run: the keys that name them, objects that are passed from Python instead, and what a part
cannot be combined with. They are made where built-in ones are (`run.build`, `run.backend`). Light: imports no torch.

A part runs in the driver's process, but for a loss and a schedule, which run where the learner does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypedDict

from msgspec import structs

from millstream import imports
from millstream.algo import KNOWN_ADVANTAGES
from millstream.algo.presets import LOSSES
from millstream.engine.config import ENGINE_KINDS
from millstream.env.config import BUILT_BY_RUN
from millstream.env.data import own_sampler
from millstream.env.resolve import BUILT_IN_ENVIRONMENTS
from millstream.env.rewards.find import BUILT_IN_REWARDS
from millstream.env.sandbox.config import DRIVERS
from millstream.env.tools.config import AUTO
from millstream.env.tools.parse import PARSERS
from millstream.errors import ConfigError
from millstream.learner.config import LEARNER_KINDS, SCHEDULES, own_schedule
from millstream.pipeline.parts import group_filter
from millstream.run.config import RunConfig
from millstream.run.tracking.config import TRACKERS
from millstream.store.config import AUTO_STORE
from millstream.weights.config import AUTO_CHANNEL

KEYS = {
    "engine": ("engine", "kind"),
    "learner": ("learner", "kind"),
    "store": ("store", "kind"),
    "weights": ("weights", "kind"),
    "loss": ("algorithm", "loss"),
    "advantage": ("algorithm", "advantage"),
    "filter": ("pipeline", "filter"),
    "sampler": ("data", "sampler"),
    "schedule": ("learner", "schedule"),
}
"""The table and the key of each part that may be passed to `train` as an object."""
BUILT_IN: dict[str, tuple[str, ...]] = {
    "environment": (*BUILT_BY_RUN, *BUILT_IN_ENVIRONMENTS),
    "reward": tuple(BUILT_IN_REWARDS),
    "engine": ENGINE_KINDS,
    "learner": LEARNER_KINDS,
    "store": (AUTO_STORE,),
    "weights": (AUTO_CHANNEL,),
    "loss": tuple(LOSSES),
    "advantage": KNOWN_ADVANTAGES,
    "filter": (),
    "sampler": (),
    "schedule": SCHEDULES,
    "tool_format": (AUTO, *PARSERS),
    "sandbox": DRIVERS,
    "tracker": TRACKERS,
}
"""The names of each kind that Millstream has itself."""
ENGINE_METHODS = ("generate", "abort", "pause", "resume", "load", "stats", "close")
LEARNER_METHODS = (
    *("begin_batch", "accumulate", "logprobs", "step", "log_ratios", "rank_seconds", "weights", "snapshot", "restore"),
    *("save", "ready", "close"),
)
STORE_METHODS = (
    *("put", "write", "close_groups", "claim", "renew", "acknowledge", "drop", "give_back", "cover", "rewind", "wake"),
    *("finish", "drop_partition", "snapshot", "restore", "stats"),
)
CHANNEL_METHODS = ("publish", "fetch", "restage")
TRACKER_METHODS = ("log", "text", "finish")


class OwnParts(TypedDict, total=False):
    """Parts that are passed to `train` and `resume` as objects: classes or functions, as docs/parts.md has them."""

    engine: Callable[..., Any]
    learner: Callable[..., Any]
    store: Callable[..., Any]
    weights: Callable[..., Any]
    loss: Callable[..., Any]
    advantage: Callable[..., Any]
    filter: Callable[..., Any]
    sampler: Callable[..., Any]
    schedule: Callable[..., Any]


def with_passed(config: RunConfig, parts: Mapping[str, Any]) -> RunConfig:
    """The config with names for these objects."""
    for kind, part in parts.items():
        if kind not in KEYS:
            raise TypeError(f"train and resume take no argument {kind!r}: parts are {', '.join(KEYS)}")
        if part is None:
            continue
        if not callable(part):
            raise ConfigError(f"{kind}= is a {type(part).__name__}: expected a class or a function (docs/parts.md)")
        table, key = KEYS[kind]
        named = structs.replace(getattr(config, table), **{key: imports.pass_object(kind, part)})
        config = structs.replace(config, **{table: named})
    return config


def check_passed_again(config: RunConfig, parts: Mapping[str, Any]) -> None:
    """At a resume: an object takes the place of one that was passed before, never of a part that the config names."""
    for kind in parts.keys() & KEYS.keys():
        table, key = KEYS[kind]
        if not (name := getattr(getattr(config, table), key)).startswith(imports.PASSED):
            raise ConfigError(f"the run has its {kind} from its config.toml, {name!r}: leave {kind}= out")


def passed_kinds(tables: Mapping[str, Any]) -> list[str]:
    """The parts of a config, as TOML has it, that were passed from Python."""
    return [
        kind
        for kind, (table, key) in KEYS.items()
        if str(tables.get(table, {}).get(key, "")).startswith(imports.PASSED)
    ]


# ---- checks ----------------------------------------------------------------------------------------------------------


class NamedPart(NamedTuple):
    kind: str
    key: str
    name: str

    @property
    def is_own(self) -> bool:
        return bool(self.name) and self.name not in BUILT_IN[self.kind]


def named_parts(config: RunConfig) -> Iterator[NamedPart]:
    """Every part that a config names."""
    for kind, (table, key) in KEYS.items():
        yield NamedPart(kind, f"{table}.{key}", getattr(getattr(config, table), key))
    for reward in config.reward:
        yield NamedPart("reward", "reward.function", reward.function)
    for one in config.environment:
        yield NamedPart("environment", "environment.use", one.use)
        yield NamedPart("tool_format", "environment.tool_format", one.tool_format)
        if one.sandbox is not None:
            yield NamedPart("sandbox", "environment.sandbox.use", one.sandbox.use)
    for name in config.trackers.use:
        yield NamedPart("tracker", "trackers.use", name)


def check_own_parts(config: RunConfig) -> None:
    """What a part of the user's own cannot be combined with. Opens no file."""
    for part in named_parts(config):
        if not part.is_own:
            continue
        if config.runtime == "ray" and part.kind in ("engine", "learner", "store", "weights"):
            raise ConfigError(f"{part.key} = {part.name!r} with {WITHOUT_RAY[part.kind]}")
        is_in_worker = part.kind in ("loss", "schedule") and (config.runtime == "ray" or config.learner.ranks > 1)
        if is_in_worker and imports.is_only_here(part.name):
            raise ConfigError(
                f"{part.key} = {part.name!r}: the learner's processes cannot import it from this one. Put it into a file, and "
                f'name it: {part.key} = "file.py:name"; or set learner.ranks = 1 and runtime = "local"'
            )
        if part.kind in ("filter", "sampler") and config.data.sessions:
            raise ConfigError(f"{part.key} with a run that learns from sessions, which are all trained: leave it out")
        if part.kind in ("sampler", "store") and config.data.rollouts is not None:
            raise ConfigError(f"{part.key} with data.rollouts, whose batches are what they are: leave it out")
    if config.learner.lora is not None and (config.engine.is_own or config.learner.is_own):
        part_of = "engine" if config.engine.is_own else "learner"
        raise ConfigError(
            f'[learner.lora] with an {part_of} of your own: adapters are of kind = "torch". Leave [learner.lora] out'
            if part_of == "engine"
            else '[learner.lora] with a learner of your own: adapters are of kind = "torch". Leave [learner.lora] out'
        )
    if config.learner.is_own and config.learner.ranks > 1:
        raise ConfigError(
            f"learner.ranks = {config.learner.ranks} with learner.kind = {config.learner.kind!r}, which starts its own "
            "processes, if it has any: set learner.ranks = 1"
        )


_DRIVER = 'runtime = "ray", and a part of your own runs in the driver\'s process'
WITHOUT_RAY = {
    "engine": f'{_DRIVER}: set runtime = "local"; or serve your engine over HTTP, and set engine.kind = "http"',
    "learner": f'{_DRIVER}: set runtime = "local", or learner.kind = "torch"',
    "store": f'{_DRIVER}, where the others could not reach it: set runtime = "local", or leave [store] out',
    "weights": f'{_DRIVER}, where weights would have to pass through it: set runtime = "local", or leave [weights] out',
}


def checked_own_parts(config: RunConfig) -> Iterator[str]:
    """That all of them are there, take their arguments and have their methods; and that no two packages bring a part of the
    same name."""
    for part in named_parts(config):
        imports.check_clash(part.kind, part.name, BUILT_IN[part.kind])
        if part.is_own and part.kind in KEYS:
            _check_made(part, config)
            yield f"checked: the {part.kind} {part.name} is there"
        elif part.is_own and part.kind == "tracker":
            target = imports.load_part("tracker", part.name, TRACKERS)
            if inspect.isclass(target):
                imports.check_methods(target, TRACKER_METHODS, f"{part.key}: {part.name}", "run/tracking/sink.py")
            yield f"checked: the tracker {part.name} is there"


def _check_made(part: NamedPart, config: RunConfig) -> None:
    match part.kind:
        case "filter":
            group_filter(config.pipeline)
        case "sampler":
            own_sampler(config.data)
        case "schedule":
            own_schedule(config.learner)
        case "engine":
            _check_class(part, config.engine.args, ("context",), ENGINE_METHODS, "millstream.engine.Engine")
        case "learner":
            _check_class(part, config.learner.args, ("context",), LEARNER_METHODS, "millstream.learner.RunLearner")
        case "store":
            _check_class(part, config.store.args, ("tasks",), STORE_METHODS, "millstream.store.Store")
        case "weights":
            _check_class(part, config.weights.args, (), CHANNEL_METHODS, "millstream.weights.WeightChannel")
        case _:
            imports.load_part(part.kind, part.name, BUILT_IN[part.kind])


def _check_class(
    part: NamedPart, args: Mapping[str, Any], positional: tuple[str, ...], methods: tuple[str, ...], protocol: str
) -> None:
    """Before it is made: it may be expensive."""
    target = imports.load_part(part.kind, part.name, BUILT_IN[part.kind])
    signature = inspect.signature(target)
    try:
        signature.bind(*positional, **args)
    except TypeError as error:
        taken = f" (it is called with {', '.join(positional)})" if positional else ""
        raise ConfigError(
            f"{part.key} = {part.name!r}: {part.kind}.args = {dict(args)} does not fit {signature}: {error}{taken}"
        ) from error
    if inspect.isclass(target):
        imports.check_methods(target, methods, f"{part.key} = {part.name!r}", protocol)
