"""The components of a pipeline, built from the parts of a run, its algorithm and its config."""

from __future__ import annotations

from millstream.learner.base import reads_store
from millstream.pipeline.attempts import RouterLine
from millstream.pipeline.batch import BatchTrainer, GroupTaker
from millstream.pipeline.context import RunContext
from millstream.pipeline.critic import CriticUpdates
from millstream.pipeline.host import build_host
from millstream.pipeline.lengths import ExpectedLengths
from millstream.pipeline.lockstep import Gate
from millstream.pipeline.parts import AfterStep, Algorithm, Parts, open_less
from millstream.pipeline.policy import SchedulingPolicy, admission_for, complete_with, gate_for
from millstream.pipeline.proximal import Proximal
from millstream.pipeline.recorded import RecordedBatches, RecordedTaker
from millstream.pipeline.resume import Resumption
from millstream.pipeline.rollouts import RolloutConfig, Rollouts
from millstream.pipeline.schedule import PipelineConfig
from millstream.pipeline.settle import GroupFinalizer
from millstream.pipeline.sync import WeightSync
from millstream.pipeline.workers import RolloutWorkers
from millstream.serving.router import Router

SETTLING = 4  # groups at once, where the store is another process


class Components:
    """All of one run, connected. `recorded`: batches of another run, which are trained instead of rollouts. `is_from_users`:
    rollouts come from outside."""

    def __init__(
        self,
        parts: Parts,
        algorithm: Algorithm,
        config: PipelineConfig,
        rollout: RolloutConfig,
        *,
        seed: int,
        after_step: AfterStep | None,
        router: Router | None,
        recorded: RecordedBatches | None,
        is_from_users: bool,
    ) -> None:
        self._parts = parts
        self._algorithm = algorithm
        self._config = config
        self._rollout = rollout
        is_in_lockstep = config.is_in_lockstep
        self.context = RunContext(
            store=parts.store, waits=parts.waits, clock=parts.clock, sink=parts.sink, rollouts=parts.rollouts
        )
        open_less(parts, algorithm, config, are_kept=rollout.keep_gb > 0)
        self.context.lengths = ExpectedLengths() if config.longest_first and not is_in_lockstep else None
        self.router = router or Router(
            parts.engines, is_queueing=not is_in_lockstep, clock=parts.clock, sink=parts.sink
        )
        self.admission = admission_for(config)
        self.sync = WeightSync(self.context, parts.channel, self.router, is_in_lockstep=is_in_lockstep)
        self.finalizer = GroupFinalizer(
            self.context,
            self.admission,
            algorithm,
            config,
            min_group_size=rollout.min_group_size,
            num_at_once=SETTLING if parts.workers is not None and not is_in_lockstep else 1,
        )
        gate = gate_for(config, self.router, self.context)
        line = RouterLine(self.router, parts.waits, self.admission, gate)
        self.host = build_host(parts, self.context, line, algorithm, rollout, seed)
        self.rollouts = self._build_rollouts()
        self.policy = self._build_policy(gate, after_step)
        self.critic = self._build_critic()
        self.proximal = self._build_proximal()
        self.taker: GroupTaker | RecordedTaker = (
            self._build_taker(is_from_users) if recorded is None else self._build_recorded_taker(recorded)
        )
        self.batch = self._build_batch()
        self.resumption = Resumption(self.context, self.admission, self.finalizer, self.rollouts, rollout.num_members)
        self._connect_router()

    @property
    def workers(self) -> RolloutWorkers | None:
        """Processes that play the rollouts. None: they are played in this one."""
        return self.host if isinstance(self.host, RolloutWorkers) else None

    def _connect_router(self) -> None:
        self.router.rank_of = self.policy.rank
        self.router.length_of = None if self.context.lengths is None else self.policy.relative_length
        self.router.listeners.append(lambda change: self.context.notifier.notify())

    def _build_rollouts(self) -> Rollouts:
        return Rollouts(
            self.context,
            self._rollout,
            self.host,
            router=self.router,
            admission=self.admission,
            finalizer=self.finalizer,
            is_in_lockstep=self._config.is_in_lockstep,
            complete_with=complete_with(self._config, self._rollout),
            are_partial=self._algorithm.group_reward is not None,
        )

    def _build_policy(self, gate: Gate | None, after_step: AfterStep | None) -> SchedulingPolicy:
        return SchedulingPolicy(
            self._config,
            self.context,
            admission=self.admission,
            router=self.router,
            sync=self.sync,
            finalizer=self.finalizer,
            rollouts=self.rollouts,
            gate=gate,
            after_step=after_step,
        )

    def _build_critic(self) -> CriticUpdates | None:
        critic, tokens = self._parts.critic, self._algorithm.critic_batch_tokens
        return None if critic is None else CriticUpdates(critic, tokens, self.context)

    def _build_proximal(self) -> Proximal | None:
        follower, tokens = self._parts.proximal, self._algorithm.proximal_batch_tokens
        num_first = self._config.groups_per_step // self._algorithm.mini_batches
        return None if follower is None else Proximal(follower, tokens, num_first, self.context)

    def _build_taker(self, is_from_users: bool) -> GroupTaker:
        return GroupTaker(
            self.context,
            admission=self.admission,
            policy=self.policy,
            finalizer=self.finalizer,
            critic=self.critic,
            proximal=self.proximal,
            is_from_users=is_from_users,
            are_stored=reads_store(self._parts.learner),
        )

    def _build_recorded_taker(self, recorded: RecordedBatches) -> RecordedTaker:
        return RecordedTaker(
            self.context,
            recorded,
            admission=self.admission,
            finalizer=self.finalizer,
            num_members=self._rollout.num_members,
        )

    def _build_batch(self) -> BatchTrainer:
        return BatchTrainer(
            self.context,
            self._parts.learner,
            self._algorithm,
            groups_per_step=self._config.groups_per_step,
            critic=self.critic,
            proximal=self.proximal,
        )
