"""Those who work beside the learner on a Ray cluster, in a run of a small model whose processes are killed: the metrics of a local
run, and an audit that is clean. `make test-ray`."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from millstream import train
from millstream.env.rewards import Reward
from millstream.events import LearnerRestarted, Span
from millstream.events.sinks import read_events
from millstream.rpc.process import Kind
from millstream.types import Task
from support.runs import assert_clean, step_rows
from support.stage_runs import config

pytest.importorskip("ray")
pytestmark = pytest.mark.ray

from millstream.cluster.driver import RayWorker  # noqa: E402
from millstream.run.ray_backend import RayBackend  # noqa: E402

ALL_THREE = [
    "algorithm.kl=loss", "algorithm.kl_coefficient=0.1", "algorithm.advantage=gae", "algorithm.loss=decoupled_ppo",
    "learner.mini_batches=2", "critic.learning_rate=3e-3", "proximal.micro_batch_tokens=4096",
    "pipeline.steps=5", "pipeline.groups_per_step=4", "pipeline.max_lag=0", "data.holdout=0", "seed=3",
]  # fmt: skip
ON_RAY = ["runtime=ray", "engine.process=", "resources.engine_cpus=0", "resources.learner_cpus=0"]
SHARDED = ["reference.ranks=2", "critic.ranks=2", "proximal.replicas=2"]
TIMED = {"at", "rollouts_per_s", "tokens_per_s", "step_s", "waiting_s", "training_s", "sync_s", "other_s"}
ROLLOUTS_A_STEP = 4 * 2


def low(task: Task, completion: str) -> float:
    """Something to learn from in every step: the share of low digits."""
    return sum(digit in "0123" for digit in completion) / 4


def metrics(folder: Path, reward: Reward, *changes: str) -> list[dict[str, float]]:
    train(config(folder, *ALL_THREE, *changes), reward=reward)
    assert_clean(folder / "run")
    return [{name: row[name] for name in row if name not in TIMED} for row in step_rows(folder / "run")]


@pytest.mark.timeout(600)
def test_with_a_reference_a_critic_and_a_proximal_policy_on_ray_a_run_has_the_metrics_of_a_local_one_whichever_rank_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs, one of them with a Ray of its own and eleven processes: minutes on two cores."""
    workers: dict[str, list[RayWorker]] = {}
    launch, num_rewards = RayBackend.launch, 0

    def noted(site: RayBackend, kind: Kind, module: str, *, name: str, descriptors: Sequence[int] = ()) -> RayWorker:
        worker = launch(site, kind, module, name=name, descriptors=descriptors)
        if kind == "stage":
            workers.setdefault(name, []).append(worker)
        return worker

    def killing(task: Task, completion: str) -> float:
        nonlocal num_rewards
        num_rewards += 1
        victims = {2 * ROLLOUTS_A_STEP + 1: "reference rank 1", 3 * ROLLOUTS_A_STEP + 1: "critic rank 0"}
        if num_rewards in victims:
            os.kill(workers[victims[num_rewards]][0].pid, signal.SIGKILL)
        return low(task, completion)

    here = metrics(tmp_path / "here", low)
    monkeypatch.setattr(RayBackend, "launch", noted)
    there = metrics(tmp_path / "there", killing, *ON_RAY, *SHARDED)
    num_started = {name: len(some) for name, some in workers.items()}
    sharded = {f"{name} rank {rank}": 2 for name in ("reference", "critic") for rank in range(2)}
    assert num_started == {**sharded, "proximal-0": 1, "proximal-1": 1}
    assert [pytest.approx(step, rel=1e-4, abs=1e-6) for step in here] == there
    assert here[-1]["reference_kl"] > 0 and here[-1]["critic_value"] > 0 and here[0]["loss"] != 0
    events = list(read_events(tmp_path / "there/run/events.jsonl"))
    work = {(span.worker, span.what) for span in events if isinstance(span, Span)}
    assert {("reference", "score"), ("values", "score"), ("critic", "step"), ("proximal", "load")} <= work
    (restarted,) = [event for event in events if isinstance(event, LearnerRestarted)]
    assert restarted.who == "the critic"
