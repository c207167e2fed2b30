"""The modes of training that benchmarks compare, as changes of a config.

`barrier` is the papers' naive synchronous training: all rollouts of a batch are generated, then the batch is trained, then the
next one begins. It is `max_lag = 0` with an advantage that needs the whole batch, so that nothing is trained before the last
group is there; its numbers are GRPO's. A number is a value of `max_lag`; at 0 the learner trains groups while others are still
being generated. In all modes a rollout continues on its own (`lockstep = false`).
"""

from __future__ import annotations

from msgspec import structs

import run_parts
from millstream import RunConfig

BARRIER = "barrier"
MODES = (BARRIER, "0", "1", "2", "4")


def in_mode(config: RunConfig, mode: str) -> RunConfig:
    """The config of a run in this mode. Nothing else of it changes."""
    max_lag = 0.0 if mode == BARRIER else float(mode)
    changed = structs.replace(config, pipeline=structs.replace(config.pipeline, max_lag=max_lag, lockstep=False))
    if mode != BARRIER:
        return changed
    if config.algorithm.advantage != "grpo":
        raise SystemExit(f"a barrier with advantage = {config.algorithm.advantage!r} is not known here: expected grpo")
    advantage = f"{run_parts.HERE}:grpo_of_a_whole_batch"
    return structs.replace(changed, algorithm=structs.replace(config.algorithm, advantage=advantage))
