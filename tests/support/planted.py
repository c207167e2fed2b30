"""The small simulated run of `bench/advice.py`, in which nothing holds up anything for long, with changes that plant a
bottleneck."""

from __future__ import annotations

from advice import SIMULATED
from internals import recipe
from millstream.run.config import RunConfig


def planted_config(*changes: str) -> RunConfig:
    return recipe("sim/cluster", *SIMULATED, *changes)
