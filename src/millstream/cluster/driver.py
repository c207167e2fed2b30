"""A run's part of a Ray cluster: Ray starts its processes, places them and says when they are gone. What passes between them
and the run are our own lines, msgpack over TCP, each opened with a ticket that is good once. No operation is an actor call.

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
os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")  # SIGTERM is a run's to handle, in its own words
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray's name for: loopback, if it is not told otherwise
os.environ.setdefault(
    "RAY_worker_niceness", "0"
)  # 15 by Ray's default: whatever else runs would starve engines and ranks

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from millstream import folders
from millstream.cluster.actor import Hello, RayProcess, keep_alive
from millstream.cluster.resources import Placement, ResourcesConfig
from millstream.errors import ClusterError
from millstream.rpc.frames import Frames
from millstream.rpc.process import Kind

logger = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
TICK_S = 0.2
SAY_S = 10.0
"""A process that has waited so long for room is spoken of."""
HELLO_S = 10.0
SPARE_CPUS = 16
"""Of a cluster that is started here, beyond what the machine has: room for engines that are added later. Ray only counts."""
HELLO_BYTES = 4096
AGAIN_S = 0.05
OBJECT_STORE = 128 << 20
"""Of a cluster that is started here: Ray's own store carries next to nothing of ours."""


NODE_GONE = "its node is gone"


class NoRoom(ClusterError):
    """The patience for it has run out."""


class NodeGone(ClusterError):
    """A node went while a process was started on it."""


