"""As the nodes of `store_nodes.py`, on a cluster of `ray.cluster_utils`: nodes of their own for Ray and for the store, on this
machine."""

from __future__ import annotations

import sys
from typing import Any

import ray
from ray.cluster_utils import Cluster

from internals_ray import NAMESPACE, RayStore, StoreAddress, StoreClient, connect, server_name
from store_nodes import NODE_BYTES, TASKS, Work, cpu_of, work

MEMORY = 100 << 20  # of Ray's own store, which carries nothing of ours


class Worker:
    """A producer or a consumer on a node."""

    async def connect(self, plan: StoreAddress, role: str) -> str:
        """The id of its node."""
        self._client: StoreClient = await connect(plan, role)
        node: str = ray.get_runtime_context().get_node_id()
        return node

    async def work(self, role: str, partition: str, seconds: float) -> Work:
        return await work(self._client, role, partition, seconds)


def ray_nodes(num: int, seconds: float, *, is_near: bool) -> tuple[list[Work], dict[str, float]]:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": MEMORY, "include_dashboard": False},
    )
    try:
        for number in range(num):
            cluster.add_node(num_cpus=2, object_store_memory=MEMORY, resources={f"node{number}": 2})
        ray.init(address=cluster.address, log_to_driver=False)
        for name in ("store_nodes", __name__):
            ray.cloudpickle.register_pickle_by_value(sys.modules[name])  # workers do not know this folder
        return _measure(num, seconds, is_near=is_near)
    finally:
        ray.shutdown()
        cluster.shutdown()


def _measure(num: int, seconds: float, *, is_near: bool) -> tuple[list[Work], dict[str, float]]:
    store = RayStore(TASKS, capacity_bytes=num * NODE_BYTES)
    try:
        jobs = [(number, "producer", f"node{number}") for number in range(num)]
        jobs += [(number, "consumer", f"node{(number + (not is_near)) % num}") for number in range(num)]
        kind = ray.remote(Worker)
        workers: list[Any] = [kind.options(resources={f"node{number}": 1}).remote() for number, _, _ in jobs]
        nodes = ray.get([one.connect.remote(store.plan, job[1]) for one, job in zip(workers, jobs, strict=True)])
        servers = [ray.get_actor(server_name(store.plan, node), namespace=NAMESPACE) for node in set(nodes)]
        watched = {"coordinator": [store.pid], "segment server": ray.get([server.pid.remote() for server in servers])}
        before = {role: sum(map(cpu_of, pids)) for role, pids in watched.items()}
        found: list[Work] = ray.get(
            [one.work.remote(*job[1:], seconds) for one, job in zip(workers, jobs, strict=True)]
        )
        return found, {role: sum(map(cpu_of, pids)) - before[role] for role, pids in watched.items()}
    finally:
        store.close()
