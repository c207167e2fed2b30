"""What a run asks of Ray for every kind of process: CPUs, GPUs, its bundle or how it is scheduled, the function that it runs, and
the device and the rank that its setup names. No cluster is started: Ray's part is faked."""

from __future__ import annotations

import asyncio
import socket
import threading
import tomllib
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest

from millstream.algo.recipe import Recipe
from millstream.clock import RealClock
from millstream.config import convert
from millstream.errors import MillstreamError
from millstream.events.sinks import MemorySink
from millstream.rpc.call import Channel
from millstream.rpc.frames import frame
from millstream.rpc.process import engine_names
from millstream.run.backend import BackendContext
from millstream.run.config import RunConfig
from millstream.run.places import place
from support.tiny import make

pytest.importorskip("ray")
from millstream.cluster import driver
from millstream.cluster.actor import RayHello
from millstream.run.ray_backend import RayBackend

ENGINE = "millstream.engine.native.process:serve_engine"
VLLM = "millstream.engine.vllm.worker:serve_vllm"
NUMBER = {"rollout": 1, "environment": 2, "reward": 3, "stage": 4}
RANK = "millstream.learner.rank_worker:serve_rank"


class Asked(NamedTuple):
    """An actor that a run wanted."""

    target: str
    sees_gpus: bool
    options: dict[str, Any]
    setup: dict[str, Any] | None

    @property
    def shares(self) -> tuple[float, float]:
        return self.options["num_cpus"], self.options["num_gpus"]

    @property
    def bundle(self) -> int | str | None:
        """Of the run's placement group; or how Ray is to place it."""
        strategy = self.options.get("scheduling_strategy")
        return strategy if strategy is None or isinstance(strategy, str) else strategy.placement_group_bundle_index


