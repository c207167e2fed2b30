"""Where the attempts of a run are played: in its own process, or in rollout workers."""

from __future__ import annotations

from millstream.pipeline.attempts import AttemptHost, Attempts, RouterLine
from millstream.pipeline.context import RunContext
from millstream.pipeline.episode import Player
from millstream.pipeline.parts import Algorithm, Parts
from millstream.pipeline.rollouts import RolloutConfig
from millstream.pipeline.worker_host import HostSetup
from millstream.pipeline.workers import RolloutWorkers


def build_host(
    parts: Parts, context: RunContext, line: RouterLine, algorithm: Algorithm, rollout: RolloutConfig, seed: int
) -> AttemptHost:
    """`line`: to the router of the run's process."""
    if parts.workers is not None:
        setup = HostSetup(
            sampling=algorithm.sampling,
            seed=seed,
            max_parts=rollout.max_parts,
            timeout_s=rollout.timeout_s,
            records_turns=parts.records_turns,
            has_lines=line.gate is None and parts.workers.has_lines,
            is_gated=line.gate is not None,
            keeps_parts=rollout.keep_gb > 0,
            patience_s=line.router.patience_s,
            are_prefixes_kept=line.router.prefixes.are_kept,
        )
        return RolloutWorkers(parts.workers, setup, context, line)
    player = Player(
        environment=parts.environment,
        sampling=algorithm.sampling,
        run_seed=seed,
        role="train",
        max_parts=rollout.max_parts,
        waits=context.waits,
        record=context.record_span if parts.records_turns else None,
    )
    return Attempts(player, line, timeout_s=rollout.timeout_s, now=context.now)
