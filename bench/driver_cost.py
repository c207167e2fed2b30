"""What does the driver of a run handle per rollout, and how many turns a second do rollout workers play?

1. Bytes through the driver's sockets and its processor time per rollout, for rollouts of 100, 1,000 and 10,000 tokens: played
   in the driver (`rollout.workers = 0`) and by one worker; then with two ranks of a learner as well, to which the driver sends
   the rows, or which read them from the store by themselves.
2. Turns a second with 1, 2, 4, ... workers (`--workers`), and as many times the groups in flight and in a batch, always with
   as many engines as the most workers; and which process has how much of a core: the busiest is what limits the rate. It
   needs twice as many cores as there are workers. Also printed: how independent processes scale on this machine
   (`bench/machine.py`), because logical CPUs share cores, and cores share a power budget.

Engines are processes with Millstream's own protocol that answer a request at once, without a model; ranks are processes that
read every number of their rows, and compute nothing; without ranks the learner does nothing. All else is that of a run:
pipeline, router, lines, store, events, worker processes. Rollouts are not kept (`rollout.keep_gb = 0`). The figures of a run
begin after its first third.

    .venv/bin/python bench/driver_cost.py [--json] [--smoke] [--tokens 100,1000,10000] [--workers 1] [--steps 60]
    .venv/bin/python bench/driver_cost.py --tokens 1000 --turns 16 --workers 1,2,4,8     # a machine with 16 cores or more
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import os
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import psutil
from msgspec import Struct

import machine
from internals import (
    Algorithm,
    Channel,
    FrameProtocol,
    Frames,
    JsonlSink,
    LocalChannel,
    LocalLauncher,
    MemoryStore,
    Parts,
    Pipeline,
    Router,
    SharedStore,
    SimLearner,
    Waits,
    derive_seed,
    grpo,
    make_plan,
    seldom_collected,
    store_tasks,
)
from millstream import PipelineConfig, RolloutConfig, RunConfig
from millstream.clock import RealClock
from millstream.env import Context
from millstream.events import Event, RolloutEnded, Stepped
from millstream.types import Completion, ComputePath, Finish, Metrics, Request, RequestKey, Sampling, Task, Weights
from report import Options, Row, alone, cost, publish, rate, say

GROUPS, MEMBERS, SHOWN = 16, 8, 16
STEP_S = 600.0


# ---- engines that answer at once ---------------------------------------------------------------------------------------


class InstantSetup(Struct, frozen=True):
    num_tokens: int


class InstantBatcher:
    """In place of `engine.native.batching.Batcher`: a request is answered in the next step."""

    swap_s = cache_used = 0.0
    num_preempted = num_drafted = num_accepted = waiting = 0
    path = ComputePath("instant")

    def __init__(self, num_tokens: int) -> None:
        self.version = 0
        self.tokens_generated = 0
        self._tokens = tuple(7 + number % 50 for number in range(num_tokens))
        self._logprobs = (-0.5,) * num_tokens
        self._requests: deque[Request] = deque()

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def running(self) -> int:
        return len(self._requests)

    @property
    def counts(self) -> tuple[int, int, int, int]:
        return self.tokens_generated, 0, 0, 0

    def add(self, request: Request, *, is_watched: bool = False) -> None:
        self._requests.append(request)

    def take_unreported(self) -> list[Any]:
        return []

    def abort(self, key: RequestKey) -> list[tuple[RequestKey, Completion]]:
        found = [request for request in self._requests if request.key == key]
        for request in found:
            self._requests.remove(request)
        return [(key, Completion(tokens=(), logprobs=(), versions=(), finish=Finish.ABORT)) for _ in found]

    def abort_all(self) -> list[tuple[RequestKey, Completion]]:
        return [ended for request in list(self._requests) for ended in self.abort(request.key)]

    def load(self, version: int, weights: Weights) -> None:
        self.version = version

    def settle(self) -> list[tuple[RequestKey, Completion]]:
        return []

    def step(self) -> list[tuple[RequestKey, Completion]]:
        requests = list(self._requests)
        self._requests.clear()
        return [(request.key, self._answer(request)) for request in requests]

    def _answer(self, request: Request) -> Completion:
        num = min(len(self._tokens), request.sampling.max_tokens)
        self.tokens_generated += num
        return Completion(
            tokens=self._tokens[:num], logprobs=self._logprobs[:num], versions=(self.version,) * num, finish=Finish.STOP
        )


def serve_instant(connection: socket.socket) -> None:
    from internals_torch import ChannelLink, DecodeWorker

    class InstantLink(ChannelLink):
        def weights(self) -> Weights:
            return {}

        def release(self) -> None: ...

    link = InstantLink(connection)
    setup = link.first(InstantSetup)
    if setup is not None:
        link.open_lines()
        link.begin(lambda ref: "")
        DecodeWorker(InstantBatcher(setup.num_tokens), link).run()  # type: ignore[arg-type]
        link.drain()


def instant_engine(name: str, num_tokens: int, sink: Any) -> Any:
    from internals_torch import ProcessHost, TorchEngine

    class InstantHost(ProcessHost):
        def offer(self, version: int, weights: Weights) -> str:
            """There are none."""
            return ""

    host = InstantHost(
        lambda: LocalLauncher().launch("engine", "driver_cost:serve_instant", name=name),
        InstantSetup(num_tokens),
        lambda version, weights: None,  # type: ignore[arg-type, return-value]
        name=name,
        answer_s=300.0,
    )
    return TorchEngine(host, slots=256, max_length=None, clock=RealClock(), sink=sink, name=name)


# ---- ranks that compute nothing ----------------------------------------------------------------------------------------


def serve_instant_rank(connection: socket.socket) -> None:
    """In place of `learner.rank_worker.serve_rank`."""
    from internals_torch import RankMessage, RankSetup, StoreReader, messages, serve_calls, tally_of

    def begin(setup: RankSetup) -> Any:
        store = StoreReader("rank")

        def handle(message: Any) -> Any:
            match message:
                case messages.OpenStore():
                    return store.open(message)
                case messages.Accumulate(passes):
                    rows = [row for some in passes for row in store.rows(some)]
                    return float(sum(row.logprobs.sum() + row.tokens.sum() for row in rows)) * 0.0
                case messages.TakeTally():
                    return tally_of(0.0)
            return None

        return handle

    serve_calls(Channel(connection), RankSetup, begin, RankMessage)


def instant_ranks(num_ranks: int, store: Any) -> Any:
    """A learner of processes. `store`: see `FsdpLearner`."""
    from internals_torch import instant_model, processes, ranks_of

    with patch.object(processes, "RANK_WORKER", "driver_cost:serve_instant_rank"):
        return ranks_of(instant_model(), num_ranks, store=store, records_ratios=False)


# ---- the environment ---------------------------------------------------------------------------------------------------


async def play(context: Context, num_turns: int = 4) -> float:
    """Plays `num_turns` turns on average, from 0.5 to 1.5 times that, each after a few tokens. With the same number for all, a
    worker's rollouts would end together, and wait together for the driver."""
    shown = list(range(SHOWN))
    for _ in range(num_turns // 2 + derive_seed(context.seed, "turns") % (num_turns + 1)):
        await context.generate(shown)
    return float(derive_seed(context.seed, "reward") % 2)


# ---- a run -------------------------------------------------------------------------------------------------------------


class IdleLearner(SimLearner):
    reads_store = True

    async def accumulate(self, rows: Sequence[Any]) -> None: ...

    async def step(self) -> Metrics:
        return {}


class Counted(NamedTuple):
    rollouts: int
    bytes: int
    processor_s: dict[str, float]  # by process
    at: float


DRIVER = "the driver"


class Measured(NamedTuple):
    """Of one run, after its first third."""

    bytes_per_rollout: float
    processor_ms: float
    turns_per_s: float
    shares: dict[str, float]  # of a core, by process; the busiest of a kind


class CountingSink:
    """Writes events as a run does, and counts."""

    def __init__(self, path: Path, begin: int, end: int) -> None:
        self._file = JsonlSink(path)
        self._marks = {begin, end}
        self.num_rollouts = 0
        self.num_bytes = 0
        self.counted: list[Counted] = []
        self.find: Callable[[], dict[str, psutil.Process]] = dict
        self._processes: dict[str, psutil.Process] = {}

    def emit(self, event: Event) -> None:
        self._file.emit(event)
        if isinstance(event, RolloutEnded):
            self.num_rollouts += 1
        elif isinstance(event, Stepped) and event.version in self._marks:
            self._processes = self._processes or self.find()
            used = {name: sum(process.cpu_times()[:2]) for name, process in self._processes.items()}
            used[DRIVER] = time.process_time()
            self.counted.append(Counted(self.num_rollouts, self.num_bytes, used, time.monotonic()))

    def close(self) -> None:
        self._file.close()

    @contextmanager
    def counting_bytes(self) -> Iterator[None]:
        """Of every connection of this process that carries frames."""
        send, receive = Channel._write, Frames._receive
        tell, hear = FrameProtocol._write, FrameProtocol.data_received

        def counted_send(channel: Channel, data: bytes) -> None:
            self.num_bytes += len(data)
            send(channel, data)

        def counted_receive(frames: Frames, **options: Any) -> list[bytes] | None:
            found = receive(frames, **options)
            self.num_bytes += sum(map(len, found or ()))
            return found

        def counted_tell(protocol: FrameProtocol, data: bytes) -> None:
            self.num_bytes += len(data)
            tell(protocol, data)

        def counted_hear(protocol: FrameProtocol, data: bytes) -> None:
            self.num_bytes += len(data)
            hear(protocol, data)

        with (
            patch.object(Channel, "_write", counted_send),
            patch.object(Frames, "_receive", counted_receive),
            patch.object(FrameProtocol, "_write", counted_tell),
            patch.object(FrameProtocol, "data_received", counted_hear),
        ):
            yield


def config_of(num_workers: int, options: argparse.Namespace) -> RunConfig:
    from internals_torch import EnvironmentConfig, ModelConfig, TinyConfig

    return RunConfig(
        model=ModelConfig(tiny=TinyConfig()),
        environment=(EnvironmentConfig(use=f"{__file__}:play", args={"num_turns": options.turns}),),
        rollout=RolloutConfig(group_size=MEMBERS, workers=num_workers, keep_gb=0.0, max_tokens=1 << 20),
        pipeline=PipelineConfig(
            steps=options.steps,
            groups_per_step=GROUPS * max(1, num_workers),
            max_lag=2,
            filter_zero_signal=False,
            deadline_s=STEP_S,
        ),
    )


class Ranks(NamedTuple):
    """Of the learner. 0: it does nothing."""

    num: int = 0
    read_store: bool = False


NO_RANKS = Ranks()


async def one_run(num_tokens: int, num_workers: int, ranks: Ranks, options: argparse.Namespace) -> Measured:
    from internals_torch import (
        TokenizerText,
        build_environment,
        find_environment,
        plan_workers,
        store_access,
        tokenizer_of,
    )

    config = config_of(num_workers, options)
    tokenizer = tokenizer_of(config.model)
    reads = store_tasks([], has_critic=False, has_proximal=False, is_in_lockstep=False)
    with tempfile.TemporaryDirectory() as folder:
        sink = CountingSink(Path(folder) / "events.jsonl", options.steps // 3, options.steps)
        names = [f"engine-{number}" for number in range(options.engines)]
        engines = [instant_engine(name, num_tokens // options.turns - SHOWN, sink) for name in names]
        shared = SharedStore(make_plan(reads)) if num_workers else None
        client = None if shared is None else await shared.connect("pipeline")
        plan = None
        if shared is not None and client is not None:
            plan = plan_workers(config, tokenizer, (shared.plan, client), None, has_lines=True)
        kinds = [find_environment(one) for one in config.environment]
        environment = build_environment(kinds, TokenizerText(tokenizer=tokenizer), [])
        learner: Any = IdleLearner()
        if ranks.num:
            access = None if shared is None or not ranks.read_store else store_access(shared.plan)
            learner = instant_ranks(ranks.num, lambda: access)
        channel, clock = LocalChannel(), RealClock()
        await channel.publish(0, {})
        parts = Parts(
            engines=tuple(engines),
            environment=environment,
            learner=learner,
            store=client or MemoryStore(reads),
            channel=channel,
            clock=clock,
            sink=sink,
            waits=Waits(clock=clock, sink=sink, stall_s=STEP_S, deadline_s=STEP_S),
            workers=plan,
        )
        tasks = ((0, Task(id=f"task-{number}", prompt="?")) for number in itertools.count())
        algorithm = Algorithm(advantage=grpo, sampling=Sampling(max_tokens=1 << 20), micro_batch_tokens=1 << 20)
        router = Router(engines, patience_s=STEP_S, clock=clock, sink=sink)
        pipeline = Pipeline(
            parts, tasks, algorithm, config=config.pipeline, rollout=config.rollout, seed=0, router=router
        )
        sink.find = functools.partial(processes_of, engines, pipeline)
        try:
            with sink.counting_bytes(), seldom_collected():
                await pipeline.run()
        finally:
            for engine in engines:
                await engine.close()
            if ranks.num:
                await learner.close()
            if shared is not None and client is not None:
                await client.close()
                await asyncio.to_thread(shared.close)
            sink.close()
    begin, end = sink.counted
    return measured(begin, end, options.turns)


def processes_of(engines: Sequence[Any], pipeline: Any) -> dict[str, psutil.Process]:
    """All but the driver, by name: engines, rollout workers, the store's coordinator."""
    workers = [] if pipeline._workers is None else pipeline._workers._workers
    remotes = {f"engine {number}": engine._host.remote for number, engine in enumerate(engines)}
    remotes |= {f"worker {worker.number}": worker.remote for worker in workers}
    found = {name: psutil.Process(remote.process.pid) for name, remote in remotes.items()}
    for child in psutil.Process().children():
        if "millstream.store.host" in child.cmdline():
            found["store"] = child
    return found


def measured(begin: Counted, end: Counted, turns: int) -> Measured:
    rollouts, seconds = end.rollouts - begin.rollouts, end.at - begin.at
    shares: dict[str, float] = {}
    for name, used in end.processor_s.items():
        kind = {"engine": "the busiest engine", "worker": "the busiest worker", "store": "the store"}.get(
            name.split()[0], name
        )
        shares[kind] = max(shares.get(kind, 0.0), (used - begin.processor_s.get(name, used)) / seconds)
    driver_ms = 1000 * seconds * shares[DRIVER] / rollouts
    return Measured((end.bytes - begin.bytes) / rollouts, driver_ms, rollouts * turns / seconds, shares)


@functools.cache
def measure(
    num_tokens: int, num_workers: int, engines: int, steps: int, turns: int, ranks: Ranks = NO_RANKS
) -> Measured:
    options = argparse.Namespace(engines=engines, steps=steps, turns=turns)
    found = asyncio.run(one_run(num_tokens, num_workers, ranks, options))
    shares = ", ".join(f"{name} {share:.0%}" for name, share in found.shares.items())
    say(
        f"{num_tokens} tokens, {num_workers} workers, {ranks}: {found.turns_per_s:,.0f} turns/s, "
        f"{found.bytes_per_rollout:,.0f} bytes and {found.processor_ms:.3f} ms of the driver per rollout; of a core: {shares}"
    )
    return found


def driver_rows(options: argparse.Namespace) -> Iterator[Row]:
    for num_tokens in options.tokens:
        what = f"rollouts of {num_tokens:,} tokens, {options.turns} turns"
        of = functools.partial(measure, num_tokens, engines=1, steps=options.steps, turns=options.turns)
        yield from cost_rows(what, of(1), "rollout.workers = 0", of(0))
        read, sent = of(1, ranks=Ranks(2, read_store=True)), of(1, ranks=Ranks(2, read_store=False))
        yield from cost_rows(f"{what}, 2 ranks that read the store", read, "the driver sends the rows", sent)


def cost_rows(workload: str, ours: Measured, peer: str, theirs: Measured) -> Iterator[Row]:
    what = "bytes through the driver's sockets per rollout"
    yield cost(workload, what, ours.bytes_per_rollout, peer, theirs.bytes_per_rollout, digits=0)
    yield cost(workload, "ms of the driver's processor per rollout", ours.processor_ms, peer, theirs.processor_ms)


def turn_rows(options: argparse.Namespace) -> Iterator[Row]:
    first: Measured | None = None
    for num_workers in options.workers:
        found = measure(options.tokens[0], num_workers, max(options.workers), options.steps, options.turns)
        workload = f"{num_workers} workers, rollouts of {options.tokens[0]:,} tokens, {os.cpu_count()} cores"
        if first is None:
            first = found
            yield alone(workload, "turns/s", found.turns_per_s, digits=0)
        else:
            linear = first.turns_per_s * num_workers / options.workers[0]
            yield rate(workload, "turns/s", found.turns_per_s, "linear in workers", linear, digits=0)
            scaling = machine.scaling(num_workers) / machine.scaling(options.workers[0])
            peer = "linear in workers, as far as independent processes scale on this machine"
            yield rate(workload, "turns/s", found.turns_per_s, peer, linear * scaling, digits=0)
        yield alone(workload, "ms of the driver's processor per rollout", found.processor_ms)
        yield alone(workload, "the driver's share of a core", found.shares[DRIVER])
        busiest, share = max(found.shares.items(), key=lambda one: one[1])
        yield alone(workload, f"the busiest process is {busiest}: its share of a core", share)


def numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",") if one]


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--tokens", [100, 1000, 10000], smoke=[100], kind=numbers, help="of a rollout, all turns together")
    parser.add("--workers", [1], smoke=[1], kind=numbers, help="numbers of workers for turns/s")
    parser.add("--turns", 4, help="of a rollout, on average; an even number")
    parser.add("--steps", 60, smoke=6, help=f"of a run; each trains {GROUPS} groups of {MEMBERS}")
    options = parser.parse(argv)
    if options.turns % 2:
        parser.error(f"--turns is {options.turns}: expected an even number")
    rows = list(driver_rows(options)) if options.workers[0] <= 1 and len(options.workers) == 1 else []
    publish([*rows, *turn_rows(options)], options)


if __name__ == "__main__":
    main()
