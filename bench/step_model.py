"""How long a step takes on one GPU, by a model with five numbers: what `bench/end_to_end.py` holds its measurements against.

The engine decodes all running requests, a token each a decode step. A decode step takes `floor_s` and `slope_s` for each token
of context in the batch, `slow` times as long while the learner works. The learner trains `rate` tokens/s alone, and `keep`
times as many beside decoding. Groups are admitted by the full budget and trained batch by batch: the admission rule without
slack. With `is_barrier`, training begins when the batch is complete.

Shapes: G groups, M members.
"""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Lengths = NDArray[np.int64]
EPSILON_TOKENS = 1e-6
MIN_WAIT_S = 1e-4


class Costs(Struct, frozen=True, kw_only=True):
    """The numbers of the model. The defaults are those of the 474M shape on an H200 before engine and learner were tuned to
    share it."""

    floor_s: float = 1.3e-3
    slope_s: float = 29e-9
    slow: float = 2.0
    rate: float = 1.04e5
    keep: float = 0.6
    publish_s: float = 0.05


class Load(Struct, frozen=True, kw_only=True):
    """What is generated, group by group in the order of admission."""

    lengths_GM: Lengths
    prompts_G: Lengths
    groups_per_step: int


class StepEnd(Struct, frozen=True, kw_only=True):
    """The end of a step, in seconds since the start of the run."""

    at: float
    engine_s: float
    """That decoding alone would have taken for all decode steps until then."""
    learner_s: float
    """That training alone would have taken for all tokens until then."""


def simulate(
    load: Load, costs: Costs, *, max_lag: float = 0.0, is_barrier: bool = False, slots: int = 512, steps: int
) -> list[StepEnd]:
    """The first steps of a run. The load must have `(steps + max_lag) * groups_per_step` groups or more."""
    groups = load.groups_per_step
    total, members = load.lengths_GM.shape
    length_R = load.lengths_GM.reshape(-1)
    prompt_R = np.repeat(load.prompts_G, members)
    group_R = np.repeat(np.arange(total), members)
    tokens_G = load.lengths_GM.sum(1)
    missing_G = np.full(total, members)
    position_R = np.zeros(total * members, np.int64)
    running = np.zeros(0, np.int64)
    now = trained = engine_s = learner_s = 0.0
    num_started = version = 0
    ends: list[StepEnd] = []
    while version < steps:
        num_admitted = min(total, math.floor((version + max_lag + 1) * groups)) * members
        if (room := min(slots - len(running), num_admitted - num_started)) > 0:
            running = np.concatenate([running, np.arange(num_started, num_started + room)])
            num_started += room
        batch = slice(version * groups, (version + 1) * groups)
        complete_G = missing_G[batch] == 0
        needed, is_complete = float(tokens_G[batch].sum()), bool(complete_G.all())
        ready = (needed if is_complete else 0.0) if is_barrier else float(tokens_G[batch][complete_G].sum())
        is_training = ready - trained > EPSILON_TOKENS
        slow, rate = 1.0, costs.rate
        if len(running):
            alone_s = costs.floor_s + costs.slope_s * float((prompt_R[running] + position_R[running]).sum())
            if is_training:
                slow, rate = costs.slow, costs.rate * costs.keep
            engine_s += alone_s
            took = alone_s * slow
        else:
            took = max((ready - trained) / rate, MIN_WAIT_S)
        now += took
        if is_training:
            trained = min(ready, trained + took * rate)
        if len(running):
            position_R[running] += 1
            ended = position_R[running] >= length_R[running]
            np.subtract.at(missing_G, group_R[running[ended]], 1)
            running = running[~ended]
        if is_complete and trained >= needed - EPSILON_TOKENS:
            now += costs.publish_s
            learner_s += needed / costs.rate
            ends.append(StepEnd(at=now, engine_s=engine_s, learner_s=learner_s))
            version += 1
            trained = 0.0
    return ends
