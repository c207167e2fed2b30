"""What trains the policy and what scores its rows.

              on a thread of this process      in worker processes (`learner.processes`, `rpc.group`)
    learner   `torch.TorchLearner`             `fsdp.FsdpLearner`: a group of ranks, `rank_worker` in each
    scorer    `scorer.TorchScorer`             `remote_scorer.RemoteScorer`: groups of ranks, `scorer_worker` in each
    critic    `critic.TorchCritic`             `remote_scorer.RemoteCritic`: a group of ranks, `scorer_worker` in each

`rank.Rank`, `scorer.ScorerRank` and `critic.CriticRank` are the mathematics, of the whole model or of one shard. The protocols
are in `base`, the config tables in `config`.
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