class FakedRay:
    """A cluster with room for everything. An actor connects, takes its setup, and is gone when all of `together` have theirs."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[Asked] = []
        self.groups: list[tuple[list[dict[str, float]], str]] = []
        self.together = 1
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        done: Future[None] = Future()
        done.set_result(None)
        group = SimpleNamespace(ready=lambda: SimpleNamespace(future=lambda: done))
        patch.setattr(
            driver, "placement_group", lambda bundles, strategy: self.groups.append((bundles, strategy)) or group
        )
        patch.setattr(driver, "remove_placement_group", lambda group: None)
        context = SimpleNamespace(get_node_id=lambda: "head")
        known = {"is_initialized": lambda: True, "get_runtime_context": lambda: context, "remote": self._actor_class}
        known |= {"cluster_resources": lambda: {"CPU": 1e3, "GPU": 1e3}, "kill": lambda actor: None}
        for name, value in known.items():
            patch.setattr(driver.ray, name, value)
        patch.setattr(driver.ray.util, "get_node_ip_address", lambda: "127.0.0.1")

    def _actor_class(self, _: Any) -> Any:
        def make_actor(options: dict[str, Any]) -> Any:
            run = SimpleNamespace(
                remote=lambda *arguments: SimpleNamespace(future=lambda: self._run(options, *arguments))
            )
            return SimpleNamespace(run=run)

        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda: make_actor(options)))

    def _run(self, options: dict[str, Any], target: str, host: str, port: int, *more: Any) -> Future[None]:
        _, ticket, sees_gpus = more
        exited: Future[None] = Future()

        def work() -> None:
            connection = socket.create_connection((host, port), timeout=30)
            connection.sendall(frame(RayHello(ticket, 1, "a node")))
            packets = Channel(connection).receive(block=True)
            with self._lock:
                self._open.append(connection)
                setup = msgspec.msgpack.decode(packets[0].body) if packets else None
                self.asked.append(Asked(target, sees_gpus, options, setup))
                if len(self._open) == self.together:
                    while self._open:
                        self._open.pop().close()
            exited.set_result(None)

        threading.Thread(target=work, daemon=True).start()
        return exited


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> FakedRay:
    return FakedRay(monkeypatch)


def config_of(text: str) -> RunConfig:
    small = "[model.tiny]\n[data]\ntoy = 'sort_digits'"
    return place(convert(tomllib.loads(f"runtime = 'ray'\n{text}\n{small}"), RunConfig, where="run.toml"), None)[0]


async def opened(config: RunConfig, folder: Path) -> RayBackend:
    backend = RayBackend(config)
    model = make("llama")
    await backend.open(BackendContext(model=model, tokenizer=None, folder=folder, clock=RealClock(), sink=MemorySink()))
    return backend


async def engines_and_ranks(config: RunConfig, faked: FakedRay, folder: Path, *more: str) -> None:
    """In the order of their numbers. `more`: names of engines that are added later, or replaced."""
    backend = await opened(config, folder)
    for name in (*engine_names(config.engine.num_engines), *more):
        engine = backend.make_engine(name)
        with suppress(MillstreamError):  # its process has ended
            await engine.resume()
        await engine.close()
    faked.together = config.learner.ranks
    learner = backend.build_learner(
        None, learner=config.learner, recipe=Recipe(algorithm=config.algorithm), num_steps=1
    )  # type: ignore[arg-type]
    with suppress(MillstreamError):
        await learner.ready()
    await learner.close()
    await backend.close()


@pytest.mark.parametrize(
    ("text", "target", "engines", "ranks", "spread"),
    [
        ("", ENGINE, [(1, 0)], [(1, 0)], "PACK"),
        ("[resources]\ngpus = 4\n[learner]\nranks = 2", ENGINE, [(1, 1)] * 2, [(1, 1)] * 2, "PACK"),
        ("[resources]\ngpus = 8\nengine_cpus = 4\nspread = 'spread'\n[learner]\nranks = 4\n[engine]\nkind = 'vllm'\n"
         "[engine.vllm]\ntensor_parallel = 2", VLLM, [(4, 2)] * 2, [(1, 1)] * 4, "SPREAD"),
        ("[resources]\ngpus = 2\ncolocate = true\n[learner]\nranks = 2", ENGINE, [(1, 0.5)] * 2, [(1, 0.5)] * 2, "PACK"),
    ],
)  # fmt: skip
def test_engines_and_ranks_get_their_bundle_and_the_device_that_was_asked_for_them(
    text: str, target: str, engines: list[tuple[float, float]], ranks: list[tuple[float, float]], spread: str,
    faked: FakedRay, tmp_path: Path,
) -> None:  # fmt: skip
    config = config_of(text)
    last = engine_names(len(engines))[-1]
    asyncio.run(engines_and_ranks(config, faked, tmp_path, "engine-9", last))
    device, is_together = ("cuda" if ranks[0][1] else "cpu"), "colocate" in text
    first = 0 if is_together else len(ranks)
    own, added, again = faked.asked[: len(engines)], faked.asked[len(engines)], faked.asked[len(engines) + 1]
    assert [(one.target, one.shares, one.bundle) for one in own] == [
        (target, shares, first + number) for number, shares in enumerate(engines)
    ]
    assert (added.target, added.shares, added.bundle) == (target, engines[0], None), "it takes what is free"
    assert (again.shares, again.bundle) == (engines[-1], own[-1].bundle), (
        "a replaced one has the place of its predecessor"
    )
    for one in (*own, added, again):
        assert one.setup is not None and one.sees_gpus == (engines[0][1] > 0)
        assert one.setup.get("device", "cpu" if one.setup.get("is_cpu") else "cuda") == device
    learner = sorted((one for one in faked.asked if one.target == RANK), key=lambda one: one.bundle)
    assert [(one.shares, one.bundle, one.sees_gpus) for one in learner] == [
        (shares, number, device == "cuda") for number, shares in enumerate(ranks)
    ]
    setups = [one.setup or {} for one in learner]
    assert [(one["plan"]["device"], one["place"]["rank"], one["place"]["num_ranks"]) for one in setups] == [
        (device, number, len(ranks)) for number in range(len(ranks))
    ]
    ((bundles, asked),) = faked.groups
    share = {"GPU": 1.0} if is_together else {"GPU": engines[0][1]} if engines[0][1] else {}
    assert asked == spread and len(bundles) == first + len(engines)
    assert {kind: number for kind, number in bundles[-1].items() if kind == "GPU"} == share


def test_other_processes_take_what_is_free_outside_of_the_placement_group(faked: FakedRay, tmp_path: Path) -> None:
    text = "[resources]\nrollout_cpus = 2\nenvironment_cpus = 0.5\nreward_cpus = 3\nreward_gpus = 1\nstage_gpus = 0.5"

    async def launch() -> None:
        backend = await opened(config_of(text), tmp_path)
        for kind in NUMBER:
            worker = await asyncio.to_thread(backend.launch, kind, f"a.module:{kind}", name=kind)  # type: ignore[arg-type]
            worker.connection.close()
            while len(faked.asked) < NUMBER[kind]:
                await asyncio.sleep(0.001)
        await backend.close()

    asyncio.run(asyncio.wait_for(launch(), 30))
    assert [one.target for one in faked.asked] == [f"a.module:{kind}" for kind in NUMBER]
    assert [(one.shares, one.bundle, one.sees_gpus) for one in faked.asked] == [
        ((2, 0), "SPREAD", False),
        ((0.5, 0), None, False),
        ((3, 1), None, True),
        ((0, 0.5), None, True),
    ]
    assert faked.asked[0].options["memory"] == 1 and all(one.options["max_restarts"] == 0 for one in faked.asked)
