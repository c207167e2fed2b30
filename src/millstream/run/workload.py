"""The first guess of a plan: what a step takes by closed forms, from the costs of `[sim]` and a sample of its rollouts.

The forms (ROLL Flash, arXiv 2510.11345; `max_lag` is its asynchronous ratio), for N rollouts a step in K places that decode at
the same time:

    synchronous    generation N mu_gen / K, plus the longest rollout, plus training
    asynchronous   the longer of generation N mu_gen / K + longest / (max_lag + 1), and training

mu_gen depends on K, because a decode step takes longer the more requests it has. On GPUs that engines and learner share, each
is slower while the other works. A guess orders settings; `run.plan` lets the simulator judge.
"""

from __future__ import annotations

import random

from msgspec import Struct

from millstream.run.config import RunConfig
from millstream.sim.config import SimConfig, SimDraws

NUM_SAMPLES = 2000


class Workload(Struct, frozen=True, kw_only=True):
    """One step, and rollouts like its own. Means are of one rollout."""

    num_rollouts: int
    """Trained in a step."""
    num_generated: float
    """With those of groups that are replaced because they have no signal."""
    tokens: float
    """Sampled."""
    context: float
    """In the cache while one token is sampled."""
    trained: float
    """Tokens of all turns and prompts."""
    samples: list[tuple[float, float]]
    """Sampled tokens, and seconds in the environment."""

    @property
    def latency_s(self) -> float:
        return sum(seconds for _, seconds in self.samples) / len(self.samples)


def workload_of(config: RunConfig, sim: SimConfig, draws: SimDraws) -> Workload:
    rng, limit = random.Random(0), config.rollout.max_tokens
    samples, sampled, trained, cached = list[tuple[float, float]](), 0.0, 0.0, 0.0
    for _ in range(NUM_SAMPLES):
        tokens, seconds, before = 0.0, 0.0, 0.0
        for _ in range(max(1, round(draws.turns.draw(rng)))):
            length = min(limit, max(1, round(draws.lengths.draw(rng))))
            before += sim.prompt_tokens
            cached += length * (before + length / 2)
            before += length
            tokens += length
            seconds += draws.latency_s.draw(rng)
        samples.append((tokens, seconds))
        sampled += tokens
        trained += before
    rollouts = config.pipeline.groups_per_step * config.rollout.group_size
    return Workload(
        num_rollouts=rollouts,
        num_generated=rollouts / (1 - min(0.9, _filtered(config, sim))),
        tokens=sampled / NUM_SAMPLES,
        context=cached / sampled,
        trained=trained / NUM_SAMPLES,
        samples=samples,
    )


def _filtered(config: RunConfig, sim: SimConfig) -> float:
    """The share of groups without signal, where these are replaced."""
    if not config.pipeline.filter_zero_signal:
        return 0.0
    environment, size = sim.environment, config.rollout.group_size
    by_chance = environment.success**size + (1 - environment.success) ** size
    return environment.no_signal + (1 - environment.no_signal) * by_chance


def decoding(load: Workload, sim: SimConfig, *, engines: int, slots: int, in_flight: float) -> tuple[float, float]:
    """Requests that an engine has at the same time, and what a step of it takes. Rollouts that are in their environment take no
    slot. Prompts are computed between steps."""
    costs, prompt = sim.costs, (load.trained - load.tokens) / load.tokens * sim.costs.prefill_token_s
    of_request = costs.request_s + costs.context_token_s * load.context + prompt
    requests, step_s = min(float(slots), in_flight / engines), costs.step_s
    for _ in range(4):
        step_s = costs.step_s + of_request * requests
        busy = load.tokens * step_s / (load.tokens * step_s + load.latency_s)
        requests = max(1.0, min(float(slots), busy * in_flight / engines))
    return requests, step_s


def guess_step_s(load: Workload, sim: SimConfig, config: RunConfig, *, is_shared: bool) -> float:
    """By the closed forms. The costs are those of the placement."""
    pipeline, engines, ranks = config.pipeline, config.engine.num_engines, config.learner.ranks
    in_flight = pipeline.most_groups * config.rollout.num_members
    requests, step_s = decoding(load, sim, engines=engines, slots=config.engine.num_slots, in_flight=in_flight)
    generation = load.num_generated * load.tokens * step_s / (requests * engines)
    ordered = sorted(tokens * step_s + seconds for tokens, seconds in load.samples)
    longest = ordered[min(NUM_SAMPLES - 1, int(NUM_SAMPLES * (1 - 1 / (load.num_generated + 1))))]
    if pipeline.is_first_to_finish:  # what is longest is aborted
        longest *= pipeline.groups_per_step / pipeline.most_groups
    training = load.num_rollouts * load.trained / (sim.train_tokens_per_s * ranks) + sim.train_step_s + sim.publish_s
    engine_s = generation + longest / (pipeline.max_lag + 1)
    if pipeline.max_lag == 0:
        return engine_s + training if is_shared else max(engine_s + sim.train_step_s + sim.publish_s, training)
    if not is_shared:
        return max(engine_s, training)
    slowdown, keep = sim.decode_slowdown, sim.learner_keep
    if engine_s * slowdown < training / keep:  # engines are done first
        return engine_s * slowdown + training - keep * engine_s * slowdown
    return training / keep + engine_s - training / (keep * slowdown)