class Cluster:
    """Blocking: to be opened and closed on a thread. Whatever it waits for, it raises soon after `stopping` is set."""

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
            self._switchboard = ConnectionListener(own)
            self._reserve()
        except BaseException:  # whatever it was, nobody else would give it back
            self.close()
            raise

    def _connect(self) -> None:
        if ray.is_initialized():
            self._is_ours = False
            return
        options: dict[str, Any] = {"address": self._config.address}
        if self._is_ours:
            self._folder = str(folders.make("millstream-ray-"))
            asked = self._placement.total
            options |= {
                "num_cpus": max(os.cpu_count() or 1, int(asked.get("CPU", 0)) + 1) + SPARE_CPUS,
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE,
                "_temp_dir": self._folder,
            }
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            ray.init(**options, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ClusterError(
                f'resources.address = "{self._config.address}": Ray cannot be reached there, or started: {error}. To start it '
                'here for this run alone, set resources.address = "local"'
            ) from error

    def _reserve(self) -> None:
        """All that engines and ranks need. Nodes may still be joining, and some join only when somebody waits for room: it
        waits for them, but not for more than this machine has."""
        asked = self._placement.total
        if self._is_ours and self._lacks(asked):
            raise self._too_small(asked)
        if self._lacks(asked):
            logger.warning("the cluster has %s: waiting for nodes to join", _words(self._of_cluster(asked)))
        self._group = placement_group(self._placement.bundles, strategy=self._config.spread.upper())
        ready = self._group.ready().future()
        try:
            self._wait([ready], f"all of {_words(asked)}, for engines and ranks")
        except NoRoom as error:
            if self._lacks(asked):
                raise self._too_small(asked) from error
            raise
        ready.result()

    def _of_cluster(self, asked: Mapping[str, float]) -> dict[str, float]:
        there = ray.cluster_resources()
        return {kind: there.get(kind, 0.0) for kind in asked}

    def _lacks(self, asked: Mapping[str, float]) -> bool:
        there = self._of_cluster(asked)
        return any(there[kind] < number for kind, number in asked.items())

    def _too_small(self, asked: Mapping[str, float]) -> ClusterError:
        return ClusterError(
            "the cluster is too small: engines and ranks need "
            f"{_words(asked)}, and it has {_words(self._of_cluster(asked))}. Set engine.replicas or learner.ranks lower, or "
            "give each less (resources.engine_cpus, ...)"
        )

    def _wait(self, coming: Sequence[Future[Any]], what: str) -> None:
        """For the first of them. What it waits for is said after a while, and past the patience it is an error."""
        began = said = time.monotonic()
        while not futures.wait(coming, timeout=TICK_S, return_when=futures.FIRST_COMPLETED).done:
            now = time.monotonic()
            if self._stopping.is_set():
                raise ClusterError(f"told to stop while waiting for {what}")
            if now - began >= self._config.patience_s:
                raise NoRoom(
                    f"waited {now - began:.0f} s for {what}, and the cluster has {_words(ray.available_resources())} free; "
                    "resources.patience_s sets the limit"
                )
            if now - said >= SAY_S:
                free, said = _words(ray.available_resources()), now
                logger.warning("waiting for %s: %.0f s so far; the cluster has %s free", what, now - began, free)

    # ---- processes ---------------------------------------------------------------------------------------------------

    def launch(self, kind: Kind, module: str, *, name: str, descriptors: Sequence[int] = ()) -> RayWorker:
        """See `millstream.rpc.process.Launcher`. Ray hears late that a node is gone, and may have put it there: then it is put
        elsewhere, which is nobody's failure."""
        began = time.monotonic()
        while True:
            try:
                return self._launch(kind, module, name)
            except NodeGone:
                if time.monotonic() - began >= self._config.patience_s:
                    raise
                logger.warning("%s is started again, elsewhere: its node is gone", name)

    def _launch(self, kind: Kind, module: str, name: str) -> RayWorker:
        cpus, gpus = self._config.shares(kind)
        ticket, options = secrets.token_hex(16), self._options(kind, name)
        calling = self._switchboard.expect(ticket)
        actor: Any = None
        try:
            actor = ray.remote(RayProcess).options(num_cpus=cpus, num_gpus=gpus, max_restarts=0, **options).remote()
            sitting = actor.run.remote(module, self.host, self._switchboard.port, ticket, self.is_on_loopback).future()
            self._wait([calling, sitting], f"{name} ({_words({'CPU': cpus, 'GPU': gpus})}) to start")
            if not calling.done() and sitting.done():
                raise _failure(f"{name} ended before it could call", sitting)
        except BaseException as error:  # whatever it is, nobody waits for that process any more
            self._switchboard.forget(ticket)
            _kill(actor)
            if isinstance(error, ray.exceptions.RayError):
                raise ClusterError(f"{name} could not be started: {_last_line(error)}") from error
            raise
        line, hello = calling.result()
        return RayWorker(actor, sitting, line, hello)

    def _options(self, kind: Kind, name: str) -> dict[str, Any]:
        """Engines and ranks have a bundle of the group; one that was added later takes what is free."""
        bundle = self._placement.bundle_of(kind, name)
        if self._group is None or bundle is None:
            return {}
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return {"scheduling_strategy": strategy}

    def close(self) -> None:
        if hasattr(self, "_switchboard"):
            self._switchboard.close()
        if self._group is not None and ray.is_initialized():
            remove_placement_group(self._group)
        if self._is_ours:
            ray.shutdown()
        if self._folder:
            folders.remove(Path(self._folder))


class RayWorker:
    """A process on some node. See `millstream.rpc.process.WorkerProcess`."""

    def __init__(self, actor: Any, sitting: Future[None], line: socket.socket, hello: Hello) -> None:
        self._actor = actor
        self._sitting = sitting
        self.connection = line
        self.pid = hello.pid
        self.node = hello.node

    def kill(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # it hears that, and ends all that it has started
        _kill(self._actor)

    def exit_reason(self, timeout_s: float | None = None) -> str | None:
        if not futures.wait([self._sitting], timeout_s).done:
            return None
        return f"its process {self.pid} ended: {_why(self._sitting)}"

    @property
    def has_died(self) -> bool:
        """One that has done its work ends itself, which Ray tells from a death. Of a node that is gone Ray hears late: whoever
        hangs up before that has died."""
        if not self._sitting.done():
            return True
        error = self._sitting.exception()
        return error is not None and "exit_actor" not in str(error)


class ConnectionListener:
    """Where processes call: each with a ticket that somebody waits with, or it is hung up on."""

    def __init__(self, host: str) -> None:
        self._server = socket.create_server((host, 0), backlog=256)
        self.port: int = self._server.getsockname()[1]
        self._expected: dict[str, Future[tuple[socket.socket, Hello]]] = {}
        self._is_closed = False
        threading.Thread(target=self._accept, name="switchboard", daemon=True).start()

    def expect(self, ticket: str) -> Future[tuple[socket.socket, Hello]]:
        self._expected[ticket] = Future()
        return self._expected[ticket]

    def forget(self, ticket: str) -> None:
        self._expected.pop(ticket, None)

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._server.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(AGAIN_S)  # out of descriptors, say, or the caller has gone: others will call
                continue
            threading.Thread(target=self._answer, args=(line,), name="a call", daemon=True).start()

    def _answer(self, line: socket.socket) -> None:
        """Whoever says nothing, or nothing sensible, is not waited for."""
        line.settimeout(HELLO_S)
        try:
            said = Frames(line, HELLO_BYTES).first()
            hello = msgspec.msgpack.decode(said or b"", type=Hello)
            expected = self._expected.pop(hello.ticket, None)
        except (msgspec.MsgspecError, OSError):
            expected = None
        if expected is None:
            line.close()
            return
        line.settimeout(None)
        keep_alive(line)
        expected.set_result((line, hello))

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def _words(resources: Mapping[str, float]) -> str:
    known = {kind: number for kind, number in resources.items() if kind in ("CPU", "GPU")}
    return ", ".join(f"{number:g} {kind}" for kind, number in known.items()) or "nothing"


def _failure(what: str, sitting: Future[None]) -> ClusterError:
    why = _why(sitting)
    return NodeGone(f"{what}: {why}") if why == NODE_GONE else ClusterError(f"{what}: {why}")


def _why(sitting: Future[None]) -> str:
    """In as few words as Ray allows."""
    error = sitting.exception()
    said = str(error) if error is not None else ""
    if "its node has died" in said or "node was terminated" in said:
        return NODE_GONE
    if isinstance(error, ray.exceptions.RayTaskError):  # it raised: that is told, not where
        return _last_line(error)
    return "killed or crashed" if said else "it went"


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _kill(actor: Any) -> None:
    """Of a cluster that is closed there is nothing left to end: asked for it, Ray would start another one."""
    if actor is not None and ray.is_initialized():
        with suppress(ValueError, ray.exceptions.RayError):
            ray.kill(actor)
