"""The store on a Ray cluster: Ray places the coordinator and the holders of the nodes, watches them and starts them again.

No operation is an actor call: clients speak to the coordinator over a socket of its own. Payloads are in shared memory on the
node of whoever put them, outside every process: neither a producer's death nor the coordinator's nor a holder's loses a row. A
node that leaves takes its segments with it; `StoreClient.lost` says which rows those were.
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
from millstream.errors import StoreError
from millstream.store import Reads
from millstream.store.client import GIVE_UP_S, Address, StoreClient
from millstream.store.holder import Holder, HolderAgent
from millstream.store.host import Plan, make_plan, run
from millstream.store.segments import memory_folder

NAMESPACE = "millstream"
START_S = 60.0


class _CoordinatorActor:
    """Runs the coordinator on a thread. When Ray starts this actor again, it reads its journal."""

    def __init__(self, plan: bytes) -> None:
        self._ready = threading.Event()
        decoded = msgspec.msgpack.decode(plan, type=Plan)
        threading.Thread(target=self._run, args=(decoded,), name="coordinator", daemon=True).start()

    def _run(self, plan: Plan) -> None:
        try:
            asyncio.run(run(plan, self._ready))
        finally:
            os._exit(1)  # Ray starts it again

    def pid(self) -> int:
        """Answers once it serves."""
        if not self._ready.wait(START_S):
            raise StoreError(f"the store's coordinator did not start within {START_S:g} s")
        return os.getpid()


class _HolderActor:
    """Runs the holder of a node on a thread; ends with the store."""

    def __init__(self, plan: bytes, node: str) -> None:
        decoded = msgspec.msgpack.decode(plan, type=Plan)
        holder = Holder(Path(_folder(decoded, node)), decoded.token)
        self._agent = HolderAgent(
            holder, (decoded.host, decoded.port), token=decoded.token, node=node, give_up_s=GIVE_UP_S
        )
        threading.Thread(target=self._run, name="holder", daemon=True).start()

    def _run(self) -> None:
        asyncio.run(self._agent.run(_own_ip()))
        os._exit(0)  # the store is gone; Ray would keep a detached actor for ever

    def pid(self) -> int:
        """Answers once the coordinator knows of it."""
        if not self._agent.is_connected.wait(START_S):
            raise StoreError(f"the holder of a node did not reach the coordinator within {START_S:g} s")
        return os.getpid()


def _folder(plan: Plan, node: str) -> str:
    """The folder of a node: named after the store and the node."""
    if node == plan.node:
        return plan.memory
    return str(memory_folder(Path(plan.memory).name.split("-")[1], node))


class RayStore:
    """A running store on the cluster that this process belongs to. It ends with this process, or with `close`.

    Pass `plan` to other processes, as it is: it is small, and a secret."""

    def __init__(
        self,
        tasks: Mapping[str, Reads],
        *,
        capacity_rows: int | None = None,
        capacity_bytes: int | None = None,
        folder: Path | None = None,
    ) -> None:
        node = ray.get_runtime_context().get_node_id()
        self.plan = make_plan(
            tasks,
            capacity_rows=capacity_rows,
            capacity_bytes=capacity_bytes,
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
        """Of the coordinator, once it serves; another after it was started again. Raises `StoreError` if it never does."""
        try:
            pid: int = ray.get(self.coordinator.pid.remote(), timeout=2 * START_S)
        except ray.exceptions.GetTimeoutError as error:
            raise StoreError(
                f"the store's coordinator did not start within {2 * START_S:g} s: it may end again and again, and Ray's log "
                "of its process says why"
            ) from error
        return pid

    async def connect(self, name: str | None = None) -> StoreClient:
        return await connect(self.plan, name)

    def close(self) -> None:
        ray.kill(self.coordinator)
        nodes: list[dict[str, Any]] = ray.nodes()
        for node in nodes:
            try:
                ray.kill(ray.get_actor(_holder_name(self.plan, node["NodeID"]), namespace=NAMESPACE))
            except ValueError:
                continue
        Holder(Path(self.plan.memory), "").remove()
        if self.plan.is_temporary:
            folders.remove(Path(self.plan.journal))


async def connect(plan: Plan, name: str | None = None) -> StoreClient:
    """From any process of the cluster. The first one on a node starts the node's holder."""
    node = ray.get_runtime_context().get_node_id()
    if node != plan.node:
        holder: Any = (
            ray.remote(_HolderActor)
            .options(
                name=_holder_name(plan, node),
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
        await holder.pid.remote()
    address = Address(host=plan.host, port=plan.port, token=plan.token, node=node, folder=_folder(plan, node))
    return await StoreClient.connect(address, name)


def _own_ip() -> str:
    ip: str = ray.util.get_node_ip_address()
    return ip


def _on(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id=node, soft=False)


def _holder_name(plan: Plan, node: str) -> str:
    """Ray shows names to everybody: nothing of the token is in it."""
    return f"holder {Path(plan.memory).name} {node}"
