"""What trains the policy and what scores its rows.

              on a thread of this process      in worker processes (`learner.processes`, `rpc.group`)
    learner   `torch.TorchLearner`             `fsdp.FsdpLearner`: a group of ranks, `rank_worker` in each
    scorer    `scorer.TorchScorer`             `remote_scorer.RemoteScorer`: `scorer_worker`
    critic    `critic.TorchCritic`             `remote_scorer.RemoteCritic`: `scorer_worker`

A `rank.Rank` is the mathematics of a learner, of the whole policy or of one shard. The protocols are in `base`, the config
tables in `config`.
"""

from millstream.learner.base import Critic, Follower, Learner, LearnerContext, RunCritic, RunLearner, Scorer, Snapshot
from millstream.learner.config import CriticConfig, LearnerConfig, ProximalConfig, ReferenceConfig

__all__ = [
    "Critic",
    "CriticConfig",
    "Follower",
    "Learner",
    "LearnerConfig",
    "LearnerContext",
    "ProximalConfig",
    "ReferenceConfig",
    "RunCritic",
    "RunLearner",
    "Scorer",
    "Snapshot",
]
