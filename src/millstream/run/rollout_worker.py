"""Rollout workers: how a run starts them, and what runs in their processes. Imports torch.

A worker (`pipeline.worker_host`) has the environments and rewards of the config, the tokenizer, a client of the store, and
lines to the engines. It starts processes of environments and rewards itself, and serves its agents, on its own node.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import logging
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct, structs
from transformers import PreTrainedTokenizerBase

from millstream.clock import RealClock
from millstream.decoding import msgpack_decoder
from millstream.engine.native.lines import LineEngine
from millstream.env.config import EnvironmentConfig
from millstream.env.registry import Environments
from millstream.env.resolve import find_environment
from millstream.env.rewards import RewardConfig, prepare_rewards
from millstream.events.sinks import Tee
from millstream.model.load import load_tokenizer, set_up_cpu
from millstream.pipeline.worker_host import HostSetup, OnBroken, OpenLine, ToDriver, ToWorker, WorkerHost
from millstream.pipeline.workers import NUM_CHECKS, OnExit, OnMessage, WorkerPlan
from millstream.rpc.call import Channel, Packet, PacketKind, Remote
from millstream.rpc.process import Launcher, LocalLauncher, own_node
from millstream.rpc.serve import end_process, exit_with
from millstream.run.build import build_environment
from millstream.run.config import RunConfig
from millstream.run.garbage import seldom_collected
from millstream.run.text import TokenizerText
from millstream.store.client import StoreClient
from millstream.store.coordinator import StorePlan
from millstream.store.host import connect_here

ROLLOUT_WORKER = "millstream.run.rollout_worker:serve_rollouts"


class RolloutWorkerSetup(Struct, frozen=True, kw_only=True):
    host: HostSetup
    environment: tuple[EnvironmentConfig, ...]
    reward: tuple[RewardConfig, ...]
    takes_stops: bool  # whether the engine looks for stop strings
    tokenizer: dict[str, bytes]  # its files
    trusts_code: bool  # whether the tokenizer may have code of its own
    store: StorePlan
    path: list[str]  # sys.path of the run: a worker finds the same modules


def plan_workers(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    store: tuple[StorePlan, StoreClient],
    launcher: Launcher | None,
    *,
    has_lines: bool,
) -> WorkerPlan:
    """`store`: that of the run. `launcher`: starts processes on a cluster. None: on this machine."""
    with tempfile.TemporaryDirectory(prefix="millstream-") as folder:
        tokenizer.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
    num, (plan, client) = config.rollout.workers, store
    setup = functools.partial(
        RolloutWorkerSetup,
        environment=tuple(_shared(one, num) for one in config.environment),
        reward=tuple(config.reward),
        takes_stops=config.engine.takes_stops,
        tokenizer=files,
        trusts_code=config.model.trust_remote_code,
        store=plan,
        path=sys.path,
    )

    def start(number: int, host: HostSetup, on_message: OnMessage, on_exit: OnExit) -> WorkerRemote:
        name = f"rollouts-{number}"
        launch = functools.partial(
            (launcher or LocalLauncher(is_warm=True)).launch, "rollout", ROLLOUT_WORKER, name=name
        )
        return WorkerRemote(
            launch,
            setup(host=host),
            name=name,
            messages=ToDriver,
            on_message=on_message,
            on_exit=on_exit,
            loop=asyncio.get_running_loop(),
        )

    return WorkerPlan(num, start, client, has_lines)


def _shared(config: EnvironmentConfig, num: int) -> EnvironmentConfig:
    """One worker's share of the episodes that may run at once."""
    most = config.max_concurrent
    return config if most is None else structs.replace(config, max_concurrent=most // num)


class WorkerRemote(Remote):
    async def shut(self) -> None:
        await asyncio.to_thread(self.close)


# ---- in the worker's process -----------------------------------------------------------------------------------------------


def serve_rollouts(connection: socket.socket) -> None:
    """The life of a worker: until it is closed, or its connection is."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    threading.Thread(target=exit_with, args=(connection,), name="connection", daemon=True).start()
    set_up_cpu()
    asyncio.run(_Process(connection).run())


class _Process:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._channel = Channel(connection)
        self._closed = asyncio.Event()
        self._waiting: list[Packet] = []  # packets that came before the worker was built
        self._arrived = asyncio.Event()
        self._host: WorkerHost | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._connection, self._on_readable)
        await self._arrived.wait()
        first = self._waiting.pop(0)
        if first.kind is PacketKind.CLOSE:
            return
        environment: Environments | None = None
        try:
            setup: RolloutWorkerSetup = msgpack_decoder(RolloutWorkerSetup).decode(first.body)
            environment = build_environments(setup)
            store = await _connect_store(setup.store)
            host = WorkerHost(self._channel, setup.host, environment, store, _connect_engine, RealClock())
        except Exception as error:  # process boundary: the driver gets the reason
            self._channel.fail(first.number, error)
        else:
            self._channel.answer(first.number, None)
            _exit_if_blocked(loop, setup.host.blocked_s)
            self._take(host)
            with seldom_collected():
                await self._closed.wait()
            await store.close()
        if environment is not None:
            await environment.close()
        await asyncio.to_thread(self._channel.drain, 1.0)

    def _on_readable(self) -> None:
        packets = self._channel.receive(block=False)
        if packets is None:
            end_process()
        self._waiting += packets or []
        if self._waiting:
            self._arrived.set()
        if self._host is not None:
            self._take(self._host)

    def _take(self, host: WorkerHost) -> None:
        self._host = host
        packets = self._waiting
        self._waiting = []
        for packet in packets:
            if packet.kind is PacketKind.CLOSE:
                self._closed.set()
            else:
                host.handle(msgpack_decoder(ToWorker).decode(packet.body), packet.number)


def build_environments(setup: RolloutWorkerSetup) -> Environments:
    sys.path[:] = [*dict.fromkeys([*setup.path, *sys.path])]
    with tempfile.TemporaryDirectory(prefix="millstream-") as folder:
        for name, data in setup.tokenizer.items():
            (Path(folder) / name).write_bytes(data)
        text = TokenizerText(tokenizer=load_tokenizer(folder, trust_remote_code=setup.trusts_code))
    rewards = prepare_rewards(setup.reward)
    kinds = [find_environment(config) for config in setup.environment]
    return build_environment(kinds, text, rewards, ends=setup.host.sampling.stop, takes_stops=setup.takes_stops)


async def _connect_store(plan: StorePlan) -> StoreClient:
    if own_node():
        from millstream.cluster.store import connect  # Ray is an extra

        return await connect(plan, "rollouts")
    return await connect_here(plan, "rollouts")


def _connect_engine(order: OpenLine, on_version: Callable[[], None], on_broken: OnBroken) -> LineEngine:
    return LineEngine(order.engine, order.slots, order.line, on_version, on_broken, clock=RealClock(), sink=Tee([]))


def _exit_if_blocked(loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
    """An environment or a reward that blocks the event loop stops every rollout of the worker: it ends, and is replaced."""
    num_turns = 0

    def turn() -> None:
        nonlocal num_turns
        num_turns += 1
        loop.call_later(1.0, turn)

    def watch() -> None:
        wait_until_blocked(lambda: num_turns, limit_s)
        faulthandler.dump_traceback(all_threads=True)
        end_process()

    turn()
    threading.Thread(target=watch, name="event loop watchdog", daemon=True).start()


def wait_until_blocked(
    num_turns: Callable[[], int], limit_s: float, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Returns when the event loop has not turned for `limit_s`. The time in which the whole process was paused, or the machine
    suspended, counts as one check of several: the loop turns before the next."""
    num_missed = 0
    while num_missed < NUM_CHECKS:
        before = num_turns()
        sleep(limit_s / NUM_CHECKS)
        num_missed = num_missed + 1 if num_turns() == before else 0
