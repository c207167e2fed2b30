"""Which node and which GPUs a process gets of a Ray cluster whose nodes have faked GPUs. `make test-ray`."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.cluster.resources import ResourcesConfig, placement_of
from millstream.rpc.process import Kind
from support.seen_worker import Seen, ask

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
MEMORY = 100 << 20
NUM_NODES = 3


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster of three nodes with four CPUs and two GPUs each, which Ray counts and nothing uses."""
    import ray
    from ray.cluster_utils import Cluster as Nodes

    folder = tempfile.mkdtemp(prefix="ms-")  # a short name: Ray's sockets are in it
    root = Path(__file__).parents[2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(root / "src"), str(root / "tests")]))
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        node: dict[str, Any] = {"num_cpus": 4, "num_gpus": 2, "object_store_memory": MEMORY}
        nodes = Nodes(initialize_head=True, head_node_args=node | {"include_dashboard": False})
        try:
            for _ in range(NUM_NODES - 1):
                nodes.add_node(**node)
            nodes.wait_for_nodes()
            yield nodes.address
        finally:
            ray.shutdown()
            nodes.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def seen(config: ResourcesConfig, replicas: int, ranks: int, *asked: tuple[Kind, str]) -> list[Seen]:
    """By processes of these kinds and names, which run at the same time."""
    import ray

    from millstream.cluster.driver import Cluster

    cluster = Cluster(config, placement_of(config, replicas=replicas, ranks=ranks), threading.Event())
    workers, found = [], []
    try:
        for kind, name in asked:
            workers.append(cluster.launch(kind, "support.seen_worker:serve_seen", name=name))
            found.append(ask(workers[-1]))
            assert found[-1].node == workers[-1].node
    finally:
        for worker in workers:
            worker.kill()
        cluster.close()
        ray.shutdown()
    return found


@pytest.mark.parametrize("cpus", [0.0, 1.0])
def test_rollout_workers_are_on_all_nodes_and_see_no_gpu(address: str, cpus: float) -> None:
    config = ResourcesConfig(address=address, rollout_cpus=cpus, patience_s=40)
    found = seen(config, 1, 1, *[("rollout", f"rollouts-{number}") for number in range(NUM_NODES)])
    assert len({one.node for one in found}) == NUM_NODES
    assert [one.gpus for one in found] == [""] * NUM_NODES


def test_a_process_sees_the_gpus_that_were_asked_for_it_and_no_others(address: str) -> None:
    config = ResourcesConfig(address=address, learner_gpus=1, engine_gpus=2, reward_gpus=0.5, patience_s=60)
    kinds: list[tuple[Kind, str]] = [("learner", "rank 0"), ("engine", "engine"), ("reward", "a reward")]
    rank, engine, reward, *others = seen(config, 1, 1, *kinds, ("environment", "a game"), ("stage", "reference"))
    assert rank.gpus in ("0", "1") and reward.gpus in ("0", "1")
    assert sorted((engine.gpus or "").split(",")) == ["0", "1"]
    assert [one.gpus for one in others] == ["", ""]
    assert (rank.node, rank.gpus) != (reward.node, reward.gpus) and engine.node not in (rank.node, reward.node)
