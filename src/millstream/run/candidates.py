"""The changes of a run that `millstream advise` tries in simulation: keys that its config has, and what is no key (an
environment or a learner that is twice as fast), where the events show that it matters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from msgspec import Struct, structs

from millstream.events.bottleneck import Bottleneck
from millstream.pipeline.admission import full_budget
from millstream.run.config import RunConfig
from millstream.sim.config import DrawConfig, SimConfig, SimFailuresConfig

MATTERS = 0.1  # share of the time
BIASED = "biased against slow rollouts"
LATENCY = "environments and rewards that take half the time"


class TriedChange(Struct, frozen=True, kw_only=True):
    """`settings`: as `--set` takes them. Empty: there is no key; `costs` says what is different."""

    words: str
    settings: tuple[str, ...] = ()
    costs: Callable[[SimConfig], SimConfig] = lambda sim: sim
    note: str = ""


class Seen(Struct, frozen=True, kw_only=True):
    """What the run showed. `is_spread`: engines and ranks can have machines of their own. `cache_gb`: of an engine, where it
    is known."""

    bottleneck: Bottleneck
    step_tokens: float
    filtered: float  # share of the groups
    is_spread: bool
    cache_gb: float | None = None


def candidates(config: RunConfig, sim: SimConfig, seen: Seen) -> list[TriedChange]:
    return [
        *_lags(config, seen),
        *_engines(config, seen),
        *_learner(config, seen),
        *_surroundings(config, sim, seen),
    ]


def _lags(config: RunConfig, seen: Seen) -> Iterator[TriedChange]:
    pipeline = config.pipeline
    lag, batch = pipeline.max_lag, pipeline.groups_per_step
    is_fixed = pipeline.extra_groups is not None or pipeline.auto_lag
    for more in (1, 2):
        number = math.floor(lag) + more
        yield TriedChange(words=f"max_lag {number}", settings=(f"pipeline.max_lag={number}",))
    if pipeline.is_first_to_finish:
        return
    most = full_budget(batch, lag) - batch
    if pipeline.extra_groups is not None and pipeline.extra_groups < most:
        yield TriedChange(words=f"{most} groups in flight beyond a batch", settings=(f"pipeline.extra_groups={most}",))
    if seen.bottleneck.name not in ("stragglers", "environment"):
        return
    if not is_fixed and lag >= 1:
        words = f"max_lag {math.floor(lag) + 1} with as many groups in flight as now"
        settings = (f"pipeline.max_lag={math.floor(lag) + 1}", f"pipeline.extra_groups={most}")
        yield TriedChange(words=words, settings=settings)
    if not pipeline.auto_lag:
        more = (pipeline.most_groups - batch) + max(1, batch // 4)
        settings = ("pipeline.surplus=abort", f"pipeline.extra_groups={more}")
        yield TriedChange(words=f"first to finish, with {more} extra groups", settings=settings, note=BIASED)


def _engines(config: RunConfig, seen: Seen) -> Iterator[TriedChange]:
    engine, pipeline = config.engine, config.pipeline
    slots, num, name = engine.num_slots, engine.num_engines, seen.bottleneck.name
    if engine.kind != "http" and slots * num < pipeline.most_groups * config.rollout.num_members:
        yield TriedChange(words=f"{2 * slots} slots", settings=(f"engine.slots={2 * slots}",))
    if seen.is_spread and engine.kind != "http" and name not in ("learner", "sync"):
        more = max(1, num // 4) if num > 4 else num
        words = "one more engine" if more == 1 else f"{more} more engines"
        yield TriedChange(words=words, settings=(f"engine.replicas={num + more}",))
    if name == "cache":
        settings = () if seen.cache_gb is None else (f"engine.cache_gb={2 * seen.cache_gb:g}",)

        def twice(sim: SimConfig) -> SimConfig:
            return structs.replace(sim, cache_tokens=2 * (sim.cache_tokens or 0) or None)

        yield TriedChange(words="twice the cache", settings=settings, costs=twice, note="engine.cache_gb is its size")


def _learner(config: RunConfig, seen: Seen) -> Iterator[TriedChange]:
    shares, learner = seen.bottleneck.shares, config.learner
    if shares["training"] > 2 * MATTERS and seen.is_spread:
        yield TriedChange(words=f"{2 * learner.ranks} learner ranks", settings=(f"learner.ranks={2 * learner.ranks}",))
    elif shares["training"] > 2 * MATTERS:

        def faster(sim: SimConfig) -> SimConfig:
            rate, step_s = 2 * sim.train_tokens_per_s, sim.train_step_s / 2
            return structs.replace(sim, train_tokens_per_s=rate, train_step_s=step_s)

        note = 'learner.compile, learner.micro_batch_tokens, or runtime = "ray" with more learner.ranks'
        yield TriedChange(words="training that takes half the time", costs=faster, note=note)
    smaller = max(1, round(seen.step_tokens / 4 / learner.ranks))
    if learner.pass_tokens > 2 * smaller and shares["waiting for groups"] > MATTERS and shares["training"] > MATTERS:
        settings = (f"learner.micro_batch_tokens={smaller}",)
        yield TriedChange(words=f"micro-batches of {smaller:,} tokens", settings=settings)


def _surroundings(config: RunConfig, sim: SimConfig, seen: Seen) -> Iterator[TriedChange]:
    """Environments, weights, prompts, failures. Few of these have a key."""
    environment, name = sim.environment, seen.bottleneck.name
    for number, one in enumerate(config.environment):
        if one.max_concurrent is not None and name == "environment":
            more = 2 * one.max_concurrent
            words = f"{more} episodes of {one.shown} at once"
            yield TriedChange(words=words, settings=(f"environment.{number}.max_concurrent={more}",))
    latency_s = environment.latency_s.mean or 0.0
    if name == "environment" or latency_s > 2 * MATTERS * seen.bottleneck.step_s:
        sigma = environment.latency_s.sigma
        half = DrawConfig(
            kind=environment.latency_s.kind,
            mean=latency_s / 2,
            sigma=sigma if sigma is None or environment.latency_s.kind == "lognormal" else sigma / 2,
        )
        yield _with_environment(LATENCY, latency_s=half)
    if name == "sync" or seen.bottleneck.shares["publishing weights"] > MATTERS:

        def sooner(sim: SimConfig) -> SimConfig:
            return structs.replace(sim, publish_s=sim.publish_s / 2, load_s=sim.load_s / 2)

        note = "learner.lora sends adapters only; resources.weights says how weights are sent"
        yield TriedChange(words="weights that arrive in half the time", costs=sooner, note=note)
    if seen.filtered > MATTERS and environment.no_signal:
        yield _with_environment("no prompts that are always or never solved", no_signal=0.0)
    if environment.failure > MATTERS / 2 or sim.failures.is_on:

        def whole(sim: SimConfig) -> SimConfig:
            well = structs.replace(sim.environment, failure=0.0)
            return structs.replace(sim, environment=well, failures=SimFailuresConfig())

        yield TriedChange(words="no failures", costs=whole, note="the errors are in the log and in millstream report")


def _with_environment(words: str, **changes: object) -> TriedChange:
    def changed(sim: SimConfig) -> SimConfig:
        return structs.replace(sim, environment=structs.replace(sim.environment, **changes))

    return TriedChange(words=words, costs=changed)
