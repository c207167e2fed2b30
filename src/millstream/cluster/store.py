"""The store on a Ray cluster: Ray places and restarts the coordinator and one segment server per node.

No operation is an actor call: clients connect to the coordinator by a socket of its own. Payloads are in shared memory on the
node of their producer, outside every process: the death of a producer, of the coordinator or of a segment server loses no row.
A node that leaves takes its segments with it; `StoreClient.lost` names the rows that were lost.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from millstream import folders
from millstream.decoding import decode_msgpack
from millstream.errors import StoreError
from millstream.store.base import Reads
from millstream.store.client import GIVE_UP_S, Address, StoreClient
from millstream.store.coordinator import StorePlan
from millstream.store.host import make_plan, run_coordinator
from millstream.store.segments import SegmentServer, SegmentServerAgent, remove_segments, segment_folder

NAMESPACE = "millstream"
STORE_START_S = 60.0


class _CoordinatorActor:
    """Runs the coordinator on a thread. After a restart by Ray, it reads its journal."""

    def __init__(self, plan: bytes) -> None:
        self._ready = threading.Event()
        decoded = decode_msgpack(plan, StorePlan)
        threading.Thread(target=self._run, args=(decoded,), name="coordinator", daemon=True).start()

    def _run(self, plan: StorePlan) -> None:
        try:
            asyncio.run(run_coordinator(plan, self._ready))
        finally:
            os._exit(1)  # Ray restarts it

    def pid(self) -> int:
        """Returns once it serves."""
        if not self._ready.wait(STORE_START_S):
            raise StoreError(f"the store's coordinator did not start within {STORE_START_S:g} s")
        return os.getpid()


class _SegmentServerActor:
    """Runs the segment server of a node on a thread; ends with the store."""

    def __init__(self, plan: bytes, node: str) -> None:
        decoded = decode_msgpack(plan, StorePlan)
        server = SegmentServer(Path(_folder(decoded, node)), decoded.token, decoded.spill)
        self._agent = SegmentServerAgent(
            server, (decoded.host, decoded.port), token=decoded.token, node=node, give_up_s=GIVE_UP_S
        )
        threading.Thread(target=self._run, name="segments", daemon=True).start()

    def _run(self) -> None:
        asyncio.run(self._agent.run(_own_ip()))
        os._exit(0)  # the store is gone; Ray would never stop a detached actor

    def pid(self) -> int:
        """Returns once the coordinator knows it."""
        if not self._agent.is_connected.wait(STORE_START_S):
            raise StoreError(f"the segment server of a node did not reach the coordinator within {STORE_START_S:g} s")
        return os.getpid()


def _folder(plan: StorePlan, node: str) -> str:
    """The folder of a node: named after the store and the node."""
    if node == plan.node:
        return plan.memory
    return str(segment_folder(Path(plan.memory).name.split("-")[1], node))


class RayStore:
    """A running store on the cluster that this process belongs to. It ends with this process, or with `close`.

    Pass `plan` to other processes: it is small, and a secret."""

    def __init__(
        self,
        tasks: Mapping[str, Reads],
        *,
        capacity_rows: int | None = None,
        capacity_bytes: int | None = None,
        memory_bytes: int | None = None,
        spill: str | None = None,
        folder: Path | None = None,
    ) -> None:
        node = ray.get_runtime_context().get_node_id()
        self.plan = make_plan(
            tasks,
            capacity_rows=capacity_rows,
            capacity_bytes=capacity_bytes,
            memory_bytes=memory_bytes,
            spill=spill,
            host=_own_ip(),
            node=node,
            folder=folder,
        )
        self.coordinator: Any = (
            ray.remote(_CoordinatorActor)
            .options(num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=_on(node))
            .remote(msgspec.msgpack.encode(self.plan))
        )
        self.pid = self.ask_pid()

    def ask_pid(self) -> int:
        """The process id of the coordinator, once it serves. Raises `StoreError` if it does not start."""
        try:
            pid: int = ray.get(self.coordinator.pid.remote(), timeout=2 * STORE_START_S)
        except ray.exceptions.GetTimeoutError as error:
            raise StoreError(
                f"the store's coordinator did not start within {2 * STORE_START_S:g} s: Ray may be restarting it repeatedly, "
                "and Ray's log of its process has the reason"
            ) from error
        return pid

    async def connect(self, name: str | None = None) -> StoreClient:
        return await connect(self.plan, name)

    def close(self) -> None:
        ray.kill(self.coordinator)
        nodes: list[dict[str, Any]] = ray.nodes()
        for node in nodes:
            try:
                ray.kill(ray.get_actor(_server_name(self.plan, node["NodeID"]), namespace=NAMESPACE))
            except ValueError:
                continue
        remove_segments(Path(self.plan.memory))
        if self.plan.is_temporary:
            folders.remove(Path(self.plan.journal))


async def connect(plan: StorePlan, name: str | None = None) -> StoreClient:
    """From any process of the cluster. The first one on a node starts the node's segment server."""
    node = ray.get_runtime_context().get_node_id()
    if node != plan.node:
        server: Any = (
            ray.remote(_SegmentServerActor)
            .options(
                name=_server_name(plan, node),
                namespace=NAMESPACE,
                get_if_exists=True,
                lifetime="detached",
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=-1,
                scheduling_strategy=_on(node),
            )
            .remote(msgspec.msgpack.encode(plan), node)
        )
        await server.pid.remote()
    address = Address(host=plan.host, port=plan.port, token=plan.token, node=node, folder=_folder(plan, node))
    return await StoreClient.connect(address, name)


def _own_ip() -> str:
    ip: str = ray.util.get_node_ip_address()
    return ip


def _on(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id=node, soft=False)


def _server_name(plan: StorePlan, node: str) -> str:
    """Ray shows names to all users: it contains nothing of the token."""
    return f"segments {Path(plan.memory).name} {node}"
