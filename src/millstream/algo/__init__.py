"""Algorithms: pure functions over rewards and log-probabilities, which know neither queues nor workers nor versions.

advantages.py  group of rewards -> advantages         credit.py       advantages per token, turn or part
losses.py      log-probabilities -> loss per token    corrections.py  weights prox/mu        kl.py  KL to the reference
aggregate.py   loss per token -> loss of the batch    presets.py      algorithms by name
config.py      the keys of [algorithm]                checks.py       the combinations that are refused
recipe.py      config -> `Objective` (torch)
"""

from millstream.algo.checks import check_algorithm
from millstream.algo.config import (
    KNOWN_ADVANTAGES,
    AlgorithmConfig,
    advantage_of,
    corrects,
    credit_for,
    needs_critic,
    needs_reference,
    reads_proximal,
    signal_for,
)

__all__ = [
    "KNOWN_ADVANTAGES",
    "AlgorithmConfig",
    "advantage_of",
    "check_algorithm",
    "corrects",
    "credit_for",
    "needs_critic",
    "needs_reference",
    "reads_proximal",
    "signal_for",
]
