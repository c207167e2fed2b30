"""A small simulated run in which nothing holds up anything for long, and changes that plant a bottleneck."""

from __future__ import annotations

from pathlib import Path

from millstream.config import load
from millstream.run.config import RunConfig

PATH = Path(__file__).parents[2] / "recipes/sim/cluster.toml"
SMALL = (
    "engine.replicas=2",
    "engine.slots=64",
    "learner.ranks=1",
    "rollout.group_size=4",
    "rollout.max_tokens=4096",
    "pipeline.groups_per_step=8",
    "pipeline.filter_zero_signal=false",
    "sim.floor_s=0.01",
    "sim.weights_s=0",
    "sim.context_token_s=0",
    "sim.cache_tokens=",
    "sim.train_tokens_per_s=40000",
    "sim.train_step_s=0.1",
    "sim.publish_s=0.05",
    "sim.load_s=0.05",
    "sim.lengths.mean=300",
    "sim.lengths.sigma=0.3",
    "sim.environment.latency_s.kind=fixed",
    "sim.environment.latency_s.mean=0.01",
    "sim.environment.latency_s.sigma=",
)


def planted_config(*changes: str) -> RunConfig:
    return load(PATH, RunConfig, [*SMALL, *changes])
