"""The run's resources on a Ray cluster. Ray starts its processes, places them and reports when they are gone. Messages between
them and the run use our own connections, msgpack over TCP, each opened with a ticket that is valid once. No operation is an
actor call.

Nothing here listens beyond loopback as long as the cluster is this machine alone.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")  # a run handles SIGTERM itself
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray's name for: use loopback by default
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would let any other process starve engines and ranks

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from millstream import folders
from millstream.cluster.actor import RayHello, RayProcess
from millstream.cluster.resources import Placement, ResourcesConfig
from millstream.errors import ClusterError
from millstream.rpc.frames import Frames, keep_alive
from millstream.rpc.process import Kind

logger = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
ROOM_CHECK_S = 0.2
WARN_S = 10.0  # between warnings about a process that waits for resources
HELLO_S = 10.0
SPARE_CPUS = (
    16  # of a cluster that is started here, beyond the machine's: for engines that are added later. Ray only counts
)
HELLO_BYTES = 4096
RETRY_S = 0.05
OBJECT_STORE = 128 << 20  # of a cluster that is started here: Ray's own store carries almost nothing of ours
NODE_GONE = "its node is gone"


class NoRoom(ClusterError):
    """The resources were not free within `resources.patience_s`."""


class NodeGone(ClusterError):
    """A node disappeared while a process was being started on it."""


class Cluster:
    """The connection to a cluster, and the placement group of engines and ranks. Blocking: to be opened and closed on a thread.
    Every wait ends soon after `stopping` is set, with `ClusterError`."""

    def __init__(self, config: ResourcesConfig, placement: Placement, stopping: threading.Event) -> None:
        self._config = config
        self._placement = placement
        self._stopping = stopping
        self._is_ours = config.address == "local"
        self._folder = ""
        self._group: PlacementGroup | None = None
        try:
            self._connect()
            self.node: str = ray.get_runtime_context().get_node_id()
            own: str = ray.util.get_node_ip_address()
            self.is_on_loopback = own == LOOPBACK
            self.host = own
            self._listener = ConnectionListener(own)
            self._reserve()
        except BaseException:  # also a cancellation: nothing else would free the resources
            self.close()
            raise

    def _connect(self) -> None:
        if ray.is_initialized():
            self._is_ours = False
            return
        options: dict[str, Any] = {"address": self._config.address}
        if self._is_ours:
            self._folder = str(folders.make("millstream-ray-"))
            needed = self._placement.total
            options |= {
                "num_cpus": max(os.cpu_count() or 1, int(needed.get("CPU", 0)) + 1) + SPARE_CPUS,
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE,
                "_temp_dir": self._folder,
            }
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            ray.init(**options, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ClusterError(
                f'resources.address = "{self._config.address}": Ray cannot be reached or started: {error}. To start it on this '
                'machine for this run only, set resources.address = "local"'
            ) from error

    def _reserve(self) -> None:
        """Reserve what all engines and ranks need. Nodes may still be joining, and an autoscaler adds some only while resources
        are waited for: so this waits, but on a cluster of this machine only for what the machine has."""
        needed = self._placement.total
        if self._is_ours and self._lacks(needed):
            raise self._too_small(needed)
        if self._lacks(needed):
            logger.warning("the cluster has %s: waiting for nodes to join", _words(self._of_cluster(needed)))
        self._group = placement_group(self._placement.bundles, strategy=self._config.spread.upper())
        ready = self._group.ready().future()
        try:
            self._wait([ready], f"all of {_words(needed)}, for engines and ranks")
        except NoRoom as error:
            if self._lacks(needed):
                raise self._too_small(needed) from error
            raise
        ready.result()

    def _of_cluster(self, needed: Mapping[str, float]) -> dict[str, float]:
        total = ray.cluster_resources()
        return {kind: total.get(kind, 0.0) for kind in needed}

    def _lacks(self, needed: Mapping[str, float]) -> bool:
        total = self._of_cluster(needed)
        return any(total[kind] < number for kind, number in needed.items())

    def _too_small(self, needed: Mapping[str, float]) -> ClusterError:
        return ClusterError(
            "the cluster is too small: engines and ranks need "
            f"{_words(needed)}, and it has {_words(self._of_cluster(needed))}. Set engine.replicas or learner.ranks lower, or "
            "give each less (resources.engine_cpus, ...)"
        )

    def _wait(self, pending: Sequence[Future[Any]], what: str) -> None:
        """For the first of them. Warns what it waits for after a while. Raises `NoRoom` after `resources.patience_s`."""
        began = warned = time.monotonic()
        while not futures.wait(pending, timeout=ROOM_CHECK_S, return_when=futures.FIRST_COMPLETED).done:
            now = time.monotonic()
            if self._stopping.is_set():
                raise ClusterError(f"stopped while waiting for {what}")
            if now - began >= self._config.patience_s:
                raise NoRoom(
                    f"waited {now - began:.0f} s for {what}, and the cluster has {_words(ray.available_resources())} free; "
                    "resources.patience_s sets the limit"
                )
            if now - warned >= WARN_S:
                warned = now
                free = _words(ray.available_resources())
                logger.warning("waiting for %s: %.0f s so far; the cluster has %s free", what, now - began, free)

    # ---- processes ---------------------------------------------------------------------------------------------------

    def launch(self, kind: Kind, target: str, *, name: str, descriptors: Sequence[int] = ()) -> RayWorker:
        """See `millstream.rpc.process.Launcher`. Ray notices late that a node is gone, and may place a process there: it is
        then started again on another node."""
        began = time.monotonic()
        while True:
            try:
                return self._launch(kind, target, name)
            except NodeGone:
                if time.monotonic() - began >= self._config.patience_s:
                    raise
                logger.warning("%s is started again on another node: its node is gone", name)

    def _launch(self, kind: Kind, target: str, name: str) -> RayWorker:
        cpus, gpus = self._config.shares(kind)
        ticket = secrets.token_hex(16)
        connected = self._listener.expect(ticket)
        actor: Any = None
        try:
            options = self._options(kind, name)
            actor = ray.remote(RayProcess).options(num_cpus=cpus, num_gpus=gpus, max_restarts=0, **options).remote()
            address = self.host, self._listener.port, self.is_on_loopback
            exited = actor.run.remote(target, *address, ticket, gpus > 0).future()
            self._wait([connected, exited], f"{name} ({_words({'CPU': cpus, 'GPU': gpus})}) to start")
            if not connected.done() and exited.done():
                raise _start_error(name, exited)
        except BaseException as error:  # also a cancellation: nothing waits for that process any more
            self._listener.forget(ticket)
            _kill(actor)
            if isinstance(error, ray.exceptions.RayError):
                raise ClusterError(f"{name} could not be started: {_last_line(error)}") from error
            raise
        connection, hello = connected.result()
        return RayWorker(actor, exited, connection, hello)

    def _options(self, kind: Kind, name: str) -> dict[str, Any]:
        """Engines and ranks have a bundle of the placement group; one that was added later takes what is free. Rollout workers
        are on as many nodes as there are, where Ray alone would fill one after the other. It spreads only what asks for
        something: a byte of memory."""
        if kind == "rollout":
            return {"scheduling_strategy": "SPREAD", "memory": 1}
        bundle = self._placement.bundle_of(kind, name)
        if self._group is None or bundle is None:
            return {}
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return {"scheduling_strategy": strategy}

    def close(self) -> None:
        if hasattr(self, "_listener"):
            self._listener.close()
        if self._group is not None and ray.is_initialized():
            remove_placement_group(self._group)
        if self._is_ours:
            ray.shutdown()
        if self._folder:
            folders.remove(Path(self._folder))


class RayWorker:
    """A process on a node of the cluster. See `millstream.rpc.process.WorkerProcess`."""

    def __init__(self, actor: Any, exited: Future[None], connection: socket.socket, hello: RayHello) -> None:
        """`exited`: of the actor's `run`, which never returns a value; its error is Ray's account of the exit."""
        self._actor = actor
        self._exited = exited
        self.connection = connection
        self.pid = hello.pid
        self.node = hello.node

    def kill(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # it notices, and kills all that it has started
        _kill(self._actor)

    def exit_reason(self, timeout_s: float | None = None) -> str | None:
        if not futures.wait([self._exited], timeout_s).done:
            return None
        return f"its process ended: {_cause(self._exited)}"

    @property
    def has_died(self) -> bool:
        """A worker that has finished ends its actor itself, which Ray distinguishes from a death. Ray notices late that a node
        is gone: a process that closed its connection before that counts as dead."""
        if not self._exited.done():
            return True
        error = self._exited.exception()
        return error is not None and "exit_actor" not in str(error)


class ConnectionListener:
    """Accepts the connections of workers: each with a ticket that is expected. Any other is closed without an answer."""

    def __init__(self, host: str) -> None:
        self._server = socket.create_server((host, 0), backlog=256)
        self.port: int = self._server.getsockname()[1]
        self._expected: dict[str, Future[tuple[socket.socket, RayHello]]] = {}
        self._is_closed = False
        threading.Thread(target=self._accept, name="connection listener", daemon=True).start()

    def expect(self, ticket: str) -> Future[tuple[socket.socket, RayHello]]:
        self._expected[ticket] = Future()
        return self._expected[ticket]

    def forget(self, ticket: str) -> None:
        self._expected.pop(ticket, None)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(RETRY_S)  # out of descriptors, or the client is gone: others will connect
                continue
            threading.Thread(target=self._greet, args=(connection,), name="hello", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        """A client that sends no valid hello within `HELLO_S` is disconnected."""
        connection.settimeout(HELLO_S)
        try:
            hello = Frames(connection, HELLO_BYTES).first_as(RayHello)
        except (msgspec.MsgspecError, OSError):
            hello = None
        expected = None if hello is None else self._expected.pop(hello.ticket, None)
        if hello is None or expected is None:
            connection.close()
            return
        connection.settimeout(None)
        keep_alive(connection)
        expected.set_result((connection, hello))

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def _words(resources: Mapping[str, float]) -> str:
    known = {kind: number for kind, number in resources.items() if kind in ("CPU", "GPU")}
    return ", ".join(f"{number:g} {kind}" for kind, number in known.items()) or "nothing"


def _start_error(name: str, exited: Future[None]) -> ClusterError:
    cause = _cause(exited)
    kind = NodeGone if cause == NODE_GONE else ClusterError
    return kind(f"{name} exited before it connected: {cause}")


def _cause(exited: Future[None]) -> str:
    """Of an exit, in few words: Ray's messages are pages."""
    error = exited.exception()
    text = str(error) if error is not None else ""
    if "its node has died" in text or "node was terminated" in text:
        return NODE_GONE
    if isinstance(error, ray.exceptions.RayTaskError):  # it raised: the error, without the traceback
        return _last_line(error)
    return "killed or crashed" if text else "it returned"


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _kill(actor: Any) -> None:
    """Not after the cluster is closed: Ray would start another one to find the actor."""
    if actor is not None and ray.is_initialized():
        with suppress(ValueError, ray.exceptions.RayError):
            ray.kill(actor)
